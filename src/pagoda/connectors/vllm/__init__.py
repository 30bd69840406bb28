"""vLLM: its connectors PagodaConnector and PagodaHybridConnector. docs/how-to/vllm.md says how to name them to vLLM.

connector          PagodaConnector: vLLM's interface, each call given to its half
options            the options in kv_connector_extra_config
supported_engines  what is refused, and why
kv_memory          a worker's KV cache, inspected: the pages as bytes, and their format
layer_pages        the pages of one layer
identity/          what the KV depends on
scheduler          the scheduler's half: what is cached, loaded and saved
lookups            look-ups of requests in the tiers, on threads
metadata           the messages between the halves
worker             a worker's half: loads and saves
shared_caches      one cache for all engines of a process
vllm_log           lines of PagodaKV in vLLM's log
events             KV events for routers
connector_stats    what is counted
offloading/        the connector for hybrid models
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
        with suppress(ValueError):  # registered already
            KVConnectorFactory.register_connector(name, __name__, name)


def __getattr__(name: str) -> Any:
    """Import only the class asked for: each uses parts of vLLM that the others do not need."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
