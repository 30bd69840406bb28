"""vLLM: its connector PagodaConnector. docs/how-to/vllm.md says how to name it to vLLM.

connector          PagodaConnector: vLLM's interface; it passes each call to one of its halves
options            the options in kv_connector_extra_config
supported_engines  which engines are refused, and why
replaced_connector refuses a configuration in which vLLM replaces the connector
kv_memory          a worker's KV cache, inspected: the pages as bytes, and their format
page_geometry      the pages of one layer
identity/          everything that the KV depends on, with `connectors.identity`
scheduler          the scheduler's half: which chunks are cached, loaded and saved
engine_weights     the version of the engine's weights, from calls that vLLM hides from connectors
request_limits     what one request may load and store
request_hints      what clients say of their requests, and how answers ended
lookups            look-ups of requests in the tiers, on threads
scheduled_chunks   what this half and that of offloading/ share: copies, sources, events, log
metadata           the messages between the halves
worker             a worker's half: loads and saves
prefill_steps      how fast the engine computes prompts
shared_caches      one cache for all engines of a process
join_vllm_log      lines of PagodaKV in vLLM's log
event_form         KV events about a request's chunks, in vLLM's classes (`pagoda.kv_events` sends
                   them)
event_publisher    vLLM's publisher, for two threads and for routers that connect late
connector_stats    the counters
offloading/        PagodaHybridConnector, which PagodaConnector makes for hybrid models
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagoda.connectors.vllm.replaced_connector import (
    OURS,
    REPLACEMENTS,
    refusal,
    refuse_replacement,
)

if TYPE_CHECKING:
    from pagoda.connectors.vllm.connector import PagodaConnector
    from pagoda.connectors.vllm.offloading.spec import PagodaOffloadingSpec

__all__ = ["PagodaConnector", "PagodaOffloadingSpec", "register"]

_MODULES = {
    "PagodaConnector": "connector",
    "PagodaOffloadingSpec": "offloading.spec",
}


def register() -> None:
    """Make the connector known to vLLM by its name; vLLM's plugin loader calls it in each of its
    processes.

    From then on vLLM refuses a configuration in which it would replace the connector. Idempotent.
    Does not import the connector.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(OURS, __name__, OURS)
    refuse_replacement()


def __getattr__(name: str) -> Any:
    """Import only the class asked for: each uses parts of vLLM that the others do not need."""
    if name in REPLACEMENTS:
        # vLLM looks here with kv_connector_module_path, also where the plugin is not loaded
        raise ValueError(refusal(name))
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
