"""Caches by name."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache import cache as named
from pagoda.cache.weights_epoch import WeightsEpoch
from tests.cache.kit import LAYOUT, NAMESPACE, config_of, prompt, served, stored
from tests.children import in_child
from tests.thread_limits import no_threads


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    Cache.destroy("one")
    Cache.destroy("two")


def _open(name: str, shm_root: Path, **options: object) -> Cache:
    return Cache.open(
        name,
        config_of(shm_root, None),
        namespace=NAMESPACE,
        layout=LAYOUT,
        **options,
    )


def test_the_same_name_is_the_same_cache(shm_root: Path) -> None:
    cache = _open("one", shm_root)
    assert _open("one", shm_root) is cache is Cache.get("one")
    assert cache.name == "one"
    assert _open("two", shm_root) is not cache
    assert Cache.get("three") is None


def test_another_config_under_the_same_name_is_refused(shm_root: Path) -> None:
    _open("one", shm_root)
    with pytest.raises(
        ValueError,
        match=r"config \(min_hit_tokens is 0, not 5; io_threads is 2, not 3\): use",
    ):
        _open("one", shm_root, min_hit_tokens=5, io_threads=3)
    with pytest.raises(
        ValueError, match=r"namespace \(model is '.+', not 'b'\): use Cache.get"
    ):
        Cache.open(
            "one",
            config_of(shm_root, None),
            namespace=NAMESPACE.with_(model="b"),
            layout=LAYOUT,
        )


def test_what_differs_in_a_secret_is_named_without_its_value(
    shm_root: Path,
) -> None:
    _open("one", shm_root)
    with pytest.raises(
        ValueError, match=r"config \(lookup differs\): use"
    ) as refused:
        _open("one", shm_root, lookup="redis://:hunter2@host:6379/0")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ValueError, match=r"namespace \(salt differs\): use"):
        Cache.open(
            "one",
            config_of(shm_root, None),
            namespace=NAMESPACE.with_(salt="s"),
            layout=LAYOUT,
        )


def test_destroy_closes_and_forgets_but_keeps_what_is_stored(
    shm_root: Path,
) -> None:
    cache = _open("one", shm_root)
    stored(cache, prompt(3))
    assert Cache.destroy("one")
    assert not Cache.destroy("one")
    assert Cache.get("one") is None
    assert cache.lookup(prompt(3)).reason is Reason.CLOSED
    again = _open("one", shm_root, min_hit_tokens=5)
    assert served(again, prompt(3))[0].num_tokens == 48


def test_a_closed_cache_is_forgotten(shm_root: Path) -> None:
    cache = _open("one", shm_root)
    cache.close()
    assert Cache.get("one") is None
    assert _open("one", shm_root) is not cache


def test_one_that_cannot_be_opened_is_not_kept(shm_root: Path) -> None:
    with pytest.raises(ValueError):
        _open("one", shm_root, chunk_tokens=32)
    assert Cache.get("one") is None


def test_threads_that_open_at_once_get_one_cache(shm_root: Path) -> None:
    opened: list[Cache] = []
    threads = [
        threading.Thread(target=lambda: opened.append(_open("one", shm_root)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(opened) == 8
    assert len(set(map(id, opened))) == 1


def test_a_fork_while_another_thread_opens_a_cache_and_yet_another_changes_weights(
    shm_root: Path,
) -> None:
    inside = threading.Barrier(3)
    leave = threading.Event()
    weights = WeightsEpoch({"host": shm_root}, "m")

    def hold(lock: AbstractContextManager[object]) -> None:
        with lock:
            inside.wait(60)
            leave.wait(60)

    threads = [
        threading.Thread(target=hold, args=(lock,))
        for lock in (named._openings.changed, weights._lock)
    ]
    for thread in threads:
        thread.start()
    inside.wait(60)

    def work() -> None:
        epoch, errors = weights.raise_epoch()
        assert Cache.get("one") is None
        assert epoch.number == 1
        assert not errors

    in_child(work)
    leave.set()
    for thread in threads:
        thread.join(60)
    assert Cache.get("one") is None


def test_a_cache_with_a_name_is_found_by_it_as_long_as_somebody_has_it(
    shm_root: Path,
) -> None:
    cache = Cache(
        config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT, name="one"
    )
    assert Cache.get("one") is cache
    with pytest.raises(ValueError, match="'one' is open already"):
        Cache(
            config_of(shm_root, None),
            namespace=NAMESPACE,
            layout=LAYOUT,
            name="one",
        )
    assert _open("one", shm_root) is cache
    cache.close()
    assert Cache.get("one") is None
    again = Cache(
        config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT, name="one"
    )
    again.me = again  # type: ignore[attr-defined]  # only a collection frees it
    del again
    third = Cache(
        config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT, name="one"
    )
    assert Cache.destroy("one")
    assert third.lookup(prompt(1)).reason is Reason.CLOSED


def test_a_name_is_free_again_when_its_cache_could_not_be_opened(
    shm_root: Path, tmp_path: Path
) -> None:
    with no_threads(), pytest.raises(StoreError):
        Cache(
            config_of(shm_root, tmp_path),
            namespace=NAMESPACE,
            layout=LAYOUT,
            name="one",
        )
    Cache(
        config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT, name="one"
    ).close()


def test_what_open_returned_is_kept_until_it_is_closed(shm_root: Path) -> None:
    _open("one", shm_root)
    gc.collect()
    kept = Cache.get("one")
    assert kept is not None
    assert kept.lookup(prompt(1)).reason is Reason.ABSENT
