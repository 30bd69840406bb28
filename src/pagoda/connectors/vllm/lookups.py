"""Looks requests up in the tiers, on threads, so that vLLM's scheduler never waits for a tier."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Pool, wait
from pagoda.cache import Cache, Hit, RequestHints
from pagoda.cache.lookup_call import LEASE_SECONDS
from pagoda.connectors.identity.lora_adapters import lora_name
from pagoda.connectors.vllm.identity.engine_namespace import salt_of
from pagoda.connectors.vllm.identity.media_names import MediaNames
from pagoda.connectors.vllm.scheduled_chunks import is_text
from pagoda.keys import derive_keys
from pagoda.kv_events.stored_events import StoredEvents

log = guarded_logger("pagoda.vllm")

_THREADS = 2
# the most running calls with which a prompt is still logged: look-ups must not wait for logging
_MOST_LOGS = 8
_MOST = 64  # running look-ups; the others begin when vLLM asks for them
# the wait in one pass over the waiting requests, enough to answer most of them; the second value
# applies while the engine computes answers, whose readers would notice
_PATIENCE_SECONDS = 0.003
_BRIEF_PATIENCE_SECONDS = 0.0005
LONGEST_SECONDS = 5.0  # a look-up that takes longer is a miss


class LookupAnswer(NamedTuple):
    """The answer of a look-up."""

    root: bytes  # the root of the request's namespace ...
    present: bytes  # ... and the result of `LookupThreads.root` at that time
    lora: str | None
    salt: str | None
    version: str
    hashes: int  # the number of the request's block hashes at that time ...
    last: bytes  # ... and the last of them, which names all these tokens
    hit: Hit
    at: float


@dataclass
class TrackedRequest:
    """One request, from its arrival to its end."""

    request: Any
    # answer None: nothing of this request can be cached
    look: Future[LookupAnswer | None] | None = None
    asked_at: float = 0.0
    polled: bool = False
    recorded: bool = False  # in the trace, by its first look-up
    found: LookupAnswer | None = None
    # False: loads are off, or a load or look-up has failed, so vLLM computes it
    loads: bool = True
    saves: bool = True
    asks: bool = True  # False: it may read nothing, so it is no lookup
    most_named: int | None = None  # leading tokens that vLLM's block hashes name
    is_of_embeddings: bool = False  # its prompt has no tokens
    most_loaded: int | None = None  # tokens, beyond those that the engine has
    most_saved: int | None = None  # tokens, from the first on
    reason: Reason | None = None  # why there was no look-up
    hints: RequestHints | None = None  # what its client says of it
    counted: bool = False
    keys: list[bytes] = field(default_factory=list)  # in the namespace found.root
    named: bytes = b""  # the block hash from which the last of the keys was made
    saved: int = 0  # leading chunks that need no saving
    seen: int = 0  # chunks that were computed when saving was last tried
    stamp: int | None = None
    # in the engine's own cache, when the tiers were last asked
    local_tokens: int = 0
    # the last step in which another connector may have failed to fill its blocks
    sure_after: int = 0
    # the request whose load includes some of the same chunks
    waits_for: str | None = None

    def forget_keys(self) -> None:
        """Forget the keys, and what is known of their chunks: they name other tokens, or are of
        another namespace.
        """
        self.keys = []
        self.saved = 0
        self.seen = 0


class LookupThreads:
    """The look-ups of one engine. For the scheduler's thread; separate threads ask the tiers."""

    def __init__(
        self,
        cache: Cache,
        hash_tokens: int,
        salt: str,
        waits: bool = True,
        hashes_media: bool = True,
    ) -> None:
        """Prepare; threads start later. `waits`: a pass over the waiting requests may wait a moment
        for answers.

        `hashes_media`: whether vLLM names media by their content.
        """
        # an engine without a host tier was refused
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._hash_tokens = hash_tokens  # tokens of one of vLLM's block hashes
        self._chunk_tokens = cache.layout.chunk_tokens
        self._salt = salt
        self._media = MediaNames(hashes_media)
        self.version = ""  # of the weights, for look-ups that begin from now on
        # they learn the namespaces of adapters
        self.events: StoredEvents | None = None
        self._pass_seconds = _PATIENCE_SECONDS if waits else 0.0
        self._patience = self._pass_seconds  # the rest of this pass's wait
        self._threads = Pool(_THREADS, "pagoda-look")
        # running look-ups, and when they began
        self._begun: list[tuple[float, Future[LookupAnswer | None]]] = []
        self._lines = RateLimitedLog()

    def begin(self, tracked: TrackedRequest) -> bool:
        """Begin to look a request up; return False if too many look-ups are running, or all threads
        are stuck.
        """
        now = time.monotonic()
        self._begun = [row for row in self._begun if not row[1].done()]
        if sum(now - at > LONGEST_SECONDS for at, _ in self._begun) >= _THREADS:
            # a tier or a directory of adapters does not answer
            tracked.loads = False
            tracked.reason = Reason.DEADLINE
            return False
        if self._threads.under_way >= _MOST:
            return False
        request = tracked.request
        hashes = len(tracked.request.block_hashes)
        digests = self._digests(request, 0, hashes)
        last = _hash_at(request.block_hashes, hashes)
        prompt = None if tracked.recorded else request.num_prompt_tokens
        tracked.asked_at = now
        tracked.polled = False
        try:
            tracked.look = self._threads.submit(
                self._lookup,
                request,
                digests,
                hashes,
                last,
                prompt,
                tracked.hints,
            )
            self._begun.append((now, tracked.look))
            tracked.recorded = True
        except RuntimeError as trouble:
            # no thread could be started, or the engine shuts down
            self._lines.warn(
                log, Reason.IO_ERROR, f"a look-up could not begin: {trouble}"
            )
            tracked.loads = False
            tracked.reason = Reason.IO_ERROR
            return False
        return True

    def answered(self, tracked: TrackedRequest) -> bool:
        """Whether a valid answer for this request is known; begin a (new) look-up if not."""
        if tracked.look is None and not self.begin(tracked):
            return tracked.reason is not None  # None: too many are running
        look = tracked.look
        assert look is not None
        if not tracked.polled:
            tracked.polled = True
            self._give_a_moment(look)
        if not look.done():
            if time.monotonic() - tracked.asked_at < LONGEST_SECONDS:
                return False
            tracked.loads = False
            tracked.reason = Reason.DEADLINE
            return True
        if (trouble := look.exception()) is not None:
            self._lines.warn(
                log,
                Reason.IO_ERROR,
                f"a look-up failed: {type(trouble).__name__}: {trouble}",
            )
            tracked.loads = False
            tracked.reason = Reason.IO_ERROR
            return True
        return self._taken(tracked, look.result())

    def found_tokens(self, tracked: TrackedRequest, most: int) -> int | None:
        """Return how many of a request's first `most` tokens the tiers have, whose keys it then
        has; None: ask again.
        """
        if not self.answered(tracked):
            return None
        if tracked.found is None or not tracked.loads:
            return 0
        found = min(most, tracked.found.hit.stop_tokens)
        self.extend_keys(tracked, -(-found // self._chunk_tokens))
        return found

    def knows_namespace(self, tracked: TrackedRequest) -> bool:
        """Whether a request's namespace is known, so that it can be saved; begin a look-up if there
        was none.
        """
        if tracked.found is None:
            if tracked.look is None:
                self.begin(tracked)
            look = tracked.look
            if look is not None and look.done() and look.exception() is None:
                self._note(tracked, look.result())
        return tracked.found is not None

    def extend_keys(self, tracked: TrackedRequest, chunks: int) -> None:
        """Extend a request's keys to `chunks`, or up to its last block hash.

        If the tokens of a session were replaced (streamed input), start again: old keys would name
        other tokens.
        """
        assert tracked.found is not None
        step = self._chunk_tokens // self._hash_tokens
        hashes = tracked.request.block_hashes
        have = len(tracked.keys)
        if have and _hash_at(hashes, have * step) != tracked.named:
            tracked.forget_keys()
        if (have := len(tracked.keys)) < chunks:
            digests = self._digests(tracked.request, have, chunks * step)
            tracked.keys += derive_keys(digests, tracked.found.root)
            tracked.named = _hash_at(hashes, len(tracked.keys) * step)

    def shared_tokens(self, request: Any) -> int | None:
        """Return how many tokens of a request come before the first that only this engine can name;
        None: all.
        """
        return self._media.shared_tokens(request)

    def log_prompt(self, tracked: TrackedRequest, tokens: int) -> None:
        """Log the stored chunks of a request that has ended, with its first `tokens` tokens; on a
        thread.
        """
        text_alone = is_text(tracked.request)
        chunks = min(tracked.saved, tokens // self._chunk_tokens)
        if text_alone and chunks and self._threads.under_way < _MOST_LOGS:
            self._threads.later(self._log_prompt, tracked, chunks, tokens)

    def _log_prompt(
        self, tracked: TrackedRequest, chunks: int, tokens: int
    ) -> None:
        self.extend_keys(tracked, chunks)
        assert tracked.found is not None
        keys = tracked.keys[:chunks]
        self._slots.log_prompt(
            tracked.found.root, keys, list(tracked.request.all_token_ids[:tokens])
        )

    def note_answer(
        self, tracked: TrackedRequest, tokens: int, hints: RequestHints | None
    ) -> None:
        """Say how a request with these first tokens has ended; on a thread."""
        found = tracked.found
        chunks = tokens // self._chunk_tokens
        if found is not None and self._threads.under_way < _MOST:
            # here, because its prompt may be logged on another thread at the same time
            self.extend_keys(tracked, chunks)
            keys = tracked.keys[:chunks]
            self._threads.later(self._note_answer, found, keys, hints)
        elif hints is not None:
            for name in hints.names:
                self._slots.refuse_hint(name, "too many requests at once")

    def _note_answer(
        self,
        found: LookupAnswer,
        keys: list[bytes],
        hints: RequestHints | None,
    ) -> None:
        self._cache.note_answer(
            None,
            keys=keys,
            lora=found.lora,
            salt=found.salt,
            weights_version=found.version,
            hints=hints,
        )

    def root(self) -> bytes:
        """Return the root of the namespace of requests without an adapter and a salt. Never waits
        for a tier.
        """
        return self._slots.namespace(weights_version=self.version)

    def next_pass(self, brief: bool = False) -> None:
        """Begin a new pass over the waiting requests. `brief`: the engine is computing answers of
        other requests.
        """
        self._patience = min(
            self._pass_seconds,
            _BRIEF_PATIENCE_SECONDS if brief else self._pass_seconds,
        )

    def close(self) -> None:
        """End the threads without waiting for them. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _taken(self, tracked: TrackedRequest, found: LookupAnswer | None) -> bool:
        """Accept an answer; if it is too old or is about other tokens, look up again."""
        if found is not None:
            hashes = tracked.request.block_hashes
            at = found.hashes
            other = _hash_at(hashes, at) != found.last
            if other:
                tracked.forget_keys()
            if (
                other
                or len(hashes) != at
                or time.monotonic() - found.at > LEASE_SECONDS
            ):
                return not self.begin(tracked) and tracked.reason is not None
        self._note(tracked, found)
        return True

    def _note(self, tracked: TrackedRequest, found: LookupAnswer | None) -> None:
        if found is None:
            tracked.reason = Reason.IO_ERROR
        else:
            if tracked.found is not None and tracked.found.root != found.root:
                tracked.forget_keys()
            tracked.saved = max(
                tracked.saved, found.hit.stop_tokens // self._chunk_tokens
            )
        tracked.found = found

    def _give_a_moment(self, look: Future[Any]) -> None:
        """Wait for a look-up, at most for the rest of this pass's wait."""
        if self._patience > 0 and not look.done():
            began = time.monotonic()
            wait([look], self._patience)
            self._patience -= time.monotonic() - began

    def _lookup(
        self,
        request: Any,
        digests: list[bytes],
        hashes: int,
        last: bytes,
        prompt: int | None,
        hints: RequestHints | None,
    ) -> LookupAnswer | None:
        """Determine the request's namespace, derive its keys, ask the tiers. Runs on a thread.

        `prompt`: the number of tokens to record as a request, or None. The arguments are from the
        begin of the look-up: the request itself may be longer by now.
        """
        lora = None
        if request.lora_request is not None:
            lora = lora_name(request.lora_request)
            if lora is None:
                text = (
                    f"requests with the adapter {request.lora_request.lora_name!r} are not "
                    "cached: its files cannot be "
                    "read here, or have changed since its first request; load new weights with a "
                    "new name and path"
                )
                self._lines.warn(log, Reason.IO_ERROR, text)
                self._name_adapter(request, None)
                return None
        salt = salt_of(self._salt, request.cache_salt)
        version = self.version
        # before the next line
        present = self._slots.namespace(weights_version=version)
        root = (
            self._slots.namespace(lora, salt, version)
            if lora or salt
            else present
        )
        self._name_adapter(request, root)
        keys = derive_keys(digests, root)
        if prompt is not None:
            self._slots.record_request(
                keys[: prompt // self._chunk_tokens],
                prompt,
                hints=hints,
                namespace=root,
            )
        hit = self._cache.lookup(
            None,
            keys=keys,
            lora=lora,
            salt=salt,
            weights_version=version,
            counted=False,
        )
        return LookupAnswer(
            root,
            present,
            lora,
            salt,
            version,
            hashes,
            last,
            hit,
            time.monotonic(),
        )

    def _name_adapter(self, request: Any, root: bytes | None) -> None:
        """Report the namespace of requests with this adapter's name; None: they are not cached."""
        if request.lora_request is not None and self.events is not None:
            self.events.name_adapter(
                (request.lora_request.lora_name, request.cache_salt), root
            )

    def _digests(self, request: Any, begin: int, hashes: int) -> list[bytes]:
        """Return the engine's hashes that name the prefix up to the end of each chunk, from number
        `begin` on.
        """
        step = self._chunk_tokens // self._hash_tokens
        digests = [
            bytes(digest)
            for digest in request.block_hashes[
                begin * step + step - 1 : hashes : step
            ]
        ]
        return self._media.key_digests(
            digests, begin, self._chunk_tokens, self.shared_tokens(request)
        )


def _hash_at(hashes: Any, blocks: int) -> bytes:
    """Return the hash that names the first `blocks` blocks of a request; empty for 0, or if there
    are fewer.
    """
    return bytes(hashes[blocks - 1]) if 0 < blocks <= len(hashes) else b""
