"""The limits of this machine, without `pagoda`: copying memory, direct disk I/O, keyed hashing.

Run alone (`python benchmarks/limits.py`) it prints the limits in absolute units with their thread
counts. The other benchmarks race its parts against the product, turn by turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from harness import MIB, Runs, Step, gb_per_second, machine, race, say

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32]

# what each side cycles through: several times a common last-level cache
SPREAD_BYTES = 256 * MIB
THREADS = (1, 2, 4)
PIECES = (1 * MIB, 8 * MIB, 32 * MIB)
Combination = tuple[int, int]  # (threads, bytes of one call)
COMBINATIONS: tuple[Combination, ...] = tuple(
    (threads, piece) for threads in THREADS for piece in PIECES
)


def touched(nbytes: int, seed: int = 0, shared: Path | None = None) -> Bytes:
    """Return page-aligned random bytes, every page populated: private (with huge pages, as numpy
    asks) or shared.

    `shared` is a directory of a memory filesystem: the memory is then an unnamed mapped file in it.
    """
    if shared is None:
        memory = mmap.mmap(
            -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        with tempfile.TemporaryFile(dir=shared) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
    array = np.frombuffer(memory, np.uint8)
    block = np.random.default_rng(seed).integers(
        0, 256, min(nbytes, 4 * MIB), np.uint8
    )
    for start in range(0, nbytes, block.size):
        part = array[start : start + block.size]
        np.copyto(part, block[: part.size])
    return array


def mapped(path: Path, nbytes: int, count: int) -> list[Bytes]:
    """Return `count` arrays of `nbytes` over a second mapping of an existing file in memory,
    populated.
    """
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes * count), np.uint8)
    memory[::4096].max()  # maps the pages into this process
    return [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def pieces(
    nbytes: int, count: int, seed: int = 0, shared: Path | None = None
) -> list[Bytes]:
    """Return `count` touched arrays of `nbytes`, consecutive in one piece of memory."""
    memory = touched(nbytes * count, seed, shared)
    return [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def spread(nbytes: int) -> int:
    """Return how many chunks of `nbytes` each side cycles through, more than fit into a processor
    cache.
    """
    return max(4, SPREAD_BYTES // nbytes)


class Copier:
    """np.copyto by `threads` threads, a contiguous share each. Thread-safe; `close` ends the
    threads.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def copy(self, destination: Bytes, source: Bytes) -> None:
        """Copy `source` to `destination` (same size) and return when the copy is complete."""
        if self._pool is None:
            np.copyto(destination, source)
            return
        cuts = [source.size * i // self.threads for i in range(self.threads + 1)]
        shares = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        others = [
            self._pool.submit(np.copyto, destination[share], source[share])
            for share in shares[1:]
        ]
        np.copyto(destination[shares[0]], source[shares[0]])
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class Memcpy:
    """The limit of host memory: np.copyto between touched arrays, SPREAD_BYTES on each side.

    `ahead` (a share of the cycle) keeps entrants of one race that read the same sources, or write
    the same destinations, far apart, so that no entrant finds in a processor cache what another has
    just used.
    """

    def __init__(
        self,
        copier: Copier,
        sources: Sequence[Bytes],
        destinations: Sequence[Bytes],
        ahead: float = 0.5,
        batch: int = 1,
    ) -> None:
        self._copier = copier
        self._sources = sources
        self._destinations = destinations
        self._ahead = int(len(sources) * ahead)
        self._batch = batch

    def step(self, number: int) -> None:
        """`batch` copies."""
        first = number * self._batch + self._ahead
        for place in range(first, first + self._batch):
            source = self._sources[place % len(self._sources)]
            self._copier.copy(
                self._destinations[place % len(self._destinations)], source
            )


class DirectFile:
    """The limit of a disk: a preallocated file of `nbytes`, moved with O_DIRECT by several threads.

    The file is written once at creation, because unwritten extents are read as zeros without any
    I/O and their first write costs more. `direct` says whether the filesystem granted O_DIRECT. One
    turn at a time.
    """

    def __init__(self, path: Path, nbytes: int, turn_bytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.turn_bytes = turn_bytes
        self.direct = True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._file = os.open(path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._file, 0, nbytes)
        self._buffer = touched(turn_bytes, 3).data
        self._pools = {
            threads: ThreadPoolExecutor(threads) for threads in THREADS
        }
        for number in range(nbytes // turn_bytes):
            self.write((2, 8 * MIB), number)
        os.fsync(self._file)

    def write(self, combination: Combination, number: int) -> None:
        """Write `turn_bytes` at the number's place and return when the device has them."""
        self._turn(self._write, combination, number)

    def read(self, combination: Combination, number: int) -> None:
        """Read `turn_bytes` from the number's place, without the page cache."""
        self._turn(self._read, combination, number)

    def _turn(
        self,
        move: Callable[[int, int, int], None],
        combination: Combination,
        number: int,
    ) -> None:
        threads, piece = combination
        base = number * self.turn_bytes % self.nbytes
        starts = range(0, self.turn_bytes, piece)
        for _ in self._pools[threads].map(
            lambda start: move(base, start, piece), starts
        ):
            pass

    def _write(self, base: int, start: int, size: int) -> None:
        stop = min(start + size, self.turn_bytes)
        while start < stop:
            start += os.pwrite(self._file, self._buffer[start:stop], base + start)

    def _read(self, base: int, start: int, size: int) -> None:
        stop = min(start + size, self.turn_bytes)
        while start < stop:
            start += os.preadv(
                self._file, [self._buffer[start:stop]], base + start
            )

    def entrants(
        self, kind: str, combinations: Sequence[Combination] = COMBINATIONS
    ) -> dict[str, Step]:
        """Return an entrant for each combination, each at a separate place; `kind` is "write" or
        "read".
        """
        turn = self.write if kind == "write" else self.read

        def entrant(combination: Combination, ahead: int) -> Step:
            return lambda number: turn(combination, number + ahead)

        return {
            combination_name(each): entrant(each, ahead)
            for ahead, each in enumerate(combinations)
        }

    def close(self) -> None:
        """End the threads and remove the file."""
        for pool in self._pools.values():
            pool.shutdown()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def combination_name(combination: Combination) -> str:
    """Return the name of a combination in the results."""
    return f"{combination[0]} threads x {combination[1] // MIB} MiB"


def fastest(runs: Runs, names: Sequence[str]) -> str:
    """Return the entrant with the smallest median time over all rounds: this one is the limit in
    each round.
    """
    return min(names, key=lambda name: statistics.median(runs[name]))


def hash_chain(tokens: Ids, chunk_tokens: int, root: bytes) -> list[bytes]:
    """Hash in a bare loop: one keyed blake3 call a chunk, chained. `tokens` is contiguous
    little-endian int32.
    """
    view = tokens.data.cast("B")
    step = chunk_tokens * 4
    key = root
    chain = []
    for start in range(0, len(view) - step + 1, step):
        key = blake3(view[start : start + step], key=key).digest()
        chain.append(key)
    return chain


def fio(
    directory: Path, kind: str, nbytes: int, seconds: int = 3
) -> dict[str, object] | None:
    """Measure fio (O_DIRECT, 8 MiB calls, 4 in flight by io_uring, else by psync); None where it is
    not installed.
    """
    program = shutil.which("fio")
    if program is None:
        return None
    path = directory / "fio.bin"
    common = (
        f"--name=limit --filename={path} --size={nbytes} --direct=1 --bs=8M "
        "--output-format=json"
    )
    try:
        for engine in (
            "--ioengine=io_uring --iodepth=4",
            "--ioengine=psync --numjobs=4 --group_reporting",
        ):
            command = [
                program,
                *common.split(),
                f"--runtime={seconds}",
                "--time_based",
                f"--rw={kind}",
                *engine.split(),
            ]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60 + seconds,
                check=False,
            )
            if done.returncode == 0:
                found = json.loads(done.stdout[done.stdout.index("{") :])
                speed = found["jobs"][0][kind]["bw_bytes"] / 1e9
                return {
                    "gb_per_second": round(speed, 3),
                    "how": f"{kind} --bs=8M {engine}",
                }
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired):
        pass
    finally:
        path.unlink(missing_ok=True)
    return None


def memory_limits(rounds: int) -> dict[str, object]:
    """Measure np.copyto by 1 thread and by one thread per core, at 32 MiB and 1 MiB."""
    found: dict[str, object] = {}
    for nbytes in (32 * MIB, MIB):
        copiers = [
            Copier(threads)
            for threads in sorted({1, len(os.sched_getaffinity(0))})
        ]
        steps = spread(nbytes)
        sources = pieces(nbytes, steps, 1)
        destinations = pieces(nbytes, steps, 2)
        entrants = {
            f"{each.threads} threads": Memcpy(
                each, sources, destinations, place / len(copiers)
            ).step
            for place, each in enumerate(copiers)
        }
        runs = race(entrants, rounds, steps)
        found[f"memcpy_{nbytes // MIB}mib_gb_per_second"] = {
            name: gb_per_second(spent, nbytes * steps)
            for name, spent in runs.items()
        }
        for each in copiers:
            each.close()
    return found


def disk_limits(
    directory: Path, rounds: int, nbytes: int, turn_bytes: int
) -> dict[str, object]:
    """Measure direct writes and reads of every combination, and fio's if it is installed."""
    file = DirectFile(directory / "limit.bin", nbytes, turn_bytes)
    found: dict[str, object] = {"o_direct": file.direct}
    for kind in ("write", "read"):
        runs = race(file.entrants(kind), rounds)
        found[f"disk_{kind}_best"] = fastest(runs, list(runs))
        found[f"disk_{kind}_gb_per_second"] = {
            name: gb_per_second(spent, turn_bytes) for name, spent in runs.items()
        }
    file.close()
    for kind in ("write", "read"):
        found[f"fio_{kind}"] = fio(directory, kind, nbytes)
    return found


def hash_limits(rounds: int) -> dict[str, object]:
    """Measure the milliseconds of the bare loop over 128k tokens in chunks of 256."""
    tokens = np.arange(128 * 1024, dtype="<i4")
    runs = race(
        {"loop": lambda _: void(hash_chain(tokens, 256, bytes(32)))}, rounds, 5
    )
    return {
        "blake3_loop_128k_ms": [
            round(spent / 5 * 1e3, 4) for spent in runs["loop"]
        ]
    }


def void(_: object) -> None:
    """Discard a result."""


def main() -> None:
    """Measure and print the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="(always JSON; accepted for symmetry)"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--disk-dir",
        default="/var/tmp",
        help="a directory on the filesystem to measure",
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else 7
    found = memory_limits(rounds) | hash_limits(rounds)
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=options.disk_dir
    ) as directory:
        say("disk ...")
        turn = (32 if options.quick else 128) * MIB
        found |= disk_limits(Path(directory), rounds, 4 * turn, turn)
    print(json.dumps(found | {"machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
