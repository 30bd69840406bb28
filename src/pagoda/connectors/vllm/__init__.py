"""vLLM: the module of PagodaConnector and of PagodaOffloadingSpec. docs/vllm.md says how to name it to vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.connectors.vllm.connector import PagodaConnector
    from pagoda.connectors.vllm.offloading import PagodaOffloadingSpec

__all__ = ["PagodaConnector", "PagodaOffloadingSpec"]

_ROOMS = {"PagodaConnector": "connector", "PagodaOffloadingSpec": "offloading"}


def __getattr__(name: str) -> Any:
    """Import the one that is asked for: each uses parts of vLLM that the other can do without."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
