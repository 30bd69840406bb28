"""Positions of models that keep them between calls: Qwen2-VL and others with positions in three
dimensions.

Such a model remembers how far the images of its latest prompt moved the positions of what followed
(`rope_deltas`). Given KV, `generate` takes a prompt for the continuation of that latest one, and
moves it as far. So here the positions of each prompt are computed from the prompt alone, as for one
without KV.
"""

from __future__ import annotations

from typing import Any

from pagoda.connectors.transformers.media_items import CONTENT, TYPES

_KEPT = "rope_deltas"
_COMPUTES = "_prepare_position_ids_for_generation"


def positions_of(
    model: Any, input_ids: Any, mask: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the argument `position_ids` for a call of `generate` over a filled cache; empty for a
    model that computes positions from its mask alone.

    Changes what the model remembers to what it remembers after this prompt.

    Args:
        model: the model.
        input_ids: the whole prompts, [batch, tokens].
        mask: their attention mask, of the same shape.
        kwargs: the other arguments of the call, of which positions may depend on the shapes of
            images.
    """
    if not has_own_positions(model):
        return {}
    given = {
        name: value
        for name, value in kwargs.items()
        if value is not None and (name in CONTENT or name in TYPES)
    }
    given["attention_mask"] = mask
    generating = generating_module(model)
    return {"position_ids": getattr(generating, _COMPUTES)(input_ids, given)}


def has_own_positions(model: Any) -> bool:
    """Whether a model computes the positions of a prompt in a way of its own, not from the mask
    alone. Pure.
    """
    from transformers import GenerationMixin

    usual = getattr(GenerationMixin, _COMPUTES, None)
    own = getattr(type(generating_module(model)), _COMPUTES, usual)
    return usual is not None and own is not usual


def why_no_positions(model: Any) -> str:
    """Return why the positions of a prompt cannot be computed apart from those of the latest one;
    "" if they can. Pure.
    """
    from transformers import GenerationMixin

    if not _keepers(model) or hasattr(GenerationMixin, _COMPUTES):
        return ""
    return (
        f"{type(model).__name__} takes the positions of its latest prompt for those of this one: "
        "use a newer Transformers"
    )


def forget_positions(model: Any) -> None:
    """Make the model compute the positions of the next prompt from that prompt, also over a filled
    cache.
    """
    for keeper in _keepers(model):
        setattr(keeper, _KEPT, None)


def _keepers(model: Any) -> list[Any]:
    generating = generating_module(model)
    inner = getattr(generating, "base_model", generating)
    return [each for each in (generating, inner) if _KEPT in vars(each)]


def generating_module(model: Any) -> Any:
    """Return the module whose `generate` it is, inside of adapters and compiled shells."""
    from transformers import GenerationMixin

    for module in model.modules():
        if isinstance(module, GenerationMixin):
            return module
    return model
