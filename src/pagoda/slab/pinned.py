"""Pinned memory: registers host memory with the GPUs, piece by piece in the background, and finds
it by its address.

Called by `memory`; `device_address` and `copying` by the copy engine. Calls `cuda_driver` and
`linux_mmap`.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import queue
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.base.fork import here, per_process
from pagoda.base.log import guarded_logger
from pagoda.base.signal_safe_threads import NO_THREAD, Event, begin
from pagoda.slab.cuda_driver import ALREADY_GONE, Driver, DriverError
from pagoda.slab.linux_mmap import collapse_huge_pages, populate

# At about 0.1 s per GiB a piece takes some 25 ms. `close` waits no longer than that for a piece,
# and neither do other calls of the driver, which has one lock for all calls
# (NVIDIA/TensorRT-LLM#17773 uses pieces of 1 GiB for that reason).
PIECE_BYTES = 256 << 20
# 512 GiB at once are refused, however much is free (vllm-project/vllm#51080)
MAX_PIECE_BYTES = 64 << 30
# the shortest pause between two pieces: other threads wait for the driver's lock, some of them with
# the GIL
_PAUSE_SECONDS = 0.001
_CLOSE_SECONDS = 5.0  # how long to wait for copies in flight by default
_ABANDON = -1.0  # instead of seconds: end without unregistering
_NOT_SUPPORTED = 801

Bytes = npt.NDArray[np.uint8]
log = guarded_logger("pagoda.slab")


class _Spans(NamedTuple):
    """Ranges [begin, end) of memory, in order and disjoint; the device's address of each is `shift`
    bytes higher.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    shifts: tuple[int, ...]


_NO_SPANS = _Spans((), (), ())


class RegisteredRanges:
    """Registered pieces, joined where both their addresses and the device's are consecutive.

    Thread-safe. `find` takes no lock: it reads one immutable table, which every change replaces.
    In a forked child nothing is registered.
    """

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _pieces(self) -> dict[int, tuple[int, int]]:
        """The pieces by address: how long each is, and its place."""
        return {}

    @per_process
    def _spans(self) -> _Spans:
        return _NO_SPANS

    def find(self, address: int, nbytes: int) -> int | None:
        """Return the device's address of [address, address + nbytes); None if it is not registered
        as one range.

        Called for every slot of every copy. `nbytes` is at least 1.
        """
        begins, ends, shifts = self._spans
        at = bisect_right(begins, address) - 1
        if at < 0 or address + nbytes > ends[at]:
            return None
        return address + shifts[at]

    def add(self, address: int, nbytes: int, place: int) -> None:
        """Add a piece that a device sees at `place`. Raises ValueError if it overlaps a registered
        one.
        """
        end = address + nbytes
        shift = place - address
        with self._lock:
            begins, ends, shifts = self._spans
            at = bisect_left(begins, address)
            if (at and ends[at - 1] > address) or (
                at < len(begins) and begins[at] < end
            ):
                raise ValueError(
                    f"some of [{address:#x}, {end:#x}) is registered already"
                )
            # the spans [first, last) continue into the new one, or follow it
            first = last = at
            if at and (ends[at - 1], shifts[at - 1]) == (address, shift):
                first = at - 1
                address = begins[at - 1]
            if at < len(begins) and (begins[at], shifts[at]) == (end, shift):
                last = at + 1
                end = ends[at]
            self._pieces[place - shift] = (nbytes, place)
            self._spans = _Spans(
                (*begins[:first], address, *begins[last:]),
                (*ends[:first], end, *ends[last:]),
                (*shifts[:first], shift, *shifts[last:]),
            )

    def remove(self, addresses: Iterable[int]) -> None:
        """Remove the pieces that begin at these addresses; skips unknown ones."""
        with self._lock:
            for address in addresses:
                self._pieces.pop(address, None)
            self._spans = _join(self._pieces)

    @property
    def nbytes(self) -> int:
        """How many bytes are registered."""
        with self._lock:
            return sum(nbytes for nbytes, _ in self._pieces.values())

    def check(self) -> None:
        """Raise AssertionError with the numbers if the table for `find` does not match the
        pieces.
        """
        with self._lock:
            pieces = dict(self._pieces)
            spans = self._spans
        if spans != _join(pieces):
            raise AssertionError(f"{spans} are not the spans of {pieces}")
        if any(
            begin >= end
            for begin, end in zip(spans.begins, spans.ends, strict=True)
        ):
            raise AssertionError(f"an empty span in {spans}")
        if any(
            end > begin
            for end, begin in zip(spans.ends, spans.begins[1:], strict=False)
        ):
            raise AssertionError(f"spans overlap in {spans}")


def _join(pieces: dict[int, tuple[int, int]]) -> _Spans:
    begins = list[int]()
    ends = list[int]()
    shifts = list[int]()
    for address in sorted(pieces):
        nbytes, place = pieces[address]
        if ends and (ends[-1], shifts[-1]) == (address, place - address):
            ends[-1] += nbytes
            continue
        begins.append(address)
        ends.append(address + nbytes)
        shifts.append(place - address)
    return _Spans(tuple(begins), tuple(ends), tuple(shifts))


_ranges = RegisteredRanges()
# one per `copying`, with its process; adding, discarding and copying the set are atomic
_copies: set[tuple[int, object]] = set()
_all: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()
# Stays registered and mapped: if it were unmapped, the driver would still map its addresses to the
# old pages.
_kept: list[Bytes] = []

device_address = _ranges.find
check = _ranges.check


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Keep every range that `device_address` returns in this scope registered until its end;
    `close` waits for it.

    Put a whole copy into it, from before the first `device_address` until the device has copied the
    last byte. No lock.
    """
    copy = here(), object()
    try:
        _copies.add(copy)
        yield
    finally:
        _copies.discard(copy)


def pin(
    array: Bytes,
    device_index: int,
    *,
    driver: Driver | None = None,
    background: bool = True,
    piece_bytes: int = PIECE_BYTES,
    parts: Callable[[], Sequence[tuple[int, int]]] | None = None,
) -> PinnedMemory | None:
    """Register the memory of `array` (uint8, contiguous, beginning on a page) with the GPUs, piece
    by piece.

    Returns immediately, or with `background` False when all parts are registered or refused. Pieces
    have `piece_bytes`, in whole pages and at most 64 GiB. `parts` is called first, on the
    registering thread, and returns the parts to register, as offset and length; by default all.
    Returns None without NVIDIA's driver. Raises ValueError for an array that cannot be registered,
    RuntimeError if no thread can be started.
    """
    page = mmap.PAGESIZE
    if (
        array.dtype != np.uint8
        or not array.flags.c_contiguous
        or array.nbytes < 1
    ):
        raise ValueError(
            f"only contiguous uint8 can be registered, got {array.shape} of {array.dtype}"
        )
    if array.ctypes.data % page:
        raise ValueError(
            f"memory to register must begin on a page of {page} bytes: allocate it with `aligned`"
        )
    driver = driver or Driver.load()
    if driver is None:
        log.warning(
            "libcuda.so.1 cannot be used: host memory is not registered, copies use a bounce buffer"
        )
        return None
    piece_bytes = max(page, min(piece_bytes, MAX_PIECE_BYTES) // page * page)
    whole = [(0, array.nbytes)]
    pinned = PinnedMemory(
        array, device_index, driver, piece_bytes, parts or (lambda: whole)
    )
    if not background:
        pinned.wait()
    return pinned


class PinnedMemory:
    """The registered pieces of one array, from `pin`. Thread-safe; a forked child has none of them.

    One thread makes all calls of the driver, so that no other thread's context changes. It keeps
    the array alive as long as any of it is registered: if it were unmapped earlier, the driver
    would still map its addresses to the old pages.
    """

    def __init__(
        self,
        array: Bytes,
        device_index: int,
        driver: Driver,
        piece_bytes: int,
        parts: Callable[[], Sequence[tuple[int, int]]],
    ) -> None:
        self.device_index = device_index
        self._process = here()
        # why not all of it is registered; empty if nothing failed
        self.trouble = ""
        self._total_bytes = 0
        self._base = array.ctypes.data
        self._array: Bytes | None = array
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._find_parts = parts
        self._registered: dict[int, int] = {}  # addresses and lengths of pieces
        self._done = Event()
        # A request: the seconds that closing may take; or None: look for more to register. Garbage
        # collection may call `put` while any lock is held.
        self._requests: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="pagoda-pin", daemon=True
        )
        if not begin(self._thread):
            raise RuntimeError(NO_THREAD)
        _all.add(self)

    @per_process
    def nbytes(self) -> int:
        """How many bytes are registered now, by this process."""
        return 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until registering has ended, complete or not; False after `timeout` seconds."""
        # a child has nothing registered, and no thread that registers
        return self._process != here() or self._done.wait(timeout)

    def rescan(self) -> None:
        """Ask for the parts again, and register those that are not registered; never waits."""
        self._requests.put(None)

    def stop(self) -> None:
        """Begin to close; never waits."""
        self._requests.put(_CLOSE_SECONDS)

    def close(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """Stop registering and unregister all; idempotent. False: not done in `timeout` seconds; it
        continues.

        First `device_address` stops finding its memory, then copies in flight are waited for. If a
        copy takes longer, all of the memory stays registered for the life of this process.
        """
        self._requests.put(max(0.0, timeout))
        # garbage collection may close it on any thread
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        seconds: float | None = None
        try:
            while seconds is None:
                seconds = self._register()
                self._done.set()
                seconds = self._requests.get() if seconds is None else seconds
        except DriverError as error:
            self._stop_at(f"{error}: {_remedy(error)}")
        except Exception as error:  # noqa: BLE001
            # the border of a background thread: copies find another way
            self._stop_at(f"{type(error).__name__}: {error}")
        self._done.set()
        while seconds is None:
            seconds = self._requests.get()
        self._unregister(seconds)

    def _register(self) -> float | None:
        """Register piece by piece until closing is requested; return the seconds for closing."""
        known = [
            (address - self._base, nbytes)
            for address, nbytes in self._registered.items()
        ]
        parts = list(_subtract(self._find_parts(), known))
        self._total_bytes = self.nbytes + sum(nbytes for _, nbytes in parts)
        self._driver.use(self.device_index)
        began = time.monotonic()
        pause = _PAUSE_SECONDS
        for start, nbytes in pieces(parts, self._piece_bytes):
            with contextlib.suppress(queue.Empty):
                if (seconds := self._requests.get(timeout=pause)) is not None:
                    return seconds
                self._requests.put(None)  # look again after this round
            address = self._base + start
            # the driver would do this slowly, and with its lock held
            populate(address, nbytes)
            collapse_huge_pages(address, nbytes)  # registered pages cannot move
            asked = time.monotonic()
            with self._driver.relaxed_capture():
                place = self._driver.register(address, nbytes)
            # other threads get the lock for half of the time
            pause = max(_PAUSE_SECONDS, time.monotonic() - asked)
            self._registered[address] = nbytes
            _ranges.add(address, nbytes, place)
            self.nbytes += nbytes
        seconds = time.monotonic() - began
        log.info(
            "registered %d bytes of host memory with the GPUs in %.1f s",
            self.nbytes,
            seconds,
        )
        return None

    def _stop_at(self, why: str) -> None:
        self.trouble = why
        log.warning(
            (
                "%d of %d bytes of host memory are registered with the GPUs, copies of the rest "
                "use "
                "a bounce buffer: %s"
            ),
            self.nbytes,
            self._total_bytes,
            self.trouble,
        )

    def _unregister(self, seconds: float) -> None:
        if seconds == _ABANDON:
            return None
        until = time.monotonic() + seconds
        # first, so that no new copy finds them; running copies are in `_copies`
        _ranges.remove(self._registered)
        if self._registered and not _wait_for_copies(until):
            return self._keep("a copy did not end")
        for address in self._registered:
            try:
                with self._driver.relaxed_capture():
                    self._driver.unregister(address)
            except DriverError as error:
                if error.code not in ALREADY_GONE:
                    return self._keep(str(error))
        self.nbytes = 0
        self._array = None
        return None

    def _keep(self, why: str) -> None:
        log.warning(
            "host memory stays registered and mapped until this process ends: %s",
            why,
        )
        if self._array is not None:
            _kept.append(self._array)


def pieces(
    parts: Iterable[tuple[int, int]], piece_bytes: int
) -> Iterator[tuple[int, int]]:
    """Split parts of memory (offset, length) into pieces of at most `piece_bytes`."""
    for start, nbytes in parts:
        for at in range(0, nbytes, piece_bytes):
            yield start + at, min(piece_bytes, nbytes - at)


def _subtract(
    parts: Iterable[tuple[int, int]], known: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Return parts (offset, length) without the known ones; the ranges of each are disjoint."""
    ordered = sorted(known)
    for start, nbytes in parts:
        at = start
        end = start + nbytes
        for first, length in ordered:
            if at < first < end:
                yield at, first - at
            if first < end and at < first + length:
                at = first + length
        if at < end:
            yield at, end - at


def _remedy(error: DriverError) -> str:
    if error.code == _NOT_SUPPORTED:
        return "confidential computing does not allow it"
    return "raise `ulimit -l` (in a container `--ulimit memlock=-1`), or make the host tier smaller"


def _wait_for_copies(until: float) -> bool:
    """Wait for the copies that are in flight now; False if one has not ended at `until`."""
    # those of a parent go on in the parent
    in_flight = {copy for copy in set(_copies) if copy[0] == here()}
    while in_flight & _copies:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _abandon_all() -> None:
    """Stop all threads at exit, without unregistering: no thread may call the driver while it shuts
    down.
    """
    left = list(_all)
    for pinned in left:
        pinned._requests.put(_ABANDON)
    until = time.monotonic() + 1.0
    for pinned in left:
        pinned._thread.join(max(0.0, until - time.monotonic()))


atexit.register(_abandon_all)
