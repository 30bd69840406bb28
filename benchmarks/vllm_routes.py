"""The two ways of the vLLM connector, on one plain model.

    .venv-vllm/bin/python benchmarks/vllm_routes.py [--json] [--quick]

`PagodaConnector` serves plain models by itself, and hybrid ones through vLLM's offloading. Could
the second serve all models? Engines take turns: without a connector, with the first way, and with
the second, which is named directly. Decision 0039.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(sys.path.pop(0))  # search this folder last: it has a vllm.py

import vllm_engine as inside
from ground import Plan, main
from harness import Figure
from vllm_engine import VOCABULARY, Engine, connector, options, wait_for_model

PROMPT = 3_000
ANSWERED = 16
_DRAW = random.Random(3)
_OFFLOADING = {
    "kv_connector": "PagodaHybridConnector",
    "kv_connector_module_path": "pagoda.connectors.vllm.offloading.hybrid_connector",
}


def route_figures(plan: Plan) -> list[Figure]:
    """Measure processor time of prompts that never hit, and first tokens of those in host
    memory.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=plan.shm) as shm,
        tempfile.TemporaryDirectory(
            prefix="pagoda-bench-", dir=plan.disk
        ) as disk,
    ):
        model = Path(disk, "model")
        wait_for_model(model)
        given = {
            name: _connector(Path(shm, name), name)
            for name in ("own", "offloading")
        }
        engines = {
            name: Engine(
                name,
                Path(disk, f"{name}.log"),
                **options(model, **given.get(name, {})),
            )
            for name in ("without", "own", "offloading")
        }
        try:
            for engine in engines.values():
                engine.answer()
            return _figures(engines, 4 if plan.quick else 24)
        finally:
            for engine in engines.values():
                engine.close()


def _connector(host: Path, name: str) -> dict[str, object]:
    made = connector(
        host_path=str(host),
        host_size="256MiB",
        worth_it=False,
        deadline_seconds=20.0,
    )
    if name == "offloading":
        made["kv_transfer_config"] |= _OFFLOADING
    return made


def _figures(engines: dict[str, Engine], rounds: int) -> list[Figure]:
    wall: dict[str, list[float]] = {name: [] for name in engines}
    processor: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    hits: dict[str, set[int]] = {name: set() for name in engines}
    for number in range(rounds + 1):  # the first one warms up
        names = list(engines)[number % 3 :] + list(engines)[: number % 3]
        for name in names:
            prompts = [_prompt(512) for _ in range(4)]
            cpu = engines[name].cpu_seconds()
            began = time.perf_counter()
            engines[name].call(answer, prompts)
            wall[name].append(time.perf_counter() - began)
            processor[name].append(engines[name].cpu_seconds() - cpu)
        prompt = _prompt(PROMPT)
        for name in names:
            engines[name].call(answer, [prompt])
            if name != "without":
                engines[name].call(inside.reset)
            seconds, cached = engines[name].call(first, prompt)
            firsts[name].append(seconds)
            hits[name].add(cached)
    return [
        _of(
            "processor_time_own_vs_without",
            processor["own"],
            processor["without"],
        ),
        _of(
            "processor_time_offloading_vs_without",
            processor["offloading"],
            processor["without"],
        ),
        _of(
            "processor_time_offloading_vs_own",
            processor["offloading"],
            processor["own"],
        ),
        _of("turn_offloading_vs_own", wall["offloading"], wall["own"]),
        _of(
            "first_token_own_vs_device",
            firsts["own"],
            firsts["without"],
            _hit(hits["own"]),
        ),
        _of(
            "first_token_offloading_vs_device",
            firsts["offloading"],
            firsts["without"],
            _hit(hits["offloading"]),
        ),
    ]


def _hit(tokens: set[int]) -> str:
    return f"hits {sorted(tokens)} of {PROMPT} tokens"


def _of(
    key: str, ours: Sequence[float], limit: Sequence[float], note: str = ""
) -> Figure:
    ratios = [a / b for a, b in list(zip(ours, limit, strict=True))[1:]]
    medians = [statistics.median(each[1:]) * 1e3 for each in (ours, limit)]
    note = f"{medians[0]:.1f} ms against {medians[1]:.1f} ms; {note}".rstrip("; ")
    quoted = {"times": [round(ratio, 4) for ratio in ratios]}
    return Figure(key, statistics.median(ratios), None, "times", quoted, note)


def _prompt(tokens: int) -> list[int]:
    return _DRAW.choices(range(3, VOCABULARY), k=tokens)


# ---- in the engine's process


def answer(room: inside.Room, prompts: Sequence[Sequence[int]]) -> None:
    """Answer prompts, and give the copies of the engine's last step time."""
    inside._generate(room, prompts, ANSWERED)
    time.sleep(0.2)


def first(room: inside.Room, prompt: Sequence[int]) -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and the tokens that were cached."""
    began = time.perf_counter()
    (output,) = inside._generate(room, [prompt], 1)
    return time.perf_counter() - began, output.num_cached_tokens


if __name__ == "__main__":
    main(__doc__, {}, {"routes": route_figures})
