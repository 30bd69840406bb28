"""Whether the weights of an SGLang engine were updated in memory: SGLang does not tell its storages (decision 0044).

A storage lives in the process of SGLang's scheduler, as the model does. So the methods of SGLang that change weights,
and the one that empties its caches, are wrapped once per process. `PagodaHiCache` asks here before each of its calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from pagoda.metrics import guarded_logger

log = guarded_logger("pagoda.sglang")

_UPDATES = (
    "begin_weight_update", "load_weights_from_distributed", "update_weights_from_disk", "update_weights_from_ipc",
    "update_weights_from_tensor",
)  # fmt: skip


class WeightsInMemory(NamedTuple):
    """What is known of the weights. `version`: "" names those of the files, a random text those after an update.

    `flushed`: SGLang has no KV of earlier weights.
    """

    version: str = ""
    flushed: bool = True


_now = WeightsInMemory()


def weights_in_memory() -> WeightsInMemory:
    """Return what is known of the weights of this process's engine now. Thread-safe."""
    return _now


def watch_weights() -> None:
    """Wrap the methods of SGLang that a storage must know of. Idempotent."""
    if getattr(HiCacheController.reset, "__wrapped__", None) is not None:
        return
    for name in _UPDATES:
        setattr(WeightUpdater, name, _before(getattr(WeightUpdater, name), _changed))
    WeightUpdater.end_weight_update = _before(WeightUpdater.end_weight_update, _written_by_others)
    HiCacheController.reset = _flushes(HiCacheController.reset)


def _before(method: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def call(updater: Any, *args: Any, **kwargs: Any) -> Any:
        told(**kwargs)
        return method(updater, *args, **kwargs)

    return call


def _flushes(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(method)
    def call(controller: Any) -> None:
        method(controller)
        _flushed()

    return call


def _changed(**_: Any) -> None:
    """Note that the weights are others from now on; also if the update fails: it may have changed some of them."""
    global _now
    if _now.flushed:
        log.info(
            "the weights are updated in memory: no page from before hits any more; pages that are stored after "
            "SGLang's caches were flushed hit in this engine only, until it is restarted"
        )
    _now = WeightsInMemory(secrets.token_hex(16), flushed=False)


def _written_by_others(*, run_post_load: bool) -> None:
    """Note the end of an update: if SGLang has loaded nothing, another process wrote the weights, until now."""
    if run_post_load:
        _changed()


def _flushed() -> None:
    """Note that SGLang's caches are empty. What was stored between update and flush is not found afterwards."""
    global _now
    if not _now.flushed:
        _now = WeightsInMemory(secrets.token_hex(16))
