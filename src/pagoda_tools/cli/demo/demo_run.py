"""Runs the three processes of the demo one after the other, and compares their answers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pagoda_tools.cli import FailedError, UsageError
from pagoda_tools.cli.demo.demo_child import (
    DemoAnswer,
    DemoOutcome,
    Said,
    Size,
    Task,
)
from pagoda_tools.cli.demo.own_directories import own_directory
from pagoda_tools.cli.record import handling

PROCESSES = ("cold", "host", "disk")


@dataclass(frozen=True)
class Shown:
    """The results of the three processes."""

    outcomes: dict[str, DemoOutcome]

    @property
    def cold(self) -> list[DemoAnswer]:
        """The answers without PagodaKV."""
        return self.outcomes["cold"].answers

    @property
    def identical(self) -> bool:
        """Whether every process gave the same tokens as the cold one."""
        wanted = [answer.tokens for answer in self.cold]
        return all(
            [answer.tokens for answer in each.answers] == wanted
            for each in self.outcomes.values()
        )

    @property
    def distinct_tokens(self) -> int:
        """The fewest different tokens in an answer: an answer that repeats itself would prove
        little.
        """
        return min(len(set(answer.tokens)) for answer in self.cold)

    @property
    def controls_differ(self) -> bool:
        """Whether the text changed with zeroed KV and with another prompt's KV."""
        return all(self.outcomes["cold"].controls.values())

    def ttft(self, process: str) -> float:
        """Seconds to the first token: the mean over the questions that were served by that tier
        (all, if cold).
        """
        answers = self.outcomes[process].answers
        from_there = [
            answer.seconds
            for answer in answers
            if process == "cold" or process in answer.by_tier
        ]
        return statistics.mean(from_there) if from_there else float("nan")

    def as_json(self) -> dict[str, object]:
        """Return all results as plain values."""
        race = self.outcomes["host"]
        return {
            "identical": self.identical,
            "distinct_tokens": self.distinct_tokens,
            "controls_differ": self.controls_differ,
            "ttft_cold_seconds": self.ttft("cold"),
            "ttft_host_seconds": self.ttft("host"),
            "ttft_disk_seconds": self.ttft("disk"),
            "host_vs_handover": race.host_vs_handover,
            "handover_seconds": race.handover_seconds,
            "parameters": race.parameters,
            "prompt_tokens": [answer.prompt_tokens for answer in self.cold],
            "reused_tokens": {
                process: [
                    answer.by_tier for answer in self.outcomes[process].answers
                ]
                for process in PROCESSES
            },
            "controls": self.outcomes["cold"].controls,
        }


def run_demo(
    size: Size,
    model: str | None,
    host_in: Path,
    disk_in: Path,
    step: Callable[[str, str], None],
) -> Shown:
    """Run the processes with new stores under `host_in` and `disk_in`, which are always removed
    afterwards.

    `step(process, what)` is called at each step. Raises UsageError for a model that cannot be
    loaded or cached, FailedError with the last line of a process that failed.
    """
    outcomes = {}
    with (
        interrupted_by_signals(),
        own_directory(host_in, "host") as host,
        own_directory(disk_in, "disk") as disk,
    ):
        for process in PROCESSES:
            if process == "disk":
                step("disk", "wiping the host tier")
                shutil.rmtree(host, ignore_errors=True)
            task = Task(process, str(host), str(disk), size, model)
            outcomes[process] = _run(task, partial(step, process))
    return Shown(outcomes)


def interrupted_by_signals() -> contextlib.AbstractContextManager[None]:
    """Return a context in which SIGINT and SIGTERM raise KeyboardInterrupt, even if the shell had
    SIGINT ignored.
    """
    return handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), _interrupt))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run(task: Task, step: Callable[[str], None]) -> DemoOutcome:
    """Run one process to its end. It never outlives this call."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagoda_tools.cli.demo.demo_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # on a busy machine, spinning threads slow each other down
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )
        try:
            outcome = _followed(process, task, step)
        finally:
            _ended(process)
        if outcome is None:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
            why = said[-1] if said else process.returncode
            raise FailedError(f"the {task.process} process failed: {why}")
        return outcome


def _followed(
    process: subprocess.Popen[str], task: Task, step: Callable[[str], None]
) -> DemoOutcome | None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(task).decode() + "\n")
        process.stdin.flush()  # left open: its end tells the process to end
    for line in process.stdout:
        with contextlib.suppress(msgspec.DecodeError):  # libraries print too
            said = msgspec.json.decode(line, type=Said)
            if said.refused:
                raise UsageError(f"--model {task.model}: {said.refused}")
            if said.outcome is not None:
                return said.outcome
            if said.step:
                step(said.step)
    return None


def _ended(process: subprocess.Popen[str]) -> None:
    """End the process: it ends when it is done or when its stdin ends; otherwise it is killed."""
    try:
        process.communicate(timeout=10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
