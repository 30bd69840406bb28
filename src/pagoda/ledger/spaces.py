"""The part of a ledger that knows tenants: namespaces are made known and cleared."""

from __future__ import annotations

import contextlib
import threading
import time

from pagoda.errors import StoreError
from pagoda.ledger import keeping, reading
from pagoda.ledger.locks import LABELS
from pagoda.ledger.namespaces import MOST, save_labels
from pagoda.ledger.session import Session
from pagoda.ledger.sight import BATCH, PATIENT_SECONDS, Sight

_ROWS_A_LOOK = 4096


class Spaces(Sight):
    """What a ledger shows, and its namespaces. Thread-safe."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._labels_lock = threading.Lock()
        self._labelled: set[bytes] = set()

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (None: of all), also those being stored; return how many were there.

        What another process stores after this call began may stay. StoreError if it could not be done.
        """
        self._patiently(lambda w, spaces: spaces.raise_epoch(w, namespace))
        try:
            self._save_labels()
        finally:  # what may come back with a rebuild is gone for now even so
            cleared = self._drop_cleared()
        return cleared

    def _drop_cleared(self) -> int:
        epochs = {row[0]: row[1] for row in self._known().values()}
        cleared, at = 0, 0
        while True:
            start = at
            found, after = self._read_patiently(
                lambda txn, tables: reading.outdated(txn, tables, epochs, start, BATCH, _ROWS_A_LOOK)  # noqa: B023
            )
            cleared += self._patiently(lambda w, _: keeping.drop_outdated(w, found, epochs))  # noqa: B023
            if after is None:
                return cleared
            at = after

    def register(self, namespace_root: bytes, fields: dict[str, str]) -> None:
        """Make a namespace known with its labels; changes nothing after the first time."""
        if namespace_root in self._labelled:
            return
        self._patiently(lambda w, spaces: spaces.put(w, namespace_root, fields, 0))
        if len(self._labelled) >= MOST // 4:  # one that was forgotten is to get its labels again
            self._labelled.clear()
        self._labelled.add(namespace_root)
        with contextlib.suppress(
            StoreError
        ):  # on a full disk the labels, and no more, are lost with the ledger
            self._save_labels()

    def _save_labels(self) -> None:
        if self.kind == "memory":  # is never rebuilt
            return
        known = self._known()
        with self._labels_lock:
            if not self._session.store.locks.lock(
                LABELS, exclusive=True, until=time.monotonic() + PATIENT_SECONDS
            ):
                raise StoreError(
                    f"another process keeps writing the labels of {self.directory}: is it stopped?"
                )
            try:
                save_labels(self.directory, known)
            except OSError as error:
                raise StoreError(
                    f"the namespaces of {self.directory} cannot be written ({error.strerror})"
                ) from error
            finally:
                self._session.store.locks.unlock(LABELS)
