"""PagodaConnector: vLLM's KV connector interface (V1). It passes each call to one of its halves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from pagoda.connectors.vllm import supported_engines
from pagoda.connectors.vllm.connector_stats import (
    COUNTERS,
    PagodaPromMetrics,
    PagodaStats,
)
from pagoda.connectors.vllm.engine_weights import EngineWeights, watch_engine_core
from pagoda.connectors.vllm.event_publisher import outlet_of
from pagoda.connectors.vllm.identity.media_names import hashes_media
from pagoda.connectors.vllm.join_vllm_log import join_vllm_log
from pagoda.connectors.vllm.metadata import (
    Handshake,
    PagodaMetadata,
    PagodaWorkerMetadata,
)
from pagoda.connectors.vllm.offloading.hybrid_connector import (
    PagodaHybridConnector,
)
from pagoda.connectors.vllm.options import read_options
from pagoda.connectors.vllm.request_hints import hint_reader
from pagoda.connectors.vllm.scheduler import PagodaScheduler
from pagoda.connectors.vllm.worker import PagodaWorker


class PagodaConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of an engine in PagodaKV's tiers.

    vLLM makes one for its scheduler and one for each worker, from `--kv-transfer-config`; see
    docs/how-to/vllm.md. Engines of one machine share what they store. KV whose load fails at run
    time is computed again. An engine that is not known to work is refused at its start, with a
    ValueError that says what to do.

    For a hybrid model, whose KV is of several kinds, the new object is a PagodaHybridConnector: by
    then, vLLM has decided which kinds of KV it keeps.
    """

    def __new__(
        cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> Any:
        """Return a new object of the class that serves this model."""
        if supported_engines.is_hybrid(kv_cache_config):
            return PagodaHybridConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        block_tokens = vllm_config.cache_config.block_size
        options = read_options(extra, block_tokens)
        join_vllm_log()
        supported_engines.check_vllm(options)
        supported_engines.check_engine(vllm_config, kv_cache_config)
        self._scheduler: PagodaScheduler | None = None
        self._worker: PagodaWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            supported_engines.log_choices(vllm_config, kv_cache_config)
            watch_engine_core()
            speculative = vllm_config.speculative_config
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            self._scheduler = PagodaScheduler(
                options,
                kv_cache_config.hash_block_size,
                outlet_of(vllm_config),
                kv_kind=(
                    get_kv_cache_spec_kind(spec).value,
                    get_kv_cache_spec_sliding_window(spec),
                ),
                shares_blocks=bool(
                    vllm_config.cache_config.enable_prefix_caching
                ),
                drops_last_block=speculative is not None
                and speculative.use_eagle_block_drop(),
                in_lockstep=vllm_config.parallel_config.data_parallel_size > 1,
                schedules_early=bool(
                    vllm_config.scheduler_config.async_scheduling
                ),
                hashes_media=hashes_media(vllm_config),
                role=vllm_config.kv_transfer_config.kv_role,
                hints=hint_reader(vllm_config.model_config, options.config.hints),
            )
        else:
            self._worker = PagodaWorker(options, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a chunk that is not saved is computed again."""
        return False

    def shutdown(self) -> None:
        """End all threads and close the cache, in bounded time. Idempotent."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    # ---- a worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the cache for the engine's KV memory. Raises ValueError for an unknown layout."""
        self._working.register(kv_caches)
        if not self._is_alone:
            self._working.report_handshake()

    def get_handshake_metadata(self) -> Handshake | None:
        """Return the description of the KV memory for the scheduler's half.

        A MultiConnector passes on the handshake of one of its connectors, so below it the
        description comes with the first step's messages, and the handshake is left to a connector
        that needs it for other engines (NIXL).
        """
        return self._working.handshake if self._is_alone else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the step's work."""
        super().bind_connector_metadata(connector_metadata)
        self._step: PagodaMetadata = connector_metadata
        self._working.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads; they continue while this step and the next ones run."""
        self._working.load(self._step)

    def has_connector_metadata(self) -> bool:
        """Return False: vLLM asks before it calls the next two, twice for each layer, and neither
        does anything.
        """
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request is scheduled before its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are saved after the step."""

    def wait_for_save(self) -> None:
        """Copy the pages of the chunks that this step completed."""
        self._working.save(self._step)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended. The first value is always None, because saves
        keep no block.
        """
        return None, self._working.finished_loads(self._step.idle)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads left unfilled; vLLM computes them."""
        return self._working.take_bad_blocks()

    def build_connector_worker_meta(self) -> PagodaWorkerMetadata | None:
        """Return which loads and saves failed, for the scheduler's half."""
        return self._working.take_meta()

    # ---- the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Open the cache as the workers have described it; another connector's description is
        ignored.
        """
        if mine := [
            one for one in metadata.values() if isinstance(one, Handshake)
        ]:
            self._scheduling.opened(mine)

    def on_new_request(self, request: Any) -> None:
        """Begin the request's look-up."""
        self._scheduling.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; (None, False) while the look-up runs."""
        return self._scheduling.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the tokens that are being loaded, by tier."""
        return self._scheduling.sources(request, num_external_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Add the load of an admitted request to the next step."""
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PagodaMetadata:
        """Return this step's work for the workers."""
        return self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' messages."""
        self._scheduling.take_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed at once."""
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Make all earlier chunks misses for this engine: the weights may have changed.

        vLLM calls this after it has emptied its own cache.
        """
        self._scheduling.weights.changed()
        return True

    @property
    def engine_weights(self) -> EngineWeights:
        """Which weights the engine computes with."""
        return self._scheduling.weights

    def take_events(self) -> Iterable[Any]:
        """Return the KV events that wait for a step: none with vLLM's publisher over ZMQ, which
        gets them at once.
        """
        outlet = self._scheduling.outlet
        return outlet.take() if outlet is not None else ()

    # ---- both

    def get_kv_connector_stats(self) -> PagodaStats | None:
        """Return what this half counted since the last call."""
        half = self._scheduler if self._scheduler is not None else self._working
        return half.stats.take()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that vLLM's offloading needs for a hybrid model; None: any."""
        hybrid = supported_engines.may_be_hybrid(vllm_config)
        return (
            PagodaHybridConnector.get_required_kvcache_layout(vllm_config)
            if hybrid
            else None
        )

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats:
        """Return stats from the numbers of another process."""
        # the stats of vLLM's offloading differ
        of_ours = data is None or data.keys() <= COUNTERS.keys()
        return (
            PagodaStats(data)
            if of_ours
            else PagodaHybridConnector.build_kv_connector_stats(data)
        )

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, *args: Any
    ) -> KVConnectorPromMetrics:
        """Return the counters of `PagodaStats`, or vLLM's own for a hybrid model; each ignores
        those of the other.
        """
        hybrid = supported_engines.may_be_hybrid(vllm_config)
        return (
            PagodaHybridConnector.build_prom_metrics
            if hybrid
            else PagodaPromMetrics
        )(vllm_config, *args)

    @property
    def _is_alone(self) -> bool:
        return get_kv_transfer_group() is self  # False below a MultiConnector

    @property
    def _working(self) -> PagodaWorker:
        assert self._worker is not None
        return self._worker

    @property
    def _scheduling(self) -> PagodaScheduler:
        assert self._scheduler is not None
        return self._scheduler
