"""The limits of a CUDA device and its link, with torch only and without `pagoda`.

One large asynchronous copy between pinned memory and the device, a stream of matrix products, and
registering host memory by the CUDA runtime. A CPU device does the same by plain copies and the wall
clock, so that code that uses this can be tried without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Direction = Literal["down", "up"]  # device -> host, host -> device

# Filled on the device before a timed copy: some 60 us on an H200, longer than the copy and the
# marks take to launch.
LEAD_IN_BYTES = 256 << 20
# CU_STREAM_NON_BLOCKING: neither this stream nor the default stream waits for the other
_NON_BLOCKING = 1


class Spent(NamedTuple):
    """Seconds of one piece of work: by events on the device, and wall time from the call to the
    end.
    """

    event: float
    wall: float


class Stopwatch:
    """Time the work of one stream of a device between `start` and `stop`; a CPU device by the wall
    clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = [
            torch.cuda.Event(enable_timing=True)
            for _ in range(2 * (device.type == "cuda"))
        ]
        self._times = [0.0, 0.0]

    def start(self) -> None:
        """Mark the beginning, in the current stream's order."""
        self._mark(0)

    def stop(self) -> None:
        """Mark the end, in the current stream's order. Return without waiting."""
        self._mark(1)

    def seconds(self) -> float:
        """Wait for the end and return the time between the marks."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        self._times[which] = time.perf_counter()


def settle(device: torch.device) -> None:
    """Wait until the device has completed all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Link:
    """The limit of the link: one large pinned cudaMemcpyAsync, in either direction.

    More than `most_bytes` are moved by several such copies, one after the other. One thread at a
    time.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device = device
        self.most_bytes = most_bytes
        on_device = device.type == "cuda"
        self._host = torch.empty(
            most_bytes, dtype=torch.uint8, pin_memory=on_device
        )
        self._there = torch.empty(most_bytes, dtype=torch.uint8, device=device)
        self._lead_in = torch.empty(
            LEAD_IN_BYTES if on_device else 1, dtype=torch.uint8, device=device
        )
        self._there.random_()
        self.spend("down", most_bytes)

    def spend(self, direction: Direction, nbytes: int) -> Spent:
        """Move `nbytes` and return the time that it took.

        The device is kept busy while the first mark and the copies are launched, so that the events
        see the copies alone. The wall time is that of a second run without this lead-in, from the
        call to its end.
        """
        watch = Stopwatch(self.device)
        settle(self.device)
        self._lead_in.zero_()
        watch.start()
        self._launch(direction, nbytes)
        watch.stop()
        event = watch.seconds()
        settle(self.device)
        began = time.perf_counter()
        self._launch(direction, nbytes)
        settle(self.device)
        return Spent(event, time.perf_counter() - began)

    def same(self) -> bool:
        """Return whether both sides hold the same bytes, as they do after every complete copy."""
        return torch.equal(self._host.to(self.device), self._there)

    def _launch(self, direction: Direction, nbytes: int) -> None:
        for start in range(0, nbytes, self.most_bytes):
            part = slice(0, min(self.most_bytes, nbytes - start))
            if direction == "down":
                self._host[part].copy_(self._there[part], non_blocking=True)
            else:
                self._there[part].copy_(self._host[part], non_blocking=True)


class Products:
    """A stream of bf16 matrix products that keeps a compute stream busy. One thread at a time.

    `queue` launches all of it at once, so no other thread of this process can delay a launch.
    """

    def __init__(
        self, device: torch.device, size: int = 8192, seconds: float = 0.25
    ) -> None:
        self.device = device
        self.size = size
        self._stream = own_stream(device) if device.type == "cuda" else None
        self._a, self._b = (
            torch.randn((size, size), device=device).to(torch.bfloat16)
            for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        settle(device)
        self.count = 4
        self.spend()
        each = statistics.median(self.spend() for _ in range(3)) / self.count
        # a device queues about 1,000 launches
        self.count = max(2, min(800, round(seconds / each)))

    def queue(self) -> Stopwatch:
        """Queue a lead-in of a fifth, then `count` products between two marks. Return the marks
        without waiting.
        """
        watch = Stopwatch(self.device)
        with torch.cuda.stream(self._stream):  # stream None: no effect
            for _ in range(max(1, self.count // 5)):
                torch.mm(self._a, self._b, out=self._c)
            watch.start()
            for _ in range(self.count):
                torch.mm(self._a, self._b, out=self._c)
            watch.stop()
        return watch

    def spend(self) -> float:
        """Return the seconds of `count` products without a concurrent transfer."""
        return self.queue().seconds()

    def teraflops(self, seconds: float) -> float:
        """Return the rate of `count` products in `seconds`, in 10^12 operations a second."""
        return 2 * self.size**3 * self.count / seconds / 1e12


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of the current device that is not shared, for the life of the process.

    torch.cuda.Stream returns 32 streams in turn, so two of them may be the same (pytorch issue
    173729).
    """
    handle = ctypes.c_void_p()
    found = ctypes.CDLL("libcuda.so.1").cuStreamCreate(
        ctypes.byref(handle), _NON_BLOCKING
    )
    if found or not handle.value:
        raise RuntimeError(f"cuStreamCreate: error {found}")
    return torch.cuda.ExternalStream(handle.value, device=device)


def register_by_runtime(address: int, nbytes: int) -> Callable[[], None]:
    """Register host memory by cudaHostRegister and return a function that undoes it. Raise
    RuntimeError if it fails.
    """
    runtime = torch.cuda.cudart()
    found = runtime.cudaHostRegister(address, nbytes, 3)  # portable, mapped
    if int(found):
        raise RuntimeError(
            f"cudaHostRegister of {nbytes} bytes: error {int(found)}"
        )
    return lambda: _unregister(address)


def about(device: torch.device) -> dict[str, object]:
    """Return the name of the device, the state of its link during a transfer, and the versions."""
    found: dict[str, object] = {
        "name": "CPU",
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "calling_threads": 1,
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    found |= {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "sms": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
    return (
        found
        | _smi(str(getattr(properties, "uuid", "")))
        | {"numa_nodes": _numa_nodes()}
    )


_SMI = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks.sm",
    "clocks.max.sm",
    "power.limit",
    "temperature.gpu",
    "mig.mode.current",
)


def _smi(uuid: str) -> dict[str, object]:
    """Return the output of nvidia-smi; empty where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    which = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    command = [
        program,
        *which,
        f"--query-gpu={','.join(_SMI)}",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    values = [each.strip() for each in lines[0].split(",")] if lines else []
    if len(values) != len(_SMI):
        return {}
    return {
        name.replace(".", "_"): value
        for name, value in zip(_SMI, values, strict=True)
    }


def _numa_nodes() -> int:
    try:
        return sum(
            name.startswith("node")
            for name in os.listdir(Path("/sys/devices/system/node"))
        )
    except OSError:
        return 1


def _unregister(address: int) -> None:
    found = torch.cuda.cudart().cudaHostUnregister(address)
    if int(found):
        raise RuntimeError(f"cudaHostUnregister: error {int(found)}")
