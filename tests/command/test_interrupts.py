"""Ctrl-C at every point of a capture: the stream records no longer, and the device works on."""

from __future__ import annotations

import gc
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted, interrupted_after
from sample_kernels import SAXPY

import cuglue
from cuglue import Capture, In, Out, Runtime
from cuglue.errors import CaptureError
from cuglue.exchange.owner import BlockOwner
from cuglue.testing import SimDriver

N = 16
BEFORE_EXIT = f"command/capture.py:{Capture.__exit__.__code__.co_firstlineno}"


@pytest.mark.filterwarnings("ignore:Graph.*never closed:ResourceWarning")  # the interrupt kept it
@pytest.mark.parametrize("points", [interrupted, interrupted_after])
@pytest.mark.parametrize("body", ["plain", "warmup", "raises"])
def test_C31_an_interrupted_capture_leaves_no_stream_recording(body: str, points: Any) -> None:
    for step in itertools.count(1):
        driver = SimDriver()
        with cuglue.use_driver(driver), Runtime(driver=driver) as rt:
            stream = rt.stream(0)
            x, y = rt.create(np.ones(N, "f4"), stream), rt.empty(4 * N, stream)

            def work() -> None:
                rt.launch(SAXPY, 1, N, In(x), Out(y), 2.0, N, stream=stream)  # noqa: B023

            def capture() -> None:
                with rt.capture(stream) as capture:  # noqa: B023
                    if body == "warmup":
                        with capture.warmup():
                            work()
                    work()
                    if body == "raises":
                        raise ZeroDivisionError
                capture.graph.close()

            def program() -> None:
                try:
                    capture()
                except ZeroDivisionError:
                    pass

            where = points(program, step, "command/capture.py", "command/recording.py")
            sys.last_exc = None  # type: ignore[assignment]
            gc.collect()
            found = f"{where}, step {step}"
            if where == BEFORE_EXIT:  # which Python does not run then
                with pytest.raises(CaptureError, match="abandoned"):
                    rt.capture(stream).end()
            assert not stream.capturing, found
            work()
            assert set(rt.read(y, dtype="f4", stream=stream).result().tolist()) == {2.0}, found
            with rt.capture(stream) as again:
                work()
            again.graph.replay()
            rt.synchronize()
            again.graph.close()
        assert driver.hazards == []
        if where is None:
            assert step > (10 if points is interrupted else 3)
            return


def test_an_interrupted_allocation_is_given_back(sim: SimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*anything: object, **more: object) -> None:
        raise KeyboardInterrupt

    with Runtime(driver=sim) as rt:
        with monkeypatch.context() as patch:
            patch.setattr(BlockOwner, "__init__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rt.empty(100)
        sys.last_exc = None  # type: ignore[assignment]
        gc.collect()
        rt.empty(10).close()
        rt.synchronize()
        assert rt.resource.bytes_outstanding == 0
