"""A tiny hybrid model made on the spot: a random Gemma 3 whose layers attend to a sliding window, or to everything."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.models import BOS, EOS, UNKNOWN, VOCABULARY

WINDOW = 96  # tokens; three blocks of the tests' engines
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def make_gemma(directory: Path, seed: int = 0) -> Path:
    """Write a random Gemma 3 with a word-level tokenizer; its weights are so large that texts differ."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=len(KINDS),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        initializer_range=0.3, sliding_window=WINDOW, layer_types=KINDS, query_pre_attn_scalar=64,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=UNKNOWN, tie_word_embeddings=False,
    )  # fmt: skip
    Gemma3ForCausalLM(config).float().save_pretrained(directory)
    tokenizer = Tokenizer(
        models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token=f"t{UNKNOWN}")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=f"t{UNKNOWN}", eos_token=f"t{EOS}", bos_token=f"t{BOS}",
        pad_token=f"t{UNKNOWN}",
    ).save_pretrained(directory)  # fmt: skip
    return directory
