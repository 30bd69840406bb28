"""Pages of real KV caches: every layout that vLLM knows, kernel blocks, padding, sharing, ranks."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.configs import BLOCK, allocate, engine_config, make_layers

DENSE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
PAGE = 2 * BLOCK * 128 * 2  # heads, tokens, K and V, bfloat16


def see(
    config: Any,
    cache_config: Any,
    kv_caches: dict[str, Any],
    canonical: bool = False,
) -> Any:
    from pagoda.connectors.vllm.kv_memory import inspect_kv_caches

    return inspect_kv_caches(kv_caches, config, cache_config, canonical=canonical)


@pytest.fixture(params=DENSE)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_plane_row_is_a_block_of_all_layers_and_nothing_else(
    llama: Path, layout: str
) -> None:
    """Writing through the engine's views shows up in exactly that row, byte for byte, whatever the
    layout.
    """
    import torch

    config = engine_config(llama, layout)
    cache_config, kv_caches = allocate(config, make_layers(config))
    seen = see(config, cache_config, kv_caches)
    assert seen.num_blocks == 6
    assert seen.block_tokens == BLOCK
    assert sum(seen.page_bytes) == 4 * PAGE
    assert len(seen.planes) == (1 if layout.startswith("B") else 4)
    assert seen.parts == 1
    assert seen.part == 0
    assert seen.writes is True
    assert seen.on_cpu is True
    for plane in seen.planes:
        assert plane.dtype == torch.int8
        assert plane.stride(1) == 1
    for block in (0, 3, 5):
        for number, tensor in enumerate(kv_caches.values()):
            for plane in seen.planes:
                plane.zero_()
            tensor[block].copy_(torch.randn(tensor[block].shape))
            written = [
                (plane != 0).any(dim=1).nonzero().flatten().tolist()
                for plane in seen.planes
            ]
            assert [row for rows in written for row in rows] == [block]
            rows = torch.cat([plane[block] for plane in seen.planes])
            page = rows[number * PAGE : (number + 1) * PAGE].view(torch.bfloat16)
            order = sorted(range(3), key=lambda dim: -tensor.stride(dim + 1))
            assert torch.equal(page, tensor[block].permute(order).flatten())
            assert int((rows != 0).sum()) == int(
                (rows[number * PAGE : (number + 1) * PAGE] != 0).sum()
            )


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_tear_a_block_apart_are_refused(
    llama: Path, layout: str
) -> None:
    config = engine_config(llama, layout)
    cache_config, kv_caches = allocate(config, make_layers(config))
    with pytest.raises(
        ValueError, match=r"not one run.*VLLM_KV_CACHE_LAYOUT=LBNHC"
    ):
        see(config, cache_config, kv_caches)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_joined_to_the_blocks_of_the_engine(
    llama: Path, layout: str
) -> None:
    import torch

    config = engine_config(llama, layout, block_size=128)
    specs = make_layers(config)
    split = see(config, *allocate(config, specs, kernel_block_size=32))
    whole = see(config, *allocate(config, specs))
    assert split.page_bytes == whole.page_bytes == (4 * PAGE,) * 4
    assert split.num_blocks == 6
    assert split.block_tokens == 128
    assert split.description != whole.description, (
        "the bytes inside lie otherwise"
    )
    cache_config, kv_caches = allocate(config, specs, kernel_block_size=32)
    seen = see(config, cache_config, kv_caches)
    next(iter(kv_caches.values()))[4:8].copy_(torch.ones(4, 2, 32, 128))
    assert seen.planes[0][1].all()  # 1.0 in bfloat16 has no byte of zeros
    assert not seen.planes[0][0].any()
    assert not seen.planes[0][2].any()


def test_kernel_blocks_between_other_layers_are_refused(llama: Path) -> None:
    """vLLM never splits such blocks itself; views that claim so are taken for what they are:
    unknown.
    """
    config = engine_config(llama, "LBHNC", block_size=64)
    cache_config, kv_caches = allocate(config, make_layers(config))
    torn = {
        name: tensor.as_strided((12, 2, 32, 128), (5120, 4096, 128, 1))
        for name, tensor in kv_caches.items()
    }
    with pytest.raises(ValueError, match="are not adjacent"):
        see(config, cache_config, torn)
    torn = {
        name: tensor[:, :, :32][::1].repeat(2, 1, 1, 1)[:11]
        for name, tensor in kv_caches.items()
    }
    with pytest.raises(
        ValueError, match="11 blocks of the kernel are not a multiple of 6 blocks"
    ):
        see(config, cache_config, torn)


def test_padding_is_not_stored(llama: Path) -> None:
    config = engine_config(llama, "LBHNC")
    specs = {
        name: replace(spec, page_size_padded=PAGE + 512)
        for name, spec in make_layers(config).items()
    }
    seen = see(config, *allocate(config, specs))
    assert seen.page_bytes == (PAGE,) * 4
    assert {plane.stride(0) for plane in seen.planes} == {PAGE + 512}


def test_layers_that_use_anothers_kv_are_one_plane(llama: Path) -> None:
    """As vLLM makes them: the layer joins the group's names, without memory of its own."""
    config = engine_config(llama, "LBHNC")
    specs = make_layers(config)
    (last, _) = specs.popitem()
    cache_config, kv_caches = allocate(config, specs)
    kv_caches[last] = kv_caches["model.layers.1.self_attn.attn"]
    assert len(see(config, cache_config, kv_caches).planes) == 3
    cache_config.kv_cache_groups[0].layer_names.append(last)
    assert len(see(config, cache_config, kv_caches).planes) == 3


def test_layers_nobody_speaks_of_are_refused(llama: Path) -> None:
    config = engine_config(llama, "LBHNC")
    specs = make_layers(config)
    cache_config, kv_caches = allocate(config, specs)
    name, tensor = next(iter(kv_caches.items()))
    with pytest.raises(ValueError, match=r"draft\.attn has its own KV"):
        see(config, cache_config, {**kv_caches, "draft.attn": tensor.clone()})
    with pytest.raises(ValueError, match="no KV cache was registered"):
        see(
            config,
            cache_config,
            {other: each for other, each in kv_caches.items() if other != name},
        )


def test_pages_that_overlap_or_are_too_few_are_refused(llama: Path) -> None:
    config = engine_config(llama, "LBHNC")
    cache_config, kv_caches = allocate(config, make_layers(config))
    names = list(kv_caches)
    first = kv_caches[names[0]]
    shifted = first.as_strided(
        first.shape, first.stride(), first.storage_offset() + 128
    )
    with pytest.raises(ValueError, match="overlap"):
        see(config, cache_config, {**kv_caches, names[1]: shifted})
    with pytest.raises(
        ValueError, match=r"blocks of the kernel are not a multiple of 7"
    ):
        see(config, replace(cache_config, num_blocks=7), kv_caches)


def test_pages_of_another_size_than_the_spec_says_are_refused(
    llama: Path,
) -> None:
    config = engine_config(llama, "LBHNC")
    cache_config, kv_caches = allocate(config, make_layers(config))
    with pytest.raises(ValueError, match="but vLLM says"):
        see(
            config,
            cache_config,
            {
                name: tensor[..., :64].contiguous()
                for name, tensor in kv_caches.items()
            },
        )
    with pytest.raises(ValueError, match="is not a tensor"):
        see(
            config,
            cache_config,
            {name: [tensor, tensor] for name, tensor in kv_caches.items()},
        )
    with pytest.raises(
        ValueError,
        match=r"is not a tensor \[blocks, heads, tokens, content\] but Tensor",
    ):
        see(
            config,
            cache_config,
            {name: tensor.flatten(1) for name, tensor in kv_caches.items()},
        )


def test_planes_keep_apart_whatever_the_strides() -> None:
    """`check_apart` against marking every byte, for random pages of one buffer."""
    import torch

    from pagoda.connectors.vllm.page_geometry import Page, check_apart

    draw = random.Random(7)
    refused = 0
    for _ in range(3000):
        buffer = torch.zeros(400, dtype=torch.int8)
        pages = []
        marks = set()
        clash = False
        stride = draw.choice((20, 40))
        for number in range(draw.randint(2, 3)):
            stride = stride if draw.random() < 0.8 else draw.choice((20, 40))
            size = draw.randint(4, 12)
            start = draw.randrange(0, 120, 4)
            plane = buffer.as_strided((4, size), (stride, 1), start)
            pages.append(
                Page(
                    plane.data_ptr(),
                    stride,
                    size,
                    1,
                    "",
                    plane,
                    buffer.data_ptr(),
                    (f"layer {number}",),
                )
            )
            mine = {
                start + block * stride + byte
                for block in range(4)
                for byte in range(size)
            }
            clash |= bool(marks & mine)
            marks |= mine
        try:
            check_apart(pages)
        except ValueError:
            refused += 1
        else:
            assert not clash, [
                (page.start - buffer.data_ptr(), page.stride, page.page_bytes)
                for page in pages
            ]
    assert 300 < refused < 2900


def test_replicas_are_one_part_and_one_of_them_writes(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 ranks of which 2 and 2 hold the same: 2 parts. The ranks' group is vLLM's, its rank is
    set.
    """
    from vllm.distributed import parallel_state

    config = engine_config(llama, "LBHNC")
    cache_config, kv_caches = allocate(config, make_layers(config))
    config.parallel_config.tensor_parallel_size = 4
    with pytest.raises(ValueError, match="rank of this worker is not known"):
        see(config, cache_config, kv_caches)
    monkeypatch.setattr(
        parallel_state, "model_parallel_is_initialized", lambda: True
    )
    found = []
    for rank in range(4):
        monkeypatch.setattr(
            parallel_state,
            "get_tensor_model_parallel_rank",
            lambda rank=rank: rank,
        )
        found.append(
            see(config, replace(cache_config, kv_tp_replicas=2), kv_caches)
        )
    assert [(seen.parts, seen.part, seen.writes) for seen in found] == [
        (2, 0, True),
        (2, 0, False),
        (2, 1, True),
        (2, 1, False),
    ]
    assert len({seen.description for seen in found}) == 1
    with pytest.raises(ValueError, match="cannot hold 3 copies"):
        see(config, replace(cache_config, kv_tp_replicas=3), kv_caches)


def with_isa(config: Any, isa: str = "vec") -> None:
    """Say what the layers' KV is packed for, as the first step's plan does in an engine."""
    for layer in config.compilation_config.static_forward_context.values():
        layer.isa = isa


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("stores_it", [1, 2, 4])
def test_a_chunk_of_single_heads_is_the_same_for_any_number_of_ranks(
    layout: str, stores_it: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 2 heads: of 4 ranks, 2 and 2 have the same one. Each loads its own from what
    others stored.
    """
    import torch
    from vllm.distributed import parallel_state

    from pagoda.connectors.vllm.kv_memory import paged_kv
    from pagoda.layout import KVLayout

    monkeypatch.setattr(
        parallel_state, "model_parallel_is_initialized", lambda: True
    )
    draw = torch.Generator().manual_seed(1)
    slot = np.zeros(1 << 20, np.uint8)
    table = [3, 1]
    model = [
        torch.randn(2, 2, BLOCK, 128, generator=draw).bfloat16() for _ in range(4)
    ]  # [blocks, heads, ...]
    descriptions = set()
    for storing, ranks in ((True, stores_it), (False, 1), (False, 2), (False, 4)):
        for rank in range(ranks):
            monkeypatch.setattr(
                parallel_state,
                "get_tensor_model_parallel_rank",
                lambda rank=rank: rank,
            )
            config = engine_config(llama, layout)
            config.parallel_config.tensor_parallel_size = ranks
            heads = (
                slice(0, 2)
                if ranks == 1
                else slice(rank * 2 // ranks, rank * 2 // ranks + 1)
            )
            cache_config, kv_caches = allocate(
                config, make_layers(config, kv_heads=heads.stop - heads.start)
            )
            with_isa(config)
            seen = see(config, cache_config, kv_caches, canonical=True)
            descriptions.add(seen.description)
            chunk = KVLayout.opaque(
                2 * BLOCK, 2 * seen.parts * sum(seen.page_bytes), seen.description
            )
            kv = paged_kv(
                seen.planes, chunk, BLOCK, True, part=seen.part, parts=seen.parts
            ).with_table(table)
            if not storing:
                kv.from_slots([0], [slot])
            for tensor, whole in zip(kv_caches.values(), model, strict=True):
                if storing:
                    tensor[table] = whole[:, heads]
                assert torch.equal(tensor[table], whole[:, heads])
            if storing and seen.writes:
                kv.to_slots([0], [slot])
    assert len(descriptions) == 1


def test_heads_that_are_not_runs_of_bytes_are_refused(
    llama: Path, layout: str
) -> None:
    config = engine_config(llama, layout)
    cache_config, kv_caches = allocate(config, make_layers(config))
    if layout.endswith("NHC"):
        with pytest.raises(
            ValueError, match=r"canonical_layout: .*VLLM_KV_CACHE_LAYOUT=LBHNC"
        ):
            see(config, cache_config, kv_caches, canonical=True)
        return
    with_isa(config)
    see(config, cache_config, kv_caches, canonical=True)
    with_isa(config, "unknown")
    with pytest.raises(
        ValueError, match=r"packed for .*unknown.*leave canonical_layout out"
    ):
        see(config, cache_config, kv_caches, canonical=True)
    config = engine_config(llama, layout)
    # the model has 2
    cache_config, kv_caches = allocate(config, make_layers(config, kv_heads=1))
    with_isa(config)
    with pytest.raises(ValueError, match="1 ranks is not 2 heads"):
        see(config, cache_config, kv_caches, canonical=True)


@pytest.mark.parametrize("isa", ["amx", "vec", "vec16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_packed_alone(isa: str, dtype: str) -> None:
    """vLLM's CPU kernel writes the same bytes for a head, however many others a rank has."""
    import torch
    from vllm import _custom_ops

    draw = torch.Generator().manual_seed(1)
    keys, values = (
        torch.randn(70, 4, 64, generator=draw).to(getattr(torch, dtype))
        for _ in range(2)
    )
    slots = torch.randperm(3 * BLOCK, generator=draw)[:70]

    def written(heads: slice) -> torch.Tensor:
        mine = [one[:, heads].contiguous() for one in (keys, values)]
        memory = torch.zeros(3, mine[0].shape[1], 2 * BLOCK, 64, dtype=keys.dtype)
        _custom_ops.cpu_attn_reshape_and_cache(
            *mine, *memory.chunk(2, dim=2), slots, isa
        )
        return memory

    try:
        whole = written(slice(0, 4))
    except RuntimeError as trouble:
        pytest.skip(f"not on this machine: {trouble}")
    for first, stop in ((0, 2), (2, 4), (0, 1), (1, 2), (3, 4)):
        assert torch.equal(written(slice(first, stop)), whole[:, first:stop])
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_the_description_differs_by_format_and_by_nothing_else(
    llama: Path,
) -> None:
    def described(layout: str = "LBHNC", num_blocks: int = 6, **how: Any) -> str:
        heads = how.pop("kv_heads", 2)
        config = engine_config(llama, layout, **how)
        return str(
            see(
                config,
                *allocate(
                    config, make_layers(config, kv_heads=heads), num_blocks
                ),
            ).description
        )

    base = described()
    assert described(num_blocks=9) == base
    assert described(max_model_len=2048) == base
    others = [described(layout) for layout in DENSE[1:]] + [
        described(block_size=64),
        described(kv_heads=4),
    ]
    assert len({base, *others}) == 1 + len(others)
    import vllm

    facts = json.loads(base)
    assert facts["machine"]["vllm"] == ".".join(vllm.__version__.split(".")[:2])
    assert facts["machine"]["device"][0] == "cpu"
    assert not re.search(r"0x[0-9a-f]{6}|cuda:\d", base)
