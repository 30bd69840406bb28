"""Clear chunks, in steps that another process can end.

1. One transaction sets the watermark and enters the clear in the row of clears under way. From its
   commit on, every look-up takes the chunks that it covers for gone (`queries`, `allocation`).
2. The watermark is written to the medium, for a rebuild (`namespace_registry`).
3. The chunks are removed, some in each transaction. Those of one namespace are found by
   `namespace_slots`; all rows of the tables are read only if some are missing there.
4. The token ids of what was cleared are removed: the log of prompts, the notes of chunks that are
  gone.
5. The clear leaves the row.

If a process dies in between, the next one that opens the store ends its clear. `admin` and `Ledger`
call this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from pagoda.base.errors import StoreError
from pagoda.base.log import guarded_logger
from pagoda.ledger import clears_and_labels, hold_pin_remove, queries
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.lmdb_tables import (
    NAMESPACE,
    NUMBER,
    SLOT,
    SLOT_KEY,
    PendingClear,
    Tables,
    Txn,
)
from pagoda.ledger.namespace_registry import NamespaceRegistry
from pagoda.ledger.session import Session
from pagoda.ledger.store_state import NOTES, OLD_PROMPTS, PROMPTS
from pagoda.ledger.transaction import BATCH, batches

log = guarded_logger("pagoda.ledger.clears")


class Clearing:
    """Clears the chunks of one store. Thread-safe."""

    def __init__(self, session: Session, namespaces: NamespaceRegistry) -> None:
        self._session = session
        self._namespaces = namespaces
        self._directory: Path = session.store.directory

    def clear(self, namespace: bytes | None) -> int:
        """Remove all chunks of one namespace (None: of all); return how many. StoreError. See
        `admin.clear`.
        """
        try:
            # where this fails, the tables cannot be written either
            with suppress(OSError):
                # first: what is reserved after the tables are cleared must see it
                self._session.store.locks.mark()
            begin = partial(clears_and_labels.clear, root=namespace)
            pending, chunks = self._session.write(begin, frees=True)
            dropped = self._carry_out(pending, chunks)
        finally:  # the log may contain prompts that are no longer stored
            self._remove_tokens(everything=namespace is None)
        self._session.write(
            partial(clears_and_labels.end_clear, ended=pending), frees=True
        )
        return dropped

    def end_clears(self) -> None:
        """End what members began that died. StoreError if it cannot be done now: later look-ups
        heed it still.
        """
        for pending in self._session.read(
            lambda txn, tables: tables.pending_clears(txn)
        ):
            if pending.member == self._session.member or self._session.is_alive(
                pending.member
            ):
                continue
            log.warning(
                "ending a clear of %s whose process died in the middle of it",
                self._directory,
            )
            self._carry_out(pending, chunks=None)
            self._remove_tokens(everything=not pending.number)
            self._session.write(
                partial(clears_and_labels.end_clear, ended=pending), frees=True
            )

    def _carry_out(self, pending: PendingClear, chunks: int | None) -> int:
        """Write down a clear that is committed, and remove its chunks: at most that many, if it is
        known.
        """
        try:
            self._namespaces.save_clear(pending.root if pending.number else None)
        finally:
            # the chunks are removed, even if the clear was not saved and a rebuild may bring them
            # back
            dropped = self._drop(pending, chunks)
        return dropped

    def _drop(self, pending: PendingClear, chunks: int | None) -> int:
        """Remove the chunks that a clear covers: at most that many, if it is known."""
        dropped = 0
        if pending.number:
            known = self._session.namespace_slots.of(pending.number)
            dropped += self._drop_slots(known, pending, chunks)
            # others may have been evicted meanwhile
            if dropped == chunks or not self._has_chunks(pending.number):
                return dropped
        left = None if chunks is None else chunks - dropped
        return dropped + self._drop_slots(self._covered(pending), pending, left)

    def _has_chunks(self, namespace: int) -> bool:
        """Whether a namespace (by number) has chunks. Raises StoreError."""

        def chunks(txn: Txn, tables: Tables) -> bool:
            row = txn.get(NUMBER.pack(namespace), db=tables.namespaces)
            return row is not None and NAMESPACE.unpack(row)[2] > 0

        return self._session.read(chunks)

    def _covered(self, pending: PendingClear) -> Iterator[int]:
        """Read all rows of slots for those that a clear covers; note whose chunks the others
        are.
        """

        def cleared(
            _txn: Txn, _tables: Tables, key: bytes, row: bytes
        ) -> int | None:
            slot: int = SLOT_KEY.unpack(key)[0]
            self._session.namespace_slots.note({slot: SLOT.unpack(row)[1]})
            return slot if hold_pin_remove.is_cleared(row, pending) else None

        rows = self._session.read_rows(lambda tables: tables.slots, cleared)
        return (slot for slot in rows if slot is not None)

    def _drop_slots(
        self, slots: Iterator[int], pending: PendingClear, chunks: int | None
    ) -> int:
        """Remove the chunks of these slots that a clear covers; end after that many, if it is
        known.
        """
        dropped = 0
        # a few chunks first: if the map is full, they free space for more
        most = 16
        while (chunks is None or dropped < chunks) and (
            found := list(islice(slots, most))
        ):
            drop = partial(
                hold_pin_remove.drop_cleared, slots=found, pending=pending
            )
            dropped += self._session.write(drop, frees=True)
            most = min(2 * most, BATCH)
        return dropped

    def _remove_tokens(self, everything: bool) -> None:
        """Remove the token ids of what was cleared: the whole log of prompts, and the notes of
        chunks that are gone.
        """
        left: list[str] = []
        notes = ChunkNotes(self._directory)
        # in this order, since the current log may become the old log meanwhile
        for name in (PROMPTS, OLD_PROMPTS, *([NOTES] if everything else [])):
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                left.append(str(error))
        try:
            noted = list(notes.places())
            stored = self._stored_places(noted)
            notes.erase([place for place in noted if place not in stored])
        except (OSError, StoreError) as error:
            left.append(str(error))
        if left:
            raise StoreError(
                f"token ids of cleared prompts are left: {'; '.join(left)}; remove them by hand"
            )

    def _stored_places(
        self, noted: list[tuple[int, bytes]]
    ) -> set[tuple[int, bytes]]:
        """Return which of these slots have the chunk of that key, by the tables. Raises
        StoreError.
        """
        stored = set()
        for some in batches(noted):
            keys = [key for _, key in some]
            found, _ = self._session.read(
                partial(queries.find_entries, keys=keys)
            )
            stored |= {
                (item.slot, item.key) for item in found if item is not None
            }
        return stored
