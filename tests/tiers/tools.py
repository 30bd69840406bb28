"""What the tests of the tiers share: chunks whose bytes are a function of their key, tiers that can
fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda.codec import HEADER_BYTES
from pagoda.keys import Namespace, derive_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.slab import aligned
from pagoda.testing import FakeClock, FaultySlab
from pagoda.tiers import Bytes, Chunk, DiskTier, Done, HostTier

LAYOUT = KVLayout.opaque(
    4, 10_000, "test chunks that do not fill their last page"
)
NAMESPACE = Namespace(model="tiers")
ROOT = NAMESPACE.root
STRIDE = HEADER_BYTES + LAYOUT.slot_bytes
SECONDS = 40.0  # less than a call of a faulty slab hangs


def always() -> bool:
    return True


def keys_of(count: int, chain: int = 0, root: bytes = ROOT) -> list[bytes]:
    """The keys of one chain; another `chain` has no key in common."""
    return derive_keys(
        [
            chain.to_bytes(16, "little") + n.to_bytes(16, "little")
            for n in range(count)
        ],
        root,
    )


def payload_of(key: bytes) -> Bytes:
    """The bytes of a chunk, a function of its key: (slot_bytes,) uint8, page-aligned."""
    buffer = aligned(LAYOUT.slot_bytes)
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    buffer[: LAYOUT.chunk_bytes] = np.frombuffer(
        rng.bytes(LAYOUT.chunk_bytes), np.uint8
    )
    return buffer


def chunks_of(
    keys: Sequence[bytes],
    start: int = 0,
    still_valid: Callable[[], bool] = always,
) -> list[Chunk]:
    """The chunks of a chain whose first key stands at `start`."""
    return [
        Chunk(
            key,
            start + n,
            4,
            payload_of(key),
            keys[n - 1] if n else None,
            still_valid,
        )
        for n, key in enumerate(keys)
    ]


def io_threads(before: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Return the threads of tiers that were started since then."""
    return [
        t
        for t in threading.enumerate()
        if t not in before and t.name != "pagoda-dropped"
    ]


def ends(futures: Sequence[Future[Done]]) -> list[Done]:
    """How these futures end."""
    return [future.result(SECONDS) for future in futures]


def oks(futures: Sequence[Future[Done]]) -> list[bool]:
    """Which of these futures end well."""
    return [done.ok for done in ends(futures)]


def room() -> Bytes:
    """A buffer for one chunk, as a host slot is."""
    return aligned(LAYOUT.slot_bytes)


def is_right(key: bytes, found: Bytes) -> bool:
    """Whether these are the bytes of that key."""
    return np.array_equal(
        found[: LAYOUT.chunk_bytes], payload_of(key)[: LAYOUT.chunk_bytes]
    )


def right(tier: DiskTier | HostTier, key: bytes) -> bool:
    """Whether the tier has the chunk; wrong bytes fail the test at once."""
    found = tier.get(key, namespace=ROOT)
    assert found is None or is_right(key, found), "wrong bytes were served"
    return found is not None


def disk_spec(path: Path, slots: int) -> StoreSpec:
    return StoreSpec(
        root=path,
        name=LAYOUT.fingerprint,
        kind="file",
        slots=slots,
        slot_bytes=STRIDE,
        chunk_bytes=LAYOUT.chunk_bytes,
    )


def open_disk(path: Path, slots: int = 32, **options: object) -> DiskTier:
    """A disk tier with a policy that refuses no chunk, whatever was asked for before."""
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
    """A disk tier whose slab fails on demand; one I/O thread, so that what comes after what is
    certain.
    """
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


def store(
    tier: DiskTier | HostTier, keys: Sequence[bytes], start: int = 0
) -> None:
    """Save a chain and wait for it; all of it must be stored."""
    done = ends(tier.store(chunks_of(keys, start), ROOT))
    dropped = [end.reason for end in done if not end.ok]
    assert not dropped, f"{len(dropped)} of {len(keys)} were dropped: {dropped}"


def check(tier: DiskTier | HostTier) -> dict[str, int]:
    """The gauges of a consistent ledger with nothing left reserved."""
    gauges = admin.check(tier.ledger).gauges
    assert gauges["reserved"] == 0
    return gauges
