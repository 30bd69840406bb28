"""What a pool of Redis still hits when a node is lost: `python benchmarks/redis_pool.py TRACE
[--away N] [--json]`.

A trace of requests (`pagoda record` writes one) is looked up and stored, request by request, on
three real servers. Then a node is killed, and comes back empty after N requests. Each figure is the
hits of some requests divided by the hits that the same requests have on three nodes that are never
lost. `runs`: what a request stores is kept together; `places`: each chunk is at its own place, as
in a pool that has no mark, and is read wherever it is.

What was lost and not asked for since then cannot hit, and that depends on how long the node is
away. So beside the figures of the next requests stands what any placement without copies can
expect: chunks that were last asked for before the loss survive on two of three nodes. The servers
have other ports in each run, thus chunks other places: how much of what is asked for next was on
the lost node differs from run to run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from pagoda.cache.request_trace import Request, read_trace
from pagoda.codec import HEADER_BYTES
from pagoda.keys import derive_keys
from pagoda.tiers.remote.redis_pool import RedisPoolClient, RedisPoolConnection
from pagoda.tiers.remote.store_client import PutRequest, PutResult

# testbed.servers starts the servers
sys.path.insert(0, str(Path(__file__).parents[1]))
from testbed.servers import Server, redis_server

NODES = 3
BEFORE = 1000
COUNTED = 300
SECONDS = 30.0
ROOT = bytes(32)
PAGE = np.zeros(HEADER_BYTES, np.uint8)
SHARED = ["the first chunk of all prompts", "the second one"]


@dataclass
class Fleet:
    """Three servers and one machine that uses them."""

    servers: list[Server]
    keeps_runs: bool
    connection: RedisPoolConnection = field(init=False)
    # leading chunks found, by request
    hits: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of look-ups, in seconds

    def __post_init__(self) -> None:
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        if not self.keeps_runs:  # a pool that had values before gets no mark
            for server in self.servers:
                server.call("SET", "another:program", "1")
        self.client = RedisPoolClient(
            f"redis+pool://{places}", look_seconds=SECONDS
        )
        self.connection = self.client.connection()
        self.connection.open(time.monotonic() + SECONDS)

    def request(self, keys: Sequence[bytes], stamp: int) -> None:
        """Look a prompt up and store what is missing."""
        until = time.monotonic() + SECONDS
        begun = time.perf_counter()
        self.hits.append(self.connection.find(ROOT, keys, until))
        self.times.append(time.perf_counter() - begun)
        present = self.connection.touch(ROOT, keys, until)
        new = [
            key for key, is_here in zip(keys, present, strict=True) if not is_here
        ]
        self.client.begin_run(new, stamp)
        claims = self.connection.claim(ROOT, new, until)
        for key, claim in zip(new, claims, strict=True):
            if claim is None:
                self.connection.put(
                    PutRequest(ROOT, key, PAGE, PAGE[:1], lambda: True), until
                )
            elif claim is not PutResult.PRESENT:
                raise RuntimeError(f"one machine alone was told {claim}")

    def found_again(self, prompts: Sequence[Sequence[bytes]]) -> int:
        """Return how many leading chunks of these prompts are found now, all together; store
        nothing.
        """
        return sum(
            self.connection.find(ROOT, keys, time.monotonic() + SECONDS)
            for keys in prompts
        )

    def wait_for(self, nodes: int) -> None:
        """Wait until the machine has noticed how many nodes there are."""
        until = time.monotonic() + SECONDS
        while len(self.client.in_use()) != nodes:
            with contextlib.suppress(Exception):
                self.connection.find(
                    ROOT, [bytes(32)], time.monotonic() + SECONDS
                )
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{len(self.client.in_use())} of {nodes} nodes are used"
                )
            time.sleep(0.05)

    def busiest(self) -> float:
        """Return the chunks of the busiest node, divided by the mean."""
        counts = [
            int(server.call("DBSIZE").strip(":\r\n")) for server in self.servers
        ]
        return max(counts) / statistics.mean(counts)


@contextlib.contextmanager
def fleet(keeps_runs: bool) -> Iterator[Fleet]:
    """Start three servers."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(NODES)]
        made = Fleet(servers, keeps_runs)
        stack.callback(made.connection.close)
        yield made


def keys_of(request: Request, shared: bool) -> list[bytes]:
    """Return the keys of a request's chunks; `shared`: after two chunks that all prompts share."""
    names = [*(SHARED if shared else []), *map(str, request.hash_ids)]
    return derive_keys(
        [
            hashlib.blake2b(name.encode(), digest_size=32).digest()
            for name in names
        ],
        ROOT,
    )


@dataclass(frozen=True)
class Plan:
    """When the node is lost and when it is back, in requests, and how many requests a figure
    counts.
    """

    before: int
    away: int
    counted: int

    @property
    def back_at(self) -> int:
        return self.before + self.away

    @property
    def end(self) -> int:
        return self.back_at + self.counted

    def after_loss(self) -> slice:
        return slice(self.before, self.before + self.counted)

    def before_return(self) -> slice:
        return slice(self.back_at - self.counted, self.back_at)

    def after_return(self) -> slice:
        return slice(self.back_at, self.end)


def expected(
    prompts: Sequence[Sequence[bytes]], lost_at: int, counted: slice
) -> float:
    """Return the share of the hits of some requests that any placement without copies can expect to
    keep.

    It is a bound of the mean over placements: one placement may have more luck.
    """
    asked_at: dict[bytes, int] = {}
    hits = 0
    endangered = 0  # hits of chunks that nobody has asked for since the loss
    for number, keys in enumerate(prompts[: counted.stop]):
        if number >= counted.start:
            for key in keys:
                if key not in asked_at:
                    break
                hits += 1
                endangered += asked_at[key] < lost_at
        asked_at.update(dict.fromkeys(keys, number))
    return 1 - endangered / NODES / max(1, hits)


def figures(
    prompts: Sequence[Sequence[bytes]], keeps_runs: bool, plan: Plan
) -> dict[str, float]:
    """Drive one fleet that loses a node and one that does not."""
    asked_again = prompts[plan.before_return()]
    with fleet(keeps_runs) as whole:
        for stamp, keys in enumerate(prompts):
            if stamp == plan.back_at:
                all_again = whole.found_again(asked_again)
            whole.request(keys, stamp)
        busiest = whole.busiest()
    with fleet(keeps_runs) as losing:
        for stamp, keys in enumerate(prompts):
            if stamp == plan.before:
                losing.servers[1].kill()
                losing.wait_for(NODES - 1)
            if stamp == plan.back_at:
                losing.servers[1].restart()
                losing.wait_for(NODES)
                again = losing.found_again(asked_again) / max(1, all_again)
            losing.request(keys, stamp)

    def share(counted: slice) -> float:
        return sum(losing.hits[counted]) / max(1, sum(whole.hits[counted]))

    return {
        "hits with a node lost": share(plan.after_loss()),
        "any placement, a node lost": expected(
            prompts, plan.before, plan.after_loss()
        ),
        "the same requests again, the node back empty": again,
        "the next requests, the node back empty": share(plan.after_return()),
        "any placement, the node back empty": expected(
            prompts, plan.before, plan.after_return()
        ),
        "busiest node / mean": busiest,
        "look-up, median us": statistics.median(whole.times) * 1e6,
    }


def main() -> None:
    """Print the figures of both ways to place chunks, of the trace and of one whose prompts share
    two chunks.
    """
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("trace")
    ask.add_argument(
        "--before",
        type=int,
        default=BEFORE,
        help="requests before the loss (default %(default)s)",
    )
    ask.add_argument(
        "--away",
        type=int,
        help="requests while the node is away (default: as many as are counted)",
    )
    ask.add_argument(
        "--counted",
        type=int,
        default=COUNTED,
        help="requests of which each figure is (default %(default)s)",
    )
    ask.add_argument("--json", action="store_true")
    want = ask.parse_args()
    plan = Plan(want.before, want.away or want.counted, want.counted)
    if plan.away < plan.counted:
        ask.error(f"--away {plan.away}: give at least --counted ({plan.counted})")
    requests = list(islice(read_trace(want.trace), plan.end))
    if len(requests) < plan.end:
        sys.exit(
            f"{want.trace} has {len(requests)} requests: {plan.end} are needed"
        )
    found = {}
    for shared in (False, True):
        prompts = [keys_of(request, shared) for request in requests]
        for way, keeps_runs in (("runs", True), ("places", False)):
            label = f"{way}, all prompts share two chunks" if shared else way
            found[label] = figures(prompts, keeps_runs, plan)
            if not want.json:
                said = ", ".join(
                    f"{name} {value:.3f}" for name, value in found[label].items()
                )
                print(f"{label}: {said}", flush=True)
    if want.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
