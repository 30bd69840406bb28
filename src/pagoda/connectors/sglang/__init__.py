"""SGLang: PagodaHiCache, a storage of its HiCache. docs/how-to/sglang.md says how to name it to
SGLang.

hicache          PagodaHiCache: SGLang's interface; it turns calls into calls of a cache
pool_pages       the pages of a host pool of SGLang as planes of bytes, and their format
storage_options  the options in --hicache-storage-backend-extra-config
engine_facts     everything except the tokens that the KV depends on
weight_updates   whether the weights are still those of the files
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.connectors.sglang.hicache import PagodaHiCache

__all__ = ["PagodaHiCache"]


def __getattr__(name: str) -> Any:
    """Import the class when SGLang asks for it: `pagoda sglang` must not import SGLang."""
    if name != "PagodaHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pagoda.connectors.sglang.hicache import PagodaHiCache

    return PagodaHiCache
