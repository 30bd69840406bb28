"""The tier suite checked on its own: a tier over a dict passes it, its broken sisters do not."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.keys import Namespace
from pagoda.testing import TierConformance
from pagoda.tiers.base import Bytes, Chunk, Done, Tier


class Entry(NamedTuple):
    payload: Bytes
    namespace: bytes
    position: int


class DictTier(Tier):
    """Chunks in a dict, written by one background thread (as long as it `may_write`).
    Thread-safe.
    """

    name = "dict"
    chunk_bytes = 5000
    believed_seconds = 0.0

    def __init__(self, slots: int = 16) -> None:
        self.slots = slots
        self.entries: dict[bytes, Entry] = {}
        self.queued: dict[bytes, tuple[Chunk, bytes]] = {}
        self.counts = {"stored_chunks": 0, "drop_too_large": 0}
        self.lock = threading.RLock()
        self.threads = ThreadPoolExecutor(1)
        self.may_write = threading.Event()
        self.may_write.set()
        self.closed = False

    def register(self, namespace: Namespace) -> None:
        pass

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
        return next(
            (i for i, key in enumerate(keys) if not self.contains(key)), len(keys)
        )

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        return None if self.closed else [self.contains(key) for key in keys]

    def contains(self, key: bytes) -> bool:
        with self.lock:
            return not self.closed and (key in self.entries or key in self.queued)

    def refusal(self, chunk: Chunk) -> Reason | None:
        if chunk.payload.nbytes < self.chunk_bytes:
            raise ValueError("too small")
        if chunk.payload.nbytes > 8192:
            self.counts["drop_too_large"] += 1
            return Reason.TOO_LARGE
        return Reason.CLOSED if self.closed else None

    def store(
        self,
        chunks: Sequence[Chunk],
        namespace: bytes,
        *,
        stamp: int | None = None,
    ) -> list[Future[Done]]:
        return [self.save_one(chunk, namespace) for chunk in chunks]

    def save_one(self, chunk: Chunk, namespace: bytes) -> Future[Done]:
        future: Future[Done] = Future()
        with self.lock:
            reason = self.refusal(chunk)
            if reason is None and chunk.still_valid():
                self.queued[chunk.key] = (chunk, namespace)
                self.threads.submit(self.write, chunk, namespace, future)
            else:
                future.set_result(Done(False, reason or Reason.STALE))
        return future

    def write(self, chunk: Chunk, namespace: bytes, future: Future[Done]) -> None:
        self.may_write.wait(60)
        entry = Entry(
            chunk.payload[: self.chunk_bytes].copy(), namespace, chunk.position
        )
        with self.lock:
            wanted = self.queued.get(chunk.key, (None,))[0] is chunk
            ok = wanted and self.is_valid(chunk)
            if wanted:
                del self.queued[chunk.key]
            if ok:
                self.counts["stored_chunks"] += chunk.key not in self.entries
                while (
                    len(self.entries) >= self.slots
                    and chunk.key not in self.entries
                ):
                    del self.entries[next(iter(self.entries))]
                self.entries[chunk.key] = entry
        future.set_result(Done(ok, None if ok else Reason.STALE))

    def is_valid(self, chunk: Chunk) -> bool:
        return chunk.still_valid()

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Bytes],
        *,
        start: int = 0,
        namespace: bytes,
    ) -> list[Future[Done]]:
        if len(keys) != len(buffers) or any(
            buffer.nbytes < self.chunk_bytes for buffer in buffers
        ):
            raise ValueError("buffers")
        return [
            self.threads_free(key, buffer, namespace, start + n)
            for n, (key, buffer) in enumerate(zip(keys, buffers, strict=True))
        ]

    def threads_free(
        self, key: bytes, buffer: Bytes, namespace: bytes, position: int
    ) -> Future[Done]:
        future: Future[Done] = Future()
        found = self.get(key) if self.is_asked(key, namespace, position) else None
        if found is not None:
            buffer[: self.chunk_bytes] = found
        reason = Reason.CLOSED if self.closed else Reason.ABSENT
        future.set_result(
            Done(True) if found is not None else Done(False, reason)
        )
        return future

    def put(
        self,
        key: bytes,
        payload: Bytes,
        *,
        namespace: bytes,
        position: int = 0,
        tokens: int = 0,
        block: bool = True,
    ) -> bool:
        chunk = Chunk(key, position, tokens, payload.copy(), None, lambda: True)
        future = self.save_one(chunk, namespace)
        if not block and not future.done():
            return True
        self.may_write.set()
        return future.result().ok

    def put_many(self, items: Iterable[Chunk], *, namespace: bytes) -> int:
        self.may_write.set()
        return sum(self.save_one(chunk, namespace).result().ok for chunk in items)

    def is_asked(
        self, key: bytes, namespace: bytes | None, position: int | None = None
    ) -> bool:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None and key in self.queued:
                entry = Entry(
                    self.queued[key][0].payload,
                    self.queued[key][1],
                    self.queued[key][0].position,
                )
            return entry is None or (
                namespace in (None, entry.namespace)
                and position in (None, entry.position)
            )

    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        with self.lock:
            if not self.contains(key) or not self.is_asked(key, namespace):
                return None
            entry = self.entries.get(key)
            payload = entry.payload if entry else self.queued[key][0].payload
            return payload[: self.chunk_bytes].copy()

    def get_many(
        self, keys: Iterable[bytes], *, namespace: bytes | None = None
    ) -> Iterator[Bytes | None]:
        return (self.get(key) for key in keys)

    def remove(self, key: bytes) -> bool:
        with self.lock:
            was = self.contains(key)
            self.queued.pop(key, None)
            self.entries.pop(key, None)
            return was

    def in_flight(self, key: bytes) -> bool:
        with self.lock:
            return key in self.queued

    def wait(self, keys: Iterable[bytes], timeout: float) -> bool:
        self.may_write.set()
        if not self.closed:
            self.threads.submit(lambda: None).result(timeout)
        return not any(self.in_flight(key) for key in keys)

    def clear(self, namespace: bytes | None = None) -> int:
        with self.lock:
            gone = [
                key
                for key, entry in self.entries.items()
                if namespace in (None, entry.namespace)
            ]
            for key in gone:
                del self.entries[key]
            for key, (_, of) in list(self.queued.items()):
                if namespace in (None, of):
                    del self.queued[key]
            return len(gone)

    def holders(self, key: bytes) -> list[str]:
        return []

    def flush(self, timeout: float) -> bool:
        return self.wait([], timeout)

    def stats(self) -> Mapping[str, int]:
        return dict(self.counts)

    def close(self, timeout: float = 5.0) -> None:
        self.closed = True
        self.may_write.set()
        self.threads.shutdown()


class TestDictTier(TierConformance):
    def make_tier(self, tmp_path: Path) -> Tier:
        return DictTier()


class CountsNothing(DictTier):
    def stats(self) -> Mapping[str, int]:
        return {"stored_chunks": 0, "drop_too_large": 0}


class SharesItsBytes(DictTier):
    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        with self.lock:
            return self.entries[key].payload if key in self.entries else None


class ServesWrongBytes(DictTier):
    def get(self, key: bytes, *, namespace: bytes | None = None) -> Bytes | None:
        found = super().get(key)
        return None if found is None else np.roll(found, 1)


class FindsBeyondAHole(DictTier):
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
        return sum(self.contains(key) for key in keys)


class ClearsAll(DictTier):
    def clear(self, namespace: bytes | None = None) -> int:
        return super().clear()


class ClearsOnlyWhatIsStored(DictTier):
    def clear(self, namespace: bytes | None = None) -> int:
        with self.lock:
            queued = dict(self.queued)
            gone = super().clear(namespace)
            self.queued.update(queued)
            return gone


class NeverLooksAgain(DictTier):
    def is_valid(self, chunk: Chunk) -> bool:
        return True


class RemovesSilently(DictTier):
    def remove(self, key: bytes) -> bool:
        super().remove(key)
        return True


class ServesWhoeverHasTheKey(DictTier):
    def is_asked(
        self, key: bytes, namespace: bytes | None, position: int | None = None
    ) -> bool:
        return True


class RemovesWhatWasAskedForWrongly(DictTier):
    def is_asked(
        self, key: bytes, namespace: bytes | None, position: int | None = None
    ) -> bool:
        asked = super().is_asked(key, namespace, position)
        if not asked:
            self.remove(key)
        return asked


class FindsAfterClose(DictTier):
    def contains(self, key: bytes) -> bool:
        with self.lock:
            return key in self.entries or key in self.queued


class TouchesTheLeadingRun(DictTier):
    def touch(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
    ) -> list[bool] | None:
        return [number < self.match_prefix(keys) for number, _ in enumerate(keys)]


class PutsLater(DictTier):
    def put(
        self,
        key: bytes,
        payload: Bytes,
        *,
        namespace: bytes,
        position: int = 0,
        tokens: int = 0,
        block: bool = True,
    ) -> bool:
        return super().put(key, payload, namespace=namespace, block=False)


class ForgetsWhatIsQueued(DictTier):
    def contains(self, key: bytes) -> bool:
        with self.lock:
            return key in self.entries


class FlushesNothing(DictTier):
    def flush(self, timeout: float) -> bool:
        return Tier.flush(self, timeout)


class RefusesSilently(DictTier):
    def admit(self, keys: Sequence[bytes], **_: object) -> tuple[int, bool]:
        return len(keys) // 2, False


BROKEN = [
    (FlushesNothing, "test_a_run_is_stamped_admitted_and_flushed"),
    (RefusesSilently, "test_a_run_is_stamped_admitted_and_flushed"),
    (CountsNothing, "test_stats_are_numbers"),
    (CountsNothing, "test_too_large_is_refused_and_counted"),
    (SharesItsBytes, "test_get_is_a_private_copy"),
    (ServesWrongBytes, "test_put_and_get"),
    (ServesWrongBytes, "test_save_and_load"),
    (FindsBeyondAHole, "test_find_is_the_leading_run"),
    (ClearsAll, "test_clear_of_one_namespace_leaves_the_other"),
    (ClearsOnlyWhatIsStored, "test_clear_reaches_what_is_on_its_way"),
    (NeverLooksAgain, "test_bytes_that_change_on_their_way_never_appear"),
    (RemovesSilently, "test_remove"),
    (
        ServesWhoeverHasTheKey,
        "test_what_was_asked_for_wrongly_is_a_miss_and_stays",
    ),
    (
        RemovesWhatWasAskedForWrongly,
        "test_what_was_asked_for_wrongly_is_a_miss_and_stays",
    ),
    (FindsAfterClose, "test_close_is_bounded_and_final"),
    (ForgetsWhatIsQueued, "test_what_is_on_its_way_is_read"),
    (ForgetsWhatIsQueued, "test_touch_knows_what_is_on_its_way"),
    (
        TouchesTheLeadingRun,
        "test_touch_says_which_are_here_holes_notwithstanding",
    ),
    (TouchesTheLeadingRun, "test_close_is_bounded_and_final"),
    (PutsLater, "test_a_put_that_blocks_returns_when_it_has_ended"),
]


@pytest.mark.parametrize(("broken", "test"), BROKEN)
def test_a_broken_tier_is_found_out(
    broken: type[DictTier], test: str, tmp_path: Path
) -> None:
    tier = broken()

    class Suite(TierConformance):
        def make_tier(self, tmp_path: Path) -> Tier:
            # queued work stays queued until a call waits for it
            tier.may_write.clear()
            return tier

        def ends(self, futures: Sequence[Future[Done]]) -> list[Done]:
            tier.may_write.set()
            return super().ends(futures)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)(tmp_path)
