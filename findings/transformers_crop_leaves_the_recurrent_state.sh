#!/usr/bin/env bash
# Transformers 5.24.0, `Cache.crop(-n)` of a model whose layers have recurrent states, here Qwen3-Next: it takes n
# tokens off the attention layers and off the states of convolutions, and leaves the recurrent states, which still
# have read all of them. `crop` of such a cache demands that `activate_past_recording()` was called first, and then
# raises nothing, so a good guess is that the past is recorded and the cache is what it was before the n tokens. Its
# length is; the text over it is not, as if the rejected tokens of a draft were still there. `is_croppable`, which
# `crop` itself does not ask, says False. With convolutions alone, here LFM2, the same calls are right.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on Python 3.11:
#   Qwen3-Next, 100 tokens:                           is_croppable False, length 100, same text
#   Qwen3-Next, 100 tokens, 20 more, 20 cropped:      is_croppable False, length 100, another text
#   LFM2, 100 tokens, 20 more, 20 cropped:            is_croppable True, length 100, same text
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy 2>>"$work/log"
cat > "$work/look.py" <<'P'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
SHAPE = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
torch.manual_seed(1)
qwen = transformers.Qwen3NextForCausalLM(
    transformers.Qwen3NextConfig(
        **SHAPE,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    )
).eval()
prompt = torch.randint(1, 500, (1, 101))
draft = torch.randint(1, 500, (1, 20))
lfm2 = transformers.Lfm2ForCausalLM(
    transformers.Lfm2Config(
        **SHAPE, layer_types=["conv", "conv", "full_attention", "conv"]
    )
).eval()
found = []


def text(model, **more):
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, **more)
    return out[0, prompt.shape[1] :].tolist()


def look(name, model, cropped):
    kv = transformers.DynamicCache(config=model.config)
    kv.activate_past_recording()
    model(prompt[:, :100], cache=kv)
    kv.crop(0)
    if cropped:
        model(draft, cache=kv)
        kv.crop(-20)
    can, length = kv.is_croppable, kv.get_seq_length()
    same = text(model, cache=kv) == text(model)
    print(f"{name:49} is_croppable {can}, length {length}, {'same' if same else 'another'} text")
    found.append((can, length, same))


with torch.no_grad():
    look("Qwen3-Next, 100 tokens:", qwen, False)
    look("Qwen3-Next, 100 tokens, 20 more, 20 cropped:", qwen, True)
    look("LFM2, 100 tokens, 20 more, 20 cropped:", lfm2, True)
sys.exit(found != [(False, 100, True), (False, 100, False), (True, 100, True)])
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
