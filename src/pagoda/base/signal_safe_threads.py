"""Threads, pools and conditions that survive a refused thread start and the exceptions of signal
handlers.

The system limits the number of threads of a process: failing to start a thread is an error at run
time.

`with threading.Condition()` calls a Python function that takes the lock. If a signal handler raises
an exception in that function, the lock stays taken and every other thread that needs it blocks.
`threading.Event`, `concurrent.futures.Future` and `concurrent.futures.wait` have the same fault,
because they use conditions. The classes here are entered and left by built-in functions: Python
runs no handler between such a function and the block. `threading.Lock` and `threading.RLock` are
built in and need no replacement. Used by all packages; calls `metrics`.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures._base import FINISHED, PENDING
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Thread
from typing import Generic, ParamSpec, TypeAlias, TypeVar, cast

from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason

NO_THREAD = (
    "no thread can be started: raise the container's pids limit or `ulimit -u`"
)

P = ParamSpec("P")
T = TypeVar("T")

_log = guarded_logger("pagoda")
_lines = RateLimitedLog()
_ATTEMPTS = 10_000
# a new thread needs less than a millisecond for its first step
_START_SECONDS = 1.0
# how often it is seen whether a thread has ended
_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.05
_NO_MEMORY = (
    "a new thread found no memory for its first step: raise the container's memory limit or "
    "`ulimit -v`"
)
_REFUSED = "can't start new thread"  # Python's message for this error only


def require_real_threads() -> None:
    """Refuse a process whose threads, locks or queues were replaced by cooperative ones. StoreError
    with the remedy.

    A wait for I/O or for another process would stop all of its greenlets, and a lock would belong
    to none of them.
    """
    made = (threading.Lock(), threading.RLock(), queue.SimpleQueue[None]())
    foreign = [
        kind
        for kind in map(type, made)
        if kind.__module__ not in ("_thread", "_queue")
    ]
    if foreign:
        raise StoreError(
            "this process has cooperative threads "
            f"({foreign[0].__module__}.{foreign[0].__qualname__} instead of "
            "Python's own), and a cache needs real ones: patch without threads and queues "
            "(gevent: monkey.patch_all(thread=False, queue=False)), or use the cache in a "
            "process of its own"
        )


def begin(thread: Thread) -> bool:
    """Start `thread`; return False, with a rate-limited log line, if the system starts no more
    threads. Thread-safe.

    The caller continues without the thread and tries again, with a new Thread, when it needs one
    again. A thread that was started and finds no memory for its first steps ends without a word:
    `Thread.start` would wait for it for ever. Here it counts as not started as soon as it has
    ended, or after a second, and then never does its work.
    """
    started = _Started(thread)
    # Python's event uses a condition, see above
    thread._started = started  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError as trouble:
        # this message; the interpreter's end raises another one
        if _REFUSED in str(trouble):
            _lines.warn(_log, Reason.IO_ERROR, f"{thread.name}: {NO_THREAD}")
        return False
    finally:
        started.forget_first_step()
    if started.given_up:
        _lines.warn(_log, Reason.IO_ERROR, f"{thread.name}: {_NO_MEMORY}")
    return not started.given_up


def start_thread(
    target: Callable[..., object], name: str, *arguments: object
) -> Thread | None:
    """Start a daemon thread and return it; None if that is impossible (`begin` logs it)."""
    thread = Thread(target=target, args=arguments, name=name, daemon=True)
    return thread if begin(thread) else None


_RLock: type = type(threading.RLock())


class Condition(_RLock):  # type: ignore[misc]
    """A `threading.Condition` with its own reentrant lock. Thread-safe."""

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, without the lock, until notified; False after `timeout` seconds. Called with the
        lock.
        """
        waiter = threading.Lock()
        woken = False
        held: list[object] = []
        waiter.acquire()
        try:
            self._waiters.append(waiter)
            # released and recorded in one step
            held.extend(map(_RLock._release_save, (self,)))  # type: ignore[attr-defined]
            woken = waiter.acquire(
                timeout=-1 if timeout is None else max(0.0, timeout)
            )
        except BaseException:  # raised by a signal handler
            # the handler may also have run before the release
            if not self._is_owned():
                self._acquire_restore(held[0])
            if waiter not in self._waiters:
                self.notify()  # this wake-up was lost: pass it to another waiter
            raise
        else:
            self._acquire_restore(held[0])
        finally:
            # `contextlib.suppress` is not a built-in function
            try:  # noqa: SIM105
                self._waiters.remove(waiter)
            except ValueError:
                pass
        return woken

    def wait_for(self, true: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until `true()` is true, or for `timeout` seconds; return its last result. Called
        with the lock.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not (answer := true()):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return answer

    def notify(self, n: int = 1) -> None:
        """Wake `n` waiting threads. Called with the lock."""
        while n > 0 and self._waiters:
            try:
                self._waiters[0].release()
                n -= 1
            except RuntimeError:
                # an interrupted call woke this thread but did not reach the next line
                pass
            self._waiters.popleft()

    def notify_all(self) -> None:
        """Wake all waiting threads. Called with the lock."""
        self.notify(len(self._waiters))


class Event:
    """Replace `threading.Event`. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._set = False

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._set

    def set(self) -> None:
        """Set the event and wake all waiting threads."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Clear the event."""
        self._set = False

    def _at_fork_reinit(self) -> None:
        """Reset the lock in a forked child: Python calls this for the event of each thread."""
        self._changed = Condition()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; return False after `timeout` seconds."""
        if self._set:
            return True
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class _Started(Event):
    """Whether a thread has begun. `Thread.start` waits for that, here for a bounded time.

    The system's new thread keeps its first step, a function, until it ends, even if it cannot call
    it. So if nothing refers to that function any more, the thread has ended.
    """

    def __init__(self, thread: Thread) -> None:
        super().__init__()
        self._thread = weakref.ref(thread)
        self.given_up = False
        first_step = partial(Thread._bootstrap, thread)  # type: ignore[attr-defined]
        self._first_step = weakref.ref(first_step)
        # what `Thread.start` hands to the system
        thread._bootstrap = first_step  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has begun; without a timeout, give it up when it has ended, or
        after a second of looks: a process that was stopped meanwhile has not looked.
        """
        if timeout is not None:
            return super().wait(timeout)
        self.forget_first_step()
        looked_for = 0.0
        pause = _FIRST_LOOK_SECONDS
        while not super().wait(pause):
            looked_for += pause
            if self._first_step() is None or looked_for > _START_SECONDS:
                self._give_up()
                break
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
        return self._set

    def forget_first_step(self) -> None:
        """Leave the function to the system's thread alone."""
        if (thread := self._thread()) is not None:
            vars(thread).pop("_bootstrap", None)

    def _give_up(self) -> None:
        """Take its work from a thread that has not begun."""
        with self._changed:
            if self._set:
                return
            self.given_up = True
            if (thread := self._thread()) is not None:
                thread._target = None  # type: ignore[attr-defined]
                thread._args = ()  # type: ignore[attr-defined]


class Answer(Future[T]):
    """Replace `concurrent.futures.Future`. Thread-safe."""

    def __init__(self) -> None:
        # the same as Python's, but without its condition, at a third of the cost
        self._condition = Condition()
        self._state = PENDING
        self._result = self._exception = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Future[T]], object]] = []


def running_answers(count: int) -> list[Future[T]]:
    """Return futures that cannot be cancelled, because what they are about has begun."""
    answers: list[Future[T]] = [Answer() for _ in range(count)]
    for answer in answers:
        answer.set_running_or_notify_cancel()
    return answers


def wait(futures: Iterable[Future[T]], timeout: float | None = None) -> None:
    """Wait until all futures have ended, or for `timeout` seconds. Thread-safe.

    `concurrent.futures.wait` takes the conditions of all futures in a Python function: see above.
    """
    until = None if timeout is None else time.monotonic() + timeout
    for future in futures:
        with suppress(CancelledError, TimeoutError):
            future.exception(
                None if until is None else max(0.0, until - time.monotonic())
            )


def complete(step: Callable[[], object]) -> None:
    """Call `step` until it returns, however often a signal handler raises in it; then raise the
    last exception.

    For waits on work that uses memory of the caller. `step` must be repeatable. A step that always
    fails ends after 10,000 attempts. A handler may also raise before the first statement here, so
    callers repeat the call in an outer `finally`.
    """
    raised: BaseException | None = None
    for _ in range(_ATTEMPTS):
        try:
            if (trouble := _raised_by(step)) is None:
                break
            raised = trouble
        except BaseException as second:  # raised below  # noqa: BLE001
            raised = second
    try:
        if raised is not None:
            raise raised
    finally:
        raised = trouble = None  # their tracebacks refer to this frame


def _raised_by(step: Callable[[], object]) -> BaseException | None:
    try:
        step()
    except BaseException as trouble:  # for `complete`  # noqa: BLE001
        return trouble
    return None


# type: ignore[valid-type, unused-ignore]
def if_free(
    lock: threading.RLock, work: Callable[[], object], timeout: float = 0.0
) -> None:
    """Call `work` with the lock held; do nothing if another thread keeps the lock for `timeout`
    seconds.
    """
    try:
        if lock.acquire(timeout=timeout):
            work()
    finally:
        try:  # `contextlib.suppress` is not a built-in function  # noqa: SIM105
            lock.release()
        except RuntimeError:  # another thread holds it
            pass


class DeferredCall:
    """A call that a daemon thread makes a moment after a request, once for all requests so far.

    Callers of `request` take turns. The thread starts with the first request; if none can be
    started, the next request tries again. It is its process's: a forked child makes another one.
    """

    def __init__(
        self, call: Callable[[], object], name: str, pause_seconds: float
    ) -> None:
        """`call`, a method that never raises, begins `pause_seconds` after the first request that
        it serves.
        """
        # weak, since its object may refer to this one
        self._call = weakref.WeakMethod(call)
        self._name = name
        self._pause_seconds = pause_seconds
        self._requested = Event()
        self._ending = Event()
        self._thread: Thread | None = None

    def request(self) -> None:
        """Request that the call be made soon."""
        if not self._requested.is_set():
            self._requested.set()
        if self._thread is None and not self._ending.is_set():
            self._thread = start_thread(self._run, self._name)

    def close(self, timeout: float) -> bool:
        """Make the call a last time, on its thread, and end the thread; wait up to `timeout`
        seconds. Idempotent.

        Returns False if it has not ended.
        """
        self._ending.set()
        self._requested.set()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ends = False
        while not ends:
            self._requested.wait()
            self._ending.wait(self._pause_seconds)
            self._requested.clear()
            # read first: a request during the call leads to one more call
            ends = self._ending.is_set()
            if (call := self._call()) is not None:
                call()
            del call
        # for a thread that a signal handler's exception kept `request` from recording
        self._requested.set()


class _Work(Generic[T]):
    """One queued call. `future.cancel()` removes it permanently unless it has begun."""

    def __init__(self, call: Callable[[], T], future: Future[T]) -> None:
        self._parts = [(call, future)]

    def cancel(self) -> None:
        """Cancel the call after it was taken out of the queue."""
        _, future = self._parts.pop()
        if future.cancel():
            future.set_running_or_notify_cancel()  # otherwise `wait` waits for it

    def __call__(self, done: Callable[[], object]) -> None:
        """Do the call; then call `done`, and only then set the result."""
        # from here on, only this frame refers to them
        call, future = self._parts.pop()
        if not future.set_running_or_notify_cancel():
            done()
            return
        try:
            result = call()
        except BaseException as trouble:  # noqa: BLE001
            # the future carries it to the caller
            done()
            future.set_exception(trouble)
            del call, future  # the exception refers to this frame
        else:
            done()
            future.set_result(result)


class _Working:
    """The queue and the threads of a pool in one process."""

    def __init__(self, pool: Pool) -> None:
        """Begin with no thread and an empty queue."""
        self.lock = threading.RLock()
        self.calls: _Calls = queue.SimpleQueue()
        # one entry per waiting thread; if one is missing, only an extra thread is started
        self.idle: deque[None] = deque()
        self.threads: list[Thread] = []
        self.open: set[Future[object]] = set()
        self.closed = False
        # its threads hold this weak reference, not the pool
        self.gone = weakref.ref(pool, self.calls.put)


class Pool(Executor):
    """Run calls on a few daemon threads; results are futures. Thread-safe.

    Python's executor uses conditions. A signal handler's exception can end its `submit` before the
    new thread is
    recorded: then nothing ends that thread, and the interpreter waits for it at exit. If no thread
    can be started, its `submit` raises, but keeps the call and runs it later, when the caller may
    have freed the memory that the call writes into. Here a refused call never runs, and at exit the
    submitted calls have some seconds to end.
    """

    def __init__(self, most: int, name: str, exit_seconds: float = 10.0) -> None:
        """Start no thread yet. Each `submit` starts one if no thread is idle and fewer than `most`
        exist.

        `exit_seconds`: how long the end of the interpreter waits for submitted calls.
        """
        self._most = most
        self._name = name
        self.exit_seconds = exit_seconds
        _pools.add(self)
        # registered again, so that it runs before older hooks, which may belong to libraries that
        # calls use
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)

    @per_process
    def _own(self) -> _Working:
        """What works in this process: a forked child has no thread and an empty queue."""
        return _Working(self)

    @property
    def under_way(self) -> int:
        """Return the number of calls that have not ended, including queued ones."""
        return len(self._own.open)

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run `fn` on one of the threads. RuntimeError with the remedy if no thread starts, or
        after shutdown.
        """
        return self._put(partial(fn, *args, **kwargs), False)

    def later(
        self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run `fn` without a result. If no thread can be started, it runs when a later call gets
        one. Never raises.
        """
        with suppress(RuntimeError):
            self._put(partial(fn, *args, **kwargs), True)

    def _put(self, call: Callable[[], T], waits: bool) -> Future[T]:
        future: Future[T] = Answer()
        own = self._own
        future.add_done_callback(own.open.discard)
        future.add_done_callback(_open.discard)
        try:
            with own.lock:
                if own.closed:
                    raise RuntimeError("cannot take a call after shutdown")
                if not self._has_thread(own) and not waits:
                    raise RuntimeError(NO_THREAD)
                own.open.add(cast("Future[object]", future))
                if not waits:  # otherwise nobody waits for it
                    _open.add(cast("Future[object]", future))
                own.calls.put(cast("_Work[object]", _Work(call, future)))
        except BaseException:
            # also raised by a signal handler: the caller does not get the future
            try:
                _withdraw(future)
            finally:  # in case of a second signal
                _withdraw(future)
            raise
        return future

    def _has_thread(self, own: _Working) -> bool:
        """Return whether a thread will take one more call; start one if none is idle. Called with
        the lock.
        """
        if own.idle:
            own.idle.pop()
            # also true for a thread that an interrupted call started without recording it
            return True
        if len(own.threads) < self._most:
            arguments = own.gone, own.lock, own.calls, own.idle
            thread = start_thread(
                _take_calls, f"{self._name}_{len(own.threads)}", *arguments
            )
            if thread is not None:
                own.threads.append(thread)
        return bool(own.threads)

    def join(self, timeout: float) -> None:
        """Wait until the submitted calls have ended, at most `timeout` seconds."""
        wait(list(self._own.open), timeout)

    def shutdown(
        self, wait: bool = True, *, cancel_futures: bool = False
    ) -> None:
        """End the threads after the last call; with `cancel_futures`, cancel the calls that have
        not begun.
        """
        own = self._own
        with own.lock:
            own.closed = True
        # without the lock, because callbacks of the futures take other locks
        if cancel_futures:
            with suppress(queue.Empty):
                while True:
                    if isinstance(work := own.calls.get_nowait(), _Work):
                        work.cancel()
        own.calls.put(None)
        if wait:
            for thread in list(own.threads):
                thread.join()


_Calls: TypeAlias = "queue.SimpleQueue[_Work[object] | weakref.ref[Pool] | None]"


def _take_calls(
    _gone: object,
    lock: AbstractContextManager[object],
    calls: _Calls,
    idle: deque[None],
) -> None:
    """Run calls until the end (None, or `_gone` after the pool was collected), and pass the end on
    to other threads.
    """
    following: deque[object] = deque()

    def look_on() -> None:
        """Take the next call or become idle, before the result is set: so its receiver finds a free
        thread.
        """
        with lock:
            try:
                following.append(calls.get_nowait())
            except queue.Empty:
                idle.append(None)

    look_on()
    while isinstance(
        call := following.pop() if following else calls.get(), _Work
    ):
        call(look_on)
        del call  # a waiting thread must not keep the call's objects alive
    calls.put(None)


def _withdraw(future: Future[T]) -> None:
    if not future.cancel():
        # the call has begun, and uses memory of the caller
        complete(partial(wait, [future]))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
# the calls of all pools that have not ended, and for which somebody may wait
_open: set[Future[object]] = set()


def _at_exit() -> None:
    """Wait, for a bounded time, for submitted calls: no thread should be inside a library that is
    being unloaded.
    """
    begun = time.monotonic()
    for pool in sorted(_pools, key=lambda each: each.exit_seconds):
        if pool._own.threads:
            pool.join(begun + pool.exit_seconds - time.monotonic())


def _lose_all() -> None:
    while _open:
        _lose(_open.pop())


def _lose(future: Future[object]) -> None:
    """End a call whose thread does not exist in a forked child: a handler may have forked while
    this one waits.

    Its callbacks are not called: they belong to the parent.
    """
    changed = cast("Condition", future._condition)
    if not changed._is_owned():
        changed._at_fork_reinit()  # the lost thread may have held its lock
    if not future.done():
        future._exception = RuntimeError(
            "the thread of this call does not exist in a forked child"
        )
        future._state = FINISHED
        changed.notify_all()


os.register_at_fork(after_in_child=_lose_all)
