"""What the calls of a cache do, counted: Python calls, gates and system calls that move bytes.

These counts are the fixed cost of a call, and no load of the machine changes them. Times are
measured by `benchmarks/calls.py` and `benchmarks/growth.py`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
from blake3 import blake3

from pagoda import Cache, KVLayout, Namespace
from pagoda.ledger import Ledger, Reserved, StoreSpec, admin
from pagoda.ledger.locks import Gate
from pagoda.transfer import BlockKV

CHUNK_TOKENS = 16
CHUNKS = 16  # of each call
OLD = Namespace("old")
NEW = Namespace("new")
PATIENCE = 300.0  # seconds, of a process that sleeps for 7
TRIES = 9  # the quickest path of a call is what counts: others also tidy up


class Counts(NamedTuple):
    """What one call did in the calling thread."""

    calls: int  # of Python functions
    gates: int  # of the ledger, entered
    transfers: int  # system calls that read or write


def counted(call: Callable[[], object]) -> Counts:
    """Make a call, and return what it did."""
    calls = 0
    gates = 0
    entry = Gate.run.__code__

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, gates
        if event == "call":
            calls += 1
            gates += frame.f_code is entry

    before = transfers()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    # the numbers are read by system calls too
    return Counts(calls, gates, transfers() - before - reading)


def transfers() -> int:
    """Return how many system calls of this thread have read or written."""
    path = f"/proc/self/task/{threading.get_native_id()}/io"
    numbers = dict(
        line.split(": ") for line in Path(path).read_text().splitlines()
    )
    return int(numbers["syscr"]) + int(numbers["syscw"])


first = transfers()
reading = transfers() - first  # what one reading of the numbers adds


def least(call: Callable[[int], object]) -> Counts:
    """Return the least of some calls, number by number."""
    tries = [counted(lambda n=n: call(n)) for n in range(TRIES)]
    return Counts(*(min(column) for column in zip(*tries, strict=True)))


def prompt(number: int) -> np.ndarray:
    """Return the tokens of a prompt; no two have a chunk in common."""
    return np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.int32) + number * 1000


@pytest.fixture(params=["host", "tiny", "disk"])
def place(
    request: pytest.FixtureRequest, shm_root: Path, tmp_path: Path
) -> Iterator[tuple[str, Cache, BlockKV]]:
    """A cache with one tier: `tiny` is full, so that each store evicts."""
    kind = request.param
    chunk_bytes = 1 << 10 if kind == "tiny" else 64 << 10
    layout = KVLayout.opaque(CHUNK_TOKENS, chunk_bytes, "counts")
    tiers = {
        "host": {"host_size": "128MiB", "host_path": shm_root / "host"},
        "tiny": {"host_size": "1MiB", "host_path": shm_root / "host"},
        "disk": {
            "host_size": 0,
            "disk_size": "128MiB",
            "disk_path": tmp_path / "disk",
        },
    }[kind]
    memory = np.zeros((CHUNKS, chunk_bytes), np.uint8)
    with Cache(
        namespace=Namespace("counts"),
        layout=layout,
        chunk_tokens=CHUNK_TOKENS,
        worth_it=False,
        **tiers,
    ) as cache:
        kv = BlockKV(memory, layout)
        for number in range(100, 180):
            cache.store(prompt(number), kv)
        cache.flush(60)
        yield kind, cache, kv


# Python calls, gates, transfers: what each call does today, and a tenth more Python calls, or
# twice as many if it waits for threads of a disk. Whoever makes a call cheaper lowers its bound;
# whoever needs a higher one says in the commit why.
MOST = {
    "host": {
        "store": Counts(404, 3, 21),
        "look-up of 1": Counts(63, 1, 0),
        "look-up of 16": Counts(63, 1, 0),
        "miss": Counts(89, 1, 0),
        "retrieve": Counts(160, 1, 0),
    },
    "tiny": {
        "store": Counts(519, 3, 23),
        "look-up of 1": Counts(65, 1, 0),
        "look-up of 16": Counts(81, 1, 0),
        "miss": Counts(89, 1, 0),
        "retrieve": Counts(180, 1, 0),
    },
    "disk": {
        "store": Counts(740, 2, 2),
        "look-up of 1": Counts(164, 1, 1),
        "look-up of 16": Counts(205, 1, 1),
        "miss": Counts(230, 1, 1),
        "retrieve": Counts(1125, 2, 2),
    },
}


def test_a_call_does_no_more_than_this(
    place: tuple[str, Cache, BlockKV],
) -> None:
    kind, cache, kv = place
    known = prompt(179)
    found = {
        "store": least(lambda n: cache.store(prompt(1000 + n), kv)),
        "look-up of 1": least(lambda _: cache.lookup(known[:CHUNK_TOKENS])),
        "look-up of 16": least(lambda _: cache.lookup(known)),
        "miss": least(lambda _: cache.lookup(prompt(9999))),
        "retrieve": least(lambda _: cache.retrieve(known, kv)),
    }
    cache.flush(60)
    assert cache.lookup(prompt(1000)).num_tokens == CHUNKS * CHUNK_TOKENS
    assert cache.retrieve(known, kv).num_tokens == CHUNKS * CHUNK_TOKENS
    more = {
        name: (counts, MOST[kind][name])
        for name, counts in found.items()
        if any(n > most for n, most in zip(counts, MOST[kind][name], strict=True))
    }
    assert not more, found


def keys(name: str, count: int = CHUNKS) -> list[bytes]:
    """Return keys that no other name has."""
    return [blake3(f"{name} {n}".encode()).digest() for n in range(count)]


def put(
    ledger: Ledger,
    new: list[bytes],
    namespace: Namespace = OLD,
) -> None:
    """Store chunks without bytes."""
    outcomes = ledger.reserve(
        new,
        namespace=namespace.root,
        tokens=CHUNK_TOKENS,
        admit_all=True,
        deadline_seconds=30.0,
    )
    mine = [one for one in outcomes if isinstance(one, Reserved)]
    assert all(ledger.commit(mine, deadline_seconds=30.0))


def of_size(root: Path, slots: int) -> dict[str, Counts]:
    """Return what calls do on a full store with that many slots."""
    spec = StoreSpec(
        root=root,
        name=f"counts-{slots}",
        kind="memory",
        slots=slots,
        slot_bytes=0,
    )
    with closing(Ledger.open(spec, policy="lru")) as ledger:
        for namespace in (OLD, NEW):
            ledger.namespaces.register(namespace.root, namespace.fields())
        for at in range(0, slots, 256):
            put(ledger, keys(f"fill {at}", 256))

        def clear(number: int) -> Counts:
            put(ledger, keys(f"tenant {number}"), NEW)
            return counted(lambda: admin.clear(ledger, NEW.root))

        known = keys(f"fill {slots - 256}")
        assert len(ledger.match_prefix(known).slots) == CHUNKS
        cleared = [clear(number) for number in range(TRIES)]
        return {
            "store": least(lambda n: put(ledger, keys(f"new {n}"))),
            "look-up": least(lambda _: ledger.match_prefix(known)),
            "clear": Counts(*map(min, zip(*cleared, strict=True))),
            "gauges": least(lambda _: admin.gauges(ledger)),
        }


def test_no_call_does_more_on_a_larger_store(shm_root: Path) -> None:
    small = of_size(shm_root, 1 << 10)
    large = of_size(shm_root, 1 << 14)
    for name, counts in large.items():
        less = small[name]
        assert counts.calls <= 1.5 * less.calls, (name, less, counts)
        assert counts.gates <= less.gates + 1, (name, less, counts)
        # keys are hashes, so each is on a page of its own in a large table: it is written when
        # the key comes, and when its victim goes
        assert counts.transfers <= 3 * CHUNKS, (name, less, counts)


IDLE = """
import resource, sys, time
from pagoda import Cache, KVLayout, Namespace
layout = KVLayout.opaque(16, 4096, "counts")
with Cache(
    namespace=Namespace("counts"), layout=layout, chunk_tokens=16,
    host_size=64 * 4096, host_path=sys.argv[1],
) as cache:
    if sys.argv[2] == "events":
        cache.publish_events("tcp://127.0.0.1:*")
    time.sleep(2.0)  # what follows a start
    woken = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(5.0)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - woken)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quiet", "events"])
def test_an_idle_cache_sleeps(shm_root: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IDLE, str(shm_root / kind), kind],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    # one a second of upkeep, one of events
    assert int(done.stdout) <= (12 if kind == "events" else 6), done.stdout
