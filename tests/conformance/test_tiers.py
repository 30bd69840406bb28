from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, StoreSpec
from pagoda.slab import FileSlab, MemorySlab
from pagoda.testing import TierConformance
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.base import Tier

LAYOUT = KVLayout.opaque(4, 5000, "conformance")
STRIDE = HEADER_BYTES + LAYOUT.slot_bytes
PATIENT_SECONDS = 30.0  # every call may succeed: a busy machine may pause for a while
SLOTS = 128  # one member may have a quarter of them reserved


class TestSharedHost(TierConformance):
    @pytest.fixture(autouse=True)
    def _root(self, shm_root: Path) -> None:
        self.root = shm_root

    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(
            StoreSpec(self.root / tmp_path.name, LAYOUT.fingerprint, "memory", SLOTS, LAYOUT.slot_bytes)
        )
        slab = MemorySlab(ledger.slab_path, SLOTS, LAYOUT.slot_bytes)
        return HostTier(LAYOUT, ledger, slab, deadline_seconds=PATIENT_SECONDS)


class TestPrivateHost(TierConformance):
    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(
            StoreSpec(tmp_path, LAYOUT.fingerprint, "memory", SLOTS, LAYOUT.slot_bytes, private=True)
        )
        slab = MemorySlab(None, SLOTS, LAYOUT.slot_bytes)
        return HostTier(LAYOUT, ledger, slab, deadline_seconds=PATIENT_SECONDS)


class TestDisk(TierConformance):
    direct: bool | None = None
    durable = False

    def make_tier(self, tmp_path: Path) -> Tier:
        ledger = Ledger.open(StoreSpec(tmp_path, LAYOUT.fingerprint, "file", SLOTS, STRIDE))
        slab = FileSlab(ledger.slab_path, SLOTS, STRIDE, self.direct)
        return DiskTier(LAYOUT, ledger, slab, durable=self.durable, deadline_seconds=PATIENT_SECONDS)


class TestBufferedDisk(TestDisk):
    direct = False


class TestDurableDisk(TestDisk):
    durable = True
