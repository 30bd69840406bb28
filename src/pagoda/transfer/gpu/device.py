"""What the copy engine asks of a device: streams, events, memory, asynchronous copies. CUDA's, and CPU memory's."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagoda.slab import pinned
from pagoda.slab.cuda_driver import Driver
from pagoda.transfer.base import Ids

if TYPE_CHECKING:
    import torch

    from pagoda.transfer.gpu.kernels import Kernels

__all__ = ["CpuPort", "CudaPort", "Lane", "Mark", "Port"]

log = logging.getLogger("pagoda.transfer")


class Mark(Protocol):
    """A point in the work of a device (an event)."""

    def wait(self) -> None:
        """Block this thread until all that was launched before it is done."""
        ...


class Lane(Protocol):
    """A queue of work that a device does in its order (a stream). For one thread at a time."""

    handle: int

    def run(self, work: Callable[[], None]) -> None:
        """Launch what `work` launches, on this lane."""
        ...

    def after(self, mark: Mark | None) -> None:
        """Let all that is launched from now on wait for the mark; does not block."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind all that was launched so far."""
        ...


class Port(Protocol):
    """One device. Thread-safe."""

    device: torch.device
    kernels: Kernels | None  # None: runs are copied one by one

    def here(self) -> Mark | None:
        """Return a mark behind all that this thread's current stream was given; None where nothing is queued."""
        ...

    def wait_here(self, mark: Mark | None) -> None:
        """Let what this thread's current stream is given from now on wait for the mark; does not block."""
        ...

    def current(self) -> Lane:
        """Return this thread's current stream."""
        ...

    def lanes(self, number: int) -> list[Lane]:
        """Return new lanes."""
        ...

    def send(self, numbers: Ids) -> torch.Tensor:
        """Return the numbers on the device, in the order of the lane on which this is run; does not block."""
        ...

    def copy(self, to: int, source: int, nbytes: int, lane: Lane) -> None:
        """Copy bytes between addresses of either side, asynchronously; to be called in `lane.run`."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory on the device. Raises torch's error where there is none left."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor | None:
        """Return uint8 host memory that the device can reach; None where the machine refuses it."""
        ...

    def place_of(self, address: int, nbytes: int) -> int | None:
        """Return where the device sees a piece of host memory; None if it is not registered."""
        ...

    def crossing(self) -> AbstractContextManager[None]:
        """Around a whole call, on its thread: places stay what they are, and nobody else's work is disturbed."""
        ...


class CudaPort:
    """An NVIDIA GPU, by torch's streams and the driver's copies. Thread-safe; not for a forked child."""

    def __init__(self, device: torch.device, programs: int = 16) -> None:
        """Raises ValueError if there is no such device or no driver. `programs`: SMs that kernels may use at once."""
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"{device}: torch {torch.__version__} sees no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        if not 0 <= index < torch.cuda.device_count():
            raise ValueError(f"{device} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
        self.device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        driver = Driver.load()
        if driver is None:
            raise ValueError(f"{device}: the NVIDIA driver (libcuda.so.1) cannot be used from here")
        self._driver = driver
        with self.crossing():  # modules are loaded: that, too, would spoil a capture
            self.kernels = _kernels(self.device, programs)

    def here(self) -> Mark:
        return _event(self._current())

    def wait_here(self, mark: Mark | None) -> None:
        if isinstance(mark, _CudaMark):
            self._current().wait_event(mark.event)

    def current(self) -> Lane:
        return _CudaLane(self._current(), self._driver)

    def lanes(self, number: int) -> list[Lane]:
        import torch

        with torch.cuda.device(self.device):
            self._driver.use(self.device.index)
            handles = [self._driver.stream() for _ in range(number)]
        streams = [torch.cuda.ExternalStream(handle, self.device) for handle in handles]  # type: ignore[no-untyped-call]
        return [_CudaLane(stream, self._driver) for stream in streams]

    def send(self, numbers: Ids) -> torch.Tensor:
        import torch

        sent = torch.from_numpy(np.ascontiguousarray(numbers))  # else its strides would go there, too
        with suppress(RuntimeError):  # where the machine refuses pinned memory this waits
            sent = sent.pin_memory()
        return sent.to(self.device, non_blocking=True)

    def copy(self, to: int, source: int, nbytes: int, lane: Lane) -> None:
        self._driver.copy(to, source, nbytes, lane.handle)

    def memory(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_memory(self, nbytes: int) -> torch.Tensor | None:
        import torch

        try:
            # "cpu" is said: `torch.set_default_device` may have named another
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as trouble:
            log.warning("no pinned memory for a bounce buffer, copies will be slow: %s", trouble)
            return None

    def place_of(self, address: int, nbytes: int) -> int | None:
        return pinned.place_of(address, nbytes)

    @contextmanager
    def crossing(self) -> Iterator[None]:
        import torch

        with pinned.copying(), torch.cuda.device(self.device):
            self._driver.use(self.device.index)  # a thread without a context would be given one on device 0
            with self._driver.beside_captures():
                yield

    def _current(self) -> torch.cuda.Stream:
        import torch

        return torch.cuda.current_stream(self.device)


class _CudaMark:
    """An event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class _CudaLane:
    """A stream. What it is given is launched with the device's context current on the launching thread."""

    def __init__(self, stream: torch.cuda.Stream, driver: Driver) -> None:
        self._stream, self._driver = stream, driver
        self.handle: int = stream.cuda_stream

    def run(self, work: Callable[[], None]) -> None:
        import torch

        device = self._stream.device
        # the runtime's device is that of the driver's context: outermost, who has the thread gets its own back
        with torch.cuda.device(device), torch.inference_mode(), torch.cuda.stream(self._stream):
            self._driver.use(device.index)
            work()

    def after(self, mark: Mark | None) -> None:
        if isinstance(mark, _CudaMark):
            self._stream.wait_event(mark.event)

    def mark(self) -> Mark:
        return _event(self._stream)


def _event(stream: torch.cuda.Stream) -> _CudaMark:
    import torch

    # blocking: whoever waits sleeps; an engine needs its cores
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return _CudaMark(event)


@lru_cache(maxsize=64)
def _kernels(device: torch.device, programs: int) -> Kernels | None:
    """Return the kernels of a device, compiled; None, with a line in the log, where they cannot be had."""
    try:
        from pagoda.transfer.gpu.kernels import Kernels

        kernels = Kernels(device, programs)
        kernels.warm()
    except Exception as trouble:  # noqa: BLE001  # a border: Triton needs a C compiler, a driver that it knows, ...
        log.warning(
            "without Triton KV is copied run by run, more slowly: %s: %s", type(trouble).__name__, trouble
        )
        return None
    return kernels


class CpuPort:
    """CPU memory as if it were a device's: everything is done at once, run by run. Thread-safe."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        import torch

        self.device = torch.device("cpu")
        self.kernels = kernels

    def here(self) -> Mark | None:
        return None

    def wait_here(self, mark: Mark | None) -> None:
        return None

    def current(self) -> Lane:
        return _Now()

    def lanes(self, number: int) -> list[Lane]:
        return [_Now() for _ in range(number)]

    def send(self, numbers: Ids) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(numbers))

    def copy(self, to: int, source: int, nbytes: int, lane: Lane) -> None:
        ctypes.memmove(to, source, nbytes)

    def memory(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_memory(self, nbytes: int) -> torch.Tensor | None:
        return self.memory(nbytes)

    def place_of(self, address: int, nbytes: int) -> int | None:
        return address

    def crossing(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Now:
    """A lane, and a mark, of a device that has done everything as soon as it is asked."""

    handle = 0

    def run(self, work: Callable[[], None]) -> None:
        work()

    def after(self, mark: Mark | None) -> None:
        return None

    def mark(self) -> Mark:
        return self

    def wait(self) -> None:
        return None
