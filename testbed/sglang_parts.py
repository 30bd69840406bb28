"""What SGLang has for GPUs only, so that its HiCache runs here: copies between its device and host
pools by indexing.

Import this before anything of SGLang. None of it is part of what is tested: PagodaHiCache sees host
pools only.
"""

from __future__ import annotations

import importlib.abc
import sys
import unittest
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

if find_spec("sglang") is None:
    raise unittest.SkipTest(
        "SGLang is not here: `make test-sglang` installs it into .venv-sglang"
    )

import torch


class _MissingParts(importlib.abc.MetaPathFinder):
    """Gives what is missing at imports: of torchvision's operators, which are built for CUDA, the
    names.
    """

    library: Any = None
    whole = False  # install the copies as soon as there is a cache
    names = (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt "
        "pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
    )

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Declare the operators when torchvision is imported."""
        if name == "torchvision" and self.library is None:
            self.library = torch.library.Library("torchvision", "DEF")
            for each in self.names:
                self.library.define(each)
        if name == "sglang.srt.mem_cache.unified_radix_cache" and self.whole:
            install()


_FINDER = _MissingParts()
sys.meta_path.insert(0, _FINDER)


def prepare() -> None:
    """Prepare this process to become a whole engine, or a part of one."""
    _FINDER.whole = True
    for name in (
        "vllm",
        "vllm._custom_ops",
    ):  # SGLang imports a kernel of it, which it does not call on a CPU
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == "vllm")
        sys.modules[name] = module
    module.rotary_embedding = None  # type: ignore[attr-defined]


def _rows(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """One layer of a device pool as pages [pages, page_size, heads, dim]."""
    return buffer.view(-1, page_size, *buffer.shape[1:])


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices[::page_size] // page_size


def _copy_layers(
    src_layers: Any,
    dst_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    for source, to in zip(src_layers, dst_layers, strict=True):
        to[dst_indices] = source[src_indices]


def _copy_to_pages(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    half = len(src_ptrs) // 2
    to = _pages(dst_indices, page_size)
    for number, source in enumerate(src_ptrs):
        dst_ptrs[number // half][to, number % half] = _rows(source, page_size)[
            _pages(src_indices, page_size)
        ]


def _copy_from_pages(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    for source, to in zip(src_ptrs, dst_ptrs, strict=True):
        _rows(to, page_size)[_pages(dst_indices, page_size)] = source[
            _pages(src_indices, page_size), layer_id
        ]


def install() -> None:
    """Give SGLang these copies; pinning memory does nothing, and no 10 GB of the machine must stay
    free.

    Also builds SGLang's hash of pages, which needs a C++ compiler: at the first use on a machine,
    that takes longer than its threads have time to end.
    """
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str([1], None, 1)

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

    for module in (mha, mamba):
        module.transfer_kv_direct = _copy_layers  # type: ignore[attr-defined]
        module.transfer_kv_all_layer_direct_lf_pf = _copy_to_pages  # type: ignore[attr-defined]
        module.transfer_kv_per_layer_direct_pf_lf = _copy_from_pages  # type: ignore[attr-defined]
    common._cuda_host_register = lambda *_, **__: None
