"""`Cache.store` and `Cache.retrieve` of whole prompts against copies and direct reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ground import NAMESPACE, Plan
from harness import MIB, Figure, Runs, Step, race, ratio_figure
from limits import Bytes, Copier, DirectFile, Memcpy, fastest, pieces, spread

from pagoda import Cache, Config, KVLayout
from pagoda import policy as policies
from pagoda.tiers import DiskTier, HostTier, Tier
from pagoda.transfer import BlockKV, DenseKV, Transfer

CHUNK_TOKENS = 256
CHUNKS = 16  # of one prompt: 4,096 tokens
# at least: one reserve takes up to an eighth of them, which is a whole prompt
HOST_SLOTS = 128
Tokens = npt.NDArray[np.int32]
Make = Callable[[int], Transfer]


@dataclass(frozen=True)
class Case:
    """Prompts of `chunks` chunks, `prompts` of them in memory at once; `make(i)` is the KV of the
    i-th.
    """

    layout: KVLayout
    chunks: int
    prompts: int
    make: Make
    # all that `make` hands out, as flat pieces of a chunk
    memory: Sequence[Bytes]
    run_bytes: int

    @property
    def turn_bytes(self) -> int:
        """Return the bytes of one prompt."""
        return self.chunks * self.layout.chunk_bytes


def tokens_of(number: int, chunks: int) -> Tokens:
    """Return the prompt of one turn. Its first token differs from that of every other prompt."""
    tokens = np.arange(chunks * CHUNK_TOKENS, dtype=np.int32)
    tokens[0] = 1_000_000 + number
    return tokens


def block_case(
    nbytes: int, threads: int, seed: int = 1, chunks: int = CHUNKS
) -> Case:
    """Block-first KV: a chunk is one run of `nbytes` in the engine too."""
    count = max(spread(nbytes), chunks)
    layout = KVLayout.opaque(CHUNK_TOKENS, nbytes, "benchmark")
    blocks = pieces(nbytes, count, seed)
    whole = np.lib.stride_tricks.as_strided(
        blocks[0], (count, nbytes), (nbytes, 1)
    )
    prompts = count // chunks

    def make(number: int) -> Transfer:
        first = number % prompts * chunks
        return BlockKV(
            whole, layout, table=range(first, first + chunks), threads=threads
        )

    return Case(layout, chunks, prompts, make, blocks, nbytes)


def dense_case(nbytes: int, threads: int, seed: int = 1) -> Case:
    """Per-layer K and V of [heads, tokens, dim] in 16 bits: 32 x 8 x 128 makes 32 MiB, 8 x 2 x 64 1
    MiB.
    """
    layers, heads, dim = {32 * MIB: (32, 8, 128), MIB: (8, 2, 64)}[nbytes]
    layout = KVLayout.dense(layers, heads, dim, "bfloat16", CHUNK_TOKENS)
    count = max(spread(nbytes), CHUNKS)
    chunks = CHUNKS
    prompts = count // chunks
    memory = pieces(nbytes, count, seed)
    shape = (prompts, layers, 2, heads, chunks * CHUNK_TOKENS, dim)
    flat = np.lib.stride_tricks.as_strided(memory[0], (count * nbytes,), (1,))
    planes = flat.view(np.uint16).reshape(shape)

    def make(number: int) -> Transfer:
        return DenseKV(
            [tuple(layer) for layer in planes[number % prompts]],
            layout,
            threads=threads,
        )

    run_bytes = DenseKV([tuple(layer) for layer in planes[0]], layout).run_bytes
    return Case(layout, chunks, prompts, make, memory, run_bytes)


@contextmanager
def opened(
    plan: Plan,
    layout: KVLayout,
    host_bytes: int,
    disk: Path | None = None,
    disk_bytes: int = 0,
    policy: str = policies.DEFAULT,
) -> Iterator[Cache]:
    """Open a cache with a populated host tier in shared memory, and with a disk tier on request."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.shm
    ) as root:
        host = HostTier.open(
            layout, Path(root), host_bytes, policy=policy, populate=False
        )
        host.slab.populate(background=False)
        tiers: list[Tier] = [host]
        if disk is not None:
            tiers.append(DiskTier.open(layout, disk, disk_bytes))
        config = Config(
            chunk_tokens=layout.chunk_tokens,
            worth_it=False,
            deadline_seconds=30.0,
        )
        cache = Cache(config, namespace=NAMESPACE, layout=layout, tiers=tiers)
        try:
            yield cache
        finally:
            cache.close()


def store(cache: Cache, case: Case, number: int) -> None:
    """Store the prompt of one turn. Raise RuntimeError unless all of it is kept."""
    stored = cache.store(tokens_of(number, case.chunks), case.make(number))
    if stored.num_chunks != case.chunks:
        raise RuntimeError(f"not all was stored: {stored}")


def retrieve(
    cache: Cache, case: Case, number: int, place: int, tier: str
) -> None:
    """Retrieve the prompt that turn `number` stored, all of it from `tier`, into the KV at
    `place`.
    """
    hit = cache.retrieve(tokens_of(number, case.chunks), case.make(place))
    if hit.by_tier != {tier: case.chunks * CHUNK_TOKENS}:
        raise RuntimeError(
            f"not all came from {tier}: {hit.by_tier}, {hit.reason}, {hit.detail}"
        )


def host_pair(
    plan: Plan, name: str, case: Case, into: Case, target: float, suffix: str
) -> list[Figure]:
    """Race `store` from `case` and `retrieve` into `into`, each against np.copyto of the same
    bytes.
    """
    copier = Copier(plan.threads)
    steps = case.prompts
    away = pieces(case.layout.chunk_bytes, len(case.memory), 5)

    def figure(verb: str, candidate: Step, limit: Memcpy) -> Figure:
        runs = race(
            {"candidate": candidate, "limit": limit.step}, plan.rounds, steps
        )
        return _figure(
            f"{verb}_{name}_vs_memcpy{suffix}", target, runs, case, steps, plan
        )

    def again(number: int) -> None:
        retrieve(cache, into, number % steps, number % steps, "host")

    room = (
        max(2 * case.prompts * case.chunks, 0 if plan.quick else HOST_SLOTS)
        * case.layout.slot_bytes
    )
    with opened(plan, case.layout, room) as cache:
        down = Memcpy(copier, case.memory, away, 0.5, case.chunks)
        write = figure("store", lambda number: store(cache, case, number), down)
    # a new cache with space for all prompts: the policy decided which prompts the cache above kept
    with closing(copier), opened(plan, case.layout, room) as cache:
        for number in range(steps):
            store(cache, case, number)
        up = Memcpy(copier, away, into.memory, 0.5, case.chunks)
        read = figure("retrieve", again, up)
        for number in range(steps):
            again(number)
        if not all(map(np.array_equal, into.memory, case.memory)):
            raise RuntimeError("the bytes that came back are wrong")
    return [write, read]


def _figure(
    key: str, target: float, runs: Runs, case: Case, steps: int, plan: Plan
) -> Figure:
    run = f"runs of {case.run_bytes // 1024} KiB, threads: {plan.threads}"
    figure = ratio_figure(
        key, target, runs, size_bytes=case.turn_bytes * steps, threads=run
    )
    return replace(
        figure,
        runs=dict(figure.runs)
        | {"run_bytes": case.run_bytes, "chunks_a_call": case.chunks},
    )


def block_figures(
    plan: Plan, nbytes: int, target: float, suffix: str
) -> list[Figure]:
    """Race block-first KV."""
    case = block_case(nbytes, plan.threads)
    into = block_case(nbytes, plan.threads, 7)
    return host_pair(plan, "block", case, into, target, suffix)


def dense_figures(
    plan: Plan, nbytes: int, target: float, suffix: str
) -> list[Figure]:
    """Race per-layer KV."""
    case = dense_case(nbytes, plan.threads)
    into = dense_case(nbytes, plan.threads, 7)
    return host_pair(plan, "dense", case, into, target, suffix)


def disk_figures(plan: Plan) -> list[Figure]:
    """Race disk to destination against direct reads: prompts of 4,096 tokens that are no longer in
    host memory.
    """
    prompts = 8
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.disk
    ) as directory:
        root = Path(directory)
        case = block_case(
            32 * MIB, plan.threads, chunks=4 if plan.quick else CHUNKS
        )
        disk_bytes = (prompts + 2) * case.turn_bytes
        room = prompts // 2 * case.turn_bytes
        # LRU evicts the oldest first; a policy that learns from the turns would serve some of them
        # from the host
        with opened(
            plan, case.layout, room, root / "tier", disk_bytes, policy="lru"
        ) as cache:
            for number in range(prompts):
                store(cache, case, number)
                cache.flush(60)
            file = DirectFile(
                root / "limit.bin", prompts * case.turn_bytes, case.turn_bytes
            )
            # The host tier has space for half of the prompts: each is evicted before its next turn.
            steps = {
                "candidate": lambda number: retrieve(
                    cache, case, number % prompts, number, "disk"
                )
            }
            runs = race(steps | file.entrants("read"), plan.rounds)
            best = fastest(runs, [name for name in runs if name != "candidate"])
            threads = f"limit: {best}" + (
                "" if file.direct else ", NO O_DIRECT HERE"
            )
            file.close()
    figure = ratio_figure(
        "retrieve_disk_vs_limit",
        0.85,
        runs,
        size_bytes=case.turn_bytes,
        threads=threads,
        limit=best,
    )
    return [figure]
