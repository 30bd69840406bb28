"""The statistics of one store at one moment: `pagoda stats` and `pagoda top` show it, a server may
send it.

Calls `admin`; touches no recency and no counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pagoda.base.clock import Deadline
from pagoda.base.metrics import COUNTERS
from pagoda.ledger import admin
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.outcomes import NamespaceRow
from pagoda.ledger.request_meters import Meter
from pagoda.ledger.request_ring import RecentRequest
from pagoda.ledger.session import PATIENT_SECONDS


class StoreStats(NamedTuple):
    """The statistics of one store at one moment."""

    directory: Path
    tier: str
    kind: str
    slot_bytes: int
    gauges: dict[str, int]
    counters: dict[str, int]
    pins: dict[str, int]  # owner -> chunks
    namespaces: list[NamespaceRow]  # the one with most chunks first
    # requests that were counted in this store, the newest first
    requests: list[RecentRequest]
    meters: Sequence[Meter] = ()  # what each model and tenant got

    @classmethod
    def of(
        cls, ledger: Ledger, deadline_seconds: float = PATIENT_SECONDS
    ) -> StoreStats:
        """Read all of it. StoreError if that takes longer. Any thread."""
        deadline = Deadline(deadline_seconds)
        numbers = admin.numbers(ledger, deadline_seconds)
        counters = {name: numbers.pop(name) for name in COUNTERS}
        pins = admin.list_pins(ledger, deadline.remaining())
        namespaces = admin.list_namespaces(ledger, deadline.remaining()).values()
        return cls(
            directory=ledger.directory,
            tier=ledger.tier,
            kind=ledger.kind,
            # private slots are not in a file, so the ledger knows of payloads only
            slot_bytes=ledger.slot_bytes or ledger.chunk_bytes,
            # while it reads, this process is a member too; people want to know about the others
            gauges={**numbers, "members": numbers["members"] - 1},
            counters=counters,
            pins={owner: len(keys) for owner, keys in pins.items()},
            namespaces=sorted(namespaces, key=lambda row: -row.chunks),
            requests=ledger.requests.newest(),
            meters=ledger.session.meters(),
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots that have memory or disk space."""
        return (self.gauges["slots"] - self.gauges["unbacked"]) * self.slot_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the slots that hold a chunk."""
        return self.gauges["ready"] * self.slot_bytes

    def as_json(self) -> dict[str, object]:
        """Return all of it in plain types, except the directory, a Path."""
        namespaces = [
            {
                "namespace": row.root.hex(),
                "chunks": row.chunks,
                "fields": row.fields,
            }
            for row in self.namespaces
        ]
        requests = [
            {**request._asdict(), "namespace": request.namespace.hex()}
            for request in self.requests
        ]
        meters = [meter._asdict() for meter in self.meters]
        return {
            **self._asdict(),
            "namespaces": namespaces,
            "requests": requests,
            "meters": meters,
        }
