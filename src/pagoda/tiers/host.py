"""The host tier: a ledger and a slab in memory. Nothing in it runs in the background but the slab's populating."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda import policy as policies
from pagoda.clock import Clock
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Busy, Ledger, Present, Reserved, StoreSpec
from pagoda.metrics import Reason
from pagoda.slab import MemorySlab
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, ended, follows, ledger_bytes, runs
from pagoda.tiers.copies import Copies


class HostTier(Copies):
    """Chunks in host memory, shared by all processes of the machine unless private. Saves and loads end at once.

    Thread-safe and fork-safe. The cache reserves, copies and commits in place through `ledger` and `slab`; the methods
    here are for all others.
    """

    name = "host"

    def __init__(
        self, layout: KVLayout, ledger: Ledger, slab: MemorySlab, *, deadline_seconds: float = 1.0
    ) -> None:
        """Take over `ledger` and `slab`, which belong together: `close()` closes them."""
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.ledger = ledger
        self.slab = slab
        self.deadline_seconds = deadline_seconds
        self._ended = False
        self._pid = os.getpid()
        self._device_pid = 0  # the process, of those that fork, that has registered the slab

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        path: Path,
        size_bytes: int,
        *,
        shared: bool = True,
        policy: str = policies.DEFAULT,
        populate: bool = True,
        deadline_seconds: float = 1.0,
        clock: Clock | None = None,
    ) -> HostTier:
        """Open or create the store of `layout` under the directory `path`. Raises StoreError, ValueError.

        Not `shared`: the memory is this process's own and goes with it; a forked child finds the tier closed.
        `populate`: fault pages in, in the background. `size_bytes` is for the slots; the ledger's own files
        (`ledger_bytes`) come on top.
        """
        slots = layout.slots_in(size_bytes)
        if slots < 1:
            raise ValueError(
                f"a host tier of {size_bytes} bytes has no room for one chunk of {layout.slot_bytes}"
            )
        spec = StoreSpec(
            root=path,
            name=layout.fingerprint,
            kind="memory",
            slots=slots,
            slot_bytes=layout.slot_bytes if shared else 0,
            limit_bytes=size_bytes + ledger_bytes(slots) if shared else None,
            private=not shared,
        )
        ledger = Ledger.open(spec, policy=policy, clock=clock or Clock())
        try:
            slab = MemorySlab(ledger.slab_path if shared else None, ledger.slots, layout.slot_bytes)
        except BaseException:
            ledger.close()
            raise
        if populate:
            slab.populate(background=True)
        return cls(layout, ledger, slab, deadline_seconds=deadline_seconds)

    @property
    def _closed(self) -> bool:
        # Private memory is copied by a fork, its ledger is not: the child must not take one for the other's.
        return self._ended or (self.slab.path is None and self._pid != os.getpid())

    def register(self, namespace: Namespace) -> None:
        """Make the namespace known with its labels; idempotent, cheap."""
        self.ledger.register(namespace.root, namespace.fields())

    def use_device(self, device_index: int) -> None:
        """Register the slab with the GPUs, in the background; for every copy to or from one. Idempotent, cheap.

        First the ledger is told, so that slots outlive this process by a grace: a GPU may still be writing there.
        """
        if self._device_pid != os.getpid() and not self._closed:
            self._device_pid = os.getpid()
            self.slab.pin(device_index, before=self.ledger.uses_device)

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True,
    ) -> int:  # fmt: skip
        """How many leading keys are stored; copies nothing."""
        if self._closed:
            return 0
        match = self.ledger.match(
            keys, start=start, stamp=stamp, touch=touch, deadline_seconds=self.deadline_seconds
        )
        return len(match.slots)

    def contains(self, key: bytes) -> bool:
        """Whether the key is stored; touches nothing."""
        if self._closed:
            return False
        match = self.ledger.match([key], touch=False, deadline_seconds=self.deadline_seconds)
        return len(match.slots) > 0

    def in_flight(self, key: bytes) -> bool:
        """False: a save has ended when `save` returns."""
        return False

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        """True: nothing is in flight."""
        return True

    def flush(self, timeout: float) -> bool:
        """True: nothing is in flight."""
        return True

    def holders(self, key: bytes) -> list[str]:
        """Who keeps this chunk: names of pins."""
        return [owner for owner, keys in self.ledger.pins().items() if key in keys]

    # ---- saving and loading --------------------------------------------------------------------------------------

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Copy chunks into slots, run by run; the futures are done when it returns. See Tier.save."""
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        if self._closed:
            return [ended(False, Reason.CLOSED) for _ in chunks]
        stamp = self.ledger.stamp() if stamp is None else stamp
        fitting = [chunk for chunk in chunks if chunk.payload.nbytes <= self.slot_bytes]
        ends: deque[Future[Done]] = deque()
        for run in runs(fitting, self.ledger.window, follows):
            ends += self._save(run, namespace, stamp)
        return [
            ends.popleft() if chunk.payload.nbytes <= self.slot_bytes else self._dropped(Reason.TOO_LARGE)
            for chunk in chunks
        ]

    def _save(self, run: Sequence[Chunk], namespace: bytes, stamp: int) -> list[Future[Done]]:
        outcomes = self.ledger.reserve(
            [chunk.key for chunk in run],
            namespace=namespace,
            start=run[0].position,
            parent=run[0].parent,
            tokens=run[0].tokens,
            stamp=stamp,
            deadline_seconds=self.deadline_seconds,
        )
        ends: dict[int, Future[Done]] = {}
        reserved: dict[int, Reserved] = {}
        for n, outcome in enumerate(outcomes):
            if isinstance(outcome, Reserved):
                reserved[n] = outcome
            elif isinstance(outcome, Present):
                ends[n] = ended(True)
            elif isinstance(outcome, Busy):
                ends[n] = self._dropped(Reason.BUSY)
            else:
                ends[n] = ended(False, outcome.reason)  # counted by the ledger
        ends.update(self._fill(run, reserved))
        return [ends[n] for n in range(len(run))]

    def _fill(self, run: Sequence[Chunk], reserved: dict[int, Reserved]) -> dict[int, Future[Done]]:
        """Copy, then commit what is still valid; whatever is not committed is aborted."""
        ends: dict[int, Future[Done]] = {}
        left = dict(reserved)
        try:
            for n, place in reserved.items():
                if not self._copy_in(run[n], place.slot):
                    ends[n] = self._dropped(Reason.STALE)
            good = [n for n in reserved if n not in ends]
            kept = self.ledger.commit([reserved[n] for n in good]) if good else []
            for n, ok in zip(good, kept, strict=True):
                del left[n]
                ends[n] = ended(True) if ok else self._dropped(Reason.SUPERSEDED)
            self.ledger.count("stored_bytes", sum(kept) * self.chunk_bytes)
        finally:
            if left:
                self.ledger.abort(list(left.values()))
        return ends

    def _copy_in(self, chunk: Chunk, slot: int) -> bool:
        nbytes = self.chunk_bytes
        np.copyto(self.slab.view(slot)[:nbytes], chunk.payload[:nbytes])
        return chunk.still_valid()

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes
    ) -> list[Future[Done]]:
        """Copy chunks out of slots, then validate; the futures are done when it returns. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        if self._closed:
            return [ended(False, Reason.CLOSED) for _ in keys]
        return list(self._load(keys, buffers, start))

    def _load(self, keys: Sequence[bytes], buffers: Sequence[Bytes], start: int) -> Iterator[Future[Done]]:
        stamp = self.ledger.stamp()
        index = 0
        while index < len(keys):  # one transaction a run: a key that is not here ends one
            match = self.ledger.match(
                keys[index:], start=start + index, stamp=stamp, deadline_seconds=self.deadline_seconds
            )
            found = range(index, index + len(match.slots))
            for n, slot in zip(found, match.slots.tolist(), strict=True):
                np.copyto(buffers[n][: self.chunk_bytes], self.slab.view(slot)[: self.chunk_bytes])
            for ok in self.ledger.still_valid(match.slots, match.generations).tolist():
                yield self._loaded() if ok else self._missed(Reason.EVICTED)
            index = found.stop
            if index < len(keys):
                yield self._missed(match.reason or Reason.ABSENT)
                index += 1

    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        if self._closed:
            return ended(False, Reason.CLOSED)
        return next(self._load([key], [buffer], 0))

    def _loaded(self) -> Future[Done]:
        self.ledger.count("loaded_chunks")
        self.ledger.count("loaded_bytes", self.chunk_bytes)
        return ended(True)

    def _no_room(self) -> Reason | None:
        return Reason.CLOSED if self._closed else None

    def _missed(self, reason: Reason) -> Future[Done]:
        if reason is not Reason.LEDGER_BUSY:  # which the ledger counts
            self.ledger.count(f"miss_{reason}")
        return ended(False, reason)

    def _dropped(self, reason: Reason) -> Future[Done]:
        if not self._closed:  # a closed ledger counts no more
            self.ledger.count(f"drop_{reason}")
        return ended(False, reason)

    # ---- taking away ---------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Remove a chunk; False if it is not here."""
        return not self._closed and self.ledger.remove([key]) > 0

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all; what is being written will not appear."""
        return 0 if self._closed else self.ledger.clear(namespace)

    # ---- the whole -----------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Gauges and counters of the store, of all processes that share it."""
        return {} if self._closed else {**self.ledger.gauges(), **self.ledger.counters()}

    def close(self, timeout: float = 5.0) -> None:
        """Let go of the slab and the ledger; idempotent. Views of slots stay readable."""
        if not self._ended:
            self._ended = True
            self.slab.close(timeout)
            self.ledger.close()
