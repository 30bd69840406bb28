"""LayerEvents: a computing thread waits for a layer until it is in place, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pagoda.transfer.gpu.layer_events import LayerEvents
from testbed.patience import Patience

SOON = 0.05  # long enough for a thread that does not wait to be done
LONG = 20.0


class Noted:
    """An event, and a device, that note the waiting thread."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def synchronize(self) -> None:
        self.waited.append(threading.get_ident())

    def current_stream_wait(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def beside():
    """Runs a wait on another thread."""
    with ThreadPoolExecutor(4) as pool:

        def run(wait: Callable[[], bool]) -> Future[bool]:
            return pool.submit(wait)

        yield run


def test_a_layer_is_there_when_all_its_chunks_are(beside) -> None:
    layer_events = LayerEvents(3, 4)
    waiting = beside(lambda: layer_events.wait_layer(1, timeout=LONG))
    for layer, chunks in ((0, 4), (1, 3), (2, 4)):
        layer_events.record(layer, chunks, None)
    assert layer_events.wait_layer(0, timeout=0)
    assert not layer_events.complete
    time.sleep(SOON)
    assert not waiting.done()
    layer_events.record(1, 1, None)
    assert waiting.result(LONG)
    assert layer_events.complete
    assert not layer_events.ended


def test_the_stream_waits_for_every_mark_of_the_layer_and_no_other() -> None:
    layer_events = LayerEvents(2, 3)
    device = Noted()
    events = [Noted(), Noted(), Noted()]
    layer_events.record(0, 1, events[0])
    layer_events.record(1, 3, events[1])
    layer_events.record(0, 2, events[2])
    assert layer_events.wait_layer(0, device)
    assert device.waited == [events[0], events[2]]
    assert not any(event.waited for event in events)  # this thread itself did not
    assert layer_events.wait_layer(0, device)
    assert device.waited == [events[0], events[2]] * 2


def test_without_a_device_this_thread_waits() -> None:
    layer_events = LayerEvents(1, 1)
    event = Noted()
    layer_events.record(0, 1, event)
    assert layer_events.wait_layer(0)
    assert event.waited == [threading.get_ident()]


def test_a_deadline_is_kept() -> None:
    layer_events = LayerEvents(1, 1)
    patience = Patience(LONG / 4)
    assert not layer_events.wait_layer(0, timeout=SOON)
    assert patience.waited >= SOON
    assert not patience.ended, patience.said()
    assert not layer_events.wait_layer(0, timeout=-1.0)


def test_an_end_wakes_all_who_wait(beside) -> None:
    layer_events = LayerEvents(2, 2)
    layer_events.record(0, 2, None)
    layer_events.record(1, 1, None)
    waiting = [
        beside(lambda: layer_events.wait_layer(1, timeout=LONG)) for _ in range(3)
    ]
    time.sleep(SOON)
    for one in waiting:
        assert not one.done()
    layer_events.end()
    layer_events.end()
    assert [one.result(LONG / 4) for one in waiting] == [False] * 3
    assert layer_events.wait_layer(0, timeout=0)  # this one was complete
    assert layer_events.ended
    assert not layer_events.complete


def test_an_end_of_a_whole_load_takes_nothing_back() -> None:
    layer_events = LayerEvents(1, 2)
    layer_events.record(0, 2, None)
    layer_events.end()
    assert layer_events.complete
    assert layer_events.wait_layer(0, timeout=0)


def test_several_threads_load_and_wait(beside) -> None:
    layers = 4
    chunks = 200
    layer_events = LayerEvents(layers, chunks)

    def load() -> bool:
        for _ in range(chunks // 2):
            for layer in range(layers):
                layer_events.record(layer, 1, None)
        return True

    waiting = beside(
        lambda: all(
            layer_events.wait_layer(layer, timeout=LONG)
            for layer in range(layers)
        )
    )
    loads = [beside(load) for _ in range(2)]
    for one in [*loads, waiting]:
        assert one.result(LONG)
    assert layer_events.complete


def test_wrong_numbers_of_layers_and_chunks_are_refused() -> None:
    layer_events = LayerEvents(2, 2)
    layer_events.record(0, 2, None)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match="is not one of 2"):
            layer_events.record(layer, 1, None)
        with pytest.raises(IndexError, match="is not one of 2"):
            layer_events.wait_layer(layer)
    for layer, chunks in ((0, 1), (1, 3), (1, -1)):
        with pytest.raises(ValueError, match="are missing"):
            layer_events.record(layer, chunks, None)
    # the refused call changed nothing
    assert not layer_events.wait_layer(1, timeout=0)
    with pytest.raises(ValueError, match="at least 1 layer"):
        LayerEvents(0, 1)


def test_nothing_to_load_is_there_at_once() -> None:
    layer_events = LayerEvents(2, 0)
    assert layer_events.complete
    assert layer_events.wait_layer(1, timeout=0)
