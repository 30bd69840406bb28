"""Whether loading a chunk is expected to be faster than computing it again.

Measurements are in a table that all processes of the machine share: a process may decide by what
another process has measured, and an engine that starts knows what the previous one has learned.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from weakref import WeakSet
from zlib import crc32

from pagoda.base.clock import Clock
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.ledger.columns import map_or_private

log = guarded_logger("pagoda.cache")

# the measurements of a tier that are needed: a single copy during which the process was paused
# proves nothing
_FEWEST = 3
# after a measurement the tier is tried, and measured, again; doubled while it stays slow
_PROBE_NS = 1_000_000_000
_LATEST_PROBE_NS = 60 * _PROBE_NS
# the shortest time between two log lines with the same verdict about one tier
_VERDICT_NS = 60 * _PROBE_NS
# after this time, a small prompt counts as a measurement of prefill, too
_SMALL_NS = 600 * _PROBE_NS
_HOST = "host"
_PROBE_CHUNKS = 4  # the fewest chunks that measure a tier again
_LAST = 5  # the number of measurements that a row keeps
_NAME_BYTES = 16
_FEW_NAMES = 64
# A part of each name. A release that measures what another one measured wrongly has another: it
# never reads those rows, and they are replaced when they are the oldest.
_VERSION = b"speeds 2"
# name, number of measurements, time of the last (monotonic ns), slow ones in a row; the last rates
# and their amounts
_ROW = Struct(f"<{_NAME_BYTES}sQqQ{_LAST}d{_LAST}d")
_CHECKSUM = Struct("<I")
SPEEDS_BYTES = 4096
_ROW_BYTES = 128
_USED_BYTES = _ROW.size + _CHECKSUM.size  # bytes of a row that are used


@dataclass(eq=False)
class LoadMeasurement:
    """One load that is being measured."""

    nbytes: int = 0  # set before the load ends


@dataclass
class _SharedTime:
    """A clock of one tier, which runs slower the more loads are running: so each load is charged
    its share.
    """

    running: WeakSet[LoadMeasurement] = field(default_factory=WeakSet)
    _passed: float = 0.0
    _at: float = 0.0

    def now(self) -> float:
        """Return the time of this clock. Called before a load begins or ends."""
        now = time.perf_counter()
        self._passed += (now - self._at) / max(1, len(self.running))
        self._at = now
        return self._passed


class LoadCost:
    """Measured bytes/s of each tier against the engine's measured tokens/s of prefill. Thread-safe.

    Refuses a tier only if both are known and most of its last copies were slow; it is soon tried
    again.
    """

    def __init__(
        self,
        chunk_bytes: int,
        chunk_tokens: int,
        clock: Clock,
        enabled: bool = True,
        *,
        speeds: SpeedTable | None = None,
        engine: str = "",
        tiers: Sequence[str] = (),
    ) -> None:
        """Read and write the rows of `tiers` and `engine` in the table `speeds`, by default a
        private one.
        """
        self._enabled = enabled
        self._chunk_bytes = chunk_bytes
        self._bytes_per_token = chunk_bytes / chunk_tokens
        self._clock = clock
        self._speeds = speeds or SpeedTable()
        self._prefill = f"prefill {engine}"
        self.tiers = tiers
        # by tier: whether its hits are taken, when that was last asked
        self._verdicts: dict[str, bool] = {}
        # by tier and verdict: when there was a log line (monotonic ns)
        self._logged: dict[tuple[str, bool], int] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def _times(self) -> dict[str, _SharedTime]:
        """Return the clock of each tier, by which the running loads are measured."""
        return {}

    @contextmanager
    def measured(self, tier: str) -> Iterator[LoadMeasurement]:
        """Measure a load from `tier`; loads at the same time share its time. The block sets how
        many bytes arrived.
        """
        load = LoadMeasurement()
        times = self._times.setdefault(tier, _SharedTime())
        with self._lock:
            began = times.now()
            times.running.add(load)
        try:
            yield load
        finally:
            with self._lock:
                spent = times.now() - began
                times.running.discard(load)
            self.record_load(tier, load.nbytes, spent)

    def record_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note that loading `nbytes` from `tier` took `seconds`."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            speed = self._speeds.read(tier)
            speed.add(nbytes, seconds, self._clock.monotonic_ns())
            speed.slow = (
                speed.slow + 1 if speed.rates[-1] < self._break_even() else 0
            )
            self._speeds.write(tier, speed)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` in `seconds`.

        A device takes longer per token for few tokens than for many; so a small prompt does not
        count soon after a larger one.
        """
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            now = self._clock.monotonic_ns()
            speed = self._speeds.read(self._prefill)
            if (
                2 * tokens >= max(speed.amounts, default=0)
                or not 0 <= now - speed.measured_ns < _SMALL_NS
            ):
                speed.add(tokens, seconds, now)
                self._speeds.write(self._prefill, speed)

    def is_worth_loading(self, tier: str) -> bool:
        """Whether a chunk from `tier` is expected sooner than a computed one, or too little is
        known.

        A tier that is not measured in the background (host memory, or any tier of a cache without
        it) is tried again later. The first answer of which both speeds are known is logged, and so
        is each change of it.
        """
        if not self._enabled:
            return True
        speed = self._speeds.read(tier)
        if speed.number < _FEWEST or not (break_even := self._break_even()):
            return True
        is_faster = speed.rate >= break_even
        if self._verdicts.get(tier) != is_faster:
            self._verdicts[tier] = is_faster
            self._log_verdict(tier, is_faster)
        return is_faster or (
            self._is_tried_by_requests(tier) and self._is_due(speed)
        )

    def _is_tried_by_requests(self, tier: str) -> bool:
        return tier == _HOST or _HOST not in self.tiers

    def _log_verdict(self, tier: str, is_faster: bool) -> None:
        """Log what was measured and what follows, unless a line said the same a moment ago."""
        now = self._clock.monotonic_ns()
        last = self._logged.get((tier, is_faster))
        if last is not None and now - last < _VERDICT_NS:
            return
        self._logged[tier, is_faster] = now
        if is_faster:
            log.info("%s: hits in %s are taken", self._figures(tier), tier)
        else:
            log.warning(
                "%s: hits in %s are computed (worth_it)",
                self._figures(tier),
                tier,
            )

    def take_probe(self, tier: str) -> int:
        """Return how many chunks are to be loaded now from a tier that was too slow, to measure it
        again; 0: none.

        Only the first process that asks measures. It loads half as much as requests load: a disk
        with a rate limit, or with a cache, may be fast for less.
        """
        if self.is_worth_loading(tier):
            return 0
        with self._lock:
            speed = self._speeds.read(tier)
            if not self._is_due(speed):
                return 0
            speed.measured_ns = self._clock.monotonic_ns()
            self._speeds.write(tier, speed)
            return max(
                _PROBE_CHUNKS, int(max(speed.amounts) / 2 / self._chunk_bytes)
            )

    def _is_due(self, speed: Speed) -> bool:
        pause = min(
            _PROBE_NS << min(max(0, speed.slow - _FEWEST), 6), _LATEST_PROBE_NS
        )
        # negative: measured before a reboot
        return not 0 <= self._clock.monotonic_ns() - speed.measured_ns <= pause

    def _break_even(self) -> float:
        """Return the bytes/s at which loading is as fast as computing; 0: not known."""
        return self._bytes_per_token * self._speeds.read(self._prefill).rate

    def refusal(self, tier: str) -> str:
        """Return why nothing is loaded from a tier that is slower than computing: the two
        speeds.
        """
        return (
            f"computing is faster than reading from {tier}: {self._figures(tier)}"
        )

    def _figures(self, tier: str) -> str:
        """Return both speeds as text. The speed of the tier is also in tokens, which is what is
        compared.
        """
        prefill = self._speeds.read(self._prefill).rate
        rate = self._speeds.read(tier).rate
        tokens = rate / self._bytes_per_token
        return (
            f"prefill {prefill:,.0f} tokens/s, {tier} {_bytes_text(rate)}/s ({tokens:,.0f} "
            "tokens/s)"
        )

    def rates(self) -> dict[str, float]:
        """Return the known rates: "<tier>_bytes_per_second" and "prefill_tokens_per_second"."""
        speeds = {tier: self._speeds.read(tier).rate for tier in self.tiers}
        known = {
            f"{tier}_bytes_per_second": rate
            for tier, rate in speeds.items()
            if rate
        }
        return {
            **known,
            "prefill_tokens_per_second": self._speeds.read(self._prefill).rate,
        }


# ---- the measurements of all processes that share a store


@dataclass
class Speed:
    """The last measurements of one tier or engine: `rates` per second, the oldest first, each with
    its amount.
    """

    rates: list[float] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)
    number: int = 0
    measured_ns: int = 0
    slow: int = 0  # slow measurements in a row, up to the last
    # the median of the last measurements, weighted by amount; 0: there is no measurement
    rate: float = 0.0

    def add(self, amount: float, seconds: float, now: int) -> None:
        """Add a measurement that ended now."""
        self.rates = [*self.rates, amount / seconds][-_LAST:]
        self.amounts = [*self.amounts, amount][-_LAST:]
        self.rate = _median(self.rates, self.amounts)
        self.number = self.number + 1
        self.measured_ns = now


class SpeedTable:
    """Rows in one mapped page. Without a source, or without space for the page, the table is
    private.

    A row is written with no lock between processes: if two write at the same moment, one
    measurement may be lost. A row that is torn has a wrong checksum and counts as free. Rows of
    another version have other names.
    """

    def __init__(self, source: Path | mmap.mmap | None = None) -> None:
        """Use that page of memory, or map that file; make it if it does not exist."""
        self._page = map_or_private(source, SPEEDS_BYTES)
        # by name: the offset of its row, its bytes and their content
        self._known: dict[str, tuple[int, bytes, Speed]] = {}
        # the first byte of each row: a name whose byte is not there has no row
        self._first_bytes = self._page[::_ROW_BYTES]

    def read(self, name: str) -> Speed:
        """Return what is known of that name: a `Speed` without measurements if nothing is. Takes
        less than 1 us.
        """
        known = self._known.get(name)
        if (
            known is not None
            and self._page[known[0] : known[0] + _USED_BYTES] == known[1]
        ):
            return known[2]
        digest = _row_name(name)
        if digest[0] not in self._first_bytes.tobytes():
            return Speed()
        at = bytes(self._page).find(digest)
        if at % _ROW_BYTES or self._measured(at) < 0:
            return Speed()
        row = bytes(self._page[at : at + _USED_BYTES])
        _, number, measured_ns, slow, *values = _ROW.unpack_from(row)
        first = _LAST - min(number, _LAST)
        rates = values[first:_LAST]
        amounts = values[_LAST + first :]
        speed = Speed(
            rates, amounts, number, measured_ns, slow, _median(rates, amounts)
        )
        self._known[name] = at, row, speed
        return speed

    def write(self, name: str, speed: Speed) -> None:
        """Write the row of that name; if no row is free, replace the one that was measured longest
        ago.
        """
        digest = _row_name(name)
        at = bytes(self._page).find(digest)
        if at % _ROW_BYTES:
            at = min(range(0, SPEEDS_BYTES, _ROW_BYTES), key=self._measured)
        rest = [0.0] * (_LAST - len(speed.rates))
        values = *rest, *speed.rates, *rest, *speed.amounts
        row = _ROW.pack(
            digest, speed.number, speed.measured_ns, speed.slow, *values
        )
        row += _CHECKSUM.pack(crc32(row))
        self._page[at : at + _USED_BYTES] = row
        self._known[name] = at, row, speed

    def _measured(self, at: int) -> int:
        """Return when a row was measured; -1 if it is free, or torn."""
        row = bytes(self._page[at : at + _USED_BYTES])
        whole = (
            crc32(row[: _ROW.size]) == _CHECKSUM.unpack_from(row, _ROW.size)[0]
        )
        return int(_ROW.unpack_from(row)[2]) if whole else -1


@lru_cache(_FEW_NAMES)
def _row_name(name: str) -> bytes:
    """Return the bytes that a row of this version begins with."""
    return blake2b(
        name.encode(), digest_size=_NAME_BYTES, person=_VERSION
    ).digest()


def _bytes_text(rate: float) -> str:
    """Return a number of bytes as text, such as 1.1 GB (10^9 bytes)."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if rate >= unit:
            return f"{rate / unit:.1f} {name}"
    return f"{rate:.1f} B"


def _median(rates: Sequence[float], amounts: Sequence[float]) -> float:
    """Return the median of the rates, weighted by the amounts; 0 if there is none."""
    passed = 0.0
    half = sum(amounts) / 2
    for rate, amount in sorted(zip(rates, amounts, strict=True)):
        passed += amount
        if passed > half:
            return rate
    return 0.0
