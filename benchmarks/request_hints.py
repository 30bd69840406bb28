"""What request hints bring: `python benchmarks/request_hints.py [--json] [--only PART]`.

Replays recorded sessions of coding agents, a chat trace and both together, with and without hints:
which session asks, how each answer ended, when the session is over, and the workload (by the first
chunk). Prints what the hints were tuned on and what they were not separately. All numbers are exact
and the same in every run. The last results: docs/design/benchmarks/request-hints.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import msgspec
from harness import say
from msgspec.structs import replace
from policies_streams import TRACES

from pagoda.cache.request_trace import Request, read_trace
from pagoda.policy.prefill_cost import PrefillCost
from pagoda_tools.replay.optimum import optimum
from pagoda_tools.replay.simulate import (
    SimulatedOutcome,
    TierSpec,
    simulate,
    simulate_each,
)

_AGENTS = "agents_train.jsonl.gz"
_CHAT = "mooncake_conversation.jsonl"
_SESSIONS = 40
_HOUR_MS = 3_600_000
_SHARES = (0.05, 0.1, 0.2)
_CHAT_SIZES = (1_000, 2_000, 5_000, 20_000, 50_000)
# the mixes on which the hints were tuned, of all sessions; unseen mixes have none of theirs
_TUNED_SEEDS = (1, 2, 7)
# of the sessions of a mix, those of one tenant who is hostile
_HOSTILE = 4
_DAY_SECONDS = 86_400.0
# what hindsight may lose against LRU, whatever the hints say
_MOST_POINTS = 0.6

Stream = list[Request]


@cache
def sessions(traces: Path) -> dict[str, Stream]:
    """Return the recorded sessions, each in order of time."""
    found: dict[str, Stream] = {}
    for request in _lines(traces / _AGENTS):
        found.setdefault(str(request.session), []).append(request)
    return found


def _lines(path: Path) -> Stream:
    """Return the requests of a file whose sessions each begin at 0, which `read_trace` would make
    one after the other.
    """
    decode = msgspec.json.Decoder(Request).decode
    with gzip.open(path) as file:
        return [decode(line) for line in file]


def _names(traces: Path) -> list[str]:
    """Return the names of all sessions."""
    return sorted(sessions(traces), key=int)


def mix(
    traces: Path, seed: int, names: Sequence[str], first_id: int = 0
) -> Stream:
    """Return 40 of these sessions, each begun at a random moment of one hour."""
    generator = random.Random(seed)
    ids: dict[tuple[str, int], int] = {}
    mixed: Stream = []
    for name in generator.sample(names, _SESSIONS):
        start = generator.randrange(_HOUR_MS)
        for request in sessions(traces)[name]:
            blocks = [
                first_id + ids.setdefault((name, block), len(ids))
                for block in request.hash_ids
            ]
            mixed.append(
                replace(
                    request,
                    timestamp_ms=request.timestamp_ms + start,
                    hash_ids=tuple(blocks),
                )
            )
    return sorted(mixed, key=lambda request: request.timestamp_ms)


def tuned_names(traces: Path) -> set[str]:
    """Return the sessions that a tuned mix has."""
    names = _names(traces)
    return {
        name
        for seed in _TUNED_SEEDS
        for name in random.Random(seed).sample(names, _SESSIONS)
    }


def tuned_mix(traces: Path, seed: int) -> Stream:
    """Return a mix on which the hints were tuned."""
    return mix(traces, seed, _names(traces))


def unseen_mix(traces: Path, seed: int) -> Stream:
    """Return a mix of sessions on which nothing was tuned."""
    seen = tuned_names(traces)
    names = [name for name in _names(traces) if name not in seen]
    return mix(traces, seed, names)


def chat(traces: Path, _: int) -> Stream:
    """Return the chat trace."""
    return list(read_trace(traces / _CHAT))


def mix_with_chat(traces: Path, seed: int) -> Stream:
    """Return a mix of unseen sessions, and the chat trace at the same time."""
    talk = chat(traces, 0)
    first = 1 + max(max(request.hash_ids, default=0) for request in talk)
    agents = [
        replace(
            request,
            hash_ids=tuple(first + block for block in request.hash_ids),
        )
        for request in unseen_mix(traces, seed)
    ]
    return sorted([*talk, *agents], key=lambda request: request.timestamp_ms)


# ---- hints that are wrong


def _shuffled(stream: Stream) -> Stream:
    """Give each request the ending of another."""
    stops = [request.stop for request in stream]
    random.Random(0).shuffle(stops)
    return [
        replace(request, stop=stop)
        for request, stop in zip(stream, stops, strict=True)
    ]


def _always_over(stream: Stream) -> Stream:
    """Say after each request that its session is over."""
    return [replace(request, last=True) for request in stream]


def _one_session(stream: Stream) -> Stream:
    """Say of each request that it belongs to the same session."""
    return [replace(request, session=1, agent="") for request in stream]


def _most_active_over(stream: Stream) -> Stream:
    """Say of every tool call that its session is over, and of nothing else."""
    return [
        replace(request, last=request.stop == "tool_use") for request in stream
    ]


_WRONG: dict[str, Callable[[Stream], Stream]] = {
    "endings shuffled": _shuffled,
    "always over": _always_over,
    "all one session": _one_session,
    "over at each tool call": _most_active_over,
}


# ---- a tenant who is hostile


@dataclass(frozen=True)
class Attack:
    """What everybody asks, with what the hostile tenant says. `others`: which requests are those of
    the others.
    """

    stream: Stream
    others: tuple[bool, ...]


def _of_hostile(stream: Stream, **said: object) -> Attack:
    """Let one of four sessions belong to a tenant who says this of each of its requests."""
    names = sorted({str(request.session) for request in stream}, key=int)
    hostile = set(names[::_HOSTILE])
    others = tuple(str(request.session) not in hostile for request in stream)
    told = [
        request if is_other else replace(request, **said)
        for request, is_other in zip(stream, others, strict=True)
    ]
    return Attack(told, others)


def _retains_all(stream: Stream) -> Attack:
    """Retain each of its prompts for a day."""
    return _of_hostile(stream, retain_seconds=_DAY_SECONDS)


def _drops_all(stream: Stream) -> Attack:
    """Drop each of its prompts, and go on all the same."""
    return _of_hostile(stream, drop=True)


def _repeated(stream: Stream, offset: int) -> Attack:
    """Let a hostile client ask a second later what each session asks, and drop it; by chunks of
    its own if the offset is not 0.
    """
    copies = [
        (
            replace(
                request,
                timestamp_ms=request.timestamp_ms + 1_000,
                hash_ids=tuple(offset + block for block in request.hash_ids),
                session=f"hostile {request.session}",
                stop="end_turn",
                last=False,
                drop=True,
            ),
            False,
        )
        for request in stream
    ]
    both = [*((request, True) for request in stream), *copies]
    both.sort(key=lambda one: one[0].timestamp_ms)
    return Attack(
        [request for request, _ in both], tuple(other for _, other in both)
    )


def _drops_the_same_text(stream: Stream) -> Attack:
    """Drop the prompts of others, by another salt: so the chunks are other ones."""
    return _repeated(stream, 1 + max(map(_largest_id, stream)))


def _drops_of_others(stream: Stream) -> Attack:
    """Drop the prompts of others, without a salt between them."""
    return _repeated(stream, 0)


def _largest_id(request: Request) -> int:
    return max(request.hash_ids, default=0)


_ATTACKS: dict[str, Callable[[Stream], Attack]] = {
    "retains all": _retains_all,
    "drops all": _drops_all,
    "drops the same text": _drops_the_same_text,
    "drops others' prompts": _drops_of_others,
}
_STREAMS: dict[str, Callable[[Path, int], Stream]] = {
    "tuned": tuned_mix,
    "unseen": unseen_mix,
    "mix": mix_with_chat,
    "chat": chat,
    "wrong": unseen_mix,
    "hostile": unseen_mix,
    "objective": tuned_mix,
}
_TITLES = {
    "tuned": "Coding agents on which the hints were tuned",
    "unseen": "Coding agents on which nothing was tuned",
    "mix": "The same with chat: nothing was tuned on it",
    "chat": "Chat alone: nothing was tuned on it",
    "wrong": "Unseen agents with wrong and hostile hints",
    "hostile": "Unseen agents beside a tenant who is hostile",
    "objective": "What is served and saved with each objective",
}


@dataclass(frozen=True)
class HintCell:
    """One stream and size to replay; `chunks` 0: `share` of its different chunks."""

    part: str
    seed: int
    share: float
    chunks: int = 0
    wrong: str = ""


@dataclass(frozen=True)
class HintRow:
    """The results of one cell: hit rates, and chunks written."""

    part: str
    seed: int
    wrong: str
    chunks: int
    share: float
    lru: float
    today: float
    hints: float
    best: float
    lru_written: int
    today_written: int
    hints_written: int

    @property
    def gap(self) -> float:
        """The share of the distance from LRU to the optimum, with hints."""
        return (self.hints - self.lru) / (self.best - self.lru)

    @property
    def gap_today(self) -> float:
        """The same without hints."""
        return (self.today - self.lru) / (self.best - self.lru)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            self.wrong or str(self.seed),
            f"{100 * self.share:.0f} %",
            f"{self.chunks:,}",
            f"{100 * self.lru:.2f}",
            f"{100 * self.today:.2f}",
            f"{100 * self.hints:.2f}",
            f"{100 * self.best:.2f}",
            f"{100 * self.gap_today:.0f} %",
            f"{100 * self.gap:.0f} %",
            f"{self.lru_written:,}",
            f"{self.today_written:,}",
            f"{self.hints_written:,}",
        )


_HEADS = (
    "mix", "of all", "chunks", "LRU", "without", "hints", "optimum", "gap without", "gap",
    "LRU wrote", "without wrote", "hints wrote",
)  # fmt: skip


@dataclass(frozen=True)
class HostileRow:
    """The results of one cell with a hostile tenant: hit rates of all requests, and of those of the
    others; with its hints, and with what it would say if it were honest or silent.
    """

    part: str
    attack: str
    chunks: int
    share: float
    lru: float
    hints: float
    lru_others: float
    honest_others: float
    hints_others: float

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            self.attack,
            f"{100 * self.share:.0f} %",
            f"{self.chunks:,}",
            f"{100 * self.lru:.2f}",
            f"{100 * self.hints:.2f}",
            f"{100 * self.lru_others:.2f}",
            f"{100 * self.honest_others:.2f}",
            f"{100 * self.hints_others:.2f}",
        )


_HOSTILE_HEADS = (
    "tenant", "of all", "chunks", "LRU", "hints", "others: LRU", "before", "hostile",
)  # fmt: skip


_OBJECTIVE_SEEDS = {"tuned": _TUNED_SEEDS, "unseen": (1, 2), "chat": (0,)}


@dataclass(frozen=True)
class ObjectiveRow:
    """The results of one cell with each objective, without hints and with them: shares of the
    chunks served, and of the computation saved.
    """

    part: str
    stream: str
    seed: int
    chunks: int
    share: float
    lru: tuple[float, float]
    chunks_without: tuple[float, float]
    compute_without: tuple[float, float]
    chunks_hints: tuple[float, float]
    compute_hints: tuple[float, float]

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            f"{self.stream} {self.seed}" if self.seed else self.stream,
            f"{100 * self.share:.0f} %",
            f"{self.chunks:,}",
            *(
                f"{100 * hits:.2f}, {100 * saved:.2f}"
                for hits, saved in (
                    self.lru,
                    self.chunks_without,
                    self.compute_without,
                    self.chunks_hints,
                    self.compute_hints,
                )
            ),
        )


_OBJECTIVE_HEADS = (
    "stream", "of all", "chunks", "LRU", "chunks, without", "compute, without", "chunks, hints",
    "compute, hints",
)  # fmt: skip


def play_objective(traces: Path, cell: HintCell) -> ObjectiveRow:
    """Replay one cell with LRU and each objective. `cell.wrong`: which stream."""
    stream = _STREAMS[cell.wrong](traces, cell.seed)
    distinct = len({block for request in stream for block in request.hash_ids})
    chunks = int(distinct * cell.share)
    cost = PrefillCost.of_chunks(stream[0].chunk_tokens)

    def rates(
        policy: str, cost: PrefillCost | None, with_hints: bool
    ) -> tuple[float, float]:
        tier = [TierSpec("tier", chunks, policy, cost)]
        found = simulate(stream, tier, with_hints=with_hints)
        return found.hit_rate, found.saved_rate

    return ObjectiveRow(
        cell.part, cell.wrong, cell.seed, chunks, chunks / distinct,
        rates("lru", None, False),
        *(
            rates("hindsight", each, with_hints)
            for with_hints in (False, True)
            for each in (None, cost)
        ),
    )  # fmt: skip


def objective_summary(rows: Sequence[ObjectiveRow]) -> list[str]:
    """Return what computation saves more with the objective that is named so, in points."""
    lines = []
    for name, one, other in (
        ("without hints", "compute_without", "chunks_without"),
        ("with hints", "compute_hints", "chunks_hints"),
    ):
        gained, lost = (
            [
                100 * (getattr(row, one)[at] - getattr(row, other)[at])
                for row in rows
            ]
            for at in (1, 0)
        )
        lines.append(
            f"{name}: saved {min(gained):+.2f} to {max(gained):+.2f}, median "
            f"{median(gained):+.2f}; hits {min(lost):+.2f} to {max(lost):+.2f}"
        )
    return lines


def cells(part: str, seeds: int) -> list[HintCell]:
    """Return the cells of a part."""
    if part == "objective":
        return [
            HintCell(part, seed, share, 0, stream)
            for stream, numbers in _OBJECTIVE_SEEDS.items()
            for seed in numbers
            for share in _SHARES[:2]
        ]
    if part == "chat":
        return [HintCell(part, 0, 0.0, size) for size in _CHAT_SIZES]
    if part == "mix":
        return [HintCell(part, 1, share) for share in (0.02, 0.05, 0.1)]
    if part == "wrong":
        return [
            HintCell(part, 1, share, 0, wrong)
            for wrong in _WRONG
            for share in _SHARES
        ]
    if part == "hostile":
        return [
            HintCell(part, 1, share, 0, attack)
            for attack in _ATTACKS
            for share in _SHARES
        ]
    numbers = _TUNED_SEEDS if part == "tuned" else range(1, seeds + 1)
    return [HintCell(part, seed, share) for seed in numbers for share in _SHARES]


def play_hostile(traces: Path, cell: HintCell) -> HostileRow:
    """Replay one cell: LRU, hindsight before the tenant became hostile, and afterwards."""
    attack = _ATTACKS[cell.wrong](_STREAMS[cell.part](traces, cell.seed))
    stream = attack.stream
    distinct = len({block for request in stream for block in request.hash_ids})
    chunks = int(distinct * cell.share)
    before = [
        replace(request, drop=False, retain_seconds=0.0) for request in stream
    ]

    def rates(told: Stream, policy: str) -> tuple[float, float]:
        tier = [TierSpec("tier", chunks, policy)]
        outcome, served = simulate_each(
            told, tier, with_hints=policy == "hindsight"
        )
        hits = asked = 0
        for request, (count,), is_other in zip(
            told, served, attack.others, strict=True
        ):
            hits += count * is_other
            asked += len(request.hash_ids) * is_other
        return outcome.hit_rate, hits / asked

    lru, lru_others = rates(before, "lru")
    _, honest_others = rates(before, "hindsight")
    hints, hints_others = rates(stream, "hindsight")
    return HostileRow(
        cell.part, cell.wrong, chunks, chunks / distinct,
        lru, hints, lru_others, honest_others, hints_others,
    )  # fmt: skip


Row = HintRow | HostileRow | ObjectiveRow


def play(traces: Path, cell: HintCell) -> Row:
    """Replay one cell: LRU, hindsight without hints and with them, and the optimum."""
    if cell.part == "hostile":
        return play_hostile(traces, cell)
    if cell.part == "objective":
        return play_objective(traces, cell)
    make = _STREAMS[cell.part]
    stream = make(traces, cell.seed)
    distinct = len({block for request in stream for block in request.hash_ids})
    chunks = cell.chunks or int(distinct * cell.share)
    told = _WRONG[cell.wrong](stream) if cell.wrong else stream
    lru, today, best = _without(make, traces, cell.seed, chunks)
    tier = [TierSpec("tier", chunks, "hindsight")]
    hints = simulate(told, tier, with_hints=True)
    return HintRow(
        cell.part, cell.seed, cell.wrong, chunks, chunks / distinct,
        lru.hit_rate, today.hit_rate, hints.hit_rate, best,
        lru.tiers[0].chunks_written, today.tiers[0].chunks_written,
        hints.tiers[0].chunks_written,
    )  # fmt: skip


@cache
def _without(
    make: Callable[[Path, int], Stream], traces: Path, seed: int, chunks: int
) -> tuple[SimulatedOutcome, SimulatedOutcome, float]:
    """Replay a stream with LRU, and with hindsight without hints; and the optimum."""
    stream = make(traces, seed)
    lru, today = (
        simulate(stream, [TierSpec("tier", chunks, policy)])
        for policy in ("lru", "hindsight")
    )
    return lru, today, optimum(stream, chunks)


def hostile_summary(rows: Sequence[HostileRow]) -> list[str]:
    """Return what hostile tenants cost, in one line each."""
    over_lru = [100 * (row.hints - row.lru) for row in rows]
    others = [100 * (row.hints_others - row.lru_others) for row in rows]
    cost = [100 * (row.hints_others - row.honest_others) for row in rows]
    lines = [
        f"points over LRU: all worst {min(over_lru):+.2f}, others worst {min(others):+.2f}",
        f"points over what the others hit before: worst {min(cost):+.2f}",
    ]
    if min(over_lru + others) < -_MOST_POINTS:
        lines.append(f"MISSED: more than {_MOST_POINTS} points below LRU")
    return lines


def summary(part: str, rows: Sequence[HintRow]) -> list[str]:
    """Return what a part shows in one line each."""
    if part in ("tuned", "unseen"):
        shares = sorted({round(row.share, 2) for row in rows})
        return [
            f"median gap at {100 * share:.0f} %: "
            f"{100 * median(row.gap for row in rows if round(row.share, 2) == share):.0f} %"
            for share in shares
        ]
    over_today = [100 * (row.hints - row.today) for row in rows]
    over_lru = [100 * (row.hints - row.lru) for row in rows]
    lines = [
        "points over hindsight without hints: "
        f"worst {min(over_today):+.2f}, best {max(over_today):+.2f}",
        f"points over LRU: worst {min(over_lru):+.2f}",
    ]
    if min(over_lru) < -_MOST_POINTS:
        lines.append(f"MISSED: more than {_MOST_POINTS} points below LRU")
    return lines


def main() -> None:
    """Read the command line, replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="directory of the traces"
    )
    parser.add_argument(
        "--only", choices=_STREAMS, action="append", help="only this part"
    )
    parser.add_argument(
        "--seeds", type=int, default=8, help="mixes of unseen sessions"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="at most (default: 1)"
    )
    options = parser.parse_args()
    for name in (_AGENTS, _CHAT):
        if not (options.traces / name).exists():
            parser.error(f"{options.traces / name} is not here: see --traces")
    found: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for part in options.only or _STREAMS:
            todo = cells(part, options.seeds)
            for row in pool.map(partial(play, options.traces), todo):
                found.setdefault(part, []).append(row)
                say(f"{part}: {'  '.join(row.texts)}")
    if options.json:
        rows = [asdict(row) for part in found.values() for row in part]
        print(json.dumps({"cells": rows}, indent=1))
        return
    for part, rows_of_part in found.items():
        print(f"\n#### {_TITLES[part]}\n")
        hinted = [row for row in rows_of_part if isinstance(row, HintRow)]
        hostile = [row for row in rows_of_part if isinstance(row, HostileRow)]
        judged = [row for row in rows_of_part if isinstance(row, ObjectiveRow)]
        heads = (
            _HEADS if hinted else _HOSTILE_HEADS if hostile else _OBJECTIVE_HEADS
        )
        lines = [heads, ["---"] + ["--:"] * (len(heads) - 1)]
        lines += [row.texts for row in rows_of_part]
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        said = (
            summary(part, hinted)
            if hinted
            else hostile_summary(hostile)
            if hostile
            else objective_summary(judged)
        )
        print("\n" + "\n".join(f"- {line}" for line in said))


if __name__ == "__main__":
    main()
