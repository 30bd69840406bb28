from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES, Expected, Header, parse, seal, verify

U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    store_id=st.binary(min_size=16, max_size=16),
    slot=U64,
    namespace=st.binary(min_size=32, max_size=32),
    epoch=U64,
    key=st.binary(min_size=32, max_size=32),
    position=U64,
    length=st.integers(0, 300),
    tokens=U64,
    codec=st.just("raw"),
    fingerprint=st.text("0123456789abcdef", max_size=32),
    sequence=U64,
    stored_bytes=U64,
    parent=st.one_of(
        st.just(b""), st.binary(min_size=32, max_size=32).filter(any)
    ),
)
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


def payload_of(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@given(header=HEADERS, seed=st.integers(0, 1000), slack=st.integers(0, 50))
def test_a_sealed_header_is_parsed_and_verified(
    header: Header, seed: int, slack: int
) -> None:
    payload = payload_of(header.length + slack, seed)
    page = seal(header, payload)
    assert page.shape == (HEADER_BYTES,)
    assert page.ctypes.data % 4096 == 0
    assert parse(page) == header
    assert parse(page.tobytes()) == header
    assert verify(page, payload, header) is None
    assert verify(page, payload, Expected()) is None
    payload[header.length :] ^= 0xFF  # bytes after the length are not part of it
    assert (
        verify(page, payload, Expected(key=header.key, sequence=header.sequence))
        is None
    )


def test_every_flipped_byte_of_the_header_is_detected() -> None:
    payload = payload_of(5000)
    page = seal(HEADER, payload)
    for at in range(HEADER_BYTES):
        page[at] ^= 1 << (at % 8)
        assert parse(page) is None, at
        assert verify(page, payload, Expected()) is Reason.FAILED_CHECK, at
        page[at] ^= 1 << (at % 8)
    assert verify(page, payload, HEADER) is None


def test_every_flipped_byte_of_the_payload_is_detected() -> None:
    payload = payload_of(5000)
    page = seal(HEADER, payload)
    for at in range(5000):
        payload[at] ^= 1 << (at % 8)
        assert verify(page, payload, Expected()) is Reason.FAILED_CHECK, at
        payload[at] ^= 1 << (at % 8)
    assert parse(page) == HEADER


@pytest.mark.slow
@settings(max_examples=200)
@given(stored=HEADERS, asked=HEADERS, seed=st.integers(0, 100))
def test_every_field_is_compared(
    stored: Header, asked: Header, seed: int
) -> None:
    payload = payload_of(stored.length, seed)
    page = seal(stored, payload)
    for name, value in asked._asdict().items():
        same = value == getattr(stored, name)
        expected = None if same else Reason.FAILED_CHECK
        assert verify(page, payload, stored._replace(**{name: value})) is expected
        assert verify(page, payload, Expected(**{name: value})) is expected


@given(header=HEADERS)
def test_swapped_payload_is_detected(header: Header) -> None:
    header = header._replace(length=300)
    page = seal(header, payload_of(300, 1))
    assert verify(page, payload_of(300, 2), header) is Reason.FAILED_CHECK


def test_payload_checksum_covers_the_header() -> None:
    """Two good headers with one payload: the payload's checksum of one does not pass under the
    other.
    """
    payload = payload_of(5000)
    one = seal(HEADER, payload)
    two = seal(HEADER._replace(slot=4), payload)
    assert not np.array_equal(one[:400], two[:400])
    differing = np.flatnonzero(one != two)
    # the slot, nearly all of the 16 and of the 8 checksum bytes
    assert len(differing) >= 1 + 12 + 6


def test_unknown_codec_and_missing_bytes_fail() -> None:
    payload = payload_of(5000)
    page = seal(HEADER._replace(codec="later"), payload)
    header = parse(page)
    assert header is not None
    assert header.codec == "later"
    assert verify(page, payload, Expected()) is Reason.FAILED_CHECK
    page = seal(HEADER, payload)
    assert verify(page, payload[:4999], Expected()) is Reason.FAILED_CHECK


@given(
    st.binary(max_size=64)
    | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)
)
def test_foreign_pages_are_not_ours(page: bytes) -> None:
    assert parse(page) is None


def test_zeros_are_not_ours() -> None:
    assert parse(bytes(HEADER_BYTES)) is None


def test_out_is_used_and_cleaned() -> None:
    payload = payload_of(5000)
    out = np.full(HEADER_BYTES, 0xAA, dtype=np.uint8)
    assert seal(HEADER, payload, out) is out
    assert np.array_equal(out, seal(HEADER, payload))


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"store_id": b""},
        {"namespace": b"n" * 33},
        {"slot": -1},
        {"sequence": 2**64},
        {"codec": "c" * 17},
        {"fingerprint": "f" * 33},
        {"fingerprint": "a\0"},
        {"length": 5001},
    ],
)
def test_fields_that_do_not_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        seal(HEADER._replace(**change), payload_of(5000))


def test_out_of_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        seal(HEADER, payload_of(5000), np.zeros(100, dtype=np.uint8))
