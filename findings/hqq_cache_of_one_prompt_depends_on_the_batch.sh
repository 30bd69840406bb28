#!/usr/bin/env bash
# Transformers 5.24.0 with `QuantizedCache("hqq", config)`: the KV that is kept for a prompt, and so its greedy text,
# depends on the other prompts of the batch. A good guess is that a group of 64 values that share one scale are
# neighbours within one token, as they are with axis 0 of the backend "quanto". HQQ with its axis 0, which is the
# cache's, takes the tensor as 64 long rows instead, and a group is what stands at one place in all of them: it goes
# through the whole tensor [prompts, heads, tokens, width]. A prompt beside one with greater values is kept coarsely,
# and KV that is stored from such a cache has traces of its neighbours. With axis 1 a prompt is alone.
#
# Seen with hqq 0.2.8.post1, transformers 5.24.0 and torch 2.13.0 on Python 3.11 (4 bits, prompts of equal length):
#   without quantization: text of a prompt alone, beside a second, beside a third: all the same
#   hqq, axis 0:          text of a prompt alone, beside a second, beside a third: each another
#   hqq, axis 1:          text of a prompt alone, beside a second, beside a third: all the same
#   axis 0: mean error of a prompt's keys: alone 0.07, beside keys 20 times as large 1.20
#   axis 1: mean error of a prompt's keys: alone 0.07, beside keys 20 times as large 0.07
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy 2>>"$work/log"
DISABLE_CUDA=1 "$work/venv/bin/python" -m pip -qq install --disable-pip-version-check hqq==0.2.8.post1 2>>"$work/log"
cat > "$work/look.py" <<'P'
import sys

import torch
import transformers
from transformers import DynamicCache, QuantizedCache

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
model = transformers.LlamaForCausalLM(config).eval()
prompts = torch.randint(1, 500, (3, 96))


def hqq(axis):
    return QuantizedCache("hqq", config, nbits=4, axis_key=axis, axis_value=axis)


def text(rows, kv):
    out = model.generate(prompts[rows], max_new_tokens=24, do_sample=False, cache=kv)
    return tuple(out[0, 96:].tolist())


def error(keys, kv):
    kv.update(keys, keys, 0)
    layer = kv.layers[0]
    return (layer._dequantize(layer._quantized_keys)[0] - keys[0]).abs().mean().item()


kinds = {
    "without quantization": lambda: DynamicCache(config=config),
    "hqq, axis 0": lambda: hqq(0),
    "hqq, axis 1": lambda: hqq(1),
}
counts = []
for name, make in kinds.items():
    texts = {text(rows, make()) for rows in ([0], [0, 1], [0, 2])}
    counts.append(len(texts))
    which = {1: "all the same", 3: "each another"}.get(len(texts), "two texts")
    print(f"{name + ':':21} text of a prompt alone, beside a second, beside a third: {which}")
keys = torch.randn(2, 2, 128, 64)
keys[1] *= 20
errors = []
for axis in (0, 1):
    alone, beside = error(keys[:1], hqq(axis)), error(keys, hqq(axis))
    errors.append(beside / alone)
    print(f"axis {axis}: mean error of a prompt's keys: alone {alone:.2f}, beside keys 20 times as large {beside:.2f}")
sys.exit(counts != [1, 3, 1] or errors[0] < 5 or abs(errors[1] - 1) > 0.01)
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
