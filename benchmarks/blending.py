"""Blending of documents: quality on a model that must read across them, and time to first token.

`python benchmarks/blending.py [quality|ttft] [--quick] [--json]`

quality  The recall model of `testbed` (trained at the first run, a minute), on prompts of seeds
         that nothing was tuned
         on: right answers, KL and top-1 agreement with a full prefill, for each policy and share.
             Paired bootstrap.
ttft     Eight stored documents of 512 tokens in another order each round, and a question, on the
         model of `pagoda demo`: a full prefill against `generate(documents=...)`, in turns. Seconds
         on the clock, and of this process's CPU, which other load on the machine changes less.

The last results: docs/how-to/approximate.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import machine, say

from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda_tools.quality.bootstrap import difference_interval

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# of each seed
SEEDS = (101, 102, 103)
PROMPTS = 100
SHARES = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
POLICIES = ("deviation", "first_k")
DOCUMENTS = 8
TOKENS = 512
QUESTION = 32

Row = dict[str, object]


def quality(quick: bool) -> list[Row]:
    """Return one row for the full prefill, and one for each policy and share."""
    import torch

    from pagoda.connectors.transformers import CachedModel
    from testbed.recall_model import recall_model, recall_prompts

    torch.set_num_threads(1)
    model = recall_model()
    seeds = SEEDS[:1] if quick else SEEDS
    prompts = [
        prompt for seed in seeds for prompt in recall_prompts(seed, PROMPTS)
    ]
    across = np.array([prompt.across for prompt in prompts])
    answers = np.array([prompt.answer for prompt in prompts])
    with torch.no_grad():
        full = torch.stack(
            [
                model(torch.tensor([prompt.tokens]))
                .logits[0, -1]
                .double()
                .log_softmax(-1)
                for prompt in prompts
            ]
        )
    right_full = full.argmax(-1).numpy() == answers
    rows: list[Row] = [
        _row("full prefill", 1.0, right_full, right_full, across, full, full, 1.0)
    ]
    with CachedModel(
        model,
        chunk_tokens=16,
        host_size="256MiB",
        host_shared=False,
        worth_it=False,
        deadline_seconds=60.0,
    ) as cached:
        plain: npt.NDArray[np.bool_] | None = None
        for policy in POLICIES:
            for share in SHARES:
                if share == 0.0 and plain is not None:
                    continue  # nothing is chosen: the same for every policy
                logits = []
                computed = 0
                for prompt in prompts:
                    found = cached.blend(
                        prompt.documents,
                        prompt.question,
                        recompute=share,
                        policy=policy,
                        unchecked=True,
                    )
                    assert found.blend is not None
                    last = torch.tensor([prompt.tokens[-1:]])
                    with torch.no_grad():
                        after = model(
                            last, **kv_argument(model, found.past_key_values)
                        ).logits[0, -1]
                    logits.append(after.double().log_softmax(-1))
                    computed += (
                        len(prompt.tokens)
                        - found.blend.starts[1]
                        - found.blend.reused_tokens
                    )
                got = torch.stack(logits)
                right = got.argmax(-1).numpy() == answers
                plain = right if plain is None else plain
                name = "plain reuse" if share == 0.0 else policy
                total = sum(len(prompt.tokens) for prompt in prompts)
                rows.append(
                    _row(
                        name,
                        share,
                        right,
                        plain,
                        across,
                        got,
                        full,
                        computed / total,
                    )
                )
                say(f"{name} {share}: {right.mean():.3f}")
    rows[0]["above_plain"] = _above(
        right_full, plain if plain is not None else right_full
    )
    return rows


def _row(
    name: str, share: float, right, plain, across, got, full, computed: float
) -> Row:  # type: ignore[no-untyped-def]
    kl = (full.exp() * (full - got)).sum(-1)
    return {
        "method": name,
        "recompute": share,
        "prompts": len(right),
        "right": float(right.mean()),
        "right_across": float(right[across].mean()),
        "right_within": float(right[~across].mean()),
        "above_plain": _above(right, plain),
        "kl": float(kl.mean()),
        "top1": float((got.argmax(-1) == full.argmax(-1)).double().mean()),
        # share of the prompt's tokens that went through all layers
        "computed": computed,
    }


def _above(
    right: npt.NDArray[np.bool_], plain: npt.NDArray[np.bool_]
) -> tuple[float, float]:
    """Return the 95 % interval of the difference in right answers."""
    found = difference_interval(right, plain, np.ones(len(right)))
    return found.low, found.high


def ttft(quick: bool) -> list[Row]:
    """Return one row for each way to the first token."""
    import torch

    from pagoda.connectors.transformers import CachedModel
    from pagoda_tools.cli.demo.demo_child import Size, _random
    from pagoda_tools.cli.demo.demo_prompts import ByteTokenizer

    torch.set_num_threads(1)
    model, _ = _random(Size())
    draw = np.random.default_rng(0)
    ids = ByteTokenizer.vocabulary
    documents = [draw.integers(0, ids, TOKENS).tolist() for _ in range(DOCUMENTS)]
    question = draw.integers(0, ids, QUESTION).tolist()
    once: dict[str, object] = {"max_new_tokens": 1, "do_sample": False}
    with CachedModel(
        model,
        chunk_tokens=256,
        host_size="1GiB",
        host_shared=False,
        worth_it=False,
        deadline_seconds=600.0,
    ) as cached:
        cached.blend(documents, question, recompute=0.0, unchecked=True)

        def full(order: list[list[int]]) -> None:
            ids = torch.tensor(
                [[token for piece in (*order, question) for token in piece]]
            )
            model.generate(ids, attention_mask=torch.ones_like(ids), **once)

        def blended(
            share: float, policy: str
        ) -> Callable[[list[list[int]]], None]:
            def run(order: list[list[int]]) -> None:
                cached.generate(
                    documents=order,
                    question=question,
                    recompute=share,
                    policy=policy,
                    unchecked=True,
                    **once,
                )
                assert cached.last is not None
                assert cached.last.blend is not None
                assert cached.last.blend.seconds["alone"] == 0.0

            return run

        ways = {"full prefill": full, "plain reuse": blended(0.0, "first_k")}
        for policy in POLICIES:
            for share in (0.15,) if quick else (0.05, 0.15, 0.3):
                ways[f"{policy} {share}"] = blended(share, policy)
        clock: dict[str, list[float]] = {name: [] for name in ways}
        processor: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for number in range(4 if quick else 6):
            order = [documents[index] for index in draw.permutation(DOCUMENTS)]
            for name in (
                names[number % len(names) :] + names[: number % len(names)]
            ):
                began = time.perf_counter()
                began_cpu = time.process_time()
                ways[name](order)
                if number:  # the first round warms up
                    clock[name].append(time.perf_counter() - began)
                    processor[name].append(time.process_time() - began_cpu)
            say(f"round {number}")
    return [
        {
            "method": name,
            "seconds": statistics.median(clock[name]),
            "cpu_seconds": statistics.median(processor[name]),
            "times_faster": _ratio(clock, name),
            "times_less_cpu": _ratio(processor, name),
            "runs": clock[name],
            "cpu_runs": processor[name],
        }
        for name in names
    ]


def _ratio(runs: dict[str, list[float]], name: str) -> float:
    return statistics.median(
        a / b for a, b in zip(runs["full prefill"], runs[name], strict=True)
    )


def table(part: str, rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    heads = [name for name in rows[0] if name not in ("runs", "cpu_runs")]
    lines = [
        f"## {part}",
        "| " + " | ".join(heads) + " |",
        "| --- |" + " --: |" * (len(heads) - 1),
    ]
    for row in rows:
        lines.append("| " + " | ".join(_text(row[name]) for name in heads) + " |")
    for row in rows:
        if "runs" in row:
            lines.append(
                f"{row['method']}: {_text(row['runs'])} s; CPU {_text(row['cpu_runs'])} s"
            )
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_text(one) for one in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run the parts that were asked for and print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["quality", "ttft", "all"], default="all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer prompts and rounds"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    parts = {"quality": quality, "ttft": ttft}
    found = {
        name: run(options.quick)
        for name, run in parts.items()
        if options.part in (name, "all")
    }
    if options.json:
        print(json.dumps({"machine": machine(), **found}))
    else:
        print("\n\n".join(table(part, rows) for part, rows in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
