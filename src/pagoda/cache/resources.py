"""What all calls of a cache share, and how it is closed. Not in `Cache`, so that a dropped cache
can be closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.base.clock import Clock, Deadline
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.cache.call import KeyScheme
from pagoda.cache.caller_hints import CallerHints
from pagoda.cache.counters import CacheCounters
from pagoda.cache.executor import CallExecutor
from pagoda.cache.late_tier import LateTier
from pagoda.cache.load_cost import SPEEDS_BYTES, LoadCost, SpeedTable
from pagoda.cache.miss_explainer import MissExplainer
from pagoda.cache.prompt_log import PromptLog
from pagoda.cache.recording import Recorder
from pagoda.cache.staging_buffers import StagingPool
from pagoda.cache.tier_stack import TierStack
from pagoda.cache.writeback import WriteBackQueue
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger.store_state import SPEEDS
from pagoda.tiers import Tier
from pagoda.transfer.cpu_copy import end_helpers

if TYPE_CHECKING:  # importing it needs pyzmq
    from pagoda.cache.request_events import RequestEvents

log = guarded_logger("pagoda.cache")

_MOST_REGISTERED = 4096


@dataclass
class Resources:
    """The working parts of one cache. Each is thread-safe. Must not refer to the `Cache`, which
    closes it.

    What has threads, or waits for one, is made by each process for itself; what a parent noted
    before a fork is left to the parent.
    """

    config: Config
    layout: KVLayout
    clock: Clock
    tiers: TierStack
    counters: CacheCounters
    counts_in: str  # the tier whose counters are the cache's
    executor: CallExecutor
    explainer: MissExplainer
    load_cost: LoadCost
    hints: CallerHints
    events: RequestEvents | None = None
    # called when all that was stored has been written down, before the tiers are closed
    last_steps: list[Callable[[], None]] = field(default_factory=list)
    # the tier that was left out when the cache was opened
    late: LateTier | None = None
    closed: bool = False
    registered: set[bytes] = field(default_factory=set)  # roots of namespaces

    @per_process
    def writeback(self) -> tuple[WriteBackQueue, ...]:
        """One queue for each lower tier that is written."""
        return tuple(map(self._queue_of, self.tiers.written))

    @per_process
    def load_staging(self) -> StagingPool:
        """Buffers for loads."""
        return StagingPool(self.layout.slot_bytes)

    @per_process
    def store_staging(self) -> StagingPool:
        """Buffers for stores: separate from those for loads, so that neither starves the other."""
        return StagingPool(self.layout.slot_bytes)

    @per_process
    def recorder(self) -> Recorder | None:
        """Records the requests; None if they are not recorded."""
        if not self.config.record:
            return None
        return Recorder(
            Path(self.config.record), self.layout.chunk_tokens, self.clock
        )

    @per_process
    def prompt_log(self) -> PromptLog | None:
        """Logs prompts; None in private memory, where no other process could read them."""
        host = self.tiers.host
        if (
            host is None
            or not self.config.prompt_log
            or not self.config.host_shared
        ):
            return None
        return PromptLog(host.ledger, self.layout.chunk_tokens, self.clock)

    def _queue_of(self, tier: Tier) -> WriteBackQueue:
        return WriteBackQueue(
            tier,
            self.tiers.host,
            self.config,
            self.layout.chunk_tokens,
            self.counters,
            self.clock,
        )

    def register(self, namespace: Namespace, wait: bool = False) -> None:
        """Register a namespace and its labels, in the next transaction; with `wait`, now, in a
        separate transaction.
        """
        if len(self.registered) >= _MOST_REGISTERED:
            self.registered.clear()
        self.registered.add(namespace.root)
        self.counters.name(namespace)
        self.tiers.register(namespace)
        if wait:
            for _, ledger in self.tiers.ledgers():
                ledger.namespaces.write_labels()

    def leave_out(self, late: LateTier | None) -> None:
        """Note the tier that was left out when the cache was opened."""
        self.late = late
        self.explainer.late = late

    def admit(self, tier: Tier) -> None:
        """Let a tier that was left out take part: calls that begin from now on use it."""
        # first its queue: a call that sees the tier must find it
        if not tier.read_only:
            self.writeback = (self._queue_of(tier), *self.writeback)
        self.tiers = self.tiers.joined_by(tier)
        self.hints.begin(dict(self.tiers.ledgers()))
        self.explainer.tiers = self.tiers
        self.load_cost.tiers = self.tiers.names
        self.registered.clear()  # its namespaces are registered by the next calls

    def left_out(self) -> dict[str, str]:
        """Return the tiers that were left out at the start and do not take part yet, and why."""
        late = self.late
        return {} if late is None or late.joined else {late.name: late.reason}

    def close(self, timeout: float) -> bool:
        """Flush, then close all within about `timeout` seconds; False if some chunks were not
        written. Idempotent.
        """
        if self.closed:
            return True
        self.closed = True
        deadline = Deadline(timeout)
        if self.late is not None:
            self.late.close()
        if self.recorder is not None:
            self.recorder.close(timeout * 0.4)
        if self.events is not None:
            self.events.close()
        self.executor.close()
        end_helpers()
        writing = Deadline(timeout * 0.6)
        ended = [queue.close(writing.remaining()) for queue in self.writeback]
        for step in self.last_steps:
            step()
        if self.prompt_log is not None:
            self.prompt_log.close()
        self.counters.close()
        for tier in reversed(self.tiers.all):
            try:
                tier.close(max(0.1, deadline.remaining()))
            except Exception as error:  # noqa: BLE001
                # a boundary: the other tiers must be closed
                ended.append(False)
                self.counters.warn(
                    log, Reason.IO_ERROR, f"closing {tier.name}: {error}", error
                )
        return all(ended)


def build_resources(
    tiers: TierStack,
    config: Config,
    layout: KVLayout,
    scheme: KeyScheme,
    clock: Clock,
    engine: Namespace,
) -> Resources:
    """Build what all calls share; starts no thread. `engine`: the engine whose prefill speed the
    cache learns.
    """
    ledgers = tiers.ledgers()
    counters = CacheCounters(ledgers[0][1] if ledgers else None, clock, engine)
    if config.record:
        # now, not at the first request
        import pagoda.cache.request_trace  # noqa: F401
    executor = CallExecutor()
    hints = CallerHints(counters, config.hints)
    hints.begin(dict(ledgers))
    return Resources(
        config=config,
        layout=layout,
        clock=clock,
        tiers=tiers,
        counters=counters,
        counts_in=ledgers[0][0] if ledgers else "",
        executor=executor,
        explainer=MissExplainer(
            tiers, scheme, layout.chunk_tokens, clock, executor
        ),
        load_cost=LoadCost(
            layout.chunk_bytes,
            layout.chunk_tokens,
            clock,
            config.worth_it,
            # in the lowest store: on a disk it survives a reboot, like the chunks
            speeds=SpeedTable(
                ledgers[-1][1].session.hints.page(SPEEDS, SPEEDS_BYTES)
            )
            if ledgers
            else None,
            engine=engine.root.hex(),
            tiers=tiers.names,
        ),
        hints=hints,
    )
