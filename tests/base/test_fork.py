"""Forks: what each process makes for itself, and what a child does at once."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagoda.base.fork import here, per_process, take_all
from tests.children import in_child


class Thing:
    def __init__(self) -> None:
        self.made = 0

    @per_process
    def lock(self) -> threading.Lock:
        """A lock."""
        self.made += 1
        return threading.Lock()

    @per_process
    def words(self) -> list[str]:
        return []


def test_a_child_makes_at_its_first_use_what_its_parent_may_have_locked() -> None:
    thing = Thing()
    thing.words.append("the parent's")
    lock = thing.lock
    number = here()

    def grandchild() -> None:
        assert here() == number + 2
        assert thing.words == []

    def child() -> None:
        assert here() == number + 1
        assert thing.made == 1, "it pays nothing for what it does not use"
        with thing.lock:
            assert thing.lock is not lock
            assert thing.lock.locked()
        thing.words.append("the child's")
        in_child(grandchild)
        assert thing.words == ["the child's"]
        assert thing.made == 2

    with lock:
        in_child(child)
    assert thing.lock is lock
    assert thing.words == ["the parent's"]
    assert here() == number
    assert Thing.lock.__doc__ == "A lock."


def test_what_a_process_sets_is_its_own() -> None:
    thing = Thing()
    words = ["set"]
    thing.words = words

    def child() -> None:
        assert thing.words == []
        thing.words = ["by the child"]
        assert thing.words == ["by the child"]

    in_child(child)
    assert thing.words is words


def test_threads_that_use_an_attribute_first_at_once_have_the_same() -> None:
    barrier = threading.Barrier(4)

    class Slow:
        @per_process
        def words(self) -> list[str]:
            barrier.wait(60)  # all of them make it
            return []

    slow = Slow()
    with ThreadPoolExecutor(4) as threads:
        used = list(threads.map(lambda _: slow.words, range(4)))
    assert len(set(map(id, used))) == 1
    assert slow.words is used[0]


def test_a_child_that_is_forked_within_a_use_keeps_what_it_used_meanwhile() -> (
    None
):
    """A signal handler forks while an attribute is made, and its child uses the attribute before it
    returns there.
    """
    parent = os.getpid()
    children: list[int] = []

    class Forks:
        @per_process
        def words(self) -> list[str]:
            if not children:
                children.append(os.fork())
                if os.getpid() != parent:
                    self.words.append("kept")
            return []

    forks = Forks()
    words = forks.words
    if os.getpid() != parent:
        os._exit(words != [] or forks.words != ["kept"])
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert forks.words is words


def test_a_step_that_fails_keeps_no_other_from_being_taken() -> None:
    taken = list[int]()

    def step(number: int, error: BaseException | None) -> None:
        taken.append(number)
        if error is not None:
            raise error

    errors = [None, KeyboardInterrupt(), None, MemoryError(), None]
    with pytest.raises(KeyboardInterrupt):
        take_all(
            [lambda n=n, e=e: step(n, e) for n, e in enumerate(errors)]  # type: ignore[misc]
        )
    assert taken == [0, 1, 2, 3, 4]
