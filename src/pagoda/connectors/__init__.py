"""What lets one engine use the cache. The only place that imports an engine; import the module you need."""

from __future__ import annotations
