"""A view that is drawn again and again in the terminal, and the keys that are typed meanwhile: for
`top`, and `stats --watch`.

The terminal is in order afterwards, however the command ends. There is no second screen, and the
cursor stays visible, so a killed process leaves neither behind. To get single keys, the terminal
stops collecting lines and echoing: a small process waits for the end of this one, whatever its
cause, and undoes that.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LOCAL = 3  # the place of the local modes in what termios returns
_CHARACTERS = 6  # that of the control characters
_MOST_FILES = 65536
_LOOK_SECONDS = 0.25  # how often the size of the terminal is looked at
_HOME = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END_OF_SCREEN = "\x1b[J"
_ALL = "\x1b[2J"


class Key(StrEnum):
    """The keys that mean something."""

    QUIT = "q"
    HELP = "h"
    UP = "up"
    DOWN = "down"
    LEFT = "left"
    RIGHT = "right"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    RESIZED = "resized"
    """No key: the terminal has another size now."""


_KEYS = {
    "q": Key.QUIT,
    "Q": Key.QUIT,
    "h": Key.HELP,
    "H": Key.HELP,
    "?": Key.HELP,
    "k": Key.UP,
    "j": Key.DOWN,
    " ": Key.PAGE_DOWN,
    "\t": Key.RIGHT,
    "\x04": Key.QUIT,
    "\x1b[A": Key.UP,
    "\x1bOA": Key.UP,
    "\x1b[B": Key.DOWN,
    "\x1bOB": Key.DOWN,
    "\x1b[C": Key.RIGHT,
    "\x1bOC": Key.RIGHT,
    "\x1b[D": Key.LEFT,
    "\x1bOD": Key.LEFT,
    "\x1b[5~": Key.PAGE_UP,
    "\x1b[6~": Key.PAGE_DOWN,
}
_LONGEST = max(map(len, _KEYS))


def keys_in(text: str) -> list[Key]:
    """Return the keys in what a terminal sent; leaves out all others. Pure."""
    found = []
    at = 0
    while at < len(text):
        for length in range(_LONGEST, 0, -1):
            key = _KEYS.get(text[at : at + length])
            if key is not None:
                found.append(key)
                break
        else:
            length = 1
        at += length
    return found


class LiveScreen:
    """Draws lines from the top of the terminal on, and reads keys. A context; for one thread.

    Args:
        out: a console on a terminal that can move its cursor.
    """

    def __init__(self, out: Console) -> None:
        self._out = out
        self._keyboard = _Keyboard.of_terminal()
        self._size = (0, 0)
        self._waiting: list[Key] = []

    def __enter__(self) -> Self:
        """Scroll what is on the screen away, so that it is still there above the view."""
        self._write("\n" * (self._size_now()[1] - 1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last view on the screen, and give the keyboard back."""
        if self._keyboard is not None:
            self._keyboard.close()

    @property
    def has_keys(self) -> bool:
        """Whether keys are read: not if stdin is no terminal, or this runs in the background."""
        return self._keyboard is not None

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._size_now()[0]

    @property
    def height(self) -> int:
        """Lines that can be drawn; the cursor is on the one below."""
        return max(1, self._size_now()[1] - 1)

    def draw(self, lines: Sequence[Text]) -> None:
        """Draw these lines, as many as fit, each cut at the width of the terminal."""
        size = self._size_now()
        self._out.width, self._out.height = size
        with self._out.capture() as drawn:
            for line in lines[: max(1, size[1] - 1)]:
                line.truncate(size[0])
                self._out.print(line, end="\n", soft_wrap=True)
        begin = _HOME if size == self._size else _ALL + _HOME
        self._size = size
        # before the text: after a full line the cursor still is on its last letter
        text = "".join(
            _TO_END_OF_LINE + line for line in drawn.get().splitlines(True)
        )
        self._write(begin + text + _TO_END_OF_SCREEN)

    def wait(self, until: float) -> Key | None:
        """Return the next key, or that the size has changed; None at `until` (time.monotonic())."""
        while not self._waiting:
            seconds = until - time.monotonic()
            if self._size_now() != self._size:
                return Key.RESIZED
            if seconds <= 0:
                return None
            pause = min(seconds, _LOOK_SECONDS)
            if self._keyboard is None:
                time.sleep(pause)
            else:
                self._waiting = self._keyboard.read(pause)
                if self._keyboard.is_lost:
                    self._keyboard = None
        return self._waiting.pop(0)

    def _size_now(self) -> tuple[int, int]:
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self._out.file.fileno())
            if size.columns and size.lines:
                return size.columns, size.lines
        return 80, 24

    def _write(self, text: str) -> None:
        self._out.file.write(text)
        self._out.file.flush()


class _Keyboard:
    """The keys of the terminal that is stdin, one by one, without echo."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._before = termios.tcgetattr(terminal)
        self.is_lost = False
        single = termios.tcgetattr(terminal)
        single[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
        single[_CHARACTERS][termios.VMIN] = 1
        single[_CHARACTERS][termios.VTIME] = 0
        self._single = single
        self._guard, self._guard_pid = self._guarded()
        self._take()

    @classmethod
    def of_terminal(cls) -> _Keyboard | None:
        """Return the keyboard; None if there is none, or another program has it."""
        try:
            terminal = sys.stdin.fileno()
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return None
            return cls(terminal)
        except (OSError, ValueError, AttributeError, termios.error):
            return None

    def read(self, seconds: float) -> list[Key]:
        """Return the keys that were typed within this time."""
        self._take()
        try:
            if not select.select([self._terminal], [], [], seconds)[0]:
                return []
            typed = os.read(self._terminal, 1024)
        except OSError:
            typed = b""
        # the terminal is gone: its end would be read again and again
        self.is_lost = not typed
        return keys_in(typed.decode("latin-1"))

    def close(self) -> None:
        """Give the terminal back as it was."""
        with suppress(termios.error):
            if termios.tcgetattr(self._terminal) == self._single:
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
        os.close(self._guard)
        with suppress(ChildProcessError):
            os.waitpid(self._guard_pid, 0)

    def _take(self) -> None:
        """Get single keys, at the start and after the process was stopped and continued."""
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(self._terminal) != os.getpgrp():
                return
            if termios.tcgetattr(self._terminal) != self._single:
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._single)
                self._single = termios.tcgetattr(self._terminal)

    def _guarded(self) -> tuple[int, int]:
        """Start the process that gives the terminal back if this one is killed; return the pipe
        whose end it waits for, and its pid.
        """
        ending, end = os.pipe()
        pid = os.fork()
        if pid:
            os.close(ending)
            return end, pid
        try:
            os.setsid()  # the keys that interrupt a program do not reach it
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.dup2(self._terminal, 0)
            os.dup2(ending, 1)
            os.closerange(2, _MOST_FILES)
            os.read(1, 1)
            # a shell that has taken the terminal already knows better
            if _takes_single_keys(termios.tcgetattr(0), self._single):
                termios.tcsetattr(0, termios.TCSANOW, self._before)
        finally:
            os._exit(0)


def _takes_single_keys(now: list[object], ours: list[object]) -> bool:
    """Return whether the terminal is in the state that this program gives it: by its modes."""
    return now[: _LOCAL + 1] == ours[: _LOCAL + 1]
