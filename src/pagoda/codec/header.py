"""The header and the checksum of a chunk outside memory. Pure functions; thread-safe.

There are two formats. They differ in what the checksum covers: in format 1 the payload as the
engine had it, in format 2 the stored bytes, because a lossy codec does not restore the payload.
Chunks of lossless codecs have format 1, so that versions that know no other can read them; for such
versions, a chunk of format 2 is another version's: a miss that stays in the store.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from pagoda.base.metrics import Reason

HEADER_BYTES = 4096
MAGIC = b"PAGODAKV"
LOSSLESS = ("raw", "zstd")
LOSSY = ("q8", "q4", "qzstd")
CODECS = (*LOSSLESS, *LOSSY)  # how the payload of a header may be stored
FORMAT = 1
FORMAT_LOSSY = 2

# magic, format, header bytes; store_id, slot, namespace, epoch, key;
# position, length, tokens; codec, fingerprint, sequence
_FIELDS = struct.Struct("<8sII16sQ32sQ32sQQQ16s32sQ")
# xxh3_128 over the packed fields, and payload or stored bytes
_CHECKSUM = slice(_FIELDS.size, _FIELDS.size + 16)
# xxh3_64 over all other bytes of the page
_OWN = slice(_CHECKSUM.stop, _CHECKSUM.stop + 8)
_LAST = struct.Struct("<Q32s")  # stored_bytes and parent, after the checksums
_NO_PARENT = bytes(32)
# of store_id, namespace, key and parent
_SIZES = (16, 32, 32, 32)
_CODEC_BYTES = 16
_FINGERPRINT_BYTES = 32

Page = npt.NDArray[np.uint8] | memoryview | bytes
_Values: TypeAlias = tuple[int | str | bytes, ...]


class Header(NamedTuple):
    """The header of a stored chunk.

    `length` is in payload bytes, `position` in chunks from the start of the chain; `sequence` is
    the generation of the slot in the ledger; `fingerprint` is the layout's. Bytes: store 16, others
    32. `stored_bytes` is the length of the payload in its codec; 0 if that equals `length`.
    `parent` is the key before it in the chain: empty for the first, on disk, and where another
    version wrote the header.
    """

    store_id: bytes
    slot: int
    namespace: bytes
    epoch: int
    key: bytes
    position: int
    length: int
    tokens: int
    codec: str
    fingerprint: str
    sequence: int
    stored_bytes: int = 0
    parent: bytes = b""

    @property
    def checked_bytes(self) -> int:
        """The number of bytes that the checksum covers: of the payload, or with a lossy codec of
        the stored form.
        """
        return self.stored_bytes if self.codec in LOSSY else self.length


class Expected(NamedTuple):
    """What a reader expects of a stored chunk; None: any value."""

    store_id: bytes | None = None
    slot: int | None = None
    namespace: bytes | None = None
    epoch: int | None = None
    key: bytes | None = None
    position: int | None = None
    length: int | None = None
    tokens: int | None = None
    codec: str | None = None
    fingerprint: str | None = None
    sequence: int | None = None
    stored_bytes: int | None = None
    parent: bytes | None = None


_NAMES = Header._fields
# A reader compares the values of a header in this order, without making a `Header`.
assert Expected._fields == _NAMES
_CODEC = _NAMES.index("codec")
_LENGTH = _NAMES.index("length")
_STORED = _NAMES.index("stored_bytes")


def seal(
    header: Header,
    data: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the header page (4096,) of `data[:header.checked_bytes]`, page-aligned; written into
    `out` if given.

    `data` is the payload; with a lossy codec, the stored bytes. It is read once, with the GIL
    released. Raises ValueError for fields that do not fit the format.
    """
    packed = _pack(header)
    if data.nbytes < header.checked_bytes or (
        header.codec in LOSSY and not header.stored_bytes
    ):
        raise ValueError(
            f"the payload has {data.nbytes} bytes, the header says {header.checked_bytes}"
        )
    page = _new_page() if out is None else out
    if page.shape != (HEADER_BYTES,):
        raise ValueError(
            f"a header page has {HEADER_BYTES} bytes, got shape {page.shape}"
        )
    head = packed + _data_checksum(packed, data, header.checked_bytes)
    page[:] = 0
    view = page.data
    view[: len(head)] = head
    _LAST.pack_into(view, _OWN.stop, header.stored_bytes, header.parent)
    view[_OWN] = _own_checksum(view)
    return page


def parse(page: Page) -> Header | None:
    """Return the header in `page`, or None if it is not PagodaKV's or a byte of it is damaged;
    needs no payload.
    """
    values = _parsed(_view(page))
    return None if values is None else Header(*values)  # type: ignore[arg-type]


def _parsed(view: memoryview) -> _Values | None:
    """Return the values of the header in a page, in the order of its fields."""
    if not _is_whole(view):
        return None
    _, format_, size, *numbers, codec, layout, sequence = _FIELDS.unpack_from(
        view
    )
    if format_ not in (FORMAT, FORMAT_LOSSY) or size != HEADER_BYTES:
        return None
    try:
        names = codec.rstrip(b"\0").decode(), layout.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    if (format_ == FORMAT_LOSSY) != (names[0] in LOSSY):
        return None
    stored, parent = _LAST.unpack_from(view, _OWN.stop)
    return (
        *numbers,
        *names,
        sequence,
        stored,
        b"" if parent == _NO_PARENT else parent,
    )


def is_foreign(page: Page) -> bool:
    """Whether `page` is a complete header that this version cannot read: of another format, or with
    an unknown codec.

    The magic number and the checksum of the page have the same place in every format.
    """
    if not _is_whole(_view(page)):
        return False
    found = parse(page)
    return found is None or found.codec not in CODECS


def agrees(found: Header, expected: Header | Expected) -> bool:
    """Whether a header has all values of `expected`, and a known codec. Does not check the
    payload.
    """
    return _agree(found, expected)


def _agree(found: _Values, expected: Header | Expected) -> bool:
    if found[_CODEC] not in CODECS:
        return False
    for want, value in zip(expected, found, strict=True):
        if want is not None and want != value:
            return False
    return True


def verify(
    page: Page, data: npt.NDArray[np.uint8], expected: Header | Expected
) -> Reason | None:
    """Return None if page and data are undamaged and the header has all values of `expected`; else
    FAILED_CHECK.

    `data` is the payload; with a lossy codec, the stored bytes. Fields are compared before the data
    is read, so a wrong chunk costs no checksum. An unknown codec fails.
    """
    view = _view(page)
    found = _parsed(view)
    if found is None:
        return Reason.FAILED_CHECK
    checked = found[_STORED if found[_CODEC] in LOSSY else _LENGTH]
    assert isinstance(checked, int)
    if checked > data.nbytes or not _agree(found, expected):
        return Reason.FAILED_CHECK
    if _data_checksum(view[: _FIELDS.size], data, checked) != view[_CHECKSUM]:
        return Reason.FAILED_CHECK
    return None


def _pack(header: Header) -> bytes:
    codec = header.codec.encode()
    fingerprint = header.fingerprint.encode()
    sizes = (
        len(header.store_id),
        len(header.namespace),
        len(header.key),
        len(header.parent or _NO_PARENT),
    )
    if (
        sizes != _SIZES
        or len(codec) > _CODEC_BYTES
        or len(fingerprint) > _FINGERPRINT_BYTES
        or b"\0" in codec + fingerprint
    ):
        raise ValueError(
            "store_id has 16 bytes; namespace, key and parent have 32; the codec may have 16 bytes "
            f"of UTF-8 and the fingerprint 32, without NUL: got {header}"
        )
    try:
        return _FIELDS.pack(
            MAGIC,
            FORMAT_LOSSY if header.codec in LOSSY else FORMAT,
            HEADER_BYTES,
            header.store_id,
            header.slot,
            header.namespace,
            header.epoch,
            header.key,
            header.position,
            header.length,
            header.tokens,
            codec,
            fingerprint,
            header.sequence,
        )
    except struct.error as error:
        raise ValueError(
            f"a header number is outside 64 unsigned bits: {error}"
        ) from error


def _data_checksum(
    packed: bytes | memoryview, data: npt.NDArray[np.uint8], length: int
) -> bytes:
    state = xxhash.xxh3_128(packed)
    if length:
        state.update(data.data.cast("B")[:length])
    return state.digest()


def _view(page: Page) -> memoryview:
    return (page.data if isinstance(page, np.ndarray) else memoryview(page)).cast(
        "B"
    )


def _is_whole(view: memoryview) -> bool:
    """Return whether a page is PagodaKV's and undamaged."""
    return (
        view.nbytes == HEADER_BYTES
        and view[:8] == MAGIC
        and view[_OWN] == _own_checksum(view)
    )


def _own_checksum(view: memoryview) -> bytes:
    state = xxhash.xxh3_64(view[: _OWN.start])
    state.update(view[_OWN.stop :])
    return state.digest()


def _new_page() -> npt.NDArray[np.uint8]:
    room = np.empty(2 * HEADER_BYTES, dtype=np.uint8)
    skip = -room.ctypes.data % HEADER_BYTES
    return room[skip : skip + HEADER_BYTES]
