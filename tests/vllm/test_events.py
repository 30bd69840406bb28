"""Events about host memory and disk: stored only after the commit, removed after the removal, over
a real cache.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from pagoda.cache import Cache
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.event_form import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet, LivePublisher
from pagoda.keys import derive_keys
from pagoda.kv_events.notes import (
    BlockFacts,
    ChunkNote,
    Groups,
    packed,
    runs,
    unpacked,
)
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.kv_events.tier_difference import PIECE
from pagoda.ledger import Busy, Outcome, Present, Reserved, admin
from pagoda.ledger.chunk_notes import MOST_NOTE_BYTES, ChunkNotes
from pagoda.ledger.columns import NOT_READY
from testbed.servers import free_port
from tests.cache.kit import CHUNK, cache_at

BLOCK = 4
BLOCKS = CHUNK // BLOCK  # of a chunk
GROUPS: Groups = {0: BlockFacts(CHUNK, BLOCK, "full_attention")}
HYBRID: Groups = GROUPS | {
    2: BlockFacts(CHUNK, BLOCK, "sliding_window", 6, needs_all=False),
    3: BlockFacts(CHUNK, BLOCK, "mamba", needs_all=False),
}


@pytest.fixture
def cache(shm_root: Path) -> Iterator[Cache]:
    with cache_at(shm_root, None) as cache:  # 64 slots
        yield cache


@pytest.fixture(autouse=True)
def _hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    # whole ones, as requests have them
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    init_none_hash(sha256)


class Engine:
    """What the connector's halves do around the events: reserve for a request, commit; the rounds
    one by one.
    """

    def __init__(
        self, cache: Cache, keeps_notes: bool = True, groups: Groups = GROUPS
    ) -> None:
        assert cache.slots is not None
        self.cache = cache
        self.slots: HostSlots = cache.slots
        self.outlet = EventOutlet(
            KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        )
        self.form = VLLMEventForm(groups, BLOCK)
        self.root = self.slots.namespace()
        self.events = StoredEvents(
            self.slots.ledgers,
            lambda: self.root,
            groups,
            self.form,
            self.outlet,
            keeps_notes,
        )

    def reserved(
        self,
        request: Request,
        first: int = 0,
        parts: int = 1,
        salt: str | None = None,
        group: int = 0,
    ) -> list[ChunkRef]:
        keys = self.keys(request, salt, group)
        root = self.slots.namespace(salt=salt)
        outcomes = self.slots.reserve(
            keys[first:],
            namespace=root,
            start=first,
            parent=keys[first - 1] if first else None,
            parts=parts,
        )
        self.events.note(
            self.form.notes(request, root, group),
            root,
            self.root,
            first,
            outcomes,
        )
        return copies(keys, outcomes, first)

    def keys(
        self, request: Request, salt: str | None = None, group: int = 0
    ) -> list[bytes]:
        names = request.block_hashes[BLOCKS - 1 :: BLOCKS]
        if group:
            names = [make_offload_key(name, group) for name in names]
        return derive_keys(names, self.slots.namespace(salt=salt))

    def commit(
        self, done: Sequence[ChunkRef], part: int = 0, salt: str | None = None
    ) -> None:
        assert self.slots.commit(
            {self.slots.namespace(salt=salt): done}, part
        ) == [True] * len(done)

    def stored(
        self, request: Request, salt: str | None = None, group: int = 0
    ) -> list[ChunkRef]:
        done = self.reserved(request, salt=salt, group=group)
        self.commit(done, salt=salt)
        return done

    def take(self) -> list[KVCacheEvent]:
        """Return what a round publishes, of which each piece takes as long as it needs, on this
        thread.
        """
        self.events._rested = time.thread_time()
        self.events._round()
        return self.outlet.take()


def copies(
    keys: Sequence[bytes], outcomes: Sequence[Outcome], first: int = 0
) -> list[ChunkRef]:
    return [
        ChunkRef(
            item.key, n, keys[n - 1] if n else None, item.slot, item.generation
        )
        for n, item in enumerate(outcomes, first)
        if isinstance(item, Reserved)
    ]


def request_of(chunks: float, seed: int = 0, **options: object) -> Request:
    prompt = [seed * 1000 + n for n in range(int(chunks * CHUNK))]
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(
        f"request-{seed}",
        prompt,
        SamplingParams(),
        None,
        block_hasher=hasher,
        **options,
    )


def run(
    request: Request, first: int = 0, stop: int | None = None, **fields: object
) -> BlockStored:
    """The event of chunks `first` to `stop` of a request."""
    begin = first * BLOCKS
    end = len(request.block_hashes) if stop is None else stop * BLOCKS
    defaults = {
        "block_hashes": list(request.block_hashes[begin:end]),
        "parent_block_hash": request.block_hashes[begin - 1] if begin else None,
        "token_ids": list(request.all_token_ids[begin * BLOCK : end * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
        "session_id": None,
    }
    return BlockStored(**(defaults | fields))  # type: ignore[arg-type]


def gone(*hashes: bytes, medium: str = "CPU") -> BlockRemoved:
    return BlockRemoved(
        block_hashes=list(hashes), medium=medium, group_idx=0, locality="LOCAL"
    )


def decoded(events: Sequence[KVCacheEvent]) -> list[KVCacheEvent]:
    """What a router reads of events."""
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))
    return msgspec.msgpack.decode(sent, type=KVEventBatch).events


def test_nothing_is_published_before_all_parts_are_committed(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(3.5)
    done = engine.reserved(request, parts=2)
    assert len(done) == 3
    assert engine.take() == []
    engine.commit(done)
    assert engine.take() == []
    reserved = [Reserved(copy.key, copy.slot, copy.generation) for copy in done]
    assert engine.slots.adopt(reserved, 1) == [True] * 3
    engine.commit(done[:1], part=1)
    assert engine.take() == [run(request, 0, 1)]
    engine.commit(done[1:], part=1)
    assert engine.take() == [run(request, 1, 3)]
    assert engine.take() == []


@pytest.mark.parametrize("numbers", [False, True])
def test_each_event_names_the_block_before_its_first_one(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, numbers: bool
) -> None:
    """The last block of the chunk before: published by another event, gone, or never stored. The
    first chunk has none.
    """
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(numbers)))
    engine = Engine(cache)
    request = request_of(6)
    late = request_of(3, 1)
    names = [maybe_convert_block_hash(one) for one in request.block_hashes]
    done = engine.reserved(request)
    engine.commit(done[:2])
    (first,) = engine.take()
    engine.commit(done[2:])
    (second,) = engine.take()
    assert first.parent_block_hash is None
    assert second.parent_block_hash == names[2 * BLOCKS - 1]
    admin.remove(engine.slots.ledgers["host"], [done[n].key for n in (0, 3)])
    engine.commit(engine.reserved(late, first=1))
    before = maybe_convert_block_hash(late.block_hashes[BLOCKS - 1])
    parents = {
        event.block_hashes[0]: event.parent_block_hash
        for event in Engine(cache).take()
    }
    assert parents == {
        names[BLOCKS]: names[BLOCKS - 1],
        names[4 * BLOCKS]: names[4 * BLOCKS - 1],
        maybe_convert_block_hash(late.block_hashes[BLOCKS]): before,
    }


def test_an_event_says_what_a_router_needs_to_hash_for_itself(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(2, session_id="a session")
    engine.stored(request)
    (event,) = engine.take()
    assert event == run(request, session_id="a session")
    assert event.token_ids == list(range(32))
    lora = request_of(1, 7, lora_request=LoRARequest("an-adapter", 3, "/nowhere"))
    engine.stored(lora)
    (event,) = engine.take()
    assert event.lora_id == 3
    assert event.lora_name == "an-adapter"
    assert [list(keys) for keys in event.extra_keys] == [["an-adapter"]] * BLOCKS


def test_of_a_tenant_neither_the_salt_nor_tokens_are_published_or_kept(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(2, 7, cache_salt="secret")
    engine.stored(request, salt="secret")
    assert engine.take() == [run(request, token_ids=[])]
    kept = (engine.slots.ledgers["host"].directory / "notes").read_bytes()
    assert bytes(request.block_hashes[0]) in kept
    assert b"secret" not in kept
    assert np.array(request.all_token_ids[:4], np.int32).tobytes() not in kept
    later = Engine(cache)  # it publishes a tenant when the first request has come
    assert later.take() == []
    root = later.slots.namespace(salt="secret")
    later.events.found(
        later.form.notes(request, root),
        root,
        later.root,
        0,
        later.keys(request, "secret")[:1],
    )
    assert later.take() == [run(request, token_ids=[])]


def test_what_was_not_saved_in_the_end_is_never_published(cache: Cache) -> None:
    engine = Engine(cache)
    done = engine.reserved(request_of(4))
    assert engine.take() == []
    engine.slots.abort(
        [Reserved(copy.key, copy.slot, copy.generation) for copy in done]
    )
    assert engine.take() == []
    # the same slots, for another prompt
    again = engine.reserved(request_of(4, 1))
    assert {copy.slot for copy in again} & {copy.slot for copy in done}
    engine.commit(again)
    assert engine.take() == [run(request_of(4, 1))]


def test_a_chunk_that_goes_while_its_note_is_read_is_not_published(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    engine.stored(request)
    read = engine.events._read

    def evicted_meanwhile(
        notes: ChunkNotes, places: Sequence[tuple[int, bytes]]
    ) -> list[ChunkNote | None]:
        found = read(notes, places)
        cache.clear()
        return found

    monkeypatch.setattr(engine.events, "_read", evicted_meanwhile)
    assert engine.take() == []
    assert engine.take() == []


def test_without_the_log_of_prompts_no_tokens_are_kept(cache: Cache) -> None:
    engine = Engine(cache, keeps_notes=False)
    request = request_of(2)
    engine.stored(request)
    assert engine.take() == [run(request)]
    assert not (engine.slots.ledgers["host"].directory / "notes").exists()
    assert Engine(cache).take() == []


def test_what_is_gone_is_published_and_leaves_no_tokens(cache: Cache) -> None:
    engine = Engine(cache)
    request = request_of(3)
    other = request_of(2, 1)
    engine.stored(request)
    # another namespace, whose tokens are not a secret here
    engine.stored(other, salt="tenant")
    assert len(engine.take()) == 2
    notes = engine.slots.ledgers["host"].directory / "notes"
    tokens = [
        np.array(each.all_token_ids[:CHUNK], np.int32).tobytes()
        for each in (request, other)
    ]
    for each in tokens:
        assert each in notes.read_bytes()
    cache.clear()
    assert engine.take()[-1] == gone(*request.block_hashes)
    assert tokens[0] not in (notes.read_bytes() if notes.exists() else b"")
    assert engine.take() == []
    cache.clear(everything=True)
    assert tokens[1] not in (notes.read_bytes() if notes.exists() else b"")


def test_a_slot_that_took_another_chunk_is_published_at_once(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    first = [request_of(8, seed) for seed in range(8)]
    for request in first:
        engine.stored(request)
    assert (
        len([name for event in engine.take() for name in event.block_hashes])
        == 64 * BLOCKS
    )
    engine.slots._ledger.columns.lease_until[:] = 0
    engine.stored(other := request_of(8, 100))  # evicts
    events = engine.take()
    removed = {
        name
        for event in events
        if isinstance(event, BlockRemoved)
        for name in event.block_hashes
    }
    assert len(removed) == 8 * BLOCKS
    assert events[-1] == run(other)
    for request in first:
        match = engine.slots.match_prefix(engine.keys(request), 0, touch=False)
        assert removed.isdisjoint(
            request.block_hashes[: len(match.slots) * BLOCKS]
        )
        assert removed.issuperset(
            request.block_hashes[len(match.slots) * BLOCKS :]
        )
    assert engine.take() == []


def test_a_chunk_stored_anew_elsewhere_does_not_end_with_its_old_slot(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(1)
    (old,) = engine.stored(request)
    assert engine.take() == [run(request)]
    tier = engine.events._tiers[0]
    generation = tier._generation.copy()
    cache.clear()
    engine.reserved(request_of(2, 5))  # takes the freed slot, among others
    (new,) = engine.stored(request)
    assert new.slot != old.slot
    # as if the old slot had been read before the clear, and the new one after it
    hidden = int(tier.ledger.columns.generation[old.slot])
    tier.ledger.columns.generation[old.slot] = generation[old.slot]
    assert engine.take() == [run(request)]
    tier.ledger.columns.generation[old.slot] = hidden
    for _ in range(2):
        tier.ledger.session.write(lambda _: None)
        # stored the whole time, according to the events
        assert engine.take() == []
    assert not tier._before  # no more is remembered of it
    cache.clear()
    assert engine.take() == [gone(*request.block_hashes)]


def test_what_was_there_before_this_engine_is_published_at_once_and_by_each(
    cache: Cache,
) -> None:
    first = Engine(cache)
    request = request_of(3)
    first.stored(request)
    second = Engine(cache)
    assert first.take() == second.take() == [run(request)]
    cache.clear()
    assert first.take() == second.take() == [gone(*request.block_hashes)]


def test_what_has_no_note_is_published_when_a_request_finds_it(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(3)
    keys = engine.keys(request)
    root = engine.slots.namespace()
    outcomes = engine.slots.reserve(keys, namespace=root, start=0, parent=None)
    engine.commit(copies(keys, outcomes))  # by an engine without events
    engine.slots._ledger.columns.last_use[:3] -= 3_000_000_000  # some seconds ago
    assert engine.take() == []
    engine.events.found(engine.form.notes(request, root), root, root, 0, keys[:2])
    assert engine.take() == [run(request, 0, 2)]
    outcomes = engine.slots.reserve(keys, namespace=root, start=0, parent=None)
    for outcome in outcomes:
        assert isinstance(outcome, Present)
    engine.events.note(engine.form.notes(request, root), root, root, 0, outcomes)
    assert engine.take() == [run(request, 2, 3)]
    # a note was left for the next one
    assert Engine(cache).take() == [run(request)]


def test_what_another_engine_loads_is_published_once_that_one_has_noted_it(
    cache: Cache,
) -> None:
    """From another machine: who loads it knows its tokens, and writes the note when it publishes
    it.
    """
    loads = Engine(cache)
    other = Engine(cache)
    request = request_of(2)
    keys = loads.keys(request)
    root = loads.root
    loads.events.found(loads.form.notes(request, root), root, root, 0, keys)
    loads.commit(
        copies(
            keys, loads.slots.reserve(keys, namespace=root, start=0, parent=None)
        )
    )
    assert other.take() == []
    assert loads.take() == other.take() == [run(request)]
    assert other.take() == []


def test_what_nobody_notes_is_not_looked_for_without_end(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    asked = list[int]()
    keys = engine.keys(request)
    read = engine.events._read
    engine.commit(
        copies(
            keys,
            engine.slots.reserve(
                keys, namespace=engine.root, start=0, parent=None
            ),
        )
    )
    monkeypatch.setattr(
        engine.events, "_read", lambda *of: (asked.append(1), read(*of))[1]
    )
    assert engine.take() == []
    assert asked
    engine.slots._ledger.columns.last_use[:2] -= 3_000_000_000
    assert engine.take() == []
    asked.clear()
    assert engine.take() == []
    assert not asked


def test_what_was_published_after_a_restart_is_not_published_again_when_a_request_finds_it(
    cache: Cache,
) -> None:
    Engine(cache).stored(request := request_of(3))
    engine = Engine(cache)
    assert engine.take() == [run(request)]
    root = engine.slots.namespace()
    engine.events.found(
        engine.form.notes(request, root), root, root, 0, engine.keys(request)
    )
    assert engine.take() == []


def test_after_a_burst_the_thread_leaves_the_interpreter_to_the_engine_unless_it_ends(
    cache: Cache,
) -> None:
    events = Engine(cache).events
    events._rested = time.thread_time() - 0.02
    began = time.monotonic()
    events._rest()
    assert time.monotonic() - began >= 0.2
    events._ended.set()
    events._rested = time.thread_time() - 100.0
    began = time.monotonic()
    events._rest()
    assert time.monotonic() - began < 100.0


def test_all_is_published_again_after_the_engine_cleared_its_blocks(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    engine.stored(request)
    assert engine.take() == [run(request)]
    engine.events._tiers[0].tell_again()
    assert engine.take() == [run(request)]
    engine.events._tiers[0].tell_again()
    cache.clear()  # before its turn
    assert engine.take() == [gone(*request.block_hashes)]


def test_other_weights_take_all_back(cache: Cache) -> None:
    engine = Engine(cache)
    request = request_of(2)
    engine.stored(request)
    assert len(engine.take()) == 1
    root = engine.slots.namespace(salt="renewed")
    engine.root = root
    assert engine.take() == [gone(*request.block_hashes)]
    engine.stored(request, salt="renewed")
    assert engine.take() == [run(request)]
    # an engine with the old weights
    assert Engine(cache).take() == [run(request)]


def test_what_is_noted_while_the_weights_change_is_not_published(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    old = request_of(2)
    request = request_of(1, 1)
    engine.stored(old)
    assert engine.take() == [run(old)]
    root = engine.root
    renewed = engine.slots.namespace(salt="renewed")
    make = engine.form.notes(request, root)

    def changed_meanwhile(chunk: int) -> ChunkNote | None:
        engine.root = renewed
        assert engine.take() == [gone(*old.block_hashes)]
        return make(chunk)

    engine.events.found(changed_meanwhile, root, root, 0, engine.keys(request))
    engine.slots._ledger.session.write(lambda _: None)
    assert engine.take() == []
    assert engine.events._roots == {renewed}


def test_what_the_engine_had_seen_of_other_weights_is_published_when_they_come(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    theirs = Engine(cache)
    request = request_of(2)
    theirs.root = engine.slots.namespace(salt="next")
    theirs.stored(request, salt="next")
    assert engine.take() == []
    engine.root = theirs.root
    assert engine.take() == [run(request)]
    engine.root = engine.slots.namespace()
    assert engine.take() == [gone(*request.block_hashes)]
    assert engine.take() == []


def test_a_request_whose_hashes_are_not_known_yet_is_left_out(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    keys = [*engine.keys(request), bytes(32)]
    root = engine.slots.namespace()
    outcomes = engine.slots.reserve(keys, namespace=root, start=0, parent=None)
    engine.events.note(
        engine.form.notes(request, root),
        root,
        root,
        0,
        [*outcomes, Busy(bytes(32), 1)],
    )
    engine.commit(copies(keys, outcomes))
    assert engine.take() == [run(request)]


def test_the_disk_is_published_too_and_its_notes_outlive_host_memory(
    shm_root: Path, tmp_path: Path
) -> None:
    request = request_of(3)
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(cache)
        engine.stored(request)
        assert cache.flush(10.0)
        assert engine.take() == [run(request), run(request, medium="STORAGE")]
    shutil.rmtree(shm_root)
    shm_root.mkdir()
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(cache)
        assert engine.take() == [run(request, medium="STORAGE")]
        assert (
            cache.prefetch(None, keys=engine.keys(request)[:2])
            .result()
            .stop_tokens
            == 2 * CHUNK
        )
        assert engine.take() == [run(request, 0, 2)]  # by the note of the disk
        cache.clear()
        assert engine.take() == [
            gone(*request.block_hashes[: 2 * BLOCKS]),
            gone(*request.block_hashes, medium="STORAGE"),
        ]


def test_notes_that_are_torn_or_cannot_be_written_cost_only_events(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    (copy, _) = engine.stored(request)
    notes = engine.slots.ledgers["host"].directory / "notes"
    with notes.open("r+b") as file:
        file.seek(copy.slot * 4096 + 100)
        file.write(b"torn")
    later = Engine(cache)
    assert later.take() == [run(request, 1, 2)]
    notes.unlink()
    notes.mkdir()
    engine.stored(request_of(1, 5))
    assert run(request_of(1, 5)) in engine.take()
    assert "not reported to routers" in caplog.text


def test_vllm_can_send_them_and_hashes_are_what_its_own_pool_sends(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    engine = Engine(cache)
    request = request_of(2)
    done = engine.reserved(request)
    engine.commit(done[:1])
    events = engine.take()
    engine.commit(done[1:])
    events += engine.take()
    short = [int.from_bytes(each[-8:], "big") for each in request.block_hashes]
    assert [each.block_hashes for each in events] == [
        short[:BLOCKS],
        short[BLOCKS:],
    ]
    assert events[1].parent_block_hash == short[BLOCKS - 1]
    cache.clear()
    events += engine.take()
    assert events[2].block_hashes == short
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch).events == events


def test_a_chunk_that_is_being_replaced_is_not_taken_for_the_next_one(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    columns = cache.slots._ledger.columns
    published = list[KVCacheEvent]()
    engine.stored(request_of(1))
    generations = columns.cells[0]

    class Seen:
        """The column of generations; a round runs right after each change, as it may in another
        process.
        """

        def __setitem__(self, slot: int, generation: int) -> None:
            generations[slot] = generation
            published.extend(engine.take())

        def __getitem__(self, slot: int) -> int:
            return int(generations[slot])

    columns.cells[0] = Seen()
    cache.clear()
    engine.stored(other := request_of(1, 1))
    assert published == []  # the first is gone, the second not ready
    columns.cells[0] = generations
    assert engine.take() == [run(other)]


def test_what_is_gone_is_published_before_all_that_is_new_was_published(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    engine = Engine(cache)
    requests = [request_of(8, seed) for seed in range(8)]
    for request in requests:
        engine.stored(request)
    first = [name for event in engine.take() for name in event.block_hashes]
    assert len(first) == PIECE * BLOCKS  # one piece of them
    cache.clear()
    (removed,) = engine.take()
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(first)
    assert engine.take() == []


def test_a_large_clear_of_one_tier_keeps_no_other_waiting(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._GONE_PIECE", 2)
    request = request_of(8)
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(cache)
        engine.stored(request)
        assert cache.flush(10.0)
        assert (
            sum(
                len(event.block_hashes)
                for _ in range(4)
                for event in engine.take()
            )
            == 2 * 8 * BLOCKS
        )
        admin.clear(engine.slots.ledgers["host"])
        admin.remove(engine.slots.ledgers["disk"], engine.keys(request)[7:])
        first, second = engine.take()
        assert first.medium == "CPU"
        assert len(first.block_hashes) == 2 * BLOCKS
        assert second == gone(
            *request.block_hashes[7 * BLOCKS :], medium="STORAGE"
        )
        rest = [event for _ in range(5) for event in engine.take()]
        assert [(event.medium, len(event.block_hashes)) for event in rest] == [
            ("CPU", 2 * BLOCKS)
        ] * 3


def test_what_is_stored_again_during_a_large_clear_stays_published(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old slot is seen to be free after its new one was published."""
    engine = Engine(cache)
    request = request_of(8)
    again = request_of(1)
    engine.stored(request)
    assert engine.take() == [run(request)]
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._GONE_PIECE", 1)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._ROWS", 1)
    monkeypatch.setattr(
        "pagoda.kv_events.tier_difference._CHOSEN_SECONDS", -1.0
    )  # also in the middle of a walk
    cache.clear()
    (other,) = engine.stored(request_of(1, 1))
    (new,) = engine.stored(again)
    # the last of the first eight slots that are looked at
    assert other.slot == 0
    assert new.slot == 1
    held = set(request.block_hashes)
    for _ in range(20):
        events = engine.take()
        for event in events:
            change = (
                held.update
                if isinstance(event, BlockStored)
                else held.difference_update
            )
            change(event.block_hashes)
    assert not events
    assert held == {*again.block_hashes, *request_of(1, 1).block_hashes}


def test_weights_that_change_during_a_large_clear_take_back_the_rest(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the slots that were looked at before."""
    engine = Engine(cache)
    request = request_of(8)
    done = engine.stored(request)
    assert engine.take() == [run(request)]
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._GONE_PIECE", 1)
    admin.remove(
        engine.slots.ledgers["host"],
        [copy.key for copy in done if copy.slot in (3, 5)],
    )
    assert [len(event.block_hashes) for event in engine.take()] == [BLOCKS]
    engine.root = engine.slots.namespace(salt="renewed")
    published = [
        name
        for _ in range(20)
        for event in engine.take()
        for name in event.block_hashes
    ]
    assert len(set(published)) == len(published) == 7 * BLOCKS


def test_a_slot_that_takes_another_chunk_before_its_turn_is_not_published_under_the_key_of_before(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has published the new generation, and the new key a moment later."""
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.kv_events.tier_difference.PIECE", 8)
    engine = Engine(cache)
    request = request_of(12)
    columns = cache.slots._ledger.columns
    engine.stored(request)
    (first,) = engine.take()
    (slot, *_) = (int(each) for each in engine.events._tiers[0]._chosen)
    key = columns.key_of(slot)
    columns.last_use[slot] = NOT_READY
    columns.generation[slot] = 1000
    # as whoever publishes does
    engine.slots.ledgers["host"].session.write(lambda _: None)
    read = engine.events._read

    def completed_meanwhile(
        notes: ChunkNotes, places: Sequence[tuple[int, bytes]]
    ) -> list[ChunkNote | None]:
        found = read(notes, places)
        columns.keys[slot] += np.uint64(1)
        columns.last_use[slot] = 1
        return found

    monkeypatch.setattr(engine.events, "_read", completed_meanwhile)
    events = engine.take()
    assert key in engine.keys(request)
    assert len(first.block_hashes) == 8 * BLOCKS
    assert sum(len(event.block_hashes) for event in events) == 3 * BLOCKS
    assert not engine.events._tiers[0]._held[slot]


def test_what_the_outlet_did_not_take_is_published_once_it_does(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_ROUND": 0.01, "_RETELL": 0.02}.items():
        monkeypatch.setattr(
            f"pagoda.kv_events.stored_events.{name}_SECONDS", value
        )
    engine = Engine(cache)
    first = request_of(3)
    second = request_of(2, 1)
    engine.stored(first)
    assert engine.take() == [run(first)]
    held = set(run(first).block_hashes)
    send = engine.outlet.send
    failures = [0]

    def sends(events: Sequence[KVCacheEvent]) -> None:
        if failures[0] < 3:
            failures[0] += 1
            raise RuntimeError("Publisher is closed")
        for event in events:
            if isinstance(event, AllBlocksCleared):
                held.clear()
            elif isinstance(event, BlockStored):
                held.update(event.block_hashes)
            else:
                held.difference_update(event.block_hashes)
        send(events)

    monkeypatch.setattr(engine.outlet, "send", sends)
    monkeypatch.setattr(
        engine.outlet,
        "report_all",
        lambda: map(engine.outlet.send, [[AllBlocksCleared()]]),
    )
    engine.events.start()
    cache.clear()  # of which the first event is lost
    until = time.monotonic() + 20.0
    while not failures[0]:
        assert time.monotonic() < until
        time.sleep(0.001)
    engine.stored(second)
    while held != set(run(second).block_hashes):
        assert time.monotonic() < until, "not published"
        time.sleep(0.01)
    engine.events.close()


def test_a_round_that_fails_forgets_no_other_weights_tenants_or_notes(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    theirs = request_of(1, 1)
    engine.stored(request)
    assert engine.take() == [run(request)]
    send = engine.outlet.send
    monkeypatch.setattr(engine.outlet, "send", lambda _: 1 / 0)
    engine.events._full_report = map(engine.outlet.send, [[AllBlocksCleared()]])
    engine.root = engine.slots.namespace(salt="renewed")
    with pytest.raises(ZeroDivisionError):
        engine.take()
    monkeypatch.setattr(engine.outlet, "send", send)
    engine.stored(theirs, salt="renewed")
    assert engine.take() == [gone(*request.block_hashes), run(theirs)]


@pytest.mark.parametrize("where", ["_read", "stored"])
def test_what_a_round_that_fails_was_about_to_publish_is_published_although_nothing_changes(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = Engine(cache)
    request = request_of(2)
    engine.stored(request)
    engine.slots._ledger.columns.last_use[:2] -= 3_000_000_000  # some seconds ago
    whose: object = engine.events if where == "_read" else engine.form
    work = getattr(whose, where)
    failures = iter([MemoryError()])

    def fails_once(*of: object) -> object:
        for failure in failures:
            raise failure
        return work(*of)

    monkeypatch.setattr(whose, where, fails_once)
    engine.events.start()
    until = time.monotonic() + 20.0
    published = list[KVCacheEvent]()
    while not published:
        assert time.monotonic() < until, "not published"
        published += engine.outlet.take()
        time.sleep(0.01)
    engine.events.close()
    assert published == [run(request)]


def test_an_engine_that_ends_waits_for_no_events(cache: Cache) -> None:
    engine = Engine(cache)
    requests = [request_of(8, seed) for seed in range(8)]
    for request in requests:
        engine.stored(request)
    engine.take()
    cache.clear()
    engine.events._ended.set()
    assert not engine.events._round()
    assert not engine.outlet.take()[1:]


def test_a_request_that_cannot_be_noted_is_stored_all_the_same(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(cache)
    odd = request_of(2)
    other = request_of(1, 1)
    odd.all_token_ids._x[0] = 1 << 40
    engine.stored(odd)
    assert engine.take() == []
    assert "routers do not hear of some chunks" in caplog.text
    engine.stored(other)
    assert engine.take() == [run(other)]


@pytest.mark.parametrize("rows", [1 << 16, 7])
def test_of_many_chunks_those_used_last_are_published_first_and_then_the_others(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("pagoda.kv_events.tier_difference._ROWS", rows)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._MOST_CHOSEN", 5)
    engine = Engine(cache)
    requests = [request_of(3, seed) for seed in range(4)]
    for request in requests:
        engine.stored(request)
    again = Engine(cache)  # after a restart
    published: list[object] = []
    while events := again.take():
        published += [name for event in events for name in event.block_hashes]
    assert published == [
        name
        for request in reversed(requests)
        for name in run(request).block_hashes
    ]


def test_what_is_used_meanwhile_does_not_wait_for_all_that_was_chosen_before(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.kv_events.tier_difference._CHOSEN_SECONDS", -1.0)
    engine = Engine(cache)
    new = request_of(2, 9)
    for seed in range(3):
        engine.stored(request_of(PIECE, seed))
    assert engine.take() == [run(request_of(PIECE, 2))]
    engine.stored(new)
    assert engine.take()[0] == run(new)


def test_a_note_of_another_version_silences_no_other_chunk(cache: Cache) -> None:
    engine = Engine(cache)
    request = request_of(3)
    done = engine.stored(request)
    ChunkNotes(engine.slots.ledgers["host"].directory).write(
        [(done[1].slot, done[1].key, b"another version")]
    )
    assert Engine(cache).take() == [run(request, 0, 1), run(request, 2, 3)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", b"odd"),
        ("hashes", b""),
        ("hashes", b"short" * BLOCKS),
        ("tokens", b"odd"),
    ],
)
def test_a_note_of_odd_sizes_silences_no_other_chunk(
    cache: Cache, field: str, value: bytes
) -> None:
    engine = Engine(cache)
    request = request_of(3)
    done = engine.stored(request)
    note = engine.form.notes(request, engine.slots.namespace())(1)
    assert note is not None
    odd = msgspec.structs.replace(note, **{field: value})
    ChunkNotes(engine.slots.ledgers["host"].directory).write(
        [(done[1].slot, done[1].key, msgspec.msgpack.encode(odd))]
    )
    assert Engine(cache).take() == [run(request, 0, 1), run(request, 2, 3)]


def test_so_many_notes_are_remembered_and_no_more(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of chunks that wait for their turn are beside the tier by then."""
    monkeypatch.setattr("pagoda.kv_events.stored_events._REMEMBERED", 5)
    engine = Engine(cache)
    requests = [request_of(3, seed) for seed in range(4)]
    for request in requests:
        engine.stored(request)
    events = engine.events
    assert len(events._fresh) == 5
    assert events._told_of == events._fresh.keys()
    published = [name for event in engine.take() for name in event.block_hashes]
    assert sorted(published) == sorted(
        name for request in requests for name in request.block_hashes
    )


def test_only_the_note_of_the_same_chunk_is_erased(tmp_path: Path) -> None:
    notes = ChunkNotes(tmp_path)
    (one, other) = (bytes([n]) * 32 for n in (1, 2))
    notes.write([(3, one, b"a note"), (5, other, b"another")])
    # of which the first slot has taken another chunk since
    notes.erase([(3, other), (4, one), (5, other)])
    assert notes.read([(3, one), (5, other)]) == [b"a note", None]
    assert list(notes.places()) == [(3, one)]


def test_a_clear_while_a_note_is_copied_leaves_no_tokens(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cache)
    request = request_of(1)
    notes = engine.slots.ledgers["host"].directory / "notes"
    keys = engine.keys(request)
    root = engine.slots.namespace()
    outcomes = engine.slots.reserve(keys, namespace=root, start=0, parent=None)
    engine.commit(copies(keys, outcomes))  # by an engine without events
    engine.events.found(engine.form.notes(request, root), root, root, 0, keys)
    elsewhere = engine.events._notes_elsewhere

    def cleared_meanwhile(*args: object) -> dict[bytes, ChunkNote]:
        found = elsewhere(*args)  # type: ignore[arg-type]
        cache.clear()
        return found

    monkeypatch.setattr(engine.events, "_notes_elsewhere", cleared_meanwhile)
    assert engine.take() == []
    assert (
        np.array(request.all_token_ids[:CHUNK], np.int32).tobytes()
        not in notes.read_bytes()
    )


def test_slots_of_tenants_that_came_and_went_are_published_of_the_one_that_comes(
    cache: Cache,
) -> None:
    engine = Engine(cache)
    theirs = Engine(cache)
    for turn in range(40):
        theirs.stored(request_of(2, turn), salt="tenant")
        assert engine.take() == []
        admin.clear(engine.slots.ledgers["host"])  # of all namespaces
    theirs.stored(request_of(2, 8), salt="another")
    theirs.stored(last := request_of(2, 9), salt="tenant")
    assert engine.take() == []
    root = engine.slots.namespace(salt="tenant")
    engine.events.found(
        engine.form.notes(last, root),
        root,
        engine.root,
        0,
        engine.keys(last, "tenant")[:1],
    )
    assert engine.take() == [run(last)]
    assert engine.take() == []


def test_a_router_that_connects_and_leaves_keeps_no_other_from_receiving_all(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cache)
    port = free_port()
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}"
    )
    engine.events._outlet = EventOutlet(config)
    # as vLLM's scheduler does after the connector
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, LivePublisher)
    newcomers = publisher.newcomers
    # at any time
    monkeypatch.setattr(publisher, "newcomers", lambda: newcomers() or True)
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        engine.events.start()
        until = time.monotonic() + 20.0
        cleared = 0
        while cleared < 2:
            assert subscriber.poll(1000 * max(0.0, until - time.monotonic()))
            batch = msgspec.msgpack.decode(
                subscriber.recv_multipart()[2], type=KVEventBatch
            )
            cleared += sum(
                isinstance(event, AllBlocksCleared) for event in batch.events
            )
    monkeypatch.undo()
    publisher.shutdown()
    engine.events.close()
    publisher.send([AllBlocksCleared()])  # after the end: of no use, and no error


def test_routers_that_connect_all_the_time_do_not_keep_it_from_publishing_all(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that comes makes all routers begin again: the last chunks must be published all the
    same.
    """
    for name, value in {"_ROUND": 0.02, "_PAUSE": 0.02, "_RETELL": 0.05}.items():
        monkeypatch.setattr(
            f"pagoda.kv_events.stored_events.{name}_SECONDS", value
        )
    # a piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    engine = Engine(cache)
    requests = [request_of(8, seed) for seed in range(7)]
    for request in requests:
        engine.stored(request)
    held = set[bytes]()
    most = 0
    times = 0
    outlet = engine.events._outlet
    monkeypatch.setattr(outlet, "newcomers", lambda: True)
    monkeypatch.setattr(
        outlet, "report_all", lambda: iter([outlet.send([AllBlocksCleared()])])
    )
    engine.events.start()
    until = time.monotonic() + 20.0
    while time.monotonic() < until and (most < 56 * BLOCKS or times < 3):
        for event in engine.outlet.take():
            if isinstance(event, AllBlocksCleared):
                held = set()
                times = times + 1
            elif isinstance(event, BlockStored):
                held |= set(event.block_hashes)
            most = max(most, len(held))
        time.sleep(0.01)
    engine.events.close()
    assert most == 56 * BLOCKS
    assert times >= 3


def test_the_tiers_are_published_again_when_the_engine_reports_that_all_is_cleared(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It means its own memory, and routers forget the tiers too."""
    engine = Engine(cache)
    request = request_of(3)
    published = list[KVCacheEvent]()
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{free_port()}",
    )
    engine.events._outlet = EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, LivePublisher)
    monkeypatch.setattr(
        publisher, "send", lambda events: published.extend(decoded(events))
    )
    engine.stored(request)
    engine.events.start()
    until = time.monotonic() + 20.0
    for times in (1, 2):
        while published != [run(request)] * times:
            assert time.monotonic() < until, "not published"
            time.sleep(0.01)
        publisher.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
    engine.events.close()
    publisher.shutdown()


def test_all_is_published_to_a_router_once_it_subscribes(cache: Cache) -> None:
    """A busy router connects, and subscribes much later: until then a publisher drops what it
    sends.
    """
    engine = Engine(cache)
    request = request_of(3)
    port = free_port()
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}"
    )
    engine.events._outlet = EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    engine.events.start()
    engine.stored(request)
    wanted = set(run(request).block_hashes)
    received = set()
    with zmq.Context.instance().socket(zmq.SUB) as router:
        router.connect(f"tcp://127.0.0.1:{port}")
        time.sleep(1.5)
        for _ in range(2):  # and once more: the same router, after it was silent
            router.setsockopt(zmq.SUBSCRIBE, b"")
            until = time.monotonic() + 20.0
            while received != wanted:
                assert router.poll(1000 * max(0.0, until - time.monotonic())), (
                    "not published"
                )
                batch = msgspec.msgpack.decode(
                    router.recv_multipart()[2], type=KVEventBatch
                )
                received |= {
                    name
                    for one in batch.events
                    if isinstance(one, BlockStored)
                    for name in one.block_hashes
                }
            router.setsockopt(zmq.UNSUBSCRIBE, b"")
            received.clear()
    publisher.shutdown()
    engine.events.close()


def test_what_is_in_the_engines_own_memory_is_published_to_a_new_subscriber() -> (
    None
):
    """Block by block, of what is left of the events that passed, with numbers that rise over a
    restart.
    """
    numbers = []
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="inproc://"
    )
    for _ in range(2):
        config.endpoint = f"tcp://*:{free_port()}"
        EventOutlet(config)
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, LivePublisher)
        with zmq.Context.instance().socket(zmq.SUB) as router:
            router.setsockopt(zmq.SUBSCRIBE, b"")
            router.connect(config.endpoint.replace("*", "127.0.0.1"))
            until = time.monotonic() + 20.0
            while not publisher.newcomers():
                assert time.monotonic() < until
                time.sleep(0.01)
            extra = [("an adapter",), None, ("an image", 2), None]
            one, other = (
                run(
                    request_of(1, seed),
                    medium="GPU",
                    locality=None,
                    extra_keys=extra,
                )
                for seed in (1, 2)
            )
            names = one.block_hashes
            for events in (
                [AllBlocksCleared()],
                [other],
                [AllBlocksCleared()],
                [one],
            ):
                publisher.publish(KVEventBatch(ts=1.0, events=events))
            removed = BlockRemoved(
                block_hashes=names[2:], medium="GPU", group_idx=0
            )
            publisher.publish(KVEventBatch(ts=1.0, events=[removed]))
            assert publisher.cleared == 2
            assert list(publisher.report_all()) == [None]  # one piece
            published = []
            while len(published) < 8:
                assert router.poll(20_000)
                _, number, batch = router.recv_multipart()
                numbers.append(int.from_bytes(number, "big"))
                published += msgspec.msgpack.decode(
                    batch, type=KVEventBatch
                ).events
        publisher.shutdown()
        assert isinstance(published[5], AllBlocksCleared)
        assert [event.block_hashes for event in published[6:]] == [
            [name] for name in names[:2]
        ]
        assert [event.parent_block_hash for event in published[6:]] == [
            None,
            names[0],
        ]
        assert [list(event.extra_keys) for event in published[6:]] == [
            [("an adapter",)],
            [None],
        ]
        assert [list(event.token_ids) for event in published[6:]] == [
            list(range(at, at + 4)) for at in (1000, 1004)
        ]
    assert numbers == sorted(set(numbers))


def test_chunks_of_one_prompt_that_were_stored_by_unlike_requests_are_published_separately() -> (
    None
):
    """The first chunk by a request of text alone, or in a session, the others by one with an image
    behind it.
    """
    groups = {0: BlockFacts(CHUNK, BLOCK, "full_attention")}
    root = bytes(32)
    form = VLLMEventForm(groups, BLOCK)
    place = PlaceholderRange(offset=CHUNK + 2, length=BLOCK)
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="an image", mm_position=place
    )
    whole = request_of(3, mm_features=[image])
    first, second = map(form.notes(request_of(2), root), range(2))
    of_session = form.notes(request_of(1, session_id="a session"), root)(0)
    first_of_whole, *others = map(form.notes(whole, root), range(3))
    assert first
    assert second
    assert of_session
    assert first_of_whole
    assert all(others)
    for notes in ([first, *others], [of_session, second]):
        published = [
            len(form.stored(run, "CPU").block_hashes)
            for run in runs(notes, groups)
        ]
        assert published == [BLOCKS, (len(notes) - 1) * BLOCKS]
    (only,) = runs([first_of_whole, *others], groups)
    event = form.stored(only, "CPU")
    keys = [each and [tuple(key) for key in each] for each in event.extra_keys]
    assert keys == [None] * BLOCKS + [[("an image", 2)], [("an image", -2)]] + [
        None
    ] * (2 * BLOCKS - 2)


@pytest.mark.parametrize("numbers", ["0", "1"])
def test_blocks_are_named_as_vllm_names_them(
    monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    form = VLLMEventForm(GROUPS, BLOCK)
    request = request_of(2)
    note = form.notes(request, bytes(32), 0)(1)
    assert note is not None
    names = [maybe_convert_block_hash(one) for one in request.block_hashes]
    event = form.stored([note], "CPU")
    assert event.block_hashes == names[BLOCKS:]
    assert event.parent_block_hash == names[BLOCKS - 1]
    assert (
        form.removed([note.hashes, note.hashes], "CPU", 0).block_hashes
        == names[BLOCKS:] * 2
    )
    assert form.removed([], "CPU", 0).block_hashes == []


def test_what_is_gone_is_published_before_all_of_the_engines_own_memory(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that comes makes it publish everything, which takes a large engine seconds."""
    # one piece a round
    monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
    monkeypatch.setattr("pagoda.connectors.vllm.event_publisher._PIECE", 2)
    engine = Engine(cache)
    request = request_of(1)
    config = KVEventsConfig(enable_kv_cache_events=True)
    config.publisher = "zmq"
    config.endpoint = f"tcp://*:{free_port()}"
    engine.events._outlet = outlet = EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, LivePublisher)
    published: list[object] = []
    send = publisher.send
    monkeypatch.setattr(
        publisher,
        "send",
        lambda events: (published.extend(decoded(events)), send(events)),
    )
    device = run(request_of(2, 1), medium="GPU", locality=None)
    publisher.publish(KVEventBatch(ts=1.0, events=[device]))
    engine.stored(request)
    engine.events._full_report = outlet.report_all()
    engine.take()
    assert isinstance(published.pop(0), AllBlocksCleared)
    assert published.pop(2) == run(request)
    cache.clear()
    rounds = 1
    while not engine.events._round():
        rounds += 1
        assert rounds < 100
    publisher.shutdown()
    names = [
        event.block_hashes
        for event in published
        if isinstance(event, BlockStored)
    ]
    assert names == [[name] for name in device.block_hashes]
    assert published.index(gone(*request.block_hashes)) == 4


def test_chunks_of_each_group_of_a_hybrid_model_are_published_with_their_kind(
    shm_root: Path, tmp_path: Path
) -> None:
    """On the disk those of full attention alone: Dynamo reads no groups there, and the hashes are
    the same.
    """
    kinds = {
        0: ("full_attention", None),
        2: ("sliding_window", 6),
        3: ("mamba", None),
    }
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(cache, groups=HYBRID)
        request = request_of(3)
        for group in HYBRID:
            engine.stored(request, group=group)
        assert cache.flush(10.0)
        # the second one after a restart
        for each in (engine, Engine(cache, groups=HYBRID)):
            published: list[KVCacheEvent] = []
            until = time.monotonic() + 20.0
            while (
                sum(len(event.block_hashes) for event in published)
                < 4 * 3 * BLOCKS
            ):
                published += each.take()
                assert time.monotonic() < until
            assert each.take() == []
            places = {("CPU", 0), ("CPU", 2), ("CPU", 3), ("STORAGE", 0)}
            assert {
                (event.medium, event.group_idx) for event in published
            } == places
            for medium, group in places:
                kind, window = kinds[group]
                mine = [
                    one
                    for one in published
                    if (one.medium, one.group_idx) == (medium, group)
                ]
                what = {
                    "medium": medium,
                    "group_idx": group,
                    "kv_cache_spec_kind": kind,
                }
                what |= {"kv_cache_spec_sliding_window": window}
                names = [name for one in mine for name in one.block_hashes]
                assert names == run(request).block_hashes
                first = len(mine[0].block_hashes) // BLOCKS
                assert mine[0] == run(request, 0, first, **what)


def test_a_window_that_is_evicted_takes_no_credit_of_full_attention_away(
    cache: Cache,
) -> None:
    engine = Engine(cache, groups=HYBRID)
    request = request_of(2)
    full, window = (engine.stored(request, group=group) for group in (0, 2))
    assert {event.group_idx for event in engine.take()} == {0, 2}
    admin.remove(
        engine.slots.ledgers["host"], [copy.key for copy in (window[1], full[1])]
    )
    last = request.block_hashes[BLOCKS:]
    assert sorted(engine.take(), key=lambda event: event.group_idx) == [
        gone(*last),
        msgspec.structs.replace(gone(*last), group_idx=2),
    ]


def test_a_window_that_goes_on_where_full_attention_ends_is_no_credit_of_full_attention(
    cache: Cache,
) -> None:
    """The hashes are the same, so a window's chunk may have a chunk of full attention as its parent
    by name.
    """
    engine = Engine(cache, groups=HYBRID)
    request = request_of(2)
    engine.stored(request_of(1))
    engine.commit(engine.reserved(request, first=1, group=2))
    published = sorted(engine.take(), key=lambda event: event.group_idx)
    assert published == [
        run(request, 0, 1),
        run(
            request,
            1,
            2,
            group_idx=2,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=6,
        ),
    ]


def test_a_block_of_several_hashes_is_named_by_the_last(cache: Cache) -> None:
    """Blocks of attention are as long as a state is large, and vLLM hashes shorter pieces."""
    groups = {1: BlockFacts(CHUNK, CHUNK, "full_attention")}
    form = VLLMEventForm(groups, BLOCK)
    request = request_of(2)
    notes = [form.notes(request, bytes(32), 1)(chunk) for chunk in range(3)]
    assert notes[2] is None
    (only,) = runs([note for note in notes if note], groups)
    event = form.stored(only, "CPU")
    assert event.block_hashes == request.block_hashes[BLOCKS - 1 :: BLOCKS]
    assert event.block_size == CHUNK
    assert event.group_idx == 1
    assert event.parent_block_hash is None
    second = notes[1]
    assert second is not None
    assert second.parent == request.block_hashes[BLOCKS - 1]


def test_a_long_chunk_has_a_note_too() -> None:
    """Of models with states a chunk is a block, of some 1,000 to 2,000 tokens."""
    root = bytes(range(32))
    random = np.random.default_rng(1)
    often = 1 / np.arange(3, 150_003)  # as words in a text
    for tokens, share in ((1056, None), (1600, often / often.sum())):
        ids = random.choice(150_000, tokens, p=share).astype(np.int32).tobytes()
        note = ChunkNote(root, root, root, ids, group=1)
        kept = packed(note, MOST_NOTE_BYTES)
        assert len(kept) <= MOST_NOTE_BYTES
        assert unpacked(kept) == note
    huge = packed(ChunkNote(root, root, root, bytes(2 << 20)), MOST_NOTE_BYTES)
    for odd in (b"", b"\x78", kept[:-9], b"\x78" + kept[2:], huge):
        with pytest.raises(ValueError):
            unpacked(odd)


def test_the_blocks_of_each_group_of_the_engines_own_memory_are_published_to_a_new_subscriber() -> (
    None
):
    """Groups have the same hashes; of windows and states vLLM leaves blocks out of an event, and
    not their tokens.
    """
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{free_port()}",
    )
    EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, LivePublisher)
    full = run(request_of(1), medium="GPU", locality=None)
    state = run(
        request_of(1),
        medium="GPU",
        group_idx=1,
        kv_cache_spec_kind="mamba",
        locality=None,
    )
    state = msgspec.structs.replace(state, block_hashes=state.block_hashes[1:3])
    removed = BlockRemoved(
        block_hashes=state.block_hashes[:1], medium="GPU", group_idx=1
    )
    for event in (full, state, removed):
        publisher.publish(KVEventBatch(ts=1.0, events=[event]))
    published: list[KVCacheEvent] = []
    publisher.send = published.extend  # type: ignore[method-assign]
    assert list(publisher.report_all()) == [None]  # one piece
    publisher.shutdown()
    assert isinstance(published.pop(0), AllBlocksCleared)
    assert [(event.group_idx, event.block_hashes) for event in published] == [
        *((0, [name]) for name in full.block_hashes),
        (1, state.block_hashes[1:]),
    ]
    assert [list(event.token_ids) for event in published] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [],
    ]
    assert published[-1].parent_block_hash is None


def test_two_engines_of_a_process_may_be_given_the_same_config() -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    for _ in range(2):
        config.endpoint = f"tcp://*:{free_port()}"
        outlet = EventOutlet(config)
        publisher = EventPublisherFactory.create(config)
        assert outlet._publisher is publisher
        assert config.publisher == "zmq"
        publisher.shutdown()


def test_an_engine_that_has_ended_leaves_nothing_of_its_memory_to_the_process() -> (
    None
):
    """What a publisher remembers of a large engine's blocks is hundreds of MiB of token ids."""
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{free_port()}",
    )
    outlet = EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    publisher.publish(
        KVEventBatch(
            ts=1.0, events=[run(request_of(2), medium="GPU", locality=None)]
        )
    )
    publisher.shutdown()
    left = weakref.ref(publisher)
    del outlet, publisher
    gc.collect()
    assert left() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "pieces"), [(1 << 16, False), (7, False), (7, True)]
)
def test_random_stores_and_evictions_leave_a_router_with_the_truth(
    shm_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    pieces: bool,
) -> None:
    # looked at at once
    monkeypatch.setattr("pagoda.kv_events.tier_difference._ROWS", rows)
    if pieces:
        monkeypatch.setattr("pagoda.kv_events.stored_events._MOST_TELLING", -1.0)
        monkeypatch.setattr("pagoda.kv_events.tier_difference._GONE_PIECE", 2)
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(cache)
        held = {"CPU": set[bytes](), "STORAGE": set[bytes]()}
        requests = [request_of(1 + seed % 5, seed) for seed in range(40)]

        def apply(events: Sequence[KVCacheEvent]) -> None:
            for event in events:
                now = held[event.medium]
                hashes = set(event.block_hashes)
                if isinstance(event, BlockStored):
                    assert pieces or now.isdisjoint(hashes)
                    now |= hashes
                else:
                    assert now >= hashes
                    now -= hashes

        random = Random(1)
        for turn in range(400):
            engine.slots._ledger.columns.lease_until[:] = 0
            done = engine.reserved(random.choice(requests))
            if turn % 3:
                engine.commit(done)
            else:
                engine.slots.abort(
                    [
                        Reserved(copy.key, copy.slot, copy.generation)
                        for copy in done
                    ]
                )
            if turn % 100 == 50:
                cache.clear()
            if turn % 50 == 25:
                cache.flush(10.0)
            apply(engine.take())
        assert cache.flush(10.0)
        while not engine.events._round():
            apply(engine.outlet.take())
        apply(engine.outlet.take())
        for name, medium in (("host", "CPU"), ("disk", "STORAGE")):
            there = {
                row.key for row in admin.list_chunks(engine.slots.ledgers[name])
            }
            named = {
                key: set(request.block_hashes[n * BLOCKS : (n + 1) * BLOCKS])
                for request in requests
                for n, key in enumerate(engine.keys(request))
            }
            assert held[medium] == {name for key in there for name in named[key]}
            assert len(there) > 10
        assert AllBlocksCleared not in map(type, engine.take())


def test_strangers_cost_the_engine_s_process_nothing() -> None:
    """vLLM listens in all networks: a long subscription is refused, and connections are few."""
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{free_port()}",
    )
    EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    port = int(config.endpoint.rpartition(":")[2])
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    greeting = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0")

    def is_ended(stranger: socket.socket) -> bool:
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
        return True

    try:
        with contextlib.ExitStack() as stack:
            several = [
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), 10.0)
                )
                for _ in range(40)
            ]
            assert is_ended(several[0])  # for the last
            length = (4 << 20).to_bytes(8, "big")
            several[-1].sendall(
                greeting + ready + b"\x02" + length + b"\x01" + bytes(60_000)
            )
            assert is_ended(several[-1])
    finally:
        publisher.shutdown()
