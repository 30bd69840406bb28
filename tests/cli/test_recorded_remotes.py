"""Remote tiers of the register: what a file named is asked as long as the file is believed and
names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pagoda import Cache, KVLayout, PagodaError
from pagoda.base import recorded_tiers
from testbed.servers import free_port
from tests.cli.shelf import LLAMA, answer, disk, host, put, run_here, save
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


QUIET = (
    ("stats",),
    ("ls",),
    ("ls", "--by", "namespace"),
    ("top", "--once"),
    ("check",),
    ("explain", "--tokens", "1,2,3"),
    ("clear", "--yes"),
)


@pytest.mark.parametrize("command", QUIET, ids=" ".join)
def test_a_tier_that_is_in_no_configuration_is_a_remark_when_it_is_silent(
    command: tuple[str, ...], shm_root: Path
) -> None:
    put(host(shm_root / "host"), LLAMA, range(16))
    gone = f"redis://127.0.0.1:{free_port()}/0"
    recorded_tiers.add("remote", gone)
    here = {"PAGODA_HOST_PATH": str(shm_root / "host")}
    code, out, err = run_here(*command, **here)
    assert code == 0, err
    assert run_here(*command, **here, PAGODA_REMOTE=gone)[0] == 1
    if command[0] == "top":
        told = " ".join(out.split())
    else:
        (told,) = [line for line in err.splitlines() if gone in line]
    assert "in no configuration" in told
    assert f"pagoda remove {gone}" in told


def test_stats_without_a_local_store_begins_with_the_trouble(
    shm_root: Path,
) -> None:
    silent = f"redis://127.0.0.1:{free_port()}/0"
    here = {"PAGODA_HOST_PATH": str(shm_root), "PAGODA_REMOTE": silent}
    code, out, err = run_here("stats", **here)
    assert code == 1
    assert out.startswith("TROUBLE with 1 tier, named below\n")
    assert "NO ANSWER" in out
    assert "nothing is stored" in err


PINNING = (
    ("pin", "--tokens", ",".join(map(str, range(16)))),
    ("unpin",),
)


@pytest.mark.parametrize("command", PINNING, ids=["pin", "unpin"])
def test_programs_see_which_failures_of_pins_are_remarks(
    command: tuple[str, ...], shm_root: Path
) -> None:
    put(host(shm_root / "host"), LLAMA, range(16))
    store = shm_root / "old" / "layout"
    put(host(store.parent), LLAMA, range(16))
    recorded_tiers.add("host", store.parent)
    (store / "state").write_bytes(b"{}")
    found = answer(*command, PAGODA_HOST_PATH=str(shm_root / "host"))
    assert list(found["failed"]) == found["unconfigured"] == [str(store)]


@pytest.mark.parametrize("command", QUIET[:-1], ids=" ".join)
def test_a_store_that_is_in_no_configuration_is_a_remark_when_it_does_not_open(
    command: tuple[str, ...], shm_root: Path
) -> None:
    put(host(shm_root / "host"), LLAMA, range(16))
    store = shm_root / "old" / "layout"
    put(host(store.parent), LLAMA, range(16))
    recorded_tiers.add("host", store.parent)
    (store / "state").write_bytes(b"{}")
    here = {"PAGODA_HOST_PATH": str(shm_root / "host")}
    code, out, err = run_here(*command, **here)
    assert code == 0, err
    assert str(store) in out + err
    assert "in no configuration" in out + err
    there = {"PAGODA_HOST_PATH": str(store.parent)}
    assert run_here(*command, **there)[0] == 1
    named = [*command, store]
    assert run_here(*named, **here)[0] == 1


def test_a_remark_is_told_to_programs_too(shm_root: Path) -> None:
    gone = f"redis://127.0.0.1:{free_port()}/0"
    recorded_tiers.add("remote", gone)
    here = {"PAGODA_HOST_PATH": str(shm_root)}
    for command in (QUIET[0], QUIET[1], QUIET[2], QUIET[5], QUIET[6]):
        found = answer(*command, **here)
        assert found["unconfigured"] == [gone], command
    found = answer("check", **here)
    assert found["ok"] is True
    assert found["unconfigured"] == [gone]


def test_damage_and_what_clear_left_here_fail_in_any_store(
    shm_root: Path, tmp_path: Path
) -> None:
    with disk(tmp_path / "disk") as tier:
        save(tier, LLAMA, range(32))
        slab = tier.ledger.slab_path
    recorded_tiers.add("disk", tmp_path / "disk")
    here = {"PAGODA_HOST_PATH": str(shm_root)}
    assert run_here("check", "--read", **here)[0] == 0
    with slab.open("r+b") as file:
        file.seek(6000)
        file.write(b"wrong" * 100)
    assert run_here("check", "--read", **here)[0] == 1
    (slab.parent / "state").write_bytes(b"{}")
    code, _, err = run_here("clear", "--yes", **here)
    assert code == 1
    assert "not cleared" in err


def test_a_tier_that_never_answered_is_not_in_the_register(
    shm_root: Path,
) -> None:
    layout = KVLayout.dense(layers=1, kv_heads=1, head_dim=8, dtype="float16")
    address_of_none = f"redis://127.0.0.1:{free_port()}/0"
    with suppress(PagodaError):
        Cache(
            namespace=LLAMA,
            layout=layout,
            host_size="1MiB",
            host_path=str(shm_root),
            remote=address_of_none,
        ).close()
    assert [entry.tier for entry in recorded_tiers.entries()] == ["host"]
