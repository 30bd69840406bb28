"""Files of a store in use are removed or replaced: its process notices it, leaves and says so;
nothing wrong is served.

Programs do that: those that remove old files from /tmp and /dev/shm, and restores of backups.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, admin, guard_watch, rebuild
from pagoda.ledger.stores_under_root import in_use, stores_in
from testbed.patience import Patience
from tests.children import child
from tests.ledger.support import Other, keys, opened, put, spec

GUARDS = ["state", "locks", "data.mdb", "slab"]


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    """As a restored backup: the same bytes in another file."""
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def wait_until_left(ledger: Ledger) -> None:
    patience = Patience(60)
    while not ledger.session.lost:
        assert not patience.ended
        time.sleep(0.01)


def wait_until_logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Return the one line about it. The thread that looks writes it just after the process has
    left.
    """
    patience = Patience(60)
    while True:
        logged = [
            one
            for one in caplog.records
            if "was removed or replaced while it was in use" in one.message
        ]
        if logged:
            assert len(logged) == 1
            return logged[0]
        assert not patience.ended
        time.sleep(0.01)


def found(ledger: Ledger, *numbers: int) -> int:
    return sum(
        len(ledger.match_prefix([key], start=None).slots)
        for key in keys(*numbers)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("name", [*GUARDS, "columns"])
@pytest.mark.parametrize("loss", [removed, replaced])
def test_a_process_leaves_a_store_whose_files_are_not_those_it_opened(
    shm_root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    name: str,
    loss: Callable[[Path], None],
) -> None:
    ledger = opened(shm_root if kind == "memory" else tmp_path, kind=kind)
    put(ledger, keys(1, 2))
    if not (ledger.directory / name).exists():
        pytest.skip("this kind of store has no such file")
    loss(ledger.directory / name)
    wait_until_left(ledger)
    match = ledger.match_prefix(keys(1))
    assert not len(match.slots)
    assert match.reason is Reason.IO_ERROR
    assert wait_until_logged(caplog).levelno == logging.WARNING
    ledger.close()
    assert wait_until_logged(caplog)  # still one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("name", GUARDS)
def test_the_next_process_waits_until_all_have_left(
    shm_root: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """It opens the store a second later, and what was stored is found again, or gone; the two do
    not meet.
    """
    root = shm_root if kind == "memory" else tmp_path

    def work() -> None:
        put(opened(root, kind=kind), keys(1, 2))

    with Other(work):
        [directory] = stores_in(root)
        (directory / name).unlink()
        ledger = opened(root, kind=kind)  # the other one lives on
        # a tier would read the headers of the slab
        if left := rebuild.unscanned(ledger):
            rebuild.absorb(ledger, left.start, [None] * len(left))
        put(ledger, keys(3))
        assert found(ledger, 3) == 1
        assert found(ledger, 1, 2) == (2 if name == "locks" else 0)
        admin.check(ledger)
        assert (directory / name).exists() or name in ("locks", "slab")
        ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_who_comes_after_state_was_replaced_waits_until_the_others_have_left(
    shm_root: Path, tmp_path: Path, kind: str
) -> None:
    """Its lock would be on another file than theirs."""
    root = shm_root if kind == "memory" else tmp_path

    def work() -> None:
        put(opened(root, kind=kind), keys(1, 2))

    with Other(work):
        [directory] = stores_in(root)
        replaced(directory / "state")
        ledger = opened(root, kind=kind)
        assert ledger.session.store.sole
        assert found(ledger, 1, 2) == 2
        ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_no_two_writers_without_a_common_lock(
    shm_root: Path, tmp_path: Path, kind: str
) -> None:
    """The file `locks` is gone: who comes now locks another one, but `state` is the same file."""
    root = shm_root if kind == "memory" else tmp_path

    def work() -> None:
        ledger = opened(root, kind=kind)
        put(ledger, keys(1))
        (ledger.directory / "locks").unlink()
        (root / "removed").touch()
        for number in range(100, 400):  # it may leave in the middle of this
            with contextlib.suppress(StoreError, AssertionError):
                put(ledger, keys(number))
        time.sleep(600)

    pid = child(work)
    try:
        patience = Patience(60)
        while not (root / "removed").exists() and not patience.ended:
            time.sleep(0.001)
        ledger = opened(root, kind=kind)
        assert not ledger.session.store.sole, "the other one has it open too"
        for number in range(500, 800):
            put(ledger, keys(number))
        admin.check(ledger)
        ledger.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize(
    "name", ["counters", "lent", "requests", "waiting", "limit"]
)
def test_files_that_guard_nothing_may_vanish(
    shm_root: Path, tmp_path: Path, kind: str, name: str
) -> None:
    ledger = opened(shm_root if kind == "memory" else tmp_path, kind=kind)
    put(ledger, keys(1, 2))
    ledger.close()
    (ledger.directory / name).unlink(missing_ok=True)
    again = opened(shm_root if kind == "memory" else tmp_path, kind=kind)
    assert again.store_id == ledger.store_id
    assert found(again, 1, 2) == 2
    again.close()


def test_who_comes_while_others_use_a_store_makes_its_counters_again(
    shm_root: Path,
) -> None:
    def work() -> None:
        put(opened(shm_root), keys(1, 2))

    with Other(work):
        [directory] = stores_in(shm_root)
        (directory / "counters").unlink()
        ledger = opened(shm_root)
        assert not ledger.session.store.sole
        assert found(ledger, 1, 2) == 2
        ledger.close()


@pytest.mark.parametrize("name", ["state", "locks"])
def test_a_store_is_in_use_if_one_of_its_two_locks_is_held(
    tmp_path: Path, name: str
) -> None:
    ledger = opened(tmp_path, kind="file")
    replaced(ledger.directory / name)
    assert in_use(ledger.directory)
    ledger.close()
    assert not in_use(ledger.directory)


@pytest.mark.parametrize("name", ["state", "locks"])
def test_who_asks_whether_a_store_is_in_use_makes_no_file(
    tmp_path: Path, name: str
) -> None:
    """An empty `state` or `locks` would be taken for a part of the store, which is gone."""
    ledger = opened(tmp_path, kind="file")
    ledger.close()
    (ledger.directory / name).unlink()
    before = sorted(os.listdir(ledger.directory))
    assert not in_use(ledger.directory)
    assert sorted(os.listdir(ledger.directory)) == before


def is_left_alone(directory: Path) -> bool:
    """Whether somebody has a lock of `flock` on a directory, so that systemd-tmpfiles leaves it
    alone.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_an_open_store_and_its_root_are_locked_for_programs_that_remove_old_files(
    tmp_path: Path,
) -> None:
    ledger = opened(tmp_path, kind="file")
    both = (ledger.directory, tmp_path)
    assert [is_left_alone(one) for one in both] == [True, True]
    ledger.close()
    assert [is_left_alone(one) for one in both] == [False, False]


def test_a_root_is_locked_as_long_as_one_store_is_open(tmp_path: Path) -> None:
    """The root has the record of epochs, which vouches for the chunks of every store."""
    one = Ledger.open(spec(tmp_path, name="one", kind="file"))
    two = Ledger.open(spec(tmp_path, name="two", kind="file"))
    one.close()
    assert is_left_alone(tmp_path)
    assert not is_left_alone(one.directory)
    two.close()
    assert not is_left_alone(tmp_path)


def test_a_forked_process_that_uses_a_store_keeps_cleaners_away_alone(
    tmp_path: Path,
) -> None:
    ledger = opened(tmp_path, kind="file")

    def work() -> None:
        put(ledger, keys(1))

    with Other(work):
        ledger.close()
        assert is_left_alone(tmp_path)
        assert is_left_alone(ledger.directory)
    assert not is_left_alone(tmp_path)


def test_a_copy_of_a_descriptor_keeps_no_closed_store_locked_for_cleaners(
    tmp_path: Path,
) -> None:
    """A child made in C has such copies."""
    gc.collect()  # what other tests left: else its numbers may be this store's
    before = set(os.listdir("/proc/self/fd"))
    ledger = opened(tmp_path, kind="file")
    copies = []
    for name in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            copies.append(os.dup(int(name)))
    ledger.close()
    assert [is_left_alone(one) for one in (ledger.directory, tmp_path)] == [
        False,
        False,
    ]
    for copy in copies:
        os.close(copy)


def test_the_thread_that_looks_ends_with_the_last_store(tmp_path: Path) -> None:
    ledger = opened(tmp_path, kind="file")
    thread = guard_watch._watching.watcher.thread
    assert thread.is_alive()
    ledger.close()
    patience = Patience(60)
    while thread.is_alive() and not guard_watch._watched and not patience.ended:
        time.sleep(0.05)
    assert not thread.is_alive() or guard_watch._watched
