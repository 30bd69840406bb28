"""The directory of a store: created, opened, joined, resized, rebuilt and discarded as a whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
from pathlib import Path

import pytest

from pagoda.base.errors import ClosedError, NoRoomError, StoreError
from pagoda.base.synced_files import write_synced
from pagoda.ledger import Ledger, admin, rebuild, slab_pages, store_directory
from pagoda.ledger.locks import OPEN
from pagoda.ledger.store_state import LOCKS, read_state
from testbed.patience import Patience
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
    gate_taken,
    holding,
    keys,
    open_once,
    opened,
    present,
    put,
    rebuilt,
    spec,
)


def with_pages(ledger: Ledger) -> int:
    return admin.gauges(ledger)["slots"] - admin.gauges(ledger)["unbacked"]


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def used_slots(ledger: Ledger) -> int:
    """The slots that would fit in what the slab takes."""
    return ledger.slab_path.stat().st_blocks * 512 // ledger.slot_bytes


def used_bytes(root: Path) -> int:
    return sum(
        path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file()
    )


# creating


def test_a_new_store_has_all_its_blocks_and_is_its_owners_alone(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root / "root")
    state = read_state(ledger.directory)
    assert state is not None
    assert state.slots == 32
    assert not state.clean
    for name, size in state.sizes().items():
        status = (ledger.directory / name).stat()
        assert status.st_size == size and status.st_blocks * 512 >= size, name
    for path in [
        shm_root / "root",
        ledger.directory,
        *ledger.directory.iterdir(),
    ]:
        assert path.stat().st_mode & 0o077 == 0, path
    ledger.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"slots": 0},
        {"slot_bytes": 100},
        {"name": ""},
        {"name": "a/b"},
        {"name": ".x"},
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(
    shm_root: Path, bad: dict[str, object]
) -> None:
    with pytest.raises(ValueError):
        spec(shm_root, **bad)  # type: ignore[arg-type]


def test_what_a_killed_process_left_half_made_is_swept(shm_root: Path) -> None:
    for name in (".new-0123456789ab", ".gone-ba9876543210"):
        (shm_root / name).mkdir()
        (shm_root / name / "junk").write_bytes(bytes(100_000))
    opened(shm_root).close()
    assert names(shm_root) == {"store"}


def test_an_unknown_policy_leaves_nothing_open(shm_root: Path) -> None:
    with pytest.raises(ValueError, match="policy"):
        Ledger.open(spec(shm_root), policy="magic")
    opened(shm_root, slots=64).close()
    in_child(lambda: _must(with_pages(opened(shm_root, slots=40)) == 40))


# opening again


def test_a_store_is_warm_and_the_same_when_it_is_opened_again(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1, 2, 3))
    number = ledger.store_id
    ledger.close()
    again = opened(shm_root)
    assert again is not ledger
    assert again.store_id == number
    assert all(present(again, keys(1, 2, 3)))
    admin.check(again)
    again.close()


def test_one_process_has_one_ledger_a_store_until_the_last_close(
    shm_root: Path,
) -> None:
    one = opened(shm_root)
    two = opened(shm_root)
    assert one is two
    one.close()
    put(two, keys(1))
    two.close()
    with pytest.raises(ClosedError):
        two.match_prefix(keys(1))


def test_a_store_is_one_by_whatever_path(shm_root: Path, tmp_path: Path) -> None:
    ledger = opened(shm_root)
    (tmp_path / "link").symlink_to(shm_root)
    same = opened(tmp_path / "link")
    attached = Ledger.attach(tmp_path / "link" / "store")
    assert same is ledger
    assert attached is ledger
    for _ in range(3):
        ledger.close()


def test_a_store_that_is_open_by_another_path_is_not_discarded_for_room(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1))
    (tmp_path / "link").symlink_to(shm_root)
    with pytest.raises(NoRoomError):
        Ledger.open(
            spec(
                tmp_path / "link",
                name="second",
                slot_bytes=1 << 20,
                limit_bytes=1 << 19,
            )
        )
    assert names(shm_root) == {"store"}
    assert present(ledger, keys(1)) == [True]
    ledger.close()


def test_two_tiers_never_share_a_store(shm_root: Path) -> None:
    ledger = opened(shm_root)
    with pytest.raises(StoreError, match="its own path"):
        Ledger.open(spec(shm_root, slot_bytes=8192))
    with pytest.raises(StoreError, match="its own path"):
        Ledger.open(spec(shm_root, kind="file"))
    ledger.close()
    with (
        Other(lambda: open_once(shm_root)),
        pytest.raises(StoreError, match="another path"),
    ):
        Ledger.open(spec(shm_root, slot_bytes=8192))


def test_a_store_whose_directory_was_removed_is_made_anew_beside_the_old(
    shm_root: Path,
) -> None:
    import shutil

    old = opened(shm_root)
    put(old, keys(1))
    shutil.rmtree(old.directory)
    new = opened(shm_root)
    assert new is not old
    assert new.store_id != old.store_id
    put(new, keys(2))
    assert len(old.match_prefix(keys(1)).slots) == 1
    assert not len(new.match_prefix(keys(1)).slots)
    old.close()
    assert len(new.match_prefix(keys(2)).slots) == 1
    new.close()


# waiting


def test_opening_ends_in_time_while_another_holds_the_root(
    shm_root: Path,
) -> None:
    opened(shm_root).close()
    with holding(shm_root / LOCKS, OPEN):
        patience = Patience(25.0)
        with pytest.raises(StoreError, match="stopped"):
            Ledger.open(spec(shm_root), deadline_seconds=0.2)
        assert not patience.ended, patience.said()


def test_opening_ends_in_time_while_another_has_the_store_to_itself(
    shm_root: Path,
) -> None:
    opened(shm_root).close()
    with (
        holding(shm_root / "store" / LOCKS, OPEN),
        pytest.raises(StoreError, match="stopped"),
    ):
        Ledger.open(spec(shm_root), deadline_seconds=0.2)
    opened(shm_root).close()


@pytest.mark.slow
def test_opening_ends_in_time_while_another_sits_in_the_gate(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    with gate_taken(ledger):
        ledger.close()
        patience = Patience(25.0)
        with pytest.raises(StoreError, match="stopped"):
            Ledger.open(spec(shm_root), deadline_seconds=0.2)
        assert not patience.ended, patience.said()
    opened(shm_root).close()


# attaching


def test_an_existing_store_is_attached_to_as_it_is(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(shm_root, slots=40)
    put(ledger, keys(1))
    ledger.close()
    monkeypatch.chdir(shm_root / "store")
    attached = Ledger.attach(Path("."))
    assert attached.slots == 40
    assert present(attached, keys(1)) == [True]
    attached.close()


def test_nothing_is_made_by_attaching(shm_root: Path) -> None:
    (shm_root / "store").mkdir()
    for name in ("store", "absent"):
        with pytest.raises(StoreError):
            Ledger.attach(shm_root / name)
    assert names(shm_root) == {"store"}
    assert not list((shm_root / "store").iterdir())


# private


def test_private_stores_are_apart_and_gone_when_closed(shm_root: Path) -> None:
    one, two = (Ledger.open(spec(shm_root, private=True)) for _ in range(2))
    assert one.directory != two.directory
    put(one, keys(1))
    assert not len(two.match_prefix(keys(1)).slots)
    one.close()
    assert names(shm_root) == {two.directory.name}
    two.close()
    assert not names(shm_root)


def test_the_private_store_of_a_dead_process_is_swept(shm_root: Path) -> None:
    with Other(lambda: open_once(shm_root, private=True, slot_bytes=0)):
        opened(shm_root).close()
        assert len(names(shm_root)) == 2
    opened(shm_root).close()
    assert names(shm_root) == {"store"}


# space


def test_a_store_that_cannot_fit_is_refused_with_the_remedy_and_nothing_stays(
    shm_root: Path,
) -> None:
    with pytest.raises(
        NoRoomError, match=r"may hold 512\.0 KiB\. Raise host_size"
    ):
        Ledger.open(
            spec(shm_root, slots=10, slot_bytes=1 << 20, limit_bytes=1 << 19)
        )
    with pytest.raises(NoRoomError, match=r"host_size = .* would fit"):
        Ledger.open(spec(shm_root, slots=1 << 40, slot_bytes=1 << 20))
    assert not names(shm_root)


# resizing


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("slots", [8, 31, 33, 200])
def test_a_resize_keeps_as_many_chunks_as_fit(
    shm_root: Path, kind: str, slots: int
) -> None:
    ledger = opened(shm_root, 32, kind=kind)  # type: ignore[arg-type]
    stored = put(ledger, keys(*range(32)), chained=False)
    admin.pin(ledger, [one.key for one in stored], "ann")
    ledger.reserve(keys(100), namespace=TENANT)
    ledger.close()
    again = opened(shm_root, slots, kind=kind)  # type: ignore[arg-type]
    admin.check(again)
    expected = {one.key for one in stored}
    assert {row.key for row in admin.list_chunks(again)} - set(
        keys(100)
    ) <= expected
    assert admin.gauges(again)["ready"] == min(31, slots)
    assert with_pages(again) == slots
    assert set(keys(*range(8))) <= {
        row.key for row in admin.list_chunks(again)
    }, "pinned chunks stay"
    assert os.stat(again.slab_path).st_blocks * 512 == slots * 4096
    assert os.stat(again.slab_path).st_size == max(slots, 32) * 4096, (
        "a slab is never truncated"
    )
    put(again, keys(*range(200, 200 + 3 * slots)), chained=False)
    admin.check(again)
    again.close()


def sized(root: Path, slots: int, slot_bytes: int) -> Ledger:
    """A file store, of whose first 64 chunks every second one stays: on ext4, its holes need one
    block more.
    """
    limit = slots * slot_bytes
    ledger = Ledger.open(
        spec(root, slots, kind="file", slot_bytes=slot_bytes, limit_bytes=limit)
    )
    if not admin.gauges(ledger)["ready"]:
        ledger.namespaces.register(TENANT, {"model": "test"})
        admin.pin(
            ledger,
            [one.key for one in put(ledger, keys(*range(64)), chained=False)][
                ::2
            ],
            "ann",
        )
    return ledger


def test_the_metadata_of_a_file_system_takes_no_chunks_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sized(tmp_path, 64, 8192).close()
    for slots in (32, 32, 64):
        with contextlib.closing(sized(tmp_path, slots, 8192)) as ledger:
            assert with_pages(ledger) == slots
            assert admin.gauges(ledger)["ready"] == 32
            assert ledger.space.more() is False
            assert not ledger.space.exceeds
    assert "no more" not in caplog.text
    assert "too many" not in caplog.text


def test_metadata_that_fills_slots_is_punched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as what it is, space, but it is not taken for slots that a process left when it was
    killed.
    """
    sized(tmp_path, 64, 4096).close()
    with contextlib.closing(sized(tmp_path, 33, 4096)) as ledger:
        assert ledger.space.more() is False
        assert 32 <= with_pages(ledger) <= 33 == used_slots(ledger)
        assert not ledger.space.exceeds
        monkeypatch.delattr(slab_pages, "punch")
        assert ledger.space.more() is False


def test_a_store_that_others_have_open_keeps_its_size(shm_root: Path) -> None:
    with Other(lambda: open_once(shm_root)):
        ledger = opened(shm_root, slots=64)
        assert ledger.slots == 32
        ledger.close()
    ledger = opened(shm_root, slots=64)
    assert ledger.slots == 64
    ledger.close()


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        # a store on disk has none that must be there
        ("memory", "columns_in_memory"),
        *itertools.product(
            ["memory", "file"], ["write_state", "allocate", "_resize_tables"]
        ),
    ],
)
def test_a_crash_in_the_middle_of_a_resize(
    shm_root: Path, kind: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = 64
    ledger = opened(shm_root, kind=kind)  # type: ignore[arg-type]
    put(ledger, keys(*range(20)))
    ledger.close()

    def crash() -> None:
        def die(*_: object, **__: object) -> None:
            kill_self()

        monkeypatch.setattr(store_directory, step, die)
        opened(shm_root, slots, kind=kind)  # type: ignore[arg-type]

    assert wait(child(crash)) == -signal.SIGKILL
    again = opened(shm_root, slots, kind=kind)  # type: ignore[arg-type]
    assert again.slots == slots
    absorb_nothing(again)
    admin.check(again)
    put(again, keys(*range(100, 100 + 2 * slots)), chained=False)
    admin.check(again)
    again.close()


def test_a_resize_while_a_scan_is_unfinished(shm_root: Path) -> None:
    for slots in (60, 16):
        root = shm_root / str(slots)
        ledger = rebuilt(root, 40)
        rebuild.absorb(ledger, 0, [None] * 20)
        ledger.close()
        ledger = opened(root, slots, kind="file")
        left = rebuild.unscanned(ledger)
        assert left.start == 20
        assert left.stop in (40, slots)
        admin.check(ledger)
        absorb_nothing(ledger)
        assert admin.gauges(ledger)["free"] == slots
        put(ledger, keys(*range(3 * slots)), chained=False)
        admin.check(ledger)
        ledger.close()


# small files


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "small"
    write_synced(path, b"old")

    def write_on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError):
            write_synced(path, b"new" * 1000)

    in_child(write_on_a_full_disk)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["small"]


def _must(holds: bool) -> None:
    assert holds


# directories of others


def test_only_names_that_are_made_here_are_swept(
    shm_root: Path, tmp_path: Path
) -> None:
    dear = tmp_path / "dear"
    dear.mkdir()
    (dear / "photo").touch()
    for name in (
        ".gone-holiday",
        ".new-0123",
        ".gone-0123456789ab.old",
        "a.gone-0123456789ab",
    ):
        (shm_root / name).mkdir()
    (shm_root / ".gone-0123456789ab").symlink_to(dear)
    (shm_root / ".new-0123456789ab").write_bytes(b"a file")
    before = set(shm_root.iterdir())
    opened(shm_root).close()
    assert before < set(shm_root.iterdir())
    assert (dear / "photo").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
@pytest.mark.parametrize("of_whom", ["the root", "the store"])
def test_the_symbolic_link_of_another_user_is_not_followed(
    shm_root: Path, tmp_path: Path, of_whom: str
) -> None:
    target = shm_root / "target"
    opened(target).close()
    root = tmp_path / "link" if of_whom == "the root" else tmp_path / "root"
    link = root if of_whom == "the root" else root / "store"
    if of_whom == "the store":
        root.mkdir(mode=0o700)
    link.symlink_to(target if of_whom == "the root" else target / "store")
    os.lchown(link, 12345, 12345)
    with pytest.raises(StoreError, match="12345"):
        opened(root)
    os.lchown(link, 0, 0)
    if of_whom == "the root":  # a link of the same user is followed
        opened(root).close()
    assert (target / "store" / "state").exists()


def test_a_store_that_is_a_symbolic_link_is_left_alone(shm_root: Path) -> None:
    opened(shm_root / "real").close()
    (shm_root / "root").mkdir()
    (shm_root / "root" / "store").symlink_to(shm_root / "real" / "store")
    with pytest.raises(StoreError, match="symbolic link"):
        opened(shm_root / "root")
    Ledger.open(
        spec(
            shm_root / "root",
            name="other",
            limit_bytes=used_bytes(shm_root / "real") * 4 // 3,
        )
    ).close()
    assert (shm_root / "real" / "store" / "state").exists()
    assert (shm_root / "root" / "store").is_symlink()
