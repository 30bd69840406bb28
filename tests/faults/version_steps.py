"""One process of `test_three_versions`: a cache of whichever version is on the path, and what to do
with it.

Run as a script: arguments are the directories of the host and of the disk tier, the end ("close" or
"kill"), and steps:

    store=W:P,P    store prompts P, computed with weights W
    served=W:P,P   retrieve prompts P; the bytes must be those of weights W
    change, clear  report other weights; clear the cache
    ready=F, go=F  make the file F; wait for it

Prints one line of JSON: what `served` found (chunks of each prompt, and how many were wrong), or
the error of the opening.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from pagoda import Cache, Config, KVLayout, Namespace, StoreError
from pagoda.transfer import BlockKV

CHUNK_TOKENS = 16
CHUNKS = 4
CHUNK_BYTES = 8192


def prompt(number: int) -> np.ndarray:
    return np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.int32) + 1000 * number


def payload(weights: int, number: int) -> np.ndarray:
    return np.random.default_rng([weights, number]).integers(
        0, 256, (CHUNKS, CHUNK_BYTES), dtype=np.uint8
    )


def opened(host: str, disk: str) -> Cache:
    layout = KVLayout.opaque(CHUNK_TOKENS, CHUNK_BYTES, "versions")
    config = Config(
        chunk_tokens=CHUNK_TOKENS,
        host_path=host,
        host_size=64 * layout.slot_bytes,
        disk_path=disk,
        disk_size=128 * (layout.slot_bytes + 4096),
        worth_it=False,
        policy="lru",
        deadline_seconds=30.0,
    )
    return Cache(config, namespace=Namespace("m"), layout=layout)


def store(cache: Cache, weights: int, number: int) -> None:
    answer = cache.store(
        prompt(number), BlockKV(payload(weights, number), cache.layout)
    )
    assert answer.refused == 0, answer


def served(cache: Cache, weights: int, number: int) -> tuple[int, int]:
    """Return how many chunks hit, and how many of them do not have the bytes of these weights."""
    blocks = np.zeros((CHUNKS, CHUNK_BYTES), np.uint8)
    hit = cache.retrieve(prompt(number), BlockKV(blocks, cache.layout))
    count = hit.num_tokens // CHUNK_TOKENS
    right = (blocks[:count] == payload(weights, number)[:count]).all(axis=1)
    return count, int(count - right.sum())


def act(cache: Cache, step: str, answers: dict[str, list[int]]) -> None:
    name, _, rest = step.partition("=")
    if name in ("store", "served"):
        weights, _, numbers = rest.partition(":")
        for number in filter(None, numbers.split(",")):
            if name == "store":
                store(cache, int(weights), int(number))
            else:
                answers[number] = list(served(cache, int(weights), int(number)))
        assert cache.flush(60)
    elif name == "change":
        cache.weights_changed()
    elif name == "clear":
        assert cache.clear().ok
    elif name == "ready":
        Path(rest).touch()
    elif name == "go":
        until = time.monotonic() + 120
        while not Path(rest).exists() and time.monotonic() < until:
            time.sleep(0.01)


def main(host: str, disk: str, end: str, *steps: str) -> None:
    answers: dict[str, list[int]] = {}
    try:
        cache = opened(host, disk)
    except StoreError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    for tier in cache._tiers.lower:
        tier.wait_ready(60)
    for step in steps:
        act(cache, step, answers)
    print(json.dumps(answers), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
