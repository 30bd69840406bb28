"""`python tests/disk_stops.py --runs 20`: how often an engine dies when the file system of its disk
tier stops.

As root, on XFS in a loop device. Each run: a process stores and loads through a cache with a disk
tier, without a pause; meanwhile the file system is shut down, as an I/O error of its device does.
Prints a line for each kind of run:

    resident   nothing else happens
    reclaim    before and after, memory is reclaimed as far as possible (drop_caches, and the cgroup
               of the process)
    unlocked   as reclaim, and the process may not lock the pages of the tables
    bare       as unlocked, and nothing asks the file system before the tables are read: what the
               guards are worth

Exit code 1 if a chunk was wrong, or a process died that could lock its pages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testbed.programs import need

KINDS = ("resident", "reclaim", "unlocked", "bare")
SAFE = ("resident", "reclaim")  # where no process may die
_SECONDS = 2.5  # how long a process works after it has stored
_STORED = "stored"

_ENGINE = """
import os, sys, time
from pathlib import Path

import numpy as np

from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import session, table_pages
from pagoda.transfer import BlockKV

disk, host, kind, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
if kind in ("unlocked", "bare"):
    table_pages.MOST_LOCKED_BYTES = 0
if kind == "bare":
    session.Session._require_readable = session.Session._require_usable = lambda _: None
    session.Session.tend = session.Session.suspect = lambda _: None
layout = KVLayout.opaque(4, 16384, "stops")
config = Config(chunk_tokens=4, worth_it=False, host_size=40 * layout.slot_bytes, host_path=host,
                disk_path=str(disk / "tier"), disk_size=4000 * (layout.slot_bytes + 4096))
cache = Cache(config, namespace=Namespace("m"), layout=layout)


def tokens(number):
    return np.repeat(np.arange(8, dtype=np.int32) + 1000 * number, 4)


def content(number):
    return (np.arange(8 * 16384, dtype=np.uint32) % 251 + number).astype(np.uint8).reshape(8, 16384)


def store(number):
    cache.store(tokens(number), BlockKV(content(number), layout))


def load(number):
    found = np.zeros((8, 16384), np.uint8)
    chunks = cache.retrieve(tokens(number), BlockKV(found, layout)).num_tokens // 4
    if not np.array_equal(found[:chunks], content(number)[:chunks]):
        os._exit(3)


for number in range(300):
    store(number)
    cache.flush(5)
os.sync()
print("stored", flush=True)
until, number = time.monotonic() + seconds, 0
while time.monotonic() < until:
    load(number % 300)
    store(1000 + number)
    number += 7
cache.close()
os._exit(0)
"""


class Stops(NamedTuple):
    """What became of the processes of one kind of run."""

    runs: int
    died: int  # by a signal
    wrong: int
    others: list[int]  # other exit codes than 0


@contextlib.contextmanager
def file_system(work: Path) -> Iterator[Path]:
    """Make and mount a file system; unmount it at the end, whatever happened to it."""
    image = work / "image"
    mount = work / "mount"
    mount.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(600 << 20)
    subprocess.run([need("mkfs.xfs"), "-q", "-f", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=False)
        image.unlink()


def reclaim(group: Path | None) -> None:
    """Take from all processes what memory they can do without."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for name, request in (
        ("memory.reclaim", "512M"),
        ("memory.force_empty", "0"),
    ):  # of version 2 and of version 1
        if group is not None and (group / name).exists():
            # less than asked for was reclaimed
            with contextlib.suppress(OSError):
                (group / name).write_text(request)


@contextlib.contextmanager
def memory_group() -> Iterator[Path | None]:
    """Make a cgroup of its own for a process; None where that is not possible."""
    top = Path("/sys/fs/cgroup")
    group = (
        top / "memory" if (top / "memory").is_dir() else top
    ) / f"pagoda-stops-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def once(kind: str, after_seconds: float) -> int:
    """Let one process work while its file system stops; return its exit code."""
    work = Path(tempfile.mkdtemp(prefix="pagoda-stops-"))
    host = tempfile.mkdtemp(prefix="pagoda-stops-", dir="/dev/shm")
    try:
        with file_system(work) as mount, memory_group() as group:
            engine = subprocess.Popen(
                [sys.executable, "-c", _ENGINE, mount, host, kind, str(_SECONDS)],
                stdout=subprocess.PIPE,
                text=True,
                stderr=subprocess.DEVNULL,
            )
            assert engine.stdout is not None
            if group is not None:
                (group / "cgroup.procs").write_text(str(engine.pid))
            if _STORED in engine.stdout.readline():
                time.sleep(after_seconds)
                if kind != "resident":
                    reclaim(group)
                subprocess.run(
                    [need("xfs_io"), "-x", "-c", "shutdown", mount],
                    check=True,
                )
                until = time.monotonic() + _SECONDS
                while (
                    kind != "resident"
                    and engine.poll() is None
                    and time.monotonic() < until
                ):
                    reclaim(group)
                    time.sleep(0.05)
            return engine.wait(timeout=120)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(host, ignore_errors=True)


def measured(kind: str, runs: int) -> Stops:
    """Repeat one kind of run; the file system stops at another moment each time."""
    codes = [once(kind, 0.1 + 0.037 * number % 0.9) for number in range(runs)]
    died = sum(code in (-signal.SIGBUS, -signal.SIGSEGV) for code in codes)
    others = [
        code
        for code in codes
        if code not in (0, 3, -signal.SIGBUS, -signal.SIGSEGV)
    ]
    return Stops(runs, died, codes.count(3), others)


def main() -> int:
    """Measure all kinds and print them; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    failed = False
    for kind in options.kinds:
        found = measured(kind, options.runs)
        failed |= bool(
            found.wrong or found.others or (found.died and kind in SAFE)
        )
        print(
            f"{kind:<9} {found.runs} shutdowns: {found.died} died by a signal, {found.wrong} "
            "wrong, "
            f"other ends: {found.others or 'none'}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
