"""Recording live traffic as a trace that `pagoda replay` reads: hashed ids and lengths, no text and
no tokens.

An id is the first eight bytes of a chunk's key without one bit, so it is the same in every process
and after a restart.

A trace has one line per request. A request consists of several calls: it is looked up (often more
than once), retrieved, and stored piece by piece. It is recorded at its first call, by the keys of
its prompt:

    read        A counted lookup or retrieve, or a request that the engine reports (`REQUEST`).
                Another lookup of the
    same
                prompt before it is retrieved or stored is the same request (polling), and so is the
                retrieve of a prompt that was looked up. Uncounted calls are parts of a request that
                is counted elsewhere.
    store       Part of the request whose prompt it stores or continues; without such a request, a
                new one. Stores of a growing prompt are one request. Stores of an engine that
                reserves slots itself begin a request only until the engine is seen to read.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from pagoda.base.clock import Clock
from pagoda.base.errors import ConfigError
from pagoda.base.fork import reset_now_and_in_child
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import DeferredCall
from pagoda.cache.append_lines import append_lines

log = guarded_logger("pagoda.cache")

_MOST_CALLS = 4096  # calls that wait for the thread
_MOST_KEYS = 1 << 20  # keys of those calls
_PAUSE_SECONDS = 0.1  # between two rounds of the thread
_LOG_SECONDS = 60.0
_ID_MASK = (1 << 63) - 1  # ids are signed 64-bit integers

# the longest time between two calls of one request, except its stores
_SAME_MS = 10_000
# a request is stored within this time: an answer may take long
_STORED_MS = 600_000
# a request is written after this time, whether its answer was noted or not
_ANSWERED_MS = 600_000
_MOST_REQUESTS = 512  # the number of requests that are remembered
_ID = 8  # the bytes of a key that distinguish it from others


_HEAD_BYTES = 64 << 10  # of a file that is looked at to see whether it is a trace
_TAIL_BYTES = 64 << 10
_NUMBERS = re.compile(rb"[0-9][0-9.e+]*(,[0-9]+)*,?")
_WRITTEN = b'{"timestamp":0"input_length":0"output_length":0"hash_ids":[0],"chunk_tokens":0}'
_IDS = b'0],"chunk_tokens":0}'
# what was said of a request, at the end of its line
_SAID = re.compile(rb',"?$|,"[sdr].*$', re.DOTALL)


def require_trace(path: Path) -> tuple[int, int] | None:
    """Refuse a file that has other content than a trace, also through a link; return which file it
    is. Changes nothing.

    Recording appends lines and cuts off an unfinished last one, which a killed process left. A file
    that is empty, is no regular file, does not exist or cannot be read is not refused: nothing can
    be lost there.

    Raises:
        ConfigError: its first line is no request, or its last line is unfinished and was not
            written by a recorder.
    """
    try:
        with open(
            path,
            "rb",
            opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
        ) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size:
                head = file.read(_HEAD_BYTES)
                file.seek(max(0, status.st_size - _TAIL_BYTES))
                if not _is_trace(head, file.read()):
                    raise ConfigError(
                        f"record = {str(path)!r}: this file has other content than a trace of "
                        "requests, so nothing is "
                        "written to it; name a new file"
                    )
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_trace(head: bytes, tail: bytes) -> bool:
    """Return whether this is how a trace begins and ends; either may be the whole file."""
    import msgspec

    from pagoda.cache.request_trace import Request

    first, end, _ = head.partition(b"\n")
    if end:
        try:
            msgspec.json.decode(first, type=Request)
        except ValueError:
            return False
    elif not _is_written(first):
        return False
    _, end, last = tail.rpartition(b"\n")
    if end or len(tail) < _TAIL_BYTES:
        return _is_written(last)
    # the tail is within the ids of a long line
    last = _SAID.sub(b"", last.lstrip(b","))
    return _IDS.startswith(_NUMBERS.sub(b"0", last))


def _is_written(fragment: bytes) -> bool:
    """Return whether this is how a line begins that a recorder wrote."""
    fragment = _SAID.sub(b"", fragment)
    return _WRITTEN.startswith(_NUMBERS.sub(b"0", fragment))


class CallKind(Enum):
    """What an engine did."""

    LOOKUP = auto()
    RETRIEVE = auto()
    STORE = auto()
    RESERVE = auto()  # it reserved slots to store into
    REQUEST = auto()  # the engine itself reports a request
    ANSWER = auto()  # it said how a request ended


class SaidOfRequest(NamedTuple):
    """What a caller said of a request, as its line has it; empty: nothing. `results`: what became
    of it.
    """

    session: str = ""
    agent: str = ""
    stop: str = ""
    last: bool = False
    drop: bool = False
    retain_seconds: float = 0.0
    results: str = ""


class RecordedCall(NamedTuple):
    """One call about the chunks of a prompt from number `first` on."""

    kind: CallKind
    counted: bool
    keys: Sequence[bytes]
    first: int
    num_tokens: int  # tokens of the whole prompt
    at_ms: int
    parent: bytes | None = None  # the key before the first
    said: SaidOfRequest | None = None  # what the caller said of the request


class Recorder:
    """Writes one line per request, on a daemon thread that starts with the first call, and again
    after a fork.

    Thread-safe. Never raises, and waits only in `close`: calls that are too many, or that cannot be
    written, are dropped and counted.
    """

    def __init__(self, path: Path, chunk_tokens: int, clock: Clock) -> None:
        self.path = path
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        # imported only if something is recorded; not on the thread, where it may take longer than
        # `close` waits
        import pagoda.cache.request_trace  # noqa: F401

        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Create the lock and an empty queue; the parent writes the calls that it noted before a
        fork.
        """
        self._lock = threading.Lock()
        self._log_lines = RateLimitedLog(self._clock, _LOG_SECONDS)
        self._calls: deque[RecordedCall] = deque()
        self._keys = 0  # keys of the calls in the queue
        self._detector = RequestDetector()
        self._waiting: deque[_WaitingLine] = deque()
        self._closed = False
        self._writer = DeferredCall(self._write, "pagoda-record", _PAUSE_SECONDS)
        self._recorded = self._dropped = 0
        # the file that is known to be a trace
        self._file: tuple[int, int] | None = None
        # dropped since the last round, because there were too many
        self._too_many = 0

    def note(
        self,
        kind: CallKind,
        keys: Sequence[bytes],
        first: int,
        num_tokens: int,
        *,
        counted: bool = True,
        parent: bytes | None = None,
        said: SaidOfRequest | None = None,
    ) -> None:
        """Note a call about the chunks of a prompt of `num_tokens` tokens from number `first`
        on. A request of which something is said is written when its answer has been noted.
        """
        call = RecordedCall(
            kind,
            counted,
            keys,
            first,
            num_tokens,
            round(self._clock.time() * 1000),
            parent,
            said,
        )
        with self._lock:
            if self._closed:
                return
            if (
                len(self._calls) >= _MOST_CALLS
                or self._keys + len(keys) > _MOST_KEYS
            ):
                self._dropped += 1
                self._too_many += 1
                return
            self._calls.append(call)
            self._keys += len(keys)
            self._writer.request()

    def note_answer(
        self, keys: Sequence[bytes], first: int, said: SaidOfRequest
    ) -> None:
        """Note what was said of a request at its end."""
        self.note(CallKind.ANSWER, keys, first, 0, said=said)

    def stats(self) -> dict[str, object]:
        """Return the path, and how many requests this process recorded and how many calls it
        dropped.
        """
        return {
            "path": str(self.path),
            "requests": self._recorded,
            "dropped": self._dropped,
        }

    def close(self, timeout: float = 1.0) -> None:
        """Write the noted calls within `timeout` seconds, and end the thread; log it if some are
        left. Idempotent.
        """
        with self._lock:
            self._closed = True
        if not self._writer.close(timeout):
            text = (
                f"the last requests may not be recorded: writing {self.path} took more than "
                f"{timeout:g} s"
            )
            self._log_lines.warn(log, Reason.DEADLINE, text)

    def _write(self) -> None:
        """Write the requests among the noted calls; the thread survives every error."""
        with self._lock:
            calls = self._calls
            self._calls = deque()
            self._keys = 0
            too_many = self._too_many
            self._too_many = 0
        lines = list[bytes]()
        written = 0
        failure: Exception | None = None
        try:
            for call in calls:
                if call.kind is CallKind.ANSWER:
                    self._complete(call)
                elif self._detector.is_request(call):
                    self._waiting.append(_WaitingLine(call))
            lines = self._due_lines()
            if lines:
                self._check_file()
                written, failure = append_lines(self.path, lines)
        except Exception as error:  # noqa: BLE001
            # a boundary: an engine must not notice
            failure = error
        if failure is not None:
            self._log_lines.warn(
                log,
                Reason.IO_ERROR,
                f"requests are not recorded in {self.path}: {failure}",
            )
        with self._lock:
            self._recorded += written
            self._dropped += len(lines) - written
        if too_many:
            text = f"{too_many} calls are not recorded: they were too many"
            self._log_lines.warn(log, Reason.QUEUE_FULL, text)

    def _complete(self, answer: RecordedCall) -> None:
        """Add what was said at the end of a request to its line, if that still waits."""
        for line in reversed(self._waiting):
            if not line.is_complete and line.is_of(answer):
                line.said = answer.said
                line.is_complete = True
                return

    def _due_lines(self) -> list[bytes]:
        """Take the lines that wait for no answer, in the order of their times."""
        lines: list[bytes] = []
        now = round(self._clock.time() * 1000)
        while self._waiting:
            first = self._waiting[0]
            late = now - first.call.at_ms > _ANSWERED_MS
            many = len(self._waiting) > _MOST_REQUESTS
            if not (first.is_complete or late or many or self._closed):
                break
            self._waiting.popleft()
            lines.append(self._line(first))
        return lines

    def _check_file(self) -> None:
        """Refuse a file that took the place of the trace and is none. ConfigError."""
        try:
            status = os.stat(self.path)
        except OSError:
            return
        if self._file != (status.st_dev, status.st_ino):
            self._file = require_trace(self.path)

    def _line(self, waiting: _WaitingLine) -> bytes:
        from msgspec import UNSET

        from pagoda.cache.request_trace import Request, format_request

        call = waiting.call
        said = waiting.said or SaidOfRequest()
        ids = tuple(
            [int.from_bytes(key[:8], "little") & _ID_MASK for key in call.keys]
        )
        request = Request(
            float(call.at_ms),
            call.num_tokens,
            0,
            ids,
            self._chunk_tokens,
            session=said.session or UNSET,
            stop=said.stop or UNSET,
            last=said.last or UNSET,
            agent=said.agent or UNSET,
            drop=said.drop or UNSET,
            retain_seconds=said.retain_seconds or UNSET,
            said_hints=said.results or UNSET,
        )
        return format_request(request).encode() + b"\n"


class _WaitingLine:
    """A request that is to be written, when what was said of it is known."""

    def __init__(self, call: RecordedCall) -> None:
        self.call = call
        self.said = call.said
        self.is_complete = call.said is None

    def is_of(self, answer: RecordedCall) -> bool:
        """Whether the answer is that of this request: of one session, and one prompt continues the
        other.
        """
        said = answer.said
        mine = self.said
        if said is None or mine is None:
            return False
        same = (said.session, said.agent) == (mine.session, mine.agent)
        return same and _KnownRequest(self.call).is_related(answer)


class RequestDetector:
    """Decides which calls begin a new request; other calls are parts of a known request. Used by
    one thread.
    """

    def __init__(self) -> None:
        self._known: deque[_KnownRequest] = deque(maxlen=_MOST_REQUESTS)
        self._reads = False

    def is_request(self, call: RecordedCall) -> bool:
        """Whether this call is the first of a request that is to be recorded; remembers the
        request.
        """
        if not call.keys:
            return False
        match call.kind:
            case CallKind.REQUEST:
                begins = True
            case CallKind.LOOKUP:
                begins = call.counted and not self._polled(call)
            case CallKind.RETRIEVE:
                begins = not self._was_looked_up(call) and call.counted
            case CallKind.ANSWER:
                return False
            case CallKind.STORE | CallKind.RESERVE:
                return self._begins_with_store(call)
        self._reads |= begins
        if begins:
            self._known.append(_KnownRequest(call))
        return begins

    def _polled(self, call: RecordedCall) -> bool:
        end = call.first + len(call.keys)
        return self._looked_up(call, lambda known: known.end == end) is not None

    def _was_looked_up(self, call: RecordedCall) -> bool:
        end = call.first + len(call.keys)
        known = self._looked_up(call, lambda known: known.end >= end)
        if known is not None:
            known.looked_up = False
        return known is not None

    def _looked_up(
        self, call: RecordedCall, fits: Callable[[_KnownRequest], bool]
    ) -> _KnownRequest | None:
        for known in reversed(self._known):
            if (
                call.at_ms - known.last_ms <= _SAME_MS
                and known.looked_up
                and fits(known)
                and known.is_related(call)
            ):
                known.last_ms = call.at_ms
                return known
        return None

    def _begins_with_store(self, call: RecordedCall) -> bool:
        known = self._stored_by(call)
        if known is not None:
            known.looked_up = False
            known.extend(call)
            return False
        if call.first or (self._reads and call.kind is CallKind.RESERVE):
            return False
        self._known.append(_KnownRequest(call))
        return True

    def _stored_by(self, call: RecordedCall) -> _KnownRequest | None:
        """Return the request that this store belongs to."""
        for known in reversed(self._known):
            if known.stored:
                fits = (
                    call.first + len(call.keys) > known.end
                    and call.at_ms - known.last_ms <= _SAME_MS
                )
            else:
                fits = call.at_ms - known.begun_ms <= _STORED_MS
            if fits and known.is_related(call):
                return known
        return None


class _KnownRequest:
    """A request that was recorded, as far as its prompt and answer are known."""

    def __init__(self, call: RecordedCall) -> None:
        self.first = call.first
        self._ids = _ids(call.keys)
        self.begun_ms = self.last_ms = call.at_ms
        # and not retrieved or stored yet
        self.looked_up = call.kind is CallKind.LOOKUP
        # and never read
        self.stored = call.kind in (CallKind.STORE, CallKind.RESERVE)

    @property
    def end(self) -> int:
        return self.first + len(self._ids) // _ID

    def is_related(self, call: RecordedCall) -> bool:
        """Whether one prompt is a prefix of the other, or the call continues it (a key names all
        earlier tokens).
        """
        if call.parent is not None and call.first == self.end:
            return self._id(call.first - 1) == call.parent[:_ID]
        at = min(self.end, call.first + len(call.keys)) - 1
        return (
            at >= max(self.first, call.first)
            and self._id(at) == call.keys[at - call.first][:_ID]
        )

    def extend(self, call: RecordedCall) -> None:
        """Add the keys of a related call that are beyond the end."""
        self._ids += _ids(call.keys[max(0, self.end - call.first) :])
        self.last_ms = call.at_ms

    def _id(self, at: int) -> bytes:
        return self._ids[(at - self.first) * _ID : (at - self.first + 1) * _ID]


def _ids(keys: Sequence[bytes]) -> bytes:
    return b"".join([key[:_ID] for key in keys])
