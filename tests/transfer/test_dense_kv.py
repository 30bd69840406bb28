"""DenseKV against plain slicing: bit-exact, nothing else touched, and a sentence for what does not
fit.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.layout import KVLayout, Plane
from pagoda.transfer import DenseKV
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import CpuDevice

# as CPU memory is copied, and as a device's is
ENGINES = [None, CopyEngine(CpuDevice())]
POISON = 0xA5
DTYPES = ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]


def random_layers(
    layout: KVLayout, tokens: int, seed: int = 0
) -> list[list[torch.Tensor]]:
    """Random bits of each plane's dtype, [heads, tokens, dim] or tokens first."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(layout.layers):
        planes = []
        for heads, dim, dtype in layout.planes:
            shape = (
                (heads, tokens, dim)
                if layout.token_order == "heads_first"
                else (tokens, heads, dim)
            )
            element = getattr(torch, dtype)
            raw = torch.randint(
                0,
                256,
                (*shape, element.itemsize),
                dtype=torch.uint8,
                generator=random,
            )
            planes.append(raw.view(element).reshape(shape))
        found.append(planes)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def chunk_bytes_of(layers, layout: KVLayout, start: int) -> bytes:
    """The bytes that a chunk must have, by slicing alone."""
    stop = start + layout.chunk_tokens
    first = layout.token_order == "heads_first"
    return b"".join(
        bits(p[:, start:stop] if first else p[start:stop])
        for layer in layers
        for p in layer
    )


def poisoned_slots(layout: KVLayout, count: int) -> list[np.ndarray]:
    return [np.full(layout.slot_bytes, POISON, np.uint8) for _ in range(count)]


def check_round_trip(
    layout: KVLayout, layers, starts: list[int], threads: int = 1
) -> None:
    """Store and load chunks; all that must change did, bit by bit, and nothing else."""
    for engine in ENGINES if in_one_piece(layers, layout) else ENGINES[:1]:
        check_with(engine, layout, layers, starts, threads)


def in_one_piece(layers, layout: KVLayout) -> bool:
    """Whether the bytes of a token are contiguous: only then can a device copy it."""
    first = layout.token_order == "heads_first"
    return all(
        (p[0, 0] if first else p[0]).is_contiguous()
        for layer in layers
        for p in layer
    )


def check_with(
    engine: CopyEngine | None,
    layout: KVLayout,
    layers,
    starts: list[int],
    threads: int,
) -> None:
    slots = poisoned_slots(layout, len(starts))
    DenseKV(layers, layout, threads=threads, copy_engine=engine).to_slots(
        starts, slots
    )
    for start, slot in zip(starts, slots, strict=True):
        assert slot[: layout.chunk_bytes].tobytes() == chunk_bytes_of(
            layers, layout, start
        )
        assert (slot[layout.chunk_bytes :] == POISON).all()
    blank = [[poisoned_like(p) for p in layer] for layer in layers]
    DenseKV(blank, layout, threads=threads, copy_engine=engine).from_slots(
        starts, slots
    )
    axis = 1 if layout.token_order == "heads_first" else 0
    tokens = layers[0][0].shape[axis]
    loaded = torch.zeros(tokens, dtype=torch.bool)
    for start in starts:
        loaded[start : start + layout.chunk_tokens] = True
    for got, want in zip(chain(*blank), chain(*layers), strict=True):
        changed = words(got).movedim(axis, 0)
        assert torch.equal(changed[loaded], words(want).movedim(axis, 0)[loaded])
        assert (changed[~loaded] == words(poisoned_like(want)).flatten()[0]).all()


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    )


def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides, every byte POISON."""
    blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    words(blank).fill_(
        int.from_bytes(
            bytes([POISON]) * tensor.dtype.itemsize, "little", signed=True
        )
    )
    return blank


@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_is_bit_exact_and_touches_nothing_else(
    dtype: str, order: str
) -> None:
    layout = KVLayout.dense(3, 2, 24, dtype, chunk_tokens=8, token_order=order)
    check_round_trip(layout, random_layers(layout, 37), [0, 16, 8])


@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    dim=st.integers(1, 9),
    chunk=st.sampled_from([1, 3, 8]),
    extra=st.integers(0, 7),
    order=st.sampled_from(["heads_first", "tokens_first"]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    has_v=st.booleans(),
)
def test_kv_of_odd_sizes_comes_back(
    layers, heads, dim, chunk, extra, order, dtype, has_v
) -> None:
    layout = KVLayout.dense(
        layers, heads, dim, dtype, chunk, token_order=order, has_v=has_v
    )
    check_round_trip(layout, random_layers(layout, 2 * chunk + extra), [chunk])


@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
def test_v_of_another_dim_and_scales(order: str) -> None:
    layout = KVLayout.dense(
        2, 3, 16, "int8", 8, v_head_dim=4, scales="float32", token_order=order
    )
    check_round_trip(layout, random_layers(layout, 19), [8, 0])
    flat = KVLayout.of(
        2, [Plane(3, 16, "int8"), Plane(3, 1, "float32")], 8, order
    )
    layers = random_layers(flat, 19)
    slots = poisoned_slots(flat, 1)
    DenseKV([(k, scale[..., 0]) for k, scale in layers], flat).to_slots(
        [8], slots
    )
    assert slots[0][: flat.chunk_bytes].tobytes() == chunk_bytes_of(
        layers, flat, 8
    )


@pytest.mark.parametrize("absent", [(), (None,)])
def test_mla_has_one_plane_and_no_v(absent: tuple[None, ...]) -> None:
    layout = KVLayout.mla(3, 40, "bfloat16", 8)
    layers = random_layers(layout, 21)
    check_round_trip(layout, layers, [8])
    slots = poisoned_slots(layout, 1)
    DenseKV([(latent[0], *absent) for (latent,) in layers], layout).to_slots(
        [8], slots
    )
    assert slots[0][: layout.chunk_bytes].tobytes() == chunk_bytes_of(
        layers, layout, 8
    )


@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
def test_inputs_that_are_not_contiguous(order: str) -> None:
    layout = KVLayout.dense(2, 3, 10, "float32", 4, token_order=order)
    wide = KVLayout.dense(2, 3, 20, "float32", 4, token_order=order)
    every_other = [
        [p[..., ::2] for p in layer] for layer in random_layers(wide, 13)
    ]
    check_round_trip(layout, every_other, [4, 8])
    other = KVLayout.dense(
        2,
        3,
        10,
        "float32",
        4,
        token_order="heads_first" if order == "tokens_first" else "tokens_first",
    )
    swapped = [
        [p.transpose(0, 1) for p in layer] for layer in random_layers(other, 13)
    ]
    check_round_trip(layout, swapped, [0, 8])


def test_numpy_arrays_and_words_for_bfloat16() -> None:
    layout = KVLayout.dense(2, 2, 8, "bfloat16", 4)
    layers = random_layers(layout, 9)
    arrays = [[p.view(torch.int16).numpy() for p in layer] for layer in layers]
    slots = poisoned_slots(layout, 2)
    DenseKV(arrays, layout).to_slots([0, 4], slots)
    assert slots[1][: layout.chunk_bytes].tobytes() == chunk_bytes_of(
        layers, layout, 4
    )


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_copy_the_same_bytes(threads: int) -> None:
    layout = KVLayout.dense(4, 4, 64, "float32", 256)
    check_round_trip(
        layout, random_layers(layout, 600), [0, 256], threads=threads
    )
    one = KVLayout.dense(1, 1, 512, "float32", 2048)
    check_round_trip(one, random_layers(one, 2048), [0], threads=threads)


def test_no_autograd_graph_is_kept() -> None:
    layout = KVLayout.dense(1, 1, 4, "float32", 4)
    k, v = (p.clone().requires_grad_() for p in random_layers(layout, 4)[0])
    grown = k * 1.0
    kv = DenseKV([(grown, v)], layout)
    slots = poisoned_slots(layout, 1)
    kv.to_slots([0], slots)
    assert slots[0][: layout.chunk_bytes].tobytes() == bits(k) + bits(v)
    for held in kv.__dict__["_rows"]:
        assert not isinstance(held, torch.Tensor)


def test_run_bytes_are_those_of_contiguous_tokens() -> None:
    layout = KVLayout.dense(2, 4, 16, "float32", 8)
    layers = random_layers(layout, 32)
    assert DenseKV(layers, layout).run_bytes == 8 * 16 * 4
    tokens_first = KVLayout.dense(
        2, 4, 16, "float32", 8, token_order="tokens_first"
    )
    assert (
        DenseKV(random_layers(tokens_first, 32), tokens_first).run_bytes
        == 8 * 4 * 16 * 4
    )


LAYOUT = KVLayout.dense(2, 2, 8, "float32", 4)


def _freed(*shape: int) -> torch.Tensor:
    """A tensor whose memory was given back, as engines do to make room."""
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def _with(k=None, v=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    good = torch.zeros(2, 12, 8)
    return [(good, good), (good if k is None else k, good if v is None else v)]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (_with()[:1], "layers: 1 were given"),
        ([(torch.zeros(2, 12, 8),)] * 2, r"layers\[0\] has 1 planes"),
        (
            _with(k=torch.zeros(1, 2, 12, 8)),
            r"layers\[1\]\[0\] has a batch dimension",
        ),
        (
            _with(v=torch.zeros(2, 12, 8, dtype=torch.float16)),
            r"layers\[1\]\[1\] is float16, .* float32",
        ),
        (
            _with(v=torch.zeros(3, 12, 8)),
            r"layers\[1\]\[1\] must be \[heads, tokens, dim\]",
        ),
        (_with(v=torch.zeros(2, 12, 9)), r"layers\[1\]\[1\] must be"),
        (_with(v=torch.zeros(2, 11, 8)), "same number of tokens"),
        (
            _with(v=[[0.0]]),
            r"layers\[1\]\[1\] must be a tensor or a numpy array, got list",
        ),
        (_with(v=np.zeros((2, 12, 8))), r"layers\[1\]\[1\] is float64"),
        (
            _with(v=np.zeros((2, 12, 8), ">f4")),
            r"layers\[1\]\[1\] is >f4, in the byte order of other machines",
        ),
        (
            _with(v=torch.zeros(2, 12, 8, device="meta")),
            r"layers\[1\]\[1\] is on meta",
        ),
        (_with(v=_freed(2, 12, 8)), r"layers\[1\]\[1\] has no memory any more"),
        (
            _with(v=torch.zeros(2, 12, 8).to_sparse()),
            r"layers\[1\]\[1\] must be a plain strided tensor",
        ),
    ],
)
def test_what_does_not_match_is_named(layers, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseKV(layers, LAYOUT)


def test_an_opaque_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout is opaque"):
        DenseKV(_with(), KVLayout.opaque(4, 1024, "pages"))


@pytest.mark.parametrize(
    ("starts", "slots", "says"),
    [
        ([0, 4], poisoned_slots(LAYOUT, 1), "one length"),
        ([9], poisoned_slots(LAYOUT, 1), r"starts: the chunk \[9, 13\)"),
        ([-4], poisoned_slots(LAYOUT, 1), "starts"),
        ([0], [np.zeros(LAYOUT.chunk_bytes - 1, np.uint8)], "slots: one has"),
        ([0], [np.zeros(LAYOUT.slot_bytes, np.int8)], "slots must be contiguous"),
        (
            [0],
            [np.zeros(2 * LAYOUT.slot_bytes, np.uint8)[::2]],
            "slots must be contiguous",
        ),
        ([0], [np.frombuffer(bytes(LAYOUT.slot_bytes), np.uint8)], "read-only"),
    ],
)
def test_bad_calls_copy_nothing(starts, slots, says: str) -> None:
    kv = DenseKV(_with(), LAYOUT)
    before = [slot.tobytes() for slot in slots]
    with pytest.raises(ValueError, match=says):
        kv.to_slots(starts, slots)
    assert before == [slot.tobytes() for slot in slots]


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("v", "says"),
    [
        (
            torch.ones(1, 12, 8).expand(2, 12, 8),
            "several elements at one address",
        ),
        (_read_only(np.ones((2, 12, 8), np.float32)), "is read-only"),
    ],
)
def test_memory_that_cannot_keep_a_load_is_stored_from_but_not_loaded_into(
    v: torch.Tensor | np.ndarray, says: str
) -> None:
    layers = _with(v=v)
    kv = DenseKV(layers, LAYOUT)
    slots = poisoned_slots(LAYOUT, 1)
    kv.to_slots([4], slots)
    whole = [[torch.tensor(np.asarray(p)) for p in layer] for layer in layers]
    got = slots[0][: LAYOUT.chunk_bytes].tobytes()
    assert got == chunk_bytes_of(whole, LAYOUT, 4)
    slots[0][:] = POISON
    with pytest.raises(ValueError, match=rf"layers\[1\]\[1\].*{says}"):
        kv.from_slots([4], slots)
    for layer in layers:
        for plane in layer:
            assert (np.asarray(plane) != POISON).all()
    assert bits(torch.tensor(np.asarray(v))) == bits(torch.ones(2, 12, 8))
