"""Shares one cache per process among all halves of the connector with the same model, for any
number of engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TypeVar

from pagoda.base.clock import Deadline
from pagoda.base.errors import StoreError
from pagoda.base.signal_safe_threads import Pool
from pagoda.cache import Cache
from pagoda.cache.cache import forget
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout

T = TypeVar("T")
_END_SECONDS = 5.0

_lock = threading.Lock()
_uses: dict[str, int] = {}


def agreed(descriptions: Iterable[T]) -> T:
    """Return the description of the KV memory that all ranks have sent. Raises ValueError if they
    differ.
    """
    first, *others = descriptions
    if any(other != first for other in others):
        raise ValueError(
            "the tensor-parallel ranks have different KV layouts: start all with the same version, "
            "environment and hardware"
        )
    return first


def opened(config: Config, namespace: Namespace, layout: KVLayout) -> Cache:
    """Return this process's cache of this model, layout and configuration; call `let_go` once for
    each call.

    Raises StoreError, which says what to do, if a tier cannot be opened, or there is no host tier.
    Thread-safe.
    """
    name = f"vllm-{namespace.with_(layout=layout.fingerprint).root.hex()}-{hash(config):x}"
    with _lock:
        # before the opening, so that no `let_go` closes this cache
        _uses[name] = _uses.get(name, 0) + 1
    with ExitStack() as undo:
        undo.callback(_use_less, name)
        cache = Cache.open(name, config, namespace=namespace, layout=layout)
        undo.pop_all()
    # the tier has no space; a configuration without a host tier was refused before
    if cache.slots is None:
        let_go(cache)
        raise StoreError(
            f"{config.host_path} has no room for one chunk of {layout.slot_bytes:,} bytes, and "
            "the engine's processes "
            "share host memory: mount it with a larger size= (docker: --shm-size), or choose "
            "another host_path"
        )
    return cache


def _use_less(name: str) -> None:
    """Take one use back, of a cache that could not be opened."""
    with _lock:
        _uses[name] -= 1


def end_threads(loads: Pool, saves: Pool) -> None:
    """End the running copies, in bounded time; loads that have not begun are cancelled first."""
    loads.shutdown(wait=False, cancel_futures=True)
    deadline = Deadline(_END_SECONDS)
    for threads in (loads, saves):
        threads.join(deadline.remaining())
    saves.shutdown(wait=False, cancel_futures=True)


def let_go(cache: Cache, timeout: float = 5.0) -> None:
    """Close the cache if this was its last use in this process, within about `timeout` seconds."""
    name = cache.name
    assert name is not None
    with _lock:
        left = _uses.get(name, 0) - 1
        if left > 0:
            _uses[name] = left
            return
        _uses.pop(name, None)
        forget(cache)  # a later `opened` gets a new one
    cache.close(timeout)
