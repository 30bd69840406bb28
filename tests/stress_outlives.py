"""Caches with faults of every kind in files, locks, signal handlers and threads.

Run as a program it is one process of the run: it opens caches of two layouts over one host and one
disk directory, in sizes that change each time, for many tenants, and drops some of them in
reference cycles. Meanwhile a signal handler raises in the middle of calls, one thread start in a
hundred fails, `locks` is opened and closed, directories are removed and created again while others
use them, and the process forks. The parent kills some of these processes and fills the disk. The
surroundings change as well (`stress_surroundings`). All of it happens after a number of operations,
not after a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import queue
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pagoda.base.errors import StoreError
from pagoda.base.finalizers import close_dropped
from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, admin
from pagoda.transfer import BlockKV
from tests.interrupts import Interrupted, release_logging
from tests.stress_surroundings import Identities, Mounts, SpoiledFiles, WallClock

CHUNK = 16
LAYOUTS = [
    KVLayout.opaque(CHUNK, 8192, "one"),
    KVLayout.opaque(CHUNK, 12288, "two"),
]
HOST_SLOTS = (32, 64, 96)
DISK_SLOTS = (64, 128, 256)
TENANTS = 5000
OPENINGS = 40  # operations of one cache
# operations between two reports, after which a process may be killed, or the disk filled
REPORTS = 20
MOST_DESCRIPTORS = 400  # of one process: a leak reaches this limit
CHILD_SECONDS = 60  # for the few operations of a forked child
SILENT_SECONDS = 240.0  # without a report: a hang
LEASED_SECONDS = 90.0  # leases of dead processes last a minute at most
DISK_BYTES = 32 << 20
MOUNTED = 0.03  # after this share of the reports a mount changes
COUNTS = (
    "operations",
    "stored",
    "served",
    "wrong",
    "interrupted",
    "refused",
    "forks",
    "removed",
    "spoiled",
)
FAILURES = ("wrong", "hangs", "leaks", "dead")


@dataclass
class Outcome:
    """The result of a run. Without `violations` every guarantee held."""

    counts: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(COUNTS + FAILURES, 0))
    )
    violations: list[str] = field(default_factory=list)
    full_disk: str = ""  # why the disk was never full; empty if it was full

    def fail(self, what: str, text: str) -> None:
        """Note one of the `FAILURES`."""
        self.counts[what] += 1
        self.violations.append(f"{what}: {text}")

    def __str__(self) -> str:
        return ", ".join(
            f"{self.counts[name]:,} {name}"
            for name in ("operations", "served", *FAILURES)
        )


class Places:
    """The directories of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = root / "host"
        self.small = root / "small"
        # on a separate small disk, if that can be mounted
        self.disk = self.small / "disk"

    def config(
        self, layout: KVLayout, host_slots: int, disk_slots: int
    ) -> Config:
        """A host and a disk tier."""
        return Config(
            chunk_tokens=CHUNK,
            host_path=str(self.host),
            disk_path=str(self.disk),
            host_size=host_slots * layout.slot_bytes,
            disk_size=disk_slots * (layout.slot_bytes + 4096),
            worth_it=False,
            deadline_seconds=5.0,
        )


# ---- one process of the run ----------------------------------------------------------------------


class Worker:
    """One process. Not thread-safe."""

    def __init__(self, root: Path, seed: int) -> None:
        self.places = Places(root)
        self.random = random.Random(seed)
        self.counts = Counter[str]()
        self.children: list[tuple[int, int]] = []
        self.armed = False
        self.files = SpoiledFiles(
            root, self.places.host, self.places.disk, self.random
        )
        self.clock = WallClock(self.random)

    def run(self, operations: int) -> None:
        """Open caches and use them until the given number of operations is done."""
        self.arm()
        self.clock.install()
        while self.counts["operations"] < operations:
            if self.random.random() < 0.2:
                self.remove()
            if self.random.random() < 0.2:
                self.clock.set()
            layout = self.random.choice(LAYOUTS)
            sizes = self.random.choice(HOST_SLOTS), self.random.choice(DISK_SLOTS)
            try:
                cache = Cache(
                    self.places.config(layout, *sizes),
                    namespace=Namespace("m"),
                    layout=layout,
                )
            except StoreError:
                # removed during the opening, a full disk, or no thread available
                self.did("refused")
                self.did("operations")
                continue
            for _ in range(OPENINGS):
                self.step(cache, layout)
            self.end(cache)
            del cache
            gc.collect()
            self.collect()

    def did(self, what: str, count: int = 1) -> None:
        """Count, and report now and then."""
        self.counts[what] += count
        if what == "operations" and self.counts[what] % REPORTS == 0:
            print(json.dumps(self.counts), flush=True)

    def arm(self) -> None:
        """Make the handler raise, and thread starts fail, from time to time."""

        def handler(*_: object) -> None:
            if self.armed:
                raise Interrupted

        start = threading.Thread.start

        def fails_at_times(thread: threading.Thread) -> None:
            if self.random.random() < 0.01:
                raise RuntimeError("can't start new thread")
            start(thread)

        signal.signal(signal.SIGALRM, handler)
        threading.Thread.start = fails_at_times  # type: ignore[method-assign]

    def step(self, cache: Cache, layout: KVLayout) -> None:
        """Do one operation, interrupted one time in five."""
        if self.random.random() < 0.05:
            self.touch_locks()
        if self.random.random() < 0.02 and (how := self.files.spoil()):
            self.did("spoiled")
            self.counts[f"files: {how}"] += 1
        if self.random.random() < 0.01:
            self.fork(cache, layout)
        try:
            if self.random.random() < 0.2:
                self.armed = True
                signal.setitimer(
                    signal.ITIMER_REAL, 10 ** self.random.uniform(-4.5, -2.5)
                )
            self.use(cache, layout)
            self.armed = False
        except BaseException as trouble:
            self.armed = False
            if not _is_interrupt(trouble):
                raise
            release_logging()
            self.did("interrupted")
        self.did("operations")

    def use(self, cache: Cache, layout: KVLayout) -> None:
        """Store or retrieve a prompt of a random tenant."""
        salt = f"tenant {self.random.randrange(TENANTS if self.random.random() < 0.2 else 3)}"
        if self.random.random() < 0.005:
            cache.clear(salt=salt)
            self.counts["clears"] += 1
            return
        tokens = np.random.default_rng(self.random.randrange(12)).integers(
            0, 50_000, 4 * CHUNK, dtype=np.int32
        )
        blocks = np.zeros((4, layout.chunk_bytes), np.uint8)
        right = np.stack(
            [
                _bytes(layout, salt, key)
                for key in chunk_keys(tokens, bytes(32), CHUNK)
            ]
        )
        if self.random.random() < 0.5:
            blocks[:] = right
            self.did(
                "stored",
                cache.store(
                    tokens, BlockKV(blocks, layout), salt=salt
                ).num_chunks,
            )
            return
        hit = cache.retrieve(tokens, BlockKV(blocks, layout), salt=salt)
        served = hit.stop_tokens // CHUNK
        self.did("served", served)
        self.did(
            "wrong", int((blocks[:served] != right[:served]).any(axis=1).sum())
        )

    def end(self, cache: Cache) -> None:
        """Close a cache, or drop it in a cycle."""
        if self.random.random() < 0.5:
            cache.close(5.0)
        else:
            cycle: list[object] = [cache]
            cycle.append(cycle)

    def remove(self) -> None:
        """Remove a tier's directory, or one store in it, while processes have it open; the next
        opening creates it.
        """
        directory = self.random.choice((self.places.host, self.places.disk))
        stores = sorted(directory.glob("*/state"))
        if stores and self.random.random() < 0.5:
            directory = self.random.choice(stores).parent
        shutil.rmtree(directory, ignore_errors=True)
        self.did("removed")

    def touch_locks(self) -> None:
        """Do what a copy or a scan of the directories does."""
        for directory in (self.places.host, self.places.disk):
            with contextlib.suppress(OSError):  # removed meanwhile
                for path in directory.glob("*/locks"):
                    path.read_bytes()

    def fork(self, cache: Cache, layout: KVLayout) -> None:
        """Fork a child that continues with the same cache at the same time as its parent."""
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            self.children.append((pid, read))
            return self.did("forks")
        code = 1
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(2 * CHILD_SECONDS)  # if its parent is killed
            self.counts = Counter()
            for _ in range(4):
                self.use(cache, layout)
            if self.random.random() < 0.5:
                cache.close(5.0)
            os.write(write, json.dumps(self.counts).encode())
            code = 0
        except BaseException:  # noqa: BLE001
            # a border: it is in the log, and in the exit code
            traceback.print_exc()
        finally:
            os._exit(code)

    def collect(self) -> None:
        """Wait for the forked children, and add their counts. Print the threads of a child that
        hangs, and end it.
        """
        for pid, read in self.children:
            if not select.select([read], [], [], CHILD_SECONDS)[0]:
                os.kill(pid, signal.SIGABRT)
            with os.fdopen(read, "rb") as pipe:
                said = pipe.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code == 0:
                self.counts.update(json.loads(said))
            else:
                print(
                    f"a forked child ended with {code}",
                    file=sys.stderr,
                    flush=True,
                )
                self.did(
                    "hangs"
                    if code in (-signal.SIGALRM, -signal.SIGABRT)
                    else "dead"
                )
        self.children.clear()

    def leaks(self) -> list[str]:
        """Return what this process still holds after every cache was closed or dropped."""
        until = time.monotonic() + 20
        while (left := self.left()) and time.monotonic() < until:
            gc.collect()
            close_dropped(10)
            time.sleep(0.05)
        return left

    def left(self) -> list[str]:
        """Return the present descriptors and mappings of files of the run, and threads of
        caches.
        """
        found = []
        root = f"{self.places.root}/"
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:  # the descriptor of the listing
                continue
            found += (
                [f"descriptor of {path}"]
                if path.startswith(root) and ".log" not in path
                else []
            )
        for line in Path("/proc/self/maps").read_text().splitlines():
            found += (
                [f"mapping of {line.split(None, 5)[5]}"] if root in line else []
            )
        names = [thread.name for thread in threading.enumerate()]
        return found + [
            f"thread {name}"
            for name in names
            if name.startswith("pagoda") and name != "pagoda-dropped"
        ]


def _is_interrupt(trouble: BaseException | None) -> bool:
    """Return whether the signal handler raised it: Python's conditions may turn it into another
    error.
    """
    while trouble is not None and not isinstance(trouble, Interrupted):
        trouble = trouble.__cause__ or trouble.__context__
    return trouble is not None


def _bytes(layout: KVLayout, salt: str, key: bytes) -> np.ndarray:
    """Return the bytes that belong only to this chunk of this tenant in this layout."""
    seed = [*key[:8], *salt.encode(), layout.chunk_bytes]
    return np.random.default_rng(seed).integers(
        0, 256, layout.chunk_bytes, dtype=np.uint8
    )


def main(root: str, seed: str, operations: str) -> None:
    """Run one process: it prints its counts from time to time, and at the end what it still
    holds.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    )
    logging.basicConfig(format="%(asctime)s %(message)s")
    worker = Worker(Path(root), int(seed))
    worker.run(int(operations))
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(worker.counts | {"leaks": 0}), flush=True)
    leaks = worker.leaks()
    if leaks:
        faulthandler.dump_traceback(all_threads=True)
    print(json.dumps(leaks), flush=True)


# ---- the parent of the processes -----------------------------------------------------------------


class Running:
    """A process of the run, and the thread that reads its reports."""

    def __init__(
        self,
        root: Path,
        seed: int,
        operations: int,
        reports: queue.SimpleQueue[Running],
        before: Sequence[str],
    ) -> None:
        """`before`: the words before the command."""
        self.operations = operations
        self.counts = Counter[str]()
        self.leaks = None
        self.reported_at = time.monotonic()
        self.log = root / f"{seed}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *before,
                    sys.executable,
                    "-X",
                    "faulthandler",
                    __file__,
                    str(root),
                    str(seed),
                    str(operations),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "XDG_STATE_HOME": str(root / "registers")},
            )
        threading.Thread(
            target=self._read_reports, args=(reports,), daemon=True
        ).start()

    leaks: list[str] | None

    def _read_reports(self, reports: queue.SimpleQueue[Running]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if isinstance(said, list):
                self.leaks = said
            else:
                self.counts = Counter(said)
            self.reported_at = time.monotonic()
            reports.put(self)
        reports.put(self)

    def trace(self) -> str:
        """Return the end of its log, where a traceback is."""
        return _tail(self.log)


class Run:
    """One run. Kills processes and fills the disk after their reports."""

    def __init__(self, root: Path, seed: int, limit_seconds: float) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.places = Places(root)
        self.outcome = Outcome()
        self.random = random.Random(seed)
        self.seed = seed * 1_000_000
        self.until = time.monotonic() + limit_seconds
        self.reports: queue.SimpleQueue[Running] = queue.SimpleQueue()
        self.running: list[Running] = []
        self.groups: list[int] = []
        places = self.places
        self.mounts = Mounts(
            root, places.host, places.disk, places.small, self.random
        )
        self.identities = Identities(root, self.random)

    def go(self, operations: int, workers: int, killed: float) -> Outcome:
        """Run operations in parallel processes; after a share `killed` of the reports the process
        is killed.
        """
        mounted = self.mount()
        try:
            for _ in range(workers):
                self.start(-(-operations // workers))
            while self.running and self.take_report(killed):
                pass
            self.mounts.end()
            self.end()
            self.judge()
        finally:
            for group in self.groups:
                _kill_group(group)
            self.mounts.end()
            self.outcome.counts.update(self.mounts.counts)
            if mounted:
                subprocess.run(
                    ["umount", "-l", str(self.places.small)], check=False
                )
        return self.outcome

    def mount(self) -> bool:
        """Mount a small disk, which can be full."""
        self.places.small.mkdir(exist_ok=True)
        options = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={DISK_BYTES}",
            "tmpfs",
            str(self.places.small),
        ]
        try:
            done = subprocess.run(options, capture_output=True, text=True)
            self.outcome.full_disk = done.stderr.strip()
            return done.returncode == 0
        except OSError as trouble:
            self.outcome.full_disk = str(trouble)
            return False

    def start(self, operations: int) -> None:
        self.seed += 1
        name, words = self.identities.choose()
        self.outcome.counts[name or "the machine as it is"] += 1
        one = Running(
            self.places.root, self.seed, operations, self.reports, words
        )
        self.running.append(one)
        self.groups.append(one.process.pid)

    def take_report(self, killed: float) -> bool:
        """Take the next report; return False if there was none for too long."""
        try:
            one = self.reports.get(timeout=5.0)
        except queue.Empty:
            for one in [
                one for one in self.running if one.process.poll() is not None
            ]:
                self.ended(one)  # a forked child keeps its pipe open
            now = time.monotonic()
            return not any(
                now > min(one.reported_at + SILENT_SECONDS, self.until)
                for one in self.running
            )
        if one not in self.running:
            return True
        if one.leaks is not None or one.process.poll() is not None:
            self.ended(one)
        elif (
            self.random.random() < killed
            and one.counts["operations"] < one.operations
        ):
            one.process.kill()
            one.process.wait()
            self.outcome.counts["killed"] += 1
            self.ended(one, killed=True)
            self.start(one.operations - one.counts["operations"])
        if not self.outcome.full_disk:
            self.fill()
        if self.random.random() < MOUNTED:
            self.mounts.change()
        return time.monotonic() < self.until

    def fill(self) -> None:
        """Fill the disk, or free it again."""
        filler = self.places.small / "filler"
        with contextlib.suppress(OSError):  # it is read-only now
            self.fill_with(filler)

    def fill_with(self, filler: Path) -> None:
        """Write a file until the disk is full, or remove it."""
        if filler.exists():
            if self.random.random() < 0.4:
                filler.unlink()
        elif self.random.random() < 0.1:
            with filler.open("wb", buffering=0) as file:
                self.outcome.counts["full disks"] += 1
                for piece in (1 << 20, 4096):
                    try:
                        while file.write(bytes(piece)) == piece:
                            pass
                    except OSError:
                        continue

    def ended(self, one: Running, killed: bool = False) -> None:
        """Add the counts of one process, and note its violations."""
        self.running.remove(one)
        code = 0 if killed else one.process.wait(SILENT_SECONDS)
        self.outcome.counts.update(one.counts)
        if code or (one.leaks is None and not killed):
            self.outcome.fail(
                "dead", f"a process ended with {code}:{one.trace()}"
            )
        for leak in one.leaks or []:
            self.outcome.fail("leaks", leak)
        if one.leaks:
            self.outcome.violations[-1] += one.trace()
        for what in FAILURES:
            if one.counts[what]:
                self.outcome.violations.append(
                    f"{what}: {one.counts[what]}:{one.trace()}"
                )

    def end(self) -> None:
        """Check that no process remains; print the threads of a remaining one."""
        for one in list(self.running):
            one.process.send_signal(signal.SIGABRT)
            one.process.wait()
            self.running.remove(one)
            self.outcome.counts.update(one.counts)
            self.outcome.fail(
                "hangs",
                f"no report for {time.monotonic() - one.reported_at:.0f} s:{one.trace()}",
            )
        (self.places.small / "filler").unlink(missing_ok=True)
        until = time.monotonic() + 3 * CHILD_SECONDS
        while any(map(_is_alive, self.groups)):  # orphans of killed processes
            if time.monotonic() > until:
                for group in filter(_is_alive, self.groups):
                    _kill_group(group, signal.SIGABRT)
                time.sleep(1.0)  # until their threads are shown
                logs = "".join(map(_tail, sorted(self.places.root.glob("*.log"))))
                return self.outcome.fail(
                    "hangs", f"a forked child did not end:{logs}"
                )
            time.sleep(0.05)

    def judge(self) -> None:
        """Check that the next process finds each store valid, and nothing of the dead processes."""
        until = time.monotonic() + LEASED_SECONDS
        while (trouble := self.next_one()) and time.monotonic() < until:
            time.sleep(1.0)
        if trouble:
            self.outcome.fail("leaks", trouble)
        for directory in (self.places.host, self.places.disk):
            for state in directory.glob("*/state"):
                self.check(state.parent)
            for path in [
                *directory.glob("**/.gone-*"),
                *directory.glob("**/.new-*"),
                *directory.glob("**/*.new"),
            ]:
                self.outcome.fail("leaks", f"{path} is left")

    def next_one(self) -> str:
        """Open caches of the smallest sizes, one after the other; note a failure, or memory beyond
        the size.
        """
        for layout in LAYOUTS:
            config = self.places.config(layout, HOST_SLOTS[0], DISK_SLOTS[0])
            try:
                Cache(config, namespace=Namespace("m"), layout=layout).close(60.0)
            except StoreError as trouble:
                return f"the next process cannot open its cache: {trouble}"
        held = sum(
            slab.stat().st_blocks * 512
            for slab in self.places.host.glob("*/slab")
        )
        most = HOST_SLOTS[0] * LAYOUTS[-1].slot_bytes
        return (
            f"{held:,} bytes of host memory are held, {most:,} may be"
            if held > most
            else ""
        )

    def check(self, directory: Path) -> None:
        """Check that nothing of a store is reserved or held."""
        ledger = Ledger.attach(directory)
        try:
            admin.reap(ledger)
            gauges = admin.check(ledger).gauges
            holds = ledger.session.read(
                lambda txn, tables: list(tables.rows(txn, tables.holds)), 30
            )
            if gauges["reserved"] or gauges["members"] != 1 or holds:
                self.outcome.fail(
                    "leaks", f"{directory}: {gauges}, holds {holds}"
                )
        finally:
            ledger.close()


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _tail(log: Path) -> str:
    return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def _kill_group(group: int, number: int = signal.SIGKILL) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def run(
    root: Path,
    operations: int,
    seed: int,
    limit_seconds: float,
    workers: int = 3,
    killed: float = 0.02,
) -> Outcome:
    """Run parallel processes with faults of every kind, and check the result."""
    return Run(root, seed, limit_seconds).go(operations, workers, killed)


if __name__ == "__main__":
    main(*sys.argv[1:])
