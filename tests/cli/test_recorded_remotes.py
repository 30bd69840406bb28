"""Remote tiers of the register: what a file named is asked as long as the file is believed and
names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.tiers import recorded_tiers
from tests.cli.shelf import answer, run_here
from tests.config.hostile import Listener, listening

COMMANDS = (
    ("stats",),
    ("ls",),
    ("top", "--once"),
    ("check",),
    ("warm",),
    ("explain", "--tokens", "1,2,3"),
    ("clear", "--yes"),
)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


@pytest.fixture
def file(tmp_path: Path, listener: Listener) -> Path:
    found = tmp_path / "named.toml"
    found.write_text(
        f'remote = ["{address(listener)}", "redis://:hunter2@127.0.0.1:1/0?name=other"]\n'
    )
    recorded_tiers.add("remote", address(listener), file=str(found))
    return found


def address(listener: Listener) -> str:
    return f"redis://127.0.0.1:{listener.port}/0"


def is_shown_and_not_asked(listener: Listener, why: str) -> None:
    for command in COMMANDS:
        _, out, err = run_here(*command)
        assert listener.connections == 0, command
        lines = [line for line in err.splitlines() if address(listener) in line]
        assert lines and why in lines[0] and "pagoda remove URL" in lines[0], (
            command,
            out,
            err,
        )


def test_what_a_file_still_names_is_asked(file: Path, listener: Listener) -> None:
    run_here("stats")
    assert listener.connections > 0


def test_what_an_argument_named_is_asked(listener: Listener) -> None:
    recorded_tiers.add("remote", address(listener))
    run_here("stats")
    assert listener.connections > 0


def test_what_comes_from_a_file_that_is_gone_is_shown_and_not_asked(
    file: Path, listener: Listener
) -> None:
    file.unlink()
    is_shown_and_not_asked(listener, f"{file} is gone, or no longer names it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "chunk_tokens = 4\n",
        'remote = "redis://elsewhere/0"\n',
        "= no toml",
        "remote = 1\n",
        "\xff",
    ],
)
def test_what_a_file_no_longer_names_is_not_asked(
    file: Path, listener: Listener, text: str
) -> None:
    file.write_text(text, encoding="latin-1")
    is_shown_and_not_asked(listener, "no longer names it")


def test_what_others_could_have_written_is_not_asked_unless_it_was_allowed(
    file: Path, listener: Listener
) -> None:
    allowed = file.with_name("pagoda.toml")
    file.rename(allowed)
    recorded_tiers.remove(address(listener))
    recorded_tiers.add("remote", address(listener), file=str(allowed))
    allowed.chmod(0o666)
    is_shown_and_not_asked(listener, "no longer names it")
    home = {"HOME": str(file.parent), "XDG_CONFIG_HOME": ""}
    answer("config", "allow", allowed, **home)
    run_here("stats", **home)
    assert listener.connections > 0


def test_what_an_earlier_version_noted_is_not_asked(
    listener: Listener, register_of_tiers: Path
) -> None:
    recorded_tiers.add("remote", address(listener))
    (entry,) = (register_of_tiers / "pagoda" / "tiers").glob("*.json")
    entry.write_text(json.dumps({"tier": "remote", "place": address(listener)}))
    is_shown_and_not_asked(listener, "an earlier version noted it")
    assert run_here("remove", address(listener))[0] == 0
    assert recorded_tiers.entries() == []


def test_what_the_configuration_names_is_asked_whatever_the_register_says(
    file: Path, listener: Listener
) -> None:
    file.unlink()
    run_here("stats", PAGODA_REMOTE=address(listener))
    assert listener.connections > 0


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(
    file: Path, listener: Listener
) -> None:
    file.unlink()
    os.mkfifo(file)
    is_shown_and_not_asked(listener, "no longer names it")
