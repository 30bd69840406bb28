"""A slab in memory: a mapped file (shared by processes) or private anonymous memory.

Called by `HostTier`; calls `linux_mmap` and `pinned`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.base.errors import ClosedError, StoreError, remedy_of_limit
from pagoda.base.file_space import reserve_in_place
from pagoda.base.fork import per_process
from pagoda.base.signal_safe_threads import Event, start_thread
from pagoda.base.store_place import no_private_memory
from pagoda.slab import pinned
from pagoda.slab.cuda_driver import Driver
from pagoda.slab.linux_mmap import (
    HUGE_BYTES,
    Memory,
    collapse_huge_pages,
    map_shared,
    populate,
)

PAGE_BYTES = 4096
# bytes per populate call, a few tens of ms, so that close() never waits long
_PIECE_BYTES = 64 << 20

Bytes = npt.NDArray[np.uint8]


def aligned(nbytes: int) -> Bytes:
    """Return a new private uint8 buffer of `nbytes` that begins on a page (as O_DIRECT needs);
    content undefined.
    """
    buffer = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    skip = -buffer.ctypes.data % PAGE_BYTES
    return buffer[skip : skip + nbytes]


def address(buffer: Bytes) -> int:
    """Return the address of a buffer, at a fraction of the cost of `buffer.ctypes`."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # empty, read-only or with gaps
        begin: int = buffer.__array_interface__["data"][0]
        return begin


def begin_on_pages(buffers: Iterable[Bytes]) -> bool:
    """Return whether each of these buffers begins on a page, as O_DIRECT needs."""
    return not any(address(buffer) % PAGE_BYTES for buffer in buffers)


class Lender(Protocol):
    """Knows which slots have pages and keeps them from being punched
    (`pagoda.ledger.slots_in_use.PageGuards`).
    """

    def lend(self, slots: Sequence[int], base: Bytes) -> Sequence[int]:
        """Keep the pages of slots as long as `base` is alive; returns the slots that have no
        pages.
        """


class MemorySlab:
    """`slots` slots of `slot_bytes` bytes, page-aligned, mapped into this process.

    `path` names an existing file of full length, mapped shared; None maps private memory. Memory
    that is accessed must be allocated: the first access to a hole in a full tmpfs, even a read, is
    a SIGBUS. The view of a slot without pages (`lender` knows which) is a private array of zeros;
    the pages of any other slot stay as long as an array over the view.

    Thread-safe: all methods. Nothing guards the bytes; a caller that copies them validates by the
    ledger afterwards. Raises StoreError if the file is missing, cannot be mapped or is too small;
    ValueError on bad sizes.
    """

    def __init__(
        self,
        path: Path | None,
        slots: int,
        slot_bytes: int,
        lender: Lender | None = None,
    ) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"a slab needs slots >= 1 and slot_bytes >= 1, got {slots} and {slot_bytes}"
            )
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        self._flat: memoryview | None = memoryview(_map(path, self.nbytes)).cast(
            "B"
        )
        flat = np.frombuffer(self._flat, dtype=np.uint8, count=self.nbytes)
        self._array: Bytes | None = flat.reshape(slots, slot_bytes)
        self._lender = lender
        self._stop = Event()

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _threads(self) -> list[threading.Thread]:
        """The threads that fault pages in."""
        return []

    @per_process
    def _pinned(self) -> pinned.PinnedMemory | None:
        """What this process has registered with the GPUs: a child has nothing registered."""
        return None

    @property
    def array(self) -> Bytes:
        """All slots, (slots, slot_bytes) uint8, no copy. Raises ClosedError after close()."""
        array = self._array
        if array is None:
            raise ClosedError("this slab is closed")
        return array

    def view(self, slot: int) -> Bytes:
        """The bytes of one slot, (slot_bytes,) uint8, no copy. Raises IndexError outside [0,
        slots).
        """
        return self.views((slot,))[0]

    def views(self, slots: Sequence[int]) -> list[Bytes]:
        """The bytes of several slots, like `view`; cheaper than one call for each."""
        return self.views_on(slots)[0]

    def views_on(self, slots: Sequence[int]) -> tuple[list[Bytes], Bytes]:
        """Return the bytes of several slots, and the array that lives as long as one of them is
        used: all that is made from them refers to it.
        """
        flat = self._flat
        size = self.slot_bytes
        if flat is None:
            raise ClosedError("this slab is closed")
        if slots and not 0 <= min(slots) <= max(slots) < self.slots:
            raise IndexError(
                f"slots {min(slots)} to {max(slots)} are not all in [0, {self.slots})"
            )
        # Arrays made from these views refer to `base`, and so keep it alive; parts of `array` would
        # not.
        base = np.frombuffer(flat, np.uint8)
        views = [base[slot * size : (slot + 1) * size] for slot in slots]
        unbacked = (
            self._lender.lend(slots, base) if self._lender is not None else ()
        )
        if unbacked:
            views = [
                _zeros(size) if slot in unbacked else view
                for slot, view in zip(slots, views, strict=True)
            ]
        return views, base

    def populate(
        self,
        threads: int = 2,
        background: bool = True,
        backed: Sequence[range] | None = None,
    ) -> None:
        """Fault all pages in before they are used, in huge pages if the kernel has them; only those
        of slots `backed`.

        The content does not change, so readers and writers may run meanwhile. A second call while
        one runs does nothing. If populating is impossible (a kernel before 5.14, no thread can be
        started), pages are faulted in at first access, at a quarter of the speed. `background`
        False: returns when all pages are in or refused.
        """
        array = self.array
        with self._lock:
            if self._stop.is_set() or any(
                thread.is_alive() for thread in self._threads
            ):
                return
            ranges = _byte_ranges(
                [range(self.slots)] if backed is None else backed, self.slot_bytes
            )
            pieces = pinned.pieces(ranges, _PIECE_BYTES)
            made = (
                start_thread(self._populate, "pagoda-populate", array, pieces)
                for _ in range(max(1, threads))
            )
            self._threads = [thread for thread in made if thread is not None]
            running = list(self._threads)
        if not background:
            for thread in running:
                thread.join()

    def allocate_huge(self, fd: int, slots: range) -> bool:
        """Allocate the huge pages within these slots, as far as the kernel has some; return whether
        that is all of these slots. What is left has holes, which the caller allocates.

        `fd` is of the file that is mapped here. Nobody may use these slots yet. A huge page of
        which one small page is allocated is filled by a collapse, which only clears it: that takes
        a fifth of the processor time of allocating, clearing and copying small pages.
        """
        array = self._array
        start = -(-slots.start * self.slot_bytes // HUGE_BYTES) * HUGE_BYTES
        stop = slots.stop * self.slot_bytes // HUGE_BYTES * HUGE_BYTES
        if array is None or stop <= start:
            return False
        for at in range(start, stop, HUGE_BYTES):
            if not reserve_in_place(fd, at, PAGE_BYTES):
                return False
        whole = stop - start == len(slots) * self.slot_bytes
        done = collapse_huge_pages(array.ctypes.data + start, stop - start)
        return done and whole

    def populate_slots(self, slots: range, collapse: bool) -> None:
        """Fault the pages of these slots in, on this thread; `collapse` them into huge pages, which
        takes longer. Does nothing once the slab is closed.

        The pages must be allocated. The content does not change, so readers and writers may run
        meanwhile.
        """
        array = self._array
        ranges = _byte_ranges([slots], self.slot_bytes)
        for start, length in pinned.pieces(ranges, _PIECE_BYTES):
            # `array` keeps the mapping alive
            if array is None or self._stop.is_set():
                return
            address = array.ctypes.data + start
            if not populate(address, length):
                return
            if collapse:
                collapse_huge_pages(address, length)

    def _populate(self, array: Bytes, pieces: Iterator[tuple[int, int]]) -> None:
        # `array` keeps the mapping alive as long as this thread may access it, whatever close()
        # does.
        base = array.ctypes.data
        while not self._stop.is_set():
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            start, length = piece
            if not populate(base + start, length):
                return
            # collapses only existing pages, so it comes after populate
            collapse_huge_pages(base + start, length)

    def pin(
        self,
        device_index: int,
        *,
        driver: Driver | None = None,
        backed: Callable[[], Sequence[range]] | None = None,
    ) -> pinned.PinnedMemory | None:
        """Begin to register all slots with the GPUs, in the background; returns its state, None
        without a driver.

        A second call, also for another device, only looks for more slots: a registration is valid
        for all devices. May run during `populate`, reads and writes. `backed` is called first, on
        the registering thread, and returns the slots that have pages and keep them. Raises
        RuntimeError if no thread can be started: a later call tries again.
        """
        with self._lock:
            if self._stop.is_set():
                raise ClosedError("this slab is closed")
            if self._pinned is not None:
                self._pinned.rescan()
            else:
                # the function below must not use `self`, which would keep it alive forever
                size = self.slot_bytes
                self._pinned = pinned.pin(
                    self.array,
                    device_index,
                    driver=driver,
                    piece_bytes=_piece_bytes(size),
                    parts=None
                    if backed is None
                    else lambda: _byte_ranges(backed(), size),
                )
                # so that a slab that is never closed does not stay registered
                if self._pinned is not None:
                    weakref.finalize(self, self._pinned.stop).atexit = False
            return self._pinned

    @property
    def pinned_bytes(self) -> int:
        """How many bytes this process has registered with the GPUs through this slab."""
        found = self._pinned
        return 0 if found is None else found.nbytes

    def close(self, timeout: float = 5.0) -> None:
        """Stop populating, unregister and release the memory; idempotent, returns within `timeout`
        seconds.

        Memory with live views or registrations is not unmapped: the mapping ends when the last
        array over it is collected.
        """
        self._stop.set()
        with self._lock:
            running = self._threads
            self._threads = []
            registered = self._pinned
            self._pinned = None
        deadline = time.monotonic() + timeout
        if registered is not None:
            registered.close(timeout)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._array = self._flat = None


def _byte_ranges(
    slots: Sequence[range], slot_bytes: int
) -> list[tuple[int, int]]:
    """Return ranges of slots as offsets and lengths in bytes."""
    return [(part.start * slot_bytes, len(part) * slot_bytes) for part in slots]


def _zeros(nbytes: int) -> Bytes:
    zeros = aligned(nbytes)
    zeros[:] = 0
    return zeros


def _piece_bytes(slot_bytes: int) -> int:
    """Return the bytes of a piece to register: whole slots, because CUDA cannot copy a partly
    registered range.
    """
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    return (
        pinned.PIECE_BYTES
        if unit > pinned.MAX_PIECE_BYTES
        else max(1, pinned.PIECE_BYTES // unit) * unit
    )


def _map(path: Path | None, nbytes: int) -> Memory:
    if path is None:
        # Shared with forked children, like the ledger; otherwise a child would commit bytes that
        # its parent cannot see.
        try:
            return map_shared(None, nbytes)
        except OSError as error:
            raise no_private_memory(nbytes, str(error.strerror)) from error
    fd = open_slab(path, nbytes)
    try:
        return map_shared(fd, nbytes)
    except OSError as error:
        raise StoreError(
            f"cannot map {nbytes} bytes of the slab {path} ({error.strerror}): "
            f"{remedy_of_limit(error, 'choose another path')}"
        ) from error
    finally:
        os.close(fd)


def open_slab(path: Path, nbytes: int, flags: int = 0) -> int:
    """Return a descriptor of a slab's file. StoreError if it cannot be opened or is shorter than
    `nbytes`.
    """
    try:
        # to read and write: then the opening of a pipe does not wait
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    except OSError as error:
        raise StoreError(
            f"cannot open the slab {path}: {error.strerror}"
        ) from error
    size = os.fstat(fd).st_size
    # a mapping beyond the end would be a SIGBUS at first access
    if size < nbytes:
        os.close(fd)
        raise StoreError(
            f"the slab {path} has {size} bytes, {nbytes} are needed: remove its store"
        )
    return fd
