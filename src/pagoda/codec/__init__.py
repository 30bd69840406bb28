"""What a chunk looks like outside memory: its header and checksum, and how its bytes are encoded."""

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
    parse,
    seal,
    verify,
)

__all__ = [
    "CODECS", "FORMAT", "HEADER_BYTES", "MAGIC", "Expected", "Header", "Page",
    "agrees", "decode", "encode", "parse", "require", "seal", "verify",
]  # fmt: skip
