#!/usr/bin/env bash
# Transformers 5.24.0: a `DynamicCache` can be taken apart by iteration, which gives (keys, values, window) of each
# layer, and `DynamicCache(items, config=...)` takes such items, to gather the caches of several processes. A good
# guess for who stores KV or sends it to another process is that the two are inverse. They are, but not for models
# with sliding windows: a layer keeps the last window - 1 tokens and a count of all tokens, and the items have no
# count. The new cache has the same tensors and believes that they begin at position 0: of 100 tokens it reports 31
# (the window is 32), and `generate` goes on with wrong positions, another text and no warning. The count set by hand
# makes it right.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on Python 3.11:
#   the cache itself:                         length 100, same text
#   made of its items:                        length 31, another text
#   made of its items, with the count:        length 100, same text
#   without a window, made of its items:      length 100, same text
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
found = []


def model_of(window):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.MistralForCausalLM(config).eval()


def text(model, prompt, **more):
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, **more)
    return out[0, prompt.shape[1] :].tolist()


def kv_of(model, head):
    kv = transformers.DynamicCache(config=model.config)
    model(head, cache=kv)
    return kv


def look(name, model, kv):
    length = kv.get_seq_length()
    same = text(model, prompt, cache=kv) == text(model, prompt)
    print(f"{name:41} length {length}, {'same' if same else 'another'} text")
    found.append((length, same))


with torch.no_grad():
    model = model_of(32)
    prompt = torch.randint(1, 500, (1, 120))
    kv = kv_of(model, prompt[:, :100])
    again = transformers.DynamicCache(list(kv), config=model.config)
    counted = transformers.DynamicCache(list(kv), config=model.config)
    for old, new, other in zip(kv.layers, again.layers, counted.layers):
        assert torch.equal(old.keys, new.keys) and torch.equal(old.values, new.values)
        other.cumulative_length = old.cumulative_length
    look("the cache itself:", model, kv)
    look("made of its items:", model, again)
    look("made of its items, with the count:", model, counted)
    model = model_of(None)
    kv = kv_of(model, prompt[:, :100])
    again = transformers.DynamicCache(list(kv), config=model.config)
    look("without a window, made of its items:", model, again)
sys.exit(found != [(100, True), (31, False), (100, True), (100, True)])
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
