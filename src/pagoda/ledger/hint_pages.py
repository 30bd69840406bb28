"""The memory of what a store knows beside its tables: columns, counters, last requests, speeds,
what policies learn.

All processes that have a store open share it. A store in host memory has it in its own directory. A
store on disk has it in memory too, never in a mapped file of its disk: a write to a mapped page
kills the process if the file system has stopped, or copies on write and is full. It is in

    /dev/shm/pagoda-<uid>/.hints/<store id>-<incarnation>-<device and inode of state>/<name>

(a copy of a store has the same id), if that directory is this user's and has space, else in private
memory of the process. Nothing that decides what is served is read from it, so it may be lost,
removed or damaged at any time: `session` compares it with the tables.

`save` writes it into the files of the store's directory by `pwrite`. These are read when the memory
is made again. The last process that closes the store saves, and removes the memory; after a kill it
stays until the store is opened again, or until `sweep` finds that the store is gone.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct

from pagoda.base.errors import NoRoomError, is_gone
from pagoda.base.file_space import (
    allocate,
    opened,
    read_file,
    reserve_in_place,
)
from pagoda.base.store_place import is_in_memory, require_free
from pagoda.ledger.columns import (
    NOT_READY,
    Columns,
    bounded_ghosts,
    columns_bytes,
)
from pagoda.ledger.ghost_pages import GhostPages
from pagoda.ledger.ghost_table import LAST_STAMP
from pagoda.ledger.member_counters import COUNTERS_BYTES
from pagoda.ledger.request_meters import METERS_BYTES
from pagoda.ledger.store_state import (
    COLUMNS,
    COUNTERS_FILE,
    GHOSTS,
    METERS,
    STATE,
    WAITING,
    StoreState,
    read_state,
)

_PUBLISHED = "published"
_WHERE = "store"  # the path of the store, for `sweep`
_MOST_NAME_BYTES = 8192
_PAGE_BYTES = 4096
_PIECE_BYTES = 4 << 20
# the first page of the file of columns on a disk: magic, number of slots, of ghosts, id of the
# store
_HEAD = Struct("<8sQQ16s")
_MAGIC = b"PAGODAHI"
_NEVER = 2**64 - 1


class HintPages:
    """The memory of one store, mapped. Thread-safe; a forked child shares it with its parent, also
    if it is private.
    """

    def __init__(self, directory: Path, state: StoreState) -> None:
        """Prepare for the store in `directory`: makes the directory in memory for a store on disk,
        if it can.
        """
        self._directory = directory
        self._state = state
        self._saved = state.kind == "file"  # whether `save` has anything to do
        self._ghosts = bounded_ghosts(state.slots) if self._saved else None
        self._maps: dict[str, mmap.mmap] = {}
        self._made = _make(directory, state) if self._saved else None
        if self._made is not None:
            self._fill_meters(self._made / METERS)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that a store on disk takes for it; 0 for a store in memory, which
        counts its files.
        """
        return sum(map(len, list(self._maps.values()))) if self._saved else 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes of this machine see it."""
        return not self._saved or self._made is not None

    def columns(self) -> Columns:
        """Map the columns. OSError if a store in memory has none."""
        slots = self._state.slots
        if not self._saved:
            return columns_in_memory(self._directory, self._state)
        memory = self._mapped(
            COLUMNS, columns_bytes(slots, self._ghosts), self._fill_columns
        )
        return Columns(memory, slots, self._ghosts)

    def counters(self) -> mmap.mmap:
        """Map the counters of members."""
        if not self._saved:
            with opened(self._directory / COUNTERS_FILE, os.O_RDWR) as fd:
                return mmap.mmap(fd, COUNTERS_BYTES)
        return self._mapped(COUNTERS_FILE, COUNTERS_BYTES, lambda _: None)

    def published(self) -> Published:
        """Map the record of which transactions the columns have; only for a store on disk."""
        return Published(self._mapped(_PUBLISHED, _PAGE_BYTES, Published.begin))

    def page(self, name: str, nbytes: int) -> Path | mmap.mmap:
        """Map a small file that everything can be read from at once; for a store in memory, return
        its path.
        """
        if not self._saved:
            return self._directory / name

        def fill(memory: mmap.mmap) -> None:
            with contextlib.suppress(OSError):
                content = read_file(self._directory / name, nbytes)
                if len(content) == nbytes:
                    memory[:] = content

        return self._mapped(name, nbytes, fill)

    def meters(self) -> Path | None:
        """Return the file of the meters, which grows as members come; None if no other process sees
        this memory.
        """
        if not self._saved:
            return self._directory / METERS
        return None if self._made is None else self._made / METERS

    def _fill_meters(self, path: Path) -> None:
        """Make the file of the meters of a store on disk from what was saved, if there is none. No
        other process needs it: without space, they begin anew.
        """
        with contextlib.suppress(OSError, NoRoomError):
            if path.exists():
                return
            with opened(self._directory / METERS, os.O_RDONLY) as fd:
                saved = os.pread(fd, METERS_BYTES, 0)
            require_free(path.parent, len(saved), in_memory=True)
            fresh = path.with_name(f".{secrets.token_hex(8)}")
            try:
                with opened(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                    os.pwrite(fd, saved, 0)
                os.link(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)

    def _save_meters(self) -> bool:
        """Write the meters into the directory of the store; return False if that failed."""
        if self._made is None:
            return True
        try:
            content = read_file(self._made / METERS, METERS_BYTES)
            _write(self._directory / METERS, content, b"")
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    # ---- what a store on disk keeps

    def save(self) -> bool:
        """Write it into the files of the store, which the caller has found to be this store's;
        return whether all was written. OSError if the columns were not.

        Readers of these files check what they read, so they may be torn. They are not synced.
        """
        whole = True
        for name, memory in list(self._maps.items()):
            # the tables have the counters of members that left
            if name in (COUNTERS_FILE, _PUBLISHED, WAITING):
                continue
            head = b""
            if name == COLUMNS:
                ghosts = self._ghosts or 0
                store = bytes.fromhex(self._state.store_id)
                head = _HEAD.pack(_MAGIC, self._state.slots, ghosts, store).ljust(
                    _PAGE_BYTES, b"\0"
                )
            try:
                _write(self._directory / name, head, memory)
            except OSError:
                # one small file that cannot be written keeps nothing else from being saved
                if name == COLUMNS:
                    raise
                whole = False
        return self._save_meters() and whole

    def age_seconds(self) -> float:
        """Return how long ago a process saved; infinity if that is not known. OSError."""
        try:
            age = time.time() - os.stat(self._directory / COLUMNS).st_mtime
        except FileNotFoundError:
            return math.inf
        return age if age >= 0 else math.inf

    def remove(self) -> None:
        """Remove the memory: only the caller has the store open, and has saved."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def _fill_columns(self, memory: mmap.mmap) -> None:
        columns = Columns(memory, self._state.slots, self._ghosts)
        columns.reset()
        old = _saved_columns(self._directory, self._state.store_id)
        if old is not None:
            columns.copy_from(old)

    def _mapped(
        self, name: str, nbytes: int, fill: Callable[[mmap.mmap], None]
    ) -> mmap.mmap:
        """Map that memory, shared if possible. Who makes it lets `fill` write its first content,
        zeros before.
        """
        memory = self._maps.get(name)
        if memory is None:
            memory = self._shared(name, nbytes, fill)
            if memory is None:
                memory = mmap.mmap(-1, nbytes)
                fill(memory)
            self._maps[name] = memory
        return memory

    def _shared(
        self, name: str, nbytes: int, fill: Callable[[mmap.mmap], None]
    ) -> mmap.mmap | None:
        if self._made is None:
            return None
        path = self._made / name
        with contextlib.suppress(OSError, NoRoomError):
            if (memory := _map_own(path, nbytes)) is not None:
                return memory
            require_free(self._made, nbytes, in_memory=True)
            fresh = path.with_name(f".{secrets.token_hex(8)}")
            try:
                allocate(fresh, nbytes)
                memory = _map_own(fresh, nbytes)
                if memory is None:
                    return None
                fill(memory)
                # another process was faster
                with contextlib.suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
            return _map_own(path, nbytes)
        return None


class Published:
    """Which transactions of a store on disk have been published in its columns, as three words of
    memory.

    Columns lack a transaction if its process was killed before it published it, or shares another
    memory (another container). `missing` counts these. As long as it is what it was when the
    columns were last compared with the tables, they are complete.

    The words are written inside the gate: two by `add`, held exclusively, the third by whoever
    compared.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        # the number of the last transaction that was published; how many before it were not;
        # `missing` when all slots were last compared
        self._words = memoryview(memory)[:24].cast("Q")

    @staticmethod
    def begin(memory: mmap.mmap) -> None:
        """Write the record of columns that were never compared."""
        memoryview(memory)[:24].cast("Q")[2] = _NEVER

    def forget(self) -> None:
        """Begin anew: the tables may be older than what was published, as after a backup was
        restored.

        Only while no other process has the store open.
        """
        self._words[0] = 0
        self._words[2] = _NEVER

    def add(self, transaction: int) -> None:
        """Record that a transaction was published."""
        words = self._words
        last = words[0]
        if transaction > last:
            words[1] += transaction - last - 1
            words[0] = transaction

    def missing(self, transaction: int) -> int | None:
        """Return how many transactions up to this one were not published; None if all slots were
        compared since.
        """
        words = self._words
        missing = words[1] + max(0, transaction - words[0])
        return None if missing == words[2] else missing

    def compared(self, missing: int) -> None:
        """Record that all slots were compared after `missing` returned this."""
        self._words[2] = missing


def columns_in_memory(
    directory: Path, state: StoreState, ghosts: bool = True
) -> Columns:
    """Map the columns of a store in memory; without `ghosts` that are in a file of their own, if
    nobody asks for them. OSError.
    """
    pages = None
    if state.first_places and ghosts:
        pages = GhostPages(directory / GHOSTS, state.first_places, state.slots)
    inside = state.ghosts_in_columns()
    return Columns(directory / COLUMNS, state.slots, inside, pages)


def newest_stamp(directory: Path, state: StoreState) -> int:
    """Return the highest recency stamp in the columns of a store that no process has open; 0 if
    there is none. OSError.

    For a store on disk it reads what was saved.
    """
    if state.kind == "memory":
        columns: Columns | None = columns_in_memory(
            directory, state, ghosts=False
        )
    else:
        columns = _saved_columns(directory, state.store_id)
    if columns is None:
        return 0
    return int(columns.last_use[columns.last_use < LAST_STAMP].max(initial=0))


def coldest_stamp(directory: Path, state: StoreState) -> int:
    """Return the lowest recency stamp of the chunks of a store; NOT_READY if it has none, or is not
    known. OSError.
    """
    if state.kind == "memory":
        columns: Columns | None = columns_in_memory(
            directory, state, ghosts=False
        )
    else:
        ghosts = bounded_ghosts(state.slots)
        made = _home(directory, state)
        memory = (
            _map_own(made / COLUMNS, columns_bytes(state.slots, ghosts))
            if _is_own(made)
            else None
        )
        columns = (
            _saved_columns(directory, state.store_id)
            if memory is None
            else Columns(memory, state.slots, ghosts)
        )
    return (
        NOT_READY
        if columns is None
        else int(columns.last_use.min(initial=NOT_READY))
    )


def sweep() -> None:
    """Remove the memory of stores that are gone, or have other tables by now: their processes were
    killed.
    """
    with contextlib.suppress(OSError):
        for made in _root().iterdir():
            if not _is_own(made):
                continue
            try:
                store = Path(
                    os.fsdecode(read_file(made / _WHERE, _MOST_NAME_BYTES))
                )
            except OSError:
                continue  # being made
            try:
                state = read_state(store)
                name = "" if state is None else _name(store, state)
            except OSError as error:
                if not is_gone(error):  # its disk does not answer
                    continue
                name = ""
            if made.name != name:
                shutil.rmtree(made, ignore_errors=True)


# ---- the directory in memory


def _root() -> Path:
    return Path(f"/dev/shm/pagoda-{os.getuid()}", ".hints")


def _name(directory: Path, state: StoreState) -> str:
    """Return the name of the memory of a store. OSError. A copy of the store has another: its
    tables differ soon.
    """
    status = os.stat(directory / STATE)
    return f"{state.store_id}-{state.incarnation}-{status.st_dev:x}-{status.st_ino:x}"


def _home(directory: Path, state: StoreState) -> Path:
    return _root() / _name(directory, state)


def _make(directory: Path, state: StoreState) -> Path | None:
    """Make the directory in memory for a store; None if this user cannot have one."""
    sweep()
    with contextlib.suppress(OSError):
        root = _root()
        made = _home(directory, state)
        if not is_in_memory(root.parent.parent):
            return None
        for path in (root.parent, root, made):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if not _is_own(path):
                return None
        where = made / _WHERE
        if not where.exists():
            where.write_bytes(os.fsencode(directory.absolute()))
        return made
    return None


def _is_own(directory: Path) -> bool:
    """Whether this is a directory that only this user can change: in /dev/shm another may have made
    it first.
    """
    with contextlib.suppress(OSError):
        status = directory.lstat()
        return (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o022
        )
    return False


def _map_own(path: Path, nbytes: int) -> mmap.mmap | None:
    """Map a file of this user that has that size; None if there is none. One that is not is
    removed. Raises OSError.
    """
    try:
        with opened(path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            status = os.fstat(fd)
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if own and not status.st_mode & 0o077 and status.st_size == nbytes:
                allocate_all(fd, nbytes)
                return mmap.mmap(fd, nbytes)
    except FileNotFoundError:
        return None
    except OSError:  # a link, a directory, not ours to read
        pass
    _remove(path)
    return None


def allocate_all(fd: int, nbytes: int) -> None:
    """Reserve the pages of a file that another process may have made with holes. OSError."""
    is_whole = os.fstat(fd).st_blocks * 512 >= nbytes
    # others may be writing to it
    if not is_whole and not reserve_in_place(fd, 0, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---- the files on the disk


def _write(path: Path, head: bytes, memory: mmap.mmap | bytes) -> None:
    """Write a file in place. OSError."""
    nbytes = len(head) + len(memory)
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, nbytes)
        if head:
            os.pwrite(fd, head, 0)
        content = memoryview(memory)
        for at in range(0, len(content), _PIECE_BYTES):
            os.pwrite(fd, content[at : at + _PIECE_BYTES], len(head) + at)


def _saved_columns(directory: Path, store_id: str) -> Columns | None:
    """Read the columns that were saved in the directory of a store; None if there are none of this
    store.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        opened(directory / COLUMNS, os.O_RDONLY) as fd,
    ):
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        magic, slots, ghosts, store = _HEAD.unpack(head)
        if magic != _MAGIC or store.hex() != store_id:
            return None
        nbytes = columns_bytes(slots, ghosts)
        if ghosts % 8 or os.fstat(fd).st_size != _PAGE_BYTES + nbytes:
            return None
        memory = mmap.mmap(-1, nbytes)
        for at, piece in _pieces(memory):
            if os.preadv(fd, [piece], _PAGE_BYTES + at) < len(piece):
                return None
        columns = Columns(memory, slots, ghosts)
        columns.sane()
        return columns
    return None


def _pieces(memory: mmap.mmap) -> Iterator[tuple[int, memoryview]]:
    content = memoryview(memory)
    for at in range(0, len(content), _PIECE_BYTES):
        yield at, content[at : at + _PIECE_BYTES]
