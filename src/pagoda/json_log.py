"""What PagodaKV logs as JSON, one object a line, for log collectors. A cache with `log_format = "json"` calls it."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["JsonFormatter", "log_json"]

FIELDS = "pagoda"
"""The attribute of a log record, a mapping, whose entries become keys: `log.info(text, extra={FIELDS: {...}})`."""

_KEYS = ("time", "level", "logger", "process", "message")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, process, message, and the fields that it has."""

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
        line = {**getattr(record, FIELDS, {}), **dict(zip(_KEYS, values, strict=True))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_json() -> None:
    """Write what the loggers "pagoda..." say to stderr as JSON, from INFO on, in place of every other way.

    A level that was set for the logger "pagoda" stays. Idempotent; other loggers are left alone.
    """
    ours = logging.getLogger("pagoda")
    if any(isinstance(handler.formatter, JsonFormatter) for handler in ours.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    ours.handlers[:] = [handler]
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
