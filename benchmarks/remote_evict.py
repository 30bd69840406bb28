"""What a full Redis keeps: lives that rank chunks against recency: `python
benchmarks/remote_evict.py [--json]`.

Two servers of the same memory and the same `maxmemory-samples` get the same requests, each in turn:
one evicts by `allkeys-lru`, the other by `volatile-ttl` with `evict=ttl`. Both are used through
whole remote tiers. A request looks its chunks up, loads the leading ones that are there, and stores
the others. Counted after the first quarter of the
requests: `hits`, the share of the chunks that were loaded, and `reachable`, the share of the kept
chunks whose chain is kept up to its head. Requests come as fast as they are served: Redis' clock
for recency ticks once a second, which is a disadvantage of `allkeys-lru` that slow traffic does not
have; `seconds` says how long a run took.

    zipf            4,000 requests for 250 prompts of 32 chunks, 40 MB of Redis
    trace_SHARE     a trace of requests with `hash_ids` (`--trace FILE`), and memory for that share
                    of its chunks
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import redis
from harness import Figure, report, say

from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers import Chunk
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import RemoteTier

# the targets
REACHABLE = 0.9
ZIPF_HITS = 1.15
TRACE_HITS = 1.0
# at the kept chunks of each server: one differs from the next by some 0.02
_LOOKS = 48
_WAIT_SECONDS = 30.0
_NAMESPACE = Namespace(model="remote_evict")
_BASE_BYTES = 2_000_000  # of a Redis with its connections
_ADDED_BYTES = 4096 + 700  # to a chunk: its page, and what Redis adds
# the ids of its chunks: an id stands for a chunk and all that come before it
Request = Sequence[int]


class Load(NamedTuple):
    """Requests, and how much memory each server has for their chunks."""

    name: str
    requests: Sequence[Request]
    chunk_bytes: int
    memory_bytes: int
    least_hits: float


def zipf(requests: int = 4000, prompts: int = 250, chunks: int = 32) -> Load:
    """Return requests for prompts of falling popularity, 1/n, drawn at random (the same in each
    run).
    """
    weights = 1 / np.arange(1, prompts + 1)
    drawn = np.random.default_rng(1).choice(
        prompts, requests, p=weights / weights.sum()
    )
    made = [
        range(int(prompt) * chunks, (int(prompt) + 1) * chunks)
        for prompt in drawn
    ]
    return Load("zipf", made, 16384, 40_000_000, ZIPF_HITS)


def traced(file: Path, share: float, requests: int) -> Load:
    """Return the first requests of a trace, and memory for a share of their chunks."""
    with file.open(encoding="utf-8") as lines:
        made = [
            json.loads(line)["hash_ids"]
            for line, _ in zip(lines, range(requests), strict=False)
        ]
    count = len({one for request in made for one in request})
    memory = _BASE_BYTES + int(share * count * (2048 + _ADDED_BYTES))
    return Load(f"trace_{share:g}", made, 2048, memory, TRACE_HITS)


class Side:
    """One server and the tier that uses it."""

    def __init__(
        self, stack: ExitStack, load: Load, policy: str, samples: int
    ) -> None:
        from testbed.servers import redis_server

        limits = (
            "--maxmemory",
            str(load.memory_bytes),
            "--maxmemory-samples",
            str(samples),
        )
        server = stack.enter_context(
            redis_server(*limits, "--maxmemory-policy", policy)
        )
        client = RedisClient(server.url, ranks=policy == "volatile-ttl")
        layout = KVLayout.opaque(1, load.chunk_bytes, "remote_evict")
        self.tier = stack.enter_context(
            closing(
                RemoteTier(
                    layout,
                    client,
                    deadline_seconds=_WAIT_SECONDS,
                    look_seconds=_WAIT_SECONDS,
                )
            )
        )
        self.tier.register(_NAMESPACE)
        self.redis = stack.enter_context(redis.Redis(port=server.port))
        self._rooms = [
            aligned(layout.slot_bytes)
            for _ in range(max(map(len, load.requests)))
        ]
        self.loaded = self.asked = 0
        self.seconds = 0.0
        self.reachable: list[float] = []

    def serve(self, keys: Sequence[bytes], counts: bool) -> None:
        """Load what is kept of a request, and store the rest."""
        begun = time.perf_counter()
        root = _NAMESPACE.root
        stamp = time.monotonic_ns()
        found = self.tier.match_prefix(keys, namespace=root)
        ends = [
            end.result()
            for end in self.tier.load(
                keys[:found], self._rooms[:found], namespace=root
            )
        ]
        loaded = next((n for n, end in enumerate(ends) if not end.ok), found)
        if rest := keys[loaded:]:
            here = self.tier.touch(
                rest, namespace=root, start=loaded, stamp=stamp
            ) or [False] * len(rest)
            chunks = [
                Chunk(key, n, 1, self._rooms[n], None, _always)
                for n, (key, present) in enumerate(
                    zip(rest, here, strict=True), loaded
                )
                if not present
            ]
            # what the tier's queue holds at once
            for at in range(0, len(chunks), 32):
                for end in self.tier.store(
                    chunks[at : at + 32], root, stamp=stamp
                ):
                    end.result()
        self.seconds += time.perf_counter() - begun
        if counts:
            self.loaded = self.loaded + loaded
            self.asked = self.asked + len(keys)

    def look(self, parents: dict[bytes, bytes | None]) -> None:
        """Note which share of the kept chunks can be reached."""
        names = [
            name
            for name in self.redis.keys("pagoda:1:*}")
            if isinstance(name, bytes)
        ]
        kept = {bytes.fromhex(name[-65:-1].decode()) for name in names}
        known: dict[bytes | None, bool] = {None: True}
        for key in kept:
            chain: list[bytes] = []
            at: bytes | None = key
            while at not in known and at in kept:
                chain.append(at)
                at = parents[at]
            good = known.get(at, False)
            known.update(dict.fromkeys(chain, good))
        self.reachable.append(sum(known[key] for key in kept) / max(1, len(kept)))

    @property
    def hits(self) -> float:
        """Return the share of the chunks that were loaded."""
        return self.loaded / self.asked

    def result(self) -> dict[str, object]:
        """Return what is quoted beside the figures."""
        return {
            "hits": round(self.hits, 4),
            "reachable": [round(each, 4) for each in self.reachable],
            "seconds": round(self.seconds, 1),
        }


def figures(load: Load, samples: int) -> Iterator[Figure]:
    """Play the requests against both servers."""
    say(
        f"{load.name}: {len(load.requests)} requests, {load.memory_bytes / 1e6:.0f} MB"
    )
    chains = [[_key(each) for each in request] for request in load.requests]
    parents = {
        key: chain[n - 1] if n else None
        for chain in chains
        for n, key in enumerate(chain)
    }
    warm = len(chains) // 4
    looks = set(np.linspace(warm, len(chains) - 1, _LOOKS).astype(int).tolist())
    with ExitStack() as stack:
        sides = {
            "lru": Side(stack, load, "allkeys-lru", samples),
            "ttl": Side(stack, load, "volatile-ttl", samples),
        }
        for number, chain in enumerate(chains):
            turn = list(sides.values())
            for side in turn if number % 2 else reversed(turn):
                side.serve(chain, number >= warm)
            if number in looks:
                for side in sides.values():
                    side.look(parents)
    lru = sides["lru"]
    ttl = sides["ttl"]
    runs = {"memory_bytes": load.memory_bytes, "maxmemory_samples": samples}
    runs |= {name: side.result() for name, side in sides.items()}
    note = f"{ttl.hits:.3f} against {lru.hits:.3f}, in {ttl.seconds:.0f} s each"
    yield Figure(
        f"{load.name}_hits_vs_lru",
        ttl.hits / max(1e-9, lru.hits),
        load.least_hits,
        "ratio",
        runs,
        note,
    )
    reach = statistics.mean(ttl.reachable)
    its = statistics.mean(lru.reachable)
    yield Figure(
        f"{load.name}_reachable",
        reach,
        REACHABLE,
        "ratio",
        {},
        f"allkeys-lru {its:.3f}",
    )


def _key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def _always() -> bool:
    return True


def main() -> int:
    """Read the command line, measure and print. Exit code 1: a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=10,
        help="maxmemory-samples of both servers",
    )
    parser.add_argument(
        "--trace", type=Path, help="a file of JSON lines with hash_ids"
    )
    parser.add_argument(
        "--shares",
        default="0.1,0.25,0.5",
        help="memory, in shares of the trace's chunks",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1200,
        help="how many of the trace's requests",
    )
    options = parser.parse_args()
    # testbed.servers starts the servers
    sys.path.insert(0, str(Path(__file__).parents[1]))
    loads = [zipf()]
    if options.trace:
        loads += [
            traced(options.trace, float(share), options.requests)
            for share in options.shares.split(",")
        ]
    found = [
        figure for load in loads for figure in figures(load, options.samples)
    ]
    report(found, options.json)
    return 0 if all(figure.ok for figure in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
