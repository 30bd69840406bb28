"""Threads that start safely: starts that fail, and pools whose refused work never runs."""

from __future__ import annotations

import _thread
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType

import pytest

import pagoda
from pagoda.base import signal_safe_threads
from pagoda.base.errors import StoreError
from pagoda.base.signal_safe_threads import (
    DeferredCall,
    Pool,
    begin,
    require_real_threads,
    start_thread,
)
from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from testbed.patience import Patience, wait_until
from tests.children import child
from tests.children import wait as wait_for_child
from tests.interrupts import Interrupted
from tests.thread_limits import interrupted_once, no_threads

SECONDS = 60.0
SOURCE = Path(pagoda.__file__).parents[1]


def test_a_start_that_fails_is_reported_and_logged_with_the_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        signal_safe_threads, "_lines", signal_safe_threads.RateLimitedLog()
    )
    with no_threads(), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not begin(
                threading.Thread(target=print, name="pagoda-example")
            )
    (line,) = caplog.records
    assert "pagoda-example" in line.getMessage()
    assert "ulimit -u" in line.getMessage()
    done = threading.Event()
    assert begin(threading.Thread(target=done.set))
    assert done.wait(SECONDS)


def test_work_that_was_refused_never_runs() -> None:
    ran: list[int] = []
    with Pool(2, "pool") as pool:
        with no_threads(), pytest.raises(RuntimeError, match="ulimit -u"):
            pool.submit(ran.append, 1)
        assert pool.submit(ran.append, 2).result(SECONDS) is None
    assert ran == [2]


def test_a_deferred_call_is_not_made_again_without_a_request() -> None:
    class Counter:
        number = 0

        def add(self) -> None:
            self.number += 1

    counter = Counter()
    call = DeferredCall(counter.add, "deferred", 0.001)
    for number in (1, 2):
        call.request()
        patience = Patience(SECONDS)
        while counter.number < number and not patience.ended:
            time.sleep(0.001)
        time.sleep(0.1)  # a hundred pauses
        assert counter.number == number
    call.close(SECONDS)


def test_a_deferred_call_is_done_once_for_all_requests_and_when_it_is_closed() -> (
    None
):
    class Counter:
        number = 0

        def add(self) -> None:
            self.number += 1

    done = threading.Event()
    counter = Counter()
    call = DeferredCall(done.set, "deferred", 0.0)
    with no_threads():
        call.request()
    assert call._thread is None
    call.request()
    assert done.wait(SECONDS)
    call.close(SECONDS)
    call = DeferredCall(counter.add, "deferred", SECONDS)
    for _ in range(5):
        call.request()
    assert not counter.number
    call.close(SECONDS)
    assert counter.number == 1
    assert call._thread is not None
    assert not call._thread.is_alive()
    call.request()  # too late
    call.close(SECONDS)
    assert counter.number == 1


def test_a_deferred_call_that_runs_at_the_close_is_done_once_more() -> None:
    """What came during the call is not left, and the thread ends."""

    class Writer:
        noted = 1
        written = 0
        inside = threading.Event()
        may_go_on = threading.Event()

        def write(self) -> None:
            noted = self.noted
            self.inside.set()
            assert self.may_go_on.wait(SECONDS)
            self.written = noted

    writer = Writer()
    call = DeferredCall(writer.write, "deferred", 0.0)
    call.request()
    assert writer.inside.wait(SECONDS)
    writer.noted = 2
    call.request()
    assert not call.close(0.0)
    writer.may_go_on.set()
    assert call.close(SECONDS)
    assert writer.written == 2


def test_a_thread_that_an_exception_kept_from_being_recorded_ends_with_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(20):
        monkeypatch.setattr(
            signal_safe_threads, "start_thread", interrupted_once(start_thread)
        )
        call = DeferredCall(threading.Event().set, f"deferred-{number}", 0.0)
        with pytest.raises(Interrupted):
            call.request()
        call.request()
        assert call.close(SECONDS)
        wait_until(
            lambda name=f"deferred-{number}": (
                name not in {one.name for one in threading.enumerate()}
            )
        )


def test_a_pool_goes_on_with_the_threads_that_it_has() -> None:
    with Pool(4, "pool") as pool:
        held = threading.Event()
        leave = threading.Event()
        first = pool.submit(lambda: (held.set(), leave.wait(SECONDS)))
        assert held.wait(SECONDS)
        with no_threads():
            second = pool.submit(lambda: 2)
        assert not second.done()
        leave.set()
        assert second.result(SECONDS) == 2
        assert first.result(SECONDS)
        assert pool.submit(lambda: 3).result(SECONDS) == 3


def test_what_is_to_be_done_later_is_done_when_there_is_a_thread_again() -> None:
    done: list[int] = []
    with Pool(1, "pool") as pool:
        with no_threads():
            pool.later(done.append, 1)
        pool.submit(done.append, 2).result(SECONDS)
    pool.later(done.append, 3)  # after the end
    assert done == [1, 2]


def test_a_pool_reports_what_its_work_raised_and_keeps_nothing_alive_by_it() -> (
    None
):
    class Memory:
        pass

    def fail(_: Memory) -> None:
        raise ValueError("no")

    memory = Memory()
    alive = weakref.ref(memory)
    with Pool(1, "pool") as pool:
        future = pool.submit(fail, memory)
        with pytest.raises(ValueError, match="no"):
            future.result(SECONDS)
        del memory, future
        # the thread has let go of its last work
        pool.submit(print).result(SECONDS)
        assert alive() is None


def in_a_process(code: str) -> str:
    """What a program prints that has the pool; it ends well, and soon."""
    program = (
        "import os, threading, time\nfrom pagoda.base.signal_safe_threads import Pool\n"
        + code
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS / 2,
    )
    assert not run.stderr, run.stderr
    return run.stdout


def test_a_submit_that_an_exception_breaks_off_runs_nothing_and_keeps_no_process() -> (
    None
):
    """The thread exists but is not registered: an exception of a signal handler was raised before
    that.
    """
    said = in_a_process("""
start = threading.Thread.start
def interrupted(thread):
    start(thread)
    raise KeyboardInterrupt
pool = Pool(2, "pool")
threading.Thread.start = interrupted
try:
    pool.submit(print, "broken off")
except KeyboardInterrupt:
    print("raised")
""")
    assert said == "raised\n"


def test_signals_that_come_again_do_not_end_a_submit_before_the_work_that_has_begun() -> (
    None
):
    """The caller does not get its future, and may free the memory that the work uses."""
    said = in_a_process("""
import signal
class Lock:  # as if a signal came when the call had just been queued
    def __enter__(self):
        pass
    def __exit__(self, *_):
        begun.wait(60)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.02)
        time.sleep(1)
def handler(*_):
    raise KeyboardInterrupt
def work():
    begun.set()
    time.sleep(0.5)
    print("ended", flush=True)
begun = threading.Event()
pool = Pool(1, "pool")
pool.submit(len, "abc").result()
signal.signal(signal.SIGALRM, handler)
pool._own.lock = Lock()
try:
    try:
        pool.submit(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
except KeyboardInterrupt:
    print("raised", flush=True)
""")
    assert said == "ended\nraised\n"


def test_at_exit_what_was_submitted_is_done() -> None:
    assert (
        in_a_process("""
pool = Pool(1, "pool")
pool.submit(lambda: (time.sleep(0.2), print("first")))
pool.later(print, "second")
""")
        == "first\nsecond\n"
    )


def test_at_exit_what_no_thread_will_do_is_not_waited_for() -> None:
    said = in_a_process("""
import atexit, logging
logging.disable()
atexit.register(lambda: print(time.monotonic() - ended < 5))
pool = Pool(1, "pool")
def refused(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refused
pool.later(print, "never")
ended = time.monotonic()
""")
    assert said == "True\n"


def test_the_child_of_a_fork_has_threads_of_its_own() -> None:
    with Pool(2, "pool") as pool:
        held = threading.Event()
        leave = threading.Event()
        pool.submit(lambda: (held.set(), leave.wait(SECONDS)))
        assert held.wait(SECONDS)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # instead of a hang
            os._exit(
                0
                if pool.under_way == 0
                and pool.submit(lambda: 3).result(SECONDS) == 3
                else 1
            )
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        under_way = pool.under_way
        leave.set()
        assert ended == 0
        assert under_way == 1


def test_what_waits_at_the_end_of_a_pool_is_cancelled() -> None:
    pool = Pool(1, "pool")
    held = threading.Event()
    leave = threading.Event()
    pool.submit(lambda: (held.set(), leave.wait(SECONDS)))
    assert held.wait(SECONDS)
    waiting: Future[None] = pool.submit(print)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    leave.set()
    pool.shutdown(wait=True)
    wait([waiting], SECONDS)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)


def test_no_other_thread_is_started_than_by_begin_and_pool() -> None:
    """Else one that cannot be started would be an exception out of an engine's call, or work that
    runs too late.
    """
    allowed = {
        "pagoda/base/signal_safe_threads.py",
        "pagoda/testing/tier_conformance.py",
        "pagoda/testing/policy_conformance.py",
        "pagoda_tools/cli/demo/demo_child.py",
    }
    for path in SOURCE.rglob("*.py"):
        if str(path.relative_to(SOURCE)) not in allowed:
            text = path.read_text()
            assert "ThreadPoolExecutor" not in text, (
                f"{path}: take pagoda.base.signal_safe_threads.Pool"
            )
            assert not re.search(
                r"\bthread\.start\(\)|Thread\([^)]*\)\.start\(\)", text
            ), f"{path}: take begin"


def test_a_thread_that_ends_before_it_has_begun_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        signal_safe_threads, "_lines", signal_safe_threads.RateLimitedLog()
    )
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def no_memory() -> None:
        raise MemoryError

    thread = threading.Thread(target=print, name="pagoda-example")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap_inner", lambda _: no_memory())
        assert not begin(thread)
    assert not thread.is_alive()
    assert "pagoda-example: a new thread found no memory" in caplog.text
    done = threading.Event()
    assert begin(threading.Thread(target=done.set))
    assert done.wait(SECONDS)


@pytest.mark.slow
def test_a_thread_that_begins_too_late_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller has gone on without it."""
    late = list[Callable[[], None]]()
    monkeypatch.setattr(
        threading,
        "_start_new_thread",  # up to Python 3.12
        lambda function, *_: late.append(function),
        raising=False,
    )
    monkeypatch.setattr(
        threading,
        "_start_joinable_thread",
        lambda function, **_: late.append(function),
        raising=False,
    )
    did = list[int]()
    thread = threading.Thread(target=lambda: did.append(1), name="pagoda-example")
    assert not begin(thread)
    monkeypatch.undo()
    ended = threading.Event()

    def begin_late() -> None:
        late[0]()
        ended.set()

    _thread.start_new_thread(begin_late, ())
    assert ended.wait(SECONDS)
    assert did == []


_HARDLY_ANY_MEMORY = """
import faulthandler, resource, sys, threading
from pagoda.base.signal_safe_threads import begin
faulthandler.dump_traceback_later(60, exit=True)
sys.unraisablehook = lambda _: None
threading.stack_size(256 << 10)
done = []
def pages():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
started = 0
for kib in range(256, 384, 4):
    resource.setrlimit(resource.RLIMIT_AS, (pages() + (kib << 10), -1))
    try:
        thread = threading.Thread(target=done.append, args=(1,))
        started += begin(thread)
    except MemoryError:
        pass
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert begin(threading.Thread(target=done.append, args=(1,)))
print("all came back", flush=True)
"""


def test_with_hardly_any_memory_each_start_comes_back() -> None:
    """For some limits the system starts the thread, and the thread has no memory for its first
    step.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _HARDLY_ANY_MEMORY],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "all came back" in ended.stdout, ended.stderr


class Cooperative:
    """A lock or a queue of a library that replaces Python's."""


@pytest.mark.parametrize(
    ("module", "name"),
    [(threading, "Lock"), (threading, "RLock"), (queue, "SimpleQueue")],
)
def test_a_process_with_cooperative_threads_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """As gevent makes one. Before, a cache ended in an AttributeError, or its futures never
    came.
    """
    require_real_threads()
    replaced = type(
        "Taken",
        (Cooperative,),
        {"__class_getitem__": classmethod(lambda cls, _: cls)},
    )
    monkeypatch.setattr(module, name, replaced)
    with pytest.raises(
        StoreError,
        match=r"Taken instead of.*patch_all\(thread=False, queue=False\)",
    ):
        Cache(
            namespace=Namespace("m"),
            layout=KVLayout.opaque(4, 4096, "any"),
            host_size="1MiB",
        )


@pytest.mark.slow
def test_a_thread_of_a_process_that_was_stopped_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP, or a machine that sleeps: the time passes, and neither of the two threads runs."""
    goes_on = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def stops(thread: threading.Thread) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        # The thread that waits is the first to look. One long sleep would end with the stop if it
        # had begun before the signal stopped this thread.
        for _ in range(20):
            time.sleep(0.01)
        goes_on(thread)

    def work() -> None:
        done = threading.Event()
        assert begin(threading.Thread(target=done.set))
        assert done.wait(60)

    monkeypatch.setattr(threading.Thread, "_bootstrap", stops)
    # on a busy machine the new thread needs longer than its 0.2 s
    monkeypatch.setattr(signal_safe_threads, "_START_SECONDS", 3.0)
    pid = child(work)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    time.sleep(1.2 * signal_safe_threads._START_SECONDS)
    os.kill(pid, signal.SIGCONT)
    assert wait_for_child(pid) == 0
