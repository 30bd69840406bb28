"""The messages between the halves of the OffloadingSpec: vLLM's metadata in each step, and a file
at the start.

vLLM's OffloadingConnector has no handshake. The workers register their KV memory before the
scheduler's half exists, all on one machine. So each leaves a small file beside the host tier, and
the scheduler reads them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3
from vllm.v1.kv_offload.base import LoadStoreSpec

from pagoda.base.file_space import make_directory, read_file
from pagoda.base.synced_files import remove_abandoned, write_synced
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.shared_caches import agreed
from pagoda.keys import Namespace
from pagoda.layout import KVLayout

_MOST_BYTES = 16 << 20  # of a greeting
_OLD_SECONDS = 3600.0  # longer than any start of an engine


class Placed(NamedTuple):
    """A chunk of one KV cache group (its index among those that are offloaded) in a host slot."""

    group: int
    copy: ChunkRef


@dataclass
class SlotsSpec(LoadStoreSpec):
    """The slots that one job of a request copies into, or out of, in the order in which vLLM names
    its blocks.

    `fingerprint`: the layout of the store that has the slots. `pid`: the process that reserved
    them. `root`: that of the namespace, with this `version` of the weights. `lost`: a promised
    chunk is missing, so the load is impossible.
    """

    fingerprint: str
    pid: int
    request: str
    root: bytes
    version: str
    chunks: list[Placed] = field(default_factory=list)
    lost: bool = False


class WorkerGreeting(msgspec.Struct, frozen=True):
    """A rank's description of its KV memory. It must be the same for all ranks of an engine.

    `windows`: by group, None if a hit is a run of chunks from the first on (full attention), else
    the number of tokens before the end of a hit that are needed: the sliding window, or 1 for a
    recurrent state.
    """

    namespace: Namespace
    chunk_tokens: int
    chunk_bytes: int
    description: str
    parts: int
    windows: tuple[int | None, ...]

    @property
    def layout(self) -> KVLayout:
        """Return the layout of the engine's chunks."""
        return KVLayout.opaque(
            self.chunk_tokens, self.chunk_bytes, self.description
        )


def greet(
    root: Path, engine_id: str, rank: int, greeting: WorkerGreeting
) -> None:
    """Leave a rank's greeting in the host tier's directory, for this user only. Raises OSError."""
    make_directory(root)
    # left by engines that died during their start
    with contextlib.suppress(OSError):
        remove_abandoned(root, "engine-*", _OLD_SECONDS)
    write_synced(_path(root, engine_id, rank), msgspec.json.encode(greeting))


def greeted(root: Path, engine_id: str, ranks: int) -> WorkerGreeting:
    """Read the greetings of all ranks, and remove them. Raises ValueError if one is missing or they
    differ.
    """
    found = []
    for rank in range(ranks):
        path = _path(root, engine_id, rank)
        try:
            found.append(
                msgspec.json.decode(
                    read_file(path, _MOST_BYTES), type=WorkerGreeting
                )
            )
            path.unlink()
        except (OSError, ValueError) as trouble:
            raise ValueError(
                f"worker {rank} of {ranks} left no description of its KV memory in {root} "
                f"({trouble}): the scheduler "
                "and all workers must run on one machine, as one user, with the same host_path"
            ) from None
    return agreed(found)


def _path(root: Path, engine_id: str, rank: int) -> Path:
    digest = blake3(
        engine_id.encode(), derive_key_context="PagodaKV vLLM engine"
    ).hexdigest(8)
    return root / f"engine-{digest}-{rank}"
