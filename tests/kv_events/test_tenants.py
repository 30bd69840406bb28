"""Which namespaces are published: those of requests, as long as anything is held of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef
from pagoda.kv_events.event_types import ChunkEventForm
from pagoda.kv_events.notes import BlockFacts, ChunkNote
from pagoda.kv_events.publisher import EventPublisher
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Reserved, admin
from testbed.patience import Patience
from tests.cache.kit import CHUNK, cache_at

FACTS = BlockFacts(CHUNK, CHUNK)


class Engine:
    """What an engine does around the events of one host tier; the rounds one by one, on this
    thread.
    """

    def __init__(self, cache: Cache, publisher: EventPublisher) -> None:
        assert cache.slots is not None
        self.slots = cache.slots
        self.events = StoredEvents(
            cache.slots.ledgers,
            cache.slots.namespace,
            {0: FACTS},
            ChunkEventForm(FACTS),
            publisher,
        )
        (self.tier,) = self.events._tiers

    def root(self, tenant: str) -> bytes:
        return self.slots.namespace(salt=tenant)

    def note(self, tenant: str, chunk: int) -> ChunkNote:
        return ChunkNote(
            self.root(tenant), b"", self.root(tenant)[:-1] + bytes([chunk])
        )

    def stored(self, tenant: str, chunks: int = 1) -> None:
        root = self.root(tenant)
        keys = [self.note(tenant, n).hashes for n in range(chunks)]
        outcomes = self.slots.reserve(keys, namespace=root, start=0, parent=None)
        self.events.note(
            lambda n: self.note(tenant, n),
            root,
            self.slots.namespace(),
            0,
            outcomes,
        )
        done = [
            ChunkRef(one.key, n, None, one.slot, one.generation)
            for n, one in enumerate(outcomes)
            if isinstance(one, Reserved)
        ]
        assert self.slots.commit({root: done}, 0) == [True] * chunks

    def found(self, tenant: str, chunks: int = 1) -> None:
        root = self.root(tenant)
        keys = [self.note(tenant, n).hashes for n in range(chunks)]
        self.events.found(
            lambda n: self.note(tenant, n), root, self.slots.namespace(), 0, keys
        )

    def published(self) -> int:
        """Return of how many chunks routers know, after a round."""
        self.events._rested = time.thread_time()
        patience = Patience(20.0)
        while not self.events._round():
            assert not patience.ended
        return int(self.tier._held.sum())


@pytest.fixture
def engine(shm_root: Path) -> Iterator[Engine]:
    with cache_at(shm_root, None) as cache:  # 64 slots
        publisher = EventPublisher("tcp://127.0.0.1:*")
        yield Engine(cache, publisher)
        publisher.close()


def test_an_adapter_that_takes_its_name_again_is_published_again(
    engine: Engine,
) -> None:
    """As after a change that is taken back: its notes are known still, and nothing of it is stored
    anew.
    """
    engine.events.name_adapter("an adapter", engine.root("old"))
    engine.stored("old", 3)
    assert engine.published() == 3
    engine.events.name_adapter("an adapter", engine.root("new"))
    engine.stored("new")
    assert engine.published() == 1
    engine.events.name_adapter("an adapter", engine.root("old"))
    engine.found("old", 3)
    assert engine.published() == 3


def test_an_adapter_that_is_unknown_again_and_again_is_taken_back_once(
    engine: Engine,
) -> None:
    """Each time all slots are looked at."""
    engine.events.name_adapter("an adapter", engine.root("old"))
    engine.stored("old")
    assert engine.published() == 1
    for renewed in (True, False):
        engine.events.name_adapter("an adapter", None)
        assert engine.events._renewed is renewed
        assert engine.published() == 0


def test_adapters_that_change_for_ever_are_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kv_events.stored_events._FEW_ROOTS", 4)
    for n in range(20):
        engine.events.name_adapter("an adapter", engine.root(f"version {n}"))
    assert list(engine.events._gone) == [
        engine.root(f"version {n}") for n in range(15, 19)
    ]


@pytest.mark.slow
def test_tenants_of_which_nothing_is_held_are_forgotten_until_they_come_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kv_events.stored_events._FEW_ROOTS", 4)
    engine.events._most_roots = 4
    monkeypatch.setattr("pagoda.kv_events.stored_events._REMEMBERED", 2)
    engine.stored("stays")
    for n in range(40):
        engine.events.name_adapter(n, engine.root(f"passes {n}"))
        engine.stored(f"passes {n}")
        assert engine.published() == 2
        assert len(engine.events._roots) <= 12
        assert len(engine.events._adapters) <= 12
        admin.clear(engine.slots.ledgers["host"], engine.root(f"passes {n}"))
    assert engine.published() == 1
    engine.stored("passes 0")
    assert engine.published() == 2
    admin.clear(engine.slots.ledgers["host"])
    assert engine.published() == 0
