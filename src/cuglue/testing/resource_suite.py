"""What every memory resource and every decorator promises, as a suite to inherit.

Owns the contract of :class:`~cuglue.memory.resource.DeviceMemoryResource` that can be seen through it, on the current
driver, simulated or real. The oracle is the memory itself, read back through the driver. A test class gives
:meth:`ResourceSuite.make`::

    class TestMyResource(ResourceSuite):
        def make(self):
            return MyResource(AsyncCudaResource())
"""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from ..driver.protocol import Access
from ..driver.registry import current_driver
from ..errors import CuglueError, DriverError, OutOfMemory, StreamMisuse, UsageError, UseAfterFree
from ..lifecycle import BlockState
from .resource_case import ResourceCase


class ResourceSuite(ResourceCase):
    """Inherit it and give ``make()``; every method named ``test_...`` is a test."""

    # --- allocate -----------------------------------------------------------------------------------------------
    def test_a_block_is_what_was_asked_for(self) -> None:
        """Exact size, aligned, live, on its stream, with its tag and a generation of its own."""
        with self.resource() as resource:
            stream = self.stream(resource)
            blocks = [resource.allocate(n, stream, f"tag {n}") for n in (1, 3, 511, 512, 513, 4097, 100_003)]
            assert len({b.generation for b in blocks}) == len(blocks)
            for block, n in zip(blocks, (1, 3, 511, 512, 513, 4097, 100_003), strict=True):
                assert block.nbytes == n
                assert block.tag == f"tag {n}"
                assert block.state is BlockState.LIVE
                assert block.alloc_stream is stream
                assert block.device_ordinal == resource.device_ordinal
                assert block.align >= 256
                assert block.ptr % block.align == 0
                assert block.id.generation == block.generation
            spans = sorted((b.ptr, b.ptr + b.nbytes) for b in blocks)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert resource.bytes_outstanding >= sum(b.nbytes for b in blocks)
            for block in blocks:
                resource.deallocate(block)
                assert block.state is not BlockState.LIVE

    def test_memory_holds_what_is_written(self) -> None:
        """Blocks do not overlap: each keeps its own bytes."""
        with self.resource() as resource:
            stream = self.stream(resource)
            blocks = [self.written(resource, 1000 + 77 * i, i + 1, stream) for i in range(12)]
            for i, block in enumerate(blocks):
                assert (self.contents(block, stream) == i + 1).all()
            for block in blocks[::2]:
                resource.deallocate(block)
            for i, block in enumerate(blocks[1::2]):
                assert (self.contents(block, stream) == 2 * i + 2).all()
                resource.deallocate(block)

    def test_sizes_that_cannot_be(self) -> None:
        """0, negative, no ints, beyond any device: refused, and nothing has changed."""
        with self.resource() as resource:
            before = resource.bytes_outstanding
            self.refused(DriverError, lambda: resource.allocate(0))
            for negative in (-1, -(2**63)):
                self.refused(ValueError, partial(resource.allocate, negative))
            for word in (1.0, float("nan"), "8", None):
                self.refused((TypeError, ValueError), partial(resource.allocate, cast("int", word)))
            for huge in (2**63 - 1, 2**64 - 511, 2**64):
                error = self.refused(OutOfMemory, partial(resource.allocate, huge))
                assert (isinstance(error, MemoryError), error.requested) == (True, huge)
            assert resource.bytes_outstanding == before

    def test_streams_that_are_none(self) -> None:
        """What is no stream is refused by name."""
        with self.resource() as resource:
            for bad in ("stream", -1, object()):
                self.refused(StreamMisuse, partial(resource.allocate, 64, bad))

    def test_a_failing_driver_changes_nothing(self) -> None:
        """Allocations that the driver refuses are rolled back, and the next one succeeds."""
        from . import faults

        with self.resource() as resource:
            stream = self.stream(resource)
            before = resource.bytes_outstanding
            with (
                faults.fail("malloc", persistent=True, driver=resource.driver),
                faults.fail("malloc_async", persistent=True, driver=resource.driver),
                faults.fail("malloc_managed", persistent=True, driver=resource.driver),
                faults.fail("host_alloc", persistent=True, driver=resource.driver),
                faults.fail("vmm_create", persistent=True, driver=resource.driver),
            ):
                self.refused(CuglueError, lambda: resource.allocate(1 << 20, stream))
            assert resource.bytes_outstanding == before
            resource.deallocate(resource.allocate(1 << 20, stream))

    # --- deallocate ---------------------------------------------------------------------------------------------
    def test_blocks_that_are_not_live_here(self) -> None:
        """Given back twice, of another resource, forged, stale at a reused address: refused, nothing is freed."""
        with self.resource() as resource, self.resource() as other:
            stream = self.stream(resource)
            old = resource.allocate(4096, stream)
            resource.deallocate(old)
            assert self.refused(UseAfterFree, lambda: resource.deallocate(old)).generation == old.generation
            new = self.written(resource, 4096, 9, stream)
            self.refused(UseAfterFree, lambda: resource.deallocate(old))
            foreign = other.allocate(64, stream)
            self.refused(UseAfterFree, lambda: resource.deallocate(foreign))
            forged = type(new)(new.ptr, new.nbytes, stream)
            self.refused(UseAfterFree, lambda: resource.deallocate(forged))
            for bad in (None, 3, "block", new.id):
                self.refused(UsageError, partial(resource.deallocate, cast("Any", bad)))
            assert new.state is BlockState.LIVE
            assert (self.contents(new, stream) == 9).all()
            other.deallocate(foreign)
            resource.deallocate(new)

    def test_reap_is_idempotent_and_never_raises(self) -> None:
        """With nothing pending, with something pending, and again."""
        with self.resource() as resource:
            resource.reap_pending()
            block = resource.allocate(64, self.stream(resource))
            resource.reap_pending()
            assert block.state is BlockState.LIVE
            resource.deallocate(block)
            resource.reap_pending(block=False)
            resource.reap_pending()
            resource.reap_pending()
            assert block.state in (BlockState.FREED, BlockState.RETIRED)

    def test_reuse_is_ordered(self) -> None:
        """Give back with work pending, allocate the same size, write: the new bytes win, 32 times."""
        with self.resource() as resource:
            stream = self.stream(resource)
            for cycle in range(32):
                old = self.written(resource, 8192, 255, stream)
                resource.deallocate(old)
                new = self.written(resource, 8192, cycle, stream)
                assert (self.contents(new, stream) == cycle).all()
                resource.deallocate(new)

    # --- uses ---------------------------------------------------------------------------------------------------
    def test_tracking_works_or_is_refused(self) -> None:
        """Never a success that tracks nothing."""
        with self.resource() as resource:
            home, other = self.stream(resource), self.stream(resource)
            block = resource.allocate(64, home)
            calls: list[Callable[[], None]] = [
                lambda: resource.prepare_block_use(block.id, other, Access.WRITE),
                lambda: resource.finish_block_use(block.id, other, Access.WRITE),
                lambda: resource.record_block_use(block, other),
                lambda: resource.prepare_block_use(block.id, home, Access.READ),
                lambda: resource.cancel_block_use(block.id, home, Access.READ),
            ]
            for call in calls:
                if resource.supports_block_use_tracking():
                    call()
                else:
                    assert "unsupported" in str(self.refused(StreamMisuse, call))
            resource.deallocate(block)
            self.refused((UseAfterFree, StreamMisuse), lambda: resource.record_block_use(block, other))
            for use in (resource.prepare_block_use, resource.finish_block_use):
                self.refused((UseAfterFree, StreamMisuse), partial(use, block.id, other, Access.READ))

    def test_a_recorded_use_delays_the_free(self) -> None:
        """Work of another stream that was told of is done before the memory has a new owner."""
        with self.resource() as resource:
            if not resource.supports_block_use_tracking():
                return
            home, other = self.stream(resource), self.stream(resource)
            for cycle in range(16):
                block = self.written(resource, 4096, 200, home)
                resource.prepare_block_use(block.id, other, Access.WRITE)
                self.fill(block, 201, other)
                resource.finish_block_use(block.id, other, Access.WRITE)
                resource.deallocate(block)
                new = self.written(resource, 4096, cycle, home)
                assert (self.contents(new, home) == cycle).all()
                resource.deallocate(new)

    # --- CuPy ---------------------------------------------------------------------------------------------------
    def test_as_an_allocator(self) -> None:
        """``malloc``: a pointer over a live block, given back by the next call after the last reference went."""
        with self.resource() as resource:
            if not self.cupy:
                return
            before = resource.bytes_outstanding
            pointer = resource.malloc(1000)
            assert pointer.ptr % 256 == 0
            assert pointer.mem.size >= 1000
            assert pointer.device_id == resource.device
            assert resource.bytes_outstanding >= before + 1000
            empty = resource.malloc(0)
            assert (empty.ptr, empty.device_id) == (0, resource.device)
            self.refused(ValueError, lambda: resource.malloc(-1))
            self.refused(MemoryError, lambda: resource.malloc(2**63))
            del pointer, empty
            self.drain(resource)
            resource.reap_pending()
            assert resource.bytes_outstanding == before

    # --- as a whole ---------------------------------------------------------------------------------------------
    def test_what_it_says_of_itself(self) -> None:
        """Device, driver and budget, and a text that names it."""
        with self.resource() as resource:
            assert resource.driver is current_driver()
            assert resource.device in range(resource.driver.device_count())
            assert type(resource).__name__ in repr(resource)
            snapshot = resource.budget_snapshot()
            assert snapshot is None or snapshot.reserved >= 0

    def test_threads(self) -> None:
        """Six threads with content checks: no overlap, no error, nothing left."""
        with self.resource() as resource:
            problems: list[BaseException] = []

            def work(seed: int) -> None:
                choose = random.Random(seed)
                stream = self.stream(resource)
                try:
                    for _ in range(40):
                        value = choose.randrange(1, 256)
                        block = self.written(resource, choose.randrange(64, 4097), value, stream)
                        assert (self.contents(block, stream) == value).all()
                        resource.deallocate(block)
                        if choose.random() < 0.1:
                            resource.reap_pending(block=choose.random() < 0.5)
                except BaseException as error:  # noqa: BLE001 - raised below
                    problems.append(error)

            threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert not any(thread.is_alive() for thread in threads), "a thread hangs"
            if problems:
                raise problems[0]

    def test_a_random_program(self) -> None:
        """Three streams, blocks that live long and short: every byte is as it was written last."""
        with self.resource() as resource:
            choose = random.Random(1)
            streams = [self.stream(resource) for _ in range(3)]
            live: dict[Any, int] = {}
            for _ in range(150):
                if choose.random() < 0.5 or not live:
                    value = choose.randrange(256)
                    live[
                        self.written(resource, choose.choice([64, 600, 5000]), value, choose.choice(streams))
                    ] = value
                    continue
                block = choose.choice(list(live))
                value = live.pop(block)
                assert (self.contents(block, block.alloc_stream) == value).all()
                resource.deallocate(block)
            for block in live:
                resource.deallocate(block)

    def test_closing_with_live_blocks(self) -> None:
        """They are freed, and a warning names their tags; afterwards allocating is refused."""
        resource = self.make()
        block = resource.allocate(64, self.stream(resource), "forgotten")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resource.close()
        assert any(issubclass(w.category, ResourceWarning) and "forgotten" in str(w.message) for w in caught)
        assert block.state is not BlockState.LIVE
        self.refused(CuglueError, lambda: resource.allocate(64))
