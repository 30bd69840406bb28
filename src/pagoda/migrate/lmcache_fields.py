"""LMCache's fields that need no arithmetic: which mean nothing here, and which name what is not there. Data only."""

from __future__ import annotations

__all__ = ["BELONGS", "NOT_NEEDED", "PLUMBING", "SWITCHES", "WHEN_SET", "belongs_to"]

_REMOTE = 'share a store instead: remote = "redis://HOST:6379/0"'

SWITCHES = {
    "enable_blending": "only prefixes are reused here, so that text stays as computed; write enable_blending: false",
    "enable_p2p": f"engines do not serve each other here; write enable_p2p: false and {_REMOTE}",
    "enable_pd": f"prefill and decode meet in a store here; use vLLM's own connector for that, or {_REMOTE}",
    "enable_nixl": f"the older name of enable_pd; use vLLM's own connector for that, or {_REMOTE}",
    "enable_xpyd": f"belongs to disaggregated prefill; use vLLM's own connector for that, or {_REMOTE}",
    "enable_controller": "no server controls caches; write enable_controller: false and use pagoda stats, ls, clear",
    "internal_api_server_enabled": "no server is started in engines; write false and use pagoda stats --prometheus",
    "enable_nixl_storage": "files are the disk tier's here; write local_disk: PATH and max_local_disk_size: GB instead",
}
"""Features that may be switched on, and what to write if one is: off, they are off here too."""

BELONGS = {
    "enable_blending": (
        "blend_recompute_ratio",
        "blend_recompute_ratios",
        "blend_min_tokens",
        "blend_thresholds",
        "blend_check_layers",
        "blend_special_str",
        "blend_separator",
        "blend_add_special_in_precomp",
    ),
    "enable_p2p": (
        "lookup_url",
        "distributed_url",
        "p2p_host",
        "p2p_init_ports",
        "p2p_lookup_ports",
        "peer_init_ports",
        "peer_lookup_ports",
        "p2p_socket_recv_timeout_ms",
        "p2p_socket_send_timeout_ms",
    ),
    "enable_pd": (
        "transfer_channel",
        "nixl_backends",
        "pd_allocation_timeout_sec",
        "pd_backend_mode",
        "pd_bidirectional",
        "pd_buffer_device",
        "pd_buffer_size",
        "pd_condition_poll_interval_sec",
        "pd_max_prefill_len",
        "pd_peer_alloc_port",
        "pd_peer_host",
        "pd_peer_init_port",
        "pd_peer_query_port",
        "pd_proxy_host",
        "pd_proxy_port",
        "pd_role",
        "pd_shutdown_timeout_sec",
        "pd_skip_proxy_notification",
    ),
    "enable_nixl": (
        "nixl_role",
        "nixl_receiver_host",
        "nixl_receiver_port",
        "nixl_peer_host",
        "nixl_peer_init_port",
        "nixl_peer_alloc_port",
        "nixl_proxy_host",
        "nixl_proxy_port",
        "nixl_buffer_size",
        "nixl_buffer_device",
        "nixl_enable_gc",
    ),
    "enable_controller": (
        "controller_url",
        "controller_pull_url",
        "controller_reply_url",
        "lmcache_worker_port",
        "lmcache_worker_ports",
    ),
    "internal_api_server_enabled": (
        "internal_api_server_host",
        "internal_api_server_port_start",
        "internal_api_server_include_index_list",
        "internal_api_server_socket_path_prefix",
    ),
    "enable_nixl_storage": (
        "nixl_backend",
        "nixl_backend_params",
        "nixl_path",
        "nixl_pool_size",
        "nixl_endpoint_list",
        "nixl_use_hugepages",
    ),
}
"""Fields that mean something only while their feature is on."""

WHEN_SET = {
    "gds_path": "chunks go through host memory here; write local_disk: PATH and max_local_disk_size: GB instead",
    "weka_path": "write local_disk: PATH and max_local_disk_size: GB, if the file system is a local one",
    "external_lookup_client": f"look-ups ask the tiers themselves; remove it, and {_REMOTE}",
    "audit_actual_remote_url": "nothing is audited here; write it as remote_url",
    "plugin_locations": "code of plugins cannot be taken over; remove it",
    "runtime_plugin_locations": "code of plugins cannot be taken over; remove it",
    "storage_plugins": f"code of plugins cannot be taken over; {_REMOTE}",
    "remote_storage_plugins": f"code of plugins cannot be taken over; {_REMOTE}",
    "priority_limit": "requests of all priorities are stored; remove it",
    "store_location": "chunks go down the tiers that are configured; remove it and leave out the other tiers",
    "retrieve_locations": "all tiers that are configured are asked; remove it and leave out the other tiers",
}
"""Fields without which something else would be stored or served, and what to write instead."""

NOT_NEEDED = {
    "error_handling": "trouble at run time is always a miss, never an error",
    "use_layerwise": "how copies overlap with computing is not configured",
    "pre_caching_hash_algorithm": "keys are always blake3, the same in all processes and machines",
    "reserve_local_cpu_size": "host_size is checked against the memory there is when it is opened",
    "local_cpu_use_hugepages": "huge pages are asked for wherever the system has them",
    "local_disk_path_sharding": "all processes of a machine share one disk tier",
    "enable_async_loading": "chunks are always loaded in the background",
    "enable_lazy_memory_allocator": "host memory is filled in by the background anyway",
    "lazy_memory_initial_ratio": "host memory is filled in by the background anyway",
    "lazy_memory_expand_trigger_ratio": "host memory is filled in by the background anyway",
    "lazy_memory_step_ratio": "host memory is filled in by the background anyway",
    "lazy_memory_safe_size": "host memory is filled in by the background anyway",
    "numa_mode": "host memory is shared by all processes of the machine; bind it with numactl if need be",
    "gpu_to_numa_mapping": "host memory is shared by all processes of the machine; bind it with numactl if need be",
    "py_enable_gc": "Python's garbage collector is left alone",
    "lookup_timeout_ms": "no call waits longer than deadline_seconds",
    "pin_timeout_sec": "what keeps chunks from eviction ends by itself",
    "pin_check_interval_sec": "what keeps chunks from eviction ends by itself",
    "enable_kv_events": "vLLM's own --kv-events-config switches events on",
    "lmcache_instance_id": "nothing is named by engine; pagoda stats shows whose chunks there are",
    "cufile_buffer_size": "belongs to gds_path",
    "gds_backend": "belongs to gds_path",
    "gds_buffer_size": "belongs to gds_path",
    "gds_io_threads": "belongs to gds_path",
    "gds_path_sharding": "belongs to gds_path",
    "use_gds": "belongs to gds_path",
    "save_only_first_rank": "what all ranks have alike is stored once anyway",
    "remote_enable_mla_worker_id_as0": "what all ranks have alike is stored once anyway",
    "save_chunk_meta": "every chunk has its header",
    "s3_max_io_concurrency": "connections=N in the URL of the remote tier says how many there are",
    "s3_max_inflight_reqs": "connections=N in the URL of the remote tier says how many there are",
    "s3_num_io_threads": "connections=N in the URL of the remote tier says how many there are",
    "s3_prefer_http2": "the store's client decides",
    "pipelined_backend": "stores and loads are always pipelined",
    "hit_miss_ratio": "nothing is measured against a ratio",
}
"""Fields whose absence changes nothing of what is stored and served, and why."""

PLUMBING = ("config_file", "use_experimental", "track_usage", "log_level")
"""LMCACHE_ variables that are no fields of its configuration."""


def belongs_to(field: str) -> str:
    """Return the feature that a field means something with, or an empty string."""
    return next((switch for switch, fields in BELONGS.items() if field in fields), "")
