"""Documents as separate chains, in a cache beside that of a model's prompts. Engines call it; it
calls `Cache`.

A document is stored as the model computes it at the beginning of a prompt. Its last, partial chunk
is padded. The layout of that cache names the rotary embedding, so no prompt finds a document, and
no document is moved by wrong angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from pagoda.cache import Cache, Hit
from pagoda.keys import Int32s, Item, TokenIds, as_token_ids
from pagoda.layout import Rotary

_PADDING = blake3(
    b"", derive_key_context="PagodaKV padding after a document"
).digest()


class Document(NamedTuple):
    """A document as a chain, for `retrieve`, `store` and `prefetch` of the cache of documents.

    `cache.retrieve(document.tokens, kv, items=document.items)`; `kv` must have room for all of
    `tokens`.
    """

    tokens: Int32s  # whole chunks: padded with zeros
    # put the padding, and so the document's length, into the last key
    items: list[Item]
    num_tokens: int  # without the padding

    @classmethod
    def of(cls, document: TokenIds, chunk_tokens: int) -> Document:
        """Return the chain of a document. Pure."""
        ids = as_token_ids(document)
        whole = -(-len(ids) // chunk_tokens) * chunk_tokens
        padded = np.zeros(whole, np.int32)
        padded[: len(ids)] = ids
        # padding is named in the key: it is not token 0
        items = [Item(len(ids), whole, _PADDING)] if whole > len(ids) else []
        return cls(padded, items, len(ids))

    def without_padding(self, hit: Hit) -> Hit:
        """Return a hit of the padded chain as a hit of the document's own tokens. Pure."""
        extra = hit.num_tokens - self.num_tokens
        if extra <= 0:
            return replace(hit, mask=hit.mask[: self.num_tokens])
        by_tier = dict(hit.by_tier)
        # tiers serve in order: the padded chunk came from the last one
        last = next(reversed(by_tier))
        by_tier[last] -= extra
        return replace(
            hit,
            num_tokens=self.num_tokens,
            by_tier=by_tier,
            mask=hit.mask[: self.num_tokens],
        )


def open_documents(prompts: Cache, rotary: Rotary) -> Cache:
    """Open the cache of the documents of a model, over the tiers of the same configuration; the
    caller closes it.

    `weights_changed` on one of the two caches is valid for both.

    Args:
        prompts: the cache of the model's prompts, open.
        rotary: the rotary embedding of the model's K.

    Raises what `Cache` raises, and ValueError if the layout has no K that can be moved.
    """
    layout = prompts.layout.with_rotary(rotary)
    namespace = prompts.namespace.with_(layout="")
    return Cache(
        prompts.config, namespace=namespace, layout=layout, weights_of=prompts
    )


def starts_of(pieces: Sequence[Int32s]) -> list[int]:
    """Return the first position of each piece: of the documents, then of the question. Pure."""
    return [0, *accumulate(len(piece) for piece in pieces[:-1])]


def as_documents(
    documents: Sequence[TokenIds | str] | None,
    question: TokenIds | str | None,
    tokenizer: Callable[..., Mapping[str, Iterable[int]]] | None = None,
) -> list[Int32s]:
    """Return the token ids of each document, then of the question. Pure.

    Text is tokenized piece by piece; special tokens are added to the first document only. Raises
    ValueError for an empty piece, for text without a tokenizer, and if there is no document or
    question.
    """
    if (
        isinstance(documents, str | dict)
        or not isinstance(documents, Sized)
        or not len(documents)
    ):
        raise ValueError(
            f"documents is {documents!r}: a list with at least one document, each token ids or text"
        )
    if question is None:
        raise ValueError(
            "question is missing: token ids or text that follow the documents"
        )
    found = []
    for number, piece in enumerate([*documents, question]):
        name = f"documents[{number}]" if number < len(documents) else "question"
        if isinstance(piece, str):
            if tokenizer is None:
                raise ValueError(f"{name} is text: pass tokenizer=, or token ids")
            piece = list(
                tokenizer(piece, add_special_tokens=number == 0)["input_ids"]
            )
        ids = as_token_ids(piece)
        if not len(ids):
            raise ValueError(f"{name} has no tokens: leave it out")
        found.append(ids)
    return found
