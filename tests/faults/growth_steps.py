"""One process of `test_growth`: a host tier that grows as it fills, where others take the memory.

Run as a script: the first argument says what it does, the others are its own. Bytes of a chunk
depend on its key, so that a wrong one is seen.

    full ROOT ROUNDS       another process fills the file system of ROOT, and frees it, for ever
    cgroup ROOT GROUP MIB  it runs in that cgroup, which has less than the size of the tier
    filled ROOT POINT      fills the tier; killed at that point of the first piece after the opening
    after ROOT             opens what such a process has left, checks and fills it
    beside ROOT READY GO   stores some, makes READY, waits for GO, checks that, stores more
    older ROOT             opens and fills what is there; for a version that knows no growth
    ghosts ROOT            the file system is full at each doubling of the ghosts

Prints one line of JSON. CHUNK_BYTES in the environment is the size of a chunk: of small ones there
are so many that the ghosts grow too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from blake3 import blake3

from pagoda.base import store_place
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved, admin, space_sharing
from pagoda.ledger.stores_under_root import root_locked
from pagoda.ledger.transaction import Transaction
from pagoda.slab import MemorySlab
from pagoda.tiers import HostTier

CHUNK_BYTES = int(os.environ.get("CHUNK_BYTES", 64 << 10))
LAYOUT = KVLayout.opaque(16, CHUNK_BYTES, "growth")
TENANT = blake3(b"tenant").digest()
MIB = 1 << 20
FILLED_MIB = 96  # the tier of `filled` and `after`


def key(number: int) -> bytes:
    return blake3(b"%d" % number).digest()


def payload(number: int) -> np.ndarray:
    return np.frombuffer(blake3(key(number)).digest(CHUNK_BYTES), np.uint8)


def opened(root: str, mib: int, **options: bool) -> HostTier:
    options = options or {"grows": True}
    tier = HostTier.open(LAYOUT, root, mib * MIB, policy="lru", **options)
    tier.ledger.namespaces.register(TENANT, {"model": "growth"})
    return tier


def put(tier: HostTier, numbers: Iterable[int]) -> int:
    """Store single chunks; return how many were stored."""
    stored = 0
    for number in numbers:
        [room] = tier.ledger.reserve(
            [key(number)], namespace=TENANT, tokens=16, deadline_seconds=30.0
        )
        if isinstance(room, Reserved):
            tier.slab.view(room.slot)[:CHUNK_BYTES] = payload(number)
            stored += all(tier.ledger.commit([room], deadline_seconds=30.0))
    return stored


def get(tier: HostTier, numbers: Iterable[int]) -> tuple[int, int]:
    """Read single chunks; return how many were found, and how many of them had wrong bytes."""
    found = wrong = 0
    for number in numbers:
        match = tier.ledger.match_prefix([key(number)], deadline_seconds=30.0)
        if len(match.slots):
            copy = tier.slab.view(int(match.slots[0]))[:CHUNK_BYTES].copy()
            if tier.ledger.still_valid(match.slots, match.generations)[0]:
                found += 1
                wrong += not np.array_equal(copy, payload(number))
    return found, wrong


def refused(tier: HostTier, bound: str) -> int:
    return tier.stats()[f"growth_refused_{bound}"]


def grown_to_the_end(tier: HostTier, seconds: float = 60.0) -> bool:
    """Use the tier until all its slots have pages; return whether they do.

    It grows only as it fills. So the time alone says nothing on a busy machine: it gives up after
    that time only if as many chunks were stored meanwhile as would fill it four times.
    """
    until = time.monotonic() + seconds
    enough = 4 * admin.gauges(tier.ledger)["slots"]
    first = number = 10**9
    while admin.gauges(tier.ledger)["unbacked"]:
        if number - first >= enough and time.monotonic() >= until:
            return False
        put(tier, range(number, number + 64))
        number += 64
    return True


def take_and_free(junk: str, seed: int) -> None:
    """Fill a file system to its last byte and free it again, for ever."""
    draw = random.Random(seed)
    while True:
        fd = os.open(junk, os.O_CREAT | os.O_WRONLY)
        for piece in (16 * MIB, MIB, 65536, 4096):
            try:
                while True:
                    os.posix_fallocate(fd, os.fstat(fd).st_size, piece)
            except OSError:
                continue
        time.sleep(draw.uniform(0.0, 0.05))
        os.ftruncate(fd, 0)
        os.close(fd)
        time.sleep(draw.uniform(0.0, 0.03))


def ask_again_after(seconds: float) -> None:
    from pagoda.ledger import growth_thread

    growth_thread._NO_ROOM_SECONDS = seconds


def full(root: str, rounds: int) -> dict[str, int]:
    """A round counts if a piece was refused in it, and after that the tier grew to its end."""
    ask_again_after(0.01)
    answer = {"refused": 0, "wrong": 0, "found": 0, "grown": 0, "stored": 0}
    junk = str(Path(root) / "junk")
    turn = 0
    while answer["refused"] < rounds and turn < 20 * rounds:
        turn += 1
        tier = opened(f"{root}/store", 64)
        filler = multiprocessing.Process(
            target=take_and_free, args=(junk, turn), daemon=True
        )
        filler.start()
        number = 0
        while (
            not refused(tier, "filesystem")
            and admin.gauges(tier.ledger)["unbacked"]
        ):
            answer["stored"] += put(tier, range(number, number + 8))
            found, wrong = get(tier, range(max(0, number - 64), number + 8))
            answer["found"] += found
            answer["wrong"] += wrong
            number += 8
        filler.kill()
        filler.join()
        was_refused = bool(refused(tier, "filesystem"))
        Path(junk).unlink(missing_ok=True)
        answer["refused"] += was_refused
        answer["grown"] += was_refused and grown_to_the_end(tier)
        admin.check(tier.ledger)
        tier.close()
        shutil.rmtree(f"{root}/store")
    return answer


def cgroup(root: str, group: str, mib: int) -> dict[str, int]:
    """Fill a tier of `mib` in a cgroup that has less; then the cgroup gets more."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    ask_again_after(0.05)
    tier = opened(root, mib)
    stored = put(tier, range(mib * MIB // CHUNK_BYTES))
    before = admin.gauges(tier.ledger)["unbacked"]
    answer = {
        "refused": refused(tier, "cgroup"),
        "stored": stored,
        "unbacked": before,
    }
    answer["found"], answer["wrong"] = get(tier, range(mib * MIB // CHUNK_BYTES))
    for name in ("memory.max", "memory.limit_in_bytes"):
        if Path(group, name).exists():
            Path(group, name).write_text(str(4 * mib * MIB))
    answer["grown"] = int(grown_to_the_end(tier))
    admin.check(tier.ledger)
    tier.close()
    return answer


def killed_after(
    owner: object, name: str, when: Callable[[], bool]
) -> Callable[..., object]:
    """Return that function, and kill this process when it has been called."""
    real = getattr(owner, name)

    def and_die(*arguments: object, **named: object) -> object:
        answer = real(*arguments, **named)
        if when():
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return and_die


POINTS: dict[str, tuple[object, str]] = {
    "tables": (space_sharing, "reserve_in_place"),
    "huge": (MemorySlab, "allocate_huge"),
    "slab": (space_sharing, "allocate_range"),
    "mapped": (MemorySlab, "populate_slots"),
    "listed": (Transaction, "extend_backed"),
}
# as names: a version that knows no such file imports this module too
GHOST_POINTS = {
    "ghosts allocated": ("pagoda.ledger.ghost_pages", "allocate_range"),
    "ghosts copied": ("pagoda.ledger.ghost_table:GhostTable", "spread"),
    "ghosts published": (
        "pagoda.ledger.ghost_table:GhostTable",
        "drop_misplaced",
    ),
}


def named(point: str) -> tuple[object, str]:
    """Return where a point is."""
    if point in POINTS:
        return POINTS[point]
    where, name = GHOST_POINTS[point]
    module, _, of_class = where.partition(":")
    owner: object = importlib.import_module(module)
    return (getattr(owner, of_class) if of_class else owner), name


def filled(root: str, point: str) -> dict[str, int]:
    """Fill a tier; at a point of its first piece after the opening this process dies."""
    tier = opened(root, FILLED_MIB)
    print(json.dumps(put(tier, range(16))), flush=True)
    owner, name = named(point)
    setattr(owner, name, killed_after(owner, name, lambda: True))
    put(tier, range(16, FILLED_MIB * MIB // CHUNK_BYTES))
    return {}


def after(root: str) -> dict[str, int]:
    """Check what a killed process has left, and fill it."""
    tier = opened(root, FILLED_MIB)
    admin.check(tier.ledger)
    found, wrong = get(tier, range(16))
    gauges = admin.gauges(tier.ledger)
    left = gauges["slots"] - gauges["ready"]
    stored = put(tier, range(10_000, 10_000 + left))
    kept, bad = get(tier, range(10_000, 10_000 + left))
    admin.check(tier.ledger)
    numbers = tier.stats()
    answer = {
        "found": found,
        "wrong": wrong + bad,
        "lost": left - stored,
        "missing": left - kept,
        "evicted": numbers["evicted_chunks"],
        "unbacked": numbers["unbacked"],
    }
    tier.close()
    return answer


def beside(root: str, ready: str, go: str) -> dict[str, int]:
    """Store some chunks; when another process has filled the store, look for them, and store one
    more.
    """
    tier = opened(root, FILLED_MIB)
    put(tier, range(16))
    half = admin.gauges(tier.ledger)["unbacked"]
    Path(ready).touch()
    until = time.monotonic() + 120
    while not Path(go).exists() and time.monotonic() < until:
        time.sleep(0.01)
    found, wrong = get(tier, range(20_000))
    stored = put(tier, [30_000])
    admin.check(tier.ledger)
    tier.close()
    return {"found": found, "wrong": wrong, "stored": stored, "half": half > 0}


def older(root: str) -> dict[str, int]:
    """Open a store in full, as a version does that knows no growth; fill it."""
    tier = opened(root, FILLED_MIB, populate=False)
    found, wrong = get(tier, range(16))
    left = admin.gauges(tier.ledger)["free"]
    stored = put(tier, range(10_000, 10_000 + left))
    kept, bad = get(tier, range(10_000, 10_000 + left))
    admin.check(tier.ledger)
    unbacked = admin.gauges(tier.ledger)["unbacked"]
    tier.close()
    return {
        "found": found,
        "wrong": wrong + bad,
        "lost": left - stored,
        "missing": left - kept,
        "unbacked": unbacked,
    }


def take_all(junk: Path, but: int = 0) -> None:
    """Fill a file system, but for some pages."""
    with open(junk, "ab") as file:
        for piece in (MIB, 65536, 4096):
            with contextlib.suppress(OSError):
                while True:
                    end = os.fstat(file.fileno()).st_size
                    os.posix_fallocate(file.fileno(), end, piece)
        if but:
            end = os.fstat(file.fileno()).st_size
            os.ftruncate(file.fileno(), end - but * 4096)


def ghosts(root: str) -> dict[str, int]:
    """At each doubling the file system is full, or has too little; all ghosts in use are written
    then.
    """
    tier = opened(f"{root}/store", FILLED_MIB)
    pages = tier.ledger.columns.ghost_pages
    assert pages is not None
    junk = Path(root) / "junk"
    answer = {"doubled": 0, "refused": 0, "taken": 0}
    number = 0
    while pages.places < pages.most:
        more = pages.more_bytes(2 * pages.places) // 4096
        for free in (0, 1, more // 3, more - 1):
            take_all(junk, free)
            held = os.statvfs(root).f_bfree
            with root_locked(Path(root, "store"), 10.0):
                grown = pages.grow(2 * pages.places)
            answer["refused"] += not grown
            answer["taken"] += held - os.statvfs(root).f_bfree
            # a ghost without a page would be a SIGBUS
            take_all(junk)
            columns = tier.ledger.columns
            # a version that knows no growth has it elsewhere
            from pagoda.ledger.ghost_table import marks_of

            for _ in range(16):
                marks = marks_of([key(number + one) for one in range(4096)])
                number += 4096
                stamps = np.full(len(marks), number)
                hits = np.zeros(len(marks), np.uint32)
                columns.table.remember(marks, stamps, hits, number, 0)
            columns.table.sane()
            junk.unlink()
        with root_locked(Path(root, "store"), 10.0):
            answer["doubled"] += pages.grow(2 * pages.places)
    answer["stored"] = put(tier, range(1000))
    admin.check(tier.ledger)
    tier.close()
    return answer


def main(what: str, root: str, *arguments: str) -> None:
    if what == "full":
        answer = full(root, int(arguments[0]))
    elif what == "cgroup":
        answer = cgroup(root, arguments[0], int(arguments[1]))
    elif what == "filled":
        answer = filled(root, arguments[0])
    elif what == "beside":
        answer = beside(root, *arguments)
    elif what == "ghosts":
        answer = ghosts(root)
    elif what == "older":
        answer = older(root)
    else:
        answer = after(root)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    # the margin of a machine with little memory is not what is tested
    store_place._machine_free_bytes = lambda *_: None
    main(*sys.argv[1:])
