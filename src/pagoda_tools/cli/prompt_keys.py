"""The keys of a prompt by the known schemes: PagodaKV's own, and those from the block hashes of a
vLLM engine.

vLLM hashes blocks of 16 or more tokens, `hash((parent, tokens, extra keys))`, and PagodaKV's
connector derives the key of a chunk from the hash of its last block; the connector for hybrid
models adds the number of a KV cache group. This module computes the same without vLLM. It does not
know what a request adds (an adapter's name, a `cache_salt`, images): the keys of such a prompt come
from the prompt log. `nearest_prompt` calls this module.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from pagoda.keys import TokenIds, as_token_ids, chunk_keys, derive_keys

# tokens, root, chunk_tokens -> the key of every whole chunk
EngineScheme: TypeAlias = Callable[[TokenIds, bytes, int], list[bytes]]
_Hash: TypeAlias = Callable[[object], bytes]

_SEED = "vllm-none-hash"  # vLLM's default, without PYTHONHASHSEED
_LEAST_BLOCK = 8
# KV cache groups whose chunks may form a chain from the first token on
_GROUPS = 4


def schemes(chunk_tokens: int) -> Iterator[EngineScheme]:
    """Yield the schemes of which chunks of that length may be, the most likely first."""
    yield chunk_keys
    blocks = [
        n
        for n in range(chunk_tokens, _LEAST_BLOCK - 1, -1)
        if chunk_tokens % n == 0
    ]
    blocks.sort(key=lambda n: n & (n - 1) != 0)  # powers of two first
    seeds = dict.fromkeys((_SEED, os.environ.get("PYTHONHASHSEED", _SEED), "0"))
    for group in (None, *range(_GROUPS)):
        for digest in (_by_pickle, _by_cbor):
            for seed in seeds:
                for block in blocks:
                    yield partial(_vllm_keys, digest, seed, block, group)


def _vllm_keys(
    digest: _Hash,
    seed: str,
    block: int,
    group: int | None,
    tokens: TokenIds,
    root: bytes,
    chunk_tokens: int,
) -> list[bytes]:
    ids = as_token_ids(tokens).tolist()
    names: list[bytes] = []
    parent = digest(seed)
    suffix = b"" if group is None else group.to_bytes(4, "big")
    for start in range(0, len(ids) // chunk_tokens * chunk_tokens, block):
        parent = digest((parent, tuple(ids[start : start + block]), None))
        if (start + block) % chunk_tokens == 0:
            names.append(parent + suffix)
    return derive_keys(names, root)


def _by_pickle(value: object) -> bytes:
    """Return the hash by vLLM's `sha256`."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _by_cbor(value: object) -> bytes:
    """Return the hash by vLLM's `sha256_cbor`."""
    return hashlib.sha256(_cbor(value)).digest()


def _cbor(value: object) -> bytes:
    """Encode a value of a block hash as canonical CBOR (RFC 8949)."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    assert isinstance(value, Sequence)
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes([kind << 5 | number])
    power = next(power for power in range(4) if number < 1 << (8 << power))
    return bytes([kind << 5 | 24 + power]) + number.to_bytes(1 << power, "big")
