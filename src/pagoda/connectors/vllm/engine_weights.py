"""The version of the weights that an engine computes with, which names its chunks (decision 0040).

vLLM reports resets to a connector, but not the reason. Its engine core, which runs in the process
of the scheduler's half, knows more: named versions, sleeps, and resets that fail before they reach
a connector. So some methods of the engine core are wrapped, once per process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

from blake3 import blake3

from pagoda.base.log import guarded_logger
from pagoda.connectors.identity.lora_adapters import lora_name

log = guarded_logger("pagoda.vllm")

# elements of each tensor that a comparison reads: training changes far more elements
_SAMPLED = 65_536
# methods by which vLLM's own workers change their weights; afterwards the weights may get a name
_UPDATES = frozenset(
    {
        "start_weight_update",
        "start_draft_weight_update",
        "reload_weights",
        "reset_weights",
    }
)


class _Asleep(NamedTuple):
    """The version of the weights before a sleep that keeps them, and a sample to compare
    afterwards.
    """

    version: str
    named: bool
    sample: list[str]
    read: Callable[[], list[str]]


class EngineWeights:
    """Decides which version an engine's weights are. For the scheduler's thread only.

    The version of the checkpoint is "". The version of weights without a name is a random text.
    """

    def __init__(
        self, run: str | None, take: Callable[[str, bool], None]
    ) -> None:
        """`run`: the run whose versions are trusted; None: no version is trusted.

        `take` gets each version, and whether no request has KV of another version: then all
        requests begin again. Otherwise the present requests are neither saved nor loaded, because
        the weights of their KV are unknown.
        """
        self._run = run
        self._take = take
        self.version = ""
        self._named = True  # False: the version is a random text
        # a sleep whose reset has not come yet
        self._sleeps: _Asleep | None = None
        self._slept: _Asleep | None = None  # a sleep after its reset

    def changed(self) -> None:
        """Note that the weights may have changed and have no name: a reset, or the begin of an
        update.
        """
        self._slept = self._sleeps
        self._sleeps = None
        if self._named:
            log.info(
                "the engine was reset, so its weights may have changed: earlier chunks do not "
                "hit, and no chunks are "
                "shared with other engines until the weights have a name again: by a version or "
                "a restart"
            )
        self._named = False
        self._change(secrets.token_hex(16), False)

    def named(self, version: str, engine: Any) -> None:
        """Note that the weights have a name. It is used only if no KV of other weights is left.

        To prove that, this empties vLLM's own prefix cache, which fails as long as a request has
        blocks.
        """
        named = f"{self._run}/{version}"
        if self._run is None or named == self.version:
            return
        if not engine.scheduler.kv_cache_manager.reset_prefix_cache():
            self.changed()
            log.warning(
                "the version %r of the weights is not used, and no chunks are shared: requests "
                "have KV of other "
                "weights; pause the engine or let its requests end, and set the version again",
                version,
            )
            return
        engine.reset_encoder_cache()
        self._slept = self._sleeps = None
        self._named = True
        self._change(named, True)
        log.info(
            "the weights are %r: chunks are shared with all engines of this version",
            named,
        )

    def falls_asleep(self, engine: Any) -> None:
        """Note which weights the engine has, before a sleep that keeps them.

        An engine that is already asleep keeps its note: its weights are not in memory that could be
        read.
        """
        read = partial(engine.model_executor.collective_rpc, sampled_weights)
        try:
            asleep = "weights" in engine.model_executor.sleeping_tags
            self._sleeps = (
                self._slept
                if asleep
                else _Asleep(self.version, self._named, read(), read)
            )
        except Exception as trouble:  # noqa: BLE001
            # a boundary: the engine must fall asleep
            log.warning(
                "chunks will not hit after this sleep: %s: %s",
                type(trouble).__name__,
                trouble,
            )

    def stays_awake(self) -> None:
        """Note that a sleep failed: the next reset does not belong to it."""
        self._sleeps = None

    def restore_after_sleep(self) -> None:
        """Restore the version from before a sleep if the weights are the same. Called before the
        next computation.

        Not called at the wake-up: loops of reinforcement learning load new weights after it,
        without another reset.
        """
        if (slept := self._slept) is None:
            return
        self._slept = None
        try:
            same = slept.read() == slept.sample
        except Exception as trouble:  # noqa: BLE001
            # a boundary: the engine continues without
            log.warning(
                "the weights cannot be compared: %s: %s",
                type(trouble).__name__,
                trouble,
            )
            return
        if same:
            self._named = slept.named
            self._change(slept.version, True)
            log.info(
                "the weights are the same as before the sleep: earlier chunks hit again"
            )

    def _change(self, version: str, fresh: bool) -> None:
        self.version = version
        self._take(version, fresh)


def sampled_weights(worker: Any) -> str:
    """Return a digest of evenly spaced elements of all weights of a worker. Runs in the worker's
    process.

    Raises an error of torch for tensors without plain memory.
    """
    import torch

    found = blake3(derive_key_context="PagodaKV weights in memory")
    runner = worker.model_runner
    draft = getattr(runner, "get_draft_model", lambda: None)()
    for model in (runner.get_model(), *([] if draft is None else [draft])):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.update(
                f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode()
            )
            if tensor.numel():
                extent = 1 + sum(
                    (n - 1) * step
                    for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
                step = -(-extent // _SAMPLED)
                spread = (-(-extent // step),), (step,), tensor.storage_offset()
                sample = tensor.detach().as_strided(*spread).contiguous()
                found.update(sample.view(torch.uint8).cpu().numpy().data)
    return str(found.hexdigest())


# ---- the engine core


def watch_engine_core() -> None:
    """Wrap the methods of vLLM's engine core whose calls a connector must know. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.set_weight_version, "__wrapped__", None) is None:
        for name, watched in _WATCHED.items():
            setattr(
                EngineCore, name, _wrapped(getattr(EngineCore, name), watched)
            )


def _wrapped(
    method: Callable[..., Any], watched: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(method)  # vLLM converts arguments by the signature
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return watched(partial(method, engine), engine, *args, **kwargs)

    return call


def _weights_of(engine: Any) -> Iterator[EngineWeights]:
    """Yield the weights of PagodaKV's connectors of an engine: the only connector, or those in a
    MultiConnector.
    """
    connector = engine.scheduler.get_kv_connector()
    for one in (connector, *getattr(connector, "_connectors", ())):
        weights = getattr(one, "engine_weights", None)
        if isinstance(weights, EngineWeights):
            yield weights


def _add_lora(method: Callable[..., Any], engine: Any, lora_request: Any) -> Any:
    # name the files before they are loaded: at the first request, other files may have the same
    # path
    lora_name(lora_request)
    return method(lora_request)


def _set_weight_version(
    method: Callable[..., Any], engine: Any, weight_version: str
) -> None:
    method(weight_version)
    for weights in _weights_of(engine):
        weights.named(weight_version, engine)


def _collective_rpc(
    method: Callable[..., Any],
    engine: Any,
    called: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if called in _UPDATES:  # even if there was no reset before
        for weights in _weights_of(engine):
            weights.changed()
    return method(called, *args, **kwargs)


def _reset_prefix_cache(
    method: Callable[..., Any],
    engine: Any,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    try:
        return method(reset_running_requests, reset_connector)
    except Exception:
        if reset_connector:  # the reset did not reach the connector
            for weights in _weights_of(engine):
                weights.changed()
        raise


def _sleep(
    method: Callable[..., Any],
    engine: Any,
    level: int = 1,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if level == 1:
        return _release_kv_cache_memory(
            partial(method, level), engine, *args, **kwargs
        )
    return method(level, *args, **kwargs)


def _release_kv_cache_memory(
    method: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any
) -> Any:
    """Reset the caches and keep the weights, as a sleep of level 1 does too."""
    for weights in _weights_of(engine):
        weights.falls_asleep(engine)
    try:
        return method(*args, **kwargs)
    except Exception:
        for weights in _weights_of(engine):
            weights.stays_awake()
        raise


_WATCHED: dict[str, Callable[..., Any]] = {
    "add_lora": _add_lora,
    "collective_rpc": _collective_rpc,
    "release_kv_cache_memory": _release_kv_cache_memory,
    "reset_prefix_cache": _reset_prefix_cache,
    "set_weight_version": _set_weight_version,
    "sleep": _sleep,
}
