"""What of vLLM's interface changes from release to release: a name that is not in the table must be
looked at.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOAD = "vllm.v1.kv_offload.base"

# By class: where it is, and its public names in the oldest release that is supported.
INTERFACE = {
    "KVConnectorBase_V1": (
        f"{_V1}.base",
        """
        bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
        build_connector_worker_meta build_kv_connector_stats build_prom_metrics
        clear_connector_metadata finish_forward get_block_ids_with_load_errors
        get_external_cache_hit_sources get_finished get_finished_count get_handshake_metadata
        get_kv_connector_kv_cache_events get_kv_connector_stats get_loaded_kv_cache_group_ids
        get_mem_pool_context get_num_new_matched_tokens get_required_kvcache_layout
        get_transfer_results handle_preemptions has_connector_metadata has_pending_block_frees
        has_pending_push_work on_new_request register_finished_partial_tail register_kv_caches
        request_finished requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
        reset_capture_state role save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata
        set_xfer_handshake_metadata_pp_aware shutdown start_load_kv
        supports_divergent_local_hybrid_hits take_events update_connector_output
        update_state_after_alloc wait_for_layer_load wait_for_save""",
    ),
    "OffloadingManager": (
        _OFFLOAD,
        """
        complete_load complete_store get_load_source get_stats has_pending_work lookup
        on_new_request on_request_finished on_schedule_end prepare_load prepare_store reset_cache
        shutdown take_events touch""",
    ),
    "OffloadingWorker": (
        _OFFLOAD,
        "get_finished shutdown submit_load submit_store wait",
    ),
    "OffloadingSpec": (
        _OFFLOAD,
        "build_metric_definitions get_manager get_worker",
    ),
    "LookupResult": (_OFFLOAD, "HIT HIT_PENDING MISS RETRY"),
    "KVConnectorStats": (
        f"{_V1}.metrics",
        "aggregate data is_empty reduce reset to_dict",
    ),
    "KVConnectorOutput": (
        "vllm.v1.outputs",
        """
        expected_finished_count failed_recving finished_recving finished_sending invalid_block_ids
        is_empty kv_cache_events kv_connector_stats kv_connector_worker_meta""",
    ),
    "BlockStored": (
        "vllm.distributed.kv_events",
        """
        block_hashes block_size extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window
        locality lora_id lora_name medium ownership parent_block_hash session_id token_ids""",
    ),
}

# What later releases add, and why PagodaKV is right with it.
ADDED = {
    (0, 33): {
        "KVConnectorBase_V1.supports_sleep_mode": "true: no KV memory is registered, and its addresses stay",  # noqa: E501
        "KVConnectorBase_V1.unregister_kv_caches": "nothing is registered",
        "KVConnectorBase_V1.restore_kv_caches": "nothing is registered",
        "OffloadingManager.lock": "only the scheduler's thread enters the manager",
        "OffloadingManager.config_info": "no facts to publish",
        "OffloadingManager.on_reset_flushed": "a worker that stores after a reset has a reservation of its own",  # noqa: E501
        "OffloadingSpec.config_info_keys": "no facts to publish",
        "BlockStored.lookahead_token_ids": "none: with a connector, hashes cover no tokens after their block",  # noqa: E501
    }
}
# parameters of vLLM's calls that ours do not take
NOT_TAKEN = {
    "submit_load.expedited": "only with sync_load_budget_bytes, which is refused"
}
# keys of kv_connector_extra_config that vLLM's offloading reads and we refuse
REFUSED_KEYS = {
    "sync_load_budget_bytes": "vLLM does not ask whether such a load failed"
}


def _release() -> tuple[int, int]:
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def _public(kind: type) -> set[str]:
    names = {
        *dir(kind),
        *getattr(kind, "__annotations__", {}),
        *getattr(kind, "__struct_fields__", ()),
    }
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", INTERFACE)
def test_every_name_of_the_interface_is_known(name: str) -> None:
    module, names = INTERFACE[name]
    added = [
        each
        for release, table in ADDED.items()
        if release <= _release()
        for each in table
    ]
    known = {
        *names.split(),
        *(each.split(".")[1] for each in added if each.split(".")[0] == name),
    }
    found = _public(getattr(importlib.import_module(module), name))
    assert (sorted(found - known), sorted(known - found)) == ([], []), (
        f"{name}: (new, gone) names of vLLM {_release()}"
    )


def test_ours_take_what_vllm_passes() -> None:
    """Each method that we override has every parameter of vLLM's own."""
    from pagoda.connectors.vllm.connector import PagodaConnector
    from pagoda.connectors.vllm.offloading.hybrid_connector import (
        PagodaHybridConnector,
    )
    from pagoda.connectors.vllm.offloading.offloading_manager import (
        PagodaOffloadingManager,
    )
    from pagoda.connectors.vllm.offloading.offloading_worker import (
        PagodaOffloadingWorker,
    )
    from pagoda.connectors.vllm.offloading.spec import PagodaOffloadingSpec

    ours = (
        PagodaConnector,
        PagodaHybridConnector,
        PagodaOffloadingManager,
        PagodaOffloadingWorker,
        PagodaOffloadingSpec,
    )
    missing = [
        f"{name}.{parameter.name}"
        for kind in ours
        for name, method in vars(kind).items()
        for base in kind.__mro__[1:]
        if not name.startswith("_")
        and inspect.isfunction(theirs := vars(base).get(name))
        for parameter in _not_taken(theirs, method)
    ]
    assert set(missing) == (set(NOT_TAKEN) if _release() >= (0, 33) else set())


def _not_taken(theirs: Any, method: Any) -> list[inspect.Parameter]:
    takes = inspect.signature(getattr(method, "__func__", method)).parameters
    if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return []
    # by position, whatever their names
    return list(inspect.signature(theirs).parameters.values())[len(takes) :]


def test_whether_a_step_is_bound_is_asked_before_the_calls_for_a_layer_alone() -> (
    None
):
    """PagodaConnector answers no, so that vLLM makes no call for each layer: no other code may
    depend on it.
    """
    import vllm

    from pagoda.connectors.vllm.connector import PagodaConnector

    root = Path(vllm.__file__).parent
    connectors = root / "distributed/kv_transfer/kv_connector/v1"
    files = [
        file for file in root.rglob("*.py") if connectors not in file.parents
    ]
    files += [connectors / "base.py", connectors / "multi_connector.py"]
    asked = re.compile(r"\w\.has_connector_metadata\(")
    asking = {
        file.name: file.read_text()
        for file in files
        if asked.search(file.read_text())
    }
    assert list(asking) == ["kv_transfer_utils.py"]
    assert len(asked.findall(*asking.values())) == 1
    assert "wait_for_layer_load" in asking["kv_transfer_utils.py"]
    assert not PagodaConnector.has_connector_metadata(
        object.__new__(PagodaConnector)
    )


def test_every_key_that_vllm_reads_of_our_options_is_decided() -> None:
    import vllm

    from pagoda.connectors.vllm import options

    root = Path(vllm.__file__).parent
    places = (
        "distributed/kv_transfer/kv_connector/v1/offloading",
        "v1/kv_offload",
    )
    files = [
        *(root / places[0]).glob("*.py"),
        *(root / places[1]).glob("*.py"),
        (root / places[0]).with_name("offloading_connector.py"),
    ]
    read = re.compile(r"""extra_config(?:\.get\(|\[)\s*["'](\w+)["']""")
    keys = {key for file in files for key in read.findall(file.read_text())}
    assert keys >= {"block_size", "spec_name"}
    assert keys - {*options._OF_VLLM, *options._OWN} <= REFUSED_KEYS.keys()
    for key in REFUSED_KEYS:
        with pytest.raises(ValueError, match=f"{key}: no such option"):
            options.read_options({key: 1}, 32)


def test_hashes_cover_no_later_tokens_while_a_connector_is_there(
    llama: Path,
) -> None:
    """From 0.33 on, vLLM may make a block's hash of tokens after the block, too, for EAGLE: not
    beside a connector.
    """
    from types import SimpleNamespace

    from tests.vllm.configs import engine_config

    config = engine_config(llama)
    speculative = SimpleNamespace(
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
        disable_lookahead_block_hashes=False,
    )
    object.__setattr__(config, "speculative_config", speculative)
    assert getattr(config, "num_hash_lookahead_tokens", 0) == 0
    object.__setattr__(config, "kv_transfer_config", None)
    assert getattr(config, "num_hash_lookahead_tokens", 0) == (
        0 if _release() < (0, 33) else 1
    )
