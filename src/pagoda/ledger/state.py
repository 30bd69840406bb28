"""The small file `state` of a store: what it is, and whether its ledger may be trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from pagoda.ledger.columns import columns_bytes
from pagoda.metrics import COUNTERS

FORMAT = 2
STATE, LOCKS, TABLES, COLUMNS, COUNTERS_FILE, SLAB, NAMESPACES = (
    "state", "locks", "data.mdb", "columns", "counters", "slab", "namespaces",
)  # fmt: skip
MEMBER_ROWS = 512
FIRST_OFFSET = 1 << 60  # recency stamps of a new store begin here, above those a rebuild gives
NEVER_BOOTED = ""  # boot id of a store whose ledger is being made or resized: trusted by nobody

Kind = Literal["memory", "file"]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a store says of itself. Replaced whole, by rename, never edited."""

    format: int
    kind: Kind
    store_id: str
    slots: int
    slot_bytes: int
    map_bytes: int
    incarnation: int
    recency_offset: int
    boot_id: str
    clean: bool
    private: bool
    inodes: dict[str, int]

    def sizes(self) -> dict[str, int]:
        """Exact size of each mapped file, in bytes."""
        sizes = {
            TABLES: self.map_bytes,
            COLUMNS: columns_bytes(self.slots),
            COUNTERS_FILE: MEMBER_ROWS * len(COUNTERS) * 8,
            SLAB: self.slots * self.slot_bytes,
        }
        return {name: size for name, size in sizes.items() if size}

    def first_generation(self) -> int:
        """Generations of one incarnation of the ledger never meet those of another."""
        return (self.incarnation << 40) + 1


def read_state(directory: Path) -> State | None:
    """Read the state of a store; None if there is none, or it is of another format or damaged."""
    try:
        state = msgspec.json.decode((directory / STATE).read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return None
    return state if state.format == FORMAT and state.slots > 0 else None


def write_state(directory: Path, state: State) -> None:
    """Replace the state of a store, synced."""
    write_synced(directory / STATE, msgspec.json.encode(state))


def write_synced(path: Path, content: bytes) -> None:
    """Replace a small file so that either the old or the new content stands, also after a power cut."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(fresh, "wb", opener=_private) as file:
            file.write(content)  # all of it, or OSError: a full disk takes a part without a word
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_directory(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def mismatch(directory: Path, state: State) -> str | None:
    """Say in what the files of a store differ from what its state promises; None if in nothing."""
    for name, size in state.sizes().items():
        try:
            status = os.stat(directory / name)
        except OSError:
            return f"{name} is missing"
        if status.st_size != size:
            return f"{name} has {status.st_size} bytes instead of {size}"
        if state.inodes and state.inodes.get(name) != status.st_ino:
            return f"{name} is not the file it was"
    return None


def inodes(directory: Path, state: State) -> dict[str, int]:
    """The inode of each mapped file: for memory, where a copied file would be another one."""
    return (
        {name: os.stat(directory / name).st_ino for name in state.sizes()} if state.kind == "memory" else {}
    )
