"""The form of a chunk outside memory: its header and checksum, and the encoding of its bytes."""

from __future__ import annotations

from pagoda.codec.coding import decode, encode, require
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

__all__ = [
    "CODECS", "FORMAT", "HEADER_BYTES", "MAGIC", "Expected", "Header", "Page",
    "agrees", "decode", "encode", "is_foreign", "parse", "require", "seal", "verify",
]  # fmt: skip
