"""What the two halves tell each other, through vLLM: plain data that can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pagoda.cache.writeback import ChunkRef
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved

__all__ = ["Handshake", "Later", "Load", "PagodaMetadata", "PagodaWorkerMetadata", "Save"]


class Load(NamedTuple):
    """Chunks to bring into blocks of one request, which waits for it."""

    request: str
    keys: list[bytes]  # of all chunks from the first of the prompt to the last wanted
    first: int  # the chunk that the load begins with
    blocks: list[int]  # id of each block of the sequence; -1 for those that are not to be filled
    lora: str | None
    salt: str | None


class Save(NamedTuple):
    """Chunks of one request that this step completes, and the slots reserved for them."""

    request: str
    root: bytes
    copies: list[ChunkRef]  # in ascending position
    first: int  # the chunk that `blocks` begin with
    blocks: list[int]


@dataclass
class PagodaMetadata(KVConnectorMetadata):
    """One step's work for the workers."""

    scheduler_pid: int
    number: int  # of the steps of an engine each has the next
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False  # nothing is computed in this step
    computed_tokens: int = 0  # in this step, if all of them belong to one prompt


class Later(NamedTuple):
    """What of a request had no room on the device when it was to be saved."""

    first: int  # the position of the first chunk
    chunks: int


@dataclass
class PagodaWorkerMetadata(KVConnectorWorkerMetadata):
    """What came to nothing, told once."""

    failed: set[str]  # requests whose load failed: nothing more is offered to them
    unsaved: set[Reserved]  # slots that a rank could not make its own: the scheduler gives them up
    later: dict[str, Later]  # requests that had more to save than there was room for: to be tried again

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PagodaWorkerMetadata:
        """Join what two ranks tell; changes neither."""
        assert isinstance(other, PagodaWorkerMetadata)
        later = dict(self.later)
        for name, rest in other.later.items():
            mine = later.get(name, rest)
            later[name] = Later(min(mine.first, rest.first), max(mine.chunks, rest.chunks))
        return PagodaWorkerMetadata(self.failed | other.failed, self.unsaved | other.unsaved, later)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a rank found its KV memory to be. All ranks of an engine must agree in it."""

    namespace: Namespace
    layout: KVLayout
    block_tokens: int
    parts: int
