"""What a prompt of a model with windows, states or images costs: `python
benchmarks/model_endings.py [--json] [--quick] [--only ...]`.

The prefill of such a model is cut where an ending is kept, and a later prompt goes on there. For
small models with prompts of 4,000 tokens, in the processor time of the process and in turn within
each round:

    cut     a prefill that is cut and stored, in multiples of one that is not
    hit     the share that a whole prefill has of a call that finds its prompt in the host tier:
            how many times less it computes

Models of gated delta nets are measured in two widths. What a pass costs beside its tokens does not
depend on the width, so the narrow one shows the most that a cut can cost, and the wide one, with
the layers of a published model of 0.8 billion parameters, what it costs there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ground import Part, Plan, main
from harness import Figure

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_TOKENS = 4000
_CHUNK_TOKENS = 256
_CUT_TARGET = 1.05
_HIT_TARGET = 8.0
_IMAGE_TOKEN = 499
_IMAGE_PIXELS = 112
_PATCHES = 64  # of an image, a token each
_SIZE = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


# of Qwen 3.5 with 0.8 billion parameters, but for the number of layers
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
_WIDE_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
_WIDE_STATES = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}


def gemma3() -> PreTrainedModel:
    """Return a model with five layers of windows for each full one."""
    import transformers

    config = transformers.Gemma3TextConfig(
        **_SIZE,
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Return a model with three layers of states for each full one, and experts."""
    import transformers

    config = transformers.Qwen3NextConfig(
        **_SIZE,
        layer_types=["linear_attention"] * 5 + ["full_attention"],
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5_wide() -> PreTrainedModel:
    """Return a model with four layers of one that is published."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        **{**_SIZE, **_WIDE},
        **_WIDE_STATES,
        layer_types=_WIDE_LAYERS,
    )
    return transformers.Qwen3_5ForCausalLM(config)


def olmo_hybrid_wide() -> PreTrainedModel:
    """Return a model of the same size, whose states are those of OLMo."""
    import transformers

    config = transformers.OlmoHybridConfig(
        **{**_SIZE, **_WIDE},
        **_WIDE_STATES,
        layer_types=_WIDE_LAYERS,
    )
    return transformers.OlmoHybridForCausalLM(config)


def olmo_hybrid() -> PreTrainedModel:
    """Return a model with five layers of states for each full one."""
    import transformers

    config = transformers.OlmoHybridConfig(
        **_SIZE,
        layer_types=["linear_attention"] * 5 + ["full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )
    return transformers.OlmoHybridForCausalLM(config)


def mamba2() -> PreTrainedModel:
    """Return a model with states only."""
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=500,
        hidden_size=256,
        num_hidden_layers=6,
        num_heads=16,
        head_dim=32,
        state_size=16,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Mamba2ForCausalLM(config)


def llava() -> PreTrainedModel:
    """Return a model of full attention that sees an image."""
    import transformers

    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_SIZE},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": _IMAGE_PIXELS,
            "patch_size": 14,
        },
        image_token_id=_IMAGE_TOKEN,
        image_token_index=_IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


_MODELS = {
    "gemma3": gemma3,
    "qwen3_next": qwen3_next,
    "qwen3_5_wide": qwen3_5_wide,
    "olmo_hybrid": olmo_hybrid,
    "olmo_hybrid_wide": olmo_hybrid_wide,
    "mamba2": mamba2,
    "llava": llava,
}
# nothing is cut where all layers have full attention
_UNCUT = ("llava",)


def figures(kind: str, plan: Plan) -> list[Figure]:
    """Return the figures of one model: each the median of rounds."""
    import torch

    from pagoda.connectors.transformers import CachedModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _MODELS[kind]().eval()
    model.generation_config.eos_token_id = None
    spent: dict[str, list[float]] = {"whole": [], "cut": [], "hit": []}
    with CachedModel(
        model,
        chunk_tokens=_CHUNK_TOKENS,
        host_size="256MiB",
        host_shared=False,
        disk_path="",
    ) as cached:

        def seconds(prompt: dict[str, torch.Tensor], store: bool) -> float:
            began = time.process_time()
            cached.generate(
                **prompt, max_new_tokens=1, do_sample=False, store=store
            )
            return time.process_time() - began

        # the first calls of a model try its forms
        for number in (1, 1, 2):
            seconds(_prompt(kind, number), True)
        for number in range(plan.rounds):
            spent["whole"].append(seconds(_prompt(kind, 10 + number), False))
            new = _prompt(kind, 100 + number)
            spent["cut"].append(seconds(new, True))
            if cached.last.columns:
                raise RuntimeError(f"{kind}: a new prompt hit")
            spent["hit"].append(seconds(new, True))
            if cached.last.columns < _TOKENS - _CHUNK_TOKENS:
                raise RuntimeError(
                    f"{kind}: {cached.last.columns} of {_TOKENS} tokens hit"
                )
    hits = _quotients(spent["whole"], spent["hit"])
    found = [
        Figure(
            f"{kind}_hit",
            statistics.median(hits),
            _HIT_TARGET,
            "ratio",
            {"seconds": spent},
        )
    ]
    if kind not in _UNCUT:
        cuts = _quotients(spent["cut"], spent["whole"])
        found.append(
            Figure(
                f"{kind}_cut",
                statistics.median(cuts),
                _CUT_TARGET,
                "times",
                {"times": [round(each, 3) for each in cuts]},
            )
        )
    return found


def _quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _prompt(kind: str, number: int) -> dict[str, torch.Tensor]:
    """Return a prompt that has no chunk in common with that of another number."""
    import torch

    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 490, (1, _TOKENS), generator=generator)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "llava":
        ids[0, 8 : 8 + _PATCHES] = _IMAGE_TOKEN
        size = (1, 3, _IMAGE_PIXELS, _IMAGE_PIXELS)
        prompt["pixel_values"] = torch.randn(size, generator=generator)
    return prompt


def _part(kind: str) -> Part:
    return lambda plan: figures(kind, plan)


PARTS: dict[str, Part] = {kind: _part(kind) for kind in _MODELS}

if __name__ == "__main__":
    main(__doc__, PARTS, {}, with_fio=False)
