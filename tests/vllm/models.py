"""Tiny generated models: a random Llama, and adapters for it that change its output."""

from __future__ import annotations

import json
import random
from pathlib import Path

HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
LAYERS = 4
VOCABULARY = 1024
EOS = 1
BOS = 2
UNKNOWN = 0
RANK = 8
_WORDS = range(3, 1000)


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of that many tokens; other seeds differ from the first token on."""
    draw = random.Random(seed)
    return [draw.choice(_WORDS) for _ in range(tokens)]


def plain_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt whose text is cut into just these tokens: the special ones begin with "t0",
    "t1" and "t2".
    """
    draw = random.Random(seed)
    return [draw.choice(range(300, 1000)) for _ in range(tokens)]


def words(tokens: list[int]) -> str:
    """The text that the tokenizer turns back into these tokens."""
    return " ".join(f"t{token}" for token in tokens)


def write_tokenizer(directory: Path) -> None:
    """Write the word-level tokenizer of all models here: the text of token 7 is "t7"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel(
            {f"t{number}": number for number in range(VOCABULARY)},
            unk_token=f"t{UNKNOWN}",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=f"t{UNKNOWN}",
        eos_token=f"t{EOS}",
        bos_token=f"t{BOS}",
        pad_token=f"t{UNKNOWN}",
    ).save_pretrained(directory)


def make_llama(
    directory: Path, seed: int = 0, dtype: str = "float32", mlp: int = 512
) -> Path:
    """Write a random Llama with a word-level tokenizer; its weights are so large that texts differ.

    `mlp`: how wide its feed-forward layers are, which decides how long a token takes, and changes
    no KV.

    In float32 a different order of summation (batches, chunked prefill, ranks) does not change a
    greedy choice.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=mlp,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def make_lora(directory: Path, seed: int) -> Path:
    """Write an adapter of the Llama's attention, large enough to change its output."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, rows in (
            ("q_proj", HEADS * HEAD_DIM),
            ("v_proj", KV_HEADS * HEAD_DIM),
        ):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = (
                torch.randn(RANK, HIDDEN, generator=draw) * 0.3
            )
            tensors[f"{name}.lora_B.weight"] = (
                torch.randn(rows, RANK, generator=draw) * 0.3
            )
    directory.mkdir(parents=True)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


# the token of an image in a prompt, what becomes of it, its width
IMAGE = 1000
IMAGE_TOKENS = 64
IMAGE_PIXELS = 112


def make_llava(directory: Path, seed: int = 0) -> Path:
    """Write a random LLaVA: a vision tower before a Llama of the size of `make_llama`."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import AddedToken
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(seed)
    patch = 14
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_PIXELS,
        patch_size=patch,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    LlavaForConditionalGeneration(config).float().save_pretrained(directory)
    file = directory / "model.safetensors"
    tower = "vision_tower."  # vLLM knows the weights by their older names
    tensors = {
        name.replace(tower, f"{tower}vision_model."): one
        for name, one in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    write_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_tokens(
        [AddedToken(f"t{IMAGE}", special=True, normalized=False)]
    )
    LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": IMAGE_PIXELS},
            crop_size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
        ),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        image_token=f"t{IMAGE}",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    return directory
