"""What grows with the size of a store: `python benchmarks/growth.py [--quick] [--json]`.

A store of tiny chunks, 1,024 slots and 1,048,576 slots (`--quick`: 65,536), is filled, and then
each kind of call is made many times. Printed are the median and the worst processor time of the
calling thread, and their ratio between the two sizes:

    store       16 new chunks into a full store: each call evicts
    look-up     a prompt of 16 chunks
    first       the first store of a new process on a full store, and its second
    clear       one namespace of 16 chunks, beside a full store of another one
    stats       all numbers of the store
    late        how long calls of 4 threads take beyond their deadline of 0.5 s, beside a thread
                that only sleeps
    idle        processor time and wake-ups of a publisher of KV events while nothing changes

`--only bookkeeping` fills stores of 1,024, 65,536 and 1,048,576 slots, in host memory and on a
disk, and prints what each takes beside its slab: allocated bytes for each slot, file by file. It
runs with older trees too: `PYTHONPATH=TREE/src`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from harness import machine, say, seconds_text

from pagoda import Cache
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, Reserved, StoreSpec, admin
from pagoda.ledger.store_stats import StoreStats
from pagoda.policy import NAMES

_SMALL = 1 << 10
_LARGE = 1 << 20
_QUICK = 1 << 16
_CHUNKS = 16  # of a prompt
_BATCH = 64
_THREADS = 4
_DEADLINE_SECONDS = 0.5
# the memory of stores on a disk
_HINTS = Path(f"/dev/shm/pagoda-{os.getuid()}/.hints")
_OLD = Namespace(model="old")
_NEW = Namespace(model="new")


def keys(name: str, count: int = _CHUNKS) -> list[bytes]:
    """Return the keys of a prompt."""
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)]


def opened(
    root: Path,
    slots: int,
    policy: str,
    kind: Literal["memory", "file"] = "memory",
) -> Ledger:
    """Open the store of that size."""
    spec = StoreSpec(
        root=root,
        name=f"{policy}-{slots}",
        kind=kind,
        slots=slots,
        slot_bytes=0,
    )
    return Ledger.open(spec, policy=policy)


def put(
    ledger: Ledger,
    new: Sequence[bytes],
    namespace: Namespace = _OLD,
    deadline_seconds: float = 5.0,
    admit_all: bool = False,
) -> int:
    """Store chunks; return how many."""
    outcomes = ledger.reserve(
        new,
        namespace=namespace.root,
        tokens=256,
        admit_all=admit_all,
        deadline_seconds=deadline_seconds,
    )
    mine = [one for one in outcomes if isinstance(one, Reserved)]
    if mine:
        ledger.commit(mine, deadline_seconds=deadline_seconds)
    return len(mine)


def fill(ledger: Ledger) -> None:
    """Store chunks until no slot is free."""
    ledger.namespaces.register(_OLD.root, _OLD.fields())
    for at in range(0, ledger.slots, _BATCH):
        put(ledger, keys(f"fill {at}", min(_BATCH, ledger.slots - at)))


def timed(call: Callable[[int], object], count: int) -> list[float]:
    """Return the processor time of the calling thread for each call."""
    spent = []
    for number in range(count):
        began = time.thread_time()
        call(number)
        spent.append(time.thread_time() - began)
    return spent


def spread(spent: Sequence[float]) -> dict[str, float]:
    """Return median and worst of some times."""
    return {
        "median_seconds": median(spent),
        "worst_seconds": max(spent),
        "worst_of_median": max(spent) / median(spent),
    }


def stores_and_lookups(ledger: Ledger, count: int) -> dict[str, dict[str, float]]:
    """Measure stores that evict, and look-ups."""
    run = os.urandom(8).hex()
    stored = timed(lambda n: put(ledger, keys(f"{run} {n}")), count)
    known = keys(f"{run} {count - 1}")
    found = timed(lambda _: ledger.match_prefix(known), count)
    return {"store": spread(stored), "look-up": spread(found)}


def first_stores(root: Path, slots: int, policy: str) -> dict[str, float]:
    """Return the times of the first and of the second store of a new process, medians of 5."""
    program = (
        "import sys, growth, json; from pathlib import Path;"
        "ledger = growth.opened(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]);"
        "run = growth.os.urandom(8).hex();"
        # what the first look-up and the first transaction need is not the store's
        "ledger.match_prefix(growth.keys(run)); growth.admin.gauges(ledger);"
        "store = lambda n: growth.put(ledger, growth.keys(f'{run} {n}'));"
        "print(json.dumps(growth.timed(store, 2))); ledger.close()"
    )
    firsts = []
    seconds = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program, str(root), str(slots), policy],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        first, second = json.loads(done.stdout)
        firsts.append(first)
        seconds.append(second)
    return {
        "first_seconds": median(firsts),
        "second_seconds": median(seconds),
        "first_of_second": median(firsts) / median(seconds),
    }


def clears(ledger: Ledger, count: int) -> dict[str, float]:
    """Measure the clear of a namespace of 16 chunks."""
    spent = []
    for number in range(count):
        new = keys(f"tenant {number}")
        if put(ledger, new, _NEW, admit_all=True) < _CHUNKS:
            raise RuntimeError("the chunks to be cleared were not stored")
        began = time.thread_time()
        cleared = admin.clear(ledger, _NEW.root)
        spent.append(time.thread_time() - began)
        if cleared != _CHUNKS:
            raise RuntimeError(f"{cleared} chunks were cleared, not {_CHUNKS}")
    return spread(spent)


def lateness(ledger: Ledger, calls: int) -> dict[str, float]:
    """Let 4 threads store and look up with a deadline, beside a thread that sleeps for as long;
    return how late the latest call and the latest sleep were.
    """
    late: list[float] = []
    slept: list[float] = []
    refused = [0]
    end = threading.Event()

    def sleep() -> None:
        while not end.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            slept.append(time.monotonic() - began - 0.01)

    def call(thread: int) -> None:
        run = os.urandom(8).hex()
        for number in range(calls // _THREADS):
            began = time.monotonic()
            if number % 2:
                wanted = keys(f"{run} {number - 1}")
                ledger.match_prefix(wanted, deadline_seconds=_DEADLINE_SECONDS)
            else:
                stored = put(
                    ledger,
                    keys(f"{run} {number}"),
                    deadline_seconds=_DEADLINE_SECONDS / 2,
                )
                refused[0] += stored < _CHUNKS
            late.append(max(0.0, time.monotonic() - began - _DEADLINE_SECONDS))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(_THREADS)]
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end.set()
    sleeper.join()
    return {
        "calls": len(late),
        "latest_call_seconds": max(late),
        "latest_sleep_seconds": max(slept),
        "stores_not_whole": refused[0],
    }


def idle_events(seconds: float) -> dict[str, float]:
    """Measure a process that publishes KV events while nothing changes: what it takes more than the
    same process that does not publish.
    """
    quiet = _idle_process("", seconds)
    events = _idle_process("events", seconds)
    return {
        "processor_seconds_per_second": (events[0] - quiet[0]) / seconds,
        "wakeups_per_second": (events[1] - quiet[1]) / seconds,
    }


def _idle_process(kind: str, seconds: float) -> list[float]:
    """Return processor time and voluntary context switches of a process that sleeps for some
    seconds.
    """
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        done = subprocess.run(
            [sys.executable, __file__, "--idle", kind, root, str(seconds)],
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds + 120,
        )
    spent: list[float] = json.loads(done.stdout)
    return spent


def _be_idle(kind: str, root: str, seconds: float) -> None:
    """Be that process."""
    layout = KVLayout.opaque(16, 4096, "growth")
    config = Config(
        chunk_tokens=16, host_size=64 * 4096, host_path=root, worth_it=False
    )
    with Cache(config, layout=layout, namespace=_OLD) as cache:
        if kind:
            cache.publish_events("tcp://127.0.0.1:*")
        time.sleep(2.0)  # what follows a start
        began = time.process_time()
        woken = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        time.sleep(seconds)
        spent = time.process_time() - began
        woken = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - woken
        print(json.dumps([spent, woken]))


def measured(
    root: Path, slots: int, policy: str, calls: int
) -> dict[str, object]:
    """Measure one size."""
    ledger = opened(root, slots, policy)
    say(f"filling {slots:,} slots, {policy} ...")
    fill(ledger)
    found: dict[str, object] = {}
    found |= stores_and_lookups(ledger, calls)
    found["first"] = first_stores(root, slots, policy)
    found["clear"] = clears(ledger, max(20, calls // 100))
    found["stats"] = spread(timed(lambda _: StoreStats.of(ledger), 20))
    if slots > _SMALL:
        found["late"] = lateness(ledger, calls)
    ledger.close()
    return found


def bookkeeping(
    slots: int, policy: str, kind: Literal["memory", "file"]
) -> dict[str, float]:
    """Measure the allocated bytes of a full store for each slot, without its slab; and how many of
    them are in each file.
    """
    where = "/dev/shm" if kind == "memory" else "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=where) as root:
        say(f"filling {slots:,} slots, {policy}, {kind} ...")
        ledger = opened(Path(root), slots, policy, kind)
        fill(ledger)
        found = _allocated(Path(root))
        # of a store on a disk
        for home in _HINTS.glob("*/store"):
            if home.read_bytes().startswith(os.fsencode(root)):
                for name, nbytes in _allocated(home.parent).items():
                    found[f"{name} in memory"] += nbytes
        ledger.close()
    found["slab"] = 0
    apiece = {name: nbytes / slots for name, nbytes in found.items() if nbytes}
    largest = sorted(apiece.items(), key=lambda each: -each[1])
    return {"bytes_per_slot": sum(apiece.values()), **dict(largest)}


def _allocated(directory: Path) -> Counter[str]:
    """Return the allocated bytes of all files below a directory, by name."""
    found = Counter[str]()
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # of another process
            if path.is_file():
                found[path.name] += path.stat().st_blocks * 512
    return found


def printed(found: dict[str, dict[str, dict[str, object]]]) -> str:
    """Return the table of all figures."""
    lines = []
    for title, parts in found.items():
        lines.append(title)
        for name, figures in parts.items():
            texts = [
                f"{figure.removesuffix('_seconds').replace('_', ' ')} "
                + (
                    seconds_text(value)
                    if figure.endswith("_seconds")
                    else f"{value:,.4g}"
                )
                for figure, value in figures.items()
                if isinstance(value, float | int)
            ]
            lines.append(f"    {name:<10} {', '.join(texts)}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--quick", action="store_true", help="65,536 slots and fewer calls"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=NAMES,
        default=["lru", "hindsight"],
        help="the policies of the stores (default: lru hindsight)",
    )
    parser.add_argument(
        "--only",
        choices=("bookkeeping",),
        help="only what full stores take beside their slabs",
    )
    parser.add_argument("--idle", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.idle:
        kind, root, seconds = options.idle
        _be_idle(kind, root, float(seconds))
        return
    large = _QUICK if options.quick else _LARGE
    calls = 1_000 if options.quick else 10_000
    found: dict[str, dict[str, object]] = {}
    if options.only:
        for policy in options.policies:
            for slots in sorted({_SMALL, _QUICK, large}):
                found[f"{policy}, {slots:,} slots"] = {
                    kind: bookkeeping(slots, policy, kind)
                    for kind in ("memory", "file")
                }
        print(json.dumps(found, indent=1) if options.json else printed(found))
        return
    for policy in options.policies:
        for slots in (_SMALL, large):
            with tempfile.TemporaryDirectory(
                prefix="pagoda-bench-", dir="/dev/shm"
            ) as root:
                found[f"{policy}, {slots:,} slots"] = measured(
                    Path(root), slots, policy, calls
                )
    seconds = 5.0 if options.quick else 20.0
    found["events"] = {"idle": idle_events(seconds)}
    if options.json:
        print(json.dumps({**found, "machine": machine()}, indent=1))
    else:
        print(printed(found))


if __name__ == "__main__":
    main()
