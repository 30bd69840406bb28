"""Slabs: the memory or the file that holds the slots. Bytes in, bytes out; the ledger reserves the
slots.

memory        slots in mapped memory, shared by processes or private
linux_mmap    maps, populates and collapses memory into huge pages: Linux calls
pinned        registers memory with the GPUs, in the background
cuda_driver   NVIDIA's driver library, by ctypes
file          slots in a file, by direct I/O
"""

from __future__ import annotations

from pagoda.slab.file import FileSlab
from pagoda.slab.memory import (
    PAGE_BYTES,
    MemorySlab,
    address,
    aligned,
    begin_on_pages,
)

__all__ = [
    "PAGE_BYTES",
    "FileSlab",
    "MemorySlab",
    "address",
    "aligned",
    "begin_on_pages",
]
