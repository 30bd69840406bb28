"""The boundary between the cache and an engine: an error inside it is returned as a miss.

`Operations` and `HostSlots` make a `Call` of each checked call; its caller or a `CallExecutor` runs it. Calls and
copies are named ranges for profilers, switched on by `Config.profile`; switched off they cost a function call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagoda.cache.counters import CacheCounters
from pagoda.clock import Deadline
from pagoda.errors import ClosedError, ConfigError
from pagoda.layout import KVLayout
from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes
from pagoda.transfer import Transfer

__all__ = ["Call", "CheckedTransfer", "TransferMisuse", "enable_profiler_ranges", "profiler_range"]

log = logging.getLogger("pagoda.cache")
T = TypeVar("T")

_NO_RANGE: AbstractContextManager[object] = nullcontext()
_ranges_on = False


def enable_profiler_ranges(on: bool = True) -> None:
    """Switch the ranges of this process on or off. torch.profiler and NVTX see them as "pagoda.<call>".

    Raises ConfigError where torch is not installed.
    """
    global _ranges_on
    if on:
        try:
            import torch.profiler  # noqa: F401
        except ImportError as missing:
            raise ConfigError(f"profile = True: {missing}; install torch, or leave it out") from None
    _ranges_on = on


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context that a profiler shows under this name; it has no other effect."""
    if not _ranges_on:
        return _NO_RANGE
    from torch.profiler import record_function

    found: AbstractContextManager[object] = record_function(f"pagoda.{name}")
    return found


class TransferMisuse(Exception):
    """Carries the ValueError of a transfer out of `Call.run`: the caller's KV does not fit its tokens."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


class CheckedTransfer:
    """A transfer whose ValueErrors are told apart from errors at run time. As thread-safe as the transfer."""

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
        self.device_index: int | None = getattr(kv, "device_index", None)  # None: in CPU memory
        self.at_once: bool = getattr(kv, "at_once", False)  # wants all chunks of the host tier in one call
        self._kv = kv

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Do as the transfer does; raise TransferMisuse for its ValueError."""
        try:
            with profiler_range("copy_down"):
                self._kv.to_slots(starts, slots)
        except ValueError as error:
            raise TransferMisuse(error) from error

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Do as the transfer does; raise TransferMisuse for its ValueError."""
        try:
            with profiler_range("copy_up"):
                self._kv.from_slots(starts, slots)
        except ValueError as error:
            raise TransferMisuse(error) from error


@dataclass(frozen=True, eq=False)
class Call(Generic[T]):
    """One call of an engine, checked and ready to run once, on this thread or another; `cancel` from any thread."""

    name: str
    work: Callable[[], T]
    miss: Callable[[Reason, str], T]  # the answer when the work fails or is refused
    deadline: Deadline
    counters: CacheCounters

    def run(self) -> T:
        """Do the work. Raises ValueError for wrong use only; every other error is a miss, counted and logged."""
        try:
            with profiler_range(self.name):
                return self.work()
        except TransferMisuse as misuse:
            raise misuse.error from None
        except ClosedError as error:
            return self.refuse(Reason.CLOSED, str(error))
        except Exception as error:  # noqa: BLE001  # the boundary: the engine continues after any error
            return self.refuse(Reason.IO_ERROR, f"{type(error).__name__}: {error}", error)

    def refuse(self, reason: Reason, detail: str, error: Exception | None = None) -> T:
        """Return the miss without doing the work; count and log it."""
        self.counters.count(f"miss_{reason}")
        self.counters.warn(log, reason, detail, error)
        return self.miss(reason, detail)

    def cancel(self) -> None:
        """Let the work end as soon as it can."""
        self.deadline.cancel()
