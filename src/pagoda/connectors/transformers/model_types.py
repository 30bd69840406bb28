"""Which types of Transformers are served: asks the checks that decide it when a model is opened.

A type is judged by its default configuration, without weights. A model of it is probed with its
weights when it is opened, so it may go on uncached although its type is served: some types with
states compute other text behind a state that is given to them. And a configuration other than the
default may be served exactly although the default is not (a `sliding_window` of None).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pagoda.connectors.transformers import model_checks
from pagoda.connectors.transformers.media_items import placeholder_tokens
from pagoda.connectors.transformers.stateful_probe import check_stateful

EXACTLY = "exactly"
# a prompt goes on only where a window or a state was kept
TO_AN_ENDING = "to an ending"
UNCACHED = "uncached"
# the first version of PagodaKV that serves types in this way
SINCE = {EXACTLY: "0.1.0", TO_AN_ENDING: "0.1.0", UNCACHED: ""}


class ServedType(NamedTuple):
    """How one type of models is served."""

    type: str  # `model_type` of its configuration
    model: str  # its class
    how: str  # EXACTLY, TO_AN_ENDING or UNCACHED
    since: str  # the first version of PagodaKV; "" if it is not served
    items: bool  # whether what a prompt shows can be part of its keys
    why: str  # why it is not served


def known_types() -> list[str]:
    """Return the types that generate text, sorted; imports Transformers."""
    return sorted(_classes())


def served_types(types: Sequence[str]) -> Iterator[ServedType]:
    """Yield how each type is served, in the given order. Imports the code of each.

    Raises KeyError for a type that Transformers does not have.
    """
    classes = _classes()
    for one in types:
        yield _served(one, classes[one])


def _classes() -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    named = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    return {
        kind: name if isinstance(name, str) else name[0]
        for kind, name in named.items()
    }


def _served(kind: str, name: str) -> ServedType:
    import transformers

    items = False
    how = EXACTLY
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.CONFIG_MAPPING[kind]()
            shell = _without_weights(name, config)
            if model_checks.is_stateful(shell):
                how = TO_AN_ENDING
                check_stateful(shell)
            else:
                items = bool(placeholder_tokens(config))
                model_checks.check_model(shell)
            _check_code(name, config)
    except ValueError as trouble:
        why = str(trouble).removeprefix(f"{name} ").removeprefix(f"{name}: ")
        return ServedType(kind, name, UNCACHED, "", False, why)
    except Exception as trouble:  # noqa: BLE001
        # whatever the code of a type raises
        why = f"its default configuration is not complete: {type(trouble).__name__}: {trouble}"
        return ServedType(kind, name, UNCACHED, "", False, why)
    return ServedType(kind, name, how, SINCE[how], items, "")


def _check_code(name: str, config: Any) -> None:
    """Raise ValueError for a type that a probe would refuse whatever the weights are."""
    import transformers

    known = inspect.signature(getattr(transformers, name).forward).parameters
    if not {"cache", "past_key_values"} & known.keys():
        raise ValueError("its forward pass takes no KV")
    if getattr(config, "is_decoder", None) is False:
        raise ValueError(
            "an encoder, whose tokens see those after them: served with is_decoder=True"
        )


def _without_weights(name: str, config: Any) -> Any:
    """Return what the checks ask of a model, with its configuration and without its weights."""
    import transformers

    real = getattr(transformers, name)
    asked = ("prepare_inputs_for_generation", "_supports_default_dynamic_cache")
    methods = {
        method: getattr(real, method) for method in asked if hasattr(real, method)
    }
    shell = type(
        name,
        (),
        {
            "config": config,
            "_is_stateful": getattr(real, "_is_stateful", False),
            "parameters": lambda _: (),
            **methods,
        },
    )
    return shell()
