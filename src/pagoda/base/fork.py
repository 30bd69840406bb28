"""What belongs to one process: locks, threads, queues. A forked child has none of its parent's
threads, and any of them may have held a lock.

An object that has such parts says how to make each of them, as a `per_process` attribute. A child
makes its own at its first use of the attribute and never touches those of its parent. So a child
that uses nothing pays nothing, and no object is told of a fork.

Only what cannot wait for a next call has a hook (`os.register_at_fork`):

    here          how often a fork led to this process; a built-in function counts it
    finalizers    the queue of objects that were dropped, which a destructor fills
    signal_safe_threads   a call in the middle of which a signal handler forked must not wait for a
                  thread that the child lacks
    ledger.session   a child closes its parent's tables and lock files: locks would outlive the
                  parent
    llamacpp.state_directory   the same
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Self, TypeVar, overload

S = TypeVar("S")
T = TypeVar("T")

# one item for each fork that led from the first process to this one
_forks: list[None] = []


def here() -> int:
    """Return how many forks led to this process: a child and its parent differ."""
    return len(_forks)


class per_process(Generic[S, T]):
    """An attribute that each process makes for itself, at its first use: a decorator of the method
    that makes it.

    Like `functools.cached_property`, but a forked child calls the method again. What the method
    makes must start nothing and be worth nothing until it is used: if two threads use the attribute
    first at once, both make it, and one of the two is what both use. The class has no `__slots__`.

    Example:
        >>> class Counter:
        ...     @per_process
        ...     def _lock(self) -> threading.Lock:
        ...         return threading.Lock()
    """

    def __init__(self, make: Callable[[S], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__
        self._name = f"_per_process_{make.__name__}"

    @overload
    def __get__(self, owner: None, kind: type[S]) -> Self: ...
    @overload
    def __get__(self, owner: S, kind: type[S]) -> T: ...
    def __get__(self, owner: S | None, kind: type[S]) -> Self | T:
        if owner is None:
            return self
        try:
            made: T = _get(owner, self._name)[len(_forks)]
        except (AttributeError, KeyError):
            return self._made(owner)
        return made

    def __set__(self, owner: S, value: T) -> None:
        """Replace the attribute in this process."""
        made = self._all(owner)
        made[len(_forks)] = value
        _drop_parents(made)

    def _all(self, owner: S) -> dict[int, T]:
        """Return what this process and its parents made; added to the object at first."""
        adding = id(owner), self._name
        new: dict[int, T] = _adding.setdefault(adding, {})  # type: ignore[assignment]
        try:
            # also after `setdefault`: another thread has added its own meanwhile
            return _get(owner, self._name)  # type: ignore[no-any-return]
        except AttributeError:
            object.__setattr__(owner, self._name, new)
            return new
        finally:
            _adding.pop(adding, None)

    def _made(self, owner: S) -> T:
        made = self._all(owner)
        number = len(_forks)
        # by one built-in function: all threads get the same
        own = made.setdefault(number, self._make(owner))
        _drop_parents(made)
        return own


# Not `owner.__dict__`: once it was asked for, all attributes of the object are slower.
_get = object.__getattribute__
# by object and attribute: what one thread is about to add, so that another adds the same
_adding: dict[tuple[int, str], dict[int, object]] = {}


def _drop_parents(made: dict[int, T]) -> None:
    """Drop what a parent made, in case it has large buffers. A signal handler may have forked in
    the middle of a use: what its child has used since then stays.
    """
    newest = max(made)
    for number in [*made]:
        if number < newest:
            made.pop(number, None)


# a built-in function: no exception of a signal handler can keep it from counting
os.register_at_fork(after_in_child=partial(_forks.append, None))


def take_all(steps: Iterable[Callable[[], object]]) -> None:
    """Take all of these steps, also after one that fails; then raise the first error. For hooks."""
    errors = []
    for step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001
            # of a signal handler too: the others are still to be taken
            errors.append(error)
    if errors:
        raise errors[0]
