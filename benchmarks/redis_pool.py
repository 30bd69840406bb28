"""What a pool of Redis still hits when a node is lost: `python benchmarks/redis_pool.py TRACE [--json]`.

A trace of requests (`pagoda record` writes one) is looked up and stored, request by request, on three
real servers. Then a node is killed, and comes back empty. Each figure is the hits of the next requests
divided by the hits that the same requests have on three nodes that are never lost; what was lost and not asked
for since then cannot hit. `runs`: what a request
stores is kept together; `places`: each chunk is at its own place, as in a pool that has no mark, and is
read wherever it is.
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

import numpy as np

from pagoda.codec import HEADER_BYTES
from pagoda.keys import derive_keys
from pagoda.replay.trace import Request, read_trace
from pagoda.tiers.remote.redis_pool import RedisPoolClient, RedisPoolConnection
from pagoda.tiers.remote.store_client import PutRequest, PutResult
from testbed.servers import Server, redis_server

NODES = 3
FIRST, NEXT = 1000, 300
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
    hits: list[int] = field(default_factory=list)  # leading chunks found, by request
    times: list[float] = field(default_factory=list)  # of look-ups, in seconds

    def __post_init__(self) -> None:
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        if not self.keeps_runs:  # a pool that had values before gets no mark
            for server in self.servers:
                server.call("SET", "another:program", "1")
        self.client = RedisPoolClient(f"redis+pool://{places}", look_seconds=SECONDS)
        self.connection = self.client.connection()
        self.connection.open(time.monotonic() + SECONDS)

    def request(self, keys: Sequence[bytes], stamp: int) -> None:
        """Look a prompt up and store what is missing."""
        until = time.monotonic() + SECONDS
        begun = time.perf_counter()
        self.hits.append(self.connection.find(ROOT, keys, until))
        self.times.append(time.perf_counter() - begun)
        present = self.connection.touch(ROOT, keys, until)
        new = [key for key, is_here in zip(keys, present, strict=True) if not is_here]
        self.client.begin_run(new, stamp)
        claims = self.connection.claim(ROOT, new, until)
        for key, claim in zip(new, claims, strict=True):
            if claim is None:
                self.connection.put(PutRequest(ROOT, key, PAGE, PAGE[:1], lambda: True), until)
            elif claim is not PutResult.PRESENT:
                raise RuntimeError(f"one machine alone was told {claim}")

    def found_again(self, prompts: Sequence[Sequence[bytes]]) -> int:
        """Return how many leading chunks of these prompts are found now, all together; store nothing."""
        return sum(self.connection.find(ROOT, keys, time.monotonic() + SECONDS) for keys in prompts)

    def wait_for(self, nodes: int) -> None:
        """Wait until the machine has noticed how many nodes there are."""
        until = time.monotonic() + SECONDS
        while len(self.client.in_use()) != nodes:
            with contextlib.suppress(Exception):
                self.connection.find(ROOT, [bytes(32)], time.monotonic() + SECONDS)
            if time.monotonic() > until:
                raise RuntimeError(f"{len(self.client.in_use())} of {nodes} nodes are used")
            time.sleep(0.05)

    def busiest(self) -> float:
        """Return the chunks of the busiest node, divided by the mean."""
        counts = [int(server.call("DBSIZE").strip(":\r\n")) for server in self.servers]
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
    return derive_keys([hashlib.blake2b(name.encode(), digest_size=32).digest() for name in names], ROOT)


def figures(prompts: Sequence[Sequence[bytes]], keeps_runs: bool) -> dict[str, float]:
    """Drive one fleet that loses a node and one that does not."""
    lost_at, back_at = FIRST, FIRST + NEXT
    with fleet(keeps_runs) as whole:
        for stamp, keys in enumerate(prompts):
            if stamp == back_at:
                all_again = whole.found_again(prompts[lost_at:back_at])
            whole.request(keys, stamp)
        busiest = whole.busiest()
    with fleet(keeps_runs) as losing:
        for stamp, keys in enumerate(prompts):
            if stamp == lost_at:
                losing.servers[1].kill()
                losing.wait_for(NODES - 1)
            if stamp == back_at:
                losing.servers[1].restart()
                losing.wait_for(NODES)
                again = losing.found_again(prompts[lost_at:back_at]) / max(1, all_again)
            losing.request(keys, stamp)

    def share(begin: int, end: int) -> float:
        return sum(losing.hits[begin:end]) / max(1, sum(whole.hits[begin:end]))

    return {
        "hits with a node lost": share(lost_at, back_at),
        "the same requests again, the node back empty": again,
        "the next requests, the node back empty": share(back_at, len(prompts)),
        "busiest node / mean": busiest,
        "look-up, median us": statistics.median(whole.times) * 1e6,
    }


def main() -> None:
    """Print the figures of both ways to place chunks, of the trace and of one whose prompts share two chunks."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("trace")
    ask.add_argument("--json", action="store_true")
    want = ask.parse_args()
    requests = list(islice(read_trace(want.trace), FIRST + 2 * NEXT))
    if len(requests) <= FIRST + NEXT:
        sys.exit(f"{want.trace} has {len(requests)} requests: more than {FIRST + NEXT} are needed")
    found = {}
    for shared in (False, True):
        prompts = [keys_of(request, shared) for request in requests]
        for way, keeps_runs in (("runs", True), ("places", False)):
            label = f"{way}, all prompts share two chunks" if shared else way
            found[label] = figures(prompts, keeps_runs)
            if not want.json:
                said = ", ".join(f"{name} {value:.3f}" for name, value in found[label].items())
                print(f"{label}: {said}", flush=True)
    if want.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
