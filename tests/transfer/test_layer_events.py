"""LayerGate: who computes waits for a layer as long as it is not there, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pagoda.transfer.gpu.layer_events import LayerGate

SOON = 0.05  # long enough for a thread that does not wait to be done
LONG = 20.0


class Noted:
    """A mark, and a port, that note who waited."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait(self) -> None:
        self.waited.append(threading.get_ident())

    def wait_here(self, mark: object) -> None:
        self.waited.append(mark)


@pytest.fixture
def beside():
    """Runs a wait on another thread."""
    with ThreadPoolExecutor(4) as pool:

        def run(wait: Callable[[], bool]) -> Future[bool]:
            return pool.submit(wait)

        yield run


def test_a_layer_is_there_when_all_its_chunks_are(beside) -> None:
    gate = LayerGate(3, 4)
    waiting = beside(lambda: gate.wait_layer(1, timeout=LONG))
    for layer, chunks in ((0, 4), (1, 3), (2, 4)):
        gate.passed(layer, chunks, None)
    assert gate.wait_layer(0, timeout=0)
    assert not gate.complete
    time.sleep(SOON)
    assert not waiting.done()
    gate.passed(1, 1, None)
    assert waiting.result(LONG)
    assert gate.complete
    assert not gate.ended


def test_the_stream_waits_for_every_mark_of_the_layer_and_no_other() -> None:
    gate, port, marks = LayerGate(2, 3), Noted(), [Noted(), Noted(), Noted()]
    gate.passed(0, 1, marks[0])
    gate.passed(1, 3, marks[1])
    gate.passed(0, 2, marks[2])
    assert gate.wait_layer(0, port)
    assert port.waited == [marks[0], marks[2]]
    assert not any(mark.waited for mark in marks)  # this thread itself did not
    assert gate.wait_layer(0, port)
    assert port.waited == [marks[0], marks[2]] * 2


def test_without_a_port_this_thread_waits() -> None:
    gate, mark = LayerGate(1, 1), Noted()
    gate.passed(0, 1, mark)
    assert gate.wait_layer(0)
    assert mark.waited == [threading.get_ident()]


def test_a_deadline_is_kept() -> None:
    gate, began = LayerGate(1, 1), time.monotonic()
    assert not gate.wait_layer(0, timeout=SOON)
    assert SOON <= time.monotonic() - began < LONG / 4
    assert not gate.wait_layer(0, timeout=-1.0)


def test_an_end_wakes_all_who_wait(beside) -> None:
    gate = LayerGate(2, 2)
    gate.passed(0, 2, None)
    gate.passed(1, 1, None)
    waiting = [beside(lambda: gate.wait_layer(1, timeout=LONG)) for _ in range(3)]
    time.sleep(SOON)
    assert not any(one.done() for one in waiting)
    gate.end()
    gate.end()
    assert [one.result(LONG / 4) for one in waiting] == [False] * 3
    assert gate.wait_layer(0, timeout=0)  # this one had come
    assert gate.ended
    assert not gate.complete


def test_an_end_of_a_whole_load_takes_nothing_back() -> None:
    gate = LayerGate(1, 2)
    gate.passed(0, 2, None)
    gate.end()
    assert gate.complete
    assert gate.wait_layer(0, timeout=0)


def test_several_threads_load_and_wait(beside) -> None:
    layers, chunks = 4, 200
    gate = LayerGate(layers, chunks)

    def load() -> bool:
        for _ in range(chunks // 2):
            for layer in range(layers):
                gate.passed(layer, 1, None)
        return True

    waiting = beside(lambda: all(gate.wait_layer(layer, timeout=LONG) for layer in range(layers)))
    loads = [beside(load) for _ in range(2)]
    assert all(one.result(LONG) for one in [*loads, waiting])
    assert gate.complete


def test_wrong_numbers() -> None:
    gate = LayerGate(2, 2)
    gate.passed(0, 2, None)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match="is not one of 2"):
            gate.passed(layer, 1, None)
        with pytest.raises(IndexError, match="is not one of 2"):
            gate.wait_layer(layer)
    for layer, chunks in ((0, 1), (1, 3), (1, -1)):
        with pytest.raises(ValueError, match="are missing"):
            gate.passed(layer, chunks, None)
    assert not gate.wait_layer(1, timeout=0)  # what was refused changed nothing
    with pytest.raises(ValueError, match="at least 1 layer"):
        LayerGate(0, 1)


def test_nothing_to_load_is_there_at_once() -> None:
    gate = LayerGate(2, 0)
    assert gate.complete
    assert gate.wait_layer(1, timeout=0)
