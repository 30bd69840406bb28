"""The stores of `pagoda serve` in one process: a header is of the bytes that were there, or there
is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda import codec
from pagoda.base.metrics import Reason
from pagoda.layout import KVLayout
from pagoda.tiers import Chunk, DiskTier, HostTier
from pagoda_tools.serve import served_stores
from pagoda_tools.serve.served_stores import HostRoom, LocatedChunk, ServedStores
from tests.serve.kit import CHUNK, LAYOUT, keys_of, payload_of

ROOT = bytes(range(32))
KEYS = keys_of(ROOT, 1, 8)


@pytest.fixture
def tier(shm_root: Path) -> Iterator[HostTier]:
    """A host tier of four slots, as an engine has it."""
    opened = HostTier.open(
        LAYOUT, shm_root, 4 * LAYOUT.slot_bytes, populate=False
    )
    yield opened
    opened.close()


@pytest.fixture
def stores(tier: HostTier) -> Iterator[ServedStores]:
    made = ServedStores(lambda: [tier.ledger.directory])
    made.scan()
    yield made
    for store in made.end():
        store.close()


def save(tier: HostTier | DiskTier, numbers: list[int]) -> None:
    chunks = [
        Chunk(KEYS[n], n, CHUNK, payload_of(1, n), None, lambda: True)
        for n in numbers
    ]
    for future in tier.store(chunks, ROOT):
        assert future.result(30.0).ok


def located(stores: ServedStores, number: int) -> LocatedChunk:
    found = stores.locate(ROOT, KEYS[number])
    assert isinstance(found, LocatedChunk)
    return found


def test_a_header_is_never_of_bytes_that_came_later(
    tier: HostTier, stores: ServedStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another chunk takes the slot after the entry was read and before its bytes are."""
    save(tier, [0, 1, 2, 3])
    found = located(stores, 0)

    def seal(header: codec.Header, payload: np.ndarray) -> np.ndarray:
        tier.remove(KEYS[0])
        save(tier, [4])
        return codec_seal(header, payload)

    codec_seal = codec.seal
    monkeypatch.setattr(served_stores.codec, "seal", seal)
    assert stores.header_of(ROOT, KEYS[0], found) is Reason.EVICTED
    monkeypatch.undo()
    # nothing was kept
    assert stores.header_of(ROOT, KEYS[0], found) is Reason.EVICTED
    assert located(stores, 4).slot == found.slot


def test_a_chunk_that_is_gone_is_not_valid_while_it_is_sent(
    tier: HostTier, stores: ServedStores
) -> None:
    save(tier, [0])
    found = located(stores, 0)
    assert found.renew()
    tier.remove(KEYS[0])
    assert not found.renew()
    assert stores.locate(ROOT, KEYS[0]) is Reason.REMOVED


def test_what_is_read_was_of_use_and_what_is_only_asked_for_was_not(
    tier: HostTier, stores: ServedStores
) -> None:
    save(tier, [0, 1])
    slots = [located(stores, n).slot for n in (0, 1)]
    before = tier.ledger.columns.last_use[slots].tolist()
    assert stores.find(ROOT, KEYS) == 2
    assert tier.ledger.columns.last_use[slots].tolist() == before
    for key in KEYS[:2]:
        stores.locate_with_header(ROOT, key)
    head, tail = tier.ledger.columns.last_use[slots].tolist()
    # the tail of a run is evicted before its head
    assert head > tail > max(before)


def test_a_chunk_that_is_sent_is_evicted_last(
    tier: HostTier, stores: ServedStores
) -> None:
    save(tier, [0, 1, 2, 3])
    found = located(stores, 0)
    for number in (4, 5, 6):
        save(tier, [number])
    assert found.renew()


def test_a_damaged_chunk_on_the_disk_is_not_served(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier.open(LAYOUT, tmp_path, 1 << 20)) as tier:
        save(tier, [0])
        made = ServedStores(lambda: [tier.ledger.directory])
        made.scan()
        try:
            found = located(made, 0)
            buffer = served_stores.aligned(LAYOUT.slot_bytes)
            page = made.read(ROOT, KEYS[0], found, buffer)
            assert isinstance(page, bytes)
            assert (buffer == payload_of(1, 0)).all()
            with open(tier.ledger.slab_path, "r+b") as slab:
                slab.seek(found.store.offset(found.slot) + 1000)
                slab.write(b"damaged")
            assert made.read(ROOT, KEYS[0], found, buffer) is Reason.FAILED_CHECK
            assert isinstance(made.locate(ROOT, KEYS[0]), Reason)
        finally:
            for store in made.end():
                store.close()


def test_find_continues_in_another_store(tier: HostTier, tmp_path: Path) -> None:
    with contextlib.closing(DiskTier.open(LAYOUT, tmp_path, 1 << 20)) as disk:
        save(tier, [0, 1, 5])
        save(disk, [2, 3, 4, 7])
        made = ServedStores(
            lambda: [tier.ledger.directory, disk.ledger.directory]
        )
        made.scan()
        try:
            assert made.find(ROOT, KEYS) == 6
            assert made.find(ROOT, KEYS[3:]) == 3
            assert made.find(bytes(32), KEYS) == 0
        finally:
            for store in made.end():
                store.close()


def test_a_store_that_it_makes_of_an_automatic_size_grows(shm_root: Path) -> None:
    most = 64 << 20
    made = ServedStores(list, HostRoom(shm_root, most, "lru", grows=True))
    chunk = 1 << 20
    header = codec.Header(
        bytes(16), 0, ROOT, 0, KEYS[0], 0, chunk, CHUNK, "raw", "ab" * 8, 1
    )
    try:
        made.room_for(header)
        taken = sum(
            file.stat().st_blocks * 512 for file in shm_root.glob("*/slab")
        )
        assert 0 < taken <= most // 4
    finally:
        for store in made.end():
            store.close()


def test_stores_that_it_makes_are_bounded_and_their_runs_evict_the_tail_first(
    shm_root: Path,
) -> None:
    made = ServedStores(list, HostRoom(shm_root, 4 * LAYOUT.slot_bytes, "lru"))
    try:
        keys = keys_of(ROOT, 2, 6)
        for n in (0, 1, 2, 3):
            header = codec.Header(
                bytes(16),
                0,
                ROOT,
                0,
                keys[n],
                n,
                LAYOUT.chunk_bytes,
                CHUNK,
                "raw",
                LAYOUT.fingerprint,
                1,
            )
            store = made.room_for(header)
            assert store is not None
            assert made.put(store, header, payload_of(2, n)) == (True, None)
        other = KVLayout.opaque(CHUNK, LAYOUT.slot_bytes * 5, "too large")
        wrong = codec.Header(
            bytes(16),
            0,
            ROOT,
            0,
            keys[0],
            0,
            other.chunk_bytes,
            CHUNK,
            "raw",
            other.fingerprint,
            1,
        )
        with pytest.raises(served_stores.NoRoomError, match="--host-size"):
            made.room_for(wrong)
        tier = made.stores()[0].host_tier(CHUNK)
        (victim,) = tier.ledger.next_victims(1).tolist()
        assert bytes(tier.ledger.columns.key_of(victim)) == keys[3]
    finally:
        for one in made.end():
            one.close()
