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
    evicted    chunks that were evicted or refused before the store was full
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

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
# of a store that grows, divided by those of one that does not
_RATIOS = (
    "open_seconds",
    "filled_seconds",
    "total_seconds",
    "processor_seconds",
)


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
    found: dict[str, float] = {"open_seconds": time.perf_counter() - wall}
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
    found["slowest_store_seconds"] = max(each)
    found["slowest_of_median"] = max(each) / median(each)
    found["evicted"] = admin.numbers(tier.ledger)["evicted_chunks"] + refused
    tier.close()
    print(json.dumps(found))


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


def measured(mib: int, slot_kib: int, kind: str) -> dict[str, float]:
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
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compared(mib: int, slot_kib: int, pairs: int) -> dict[str, object]:
    """Measure pairs of processes, one after the other."""
    runs: dict[str, list[dict[str, float]]] = {"whole": [], "grows": []}
    for number in range(pairs):
        kinds = ("whole", "grows") if number % 2 else ("grows", "whole")
        for kind in kinds:
            runs[kind].append(measured(mib, slot_kib, kind))
        say(
            f"slots of {slot_kib} KiB: pair {number + 1} of {pairs}: "
            + ", ".join(
                f"{name} {runs['grows'][-1][name] / runs['whole'][-1][name]:.2f}"
                for name in _RATIOS
            )
        )
    middle = {
        kind: {name: median(run[name] for run in all_) for name in all_[0]}
        for kind, all_ in runs.items()
    }
    ratios = {
        name: median(
            grown[name] / whole[name]
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
        for kind in ("whole", "grows"):
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
                f"  evicted {numbers['evicted']:.0f}"
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
