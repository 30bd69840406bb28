"""Any user, with or without an account, any HOME, and a small /dev/shm: a cache opens, hits, and is
listed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.base.errors import StoreError
from pagoda.base.store_place import require_place
from pagoda.config.sources import load
from pagoda.ledger import Ledger, StoreSpec
from pagoda.ledger.locks import OPEN, LockFile
from pagoda.ledger.store_state import LOCKS
from pagoda.transfer import BlockKV
from pagoda_tools.cli import main
from tests.children import child, wait
from tests.faults.support import apart, own_mounts, python, succeeded

# a user without an account, as in containers; each worker of a parallel run has its own
STRANGER = 1500 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
LAYOUT = KVLayout.opaque(16, 4096, "any user")
TOKENS = list(range(64))


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of the stranger's."""
    if os.geteuid():
        pytest.skip("only root can become another user: run the tests as root")
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    os.chown(root, STRANGER, STRANGER)
    try:
        yield root
    finally:
        shutil.rmtree(root)
        shutil.rmtree(f"/dev/shm/pagoda-{STRANGER}", ignore_errors=True)


def used(root: Path) -> str:
    """Store and retrieve with default places, then look with the command. Returns what `pagoda
    stats` says.
    """
    config = load(
        chunk_tokens=16,
        host_size="1MiB",
        disk_path=root / "disk",
        disk_size="1MiB",
    ).config
    kv = BlockKV(np.ones((4, 4096), np.uint8), LAYOUT)
    for tier in ("host", "disk"):
        with Cache(
            config, namespace=Namespace("m"), layout=LAYOUT, deadline_seconds=30.0
        ) as cache:
            cache.store(TOKENS, kv)
            assert cache.flush(60)
            assert cache.lookup(TOKENS, tiers=[tier]).num_tokens == 64
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["check"]) == 0, err.getvalue()
        assert main(["stats"]) == 0, err.getvalue()
        assert main(["remove", "--yes"]) == 0, err.getvalue()
    assert not list((root / "disk").glob("*/slab"))
    return out.getvalue()


def become_stranger(home: str | None) -> None:
    """Become a user without an account; `home` None: HOME is not set."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        os.environ.pop(name, None)
    if home is not None:
        os.environ["HOME"] = home
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    os.chdir("/")


@cache
def imported_late() -> None:
    """Import all modules first: the other user may be unable to read Python's directory."""
    with (
        tempfile.TemporaryDirectory(
            prefix="pagoda-test-", dir="/dev/shm"
        ) as root,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PAGODA_HOST_PATH", f"{root}/host")
        used(Path(root))


@pytest.mark.slow
@pytest.mark.parametrize(
    "home", ["unset", "foreign", "unreadable", "missing", "/", "their own"]
)
def test_another_user_may_use_tiers_whatever_the_home(
    theirs: Path, home: str
) -> None:
    imported_late()
    # root's, where a file system is mounted
    (theirs / "disk" / "lost+found").mkdir(mode=0o700, parents=True)
    os.chown(theirs / "disk", STRANGER, STRANGER)
    unreadable = theirs / "unreadable"
    unreadable.mkdir(mode=0o700)  # root's
    (unreadable / ".config" / "pagoda").mkdir(parents=True)
    (unreadable / ".config" / "pagoda" / "config.toml").write_text(
        "chunk_tokens = 3\n"
    )
    homes = {
        "unset": None,
        "foreign": "/usr",
        "unreadable": str(unreadable),
        "missing": "/nonexistent",
        "/": "/",
        "their own": str(theirs),
    }

    def work() -> str:
        become_stranger(homes[home])
        return used(theirs)

    said = apart(work)
    assert "host" in said
    assert str(theirs / "disk") in said
    assert (theirs / ".local" / "state" / "pagoda").is_dir() == (
        home == "their own"
    )


def test_a_directory_of_another_user_is_refused_with_the_remedy(
    theirs: Path,
) -> None:
    imported_late()
    roots = theirs / "roots"
    roots.mkdir(mode=0o700)  # root's

    def work() -> str:
        become_stranger(None)
        said = []
        for options in (
            {"host_path": roots, "host_size": "1MiB"},
            {"host_size": 0, "disk_path": roots, "disk_size": "1MiB"},
            {"host_size": 0, "disk_path": roots / "below", "disk_size": "1MiB"},
        ):
            with pytest.raises(StoreError) as refused:
                Cache(namespace=Namespace("m"), layout=LAYOUT, **options)  # type: ignore[arg-type]
            said.append(str(refused.value))
        with pytest.raises(StoreError) as refused:
            require_place(roots / "below", 1 << 20, in_memory=False)
        said.append(str(refused.value))
        return "\n".join(said)

    said = apart(work).splitlines()
    assert len(said) == 4 and all(
        "/roots" in line and "another path" in line for line in said
    ), said
    assert all(
        f"install -d -m 700 -o {STRANGER} {roots / 'below'}" in line
        for line in said[2:]
    ), said


@pytest.mark.parametrize("mask", [0, 0o77, 0o277, 0o777])
def test_any_umask_works_or_is_refused_with_the_remedy(
    theirs: Path, mask: int
) -> None:
    """What this user could not open is not made: the next start, with another umask, finds nothing
    in its way.
    """
    imported_late()

    def work() -> str:
        become_stranger(None)
        os.umask(mask)
        if mask & 0o700:
            with pytest.raises(
                StoreError, match=f"umask is {mask:04o}.*set it to 077"
            ):
                used(theirs / "deep")
            assert not (theirs / "deep").exists()
            os.umask(0o22)
        return used(theirs / "deep")

    assert "host" in apart(work)
    disk = theirs / "deep" / "disk"
    assert not [
        path for path in (disk, *disk.rglob("*")) if path.stat().st_mode & 0o077
    ]
    assert not [
        path for path in theirs.rglob("*") if path.stat().st_mode & 0o022
    ], "others may write there"


def test_a_lock_file_of_another_user_is_refused_at_once(theirs: Path) -> None:
    """Whoever may write to the root can put it there and hold its lock for ever."""
    root, (receive, send), (held, holds) = theirs / "root", os.pipe(), os.pipe()
    root.mkdir()
    root.chmod(0o777)

    def hold() -> None:
        become_stranger(None)
        locks = LockFile(root / LOCKS)
        (root / LOCKS).chmod(0o666)
        assert locks.lock(OPEN, exclusive=True)
        os.write(holds, b"!")
        os.read(receive, 1)

    stranger = child(hold)
    assert os.read(held, 1) == b"!"
    with pytest.raises(
        StoreError,
        match=f"locks belongs to user {STRANGER}, not to user 0.*chmod go-w {root}",
    ):
        Ledger.open(
            StoreSpec(root, "store", "memory", 4, 4096), deadline_seconds=0.5
        )
    os.write(send, b"!")
    assert wait(stranger) == 0


def test_what_the_system_refuses_is_one_line(theirs: Path) -> None:
    imported_late()
    roots = theirs / "roots"
    roots.mkdir(mode=0o700)  # root's

    def work() -> str:
        become_stranger(None)
        out = io.StringIO()
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            codes = [
                main([command, str(roots), *yes]) for command, yes in COMMANDS
            ]
        assert codes == [2] * len(COMMANDS), err.getvalue()
        return err.getvalue()

    said = apart(work).splitlines()
    assert len(said) == len(COMMANDS)
    for line in said:
        assert line.startswith("pagoda: ")
        assert "/roots" in line


@pytest.mark.slow
def test_stores_of_another_user_are_not_none(theirs: Path) -> None:
    imported_late()
    others = theirs / "others"
    others.mkdir(mode=0o755)
    with Cache(
        namespace=Namespace("m"),
        layout=LAYOUT,
        host_size=0,
        disk_path=others,
        disk_size="1MiB",
    ):
        pass

    def work() -> str:
        become_stranger(None)
        return printed(others)

    def configured() -> str:
        become_stranger(None)
        os.environ |= {
            "PAGODA_DISK_PATH": str(others),
            "PAGODA_DISK_SIZE": "1MiB",
            "PAGODA_HOST_SIZE": "0",
        }
        return printed(None)

    assert apart(work).count(
        "belongs to user 0: run the command as that user"
    ) == len(COMMANDS)
    others.chmod(0o700)
    said = apart(configured)
    assert (
        said.count(
            f"{others} belongs to user 0, not to user {STRANGER}: run this as that user"
        )
        == 4
    ), said
    assert said.count(f"{others}: cannot be read: Permission denied") == 1
    assert "pagoda remove" not in said
    os.chown(others, STRANGER, STRANGER)
    for path in others.iterdir():
        os.chown(path, STRANGER, STRANGER)
    assert printed(others).count(f"belongs to user {STRANGER}") == len(COMMANDS)
    assert printed(others).count("as that user") == len(COMMANDS)


def printed(root: Path | None) -> str:
    """Return what all commands print of a root that they cannot use. None: it is configured."""
    where = [] if root is None else [str(root)]
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        codes = [main([command, *where, *yes]) for command, yes in COMMANDS]
    assert all(codes), out.getvalue()
    return err.getvalue()


COMMANDS: list[tuple[str, list[str]]] = [
    ("stats", []),
    ("ls", []),
    ("check", []),
    ("clear", ["--yes"]),
    ("remove", ["--yes"]),
]


SMALL_MEMORY = """
import logging, subprocess, sys
from pathlib import Path
import numpy as np
from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.transfer import BlockKV

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", where], check=True)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
for chunk_bytes in (65536, 4 << 20, 64 << 20):
    layout = KVLayout.opaque(16, chunk_bytes, str(chunk_bytes))
    config = Config(chunk_tokens=16, host_path=str(where / str(chunk_bytes)), disk_path=sys.argv[2], disk_size="1GiB")
    with Cache(config, namespace=Namespace("m"), layout=layout, deadline_seconds=60.0) as cache:
        cache.store(list(range(16)), BlockKV(np.ones((1, chunk_bytes), np.uint8), layout))
        assert cache.flush(60)
        print("served", cache.lookup(list(range(16))).num_tokens)
    subprocess.run(["rm", "-r", str(where / str(chunk_bytes))], check=False)
"""  # noqa: E501


@pytest.mark.slow
def test_a_small_dev_shm_is_said_with_the_number_of_chunks(
    tmp_path: Path,
) -> None:
    (tmp_path / "mount").mkdir()
    done = python(
        SMALL_MEMORY, tmp_path / "mount", tmp_path / "disk", before=own_mounts()
    )
    lines = succeeded(done).splitlines()
    said = [line for line in lines if "host_size = auto" in line]
    assert [line for line in lines if line.startswith("served")] == [
        "served 16"
    ] * 3
    assert len(said) == 2, said
    assert "14 chunks of 4.00 MiB" in said[0]
    assert "--shm-size" in said[0]
    assert "host_size" in said[0]
    assert "0 chunks of 64.00 MiB, so there is no host tier" in said[1]


def test_a_process_with_little_memory_gets_an_error_that_names_what_to_raise(
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from pagoda.cache import open_tiers
    from pagoda.config import sizes

    opened: Callable[[Path | None], int] = lambda directory: 1 << 20  # noqa: E731
    monkeypatch.setattr(open_tiers, "auto_bytes", opened)
    monkeypatch.setattr(sizes, "auto_bytes", opened)
    monkeypatch.setattr("pagoda.config.auto_bytes", opened)
    layout = KVLayout.opaque(16, 4 << 20, "large")
    with (
        caplog.at_level(logging.WARNING),
        Cache(
            Config(chunk_tokens=16, host_path=str(shm_root / "h")),
            namespace=Namespace("m"),
            layout=layout,
        ) as cache,
    ):
        assert cache.lookup(TOKENS).num_tokens == 0
    assert "raise its limit" in caplog.text
