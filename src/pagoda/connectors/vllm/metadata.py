"""The messages between the two halves: plain data that vLLM pickles and sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.prefill_steps import PromptStep
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved


class Load(NamedTuple):
    """Chunks to load into blocks of one request, which waits for them."""

    request: str
    # of all chunks from the first of the prompt to the last wanted
    keys: list[bytes]
    first: int  # the chunk that the load begins with
    # id of each block of the sequence; -1 for those that must not be filled
    blocks: list[int]
    lora: str | None
    salt: str | None
    version: str  # of the weights


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
    number: int  # of the step; each step of an engine has the next number
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False  # nothing is computed in this step
    # another connector loads within this step, and its end must be reported
    loads_of_others: bool = False
    # what this step shows of the speed of computing prompts
    prompts: PromptStep = field(default_factory=PromptStep)


class Later(NamedTuple):
    """The chunks of a request that were not saved yet, because the device had no memory for their
    copies.
    """

    first: int  # the position of the first chunk
    chunks: int


@dataclass
class PagodaWorkerMetadata(KVConnectorWorkerMetadata):
    """Failed loads and saves, and other facts for the scheduler's half; each is reported once."""

    # requests whose load failed: they get no more hits
    failed: set[str] = field(default_factory=set)
    # slots that a rank could not adopt: the scheduler aborts them
    unsaved: set[Reserved] = field(default_factory=set)
    # requests with more to save than there was memory for: to be tried again
    later: dict[str, Later] = field(default_factory=dict)
    # from each rank once, if no handshake reaches the scheduler's half
    described: tuple[Handshake, ...] = ()
    # the last step of `PagodaMetadata.loads_of_others` that has ended
    ended: int = 0
    # those that our loads left unfilled
    bad_blocks: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PagodaWorkerMetadata:
        """Join the messages of two ranks; changes neither."""
        assert isinstance(other, PagodaWorkerMetadata)
        later = dict(self.later)
        for name, rest in other.later.items():
            mine = later.get(name, rest)
            later[name] = Later(
                min(mine.first, rest.first), max(mine.chunks, rest.chunks)
            )
        return PagodaWorkerMetadata(
            self.failed | other.failed,
            self.unsaved | other.unsaved,
            later,
            self.described + other.described,
            max(self.ended, other.ended),
            self.bad_blocks | other.bad_blocks,
        )


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A rank's description of its KV memory. It must be the same for all ranks of an engine."""

    namespace: Namespace
    layout: KVLayout
    block_tokens: int
    parts: int
