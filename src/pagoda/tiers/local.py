"""The two tiers of one machine."""

from __future__ import annotations

from pagoda.tiers.disk import DiskTier
from pagoda.tiers.host import HostTier

__all__ = ["DiskTier", "HostTier"]
