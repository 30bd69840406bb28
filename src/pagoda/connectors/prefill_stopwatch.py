"""Measures how fast a model computes prompts, during normal calls, without a wait. Loading must be faster.

The connectors use it, and report the times to `Cache.observe_prefill`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MOST_WAITING = 16  # measurements not yet read; if there are more, the oldest is dropped


class Stopwatch:
    """Measures time of the CPU, from the creation of the object."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        """End the measurement."""
        self._ended = time.perf_counter()

    def seconds(self) -> float | None:
        """Return the measured time; None if the device has not reached the end yet. Does not wait."""
        return self._ended - self._began


class _EventWatch(Stopwatch):
    """Measures time of a CUDA device between two points of this thread's stream: calls return before work is done."""

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
    """Return the stopwatch class for a model with layers on these devices; None for several, and for other kinds."""
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return Stopwatch
    if kinds == {"cuda"} and len(set(devices)) == 1:
        device = devices[0]
        return lambda: _EventWatch(device)
    return None


class PrefillTimes:
    """Measures first forward passes; calls `observe(tokens, seconds)` for each when its time is known. Thread-safe."""

    def __init__(self, observe: Callable[[int, float], object]) -> None:
        self._observe = observe
        self._waiting: deque[tuple[int, Stopwatch]] = deque(maxlen=_MOST_WAITING)

    @contextmanager
    def measured(self, model: Any, watch: Callable[[], Stopwatch] | None) -> Iterator[None]:
        """Measure the model's first forward pass of this block.

        The model has hooks only during the block; passes of other threads are not counted.
        """
        if watch is None:
            yield
            return
        thread, running, done = threading.get_ident(), list[Stopwatch](), False

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

    def add(self, tokens: int, watch: Stopwatch) -> None:
        """Stop a watch: in its time so many tokens are computed, perhaps by a device that is still running."""
        watch.stop()
        self._waiting.append((tokens, watch))

    def read(self) -> None:
        """Report the times that are known by now; the others stay for the next call. Does not wait for a device."""
        for _ in range(len(self._waiting)):
            try:
                tokens, watch = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            seconds = watch.seconds()
            if seconds is None:
                self._waiting.append((tokens, watch))
            else:
                self._observe(tokens, seconds)
