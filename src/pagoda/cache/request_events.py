"""KV events of a cache: what its requests report of their chunks, for the thread that publishes
them to routers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pagoda.base.fork import here
from pagoda.cache.call import CacheRequest
from pagoda.cache.tier_stack import TierStack
from pagoda.keys import Namespace
from pagoda.kv_events.event_types import ChunkEventForm
from pagoda.kv_events.notes import BlockFacts, ChunkNote
from pagoda.kv_events.publisher import EventPublisher
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Ledger


class RequestEvents:
    """Reports the chunks of one cache to routers. Thread-safe. Does nothing in a forked child: the
    thread and the connections belong to the parent.
    """

    def __init__(
        self,
        publisher: EventPublisher,
        ledgers: Mapping[str, Ledger],
        scope: Callable[..., tuple[Namespace, TierStack]],
        chunk_tokens: int,
        keeps_notes: bool,
    ) -> None:
        """Begin to report by `publisher`, which is closed with this. `scope`: that of the cache's
        `PresentWeights`.
        """
        self.endpoint = publisher.endpoint
        self._publisher = publisher
        self._process = here()
        self._scope = scope
        facts = BlockFacts(chunk_tokens, chunk_tokens)
        form = ChunkEventForm(facts)
        self._stored = StoredEvents(
            ledgers,
            lambda: scope()[0].root,
            {0: facts},
            form,
            publisher,
            keeps_notes,
        )
        self._stored.start()

    def heard(self, request: CacheRequest, version: str | None) -> None:
        """Keep what routers need to know of a request's chunks, unless it has items: then tokens do
        not identify it.

        `version`: the version of the weights, if the request named one.
        """
        keys = [*request.head, *request.keys]
        whole = len(keys) == request.first + len(request.keys)
        silent = self._process != here() or request.tokens is None
        if silent or request.items or not whole:
            return
        # read first: the weights may change before the next line
        space = request.namespace
        present = self._scope()[0].root
        if (
            self._scope(space.lora, space.salt, version, space.numerics)[0].root
            == space.root
        ):
            self._stored.found(
                partial(_note_of, request, keys), space.root, present, 0, keys
            )

    def look(self) -> None:
        """Let the thread look soon whether the weights have changed."""
        if self._process == here():
            self._stored.look()

    def keep_notes(self) -> None:
        """Keep beside the tiers what a restarted engine reports of the last chunks. Call it after
        `close`.
        """
        if self._process == here():
            self._stored.keep_notes()

    def close(self) -> None:
        """End within about a second. Idempotent."""
        if self._process == here() and self._stored.close():
            self._publisher.close()


def _note_of(request: CacheRequest, keys: list[bytes], chunk: int) -> ChunkNote:
    """Return the note of one chunk; the note of a tenant's chunk has no tokens and no salt."""
    assert request.tokens is not None
    size = request.chunk_tokens
    namespace = request.namespace
    tokens = (
        b""
        if namespace.salt
        else request.tokens[chunk * size : (chunk + 1) * size].tobytes()
    )
    parent = keys[chunk - 1] if chunk else b""
    return ChunkNote(
        namespace.root,
        parent,
        keys[chunk],
        tokens,
        lora_name=namespace.lora or None,
    )
