"""`pagoda size`: the size of a cache for a share of the best possible hit rate. Sizes are
simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from typer import Option

from pagoda_tools.cli import FailedError, UsageError, printing, replay_inputs
from pagoda_tools.cli.replay_inputs import Cell, Trace, best, simulated
from pagoda_tools.cli.stores import AsJson, ConfigFile

_CLOSE = 1.01  # a size is the answer if a size one percent smaller is too small
_ROUNDING = 1e-9
_PERCENT = 90.0
_SLOWER = 3.0  # the time to search with a policy, relative to the optimum


def size(
    trace: replay_inputs.TraceFile = replay_inputs.SAMPLE,
    percent: Annotated[
        list[float] | None, Option(min=0.1, max=100, metavar="N")
    ] = None,
    policy: replay_inputs.Policies = None,
    model: replay_inputs.ModelName = None,
    bytes_per_token: replay_inputs.TokenBytes = None,
    kv_dtype: replay_inputs.KVType = "bfloat16",
    jobs: replay_inputs.Jobs = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Find the size of a cache that serves that share of what is possible.

    Args:
        percent: Share of what an unlimited cache would serve; default: 90.
    """
    wanted = percent or [_PERCENT]
    if len(wanted) > 1:
        given = ", ".join(f"{each:g}" for each in wanted)
        raise UsageError(
            f"--percent was given {len(wanted)} times ({given}): give it once"
        )
    share = wanted[0]
    names = replay_inputs.runs_of(policy, None, config)
    found = replay_inputs.trace_of(trace, as_json)
    chunk_bytes = replay_inputs.chunk_bytes_of(
        found, model, bytes_per_token, kv_dtype
    )
    if not found.infinite:
        raise FailedError(
            f"{found.name}: no prompt begins like an earlier one, so nothing can be served"
        )
    target = found.infinite * share / 100
    cells = _sizes(found, names, target - _ROUNDING, jobs, as_json)
    if as_json:
        printing.print_json(_as_json(found, cells, share, target, chunk_bytes))
    else:
        _print(found, cells, share, chunk_bytes)
    return 0


def _sizes(
    trace: Trace,
    policies: Sequence[str],
    target: float,
    jobs: int | None,
    quiet: bool,
) -> list[Cell]:
    """Return the smallest sufficient cell of each policy, then that of the optimum, which no policy
    can beat.
    """
    from pagoda_tools.cli.trace_pool import TraceJob, TracePool

    with (
        TracePool(trace.requests, jobs, quiet) as pool,
        printing.progress(quiet) as bars,
    ):
        task = bars.add_task(
            f"sizes for {trace.name}", total=1.0 + _SLOWER * len(policies)
        )
        bar = _OneBar(lambda done: bars.update(task, completed=done))

        def bound(sizes: Sequence[int]) -> list[Cell]:
            work = [TraceJob(best, (size,)) for size in sizes]
            return pool.run_shown(work, bar.show_probe)

        bar.begin_search(1.0)
        least = _smallest(bound, target, 0, trace.distinct, pool.jobs, bar)
        cells = []
        for name in policies:

            def probe(sizes: Sequence[int], name: str = name) -> list[Cell]:
                work = [TraceJob(simulated, (name, size)) for size in sizes]
                return pool.run_shown(work, bar.show_probe)

            bar.begin_search(_SLOWER)
            low = least.chunks - 1
            cells.append(
                _smallest(probe, target, low, trace.distinct, pool.jobs, bar)
            )
    return [*cells, least]


class _OneBar:
    """One progress bar for all searches. How many probes a search needs is known from its range;
    the bar never goes back.
    """

    def __init__(self, show: Callable[[float], None]) -> None:
        """`show` is given the work that is done, as the sum of the weights of searches."""
        self._show = show
        self._ended = 0.0  # the weight of the searches before this one
        self._weight = 0.0
        self._share = 0.0  # of this search
        self._next = 0.0  # after the probe that runs

    def begin_search(self, weight: float) -> None:
        """Begin the next search; the one before has ended."""
        self._ended = self._ended + self._weight
        self._weight = weight
        self._share = self._next = 0.0
        self._show(self._ended)

    def begin_probe(self, left: int) -> None:
        """Begin a probe, one of `left` probes that the search still needs at most."""
        self._share = self._next
        self._next = self._share + (1 - self._share) / max(1, left)

    def show_probe(self, done: float) -> None:
        """Show that this share of the probe is done."""
        share = self._share + done * (self._next - self._share)
        self._show(self._ended + self._weight * share)


def _probes(low: int, high: int, width: int) -> int:
    """Return how many probes of `width` sizes narrow this range down to the answer."""
    ratio = math.log(max(high, 2) / max(low, 1)) / math.log(_CLOSE)
    return max(1, math.ceil(math.log(max(ratio, 1.1)) / math.log(width + 1)))


def _smallest(
    probe: Callable[[Sequence[int]], list[Cell]],
    target: float,
    low: int,
    high: int,
    width: int,
    bar: _OneBar,
) -> Cell:
    """Return the cell of the smallest size above `low` that reaches the target; probes `width`
    sizes at a time.
    """
    bar.begin_probe(1 + _probes(low, high, width))
    (answer,) = probe([high])
    if answer.hit_rate < target:
        raise FailedError(
            f"{answer.policy} serves {100 * answer.hit_rate:.2f} % even if all chunks fit"
        )
    while answer.chunks - low > 1 and answer.chunks > max(low, 1) * _CLOSE:
        bar.begin_probe(_probes(low, answer.chunks, width))
        for cell in probe(_between(low, answer.chunks, width)):
            if cell.hit_rate >= target:
                answer = cell
                break
            low = cell.chunks
    return answer


def _between(low: int, high: int, count: int) -> list[int]:
    """Return at most `count` whole numbers between the two, evenly spaced on a logarithmic axis."""
    base = max(low, 1)
    found = {
        round(base * (high / base) ** (number / (count + 1)))
        for number in range(1, count + 1)
    }
    return sorted(value for value in found if low < value < high) or [
        (low + high) // 2
    ]


def _as_json(
    trace: Trace,
    cells: Sequence[Cell],
    percent: float,
    target: float,
    chunk_bytes: int | None,
) -> dict[str, object]:
    """Return all answers as "sizes"; the keys of a single answer are also among the trace's."""
    sizes: list[dict[str, object]] = []
    for cell in cells:
        found: dict[str, object] = {
            "policy": cell.policy,
            "chunks": cell.chunks,
            "hit_rate": cell.hit_rate,
        }
        sizes.append(
            found | ({"bytes": cell.chunks * chunk_bytes} if chunk_bytes else {})
        )
    alone = sizes[0] if len(sizes) == 2 else {}  # the last cell is the optimum
    asked = {"percent": percent, "target_hit_rate": target}
    return {
        **trace.as_json(),
        **asked,
        **alone,
        "optimum_chunks": cells[-1].chunks,
        "sizes": sizes,
    }


def _print(
    trace: Trace, cells: Sequence[Cell], percent: float, chunk_bytes: int | None
) -> None:
    rows = [
        {
            "policy": cell.policy,
            "chunks": cell.chunks,
            "bytes": printing.size(cell.chunks * (chunk_bytes or 0)),
            "hit rate": printing.share(cell.hit_rate, 1),
            "of what is possible": printing.share(cell.hit_rate, trace.infinite),
        }
        for cell in cells
    ]
    title = (
        f"for {percent:g} % of the {100 * trace.infinite:.1f} % that can be served of {trace.name}"
        f" ({len(trace.requests):,} requests, {trace.chunk_tokens} tokens per chunk)"
    )
    printing.print_dicts(title, rows, without=() if chunk_bytes else ("bytes",))
