"""A worker's half of the OffloadingSpec: copies between the engine's blocks and host slots, on
threads.

vLLM protects the blocks: it waits for a job before it gives one of its blocks to another request,
and it runs no request before its load has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from pagoda.base.clock import Deadline
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Event, Pool
from pagoda.cache import Cache
from pagoda.cache.writeback import ChunkRef, columns_of
from pagoda.connectors.vllm.kv_memory import paged_kv
from pagoda.connectors.vllm.offloading.messages import SlotsSpec
from pagoda.connectors.vllm.prefill_steps import PrefillSteps
from pagoda.connectors.vllm.shared_caches import end_threads, let_go
from pagoda.layout import KVLayout
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from pagoda.transfer.pages_kv import PagesKV

log = guarded_logger("pagoda.vllm")

_LOAD_THREADS = 2
_TRIES = 3  # to find a chunk again that was removed while it was being loaded
_FENCE_SECONDS = 10.0  # a store that has not copied its blocks by then is revoked


class EnginePages(NamedTuple):
    """The KV memory of one group: planes [num_blocks, page_bytes], and the size of its chunks.

    `number`: the group's number in vLLM's keys. `state`: only the last block of a chunk is used.
    """

    number: int
    planes: list[torch.Tensor]
    block_tokens: int
    blocks_per_chunk: int
    state: bool = False

    def layout(self, parts: int) -> KVLayout:
        """Return the layout of the group's bytes in a chunk: the leading bytes of a slot, or
        all.
        """
        nbytes = (
            parts
            * self.blocks_per_chunk
            * sum(plane.shape[1] for plane in self.planes)
        )
        return KVLayout.opaque(
            self.blocks_per_chunk * self.block_tokens, nbytes, "one group"
        )


class _Share(NamedTuple):
    """The copies of one job for one group, and where each begins in `kv`, which is built for the
    job.
    """

    copies: list[ChunkRef]
    starts: list[int]
    kv: PagesKV | DevicePagesKV


@dataclass(eq=False)
class _Job:
    """One job of vLLM's. `lost`: chunks whose slots were reserved but whose blocks are not all
    there.
    """

    number: int
    spec: SlotsSpec
    stores: bool
    shares: list[_Share] = field(default_factory=list)
    lost: list[ChunkRef] = field(default_factory=list)
    wrong: str = ""  # why the job cannot be done
    submitted: float = field(default_factory=time.perf_counter)
    begun: bool = False
    revoked: bool = False  # vLLM reassigned its blocks before they were copied
    # afterwards its blocks are no longer used
    copied: Event = field(default_factory=Event)


class PagodaOffloadingWorker(OffloadingWorker):
    """Does vLLM's jobs. For the worker's thread; copies run on separate threads.

    A store that fails is dropped; no chunk of it was promised. A load can fail only if chunks are
    removed (`pagoda clear`) while they are being loaded: then they are looked for again in all
    tiers, and if they are gone, `take_failed` returns the request, so that vLLM computes it.
    """

    def __init__(
        self,
        cache: Cache,
        groups: Sequence[EnginePages],
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Take over `cache`. `groups` is in vLLM's order. Raises ValueError if a chunk is too
        large.
        """
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._groups = tuple(groups)
        self._part = part
        self._parts = parts
        layouts = [pages.layout(parts) for pages in groups]
        needed = max(layout.chunk_bytes for layout in layouts)
        if needed > cache.layout.chunk_bytes:
            raise ValueError(
                f"a chunk needs {needed} bytes, the layout has {cache.layout.chunk_bytes}"
            )
        on_cpu = groups[0].planes[0].device.type == "cpu"
        self._kvs = [
            paged_kv(
                one.planes,
                layout,
                one.block_tokens,
                on_cpu,
                part=part,
                parts=parts,
            )
            for one, layout in zip(groups, layouts, strict=True)
        ]
        # None: another rank measures them
        self.prefills = (
            PrefillSteps(cache, groups[0].planes[0].device) if part == 0 else None
        )
        for kv in self._kvs:
            if kv.device_index is not None:
                self._slots.use_device(kv.device_index)
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._finished: SimpleQueue[TransferResult] = SimpleQueue()
        self._failed: set[str] = set()
        self._lines = RateLimitedLog()
        self._loads = Pool(_LOAD_THREADS, "pagoda-load")
        self._stores = Pool(1, "pagoda-store")
        self._closed = False

    # ---- vLLM's calls

    def submit_store(
        self, job_id: int, src_spec: Any, dst_spec: SlotsSpec
    ) -> bool:
        """Begin to copy blocks into slots. Always True: chunks that cannot be stored are
        dropped.
        """
        self._submit(self._stores, _Job(job_id, dst_spec, stores=True), src_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: SlotsSpec, dst_spec: Any
    ) -> bool:
        """Begin to copy slots into blocks. Always True."""
        self._submit(self._loads, _Job(job_id, src_spec, stores=False), dst_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        ended = []
        while not self._finished.empty():
            ended.append(self._finished.get())
        return ended

    def take_failed(self, among: set[str]) -> set[str]:
        """Return which of these requests, whose jobs have ended, could not be loaded; each once."""
        with self._lock:
            taken = self._failed & among
            self._failed -= taken
        return taken

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until the blocks of these jobs are no longer used.

        A store that takes long is revoked, and its copies are discarded. A load that has begun is
        waited for, because it is a copy in memory; one that has not begun is cancelled.
        """
        deadline = Deadline(_FENCE_SECONDS)
        with self._lock:
            jobs = [
                self._jobs[number] for number in job_ids if number in self._jobs
            ]
        for job in jobs:
            if job.copied.wait(deadline.remaining()):
                continue
            with self._lock:
                job.revoked = not job.copied.is_set()
                running = job.begun and not job.stores
            if running:
                job.copied.wait()

    def shutdown(self) -> None:
        """End the copies, then release the cache; ends in bounded time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end_threads(self._loads, self._stores)
        let_go(self._cache)

    # ---- jobs

    def _submit(self, threads: Pool, job: _Job, blocks: Any) -> None:
        """Prepare a job on vLLM's thread, after all work launched so far, and run it on another
        thread.
        """
        try:
            self._plan(job, blocks)
        except Exception as trouble:  # noqa: BLE001
            # a boundary: vLLM must not end because of it
            job.wrong = f"{type(trouble).__name__}: {trouble}"
        with self._lock:
            self._jobs[job.number] = job
        try:
            threads.submit(self._do, job)
        except RuntimeError as trouble:
            # closed meanwhile, or no thread could be started
            job.wrong = str(trouble)
            self._end(job, 0)

    def _plan(self, job: _Job, blocks: Any) -> None:
        """Find the blocks of each chunk. Raises ValueError if vLLM's blocks are not those of the
        chunks.
        """
        if job.spec.fingerprint != self._cache.layout.fingerprint:
            raise ValueError(
                "the slots are those of another layout: another engine has the same engine_id"
            )
        if job.spec.lost:
            raise ValueError("vLLM loads a chunk that was not a hit")
        ids = [int(block) for block in blocks.block_ids]
        at = 0
        for group, pages in enumerate(self._groups):
            copies = [copy for of, copy in job.spec.chunks if of == group]
            mine = ids[at : at + blocks.group_sizes[group]]
            at = at + blocks.group_sizes[group]
            if not copies and not mine:
                continue
            table = _table(
                pages, copies, mine, int(blocks.block_indices[group]), job.stores
            )
            if table is None and not job.stores:
                raise ValueError(
                    f"{len(mine)} blocks are not those of {len(copies)} chunks of group "
                    f"{pages.number}"
                )
            kept = list[ChunkRef]()
            kept_table = list[int]()
            each = pages.blocks_per_chunk
            for number, copy in enumerate(copies):
                row = (
                    table[number * each : (number + 1) * each]
                    if table is not None
                    else [-1]
                )
                if job.stores and -1 in row:
                    job.lost.append(copy)
                else:
                    kept.append(copy)
                    kept_table += row
            if kept:
                size = self._kvs[group].layout.chunk_tokens
                starts = [number * size for number in range(len(kept))]
                job.shares.append(
                    _Share(kept, starts, self._kvs[group].with_table(kept_table))
                )

    def _do(self, job: _Job) -> None:
        """Do a job, on a thread; the job ends in every case."""
        with self._lock:
            job.begun = True
            if job.revoked:
                job.wrong = "its blocks were reassigned before it had begun"
        copied = 0
        try:
            if not job.wrong:
                copied = self._store(job) if job.stores else self._load(job)
        except Exception as trouble:  # noqa: BLE001
            # a boundary: the thread continues
            job.wrong = f"{type(trouble).__name__}: {trouble}"
        self._end(job, copied)

    def _end(self, job: _Job, copied: int) -> None:
        job.copied.set()
        if job.wrong:
            what = "chunks were not stored" if job.stores else "a load failed"
            self._lines.warn(log, Reason.IO_ERROR, f"{what}: {job.wrong}")
            if job.stores:
                self._slots.abort([copy.reserved for _, copy in job.spec.chunks])
        with self._lock:
            if job.wrong and not job.stores:
                self._failed.add(job.spec.request)
            self._jobs.pop(job.number, None)
        nbytes = copied * self._cache.layout.chunk_bytes // self._parts
        seconds = time.perf_counter() - job.submitted
        self._finished.put(TransferResult(job.number, True, nbytes, seconds))

    # ---- stores

    def _store(self, job: _Job) -> int:
        """Copy blocks into slots and commit this worker's part; returns how many chunks."""
        every = [copy.reserved for share in job.shares for copy in share.copies]
        adopts = every and job.spec.pid != os.getpid()
        adopted = iter(
            self._slots.adopt(every, self._part)
            if adopts
            else [True] * len(every)
        )
        done: list[list[ChunkRef]] = []
        for share in job.shares:
            rows = [
                row
                for row in zip(share.copies, share.starts, strict=True)
                if next(adopted)
            ]
            copies = [copy for copy, _ in rows]
            views = self._slots.views([copy.slot for copy in copies])
            share.kv.to_slots([start for _, start in rows], views)
            done.append(copies)
        with self._lock:
            job.copied.set()
            if job.revoked:
                raise RuntimeError(
                    "its blocks were reassigned while they were being copied"
                )
        for copies in done:
            self._slots.commit({job.spec.root: copies}, self._part)
        if job.lost:
            self._slots.abort([copy.reserved for copy in job.lost])
        return sum(map(len, done))

    # ---- loads

    def _load(self, job: _Job) -> int:
        """Copy slots into blocks; returns how many chunks. Raises RuntimeError if one was
        removed.
        """
        for share in job.shares:
            share.kv.from_slots(
                share.starts,
                self._slots.views([copy.slot for copy in share.copies]),
            )
            valid = self._slots.still_valid(*columns_of(share.copies)).tolist()
            for copy, start, ok in zip(
                share.copies, share.starts, valid, strict=True
            ):
                if not ok and not self._again(
                    share, copy, start, job.spec.version
                ):
                    raise RuntimeError(
                        "a chunk was removed while it was being loaded"
                    )
        every = [copy for share in job.shares for copy in share.copies]
        if self._part == 0:
            self._slots.note_access(job.spec.root, every)
        return len(every)

    def _again(
        self, share: _Share, copy: ChunkRef, start: int, version: str
    ) -> bool:
        """Load a chunk from the tier that has it now; False if none has it."""
        size = self._cache.layout.chunk_tokens
        placed = copy.position * size, (copy.position + 1) * size, copy.key
        for _ in range(_TRIES):
            match = self._slots.match_prefix([copy.key], copy.position)
            if not len(match.slots):
                self._cache.prefetch(
                    None, keys=[placed], weights_version=version
                ).result()
                match = self._slots.match_prefix([copy.key], copy.position)
            if not len(match.slots):
                return False
            share.kv.from_slots([start], [self._slots.view(int(match.slots[0]))])
            if self._slots.still_valid(match.slots, match.generations).all():
                return True
        return False


def _table(
    pages: EnginePages,
    copies: list[ChunkRef],
    ids: list[int],
    first: int,
    stores: bool,
) -> list[int] | None:
    """Return the id of each block of these chunks, -1 where vLLM names none; None if they do not
    belong together.

    vLLM names a group's blocks from number `first` of the sequence on, and leaves out those that it
    does not have. So these are the blocks of the chunks only if none is missing between the first
    and the last.
    """
    each = pages.blocks_per_chunk
    ids = [block or -1 for block in ids]  # block 0 is vLLM's null block
    if stores and pages.state and len(ids) == len(copies):
        return [block for block in ids for _ in range(each)]
    skip = first % each
    rest = len(copies) * each - skip - len(ids)
    if (
        not copies
        or first // each != copies[0].position
        or not 0 <= rest < (1 if stores else each)
    ):
        return None
    return [-1] * skip + ids + [-1] * rest
