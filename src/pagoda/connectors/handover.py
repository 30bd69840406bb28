"""KV between a DynamicCache and the cache's transfers: one allocation a layer and plane, and no copy in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagoda.connectors.rows import Row
from pagoda.connectors.supported import Seen
from pagoda.transfer import DenseKV

__all__ = ["Planes", "dynamic_cache", "kv_of_row", "prefill_measured", "room_for"]

Planes = list[list[Any]]  # a tensor [batch, heads, columns, dim] a layer and plane


def room_for(seen: Seen, batch: int, columns: int) -> Planes:
    """Return uninitialised CPU tensors for the KV of a batch. What is never written costs no memory."""
    import torch

    return [
        [
            torch.empty(batch, heads, columns, dim, dtype=getattr(torch, dtype))
            for heads, dim, dtype in seen.layout.planes
        ]
        for _ in range(seen.layout.layers)
    ]


def kv_of_row(planes: Sequence[Sequence[Any]], number: int, begin: int, end: int, seen: Seen) -> DenseKV:
    """Return columns [begin, end) of one row as a transfer. CPU tensors are seen in place, others copied here."""
    layers = [[plane[number, :, begin:end].detach().cpu() for plane in layer] for layer in planes]
    return DenseKV(layers, seen.layout)


def dynamic_cache(model: Any, seen: Seen, planes: Planes, rows: Sequence[Row], columns: int) -> Any:
    """Return a DynamicCache whose layers are the first `columns` columns of `planes`, over the same memory.

    Padding is zeroed: what `empty` left there might be NaN, and a masked NaN is still one after the product with V.
    """
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    if not columns:
        return cache
    for layer, device, (keys, values) in zip(cache.layers, seen.devices, planes, strict=True):
        for number, row in enumerate(rows):
            if row.pad:
                keys[number, :, : row.pad] = 0
                values[number, :, : row.pad] = 0
        keys, values = (plane[:, :, :columns].to(device) for plane in (keys, values))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache


@contextmanager
def prefill_measured(model: Any, observe: Callable[[int, float], object]) -> Iterator[None]:
    """Tell `observe` how many tokens the model's first forward pass of this block took, and how long.

    Hooks are on the model only meanwhile; passes of other threads are not counted.
    """
    thread, began, done = threading.get_ident(), 0.0, False

    def before(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal began
        if threading.get_ident() == thread and not began:
            began = time.perf_counter()

    def after(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal done
        ids = kwargs.get("input_ids")
        if done or threading.get_ident() != thread or ids is None:
            return
        done = True
        if ids.device.type == "cpu":  # elsewhere the call returns before the work is done
            observe(ids.numel(), time.perf_counter() - began)

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
