"""Runs jobs on one trace in several processes, with a progress bar; Ctrl-C ends all of them at
once.

The processes are spawned, not forked, because this process has threads (the progress bar). They do
not get Ctrl-C, for which each would print a traceback; this process ends them. A single job runs in
this process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pagoda.base.signal_safe_threads import wait
from pagoda.cache.request_trace import Request, with_shared_ids
from pagoda_tools.cli import FailedError, printing

R = TypeVar("R")
_LOOK_SECONDS = 0.1  # the pause between two checks of what has ended
_FEW_CHUNKS = 10_000  # to replay so many takes less time than to start processes
# the same for the jobs of one call, as often as their weights say
_CHEAP_CHUNKS = 20_000


class TraceJob(NamedTuple, Generic[R]):
    """`function(requests, *arguments)`: a function of a module, because it may be sent to another
    process.

    The result must be short, a few hundred bytes: all processes answer through one pipe, and if one
    is killed while it writes a long answer, the reader waits for the rest. `weight`: the cost
    of the job, relative to a replay with hindsight.
    """

    function: Callable[..., R]
    arguments: tuple[object, ...]
    weight: float = 1.0


class TracePool(ExitStack):
    """Processes that have the trace and run jobs on it, inside the context. For one thread."""

    def __init__(
        self, requests: Sequence[Request], jobs: int | None, quiet: bool
    ) -> None:
        """`jobs` None: one process per processor that this process may use, or one for a small
        trace.
        """
        super().__init__()
        accesses = sum(len(request.hash_ids) for request in requests)
        few = accesses <= _FEW_CHUNKS
        # work of this weight is done here
        self._cheap = 0.0 if jobs else _CHEAP_CHUNKS / max(1, accesses)
        self.jobs = jobs or (1 if few else len(os.sched_getaffinity(0)))
        self._requests = requests
        self._quiet = quiet
        self._executor: ProcessPoolExecutor | None = None

    def run(self, work: Sequence[TraceJob[R]], title: str) -> list[R]:
        """Run all jobs, with a progress bar of their own, and return the results in the order of
        `work`. Raises the error of any of them.
        """
        with printing.progress(self._quiet) as bars:
            task = bars.add_task(title, total=1.0)
            return self.run_shown(
                work, lambda share: bars.update(task, completed=share)
            )

    def run_shown(
        self, work: Sequence[TraceJob[R]], show_done: Callable[[float], None]
    ) -> list[R]:
        """Do the same for a caller that shows the progress itself: `show_done` is given the share
        of the work that is done, from 0 to 1, again and again.
        """
        total = sum(job.weight for job in work)
        if min(self.jobs, len(work)) <= 1 or total <= self._cheap:
            found = []
            done = 0.0
            for job in work:
                found.append(job.function(self._requests, *job.arguments))
                done = done + job.weight
                show_done(done / total)
            return found
        try:
            return self._spread(work, lambda weight: show_done(weight / total))
        except BrokenProcessPool:
            died = "a simulating process has died, perhaps for lack of memory; try --jobs 1"
            raise FailedError(died) from None
        except MemoryError:
            short = (
                "too little memory for so many simulations at once; try --jobs 1"
            )
            raise FailedError(short) from None

    def _spread(
        self, work: Sequence[TraceJob[R]], show_done: Callable[[float], None]
    ) -> list[R]:
        # takes a while, and Ctrl-C ends it
        trace = "" if self._executor else self._written_trace()
        with _uninterrupted():
            executor = self._executor = self._executor or self._started(trace)
            weights = {
                executor.submit(_in_worker, job): job.weight for job in work
            }
        ended: list[Future[R]] = []
        while len(ended) < len(weights):
            wait(weights, _LOOK_SECONDS)
            ended = [future for future in weights if future.done()]
            for future in ended:
                future.result()  # the error of one job ends all of them
            show_done(sum(weights[future] for future in ended))
        return [future.result() for future in weights]

    def _written_trace(self) -> str:
        """Write the trace into a file without a name, which each process reads; return its path."""
        trace = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        pickle.dump(self._requests, trace)
        trace.flush()
        return f"/proc/{os.getpid()}/fd/{trace.fileno()}"

    def _started(self, trace: str) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(
            self.jobs, context, _start_worker, (trace,)
        )
        self.callback(executor.shutdown)
        # runs before the shutdown, so that running jobs are not waited for
        self.callback(_kill_children_but, set(multiprocessing.active_children()))
        return executor


def _kill_children_but(others: Set[BaseProcess]) -> None:
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context; processes that are started inside it never get
    Ctrl-C.

    Started processes inherit the mask. In this process the mask is not enough: threads of libraries
    (BLAS) do not have it, and any thread may receive the signal.
    """
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True

    handler = signal.signal(signal.SIGINT, note)
    # otherwise this starts with the first process, and resets the mask
    ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


_requests: Sequence[Request]  # of a process of the pool


def _start_worker(trace: str) -> None:
    global _requests
    _requests = list(with_shared_ids(pickle.loads(Path(trace).read_bytes())))


def _in_worker(job: TraceJob[R]) -> R:
    return job.function(_requests, *job.arguments)
