"""The host tier: a ledger and a slab in memory. Nothing in it runs in the background but the slab's populating."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from pagoda import policy as policies
from pagoda.clock import Clock
from pagoda.dropped import WhenDropped
from pagoda.errors import ClosedError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Busy, Ledger, Present, Reserved, StoreSpec
from pagoda.ledger.state import FORMAT
from pagoda.metrics import Reason
from pagoda.slab import MemorySlab
from pagoda.threads import Condition
from pagoda.tiers import tier_registry
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, ended, follows, runs, within
from pagoda.tiers.blocking import Copies


class HostTier(Copies):
    """Chunks in host memory, shared by all processes of the machine unless private. Saves and loads end at once.

    Thread-safe and fork-safe. The cache reserves, copies and commits in place through `ledger` and `slab`; the methods
    here are for all others.
    """

    name = "host"
    believed_seconds = 0.0  # asking costs next to nothing

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
        self._under_way = _UnderWay(self._let_go)
        self._pid = os.getpid()
        self._lost: dict[Reserved, WhenDropped] = {}
        self._registered = 0, 0  # the process, of those that fork, that has registered the slab, and when

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
        (about 5 MiB and 1 KiB a slot) come on top.
        """
        slots = layout.slots_in(size_bytes)
        if slots < 1:
            raise ValueError(
                f"a host tier of {size_bytes} bytes has no room for one chunk of {layout.slot_bytes}"
            )
        spec = StoreSpec(
            root=path,
            name=f"{layout.fingerprint}.{FORMAT}",  # versions of other formats have stores of their own
            kind="memory",
            slots=slots,
            slot_bytes=layout.slot_bytes if shared else 0,
            limit_bytes=size_bytes if shared else None,
            private=not shared,
        )
        made = not os.path.exists(path / spec.name)  # false for what this user may not see
        ledger = Ledger.open(spec, policy=policy, clock=clock or Clock())
        try:
            slab = (
                ledger.open_slab(
                    lambda file: MemorySlab(file, ledger.slots, layout.slot_bytes, ledger.lending)
                )
                if shared
                else MemorySlab(None, ledger.slots, layout.slot_bytes)
            )
        except BaseException:
            ledger.close()
            raise
        if shared:
            tier_registry.note(
                "host", path, sum(map(len, ledger.backed())) * layout.slot_bytes if made else 0
            )
        if populate:
            slab.populate(background=True, backed=ledger.backed())
        return cls(layout, ledger, slab, deadline_seconds=deadline_seconds)

    @property
    def _closed(self) -> bool:
        # Private memory is copied by a fork, its ledger is not: the child must not take one for the other's.
        return self._ended or (self.slab.path is None and self._pid != os.getpid())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Around all copies into and out of slots: what is copied into is nobody else's before they have ended.

        Raises ClosedError once the tier is closed.
        """
        mine = object()
        try:
            self._under_way.begin(mine)
            yield
        finally:
            self._under_way.these.discard(mine)
            self._under_way.end()

    def begin_copies(self, reserved: Sequence[Reserved]) -> None:
        """Note copies into slots that may last longer than the `copying` that they are begun in: until `end_copies`."""
        self._under_way.these.update(reserved)

    def end_copies(self, reserved: Sequence[Reserved]) -> None:
        """They have ended; nothing for those that had ended before."""
        self._under_way.these.difference_update(reserved)
        self._under_way.end()

    def give_up_when_dropped(self, reserved: Sequence[Reserved], views: Bytes) -> None:
        """Free slots that nobody waits for once no I/O can touch them: when nobody holds `views`, their base."""
        self._lost[reserved[0]] = WhenDropped(views, partial(self._give_up, reserved))

    def _give_up(self, reserved: Sequence[Reserved]) -> None:
        self._lost.pop(reserved[0], None)
        self.ledger.abort(reserved)
        self.end_copies(reserved)

    def register(self, namespace: Namespace) -> None:
        """Make the namespace known with its labels; idempotent, cheap."""
        self.ledger.register(namespace.root, namespace.fields())

    def use_device(self, device_index: int) -> None:
        """Register the slab with the GPUs, in the background; for every copy to or from one. Idempotent, cheap.

        First the ledger is told, so that slots outlive this process by a grace: a GPU may still be writing there. What
        the ledger has grown by since the last call is registered, too.
        """
        now = os.getpid(), self.ledger.share.grown
        if self._registered != now and not self._closed:
            with contextlib.suppress(RuntimeError):  # no thread to be had: the next copy tries again
                self.slab.pin(device_index, backed=self.ledger.uses_device)
                self._registered = now

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        """How many leading keys are stored; copies nothing."""
        if self._closed:
            return 0
        match = self.ledger.match(
            keys, start=start, namespace=namespace, stamp=stamp, touch=touch,
            deadline_seconds=within(self.deadline_seconds, deadline_seconds),
        )  # fmt: skip
        return len(match.slots)

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        """Raise the recency of what is stored of a run. See Tier.touch."""
        if self._closed:
            return None
        return self.ledger.touch(
            keys, start=start, stamp=stamp, asked=asked, deadline_seconds=self.deadline_seconds
        )

    def contains(self, key: bytes, *, deadline_seconds: float | None = None) -> bool:
        """Whether the key is stored; touches nothing."""
        if self._closed:
            return False
        seconds = within(self.deadline_seconds, deadline_seconds)
        return len(self.ledger.match([key], touch=False, deadline_seconds=seconds).slots) > 0

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
        try:
            with self.copying():
                return self._save_all(chunks, namespace, stamp)
        except ClosedError:
            return [ended(False, Reason.CLOSED) for _ in chunks]

    def _save_all(self, chunks: Sequence[Chunk], namespace: bytes, stamp: int | None) -> list[Future[Done]]:
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
        try:
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
        except BaseException:
            self.ledger.give_up(outcomes, self.deadline_seconds)
            raise

    def _fill(self, run: Sequence[Chunk], reserved: dict[int, Reserved]) -> dict[int, Future[Done]]:
        """Copy, then commit what is still valid; whatever is not committed is aborted."""
        ends: dict[int, Future[Done]] = {}
        left = dict(reserved)
        try:
            for n, place in reserved.items():
                if not self._copy_in(run[n], place.slot):
                    ends[n] = self._dropped(Reason.STALE)
            good = [n for n in reserved if n not in ends]
            kept = (
                self.ledger.commit([reserved[n] for n in good], deadline_seconds=self.deadline_seconds)
                if good
                else []
            )
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
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Copy chunks out of slots, then validate; the futures are done when it returns. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        if self._closed:
            return [ended(False, Reason.CLOSED) for _ in keys]
        return list(self._load(keys, buffers, start, namespace, deadline_seconds))

    def _load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], start: int | None, namespace: bytes | None,
        deadline_seconds: float | None = None,
    ) -> Iterator[Future[Done]]:  # fmt: skip
        stamp = self.ledger.stamp()
        until = time.monotonic() + within(self.deadline_seconds, deadline_seconds)
        index = 0
        while index < len(keys):  # one transaction a run: a key that is not here ends one
            match = self.ledger.match(
                keys[index:], start=None if start is None else start + index, namespace=namespace,
                stamp=stamp, deadline_seconds=max(0.0, until - time.monotonic()),
            )  # fmt: skip
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
        return next(self._load([key], [buffer], None, namespace))

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
        """Gauges and counters of the store, of all processes that share it. StoreError if they are not to be had."""
        return {} if self._closed else self.ledger.numbers(self.deadline_seconds)

    def close(self, timeout: float = 5.0) -> None:
        """Let go of the slab and the ledger; idempotent. Views of slots stay readable.

        Copies that are under way are waited for; those that take longer keep their slots, and the last lets go then.
        """
        if not self._ended:
            self._ended = True
            until = time.monotonic() + timeout
            if self._under_way.close(timeout):
                self._let_go(max(0.1, until - time.monotonic()))

    def _let_go(self, timeout: float = 5.0) -> None:
        self.slab.close(timeout)
        self.ledger.close()


class _UnderWay:
    """Knows which copies are under way, and calls `then` when the last has ended, if that is after the close.

    Thread-safe. `these` is changed by single calls of built-in functions, which no signal handler interrupts.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self.renew()
        _counts.add(self)

    def renew(self) -> None:
        """Begin anew, in a forked child: the copies are its parent's."""
        self._changed = Condition()
        self.these: set[object] = set()
        self._closed = self._late = False

    def begin(self, copy: object) -> None:
        """One more; ClosedError after the close."""
        self.these.add(copy)
        if self._closed:
            raise ClosedError("the host tier is closed")

    def end(self) -> None:
        """Some are no longer among `these`."""
        if not self._closed:  # `close` looks at `these` after it has said so
            return
        with self._changed:
            last, self._late = self._late and not self.these, self._late and bool(self.these)
            self._changed.notify_all()
        if last:
            self._then()

    def close(self, timeout: float) -> bool:
        """Let none begin; True if none is under way any more, else the last to end does what is left to do."""
        with self._changed:
            self._closed = True
            self._late = not self._changed.wait_for(lambda: not self.these, timeout)
            return not self._late


_counts: weakref.WeakSet[_UnderWay] = weakref.WeakSet()


def _renew_in_child() -> None:
    for count in list(_counts):
        count.renew()


os.register_at_fork(after_in_child=_renew_in_child)
