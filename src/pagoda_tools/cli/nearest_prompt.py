"""Finds the stored prompt nearest to a prompt, and the token in which they differ. Uses the log of
prompts; pure.

`pagoda explain` calls it through `prompt_explanation`; it calls `prompt_keys` for the schemes of
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.cache.prompt_log import LoggedPrompt
from pagoda.keys import Int32s, chunk_keys
from pagoda_tools.cli.prompt_keys import schemes

# of the prompts that share most with ours, so many are checked: is one still stored?
_LOOKED_AT = 16
# of the latest prompts of a namespace, so many are tried: some keys may contain a salt
_TRIED = 8
# a prompt with another first token is near if this share of the rest is the same
_ALIKE = 0.5


@dataclass(frozen=True)
class NearestPrompt:
    """The stored prompt that shares the longest beginning with ours, and where it differs.
    Immutable.
    """

    namespace: bytes
    other_fields: tuple[str, ...]
    """The fields in which its namespace differs from the one asked about; the value of a salt is
    never shown.
    """
    key: bytes
    """The key of its chunk in which ours differs, or of its last chunk."""
    num_tokens: int
    same_tokens: int
    """How many leading tokens are the same."""
    token: int | None
    """The number of the first different token, from 0; None: one of the two prompts ends there."""
    token_id: int | None
    """That token in our prompt (and below in the stored one); None if the prompt has ended."""
    stored_id: int | None
    tiers: tuple[str, ...]
    """The tiers that have its chunk; empty: it is no longer stored."""
    stored_at: float
    """Unix time."""

    def difference(self) -> str:
        """Return in a few words where ours differs."""
        if self.token is not None:
            here = self.token_id
            there = self.stored_id
            return f"it differs at token {self.token:,}: {here} here, {there} in the nearest prompt"
        if self.stored_id is None and self.token_id is not None:
            return (
                "the nearest prompt is its beginning and ends after token "
                f"{self.same_tokens - 1:,}"
            )
        return "the nearest prompt begins with all of it"


def keys_of_prompt(
    ids: Int32s,
    root: bytes,
    chunk_tokens: int,
    logged: Sequence[LoggedPrompt],
    known: Callable[[bytes], bool],
) -> list[bytes]:
    """Return the key of every whole chunk, by the scheme of the stored chunks of the namespace
    `root`.

    That is the scheme that gives one of the latest logged prompts its keys; without logged prompts,
    the one whose first key is `known`. If no scheme fits (an adapter's name or a request's salt is
    part of the engine's hash), the keys of the logged prompt that shares most with ours are used
    for the shared part; keys after it hit nothing.
    """
    own = chunk_keys(ids, root, chunk_tokens)
    theirs = [
        one
        for one in logged
        if one.namespace == root and one.chunk_tokens == chunk_tokens
    ]
    if not own:
        return own
    for scheme in schemes(chunk_tokens):
        if theirs:
            fits = any(
                scheme(one.tokens[:chunk_tokens], root, chunk_tokens)
                == one.keys[:1]
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
    ids: Int32s,
    root: bytes,
    logged: Sequence[LoggedPrompt],
    tiers_with: Callable[[bytes], tuple[str, ...]],
    other_fields: Callable[[bytes], tuple[str, ...]],
    *,
    besides: bool = False,
) -> NearestPrompt | None:
    """Return the logged prompt nearest to ours: of the same namespace, otherwise of any; None if
    none is near.

    That is the prompt with the longest common beginning. Among several: one that is still stored,
    then the one with most of the other tokens in common, then the latest. `besides`: leave out
    prompts that begin with all of ours. `tiers_with` returns the tiers that have a key,
    `other_fields` the fields in which a namespace differs.
    """
    theirs = [one for one in logged if one.namespace == root] or logged
    measured = [(_same_tokens(ids, one.tokens), one) for one in theirs]
    measured = [
        (same, one) for same, one in measured if not besides or same < len(ids)
    ]
    if not measured:
        return None
    most = max(same for same, _ in measured)
    equal = [
        (_alike(ids, one.tokens), one.stored_at, one)
        for same, one in measured
        if same == most
    ]
    equal.sort(key=lambda row: row[:2], reverse=True)
    if not most and equal[0][0] < _ALIKE * len(ids):
        return None
    found = [(one, _key_at(one, most)) for *_, one in equal[:_LOOKED_AT]]
    best, key = next(
        ((one, key) for one, key in found if tiers_with(key)), found[0]
    )
    both = most < len(ids) and most < len(best.tokens)
    return NearestPrompt(
        namespace=best.namespace,
        other_fields=other_fields(best.namespace)
        if best.namespace != root
        else (),
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
    """Return how many tokens are the same at the same position."""
    both = min(len(ours), len(theirs))
    return int(np.count_nonzero(ours[:both] == theirs[:both]))
