"""What a store keeps of its namespaces outside the tables: labels for people, and what was cleared.

`Ledger` and `admin` call it. In a store on disk both outlive the tables, in files
(`clears_and_labels`, `clear_log`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

import msgspec

from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.ledger import clears_and_labels, queries
from pagoda.ledger.clear_log import ClearLog, Watermarks
from pagoda.ledger.clears_and_labels import NamespaceCounts
from pagoda.ledger.lmdb_tables import NAMESPACE
from pagoda.ledger.locks import LABELS, timed_out
from pagoda.ledger.session import PATIENT_SECONDS, Session
from pagoda.ledger.transaction import Transaction

log = guarded_logger("pagoda.ledger.spaces")

# when this number of labels is known to be written, all are written again, since some may have been
# removed
_MOST_TOLD = 4096
# labels that wait for a transaction; further ones are dropped and registered again by later calls
_MOST_WAITING = 256
_SAVE_SECONDS = 60.0
_SAVING_SECONDS = 1.0


class NamespaceRegistry:
    """The labels and clears of one store's namespaces. Thread-safe."""

    def __init__(self, session: Session) -> None:
        state = session.store.state
        self._session = session
        self._directory = session.store.directory
        self._in_memory = state.kind == "memory"
        self._slots = state.slots
        self._clear_log = ClearLog(self._directory)
        self._labelled: set[bytes] = set()
        self._unsaved = False
        self._saved = float("-inf")

    @per_process
    def _lock(self) -> threading.Lock:
        """Guards the files of labels and of clears within this process."""
        return threading.Lock()

    @per_process
    def _waiting(self) -> dict[bytes, dict[str, str]]:
        """The labels that wait for a transaction; a parent writes its own."""
        return {}

    # ---- clears

    def save_clear(self, namespace: bytes | None) -> None:
        """Write to the medium what the tables say about a clear. Raises StoreError."""
        if self._in_memory:  # a store in memory is never rebuilt
            return
        with self._file_lock():
            try:
                begins = namespace is None or not self._clear_log.add(
                    namespace,
                    self._session.read(
                        partial(queries.watermark_of, root=namespace)
                    ),
                )
                if begins:
                    self._clear_log.allocate(self._slots)
                    self._clear_log.replace(self._watermarks())
                self._clear_log.vouch(begun=begins)
            except (OSError, StoreError) as error:
                raise StoreError(
                    f"{self._directory} is cleared, but a power cut may bring it back: that it "
                    "was cleared could not "
                    f"be written ({error}); repair that and clear it again"
                ) from error

    def prepare_clears(self) -> None:
        """Make the files of clears, or give them the size of the store; only for a process that has
        the store alone.
        """
        if self._in_memory or not self._session.store.sole:
            return
        try:
            with self._file_lock():
                never = self._clear_log.was_never_used()
                is_there = self._clear_log.is_there()
                self._clear_log.allocate(self._slots)
                if not is_there:
                    self._clear_log.replace(self._watermarks())
                if not never:
                    self._clear_log.vouch(begun=not is_there)
        except (OSError, StoreError) as error:
            log.warning(
                "cannot prepare %s for being cleared: %s", self._directory, error
            )

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Hold the lock of the file of clears: read the tables inside, so that no old state
        replaces a newer one.
        """
        with self._lock:
            locks = self._session.store.locks
            unlock = locks.unlocking(LABELS)
            try:
                if not locks.lock(
                    LABELS,
                    exclusive=True,
                    until=time.monotonic() + PATIENT_SECONDS,
                ):
                    doing = (
                        f"holds the lock of the namespaces of {self._directory}"
                    )
                    raise timed_out(PATIENT_SECONDS, doing)
                self._session.require_store()
                yield
            finally:
                unlock()

    def _watermarks(self) -> Watermarks:
        """Return what to write to the file: the present generation as floor; the watermarks of
        namespaces with chunks.

        During a scan it is not known which have chunks: the floor stays, and all that have a row
        keep their watermark.
        """
        meta = self._session.read(lambda txn, tables: tables.load_meta(txn))
        found = {t.root: t for t in self.counts()}
        if meta.scanning and len(found) <= self._slots:
            floor = max(meta.floor, meta.cleared)
            if not self._session.read(
                lambda txn, tables: tables.load_meta(txn)
            ).scanning:
                # some rows may have been removed meanwhile
                return self._watermarks()
        else:
            floor = meta.next_generation
            found = {
                root: t for root, t in found.items() if t.chunks or t.reservations
            }
        watermarks = {
            root: max(t.watermark, meta.cleared) for root, t in found.items()
        }
        return Watermarks(
            floor,
            {root: mark for root, mark in watermarks.items() if mark != floor},
        )

    # ---- listings

    def counts(self, until: float | None = None) -> list[NamespaceCounts]:
        """Return the namespaces that have a row in the tables. StoreError."""

        def made(
            _txn: object, _tables: object, _key: bytes, row: bytes
        ) -> NamespaceCounts:
            return NamespaceCounts(*NAMESPACE.unpack(row))

        return list(
            self._session.read_rows(lambda tables: tables.namespaces, made, until)
        )

    def labels(self, until: float) -> dict[bytes, dict[str, str]]:
        """Return all labels, by root. StoreError."""
        decode = msgspec.json.Decoder(dict[str, str]).decode

        def made(
            _txn: object, _tables: object, root: bytes, row: bytes
        ) -> tuple[bytes, dict[str, str]]:
            return root, decode(row)

        return dict(
            self._session.read_rows(lambda tables: tables.labels, made, until)
        )

    # ---- labels

    def register(self, namespace_root: bytes, fields: dict[str, str]) -> None:
        """Label a namespace for people. Cheap: the next transaction writes it; later calls change
        nothing.
        """
        if (
            namespace_root in self._labelled
            or len(self._waiting) >= _MOST_WAITING
        ):
            return
        if len(self._labelled) >= _MOST_TOLD:
            self._labelled.clear()
        self._labelled.add(namespace_root)
        self._waiting[namespace_root] = fields
        self._unsaved = True
        self._session.defer(partial(self._label, namespace_root))

    def _label(self, root: bytes, transaction: Transaction) -> None:
        # tried once: a label that fails must not block other work
        fields = self._waiting.pop(root, None)
        if fields is not None:
            clears_and_labels.label(transaction, root, fields)

    def write_labels(self, deadline_seconds: float = PATIENT_SECONDS) -> None:
        """Write the labels that wait for a transaction. StoreError if it cannot be done in time."""
        if self._waiting:
            self._session.write(lambda _: None, deadline_seconds)

    def save_labels(self, every_seconds: float = _SAVE_SECONDS) -> None:
        """Save the labels in the file that outlives the tables, if some are new and the last save
        is old. Does I/O.
        """
        if (
            self._in_memory
            or not self._unsaved
            or time.monotonic() - self._saved < every_seconds
        ):
            return
        self._unsaved = False
        self._saved = time.monotonic()
        # labels are not essential
        with contextlib.suppress(StoreError, OSError), self._lock:
            self._session.require_store()
            self.write_labels(_SAVING_SECONDS)
            clears_and_labels.save_labels(
                self._directory, self.labels(time.monotonic() + _SAVING_SECONDS)
            )
