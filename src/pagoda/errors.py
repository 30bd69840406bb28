"""The exceptions of PagodaKV. They are for wrong use and for stores that cannot be opened.

    PagodaError
     ├── StoreError            a store cannot be opened or used; the message carries the remedy
     │    ├── NoRoomError      too little memory or disk for what was asked
     │    └── LedgerCorrupt    `Ledger.check` found numbers that do not add up
     ├── ClosedError           a call on something that was closed
     └── ConfigError           a bad setting (a ValueError too)

Other wrong use (a bad mask, a bad token id, a wrong layout) is a plain ValueError. Trouble at run time (full,
busy, corrupt, late) is never an exception: it is a miss or a drop with a `pagoda.metrics.Reason`.
"""

from __future__ import annotations

__all__ = ["ClosedError", "ConfigError", "LedgerCorrupt", "NoRoomError", "PagodaError", "StoreError"]


class PagodaError(Exception):
    """Everything that PagodaKV itself raises."""


class StoreError(PagodaError):
    """A store cannot be opened or used. The message says what to do."""


class NoRoomError(StoreError):
    """There is too little memory or disk (or too low a limit) for the store that was asked for."""


class LedgerCorrupt(StoreError):
    """The tables of a ledger contradict each other. The message carries the numbers."""


class ClosedError(PagodaError):
    """The object was closed; open it again."""


class ConfigError(PagodaError, ValueError):
    """A setting is unknown, malformed or contradicts another."""
