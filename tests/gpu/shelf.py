"""A small cache in shared memory, prompts, and KV on the device whose bytes are a function of the
tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pagoda.cache import Cache, Hit
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from tests.gpu.rig import Rig

# tokens, tokens, planes
CHUNK = 64
BLOCK = 16
LAYERS = 4
EACH = CHUNK // BLOCK
PAGE = {True: 64, False: 64 << 10}  # bytes of a page, on a small rig and on a GPU
SEED_CHUNKS = 1000

Prompt = npt.NDArray[np.int32]


class Shelf:
    """A cache of `slots` host slots, and an engine's memory. Threads may share it, but not
    blocks.
    """

    def __init__(
        self, rig: Rig, root: Path, slots: int, blocks: int = 256
    ) -> None:
        self.rig = rig
        self.page = PAGE[rig.small]
        self.blocks = blocks
        self.layout = KVLayout.opaque(
            CHUNK, EACH * LAYERS * self.page, f"tests of the gpu {self.page}"
        )
        config = Config(
            chunk_tokens=CHUNK,
            host_size=slots * self.layout.slot_bytes,
            host_path=str(root / "host"),
            worth_it=False,
            policy="lru",
            deadline_seconds=30.0,
        )
        self.cache = Cache(
            config, namespace=Namespace("a-model"), layout=self.layout
        )
        self.engine: CopyEngine = rig.engine()
        host = self.cache._tiers.host
        assert host is not None
        self.slab = host.slab
        rig.reaches(self.slab.array)
        self._pools: list[torch.Tensor] = []

    def close(self) -> None:
        self.cache.close()

    def memory(self) -> list[torch.Tensor]:
        """Planes of an engine, all of one poison."""
        planes = [
            torch.full(
                (self.blocks, self.page),
                0xA5,
                dtype=torch.uint8,
                device=self.rig.device,
            )
            for _ in range(LAYERS)
        ]
        self.rig.known(*planes)
        return planes

    def kv(self, planes: list[torch.Tensor], table: list[int]) -> DevicePagesKV:
        return DevicePagesKV(
            planes,
            self.layout,
            block_tokens=BLOCK,
            block_table=table,
            copy_engine=self.engine,
        )

    def bits(self, prompt: Prompt, chunk: int) -> torch.Tensor:
        """Return what the model computes for a chunk of a prompt: [LAYERS, EACH, page]."""
        count = LAYERS * EACH * self.page
        number = int(prompt[0]) * SEED_CHUNKS + chunk
        mixed = (
            torch.arange(count, device=self.rig.device) + number * 7919
        ) * 2654435761
        return ((mixed >> 11) & 255).to(torch.uint8).view(LAYERS, EACH, self.page)

    def compute(
        self, planes: list[torch.Tensor], table: list[int], prompt: Prompt
    ) -> None:
        """Compute KV, as the model does."""
        for chunk in range(len(prompt) // CHUNK):
            ids = torch.tensor(
                table[chunk * EACH : (chunk + 1) * EACH], device=self.rig.device
            )
            for plane, own in zip(planes, self.bits(prompt, chunk), strict=True):
                plane[ids] = own

    def wrong_chunks(
        self,
        planes: list[torch.Tensor],
        table: list[int],
        prompt: Prompt,
        hit: Hit,
    ) -> list[int]:
        """Return which chunks of a hit do not have the bytes of the prompt."""
        wrong = []
        for chunk in range(hit.num_tokens // CHUNK):
            ids = torch.tensor(
                table[chunk * EACH : (chunk + 1) * EACH], device=self.rig.device
            )
            got = torch.stack([plane[ids] for plane in planes])
            if not torch.equal(got, self.bits(prompt, chunk)):
                wrong.append(chunk)
        return wrong


def prompt(chunks: int, seed: int) -> Prompt:
    """Return a prompt; `seed` (below two million) is its first token, so all prompts differ from
    there on.
    """
    return np.array([seed, *range(chunks * CHUNK - 1)], np.int32)
