"""Named ranges for profilers around calls and copies, by `Config.profile`. Off they cost a function call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pagoda.errors import ConfigError

__all__ = ["enable", "named"]

_NOTHING: AbstractContextManager[object] = nullcontext()
_on = False


def enable(on: bool = True) -> None:
    """Switch the ranges of this process on or off. torch.profiler and NVTX see them as "pagoda.<call>".

    Raises ConfigError where torch is not installed.
    """
    global _on
    if on:
        try:
            import torch.profiler  # noqa: F401
        except ImportError as missing:
            raise ConfigError(f"profile = True: {missing}; install torch, or leave it out") from None
    _on = on


def named(name: str) -> AbstractContextManager[object]:
    """Return a context that a profiler shows under this name; changes nothing else."""
    if not _on:
        return _NOTHING
    from torch.profiler import record_function

    found: AbstractContextManager[object] = record_function(f"pagoda.{name}")
    return found
