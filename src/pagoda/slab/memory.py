"""A slab in memory: a mapped file (shared by processes) or private anonymous memory."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import ClosedError, StoreError
from pagoda.slab import pinned
from pagoda.slab.cuda_driver import Driver
from pagoda.slab.linux_mmap import Memory, huge_pages, map_shared, populate
from pagoda.threads import Event, begin

PAGE_BYTES = 4096
_PIECE_BYTES = 64 << 20  # one populate call: a few tens of ms, so close() never waits long

Bytes = npt.NDArray[np.uint8]
_slabs: weakref.WeakSet[MemorySlab] = weakref.WeakSet()


def aligned(nbytes: int) -> Bytes:
    """A new private uint8 buffer of `nbytes` that begins on a page (fit for O_DIRECT); content undefined."""
    room = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    skip = -room.ctypes.data % PAGE_BYTES
    return room[skip : skip + nbytes]


class Lender(Protocol):
    """Who says whether a slot may be touched (`pagoda.ledger.lending.Lending`)."""

    def lend(self, slots: Sequence[int], base: Bytes) -> Sequence[int]:
        """Keep the pages of slots for as long as `base` lives; returns those that have none."""


class MemorySlab:
    """`slots` slots of `slot_bytes` bytes, page-aligned, mapped into this process.

    `path` names an existing file of full length, mapped shared; None maps private memory. What is touched has to be
    really allocated: a hole in a full tmpfs is SIGBUS at first touch, also at a read. Of a slot that has no pages, as
    `lender` knows, a view is zeros of the caller's own; of any other, the pages stay as long as an array over the view.

    Thread-safe: all methods. Nothing guards the bytes; who copies them validates by the ledger afterwards.
    Raises StoreError if the file is missing, cannot be mapped or is too small; ValueError on bad sizes.
    """

    def __init__(self, path: Path | None, slots: int, slot_bytes: int, lender: Lender | None = None) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a slab needs slots >= 1 and slot_bytes >= 1, got {slots} and {slot_bytes}")
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        self._flat: memoryview | None = memoryview(_map(path, self.nbytes)).cast("B")
        flat = np.frombuffer(self._flat, dtype=np.uint8, count=self.nbytes)
        self._array: Bytes | None = flat.reshape(slots, slot_bytes)
        self._lender = lender
        self._stop = Event()
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
        return self.views((slot,))[0]

    def views(self, slots: Sequence[int]) -> list[Bytes]:
        """The bytes of some slots, as `view`; cheaper than one by one."""
        flat, size = self._flat, self.slot_bytes
        if flat is None:
            raise ClosedError("this slab is closed")
        if slots and not 0 <= min(slots) <= max(slots) < self.slots:
            raise IndexError(f"slots {min(slots)} to {max(slots)} are not all in [0, {self.slots})")
        # Whatever is made of these views refers to `base`, and so keeps it alive: not so with parts of `array`.
        base = np.frombuffer(flat, np.uint8)
        views = [base[slot * size : (slot + 1) * size] for slot in slots]
        bare = self._lender.lend(slots, base) if self._lender is not None else ()
        if bare:
            views = [_zeros(size) if slot in bare else view for slot, view in zip(slots, views, strict=True)]
        return views

    @property
    def populated_bytes(self) -> int:
        """How many bytes populate() has faulted in so far (0 where the kernel cannot)."""
        with self._lock:
            return self._populated_bytes

    def populate(
        self, threads: int = 2, background: bool = True, backed: Sequence[range] | None = None
    ) -> None:
        """Fault all pages in ahead of use, in huge pages where the kernel gives them; only those of slots `backed`.

        Content is untouched, so it may run beside readers and writers.

        A second call while one runs does nothing. Where it cannot be (a kernel before 5.14, no thread to be had) pages
        come at first touch, a quarter as fast. `background` False: returns when all is in or refused.
        """
        array = self.array
        with self._lock:
            if self._stop.is_set() or any(thread.is_alive() for thread in self._threads):
                return
            pieces = iter(self._pieces([range(self.slots)] if backed is None else backed))
            self._populated_bytes = 0
            made = [
                threading.Thread(
                    target=self._populate, args=(array, pieces), name="pagoda-populate", daemon=True
                )
                for _ in range(max(1, threads))
            ]
            self._threads = [thread for thread in made if begin(thread)]
            running = list(self._threads)
        if not background:
            for thread in running:
                thread.join()

    def _parts(
        self, backed: Callable[[], Sequence[range]] | None
    ) -> Callable[[], list[tuple[int, int]]] | None:
        size = self.slot_bytes  # not `self`, which would never be collected
        if backed is None:
            return None
        return lambda: [(slots.start * size, len(slots) * size) for slots in backed()]

    def _pieces(self, backed: Sequence[range]) -> Iterator[tuple[int, int]]:
        for slots in backed:
            end = slots.stop * self.slot_bytes
            for start in range(slots.start * self.slot_bytes, end, _PIECE_BYTES):
                yield start, min(_PIECE_BYTES, end - start)

    def _populate(self, array: Bytes, pieces: Iterator[tuple[int, int]]) -> None:
        # `array` keeps the mapping alive for as long as this thread may touch it, whatever close() does.
        base = array.ctypes.data
        while not self._stop.is_set():
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            start, length = piece
            if not populate(base + start, length):
                return
            huge_pages(base + start, length)  # moves pages that are there; of none it can make none
            with self._lock:
                self._populated_bytes += length

    def pin(
        self,
        device_index: int,
        *,
        driver: Driver | None = None,
        backed: Callable[[], Sequence[range]] | None = None,
    ) -> pinned.Pinned | None:
        """Begin to register all slots with the GPUs, in the background; returns how that goes, None without a driver.

        A second call only looks for more, for another device too: what is registered is so for all. May run beside
        `populate`, readers and writers. `backed` is called first, on the thread that registers: the slots that have
        pages and keep them. Raises RuntimeError if no thread can be started: a later call tries again.
        """
        with self._lock:
            if self._stop.is_set():
                raise ClosedError("this slab is closed")
            if self._pinned is not None:
                self._pinned.again()
            else:
                size = _whole(self.slot_bytes)
                self._pinned = pinned.pin(
                    self.array, device_index, driver=driver, piece_bytes=size, parts=self._parts(backed)
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
        self._array = self._flat = None


def _zeros(nbytes: int) -> Bytes:
    nothing = aligned(nbytes)
    nothing[:] = 0
    return nothing


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
