"""Opening and closing stores in one process: at once, on several threads, and while garbage is
collected.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.ledger import Ledger
from pagoda.ledger.locks import OPEN
from pagoda.ledger.store_state import LOCKS
from tests.ledger.support import gate_taken, holding, keys, opened, put, spec

SECONDS = 60.0


def test_threads_that_open_one_store_at_once_share_one_ledger(
    shm_root: Path,
) -> None:
    with ThreadPoolExecutor(8) as threads:
        ledgers = list(threads.map(lambda _: opened(shm_root), range(8)))
    assert len(set(map(id, ledgers))) == 1
    for ledger in ledgers[1:]:
        ledger.close()
    put(ledgers[0], keys(1))
    ledgers[0].close()


def test_threads_that_open_several_stores_of_one_root_at_once_discard_none(
    shm_root: Path,
) -> None:
    def one(name: str) -> Ledger:
        return Ledger.open(spec(shm_root, name=name, limit_bytes=1 << 40))

    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            for ledger in threads.map(one, "abcdef"):
                assert ledger.directory.is_dir()
                ledger.close()


def test_another_store_is_closed_and_opened_while_one_waits_to_be_opened(
    shm_root: Path,
) -> None:
    other = opened(shm_root / "other")
    opened(shm_root / "busy").close()
    with (
        holding(shm_root / "busy" / LOCKS, OPEN) as holder,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(
            Ledger.open, spec(shm_root / "busy"), deadline_seconds=SECONDS
        )
        other.close()
        opened(shm_root / "other").close()
        assert not waiting.done()
        holder.end()
        waiting.result(SECONDS).close()


def test_who_opens_a_store_that_is_being_closed_waits_for_it(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1))
    with gate_taken(ledger):
        closing = threading.Thread(target=ledger.close)
        closing.start()
        while not ledger._closing:
            pass
        with pytest.raises(StoreError, match="another thread"):
            Ledger.open(spec(shm_root), deadline_seconds=0.05)
    again = opened(shm_root)
    closing.join(SECONDS)
    assert again is not ledger
    assert again.session.member != ledger.session.member
    assert len(again.match_prefix(keys(1)).slots) == 1
    again.close()


@pytest.mark.slow
def test_a_collection_while_a_store_is_opened_may_close_another(
    shm_root: Path,
) -> None:
    code = f"""
import gc, signal
from pathlib import Path
from pagoda.ledger import ledger as module
from tests.cache.kit import *
signal.alarm(60)  # instead of a deadlock
root, real = Path({str(shm_root)!r}), module.open_store
def collecting(*given, **options):  # as any allocation in there may
    gc.collect()
    return real(*given, **options)
module.open_store = collecting
for n in range(5):
    cache = Cache(config_of(root / str(n), None), namespace=NAMESPACE, layout=LAYOUT)
    cache.me = cache  # only a collection frees it
    del cache
print("opened")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (0, "opened\n"), run.stderr


def test_a_store_that_was_dropped_without_a_close_makes_room_for_another(
    shm_root: Path,
) -> None:
    from pagoda.layout import KVLayout
    from tests.cache.kit import LAYOUT, NAMESPACE, Cache, config_of

    other = KVLayout.opaque(LAYOUT.chunk_tokens, LAYOUT.chunk_bytes, "another")
    for layout in (LAYOUT, other, LAYOUT):
        cache = Cache(
            config_of(shm_root, None), namespace=NAMESPACE, layout=layout
        )
        cache.me = cache  # type: ignore[attr-defined]
        del cache
    gc.collect()
