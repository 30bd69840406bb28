"""The cache: the facade of PagodaKV, and the only place that knows several tiers."""

from __future__ import annotations

from pagoda.cache.cache import Cache
from pagoda.cache.hit import Cleared, Hit, Stored

__all__ = ["Cache", "Cleared", "Hit", "Stored"]
