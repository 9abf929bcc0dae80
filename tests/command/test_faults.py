"""Every driver call of every operation fails in turn: nothing is lost, nothing is half done."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT, SAXPY

from cuglue import In, InOut, Out, Runtime
from cuglue.testing import sweep

N = 64


class Subject:
    """A runtime with two buffers, each on its own stream."""

    def __init__(self, driver: Any) -> None:
        self.rt = Runtime(driver=driver)
        self.a = self.rt.create(np.ones(N, "f4"), stream=self.rt.stream(1))
        self.b = self.rt.create(np.zeros(N, "f4"), stream=self.rt.stream(2))
        self.rt.create(
            bytes(4), stream=self.rt.stream(3)
        ).close()  # its host memory is there, and that of reads
        reads = [self.rt.read(x, stream=self.rt.stream(1)) for x in (self.a, self.b)]
        for future in reads:
            future.result()
        self.rt.launch(SAXPY, 1, N, In(self.a), Out(self.b), 1.0, N, stream=self.rt.stream(1))
        for index in (1, 2, 3):  # nothing waits in the drop queues when the operation begins
            self.rt._lanes.lane(self.rt.stream(index)).drops.drain()
        self.rt.synchronize()

    def accounting(self) -> object:
        self.rt._state.retire.drain()  # what could not be freed at once is freed now
        uses = [block.write_seq for block in (self.a.block, self.b.block)]
        return self.rt.resource.bytes_outstanding, uses

    def value(self, buffer: Any) -> set[float]:
        return set(self.rt.read(buffer, dtype="f4", stream=self.rt.stream(1)).result().tolist())

    def end(self, result: Any) -> None:
        if hasattr(result, "close"):
            result.close()
        self.a.close()
        self.b.close()
        self.rt.close()


def launch(s: Subject) -> None:
    s.rt.launch(SAXPY, 1, N, In(s.a), Out(s.b), 3.0, N, stream=s.rt.stream(3))


def create(s: Subject) -> Any:
    return s.rt.create(np.full(N, 5, "f4"), stream=s.rt.stream(3))


def empty(s: Subject) -> Any:
    return s.rt.empty(4 * N, stream=s.rt.stream(3))


def read(s: Subject) -> Any:
    return s.rt.read(s.a, dtype="f4", stream=s.rt.stream(3)).result()


def read_many(s: Subject) -> Any:
    with s.rt.command(In(s.a), In(s.b), stream=s.rt.stream(3)) as cmd:
        return cmd.read_async([s.a.descriptor(N, "f4"), s.b.descriptor(N, "f4")]).result()


def write(s: Subject) -> None:
    with s.rt.command(Out(s.b), stream=s.rt.stream(3)) as cmd:
        cmd.write_to_gpu(s.b.descriptor(N, "f4"), np.full(N, 9, "f4"))


def sync(s: Subject) -> None:
    s.rt.command(InOut(s.a), InOut(s.b), stream=s.rt.stream(3)).sync().result()


CHECKS: dict[str, tuple[Any, Any]] = {
    "launch": (launch, lambda s, result: s.value(s.b) == {3.0}),
    "create": (create, lambda s, result: s.value(result) == {5.0}),
    "empty": (empty, lambda s, result: result.nbytes == 4 * N),
    "read": (read, lambda s, result: set(result.tolist()) == {1.0}),
    "read many": (read_many, lambda s, result: [set(r.tolist()) for r in result] == [{1.0}, {1.0}]),
    "write": (write, lambda s, result: s.value(s.b) == {9.0}),
    "sync": (sync, lambda s, result: True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_fault_sweep(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "cuglue")  # a captured record would keep what its traceback holds
    operation, right = CHECKS[name]

    def check(subject: Subject, result: Any) -> None:
        assert right(subject, result)

    report = sweep(
        operation,
        setup=Subject,
        check=check,
        teardown=lambda subject, result: subject.end(result),
        accounting=Subject.accounting,
        name=name,
    )
    report.check()
    assert report.runs > 0


def test_the_samples_are_used() -> None:
    with Runtime(driver="sim") as rt:
        x = rt.create(np.zeros(N, "i4"))
        rt.launch(INCREMENT, 1, N, InOut(x), N, 2)
        assert set(rt.read(x, dtype="i4").result()) == {2}
        x.close()
