"""Layouts: sizes, offsets and fingerprints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.layout import ITEMSIZE, KVLayout, Plane, Rotary, TokenOrder, itemsize

GIB = 2**30


def test_how_many_tokens_fit_in_64_gib() -> None:
    """Llama-3.1-8B in bfloat16: 128 KiB a token, so 64 GiB hold 524,288 tokens."""
    layout = KVLayout.dense(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert layout.chunk_bytes == layout.slot_bytes == 32 * 2**20
    assert layout.slots_in(64 * GIB) == 2048
    assert layout.tokens_in(64 * GIB) == 524_288
    assert layout.tokens_in(64 * GIB - 1) == 524_288 - 256
    assert layout.tokens_in(0) == layout.tokens_in(-1) == 0


def test_slots_are_rounded_up_to_a_page() -> None:
    assert KVLayout.opaque(16, 1, "x").slot_bytes == 4096
    assert KVLayout.opaque(16, 4096, "x").slot_bytes == 4096
    assert KVLayout.opaque(16, 4097, "x").slot_bytes == 8192


def test_k_and_v_of_different_shape() -> None:
    layout = KVLayout.dense(3, 2, 192, "float16", chunk_tokens=16, v_head_dim=128)
    k = 2 * 192 * 16 * 2
    v = 2 * 128 * 16 * 2
    assert [layout.plane_bytes(p) for p in range(2)] == [k, v]
    assert layout.layer_bytes == k + v
    assert layout.plane_offset(2, 1) == 2 * (k + v) + k
    assert layout.plane_shape(0) == (2, 16, 192)
    assert layout.plane_shape(1) == (2, 16, 128)


def test_a_layout_without_v_has_one_plane() -> None:
    layout = KVLayout.dense(3, 2, 64, "float32", chunk_tokens=16, has_v=False)
    assert layout.planes == (Plane(2, 64, "float32"),)
    assert layout.chunk_bytes == 3 * 2 * 64 * 16 * 4


def test_a_plane_with_tokens_first_has_that_shape() -> None:
    layout = KVLayout.dense(
        1, 2, 64, "float32", chunk_tokens=16, token_order="tokens_first"
    )
    assert layout.plane_shape(0) == (16, 2, 64)


def test_latent_attention_is_one_plane() -> None:
    layout = KVLayout.mla(61, 576, "bfloat16")
    assert layout.chunk_bytes == 61 * 576 * 256 * 2
    assert layout.plane_shape(0) == (1, 256, 576)


def test_quantised_kv_travels_with_its_scales() -> None:
    layout = KVLayout.dense(
        2, 4, 64, "float8_e4m3fn", chunk_tokens=16, scales="float32"
    )
    assert layout.planes == (
        *[Plane(4, 64, "float8_e4m3fn")] * 2,
        *[Plane(4, 1, "float32")] * 2,
    )
    assert layout.plane_offset(1, 2) == layout.layer_bytes + 2 * 4 * 64 * 16
    assert layout.layer_bytes == 2 * 4 * 64 * 16 + 2 * 4 * 16 * 4


def test_an_odd_chunk_of_mixed_types_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        KVLayout.of(
            2, [Plane(1, 1, "int8"), Plane(1, 1, "float32")], chunk_tokens=3
        )
    # the second layer would be odd
    with pytest.raises(ValueError, match="multiple of 8"):
        KVLayout.of(
            2, [Plane(1, 1, "float32"), Plane(1, 1, "int8")], chunk_tokens=3
        )


def test_item_sizes_are_those_of_numpy_and_torch() -> None:
    assert itemsize("bfloat16") == 2
    for name in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
    ):
        assert itemsize(name) == np.dtype(name).itemsize
    import torch

    for name, size in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size
    with pytest.raises(ValueError, match="uint8"):
        itemsize("int4")


planes = st.lists(
    st.builds(
        Plane,
        st.integers(1, 4),
        st.integers(1, 9),
        st.sampled_from(sorted(ITEMSIZE)),
    ),
    min_size=1,
    max_size=4,
)
orders: st.SearchStrategy[TokenOrder] = st.sampled_from(
    ["heads_first", "tokens_first"]
)


@given(st.integers(1, 5), planes, st.sampled_from([8, 16, 256]), orders)
def test_planes_cover_the_chunk_exactly_once(
    layers: int, parts: list[Plane], chunk_tokens: int, order: TokenOrder
) -> None:
    layout = KVLayout.of(layers, parts, chunk_tokens, order)
    at = 0
    for layer in range(layers):
        for plane, part in enumerate(parts):
            assert layout.plane_offset(layer, plane) == at
            assert at % itemsize(part.dtype) == 0
            shape = layout.plane_shape(plane)
            assert int(np.prod(shape)) * itemsize(
                part.dtype
            ) == layout.plane_bytes(plane)
            at += layout.plane_bytes(plane)
    assert at == layout.chunk_bytes <= layout.slot_bytes < at + 4096


@given(st.integers(1, 3), planes, orders, st.integers(1, 3), planes, orders)
def test_another_format_is_another_fingerprint(
    layers: int,
    parts: list[Plane],
    order: TokenOrder,
    others: int,
    other_parts: list[Plane],
    other: TokenOrder,
) -> None:
    one = KVLayout.of(layers, parts, 8, order)
    two = KVLayout.of(others, other_parts, 8, other)
    assert (one == two) == (one.fingerprint == two.fingerprint)


def test_different_opaque_layouts_have_different_fingerprints() -> None:
    found = {
        KVLayout.opaque(16, 4096, "a").fingerprint,
        KVLayout.opaque(16, 4096, "b").fingerprint,
        KVLayout.opaque(16, 8192, "a").fingerprint,
        KVLayout.opaque(32, 4096, "a").fingerprint,
    }
    assert len(found) == 4


def test_a_layout_may_name_the_rotary_embedding() -> None:
    """Where K is moved to other positions, other angles are other KV; elsewhere nothing changes."""
    plain = KVLayout.dense(2, 2, 64, "float16", chunk_tokens=16)
    rotary = Rotary(1e4, 64, "")
    named = plain.with_rotary(rotary)
    assert named.rotary == rotary
    assert plain.rotary is None
    assert replace(named, fingerprint=plain.fingerprint, rotary=None) == plain
    others = [
        rotary._replace(theta=5e5),
        rotary._replace(dims=32),
        rotary._replace(scaling="yarn"),
    ]
    assert (
        len(
            {
                plain.fingerprint,
                *(
                    plain.with_rotary(one).fingerprint
                    for one in (rotary, *others)
                ),
            }
        )
        == 5
    )
    for dims in (0, 63, 66):
        with pytest.raises(ValueError, match="even number of at most 64"):
            plain.with_rotary(rotary._replace(dims=dims))
    with pytest.raises(ValueError, match="opaque"):
        KVLayout.opaque(16, 4096, "a").with_rotary(rotary)


def test_fingerprints_are_those_of_earlier_versions() -> None:
    """A change here makes every store on disk another layout's: say so in the changelog."""
    assert (
        KVLayout.dense(32, 8, 128, "bfloat16").fingerprint == "32a24c7522255041"
    )
    assert KVLayout.opaque(16, 4096, "a").fingerprint == "5c775bd62c6dcc04"


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVLayout.dense(0, 8, 128, "bfloat16"),
        lambda: KVLayout.dense(1, 0, 128, "bfloat16"),
        lambda: KVLayout.dense(1, 8, 0, "bfloat16"),
        lambda: KVLayout.dense(1, 8, 128, "bf16"),
        lambda: KVLayout.dense(1, 8, 128, "bfloat16", chunk_tokens=0),
        lambda: KVLayout.dense(1, 8, 128, "bfloat16", token_order="sideways"),  # type: ignore[arg-type]
        lambda: KVLayout.of(1, []),
        lambda: KVLayout.opaque(16, 0, "x"),
        lambda: KVLayout.opaque(16, 4096, ""),
        lambda: KVLayout.opaque(True, 4096, "x"),
        lambda: KVLayout(16, 4096, "../../etc"),
        lambda: replace(KVLayout.mla(1, 64, "int8"), chunk_bytes=1),
        lambda: replace(KVLayout.mla(1, 64, "int8"), layers=0),
        lambda: KVLayout.mla(1, 64, "int8").plane_offset(1, 0),
        lambda: KVLayout.mla(1, 64, "int8").plane_shape(1),
        lambda: KVLayout.opaque(16, 4096, "x").plane_bytes(0),
    ],
)
def test_what_contradicts_itself_is_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]
