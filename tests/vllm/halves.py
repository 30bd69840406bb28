"""Both halves of the OffloadingSpec without an engine: real tiers, KV memory of a few groups, and
vLLM's own values.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    make_offload_key,
)

from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.connectors.vllm.offloading.chunk_finder import Group
from pagoda.connectors.vllm.offloading.messages import SlotsSpec
from pagoda.connectors.vllm.offloading.offloading_manager import (
    PagodaOffloadingManager,
)
from pagoda.connectors.vllm.offloading.offloading_worker import (
    EnginePages,
    PagodaOffloadingWorker,
)
from pagoda.connectors.vllm.shared_caches import opened
from pagoda.keys import Namespace
from pagoda.kv_events.notes import BlockFacts
from pagoda.layout import KVLayout
from tests.vllm import engines
from tests.vllm.patience import PATIENT_SECONDS, wait_long

# tokens, blocks a chunk, bytes, blocks, layers of a group
BLOCK = 16
EACH = 2
PAGE = 1024
POOL = 200
PLANES = 2
CHUNK = BLOCK * EACH
WINDOW = 3 * CHUNK
# as vLLM numbers its groups; a group between them is not offloaded
FULL = 0
SLIDING = 2
LAYOUT = KVLayout.opaque(CHUNK, EACH * PAGE * PLANES, "halves")
EVENT_GROUPS = {
    FULL: BlockFacts(CHUNK, BLOCK, "full_attention"),
    SLIDING: BlockFacts(CHUNK, BLOCK, "sliding_window", WINDOW, needs_all=False),
}
NO_STEP = ScheduleEndContext((), ())


def config_of(
    host: Path, disk: Path | None = None, slots: int = 64, **options: Any
) -> Config:
    """Return a configuration with that many host slots and long deadlines."""
    wanted: dict[str, Any] = {
        "chunk_tokens": CHUNK,
        "host_path": str(host),
        "host_size": slots * LAYOUT.slot_bytes,
        "worth_it": False,
        "deadline_seconds": PATIENT_SECONDS,
    }
    if disk is not None:
        wanted |= {"disk_path": str(disk), "disk_size": 256 * LAYOUT.slot_bytes}
    return Config(**wanted | options)


def memory(seed: int = 0) -> list[torch.Tensor]:
    """Return KV memory of random bytes, which the groups share as in vLLM."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 128, (POOL, PAGE), dtype=torch.int8, generator=draw)
        for _ in range(PLANES)
    ]


def stocks(planes: list[torch.Tensor]) -> list[EnginePages]:
    """The groups over that memory."""
    return [
        EnginePages(number, planes, BLOCK, EACH) for number in (FULL, SLIDING)
    ]


def cache_of(config: Config, model: str = "a-model", parts: int = 1) -> Cache:
    """This process's cache, once more."""
    layout = (
        LAYOUT
        if parts == 1
        else KVLayout.opaque(CHUNK, parts * LAYOUT.chunk_bytes, "halves")
    )
    return opened(config, Namespace(model, world_size=parts), layout)


def manager_of(config: Config, parts: int = 1) -> PagodaOffloadingManager:
    """A scheduler's half."""
    groups = {FULL: Group(CHUNK, None), SLIDING: Group(CHUNK, WINDOW)}
    return PagodaOffloadingManager(cache_of(config, parts=parts), groups, parts)


class Loaded(NamedTuple):
    """The task of a load."""

    spec: SlotsSpec
    blocks: GPULoadStoreSpec


class Halves:
    """A scheduler's and a worker's half in one process, and what vLLM does with them. Of one
    thread.
    """

    def __init__(
        self, config: Config, *, seed: int = 0, outlet: EventOutlet | None = None
    ) -> None:
        self.planes = memory(seed)
        self.manager = manager_of(config)
        if outlet is not None:
            self.manager.publish_events(outlet, EVENT_GROUPS, BLOCK)
        self.worker = PagodaOffloadingWorker(
            cache_of(config), stocks(self.planes)
        )
        self.slots = self.worker._slots
        self._jobs = 0

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.manager.shutdown()

    # ---- requests

    def request(
        self,
        name: str,
        prompt: str,
        chunks: int,
        tiers: TierFilter = TierFilter.ALL,
        image: tuple[str, int] | None = None,
    ) -> ReqContext:
        """A request for so many chunks of a prompt, which may have an image: its name, and where it
        begins.
        """
        context = ReqContext(name, load_tier_filter=tiers)
        for group in (FULL, SLIDING):
            for number, key in enumerate(keys(prompt, group, chunks)):
                context.set_offload_key_position(key, (number + 1) * CHUNK)
        self.manager.on_new_request(context)
        request = vllm_request(name, prompt, chunks)
        if image is not None:
            place = SimpleNamespace(offset=image[1])
            request.mm_features.append(
                SimpleNamespace(identifier=image[0], mm_position=place)
            )
        self.manager.request_arrived(request)
        return context

    def finish(self, context: ReqContext) -> None:
        """The request's end."""
        self.manager.on_request_finished(context)

    # ---- stores

    def begin_store(
        self,
        context: ReqContext,
        wanted: Sequence[bytes],
        blocks: dict[int, list[int]],
    ) -> list[bytes]:
        """Store chunks: `blocks` of each group, in the order of the chunks; return those that are
        stored.
        """
        output = self.manager.prepare_store(wanted, context)
        taken = list(output.keys_to_store)
        if taken:
            self._jobs += 1
            source = blocks_of(context, wanted, taken, blocks)
            assert self.worker.submit_store(self._jobs, source, output.store_spec)
        return taken

    def store(
        self,
        context: ReqContext,
        wanted: Sequence[bytes],
        blocks: dict[int, list[int]],
    ) -> list[bytes]:
        """Do the same, and wait for the end."""
        taken = self.begin_store(context, wanted, blocks)
        if taken:
            self.ended(self._jobs)
            self.manager.complete_store(set(taken), context)
        return taken

    def store_prompt(
        self, prompt: str, chunks: int, at: int = 0, name: str = ""
    ) -> dict[int, list[int]]:
        """Store all chunks of a prompt from blocks `at` on: those of FULL, then those of
        SLIDING.
        """
        context = self.request(name or f"stores {prompt}", prompt, chunks)
        blocks = {
            FULL: list(range(at + 1, at + 1 + chunks * EACH)),
            SLIDING: list(
                range(at + 1 + chunks * EACH, at + 1 + 2 * chunks * EACH)
            ),
        }
        for at in range(0, chunks, 4):  # a step computes so many
            end = min(at + 4, chunks)
            wanted = [
                *keys(prompt, FULL, end)[at:],
                *keys(prompt, SLIDING, end)[at:],
            ]
            self.store(
                context,
                wanted,
                {
                    group: ids[at * EACH : end * EACH]
                    for group, ids in blocks.items()
                },
            )
        self.finish(context)
        return blocks

    def ended(self, job: int) -> None:
        """Wait for a job's end."""
        seen: set[int] = set()
        wait_until(
            lambda: (
                seen.update(done.job_id for done in self.worker.get_finished())
                or job in seen
            )
        )

    # ---- lookups and loads

    def answers(
        self, context: ReqContext, wanted: Iterable[bytes]
    ) -> list[LookupResult]:
        """Look up as vLLM's scheduler does, step by step, until every answer is final."""
        wanted = list(wanted)
        found = list[LookupResult]()

        def asked() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in wanted]
            self.manager.on_schedule_end(NO_STEP)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found)

        wait_until(asked)
        return found

    def hit(self, context: ReqContext, prompt: str, chunks: int) -> int:
        """Return how many chunks of a prompt hit by vLLM's algorithm: full attention, then the
        window at its end.
        """
        scheduler = SimpleNamespace(
            manager=self.manager,
            _events_tracker=SimpleNamespace(record_lookup=lambda *_: None),
        )
        full = keys(prompt, FULL, chunks)
        sliding = keys(prompt, SLIDING, chunks)
        found: list[int] = []

        def asked() -> bool:
            run: Any = OffloadingConnectorScheduler._maximal_prefix_lookup(
                scheduler, full, context, None, None, 0
            )
            window = None
            if run != 0:
                within = sliding[:run] if run is not None else sliding
                window = OffloadingConnectorScheduler._sliding_window_lookup(
                    scheduler, within, WINDOW // CHUNK, context
                )
            self.manager.on_schedule_end(NO_STEP)
            if run == 0 or (run is not None and window is not None):
                found.append(0 if run == 0 else min(run, window))
            return bool(found)

        wait_until(asked)
        return found[0]

    def begin_load(
        self,
        context: ReqContext,
        wanted: dict[int, list[bytes]],
        blocks: dict[int, list[int]],
    ) -> Loaded:
        """Let vLLM's scheduler decide on a load of whole chunks."""
        flat = [key for group in (FULL, SLIDING) for key in wanted.get(group, [])]
        spec = self.manager.prepare_load(flat, context)
        return Loaded(spec, blocks_of(context, flat, flat, blocks))

    def load(
        self,
        context: ReqContext,
        wanted: dict[int, list[bytes]],
        blocks: dict[int, list[int]],
    ) -> None:
        """Load whole chunks into blocks."""
        self.run(self.begin_load(context, wanted, blocks))
        self.manager.complete_load(
            {key for group in wanted.values() for key in group}, context
        )

    def run(self, loaded: Loaded) -> None:
        """Let a worker execute the decision."""
        self._jobs += 1
        assert self.worker.submit_load(self._jobs, loaded.spec, loaded.blocks)
        self.ended(self._jobs)

    def bytes_of(self, blocks: Sequence[int]) -> torch.Tensor:
        """The bytes of blocks, of all layers."""
        return torch.stack([plane[list(blocks)].clone() for plane in self.planes])

    def blank(self) -> None:
        """Forget the engine's KV."""
        for plane in self.planes:
            plane.zero_()


def keys(prompt: str, group: int, chunks: int) -> list[bytes]:
    """vLLM's keys of a prompt's chunks."""
    return [
        make_offload_key(f"{prompt:->30}{number:02}".encode(), group)
        for number in range(chunks)
    ]


def vllm_request(
    name: str, prompt: str, chunks: int, salt: str | None = None
) -> Any:
    """What vLLM's request says of itself: its key of a chunk is the hash of the chunk's last
    block.
    """
    hashes = [
        hash
        for key in keys(prompt, FULL, chunks)
        for hash in (key[:31] + b"a", key[:-4])
    ]
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        all_token_ids=list(range(chunks * CHUNK)),
        cache_salt=salt,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        prompt_is_token_ids=None,
        session_id=None,
        num_tokens=chunks * CHUNK,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )


def blocks_of(
    context: ReqContext,
    wanted: Sequence[bytes],
    taken: Collection[bytes],
    blocks: dict[int, list[int]],
) -> GPULoadStoreSpec:
    """Return the blocks of the chosen chunks in vLLM's form: by group, without nulls."""
    ids = []
    sizes = []
    indices = []
    for group in (FULL, SLIDING):
        offered = [key for key in wanted if key[-1] == group]
        named = list[int]()
        first = 0
        for number, key in enumerate(offered):
            if key in taken:
                at = (context.get_offload_key_position(key) or 0) // BLOCK - EACH
                mine = blocks.get(group, [])[number * EACH : (number + 1) * EACH]
                for i, block in enumerate(mine):
                    first = first if named or not block else at + i
                    named += [block] if block else []
        ids += named
        sizes.append(len(named))
        indices.append(first)
    return GPULoadStoreSpec(ids, sizes, indices)


def wait_until(condition: Any, seconds: float = PATIENT_SECONDS) -> None:
    """Wait for a condition that must become true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "never came"
        time.sleep(0.002)


# ---- other processes


def forks() -> Any:
    """Makes processes from one that has imported vLLM, the same one that engines come from."""
    engines.FORKS.set_forkserver_preload(engines._PRELOAD)
    return engines.FORKS


def store_elsewhere(config: Config) -> None:
    """Act as another engine: store a prompt and end; as patient as the test's own process."""
    wait_long()
    halves = Halves(config, seed=3)
    halves.store_prompt("p", 5)
    halves.close()


def be_a_rank(config: Config, part: int, pipe: Connection) -> None:
    """Run one worker's half of two: do the jobs, and report the contents of its blocks."""
    planes = memory(seed=10 + part)
    worker = PagodaOffloadingWorker(
        cache_of(config, parts=2), stocks(planes), part, 2
    )
    pipe.send("up")
    while (job := pipe.recv()) is not None:
        kind, number, one, other = job
        (worker.submit_store if kind == "store" else worker.submit_load)(
            number, one, other
        )
        wait_until(worker.get_finished)
        pipe.send([plane[100:110].tolist() for plane in planes])
    worker.shutdown()
