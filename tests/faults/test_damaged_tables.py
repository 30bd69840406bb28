"""Damaged pages of the tables and columns: every start ends with a tier that serves, and no start
ends in a signal.

Each page is damaged in one way in a run of the tests, in every way in `make soak`.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from pagoda.base.clock import Clock
from pagoda.base.errors import LedgerCorrupt, StoreError
from pagoda.ledger import admin, table_integrity
from pagoda.ledger.ledger import Ledger
from pagoda.ledger.lmdb_tables import META_ROW, SLOT_KEY, Tables
from pagoda.ledger.store_state import (
    COLUMNS,
    STATE,
    TABLES,
    TableMark,
    is_marked,
    read_state,
    set_mark,
)
from pagoda.ledger.table_integrity import is_damage
from testbed.patience import Patience
from tests.faults.support import (
    AfterReboot,
    Store,
    apart,
    disk,
    keys,
    load_from,
    save_to,
)

PAGE = 4096
PROMPT = keys(range(24))
SLOTS = 40
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

Damage = Callable[[bytearray, int], None]


def zero(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = bytes(PAGE)


def number(data: bytearray, at: int) -> None:
    data[at : at + 8] = (2**40).to_bytes(8, "little")


def flags(data: bytearray, at: int) -> None:
    data[at + 10] ^= 0x03


def lower(data: bytearray, at: int) -> None:
    data[at + 12] ^= 0x40


def upper(data: bytearray, at: int) -> None:
    data[at + 15] ^= 0x0C


def first_row(data: bytearray, at: int) -> None:
    data[at + 16 : at + 18] = b"\xf0\xff"


def row_nowhere(data: bytearray, at: int) -> None:
    data[at + 16 : at + 18] = b"\0\0"


def noise(data: bytearray, at: int) -> None:
    data[at + 16 : at + PAGE] = bytes(
        (i * 37 + 11) % 256 for i in range(PAGE - 16)
    )


DAMAGES: list[Damage] = [
    zero,
    number,
    flags,
    lower,
    upper,
    first_row,
    row_nowhere,
    noise,
]


def store_of(root: Path) -> Path:
    """The only store under a root."""
    (state,) = root.glob(f"*/{STATE}")
    return state.parent


def closed_image(root: Path) -> Path:
    """A disk store with one prompt, closed."""

    def work() -> None:
        tier = disk(root, SLOTS)
        assert save_to(tier, PROMPT) == 24
        tier.close()

    apart(work)
    return store_of(root)


def left_open_image(root: Path) -> Path:
    """The same of a process that was killed."""
    apart(lambda: save_to(disk(root, SLOTS), PROMPT))
    return store_of(root)


def used_pages(store: Path, name: str) -> list[int]:
    data = (store / name).read_bytes()
    return [
        page
        for page in range(len(data) // PAGE)
        if any(data[page * PAGE : (page + 1) * PAGE])
    ]


def harm(store: Path, name: str, page: int, how: Damage) -> None:
    data = bytearray((store / name).read_bytes())
    how(data, page * PAGE)
    # in place: for a store in memory the file must stay the same
    (store / name).write_bytes(data)


def serves(root: Path, clock: Clock | None = None) -> None:
    """A start: all that was stored is served, and what is new too."""
    tier = disk(root, SLOTS, clock)
    assert tier.wait_ready(60)
    assert len(load_from(tier, PROMPT)) == 24
    assert (
        save_to(tier, keys(range(100, 105)))
        == 5
        == len(load_from(tier, keys(range(100, 105))))
    )
    admin.check(tier.ledger)
    tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [TABLES, COLUMNS])
def test_any_damaged_page_of_a_closed_store_is_found_before_it_is_opened(
    tmp_path: Path, name: str
) -> None:
    image = tmp_path / "image"
    pages = used_pages(closed_image(image), name)
    assert len(pages) > 3
    for n, page in enumerate(pages):
        for how in DAMAGES if THOROUGH else [DAMAGES[n % len(DAMAGES)]]:
            root = tmp_path / f"{name}-{page}-{how.__name__}"
            shutil.copytree(image, root)
            harm(store_of(root), name, page, how)
            for _ in range(2):
                apart(lambda root=root: serves(root, AfterReboot()))  # type: ignore[misc]
            shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.parametrize("image_of", ["a closed store", "a store left open"])
def test_a_damaged_page_of_the_state_costs_nothing(
    tmp_path: Path, image_of: str
) -> None:
    image = tmp_path / "image"
    boot = AfterReboot() if image_of == "a closed store" else None
    closed_image(image) if image_of == "a closed store" else left_open_image(
        image
    )
    for page in range(3):
        for how in (zero, noise):
            root = tmp_path / f"{page}-{how.__name__}"
            shutil.copytree(image, root)
            harm(store_of(root), STATE, page, how)
            if page == 2 and how is noise and boot is None:
                # the vouchers, of a store that must be rebuilt: see the next test
                continue
            for _ in range(2):
                apart(lambda root=root: serves(root, boot))  # type: ignore[misc]


@pytest.mark.slow
def test_damaged_vouchers_cost_the_chunks_of_a_rebuild_and_nothing_later(
    tmp_path: Path,
) -> None:
    """It is not known what was cleared: nothing is taken back, and from then on all is as in a new
    store.
    """
    left_open_image(tmp_path)
    harm(store_of(tmp_path), STATE, 2, noise)
    harm(store_of(tmp_path), STATE, 1, zero)  # so that the tables are rebuilt

    def begins_again() -> None:
        tier = disk(tmp_path, SLOTS)
        assert not load_from(tier, PROMPT)
        patience = Patience(60)
        while len(load_from(tier, PROMPT)) < 24 and not patience.ended:
            save_to(tier, PROMPT)  # refused as long as the slots are read back
            time.sleep(0.05)

    def clears() -> None:
        tier = disk(tmp_path, SLOTS)
        assert len(load_from(tier, PROMPT)) == 24
        assert tier.clear() == 24
        tier.close()

    apart(begins_again)  # it is not closed
    apart(clears)
    tier = disk(tmp_path, SLOTS)
    assert not load_from(tier, PROMPT)
    tier.close()


@pytest.mark.slow
def test_damage_of_a_store_that_was_not_closed_ends_one_start_at_most(
    tmp_path: Path,
) -> None:
    """It has no checksum; if the check of all rows ends in a signal, the next start creates the
    store again.
    """
    image = tmp_path / "image"
    pages = used_pages(left_open_image(image), TABLES)
    for n, page in enumerate(pages):
        for how in DAMAGES if THOROUGH else [DAMAGES[n % len(DAMAGES)]]:
            root = tmp_path / f"{page}-{how.__name__}"
            shutil.copytree(image, root)
            harm(store_of(root), TABLES, page, how)
            pid = os.fork()
            if pid == 0:
                try:
                    serves(root)
                finally:
                    os._exit(0)  # how the first ends is no matter
            os.waitpid(pid, 0)
            apart(lambda root=root: serves(root))  # type: ignore[misc]
            shutil.rmtree(root)


@pytest.mark.slow
def test_a_start_that_ended_while_the_tables_were_opened_has_the_next_rebuild_them(
    tmp_path: Path,
) -> None:
    store = left_open_image(tmp_path)
    before = read_state(store)
    assert before is not None
    set_mark(store, TableMark.OPENING, before.incarnation)
    apart(lambda: serves(tmp_path))
    after = read_state(store)
    assert after is not None
    assert after.incarnation == before.incarnation + 1
    apart(lambda: serves(tmp_path))
    again = read_state(store)
    assert again is not None and again.incarnation == after.incarnation, (
        "a mark is of one incarnation only"
    )


def spoil_row(tier_ledger: Ledger) -> None:
    """Give the tables a row that cannot be."""
    tier_ledger.session.write(
        lambda w: w.txn.put(SLOT_KEY.pack(0), b"short", db=w.tables.slots), 10.0
    )


def test_an_error_in_the_tables_is_a_miss_and_the_store_is_rebuilt_at_the_next_opening(
    tmp_path: Path,
) -> None:
    def meet_it() -> None:
        tier = disk(tmp_path, SLOTS)
        assert save_to(tier, PROMPT) == 24
        spoil_row(tier.ledger)
        # listing cannot be done; the engine never lists
        with pytest.raises(Exception):  # noqa: B017
            list(admin.list_chunks(tier.ledger))
        state = read_state(tier.ledger.directory)
        assert state is not None
        assert is_marked(
            tier.ledger.directory, TableMark.DAMAGED, state.incarnation
        )
        tier.close()
        state = read_state(tier.ledger.directory)
        assert state is not None and not state.clean, (
            "it must never pass for clean again"
        )

    apart(meet_it)
    apart(lambda: serves(tmp_path))


def test_the_rows_of_a_store_that_was_not_closed_are_looked_through(
    tmp_path: Path,
) -> None:
    """It has no checksum that could tell."""

    def be_killed_after_a_wrong_row() -> None:
        tier = disk(tmp_path, SLOTS)
        assert save_to(tier, PROMPT) == 24
        spoil_row(tier.ledger)

    apart(be_killed_after_a_wrong_row)
    before = read_state(store_of(tmp_path))
    apart(lambda: serves(tmp_path))
    after = read_state(store_of(tmp_path))
    assert before is not None
    assert after is not None
    assert after.incarnation == before.incarnation + 1


def test_damage_that_a_look_does_not_find_is_remembered(tmp_path: Path) -> None:
    """A page that could not be read once may be readable at the next opening: it is not believed
    again.
    """

    def meet_it() -> None:
        tier = disk(tmp_path, SLOTS)
        assert save_to(tier, PROMPT) == 24

        def fail(*_: object) -> None:
            raise lmdb.CorruptedError("a page")

        with pytest.raises(StoreError):
            tier.ledger.session.read(fail)
        assert len(load_from(tier, PROMPT)) == 24, (
            "it works as long as it is open"
        )
        tier.close()

    apart(meet_it)
    before = read_state(store_of(tmp_path))
    apart(lambda: serves(tmp_path))
    after = read_state(store_of(tmp_path))
    assert before is not None and not before.clean, (
        "it must never pass for clean again"
    )
    assert after is not None
    assert after.incarnation == before.incarnation + 1


def test_what_check_finds_has_the_store_rebuilt(tmp_path: Path) -> None:
    def find_it() -> None:
        tier = disk(tmp_path, SLOTS)
        assert save_to(tier, PROMPT) == 24
        tier.ledger.session.write(
            lambda w: w.txn.delete(PROMPT[3], db=w.tables.entries), 10.0
        )
        with pytest.raises(LedgerCorrupt):
            admin.check(tier.ledger)
        tier.close()

    apart(find_it)
    apart(lambda: serves(tmp_path, AfterReboot()))


def test_wrong_use_is_no_damage(tmp_path: Path) -> None:
    tier = disk(tmp_path, SLOTS)
    with pytest.raises(struct.error):
        tier.ledger.session.write(lambda w: w.free_slot(-1), 10.0)
    state = read_state(tier.ledger.directory)
    assert state is not None
    assert not is_marked(
        tier.ledger.directory, TableMark.DAMAGED, state.incarnation
    )
    for harmless in (
        lmdb.MapFullError,
        lmdb.DiskError,
        lmdb.BadValsizeError,
        lmdb.Error,
        OSError,
    ):
        assert not is_damage(harmless("x"))
    tier.close()


@pytest.mark.slow
def test_a_damaged_store_in_memory_is_made_anew(shm_root: Path) -> None:
    def use() -> None:
        store = Store(shm_root)
        store.save(PROMPT)

    for page in range(2, 8):
        apart(use)
        harm_in_place(store_of(shm_root), page)
        pid = os.fork()
        if pid == 0:
            try:
                Store(shm_root)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

        def serve() -> None:
            store = Store(shm_root)
            store.save(PROMPT)
            assert store.load(PROMPT) > 0
            admin.check(store.ledger)
            store.close()

        apart(serve)


def harm_in_place(store: Path, page: int) -> None:
    with open(store / TABLES, "r+b") as file:
        data = bytearray(file.read())
        zero(data, page * PAGE)
        file.seek(0)
        file.write(data)


def test_tables_that_take_too_long_to_read_are_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = closed_image(tmp_path)
    before = read_state(store)
    assert before is not None
    assert before.clean
    assert before.checksum

    def slowly() -> None:
        monkeypatch.setattr(table_integrity, "_PIECE_BYTES", PAGE)
        monkeypatch.setattr(table_integrity, "_SECONDS", -1.0)
        serves(tmp_path)
        closed = read_state(store)
        assert closed is not None and not closed.clean, (
            "a store that cannot be read in time is not marked clean"
        )

    apart(slowly)
    after = read_state(store)
    assert after is not None
    assert after.incarnation == before.incarnation + 1


def test_the_checksum_covers_the_used_pages_only(tmp_path: Path) -> None:
    store = closed_image(tmp_path)
    state = read_state(store)
    assert state is not None
    assert 0 < state.used_bytes < state.map_bytes
    (store / COLUMNS).write_bytes(b"\xff" * (store / COLUMNS).stat().st_size)
    with open(store / TABLES, "r+b") as file:
        file.seek(state.used_bytes)
        file.write(b"x")
    apart(lambda: serves(tmp_path, AfterReboot()))
    after = read_state(store)
    assert after is not None
    assert after.incarnation == state.incarnation


def test_tables_without_totals_are_damaged(tmp_path: Path) -> None:
    store = left_open_image(tmp_path)
    state = read_state(store)
    assert state is not None

    def take_away() -> None:
        with (
            Tables.opening,
            closing(Tables(store / TABLES, state.map_bytes)) as tables,
            tables.env.begin(write=True) as txn,
        ):
            txn.delete(META_ROW, db=tables.meta)

    apart(take_away)
    apart(lambda: serves(tmp_path))
