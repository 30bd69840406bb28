"""Memory that a GPU reads and writes by itself: registered piece by piece in the background, found by its address."""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import queue
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.slab.cuda_driver import GONE, Driver, DriverError
from pagoda.slab.linux_mmap import huge_pages, populate
from pagoda.threads import NO_THREAD, Event, begin

__all__ = ["MOST_BYTES", "PIECE_BYTES", "Pinned", "check", "copying", "pin", "place_of"]

# At about 0.1 s a GiB a piece takes some 25 ms: close() waits no longer for one, and neither does another call of the
# driver, which has one lock for all (NVIDIA/TensorRT-LLM#17773 goes in pieces of 1 GiB for that reason).
PIECE_BYTES = 256 << 20
MOST_BYTES = (
    64 << 30
)  # of one piece: 512 GiB at once are refused, however much is free (vllm-project/vllm#51080)
_PAUSE_SECONDS = (
    0.001  # the least between two pieces: others wait for the driver's lock, some with Python's own
)
_PATIENCE_SECONDS = 5.0  # with copies under way, where nobody said how long
_LEAVE = -1.0  # instead of seconds: end, and unregister nothing
_NOT_SUPPORTED = 801

Bytes = npt.NDArray[np.uint8]
log = logging.getLogger("pagoda.slab")


class _Spans(NamedTuple):
    """Ranges [begin, end) of memory, in order and apart; a device sees each `shift` bytes further on."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    shifts: tuple[int, ...]


_NONE = _Spans((), (), ())


class Places:
    """Registered pieces, joined where both their addresses and the device's go on.

    Thread-safe. `find` takes no lock: it reads one immutable table, which every change replaces.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, with none: as in a forked child, where nothing is registered."""
        self._lock = threading.Lock()
        self._pieces: dict[int, tuple[int, int]] = {}  # address -> (nbytes, place)
        self._spans = _NONE

    def find(self, address: int, nbytes: int) -> int | None:
        """Where a device sees [address, address + nbytes); None if any of it is not registered, or lies apart there.

        For every slot of every copy. `nbytes` is at least 1.
        """
        spans = self._spans
        at = bisect_right(spans.begins, address) - 1
        if at < 0 or address + nbytes > spans.ends[at]:
            return None
        return address + spans.shifts[at]

    def add(self, address: int, nbytes: int, place: int) -> None:
        """Note that a piece is registered and seen at `place`. ValueError if it overlaps one that is."""
        end, shift = address + nbytes, place - address
        with self._lock:
            begins, ends, shifts = self._spans
            at = bisect_left(begins, address)
            if (at and ends[at - 1] > address) or (at < len(begins) and begins[at] < end):
                raise ValueError(f"some of [{address:#x}, {end:#x}) is registered already")
            first = last = at  # the spans [first, last) go on into the new one, or from it
            if at and (ends[at - 1], shifts[at - 1]) == (address, shift):
                first, address = at - 1, begins[at - 1]
            if at < len(begins) and (begins[at], shifts[at]) == (end, shift):
                last, end = at + 1, ends[at]
            self._pieces[place - shift] = (nbytes, place)
            self._spans = _Spans(
                (*begins[:first], address, *begins[last:]),
                (*ends[:first], end, *ends[last:]),
                (*shifts[:first], shift, *shifts[last:]),
            )

    def remove(self, addresses: Iterable[int]) -> None:
        """Forget the pieces that begin at these addresses; unknown ones are passed over."""
        with self._lock:
            for address in addresses:
                self._pieces.pop(address, None)
            self._spans = _joined(self._pieces)

    @property
    def nbytes(self) -> int:
        """How much is registered."""
        with self._lock:
            return sum(nbytes for nbytes, _ in self._pieces.values())

    def check(self) -> None:
        """Raise AssertionError with the numbers if the table that is read is not what the pieces make."""
        with self._lock:
            pieces, spans = dict(self._pieces), self._spans
        if spans != _joined(pieces):
            raise AssertionError(f"{spans} are not the spans of {pieces}")
        if any(begin >= end for begin, end in zip(spans.begins, spans.ends, strict=True)):
            raise AssertionError(f"an empty span in {spans}")
        if any(end > begin for end, begin in zip(spans.ends, spans.begins[1:], strict=False)):
            raise AssertionError(f"spans overlap in {spans}")


def _joined(pieces: dict[int, tuple[int, int]]) -> _Spans:
    begins, ends, shifts = list[int](), list[int](), list[int]()
    for address in sorted(pieces):
        nbytes, place = pieces[address]
        if ends and (ends[-1], shifts[-1]) == (address, place - address):
            ends[-1] += nbytes
            continue
        begins.append(address)
        ends.append(address + nbytes)
        shifts.append(place - address)
    return _Spans(tuple(begins), tuple(ends), tuple(shifts))


_places = Places()
_copies: set[object] = set()  # one a `copying`; adding, discarding and copying the set are atomic
_all: weakref.WeakSet[Pinned] = weakref.WeakSet()
_kept: list[Bytes] = []  # stays registered: were it unmapped, its addresses would go on meaning its old pages

place_of = _places.find
check = _places.check


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """What `place_of` answers in here stays registered until the end of it, for a `close` waits for that.

    Around a whole copy, from before the first `place_of` until the device has done its last byte. Takes no lock.
    """
    mine = object()
    try:
        _copies.add(mine)
        yield
    finally:
        _copies.discard(mine)


def pin(
    array: Bytes,
    device_index: int,
    *,
    driver: Driver | None = None,
    background: bool = True,
    piece_bytes: int = PIECE_BYTES,
    parts: Callable[[], Sequence[tuple[int, int]]] | None = None,
) -> Pinned | None:
    """Register the memory of `array` (uint8, contiguous, beginning on a page) with the GPUs, bit by bit.

    Returns at once, or with `background` False when all is in or refused. Pieces have `piece_bytes`, in whole pages and
    at most 64 GiB. `parts` is called first, on the thread that registers, and says what there is to register, as offset
    and length; by default all. None: there is no driver of NVIDIA here. Raises ValueError for an array that cannot be
    registered, RuntimeError if no thread can be started.
    """
    page = mmap.PAGESIZE
    if array.dtype != np.uint8 or not array.flags.c_contiguous or array.nbytes < 1:
        raise ValueError(f"only contiguous uint8 can be registered, got {array.shape} of {array.dtype}")
    if array.ctypes.data % page:
        raise ValueError(f"what is registered has to begin on a page of {page} bytes: make it with `aligned`")
    driver = driver or Driver.load()
    if driver is None:
        log.warning("libcuda.so.1 cannot be used: host memory is not registered, copies go through a buffer")
        return None
    piece_bytes = max(page, min(piece_bytes, MOST_BYTES) // page * page)
    whole = [(0, array.nbytes)]
    pinned = Pinned(array, device_index, driver, piece_bytes, parts or (lambda: whole))
    if not background:
        pinned.wait()
    return pinned


class Pinned:
    """The registered pieces of one array, from `pin`. Thread-safe; a forked child has none of them.

    One thread does all that needs the driver, so that no other thread's context changes. It keeps the array alive for
    as long as any of it is registered: unmapped before that, its addresses would go on meaning its old pages.
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
        self.nbytes = 0  # registered now: always the first so many, until close
        self.trouble = ""  # why not all of it; empty while there is none
        self._total_bytes = 0
        self._base = array.ctypes.data
        self._array: Bytes | None = array
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._parts = parts
        self._registered: dict[int, int] = {}  # addresses and lengths of pieces
        self._settled = Event()
        # Of seconds that the end may take. Its `put` may be called by a collection of garbage, whatever is locked.
        self._ends: queue.SimpleQueue[float | None] = queue.SimpleQueue()  # None: there is more to register
        self._thread = threading.Thread(target=self._live, name="pagoda-pin", daemon=True)
        if not begin(self._thread):
            raise RuntimeError(NO_THREAD)
        _all.add(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is registered, or no more will be; False if `timeout` seconds were not enough."""
        return self._settled.wait(timeout)

    def again(self) -> None:
        """Have it ask for the parts once more, and register what is not; never waits."""
        self._ends.put(None)

    def stop(self) -> None:
        """Have it end, soon; never waits."""
        self._ends.put(_PATIENCE_SECONDS)

    def close(self, timeout: float = _PATIENCE_SECONDS) -> bool:
        """Register no more and unregister what is; idempotent. False: not done in `timeout` seconds, and goes on.

        `place_of` soon answers for nothing of it, then copies that are under way are waited for. One that takes longer
        leaves all of it registered for the life of this process.
        """
        self._ends.put(max(0.0, timeout))
        if (
            self._thread is not threading.current_thread()
        ):  # a collection of garbage may close anything anywhere
            self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _live(self) -> None:
        seconds: float | None = None
        try:
            while seconds is None:
                seconds = self._register()
                self._settled.set()
                seconds = self._ends.get() if seconds is None else seconds
        except DriverError as error:
            self._refused(f"{error}: {_remedy(error)}")
        except Exception as error:  # noqa: BLE001  # the border of a background thread: copies find another way
            self._refused(f"{type(error).__name__}: {error}")
        self._settled.set()
        while seconds is None:
            seconds = self._ends.get()
        self._unregister(seconds)

    def _register(self) -> float | None:
        """Register piece by piece; returns the seconds that are left once the end was asked for."""
        parts = list(_without(self._parts(), [(a - self._base, n) for a, n in self._registered.items()]))
        self._total_bytes = self.nbytes + sum(nbytes for _, nbytes in parts)
        self._driver.use(self.device_index)
        began, pause = time.monotonic(), _PAUSE_SECONDS
        for start, nbytes in _pieces(parts, self._piece_bytes):
            with contextlib.suppress(queue.Empty):
                if (seconds := self._ends.get(timeout=pause)) is not None:
                    return seconds
                self._ends.put(None)  # after this round
            address = self._base + start
            populate(address, nbytes)  # the driver would do it slowly, and under its lock
            huge_pages(address, nbytes)  # afterwards its pages cannot move
            asked = time.monotonic()
            with self._driver.beside_captures():
                place = self._driver.register(address, nbytes)
            pause = max(_PAUSE_SECONDS, time.monotonic() - asked)  # others have the lock for half of the time
            self._registered[address] = nbytes
            _places.add(address, nbytes, place)
            self.nbytes += nbytes
        seconds = time.monotonic() - began
        log.info("registered %d bytes of host memory with the GPUs in %.1f s", self.nbytes, seconds)
        return None

    def _refused(self, why: str) -> None:
        self.trouble = why
        log.warning(
            "%d of %d bytes of host memory are registered with the GPUs, copies of the rest go through a buffer: %s",
            self.nbytes, self._total_bytes, self.trouble,
        )  # fmt: skip

    def _unregister(self, seconds: float) -> None:
        if seconds == _LEAVE:
            return None
        until = time.monotonic() + seconds
        _places.remove(self._registered)  # first: no new copy finds it, and all that did are in `_copies`
        if self._registered and not _quiet(until):
            return self._keep("a copy did not end")
        for address in self._registered:
            try:
                with self._driver.beside_captures():
                    self._driver.unregister(address)
            except DriverError as error:
                if error.code not in GONE:
                    return self._keep(str(error))
        self.nbytes, self._array = 0, None
        return None

    def _keep(self, why: str) -> None:
        log.warning("host memory stays registered and mapped until this process ends: %s", why)
        if self._array is not None:
            _kept.append(self._array)

    def _forget(self) -> None:
        """In a forked child: what is registered is the parent's, and so is the thread."""
        self.nbytes, self._array, self._registered = 0, None, {}
        self._ends, self._settled = queue.SimpleQueue(), Event()
        self._settled.set()


def _pieces(parts: Iterable[tuple[int, int]], piece_bytes: int) -> Iterator[tuple[int, int]]:
    for start, nbytes in parts:
        for at in range(0, nbytes, piece_bytes):
            yield start + at, min(piece_bytes, nbytes - at)


def _without(parts: Iterable[tuple[int, int]], known: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Parts (offset, length) without what is known of them; both apart from each other."""
    ordered = sorted(known)
    for start, nbytes in parts:
        at, end = start, start + nbytes
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


def _quiet(until: float) -> bool:
    """Wait for the copies that are under way now; False if one has not ended at `until`."""
    under_way = set(_copies)
    while under_way & _copies:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _leave_all() -> None:
    """At exit the kernel takes all back; but no call of the driver may be under way while the driver ends itself."""
    left = list(_all)
    for pinned in left:
        pinned._ends.put(_LEAVE)
    until = time.monotonic() + 1.0
    for pinned in left:
        pinned._thread.join(max(0.0, until - time.monotonic()))


def _after_fork_in_child() -> None:
    _places.renew()
    _copies.clear()
    _kept.clear()  # mapped in the parent all the same
    for pinned in list(_all):
        pinned._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_leave_all)
