"""What threads wait for: entered and left whole, whatever a signal handler raises."""

from __future__ import annotations

import concurrent.futures
import gc
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

import pagoda
from pagoda.base.signal_safe_threads import (
    Answer,
    Condition,
    Event,
    Pool,
    complete,
    wait,
)
from testbed.patience import Patience
from tests.interrupts import interrupts


def free(condition: Condition) -> bool:
    """Whether another thread can take it."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(condition.acquire(timeout=1.0))
        if taken[0]:
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


@pytest.mark.slow
# the other method has the timer that this test uses
@pytest.mark.timeout(300, method="thread")
def test_no_exception_of_a_signal_handler_leaves_a_condition_taken() -> None:
    condition = Condition()
    event = Event()
    answers = [Answer[int]()]

    def notify() -> None:
        with condition:
            pass
        with condition:
            condition.notify_all()

    def ask() -> None:
        answers.append(Answer())
        answers[-1].set_result(len(answers))
        answers[-1].result(0)
        del answers[:-1]

    with interrupts(1, (-5, -3.5), again_seconds=1.0) as until_interrupted:
        for _ in range(4000):
            until_interrupted(notify)
        assert free(condition)
        for _ in range(1000):
            until_interrupted(event.set)
        assert free(event._changed)
        for _ in range(500):
            until_interrupted(ask)
    assert all(free(answer._condition) for answer in answers)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
@pytest.mark.xfail(
    sys.version_info >= (3, 14),
    reason="from Python 3.14 on, a signal handler may run after `with` has taken a lock",
    strict=False,
)
def test_nor_does_one_that_ends_a_wait() -> None:
    condition = Condition()
    pool = Pool(2, "interrupted-pool")
    answers: list[Answer[int]] = [Answer()]

    def pause() -> None:
        with condition, condition:  # held twice, and so it is afterwards
            assert not condition.wait(0.0)

    def ask() -> None:
        wait(answers, 0.0)
        answers.append(Answer())
        answers[-1].set_result(1)
        wait(answers[-1:])
        del answers[1:]

    def submit() -> None:
        assert pool.submit(len, "abc").result(60) == 3

    with interrupts(2, (-5, -3.5), again_seconds=1.0) as until_interrupted:
        for work in (pause, ask, submit):
            for _ in range(1500):
                until_interrupted(work)
    assert free(condition)
    assert not condition._waiters
    assert all(free(answer._condition) for answer in answers)  # type: ignore[arg-type]
    patience = Patience(60)
    while pool.under_way and not patience.ended:
        time.sleep(0.01)
    assert not pool.under_way
    answered: list[int] = []
    thread = threading.Thread(
        target=lambda: answered.append(pool.submit(len, "abc").result(60))
    )
    thread.start()
    thread.join(60)
    assert answered == [3]
    pool.shutdown()


def test_a_condition_wakes_one_who_waits_for_each_notice() -> None:
    condition = Condition()
    woken = list[int]()

    def sleep(number: int) -> None:
        with condition:
            if condition.wait(60):
                woken.append(number)

    threads = [
        threading.Thread(target=sleep, args=(number,)) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    while len(condition._waiters) < 3:
        time.sleep(0.001)
    for count in range(1, 4):
        with condition:
            condition.notify()
        while len(woken) < count:
            time.sleep(0.001)
        assert len(condition._waiters) == 3 - count
    for thread in threads:
        thread.join(60)


def test_a_condition_wakes_who_waits() -> None:
    condition = Condition()
    said = []

    def wait() -> None:
        with condition:
            said.append(condition.wait_for(lambda: said, 60))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.01)
    with condition, condition:  # reentrant
        said.append(True)
        condition.notify()
    thread.join(60)
    assert len(said) == 2
    with condition:
        assert not condition.wait(0.01)
        assert not condition.wait_for(lambda: False, 0.01)


def test_an_event_is_one() -> None:
    event = Event()
    assert not event.is_set()
    assert not event.wait(0.01)
    threading.Timer(0.02, event.set).start()
    assert event.wait(60)
    assert event.is_set()
    assert event.wait(0)
    event.clear()
    assert not event.is_set()


def test_an_answer_is_a_future() -> None:
    answer: Future[int] = Answer()
    threading.Timer(0.02, answer.set_result, [7]).start()
    assert answer.result(60) == 7
    assert answer.done()


def test_a_wait_for_many_takes_no_longer_than_for_one() -> None:
    answers = [Answer[int]() for _ in range(1000)]
    patience = Patience(3)
    wait(answers, 0.1)
    assert patience.waited >= 0.1
    assert not patience.ended, patience.said()


def test_the_threads_of_a_dropped_pool_end() -> None:
    pool = Pool(2, "dropped-pool")
    assert pool.submit(len, "abc").result(60) == 3
    pool.later(len, "abc")
    del pool
    patience = Patience(10)
    while [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("dropped-pool")
    ]:
        gc.collect()
        assert not patience.ended
        time.sleep(0.01)


def test_what_is_completed_despite_a_signal_raises_it_at_the_end() -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps))
        if len(steps) < 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        complete(step)
    assert steps == [0, 1, 2]


def test_calls_one_after_the_other_need_one_thread() -> None:
    pool = Pool(4, "idle-pool")
    for _ in range(20):
        assert pool.submit(len, "abc").result(60) == 3
        with pytest.raises(TypeError):
            pool.submit(len).result(60)
    assert len(pool._own.threads) == 1
    pool.shutdown()


@pytest.mark.parametrize(
    "call", [lambda: 3, lambda: len(3)], ids=["result", "error"]
)  # type: ignore[arg-type]
def test_who_has_a_result_finds_its_thread_free(call: Callable[[], int]) -> None:
    """A pool that is asked again at once does not grow to its limit."""
    pool = Pool(4, "idle-pool")
    begin = threading.Event()
    end = threading.Event()
    first = pool.submit(lambda: (begin.wait(60), call()))
    # between its result and what its thread does next
    first.add_done_callback(lambda _: end.wait(60))
    begin.set()
    concurrent.futures.wait([first], 60)
    second = pool.submit(len, "abc")
    assert len(pool._own.threads) == 1
    end.set()
    assert second.result(60) == 3
    pool.shutdown()


def test_a_pool_that_is_shut_down_takes_no_call_and_wakes_who_waits_for_those_it_cancels() -> (
    None
):
    pool = Pool(1, "shut-pool")
    begun = threading.Event()
    busy = threading.Event()
    first = pool.submit(lambda: (begun.set(), busy.wait(60)))
    assert begun.wait(60)
    second = pool.submit(len, "abc")
    pool.shutdown(wait=False, cancel_futures=True)
    assert second in concurrent.futures.wait([second], 5).done
    assert second.cancelled()
    busy.set()
    assert first.result(60) == (None, True)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(len, "abc")


def test_a_pool_that_is_shut_down_cancels_without_its_lock() -> None:
    pool = Pool(1, "busy-pool")
    busy = threading.Event()
    pool.submit(busy.wait)
    acquired: list[bool] = []

    def take_lock(future: Future[int]) -> None:
        other = threading.Thread(
            target=lambda: acquired.append(pool._own.lock.acquire(timeout=60))
        )
        other.start()
        other.join()

    pool.submit(len, "abc").add_done_callback(take_lock)
    pool.shutdown(wait=False, cancel_futures=True)
    busy.set()
    assert acquired == [True]


def test_no_other_conditions_are_used() -> None:
    """What `pagoda.testing` has may be in a caller's hands too, but not while an engine runs."""
    source = Path(pagoda.__file__).parents[1]
    futures = re.compile(r"concurrent\.futures import .*\b(wait|as_completed)\b")
    assert not [
        path for path in source.rglob("*.py") if futures.search(path.read_text())
    ]
    mine = {
        path for path in source.rglob("*.py") if "testing" not in path.parts
    } - {source / "pagoda" / "base" / "signal_safe_threads.py"}
    made = re.compile(
        r"threading\.(Condition|Event|Semaphore|BoundedSemaphore|Barrier)\("
    )
    assert not [path for path in mine if made.search(path.read_text())]
