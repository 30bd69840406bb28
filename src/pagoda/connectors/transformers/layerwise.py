"""Loads the KV of a prompt layer by layer, while the model already computes with the loaded layers.

    loading      | layer 0 | layer 1 | layer 2 | ... | validated
    computing              | layer 0 | layer 1 | ...       | last layer | first token

A layer's attention waits for that layer's KV. The last layer also waits for the end of the load:
only then is it known that the bytes are the requested ones, and the first forward pass returns
nothing before. If they are not, `LoadShort` ends that pass before anything was sampled or streamed,
and the caller of `generate` calls it again.

Imports transformers, so import this module only when it is needed.
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pagoda.base.clock import SLOWEST_BYTES_PER_SECOND, Deadline
from pagoda.base.signal_safe_threads import Pool
from pagoda.cache import Cache, Hit
from pagoda.connectors.endings import KeySpace
from pagoda.connectors.transformers.dynamic_cache import kv_of_row, room_for
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.transfer.gpu.device import Device
from pagoda.transfer.gpu.layer_events import LayerEvents

_THREADS = 4  # concurrent loads: as many as a copy engine runs


class LoadShort(Exception):
    """The load was not complete: what was computed from it must not be used."""


@dataclass(eq=False)
class LayerLoad:
    """A running load of one prompt's KV into `kv`, a DynamicCache to pass to `generate`. For the
    computing thread.

    The result of `generate` may be used if `result` returns a hit.
    """

    kv: Any
    _layer_events: LayerEvents
    _device: Device
    _future: Future[Hit]
    _tokens: int
    _deadline: Deadline
    hung: bool = False  # the load still runs after its deadline
    seconds: float = 0.0  # that it took
    _began: float = field(default_factory=time.monotonic)
    _hit: Hit | None = None

    def __post_init__(self) -> None:
        self._absent = set(range(len(self.kv.layers)))  # layers not yet used

    def wait_for(self, layer: int) -> None:
        """Wait until this thread's current stream may use a layer. Raises LoadShort if it does not
        arrive.
        """
        if not self._layer_events.wait_layer(
            layer, self._device, self._deadline.remaining()
        ):
            self.hung = not self._layer_events.ended
            self.seconds = time.monotonic() - self._began
            raise LoadShort

    def used(self, layer: int) -> None:
        """Note that a layer is about to be used; waits for it, and at the last layer for the end of
        the load.
        """
        self.wait_for(layer)
        self._absent.discard(layer)
        if not self._absent:
            self.result()

    def result(self) -> Hit:
        """Wait until the load has been validated; return the hit. Raises LoadShort if it is not
        complete.
        """
        if self._hit is None:
            hit = self._outcome()
            self.seconds = time.monotonic() - self._began
            if hit is None or hit.num_tokens != self._tokens:
                raise LoadShort
            self._hit = hit
        return self._hit

    def give_up(self) -> None:
        """Release the KV, which is useless without a hit; threads that still write to it keep it
        alive. Idempotent.
        """
        self._future.cancel()  # if it has not begun
        if self._hit is None and self.kv is not None:
            # breaks a reference cycle, so that the memory is freed at once
            self.kv.layers.clear()
        self.kv = None

    def _outcome(self) -> Hit | None:
        try:
            return self._future.result(self._deadline.remaining())
        except CancelledError:
            return None
        except TimeoutError:
            self.hung = not self._future.done()
            return None
        except Exception:  # noqa: BLE001
            # wrong use: the second, plain load raises it to the caller
            return None


class ArrivingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of a DynamicCache whose K and V are being loaded: its use waits. Then `plain`
    replaces it in `layers`.

    Its length is known from the beginning, so masks and positions do not wait.
    """

    _layer_type = None  # transformers itself never makes this kind

    def __init__(
        self, load: LayerLoad, layers: list[Any], index: int, plain: Any
    ) -> None:
        self._kept: dict[str, Any] = {}
        super().__init__()  # type: ignore[no-untyped-call]
        self._load = load
        self._layers = layers
        self._index = index
        self._plain = plain
        self._tokens = int(plain.keys.shape[-2])
        self.keys = plain.keys
        self.values = plain.values
        self.dtype = plain.keys.dtype
        self.device = plain.keys.device
        self.is_initialized = True

    @property
    def keys(self) -> Any:
        self._load.wait_for(self._index)
        return self._kept["keys"]

    @keys.setter
    def keys(self, value: Any) -> None:
        self._kept["keys"] = value

    @property
    def values(self) -> Any:
        self._load.wait_for(self._index)
        return self._kept["values"]

    @values.setter
    def values(self, value: Any) -> None:
        self._kept["values"] = value

    def get_seq_length(self) -> int:
        """Return the number of tokens that are being loaded; does not wait."""
        return self._tokens

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wait for K and V and return them with the new ones appended; afterwards a plain layer
        does this.
        """
        self._load.used(self._index)
        self._plain.keys = self._kept["keys"]
        self._plain.values = self._kept["values"]
        # a layer's old memory is freed as soon as the model has its new one
        self._kept.clear()
        self._layers[self._index] = self._plain
        return self._plain.update(key_states, value_states, *args, **kwargs)


class LayerLoads:
    """The threads that load for one CachedModel: a few, started when needed, also after a fork.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._pool = Pool(_THREADS, "pagoda-load")

    def begin(
        self,
        model: Any,
        seen: ProbedModel,
        cache: Cache,
        tokens: Any,
        space: KeySpace,
    ) -> LayerLoad | None:
        """Begin to load `tokens`, whole chunks that were all found in the host tier, without
        waiting for any of them.

        Returns None if all threads are busy, or after close: then load without this class.
        """
        assert seen.copy_engine is not None
        if self._pool.under_way >= _THREADS:
            return None
        layout = seen.layout
        chunks = len(tokens) // layout.chunk_tokens
        planes = room_for(seen, 1, len(tokens))
        layer_events = LayerEvents(layout.layers, chunks)
        transfer = kv_of_row(planes, 0, 0, len(tokens), seen, layer_events)
        try:
            future = self._pool.submit(
                cache.retrieve, tokens, transfer, counted=False, **space
            )
        except RuntimeError:  # after close, or no thread could be started
            return None
        future.add_done_callback(lambda _: layer_events.end())
        kv: Any = DynamicCache(config=model.config)
        seconds = (
            cache.config.deadline_seconds
            + chunks * layout.chunk_bytes / SLOWEST_BYTES_PER_SECOND
        )
        load = LayerLoad(
            kv,
            layer_events,
            seen.copy_engine.device,
            future,
            len(tokens),
            Deadline(seconds),
        )
        for index, (plain, (keys, values)) in enumerate(
            zip(list(kv.layers), planes, strict=True)
        ):
            plain.lazy_initialization(keys, values)
            plain.keys = keys
            plain.values = values
            kv.layers[index] = ArrivingLayer(load, kv.layers, index, plain)
        return load

    def close(self, timeout: float) -> None:
        """Accept no more loads; wait for running ones, at most `timeout` seconds. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool.join(timeout)


class Resumed:
    """A streamer for a second call of `generate`: it has received the prompt already. For one
    thread.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._prompt_is_next = True

    def put(self, value: Any) -> None:
        """Pass on everything except the prompt."""
        if self._prompt_is_next:
            self._prompt_is_next = False
        else:
            self._streamer.put(value)

    def end(self) -> None:
        """Pass on the end."""
        self._streamer.end()
