"""The statistics of one store at one moment: `pagoda stats` and `pagoda top` show it, a server may
send it.

Calls `admin`; touches no recency and no counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pagoda.base.clock import Deadline
from pagoda.base.metrics import COUNTERS
from pagoda.ledger import admin
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.outcomes import NamespaceRow
from pagoda.ledger.request_meters import Meter
from pagoda.ledger.request_ring import RecentRequest
from pagoda.ledger.root_usage import holdings, root_limit
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
            gauges={
                **numbers,
                "members": numbers["members"] - 1,
                "grown_bytes": _grown_bytes(ledger, numbers),
            },
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
    def grown_bytes(self) -> int:
        """The bytes of all slots that it may have, also of those that have no memory yet: what a
        store is full of.
        """
        return self.gauges.get("grown_bytes", self.size_bytes)

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


def _grown_bytes(ledger: Ledger, numbers: Mapping[str, int]) -> int:
    """Return the bytes of the slots that a store may have: those with pages, and what its root has
    left for more.
    """
    slot_bytes = ledger.slot_bytes or ledger.chunk_bytes
    slots = numbers["slots"]
    now = (slots - numbers["unbacked"]) * slot_bytes
    if not numbers["unbacked"]:
        return now
    most = slots * slot_bytes
    try:
        every = holdings(ledger.directory.parent)
    except OSError:  # it is being removed
        return most
    limit = root_limit(every)
    others = sum(one.nbytes for one in every if one.directory != ledger.directory)
    left = (most if limit is None else min(most, limit)) - others
    return max(now, left // slot_bytes * slot_bytes)
