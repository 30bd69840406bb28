"""Make the KV of a small real model: a Llama on BPE tokens of the standard library's text."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from harness import say
from tokenizers import ByteLevelBPETokenizer

# tokens of the vocabulary; with bytes as tokens the same KV would repeat often
WORDS = 4096
MOST_STEPS = 150
LAYERS = 5
HEADS = 4
DIM = 64
PROMPT_TOKENS = 1024
CHUNK_TOKENS = 256
HELD_OUT = 0.2  # share of the text that is measured and not trained on
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Chunks of KV, consecutive in memory, and the model that computed them."""

    name: str
    model: str
    chunks: list[Bytes]


def samples(nbytes: int, seconds: float) -> Iterator[Sample]:
    """Yield the KV of a model with random weights, then of the same model after training.

    Training takes `seconds` of processor time by one thread, and at most MOST_STEPS.

    Layer 0 is left out: its values depend on one token only, so they repeat more than those of any
    other layer, and layer 0 is only a small part of a model with more layers.
    """
    model, tokens, cut = _begun()
    name = f"{_kind(model)}; random weights (held-out loss {_loss(model, tokens[cut:]):.2f})"
    yield Sample("random", name, chunks_of(model, tokens[cut:], nbytes))
    name = f"{_kind(model)}; {_trained(model, tokens, cut, seconds)}"
    yield Sample("trained", name, chunks_of(model, tokens[cut:], nbytes))


def trained(seconds: float) -> tuple[str, transformers.LlamaForCausalLM, Tokens]:
    """Return the trained model, what it is, and the tokens that it was not trained on."""
    model, tokens, cut = _begun()
    how = _trained(model, tokens, cut, seconds)
    return f"{_kind(model)}; {how}", model, tokens[cut:]


def _begun() -> tuple[transformers.LlamaForCausalLM, Tokens, int]:
    torch.set_num_threads(1)  # on a busy machine a second thread would only wait
    tokens = _tokens(_text())
    return _model(), tokens, int(len(tokens) * (1 - HELD_OUT))


def _kind(model: transformers.LlamaForCausalLM) -> str:
    return (
        f"Llama, {sum(each.numel() for each in model.parameters()) / 1e6:.1f} M parameters, "
        f"{LAYERS} layers, "
        f"{HEADS} KV heads of {DIM}, {WORDS} BPE tokens; layers 1-{LAYERS - 1}, computed in "
        "fp32, rounded to bf16"
    )


def _trained(
    model: transformers.LlamaForCausalLM, tokens: Tokens, cut: int, seconds: float
) -> str:
    """Train, and say how."""
    began = time.process_time()
    steps = _train(model, tokens[:cut], began + seconds)
    took = time.process_time() - began
    text_of = "the text of the standard library"
    how = f"trained {steps} steps of 2,048 tokens, {took:.0f} s of processor time, on {text_of}"
    return f"{how} (held-out loss {_loss(model, tokens[cut:]):.2f})"


def _text() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(errors="replace") for path in files]


def _tokens(text: list[str]) -> Tokens:
    say("tokens ...")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=WORDS, show_progress=False)
    return np.concatenate(
        [np.asarray(each.ids, np.int64) for each in tokenizer.encode_batch(text)]
    )


def _model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HEADS * DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=688,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _train(
    model: transformers.LlamaForCausalLM, tokens: Tokens, until: float
) -> int:
    say("training ...")
    draw = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.train()
    steps = 0
    while steps < MOST_STEPS and time.process_time() < until:
        starts = draw.integers(0, len(tokens) - 256, 8)
        batch = torch.from_numpy(
            np.stack([tokens[start : start + 256] for start in starts])
        )
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    return steps


@torch.no_grad()
def _loss(model: transformers.LlamaForCausalLM, tokens: Tokens) -> float:
    batch = torch.from_numpy(
        tokens[: 8 * PROMPT_TOKENS].reshape(8, PROMPT_TOKENS)
    )
    return float(model(batch, labels=batch).loss)


@torch.no_grad()
def chunks_of(
    model: transformers.LlamaForCausalLM, tokens: Tokens, nbytes: int
) -> list[Bytes]:
    """Compute chunks in the cache's layout: layer by layer, K then V, each [heads, chunk tokens,
    dim] in bf16.
    """
    shape = (
        PROMPT_TOKENS // CHUNK_TOKENS,
        LAYERS - 1,
        2,
        HEADS,
        CHUNK_TOKENS,
        DIM,
    )
    prompt_bytes = 2 * int(np.prod(shape))
    room = np.empty((nbytes // prompt_bytes, *shape), np.int16)
    for number, place in enumerate(room):
        ids = tokens[number * PROMPT_TOKENS : (number + 1) * PROMPT_TOKENS]
        layers = model.model(
            torch.from_numpy(ids)[None], use_cache=True
        ).past_key_values.layers[1:]
        # [layer, K and V, head, ...]
        pairs = torch.stack(
            [torch.cat((layer.keys, layer.values)) for layer in layers]
        )
        words = pairs.to(torch.bfloat16).view(torch.int16).numpy()
        split = words.reshape(LAYERS - 1, 2, HEADS, -1, CHUNK_TOKENS, DIM)
        np.copyto(place, np.moveaxis(split, 3, 0))
    flat = room.reshape(-1).view(np.uint8)
    size = prompt_bytes // shape[0]
    return [flat[start : start + size] for start in range(0, flat.size, size)]
