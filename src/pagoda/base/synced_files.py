"""Small files that are replaced as a whole: a reader finds the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from pagoda.base.file_space import opened

_WRITE_SECONDS = 600.0


def write_synced(path: Path, content: bytes) -> None:
    """Replace a small file so that it has either the old or the new content, also after a power
    cut.
    """
    with written_beside(path, content) as fresh:
        os.replace(fresh, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def written_beside(path: Path, content: bytes) -> Iterator[Path]:
    """Write a file beside `path` that only this user can read, for the block to give it that name;
    it is on the medium by then, and removed after the block. Raises OSError.
    """
    # not the process id: what runs in a container has the same at each start
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    remove_abandoned(path.parent, f".{path.name}-*")
    try:
        with open(
            fresh,
            "xb",
            opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600),
        ) as file:
            # writes all of it or raises OSError; `os.write` to a full disk may write only a part
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Write to the medium which files a directory has. OSError."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def remove_abandoned(
    directory: Path, names: str, old_seconds: float = _WRITE_SECONDS
) -> None:
    """Remove the files of a pattern that are older than any write takes: their writers were killed.
    Raises OSError.

    `old_seconds`: of what lives longer than a write.
    """
    for file in directory.glob(names):
        # gone by now, or another user's
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if time.time() - file.stat().st_mtime > old_seconds:
                file.unlink()
