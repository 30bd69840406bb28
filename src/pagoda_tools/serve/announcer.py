"""Announces in a directory which chunks the stores of this machine have, so that other machines
find them.

`server` starts one `Announcer` if the option `lookup` is set. It reads the mapped columns of the
stores and takes no lock of a ledger, so engines do not wait. Announcements are hints
(`pagoda.tiers.remote.peer_directory`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagoda.base.errors import ClosedError, StoreError
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import NO_THREAD, Event, begin
from pagoda.ledger.columns import NOT_READY
from pagoda.tiers.remote.peer_directory import (
    PERIOD_SECONDS,
    PeerDirectory,
    PeerDirectoryConnection,
)
from pagoda_tools.serve.served_stores import ServedStore, ServedStores

_ROUND_SECONDS = 1.0
# in so many rounds every chunk is announced again, a part in each
_ROUNDS = PERIOD_SECONDS // 3
_MOST_KEYS = 20_000  # in one round; more keys follow in the next rounds
_CALL_SECONDS = 5.0
_END_SECONDS = 1.0

_logger = guarded_logger("pagoda.serve")


class Announcer:
    """A thread that announces new chunks each second, and all chunks a few times per period, until
    `close`.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        url: Callable[[str], str],
        stores: ServedStores,
        counts: Counter[str],
    ) -> None:
        """Start. `url` returns the URL of this server for other machines, from its address towards
        the directory.

        Counts "announced" and "announce_failures" in `counts`. Raises StoreError if no thread can
        be started.
        """
        self._directory = directory
        self._url = url
        self._stores = stores
        self._counts = counts
        self._sent: weakref.WeakKeyDictionary[ServedStore, NDArray[np.uint64]] = (
            weakref.WeakKeyDictionary()
        )
        self._connection: PeerDirectoryConnection | None = None
        self._ended = Event()
        self._log = RateLimitedLog()
        self._thread = threading.Thread(
            target=self._run, name="pagoda-announcer", daemon=True
        )
        if not begin(self._thread):
            raise StoreError(
                f"chunks are not announced to other machines: {NO_THREAD}"
            )

    def close(self) -> None:
        """Stop soon, and wait for the end. Announced hints expire."""
        self._ended.set()
        if (connection := self._connection) is not None:
            connection.abort()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        number = 0
        while not self._ended.wait(_ROUND_SECONDS):
            number += 1
            try:
                self._announce(number)
            except Exception as error:  # noqa: BLE001
                # a background thread: it continues with the next round
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                if not self._ended.is_set():
                    self._counts["announce_failures"] += 1
                    said = f"{type(error).__name__}: {error}"
                    text = (
                        f"{self._directory.address}: {said}: other machines may not find new "
                        "chunks of this one"
                    )
                    self._log.warn(_logger, Reason.IO_ERROR, text)

    def _announce(self, number: int) -> None:
        """Announce the new chunks, and this round's part of the others."""
        until = time.monotonic() + _CALL_SECONDS
        if self._connection is None:
            connection = self._directory.connection()
            self._connection = connection
            connection.open(until)
        url = self._url(self._connection.local_host())
        left = _MOST_KEYS
        for store in self._stores.stores():
            with contextlib.suppress(ClosedError), store.using():
                slots, generations, keys = self._due(store, number, left)
                self._connection.announce(keys, url, until)
                self._sent[store][slots] = generations
                self._counts["announced"] += len(keys)
                left -= len(keys)

    def _due(
        self, store: ServedStore, number: int, most: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], list[bytes]]:
        """Return the slots to announce, new ones first, with generations and keys. A torn row is
        only a wrong hint.
        """
        columns = store.ledger.columns
        generations = columns.generation.copy()
        told = self._sent.setdefault(store, np.zeros_like(generations))
        ready = columns.last_use != NOT_READY
        new = np.flatnonzero(ready & (generations != told))
        turn = np.arange(number % _ROUNDS, columns.slots, _ROUNDS)
        slots = np.concatenate(
            [new, turn[ready[turn] & (generations[turn] == told[turn])]]
        )[:most]
        return (
            slots,
            generations[slots],
            [row.tobytes() for row in columns.keys[slots]],
        )
