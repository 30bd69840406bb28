"""A limit of the size of files (ulimit -f) that is reached while a cache is open: no call of it can
change the tables any more.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

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
def no_file_may_be_written() -> Iterator[None]:
    """Let writes fail with EFBIG, as an EIO of the disk does: Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
            with no_file_may_be_written():
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
