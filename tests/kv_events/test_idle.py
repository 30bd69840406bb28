"""A publisher at rest: it sleeps until something changes, and nothing wakes it but a change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.kv_events import store_watch, stored_events
from pagoda.kv_events.store_watch import StoreWatch
from pagoda.kv_events.stored_events import StoredEvents
from testbed.patience import wait_until
from tests.cache.kit import (
    SPAWN,
    cache_at,
    prompt,
    stored,
)
from tests.children import in_child
from tests.kv_events.router import Router

ANY = "tcp://127.0.0.1:*"
NEVER_SECONDS = 3600.0
# ten rounds in a second without rest
_LOOK_SECONDS = 2.5
_MOST_ROUNDS = 5


class Rounds:
    """Counts the rounds of the thread that reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = StoredEvents._round

        def counted(events: StoredEvents) -> bool:
            self.count += 1
            return run(events)

        monkeypatch.setattr(StoredEvents, "_round", counted)

    def at_rest(self) -> bool:
        """Whether there was no round for a while."""
        before = self.count
        time.sleep(0.5)
        return self.count == before


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(monkeypatch)


@pytest.fixture
def only_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time wake a publisher at rest."""
    monkeypatch.setattr(
        stored_events, "_IDLE_SECONDS", NEVER_SECONDS, raising=False
    )


@pytest.fixture
def cache(shm_root: Path, tmp_path: Path) -> Iterator[Cache]:
    with cache_at(shm_root, tmp_path) as cache:
        yield cache


@pytest.mark.slow
def test_there_are_few_rounds_while_nothing_changes(
    cache: Cache, rounds: Rounds
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_until(lambda: router.believes(tokens, "STORAGE") == 3)
    wait_until(rounds.at_rest)
    before = rounds.count
    time.sleep(_LOOK_SECONDS)
    assert rounds.count - before <= _MOST_ROUNDS
    router.close()


def clear_all(host: Path, disk: Path, told: Connection) -> None:
    """Clear when told, then end when told: an opening and an end change more than the tables."""
    with cache_at(host, disk) as cache:
        told.send("open")
        told.recv()
        cache.clear()
        told.recv()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
def test_a_change_by_another_process_is_reported(
    cache: Cache, rounds: Rounds, shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_until(lambda: router.believes(tokens, "STORAGE") == 3)
    wait_until(rounds.at_rest)
    ours, theirs = SPAWN.Pipe()
    other = SPAWN.Process(target=clear_all, args=(shm_root, tmp_path, theirs))
    other.start()
    assert ours.recv() == "open"
    wait_until(rounds.at_rest)
    ours.send("clear")
    for medium in ("CPU", "STORAGE"):
        wait_until(lambda medium=medium: not router.believes(tokens, medium))  # type: ignore[misc]
    ours.send("end")
    other.join()
    assert other.exitcode == 0
    router.close()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
def test_what_this_process_stores_after_a_rest_is_reported_each_time(
    cache: Cache, rounds: Rounds
) -> None:
    router = Router(cache.publish_events(ANY))
    for seed in range(3):
        wait_until(rounds.at_rest)
        tokens = prompt(3, seed)
        stored(cache, tokens)
        for medium in ("CPU", "STORAGE"):
            wait_until(
                lambda medium=medium, tokens=tokens: (  # type: ignore[misc]
                    router.believes(tokens, medium) == 3
                )
            )
    router.close()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
def test_a_router_that_comes_during_a_rest_hears_everything(
    cache: Cache, rounds: Rounds
) -> None:
    tokens = prompt(3)
    endpoint = cache.publish_events(ANY)
    stored(cache, tokens)
    wait_until(rounds.at_rest)
    router = Router(endpoint)
    wait_until(lambda: router.believes(tokens, "STORAGE") == 3)
    wait_until(rounds.at_rest)
    late = Router(endpoint)
    wait_until(lambda: late.believes(tokens, "CPU") == 3)
    router.close()
    late.close()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
@pytest.mark.parametrize("version", ["", "a version"])
def test_weights_that_change_during_a_rest_take_all_back(
    cache: Cache, rounds: Rounds, version: str
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_until(lambda: router.believes(tokens, "CPU") == 3)
    wait_until(rounds.at_rest)
    cache.weights_changed(version)
    wait_until(lambda: not router.believes(tokens, "CPU"))
    router.close()


def change_weights(host: Path, disk: Path, told: Connection) -> None:
    """As `clear_all`."""
    with cache_at(host, disk) as cache:
        told.send("open")
        told.recv()
        cache.weights_changed()
        told.recv()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
def test_weights_that_another_process_changes_during_a_rest_take_all_back(
    cache: Cache, rounds: Rounds, shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_until(lambda: router.believes(tokens, "CPU") == 3)
    wait_until(rounds.at_rest)
    ours, theirs = SPAWN.Pipe()
    other = SPAWN.Process(
        target=change_weights, args=(shm_root, tmp_path, theirs)
    )
    other.start()
    assert ours.recv() == "open"
    wait_until(rounds.at_rest)
    ours.send("change")
    wait_until(lambda: not router.believes(tokens, "CPU"))
    ours.send("end")
    other.join()
    router.close()


@pytest.mark.slow
@pytest.mark.usefixtures("only_changes")
def test_a_close_ends_the_rest(cache: Cache, rounds: Rounds) -> None:
    cache.publish_events(ANY)
    wait_until(rounds.at_rest)
    events = cache._resources.events
    assert events is not None
    stored_in = events._stored
    assert stored_in is not None
    assert stored_in.close()


@pytest.mark.slow
def test_without_watches_it_looks_all_the_time(
    cache: Cache, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no more watches")

    monkeypatch.setattr(StoreWatch, "__init__", refuse)
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_until(lambda: router.believes(tokens, "CPU") == 3)
    before = rounds.count
    wait_until(lambda: rounds.count > before + 10)
    cache.clear()
    wait_until(lambda: not router.believes(tokens, "CPU"))
    router.close()


# ---- the watch


def write(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"changed", 0)


@pytest.fixture
def file(shm_root: Path) -> Path:
    path = shm_root / "tables"
    path.write_bytes(bytes(100))
    return path


def test_a_watch_sees_what_any_process_writes(file: Path) -> None:
    watch = StoreWatch([file], [])
    assert not watch.wait(0.0)
    in_child(lambda: write(file))
    assert watch.wait(0.0)
    assert not watch.forget()
    assert not watch.wait(0.0)
    watch.wake()
    assert watch.wait(NEVER_SECONDS)
    watch.forget()
    assert not watch.wait(0.0)
    watch.close()
    watch.close()
    watch.wake()


def test_a_watch_sees_files_that_are_made_in_a_directory(file: Path) -> None:
    watch = StoreWatch([], [file.parent])
    (file.parent / "epochs").write_bytes(b"1")
    assert watch.wait(0.0)
    watch.forget()
    write(file.parent / "epochs")
    assert watch.wait(0.0)
    watch.close()


@pytest.mark.parametrize("change", ["removed", "replaced", "moved"])
def test_a_watch_says_that_a_file_is_gone(file: Path, change: str) -> None:
    watch = StoreWatch([file], [])
    if change == "removed":
        file.unlink()
    elif change == "replaced":
        other = file.with_name("other")
        other.write_bytes(b"")
        other.rename(file)
    else:
        file.rename(file.with_name("elsewhere"))
    assert watch.wait(0.0)
    assert watch.forget()
    watch.close()


def test_a_watch_of_a_file_that_is_not_there_is_an_error_and_leaves_nothing_open(
    file: Path,
) -> None:
    def leaves_none_open() -> None:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(FileNotFoundError):
            StoreWatch([file, file.with_name("absent")], [])
        assert os.listdir("/proc/self/fd") == before

    # in a process without other threads: what other tests left behind is closed at any time
    in_child(leaves_none_open)


def test_many_changes_are_forgotten_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "_READ_BYTES", 64)
    other = file.with_name("other")
    other.write_bytes(bytes(8))
    watch = StoreWatch([file, other], [])
    for _ in range(50):
        write(file)
        write(other)
    assert not watch.forget()
    assert not watch.wait(0.0)
    watch.close()
