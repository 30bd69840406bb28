"""A process that gets no threads for a while: nothing hangs, nothing is lost, and all works again
afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, writeback
from pagoda.ledger import admin
from pagoda.transfer.cpu_copy import in_threads
from testbed.patience import wait_until
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    blank,
    cache_at,
    config_of,
    hit_of,
    kv_of,
    prompt,
    put,
    stored,
)
from tests.interrupts import Interrupted
from tests.thread_limits import interrupted_once, no_threads

SECONDS = 60.0


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cache_that_cannot_have_its_threads_says_what_to_do_and_opens_later(
    shm_root: Path, tmp_path: Path, after: int
) -> None:
    before = threading.active_count()
    with no_threads(after), pytest.raises(StoreError, match="pids limit"):
        Cache(config_of(shm_root, tmp_path), namespace=NAMESPACE, layout=LAYOUT)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4))
        assert hit_of(cache, prompt(4), tiers=["disk"]).num_tokens == 64
    # the thread that closes dropped caches may stay; those of the cache end soon
    wait_until(lambda: threading.active_count() <= before + 1)


def test_a_cache_of_host_memory_alone_needs_none(shm_root: Path) -> None:
    with no_threads(), cache_at(shm_root, None) as cache:
        stored(cache, prompt(4))
        assert hit_of(cache, prompt(4)).num_tokens == 64


def test_what_was_stored_while_no_thread_could_be_had_is_written_afterwards(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        with no_threads():
            kv = kv_of(prompt(4, 1))
            assert cache.store(prompt(4, 1), kv.transfer).num_chunks == 4
            assert not cache.flush(1.0)
            assert cache.stats()["waiting_chunks"] == 4
        put(cache, prompt(4, 2))
        assert cache.flush(30.0)
        assert hit_of(cache, prompt(4, 1), tiers=["disk"]).num_tokens == 64
        assert hit_of(cache, prompt(4, 2), tiers=["disk"]).num_tokens == 64


def test_a_close_without_a_thread_ends_and_says_that_something_was_left(
    shm_root: Path, tmp_path: Path
) -> None:
    cache = Cache(
        config_of(shm_root, tmp_path), namespace=NAMESPACE, layout=LAYOUT
    )
    with no_threads():
        put(cache, prompt(4))
        assert not cache.close(SECONDS)
    assert cache.lookup(prompt(4)).reason is Reason.CLOSED


def test_calls_that_need_a_thread_are_misses_and_never_run_later(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(4))
        room = blank(prompt(4))
        with no_threads():
            for _ in range(300):  # more than may wait
                hit = cache.retrieve_future(prompt(4), room.transfer).result(
                    SECONDS
                )
                assert hit.num_tokens == 0
                assert hit.reason is Reason.IO_ERROR
                assert "pids limit" in hit.detail
        again = blank(prompt(4))
        assert (
            cache.retrieve_future(prompt(4), again.transfer)
            .result(SECONDS)
            .num_tokens
            == 64
        )
        assert again.same(kv_of(prompt(4)))
        assert not room.blocks.any()


def test_labels_that_could_not_be_registered_are_registered_later(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        host = cache._tiers.host
        assert host is not None
        known = cache._weights.scope(salt="tenant")[0].root
        with no_threads():
            put(cache, prompt(2), salt="tenant")
        put(cache, prompt(3), salt="tenant")
        wait_until(lambda: known in admin.list_namespaces(host.ledger))


def test_copies_that_find_no_helper_are_done_all_the_same() -> None:
    done: list[int] = []
    with no_threads():
        in_threads([lambda n=n: done.append(n) for n in range(5)], 5)  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("late", [False, True], ids=["the first", "the second"])
def test_a_writer_that_an_exception_kept_from_being_recorded_is_the_only_one_or_ends(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The first thread goes on, or the second one, if that is started before the first one has done
    anything.
    """

    def writers() -> list[threading.Thread]:
        return [
            one
            for one in threading.enumerate()
            if one.name == "pagoda-writeback-disk"
        ]

    before = len(writers())
    with cache_at(shm_root, tmp_path) as cache:
        monkeypatch.setattr(
            writeback, "start_thread", interrupted_once(writeback.start_thread)
        )
        (queue,) = cache._resources.writeback
        with queue._changed if late else contextlib.nullcontext():
            with pytest.raises(Interrupted):
                put(cache, prompt(4, 1))
            assert put(cache, prompt(4, 2)).num_chunks == 4
        assert cache.flush(SECONDS)
        wait_until(lambda: len(writers()) == before + 1)
        assert hit_of(cache, prompt(4, 2), tiers=["disk"]).num_tokens == 64
    wait_until(lambda: len(writers()) == before)
