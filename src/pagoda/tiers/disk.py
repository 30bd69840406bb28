"""The disk tier: a ledger and a slab in a file, with I/O threads in between."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from pagoda import policy as policies
from pagoda.clock import Clock
from pagoda.codec import HEADER_BYTES
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, StoreSpec
from pagoda.metrics import Reason
from pagoda.slab import FileSlab
from pagoda.threads import NO_THREAD
from pagoda.tiers import tier_registry
from pagoda.tiers.base import Bytes, Chunk, Done, check_sizes, ended, within
from pagoda.tiers.breaker import Breaker
from pagoda.tiers.disk_crew import DiskCrew
from pagoda.tiers.disk_io import Device, Slab
from pagoda.tiers.io_queue import Read, Write
from pagoda.tiers.queued_tier import Queued
from pagoda.tiers.writer import Judged, Writer

_ADMITTED_AT_ONCE = 64
_JUDGE_SECONDS = (
    0.05  # for the ledger, while a run is judged: what it does not say then is taken to be absent
)
_LOAD_LEASE_SECONDS = 10.0  # what a load has found stays until its turn comes

_GLANCE_SECONDS = 0.02  # for what is nice to know: a save does not wait


class _Slot(NamedTuple):
    slot: int
    generation: int


class DiskTier(Queued):
    """Chunks in one file, written and read by background threads; survives restarts, and a lost ledger (by a scan).

    Thread-safe and fork-safe. What is queued is found and read from the queue. `close()` or garbage collection ends the
    threads.
    """

    name = "disk"
    believed_seconds = 0.1  # asking costs little, and the policy is to learn of every use

    def __init__(
        self,
        layout: KVLayout,
        ledger: Ledger,
        slab: Slab,
        *,
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Take over `ledger` and `slab`, which belong together: `close()` closes them. StoreError if threads lack."""
        if io_threads < 1 or queue_chunks < 1:
            raise ValueError(
                f"io_threads and queue_chunks must be at least 1, got {io_threads}, {queue_chunks}"
            )
        self.chunk_bytes = layout.chunk_bytes
        self.slot_bytes = layout.slot_bytes
        self.ledger = ledger
        self.deadline_seconds = deadline_seconds
        self._breaker = Breaker(clock or Clock())
        device = Device(
            ledger,
            slab,
            chunk_bytes=layout.chunk_bytes,
            slot_bytes=layout.slot_bytes,
            fingerprint=layout.fingerprint,
            breaker=self._breaker,
            durable=durable,
        )
        self._crew = DiskCrew(device, io_threads)
        super().__init__(self._crew, io_threads, queue_chunks)
        try:
            if not self._threads.start():
                raise StoreError(f"the disk tier at {ledger.directory} cannot be opened: {NO_THREAD}")
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        path: Path,
        size_bytes: int,
        *,
        direct: bool | None = None,
        policy: str = policies.DEFAULT,
        durable: bool = False,
        io_threads: int = 2,
        queue_chunks: int = 64,
        deadline_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> DiskTier:
        """Open or create the store of `layout` under the directory `path`. Raises StoreError, ValueError.

        `size_bytes` is for the slots, headers included; the ledger's own files (about 5 MiB and 1 KiB a slot) come on
        top.
        """
        stride = HEADER_BYTES + layout.slot_bytes
        slots = size_bytes // stride
        if slots < 1:
            raise ValueError(f"a disk tier of {size_bytes} bytes has no room for one chunk of {stride}")
        spec = StoreSpec(
            root=path,
            name=layout.fingerprint,
            kind="file",
            slots=slots,
            slot_bytes=stride,
            limit_bytes=size_bytes,
        )
        made = not os.path.exists(path / spec.name)  # false for what this user may not see
        ledger = Ledger.open(spec, policy=policy, clock=clock or Clock())
        try:
            slab = ledger.open_slab(lambda file: FileSlab(file, ledger.slots, stride, direct))
        except BaseException:
            ledger.close()
            raise
        tier_registry.note("disk", path, sum(map(len, ledger.backed())) * stride if made else 0)
        return cls(
            layout,
            ledger,
            slab,
            durable=durable,
            io_threads=io_threads,
            queue_chunks=queue_chunks,
            deadline_seconds=deadline_seconds,
            clock=clock,
        )

    def register(self, namespace: Namespace) -> None:
        """Make the namespace known with its labels; idempotent, cheap."""
        self.ledger.register(namespace.root, namespace.fields())

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the ledger's rebuild, if there is one, has ended; the tier works meanwhile, but finds less."""
        return self._threads.wait_background(timeout)

    @property
    def resting(self) -> bool:
        """Whether the disk is left out for a while, after failures in a row: nothing is found meanwhile."""
        return self._breaker.resting

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        """How many leading keys are stored or queued; copies nothing."""
        if self._closed or self._breaker.resting:
            return 0
        found = 0
        seconds = within(self.deadline_seconds, deadline_seconds)
        for place in self._places(keys, start, namespace, seconds, stamp=stamp, touch=touch):
            if isinstance(place, Reason):
                break
            found += 1
        return found

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        """Raise the recency of what is stored of a run: one transaction. See Tier.touch."""
        if self._refused() is not None:
            return None
        coming = self._threads.queue.saving(keys)  # first: what leaves it meanwhile is in the ledger
        here = self.ledger.touch(
            keys, start=start, stamp=stamp, asked=asked, deadline_seconds=self.deadline_seconds
        )
        return here and [there or key in coming for key, there in zip(keys, here, strict=True)]

    def contains(self, key: bytes, *, deadline_seconds: float | None = None) -> bool:
        """Whether the key is stored or queued; touches nothing."""
        if self._closed or self._breaker.resting:
            return False
        seconds = within(self.deadline_seconds, deadline_seconds)
        return not isinstance(next(self._places([key], None, None, seconds, touch=False)), Reason)

    def holders(self, key: bytes) -> list[str]:
        """Who keeps this chunk: names of pins, "in flight"."""
        owners = [owner for owner, keys in self.ledger.pins().items() if key in keys]
        return [*owners, "in flight"] if self.in_flight(key) else owners

    def _places(
        self,
        keys: Sequence[bytes],
        start: int | None,
        namespace: bytes | None,
        seconds: float,
        *,
        stamp: int | None = None,
        touch: bool = True,
        lease_seconds: float = 0.0,
    ) -> Iterator[Write | _Slot | Reason]:
        """Where each key is, or why it is nowhere; taken lazily, one transaction a run, all within so many seconds.

        The queue is looked at first: what leaves it meanwhile is in the ledger, or was dropped and is a miss later.
        """
        queued, until = self._threads.queue.saving(keys), time.monotonic() + seconds
        stamp = self.ledger.stamp() if stamp is None else stamp
        index = 0
        while index < len(keys):
            position = None if start is None else start + index
            write = queued.get(keys[index])
            if write is not None and write.usable():
                yield write if write.is_asked(namespace, position) else Reason.ABSENT
                index += 1
                continue
            stop = next((n for n in range(index + 1, len(keys)) if keys[n] in queued), len(keys))
            match = self.ledger.match(
                keys[index:stop],
                start=position,
                namespace=namespace,
                stamp=stamp,
                lease_seconds=lease_seconds,
                touch=touch,
                deadline_seconds=max(0.0, until - time.monotonic()),
            )
            yield from map(_Slot, match.slots.tolist(), match.generations.tolist())
            index += len(match.slots)
            if index < stop:
                yield match.reason or Reason.ABSENT
                index += 1

    def admit(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int, stamp: int
    ) -> tuple[int, bool]:  # fmt: skip
        """How many of a run's next keys the policy lets in, and whether it keeps out those behind: asked once a stamp.

        Looks at 64 at most. Save only what is let in, with the same stamp; whoever does not ask has each batch judged
        by itself. What is kept out is counted, and the policy knows that it was asked for.
        """
        if self._refused() is not None:
            return len(keys), False  # `save` says why not
        writer = self._crew.writer
        with writer.judging:  # for moments: see _JUDGE_SECONDS
            return self._judge(writer, keys, namespace, start, stamp)

    def _judge(
        self, writer: Writer, keys: Sequence[bytes], namespace: bytes, start: int, stamp: int
    ) -> tuple[int, bool]:  # fmt: skip
        known = writer.judged(namespace, stamp)
        if start >= known.end and not known.shut:
            some = keys[:_ADMITTED_AT_ONCE]
            count = self.ledger.admit(some, start=start, stamp=stamp, deadline_seconds=_JUDGE_SECONDS)
            known = Judged(start + count, count < len(some), start + len(some))
            self._not_admitted(len(some) - count)
        if known.shut and start + len(keys) > known.told:
            behind = keys[max(0, known.told - start) :]  # others may have asked about a part of the run
            self.ledger.refuse(behind, start=start + len(keys) - len(behind), stamp=stamp)
            known = known._replace(told=start + len(keys))
            self._not_admitted(len(behind))
        writer.judge(namespace, stamp, known)
        count = max(0, min(known.end - start, len(keys)))
        return count, known.shut and count < len(keys)

    def _not_admitted(self, chunks: int) -> None:
        if chunks:
            self.ledger.count(f"drop_{Reason.NOT_ADMITTED}", chunks)

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        """Queue chunks to be written straight from their payloads; never waits for room. See Tier.save."""
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        refused = self._refused()
        if refused is not None:
            return [self._dropped(refused) for _ in chunks]
        stamp = (
            self.ledger.stamp() if stamp is None else stamp
        )  # one for the whole run: its tail goes before its head
        present = self._present(chunks, namespace, stamp)
        return [
            ended(True) if n < present else self._save(Write(chunk, namespace, stamp))
            for n, chunk in enumerate(chunks)
        ]

    def _present(self, chunks: Sequence[Chunk], namespace: bytes, stamp: int) -> int:
        """How many leading chunks are stored already: they take no place in the queue, and what follows evicts none."""
        if not chunks:
            return 0
        keys = [chunk.key for chunk in chunks]
        match = self.ledger.match(
            keys, start=chunks[0].position, namespace=namespace, stamp=stamp, lease_seconds=1.0, asked=False,
            deadline_seconds=_GLANCE_SECONDS,
        )  # fmt: skip
        return len(match.slots)

    def _count(self, name: str) -> None:
        if not self._closed:  # a closed ledger counts no more
            self.ledger.count(name)

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        """Read verified chunks straight into `buffers`; one transaction finds a run. See Tier.load."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        refused = self._refused()
        if refused is not None:
            return [self._missed(refused) for _ in keys]
        # `find` has touched the run with one stamp; a stamp a window would make its tail younger than its head
        seconds = within(self.deadline_seconds, deadline_seconds)
        places = self._places(keys, start, namespace, seconds, touch=False, lease_seconds=_LOAD_LEASE_SECONDS)
        return [
            self._read(place, Read(key, start + n, namespace, buffer))
            for n, (key, buffer, place) in enumerate(zip(keys, buffers, places, strict=True))
        ]

    def _read(self, place: Write | _Slot | Reason, read: Read) -> Future[Done]:
        if isinstance(place, Reason):
            return self._missed(place)
        if isinstance(place, Write):
            read.write = place
        else:
            read.slot, read.generation = place
        refused = self._threads.queue.add_read(read)
        return read.future if refused is None else self._missed(refused)

    def _missed(self, reason: Reason) -> Future[Done]:
        if reason is not Reason.LEDGER_BUSY:  # which the ledger counts
            self._count(f"miss_{reason}")
        return ended(False, reason)

    def _load_one(self, key: bytes, buffer: Bytes, namespace: bytes | None) -> Future[Done]:
        refused = self._refused()
        if refused is not None:
            return self._missed(refused)
        places = self._places(
            [key], None, namespace, self.deadline_seconds, lease_seconds=_LOAD_LEASE_SECONDS
        )
        place = next(places)
        return self._read(place, Read(key, None, namespace, buffer))

    # ---- taking away ---------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Remove a chunk, queued or stored; False if it is not here. Waits for a write of it that has begun."""
        if self._closed:
            return False
        waiting, begun = self._taken_away(Reason.REMOVED, key=key)
        if begun:
            self.wait([key], self.deadline_seconds)
        return self.ledger.remove([key]) > 0 or bool(waiting or begun)

    def clear(self, namespace: bytes | None = None) -> int:
        """Remove all chunks of one namespace (its root), or all; what is in flight will not appear."""
        if self._closed:
            return 0
        waiting, begun = self._taken_away(Reason.CLEARED, namespace=namespace)
        return self.ledger.clear(namespace) + len(waiting) + len(begun)

    # ---- the whole -----------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Gauges and counters of the store, this process's `queued_writes`, `queued_reads`, `resting`. StoreError."""
        if self._closed:
            return {}
        return {**self.ledger.numbers(self.deadline_seconds), **self._queue_stats()}
