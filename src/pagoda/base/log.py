"""PagodaKV's log: loggers that never raise, and lines on stderr that never wait, as JSON for log
collectors if the option `log_format` says so.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TextIO

FIELDS = "pagoda"
"""The attribute of a log record, a mapping, whose entries become keys: `log.info(text,
extra={FIELDS: {...}})`.
"""

_KEYS = ("time", "level", "logger", "process", "message")
_MOST_BYTES = 4000  # a line of this size fits into a pipe that has any room
_MOST_OF_EXCEPTION = 3000


def guarded_logger(name: str) -> logging.Logger:
    """Return the logger of this name, which never raises, whatever its filters and handlers do.
    Thread-safe.
    """
    found = logging.getLogger(name)
    if "handle" not in vars(found):
        found.handle = partial(_handle, found.handle)  # type: ignore[method-assign]
    return found


def _handle(
    handle: Callable[[logging.LogRecord], None], record: logging.LogRecord
) -> None:
    try:
        handle(record)
    except Exception:  # noqa: BLE001
        # a boundary: nothing fails because its log line does
        if logging.raiseExceptions and sys.stderr is not None:
            with suppress(Exception):
                traceback.print_exc()


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr and never waits: a line is dropped if the pipe is full because no process
    reads it.
    """

    def __init__(self) -> None:
        """Write to the present `sys.stderr`."""
        super().__init__(sys.stderr)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, cut where it would not fit."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        line = super().format(record).encode(encoding, "backslashreplace")
        return line[:_MOST_BYTES].decode(encoding, "ignore")

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line if there is room."""
        try:
            if not select.select([], [self.stream], [], 0)[1]:
                return
        except (OSError, TypeError, ValueError):
            # `sys.stderr` was replaced by an object that is not a file
            pass
        super().emit(record)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, process, message, and the fields
    that it has.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object without a line break."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values = (
            f"{seconds}.{int(record.msecs):03d}Z",
            record.levelname,
            record.name,
            record.process,
            record.getMessage(),
        )
        line = {
            **getattr(record, FIELDS, {}),
            **dict(zip(_KEYS, values, strict=True)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[
                -_MOST_OF_EXCEPTION:
            ]
        return json.dumps(line, default=str, ensure_ascii=False)


def log_json() -> bool:
    """Write the lines of the loggers "pagoda..." to stderr as JSON, from INFO on, instead of to
    other handlers.

    A level that was set for the logger "pagoda" stays. Idempotent; other loggers are left alone.
    Returns whether this is new.
    """
    ours = logging.getLogger("pagoda")
    if any(
        isinstance(handler.formatter, JsonFormatter) for handler in ours.handlers
    ):
        return False
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter())
    ours.handlers[:] = [handler]
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    return True
