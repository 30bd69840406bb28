"""Caches by name, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout

if TYPE_CHECKING:
    from pagoda.cache.facade import Cache

__all__ = ["Wanted", "destroy", "forget", "get", "open_named"]

_lock = threading.RLock()
_caches: dict[str, Cache] = {}


class Wanted(NamedTuple):
    """What a cache was opened with."""

    config: Config
    namespace: Namespace
    layout: KVLayout


def open_named(name: str, wanted: Wanted, make: Callable[[], Cache]) -> Cache:
    """Return the cache of that name, made now if there is none.

    Raises ValueError if the one there is was opened with anything else; the message names what differs.
    """
    with _lock:
        cache = _caches.get(name)
        if cache is None:
            cache = _caches[name] = make()
            return cache
        here = Wanted(cache.config, cache.namespace, cache.layout)
        other = [field for field in Wanted._fields if getattr(here, field) != getattr(wanted, field)]
        if other:
            raise ValueError(
                f"the cache {name!r} is open with another {' and '.join(other)}: "
                f"use Cache.get({name!r}), or Cache.destroy({name!r}) first"
            )
        return cache


def get(name: str) -> Cache | None:
    """Return the cache of that name, None if there is none; changes nothing."""
    with _lock:
        return _caches.get(name)


def destroy(name: str) -> bool:
    """Close the cache of that name and forget it; False if there is none. Its chunks stay in the tiers."""
    with _lock:
        cache = _caches.pop(name, None)
    if cache is not None:
        cache.close()
    return cache is not None


def forget(cache: Cache) -> None:
    """Forget a cache that was closed."""
    with _lock:
        for name in [name for name, known in _caches.items() if known is cache]:
            del _caches[name]


def _fresh_lock() -> None:
    """A forked child has one thread: another of its parent may have been opening a cache."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)
