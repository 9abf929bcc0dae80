"""The DLPack arguments as a table: what each combination exports, or how it is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuglue.exchange.dlpack import CPU, ExportPlan, Route, negotiate

GPU = (2, 1)
V1 = (1, 0)


def ask(device=GPU, **arguments):
    return negotiate(device, **arguments)


@pytest.mark.parametrize(
    ("stream", "ordered"),
    [(None, 1), (1, 1), (2, 2), (-1, None), (0x7F00, 0x7F00), (np.int64(5), 5)],
)
def test_stream_of_device_memory(stream, ordered):
    assert ask(stream=stream).stream == ordered


@pytest.mark.parametrize("stream", [0, -2, -(2**40)])
def test_stream_numbers_that_the_protocol_forbids(stream):
    with pytest.raises(ValueError, match="stream"):
        ask(stream=stream)


@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize("stream", [True, False, np.True_, 1.0, "1", object(), (1,)])
def test_stream_of_a_wrong_type(device, stream):
    with pytest.raises(TypeError, match="stream"):
        ask(device, stream=stream)


def test_host_memory_takes_no_stream():
    assert ask(CPU).stream is None
    for stream in (-1, 0, 1, 2, 77):
        with pytest.raises(ValueError, match="on the host"):
            ask(CPU, stream=stream)


@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize(
    ("max_version", "versioned"),
    [(None, False), ((0, 0), False), ((0, 8), False), ((1, 0), True), ((1, 3), True), ((1, 99), True), ((2, 0), True),
     ((100, 3), True), ((np.int32(1), np.int32(0)), True)],
)  # fmt: skip
def test_max_version_majors(device, max_version, versioned):
    assert ask(device, max_version=max_version).versioned is versioned


@pytest.mark.parametrize("bad", [1, 1.0, "1.0", (1,), (1, 0, 0), (1.0, 0), ("1", "0"), [1, 0], None])
@pytest.mark.parametrize("name", ["max_version", "dl_device"])
def test_pairs_of_a_wrong_type(name, bad):
    if bad is None:
        assert ask(**{name: bad}).route is Route.VIEW
        return
    with pytest.raises(TypeError, match=name):
        ask(**{name: bad})


@pytest.mark.parametrize(
    ("device", "dl_device", "copy", "route"),
    [
        (GPU, None, None, Route.VIEW),
        (GPU, None, False, Route.VIEW),
        (GPU, None, True, Route.COPY),
        (GPU, GPU, None, Route.VIEW),
        (GPU, GPU, False, Route.VIEW),
        (GPU, GPU, True, Route.COPY),
        (GPU, CPU, None, Route.HOST_COPY),
        (GPU, CPU, True, Route.HOST_COPY),
        (CPU, None, None, Route.VIEW),
        (CPU, CPU, None, Route.VIEW),
        (CPU, CPU, False, Route.VIEW),
        (CPU, CPU, True, Route.COPY),
        (CPU, None, np.True_, Route.COPY),
        (CPU, None, np.False_, Route.VIEW),
    ],
)
def test_route(device, dl_device, copy, route):
    assert ask(device, dl_device=dl_device, copy=copy).route is route


@pytest.mark.parametrize(
    ("device", "dl_device"),
    [(GPU, (2, 0)), (GPU, (2, 2**30)), (GPU, (9, 0)), (GPU, (3, 0)), (GPU, (13, 0)), (GPU, (1, 1)), (CPU, (2, 0)),
     (CPU, (10, 0))],
)  # fmt: skip
def test_other_devices_are_refused(device, dl_device):
    for copy in (None, True, False):
        with pytest.raises(BufferError, match="dl_device"):
            ask(device, dl_device=dl_device, copy=copy)


def test_to_the_host_without_a_copy_is_refused():
    with pytest.raises(BufferError, match="without a copy"):
        ask(dl_device=CPU, copy=False)


@pytest.mark.parametrize("copy", [0, 1, "yes", np.array([1, 2, 3]), object()])
def test_copy_of_a_wrong_type(copy):
    with pytest.raises(TypeError, match="copy"):
        ask(copy=copy)


def test_a_host_copy_waits_on_the_host_whatever_stream_was_named():
    # PyTorch names its stream of the source device along with dl_device; the host has synchronised by then.
    for stream in (None, -1, 1, 2, 99):
        assert ask(dl_device=CPU, stream=stream).stream is None
    with pytest.raises(ValueError, match="stream"):
        ask(dl_device=CPU, stream=0)


@pytest.mark.parametrize("device", [GPU, CPU])
def test_read_only_memory(device):
    assert ask(device, readonly=True, max_version=V1) == ExportPlan(
        Route.VIEW, versioned=True, readonly=True, stream=ask(device).stream
    )
    for legacy in (None, (0, 8)):
        with pytest.raises(BufferError, match="read-only"):
            ask(device, readonly=True, max_version=legacy)
        opened = ask(device, readonly=True, max_version=legacy, legacy_readonly=True)
        assert (opened.versioned, opened.readonly) == (False, False)
        copied = ask(device, readonly=True, max_version=legacy, copy=True)
        assert (copied.route, copied.readonly) == (Route.COPY, False), "the copy belongs to the consumer"
    assert ask(device, readonly=True, max_version=V1, legacy_readonly=True).readonly


def test_writable_memory_is_never_marked():
    for version, copy in itertools.product((None, V1), (None, True, False)):
        assert not ask(max_version=version, copy=copy).readonly


def test_only_type_errors_invite_a_retry():
    """PyTorch, CuPy, JAX and NumPy drop keywords on TypeError: an argument of the right type must never raise it."""
    streams = (None, -2, -1, 0, 1, 2, 1 << 62)
    versions = (None, (0, 0), (1, 0), (2, 0), (-1, 0))
    devices = (None, CPU, GPU, (2, 7), (99, 0), (-1, -1))
    for device, readonly in itertools.product((GPU, CPU), (False, True)):
        for s, v, d, c in itertools.product(streams, versions, devices, (None, True, False)):
            try:
                plan = negotiate(device, stream=s, max_version=v, dl_device=d, copy=c, readonly=readonly)
            except (ValueError, BufferError):
                continue
            assert isinstance(plan, ExportPlan)
            assert not (plan.readonly and not plan.versioned)
            assert plan.stream != 0
            assert plan.stream is None or device == GPU
            assert plan.route is not Route.VIEW or c is not True
