"""The end of a pool: what other threads do meanwhile, what is still held, and what a capture is in the way of."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

import cuglue
from cuglue import AsyncCudaResource, Direct, GraphMemory, PoolResource, Sliced, as_stream
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode
from cuglue.errors import CaptureError, ClosedError, UsageError
from cuglue.memory.pool.homes import Homes
from cuglue.memory.pool.ladder import Ladder
from cuglue.memory.pool.plans import Plans
from cuglue.memory.pool.upstream import Upstream
from cuglue.memory.table import BlockTable

KIB, MIB = 1 << 10, 1 << 20
LAYOUT = [Sliced(64 * KIB), Direct()]


def elsewhere(action: Callable[[], Any]) -> list[BaseException]:
    """Do something on another thread, to its end; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for a lock"
    return raised


def once(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    action: Callable[[], Any],
    *,
    after: bool,
    of: Any = None,
) -> list[int]:
    """Do ``action`` before or after the first call of a method (of the object ``of``); [1] once it is done."""
    original, done = getattr(owner, name), list[int]()

    def wrapped(*arguments: Any, **options: Any) -> Any:
        first = not done and of in (None, arguments[0])
        if first:
            done.append(1)
        if first and not after:
            action()
        found = original(*arguments, **options)
        if first and after:
            action()
        return found

    patch.setattr(owner, name, wrapped)
    return done


def settle(sim: Any) -> None:
    state = device_state(sim, 0)
    state.retire.run_forgotten()
    sim.device_synchronize(0)
    state.retire.drain(block=True)


def memory_of(sim: Any) -> int:
    settle(sim)
    return int(sim.inventory()["bytes"])


# --- beside other threads -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Homes, "seal"),
        (Homes, "forget_all_fast"),
        (Ladder, "trim"),
        (Upstream, "drop"),
        (Homes, "live_spans"),
    ],
)
@pytest.mark.parametrize("asked", [False, True], ids=["plain", "asked"])
def test_an_array_may_die_at_any_moment_of_close(
    device: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, asked: bool
) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    arrays = [pool.malloc(100), pool.malloc(3 * MIB)]
    pool.deallocate(pool.allocate(20 * MIB))  # a page that close() gives back
    if asked:
        pool.block_in(arrays[0].mem)
    done = once(monkeypatch, owner, name, lambda: elsewhere(arrays.clear), after=after)
    pool.close()
    assert done
    assert memory_of(sim) == 0
    assert pool.bytes_reserved == 0
    assert pool.upstream.closed
    assert list(pool._table) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("nbytes", [100, 9 * MIB])
@pytest.mark.parametrize(
    ("call", "layout", "moment"),
    [
        ("allocate", None, "page"),
        ("allocate", None, "span"),
        ("allocate", None, "block"),
        ("allocate", LAYOUT, "span"),
        ("allocate", LAYOUT, "block"),
        ("malloc", None, "page"),
        ("malloc", None, "span"),
        ("malloc", LAYOUT, "span"),
        ("malloc", LAYOUT, "block"),
    ],
)
def test_what_is_allocated_while_the_pool_closes_is_given_back(
    device: Any, monkeypatch: pytest.MonkeyPatch, call: str, layout: Any, nbytes: int, moment: str
) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), layout=layout)
    raised: list[BaseException] = []
    owner, name, of = {
        "page": (Upstream, "place", None),
        "span": (Ladder if layout is None else Plans, "supply", None),
        "block": (BlockTable, "add", pool._table),
    }[moment]
    done = once(monkeypatch, owner, name, lambda: raised.extend(elsewhere(pool.close)), after=True, of=of)
    with pytest.raises(ClosedError):
        getattr(pool, call)(nbytes)
    assert done
    assert raised == []
    assert pool.bytes_reserved == 0
    assert pool.upstream.closed, "at once"
    assert memory_of(sim) == 0
    assert list(pool._table) == []


@pytest.mark.parametrize("make", [AsyncCudaResource, lambda: PoolResource(AsyncCudaResource())])
def test_a_block_that_is_given_back_beside_close_is_given_back_once(
    device: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    sim = device()
    resource = make()
    blocks = [resource.allocate(MIB) for _ in range(3)]
    once(
        monkeypatch,
        BlockTable,
        "remove",
        lambda: elsewhere(lambda: resource.deallocate(blocks[2])),
        after=True,
        of=resource._table,
    )
    with pytest.warns(ResourceWarning, match="blocks live"):
        resource.close()
    assert resource.closed
    assert memory_of(sim) == 0


def test_an_address_that_is_asked_about_before_its_block_is_there(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device()
    pool = PoolResource(AsyncCudaResource())
    pool.deallocate(block := pool.allocate(MIB))
    found: list[Any] = []
    once(
        monkeypatch,
        type(pool.homes.of(as_stream(0))),
        "pop",
        lambda: elsewhere(lambda: found.append(pool.block_at(block.ptr))),
        after=True,
    )
    again = pool.allocate(MIB)
    assert found[0] is not None
    assert found[0] is not again
    assert pool.block_at(again.ptr) is again
    pool.deallocate(again)
    assert pool.bytes_outstanding == 0
    pool.close()


def test_a_block_that_comes_while_its_address_is_asked_about(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device()
    pool = PoolResource(AsyncCudaResource())
    pool.deallocate(block := pool.allocate(MIB))
    made: list[Any] = []
    kind = cuglue.memory.pool.arrays.ArrayBlock

    def late(*arguments: Any) -> Any:  # the span is known to be live, its block is made now
        made.append(kind(*arguments))
        pool._table.add(made[0])
        return kind(*arguments)

    array = pool.malloc(MIB)
    monkeypatch.setattr(cuglue.memory.pool.arrays, "ArrayBlock", late)
    assert array.mem.ptr == block.ptr
    assert pool.block_at(block.ptr) is made[0]
    pool._table.forget(block.ptr)
    del array
    pool.close()


# --- a capture is in the way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, LAYOUT], ids=["plain", "layout"])
def test_a_capture_keeps_the_pages_of_its_stream_alone(
    device: Any, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), layout=layout)
    capturing, other = (as_stream(sim.Stream()) for _ in range(2))
    for stream in (capturing, other):
        pool.deallocate(pool.allocate(9 * MIB, stream))
    kept = pool.allocate(MIB, other)
    settle(sim)
    sim.capture_begin(capturing.handle, CaptureMode.RELAXED)
    for end in (pool.trim, pool.close):
        with pytest.raises(CaptureError):
            end()
    assert not pool.closed
    assert kept.state is not cuglue.BlockState.LIVE
    assert pool.bytes_reserved == 9 * MIB
    pool.deallocate(pool.allocate(MIB, other))  # it is open as before
    sim.graph_destroy(sim.capture_end(capturing.handle))
    assert pool.trim() >= 9 * MIB
    if layout is None:
        with other.owner:
            long_ways = once(monkeypatch, PoolResource, "span_for", lambda: None, after=True)
            before = pool.malloc(MIB).ptr
            long_ways.clear()
            assert pool.malloc(MIB).ptr == before
            assert not long_ways, "the short way is open again"
    pool.close()
    assert memory_of(sim) == 0


def test_a_capture_is_in_the_way_of_no_allocation_elsewhere(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), idle_seconds=1.0)
    now = [0.0]
    pool.homes.clock = lambda: now[0]
    capturing, other = (as_stream(sim.Stream()) for _ in range(2))
    pool.deallocate(pool.allocate(9 * MIB, capturing))
    settle(sim)
    sim.capture_begin(capturing.handle, CaptureMode.RELAXED)
    for _ in range(4):
        now[0] += 2.0
        pool.reap_pending()
    block = pool.allocate(MIB, other)
    sim.graph_destroy(sim.capture_end(capturing.handle))
    now[0] += 2.0
    pool.reap_pending()
    assert pool.counters.shrunk == 1
    pool.deallocate(block)
    pool.close()


def test_the_last_page_of_a_closed_pool_waits_for_the_end_of_a_capture(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    capturing = sim.Stream()
    with capturing:
        array = pool.malloc(MIB)
    with pytest.warns(ResourceWarning, match="1 pieces"):
        pool.close()
    sim.capture_begin(capturing.ptr, CaptureMode.RELAXED)
    del array
    device_state(sim, 0).retire.run_forgotten()
    assert sim.inventory()["bytes"]
    sim.graph_destroy(sim.capture_end(capturing.ptr))
    assert memory_of(sim) == 0
    assert pool.upstream.closed


# --- pools of a layout ----------------------------------------------------------------------------------------------


def test_a_closed_pool_gives_back_what_nobody_holds_and_refuses_the_rest(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), layout=LAYOUT)
    memory = pool.stream_memory()
    held, dropped = memory.reserve(1000), memory.reserve(MIB)
    del dropped
    assert memory.usage().number_allocs == 2
    with pytest.warns(ResourceWarning, match="1 pieces in use"):
        pool.close()
    assert sim.inventory()["bytes"] == 64 * KIB
    for call in (
        lambda: memory.reserve(1000),
        lambda: memory.install(LAYOUT),
        lambda: pool.stream_memory(as_stream(sim.Stream())).reserve(MIB),
        lambda: pool.allocate(1000),
    ):
        with pytest.raises(ClosedError):
            call()
    assert repr(memory).endswith("1000 of 65536 bytes in use, closed)")
    assert repr(held) == "Reservation(1000 bytes)"
    held.release()
    held.release()
    assert repr(held) == "Reservation(1000 bytes, released)"
    assert pool.bytes_reserved == 0, "at once"
    assert memory_of(sim) == 0
    assert pool.upstream.closed


def test_a_reservation_dropped_after_the_pool_was_closed_goes_back_too(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), layout=LAYOUT)
    held = pool.stream_memory().reserve(MIB)
    with pytest.warns(ResourceWarning, match="1 pieces in use"):
        pool.close()
    assert held.resolve()
    del held
    assert memory_of(sim) == 0
    assert pool.upstream.closed


# --- memory of graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_first", [0, 1, 2])
def test_blocks_of_graph_memory_may_overlap(device: Any, left_first: int) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    general = pool.allocate(MIB, stream)
    blocks = [pool.graph_memory(stream) for _ in range(3)]
    graphs = [block.__enter__() for block in blocks]
    open_ones = [0, 1, 2]

    def takes_from() -> Any:
        before = [graph.bytes_reserved for graph in graphs]
        pool.deallocate(pool.allocate(20 * MIB, stream))
        return [n for n, graph in enumerate(graphs) if graph.bytes_reserved > before[n]]

    assert takes_from() == [2]
    assert pool.block_at(general.ptr) is general
    assert pool.bytes_outstanding == general.size, "what is free outside of the blocks is free"
    for n in (left_first, *(n for n in (0, 1, 2) if n != left_first)):
        blocks[n].__exit__(None, None, None)
        open_ones.remove(n)
        pool.trim()
        with stream:
            inside = pool.malloc(30 * MIB)
        home = inside.mem.span.home
        assert home is (graphs[open_ones[-1]]._home if open_ones else pool.homes.of(as_stream(stream)))
        assert home.private is bool(open_ones)
        del inside
    pool.deallocate(general)
    for graph in graphs:
        graph.close()
        graph.close()
    pool.trim()
    assert pool.bytes_reserved == pool.bytes_outstanding == 0
    pool.close()
    assert memory_of(sim) == 0


def test_a_pool_may_be_closed_before_its_graphs(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    with pool.graph_memory(sim.Stream()) as graph:
        pool.deallocate(pool.allocate(MIB))
    stream = sim.Stream()
    with pool.graph_memory(stream) as inside:
        pool.deallocate(pool.allocate(MIB, stream))
        pool.close()
    assert inside.bytes_reserved
    assert pool.bytes_reserved == inside.bytes_reserved
    assert "bytes reserved)" in repr(inside)
    graph.close()
    inside.close()
    assert pool.upstream.closed, "at once"
    assert repr(inside).endswith("closed)")
    assert memory_of(sim) == 0
    assert pool.upstream.closed


@pytest.mark.parametrize("closed_first", [False, True])
def test_a_graphs_memory_that_is_dropped_is_kept_until_the_pool_is_closed(
    device: Any, closed_first: bool
) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    with pool.graph_memory(stream) as graph:
        pool.deallocate(pool.allocate(MIB, stream))
    if closed_first:
        pool.close()
    else:
        pool.trim()
    with pytest.warns(ResourceWarning, match=r"GraphMemory.*test_pool_closing\.py.*never closed"):
        del graph
    if not closed_first:
        device_state(sim, 0).retire.run_forgotten()
        pool.trim()
        assert pool.bytes_reserved, "the graph may be there"
        pool.close()
    assert memory_of(sim) == 0
    assert pool.upstream.closed


def test_a_graphs_memory_is_not_copied(device: Any) -> None:
    sim = device()
    with PoolResource(AsyncCudaResource()) as pool, pool.graph_memory(sim.Stream()) as graph:
        with pytest.raises(UsageError):
            copy.copy(graph)
        assert isinstance(graph, GraphMemory)
        graph.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_size_may_be_asked_for_the_first_time_while_the_pool_closes(device: Any) -> None:
    """Where it looks from then on is known just after close() has emptied what was known."""
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    array = pool.malloc(100)  # so that upstream stays open, and has a page for the request
    home = pool.homes.of(as_stream(0))

    class Late(dict[int, Any]):
        def __setitem__(self, size: int, found: Any) -> None:
            elsewhere(pool.close)
            super().__setitem__(size, found)

    home._serving = Late(home._serving)
    with pytest.raises(ClosedError):
        pool.allocate(5000)
    assert pool.closed
    del array
    assert memory_of(sim) == 0
    assert pool.upstream.closed
