"""Recording live traffic as a trace that `pagoda replay` reads: hashed ids and lengths, no text and no tokens.

An id is the first eight bytes of a chunk's key, less one bit: every process and every restart gives a chunk the same.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pagoda.cache.questions import Call, Kind, Questions
from pagoda.cache.trace_writer import append_lines
from pagoda.clock import Clock
from pagoda.fork import renewed_after_fork
from pagoda.metrics import RateLimitedLog, Reason
from pagoda.threads import Event, begin

__all__ = ["Kind", "Recorder"]

log = logging.getLogger("pagoda.cache")

_MOST_CALLS = 4096  # that wait for the thread
_MOST_KEYS = 1 << 20  # of those calls
_PAUSE_SECONDS = 0.1  # between two rounds of the thread
_LOG_SECONDS = 60.0
_ID_MASK = (1 << 63) - 1  # what signed 64-bit integers hold


class Recorder:
    """Writes one line a request, on a daemon thread that begins with the first call, anew after a fork.

    Thread-safe. Never raises and never waits but in `close`: calls that are too many, or that cannot be written, are
    dropped and counted.
    """

    def __init__(self, path: Path, chunk_tokens: int, clock: Clock) -> None:
        self.path = path
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self.renew()
        renewed_after_fork(self)

    def renew(self) -> None:
        """Begin anew: what a parent noted, the parent writes."""
        self._lock = threading.Lock()
        self._lines = RateLimitedLog(self._clock, _LOG_SECONDS)
        self._calls: deque[Call] = deque()
        self._keys = 0  # of the calls
        self._questions = Questions()
        self._woken, self._ending = Event(), Event()
        self._thread: threading.Thread | None = None
        self._recorded = self._dropped = 0
        self._too_many = 0  # of those dropped, since the last round

    def note(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        first: int,
        num_tokens: int,
        *,
        counted: bool = True,
        parent: bytes | None = None,
    ) -> None:
        """Note a call about the chunks of a prompt of `num_tokens` tokens from number `first` on."""
        call = Call(kind, counted, keys, first, num_tokens, round(self._clock.time() * 1000), parent)
        with self._lock:
            if self._ending.is_set():
                return
            if len(self._calls) >= _MOST_CALLS or self._keys + len(keys) > _MOST_KEYS:
                self._dropped += 1
                self._too_many += 1
                return
            self._calls.append(call)
            self._keys += len(keys)
            if self._thread is None:
                self._start()
        self._woken.set()

    def stats(self) -> dict[str, object]:
        """Where to, and how many requests were recorded and calls dropped, by this process."""
        return {"path": str(self.path), "requests": self._recorded, "dropped": self._dropped}

    def close(self, timeout: float = 1.0) -> None:
        """Write what was noted, within `timeout` seconds, and end. Idempotent."""
        with self._lock:
            self._ending.set()
            thread = self._thread
        self._woken.set()
        if thread is not None:
            thread.join(timeout)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pagoda-record", daemon=True)
        self._thread = thread if begin(thread) else None  # the next call tries again

    def _run(self) -> None:
        while not self._ending.is_set():
            self._woken.wait()
            self._woken.clear()
            self._write()
            self._ending.wait(_PAUSE_SECONDS)
        self._write()

    def _write(self) -> None:
        """Write the requests among the calls that were noted; whatever goes wrong, the thread lives on."""
        with self._lock:
            calls, self._calls, self._keys = self._calls, deque(), 0
            too_many, self._too_many = self._too_many, 0
        lines, written = list[bytes](), 0
        trouble: Exception | None = None
        try:
            lines = [self._line(call) for call in calls if self._questions.is_request(call)]
            if lines:
                written, trouble = append_lines(self.path, lines)
        except Exception as error:  # noqa: BLE001  # a border: an engine must not notice
            trouble = error
        if trouble is not None:
            self._lines.warn(log, Reason.IO_ERROR, f"requests are not recorded in {self.path}: {trouble}")
        with self._lock:
            self._recorded += written
            self._dropped += len(lines) - written
        if too_many:
            self._lines.warn(log, Reason.QUEUE_FULL, f"{too_many} calls are not recorded: they were too many")

    def _line(self, call: Call) -> bytes:
        from pagoda.replay.trace import Request, format_request  # not before it is needed

        ids = tuple([int.from_bytes(key[:8], "little") & _ID_MASK for key in call.keys])
        request = Request(float(call.at_ms), call.num_tokens, 0, ids, self._chunk_tokens)
        return format_request(request).encode() + b"\n"
