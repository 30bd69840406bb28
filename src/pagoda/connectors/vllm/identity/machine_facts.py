"""The facts of vLLM and of the machine that decide how the bytes inside a page are arranged."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def machine_facts(
    device: torch.device,
    vllm_config: VllmConfig,
    layer_names: Sequence[str],
    *,
    by_head: bool = False,
) -> dict[str, object]:
    """Return vLLM's minor release, the kind of device, and the attention backend of each layer.
    Changes nothing.

    `by_head`: the backend's view of one head, without the number of heads, of which each rank has a
    share. Raises ValueError for an unknown device or layer.
    """
    import vllm

    release = ".".join(vllm.__version__.split(".")[:2])
    backends = {
        name: _backend(vllm_config, name, by_head) for name in layer_names
    }
    return {"vllm": release, "device": _device(device), "backends": backends}


def _device(device: torch.device) -> list[object]:
    """Return the facts of the device on which a page's bytes may depend: without its number or
    name.
    """
    import torch
    from vllm import envs

    if device.type == "cpu":  # K is packed for the vector unit
        cpu: Any = torch.cpu
        flags = [
            bool(cpu._is_amx_tile_supported()),
            bool(cpu._is_avx512_supported()),
        ]
        return [
            "cpu",
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            *flags,
        ]
    if device.type == "cuda":
        kind = "rocm" if torch.version.hip else "cuda"
        return [
            kind,
            *torch.cuda.get_device_capability(device),
            bool(envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT),
        ]
    raise ValueError(
        f"KV caches on {device.type!r} are not supported: use a CPU or a CUDA device"
    )


def _backend(
    vllm_config: VllmConfig, layer_name: str, by_head: bool
) -> list[object]:
    layer: Any = vllm_config.compilation_config.static_forward_context.get(
        layer_name
    )
    if layer is None:
        raise ValueError(
            f"{layer_name}: no attention layer of this name, so the layout of its pages is unknown"
        )
    backend = layer.get_attn_backend()
    kind = f"{backend.__module__}.{backend.__qualname__}"
    view = _view(getattr(layer, "kv_cache", None), by_head)
    return [kind, backend.get_name(), getattr(layer, "isa", None), view]


def _view(view: Any, by_head: bool) -> list[object] | None:
    """Return the kernel's view of a layer's KV, without the number of blocks, which may be smaller
    than vLLM's.
    """
    import torch

    if not isinstance(view, torch.Tensor):
        return None
    if by_head:  # the stride between blocks depends on the number of heads
        return [str(view.dtype), list(view.shape[2:]), list(view.stride()[2:])]
    return [str(view.dtype), list(view.shape[1:]), list(view.stride())]
