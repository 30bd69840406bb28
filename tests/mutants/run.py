"""Break the code on purpose, one line at a time, and check that the named test fails.

`python tests/mutants/run.py [--engine vllm|sglang] [--part N] [--list] [NAME ...]`: each mutant
of `mutants.toml`, or where this engine is installed of `vllm.toml` or `sglang.toml`, is applied to
a copy of `src` in a temporary directory, never to the work tree. A mutant whose test the CPU of
this machine cannot run is left out, and the output says so. First all named tests must pass
on an unchanged copy. Exit code 1 if a mutant survives, if its line is not found exactly once, or
if a test cannot be collected; 2 if a name is unknown.

A test that waits for other processes sometimes fails, and sometimes passes, by luck. So a mutant
that survived is run three times more, and so are named tests that failed on the unchanged copy;
only three right answers count, and the output says so.

The tests run in processes forked from one that has imported the slow dependencies, but nothing of
`pagoda`. `pagoda` is compiled once: the copies are links to a copy that never changes.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from multiprocessing.connection import wait
from pathlib import Path

import _pytest.config
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# of one mutant, whose test takes a tenth of that when it passes: by engine. Each test imports
# SGLang anew.
LIMIT_SECONDS = {None: 30.0, "vllm": 30.0, "sglang": 300.0}
ALL_SECONDS = 900.0  # of all the tests on the unchanged source
PARTS = 20  # of which CI runs another one with each commit
MORE_RUNS = 3  # after one that was not as it should be
# exit codes of pytest
PASSED = 0
FAILED = 1
ELSEWHERE = 99  # `pagoda` did not come from the copy
# the test did not end in time: broken code may wait for ever, and a busy machine looks the same
HUNG = 98
# the CPU of this machine cannot run what the test needs, see `testbed.llama_servers`
NOT_HERE = 97
CPU_LACKS = "this CPU lacks"
SURVIVED = "SURVIVED"
LEFT_OUT = "left out"
UNSTEADY = "UNSTEADY"
BATCHES_PER_JOB = 4  # of the tests on the unchanged source
# broken code mostly waits, unless it imports SGLang
JUDGES_PER_JOB = {None: 3, "vllm": 3, "sglang": 1}
PRELOAD = [
    "blake3",
    "hypothesis.stateful",
    "lmdb",
    "msgspec",
    "numpy",
    "pytest",
    "pytest_timeout",
    "torch",
    "xxhash",
    *(f"_pytest.{plugin}" for plugin in _pytest.config.default_plugins),
]
PRELOAD_MODELS = (
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
)
PRELOAD_ENGINE = {
    None: PRELOAD_MODELS,
    "vllm": (
        *PRELOAD_MODELS,
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    ),
    # its parts must be made to run without a GPU before they are imported
    "sglang": (),
}
FORKS = multiprocessing.get_context("forkserver")
# Held while processes start and end: a start reaps any ended child, also one that another thread
# waits for.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Mutant:
    """One line to break, and the test (a pytest id) that must fail."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """The result of one mutant; `caught` only if its test failed, or did not end."""

    mutant: Mutant
    caught: bool
    detail: str
    seconds: float


def mutants(table: str) -> list[Mutant]:
    """Return the mutants of a table."""
    return [
        Mutant(**row)
        for row in tomllib.loads((HERE / table).read_text())["mutant"]
    ]


def compiled_source(directory: Path) -> Path:
    """Copy `src`, compile it and return the copy."""
    target = directory / "src"
    shutil.copytree(
        ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__")
    )
    compileall.compile_dir(target, quiet=2)
    return target


def copy_of(source: Path, directory: Path) -> Path:
    """Make a copy of links to the files of `source`, and return it."""
    return Path(shutil.copytree(source, directory / "src", copy_function=os.link))


def apply(mutant: Mutant, source: Path) -> str:
    """Change the one line in the copy; return why it cannot, or an empty text."""
    if mutant.old == mutant.new:
        return "it changes nothing"
    path = source / mutant.file
    text = path.read_text() if path.exists() else ""
    if (count := text.count(mutant.old)) != 1:
        return f"the line was found {count} times, not once"
    # a script of the page has none
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    path.unlink()
    path.write_text(text.replace(mutant.old, mutant.new))
    return ""


def run_tests(source: Path, tests: Sequence[str], limit_seconds: float) -> int:
    """Run pytest with `pagoda` from `source` in a separate process; return its exit code."""
    process = FORKS.Process(target=_be_pytest, args=(source, list(tests)))
    with _one_at_a_time:
        process.start()
    ended = wait([process.sentinel], limit_seconds)
    with _one_at_a_time:
        if not ended:
            process.kill()
        process.join()
    with contextlib.suppress(ProcessLookupError):
        # processes that its test started, and did not end because the code is broken
        os.killpg(process.pid, signal.SIGKILL)
    code = process.exitcode if ended and process.exitcode is not None else HUNG
    if code not in (PASSED, FAILED, HUNG, NOT_HERE):
        sys.stderr.write(
            (source.parent / "output").read_text(errors="replace")[-4000:]
        )
    return code


def _be_pytest(source: Path, tests: Sequence[str]) -> None:
    """Run in the child process, which ends with the exit code."""
    os.setpgid(0, 0)
    gc.freeze()  # keep the modules imported before the fork, which stay shared
    output = os.open(
        source.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    # for processes that tests start
    os.environ.update(PYTHONPATH=str(source), PYTHONDONTWRITEBYTECODE="1")
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))
    # anyio's takes a third of a start
    plugins = [
        "--import-mode=importlib",
        "-pno:cacheprovider",
        "-pno:xdist",
        "-pno:anyio",
    ]
    options = [
        "-o",
        "addopts=",
        "-o",
        f"pythonpath={source} .",
        f"--basetemp={source.parent / 'tmp'}",
    ]
    seen = _Seen()
    arguments = ["-x", "-q", *plugins, *options, *tests]
    code: int = pytest.main(arguments, plugins=[seen])
    if code == PASSED and seen.not_here and not seen.passed:
        code = NOT_HERE
    import pagoda

    sys.exit(code if Path(pagoda.__file__).is_relative_to(source) else ELSEWHERE)


class _Seen:
    """A plugin that counts tests that passed, and tests that the CPU cannot run."""

    def __init__(self) -> None:
        self.passed = 0
        self.not_here = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at the report of a step of a test."""
        self.passed += report.passed and report.when == "call"
        self.not_here += report.skipped and CPU_LACKS in str(report.longrepr)


def judge(mutant: Mutant, compiled: Path, limit_seconds: float) -> Verdict:
    """Run the test of one mutant; if the mutant survives, three times more."""
    verdict = judge_once(mutant, compiled, limit_seconds)
    if verdict.detail != SURVIVED:
        return verdict
    for _ in range(MORE_RUNS):
        again = judge_once(mutant, compiled, limit_seconds)
        if not again.caught:
            return verdict
    return Verdict(mutant, True, UNSTEADY, verdict.seconds)


def judge_once(mutant: Mutant, compiled: Path, limit_seconds: float) -> Verdict:
    """Apply one mutant to a fresh copy and run its test."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        source = copy_of(compiled, Path(directory))
        if problem := apply(mutant, source):
            return Verdict(mutant, False, problem, time.monotonic() - began)
        code = run_tests(source, [mutant.test], limit_seconds)
    details = {
        PASSED: SURVIVED,
        FAILED: "caught",
        HUNG: "hung",
        NOT_HERE: LEFT_OUT,
    }
    detail = details.get(code, f"pytest ended with {code}")
    return Verdict(
        mutant, code in (FAILED, HUNG), detail, time.monotonic() - began
    )


def passes(tests: Sequence[str], compiled: Path) -> bool:
    """Return whether these tests pass on an unchanged copy: at once, or else three times."""
    if passes_once(tests, compiled):
        return True
    for _ in range(MORE_RUNS):
        if not passes_once(tests, compiled):
            return False
    print(f"{UNSTEADY} on the unchanged source, see above", file=sys.stderr)
    return True


def passes_once(tests: Sequence[str], compiled: Path) -> bool:
    """Return whether these tests pass on an unchanged copy; print their output if not."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        source = copy_of(compiled, Path(directory))
        code = run_tests(source, tests, ALL_SECONDS)
        if code in (FAILED, HUNG):
            sys.stderr.write(
                (source.parent / "output").read_text(errors="replace")[-4000:]
            )
    return code in (PASSED, NOT_HERE)


def healthy(
    chosen: Sequence[Mutant], compiled: Path, pool: ThreadPoolExecutor, jobs: int
) -> bool:
    """Return whether all named tests pass on the unchanged source (a test that always fails proves
    nothing).
    """
    tests = sorted({mutant.test for mutant in chosen})
    files = [
        list(group)
        for _, group in itertools.groupby(tests, lambda test: test.split("::")[0])
    ]
    batches = [
        list(itertools.chain(*files[at :: jobs * BATCHES_PER_JOB]))
        for at in range(jobs * BATCHES_PER_JOB)
    ]
    return all(
        pool.map(lambda batch: passes(batch, compiled), filter(None, batches))
    )


def plain(verdict: Verdict) -> str:
    """Print one line on one mutant."""
    return (
        f"{verdict.detail:10s} {verdict.seconds:5.1f} s  {verdict.mutant.name}  "
        f"({verdict.mutant.test})"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the chosen mutants, print a table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument(
        "--engine",
        choices=("vllm", "sglang"),
        help="run the mutants whose tests need this engine",
    )
    parser.add_argument(
        "--part",
        type=int,
        metavar="N",
        help=f"every one whose number is N modulo {PARTS}",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the chosen ones and break nothing",
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    table = mutants(f"{options.engine or 'mutants'}.toml")
    if options.part is not None:
        table = table[options.part % PARTS :: PARTS]
    unknown = set(options.names).difference(one.name for one in table)
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [
        one for one in table if not options.names or one.name in options.names
    ]
    if options.list:
        for one in chosen:
            print(f"{one.name}: {one.breaks}\n    {one.file}  {one.test}")
        return 0
    FORKS.set_forkserver_preload([*PRELOAD, *PRELOAD_ENGINE[options.engine]])
    verdicts = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as directory,
        ThreadPoolExecutor(options.jobs) as pool,
        ThreadPoolExecutor(
            options.jobs * JUDGES_PER_JOB[options.engine]
        ) as judges,
    ):
        compiled = compiled_source(Path(directory))
        if not chosen or not healthy(chosen, compiled, pool, options.jobs):
            print(
                "the named tests do not all pass on the unchanged source: nothing can be concluded",
                file=sys.stderr,
            )
            return 1
        for verdict in judges.map(
            lambda mutant: judge(mutant, compiled, LIMIT_SECONDS[options.engine]),
            chosen,
        ):
            verdicts.append(verdict)
            print(plain(verdict), flush=True)
    left_out = sum(verdict.detail == LEFT_OUT for verdict in verdicts)
    caught = sum(verdict.caught for verdict in verdicts)
    unsteady = sum(verdict.detail == UNSTEADY for verdict in verdicts)
    more = f", {unsteady} of them not in the first run" if unsteady else ""
    if left_out:
        more += f"; {left_out} left out: {CPU_LACKS} what their tests need"
    print(
        f"{caught} of {len(verdicts) - left_out} mutants caught{more}",
        file=sys.stderr,
    )
    return 0 if caught == len(verdicts) - left_out else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
