"""The parent of a stress run: starts processes, kills and stops them at random, and checks the
stores afterwards.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pagoda.ledger import Ledger, admin
from pagoda.slab.memory import MemorySlab
from tests.stress_disk import open_disk
from tests.stress_worker import (
    FIELDS,
    ROWS_PER_WORKER,
    Payloads,
    Plan,
    Tally,
    alive,
)

WORKER = Path(__file__).with_name("stress_worker.py")
LEAST_HARM = 3  # kills, and stops, of every run


@dataclass
class Summary:
    """The counts and violations of a run. Without `violations` every guarantee held."""

    seconds: float = 0.0
    kills: int = 0
    stops: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def operations_per_second(self) -> float:
        """Return operations of all processes per second of wall time, kills and stops included."""
        return self.counts.get("ops", 0) / self.seconds if self.seconds else 0.0

    def leaked(self) -> int:
        """Return the number of slots that are neither free nor hold a chunk."""
        return (
            self.gauges.get("slots", 0)
            - self.gauges.get("free", 0)
            - self.gauges.get("ready", 0)
        )

    def table(self) -> str:
        """Return the numbers as a Markdown table."""
        rows = {
            "operations": self.counts["ops"],
            "operations a second": round(self.operations_per_second),
            "chunks stored": self.counts["stored"],
            "chunks read and compared": self.counts["checked"],
            "copies of slots that were reused meanwhile (discarded)": self.counts[
                "overtaken"
            ],
            "wrong bytes": self.counts["wrong"],
            "kill -9": self.kills,
            "SIGSTOP": self.stops,
            "forks": self.counts["forks"],
            "calls past their deadline": self.counts["late"],
            "slowest call, ms": self.counts["slowest_us"] // 1000,
            "reserved at the end": self.gauges.get("reserved", -1),
            "leaked slots": self.leaked(),
            "violations": len(self.violations),
        }
        if self.counts["disk_saved"]:
            rows |= {
                "chunks saved to disk": self.counts["disk_saved"],
                "chunks read from disk": self.counts["disk_hits"],
            }
        return "\n".join(
            [
                "| what | number |",
                "| --- | --- |",
                *(f"| {name} | {value} |" for name, value in rows.items()),
            ]
        )


class Stress:
    """One run: its processes, and the code that kills and stops them. Not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        seed: int,
        harm_every_seconds: float = 0.15,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.random = random.Random(seed)
        self.harm_every_seconds = harm_every_seconds
        directory.mkdir(parents=True, exist_ok=True)
        self.plan_path = directory / "plan.json"
        plan.write(self.plan_path)
        self.tally = Tally(directory, plan.workers * ROWS_PER_WORKER)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.summary = Summary()

    def start(self, row: int) -> None:
        """Start one process; its stop count becomes even."""
        stops = self.tally.get(row, "stops")
        self.tally.set(row, "stops", stops + stops % 2)
        seed = str(self.random.randrange(1 << 30))
        command = [
            sys.executable,
            str(WORKER),
            str(self.plan_path),
            str(row),
            seed,
        ]
        self.processes[row] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def stop_for(self, row: int, seconds: float) -> None:
        """Stop one process for a while; its `stops` is odd meanwhile, so that it does not check its
        calls.
        """
        process = self.processes[row]
        self.tally.add(row, "stops")
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        self.tally.add(row, "stops")
        self.summary.stops += 1

    def harm(self) -> None:
        """Kill or stop one process."""
        row = self.random.choice(list(self.processes))
        if self.processes[row].poll() is not None:
            return
        if (
            self.summary.kills <= self.summary.stops // 2
            or self.random.random() < 0.3
        ):
            self.processes[row].kill()
            self.processes[row].wait()
            self.summary.kills += 1
            self.start(row)
        else:
            self.stop_for(row, self.random.choice((0.005, 0.02, 0.1, 0.3, 1.2)))

    def run(
        self,
        limit_seconds: float,
        progress: Callable[[Summary], None] | None = None,
    ) -> Summary:
        """Run to the end, or to the time limit (which is a violation), and check the stores."""
        began = time.monotonic()
        self.tally.goes_on.touch()
        for index in range(self.plan.workers):
            self.start(index * ROWS_PER_WORKER)
        try:
            while self.goes_on() and self.healthy():
                time.sleep(self.random.random() * 2 * self.harm_every_seconds)
                self.harm()
                self.summary.seconds = time.monotonic() - began
                if self.summary.seconds > limit_seconds:
                    self.summary.violations.append(
                        f"not done within {limit_seconds} s"
                    )
                    break
                if progress:
                    self.summary.counts = self.counts()
                    progress(self.summary)
            self.summary.seconds = time.monotonic() - began
            self.tally.goes_on.unlink()
            self.end()
        finally:
            self.kill_all()
        self.judge()
        return self.summary

    def goes_on(self) -> bool:
        """Return whether operations remain, or kills and stops are too few: a fast machine is done
        early.
        """
        harmed = min(self.summary.kills, self.summary.stops)
        return (
            harmed < LEAST_HARM or self.tally.total("ops") < self.plan.target_ops
        )

    def healthy(self) -> bool:
        """Return whether there is no violation yet and no process ended before the work was
        done.
        """
        ended = [p for p in self.processes.values() if p.poll() is not None]
        return not (self.directory / "violations.log").exists() and (
            not ended or self.tally.total("ops") >= self.plan.target_ops
        )

    def end(self) -> None:
        """Wait for all processes and for forked children that outlived them."""
        until = time.monotonic() + 60.0
        for process in self.processes.values():
            try:
                if process.wait(max(0.1, until - time.monotonic())) != 0:
                    self.summary.violations.append(
                        f"a process ended with {process.returncode}"
                    )
            except subprocess.TimeoutExpired:
                self.summary.violations.append("hang: a process did not end")
        while (left := self.children_alive()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self.summary.violations.append(
                f"hang: {len(left)} forked children did not end"
            )

    def children_alive(self) -> list[int]:
        """Return the process ids of running workers and of their running children."""
        return [
            pid
            for pid in map(int, self.tally.array[:, FIELDS.index("pid")])
            if alive(pid)
        ]

    def kill_all(self) -> None:
        """Remove everything that this run started."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.children_alive():
            os.kill(pid, signal.SIGKILL)

    def counts(self) -> dict[str, int]:
        """Return sums over all processes (for the slowest call: the largest)."""
        counts = {name: self.tally.total(name) for name in FIELDS}
        counts["slowest_us"] = int(
            self.tally.array[:, FIELDS.index("slowest_us")].max()
        )
        return counts

    def judge(self) -> None:
        """Open the store again and check: no leaks, a consistent ledger, and the right bytes in
        every chunk.
        """
        self.summary.counts = self.counts()
        log = self.directory / "violations.log"
        if log.exists():
            self.summary.violations += log.read_text().splitlines()
        ledger = Ledger.open(self.plan.spec())
        try:
            admin.reap(ledger)
            admin.check(ledger)
            gauges = self.summary.gauges = admin.gauges(ledger)
            if (
                gauges["reserved"]
                or gauges["free"] + gauges["ready"] != gauges["slots"]
                or gauges["members"] != 1
            ):
                self.summary.violations.append(f"leaked: {gauges}")
            self.judge_bytes(ledger)
        finally:
            ledger.close()
        if self.plan.disk_root:
            self.judge_disk()

    def judge_disk(self) -> None:
        """Check the same for the disk: no leaks, and the right bytes in each served chunk."""
        tier = open_disk(self.plan, 60.0)
        payloads = Payloads(self.plan.payload_bytes)
        try:
            admin.reap(tier.ledger)
            admin.check(tier.ledger)
            gauges = admin.gauges(tier.ledger)
            if (
                gauges["reserved"]
                or gauges["free"] + gauges["ready"] != gauges["slots"]
                or gauges["members"] != 1
            ):
                self.summary.violations.append(f"leaked on disk: {gauges}")
            for row in list(admin.list_chunks(tier.ledger)):
                found = tier.get(row.key)
                if found is None:
                    self.summary.violations.append(
                        f"slot {row.slot} on disk is not served: "
                        f"{tier.ledger.explain_miss(row.key)}"
                    )
                elif differs := payloads.differs(row.key, found):
                    self.summary.violations.append(
                        f"wrong bytes on disk: slot {row.slot}: {differs}"
                    )
        finally:
            tier.close()

    def judge_bytes(self, ledger: Ledger) -> None:
        """Compare every chunk that is still in the slab."""
        slab = MemorySlab(ledger.slab_path, ledger.slots, ledger.slot_bytes)
        payloads = Payloads(self.plan.payload_bytes)
        for row in admin.list_chunks(ledger):
            if differs := payloads.differs(row.key, slab.view(row.slot).copy()):
                self.summary.violations.append(
                    f"wrong bytes at the end: slot {row.slot}: {differs}"
                )


def run(
    directory: Path,
    shm: Path,
    operations: int,
    seed: int,
    limit_seconds: float,
    disk: Path | None = None,
    progress: Callable[[Summary], None] | None = None,
    slack_seconds: float = 2.5,
) -> Summary:
    """4 processes with 2 threads each on one host slab of 64 slots (and a disk of 96), with about
    150 chunks in use.

    A call is late when it takes `slack_seconds` longer than its deadline.
    """
    plan = Plan(
        root=str(shm),
        name="stress",
        slots=64,
        payload_bytes=(32 if disk else 64) << 10,
        workers=4,
        target_ops=operations,
        chains=24,
        disk_root=str(disk) if disk else "",
        disk_slots=96,
        slack_seconds=slack_seconds,
    )
    shutil.rmtree(directory, ignore_errors=True)
    return Stress(plan, directory, seed).run(limit_seconds, progress)
