"""A table of the chunks that vLLM's scheduler has asked for, and their states. Other threads send
the news.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Pool
from pagoda.cache import Cache
from pagoda.connectors.vllm.offloading import chunk_finder
from pagoda.connectors.vllm.offloading.chunk_finder import AskedChunk, ChunkState
from pagoda.keys import derive_keys

log = guarded_logger("pagoda.vllm")

_MISS_SECONDS = 1.0  # how long a miss is valid for requests that have not seen it
# the longest time of an answer, even while other look-ups make progress
_LONGEST_SECONDS = 30.0
_IDLE_SECONDS = 10.0  # an answer is forgotten if no request reads it for so long
# how long holds are kept for loads that ran when their chunks were cleared or reset
_LINGER_SECONDS = 30.0
_BRING_THREADS = 2


class LookupTable:
    """The chunks that waiting requests have asked for. For the scheduler's thread; no method waits.

    A chunk is asked for once for all requests, and held as long as one of them may load it. It is a
    miss if the answer takes too long: if nothing was found for `deadline_seconds`, or after half a
    minute in all. An answer to a request stays valid as long as the request continues to ask, so
    that at some time all its answers are known at once.
    """

    def __init__(
        self, cache: Cache, groups: Sequence[chunk_finder.Group]
    ) -> None:
        assert cache.slots is not None
        self._patience = cache.config.deadline_seconds
        self._finder = chunk_finder.ChunkFinder(cache, groups)
        self.version = ""  # of the weights
        self.root = self.present_root()
        self._known: dict[bytes, AskedChunk] = {}
        self._new: dict[str, list[AskedChunk]] = {}  # by request
        self._wanted: list[AskedChunk] = []
        # by request: the chunks that it has asked for
        self._of: dict[str, set[bytes]] = {}
        self._answers = Pool(1, "pagoda-find")
        self._brings = Pool(_BRING_THREADS, "pagoda-bring")
        self._releases = Pool(1, "pagoda-release")
        self._lingering: list[tuple[float, list[chunk_finder.HostPlace]]] = []
        self._verified = False  # in this step
        self._swept_at = 0.0
        self._late = 0
        self._lines = RateLimitedLog()

    def get(self, name: bytes) -> AskedChunk | None:
        """Return the entry of a chunk."""
        return self._known.get(name)

    # ---- asking

    def look(
        self,
        name: bytes,
        digest: bytes,
        group: int,
        position: int,
        request: str,
        lower: bool,
    ) -> ChunkState:
        """Return the state of a chunk; if it has no entry, add it to the next question.

        `digest`: its key is derived from it.
        """
        self._drain()
        self._verify()
        now = time.monotonic()
        asked = self._known.get(name)
        if asked is None or (
            asked.state is ChunkState.MISSED
            and self._again(asked, request, lower, now)
        ):
            key = derive_keys([digest], self.root)[0]
            users = set() if asked is None else asked.users
            asked = AskedChunk(
                name,
                key,
                group,
                position,
                self.version,
                lower,
                since=now,
                seen=now,
                users=users,
            )
            self._known[name] = asked
            self._new.setdefault(request, []).append(asked)
        asked.seen = now
        asked.users.add(request)
        self._of.setdefault(request, set()).add(name)
        if asked.state is ChunkState.FOUND:
            asked.state = ChunkState.COMING
            asked.since = now
            self._wanted.append(asked)
        if asked.state in (ChunkState.ASKED, ChunkState.COMING) and self._overdue(
            asked, now
        ):
            self._late += 1
            self._missed(asked, now)
        return asked.state

    def _verify(self) -> None:
        """Forget, once per step, hits whose chunks were removed or cleared: a hold keeps the bytes,
        not the chunk.
        """
        if self._verified:
            return
        self._verified = True
        held = [
            asked
            for asked in self._known.values()
            if asked.state is ChunkState.HELD
        ]
        if held:
            valid = self._finder.holds.valid([asked.place for asked in held])
            self._drop(
                [asked for asked, ok in zip(held, valid, strict=True) if not ok]
            )

    def _again(
        self, asked: AskedChunk, request: str, lower: bool, now: float
    ) -> bool:
        """Whether to look again for a chunk that was missed."""
        return (lower and not asked.lower) or (
            now > asked.until and request not in asked.users
        )

    def _overdue(self, asked: AskedChunk, now: float) -> bool:
        waited = now - max(asked.since, self._finder.moved)
        return waited > self._patience or now - asked.since > _LONGEST_SECONDS

    def _missed(self, asked: AskedChunk, now: float) -> None:
        asked.state = ChunkState.MISSED
        asked.until = now + _MISS_SECONDS

    def flush(self) -> None:
        """Pass the questions since the last call to the threads; release chunks that no request
        reads.
        """
        self._drain()
        now = time.monotonic()
        # another process has changed the weights
        if self.present_root() != self.root:
            self.forget()
        for asked in self._new.values():
            if question := [
                one for one in asked if one.state is ChunkState.ASKED
            ]:
                self._submit(self._answers, self._answer, question)
        self._bring(self._wanted)
        self._new = {}
        self._wanted = []
        self._verified = False
        if now - self._swept_at > _MISS_SECONDS:
            self._swept_at = now
            self._sweep(now)

    def _answer(self, question: list[AskedChunk]) -> None:
        self._bring(self._finder.answer(question))

    def _bring(self, coming: Iterable[AskedChunk]) -> None:
        for asked in chunk_finder.by_group(coming).values():
            self._submit(self._brings, self._finder.bring, asked)

    def _submit(self, threads: Pool, work: Any, asked: list[AskedChunk]) -> None:
        def ended(future: Future[Any]) -> None:
            trouble = None if future.cancelled() else future.exception()
            if trouble is not None:
                text = f"a look-up failed: {type(trouble).__name__}: {trouble}"
                self._lines.warn(log, Reason.IO_ERROR, text)
                self._finder.report(
                    chunk_finder.all_found(asked, ChunkState.MISSED)
                )

        try:
            threads.submit(work, asked).add_done_callback(ended)
        except RuntimeError:  # closed meanwhile, or no thread could be started
            self._finder.report(chunk_finder.all_found(asked, ChunkState.MISSED))

    # ---- answers

    def _drain(self) -> None:
        news = self._finder.news
        while not news.empty():
            self._release(
                [found.place for found in news.get() if not self._apply(found)]
            )

    def _apply(self, found: chunk_finder.FoundChunk) -> bool:
        """Note one chunk's news; return False if it is held although no request needs it."""
        asked = found.asked
        now = time.monotonic()
        if asked.state not in (ChunkState.ASKED, ChunkState.COMING):
            return found.state is not ChunkState.HELD
        if found.state is ChunkState.HELD:
            asked.state = ChunkState.HELD
            (asked.slot, asked.generation) = found.place
        elif found.state is ChunkState.MISSED:
            self._missed(asked, now)
        elif found.state is ChunkState.GONE:
            self._forget(asked)
        else:
            asked.state = found.state
            asked.since = now
        return True

    # ---- loads

    def load(self, name: bytes) -> AskedChunk | None:
        """Begin to load a hit; return None if the chunk is not a hit."""
        asked = self._known.get(name)
        if asked is None or asked.state is not ChunkState.HELD:
            return None
        asked.loads += 1
        return asked

    def loaded(self, names: Iterable[bytes], request: str) -> None:
        """Note that a request has loaded these chunks."""
        ended = []
        for name in names:
            asked = self._known.get(name)
            if asked is not None and asked.loads:
                asked.loads -= 1
                asked.users.discard(request)
                ended.append(asked)
        self._let_go(ended)

    def finished(self, request: str) -> None:
        """Note that a request has ended: chunks that no other request asked for are released."""
        ended = []
        for name in self._of.pop(request, ()):
            asked = self._known.get(name)
            if asked is not None:
                asked.users.discard(request)
                ended.append(asked)
        self._let_go(ended)

    def stored(self, names: Iterable[bytes]) -> None:
        """Note that these chunks are stored now; earlier answers are no longer valid."""
        for name in names:
            asked = self._known.get(name)
            if asked is not None and asked.state is ChunkState.MISSED:
                self._forget(asked)

    # ---- ends

    def _let_go(self, ended: Iterable[AskedChunk]) -> None:
        unused = [asked for asked in ended if not asked.users and not asked.loads]
        held = [asked.place for asked in unused if asked.state is ChunkState.HELD]
        for asked in unused:
            # a miss stays valid for other requests for a while
            if (
                asked.state is not ChunkState.MISSED
                or time.monotonic() > asked.until
            ):
                self._forget(asked)
        self._release(held)

    def _forget(self, asked: AskedChunk) -> None:
        asked.state = ChunkState.GONE
        if self._known.get(asked.name) is asked:
            del self._known[asked.name]

    def _sweep(self, now: float) -> None:
        """Forget old misses, hits that no request reads, and loads from before a reset of the
        cache.
        """
        idle = []
        for asked in list(self._known.values()):
            if (
                asked.state is ChunkState.MISSED
                and now > asked.until
                and not asked.users
            ):
                self._forget(asked)
            elif not asked.loads and now - asked.seen > _IDLE_SECONDS:
                asked.users.clear()
                idle.append(asked)
        self._let_go(idle)
        over = [row for row in self._lingering if row[0] < now]
        self._lingering = [row for row in self._lingering if row[0] >= now]
        self._release([place for _, places in over for place in places])

    def take_version(self, version: str) -> None:
        """Forget everything, and use the chunks of other weights from now on."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Forget everything; vLLM may never report the end of the running loads."""
        self._drain()
        self._drop(list(self._known.values()))
        self._new = {}
        self._wanted = []
        self._of.clear()
        self.root = self.present_root()

    def present_root(self) -> bytes:
        """Return the root of the namespace of chunks that are stored from now on. Thread-safe."""
        return self._finder.root(self.version)

    def _drop(self, dropped: Sequence[AskedChunk]) -> None:
        """Forget these; slots that are being loaded from are kept for a while."""
        held = [asked for asked in dropped if asked.state is ChunkState.HELD]
        loading = [asked.place for asked in held if asked.loads]
        for asked in dropped:
            self._forget(asked)
        self._release([asked.place for asked in held if not asked.loads])
        if loading:
            self._lingering.append((time.monotonic() + _LINGER_SECONDS, loading))

    def _release(self, places: list[chunk_finder.HostPlace]) -> None:
        if not places:
            return
        try:
            released = self._releases.submit(self._finder.holds.release, places)
        except RuntimeError:
            # closed meanwhile, or no thread could be started: no request waits any more
            self._finder.holds.release(places)
            return
        released.add_done_callback(
            lambda done: (
                self._finder.holds.release(places) if done.cancelled() else None
            )
        )

    def take_late(self) -> int:
        """Return how many answers were too late since the last call."""
        late = self._late
        self._late = 0
        return late

    def close(self) -> None:
        """End the threads and release everything that is held; ends in bounded time."""
        self._answers.shutdown(wait=True, cancel_futures=True)
        self._brings.shutdown(wait=True, cancel_futures=True)
        self._drain()
        self._releases.shutdown(wait=True)
        held = [
            asked.place
            for asked in self._known.values()
            if asked.state is ChunkState.HELD
        ]
        self._finder.holds.release(
            held + [place for _, places in self._lingering for place in places]
        )
        self._known.clear()
        self._lingering = []
