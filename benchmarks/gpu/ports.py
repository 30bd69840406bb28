"""The port of the device that is measured: CUDA's, or CPU memory with Triton's interpreter for a trial."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagoda.transfer.gpu.device import CpuPort, CudaPort, Port


def port_maker(device: torch.device) -> Callable[[int | None], Port]:
    """Return what makes a port for so many programs; None: as many as a user gets who says nothing."""
    if device.type == "cuda":
        return lambda programs: CudaPort(device) if programs is None else CudaPort(device, programs)
    return _cpu_port


def _cpu_port(programs: int | None) -> Port:
    from pagoda.transfer.gpu.kernels import Kernels  # Triton must have been told to interpret by now

    device = torch.device("cpu")
    return CpuPort(Kernels(device) if programs is None else Kernels(device, programs))
