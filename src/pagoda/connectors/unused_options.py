"""Options that are set and do nothing under an engine, which says so once. Called by vLLM's and SGLang's connectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.config import option_names
from pagoda.config.sources import DEFAULT, load


def unused_options(engine: str, given: Mapping[str, Any]) -> str:
    """Return what to log of options of blending, which an engine whose scheduler counts prefixes cannot use; or "".

    `given`: the connector's options. Reads the environment and the configuration file as the connector did, with no
    other errors. Changes nothing.
    """
    names = [name for name in option_names() if name.startswith("blend_")]
    origins = load(**{name: given[name] for name in option_names() if name in given}).origins
    found = [f"{name} ({origins[name]})" for name in names if origins[name] != DEFAULT]
    if not found:
        return ""
    return (
        f"{' and '.join(found)}: {engine} counts prefixes only, so nothing is blended here; Transformers "
        "(CachedModel.generate(documents=...)) and own engines blend"
    )
