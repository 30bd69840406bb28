"""Shared by the tests of the tiers: chunks whose bytes are a function of their key, tiers that can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import compress
from operator import not_
from pathlib import Path

import numpy as np

from pagoda.codec import HEADER_BYTES
from pagoda.errors import ClosedError
from pagoda.keys import Namespace, derive_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Busy, Ledger, Present, Reserved, StoreSpec, admin
from pagoda.metrics import Reason
from pagoda.slab import aligned
from pagoda.testing import FakeClock, FaultySlab
from pagoda.tiers import Bytes, Chunk, DiskTier, Done, HostTier
from pagoda.tiers.base import check_sizes, clamp_deadline, completed_future, follows, runs

LAYOUT = KVLayout.opaque(4, 10_000, "test chunks that do not fill their last page")
NAMESPACE = Namespace(model="tiers")
ROOT = NAMESPACE.root
STRIDE = HEADER_BYTES + LAYOUT.slot_bytes
_positions: dict[bytes, int] = {}  # at which a chunk was stored last, or is in its chain
SECONDS = 40.0  # less than a hanging call of a faulty slab takes


def always() -> bool:
    return True


def keys_of(count: int, chain: int = 0, root: bytes = ROOT) -> list[bytes]:
    """Return the keys of one chain; another `chain` has no key in common."""
    keys = derive_keys([chain.to_bytes(16, "little") + n.to_bytes(16, "little") for n in range(count)], root)
    for position, key in enumerate(keys):
        _positions.setdefault(key, position)
    return keys


def payload_of(key: bytes) -> Bytes:
    """Return the bytes of a chunk, a function of its key: (slot_bytes,) uint8, page-aligned."""
    buffer = aligned(LAYOUT.slot_bytes)
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    buffer[: LAYOUT.chunk_bytes] = np.frombuffer(rng.bytes(LAYOUT.chunk_bytes), np.uint8)
    return buffer


def chunks_of(keys: Sequence[bytes], start: int = 0, still_valid: Callable[[], bool] = always) -> list[Chunk]:
    """Return the chunks of a chain whose first key is at position `start`."""
    _positions.update((key, start + n) for n, key in enumerate(keys))
    return [
        Chunk(key, start + n, 4, payload_of(key), keys[n - 1] if n else None, still_valid)
        for n, key in enumerate(keys)
    ]


def ends(futures: Sequence[Future[Done]]) -> list[Done]:
    """Return the results of these futures."""
    return [future.result(SECONDS) for future in futures]


def oks(futures: Sequence[Future[Done]]) -> list[bool]:
    """Return which of these futures succeed."""
    return [done.ok for done in ends(futures)]


def room() -> Bytes:
    """Return a buffer for one chunk, like a host slot."""
    return aligned(LAYOUT.slot_bytes)


def is_right(key: bytes, found: Bytes) -> bool:
    """Return whether these are the bytes of that key."""
    return np.array_equal(found[: LAYOUT.chunk_bytes], payload_of(key)[: LAYOUT.chunk_bytes])


def right(tier: DiskTier | SavingHost, key: bytes, position: int | None = None) -> bool:
    """Return whether the tier has the chunk; wrong bytes fail the test at once."""
    found = loaded(tier, key, position)
    assert found is None or is_right(key, found), "wrong bytes were served"
    return found is not None


def loaded(
    tier: DiskTier | SavingHost, key: bytes, position: int | None = None, root: bytes = ROOT
) -> Bytes | None:
    """Load one chunk and return the result, by default from its position in `chunks_of` or `keys_of`."""
    buffer = room()
    (done,) = ends(
        tier.load([key], [buffer], start=_positions[key] if position is None else position, namespace=root)
    )
    return buffer[: LAYOUT.chunk_bytes] if done.ok else None


class SavingHost(HostTier):
    """A host tier with the calls of a Tier. The cache does the same in place, through the ledger and the slab."""

    believed_seconds = 0.0

    def find(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, namespace: bytes | None = None,
        touch: bool = True, deadline_seconds: float | None = None,
    ) -> int:  # fmt: skip
        if self._closed:
            return 0
        match = self.ledger.match_prefix(
            keys, start=start, namespace=namespace, stamp=stamp, touch=touch,
            deadline_seconds=clamp_deadline(self.deadline_seconds, deadline_seconds),
        )  # fmt: skip
        return len(match.slots)

    def touch(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, stamp: int | None = None, asked: bool = True
    ) -> list[bool] | None:  # fmt: skip
        return None if self._closed else self.ledger.touch(keys, start=start, stamp=stamp, asked=asked)

    def save(
        self, chunks: Sequence[Chunk], namespace: bytes, *, stamp: int | None = None
    ) -> list[Future[Done]]:
        check_sizes("payload", (chunk.payload for chunk in chunks), self.chunk_bytes)
        stamp = self.ledger.stamp() if stamp is None else stamp
        too_large = [chunk.payload.nbytes > self.slot_bytes for chunk in chunks]
        if sum(too_large):
            self.ledger.count("drop_too_large", sum(too_large))
        futures: list[Future[Done]] = []
        try:
            with self.copying():
                for run in runs(compress(chunks, map(not_, too_large)), self.ledger.window, follows):
                    futures += self._save(run, namespace, stamp)
        except ClosedError:
            return [completed_future(False, Reason.CLOSED) for _ in chunks]
        fitting = iter(futures)
        return [completed_future(False, Reason.TOO_LARGE) if large else next(fitting) for large in too_large]

    def _save(self, run: Sequence[Chunk], namespace: bytes, stamp: int) -> list[Future[Done]]:
        outcomes = self.ledger.reserve(
            [chunk.key for chunk in run],
            namespace=namespace, start=run[0].position, parent=run[0].parent, tokens=run[0].tokens, stamp=stamp,
            deadline_seconds=self.deadline_seconds,
        )  # fmt: skip
        done: dict[bytes, Done] = {}
        copied: dict[bytes, Reserved] = {}
        try:
            for chunk, outcome in zip(run, outcomes, strict=True):
                if isinstance(outcome, Reserved):
                    slot = self.slab.view(outcome.slot)
                    np.copyto(slot[: self.chunk_bytes], chunk.payload[: self.chunk_bytes])
                    if chunk.still_valid():
                        copied[chunk.key] = outcome
                    else:
                        self.ledger.abort([outcome])
                        self.ledger.count("drop_stale")
                        done[chunk.key] = Done(False, Reason.STALE)
                elif isinstance(outcome, Present):
                    done[chunk.key] = Done(True)
                else:
                    reason = Reason.BUSY if isinstance(outcome, Busy) else outcome.reason
                    done[chunk.key] = Done(False, reason)
            kept = self.ledger.commit(list(copied.values()), deadline_seconds=self.deadline_seconds)
        except BaseException:
            self.ledger.abort(outcomes, self.deadline_seconds)
            raise
        for key, ok in zip(copied, kept, strict=True):
            done[key] = Done(True) if ok else Done(False, Reason.SUPERSEDED)
        return [completed_future(*done[chunk.key]) for chunk in run]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], *, start: int = 0, namespace: bytes,
        deadline_seconds: float | None = None,
    ) -> list[Future[Done]]:  # fmt: skip
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: need one buffer a key")
        check_sizes("buffer", buffers, self.chunk_bytes)
        if self._closed:
            return [completed_future(False, Reason.CLOSED) for _ in keys]
        futures: list[Future[Done]] = []
        while (at := len(futures)) < len(keys):  # an absent key ends a run
            match = self.ledger.match_prefix(
                keys[at:], start=start + at, namespace=namespace, deadline_seconds=self.deadline_seconds
            )
            for buffer, slot in zip(buffers[at:], match.slots.tolist(), strict=False):
                np.copyto(buffer[: self.chunk_bytes], self.slab.view(slot)[: self.chunk_bytes])
            for ok in self.ledger.still_valid(match.slots, match.generations).tolist():
                futures.append(completed_future(ok, None if ok else Reason.EVICTED))
            if len(futures) < len(keys):
                futures.append(completed_future(False, match.reason or Reason.ABSENT))
        return futures


def disk_spec(path: Path, slots: int) -> StoreSpec:
    return StoreSpec(
        root=path,
        name=LAYOUT.fingerprint,
        kind="file",
        slots=slots,
        slot_bytes=STRIDE,
    )


def open_disk(path: Path, slots: int = 32, **options: object) -> DiskTier:
    """Open a disk tier with a policy that refuses no chunk, whatever was requested before."""
    patient = {"deadline_seconds": 30.0, "policy": "lru", **options}
    tier = DiskTier.open(LAYOUT, path, slots * STRIDE, **patient)  # type: ignore[arg-type]
    tier.register(NAMESPACE)
    return tier


def open_faulty(
    path: Path,
    slots: int = 32,
    *,
    direct: bool | None = None,
    clock: FakeClock | None = None,
    io_threads: int = 1,
    queue_chunks: int = 64,
    durable: bool = False,
    deadline_seconds: float = 30.0,
) -> tuple[DiskTier, FaultySlab]:
    """Open a disk tier whose slab fails on demand; one I/O thread, so that the order of I/O is fixed."""
    ledger = Ledger.open(disk_spec(path, slots))
    slab = FaultySlab(ledger.slab_path, ledger.slots, STRIDE, direct)
    tier = DiskTier(
        LAYOUT,
        ledger,
        slab,
        durable=durable,
        io_threads=io_threads,
        queue_chunks=queue_chunks,
        deadline_seconds=deadline_seconds,
        clock=clock,
    )
    tier.register(NAMESPACE)
    return tier, slab


def store(tier: DiskTier | SavingHost, keys: Sequence[bytes], start: int = 0) -> None:
    """Save a chain and wait for it; all of it must be stored."""
    done = ends(tier.save(chunks_of(keys, start), ROOT))
    dropped = [end.reason for end in done if not end.ok]
    assert not dropped, f"{len(dropped)} of {len(keys)} were dropped: {dropped}"


def check(tier: DiskTier | HostTier) -> dict[str, int]:
    """Return the gauges of a ledger; check that it is consistent and that nothing is reserved."""
    gauges = admin.check(tier.ledger).gauges
    assert gauges["reserved"] == 0
    return gauges
