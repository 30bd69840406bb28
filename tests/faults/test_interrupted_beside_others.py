"""Calls that exceptions of signal handlers and cancelled tasks end at random moments, beside
threads that go on: no slot is given away, and none is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.finalizers import close_dropped
from pagoda.cache import Cache
from pagoda.ledger import Ledger, SlotWriter, admin
from pagoda.slab import MemorySlab
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    Prompt,
    blank,
    cache_at,
    kv_of,
    prompt,
    stored,
)
from tests.interrupts import Interrupted, interrupts
from tests.ledger.support import (
    SLOT_BYTES,
    TENANT,
    keys,
    opened,
    others_get_in,
    put,
    reserved,
)

# the other method has the timer that these tests use
pytestmark = pytest.mark.timeout(1800, method="thread")

THREADS = 4


def chunk_keys_of(cache: Cache, tokens: Prompt) -> list[bytes]:
    """Return the keys of the chunks of a prompt."""
    return [key for _, _, key in cache.keys(tokens)]


class Others:
    """Threads that store, retrieve and remove prompts of their own until the end of the block."""

    def __init__(self, cache: Cache) -> None:
        self.calls = 0
        self.failed: list[str] = []
        self.wrong = 0
        self._cache = cache
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,))
            for number in range(THREADS)
        ]

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        try:
            prompts = [prompt(3, 1000 * (number + 1) + each) for each in range(8)]
            kvs = [kv_of(tokens) for tokens in prompts]
            while not self._ended:
                for tokens, kv in zip(prompts, kvs, strict=True):
                    answer = self._cache.store(tokens, kv.transfer)
                    room = blank(tokens)
                    hit = self._cache.retrieve(tokens, room.transfer)
                    self.wrong += not room.same(kv, 0, hit.stop_tokens // CHUNK)
                    if answer.num_chunks != 3 or hit.num_tokens != 3 * CHUNK:
                        self.failed.append(f"{answer}, {hit}")
                    ledger = self._cache._tiers.ledgers()[0][1]
                    admin.remove(ledger, chunk_keys_of(self._cache, tokens))
                    self.calls += 2
        except Exception as error:  # noqa: BLE001
            self.failed.append(repr(error))


def cancelled(ledger: Ledger, slab: MemorySlab, chance: random.Random) -> None:
    """Run a task that fills slots, and cancel it at one of its waits."""

    async def fill(number: int) -> None:
        with SlotWriter(ledger, slab) as writer:
            rooms = reserved(
                writer.reserve(keys(number, number + 1), namespace=TENANT)
            )
            await asyncio.sleep(0)
            for view in writer.views(rooms):
                view[:] = number % 256
                await asyncio.sleep(0)
            writer.commit(rooms)

    async def cancel() -> None:
        task = asyncio.ensure_future(fill(chance.randrange(1000)))
        for _ in range(chance.randrange(1, 4)):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def all_is_given_up(cache: Cache) -> None:
    """After one upkeep no call owns anything."""
    host = cache._tiers.host
    assert host is not None
    ledger = host.ledger
    gc.collect()
    assert close_dropped(100)
    ledger.upkeep_thread.run_once()
    assert admin.gauges(ledger)["reserved"] == 0
    assert not ledger.session.orphans
    assert not ledger.session.writers
    assert not host._copies
    assert not ledger.session._deferred
    held = ledger.session.read(
        lambda txn, tables: list(tables.rows(txn, tables.holds)), 30
    )
    assert not held
    assert admin.check(ledger).stale_hints == 0
    assert others_get_in(ledger)


def interrupt(cache: Cache, times: int, seed: int) -> None:
    """Store and retrieve, each until an exception is raised; served bytes are right."""
    chance = random.Random(seed)
    prompts = [prompt(3, number) for number in range(40)]
    kvs = [kv_of(tokens) for tokens in prompts]
    rooms = [blank(tokens) for tokens in prompts]

    def store_and_retrieve() -> None:
        n = chance.randrange(len(prompts))
        cache.store(prompts[n], kvs[n].transfer)
        hit = cache.retrieve(prompts[n], rooms[n].transfer)
        assert rooms[n].same(kvs[n], 0, hit.stop_tokens // CHUNK)
        if chance.random() < 0.5:
            ledger = cache._tiers.ledgers()[0][1]
            admin.remove(ledger, chunk_keys_of(cache, prompts[n]))

    with interrupts(seed, again_seconds=2.0) as until_interrupted:
        for _ in range(times):
            until_interrupted(store_and_retrieve)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(600, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.soak),
    ],
)
def test_interrupted_calls_leave_others_alone(shm_root: Path, times: int) -> None:
    with cache_at(shm_root, None, host_size=512 * LAYOUT.slot_bytes) as cache:
        before: list[Prompt] = [prompt(3, 9000 + n) for n in range(10)]
        for tokens in before:
            stored(cache, tokens)
        host = cache._tiers.host
        assert host is not None
        with Others(cache) as others:
            interrupt(cache, times, 1)
            chance = random.Random(2)
            for _ in range(times // 10):
                cancelled(host.ledger, host.slab, chance)
        assert others.calls
        assert others.failed == []
        assert others.wrong == 0
        all_is_given_up(cache)
        for tokens in before:
            room = blank(tokens)
            assert cache.retrieve(tokens, room.transfer).num_tokens == 3 * CHUNK
            assert room.same(kv_of(tokens))


def test_a_slot_is_given_up_only_after_the_last_view_of_it(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    slab = MemorySlab(
        ledger.slab_path, ledger.slots, SLOT_BYTES, ledger.page_guards
    )
    left: list[np.ndarray] = []

    def fill() -> None:
        with SlotWriter(ledger, slab) as writer:
            rooms = reserved(writer.reserve(keys(1, 2), namespace=TENANT))
            # another thread copies into a part of the second one
            left.append(writer.views(rooms)[1][5:9])
            raise Interrupted

    with pytest.raises(Interrupted):
        fill()
    gc.collect()
    assert close_dropped(60)
    ledger.upkeep_thread.run_once()
    put(ledger, keys(3), chained=False)
    assert admin.gauges(ledger)["reserved"] == 2
    left.clear()
    wait_until(lambda: admin.gauges(ledger)["reserved"] == 0, 10)
    assert not ledger.session.orphans
    slab.close()
    ledger.close()


def test_a_copy_that_fails_frees_its_slots_at_once(shm_root: Path) -> None:
    ledger = opened(shm_root)
    slab = MemorySlab(
        ledger.slab_path, ledger.slots, SLOT_BYTES, ledger.page_guards
    )
    with (
        pytest.raises(ValueError, match="copy") as kept,
        SlotWriter(ledger, slab) as writer,
    ):
        rooms = reserved(writer.reserve(keys(1, 2), namespace=TENANT))
        views = writer.views(rooms)
        raise ValueError("the copy failed")
    assert kept
    assert len(views) == 2
    assert admin.gauges(ledger)["reserved"] == 0
    slab.close()
    ledger.close()


def test_what_a_lost_writer_owns_is_given_up(shm_root: Path) -> None:
    ledger = opened(shm_root)
    writer = SlotWriter(ledger).__enter__()
    assert len(reserved(writer.reserve(keys(1, 2), namespace=TENANT))) == 2
    # as if an exception had come before the first line of its `__exit__`
    del writer
    gc.collect()
    assert close_dropped(60)
    assert admin.gauges(ledger)["reserved"] == 0
    assert not ledger.session.writers
    ledger.close()


def test_thousands_of_interrupted_calls_cost_a_few_transactions(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root)
    session = ledger.session

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(session, "drop_orphans", lambda *_: None)
        patch.setattr(ledger.upkeep_thread, "wake", interrupted)
        for number in range(4):
            with pytest.raises(Interrupted):
                ledger.reserve(keys(number), namespace=TENANT)
    first = session.read(lambda txn, _: txn.id(), 30)
    put(ledger, keys(100), chained=False)
    assert admin.gauges(ledger)["reserved"] == 0
    last = session.read(lambda txn, _: txn.id(), 30)
    assert last - first == 2, "the reserve and the commit of that chunk"
    ledger.close()


def test_a_reader_of_what_is_given_up_finds_nothing(shm_root: Path) -> None:
    ledger = opened(shm_root)
    with pytest.raises(Interrupted), SlotWriter(ledger) as writer:
        rooms = reserved(writer.reserve(keys(1), namespace=TENANT))
        writer.commit(rooms)
        later = reserved(writer.reserve(keys(2), namespace=TENANT))
        raise Interrupted
    assert len(ledger.match_prefix(keys(1)).slots) == 1, "it was committed"
    assert not ledger.commit(later)[0]
    assert not len(ledger.match_prefix(keys(2)).slots)
    ledger.close()
