"""Inspects a worker's KV cache once: the pages as bytes, and a text with everything that decides
these bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pagoda.connectors.vllm.identity.machine_facts import machine_facts
from pagoda.connectors.vllm.page_geometry import Page, check_apart, page_of
from pagoda.connectors.vllm.supported_engines import layer_specs
from pagoda.layout import KVLayout
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from pagoda.transfer.pages_kv import PagesKV, merged

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# On CPUs K is packed for the vector unit; for these, within each head (tests/vllm/test_ranks.py).
_PACKED_BY_HEAD = {"amx", "vec", "vec16"}


class KVMemory(NamedTuple):
    """The KV cache of one worker.

    `planes`: int8 [num_blocks, page_bytes] views of the KV memory, rows contiguous; `page_bytes` of
    each. A chunk has `parts` parts and this worker's is `part`; if several ranks hold the same KV,
    one of them `writes`. `description` is the same in every worker of every machine of this kind:
    it has no address, rank or number of blocks.
    """

    planes: list[torch.Tensor]
    block_tokens: int
    num_blocks: int
    page_bytes: tuple[int, ...]
    description: str
    parts: int
    part: int
    writes: bool
    on_cpu: bool


def inspect_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    canonical: bool = False,
) -> KVMemory:
    """Return the pages of `kv_caches` (by layer name) and all that decides their bytes. Copies and
    changes nothing.

    `canonical`: the planes are single heads, head after head, so that a chunk has the same bytes
    for any number of ranks, and the description does not name this number.

    Raises ValueError, which says what to do, unless there is one dense page for each block and
    layer; if `canonical`, also unless each head is one run of bytes.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError(
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups: one is needed"
        )
    group = kv_cache_config.kv_cache_groups[0]
    specs = layer_specs(group)
    sizes = {int(spec.block_size) for spec in specs.values()}
    if len(sizes) != 1:
        raise ValueError(
            f"layers with blocks of {sorted(sizes)} tokens in one group: one size is needed"
        )
    (block_tokens,) = sizes
    pages = _pages(kv_caches, specs, kv_cache_config.num_blocks)
    devices = {page.plane.device for page in pages}
    if len(devices) != 1:
        raise ValueError(
            f"KV caches on several devices {sorted(map(str, devices))}: one is needed"
        )
    check_apart(pages)
    heads = 0
    replicas = int(kv_cache_config.kv_tp_replicas)
    if canonical:
        heads, replicas = _heads_of(pages, vllm_config)
    parts, part, writes = _parts(vllm_config, replicas)
    facts = {
        "machine": machine_facts(
            pages[0].plane.device, vllm_config, list(kv_caches), by_head=canonical
        ),
        "layout": kv_cache_config.kv_cache_layout
        or vllm_config.cache_config.kv_cache_layout,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_tokens": block_tokens,
    }
    if canonical:
        planes = [
            _head(page, number) for number in range(heads) for page in pages
        ]
        facts["layers"] = [
            [list(page.names), page.page_bytes // heads, page.head_text]
            for page in pages
        ]
        facts["heads"] = heads * parts
    else:
        planes = merged([page.plane for page in pages])
        facts["layers"] = [
            [list(page.names), page.kernel_tokens, page.page_bytes, page.text]
            for page in pages
        ]
        facts["page_bytes"] = [int(plane.shape[1]) for plane in planes]
        facts["parts"] = [parts, replicas]
    page_bytes = tuple(int(plane.shape[1]) for plane in planes)
    if facts["layout"] is None:
        raise ValueError(
            "the KV cache layout is not resolved: planes can be inspected only after the engine "
            "has chosen it"
        )
    return KVMemory(
        planes=planes,
        block_tokens=block_tokens,
        num_blocks=int(kv_cache_config.num_blocks),
        page_bytes=page_bytes,
        description=json.dumps(facts, sort_keys=True),
        parts=parts,
        part=part,
        writes=writes,
        on_cpu=planes[0].device.type == "cpu",
    )


def paged_kv(
    planes: Sequence[torch.Tensor],
    layout: KVLayout,
    block_tokens: int,
    on_cpu: bool,
    *,
    part: int,
    parts: int,
) -> PagesKV | DevicePagesKV:
    """Return the transfer of these pages, without blocks; `with_table` makes one of a request's
    blocks.

    The planes are checked here once, and not for each request.
    """
    kind = PagesKV if on_cpu else DevicePagesKV
    return kind(
        planes,
        layout,
        block_tokens=block_tokens,
        block_table=[],
        part=part,
        parts=parts,
    )


def _pages(
    kv_caches: Mapping[str, Any], specs: dict[str, Any], num_blocks: int
) -> list[Page]:
    """Return one page for each layer, in the group's order; layers that share all memory of another
    join its page.
    """
    missing = [name for name in specs if name not in kv_caches]
    if missing or not specs:
        raise ValueError(
            f"no KV cache was registered for the layers {missing}: nothing can be stored"
        )
    found: dict[tuple[int, int, int], Page] = {}
    for name, spec in specs.items():
        page = page_of(name, kv_caches[name], spec, num_blocks)
        place = (page.start, page.stride, page.page_bytes)
        known = found.get(place)
        if known is not None and (known.kernel_tokens, known.text) != (
            page.kernel_tokens,
            page.text,
        ):
            raise ValueError(
                f"layers {known.names} and {name} share memory but have different views of it"
            )
        found[place] = (
            page if known is None else known._replace(names=(*known.names, name))
        )
    places = {(page.start, page.stride) for page in found.values()}
    # a layer without a spec may only read what a layer with one writes
    for name in kv_caches:
        if name not in specs:
            tensor = kv_caches[name]
            ratio = (
                tensor.shape[0] // num_blocks
                if tensor.shape[0] % num_blocks == 0
                else 1
            )
            at = (
                int(tensor.data_ptr()),
                tensor.stride(0) * ratio * tensor.element_size(),
            )
            if at not in places:
                raise ValueError(
                    f"{name} has its own KV but no spec in the KV cache group: it would not be "
                    "stored"
                )
    return list(found.values())


def _heads_of(pages: Sequence[Page], vllm_config: VllmConfig) -> tuple[int, int]:
    """Return how many KV heads this worker has, and how many ranks have the same ones.

    Raises ValueError, which says what to do, unless each head is one run of bytes in all pages.
    """
    heads = pages[0].heads
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    replicas = max(1, ranks * heads // total)
    layers = vllm_config.compilation_config.static_forward_context
    packed = {
        getattr(layers[name], "isa", None)
        for page in pages
        for name in page.names
        if name in layers
    }
    alone = pages[0].plane.device.type != "cpu" or packed <= _PACKED_BY_HEAD
    if (
        alone
        and {page.heads for page in pages} == {heads}
        and 0 < ranks * heads == replicas * total
    ):
        return heads, replicas
    found = " and ".join({page.text: page.names[0] for page in pages})
    raise ValueError(
        f"canonical_layout: the KV of {ranks} ranks is not {total} heads, each in one separate "
        f"run of bytes ({found},"
        f" packed for {sorted(map(str, packed))}): start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC, "
        "or leave"
        " canonical_layout out"
    )


def _head(page: Page, number: int) -> Any:
    """Return the bytes of one head in all pages."""
    nbytes = page.page_bytes // page.heads
    return page.plane[:, number * nbytes : (number + 1) * nbytes]


def _parts(vllm_config: VllmConfig, replicas: int) -> tuple[int, int, bool]:
    """Return the number of parts of a chunk, this worker's part, and whether this worker writes it
    for its replicas.
    """
    from vllm.distributed import parallel_state

    ranks = vllm_config.parallel_config.tensor_parallel_size
    if replicas < 1 or ranks % replicas:
        raise ValueError(
            f"{ranks} tensor-parallel ranks cannot hold {replicas} copies each of the same KV"
        )
    if not parallel_state.model_parallel_is_initialized():
        if ranks > 1:
            raise ValueError(
                "the rank of this worker is not known yet: planes can be inspected once the "
                "ranks are connected"
            )
        return 1, 0, True
    rank = parallel_state.get_tensor_model_parallel_rank()
    return ranks // replicas, rank // replicas, rank % replicas == 0
