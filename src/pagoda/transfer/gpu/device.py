"""A device as the copy engine uses it: streams, events, memory, asynchronous copies. For CUDA, and
for CPU memory.

Called by `copy_engine`, `staging_ring` and `autotune`; calls torch, the CUDA driver and `kernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagoda.base.log import guarded_logger
from pagoda.slab import pinned
from pagoda.slab.cuda_driver import Driver
from pagoda.transfer.base import Ids

if TYPE_CHECKING:
    import torch

    from pagoda.transfer.gpu.kernels import Kernels

log = guarded_logger("pagoda.transfer")


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Block this thread until all work launched before the event is done."""


class DeviceStream(Protocol):
    """A queue of work that a device does in order. For one thread at a time."""

    handle: int

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`; what it launches is launched on this stream."""

    def wait_event(self, event: DeviceEvent | None) -> None:
        """Let all work launched from now on wait for the event; does not block."""

    def record_event(self) -> DeviceEvent:
        """Return an event after all work launched so far."""


class Device(Protocol):
    """One device. Thread-safe."""

    torch_device: torch.device
    kernels: Kernels | None  # None: runs are copied one by one

    def current_event(self) -> DeviceEvent | None:
        """Return an event after all work of this thread's current stream; None if nothing is ever
        queued.
        """

    def current_stream_wait(self, event: DeviceEvent | None) -> None:
        """Let later work of this thread's current stream wait for the event; does not block."""

    def current_stream(self) -> DeviceStream:
        """Return this thread's current stream."""

    def new_streams(self, number: int) -> list[DeviceStream]:
        """Return that many new streams."""

    def upload(self, numbers: Ids) -> torch.Tensor:
        """Copy numbers to the device, in the order of the stream on which this is run; does not
        block.
        """

    def copy(
        self, to: int, source: int, nbytes: int, stream: DeviceStream
    ) -> None:
        """Copy bytes between addresses of either side, asynchronously; to be called in
        `stream.run`.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory on the device. Raises torch's error if none is left."""

    def allocate_host(self, nbytes: int) -> torch.Tensor | None:
        """Return pinned uint8 host memory, which the device can reach; None if the machine refuses
        it.
        """

    def device_address(self, address: int, nbytes: int) -> int | None:
        """Return the device's address of a range of host memory; None if the range is not
        registered.
        """

    def copy_scope(self) -> AbstractContextManager[None]:
        """Wrap a whole call, on its thread: device addresses stay valid, and other threads are not
        disturbed.
        """


class CudaDevice:
    """An NVIDIA GPU, by torch's streams and the driver's copies. Thread-safe; not for a forked
    child.
    """

    def __init__(self, device: torch.device, programs: int = 16) -> None:
        """Open a CUDA device; `programs`: SMs that kernels may use at once. ValueError without
        device or driver.
        """
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                f"{device}: torch {torch.__version__} sees no CUDA device"
            )
        index = (
            torch.cuda.current_device() if device.index is None else device.index
        )
        if not 0 <= index < torch.cuda.device_count():
            raise ValueError(
                f"{device} does not exist: torch sees {torch.cuda.device_count()} CUDA devices"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        driver = Driver.load()
        if driver is None:
            raise ValueError(
                f"{device}: the NVIDIA driver (libcuda.so.1) cannot be used in this process"
            )
        self._driver = driver
        # loading modules would also break a graph capture
        with self.copy_scope():
            self.kernels = _kernels(self.torch_device, programs)

    def current_event(self) -> DeviceEvent:
        return _event(self._torch_stream())

    def current_stream_wait(self, event: DeviceEvent | None) -> None:
        if isinstance(event, _CudaEvent):
            self._torch_stream().wait_event(event.event)

    def current_stream(self) -> DeviceStream:
        return _CudaStream(self._torch_stream(), self._driver)

    def new_streams(self, number: int) -> list[DeviceStream]:
        import torch

        with torch.cuda.device(self.torch_device):
            self._driver.use(self.torch_device.index)
            handles = [self._driver.stream() for _ in range(number)]
        streams = [
            torch.cuda.ExternalStream(handle, self.torch_device)  # type: ignore[no-untyped-call]
            for handle in handles
        ]
        return [_CudaStream(stream, self._driver) for stream in streams]

    def upload(self, numbers: Ids) -> torch.Tensor:
        import torch

        # a contiguous copy, or the strides would be kept
        sent = torch.from_numpy(np.ascontiguousarray(numbers))
        with suppress(RuntimeError):  # without pinned memory the copy blocks
            sent = sent.pin_memory()
        return sent.to(self.torch_device, non_blocking=True)

    def copy(
        self, to: int, source: int, nbytes: int, stream: DeviceStream
    ) -> None:
        self._driver.copy(to, source, nbytes, stream.handle)

    def allocate(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, nbytes: int) -> torch.Tensor | None:
        import torch

        try:
            # "cpu" is explicit: `torch.set_default_device` may have named another
            return torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        except RuntimeError as trouble:
            log.warning(
                "no pinned memory for a bounce buffer, copies will be slow: %s",
                trouble,
            )
            return None

    def device_address(self, address: int, nbytes: int) -> int | None:
        return pinned.device_address(address, nbytes)

    @contextmanager
    def copy_scope(self) -> Iterator[None]:
        import torch

        with pinned.copying(), torch.cuda.device(self.torch_device):
            # otherwise a thread without a context would get device 0's
            self._driver.use(self.torch_device.index)
            with self._driver.relaxed_capture():
                yield

    def _torch_stream(self) -> torch.cuda.Stream:
        import torch

        return torch.cuda.current_stream(self.torch_device)


class _CudaEvent:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream:
    """A CUDA stream. Work is launched with the device's context current on the launching thread."""

    def __init__(self, stream: torch.cuda.Stream, driver: Driver) -> None:
        self._stream = stream
        self._driver = driver
        self.handle: int = stream.cuda_stream

    def run(self, work: Callable[[], None]) -> None:
        import torch

        device = self._stream.device
        # the runtime's device must be that of the driver's context; outermost, so that the thread's
        # device is restored
        with (
            torch.cuda.device(device),
            torch.inference_mode(),
            torch.cuda.stream(self._stream),
        ):
            self._driver.use(device.index)
            work()

    def wait_event(self, event: DeviceEvent | None) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)

    def record_event(self) -> DeviceEvent:
        return _event(self._stream)


def _event(stream: torch.cuda.Stream) -> _CudaEvent:
    import torch

    # blocking: a waiting thread sleeps, because an engine needs its cores
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return _CudaEvent(event)


@lru_cache(maxsize=64)
def _kernels(device: torch.device, programs: int) -> Kernels | None:
    """Return the compiled kernels of a device; None, with a warning in the log, if they cannot be
    compiled.
    """
    try:
        from pagoda.transfer.gpu.kernels import Kernels

        kernels = Kernels(device, programs)
        kernels.warm()
    except Exception as trouble:  # noqa: BLE001
        # a boundary: Triton needs a C compiler, a driver that it knows, ...
        log.warning(
            "Triton cannot be used, KV is copied run by run, more slowly: %s: %s",
            type(trouble).__name__,
            trouble,
        )
        return None
    return kernels


class CpuDevice:
    """CPU memory as a device: every call is done at once, run by run. Thread-safe."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        import torch

        self.torch_device = torch.device("cpu")
        self.kernels = kernels

    def current_event(self) -> DeviceEvent | None:
        return None

    def current_stream_wait(self, event: DeviceEvent | None) -> None:
        return None

    def current_stream(self) -> DeviceStream:
        return _CpuStream()

    def new_streams(self, number: int) -> list[DeviceStream]:
        return [_CpuStream() for _ in range(number)]

    def upload(self, numbers: Ids) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(numbers))

    def copy(
        self, to: int, source: int, nbytes: int, stream: DeviceStream
    ) -> None:
        ctypes.memmove(to, source, nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, nbytes: int) -> torch.Tensor | None:
        return self.allocate(nbytes)

    def device_address(self, address: int, nbytes: int) -> int | None:
        return address

    def copy_scope(self) -> AbstractContextManager[None]:
        return nullcontext()


class _CpuStream:
    """A stream, and an event, of a device that does all work at once."""

    handle = 0

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: DeviceEvent | None) -> None:
        return None

    def record_event(self) -> DeviceEvent:
        return self

    def synchronize(self) -> None:
        return None
