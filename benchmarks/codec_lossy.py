"""Lossy codecs on the KV of a small model: `python benchmarks/codec_lossy.py [--json | --markdown]
[--quick]`.

For each codec: how much smaller the KV of fp16 or bf16 becomes, how fast it is encoded and decoded
by one thread, and what it does to the model's answers. Speed is 10^9 bytes of uncompressed KV a
second of that thread's processor time, in turns with memcpy; every run is printed. KV for the speed
has the shape of a model of 8 billion parameters; its numbers are those of the small model,
repeated.

Quality: a document is prefilled, its KV encoded and decoded, and the model reads the rest of the
text with it. Top-1 agreement is the share of the tokens of that rest whose most likely successor is
the same as with exact KV; perplexity is of the rest, as a ratio. The model is made and trained here
(`codec_kv.py`); the output names it. It is small: `pagoda quality` measures yours.
The last results: docs/how-to/codec.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import codec_kv
import numpy as np
import torch
import transformers
from harness import machine, say

from pagoda.codec import LOSSY, approximated, decode, encode
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda.layout import KVLayout, TokenOrder

PROMPT_TOKENS = 768
REST_TOKENS = 256
# KV heads, numbers of a head, dtype, order
SHAPES: dict[str, tuple[int, int, str, TokenOrder]] = {
    "8 heads of 128, bf16": (8, 128, "bfloat16", "heads_first"),
    "8 heads of 128, bf16, tokens first": (8, 128, "bfloat16", "tokens_first"),
    "8 heads of 64, bf16": (8, 64, "bfloat16", "heads_first"),
    "8 heads of 128, fp16": (8, 128, "float16", "heads_first"),
}
LAYERS = 16  # of a chunk of the speed's shapes
MEMCPY = "memcpy"


@dataclass(frozen=True)
class Speed:
    """One codec on one shape. Speeds are 10^9 uncompressed bytes a second of processor time, a run
    each.
    """

    shape: str
    codec: str
    ratio: float
    encode: Sequence[float]
    decode: Sequence[float]


@dataclass(frozen=True)
class Quality:
    """What one codec does to the answers of a model."""

    model: str
    codec: str
    chunk_tokens: int
    ratio: float
    tokens: int
    top1: float
    perplexity: float
    perplexity_ratio: float


def speeds(shape: str, source: codec_kv.Bytes, rounds: int) -> list[Speed]:
    """Measure every codec on one shape, in turns, a run a round."""
    heads, dim, dtype, order = SHAPES[shape]
    layout = KVLayout.dense(LAYERS, heads, dim, dtype, token_order=order)
    numbers = np.resize(source.view("<u2"), layout.chunk_bytes // 2)
    if dtype == "float16":
        numbers = (
            (numbers.astype(np.uint32) << 16)
            .view(np.float32)
            .astype("<f2")
            .view("<u2")
        )
    payload = numbers.view(np.uint8)
    stored = np.empty_like(payload)
    back = np.empty_like(payload)
    entrants: dict[
        str, tuple[Callable[[], object], Callable[[], object], float]
    ] = {
        MEMCPY: (
            lambda: np.copyto(stored, payload),
            lambda: np.copyto(back, payload),
            1.0,
        )
    }
    for name in LOSSY:
        kept = encode(name, payload, 2, stored, layout=layout)[1].copy()
        if not decode(name, kept, 2, back):
            raise SystemExit(f"{name} did not encode {shape}")
        entrants[name] = (
            lambda name=name: encode(name, payload, 2, stored, layout=layout),  # type: ignore[misc]
            lambda name=name, kept=kept: decode(name, kept, 2, back),  # type: ignore[misc]
            payload.nbytes / kept.nbytes,
        )
    found: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in entrants
    }
    for _ in range(rounds):
        for name, (there, again, _) in entrants.items():
            for call, runs in zip((there, again), found[name], strict=True):
                began = time.thread_time()
                call()
                runs.append(
                    round(payload.nbytes / (time.thread_time() - began) / 1e9, 3)
                )
    return [
        Speed(shape, name, round(entrants[name][2], 3), *found[name])
        for name in entrants
    ]


@torch.no_grad()
def qualities(
    name: str,
    model: transformers.LlamaForCausalLM,
    prompts: torch.Tensor,
    chunk_tokens: int,
) -> list[Quality]:
    """Measure every codec on prompts (number, tokens): all but the last REST_TOKENS are the
    document.
    """
    config = model.config
    layout = KVLayout.dense(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads,
        "bfloat16",
        chunk_tokens,
    )
    # agreeing tokens, losses, stored bytes
    totals = {codec: [0.0, 0.0, 0.0] for codec in ("raw", *LOSSY)}
    for ids in prompts:
        exact: torch.Tensor | None = None
        document = ids[None, :-REST_TOKENS]
        rest = ids[None, -REST_TOKENS:]
        computed = model(document, use_cache=True).past_key_values
        for codec, total in totals.items():
            cache = transformers.DynamicCache()
            for number, (keys, values, nbytes) in enumerate(
                _through(codec, computed, layout)
            ):
                cache.update(keys, values, number)
                total[2] += nbytes
            logits = model(rest, **kv_argument(model, cache)).logits[0].float()
            exact = logits if exact is None else exact
            total[0] += float((logits.argmax(-1) == exact.argmax(-1)).sum())
            total[1] += float(
                torch.nn.functional.cross_entropy(
                    logits[:-1], rest[0, 1:], reduction="sum"
                )
            )
    number = len(prompts) * (REST_TOKENS - 1)
    perplexities = {
        codec: float(np.exp(total[1] / number)) for codec, total in totals.items()
    }
    return [
        Quality(
            name,
            codec,
            chunk_tokens,
            round(totals["raw"][2] / total[2], 3),
            len(prompts) * REST_TOKENS,
            round(total[0] / len(prompts) / REST_TOKENS, 4),
            round(perplexities[codec], 4),
            round(perplexities[codec] / perplexities["raw"], 5),
        )
        for codec, total in totals.items()
    ]


def _through(
    codec: str, computed: transformers.DynamicCache, layout: KVLayout
) -> Sequence[tuple[torch.Tensor, torch.Tensor, float]]:
    """Return K and V of each layer as bf16 after the codec, chunk by chunk, and the bytes stored of
    it.
    """
    pairs = torch.stack(
        [torch.cat((layer.keys, layer.values)) for layer in computed.layers]
    )
    # [layer, K and V, head, token, dim]
    words = pairs.to(torch.bfloat16).view(torch.int16).numpy()
    tokens = layout.chunk_tokens
    total = 0
    for begin in range(0, words.shape[3] - words.shape[3] % tokens, tokens):
        part = words[:, :, :, begin : begin + tokens]
        payload = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        decoded, nbytes = approximated(codec, payload, layout)
        part[:] = decoded.view(np.int16).reshape(part.shape)
        total += nbytes
    kv = torch.from_numpy(words).view(torch.bfloat16).float()
    return [(layer[0][None], layer[1][None], total / len(kv)) for layer in kv]


def tables(
    found: Sequence[Speed], answers: Sequence[Quality], markdown: bool
) -> str:
    """Format both tables."""
    rows = [
        ("KV", "codec", "ratio", "encode GB/s", "runs", "decode GB/s", "runs")
    ]
    for each in found:
        numbers = [
            text
            for runs in (each.encode, each.decode)
            for text in (
                f"{statistics.median(runs):.2f}",
                " ".join(f"{run:.2f}" for run in runs),
            )
        ]
        rows.append((each.shape, each.codec, f"{each.ratio:.2f}", *numbers))
    more = [
        (
            "model",
            "codec",
            "tokens per chunk",
            "ratio",
            "tokens",
            "top-1",
            "perplexity",
            "of exact",
        )
    ]
    more += [
        (
            each.model,
            each.codec,
            str(each.chunk_tokens),
            f"{each.ratio:.2f}",
            str(each.tokens),
            f"{each.top1:.4f}",
            f"{each.perplexity:.3f}",
            f"{each.perplexity_ratio:.4f}",
        )
        for each in answers
    ]
    return "\n\n".join(_table(lines, markdown) for lines in (rows, more))


def _table(lines: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(n) for cell, n in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--train-seconds",
        type=float,
        default=240.0,
        help="processor time of the training",
    )
    want = parser.parse_args()
    seconds, rounds, prompts = (
        (5.0, 2, 2) if want.quick else (want.train_seconds, 7, 16)
    )
    kind, model, held_out = codec_kv.trained(seconds)
    say(kind)
    kv = codec_kv.chunks_of(model, held_out, 8 << 20)
    found = [
        speed
        for shape in SHAPES
        for speed in speeds(shape, np.concatenate(kv), rounds)
    ]
    length = PROMPT_TOKENS + REST_TOKENS
    ids = torch.from_numpy(held_out[: prompts * length].reshape(prompts, length))
    answers = [
        each
        for tokens in (256, 64)
        for each in qualities("trained", model, ids, tokens)
    ]
    if want.json:
        figures = {
            "speeds": [asdict(each) for each in found],
            "qualities": [asdict(each) for each in answers],
        }
        print(
            json.dumps({**figures, "model": kind, "machine": machine()}, indent=1)
        )
        return
    print(kind, tables(found, answers, want.markdown), str(machine()), sep="\n\n")


if __name__ == "__main__":
    main()
