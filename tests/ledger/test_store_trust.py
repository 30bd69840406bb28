"""A store after failures: reboots, power cuts, crashes in the middle, late children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import (
    ScannedChunk,
    admin,
    rebuild,
    store_directory,
    stores_under_root,
)
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.store_state import Kind, read_state, write_state
from pagoda.testing import FakeClock
from tests.children import (
    child,
    in_child,
    kill_self,
    wait,
)
from tests.ledger.support import (
    TENANT,
    Other,
    absorb_nothing,
    keys,
    open_once,
    opened,
    places,
    present,
    put,
    rebuilt,
)


def clean(root: Path) -> bool:
    state = read_state(root / "store")
    assert state is not None
    return state.clean


def test_only_the_last_to_leave_a_store_on_disk_marks_it_clean(
    tmp_path: Path,
) -> None:
    with Other(lambda: open_once(tmp_path, kind="file")):
        ledger = opened(tmp_path, kind="file")
        ledger.close()
        assert not clean(tmp_path)
    ledger = opened(tmp_path, kind="file")
    assert not clean(tmp_path)
    ledger.close()
    assert clean(tmp_path)


def test_who_leaves_while_another_joins_does_not_mark_what_the_other_will_change_as_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, said = os.pipe()

    def leave() -> None:
        ledger = opened(tmp_path, kind="file")
        (tmp_path / "ready").touch()
        os.read(go, 1)
        ledger.close()

    pid = child(leave)
    while not (tmp_path / "ready").exists():
        time.sleep(0.005)
    real = store_directory.read_state

    # another process acts between two steps of this one
    def leave_now(directory: Path) -> object:
        if directory.name == "store":
            monkeypatch.setattr(store_directory, "read_state", real)
            os.write(said, b"x")
            assert wait(pid) == 0
        return real(directory)

    monkeypatch.setattr(stores_under_root, "_sweep", lambda root: None)
    monkeypatch.setattr(store_directory, "read_state", leave_now)
    ledger = opened(tmp_path, kind="file")
    assert store_directory.read_state is real
    assert not clean(tmp_path)
    ledger.close()
    assert clean(tmp_path)


def test_leases_are_void_after_a_reboot_and_recency_never_goes_back(
    tmp_path: Path,
) -> None:
    clock = FakeClock(seconds=10**6)
    ledger = opened(tmp_path, clock=clock, kind="file")
    stored = put(ledger, keys(*range(32)), chained=False)
    ledger.lease(*places(stored[:10]), 60.0)
    newest = ledger.stamp()
    assert admin.gauges(ledger)["leased"] == 10
    ledger.close()
    clock.reboot("next boot", seconds=10)
    again = opened(tmp_path, clock=clock, kind="file")
    assert again.stamp() > newest - (1 << 20)
    assert again.stamp() > int(again.columns.last_use.max())
    assert admin.gauges(again)["leased"] == 0
    assert admin.gauges(again)["ready"] == 32
    put(again, keys(100))
    assert present(again, keys(0)) == [False], "the oldest is no longer leased"
    again.close()


def test_a_damaged_recency_ends_in_no_overflow(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = opened(tmp_path, clock=clock, kind="file")
    [stored] = put(ledger, keys(1))
    ledger.columns.last_use[stored.slot] = NOT_READY - 1
    ledger.close()
    clock.reboot("next boot")
    again = opened(tmp_path, clock=clock, kind="file")
    assert len(again.match_prefix(keys(1)).slots) == 1
    put(again, keys(2, 3))
    again.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_times_that_are_ahead_of_the_clock_end_with_the_next_opening(
    shm_root: Path, kind: Kind
) -> None:
    """By a clock of the same boot that was ahead: leases would keep chunks for days, and new chunks
    count as old.
    """
    clock = FakeClock(seconds=1_000_000.0)
    ledger = opened(shm_root, clock=clock, kind=kind)
    stored = put(ledger, *[keys(*range(32))])
    ledger.lease(
        [one.slot for one in stored], [one.generation for one in stored], 1e9
    )
    newest = int(ledger.columns.last_use.max())
    ledger.close()
    clock.reboot("fake-boot", seconds=10.0)
    again = opened(shm_root, clock=clock, kind=kind)
    assert admin.gauges(again)["leased"] == 0
    assert admin.gauges(again)["ready"] == 32
    assert again.stamp() > newest
    put(again, keys(100))
    assert present(again, keys(100)) == [True]
    again.close()


def test_memory_is_discarded_after_a_reboot(shm_root: Path) -> None:
    clock = FakeClock()
    ledger = opened(shm_root, clock=clock)
    put(ledger, keys(1))
    number = ledger.store_id
    ledger.close()
    clock.reboot("next boot")
    again = opened(shm_root, clock=clock)
    assert again.store_id != number
    assert not admin.gauges(again)["ready"]
    again.close()


@pytest.mark.parametrize("name", ["data.mdb", "columns", "slab"])
def test_a_store_in_memory_with_a_file_that_was_exchanged_is_discarded(
    shm_root: Path, name: str
) -> None:
    """A copy has the right size, and the contents of the file at that time."""
    ledger = opened(shm_root)
    put(ledger, keys(1))
    number = ledger.store_id
    ledger.close()
    path = shm_root / "store" / name
    content = path.read_bytes()
    # otherwise the new file could get the same inode
    path.rename(path.with_name("old"))
    path.write_bytes(content)
    again = opened(shm_root)
    assert again.store_id != number
    assert not admin.gauges(again)["ready"]
    again.close()


def test_after_a_power_cut_the_ledger_is_rebuilt_with_newer_generations(
    tmp_path: Path,
) -> None:
    clock = FakeClock()

    def lose_power() -> None:
        ledger = opened(tmp_path, clock=clock, kind="file")
        stored = put(ledger, keys(1, 2))
        (tmp_path / "generation").write_text(
            str(max(one.generation for one in stored))
        )

    in_child(lose_power)
    clock.reboot("next boot")
    again = opened(tmp_path, clock=clock, kind="file")
    assert rebuild.unscanned(again) == range(32)
    assert not len(again.match_prefix(keys(1)).slots)
    rebuild.absorb(
        again, 0, [ScannedChunk(keys(1)[0], TENANT, 1 << 60, 0, 16, 5), None]
    )
    assert len(again.match_prefix(keys(1)).slots) == 1
    absorb_nothing(again)
    [new] = put(again, keys(3))
    assert new.generation > int((tmp_path / "generation").read_text())
    admin.check(again)
    again.close()


@pytest.mark.parametrize("step", ["write_state", "_make_ledger", "_renew"])
def test_a_crash_in_the_middle_of_a_rebuild(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilt(tmp_path, 32).close()
    (tmp_path / "store" / "data.mdb").unlink()

    def crash() -> None:
        monkeypatch.setattr(
            store_directory,
            step,
            lambda *_, **__: kill_self(),
        )
        opened(tmp_path, kind="file")

    assert wait(child(crash)) == -signal.SIGKILL
    again = opened(tmp_path, kind="file")
    absorb_nothing(again)
    admin.check(again)
    put(again, keys(1))
    again.close()


def test_a_child_whose_store_was_resized_before_it_could_open_it_again_finds_nothing(
    shm_root: Path,
) -> None:
    """Its parent died between the fork and this; the files that it has mapped are no longer used by
    any process.
    """
    ledger = opened(shm_root)
    put(ledger, keys(1))
    state = read_state(ledger.directory)
    assert state is not None

    def orphan() -> None:
        assert ledger.match_prefix(keys(1)).reason is Reason.IO_ERROR
        fresh = opened(shm_root)
        assert fresh is not ledger
        assert len(fresh.match_prefix(keys(1)).slots) == 1
        ledger.close()
        assert len(fresh.match_prefix(keys(1)).slots) == 1
        fresh.close()

    import msgspec

    write_state(
        ledger.directory,
        msgspec.structs.replace(state, incarnation=state.incarnation + 1),
    )
    in_child(orphan)
    write_state(ledger.directory, state)
    ledger.close()
