"""A disk tier with a lossy codec: a store of its own with smaller slots, which keeps only what its
codec encoded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import codec
from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.keys import Namespace, derive_keys
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.slab import aligned
from pagoda.tiers import Bytes, Chunk, DiskTier
from pagoda.tiers.base import Done
from pagoda_tools.serve.served_stores import ServedStore

LAYOUT = KVLayout.dense(4, 4, 64, "float16", 64)
NAMESPACE = Namespace("lossy disk", approximate="q4")
KEYS = derive_keys([bytes([number]) * 32 for number in range(6)], NAMESPACE.root)
SECONDS = 40.0


def open_disk(path: Path, codec_name: str = "q4", chunks: int = 8) -> DiskTier:
    stride = (
        HEADER_BYTES + -(-codec.most_bytes(codec_name, LAYOUT) // 4096) * 4096
    )
    tier = DiskTier.open(
        LAYOUT,
        path,
        chunks * stride,
        codec_name=codec_name,
        policy="lru",
        deadline_seconds=30.0,
    )
    tier.register(NAMESPACE)
    return tier


def payload_of(key: bytes) -> Bytes:
    buffer = aligned(LAYOUT.slot_bytes)
    numbers = np.random.default_rng(list(key)).standard_normal(
        LAYOUT.chunk_bytes // 2
    )
    buffer[: LAYOUT.chunk_bytes] = numbers.astype("<f2").view(np.uint8)
    return buffer


def save(
    tier: DiskTier, payloads: dict[bytes, Bytes] | None = None
) -> list[Done]:
    payloads = payloads or {key: payload_of(key) for key in KEYS}
    chunks = [
        Chunk(
            key, KEYS.index(key), LAYOUT.chunk_tokens, payload, None, lambda: True
        )
        for key, payload in payloads.items()
    ]
    return [
        future.result(SECONDS) for future in tier.store(chunks, NAMESPACE.root)
    ]


def is_approximated(tier: DiskTier, key: bytes, codec_name: str = "q4") -> bool:
    found = tier.get(key, namespace=NAMESPACE.root)
    wanted = codec.approximated(
        codec_name, payload_of(key)[: LAYOUT.chunk_bytes], LAYOUT
    )[0]
    return found is not None and np.array_equal(found, wanted)


@pytest.mark.parametrize("codec_name", ["q4", "q8"])
def test_it_survives_a_restart_and_the_loss_of_its_ledger(
    tmp_path: Path, codec_name: str
) -> None:
    tier = open_disk(tmp_path, codec_name)
    for done in save(tier):
        assert done.ok
    for key in KEYS:
        assert is_approximated(tier, key, codec_name)
    directory = tier.ledger.directory
    tier.close()
    (directory / "data.mdb").write_bytes(b"not a database")
    tier = open_disk(tmp_path, codec_name)
    assert tier.wait_ready(SECONDS)
    for key in KEYS:
        assert is_approximated(tier, key, codec_name)
    admin.check(tier.ledger)
    tier.close()


def test_more_chunks_fit_into_the_same_size(tmp_path: Path) -> None:
    size = 8 * (HEADER_BYTES + LAYOUT.slot_bytes)
    slots = {}
    for name in ("raw", "q8", "q4"):
        tier = DiskTier.open(LAYOUT, tmp_path / name, size, codec_name=name)
        slots[name] = tier.ledger.slots
        tier.close()
    assert slots["raw"] == 8
    assert slots["q8"] >= 14
    assert slots["q4"] >= 24


def test_each_codec_has_a_store_of_its_own(tmp_path: Path) -> None:
    """So an exact tier, or one of another codec, never finds what was quantised."""
    directories = set()
    for name in ("raw", "q8", "q4"):
        tier = DiskTier.open(
            LAYOUT, tmp_path, 1 << 23, codec_name=name, deadline_seconds=30.0
        )
        tier.register(NAMESPACE)
        assert tier.match_prefix(KEYS, namespace=NAMESPACE.root) == 0
        for done in save(tier):
            assert done.ok
        directories.add(tier.ledger.directory.name)
        tier.close()
    assert directories == {
        LAYOUT.fingerprint,
        f"{LAYOUT.fingerprint}.q8",
        f"{LAYOUT.fingerprint}.q4",
    }


def test_what_is_not_finite_is_dropped_with_a_reason(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    payloads = {key: payload_of(key) for key in KEYS}
    payloads[KEYS[1]][:2] = np.array([np.nan], "<f2").view(np.uint8)
    done = save(tier, payloads)
    assert [each.ok for each in done] == [True, False, True, True, True, True]
    assert done[1].reason is Reason.TOO_LARGE
    assert tier.stats()["drop_too_large"] == 1
    assert tier.match_prefix(KEYS, namespace=NAMESPACE.root) == 1
    tier.close()


def test_a_damaged_byte_is_a_miss_and_is_removed(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    save(tier)
    slab = tier.ledger.slab_path
    stride = tier.ledger.slot_bytes
    tier.close()
    with open(slab, "r+b") as file:
        for slot in range(6):
            file.seek(slot * stride + HEADER_BYTES + 1000 * slot)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    tier = open_disk(tmp_path)
    for key in KEYS:
        assert tier.get(key, namespace=NAMESPACE.root) is None
        assert not tier.contains(key)
    assert tier.stats()["failed_checks"] == 6
    tier.close()


def test_a_server_of_chunks_leaves_such_stores_alone(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    save(tier)
    assert ServedStore.open(tier.ledger.directory, 5.0) is None
    for key in KEYS:
        assert is_approximated(tier, key)
    tier.close()


def test_opaque_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opaque"):
        DiskTier.open(
            KVLayout.opaque(16, 8192, "pages"), tmp_path, 1 << 20, codec_name="q4"
        )
    assert not list(tmp_path.iterdir())
