"""All data of the operator's page as one dict: tiers, hits, savings, misses, namespaces, pins.

`live_feed` calls `Overview.take` on a thread, once for all readers. It calls `StoreStats.of`; all
figures come from the counters that the engines of this machine share. An unknown figure is None,
with a text that says what to do.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import pagoda
from pagoda.base.clock import Deadline
from pagoda.base.errors import PagodaError
from pagoda.base.metrics import TIER_KINDS, by_reason
from pagoda.base.signal_safe_threads import begin
from pagoda.ledger.request_meters import usage_by_model, usage_by_tenant
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from pagoda.ledger.store_stats import StoreStats

if TYPE_CHECKING:
    from pagoda.ledger import Ledger

MOST_SAMPLES = 300
MOST_NAMESPACES = 50
MOST_PINS = 50
MOST_REQUESTS = 20
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
        self._asking: threading.Thread | None = None

    def known(self, patience_seconds: float) -> Sequence[RemoteUsage]:
        """Return the last answers; ask again if `every_seconds` are over, and wait so long for the
        new ones.
        """

        def ask() -> None:
            self._said = self._ask()

        asks = self._asking is not None and self._asking.is_alive()
        if not asks and time.monotonic() - self._asked_at > self._every_seconds:
            self._asked_at = time.monotonic()
            self._asking = threading.Thread(
                target=ask, name="pagoda-remotes", daemon=True
            )
            if begin(self._asking):
                self._asking.join(patience_seconds)
        return self._said


class Sample(TypedDict):
    """The events of a period of `seconds` that ended at `time`."""

    time: float
    seconds: float
    hit_tokens: dict[str, int]  # by kind of tier


@dataclass(eq=False)
class Overview:
    """Makes the overviews of one server, and keeps the last samples. Used by one thread at a time.

    Args:
        ledgers: returns the present stores, host tiers first; raises nothing.
        remotes: returns the answers of the remote tiers; it may wait, because it runs on a separate
            thread, at most every half minute.
        settings: constant names and values, for people.
        gpu_price: the price per hour of an engine's GPUs, in any currency; None: not known.
        tokenizer: whether prompts may be text.
        login: whether the page needs a login, which can be ended.
    """

    ledgers: Callable[[], Sequence[Ledger]]
    remotes: Callable[[], Sequence[RemoteUsage]] = tuple
    _: KW_ONLY
    settings: Sequence[tuple[str, str]] = ()
    gpu_price: float | None = None
    tokenizer: bool = False
    login: bool = False

    def __post_init__(self) -> None:
        self._asked = LatelyAsked(self.remotes, _REMOTES_SECONDS)
        self._before: tuple[float, dict[Path, StoreStats]] | None = None
        self.history: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def take(self) -> dict[str, object]:
        """Read all stores and return the overview, with the sample since the last call (None at
        first).
        """
        ledgers = self.ledgers()
        now = time.time()
        deadline = Deadline(_STORES_SECONDS)
        stores = []
        troubles = list[str]()
        for ledger in ledgers:
            try:
                stores.append(StoreStats.of(ledger, deadline.last()))
            except PagodaError as trouble:
                troubles.append(str(trouble))
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
            "time": now,
            "troubles": troubles,
            "tiers": [
                *_local_tiers(stores, totals),
                *_remote_tiers(remotes, totals["hit_tokens_remote"]),
            ],
            "totals": shown,
            "models": usage_by_model(meters),
            "tenants": usage_by_tenant(meters),
            "saved": _saved(stores, self.gpu_price),
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
            "sample": self._sample(now, stores),
        }

    def _sample(self, now: float, stores: Sequence[StoreStats]) -> Sample | None:
        """Return and keep the sample since the last call; stores that are new since then add
        nothing.
        """
        known = {store.directory: store for store in stores}
        before = self._before
        self._before = (now, known)
        if before is None or now <= before[0]:
            return None
        changed: Tally[str] = Tally()
        for directory, old in before[1].items():
            if directory in known:
                fresh = known[directory].counters
                changed.update(
                    {
                        name: max(0, fresh[name] - count)
                        for name, count in old.counters.items()
                    }
                )
        hits = {kind: changed[f"hit_tokens_{kind}"] for kind in TIER_KINDS}
        sample = Sample(time=now, seconds=now - before[0], hit_tokens=hits)
        self.history.append(sample)
        return sample


def _local_tiers(
    stores: Sequence[StoreStats], totals: Mapping[str, int]
) -> list[dict[str, object]]:
    """Return one row for each kind of tier that this machine has, from the top down."""
    return [
        {
            "kind": kind,
            "title": _TITLES[kind],
            "chunks": sum(store.gauges["ready"] for store in own),
            "used_bytes": sum(store.used_bytes for store in own),
            "size_bytes": sum(store.size_bytes for store in own),
            "hit_tokens": totals[f"hit_tokens_{kind}"],
            "address": "",
            "trouble": "",
        }
        for kind in TIER_KINDS
        if (own := [store for store in stores if store.tier == kind])
    ]


def _remote_tiers(
    remotes: Sequence[RemoteUsage], hit_tokens: int
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
        }
        for remote in remotes
    ]


def _saved(
    stores: Sequence[StoreStats], gpu_price: float | None
) -> dict[str, object]:
    """Return what the hits saved: those of each store at the speed that the engines of this store
    reported.
    """
    compute_seconds = load_seconds = 0.0
    known_tokens = unknown_tokens = 0
    for store in stores:
        count = store.counters
        if count["prefill_tokens"] and count["prefill_microseconds"]:
            known_tokens += count["hit_tokens"]
            token_seconds = (
                count["prefill_microseconds"] / 1e6 / count["prefill_tokens"]
            )
            compute_seconds += count["hit_tokens"] * token_seconds
            load_seconds += (
                sum(count[f"load_microseconds_{kind}"] for kind in TIER_KINDS)
                / 1e6
            )
        else:
            unknown_tokens += count["hit_tokens"]
    if not known_tokens:
        remedy = (
            "no engine has reported its speed; your own engine must call cache.observe_prefill"
            if unknown_tokens
            else "nothing has hit yet"
        )
        unknown = dict.fromkeys(
            ("engine_seconds", "first_token_seconds", "money")
        )
        return unknown | dict.fromkeys(
            ("engine_words", "first_token_words", "money_words"), remedy
        )
    rest = (
        f"; without {unknown_tokens:,} tokens of engines that report no speed"
        * bool(unknown_tokens)
    )
    money_words = (
        "start the server with --gpu-price"
        if gpu_price is None
        else f"at {gpu_price:g} per hour of an engine"
    )
    speed = (
        f"{known_tokens:,} tokens at {known_tokens / compute_seconds:,.0f} tokens/s, as "
        f"engines reported{rest}"
    )
    return {
        "engine_seconds": compute_seconds,
        "engine_words": f"an estimate: {speed}",
        "first_token_seconds": compute_seconds - load_seconds,
        "first_token_words": "an estimate: the time to compute the hit tokens, minus the time to load them",  # noqa: E501
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
