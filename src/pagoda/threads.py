"""Threads that may not be had, and what they wait for, safe from exceptions of signal handlers.

A process may have only so many threads: a start that fails is trouble at run time.

`with threading.Condition()` calls a Python function that takes the lock: an exception that a signal handler raises
in it, or on its way out, leaves the lock taken, and every other thread stands still. So it is in `threading.Event` and
in `concurrent.futures.Future` and `wait`, which are made of conditions. Those here are entered and left by built-in
functions, between which and the block Python runs no handler. `threading.Lock` and `threading.RLock` are built in.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Thread
from typing import Generic, ParamSpec, TypeAlias, TypeVar, cast

from pagoda.metrics import RateLimitedLog, Reason

__all__ = ["NO_THREAD", "Answer", "Condition", "Event", "Pool", "begin", "if_free", "wait"]

NO_THREAD = "no thread can be started: raise the container's pids limit or `ulimit -u`"

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("pagoda")
_lines = RateLimitedLog()
_REFUSED = "can't start new thread"  # what Python says of it, and of nothing else


def begin(thread: Thread) -> bool:
    """Start `thread`; False, with a log line now and then, if the system gives no more threads. Thread-safe.

    The caller goes on without it and tries again, with a new Thread, the next time that it needs one.
    """
    thread._started = Event()  # type: ignore[attr-defined]  # Python's own is made of a condition, see above
    try:
        thread.start()
    except RuntimeError as trouble:
        if _REFUSED in str(trouble):  # and not the end of the interpreter
            _lines.warn(_log, Reason.IO_ERROR, f"{thread.name}: {NO_THREAD}")
        return False
    return True


_RLock: type = type(threading.RLock())


class Condition(_RLock):  # type: ignore[misc]
    """What `threading.Condition` is, with a reentrant lock of its own. Thread-safe."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, without the lock, until notified; False after `timeout` seconds. Called with the lock."""
        waiter, woken = threading.Lock(), False
        held: list[object] = []
        waiter.acquire()
        try:
            self._waiters.append(waiter)
            held.extend(map(_RLock._release_save, (self,)))  # type: ignore[attr-defined]  # given up and noted at once
            woken = waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        except BaseException:  # of a signal handler
            if not self._is_owned():  # it may also have come before it was given up
                self._acquire_restore(held[0])
            if waiter not in self._waiters:
                self.notify()  # another may have use for it
            raise
        else:
            self._acquire_restore(held[0])
        finally:
            try:  # noqa: SIM105  # what `contextlib` has is no built-in function
                self._waiters.remove(waiter)
            except ValueError:
                pass
        return woken

    def wait_for(self, true: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until it is `true`, or for `timeout` seconds; returns the last answer. Called with the lock."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (answer := true()):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return answer

    def notify(self, n: int = 1) -> None:
        """Wake some of those who wait. Called with the lock."""
        while n > 0 and self._waiters:
            try:
                self._waiters[0].release()
                n -= 1
            except RuntimeError:  # it was woken by a call that was interrupted before the next line
                pass
            self._waiters.popleft()

    def notify_all(self) -> None:
        """Wake all who wait. Called with the lock."""
        self.notify(len(self._waiters))


class Event:
    """What `threading.Event` is. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake all who wait."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Reset it."""
        self._set = False

    def _at_fork_reinit(self) -> None:
        """What Python asks of the event of a thread in a forked child."""
        self._changed = Condition()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False after `timeout` seconds."""
        if self._set:
            return True
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class Answer(Future[T]):
    """What `concurrent.futures.Future` is. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


def wait(futures: Iterable[Future[T]], timeout: float | None = None) -> None:
    """Wait until all of them have ended, or for `timeout` seconds. Thread-safe.

    That of `concurrent.futures` takes all of their conditions by a Python function: see above.
    """
    until = None if timeout is None else time.monotonic() + timeout
    for future in futures:
        with suppress(CancelledError, TimeoutError):
            future.exception(None if until is None else max(0.0, until - time.monotonic()))


def if_free(lock: threading.RLock, work: Callable[[], object], timeout: float = 0.0) -> None:  # type: ignore[valid-type, unused-ignore]
    """Call `work` with the lock, unless another thread has it for so many seconds."""
    try:
        if lock.acquire(timeout=timeout):
            work()
    finally:
        try:  # noqa: SIM105  # what `contextlib` has is no built-in function
            lock.release()
        except RuntimeError:  # another has it
            pass


class _Work(Generic[T]):
    """One call on its way to a thread, which `future.cancel()` takes back for good unless it has begun."""

    def __init__(self, call: Callable[[], T], future: Future[T]) -> None:
        self._parts = [(call, future)]

    def cancel(self) -> None:
        """Take it back, out of the queue."""
        _, future = self._parts.pop()
        if future.cancel():
            future.set_running_or_notify_cancel()  # or `wait` would wait for it

    def __call__(self) -> None:
        call, future = self._parts.pop()  # nothing refers to them from here on but this frame
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as trouble:  # noqa: BLE001  # a border: it is the caller's, by the future
            future.set_exception(trouble)
            del call, future  # an exception refers to its frames
        else:
            future.set_result(result)


class Pool(Executor):
    """A few daemon threads for calls whose results are futures. Thread-safe.

    Python's own executor is made of conditions, and its `submit` may be ended by an exception of a signal handler when
    the new thread is not in its books yet: nothing ends that one, and the interpreter waits for it at exit. It also
    keeps the work of a `submit` that raised for want of a thread and runs it later, when whoever asked has long given
    up the memory that it writes into. Here a refused call never runs, and at exit what was submitted has ten seconds.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start no thread yet. Each `submit` starts one more if none is idle and there are fewer than `most`."""
        self._most, self._name = most, name
        self._renew()
        _pools.add(self)
        atexit.unregister(_at_exit)  # to run before all that was registered until now: the libraries of calls
        atexit.register(_at_exit)

    def _renew(self) -> None:
        """Begin anew, also in a forked child: with no thread and nothing to do."""
        self._lock = threading.RLock()
        self._calls: _Calls = queue.SimpleQueue()
        self._idle: deque[None] = deque()  # an entry for each thread that waits; one too few costs a thread
        self._threads: list[Thread] = []
        self._open: set[Future[object]] = set()
        self._closed = False
        self._gone = weakref.ref(self, self._calls.put)  # kept by its threads, which do not refer to it

    @property
    def under_way(self) -> int:
        """How many calls have not ended, queued ones too."""
        return len(self._open)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` on one of the threads. Raises RuntimeError with the remedy if there is none, or after the end."""
        return self._put(partial(fn, *args, **kwargs), False)

    def later(self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run what nobody waits for; with no thread to be had, once a later call has got one. Never raises."""
        with suppress(RuntimeError):
            self._put(partial(fn, *args, **kwargs), True)

    def _put(self, call: Callable[[], T], waits: bool) -> Future[T]:
        future: Future[T] = Answer()
        future.add_done_callback(self._open.discard)
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("cannot take a call after shutdown")
                if not self._has_thread() and not waits:
                    raise RuntimeError(NO_THREAD)
                self._open.add(cast("Future[object]", future))
                self._calls.put(cast("_Work[object]", _Work(call, future)))
        except BaseException:  # of a signal handler, too: nobody has the future
            if not future.cancel():
                wait([future])  # it has begun, and works with what is the caller's
            raise
        return future

    def _has_thread(self) -> bool:
        """Whether there is a thread that will take one more call; starts one if none is idle. Holds the lock."""
        if self._idle:
            self._idle.pop()
            return True  # also one that was started by a call that was broken off, and that no book has
        if len(self._threads) < self._most:
            arguments = self._gone, self._lock, self._calls, self._idle
            name = f"{self._name}_{len(self._threads)}"
            thread = Thread(target=_take_calls, args=arguments, name=name, daemon=True)
            if begin(thread):
                self._threads.append(thread)
        return bool(self._threads)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when all is done; with `cancel_futures` what has not begun is cancelled."""
        with self._lock:
            self._closed = True
        if cancel_futures:  # without the lock: whoever is told takes locks of its own
            with suppress(queue.Empty):
                while True:
                    if isinstance(work := self._calls.get_nowait(), _Work):
                        work.cancel()
        self._calls.put(None)
        if wait:
            for thread in list(self._threads):
                thread.join()


_Calls: TypeAlias = "queue.SimpleQueue[_Work[object] | weakref.ref[Pool] | None]"


def _take_calls(
    _gone: object, lock: AbstractContextManager[object], calls: _Calls, idle: deque[None]
) -> None:
    """Do what comes, until the end: said by None, or by `_gone` when nobody has the pool any more. Passes it on."""
    while isinstance(call := _next_call(lock, calls, idle), _Work):
        call()
        del call  # while this thread waits it must not keep what the call used alive
    calls.put(None)


def _next_call(lock: AbstractContextManager[object], calls: _Calls, idle: deque[None]) -> object:
    with lock:
        with suppress(queue.Empty):
            return calls.get_nowait()
        idle.append(None)
    return calls.get()


_EXIT_SECONDS = 10.0
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _at_exit() -> None:
    """Wait a while for what was submitted: a thread ought not to be in a library that ends, nor to keep the process."""
    wait([future for pool in list(_pools) if pool._threads for future in list(pool._open)], _EXIT_SECONDS)


def _renew_in_child() -> None:
    _lines.reset()
    for pool in list(_pools):
        pool._renew()


os.register_at_fork(after_in_child=_renew_in_child)
