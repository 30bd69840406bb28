"""Passes of a model over part of a prompt, between which its cache can be copied.

`generate` computes a prompt in one pass, and the states of recurrent layers, as well as the rows of
sliding windows, are those of its end. So the tokens up to a cut are computed here, into the cache
from which `generate` then goes on: as `generate` would, through `prepare_inputs_for_generation`.

`choose_cuts` says where. Used by `stateful_probe` and `stateful_prompts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pagoda.connectors.transformers.model_checks import kv_argument, parameters_of

# a cut this part of a chunk behind the one before it is not worth an ending
_LEAST_PART = 4


def choose_cuts(
    tokens: int, chunk_tokens: int, loaded: int, known: int
) -> list[int]:
    """Return after how many tokens of a prompt an ending is kept, ascending; pure.

    The last whole chunk serves prompts that end in another way; the last token but one serves the
    next turn of a conversation, and the same prompt again. Where the prompt leaves what was stored
    before, others are likely to leave it too: a shared head that is seen for the second time.

    Args:
        tokens: of the prompt, of which the last is always computed by `generate`.
        chunk_tokens: tokens of a chunk. A prompt without a whole chunk has no cuts.
        loaded: tokens that need not be computed.
        known: leading tokens in whole chunks that were stored before.
    """
    last = tokens - 1
    whole = last - last % chunk_tokens
    if not whole:
        return []
    cuts = {cut for cut in (known, whole) if loaded < cut <= whole}
    before = max([loaded, *cuts])
    if last - before >= max(1, chunk_tokens // _LEAST_PART):
        cuts.add(last)
    return sorted(cuts)


def why_no_passes(model: Any) -> str:
    """Return why a prompt of this model cannot be computed in parts here; "" if it can. Pure."""
    from transformers import GenerationMixin

    known = inspect.signature(
        GenerationMixin.prepare_inputs_for_generation
    ).parameters
    if "next_sequence_length" not in known:
        return (
            "this version of Transformers is too old to compute a prompt in parts"
        )
    return ""


def pass_over(
    model: Any,
    input_ids: Any,
    mask: Any,
    begin: int,
    end: int,
    cache: Any,
    *,
    most_tokens: int | None = None,
    all_logits: bool = False,
    marks: Mapping[str, Any] | None = None,
) -> Any:
    """Compute tokens [begin, end) of each row into `cache`, which holds those before; return the
    logits of the last pass. Raises what the model raises.

    Args:
        model: that computes.
        input_ids: [batch, at least `end`].
        mask: ones, of the same shape.
        begin: how many tokens the cache holds.
        end: how many it holds afterwards.
        cache: a DynamicCache.
        most_tokens: of one pass; None: all.
        all_logits: whether those of every token are computed, not of the last one alone.
        marks: arguments of `generate` with a number for each token, for one pass from the first
            token on.
    """
    import torch

    known = parameters_of(model)
    ids = input_ids[:, :end]
    held = mask[:, :end]
    more: dict[str, Any] = {**(marks or {})}
    if "logits_to_keep" in known and not all_logits:
        more["logits_to_keep"] = 1
    positions = None
    if "position_ids" in known:
        given = {"attention_mask": held, "input_ids": ids}
        positions = model._prepare_position_ids_for_generation(ids, given)
    logits = None
    step = end - begin if most_tokens is None else most_tokens
    with torch.no_grad():
        for first in range(begin, end, step):
            last = min(first + step, end)
            if positions is not None:
                more["position_ids"] = positions[..., first:last]
            inputs = model.prepare_inputs_for_generation(
                ids[:, :last],
                next_sequence_length=last - first,
                attention_mask=held[:, :last],
                is_first_iteration=True,
                use_cache=True,
                **kv_argument(model, cache),
                **more,
            )
            logits = model(**inputs, return_dict=True).logits
            if hasattr(cache, "held_tokens"):
                cache.held_tokens = last
    return logits
