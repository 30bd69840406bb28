"""What a host tier takes in its first minute: `python benchmarks/first_minute.py [--quick]`.

A store of `--mib` MiB is opened and filled to its end, in a new process each time, in pairs: with
all of its memory at once, as a size that was written, and growing as it fills, as `auto`. Printed
are medians over the pairs:

    taken      memory of all files of the store after the opening, and after 2 MiB were stored
    open       time of the opening
    total      wall and processor time of the process, from the opening until the store is full and
               its pages are in huge pages
    huge       how much of the slots is in huge pages then, or unlike things are compared
    slowest    processor time of the thread for the slowest of all stores, and over their median
    at a place the same, of each store its median over the pairs: what the store does itself comes
               back at the same fill, what else the machine does comes at any
    evicted    chunks that were evicted or refused before the store was full

After the pairs as many processes only copy as many bytes into memory that is there (`copies`):
their slowest is what the machine alone does to a thread. Not between the pairs: a process that
follows one of another kind finds the free memory in another state.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from harness import machine, say

from pagoda.layout import KVLayout
from pagoda.ledger import Reserved, admin
from pagoda.ledger.stores_under_root import allocated_bytes
from pagoda.tiers import HostTier

_NAMESPACE = hashlib.sha256(b"first minute").digest()
_MIB = 1 << 20
_FIRST_BYTES = 2 * _MIB  # of the first example
_BATCH_BYTES = 16 * _MIB  # of one store
_SETTLE_SECONDS = 120.0
_STORES = ("whole", "grows")
_COPIED_TIMES = 4  # so long about as filling a store takes
# of a store that grows, divided by those of one that does not
_RATIOS = (
    "open_seconds",
    "filled_seconds",
    "total_seconds",
    "processor_seconds",
)


class _Run(NamedTuple):
    """What one process measured: figures by name, and the time of each store."""

    figures: dict[str, float]
    store_seconds: list[float]

    def print(self) -> None:
        """Print it for the process that compares."""
        slowest = max(self.store_seconds)
        self.figures["slowest_store_seconds"] = slowest
        self.figures["slowest_of_median"] = slowest / median(self.store_seconds)
        print(json.dumps(self._asdict()))


def opened(root: Path, mib: int, slot_kib: int, kind: str) -> HostTier:
    """Open the tier: "whole" or "grows"."""
    layout = KVLayout.opaque(16, slot_kib << 10, "first minute")
    return HostTier.open(
        layout, root, mib * _MIB, policy="lru", grows=kind == "grows"
    )


def store(tier: HostTier, numbers: Sequence[int], chunk: np.ndarray) -> int:
    """Store chunks of one prompt; return how many were not stored."""
    keys = [hashlib.sha256(b"%d" % number).digest() for number in numbers]
    outcomes = tier.ledger.reserve(keys, namespace=_NAMESPACE, tokens=16)
    mine = [one for one in outcomes if isinstance(one, Reserved)]
    for view in tier.slab.views([one.slot for one in mine]):
        view[: len(chunk)] = chunk
    tier.ledger.commit(mine)
    return len(keys) - len(mine)


def settle(tier: HostTier) -> None:
    """Wait until no thread of the tier faults pages in any more."""
    until = time.monotonic() + _SETTLE_SECONDS
    for thread in tier.slab._threads:
        thread.join(_SETTLE_SECONDS)
    space = tier.ledger.space
    while time.monotonic() < until and space._mapped < tier.ledger.slots:
        tier.ledger.growth_thread.wake()
        time.sleep(0.01)


def huge_bytes(path: Path) -> int:
    """Return how much of a file this process has mapped in huge pages."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    mine = next(each for each in maps if str(path) in each)
    lines = [line for line in mine.splitlines() if "PmdMapped" in line]
    return 1024 * sum(int(line.split()[1]) for line in lines)


def be_measured(root: Path, mib: int, slot_kib: int, kind: str) -> None:
    """Open and fill a tier in this process; print what it took."""
    wall = time.perf_counter()
    spent = time.process_time()
    tier = opened(root, mib, slot_kib, kind)
    found = {"open_seconds": time.perf_counter() - wall}
    directory = tier.ledger.directory
    found["taken_bytes"] = allocated_bytes(directory)
    tier.ledger.namespaces.register(_NAMESPACE, {"model": "first minute"})
    chunk = np.ones(slot_kib << 10, np.uint8)
    slots = tier.ledger.slots
    first = max(1, _FIRST_BYTES // len(chunk))
    refused = store(tier, range(first), chunk)
    step = max(1, min(_BATCH_BYTES // len(chunk), tier.ledger.window))
    each = []
    for at in range(first, slots, step):
        began = time.thread_time()
        refused += store(tier, range(at, min(at + step, slots)), chunk)
        each.append(time.thread_time() - began)
    found["filled_seconds"] = time.perf_counter() - wall
    settle(tier)
    found["total_seconds"] = time.perf_counter() - wall
    found["processor_seconds"] = time.process_time() - spent
    found["huge_bytes"] = huge_bytes(tier.ledger.slab_path)
    found["evicted"] = admin.numbers(tier.ledger)["evicted_chunks"] + refused
    tier.close()
    _Run(found, each).print()


def copies_be_measured(root: Path, mib: int) -> None:
    """Copy what a store of this size takes, without a store; print the times."""
    chunk = np.ones(_MIB, np.uint8)
    descriptor = os.open(root / "copies", os.O_CREAT | os.O_RDWR, 0o600)
    os.posix_fallocate(descriptor, 0, mib * _MIB)
    with mmap.mmap(descriptor, mib * _MIB) as memory:
        for page in range(0, mib * _MIB, mmap.PAGESIZE):
            memory[page] = 1  # the pages are there, and mapped
        into = np.frombuffer(memory, np.uint8)
        each = []
        starts = range(0, len(into), _BATCH_BYTES)
        for start in itertools.chain.from_iterable([starts] * _COPIED_TIMES):
            began = time.thread_time()
            for at in range(start, min(start + _BATCH_BYTES, len(into)), _MIB):
                into[at : at + _MIB] = chunk
            each.append(time.thread_time() - began)
        del into
    os.close(descriptor)
    _Run({}, each).print()


def ratio(name: str, grown: _Run, whole: _Run) -> float:
    """Return a figure of a store that grows, divided by that of one that does not."""
    divided: float = grown.figures[name] / whole.figures[name]
    return divided


def slowest_at_a_place(runs: Sequence[_Run]) -> float:
    """Return the slowest over the median, of each store its median of these runs."""
    times = [run.store_seconds for run in runs]
    each = [median(at_a_place) for at_a_place in zip(*times, strict=True)]
    slowest: float = max(each) / median(each)
    return slowest


def first_example(mib: int, slot_kib: int, kind: str) -> int:
    """Return the bytes that a store keeps in which 2 MiB were stored."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        tier = opened(Path(root), mib, slot_kib, kind)
        tier.ledger.namespaces.register(_NAMESPACE, {"model": "first minute"})
        chunk = np.ones(slot_kib << 10, np.uint8)
        store(tier, range(max(1, _FIRST_BYTES // len(chunk))), chunk)
        time.sleep(1.0)  # what is allocated ahead
        taken = allocated_bytes(tier.ledger.directory)
        tier.close()
    return taken


def measured(mib: int, slot_kib: int, kind: str) -> _Run:
    """Measure one process."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        arguments = [root, str(mib), str(slot_kib), kind]
        done = subprocess.run(
            [sys.executable, __file__, "--measure", *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
    return _Run(**json.loads(done.stdout))


def compared(mib: int, slot_kib: int, pairs: int) -> dict[str, object]:
    """Measure pairs of processes, one after the other."""
    runs: dict[str, list[_Run]] = {kind: [] for kind in (*_STORES, "copies")}
    for number in range(pairs):
        kinds = _STORES if number % 2 else tuple(reversed(_STORES))
        for kind in kinds:
            runs[kind].append(measured(mib, slot_kib, kind))
        say(
            f"slots of {slot_kib} KiB: pair {number + 1} of {pairs}: "
            + ", ".join(
                f"{name} {ratio(name, runs['grows'][-1], runs['whole'][-1]):.2f}"
                for name in _RATIOS
            )
        )
    for _ in range(pairs):
        runs["copies"].append(measured(mib, slot_kib, "copies"))
    middle: dict[str, dict[str, float]] = {}
    for kind, all_ in runs.items():
        names = all_[0].figures
        middle[kind] = {
            name: median(run.figures[name] for run in all_) for name in names
        }
        middle[kind]["slowest_at_a_place"] = slowest_at_a_place(all_)
    ratios = {
        name: median(
            ratio(name, grown, whole)
            for grown, whole in zip(runs["grows"], runs["whole"], strict=True)
        )
        for name in _RATIOS
    }
    example = first_example(mib, slot_kib, "grows")
    return {
        "slot_kib": slot_kib,
        "mib": mib,
        "first_example_bytes": example,
        **middle,
        "grows_of_whole": ratios,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1 GiB, 2 pairs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--mib", type=int, default=6144, help="size of the tier")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--slots", default="64,1024,32768", help="sizes of slots in KiB"
    )
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        root, mib, slot_kib, kind = given.measure
        if kind == "copies":
            copies_be_measured(Path(root), int(mib))
        else:
            be_measured(Path(root), int(mib), int(slot_kib), kind)
        return
    mib = 1024 if given.quick else given.mib
    pairs = 2 if given.quick else given.pairs
    every = [
        compared(mib, int(slot_kib), pairs) for slot_kib in given.slots.split(",")
    ]
    if given.json:
        print(json.dumps({"machine": machine(), "stores": every}, indent=1))
        return
    for found in every:
        print(f"\n{mib} MiB in slots of {found['slot_kib']} KiB")
        for kind in _STORES:
            numbers = found[kind]
            assert isinstance(numbers, dict)
            print(
                f"  {kind:6}"
                f"  at once {numbers['taken_bytes'] / _MIB:8.1f} MiB"
                f"  open {numbers['open_seconds']:.3f} s"
                f"  filled {numbers['filled_seconds']:.2f} s"
                f"  total {numbers['total_seconds']:.2f} s"
                f"  processor {numbers['processor_seconds']:.2f} s"
                f"  huge {numbers['huge_bytes'] / _MIB:.0f} MiB"
                f"  slowest {1e3 * numbers['slowest_store_seconds']:.1f} ms"
                f" {numbers['slowest_of_median']:.2f}x"
                f" ({numbers['slowest_at_a_place']:.2f}x at a place)"
                f"  evicted {numbers['evicted']:.0f}"
            )
        copies = found["copies"]
        assert isinstance(copies, dict)
        print(
            f"  copies  slowest {1e3 * copies['slowest_store_seconds']:.1f} ms"
            f" {copies['slowest_of_median']:.2f}x"
            f" ({copies['slowest_at_a_place']:.2f}x at a place)"
        )
        ratios = found["grows_of_whole"]
        assert isinstance(ratios, dict)
        said = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"  grows / whole: {said}")
        example = found["first_example_bytes"]
        assert isinstance(example, int)
        print(f"  after 2 MiB: {example / _MIB:.1f} MiB")


if __name__ == "__main__":
    main()
