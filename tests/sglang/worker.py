"""One engine in a process of its own: `python -m tests.sglang.worker PLAN`, with the fields of
`Plan` as JSON.

Prints one JSON object per line: what a request found, and "stopped" where it was asked to stop for
good.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

from pagoda.transfer.pages_kv import PagesKV
from tests.sglang.engines import Engine, Shape, start_group
from tests.sglang.prompts import Prompts


class Plan(NamedTuple):
    """What to do."""

    extra: dict[str, Any]
    seed: int = 0
    stream: int = 0
    requests: int = 20
    # a method of PagesKV: half of what it copies is copied, then nothing happens any more
    stop_in: str = ""
    stop_at: int = 1  # its call
    forget_every: int = 5
    rank: int = 0
    ranks: int = 1
    group: str = ""  # a file in which the ranks meet
    lame: bool = False  # stores nothing


def main() -> None:
    """Do what the plan says."""
    plan = Plan(**json.loads(sys.argv[1]))
    if plan.stop_in:
        _stop(plan.stop_in, plan.stop_at)
    start_group(plan.rank, plan.ranks, plan.group or None)
    prompts = Prompts(plan.seed, stream=plan.stream)
    with Engine(plan.extra, Shape(), rank=plan.rank, ranks=plan.ranks) as engine:
        if plan.lame:
            engine.storage.batch_set_v1 = lambda keys, *_: [False] * len(keys)
        for number in range(plan.requests):
            outcome = engine.request(next(prompts))
            say(vars(outcome))
            if number % plan.forget_every == plan.forget_every - 1:
                engine.forget()
        engine.settle()
    say({"ended": True})


def say(what: dict[str, Any]) -> None:
    """Print one line, by one write: another thread may print too."""
    print(json.dumps(what) + "\n", end="", flush=True)


def _stop(name: str, at: int) -> None:
    original = getattr(PagesKV, name)
    calls = 0

    def stopping(self: PagesKV, starts: Any, slots: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < at:
            return original(self, starts, slots)
        half = max(1, len(starts) // 2)
        original(self, starts[:half], slots[:half])
        say({"stopped": name})
        time.sleep(600)
        return None

    setattr(PagesKV, name, stopping)


if __name__ == "__main__":
    main()
