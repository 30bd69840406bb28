"""The register of tiers: opened tiers are found again, and errors of the register never prevent the
use of a tier.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.base.recorded_tiers import Entry
from pagoda.cache.open_tiers import open_remote
from pagoda.config.remote_urls import parse
from pagoda.config.sources import load
from pagoda.layout import KVLayout
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.remote.remote_tier import RemoteTier
from testbed.servers import redis_server
from tests.config.hostile import listening

LAYOUT = KVLayout.opaque(16, 4096, "test")


def files(state: Path) -> list[Path]:
    return sorted((state / "pagoda" / "tiers").iterdir())


def test_every_tier_that_is_opened_is_entered_once(
    shm_root: Path, tmp_path: Path, register_of_tiers: Path
) -> None:
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        for _ in range(2):
            HostTier.open(LAYOUT, shm_root, 1 << 20).close()
            DiskTier.open(LAYOUT, tmp_path / "disk", 1 << 20).close()
            with closing(open_remote(parse(url), LAYOUT)) as tier:
                answered(tier)
    assert set(recorded_tiers.entries()) == {
        Entry("host", str(shm_root)),
        Entry("disk", str(tmp_path / "disk")),
        Entry("remote", url),
    }
    assert len(files(register_of_tiers)) == 3
    assert {file.stat().st_mode & 0o777 for file in files(register_of_tiers)} == {
        0o600
    }


def answered(tier: RemoteTier) -> None:
    """Ask a tier until it has answered, and close it, so that it has noted that."""
    while not tier.knows(bytes(32), bytes(32)):
        tier.match_prefix([bytes(32)], namespace=bytes(32))
        time.sleep(0.01)
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:{port}/0",
        "http://127.0.0.1:{port}?server=pagoda",
        "http://127.0.0.1:{port}/dav/",
        "http://127.0.0.1:{port}/dav/?index=redis://127.0.0.1:{port}",
    ],
)
def test_a_remote_tier_that_never_answered_is_not_entered(url: str) -> None:
    with listening() as listener:
        spec = parse(url.format(port=listener.port))
        with closing(open_remote(spec, LAYOUT)) as tier:
            while not listener.connections:
                tier.match_prefix([bytes(32)], namespace=bytes(32))
            tier.stats()
    assert recorded_tiers.entries() == []


def test_the_file_that_named_a_remote_tier_is_entered_and_the_last_one_counts(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        for name in ("one.toml", "two.toml"):
            (tmp_path / name).write_text(f'remote = "{url}"\n')
            (spec,) = load(file=tmp_path / name).config.remotes()
            answered(open_remote(spec, LAYOUT))
            assert recorded_tiers.entries() == [
                Entry("remote", url, str(tmp_path / name))
            ]
        (spec,) = load(remote=url).config.remotes()
        answered(open_remote(spec, LAYOUT))
        assert recorded_tiers.entries() == [Entry("remote", url, "")]
    assert len(files(register_of_tiers)) == 1


def test_an_entry_of_an_earlier_version_has_no_known_file(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    recorded_tiers.add("remote", "redis://h/0")
    (file,) = files(register_of_tiers)
    file.write_text('{"tier": "remote", "place": "redis://h/0"}')
    assert recorded_tiers.entries() == [Entry("remote", "redis://h/0", None)]
    recorded_tiers.add("remote", "redis://h/0")
    assert recorded_tiers.entries() == [Entry("remote", "redis://h/0", "")]


def test_private_memory_is_not_entered(shm_root: Path) -> None:
    HostTier.open(LAYOUT, shm_root, 1 << 20, shared=False).close()
    assert recorded_tiers.entries() == []


def test_no_secret_is_written(register_of_tiers: Path) -> None:
    with redis_server(password="topsecret") as server:
        answered(
            open_remote(
                parse(f"redis://:topsecret@127.0.0.1:{server.port}/0"), LAYOUT
            )
        )
        (entry,) = recorded_tiers.entries()
    assert entry.place == f"redis://:***@127.0.0.1:{server.port}/0"
    assert b"topsecret" not in b"".join(
        file.read_bytes() for file in files(register_of_tiers)
    )
    assert parse(entry.place).lacks_secret
    assert not parse(
        "redis://127.0.0.1:1/0?password_file=/run/secret"
    ).lacks_secret


def test_what_a_new_tier_takes_is_said_once_and_is_no_warning(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagoda")
    for _ in range(2):
        HostTier.open(LAYOUT, shm_root, 1 << 20).close()
        DiskTier.open(LAYOUT, tmp_path / "disk", 1 << 20).close()
    said = [
        record.getMessage()
        for record in caplog.records
        if "remove" in record.getMessage()
    ]
    assert len(said) == 2
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "1.0 MiB" in said[0]
    assert str(shm_root) in said[0]
    assert "`pagoda remove host`" in said[0]
    assert "`pagoda remove disk`" in said[1]


def test_a_missing_directory_is_left_out_and_forgotten_after_a_month(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    (tmp_path / "disk").mkdir()
    recorded_tiers.add("disk", tmp_path / "disk")
    (tmp_path / "disk").rmdir()
    assert recorded_tiers.entries() == []
    (tmp_path / "disk").mkdir()  # mounted again
    assert len(recorded_tiers.entries()) == 1
    (tmp_path / "disk").rmdir()
    long_ago = time.time() - 31 * 86400
    os.utime(files(register_of_tiers)[0], (long_ago, long_ago))
    assert recorded_tiers.entries() == []
    assert files(register_of_tiers) == []


def test_a_tier_in_use_is_not_forgotten(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    recorded_tiers.add("disk", tmp_path)
    long_ago = time.time() - 29 * 86400
    os.utime(files(register_of_tiers)[0], (long_ago, long_ago))
    recorded_tiers.add("disk", tmp_path)
    assert time.time() - files(register_of_tiers)[0].stat().st_mtime < 60


def test_damaged_entries_are_passed_over(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    recorded_tiers.add("disk", tmp_path)
    for number, text in enumerate(
        (
            b"",
            b"{",
            b"[]",
            b'{"tier": "disk"}',
            b'{"tier": 1, "place": 2}',
            b"\xff",
        )
    ):
        (register_of_tiers / "pagoda" / "tiers" / f"{number}.json").write_bytes(
            text
        )
    assert recorded_tiers.entries() == [Entry("disk", str(tmp_path))]


def test_what_a_killed_process_was_writing_is_removed(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    recorded_tiers.add("disk", tmp_path)
    directory = files(register_of_tiers)[0].parent
    old = directory / ".0123-4567"
    fresh = directory / ".89ab-cdef"
    for file in (old, fresh):
        file.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    recorded_tiers.add("disk", tmp_path.parent)
    assert fresh.exists()
    assert not old.exists()


def test_the_register_is_bounded(
    tmp_path: Path, register_of_tiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_tiers, "_MOST_ENTRIES", 4)
    for number in range(9):
        recorded_tiers.add("remote", f"redis://h{number}")
        os.utime(
            max(
                files(register_of_tiers), key=lambda file: file.stat().st_mtime_ns
            ),
            (number, number),
        )
    assert {entry.place for entry in recorded_tiers.entries()} >= {"redis://h8"}
    assert len(files(register_of_tiers)) == 4


def test_of_too_many_entries_those_go_first_that_lead_nowhere(
    tmp_path: Path, register_of_tiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_tiers, "_MOST_ENTRIES", 4)
    recorded_tiers.add("disk", tmp_path)
    os.utime(files(register_of_tiers)[0], (1, 1))
    for number in range(9):
        recorded_tiers.add("disk", tmp_path / f"gone-{number}")
    assert recorded_tiers.entries() == [Entry("disk", str(tmp_path))]
    assert len(files(register_of_tiers)) == 4


def test_a_register_that_others_could_write_is_not_believed(
    tmp_path: Path, register_of_tiers: Path
) -> None:
    recorded_tiers.add("disk", tmp_path)
    (register_of_tiers / "pagoda" / "tiers").chmod(0o777)
    assert recorded_tiers.entries() == []


def test_a_removed_tier_is_recorded_no_more(tmp_path: Path) -> None:
    recorded_tiers.add("disk", tmp_path)
    assert recorded_tiers.remove(str(tmp_path))
    assert not recorded_tiers.remove(str(tmp_path))
    assert recorded_tiers.entries() == []


def test_without_a_place_to_write_the_tier_works_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        recorded_tiers, "_directories", lambda: [tmp_path / "file" / "state"]
    )
    DiskTier.open(LAYOUT, tmp_path / "disk", 1 << 20).close()
    assert "not in the register" in caplog.text
    assert recorded_tiers.entries() == []


def test_a_home_that_is_another_users_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "home"
    theirs.mkdir()
    if os.geteuid():
        pytest.skip("only root can make a directory of another user: run as root")
    os.chown(theirs, 1500, 1500)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(theirs))
    memory = tmp_path / "memory"
    found = recorded_tiers._directories()
    assert found[0] == theirs / ".local" / "state" / "pagoda" / "tiers"
    monkeypatch.setattr(
        recorded_tiers, "_directories", lambda: [found[0], memory]
    )
    recorded_tiers.add("disk", tmp_path)
    assert list(theirs.iterdir()) == []
    assert [
        json.loads(file.read_text())["place"] for file in memory.iterdir()
    ] == [str(tmp_path)]


@pytest.mark.parametrize("home", ["", "relative"])
def test_without_a_home_the_register_lies_in_memory(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert recorded_tiers._directories() == [
        Path(f"/dev/shm/pagoda-{os.getuid()}/.tiers")
    ]
