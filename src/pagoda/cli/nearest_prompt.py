"""Which stored prompt a prompt is nearest to, and the token in which they differ. Reads the log of prompts; pure.

`pagoda explain` calls it through `prompt_coverage`; it calls `key_schemes` for the schemes of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.cache.prompt_log import LoggedPrompt
from pagoda.cli.key_schemes import schemes
from pagoda.keys import Int32s, chunk_keys

_LOOKED_AT = 16  # of the prompts that share the most with ours: which of them is still stored
_TRIED = 8  # of the latest prompts of a namespace: a salt may be part of the keys of some
_ALIKE = 0.5  # a prompt whose very first token is another is near if so much of the rest is the same


@dataclass(frozen=True)
class NearestPrompt:
    """The stored prompt that shares the longest beginning with ours, and where it differs. Immutable."""

    namespace: bytes
    other_fields: tuple[str, ...]
    """In what its namespace differs from the one asked about; the values of a salt are never told."""
    key: bytes
    """Of its chunk where ours differs, or of its last one."""
    num_tokens: int
    same_tokens: int
    """So many leading tokens are the same."""
    token: int | None
    """The first token that is another, counted from 0; None: one of the two prompts ends there."""
    token_id: int | None
    """Which token stands there in ours, and in the stored prompt; None where it has ended."""
    stored_id: int | None
    tiers: tuple[str, ...]
    """Those that have its chunk; empty: it was stored, and is no longer."""
    stored_at: float
    """Unix time."""

    def difference(self) -> str:
        """Say in a few words where ours differs."""
        if self.token is not None:
            here, there = self.token_id, self.stored_id
            return f"it differs at token {self.token:,}: {here} here, {there} in the nearest"
        if self.stored_id is None and self.token_id is not None:
            return f"the nearest is its beginning: that ends after token {self.same_tokens - 1:,}"
        return "the nearest begins with all of it"


def keys_of_prompt(
    ids: Int32s, root: bytes, chunk_tokens: int, logged: Sequence[LoggedPrompt], known: Callable[[bytes], bool],
) -> list[bytes]:  # fmt: skip
    """Return the key of every whole chunk under the scheme by which the namespace `root` was stored.

    The scheme is the one that gives one of the latest logged prompts its keys; without any, that of which the first
    key is `known`. If none is (an adapter's name or a request's salt is part of the engine's hash), the keys of the
    logged prompt that shares most with ours are used as far as it is the same; keys after that are of no stored chunk.
    """
    own = chunk_keys(ids, root, chunk_tokens)
    theirs = [one for one in logged if one.namespace == root and one.chunk_tokens == chunk_tokens]
    if not own:
        return own
    for scheme in schemes(chunk_tokens):
        if theirs:
            fits = any(
                scheme(one.tokens[:chunk_tokens], root, chunk_tokens) == one.keys[:1]
                for one in theirs[-_TRIED:]
            )
        else:
            fits = known(scheme(ids[:chunk_tokens], root, chunk_tokens)[0])
        if fits:
            return scheme(ids, root, chunk_tokens)
    if theirs:
        best = max(theirs, key=lambda one: _same_tokens(ids, one.tokens))
        same = best.keys[: _same_tokens(ids, best.tokens) // chunk_tokens]
        return [*same, *own[len(same) :]]
    return own


def nearest_prompt(
    ids: Int32s, root: bytes, logged: Sequence[LoggedPrompt], tiers_with: Callable[[bytes], tuple[str, ...]],
    other_fields: Callable[[bytes], tuple[str, ...]], *, besides: bool = False,
) -> NearestPrompt | None:  # fmt: skip
    """Return the logged prompt nearest to ours: of the same namespace, else of any; None if none is near.

    That is the one with the longest common beginning. Of several: one that is still stored, then the one that has most
    of the other tokens in common, then the latest. `besides`: ours itself, and what it is the beginning of, is left
    out. `tiers_with` tells which tiers have a key, `other_fields` in which fields a namespace differs.
    """
    theirs = [one for one in logged if one.namespace == root] or logged
    measured = [(_same_tokens(ids, one.tokens), one) for one in theirs]
    measured = [(same, one) for same, one in measured if not besides or same < len(ids)]
    if not measured:
        return None
    most = max(same for same, _ in measured)
    equal = [(_alike(ids, one.tokens), one.stored_at, one) for same, one in measured if same == most]
    equal.sort(key=lambda row: row[:2], reverse=True)
    if not most and equal[0][0] < _ALIKE * len(ids):
        return None
    found = [(one, _key_at(one, most)) for *_, one in equal[:_LOOKED_AT]]
    best, key = next(((one, key) for one, key in found if tiers_with(key)), found[0])
    both = most < len(ids) and most < len(best.tokens)
    return NearestPrompt(
        namespace=best.namespace,
        other_fields=other_fields(best.namespace) if best.namespace != root else (),
        key=key,
        num_tokens=len(best.tokens),
        same_tokens=most,
        token=most if both else None,
        token_id=int(ids[most]) if most < len(ids) else None,
        stored_id=int(best.tokens[most]) if most < len(best.tokens) else None,
        tiers=tiers_with(key),
        stored_at=best.stored_at,
    )


def _key_at(prompt: LoggedPrompt, token: int) -> bytes:
    return prompt.keys[min(token // prompt.chunk_tokens, len(prompt.keys) - 1)]


def _same_tokens(ours: Int32s, theirs: Int32s) -> int:
    """Return how many leading tokens are the same."""
    both = min(len(ours), len(theirs))
    other = ours[:both] != theirs[:both]
    return int(other.argmax()) if other.any() else both


def _alike(ours: Int32s, theirs: Int32s) -> int:
    """Return how many tokens are the same at their places."""
    both = min(len(ours), len(theirs))
    return int(np.count_nonzero(ours[:both] == theirs[:both]))
