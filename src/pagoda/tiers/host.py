"""The host tier: a ledger and a slab in memory. It works on the caller's thread, except for
faulting pages in.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda import policy as policies
from pagoda.base.clock import Clock, Deadline
from pagoda.base.errors import ClosedError
from pagoda.base.fork import here, per_process
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Condition
from pagoda.base.store_place import (
    FIRST_PIECE_BYTES,
    require_memory,
    require_room_for_one,
)
from pagoda.layout import KVLayout
from pagoda.ledger import (
    Busy,
    Ledger,
    Present,
    Reserved,
    SlotWriter,
    StoreSpec,
)
from pagoda.ledger.store_state import FORMAT
from pagoda.policy.prefill_cost import cost_of
from pagoda.slab import MemorySlab
from pagoda.tiers.base import (
    Bytes,
    Chunk,
    Done,
    check_keys,
    check_sizes,
    clamp_deadline,
    completed_future,
    follows,
    runs,
)
from pagoda.tiers.ledger_tier import LedgerTier, opened_store


class HostTier(LedgerTier):
    """Stores chunks in host memory, shared by all processes of the machine unless private. Saves
    and loads end at once.

    Thread-safe and fork-safe. The cache reserves, copies and commits in place through `ledger` and
    `slab`; the methods of Tier are for other callers.
    """

    name = "host"
    believed_seconds = 0.0  # a lookup costs almost nothing

    def __init__(
        self,
        layout: KVLayout,
        ledger: Ledger,
        slab: MemorySlab,
        *,
        deadline_seconds: float = 1.0,
    ) -> None:
        """Take over `ledger` and `slab`, which belong together; `close()` closes them."""
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.ledger = ledger
        self.slab = slab
        self.deadline_seconds = deadline_seconds
        self._ended = False
        self._process = here()
        # the process that registered the slab (a forked child has not), and the ledger's growth at
        # that time
        self._registered = -1, 0, 0
        self._late = False  # whether the last copy that ends must close the store

    @per_process
    def _changed(self) -> Condition:
        return Condition()

    @per_process
    def _copies(self) -> set[object]:
        """Return the copies in progress. Changed by single calls of built-in functions, which no
        signal handler interrupts.
        """
        return set()

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        path: str | os.PathLike[str],
        size_bytes: int,
        *,
        shared: bool = True,
        policy: str = policies.DEFAULT,
        objective: str = policies.DEFAULT_OBJECTIVE,
        populate: bool = True,
        deadline_seconds: float = 1.0,
        clock: Clock | None = None,
        grows: bool = False,
    ) -> HostTier:
        """Open or create the store of `layout` under the directory `path`. Raises StoreError,
        ValueError.

        Not `shared`: the memory is private and freed with this process; a forked child finds the
        tier closed.
        `populate`: fault pages in, in the background. `size_bytes` is for the slots. The ledger's
        files need about 5 MiB and 1 KiB per slot in addition.
        `grows`: `size_bytes` is the most that it takes. It begins with some MiB, and takes more as
        it fills, as long as the machine, the cgroup and the file system have some to spare. Private
        memory is then taken page by page, as it is used.
        """
        require_room_for_one("host", size_bytes, layout.slot_bytes)
        slots = layout.slots_in(size_bytes)
        spec = StoreSpec(
            root=Path(path),
            # versions with other formats have other stores
            name=f"{layout.fingerprint}.{FORMAT}",
            kind="memory",
            slots=slots,
            slot_bytes=layout.slot_bytes if shared else 0,
            limit_bytes=size_bytes if shared else None,
            private=not shared,
            chunk_bytes=layout.chunk_bytes,
            first_bytes=FIRST_PIECE_BYTES if grows and shared else None,
        )
        require_memory(spec.root)

        def open_slab(ledger: Ledger) -> MemorySlab:
            if not shared:
                return MemorySlab(None, ledger.slots, layout.slot_bytes)
            return ledger.open_slab(
                lambda file: MemorySlab(
                    file, ledger.slots, layout.slot_bytes, ledger.page_guards
                )
            )

        cost = cost_of(objective, layout.chunk_tokens)
        with opened_store("host", spec, policy, cost, clock, open_slab) as opened:
            ledger, slab, made = opened
            if populate and shared:
                backed = ledger.pages.backed_ranges()
                slab.populate(background=True, backed=backed)
                last = backed[-1].stop if backed else 0
                ledger.space.begin_mapped(slab, last)
            elif populate and not grows:
                slab.populate(background=True)
            tier = cls(layout, ledger, slab, deadline_seconds=deadline_seconds)
            tier.made = made
        return tier

    @property
    def _closed(self) -> bool:  # type: ignore[override]
        # A fork copies private memory but not its ledger: the child must not use the memory with
        # another ledger.
        return self._ended or (self.slab.path is None and self._process != here())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Delay the end of `close` during copies into and out of slots, so that no other process
        gets the slots.

        Raises ClosedError once the tier is closed.
        """
        mine = object()
        copies = self._copies
        try:
            copies.add(mine)
            if self._ended:
                raise ClosedError("the host tier is closed")
            yield
        finally:
            # by one built-in function: in any other call a signal handler may raise
            copies.discard(mine)
            if self._ended:
                self.end_copies(())

    def begin_copies(self, reserved: Sequence[Reserved]) -> None:
        """Record copies into slots that may last longer than the `copying` block: they last until
        `end_copies`.
        """
        self._copies.update(reserved)

    def end_copies(self, reserved: Sequence[Reserved]) -> None:
        """Record that these copies have ended; does nothing for copies that have already ended."""
        self._copies.difference_update(reserved)
        if not self._ended:  # `close` sets `_ended` before it reads `_copies`
            return
        changed = self._changed
        with changed:
            last = self._late and not self._copies
            self._late = self._late and bool(self._copies)
            changed.notify_all()
        if last:
            self._close_store()

    def use_device(self, device_index: int) -> None:
        """Register the slab with the GPUs, in the background. Call it before each GPU copy.
        Idempotent and cheap.

        First it is recorded in the ledger, so that slots stay reserved for a grace period after
        this process: a GPU may still be writing to them. Slots that the ledger has gained since the
        last call are registered too.
        """
        grown = self.ledger.space.grown
        now = here(), grown, self.ledger.look_for_pages()
        if self._registered != now and not self._closed:
            # no thread can be started: the next copy tries again
            with contextlib.suppress(RuntimeError):
                self.slab.pin(device_index, backed=self.ledger.register_device)
                self._registered = now

    # ---- saving and loading ----------------------------------------------------------------------

    def store(
        self,
        chunks: Sequence[Chunk],
        namespace: bytes,
        *,
        stamp: int | None = None,
    ) -> list[Future[Done]]:
        """Copy chunks into slots, run by run. The futures are done when it returns. See
        Tier.store.
        """
        check_keys([chunk.key for chunk in chunks])
        check_sizes(
            "payload", [chunk.payload for chunk in chunks], self.chunk_bytes
        )
        try:
            with self.copying():
                return self._save_all(chunks, namespace, stamp)
        except ClosedError:
            return [completed_future(False, Reason.CLOSED) for _ in chunks]

    def _save_all(
        self, chunks: Sequence[Chunk], namespace: bytes, stamp: int | None
    ) -> list[Future[Done]]:
        if self._closed:
            return [completed_future(False, Reason.CLOSED) for _ in chunks]
        stamp = self.ledger.stamp() if stamp is None else stamp
        fitting = [
            chunk for chunk in chunks if chunk.payload.nbytes <= self.slot_bytes
        ]
        ends: deque[Future[Done]] = deque()
        for run in runs(fitting, self.ledger.window, follows):
            ends += self._save(run, namespace, stamp)
        return [
            ends.popleft()
            if chunk.payload.nbytes <= self.slot_bytes
            else self._dropped(Reason.TOO_LARGE)
            for chunk in chunks
        ]

    def _save(
        self, run: Sequence[Chunk], namespace: bytes, stamp: int
    ) -> list[Future[Done]]:
        ends: dict[int, Future[Done]] = {}
        copied: dict[int, Reserved] = {}
        with SlotWriter(self.ledger, self.slab) as writer:
            outcomes = writer.reserve(
                [chunk.key for chunk in run],
                namespace=namespace,
                start=run[0].position,
                parent=run[0].parent,
                tokens=run[0].tokens,
                stamp=stamp,
                deadline_seconds=self.deadline_seconds,
            )
            for n, (chunk, outcome) in enumerate(zip(run, outcomes, strict=True)):
                if isinstance(outcome, Reserved):
                    slot = writer.views([outcome])[0]
                    np.copyto(
                        slot[: self.chunk_bytes],
                        chunk.payload[: self.chunk_bytes],
                    )
                    if chunk.still_valid():
                        copied[n] = outcome
                    else:
                        ends[n] = self._dropped(Reason.STALE)
                elif isinstance(outcome, Present):
                    ends[n] = completed_future(True)
                elif isinstance(outcome, Busy):
                    ends[n] = self._dropped(Reason.BUSY)
                else:
                    # counted by the ledger
                    ends[n] = completed_future(False, outcome.reason)
            if copied:
                kept = writer.commit(list(copied.values()), self.deadline_seconds)
                for n, ok in zip(copied, kept, strict=True):
                    ends[n] = (
                        completed_future(True)
                        if ok
                        else completed_future(False, Reason.SUPERSEDED)
                    )
        return [ends[n] for n in range(len(run))]

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Bytes],
        *,
        start: int | None = 0,
        namespace: bytes | None,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:
        """Copy chunks out of slots, then validate them. The futures are done when it returns. See
        Tier.load.
        """
        check_keys(keys)
        check_sizes("buffer", buffers, self.chunk_bytes, len(keys))
        if self._closed:
            return [completed_future(False, Reason.CLOSED) for _ in keys]
        stamp = self.ledger.stamp()
        deadline = Deadline(
            clamp_deadline(self.deadline_seconds, deadline_seconds)
        )
        ends: list[Future[Done]] = []
        # one transaction per run: an absent key ends it
        while (at := len(ends)) < len(keys):
            match = self.ledger.match_prefix(
                keys[at:],
                start=None if start is None else start + at,
                namespace=namespace,
                stamp=stamp,
                deadline_seconds=deadline.remaining(),
            )
            for buffer, slot in zip(
                buffers[at:], match.slots.tolist(), strict=False
            ):
                np.copyto(
                    buffer[: self.chunk_bytes],
                    self.slab.view(slot)[: self.chunk_bytes],
                )
            for ok in self.ledger.still_valid(
                match.slots, match.generations
            ).tolist():
                ends.append(
                    self._loaded() if ok else self._missed(Reason.EVICTED)
                )
            if len(ends) < len(keys):
                ends.append(self._missed(match.reason or Reason.ABSENT))
        return ends

    def _loaded(self) -> Future[Done]:
        self.ledger.count({"loaded_chunks": 1, "loaded_bytes": self.chunk_bytes})
        return completed_future(True)

    def _count(self, name: str) -> None:
        if not self._closed:  # a closed ledger no longer counts
            self.ledger.count({name: 1})

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Close the slab and the ledger. Idempotent. Views of slots stay readable.

        Waits for copies in progress up to `timeout`. Copies that take longer keep their slots, and
        the last one closes the store.
        """
        if self._ended:
            return
        self._ended = True
        deadline = Deadline(timeout)
        changed = self._changed
        with changed:
            self._late = not changed.wait_for(lambda: not self._copies, timeout)
            late = self._late
        if not late:
            self._close_store(max(0.1, deadline.remaining()))

    def _close_store(self, timeout: float = 5.0) -> None:
        self.slab.close(timeout)
        self.ledger.close()
