"""Open, create, resize, rebuild and discard the directory that a ledger and its slab lie in.

`<root>/<name>/` is one store. All of this happens under the lock of the root, so that one process at a time changes
what stores there are; who *uses* a store shares byte OPEN of the store's own lock file, and only who has that byte
alone may judge, resize or discard it. A directory is made under another name and renamed into place when complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from pagoda.clock import Clock
from pagoda.errors import NoRoomError, StoreError
from pagoda.ledger.columns import Columns
from pagoda.ledger.locks import OPEN, LockFile
from pagoda.ledger.resize import resize_tables
from pagoda.ledger.room import allocate, require_free, require_local, require_own
from pagoda.ledger.state import (
    COLUMNS,
    COUNTERS_FILE,
    FIRST_OFFSET,
    FORMAT,
    LOCKS,
    NEVER_BOOTED,
    SLAB,
    TABLES,
    Kind,
    State,
    inodes,
    mismatch,
    read_state,
    write_state,
)  # fmt: skip
from pagoda.ledger.tables import META_ROW, Meta, Tables, map_bytes

log = logging.getLogger(__name__)

_MAKING, _GOING = ".new-", ".gone-"
_LAST_STAMP = 1 << 62  # no clock gets there: what is above has been damaged
_opening = threading.Lock()
_open_here: set[LockFile] = set()  # of stores this process has open: one's own byte locks do not show


@dataclass(frozen=True)
class StoreSpec:
    """Which store: `slots` slots of `slot_bytes` (stride in the slab file, headers included) in `<root>/<name>/`.

    `limit_bytes` is the root's: stores nobody has open are discarded, oldest first, to stay within it. A `private`
    store is nobody else's, and gone when it is closed or its process dies.
    """

    root: Path
    name: str
    kind: Kind
    slots: int
    slot_bytes: int
    limit_bytes: int | None = None
    private: bool = False

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"a store needs at least one slot, not {self.slots}: ask for a larger size")
        if self.slot_bytes < 0 or self.slot_bytes % 4096:
            raise ValueError(f"slot_bytes must be a multiple of 4096, not {self.slot_bytes}")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"{self.name!r} cannot name a store")


@dataclass(frozen=True)
class Store:
    """A store that this process has open: its byte OPEN is shared. `sole`: nobody else had it open at that moment."""

    directory: Path
    state: State
    locks: LockFile
    sole: bool

    def mark_clean(self) -> None:
        """Say that what the last to close has synced may be trusted after a reboot."""
        write_state(self.directory, msgspec.structs.replace(self.state, clean=True))

    def is_last(self) -> bool:
        """Whether nobody else has it open; if so this process now has it alone."""
        return self.locks.is_at(self.directory / LOCKS) and self.locks.try_lock(OPEN, exclusive=True)

    def release(self) -> None:
        """Let others discard it; a private store goes at once."""
        try:
            if self.state.private and self.is_last():
                with contextlib.suppress(OSError):  # somebody else was quicker
                    discard(self.directory)
            self.locks.unlock(OPEN)
        finally:
            _open_here.discard(self.locks)


def open_store(spec: StoreSpec, clock: Clock, deadline_seconds: float, create: bool = True) -> Store:
    """Open the store, making, resizing or discarding it as needed. StoreError or NoRoomError with the remedy."""
    directory = spec.root / spec.name
    try:
        _prepare(spec.root, create)
        with _root_locked(spec.root, deadline_seconds):
            _sweep(spec.root)
            until = time.monotonic() + deadline_seconds
            store = _open_existing(directory, spec, clock, create, until)
            if store is None and create:
                store = _create(directory, spec, clock)
    except (OSError, lmdb.Error) as error:
        raise StoreError(
            f"the store at {directory} cannot be opened ({error}): mend that or choose another path"
        ) from error
    if store is None:
        raise StoreError(f"there is no usable store at {directory}")
    _open_here.add(store.locks)
    return store


def reopen_store(store: Store) -> Store:
    """Open the same store again (after a fork). StoreError if it is gone.

    Between the death of a parent and this nobody may have had it open, and another may have resized or rebuilt it:
    what is mapped would then be files of the past.
    """
    usable = store.locks.try_lock(OPEN, exclusive=False) and store.locks.is_at(store.directory / LOCKS)
    state = read_state(store.directory)
    known = (store.state.store_id, store.state.incarnation)
    if not usable or state is None or (state.store_id, state.incarnation) != known:
        store.locks.unlock(OPEN)
        raise StoreError(f"the store at {store.directory} is gone; open it anew")
    return Store(store.directory, state, store.locks, sole=False)


def discard(directory: Path) -> None:
    """Remove a whole store, out of sight first. The caller has it alone."""
    gone = directory.with_name(f"{_GOING}{secrets.token_hex(6)}")
    os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)  # what is left is swept by the next who opens


def _prepare(root: Path, create: bool) -> None:
    if create:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{root} cannot be made ({error.strerror}): choose another path") from error
    if not root.is_dir():
        raise StoreError(f"there is no directory {root}")
    require_own(root)
    require_local(root)


@contextlib.contextmanager
def _root_locked(root: Path, deadline_seconds: float) -> Iterator[None]:
    until = time.monotonic() + deadline_seconds
    busy = StoreError(
        f"another process has been opening a store under {root} for {deadline_seconds:g} s: is it stopped?"
    )
    if not _opening.acquire(timeout=deadline_seconds):
        raise busy
    try:
        locks = LockFile.at(root / LOCKS)
        if not locks.lock(OPEN, exclusive=True, until=until):
            raise busy
        try:
            yield
        finally:
            locks.unlock(OPEN)
    finally:
        _opening.release()


def _stores(root: Path) -> list[Path]:
    """The stores under a root, damaged ones too; anything else there is not ours to count or touch."""
    return [
        entry
        for entry in root.iterdir()
        if entry.is_dir() and (entry / LOCKS).exists() and not entry.name.startswith((_MAKING, _GOING))
    ]


def _sweep(root: Path) -> None:
    """Remove what a killed process left: half-made and half-gone directories, private stores of the dead."""
    for entry in root.iterdir():
        if entry.name.startswith((_MAKING, _GOING)):
            shutil.rmtree(entry, ignore_errors=True)
        elif (state := read_state(entry)) is not None and state.private:
            with contextlib.suppress(FileNotFoundError):  # its owner discards it without the lock of the root
                if not _in_use(entry):
                    discard(entry)


def _in_use(directory: Path) -> bool:
    """Whether this or another process has the store open."""
    locks = LockFile.at(directory / LOCKS)
    return locks in _open_here or locks.held_by_other(OPEN)


def _open_existing(
    directory: Path, spec: StoreSpec, clock: Clock, may_discard: bool, until: float
) -> Store | None:
    if not directory.is_dir():
        return None
    require_own(directory)
    locks = LockFile.at(directory / LOCKS)
    # Shared first: from here on nobody can be the last to leave, and mark as clean what we are about to change.
    if not locks.lock(OPEN, exclusive=False, until=until):
        raise StoreError(f"another process has {directory} to itself and does not end: is it stopped?")
    if not locks.try_lock(OPEN, exclusive=True):
        return _join(directory, spec, locks)
    try:
        state = _judge(directory, spec, clock)
        if state is None and may_discard:
            discard(directory)
        elif state is not None:
            locks.try_lock(OPEN, exclusive=False)  # a lock of one's own is converted at once
    except BaseException:
        locks.unlock(OPEN)
        raise
    if state is None:
        locks.unlock(OPEN)
        return None
    return Store(directory, state, locks, sole=True)


def _join(directory: Path, spec: StoreSpec, locks: LockFile) -> Store:
    """Use the store that others have open, as it is."""
    state = read_state(directory)
    wrong = "its state is damaged or of another version" if state is None else mismatch(directory, state)
    if state is not None and (state.kind, state.slot_bytes) != (spec.kind, spec.slot_bytes):
        wrong = f"it holds another kind of chunks: {state.kind}, {state.slot_bytes} bytes a slot"
    if state is None or wrong:
        locks.unlock(OPEN)
        raise StoreError(
            f"the store at {directory} cannot be used ({wrong}) while others have it open: "
            "stop them first or choose another path"
        )
    if state.slots != spec.slots:
        log.warning(
            "%s has %d slots as long as other processes have it open, not the %d asked for",
            directory,
            state.slots,
            spec.slots,
        )
    return Store(directory, state, locks, sole=False)


def _judge(directory: Path, spec: StoreSpec, clock: Clock) -> State | None:
    """Bring a store that nobody else has open up to date; None if it must be discarded."""
    state = read_state(directory)
    if state is None or (state.kind, state.slot_bytes) != (spec.kind, spec.slot_bytes):
        log.warning(
            "discarding the store at %s: its state is missing, damaged or of another version", directory
        )
        return None
    boot = clock.boot_id()
    wrong = mismatch(directory, state)
    trusted = state.boot_id == boot or (state.clean and state.kind == "file")
    if trusted and not wrong and not _tables_stand(directory, state):
        wrong = f"{TABLES} is not a ledger's"
    if state.kind == "memory" and (wrong or not trusted):
        log.warning("discarding the store at %s: %s", directory, wrong or "it is from before the last boot")
        return None
    if state.kind == "file" and not (directory / SLAB).is_file():
        log.warning("discarding the store at %s: %s", directory, wrong)
        return None
    if wrong or not trusted:
        log.warning(
            "rebuilding the ledger at %s from the slab: %s",
            directory,
            wrong or "the machine went down while it was open",
        )
        state = _rebuild(directory, state)
    if state.slots != spec.slots:
        state = _resize(directory, state, spec)
    return _renew(directory, state, boot, clock)


def _tables_stand(directory: Path, state: State) -> bool:
    """Whether tables that are to be trusted can be opened and are of that many slots."""
    try:
        tables = Tables(directory / TABLES, state.map_bytes)
        try:
            with tables.env.begin() as txn:
                return tables.load_meta(txn).slots == state.slots
        finally:
            tables.close()
    except (lmdb.Error, struct.error):
        return False


def _fit_slab(directory: Path, nbytes: int) -> None:
    """Give a slab its size; what is cut off is gone, what is added holds nothing."""
    slab = directory / SLAB
    if os.stat(slab).st_size > nbytes:
        os.truncate(slab, nbytes)
    allocate(slab, nbytes)


def _renew(directory: Path, state: State, boot: str, clock: Clock) -> State:
    """Take a store into use: from now on only this boot, or a clean close, makes its ledger trusted."""
    offset = state.recency_offset
    if state.boot_id != boot:
        columns = Columns(directory / COLUMNS, state.slots)
        columns.lease_until[:] = 0  # times of another boot
        known = columns.last_use[columns.last_use < _LAST_STAMP]
        offset = max(FIRST_OFFSET, int(known.max(initial=0))) + 1 - clock.monotonic_ns()
    renewed = msgspec.structs.replace(
        state, boot_id=boot, clean=False, recency_offset=offset, inodes=inodes(directory, state)
    )
    if renewed != state:  # a full file system would not take it
        write_state(directory, renewed)
    return renewed


def _create(directory: Path, spec: StoreSpec, clock: Clock) -> Store:
    state = State(
        format=FORMAT, kind=spec.kind, store_id=secrets.token_hex(16), slots=spec.slots, slot_bytes=spec.slot_bytes,
        map_bytes=map_bytes(spec.slots), incarnation=1, recency_offset=0, boot_id=NEVER_BOOTED, clean=False,
        private=spec.private, inodes={},
    )  # fmt: skip
    _make_room(spec, sum(state.sizes().values()))
    making = spec.root / f"{_MAKING}{secrets.token_hex(6)}"
    making.mkdir(mode=0o700)
    try:
        locks = LockFile.at(making / LOCKS)
        locks.try_lock(OPEN, exclusive=False)
        _make_ledger(making, state, scan=state.slots)
        if spec.slot_bytes:
            allocate(making / SLAB, spec.slots * spec.slot_bytes)
        state = _renew(making, state, clock.boot_id(), clock)
        os.rename(making, directory)
    except (OSError, lmdb.Error) as error:
        raise NoRoomError(
            f"the store at {directory} cannot be made ({error}): free some room or choose another path"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return Store(directory, state, locks, sole=True)


def _make_ledger(directory: Path, state: State, scan: int) -> None:
    """Make tables, columns and counters of a ledger that knows of nothing; slots from `scan` on wait to be scanned."""
    for name in (TABLES, COLUMNS, COUNTERS_FILE):
        (directory / name).unlink(missing_ok=True)
    sizes = state.sizes()
    for name in (COLUMNS, COUNTERS_FILE):
        allocate(directory / name, sizes[name])
    Columns(directory / COLUMNS, state.slots).reset()
    tables = Tables(directory / TABLES, state.map_bytes, create=True)
    try:
        with tables.env.begin(write=True) as txn:
            unused = 0 if scan == state.slots else state.slots
            meta = Meta(state.slots, state.first_generation(), unused=unused, scan=scan)
            txn.put(META_ROW, meta.pack(), db=tables.meta)
    finally:
        tables.close()
    allocate(directory / TABLES, sizes[TABLES])


def _rebuild(directory: Path, state: State) -> State:
    """Put an empty ledger in place of one that is not trusted; its slots are to be scanned."""
    state = msgspec.structs.replace(
        state, incarnation=state.incarnation + 1, boot_id=NEVER_BOOTED, clean=False
    )
    write_state(directory, state)
    _fit_slab(directory, state.slots * state.slot_bytes)  # another size if who resized the store was killed
    _make_ledger(directory, state, scan=0)
    return state


def _resize(directory: Path, state: State, spec: StoreSpec) -> State:
    """Give the store as many slots as asked for; chunks in slots that go are gone."""
    resized = msgspec.structs.replace(
        state,
        slots=spec.slots,
        map_bytes=max(state.map_bytes, map_bytes(spec.slots)),
        incarnation=state.incarnation + 1,  # who has the old files mapped must not go on
        boot_id=NEVER_BOOTED,
        clean=False,
    )
    grown = sum(resized.sizes().values()) - sum(state.sizes().values())
    _make_room(spec, grown, keep=directory)
    both = max(0, grown) + state.sizes()[COLUMNS]  # for a moment the old columns stand beside the new
    require_free(spec.root, both, spec.kind == "memory")
    write_state(directory, resized)
    old = Columns(directory / COLUMNS, state.slots)
    (directory / COLUMNS).unlink()
    allocate(directory / COLUMNS, resized.sizes()[COLUMNS])
    columns = Columns(directory / COLUMNS, resized.slots)
    columns.reset()
    columns.copy_from(old)
    if spec.slot_bytes:
        _fit_slab(directory, resized.slots * spec.slot_bytes)
    allocate(directory / TABLES, resized.map_bytes)
    resize_tables(directory / TABLES, resized.map_bytes, resized.slots)
    return resized


def _make_room(spec: StoreSpec, need_bytes: int, keep: Path | None = None) -> None:
    """Discard stores that nobody has open, oldest first, until `need_bytes` more are within the root's limit."""
    sizes = {path: _disk_bytes(path) for path in _stores(spec.root)}
    if spec.limit_bytes is not None:
        idle = sorted((p for p in sizes if p != keep and not _in_use(p)), key=lambda p: _age(p))
        while idle and sum(sizes.values()) + need_bytes > spec.limit_bytes:
            log.warning("discarding the store at %s: another layout needs its room", idle[0])
            with contextlib.suppress(FileNotFoundError):
                discard(idle[0])
            del sizes[idle.pop(0)]
        if sum(sizes.values()) + need_bytes > spec.limit_bytes:
            raise NoRoomError(
                f"{spec.root} may hold {spec.limit_bytes:,} bytes and {sum(sizes.values()):,} are in use; "
                f"{need_bytes:,} more do not fit: take another path, ask for less, close others or raise the limit"
            )
    require_free(spec.root, need_bytes, spec.kind == "memory")


def _disk_bytes(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # a private store may go at any time
        return sum(entry.stat().st_size for entry in directory.iterdir() if entry.is_file())
    return 0


def _age(directory: Path) -> float:
    state = directory / "state"
    return state.stat().st_mtime if state.exists() else 0.0


def _fresh_lock() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)
