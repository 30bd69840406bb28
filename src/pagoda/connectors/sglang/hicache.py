"""PagodaHiCache: SGLang's L3. It copies pages directly between SGLang's host pools and slots of the
host tier.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from pagoda.base.clock import Deadline
from pagoda.base.errors import StoreError
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.cache import Cache
from pagoda.cache.call import CallOptions
from pagoda.connectors.extra_options import unused_options
from pagoda.connectors.sglang import storage_options
from pagoda.connectors.sglang.engine_facts import (
    EngineFacts,
    engine_facts,
    namespace_of,
)
from pagoda.connectors.sglang.pool_pages import PoolPages
from pagoda.connectors.sglang.weight_updates import (
    watch_weights,
    weights_in_memory,
)
from pagoda.keys import derive_keys
from pagoda.transfer.pages_kv import PagesKV

log = guarded_logger("pagoda.sglang")
T = TypeVar("T")

_MOST_LOOKS = 256  # the most windows of a pool that one question examines
# pools that are the same in all tensor-parallel ranks
_REPLICATED = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost")


class _Pool(NamedTuple):
    """One host pool of SGLang, and the cache of its pages. A page is a chunk."""

    pages: PoolPages
    cache: Cache


class _Run(NamedTuple):
    """Consecutive pages of one prompt: their position in a pool's cache, and the options that name
    them.
    """

    pool: _Pool
    first: int
    pages: int
    options: CallOptions


class PagodaHiCache(HiCacheStorage):
    """A storage of SGLang's HiCache; see docs/how-to/sglang.md. Thread-safe: SGLang calls it from
    several threads.

    Raises ConfigError or StoreError, which say what to do, while SGLang starts or attaches it.
    Afterwards it never raises and never waits without a deadline: what fails is False or a shorter
    run, is counted, and gets a log line.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Read the options. `kwargs`: other arguments of SGLang, which passes none so far."""
        extra = storage_config.extra_config
        if extra is None:
            extra = storage_config.extra_config = {}
        self._options = storage_options.read_options(extra)
        storage_options.check_version(
            sglang.__version__, self._options.allow_untested_sglang
        )
        watch_weights()
        if storage_config.tp_rank == 0 and (
            unused := unused_options("SGLang", extra)
        ):
            log.warning(unused)
        # SGLang reads it afterwards, and copies pages without a buffer
        extra["interface_v1"] = 1
        self._storage = storage_config
        self._registered: dict[str, Any] = {}
        self._pools: dict[str, _Pool] = {}
        self._ready = False  # True after all pools of the start were registered
        self._engine: EngineFacts | None = None  # read once, for all pools
        self._cleared = ""  # a random text after the storage was cleared
        self._lines = RateLimitedLog()
        self._said_no_prefix = False
        self._metrics = StorageMetrics()

    # ---- the pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the cache of the KV's pool. Raises ConfigError or StoreError, which say what to do.

        Of the three calls of an attachment, SGLang handles only a failure of this one: after a
        later one it considers the storage as attached, and refuses another storage until it is
        detached.
        """
        self.mem_pool_host = mem_pool_host
        self._registered[str(PoolName.KV)] = mem_pool_host
        self._open(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(
        self, host_pool: Any, host_pool_name: Any
    ) -> None:
        """Remember a pool; a pool that is registered late is stored if possible."""
        name = str(host_pool_name)
        self._registered[name] = host_pool
        if self._ready and name not in self._pools:
            try:
                self._open(name, host_pool)
            except Exception as trouble:  # noqa: BLE001
                # a boundary: the engine is already running
                self._failed(
                    Reason.IO_ERROR,
                    f"pages of the pool {name!r} are not stored: {trouble}",
                )

    def on_host_pools_registered(self) -> None:
        """Open the caches of the other pools. Raises like `register_mem_pool_host`, after it has
        closed all caches.
        """
        with ExitStack() as undo:
            undo.callback(self.close)
            for name, pool in self._registered.items():
                if name not in self._pools:
                    self._open(name, pool)
            undo.pop_all()
        self._ready = True

    def _open(self, name: str, pool: Any) -> None:
        kinds = {kind.__name__ for kind in type(pool).__mro__}
        sharded = not (
            self._storage.is_mla_model and kinds.intersection(_REPLICATED)
        )
        if self._engine is None:
            self._engine = engine_facts(self._options)
        kv_dtype = str(pool.dtype).removeprefix("torch.")
        namespace = namespace_of(
            self._engine,
            self._storage,
            kv_dtype,
            self._options.salt,
            sharded=sharded,
        )
        facts = {"sglang": sglang.__version__}
        page_tokens = int(self._registered[str(PoolName.KV)].page_size)
        pages = PoolPages(name, pool, page_tokens, facts)
        config = self._options.config
        cache = Cache(
            config,
            namespace=namespace,
            layout=pages.layout,
            chunk_tokens=page_tokens,
        )
        if cache.slots is None:
            cache.close()
            raise StoreError(
                f"{config.host_path} has no room for one page of {pages.layout.slot_bytes:,} "
                "bytes: mount it with a "
                "larger size= (docker: --shm-size), or choose another host_path"
            )
        self._pools[name] = _Pool(pages, cache)

    # ---- pages of the KV

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored, in any tier; protect them from eviction for a
        moment.
        """
        return self._guarded(
            lambda: self._stored(str(PoolName.KV), keys, extra_info), 0
        )

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of SGLang's pool with the leading stored pages; return for each page whether
        it was filled.
        """
        return self._get(str(PoolName.KV), keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages: in the host tier when this returns, in the lower tiers some time later.

        If SGLang does not name the pages before them, the common beginning of many prompts seems
        unused, because it is in SGLang's own pools, and it is evicted first. Then no prompt hits
        after a restart.
        """
        if (
            not self._said_no_prefix
            and getattr(extra_info, "prefix_keys", None) is None
        ):
            self._said_no_prefix = True
            log.warning(
                "SGLang does not name the pages before a page: the common beginning of prompts "
                "is evicted first. Set "
                "hicache_storage_pass_prefix_keys to true in --hicache-storage-backend-extra-config"
            )
        return self._set(str(PoolName.KV), keys, host_indices, extra_info)

    # ---- pages of several pools

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Any = None,
        extra_info: Any = None,
    ) -> Any:
        """Return the longest prefix that is usable with all pools, the shorter ones, and the hits
        of each pool.
        """
        nothing = PoolTransferResult(0, {}, [])
        return self._guarded(
            lambda: self._usable(keys, pool_transfers or [], extra_info), nothing
        )

    def batch_get_v2(
        self, transfers: Any, extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_get_v1` for each pool."""
        return {
            one.name: self._get(
                str(one.name), one.keys or [], one.host_indices, extra_info
            )
            for one in transfers
        }

    def batch_set_v2(
        self, transfers: Any, extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_set_v1` for each pool."""
        return {
            one.name: self._set(
                str(one.name), one.keys or [], one.host_indices, extra_info
            )
            for one in transfers
        }

    def _usable(
        self, keys: Sequence[str], transfers: Sequence[Any], extra_info: Any
    ) -> Any:
        kv = self._stored(str(PoolName.KV), keys, extra_info)
        hits = {PoolName.KV: kv} if kv else {}
        usable = set(range(1, kv + 1))
        for transfer in transfers:
            if not usable:
                # a pool that was not asked gets no number: SGLang would consider 0 an answer
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never decides a hit
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                ends = self._ends(
                    str(transfer.name), keys[:kv], window, extra_info
                )
            else:
                ends = set(
                    range(
                        1,
                        self._stored(
                            str(transfer.name),
                            keys[:kv],
                            extra_info,
                            counted=False,
                        )
                        + 1,
                    )
                )
            if ends:
                hits[transfer.name] = max(ends)
            usable &= ends
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _ends(
        self, name: str, keys: Sequence[str], window: int, extra_info: Any
    ) -> set[int]:
        """Return prefixes of which a pool has the last `window` pages, as far as a bounded search
        finds them.

        Each look-up asks for the unknown pages of a window, from the longest prefix on. It finds
        the first missing page, and no window with this page can be complete.
        """
        deadline = Deadline(self._limit_seconds(name))
        found: set[int] = set()
        end = known = len(keys)  # pages [known, end) are stored
        looks = 0
        while end > 0:
            begin = max(0, end - window)
            here = known - begin
            if here > 0:
                if looks == _MOST_LOOKS or deadline.passed:
                    break
                looks += 1
                here = self._stored(
                    name,
                    keys[begin:known],
                    extra_info,
                    after=begin,
                    counted=False,
                    limit_seconds=deadline.remaining(),
                )
            if begin + here < known:
                end = known = begin + here
                continue
            found.add(end)
            known = begin
            end = end - 1
        return found

    # ---- calls of a cache

    def _stored(
        self,
        name: str,
        keys: Sequence[str],
        extra_info: Any,
        *,
        after: int = 0,
        counted: bool = True,
        limit_seconds: float | None = None,
    ) -> int:
        """Return how many leading pages a pool's cache has; `after`: the pages between the known
        prefix and these.
        """
        run = self._run(name, keys, extra_info, after)
        if run is None:
            return 0
        if limit_seconds is not None:
            run.options["limit_seconds"] = limit_seconds
        hit = run.pool.cache.lookup(None, counted=counted, **run.options)
        return hit.num_tokens // run.pool.pages.layout.chunk_tokens

    def _get(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        def work(run: _Run, kv: PagesKV) -> tuple[int, Reason | None, str]:
            hit = run.pool.cache.retrieve(None, kv, counted=False, **run.options)
            if (
                hit.reason is not None
                and (slots := run.pool.cache.slots) is not None
            ):
                # the look-up has counted the tokens
                slots.count_request(0, {}, hit.reason, slots.namespace())
            return (
                hit.num_tokens // run.pool.pages.layout.chunk_tokens,
                hit.reason,
                hit.detail,
            )

        took = self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth
        return self._copied(
            "loaded", work, name, keys, host_indices, extra_info, took
        )

    def _set(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        def work(run: _Run, kv: PagesKV) -> tuple[int, Reason | None, str]:
            stored = run.pool.cache.store(None, kv, **run.options)
            return stored.num_chunks + stored.present, stored.reason, ""

        took = self._metrics.backup_pgs, self._metrics.backup_bandwidth
        return self._copied(
            "stored", work, name, keys, host_indices, extra_info, took
        )

    def _copied(
        self,
        what: str,
        work: Callable[[_Run, PagesKV], tuple[int, Reason | None, str]],
        name: str,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: Any,
        took: tuple[list[int], list[float]],
    ) -> list[bool]:
        """Copy pages with `work`, which returns how many leading pages it copied, and why not more;
        return which.
        """

        def copy() -> list[bool]:
            began = time.perf_counter()
            run = self._run(name, keys, extra_info)
            if run is None:
                return [False] * len(keys)
            count, reason, detail = work(
                run, run.pool.pages.kv(host_indices, run.first, run.pages)
            )
            if count < run.pages:
                why = (
                    f"{run.pages - count} of {run.pages} pages of {name!r} were not {what} "
                    f"{detail}"
                ).rstrip()
                self._lines.warn(log, reason or Reason.ABSENT, why)
            if self._storage.enable_storage_metrics:
                took[0].append(count)
                took[1].append(
                    count
                    * run.pool.cache.layout.chunk_bytes
                    / 1e9
                    / (time.perf_counter() - began)
                )
            return [True] * count + [False] * (run.pages - count)

        return self._guarded(copy, [False] * len(keys))

    def _run(
        self, name: str, keys: Sequence[str], extra_info: Any, after: int = 0
    ) -> _Run | None:
        """Return the run of these keys; None if there is nothing to ask for. Raises ValueError for
        invalid keys.

        A key of SGLang is a hash of all tokens up to the end of its page, of the request's salt and
        its adapter.
        """
        pool = self._pools.get(name)
        if pool is None or not keys:
            if keys:
                self._failed(
                    Reason.CLOSED,
                    f"the pool {name!r} is not stored, or the storage was detached",
                )
            return None
        weights = weights_in_memory()
        if not weights.flushed:
            self._failed(
                Reason.CLEARED,
                "nothing is stored or found: the weights were updated, and SGLang has KV of "
                "earlier ones until its "
                "caches are flushed (POST /flush_cache)",
            )
            return None
        prefix = getattr(extra_info, "prefix_keys", None) or ()
        size = pool.pages.layout.chunk_tokens
        first = len(prefix) + after
        # names the parent, so that tails are evicted before heads
        before = prefix[-1:] if not after else ()
        slots = pool.cache.slots
        assert slots is not None
        # read once, because another thread may clear
        version = self._cleared + weights.version
        root = slots.namespace(weights_version=version or None)
        derived = derive_keys([key.encode() for key in (*before, *keys)], root)
        begin = first - len(before)
        options: CallOptions = {
            "keys": [
                ((begin + i) * size, (begin + i + 1) * size, key)
                for i, key in enumerate(derived)
            ],
            "start_tokens": first * size,
            # SGLang does not always name the whole prefix of the pages
            "any_position": True,
            "limit_seconds": self._limit_seconds(name),
        }
        if version:
            options["weights_version"] = version
        return _Run(pool, first, len(keys), options)

    def _limit_seconds(self, name: str) -> float:
        """Return a pool's share of the limit: half is for the KV, whose bytes are the most, or all
        without others.
        """
        parts = (
            min(2, len(self._pools))
            if name == PoolName.KV
            else 2 * (len(self._pools) - 1)
        )
        return storage_options.LIMIT_SECONDS / max(1, parts)

    def _guarded(self, work: Callable[[], T], miss: T) -> T:
        try:
            return work()
        except Exception as trouble:  # noqa: BLE001
            # a boundary: SGLang's threads continue
            self._failed(Reason.IO_ERROR, f"{type(trouble).__name__}: {trouble}")
            return miss

    def _failed(self, reason: Reason, message: str) -> None:
        """Count and log failures that the caches do not see."""
        for pool in list(self._pools.values())[:1]:
            if pool.cache.slots is not None:
                pool.cache.slots.count_dropped(reason, 1)
        self._lines.warn(log, reason, message)

    # ---- the rest of SGLang's interface

    def clear(self) -> None:
        """Make all earlier pages misses for this engine.

        They stay for other engines; `pagoda clear` removes them. Only this engine finds what it
        stores from now on.
        """
        self._cleared = secrets.token_hex(16)

    def get_stats(self) -> Any:
        """Return the pages and the speed in GB/s of each call since the last time, in SGLang's
        format.
        """
        taken = self._metrics
        self._metrics = StorageMetrics()
        return taken

    def close(self) -> None:
        """Write waiting chunks to the lower tiers, for some seconds at most, and close the caches.
        Idempotent.
        """
        pools = self._pools
        self._pools = {}
        for pool in pools.values():
            pool.cache.close()

    def exists(self, key: str) -> bool:
        """Return whether the first page of a prompt is stored. SGLang uses `batch_exists`."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> None:
        """Return None: SGLang uses `batch_get_v1`, because this storage sets interface_v1."""

    def batch_get(
        self, keys: Any, target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Return None for each key, like `get`."""
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False: nothing is stored by this call, see `get`."""
        return False

    def batch_set(
        self,
        keys: Any,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False, like `set`."""
        return False
