"""RESP2, the protocol of Redis, on a connected socket: small replies as values, bulk bytes directly
into memory.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from pagoda.tiers.remote.socket_keepalive import (
    IDLE_SECONDS,
    LATE,
    keep_alive,
    seconds_left,
)

# no line of a reply is longer; also the limit of what is read ahead
LINE_BYTES = 8192
STRING_BYTES = 1 << 20  # no string of a reply is longer
# no value in Redis is longer: an unwanted one is skipped in bounded time
_SKIPPED_BYTES = 1 << 29
# the end of one bulk string and the length of the next: the rest is read into its destination
_BULK_AHEAD_BYTES = 12
_COPIED_BYTES = 4096  # strings up to this size are read ahead too
_SLACK_SECONDS = 0.01  # a timeout that was set less than this ago is exact enough
_SKIP_BYTES = 1 << 16
_IOV_MAX = 1024
_TLS_SEND_BYTES = 1 << 18  # bytes sent between two checks of the deadline
_END = b"\r\n"
_BIT_BYTES = 4  # of the replies `:0` and `:1`


class ErrorReply(NamedTuple):
    """A reply that is an error: its first word, and its text (one printable line, at most 200
    characters).
    """

    code: str
    text: str


Reply = int | bytes | ErrorReply | list["Reply"] | None


class ReplyShape(NamedTuple):
    """The permitted form of a reply, besides an error. Any other reply closes the connection before
    it is read on.
    """

    kinds: bytes
    """The permitted first bytes, of b":+$*"; nil is permitted with b"$" and b"*"."""
    longest: int = 64
    """How many bytes of a string are kept; the rest of a longer one is skipped."""
    items: int = 0
    """How many items all its arrays may have together."""
    depth: int = 0
    """How deep arrays may be nested; 0: no arrays."""


NUMBER = ReplyShape(b":")


def command(*words: bytes) -> bytes:
    """Return the bytes of a command."""
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word), word) for word in words
    )


def command_parts(*words: bytes | memoryview) -> list[bytes | memoryview]:
    """Return a command in parts, so that a word that is a memoryview is sent without a copy."""
    parts: list[bytes | memoryview] = []
    head = b"*%d\r\n" % len(words)
    for word in words:
        if isinstance(word, memoryview):
            parts += [head + b"$%d\r\n" % word.nbytes, word]
            head = _END
        else:
            head += b"$%d\r\n%b\r\n" % (len(word), word)
    return [*parts, head]


class RespConnection:
    """Sends commands on a connected socket (TCP, unix or TLS) and reads their replies, in order.

    For one thread at a time. Every call ends by `until` (time.monotonic()), however slowly the
    server sends or reads. All failures are OSErrors, and no call works after one: bytes still in
    transit could be taken for the reply to another command. An announced size is checked against
    the permitted one before a byte of it is read or memory is allocated for it.
    """

    def __init__(self, connected: socket.socket) -> None:
        # the kernel enforces the deadline, see _set_deadline
        connected.settimeout(None)
        keep_alive(connected)
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)
        self._buffer = bytearray(LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # _room[_start:_end] was read ahead
        # the deadline that the socket has now, and when it was set
        self._deadline_set = (0.0, 0.0)
        self._items_left = 0  # items left in the reply that is being read
        self._used = time.monotonic()  # when it was last sent to or received from
        self._unread_replies = 0  # replies that are expected but not read
        self._failed = False

    def check_usable(self) -> None:
        """Raise OSError if this connection cannot be used: it failed, has unread replies, or was
        idle for too long.
        """
        if self._unread_replies or self._start != self._end:
            self._failed = True
        self._start_call()
        if time.monotonic() - self._used > IDLE_SECONDS:
            raise ConnectionError(
                f"the connection was idle for more than {IDLE_SECONDS} s"
            )
        self._failed = False

    def send(
        self, parts: Sequence[bytes | memoryview], answers: int, until: float
    ) -> None:
        """Send all parts, which will have `answers` replies."""
        self._start_call()
        if self._tls:
            self._send_tls(parts, until)
        else:
            self._send(parts, until)
        self._unread_replies += answers
        self._failed = False

    def send_commands(self, commands: Sequence[bytes], until: float) -> None:
        """Send whole commands together; each will have one reply."""
        self.send([b"".join(commands)], len(commands), until)

    def read_reply(self, until: float, shape: ReplyShape = NUMBER) -> Reply:
        """Return the next reply, which must have this shape. An error reply is a value too: an
        ErrorReply.
        """
        self._start_call()
        self._items_left = shape.items
        value = self._read_value(until, shape, shape.depth)
        self._unread_replies -= 1
        self._failed = False
        return value

    def read_bits(self, count: int, until: float) -> list[bool] | ErrorReply:
        """Return whether each of the next `count` replies is the number 1; the first error reply
        instead, if any.

        Replies to EXISTS of one name, many at once: each is four bytes, so they are not parsed one
        by one.
        """
        self._start_call()
        bits: list[bool] = []
        error: ErrorReply | None = None
        while len(bits) < count:
            found = self._bits_read_ahead(count - len(bits))
            if found:
                bits += found
                continue
            if self._end - self._start < _BIT_BYTES:
                self._read_more(until, LINE_BYTES)
                continue
            value = self._read_value(until, NUMBER, 0)  # not the usual four bytes
            bits.append(value == 1)
            if error is None and isinstance(value, ErrorReply):
                error = value
        self._unread_replies -= count
        self._failed = False
        return bits if error is None else error

    def _bits_read_ahead(self, most: int) -> list[bool]:
        """Take those of the next replies that were read ahead and are `:0` or `:1`."""
        number = min(most, (self._end - self._start) // _BIT_BYTES)
        replies = bytes(
            self._view[self._start : self._start + number * _BIT_BYTES]
        )
        digits = replies[1::_BIT_BYTES]
        is_usual = (
            replies[0::_BIT_BYTES] == b":" * number
            and not digits.strip(b"01")
            and replies[2::_BIT_BYTES] == b"\r" * number
            and replies[3::_BIT_BYTES] == b"\n" * number
        )
        if not is_usual:
            return []
        self._start += len(replies)
        return [digit == ord("1") for digit in digits]

    def read_into(
        self, destination: memoryview, until: float
    ) -> int | ErrorReply | None:
        """Read the next reply, a string, into `destination`; return its length. None: it is nil.

        A string that is longer or shorter than `destination` is skipped, and `destination` stays
        unchanged.
        """
        self._start_call()
        size = self._read_into(destination, until)
        self._unread_replies -= 1
        self._failed = False
        return size

    def _start_call(self) -> None:
        """Mark the connection as failed until the call reaches its end."""
        if self._failed:
            raise ConnectionError(
                "the connection failed earlier, or is out of step"
            )
        self._failed = True

    def _read_value(self, until: float, shape: ReplyShape, depth: int) -> Reply:
        line = self._read_line(until, LINE_BYTES)
        kind = line[:1]
        text = line[1:]
        if kind == b"-":
            return _error_reply(text)
        if kind not in shape.kinds or not kind:
            raise _protocol_error(line)
        if kind == b"+":
            return text[: shape.longest]
        number = _parse_number(text)
        if kind == b":":
            return number
        if number == -1 and kind in (b"$", b"*"):
            return None
        if kind == b"$":
            return self._read_string(
                _check_bounds(number, STRING_BYTES), until, shape.longest
            )
        if kind == b"*" and depth:
            self._items_left -= _check_bounds(number, self._items_left)
            return [
                self._read_value(until, shape, depth - 1) for _ in range(number)
            ]
        raise _protocol_error(line)

    def _read_string(self, size: int, until: float, longest: int) -> bytes:
        kept = bytearray(min(size, longest))
        self._read(memoryview(kept), until)
        self._skip(size - len(kept), until)
        self._read_line_end(until)
        return bytes(kept)

    def _read_into(
        self, destination: memoryview, until: float
    ) -> int | ErrorReply | None:
        ahead = _BULK_AHEAD_BYTES
        # saving two waits is worth the copy of a page
        if destination.nbytes <= _COPIED_BYTES:
            ahead += len(b"$%d\r\n" % destination.nbytes) + destination.nbytes
        line = self._read_line(until, ahead)
        if line[:1] == b"-":
            return _error_reply(line[1:])
        if line[:1] != b"$":
            raise _protocol_error(line)
        size = _parse_number(line[1:])
        if size == -1:
            return None
        if size == destination.nbytes:
            self._read(destination, until)
        else:
            self._skip(_check_bounds(size, _SKIPPED_BYTES), until)
        self._read_line_end(until)
        return size

    def _read_line(self, until: float, ahead: int) -> bytes:
        while (end := self._buffer.find(_END, self._start, self._end)) < 0:
            self._read_more(until, ahead)
        line = bytes(self._view[self._start : end])
        self._start = end + len(_END)
        return line

    def _read_line_end(self, until: float) -> None:
        while self._end - self._start < len(_END):
            self._read_more(until, _BULK_AHEAD_BYTES)
        if (
            end := bytes(self._view[self._start : self._start + len(_END)])
        ) != _END:
            raise _protocol_error(end)
        self._start += len(_END)

    def _read_more(self, until: float, ahead: int) -> None:
        """Read what has arrived, at most `ahead` bytes, behind the bytes that were read ahead
        before.
        """
        left = self._end - self._start
        if left == LINE_BYTES:
            raise _protocol_error(b"a line without end")
        if not left or self._end == LINE_BYTES:
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start = 0
            self._end = left
        until_byte = min(LINE_BYTES, self._end + ahead)
        self._end += self._receive(
            self._view[self._end : until_byte], until, whole=False
        )

    def _read(self, destination: memoryview, until: float) -> None:
        done = min(destination.nbytes, self._end - self._start)
        destination[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < destination.nbytes:
            done += self._receive(destination[done:], until, whole=True)

    def _skip(self, size: int, until: float) -> None:
        scratch = memoryview(bytearray(min(size, _SKIP_BYTES)))
        while size:
            self._read(scratch[:size], until)
            size -= min(size, scratch.nbytes)

    def _receive(self, destination: memoryview, until: float, whole: bool) -> int:
        self._set_deadline(until)
        try:
            # receive all in one call, so that the interpreter is not needed for each small part
            # from the kernel
            flags = socket.MSG_WAITALL if whole and not self._tls else 0
            got = self._socket.recv_into(destination, 0, flags)
        except BlockingIOError:
            raise TimeoutError(LATE) from None
        if not got:
            raise ConnectionError("the server closed the connection")
        return got

    def _send(self, parts: Sequence[bytes | memoryview], until: float) -> None:
        views = [memoryview(part) for part in parts]
        first = 0
        # on a unix socket the timeout of a blocking send applies to each of its small parts
        flags = (
            socket.MSG_DONTWAIT if self._socket.family == socket.AF_UNIX else 0
        )
        while first < len(views):
            left = seconds_left(until)
            self._used = until - left
            self._set_socket_timeout(socket.SO_SNDTIMEO, left)
            try:
                sent = self._socket.sendmsg(
                    views[first : first + _IOV_MAX], [], flags
                )
            except BlockingIOError:
                self._wait_writable(until)
                continue
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _send_tls(
        self, parts: Sequence[bytes | memoryview], until: float
    ) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                self._set_deadline(until)
                view = view[self._socket.send(view[:_TLS_SEND_BYTES]) :]

    def _wait_writable(self, until: float) -> None:
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        ready.poll(seconds_left(until) * 1000)

    def _set_deadline(self, until: float) -> None:
        """Make the next receive (TLS: also send) end at `until`. Linux counts all waits of one call
        together.
        """
        left = seconds_left(until)
        self._used = now = until - left
        if (
            self._deadline_set[0] == until
            and now - self._deadline_set[1] < _SLACK_SECONDS
        ):
            return
        self._deadline_set = (until, now)
        if self._tls:
            self._socket.settimeout(left)
        else:
            self._set_socket_timeout(socket.SO_RCVTIMEO, left)

    def _set_socket_timeout(self, option: int, left: float) -> None:
        limit = struct.pack("ll", *divmod(int(left * 1e6) + 1, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


def _parse_number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise _protocol_error(text)
    return int(text)


def _check_bounds(number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise _protocol_error(b"%d" % number)
    return number


def _error_reply(text: bytes) -> ErrorReply:
    said = "".join(
        char if char.isprintable() else "?"
        for char in text[:200].decode(errors="replace")
    )
    return ErrorReply(said.split(" ", 1)[0], said)


def _protocol_error(found: bytes) -> ConnectionError:
    return ConnectionError(
        f"the server sent what is not the expected RESP2: {found[:40]!r}"
    )
