"""An SGLang engine without its model: the real UnifiedRadixCache, its controller and its pools, on
the CPU.

What the model would compute is a function of all tokens up to a page's end, so every page can be
compared with what it must be, wherever it came from.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from testbed import sglang_parts

sglang_parts.install()

import sglang.srt.mem_cache.allocator as allocators  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

PAGE = 16
# on a quiet machine a request takes a hundredth of a second
DEADLINE_SECONDS = 120.0


@dataclass
class Shape:
    """What the pools of an engine are."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    page: int = PAGE
    device_tokens: int = 512
    ratio: float = 2.0
    layout: str = "page_first_direct"


def storage_config(root: Path, **options: Any) -> dict[str, Any]:
    """Return what `--hicache-storage-backend-extra-config` gets."""
    return {
        "backend_name": "pagoda",
        "module_path": "pagoda.connectors.sglang",
        "class_name": "PagodaHiCache",
        "prefetch_threshold": 1,
        "hicache_storage_pass_prefix_keys": True,
        "weights": "a test's",
        "host_path": str(root / "host"),
        "host_size": "32MiB",
        **options,
    }


@dataclass
class Outcome:
    """Where the tokens of one request came from, and how many pages of them were compared and
    wrong.
    """

    device: int = 0
    host: int = 0
    stored: int = 0  # prefetched from the storage
    computed: int = 0
    pages: int = 0
    wrong: list[str] = field(default_factory=list)


class Engine:
    """One engine; closes everything on `close`, as often as it is called."""

    def __init__(
        self,
        extra: dict[str, Any] | None,
        shape: Shape | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        group: Any = None,
    ) -> None:
        self.shape = shape = shape or Shape()
        self.rank = rank
        self._undo = contextlib.ExitStack()
        self._requests = 0
        start_group()
        server_args = self._undo.enter_context(
            get_context().override_server_args(
                page_size=shape.page,
                tp_size=ranks,
                device="cpu",
                enable_hierarchical_cache=True,
                hicache_ratio=shape.ratio,
                hicache_mem_layout=shape.layout,
                hicache_io_backend="direct",
                hicache_write_policy="write_through",
                hicache_storage_backend="dynamic" if extra else None,
                hicache_storage_backend_extra_config=json.dumps(extra)
                if extra
                else None,
                hicache_storage_prefetch_policy="wait_complete",
            )
        )
        self._undo.enter_context(
            get_parallel().override(
                tp_rank=rank, tp_size=ranks, pp_rank=0, attn_dcp_rank=0
            )
        )
        self.kv = MHATokenToKVPool(
            size=shape.device_tokens,
            page_size=shape.page,
            dtype=shape.dtype,
            head_num=shape.heads,
            head_dim=shape.head_dim,
            layer_num=shape.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = allocators.PagedTokenToKVPoolAllocator(
            size=shape.device_tokens,
            page_size=shape.page,
            dtype=shape.dtype,
            device="cpu",
            kvcache=self.kv,
            need_sort=False,
        )
        params = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(
                size=4,
                max_context_len=shape.device_tokens,
                device="cpu",
                enable_memory_saver=False,
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page,
            disable=False,
            tp_cache_group=group or dist.group.WORLD,
            tree_components=(ComponentType.FULL,),
        )
        try:
            self.cache = UnifiedRadixCache(params)
            self.cache.init_hicache(server_args, params)
        except BaseException:
            self._undo.close()
            raise
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0
        self.extra = extra

    @property
    def storage(self) -> Any:
        """The storage that SGLang made: PagodaHiCache."""
        return self.cache.cache_controller.storage_backend

    # ---- what a model computes

    def page_of(
        self, tokens: Sequence[int], salt: str | None, end: int
    ) -> torch.Tensor:
        """Return the bytes of the page that ends at token `end`: [layers, K and V, page, heads,
        dim].
        """
        shape = self.shape
        seed = hashlib.sha256(
            repr((salt, self.rank, shape.layers, str(shape.dtype))).encode()
        )
        seed.update(array("i", tokens[:end]).tobytes())
        count = (
            shape.layers
            * 2
            * shape.page
            * shape.heads
            * shape.head_dim
            * shape.dtype.itemsize
        )
        data = hashlib.shake_128(seed.digest()).digest(count)
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return found.view(shape.layers, 2, shape.page, -1)

    def _device_page(self, slots: torch.Tensor) -> torch.Tensor:
        layers = [
            torch.stack(
                [self.kv.k_buffer[layer][slots], self.kv.v_buffer[layer][slots]]
            )
            for layer in range(self.shape.layers)
        ]
        return (
            torch.stack(layers)
            .view(torch.uint8)
            .reshape(self.shape.layers, 2, self.shape.page, -1)
        )

    def _compute(
        self,
        tokens: Sequence[int],
        salt: str | None,
        end: int,
        slots: torch.Tensor,
    ) -> None:
        page = self.page_of(tokens, salt, end)
        for layer in range(self.shape.layers):
            for plane, buffer in enumerate((self.kv.k_buffer, self.kv.v_buffer)):
                rows = (
                    page[layer, plane]
                    .reshape(self.shape.page, self.shape.heads, -1)
                    .view(self.shape.dtype)
                )
                buffer[layer][slots] = rows

    # ---- requests

    def request(
        self,
        tokens: Sequence[int],
        salt: str | None = None,
        *,
        abort: bool = False,
    ) -> Outcome:
        """Do what the scheduler does for one prompt: prefetch, load, compare all that was found,
        compute the rest.
        """
        size = self.shape.page
        tokens = list(tokens[: len(tokens) // size * size])
        key = RadixKey(array("q", tokens), extra_key=None, cache_salt=salt)
        self._requests += 1
        handle = CacheRequestHandle(f"r{self._requests}", 0)
        cache = self.cache
        outcome = Outcome()
        match = cache.match_prefix(MatchPrefixParams(key=key))
        found = match.device_prefix_len + match.host_hit_length
        if found < len(tokens) and cache.enable_storage:
            node = match.last_host_node
            prefix_keys = (
                cache.get_prefix_hash_values(node)
                if cache.hicache_storage_pass_prefix_keys
                else None
            )
            cache.prefetch_from_storage(
                handle,
                node,
                array("q", tokens[found:]),
                cache.get_last_hash_value(node),
                prefix_keys,
                matched_prefix_tokens=tokens[:found],
                cache_salt=salt,
            )
            if abort:
                cache.release_aborted_request(handle)
                self.settle(2)
                return outcome
            self._until(lambda: cache.check_prefetch_progress(handle))
            match = cache.match_prefix(MatchPrefixParams(key=key))
            outcome.stored = max(
                0, match.device_prefix_len + match.host_hit_length - found
            )
        outcome.device = match.device_prefix_len
        outcome.host = match.host_hit_length - outcome.stored
        lock = cache.inc_lock_ref(
            match.best_match_node
            if not match.host_hit_length
            else match.last_device_node
        )
        node = match.last_device_node
        try:
            if match.host_hit_length:
                self._room(match.host_hit_length)
                request = SimpleNamespace(
                    rid=handle.rid,
                    last_node=node,
                    swa_host_hit_length=0,
                    mamba_host_hit_length=0,
                    kv=SimpleNamespace(mamba_pool_idx=None),
                )
                params = InitLoadBackParams(
                    best_match_node=match.best_match_node,
                    host_hit_length=match.host_hit_length,
                    req=request,
                )
                cache.init_load_back(params)
                cache.ready_to_load_host_cache()
                self._until(lambda: not cache.ongoing_load_back)
                match = cache.match_prefix(MatchPrefixParams(key=key))
        finally:
            cache.dec_lock_ref(node, lock.to_dec_params())
        lock = cache.inc_lock_ref(match.last_device_node)
        try:
            slots = cache.path_device_indices(match.last_device_node)[
                : match.device_prefix_len
            ]
            for end in range(size, match.device_prefix_len + 1, size):
                here = slots[end - size : end]
                outcome.pages += 1
                if not torch.equal(
                    self._device_page(here), self.page_of(tokens, salt, end)
                ):
                    outcome.wrong.append(
                        f"tokens {end - size} to {end} of {tokens[:8]}"
                    )
            rest = len(tokens) - match.device_prefix_len
            self._room(rest)
            new = (
                self.allocator.alloc(rest)
                if rest
                else torch.empty(0, dtype=torch.int64)
            )
            assert new is not None, "no room on the device"
            for at in range(0, rest, size):
                end = match.device_prefix_len + at + size
                self._compute(tokens, salt, end, new[at : at + size])
            outcome.computed = rest
            if rest:
                cache.insert(
                    InsertParams(
                        key=key,
                        value=torch.cat([slots, new]),
                        prev_prefix_len=match.device_prefix_len,
                    )
                )
        finally:
            cache.dec_lock_ref(match.last_device_node, lock.to_dec_params())
        self.settle(1)
        return outcome

    def _room(self, tokens: int) -> None:
        lack = tokens - self.allocator.available_size()
        if lack > 0:
            self.settle()
            self.cache.evict(EvictParams(num_tokens=lack))

    def settle(self, rounds: int = 0) -> None:
        """Let SGLang's threads finish what they have; `rounds`: only that many steps."""
        cache = self.cache
        if rounds:
            for _ in range(rounds):
                cache.check_hicache_events()
            return
        self._until(
            lambda: (
                not (
                    cache.ongoing_write_through
                    or cache.ongoing_backup
                    or cache.ongoing_load_back
                )
            )
        )

    def _until(self, done: Any) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self.cache.check_hicache_events()
            if done():
                return
            assert time.monotonic() < deadline, (
                "SGLang's threads did not end in time"
            )
            time.sleep(0.0005)

    def forget(self) -> None:
        """Evict all of the device and the host pool: what comes next is from the storage."""
        self.settle()
        self.cache.evict(EvictParams(num_tokens=self.shape.device_tokens))
        self.cache.evict_host(10**9)

    def attach(self, extra: dict[str, Any]) -> None:
        """Attach a storage at run time."""
        done, message = self.cache.attach_storage_backend(
            storage_backend="dynamic",
            storage_backend_extra_config_json=json.dumps(extra),
        )
        assert done, message

    def detach(self) -> None:
        """Detach the storage."""
        self.settle()
        done, message = self.cache.detach_storage_backend()
        assert done, message

    def close(self) -> None:
        """End SGLang's threads and the storage."""
        with contextlib.suppress(AttributeError):
            self.cache.shutdown()
            self.cache.release_host_resources()
        self._undo.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_group(rank: int = 0, ranks: int = 1, path: str | None = None) -> None:
    """Make this process one of a group of ranks, once."""
    if not dist.is_initialized():
        import tempfile

        init = f"file://{path or tempfile.mktemp(prefix='pagoda-gloo-')}"
        dist.init_process_group(
            "gloo", init_method=init, rank=rank, world_size=ranks
        )
