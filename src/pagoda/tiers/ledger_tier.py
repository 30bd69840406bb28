"""What the host tier and the disk tier have in common: the chunks of one store, which its ledger
finds.

Saves of the disk tier wait in a queue, in which its chunks are found too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TypeVar

from pagoda.base import recorded_tiers
from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.keys import Namespace
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.ledger.ledger import OpenSlab, discard_empty
from pagoda.ledger.stores_under_root import stores_in
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.tiers.base import clamp_deadline, confirm_each
from pagoda.tiers.put_and_load import BlockingCalls

_S = TypeVar("_S", bound=OpenSlab)


@contextlib.contextmanager
def opened_store(
    name: str,
    spec: StoreSpec,
    policy: str,
    cost: PrefillCost | None,
    clock: Clock | None,
    open_slab: Callable[[Ledger], _S],
) -> Iterator[tuple[Ledger, _S, bool]]:
    """Open or create a store for the tier `name`, and add it to the register unless it is private.
    Give the block also whether this call made it.

    Raises StoreError, ValueError. If that or the block fails, nothing stays open, and no store that
    was made for it keeps its space.
    """
    # also true if this user may not see it
    made = not os.path.exists(spec.root / spec.name)
    ledger = Ledger.open(spec, policy=policy, clock=clock or Clock(), cost=cost)
    with contextlib.ExitStack() as undo:
        # false if another process was faster
        made = made and ledger.session.store.made
        if made:
            undo.callback(discard_unused, ledger.directory)
        undo.callback(ledger.close)
        slab = open_slab(ledger)
        undo.callback(slab.close)
        if not spec.private:
            slots = sum(map(len, ledger.pages.backed_ranges())) if made else 0
            recorded_tiers.add(name, spec.root, slots * spec.slot_bytes)
        yield ledger, slab, made
        undo.pop_all()


def discard_unused(directory: Path) -> None:
    """Remove a store that was made for a tier that could not be opened, and that is closed now: it
    would keep its space for ever. It stays if others have it open or have stored a chunk in it.
    """
    if discard_empty(directory, Clock()):
        with contextlib.suppress(OSError):
            if not stores_in(directory.parent):
                recorded_tiers.remove(os.path.realpath(directory.parent))


class LedgerTier(BlockingCalls):
    """A tier over the ledger of one store. Thread-safe.

    A subclass has `_closed`: nothing is found then.
    """

    ledger: Ledger
    _closed: bool
    made = False
    """Whether the call that opened this tier also made its store."""

    def undo_opening(self) -> None:
        """Close the tier of a cache that could not be opened; remove a store that was made for it,
        see `discard_unused`.
        """
        self.close()
        if self.made:
            discard_unused(self.ledger.directory)

    def register(self, namespace: Namespace) -> None:
        """Record the namespace with its labels. Idempotent and cheap."""
        self.ledger.namespaces.register(namespace.root, namespace.fields())

    # ---- the queue of saves: by default there is none --------------------------------------------

    def in_flight(self, key: bytes) -> bool:
        """Return whether a store of this key is queued or running; by default `store` waits for its
        end.
        """
        return False

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """Wait until the saves of these keys have ended; return False after `timeout` seconds."""
        return True

    def _drop_reason(self) -> Reason | None:
        return Reason.CLOSED if self._closed else None

    def _queued(self, keys: Sequence[bytes]) -> Collection[bytes]:
        """Return which of these keys are queued, or are being saved."""
        return ()

    def _cancel_writes(
        self,
        reason: Reason,
        *,
        key: bytes | None = None,
        namespace: bytes | None = None,
        wait_seconds: float = 0.0,
    ) -> tuple[int, int]:
        """Cancel the saves of a key or a namespace; return how many were queued, and how many were
        running.
        """
        return 0, 0

    def _queue_stats(self) -> Mapping[str, int]:
        return {}

    # ---- finding ---------------------------------------------------------------------------------

    def match_prefix(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        touch: bool = True,
        deadline_seconds: float | None = None,
    ) -> int:
        """Return how many leading keys are stored; copies nothing."""
        if self._closed or self.resting:
            return 0
        slots, *_ = self.ledger.find_prefix(
            keys,
            start=start,
            namespace=namespace,
            stamp=stamp,
            touch=touch,
            deadline_seconds=clamp_deadline(
                self.deadline_seconds, deadline_seconds
            ),
        )
        return len(slots)

    def match_each(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        stamp: int | None = None,
        namespace: bytes | None = None,
        deadline_seconds: float | None = None,
    ) -> list[bool]:
        """Return for each key whether it is stored, also behind absent ones: one read of the
        tables, and a `match_prefix` for each run that they show.
        """
        if self._closed or self.resting:
            return [False] * len(keys)
        seconds = clamp_deadline(self.deadline_seconds, deadline_seconds)
        until = time.monotonic() + seconds
        # read first: a chunk that leaves the queue after this is in the ledger
        queued = self._queued(keys)
        stored = self.ledger.which(keys, seconds)
        return confirm_each(
            [
                there or key in queued
                for key, there in zip(keys, stored, strict=True)
            ],
            lambda begin, stop, left: self.match_prefix(
                keys[begin:stop],
                start=None if start is None else start + begin,
                stamp=stamp,
                namespace=namespace,
                deadline_seconds=left,
            ),
            until - time.monotonic(),
        )

    def contains(
        self, key: bytes, *, deadline_seconds: float | None = None
    ) -> bool:
        """Return whether `match_prefix` would find this key; does not update recency."""
        found = self.match_prefix(
            [key], start=None, touch=False, deadline_seconds=deadline_seconds
        )
        return found > 0

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        """Update the recency of the stored part of a run, in one transaction. See Tier.touch."""
        if self._closed or self.resting:
            return None
        # read first: a chunk that leaves the queue after this is in the ledger
        queued = self._queued(keys)
        here = self.ledger.touch(
            keys,
            start=start,
            stamp=stamp,
            asked=asked,
            deadline_seconds=self.deadline_seconds,
        )
        if here is None or not queued:
            return here
        return [
            present or key in queued
            for key, present in zip(keys, here, strict=True)
        ]

    def holders(self, key: bytes) -> list[str]:
        """Return what keeps this chunk from eviction: names of pins, "in flight"."""
        pins = admin.list_pins(self.ledger)
        owners = [owner for owner, keys in pins.items() if key in keys]
        if self.in_flight(key):
            owners.append("in flight")
        return owners

    # ---- removing, statistics --------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Remove a chunk, queued or stored; return False if it is not here. Waits for a save of it
        that is running.
        """
        if self._closed:
            return False
        cancelled = self._cancel_writes(
            Reason.REMOVED, key=key, wait_seconds=self.deadline_seconds
        )
        return admin.remove(self.ledger, [key]) > 0 or any(cancelled)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all; saves in flight store nothing.
        Return how many.
        """
        if self._closed:
            return 0
        cancelled = self._cancel_writes(Reason.CLEARED, namespace=namespace)
        return admin.clear(self.ledger, namespace) + sum(cancelled)

    def stats(self) -> Mapping[str, int]:
        """Return gauges and counters of the store, of all processes that share it; those of a queue
        are this process's.

        StoreError if the ledger does not answer.
        """
        if self._closed:
            return {}
        numbers = admin.numbers(self.ledger, self.deadline_seconds)
        return {**numbers, **self._queue_stats()}
