"""The processor time of a policy: per chunk on the request path, and of learning off that path, in
turns with LRU.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np
from harness import say, seconds_text

from pagoda.keys import Namespace
from pagoda.ledger import Ledger, Reserved, StoreSpec
from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.ledger.eviction_policy import Evictor
from pagoda.ledger.ghost_table import Marks

_BATCH = 64
_CHAIN = 512  # chunks of a prompt
_SECOND = 1_000_000_000
_NAMESPACE = Namespace(model="benchmark")


@dataclass(frozen=True)
class Cost:
    """Medians over rounds: seconds, and the ratio to LRU's within a round. `runs`: seconds of each
    round.
    """

    what: str
    slots: int
    policy: str
    seconds: float
    ratio: float | None
    runs: list[float] = field(default_factory=list)

    heads: ClassVar[tuple[str, ...]] = (
        "what",
        "slots",
        "policy",
        "processor time",
        "of LRU's",
    )

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            self.what,
            f"{self.slots:,}",
            self.policy,
            seconds_text(self.seconds),
            ratio,
        )


class _Books:
    """The columns of a full tier and the policy; makes the same calls as the ledger, and no
    others.
    """

    def __init__(self, policy: str, slots: int) -> None:
        self.columns = Columns(None, slots)
        self.columns.reset()
        self.advice = Evictor(policy, self.columns)
        self.values = np.zeros(self.advice.shared_values)
        self._random = np.random.default_rng(0)
        self._stamp = self.now = 1_000 * _SECOND
        self._generation = 0
        for first in range(0, slots, _BATCH):
            self._store(
                np.arange(first, min(first + _BATCH, slots)), first % _CHAIN
            )
        for _ in range(slots // _BATCH):
            self.touch()
        self.upkeep()

    def upkeep(self) -> tuple[float, float]:
        """Advance the clock by a minute and call share and prepare; return the seconds of each."""
        self.now += 60 * _SECOND
        self._stamp = max(self._stamp, self.now)
        began = time.thread_time()
        self.advice.share(self.values)
        shared = time.thread_time()
        self.advice.prepare(self._stamp, self.now)
        return shared - began, time.thread_time() - shared

    def touch(self) -> float:
        """Do a look-up that finds 64 chunks; return its seconds."""
        self._tick()
        first = int(self._random.integers(self.columns.slots // _BATCH)) * _BATCH
        rows = np.arange(first, first + _BATCH)
        stamps = self._stamp - np.arange(_BATCH)
        began = time.thread_time()
        self.advice.touch(rows, stamps, True)
        return time.thread_time() - began

    def evict(self) -> float:
        """Offer 64 new chunks to a full tier; return the seconds of admission and of the choice of
        victims.
        """
        self._tick()
        marks = self._random.integers(1, 1 << 62, _BATCH).astype(np.uint64)
        stamps = self._stamp - np.arange(_BATCH)
        began = time.thread_time()
        leading, _ = self.advice.admit(marks, stamps, 0, self.now)
        rows = (
            self.advice.victims(leading, self._stamp, self.now)
            if leading
            else np.empty(0, np.int64)
        )
        spent = time.thread_time() - began
        if len(rows):
            columns = self.columns
            gone: Marks = columns.keys[rows, 0]
            columns.table.remember(
                gone, columns.last_use[rows], columns.hits[rows], self._stamp, 0
            )
            columns.last_use[rows] = NOT_READY
            columns.keys[rows, 0] = marks[: len(rows)]
            self._store(rows, 0)
        return spent

    def _tick(self) -> None:
        self.now += _SECOND // 20
        self._stamp = max(self._stamp + (1 << 16), self.now)

    def _store(
        self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], position: int
    ) -> None:
        """Publish consecutive chunks; the first has no parent."""
        columns = self.columns
        count = len(rows)
        self._stamp += 1 << 16
        self._generation += count
        columns.generation[rows] = (
            np.arange(self._generation - count, self._generation) + 1
        )
        columns.parent_slot[rows] = np.concatenate([[NO_PARENT], rows[:-1]])
        columns.parent_generation[rows[1:]] = columns.generation[rows[:-1]]
        columns.position[rows] = position + np.arange(count)
        columns.hits[rows] = 0
        columns.lease_until[rows] = 0
        columns.last_use[rows] = self._stamp - np.arange(count)


def costs(policies: Sequence[str], quick: bool) -> list[Cost]:
    """Measure all costs; `quick`: fewer rounds, no large tier."""
    rounds = 3 if quick else 9
    found = []
    for slots in (5_000, 20_000) if quick else (5_000, 20_000, 100_000):
        say(f"costs at {slots} slots ...")
        found += _advice_costs(policies, slots, rounds)
        found += _ledger_costs(policies, slots, rounds)
    return found


def _costs(what: str, slots: int, runs: dict[str, list[float]]) -> list[Cost]:
    out = []
    for policy, spent in runs.items():
        ratios = []
        if "lru" in runs:
            pairs = zip(spent, runs["lru"], strict=True)
            ratios = [own / base for own, base in pairs]
        rounded = [round(each, 9) for each in spent]
        out.append(
            Cost(
                what,
                slots,
                policy,
                median(spent),
                median(ratios) if ratios else None,
                rounded,
            )
        )
    return out


def _advice_costs(policies: Sequence[str], slots: int, rounds: int) -> list[Cost]:
    """Measure the policy alone. A round has so many calls that every queue is replaced a few
    times.
    """
    books = {policy: _Books(policy, slots) for policy in policies}
    calls = max(50, slots // 4 // _BATCH)
    touched: dict[str, list[float]] = {policy: [] for policy in policies}
    evicted: dict[str, list[float]] = {policy: [] for policy in policies}
    shared: dict[str, list[float]] = {policy: [] for policy in policies}
    prepared: dict[str, list[float]] = {policy: [] for policy in policies}
    for turn in range(rounds + 1):
        for policy in _rotated(policies, turn):
            book = books[policy]
            spent = (
                [book.touch() for _ in range(calls)],
                [book.evict() for _ in range(calls)],
            )
            share, prepare = book.upkeep()
            if turn:
                touched[policy].append(sum(spent[0]) / calls / _BATCH)
                evicted[policy].append(sum(spent[1]) / calls / _BATCH)
                shared[policy].append(share)
                prepared[policy].append(prepare)
    learning = [
        policy for policy in policies if books[policy].advice.shared_values
    ]
    return [
        *_costs("touch, a chunk", slots, touched),
        *_costs("admit + victims, a chunk", slots, evicted),
        *_costs(
            "share, a call",
            slots,
            {policy: shared[policy] for policy in learning},
        ),
        *_costs(
            "prepare, a call",
            slots,
            {policy: prepared[policy] for policy in learning},
        ),
    ]


def _ledger_costs(policies: Sequence[str], slots: int, rounds: int) -> list[Cost]:
    """Measure reserve + commit per offered chunk in a full ledger: processor time of the calling
    thread.
    """
    calls = 20
    runs: dict[str, list[float]] = {policy: [] for policy in policies}
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        ledgers = {
            policy: _full_ledger(Path(root), policy, slots) for policy in policies
        }
        for turn in range(rounds + 1):
            keys = _keys(f"new {turn}", calls * _BATCH)
            for policy in _rotated(policies, turn):
                began = time.thread_time()
                for first in range(0, len(keys), _BATCH):
                    _put(ledgers[policy], keys[first : first + _BATCH])
                if turn:
                    runs[policy].append((time.thread_time() - began) / len(keys))
        for ledger in ledgers.values():
            ledger.close()
    return _costs("reserve + commit in the ledger, a chunk", slots, runs)


def _full_ledger(root: Path, policy: str, slots: int) -> Ledger:
    spec = StoreSpec(
        root=root, name=policy, kind="memory", slots=slots, slot_bytes=0
    )
    ledger = Ledger.open(spec, policy=policy)
    ledger.namespaces.register(_NAMESPACE.root, _NAMESPACE.fields())
    keys = _keys("old", slots)
    for first in range(0, slots, _BATCH):
        _put(ledger, keys[first : first + _BATCH])
    return ledger


def _put(ledger: Ledger, keys: Sequence[bytes]) -> None:
    """Reserve, and commit the admitted chunks."""
    outcomes = ledger.reserve(
        keys, namespace=_NAMESPACE.root, start=0, parent=None, tokens=256
    )
    mine = [each for each in outcomes if isinstance(each, Reserved)]
    if mine and not all(ledger.commit(mine)):
        raise RuntimeError("a reserved chunk could not be committed")


def _keys(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)]


def _rotated(policies: Sequence[str], turn: int) -> list[str]:
    shift = turn % len(policies)
    return [*policies[shift:], *policies[:shift]]
