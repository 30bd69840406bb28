"""The operations of the page: clear, pin, unpin, warm up, explain. Each waits for ledgers: call it on a thread.

`operator_routes` calls `Operations`. It calls `ledger.admin`, and for prompts the functions in `PromptTools`, which the
command line passes: they are those of `pagoda explain` and `pagoda pin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagoda import codec
from pagoda.ledger import Ledger, admin
from pagoda.metrics import Reason
from pagoda.slab import aligned

if TYPE_CHECKING:
    from pagoda.keys import TokenIds
    from pagoda.serve.served_stores import ServedStores

MOST_TOKENS = 1 << 20
OWNER = "pagoda"


class PromptTools(NamedTuple):
    """Functions that the server uses for prompts."""

    keys: Callable[[TokenIds, Sequence[Ledger]], Mapping[bytes, Sequence[bytes]]]
    """Returns the keys of the prompt's chunks for each namespace that a store knows. Raises PagodaError."""
    explain: Callable[[TokenIds, Sequence[Ledger]], Sequence[Mapping[str, object]]]
    """Returns for each namespace: model, namespace, lines for people, answers of the tiers. Raises PagodaError."""
    tokenize: Callable[[str], Sequence[int]] | None = None
    """None: there is no tokenizer, so prompts must be token ids."""


class Operations:
    """Operations on all stores of a server. Thread-safe. ValueError for wrong use, PagodaError if a ledger fails."""

    def __init__(self, stores: ServedStores, prompts: PromptTools) -> None:
        self._stores = stores
        self._prompts = prompts

    def clear(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Remove the chunks of one namespace (`namespace`: 64 hex digits), or all with `everything`: true."""
        everything, name = asked.get("everything") is True, asked.get("namespace")
        root = _namespace(name) if not everything else None
        chunks = sum(admin.clear(ledger, root) for ledger in self._ledgers())
        return {"chunks": chunks, "said": f"{chunks:,} chunks were removed"}

    def pin(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Protect the chunks of a prompt in the local tiers from eviction."""
        owner, ledgers, pinned = _owner(asked), self._ledgers(), 0
        keys = self._prompts.keys(self._tokens(asked), ledgers)
        for ledger in ledgers:
            for root, run in keys.items():
                there = ledger.match_prefix(run, start=0, namespace=root, touch=False)
                pinned += admin.pin(ledger, run[: len(there.slots)], owner)
        said = f"{pinned:,} chunks are pinned for {owner}"
        if not pinned:
            said = "nothing was pinned: no tier has the beginning of this prompt, or a quarter of it is pinned already"
        return {"chunks": pinned, "said": said}

    def unpin(self, asked: Mapping[str, object]) -> dict[str, object]:
        """End the pins of an owner: those of one prompt, or without a prompt all of them."""
        owner, ledgers = _owner(asked), self._ledgers()
        keys: list[bytes] | None = None
        if "tokens" in asked or "text" in asked:
            keys = [key for run in self._prompts.keys(self._tokens(asked), ledgers).values() for key in run]
        ended = sum(admin.unpin(ledger, keys, owner) for ledger in ledgers)
        return {"chunks": ended, "said": f"{ended:,} chunks are no longer pinned by {owner}"}

    def warm(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Load the leading chunks of a prompt from the disk into host memory, up to the first missing one."""
        warmed, why = 0, ""
        for root, keys in self._prompts.keys(self._tokens(asked), self._ledgers()).items():
            for key in keys:
                outcome = self._warm_one(root, key)
                if isinstance(outcome, Reason):
                    why = "" if outcome is Reason.ABSENT else f"; the reason for the end: {outcome.value}"
                    break
                warmed += outcome
        return {"chunks": warmed, "said": f"{warmed:,} chunks were loaded into host memory{why}"}

    def explain(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Return how many leading tokens of a prompt each tier would serve, and why not more."""
        tokens = self._tokens(asked)
        return {
            "asked_tokens": len(tokens),
            "namespaces": list(self._prompts.explain(tokens, self._ledgers())),
        }

    def _warm_one(self, root: bytes, key: bytes) -> int | Reason:
        """Return 1 if the chunk was loaded, 0 if it was in memory already, or why it could not be loaded."""
        found = self._stores.locate(root, key)
        if isinstance(found, Reason):
            return found
        if found.store.in_memory:
            return 0
        payload = aligned(found.store.ledger.slot_bytes - codec.HEADER_BYTES)
        page = self._stores.read(root, key, found, payload)
        if isinstance(page, Reason):
            return page
        header = codec.parse(page)
        assert header is not None
        store = self._stores.room_for(header)
        if store is None:
            return Reason.FULL
        stored, reason = self._stores.put(store, header, payload)
        return reason if reason is not None else int(stored)

    def _ledgers(self) -> list[Ledger]:
        return [store.ledger for store in self._stores.stores()]

    def _tokens(self, asked: Mapping[str, object]) -> TokenIds:
        from pagoda.keys import as_token_ids

        text, tokens = asked.get("text"), asked.get("tokens")
        if isinstance(text, str):
            if self._prompts.tokenize is None:
                raise ValueError(
                    "text needs a tokenizer: start the server with --tokenizer PATH, or send token ids"
                )
            tokens = list(self._prompts.tokenize(text))
        if not isinstance(tokens, list) or not tokens:
            raise ValueError('a prompt is missing: send "tokens", a list of token ids, or "text"')
        if len(tokens) > MOST_TOKENS:
            raise ValueError(f"{len(tokens):,} tokens are too many: at most {MOST_TOKENS:,}")
        return as_token_ids(tokens)


def _owner(asked: Mapping[str, object]) -> str:
    owner = asked.get("owner", OWNER)
    if not isinstance(owner, str) or not owner or len(owner) > 100 or not owner.isprintable():
        raise ValueError('"owner" must be one line of at most 100 characters')
    return owner


def _namespace(name: object) -> bytes:
    try:
        root = bytes.fromhex(name) if isinstance(name, str) else b""
    except ValueError:
        root = b""
    if len(root) != 32:
        raise ValueError('say what to clear: "namespace", its 64 hex digits, or "everything": true')
    return root
