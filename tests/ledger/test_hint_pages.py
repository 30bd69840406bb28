"""The memory beside the tables of a store on disk: where it is, what depends on it, and that it is
like the tables.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Ledger,
    Present,
    Reserved,
    StoreSpec,
    admin,
    hint_pages,
    session,
)
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import (
    NOT_READY,
    Columns,
    bounded_ghosts,
    columns_bytes,
)
from pagoda.ledger.hint_pages import Published
from pagoda.ledger.store_state import COLUMNS, METERS, REQUESTS, TABLES
from pagoda.testing import FakeClock
from testbed.patience import Patience, wait_until
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.faults.support import open_files_left
from tests.ledger.support import TENANT, keys, opened, put, small_store


@pytest.fixture(autouse=True)
def memory(shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the memory of stores on disk be in a directory of this test."""
    root = shm_root / "memory" / ".hints"
    monkeypatch.setattr(hint_pages, "_root", lambda: root)
    return root


@pytest.fixture
def clock() -> Clock:
    """The machine's clock."""
    return Clock()


@pytest.fixture
def store_spec(tmp_path: Path) -> StoreSpec:
    """A store on disk."""
    return small_store(tmp_path, kind="file")


@pytest.fixture
def ledger(unchecked_ledger: Ledger) -> Ledger:
    """A store on disk with ten chunks, which some tests close."""
    put(unchecked_ledger, keys(*range(10)))
    return unchecked_ledger


def mapped(directory: Path) -> dict[str, str]:
    """Return the files of a directory that this process has mapped, each with all rights of its
    mappings.
    """
    found: dict[str, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        rights = line.split()[1]
        path = line.partition("/")[2]
        if f"/{path}".startswith(f"{directory}/"):
            found[Path(path).name] = found.get(Path(path).name, "") + rights
    return found


def hits(ledger: Ledger, *numbers: int) -> int:
    """Return how many of these chunks are found."""
    return sum(
        len(ledger.match_prefix([key], touch=False).slots)
        for key in keys(*numbers)
    )


def other_process(memory: Path, root: Path, body: str) -> int:
    """Run `body` in a new process that has the store open as `other`, with its memory there; return
    its exit code.
    """
    code = f"""
import os, signal
from pathlib import Path
from pagoda.ledger import admin, hint_pages
from tests.ledger.support import TENANT, keys, opened, put
hint_pages._root = lambda: Path({str(memory)!r})
other = opened(Path({str(root)!r}), kind="file")
def hits(*numbers):
    return sum(len(other.match_prefix([key], touch=False).slots) for key in keys(*numbers))
"""
    done = subprocess.run(
        [sys.executable, "-c", code + body],
        cwd=Path(__file__).parents[2],
        timeout=200,
        check=False,
    )
    return done.returncode


# where it is


@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_no_page_of_a_store_on_disk_is_mapped_for_writing(
    tmp_path: Path, policy: str
) -> None:
    ledger = Ledger.open(
        StoreSpec(tmp_path, "store", "file", 32, 4096), policy=policy
    )
    put(ledger, keys(*range(40)))
    ledger.match_prefix(keys(*range(5)), lease_seconds=1.0)
    ledger.upkeep_thread.run_once()
    ledger.session.tend()
    ledger.session.save_hints()
    found = mapped(tmp_path)
    assert set(found) == {"data.mdb"}
    assert "w" not in found["data.mdb"]
    ledger.close()


def test_the_memory_is_shared_and_goes_with_the_last_process(
    ledger: Ledger, memory: Path, tmp_path: Path
) -> None:
    (made,) = memory.iterdir()
    assert made.stat().st_mode & 0o077 == 0
    assert ledger.session.hints.is_shared
    assert {
        file.stat().st_mode & 0o777
        for file in made.iterdir()
        if file.name != "store"
    } == {0o600}
    gauges = admin.gauges(ledger)
    assert gauges["hint_bytes"] >= columns_bytes(32, bounded_ghosts(32))

    other_process(
        memory,
        tmp_path,
        "other.columns.hits[3] = 77; os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert ledger.columns.hits[3] == 77
    ledger.close()
    assert not list(memory.iterdir())


def test_ghosts_are_bounded() -> None:
    assert bounded_ghosts(1000) == 8000
    assert columns_bytes(2_000_000, bounded_ghosts(2_000_000)) < 220 << 20


def test_memory_of_stores_that_are_gone_is_removed(
    memory: Path, tmp_path: Path
) -> None:
    def killed() -> None:
        put(opened(tmp_path / "old", kind="file"), keys(1))
        kill_self()

    wait(child(killed))
    assert len(list(memory.iterdir())) == 1
    opened(tmp_path / "old", kind="file").close()
    assert not list(memory.iterdir()), "its next process takes it over"
    wait(child(killed))
    (tmp_path / "old" / "store").rename(tmp_path / "elsewhere")
    ledger = opened(tmp_path / "new", kind="file")
    (made,) = memory.iterdir()
    assert made.name.startswith(f"{ledger.store_id.hex()}-1-")
    ledger.close()


@pytest.mark.parametrize(
    "squat",
    ["link", "directory", "long", "readable", "no directory", "open directory"],
)
def test_a_name_that_another_took_is_not_used(
    squat: str, memory: Path, tmp_path: Path, shm_root: Path
) -> None:
    first = opened(tmp_path, kind="file")
    put(first, keys(*range(10)))
    (made,) = memory.iterdir()
    first.close()
    victim = shm_root / "victim"
    nbytes = columns_bytes(32, bounded_ghosts(32))
    victim.write_bytes(bytes(nbytes))  # of the right size, and of this user alone
    victim.chmod(0o600)
    if squat == "no directory":
        made.write_bytes(b"a file")
    else:
        made.mkdir(mode=0o700)
    columns = made / COLUMNS
    if squat == "link":
        columns.symlink_to(victim)
    elif squat == "directory":
        columns.mkdir()
    elif squat == "long":
        columns.write_bytes(bytes(2 * nbytes))
        columns.chmod(0o600)
    elif squat == "readable":
        columns.write_bytes(bytes(nbytes))
        columns.chmod(0o666)
    elif squat == "open directory":
        made.chmod(0o777)
    again = opened(tmp_path, kind="file")
    assert hits(again, *range(10)) == 10
    assert again.session.hints.is_shared == (
        squat not in ("no directory", "open directory")
    )
    again.columns.last_use[:] = 5  # it can be written, wherever it is
    assert victim.read_bytes() == bytes(nbytes)
    if squat == "long":
        assert columns.stat().st_size == nbytes, "it was made anew"
    again.close()


def test_without_room_in_memory_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hint_pages, "_root", lambda: tmp_path / "on disk" / ".hints"
    )
    ledger = opened(tmp_path / "t", kind="file")
    put(ledger, keys(*range(10)))
    assert not ledger.session.hints.is_shared
    assert not (tmp_path / "on disk").exists()
    assert set(mapped(tmp_path)) == {"data.mdb"}
    assert hits(ledger, *range(10)) == 10
    ledger.close()


# nothing depends on it


def test_what_is_served_from_a_disk_is_not_decided_by_columns(
    ledger: Ledger,
) -> None:
    match = ledger.match_prefix(keys(*range(10)), touch=False)
    dice = np.random.default_rng(1)
    for column in (
        ledger.columns.generation,
        ledger.columns.keys,
        ledger.columns.last_use,
    ):
        column[:] = dice.integers(0, 1 << 40, column.shape).astype(column.dtype)
    again = ledger.match_prefix(keys(*range(10)), touch=False)
    assert again.slots.tolist() == match.slots.tolist()
    assert len(match.slots) == 10
    assert again.generations.tolist() == match.generations.tolist()
    assert ledger.still_valid(match.slots, match.generations).all()
    assert admin.counters(ledger)["failed_checks"] == 0


def test_columns_that_still_have_a_cleared_chunk_do_not_make_it_valid(
    ledger: Ledger,
) -> None:
    match = ledger.match_prefix(keys(*range(10)), touch=False)
    slots = match.slots.tolist()
    generations = match.generations.tolist()
    before = bytes(ledger.columns._map)
    admin.clear(ledger)
    ledger.columns._map[:] = before
    assert not ledger.still_valid(match.slots, match.generations).any()
    assert not ledger.is_valid(slots[0], generations[0])
    assert not hits(ledger, *range(10))


def test_notes_of_cleared_chunks_go_whatever_the_columns_say(
    ledger: Ledger,
) -> None:
    match = ledger.match_prefix(keys(*range(10)), touch=False)
    notes = ChunkNotes(ledger.directory)
    notes.write(
        (slot, key, b"token ids")
        for slot, key in zip(match.slots.tolist(), keys(*range(10)), strict=True)
    )
    ledger.columns.keys[:] = 0
    assert admin.remove(ledger, keys(3)) == 1
    assert len(list(notes.places())) == 9
    before = bytes(ledger.columns._map)
    admin.clear(ledger, TENANT)
    ledger.columns._map[:] = before
    assert not list(notes.places())


# it is like the tables


def lost(ledger: Ledger) -> None:
    """Forget all columns."""
    ledger.columns._map[:] = bytes(len(ledger.columns._map))
    ledger.columns.reset()
    Published.begin(ledger.session.hints._maps["published"])


def test_columns_are_compared_with_the_tables(ledger: Ledger) -> None:
    before = {
        name: getattr(ledger.columns, name).copy()
        for name in ("generation", "position")
    }
    lost(ledger)
    assert ledger.session.compare_hints(30.0)
    assert not ledger.session.compare_hints(30.0)
    ready = np.flatnonzero(ledger.columns.last_use != NOT_READY)
    assert len(ready) == 10
    for name, column in before.items():
        assert (getattr(ledger.columns, name)[ready] == column[ready]).all()
    assert admin.check(ledger).stale_hints == 0
    tail = ledger.next_victims(1)
    assert ledger.columns.position[tail] == 9, "a tail goes before its head"


def test_ranks_stay_where_slot_and_generation_are_the_same(
    ledger: Ledger,
) -> None:
    ledger.match_prefix(keys(*range(4)))
    before = ledger.columns.last_use.copy()
    hit = ledger.columns.hits.copy()
    Published.begin(ledger.session.hints._maps["published"])
    ledger.columns.last_use[20] = 7  # of a slot without a chunk
    assert ledger.session.compare_hints(30.0)
    assert (ledger.columns.last_use == before).all()
    assert (ledger.columns.hits == hit).all()


def test_a_stamp_from_the_future_is_one_of_now(ledger: Ledger) -> None:
    slot = int(ledger.match_prefix(keys(0), touch=False).slots[0])
    ledger.columns.last_use[slot] = NOT_READY - 1
    Published.begin(ledger.session.hints._maps["published"])
    assert ledger.session.compare_hints(30.0)
    assert ledger.columns.last_use[slot] <= ledger.session.stamp(
        ledger.session.clock.monotonic_ns()
    )


def test_a_chunk_whose_process_died_before_it_was_published_is_ranked(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies() -> None:
        other = opened(tmp_path, kind="file")
        (one,) = other.reserve(keys(50), namespace=TENANT)
        assert isinstance(one, Reserved)
        monkeypatch.setattr(
            session.Session,
            "_publish_and_count",
            lambda *_: kill_self(),
        )
        other.commit([one])

    assert wait(child(dies)) == -signal.SIGKILL
    (slot,) = ledger.match_prefix(keys(50), touch=False).slots.tolist()
    assert ledger.columns.last_use[slot] == NOT_READY
    ledger.session.tend()
    assert ledger.columns.last_use[slot] != NOT_READY
    assert not ledger.session.compare_hints(30.0), (
        "all transactions since are published"
    )


def test_processes_that_join_and_leave_need_no_comparison(
    ledger: Ledger, tmp_path: Path, memory: Path
) -> None:
    ledger.session.compare_hints(30.0)

    published = ledger.session.published
    assert published is not None
    before = list(published._words[1:])
    assert (
        other_process(memory, tmp_path, "put(other, keys(60)); other.close()")
        == 0
    )
    assert list(published._words[1:]) == before, "nobody compared"
    assert not ledger.session.compare_hints(30.0)
    assert hits(ledger, 60) == 1


@pytest.mark.slow
def test_processes_without_common_memory_share_the_store(
    ledger: Ledger,
    tmp_path: Path,
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two containers with one disk: each finds and evicts what the other stored."""
    tend = session.Session.tend
    # the thread must not be first
    monkeypatch.setattr(session.Session, "tend", lambda _: None)
    body = """
assert hits(*range(10)) == 10
put(other, keys(*range(100, 122)), chained=False)
assert admin.gauges(other)["ready"] == 32
other.close()
"""
    assert other_process(shm_root / "other" / ".hints", tmp_path, body) == 0
    assert hits(ledger, *range(100, 122)) == 22
    ledger.session.write(lambda _: None)  # published after what is missing
    tend(ledger.session)
    for number in range(200, 240):
        (outcome,) = ledger.reserve(keys(number), namespace=TENANT)
        assert isinstance(outcome, Reserved), outcome
        ledger.commit([outcome])
    assert hits(ledger, *range(100, 122)) < 22
    assert hits(ledger, *range(200, 240)) > 16
    admin.check(ledger)


def test_a_full_store_finds_victims_that_hints_lack(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the thread would help
    monkeypatch.setattr(session.Session, "tend", lambda _: None)
    put(ledger, keys(*range(100, 122)), chained=False)
    lost(ledger)
    assert isinstance(ledger.reserve(keys(200), namespace=TENANT)[0], Reserved)
    admin.check(ledger)


def test_memory_that_is_removed_while_it_is_used_costs_nothing(
    ledger: Ledger, memory: Path, tmp_path: Path
) -> None:
    for made in memory.iterdir():
        for file in made.iterdir():
            file.unlink()
        made.rmdir()

    body = "assert hits(*range(10)) == 10; put(other, keys(*range(20, 30))); other.close()"
    assert other_process(memory, tmp_path, body) == 0
    assert hits(ledger, *range(10), *range(20, 30)) == 20
    assert isinstance(ledger.reserve(keys(5), namespace=TENANT)[0], Present)
    ledger.session.tend()
    assert admin.check(ledger).stale_hints == 0


# what is saved


def fills(ledger: Ledger, first: int) -> int:
    """Store as many new chunks as the store has slots; return how many of them are found."""
    new = range(first, first + ledger.session.columns.slots)
    for number in new:
        put(ledger, keys(number))
    return hits(ledger, *new)


def test_a_copy_of_a_store_has_memory_of_its_own(tmp_path: Path) -> None:
    """It has the same id. By the ranks of the other one it would find no victims, and keep nothing
    new.
    """
    ledger = opened(tmp_path / "first", kind="file")
    put(ledger, keys(1))
    ledger.close()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    ledger = opened(tmp_path / "first", kind="file")
    copy = opened(tmp_path / "copy", kind="file")
    assert ledger.store_id == copy.store_id
    assert fills(ledger, 100) == fills(copy, 200) == ledger.session.columns.slots
    copy.close()
    assert fills(ledger, 300) == ledger.session.columns.slots
    ledger.close()


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_of_a_killed_process_is_not_that_of_an_older_copy(
    tmp_path: Path, in_place: bool
) -> None:
    """A backup is restored over a store whose process was killed; the number of transactions goes
    back.
    """
    root = tmp_path / "root"
    backup = tmp_path / "backup"
    ledger = opened(root, kind="file")
    put(ledger, keys(1))
    ledger.close()
    shutil.copytree(root, backup)

    def work() -> None:
        ledger = opened(root, kind="file")
        for first in (100, 200, 300):
            fills(ledger, first)
        kill_self()

    wait(child(work))
    if in_place:
        for path in backup.glob("**/*"):
            if path.is_file():
                shutil.copyfile(path, root / path.relative_to(backup))
    else:
        shutil.rmtree(root)
        backup.rename(root)
    ledger = opened(root, kind="file")
    assert hits(ledger, 1) == 1
    assert fills(ledger, 400) == ledger.session.columns.slots
    admin.check(ledger)
    ledger.close()


def test_ranks_outlive_the_memory(tmp_path: Path, memory: Path) -> None:
    clock = FakeClock()
    ledger = opened(tmp_path, kind="file", clock=clock)
    put(ledger, keys(*range(32)), chained=False)
    clock.advance(5)
    for number in (3, 4):
        ledger.match_prefix(keys(number))
    order = ledger.next_victims(32).tolist()
    old_hits = ledger.columns.hits.copy()
    ledger.close()
    assert not list(memory.iterdir())
    clock.reboot("next boot")
    again = opened(tmp_path, kind="file", clock=clock)
    assert again.next_victims(32).tolist() == order
    assert (again.columns.hits == old_hits).all()
    assert hits(again, *range(32)) == 32
    again.close()


@pytest.mark.parametrize(
    "damage", ["gone", "short", "other", "noise", "old version"]
)
def test_saved_hints_that_are_damaged_cost_only_ranks(
    tmp_path: Path, damage: str
) -> None:
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(*range(32)), chained=False)
    ledger.close()
    path = tmp_path / "store" / COLUMNS
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:5000])
    elif damage == "other":
        content[24:40] = bytes(16)  # the id of the store
        path.write_bytes(content)
    elif damage == "noise":
        path.write_bytes(
            content[:4096] + np.random.default_rng(2).bytes(len(content) - 4096)
        )
    else:
        path.write_bytes(bytes(columns_bytes(32)))
    again = opened(tmp_path, kind="file")
    assert again.store_id == ledger.store_id
    assert hits(again, *range(32)) == 32
    for number in range(100, 140):
        (outcome,) = again.reserve(keys(number), namespace=TENANT)
        assert isinstance(outcome, Reserved), outcome
        again.commit([outcome])
    assert admin.check(again).stale_hints == 0
    again.close()


def test_a_failed_save_is_counted_and_harms_nothing(
    ledger: Ledger, tmp_path: Path
) -> None:
    (ledger.directory / COLUMNS).mkdir()
    assert not ledger.session.save_hints()
    assert admin.counters(ledger)["hint_write_failures"] == 1
    assert hits(ledger, *range(10)) == 10
    ledger.close()
    (tmp_path / "store" / COLUMNS).rmdir()
    again = opened(tmp_path, kind="file")
    assert hits(again, *range(10)) == 10
    again.close()


def test_the_thread_saves_what_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.ledger.upkeep_thread._SAVE_SECONDS", 0.0)
    monkeypatch.setattr(
        "pagoda.ledger.upkeep_thread._SAVE_BYTES_PER_SECOND", 1 << 40
    )
    ledger = opened(tmp_path, kind="file")
    put(ledger, keys(*range(4)))
    ranked = set(np.flatnonzero(ledger.columns.last_use != NOT_READY))
    saved = Columns(None, 32, bounded_ghosts(32))
    patience = Patience(60)
    while (
        set(np.flatnonzero(saved.last_use != NOT_READY)) != ranked
        and not patience.ended
    ):
        ledger.match_prefix(keys(0))
        time.sleep(0.02)
        path = tmp_path / "store" / COLUMNS
        if path.exists() and path.stat().st_size == 4096 + len(saved._map):
            saved._map[:] = path.read_bytes()[4096:]
    assert set(np.flatnonzero(saved.last_use != NOT_READY)) == ranked
    assert len(ranked) == 4
    ledger.close()


# its file system stops


def test_tables_that_cannot_be_read_are_not_touched(
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "_REST_SECONDS", 0.2)
    pages = ledger.session._pages
    assert pages is not None
    kept = os.dup(pages._fd)
    directory = os.open(ledger.directory, os.O_RDONLY)
    os.dup2(directory, pages._fd)  # each `pread` is an error now
    monkeypatch.setattr(
        session.Session, "_open", lambda _: pytest.fail("the tables are used")
    )
    assert ledger.match_prefix(keys(0)).reason is Reason.IO_ERROR
    assert ledger.session.resting
    assert [one.reason for one in ledger.reserve(keys(90), namespace=TENANT)] == [
        Reason.IO_ERROR
    ]  # type: ignore[union-attr]
    ledger.session.tend()
    monkeypatch.undo()
    os.dup2(kept, pages._fd)
    patience = Patience(60)
    while not hits(ledger, 0) and not patience.ended:
        time.sleep(0.05)
    assert hits(ledger, *range(10)) == 10
    assert not ledger.session.resting
    assert "cannot be read" in caplog.text
    assert "can be read again" in caplog.text
    os.close(kept)
    os.close(directory)


@pytest.mark.slow
def test_a_store_whose_tables_cannot_be_opened_again_rests_and_says_so(
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their pages can be read: a disk that became read-only fails a transaction, and LMDB must be
    opened again.
    """
    monkeypatch.setattr(session, "_REST_SECONDS", 0.2)

    def work() -> None:
        assert hits(ledger, 0) == 1
        ledger.upkeep_thread.close()  # it opens files too
        ledger.upkeep_thread._thread.join()
        ledger.session._shut()
        with open_files_left(1):  # for `state`, which is read first
            for _ in range(3):  # each look after a rest is a new attempt
                wait_until(lambda: not ledger.session.resting)
                assert ledger.match_prefix(keys(0)).reason is Reason.IO_ERROR
        wait_until(lambda: hits(ledger, 0) == 1)
        assert hits(ledger, *range(10)) == 10
        assert not ledger.session.resting
        assert caplog.text.count("cannot be opened") == 1
        assert caplog.text.count("can be read again") == 1

    in_child(work)  # which has no other threads


def test_a_commit_does_not_read_tables_that_cannot_be_read(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_REST_SECONDS", 0.0)
    (one,) = ledger.reserve(keys(90), namespace=TENANT)
    assert isinstance(one, Reserved)
    pages = ledger.session._pages
    assert pages is not None
    kept = os.dup(pages._fd)
    directory = os.open(ledger.directory, os.O_RDONLY)
    os.dup2(directory, pages._fd)
    with monkeypatch.context() as patch:
        patch.setattr(
            session.Session, "_open", lambda _: pytest.fail("the tables are used")
        )
        assert not any(ledger.commit([one]))
    os.dup2(kept, pages._fd)
    ledger.session._rests_until = 0.0
    ledger.session.suspect()
    assert hits(ledger, *range(10)) == 10
    ledger.session.write(lambda _: None)  # the commit was deferred
    assert hits(ledger, 90) == 1
    os.close(kept)
    os.close(directory)


@pytest.mark.parametrize("populate", [22, 99])  # 99: a kernel without it
def test_pages_that_are_gone_are_noticed_without_a_signal(
    tmp_path: Path, populate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.ledger.table_pages._POPULATE_READ", populate)

    def cut() -> None:
        ledger = opened(tmp_path, kind="file")
        put(ledger, keys(*range(10)))
        os.truncate(ledger.directory / "data.mdb", 8192)
        assert ledger.session._pages is not None
        with pytest.raises(OSError):
            ledger.session._pages.load()
        ledger.session.suspect()  # as after an error of the slab
        assert ledger.session.resting
        assert not hits(ledger, *range(10))
        os._exit(0)

    assert wait(child(cut)) == 0


def test_pages_in_use_are_locked_as_far_as_allowed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = ledger.session._pages
    assert pages is not None
    assert pages._used_bytes() == ledger.session.read(
        lambda _, tables: tables.used_bytes()
    )
    pages.load()
    assert pages.locked_bytes in (0, pages._used_bytes())
    assert admin.gauges(ledger)["locked_bytes"] == pages.locked_bytes
    monkeypatch.setattr("pagoda.ledger.table_pages.MOST_LOCKED_BYTES", 4096)
    pages.locked_bytes = 0
    pages.load()
    assert pages.locked_bytes in (0, 4096)


def test_a_forked_child_shares_it(ledger: Ledger) -> None:
    """A forked child finds what its parent stored, and its pages are its own to lock."""

    def asks() -> None:
        assert hits(ledger, *range(10)) == 10
        ledger.session.tend()
        put(ledger, keys(70))
        os._exit(0)

    assert wait(child(asks)) == 0
    assert hits(ledger, *range(10), 70) == 11


def test_tables_that_are_cut_while_they_are_open_are_not_read(
    tmp_path: Path,
) -> None:
    """A read beyond the end of a mapped file is SIGBUS."""

    def cut() -> None:
        ledger = opened(tmp_path, 64, kind="file")
        put(ledger, keys(*range(10)))
        ledger.upkeep_thread.close()  # it would see it too
        ledger.upkeep_thread._thread.join()
        ledger.session.tend()
        os.truncate(ledger.directory / TABLES, 8192)
        for _ in range(3):
            assert ledger.match_prefix(keys(*range(10))).reason is Reason.IO_ERROR
            for one in ledger.reserve(keys(90), namespace=TENANT):
                assert not isinstance(one, Reserved)
        os._exit(0)

    assert wait(child(cut)) == 0


@pytest.mark.slow
def test_a_chunk_is_known_to_be_there_until_anybody_commits(
    ledger: Ledger, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each read from a disk it is asked whether the slot still has the chunk: without a lock
    if nobody wrote.
    """
    found = ledger.match_prefix(keys(0))
    slot = int(found.slots[0])
    generation = int(found.generations[0])
    second = ledger.match_prefix(keys(1))
    with monkeypatch.context() as patched:
        patched.setattr(
            session.Session,
            "read",
            lambda *_: pytest.fail("the tables are locked"),
        )
        assert ledger.is_valid(slot, generation)
        assert ledger.is_valid(int(second.slots[0]), int(second.generations[0]))
    assert not ledger.is_valid(slot, generation + 1)
    assert (
        other_process(memory, tmp_path, "put(other, keys(61)); other.close()")
        == 0
    )
    assert ledger.is_valid(slot, generation), "the chunk is still there"
    found = ledger.match_prefix(keys(0))
    assert (
        other_process(
            memory, tmp_path, "admin.remove(other, keys(0)); other.close()"
        )
        == 0
    )
    assert not ledger.is_valid(slot, generation)


@pytest.mark.parametrize("name", [METERS, REQUESTS])
def test_one_file_that_cannot_be_written_keeps_no_other_from_being_saved(
    ledger: Ledger, memory: Path, name: str
) -> None:
    pair = ("m", "t")
    ledger.count({"lookups": 1, "asked_tokens": 16}, pair)
    (ledger.directory / name).unlink(missing_ok=True)
    (ledger.directory / name).mkdir()
    assert ledger.session.save_hints()
    assert admin.counters(ledger)["hint_write_failures"] == 1
    assert not ledger.session._suspect
    ledger.close()
    assert list(memory.iterdir()) == []
