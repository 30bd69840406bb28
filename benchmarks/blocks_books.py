"""The time and the memory that the bookkeeping of `pagoda.blocks` takes; no KV is copied here."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
from cache_copies import Tokens, opened
from ground import NAMESPACE, Plan
from harness import Figure, Runs, say, seconds_figure, seconds_text

from pagoda import KVLayout
from pagoda.blocks import Admitted, BlockManager
from pagoda.blocks.allocator import BlockAllocator
from pagoda.blocks.finished_moves import Completion
from pagoda.blocks.lower_tiers import LowerTiers
from pagoda.blocks.tree import Tree

BLOCK_TOKENS = 64
LONG_TOKENS = 128 * 1024
LONG_BLOCKS = LONG_TOKENS // BLOCK_TOKENS
EVICTED = 1000
# one reserve takes up to an eighth: enough for all evicted blocks and for a long prompt
HOST_SLOTS = 32 * 1024
_LAYOUT = KVLayout.opaque(BLOCK_TOKENS, 4096, "benchmark")


class Watch:
    """Seconds of each named step, one list of rounds each: wall time, and the thread's processor
    time.
    """

    def __init__(self) -> None:
        self.wall: Runs = {}
        self.processor: Runs = {}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Time the body of the `with` statement."""
        wall = time.perf_counter()
        processor = time.thread_time()
        yield
        self.processor.setdefault(name, []).append(time.thread_time() - processor)
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)

    def median(self, name: str) -> float:
        """Return the median wall time."""
        return statistics.median(self.wall[name])

    def figure(self, key: str, target: float, on: str, note: str) -> Figure:
        """Return the figure of one step; its note quotes all other steps."""
        told = ", ".join(
            f"{name} {seconds_text(self.median(name))}"
            for name in self.wall
            if name != on
        )
        note = (
            f"{note}; processor time {seconds_text(statistics.median(self.processor[on]))}; "
            f"beside it: {told}"
        )
        quoted = {
            "beside_seconds": self.wall,
            "processor_seconds": self.processor,
        }
        return seconds_figure(key, target, self.wall[on], note, **quoted)


# ---- a long prompt


def admit_figure(plan: Plan) -> list[Figure]:
    """Time `match` and `admit` of 131,072 tokens with known keys, all hits: on the device, then in
    host memory.
    """
    watch = Watch()
    with opened(plan, _LAYOUT, HOST_SLOTS * _LAYOUT.slot_bytes) as cache:
        manager = BlockManager(LONG_BLOCKS + 8, BLOCK_TOKENS, cache=cache)
        tokens = np.arange(LONG_TOKENS, dtype=np.int32)
        _write_down(manager, tokens)
        for tier in ("device", "host"):
            for turn in range(1 + max(9, plan.rounds)):
                if tier == "host":
                    manager.reset()
                # the first round warms up
                _admit(manager, tokens, tier, watch if turn else Watch())
        manager.check()
    note = f"{LONG_BLOCKS:,} blocks on the device"
    return [
        watch.figure("match_admit_128k_seconds", 0.005, "match + admit", note)
    ]


def _write_down(manager: BlockManager, tokens: Tokens) -> None:
    """Serve a prompt; after that it is on the device and in host memory."""
    manager.add("first", tokens)
    manager.admit("first")
    manager.computed("first", len(tokens))
    copies = manager.finish("first")
    if copies is None or len(copies.copies) != LONG_BLOCKS:
        raise RuntimeError(
            f"not all was written back: {copies and len(copies.copies)}"
        )
    manager.completed(copies.ticket)


def _admit(
    manager: BlockManager, tokens: Tokens, tier: str, watch: Watch
) -> None:
    """Match, admit and release a prompt that is entirely in `tier`."""
    suffix = "" if tier == "device" else f" ({tier})"
    with watch.on(f"hash{suffix}"):
        manager.add("next", tokens)
    with watch.on(f"match + admit{suffix}"):
        match = manager.match("next")
        admitted = manager.admit("next")
    # the last token is always left to compute
    hits = (LONG_BLOCKS - 1) * BLOCK_TOKENS
    if (
        not isinstance(admitted, Admitted)
        or not match.num_tokens == admitted.by_tier.get(tier) == hits
    ):
        raise RuntimeError(f"not all was found on {tier}: {match}, {admitted}")
    if admitted.plan is not None:
        with watch.on(f"completed{suffix}"):
            manager.completed(admitted.plan.ticket)
    with watch.on(f"release{suffix}"):
        manager.release("next")


# ---- a decode step

STEP_BLOCKS = (1024, 64 * 1024)
_STEP_BLOCK_TOKENS = 16
_STEPS = 200


def step_figure(plan: Plan) -> list[Figure]:
    """Time a decode step (`append`, `extend`, `computed` of one token) of a request of 1k and of
    64k blocks.
    """
    watch = Watch()
    for blocks in STEP_BLOCKS:
        manager, tokens = _decoding(blocks, _STEPS * (1 + max(9, plan.rounds)))
        name = f"{blocks:,} blocks"
        for turn in range(1 + max(9, plan.rounds)):
            clock = watch if turn else Watch()
            with clock.on(name):
                for _ in range(_STEPS):
                    tokens += 1
                    manager.append("runs", [1])
                    manager.extend("runs", tokens)
                    manager.computed("runs", tokens)
        manager.check()
    short, long = (f"{blocks:,} blocks" for blocks in STEP_BLOCKS)
    ratios = [
        after / before
        for before, after in zip(
            watch.processor[short], watch.processor[long], strict=True
        )
    ]
    told = ", ".join(
        f"{name} {seconds_text(statistics.median(each) / _STEPS)}"
        for name, each in watch.processor.items()
    )
    return [
        Figure(
            "decode_step_growth",
            statistics.median(ratios),
            1.5,
            "times",
            {"times": ratios, "processor_seconds": watch.processor},
            f"processor time of {_STEPS} steps; one step: {told}",
        )
    ]


def _decoding(blocks: int, steps: int) -> tuple[BlockManager, int]:
    """Return a manager with a request that has computed `blocks` blocks, and its tokens."""
    manager = BlockManager(
        blocks + 1 + steps // _STEP_BLOCK_TOKENS, _STEP_BLOCK_TOKENS
    )
    tokens = blocks * _STEP_BLOCK_TOKENS
    manager.add("runs", np.zeros(tokens, np.int32))
    manager.admit("runs")
    manager.computed("runs", tokens)
    return manager, tokens


# ---- a million nodes


def tree_figures(plan: Plan) -> list[Figure]:
    """Time the eviction of 1,000 of 1,000,000 nodes for two shapes of tree, and measure the memory
    of a node.
    """
    nodes = 100_000 if plan.quick else 1_000_000
    watch = Watch()
    memory = dict[str, dict[str, float]]()
    for shape, length in (("leaves", 1), ("chains", LONG_BLOCKS)):
        say(f"  {nodes:,} nodes: {shape} ...")
        with opened(plan, _LAYOUT, HOST_SLOTS * _LAYOUT.slot_bytes) as cache:
            tracemalloc.start()
            allocator = BlockAllocator(nodes, LowerTiers(cache))
            empty = _traced()
            _fill(allocator, length)
            memory[shape] = _parts(allocator.tree, _traced() - empty) | {
                "pool": empty / nodes
            }
            tracemalloc.stop()
            _use_again(allocator.tree, nodes // 5)
            _evict(plan, allocator, shape, watch)
            allocator.tree.check()
    slower = max(memory, key=watch.median)
    note = f"{slower} of {nodes:,} nodes"
    return [
        watch.figure("evict_1000_of_1m_seconds", 0.010, slower, note),
        _bytes_figure(memory),
    ]


def _fill(allocator: BlockAllocator, length: int) -> None:
    """Insert prompts of `length` blocks without a common prefix, one after the other, until no
    block is free.
    """
    blocks = allocator.pool.allocate(allocator.pool.free) or []
    for first in range(0, len(blocks), length):
        tip = None
        for block in blocks[first : first + length]:
            tip = allocator.tree.insert(
                sha256(block.to_bytes(4)).digest(), NAMESPACE.root, tip, block
            )
        if tip is not None:
            allocator.tree.unlock(tip, allocator.tree.now())


def _use_again(tree: Tree, times: int) -> None:
    """Use prompts again at random, so that the order of eviction is not that of memory."""
    leaves = [node for node in tree.nodes.values() if not node.children]
    dice = random.Random(1)
    for end in dice.choices(leaves, k=min(times, len(leaves))):
        tree.lock(end)
        tree.unlock(end, tree.now())


def _evict(
    plan: Plan, allocator: BlockAllocator, shape: str, watch: Watch
) -> None:
    """Evict without a copy, then to the host."""
    completion = Completion(allocator, 1, BLOCK_TOKENS)
    for turn in range(1 + max(9, plan.rounds)):
        clock = watch if turn else Watch()  # the first round warms up
        allocator.lower_tiers.paused = True
        free = allocator.pool.free
        with clock.on(shape):
            copies = allocator.evict(EVICTED)
        if copies is not None or allocator.pool.free != free + EVICTED:
            raise RuntimeError(
                f"{allocator.pool.free - free} blocks were evicted"
            )
        allocator.lower_tiers.paused = False
        with clock.on(f"{shape} to the host"):
            copies = allocator.evict(EVICTED)
        if copies is None or len(copies.copies) != EVICTED:
            raise RuntimeError("the host did not take all")
        with clock.on(f"{shape} at the host"):
            completion.report(copies.ticket, 0, None)


# ---- memory


def _traced() -> int:
    """Return the bytes of all live objects that were created after tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _parts(tree: Tree, taken: int) -> dict[str, float]:
    """Return the bytes of a node, and the bytes of each of its parts."""
    nodes = len(tree.nodes)
    key, node = next(iter(tree.nodes.items()))
    parts = {
        "node": sys.getsizeof(node),
        "key": sys.getsizeof(key),
        "dict": sys.getsizeof(tree.nodes) / nodes,
    }
    whole = taken / nodes
    return {
        "whole": whole,
        **parts,
        "numbers and heap entry": whole - sum(parts.values()),
    }


def _bytes_figure(memory: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return the figure of the shape that takes more memory."""
    told = (
        (
            f"{shape} {parts['whole']:.0f} "
            f"({', '.join(f'{what} {parts[what]:.0f}' for what in list(parts)[1:-1])})"
        )
        for shape, parts in memory.items()
    )
    note = f"{'; '.join(told)}; the pool besides: {memory['leaves']['pool']:.0f} a block"
    return Figure(
        "bytes_per_node",
        max(parts["whole"] for parts in memory.values()),
        None,
        "bytes",
        memory,
        note,
    )
