"""The measured device: CUDA, or CPU memory with Triton's interpreter for a trial."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagoda.transfer.gpu.device import CpuDevice, CudaDevice, Device


def device_maker(device: torch.device) -> Callable[[int | None], Device]:
    """Return a factory of devices by number of programs; None: the default number."""
    if device.type == "cuda":
        return lambda programs: (
            CudaDevice(device)
            if programs is None
            else CudaDevice(device, programs)
        )
    return _cpu_device


def _cpu_device(programs: int | None) -> Device:
    # Triton must be in interpreter mode by now
    from pagoda.transfer.gpu.kernels import Kernels

    device = torch.device("cpu")
    return CpuDevice(
        Kernels(device) if programs is None else Kernels(device, programs)
    )
