"""The connector's counters. vLLM passes them on to its log line and to Prometheus.

Each half counts its own work, vLLM adds both up in each step, and the process that serves metrics
gets a plain dict. An exception anywhere on this path would end the engine, so no function here
raises one: values that are not positive numbers are ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

# a second engine in one process unregisters metrics of the first, found by "vllm:"
PREFIX = "vllm:pagoda_"

COUNTERS: Mapping[str, str] = {
    "lookups": "Requests that vLLM looked up in PagodaKV.",
    "asked_tokens": (
        "Tokens that were looked up: those of the requests that were not in the engine's own "
        "cache."
    ),
    "hit_tokens_host": "Tokens found in host memory and not computed.",
    "hit_tokens_disk": "Tokens found on disk and not computed.",
    "hit_tokens_peers": "Tokens found at neighbours and not computed.",
    "hit_tokens_remote": "Tokens found in remote tiers and not computed.",
    "loaded_tokens": "Tokens loaded into the engine's KV memory.",
    "loaded_bytes": "Bytes loaded into the engine's KV memory, by all ranks.",
    "load_seconds": "Time that loads took, of all ranks.",
    "failed_loads": "Loads that failed, completely or in part; the engine computes instead.",
    "failed_load_tokens": "Tokens that failed loads left to the engine to compute.",
    "saved_chunks": "Chunks copied into host memory.",
    "saved_bytes": "Bytes copied into host memory, by all ranks.",
    "refused_chunks": "Chunks that got no slot in host memory and were not saved.",
    "unsaved_chunks": (
        "Chunks not saved because their request ended while they waited for device memory or "
        "time."
    ),
}

TIERS = ("host", "disk", "peers", "remote")  # every other tier counts as remote
_FOUND = (
    "found_tokens",
    "Tokens found and not computed, by the tier that had them.",
)
# the name of the same counts until now
_HITS = (
    "hit_tokens",
    "For one more release: use vllm:pagoda_found_tokens.",
)


class PagodaStats(KVConnectorStats):
    """Counts since the last `take`, by name. Thread-safe; a pickle has only the numbers."""

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__({})
        self._lock = threading.Lock()
        for name, number in (data or {}).items():
            self.count(name, number)

    def __reduce__(self) -> tuple[type[PagodaStats], tuple[dict[str, Any]]]:
        with self._lock:
            return type(self), (dict(self.data),)

    def count(self, name: str, number: float) -> None:
        """Add to a counter; its names are those of `COUNTERS`. Numbers that are not above zero are
        ignored.
        """
        if not number > 0:
            return
        plain = float(number)  # numpy's own numbers cannot be serialised
        with self._lock:
            self.data[name] = self.data.get(name, 0) + (
                int(plain) if plain.is_integer() else plain
            )

    def take(self) -> PagodaStats | None:
        """Return the counts and start again at zero; None without counts. Only the caller has the
        result.
        """
        with self._lock:
            taken = self.data
            self.data = {}
        return PagodaStats(taken) if taken else None

    def reset(self) -> None:
        """Start again at zero."""
        with self._lock:
            self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PagodaStats:
        """Add another's counts to these, and return these."""
        for name, number in list(other.data.items()):
            self.count(name, number)
        return self

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for the log line: sums and speeds, without those that are zero."""
        sums = dict(self.data)
        line: dict[str, int | float] = {}
        if asked := sums.get("asked_tokens", 0):
            hits = sum(sums.get(f"hit_tokens_{tier}", 0) for tier in TIERS)
            line["hit_rate"] = round(hits / asked, 3)
        for name in [*COUNTERS, *sorted(sums.keys() - COUNTERS.keys())]:
            number = sums.get(name, 0)
            if name.endswith("_bytes") and number:
                line[name.removesuffix("_bytes") + "_GB"] = round(number / 1e9, 3)
            elif name == "load_seconds" and number:
                line["load_GB_per_second"] = round(
                    sums.get("loaded_bytes", 0) / number / 1e9, 2
                )
            elif number:
                line[name] = round(number, 3)
        return line


class PagodaPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each name, `vllm:pagoda_<name>_total`, with the labels that vLLM
    gives each engine.

    In addition `vllm:pagoda_found_tokens_total` has what the counters `hit_tokens_<tier>` have,
    with the label `tier`; `vllm:pagoda_hit_tokens_total` is its old name.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        self._counters: dict[str, list[dict[int, Any]]] = {
            name: [
                create_metric_per_engine(
                    self._counter(name, text, labelnames), per_engine_labelvalues
                )
            ]
            for name, text in COUNTERS.items()
        }
        for family in (_FOUND, _HITS):
            found = self._counter(*family, [*labelnames, "tier"])
            for tier in TIERS:
                values = {
                    engine: [*labels, tier]
                    for engine, labels in per_engine_labelvalues.items()
                }
                self._counters[f"hit_tokens_{tier}"].append(
                    create_metric_per_engine(found, values)
                )

    def _counter(self, name: str, text: str, labelnames: list[str]) -> Any:
        return self._counter_cls(
            name=PREFIX + name, documentation=text, labelnames=labelnames
        )

    def observe(
        self, transfer_stats_data: dict[str, Any], engine_idx: int = 0
    ) -> None:
        """Add one step's counts of an engine."""
        for name, number in transfer_stats_data.items():
            for counters in self._counters.get(name, ()):
                if (
                    number > 0
                    and (counter := counters.get(engine_idx)) is not None
                ):
                    counter.inc(number)
