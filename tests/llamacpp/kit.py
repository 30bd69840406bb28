"""What the tests of slots share: prompts, caches, and the control of a loaded slot: the slot in
memory with as many hits, whose text and log-probabilities must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from pagoda.config import ConfigOptions
from pagoda.connectors.llamacpp import SlotStates
from testbed.llama_servers import Completion, LlamaServer

LETTERS = range(100, 126)  # tokens of the letters a to z
CHUNK = 64
# what an attention model can be continued after, beside whole chunks
STEP = CHUNK // 8
PROMPT = 624
# windows are computed in other batches, so the control is not bit for bit
WINDOW_DISTANCE = 3e-3


def prompt_of(seed: int, length: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [1, *(rng.choice(LETTERS) for _ in range(length - 1))]


def in_memory() -> ConfigOptions:
    return {"host_size": "32MiB", "host_shared": False, "chunk_tokens": CHUNK}


def on_disk(path: Path) -> ConfigOptions:
    return {
        "host_size": 0,
        "disk_path": str(path),
        "disk_size": "64MiB",
        "chunk_tokens": CHUNK,
    }


def opened(server: LlamaServer, **options: object) -> SlotStates:
    return SlotStates(server.url, server.states, **{**in_memory(), **options})  # type: ignore[arg-type]


def erase(server: LlamaServer, slot: int = 0) -> None:
    server.post(f"/slots/{slot}?action=erase")


def check_exact(
    server: LlamaServer,
    states: SlotStates,
    tokens: Sequence[int],
    expected: int,
    most_distance: float = 0.0,
    slot: int = 0,
) -> None:
    """Load `tokens`, ask, and compare with a slot that computed as many of them."""
    erase(server, slot)
    server.complete(tokens[:expected], slot, predict=0)
    control = server.complete(tokens, slot)
    erase(server, slot)
    loaded = states.load(tokens, slot)
    assert loaded.num_tokens == expected, loaded
    # at least one token is computed
    hits = min(expected, len(tokens) - 1)
    check_equal(server.complete(tokens, slot), control, hits, most_distance)


def check_equal(
    answer: Completion, control: Completion, hits: int, most_distance: float = 0.0
) -> None:
    assert answer.hits == hits
    assert control.hits == hits
    assert answer.tokens == control.tokens
    assert answer.distance(control) <= most_distance
    if not most_distance:
        assert answer.logprobs == control.logprobs
