"""Breaks the code on purpose, one line at a time, and demands that the named test turns red.

`python tests/mutants/run.py [--vllm] [--markdown] [NAME ...]`: each mutant of `mutants.toml`, or with `--vllm` (where
vLLM is installed) of `vllm.toml`, is applied to a copy of `src` in a temporary directory, never to the work tree. First
all named tests must pass on an unchanged copy. Exit code 1 if a mutant survives, if its line is not found exactly once,
or if a test cannot be collected.

The tests run in processes forked from one that has imported what takes long, but nothing of `pagoda`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_SECONDS = 120.0  # of one mutant
ALL_SECONDS = 900.0  # of all the tests on the unchanged source
PASSED, FAILED = 0, 1  # exit codes of pytest
ELSEWHERE = 99  # `pagoda` did not come from the copy
PRELOAD = ["hypothesis", "numpy", "pytest"]
PRELOAD_VLLM = [
    *PRELOAD,
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
]
FORKS = multiprocessing.get_context("forkserver")
# Starts and ends of processes: a start reaps whatever has ended, behind the back of who waits for it.
_one_at_a_time = threading.Lock()


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


def mutants(table: str) -> list[Mutant]:
    """The mutants of a table."""
    return [Mutant(**row) for row in tomllib.loads((HERE / table).read_text())["mutant"]]


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
    """Exit code of pytest with `pagoda` taken from `source`, in a process of its own."""
    process = FORKS.Process(target=_be_pytest, args=(source, list(tests)))
    with _one_at_a_time:
        process.start()
    ended = wait([process.sentinel], limit_seconds)
    with _one_at_a_time:
        if not ended:
            process.kill()
        process.join()
    code = process.exitcode if ended and process.exitcode is not None else FAILED
    if code not in (PASSED, FAILED):
        sys.stderr.write((source.parent / "output").read_text(errors="replace")[-4000:])
    return code


def _be_pytest(source: Path, tests: Sequence[str]) -> None:
    """What the process does: it ends with the exit code."""
    gc.freeze()  # what was imported before the fork stays, and stays shared
    output = os.open(source.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ.update(PYTHONPATH=str(source), PYTHONDONTWRITEBYTECODE="1")  # for processes that tests start
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-o", "addopts=", "-o", f"pythonpath={source} .", f"--basetemp={source.parent / 'tmp'}"]
    code = pytest.main(["-x", "-q", *plugins, *options, *tests])
    import pagoda

    sys.exit(code if Path(pagoda.__file__).is_relative_to(source) else ELSEWHERE)


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
        return run_tests(source, tests, ALL_SECONDS) == PASSED


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
    parser.add_argument("--vllm", action="store_true", help="those whose tests need vLLM")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table for docs/testing.md at the end"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    FORKS.set_forkserver_preload(PRELOAD_VLLM if options.vllm else PRELOAD)
    table = mutants("vllm.toml" if options.vllm else "mutants.toml")
    chosen = [one for one in table if not options.names or one.name in options.names]
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
