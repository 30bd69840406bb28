"""A connector that stands beside ours below a MultiConnector: vLLM's ExampleConnector, whose loads
fail.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)


class FailingLoads(ExampleConnector, SupportsHMA):
    """Loads within the step, as others do (LMCache): wrong bytes, which it reports at the step's
    end.
    """

    _failed: frozenset[int] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks with noise."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, ExampleConnectorMetadata)
        slots = [
            request.slot_mapping
            for request in meta.requests
            if not request.is_store
        ]
        self._failed = frozenset(
            int(slot) // self._block_size for each in slots for slot in each
        )
        for layer in (
            forward_context.no_compile_layers.values() if self._failed else ()
        ):
            if (cache := getattr(layer, "kv_cache", None)) is not None:
                cache[sorted(self._failed)] = 1.0

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report all of them."""
        return set(self._failed)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        """Keep no block. (NIXL compares whether engines manage several kinds of KV, which all
        connectors decide.)
        """
        return False, None
