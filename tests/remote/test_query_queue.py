"""The queue of look-ups in a remote store: shared answers, its bound, and its end."""

from __future__ import annotations

import threading

from pagoda.base.metrics import Reason
from pagoda.tiers.remote.query_queue import QueryQueue
from pagoda.tiers.remote.store_client import StoreConnection
from testbed.patience import Patience


def nothing(_: StoreConnection) -> int:
    return 0


def test_who_asks_the_same_meanwhile_gets_the_same_answer() -> None:
    queries = QueryQueue()
    one = queries.submit("a", nothing)
    two = queries.submit("a", nothing)
    other = queries.submit("b", nothing)
    assert one is two
    assert other is not one
    first = queries.take(0)
    assert first is not None
    assert first.name == "a"
    assert queries.submit("a", nothing) is one  # it is still under way
    queries.finish(first, 7)
    assert one.result(0) == 7
    assert not other.done()
    assert queries.submit("a", nothing) is not one


def test_a_full_queue_says_so_at_once() -> None:
    queries = QueryQueue()
    taken = [queries.submit(n, nothing) for n in range(64)]
    for answer in taken:
        assert not answer.done()
    assert queries.submit("more", nothing).result(0) is Reason.QUEUE_FULL
    first = queries.take(0)
    assert first is not None
    queries.finish(first, 1)
    assert not queries.submit("more", nothing).done()


def test_what_waits_when_it_is_closed_is_answered() -> None:
    queries = QueryQueue()
    under_way = queries.submit("a", nothing)
    waiting = queries.submit("b", nothing)
    first = queries.take(0)
    assert first is not None
    queries.close()
    assert waiting.result(0) is Reason.CLOSED
    assert not under_way.done()
    assert queries.submit("c", nothing).result(0) is Reason.CLOSED
    assert queries.take(None) is None
    queries.finish(first, 3)
    assert under_way.result(0) == 3


def test_a_taker_is_woken() -> None:
    queries = QueryQueue()
    came = threading.Event()

    def take() -> None:
        assert queries.take(None) is None
        came.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    patience = Patience(60)
    while not came.wait(0.01):
        assert not patience.ended
        queries.wake()
    thread.join(60)
