"""Shared by the tests of the cache: a small layout, prompts, and KV whose bytes are a function of
the tokens.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Clock
from pagoda.cache import Cache, Hit, Stored
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import ChunkRef
from pagoda.config import Config
from pagoda.keys import Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Outcome, Reserved
from pagoda.transfer import BlockKV

CHUNK = 16
LAYOUT = KVLayout.opaque(CHUNK, 8192, "tests of the cache")
NAMESPACE = Namespace("a-model")
SPAWN = multiprocessing.get_context("spawn")

Bytes = npt.NDArray[np.uint8]
Prompt = npt.NDArray[np.int32]

# The deadline of a call that may succeed: a busy machine may pause for any time.
PATIENT_SECONDS = 30.0


class KV(NamedTuple):
    """The KV of one prompt in an engine: (chunks, chunk_bytes) and the transfer over it."""

    blocks: Bytes
    transfer: BlockKV

    def same(self, other: KV, begin: int = 0, end: int | None = None) -> bool:
        """Whether chunks [begin, end) hold the same bytes."""
        return bool((self.blocks[begin:end] == other.blocks[begin:end]).all())


def prompt(chunks: float, seed: int = 0) -> npt.NDArray[np.int32]:
    """Return the token ids of a prompt; with another seed it differs from the first token on."""
    return np.random.default_rng(seed).integers(
        0, 50_000, int(chunks * CHUNK), dtype=np.int32
    )


def kv_of(tokens: npt.NDArray[np.int32], layout: KVLayout = LAYOUT) -> KV:
    """Return the KV that the model computes for a prompt: every chunk is a function of all tokens
    up to its end.
    """
    blocks = blank(tokens, layout).blocks
    for i, key in enumerate(chunk_keys(tokens, bytes(32), CHUNK)):
        blocks[i] = np.random.default_rng(list(key)).integers(
            0, 256, layout.chunk_bytes, dtype=np.uint8
        )
    return KV(blocks, BlockKV(blocks, layout))


def blank(tokens: npt.NDArray[np.int32], layout: KVLayout = LAYOUT) -> KV:
    """Return memory for the KV of a prompt."""
    blocks = np.zeros(
        (max(1, len(tokens) // CHUNK), layout.chunk_bytes), np.uint8
    )
    return KV(blocks, BlockKV(blocks, layout))


def config_of(host: Path | None, disk: Path | None, **options: object) -> Config:
    """Return a configuration with 64 host slots and 256 disk slots, if their directories are given;
    long deadlines.
    """
    slot = LAYOUT.slot_bytes
    wanted: dict[str, object] = {
        "chunk_tokens": CHUNK,
        "host_size": 64 * slot if host is not None else 0,
        "worth_it": False,
        # which admits every chunk, whatever a test has requested before
        "policy": "lru",
        "deadline_seconds": PATIENT_SECONDS,
    }
    if host is not None:
        wanted["host_path"] = str(host / "host")
    if disk is not None:
        wanted |= {
            "disk_path": str(disk / "disk"),
            "disk_size": 256 * (slot + 4096),
        }
    return Config(**{**wanted, **options})  # type: ignore[arg-type]


@contextmanager
def cache_at(
    host: Path | None,
    disk: Path | None,
    namespace: Namespace = NAMESPACE,
    clock: Clock | None = None,
    **options: object,
) -> Iterator[Cache]:
    """Open a cache, and close it afterwards."""
    cache = Cache(
        config_of(host, disk, **options),
        namespace=namespace,
        layout=LAYOUT,
        clock=clock,
    )
    try:
        yield cache
    finally:
        cache.close()


def stored(cache: Cache, tokens: npt.NDArray[np.int32], **options: object) -> KV:
    """Store the KV of a prompt, wait until it is in all tiers, and return it."""
    kv = kv_of(tokens)
    answer = cache.store(tokens, kv.transfer, **options)  # type: ignore[arg-type]
    assert answer.refused == 0, answer
    assert cache.flush(100)
    return kv


def served(
    cache: Cache, tokens: npt.NDArray[np.int32], **options: object
) -> tuple[Hit, KV]:
    """Retrieve a prompt, and check that every token in the hit has the right bytes."""
    kv = blank(tokens)
    hit = cache.retrieve(tokens, kv.transfer, **options)  # type: ignore[arg-type]
    assert kv.same(
        kv_of(tokens), hit.start_tokens // CHUNK, hit.stop_tokens // CHUNK
    )
    assert hit.num_tokens == sum(hit.by_tier.values()) == int(hit.mask.sum())
    return hit, kv


def hit_of(cache: Cache, tokens: npt.NDArray[np.int32], **options: object) -> Hit:
    """Retrieve a prompt, check its bytes, and return the hit alone."""
    hit, _ = served(cache, tokens, **options)
    return hit


def put(cache: Cache, tokens: npt.NDArray[np.int32], **options: object) -> Stored:
    """Store the KV of a prompt, and wait for nothing."""
    kv = kv_of(tokens)
    return cache.store(tokens, kv.transfer, **options)  # type: ignore[arg-type]


def run_all(
    processes: Sequence[multiprocessing.process.BaseProcess],
    seconds: float = 100.0,
) -> None:
    """Start processes and wait until all have ended with code 0."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        assert process.exitcode == 0, process


def slots_of(cache: Cache) -> HostSlots:
    assert cache.slots is not None
    return cache.slots


def keys_of(cache: Cache, tokens: Prompt) -> list[bytes]:
    return [key for _, _, key in cache.keys(tokens)]


def counters_of(cache: Cache) -> dict[str, int]:
    counters = cache.stats()["counters"]
    assert isinstance(counters, dict)
    return counters


def on_disk(cache: Cache, tokens: Prompt) -> int:
    return cache.lookup(tokens, tiers=["disk"], counted=False).num_tokens // CHUNK


def reserved_for(cache: Cache, tokens: Prompt) -> list[Outcome]:
    slots = slots_of(cache)
    return slots.reserve(
        keys_of(cache, tokens), namespace=slots.namespace(), start=0, parent=None
    )


def copied(
    cache: Cache, tokens: Prompt, outcomes: Sequence[Outcome]
) -> list[ChunkRef]:
    """Fill the reserved slots of a prompt by hand; return what can be committed."""
    keys = keys_of(cache, tokens)
    blocks = kv_of(tokens).blocks
    written = list[ChunkRef]()
    for i, item in enumerate(outcomes):
        if isinstance(item, Reserved):
            slots_of(cache).view(item.slot)[: LAYOUT.chunk_bytes] = blocks[i]
            written.append(
                ChunkRef(
                    item.key,
                    i,
                    keys[i - 1] if i else None,
                    item.slot,
                    item.generation,
                )
            )
    return written


def written(cache: Cache, tokens: Prompt) -> list[ChunkRef]:
    """Bring a prompt into host slots by hand, all of it."""
    copies = copied(cache, tokens, reserved_for(cache, tokens))
    assert slots_of(cache).commit({slots_of(cache).namespace(): copies}) == [
        True
    ] * len(copies)
    return copies
