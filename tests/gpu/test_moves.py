"""Every form, way, dtype and kind of slot: bit for bit, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from pagoda.transfer.gpu.copy_engine import WAYS
from tests.gpu.forms import (
    BY_NAME,
    FORMS,
    LLAMA_8B,
    ODD,
    ONE_TOKEN,
    SHORT,
    TINY,
    Size,
)
from tests.gpu.moves import Memory, check_load, check_store
from tests.gpu.rig import KINDS, Rig

ALL_WAYS = [*WAYS, None]
DTYPES = ["float16", "float8_e4m3fn", "uint8", "int8", "float32"]
NAMES = list(BY_NAME)


def both(
    rig: Rig,
    name: str,
    size: Size,
    dtype: str,
    way: str | None,
    kind: str,
    seed: int,
    odd: int = 0,
) -> None:
    """A store from one memory and a load into another; also with a ring so small that it wraps many
    times.
    """
    form = BY_NAME[name]
    engine = rig.engine(way)
    check_store(Memory.of(rig, form, size, dtype, seed), engine, kind, seed, odd)
    check_load(
        Memory.of(rig, form, size, dtype, seed + 1), engine, kind, seed, odd
    )
    narrow = rig.engine(
        way, staging_bytes=max(4096, form.layout(size, dtype).chunk_bytes // 3)
    )
    check_load(
        Memory.of(rig, form, size, dtype, seed + 2), narrow, kind, seed, odd
    )
    check_store(
        Memory.of(rig, form, size, dtype, seed + 3), narrow, kind, seed, odd
    )


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_as_large_as_they_are(
    rig: Rig, seed: int, name: str, way: str | None
) -> None:
    size = TINY if rig.small else LLAMA_8B
    engine = rig.engine(way)
    check_store(
        Memory.of(rig, BY_NAME[name], size, "bfloat16", seed),
        engine,
        "mixed",
        seed,
    )
    check_load(
        Memory.of(rig, BY_NAME[name], size, "bfloat16", seed + 1),
        engine,
        "mixed",
        seed,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_slot_is_copied_right(
    rig: Rig, seed: int, name: str, way: str | None, kind: str
) -> None:
    both(rig, name, TINY if rig.small else SHORT, "bfloat16", way, kind, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_copied_right(
    rig: Rig, seed: int, name: str, way: str | None, dtype: str
) -> None:
    both(rig, name, TINY if rig.small else SHORT, dtype, way, "mixed", seed)


@pytest.mark.parametrize("size", [ODD, ONE_TOKEN], ids=["odd", "one token"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("way", ALL_WAYS)
def test_odd_sizes_and_places(
    rig: Rig, seed: int, way: str | None, odd: int, dtype: str, size: Size
) -> None:
    for form in FORMS:
        both(rig, form.name, size, dtype, way, "mixed", seed, odd)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", ["pages", "merged_pages"])
def test_a_block_that_is_stored_twice(
    rig: Rig, seed: int, name: str, way: str | None
) -> None:
    memory = Memory.of(
        rig, BY_NAME[name], TINY if rig.small else SHORT, "bfloat16", seed
    )
    memory.table[3] = memory.table[1] = memory.table[0]
    check_store(memory, rig.engine(way), "mixed", seed)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_not_the_callers(
    rig: Rig, seed: int, name: str, way: str | None
) -> None:
    size = TINY if rig.small else SHORT
    memory = Memory.of(rig, BY_NAME[name], size, "bfloat16", seed)
    if memory.form.dense:
        pytest.skip("dense KV has no blocks")
    memory.table[0] = -1
    if "pages" in name:  # of other pools only leading ones may be -1
        for at in (2, 3, len(memory.table) - 1):
            memory.table[at] = -1
    check_load(memory, rig.engine(way), "mixed", seed)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_tokens_that_are_not_whole_blocks(
    rig: Rig, seed: int, way: str | None
) -> None:
    """A slot mapping by token."""
    from pagoda.transfer import PagedKV

    size = TINY if rig.small else SHORT
    memory = Memory.of(rig, BY_NAME["planes_first"], size, "bfloat16", seed)
    tokens = torch.randperm(size.blocks * size.block)[: size.chunk * size.chunks]
    bits = memory.flat.view(size.layers, 2, size.blocks * size.block, -1)
    layers = memory.form.views(size, memory.flat.view(torch.bfloat16))
    kv = PagedKV(
        [layer[0] for layer in layers],
        memory.layout,
        pool_format="planes_first",
        block_size=size.block,
        slot_mapping=tokens.tolist(),
        copy_engine=rig.engine(way),
    )
    starts = memory.starts(seed)
    slots = rig.slots(memory.layout, len(starts), "mixed")
    kv.to_slots(starts, slots)
    for start, slot in zip(starts, slots, strict=True):
        want = (
            bits[:, :, tokens[start : start + size.chunk].to(rig.device)]
            .reshape(-1)
            .view(torch.uint8)
        )
        assert torch.equal(
            torch.tensor(slot[: memory.layout.chunk_bytes]).to(rig.device), want
        )
    slots = rig.slots(memory.layout, len(starts), "mixed", fill=None)
    after = memory.flat.clone()
    own = after.view(size.layers, 2, size.blocks * size.block, -1)
    for start, slot in zip(starts, slots, strict=True):
        bytes_ = torch.tensor(slot[: memory.layout.chunk_bytes]).to(rig.device)
        own[:, :, tokens[start : start + size.chunk].to(rig.device)] = (
            bytes_.view(after.dtype).view(size.layers, 2, size.chunk, -1)
        )
    kv.from_slots(starts, slots)
    assert torch.equal(memory.flat, after)


def test_a_fork_of_tensor_types_is_named(rig: Rig) -> None:
    """KV on two devices is a sentence, not a crash."""
    from pagoda.layout import KVLayout
    from pagoda.transfer import DenseKV

    layout = KVLayout.dense(1, 1, 8, "float32", 4)
    here = torch.zeros(1, 8, 8, device=rig.device)
    meta = torch.zeros(1, 8, 8, device="meta")
    with pytest.raises(ValueError, match=r"layers\[0\]\[1\] is on meta"):
        DenseKV([(here, meta)], layout)
