"""Requests by model and by tenant: what all processes that share a store asked for, found, loaded
and computed.

`Session.count` writes them where it counts a request, `StoreStats` and `Cache.stats` read them.
Each member has pages of its own in one file, at the place of its row of counters: so it adds by
plain writes to mapped memory, without a lock between processes, and what a dead member counted
stays. The next member with that row goes on with it.

    page of a member    head | everything else | a row for each pair of model and tenant ...
    row                 time of last use, counters, name of the model, name of the tenant, checksum

A member has at most `PAIRS` rows of pairs. If they are full, a pair that was not used for an hour
gives its row up, and what it counted moves to ("its model", "other"); if there is none, the new
pair is counted there. So the sums of a model, and of all, always have every request.

The file is not part of FORMAT: a version that does not know it leaves it alone. Nothing that
decides what is served is read from it, so it may be lost or damaged at any time.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from pagoda.base.errors import NoRoomError
from pagoda.base.file_space import allocate_range, data_ranges, opened
from pagoda.base.fork import here
from pagoda.base.metrics import TIER_KINDS
from pagoda.base.store_place import require_free
from pagoda.ledger.member_counters import MEMBER_ROWS

OTHER = "other"
"""The name of what has no row of its own, and of a tenant that is not known."""
NO_TENANT = "none"
"""The tenant of requests without a salt."""
METER_FIELDS = (
    "lookups",
    "hits",
    "asked_tokens",
    "hit_tokens",
    *(f"hit_tokens_{kind}" for kind in TIER_KINDS),
    "loaded_tokens",
    "load_microseconds",
    "prefill_tokens",
    "prefill_microseconds",
)
"""What is counted for each pair. Tokens are loaded when they are copied into an engine's memory."""
PAIRS = 48
"""The number of pairs of model and tenant that one process counts separately."""
MOST_SHOWN = 50
"""The number of models, and of tenants, that are shown separately."""

_ROW_BYTES = 256
_ROW_WORDS = _ROW_BYTES // 8
_ROWS = 64
PAGE_BYTES = _ROWS * _ROW_BYTES
METERS_BYTES = MEMBER_ROWS * PAGE_BYTES  # of the longest file
_PAGE_WORDS = PAGE_BYTES // 8
_MAGIC = int.from_bytes(b"PAGODAM1", "little")
# row 0 is the head; the rows after those of pairs are for (model, OTHER) only
_REST = _ROW_WORDS
_FIRST = 2
# name of the model, name of the tenant, checksum of both
_NAMES = Struct("<96s24sI")
_NAMES_AT = 128
_MODEL_BYTES = 96
_MODEL_CHARS = 80
_TENANT_BYTES = 24
_IDLE_SECONDS = 3600
# how long a member with no free row, or no memory, does not look for one
_PAUSE_SECONDS = 60.0
# by counter: the word of its row; the load times of all kinds of tier are one number
_PLACE = {
    name: number
    for number, name in enumerate(METER_FIELDS, 1)
    if name not in ("loaded_tokens", "load_microseconds")
}
_LOADED = METER_FIELDS.index("loaded_tokens") + 1
_LOAD_TIME = METER_FIELDS.index("load_microseconds") + 1

Pair = tuple[str, str]
"""The name of a model and of a tenant."""


class TokenLoad(NamedTuple):
    """What one call copied into the engine's memory, and how long that took."""

    tokens: int
    microseconds: int


class Meter(NamedTuple):
    """What was counted for one model and one tenant."""

    model: str
    tenant: str
    counts: dict[str, int]  # by METER_FIELDS


class RequestMeters:
    """The rows of one member. Its caller holds a lock around each call; none waits or raises."""

    def __init__(self) -> None:
        """Begin in private memory."""
        # the row of members whose page it has mapped
        self.row: int | None = None
        self._pause_until = 0.0
        self._full_until = 0.0
        self._use(memoryview(bytearray(PAGE_BYTES)))

    def leave(self) -> None:
        """Keep a private copy of the rows: another member may soon own these."""
        if self.row is not None:
            self.row = None
            self._use(memoryview(bytearray(self._page)))
        self._pause_until = float("inf")

    def release(self) -> None:
        """Let nothing be counted here any more, as a forked child does with what its parent counts
        in: a call of the parent that goes on in the child counts nothing.
        """
        self._words.release()

    def is_waiting(self) -> bool:
        """Whether the rows are still to be mapped, and it is time to try."""
        return self.row is None and time.monotonic() >= self._pause_until

    def share(self, path: Path | None, row: int) -> None:
        """Map the page of that row of members in the file; what was counted until now is added to
        it. Without space, the rows stay private for a while.
        """
        self._pause_until = time.monotonic() + _PAUSE_SECONDS
        if path is None:
            return
        process = here()
        page: memoryview | None = None
        with suppress(OSError, ValueError, NoRoomError):
            page = _mapped_page(path, row)
        if page is None:
            return
        private = _meters_in(self._page)
        self.row = row
        self._use(page)
        if here() != process:  # a child, which a signal handler forked meanwhile
            self.release()
            return
        with suppress(ValueError):  # the same, from here on
            for meter in private:
                self._merge((meter.model, meter.tenant), meter.counts)

    def add(
        self, pair: Pair, counts: Mapping[str, int], load: TokenLoad | None = None
    ) -> None:
        """Add to the counters of a pair; names that no meter has are ignored."""
        place_of = _PLACE.get
        now = int(time.time())
        try:  # `suppress` takes as long as all of this
            base = self._bases.get(pair)
            if base is None:
                base = self._new_base(pair)
            # in a child that a signal handler forks meanwhile they are released
            self._words[base] = now
            for name, number in counts.items():
                place = place_of(name)
                if place is not None:
                    self._words[base + place] += number
            if load is not None:
                self._words[base + _LOADED] += load.tokens
                self._words[base + _LOAD_TIME] += load.microseconds
        except ValueError:
            # a damaged counter near its end, or no count at all, stays as it is
            pass

    def own(self) -> list[Meter]:
        """Return what is in the rows of this member."""
        return _meters_in(self._page)

    # ---- rows

    def _use(self, page: memoryview) -> None:
        """Count in that page from now on; a page of another version is made empty."""
        self._page = page
        self._words = page.cast("Q")
        if self._words[0] != _MAGIC:
            page[:] = bytes(PAGE_BYTES)
            self._words[0] = _MAGIC
            self._name(_REST, (OTHER, OTHER))
        # by pair: the first word of its row
        self._bases: dict[Pair, int] = {}
        for base in range(_REST, _PAGE_WORDS, _ROW_WORDS):
            pair = _names_at(page, base * 8)
            if not self._words[base] or pair in self._bases:
                continue
            if pair is None:
                self._words[base] = 0  # damaged
            else:
                self._bases[pair] = base
        self._bases[OTHER, OTHER] = _REST

    def _name(self, base: int, pair: Pair) -> None:
        """Give a row to a pair, with counters that are zero."""
        # first: a reader that comes between finds less, not more
        self._words[base] = 0
        for word in range(base + 1, base + _NAMES_AT // 8):
            self._words[word] = 0
        model = pair[0].encode(errors="replace")
        tenant = pair[1].encode(errors="replace")
        names = _NAMES.pack(model, tenant, 0)[:-4]
        row = names + crc32(names).to_bytes(4, "little")
        begin = base * 8 + _NAMES_AT
        self._page[begin : begin + len(row)] = row
        self._words[base] = int(time.time())

    def _new_base(self, pair: Pair) -> int:
        """Return the row of a pair that has none yet, or the row that counts for it."""
        rest = (pair[0], OTHER)
        if pair == rest:
            free = self._free(_FIRST + PAIRS, _ROWS)
            if free is None:
                free = self._free(_FIRST, _FIRST + PAIRS)
            return _REST if free is None else self._take(free, pair)
        now = time.monotonic()
        if now >= self._full_until:
            free = self._free(_FIRST, _FIRST + PAIRS)
            if free is None:
                free = self._emptied()
            if free is not None:
                return self._take(free, pair)
            self._full_until = now + _PAUSE_SECONDS
        base = self._bases.get(rest)
        return self._new_base(rest) if base is None else base

    def _take(self, base: int, pair: Pair) -> int:
        self._name(base, pair)
        self._bases[pair] = base
        return base

    def _free(self, first: int, end: int) -> int | None:
        """Return a row without a pair, of those from number `first` on before `end`."""
        for base in range(first * _ROW_WORDS, end * _ROW_WORDS, _ROW_WORDS):
            if not self._words[base]:
                return base
        return None

    def _emptied(self) -> int | None:
        """Empty the row of the pair that was not used for longest; None if all are in use."""
        now = int(time.time())
        idle = [
            (self._words[base], pair, base)
            for pair, base in self._bases.items()
            if pair[1] != OTHER
            # a time in the future is of a clock that was wrong
            and not now - _IDLE_SECONDS < self._words[base] <= now + _IDLE_SECONDS
        ]
        if not idle:
            return None
        _, pair, base = min(idle)
        counts = _counts_at(self._words, base)
        del self._bases[pair]
        self._words[base] = 0
        self._merge((pair[0], OTHER), counts)
        return base if not self._words[base] else None

    def _merge(self, pair: Pair, counts: Mapping[str, int]) -> None:
        load = TokenLoad(counts["loaded_tokens"], counts["load_microseconds"])
        self.add(pair, counts, load)


def read_meters(path: Path, without: int | None = None) -> list[Meter]:
    """Return what all members counted, also those that ended; empty without a file. Raises
    OSError.

    `without`: a row of members whose page is left out.
    """
    content = b""
    with (
        suppress(FileNotFoundError),
        opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd,
    ):
        content = os.pread(fd, METERS_BYTES, 0)
    pages = len(content) // PAGE_BYTES
    view = memoryview(content)
    return merged(
        meter
        for number in range(pages)
        if number != without
        for meter in _meters_in(
            view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        )
    )


def merged(meters: Iterable[Meter]) -> list[Meter]:
    """Return one meter for each pair, with the sum of its counts."""
    found: dict[Pair, Counter[str]] = {}
    for meter in meters:
        found.setdefault((meter.model, meter.tenant), Counter()).update(
            meter.counts
        )
    return [
        Meter(*pair, {name: counts[name] for name in METER_FIELDS})
        for pair, counts in found.items()
    ]


def model_label(model: str) -> str:
    """Return the name of a model as meters have it: a long one is cut, and ends with a digest of
    all of it.
    """
    encoded = model.encode(errors="replace")
    if len(model) <= _MODEL_CHARS and len(encoded) < _MODEL_BYTES:
        return model
    digest = blake2b(encoded, digest_size=4).hexdigest()
    head = encoded[: _MODEL_CHARS - 9].decode(errors="ignore")
    return f"{head}~{digest}"


def _mapped_page(path: Path, row: int) -> memoryview | None:
    """Map the page of that row; None if there is no space for it. Raises OSError, NoRoomError."""
    begin = row * PAGE_BYTES
    end = begin + PAGE_BYTES
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        # a page that an earlier member had is never allocated again: if that failed, it would be
        # emptied
        if data_ranges(fd, begin, end) != [(begin, end)]:
            require_free(path.parent, PAGE_BYTES, in_memory=True)
            if not allocate_range(fd, begin, PAGE_BYTES):
                return None
        # the system maps whole pages of its own size
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(fd, end - start, offset=start)
    return memoryview(memory)[begin - start :]


def _meters_in(page: memoryview) -> list[Meter]:
    """Return the meters of one member; none of a page of another version."""
    words = page.cast("B").cast("Q")
    if words[0] != _MAGIC:
        return []
    found = []
    for base in range(_REST, _PAGE_WORDS, _ROW_WORDS):
        pair = _names_at(page, base * 8)
        counts = _counts_at(words, base)
        if pair is not None and words[base] and any(counts.values()):
            found.append(Meter(*pair, counts))
    return found


def _names_at(page: memoryview, begin: int) -> Pair | None:
    """Return the pair of the row that begins at this byte; None if it has none, or is damaged."""
    begin = begin + _NAMES_AT
    names = bytes(page[begin : begin + _NAMES.size])
    model, tenant, checksum = _NAMES.unpack(names)
    if checksum != crc32(names[:-4]):
        return None
    return (
        model.rstrip(b"\0").decode(errors="replace"),
        tenant.rstrip(b"\0").decode(errors="replace"),
    )


def _counts_at(words: memoryview, base: int) -> dict[str, int]:
    return {
        name: words[base + number] for number, name in enumerate(METER_FIELDS, 1)
    }


# ---- for people and programs


def usage_by_model(meters: Iterable[Meter]) -> list[dict[str, object]]:
    """Return hit rate, tokens and saved time of each model, the one with most requested tokens
    first; beyond `MOST_SHOWN` they are together, as the last one, "other".

    Args:
        meters: those of any number of stores.
    """
    return list(_usage("model", list(meters)))


def usage_by_tenant(meters: Iterable[Meter]) -> list[dict[str, object]]:
    """Return the same of each tenant: "none" is requests without a salt, "other" is also requests
    whose tenant is not known.
    """
    return list(_usage("tenant", list(meters)))


def token_seconds(meters: Iterable[Meter]) -> dict[str, float]:
    """Return how long the engines of each model took to compute a token of a prompt, for the
    models whose engines reported it.
    """
    tokens: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for meter in meters:
        if meter.model != OTHER:  # several models
            tokens[meter.model] += meter.counts["prefill_tokens"]
            microseconds[meter.model] += meter.counts["prefill_microseconds"]
    return {
        model: microseconds[model] / 1e6 / count
        for model, count in tokens.items()
        if count and microseconds[model]
    }


def saved_seconds(meter: Meter, speeds: Mapping[str, float]) -> float | None:
    """Return how much sooner the loaded tokens were there than computed ones: their number times
    the model's seconds for a token, less the time of all loads.

    None if nothing was loaded, or the speed is not known. Negative if the loads took longer.
    """
    speed = speeds.get(meter.model)
    loaded = meter.counts["loaded_tokens"]
    if speed is None or not loaded:
        return None
    return loaded * speed - meter.counts["load_microseconds"] / 1e6


class SavedTime(NamedTuple):
    """What loads saved, of all models together, each at its own speed."""

    seconds: float  # compute_seconds less the time of the loads
    compute_seconds: float
    tokens: int
    unmeasured_tokens: (
        int  # in none of the others: of models whose speed is not known
    )


def saved_time(meters: Sequence[Meter]) -> SavedTime:
    """Return the sum of `saved_seconds` over these meters, and what it is about."""
    speeds = token_seconds(meters)
    seconds = 0.0
    load_seconds = 0.0
    tokens = 0
    unmeasured = 0
    for meter in meters:
        counts = meter.counts
        saved = saved_seconds(meter, speeds)
        if saved is None:
            unmeasured += counts["loaded_tokens"]
        else:
            seconds += saved
            load_seconds += counts["load_microseconds"] / 1e6
            tokens += counts["loaded_tokens"]
    return SavedTime(seconds, seconds + load_seconds, tokens, unmeasured)


def _usage(by: str, meters: list[Meter]) -> Iterator[dict[str, object]]:
    speeds = token_seconds(meters)
    groups: dict[str, list[Meter]] = {}
    for meter in meters:
        name = meter.model if by == "model" else meter.tenant
        groups.setdefault(name, []).append(meter)
    rest = groups.pop(OTHER, [])
    names = sorted(groups, key=lambda name: (-_asked(groups[name]), name))
    for name in names[MOST_SHOWN:]:
        rest.extend(groups[name])
    for name in names[:MOST_SHOWN]:
        yield {by: name, **_figures(groups[name], speeds)}
    if rest:
        yield {by: OTHER, **_figures(rest, speeds)}


def _asked(meters: Iterable[Meter]) -> int:
    return sum(meter.counts["asked_tokens"] for meter in meters)


def _figures(
    meters: Iterable[Meter], speeds: Mapping[str, float]
) -> dict[str, object]:
    totals: Counter[str] = Counter()
    saved: list[float] = []
    unmeasured = 0
    for meter in meters:
        totals.update(meter.counts)
        seconds = saved_seconds(meter, speeds)
        if seconds is None:
            unmeasured += meter.counts["loaded_tokens"]
        else:
            saved.append(seconds)
    asked = totals["asked_tokens"]
    counted = METER_FIELDS[: METER_FIELDS.index("load_microseconds")]
    return {
        **{name: totals[name] for name in counted},
        "load_seconds": totals["load_microseconds"] / 1e6,
        "hit_rate": totals["hit_tokens"] / asked if asked else None,
        "saved_seconds": sum(saved) if saved else None,
        "unmeasured_tokens": unmeasured,
    }
