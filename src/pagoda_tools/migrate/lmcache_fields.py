"""The translation of each field of LMCache's: one table, `FIELDS`. `lmcache` judges the fields that
name a place.

Pure: a rule gets the name of its field and all fields, and returns a judgement of the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeAlias

from pagoda import policy as policies
from pagoda.base.errors import ConfigError


class FieldVerdict(StrEnum):
    """The verdict on a field; pagoda.toml has them in this order."""

    MAPPED = "mapped"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"
    ELSEWHERE = "set elsewhere"
    NOT_NEEDED = "not needed"
    SAME = "same"  # PagodaKV behaves as the field says
    REMARK = "remark"  # how LMCache reads it, where a reader may expect otherwise


class Judgement(NamedTuple):
    """The verdict on a field and the reason, without secrets; with the option that it sets, if
    any.
    """

    verdict: FieldVerdict
    text: str
    option: str = ""
    value: object = None


FieldRule: TypeAlias = Callable[[str, Mapping[str, object]], Judgement]
_MAPPED, _NOT_SUPPORTED, _UNKNOWN, _ELSEWHERE, _NOT_NEEDED, _SAME, _ = (
    FieldVerdict
)

_DEFAULT_SHARE = 0.15  # of the tokens that LMCache computes again
_REMOTE = 'share a store instead: remote = "redis://HOST:6379/0"'

SWITCHES = {
    "enable_p2p": (
        "machines read each other's chunks through pagoda serve, and the file does not name the "
        "machines: "
        "name them with --peers http://HOST:7777,http://HOST:7777, or write the URL of a Redis "
        "as lookup_url"
    ),
    "enable_pd": (
        "prefill and decode share a store here; use vLLM's own connector for it, or "
        f"{_REMOTE}"
    ),
    "enable_nixl": f"the older name of enable_pd; use vLLM's own connector for it, or {_REMOTE}",
    "enable_xpyd": f"belongs to disaggregated prefill; use vLLM's own connector for it, or {_REMOTE}",  # noqa: E501
    "enable_controller": (
        "caches have no control server; write enable_controller: false, use pagoda stats, "
        "ls, clear"
    ),
    "internal_api_server_enabled": "no server is started in engines; write false and use pagoda stats --prometheus",  # noqa: E501
    "enable_hidden_state_cache": "only KV is stored, no hidden states: write enable_hidden_state_cache: false",  # noqa: E501
    "enable_nixl_storage": (
        "the disk tier stores files; write local_disk: PATH and max_local_disk_size: GB "
        "instead"
    ),
}
"""Features that can be switched on, and what to write instead. Features that are off are off here
too.
"""

_PARTS = {
    "enable_p2p": (
        "lookup_url distributed_url p2p_host p2p_init_ports p2p_lookup_ports peer_init_ports "
        "peer_lookup_ports "
        "p2p_socket_recv_timeout_ms p2p_socket_send_timeout_ms"
    ),
    "enable_pd": (
        "transfer_channel nixl_backends pd_allocation_timeout_sec pd_backend_mode pd_bidirectional "
        "pd_buffer_device pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len "
        "pd_peer_alloc_port "
        "pd_peer_host pd_peer_init_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_role "
        "pd_shutdown_timeout_sec pd_skip_proxy_notification"
    ),
    "enable_nixl": (
        "nixl_role nixl_receiver_host nixl_receiver_port nixl_peer_host nixl_peer_init_port "
        "nixl_peer_alloc_port "
        "nixl_proxy_host nixl_proxy_port nixl_buffer_size nixl_buffer_device nixl_enable_gc"
    ),
    "enable_controller": (
        "controller_url controller_pull_url controller_reply_url lmcache_worker_port "
        "lmcache_worker_ports "
        "lmcache_worker_ids lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time"
    ),
    "internal_api_server_enabled": (
        "internal_api_server_host internal_api_server_port_start "
        "internal_api_server_include_index_list "
        "internal_api_server_socket_path_prefix run_script_api_enabled script_allowed_imports"
    ),
    "enable_hidden_state_cache": (
        "max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode"
    ),
    "enable_nixl_storage": (
        "nixl_backend nixl_backend_params nixl_path nixl_pool_size nixl_endpoint_list "
        "nixl_use_hugepages"
    ),
}
BELONGS = {switch: parts.split() for switch, parts in _PARTS.items()}
"""Fields that have a meaning only while their feature is on."""

WHEN_SET = {
    "gds_path": (
        "chunks go through host memory here; write local_disk: PATH and max_local_disk_size: "
        "GB instead"
    ),
    "weka_path": (
        "write local_disk: PATH and max_local_disk_size: GB, if the file system is a local "
        "one"
    ),
    "maru_path": "write local_disk: PATH and max_local_disk_size: GB, or share a store by remote_url",  # noqa: E501
    "remote_config_url": "LMCache fetches its configuration there: save what it returns and import that file",  # noqa: E501
    "external_lookup_client": f"look-ups ask the tiers themselves; remove it, and {_REMOTE}",
    "audit_actual_remote_url": "there is no audit; write it as remote_url",
    "plugin_locations": "plugins of LMCache cannot be used; remove it",
    "runtime_plugin_locations": "plugins of LMCache cannot be used; remove it",
    "external_backends": f"plugins of LMCache cannot be used; {_REMOTE}",
    "storage_plugins": f"plugins of LMCache cannot be used; {_REMOTE}",
    "remote_storage_plugins": f"plugins of LMCache cannot be used; {_REMOTE}",
    "priority_limit": "requests of all priorities are stored; remove it",
    "store_location": "chunks are stored in all configured tiers; remove it and leave out the other tiers",  # noqa: E501
    "retrieve_locations": "all configured tiers are asked; remove it and leave out the other tiers",
}
"""Fields that change what is stored or served, and what to write instead."""

_NOT_NEEDED_NAMES = {
    "error_handling": "an error at run time is always a miss",
    "use_layerwise": "copies always overlap with computing where possible",
    "pre_caching_hash_algorithm": "keys are always blake3, the same in all processes and machines",
    "reserve_local_cpu_size": "host_size is compared with the available memory when the tier is opened",  # noqa: E501
    "local_cpu_use_hugepages": "huge pages are used if the system has them",
    "local_disk_path_sharding": "all processes of a machine share one disk tier",
    "enable_async_loading": "chunks are always loaded in the background",
    (
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio "
        "lazy_memory_step_ratio lazy_memory_safe_size"
    ): "host memory is always allocated in the background",
    "numa_mode gpu_to_numa_mapping": (
        "all processes of the machine share host memory; bind it with numactl if necessary"
    ),
    "py_enable_gc": "Python's garbage collector is not changed",
    "lookup_timeout_ms": "no call waits longer than deadline_seconds",
    "pin_timeout_sec pin_check_interval_sec": "leases, which protect chunks from eviction, expire",
    "enable_kv_events": "vLLM's own --kv-events-config switches events on",
    "lmcache_instance_id": "chunks belong to models, not to engines; pagoda stats shows them",
    "cufile_buffer_size gds_backend gds_buffer_size gds_io_threads gds_path_sharding use_gds": (
        "belongs to gds_path"
    ),
    "save_only_first_rank remote_enable_mla_worker_id_as0": "KV that all ranks have is always stored once",  # noqa: E501
    "save_chunk_meta": "every chunk has its header",
    "s3_max_io_concurrency s3_max_inflight_reqs s3_num_io_threads": (
        "connections=N in the URL of the remote tier sets their number"
    ),
    "s3_prefer_http2": "the store's client decides",
    "blocking_timeout_secs": (
        "no call waits longer than deadline_seconds (1 s); of a remote tier ?deadline=5s in its URL"
    ),
    "mp_host mp_port": "the processes of a machine share host memory without a server",
    "lookup_server_worker_ids enable_scheduler_bypass_lookup": "look-ups need no server",
    (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics "
        "chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks "
        "chunk_statistics_strategy"
    ): "pagoda record and pagoda replay measure what is used again",
    "use_gpu_connector_v3": "the copy engine decides how it copies",
    "maru_pool_size": "belongs to maru_path",
    "app_id": "belongs to remote_config_url",
    "pipelined_backend": "stores and loads are always pipelined",
    "hit_miss_ratio": "there is no such limit",
}
NOT_NEEDED = {
    field: text
    for fields, text in _NOT_NEEDED_NAMES.items()
    for field in fields.split()
}
"""Fields that do not change what is stored and served, and why."""

_AWS = "set it in the environment of the engine: "
SECRETS = {
    "aws_access_key_id": f"{_AWS}AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": f"{_AWS}AWS_SECRET_ACCESS_KEY",
    "azure_account_key": f"{_AWS}AZURE_STORAGE_ACCOUNT_KEY",
    "azure_account_url": f"{_AWS}AZURE_STORAGE_ACCOUNT_NAME",
    "azure_connection_string": f"{_AWS}AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "azure_sas_token": f"{_AWS}AZURE_STORAGE_SAS_KEY",
}
"""Credentials in extra_config that a URL does not carry, and where they go."""

PLUMBING = ("config_file", "use_experimental", "track_usage", "log_level")
"""LMCACHE_ variables that are not fields of its configuration."""


def as_flag(field: str, value: object) -> bool:
    """Return the value of a switch. Raises ConfigError, like the functions below."""
    text = str(value).strip().lower()
    if text in ("true", "1"):
        return True
    # the last two too: see `lmcache_loader`
    if text in ("false", "0", "no", "off", "", "yes", "on"):
        return False
    raise ConfigError(f"{field}: {value!r} is neither true nor false")


def as_number(field: str, value: object) -> float:
    """Return a number."""
    with suppress(ValueError):
        if not isinstance(value, bool):
            return float(str(value))
    raise _no_number(field, value)


def _as_whole(field: str, value: object) -> int:
    number = as_number(field, value)
    if not number.is_integer():
        raise _no_number(field, value)
    return int(number)


def _no_number(field: str, value: object) -> ConfigError:
    return ConfigError(f"{field}: {value!r} is not a valid number")


def as_toml(value: object) -> str:
    """Return a value in TOML's notation."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _mapped(option: str, convert: Callable[[str, object], object]) -> FieldRule:
    def judge(field: str, fields: Mapping[str, object]) -> Judgement:
        value = convert(field, fields[field])
        return Judgement(_MAPPED, f"{option} = {as_toml(value)}", option, value)

    return judge


def _by_flag(on: Judgement, off: Judgement) -> FieldRule:
    return lambda field, fields: on if as_flag(field, fields[field]) else off


def _always(text: str, *_: object) -> Judgement:
    return Judgement(_NOT_NEEDED, text)


def _when_set(text: str, field: str, fields: Mapping[str, object]) -> Judgement:
    empty = fields[field] is False or fields[field] in ("", [], {})
    return (
        Judgement(_SAME, "nothing is set")
        if empty
        else Judgement(_NOT_SUPPORTED, text)
    )


def _part_of(switch: str, _: str, fields: Mapping[str, object]) -> Judgement:
    on = as_flag(switch, fields.get(switch, False))
    return Judgement(
        _NOT_NEEDED,
        f"belongs to {switch}, which is {'not supported' if on else 'off'}",
    )


def _blending(field: str, fields: Mapping[str, object]) -> Judgement:
    """Judge enable_blending: here a call starts blending, after a measurement. The file only has
    defaults.
    """
    if not as_flag(field, fields[field]):
        return Judgement(_SAME, "off here too, unless a call passes documents")
    text = (
        "Transformers and own engines blend what is given as documents, with a passing verdict "
        "of pagoda quality: "
        "CachedModel.generate(documents=..., question=...); vLLM and SGLang count prefixes only "
        "and blend nothing"
    )
    # unless the file has another share
    return Judgement(_ELSEWHERE, text, "blend_recompute", _DEFAULT_SHARE)


def _with_blending(rule: FieldRule) -> FieldRule:
    """Return a rule for a field that has a meaning only while blending is on."""

    def judge(field: str, fields: Mapping[str, object]) -> Judgement:
        on = as_flag("enable_blending", fields.get("enable_blending", False))
        return (
            rule(field, fields)
            if on
            else _part_of("enable_blending", field, fields)
        )

    return judge


def _first_share(field: str, value: object) -> float:
    """Return the first share of LMCache's list, which is the one that it uses."""
    if isinstance(value, str):
        value = [one for one in value.strip("[] ").split(",") if one.strip()]
    return as_number(
        field, value[0] if isinstance(value, list | tuple) and value else value
    )


def _check_layers(field: str, fields: Mapping[str, object]) -> Judgement:
    value = fields[field]
    layers = (
        value
        if isinstance(value, list | tuple)
        else str(value).strip("[] ").split(",")
    )
    if [_as_whole(field, layer) for layer in layers] == [1]:
        return Judgement(_SAME, "K is compared at layer 1")
    return Judgement(
        _ELSEWHERE,
        "in the call: policy=Deviation(layer=N) compares K at layer N instead of layer 1",
    )


def _blend_min_tokens(field: str, fields: Mapping[str, object]) -> Judgement:
    least = _as_whole(field, fields[field])
    text = f"blend_min_tokens = {least} (LMCache 0.5 has this field, but does not use it)"
    return Judgement(_MAPPED, text, "blend_min_tokens", least)


def _policy(field: str, fields: Mapping[str, object]) -> Judgement:
    name = str(fields[field]).lower()
    if name == "lru":
        return Judgement(_MAPPED, f"policy = {as_toml(name)}", "policy", name)
    known = ", ".join(policies.NAMES)
    return Judgement(
        _NOT_SUPPORTED,
        f"{fields[field]} is not one of {known}; write LRU or remove it",
    )


_SEPARATED = "documents are passed as a list, not found by separators in a text"

BLENDING: dict[str, FieldRule] = {
    "blend_recompute_ratio": _mapped("blend_recompute", _first_share),
    "blend_recompute_ratios": _mapped("blend_recompute", _first_share),
    "blend_min_tokens": _blend_min_tokens,
    "blend_check_layers": _check_layers,
    "blend_thresholds": partial(
        _always, "LMCache has this field, but does not use it"
    ),
    **{
        field: lambda *_: Judgement(_ELSEWHERE, f"in the call: {_SEPARATED}")
        for field in (
            "blend_special_str",
            "blend_separator",
            "blend_add_special_in_precomp",
        )
    },
}
"""Fields of blending, while it is on."""

FIELDS: dict[str, FieldRule] = {
    "chunk_size": _mapped("chunk_tokens", _as_whole),
    "min_retrieve_tokens": _mapped("min_hit_tokens", _as_whole),
    "cache_policy": _policy,
    "force_skip_save": _by_flag(
        Judgement(
            _ELSEWHERE,
            "an engine that only loads: kv_role kv_consumer in vLLM's --kv-transfer-config",
        ),
        Judgement(_SAME, "off here too"),
    ),
    "use_odirect": _mapped("disk_direct", as_flag),
    "disk_io_threads": _mapped("io_threads", _as_whole),
    "save_decode_cache": _by_flag(
        Judgement(
            _SAME,
            "generated tokens are stored, unless --no-store-output is given",
        ),
        Judgement(
            _ELSEWHERE,
            "the option store_output of the connector: pagoda vllm --no-store-output serve ...",
        ),
    ),
    "save_unfull_chunk": _by_flag(
        Judgement(
            _NOT_NEEDED,
            (
                "only whole chunks are stored; with a smaller chunk_tokens less of a prompt is "
                "left "
                "over"
            ),
        ),
        Judgement(_SAME, "only whole chunks are stored"),
    ),
    **{
        switch: _by_flag(
            Judgement(_NOT_SUPPORTED, text), Judgement(_SAME, "off here too")
        )
        for switch, text in SWITCHES.items()
    },
    "enable_blending": _blending,
    **{field: _with_blending(rule) for field, rule in BLENDING.items()},
    **{
        part: partial(_part_of, switch)
        for switch, parts in BELONGS.items()
        for part in parts
    },
    **{field: partial(_when_set, text) for field, text in WHEN_SET.items()},
    **{field: partial(_always, text) for field, text in NOT_NEEDED.items()},
}
"""The rules of all fields that can be judged alone, by name. Fields that set an option come
first.
"""

HISTOGRAM = "histogram_bucket_"
"""The beginning of the names of more fields; metrics here have no histograms."""
