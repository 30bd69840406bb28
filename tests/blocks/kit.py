"""A small engine for the tests of the block manager: its memory holds KV whose bytes are a function
of the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pagoda.base.clock import Clock
from pagoda.blocks import (
    Admitted,
    BlockManager,
    Direction,
    Extended,
    Plan,
    Settled,
    Waiting,
)
from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Item, Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.transfer import BlockKV

BLOCK = 4  # tokens
LAYOUT = KVLayout.opaque(BLOCK, 64, "tests of blocks")
NAMESPACE = Namespace("a-model")

Bytes = npt.NDArray[np.uint8]


@contextmanager
def cache_at(
    host: Path,
    disk: Path | None = None,
    *,
    slots: int = 64,
    clock: Clock | None = None,
    **options: object,
) -> Iterator[Cache]:
    """An open cache of `slots` host slots (and 256 on the disk), closed afterwards."""
    wanted: dict[str, object] = {
        "chunk_tokens": BLOCK,
        "host_path": str(host / "host"),
        "host_size": slots * LAYOUT.slot_bytes,
        "worth_it": False,
        # which admits every chunk, whatever a test has requested before
        "policy": "lru",
        "deadline_seconds": 20.0,  # a long deadline: the machine may be busy
    }
    if disk is not None:
        wanted |= {
            "disk_path": str(disk / "disk"),
            "disk_size": 256 * (LAYOUT.slot_bytes + 4096),
        }
    config = Config(**{**wanted, **options})  # type: ignore[arg-type]
    cache = Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock)
    try:
        yield cache
    finally:
        cache.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return token ids; with another seed the prompt differs from the first token on."""
    return [
        int(token)
        for token in np.random.default_rng(seed).integers(0, 50_000, tokens)
    ]


def truth(
    tokens: Sequence[int],
    items: Iterable[Item] = (),
    lora: str | None = None,
    salt: str | None = None,
) -> list[Bytes]:
    """Return the KV that the model computes for the whole blocks of a prompt: each a function of
    all tokens before.
    """
    root = blake3(repr((lora, salt)).encode()).digest()
    keys = chunk_keys(list(tokens), root, BLOCK, items)
    return [
        np.random.default_rng(list(key)).integers(
            0, 256, LAYOUT.chunk_bytes, dtype=np.uint8
        )
        for key in keys
    ]


def ledger_of(cache: Cache) -> Ledger:
    """The host tier's ledger."""
    host = cache._tiers.host
    assert host is not None
    return host.ledger


class Request:
    """A request as the engine knows it."""

    def __init__(self, tokens: Sequence[int], options: dict[str, object]) -> None:
        self.tokens = list(tokens)
        self.options = options

    def truth(self) -> list[Bytes]:
        """Return its right KV."""
        return truth(self.tokens, **self.options)  # type: ignore[arg-type]


class Engine:
    """Device memory and a block manager over it. Checks the manager's state after every step."""

    def __init__(
        self,
        blocks: int,
        cache: Cache | None = None,
        *,
        ranks: int = 1,
        **options: object,
    ) -> None:
        self.cache = cache
        self.ranks = ranks
        self.manager = BlockManager(
            blocks, BLOCK, cache=cache, ranks=ranks, **options
        )  # type: ignore[arg-type]
        self.kv: Bytes = np.zeros((blocks, LAYOUT.chunk_bytes), np.uint8)
        self.requests: dict[str, Request] = {}

    # ---- copies

    def copy(self, plan: Plan, rank: int | None = None) -> None:
        """Do the copies of a plan; every rank has its share of the bytes."""
        assert self.cache is not None
        assert self.cache.slots is not None
        share = LAYOUT.chunk_bytes // self.ranks
        mine = (
            slice(None)
            if rank is None
            else slice(rank * share, (rank + 1) * share)
        )
        for block, slot, _ in plan.copies:
            row = self.cache.slots.view(slot)[: LAYOUT.chunk_bytes]
            if plan.direction is Direction.DOWN:
                row[mine] = self.kv[block][mine]
            else:
                self.kv[block][mine] = row[mine]

    def end(self, plan: Plan | None, blocks: int | None = None) -> Settled:
        """Execute a plan, if there is one, and report its end on all ranks: the first `blocks`
        copies succeeded.
        """
        settled = Settled()
        if plan is not None:
            self.copy(plan)
            for rank in range(self.ranks):
                settled = self.manager.completed(
                    plan.ticket, rank=rank, blocks=blocks
                )
            self.manager.check()
        return settled

    # ---- requests

    def add(self, name: str, tokens: Sequence[int], **options: object) -> None:
        """A new request."""
        self.requests[name] = Request(tokens, options)
        self.manager.add(name, tokens, **options)  # type: ignore[arg-type]
        self.manager.check()

    def admit(self, name: str, reserve_tokens: int = 0) -> Admitted:
        """Admit a request and do the copies DOWN that free blocks, but not those UP."""
        for _ in range(100):
            answer = self.manager.admit(name, reserve_tokens=reserve_tokens)
            self.manager.check()
            if not isinstance(answer, Waiting):
                assert isinstance(answer, Admitted), answer
                return answer
            assert answer.plan is not None, "it waits, but no copy is running"
            self.end(answer.plan)
        raise AssertionError("it waits forever")

    def compute(self, name: str, num_tokens: int | None = None) -> None:
        """Compute the KV up to `num_tokens` (None: all) into the request's own blocks."""
        request = self.requests[name]
        table = self.manager.table(name)
        count = len(request.tokens) if num_tokens is None else num_tokens
        blocks = request.truth()
        for i in range(
            self.manager._requests[name].computed_tokens // BLOCK, count // BLOCK
        ):
            self.kv[table[i]] = blocks[i]
        self.manager.computed(name, count)
        self.manager.check()

    def start(
        self, name: str, tokens: Sequence[int], **options: object
    ) -> Admitted:
        """Add, admit, load and compute a request: it has the KV of all its tokens, and all of it is
        right.
        """
        self.add(name, tokens, **options)
        return self.resume(name)

    def resume(self, name: str) -> Admitted:
        """Do the same for a request that waits."""
        admitted = self.admit(name)
        if admitted.plan is not None:
            settled = self.end(admitted.plan)
            assert settled.ready == (name,)
            assert not settled.shortened
        self.compute(name)
        self.is_right(name)
        return admitted

    def append(self, name: str, tokens: Sequence[int]) -> None:
        """Generate tokens, with blocks for them."""
        self.requests[name].tokens += tokens
        self.manager.append(name, tokens)
        assert isinstance(
            self.manager.extend(name, len(self.requests[name].tokens)), Extended
        )

    def finish(self, name: str, **options: bool) -> Settled:
        """Finish a request and do its write-back."""
        plan = self.manager.finish(name, **options)
        self.manager.check()
        del self.requests[name]
        return self.end(plan)

    def is_right(self, name: str, num_tokens: int | None = None) -> None:
        """Assert that the leading blocks of a request hold its KV."""
        request = self.requests[name]
        table = self.manager.table(name)
        count = len(request.tokens) if num_tokens is None else num_tokens
        for i, block in enumerate(request.truth()[: count // BLOCK]):
            assert (self.kv[table[i]] == block).all(), (
                f"block {i} of {name} is not its KV"
            )

    def leave(self, name: str, tokens: Sequence[int], **options: object) -> None:
        """Run a request from beginning to end: its KV stays cached."""
        self.start(name, tokens, **options)
        self.finish(name)

    # ---- what is where

    def keys(
        self,
        tokens: Sequence[int],
        items: Iterable[Item] = (),
        salt: str | None = None,
    ) -> list[bytes]:
        """Return the keys of the whole blocks of a prompt."""
        return chunk_keys(
            list(tokens), self.manager._lower_tiers.root(None, salt), BLOCK, items
        )

    def places(self, tokens: Sequence[int]) -> list[str]:
        """Return where the whole blocks of a prompt are."""
        return [str(self.manager.where(key)) for key in self.keys(tokens)]

    def demoted(self, blocks: int) -> int:
        """Demote blocks at once; returns how many are free now."""
        self.end(self.manager.demote(blocks))
        return self.manager.free

    def stat(self, name: str) -> float:
        """Return one gauge or counter."""
        return self.manager.stats()[name]


def retrieved(cache: Cache, tokens: Sequence[int]) -> tuple[int, bool]:
    """Retrieve a prompt as an engine of whole prompts does; return the tokens, and whether their KV
    is right.
    """
    blocks = np.zeros(
        (max(1, len(tokens) // BLOCK), LAYOUT.chunk_bytes), np.uint8
    )
    hit = cache.retrieve(list(tokens), BlockKV(blocks, LAYOUT))
    right = truth(tokens)[: hit.num_tokens // BLOCK]
    return hit.num_tokens, all(
        (a == b).all() for a, b in zip(blocks, right, strict=False)
    )


def stored(cache: Cache, tokens: Sequence[int]) -> None:
    """Store a prompt as an engine of whole prompts does."""
    blocks = np.stack(truth(tokens))
    answer = cache.store(list(tokens), BlockKV(blocks, LAYOUT))
    assert answer.refused == 0, answer
    assert cache.flush(60)


def workers_stopped(cache: Cache) -> threading.Event:
    """Keep the threads of a cache busy until the event is set."""
    goes_on = threading.Event()
    inside = threading.Semaphore(0)

    class Slow(BlockKV):
        def to_slots(self, *args: object) -> None:
            inside.release()
            assert goes_on.wait(100)
            super().to_slots(*args)  # type: ignore[arg-type]

    seeds = range(1000, 1020)
    busy = [
        cache.store_future(
            prompt(4, n), Slow(np.stack(truth(prompt(4, n))), LAYOUT)
        )
        for n in seeds
    ]
    assert inside.acquire(timeout=60)
    assert not busy[-1].running() and not busy[-1].done(), (
        "there are more threads than expected"
    )
    return goes_on


def everything(engine: Engine) -> object:
    """Return all state that a refusal must not change."""
    manager = engine.manager
    nodes = {
        key: (
            node.block,
            node.place,
            node.locks,
            node.children,
            node.last_use,
            node.entry,
            node.ticket,
        )
        for key, node in manager._tree.nodes.items()
    }
    stats = {
        name: n
        for name, n in manager.stats().items()
        if not name.endswith("seconds")
    }
    records = {
        name: (list(r.table), r.num_in_tree, set(r.waits), r.last_node)
        for name, r in manager._requests.items()
    }
    return (
        nodes,
        stats,
        records,
        list(manager._pool._free),
        sorted(e[:2] for e in manager._tree._heap),
    )
