"""vLLM: its connectors PagodaConnector and PagodaHybridConnector. docs/vllm.md says how to name them to vLLM."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.connectors.vllm.connector import PagodaConnector
    from pagoda.connectors.vllm.hybrid import PagodaHybridConnector
    from pagoda.connectors.vllm.offloading import PagodaOffloadingSpec

__all__ = ["PagodaConnector", "PagodaHybridConnector", "PagodaOffloadingSpec", "register"]

_ROOMS = {
    "PagodaConnector": "connector",
    "PagodaHybridConnector": "hybrid",
    "PagodaOffloadingSpec": "offloading",
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
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
