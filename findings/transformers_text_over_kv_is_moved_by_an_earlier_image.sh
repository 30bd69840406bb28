#!/usr/bin/env bash
# Transformers 5.24.0, `generate` of Qwen2-VL with a cache that has KV of the prompt's beginning: the text depends on
# the prompt that the model was given before. A good guess is that positions follow from the arguments of the call,
# as for other models: prompt, mask, cache. But the model keeps how far the images of its latest prompt moved the
# positions of what followed (`rope_deltas`), and takes any prompt with KV and without new images for the continuation
# of that latest one. After a prompt with an image, a text prompt over KV of its own beginning gets the positions of
# that image, and becomes another text; without the cache, or after a text prompt, it is right. The same holds for
# other types with positions in three dimensions. `position_ids` that are passed along help.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on Python 3.11:
#   over its own KV, after a text:          same text
#   over its own KV, after an image:        another text
#   without KV, after an image:             same text
#   over its own KV, with its position_ids: same text
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
IMAGE = 499
TEXT = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    },
}
VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "mlp_ratio": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
torch.manual_seed(3)
config = transformers.Qwen2VLConfig(
    text_config=TEXT, vision_config=VISION, image_token_id=IMAGE
)
model = transformers.Qwen2VLForConditionalGeneration(config).eval()
model.generation_config.eos_token_id = None
ids = torch.randint(3, 490, (1, 60))
head = ids[:, :48]
image = torch.full((1, 16), IMAGE)
seen = torch.cat([ids[:, :20], image, ids[:, 20:]], dim=1)
pixels = {
    "pixel_values": torch.randn(64, 3 * 2 * 14 * 14),
    "image_grid_thw": torch.tensor([[1, 8, 8]]),
    "mm_token_type_ids": (seen == IMAGE).long(),
}


def text(prompt, **more):
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, **more)
    return out[0, prompt.shape[1] :].tolist()


def kv_of_the_head():
    kv = transformers.DynamicCache(config=config)
    model(input_ids=head, position_ids=torch.arange(48).expand(3, 1, -1), cache=kv)
    return kv


plain = text(ids)
with torch.no_grad():
    after_text = text(ids, cache=kv_of_the_head())
    text(seen, **pixels)
    alone = text(ids)
    text(seen, **pixels)
    after_image = text(ids, cache=kv_of_the_head())
    text(seen, **pixels)
    places = torch.arange(60).expand(4, 1, -1)
    told = text(ids, cache=kv_of_the_head(), position_ids=places)
found = {
    "over its own KV, after a text:         ": after_text,
    "over its own KV, after an image:       ": after_image,
    "without KV, after an image:            ": alone,
    "over its own KV, with its position_ids:": told,
}
for what, tokens in found.items():
    print(what, "same text" if tokens == plain else "another text")
sames = [tokens == plain for tokens in found.values()]
sys.exit(sames != [True, False, True, True])
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
