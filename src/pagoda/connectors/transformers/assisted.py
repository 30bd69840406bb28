"""Assisted and prompt-lookup decoding that begins from a filled cache.

Transformers gives the first forward pass of assisted decoding the whole prompt and the first
candidates, also if the cache has KV of that prompt already, which would then be there twice. Here
that one pass is cut to the tokens without KV. All later passes are those of Transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# the names that KV has in calls of models
_CACHES = ("cache", "past_key_values")
# what has a value for each token, in its last dimension
_OF_TOKENS = (
    "input_ids",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
)
# of assistants that continue the model's own states of the whole prompt
_FED_BY_THE_MODEL = ("Gemma4Assistant", "Gemma4UnifiedAssistant")


def layer_kinds(config: Any) -> set[str]:
    """Return the names of the kinds of layers in the cache of a model with this config. Pure."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=config)
    return {type(layer).__name__ for layer in cache.layers}


def why_not_assisted(decoding: Any, assistant: Any, kinds: set[str]) -> str:
    """Return why assisted decoding cannot begin from a filled cache; "" if it can. Pure.

    Args:
        decoding: the generation config of the call.
        assistant: the assistant model of the call, None for prompt lookup.
        kinds: the names of the kinds of layers that the model's cache has.
    """
    for name in ("use_mtp", "assistant_early_exit", "speculation_type"):
        if getattr(decoding, name, None):
            return f"{name}: its candidates are made of the model's states of the whole prompt"
    if type(assistant).__name__.startswith(_FED_BY_THE_MODEL):
        return (
            f"{type(assistant).__name__} makes candidates of the model's states of the whole "
            "prompt"
        )
    if kinds != {"DynamicLayer"}:
        return (
            "assisted generation takes tokens back, which a window or a state that was loaded "
            "cannot do"
        )
    return ""


@contextmanager
def first_pass_cut(
    model: Any, kv: Any, columns: int, prompt: Any
) -> Iterator[None]:
    """Give the first pass of the model over `kv` in this block only the tokens without KV.

    The model has a hook during the block; passes of other threads and over other KV are left alone.

    Args:
        model: the model whose `generate` runs in the block.
        kv: the DynamicCache of the call, filled up to `columns`.
        columns: how many tokens of the prompt have KV; 0: nothing is done.
        prompt: the ids of the prompt, [1, tokens].
    """
    if not columns:
        yield
        return
    thread = threading.get_ident()
    done = False

    def cut(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal done
        mine = any(kwargs.get(name) is kv for name in _CACHES)
        if done or not mine or threading.get_ident() != thread:
            return None
        done = True
        if not _begins_with(kwargs.get("input_ids"), prompt):
            return None  # a Transformers that cuts it already
        width = kwargs["input_ids"].shape[1]
        rest = {
            name: value[..., columns:]
            for name, value in kwargs.items()
            if name in _OF_TOKENS
            and value is not None
            and value.shape[-1] == width
        }
        return args, {**kwargs, **rest}

    hook = model.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _begins_with(ids: Any, prompt: Any) -> bool:
    width = prompt.shape[1]
    if ids is None or ids.shape[1] < width:
        return False
    same = ids[:, :width] == prompt.to(ids.device)
    return bool(same.all())
