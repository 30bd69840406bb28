"""Limits of a process (ulimit) that are reached when a cache is opened, or later."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from threading import Thread

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.finalizers import close_dropped
from pagoda.base.metrics import Reason
from pagoda.cache import Hit
from testbed.patience import wait_until
from tests.cache.kit import (
    cache_at,
    counters_of,
    hit_of,
    prompt,
    put,
    reserved_for,
)
from tests.children import in_child


@contextmanager
def limited(what: int, value: int) -> Iterator[None]:
    """Set a limit of this process."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def limit_with(free: int) -> int:
    """Return the limit under which this process can open that many more files; the numbers of those
    that it has open may have gaps.
    """
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    unused = (number for number in count() if number not in used)
    return next(islice(unused, free, None))


def address_space() -> int:
    """Return how many bytes this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@pytest.mark.parametrize(
    ("what", "more", "option"),
    [
        (resource.RLIMIT_FSIZE, lambda: 1 << 20, "-f"),
        (resource.RLIMIT_NOFILE, lambda: limit_with(1), "-n"),
        (resource.RLIMIT_NOFILE, lambda: limit_with(4), "-n"),
        (resource.RLIMIT_NOFILE, lambda: limit_with(6), "-n"),
        (resource.RLIMIT_AS, lambda: address_space() + (32 << 20), "-v"),
    ],
    ids=["file size", "files", "files 4", "files 6", "address space"],
)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_limit_that_keeps_a_store_from_being_opened_is_named(
    shm_root: Path,
    tmp_path: Path,
    what: int,
    more: Callable[[], int],
    option: str,
    tier: str,
) -> None:
    """The remedy was to free some space, which did not help."""
    options = (
        {"host": shm_root, "disk": None, "host_size": "64MiB"}
        if tier == "host"
        else {"host": None, "disk": tmp_path / "disk", "disk_size": "1GiB"}
    )

    def work() -> None:
        # an opening that finds too little collects garbage: descriptors of earlier tests
        gc.collect()
        assert close_dropped(60.0)
        with (
            limited(what, more()),
            pytest.raises(StoreError, match=f"`ulimit {option}`"),
            cache_at(**options),
        ):
            pass

    in_child(work)


def test_what_is_being_stored_is_not_waited_for_if_nothing_can_be_stored(
    shm_root: Path, tmp_path: Path
) -> None:
    """Each request of such a prompt waited for its whole deadline."""

    def work() -> None:
        found: list[Hit] = []
        with cache_at(
            shm_root, tmp_path / "disk", deadline_seconds=1000.0
        ) as cache:
            put(cache, prompt(2))
            assert reserved_for(cache, prompt(4, 1))
            # writes fail with EFBIG: Python ignores the signal
            with limited(resource.RLIMIT_FSIZE, 4096):
                Thread(
                    target=lambda: found.append(hit_of(cache, prompt(4, 1))),
                    daemon=True,
                ).start()
                wait_until(lambda: found, 20.0)
                assert hit_of(cache, prompt(2)).num_tokens == len(prompt(2))
            assert found[0].num_tokens == 0
            assert found[0].reason is Reason.IO_ERROR
            assert counters_of(cache)["miss_io_error"] == 1

    in_child(work)
