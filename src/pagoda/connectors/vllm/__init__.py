"""The connector of vLLM: names it by `kv_connector_module_path` and it caches for `vllm serve`."""

from __future__ import annotations
