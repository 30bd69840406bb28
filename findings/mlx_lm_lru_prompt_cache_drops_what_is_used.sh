#!/usr/bin/env bash
# mlx-lm 0.32.2 keeps the KV of earlier prompts in an `LRUPromptCache`, as its server does. A good guess, from the
# name, is that what was used last stays. But `fetch_nearest_cache` renews nothing: the order is that of insertion, so
# KV that every request continues, such as that of a system prompt, is dropped when as many entries as fit were
# inserted after it, and KV that nobody ever asked for stays.
#
# Seen with mlx-lm 0.32.2 and mlx 0.32.4 (its CPU build) on Python 3.11, with room for three entries:
#   after 1 other prompt: the system prompt is found, 1 token left to compute
#   after 2 other prompts: the system prompt is found, 1 token left to compute
#   after 3 other prompts: the system prompt is gone, 4 tokens left to compute
#   prompt 1, not asked for so far, is found
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0 2>>"$work/log"
cat > "$work/look.py" <<'P'
import sys

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

mx.set_default_device(mx.cpu)


def kv_of(tokens):
    layer = KVCache()
    zeros = mx.zeros((1, 1, len(tokens), 8))
    layer.update_and_fetch(zeros, zeros)
    return [layer]


system = [1, 2, 3]
others = [[100 * n, 5, 6] for n in (1, 2, 3)]
kept = LRUPromptCache(max_size=3)
kept.insert_cache("model", system, kv_of(system))
kept.fetch_nearest_cache("model", [*system, 9])
found = []
for count, other in enumerate(others, 1):
    kept.insert_cache("model", other, kv_of(other))
    kv, rest = kept.fetch_nearest_cache("model", [*system, 9])
    found.append(kv is not None)
    print(
        f"after {count} other prompt{'s' * (count > 1)}: the system prompt is {'found' if kv else 'gone'},",
        f"{len(rest)} token{'s' * (len(rest) > 1)} left to compute",
    )
kv, _ = kept.fetch_nearest_cache("model", [*others[0], 9])
found.append(kv is not None)
print(f"prompt 1, not asked for so far, is {'found' if kv else 'gone'}")
sys.exit(found != [True, True, False, True])
P
cd "$work"
"$work/venv/bin/python" "$work/look.py" 2>>"$work/log" || { tail -5 "$work/log"; exit 1; }
