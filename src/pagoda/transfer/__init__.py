"""Copies between an engine's KV memory and slots: runs of contiguous bytes, never permuted."""

from __future__ import annotations

from pagoda.transfer.base import Transfer
from pagoda.transfer.blocks import BlockKV
from pagoda.transfer.dense import DenseKV
from pagoda.transfer.paged import PagedKV
from pagoda.transfer.pages import PagesKV, merged

__all__ = ["BlockKV", "DenseKV", "PagedKV", "PagesKV", "Transfer", "merged"]
