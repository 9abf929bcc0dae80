"""What a newcomer tries: refused with what was expected, before the driver hears of it, and nothing is changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from sample_kernels import INCREMENT

from cuglue import CopyDescriptor, InOut, Kernel, Out, Runtime
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, CuglueError, LayoutError, OutOfMemory, UsageError

Bad = Callable[[Runtime, Any], Any]
CASES: dict[str, tuple[type[Exception], str, Bad]] = {
    "read nothing": (UsageError, "a CopyDescriptor", lambda rt, x: rt.command().read_async(None)),  # type: ignore[arg-type]
    "read a buffer": (UsageError, "buffer.descriptor", lambda rt, x: rt.command().read_async(x)),
    "read a list of buffers": (UsageError, "buffer.descriptor", lambda rt, x: rt.command().read_async([x])),
    "read text": (UsageError, "a CopyDescriptor", lambda rt, x: rt.command().read_async("ab")),  # type: ignore[arg-type]
    "write to a buffer": (UsageError, "descriptor", lambda rt, x: rt.command().write_to_gpu(x, bytes(16))),
    "write to nothing": (UsageError, "None", lambda rt, x: rt.command().write_to_gpu(None, b"")),  # type: ignore[arg-type]
    "write text": (UsageError, "encode", lambda rt, x: rt.command().write_to_gpu(x.descriptor(16), "abcd")),
    "create text": (UsageError, "encode", lambda rt, x: rt.create("abcd")),
    "fetch from a buffer": (
        UsageError,
        "CopyDescriptor",
        lambda rt, x: rt.command().write_to_cpu(x, bytearray(16)),
    ),
    "fetch into a list": (
        UsageError,
        "list, expected a writable buffer",
        lambda rt, x: rt.command().write_to_cpu(x.descriptor(16), [1, 2]),
    ),
    "fetch into a number": (UsageError, "int", lambda rt, x: rt.command().write_to_cpu(x.descriptor(8), 3)),
    "fetch into a scalar": (
        LayoutError,
        "read-only",
        lambda rt, x: rt.command().write_to_cpu(x.descriptor(8), np.int64(3)),
    ),
    "bind nothing": (UsageError, "bind: got None", lambda rt, x: rt.command().bind(None, x)),  # type: ignore[arg-type]
    "bind to a number": (UsageError, "bind: got 3", lambda rt, x: rt.command().bind(x, 3)),  # type: ignore[arg-type]
    "reserve all addresses": (OutOfMemory, "host memory", lambda rt, x: rt.command().reserve_cpu(1 << 62)),
    "no callback": (UsageError, "a function", lambda rt, x: rt.read(x).add_done_callback(None)),  # type: ignore[arg-type]
    "an array of a buffer": (UsageError, "runtime.read", lambda rt, x: np.asarray(x)),
    "a pickle of a buffer": (UsageError, "runtime.read", lambda rt, x: pickle.dumps(x)),
    "a deep copy of a buffer": (UsageError, "runtime.read", lambda rt, x: copy.deepcopy(x)),
    "a pickle of a view": (UsageError, "runtime.read", lambda rt, x: pickle.dumps(x.array((4,), "i4"))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_newcomer_tries(rt: Runtime, calls: Calls, name: str) -> None:
    error, text, action = CASES[name]
    x = rt.create(np.arange(4, dtype="i4"))
    calls.clear()
    with pytest.raises(error, match=text):
        action(rt, x)
    assert not {call.method for call in calls.made} & {
        "kernel_launch",
        "copy_async" if "callback" not in name else "",
    }
    assert rt.read(x, dtype="i4").result().tolist() == [0, 1, 2, 3]


def test_a_kernel_can_be_sent_to_another_process(rt: Runtime) -> None:
    sent = pickle.loads(pickle.dumps(Kernel(INCREMENT.name, INCREMENT.source, options=("-DX",))))
    assert (sent.name, sent.source, sent.options, sent.sim) == (
        INCREMENT.name,
        INCREMENT.source,
        ("-DX",),
        None,
    )
    assert sent.parameters == INCREMENT.parameters


def test_C39_waiting_for_the_device_does_not_end_a_capture(rt: Runtime, calls: Calls) -> None:
    stream = rt.stream(0)
    x = rt.create(np.zeros(4, "i4"), stream=stream)
    rt.synchronize()
    calls.clear()
    with rt.capture(stream) as capture:
        rt.launch(INCREMENT, 1, 4, InOut(x), 4, 1, stream=stream)
        with pytest.raises(CaptureError, match="wait for the device"):
            rt.synchronize()
        with pytest.raises(CaptureError):
            rt.close()
    assert calls.count("device_synchronize") == 0
    assert not rt.closed
    with capture.graph as graph:
        graph.replay()
        assert set(rt.read(x, dtype="i4", stream=stream).result().tolist()) == {1}


def test_a_list_that_is_fetched_into_is_refused_whatever_its_size(sim: SimDriver) -> None:
    """NumPy would make an array of it, and the bytes would be written where nobody looks."""
    with Runtime() as rt:
        x = rt.create(np.ones(2, "i8"))
        for target in ([0, 0], (0, 0), {0: 0}, None, 1.5):
            with pytest.raises(UsageError):
                rt.command().write_to_cpu(CopyDescriptor(x, (16,), (1,), 1), target)
        out = np.zeros(2, "i8")
        with rt.command(Out(x)) as cmd:
            cmd.write_to_cpu(x.descriptor(2, "i8"), out)
            cmd.synchronize()
        assert out.tolist() == [1, 1]


class DeviceArray:
    """What printing does to an array of CuPy or PyTorch: it copies, waits, and breaks a capture under way."""

    shape, dtype = (4, 4), np.dtype("f4")

    def __init__(self, ptr: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 4),
            "typestr": "<f4",
            "data": (ptr, False),
            "version": 3,
        }

    def __dlpack__(self, **keywords: object) -> Any:
        raise BufferError("not here")

    def __repr__(self) -> str:
        raise AssertionError("printed")


DeviceArray.__module__ = "arrays"

PRINTED: dict[str, Bad] = {
    "undeclared": lambda rt, a: rt.launch(INCREMENT, 1, 1, a, 1, 1),
    "undeclared scalar": lambda rt, a: rt.launch(INCREMENT, 1, 1, InOut(rt.empty(4)), a, 1),
    "use of a command": lambda rt, a: rt.command(a),
    "kernel": lambda rt, a: rt.launch(a, 1, 1),
    "grid": lambda rt, a: rt.launch(INCREMENT, (a, 1), 1, InOut(a), 1, 1),
    "stream": lambda rt, a: rt.create(b"a", stream=a),
    "bind": lambda rt, a: rt.command().bind(a, a),
    "read": lambda rt, a: rt.command().read_async(a),
    "read of a list": lambda rt, a: rt.command().read_async([a]),
    "read past the end": lambda rt, a: rt.read(a, 99, "f4"),
    "write": lambda rt, a: rt.command().write_to_gpu(a, b""),
    "size": lambda rt, a: rt.empty(a),
    "shape": lambda rt, a: rt.read(a, a),
    "progress": lambda rt, a: rt.create(b"", progress=a),
    "pools": lambda rt, a: Runtime(memory=[a]),
    "resource": lambda rt, a: Runtime(resource=a),
    "callback": lambda rt, a: rt.read(rt.create(b"a")).add_done_callback(a),
    "descriptor": lambda rt, a: CopyDescriptor(rt.buffer(4), a, (1,), 4),
}


@pytest.mark.parametrize("bad", PRINTED.values(), ids=PRINTED)
def test_a_refusal_names_an_array_and_does_not_print_it(sim: SimDriver, bad: Bad) -> None:
    with Runtime(driver=sim) as rt, rt.empty(64) as memory:
        array = DeviceArray(memory.ptr)
        with pytest.raises(CuglueError, match=r"arrays\.DeviceArray of shape \(4, 4\), float32"):
            bad(rt, array)
        assert "DeviceArray" in repr(CopyDescriptor(array, (1,), (1,), 4))
