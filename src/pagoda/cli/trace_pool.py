"""Runs work on one trace in several processes, under a progress bar; Ctrl-C ends all of them at once.

The processes are spawned, not forked: this one has threads (the progress bar). They never see Ctrl-C themselves, or
each of them would print a traceback; this one ends them. A single piece of work is done here, with no other process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pagoda.cli import FailedError, printing
from pagoda.threads import wait

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.sharedctypes import Synchronized

    from pagoda.replay.trace import Request

R = TypeVar("R")
_TICK_SECONDS = 0.1
_FEW_CHUNKS = 10_000  # are replayed sooner than processes start


class TraceJob(NamedTuple, Generic[R]):
    """`function(requests, *arguments, tick)`: one of a module's own functions, since it may go to another process.

    `tick` is told how many more chunks of the trace are done. The result has a few hundred bytes: all processes answer
    through one pipe, and one that is killed while it writes a long answer would leave the reader waiting for the rest.
    What the work costs beside other work is `weight`, for the progress bar only.
    """

    function: Callable[..., R]
    arguments: tuple[object, ...]
    weight: float = 1.0


def _cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def useful_jobs(requests: Sequence[Request]) -> int:
    """Return how many processes are worth their start: one for a small trace."""
    return _cores() if _chunks(requests) > _FEW_CHUNKS else 1


class TracePool:
    """Processes that have the trace and do work on it, as long as the context lasts. For one thread."""

    # both as long as there is an executor
    _trace: str
    _chunks_done: Synchronized[float]  # by all processes, times their work's weight

    def __init__(self, requests: Sequence[Request], jobs: int, quiet: bool) -> None:
        self._requests, self._jobs, self._quiet = requests, jobs, quiet
        self._executor: ProcessPoolExecutor | None = None
        self._ends = ExitStack()

    def __enter__(self) -> TracePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def run(self, work: Sequence[TraceJob[R]], title: str) -> list[R]:
        """Do all of it and return the results in the order of `work`. Raises what any of it raises."""
        with printing.progress(self._quiet) as bars:
            task = bars.add_task(title, total=sum(job.weight for job in work) * _chunks(self._requests))
            if min(self._jobs, len(work)) <= 1:
                return [_done(job, self._requests, partial(bars.advance, task)) for job in work]
            try:
                return self._spread(work, lambda chunks: bars.update(task, completed=chunks))
            except BrokenProcessPool:
                died = "a process that simulates has died; is memory short? try --jobs 1"
                raise FailedError(died) from None
            except MemoryError:
                short = "memory is short for so many simulations at once; try --jobs 1"
                raise FailedError(short) from None

    def _spread(self, work: Sequence[TraceJob[R]], show_done: Callable[[float], None]) -> list[R]:
        if self._executor is None:
            self._write_trace()  # takes a while: Ctrl-C ends it
        with _uninterrupted():
            executor = self._executor = self._executor or self._started()
            self._chunks_done.value = 0.0
            futures = [executor.submit(_in_worker, job) for job in work]
        while not all(future.done() for future in futures):
            wait(futures, _TICK_SECONDS)
            for future in futures:
                if future.done():
                    future.result()  # an error of one ends them all
            # without its lock, which a process that was killed may have kept
            show_done(self._chunks_done.get_obj().value)
        return [future.result() for future in futures]

    def _write_trace(self) -> None:
        """Write the trace into a file without a name, which each process reads for itself."""
        trace = self._ends.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        pickle.dump(self._requests, trace)
        trace.flush()
        self._trace = f"/proc/{os.getpid()}/fd/{trace.fileno()}"

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        self._chunks_done = context.Value("d")
        executor = ProcessPoolExecutor(self._jobs, context, _start_worker, (self._trace, self._chunks_done))
        self._ends.callback(executor.shutdown)
        # before: work that has begun is not waited for
        self._ends.callback(_kill_children_but, set(multiprocessing.active_children()))
        return executor


def _kill_children_but(others: Set[BaseProcess]) -> None:
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until afterwards; what is started meanwhile never gets it.

    The mask is for those who are started: they inherit it. Here it would not do, since threads of others (of BLAS) do
    not have it, and any thread may be the one to take the signal.
    """
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True

    handler = signal.signal(signal.SIGINT, note)
    ensure_running()  # begins with the first process otherwise, and takes the mask off
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


class _Worker(NamedTuple):
    """What one of the processes has: the trace, and the chunks that all of them have done."""

    requests: Sequence[Request]
    chunks_done: Synchronized[float]


_worker: _Worker  # in a process of the pool


def _start_worker(trace: str, chunks_done: Synchronized[float]) -> None:
    global _worker
    _worker = _Worker(pickle.loads(Path(trace).read_bytes()), chunks_done)


def _in_worker(job: TraceJob[R]) -> R:
    def add(chunks: float) -> None:
        with _worker.chunks_done.get_lock():
            _worker.chunks_done.value += chunks

    return _done(job, _worker.requests, add)


def _done(job: TraceJob[R], requests: Sequence[Request], add: Callable[[float], None]) -> R:
    """Do one piece of work; now and then, and at the end, add what is done, times its weight."""
    said, left, fresh = time.monotonic(), _chunks(requests), 0

    def tick(chunks: int) -> None:
        nonlocal said, left, fresh
        fresh += chunks
        if time.monotonic() - said > _TICK_SECONDS:
            add(fresh * job.weight)
            said, left, fresh = time.monotonic(), left - fresh, 0

    result = job.function(requests, *job.arguments, tick)
    add(left * job.weight)
    return result


def _chunks(requests: Sequence[Request]) -> int:
    return sum(len(request.hash_ids) for request in requests) or 1
