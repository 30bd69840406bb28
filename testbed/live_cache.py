"""A real cache with tiny chunks that a trace drives, on the clock of the trace."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.cache import Cache, RequestHints
from pagoda.cache.caller_hints import EndingName
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.policy import DEFAULT_OBJECTIVE
from pagoda.testing.fake_clock import FakeClock
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import StoreClient
from pagoda.transfer import BlockKV
from pagoda_tools.replay import Request, TierSpec, simulate

CHUNK = 2  # tokens, which encode the id
LAYOUT = KVLayout.opaque(CHUNK, 32, "a trace")
_NAMESPACE = Namespace("a trace")
_HEADER = 4096  # of a slot on disk
# between two rounds of a ledger's upkeep, on the clock of the trace
_SHARE_MS = 1_000.0
_PREPARE_MS = 100.0
_HALF = 1 << 30
# by the stop reasons of the trace
_ENDINGS: dict[str, EndingName] = {"tool_use": "tool_call", "end_turn": "turn"}


class Rate(NamedTuple):
    """Requested and served chunks."""

    accesses: int = 0
    hits: int = 0

    @property
    def share(self) -> float:
        """Return the hit rate."""
        return self.hits / self.accesses


class Live:
    """The cache of one process: a host tier, a disk tier, a remote tier, on a clock that only the
    trace advances.
    """

    def __init__(
        self,
        root: Path,
        policy: str,
        *,
        host: int = 0,
        disk: int = 0,
        remote: StoreClient | None = None,
        at_ms: float = 0.0,
        with_hints: bool = False,
        objective: str = DEFAULT_OBJECTIVE,
    ) -> None:
        """Open it. `with_hints`: it is told what the requests of the trace say of themselves.
        `objective`: of the local tiers.
        """
        self._with_hints = with_hints
        self.clock = FakeClock(1_000.0 + at_ms / 1e3)
        self.hits: Counter[str] = Counter()  # served chunks by tier
        self._tiers: list[HostTier | DiskTier | RemoteTier] = []
        if host:
            self._tiers.append(
                HostTier.open(
                    LAYOUT,
                    root / "host",
                    host * LAYOUT.slot_bytes,
                    policy=policy,
                    objective=objective,
                    clock=self.clock,
                )
            )
        if disk:
            size = disk * (LAYOUT.slot_bytes + _HEADER)
            self._tiers.append(
                DiskTier.open(
                    LAYOUT,
                    root / "disk",
                    size,
                    # as fast as possible: the disk is not under test
                    direct=False,
                    policy=policy,
                    objective=objective,
                    queue_chunks=1 << 16,
                    clock=self.clock,
                )
            )
        if remote is not None:
            self._tiers.append(
                RemoteTier(
                    LAYOUT,
                    remote,
                    queue_chunks=1 << 16,
                    deadline_seconds=60.0,
                    look_seconds=60.0,
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
            hints="always" if with_hints else "auto",
        )
        for ledger in self.ledgers:
            ledger.upkeep_thread._thread = (
                threading.current_thread()
            )  # otherwise a thread would do the upkeep in real time
        self._shared_ms = self._prepared_ms = at_ms - _SHARE_MS
        self._now_ms = at_ms

    @property
    def ledgers(self) -> list[Ledger]:
        """Return the ledgers of the tiers."""
        return [
            tier.ledger
            for tier in self._tiers
            if not isinstance(tier, RemoteTier)
        ]

    def ask(self, request: Request) -> Rate:
        """Retrieve a prompt and store it at its time; all writes to lower tiers are done on
        return. What is served must be what was stored.
        """
        self.clock.advance(max(0.0, request.timestamp_ms - self._now_ms) / 1e3)
        self._now_ms = max(self._now_ms, request.timestamp_ms)
        self._keep_up()
        tokens = tokens_of(request.hash_ids)
        memory = np.zeros(
            (max(1, len(request.hash_ids)), LAYOUT.chunk_bytes), np.uint8
        )
        kv = BlockKV(memory, LAYOUT)
        hints = hints_of(request) if self._with_hints else None
        hit = self.cache.retrieve(tokens, kv, hints=hints)
        wanted = _bytes_of(request.hash_ids)
        served = hit.num_tokens // CHUNK
        assert np.array_equal(memory[:served], wanted[:served])
        memory[: len(wanted)] = wanted
        self.cache.store(tokens, kv, hints=hints)
        self.hits.update(
            {tier: tokens // CHUNK for tier, tokens in hit.by_tier.items()}
        )
        if len(self._tiers) > 1 or not isinstance(self._tiers[0], HostTier):
            assert self.cache.flush(100)
        return Rate(len(request.hash_ids), served)

    def _keep_up(self) -> None:
        """Let the policies learn as often as the ledgers' threads would, and as the simulator
        does.
        """
        if self._now_ms - self._shared_ms >= _SHARE_MS:
            self._shared_ms = self._now_ms
            for ledger in self.ledgers:
                ledger.upkeep_thread._share(60.0)
        if self._now_ms - self._prepared_ms >= _PREPARE_MS:
            self._prepared_ms = self._now_ms
            for ledger in self.ledgers:
                ledger.upkeep_thread._prepare()

    def play(self, requests: Iterable[Request]) -> Rate:
        """Request one prompt after the other."""
        rates = [self.ask(request) for request in requests]
        return Rate(
            sum(rate.accesses for rate in rates), sum(rate.hits for rate in rates)
        )

    def close(self) -> None:
        """Close the cache, as at the end of a process."""
        assert self.cache.close(30)


def hints_of(request: Request) -> RequestHints | None:
    """Return what a request of a trace says of itself, as a caller would say it."""
    if not isinstance(request.session, int | str):
        return None
    return RequestHints(
        session=str(request.session),
        agent=str(request.agent or ""),
        ending=_ENDINGS.get(str(request.stop), "other"),
        session_end=request.last is True,
    )


def tokens_of(ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Return a prompt whose chunks differ exactly where these ids do."""
    wide = np.array(ids, np.int64)
    return (
        np.stack([wide // _HALF, wide % _HALF], axis=1)
        .astype(np.int32)
        .reshape(-1)
    )


def _bytes_of(ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return what the chunks of these ids contain, one row for each."""
    each = np.array(ids, np.uint64).view(np.uint8).reshape(-1, 8)
    return np.tile(each, (1, LAYOUT.chunk_bytes // 8))


def simulated(requests: Iterable[Request], chunks: int, policy: str) -> float:
    """Return the simulator's hit rate."""
    return simulate(requests, [TierSpec("host", chunks, policy)]).hit_rate
