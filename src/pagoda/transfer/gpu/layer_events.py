"""When layer i of a load can be used: a load records events layer by layer, and a thread waits
layer by layer.

Recorded by `copy_engine`; waited for by the LLM engine's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.base.signal_safe_threads import Condition

if TYPE_CHECKING:
    from pagoda.transfer.gpu.device import Device, DeviceEvent


class LayerEvents:
    """The events of one load of `chunks` chunks: the events after which each of `layers` layers can
    be used.

    A layer is in place when all its chunks are launched: the device has the copies, each followed
    by an event, and the user of the layer lets its stream wait for those events. Only when the load
    has been validated is it known that the bytes are the requested ones; until then nothing that
    was computed from them may leave the engine.

    Thread-safe; any number of threads may wait, also for the same layer. Raises ValueError for
    sizes below 0 and for more chunks than the load has, IndexError for a layer that it does not
    have.
    """

    def __init__(self, layers: int, chunks: int) -> None:
        if layers < 1 or chunks < 0:
            raise ValueError(
                f"a load has at least 1 layer and 0 chunks, got {layers} and {chunks}"
            )
        # by layer: chunks that were not launched yet
        self._missing = [chunks] * layers
        self._events: list[list[DeviceEvent]] = [[] for _ in range(layers)]
        self._ended = False
        self._changed = Condition()

    def record(self, layer: int, chunks: int, event: DeviceEvent | None) -> None:
        """Note that `chunks` more chunks of a layer are in place after `event` (None: now). Wakes
        waiting threads.
        """
        with self._changed:
            left = self._missing[self._checked(layer)] - chunks
            if chunks < 0 or left < 0:
                raise ValueError(
                    f"layer {layer}: {chunks} chunks more, {self._missing[layer]} are missing"
                )
            if event is not None:
                self._events[layer].append(event)
            self._missing[layer] = left
            if not left:
                self._changed.notify_all()

    def end(self) -> None:
        """Note that the load has ended, complete or not: no thread waits any longer. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_layer(
        self, layer: int, device: Device | None = None, timeout: float = 5.0
    ) -> bool:
        """Block until all chunks of a layer are in place; later work of the current stream runs
        after it.

        Without a `device` this thread itself waits until the copies are done. False: the load ended
        early, or `timeout` seconds passed; then the layer must not be used. Costs some microseconds
        once the layer is in place.
        """
        with self._changed:
            self._checked(layer)
            self._changed.wait_for(
                lambda: self._ended or not self._missing[layer], max(timeout, 0.0)
            )
            if self._missing[layer]:
                return False
            events = list(self._events[layer])
        for event in events:
            if device is None:
                event.synchronize()
            else:
                device.current_stream_wait(event)
        return True

    @property
    def ended(self) -> bool:
        """Whether the load has ended, complete or not."""
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether all chunks of all layers are in place."""
        with self._changed:
            return not any(self._missing)

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self._missing):
            raise IndexError(f"layer {layer} is not one of {len(self._missing)}")
        return layer
