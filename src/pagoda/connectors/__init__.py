"""Connectors: each lets one engine use the cache. No other package imports an engine; import the module you need."""

from __future__ import annotations
