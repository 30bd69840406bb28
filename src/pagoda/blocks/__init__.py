"""Device blocks for people who write engines: a pool, a prefix tree over it, and the manager of both."""

from __future__ import annotations

from pagoda.blocks.allocator import BlockPool
from pagoda.blocks.manager import BlockManager
from pagoda.blocks.plans import (
    Admitted,
    Copy,
    Direction,
    Extended,
    Match,
    Place,
    Plan,
    Refused,
    Settled,
    Waiting,
)

__all__ = [
    "Admitted",
    "BlockManager",
    "BlockPool",
    "Copy",
    "Direction",
    "Extended",
    "Match",
    "Place",
    "Plan",
    "Refused",
    "Settled",
    "Waiting",
]
