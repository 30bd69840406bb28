"""A file slab that fails on demand, in the ways in which disks fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import TypeVar

import numpy as np

from pagoda.slab.file import FileSlab
from pagoda.slab.memory import PAGE_BYTES, Bytes, aligned

# a hang ends after this time without a release, so that no test run hangs for ever
_HANG_SECONDS = 60.0
CALLS = ("read", "write", "read_headers", "sync")
_B = TypeVar("_B", Bytes, memoryview)


class Fault(StrEnum):
    """The fault of one call."""

    # a system call moves only half of the bytes; no loss if the rest is moved afterwards
    SHORT = auto()
    TORN = auto()  # the first half is moved, then EIO
    EIO = auto()  # nothing is moved
    ENOSPC = auto()  # nothing is moved
    BIT_FLIP = auto()  # one bit changes, without an error
    LOST = auto()  # nothing is moved, without an error
    DELAY = auto()  # the call takes `delay_seconds` longer
    HANG = auto()  # the call begins only after `release()`


@dataclass
class _Planned:
    fault: Fault
    skip: int
    times: int
    at: int | None


class FaultySlab(FileSlab):
    """A FileSlab whose next calls can be made to fail: `slab.fail_next("write", Fault.TORN)`.

    `calls` counts the calls by name, `struck` the faults that were injected. All methods are
    thread-safe; of several concurrent calls, a fault affects the first.
    """

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, direct: bool | None = None
    ) -> None:
        super().__init__(path, slots, slot_bytes, direct)
        self.calls: Counter[str] = Counter()
        self.struck: Counter[Fault] = Counter()
        self.delay_seconds = 0.05
        self.hanging = threading.Event()  # set once a call hangs
        self._released = threading.Event()
        self._plans: dict[str, list[_Planned]] = {name: [] for name in CALLS}
        # by call and slot: what its next one finds
        self._judged: dict[tuple[str, int], _Planned | None] = {}
        self._plan_lock = threading.Lock()
        self._shorten = threading.local()

    @classmethod
    def like(cls, slab: FileSlab) -> FaultySlab:
        """Return a faulty slab over the same file; the other stays open."""
        return cls(slab.path, slab.slots, slab.slot_bytes, slab.direct)

    def fail_next(
        self,
        call: str,
        fault: Fault,
        times: int = 1,
        *,
        skip: int = 0,
        at: int | None = None,
    ) -> None:
        """Make the next `times` calls of that name fail, after `skip` calls that do not; plans are
        queued.

        `at` is the byte that BIT_FLIP changes, counted over all bytes of the call (None: the middle
        one). Raises ValueError for an unknown name.
        """
        if call not in CALLS:
            raise ValueError(
                f"unknown call {call!r}; choose one of {', '.join(CALLS)}"
            )
        with self._plan_lock:
            self._plans[call].append(_Planned(Fault(fault), skip, times, at))

    def heal(self) -> None:
        """Forget all faults that were not injected yet, and release all calls that hang."""
        with self._plan_lock:
            for plans in self._plans.values():
                plans.clear()
        self.release()

    def release(self) -> None:
        """Let all calls continue that hang now or later."""
        self._released.set()

    def read(self, slot: int, buffers: Sequence[Bytes], slots: int = 1) -> None:
        """As FileSlab.read, with the planned faults; a call for several slots as in `write`."""
        self._each("read", slot, buffers, slots, self._read_slot)

    def write(self, slot: int, buffers: Sequence[Bytes], slots: int = 1) -> None:
        """As FileSlab.write, with the planned faults.

        A call for several slots counts as one for each of them, and ends at the first that fails.
        The faults of those until then are found again by the next call for each.
        """
        self._each("write", slot, buffers, slots, self._write_slot)

    def _each(
        self,
        call: str,
        slot: int,
        buffers: Sequence[Bytes],
        slots: int,
        move: Callable[[int, Sequence[Bytes], _Planned | None], None],
    ) -> None:
        each = len(buffers) // slots
        plans: dict[tuple[str, int], _Planned | None] = {}
        for n in range(slots):
            plan = self._plan_of(call, slot + n)
            plans[call, slot + n] = plan
            try:
                move(slot + n, buffers[n * each : (n + 1) * each], plan)
            except OSError:
                if slots > 1:
                    with self._plan_lock:
                        self._judged.update(plans)
                raise

    def _plan_of(self, call: str, slot: int) -> _Planned | None:
        with self._plan_lock:
            if (call, slot) in self._judged:
                return self._judged.pop((call, slot))
        return self._next(call)

    def _read_slot(
        self, slot: int, buffers: Sequence[Bytes], plan: _Planned | None
    ) -> None:
        self._run(plan, buffers, lambda part: FileSlab.read(self, slot, part))
        if plan is not None and plan.fault is Fault.BIT_FLIP:
            _flip(buffers, plan.at)

    def _write_slot(
        self, slot: int, buffers: Sequence[Bytes], plan: _Planned | None
    ) -> None:
        if plan is not None and plan.fault is Fault.BIT_FLIP:
            buffers = [_copy(buffer) for buffer in buffers]
            _flip(buffers, plan.at)
        self._run(plan, buffers, lambda part: FileSlab.write(self, slot, part))

    def read_headers(self, first: int, count: int) -> list[Bytes]:
        """As FileSlab.read_headers, with the planned faults; the pages of a LOST read are zeros."""
        plan = self._next("read_headers")
        pages = aligned(count * PAGE_BYTES).reshape(-1, PAGE_BYTES)
        pages[:] = 0
        headers = list(pages)

        def read(part: Sequence[Bytes]) -> None:
            for slot, page in enumerate(part, first):
                FileSlab.read(self, slot, [page])

        self._run(plan, headers, read)
        if plan is not None and plan.fault is Fault.BIT_FLIP:
            _flip(headers, plan.at)
        return headers

    def sync(self) -> None:
        """As FileSlab.sync, with the planned faults."""
        self._run(self._next("sync"), [], lambda part: FileSlab.sync(self))

    def _next(self, call: str) -> _Planned | None:
        with self._plan_lock:
            self.calls[call] += 1
            plans = self._plans[call]
            while plans and plans[0].skip == 0 and plans[0].times == 0:
                plans.pop(0)
            if not plans:
                return None
            plan = plans[0]
            if plan.skip:
                plan.skip -= 1
                return None
            plan.times -= 1
            self.struck[plan.fault] += 1
            return plan

    def _run(
        self,
        plan: _Planned | None,
        buffers: Sequence[Bytes],
        move: Callable[[Sequence[Bytes]], None],
    ) -> None:
        fault = plan.fault if plan is not None else None
        if fault is Fault.LOST:
            return
        if fault in (Fault.EIO, Fault.ENOSPC):
            raise self._error(errno.EIO if fault is Fault.EIO else errno.ENOSPC)
        if fault is Fault.TORN:
            move(_first_half(buffers))
            raise self._error(errno.EIO)
        if fault is Fault.DELAY:
            time.sleep(self.delay_seconds)
        if fault is Fault.HANG:
            self.hanging.set()
            self._released.wait(_HANG_SECONDS)
        self._shorten.next = fault is Fault.SHORT
        move(buffers)

    def _error(self, number: int) -> OSError:
        return OSError(
            number, f"{os.strerror(number)} (injected)", str(self.path)
        )

    def _readv(self, views: Sequence[memoryview], offset: int) -> int:
        return super()._readv(self._cut(views), offset)

    def _writev(self, views: Sequence[memoryview], offset: int) -> int:
        return super()._writev(self._cut(views), offset)

    def _cut(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the first half of `views` if this thread's call must be short; whole pages, for
        O_DIRECT.
        """
        if not getattr(self._shorten, "next", False):
            return views
        self._shorten.next = False
        return _first_half(views) or views


def _first_half(buffers: Sequence[_B]) -> list[_B]:
    """Return the first half of all the bytes, in whole pages; nothing of a single page."""
    left = (
        sum(buffer.nbytes for buffer in buffers) // 2 // PAGE_BYTES * PAGE_BYTES
    )
    half: list[_B] = []
    for buffer in buffers:
        if left > 0:
            half.append(buffer[:left])
            left -= half[-1].nbytes
    return half


def _copy(buffer: Bytes) -> Bytes:
    copy = aligned(buffer.nbytes)
    np.copyto(copy, buffer)
    return copy


def _flip(buffers: Sequence[Bytes], at: int | None) -> None:
    """Flip the lowest bit of byte `at`, counted over all the bytes (None: of the middle one)."""
    total = sum(buffer.nbytes for buffer in buffers)
    left = total // 2 if at is None else at
    for buffer in buffers:
        if left < buffer.nbytes:
            buffer[left] ^= 1
            return
        left -= buffer.nbytes
