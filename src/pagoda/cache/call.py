"""The border between the cache and an engine: what goes wrong beyond it comes back as a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagoda.cache.counters import Tally
from pagoda.cache.deadline import Deadline
from pagoda.cache.ranges import named
from pagoda.errors import ClosedError
from pagoda.layout import KVLayout
from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes
from pagoda.transfer import Transfer

__all__ = ["Job", "Watched", "WrongUse"]

log = logging.getLogger("pagoda.cache")
T = TypeVar("T")


class WrongUse(Exception):
    """Carries the ValueError of a transfer past the border: the caller's KV does not fit its tokens."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


class Watched:
    """A transfer whose ValueErrors are told apart from trouble at run time. As thread-safe as the transfer."""

    def __init__(self, kv: Transfer, layout: KVLayout) -> None:
        if not hasattr(kv, "layout"):
            raise ValueError(
                f"kv is of type {type(kv).__name__}: pass a transfer, such as DenseKV or PagedKV"
            )
        if kv.layout.fingerprint != layout.fingerprint:
            raise ValueError(
                f"the KV has layout {kv.layout.fingerprint}, this cache {layout.fingerprint}: "
                "build both with one KVLayout"
            )
        self.layout = layout
        self.device_index: int | None = getattr(kv, "device_index", None)  # None: in a CPU's memory
        self.at_once: bool = getattr(kv, "at_once", False)  # chunks of the host tier are to come in one call
        self._kv = kv

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """As the transfer does; raises WrongUse for its ValueError."""
        try:
            with named("copy_down"):
                self._kv.to_slots(starts, slots)
        except ValueError as error:
            raise WrongUse(error) from error

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """As the transfer does; raises WrongUse for its ValueError."""
        try:
            with named("copy_up"):
                self._kv.from_slots(starts, slots)
        except ValueError as error:
            raise WrongUse(error) from error


@dataclass(frozen=True, eq=False)
class Job(Generic[T]):
    """One call of the engine, checked and ready to run, on this thread or another. Run it once."""

    name: str
    work: Callable[[], T]
    missed: Callable[[Reason, str], T]  # the answer when there is none
    deadline: Deadline
    tally: Tally

    def run(self) -> T:
        """Do it. Raises ValueError for wrong use only; whatever else goes wrong is a miss, counted and logged."""
        try:
            with named(self.name):
                return self.work()
        except WrongUse as wrong:
            raise wrong.error from None
        except ClosedError as trouble:
            return self.refused(Reason.CLOSED, str(trouble))
        except Exception as trouble:  # noqa: BLE001  # the border: whatever it is, the engine goes on
            return self.refused(Reason.IO_ERROR, f"{type(trouble).__name__}: {trouble}", trouble)

    def refused(self, reason: Reason, detail: str, trouble: Exception | None = None) -> T:
        """The answer without doing it."""
        self.tally.count(f"miss_{reason}")
        self.tally.warn(log, reason, detail, trouble)
        return self.missed(reason, detail)
