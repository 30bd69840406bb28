"""Runs work on one trace in several processes, under a progress bar; Ctrl-C ends all of them at once.

The processes are spawned, not forked: this one has threads (the progress bar). They never see Ctrl-C themselves, or
each of them would print a traceback; this one ends them. A single piece of work is done here, with no other process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

from pagoda.cli import FailedError, show

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from pagoda.replay.trace import Request

R = TypeVar("R")
Tick = Callable[[int], None]  # is told how many more chunks of the trace are done
_TICK_SECONDS = 0.1


class TraceJob(NamedTuple, Generic[R]):
    """`function(requests, *arguments, tick)`: one of a module's own functions, since it may go to another process.

    What it costs beside other work is `weight`, for the progress bar only.
    """

    function: Callable[..., R]
    arguments: tuple[object, ...]
    weight: float = 1.0


class _Done(NamedTuple):
    """What a piece of work came to: its result, or what it raised."""

    result: object
    trouble: Exception | None


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


class TracePool:
    """Processes that have the trace and do work on it, as long as the context lasts. For one thread."""

    def __init__(self, requests: Sequence[Request], jobs: int, quiet: bool) -> None:
        self._requests, self._jobs, self._quiet = requests, jobs, quiet
        self._total = _chunks(requests)
        self._workers: list[_Worker] = []

    def __enter__(self) -> TracePool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()

    def run(self, work: Sequence[TraceJob[R]], title: str) -> list[R]:
        """Do all of it and return the results in the order of `work`. Raises what any of it raises."""
        count = min(self._jobs, len(work))
        if count > 1:
            self._hire(count)
        total = sum(piece.weight for piece in work)
        with show.progress(self._quiet) as bars:
            task = bars.add_task(title, total=total)
            done = [0.0] * len(work)

            def tick(number: int, share: float) -> None:
                done[number] = share * work[number].weight
                bars.update(task, completed=sum(done))

            if count <= 1:
                return [self._here(number, piece, tick) for number, piece in enumerate(work)]
            return self._spread(work, tick)

    def _hire(self, count: int) -> None:
        new = range(len(self._workers), count)
        for _ in new:
            with _uninterrupted():
                self._workers.append(_spawned())
        for number in new:
            self._workers[number].pipe.send(self._requests)

    def _here(self, number: int, piece: TraceJob[R], tick: Callable[[int, float], None]) -> R:
        done = 0

        def count(chunks: int) -> None:
            nonlocal done
            done += chunks
            tick(number, done / self._total)

        result = piece.function(self._requests, *piece.arguments, count)
        tick(number, 1.0)
        return result

    def _spread(self, work: Sequence[TraceJob[R]], tick: Callable[[int, float], None]) -> list[R]:
        from multiprocessing.connection import wait

        found: dict[int, R] = {}
        waiting = list(range(len(work)))
        busy: dict[object, tuple[_Worker, int]] = {}
        idle = list(self._workers)
        while len(found) < len(work):
            while waiting and idle:
                number, worker = waiting.pop(0), idle.pop()
                worker.pipe.send(work[number])
                busy[worker.pipe] = worker, number
            for pipe in wait([worker.pipe for worker, _ in busy.values()]):
                worker, number = busy[pipe]
                answer = worker.answer()
                if isinstance(answer, float):
                    tick(number, answer)
                    continue
                if answer.trouble is not None:
                    raise answer.trouble
                found[number] = cast("R", answer.result)
                del busy[pipe]
                idle.append(worker)
                tick(number, 1.0)
        return [found[number] for number in range(len(work))]


class _Worker(NamedTuple):
    """Another process and the pipe to it."""

    process: SpawnProcess
    pipe: Connection

    def answer(self) -> float | _Done:
        """Return what it says next: the share done, or what its work came to."""
        try:
            return cast("float | _Done", self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            raise FailedError(
                f"a process that simulates has died ({code}); is memory short? try --jobs 1"
            ) from None


def _spawned() -> _Worker:
    from multiprocessing import get_context

    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


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

    from multiprocessing.resource_tracker import ensure_running

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


def _work(pipe: Connection) -> None:
    """Do what the pipe asks for until its other end is closed."""
    try:
        requests: Sequence[Request] = pipe.recv()
        total = _chunks(requests)
        while True:
            piece: TraceJob[object] = pipe.recv()
            pipe.send(_outcome(piece, requests, total, pipe))
    except (EOFError, OSError):
        return


def _outcome(piece: TraceJob[object], requests: Sequence[Request], total: int, pipe: Connection) -> _Done:
    said, done = time.monotonic(), 0

    def tick(chunks: int) -> None:
        nonlocal said, done
        done += chunks
        if time.monotonic() - said > _TICK_SECONDS:
            said = time.monotonic()
            pipe.send(done / total)

    try:
        return _Done(piece.function(requests, *piece.arguments, tick), None)
    except MemoryError:
        return _Done(None, FailedError("memory is short for so many simulations at once; try --jobs 1"))
    except ValueError as trouble:
        return _Done(None, trouble)


def _chunks(requests: Sequence[Request]) -> int:
    return sum(len(request.hash_ids) for request in requests) or 1
