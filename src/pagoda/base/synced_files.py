"""Small files that are replaced as a whole: a reader finds the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from pagoda.base.file_space import opened

_WRITE_SECONDS = 600.0


def write_synced(path: Path, content: bytes) -> None:
    """Replace a small file so that it has either the old or the new content, also after a power
    cut.
    """
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    remove_abandoned(path.parent, f".{path.name}-*")
    try:
        with open(
            fresh,
            "wb",
            opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600),
        ) as file:
            # writes all of it or raises OSError; `os.write` to a full disk may write only a part
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write to the medium which files a directory has. OSError."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def remove_abandoned(directory: Path, names: str) -> None:
    """Remove the files of a pattern that are older than any write takes: their writers were killed.
    Raises OSError.
    """
    for file in directory.glob(names):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _WRITE_SECONDS:
                file.unlink()
