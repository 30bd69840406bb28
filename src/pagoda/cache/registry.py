"""Caches by name, in one process."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pagoda.config import Config
from pagoda.errors import StoreError
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.threads import Condition

if TYPE_CHECKING:
    from pagoda.cache.cache import Cache

__all__ = ["NameTaken", "Wanted", "destroy", "forget", "get", "open_named", "taken"]

_OPEN_SECONDS = 120.0  # each tier has a deadline of its own

_changed = Condition()  # of what is below; never held while a cache is opened or closed
_caches: weakref.WeakValueDictionary[str, Cache] = weakref.WeakValueDictionary()
_kept: dict[str, Cache] = {}  # those of `Cache.open`, which stay until they are closed
_opening: dict[object, str] = {}  # by who opens


class NameTaken(ValueError):
    """Two caches of one process cannot have one name."""


class Wanted(NamedTuple):
    """What a cache was opened with."""

    config: Config
    namespace: Namespace
    layout: KVLayout


def open_named(name: str, wanted: Wanted, make: Callable[[], Cache]) -> Cache:
    """Return the cache of that name, made now if there is none; it is kept until it is closed.

    Raises ValueError if the one there is was opened with anything else; the message names what differs. StoreError if
    another thread does not come to an end with opening it.
    """
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        cache = _waited_for(name, until)
        if cache is None:
            try:
                cache = make()
            except NameTaken:  # another thread was quicker
                continue
            _kept[name] = cache
            return cache
        here = Wanted(cache.config, cache.namespace, cache.layout)
        other = [field for field in Wanted._fields if getattr(here, field) != getattr(wanted, field)]
        if other:
            raise ValueError(
                f"the cache {name!r} is open with another {' and '.join(other)}: "
                f"use Cache.get({name!r}), or Cache.destroy({name!r}) first"
            )
        return cache


def _waited_for(name: str, until: float) -> Cache | None:
    """The cache of that name, once no thread is opening it; None if there is none."""
    with _changed:
        while name in _opening.values():
            if not _changed.wait(max(0.0, until - time.monotonic())):
                raise StoreError(
                    f"another thread has been opening the cache {name!r} for {_OPEN_SECONDS:g} s: see what it waits for"
                )
        return _caches.get(name)


@contextmanager
def taken(name: str | None, cache: Cache) -> Iterator[None]:
    """Have the name for `cache`, which is opened within; afterwards it is found by it as long as somebody has it.

    Raises NameTaken (a ValueError) if another has it. Without a name nothing is done.
    """
    if name is None:
        yield
        return
    if name in _caches:
        gc.collect()  # perhaps nobody but a cycle has it
    me = object()
    try:
        with _changed:
            if name in _caches or name in _opening.values():
                raise NameTaken(
                    f"a cache {name!r} is open already: use Cache.get({name!r}), or close it first"
                )
            _opening[me] = name
        yield  # not under the lock: those who close other caches take it too
        with _changed:
            _caches[name] = cache
    finally:
        _opening.pop(me, None)  # built in: no exception of a signal handler comes before it
        with _changed:
            _changed.notify_all()


def get(name: str) -> Cache | None:
    """Return the cache of that name, None if there is none; changes nothing."""
    with _changed:
        return _caches.get(name)


def destroy(name: str) -> bool:
    """Close the cache of that name and forget it; False if there is none. Its chunks stay in the tiers."""
    with _changed:
        cache = _caches.pop(name, None)
        _kept.pop(name, None)
    if cache is not None:
        cache.close()
    return cache is not None


def forget(cache: Cache) -> None:
    """Forget a cache that was closed."""
    with _changed:
        if cache.name is not None and _caches.get(cache.name) is cache:
            del _caches[cache.name]
            _kept.pop(cache.name, None)


def _fresh_lock() -> None:
    """A forked child has one thread: another of its parent may have been opening a cache."""
    global _changed
    _changed = Condition()
    _opening.clear()


os.register_at_fork(after_in_child=_fresh_lock)
