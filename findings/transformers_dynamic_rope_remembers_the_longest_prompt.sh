#!/usr/bin/env bash
# Transformers 5.24.0, greedy `generate` of a Llama whose rope has the type "dynamic" (NTK by length): the same prompt gets
# another text the second time. A good guess is that the frequencies follow from the length of the prompt, so that equal
# calls are equal. But a module keeps the greatest length that it has seen, and grows its frequencies only: the first
# call computes a long prompt with the frequencies of that prompt and each further token with those of one token more,
# the second call all of it with those of the longest text so far. A prompt that is shorter than the original length
# puts them back, and the first text comes again.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on Python 3.11:
#   the same prompt again:         another text
#   and again:                     as the second time
#   after a short prompt:          as the first time
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
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=500,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
)
model = transformers.LlamaForCausalLM(config).eval()
long = torch.randint(1, 500, (1, 517))


def text(prompt):
    out = model.generate(prompt, max_new_tokens=16, do_sample=False)
    return out[0, prompt.shape[1] :].tolist()


first = text(long)
second = text(long)
third = text(long)
text(long[:, :100])
after_a_short_one = text(long)
print("the same prompt again:        ", "same text" if second == first else "another text")
print("and again:                    ", "as the second time" if third == second else "another")
print("after a short prompt:         ", "as the first time" if after_a_short_one == first else "another")
sys.exit(not (second != first and third == second and after_a_short_one == first))
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
