"""A real cache with tiny chunks that is driven by a trace, in the time of the trace, beside the simulator.

python -m tests.replay.live TRACE --chunks 1000 5000 --policy lru hindsight
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.replay import Request, TierSpec, read_trace, simulate
from pagoda.testing.clock import FakeClock
from pagoda.tiers import DiskTier, HostTier
from pagoda.transfer import BlockKV

CHUNK = 2  # tokens, which spell the id
LAYOUT = KVLayout.opaque(CHUNK, 32, "a trace")
_NAMESPACE = Namespace("a trace")
_HEADER = 4096  # of a slot on disk
_UPKEEP_SECONDS = 0.1  # in the time of the trace
_HALF = 1 << 30


class Rate(NamedTuple):
    """What was asked for and served, in chunks."""

    accesses: int = 0
    hits: int = 0

    @property
    def share(self) -> float:
        """The hit rate."""
        return self.hits / self.accesses


class Live:
    """One process's cache: a host tier, a disk tier or both, at a clock that only the trace moves on."""

    def __init__(self, root: Path, policy: str, *, host: int = 0, disk: int = 0, at_ms: float = 0.0) -> None:
        self.clock = FakeClock(1_000.0 + at_ms / 1e3)
        self._tiers: list[HostTier | DiskTier] = []
        if host:
            self._tiers.append(
                HostTier.open(
                    LAYOUT, root / "host", host * LAYOUT.slot_bytes, policy=policy, clock=self.clock
                )
            )
        if disk:
            size = disk * (LAYOUT.slot_bytes + _HEADER)
            self._tiers.append(
                DiskTier.open(
                    LAYOUT,
                    root / "disk",
                    size,
                    direct=False,  # as fast as it goes: it is not the disk that is tested
                    policy=policy,
                    queue_chunks=1 << 16,
                    clock=self.clock,
                )
            )
        self.cache = Cache(
            None,
            namespace=_NAMESPACE,
            layout=LAYOUT,
            tiers=self._tiers,
            clock=self.clock,
            worth_it=False,
            deadline_seconds=60.0,
        )
        for ledger in self.ledgers:
            ledger._upkeep._woken.set()  # its thread would keep up in real time, beside the trace's
        self._kept_up_ms = at_ms
        self._now_ms = at_ms

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of the tiers."""
        return [tier.ledger for tier in self._tiers]

    def ask(self, request: Request) -> Rate:
        """Retrieve a prompt and store it, at its time; what is to be written down is written when this returns."""
        self.clock.advance(max(0.0, request.timestamp_ms - self._now_ms) / 1e3)
        self._now_ms = max(self._now_ms, request.timestamp_ms)
        if self._now_ms - self._kept_up_ms >= _UPKEEP_SECONDS * 1e3:
            self._kept_up_ms = self._now_ms
            for ledger in self.ledgers:
                ledger.upkeep()
        tokens = tokens_of(request.hash_ids)
        kv = BlockKV(np.zeros((max(1, len(request.hash_ids)), LAYOUT.chunk_bytes), np.uint8), LAYOUT)
        hit = self.cache.retrieve(tokens, kv)
        self.cache.store(tokens, kv)
        if len(self._tiers) > 1 or isinstance(self._tiers[0], DiskTier):
            assert self.cache.flush(100)
        return Rate(len(request.hash_ids), hit.num_tokens // CHUNK)

    def play(self, requests: Iterable[Request]) -> Rate:
        """Ask for one prompt after the other."""
        rates = [self.ask(request) for request in requests]
        return Rate(sum(rate.accesses for rate in rates), sum(rate.hits for rate in rates))

    def close(self) -> None:
        """As at the end of a process."""
        assert self.cache.close(30)


def tokens_of(ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """A prompt whose chunks are told apart as these ids are."""
    wide = np.array(ids, np.int64)
    return np.stack([wide // _HALF, wide % _HALF], axis=1).astype(np.int32).reshape(-1)


def simulated(requests: Iterable[Request], chunks: int, policy: str) -> float:
    """The hit rate by the simulator."""
    return simulate(requests, [TierSpec("host", chunks, policy)]).hit_rate


def main() -> int:
    """Compare the two on a whole trace; the exit code says whether they agree within half a point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--policy", nargs="+", default=["lru", "hindsight"])
    parser.add_argument("--requests", type=int, default=None, help="only so many")
    options = parser.parse_args()
    requests = list(read_trace(options.trace))[: options.requests]
    worst = 0.0
    for policy in options.policy:
        for chunks in options.chunks:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
                live, began = Live(Path(root), policy, host=chunks), time.monotonic()
                real, seconds = live.play(requests).share, time.monotonic() - began
                live.close()
            expected = simulated(requests, chunks, policy)
            worst = max(worst, abs(real - expected))
            print(
                f"{policy:>10} {chunks:>7,} chunks: cache {real:7.2%}, simulator {expected:7.2%} ({seconds:.1f} s)",
                flush=True,
            )
    return int(worst > 0.005)


if __name__ == "__main__":
    raise SystemExit(main())
