"""The ledger of a local tier: which chunk lies in which slot, for any number of processes, crash-safe."""

from pagoda.ledger.columns import Columns
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.outcome import (
    Busy,
    Found,
    Landed,
    Match,
    Miss,
    NamespaceRow,
    Outcome,
    Present,
    Refused,
    Report,
    Reserved,
    Row,
)
from pagoda.ledger.store import StoreSpec

__all__ = [
    "Busy",
    "Columns",
    "Found",
    "Landed",
    "Ledger",
    "Match",
    "Miss",
    "NamespaceRow",
    "Outcome",
    "Present",
    "Refused",
    "Report",
    "Reserved",
    "Row",
    "StoreSpec",
]
