"""The record of epochs of one root: how often the weights of each model were changed in place, as
the root knows it.

    <root>/epochs      two halves of fixed size, written in turn, in place and synced; the sound one
                       with the higher sequence is valid
    <store>/state      vouches for it: the random id of the record, and the last sequence that it
                       had (`store_state`)
    <root>/weights-*   what older versions have instead, one for each model: its size is the count.
                       It is read, and kept at the count, as long as such versions may open the root

The data vouches for the record. If the record is gone, is older than a store of the root says,
cannot be read, or is that of another root, then it is not known which weights the chunks of the
root are of: a new record begins, with a *floor*, and every model gets a new epoch at its next
opening. If all stores say that no epoch was ever recorded, then nothing is lost, and there is no
floor.

`pagoda.cache.weights_epoch` calls this; it decides which epoch is valid for several roots together.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import xxhash
from blake3 import blake3

from pagoda.base.errors import StoreError
from pagoda.base.file_space import (
    make_directory,
    open_regular,
    opened,
    reserve,
    reserve_beyond,
)
from pagoda.base.log import guarded_logger
from pagoda.base.synced_files import sync_directory
from pagoda.ledger.locks import BEYOND, OPEN, LockFile, timed_out
from pagoda.ledger.store_state import (
    Vouched,
    Voucher,
    read_voucher,
    set_voucher,
)
from pagoda.ledger.stores_under_root import stores

log = guarded_logger("pagoda.ledger.epochs")

EPOCHS = "epochs"
_LOCK_SECONDS = 5.0
_HALF_BYTES = 32 << 10
_CHECK = Struct("<16s")
_HEAD = Struct("<8s16sQQQ")  # magic, id, sequence, floor, number of models
_MODEL = Struct("<8sQQ")  # digest, count, nonce
_EPOCH = Struct("<QQ")  # count, nonce
_MAGIC = b"PAGODAEP"
_MOST_MODELS = (_HALF_BYTES - _CHECK.size - _HEAD.size) // _MODEL.size
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# space for this many epochs of a model, in its file for older versions
_RESERVED_BYTES = 1024
# in the count of a row: an epoch that a model of this root had before, see `_passed_row`
_PASSED = 1 << 63
_MOST_PASSED = 256  # of all models together, the last ones


class Epoch(NamedTuple):
    """An epoch of a model: the number of changes in place of its weights, and a random number that
    no other epoch has.

    Older versions have only that number, and nonce 0. `(0, 0)`: never changed.
    """

    number: int
    nonce: int


NEVER_CHANGED = Epoch(0, 0)


def new_epoch(above: int) -> Epoch:
    """Return an epoch that nobody has or will have, with a count above that one."""
    return Epoch(above + 1, secrets.randbits(64) | 1)


class _EpochHalf(NamedTuple):
    """What a record says. With a `floor` (not 0), each model that is not in `of` needs a new epoch.

    `of` also has rows for epochs that were left behind: see `_passed_row`.
    """

    record_id: bytes
    sequence: int
    floor: int
    of: dict[bytes, Epoch]


class EpochRecord:
    """The record of one root, for one model. Threads and processes may use it at once."""

    def __init__(self, root: Path, model: str) -> None:
        """`model`: 16 hexadecimal digits that name a model and the epoch that it was configured
        with.
        """
        self.root = root
        self.path = root / EPOCHS
        self.old_path = root / f"weights-{model}"
        self._digest = bytes.fromhex(model)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers of this root out. OSError or StoreError, also if it takes too long."""
        until = time.monotonic() + _LOCK_SECONDS
        make_directory(self.root)
        while True:
            with contextlib.closing(LockFile(self.path, first=BEYOND)) as locks:
                if not locks.lock(OPEN, exclusive=True, until=until):
                    raise timed_out(_LOCK_SECONDS, f"is writing {self.path}")
                if locks.is_at(self.path):
                    yield
                    return

    def read(self) -> Epoch | None:
        """Return the epoch of the model; None if it is unknown whether it was changed. Under
        `locked`. OSError.

        Makes the record, or a new one if a promise was lost, and lets all stores of the root vouch
        for it.
        """
        record = self._current()
        counted = self._old_count()
        epoch = record.of.get(self._digest)
        if epoch is None and record.floor:
            return None
        epoch = epoch or NEVER_CHANGED
        if counted > epoch.number:
            # An older version changed the weights. What it stored since then is of that count,
            # without a nonce.
            return Epoch(counted, 0)
        return epoch

    def least(self) -> int:
        """Return the highest count of the model that the root still shows. Under `locked`.
        OSError.
        """
        epoch = self._current().of.get(self._digest, NEVER_CHANGED)
        return max(epoch.number, self._old_count())

    def passed(self, epochs: Collection[Epoch]) -> set[Epoch]:
        """Return those of these epochs that the root left behind, for the one it has now. Under
        `locked`. OSError.
        """
        of = self._current().of
        counted = self._old_count()
        left_behind = set()
        for epoch in epochs:
            key, row = self._passed_row(epoch)
            is_followed_by_count = (
                of.get(self._digest) == epoch and counted > epoch.number
            )
            if of.get(key) == row or is_followed_by_count:
                left_behind.add(epoch)
        return left_behind

    def has_promised(self) -> bool:
        """Whether an epoch may have been recorded here, when the record cannot be read."""
        try:
            return self._old_count() > 0 or any(
                voucher.first for voucher in self._vouchers()
            )
        except FileNotFoundError:  # there is no root
            return False
        except (OSError, StoreError):
            return True

    def write(self, epoch: Epoch, passed: Collection[Epoch] = ()) -> None:
        """Record the epoch of the model, on the medium when this returns. Under `locked`. OSError.

        `passed`: epochs of other roots that this one leaves behind.
        """
        record = self._current()
        if record.of.get(self._digest, NEVER_CHANGED) != epoch or (
            record.floor and self._digest not in record.of
        ):
            of = dict(record.of)
            for before in (of.get(self._digest, NEVER_CHANGED), *passed):
                if before not in (NEVER_CHANGED, epoch):
                    of.update([self._passed_row(before)])
            left_behind = [key for key, row in of.items() if row.number & _PASSED]
            for key in left_behind[:-_MOST_PASSED]:
                del of[key]
            of[self._digest] = epoch
            floor = record.floor
            if len(of) > _MOST_MODELS:  # the others get new epochs
                of = {self._digest: epoch}
                floor = secrets.randbits(64) | 1
            record = _EpochHalf(record.record_id, record.sequence + 1, floor, of)
            self._put(record)
        self._vouch(record)
        _grow(self.old_path, epoch.number)

    def tell_older_versions(self, epoch: Epoch) -> None:
        """Make the file for older versions again if it is gone or behind. OSError."""
        if epoch.number:
            _grow(self.old_path, epoch.number)

    def reserve(self) -> None:
        """Reserve space for epochs, so that they can be written on a full disk. OSError."""
        if self.root.is_dir():
            with opened(self.old_path, _APPEND) as fd:
                reserve_beyond(fd, os.fstat(fd).st_size + _RESERVED_BYTES)

    def _passed_row(self, epoch: Epoch) -> tuple[bytes, Epoch]:
        """Return the row, and its key, that says that the model had this epoch before."""
        key = blake3(
            self._digest + _EPOCH.pack(*epoch),
            derive_key_context="PagodaKV passed epoch",
        ).digest(8)
        return key, Epoch(epoch.number | _PASSED, epoch.nonce)

    def _current(self) -> _EpochHalf:
        """Return the record; if it is gone or not the one that the stores vouch for, begin
        another.
        """
        record = self._newest()
        vouched = self._vouchers()
        lost = [
            voucher
            for voucher in vouched
            if voucher.first and not _keeps(record, voucher)
        ]
        if record is not None and not lost:
            if any(voucher.record_id != record.record_id for voucher in vouched):
                self._vouch(record)
            return record
        floor = 0
        if lost:
            floor = secrets.randbits(64) | 1
            log.warning(
                "%s is gone, or older than the stores beside it: it is not known whether the "
                "weights of their chunks "
                "were changed in place, so none of these chunks is served; to use tiers that are "
                "shared with other "
                "machines, name the weights in `weights_changed`",
                self.path,
            )
        record = _EpochHalf(secrets.token_bytes(16), int(bool(floor)), floor, {})
        self._put(record)
        self._vouch(record)
        # tell the processes that have the root open: see `WeightsEpoch.epoch`
        if floor:
            for path in self.root.glob("weights-*"):
                _grow(path, path.stat().st_size + 1)
        return record

    def _vouchers(self) -> list[Voucher]:
        found = []
        for store in stores(self.root):
            with contextlib.suppress(FileNotFoundError):
                voucher = read_voucher(store, Vouched.EPOCHS)
                if voucher is not None:
                    found.append(voucher)
        return found

    def _vouch(self, record: _EpochHalf) -> None:
        """Let every store of the root vouch for this state of the record, synced."""
        voucher = Voucher(record.record_id, record.sequence)
        for store in stores(self.root):
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                if read_voucher(store, Vouched.EPOCHS) != voucher:
                    set_voucher(store, Vouched.EPOCHS, voucher)

    def _old_count(self) -> int:
        try:
            return os.stat(self.old_path).st_size
        except FileNotFoundError:
            return 0

    def _newest(self) -> _EpochHalf | None:
        try:
            with open_regular(self.path) as file:
                content = file.read(2 * _HALF_BYTES)
        except FileNotFoundError:
            return None
        halves = (content[:_HALF_BYTES], content[_HALF_BYTES:])
        found = [
            record for half in halves if (record := _parsed(half)) is not None
        ]
        return max(found, key=lambda record: record.sequence, default=None)

    def _put(self, record: _EpochHalf) -> None:
        """Write a record over the older half, synced; a new one over both. OSError."""
        sealed = _sealed(record)
        with opened(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
            if os.fstat(fd).st_size != 2 * _HALF_BYTES:
                os.ftruncate(fd, 2 * _HALF_BYTES)
                reserve(fd, 0, 2 * _HALF_BYTES)
            now = self._newest()
            if now is None or now.record_id != record.record_id:
                os.pwrite(fd, sealed + bytes(_HALF_BYTES), 0)
                os.fsync(fd)
                sync_directory(self.root)
                return
            os.pwrite(fd, sealed, record.sequence % 2 * _HALF_BYTES)
            os.fsync(fd)


def _keeps(record: _EpochHalf | None, voucher: Voucher) -> bool:
    """Whether a record is the one that a store vouches for, or a later state of it."""
    return (
        record is not None
        and record.record_id == voucher.record_id
        and record.sequence >= voucher.first
    )


def _sealed(record: _EpochHalf) -> bytes:
    head = _HEAD.pack(
        _MAGIC, record.record_id, record.sequence, record.floor, len(record.of)
    )
    rows = b"".join(
        _MODEL.pack(digest, *epoch) for digest, epoch in record.of.items()
    )
    text = (head + rows).ljust(_HALF_BYTES - _CHECK.size, b"\0")
    return xxhash.xxh3_128_digest(text) + text


def _parsed(half: bytes) -> _EpochHalf | None:
    if (
        len(half) != _HALF_BYTES
        or xxhash.xxh3_128_digest(half[_CHECK.size :]) != half[: _CHECK.size]
    ):
        return None
    magic, record_id, sequence, floor, count = _HEAD.unpack_from(
        half, _CHECK.size
    )
    if magic != _MAGIC or count > _MOST_MODELS:
        return None
    first = _CHECK.size + _HEAD.size
    rows = _MODEL.iter_unpack(half[first : first + count * _MODEL.size])
    return _EpochHalf(
        record_id,
        sequence,
        floor,
        {digest: Epoch(n, nonce) for digest, n, nonce in rows},
    )


def _grow(path: Path, count: int) -> None:
    """Make the file for older versions at least that long, synced. Appends of several processes add
    up. OSError.
    """
    with opened(path, _APPEND) as fd:
        missing = count - os.fstat(fd).st_size
        if missing <= 0:
            return
        os.write(fd, b"+" * missing)
        os.fsync(fd)
    sync_directory(path.parent)
