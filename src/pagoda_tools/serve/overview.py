"""All data of the operator's page as one dict: tiers, hits, savings, misses, namespaces, pins.

`live_feed` calls `Overview.take` on a thread, once for all readers, and `Overview.look` while there
are none. It calls `StoreStats.of`; all figures come from the counters that the engines of this
machine share. An unknown figure is None, with a text that says what to do.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import pagoda
from pagoda.base.clock import Deadline
from pagoda.base.errors import PagodaError
from pagoda.base.metrics import TIER_KINDS, by_reason
from pagoda.base.signal_safe_threads import begin
from pagoda.ledger import admin
from pagoda.ledger.request_meters import (
    Meter,
    saved_time,
    usage_by_model,
    usage_by_tenant,
)
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from pagoda.ledger.store_names import store_names
from pagoda.ledger.store_stats import StoreStats
from pagoda_tools.serve.history import (
    History,
    RecentActivity,
    StoreId,
    activity,
    load_seconds_within,
    machine_seconds,
)

if TYPE_CHECKING:
    from pagoda.ledger import Ledger

MOST_NAMESPACES = 50
MOST_PINS = 50
MOST_REQUESTS = 20
MOST_STORES = 20  # of one tier
_MODELS_OF_STORE = 3
_REMOTES_SECONDS = 30.0  # the pause between two questions to the remote tiers
# to wait for them; then an overview has their earlier answers
_REMOTES_PATIENCE_SECONDS = 0.2
_STORES_SECONDS = 1.0  # to wait for all locks that other processes hold
_TITLES = {"host": "host memory", "disk": "disk", "remote": "remote tiers"}


class RemoteUsage(NamedTuple):
    """How full one remote tier is, in bytes (None: unknown), or why it did not answer."""

    tier: str
    address: str
    used_bytes: int | None
    limit_bytes: int | None
    error: str
    warnings: Sequence[str] = ()  # about its settings
    # of a pool: how many nodes it has, and how many of them answered
    nodes: int | None = None
    answering: int | None = None

    @property
    def state(self) -> str:
        """Whether it answers, in a few words."""
        if self.error:
            return "NO ANSWER"
        if self.nodes is None:
            return "answers"
        return f"{self.answering} of {self.nodes} nodes"

    @property
    def is_whole(self) -> bool:
        """Whether it answers, all of its nodes."""
        return not self.error and self.nodes == self.answering


class LatelyAsked:
    """The last answers of remote tiers, so that local stores do not wait for slow ones. For one
    thread.

    `ask` may wait: it runs on a separate thread, at most once in `every_seconds`.
    """

    def __init__(
        self, ask: Callable[[], Sequence[RemoteUsage]], every_seconds: float
    ) -> None:
        self._ask = ask
        self._every_seconds = every_seconds
        self._said: Sequence[RemoteUsage] = ()
        self._asked_at = float("-inf")
        self._said_at = float(
            "-inf"
        )  # when they were asked for the known answers
        self._asking: threading.Thread | None = None

    @property
    def age_seconds(self) -> float:
        """How long ago the known answers were asked for."""
        return machine_seconds() - self._said_at

    def known(self, patience_seconds: float) -> Sequence[RemoteUsage]:
        """Return the last answers; ask again if `every_seconds` are over, and wait so long for the
        new ones.
        """

        def ask() -> None:
            asked_at = machine_seconds()
            said = self._ask()
            self._said_at = asked_at
            self._said = said

        asks = self._asking is not None and self._asking.is_alive()
        if not asks and machine_seconds() - self._asked_at > self._every_seconds:
            self._asked_at = machine_seconds()
            self._asking = threading.Thread(
                target=ask, name="pagoda-remotes", daemon=True
            )
            if begin(self._asking):
                self._asking.join(patience_seconds)
        return self._said


class StoreReading(NamedTuple):
    """The statistics of a store, and when it was read: `machine_seconds()`."""

    read_at: float
    stats: StoreStats


@dataclass(eq=False)
class Overview:
    """Makes the overviews of one server, and keeps its history. Used by one thread at a time.

    Args:
        ledgers: returns the present stores, host tiers first; raises nothing.
        remotes: returns the answers of the remote tiers; it may wait, because it runs on a separate
            thread, at most every half minute.
        unopened: returns why other stores cannot be opened, by directory.
        settings: constant names and values, for people.
        gpu_price: the price per hour of an engine's GPUs, in any currency; None: not known.
        tokenizer: whether prompts may be text.
        login: whether the page needs a login, which can be ended.
    """

    ledgers: Callable[[], Sequence[Ledger]]
    remotes: Callable[[], Sequence[RemoteUsage]] = tuple
    _: KW_ONLY
    unopened: Callable[[], Mapping[Path, str]] = dict
    settings: Sequence[tuple[str, str]] = ()
    gpu_price: float | None = None
    tokenizer: bool = False
    login: bool = False

    def __post_init__(self) -> None:
        self._asked = LatelyAsked(self.remotes, _REMOTES_SECONDS)
        self._read: dict[StoreId, StoreReading] = {}
        self._started_at = machine_seconds()
        self.history = History()

    def look(self) -> None:
        """Read only the counters of all stores, and add them to the history."""
        deadline = Deadline(_STORES_SECONDS)
        counters = {}
        failed = []
        for ledger in self.ledgers():
            try:
                counters[_id(ledger)] = admin.counters(ledger, deadline.last())
            except PagodaError:
                failed.append(_id(ledger))
        self.history.add(machine_seconds(), time.time(), counters, failed)

    def take(self) -> dict[str, object]:
        """Read all stores and return the overview, with the span since the last look (None if
        there is none).

        A store that cannot be read now keeps the figures of its last reading; `troubles` says so,
        and since when.
        """
        troubles, failed = self._read_stores()
        now = machine_seconds()
        wall = time.time()
        fresh = {
            one: reading.stats.counters
            for one, reading in self._read.items()
            if one not in failed
        }
        span = self.history.add(now, wall, fresh, failed)
        recent = self.history.recent(now)
        stores = [reading.stats for reading in self._read.values()]
        remotes = self._asked.known(_REMOTES_PATIENCE_SECONDS)
        totals: Tally[str] = Tally()
        for store in stores:
            totals.update(store.counters)
        shown = {
            name: totals[name]
            for name in ("lookups", "hits", "asked_tokens", "hit_tokens")
        }
        meters = [meter for store in stores for meter in store.meters]
        namespaces = _namespaces(stores)
        pins = _pins(stores)
        return {
            "version": pagoda.__version__,
            "machine": socket.gethostname(),
            "time": wall,
            "machine_seconds": now,
            "started": self._started_at,
            "troubles": troubles,
            "tiers": [
                *_local_tiers(self._read, failed, totals, recent, now),
                *_remote_tiers(
                    remotes,
                    totals["hit_tokens_remote"],
                    self._asked.age_seconds,
                ),
            ],
            "totals": shown,
            "models": usage_by_model(meters),
            "tenants": usage_by_tenant(meters),
            "saved": _saved(meters, totals["hit_tokens"], self.gpu_price),
            "rates": _rates(recent, stores),
            "misses": by_reason(totals, "miss_"),
            "drops": by_reason(totals, "drop_"),
            "requests": _requests(stores),
            "namespaces": namespaces[:MOST_NAMESPACES],
            "more_namespaces": max(0, len(namespaces) - MOST_NAMESPACES),
            "pins": pins[:MOST_PINS],
            "more_pins": max(0, len(pins) - MOST_PINS),
            "settings": [*self.settings, *_setup(stores)],
            "tokenizer": self.tokenizer,
            "login": self.login,
            "sample": None if span is None else span.as_json(),
        }

    def _read_stores(self) -> tuple[list[str], set[StoreId]]:
        """Read all stores into `_read`; return what is wrong, and which could not be read."""
        deadline = Deadline(_STORES_SECONDS)
        before = self._read
        read = {}
        troubles = []
        failed = set()
        for ledger in self.ledgers():
            one = _id(ledger)
            try:
                stats = StoreStats.of(ledger, deadline.last())
                read[one] = StoreReading(machine_seconds(), stats)
            except PagodaError as trouble:
                failed.add(one)
                known = before.get(one)
                text = str(trouble)
                if known is not None:
                    read[one] = known
                    age = machine_seconds() - known.read_at
                    text += f"; its figures are {age:,.0f} s old"
                troubles.append(text)
        for directory, text in self.unopened().items():
            troubles.append(f"{directory}: in no figure: {text}")
        self._read = read
        return troubles, failed


def _id(ledger: Ledger) -> StoreId:
    return StoreId(ledger.directory, ledger.store_id)


def _local_tiers(
    read: Mapping[StoreId, StoreReading],
    failed: Collection[StoreId],
    totals: Mapping[str, int],
    recent: RecentActivity,
    now: float,
) -> list[dict[str, object]]:
    """Return one row for each kind of tier that this machine has, from the top down.

    Beside its sums a row has its single stores, the fullest first: a sum hides a store that is full
    and evicts.
    """
    rows = []
    names = dict(
        zip(
            read,
            store_names(
                [(one.stats.tier, one.stats.directory) for one in read.values()]
            ),
            strict=True,
        )
    )
    for kind in TIER_KINDS:
        own = {
            one: reading
            for one, reading in read.items()
            if reading.stats.tier == kind
        }
        if not own:
            continue
        stores = [
            _store_row(reading, recent, one, now, one in failed, names[one])
            for one, reading in own.items()
        ]
        stores.sort(key=_fullness, reverse=True)
        rows.append(
            {
                "kind": kind,
                "title": _TITLES[kind],
                "chunks": sum(one.stats.gauges["ready"] for one in own.values()),
                "used_bytes": sum(one.stats.used_bytes for one in own.values()),
                "size_bytes": sum(one.stats.size_bytes for one in own.values()),
                "most_bytes": sum(one.stats.grown_bytes for one in own.values()),
                "hit_tokens": totals[f"hit_tokens_{kind}"],
                "address": "",
                "trouble": "",
                "stores": stores[:MOST_STORES],
                "more_stores": max(0, len(stores) - MOST_STORES),
            }
        )
    return rows


def _store_row(
    reading: StoreReading,
    recent: RecentActivity,
    store: StoreId,
    now: float,
    is_failing: bool,
    name: str,
) -> dict[str, object]:
    """Return one store of a tier, under the name that all commands give it.

    `read_seconds_ago` is None if it was read just now.
    """
    stats = reading.stats
    counts = recent.by_store.get(store)
    models = [
        row.fields.get("model", "") for row in stats.namespaces if row.chunks
    ]
    known = counts is not None and recent.seconds > 0
    return {
        "name": name,
        "directory": str(stats.directory),
        "models": list(dict.fromkeys(filter(None, models)))[:_MODELS_OF_STORE],
        "chunks": stats.gauges["ready"],
        "used_bytes": stats.used_bytes,
        "size_bytes": stats.size_bytes,
        "most_bytes": stats.grown_bytes,
        "evicted_per_second": counts.get("evicted_chunks", 0) / recent.seconds
        if known and counts is not None
        else None,
        "read_seconds_ago": now - reading.read_at if is_failing else None,
    }


def _fullness(row: Mapping[str, object]) -> tuple[float, float]:
    used = cast("int", row["used_bytes"])
    size = cast("int", row["most_bytes"])
    evicted = cast("float | None", row["evicted_per_second"])
    return (used / size if size else 0.0, evicted or 0.0)


def _remote_tiers(
    remotes: Sequence[RemoteUsage], hit_tokens: int, age_seconds: float
) -> list[dict[str, object]]:
    """Return one row for each remote tier. Engines count the hits of all remote tiers together."""
    return [
        {
            "kind": "remote",
            "title": remote.tier,
            "chunks": None,
            "used_bytes": remote.used_bytes,
            "size_bytes": remote.limit_bytes,
            "hit_tokens": hit_tokens if len(remotes) == 1 else None,
            "address": remote.address,
            "trouble": remote.error,
            "answered_seconds_ago": age_seconds,
        }
        for remote in remotes
    ]


def _rates(
    recent: RecentActivity, stores: Sequence[StoreStats]
) -> dict[str, object]:
    """Return what happened in the last minute, of which `seconds` were looked at."""
    counts = recent.counts
    return {
        "seconds": recent.seconds,
        **activity(counts),
        "load_seconds_half": load_seconds_within(counts, 0.5),
        "load_seconds_99": load_seconds_within(counts, 0.99),
        "drops": by_reason(counts, "drop_"),
        "waiting_chunks": sum(store.gauges["waiting_chunks"] for store in stores),
        "being_written": sum(store.gauges["reserved"] for store in stores),
    }


def _saved(
    meters: Sequence[Meter], hit_tokens: int, gpu_price: float | None
) -> dict[str, object]:
    """Return what the loads saved: those of each model at the speed that its engines reported."""
    saved = saved_time(meters)
    if not saved.tokens:
        remedy = (
            "no engine has reported its speed; your own engine must call cache.observe_prefill"
            if hit_tokens
            else "nothing has hit yet"
        )
        unknown = dict.fromkeys(
            ("engine_seconds", "first_token_seconds", "money")
        )
        return unknown | dict.fromkeys(
            ("engine_words", "first_token_words", "money_words"), remedy
        )
    compute_seconds = saved.compute_seconds
    rest = (
        f"; without {saved.unmeasured_tokens:,} tokens of engines that report no speed"
        * bool(saved.unmeasured_tokens)
    )
    money_words = (
        "start the server with --gpu-price"
        if gpu_price is None
        else f"at {gpu_price:g} per hour of an engine"
    )
    speed = (
        f"{saved.tokens:,} tokens at {saved.tokens / compute_seconds:,.0f} tokens/s, as "
        f"engines reported{rest}"
    )
    return {
        "engine_seconds": compute_seconds,
        "engine_words": f"an estimate: {speed}",
        "first_token_seconds": saved.seconds,
        "first_token_words": "an estimate: the time to compute the loaded tokens, minus the time to load them",  # noqa: E501
        "money": compute_seconds / 3600 * gpu_price
        if gpu_price is not None
        else None,
        "money_words": money_words,
    }


def _namespaces(stores: Sequence[StoreStats]) -> list[dict[str, object]]:
    """Return the namespaces of all stores, largest first. `fields` has only a digest of a salt."""
    fields: dict[bytes, dict[str, str]] = {}
    chunks: dict[bytes, Tally[str]] = {}
    size: Tally[bytes] = Tally()
    for store in stores:
        for row in store.namespaces:
            fields[row.root] = row.fields or fields.get(row.root, {})
            chunks.setdefault(row.root, Tally())[store.tier] += row.chunks
            size[row.root] += row.chunks * store.slot_bytes
    return [
        {
            "namespace": root.hex(),
            "fields": fields[root],
            "chunks": {
                tier: count for tier, count in chunks[root].items() if count
            },
            "bytes": size[root],
        }
        for root in sorted(fields, key=lambda root: -size[root])
    ]


def _requests(stores: Sequence[StoreStats]) -> list[dict[str, object]]:
    """Return the last requests, newest first, with the known fields of their namespaces (only a
    digest of a salt).
    """
    last = sorted(
        chain.from_iterable(store.requests for store in stores),
        key=lambda one: -one.time,
    )
    fields = {
        row.root[:NAMESPACE_BYTES]: row.fields
        for store in stores
        for row in store.namespaces
    }
    return [
        {
            **one._asdict(),
            "namespace": one.namespace.hex(),
            "fields": fields.get(one.namespace, {}),
        }
        for one in last[:MOST_REQUESTS]
    ]


def _pins(stores: Sequence[StoreStats]) -> list[dict[str, object]]:
    """Return the pinned chunks by owner and tier, most first."""
    rows = [
        (chunks, store.tier, owner)
        for store in stores
        for owner, chunks in store.pins.items()
    ]
    rows.sort(key=lambda row: -row[0])
    return [
        {"tier": tier, "owner": owner, "chunks": chunks}
        for chunks, tier, owner in rows
    ]


def _setup(stores: Sequence[StoreStats]) -> list[tuple[str, str]]:
    rows = [(f"Store ({store.tier})", str(store.directory)) for store in stores]
    if stores:
        rows.append(
            (
                "Processes",
                f"at most {max(store.gauges['members'] for store in stores)} use one store",
            )
        )
    return rows
