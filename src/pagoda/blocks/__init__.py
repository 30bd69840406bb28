"""Device blocks for authors of engines: a pool, a prefix tree over it, and the manager of both.

Modules, in the order in which a request passes through them:

    manager          BlockManager: the calls of an engine, and pins
    request_state    a request's tokens, keys and blocks
    admission        matches a waiting request and gives it blocks
    tree             the prefix tree over the device blocks
    lower_tiers      the host tier and the tiers below it, as the manager uses them
    allocator        the free blocks, eviction to make room, and the state that the modules share
    moves            the copies in flight between blocks and host slots
    finished_moves   what is done when their tickets end
    manager_results  the values that the manager returns
    block_metrics    the figures of a manager for Prometheus; needs the extra `metrics`
"""

from __future__ import annotations

from pagoda.blocks.allocator import BlockPool
from pagoda.blocks.manager import BlockManager
from pagoda.blocks.manager_results import (
    Admitted,
    Copy,
    Direction,
    Extended,
    NoRoom,
    Place,
    Plan,
    PrefixMatch,
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
    "NoRoom",
    "Place",
    "Plan",
    "PrefixMatch",
    "Settled",
    "Waiting",
]
