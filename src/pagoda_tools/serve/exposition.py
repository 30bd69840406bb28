"""Prometheus' exposition of the stores of a machine: `pagoda stats --prometheus` and `GET /metrics`
of `pagoda serve`.

`FAMILIES` is the interface: dashboards and alert rules name these metrics, so names do not change.
`make docs` writes docs/reference/metrics.md from it. It needs prometheus-client (extra `metrics`),
and never waits.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pagoda.base.metrics import LOAD_BUCKETS, TIER_KINDS, Reason
from pagoda.ledger.request_meters import (
    MOST_SHOWN,
    OTHER,
    Meter,
    saved_seconds,
    token_seconds,
)
from pagoda.ledger.store_stats import StoreStats
from pagoda.tiers.remote.store_client import Usage

MOST_NAMESPACES = 50
"""The number of namespaces with a separate series: those with most chunks. The others are counted
as "other".
"""
MOST_PAIRS = 100
"""The number of pairs of a model and a tenant with a separate series: those with most requested
tokens. The others are counted as the tenant "other".
"""
MODEL_CHARS = 80
"""The longest part of a model's name in a label."""

COUNTED: Mapping[str, str] = {
    "lookups": "Calls of `lookup` and `retrieve` that were counted.",
    "hits": "Calls that found at least one chunk.",
    "asked_tokens": "Tokens that all these calls requested.",
    "hit_tokens": "Tokens that these calls found; tier: of the store that counts. For one more release: use pagoda_found_tokens.",  # noqa: E501
    "approximate_hit_tokens": "Tokens that were found in a cache with a lossy codec: none is certainly exact.",  # noqa: E501
    "hit_tokens_host": "Tokens found in host memory.",
    "hit_tokens_disk": "Tokens found on the local disk.",
    "hit_tokens_remote": "Tokens found in a remote tier.",
    "stored_chunks": "Chunks written to this tier.",
    "stored_bytes": "Bytes of the written chunks.",
    "loaded_chunks": "Chunks read from this tier.",
    "loaded_bytes": "Bytes of the read chunks.",
    "evicted_chunks": "Chunks evicted by the policy.",
    "removed_chunks": "Chunks removed on request, by `remove` or `clear`.",
    "reaped_chunks": "Reservations of dead processes that other processes removed.",
    "failed_checks": "Chunks whose bytes or entry were damaged. No such chunk was served.",
    "hint_write_failures": (
        "Failed writes of a disk store's ranks and speeds to its disk. No chunk depends on "
        "them."
    ),
    "growth_refused_filesystem": "Pieces that a host store that grows did not get: its file system was full.",  # noqa: E501
    "growth_refused_cgroup": "Pieces that a host store that grows did not get: its cgroup had no memory to spare.",  # noqa: E501
    "growth_failures": "Pieces that a store did not get for another reason, which is logged.",
    "growth_refused_machine": "Pieces that a host store that grows did not get: the machine had no memory to spare.",  # noqa: E501
    "hints_accepted": "Request hints that were accepted.",
    "hints_clipped": "Request hints that were accepted up to a limit.",
    "hints_refused": "Request hints that were refused; `Cache.stats` says why.",
    "prefill_tokens": "Tokens that engines computed, as they reported with the time that it took.",
}
"""The help of each counter. Counters of reasons and load times are not here: their families have
the help.
"""

_GAUGES = {
    "slots": "Slots of the store; each has space for one chunk.",
    "free": "Slots without a chunk.",
    "reserved": "Slots that a chunk is being written into.",
    "ready": "Slots with a chunk that can be found.",
    "unscanned": "Slots of a rebuilt store whose header is still to be read.",
    "unbacked": "Slots that have no memory or disk space at present.",
    "members": "Processes that have the store open, without the one that reads this.",
    "pinned": "Chunks that a pin keeps from eviction.",
    "waiting_chunks": (
        "Chunks that wait in the queues of living processes to be written to the tiers below."
    ),
    "leased": "Chunks that a lease keeps from eviction for a while.",
    "allocated_bytes": "Memory or disk space that all files of the store take now.",
    "most_bytes": "What they take at most, when the store has grown to its size.",
    "grown_bytes": "Bytes of the store's slots when it has grown to its size, beside those of its root.",  # noqa: E501
    "hint_bytes": "Memory that a store on disk takes for ranks, ghosts and counters, beside host_size.",  # noqa: E501
    "locked_bytes": "Memory that one process keeps locked for the tables of a store on disk.",
}


class MetricFamily(NamedTuple):
    """One metric of Prometheus; the name of a counter is without the `_total` of its samples."""

    name: str
    kind: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    help: str


def _counter(name: str, labels: tuple[str, ...], text: str) -> MetricFamily:
    return MetricFamily(f"pagoda_{name}", "counter", labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> MetricFamily:
    return MetricFamily(f"pagoda_{name}", "gauge", labels, text)


_STORE = ("tier", "store")
_FOUND = _counter(
    "found_tokens",
    _STORE,
    (
        "Tokens that calls found; tier: where, host, disk or remote; store: the one that counts. "
        "Has the meaning of vllm:pagoda_found_tokens, for all engines of the machine."
    ),
)
_HITS_BY_TIER = _counter(
    "hit_tokens_by_tier",
    _STORE,
    "Tokens found; tier: where. For one more release: use pagoda_found_tokens.",
)
_MISSES = _counter(
    "misses",
    (*_STORE, "reason"),
    "Calls that got fewer tokens than they asked for.",
)
_DROPS = _counter("drops", (*_STORE, "reason"), "Chunks that were not stored.")
_LOADS = MetricFamily(
    "pagoda_load_seconds",
    "histogram",
    _STORE,
    (
        "Seconds of a call that loaded from a kind of tier, with the copy to the engine; tier: "
        "host, "
        "disk or remote."
    ),
)
_PREFILLS = _counter(
    "prefill_seconds",
    _STORE,
    "Seconds in which engines computed these prefill tokens.",
)
_NAMESPACES = _gauge(
    "namespace_chunks",
    (*_STORE, "namespace", "model"),
    (
        f"Chunks of a namespace; all but the {MOST_NAMESPACES} largest namespaces together are "
        '"other".'
    ),
)
_PAIR = ("store", "model", "tenant")
_USAGE = {
    "lookups": _counter(
        "usage_lookups",
        _PAIR,
        (
            "Calls of lookup and retrieve, by model and tenant. Tenant: the start of a digest of "
            "the salt; none: without a salt; other: not known, or beyond the bounds."
        ),
    ),
    "hits": _counter(
        "usage_hits", _PAIR, "Those of them that found at least one chunk."
    ),
    "asked_tokens": _counter(
        "usage_asked_tokens", _PAIR, "Tokens that they requested."
    ),
    "loaded_tokens": _counter(
        "usage_loaded_tokens",
        _PAIR,
        "Tokens that were copied into the memory of engines.",
    ),
    "load_seconds": _counter(
        "usage_load_seconds", _PAIR, "Seconds of these loads."
    ),
    "prefill_tokens": _counter(
        "usage_prefill_tokens", _PAIR, "Tokens that engines computed."
    ),
    "prefill_seconds": _counter(
        "usage_prefill_seconds", _PAIR, "Seconds in which they did."
    ),
}
_USAGE_FOUND = _counter(
    "usage_found_tokens",
    (*_PAIR, "tier"),
    "Tokens that they found; tier: where, host, disk or remote.",
)
_USAGE_SAVED = _gauge(
    "usage_saved_seconds",
    _PAIR,
    (
        "An estimate: the loaded tokens at the speed at which engines of the model computed, less "
        "the seconds of the loads. Absent if no engine of the model reports its speed."
    ),
)
_READABLE = _gauge(
    "store_readable", ("store",), "1 if the store could be read, 0 if not."
)
_REACHABLE = _gauge(
    "remote_reachable", ("tier",), "1 if the remote tier answered, 0 if not."
)
_USED = _gauge(
    "remote_used_bytes",
    ("tier",),
    "Bytes that the server of the remote tier uses, if it says so.",
)
_LIMIT = _gauge(
    "remote_limit_bytes", ("tier",), "Bytes that it may use, if it has a limit."
)
_EVENTS = _counter(
    "serve_events",
    ("event",),
    "Chunks sent, finds, puts by outcome and the like.",
)
_SENT = _counter(
    "serve_sent_bytes", (), "Bytes of the chunks that pagoda serve sent."
)
_SLOT_BYTES = _gauge("slot_bytes", _STORE, "Bytes of one slot.")
_COUNTER_FAMILIES = {
    name: _counter(name, _STORE, text.replace("`", ""))
    for name, text in COUNTED.items()
    if not name.startswith("hit_tokens_")
}
_GAUGE_FAMILIES = {
    name: _gauge(name, _STORE, text) for name, text in _GAUGES.items()
}

FAMILIES: tuple[MetricFamily, ...] = (
    *_COUNTER_FAMILIES.values(),
    _FOUND,
    _HITS_BY_TIER,
    _MISSES,
    _DROPS,
    _LOADS,
    _PREFILLS,
    *_GAUGE_FAMILIES.values(),
    _SLOT_BYTES,
    _NAMESPACES,
    *_USAGE.values(),
    _USAGE_FOUND,
    _USAGE_SAVED,
    _READABLE,
    _REACHABLE,
    _USED,
    _LIMIT,
    _EVENTS,
    _SENT,
)


@dataclass(frozen=True)
class Exposition(Collector):
    """The data of one exposition, as a collector of prometheus-client."""

    stores: Sequence[StoreStats]
    unreadable: Sequence[str] = ()  # directories of stores that could not be read
    # by tier; None: it did not answer
    remotes: Mapping[str, Usage | None] = field(default_factory=dict)
    # the counts of `pagoda serve` since its start
    served: Mapping[str, int] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Yield each family that has samples."""
        return (metric for metric in _metrics(self) if metric.samples)


def exposition(found: Exposition, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition and its media type: the one that `accept` (HTTP's header) prefers, by
    default text.
    """
    encode, media_type = choose_encoder(accept)
    return encode(found), media_type


def _metrics(found: Exposition) -> Iterator[Metric]:
    yield from _counters(found.stores)
    yield _loads(found.stores)
    for name, family in _GAUGE_FAMILIES.items():
        yield _metric(
            family,
            [(_place(store), store.gauges[name]) for store in found.stores],
        )
    yield _metric(
        _SLOT_BYTES, [(_place(store), store.slot_bytes) for store in found.stores]
    )
    yield _metric(_NAMESPACES, _namespaces(found.stores).items())
    yield from _usage(found.stores)
    readable = [((str(store.directory),), 1) for store in found.stores]
    yield _metric(
        _READABLE,
        [*readable, *(((directory,), 0) for directory in found.unreadable)],
    )
    yield from _remotes(found.remotes)
    events = {
        event: count
        for event, count in found.served.items()
        if event != "sent_bytes"
    }
    yield _metric(_EVENTS, [((event,), count) for event, count in events.items()])
    sent = found.served.get("sent_bytes")
    yield _metric(_SENT, [] if sent is None else [((), sent)])


def _place(store: StoreStats) -> tuple[str, str]:
    return store.tier, str(store.directory)


def _counters(stores: Sequence[StoreStats]) -> Iterator[Metric]:
    for name, family in _COUNTER_FAMILIES.items():
        yield _metric(
            family, [(_place(store), store.counters[name]) for store in stores]
        )
    seconds = [
        (_place(store), store.counters["prefill_microseconds"] / 1e6)
        for store in stores
    ]
    yield _metric(_PREFILLS, seconds)
    by_tier = [
        ((kind, str(store.directory)), store.counters[f"hit_tokens_{kind}"])
        for store in stores
        for kind in TIER_KINDS
    ]
    yield _metric(_FOUND, by_tier)
    yield _metric(_HITS_BY_TIER, by_tier)
    for family, prefix in ((_MISSES, "miss_"), (_DROPS, "drop_")):
        by_reason = [
            ((*_place(store), str(reason)), store.counters[f"{prefix}{reason}"])
            for store in stores
            for reason in Reason
        ]
        yield _metric(family, by_reason)


def _loads(stores: Sequence[StoreStats]) -> Metric:
    metric = HistogramMetricFamily(_LOADS.name, _LOADS.help, labels=_LOADS.labels)
    for store in stores:
        for kind, columns in LOAD_BUCKETS.items():
            sums = accumulate(
                store.counters[column] for column in columns.values()
            )
            buckets = [
                ("+Inf" if edge == "inf" else edge, total)
                for edge, total in zip(columns, sums, strict=True)
            ]
            seconds = store.counters[f"load_microseconds_{kind}"] / 1e6
            metric.add_metric((kind, str(store.directory)), buckets, seconds)
    return metric


def _namespaces(stores: Sequence[StoreStats]) -> Mapping[tuple[str, ...], int]:
    """Return the chunks by labels: those of the largest namespaces over all stores, and of all
    others together.
    """
    total: Tally[bytes] = Tally()
    for store in stores:
        total.update({row.root: row.chunks for row in store.namespaces})
    largest = {
        root for root, chunks in total.most_common(MOST_NAMESPACES) if chunks
    }
    found: Tally[tuple[str, ...]] = Tally()
    for store in stores:
        for row in store.namespaces:
            own = (row.root.hex()[:12], row.fields.get("model", "")[:MODEL_CHARS])
            if row.chunks:
                found[
                    *_place(store),
                    *(own if row.root in largest else ("other", "")),
                ] += row.chunks
    return found


def _usage(stores: Sequence[StoreStats]) -> Iterator[Metric]:
    """Yield what each store counted by model and tenant."""
    everything = [meter for store in stores for meter in store.meters]
    speeds = token_seconds(everything)
    bounded = _bounded(everything)
    counts: dict[str, dict[tuple[str, ...], float]] = {
        name: {} for name in _USAGE
    }
    found: Tally[tuple[str, ...]] = Tally()
    saved: dict[tuple[str, ...], float] = {}
    for store in stores:
        for meter in store.meters:
            own = meter.counts
            labels = (str(store.directory), *bounded[meter.model, meter.tenant])
            for name, by_labels in counts.items():
                by_labels[labels] = by_labels.get(labels, 0) + _counted(own, name)
            for kind in TIER_KINDS:
                found[*labels, kind] += own[f"hit_tokens_{kind}"]
            if (sooner := saved_seconds(meter, speeds)) is not None:
                saved[labels] = saved.get(labels, 0.0) + sooner
    for name, family in _USAGE.items():
        yield _metric(family, counts[name].items())
    yield _metric(_USAGE_FOUND, found.items())
    yield _metric(_USAGE_SAVED, saved.items())


def _counted(counts: Mapping[str, int], name: str) -> float:
    """Return one count of a meter, times in seconds."""
    if name.endswith("_seconds"):
        return counts[name.replace("_seconds", "_microseconds")] / 1e6
    return counts[name]


def _bounded(meters: Iterable[Meter]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the model and the tenant that each pair is shown as."""
    asked: Tally[tuple[str, str]] = Tally()
    by_model: Tally[str] = Tally()
    for meter in meters:
        tokens = meter.counts["asked_tokens"]
        asked[meter.model, meter.tenant] += tokens
        by_model[meter.model] += tokens
    models = {model for model, _ in by_model.most_common(MOST_SHOWN)}
    largest = {pair for pair, _ in asked.most_common(MOST_PAIRS)}
    shown = {}
    for model, tenant in asked:
        kept = model if model in models else OTHER
        own = (model, tenant) in largest and kept == model
        shown[model, tenant] = (kept, tenant if own else OTHER)
    return shown


def _remotes(remotes: Mapping[str, Usage | None]) -> Iterator[Metric]:
    yield _metric(
        _REACHABLE,
        [((tier,), int(usage is not None)) for tier, usage in remotes.items()],
    )
    for family, size in ((_USED, "used_bytes"), (_LIMIT, "limit_bytes")):
        sizes = {
            tier: getattr(usage, size, None) for tier, usage in remotes.items()
        }
        yield _metric(
            family,
            [
                ((tier,), value)
                for tier, value in sizes.items()
                if value is not None
            ],
        )


def _metric(
    family: MetricFamily, samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
