"""Settings of llama.cpp servers of which every pair of values is tried."""

from __future__ import annotations

import itertools
import random

from testbed.llama_servers import BUILDS, LlamaOptions

# two values of two settings are tried together once at least
SETTINGS: dict[str, tuple[object, ...]] = {
    "build": BUILDS,
    "architecture": (
        "llama",
        "qwen3",
        "qwen3moe",
        "deepseek2",
        "gemma3",
        "lfm2",
        "mamba2",
    ),
    "types": (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f32", "bf16")),
    "flash": (True, False),
    "slots": (1, 2, 4),
    "unified": (True, False),
}


def options_of(settings: dict[str, object]) -> LlamaOptions:
    """Return what starts a server with these settings."""
    k, v = settings["types"]  # type: ignore[misc]
    return {
        "k": k,
        "v": v,
        "flash": bool(settings["flash"]),
        "slots": int(str(settings["slots"])),
        "unified": bool(settings["unified"]),
        "context": 4096,
    }


def can_start(settings: dict[str, object]) -> bool:
    """Whether the build starts with these settings, and has states that can be continued."""
    k, v = settings["types"]  # type: ignore[misc]
    if settings["architecture"] == "deepseek2" and k != v:
        return False
    is_b = settings["build"] == "B"
    # its kernels for q8_0 need instructions that not every processor has
    if is_b and "q8_0" in (k, v):
        return False
    # it saves no checkpoints
    if is_b and settings["architecture"] in ("gemma3", "lfm2", "mamba2"):
        return False
    return settings["flash"] or v != "q8_0"  # type: ignore[return-value]


def all_pairs(rng: random.Random) -> list[dict[str, object]]:
    """Return settings that have every pair of values that can start, chosen greedily."""
    every = [
        dict(zip(SETTINGS, values, strict=True))
        for values in itertools.product(*SETTINGS.values())
    ]
    every = [settings for settings in every if can_start(settings)]
    rng.shuffle(every)
    left = {pair for settings in every for pair in pairs_of(settings)}
    chosen = []
    while left:
        best = max(every, key=lambda settings: len(left & pairs_of(settings)))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def pairs_of(settings: dict[str, object]) -> set[object]:
    return set(itertools.combinations(settings.items(), 2))
