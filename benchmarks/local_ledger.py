"""The time of keys, of the ledger without copies, and of the import."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from ground import NAMESPACE, Plan, keys_of, opened
from harness import Figure, race, ratio_figure, say, seconds_figure
from limits import hash_chain, void

from pagoda.keys import chunk_keys
from pagoda.ledger import Ledger, Reserved


def keys_figure(plan: Plan) -> Figure:
    """Race the keys of 128k tokens (an int32 array, chunks of 256) against a bare loop of keyed
    blake3 calls.
    """
    tokens = np.random.default_rng(0).integers(0, 150_000, 128 * 1024, np.int32)
    root = NAMESPACE.root
    if chunk_keys(tokens, root, 256) != hash_chain(tokens, 256, root):
        raise RuntimeError("keys differ from the bare loop's")
    runs = race(
        {
            "candidate": lambda _: void(chunk_keys(tokens, root, 256)),
            "limit": lambda _: void(hash_chain(tokens, 256, root)),
        },
        max(plan.rounds, 15),
        20,
    )
    return ratio_figure(
        "keys_vs_blake3_loop",
        0.80,
        runs,
        size_bytes=tokens.nbytes * 20,
        threads="1 thread",
    )


class Spent(NamedTuple):
    """Wall time, and this thread's processor time: the time on an idle machine. In seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        """Read both clocks."""
        return cls(time.perf_counter(), time.thread_time())

    def since(self, began: Spent) -> Spent:
        """Return the difference to an earlier reading."""
        return Spent(self.wall - began.wall, self.cpu - began.cpu)


def spent_by(work: Callable[[], None]) -> Spent:
    """Call `work` and return the time that it took."""
    began = Spent.now()
    work()
    return Spent.now().since(began)


def fill(ledger: Ledger, keys: Sequence[bytes]) -> None:
    """Store `keys` as chains of 512 chunks, each chain one request, without any bytes."""
    step = min(64, ledger.window)
    stamp = ledger.stamp()
    for start in range(0, len(keys), step):
        position = start % 512
        stamp = stamp if position else ledger.stamp()
        put(
            ledger,
            keys[start : start + step],
            position,
            keys[start - 1] if position else None,
            stamp,
        )


def put(
    ledger: Ledger,
    keys: Sequence[bytes],
    position: int = 0,
    parent: bytes | None = None,
    stamp: int | None = None,
) -> Spent:
    """Reserve and commit; return the time of the reserve."""
    began = Spent.now()
    outcomes = ledger.reserve(
        keys,
        namespace=NAMESPACE.root,
        start=position,
        parent=parent,
        tokens=256,
        stamp=stamp,
    )
    spent = Spent.now().since(began)
    mine = [each for each in outcomes if isinstance(each, Reserved)]
    if len(mine) != len(keys) or not all(ledger.commit(mine)):
        raise RuntimeError(f"only {len(mine)} of {len(keys)} chunks were stored")
    return spent


def _rounds(
    rounds: int, steps: int, work: Callable[[int], object]
) -> tuple[list[float], list[float]]:
    """Return the mean seconds of a step in each round, wall and processor time, after one round
    that does not count.
    """
    found = [
        spent_by(
            lambda: void([work(turn * steps + step) for step in range(steps)])  # noqa: B023
        )
        for turn in range(rounds + 1)
    ][1:]
    return [each.wall / steps for each in found], [
        each.cpu / steps for each in found
    ]


def match_figure(plan: Plan) -> Figure:
    """Time a match of 512 keys, all hits, that updates their recency."""
    keys = keys_of("match", 20_000)
    with opened(plan, "match", 20_480, 0) as ledger:
        fill(ledger, keys)
        wall, cpu = _rounds(
            plan.rounds, 20, lambda number: _match(ledger, keys, number)
        )
    note = f"processor time {np.median(cpu) * 1e6:.0f} us"
    return seconds_figure(
        "match_512_seconds", 0.0015, wall, note, processor_seconds=cpu
    )


def _match(ledger: Ledger, keys: Sequence[bytes], number: int) -> None:
    first = number * 512 % 19_456
    if len(ledger.match_prefix(keys[first : first + 512]).slots) != 512:
        raise RuntimeError("not all of the keys were found")


def overhead_figure(plan: Plan) -> Figure:
    """Time reserve + commit, and match + validate, per chunk without the copy: batches of 64,
    20,000 slots.
    """
    slots = 20_000
    batches = 50
    keys = keys_of("overhead", slots + (plan.rounds + 1) * batches * 64)
    fresh = [keys[start : start + 64] for start in range(slots, len(keys), 64)]
    last = fresh[-(slots // 64) :]
    with opened(plan, "overhead", slots, 0) as ledger:
        filling = spent_by(lambda: fill(ledger, keys[:slots]))
        write = _rounds(
            plan.rounds, batches, lambda number: put(ledger, fresh[number])
        )
        # the policy may have evicted some of them for others
        kept = [keys for keys in last if _are_kept(ledger, keys)]
        if 2 * len(kept) < len(last):
            raise RuntimeError(
                f"only {len(kept)} of the last {len(last)} batches were kept"
            )
        read = _rounds(
            plan.rounds,
            batches,
            lambda number: _validate(ledger, kept[number % len(kept)]),
        )
    wall, _ = max(write, read, key=lambda each: np.median(each[0]))
    quoted = {
        "write_evicting": {
            "seconds": _each(write[0]),
            "processor_seconds": _each(write[1]),
        },
        "read": {"seconds": _each(read[0]), "processor_seconds": _each(read[1])},
        "write_filling": {
            "seconds": filling.wall / slots,
            "processor_seconds": filling.cpu / slots,
        },
    }
    note = (
        f"processor time: write {np.median(write[1]) / 64 * 1e6:.1f} us with eviction, "
        f"{filling.cpu / slots * 1e6:.1f} us without, read {np.median(read[1]) / 64 * 1e6:.1f} us"
    )
    return seconds_figure(
        "chunk_overhead_seconds", 0.00003, _each(wall), note, **quoted
    )


def _each(batches: Sequence[float]) -> list[float]:
    return [round(spent / 64, 9) for spent in batches]


def _are_kept(ledger: Ledger, keys: Sequence[bytes]) -> bool:
    return len(ledger.match_prefix(keys).slots) == len(keys)


def _validate(ledger: Ledger, keys: Sequence[bytes]) -> None:
    """Match and validate 64 keys that are present."""
    found = ledger.match_prefix(keys)
    if (
        len(found.slots) != 64
        or not ledger.still_valid(found.slots, found.generations).all()
    ):
        raise RuntimeError("not all of the keys were found")


def evict_figure(plan: Plan) -> Figure:
    """Time a reserve of 64 with eviction among 1,000,000 slots, mean of 1,000 calls (a tenth with
    --quick).
    """
    slots = 100_000 if plan.quick else 1_000_000
    calls = 100 if plan.quick else 1_000
    say(f"filling {slots} slots ...")
    with opened(plan, "evict", slots, 0) as ledger:
        fill(ledger, keys_of("old", slots))
        keys = keys_of("new", calls * 64)
        spent = [put(ledger, keys[i * 64 : (i + 1) * 64]) for i in range(calls)]
    wall = [each.wall for each in spent]
    cpu = [each.cpu for each in spent]
    quoted = {
        "mean_of_each_tenth_seconds": [
            float(np.mean(part)) for part in np.array_split(wall, 10)
        ],
        "mean_of_each_tenth_processor_seconds": [
            float(np.mean(part)) for part in np.array_split(cpu, 10)
        ],
        "slowest_seconds": max(wall),
        "slots": slots,
        "calls": calls,
    }
    note = (
        f"mean of {calls} calls, {slots} slots; processor time {np.mean(cpu) * 1e3:.2f} ms; "
        "slowest "
    )
    note += f"{max(wall) * 1e3:.1f} ms"
    return Figure(
        "reserve_evict_1m_seconds",
        float(np.mean(wall)),
        0.003,
        "seconds",
        quoted,
        note,
    )


def import_figure(plan: Plan) -> Figure:
    """Time `import pagoda` in a new interpreter, minus the time of an interpreter that imports
    nothing.
    """
    runs = race(
        {
            "with": lambda _: _python("import pagoda"),
            "bare": lambda _: _python("pass"),
        },
        max(plan.rounds, 9),
    )
    beyond = [
        ours - bare for ours, bare in zip(runs["with"], runs["bare"], strict=True)
    ]
    return seconds_figure(
        "import_seconds", 0.05, beyond, bare_seconds=runs["bare"]
    )


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
