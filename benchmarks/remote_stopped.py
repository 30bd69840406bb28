"""The cost of a remote tier for a request: `Cache.retrieve` with a stopped (or healthy) one against
none.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cache_copies import CHUNK_TOKENS, tokens_of
from ground import NAMESPACE, Plan
from harness import Figure, race, say
from limits import pieces
from remote_ground import PATIENCE_SECONDS

from pagoda import Cache, Config, KVLayout
from pagoda.tiers import HostTier, Tier
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.transfer import BlockKV
from testbed.programs import lacking
from testbed.servers import redis_server

CHUNKS = 16  # of a prompt in host memory; as many more are not stored
PROMPTS = 8


@dataclass(frozen=True)
class Prompts:
    """Prompts whose first half is in host memory, and a destination for one of them.
    Single-threaded.
    """

    layout: KVLayout
    kv: BlockKV
    seconds: dict[str, list[float]]  # of each call, by cache

    def store(self, cache: Cache) -> None:
        """Store the first half of every prompt."""
        for number in range(PROMPTS):
            if (
                cache.store(tokens_of(number, CHUNKS), self.kv).num_chunks
                != CHUNKS
            ):
                raise RuntimeError("not all was stored")

    def retrieve(self, name: str, cache: Cache, number: int) -> None:
        """Retrieve a whole prompt; half of it is found."""
        began = time.perf_counter()
        hit = cache.retrieve(tokens_of(number % PROMPTS, 2 * CHUNKS), self.kv)
        self.seconds[name].append(time.perf_counter() - began)
        if hit.by_tier != {"host": CHUNKS * CHUNK_TOKENS}:
            raise RuntimeError(
                f"not what was stored: {hit.by_tier}, {hit.reason}, {hit.detail}"
            )


@contextmanager
def _opened(
    plan: Plan, layout: KVLayout, below: Sequence[Tier] = ()
) -> Iterator[Cache]:
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.shm
    ) as root:
        host = HostTier.open(
            layout,
            Path(root),
            2 * PROMPTS * CHUNKS * layout.slot_bytes,
            populate=False,
        )
        host.slab.populate(background=False)
        config = Config(chunk_tokens=layout.chunk_tokens, worth_it=False)
        with Cache(
            config, namespace=NAMESPACE, layout=layout, tiers=[host, *below]
        ) as cache:
            yield cache


def stopped_figures(
    plan: Plan, chunk_bytes: int, suffix: str = ""
) -> list[Figure]:
    """Race a healthy remote, then a stopped one (SIGSTOP) whose breaker is open, each against
    none.
    """
    if missing := lacking("redis-server"):
        say(f"{missing}; its figures are skipped")
        return []
    layout = KVLayout.opaque(CHUNK_TOKENS, chunk_bytes, "benchmark")
    place = pieces(chunk_bytes, 2 * CHUNKS, 1)
    whole = np.lib.stride_tricks.as_strided(
        place[0], (2 * CHUNKS, chunk_bytes), (chunk_bytes, 1)
    )
    with redis_server() as server:
        tier = RemoteTier(layout, RedisClient(server.url))
        with (
            _opened(plan, layout) as none,
            _opened(plan, layout, [tier]) as remote,
        ):
            for cache in (none, remote):
                Prompts(layout, BlockKV(whole, layout), {}).store(cache)
            remote.flush(PATIENCE_SECONDS)
            well = _figure(
                plan,
                f"retrieve_with_remote_vs_none{suffix}",
                None,
                none,
                remote,
                whole,
                layout,
            )
            server.stop()
            try:
                _rest(remote, tier, BlockKV(whole, layout))
                key = f"retrieve_with_stopped_remote_vs_none{suffix}"
                stopped = _figure(
                    plan,
                    key,
                    None if suffix else 1.1,
                    none,
                    remote,
                    whole,
                    layout,
                )
                if not tier.resting:
                    raise RuntimeError("the breaker has closed")
            finally:
                server.cont()
    return [stopped, well]


def _rest(cache: Cache, tier: RemoteTier, kv: BlockKV) -> None:
    """Ask for chunks that no tier has until the breaker opens."""
    until = time.monotonic() + PATIENCE_SECONDS
    number = PROMPTS
    while not tier.resting:
        if time.monotonic() > until:
            raise RuntimeError("the breaker does not open")
        cache.retrieve(tokens_of(number, 2 * CHUNKS), kv)
        number += 1


def _figure(
    plan: Plan,
    key: str,
    target: float | None,
    none: Cache,
    remote: Cache,
    whole: np.ndarray,
    layout: KVLayout,
) -> Figure:
    prompts = Prompts(layout, BlockKV(whole, layout), {"remote": [], "none": []})
    runs = race(
        {
            "remote": lambda number: prompts.retrieve("remote", remote, number),
            "none": lambda number: prompts.retrieve("none", none, number),
        },
        3 * plan.rounds,
        PROMPTS,
    )
    paired = [
        ours / theirs
        for ours, theirs in zip(runs["remote"], runs["none"], strict=True)
    ]
    middle = {
        name: statistics.median(spent) * 1e6
        for name, spent in prompts.seconds.items()
    }
    longest = {name: max(spent) * 1e6 for name, spent in prompts.seconds.items()}
    note = (
        f"{middle['remote']:.0f} us against {middle['none']:.0f} us (longest "
        f"{longest['remote']:.0f} and "
        f"{longest['none']:.0f} us) a call, {CHUNKS} chunks of {layout.chunk_bytes // 1024} KiB "
        f"found, {CHUNKS} missed"
    )
    quoted = {
        f"{name}_seconds": [round(each / PROMPTS, 9) for each in spent]
        for name, spent in runs.items()
    }
    return Figure(
        key,
        statistics.median(paired),
        target,
        "times",
        quoted | {"times": paired},
        note,
    )
