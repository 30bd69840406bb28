"""Open, create, resize, rebuild and discard the directory that a ledger and its slab lie in.

`<root>/<name>/` is one store. All of this happens under the lock of the root, so that one process at a time changes
what stores there are; who *uses* a store shares byte OPEN of the store's own lock file, and only who has that byte
alone may judge, resize or discard it. A directory is made under another name and renamed into place when complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from pagoda.clock import Clock
from pagoda.errors import NoRoomError, StoreError
from pagoda.ledger.columns import Columns
from pagoda.ledger.locks import OPEN, LockFile
from pagoda.ledger.resize import resize_tables
from pagoda.ledger.state import (
    COLUMNS,
    COUNTERS_FILE,
    FIRST_OFFSET,
    FORMAT,
    LENT,
    LOCKS,
    NEVER_BOOTED,
    SLAB,
    SLAB_FORMAT,
    STATE,
    TABLES,
    Kind,
    Mark,
    State,
    inodes,
    is_marked,
    mismatch,
    read_state,
    set_mark,
    write_state,
)  # fmt: skip
from pagoda.ledger.tables import META_ROW, Meta, Tables, map_bytes
from pagoda.ledger.trust import checksum, unsound
from pagoda.room import allocate, free_bytes, lengthen, require_free, require_local, require_own

log = logging.getLogger(__name__)

_MAKING, _GOING = ".new-", ".gone-"
_PASSING = re.compile(r"\.(new|gone)-[0-9a-f]{12}")  # exactly the names that are made here
_PRIVATE = ".private-"
_LIMIT = "limit"
_LAST_STAMP = 1 << 62  # no clock gets there: what is above has been damaged


@dataclass(frozen=True)
class StoreSpec:
    """Which store: `slots` slots of `slot_bytes` (stride in the slab file, headers included) in `<root>/<name>/`.

    `limit_bytes` is for the slabs of all stores of the root, and the largest of those in use counts: how they share it
    is told in `sharing`. A `private` store is nobody else's, and gone when it is closed or its process dies. With
    `slot_bytes` 0 it has no slab.
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

    def stands(self) -> bool:
        """Whether its directory still holds this very store, as it was when it was opened; asked before anything of it
        is opened by path again, and after."""
        state = read_state(self.directory)
        return (
            self.locks.is_at(self.directory / LOCKS)
            and state is not None
            and (state.store_id, state.incarnation) == (self.state.store_id, self.state.incarnation)
        )

    def mark_clean(self, used_bytes: int) -> None:
        """Say that what the last to leave has synced (`used_bytes` of the tables) may be trusted. OSError."""
        if not self.stands() or is_marked(self.directory, Mark.DAMAGED, self.state.incarnation):
            return
        known = checksum(self.directory, self.state.slots, used_bytes)
        if known is not None:
            clean = msgspec.structs.replace(self.state, clean=True, used_bytes=used_bytes, checksum=known)
            write_state(self.directory, clean)

    def mark_damaged(self) -> None:
        """Have the next who opens the store alone not trust its tables."""
        with contextlib.suppress(OSError):  # an error at every opening is the worst that comes of it
            if self.stands():
                set_mark(self.directory, Mark.DAMAGED, self.state.incarnation)

    def is_last(self) -> bool:
        """Whether nobody else has it open; if so this process now has it alone."""
        return self.locks.is_at(self.directory / LOCKS) and self.locks.try_lock(OPEN, exclusive=True)

    def release(self) -> None:
        """Let others discard it; a private store goes at once."""
        if self.state.private and self.is_last():
            with contextlib.suppress(OSError):  # somebody else was quicker
                discard(self.directory)
        self.locks.unlock(OPEN)


def open_store(
    spec: StoreSpec, clock: Clock, deadline_seconds: float, create: bool = True, locked: bool = False
) -> Store:
    """Open the store, making, resizing or discarding it as needed. StoreError or NoRoomError with the remedy.

    `locked`: the caller has the lock of the root, and is to take room from a store that is there. If nobody has that
    open and it cannot be used any more, it goes: nothing else would ever give its room back.
    """
    directory = spec.root / spec.name
    try:
        _prepare(spec.root, create)
        with contextlib.nullcontext() if locked else root_locked(spec.root, deadline_seconds):
            if create and spec.kind == "memory":
                _discard_other_formats(spec.root)
            until = time.monotonic() + deadline_seconds
            store = _open_existing(directory, spec, clock, create or locked, until)
            if store is None and create:
                store = _create(directory, spec, clock)
            if store is not None:
                _write_limit(store, spec.limit_bytes)
    except (OSError, lmdb.Error) as error:
        raise StoreError(
            f"the store at {directory} cannot be opened ({error}): mend that or choose another path"
        ) from error
    if store is None:
        raise StoreError(f"there is no usable store at {directory}")
    return store


def reopen_store(store: Store) -> Store:
    """Open the same store again (after a fork). StoreError if it is gone.

    Between the death of a parent and this nobody may have had it open, and another may have resized or rebuilt it:
    what is mapped would then be files of the past.
    """
    if not store.locks.try_lock(OPEN, exclusive=False) or not store.stands():
        store.locks.close()
        raise StoreError(f"the store at {store.directory} is gone; open it anew")
    return dataclasses.replace(store, sole=False)


def discard_idle(directory: Path, deadline_seconds: float) -> None:
    """Remove a whole store if nobody has it open."""
    with root_locked(directory.parent, deadline_seconds):
        if directory.is_dir() and not in_use(directory):
            discard(directory)


def discard(directory: Path) -> None:
    """Remove a whole store, out of sight first. The caller has it alone."""
    gone = directory.with_name(f"{_GOING}{secrets.token_hex(6)}")
    os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)  # what is left is swept by the next who opens


def stores_in(root: Path) -> list[Path]:
    """Return the stores under a root, damaged ones and those of other versions too, not the private ones of processes.

    Changes nothing. Raises OSError.
    """
    return [store for store in stores(root) if _is_store(store) and _PRIVATE not in store.name]


def remove_store(directory: Path, deadline_seconds: float = 10.0) -> int:
    """Remove a store and what it holds; return the bytes that came back.

    Raises StoreError, and removes nothing, if a process has it open or if it holds what is not a store's.
    """
    with root_locked(directory.parent, deadline_seconds):
        if not _is_store(directory):
            raise StoreError(f"{directory} is no store, or holds other things too: remove it by hand")
        if in_use(directory):
            raise StoreError(
                f"{directory} is open in a process: stop it first, or forget its chunks with `pagoda clear`"
            )
        nbytes = allocated_bytes(directory)
        discard(directory)
        return nbytes


def allocated_bytes(directory: Path) -> int:
    """Return the bytes that the files of a store take. Changes nothing."""
    with contextlib.suppress(FileNotFoundError):  # it may go at any time
        return sum(entry.stat().st_blocks * 512 for entry in directory.iterdir())
    return 0


def _is_store(directory: Path) -> bool:
    entries = list(directory.iterdir())
    names = {entry.name for entry in entries}
    return (
        LOCKS in names and len(names & {STATE, TABLES, COLUMNS}) >= 2 and not any(map(Path.is_dir, entries))
    )


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
def trouble_told(directory: Path) -> Iterator[None]:
    """Around an opening: its directory may be removed meanwhile, or no more files be open. StoreError for OSError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the store at {directory} cannot be opened ({error}): mend that and open it anew"
        ) from error


@contextlib.contextmanager
def root_locked(root: Path, deadline_seconds: float) -> Iterator[None]:
    """Be the one who changes what stores there are and which pages they have. StoreError if it cannot be had.

    What a killed process left is removed first: it holds room that nobody counts.
    """
    until = time.monotonic() + deadline_seconds
    with contextlib.closing(LockFile(root / LOCKS)) as locks:
        if not locks.lock(OPEN, exclusive=True, until=until):
            raise StoreError(
                f"another process has been opening a store under {root} for {deadline_seconds:g} s: is it stopped?"
            )
        _sweep(root)
        yield


def stores(root: Path) -> list[Path]:
    """The stores under a root, damaged ones too; anything else there is not ours to count or touch."""
    return [
        entry
        for entry in _own_directories(root)
        if (entry / LOCKS).exists() and not entry.name.startswith((_MAKING, _GOING))
    ]


def _own_directories(root: Path) -> list[Path]:
    """What under a root may be ours: this user's directories, and no symbolic links."""
    found = []
    for entry in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a private store may go at any time
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(entry)
    return found


def _sweep(root: Path) -> None:
    """Remove what a killed process left: half-made and half-gone directories, private stores of the dead."""
    for entry in _own_directories(root):
        if _PASSING.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        elif (state := read_state(entry)) is not None and state.private:
            with contextlib.suppress(FileNotFoundError):  # its owner discards it without the lock of the root
                if not in_use(entry):
                    discard(entry)


def _discard_other_formats(root: Path) -> None:
    """Remove what other versions left in memory, as far as nobody has it open: this one will never read it."""
    for directory in stores(root):
        state = read_state(directory)
        with contextlib.suppress(FileNotFoundError):
            if state is not None and _is_of_another_version(state) and not in_use(directory):
                log.warning("discarding the store at %s: it is of format %d", directory, state.format)
                discard(directory)


def _is_of_another_version(state: State) -> bool:
    """Whether another version made a store in memory: where it lies, this one never looks for its own."""
    return state.kind == "memory" and state.format != FORMAT


def in_use(directory: Path) -> bool:
    """Whether this or another process has the store open; False if it is gone."""
    try:
        with contextlib.closing(LockFile(directory / LOCKS, create=False)) as locks:
            return locks.held_by_other(OPEN)
    except FileNotFoundError:
        return False


def _open_existing(
    directory: Path, spec: StoreSpec, clock: Clock, may_discard: bool, until: float
) -> Store | None:
    if not directory.is_dir():
        return None
    require_own(directory)
    if directory.is_symlink():
        raise StoreError(f"{directory} is a symbolic link, which a store cannot be: remove it")
    with contextlib.ExitStack() as undo:
        locks = undo.enter_context(contextlib.closing(LockFile(directory / LOCKS)))
        # Shared first: from here on nobody can be the last to leave, and mark as clean what we are about to change.
        if not locks.lock(OPEN, exclusive=False, until=until):
            raise StoreError(f"another process has {directory} to itself and does not end: is it stopped?")
        if not locks.is_at(directory / LOCKS):  # it was removed while we waited
            return None
        if locks.try_lock(OPEN, exclusive=True):
            state = _judge(directory, spec, clock)
            if state is None:
                if may_discard:
                    discard(directory)
                return None
            locks.try_lock(OPEN, exclusive=False)  # a lock of one's own is converted at once
            store = Store(directory, state, locks, sole=True)
        else:
            store = _join(directory, spec, locks)
        undo.pop_all()
        return store


def _join(directory: Path, spec: StoreSpec, locks: LockFile) -> Store:
    """Use the store that others have open, as it is."""
    state = read_state(directory)
    if state is None:
        wrong: str | None = "its state is damaged"
    elif state.format != FORMAT:
        wrong = (
            f"another version of PagodaKV uses it, with tables of format {state.format} instead of {FORMAT}"
        )
    elif (state.kind, state.slot_bytes) != (spec.kind, spec.slot_bytes):
        wrong = f"it holds another kind of chunks: {state.kind}, {state.slot_bytes} bytes a slot"
    else:
        wrong = mismatch(directory, state)
    if state is None or wrong:
        raise StoreError(
            f"the store at {directory} cannot be used ({wrong}) while others have it open: "
            "stop them first or choose another path"
        )
    if state.slots < spec.slots:
        log.warning(
            "%s has at most %d slots as long as other processes have it open, not the %d asked for",
            directory,
            state.slots,
            spec.slots,
        )
    return Store(directory, state, locks, sole=False)


def _judge(directory: Path, spec: StoreSpec, clock: Clock) -> State | None:
    """Bring a store that nobody else has open up to date; None if it must be discarded."""
    state = read_state(directory)
    if state is None or (state.kind, state.slot_bytes) != (spec.kind, spec.slot_bytes):
        log.warning("discarding the store at %s: its state is missing, damaged or another tier's", directory)
        return None
    if state.kind == "file" and state.slab_format != SLAB_FORMAT:
        raise StoreError(
            f"the store at {directory} was written by another version of PagodaKV (chunks of format "
            f"{state.slab_format}, this one reads {SLAB_FORMAT}): use that version, choose another path or remove it"
        )
    boot = clock.boot_id()
    wrong = _distrusted(directory, state, boot)
    if wrong and (state.kind == "memory" or not (directory / SLAB).is_file()):
        log.warning("discarding the store at %s: %s", directory, wrong)
        return None
    if wrong:
        log.warning("rebuilding the ledger at %s from the slab: %s", directory, wrong)
        state = _rebuild(directory, state)
    if state.slots < spec.slots:
        state = _lengthen(directory, state, spec)
    return _renew(directory, state, boot, clock)


def _distrusted(directory: Path, state: State, boot: str) -> str | None:
    """Why the tables of a store that nobody else has open are not to be trusted; None if they are."""
    if state.format != FORMAT:
        return f"it is of format {state.format}, this version writes {FORMAT}"
    if state.boot_id != boot and (state.kind == "memory" or not state.clean):
        return "the machine went down while it was open"
    if is_marked(directory, Mark.DAMAGED, state.incarnation):
        return "its tables were found damaged"
    if is_marked(directory, Mark.OPENING, state.incarnation):
        return "a process ended while it was opening its tables"
    if wrong := mismatch(directory, state):
        return wrong
    if state.clean and checksum(directory, state.slots, state.used_bytes) != state.checksum:
        return "its tables are not what they were when it was closed"
    # Damaged pages end a process by a signal: the next start must not end like this one.
    set_mark(directory, Mark.OPENING, state.incarnation)
    wrong = unsound(directory, state, known=state.clean)
    set_mark(directory, Mark.OPENING, 0)
    return wrong


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
    if renewed != state:
        write_state(directory, renewed)
    return renewed


def _create(directory: Path, spec: StoreSpec, clock: Clock) -> Store:
    state = State(
        format=FORMAT, kind=spec.kind, store_id=secrets.token_hex(16), slots=spec.slots, slot_bytes=spec.slot_bytes,
        map_bytes=map_bytes(spec.slots), incarnation=1, recency_offset=0, boot_id=NEVER_BOOTED, clean=False,
        private=spec.private, inodes={},
    )  # fmt: skip
    first = _first_slots(spec, state)
    making = spec.root / f"{_MAKING}{secrets.token_hex(6)}"
    making.mkdir(mode=0o700)
    try:
        with contextlib.ExitStack() as undo:
            locks = undo.enter_context(contextlib.closing(LockFile(making / LOCKS)))
            locks.try_lock(OPEN, exclusive=False)
            _make_ledger(making, state, scan=state.slots, backed=first)
            if first and spec.slot_bytes:
                allocate(making / SLAB, first * spec.slot_bytes)
            if spec.slot_bytes:
                lengthen(making / SLAB, spec.slots * spec.slot_bytes)
            state = _renew(making, state, clock.boot_id(), clock)
            os.rename(making, directory)
            undo.pop_all()
    except (OSError, lmdb.Error) as error:
        raise NoRoomError(
            f"the store at {directory} cannot be made ({error}): free some room or choose another path"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return Store(directory, state, locks, sole=True)


def _make_ledger(directory: Path, state: State, scan: int, backed: int) -> None:
    """Make tables, columns and counters of a ledger that knows of nothing; slots from `scan` on wait to be scanned.

    Those from `backed` on have no pages.
    """
    for name in (TABLES, COLUMNS, COUNTERS_FILE):
        (directory / name).unlink(missing_ok=True)
    sizes = state.sizes()
    for name in sizes.keys() & {COLUMNS, COUNTERS_FILE, LENT}:
        allocate(directory / name, sizes[name])
    Columns(directory / COLUMNS, state.slots).reset()
    tables = Tables(directory / TABLES, state.map_bytes, create=True)
    try:
        with tables.env.begin(write=True) as txn:
            unused = 0 if scan == state.slots else state.slots
            meta = Meta(state.slots, state.first_generation(), unused=unused, scan=scan, backed=backed)
            txn.put(META_ROW, meta.pack(), db=tables.meta)
    finally:
        tables.close()
    allocate(directory / TABLES, sizes[TABLES])


def _rebuild(directory: Path, state: State) -> State:
    """Put an empty ledger in place of one that is not trusted; its slots are to be scanned."""
    state = msgspec.structs.replace(
        state,
        format=FORMAT,
        map_bytes=map_bytes(state.slots),
        incarnation=state.incarnation + 1,
        boot_id=NEVER_BOOTED,
        clean=False,
    )
    write_state(directory, state)
    lengthen(
        directory / SLAB, state.slots * state.slot_bytes
    )  # shorter if who lengthened the store was killed
    _make_ledger(directory, state, scan=0, backed=state.slots)
    return state


def _lengthen(directory: Path, state: State, spec: StoreSpec) -> State:
    """Give the store as many slots as asked for; the new ones have no pages yet."""
    resized = msgspec.structs.replace(
        state,
        slots=spec.slots,
        map_bytes=max(state.map_bytes, map_bytes(spec.slots)),
        incarnation=state.incarnation + 1,  # who has the old files mapped must not go on
        boot_id=NEVER_BOOTED,
        clean=False,
    )
    # For a moment the old columns stand beside the new.
    need = _ledger_bytes(resized) - _ledger_bytes(state) + state.sizes()[COLUMNS]
    try:
        require_free(spec.root, need, spec.kind == "memory")
    except NoRoomError as error:
        log.warning("%s keeps its %d slots: %s", directory, state.slots, error)
        return state
    write_state(directory, resized)
    old = Columns(directory / COLUMNS, state.slots)
    (directory / COLUMNS).unlink()
    allocate(directory / COLUMNS, resized.sizes()[COLUMNS])
    columns = Columns(directory / COLUMNS, resized.slots)
    columns.reset()
    columns.copy_from(old)
    if spec.slot_bytes:
        lengthen(directory / SLAB, resized.slots * spec.slot_bytes)
    allocate(directory / TABLES, resized.map_bytes)
    resize_tables(directory / TABLES, resized.map_bytes, resized.slots)
    return resized


def _ledger_bytes(state: State) -> int:
    return sum(size for name, size in state.sizes().items() if name != SLAB)


def _first_slots(spec: StoreSpec, state: State) -> int:
    """How many slots a new store has pages for at once. NoRoomError if what nobody else has is not free either."""
    ledger, in_memory = _ledger_bytes(state), spec.kind == "memory"
    if not spec.slot_bytes:
        require_free(spec.root, ledger, in_memory)
        return spec.slots
    every = holdings(spec.root)
    held, slots = sum(holding.nbytes for holding in every), spec.slots
    if spec.limit_bytes is not None:
        limit = max(spec.limit_bytes, root_limit(every) or 0)
        slots = min(slots, max(0, limit - held) // spec.slot_bytes)
    if held and slots < spec.slots:  # what others have is to be shared: see `sharing`
        require_free(spec.root, ledger, in_memory)
        return min(slots, max(0, free_bytes(spec.root, in_memory) - ledger) // spec.slot_bytes)
    require_free(spec.root, ledger + slots * spec.slot_bytes, in_memory)
    return slots


@dataclass(frozen=True)
class Holding:
    """What one store of a root holds of the room that all share. `state` None: of a format that is not known.

    `limit`: what those who have it open were told that all may hold.
    """

    directory: Path
    state: State | None
    nbytes: int
    in_use: bool
    limit: int | None


def holdings(root: Path) -> list[Holding]:
    """What the stores of a root hold: pages of slabs, and all files of a store whose format is not known.

    What another version has in memory is not counted: two versions side by side have a limit each.
    """
    found = []
    for directory in stores(root):
        state = read_state(directory)
        if state is not None and _is_of_another_version(state):
            continue
        with contextlib.suppress(FileNotFoundError):  # a private store may go at any time
            files = directory.iterdir() if state is None else [directory / SLAB] if state.slot_bytes else []
            nbytes = sum(held_bytes(file) for file in files if file.is_file())
            found.append(Holding(directory, state, nbytes, in_use(directory), _read_limit(directory)))
    return found


def held_bytes(file: Path) -> int:
    """The bytes that a file takes; blocks in which a file system keeps where its pages are do not count."""
    status = file.stat()
    return min(status.st_blocks * 512, -(-status.st_size // 4096) * 4096)


def root_limit(every: Sequence[Holding]) -> int | None:
    """How much all stores of a root may hold: the most that one of those in use was told; None if none was."""
    return max((one.limit for one in every if one.in_use and one.limit is not None), default=None)


def _write_limit(store: Store, nbytes: int | None) -> None:
    """Note how much the stores of the root may hold; for others who have this one open it becomes no less.

    None: who opens it only looks at it, or takes from it. What was said at another time does not count then.
    """
    file = store.directory / _LIMIT
    if nbytes is None:
        if store.sole:
            file.unlink(missing_ok=True)
        return
    known = _read_limit(store.directory) or 0
    if known == nbytes or (known > nbytes and not store.sole):
        return
    with contextlib.suppress(OSError):  # a full file system: what was said before holds
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{nbytes}\n")
        fresh.chmod(0o600)
        os.replace(fresh, file)


def _read_limit(directory: Path) -> int | None:
    try:
        return int((directory / _LIMIT).read_text())
    except (OSError, ValueError):
        return None
