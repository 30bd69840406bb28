"""The version of the weights that an engine computes with, which names its chunks (decision 0040).

vLLM tells a connector of resets, and not why it resets. Its engine core, which runs in the process of the scheduler's
half, has more: versions that have names, sleep, and resets that fail before they reach a connector. So some methods
of the engine core are wrapped, once per process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

from blake3 import blake3

from pagoda.connectors.identity.lora_adapters import lora_name
from pagoda.metrics import guarded_logger

log = guarded_logger("pagoda.vllm")

# elements of each tensor that a comparison reads: a training changes far more than one in as many
_SAMPLED = 65_536
# what vLLM's own workers do to their weights; their end is a version, if it has a name
_UPDATES = frozenset({"start_weight_update", "start_draft_weight_update", "reload_weights", "reset_weights"})


class _Asleep(NamedTuple):
    """The version of weights before a sleep that keeps them, and what proves afterwards that they are the same."""

    version: str
    named: bool
    sample: list[str]
    read: Callable[[], list[str]]


class EngineWeights:
    """Decides which version an engine's weights are. Used by the scheduler's thread only.

    The version of the checkpoint is "", that of weights without a name a random text, which no other engine has.
    """

    def __init__(self, run: str | None, take: Callable[[str, bool], None]) -> None:
        """`run`: of which versions are trusted; None: no version is.

        `take` receives each version, and whether no request has KV of another: then all of them begin again. Otherwise
        none of the present requests may be saved or loaded, because it is unknown which weights computed what.
        """
        self._run, self._take = run, take
        self.version = ""
        self._named = True  # False: the version is a random text
        self._sleeps: _Asleep | None = None  # the reset that belongs to this sleep has not come yet
        self._slept: _Asleep | None = None

    def changed(self) -> None:
        """Note that the weights may be others from now on, without a name: a reset, or the begin of an update."""
        self._slept, self._sleeps = self._sleeps, None
        if self._named:
            log.info(
                "the engine was reset, so its weights may be others: no chunk from before hits, and none is shared "
                "with other engines until the weights have a name again: a version, or a restart"
            )
        self._named = False
        self._change(secrets.token_hex(16), False)

    def named(self, version: str, engine: Any) -> None:
        """Note that the weights have a name. It is taken only if nothing is left of what others computed.

        Emptying vLLM's own prefix cache makes sure of that: this fails as long as a request has blocks.
        """
        named = f"{self._run}/{version}"
        if self._run is None or named == self.version:
            return
        if not engine.scheduler.kv_cache_manager.reset_prefix_cache():
            self.changed()
            log.warning(
                "the version %r of the weights is not used, and no chunk is shared: requests have KV of other weights; "
                "pause the engine or let its requests end, and name the version again",
                version,
            )
            return
        engine.reset_encoder_cache()
        self._slept = self._sleeps = None
        self._named = True
        self._change(named, True)
        log.info("the weights are %r: chunks are shared with all engines of this version", named)

    def falls_asleep(self, engine: Any) -> None:
        """Note, before a sleep that keeps the weights, what they are.

        An engine that sleeps already sleeps on: its weights are in no memory that could be read.
        """
        read = partial(engine.model_executor.collective_rpc, sampled_weights)
        try:
            asleep = "weights" in engine.model_executor.sleeping_tags
            self._sleeps = self._slept if asleep else _Asleep(self.version, self._named, read(), read)
        except Exception as trouble:  # noqa: BLE001  # a boundary: the engine sleeps all the same
            log.warning("chunks will not hit after this sleep: %s: %s", type(trouble).__name__, trouble)

    def stays_awake(self) -> None:
        """Note that a sleep failed: the next reset does not belong to it."""
        self._sleeps = None

    def settle(self) -> None:
        """Return to the version from before a sleep if the weights are the same: before anything is computed again.

        Not at the wake-up: loops of reinforcement learning load new weights after it, and do not reset again.
        """
        if (slept := self._slept) is None:
            return
        self._slept = None
        try:
            same = slept.read() == slept.sample
        except Exception as trouble:  # noqa: BLE001  # a boundary: the engine continues without
            log.warning("the weights cannot be compared: %s: %s", type(trouble).__name__, trouble)
            return
        if same:
            self._named = slept.named
            self._change(slept.version, True)
            log.info("the weights are the same as before the sleep: chunks from then hit again")

    def _change(self, version: str, fresh: bool) -> None:
        self.version = version
        self._take(version, fresh)


def sampled_weights(worker: Any) -> str:
    """Return a digest of evenly spaced elements of all weights of a worker; runs in its process.

    Raises an error of torch for tensors without plain memory.
    """
    import torch

    found = blake3(derive_key_context="PagodaKV weights in memory")
    runner = worker.model_runner
    draft = getattr(runner, "get_draft_model", lambda: None)()
    for model in (runner.get_model(), *([] if draft is None else [draft])):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            if tensor.numel():
                extent = 1 + sum(
                    (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
                step = -(-extent // _SAMPLED)
                spread = (-(-extent // step),), (step,), tensor.storage_offset()
                sample = tensor.detach().as_strided(*spread).contiguous()
                found.update(sample.view(torch.uint8).cpu().numpy().data)
    return str(found.hexdigest())


# ---- the engine core


def watch_engine_core() -> None:
    """Wrap the methods of vLLM's engine core that a connector must know of. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.set_weight_version, "__wrapped__", None) is None:
        for name, watched in _WATCHED.items():
            setattr(EngineCore, name, _wrapped(getattr(EngineCore, name), watched))


def _wrapped(method: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)  # vLLM converts what arrives by the signature
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return watched(partial(method, engine), engine, *args, **kwargs)

    return call


def _weights_of(engine: Any) -> Iterator[EngineWeights]:
    """Yield the weights of our connectors of an engine: of the only one, or of those under a MultiConnector."""
    connector = engine.scheduler.get_kv_connector()
    for one in (connector, *getattr(connector, "_connectors", ())):
        weights = getattr(one, "engine_weights", None)
        if isinstance(weights, EngineWeights):
            yield weights


def _add_lora(method: Callable[..., Any], engine: Any, lora_request: Any) -> Any:
    # of the files that are about to be loaded: others may be at the path by its first request
    lora_name(lora_request)
    return method(lora_request)


def _set_weight_version(method: Callable[..., Any], engine: Any, weight_version: str) -> None:
    method(weight_version)
    for weights in _weights_of(engine):
        weights.named(weight_version, engine)


def _collective_rpc(method: Callable[..., Any], engine: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
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
        if reset_connector:  # which was not reached
            for weights in _weights_of(engine):
                weights.changed()
        raise


def _sleep(method: Callable[..., Any], engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level == 1:
        return _release_kv_cache_memory(partial(method, level), engine, *args, **kwargs)
    return method(level, *args, **kwargs)


def _release_kv_cache_memory(method: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what resets the caches and keeps the weights: a sleep of level 1 is that, too."""
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
