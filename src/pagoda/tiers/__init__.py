"""Tiers: places that chunks live in. `base` says what a tier is, `local` has the two of one machine."""

from __future__ import annotations

from pagoda.tiers.base import Bytes, Chunk, Done, Tier
from pagoda.tiers.disk import DiskTier
from pagoda.tiers.host import HostTier

__all__ = ["Bytes", "Chunk", "DiskTier", "Done", "HostTier", "Tier"]
