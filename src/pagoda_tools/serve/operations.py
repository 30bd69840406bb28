"""The operations of the page: clear, pin, unpin, warm up, explain. Each waits for ledgers: call it
on a thread.

`operator_routes` calls `Operations`. It calls `ledger.admin`, and for prompts the functions in
`PromptTools`, which the command line passes: they are those of `pagoda explain` and `pagoda pin`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagoda import codec
from pagoda.base.errors import PagodaError, StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, admin
from pagoda.slab import aligned

if TYPE_CHECKING:
    from pagoda.keys import TokenIds
    from pagoda_tools.serve.served_stores import ServedStores

MOST_TOKENS = 1 << 20
OWNER = "pagoda"
_NO_PINS = "remote tiers have no pins"
_UNKNOWN = "no store knows this namespace: choose one that the page or pagoda stats lists"
_SHARED = "shared by all machines: pagoda clear removes its chunks"


class PromptTools(NamedTuple):
    """Functions that the server uses for prompts."""

    keys: Callable[[TokenIds, Sequence[Ledger]], Mapping[bytes, Sequence[bytes]]]
    """Returns the keys of the prompt's chunks for each namespace that a store knows. Raises
    PagodaError.
    """
    explain: Callable[
        [TokenIds, Sequence[Ledger], bytes | None], Sequence[Mapping[str, object]]
    ]
    """Returns for each namespace, or only for that one: model, namespace, lines for people, answers
    of the tiers, and with a tokenizer the text of the token that differs. Raises PagodaError.
    """
    tokenize: Callable[[str], Sequence[int]] | None = None
    """None: there is no tokenizer, so prompts must be token ids."""


class Operations:
    """Operations on all stores of a server. Thread-safe. ValueError for wrong use, PagodaError if a
    ledger fails.
    """

    def __init__(
        self,
        stores: ServedStores,
        prompts: PromptTools,
        shared: Sequence[str] = (),
    ) -> None:
        """`shared`: the addresses of remote tiers, which no operation here changes: answers name
        them as left.
        """
        self._stores = stores
        self._prompts = prompts
        self._shared = shared

    def clear(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Remove the chunks of one namespace (`namespace`: 64 hex digits), or all with
        `everything`: true.

        From all stores of this machine, also those that are not served. StoreError names the stores
        that failed.
        """
        everything = asked.get("everything") is True
        name = asked.get("namespace")
        root = _namespace(name) if not everything else None
        chunks = self._in_each(
            "not cleared",
            "removed",
            _SHARED,
            lambda ledger: admin.clear(ledger, root),
        )
        return self._answer(
            chunks,
            f"{chunks:,} chunks were removed",
            "shared by all machines: pagoda clear removes its chunks",
        )

    def pin(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Protect the chunks of a prompt in the local tiers from eviction."""
        owner = _owner(asked)
        keys = self._keys(asked)

        def pinned(ledger: Ledger) -> int:
            number = 0
            for root, run in keys.items():
                there = ledger.match_prefix(
                    run, start=0, namespace=root, touch=False
                )
                number += admin.pin(ledger, run[: len(there.slots)], owner)
            return number

        chunks = self._in_each("not pinned", "pinned", _NO_PINS, pinned)
        said = f"{chunks:,} chunks are pinned for {owner}"
        if not chunks:
            said = (
                "nothing was pinned: no tier has the beginning of this prompt, or a quarter "
                "of it is pinned already"
            )
        return self._answer(chunks, said, _NO_PINS)

    def unpin(self, asked: Mapping[str, object]) -> dict[str, object]:
        """End the pins of an owner: those of one prompt, or without a prompt all of them."""
        owner = _owner(asked)
        keys: list[bytes] | None = None
        if "tokens" in asked or "text" in asked:
            runs = self._keys(asked).values()
            keys = [key for run in runs for key in run]
        ended = self._in_each(
            "not unpinned",
            "no longer pinned",
            _NO_PINS,
            lambda ledger: admin.unpin(ledger, keys, owner),
        )
        return self._answer(
            ended, f"{ended:,} chunks are no longer pinned by {owner}", _NO_PINS
        )

    def warm(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Load the leading chunks of a prompt from the disk into host memory, up to the first
        missing one.
        """
        warmed = 0
        why = ""
        runs = self._keys(asked)
        for root, keys in runs.items():
            for key in keys:
                outcome = self._warm_one(root, key)
                if isinstance(outcome, Reason):
                    why = (
                        ""
                        if outcome is Reason.ABSENT
                        else f"; the reason for the end: {outcome.value}"
                    )
                    break
                warmed += outcome
        with self._stores.for_operators() as (ledgers, troubles):
            served = {store.ledger for store in self._stores.stores()}
            for ledger in ledgers:
                if ledger in served:
                    continue
                there = sum(
                    len(
                        ledger.match_prefix(
                            keys, start=0, namespace=root, touch=False
                        ).slots
                    )
                    for root, keys in runs.items()
                )
                if there:
                    why += (
                        f"; {there:,} chunks in {ledger.directory} are loaded by its own "
                        "engines only"
                    )
            if troubles:
                why += f"; not looked into: {_told(troubles)}"
        said = f"{warmed:,} chunks were loaded into host memory{why}"
        return self._answer(
            warmed, said, "engines load its chunks when a request needs them"
        )

    def explain(self, asked: Mapping[str, object]) -> dict[str, object]:
        """Return how many leading tokens of a prompt each tier would serve, and why not more."""
        tokens = self._tokens(asked)
        chosen = _chosen_namespace(asked)
        with self._stores.for_operators() as (ledgers, troubles):
            found = list(self._prompts.explain(tokens, ledgers, chosen))
        if chosen is not None and not found and not troubles:
            raise ValueError(_UNKNOWN)
        return {
            "asked_tokens": len(tokens),
            "namespaces": found,
            "left": troubles,
        }

    def _warm_one(self, root: bytes, key: bytes) -> int | Reason:
        """Return 1 if the chunk was loaded, 0 if it was in memory already, or why it could not be
        loaded.
        """
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

    def _keys(
        self, asked: Mapping[str, object]
    ) -> Mapping[bytes, Sequence[bytes]]:
        """Return the keys of the prompt for each namespace, or only for the one that was chosen."""
        found = self._prompts.keys(self._tokens(asked), self._stores.ledgers())
        chosen = _chosen_namespace(asked)
        if chosen is None:
            return found
        if chosen not in found:
            raise ValueError(_UNKNOWN)
        return {chosen: found[chosen]}

    def _in_each(
        self, failed: str, done: str, why: str, work: Callable[[Ledger], int]
    ) -> int:
        """Return the sum of `work` in all stores of this machine. StoreError names all in which it
        was not done.

        `why`: why it is not done in remote tiers.
        """
        # it scans again, and logs the error
        with contextlib.suppress(PagodaError, OSError):
            self._stores.scan()
        chunks = 0
        with self._stores.for_operators() as (ledgers, troubles):
            for ledger in ledgers:
                try:
                    chunks += work(ledger)
                except (PagodaError, OSError) as trouble:
                    troubles[str(ledger.directory)] = str(trouble)
        if troubles:
            raise StoreError(
                f"{chunks:,} chunks are {done}; {failed}: {_told(troubles)}{self._rest(why)}"
            )
        return chunks

    def _answer(self, chunks: int, said: str, why: str) -> dict[str, object]:
        """Return an answer that names the remote tiers, which stay as they are, and why."""
        return {
            "chunks": chunks,
            "said": said + self._rest(why),
            "left": dict.fromkeys(self._shared, why),
        }

    def _rest(self, why: str) -> str:
        return "".join(
            f"; {place} stays as it is: {why}" for place in self._shared
        )

    def _tokens(self, asked: Mapping[str, object]) -> TokenIds:
        from pagoda.keys import as_token_ids

        text = asked.get("text")
        tokens = asked.get("tokens")
        if isinstance(text, str):
            if self._prompts.tokenize is None:
                raise ValueError(
                    "text needs a tokenizer: start the server with --tokenizer PATH, or send "
                    "token ids"
                )
            tokens = list(self._prompts.tokenize(text))
        if not isinstance(tokens, list) or not tokens:
            raise ValueError(
                'a prompt is missing: send "tokens", a list of token ids, or "text"'
            )
        if len(tokens) > MOST_TOKENS:
            raise ValueError(
                f"{len(tokens):,} tokens are too many: at most {MOST_TOKENS:,}"
            )
        return as_token_ids(tokens)


def _told(troubles: Mapping[str, str]) -> str:
    return "; ".join(
        f"{directory}: {trouble}" for directory, trouble in troubles.items()
    )


def _owner(asked: Mapping[str, object]) -> str:
    owner = asked.get("owner", OWNER)
    if (
        not isinstance(owner, str)
        or not owner
        or len(owner) > 100
        or not owner.isprintable()
    ):
        raise ValueError('"owner" must be one line of at most 100 characters')
    return owner


def _chosen_namespace(asked: Mapping[str, object]) -> bytes | None:
    """Return the namespace that a prompt is about, None for every one."""
    name = asked.get("namespace")
    return None if name is None else _namespace(name)


def _namespace(name: object) -> bytes:
    try:
        root = bytes.fromhex(name) if isinstance(name, str) else b""
    except ValueError:
        root = b""
    if len(root) != 32:
        raise ValueError(
            'say what to clear: "namespace", its 64 hex digits, or "everything": true'
        )
    return root
