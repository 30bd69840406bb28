"""KV pools on a device with the shapes of known models, and plain torch to fill, overwrite and
compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagoda.layout import KVLayout
from pagoda.transfer import PagedKV
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Form = Literal["pools", "blocks"]
KV = PagedKV | DevicePagesKV

FORMS: tuple[Form, ...] = ("pools", "blocks")
POISON = 0x5A


@dataclass(frozen=True)
class Shape:
    """The KV of one model in bf16: `planes` planes a layer of `heads` x `dim` a token."""

    key: str
    name: str
    layers: int
    heads: int
    dim: int
    planes: int = 2
    block_tokens: int = 16
    chunk_tokens: int = 256

    @property
    def run_bytes(self) -> int:
        """Return the bytes of one block of one plane of one layer."""
        return self.block_tokens * self.heads * self.dim * 2

    @property
    def blocks_a_chunk(self) -> int:
        """Return the number of blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of a chunk of all layers."""
        return self.layers * self.planes * self.blocks_a_chunk * self.run_bytes


SHAPES = {
    "8b": Shape("8b", "Llama-3-8B-like", 32, 8, 128),
    "70b": Shape("70b", "Llama-3-70B-like", 80, 8, 128),
    "mla": Shape("mla", "MLA", 61, 1, 576, planes=1),
}


class Turn(NamedTuple):
    """The data of one call: the chunks of a sequence with the block table `table`, chunk i in
    `slots[i]`.
    """

    table: Ids
    slots: list[Bytes]

    def starts(self, chunk_tokens: int) -> list[int]:
        """Where each chunk begins, in tokens."""
        return [number * chunk_tokens for number in range(len(self.slots))]


class Stock:
    """The KV memory of an engine in one form, filled at random. One thread at a time.

    | form     | memory                                                                             |
    | -------- | ---------------------------------------------------------------------------------- |
    | "pools"  | a pool a layer, [2, blocks, 16, heads, dim], or [blocks, 16, dim] of one plane      |
    | "blocks" | one tensor [blocks, bytes of a block in all layers]: a block is one run             |

    `planes` are the same memory as int64 [blocks, words of a run], in their order in a slot.
    """  # noqa: E501, W505

    def __init__(
        self,
        shape: Shape,
        form: Form,
        blocks: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.shape = shape
        self.form = form
        self.device = device
        self.blocks = blocks
        self._seen: dict[CopyEngine, DevicePagesKV] = {}
        self._random = np.random.default_rng(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._scratch = torch.empty(
            (2, shape.chunk_bytes), dtype=torch.uint8, device=device
        )
        words = shape.run_bytes // 8
        if form == "pools":
            own = [
                self._memory((shape.planes, blocks, words))
                for _ in range(shape.layers)
            ]
            self.planes = [
                pool[plane] for pool in own for plane in range(shape.planes)
            ]
            self._pools = [self._as_engine(pool) for pool in own]
            self.layout = self._layout()
        else:
            self.planes = [
                self._memory((blocks, shape.layers * shape.planes * words))
            ]
            bytes_a_chunk = (
                f"{shape.layers} layers x {shape.planes} planes in a block"
            )
            self.layout = KVLayout.opaque(
                shape.chunk_tokens, shape.chunk_bytes, bytes_a_chunk
            )

    def _memory(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.device).random_(
            generator=self._generator
        )

    def _as_engine(self, pool: torch.Tensor) -> torch.Tensor:
        size = (self.blocks, self.shape.block_tokens)
        if self.shape.planes == 1:
            return pool[0].view(torch.bfloat16).view(*size, self.shape.dim)
        return pool.view(torch.bfloat16).view(
            self.shape.planes, *size, self.shape.heads, self.shape.dim
        )

    def _layout(self) -> KVLayout:
        shape = self.shape
        if shape.planes == 1:
            return KVLayout.mla(
                shape.layers, shape.dim, "bfloat16", shape.chunk_tokens
            )
        return KVLayout.dense(
            shape.layers,
            shape.heads,
            shape.dim,
            "bfloat16",
            shape.chunk_tokens,
            token_order="tokens_first",
        )

    @property
    def run_bytes(self) -> int:
        """Return the bytes of a run of a block."""
        return self.planes[0].shape[1] * 8

    def kv(
        self,
        table: Ids,
        engine: CopyEngine,
        layer_events: LayerEvents | None = None,
    ) -> KV:
        """Return our transfer of the sequence with the block table `table`, as a user creates it
        for one call.

        Pools are inspected in every call, as in the paged engine of the examples; pages once, as in
        the vLLM connector.
        """
        shape = self.shape
        if self.form == "blocks":
            if layer_events is None and engine in self._seen:
                return self._seen[engine].with_table(table.tolist())
            pages = [plane.view(torch.uint8) for plane in self.planes]
            kv = DevicePagesKV(
                pages,
                self.layout,
                block_tokens=shape.block_tokens,
                block_table=table.tolist(),
                copy_engine=engine,
                layer_events=layer_events,
            )
            if layer_events is None:
                self._seen[engine] = kv
            return kv
        return PagedKV(
            self._pools,
            self.layout,
            pool_format="planes_first" if shape.planes == 2 else "plane_pools",
            block_size=shape.block_tokens,
            block_table=table,
            copy_engine=engine,
            layer_events=layer_events,
        )

    def table(self, chunks: int) -> Ids:
        """Return a new block table: random blocks of the whole stock, without repetition."""
        return self._random.permutation(self.blocks)[
            : chunks * self.shape.blocks_a_chunk
        ].astype(np.int64)

    def ids(self, turn: Turn) -> list[torch.Tensor]:
        """Return the blocks of each chunk on the device."""
        sent = torch.from_numpy(turn.table).to(self.device)
        return list(sent.view(len(turn.slots), self.shape.blocks_a_chunk))

    # ---- plain torch, to compare with and to check

    def gather(self, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Gather one chunk into the `parts` of a buffer on the device, by one index_select a
        plane.
        """
        for plane, part in zip(self.planes, parts, strict=True):
            torch.index_select(plane, 0, ids, out=part)

    def scatter(self, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Scatter one chunk from the `parts` of a buffer by one index_copy a plane; changes those
        blocks.
        """
        for plane, part in zip(self.planes, parts, strict=True):
            plane.index_copy_(0, ids, part)

    def parts(self, room: torch.Tensor) -> list[torch.Tensor]:
        """Return each plane's share of a chunk's bytes (uint8), as int64 [blocks of a chunk, words
        of a run].
        """
        count = self.shape.blocks_a_chunk
        sizes = [count * plane.shape[1] for plane in self.planes]
        return [
            part.view(count, -1)
            for part in torch.split(room.view(torch.int64), sizes)
        ]

    def spoil_blocks(self, turn: Turn) -> None:
        """Overwrite every byte of the blocks of a turn."""
        ids = torch.from_numpy(turn.table).to(self.device)
        for plane in self.planes:
            plane.index_fill_(
                0, ids, int.from_bytes(bytes([POISON] * 8), "little")
            )

    def spoil_slots(self, slots: Sequence[Bytes]) -> None:
        """Overwrite every byte of slots, through the device, which is faster than this
        processor.
        """
        self._scratch[0].fill_(POISON)
        for slot in slots:
            self.host(slot).copy_(self._scratch[0])

    def fill_slots(self, slots: Sequence[Bytes]) -> None:
        """Fill slots at random."""
        words = self._scratch[0].view(torch.int64)
        for slot in slots:
            self.host(slot).copy_(
                words.random_(generator=self._generator).view(torch.uint8)
            )

    def same(self, turn: Turn) -> bool:
        """Return whether the blocks and the slots of a turn hold the same bytes; compare on the
        device.
        """
        there, here = self._scratch
        for ids, slot in zip(self.ids(turn), turn.slots, strict=True):
            self.gather(ids, self.parts(there))
            here.copy_(self.host(slot))
            if not torch.equal(there, here):
                return False
        return True

    def host(self, slot: Bytes) -> torch.Tensor:
        """Return the bytes of a chunk in a slot as a tensor over the same memory."""
        return torch.from_numpy(slot[: self.shape.chunk_bytes])
