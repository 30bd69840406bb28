"""Did-you-mean sentences for misspelt names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# names of other caches whose nearest name here means something else
_ELSEWHERE = {"write_through_selective": "selective"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest of `known`, ignoring capitals, or an empty
    string.
    """
    spelt = {name.lower(): name for name in known}
    if hint := name_of_another_cache(word, spelt):
        return hint
    near = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=0.6)
    if not near and len(word) > 2:
        near = [name for name in spelt if word.lower() in name][:1]
    return f"; did you mean {spelt[near[0]]}?" if near else ""


def name_of_another_cache(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" if `word` is what another cache calls one of `known`, or an empty
    string.
    """
    meant = _ELSEWHERE.get(word.lower(), "")
    return f"; did you mean {meant}?" if meant and meant in known else ""
