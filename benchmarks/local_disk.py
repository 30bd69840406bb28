"""The disk tier against the best direct I/O."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ground import NAMESPACE, Plan, keys_of
from harness import MIB, Figure, Runs, race, ratio_figure
from limits import Bytes, DirectFile, fastest, pieces

from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.slab import MemorySlab
from pagoda.tiers import Chunk, DiskTier


class DiskSteps:
    """Save and load `turn` chunks a call through a DiskTier, with verification. Single-threaded."""

    def __init__(
        self, tier: DiskTier, sources: Sequence[Bytes], buffers: Sequence[Bytes]
    ) -> None:
        self._tier = tier
        self._sources = sources
        self._buffers = buffers

    def write(self, keys: Sequence[bytes]) -> None:
        """Save and wait until every chunk is on the device and in the ledger."""
        parents = [None, *keys[:-1]]
        chunks = [
            Chunk(key, place, 256, source, parent, _always)
            for place, (key, source, parent) in enumerate(
                zip(keys, self._sources, parents, strict=True)
            )
        ]
        for future in self._tier.store(chunks, NAMESPACE.root):
            if not (done := future.result(60)).ok:
                raise RuntimeError(f"a chunk was not saved: {done.reason}")

    def read(self, keys: Sequence[bytes]) -> None:
        """Load into the buffers and wait until every byte is verified."""
        for future in self._tier.load(
            keys, self._buffers, namespace=NAMESPACE.root
        ):
            if not (done := future.result(60)).ok:
                raise RuntimeError(f"a chunk was not loaded: {done.reason}")


def _always() -> bool:
    return True


def open_disk(root: Path, nbytes: int, chunks: int) -> DiskTier:
    """Open a disk tier for `chunks` chunks of `nbytes`, with default options except the length of
    its queue.
    """
    layout = KVLayout.opaque(256, nbytes, "benchmark")
    size_bytes = chunks * (HEADER_BYTES + layout.slot_bytes)
    tier = DiskTier.open(
        layout, root / "tier", size_bytes, queue_chunks=max(64, chunks)
    )
    tier.register(NAMESPACE)
    return tier


def host_slots(directory: Path, nbytes: int, count: int) -> list[Bytes]:
    """Return slots of a memory slab, the memory that the cache uses as source and destination."""
    path = directory / "slab"
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes * count)
    slab = MemorySlab(path, count, nbytes)
    slab.populate(background=False)
    return [slab.view(slot) for slot in range(count)]


def disk_figures(plan: Plan, nbytes: int, suffix: str = "") -> list[Figure]:
    """Race chunks of `nbytes` to and from the disk tier against the best direct I/O of the same
    filesystem.
    """
    turn_bytes = (64 if plan.quick else 256) * MIB
    turn = turn_bytes // nbytes
    turns = 6
    figures = []
    with (
        tempfile.TemporaryDirectory(
            prefix="pagoda-bench-", dir=plan.disk
        ) as directory,
        tempfile.TemporaryDirectory(
            prefix="pagoda-bench-", dir=plan.shm
        ) as memory,
    ):
        file = DirectFile(
            Path(directory) / "limit.bin", turns * turn_bytes, turn_bytes
        )
        tier = open_disk(Path(directory), nbytes, turns * turn)
        host = host_slots(Path(memory), nbytes, 2 * turn)
        sources = host[:turn]
        buffers = host[turn:]
        for source, made in zip(sources, pieces(nbytes, turn, 1), strict=True):
            np.copyto(source, made)
        rig = DiskSteps(tier, sources, buffers)
        keys = keys_of("disk", (plan.rounds + 1 + turns) * turn)

        def ours(number: int) -> list[bytes]:
            return keys[number * turn : (number + 1) * turn]

        # write every slot once, like the limit's file
        for number in range(turns):
            rig.write(ours(plan.rounds + 1 + number))
        write = race(
            {"candidate": lambda number: rig.write(ours(number))}
            | file.entrants("write"),
            plan.rounds,
        )
        figures.append(
            _disk_figure(
                f"disk_write_vs_limit{suffix}", 0.85, write, turn_bytes, file
            )
        )
        tier.close()
        # "readable after a restart"
        tier = open_disk(Path(directory), nbytes, turns * turn)
        rig = DiskSteps(tier, sources, buffers)
        # the policy chose
        whole = [
            n
            for n in range(plan.rounds + 1 + turns)
            if tier.match_prefix(ours(n)) == turn
        ]
        steps = {
            "candidate": lambda number: rig.read(ours(whole[number % len(whole)]))
        }
        read = race(steps | file.entrants("read"), plan.rounds)
        figures.append(
            _disk_figure(
                f"disk_read_cold_vs_limit{suffix}", 0.90, read, turn_bytes, file
            )
        )
        if not all(map(np.array_equal, buffers, sources)):
            raise RuntimeError("the bytes of a loaded chunk are wrong")
        tier.close()
        file.close()
    return figures


def _disk_figure(
    key: str, target: float, runs: Runs, nbytes: int, file: DirectFile
) -> Figure:
    best = fastest(runs, [name for name in runs if name != "candidate"])
    threads = f"limit: {best}" + ("" if file.direct else ", NO O_DIRECT HERE")
    return ratio_figure(
        key, target, runs, size_bytes=nbytes, threads=threads, limit=best
    )
