"""PagodaKV: a KV cache in tiers for the attention keys and values that an LLM engine has computed.

Public names are resolved on first use: `import pagoda` loads no numpy, lmdb or torch. Packages, in
the order in which data reaches them:

    connectors      Transformers, vLLM and SGLang
    blend           reuse of documents at any position of a prompt
    cache           Cache, which knows all tiers
    transfer        moves KV between an engine's memory and slots
    tiers           host, disk, remote
    kv_events       reports to routers of requests what the tiers hold
    ledger, slab    which chunk is in which slot of a local tier; the slots
    codec, policy   the header and checksum of a chunk; which chunk is evicted first
    blocks, config, replay, migrate, serve, cli, testing    the surroundings, and what users and
                                                            operators call

and the modules that all of them use: `keys` (tokens to keys), `layout` (the bytes of a chunk),
`metrics` (reasons, counters, loggers), `errors`, `clock`, `boot_identity`, `signal_safe_threads`,
`fork`, `finalizers`, `store_place`, `file_space`, `file_systems`, `file_lock`, `cgroup_memory`,
`json_log`, `url_hosts`, `serve_token_file`, `serve_proof`, `quality_verdict` (may an approximate
feature start), `quality_bounds` (what it must keep), `trusted_files` (which files are believed, and
for what).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.cache import Cache, Hit
    from pagoda.config import Config
    from pagoda.errors import (
        ClosedError,
        ConfigError,
        LedgerCorrupt,
        NoRoomError,
        PagodaError,
        StoreError,
    )
    from pagoda.keys import Namespace
    from pagoda.layout import KVLayout

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "ClosedError",
    "Config",
    "ConfigError",
    "Hit",
    "KVLayout",
    "LedgerCorrupt",
    "Namespace",
    "NoRoomError",
    "PagodaError",
    "StoreError",
    "__version__",
]

# the module of each public name
_HOME = dict.fromkeys(__all__, "pagoda.errors") | {
    "Cache": "pagoda.cache",
    "Hit": "pagoda.cache",
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
