"""PagodaKV and LMCache 0.5.6 in turn, in one process: `make bench-peers`, `ARGS='--quick --json'`.

Both keep the same KV: chunks of 256 tokens, each one run of bytes in CPU memory, copied by each
side's own means (pagoda: `BlockKV`; LMCache: one `torch.Tensor.copy_` a chunk, which uses torch's
threads). A ratio is the median over the rounds of LMCache's seconds / pagoda's seconds: above 1
pagoda is faster. The first side alternates, and round one does not count. Exit code 2, with one
line, if LMCache is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERSION = "0.5.6"
if __name__ == "__main__" and (
    missing := [name for name in ("lmcache", "torch") if find_spec(name) is None]
):
    print(
        f"peers: no module {missing[0]}: LMCache {VERSION} is not installed here; `make "
        "bench-peers` installs "
        "it, by pip and into .venv-peers, from benchmarks/peers-requirements.txt and `--no-deps "
        f"lmcache=={VERSION}`"
    )
    sys.exit(2)
os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}

import numpy as np
from harness import MIB, machine, say

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.keys import chunk_keys
from pagoda.transfer import BlockKV

TOKENS = 256  # of a chunk

Call = Callable[[int], object]


@dataclass(frozen=True)
class Line:
    """The seconds of each round of a task that both sides did in turn. A round did `amount` of
    `unit`.
    """

    name: str
    unit: str  # "GB", or "M chunks", "M tokens"
    amount: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Return how much faster pagoda is: the median over the rounds of the ratio within a
        round.
        """
        return statistics.median(
            b / a for a, b in zip(self.ours, self.theirs, strict=True)
        )

    @property
    def speeds(self) -> tuple[float, float]:
        """Return the medians of both sides, in units a second."""
        ours, theirs = (
            self.amount / statistics.median(side)
            for side in (self.ours, self.theirs)
        )
        return ours, theirs


def race(
    line: Line, ours: Call, theirs: Call, rounds: int, before: Call | None = None
) -> Line:
    """Give each side a turn in every round; the first round does not count, and the calls of
    `before` are not timed.
    """
    for turn in range(rounds + 1):
        sides = [(line.ours, ours), (line.theirs, theirs)]
        for seconds, call in sides if turn % 2 else sides[::-1]:
            if before is not None:
                before(turn)
            # torch's threads, which spin after the other side's turn, are idle again
            time.sleep(0.05)
            began = time.perf_counter()
            call(turn)
            if turn:
                seconds.append(time.perf_counter() - began)
    return line


def prompt(number: int, chunks: int) -> list[int]:
    """Return token ids as an engine has them, in a list. Every prompt begins differently."""
    return [1_000_000 + number, *range(1, chunks * TOKENS)]


class Peer:
    """An LMCache engine over KV in blocks of one chunk: `blocks` is a uint8 tensor [blocks,
    bytes].
    """

    def __init__(
        self,
        chunk_bytes: int,
        host_bytes: int,
        disk: Path | None = None,
        disk_bytes: int = 0,
    ) -> None:
        import torch
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector import GPUConnectorInterface
        from lmcache.v1.metadata import LMCacheMetadata

        class Blocks(GPUConnectorInterface):  # type: ignore[misc]
            """Copies whole chunks: chunk i of a prompt is block `first` + i."""

            def to_gpu(
                self, memory_obj: Any, start: int, end: int, **kw: Any
            ) -> None:
                kw["blocks"][kw["first"] + start // TOKENS].copy_(
                    memory_obj.tensor.view(-1)
                )

            def from_gpu(
                self, memory_obj: Any, start: int, end: int, **kw: Any
            ) -> None:
                memory_obj.tensor.view(-1).copy_(
                    kw["blocks"][kw["first"] + start // TOKENS]
                )

            def batched_to_gpu(
                self, objects: Any, starts: Any, ends: Any, **kw: Any
            ) -> None:
                for item in zip(objects, starts, ends, strict=True):
                    self.to_gpu(*item, **kw)

            def batched_from_gpu(
                self, objects: Any, starts: Any, ends: Any, **kw: Any
            ) -> None:
                for item in zip(objects, starts, ends, strict=True):
                    self.from_gpu(*item, **kw)

            def get_shape(self, num_tokens: int) -> Any:
                return torch.Size([2, 1, num_tokens, width])

        width = chunk_bytes // (2 * TOKENS)
        settings: dict[str, object] = {
            "chunk_size": TOKENS,
            "local_cpu": True,
            "max_local_cpu_size": host_bytes / (1 << 30),
            "save_unfull_chunk": False,
            "py_enable_gc": True,
        }
        if disk is not None:
            # O_DIRECT, as in pagoda: otherwise writes end in the page cache, and reads may come
            # from it
            settings |= {
                "local_disk": str(disk),
                "max_local_disk_size": disk_bytes / (1 << 30),
            }
            settings["extra_config"] = {"use_odirect": True}
        config = LMCacheEngineConfig.from_defaults(**settings)
        about = LMCacheMetadata(
            "peers", 1, 1, 0, 0, torch.uint8, (1, 2, TOKENS, 1, width)
        )
        self._id = f"peers-{id(self)}"
        self._builder = LMCacheEngineBuilder
        self._torch = torch
        self.engine = LMCacheEngineBuilder.get_or_create(
            self._id,
            config,
            about,
            Blocks(),
            lambda *_: None,
            lambda value, *_: value,
        )
        self.engine.post_init()

    def store(self, tokens: list[int], blocks: Any, first: int) -> None:
        self.engine.store(tokens, blocks=blocks, first=first)

    def retrieve(self, tokens: list[int], blocks: Any, first: int) -> int:
        return int(self.engine.retrieve(tokens, blocks=blocks, first=first).sum())

    def lookup(self, tokens: list[int]) -> int:
        return int(self.engine.lookup(tokens))

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        for backend in self.engine.storage_manager.storage_backends.values():
            worker = getattr(backend, "disk_worker", None)
            while worker is not None and worker.put_tasks:
                time.sleep(0.0005)

    def forget_memory(self) -> None:
        self.engine.clear(locations=["LocalCPUBackend"])

    def close(self) -> None:
        self._builder.destroy(self._id)


@contextmanager
def both(
    chunk_bytes: int,
    chunks: int,
    prompts: int,
    shm: Path,
    disk: Path | None = None,
    host_prompts: int = 0,
) -> Iterator[tuple[Cache, Peer, KVLayout]]:
    """Open both caches with space for `prompts` prompts each, and as much on disk if `disk` is
    given.
    """
    layout = KVLayout.opaque(TOKENS, chunk_bytes, "peers")
    nbytes = prompts * chunks * layout.slot_bytes
    with tempfile.TemporaryDirectory(prefix="peers-", dir=shm) as memory:
        options: dict[str, Any] = {
            "host_size": (host_prompts or prompts) * chunks * layout.slot_bytes
        }
        if disk is not None:
            (disk / "theirs").mkdir()
            options |= {"disk_size": nbytes, "disk_path": str(disk / "ours")}
        config = Config(
            host_path=memory,
            policy="lru",
            worth_it=False,
            deadline_seconds=60.0,
            **options,
        )
        cache = Cache(config, namespace=Namespace(model="peers"), layout=layout)
        peer = Peer(
            chunk_bytes, nbytes, None if disk is None else disk / "theirs", nbytes
        )
        try:
            yield cache, peer, layout
        finally:
            peer.close()
            cache.close()


def require(found: object, wanted: object, what: str) -> None:
    """Raise RuntimeError if a side did not do its work, because its time would be meaningless."""
    if found != wanted:
        raise RuntimeError(f"{what}: {found} instead of {wanted}")


def memory_lines(
    name: str, chunk_bytes: int, chunks: int, rounds: int, shm: Path
) -> list[Line]:
    """Race store and retrieve in memory."""
    import torch

    prompts = rounds + 3
    source = np.random.default_rng(0).integers(
        0, 256, (2 * chunks, chunk_bytes), dtype=np.uint8
    )
    into = np.zeros_like(source)
    theirs_from = torch.from_numpy(source)
    theirs_into = torch.from_numpy(into)
    asked = [prompt(number, chunks) for number in range(prompts)]
    gigabytes = chunks * chunk_bytes / 1e9
    with both(chunk_bytes, chunks, prompts, shm) as (cache, peer, layout):

        def kv(blocks: np.ndarray[Any, Any], first: int) -> BlockKV:
            return BlockKV(blocks, layout, table=range(first, first + chunks))

        def store(number: int) -> None:
            require(
                cache.store(asked[number], kv(source, 0)).num_chunks,
                chunks,
                "pagoda stored",
            )

        def retrieve(_: int) -> None:
            hit = cache.retrieve(asked[1], kv(into, 0))
            require(hit.num_tokens, chunks * TOKENS, "pagoda retrieved")

        def their_retrieve(_: int) -> None:
            require(
                peer.retrieve(asked[1], theirs_into, chunks),
                chunks * TOKENS,
                "LMCache retrieved",
            )

        def their_store(number: int) -> None:
            peer.store(asked[number], theirs_from, 0)

        # both are full after this: each store evicts
        for number in range(10_000, 10_000 + prompts):
            cache.store(prompt(number, chunks), kv(source, 0))
            peer.store(prompt(number, chunks), theirs_from, 0)
        lines = [
            race(
                Line(f"store, {name}", "GB", gigabytes),
                store,
                their_store,
                rounds,
            )
        ]
        lines.append(
            race(
                Line(f"retrieve, {name}", "GB", gigabytes),
                retrieve,
                their_retrieve,
                rounds,
            )
        )
        require(
            np.array_equal(into[:chunks], source[:chunks]),
            True,
            "pagoda's bytes are right",
        )
        require(
            np.array_equal(into[chunks:], source[:chunks]),
            True,
            "LMCache's bytes are right",
        )
        return lines


def lookup_lines(chunks: int, rounds: int, shm: Path) -> list[Line]:
    """Race look-ups of prompts that are entirely cached, hashing included."""
    import torch

    prompts = 16
    turns = 8
    asked = [prompt(number, chunks) for number in range(prompts)]
    source = np.zeros((chunks, 4096), np.uint8)
    with both(4096, chunks, 4 * prompts, shm) as (cache, peer, layout):
        for tokens in asked:
            cache.store(tokens, BlockKV(source, layout))
            peer.store(tokens, torch.from_numpy(source), 0)

        def ours(_: int) -> None:
            for tokens in asked * turns:
                require(
                    cache.lookup(tokens).num_tokens,
                    chunks * TOKENS,
                    "pagoda found",
                )

        def theirs(_: int) -> None:
            for tokens in asked * turns:
                require(peer.lookup(tokens), chunks * TOKENS, "LMCache found")

        amount = prompts * turns * chunks / 1e6
        return [
            race(
                Line(f"look-up, {chunks} chunks", "M chunks", amount),
                ours,
                theirs,
                rounds,
            )
        ]


def disk_lines(
    chunk_bytes: int, chunks: int, rounds: int, shm: Path, on: Path
) -> list[Line]:
    """Race a store until it is on disk, and a retrieve of chunks that are only on disk."""
    import torch

    prompts = rounds + 2
    source = np.random.default_rng(0).integers(
        0, 256, (chunks, chunk_bytes), dtype=np.uint8
    )
    into = np.zeros_like(source)
    asked = [prompt(number, chunks) for number in range(prompts)]
    gigabytes = chunks * chunk_bytes / 1e9
    root = Path(tempfile.mkdtemp(prefix="peers-", dir=on))
    try:
        with both(
            chunk_bytes, chunks, prompts + 2, shm, root, host_prompts=2
        ) as (cache, peer, layout):

            def write(number: int) -> None:
                require(
                    cache.store(
                        asked[number], BlockKV(source, layout)
                    ).num_chunks,
                    chunks,
                    "pagoda stored",
                )
                require(cache.flush(60), True, "pagoda wrote")

            def their_write(number: int) -> None:
                peer.store(asked[number], torch.from_numpy(source), 0)
                peer.flush()

            def read(number: int) -> None:
                hit = cache.retrieve(asked[number], BlockKV(into, layout))
                require(
                    dict(hit.by_tier),
                    {"disk": chunks * TOKENS},
                    "pagoda retrieved",
                )

            def their_read(number: int) -> None:
                found = peer.retrieve(asked[number], torch.from_numpy(into), 0)
                require(found, chunks * TOKENS, "LMCache retrieved")

            lines = [
                race(
                    Line("write-through to disk", "GB", gigabytes),
                    write,
                    their_write,
                    rounds,
                )
            ]
            forget = peer.forget_memory
            lines.append(
                race(
                    Line("cold read from disk", "GB", gigabytes),
                    read,
                    their_read,
                    rounds,
                    lambda _: forget(),
                )
            )
            require(np.array_equal(into, source), True, "the bytes are right")
            return lines
    finally:
        shutil.rmtree(root, ignore_errors=True)


def hashing_lines(rounds: int) -> list[Line]:
    """Race the keys of 128k tokens: of a list, and of an array."""
    import torch
    from lmcache.v1.multiprocess.token_hasher import TokenHasher
    from lmcache.v1.token_database import ChunkedTokenDatabase

    tokens = (
        np.random.default_rng(0).integers(0, 150_000, 1 << 17).astype(np.int32)
    )
    as_list = tokens.tolist()
    as_tensor = torch.from_numpy(tokens)
    root = bytes(32)
    hasher = TokenHasher(TOKENS, "blake3")
    database = ChunkedTokenDatabase()
    times = 8

    def raced(name: str, ours: Any, theirs: Callable[[], object]) -> Line:
        def mine(_: int) -> None:
            for _ in range(times):
                chunk_keys(ours, root, TOKENS)

        def peers(_: int) -> None:
            for _ in range(times):
                theirs()

        return race(
            Line(name, "M tokens", times * len(tokens) / 1e6), mine, peers, rounds
        )

    def prefix_hashes(tokens: object) -> list[object]:
        return list(database.process_tokens(tokens, make_key=False))

    return [
        raced(
            "hashing a list, LMCache's blake3",
            as_list,
            lambda: hasher.compute_chunk_hashes(as_list),
        ),
        raced(
            "hashing a list, LMCache's builtin hash",
            as_list,
            lambda: prefix_hashes(as_list),
        ),
        raced(
            "hashing an array (a tensor)",
            tokens,
            lambda: prefix_hashes(as_tensor),
        ),
    ]


def measure(
    rounds: int, shm: Path, disk: Path, only: Sequence[str]
) -> list[Line]:
    """Measure all parts, or those in `only`."""
    parts: dict[str, Callable[[], list[Line]]] = {
        "memory": lambda: memory_lines(
            "chunks of 32 MiB", 32 * MIB, 4, rounds, shm
        ),
        "small": lambda: memory_lines("chunks of 1 MiB", MIB, 16, rounds, shm),
        "disk": lambda: disk_lines(32 * MIB, 4, rounds, shm, disk),
        "lookup": lambda: (
            lookup_lines(4, rounds, shm) + lookup_lines(64, rounds, shm)
        ),
        "hashing": lambda: hashing_lines(rounds),
    }
    lines: list[Line] = []
    for name, part in parts.items():
        if not only or name in only:
            say(f"{name} ...")
            lines += part()
    return lines


def main() -> int:
    """Read the command line, measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three rounds instead of seven"
    )
    parser.add_argument(
        "--only", default="", help="some of: memory,small,disk,lookup,hashing"
    )
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path("/var/tmp"),
        help="on the disk to measure",
    )
    options = parser.parse_args()
    import lmcache
    import torch

    only = list(filter(None, options.only.split(",")))
    lines = measure(
        3 if options.quick else 7, options.shm_dir, options.disk_dir, only
    )
    about = machine() | {
        "lmcache": lmcache.__version__,
        "torch": torch.__version__,
    }
    about |= {"torch_threads": torch.get_num_threads()}
    if options.json:
        found = {
            line.name: {
                "ratio": round(line.ratio, 4),
                "unit": f"{line.unit} a second",
                "pagoda": line.speeds[0],
                "lmcache": line.speeds[1],
                "pagoda_seconds": line.ours,
                "lmcache_seconds": line.theirs,
            }
            for line in lines
        }
        print(json.dumps({"lines": found, "machine": about}, indent=1))
        return 0
    print(
        f"{'':42s}{'pagoda':>10s}{'LMCache':>10s}{'':14s}{'ratio':>7s}   rounds"
    )
    for line in lines:
        (ours, theirs), rounds = (
            line.speeds,
            zip(line.ours, line.theirs, strict=True),
        )
        each = " ".join(f"{b / a:.2f}" for a, b in rounds)
        print(
            f"{line.name:42s}{ours:>10.3g}{theirs:>10.3g} "
            f"{line.unit + '/s':13s}{line.ratio:>7.2f}   {each}"
        )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
