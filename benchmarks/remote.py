"""The speed of remote tiers on real servers on loopback: `python benchmarks/remote.py [--json |
--markdown] [--quick]`.

Our link (one connection) and the whole tier against a bare loop of the server's own commands, a
bare socket to a second process, and the usual client in plain use, in turns. Servers keep their
files in memory and share the cores with us, so every figure quotes the processor time of both ends.
What each figure means, and the last results: docs/design/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ground import Part, Plan, measure
from harness import MIB, Figure, machine, report, say

SIZES = (1, 8, 32)  # MiB
QUICK_SIZES = (8,)
_HEADS = (
    "figure",
    "value",
    "GB/s",
    "CPU s/GB",
    "against GB/s",
    "CPU s/GB",
    "rounds",
)


def parts(quick: bool) -> tuple[dict[str, Part], dict[str, Part]]:
    """Return the parts that count, and those that are measured without a target."""
    from remote_mooncake import mooncake_figures
    from remote_objects import S3, WEBDAV, object_figures
    from remote_redis import (
        cluster_figures,
        fresh_figures,
        lookup_figures,
        one_writer_figures,
        redis_figures,
    )
    from remote_stopped import stopped_figures

    found: dict[str, Part] = {}
    for size in QUICK_SIZES if quick else SIZES:
        found[f"redis_{size}mib"] = partial(redis_figures, nbytes=size * MIB)
        for engine in (WEBDAV, S3):
            found[f"{engine.name}_{size}mib"] = partial(
                object_figures, engine=engine, nbytes=size * MIB
            )
    found["cluster_8mib"] = partial(cluster_figures, nbytes=8 * MIB)
    found["look_up"] = partial(lookup_figures, count=10_000)
    found["mooncake_8mib"] = partial(mooncake_figures, nbytes=8 * MIB)
    found["stopped"] = partial(stopped_figures, chunk_bytes=MIB)
    beside: dict[str, Part] = {  # without targets; they explain the other figures
        "redis_8mib_fresh": partial(fresh_figures, nbytes=8 * MIB),
        "redis_8mib_one_writer": partial(one_writer_figures, nbytes=8 * MIB),
        "stopped_64kib": partial(
            stopped_figures, chunk_bytes=64 * 1024, suffix="_64kib"
        ),
    }
    return found, {} if quick else beside


def markdown(figures: Sequence[Figure]) -> str:
    """Return the tables for docs/design/benchmarks.md: figures with a speed, and the rest."""
    fast = [each for each in figures if "how" in each.runs]
    rest = [each for each in figures if "how" not in each.runs]
    tables = [_table(_HEADS, [_speeds(each) for each in fast])] if fast else []
    if rest:
        tables.append(
            _table(
                ("figure", "value", "what", "rounds"),
                [_times(each) for each in rest],
            )
        )
    return "\n\n".join(
        [
            *tables,
            ", ".join(f"{name} {value}" for name, value in machine().items()),
        ]
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in (heads, ["---"] * len(heads), *lines)
    )


def _value(figure: Figure) -> str:
    if figure.target is None:
        return f"{figure.value:.2f}"
    verdict = "ok" if figure.ok else "**miss**"
    return f"{figure.value:.2f} {verdict}"


def _speeds(figure: Figure) -> tuple[str, ...]:
    cpu = _mapping(figure.runs["cpu_seconds_per_gb"])
    cells = [figure.key, _value(figure)]
    for side in ("candidate", "limit"):
        spent = _mapping(cpu[side])
        cells.append(
            f"{statistics.median(_numbers(figure.runs[f'{side}_gb_per_second'])):.2f}"
        )
        cells.append(f"{spent['client']:.2f} + {spent['server']:.2f}")
    return (*cells, _rounds(figure.runs["ratio"]))


def _times(figure: Figure) -> tuple[str, ...]:
    return figure.key, _value(figure), figure.note, _rounds(figure.runs["times"])


def _rounds(values: object) -> str:
    return " ".join(f"{each:.2f}" for each in _numbers(values))


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict)
    return value


def _numbers(value: object) -> list[float]:
    assert isinstance(value, list)
    return value


def main() -> int:
    """Read the command line, measure and print. Exit code 2: nothing can be measured on this
    machine.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="print tables for docs/design/benchmarks.md",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="8 MiB only, fewer rounds, less memory",
    )
    parser.add_argument(
        "--only",
        default="",
        help="some of the parts, as in --only redis_8mib,stopped",
    )
    parser.add_argument(
        "--shm-dir",
        type=Path,
        default=Path("/dev/shm"),
        help="directory of the servers' files",
    )
    options = parser.parse_args()
    # testbed.servers starts the servers
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["TMPDIR"] = tempfile.tempdir = str(options.shm_dir)
    counted, beside = parts(options.quick)
    wanted = set(filter(None, options.only.split(",")))
    if wanted - {*counted, *beside}:
        parser.error(f"--only accepts {', '.join([*counted, *beside])}")
    plan = Plan(
        3 if options.quick else 9,
        options.quick,
        1,
        options.shm_dir,
        options.shm_dir,
    )
    figures = measure(plan, counted, wanted)
    others = [
        replace(each, target=None) for each in measure(plan, beside, wanted)
    ]
    if not figures and not others:
        say("none of the requested parts can be measured on this machine")
        return 2
    if options.markdown:
        print(markdown([*figures, *others]))
    else:
        report(figures, options.json, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
