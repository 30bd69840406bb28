#!/usr/bin/env bash
# KV is often turned before it is stored: [heads, tokens, width] in the engine, [tokens, heads, width] in the file.
# With safetensors 0.7.0 `safetensors.numpy.save` took a transposed view and wrote its values. A good guess is that
# 0.8.0 does the same, or refuses it. It does neither: the header gets the shape of the view, the data are the bytes
# as they lie in memory, and what is loaded has the right shape and type and other values. (The documentation asks for
# contiguous arrays; nothing checks it.) A slice of some tokens of each head is wrong as well: it has tokens that were
# not asked for. `numpy.ascontiguousarray` helps.
#
# Seen with numpy 2.2.6 on Python 3.11:
#   safetensors 0.7.0:
#     transposed: equal
#     some tokens of each head: equal
#     made contiguous: equal
#   safetensors 0.8.0:
#     transposed: shape (5, 2, 4), 8 of 40 values right
#     some tokens of each head: shape (2, 3, 4), 12 of 24 values right
#     made contiguous: equal
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/look.py" <<'P'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load, save

kv = np.arange(2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)
kinds = {
    "transposed": kv.transpose(1, 0, 2),
    "some tokens of each head": kv[:, :3],
    "made contiguous": np.ascontiguousarray(kv.transpose(1, 0, 2)),
}
found = []
for name, given in kinds.items():
    got = load(save({"kv": given}))["kv"]
    assert got.shape == given.shape and got.dtype == given.dtype
    right = int((got == given).sum())
    equal = right == given.size
    found.append(equal)
    kinds[name] = "equal" if equal else f"shape {got.shape}, {right} of {given.size} values right"
print(f"safetensors {safetensors.__version__}:")
for name, text in kinds.items():
    print(f"  {name}: {text}")
older = safetensors.__version__ == "0.7.0"
sys.exit(found != [older, older, True])
P
python3 -m venv "$work/venv"
for version in 0.7.0 0.8.0; do
  "$work/venv/bin/python" -m pip -qq install --disable-pip-version-check safetensors==$version numpy==2.2.6 2>>"$work/log"
  "$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
done
