"""PagodaKV: a KV cache in tiers for the attention keys and values that an LLM engine has computed.

Public names are resolved on first use: `import pagoda` loads no numpy, lmdb or torch. Packages, in
the order in which data reaches them:

    connectors      Transformers, vLLM, SGLang and llama.cpp
    blend           reuse of documents at any position of a prompt
    cache           Cache, which knows all tiers
    transfer        moves KV between an engine's memory and slots
    tiers           host, disk, remote
    kv_events       reports to routers of requests what the tiers hold
    ledger, slab    which chunk is in which slot of a local tier; the slots
    codec, policy   the header and checksum of a chunk; which chunk is evicted first
    blocks          the block manager, for people who write engines
    config          the options, and where they come from
    testing         conformance tests, for people who write tiers and policies
    base            time, errors, counters, threads, files: what all the others stand on

and two modules that all of them use: `keys` (tokens to keys) and `layout` (the bytes of a chunk).
What people run (the command, the server, replay, quality, migration) is the package `pagoda_tools`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.base.errors import (
        ClosedError,
        ConfigError,
        LedgerCorrupt,
        NoRoomError,
        PagodaError,
        StoreError,
    )
    from pagoda.base.metrics import Reason
    from pagoda.cache import Cache, ChunkRef, Hit, RequestHints, Stored
    from pagoda.config import Config
    from pagoda.keys import Namespace
    from pagoda.layout import KVLayout

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "ChunkRef",
    "ClosedError",
    "Config",
    "ConfigError",
    "Hit",
    "KVLayout",
    "LedgerCorrupt",
    "Namespace",
    "NoRoomError",
    "PagodaError",
    "Reason",
    "RequestHints",
    "StoreError",
    "Stored",
    "__version__",
]

# the module of each public name
_HOME = dict.fromkeys(__all__, "pagoda.base.errors") | {
    "Cache": "pagoda.cache",
    "ChunkRef": "pagoda.cache",
    "Hit": "pagoda.cache",
    "RequestHints": "pagoda.cache",
    "Stored": "pagoda.cache",
    "Reason": "pagoda.base.metrics",
    "Config": "pagoda.config",
    "KVLayout": "pagoda.layout",
    "Namespace": "pagoda.keys",
}


def __getattr__(name: str) -> object:
    """Import the public name `name` on first use and keep it.

    Raises AttributeError for any other name, ImportError where the system is not Linux.
    """
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    if sys.platform != "linux":
        raise ImportError(f"PagodaKV runs on Linux, this is {sys.platform}")
    found: object = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, imported yet or not."""
    return sorted({*globals(), *__all__})
