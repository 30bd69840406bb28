"""`kill -9` at every system call of creating, opening, resizing, rebuilding, closing a store: the
next one works.

Every seventh of these points in a run of the tests, another seventh in each test of a kind; all of
them in `make soak`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base import file_space
from pagoda.base.clock import Clock
from pagoda.ledger import admin, rebuild
from pagoda.ledger.columns import Columns
from pagoda.ledger.transaction import Transaction
from tests.children import (
    child,
    kill_self,
    wait,
)
from tests.faults.support import (
    AfterReboot,
    Store,
    apart,
    disk,
    keys,
    load_from,
    save_to,
)
from tests.ledger.support import absorb_nothing
from tests.ledger.test_space_sharing import LIMIT, Room

CALLS = (
    "open",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "truncate",
    "ftruncate",
)
PROMPT = keys(range(12))
# odd: before and after a call in turn
STEP = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 7


def killed_at(number: int, work: Callable[[], object], doomed: Path) -> bool:
    """Runs `work` in a child that is killed before or after its call `number`; whether it was. Its
    tree is `doomed`.
    """
    code = wait(child(lambda: (arm(number), work())))
    assert code in (0, -signal.SIGKILL), (
        f"exit code {code} at call {number} in {doomed}"
    )
    return code != 0


def arm(number: int) -> None:
    """From now on, call `number // 2` of those that change files is the last: it happens if
    `number` is odd.
    """
    count = itertools.count()

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            last = next(count) == number // 2
            if last and number % 2 == 0:
                kill_self()
            try:
                return call(*args, **kwargs)
            finally:
                if last:
                    kill_self()

        return wrapper

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))
    file_space.posix_fallocate = watched(file_space.posix_fallocate)  # type: ignore[assignment]


def sweep(
    root: Path,
    image: Path | None,
    work: Callable[[], object],
    after: Callable[[], object],
    first: int = 0,
) -> int:
    """Kills `work` at every call in turn, each time from the same image, and has `after` look; how
    many calls.
    """
    for number in range(first % STEP, 1000, STEP):
        shutil.rmtree(root, ignore_errors=True)
        if image is not None:
            shutil.copytree(image, root)
        killed = killed_at(number, work, root)
        try:
            apart(after)
        except AssertionError as error:
            error.add_note(
                f"after a kill {'behind' if number % 2 else 'before'} call {number // 2}"
            )
            raise
        left = [
            path.name
            for path in root.iterdir()
            if path.name.startswith((".new", ".gone"))
        ]
        assert not left, f"call {number}: {left}"
        if not killed:
            return number // 2
    raise AssertionError("it never ended")


@pytest.mark.slow
def test_making_a_store_in_memory(shm_root: Path) -> None:
    root = shm_root / "root"

    def make() -> None:
        store = Store(root)
        store.save(PROMPT)
        store.close()

    def look() -> None:
        store = Store(root)
        assert store.load(PROMPT) in (0, 4, 8, 12)
        assert store.save(PROMPT) == 12
        assert store.load(PROMPT) == 12
        admin.reap(store.ledger)
        admin.check(store.ledger)
        assert admin.gauges(store.ledger)["members"] == 1
        store.close()

    assert sweep(root, None, make, look) > 10


def image_of_disk(root: Path, slots: int = 40) -> Path:
    """A disk store with one prompt, closed."""

    def work() -> None:
        tier = disk(root, slots)
        assert save_to(tier, PROMPT) == 12
        tier.close()

    apart(work)
    return root


def look_at_disk(
    root: Path, slots: int, clock: Clock | None, least: int
) -> Callable[[], object]:
    """A process that opens the disk store, finds at least so many chunks, and uses it."""

    def look() -> None:
        tier = disk(root, slots, clock)
        assert tier.wait_ready(60)
        assert len(load_from(tier, PROMPT)) >= least
        assert (
            save_to(tier, keys(range(100, 105)))
            == 5
            == len(load_from(tier, keys(range(100, 105))))
        )
        admin.check(tier.ledger)
        gauges = admin.gauges(tier.ledger)
        assert gauges["slots"] - gauges["unbacked"] == slots, gauges
        assert gauges["members"] == 1 and not gauges["reserved"], gauges
        tier.close()

    return look


def use(
    root: Path, slots: int, clock: Clock | None = None
) -> Callable[[], object]:
    """A process that opens a disk store and closes it."""

    def work() -> None:
        tier = disk(root, slots, clock)
        tier.wait_ready(60)
        tier.close()

    return work


@pytest.mark.slow
@pytest.mark.parametrize("rebooted", [False, True])
def test_opening_and_closing_a_store_on_disk(
    shm_root: Path, rebooted: bool
) -> None:
    image = image_of_disk(shm_root / "image")
    root = shm_root / "root"
    # the machine fails too, after the kill
    clock = AfterReboot() if rebooted else None
    assert (
        sweep(
            root,
            image,
            use(root, 40),
            look_at_disk(root, 40, clock, 12),
            3 * rebooted,
        )
        > 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("slots", [24, 64])
def test_resizing_a_store_on_disk(
    shm_root: Path, slots: int, rebooted: bool
) -> None:
    image = image_of_disk(shm_root / "image")
    root = shm_root / "root"
    clock = AfterReboot() if rebooted else None
    first = 3 * rebooted + 2 * (slots == 64)
    assert (
        sweep(
            root,
            image,
            use(root, slots),
            look_at_disk(root, slots, clock, 12),
            first,
        )
        > 5
    )


@pytest.mark.slow
def test_rebuilding_a_store_on_disk(shm_root: Path) -> None:
    image = image_of_disk(shm_root / "image")
    root = shm_root / "root"
    next(image.glob("*/data.mdb")).unlink()
    assert sweep(root, image, use(root, 40), look_at_disk(root, 40, None, 12)) > 5


@pytest.mark.slow
def test_a_rebuild_that_dies_between_commit_and_publication_loses_nothing(
    shm_root: Path,
) -> None:
    root = image_of_disk(shm_root / "root")
    next(root.glob("*/data.mdb")).unlink()
    publish = Transaction.publish

    def last_words(
        transaction: Transaction, columns: Columns, stamp: int
    ) -> None:
        if transaction.meta.scan > 0:
            kill_self()
        publish(transaction, columns, stamp)

    def doomed() -> None:
        Transaction.publish = last_words  # type: ignore[method-assign]
        use(root, 40)()

    with pytest.raises(AssertionError, match="exit code -9"):
        apart(doomed)
    apart(look_at_disk(root, 40, None, 12))


@pytest.mark.soak
def test_taking_room_from_another_layout(shm_root: Path) -> None:
    root = shm_root / "root"
    hot = keys(range(52, 64))

    def first() -> None:
        room = Room(root, "first", "file")
        assert room.put(keys(range(64))) == 64
        room.close()

    apart(first)
    image = shutil.copytree(root, shm_root / "image")

    def second() -> None:
        room = Room(root, "second", "file")
        room.put(PROMPT)
        room.more(2)
        room.close()

    def look() -> None:
        for name, wanted in (("first", hot), ("second", PROMPT)):
            room = Room(root, name, "file")
            # killed while it opened the tables: they are rebuilt, here of no headers
            if rebuild.unscanned(room.ledger):
                absorb_nothing(room.ledger)
            elif name == "first":
                assert room.get(hot) == len(hot)
            assert room.put(wanted) == room.get(wanted) == len(wanted)
            room.check()
            room.close()
        assert (
            sum(path.stat().st_blocks * 512 for path in root.glob("*/slab"))
            <= LIMIT
        )

    assert sweep(root, image, second, look) > 10
