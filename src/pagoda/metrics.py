"""The names of all reasons and counters, a rate-limited log, and the Prometheus text format.

Pure Python; the ledger stores the counters (one row for each member, in a mapped file).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum, auto

from pagoda.clock import Clock

__all__ = ["COUNTERS", "DROPS", "MISSES", "RateLimitedLog", "Reason", "prometheus"]


class Reason(StrEnum):
    """Why a chunk was not served (a miss) or not stored (a drop). The value is the lower-case name."""

    # misses
    ABSENT = auto()
    EVICTED = auto()
    CLEARED = auto()
    REMOVED = auto()
    OTHER_NAMESPACE = auto()
    BUSY = auto()
    FAILED_CHECK = auto()
    BELOW_MINIMUM = auto()
    NOT_WORTH_IT = auto()
    LEDGER_BUSY = auto()
    DEADLINE = auto()
    IO_ERROR = auto()
    SHORT_PROMPT = auto()
    TIER_SKIPPED = auto()
    # drops
    FULL = auto()
    NOT_ADMITTED = auto()
    QUEUE_FULL = auto()
    TOO_LARGE = auto()
    STALE = auto()
    SUPERSEDED = auto()
    CLOSED = auto()
    PIN_LIMIT = auto()
    REBUILDING = auto()


_ALL = tuple(Reason)
MISSES: tuple[Reason, ...] = _ALL[: _ALL.index(Reason.FULL)]
DROPS: tuple[Reason, ...] = _ALL[_ALL.index(Reason.FULL) :]

# Stores keep them by name: a new one does not change the format, and a name is never reused with another meaning.
# Every reason has both a miss_ and a drop_ column, because a BUSY may end either a load or a store.
COUNTERS: tuple[str, ...] = (
    "lookups",
    "hits",
    "hit_tokens",
    "asked_tokens",
    "stored_chunks",
    "stored_bytes",
    "loaded_chunks",
    "loaded_bytes",
    "evicted_chunks",
    "removed_chunks",
    "reaped_chunks",
    "failed_checks",
    "hit_tokens_host",
    "hit_tokens_disk",
    "hit_tokens_remote",
    *(f"miss_{reason}" for reason in Reason),
    *(f"drop_{reason}" for reason in Reason),
)


class RateLimitedLog:
    """At most one log line for each reason in `every_seconds`, with the number of suppressed ones. Thread-safe."""

    def __init__(self, clock: Clock | None = None, every_seconds: float = 10.0) -> None:
        self._clock = clock or Clock()
        self._every_ns = int(every_seconds * 1e9)
        self._seen: dict[
            Reason, tuple[int, int]
        ] = {}  # reason -> (monotonic ns of its last line, suppressed since)
        self.reset()

    def reset(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def warn(self, logger: logging.Logger, reason: Reason, message: str) -> None:
        """Log `message` as a warning, or only count it if this reason had a line less than `every_seconds` ago."""
        now = self._clock.monotonic_ns()
        with self._lock:
            last = self._seen.get(reason)
            if last is not None and now - last[0] < self._every_ns:
                self._seen[reason] = (last[0], last[1] + 1)
                return
            self._seen[reason] = (now, 0)
        suppressed = last[1] if last is not None else 0
        more = f" ({suppressed} more of this reason since the last line)" if suppressed else ""
        logger.warning("%s: %s%s", reason.value, message, more)


# counters that are one Prometheus family with a label: prefix -> (family, label)
_FAMILIES = {
    "miss_": ("misses", "reason"),
    "drop_": ("drops", "reason"),
    "hit_tokens_": ("hit_tokens_by_tier", "tier"),
}
_Sample = tuple[str, float]  # rendered labels, value


def prometheus(
    counters: Mapping[str, int], gauges: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> str:
    """Return the counters and gauges in the Prometheus text format; changes nothing.

    `labels` are put on every sample. Counters `miss_x`, `drop_x` and `hit_tokens_x` become labelled families.
    """
    families: dict[str, list[_Sample]] = {}
    for name, count in counters.items():
        family, own = _family(name)
        families.setdefault(f"pagoda_{family}_total", []).append((_labels({**(labels or {}), **own}), count))
    lines = _render(families, "counter")
    lines += _render({f"pagoda_{_name(g)}": [(_labels(labels or {}), v)] for g, v in gauges.items()}, "gauge")
    return "\n".join(lines) + "\n" if lines else ""


def _render(families: Mapping[str, Iterable[_Sample]], kind: str) -> list[str]:
    """Return the lines of some families: one TYPE line, then its samples together, as the format demands."""
    lines: list[str] = []
    for family, samples in families.items():
        lines.append(f"# TYPE {family} {kind}")
        lines += [f"{family}{labels} {value}" for labels, value in samples]
    return lines


def _family(counter: str) -> tuple[str, dict[str, str]]:
    for prefix, (family, label) in _FAMILIES.items():
        if counter.startswith(prefix):
            return family, {label: counter.removeprefix(prefix)}
    return _name(counter), {}


def _name(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{_name(k)}="{v}"' for k, v in escaped.items()) + "}"
