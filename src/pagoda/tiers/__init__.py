"""Tiers: places that chunks live in. `base` says what a tier is, `local` has the two of one machine."""

from __future__ import annotations

from pagoda.tiers.base import Bytes, Chunk, Done, Tier
from pagoda.tiers.local import DiskTier, HostTier

__all__ = ["Bytes", "Chunk", "DiskTier", "Done", "HostTier", "Tier"]
