"""A slab in memory: a mapped file (shared by processes) or private anonymous memory."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagoda.errors import ClosedError, StoreError
from pagoda.slab import pinned
from pagoda.slab.driver import Driver
from pagoda.slab.mapping import Memory, huge_pages, map_shared, populate

PAGE_BYTES = 4096
_PIECE_BYTES = 64 << 20  # one populate call: a few tens of ms, so close() never waits long

Bytes = npt.NDArray[np.uint8]
_slabs: weakref.WeakSet[MemorySlab] = weakref.WeakSet()


def aligned(nbytes: int) -> Bytes:
    """A new private uint8 buffer of `nbytes` that begins on a page (fit for O_DIRECT); content undefined."""
    room = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    skip = -room.ctypes.data % PAGE_BYTES
    return room[skip : skip + nbytes]


class MemorySlab:
    """`slots` slots of `slot_bytes` bytes, page-aligned, mapped into this process.

    `path` names an existing file of full size, mapped shared; None maps private memory. The file has
    to be really allocated (posix_fallocate): a hole in a full tmpfs is SIGBUS at first touch.

    Thread-safe: all methods. Nothing guards the bytes; who copies them validates by the ledger afterwards.
    Raises StoreError if the file is missing, cannot be mapped or is too small; ValueError on bad sizes.
    """

    def __init__(self, path: Path | None, slots: int, slot_bytes: int) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a slab needs slots >= 1 and slot_bytes >= 1, got {slots} and {slot_bytes}")
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        flat = np.frombuffer(memoryview(_map(path, self.nbytes)), dtype=np.uint8, count=self.nbytes)
        self._array: Bytes | None = flat.reshape(slots, slot_bytes)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._populated_bytes = 0
        self._pinned: pinned.Pinned | None = None
        _slabs.add(self)

    def _after_fork(self) -> None:
        """Forget what is the parent's: its threads, and what it has registered."""
        self._lock = threading.Lock()
        self._threads = []
        self._pinned = None

    @property
    def array(self) -> Bytes:
        """All slots, (slots, slot_bytes) uint8, no copy. Raises ClosedError after close()."""
        array = self._array
        if array is None:
            raise ClosedError("this slab is closed")
        return array

    def view(self, slot: int) -> Bytes:
        """The bytes of one slot, (slot_bytes,) uint8, no copy. Raises IndexError outside [0, slots)."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} is outside [0, {self.slots})")
        view: Bytes = self.array[slot]
        return view

    @property
    def populated_bytes(self) -> int:
        """How many bytes populate() has faulted in so far (0 where the kernel cannot)."""
        with self._lock:
            return self._populated_bytes

    def populate(self, threads: int = 2, background: bool = True) -> None:
        """Fault all pages in ahead of use, in huge pages where the kernel gives them.

        Content is untouched, so it may run beside readers and writers.

        A second call while one runs does nothing. A kernel that cannot (before 5.14) is left be: pages then
        come at first touch, a quarter as fast. `background` False: returns when all is in or refused.
        """
        array = self.array
        with self._lock:
            if self._stop.is_set() or any(thread.is_alive() for thread in self._threads):
                return
            pieces = iter(range(0, self.nbytes, _PIECE_BYTES))
            self._populated_bytes = 0
            self._threads = [
                threading.Thread(target=self._populate, args=(array, pieces), daemon=True)
                for _ in range(max(1, threads))
            ]
            for thread in self._threads:
                thread.start()
            running = list(self._threads)
        if not background:
            for thread in running:
                thread.join()

    def _populate(self, array: Bytes, pieces: Iterator[int]) -> None:
        # `array` keeps the mapping alive for as long as this thread may touch it, whatever close() does.
        base = array.ctypes.data
        while not self._stop.is_set():
            with self._lock:
                start = next(pieces, None)
            if start is None:
                return
            length = min(_PIECE_BYTES, self.nbytes - start)
            if not populate(base + start, length):
                return
            huge_pages(base + start, length)  # moves pages that are there; of none it can make none
            with self._lock:
                self._populated_bytes += length

    def pin(
        self, device_index: int, *, driver: Driver | None = None, before: Callable[[], object] | None = None
    ) -> pinned.Pinned | None:
        """Begin to register all slots with the GPUs, in the background; returns how that goes, None without a driver.

        A second call does nothing, for another device too: what is registered is so for all. May run beside
        `populate`, readers and writers. `before` is called first, on the thread that registers.
        """
        with self._lock:
            if self._stop.is_set():
                raise ClosedError("this slab is closed")
            if self._pinned is None:
                size = _whole(self.slot_bytes)
                self._pinned = pinned.pin(
                    self.array, device_index, driver=driver, piece_bytes=size, before=before
                )
                if self._pinned is not None:  # or a slab that nobody closes would stay registered
                    weakref.finalize(self, self._pinned.stop).atexit = False
            return self._pinned

    @property
    def pinned_bytes(self) -> int:
        """How many bytes are registered with the GPUs by this process, through this slab."""
        found = self._pinned
        return 0 if found is None else found.nbytes

    def close(self, timeout: float = 5.0) -> None:
        """Stop populating, unregister and let go of the memory; idempotent, ends within `timeout` seconds.

        Nothing is unmapped under live views, nor while it is registered: the mapping goes when the last array over it
        is collected.
        """
        self._stop.set()
        with self._lock:
            running, self._threads = self._threads, []
            registered, self._pinned = self._pinned, None
        deadline = time.monotonic() + timeout
        if registered is not None:
            registered.close(timeout)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._array = None


def _whole(slot_bytes: int) -> int:
    """The bytes of a piece to register: whole slots, so that none is registered in part. CUDA copies no such range."""
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    return pinned.PIECE_BYTES if unit > pinned.MOST_BYTES else max(1, pinned.PIECE_BYTES // unit) * unit


def _map(path: Path | None, nbytes: int) -> Memory:
    if path is None:
        # Shared with forked children, as the ledger is: else a child would commit bytes that its parent cannot see.
        return map_shared(None, nbytes)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open the slab {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if size < nbytes:  # mapping past the end would be SIGBUS at first touch
            raise StoreError(f"the slab {path} has {size} bytes, {nbytes} are needed: remove its store")
        return map_shared(fd, nbytes)
    except OSError as error:
        raise StoreError(f"cannot map {nbytes} bytes of the slab {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _after_fork_in_child() -> None:
    for slab in list(_slabs):
        slab._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
