"""What is no argument: each public constructor and method of memory takes it or refuses it by one of our errors."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    CsvSink,
    DebugGuardResource,
    DirectCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    InMemorySink,
    JsonLinesSink,
    LaunchRecorder,
    LoggingResource,
    ManagedResource,
    PerDevice,
    PinnedHostResource,
    PoolResource,
    StatisticsResource,
    StreamPool,
    TraceSink,
    TrackingResource,
)
from cuglue.arguments import shown
from cuglue.errors import ArgumentError, CuglueError, LayoutError, UsageError, UseAfterFree
from cuglue.memory.budget import reserve


class Loud:
    """An array on a device, as far as anybody can see without printing it."""

    shape, dtype = (4,), "float32"

    def __dlpack__(self) -> None: ...

    def __repr__(self) -> str:
        raise AssertionError("printed")


JUNK: list[Any] = [
    None, "x", b"x", 1.5, float("nan"), -1, 2**70, True, object(), [], {}, (), len, 3, np.int64(-3), np.float32(2),
    10**5000, -(10**5000), Loud(), np.zeros(1),
]  # fmt: skip

MAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "direct": (DirectCudaResource, {}),
    "async": (AsyncCudaResource, {}),
    "pinned": (PinnedHostResource, {}),
    "managed": (ManagedResource, {}),
    "pool": (PoolResource, {"upstream": ...}),
    "budget": (GlobalDeviceBudget, {"upstream": ..., "limit": 1 << 20}),
    "logging": (LoggingResource, {"upstream": ..., "sink": InMemorySink()}),
    "statistics": (StatisticsResource, {"upstream": ...}),
    "tracking": (TrackingResource, {"upstream": ...}),
    "guard": (DebugGuardResource, {"upstream": ...}),
    "callback": (FailureCallbackResource, {"upstream": ..., "callback": lambda failure: False}),
    "per device": (PerDevice, {"resources": {}}),
    "stream pool": (StreamPool, {}),
    "recorder": (LaunchRecorder, {}),
}
SINKS = [CsvSink, JsonLinesSink, TraceSink]
#: Called by other layers only, with what those have from us.
INTERNAL = {"block_at", "block_in", "take_back"}


@pytest.fixture
def upstream(sim: Any) -> Iterator[AsyncCudaResource]:
    resource = AsyncCudaResource()
    yield resource
    with warnings.catch_warnings(action="ignore"):
        resource.close()


def made(name: str, upstream: Any, /, **changed: Any) -> Any:
    make, arguments = MAKERS[name]
    given = {key: upstream if value is ... else value for key, value in arguments.items()}
    return make(**{**given, **changed})


def refused_by_name(call: Callable[[], Any]) -> str | None:
    """The error if it is none of ours."""
    try:
        call()
    except CuglueError as error:
        text = str(error)
        return text if "0., 0., 0." in text or "printed" in text else None
    except Exception as error:  # noqa: BLE001 - that is the question
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", MAKERS)
def test_constructors(name: str, upstream: Any) -> None:
    wrong = []
    for parameter in list(inspect.signature(MAKERS[name][0]).parameters):
        for junk in JUNK:
            with warnings.catch_warnings(action="ignore"):
                error = refused_by_name(lambda p=parameter, j=junk: made(name, upstream, **{p: j}))  # type: ignore[misc]
            if error:
                wrong.append(f"{parameter}={shown(junk)}: {error}")
    assert wrong == []


@pytest.mark.parametrize("name", MAKERS)
def test_methods(name: str, upstream: Any) -> None:
    """Each argument in turn is junk while all others are right."""
    wrong = []
    thing, tracker = made(name, upstream), TrackingResource(upstream)
    right = {
        "nbytes": lambda: 16, "stream": lambda: 0, "access": lambda: Access.READ,
        "block": lambda: upstream.allocate(16),
        "block_id": lambda: upstream.allocate(16).id, "a": tracker.snapshot, "b": tracker.snapshot,
    }  # fmt: skip
    for method, _ in inspect.getmembers(type(thing), callable):
        if method.startswith("_") or method in INTERNAL:
            continue
        parameters = inspect.signature(getattr(thing, method)).parameters.values()
        for bad in parameters:
            for junk in JUNK:
                given = {
                    p.name: junk if p is bad else right.get(p.name, lambda: None)()
                    for p in parameters
                    if p is bad or p.default is p.empty
                }
                error = refused_by_name(lambda m=method, g=given: getattr(thing, m)(**g))  # type: ignore[misc]
                if error:
                    wrong.append(f"{method}({bad.name}={shown(junk)}): {error}")
    with warnings.catch_warnings(action="ignore"):
        getattr(thing, "close", lambda: None)()
    assert wrong == []


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("target", [None, 1.5, -1, 3, True, object(), [], {}, (), b"x"])
def test_sinks(sink: Any, target: Any) -> None:
    with pytest.raises(UsageError, match="path"):
        sink(target)


def test_a_mode_is_a_word() -> None:
    """An array is compared item by item, and says nothing as a whole."""
    with pytest.raises(UsageError, match="mode: got a numpy"):
        DirectCudaResource(mode=np.zeros(3))  # type: ignore[arg-type]


def test_a_log_without_a_sink(upstream: Any) -> None:
    """Else each of its records would be dropped, one by one."""
    for sink in (None, "log.csv", print):
        with pytest.raises(UsageError, match="emit"):
            LoggingResource(upstream, sink)  # type: ignore[arg-type]


def test_functions(upstream: Any) -> None:
    wrong = []
    block = upstream.allocate(16)
    budget = GlobalDeviceBudget(upstream, 1000)
    for junk in JUNK:
        for call in (
            lambda j=junk: cuglue.use(j, 0),
            lambda j=junk: cuglue.use(block, j),
            lambda j=junk: cuglue.use(block, 0, j),
            lambda j=junk: reserve(j, 10),
            lambda j=junk: reserve(budget, j),
            lambda j=junk: budget.reserve(10).allocate(j),
            lambda j=junk: budget.reserve(10).allocate(5, j),
        ):
            error = refused_by_name(call)  # type: ignore[arg-type]
            if error:
                wrong.append(f"{shown(junk)}: {error}")
    assert wrong == []


@pytest.mark.parametrize("over", [AsyncCudaResource, PoolResource, DebugGuardResource])
@pytest.mark.parametrize("access", [0, 1, True, 2.0, np.int64(2), "read", None])
def test_an_access_is_a_member_and_nothing_that_equals_one(upstream: Any, over: Any, access: Any) -> None:
    resource = upstream if over is AsyncCudaResource else over(upstream)
    block = resource.allocate(16)
    for call in resource.prepare_block_use, resource.finish_block_use, resource.cancel_block_use:
        with pytest.raises(ArgumentError, match="access"):
            call(block.id, 0, access)
    with pytest.raises(ArgumentError, match="access"):
        cuglue.use(block, 0, access)
    assert block.use_count() == 1, "its allocation"
    resource.deallocate(block)
    resource.close()


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (GlobalDeviceBudget, "limit"), (DebugGuardResource, "canary"), (DebugGuardResource, "quarantine_bytes"),
        (PoolResource, "max_bytes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("junk", [-1, 1.5])
def test_a_number_of_bytes_is_refused_by_the_name_of_its_argument(
    upstream: Any, make: Any, argument: str, junk: Any
) -> None:
    with pytest.raises(LayoutError, match=f"^{argument}: ") as caught:
        make(upstream, **{argument: junk})
    assert "shape" not in str(caught.value)


def test_a_live_block_of_another_guard_was_not_given_back(upstream: Any) -> None:
    one, other = DebugGuardResource(AsyncCudaResource()), DebugGuardResource(upstream)
    block = one.allocate(16)
    with pytest.raises(UseAfterFree, match="another guard's"):
        other.deallocate(block)
    one.deallocate(block)
    with pytest.raises(UseAfterFree, match="given back"):
        one.deallocate(block)
    one.close()


@pytest.mark.parametrize(
    "over", [AsyncCudaResource, PinnedHostResource, PoolResource, DebugGuardResource, TrackingResource]
)
def test_an_array_in_the_place_of_a_block_is_named_by_its_address(upstream: Any, over: Any) -> None:
    resource = over() if over in (AsyncCudaResource, PinnedHostResource) else over(upstream)
    array = np.zeros((100, 100), "f4")
    words = rf"block: got a numpy.ndarray of shape \(100, 100\), float32 at {array.ctypes.data:#x}, expected a block"
    for call in resource.deallocate, lambda block: resource.record_block_use(block, 0):
        with pytest.raises(UsageError, match=words):
            call(array)
    assert resource.bytes_outstanding == 0
    resource.close()


@pytest.mark.parametrize("key", ["0", 0.0, False, None])
def test_a_key_of_per_device_is_an_ordinal(sim: Any, key: Any) -> None:
    with pytest.raises(UsageError, match=r"PerDevice: key: got .*, expected an ordinal of a device"):
        PerDevice({key: cuglue.DirectCudaResource()})


@pytest.mark.parametrize("sink", [cuglue.CsvSink, cuglue.TraceSink, cuglue.JsonLinesSink])
def test_a_binary_file_is_no_place_for_a_log(sink: Any) -> None:
    with pytest.raises(UsageError, match="expected a path, or an open text file"):
        sink(io.BytesIO())
    text = io.StringIO()
    with sink(text):
        assert not text.closed
