"""Detects updates of an SGLang engine's weights in memory: SGLang does not report them to storages
(decision 0044).

A storage runs in the process of SGLang's scheduler, like the model. So the methods of SGLang that
change weights, and the one that empties its caches, are wrapped once per process. `PagodaHiCache`
calls this module before each call.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    WeightUpdater,
)

from pagoda.base.log import guarded_logger

log = guarded_logger("pagoda.sglang")

_UPDATES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


class WeightsInMemory(NamedTuple):
    """The state of the weights. `version`: "" for those of the files, a random text after an
    update.

    `flushed`: SGLang has no KV of earlier weights.
    """

    version: str = ""
    flushed: bool = True


_now = WeightsInMemory()


def weights_in_memory() -> WeightsInMemory:
    """Return the present state of the weights of this process's engine. Thread-safe."""
    return _now


def watch_weights() -> None:
    """Wrap the methods of SGLang whose calls a storage must know. Idempotent."""
    if getattr(HiCacheController.reset, "__wrapped__", None) is not None:
        return
    for name in _UPDATES:
        setattr(
            WeightUpdater,
            name,
            _watched(getattr(WeightUpdater, name), before=_changed),
        )
    end = WeightUpdater.end_weight_update
    WeightUpdater.end_weight_update = _watched(end, before=_written_by_others)
    HiCacheController.reset = _watched(HiCacheController.reset, after=_flushed)


def _watched(
    method: Callable[..., Any],
    before: Callable[..., None] = lambda **_: None,
    after: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """Return a method that calls `before` with its keywords, itself, then `after`."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(**kwargs)
        found = method(*args, **kwargs)
        after()
        return found

    return call


def _changed(**_: Any) -> None:
    """Note that the weights have changed. A failed update counts too: it may have changed some of
    them.
    """
    global _now
    if _now.flushed:
        log.info(
            "the weights are updated in memory: no page from before hits any more; pages that "
            "are stored after "
            "SGLang's caches were flushed hit in this engine only, until it is restarted"
        )
    _now = WeightsInMemory(secrets.token_hex(16), flushed=False)


def _written_by_others(*, run_post_load: bool) -> None:
    """Note the end of an update: if SGLang has loaded nothing, another process has written the
    weights until now.
    """
    if run_post_load:
        _changed()


def _flushed() -> None:
    """Note that SGLang's caches are empty. Chunks that were stored between update and flush are not
    found later.
    """
    global _now
    if not _now.flushed:
        _now = WeightsInMemory(secrets.token_hex(16))
