"""KV between a DynamicCache and the cache's transfers: one allocation per layer and plane, without
extra copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagoda.base.log import guarded_logger
from pagoda.connectors.transformers.batch_rows import BatchRow
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.transfer import DenseKV

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents

log = guarded_logger("pagoda.connectors")

# a tensor [batch, heads, columns, dim] for each layer and plane
Planes = list[list[Any]]


def copy_engine_for(devices: Sequence[Any]) -> CopyEngine | None:
    """Return the copy engine of the CUDA device that has all layers; None without such a device:
    the CPU copies KV.

    It is made at the first call for a device, once for the process.
    """
    if len(set(devices)) != 1 or devices[0].type != "cuda":
        return None
    from pagoda.transfer.gpu.copy_engine import copy_engine_of

    try:
        return copy_engine_of(devices[0])
    except ValueError as trouble:  # e.g. ROCm, which torch calls CUDA
        log.warning(
            "KV on %s is copied slowly, through the CPU's memory: %s",
            devices[0],
            trouble,
        )
        return None


def room_for(seen: ProbedModel, batch: int, columns: int) -> Planes:
    """Return uninitialised tensors for the KV of a batch: on the device if it has a copy engine,
    else on the CPU.

    On the CPU, pages that are never written take no memory.
    """
    import torch

    device = (
        "cpu"
        if seen.copy_engine is None
        else seen.copy_engine.device.torch_device
    )
    return [
        [
            torch.empty(
                batch,
                heads,
                columns,
                dim,
                dtype=getattr(torch, dtype),
                device=device,
            )
            for heads, dim, dtype in seen.layout.planes
        ]
        for _ in range(seen.layout.layers)
    ]


def kv_of_row(
    planes: Planes,
    number: int,
    begin: int,
    end: int,
    seen: ProbedModel,
    events: LayerEvents | None = None,
) -> DenseKV:
    """Return columns [begin, end) of one row as a transfer; `events` records each layer that is
    loaded.

    Tensors on the CPU, or on the device of the copy engine, are used in place; others are copied to
    the CPU here.
    """
    layers = [
        [plane[number, :, begin:end].detach() for plane in layer]
        for layer in planes
    ]
    engine = seen.copy_engine
    if engine is None or any(
        plane.device != engine.device.torch_device
        for layer in layers
        for plane in layer
    ):
        return DenseKV(
            [[plane.cpu() for plane in layer] for layer in layers], seen.layout
        )
    layers = [
        [
            plane if plane.stride(-1) == 1 else plane.contiguous()
            for plane in layer
        ]
        for layer in layers
    ]
    return DenseKV(layers, seen.layout, copy_engine=engine, layer_events=events)


def dynamic_cache(
    model: Any,
    seen: ProbedModel,
    planes: Planes,
    rows: Sequence[BatchRow],
    columns: int,
) -> Any:
    """Return a DynamicCache whose layers are the first `columns` columns of `planes`, over the same
    memory.

    Padding is zeroed: uninitialised memory may contain NaN, and a masked NaN remains NaN in the
    product with V.
    """
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    if not columns:
        return cache
    for layer, device, (keys, values) in zip(
        cache.layers, seen.devices, planes, strict=True
    ):
        for number, row in enumerate(rows):
            if row.pad:
                keys[number, :, : row.pad] = 0
                values[number, :, : row.pad] = 0
        keys, values = (
            plane[:, :, :columns].to(device) for plane in (keys, values)
        )
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
    return cache
