"""What the four calls cost: `python benchmarks/calls.py [--json] [--quick]`.

Processor time of the whole process, so that the threads which write to a disk count, and the time
that is spent waiting does not. `host`: chunks of 64 KiB in host memory. `tiny`: chunks of 1 KiB
that evict others, which is almost only bookkeeping. `disk`: chunks of 64 KiB on a disk. Two trees,
which is how a change is compared with an earlier commit: `python benchmarks/paired.py OLD NEW
--scripts NEW --only calls --rounds 7`.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from ground import Part, Plan, main
from harness import MIB, Figure
from numpy.typing import NDArray

from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import BlockKV

CHUNK_TOKENS = 16
CHUNKS = 16  # of each call
PROMPTS = 30  # that a tier holds when the calls are timed
FLUSH_SECONDS = 60
HOST_BYTES = 512 * MIB


class Calls:
    """The calls of one cache with one tier, on prompts of 16 chunks."""

    def __init__(self, cache: Cache, chunk_bytes: int, calls: int) -> None:
        layout = layout_of(chunk_bytes)
        self.cache = cache
        # Whole pages, as an engine's blocks are. Where the heap begins depends on the length of a
        # tree's path, and a copy from an address that is no multiple of 64 takes 8 % longer.
        pages = mmap.mmap(-1, CHUNKS * chunk_bytes)
        self.memory = np.frombuffer(pages, np.uint8).reshape(CHUNKS, chunk_bytes)
        self.kv = BlockKV(self.memory, layout)
        self.calls = calls
        self.new_prompts = iter(range(1000, 1_000_000))

    def store(self) -> None:
        """Store a prompt that no tier has, and wait until it is on the disk, if there is one."""
        self.cache.store(prompt(next(self.new_prompts)), self.kv)
        self.cache.flush(FLUSH_SECONDS)

    def keep(self) -> None:
        """Store the prompts that are looked up and retrieved."""
        for number in range(PROMPTS):
            self.cache.store(prompt(number), self.kv)
        self.cache.flush(FLUSH_SECONDS)

    def require_hits(self) -> None:
        """Raise RuntimeError if a prompt that is looked up and retrieved is not there whole."""
        for number in range(PROMPTS):
            found = self.cache.lookup(prompt(number)).num_tokens
            if found != CHUNKS * CHUNK_TOKENS:
                raise RuntimeError(
                    f"prompt {number}: {found} of {CHUNKS * CHUNK_TOKENS} tokens are there"
                )

    def seconds(self, call: Callable[[int], object]) -> float:
        """Return the processor time of a call: the mean of the quickest tenth, since others were
        interrupted.
        """
        spent = []
        for number in range(self.calls):
            began = time.process_time()
            call(number)
            spent.append(time.process_time() - began)
        spent.sort()
        quickest = spent[: max(3, self.calls // 10)]
        return sum(quickest) / len(quickest)


def layout_of(chunk_bytes: int) -> KVLayout:
    """Return a layout whose blocks are chunks of that many bytes."""
    return KVLayout.opaque(CHUNK_TOKENS, chunk_bytes, "calls")


def prompt(number: int) -> NDArray[np.int32]:
    """Return the tokens of a prompt; no two have a chunk in common."""
    return np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.int32) + number * 1000


@contextmanager
def opened(
    directory: Path, tier: str, size_bytes: int, chunk_bytes: int
) -> Iterator[Cache]:
    """Open a cache with one tier, `host` or `disk`, in a directory of its own below `directory`."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=directory
    ) as root:
        place = Path(root) / "tier"
        if tier == "host":
            tiers = {"host_size": size_bytes, "host_path": place}
        else:
            tiers = {"host_size": 0, "disk_size": size_bytes, "disk_path": place}
        with Cache(
            namespace=Namespace("calls"),
            layout=layout_of(chunk_bytes),
            chunk_tokens=CHUNK_TOKENS,
            **tiers,
        ) as cache:
            yield cache


def host_figures(plan: Plan) -> list[Figure]:
    """Time the calls on host memory that has room for all."""
    with opened(plan.shm, "host", HOST_BYTES, 64 << 10) as cache:
        calls = Calls(cache, 64 << 10, 50 if plan.quick else 150)
        for _ in range(
            HOST_BYTES // calls.memory.nbytes
        ):  # so that no store is the first that touches its pages
            calls.store()
        cache.clear()
        return figures("host", plan, calls)


def tiny_figures(plan: Plan) -> list[Figure]:
    """Time the calls on host memory that is full, with chunks of 1 KiB."""
    with opened(plan.shm, "host", 1 * MIB, 1 << 10) as cache:
        calls = Calls(cache, 1 << 10, 50 if plan.quick else 150)
        for _ in range(100):
            calls.store()
        # the other calls evict nothing
        return [stores_figure("tiny", plan, calls)]


def disk_figures(plan: Plan) -> list[Figure]:
    """Time the calls on a disk, where a store ends when all is written."""
    with opened(plan.disk, "disk", 512 * MIB, 64 << 10) as cache:
        return figures(
            "disk", plan, Calls(cache, 64 << 10, 30 if plan.quick else 60)
        )


def figures(name: str, plan: Plan, calls: Calls) -> list[Figure]:
    """Return the figures of the calls, each the median over rounds."""
    found = [stores_figure(name, plan, calls)]
    calls.keep()
    calls.require_hits()
    first_chunk = prompt(5)[:CHUNK_TOKENS]
    timed: dict[str, Callable[[int], object]] = {
        "lookup_1": lambda _: calls.cache.lookup(first_chunk),
        "lookup_16": lambda _: calls.cache.lookup(prompt(5)),
        "miss": lambda _: calls.cache.lookup(prompt(999)),
        "retrieve_16": lambda number: calls.cache.retrieve(
            prompt(number % PROMPTS), calls.kv
        ),
    }
    return found + [
        figure(f"{name}_{call}", plan, calls, work)
        for call, work in timed.items()
    ]


def stores_figure(name: str, plan: Plan, calls: Calls) -> Figure:
    """Return the figure of a store."""
    return figure(f"{name}_store_16", plan, calls, lambda _: calls.store())


def figure(
    call: str, plan: Plan, calls: Calls, work: Callable[[int], object]
) -> Figure:
    """Return the figure of one call. It has no target: it is for pairs of trees."""
    rounds = 1 if plan.quick else 3
    spent = [calls.seconds(work) for _ in range(rounds)]
    return Figure(
        f"{call}_processor_seconds",
        statistics.median(spent),
        None,
        "seconds",
        {"seconds": spent},
    )


PARTS: dict[str, Part] = {
    "host": host_figures,
    "tiny": tiny_figures,
    "disk": disk_figures,
}

if __name__ == "__main__":
    main(__doc__, PARTS, {}, with_fio=False)
