"""Rebuild the ledger of a disk tier in the background, from the headers of its slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda import codec
from pagoda.base.fork import per_process
from pagoda.base.signal_safe_threads import Event
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, ScannedChunk, rebuild
from pagoda.tiers.base import Bytes

BATCH_SLOTS = 64
_RETRY_SECONDS = 0.2


class _Scans:
    """The stores that threads of this process are scanning."""

    @per_process
    def lock(self) -> threading.Lock:
        """Return the lock that guards them."""
        return threading.Lock()

    @per_process
    def stores(self) -> set[Path]:
        """Return their directories."""
        return set()


_scans = _Scans()


@dataclass(eq=False)
class HeaderScan:
    """Reads all headers that the ledger has not seen. For one thread.

    A header is trusted by its own checksum. The header proves nothing about the payload, which
    reads verify.
    """

    _ledger: Ledger  # the ledger to fill
    # returns the header pages of [first, first + count); OSError if it cannot
    _read_headers: Callable[[int, int], Sequence[Bytes]]
    _layout: KVLayout  # headers of chunks of other layouts are ignored
    # called when headers cannot be read, with the error and what was tried
    _on_error: Callable[[OSError, str], object]

    def run(self, stop: Event) -> None:
        """Scan unless another thread or process does; return when all headers are read, or on
        `stop`.
        """
        while not stop.is_set() and len(rebuild.unscanned(self._ledger)):
            # another process or thread scans; if it dies, this one takes over
            if not self._begin():
                stop.wait(_RETRY_SECONDS)
                continue
            try:
                self._scan(stop)
            finally:
                rebuild.end_scan(self._ledger)
                _scans.stores.discard(self._ledger.directory)

    def _begin(self) -> bool:
        directory = self._ledger.directory
        # the ledger's lock excludes other processes, this one other tiers of this process
        with _scans.lock:
            if directory in _scans.stores or not rebuild.begin_scan(self._ledger):
                return False
            _scans.stores.add(directory)
            return True

    def _scan(self, stop: Event) -> None:
        while not stop.is_set():
            left = rebuild.unscanned(self._ledger)
            if not len(left):
                return
            count = min(BATCH_SLOTS, len(left))
            found = self._read(left[0], count)
            rebuild.absorb(self._ledger, left[0], found)

    def _read(self, first: int, count: int) -> list[ScannedChunk | None]:
        try:
            pages = self._read_headers(first, count)
        except OSError as error:
            if count == 1:
                self._on_error(error, f"reading the header of slot {first}")
                return [None]
            return [
                found
                for slot in range(first, first + count)
                for found in self._read(slot, 1)
            ]
        return [
            self._found(slot, codec.parse(page))
            for slot, page in enumerate(pages, first)
        ]

    def _found(
        self, slot: int, header: codec.Header | None
    ) -> ScannedChunk | None:
        if (
            header is None
            or header.slot != slot
            or header.store_id != self._ledger.store_id
        ):
            return None
        if (header.fingerprint, header.length) != (
            self._layout.fingerprint,
            self._layout.chunk_bytes,
        ):
            return None
        return ScannedChunk(
            key=header.key,
            namespace_root=header.namespace,
            epoch=header.epoch,
            position=header.position,
            tokens=header.tokens,
            sequence=header.sequence,
        )
