"""Lossy codecs: what they may change, what they refuse, what they make of damaged bytes, and their
header's format.
"""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import codec
from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.codec import (
    FORMAT,
    FORMAT_LOSSY,
    HEADER_BYTES,
    LOSSY,
    Expected,
    Header,
    header,
    quantised,
)
from pagoda.layout import KVLayout, Plane

Bytes = npt.NDArray[np.uint8]
DTYPES = ("bfloat16", "float16", "float32")
HEADER = Header(
    b"s" * 16,
    3,
    b"n" * 32,
    2,
    b"k" * 32,
    7,
    5000,
    256,
    "raw",
    "0123456789abcdef",
    99,
)


def layout_of(
    dtype: str = "bfloat16",
    heads: int = 2,
    dim: int = 64,
    layers: int = 3,
    **options: object,
) -> KVLayout:
    return KVLayout.dense(
        layers, heads, dim, dtype, **{"chunk_tokens": 64, **options}
    )  # type: ignore[arg-type]


def word_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def words_of(numbers: npt.NDArray[np.float32], dtype: str) -> Bytes:
    if dtype == "bfloat16":
        return (
            ((numbers.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16))
            .astype("<u2")
            .view(np.uint8)
        )
    return numbers.astype("<f2" if dtype == "float16" else "<f4").view(np.uint8)


def numbers_of(words: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (words.view("<u2").astype(np.uint32) << np.uint32(16)).view(
            np.float32
        )
    return words.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def normal(layout: KVLayout, seed: int = 0, scale: float = 1.0) -> Bytes:
    """Return KV whose channels have offsets and sizes of their own."""
    draw = np.random.default_rng(seed)
    dtype = layout.planes[0].dtype
    numbers = draw.standard_normal(
        layout.chunk_bytes // word_bytes(dtype)
    ).astype(np.float32)
    dim = layout.planes[0].dim
    whole = numbers[: numbers.size - numbers.size % dim].reshape(-1, dim)
    whole *= np.linspace(0.1, 4, dim, dtype=np.float32)
    whole += np.linspace(-3, 3, dim, dtype=np.float32)
    return words_of(numbers * np.float32(scale), dtype)


def planes(
    payload: Bytes, layout: KVLayout
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
    """Yield layer, plane (0 K, 1 V) and its numbers as [head, token, dim]: by the layout alone."""
    dtype = layout.planes[0].dtype
    for layer in range(layout.layers):
        for plane in range(len(layout.planes)):
            begin = layout.plane_offset(layer, plane)
            numbers = numbers_of(
                payload[begin : begin + layout.plane_bytes(plane)], dtype
            )
            shaped = numbers.reshape(layout.plane_shape(plane))
            yield (
                layer,
                plane,
                shaped
                if layout.token_order == "heads_first"
                else shaped.transpose(1, 0, 2),
            )


def coded(
    name: str, payload: Bytes, layout: KVLayout
) -> tuple[str, Bytes, Bytes]:
    """Return the codec that was used, the stored bytes and the decoded ones."""
    size = word_bytes(layout.planes[0].dtype)
    used, stored = codec.encode(
        name, payload, size, np.empty(layout.chunk_bytes, np.uint8), layout=layout
    )
    back = np.full_like(payload, 0xA5)
    assert codec.decode(used, stored.copy(), size, back)
    return used, stored, back


def check_bound(name: str, payload: Bytes, layout: KVLayout, back: Bytes) -> None:
    """Compare each number with the bound: half a step of its group, and one rounding to the
    dtype.
    """
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}[
        layout.planes[0].dtype
    ]
    for (layer, plane, before), (_, _, after) in zip(
        planes(payload, layout), planes(back, layout), strict=True
    ):
        if plane:  # V by token; heads of fewer than 128 numbers together
            heads, tokens, dim = before.shape
            many = max(
                n
                for n in range(1, heads + 1)
                if heads % n == 0 and n * dim <= max(dim, 128)
            )
            together = before.reshape(heads // many, many, tokens, dim)
            low, high = (
                np.repeat(found(found(together, 3), 1), many, 0)[..., None]
                for found in (np.min, np.max)
            )
        else:  # K by channel
            low = before.min(1, keepdims=True)
            high = before.max(1, keepdims=True)
        level = quantised.levels_of(name, layout.layers, layer, plane)
        # a step has the precision of bfloat16
        step = (high.astype(np.float64) - low) / level * (1 + 2**-7)
        error = np.abs(after.astype(np.float64) - before)
        bound = (
            step / 2
            + np.maximum(np.abs(low), np.abs(high)) * unit
            + 2.0**-24 * (unit == 2.0**-11)
            + 1e-38
        )
        assert (error <= bound).all(), (
            layer,
            plane,
            float((error - bound).max()),
        )


# ---- what may change


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["heads_first", "tokens_first"])
def test_errors_keep_their_bound(name: str, dtype: str, order: str) -> None:
    layout = layout_of(dtype, token_order=order)
    payload = normal(layout)
    used, stored, back = coded(name, payload, layout)
    assert used == name
    check_bound(name, payload, layout, back)
    assert stored.nbytes < layout.chunk_bytes * (
        0.6 if name == "q8" else 0.45
    ) * 2 / word_bytes(dtype)
    assert stored.nbytes <= codec.most_bytes(name, layout)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 5),
    dim=st.integers(1, 70),
    v_dim=st.integers(1, 70),
    tokens=st.sampled_from([1, 2, 3, 8, 16, 37, 256]),
    layers=st.integers(1, 4),
    has_v=st.booleans(),
    order=st.sampled_from(["heads_first", "tokens_first"]),
    seed=st.integers(0, 99),
)
def test_kv_of_every_shape_is_within_the_error_bound(
    name: str,
    dtype: str,
    heads: int,
    dim: int,
    v_dim: int,
    tokens: int,
    layers: int,
    has_v: bool,
    order: str,
    seed: int,
) -> None:
    layout = KVLayout.dense(
        layers, heads, dim, dtype, tokens, v_dim, has_v, order
    )
    payload = normal(layout, seed)
    used, stored, back = coded(name, payload, layout)
    if used == "raw":  # too small to become smaller
        assert stored is payload
        assert np.array_equal(back, payload)
        return
    assert stored.nbytes < payload.nbytes
    check_bound(name, payload, layout, back)


@pytest.mark.slow
def test_blocks_of_planes_that_are_larger() -> None:
    """A plane is cut into blocks at heads, at channels and at rows."""
    for layout in (
        KVLayout.dense(1, 5, 128, "bfloat16", 1024),
        KVLayout.dense(1, 5, 128, "bfloat16", 1024, token_order="tokens_first"),
        KVLayout.dense(1, 1, 512, "float32", 2048),
        KVLayout.mla(2, 576, "bfloat16", 1024),
    ):
        payload = normal(layout)
        for name in LOSSY:
            used, _, back = coded(name, payload, layout)
            assert used == name
            check_bound(name, payload, layout, back)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-39, 6e-8, 1e-5, 1e30])
def test_constants_subnormals_and_large_numbers(
    name: str, dtype: str, scale: float
) -> None:
    if dtype == "float16" and scale > 1e4:
        scale = 1000.0
    layout = layout_of(dtype)
    payload = normal(layout, scale=scale)
    used, _, back = coded(name, payload, layout)
    assert used == name
    check_bound(name, payload, layout, back)


@pytest.mark.parametrize("name", LOSSY)
def test_a_constant_channel_is_exact(name: str) -> None:
    layout = layout_of("float16")
    payload = np.tile(
        words_of(np.linspace(-7, 9, 64, dtype=np.float32), "float16"),
        layout.chunk_bytes // 128,
    )
    _, _, back = coded(name, payload, layout)
    for (_, plane, before), (_, _, after) in zip(
        planes(payload, layout), planes(back, layout), strict=True
    ):
        assert plane == 1 or np.array_equal(before, after)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 5000, -1])
def test_what_is_not_finite_stays_exact(
    name: str, dtype: str, odd: float, where: int
) -> None:
    layout = layout_of(dtype)
    numbers = numbers_of(normal(layout), dtype).copy()
    payload = words_of(numbers, dtype)
    size = word_bytes(dtype)
    strange = {2: np.float16(odd).view("<u2"), 4: np.float32(odd).view("<u4")}[
        size
    ]
    if dtype == "bfloat16":
        strange = np.uint16(np.float32(odd).view(np.uint32) >> 16)
    payload.view("<u2" if size == 2 else "<u4")[where] = strange
    used, stored, back = coded(name, payload, layout)
    assert used == "raw"
    assert stored is payload
    assert np.array_equal(back, payload)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_never_become_infinite(dtype: str) -> None:
    largest = {
        "bfloat16": 3.3895314e38,
        "float16": 65504.0,
        "float32": np.finfo(np.float32).max,
    }[dtype]
    layout = layout_of(dtype)
    numbers = numbers_of(normal(layout), dtype).copy()
    for extreme in (largest, -largest):
        numbers[100] = extreme
        payload = words_of(numbers, dtype)
        for name in LOSSY:
            used, _, back = coded(name, payload, layout)
            assert np.isfinite(numbers_of(back, dtype)).all()
            assert used != "raw" or np.array_equal(back, payload)


def test_early_layers_get_more_levels() -> None:
    levels = [
        [quantised.levels_of("qzstd", 32, layer, plane) for layer in range(32)]
        for plane in (0, 1)
    ]
    for each in levels:
        assert each == sorted(each, reverse=True)
        assert each[0] > each[-1]
    for k, v in zip(*levels, strict=True):
        assert k >= v
    assert quantised.levels_of("qzstd", 1, 0, 0) == levels[0][0]


def test_what_a_tier_would_give_back() -> None:
    layout = layout_of()
    payload = normal(layout)
    for name in LOSSY:
        decoded, nbytes = codec.approximated(name, payload, layout)
        _, stored, back = coded(name, payload, layout)
        assert nbytes == stored.nbytes
        assert np.array_equal(decoded, back)
    for name in ("raw", "zstd"):
        assert np.array_equal(
            codec.approximated(name, payload, layout)[0], payload
        )


def test_many_threads_share_nothing() -> None:
    def work(seed: int) -> bool:
        layout = layout_of(DTYPES[seed % 3])
        payload = normal(layout, seed)
        name = LOSSY[seed % len(LOSSY)]
        check_bound(name, payload, layout, coded(name, payload, layout)[2])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


# ---- what is refused


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (KVLayout.opaque(16, 4096, "pages"), "opaque"),
        (KVLayout.dense(2, 2, 64, "float8_e4m3fn"), "float8_e4m3fn"),
        (KVLayout.dense(2, 2, 64, "uint8", scales="float32"), "uint8"),
        (
            KVLayout.dense(2, 2, 64, "bfloat16", scales="float32"),
            "bfloat16, bfloat16, float32, float32",
        ),
        (
            KVLayout.of(2, [Plane(2, 64, "bfloat16"), Plane(2, 64, "float32")]),
            "two",
        ),
        (KVLayout.dense(2, 2, 64, "float64"), "float64"),
    ],
)
def test_layouts_that_are_refused_in_one_sentence(
    layout: KVLayout, why: str
) -> None:
    for name in LOSSY:
        with pytest.raises(ConfigError, match=why) as refusal:
            codec.require_layout(name, layout)
        assert str(refusal.value).count(". ") == 0
        assert "use codec=zstd" in str(refusal.value)
        with pytest.raises(ValueError, match=why):
            codec.encode(
                name,
                np.zeros(layout.chunk_bytes, np.uint8),
                2,
                np.empty(9, np.uint8),
                layout=layout,
            )
    codec.require_layout("zstd", layout)
    codec.require_layout("raw", layout)


def test_a_lossy_codec_needs_the_layout() -> None:
    payload = normal(layout_of())
    for wrong in (None, layout_of(layers=2)):
        with pytest.raises(ValueError, match="needs the layout"):
            codec.encode("q4", payload, 2, np.empty_like(payload), layout=wrong)


def test_too_little_room_is_raw() -> None:
    layout = layout_of()
    payload = normal(layout)
    for name in LOSSY:
        need = coded(name, payload, layout)[1].nbytes
        for room in (0, 1, 33, need // 2, need - 1):
            used, stored = codec.encode(
                name, payload, 2, np.empty(room, np.uint8), layout=layout
            )
            assert used == "raw"
            assert stored is payload
        assert (
            codec.encode(
                name, payload, 2, np.empty(need, np.uint8), layout=layout
            )[0]
            == name
        )


# ---- damaged and hostile bytes


@pytest.mark.parametrize("name", LOSSY)
def test_truncated_and_longer_bytes_are_no_encoding(name: str) -> None:
    layout = layout_of(layers=1)
    payload = normal(layout)
    _, stored, back = coded(name, payload, layout)
    for end in [*range(60), *range(60, stored.nbytes, 501), stored.nbytes - 1]:
        assert not codec.decode(name, stored[:end], 2, back)
    assert not codec.decode(name, np.append(stored, np.uint8(0)), 2, back)
    assert not codec.decode(name, stored, 4, back)
    assert not codec.decode(name, stored, 2, back[:-2])
    assert codec.decode(name, stored, 2, back)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(LOSSY),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 8),
    early=st.booleans(),
)
def test_no_damage_raises_or_reaches_other_memory(
    name: str, seed: int, count: int, early: bool
) -> None:
    layout = layout_of(layers=2, dim=16)
    payload = normal(layout)
    stored = coded(name, payload, layout)[1].copy()
    draw = np.random.default_rng(seed)
    places = draw.integers(0, 60 if early else stored.nbytes, count)
    stored[places] = draw.integers(0, 256, count)
    room = np.full(payload.nbytes + 64, 0xA5, np.uint8)
    codec.decode(name, stored, 2, room[32:-32])
    assert (room[:32] == 0xA5).all()
    assert (room[-32:] == 0xA5).all()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400), name=st.sampled_from(LOSSY))
def test_any_bytes_are_refused_or_decoded(data: bytes, name: str) -> None:
    assert not codec.decode(
        name, np.frombuffer(data, np.uint8), 2, np.empty(4096, np.uint8)
    )


@pytest.mark.parametrize(
    "numbers",
    [
        (2**32 - 1,) * 8,  # a product of 2^256
        (1, 1, 2**31, 1, 0, 0, 0, 0),
        (2048, 1, 1, 1, 0, 0, 0, 0),
        (4097, 1, 1, 1, 0, 0, 0, 0),
        (0, 1, 1, 2048, 0, 0, 0, 0),
        (1, 0, 0, 0, 1, 1, 1, 2048),
        (1, 1, 1, 1024, 2**32 - 1, 0, 1, 1),
        (1, 1, 1, 1024, 0, 0, 0, 1024),
        (1, 1, 1, 1024, 1, 1024, 1, 1),
        (1, 1, 1, 1024, 1024, 1, 1, 1),
        (1, 1, 1, 1024, 1, 1, 1024, 1),
        (1, 2048, 1, 1, 0, 0, 0, 0),
        (1, 1, 64, 64, 0, 0, 0, 0),
        (1, 1, 4, 4, 0, 0, 0, 0),
        (1, 1, 32, 32, 1, 1, 32, 33),
    ],
)
def test_hostile_headers_cost_no_memory_and_no_time(
    numbers: tuple[int, ...],
) -> None:
    """Their sizes are compared with the payload's before anything is made of them."""
    began = time.process_time()
    for planes_ in (1, 2, 255):
        head = struct.pack("<BBBB8I", 1, 2, 0, planes_, *numbers)
        stored = np.frombuffer(head + bytes([15]) * 10_000, np.uint8)
        ok = codec.decode("q4", stored, 2, np.empty(4096, np.uint8))
        layers, *k = numbers[:4]
        assert not ok or layers * (math.prod(k) + math.prod(numbers[4:])) == 2048
    assert time.process_time() - began < 20


def test_a_frame_that_is_larger_than_its_block() -> None:
    """A zstd bomb is refused by the size that it states, before it is decoded."""
    import zstandard

    layout = KVLayout.dense(1, 1, 64, "bfloat16", 64, has_v=False)
    head = struct.pack("<BBBB8I", 1, 2, 0, 1, 1, 1, 64, 64, 0, 0, 0, 0) + bytes(
        [255]
    )
    for size in (1 << 26, 64 * 64 + 1, 64 * 64 - 1):
        frame = zstandard.ZstdCompressor().compress(bytes(size))
        block = bytes(64 * 4) + struct.pack("<BI", 1, len(frame)) + frame
        stored = np.frombuffer(head + block, np.uint8)
        assert not codec.decode(
            "qzstd", stored, 2, np.empty(layout.chunk_bytes, np.uint8)
        )
    frame = zstandard.ZstdCompressor().compress(bytes(64 * 64))
    block = bytes(64 * 4) + struct.pack("<BI", 1, len(frame)) + frame
    stored = np.frombuffer(head + block, np.uint8)
    assert codec.decode(
        "qzstd", stored, 2, np.empty(layout.chunk_bytes, np.uint8)
    )


def test_a_frame_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk may say that it is of "q4", which needs no zstandard, and have a frame all the
    same.
    """
    layout = KVLayout.dense(1, 2, 64, "bfloat16", 64)
    _, stored, _ = coded("qzstd", normal(layout), layout)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    payload = np.empty(layout.chunk_bytes, np.uint8)
    with ThreadPoolExecutor(1) as new_thread:  # one without zstd's contexts
        assert not new_thread.submit(
            codec.decode, "q4", stored.copy(), 2, payload
        ).result(60)


# ---- the header


def sealed(
    name: str, payload: Bytes, layout: KVLayout
) -> tuple[Header, Bytes, Bytes]:
    used, stored = codec.encode(
        name, payload, 2, np.empty_like(payload), layout=layout
    )
    described = HEADER._replace(
        codec=used,
        length=payload.nbytes,
        stored_bytes=0 if used == "raw" else stored.nbytes,
    )
    page = codec.seal(described, stored if used in LOSSY else payload)
    return described, page, stored


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_stored_chunk_is_restored_or_fails(name: str) -> None:
    layout = layout_of(layers=1, dim=16)
    payload = normal(layout)
    described, page, stored = sealed(name, payload, layout)
    back = np.zeros(payload.nbytes + 10, np.uint8)
    assert codec.restore(page, stored, described, 2, back) is None
    assert np.array_equal(
        back[: payload.nbytes], codec.approximated(name, payload, layout)[0]
    )
    # as a slot of a disk has it
    longer = np.append(stored, np.zeros(50, np.uint8))
    assert codec.restore(page, longer, described, 2, back) is None
    assert (
        codec.restore(page, stored[:-1], described, 2, back)
        is Reason.FAILED_CHECK
    )
    assert (
        codec.restore(page, stored, described, 2, back[: payload.nbytes - 1])
        is Reason.FAILED_CHECK
    )
    assert (
        codec.restore(page, stored, Expected(key=b"x" * 32), 2, back)
        is Reason.FAILED_CHECK
    )
    damaged = stored.copy()
    for at in range(0, stored.nbytes, 97):
        damaged[at] ^= 1
        assert (
            codec.restore(page, damaged, described, 2, back)
            is Reason.FAILED_CHECK
        ), at
        damaged[at] ^= 1
    assert codec.restore(page, damaged, described, 2, back) is None


@pytest.mark.parametrize("name", LOSSY)
def test_the_checksum_of_a_lossy_chunk_is_over_the_stored_bytes(
    name: str,
) -> None:
    """Every flipped bit of them is found, before they are decoded."""
    layout = layout_of(layers=1, dim=16)
    described, page, stored = sealed(name, normal(layout), layout)
    assert codec.verify(page, stored, described) is None
    assert codec.verify(page, stored[:-1], described) is Reason.FAILED_CHECK
    stored = stored.copy()
    for at in range(stored.nbytes):
        stored[at] ^= 1 << at % 8
        assert codec.verify(page, stored, described) is Reason.FAILED_CHECK, at
        stored[at] ^= 1 << at % 8
    with pytest.raises(ValueError, match="the payload has"):
        codec.seal(described._replace(stored_bytes=0), stored)


def format_of(page: Bytes) -> int:
    return int(struct.unpack_from("<I", page.data, 8)[0])


def test_only_lossy_chunks_have_the_new_format() -> None:
    """What older versions can read is written as they read it."""
    layout = layout_of(layers=1, dim=16)
    formats = {
        name: format_of(sealed(name, normal(layout), layout)[1])
        for name in codec.CODECS
    }
    assert formats == {
        "raw": FORMAT,
        "zstd": FORMAT,
        **dict.fromkeys(LOSSY, FORMAT_LOSSY),
    }


def test_a_version_without_the_format_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds a sound header of another format, which it leaves alone: `parse` of such a version
    knows one format.
    """
    layout = layout_of(layers=1, dim=16)
    described, page, stored = sealed("q4", normal(layout), layout)
    monkeypatch.setattr(header, "FORMAT_LOSSY", FORMAT)
    monkeypatch.setattr(header, "CODECS", ("raw", "zstd"))
    assert codec.parse(page) is None
    assert codec.is_foreign(page)
    assert codec.verify(page, stored, described) is Reason.FAILED_CHECK


def test_a_format_and_a_codec_that_disagree_are_foreign() -> None:
    layout = layout_of(layers=1, dim=16)
    for name, wrong in (("raw", FORMAT_LOSSY), ("q4", FORMAT)):
        described, page, stored = sealed(name, normal(layout), layout)
        struct.pack_into("<I", page.data, 8, wrong)
        page[header._OWN] = np.frombuffer(
            header._own_checksum(page.data), np.uint8
        )
        assert codec.parse(page) is None
        assert codec.is_foreign(page)
        assert (
            codec.restore(
                page, stored, described, 2, np.empty(layout.chunk_bytes, np.uint8)
            )
            is not None
        )
    assert page.nbytes == HEADER_BYTES


def test_settings_differ_by_all_that_changes_numbers() -> None:
    settings_ = {
        str(codec.codec_setting(name, tokens))
        for name in LOSSY
        for tokens in (16, 256)
    }
    assert len(settings_) == 6
    assert codec.codec_setting("q4", 256).options["version"] == quantised.VERSION
