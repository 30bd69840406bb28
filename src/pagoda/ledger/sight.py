"""What can be seen of a ledger: its chunks, namespaces, pins, totals and counters, and whether they add up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, cast

import lmdb
import numpy as np
from numpy.typing import NDArray

from pagoda.errors import LedgerCorrupt, StoreError
from pagoda.ledger import reading
from pagoda.ledger.advice import GHOST_REASONS
from pagoda.ledger.columns import Columns
from pagoda.ledger.counters import folded
from pagoda.ledger.lending import Lending
from pagoda.ledger.namespaces import Namespaces, root_of
from pagoda.ledger.outcome import Miss, Report, Row
from pagoda.ledger.session import Session, UnavailableError
from pagoda.ledger.state import SLAB, Kind
from pagoda.ledger.store import trouble_told
from pagoda.ledger.tables import COUNTERS_ROW, MEMBER, MEMBER_KEY, SLOT, SLOT_KEY, Tables
from pagoda.ledger.writing import Writing
from pagoda.metrics import Reason

PATIENT_SECONDS = 5.0  # for one step of what a person waits for: listings, clear, pins
BATCH = 64  # chunks a transaction
_PAGE = 256


class _Slab(Protocol):
    def close(self) -> None: ...


T = TypeVar("T")
S = TypeVar("S", bound=_Slab)


class Sight:
    """The half of a ledger that shows. Thread-safe; changes nothing but what the dead left (`reap`, `check`)."""

    def __init__(self, session: Session) -> None:
        state = session.store.state
        self._session = session
        self.directory: Path = session.store.directory
        self.kind: Kind = state.kind
        self.slots, self.slot_bytes = state.slots, state.slot_bytes
        self.store_id = bytes.fromhex(state.store_id)
        self.slab_path: Path = self.directory / SLAB

    def open_slab(self, opener: Callable[[Path], S]) -> S:
        """Open this store's slab with `opener(path)`. StoreError if another store lies there by now."""
        with trouble_told(self._session.store.directory):
            slab = opener(self.slab_path)
            try:
                self._session.require_store()
            except BaseException:
                slab.close()
                raise
        return slab

    @property
    def columns(self) -> Columns:
        """The hints of all slots; for policies, listings and tests."""
        return self._session.columns

    @property
    def lending(self) -> Lending | None:
        """What this process has lent of the slab; None where pages are never taken under a reader."""
        return self._session.lending

    @property
    def member(self) -> int:
        """This process's number in the store."""
        return self._session.member

    def why(self, key: bytes) -> Miss:
        """Why a key that has no entry has none, as far as it is remembered."""
        ghost = self.columns.table.find(key)
        if ghost is None:
            return Miss(Reason.ABSENT, None)
        age = (self._session.stamp(self._now()) - ghost.went) / 1e9
        return Miss(GHOST_REASONS[ghost.reason % len(GHOST_REASONS)], max(0.0, age))

    def rows(self, limit: int | None = None) -> Iterator[Row]:
        """Walk all chunks by slot, a page at a time, while others go on."""
        at: int | None = 0
        given = 0
        while at is not None:
            start = at
            page, at = self._read_patiently(lambda txn, tables: self._page(txn, tables, start))  # noqa: B023
            for row in page:
                if given == limit:
                    return
                given += 1
                yield row

    def _page(self, txn: lmdb.Transaction, tables: Tables, start: int) -> tuple[list[Row], int | None]:
        now = self._now()
        found: list[Row] = []
        for key, value in tables.rows(txn, tables.slots, SLOT_KEY.pack(start)):
            slot: int = SLOT_KEY.unpack(key)[0]
            if len(found) == _PAGE:
                return found, slot
            _, namespace, *_, chunk = SLOT.unpack(value)
            pinned = txn.get(chunk, db=tables.pins) is not None
            found.append(self._row(slot, value, root_of(txn, tables, namespace), pinned, now))
        return found, None

    def _row(self, slot: int, value: bytes, root: bytes, pinned: bool, now: int) -> Row:
        generation, _, position, tokens, key = SLOT.unpack(value)
        age = (self._session.stamp(now) - int(self.columns.last_use[slot])) / 1e9
        hits, leased = int(self.columns.hits[slot]), bool(self.columns.lease_until[slot] > now)
        return Row(key, slot, generation, root, position, tokens, max(0.0, age), hits, leased, pinned)

    def pins(self) -> dict[str, list[bytes]]:
        """Who pinned what."""

        def work(txn: lmdb.Transaction, tables: Tables) -> dict[str, list[bytes]]:
            found: dict[str, list[bytes]] = {}
            for key, value in tables.rows(txn, tables.pins):
                for owner in value.decode().split("\n"):
                    found.setdefault(owner, []).append(key)
            return found

        return self._read_patiently(work)

    def count(self, counter: str, n: int = 1) -> None:
        """Add to a counter of pagoda.metrics.COUNTERS; KeyError for an unknown one."""
        self._session.count({counter: n})

    def count_all(self, counts: Mapping[str, int]) -> None:
        """Add to some counters, as `count`; cheaper than one by one."""
        self._session.count(counts)

    def counters(self, deadline_seconds: float = PATIENT_SECONDS) -> dict[str, int]:
        """The counters of all members, and of those who left."""
        return self._read_patiently(self._counters, deadline_seconds)

    def own_counters(self) -> dict[str, int]:
        """The counters of this member alone; asks nobody."""
        return self._session.own_counters()

    def _counters(self, txn: lmdb.Transaction, tables: Tables) -> dict[str, int]:
        rows = [MEMBER.unpack(row)[0] for _, row in tables.rows(txn, tables.members)]
        return self._session.counted(
            rows, folded(cast("bytes | None", txn.get(COUNTERS_ROW, db=tables.meta)))
        )

    def processes(self) -> list[int]:
        """The ids of the processes that have the store open, this one's too."""

        def work(txn: lmdb.Transaction, tables: Tables) -> list[int]:
            members = tables.rows(txn, tables.members)
            return [
                MEMBER.unpack(row)[1]
                for key, row in members
                if self._session.lives(MEMBER_KEY.unpack(key)[0])
            ]

        return self._read_patiently(work)

    def gauges(self) -> dict[str, int]:
        """Slots: all, free, reserved, ready, unscanned, pinned, leased; and members."""
        return self._read_patiently(self._gauges)

    def _gauges(self, txn: lmdb.Transaction, tables: Tables) -> dict[str, int]:
        return reading.gauges(txn, tables, self.columns, self._now())

    def numbers(self, deadline_seconds: float = PATIENT_SECONDS) -> dict[str, int]:
        """Gauges and counters, of one moment. StoreError if they are not to be had in time."""
        return self._read_patiently(
            lambda txn, tables: self._gauges(txn, tables) | self._counters(txn, tables), deadline_seconds
        )

    def check(self) -> Report:
        """Judge the tables while nobody writes. LedgerCorrupt with the numbers if they do not add up.

        StoreError if they cannot be looked at, which says nothing of them. Slots that are still to be read back after a
        rebuild are counted (`unscanned`) and are no fault.
        """
        self.reap()

        def work(txn: lmdb.Transaction, tables: Tables) -> Report:
            return reading.check(txn, tables, self.columns, self._gauges(txn, tables))

        try:
            return self._read_patiently(work)
        except StoreError as error:
            cause = error.__cause__ and error.__cause__.__cause__
            if isinstance(cause, lmdb.Error):
                raise LedgerCorrupt(f"the tables of {self.directory} cannot be read: {cause}") from error
            raise

    def reap(self) -> int:
        """Take back what dead members had reserved; return how many slots."""
        return self._tidy(PATIENT_SECONDS)

    def _tidy(self, seconds: float) -> int:
        freed, got, until = 0, BATCH, time.monotonic() + seconds
        with contextlib.suppress(UnavailableError):
            while got == BATCH:
                got = self._session.reap(BATCH, max(0.0, until - time.monotonic()))
                freed += got
            while self._session.mend(max(0.0, until - time.monotonic())):
                pass
        return freed

    def _patiently(
        self,
        work: Callable[[Writing, Namespaces], T],
        deadline_seconds: float = PATIENT_SECONDS,
        frees: bool = False,
    ) -> T:
        """Do what must be done or be known to have failed: StoreError after a while."""
        try:
            return self._session.write(work, deadline_seconds, frees)
        except UnavailableError as error:
            raise StoreError(
                f"the ledger at {self.directory} could not be changed: {error.reason}"
            ) from error

    def _read_patiently(
        self, work: Callable[[lmdb.Transaction, Tables], T], deadline_seconds: float = PATIENT_SECONDS
    ) -> T:
        try:
            return self._session.read(work, deadline_seconds)
        except UnavailableError as error:
            raise StoreError(f"the ledger at {self.directory} could not be read: {error.reason}") from error

    def _now(self) -> int:
        return self._session.clock.monotonic_ns()


def batches(items: Sequence[T]) -> list[Sequence[T]]:
    """Items in the order given, as many in each as a transaction takes."""
    return [items[at : at + BATCH] for at in range(0, len(items), BATCH)]


def pairs(slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Slots with their generations."""
    return [(int(slot), int(generation)) for slot, generation in zip(slots, generations, strict=True)]
