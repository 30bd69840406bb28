from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.codec import HEADER_BYTES, most_bytes
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, StoreSpec
from pagoda.slab import FileSlab, MemorySlab
from pagoda.testing import TierConformance
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.base import Bytes, Tier
from tests.remote.chunks import QUANTISABLE, unchanged_by_codecs

LAYOUT = KVLayout.opaque(4, 5000, "conformance")
STRIDE = HEADER_BYTES + LAYOUT.slot_bytes
# every call may succeed: a busy machine may pause for a while
PATIENT_SECONDS = 30.0
SLOTS = 128  # one member may have a quarter of them reserved


class TestSharedHost(TierConformance):
    @pytest.fixture(autouse=True)
    def _root(self, shm_root: Path) -> None:
        self.root = shm_root

    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(
            StoreSpec(
                self.root / tmp_path.name,
                LAYOUT.fingerprint,
                "memory",
                SLOTS,
                LAYOUT.slot_bytes,
            )
        )
        slab = MemorySlab(ledger.slab_path, SLOTS, LAYOUT.slot_bytes)
        return HostTier(LAYOUT, ledger, slab, deadline_seconds=PATIENT_SECONDS)


class TestPrivateHost(TierConformance):
    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(
            StoreSpec(
                tmp_path,
                LAYOUT.fingerprint,
                "memory",
                SLOTS,
                LAYOUT.slot_bytes,
                private=True,
            )
        )
        slab = MemorySlab(None, SLOTS, LAYOUT.slot_bytes)
        return HostTier(LAYOUT, ledger, slab, deadline_seconds=PATIENT_SECONDS)


class TestDisk(TierConformance):
    direct: bool | None = None
    durable = False

    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(
            StoreSpec(tmp_path, LAYOUT.fingerprint, "file", SLOTS, STRIDE)
        )
        slab = FileSlab(ledger.slab_path, SLOTS, STRIDE, self.direct)
        return DiskTier(
            LAYOUT,
            ledger,
            slab,
            durable=self.durable,
            deadline_seconds=PATIENT_SECONDS,
        )


class TestBufferedDisk(TestDisk):
    direct = False


class TestDurableDisk(TestDisk):
    durable = True


class TestLossyDisk(TierConformance):
    """The suite compares bytes, so its chunks are some that the codec does not change."""

    codec_name = "q4"

    def make_tier(self, tmp_path: Path) -> Tier:
        slot_bytes = -(-most_bytes(self.codec_name, QUANTISABLE) // 4096) * 4096
        return DiskTier.open(
            QUANTISABLE,
            tmp_path,
            SLOTS * (HEADER_BYTES + slot_bytes),
            codec_name=self.codec_name,
            policy="lru",
            deadline_seconds=PATIENT_SECONDS,
        )

    def payload(self, tier: Tier, key: bytes) -> Bytes:
        return unchanged_by_codecs(QUANTISABLE, key)[: tier.chunk_bytes]


class TestQ8Disk(TestLossyDisk):
    codec_name = "q8"
