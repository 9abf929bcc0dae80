"""Blocks: which use waits for which (contracts B20-B23, B27b), generations, and the states of B4."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cuglue import Access, BlockState, testing
from cuglue.core.block import Block, BlockId
from cuglue.driver.sim import SimDriver
from cuglue.errors import UseAfterFree

READ, WRITE, READ_WRITE = Access.READ, Access.WRITE, Access.READ_WRITE
PTR = 0x7000


def block_on(stream: Any) -> Block:
    return Block(PTR, 64, stream, stream.submit())


def test_B1_generations_only_grow_across_threads(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    made: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        mine.extend(Block(PTR, 1, a).generation for _ in range(500))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(mine == sorted(mine) for mine in made)
    everything = [g for mine in made for g in mine]
    assert len(set(everything)) == 2000
    assert Block(PTR, 1, a).generation > max(everything)


def test_B2_the_id_is_a_value_that_outlives_the_block(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    block = block_on(a)
    name = block.id
    assert name == BlockId(PTR, block.generation, a.id, 0)
    del block
    assert {name: 1}[BlockId(*name)] == 1
    assert block_on(a).id != name


def test_B3_the_access_lattice() -> None:
    assert READ | WRITE is READ_WRITE
    assert READ | READ is READ
    assert WRITE | WRITE is WRITE
    for access in Access:
        assert READ_WRITE | access is READ_WRITE
        assert access | READ_WRITE is READ_WRITE
    assert (READ.reads, READ.writes) == (True, False)
    assert (WRITE.reads, WRITE.writes) == (False, True)
    assert (READ_WRITE.reads, READ_WRITE.writes) == (True, True)


@pytest.mark.parametrize("access", [READ, WRITE, READ_WRITE])
@pytest.mark.parametrize(
    ("state", "same", "other"),
    [
        # waits of a use on the home stream, and of one on another stream
        ("fresh", {READ: 0, WRITE: 0, READ_WRITE: 0}, {READ: 1, WRITE: 1, READ_WRITE: 1}),
        ("read elsewhere", {READ: 0, WRITE: 1, READ_WRITE: 1}, {READ: 1, WRITE: 2, READ_WRITE: 2}),
        ("read here", {READ: 0, WRITE: 0, READ_WRITE: 0}, {READ: 1, WRITE: 2, READ_WRITE: 2}),
        ("written elsewhere", {READ: 1, WRITE: 1, READ_WRITE: 1}, {READ: 1, WRITE: 1, READ_WRITE: 1}),
    ],
)
def test_B20_the_wait_matrix(
    sim: SimDriver, streams: Any, access: Access, state: str, same: Any, other: Any
) -> None:
    """prepare queues its waits on one stream only, changes no state, and same-stream uses cost nothing."""
    for user_is_home, expected in ((True, same), (False, other)):
        home, elsewhere, third = streams(3)
        block = Block(PTR, 64, home, home.submit())
        if state == "read elsewhere":
            block.finish(elsewhere, READ)
        elif state == "read here":
            third.wait_for(home, block.write_seq)
            block.finish(home, READ)
            block.write_stream, block.write_seq = elsewhere, elsewhere.submit()
            home.wait_for(elsewhere, block.write_seq)
        elif state == "written elsewhere":
            block.finish(elsewhere, WRITE)
        before = (block.write_stream, block.write_seq, dict(block.reads or {}))
        user = home if user_is_home else third
        with testing.trace(only={"stream_wait_event"}) as calls:
            waits = block.prepare(user, access)
        assert waits == expected[access], (state, access, user_is_home)
        assert [c.args[0] for c in calls] == [user.handle] * waits
        assert before == (block.write_stream, block.write_seq, dict(block.reads or {}))


def test_B21_reads_keep_only_the_newest_of_each_stream(sim: SimDriver, streams: Any) -> None:
    home, other = streams(2)
    block = block_on(home)
    assert block.use_count() == 1
    for _ in range(100):
        block.finish(other, READ)
    assert block.use_count() == 2
    assert block.reads == {other: other.seq}
    block.finish(home, READ)
    assert block.use_count() == 3
    block.prepare(home, WRITE)
    block.finish(home, WRITE)
    assert block.use_count() == 1
    assert list(block.uses()) == [(home, home.seq)]


def test_B27b_the_reference_trace(sim: SimDriver, streams: Any) -> None:
    s0, s1, s2 = streams(3)
    names = {s0: "S0", s1: "S1", s2: "S2"}
    block = block_on(s0)

    def uses() -> tuple[str, str]:
        return names[block.write_stream], ",".join(sorted(names[s] for s in block.reads or ())) or "-"

    assert (block.use_count(), uses()) == (1, ("S0", "-"))
    table = [
        (READ, s1, 1, 2, ("S0", "S1")),
        (READ, s2, 1, 3, ("S0", "S1,S2")),
        (WRITE, s0, 2, 1, ("S0", "-")),
        (WRITE, s1, 1, 1, ("S1", "-")),
        (READ_WRITE, s1, 0, 1, ("S1", "-")),
        (READ, s0, 1, 2, ("S1", "S0")),
    ]
    for access, stream, waits, entries, expected in table:
        with testing.trace(only={"stream_wait_event"}) as calls:
            assert block.prepare(stream, access) == waits
        assert [c.args[0] for c in calls] == [stream.handle] * waits
        block.finish(stream, access)
        assert block.use_count() == entries
        assert uses() == expected
    assert block.join_uses(s0) == 0  # S0 has waited for S1's write already, its own read is skipped


def test_B23_join_uses_waits_for_the_write_and_every_read(sim: SimDriver, streams: Any) -> None:
    home, a, b = streams(3)
    block = block_on(home)
    for reader in (a, b):
        block.prepare(reader, READ)
        block.finish(reader, READ)
    with testing.trace(only={"stream_wait_event"}) as calls:
        assert block.join_uses(home) == 2
    assert {c.args[0] for c in calls} == {home.handle}
    assert block.join_uses(home) == 0


def test_finish_can_be_given_a_seq(sim: SimDriver, streams: Any) -> None:
    home, other = streams(2)
    block = block_on(home)
    seq = other.submit()
    block.finish(other, READ, seq)
    assert block.reads == {other: seq}
    block.finish(other, WRITE, seq)
    assert (block.write_stream, block.write_seq, block.reads) == (other, seq, None)
    assert other.seq == seq


def test_B4_states(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    block = block_on(a)
    block.advance("use")
    block.advance("quarantine")
    assert block.state is BlockState.QUARANTINED
    for event in ("use", "quarantine", "free"):
        with pytest.raises(UseAfterFree) as caught:
            block.advance(event)
        assert caught.value.generation == block.generation
        assert block.state is BlockState.QUARANTINED
    block.advance("deallocate")
    assert block.state is BlockState.RETIRED
    block.advance("free")
    for event in ("use", "deallocate", "quarantine", "free"):
        with pytest.raises(UseAfterFree, match="freed"):
            block.advance(event)


def test_a_block_says_what_it_is(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    block = Block(PTR, 64, a, tag="picture")
    assert (block.nbytes, block.device_ordinal, block.alloc_stream) == (64, 0, a)
    assert "picture" in repr(block)
    assert "live" in repr(block)
