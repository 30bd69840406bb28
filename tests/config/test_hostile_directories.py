"""A stranger's pagoda.toml in the working directory: nothing is sent, written outside or
believed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.base.errors import ConfigError
from pagoda.cache import Cache
from pagoda.config.sources import load
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from tests.cli.shelf import answer, done_here, run_here
from tests.config.hostile import (
    OWN_CLONE,
    PLACES,
    Listener,
    Victim,
    is_own,
    listening,
)

LAYOUT = KVLayout.opaque(4, 4096, "hostile")
COMMANDS = (
    ("config", "check"),
    ("stats",),
    ("ls",),
    ("clear", "--yes"),
    ("top", "--once"),
    ("config", "show"),
)
REMEDIES = ("pagoda config allow", "--config")


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Victim:
    tmp_path.chmod(0o755)
    found = Victim(tmp_path)
    monkeypatch.chdir(found.directory)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("PAGODA_")]:
        monkeypatch.delenv(name)
    return found


def put(victim: Victim, place: str, text: str) -> None:
    """Leave a file with this text in the working directory, in that way."""
    victim.file.unlink(missing_ok=True)
    victim.directory.chmod(0o755)
    victim.file.write_text(text)
    victim.file.chmod(0o644)
    PLACES[place](victim)


def check_line(said: str, victim: Victim) -> None:
    """Check that one line names the file and both remedies."""
    lines = [line for line in said.splitlines() if str(victim.file) in line]
    assert len(lines) == 1, said
    assert all(remedy in lines[0] for remedy in REMEDIES), lines


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_no_command_sends_or_writes_anything(victim: Victim, place: str) -> None:
    with listening() as listener:
        for name, text in victim.lines(listener.port).items():
            put(victim, place, text + "\n")
            before = victim.outside()
            for command in COMMANDS:
                code, out, err = run_here(*command, **victim.variables)
                assert (listener.connections, victim.outside()) == (0, before), (
                    name,
                    command,
                )
                check_line(err, victim)
                if is_own(place):
                    assert code == 2 and out == "" and err.count("\n") == 1, (
                        name,
                        command,
                        out,
                        err,
                    )
                else:
                    assert code == 0, (name, command, err)
        assert recorded_tiers.entries() == []


@pytest.mark.parametrize("place", PLACES)
def test_no_cache_sends_or_writes_anything(
    victim: Victim, place: str, shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening() as listener:
        for name, text in victim.lines(listener.port).items():
            put(victim, place, text + "\n")
            before = victim.outside()
            caplog.clear()
            keywords = (
                {}
                if name == "host_path" and is_own(place)
                else {"host_path": str(shm_root / "host")}
            )
            if is_own(place):
                with pytest.raises(ConfigError) as refusal:
                    opened(**keywords)
                check_line(str(refusal.value), victim)
            else:
                opened(**keywords)
                check_line(
                    "\n".join(record.getMessage() for record in caplog.records),
                    victim,
                )
            assert (listener.connections, victim.outside()) == (0, before), name
    assert [entry.tier for entry in recorded_tiers.entries()] == (
        [] if is_own(place) else ["host"]
    )


def opened(**keywords: object) -> None:
    """Open a cache and look something up."""
    with Cache(
        namespace=Namespace("m"), layout=LAYOUT, host_size="1MiB", **keywords
    ) as cache:  # type: ignore[arg-type]
        cache.lookup(list(range(8)))


# ---- what is believed


def test_a_file_with_sizes_and_limits_is_read(victim: Victim) -> None:
    put(
        victim,
        OWN_CLONE,
        'chunk_tokens = 64\nhost_size = "8MiB"\ndeadline_seconds = 0.5\nlog_format = "json"\n',
    )
    config, origins = load()
    assert config.chunk_tokens == 64
    assert config.host_bytes == 8 << 20
    assert config.deadline_seconds == 0.5
    assert origins["host_size"] == f"file {victim.file}"
    shown = answer("config", "show", **victim.variables)
    assert shown["files"] == [{"file": str(victim.file), "class": "found"}]
    assert shown["left_out"] is None
    said = done_here("config", "show", **victim.variables).stdout
    assert f"file {victim.file}\n  found: may set sizes and limits only" in said


@pytest.mark.parametrize("place", PLACES)
def test_even_sizes_are_not_read_where_others_could_have_written_them(
    victim: Victim, place: str
) -> None:
    put(victim, place, "chunk_tokens = 64\n")
    assert load().config.chunk_tokens == (64 if is_own(place) else 256)


@pytest.mark.parametrize(
    "place", [place for place in PLACES if place != "too large"]
)
def test_all_of_it_works_once_it_is_allowed_and_is_asked_again_after_an_edit(
    victim: Victim, place: str
) -> None:
    with listening() as listener:
        text = victim.lines(listener.port)["several"]
        put(victim, place, text + "\n")
        allowed = answer("config", "allow", victim.file, **victim.variables)
        address = f"redis://127.0.0.1:{listener.port}/0"
        assert allowed["options"] == {
            "chunk_tokens": 4,
            "unchecked": True,
            "remote": [address],
        }
        config = load().config
        assert config.chunk_tokens == 4
        assert config.unchecked is True
        assert config.remote == (address,)
        shown = answer("config", "show", **victim.variables)
        assert shown["files"] == [{"file": str(victim.file), "class": "allowed"}]
        assert run_here("config", "check", **victim.variables)[0] == 1
        assert sent(listener)

        victim.file.write_text(text + "\n# an edit\n")
        before = listener.connections
        outside = victim.outside()
        for command in COMMANDS:
            code, out, err = run_here(*command, **victim.variables)
            assert (code, out, err.count("\n")) == (2, "", 1), (command, out, err)
            assert "changed since it was allowed" in err
            check_line(err, victim)
        assert listener.connections == before
        assert victim.outside() == outside

        assert run_here("config", "allow", **victim.variables)[0] == 0
        assert load().config.unchecked
        assert run_here("config", "allow", "--revoke", **victim.variables)[0] == 0
        assert run_here("config", "allow", "--revoke", **victim.variables)[0] == 2
        if is_own(place):
            with pytest.raises(ConfigError, match="only found"):
                load()
        else:
            assert not load().config.unchecked


def sent(listener: Listener) -> bool:
    return listener.connections > 0 and len(listener.received) > 0
