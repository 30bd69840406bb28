"""Files of a store deleted, truncated, of another format or user: discarded as a whole or refused,
never believed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.ledger import admin
from tests.children import in_child
from tests.cli.shelf import done_here
from tests.faults.support import (
    Store,
    apart,
    disk,
    environment,
    keys,
    load_from,
    memory_spec,
    python,
    save_to,
    succeeded,
)

PROMPT = keys(range(10))
# files that are mapped as they are: a pipe in their place has to be removed first
NOT_REPLACED = ("locks",)


def reopened(root: Path) -> int:
    """How many chunks of the prompt another process finds, after which it uses the store."""

    def work() -> int:
        store = Store(root)
        found = store.load(PROMPT)
        # each damaged entry that is read is removed
        while store.load(PROMPT) < 10:
            assert store.save(PROMPT) == 10
        assert admin.check(store.ledger)
        store.close()
        return found

    return int(apart(work))


def filled(root: Path) -> Path:
    """A store with one prompt in it, made and left by another process; its directory."""

    def work() -> Path:
        store = Store(root)
        assert store.save(PROMPT) == 10
        store.close()
        return store.ledger.directory

    return Path(apart(work))


def files_of(directory: Path) -> list[Path]:
    """All files of a store that a mishap could hit."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size > 0
    )


def delete(path: Path) -> None:
    """Removes a file."""
    path.unlink()


def halve(path: Path) -> None:
    """Truncates a file to half of its length."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Truncates a file to nothing."""
    os.truncate(path, 0)


def scribble(path: Path) -> None:
    """Overwrites the first pages: of the state, all that says what the store is."""
    with path.open("r+b") as file:
        file.write(b"\xa5" * min(8192, path.stat().st_size))


def pipe(path: Path) -> None:
    """Replaces a file by a pipe without a writer: whoever opens it waits for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def swap(path: Path) -> None:
    """Replaces a file by a copy: another inode with the same bytes."""
    shutil.copyfile(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [delete, halve, empty, swap, pipe])
def test_a_store_with_a_spoiled_file_is_discarded_as_a_whole(
    shm_root: Path, harm: Callable[[Path], None]
) -> None:
    names = [path.name for path in files_of(filled(shm_root / "probe"))]
    assert len(names) >= 3
    for name in names:
        directory = filled(shm_root / name)
        harm(directory / name)
        if harm is pipe and name in NOT_REPLACED:
            with pytest.raises(StoreError, match=f"not a regular file.*{name}"):
                Store(shm_root / name)
            continue
        found = reopened(shm_root / name)
        assert found in (0, 10), f"{name}: {found} chunks"
        shutil.rmtree(shm_root / name)


@pytest.mark.parametrize("name", ["state", "data.mdb"])
def test_a_store_of_another_format_is_discarded(
    shm_root: Path, name: str
) -> None:
    directory = filled(shm_root)
    scribble(directory / name)
    assert reopened(shm_root) == 0


@pytest.mark.parametrize("seed", range(5))
def test_torn_hints_cost_chunks_at_most(shm_root: Path, seed: int) -> None:
    columns = filled(shm_root) / "columns"
    dice = random.Random(seed)
    with columns.open("r+b") as file:
        for at in range(0, columns.stat().st_size, 4096):
            file.seek(at)
            file.write(
                dice.choice([bytes(4096), dice.randbytes(4096), b"\xff" * 4096])
            )
    assert 0 <= reopened(shm_root) <= 10

    def work() -> None:
        store = Store(shm_root)
        for turn in range(6):
            prompt = keys(range(turn * 100, turn * 100 + 30))
            assert store.save(prompt) == store.load(prompt) == 30
            admin.check(store.ledger)
        store.close()

    apart(work)


@pytest.mark.parametrize("harm", [pipe, Path.mkdir])
def test_a_state_that_is_no_file_is_as_good_as_none(
    shm_root: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """It hung everything that looked at the store, and nothing could remove it."""

    def fill() -> None:
        with closing(disk(tmp_path)) as tier:
            assert save_to(tier, PROMPT) == 10

    in_child(fill)
    [directory] = (path for path in tmp_path.iterdir() if path.is_dir())
    state = directory / "state"
    state.unlink()
    harm(state)
    assert "its state is missing or damaged" in apart(
        lambda: done_here("stats", tmp_path).stderr
    )

    def again() -> None:
        with closing(disk(tmp_path)) as tier:
            assert not load_from(tier, PROMPT)
            assert save_to(tier, PROMPT) == 10

    in_child(again)
    state.unlink()
    harm(state)
    assert apart(lambda: done_here("remove", tmp_path, "--yes").returncode) == "0"
    assert not directory.exists()


@pytest.mark.parametrize("name", ["limit", "limit.new"])
@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
def test_a_directory_in_the_limit_s_place_keeps_nobody_out(
    shm_root: Path, name: str, limit_bytes: int | None
) -> None:
    (filled(shm_root) / name).mkdir()

    def work() -> int:
        store = Store(shm_root, limit_bytes=limit_bytes)
        found = store.load(PROMPT)
        assert store.save(keys(range(100, 110))) == 10
        store.close()
        return found

    assert apart(work) == "10"


def test_a_store_of_another_user_is_refused_with_the_remedy(
    shm_root: Path,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    directory = filled(shm_root)
    subprocess.run(["chown", "-R", "12345", directory], check=True)
    with pytest.raises(StoreError, match=r"another path|remove|user"):
        Store(shm_root)
    subprocess.run(["chown", "-R", "0", directory], check=True)
    subprocess.run(["chown", "12345", directory.parent], check=True)
    with pytest.raises(StoreError, match=r"another path|remove|user"):
        Store(shm_root)


@pytest.mark.slow
def test_another_user_can_neither_enter_nor_read(shm_root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    directory = filled(shm_root / "root")
    os.chmod(shm_root, 0o755)
    code = """
import os, sys
from pathlib import Path
from support import Store
from pagoda.base.errors import StoreError
os.setuid(12345)
for path in sys.argv[2:]:
    try:
        open(path, "rb")
    except PermissionError:
        continue
    sys.exit(f"{path} can be read")
try:
    Store(Path(sys.argv[1]))
except StoreError as error:
    print("refused:", error)
"""
    assert "refused:" in succeeded(
        python(code, shm_root / "root", *files_of(directory))
    )


def test_deleting_the_directory_under_an_open_store_harms_nobody(
    shm_root: Path,
) -> None:
    store = Store(shm_root)
    store.save(PROMPT)
    shutil.rmtree(store.ledger.directory)
    assert store.load(PROMPT) == 10
    assert store.save(keys(range(100, 110))) == 10
    assert reopened(shm_root) == 0
    assert store.load(PROMPT) == 0, (
        "after a fork it would have to be opened by its path: another's lies there now"
    )
    store.close()


@pytest.mark.slow
def test_the_winner_of_a_race_to_create_is_used_by_all(shm_root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from support import Store\n"
        "store = Store(Path(sys.argv[1])); print(store.ledger.store_id.hex()); input()"
    )
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(shm_root)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    try:
        ids = {
            process.stdout.readline().strip()
            for process in racing
            if process.stdout
        }
        assert len(ids) == 1
        assert ids != {""}
    finally:
        for process in racing:
            process.communicate("\n", timeout=90)
    for process in racing:
        assert process.returncode == 0
    assert [path.name for path in shm_root.iterdir() if path.is_dir()] == [
        memory_spec(shm_root).name
    ]
