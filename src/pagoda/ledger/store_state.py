"""The files of a store, and its small file `state`: what the store is, and whether its tables can
be trusted.

`state` has three pages, made once and then written in place, never replaced: so it can be written
on a full disk, and the locks of the store lie on it (see `locks`).

| page | content |
| --- | --- |
| 0, 1 | records; the sound one with the higher number is valid; a new record overwrites the other page |
| 2 | marks, one word each: the incarnation of the tables that the mark applies to; at 512 and 1024 the vouchers |

A *voucher* says what another file must still contain: the record of epochs of the root (see
`epoch_record`) and the log of clears (see `clear_log`). If that file is gone, or older than its
voucher says, a promise was lost. No voucher means that only older versions had the store so far:
they rewrite the pages 0 and 1 and know no vouchers.
"""  # noqa: E501, W505

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Literal, NamedTuple

import msgspec
import xxhash

from pagoda.base.errors import is_gone
from pagoda.base.file_space import open_regular, opened, reserve
from pagoda.base.synced_files import sync_directory
from pagoda.ledger.columns import columns_bytes
from pagoda.ledger.member_counters import COUNTERS_BYTES, MEMBER_ROWS

# The format of tables, columns, counters and marks: raise it with any change of them. A store on
# disk of another format is rebuilt from the headers of its slab once no process has it open; one in
# memory has another directory (`HostTier.open`).
FORMAT = 5
# The format of the slots of a file and their headers: a store of another format is left alone.
SLAB_FORMAT = 1
STATE = "state"
LOCKS = "locks"
TABLES = "data.mdb"
COLUMNS = "columns"
COUNTERS_FILE = "counters"
SLAB = "slab"
NAMESPACES = "namespaces"
PAGE_GUARDS = "lent"
GUARD_WORDS = 64  # words per member, see `slots_in_use`
GUARD_BYTES = MEMBER_ROWS * GUARD_WORDS * 8
# the log of prompts: see `cache/prompt_log`
PROMPTS = "prompts"
OLD_PROMPTS = "prompts-old"
# notes of chunks, for routers: see `chunk_notes`; not part of FORMAT
NOTES = "notes"
# the last requests: see `request_ring`; not part of FORMAT, so that every version opens the store
REQUESTS = "requests"
WAITING = "waiting"  # who waits for the gate: see `gate_bell`; not part of FORMAT
SPEEDS = "speeds"  # see `cache/load_cost`; not part of FORMAT
# ghosts of a store that grows, if they are many: see `ghost_pages`; not part of FORMAT, because
# older versions find the columns too short
GHOSTS = "ghosts"
METERS = "meters"  # requests by model and tenant: see `request_meters`; not part of FORMAT
# What these say is of no use to a process that opens the store alone: numbers for people, and slots
# in use by others.
GUARDS_NOTHING = (COUNTERS_FILE, PAGE_GUARDS)
# recency stamps of a new store begin here, above the stamps that a rebuild gives
FIRST_OFFSET = 1 << 60
# a generation above these bits says of which incarnation of the tables it is
INCARNATION_BITS = 40
# boot id of a store whose ledger is being made or resized: never trusted
NEVER_BOOTED = ""

Kind = Literal["memory", "file"]

_PAGE = 4096
# magic, number, length of the text, checksum of number and text
_RECORD = Struct("<8sQQ16s")
_MAGIC = b"PAGODAST"
_WORD = Struct("<Q")
_VOUCHER = Struct("<8s16sQQQ")  # magic, id, two numbers, checksum of all of it
_VOUCHER_MAGIC = b"PAGODAVO"


class TableMark(IntEnum):
    """Why tables must not be trusted whatever the record says. A mark applies to one incarnation
    only.
    """

    DAMAGED = 0  # a process met an error in them
    # set while the only process that uses the store opens the tables: if a signal kills it, the
    # next process rebuilds them
    OPENING = 1


class Vouched(IntEnum):
    """The files that `state` vouches for, by the place of the voucher in its page 2: a sector
    each.
    """

    EPOCHS = 512
    CLEARS = 1024


class Voucher(NamedTuple):
    """What a file must still contain: it has this id, and at least these numbers."""

    record_id: bytes  # of 16 bytes
    first: int
    second: int = 0


# A voucher that is there and cannot be read: no file can have this id.
DAMAGED_VOUCHER = Voucher(b"damaged", 2**64 - 1, 2**64 - 1)


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a store. Fields are only ever added, with defaults: every version can read
    it.
    """

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
    slab_format: int = 1
    used_bytes: int = 0  # of the tables, when the store was closed cleanly
    checksum: str = ""  # checksum of those bytes
    # size of a payload; 0: unknown (so far only older versions, or users without payloads, had the
    # store to themselves)
    chunk_bytes: int = 0
    # with how many places the file `ghosts` begins; 0: the ghosts are in the columns
    first_places: int = 0

    def ghosts_in_columns(self) -> int | None:
        """Return how many ghosts the columns in memory have; None: as many as `Columns` gives
        them.
        """
        return 0 if self.first_places else None

    def sizes(self) -> dict[str, int]:
        """Return the exact size of each file that must be there, in bytes. On disk only the tables
        are mapped.
        """
        in_memory = self.kind == "memory"
        sizes = {
            TABLES: self.map_bytes,
            COLUMNS: columns_bytes(self.slots, self.ghosts_in_columns())
            if in_memory
            else 0,
            COUNTERS_FILE: COUNTERS_BYTES if in_memory else 0,
            PAGE_GUARDS: GUARD_BYTES if in_memory and self.slot_bytes else 0,
            SLAB: self.slots * self.slot_bytes,
        }
        return {name: size for name, size in sizes.items() if size}

    def first_generation(self) -> int:
        """Return the first generation of this incarnation: those of two incarnations never
        overlap.
        """
        return (self.incarnation << INCARNATION_BITS) + 1


class _Record(NamedTuple):
    number: int
    page: int
    text: bytes


def read_state(directory: Path) -> StoreState | None:
    """Read the state of a store, of any format; None if it is absent or damaged. OSError if that
    cannot be told.
    """
    try:
        content = _read(directory)
        record = _newest(content)
        # up to format 2 the file was only the text
        text = content.rstrip(b"\0") if record is None else record.text
        state = msgspec.json.decode(text, type=StoreState)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except ValueError:
        # msgspec raises a bare UnicodeDecodeError for text that is no UTF-8
        return None
    return state if state.slots > 0 else None


def write_state(directory: Path, state: StoreState) -> None:
    """Replace the state of a store, synced; the caller has the store to itself. Takes no space if
    the file exists.
    """
    text = msgspec.json.encode(state)
    content = _read(directory)
    record = _newest(content)
    if record is not None:
        _write_at(
            directory, (1 - record.page) * _PAGE, _sealed(record.number + 1, text)
        )
        return
    # No file yet, or one of an older format, which is only a text: it counts until page 1 is whole.
    if len(content) < 3 * _PAGE:
        with opened(directory / STATE, os.O_RDWR | os.O_CREAT) as fd:
            reserve(fd, 0, 3 * _PAGE)
            os.fsync(fd)
        sync_directory(directory)
    _write_at(directory, _PAGE, _sealed(1, text) + bytes(_PAGE))
    _write_at(directory, 0, _sealed(2, text))


def set_mark(directory: Path, mark: TableMark, incarnation: int) -> None:
    """Mark the tables of an incarnation, synced; 0 clears the mark. Any member may, at any time.
    Raises OSError.
    """
    _write_at(directory, 2 * _PAGE + mark * _WORD.size, _WORD.pack(incarnation))


@contextlib.contextmanager
def kept_marked(
    directory: Path, mark: TableMark, incarnation: int
) -> Iterator[None]:
    """Keep the tables of an incarnation marked, synced, until the end of the block: a kill leaves
    the mark. OSError.

    The file is open meanwhile, so that the mark can be cleared though the process may have no more
    files.
    """
    place = 2 * _PAGE + mark * _WORD.size
    with opened(directory / STATE, os.O_WRONLY) as fd:
        os.pwrite(fd, _WORD.pack(incarnation), place)
        os.fsync(fd)
        try:
            yield
        finally:
            os.pwrite(fd, _WORD.pack(0), place)
            os.fsync(fd)


def is_marked(directory: Path, mark: TableMark, incarnation: int) -> bool:
    """Whether the tables of this incarnation are marked."""
    word = _read(directory)[2 * _PAGE + mark * _WORD.size :][: _WORD.size]
    return word == _WORD.pack(incarnation)


def set_voucher(directory: Path, of: Vouched, voucher: Voucher) -> None:
    """Write what another file must contain from now on, synced. Any member may, at any time. Raises
    OSError.

    A state of an older format, or a damaged one, has no place for it and is left alone.
    """
    if os.stat(directory / STATE).st_size != 3 * _PAGE:
        return
    _write_at(directory, 2 * _PAGE + of, _sealed_voucher(voucher))


def read_voucher(directory: Path, of: Vouched) -> Voucher | None:
    """Read what another file must contain; None if only older versions had the store.
    DAMAGED_VOUCHER; OSError.
    """
    start = 2 * _PAGE + of
    sealed = _read(directory)[start : start + _VOUCHER.size]
    if len(sealed) < _VOUCHER.size or not any(sealed):
        return None
    _, record_id, first, second, _ = _VOUCHER.unpack(sealed)
    voucher = Voucher(record_id, first, second)
    return voucher if sealed == _sealed_voucher(voucher) else DAMAGED_VOUCHER


def _sealed_voucher(voucher: Voucher) -> bytes:
    text = _VOUCHER.pack(_VOUCHER_MAGIC, *voucher, 0)
    return _VOUCHER.pack(_VOUCHER_MAGIC, *voucher, xxhash.xxh3_64_intdigest(text))


def _read(directory: Path) -> bytes:
    try:
        with open_regular(directory / STATE) as file:
            return file.read(3 * _PAGE)
    except FileNotFoundError:
        return b""


def _write_at(directory: Path, offset: int, content: bytes) -> None:
    with opened(directory / STATE, os.O_WRONLY) as fd:
        # the blocks exist already, so all of it is written, or OSError is raised
        os.pwrite(fd, content, offset)
        os.fsync(fd)


def _sealed(number: int, text: bytes) -> bytes:
    if _RECORD.size + len(text) > _PAGE:
        raise ValueError(f"a state of {len(text)} bytes does not fit a page")
    checksum = xxhash.xxh3_128(_WORD.pack(number) + text).digest()
    return (_RECORD.pack(_MAGIC, number, len(text), checksum) + text).ljust(
        _PAGE, b"\0"
    )


def _newest(content: bytes) -> _Record | None:
    """Return the sound record with the higher number, if there is one."""
    records = [
        record
        for page in (0, 1)
        if (record := _record(content, page)) is not None
    ]
    return max(records, default=None)


def _record(content: bytes, page: int) -> _Record | None:
    sealed = content[page * _PAGE : (page + 1) * _PAGE]
    if len(content) != 3 * _PAGE or not sealed.startswith(_MAGIC):
        return None
    _, number, length, _ = _RECORD.unpack_from(sealed)
    text = sealed[_RECORD.size :][:length]
    return (
        _Record(number, page, text) if sealed == _sealed(number, text) else None
    )


def mismatch(
    directory: Path, state: StoreState, apart: Sequence[str] = (COUNTERS_FILE,)
) -> str | None:
    """Return how the files of a store, `apart` from some, differ from its state; None if they
    agree. OSError.

    The files of a store on disk may be copies if it was closed cleanly; then the checksum says
    whether they are right.
    """
    known = {} if state.kind == "file" and state.clean else state.inodes
    for name, size in state.sizes().items():
        if name in apart:
            continue
        try:
            status = os.stat(directory / name)
        except OSError as error:
            if not is_gone(error):
                raise
            return f"{name} is missing"
        # a slab is never shortened
        if status.st_size < size or (name != SLAB and status.st_size > size):
            return f"{name} has {status.st_size} bytes instead of {size}"
        if known and known.get(name) != status.st_ino:
            return f"{name} is not the file it was"
    return None


def inodes(directory: Path, state: StoreState) -> dict[str, int]:
    """Return the inode of each mapped file of a store, to detect files that were copied or
    replaced.
    """
    return {name: os.stat(directory / name).st_ino for name in state.sizes()}
