"""pagoda.tiers.remote.query_queue"""

from __future__ import annotations

import threading
import time

from pagoda.metrics import Reason
from pagoda.tiers.remote.query_queue import Asks
from pagoda.tiers.remote.store_client import Link


def nothing(_: Link) -> int:
    return 0


def test_who_asks_the_same_meanwhile_gets_the_same_answer() -> None:
    asks = Asks()
    one, two, other = asks.put("a", nothing), asks.put("a", nothing), asks.put("b", nothing)
    assert one is two and other is not one
    first = asks.take(0)
    assert first is not None and first.name == "a"
    assert asks.put("a", nothing) is one  # it is still under way
    asks.answered(first, 7)
    assert one.result(0) == 7 and not other.done()
    assert asks.put("a", nothing) is not one


def test_a_full_queue_says_so_at_once() -> None:
    asks = Asks()
    taken = [asks.put(n, nothing) for n in range(64)]
    assert not any(answer.done() for answer in taken)
    assert asks.put("more", nothing).result(0) is Reason.QUEUE_FULL
    first = asks.take(0)
    assert first is not None
    asks.answered(first, 1)
    assert not asks.put("more", nothing).done()


def test_what_waits_when_it_is_closed_is_answered() -> None:
    asks = Asks()
    under_way, waiting = asks.put("a", nothing), asks.put("b", nothing)
    first = asks.take(0)
    assert first is not None
    asks.close()
    assert waiting.result(0) is Reason.CLOSED and not under_way.done()
    assert asks.put("c", nothing).result(0) is Reason.CLOSED
    assert asks.take(None) is None
    asks.answered(first, 3)
    assert under_way.result(0) == 3


def test_a_taker_is_woken() -> None:
    asks, came = Asks(), threading.Event()

    def take() -> None:
        assert asks.take(None) is None
        came.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not came.wait(0.01):
        assert time.monotonic() < until
        asks.wake()
    thread.join(60)
