"""PagodaOffloadingSpec: the storage of PagodaHybridConnector, for models with several KV cache
groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from pagoda.base.log import guarded_logger
from pagoda.connectors.identity.plain_values import plain
from pagoda.connectors.vllm.identity.engine_namespace import namespace_of
from pagoda.connectors.vllm.identity.machine_facts import machine_facts
from pagoda.connectors.vllm.join_vllm_log import join_vllm_log
from pagoda.connectors.vllm.offloading.chunk_finder import Group
from pagoda.connectors.vllm.offloading.hybrid_connector import (
    PagodaHybridConnector,
)
from pagoda.connectors.vllm.offloading.messages import (
    WorkerGreeting,
    greet,
    greeted,
)
from pagoda.connectors.vllm.offloading.offloading_manager import (
    COUNTED,
    PagodaOffloadingManager,
)
from pagoda.connectors.vllm.offloading.offloading_worker import (
    EnginePages,
    PagodaOffloadingWorker,
)
from pagoda.connectors.vllm.options import chunk_options
from pagoda.connectors.vllm.shared_caches import opened
from pagoda.connectors.vllm.supported_engines import check_vllm, layer_specs
from pagoda.transfer.pages_kv import merged

log = guarded_logger("pagoda.vllm")

# by spec class: the attribute with the number of tokens before the end of a hit that are needed
_WINDOWS = {
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
    "SlidingWindowMLASpec": "sliding_window",
    "SlidingWindowSpec": "sliding_window",
}
_STATE = "MambaSpec"


class PagodaOffloadingSpec(OffloadingSpec):
    """Keeps the KV of hybrid models (sliding windows, several groups) in PagodaKV's tiers.

    The spec of PagodaHybridConnector; see docs/how-to/vllm.md. vLLM makes one for its scheduler and
    one for each worker. An engine that is not known to work is refused at its start, with a
    ValueError that says what to do.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the counters in addition to vLLM's own."""
        return {
            name: OffloadingCounterMetadata(text)
            for name, text in COUNTED.items()
        }

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if config.canonical_layout:
            raise ValueError(
                "canonical_layout: chunks always have the layout of the engine; leave it out"
            )
        self.options, self.blocks_per_chunk = chunk_options(config)
        join_vllm_log()
        check_vllm(self.options)
        # replicated: all ranks have the same bytes, so only the first stores, and all load its
        # chunks
        self.replicated_layout = config.replicated_layout
        self._parts = (
            1 if config.replicated_layout else config.parallel.world_size
        )
        self._part = 0 if config.replicated_layout else config.parallel.rank
        self._root = Path(self.options.config.host_path)
        self._manager: PagodaOffloadingManager | None = None
        self._worker: PagodaOffloadingWorker | None = None

    # ---- the scheduler's half

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's half. Raises ValueError unless all workers have registered their
        KV memory.
        """
        if self._manager is None:
            greeting = greeted(
                self._root, self.config.engine_id, self.config.parallel.world_size
            )
            if (
                greeting.parts != self._parts
                or greeting.chunk_tokens != self.options.config.chunk_tokens
            ):
                raise ValueError(
                    f"the workers cut chunks of {greeting.chunk_tokens} tokens in "
                    f"{greeting.parts} parts, the "
                    f"scheduler of {self.options.config.chunk_tokens} in {self._parts}: give all "
                    "the same "
                    "configuration and environment"
                )
            groups = {
                group.group_id: Group(
                    group.tokens_per_block * self.blocks_per_chunk, window
                )
                for group, window in zip(
                    self.config.groups, greeting.windows, strict=True
                )
            }
            cache = opened(
                self.options.config, greeting.namespace, greeting.layout
            )
            self._manager = PagodaOffloadingManager(
                cache, groups, self._parts, self.options.weights_run
            )
        return self._manager

    # ---- a worker's half

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return a worker's half for this KV memory. Raises ValueError for an unknown format,
        StoreError for a tier.
        """
        if self._worker is not None:
            self._worker.shutdown()
        connector = self._connector()
        vllm_config = connector._vllm_config
        kv_cache_config = connector._kv_cache_config
        specs = [
            layer_specs(kv_cache_config.kv_cache_groups[group.group_id])
            for group in self.config.groups
        ]
        groups = self._groups(kv_caches, specs)
        greeting = WorkerGreeting(
            namespace=namespace_of(
                vllm_config,
                str(vllm_config.cache_config.cache_dtype),
                self._parts,
                self.options,
            ),
            chunk_tokens=self.options.config.chunk_tokens,
            chunk_bytes=max(
                pages.layout(self._parts).chunk_bytes for pages in groups
            ),
            description=self._description(vllm_config, specs, groups),
            parts=self._parts,
            windows=tuple(_window(group) for group in specs),
        )
        cache = opened(self.options.config, greeting.namespace, greeting.layout)
        worker = self._worker = PagodaOffloadingWorker(
            cache, groups, self._part, self._parts
        )
        greet(
            self._root, self.config.engine_id, self.config.parallel.rank, greeting
        )
        return worker

    def _connector(self) -> PagodaHybridConnector:
        """Return the connector of this process with this spec: only the connector has the model's
        configuration.
        """
        agent: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        for connector in (agent, *getattr(agent, "_connectors", ())):
            if (
                isinstance(connector, PagodaHybridConnector)
                and connector.worker.spec is self
            ):
                return connector
        raise ValueError(
            "PagodaOffloadingSpec works under PagodaConnector only: name that as kv_connector, "
            "and leave "
            "spec_name and spec_module_path out"
        )

    def _groups(
        self, kv_caches: CanonicalKVCaches, specs: list[dict[str, Any]]
    ) -> list[EnginePages]:
        found = []
        for group, refs, layers in zip(
            self.config.groups, kv_caches.group_data_refs, specs, strict=True
        ):
            pages = [
                kv_caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
                for ref in refs
            ]
            planes: list[Any] = merged(pages)
            state = _kinds(layers) == {_STATE}
            found.append(
                EnginePages(
                    group.group_id,
                    planes,
                    group.tokens_per_block,
                    self.blocks_per_chunk,
                    state,
                )
            )
        return found

    def _description(
        self,
        vllm_config: Any,
        specs: list[dict[str, Any]],
        groups: list[EnginePages],
    ) -> str:
        """Return everything that decides the bytes of a chunk."""
        layers = [name for group in specs for name in group]
        contexts = vllm_config.compilation_config.static_forward_context
        facts = {
            "machine": machine_facts(
                groups[0].planes[0].device, vllm_config, layers
            ),
            "layout": self.config.kv_cache_layout,
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "groups": [
                [
                    [
                        name,
                        type(spec).__name__,
                        plain(spec),
                        list(_tensors(contexts[name].kv_cache)),
                    ]
                    for name, spec in group.items()
                ]
                for group in specs
            ],
            "pages": [
                [pages.block_tokens, [plane.shape[1] for plane in pages.planes]]
                for pages in groups
            ],
            "blocks_per_chunk": self.blocks_per_chunk,
            "parts": [self._parts, self.config.parallel.world_size],
        }
        return json.dumps(facts, sort_keys=True)


def _kinds(layers: dict[str, Any]) -> set[str]:
    return {type(spec).__name__ for spec in layers.values()}


def _window(layers: dict[str, Any]) -> int | None:
    """Return how many tokens before the end of a hit a group needs; None: all tokens."""
    kinds = _kinds(layers)
    if kinds == {_STATE}:
        return 1
    if kinds <= _WINDOWS.keys():
        return max(
            int(getattr(spec, _WINDOWS[type(spec).__name__]))
            for spec in layers.values()
        )
    return None


def _tensors(kv_cache: Any) -> Iterator[list[object]]:
    """Return a description of a layer's tensors, without the number of blocks."""
    for tensor in (
        (kv_cache,) if isinstance(kv_cache, torch.Tensor) else tuple(kv_cache)
    ):
        yield [str(tensor.dtype), list(tensor.shape[1:]), list(tensor.stride())]
