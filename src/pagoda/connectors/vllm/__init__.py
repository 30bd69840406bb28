"""vLLM: its connectors PagodaConnector and PagodaHybridConnector. docs/how-to/vllm.md says how to name them to vLLM.

connector          PagodaConnector: vLLM's interface, each call given to its half
options            what kv_connector_extra_config may say
supported_engines  what is refused, and why
kv_memory          a worker's KV cache, inspected: the pages as bytes, and their format
kv_pages           the pages of one layer
identity/          what the KV depends on
scheduler          the scheduler's half: what is cached, loaded and saved
lookups            finds out on threads what is cached
metadata           what the halves tell each other
worker             a worker's half: loads and saves
shared_caches      one cache for all engines of a process
events             KV events for routers
connector_stats    what is counted
offloading/        hybrid models
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.connectors.vllm.connector import PagodaConnector
    from pagoda.connectors.vllm.offloading.hybrid_connector import PagodaHybridConnector
    from pagoda.connectors.vllm.offloading.spec import PagodaOffloadingSpec

__all__ = ["PagodaConnector", "PagodaHybridConnector", "PagodaOffloadingSpec", "register"]

_MODULES = {
    "PagodaConnector": "connector",
    "PagodaHybridConnector": "offloading.hybrid_connector",
    "PagodaOffloadingSpec": "offloading.spec",
}


def register() -> None:
    """Make the connectors known to vLLM by their names; vLLM's plugin loader calls it in each of its processes.

    Idempotent. Imports neither connector.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("PagodaConnector", "PagodaHybridConnector"):
        with suppress(ValueError):  # it is known already
            KVConnectorFactory.register_connector(name, __name__, name)


def __getattr__(name: str) -> Any:
    """Import the one that is asked for: each uses parts of vLLM that the other can do without."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
