"""The common parts of `pagoda replay` and `pagoda size`: the trace, the policies, sizes in chunks,
simulated cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

from typer import Argument, Option

from pagoda.config.did_you_mean import did_you_mean
from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.stores import configured

if TYPE_CHECKING:
    from pathlib import Path

    from pagoda.cache.request_trace import Request
    from pagoda_tools.replay import TierSpec

SAMPLE = "sample"
OPTIMUM = "optimum"
_PAGE = 4096  # slots are whole pages
_BETWEEN = ", "  # a policy and its objective, see `run_name`
_SHOWN_EVERY = 1_000  # requests

TraceFile: TypeAlias = Annotated[
    str,
    Argument(
        metavar="TRACE",
        help="Requests, one JSON object per line, may be .gz; - = stdin.",
    ),
]
Policies: TypeAlias = Annotated[
    list[str] | None,
    Option(
        "--policy",
        metavar="NAME",
        help="A policy; can be repeated; default: the configured one.",
    ),
]
Objectives: TypeAlias = Annotated[
    list[str] | None,
    Option(
        "--objective",
        metavar="NAME",
        help="What hindsight serves most of: chunks, compute; can be repeated; default: the "
        "configured one.",
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    Option(
        "--model",
        metavar="NAME",
        help="For sizes in bytes: a model such as llama-3-8b.",
    ),
]
TokenBytes: TypeAlias = Annotated[
    int | None,
    Option(
        min=1,
        max=2**30,
        metavar="N",
        help="For sizes in bytes: bytes of KV per token.",
    ),
]
KVType: TypeAlias = Annotated[
    str,
    Option(
        "--kv-dtype",
        metavar="DTYPE",
        help="For sizes in bytes: the dtype of the model's KV.",
    ),
]
Jobs: TypeAlias = Annotated[
    int | None,
    Option(
        min=1,
        max=256,
        metavar="N",
        help="Processes; default: one per processor, or one for a small trace.",
    ),
]


class Trace(NamedTuple):
    """A trace: its requests, the number of all chunks and of different chunks, the tokens per
    chunk, and the bound.
    """

    name: str
    requests: list[Request]
    accesses: int
    distinct: int
    chunk_tokens: int
    infinite: float  # the hit rate of a cache without bounds

    @property
    def seconds(self) -> float:
        """The time from the first request to the last."""
        return (
            self.requests[-1].timestamp_ms - self.requests[0].timestamp_ms
        ) / 1e3

    @property
    def input_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(request.input_length for request in self.requests)

    @property
    def title(self) -> str:
        """A description of the trace."""
        return (
            f"{self.name}: {len(self.requests):,} requests in {self.seconds / 60:.0f} min, "
            f"{self.accesses:,} chunks of"
            f" {self.chunk_tokens} tokens, {self.distinct:,} different; "
            f"{100 * self.infinite:.1f} % can be served"
        )

    def as_json(self) -> dict[str, object]:
        """Return the facts of the trace as plain values."""
        return {
            "trace": self.name,
            "requests": len(self.requests),
            "accesses": self.accesses,
            "distinct_chunks": self.distinct,
            "chunk_tokens": self.chunk_tokens,
            "seconds": self.seconds,
            "infinite": self.infinite,
        }

    def report(
        self, runs: Sequence[dict[str, object]], **facts: object
    ) -> dict[str, object]:
        """Return the facts of the trace and all runs; the keys of a single run are also among the
        facts.
        """
        return {
            **self.as_json(),
            **facts,
            **(runs[0] if len(runs) == 1 else {}),
            "runs": runs,
        }

    def room(self, chunks: int) -> int:
        """Return how many chunks to simulate for a cache of that size: at most as many as the trace
        can fill.
        """
        return min(chunks, self.distinct)


class Cell(NamedTuple):
    """The result of one policy (or "optimum") at one size. `policy`: see `run_name`; `saved_rate`:
    the share of the prompts' computation that hits save.
    """

    policy: str
    chunks: int
    hit_rate: float
    chunks_written: int = 0
    saved_rate: float = 0.0


def trace_of(name: str, quiet: bool = False) -> Trace:
    """Read a trace; "sample" is the one in the package. Shows the progress on a terminal, unless
    `quiet`. Raises UsageError if it is not a trace.
    """
    from importlib.resources import as_file, files

    if name != SAMPLE:
        return _read(name, name, quiet)
    with as_file(files("pagoda_tools.replay") / "sample.jsonl.gz") as path:
        return _read(name, path, quiet)


def _read(name: str, source: str | Path, quiet: bool) -> Trace:
    from pagoda.cache.request_trace import with_shared_ids
    from pagoda_tools.replay import infinite, read_trace

    requests: list[Request] = []
    try:
        with printing.progress(quiet) as bars:
            # how many there are is known at the end only
            task = bars.add_task(f"reading {name}", total=None)
            for request in with_shared_ids(read_trace(source)):
                requests.append(request)
                if len(requests) % _SHOWN_EVERY == 0:
                    text = f"reading {name}: {len(requests):,} requests"
                    bars.update(task, description=text)
    except OSError as trouble:
        raise UsageError(
            f"{name}: cannot be read: {trouble.strerror or trouble}"
        ) from None
    except ValueError as trouble:
        raise UsageError(str(trouble)) from None
    distinct = {chunk for request in requests for chunk in request.hash_ids}
    if not distinct:
        raise UsageError(f"{name}: has no request with a whole chunk")
    sizes = sorted({request.chunk_tokens for request in requests})
    if len(sizes) > 1:
        several = " and ".join(map(str, sizes))
        raise UsageError(
            f"{name}: has chunks of {several} tokens; replay each size separately"
        )
    accesses = sum(len(request.hash_ids) for request in requests)
    return Trace(
        name, requests, accesses, len(distinct), sizes[0], infinite(requests)
    )


def policies_of(
    names: Sequence[str] | None, config: Path | None, option: str = "--policy"
) -> list[str]:
    """Return the requested policies, each once, or the configured one. Raises UsageError for an
    unknown one.
    """
    from pagoda.policy import NAMES, REMOVED

    asked = list(dict.fromkeys(names)) if names else [configured(config).policy]
    for name in asked:
        if name in REMOVED:
            raise UsageError(f"{option} {name}: {REMOVED[name]}")
    return [one_of(NAMES, option, name, "policy") for name in asked]


def runs_of(
    policies: Sequence[str] | None,
    objectives: Sequence[str] | None,
    config: Path | None,
) -> list[str]:
    """Return the names of what is simulated: each policy, and hindsight with each objective. By
    default the configured ones. Raises UsageError.
    """
    from pagoda.policy import DEFAULT, DEFAULT_OBJECTIVE, OBJECTIVES

    names = policies_of(policies, config)
    asked = [
        one_of(OBJECTIVES, "--objective", name, "objective")
        for name in dict.fromkeys(objectives or ())
    ]
    if set(asked) - {DEFAULT_OBJECTIVE} and DEFAULT not in names:
        raise UsageError(
            f"--objective compute: {names[0]} has one order for all; use --policy {DEFAULT}"
        )
    asked = asked or [configured(config).objective]
    return [
        run_name(name, objective)
        for name in names
        for objective in (asked if name == DEFAULT else [DEFAULT_OBJECTIVE])
    ]


def run_name(policy: str, objective: str) -> str:
    """Return the policy, and the objective if it is not the usual one."""
    from pagoda.policy import DEFAULT_OBJECTIVE

    if objective == DEFAULT_OBJECTIVE:
        return policy
    return f"{policy}{_BETWEEN}{objective}"


def named(run: str) -> dict[str, object]:
    """Return policy and objective of a run, as plain values."""
    from pagoda.policy import DEFAULT_OBJECTIVE

    policy, _, objective = run.partition(_BETWEEN)
    return {"policy": policy, "objective": objective or DEFAULT_OBJECTIVE}


def spec_of(tier: str, chunks: int, run: str, chunk_tokens: int) -> TierSpec:
    """Return the tier to simulate for a run."""
    from pagoda.policy.prefill_cost import cost_of
    from pagoda_tools.replay import TierSpec

    policy, objective = map(str, named(run).values())
    return TierSpec(tier, chunks, policy, cost_of(objective, chunk_tokens))


def one_of(known: Sequence[str], option: str, name: str, what: str) -> str:
    """Return `name`. Raises UsageError if it is not known."""
    if name not in known:
        near = did_you_mean(name, known) or f"; choose one of {', '.join(known)}"
        raise UsageError(f"{option} {name}: no such {what}{near}")
    return name


def chunk_bytes_of(
    trace: Trace, model: str | None, token_bytes: int | None, dtype: str
) -> int | None:
    """Return the bytes of a slot for one chunk; None without a model and bytes. Raises
    UsageError.
    """
    if token_bytes is None:
        if model is None:
            return None
        from pagoda_tools.cli.known_models import model_of

        try:
            token_bytes = model_of(model).token_bytes(dtype)
        except ValueError as trouble:
            raise UsageError(f"--kv-dtype {dtype}: {trouble}") from None
    return -(-trace.chunk_tokens * token_bytes // _PAGE) * _PAGE


def simulated(requests: Sequence[Request], policy: str, chunks: int) -> Cell:
    """Simulate one policy at one size."""
    from pagoda_tools.replay import simulate

    spec = spec_of("host", chunks, policy, requests[0].chunk_tokens)
    outcome = simulate(requests, [spec])
    written = outcome.tiers[0].chunks_written
    return Cell(policy, chunks, outcome.hit_rate, written, outcome.saved_rate)


def best(requests: Sequence[Request], chunks: int) -> Cell:
    """Return the best possible hit rate at this size."""
    from pagoda_tools.replay import optimum

    return Cell(OPTIMUM, chunks, optimum(requests, chunks))
