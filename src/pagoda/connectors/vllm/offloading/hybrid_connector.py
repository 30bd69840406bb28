"""PagodaHybridConnector: vLLM's own OffloadingConnector over PagodaKV's tiers, for models with
several kinds of KV.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from pagoda.connectors.extra_options import ExtraOptions
from pagoda.connectors.vllm.engine_weights import EngineWeights, watch_engine_core
from pagoda.connectors.vllm.event_publisher import EventOutlet, outlet_of
from pagoda.connectors.vllm.identity.media_names import MediaNames, hashes_media
from pagoda.connectors.vllm.join_vllm_log import join_vllm_log
from pagoda.connectors.vllm.options import EXTRA, chunk_options
from pagoda.connectors.vllm.prefill_steps import prompt_step_of
from pagoda.connectors.vllm.request_hints import hint_reader
from pagoda.connectors.vllm.supported_engines import (
    check_engine,
    has_states,
    log_choices,
)
from pagoda.kv_events.notes import BlockFacts, Groups

if TYPE_CHECKING:
    from pagoda.connectors.vllm.offloading.offloading_manager import (
        PagodaOffloadingManager,
    )
    from pagoda.connectors.vllm.offloading.offloading_worker import (
        PagodaOffloadingWorker,
    )

# kinds of which a hit needs all tokens
_NEED_ALL = ("full_attention", "mla_attention")
_SPEC = {
    "spec_name": "PagodaOffloadingSpec",
    "spec_module_path": "pagoda.connectors.vllm",
}


class PagodaHybridConnector(OffloadingConnector):
    """Keeps the KV of hybrid models (sliding windows, Mamba layers) in PagodaKV's tiers.

    PagodaConnector makes it, one for vLLM's scheduler and one for each worker; see
    docs/how-to/vllm.md. Everything except the storage and the KV events is vLLM's own code. This
    class adds two cases that vLLM considers
    impossible: a load that fails, and a request that is preempted and asks again before the workers
    know of it.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        join_vllm_log()
        check_engine(vllm_config, kv_cache_config)
        _set_options(_with_spec(vllm_config), kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._outlet: EventOutlet | None = None
        if role is KVConnectorRole.SCHEDULER:
            log_choices(vllm_config, kv_cache_config)
            watch_engine_core()
            manager = self._manager
            hash_tokens = self.scheduler.config.tokens_per_hash
            manager.media = MediaNames(hashes_media(vllm_config))
            manager.hear_hints(
                hint_reader(vllm_config.model_config, manager.hint_mode),
                hash_tokens,
            )
            self._outlet = outlet_of(vllm_config)
            if self._outlet is not None:
                groups = _event_groups(vllm_config, kv_cache_config)
                manager.publish_events(self._outlet, groups, hash_tokens)
        # by request, those that the workers know of
        self._preemptions: dict[str, int] = {}
        self._unheard: set[str] = set()  # preempted since the last step

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return vLLM's counters of offloading, and those of the spec."""
        return super().build_prom_metrics(
            _with_spec(vllm_config), *args, **kwargs
        )

    # ---- a worker's half

    @property
    def worker(self) -> OffloadingConnectorWorker:
        """Return vLLM's half that does the jobs."""
        assert self.connector_worker is not None
        return self.connector_worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the step's work, and begin to measure the step."""
        super().bind_connector_metadata(connector_metadata)
        if (
            copies := self.worker.worker
        ) is not None and copies.prefills is not None:
            copies.prefills.begin(connector_metadata.prompts)

    def wait_for_save(self) -> None:
        """End the measurement, then do the same as vLLM."""
        copies = self.worker.worker
        if (
            copies is not None
            and copies.prefills is not None
            and not sys.exc_info()[1]
        ):
            copies.prefills.end()
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended, and which of them failed: vLLM computes
        those, or fails them.

        Without the failed ones vLLM's OffloadingConnector would end the engine, or consider
        unfilled blocks as filled.
        """
        found = super().get_transfer_results(finished_req_ids)
        copies: PagodaOffloadingWorker | None = self.worker.worker
        if copies is not None:
            found.failed_recving |= copies.take_failed(found.finished_recving)
        return found

    # ---- the scheduler's half

    @property
    def engine_weights(self) -> EngineWeights:
        """Which weights the engine computes with."""
        return self._manager.weights

    @property
    def _manager(self) -> PagodaOffloadingManager:
        manager: PagodaOffloadingManager = self.scheduler.manager
        return manager

    def on_new_request(self, request: Any) -> None:
        """Remember the request."""
        super().on_new_request(request)
        self._manager.request_arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; None once after each preemption.

        `reset_prefix_cache(reset_running_requests=True)` preempts between two steps. A load must
        not begin in the step that reports the preemption to the workers, because it would end the
        engine: vLLM waits for all jobs of a preempted request, and assumes that they are stores.
        """
        self.engine_weights.restore_after_sleep()
        name = request.request_id
        if request.num_preemptions > self._preemptions.get(name, 0):
            self._preemptions[name] = request.num_preemptions
            self._unheard.add(name)
        if name in self._unheard:
            return None, False
        if num_computed_tokens:
            self._manager.found_in_engine(request)
        tokens, beside = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return tokens, beside

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return this step's work for the workers."""
        self._unheard.clear()
        for name in scheduler_output.finished_req_ids or ():
            self._preemptions.pop(name, None)
        meta = super().build_connector_meta(self._within_limits(scheduler_output))
        # for `bind_connector_metadata`
        meta.prompts = prompt_step_of(scheduler_output)
        return meta

    def _within_limits(self, scheduler_output: Any) -> Any:
        """Return a step's output without states beyond the `max_offload_tokens` of their requests.

        vLLM compares the state at the end of a prompt, within a block, with the limit by an
        assertion, and takes 0 for no limit.
        """
        state = scheduler_output.kv_connector_block_state
        limits = {
            name: known.max_offload_tokens
            for name in (state.boundary_state_offloads if state else ())
            if (known := self.scheduler._req_status.get(name))
            and known.max_offload_tokens is not None
        }
        if not limits:
            return scheduler_output
        offered = {
            name: [
                one
                for one in entries
                if name not in limits or one[2] <= limits[name]
            ]
            for name, entries in state.boundary_state_offloads.items()
        }
        output = copy(scheduler_output)  # others have it, too
        output.kv_connector_block_state = replace(
            state, boundary_state_offloads=offered
        )
        return output

    def request_finished(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Log the prompt for `pagoda explain`, then do the same as vLLM."""
        self._manager.request_ended(
            request, self.scheduler.config.tokens_per_hash
        )
        late, parameters = super().request_finished(request, block_ids)
        return late, parameters

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished`."""
        return self.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' messages."""
        super().update_connector_output(connector_output)
        for name in connector_output.failed_recving:
            self._manager.load_failed(name)

    def take_events(self) -> Iterable[Any]:
        """Return the KV events that wait for a step: none with vLLM's publisher over ZMQ, which
        gets them at once.
        """
        return self._outlet.take() if self._outlet is not None else ()


# MultiConnector finds the metrics of a connector by the name of its class, as it is in the
# configuration
PagodaHybridConnector.__name__ = "PagodaConnector"


def _with_spec(vllm_config: Any) -> Any:
    """Set PagodaKV's spec where vLLM's OffloadingConnector looks for one. Changes only the
    connector's own options.
    """
    vllm_config.kv_transfer_config.kv_connector_extra_config.update(_SPEC)
    return vllm_config


def _set_options(vllm_config: Any, kv_cache_config: Any) -> None:
    """Set vLLM's options for what to store and the size of a chunk, from which 0.33 derives the
    chunks of a window.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if "store_output" in extra:
        extra["offload_prompt_only"] = not ExtraOptions(EXTRA, extra).flag(
            "store_output"
        )
        del extra["store_output"]
    # otherwise vLLM keeps data for events that it never sends
    extra["self_describing_kv_events"] = False
    config = build_offloading_config(vllm_config, kv_cache_config)
    _, blocks = chunk_options(config, has_states(kv_cache_config))
    if extra.get("block_size") is None:
        extra["blocks_per_chunk"] = blocks


def _event_groups(vllm_config: Any, kv_cache_config: Any) -> Groups:
    """Return the facts of each group of an engine's KV, for KV events."""
    config = build_offloading_config(vllm_config, kv_cache_config)
    groups = {}
    for group in config.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        window = get_kv_cache_spec_sliding_window(spec)
        size = group.tokens_per_block
        chunk = group.tokens_per_block * config.cache.blocks_per_chunk
        groups[group.group_id] = BlockFacts(
            chunk, size, kind, window, needs_all=kind in _NEED_ALL
        )
    return groups
