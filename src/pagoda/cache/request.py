"""One request about one prompt: which chunks, under which keys, and its answer. Pure; checks what the caller gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from pagoda.cache.hit import Hit
from pagoda.keys import Item, Namespace, TokenIds, as_token_ids
from pagoda.metrics import Reason

__all__ = ["CacheRequest", "CallOptions", "KeyScheme", "Keys", "Mask", "build_request"]

Mask: TypeAlias = "Sequence[bool] | npt.NDArray[np.bool_]"
# from the first chunk of the prompt on, or as `Cache.keys` gives them (start, end, key)
Keys: TypeAlias = "Sequence[bytes] | Sequence[tuple[int, int, bytes]]"
# tokens, root, chunk_tokens, items -> the key of every whole chunk
KeyScheme: TypeAlias = Callable[[TokenIds, bytes, int, Iterable[Item]], list[bytes]]


class CallOptions(TypedDict, total=False):
    """What every call takes by keyword."""

    start_tokens: int  # skips the chunks before this token: a multiple of chunk_tokens
    mask: Mask | None  # the same as one bool a token: False...False True...True
    keys: Keys | None  # instead of hashing the tokens (which may then be None)
    items: Sequence[Item]  # multimodal items at their token positions
    lora: str | None  # instead of the namespace's
    salt: str | None  # instead of the namespace's: keeps tenants apart
    tiers: Iterable[str] | None  # only these
    deadline_seconds: float | None  # of the whole call; default: config.deadline_seconds without progress


class CacheRequest(NamedTuple):
    """Chunks [first, first + len(keys)) of a prompt of `length_tokens` tokens."""

    namespace: Namespace
    keys: list[bytes]
    first: int  # chain position of keys[0]
    parent: bytes | None  # the key at first - 1
    length_tokens: int
    chunk_tokens: int
    tokens: TokenIds | None = None  # None: the caller gave keys only
    items: tuple[Item, ...] = ()
    head: Sequence[bytes] = ()  # the keys before keys[0], as far as the caller gave them

    @property
    def start_tokens(self) -> int:
        """The first token that is requested."""
        return self.first * self.chunk_tokens

    def starts(self, begin: int, end: int) -> list[int]:
        """Return the first token of each of the chunks keys[begin:end]."""
        return [(self.first + i) * self.chunk_tokens for i in range(begin, end)]

    def parent_of(self, index: int) -> bytes | None:
        """Return the key of the chunk before keys[index], None at the root."""
        return self.keys[index - 1] if index else self.parent

    def hit(self, by_tier: Mapping[str, int], reason: Reason | None = None, detail: str = "") -> Hit:
        """Return the answer: leading chunks by tier, and why not more."""
        tokens = {tier: chunks * self.chunk_tokens for tier, chunks in by_tier.items() if chunks}
        start, served = self.start_tokens, sum(tokens.values())
        mask = np.zeros(self.length_tokens, np.bool_)
        mask[start : start + served] = True
        return Hit(served, tokens, mask, reason, detail, start)

    def hit_without_chunks(self) -> Hit:
        """Return the answer if there is no whole chunk in the request."""
        if self.length_tokens >= self.chunk_tokens:
            return self.hit({})
        detail = f"{self.length_tokens} tokens, a chunk has {self.chunk_tokens}"
        return self.hit({}, Reason.SHORT_PROMPT, detail)


def build_request(
    tokens: TokenIds | None,
    keys: Keys | None,
    *,
    namespace: Namespace,
    chunk_tokens: int,
    scheme: KeyScheme,
    start_tokens: int = 0,
    mask: Mask | None = None,
    items: Sequence[Item] = (),
) -> CacheRequest:
    """Return the request for the whole chunks of `tokens` from `start_tokens` on. Pure.

    `keys` replace hashing. Raises ValueError for a mask that is not False...False True...True, a start that is not a
    multiple of a chunk, and keys that do not fit the tokens.
    """
    if tokens is None and keys is None:
        raise ValueError("neither tokens nor keys were given: pass tokens, or keys")
    ids = None if tokens is None else as_token_ids(tokens)
    origin, given = (0, None) if keys is None else _given_keys(keys, chunk_tokens)
    length = len(ids) if ids is not None else (origin + len(given or ())) * chunk_tokens
    first = _first_chunk(start_tokens, mask, length, chunk_tokens) or origin
    if given is None:
        assert ids is not None
        given = scheme(ids, namespace.root, chunk_tokens, items)
    elif origin + len(given) > length // chunk_tokens:
        raise ValueError(
            f"{len(given)} keys from chunk {origin} on, but {length} tokens: pass both of one prompt"
        )
    if first < origin:
        raise ValueError(
            f"keys begin at token {origin * chunk_tokens}, start_tokens = {start_tokens}: pass earlier keys"
        )
    skip = first - origin
    parent = given[skip - 1] if 0 < skip <= len(given) else None
    return CacheRequest(
        namespace, given[skip:], first, parent, length, chunk_tokens, ids, tuple(items), given[:skip]
    )


def _given_keys(keys: Keys, chunk_tokens: int) -> tuple[int, list[bytes]]:
    """Return the chain position of the first of the caller's keys, and the keys alone."""
    flat: list[bytes] = []
    origin = 0
    for i, key in enumerate(keys):
        if isinstance(key, tuple):
            start, _, key = key
            origin = origin if i else start // chunk_tokens
            if start != (origin + i) * chunk_tokens:
                raise ValueError(f"keys[{i}] begins at token {start}: keys must be one run of whole chunks")
        if not isinstance(key, bytes) or len(key) != 32:
            raise ValueError(f"keys[{i}] is not a key of 32 bytes: use Cache.keys, KeyChain or derive_keys")
        flat.append(key)
    return origin, flat


def _first_chunk(start_tokens: int, mask: Mask | None, length_tokens: int, chunk_tokens: int) -> int:
    """Return the first chunk that is requested. Raises ValueError for a start inside a chunk or a bad mask."""
    if mask is not None:
        masked = _mask_start(mask, length_tokens)
        if start_tokens not in (0, masked):
            raise ValueError(
                f"start_tokens = {start_tokens}, but the mask begins at {masked}: pass one of them"
            )
        start_tokens = masked
    if start_tokens < 0 or start_tokens % chunk_tokens:
        raise ValueError(
            f"the request begins at token {start_tokens}: it must be a multiple of the chunk, {chunk_tokens} tokens"
        )
    if start_tokens > length_tokens:
        raise ValueError(f"start_tokens = {start_tokens} is past the {length_tokens} tokens of the prompt")
    return start_tokens // chunk_tokens


def _mask_start(mask: Mask, length_tokens: int) -> int:
    """Return the number of leading Falses; the rest must be all True."""
    wanted = np.asarray(mask)
    if wanted.ndim != 1 or wanted.dtype != np.bool_ or len(wanted) != length_tokens:
        raise ValueError(
            f"a mask is one bool a token, ({length_tokens},); got {wanted.dtype} of shape {wanted.shape}"
        )
    start = int(wanted.argmax()) if wanted.any() else len(wanted)
    if not wanted[start:].all():
        raise ValueError("a mask is False...False True...True: this one has a False after a True")
    return start
