"""The part of a ledger that knows tenants: namespaces get names and are cleared."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import lmdb

from pagoda.errors import StoreError
from pagoda.ledger import keeping, namespaces, reading
from pagoda.ledger.clears import ALL, Clears, Lines
from pagoda.ledger.locks import LABELS
from pagoda.ledger.namespaces import Cleared, Namespaces
from pagoda.ledger.outcome import NamespaceRow
from pagoda.ledger.session import Session
from pagoda.ledger.sight import BATCH, PATIENT_SECONDS, Sight
from pagoda.ledger.tables import Tables
from pagoda.ledger.writing import Writing

log = logging.getLogger(__name__)

_ROWS_A_LOOK = 4096
_PAGE = 1024
_MOST_TOLD = 4096  # labels that are known to be written; then they are told anew, since some may have gone
_MOST_WAITING = 256  # labels that wait for a transaction; in a flood, more are told another time
_SAVE_SECONDS, _SAVING_SECONDS = 60.0, 1.0

P = TypeVar("P")


class Spaces(Sight):
    """What a ledger shows, and its namespaces. Thread-safe."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._labels_lock = threading.Lock()  # the files of labels and of clears, within this process
        self._labelled: set[bytes] = set()
        self._waiting: dict[bytes, dict[str, str]] = {}  # labels
        self._unsaved, self._saved = False, float("-inf")
        self._clears = Clears(self.directory)

    # ---- clearing

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (None: of all), also those being stored; return how many were there.

        Takes no room, neither in the tables nor on the disk. What another process stores after this call began may
        stay. StoreError if it could not be done, or not so that it outlives a power cut.
        """
        cleared = self._patiently(lambda w, spaces: spaces.clear(w, namespace), frees=True)
        try:
            self._keep_cleared(namespace)
        finally:  # what may come back with a rebuild is gone for now even so
            dropped = self._drop_cleared(cleared)
        return dropped

    def _drop_cleared(self, cleared: Cleared) -> int:
        namespace, line, chunks = cleared
        dropped, at, most = 0, 0, 2
        while dropped < chunks:
            start, most = at, min(2 * most, BATCH)  # a few first: if the map is full, they make room for more
            found, after = self._read_patiently(
                lambda txn, tables: reading.cleared(txn, tables, namespace, line, start, most, _ROWS_A_LOOK)  # noqa: B023
            )
            if found:
                dropped += self._patiently(
                    lambda w, _: keeping.drop_cleared(w, found, namespace, line),  # noqa: B023
                    frees=True,
                )
            if after is None:
                break
            at = after
        return dropped

    def _keep_cleared(self, namespace: bytes | None) -> None:
        """Have what the tables say of a clear on the medium. StoreError."""
        if self.kind == "memory":  # is never rebuilt
            return
        with self._clears_held():
            try:
                if namespace is None or not self._clears.add(namespace, self._line(namespace)):
                    self._clears.allocate(self.slots)
                    self._clears.replace(self._lines())
            except (OSError, StoreError) as error:
                raise StoreError(
                    f"{self.directory} is cleared, but a power cut may bring it back: that it was cleared could not "
                    f"be written ({error}); mend that and clear it again"
                ) from error

    def _begin_clears(self) -> None:
        """Make the files of clears, or give them the size of the store; for who has it alone."""
        if self.kind == "memory" or not self._session.store.sole:
            return
        try:
            with self._clears_held():
                self._clears.allocate(self.slots)
                lines = self._clears.read()
                if lines is None or lines.floor == ALL:
                    self._clears.replace(self._lines())
        except (OSError, StoreError) as error:
            log.warning("%s cannot be made ready to be cleared: %s", self.directory, error)

    @contextlib.contextmanager
    def _clears_held(self) -> Iterator[None]:
        """Be the one who writes what was cleared: the tables are read inside, so the file never goes back."""
        with self._labels_lock:
            locks = self._session.store.locks
            unlock = locks.unlocking(LABELS)
            try:
                if not locks.lock(LABELS, exclusive=True, until=time.monotonic() + PATIENT_SECONDS):
                    raise StoreError(
                        f"another process has kept the namespaces of {self.directory} for {PATIENT_SECONDS:g} s: "
                        "is it stopped?"
                    )
                self._session.require_store()
                yield
            finally:
                unlock()

    def _line(self, root: bytes) -> int:
        return self._read_patiently(lambda txn, tables: namespaces.line_of(txn, tables, root))

    def _lines(self) -> Lines:
        """What a file of clears is to say: a floor of now, and the lines of the namespaces that have chunks.

        During a scan it is not known which have: the floor stays, and all that have a row keep their lines.
        """
        meta = self._read_patiently(lambda txn, tables: tables.load_meta(txn))
        found = {t.root: t for t in self._paged(namespaces.tenants)}
        if meta.scanning and len(found) <= self.slots:
            floor = max(meta.floor, meta.cleared)
            if not self._read_patiently(lambda txn, tables: tables.load_meta(txn)).scanning:
                return self._lines()  # some may have been struck off meanwhile
        else:
            floor = meta.next_generation
            found = {root: t for root, t in found.items() if t.chunks or t.reservations}
        lines = {root: max(t.line, meta.cleared) for root, t in found.items()}
        return Lines(floor, {root: line for root, line in lines.items() if line != floor})

    # ---- names

    def register(self, namespace_root: bytes, fields: dict[str, str]) -> None:
        """Name a namespace for people. Cheap: the next transaction writes it; nothing changes after the first time."""
        if namespace_root in self._labelled or len(self._waiting) >= _MOST_WAITING:
            return
        if len(self._labelled) >= _MOST_TOLD:
            self._labelled.clear()
        self._labelled.add(namespace_root)
        self._waiting[namespace_root] = fields
        self._unsaved = True
        self._session.defer(partial(self._label, namespace_root))

    def _label(self, root: bytes, writing: Writing) -> None:
        fields = self._waiting.pop(
            root, None
        )  # tried once: a name must not keep other things from being done
        if fields is not None:
            Namespaces(writing.tables).label(writing, root, fields)

    def write_labels(self, deadline_seconds: float = PATIENT_SECONDS) -> None:
        """Write the names that wait for a transaction. StoreError if that cannot be in time."""
        if self._waiting:
            self._patiently(lambda _, __: None, deadline_seconds)

    def save_labels(self, every_seconds: float = _SAVE_SECONDS) -> None:
        """Save the names where they outlive the tables, if there are new ones and it has been a while. Does I/O."""
        if self.kind == "memory" or not self._unsaved or time.monotonic() - self._saved < every_seconds:
            return
        self._unsaved, self._saved = False, time.monotonic()
        with contextlib.suppress(StoreError, OSError), self._labels_lock:  # they are but names
            self._session.require_store()
            self.write_labels(_SAVING_SECONDS)
            known = dict(self._paged(namespaces.labels, time.monotonic() + _SAVING_SECONDS))
            namespaces.save_labels(self.directory, known)

    def namespaces(self, deadline_seconds: float = PATIENT_SECONDS) -> dict[bytes, NamespaceRow]:
        """The namespaces that have chunks here, and those that have a name. StoreError if not to be had in time."""
        until = time.monotonic() + deadline_seconds
        self.write_labels(deadline_seconds)
        named = dict(self._paged(namespaces.labels, until))
        rows = {
            t.root: NamespaceRow(t.root, named.pop(t.root, {}), t.chunks)
            for t in self._paged(namespaces.tenants, until)
        }
        return rows | {root: NamespaceRow(root, fields, 0) for root, fields in named.items()}

    def _paged(
        self,
        page: Callable[[lmdb.Transaction, Tables, bytes, int], tuple[list[P], bytes | None]],
        until: float | None = None,
    ) -> Iterator[P]:
        """Walk a table a page at a time, while others go on."""
        at: bytes | None = b""
        while at is not None:
            start = at
            seconds = PATIENT_SECONDS if until is None else max(0.0, until - time.monotonic())
            found, at = self._read_patiently(lambda txn, tables: page(txn, tables, start, _PAGE), seconds)  # noqa: B023
            yield from found
