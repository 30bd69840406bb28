"""One cache a process for all halves of the connector that have the same model, however many engines it runs."""

from __future__ import annotations

import threading

from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout

__all__ = ["let_go", "opened"]

_lock = threading.Lock()
_uses: dict[str, int] = {}


def opened(config: Config, namespace: Namespace, layout: KVLayout) -> Cache:
    """Return this process's cache of that model, layout and configuration; `let_go` of it once for each call.

    Raises StoreError with the remedy if a tier cannot be opened. Thread-safe.
    """
    name = f"vllm-{namespace.with_(layout=layout.fingerprint).root.hex()}-{hash(config):x}"
    with _lock:
        cache = Cache.open(name, config, namespace=namespace, layout=layout)
        _uses[name] = _uses.get(name, 0) + 1
        return cache


def let_go(cache: Cache, timeout: float = 5.0) -> None:
    """Close the cache when nobody in this process uses it any more; ends within about `timeout` seconds."""
    name = cache.name
    assert name is not None
    with _lock:
        left = _uses.get(name, 0) - 1
        if left > 0:
            _uses[name] = left
            return
        _uses.pop(name, None)
    cache.close(timeout)
