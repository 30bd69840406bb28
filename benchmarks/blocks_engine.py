"""Conversations through examples/paged_engine whose KV is four times the device pool: what each
engine computes.

Every request is served by four engines in turn, each with one tier more than the one before. The
fourth is restarted for every turn, with empty host memory, so that everything that it reuses comes
from the disk.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from cache_copies import opened
from ground import Plan
from harness import Figure, Json, say

from pagoda import Cache, KVLayout

if TYPE_CHECKING:
    from pagoda.blocks import BlockManager

BLOCK_TOKENS = 16
VOCABULARY = 512
SEED = 1
CASES = ("none", "device", "host", "disk")  # the lowest tier


@dataclass(frozen=True)
class Talk:
    """`sessions` conversations, turn by turn, in random order within a turn; one request at a
    time.
    """

    sessions: int = 12
    turns: int = 6
    said: int = 240  # new tokens a turn, by the user
    answered: int = 16  # and by the model

    @property
    def blocks(self) -> int:
        """Blocks that all conversations need at the end."""
        return (
            self.sessions
            * self.turns
            * (self.said + self.answered)
            // BLOCK_TOKENS
        )


@dataclass(frozen=True)
class Served:
    """The result of one request."""

    first: float  # seconds to the first token
    wall: float  # until it was answered, and all copies and writes were done
    hits: dict[str, int]  # tokens by tier
    prefilled: int  # tokens of the prompt that were computed
    answer: list[int]

    @property
    def hit(self) -> int:
        """Tokens that were not computed."""
        return sum(self.hits.values())


Turns = list[list[Served]]  # one list per turn, in the order of the requests


class _Request(Protocol):
    hits: dict[str, int]
    output: list[int]
    first_token_seconds: float | None


class _Engine(Protocol):
    manager: BlockManager
    prompt_tokens_computed: int

    @property
    def busy(self) -> bool: ...
    def add(self, seq: _Request) -> None: ...
    def step(self) -> list[_Request]: ...


class Desk:
    """One engine with its tiers. Each tier has space for everything, except the device: for a
    quarter.
    """

    def __init__(
        self, plan: Plan, talk: Talk, stack: ExitStack, case: str, disk: Path
    ) -> None:
        model, layout = _model(plan.threads)
        room = 2 * talk.blocks * layout.slot_bytes
        below = (disk, room) if case == "disk" else ()
        host = case in ("host", "disk")
        self._cache: Cache | None = (
            stack.enter_context(opened(plan, layout, room, *below))
            if host
            else None
        )
        options = {
            "blocks": talk.blocks // 4,
            "cache": self._cache,
            "prefix_caching": case != "none",
        }
        engine = _paged_engine().Engine(model, layout, **options)
        self._engine: _Engine = stack.enter_context(closing(engine))

    def serve(self, name: str, prompt: list[int], answered: int) -> Served:
        """Answer one request, and wait for its copies and writes."""
        engine = self._engine
        first = None
        request: _Request = _paged_engine().Sequence(name, list(prompt), answered)
        prefilled = engine.prompt_tokens_computed
        began = time.perf_counter()
        engine.add(request)
        while engine.busy or engine.manager.in_flight:
            engine.step()
            if first is None and request.first_token_seconds is not None:
                first = time.perf_counter() - began
        if self._cache is not None:
            self._cache.flush(60)
        wall = time.perf_counter() - began
        prefilled = engine.prompt_tokens_computed - prefilled
        return Served(
            first or wall, wall, request.hits, prefilled, request.output
        )


def engine_figures(plan: Plan) -> list[Figure]:
    """Serve the conversations by each of the four engines, and return the figures with their
    targets.
    """
    try:
        import_module("transformers")
    except ImportError:
        say("transformers is not installed: the engine is skipped")
        return []
    talk = Talk(6, 4, 120, 8) if plan.quick else Talk()
    runs: dict[str, Turns] = {case: [] for case in CASES}
    histories: list[list[int]] = [[] for _ in range(talk.sessions)]
    dice = random.Random(SEED)
    bound = 0
    with ExitStack() as stack:
        disk = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=plan.disk)
            )
        )
        lasting = {
            case: Desk(plan, talk, stack, case, disk) for case in CASES[:-1]
        }
        for turn in range(talk.turns):
            say(f"  turn {turn + 1} of {talk.turns} ...")
            with ExitStack() as until_restart:
                desks = lasting | {
                    "disk": Desk(plan, talk, until_restart, "disk", disk)
                }
                for case in CASES:
                    runs[case].append([])
                for number, session in enumerate(
                    dice.sample(range(talk.sessions), talk.sessions)
                ):
                    past = histories[session]
                    # the last token has no KV
                    bound += max(0, len(past) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    prompt = past + dice.choices(range(VOCABULARY), k=talk.said)
                    for case in _rotated(CASES, number):
                        served = desks[case].serve(
                            f"{session}.{turn}", prompt, talk.answered
                        )
                        runs[case][-1].append(served)
                    histories[session] = prompt + _one_answer(
                        [runs[case][-1][-1].answer for case in CASES]
                    )
    told = (
        f"{talk.sessions} sessions, {talk.turns} turns, seed {SEED}, {talk.blocks // 4} "
        "device blocks"
    )
    return [*_wanted(runs, bound, told), *_beside(runs, bound)]


def _paged_engine() -> ModuleType:
    root = str(Path(__file__).parent.parent)
    if root not in sys.path:
        sys.path.append(root)
    return import_module("examples.paged_engine.engine")


@cache
def _model(threads: int) -> tuple[object, KVLayout]:
    """A random Llama of 10 million parameters, always the same: 6 KiB of KV a token."""
    import torch

    from pagoda.connectors.transformers import layout_of

    torch.set_num_threads(threads)
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        intermediate_size=1024,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return model, layout_of(model, BLOCK_TOKENS)


def _rotated(names: Sequence[str], number: int) -> list[str]:
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _one_answer(answers: list[list[int]]) -> list[int]:
    if any(answer != answers[0] for answer in answers):
        raise RuntimeError(f"the answers differ: {answers}")
    return answers[0]


# ---- results


def _all(turns: Iterable[list[Served]]) -> list[Served]:
    return [served for turn in turns for served in turn]


def _first(turns: Iterable[list[Served]]) -> float:
    """Return the mean time to the first token."""
    return statistics.mean(served.first for served in _all(turns))


def _wall(turns: Iterable[list[Served]]) -> float:
    return sum(served.wall for served in _all(turns))


def _wanted(runs: dict[str, Turns], bound: int, told: str) -> list[Figure]:
    """Return the figures with a target: the host against the bound and the device alone, the disk
    against the host.
    """
    device, host, disk = (runs[case] for case in CASES[1:])
    hit = sum(served.hit for served in _all(host))
    # in the first turn there is nothing to reuse
    late = _first(disk[1:]), _first(host[1:])
    note = f"{late[0] * 1e3:.0f} ms against {late[1] * 1e3:.0f} ms from the second turn on"
    return [
        Figure(
            "hit_share_of_bound",
            hit / bound,
            0.9,
            "ratio",
            {},
            f"{hit:,} of {bound:,} tokens; {told}",
        ),
        Figure(
            "host_vs_device_wall",
            _wall(host) / _wall(device),
            1.0,
            "times",
            {
                "by_turn": [
                    _wall([ours]) / _wall([theirs])
                    for ours, theirs in zip(host, device, strict=True)
                ]
            },
            f"{_wall(host):.1f} s against {_wall(device):.1f} s",
        ),
        Figure(
            "disk_vs_host_ttft",
            late[0] / late[1],
            1.5,
            "times",
            {
                "by_turn": [
                    _first([ours]) / _first([theirs])
                    for ours, theirs in zip(disk, host, strict=True)
                ]
            },
            note,
        ),
    ]


def _beside(runs: dict[str, Turns], bound: int) -> list[Figure]:
    """Return the figures without a target: times and hits of all four engines."""
    figures: list[Figure] = []
    for case, turns in runs.items():
        quoted = _by_turn(turns, lambda served: served.first)
        note = "turn by turn "
        note += " ".join(f"{_first([turn]) * 1e3:.0f}" for turn in turns) + " ms"
        figures.append(
            Figure(
                f"ttft_{case}_seconds",
                _first(turns),
                None,
                "seconds",
                quoted,
                note,
            )
        )
    for case, turns in runs.items():
        tiers = {
            tier: sum(served.hits.get(tier, 0) for served in _all(turns))
            for tier in CASES[1:]
        }
        note = (
            ", ".join(
                f"{tokens:,} from {tier}"
                for tier, tokens in tiers.items()
                if tokens
            )
            or "none"
        )
        note = f"hits: {note}; {sum(tiers.values()) / bound:.3f} of the bound"
        prefilled = sum(served.prefilled for served in _all(turns))
        figures.append(
            Figure(
                f"prefill_tokens_{case}",
                prefilled,
                None,
                "tokens",
                {"hit_tokens": tiers},
                note,
            )
        )
    for case, turns in runs.items():
        quoted = _by_turn(turns, lambda served: served.wall)
        figures.append(
            Figure(f"wall_{case}_seconds", _wall(turns), None, "seconds", quoted)
        )
    return figures


def _by_turn(turns: Turns, seconds: Callable[[Served], float]) -> Json:
    return {
        "by_turn": [
            [round(seconds(served), 6) for served in turn] for turn in turns
        ]
    }
