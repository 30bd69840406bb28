"""Time to first token with a remote hit over slow links: `.venv/bin/python
benchmarks/remote_links.py [--json]`.

An engine and a Redis in two network namespaces, joined by a cable that `tc ... tbf` shapes; needs
root and iproute2. For each link, in rounds with a turn for each entrant: the prompt computed,
loaded from Redis into an empty host tier (with each codec), and served by a cache whose worth-it
rule chooses. For comparison a bare socket moves as many bytes over the same link: "of that" is the
speed of the KV as a share of it (more than 1 where a codec sends fewer bytes). The rule tries a
tier again when its measurement is a minute old, so it does not compute in every round of a slow
link. `--markdown` prints the table in Markdown; `--quick` does fewer rounds. Compare only numbers
of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from harness import Figure, Runs, ratios, report, say
from remote_links_engine import (
    CODECS,
    LOSSY_CODECS,
    QUESTION_TOKENS,
    REDIS_PORT,
    Model,
    Stored,
)

sys.path.append(str(Path(__file__).parents[1]))  # for testbed

from testbed.netns import Cable, NotPermittedError, Place, network
from testbed.programs import path_of

LINKS: dict[str, float | None] = {
    "100 Mbit/s": 0.1e9,
    "1 Gbit/s": 1e9,
    "5 Gbit/s": 5e9,
    "10 Gbit/s": 10e9,
    "unshaped": None,
}
ANSWER_SECONDS = 900.0
# one with the usual work for its KV, and one with so little work for its KV that computing may be
# faster
MODELS = (
    Model(
        "70M",
        768,
        9,
        2048,
        heads=12,
        kv_heads=12,
        head_dim=64,
        document_tokens=1024,
        chunk_tokens=256,
    ),
    # KV of 16 bits, which lossy codecs are for; random weights say nothing about what they do to
    # answers
    Model(
        "70M bf16",
        768,
        9,
        2048,
        heads=12,
        kv_heads=12,
        head_dim=64,
        document_tokens=1024,
        chunk_tokens=256,
        dtype="bfloat16",
        codecs=(*CODECS, *LOSSY_CODECS),
    ),
    Model(
        "wide",
        64,
        8,
        128,
        heads=4,
        kv_heads=4,
        head_dim=128,
        document_tokens=1024,
        chunk_tokens=256,
    ),
)
TITLE = (
    "model",
    "link",
    "bare socket",
    "codec",
    "of that",
    "computed",
    "loaded",
    "loaded / computed",
    "faster",
    "rule",
    "right",
)


@dataclass(frozen=True)
class Cell:
    """One model, link and codec. Seconds are medians of the rounds, to the first token."""

    model: str
    link: str
    codec: str
    # of a bare socket over the same link, in the same rounds
    wire_gbit_per_second: float
    computed_seconds: float
    loaded_seconds: float
    loaded_vs_computed: float  # median of the ratio within a round
    rule_seconds: float
    rule_loaded_rounds: int
    rounds: int
    # of the load, as a share of the bare socket's speed, without the remaining computation
    wire_share: float
    runs: Runs
    rates: dict[str, float]  # what the rule had measured

    @property
    def faster(self) -> str:
        """Return the faster one in this run."""
        return "load" if self.loaded_vs_computed < 1 else "compute"

    @property
    def rule(self) -> str:
        """Return the rule's choice in most rounds."""
        return "load" if 2 * self.rule_loaded_rounds > self.rounds else "compute"

    @property
    def right(self) -> bool:
        """Return whether the rule chose the faster one, even where the difference is tiny."""
        return self.rule == self.faster

    @property
    def cost(self) -> float:
        """Return the time of the choice as a multiple of the faster one."""
        return (
            1.0
            if self.right
            else max(self.loaded_vs_computed, 1 / self.loaded_vs_computed)
        )

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of the table's row, in the order of TITLE."""
        chosen = (
            self.rule_loaded_rounds
            if self.rule == "load"
            else self.rounds - self.rule_loaded_rounds
        )
        return (
            self.model,
            self.link,
            f"{self.wire_gbit_per_second:.2f} Gbit/s",
            self.codec,
            f"{self.wire_share:.2f}",
            f"{self.computed_seconds:.3f} s",
            f"{self.loaded_seconds:.3f} s",
            f"{self.loaded_vs_computed:.2f}",
            self.faster,
            f"{self.rule} ({chosen} of {self.rounds})",
            "yes" if self.right else f"no: {self.cost:.2f} x",
        )


class Engine:
    """`remote_links_engine.py` in a namespace; every answer has a deadline."""

    def __init__(
        self, place: Place, address: str, model: Model, shm: Path
    ) -> None:
        task = {"model": asdict(model), "address": address, "shm": str(shm)}
        command = [
            sys.executable,
            _file("remote_links_engine.py"),
            "engine",
            json.dumps(task),
        ]
        self._process = place.start(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.stored = Stored(**self._answer())

    def rounds(self, count: int) -> dict[str, object]:
        """Race over the link in its present shape and return the result."""
        into: IO[bytes] = self._process.stdin
        into.write(b"%d\n" % count)
        into.flush()
        return self._answer()

    def close(self) -> None:
        """Close its stdin and wait for its end."""
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, object]:
        late = threading.Timer(ANSWER_SECONDS, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self._process.kill()
            # -9: we killed it because it did not answer in time
            code = self._process.wait(60)
            raise RuntimeError(
                f"no answer from the engine within {ANSWER_SECONDS:.0f} s: it ended with {code}"
            )
        return json.loads(line)


def cells_of(
    model: Model, link: str, answer: dict[str, object], stored: Stored
) -> list[Cell]:
    """Return one cell per codec."""
    runs = answer["runs"]
    wire = runs["wire"]
    computed = runs["computed"]
    return [
        Cell(
            model.name,
            link,
            codec,
            statistics.median(stored.kv_bytes * 8 / each / 1e9 for each in wire),
            statistics.median(computed),
            statistics.median(runs[f"loaded {codec}"]),
            statistics.median(ratios(runs[f"loaded {codec}"], computed)),
            statistics.median(runs[f"rule {codec}"]),
            sum(answer["rule_loaded"][codec]),
            len(computed),
            statistics.median(ratios(wire, answer["load_seconds"][codec])),
            {
                "wire": wire,
                "computed": computed,
                **{k: runs[f"{k} {codec}"] for k in ("loaded", "rule")},
            },
            answer["rates"][codec],
        )
        for codec in model.codecs
    ]


def measured(quick: bool, shm: Path) -> tuple[list[Cell], dict[str, Stored]]:
    """Measure every model over every link. Raise NotPermittedError where namespaces are not
    permitted.
    """
    cells: list[Cell] = []
    stored: dict[str, Stored] = {}
    for model in MODELS:
        with ends() as (place, cable):
            say(
                f"{model.name}: computing and storing {model.document_tokens} tokens ..."
            )
            engine = Engine(place, cable.far, model, shm)
            stored[model.name] = engine.stored
            for link, bits_per_second in LINKS.items():
                say(f"{model.name}: {link} ...")
                cable.shape(bits_per_second)
                answer = engine.rounds(3 if quick else 5)
                cells += cells_of(model, link, answer, engine.stored)
                for cell in cells[-len(model.codecs) :]:
                    say("  ".join(cell.row))
            engine.close()
    return cells, stored


@contextmanager
def ends() -> Iterator[tuple[Place, Cable]]:
    """Open two namespaces: one for an engine, one with a Redis and a bare socket; remove them
    afterwards.
    """
    program = path_of("redis-server")
    if program is None:
        raise NotPermittedError(
            "redis-server is not installed (Debian, Ubuntu: apt install redis-server)"
        )
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-bench-") as directory,
        network() as net,
    ):
        place = net.place("engine")
        store = net.place("store")
        cable = net.cable(place, store)
        log = Path(directory) / "redis.log"
        store.start(
            program,
            "--bind",
            cable.far,
            "--port",
            str(REDIS_PORT),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            directory,
            "--logfile",
            str(log),
        )
        bare = store.start(
            sys.executable,
            _file("remote_links_engine.py"),
            "serve",
            cable.far,
            stdout=subprocess.PIPE,
        )
        bare.stdout.readline()
        until = time.monotonic() + 20
        while not (
            log.exists() and b"Ready to accept connections" in log.read_bytes()
        ):
            if time.monotonic() > until:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)
        yield place, cable


def figures_of(cells: Sequence[Cell]) -> list[Figure]:
    """Return the figures: whether the rule is always right, the cost where it is not, and hits
    against computing.
    """
    right = {
        f"{cell.model}, {cell.link}, {cell.codec}": cell.right for cell in cells
    }
    cost, worst = max(
        (cell.cost, f"{cell.model}, {cell.link}, {cell.codec}") for cell in cells
    )
    note = f"{sum(right.values())} of {len(right)} choices are the faster one"
    dear = (
        "what the rule chose against the faster one, at "
        f"worst{'' if all(right.values()) else f': {worst}'}"
    )
    found = [
        Figure(
            "worth_it_right",
            sum(right.values()) / len(right),
            1.0,
            "ratio",
            right,
            note,
        ),
        Figure("worth_it_cost", cost, None, "times", {}, dear),
    ]
    for cell in cells:
        key = "_".join(["ttft", cell.model, cell.link, cell.codec])
        key = key.lower().replace(" ", "").replace("/s", "")
        note = (
            f"{cell.loaded_seconds:.3f} s loaded against {cell.computed_seconds:.3f} s "
            f"computed; rule: {cell.rule}"
        )
        found.append(
            Figure(
                f"{key}_vs_computed",
                cell.loaded_vs_computed,
                None,
                "times",
                cell.runs,
                note,
            )
        )
    return found + lossy_figures(cells)


def lossy_figures(cells: Sequence[Cell]) -> list[Figure]:
    """Return how much longer a load takes with zstd than with each lossy codec, round by round."""
    zstd = {
        (cell.model, cell.link): cell for cell in cells if cell.codec == "zstd"
    }
    found = []
    for cell in cells:
        if cell.codec in LOSSY_CODECS:
            paired = ratios(
                zstd[cell.model, cell.link].runs["loaded"], cell.runs["loaded"]
            )
            key = "_".join(["ttft", cell.model, cell.link, "zstd_vs", cell.codec])
            runs = {"ratio": [round(each, 3) for each in paired]}
            found.append(
                Figure(
                    key.lower().replace(" ", "").replace("/s", ""),
                    statistics.median(paired),
                    None,
                    "times",
                    runs,
                )
            )
    return found


def described(stored: dict[str, Stored]) -> list[str]:
    """Describe in plain words what was measured."""
    lines = []
    for name, each in stored.items():
        sizes = ", ".join(
            f"{nbytes / 1e6:.0f} MB as {codec}"
            for codec, nbytes in each.redis_bytes.items()
        )
        lines.append(
            f"{name}: a Llama of {each.parameters / 1e6:.1f} million random weights on one "
            "thread of the CPU; "
            f"a prompt of {each.reused_tokens + QUESTION_TOKENS} tokens of which "
            f"{each.reused_tokens} are in Redis: "
            f"{each.kv_bytes / 1e6:.0f} MB of KV in chunks of {each.chunk_bytes / (1 << 20):.1f} "
            f"MiB ({sizes}, by "
            "Redis' own account)"
        )
    return lines


def table(cells: Sequence[Cell], markdown: bool) -> str:
    """Format all cells, one row each."""
    rows = [TITLE, *(cell.row for cell in cells)]
    if markdown:
        rows.insert(1, ("---",) * len(TITLE))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(TITLE))]
    return "\n".join(
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> int:
    """Measure and print. Exit code 2: not permitted on this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table in Markdown"
    )
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    try:
        cells, stored = measured(options.quick, options.shm_dir)
    except NotPermittedError as trouble:
        say(f"remote_links: {trouble}")
        return 2
    what = described(stored)
    if options.json:
        extra = {
            "cells": [
                {**asdict(cell), "rule": cell.rule, "cost": cell.cost}
                for cell in cells
            ]
        }
        report(figures_of(cells), True, extra={**extra, "measured": what})
        return 0
    print("\n".join(f"- {line}" for line in what), end="\n\n")
    print(table(cells, options.markdown))
    if not options.markdown:
        report(figures_of(cells)[:2], False)
    return 0


def _file(name: str) -> str:
    return str(Path(__file__).with_name(name))


if __name__ == "__main__":
    sys.exit(main())
