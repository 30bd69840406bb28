"""The figures of a block manager for Prometheus, as a collector of prometheus-client (extra
`metrics`).

An engine makes one, registers it, and hands it `BlockManager.stats()` now and then. Calls nothing
of this package, and nothing imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        SummaryMetricFamily,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "pagoda.blocks.block_metrics needs prometheus-client: pip install 'pagodakv[metrics]'",
        name=missing.name,
    ) from None

from prometheus_client import Metric

_STATES = ("free", "cached", "in_use", "in_flight")
_TIERS = ("device", "host", "storage")
_WAYS = ("down", "up")
_GAUGES = {
    "evictable": "Blocks in the prefix tree that could be evicted now.",
    "pinned": "Prefixes that a pin keeps on the device.",
}
_COUNTERS = {
    "requests": "Requests that were admitted.",
    "hit_requests": "Those of them that found at least one block.",
    "asked_tokens": "Tokens of the prompts of these requests.",
    "evicted_blocks": "Blocks that were evicted from the device.",
    "dropped_blocks": "Blocks that were lost by it: the host did not take them.",
    "demoted_blocks": "Blocks that were copied down and are found on the host.",
    "promoted_blocks": "Blocks that were copied up and are used.",
    "cancelled_moves": "Copies down that a hit called back.",
}
_SECONDS = {
    "match_seconds": "Seconds in which waiting requests were matched.",
    "host_seconds": "Seconds of it in which the host tier was asked.",
    "fetch_seconds": "Seconds in which lower tiers were asked to load.",
}


class BlockMetrics(Collector):
    """One engine's block manager, as metrics `pagoda_blocks_...`.

    The manager is not thread-safe, so this does not call it: the scheduler's thread gives it the
    figures, and any thread may collect the last ones.

    Example:
        >>> from pagoda.blocks import BlockManager
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> registry = CollectorRegistry()
        >>> metrics = BlockMetrics()
        >>> registry.register(metrics)
        >>> metrics.update(BlockManager(num_blocks=8, block_tokens=4).stats())
        >>> 'pagoda_blocks{state="free"} 8.0' in generate_latest(registry).decode()
        True
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        """Have no figures yet.

        Args:
            labels: on every sample, to tell the managers of one process apart, such as
                {"engine": "0"}.
        """
        self._labels = dict(labels or {})
        self._stats: Mapping[str, int | float] = {}

    def update(self, stats: Mapping[str, int | float]) -> None:
        """Keep these figures, of `BlockManager.stats`. Cheap; any thread."""
        self._stats = dict(stats)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric; none before the first `update`. Any thread."""
        stats = self._stats
        if not stats:
            return
        names = list(self._labels)
        values = list(self._labels.values())
        blocks = GaugeMetricFamily(
            "pagoda_blocks",
            "Device blocks by state, which add up to all: free, cached in the prefix tree, in use "
            "by one request, in_flight in copies.",
            labels=[*names, "state"],
        )
        for state in _STATES:
            blocks.add_metric([*values, state], stats[state])
        yield blocks
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pagoda_blocks_{name}", text, labels=names)
            gauge.add_metric(values, stats[name])
            yield gauge
        for name, text in (_COUNTERS | _SECONDS).items():
            counter = CounterMetricFamily(
                f"pagoda_blocks_{name.removesuffix('_blocks')}",
                text,
                labels=names,
            )
            counter.add_metric(values, stats[name])
            yield counter
        found = CounterMetricFamily(
            "pagoda_blocks_found_tokens",
            "Tokens that admitted requests found; tier: where, device, host or storage.",
            labels=[*names, "tier"],
        )
        for tier in _TIERS:
            found.add_metric([*values, tier], stats[f"hit_tokens_{tier}"])
        yield found
        yield from self._copies(stats, names, values)

    def _copies(
        self,
        stats: Mapping[str, int | float],
        names: list[str],
        values: list[str],
    ) -> Iterator[Metric]:
        labels = [*names, "direction"]
        copied = CounterMetricFamily(
            "pagoda_blocks_copied",
            "Blocks copied between device and host; direction: down to the host, or up.",
            labels=labels,
        )
        seconds = SummaryMetricFamily(
            "pagoda_blocks_copy_seconds",
            "Seconds from a plan to the report of its last rank, of the plans that were copied at "
            "least in part.",
            labels=labels,
        )
        for way in _WAYS:
            copied.add_metric([*values, way], stats[f"{way}_blocks"])
            seconds.add_metric(
                [*values, way],
                count_value=int(stats[f"{way}_moves"]),
                sum_value=stats[f"{way}_seconds"],
            )
        yield copied
        yield seconds
