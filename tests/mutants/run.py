"""Breaks the code on purpose, one line at a time, and demands that the named test turns red.

`python tests/mutants/run.py [--markdown] [NAME ...]`: each mutant of `mutants.toml` is applied to a copy of `src`
in a temporary directory, never to the work tree. First all named tests must pass on an unchanged copy. Exit code 1 if a
mutant survives, if its line is not found exactly once, or if a test cannot be collected.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_SECONDS = 120.0  # of one mutant
ALL_SECONDS = 900.0  # of all the tests on the unchanged source
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Mutant:
    """One line to break, and the test (a pytest id) that has to notice."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant; `caught` only if its test ran and failed."""

    mutant: Mutant
    caught: bool
    detail: str
    seconds: float


def mutants() -> list[Mutant]:
    """The table of mutants."""
    return [Mutant(**row) for row in tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]]


def copy_of_source(directory: Path) -> Path:
    """Copies `src` and returns the copy."""
    target = directory / "src"
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def apply(mutant: Mutant, source: Path) -> str:
    """Changes the one line in the copy; returns why not, or nothing."""
    if mutant.old == mutant.new:
        return "it changes nothing"
    path = source / "pagoda" / mutant.file
    text = path.read_text() if path.exists() else ""
    if (count := text.count(mutant.old)) != 1:
        return f"the line is there {count} times, not once"
    path.write_text(text.replace(mutant.old, mutant.new))
    return ""


def run_tests(source: Path, tests: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> int:
    """Exit code of pytest with `pagoda` taken from `source`."""
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "addopts=",
        "-o",
        f"pythonpath={source} .",
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED
    if done.returncode not in (PASSED, FAILED):
        sys.stderr.buffer.write(done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode


def is_used(source: Path) -> bool:
    """Whether a test process really imports `pagoda` from the copy."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    found = subprocess.run(
        [sys.executable, "-c", "import pagoda; print(pagoda.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(found.stdout.strip()).is_relative_to(source)


def judge(mutant: Mutant) -> Verdict:
    """Applies one mutant to a fresh copy and runs its test."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        source = copy_of_source(Path(directory))
        if problem := apply(mutant, source):
            return Verdict(mutant, False, problem, time.monotonic() - began)
        code = run_tests(source, [mutant.test])
    detail = {PASSED: "SURVIVED", FAILED: "caught"}.get(code, f"pytest ended with {code}")
    return Verdict(mutant, code == FAILED, detail, time.monotonic() - began)


def healthy(chosen: Sequence[Mutant]) -> bool:
    """Whether all named tests pass on an unchanged copy (a test that is always red catches nothing)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        source = copy_of_source(Path(directory))
        tests = sorted({mutant.test for mutant in chosen})
        return is_used(source) and run_tests(source, tests, ALL_SECONDS) == PASSED


def markdown(verdicts: Iterable[Verdict]) -> str:
    """The table for docs/testing.md."""
    lines = ["| mutant | what it breaks | file | test that turns red | |", "| --- | --- | --- | --- | --- |"]
    for verdict in verdicts:
        one = verdict.mutant
        lines.append(f"| {one.name} | {one.breaks} | `{one.file}` | `{one.test}` | {verdict.detail} |")
    return "\n".join(lines)


def plain(verdict: Verdict) -> str:
    """One line on one mutant."""
    return f"{verdict.detail:10s} {verdict.seconds:5.1f} s  {verdict.mutant.name}  ({verdict.mutant.test})"


def main(arguments: Sequence[str]) -> int:
    """Runs the chosen mutants, prints a table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table for docs/testing.md at the end"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    chosen = [one for one in mutants() if not options.names or one.name in options.names]
    if not chosen or not healthy(chosen):
        print(
            "the named tests do not all pass on the unchanged source: nothing can be concluded",
            file=sys.stderr,
        )
        return 1
    verdicts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            print(plain(verdict), file=sys.stderr if options.markdown else sys.stdout, flush=True)
    if options.markdown:
        print(markdown(verdicts))
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} mutants caught", file=sys.stderr)
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
