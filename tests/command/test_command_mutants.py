"""What only a removed statement showed: each test here fails if one particular line of commands goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT

import cuglue
from cuglue import InOut, as_stream
from cuglue.command import recording
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.testing import faults


def test_a_capture_whose_end_was_interrupted_and_refused_ends_with_the_next_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with cuglue.use_driver(SimDriver()) as driver, cuglue.Runtime() as runtime:
        stream = as_stream(driver.Stream())
        x = runtime.create(np.zeros(64, "i4"), stream=stream)
        runtime.synchronize()
        capture = runtime.capture(stream)
        capture.__enter__()
        runtime.launch(INCREMENT, 1, 64, InOut(x), 64, 1, stream=stream)
        with monkeypatch.context() as patch, faults.fail("capture_end", persistent=True):
            patch.setattr(recording, "end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                capture.end()
        assert stream.capturing
        stream.state.retire.drain()
        assert not stream.capturing
        x.close()


def test_a_cleanup_frees_what_waited_for_the_end_of_a_capture() -> None:
    with (
        cuglue.use_driver(SimDriver()) as driver,
        cuglue.DirectCudaResource() as resource,
        cuglue.Runtime(resource=resource) as runtime,
    ):
        home = as_stream(driver.Stream())
        x = runtime.create(np.zeros(64, "i4"), stream=home)
        runtime.synchronize()
        driver.capture_begin(home.handle, CaptureMode.RELAXED)
        x.close()
        driver.graph_destroy(driver.capture_end(home.handle))
        assert driver.inventory()["malloc_async"] == 1
        runtime.command().memory_cleanup()
        assert driver.inventory()["malloc_async"] == 0
