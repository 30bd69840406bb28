"""Measures how fast a model computes prompts, during normal calls, without a wait. Loading must be
faster.

The connectors use it, and report the times to `Cache.observe_prefill`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pagoda.base.log import guarded_logger

# measurements not yet read; if there are more, the oldest is dropped
_MOST_WAITING = 16
# The watch may run for less time than the whole step, in which an engine also prepares its work. If
# the step took so many times longer, the watch did not measure the forward pass.
_MOST_SHORTER = 3.0

log = guarded_logger("pagoda.connectors")


class Stopwatch:
    """Measures time of the CPU, from the creation of the object."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        """End the measurement."""
        self._ended = time.perf_counter()

    def seconds(self) -> float | None:
        """Return the measured time; None if the device has not reached the end yet. Does not
        wait.
        """
        return self._ended - self._began


class _EventWatch(Stopwatch):
    """Measures time of a CUDA device between two points of this thread's stream: calls return
    before work is done.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        import torch

        self._end.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float | None:
        if not self._end.query():
            return None
        return float(self._begin.elapsed_time(self._end)) / 1e3


def watch_for(devices: Sequence[Any]) -> Callable[[], Stopwatch] | None:
    """Return the stopwatch class for a model with layers on these devices; None for several, and
    for other kinds.
    """
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return Stopwatch
    if kinds == {"cuda"} and len(set(devices)) == 1:
        device = devices[0]
        return lambda: _EventWatch(device)
    return None


class _Waiting(NamedTuple):
    """A measurement whose time is not known yet. `step_seconds`: see `PrefillTimes.add`."""

    tokens: int
    watch: Stopwatch
    step_seconds: float


class PrefillTimes:
    """Measures first forward passes; calls `observe(tokens, seconds)` for each when its time is
    known. Thread-safe.
    """

    def __init__(self, observe: Callable[[int, float], object]) -> None:
        self._observe = observe
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAITING)
        self._doubted = False  # whether a measurement was refused

    @contextmanager
    def measured(
        self, model: Any, watch: Callable[[], Stopwatch] | None
    ) -> Iterator[None]:
        """Measure the model's first forward pass of this block.

        The model has hooks only during the block; passes of other threads are not counted.
        """
        if watch is None:
            yield
            return
        thread = threading.get_ident()
        running = list[Stopwatch]()
        done = False

        def before(_: Any, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread and not running:
                running.append(watch())

        def after(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            nonlocal done
            ids = kwargs.get("input_ids")
            if done or threading.get_ident() != thread or ids is None:
                return
            done = True
            self.add(ids.numel(), running[0])

        hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.read()

    def add(
        self, tokens: int, watch: Stopwatch, step_seconds: float = 0.0
    ) -> None:
        """Stop a watch: in its time so many tokens are computed, perhaps by a device that is still
        running.

        `step_seconds`: how long the engine was busy with them by a clock that does not depend on
        where the watch began, if that is known. A watch that ran for much less has missed the
        computing, and is not reported: a speed that no engine has would make it compute what it
        could load.
        """
        watch.stop()
        self._waiting.append(_Waiting(tokens, watch, step_seconds))

    def read(self) -> None:
        """Report the times that are known by now; the others stay for the next call. Does not wait
        for a device.
        """
        for _ in range(len(self._waiting)):
            try:
                waiting = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            seconds = waiting.watch.seconds()
            if seconds is None:
                self._waiting.append(waiting)
            elif seconds * _MOST_SHORTER < waiting.step_seconds:
                self._doubt(waiting, seconds)
            else:
                self._observe(waiting.tokens, seconds)

    def _doubt(self, waiting: _Waiting, seconds: float) -> None:
        if not self._doubted:
            self._doubted = True
            log.warning(
                "the speed of computing prompts is not believed (this is said once): %d tokens "
                "in %.6f s, but their "
                "step took %.6f s; until it is known, every hit is taken",
                waiting.tokens,
                seconds,
                waiting.step_seconds,
            )
