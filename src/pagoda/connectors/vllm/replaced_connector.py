"""Refuses a configuration in which vLLM would silently use another connector than the one that it
names.

With `kv_offloading_size`, however it was given, vLLM replaces the name of the connector and keeps
its options. Then an engine would start whose every look-up goes elsewhere, and nothing would say
so.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

OURS = "PagodaConnector"
# the connectors that vLLM puts in its place
REPLACEMENTS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "LMCacheMPConnector",
)
_REPLACES = "_post_init_kv_transfer_config"
_CHECKED = "checked_by_pagoda"


def refusal(replacement: str, size: object = "") -> str:
    """Return the text of the error. Pure."""
    given = (
        f"kv_offloading_size = {size}" if size else "kv_offloading_size is set"
    )
    return (
        f"{given}: vLLM would use {replacement} instead of {OURS}; leave the option out "
        "(--kv-offloading-size or a "
        "beginning of it, a line in the file of --config, a keyword of LLM): host_size is "
        "PagodaKV's"
    )


def refuse_replacement() -> None:
    """Make vLLM raise ValueError when it replaces PagodaConnector in a configuration. Idempotent.

    Does nothing if this vLLM has no such step.
    """
    from vllm.config import VllmConfig

    replace = getattr(VllmConfig, _REPLACES, None)
    if replace is None or hasattr(replace, _CHECKED):
        return

    @wraps(replace)
    def checked(config: Any) -> None:
        before = (
            _connector_of(config)
            if _names_ours(config.kv_transfer_config)
            else None
        )
        replace(config)
        after = _connector_of(config)
        if before is not None and after != before:
            raise ValueError(
                refusal(after, config.cache_config.kv_offloading_size)
            )

    setattr(checked, _CHECKED, True)
    setattr(VllmConfig, _REPLACES, checked)


def _connector_of(config: Any) -> str:
    transfer = config.kv_transfer_config
    return "" if transfer is None else str(transfer.kv_connector)


def _names_ours(transfer: Any) -> bool:
    """Whether a configuration names PagodaConnector, or has it among those of a MultiConnector."""
    if transfer is None:
        return False
    below = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    names = [
        transfer.kv_connector,
        *(one.get("kv_connector") for one in below if isinstance(one, dict)),
    ]
    return OURS in names
