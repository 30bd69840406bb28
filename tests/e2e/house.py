"""The places where the models of one test keep their KV."""

from __future__ import annotations

import shutil
from pathlib import Path

from pagoda.connectors.transformers import CachedModel

CHUNK = 16


class House:
    """The roots of one test, and models opened on them."""

    def __init__(self, host: Path, disk: Path) -> None:
        self.host = host
        self.disk = disk
        self._open: list[CachedModel] = []

    def open(self, model, **options) -> CachedModel:
        settings = {
            "chunk_tokens": CHUNK,
            "host_size": "2MiB",
            "host_path": str(self.host / "host"),
            "disk_size": "4MiB",
            "disk_path": str(self.disk / "disk"),
            "deadline_seconds": 20.0,
            "worth_it": False,
        }
        cached = CachedModel(model, **{**settings, **options})
        self._open.append(cached)
        return cached

    def shut(self, wipe_host: bool = False) -> None:
        for cached in self._open:
            assert cached.cache.flush(120.0)
            cached.close()
        self._open.clear()
        if wipe_host:
            shutil.rmtree(self.host / "host")
