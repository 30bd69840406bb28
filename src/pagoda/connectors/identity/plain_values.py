"""Settings of engines as plain values with the same text in every process."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping
from typing import Any

VOLATILE = (
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
)
"""Fields of a model's config that do not affect a forward pass; all other fields distinguish
models.
"""
_OF_FILES = (
    *VOLATILE,
    "_attn_implementation",
    "_attn_implementation_internal",
    "_commit_hash",
)


def plain(value: Any, where: str = "a setting") -> Any:
    """Return `value` as types of JSON, the same in every process; changes nothing.

    Raises ValueError, which names `where`, for an object whose text may have an address or is not
    known to be stable.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str | bytes):
        return str(value)
    if isinstance(value, Mapping):
        return {
            str(name): plain(each, f"{where}.{name}")
            for name, each in value.items()
        }
    if isinstance(value, list | tuple | range):
        return [plain(each, where) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(each, where) for each in value), key=repr)
    return _plain_object(value, where)


def _plain_object(value: Any, where: str) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return plain(
            {
                each.name: getattr(value, each.name)
                for each in dataclasses.fields(value)
            },
            where,
        )
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if callable(getattr(value, "to_dict", None)):  # a config inside a config
        return plain(stable(value.to_dict()), where)
    raise ValueError(
        f"{where} is a {type(value).__qualname__}, which has no stable text, so KV computed with "
        "it cannot be"
        " identified: leave that setting out, or run without the connector"
    )


def stable(value: Any) -> Any:
    """Return a model's config, as types of JSON, without fields that do not affect a forward
    pass.
    """
    if isinstance(value, Mapping):
        return {
            name: stable(each)
            for name, each in value.items()
            if name not in _OF_FILES
        }
    if isinstance(value, list | tuple):
        return [stable(each) for each in value]
    return value


def rope_types(config: Mapping[str, Any]) -> set[object]:
    """Return the types of rotary embeddings anywhere in a model's config. Changes nothing."""
    found: set[object] = set()
    for name, value in config.items():
        if name in ("rope_type", "rope_scaling_type"):
            found.add(value)
        if isinstance(value, Mapping):
            if name in ("rope_scaling", "rope_parameters"):
                found.add(value.get("rope_type", value.get("type")))
            found |= rope_types(value)
    return found
