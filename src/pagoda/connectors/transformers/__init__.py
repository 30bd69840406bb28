"""Hugging Face Transformers: `CachedModel`, a model with a cache of its prompts' KV.

In the order in which a call meets them:
    cached_model      CachedModel: generate, prefix, store
    call_arguments    which arguments of a call are harmless; with any other, the call is not cached
    assisted          assisted and prompt-lookup decoding from a filled cache
    media_items       images and the like of a prompt, as items of its keys
    media_trials      tries whether a model can continue after them
    positions         positions that a model remembers from its latest prompt
    numerics          what of the process decides the numbers, for the key: autocast, precision,
                      kernels
    model_walk        one walk over a model's modules, which the next three and the identity share
    foreign_state     what adapters and the user's modules hold besides their weights, for the key
    model_edits       edits of the model after it was opened, for the key
    hook_watch        hooks that change what the model computes
    model_checks      which models can be cached; the layout of a model's KV, from a forward pass
    model_types       which types of Transformers those checks accept
    stateful_probe    whether a model with windows or states can go on behind a saved ending
    cache_shape       what its cache holds at a number of tokens, as bytes
    prefill_cuts      where its prompts are cut, and the passes between the cuts
    linear_cache      a cache that knows its length although no layer does
    stateful_prompts  finds, loads, computes and stores its prompts
    model_facade      passes on to the model what the cache does not have
    model_identity    the namespace: digests of weights and adapters
    answer_endings    how answers ended, if a call has its tokenizer
    batch_rows        the rows of a batch as prompts, with their padding
    dynamic_cache     a DynamicCache over memory that the cache's transfers fill
    holes             goes on behind a missing chunk of a prompt
    layerwise         KV that arrives layer by layer, while the model computes
    blending          documents that are reused wherever they are in a prompt, by `pagoda.blend`
    unwritten_size    how much host memory is taken if nobody wrote a size
    rotary            the rotary embedding of a model, which moves K to another position
"""

from __future__ import annotations

from pagoda.blend import (
    POLICIES,
    Candidates,
    Deviation,
    FirstK,
    SelectionPolicy,
    blend_setting,
    policy_named,
)
from pagoda.connectors.transformers.cached_model import (
    CachedModel,
    Prefix,
    layout_of,
)
from pagoda.connectors.transformers.model_identity import namespace_of
from pagoda.connectors.transformers.rotary import rotary_of

__all__ = [
    "POLICIES",
    "CachedModel",
    "Candidates",
    "Deviation",
    "FirstK",
    "Prefix",
    "SelectionPolicy",
    "blend_setting",
    "layout_of",
    "namespace_of",
    "policy_named",
    "rotary_of",
]
