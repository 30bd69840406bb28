"""The form of a chunk outside memory: payloads as they are stored, `raw`, compressed, or quantised.
Thread-safe.

header     the header of a stored chunk: its checksum and its fields
zstd       lossless compression of KV in planes of bytes
quantised  lossy compression of K and V: "q8", "q4" and "qzstd"
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.base.quality_verdict import Setting
from pagoda.codec import quantised, zstd
from pagoda.codec.header import (
    CODECS,
    FORMAT,
    FORMAT_LOSSY,
    HEADER_BYTES,
    LOSSLESS,
    LOSSY,
    MAGIC,
    Expected,
    Header,
    Page,
    agrees,
    is_foreign,
    parse,
    seal,
    verify,
)
from pagoda.layout import KVLayout, itemsize

__all__ = [
    "CODECS",
    "FORMAT",
    "FORMAT_LOSSY",
    "HEADER_BYTES",
    "LOSSLESS",
    "LOSSY",
    "MAGIC",
    "Expected",
    "Header",
    "Page",
    "agrees",
    "approximated",
    "codec_setting",
    "decode",
    "encode",
    "is_foreign",
    "most_bytes",
    "parse",
    "require",
    "require_layout",
    "restore",
    "seal",
    "verify",
]

Bytes = npt.NDArray[np.uint8]


def require(codec: str) -> None:
    """Raise ConfigError, naming the extra to install, if `codec` is not known or cannot be used
    here.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec is one of {', '.join(CODECS)}, got {codec!r}")
    if codec in ("zstd", "qzstd"):
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"codec {codec}: {error}; pip install 'pagodakv[zstd]'"
            ) from error


def require_layout(codec: str, layout: KVLayout) -> None:
    """Raise ConfigError, one sentence, if chunks of this layout cannot be encoded with `codec`.
    Pure.
    """
    if codec in LOSSY and (why := quantised.refusal(layout)):
        raise ConfigError(f"codec {codec}: {why}")


def codec_setting(codec: str, chunk_tokens: int) -> Setting:
    """Return the setting of a lossy codec, as verdicts of quality name it. Pure.

    It includes `chunk_tokens`, because the groups of K extend over a chunk.
    """
    options: dict[str, str | int | float | bool] = {
        "version": quantised.VERSION,
        "codec": codec,
        "chunk_tokens": chunk_tokens,
    }
    return Setting("codec", options)


def most_bytes(codec: str, layout: KVLayout) -> int:
    """Return the most bytes that a chunk of the layout takes in a codec. Raises ValueError for a
    layout it refuses.
    """
    return (
        quantised.most_bytes(codec, layout)
        if codec in LOSSY
        else layout.chunk_bytes
    )


def encode(
    codec: str,
    payload: Bytes,
    word_bytes: int,
    out: Bytes,
    *,
    layout: KVLayout | None = None,
) -> tuple[str, Bytes]:
    """Return the codec that was used, and the stored bytes: a view of `out`, or `payload` itself if
    the codec is "raw".

    No codec makes a payload larger: `out` needs no more space than the payload has.

    "raw" is used if `codec` says so, if another codec would not make the payload smaller, if `out`
    is too small for it, or if a lossy codec finds a number that is not finite or almost too large
    for its dtype. `payload` and `out` are contiguous and do not overlap; `word_bytes` is the size
    of a KV element (1, 2 or 4); it affects only the size of the result. A lossy codec needs the
    `layout` of the payload. The memory of each thread is bounded. Raises ValueError for an unknown
    codec, word size or a layout that is refused, ConfigError if zstandard is not installed.
    """
    if codec not in CODECS:
        raise ValueError(f"codec is one of {', '.join(CODECS)}, got {codec!r}")
    if word_bytes not in zstd.WORDS:
        raise ValueError(
            f"word_bytes is one of {', '.join(map(str, zstd.WORDS))}, got {word_bytes}"
        )
    if codec == "raw":
        return "raw", payload
    require(codec)
    if codec in LOSSY:
        if layout is None or layout.chunk_bytes != payload.nbytes:
            raise ValueError(
                f"codec {codec} needs the layout of the {payload.nbytes} bytes, got {layout}"
            )
        nbytes = quantised.encode(codec, payload, layout, out)
    else:
        nbytes = zstd.encode(payload, word_bytes, out)
    return (codec, out[:nbytes]) if nbytes else ("raw", payload)


def decode(codec: str, stored: Bytes, word_bytes: int, payload: Bytes) -> bool:
    """Fill `payload` from what `encode` returned. False, with undefined bytes in it, if `stored` is
    not exactly that.

    `stored` may be any bytes: decoding takes time in proportion to the payload and bounded memory
    for each thread, and raises no exception. Also returns False for an unknown codec, or for zstd
    if zstandard is not installed (`require` says which). Only the header's checksum shows whether
    the bytes are the right ones.
    """
    if codec == "raw":
        if stored.nbytes != payload.nbytes:
            return False
        np.copyto(payload, stored)
        return True
    try:
        require(codec)
    except ConfigError:
        return False
    if codec in LOSSY:
        return quantised.decode(stored, word_bytes, payload)
    return zstd.decode(stored, word_bytes, payload)


def restore(
    page: Page,
    stored: Bytes,
    expected: Header | Expected,
    word_bytes: int,
    payload: Bytes,
) -> Reason | None:
    """Fill `payload` from a stored chunk: header page and stored bytes. None if all is correct,
    else FAILED_CHECK.

    What the checksum covers is compared: with a lossy codec before decoding, else afterwards.
    `stored` may be longer, and may be `payload` itself if the codec is "raw". Otherwise as `verify`
    and `decode`.
    """
    found = parse(page)
    nbytes = 0 if found is None else found.stored_bytes or found.length
    if found is None or stored.nbytes < nbytes or payload.nbytes < found.length:
        return Reason.FAILED_CHECK
    stored = stored[:nbytes]
    into = payload[: found.length]
    if found.codec in LOSSY:
        reason = verify(page, stored, expected)
        return reason or (
            None
            if decode(found.codec, stored, word_bytes, into)
            else Reason.FAILED_CHECK
        )
    if not agrees(found, expected):
        return Reason.FAILED_CHECK
    is_in_place = found.codec == "raw" and np.may_share_memory(stored, into)
    if not is_in_place and not decode(found.codec, stored, word_bytes, into):
        return Reason.FAILED_CHECK
    return verify(page, into, expected)


def approximated(
    codec: str, payload: Bytes, layout: KVLayout
) -> tuple[Bytes, int]:
    """Return what a tier with this codec would return for a payload, and how many bytes it would
    store. Pure.

    For measuring what a codec does to a model's answers. ConfigError for a layout that is refused.
    """
    require_layout(codec, layout)
    word_bytes = min(4, itemsize(layout.planes[0].dtype)) if layout.planes else 2
    used, stored = encode(
        codec, payload, word_bytes, np.empty_like(payload), layout=layout
    )
    decoded = np.empty_like(payload)
    if not decode(used, stored, word_bytes, decoded):
        raise ValueError(
            f"codec {codec} cannot decode what it encoded: report this"
        )
    return decoded, stored.nbytes
