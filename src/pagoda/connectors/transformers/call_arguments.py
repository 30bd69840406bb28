"""Decides from the arguments of `generate` whether a call can use the cache. Changes nothing.

Every argument is known by its name, because one that is not may change the KV: it is harmless, or
the call goes on without the cache. So an argument of a later Transformers, or of one model, can
never put wrong KV under a key.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagoda.connectors.transformers.assisted import layer_kinds, why_not_assisted

# of `generate` itself: they choose and hand out tokens, after the prompt's KV was computed
_HARMLESS = frozenset(
    {
        "assistant_tokenizer",
        "generation_config",
        "logits_processor",
        # with the ids: a separate pass, with its own cache
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
        "trust_remote_code",
    }
)
# fields of a generation config that decide which tokens are chosen, how many, and what is returned
# of them
_HARMLESS_FIELDS = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "compile_config",  # only for caches of a fixed size
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "length_penalty",
        "low_memory",
        "max_cache_len",  # only for caches of a fixed size
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "transformers_version",
        "typical_p",
        "use_cache",
        "watermarking_config",
    }
)
# they count in modes that are not served at all, which the config itself names
_OF_MODES = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "constraints",
        "dola_layers",
        "force_words_ids",
        "is_assistant",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "penalty_alpha",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "target_lookbehind",
        "use_mtp",
    }
)
_WHY = {
    "output_attentions": "those of cached tokens are not computed",
    "output_hidden_states": "those of cached tokens are not computed",
    "synced_gpus": "processes that take every step together cannot begin at different hits",
    "token_healing": "it replaces tokens of the prompt",
}
# the first since Transformers 5.24
_CACHES = ("cache", "past_key_values", "cache_params")
_OTHER_PROMPTS = ("inputs_embeds", "inputs")
_DYNAMIC = (None, "dynamic", "dynamic_full")
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_ASSISTED = "assisted_generation"


class CallArguments(NamedTuple):
    """What the arguments of one call of `generate` mean."""

    decoding: Any  # the generation config that `generate` will use
    why_not: str  # why the call cannot use the cache; "" if it can
    assisted: bool  # whether several tokens are proposed and checked at once


def read_arguments(model: Any, kwargs: dict[str, Any]) -> CallArguments:
    """Return the generation config of a call with these arguments, and whether it can use the
    cache.

    Raises what `generate` raises for a generation config that it does not accept.
    """
    decoding = _generation_config(model, kwargs)
    mode = decoding.get_generation_mode(kwargs.get("assistant_model")).value
    why_not = _why_not(model, decoding, mode, kwargs)
    return CallArguments(decoding, why_not, mode == _ASSISTED)


def as_keywords(
    model: Any,
    given: Sequence[Any],
    input_ids: Any,
    mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the prompt, the attention mask and the keywords of a call of `generate`. Pure.

    Raises TypeError for an argument that is given twice, and for too many.

    Args:
        model: its `generate` names the arguments. Some take an image first, and the prompt later.
        given: what was given by position. After the prompt, a tensor is the attention mask;
            Transformers itself takes a generation config there, and others after it.
        input_ids: the prompt that was given by keyword.
        mask: the attention mask that was given by keyword.
        kwargs: the other keywords.
    """
    import torch

    if not given:
        return input_ids, mask, kwargs
    names = list(_parameters_of(model))
    most = len(names)
    if takes_prompt_first(model):
        with_mask = len(given) > 1 and isinstance(given[1], torch.Tensor)
        names[0] = "input_ids"
        if with_mask and names[1] != "attention_mask":
            names.insert(1, "attention_mask")
    if len(given) > len(names):
        raise TypeError(f"generate takes at most {most} arguments by position")
    by_position = dict(zip(names, given, strict=False))
    by_keyword = {"input_ids": input_ids, "attention_mask": mask, **kwargs}
    for name in by_position:
        if by_keyword.get(name) is not None:
            raise TypeError(f"generate got {name} twice")
    named = {**by_keyword, **by_position}
    return named.pop("input_ids"), named.pop("attention_mask"), named


def takes_prompt_first(model: Any) -> bool:
    """Return whether the first argument of `model.generate` by position is the prompt: some types
    take an image first.
    """
    names = _parameters_of(model)
    return "input_ids" not in names or names[0] in ("inputs", "input_ids")


def _parameters_of(model: Any) -> tuple[str, ...]:
    """Return the names of the parameters of `model.generate`."""
    function = getattr(model.generate, "__func__", None)
    if function is None:
        return tuple(inspect.signature(model.generate).parameters)
    return _names_in(function)[1:]


@functools.lru_cache(maxsize=64)
def _names_in(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def over_given_kv(decoding: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a call that is given a cache: Transformers refuses to be told also
    which kind it should make. Pure.
    """
    if decoding.cache_implementation is None:
        return kwargs
    return {**kwargs, "cache_implementation": None}


def _why_not(model: Any, decoding: Any, mode: str, kwargs: dict[str, Any]) -> str:
    for name, value in kwargs.items():
        if value is not None and (why := _of_argument(name, value)):
            return f"{name}: {why}"
    if decoding.use_cache is False:
        return (
            "use_cache=False leaves no KV to store or pass on: pass use_cache=True, or set it in "
            "model.generation_config"
        )
    if decoding.cache_implementation not in _DYNAMIC:
        return (
            f"cache_implementation {decoding.cache_implementation!r}: only a dynamic cache "
            "can be filled"
        )
    if mode == _ASSISTED:
        why = why_not_assisted(
            decoding, kwargs.get("assistant_model"), layer_kinds(model.config)
        )
        if why:
            return why
    elif mode not in _MODES:
        return f"{mode.replace('_', ' ')} does not begin from a filled cache"
    return _of_fields(decoding)


def _of_argument(name: str, value: Any) -> str:
    """Return why a call with this argument cannot use the cache; "" if it can, or if the generation
    config decides.
    """
    if name in _HARMLESS or name in _HARMLESS_FIELDS or name in _OF_MODES:
        return ""
    # by the generation config, and by its mode
    if name in ("cache_implementation", "assistant_model"):
        return ""
    if name == "logits_to_keep" and type(value) is int:
        return ""
    if name in _WHY:
        return _WHY[name] if value else ""
    if name in _CACHES:
        return (
            "it is another cache, and the KV of this call would be stored and loaded by its "
            "input_ids alone"
        )
    if name in _OTHER_PROMPTS:
        return "keys are made of token ids alone: give input_ids"
    return "the KV may depend on it, and keys are made of token ids alone"


def _of_fields(decoding: Any) -> str:
    """Return why a call cannot use the cache because of a field that Transformers has and this
    module does not know.
    """
    defaults = vars(type(decoding)())
    for name, default in defaults.items():
        if name.startswith("_") or name in _HARMLESS_FIELDS or name in _OF_MODES:
            continue
        value = getattr(decoding, name, default)
        # for other caches
        if name in (
            "cache_implementation",
            "cache_config",
            "continuous_batching_config",
        ):
            continue
        if value is not None and value != default and (name not in _WHY or value):
            why = _WHY.get(
                name, "it is not known here whether the KV depends on it"
            )
            return f"{name} in the generation config: {why}"
    return ""


def _generation_config(model: Any, kwargs: dict[str, Any]) -> Any:
    defaults = model.generation_config
    config = copy.deepcopy(kwargs.get("generation_config") or type(defaults)())
    config.update(
        **defaults.to_dict(), defaults_only=True, allow_custom_entries=True
    )
    config.update(
        **{
            name: value
            for name, value in kwargs.items()
            if name != "generation_config"
        }
    )
    return config
