"""The memory of the tests: a GPU, pinned and pageable host memory; or CPU memory, to try the tests
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from pagoda.layout import KVLayout
from pagoda.slab.memory import aligned
from pagoda.slab.pinned import pin
from pagoda.transfer.gpu import autotune
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import CudaDevice, Device
from tests.gpu.ready import ON_CPU
from tests.transfer.late_device import LateDevice

POISON = 0xA5
KINDS = ["registered", "plain", "mixed"]

Bytes = npt.NDArray[np.uint8]


class Rig:
    """A device, and memory for slots of either kind. For one thread, except `launch` and
    `copies`.
    """

    device: torch.device
    small: bool  # tiny sizes will do
    gpu: Device
    pinned: Bytes
    pageable: Bytes

    def engine(
        self, way: str | None = None, *, kernels: bool = True, **options: int
    ) -> CopyEngine:
        """Return a new copy engine over the device."""
        raise NotImplementedError

    def known(self, *tensors: torch.Tensor) -> None:
        """Declare the device's memory."""

    def reaches(self, *arrays: Bytes) -> None:
        """Declare memory that other code has registered."""

    def unreachable(self, *arrays: Bytes) -> None:
        """Declare memory that is not registered."""

    def busy(self) -> None:
        """Give the current stream work for some 50 ms."""
        raise NotImplementedError

    def launch(self, work: Callable[[], object]) -> None:
        """Do the tensor operations of `work` in the order of the current stream."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the current stream."""
        raise NotImplementedError

    def check(self) -> None:
        """Wait for everything; raise if anything was wrong."""
        raise NotImplementedError

    def random(self, count: int, width: int, seed: int) -> torch.Tensor:
        """Return `count` random integers of `width` bytes on the device, any bits."""
        draw = torch.Generator(self.device).manual_seed(seed)
        found = torch.randint(
            0,
            256,
            (count * width,),
            dtype=torch.uint8,
            device=self.device,
            generator=draw,
        )
        self.known(found)
        return found.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
                width
            ]
        )

    def slots(
        self,
        layout: KVLayout,
        count: int,
        kind: str,
        fill: int | None = POISON,
        odd: int = 0,
    ) -> list[Bytes]:
        """Slots of which every byte is `fill`, or random; of "mixed" ones every other is
        registered.

        `odd`: how many bytes behind a page they begin.
        """
        found = []
        for number in range(count):
            registered = kind == "registered" or (
                kind == "mixed" and number % 2 == 0
            )
            begin = number * (layout.slot_bytes + 4096) + odd
            room = (self.pinned if registered else self.pageable)[
                begin : begin + layout.slot_bytes
            ]
            assert len(room) == layout.slot_bytes, (
                "the rig has too little host memory for this test"
            )
            if fill is None:
                words = np.random.default_rng().integers(
                    0, 2**64, room.size // 8, dtype=np.uint64
                )
                room[:] = words.view(np.uint8)
            else:
                room[:] = fill
            found.append(room)
        return found


class GpuRig(Rig):
    """A real GPU."""

    small = False

    def __init__(self) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.gpu = CudaDevice(self.device)
        self.pinned = aligned(1 << 30)
        self.pageable = aligned(1 << 30)
        self.pageable[:] = 0
        held = pin(self.pinned, self.device.index, background=False)
        assert held is not None and not held.trouble, held and held.trouble
        self.held = held
        self._work = torch.randn(
            (8192, 8192), dtype=torch.bfloat16, device=self.device
        )

    def engine(
        self, way: str | None = None, *, kernels: bool = True, **options: int
    ) -> CopyEngine:
        device = self.gpu if kernels else CudaDevice(self.device)
        if not kernels:
            device.kernels = None
        return CopyEngine(device, way=way, **options)

    def busy(self) -> None:
        for _ in range(30):
            self._work @ self._work

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def check(self) -> None:
        torch.cuda.synchronize(self.device)


class CpuRig(Rig):
    """No GPU: late streams over CPU memory, see `late_device`."""

    small = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.late = LateDevice(1)
        self.gpu = self.late  # type: ignore[assignment]
        self.pinned = aligned(1 << 21)
        self.pageable = aligned(1 << 21)
        self.late.register(self.pinned)
        self.late.pageable(self.pageable)
        self._none = LateDevice(kernels=None, world=self.late.world)
        self._none.register(self.pinned)
        self._none.pageable(self.pageable)
        autotune._SCRATCH_BYTES = 300

    def engine(
        self, way: str | None = None, *, kernels: bool = True, **options: int
    ) -> CopyEngine:
        return CopyEngine(
            self.late if kernels else self._none, way=way, **options
        )  # type: ignore[arg-type]

    def known(self, *tensors: torch.Tensor) -> None:
        for device in (self.late, self._none):
            device.device_memory(*tensors)

    def reaches(self, *arrays: Bytes) -> None:
        for device in (self.late, self._none):
            device.register(*arrays)

    def unreachable(self, *arrays: Bytes) -> None:
        for device in (self.late, self._none):
            device.pageable(*arrays)

    def busy(self) -> None:
        return None  # it is late anyway

    def launch(self, work: Callable[[], object]) -> None:
        self.late.current_stream().launch(work)

    def finish(self) -> None:
        self.late.current_stream().record_event().synchronize()

    def check(self) -> None:
        self.finish()
        for device in (self.late, self._none):
            device.check()
            device.forget(2)  # all but the room for slots


@contextmanager
def open_rig() -> Iterator[Rig]:
    """Return the rig of this process."""
    if ON_CPU:
        yield CpuRig()
        return
    rig = GpuRig()
    try:
        yield rig
    finally:
        assert rig.held.close(30.0)
