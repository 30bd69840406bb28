"""One process of the stress test: stores, reads, clears, pins, holds, leases and forks at random on
a shared host slab.

Started by `stress.py` as `python stress_worker.py PLAN.json ROW SEED`. Every byte that is read and
found valid is compared with a function of its key; whatever is wrong goes to `violations.log`, and
counts go to a mapped file that survives a `kill -9`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pagoda.keys import Namespace, chunk_keys
from pagoda.ledger import Ledger, Present, Reserved, StoreSpec, admin
from pagoda.slab.memory import MemorySlab

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.stress_disk import DiskSide

T = TypeVar("T")
CHUNK_TOKENS = 4
ROWS_PER_WORKER = 6  # one a thread, the rest for forked children
FIELDS = (
    "ops",
    "stops",
    "pid",
    "stored",
    "hits",
    "misses",
    "checked",
    "overtaken",
    "wrong",
    "late",
    "errors",
    "refused",
    "forks",
    "slowest_us",
    "disk_saved",
    "disk_hits",
    "disk_misses",
)


@dataclass(frozen=True)
class Plan:
    """The common parameters of all processes of one stress run."""

    root: str
    name: str
    slots: int
    payload_bytes: int
    workers: int
    target_ops: int
    chains: int = 12
    depth: int = 10
    trunk: int = 3
    deadline_seconds: float = 0.5
    slack_seconds: float = 2.5
    threads: int = 2
    disk_root: str = ""
    disk_slots: int = 0

    def spec(self) -> StoreSpec:
        """The host store all of them share."""
        return StoreSpec(
            root=Path(self.root),
            name=self.name,
            kind="memory",
            slots=self.slots,
            slot_bytes=self.payload_bytes,
        )

    def write(self, path: Path) -> None:
        """Writes the plan where a worker reads it."""
        path.write_text(json.dumps(asdict(self)))


class Tally:
    """Counts of all processes in one mapped file. A row has one writer (a thread), so a kill loses
    no counts.
    """

    def __init__(self, directory: Path, rows: int) -> None:
        path = directory / "tally"
        if not path.exists():
            path.write_bytes(b"\0" * (8 * rows * len(FIELDS)))
        self.array = np.memmap(
            path, dtype=np.int64, mode="r+", shape=(rows, len(FIELDS))
        )
        self._log = directory / "violations.log"
        # the run continues as long as this file exists
        self.goes_on = directory / "goes-on"

    def add(self, row: int, field: str, n: int = 1) -> None:
        """Add to one count of one row."""
        self.array[row, FIELDS.index(field)] += n

    def set(self, row: int, field: str, value: int) -> None:
        """Set one value of one row."""
        self.array[row, FIELDS.index(field)] = value

    def get(self, row: int, field: str) -> int:
        """Return one value of one row."""
        return int(self.array[row, FIELDS.index(field)])

    def total(self, field: str) -> int:
        """Return the sum of one count over all processes."""
        return int(self.array[:, FIELDS.index(field)].sum())

    def violation(self, text: str) -> None:
        """Append one entry to the log, undivided even if other processes write at the same time."""
        fd = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"[{os.getpid()}] {text}\n".encode())
        os.close(fd)


class Chain(NamedTuple):
    """One prompt: its namespace and the keys of its chunks."""

    namespace: Namespace
    keys: list[bytes]


def chains_of(plan: Plan) -> list[Chain]:
    """Return all prompts of a run: two namespaces, and every four prompts share their first `trunk`
    chunks.
    """
    found = []
    for index in range(plan.chains):
        namespace = Namespace(model=f"model-{index % 2}")
        trunk = np.full(plan.trunk * CHUNK_TOKENS, index // 4, np.int32)
        rest = np.full(
            (plan.depth - plan.trunk) * CHUNK_TOKENS, 1000 + index, np.int32
        )
        found.append(
            Chain(
                namespace,
                chunk_keys(
                    np.concatenate([trunk, rest]), namespace.root, CHUNK_TOKENS
                ),
            )
        )
    return found


class Payloads:
    """The expected bytes of a key: every 8-byte word depends on the key and on its place.
    Thread-safe (pure).
    """

    def __init__(self, payload_bytes: int) -> None:
        self._ramp = np.arange(payload_bytes // 8, dtype=np.uint64)

    def of(self, key: bytes) -> np.ndarray:
        """uint8 (payload_bytes,)."""
        scale, shift = np.frombuffer(key[:16], np.uint64)
        words: np.ndarray = self._ramp * (scale | np.uint64(1)) + shift
        return words.view(np.uint8)

    def differs(self, key: bytes, found: np.ndarray) -> str:
        """Return an empty text if `found` has the bytes of the key, else how it differs."""
        want = self.of(key).view(np.uint64)
        got = np.ascontiguousarray(found[: want.nbytes]).view(np.uint64)
        if np.array_equal(want, got):
            return ""
        bad = np.flatnonzero(want != got)
        return (
            f"{len(bad)} of {len(want)} words wrong, first at {bad[0]}, first word found "
            f"{int(got[0]):016x}"
        )


class Worker:
    """The random steps of one thread. Not thread-safe; the threads of a process share the ledger
    and the slab.
    """

    def __init__(self, plan: Plan, tally: Tally, row: int, seed: int) -> None:
        self.plan = plan
        self.tally = tally
        self.row = row
        self.stop_row = row - row % ROWS_PER_WORKER
        self.random = random.Random(seed)
        self.payloads = Payloads(plan.payload_bytes)
        self.chains = chains_of(plan)
        self.held: list[tuple[int, int]] = []
        self.children: dict[int, int] = {}
        self.may_fork = True
        tally.set(row, "pid", os.getpid())
        self.open()

    def open(self) -> None:
        """Open the ledger (shared with the other threads) and map the slab."""
        self.ledger = Ledger.open(self.plan.spec(), deadline_seconds=30.0)
        self.slab = MemorySlab(
            self.ledger.slab_path, self.ledger.slots, self.ledger.slot_bytes
        )
        for chain in self.chains:
            self.ledger.namespaces.register(
                chain.namespace.root, chain.namespace.fields()
            )
        self.disk = DiskSide(self) if self.plan.disk_root else None

    def close(self) -> None:
        """Leave both tiers."""
        self.release()
        if self.disk:
            self.disk.close()
        self.ledger.close()

    def timed(
        self,
        what: str,
        call: Callable[[], T],
        allowed_seconds: float | None = None,
    ) -> T:
        """Make one call; more than its deadline and slack is a violation, unless this process was
        stopped.
        """
        stops = self.tally.get(self.stop_row, "stops")
        began = time.monotonic()
        result = call()
        seconds = time.monotonic() - began
        if stops % 2 == 0 and stops == self.tally.get(self.stop_row, "stops"):
            limit = (
                allowed_seconds or self.plan.deadline_seconds
            ) + self.plan.slack_seconds
            self.tally.set(
                self.row,
                "slowest_us",
                max(self.tally.get(self.row, "slowest_us"), int(seconds * 1e6)),
            )
            if seconds > limit:
                self.tally.add(self.row, "late")
                self.tally.violation(
                    f"late: {what} took {seconds:.2f} s, allowed {limit:.2f} s"
                )
        return result

    def pick(self) -> tuple[Chain, int]:
        """Draw a prompt, a few of them far more often than others, and the number of its chunks."""
        index = min(int(self.random.expovariate(0.25)), len(self.chains) - 1)
        return self.chains[index], self.random.randint(1, self.plan.depth)

    def judge(self, key: bytes, copy: np.ndarray, where: str) -> None:
        """Compare bytes that were found valid with the expected bytes of their keys."""
        self.tally.add(self.row, "checked")
        if differs := self.payloads.differs(key, copy):
            self.tally.add(self.row, "wrong")
            self.tally.violation(
                f"wrong bytes: {where} key {key.hex()[:12]}: {differs}"
            )

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        generations: Sequence[int],
        where: str,
    ) -> None:
        """Copy slots out, validate, and check the valid ones."""
        copies = [self.slab.view(int(slot)).copy() for slot in slots]
        if self.random.random() < 0.05:
            time.sleep(0.002)
            copies = [self.slab.view(int(slot)).copy() for slot in slots]
        valid = self.ledger.still_valid(
            np.asarray(slots, np.int64), np.asarray(generations, np.uint64)
        )
        for key, copy, slot, generation, good in zip(
            keys, copies, slots, generations, valid, strict=True
        ):
            if good:
                self.judge(
                    key, copy, f"{where} slot {slot} generation {generation}"
                )
            else:
                self.tally.add(self.row, "overtaken")

    def fill(self, reserved: Sequence[Reserved]) -> None:
        """Write the chunks in pieces, sometimes slowly, so that a reader may see torn ones."""
        for one in reserved:
            payload = self.payloads.of(one.key)
            slot = self.slab.view(one.slot)
            pieces = self.random.choice((1, 1, 2, 4))
            step = -(-len(payload) // pieces)
            for begin in range(0, len(payload), step):
                slot[begin : begin + step][: len(payload) - begin] = payload[
                    begin : begin + step
                ]
                if pieces > 1 and self.random.random() < 0.2:
                    time.sleep(0.001)

    def reserve(
        self,
        chain: Chain,
        keys: Sequence[bytes],
        start: int,
        parts: int,
        stamp: int,
    ) -> list[Reserved]:
        """Reserve one window; read and check the chunks that are Present."""
        outcomes = self.timed(
            "reserve",
            lambda: self.ledger.reserve(
                keys,
                namespace=chain.namespace.root,
                start=start,
                parent=chain.keys[start - 1] if start else None,
                tokens=CHUNK_TOKENS,
                parts=parts,
                stamp=stamp,
                deadline_seconds=self.plan.deadline_seconds,
            ),
        )
        present = [one for one in outcomes if isinstance(one, Present)]
        if present and self.random.random() < 0.3:
            self.read(
                [p.key for p in present],
                [p.slot for p in present],
                [p.generation for p in present],
                "present",
            )
        reserved = [one for one in outcomes if isinstance(one, Reserved)]
        self.tally.add(
            self.row, "refused", len(outcomes) - len(present) - len(reserved)
        )
        return reserved

    def store(self) -> None:
        """Store a prompt in windows with one stamp; sometimes abort, be slow, or share the work
        with a child.
        """
        chain, length = self.pick()
        stamp = self.ledger.stamp()
        for start in range(0, length, self.ledger.window):
            keys = chain.keys[start : min(length, start + self.ledger.window)]
            parts = 2 if self.random.random() < 0.1 else 1
            reserved = self.reserve(chain, keys, start, parts, stamp)
            if not reserved:
                continue
            self.fill(reserved)
            if self.random.random() < 0.05:
                time.sleep(self.random.random() * 0.05)
            if self.random.random() < 0.08:
                self.timed(
                    "abort",
                    partial(
                        self.ledger.abort,
                        reserved,
                        deadline_seconds=self.plan.deadline_seconds,
                    ),
                )
                continue
            if parts == 2:
                self.second_part(reserved)
            commit = partial(
                self.ledger.commit,
                reserved,
                0,
                deadline_seconds=self.plan.deadline_seconds,
            )
            done = self.timed("commit", commit)
            self.tally.add(self.row, "stored", sum(done))
            if self.disk:
                self.disk.save(
                    chain,
                    start,
                    [one for one, ok in zip(reserved, done, strict=True) if ok],
                )

    def second_part(self, reserved: Sequence[Reserved]) -> None:
        """Write part 1 in this member or, sometimes, in a forked child that adopts it or dies
        before.
        """
        if (
            self.random.random() < 0.3
            and (row := self.free_row()) is not None
            and not self.fork(row)
        ):
            if self.random.random() < 0.7:
                taken = self.ledger.adopt(
                    reserved, 1, deadline_seconds=self.plan.deadline_seconds
                )
                mine = [
                    one for one, ok in zip(reserved, taken, strict=True) if ok
                ]
                self.ledger.commit(
                    mine, 1, deadline_seconds=self.plan.deadline_seconds
                )
            self.leave()
        elif self.random.random() < 0.9:
            self.timed(
                "commit",
                lambda: self.ledger.commit(
                    reserved, 1, deadline_seconds=self.plan.deadline_seconds
                ),
            )

    def retrieve(self) -> None:
        """Match a prompt, sometimes lease or hold the run, copy it, validate and check it."""
        chain, length = self.pick()
        lease = 0.2 if self.random.random() < 0.1 else 0.0
        keys = chain.keys[:length]
        match = self.timed(
            "match",
            lambda: self.ledger.match_prefix(
                keys,
                lease_seconds=lease,
                deadline_seconds=self.plan.deadline_seconds,
            ),
        )
        run = len(match.slots)
        self.tally.add(self.row, "hits" if run else "misses")
        if run and self.random.random() < 0.1:
            held = self.timed(
                "hold", lambda: self.ledger.hold(match.slots, match.generations)
            )
            self.held += [
                (int(s), int(g))
                for s, g, ok in zip(
                    match.slots, match.generations, held, strict=True
                )
                if ok
            ]
        self.read(
            keys[:run], match.slots.tolist(), match.generations.tolist(), "match"
        )

    def release(self) -> None:
        """Release everything that is held."""
        if self.held:
            slots, generations = zip(*self.held, strict=True)
            self.held = []
            self.timed(
                "release",
                lambda: self.ledger.release(
                    np.array(slots, np.int64), np.array(generations, np.uint64)
                ),
            )

    def tidy(self) -> None:
        """Make one of the less frequent calls: pin, unpin, remove, clear, lease, rows, gauges, why,
        reap.
        """
        chain, length = self.pick()
        keys = self.random.sample(chain.keys, k=min(3, length))
        owner = f"owner-{self.row}"
        ledger = self.ledger
        roll = self.random.random()
        if roll < 0.25:
            self.timed("pin", lambda: admin.pin(ledger, keys, owner))
        elif roll < 0.5:
            self.timed(
                "unpin",
                lambda: admin.unpin(
                    ledger, self.random.choice((None, keys)), owner
                ),
            )
        elif roll < 0.7:
            self.timed("remove", lambda: admin.remove(ledger, keys))
        elif roll < 0.73:
            self.timed("clear", lambda: admin.clear(ledger, chain.namespace.root))
        elif roll < 0.74:
            self.timed("clear all", lambda: admin.clear(ledger))
        elif roll < 0.85:
            match = self.timed(
                "match",
                lambda: ledger.match_prefix(
                    keys[:1], deadline_seconds=self.plan.deadline_seconds
                ),
            )
            self.timed(
                "lease", lambda: ledger.lease(match.slots, match.generations, 0.1)
            )
        elif roll < 0.93:
            self.timed("gauges", lambda: admin.gauges(ledger))
        elif roll < 0.96:
            self.timed(
                "rows",
                lambda: [row.key for row in admin.list_chunks(ledger, limit=10)],
            )
        elif roll < 0.98:
            self.timed("why", lambda: ledger.explain_miss(keys[0]))
        else:
            self.timed("reap", lambda: admin.reap(ledger), 2.0)

    def free_row(self) -> int | None:
        """Return a free row for another forked child, or None; collect children that ended."""
        for pid in list(self.children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            del self.children[pid]
        rows = range(
            self.row + self.plan.threads,
            self.stop_row + ROWS_PER_WORKER,
            self.plan.threads,
        )
        free = [
            row
            for row in rows
            if row not in self.children.values()
            and not alive(self.tally.get(row, "pid"))
        ]
        return free[0] if free and self.may_fork else None

    def fork(self, row: int) -> int:
        """Fork; the child counts in a separate row, holds nothing and never forks again."""
        self.tally.add(self.row, "forks")
        pid = os.fork()
        if pid:
            self.children[pid] = row
            self.tally.set(row, "pid", pid)
            return pid
        self.row = row
        self.children = {}
        self.held = []
        self.may_fork = False
        self.tally.set(row, "pid", os.getpid())
        self.random.seed(os.getpid())
        if self.disk:
            self.disk.forget()
        return 0

    def leave(self) -> None:
        """End a forked child, one time in three without any cleanup."""
        if self.random.random() < 0.33:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.random.random() < 0.5:
            self.ledger.close()
        os._exit(0)

    def branch(self) -> None:
        """Fork a child that continues with the same objects for a while and may outlive its
        parent.
        """
        if (row := self.free_row()) is None or self.fork(row):
            return
        for _ in range(self.random.randint(5, 60)):
            if self.finished():
                break
            self.step()
        self.leave()

    def reopen(self) -> None:
        """Close this thread's share of the ledger and open it again; with the last share the member
        leaves.
        """
        self.close()
        self.open()

    def finished(self) -> bool:
        """Return whether the parent has ended the run: there were enough operations, kills and
        stops, or something was wrong.
        """
        return not self.tally.goes_on.exists()

    def step(self) -> None:
        """Do one random operation."""
        roll = self.random.random()
        if self.disk and self.random.random() < 0.3:
            chain, length = self.pick()
            if roll < 0.9:
                self.disk.load(chain, length)
            else:
                self.disk.tidy(chain, chain.keys[length - 1])
        elif roll < 0.40:
            self.store()
        elif roll < 0.86:
            self.retrieve()
        elif roll < 0.90:
            self.release()
        elif roll < 0.993:
            self.tidy()
        elif roll < 0.998:
            self.branch()
        else:
            self.reopen()
        self.tally.add(self.row, "ops")

    def run(self) -> None:
        """Step until all operations are done; any exception is a violation."""
        pid = os.getpid()
        try:
            while not self.finished():
                self.step()
            self.close()
        except BaseException:  # noqa: BLE001
            self.tally.add(self.row, "errors")
            self.tally.violation(f"raised: {traceback.format_exc()}")
            if os.getpid() != pid:
                os._exit(1)


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    if pid <= 0:
        return False
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def main(plan_path: str, row: str, seed: str) -> None:
    """Run one process of the stress test with its threads."""
    plan = Plan(**json.loads(Path(plan_path).read_text()))
    tally = Tally(Path(plan_path).parent, plan.workers * ROWS_PER_WORKER)
    workers = [
        Worker(plan, tally, int(row) + index, int(seed) * 31 + index)
        for index in range(plan.threads)
    ]
    threads = [
        threading.Thread(target=worker.run, daemon=True) for worker in workers[1:]
    ]
    for thread in threads:
        thread.start()
    workers[0].run()
    for thread in threads:
        thread.join(30.0)
    if any(thread.is_alive() for thread in threads):
        tally.violation("hang: a thread did not end")
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
