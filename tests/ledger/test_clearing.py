"""A clear is heeded from its commit on, whatever happens to its process, to the log of clears or to
`state`.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Ledger,
    Present,
    Reserved,
    admin,
    clears_and_labels,
    rebuild,
)
from pagoda.ledger.namespace_registry import NamespaceRegistry
from pagoda.ledger.outcomes import ScannedChunk
from pagoda.ledger.store_state import PROMPTS, Vouched, read_state, read_voucher
from testbed.patience import Patience
from tests.children import (
    child,
    kill_self,
    wait,
)
from tests.ledger.support import (
    OTHER,
    TENANT,
    keys,
    matched,
    opened,
    put,
)


def present(ledger: Ledger, wanted: list[bytes]) -> list[bool]:
    """Return which of these keys a look-up finds."""
    return [
        len(ledger.match_prefix([key], start=None, namespace=TENANT).slots) == 1
        for key in wanted
    ]


@pytest.mark.parametrize("everything", [False, True])
def test_no_look_up_finds_what_is_being_cleared(
    tmp_path: Path, everything: bool
) -> None:
    """Also while its chunks still have their slots: removing them takes a transaction for every
    64.
    """
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(1, 2, 3))
    put(ledger, keys(4, 5), namespace=OTHER)
    root = None if everything else TENANT
    ledger.session.write(
        lambda transaction: clears_and_labels.clear(transaction, root)
    )
    match = ledger.match_prefix(keys(1, 2, 3), namespace=TENANT)
    assert not len(match.slots)
    assert match.reason is Reason.CLEARED
    assert not matched(ledger, keys(1)), "also if the namespace is not known"
    assert len(ledger.match_prefix(keys(4, 5), namespace=OTHER).slots) == (
        0 if everything else 2
    )
    assert ledger.touch(keys(1, 4)) == [False, not everything]
    again = ledger.reserve(keys(2), namespace=TENANT)
    assert isinstance(again[0], Reserved)
    assert not isinstance(again[0], Present)
    assert ledger.commit([again[0]]) == [True]
    assert present(ledger, keys(1, 2, 3)) == [False, True, False], (
        "what was stored since the clear is found"
    )
    assert admin.check(ledger)
    ledger.close()


def killed_in_a_clear(
    root: Path, kind: str, root_of: bytes | None, step: str
) -> None:
    def work() -> None:
        ledger = opened(root, kind=kind)

        def die(*_: object, **__: object) -> None:
            kill_self()

        place = (
            NamespaceRegistry if step == "save_clear" else type(ledger.clearing)
        )
        setattr(place, step, die)
        admin.clear(ledger, root_of)

    assert wait(child(work)) == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("step", ["save_clear", "_drop", "_remove_tokens"])
@pytest.mark.parametrize("root_of", [TENANT, None])
def test_the_next_one_ends_the_clear_of_a_process_that_was_killed(
    shm_root: Path, tmp_path: Path, kind: str, step: str, root_of: bytes | None
) -> None:
    root = shm_root if kind == "memory" else tmp_path
    ledger = opened(root, kind=kind)
    put(ledger, keys(1, 2, 3))
    put(ledger, keys(4), namespace=OTHER)
    (ledger.directory / PROMPTS).touch()
    ledger.close()
    killed_in_a_clear(root, kind, root_of, step)
    ledger = opened(root, kind=kind)
    assert present(ledger, keys(1, 2, 3)) == [False, False, False]
    assert admin.gauges(ledger)["ready"] == (0 if root_of is None else 1)
    assert not ledger.session.read(lambda txn, tables: tables.pending_clears(txn))
    assert not (ledger.directory / PROMPTS).exists()
    admin.check(ledger)
    ledger.close()


def scanned(ledger: Ledger, chunks: list[ScannedChunk]) -> None:
    """Rebuild the tables from headers of the first slots."""
    left = rebuild.unscanned(ledger)
    assert left.start == 0
    rebuild.absorb(ledger, 0, [*chunks, *[None] * (len(left) - len(chunks))])


def headers_of(ledger: Ledger, *numbers: int) -> list[ScannedChunk]:
    """What the slab says of stored chunks."""
    match = [ledger.match_prefix([key], start=None) for key in keys(*numbers)]
    generations = [int(one.generations[0]) for one in match]
    return [
        ScannedChunk(key, TENANT, generation, 0, 16, generation)
        for key, generation in zip(keys(*numbers), generations, strict=True)
    ]


def gone(log: Path, older: bytes) -> None:
    log.unlink()


def copied_back(log: Path, older: bytes) -> None:
    log.write_bytes(older)


def cut(log: Path, older: bytes) -> None:
    os.truncate(log, 60)


def emptied(log: Path, older: bytes) -> None:
    os.truncate(log, 0)


LOSSES = [gone, copied_back, cut, emptied]


def lost_tables(directory: Path) -> None:
    (directory / "data.mdb").unlink()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_log_of_clears_counts_as_a_broken_promise(
    tmp_path: Path, loss: Callable[[Path, bytes], None]
) -> None:
    """The tables are lost too, so only the headers of the slab are left: none of them is
    believed.
    """
    ledger = opened(tmp_path, kind="file")
    log = ledger.directory / "clears-0"
    put(ledger, keys(1))
    before = headers_of(ledger, 1)
    # a record before it: an older copy of the log is a whole one
    admin.clear(ledger, OTHER)
    older = log.read_bytes()
    admin.clear(ledger, TENANT)
    put(ledger, keys(2))
    before += headers_of(ledger, 2)
    ledger.close()
    loss(log, older)
    lost_tables(ledger.directory)
    ledger = opened(tmp_path, kind="file")
    scanned(ledger, before)
    assert present(ledger, keys(1, 2)) == [False, False]
    put(ledger, keys(3))
    after = headers_of(ledger, 3)
    ledger.close()
    lost_tables(ledger.directory)  # the new log is a promise that is kept
    ledger = opened(tmp_path, kind="file")
    scanned(ledger, [*before, *after])
    assert present(ledger, keys(1, 2, 3)) == [False, False, True]
    ledger.close()


@pytest.mark.parametrize("loss", [gone, cut, emptied])
def test_a_log_without_a_clear_may_be_lost(
    tmp_path: Path, loss: Callable[[Path, bytes], None]
) -> None:
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(1, 2))
    before = headers_of(ledger, 1, 2)
    ledger.close()
    loss(ledger.directory / "clears-0", b"")
    lost_tables(ledger.directory)
    ledger = opened(tmp_path, kind="file")
    scanned(ledger, before)
    assert present(ledger, keys(1, 2)) == [True, True]
    admin.clear(ledger, TENANT)
    voucher = read_voucher(ledger.directory, Vouched.CLEARS)
    assert voucher is not None and voucher.first, (
        "from now on it guards something"
    )
    ledger.close()
    lost_tables(ledger.directory)
    ledger = opened(tmp_path, kind="file")
    scanned(ledger, before)
    assert present(ledger, keys(1, 2)) == [False, False]
    ledger.close()


def test_an_older_copy_of_state_brings_back_nothing(tmp_path: Path) -> None:
    """Its incarnation is an older one: numbers of chunks that were given out since then are not
    given out again.
    """
    ledger = opened(tmp_path, kind="file")
    directory = ledger.directory
    put(ledger, keys(1))
    ledger.close()
    shutil.copy(directory / "state", tmp_path / "older")
    for _ in range(3):  # three rebuilds
        lost_tables(directory)
        ledger = opened(tmp_path, kind="file")
        scanned(ledger, [])
        put(ledger, keys(2))
        headers = headers_of(ledger, 2)
        admin.clear(ledger, TENANT)
        put(ledger, keys(3))
        headers += headers_of(ledger, 3)
        ledger.close()
    shutil.copy(tmp_path / "older", directory / "state")
    ledger = opened(tmp_path, kind="file")
    state = read_state(directory)
    assert state is not None
    assert state.incarnation == 5
    scanned(ledger, headers)
    assert present(ledger, keys(2, 3)) == [False, True]
    put(ledger, keys(4))
    admin.clear(ledger, TENANT)
    assert present(ledger, keys(3, 4)) == [False, False]
    put(ledger, keys(5))
    assert present(ledger, keys(5)) == [True], (
        "what is new is not taken for cleared"
    )
    ledger.close()


def test_what_an_older_copy_of_state_does_not_know_is_not_taken_back(
    tmp_path: Path,
) -> None:
    """The numbers of such chunks are given out again, so a clear could not cover them."""
    ledger = opened(tmp_path, kind="file")
    directory = ledger.directory
    ledger.close()
    shutil.copy(directory / "state", tmp_path / "older")
    lost_tables(directory)
    ledger = opened(tmp_path, kind="file")
    scanned(ledger, [])
    put(ledger, keys(1, 2, 3))
    headers = headers_of(ledger, 1, 2, 3)
    ledger.close()
    shutil.copy(tmp_path / "older", directory / "state")
    ledger = opened(tmp_path, kind="file")
    admin.clear(ledger, TENANT)
    scanned(ledger, headers)
    assert present(ledger, keys(1, 2, 3)) == [False, False, False]
    ledger.close()


def test_a_clear_under_way_is_not_ended_by_others(tmp_path: Path) -> None:
    """Its process is alive: it removes the chunks itself."""
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(1, 2))

    def work() -> None:
        other = opened(tmp_path, kind="file")
        other.session.write(
            lambda transaction: clears_and_labels.clear(transaction, TENANT)
        )
        (tmp_path / "cleared").touch()
        time.sleep(600)

    pid = child(work)
    patience = Patience(60)
    while not (tmp_path / "cleared").exists() and not patience.ended:
        time.sleep(0.01)
    assert present(ledger, keys(1, 2)) == [False, False]
    ledger.clearing.end_clears()
    assert admin.gauges(ledger)["ready"] == 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ledger.clearing.end_clears()
    assert admin.gauges(ledger)["ready"] == 0
    ledger.close()
