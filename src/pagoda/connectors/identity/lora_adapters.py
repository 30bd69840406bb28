"""Names LoRA adapters by the content of their files, because a name or a path may be reused for
another adapter.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from blake3 import blake3

from pagoda.connectors.identity.checkpoint_files import snapshot
from pagoda.connectors.identity.weight_digests import file_digest

_CONFIG = "adapter_config.json"
# the first is what vLLM reads
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# adapters to remember; more are not named: to forget one and name it again would be wrong
_MOST = 65_536

_Stamp = tuple[tuple[str, int, int, int, int], ...]


class Adapters:
    """The adapters that this process has met. Thread-safe; an adapter's files are read only the
    first time.

    vLLM keeps an adapter in memory under its number, independent of its name and path, and may read
    its files again at any time. So if the files or the path of a number have changed since it was
    first met, the used weights are unknown. Then that number is not named until it has its first
    files and path again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[int, tuple[_Stamp, str]] = {}
        self._digests: dict[_Stamp, str] = {}

    def name(self, lora_request: Any) -> str | None:
        """Return 32 hex characters that name the adapter's content; None: unknown; "": no
        adapter.
        """
        if lora_request is None:
            return ""
        try:
            directory = snapshot(lora_request.lora_path)
            return (
                None if directory is None else self._name(lora_request, directory)
            )
        except (AttributeError, OSError, ValueError):
            return None

    def _name(self, lora_request: Any, directory: Path) -> str | None:
        number = int(lora_request.lora_int_id)
        files = [
            _CONFIG,
            *[name for name in _WEIGHTS if (directory / name).is_file()][:1],
        ]
        if len(files) < 2:
            return None
        stamp = _stamp(directory, files)
        # if two threads ask at once, the second waits until the first has read the files
        with self._lock:
            if number not in self._met:
                if len(self._met) >= _MOST:
                    return None
                self._met[number] = (stamp, self._digest(directory, files, stamp))
            first, digest = self._met[number]
        if stamp != first:
            return None
        kind = json.dumps(
            [digest, bool(getattr(lora_request, "is_3d_lora_weight", False))]
        )
        return str(
            blake3(
                kind.encode(), derive_key_context="PagodaKV adapter"
            ).hexdigest(16)
        )

    def _digest(self, directory: Path, files: list[str], stamp: _Stamp) -> str:
        if stamp not in self._digests:
            digest = json.dumps(
                [[name, file_digest(directory / name)] for name in files]
            )
            if _stamp(directory, files) != stamp:
                raise OSError(f"{directory} was changed while it was read")
            self._digests[stamp] = digest
        return self._digests[stamp]


def _stamp(directory: Path, files: list[str]) -> _Stamp:
    found = [(name, (directory / name).stat()) for name in files]
    return tuple(
        (name, stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino)
        for name, stat in found
    )


_ADAPTERS = Adapters()


def lora_name(lora_request: Any) -> str | None:
    """Return a name of the content of a request's LoRA adapter: "" = no adapter, None = it cannot
    be named.

    With None nothing may be stored or loaded for the request: the files cannot be read, or were
    changed since this process first met the adapter. Reads the files once for each adapter,
    afterwards only their sizes and times. Thread-safe.
    """
    return _ADAPTERS.name(lora_request)
