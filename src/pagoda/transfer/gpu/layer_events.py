"""When layer i of a load can be used: the load tells, layer by layer; who computes waits, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.threads import Condition

if TYPE_CHECKING:
    from pagoda.transfer.gpu.device import Mark, Port

__all__ = ["LayerGate"]


class LayerGate:
    """Which layers of one load are in place: so many `chunks` in each of `layers`. For one load.

    "In place" means launched: the copy has been given to the device behind a mark, and who uses the layer lets its
    stream wait for the marks. That the bytes are those that were asked for is known only when the load has been
    validated; until then nothing that was computed from them may leave the engine.

    Thread-safe; any number of threads may wait, for the same layer too. Raises ValueError for sizes below 0 and for
    more chunks than there are, IndexError for a layer that is not there.
    """

    def __init__(self, layers: int, chunks: int) -> None:
        if layers < 1 or chunks < 0:
            raise ValueError(f"a gate has at least 1 layer and 0 chunks, got {layers} and {chunks}")
        self._missing = [chunks] * layers  # chunks that were not launched yet
        self._marks: list[list[Mark]] = [[] for _ in range(layers)]
        self._ended = False
        self._told = Condition()

    def passed(self, layer: int, chunks: int, mark: Mark | None) -> None:
        """Note that so many more chunks of a layer are in place behind `mark` (None: already). Wakes who waits."""
        with self._told:
            left = self._missing[self._checked(layer)] - chunks
            if chunks < 0 or left < 0:
                raise ValueError(f"layer {layer}: {chunks} chunks more, {self._missing[layer]} are missing")
            if mark is not None:
                self._marks[layer].append(mark)
            self._missing[layer] = left
            if not left:
                self._told.notify_all()

    def end(self) -> None:
        """Note that the load has ended, whole or not: nobody waits any longer. Idempotent."""
        with self._told:
            self._ended = True
            self._told.notify_all()

    def wait_layer(self, layer: int, port: Port | None = None, timeout: float = 5.0) -> bool:
        """Block until all chunks of a layer are in place; what this thread's current stream is given then comes after.

        Without a `port` this thread itself waits until the copies are done. False: the load ended short, or `timeout`
        seconds passed; then the layer must not be used. Costs some microseconds once the layer is there.
        """
        with self._told:
            self._checked(layer)
            self._told.wait_for(lambda: self._ended or not self._missing[layer], max(timeout, 0.0))
            if self._missing[layer]:
                return False
            marks = list(self._marks[layer])
        for mark in marks:
            if port is None:
                mark.wait()
            else:
                port.wait_here(mark)
        return True

    @property
    def ended(self) -> bool:
        """Whether the load has ended, whole or not."""
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether all chunks of all layers are in place."""
        with self._told:
            return not any(self._missing)

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self._missing):
            raise IndexError(f"layer {layer} is not one of {len(self._missing)}")
        return layer
