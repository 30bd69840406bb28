#!/usr/bin/env bash
# mlx-lm 0.32.2 reuses the KV of a longer prompt for one that shares its beginning, by trimming it. For Llama 4, whose
# layers attend within chunks (three of four), `can_trim_prompt_cache` says True at every length. A good guess is that
# all layers then hold the shared tokens, or that the call says otherwise. But such a layer keeps only its last chunk
# and can go back no further: the layers end at different lengths, with no error, `LRUPromptCache.fetch_nearest_cache`
# returns them as KV of all shared tokens, and the text is another. A prompt that shares enough gets the right text.
#
# Seen with mlx-lm 0.32.2 and mlx 0.32.4 (its CPU build) on Python 3.11: chunks of 64, a kept prompt of 200 tokens
# that was read 32 at a time, a second prompt of 10 more tokens than they share:
#   190 shared: 10 left to compute, lengths of the layers [190, 190, 190, 190], same text
#   120 shared: 10 left to compute, lengths of the layers [128, 128, 128, 120], another text
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0 2>>"$work/log"
cat > "$work/look.py" <<'P'
import random
import sys

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama4
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache

mx.set_default_device(mx.cpu)
SHAPE = {
    "attention_bias": False,
    "attention_chunk_size": 64,
    "head_dim": 16,
    "hidden_size": 64,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 4096,
    "model_type": "llama4_text",
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": 500,
}
mx.random.seed(0)
model = llama4.Model(llama4.ModelArgs(text_config=SHAPE, model_type="llama4"))
model.update(tree_map(lambda weight: mx.random.normal(weight.shape) * 0.3, model.parameters()))


def read(tokens, kv):
    for start in range(0, len(tokens), 32):
        logits = model(mx.array([tokens[start : start + 32]]), cache=kv)
    return logits[0, -1]


def text(tokens, kv):
    logits, out = read(tokens, kv), []
    for _ in range(10):
        out.append(mx.argmax(logits).item())
        logits = model(mx.array([out[-1:]]), cache=kv)[0, -1]
    return out


rng = random.Random(1)
first = [rng.randrange(500) for _ in range(200)]
found = []
for shared in (190, 120):
    second = first[:shared] + [rng.randrange(500) for _ in range(10)]
    kept = LRUPromptCache()
    kv = make_prompt_cache(model)
    read(first, kv)
    assert can_trim_prompt_cache(kv)
    kept.insert_cache("model", first, kv)
    kv, rest = kept.fetch_nearest_cache("model", second)
    lengths = [layer.offset for layer in kv]
    same = text(rest, kv) == text(second, make_prompt_cache(model))
    print(
        f"{shared} shared: {len(rest)} left to compute, lengths of the layers {lengths},",
        "same text" if same else "another text",
    )
    found.append((len(rest), lengths, same))
sys.exit(found != [(10, [190] * 4, True), (10, [128, 128, 128, 120], False)])
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
