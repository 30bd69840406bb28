"""How much work the thread of KV events does: between two rests, and when nothing changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import pytest

from pagoda.cache import Cache
from pagoda.kv_events.event_types import ChunkEventForm
from pagoda.kv_events.notes import BlockFacts, ChunkNote
from pagoda.kv_events.publisher import EventPublisher
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.kv_events.tier_difference import PIECE
from pagoda.ledger import Reserved
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import NOT_READY
from testbed.patience import Patience
from tests.cache.kit import CHUNK, LAYOUT, cache_at
from tests.ledger.support import gate_taken

SLOTS = 1024
# of byte code between two rests: one step of a piece, more if it waits for a lock or finds no notes
USUAL_STEPS = 230 * PIECE
MOST_STEPS = 480 * PIECE


@pytest.fixture
def events(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoredEvents]:
    """The publisher of a full store, with notes; its rounds are called one by one, and take as long
    as they need.
    """
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", 60.0)
    with cache_at(shm_root, None, host_size=SLOTS * LAYOUT.slot_bytes) as cache:
        publisher = EventPublisher("tcp://127.0.0.1:*")
        events = full(cache, publisher)
        # of this thread, which is not the one that publishes
        events._rested = time.thread_time()
        yield events
        publisher.close()


def full(cache: Cache, publisher: EventPublisher) -> StoredEvents:
    assert cache.slots is not None
    ledger = cache.slots.ledgers["host"]
    random = np.random.default_rng(0)
    columns = ledger.columns
    root = cache.slots.namespace()
    assert columns.slots == SLOTS
    columns.keys[:] = random.integers(0, 1 << 60, columns.keys.shape, np.uint64)
    columns.generation[:] = np.arange(1, SLOTS + 1)
    columns.last_use[:] = random.permutation(SLOTS)
    notes = ((slot, columns.key_of(slot)) for slot in range(SLOTS))
    tokens = bytes(4 * CHUNK)
    encoded = (
        (slot, key, msgspec.msgpack.encode(ChunkNote(root, b"", key, tokens)))
        for slot, key in notes
    )
    ChunkNotes(ledger.directory).write(encoded)
    facts = BlockFacts(CHUNK, CHUNK)
    return StoredEvents(
        {"host": ledger},
        lambda: root,
        {0: facts},
        ChunkEventForm(facts),
        publisher,
    )


@contextmanager
def counted(
    events: StoredEvents, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """Count the steps of Python's byte code that this thread runs between two places where it rests
    if it has to.
    """
    steps = [0]

    def rest() -> None:
        steps.append(0)

    def on_step(
        frame: FrameType, what: str, _argument: object
    ) -> Callable[..., object]:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        steps[-1] += what == "opcode"
        return on_step

    with monkeypatch.context() as patched:
        patched.setattr(events, "_rest", rest)
        for tier in events._tiers:
            patched.setattr(tier, "_rest", rest)
        before = sys.gettrace()
        sys.settrace(on_step)
        try:
            yield steps
        finally:
            sys.settrace(before)


@pytest.mark.slow
def test_between_two_rests_the_thread_runs_a_bounded_amount_of_python(
    events: StoredEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many slots a store has, and whatever happens to all of them at once."""
    (tier,) = events._tiers
    columns = tier.ledger.columns
    monkeypatch.setattr("pagoda.kv_events.tier_difference._MOST_CHOSEN", SLOTS)

    def others(generations: int, keys: int) -> None:
        columns.generation[:] += np.uint64(generations)
        columns.keys[:] += np.uint64(keys % (1 << 64))
        tier.ledger.session.write(lambda _: None)  # as whoever publishes does

    with counted(events, monkeypatch) as steps:
        assert events._round()  # all are new
        assert np.count_nonzero(tier._held) == SLOTS
        tier.tell_again()
        assert events._round()
        others(SLOTS, 1)  # they have no notes
        assert events._round()
        assert not tier._held.any()
        events.found(
            lambda _: None, bytes(32), events._root, 0, [columns.key_of(0)]
        )
        events._told_of = {columns.key_of(slot) for slot in range(0, SLOTS, 16)}
        assert events._round()  # looks at these again
        others(SLOTS, -1)
        assert events._round()
        assert np.count_nonzero(tier._held) == SLOTS
        monkeypatch.setattr(
            events, "_present_root", lambda: bytes(range(32))
        )  # takes all back, and publishes none
        assert events._round()
        assert not tier._held.any()
    assert max(steps) <= MOST_STEPS
    assert sorted(steps)[len(steps) * 9 // 10] <= USUAL_STEPS


def test_what_is_published_again_is_published_from_the_beginning(
    events: StoredEvents,
) -> None:
    """A router that has forgotten the first chunks of a prompt ignores the others."""
    (tier,) = events._tiers
    assert events._for_a_while(map(events._send, tier.removed()))
    first = next(tier.new())
    assert len(first) == PIECE
    for again in (tier.tell_again, tier.choose_again):
        again()
        assert next(tier.new()) == first


@pytest.mark.slow
def test_while_nothing_changes_no_slot_is_looked_at(
    events: StoredEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is published, of another namespace, without a note, or free: a million slots cost
    what one costs.
    """
    (tier,) = events._tiers
    ledger = tier.ledger
    columns = tier.ledger.columns
    looked = list[slice]()
    walk = tier._slices

    def slices() -> Iterator[slice]:
        for rows in walk():
            looked.append(rows)
            yield rows

    monkeypatch.setattr(tier, "_slices", slices)
    columns.keys[:8] += np.uint64(1)  # without notes
    columns.last_use[8:16] = NOT_READY
    while not events._round():
        pass
    assert np.count_nonzero(tier._held) == SLOTS - 16
    assert looked
    looked.clear()
    for _ in range(3):
        assert events._round()
    assert looked == []
    reserved = ledger.reserve([bytes(32)], namespace=bytes(32), stamp=1)
    # for what is gone, and for what is new
    assert events._round()
    assert len(looked) == 2
    looked.clear()
    assert events._round()
    assert looked == []
    ledger.commit([one for one in reserved if isinstance(one, Reserved)])
    assert events._round()
    assert len(looked) == 2
    looked.clear()
    ledger.match_prefix([bytes(32)])  # a request reads, and uses it
    assert events._round()
    assert looked == []
    with gate_taken(ledger):  # what is not known is looked at
        for _ in range(2):
            looked.clear()
            assert events._round()
            assert looked


@pytest.mark.slow
def test_what_is_used_all_the_time_and_never_noted_keeps_no_other_chunk_waiting(
    events: StoredEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of an engine that leaves no notes: they are used by each of its requests, and may be
    noted at any time.
    """
    (tier,) = events._tiers
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", 0.05)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._MOST_CHOSEN", 64)
    columns = tier.ledger.columns
    silent = range(100)
    columns.keys[: len(silent)] += np.uint64(1)
    # as if each round came after another use
    columns.last_use[: len(silent)] = NOT_READY - 1
    patience = Patience(10.0)
    while np.count_nonzero(tier._held) < SLOTS - len(silent):
        assert not patience.ended, "chunks with notes are not published"
        events._round()
    root = events._root
    notes = [
        (slot, columns.key_of(slot), ChunkNote(root, b"", columns.key_of(slot)))
        for slot in silent
    ]
    ChunkNotes(tier.ledger.directory).write(
        (slot, key, msgspec.msgpack.encode(note)) for slot, key, note in notes
    )
    while np.count_nonzero(tier._held) < SLOTS:
        assert not patience.ended, "what was noted later is not published"
        events._round()


@pytest.mark.slow
def test_what_was_published_is_not_remembered_by_name_while_nothing_changes(
    events: StoredEvents,
) -> None:
    """A dictionary of a million chunks keeps the interpreter from the engine: when it grows, and
    when it is freed.
    """
    (tier,) = events._tiers
    for _ in range(2):
        while not events._round():
            pass
        assert np.count_nonzero(tier._held) == SLOTS
        assert events._round()
        assert not tier._just
        assert not tier._before
        tier.tell_again()
