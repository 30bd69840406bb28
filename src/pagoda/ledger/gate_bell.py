"""Where the processes of a store sleep until the gate is released: a page of shared memory with two
futexes.

Who releases the gate rings, if the page says that somebody sleeps, and the kernel wakes one thread
(futex(2); turns are counted as in Drepper, Futexes Are Tricky, 2011). All of this is a hint: the
lock decides (`locks.Gate`), it is tried again after each sleep, and a sleep has an end. A ring is
lost if the process that should ring is killed, if the one that it woke is stopped, if two ring in
the same moment, or if their pages are not the same one; versions before this file never ring. So a
store learns whether rings are heard: as long as its threads find the gate free although nobody has
rung, their sleeps are short.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import time
from pathlib import Path

from pagoda.ledger.columns import map_or_private

BELL_BYTES = 4096
# the two places to sleep: of the thread that gets the gate next, and of all others
NEXT = 0
OTHERS = 1
_LEAST_SECONDS = 0.5e-3
_MOST_SECONDS = 32e-3
_WAIT = 0
_WAKE = 1
_PLACE_WORDS = 16  # a cache line: the turn, and whether somebody sleeps
_WORD_BYTES = 4
_TURNS = 1 << 32
# the number of the system call futex
_NUMBERS = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
# the ring came before the sleep, a signal came, the time is over
_SLEPT = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_uint32,
    ctypes.c_void_p,
]


class _Seconds(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class GateBell:
    """The bell of one store. Thread-safe; a forked child shares it with its parent.

    Without a `source`, or without memory for it, only this process hears it.
    """

    def __init__(self, source: Path | mmap.mmap | None = None) -> None:
        """Use that page of memory, or map that file; make it if it does not exist."""
        page = map_or_private(source, BELL_BYTES)
        self._words = page.cast("I")
        self._held = ctypes.c_uint32.from_buffer(page)  # keeps the page mapped
        self._address = ctypes.addressof(self._held)
        self._number = _NUMBERS.get(platform.machine())
        # of the next sleep, at most
        self._seconds = _MOST_SECONDS

    def turn(self, place: int) -> int:
        """Say that this thread is about to sleep there, and return what `sleep` needs. Try the lock
        between the two calls.
        """
        # read first: a ring between the two lines takes the word back, and changes the turn
        turn = self._words[place * _PLACE_WORDS]
        self._words[place * _PLACE_WORDS + 1] = 1
        return turn

    def sleep(self, place: int, turn: int, seconds: float) -> bool:
        """Sleep until somebody rings who released the gate after `turn` returned, or a signal
        comes; at most so many seconds. Return whether somebody rang.
        """
        seconds = min(seconds, self._seconds)
        if self._number is not None:
            end = _Seconds(0, int(seconds * 1e9))
            address = self._address + place * _PLACE_WORDS * _WORD_BYTES
            if not _syscall(
                self._number, address, _WAIT, turn, ctypes.byref(end)
            ):
                return True
            number = ctypes.get_errno()
            if number in _SLEPT:
                return number == errno.EAGAIN
        time.sleep(seconds)
        return False

    def learn(self, heard: bool) -> None:
        """Note that the gate was free after a sleep, and whether that was `heard`."""
        if heard:
            self._seconds = min(self._seconds * 2, _MOST_SECONDS)
        else:
            self._seconds = max(self._seconds / 2, _LEAST_SECONDS)

    def ring(self) -> None:
        """Wake the thread that gets the gate next, or else one of the others. Two reads of memory
        if nobody sleeps.
        """
        words = self._words
        if words[1] and self._wake(NEXT):
            return
        if words[_PLACE_WORDS + 1]:
            self._wake(OTHERS)

    def _wake(self, place: int) -> bool:
        """Wake one thread that sleeps there; return whether there was one."""
        words = self._words
        first = place * _PLACE_WORDS
        words[first + 1] = 0
        words[first] = (words[first] + 1) % _TURNS
        if self._number is None:
            return False
        address = self._address + first * _WORD_BYTES
        woken: int = _syscall(self._number, address, _WAKE, 1, None)
        if woken > 0:
            words[first + 1] = 1  # there may be more
        return woken > 0
