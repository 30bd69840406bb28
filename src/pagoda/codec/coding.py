"""Payloads as they are stored: `raw`, or smaller by one of the other codecs. Thread-safe; nothing is lost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.codec import zstd
from pagoda.codec.header import CODECS
from pagoda.errors import ConfigError

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
    """The codec that was used, and the stored bytes: a view of `out`, or `payload` itself if that is "raw".

    No codec makes a payload larger: `out` needs no more room than the payload has.

    "raw" is used where `codec` says so and where another would not make the payload smaller or `out` is too small for
    it. `payload` and `out` are contiguous and lie apart; `word_bytes` is the size of a KV element (1, 2 or 4), which
    counts for the size only. Takes bounded memory a thread. Raises ValueError for an unknown codec or word size,
    ConfigError if zstandard is not installed.
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
    """Fill `payload` from what `encode` returned. False, and any bytes in it, if `stored` is not exactly that.

    `stored` may be anything: it costs time in proportion to the payload, bounded memory a thread and no exception. An
    unknown codec, or zstd where zstandard is not installed, is False too (`require` says which). Whether the bytes are
    the right ones, the header's checksum tells.
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
