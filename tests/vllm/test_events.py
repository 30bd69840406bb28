"""Events about host memory: stored only after the commit, removed after the removal, over a real cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pagoda.cache import Cache
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.events import StoredEvents
from pagoda.keys import derive_keys
from pagoda.ledger import Busy, Outcome, Present, Reserved
from pagoda.testing.fake_clock import FakeClock
from tests.cache.kit import CHUNK, cache_at

BLOCK = 4
BLOCKS = CHUNK // BLOCK  # of a chunk


@pytest.fixture
def cache(shm_root: Path) -> Iterator[Cache]:
    with cache_at(shm_root, None) as cache:  # 64 slots
        yield cache


@pytest.fixture(autouse=True)
def _hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # whole ones, as requests have them
    init_none_hash(sha256)


class Engine:
    """What the connector's halves do around the events: reserve for a request, commit, evict."""

    def __init__(self, cache: Cache) -> None:
        assert cache.slots is not None
        self.slots: HostSlots = cache.slots
        self.clock = FakeClock()
        self.events = StoredEvents(self.slots, CHUNK, BLOCK, self.clock)

    def reserved(self, request: Request, first: int = 0, parts: int = 1) -> list[ChunkRef]:
        keys = self.keys(request)
        outcomes = self.slots.reserve(
            keys[first:], namespace=self.slots.namespace(), start=first, parent=keys[first - 1] if first else None,
            parts=parts,
        )  # fmt: skip
        self.events.note(request, first, outcomes)
        return copies(keys, outcomes, first)

    def keys(self, request: Request) -> list[bytes]:
        return derive_keys(request.block_hashes[BLOCKS - 1 :: BLOCKS], self.slots.namespace())

    def commit(self, done: Sequence[ChunkRef], part: int = 0) -> None:
        assert self.slots.commit({self.slots.namespace(): done}, part) == [True] * len(done)

    def stored(self, request: Request) -> list[ChunkRef]:
        done = self.reserved(request)
        self.commit(done)
        return done

    def take(self, later: float = 0.0) -> list[KVCacheEvent]:
        self.clock.advance(later)
        return list(self.events.take())


def copies(keys: Sequence[bytes], outcomes: Sequence[Outcome], first: int = 0) -> list[ChunkRef]:
    return [
        ChunkRef(item.key, n, keys[n - 1] if n else None, item.slot, item.generation)
        for n, item in enumerate(outcomes, first)
        if isinstance(item, Reserved)
    ]


def request_of(chunks: float, seed: int = 0, **options: object) -> Request:
    prompt = [seed * 1000 + n for n in range(int(chunks * CHUNK))]
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(f"request-{seed}", prompt, SamplingParams(), None, block_hasher=hasher, **options)


def chunk(request: Request, n: int) -> list[bytes]:
    return list(request.block_hashes[n * BLOCKS : (n + 1) * BLOCKS])


def test_nothing_is_told_before_all_parts_are_committed(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(3.5)
    done = engine.reserved(request, parts=2)
    assert len(done) == 3 and engine.take() == [] and engine.take(5.0) == []
    engine.commit(done)
    assert engine.take() == [] and engine.take(5.0) == []
    reserved = [Reserved(copy.key, copy.slot, copy.generation) for copy in done]
    assert engine.slots.adopt(reserved, 1) == [True] * 3
    engine.commit(done[:1], part=1)
    assert [event.block_hashes for event in engine.take()] == [chunk(request, 0)]
    engine.commit(done[1:], part=1)
    assert [event.block_hashes for event in engine.take()] == [chunk(request, 1), chunk(request, 2)]
    assert engine.take() == [] and engine.take(5.0) == []


def test_an_event_says_what_a_router_needs_to_hash_for_itself(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(2, session_id="a session")
    engine.stored(request)
    first, second = engine.take()
    assert first == BlockStored(
        block_hashes=chunk(request, 0), parent_block_hash=None, token_ids=list(range(16)), block_size=BLOCK,
        lora_id=None, medium="CPU", lora_name=None, extra_keys=[None] * BLOCKS, group_idx=0, session_id="a session",
    )  # fmt: skip
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == request.block_hashes[BLOCKS - 1] == first.block_hashes[-1]
    assert second.token_ids == list(range(16, 32))
    lora = request_of(1, 7, lora_request=LoRARequest("an-adapter", 3, "/nowhere"), cache_salt="salt")
    engine.stored(lora)
    (event,) = engine.take()
    assert (event.lora_id, event.lora_name) == (3, "an-adapter")
    assert event.extra_keys == [("an-adapter", "salt")] + [("an-adapter",)] * (BLOCKS - 1)


def test_what_was_not_saved_in_the_end_is_never_told(cache: Cache) -> None:
    engine = Engine(cache)
    done = engine.reserved(request_of(4))
    engine.slots.abort([Reserved(copy.key, copy.slot, copy.generation) for copy in done])
    assert engine.take() == [] and engine.take(5.0) == [] and not engine.events._pending
    again = engine.reserved(request_of(4, 1))  # the same slots, for another prompt
    assert {copy.slot for copy in again} & {copy.slot for copy in done}
    engine.commit(again)
    assert sorted(map(str, engine.take())) == sorted(
        map(str, (event_of(request_of(4, 1), n) for n in range(4)))
    )


def event_of(request: Request, n: int) -> BlockStored:
    return BlockStored(
        block_hashes=chunk(request, n),
        parent_block_hash=request.block_hashes[n * BLOCKS - 1] if n else None,
        token_ids=list(request.all_token_ids[n * CHUNK : (n + 1) * CHUNK]),
        block_size=BLOCK,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        extra_keys=[None] * BLOCKS,
        group_idx=0,
    )


def test_what_is_gone_is_told_at_most_once_a_second(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(3)
    engine.stored(request)
    assert len(engine.take()) == 3
    cache.clear()
    assert engine.take() == [] and engine.take(0.9) == []
    (event,) = engine.take(0.2)
    assert event == BlockRemoved(block_hashes=list(request.block_hashes), medium="CPU", group_idx=0)
    assert engine.take(5.0) == []


def test_a_slot_that_took_another_chunk_is_told_at_once(cache: Cache) -> None:
    engine = Engine(cache)
    first = [request_of(8, seed) for seed in range(8)]
    for request in first:
        engine.stored(request)
    assert len(engine.take()) == 64
    engine.slots._ledger.columns.lease_until[:] = 0
    engine.stored(other := request_of(8, 100))  # evicts
    removed, *stored = engine.take()
    assert isinstance(removed, BlockRemoved) and len(removed.block_hashes) == 8 * BLOCKS
    assert [event.block_hashes for event in stored] == [chunk(other, n) for n in range(8)]
    gone = set(removed.block_hashes)
    standing = [engine.slots.match_prefix(engine.keys(each), 0, touch=False) for each in first]
    for request, match in zip(first, standing, strict=True):
        assert gone.isdisjoint(request.block_hashes[: len(match.slots) * BLOCKS])
        assert gone.issuperset(request.block_hashes[len(match.slots) * BLOCKS :])
    assert len(engine.events._hashes) == 64 and engine.take(5.0) == []


def test_a_chunk_stored_anew_elsewhere_does_not_end_with_its_old_slot(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(1)
    (old,) = engine.stored(request)
    assert len(engine.take()) == 1
    cache.clear()
    engine.reserved(request_of(2, 5))  # takes the freed slot, among others
    (new,) = engine.stored(request)
    assert new.slot != old.slot
    events = engine.take() + engine.take(5.0) + engine.take(5.0)
    assert [type(event) for event in events] == [BlockRemoved, BlockStored]
    cache.clear()
    (event,) = engine.take(5.0)
    assert event.block_hashes == chunk(request, 0)

    (new,) = engine.stored(request)  # the same, but no call has noticed that the old slot was reassigned
    assert len(engine.take()) == 1
    cache.clear()
    assert isinstance(engine.slots.reserve(
        [bytes(32)], namespace=engine.slots.namespace(), start=0, parent=None)[0], Reserved)  # fmt: skip
    (newer,) = engine.stored(request)
    assert newer.slot != new.slot
    assert engine.take() == [] and engine.take(5.0) == []  # stored the whole time, according to the events
    cache.clear()
    (event,) = engine.take(5.0)
    assert event.block_hashes == chunk(request, 0)
    assert not engine.events._hashes and not engine.events._holder and not engine.events._reported.any()


def test_what_was_there_before_this_engine_is_told_when_it_comes_across(cache: Cache) -> None:
    Engine(cache).stored(request_of(3))
    engine, request = Engine(cache), request_of(4)
    assert engine.take() == []
    done = engine.reserved(request)
    assert len(done) == 1 and [event.block_hashes for event in engine.take()] == [
        chunk(request, n) for n in range(3)
    ]
    engine.commit(done)
    assert [event.block_hashes for event in engine.take()] == [chunk(request, 3)]
    assert engine.reserved(request) == [] and engine.take(5.0) == []  # known
    # chunks that another process saves, or that have no slot, cause no event
    other = engine.slots.reserve([bytes(32)], namespace=engine.slots.namespace(), start=0, parent=None)
    engine.events.note(request_of(1, 9), 0, [Busy(bytes(32), 1)])
    assert len(other) == 1 and engine.take(5.0) == []


def test_cleared_is_told_as_removed_without_a_look(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(2)
    engine.stored(request)
    assert len(engine.take()) == 2
    done = engine.reserved(request_of(2, 1))
    engine.events.clear()
    engine.commit(done)
    (event,) = engine.take()
    assert event == BlockRemoved(block_hashes=list(request.block_hashes), medium="CPU", group_idx=0)
    assert engine.take(5.0) == []
    keys = engine.keys(request)
    outcomes = engine.slots.reserve(keys, namespace=engine.slots.namespace(), start=0, parent=None)
    assert all(isinstance(outcome, Present) for outcome in outcomes)
    engine.events.note(request, 0, outcomes)
    assert len(engine.take()) == 2


def test_a_request_whose_hashes_are_not_known_yet_is_left_out(cache: Cache) -> None:
    engine, request = Engine(cache), request_of(2)
    keys = [*engine.keys(request), bytes(32)]
    outcomes = engine.slots.reserve(keys, namespace=engine.slots.namespace(), start=0, parent=None)
    engine.events.note(request, 0, outcomes)
    engine.commit(copies(keys, outcomes))
    assert len(engine.take()) == 2


def test_vllm_can_send_them_and_hashes_are_what_its_own_pool_sends(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    engine, request = Engine(cache), request_of(2)
    engine.stored(request)
    events = engine.take()
    short = [int.from_bytes(each[-8:], "big") for each in request.block_hashes]
    assert [each.block_hashes for each in events] == [short[:BLOCKS], short[BLOCKS:]]
    assert events[1].parent_block_hash == short[BLOCKS - 1]
    cache.clear()
    events += engine.take(5.0)
    assert events[2].block_hashes == short
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch).events == events


def test_random_stores_and_evictions_leave_a_router_with_the_truth(cache: Cache) -> None:
    engine, held = Engine(cache), set[bytes]()
    requests = [request_of(1 + seed % 5, seed) for seed in range(40)]

    def heard(events: Sequence[KVCacheEvent]) -> set[bytes]:
        now = set(held)
        for event in events:
            hashes = set(event.block_hashes)
            assert now.isdisjoint(hashes) if isinstance(event, BlockStored) else now >= hashes
            now = now | hashes if isinstance(event, BlockStored) else now - hashes
        return now

    random = Random(1)
    for turn in range(400):
        engine.slots._ledger.columns.lease_until[:] = 0
        done = engine.reserved(random.choice(requests))
        if turn % 3:
            engine.commit(done)
        else:
            engine.slots.abort([Reserved(copy.key, copy.slot, copy.generation) for copy in done])
        if turn % 100 == 50:
            cache.clear()
        held = heard(engine.take(0.4))
        assert len(engine.events._hashes) <= 64 and len(engine.events._pending) <= 64
    held = heard(engine.take(5.0))
    there = set()
    for request in requests:
        for n, key in enumerate(engine.keys(request)):
            if len(engine.slots.match_prefix([key], n, touch=False).slots):
                there |= set(chunk(request, n))
    assert held == there and len(there) > 100
