"""Open, create, resize, rebuild and discard the directory of a ledger and its slab.

`<root>/<name>/` is one store. All of this happens under the lock of the root, so that one process
at a time changes which stores there are. A process that *uses* a store shares byte OPEN of the
store's locks, and only a process that has this byte exclusively may judge, resize or discard the
store. A directory is made under another name and renamed into place when it is complete. `Ledger`
and `session` call it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from pagoda.base.clock import Clock
from pagoda.base.errors import NoRoomError, StoreError, is_gone, remedy_of_limit
from pagoda.base.file_space import (
    allocate,
    lengthen,
    make_directory,
    occupy_standard_streams,
    size_in_words,
    write_in_place,
)
from pagoda.base.log import guarded_logger
from pagoda.base.store_place import (
    free_bytes,
    other_place,
    require_free,
    require_local,
    require_locks,
    require_own,
    require_umask,
)
from pagoda.ledger import ghost_pages
from pagoda.ledger.clear_log import NEVER_CLEARED, ClearLog
from pagoda.ledger.columns import LONGEST_LEASE_NS, columns_bytes
from pagoda.ledger.hint_pages import columns_in_memory, newest_stamp
from pagoda.ledger.lmdb_tables import (
    BYTES_PER_SLOT,
    META_ROW,
    NO_MEMBER,
    SLOT_KEY,
    Meta,
    Reservation,
    Tables,
    map_bytes,
)
from pagoda.ledger.locks import OPEN, LockFile, StoreLocks
from pagoda.ledger.root_usage import (
    held_bytes,
    holdings,
    is_of_another_version,
    root_limit,
    write_limit,
)
from pagoda.ledger.store_state import (
    COLUMNS,
    COUNTERS_FILE,
    FIRST_OFFSET,
    FORMAT,
    GHOSTS,
    GUARDS_NOTHING,
    LOCKS,
    METERS,
    NEVER_BOOTED,
    PAGE_GUARDS,
    SLAB,
    SLAB_FORMAT,
    STATE,
    TABLES,
    Kind,
    StoreState,
    TableMark,
    Vouched,
    inodes,
    is_marked,
    kept_marked,
    mismatch,
    read_state,
    set_mark,
    set_voucher,
    write_state,
)
from pagoda.ledger.stores_under_root import (
    MAKING,
    discard,
    in_use,
    root_locked,
    stores,
)
from pagoda.ledger.table_integrity import checksum, find_damage
from pagoda.ledger.transaction import Transaction

log = guarded_logger("pagoda.ledger.store_directory")

# Columns and ghosts that take at most this part of what a store begins with are allocated at once:
# then older versions know all its files.
_COLUMNS_SHARE = 4
_FEWEST_PLACES = 1024  # of a table of ghosts that grows: 221 KiB
# what the other files of a store take, which grow a little
_SMALL_FILES_BYTES = 1 << 20
# members notice within a second that a file was replaced, and leave
_LEAVING_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.05


@dataclass(frozen=True)
class StoreSpec:
    """Which store: `slots` slots of `slot_bytes` (stride in the slab file, headers included) in
    `<root>/<name>/`.

    `chunk_bytes` is the size of a payload, for processes that know no layout (0: unknown).
    `limit_bytes` limits the slabs of all stores of the root together; the largest limit of the
    stores in use counts (see `space_sharing`). With `first_bytes` a store grows as it fills: a new
    one takes at most that many bytes at once, tables included. A `private` store belongs to one
    process, and is removed when it is closed or the process dies. With `slot_bytes` 0 it has no
    slab.
    """

    root: Path
    name: str
    kind: Kind
    slots: int
    slot_bytes: int
    limit_bytes: int | None = None
    private: bool = False
    chunk_bytes: int = 0
    first_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(
                f"a store needs at least one slot, not {self.slots}: ask for a larger size"
            )
        if self.slot_bytes < 0 or self.slot_bytes % 4096:
            raise ValueError(
                f"slot_bytes must be a multiple of 4096, not {self.slot_bytes}"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"{self.name!r} cannot name a store")


@dataclass(frozen=True)
class OpenStore:
    """A store that this process has open (it shares byte OPEN). `sole`: no other process had it
    open at that moment. `made`: it did not exist before.
    """

    directory: Path
    state: StoreState
    locks: StoreLocks
    sole: bool
    made: bool = False

    def is_current(self) -> bool:
        """Whether the directory still has this very store, as it was opened. OSError if that cannot
        be told.

        Checked before and after a file of the store is opened by path.
        """
        state = read_state(self.directory)
        return (
            self.locks.are_at(self.directory)
            and state is not None
            and (state.store_id, state.incarnation)
            == (self.state.store_id, self.state.incarnation)
            and mismatch(self.directory, self.state) is None
        )

    def replaced(self) -> str | None:
        """Return which file of the store is no longer the one that was opened; None if all are.
        OSError.

        Reads no file.
        """
        if not self.locks.are_at(self.directory):
            return f"{STATE} or {LOCKS} is gone or not the file it was"
        return mismatch(self.directory, self.state)

    def mark_clean(self, used_bytes: int) -> None:
        """Record that what this last process synced (`used_bytes` of the tables) can be trusted.
        Raises OSError.
        """
        if not self.is_current() or is_marked(
            self.directory, TableMark.DAMAGED, self.state.incarnation
        ):
            return
        known = checksum(self.directory, used_bytes)
        # checked again: a child that a signal handler forked meanwhile must not mark the store
        if known is not None and self.is_last():
            clean = msgspec.structs.replace(
                self.state, clean=True, used_bytes=used_bytes, checksum=known
            )
            write_state(self.directory, clean)

    def mark_damaged(self) -> None:
        """Make the next process that opens the store alone distrust its tables."""
        with contextlib.suppress(OSError):  # at worst every opening fails
            if self.is_current():
                set_mark(
                    self.directory, TableMark.DAMAGED, self.state.incarnation
                )

    def is_last(self) -> bool:
        """Whether no other process has it open; if so, this process now holds it exclusively.
        OSError.
        """
        return self.locks.are_at(self.directory) and self.locks.lock(
            OPEN, exclusive=True
        )

    def release(self) -> None:
        """Let other processes discard it; a private store is removed at once."""
        # another process has removed it already
        with contextlib.suppress(OSError):
            if self.state.private and self.is_last():
                discard(self.directory)
        self.locks.unlock(OPEN)


def open_store(
    spec: StoreSpec,
    clock: Clock,
    deadline_seconds: float,
    create: bool = True,
    locked: bool = False,
) -> OpenStore:
    """Open the store, making, resizing or discarding it as needed. StoreError or NoRoomError with
    the remedy.

    `locked`: the caller has the lock of the root, and takes space from an existing store. If no
    process has that store open and it is unusable, it is removed: nothing else would ever free its
    space.
    """
    directory = spec.root / spec.name
    try:
        _prepare(spec.root, create)
        with (
            contextlib.nullcontext()
            if locked
            else root_locked(spec.root, deadline_seconds)
        ):
            if create and spec.kind == "memory":
                _discard_other_formats(spec.root)
            until = time.monotonic() + deadline_seconds
            store = _open_existing(
                directory, spec, clock, create or locked, until
            )
            if store is None and create:
                store = _create(directory, spec, clock)
            if store is not None:
                write_limit(directory, spec.limit_bytes, store.sole)
    except (OSError, lmdb.Error) as error:
        raise StoreError(
            f"the store at {directory} cannot be opened ({error}): "
            f"{remedy_of_limit(error, 'repair that or choose another path')}"
        ) from error
    if store is None:
        raise unusable(directory, "a part of it is missing or damaged")
    return store


def unusable(directory: Path, why: str) -> StoreError:
    """Return the error for an existing store that cannot be used as it is."""
    return StoreError(
        f"there is no usable store at {directory}: {why}; an engine that opens it repairs or "
        "replaces it, `pagoda "
        "remove` frees its space"
    )


def reopen_store(store: OpenStore) -> OpenStore:
    """Open the same store again (after a fork). StoreError if it is gone.

    After the death of the parent there may have been a time when no process had it open, and
    another process may have resized or rebuilt it. The files that this process has mapped would
    then be outdated.
    """
    is_current = store.locks.lock(OPEN, exclusive=False)
    with contextlib.suppress(
        OSError
    ):  # it cannot be told now; it is asked again whenever the tables are opened
        is_current = is_current and store.is_current()
    if not is_current:
        store.locks.close()
        raise StoreError(f"the store at {store.directory} is gone: open it again")
    return dataclasses.replace(store, sole=False)


def _prepare(root: Path, create: bool) -> None:
    occupy_standard_streams()
    if create:
        require_umask()
        try:
            make_directory(root)
        except OSError as error:
            raise StoreError(
                f"{root} cannot be made ({error.strerror}): {other_place(root)}"
            ) from error
    if not root.is_dir():
        raise StoreError(f"there is no directory {root}")
    require_own(root)
    require_local(root)
    require_locks(root)


@contextlib.contextmanager
def os_errors_mapped(directory: Path) -> Iterator[None]:
    """Raise StoreError for OSError while a store is opened: a removed directory, or too many open
    files.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the store at {directory} cannot be opened ({error}): "
            f"{remedy_of_limit(error, 'repair that and open it again')}"
        ) from error


def _discard_other_formats(root: Path) -> None:
    """Remove stores of other versions in memory that no process has open: this version will never
    read them.
    """
    for directory in stores(root):
        # it was removed meanwhile, or it cannot be told what it is
        with contextlib.suppress(OSError):
            state = read_state(directory)
            if (
                state is not None
                and is_of_another_version(state)
                and not in_use(directory)
            ):
                log.warning(
                    "discarding the store at %s: it is of format %d",
                    directory,
                    state.format,
                )
                discard(directory)


def _open_existing(
    directory: Path,
    spec: StoreSpec,
    clock: Clock,
    may_discard: bool,
    until: float,
) -> OpenStore | None:
    if not directory.is_dir():
        return None
    require_own(directory)
    if directory.is_symlink():
        raise StoreError(
            f"{directory} is a symbolic link, which a store cannot be: remove it"
        )
    with contextlib.ExitStack() as undo:
        try:
            locks = undo.enter_context(
                closing(StoreLocks(directory, STATE, LOCKS))
            )
        except OSError as error:
            # gone, or replaced by what can have no locks: a directory, a pipe
            if not is_gone(error):
                raise
            _discard_without_state(directory, may_discard, until)
            return None
        # Take the shared lock first: so no other process can be the last to leave, and mark the
        # store as clean, while this one changes it.
        if not locks.lock(OPEN, exclusive=False, until=until):
            raise StoreError(
                f"timed out: another process holds {directory} exclusively; look for a stopped "
                "process"
            )
        if not locks.are_at(directory):  # the store was removed during the wait
            return None
        leaving = min(until, time.monotonic() + _LEAVING_SECONDS)
        while not locks.lock(OPEN, exclusive=True):
            store = _join(
                directory, spec, locks, may_wait=time.monotonic() < leaving
            )
            if store is not None:
                undo.pop_all()
                return store
            time.sleep(_LOOK_AGAIN_SECONDS)
        if not locks.are_at(directory):
            # those that left were told to by another process, which replaced the store
            return None
        state = _judge(directory, spec, clock, locks)
        if state is None:
            if may_discard:
                _require_alone(directory, locks)
                discard(directory)
            return None
        # converting a lock that this process holds succeeds at once
        locks.lock(OPEN, exclusive=False)
        store = OpenStore(directory, state, locks, sole=True)
        undo.pop_all()
        return store


def _discard_without_state(
    directory: Path, may_discard: bool, until: float
) -> None:
    """Discard what is left of a store whose `state` is gone: nothing says any more what its files
    are.

    Processes that have it open notice that within a second, and leave. StoreError if they do not.
    """
    with closing(LockFile(directory / LOCKS)) as locks:
        if not locks.lock(
            OPEN,
            exclusive=True,
            until=min(until, time.monotonic() + _LEAVING_SECONDS),
        ):
            raise StoreError(
                f"{directory} has no {STATE} any more, and processes still have it open: stop "
                "them first or choose "
                "another path"
            )
        if may_discard:
            log.warning(
                "discarding the store at %s: its state is missing", directory
            )
            discard(directory)


def _join(
    directory: Path, spec: StoreSpec, locks: StoreLocks, may_wait: bool
) -> OpenStore | None:
    """Use the store that other processes have open, as it is. StoreError if that is impossible.

    None, if it `may_wait`: a file was removed or replaced, which those processes notice within a
    second, and leave.
    """
    state = read_state(directory)
    if state is None:
        wrong: str | None = "its state is damaged"
    elif state.format != FORMAT:
        wrong = (
            f"another version of PagodaKV uses it, with tables of format {state.format} "
            f"instead of {FORMAT}"
        )
        may_wait = False
    elif (state.kind, state.slot_bytes) != (spec.kind, spec.slot_bytes):
        wrong = f"it holds another kind of chunks: {state.kind}, {state.slot_bytes} bytes per slot"
        may_wait = False
    elif not locks.held_by_other(OPEN):  # they hold only the file `locks`
        wrong = f"its {STATE} is not the file it was"
    else:
        wrong = mismatch(directory, state)
    if wrong and may_wait:
        return None
    if state is None or wrong:
        raise StoreError(
            f"the store at {directory} cannot be used ({wrong}) while other processes have it "
            "open: "
            "stop them first or choose another path"
        )
    _make_again(directory, state, COUNTERS_FILE)
    _make_ghosts_again(directory, state)
    warn_of_slots(directory, state.slots, spec)
    return OpenStore(directory, state, locks, sole=False)


def _make_again(directory: Path, state: StoreState, name: str) -> None:
    """Make a file of zeros again if it is gone or has another size. NoRoomError."""
    nbytes = state.sizes().get(name)
    if nbytes is not None and not _has_size(directory / name, nbytes):
        (directory / name).unlink(missing_ok=True)
        allocate(directory / name, nbytes)


def _make_ghosts_again(directory: Path, state: StoreState) -> None:
    """Make the file of ghosts anew if it is gone or has another size. NoRoomError."""
    first = state.first_places
    if not first:
        return
    most = ghost_pages.most_places(first, state.slots)
    if not _has_size(directory / GHOSTS, ghost_pages.ghost_bytes(most)):
        places = 0
        with contextlib.suppress(FileNotFoundError):  # a store that is being made
            held = held_bytes(directory / SLAB, state.slot_bytes)
            places = held // state.slot_bytes
        ghost_pages.make(directory / GHOSTS, first, state.slots, places)


def _has_size(file: Path, nbytes: int) -> bool:
    try:
        return file.stat().st_size == nbytes
    except FileNotFoundError:
        return False


def warn_of_slots(directory: Path, slots: int, spec: StoreSpec) -> None:
    """Log a warning if a store that is already open has fewer slots than the caller asks for."""
    if slots < spec.slots:
        text = "%s has at most %s as long as others have it open, not the %s asked for"
        has, asked = f"{slots} slots", f"{spec.slots}"
        if spec.slot_bytes:
            has += f" ({size_in_words(slots * spec.slot_bytes)})"
            asked += f" ({size_in_words(spec.slots * spec.slot_bytes)})"
        log.warning(text, directory, has, asked)


def _require_alone(directory: Path, locks: StoreLocks) -> None:
    """Raise StoreError in a child that a signal handler forked since the store was taken: the child
    has no lock.
    """
    if not locks.lock(OPEN, exclusive=True):
        raise StoreError(
            f"the parent of this process is opening the store at {directory}: open it again"
        )


def _judge(
    directory: Path, spec: StoreSpec, clock: Clock, locks: StoreLocks
) -> StoreState | None:
    """Bring a store that no other process has open up to date; None if it must be discarded."""
    state = read_state(directory)
    if state is None or (state.kind, state.slot_bytes) != (
        spec.kind,
        spec.slot_bytes,
    ):
        log.warning(
            "discarding the store at %s: its state is missing, damaged or another tier's",
            directory,
        )
        return None
    if state.kind == "file" and state.slab_format != SLAB_FORMAT:
        raise StoreError(
            f"the store at {directory} was written by another version of PagodaKV (chunks of "
            "format "
            f"{state.slab_format}, this one reads {SLAB_FORMAT}): use that version, choose "
            "another path or remove it"
        )
    boot = clock.boot_id()
    wrong = _distrusted(directory, state, boot, locks)
    _require_alone(directory, locks)
    if wrong and (state.kind == "memory" or not (directory / SLAB).is_file()):
        log.warning("discarding the store at %s: %s", directory, wrong)
        return None
    if wrong:
        log.warning(
            "rebuilding the ledger at %s from the slab: %s", directory, wrong
        )
        state = _rebuild(directory, state)
    if state.slots < spec.slots:
        state = _lengthen(directory, state, spec)
    return _renew(directory, state, spec, boot, clock)


def _distrusted(
    directory: Path, state: StoreState, boot: str, locks: StoreLocks
) -> str | None:
    """Return why the tables of a store that no other process has open cannot be trusted; None if
    they can.

    OSError if that cannot be told: nothing is lost because a file could not be read.
    """
    if state.format != FORMAT:
        return f"it is of format {state.format}, this version writes {FORMAT}"
    if state.boot_id != boot and (state.kind == "memory" or not state.clean):
        return "the machine went down while it was open"
    if is_marked(directory, TableMark.DAMAGED, state.incarnation):
        return "its tables were found damaged"
    if is_marked(directory, TableMark.OPENING, state.incarnation):
        return "a process ended while it was opening its tables"
    for name in GUARDS_NOTHING:
        _make_again(directory, state, name)
    _make_ghosts_again(directory, state)
    if wrong := mismatch(directory, state, apart=GUARDS_NOTHING):
        return wrong
    if state.clean and checksum(directory, state.used_bytes) != state.checksum:
        return "its tables are not what they were when it was closed"
    _require_alone(directory, locks)
    # Damaged pages may kill this process by a signal; with the mark, the next process rebuilds
    # them.
    with kept_marked(directory, TableMark.OPENING, state.incarnation):
        return find_damage(directory, state, known=state.clean)


def _renew(
    directory: Path, state: StoreState, spec: StoreSpec, boot: str, clock: Clock
) -> StoreState:
    """Take a store into use: from now on its ledger is only trusted in this boot, or after a clean
    close.
    """
    now = clock.monotonic_ns()
    offset = state.recency_offset
    if state.boot_id != boot:
        offset = FIRST_OFFSET + 1 - now
    if state.kind == "memory":
        _end_leases_ahead(directory, state, now)
    # what is used from now on is more recent than all that was
    offset = max(offset, newest_stamp(directory, state) + 1 - now)
    renewed = msgspec.structs.replace(
        state,
        boot_id=boot,
        clean=False,
        recency_offset=offset,
        inodes=inodes(directory, state),
        chunk_bytes=spec.chunk_bytes or state.chunk_bytes,
    )
    if renewed != state:
        write_state(directory, renewed)
    return renewed


def _end_leases_ahead(directory: Path, state: StoreState, now: int) -> None:
    """End the leases that no call can have taken: of a damaged page, or of a machine that was
    restored.
    """
    columns = columns_in_memory(directory, state, ghosts=False)
    ahead = columns.lease_until > now + LONGEST_LEASE_NS
    columns.lease_until[ahead] = 0


def _create(directory: Path, spec: StoreSpec, clock: Clock) -> OpenStore:
    state = StoreState(
        format=FORMAT,
        kind=spec.kind,
        store_id=secrets.token_hex(16),
        slots=spec.slots,
        slot_bytes=spec.slot_bytes,
        map_bytes=map_bytes(spec.slots),
        incarnation=1,
        recency_offset=0,
        boot_id=NEVER_BOOTED,
        clean=False,
        private=spec.private,
        inodes={},
        first_places=_first_places(spec),
    )
    first = _first_slots(spec, state)
    maker = os.getpid()
    making = spec.root / f"{MAKING}{secrets.token_hex(6)}"
    making.mkdir(mode=0o700)
    try:
        with contextlib.ExitStack() as undo:
            write_state(making, state)
            if spec.kind == "file":
                set_voucher(making, Vouched.CLEARS, NEVER_CLEARED)
            locks = undo.enter_context(closing(StoreLocks(making, STATE, LOCKS)))
            locks.lock(OPEN, exclusive=False)
            grows = spec.first_bytes is not None
            _make_ledger(making, state, state.slots, first, grows)
            if first and spec.slot_bytes:
                allocate(making / SLAB, first * spec.slot_bytes)
            if spec.slot_bytes:
                lengthen(making / SLAB, spec.slots * spec.slot_bytes)
            state = _renew(making, state, spec, clock.boot_id(), clock)
            os.rename(making, directory)
            undo.pop_all()
    except (OSError, lmdb.Error) as error:
        raise NoRoomError(
            f"the store at {directory} cannot be made ({error}): "
            f"{remedy_of_limit(error, 'free some room or choose another path')}"
        ) from error
    finally:
        if os.getpid() == maker:  # not in a child that a signal handler forked
            shutil.rmtree(making, ignore_errors=True)
    return OpenStore(directory, state, locks, sole=True, made=True)


def _make_ledger(
    directory: Path,
    state: StoreState,
    scan: int,
    backed: int,
    grows: bool = False,
) -> None:
    """Make tables, columns and counters of an empty ledger; slots from `scan` on wait to be
    scanned.

    Those from `backed` on have no pages; if the store `grows`, their part of the tables is a hole,
    which is allocated before they are. LMDB writes without its mapping, so that a hole costs no
    signal.
    """
    write_in_place(directory)
    # the meters begin anew with the counters, whose parts they are
    for name in (TABLES, COLUMNS, COUNTERS_FILE, METERS, GHOSTS):
        (directory / name).unlink(missing_ok=True)
    sizes = state.sizes()
    for name in sizes.keys() & {COLUMNS, COUNTERS_FILE, PAGE_GUARDS}:
        allocate(directory / name, sizes[name])
    _make_ghosts_again(directory, state)
    if COLUMNS in sizes:
        columns_in_memory(directory, state, ghosts=False).reset()
    unused = 0 if scan == state.slots else state.slots
    meta = Meta(
        state.slots,
        state.first_generation(),
        unused=unused,
        scan=scan,
        backed=backed,
    )
    path = directory / TABLES
    size = state.map_bytes
    with (
        Tables.opening,
        closing(Tables(path, size, create=True)) as tables,
        tables.env.begin(write=True) as txn,
    ):
        txn.put(META_ROW, meta.pack(), db=tables.meta)
    allocate(directory / TABLES, map_bytes(backed) if grows else sizes[TABLES])
    lengthen(directory / TABLES, sizes[TABLES])


def _rebuild(directory: Path, state: StoreState) -> StoreState:
    """Replace a ledger that cannot be trusted by an empty one; all its slots wait to be scanned."""
    cleared = ClearLog(directory)
    if state.format != FORMAT and cleared.was_never_used():
        # an older version was here meanwhile: it may have cleared something, which only its log
        # says
        set_voucher(directory, Vouched.CLEARS, NEVER_CLEARED._replace(first=1))
    state = msgspec.structs.replace(
        state,
        format=FORMAT,
        map_bytes=map_bytes(state.slots),
        # `state` may be an older copy
        incarnation=max(state.incarnation, cleared.last_incarnation()) + 1,
        boot_id=NEVER_BOOTED,
        clean=False,
    )
    write_state(directory, state)
    # shorter if a process was killed while it lengthened the store
    lengthen(directory / SLAB, state.slots * state.slot_bytes)
    _make_ledger(directory, state, scan=0, backed=state.slots)
    return state


def _lengthen(directory: Path, state: StoreState, spec: StoreSpec) -> StoreState:
    """Give the store as many slots as asked for; the new ones have no pages yet."""
    resized = msgspec.structs.replace(
        state,
        slots=spec.slots,
        map_bytes=max(state.map_bytes, map_bytes(spec.slots)),
        # so that a process that has the old files mapped does not continue
        incarnation=state.incarnation + 1,
        boot_id=NEVER_BOOTED,
        clean=False,
        first_places=_first_places(spec),
    )
    old = None
    places = 0
    if state.kind == "memory":
        old = columns_in_memory(directory, state)
        places = old.table.places
    # For a moment both the old and the new columns exist, with their ghosts.
    grows = spec.first_bytes is not None
    need = resized.sizes().get(COLUMNS, 0) + _ghost_bytes(resized, places)
    if not grows:
        need += resized.map_bytes - state.map_bytes
    try:
        require_free(spec.root, need, spec.kind == "memory")
    except NoRoomError as error:
        log.warning("%s keeps its %d slots: %s", directory, state.slots, error)
        return state
    write_state(directory, resized)
    if old is not None:
        for name in (COLUMNS, GHOSTS):
            (directory / name).unlink(missing_ok=True)
        allocate(directory / COLUMNS, resized.sizes()[COLUMNS])
        if first := resized.first_places:
            ghost_pages.make(directory / GHOSTS, first, resized.slots, places)
        columns = columns_in_memory(directory, resized)
        columns.reset()
        columns.copy_from(old)
    if spec.slot_bytes:
        lengthen(directory / SLAB, resized.slots * spec.slot_bytes)
    if grows:
        lengthen(directory / TABLES, resized.map_bytes)
    else:
        allocate(directory / TABLES, resized.map_bytes)
    _resize_tables(directory / TABLES, resized.map_bytes, resized.slots)
    return resized


def _resize_tables(path: Path, map_bytes: int, slots: int) -> None:
    """Add slots without pages; all reservations are removed, since no living member could write
    them.
    """
    with (
        Tables.opening,
        closing(Tables(path, map_bytes)) as tables,
        tables.env.begin(write=True) as txn,
    ):
        transaction = Transaction(txn, tables, NO_MEMBER, lambda _: False, 0)
        for row, value in list(tables.rows(txn, tables.reserved)):
            slot = SLOT_KEY.unpack(row)[0]
            transaction.unreserve(slot, Reservation.unpack(value))
            transaction.free_slot(slot)
        if not transaction.meta.unscanned():
            transaction.meta.scan = slots
        transaction.meta.slots = slots
        transaction.save()


def _first_places(spec: StoreSpec) -> int:
    """Return with how many places for ghosts a store that grows begins; 0: they are in the columns,
    as in a store of a size that was asked for, or one whose columns are small.
    """
    if spec.first_bytes is None or not spec.slot_bytes:
        return 0
    if columns_bytes(spec.slots) <= spec.first_bytes // _COLUMNS_SHARE:
        return 0
    least = max(_FEWEST_PLACES, spec.first_bytes // spec.slot_bytes)
    return ghost_pages.first_places(spec.slots, least)


def _ghost_bytes(state: StoreState, places: int) -> int:
    """Return the bytes of the file of ghosts with that many places, or those that it begins
    with.
    """
    first = state.first_places
    if not first:
        return 0
    most = ghost_pages.most_places(first, state.slots)
    return ghost_pages.ghost_bytes(ghost_pages.doubled(first, most, places))


def _ledger_bytes(state: StoreState, tables_bytes: int) -> int:
    """Return the bytes of all files but the slab, with that many for the tables."""
    others = sum(
        size for name, size in state.sizes().items() if name not in (SLAB, TABLES)
    )
    return others + _ghost_bytes(state, 0) + tables_bytes


def _first_slots(spec: StoreSpec, state: StoreState) -> int:
    """Return how many slots of a new store get pages immediately. NoRoomError if there is too
    little free space.
    """
    ledger = _ledger_bytes(state, state.map_bytes)
    in_memory = spec.kind == "memory"
    if not spec.slot_bytes:
        require_free(spec.root, ledger, in_memory)
        return spec.slots
    every = holdings(spec.root)
    held = sum(holding.nbytes for holding in every)
    slots = spec.slots
    if spec.limit_bytes is not None:
        limit = max(spec.limit_bytes, root_limit(every) or 0)
        slots = min(slots, max(0, limit - held) // spec.slot_bytes)
    if spec.first_bytes is not None:
        fixed = _ledger_bytes(state, map_bytes(0)) + _SMALL_FILES_BYTES
        first = max(0, spec.first_bytes - fixed)
        slots = min(slots, first // (spec.slot_bytes + BYTES_PER_SLOT))
        ledger = _ledger_bytes(state, map_bytes(slots))
    # what other stores hold will be shared: see `space_sharing`
    if held and slots < spec.slots:
        require_free(spec.root, ledger, in_memory)
        left = free_bytes(spec.root, in_memory) - ledger - _SMALL_FILES_BYTES
        return min(slots, max(0, left) // spec.slot_bytes)
    slab = slots * spec.slot_bytes
    require_free(spec.root, ledger + slab, in_memory, slab)
    return slots
