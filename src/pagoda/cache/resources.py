"""What all calls of a cache share, and how it is closed. Not in `Cache`, so that a dropped cache
can be closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.base.clock import Clock, Deadline
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
    writeback: tuple[WriteBackQueue, ...]  # one per lower tier that is written
    load_staging: StagingPool
    # separate from the pool for loads, so that neither starves the other
    store_staging: StagingPool
    recorder: Recorder | None = None
    prompt_log: PromptLog | None = None
    events: RequestEvents | None = None
    # called when all that was stored has been written down, before the tiers are closed
    last_steps: list[Callable[[], None]] = field(default_factory=list)
    # the tier that was left out when the cache was opened
    late: LateTier | None = None
    closed: bool = False
    registered: set[bytes] = field(default_factory=set)  # roots of namespaces

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
            queue = WriteBackQueue(
                tier,
                self.tiers.host,
                self.config,
                self.layout.chunk_tokens,
                self.counters,
                self.clock,
            )
            self.writeback = (queue, *self.writeback)
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
    executor = CallExecutor()
    hints = CallerHints(counters, config.hints)
    hints.begin(dict(ledgers))
    # prompts are not logged in private memory, where no other process could read them
    shared = tiers.host if config.prompt_log and config.host_shared else None
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
        writeback=tuple(
            WriteBackQueue(
                tier, tiers.host, config, layout.chunk_tokens, counters, clock
            )
            for tier in tiers.written
        ),
        load_staging=StagingPool(layout.slot_bytes),
        store_staging=StagingPool(layout.slot_bytes),
        prompt_log=None
        if shared is None
        else PromptLog(shared.ledger, layout.chunk_tokens, clock),
        recorder=Recorder(Path(config.record), layout.chunk_tokens, clock)
        if config.record
        else None,
    )
