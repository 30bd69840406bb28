"""What processes that store into one tier at the same time cost each other:
`python benchmarks/many_processes.py [--json] [--quick] [--only PARTS]`.

One, eight and sixteen processes store prompts of 16 chunks of 1 KiB into one full tier in host
memory, which is almost only bookkeeping, all of it behind the store's gate. Printed for each number
of processes: processor time a store (of all processes together), the median and the longest time
that a store took, how many stores were not whole, and what share of the stores of the quickest
process the slowest one got. Two trees: `python benchmarks/paired.py OLD NEW --scripts NEW --only
many_processes`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from calls import CHUNK_TOKENS, CHUNKS, layout_of
from ground import Part, Plan, main
from harness import MIB, Figure

from pagoda import Cache, Namespace
from pagoda.transfer import BlockKV

_CHUNK_BYTES = 1 << 10
_TIER_BYTES = 4 * MIB
_STRIDE = 1000  # between the first tokens of two prompts
_PROMPTS = 100_000  # of a process
_WARM = 50
_SECONDS = 3.0
_START_SECONDS = 120.0


class Storing:
    """One of the processes, and what it printed."""

    def __init__(self, directory: Path, number: int, seconds: float) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "store",
                directory,
                str(number),
                str(seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until it has opened the tier. RuntimeError if it ended."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(
                "a process that should store could not open the tier"
            )

    def begin(self) -> None:
        """Let it store."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, float]:
        """Wait for its end and return what it measured."""
        said, _ = self._process.communicate(timeout=_START_SECONDS)
        measured: dict[str, float] = json.loads(said)
        return measured


def store_for(directory: Path, number: int, seconds: float) -> None:
    """Open the tier, say so, wait for a line, store for some seconds, and print what it took."""
    layout = layout_of(_CHUNK_BYTES)
    kv = BlockKV(np.zeros((CHUNKS, _CHUNK_BYTES), np.uint8), layout)
    tokens = np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.int32)
    first = number * _PROMPTS
    with Cache(
        namespace=Namespace("processes"),
        layout=layout,
        chunk_tokens=CHUNK_TOKENS,
        host_size=_TIER_BYTES,
        host_path=directory,
    ) as cache:
        for prompt in range(_WARM):
            cache.store(tokens + (first + prompt) * _STRIDE, kv)
        print("ready", flush=True)
        sys.stdin.readline()
        took: list[float] = []
        not_whole = 0
        processor = time.process_time()
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            prompt = tokens + (first + _WARM + len(took)) * _STRIDE
            stored = cache.store(prompt, kv)
            not_whole += stored.num_tokens < tokens.size
            took.append(time.monotonic() - began)
        measured = {
            "stores": len(took),
            "not_whole": not_whole,
            "processor": time.process_time() - processor,
            "median": statistics.median(took),
            "longest": max(took),
        }
    print(json.dumps(measured), flush=True)


def figures(plan: Plan, processes: int) -> list[Figure]:
    """Let that many processes store at the same time, and return what it cost."""
    seconds = _SECONDS / 3 if plan.quick else _SECONDS
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.shm
    ) as root:
        storing = [
            Storing(Path(root) / "tier", number, seconds)
            for number in range(processes)
        ]
        for one in storing:
            one.wait_until_ready()
        for one in storing:
            one.begin()
        results = [one.result() for one in storing]
    stores = [result["stores"] for result in results]
    processor = sum(result["processor"] for result in results) / sum(stores)
    median = statistics.median(result["median"] for result in results)
    longest = max(result["longest"] for result in results)
    not_whole = sum(result["not_whole"] for result in results)
    name = f"processes_{processes}"
    note = f"{sum(stores):.0f} stores, {not_whole:.0f} not whole"
    times = {
        "store_processor_seconds": processor,
        "store_median_seconds": median,
        "store_longest_seconds": longest,
    }
    found = [
        Figure(
            f"{name}_{what}", value, None, "seconds", {"seconds": [value]}, note
        )
        for what, value in times.items()
    ]
    fair = min(stores) / max(stores)
    return [
        *found,
        Figure(f"{name}_fairness", fair, None, "ratio", {"ratio": [fair]}, note),
    ]


PARTS: dict[str, Part] = {
    "one": lambda plan: figures(plan, 1),
    "eight": lambda plan: figures(plan, 8),
    "sixteen": lambda plan: figures(plan, 16),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["store"]:
        store_for(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main(__doc__, PARTS, {}, with_fio=False)
