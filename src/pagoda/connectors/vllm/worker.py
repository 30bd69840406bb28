"""A worker's half: brings chunks into the engine's blocks, on threads, and the pages of new chunks into slots.

What is saved is copied within the step that computed it, so that no block need be kept for it afterwards.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pagoda.cache import Cache, Hit
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.connector_stats import PagodaStats
from pagoda.connectors.vllm.identity.engine_namespace import namespace_of
from pagoda.connectors.vllm.kv_memory import KVMemory, inspect_kv_caches
from pagoda.connectors.vllm.metadata import Handshake, Later, Load, PagodaMetadata, PagodaWorkerMetadata, Save
from pagoda.connectors.vllm.options import ConnectorOptions
from pagoda.connectors.vllm.shared_caches import let_go, opened
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved
from pagoda.metrics import RateLimitedLog, Reason
from pagoda.threads import Answer, Pool, wait
from pagoda.transfer.base import Bytes
from pagoda.transfer.gpu.device_pages import DevicePagesKV, DeviceSnapshot, SnapshotBuffer
from pagoda.transfer.pages import PagesKV

__all__ = ["PagodaWorker"]

log = logging.getLogger("pagoda.vllm")

_LOAD_THREADS = 4
_SAVE_THREADS = 1  # chunks of one prompt become visible in its order
_IDLE_SECONDS, _PAUSE_SECONDS = 0.005, 0.0005
_END_SECONDS = 5.0
_MOST_SNAPSHOT_BYTES = 512 << 20  # of device memory that wait to be copied into slots; one chunk always may
_FREE_SHARE = 4  # a quarter of what vLLM's own plan has left on the device is the most that is taken for it


class _Loading(NamedTuple):
    """A load in progress."""

    load: Load
    future: Future[Hit]
    began: float


class PagodaWorker:
    """Does what the scheduler's half asks for. Used by the worker's thread; copies run on threads of its own."""

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        self._options = options
        self._configs = vllm_config, kv_cache_config
        self._cache: Cache | None = None
        self._loading: dict[str, _Loading] = {}
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._unsaved: set[Reserved] = set()
        self._later: dict[str, Later] = {}
        self._staging: SnapshotBuffer | None = (
            None  # what waits to be copied into slots; None: pages are copied at once
        )
        self._saving: set[Future[None]] = set()
        self._load_threads = Pool(_LOAD_THREADS, "pagoda-load")
        self._save_threads = Pool(_SAVE_THREADS, "pagoda-save")
        self._began = 0.0
        self._handled: BaseException | None = None
        self._step: int | None = None  # the last that began
        self._ended = True  # it was saved, too
        self._sound = True  # no step was ever broken off
        self._stats = PagodaStats()
        self._lines = RateLimitedLog()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Look at the engine's KV memory and open the cache for it. Raises ValueError for what is not known."""
        vllm_config, kv_cache_config = self._configs
        seen = inspect_kv_caches(kv_caches, vllm_config, kv_cache_config)
        kv_dtype = str(vllm_config.cache_config.cache_dtype)
        self.saw(seen, namespace_of(vllm_config, kv_dtype, seen.parts, self._options))

    def saw(self, seen: KVMemory, namespace: Namespace) -> None:
        """Open the cache for what was seen. Raises StoreError with the remedy if a tier cannot be opened."""
        blocks = self._options.config.chunk_tokens // seen.block_tokens
        layout = KVLayout.opaque(
            self._options.config.chunk_tokens,
            seen.parts * blocks * sum(seen.page_bytes),
            seen.description,
        )
        kind = PagesKV if seen.on_cpu else DevicePagesKV
        # the planes are looked at here, and not for each request
        self._pages: PagesKV | DevicePagesKV = kind(
            seen.planes,
            layout,
            block_tokens=seen.block_tokens,
            block_table=[],
            part=seen.part,
            parts=seen.parts,
        )
        self._cache = opened(self._options.config, namespace, layout)
        if self._pages.device_index is not None and self._cache.slots is not None:
            self._cache.slots.use_device(self._pages.device_index)
        if isinstance(self._pages, DevicePagesKV):
            self._staging = _reserved_on(self._pages)
        self._seen, self._layout = seen, layout
        self.handshake = Handshake(namespace, layout, seen.block_tokens, seen.parts)

    # ---- a step

    def begin(self, meta: PagodaMetadata) -> None:
        """Note when the step began, and in whose `except` the engine is called, if in anybody's.

        vLLM's scheduler takes each step for computed. One that never came here, or that never came to its end (an
        interrupt in a notebook), leaves pages in the engine that were not.
        """
        if not self._ended or self._step not in (None, meta.number - 1):
            self._broken_off()
        self._step, self._ended = meta.number, False
        self._began = time.perf_counter()
        self._handled = sys.exc_info()[1]

    def load(self, meta: PagodaMetadata) -> None:
        """Begin the step's loads; returns at once."""
        for load in meta.loads:
            began = time.perf_counter()
            try:
                future = self._load_threads.submit(self._retriever(load))
            except Exception as trouble:  # noqa: BLE001  # a border: a load that does not begin has failed
                future = Answer[Hit]()
                future.set_exception(trouble)
            self._loading[load.request] = _Loading(load, future, began)

    def _retriever(self, load: Load) -> Callable[[], Hit]:
        """What a thread does for a load; on a GPU it waits for all that was launched before now."""
        cache, kv = self._opened(), self._kv(load.blocks)
        start = load.first * self._layout.chunk_tokens
        return lambda: cache.retrieve(
            None,
            kv,
            keys=load.keys,
            start_tokens=start,
            lora=load.lora,
            salt=load.salt,
            counted=False,
        )

    def save(self, meta: PagodaMetadata) -> None:
        """Copy the pages of the step's new chunks; they become visible behind the step.

        vLLM calls this on the way out of a step that raised, too (a signal, no memory): then nobody knows which layers
        were computed, and what is stored outlives the engine.
        """
        (handled, self._handled), trouble = (self._handled, None), sys.exc_info()[1]
        self._ended = True
        if trouble is not None and trouble is not handled:
            self._broken_off()
        # in one process both halves have one cache, which weighs loading against computing
        here = meta.scheduler_pid == os.getpid()
        if here and self._seen.on_cpu and meta.computed_tokens >= self._layout.chunk_tokens:
            self._opened().observe_prefill(meta.computed_tokens, time.perf_counter() - self._began)
        for save in meta.saves:
            if not self._seen.writes:
                continue  # another rank has the same bytes and writes them
            copies = list(save.copies)
            if not self._sound:
                self._unsaved.update(_reserved(copies))  # not this rank's yet, but the scheduler's
                self._not_saved(copies, "a step of the engine was broken off", Reason.FAILED_CHECK)
                continue
            if not here:
                copies = self._adopted(copies)
            if not self._seen.on_cpu:
                copies = self._with_room(save, copies)
            if copies:
                self._copy(save, copies)

    def _broken_off(self) -> None:
        if self._sound:
            log.error("a step of the engine was broken off: until it is started anew, it stores nothing")
        self._sound = False

    def _adopted(self, copies: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Those whose slots still wait for this rank's part."""
        slots = self._opened().slots
        assert slots is not None
        standing = slots.adopt(_reserved(copies), self._seen.part)
        self._unsaved.update(
            one for one, stands in zip(_reserved(copies), standing, strict=True) if not stands
        )
        return [copy for copy, stands in zip(copies, standing, strict=True) if stands]

    def _with_room(self, save: Save, copies: list[ChunkRef]) -> list[ChunkRef]:
        """The leading ones for which there is device memory; the others come again in a later step."""
        fit = 1 if self._staging is None else self._staging.free
        if rest := copies[fit:]:
            self._give_up(rest)
            self._later[save.request] = Later(rest[0].position, len(rest))
        return copies[:fit]

    def _copy(self, save: Save, copies: list[ChunkRef]) -> None:
        slots = self._opened().slots
        assert slots is not None
        snapshot: DeviceSnapshot | None = None
        try:
            kv = self._kv([-1] * (save.first * self._blocks_per_chunk) + save.blocks)
            starts = [copy.position * self._layout.chunk_tokens for copy in copies]
            views = slots.views([copy.slot for copy in copies])
            if isinstance(kv, PagesKV):
                kv.to_slots(starts, views)
            else:
                snapshot = kv.snapshot(starts, self._staging)
            finish = _nothing if snapshot is None else partial(_landed, snapshot, views)
            future = self._save_threads.submit(self._commit, save.root, copies, finish)
        except Exception as trouble:  # noqa: BLE001  # a border: what is not saved is computed again
            if snapshot is not None:
                snapshot.release()
            self._not_saved(copies, f"{type(trouble).__name__}: {trouble}", Reason.IO_ERROR)
            return
        self._saving.add(future)
        future.add_done_callback(self._saving.discard)
        self._stats.count("saved_bytes", len(copies) * self._layout.chunk_bytes // self._seen.parts)
        if self._seen.part == 0:
            self._stats.count("saved_chunks", len(copies))

    def _not_saved(self, copies: list[ChunkRef], why: str, reason: Reason) -> None:
        self._give_up(copies)
        self._stats.count("refused_chunks", len(copies))
        self._lines.warn(log, reason, f"{len(copies)} chunks were not saved: {why}")

    def _give_up(self, copies: list[ChunkRef]) -> None:
        slots = self._opened().slots
        assert slots is not None
        slots.abort(_reserved(copies))

    def _commit(self, root: bytes, copies: list[ChunkRef], finish: Callable[[], None]) -> None:
        slots = self._opened().slots
        assert slots is not None
        try:
            finish()
        except Exception as trouble:  # noqa: BLE001  # a border: the thread lives on
            self._not_saved(copies, f"{type(trouble).__name__}: {trouble}", Reason.IO_ERROR)
            return
        slots.commit({root: copies}, self._seen.part)

    # ---- what is told after a step

    def finished_loads(self, idle: bool) -> set[str]:
        """The requests whose loads have ended, told once; blocks that were not filled are in `take_bad_blocks` then.

        In an `idle` step it waits a moment: an engine that spins would keep the threads that load, and those that
        look up, from the GIL.
        """
        if idle and self._loading:
            wait([next(iter(self._loading.values())).future], _IDLE_SECONDS)
        elif idle:
            time.sleep(_PAUSE_SECONDS)
        ended = [name for name, loading in self._loading.items() if loading.future.done()]
        for name in ended:
            self._load_ended(self._loading.pop(name))
        return set(ended)

    def _load_ended(self, loading: _Loading) -> None:
        load, chunk = loading.load, self._layout.chunk_tokens
        came = 0
        if (trouble := loading.future.exception()) is None:
            hit = loading.future.result()
            came, why, reason = hit.stop_tokens, hit.detail, hit.reason or Reason.ABSENT
        else:
            why, reason = f"{type(trouble).__name__}: {trouble}", Reason.IO_ERROR
        wanted = [block for block in load.blocks if block >= 0]
        bad = [block for block in load.blocks[came // self._seen.block_tokens :] if block >= 0]
        tokens = (len(wanted) - len(bad)) * self._seen.block_tokens
        self._stats.count("loaded_tokens", tokens)
        chunks = max(0, came // chunk - load.first)
        self._stats.count("loaded_bytes", chunks * self._layout.chunk_bytes // self._seen.parts)
        self._stats.count("load_seconds", time.perf_counter() - loading.began)
        if bad:
            self._bad_blocks.update(bad)
            self._failed.add(load.request)
            self._lines.warn(log, reason, f"{len(bad)} of {len(wanted)} blocks of a load did not come: {why}")
            self._stats.count("failed_loads", 1)
            self._stats.count("failed_load_tokens", len(bad) * self._seen.block_tokens)

    def take_bad_blocks(self) -> set[int]:
        """The blocks that loads left unfilled since the last call."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def take_meta(self) -> PagodaWorkerMetadata | None:
        """What came to nothing since the last call."""
        if not self._failed and not self._unsaved and not self._later:
            return None
        taken = PagodaWorkerMetadata(self._failed, self._unsaved, self._later)
        self._failed, self._unsaved, self._later = set(), set(), {}
        return taken

    def take_stats(self) -> PagodaStats | None:
        """What was counted since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """End the copies that run, then let go of the cache; ends in bounded time. Idempotent."""
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        running: list[Future[Any]] = [loading.future for loading in self._loading.values()]
        running += list(self._saving)
        wait(running, _END_SECONDS)
        self._save_threads.shutdown(wait=False, cancel_futures=True)
        cache, self._cache = self._cache, None
        if cache is not None:
            let_go(cache)

    # ---- parts of it

    @property
    def _blocks_per_chunk(self) -> int:
        return self._layout.chunk_tokens // self._seen.block_tokens

    def _kv(self, blocks: Sequence[int]) -> PagesKV | DevicePagesKV:
        return self._pages.with_table(blocks)

    def _opened(self) -> Cache:
        if self._cache is None:
            raise RuntimeError("the connector has no KV memory yet, or was shut down")
        return self._cache


def _reserved(copies: Sequence[ChunkRef]) -> list[Reserved]:
    return [Reserved(copy.key, copy.slot, copy.generation) for copy in copies]


def _reserved_on(pages: DevicePagesKV) -> SnapshotBuffer | None:
    """Take the device memory that copies need, and say how much; None where there is none left."""
    try:
        staging, taken = pages.preallocate(_snapshot_bytes(pages.device_index))
    except RuntimeError as trouble:  # torch.OutOfMemoryError is one
        log.warning(
            "no device memory is left for copies (%s): chunks are stored one at a time, or not at all; start vLLM with "
            "a lower --gpu-memory-utilization",
            trouble,
        )
        return None
    log.info(
        "%.0f MiB of device memory are taken for copies, beside what vLLM has planned for; if that is too much, start "
        "vLLM with a lower --gpu-memory-utilization",
        taken / (1 << 20),
    )
    return staging


def _snapshot_bytes(device_index: int | None) -> int:
    """The most device memory that is taken for what waits to be copied into slots."""
    if device_index is None:
        return _MOST_SNAPSHOT_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(device_index)
    return min(_MOST_SNAPSHOT_BYTES, int(free) // _FREE_SHARE)


def _landed(snapshot: DeviceSnapshot, views: list[Bytes]) -> None:
    """Copy a snapshot into its slots, and let others have its room."""
    try:
        snapshot.to_slots(views)
    finally:
        snapshot.release()


def _nothing() -> None:
    """For pages that are in their slots already."""
