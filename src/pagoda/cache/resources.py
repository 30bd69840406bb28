"""What a cache is made of, apart from the cache itself, so that it can be closed when nobody has the cache any more."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from pagoda.cache.below import Below
from pagoda.cache.counters import Tally
from pagoda.cache.executor import Workers
from pagoda.cache.explain_miss import Why
from pagoda.cache.load_cost import Worth
from pagoda.cache.recording import Recorder
from pagoda.cache.request import KeyScheme
from pagoda.cache.retrieve_call import Tools
from pagoda.cache.staging import Staging
from pagoda.cache.tier_stack import Storeys
from pagoda.cache.writeback import Descent, Descents
from pagoda.clock import Clock
from pagoda.config import Config
from pagoda.layout import KVLayout
from pagoda.metrics import Reason

__all__ = ["Parts", "assemble"]

log = logging.getLogger("pagoda.cache")


@dataclass
class Parts:
    """The working parts of one cache. Each is thread-safe."""

    storeys: Storeys
    tally: Tally
    workers: Workers
    why: Why
    tools: Tools
    storing: Staging  # for what a store finds no host slot for; loads have their own, so that neither starves the other
    recorder: Recorder | None = None
    closed: bool = False

    @property
    def descents(self) -> Descents:
        """The background writers, one a lower tier."""
        return self.tools.descents

    def close(self, timeout: float) -> bool:
        """Flush, then end all within about `timeout` seconds; False if something was left unwritten. Idempotent."""
        if self.closed:
            return True
        self.closed = True
        until = time.monotonic() + timeout
        if self.recorder is not None:
            self.recorder.close(min(1.0, timeout))
        self.workers.close()
        flushed = self.descents.close(timeout * 0.6)
        self.tally.close()
        for tier in reversed(self.storeys.all):
            try:
                tier.close(max(0.1, until - time.monotonic()))
            except Exception as trouble:  # noqa: BLE001  # a border: the tiers below must be closed all the same
                flushed = False
                self.tally.warn(log, Reason.IO_ERROR, f"closing {tier.name}: {trouble}", trouble)
        return flushed


def assemble(storeys: Storeys, config: Config, layout: KVLayout, scheme: KeyScheme, clock: Clock) -> Parts:
    """Put the parts together; starts no thread."""
    ledgers = storeys.ledgers()
    tally = Tally(ledgers[0][1] if ledgers else None, clock)
    workers = Workers()
    descents = _descents(storeys, config, layout, tally, clock)
    worth = Worth(layout.chunk_bytes, layout.chunk_tokens, clock, config.worth_it)
    counts_in = ledgers[0][0] if ledgers else ""
    tools = Tools(Staging(layout.slot_bytes), worth, descents, clock, counts_in)
    why = Why(storeys, scheme, layout.chunk_tokens, clock, workers)
    recorder = Recorder(Path(config.record), layout.chunk_tokens, clock) if config.record else None
    return Parts(storeys, tally, workers, why, tools, Staging(layout.slot_bytes), recorder)


def _descents(storeys: Storeys, config: Config, layout: KVLayout, tally: Tally, clock: Clock) -> Descents:
    return Descents([
        Descent(
            storeys.host, Below(storeys.host, tier, layout.chunk_tokens, clock), config.write_policy,
            config.selective_hits, config.queue_chunks, tally,
        )
        for tier in storeys.lower
    ])  # fmt: skip
