"""The form of a chunk outside memory: payloads as they are stored, `raw` or compressed without loss. Thread-safe.

header  the header of a stored chunk: its checksum, and what it says of the chunk
zstd    compression of KV in planes of bytes
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.codec import zstd
from pagoda.codec.header import (
    CODECS,
    FORMAT,
    HEADER_BYTES,
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
from pagoda.errors import ConfigError

__all__ = [
    "CODECS", "FORMAT", "HEADER_BYTES", "MAGIC", "Expected", "Header", "Page",
    "agrees", "decode", "encode", "is_foreign", "parse", "require", "seal", "verify",
]  # fmt: skip

Bytes = npt.NDArray[np.uint8]


def require(codec: str) -> None:
    """Raise ConfigError, naming the extra to install, if `codec` is not known or cannot be used here."""
    if codec not in CODECS:
        raise ConfigError(f"codec is one of {', '.join(CODECS)}, got {codec!r}")
    if codec == "zstd":
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"codec zstd: {error}; pip install 'pagodakv[zstd]'") from error


def encode(codec: str, payload: Bytes, word_bytes: int, out: Bytes) -> tuple[str, Bytes]:
    """Return the codec that was used, and the stored bytes: a view of `out`, or `payload` itself if that is "raw".

    No codec makes a payload larger: `out` needs no more space than the payload has.

    "raw" is used if `codec` says so, if another codec would not make the payload smaller, or if `out` is too small for
    it. `payload` and `out` are contiguous and do not overlap; `word_bytes` is the size of a KV element (1, 2 or 4); it
    affects only the size of the result. The memory of each thread is bounded. Raises ValueError for an unknown codec
    or word size, ConfigError if zstandard is not installed.
    """
    if codec not in CODECS:
        raise ValueError(f"codec is one of {', '.join(CODECS)}, got {codec!r}")
    if word_bytes not in zstd.WORDS:
        raise ValueError(f"word_bytes is one of {', '.join(map(str, zstd.WORDS))}, got {word_bytes}")
    if codec == "raw":
        return "raw", payload
    require(codec)
    nbytes = zstd.encode(payload, word_bytes, out)
    return (codec, out[:nbytes]) if nbytes else ("raw", payload)


def decode(codec: str, stored: Bytes, word_bytes: int, payload: Bytes) -> bool:
    """Fill `payload` from what `encode` returned. False, with undefined bytes in it, if `stored` is not exactly that.

    `stored` may be any bytes: decoding takes time in proportion to the payload and bounded memory for each thread, and
    raises no exception. Also returns False for an unknown codec, or for zstd if zstandard is not installed (`require`
    says which). Only the header's checksum shows whether the bytes are the right ones.
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
    return zstd.decode(stored, word_bytes, payload)
