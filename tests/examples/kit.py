"""Shared by the tests of the example engine: small models, conversations, tiers, serving and
checks.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache as once
from pathlib import Path

import numpy as np
import torch

from examples.paged_engine.engine import Engine, Sequence
from pagoda import Cache, Config
from pagoda.connectors.transformers import layout_of, namespace_of
from pagoda.ledger import Ledger, StoreSpec
from pagoda.testing import FaultySlab
from pagoda.tiers import DiskTier, HostTier
from testbed.patience import Patience
from tests.e2e.tiny import VOCABULARY, generated, llama, qwen

BLOCK = 8
# on the device: the longest conversation needs 30, all together need 200
BLOCKS = 36
SLOTS = 64  # on the host: too few for all conversations, too
TALKS = 7
TURNS = 4
NEW = 16
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.paged_engine"]


@once
def model_of(name: str):
    """A small model: "llama" and "qwen" have two layers, "llama-3" has three."""
    kind, _, layers = name.partition("-")
    return {"llama": llama, "qwen": qwen}[kind](
        num_hidden_layers=int(layers or 2)
    )


@once
def talks_of(name: str, seed: int = 0) -> list[list[tuple[list[int], list[int]]]]:
    """Random conversations and what plain `generate` says: [talk][turn] = (prompt, answer). Half
    begin alike.
    """
    dice = np.random.default_rng(seed)
    model = model_of(name)
    common = dice.integers(1, VOCABULARY, 44).tolist()
    talks = []
    for number in range(TALKS):
        tokens = common[: 44 if number % 2 else 3]
        turns = []
        for _ in range(TURNS):
            tokens = (
                tokens
                + dice.integers(1, VOCABULARY, dice.integers(15, 40)).tolist()
            )
            answer = generated(model, torch.tensor([tokens]), NEW)[0]
            turns.append((tokens, answer))
            tokens = tokens + answer
        talks.append(turns)
    assert (
        len({token for turns in talks for _, answer in turns for token in answer})
        >= 20
    )
    return talks


class House:
    """The roots of one test and the caches on them."""

    def __init__(self, host: Path, disk: Path) -> None:
        self.host = host
        self.disk = disk
        self.open_ones: list[Cache] = []
        self.slab: FaultySlab | None = None

    def cache(
        self, name: str = "llama", slots: int = SLOTS, **options: object
    ) -> Cache:
        """A cache of two tiers, its disk with faults on demand: `slab`."""
        model = model_of(name)
        layout = layout_of(model, BLOCK)
        settings: dict = {"worth_it": False, "deadline_seconds": 30.0} | options
        config = Config(
            chunk_tokens=BLOCK,
            host_path=str(self.host / "host"),
            host_size=slots * 4096,
            **settings,
        )
        host = HostTier.open(
            layout,
            Path(config.host_path),
            slots * layout.slot_bytes,
            policy="lru",
        )
        stride = layout.slot_bytes + 4096
        ledger = Ledger.open(
            StoreSpec(
                self.disk / "disk", layout.fingerprint, "file", 1024, stride
            )
        )
        self.slab = FaultySlab(ledger.slab_path, ledger.slots, stride)
        disk = DiskTier(
            layout, ledger, self.slab, deadline_seconds=config.deadline_seconds
        )
        self.open_ones.append(
            Cache(
                config,
                namespace=namespace_of(model, layout),
                layout=layout,
                tiers=[host, disk],
            )
        )
        return self.open_ones[-1]

    def shut(self, wipe_host: bool = False) -> None:
        for cache in self.open_ones:
            cache.flush(10.0)
            cache.close()
        self.open_ones.clear()
        if wipe_host:
            shutil.rmtree(self.host / "host")


class Served(Counter[str]):
    """The results of requests: hits by tier in tokens, preemptions, computed prompt tokens."""


def serve(
    engine: Engine,
    requests: list[tuple[Sequence, list[int]]],
    between: Callable[[], object] = lambda: None,
) -> Served:
    """Run these requests, all at once; check every answer, and that no block or move remains."""
    found = Served()
    ends = {id(seq): answer for seq, answer in requests}
    for seq, _ in requests:
        engine.add(seq)
    patience = Patience(60)
    while engine.busy:
        assert not patience.ended, (
            f"{engine.waiting} {engine.running} {engine.manager.stats()}"
        )
        for seq in engine.step():
            assert seq.output == ends.pop(id(seq)), (
                f"{seq.id} after {seq.hits}, {seq.preemptions} preemptions"
            )
            assert sum(seq.hits.values()) < seq.prompt_tokens
            found.update(seq.hits)
            found["preemptions"] += seq.preemptions
        engine.manager.check()
        between()
    assert not ends
    return found


def converse(
    engine: Engine,
    name: str = "llama",
    seed: int = 0,
    salt: str | None = None,
    **how,
) -> Served:
    """Serve all conversations, turn by turn, in random order."""
    found = Served()
    dice = random.Random(seed)
    for turn in range(TURNS):
        requests = [
            (
                Sequence(
                    f"{salt}.{seed}.{talk}.{turn}", list(tokens), NEW, salt=salt
                ),
                answer,
            )
            for talk, turns in enumerate(talks_of(name, seed))
            for tokens, answer in [turns[turn]]
        ]
        found["asked"] += sum(len(seq.tokens) for seq, _ in requests)
        found += serve(engine, dice.sample(requests, len(requests)), **how)
    found["computed"] = engine.prompt_tokens_computed
    return found


def closed(engine: Engine) -> None:
    """Close an engine; check that nothing is in use or being copied."""
    engine.close()
    engine.manager.check()
    stats = engine.manager.stats()
    assert stats["in_use"] == stats["in_flight"] == engine.manager.in_flight == 0
    assert stats["evictable"] == stats["cached"]


def engine_of(
    cache: Cache | None, name: str = "llama", blocks: int = BLOCKS, **options
) -> Engine:
    layout = layout_of(model_of(name), BLOCK) if cache is None else cache.layout
    return Engine(model_of(name), layout, blocks=blocks, cache=cache, **options)


def fault_copies(engine: Engine, fails: Callable[[str], bool]) -> Counter[str]:
    """Make copies fail half-way; count them and their effects."""
    seen: Counter[str] = Counter()

    def faulty(
        name: str, copy: Callable[[int, np.ndarray], None]
    ) -> Callable[[int, np.ndarray], None]:
        def move(block: int, slot: np.ndarray) -> None:
            if not fails(name):
                return copy(block, slot)
            seen[name] += 1
            half = slot.nbytes // 2
            if name == "down":
                slot[:half] = 0x3F
            else:
                engine.pool._bytes[block, :half] = 0x3F
            raise OSError("injected")

        return move

    engine.pool.to_slot = faulty("down", engine.pool.to_slot)
    engine.pool.from_slot = faulty("up", engine.pool.from_slot)
    report_failed = engine.manager.failed

    def failed(ticket: int):
        settled = report_failed(ticket)
        seen["shortened"] += len(settled.shortened)
        seen["again"] += len(settled.again)
        return settled

    engine.manager.failed = failed
    return seen


def every(up: int, down: int) -> Callable[[str], bool]:
    """Return a function that is true for every `up`-th copy UP and every `down`-th copy DOWN."""
    copies: Counter[str] = Counter()

    def fails(name: str) -> bool:
        copies[name] += 1
        return copies[name] % {"up": up, "down": down}[name] == 0

    return fails
