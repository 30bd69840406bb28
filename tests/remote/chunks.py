"""Shared by the tests of remote tiers: chunks whose bytes are a function of their key, tiers over
real servers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.keys import Namespace, derive_keys
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers import Bytes, Chunk, Done
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import ListingDeadline, StoreClient
from testbed.patience import Patience, slowness, wait_until, within

SMALL = KVLayout.opaque(
    4, 10_000, "a chunk of one piece that does not fill its last page"
)
LARGE = KVLayout.opaque(4, (5 << 19) + 4096, "a chunk of three pieces")
NAMESPACE = Namespace(model="remote")
OTHER = Namespace(model="remote", salt="somebody else")
ROOT = NAMESPACE.root
DEADLINE_SECONDS = 0.5  # of a hasty tier
# for calls that must succeed: a busy machine may pause for a while
PATIENT_SECONDS = 30.0
LATE_SECONDS = 3 * DEADLINE_SECONDS + 2.0  # a call that takes longer hangs


class QuickClock(Clock):
    """Time that runs ten times as fast: a tier that is skipped is soon used again."""

    def monotonic_ns(self) -> int:
        """Return ten times the machine's."""
        return 10 * super().monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Block this thread for a tenth of `seconds`."""
        super().sleep(seconds / 10)


_numbers = itertools.count()
# not merely absent
TROUBLE = {
    Reason.IO_ERROR,
    Reason.DEADLINE,
    Reason.FAILED_CHECK,
    Reason.TIER_SKIPPED,
}


def fresh_prefix() -> str:
    """Return a prefix that no other test uses in the same server."""
    return f"test-{os.getpid()}-{next(_numbers)}"


# Of one layer with K and V, which a lossy codec can quantise.
QUANTISABLE = KVLayout.dense(1, 2, 64, "float16", 32)


def unchanged_by_codecs(layout: KVLayout, key: bytes) -> Bytes:
    """Return a chunk that no codec changes, a function of its key: channels of K and tokens of V
    are constant.
    """
    (k, _), tokens, draw = (
        layout.planes,
        layout.chunk_tokens,
        np.random.default_rng(list(key)),
    )
    buffer = aligned(layout.slot_bytes)
    halves = draw.standard_normal((2, k.heads, 1024)).astype("<f2")
    numbers = (
        buffer[: layout.chunk_bytes]
        .view("<f2")
        .reshape(2, k.heads, tokens, k.dim)
    )
    numbers[0] = halves[0, :, None, : k.dim]
    numbers[1] = halves[1, 0, :tokens, None]
    return buffer


def name_of(prefix: str, key: bytes, root: bytes = ROOT) -> str:
    """Return the name of a chunk in Redis."""
    return f"{prefix}:1:{root.hex()}:{{{key.hex()}}}"


def keys_of(count: int, chain: int = 0, root: bytes = ROOT) -> list[bytes]:
    """Return the keys of one chain; another `chain` has no key in common."""
    return derive_keys(
        [
            chain.to_bytes(16, "little") + n.to_bytes(16, "little")
            for n in range(count)
        ],
        root,
    )


def payload_of(key: bytes, layout: KVLayout = SMALL) -> Bytes:
    """Return the bytes of a chunk, a function of its key: (slot_bytes,) uint8, page-aligned."""
    buffer = aligned(layout.slot_bytes)
    buffer[: layout.chunk_bytes] = np.frombuffer(
        _noise_of(key, layout.chunk_bytes), np.uint8
    )
    return buffer


# a test compares the same large chunks again and again
@functools.lru_cache(maxsize=8)
def _noise_of(key: bytes, nbytes: int) -> bytes:
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(nbytes)


def always() -> bool:
    """Return True, as most sources do."""
    return True


def chunks_of(
    keys: Sequence[bytes],
    layout: KVLayout = SMALL,
    still_valid: Callable[[], bool] = always,
) -> list[Chunk]:
    """The chunks of a chain."""
    return [
        Chunk(
            key,
            n,
            layout.chunk_tokens,
            payload_of(key, layout),
            keys[n - 1] if n else None,
            still_valid,
        )
        for n, key in enumerate(keys)
    ]


@contextlib.contextmanager
def tier_on(
    remote: StoreClient, layout: KVLayout = SMALL, **options: object
) -> Iterator[RemoteTier]:
    """Open a tier that waits as long as a busy machine may need, and close it afterwards."""
    wanted = {
        "deadline_seconds": PATIENT_SECONDS,
        "look_seconds": PATIENT_SECONDS,
        "clock": QuickClock(),
    }
    wanted |= options
    tier = RemoteTier(layout, remote, **wanted)  # type: ignore[arg-type]
    try:
        tier.register(NAMESPACE)
        yield tier
    finally:
        tier.close(1.0)


def hasty_tier(
    remote: StoreClient, layout: KVLayout = SMALL, **options: object
) -> contextlib.AbstractContextManager[RemoteTier]:
    """Open a tier that waits half a second, and close it afterwards.

    For tests in which something stands still: on a busy machine such a tier may give up whatever
    it is asked, so nothing that must succeed is asked of it but again and again (`recovers`).
    """
    wanted: dict[str, object] = {
        "deadline_seconds": DEADLINE_SECONDS,
        "look_seconds": DEADLINE_SECONDS,
    }
    wanted |= options
    return tier_on(remote, layout, **wanted)


def ends(
    futures: Sequence[Future[Done]], seconds: float = PATIENT_SECONDS
) -> list[Done]:
    """Return the results of these futures; fail if they are late."""
    patience = Patience(seconds)
    return [patience.result(future) for future in futures]


def save(
    tier: RemoteTier, keys: Sequence[bytes], layout: KVLayout = SMALL
) -> list[Done]:
    """Save a chain; return the results, which must be soon."""
    return ends(tier.store(chunks_of(keys, layout), ROOT), LATE_SECONDS)


def saved(
    remote: StoreClient,
    keys: Sequence[bytes],
    layout: KVLayout = SMALL,
    codec: str = "raw",
) -> None:
    """Store a chain through a tier that is closed when this returns."""
    with tier_on(remote, layout, codec=codec) as tier:
        for end in ends(tier.store(chunks_of(keys, layout), ROOT)):
            assert end.ok


def load(
    tier: RemoteTier,
    keys: Sequence[bytes],
    layout: KVLayout = SMALL,
    seconds: float = LATE_SECONDS,
) -> list[Reason | None]:
    """Load a chain; return None for each loaded chunk with the right bytes, else the reason; it
    must be soon.
    """
    buffers = [aligned(layout.slot_bytes) for _ in keys]
    outcome: list[Reason | None] = []
    done = ends(tier.load(keys, buffers, namespace=ROOT), seconds)
    for key, buffer, end in zip(keys, buffers, done, strict=True):
        right = payload_of(key, layout)[: layout.chunk_bytes]
        assert not end.ok or np.array_equal(
            buffer[: layout.chunk_bytes], right
        ), "wrong bytes were served"
        assert end.ok or end.reason is not None
        outcome.append(None if end.ok else end.reason)
    return outcome


def recovers(
    tier: RemoteTier,
    keys: Sequence[bytes],
    layout: KVLayout = SMALL,
    seconds: float = 25.0,
) -> None:
    """Check that the tier serves the chain again, by itself, after a while."""
    wait_until(lambda: load(tier, keys, layout) == [None] * len(keys), seconds)


def stores(
    tier: RemoteTier, keys: Sequence[bytes], layout: KVLayout = SMALL
) -> None:
    """Check that the tier stores the chain, by itself, after a while: what a dead link has claimed
    is waited for.
    """
    wait_until(
        lambda: all(
            end.ok for end in ends(tier.store(chunks_of(keys, layout), ROOT))
        )
    )


def begun_since(
    before: Sequence[threading.Thread], *names: str
) -> list[threading.Thread]:
    """Return the threads of these names that were not there before: an earlier test's may end only
    with its garbage.
    """
    return [
        t
        for t in threading.enumerate()
        if t not in before and t.name.startswith(names)
    ]


def walk(step_seconds: float) -> ListingDeadline:
    """Allow a walk over all names ten times its usual time."""
    return ListingDeadline(step_seconds, 10 * step_seconds)


def short_look() -> float:
    """Return a time for a look-up, in seconds, that a server that works keeps on this machine as it
    is now.
    """
    return 0.2 * slowness()


@contextlib.contextmanager
def soon(seconds: float = LATE_SECONDS) -> Iterator[None]:
    """Check that the body of the block takes no longer than that on an idle machine."""
    with within(seconds):
        yield


def under_load(
    tier: RemoteTier, keys: Sequence[bytes], work: Callable[[], None]
) -> Counter[Reason | None]:
    """Load a chain, and save others, while `work` is done; count what became of the loads.

    No byte is wrong: `load` checks.
    """
    stop = threading.Event()
    trouble = list[BaseException]()
    outcomes = Counter[Reason | None]()

    def engine(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not stop.is_set():
                # others: what waits to be sent is served too
                if rng.random() < 0.3:
                    save(tier, keys_of(10, chain=rng.randrange(1, 100)))
                outcomes.update(load(tier, keys, seconds=PATIENT_SECONDS))
        except BaseException as error:  # noqa: BLE001
            # raised by the test's own thread
            trouble.append(error)

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not trouble, trouble
    return outcomes
