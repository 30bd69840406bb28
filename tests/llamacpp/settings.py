"""Settings of llama.cpp servers of which every pair of values is tried."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

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
    """Whether the build starts with these settings here."""
    k, v = settings["types"]  # type: ignore[misc]
    if settings["architecture"] == "deepseek2" and k != v:
        return False
    if settings["build"] == "B" and "q8_0" in (k, v) and not _has_vnni():
        return False
    return settings["flash"] or v != "q8_0"  # type: ignore[return-value]


def keeps_checkpoints(settings: dict[str, object]) -> bool:
    """Whether its states can be continued within a prompt: those of build B have no checkpoints."""
    is_stateful = settings["architecture"] in ("gemma3", "lfm2", "mamba2")
    return not (is_stateful and settings["build"] == "B")


@functools.cache
def _has_vnni() -> bool:
    """Whether this processor has the instructions of build B's kernels for q8_0."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        return any("avx_vnni" in line.split() for line in lines)


def all_pairs(
    rng: random.Random,
    which: Callable[[dict[str, object]], bool] = can_start,
) -> list[dict[str, object]]:
    """Return settings that have every pair of values that can start, chosen greedily. `which`: of
    those, the ones that count.
    """
    every = [
        dict(zip(SETTINGS, values, strict=True))
        for values in itertools.product(*SETTINGS.values())
    ]
    every = [each for each in every if can_start(each) and which(each)]
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
