"""What happens to the files of states while requests run: how many bytes they take, and a disk that
cuts some of them short.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_LOOK_SECONDS = 0.01


class StateWatch:
    """Adds up the files of directories again and again, in a thread. `cuts` makes it truncate some.

    A directory that comes later is found too.
    """

    def __init__(
        self, directories: Callable[[], list[Path]], rng: random.Random
    ) -> None:
        """`directories`: those that exist now; called from the thread."""
        self._directories = directories
        self._rng = random.Random(rng.random())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.cuts = False
        self.most_bytes = 0  # of the files of one directory at a time
        self.seen = 0  # files
        self.cut = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        known: set[str] = set()
        while not self._ended.wait(_LOOK_SECONDS):
            for directory in self._directories():
                sizes = dict(_files(directory))
                known.update(sizes)
                self.seen = len(known)
                self.most_bytes = max(self.most_bytes, sum(sizes.values()))
                if self.cuts and self._rng.random() < 0.3:
                    for path, size in sizes.items():
                        self._cut(path, size)

    def _cut(self, path: str, size: int) -> None:
        """Truncate a file that nobody writes: in one that is written, a hole would be filled later
        with zeros, which no disk does.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            finally:
                os.close(descriptor)
            os.truncate(path, self._rng.randrange(size + 1))
            self.cut += 1


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                size = entry.stat().st_size
                if size:  # not the locks
                    yield entry.path, size


class FullDisk:
    """A directory on a small file system, which a large file can fill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Take all space that is left."""
        with (
            contextlib.suppress(OSError),
            open(self._filler, "ab", buffering=0) as file,
        ):
            while file.write(bytes(65536)):
                pass

    def empty(self) -> None:
        """Give it back."""
        self._filler.unlink(missing_ok=True)
