"""What changes around the caches of `stress_outlives` while they run: files, mounts, clocks, the
machine's identity.

The processes of the run change files and their wall clock themselves; its parent mounts file
systems over the directories, and starts some processes with another boot id, another monotonic
clock or another host name, as they have beside each other in containers.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

OTHER_BOOT = "11111111-2222-4333-8444-555555555555"
DAY_SECONDS = 86_400
COPIES = "copies"  # of files, in the directory of the run
OVER_BYTES = 8 << 20  # of a file system that is mounted over another one


class SpoiledFiles:
    """Keep copies of files, and remove files, put older copies back, cut them or change their
    age.
    """

    def __init__(
        self, root: Path, host: Path, disk: Path, chance: random.Random
    ) -> None:
        self._copies = root / COPIES
        self._host = host
        self._disk = disk
        self._random = chance

    def spoil(self) -> str:
        """Do one of these to a file of a store or of a root; return what was done, "" if there was
        no file.
        """
        kind = self._random.choice(("host", "disk"))
        root = self._host if kind == "host" else self._disk
        with contextlib.suppress(OSError):  # removed meanwhile, or a full disk
            files = sorted(
                path
                for path in (*root.glob("*"), *root.glob("*/*"))
                if path.is_file()
            )
            if files:
                return self._spoil(kind, self._random.choice(files), root)
        return ""

    def _spoil(self, kind: str, path: Path, root: Path) -> str:
        copy = self._copies / kind / path.relative_to(root)
        # a file of host memory that is cut kills the processes that have it mapped, whatever they
        # do
        actions = (
            "keep",
            "remove",
            "put back",
            "age",
            *(["cut"] if kind == "disk" else []),
        )
        action = self._random.choice(actions)
        if action == "keep":
            copy.parent.mkdir(parents=True, exist_ok=True)
            fresh = copy.with_name(f"{copy.name}.{os.getpid()}")
            shutil.copy2(path, fresh)
            fresh.replace(copy)
        elif action == "remove":
            path.unlink()
        elif action == "put back":
            fresh = path.with_name(f".put-back-{os.getpid()}")
            try:
                shutil.copy2(copy, fresh)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
        elif action == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            then = time.time() + self._random.uniform(-400, 1) * DAY_SECONDS
            os.utime(path, (then, then))
        return action


class WallClock:
    """The wall clock of this process, which somebody sets."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._offset_seconds = 0.0
        self._time = time.time
        self._time_ns = time.time_ns

    def install(self) -> None:
        """Let Python's functions show it."""
        time.time = lambda: self._time() + self._offset_seconds
        time.time_ns = lambda: self._time_ns() + int(self._offset_seconds * 1e9)

    def set(self) -> None:
        """Set it by up to a year, mostly by seconds, forwards or backwards."""
        size = 10 ** self._random.uniform(-1, 7.5)
        self._offset_seconds = self._random.choice((-size, 0.0, size))


class Identities:
    """How processes are started that see another machine: each with the words before its
    command.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self._random = chance
        self._boot = root / "boot-id"
        self._boot.write_text(f"{OTHER_BOOT}\n")
        bound = f"mount --bind '{self._boot}' /proc/sys/kernel/random/boot_id"
        apart = ["unshare", "--mount", "--propagation", "slave"]
        ways = {
            "another boot id": [
                *apart,
                "sh",
                "-c",
                f'{bound} && exec "$@"',
                "sh",
            ],
            "another clock": [
                "unshare",
                "--time",
                "--monotonic",
                str(3 * DAY_SECONDS),
                "--fork",
                "--kill-child",
            ],
            "another host": [
                "unshare",
                "--uts",
                "sh",
                "-c",
                'hostname another && exec "$@"',
                "sh",
            ],
        }
        self.ways = {
            name: words
            for name, words in ways.items()
            if _works([*words, "true"])
        }

    def choose(self) -> tuple[str, Sequence[str]]:
        """Return a way for one process: mostly none."""
        if not self.ways or self._random.random() < 0.6:
            return "", ()
        name = self._random.choice(sorted(self.ways))
        return name, self.ways[name]


class Mounts:
    """File systems that are mounted over the directories of a run, and made read-only, and all that
    undone.
    """

    def __init__(
        self,
        root: Path,
        host: Path,
        disk: Path,
        small: Path,
        chance: random.Random,
    ) -> None:
        self._other = root / "other"
        self._host = host
        self._disk = disk
        self._small = small
        self._random = chance
        self._over: list[Path] = []
        self._is_read_only = False
        self.counts = Counter[str]()

    def change(self) -> None:
        """Mount something, or undo that."""
        if self._is_read_only:
            self._is_read_only = not _works(
                ["mount", "-o", "remount,rw", str(self._small)]
            )
        elif self._over:
            self._unmount()
        elif self._random.random() < 0.3:
            self._is_read_only = _works(
                ["mount", "-o", "remount,ro", str(self._small)]
            )
            self.counts["read-only mounts"] += self._is_read_only
        else:
            self._mount(self._random.choice((self._host, self._disk)))

    def _mount(self, over: Path) -> None:
        with contextlib.suppress(OSError):
            over.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={OVER_BYTES},mode=0700",
            "tmpfs",
            str(over),
        ]
        if self._random.random() < 0.5:
            self._other.mkdir(mode=0o700, exist_ok=True)
            words = ["mount", "--bind", str(self._other), str(over)]
        if _works(words):
            self._over.append(over)
            self.counts["mounts"] += 1

    def _unmount(self) -> None:
        subprocess.run(
            ["umount", "-l", str(self._over.pop())],
            capture_output=True,
            check=False,
        )

    def end(self) -> None:
        """Undo everything."""
        while self._over:
            self._unmount()
        if self._is_read_only:
            self.change()
        shutil.rmtree(self._other, ignore_errors=True)


def _works(words: Sequence[str]) -> bool:
    try:
        return (
            subprocess.run(words, capture_output=True, check=False).returncode
            == 0
        )
    except OSError:
        return False
