"""RESP2, the protocol of Redis, on a connected socket: small answers as values, bulk bytes straight into memory."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from pagoda.tiers.remote.sockets import IDLE_SECONDS, abort, keep_alive

__all__ = ["NUMBER", "Answer", "Denial", "Shape", "Wire", "command", "command_with"]

LINE_BYTES = 8192  # no line of an answer is longer; also the most that is read ahead
STRING_BYTES = 1 << 20  # no string of an answer is longer
_SKIPPED_BYTES = 1 << 29  # no value in Redis is longer: one that nobody wants is read past in bounded time
_BULK_AHEAD_BYTES = (
    12  # the end of one bulk string and the length of the next: all else is left for its destination
)
_COPIED_BYTES = 4096  # strings of so many bytes are read ahead, too
_SLACK_SECONDS = 0.01  # a limit that was set so long ago is good enough
_SKIP_BYTES = 1 << 16
_IOV_MAX = 1024
_TLS_SEND_BYTES = 1 << 18  # between two looks at the clock
_END = b"\r\n"
_LATE = "the deadline passed while the connection was waited for"


class Denial(NamedTuple):
    """An answer that is an error: its first word, and all of it (one printable line, at most 200 characters)."""

    code: str
    text: str


Answer = int | bytes | Denial | list["Answer"] | None


class Shape(NamedTuple):
    """What an answer may be, besides an error. Another one ends the connection before any more of it is read."""

    kinds: bytes
    """The first bytes of what may come, of b":+$*"; nil goes with b"$" and b"*"."""
    longest: int = 64
    """Bytes of a string that are kept; the rest of a longer one is skipped."""
    items: int = 0
    """In all its arrays."""
    depth: int = 0
    """Of arrays in arrays; 0: none."""


NUMBER = Shape(b":")


def command(*words: bytes) -> bytes:
    """The bytes of a command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command_with(*words: bytes | memoryview) -> list[bytes | memoryview]:
    """A command in parts, so that a word that is a memoryview is sent from where it lies."""
    parts: list[bytes | memoryview] = []
    head = b"*%d\r\n" % len(words)
    for word in words:
        if isinstance(word, memoryview):
            parts += [head + b"$%d\r\n" % word.nbytes, word]
            head = _END
        else:
            head += b"$%d\r\n%b\r\n" % (len(word), word)
    return [*parts, head]


class Wire:
    """Sends commands on a connected socket (TCP, unix or TLS) and reads their answers, in order.

    For one thread at a time, but for `abort`. Every call has ended at `until` (time.monotonic()), however slowly the
    peer sends or reads. All trouble is an OSError, and no call works after it: what is still on its way could be taken
    for the answer to something else. What the peer announces is compared with what may come before a byte of it is
    read or a byte of memory is taken for it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)  # the kernel keeps the time, see _limit
        keep_alive(connected)
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)
        self._room = bytearray(LINE_BYTES)
        self._ahead = memoryview(self._room)
        self._start = self._end = 0  # _room[_start:_end] was read ahead
        self._limited = (0.0, 0.0)  # the deadline that the socket has now, and when it was told
        self._items_left = 0  # of the answer that is being read
        self._used = time.monotonic()  # when it was last sent to or received from
        self._owed = 0  # answers that were asked for and not read
        self._failed = False

    def check(self) -> None:
        """Raise OSError if this connection is of no use: it failed, is out of step, or was idle for too long."""
        if self._owed or self._start != self._end:
            self._failed = True
        self._begin()
        if time.monotonic() - self._used > IDLE_SECONDS:
            raise ConnectionError(f"the connection was idle for more than {IDLE_SECONDS} s")
        self._failed = False

    def send(self, parts: Sequence[bytes | memoryview], answers: int, until: float) -> None:
        """Send all parts; so many answers will come."""
        self._begin()
        if self._tls:
            self._send_tls(parts, until)
        else:
            self._send(parts, until)
        self._owed += answers
        self._failed = False

    def answer(self, until: float, shape: Shape = NUMBER) -> Answer:
        """The next answer, which has to be of this shape. An error is a value, too: a Denial."""
        self._begin()
        self._items_left = shape.items
        value = self._value(until, shape, shape.depth)
        self._owed -= 1
        self._failed = False
        return value

    def fill(self, place: memoryview, until: float) -> int | Denial | None:
        """Read the next answer, a string, into `place`; its length. None: it is nil.

        A string that is longer or shorter than `place` is skipped, and `place` is as it was.
        """
        self._begin()
        size = self._fill(place, until)
        self._owed -= 1
        self._failed = False
        return size

    def abort(self) -> None:
        """Let whoever waits in this connection fail soon. From any thread."""
        abort(self._socket)

    def close(self) -> None:
        """Close the connection; never waits. Idempotent."""
        self._failed = True
        self.abort()
        self._socket.close()

    def _begin(self) -> None:
        """A call that does not reach its end leaves a connection that has failed."""
        if self._failed:
            raise ConnectionError("the connection has failed before, or is out of step")
        self._failed = True

    def _value(self, until: float, shape: Shape, depth: int) -> Answer:
        line = self._line(until, LINE_BYTES)
        kind, text = line[:1], line[1:]
        if kind == b"-":
            return _denial(text)
        if kind not in shape.kinds or not kind:
            raise _nonsense(line)
        if kind == b"+":
            return text[: shape.longest]
        number = _number(text)
        if kind == b":":
            return number
        if number == -1 and kind in (b"$", b"*"):
            return None
        if kind == b"$":
            return self._string(_bounded(number, STRING_BYTES), until, shape.longest)
        if kind == b"*" and depth:
            self._items_left -= _bounded(number, self._items_left)
            return [self._value(until, shape, depth - 1) for _ in range(number)]
        raise _nonsense(line)

    def _string(self, size: int, until: float, longest: int) -> bytes:
        kept = bytearray(min(size, longest))
        self._read(memoryview(kept), until)
        self._skip(size - len(kept), until)
        self._line_end(until)
        return bytes(kept)

    def _fill(self, place: memoryview, until: float) -> int | Denial | None:
        ahead = _BULK_AHEAD_BYTES
        if place.nbytes <= _COPIED_BYTES:  # two waits less are worth a copy of a page
            ahead += len(b"$%d\r\n" % place.nbytes) + place.nbytes
        line = self._line(until, ahead)
        if line[:1] == b"-":
            return _denial(line[1:])
        if line[:1] != b"$":
            raise _nonsense(line)
        size = _number(line[1:])
        if size == -1:
            return None
        if size == place.nbytes:
            self._read(place, until)
        else:
            self._skip(_bounded(size, _SKIPPED_BYTES), until)
        self._line_end(until)
        return size

    def _line(self, until: float, ahead: int) -> bytes:
        while (end := self._room.find(_END, self._start, self._end)) < 0:
            self._more(until, ahead)
        line = bytes(self._ahead[self._start : end])
        self._start = end + len(_END)
        return line

    def _line_end(self, until: float) -> None:
        while self._end - self._start < len(_END):
            self._more(until, _BULK_AHEAD_BYTES)
        if (end := bytes(self._ahead[self._start : self._start + len(_END)])) != _END:
            raise _nonsense(end)
        self._start += len(_END)

    def _more(self, until: float, ahead: int) -> None:
        """Read what has come, at most `ahead` bytes, behind what was read ahead before."""
        left = self._end - self._start
        if left == LINE_BYTES:
            raise _nonsense(b"a line without end")
        if not left or self._end == LINE_BYTES:
            self._room[:left] = self._room[self._start : self._end]
            self._start, self._end = 0, left
        until_byte = min(LINE_BYTES, self._end + ahead)
        self._end += self._receive(self._ahead[self._end : until_byte], until, whole=False)

    def _read(self, place: memoryview, until: float) -> None:
        done = min(place.nbytes, self._end - self._start)
        place[:done] = self._ahead[self._start : self._start + done]
        self._start += done
        while done < place.nbytes:
            done += self._receive(place[done:], until, whole=True)

    def _skip(self, size: int, until: float) -> None:
        scratch = memoryview(bytearray(min(size, _SKIP_BYTES)))
        while size:
            self._read(scratch[:size], until)
            size -= min(size, scratch.nbytes)

    def _receive(self, place: memoryview, until: float, whole: bool) -> int:
        self._limit(until)
        try:
            # all of it in one call: the interpreter is not needed again for each of the kernel's small helpings
            flags = socket.MSG_WAITALL if whole and not self._tls else 0
            got = self._socket.recv_into(place, 0, flags)
        except BlockingIOError:
            raise TimeoutError(_LATE) from None
        if not got:
            raise ConnectionError("the peer closed the connection")
        return got

    def _send(self, parts: Sequence[bytes | memoryview], until: float) -> None:
        views = [memoryview(part) for part in parts]
        first = 0
        # on a unix socket the limit of a send that waits is one for each of its small helpings
        flags = socket.MSG_DONTWAIT if self._socket.family == socket.AF_UNIX else 0
        while first < len(views):
            left = _left(until)
            self._used = until - left
            self._set_limit(socket.SO_SNDTIMEO, left)
            try:
                sent = self._socket.sendmsg(views[first : first + _IOV_MAX], [], flags)
            except BlockingIOError:
                self._await_room(until)
                continue
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _send_tls(self, parts: Sequence[bytes | memoryview], until: float) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                self._limit(until)
                view = view[self._socket.send(view[:_TLS_SEND_BYTES]) :]

    def _await_room(self, until: float) -> None:
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        ready.poll(_left(until) * 1000)

    def _limit(self, until: float) -> None:
        """Let the next receive end at `until` (TLS: send, too). Linux takes all waits within one call off its limit."""
        left = _left(until)
        self._used = now = until - left
        if self._limited[0] == until and now - self._limited[1] < _SLACK_SECONDS:
            return
        self._limited = (until, now)
        if self._tls:
            self._socket.settimeout(left)
        else:
            self._set_limit(socket.SO_RCVTIMEO, left)

    def _set_limit(self, option: int, left: float) -> None:
        limit = struct.pack("ll", *divmod(int(left * 1e6) + 1, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(_LATE)
    return left


def _number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise _nonsense(text)
    return int(text)


def _bounded(number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise _nonsense(b"%d" % number)
    return number


def _denial(text: bytes) -> Denial:
    said = "".join(char if char.isprintable() else "?" for char in text[:200].decode(errors="replace"))
    return Denial(said.split(" ", 1)[0], said)


def _nonsense(found: bytes) -> ConnectionError:
    return ConnectionError(f"the peer does not speak RESP2 as expected: {found[:40]!r}")
