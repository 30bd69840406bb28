"""PagedKV against plain slicing: every pool format, block tables, slot mappings, -1 prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.layout import KVLayout
from pagoda.transfer import DenseKV, PagedKV
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import CpuDevice

LAYERS = 2
HEADS = 2
DIM = 6
SIZE = 4
CHUNK = 8
FORMATS = ["planes_first", "blocks_first", "blocks_outermost", "plane_pools"]
# as CPU memory is copied, and as a device's is
ENGINES = [None, CopyEngine(CpuDevice())]


@dataclass
class Pools:
    """Pools of one format, and `view[layer][plane]` of each as [blocks, size, heads, dim] bytes
    over them.
    """

    given: object
    view: list[list[torch.Tensor]]

    def clone(self) -> list[list[torch.Tensor]]:
        return [[plane.clone() for plane in layer] for layer in self.view]


def make_pools(
    form: str,
    blocks: int,
    dtype: str = "bfloat16",
    seed: int = 0,
    apart: bool = False,
) -> Pools:
    random = torch.Generator().manual_seed(seed)
    element = getattr(torch, dtype)

    def some(*shape: int) -> torch.Tensor:
        wide = (
            (*shape[:-1], 2 * shape[-1]) if apart and form == "nothing" else shape
        )
        raw = torch.randint(
            0, 256, (*wide, element.itemsize), dtype=torch.uint8, generator=random
        )
        return raw.view(element).reshape(wide)

    # apart: every other block of a pool twice as large, so that nothing is contiguous
    step = 2 if apart else 1
    tail = (SIZE, HEADS, DIM)
    if form == "planes_first":
        given = [some(2, step * blocks, *tail)[:, ::step] for _ in range(LAYERS)]
        view = [[pool[0], pool[1]] for pool in given]
    elif form == "blocks_first":
        given = [some(step * blocks, 2, *tail)[::step] for _ in range(LAYERS)]
        view = [[pool[:, 0], pool[:, 1]] for pool in given]
    elif form == "blocks_outermost":
        given = some(step * blocks, LAYERS, 2, *tail)[::step]
        view = [
            [given[:, layer, plane] for plane in (0, 1)]
            for layer in range(LAYERS)
        ]
    else:
        given = [
            tuple(some(step * blocks, *tail)[::step] for _ in (0, 1))
            for _ in range(LAYERS)
        ]
        view = [list(planes) for planes in given]
    return Pools(
        given, [[plane.view(torch.uint8) for plane in layer] for layer in view]
    )


def layout_of(dtype: str = "bfloat16") -> KVLayout:
    return KVLayout.dense(
        LAYERS, HEADS, DIM, dtype, CHUNK, token_order="tokens_first"
    )


def expected(pools: Pools, places: list[int]) -> bytes:
    """A chunk's bytes, token by token: `places` are its slots, block * SIZE + offset."""
    rows = [
        plane[place // SIZE, place % SIZE].numpy().tobytes()
        for layer in pools.view
        for plane in layer
        for place in places
    ]
    return b"".join(rows)


def places_of(table: list[int]) -> list[int]:
    return [block * SIZE + offset for block in table for offset in range(SIZE)]


def check(
    form: str,
    dtype: str,
    table: list[int],
    apart: bool = False,
    threads: int = 1,
    **where,
) -> None:
    """Round trip of all whole chunks; what must change did, nothing else."""
    for engine in ENGINES:
        check_with(engine, form, dtype, table, apart, threads, **where)


def check_with(
    engine: CopyEngine | None,
    form: str,
    dtype: str,
    table: list[int],
    apart: bool,
    threads: int,
    **where,
) -> None:
    blocks = 16
    layout = layout_of(dtype)
    pools = make_pools(form, blocks, dtype, apart=apart)
    where = where or {"block_table": table}
    kwargs = {
        "pool_format": form,
        "block_size": SIZE,
        "threads": threads,
        "copy_engine": engine,
        **where,
    }
    kv = PagedKV(pools.given, layout, **kwargs)
    places = (
        where["slot_mapping"] if "slot_mapping" in where else places_of(table)
    )
    starts = list(range(0, len(places) - CHUNK + 1, CHUNK))[::-1]
    # of one memory, as a tier's
    slots = list(np.full((len(starts), layout.slot_bytes), 0xA5, np.uint8))
    kv.to_slots(starts, slots)
    for start, slot in zip(starts, slots, strict=True):
        assert slot[: layout.chunk_bytes].tobytes() == expected(
            pools, places[start : start + CHUNK]
        )
        assert (slot[layout.chunk_bytes :] == 0xA5).all()
    target = make_pools(form, blocks, dtype, seed=1, apart=apart)
    before = target.clone()
    PagedKV(target.given, layout, **kwargs).from_slots(starts, slots)
    written = set(places[: len(starts) * CHUNK])
    assert_only(target, before, pools, written, blocks)


def assert_only(
    target: Pools, before, source: Pools, written: set[int], blocks: int
) -> None:
    for layer in range(LAYERS):
        for plane in (0, 1):
            want = before[layer][plane].clone()
            for place in written:
                want[place // SIZE, place % SIZE] = source.view[layer][plane][
                    place // SIZE, place % SIZE
                ]
            assert torch.equal(target.view[layer][plane], want)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "int8"])
@pytest.mark.parametrize("form", FORMATS)
def test_block_table_round_trip(form: str, dtype: str, apart: bool) -> None:
    check(form, dtype, [7, 3, 15, 0, 9], apart=apart)


@pytest.mark.slow
@given(
    table=st.permutations(range(16)).flatmap(
        lambda ids: st.integers(2, 16).map(lambda n: ids[:n])
    )
)
def test_any_block_table_is_copied_right(table: list[int]) -> None:
    for form in FORMATS:
        check(form, "float16", table)


@pytest.mark.slow
@given(data=st.data(), form=st.sampled_from(FORMATS))
def test_any_slot_mapping_is_obeyed(data: st.DataObject, form: str) -> None:
    """Blocks, or tokens anywhere: the mapping is obeyed."""
    mapping = data.draw(st.permutations(range(16 * SIZE)))[: CHUNK + 3]
    check(form, "int8", [], slot_mapping=mapping)
    table = data.draw(st.permutations(range(16)))[:5]
    check(form, "int8", [], slot_mapping=places_of(table)[:-2])


@pytest.mark.parametrize("form", FORMATS)
def test_threads_copy_right(form: str) -> None:
    check(form, "bfloat16", [7, 3, 15, 0, 9, 2], threads=3)


@pytest.mark.parametrize("form", FORMATS)
def test_a_block_whose_slots_are_permuted_is_copied_by_token(form: str) -> None:
    """It begins and ends as a whole block does: only the order within shows the difference."""
    blocks = [
        [block * SIZE + offset for offset in range(SIZE)]
        for block in (2, 5, 1, 4)
    ]
    for block in (0, -1):
        permuted = [list(slots) for slots in blocks]
        permuted[block][1], permuted[block][2] = (
            permuted[block][2],
            permuted[block][1],
        )
        check(form, "int8", [], slot_mapping=list(chain.from_iterable(permuted)))


@pytest.mark.parametrize("kind", ["block_table", "slot_mapping", "tokens"])
@pytest.mark.parametrize("skip", [4, 8, 12, 5])
@pytest.mark.parametrize("form", FORMATS)
def test_a_prefix_of_minus_one_is_never_written_nor_read(
    form: str, skip: int, kind: str
) -> None:
    layout = layout_of()
    table = [7, 3, 15, 0]
    if kind == "block_table" and skip % SIZE:
        return  # a block table skips whole blocks only
    places = places_of(table)
    if kind == "tokens":
        places = [*places[:8], *reversed(places[8:])]
    where: dict[str, object] = {
        "slot_mapping": torch.tensor([-1] * skip + places[skip:])
    }
    if kind == "block_table":
        where = {
            "block_table": np.array(
                [-1] * (skip // SIZE) + table[skip // SIZE :], np.int32
            )
        }
    source = make_pools(form, 16)
    target = make_pools(form, 16, seed=1)
    before = target.clone()
    full = PagedKV(
        source.given,
        layout,
        pool_format=form,
        block_size=SIZE,
        slot_mapping=places,
    )
    slots = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(2)]
    full.to_slots([0, 8], slots)
    kv = PagedKV(target.given, layout, pool_format=form, block_size=SIZE, **where)
    kv.from_slots([0, 8], slots)
    assert_only(target, before, source, set(places[skip:]), 16)
    with pytest.raises(ValueError, match="-1"):
        kv.to_slots([0], slots[:1])
    again = [np.zeros(layout.slot_bytes, np.uint8)]
    if skip <= CHUNK:
        kv.to_slots([8], again)
        assert again[0].tobytes() == slots[1].tobytes()


def test_mla_has_one_plane() -> None:
    layout = KVLayout.mla(LAYERS, 10, "bfloat16", CHUNK)
    pools = [
        torch.arange(6 * SIZE * 10).reshape(6, SIZE, 10).to(torch.bfloat16) + n
        for n in range(LAYERS)
    ]
    kv = PagedKV(
        pools,
        layout,
        pool_format="plane_pools",
        block_size=SIZE,
        block_table=[5, 1, 2],
    )
    slot = np.zeros(layout.slot_bytes, np.uint8)
    kv.to_slots([4], [slot])
    want = b"".join(
        pool[[1, 2]].view(torch.uint8).numpy().tobytes() for pool in pools
    )
    assert slot[: layout.chunk_bytes].tobytes() == want
    blank = [torch.zeros_like(pool) for pool in pools]
    kv = PagedKV(
        blank,
        layout,
        pool_format="plane_pools",
        block_size=SIZE,
        block_table=[0, 3],
    )
    kv.from_slots([0], [slot])
    for new, old in zip(blank, pools, strict=True):
        assert torch.equal(new[[0, 3]], old[[1, 2]])
    for new in blank:
        assert not new[[1, 2, 4, 5]].any()


def test_k_and_v_of_different_shape_in_pools_of_their_own() -> None:
    layout = KVLayout.dense(
        1, 2, 6, "float32", CHUNK, v_head_dim=4, token_order="tokens_first"
    )
    k = torch.randn(5, SIZE, 2, 6)
    v = torch.randn(5, SIZE, 2, 4)
    kv = PagedKV(
        [(k, v)],
        layout,
        pool_format="plane_pools",
        block_size=SIZE,
        block_table=[4, 0],
    )
    slot = np.zeros(layout.slot_bytes, np.uint8)
    kv.to_slots([0], [slot])
    want = k[[4, 0]].numpy().tobytes() + v[[4, 0]].numpy().tobytes()
    assert slot[: layout.chunk_bytes].tobytes() == want


@pytest.mark.parametrize("form", FORMATS)
def test_dense_kv_finds_what_paged_kv_stored(form: str) -> None:
    layout = layout_of("float32")
    table = [7, 3, 15, 0]
    pools = make_pools(form, 16, "float32")
    slots = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(2)]
    PagedKV(
        pools.given, layout, pool_format=form, block_size=SIZE, block_table=table
    ).to_slots([0, 8], slots)
    dense = [[torch.zeros(16, HEADS, DIM) for _ in (0, 1)] for _ in range(LAYERS)]
    DenseKV(dense, layout).from_slots([0, 8], slots)
    for layer in range(LAYERS):
        for plane in (0, 1):
            got = dense[layer][plane].view(torch.uint8)
            assert torch.equal(got, pools.view[layer][plane][table].flatten(0, 1))


def test_opaque_blocks_lie_one_after_the_other() -> None:
    pool = make_pools("blocks_outermost", 16, "float32")
    each = LAYERS * 2 * SIZE * HEADS * DIM * 4
    layout = KVLayout.opaque(
        CHUNK, 2 * each, "blocks [layers, 2, 4, heads, dim] float32"
    )
    kv = PagedKV(
        pool.given,
        layout,
        pool_format="blocks_outermost",
        block_size=SIZE,
        block_table=[9, 2, 4],
    )
    slot = np.zeros(layout.slot_bytes, np.uint8)
    kv.to_slots([4], [slot])
    assert (
        slot[: layout.chunk_bytes].tobytes()
        == pool.given[[2, 4]].numpy().tobytes()
    )
    assert kv.run_bytes == each
    target = make_pools("blocks_outermost", 16, "float32", seed=1)
    want = target.given.clone()
    want[[9, 2]] = pool.given[[2, 4]]
    where = {"pool_format": "blocks_outermost", "block_size": SIZE}
    PagedKV(target.given, layout, **where, block_table=[9, 2]).from_slots(
        [0], [slot]
    )
    assert torch.equal(target.given.view(torch.int32), want.view(torch.int32))
    with pytest.raises(ValueError, match="opaque"):
        PagedKV(pool.given, layout, **where, slot_mapping=list(range(1, 17)))
    with pytest.raises(ValueError, match="opaque"):
        PagedKV(
            [pool.given],
            layout,
            pool_format="planes_first",
            block_size=SIZE,
            block_table=[0],
        )


def _paged(**changes) -> PagedKV:
    given = {
        "pools": make_pools("planes_first", 8).given,
        "layout": layout_of(),
        "pool_format": "planes_first",
    }
    given |= {"block_size": SIZE, "block_table": [1, 2]} | changes
    return PagedKV(given.pop("pools"), given.pop("layout"), **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pool_format": "rows"}, "pool_format must be one of"),
        ({"block_size": 3}, "chunk_tokens .8. must be a multiple of block_size"),
        ({"slot_mapping": [1]}, "either block_table or slot_mapping"),
        ({"block_table": None}, "either block_table or slot_mapping"),
        ({"block_table": [1, 8]}, r"block_table: 8 is not in \[0, 8\)"),
        ({"block_table": [1, -1]}, "block_table: -1"),
        ({"block_table": [-2, 1]}, "block_table: -2"),
        ({"block_table": [1, 1]}, "block_table names the same place twice"),
        ({"block_table": [[1]]}, "block_table must be 1-D"),
        ({"block_table": [0.5]}, "block_table must be 1-D integers"),
        ({"block_table": None, "slot_mapping": [0, 32]}, "slot_mapping: 32"),
        ({"block_table": None, "slot_mapping": [-1, 0, -1]}, "slot_mapping: -1"),
        ({"pools": make_pools("planes_first", 8).given[:1]}, "pools: 1 layers"),
        (
            {"pools": make_pools("blocks_first", 8).given},
            r"pools\[0\] must have the shape",
        ),
        (
            {"pools": make_pools("planes_first", 8, "float16").given},
            r"pools\[0\] is float16",
        ),
        (
            {"layout": KVLayout.dense(LAYERS, HEADS, DIM, "bfloat16", CHUNK)},
            "tokens_first",
        ),
        ({"pool_format": "plane_pools"}, r"pools\[0\] has 1 planes"),
        (
            {
                "pools": [
                    torch.zeros(
                        2, 8, HEADS, SIZE, DIM, dtype=torch.bfloat16
                    ).transpose(2, 3)
                ]
                * 2
            },
            "contiguous",
        ),
    ],
)
def test_what_does_not_match_is_named(changes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _paged(**changes)


def test_starts_must_lie_on_blocks() -> None:
    slot = [np.zeros(layout_of().slot_bytes, np.uint8)]
    with pytest.raises(ValueError, match="multiples of block_size"):
        _paged().to_slots([2], slot)
    with pytest.raises(ValueError, match="starts: the chunk"):
        _paged().to_slots([4], slot)


@pytest.mark.parametrize("form", ["planes_first", "plane_pools"])
def test_pools_of_one_address_are_stored_from_but_not_loaded_into(
    form: str,
) -> None:
    plane = torch.zeros(1, SIZE, HEADS, DIM).expand(8, SIZE, HEADS, DIM)
    pool = (
        plane.expand(2, *plane.shape) if form == "planes_first" else [plane] * 2
    )
    kv = _paged(
        pools=[pool] * LAYERS, layout=layout_of("float32"), pool_format=form
    )
    slot = np.ones(layout_of("float32").slot_bytes, np.uint8)
    kv.to_slots([0], [slot])
    assert not slot[: layout_of("float32").chunk_bytes].any()
    slot[:] = 7
    with pytest.raises(ValueError, match="several elements at one address"):
        kv.from_slots([0], [slot])
    assert not plane.any()
