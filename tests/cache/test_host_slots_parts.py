"""Chunks of several parts: each rank of an engine writes its own, and a chunk with a missing part
is not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef
from pagoda.ledger import Busy, Reserved, admin
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    SPAWN,
    Prompt,
    cache_at,
    counters_of,
    hit_of,
    keys_of,
    kv_of,
    on_disk,
    prompt,
    reserved_for,
    slots_of,
    written,
)

HALF = LAYOUT.chunk_bytes // 2


def reserved_in_parts(
    cache: Cache, tokens: Prompt, parts: int = 2
) -> list[Reserved]:
    slots = slots_of(cache)
    outcomes = slots.reserve(
        keys_of(cache, tokens),
        namespace=slots.namespace(),
        start=0,
        parent=None,
        parts=parts,
    )
    rooms = [item for item in outcomes if isinstance(item, Reserved)]
    assert len(rooms) == len(outcomes)
    return rooms


def copied_part(
    cache: Cache, tokens: Prompt, rooms: Sequence[Reserved], part: int
) -> list[ChunkRef]:
    """Adopt one half of the chunks and fill it; return what can be committed."""
    slots = slots_of(cache)
    keys = keys_of(cache, tokens)
    blocks = kv_of(tokens).blocks
    assert slots.adopt(rooms, part) == [True] * len(rooms)
    for i, room in enumerate(rooms):
        slots.view(room.slot)[part * HALF : (part + 1) * HALF] = blocks[
            i, part * HALF : (part + 1) * HALF
        ]
    return [
        ChunkRef(
            room.key, i, keys[i - 1] if i else None, room.slot, room.generation
        )
        for i, room in enumerate(rooms)
    ]


def commit_part(cache: Cache, copies: list[ChunkRef], part: int) -> list[bool]:
    return slots_of(cache).commit({slots_of(cache).namespace(): copies}, part)


def _other_rank(shm_root: Path, tmp_path: Path, pipe: Connection) -> None:
    """Write part 1 into the slots that arrive through the pipe; report each step and wait for the
    next.
    """
    with cache_at(shm_root, tmp_path) as cache:
        pipe.send("open")
        rooms: list[Reserved] = pipe.recv()
        copies = copied_part(cache, prompt(4), rooms, 1)
        pipe.send("copied")
        pipe.recv()
        pipe.send(commit_part(cache, copies, 1))
        assert cache.flush(100)
        pipe.send("flushed")
        pipe.recv()


@contextmanager
def other_rank(
    shm_root: Path, tmp_path: Path
) -> Iterator[tuple[Connection, SpawnProcess]]:
    """Start another process with the store open."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_other_rank, args=(shm_root, tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        assert received(ours) == "open"
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.join(60)


def received(pipe: Connection) -> object:
    assert pipe.poll(100), "the other rank says nothing"
    return pipe.recv()


def nowhere(cache: Cache, tokens: Prompt) -> bool:
    """Return whether a prompt is neither found nor on disk, after all noted chunks were written."""
    assert cache.flush(100)
    found = slots_of(cache).match_prefix(keys_of(cache, tokens), 0)
    return not len(found.slots) and not on_disk(cache, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_chunk_of_two_processes_is_there_when_both_have_written_it(
    shm_root: Path, tmp_path: Path, first: int
) -> None:
    tokens = prompt(4)
    with (
        cache_at(shm_root, tmp_path) as cache,
        other_rank(shm_root, tmp_path) as (pipe, _),
    ):
        rooms = reserved_in_parts(cache, tokens)
        pipe.send(rooms)
        assert received(pipe) == "copied"
        copies = copied_part(cache, tokens, rooms, 0)
        for part in (first, 1 - first):
            if part == 0:
                assert commit_part(cache, copies, 0) == [True] * 4
            else:
                pipe.send("commit")
                assert received(pipe) == [True] * 4
                assert received(pipe) == "flushed"
            if part == first:
                assert nowhere(cache, tokens)
                assert counters_of(cache)["stored_bytes"] == 0
                for item in reserved_for(cache, tokens):
                    assert isinstance(item, Busy)
        assert hit_of(cache, tokens).by_tier == {"host": 64}
        assert cache.flush(100)
        assert on_disk(cache, tokens) == 4
        assert counters_of(cache)["stored_bytes"] == 4 * LAYOUT.chunk_bytes
        pipe.send("end")
        admin.check(slots_of(cache)._ledger)
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert hit_of(cache, tokens).by_tier == {"disk": 64}


@pytest.mark.slow
def test_a_rank_that_is_killed_before_its_part_takes_the_chunk_with_it(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    with (
        cache_at(shm_root, tmp_path) as cache,
        other_rank(shm_root, tmp_path) as (pipe, process),
    ):
        rooms = reserved_in_parts(cache, tokens)
        pipe.send(rooms)
        assert received(pipe) == "copied"
        assert (
            commit_part(cache, copied_part(cache, tokens, rooms, 0), 0)
            == [True] * 4
        )
        ledger = slots_of(cache)._ledger
        # its bytes may still be written
        assert admin.reap(ledger) == 0
        assert admin.gauges(ledger)["reserved"] == 4
        process.kill()
        process.join(60)
        assert admin.reap(ledger) == 4
        assert admin.gauges(ledger)["reserved"] == 0
        assert nowhere(cache, tokens)
        # any process may reserve the keys again
        assert len(written(cache, tokens)) == 4
        assert hit_of(cache, tokens).num_tokens == 64


def test_what_one_rank_gives_up_is_not_stored(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        slots = slots_of(cache)
        rooms = reserved_in_parts(cache, tokens)
        copies = copied_part(cache, tokens, rooms, 0)
        assert commit_part(cache, copies, 0) == [True] * 3
        slots.abort(rooms)
        assert slots.adopt(rooms, 1) == [False] * 3
        assert commit_part(cache, copies, 1) == [False] * 3
        assert nowhere(cache, tokens)
        assert admin.gauges(slots._ledger)["reserved"] == 0


def test_of_a_commit_only_what_is_visible_is_written_down(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        rooms = reserved_in_parts(cache, prompt(4))
        halves = [copied_part(cache, prompt(4), rooms, part) for part in (0, 1)]
        assert commit_part(cache, halves[0][:2], 0) == [True] * 2
        # two chunks miss the last part, two the first
        assert commit_part(cache, halves[1], 1) == [True] * 4
        assert cache.flush(100)
        assert (
            cache.lookup(prompt(4)).num_tokens
            == on_disk(cache, prompt(4)) * CHUNK
            == 2 * CHUNK
        )
        assert counters_of(cache)["stored_bytes"] == 2 * LAYOUT.chunk_bytes
        assert commit_part(cache, halves[0][2:], 0) == [True] * 2
        assert cache.flush(100)
        assert on_disk(cache, prompt(4)) == 4


def test_parts_that_are_none(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        namespace = slots_of(cache).namespace()
        with pytest.raises(ValueError, match="parts must be at least 1"):
            slots.reserve(
                [bytes(32)], namespace=namespace, start=0, parent=None, parts=0
            )
        with pytest.raises(ValueError, match="part must not be negative"):
            slots.commit({}, -1)
        rooms = reserved_in_parts(cache, prompt(2))
        copies = copied_part(cache, prompt(2), rooms, 0)
        assert slots.adopt(rooms, 2) == [False] * 2
        assert commit_part(cache, copies, 2) == [False] * 2
        assert admin.gauges(slots._ledger)["reserved"] == 0
