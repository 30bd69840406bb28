"""Tiers: places that store chunks, in host memory, on a disk and in remote stores.

Modules, in the order in which a save reaches them:

- `base`: the Tier protocol, chunks and results
- `put_and_load`: put and get of every tier, which copy and wait, on top of save and load
- `ledger_tier`: what the host tier and the disk tier have in common
- `host`: the host tier, a ledger and a slab in memory
- `disk`: the disk tier, a ledger and a slab in a file, and its workers, one per thread
- `remote`: remote tiers; it lists its own modules
- `io_queue`: the bounded queue of reads and writes and its I/O threads, which the disk tier and the
  remote tiers share
- `header_scan`: rebuilds a lost ledger from the headers in the slab
- `breaker`: the circuit breaker that lets a failing device or store rest
"""

from __future__ import annotations

from pagoda.tiers.base import Bytes, Chunk, Done, Tier
from pagoda.tiers.disk import DiskTier
from pagoda.tiers.host import HostTier

__all__ = ["Bytes", "Chunk", "DiskTier", "Done", "HostTier", "Tier"]
