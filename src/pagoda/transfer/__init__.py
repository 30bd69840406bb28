"""Copies between an engine's KV memory and slots: contiguous runs of bytes, never permuted.

Modules, in the order in which KV passes through them:

base        the protocol of a transfer, checks of slots and arrays
dense_kv    a view of one array per plane and layer
paged_kv    a view of paged pools, located by a block table or a slot mapping
block_kv    a view of blocks of one chunk each
pages_kv    a view of planes of pages whose content only the engine knows
cpu_copy    copies any of these within CPU memory, with the help of idle cores
run_table   describes any of these as rows of contiguous runs, for GPUs
gpu         the same copies for KV on a GPU
"""

from __future__ import annotations

from pagoda.transfer.base import Transfer
from pagoda.transfer.block_kv import BlockKV
from pagoda.transfer.dense_kv import DenseKV
from pagoda.transfer.paged_kv import PagedKV
from pagoda.transfer.pages_kv import PagesKV, merged

__all__ = ["BlockKV", "DenseKV", "PagedKV", "PagesKV", "Transfer", "merged"]
