"""Slabs: the memory or the file that slots lie in. Bytes in, bytes out; slots are given out by the ledger."""

from __future__ import annotations

from pagoda.slab.file import FileSlab
from pagoda.slab.memory import PAGE_BYTES, MemorySlab, aligned

__all__ = ["PAGE_BYTES", "FileSlab", "MemorySlab", "aligned"]
