"""A worker's half: loads chunks into the engine's blocks on threads, and copies the pages of new
chunks into slots.

New chunks are copied within the step that computed them, so vLLM need not keep blocks for them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Answer, Pool, wait
from pagoda.cache import Cache, Hit
from pagoda.cache.call import CallOptions
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.connector_stats import PagodaStats
from pagoda.connectors.vllm.identity.engine_namespace import namespace_of
from pagoda.connectors.vllm.kv_memory import KVMemory, inspect_kv_caches, paged_kv
from pagoda.connectors.vllm.metadata import (
    Handshake,
    Later,
    Load,
    PagodaMetadata,
    PagodaWorkerMetadata,
    Save,
)
from pagoda.connectors.vllm.options import ConnectorOptions
from pagoda.connectors.vllm.prefill_steps import PrefillSteps
from pagoda.connectors.vllm.shared_caches import end_threads, let_go, opened
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes
from pagoda.transfer.gpu.device_pages_kv import (
    DevicePagesKV,
    DeviceSnapshot,
    SnapshotBuffer,
)
from pagoda.transfer.pages_kv import PagesKV

log = guarded_logger("pagoda.vllm")

_LOAD_THREADS = 4
_SAVE_THREADS = 1  # chunks of one prompt become visible in its order
_IDLE_SECONDS = 0.005
_PAUSE_SECONDS = 0.0005
# device memory for waiting snapshots; one chunk is always allowed
_MOST_SNAPSHOT_BYTES = 512 << 20
# at most a quarter of the device memory that vLLM's own plan leaves free
_FREE_SHARE = 4


class _Loading(NamedTuple):
    """A load in progress."""

    load: Load
    future: Future[Hit]
    began: float


# chunks of one request: the root of their namespace, a snapshot that is still to be copied, and the
# slots
_Copied = tuple[bytes, list[ChunkRef], DeviceSnapshot | None, list[Bytes]]


class PagodaWorker:
    """Does the work that the scheduler's half requests. For the worker's thread; copies run on
    separate threads.
    """

    def __init__(
        self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._options = options
        self._configs = vllm_config, kv_cache_config
        self._cache: Cache | None = None
        self._loading: dict[str, _Loading] = {}
        self._bad_blocks: set[int] = set()
        # for the scheduler's half, since the last step
        self._report = PagodaWorkerMetadata()
        # for snapshots that wait to be copied into slots; None: pages are copied at once
        self._staging: SnapshotBuffer | None = None
        self._load_threads = Pool(_LOAD_THREADS, "pagoda-load")
        self._save_threads = Pool(_SAVE_THREADS, "pagoda-save")
        # None: another rank measures them
        self._prefills: PrefillSteps | None = None
        self._handled: BaseException | None = None
        self._step: int | None = None  # the last step that began
        self._ended = True  # whether `save` was called for it
        self._healthy = True  # False once a step was interrupted
        self.stats = PagodaStats()  # since the last step
        self._lines = RateLimitedLog()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Inspect the engine's KV memory and open the cache for it. Raises ValueError for an
        unknown format.
        """
        vllm_config, kv_cache_config = self._configs
        canonical = self._options.canonical_layout
        seen = inspect_kv_caches(
            kv_caches, vllm_config, kv_cache_config, canonical=canonical
        )
        kv_dtype = str(vllm_config.cache_config.cache_dtype)
        parts = 1 if canonical else seen.parts
        self.open_cache(
            seen, namespace_of(vllm_config, kv_dtype, parts, self._options)
        )

    def open_cache(self, seen: KVMemory, namespace: Namespace) -> None:
        """Open the cache for this memory. Raises StoreError, which says what to do, if a tier
        cannot be opened.
        """
        blocks = self._options.config.chunk_tokens // seen.block_tokens
        layout = KVLayout.opaque(
            self._options.config.chunk_tokens,
            seen.parts * blocks * sum(seen.page_bytes),
            seen.description,
        )
        self._pages = paged_kv(
            seen.planes,
            layout,
            seen.block_tokens,
            seen.on_cpu,
            part=seen.part,
            parts=seen.parts,
        )
        self._cache = opened(self._options.config, namespace, layout)
        if self._pages.device_index is not None:
            self._slots.use_device(self._pages.device_index)
        if isinstance(self._pages, DevicePagesKV):
            self._staging = _reserved_on(self._pages)
        self._seen = seen
        self._layout = layout
        if seen.part == 0 and seen.writes:
            self._prefills = PrefillSteps(self._cache, seen.planes[0].device)
        else:
            self._slots.leave_loads_to_another_rank()
        self.handshake = Handshake(
            namespace, layout, seen.block_tokens, seen.parts
        )

    def report_handshake(self) -> None:
        """Send the description of the KV memory with the next step's messages."""
        self._report.described = (self.handshake,)

    # ---- a step

    def begin(self, meta: PagodaMetadata) -> None:
        """Note when the step began, and the exception that the engine's caller is handling, if any.

        vLLM's scheduler assumes that each step was computed. If a step never arrived here, or never
        ended (an interrupt in a notebook), the engine has pages that were not computed.
        """
        if not self._ended or self._step not in (None, meta.number - 1):
            self._step_interrupted()
        self._step = meta.number
        self._ended = False
        if meta.loads_of_others:
            # sent at the step's end, with the blocks that failed
            self._report.ended = meta.number
        if self._prefills is not None:
            self._prefills.begin(meta.prompts)
        self._handled = sys.exc_info()[1]

    def load(self, meta: PagodaMetadata) -> None:
        """Begin the step's loads; returns at once."""
        for load in meta.loads:
            began = time.perf_counter()
            try:
                future = self._load_threads.submit(self._retriever(load))
            except Exception as trouble:  # noqa: BLE001
                # a boundary: a load that does not begin has failed
                future = Answer[Hit]()
                future.set_exception(trouble)
            self._loading[load.request] = _Loading(load, future, began)

    def _retriever(self, load: Load) -> Callable[[], Hit]:
        """Return a load, which a thread runs; on a GPU it waits for all work that was launched
        before now.
        """
        kv = self._pages.with_table(load.blocks)
        start = load.first * self._layout.chunk_tokens
        options: CallOptions = {
            "keys": load.keys,
            "start_tokens": start,
            "lora": load.lora,
            "salt": load.salt,
            "weights_version": load.version,
        }
        return partial(
            self._opened().retrieve, None, kv, counted=False, **options
        )

    def save(self, meta: PagodaMetadata) -> None:
        """Copy the pages of the step's new chunks; they become visible after the step.

        vLLM also calls this after an exception in a step (a signal, no memory). Then some layers
        may not be computed, and stored chunks outlive the engine, so nothing is stored from then
        on.
        """
        (handled, self._handled), trouble = (
            (self._handled, None),
            sys.exc_info()[1],
        )
        self._ended = True
        if trouble is not None and trouble is not handled:
            self._step_interrupted()
        elif self._prefills is not None:
            self._prefills.end()
        here = meta.scheduler_pid == os.getpid()
        copied = list[_Copied]()
        for save in meta.saves:
            if not self._seen.writes:
                continue  # another rank has the same bytes and writes them
            copies = list(save.copies)
            if not self._healthy:
                # the scheduler still owns these slots, not this rank
                self._report.unsaved.update([copy.reserved for copy in copies])
                self._not_saved(
                    copies,
                    "a step of the engine was interrupted",
                    Reason.FAILED_CHECK,
                )
                continue
            if not here:
                copies = self._adopted(copies)
            if not self._seen.on_cpu:
                copies = self._with_room(save, copies)
            if copies and (one := self._copy(save, copies)) is not None:
                copied.append(one)
        try:
            if copied:  # one call for all requests costs less than one for each
                self._save_threads.submit(self._commit, copied)
        except Exception as trouble:  # a boundary, as in `_copy`  # noqa: BLE001
            for _, copies, snapshot, _ in copied:
                if snapshot is not None:
                    snapshot.release()
                self._not_saved(
                    copies,
                    f"{type(trouble).__name__}: {trouble}",
                    Reason.IO_ERROR,
                )

    def _step_interrupted(self) -> None:
        if self._healthy:
            log.error(
                "a step of the engine was interrupted: the engine stores nothing until it is "
                "restarted"
            )
        self._healthy = False

    def _adopted(self, copies: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Return the chunks whose slots still wait for this rank's part."""
        reserved = [copy.reserved for copy in copies]
        adopted = self._slots.adopt(reserved, self._seen.part)
        self._report.unsaved.update(
            one for one, ok in zip(reserved, adopted, strict=True) if not ok
        )
        return [copy for copy, ok in zip(copies, adopted, strict=True) if ok]

    def _with_room(self, save: Save, copies: list[ChunkRef]) -> list[ChunkRef]:
        """Return the leading chunks for which there is device memory; the others are tried in a
        later step.
        """
        fit = 1 if self._staging is None else self._staging.free
        if rest := copies[fit:]:
            self._give_up(rest)
            self._report.later[save.request] = Later(rest[0].position, len(rest))
        return copies[:fit]

    def _copy(self, save: Save, copies: list[ChunkRef]) -> _Copied | None:
        """Copy pages into slots, or into a snapshot; None if that failed."""
        snapshot = None
        try:
            blocks_per_chunk = (
                self._layout.chunk_tokens // self._seen.block_tokens
            )
            kv = self._pages.with_table(
                [-1] * (save.first * blocks_per_chunk) + save.blocks
            )
            starts = [
                copy.position * self._layout.chunk_tokens for copy in copies
            ]
            views = self._slots.views([copy.slot for copy in copies])
            if isinstance(kv, PagesKV):
                kv.to_slots(starts, views)
            else:
                snapshot = kv.snapshot(starts, self._staging)
        except Exception as trouble:  # noqa: BLE001
            # a boundary: what is not saved is computed again
            self._not_saved(
                copies, f"{type(trouble).__name__}: {trouble}", Reason.IO_ERROR
            )
            return None
        self.stats.count(
            "saved_bytes",
            len(copies) * self._layout.chunk_bytes // self._seen.parts,
        )
        if self._seen.part == 0:
            self.stats.count("saved_chunks", len(copies))
        return save.root, copies, snapshot, views

    def _not_saved(
        self, copies: list[ChunkRef], why: str, reason: Reason
    ) -> None:
        self._give_up(copies)
        self.stats.count("refused_chunks", len(copies))
        self._lines.warn(
            log, reason, f"{len(copies)} chunks were not saved: {why}"
        )

    def _give_up(self, copies: list[ChunkRef]) -> None:
        self._slots.abort([copy.reserved for copy in copies])

    def _commit(self, copied: list[_Copied]) -> None:
        """Copy the snapshots of a step into the slots, and commit all chunks. Runs on a thread."""
        written: dict[bytes, list[ChunkRef]] = {}
        for root, copies, snapshot, views in copied:
            try:
                if snapshot is not None:
                    try:
                        snapshot.to_slots(views)
                    finally:
                        snapshot.release()
                written.setdefault(root, []).extend(copies)
            except Exception as trouble:  # noqa: BLE001
                # a boundary: the thread continues
                self._not_saved(
                    copies,
                    f"{type(trouble).__name__}: {trouble}",
                    Reason.IO_ERROR,
                )
        self._slots.commit(written, self._seen.part)

    # ---- reports after a step

    def finished_loads(self, idle: bool) -> set[str]:
        """Return the requests whose loads have ended, each once; `take_bad_blocks` returns the
        unfilled blocks.

        In an `idle` step this waits a moment: an engine that polls without pause would keep the GIL
        from the threads that load and look up.
        """
        if idle and self._loading:
            wait([next(iter(self._loading.values())).future], _IDLE_SECONDS)
        elif idle:
            time.sleep(_PAUSE_SECONDS)
        ended = [
            name
            for name, loading in self._loading.items()
            if loading.future.done()
        ]
        for name in ended:
            self._load_ended(self._loading.pop(name))
        return set(ended)

    def _load_ended(self, loading: _Loading) -> None:
        load = loading.load
        chunk = self._layout.chunk_tokens
        loaded = 0
        if (trouble := loading.future.exception()) is None:
            hit = loading.future.result()
            loaded = hit.stop_tokens
            why = hit.detail
            reason = hit.reason or Reason.ABSENT
        else:
            why = f"{type(trouble).__name__}: {trouble}"
            reason = Reason.IO_ERROR
        wanted = [block for block in load.blocks if block >= 0]
        bad = [
            block
            for block in load.blocks[loaded // self._seen.block_tokens :]
            if block >= 0
        ]
        tokens = (len(wanted) - len(bad)) * self._seen.block_tokens
        self.stats.count("loaded_tokens", tokens)
        chunks = max(0, loaded // chunk - load.first)
        self.stats.count(
            "loaded_bytes", chunks * self._layout.chunk_bytes // self._seen.parts
        )
        self.stats.count("load_seconds", time.perf_counter() - loading.began)
        if bad:
            self._bad_blocks.update(bad)
            self._report.bad_blocks.update(bad)
            self._report.failed.add(load.request)
            self._lines.warn(
                log,
                reason,
                f"{len(bad)} of {len(wanted)} blocks of a load were not loaded: {why}",
            )
            self.stats.count("failed_loads", 1)
            self.stats.count(
                "failed_load_tokens", len(bad) * self._seen.block_tokens
            )

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that loads left unfilled since the last call."""
        taken = self._bad_blocks
        self._bad_blocks = set()
        return taken

    def take_meta(self) -> PagodaWorkerMetadata | None:
        """Return the failed loads and saves since the last call; None if there are none."""
        taken = self._report
        self._report = PagodaWorkerMetadata()
        return taken if taken != self._report else None

    def shutdown(self) -> None:
        """End the running copies, then release the cache; ends in bounded time. Idempotent."""
        end_threads(self._load_threads, self._save_threads)
        cache = self._cache
        self._cache = None
        if cache is not None:
            let_go(cache)

    # ---- helpers

    @property
    def _slots(self) -> HostSlots:
        slots = self._opened().slots
        assert slots is not None  # an engine without a host tier was refused
        return slots

    def _opened(self) -> Cache:
        if self._cache is None:
            raise RuntimeError(
                "the connector was shut down, or no KV memory was registered yet"
            )
        return self._cache


def _reserved_on(pages: DevicePagesKV) -> SnapshotBuffer | None:
    """Allocate the device memory that copies need, and log how much; None if none is left."""
    try:
        staging, taken = pages.preallocate(_snapshot_bytes(pages.device_index))
    except RuntimeError as trouble:  # torch.OutOfMemoryError is one
        log.warning(
            "no device memory is left for copies (%s): chunks are stored one at a time, or not "
            "at all; start vLLM with "
            "a lower --gpu-memory-utilization",
            trouble,
        )
        return None
    log.info(
        "%.0f MiB of device memory are allocated for copies, in addition to vLLM's plan; if this "
        "is too much, start "
        "vLLM with a lower --gpu-memory-utilization",
        taken / (1 << 20),
    )
    return staging


def _snapshot_bytes(device_index: int | None) -> int:
    """Return the largest amount of device memory for snapshots that wait to be copied into
    slots.
    """
    if device_index is None:
        return _MOST_SNAPSHOT_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(device_index)
    return min(_MOST_SNAPSHOT_BYTES, int(free) // _FREE_SHARE)
