"""Forget the oldest entries of what must not grow for ever."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def drop_oldest(values: dict[_K, _V], most: int) -> None:
    """Remove the entries that were added first, until at most `most` are left."""
    while len(values) > most:
        del values[next(iter(values))]
