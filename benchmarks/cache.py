"""The speed of `pagoda.Cache` against this machine's limits: `python benchmarks/cache.py [--json]
[--quick]`.

Every ratio is raced in turns against its limit from limits.py; the JSON quotes every round under
"runs". What each figure means, and the last results: docs/design/benchmarks.md.
"""

from __future__ import annotations

import numpy as np
from cache_copies import (
    CHUNK_TOKENS,
    block_figures,
    dense_figures,
    disk_figures,
    opened,
    tokens_of,
)
from cache_handover import handover_figure
from ground import Part, Plan, main
from harness import MIB, Figure, race, seconds_figure
from limits import void

from pagoda import KVLayout
from pagoda.transfer import BlockKV


def lookup_figure(plan: Plan) -> list[Figure]:
    """Time `lookup` of 128k tokens with given keys, all of them hits; then while routers are told
    of them.
    """
    chunks = 128 * 1024 // CHUNK_TOKENS
    layout = KVLayout.opaque(CHUNK_TOKENS, 4096, "benchmark")
    tokens = tokens_of(0, chunks)
    with opened(plan, layout, 8 * chunks * 4096) as cache:
        cache.store(tokens, BlockKV(np.zeros((chunks, 4096), np.uint8), layout))
        keys = cache.keys(tokens)
        if cache.lookup(tokens, keys=keys).num_tokens != len(tokens):
            raise RuntimeError("not all was found")
        runs = race(
            {"lookup": lambda _: void(cache.lookup(tokens, keys=keys))},
            plan.rounds,
            20,
        )
        cache.publish_events("tcp://127.0.0.1:*")
        told = race(
            {"lookup": lambda _: void(cache.lookup(tokens, keys=keys))},
            plan.rounds,
            20,
        )
    return [
        seconds_figure(
            "lookup_128k_seconds", 0.002, [spent / 20 for spent in runs["lookup"]]
        ),
        seconds_figure(
            "lookup_128k_with_events_seconds",
            0.002,
            [spent / 20 for spent in told["lookup"]],
        ),
    ]


PARTS: dict[str, Part] = {
    "block": lambda plan: block_figures(plan, 32 * MIB, 0.95, ""),
    "block_1mib": lambda plan: block_figures(plan, MIB, 0.80, "_1mib"),
    "dense": lambda plan: dense_figures(plan, 32 * MIB, 0.80, ""),
    "dense_1mib": lambda plan: dense_figures(plan, MIB, 0.65, "_1mib"),
    "disk": disk_figures,
    "lookup": lookup_figure,
    "handover": handover_figure,
}

if __name__ == "__main__":
    main(__doc__, PARTS, {})
