"""Device blocks for people who write engines: a pool, a prefix tree over it, and the manager of both."""

from __future__ import annotations

from pagoda.blocks.manager import BlockManager
from pagoda.blocks.outcome import (
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
from pagoda.blocks.pool import BlockPool

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
