"""`pagoda stats`, `ls` and `check` on real stores, quiet ones and ones that others are using."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest

from pagoda.base import recorded_tiers
from pagoda.ledger import Ledger, admin
from pagoda.ledger.locks import OPEN
from pagoda.ledger.request_meters import TokenLoad
from pagoda.ledger.store_state import LOCKS, read_state, write_state
from pagoda_tools.cli import main
from pagoda_tools.cli.stores import in_each
from tests.cli.shelf import (
    CHUNK,
    LLAMA,
    QWEN,
    RUN,
    answer,
    disk,
    done_here,
    host,
    pagoda,
    put,
    refused,
    save,
    writer,
)
from tests.ledger.support import holding


def stores(found: dict[str, object]) -> list[dict[str, dict[str, int]]]:
    return cast("list[dict[str, dict[str, int]]]", found["stores"])


def test_a_store_that_is_removed_while_others_are_looked_at_is_no_trouble(
    shm_root: Path,
) -> None:
    """A private store goes with its process, at any time."""
    ledger = host(shm_root)
    found = [ledger.directory, shm_root / "host.private-1-0123"]
    done, broken = in_each(found, lambda ledger: ledger.directory)
    assert list(done) == [ledger.directory]
    assert not broken


@pytest.mark.parametrize("command", ["stats", "ls", "check"])
def test_a_loop_of_links_in_a_root_s_place_is_one_sentence(
    tmp_path: Path, command: str
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    done = done_here(command, PAGODA_HOST_PATH=str(loop))
    said = f"{loop} cannot be read: Too many levels of symbolic links\n"
    assert done.returncode == 1
    assert done.stderr.startswith("pagoda: ")
    assert done.stderr.endswith(said)
    assert done.stderr.count("\n") == 1
    assert "loop: no such directory" in refused(command, loop)


def test_stats_of_two_tiers_from_the_configuration(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root / "host")
    put(ledger, LLAMA, range(64))
    put(ledger, QWEN, range(32))
    ledger.count({"lookups": 3})
    ledger.count({"miss_absent": 2})
    ledger.close()
    with disk(tmp_path / "disk") as tier:
        save(tier, LLAMA, range(48))
    where = {
        "PAGODA_HOST_PATH": str(shm_root / "host"),
        "PAGODA_DISK_PATH": str(tmp_path / "disk"),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    first, second = stores(answer("stats", **where))
    assert first["tier"] == "host"
    assert first["kind"] == "memory"
    assert second["tier"] == "disk"
    assert second["kind"] == "file"
    assert first["gauges"]["slots"] == 64
    assert first["gauges"]["ready"] == 6
    assert first["gauges"]["free"] == 58
    assert first["counters"]["lookups"] == 3
    assert first["counters"]["miss_absent"] == 2
    assert [
        row["fields"]["model"]
        for row in cast("list[dict[str, dict[str, str]]]", first["namespaces"])
    ] == [
        "llama",
        "qwen",
    ]
    assert second["gauges"]["ready"] == 3
    shown = done_here("stats", **where).stdout
    assert "llama kv_dtype=bfloat16" in shown
    assert "qwen" in shown
    assert re.search(r"host:layout +absent +2", shown)
    assert "queue_full" not in shown  # only reasons that happened are shown


def test_models_and_tenants_are_those_of_all_stores(
    shm_root: Path, tmp_path: Path
) -> None:
    a = host(shm_root, name="a")
    b = host(shm_root, name="b")
    many = {"lookups": 1, "asked_tokens": 80, "hit_tokens": 60}
    a.count(many, ("llama\x1b[2J", "0123456789ab"), TokenLoad(60, 1_000_000))
    b.count(many, ("llama\x1b[2J", "none"))
    b.count(
        {"prefill_tokens": 10, "prefill_microseconds": 10**6},
        ("llama\x1b[2J", "none"),
    )
    found = answer("stats", shm_root)
    (model,) = cast("list[dict[str, object]]", found["models"])
    assert model["asked_tokens"] == 160
    assert model["hit_rate"] == 0.75
    assert model["saved_seconds"] == 5.0
    tenants = cast("list[dict[str, object]]", found["tenants"])
    assert {one["tenant"]: one["saved_seconds"] for one in tenants} == {
        "0123456789ab": 5.0,
        "none": None,
    }
    meters = [store["meters"] for store in stores(found)]
    assert [len(each) for each in meters] == [1, 1]
    text = done_here("stats", shm_root).stdout
    assert re.search(r"llama\\x1b\[2J +2 +160 +75\.0 % +60 +5\.0 s", text), text
    assert re.search(r"0123456789ab +1 +80 +75\.0 % +60 +5\.0 s", text), text
    assert re.search(r"none +1 +80 +75\.0 % +0 +-", text), text
    top = answer("top", "--once", shm_root)
    assert top["models"] == found["models"]
    assert top["tenants"] == found["tenants"]
    for ledger in (a, b):
        ledger.close()


def test_one_store_may_be_named_too(shm_root: Path) -> None:
    put(host(shm_root, name="a"), LLAMA, range(16))
    put(host(shm_root, name="b"), LLAMA, range(32))
    assert len(stores(answer("stats", shm_root))) == 2
    (one,) = stores(answer("stats", shm_root / "b"))
    assert one["gauges"]["ready"] == 2


def test_prometheus_has_one_type_line_a_family_and_its_samples_together(
    shm_root: Path,
) -> None:
    for name in ("a", "b"):
        put(host(shm_root, name=name), LLAMA, range(16))
    text = done_here("stats", shm_root, "--prometheus").stdout
    sample = re.compile(r'([a-z_]+)\{([a-z_]+="[^"]*",?)*\} -?[0-9.e+]+')
    family = ""
    families = set()
    seen = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert len(line.split()) > 5
            continue
        if line.startswith("# TYPE "):
            family = line.split()[2]
            assert family not in families
            families.add(family)
            continue
        match = sample.fullmatch(line)
        assert match is not None and match[1].startswith(family), line
        assert line not in seen
        seen.add(line)
    assert "pagoda_misses_total" in families
    assert "pagoda_ready" in families
    assert len([line for line in seen if line.startswith("pagoda_ready{")]) == 2


def test_ls_lists_latest_first_within_the_limit(shm_root: Path) -> None:
    ledger = host(shm_root)
    old = put(ledger, LLAMA, range(64))
    new = put(ledger, QWEN, range(32))
    assert len(ledger.match_prefix(new, deadline_seconds=30.0).slots) == 2
    admin.pin(ledger, new[:1], "me")
    found = answer("ls", shm_root, "--limit", 2)
    assert found["total"] == 6
    chunks = cast("list[dict[str, object]]", found["chunks"])
    assert [chunk["key"] for chunk in chunks] == [key.hex() for key in new]
    assert chunks[0]["pinned"] is True
    assert chunks[1]["pinned"] is False
    assert chunks[0]["model"] == "qwen"
    assert chunks[0]["tokens"] == CHUNK
    assert chunks[1]["position"] == 1
    everything = answer("ls", shm_root, "--limit", 0, "--model", "llama")
    assert {
        chunk["key"]
        for chunk in cast("list[dict[str, object]]", everything["chunks"])
    } == {key.hex() for key in old}
    done = done_here("ls", shm_root, "--limit", 1)
    assert done.stdout.count("\n") == 2
    assert "5 more" in done.stderr


def test_ls_by_namespace_sums_up(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(64))
    put(ledger, QWEN, range(32))
    found = cast(
        "list[dict[str, object]]",
        answer("ls", shm_root, "--by", "namespace")["namespaces"],
    )
    assert [(row["model"], row["chunks"], row["tokens"]) for row in found] == [
        ("llama kv_dtype=bfloat16", 4, 64),
        ("qwen", 2, 32),
    ]
    only = answer(
        "ls", shm_root, "--by", "namespace", "--namespace", QWEN.root.hex()[:10]
    )
    assert len(cast("list[object]", only["namespaces"])) == 1


def test_looking_changes_no_recency_and_no_counters(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(64))
    before = (
        ledger.columns.last_use.tobytes(),
        ledger.columns.hits.tobytes(),
        admin.counters(ledger),
    )
    for command in (["stats"], ["ls"], ["check"]):
        assert done_here(*command, shm_root).returncode == 0
    assert (
        ledger.columns.last_use.tobytes(),
        ledger.columns.hits.tobytes(),
        admin.counters(ledger),
    ) == before
    assert admin.gauges(ledger)["members"] == 1


def test_the_truth_while_another_process_stores(shm_root: Path) -> None:
    with writer(shm_root) as process:
        for _ in range(3):
            (seen,) = stores(answer("stats", shm_root))
            gauges = seen["gauges"]
            assert gauges["members"] == 1
            assert (
                gauges["free"] + gauges["reserved"] + gauges["ready"]
                == gauges["slots"]
                == 64
            )
            assert (
                len(
                    cast(
                        "list[object]",
                        answer("ls", shm_root, "--limit", 0)["chunks"],
                    )
                )
                <= 64
            )
            assert answer("check", shm_root)["ok"] is True
        assert process.poll() is None
        first = seen["counters"]["stored_chunks"]
        (later,) = stores(answer("stats", shm_root))
        assert later["counters"]["stored_chunks"] >= first
    assert answer("check", shm_root)["ok"] is True  # the writer was killed


def test_check_reads_the_disk_and_names_what_is_damaged(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        keys = save(tier, LLAMA, range(64))
        slab = tier.ledger.slab_path
        slot = int(tier.ledger.match_prefix(keys).slots[2])
    assert answer("check", tmp_path, "--read")["ok"] is True
    with slab.open("r+b") as stream:
        stream.seek(slot * 8192 + 4096 + 100)
        stream.write(b"\xff")
    # bytes are judged only when read
    assert answer("check", tmp_path)["ok"] is True
    found = answer("check", tmp_path, "--read", code=1)
    (store,) = stores(found)
    assert found["ok"] is False
    assert store["damaged"] == [keys[2].hex()]
    assert store["read_chunks"] == 4
    assert store["dropped"] == 0
    assert keys[2].hex()[:12] in done_here("check", tmp_path, "--read").stderr
    (store,) = stores(answer("check", tmp_path, "--read", "--drop", code=1))
    assert store["dropped"] == 1
    assert stores(answer("check", tmp_path, "--read"))[0]["read_chunks"] == 3


def test_a_store_that_cannot_be_used_fails_and_hides_no_other(
    shm_root: Path,
) -> None:
    put(host(shm_root, name="good"), LLAMA, range(16))
    put(host(shm_root, name="bad"), LLAMA, range(16))
    (shm_root / "bad" / "state").write_bytes(b"{}")
    found = stores(answer("stats", shm_root, code=1))
    assert [("error" in store) for store in found] == [False, True]
    assert stores(answer("check", shm_root, code=1))[0]["trouble"]
    done = done_here("stats", shm_root)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "bad" in done.stderr
    bad = str(shm_root / "bad")
    prompt = " ".join(map(str, range(16)))
    listed = answer("ls", shm_root, code=1)
    assert listed["total"] == 1
    assert list(listed["failed"]) == [bad]
    for command, name in (
        ("explain", "answers"),
        ("pin", "pinned"),
        ("unpin", "ended"),
    ):
        found = answer(command, shm_root, "--tokens", "-", stdin=prompt, code=1)
        assert found[name] and list(found["failed"]) == [bad], found
        assert (
            bad
            in done_here(command, shm_root, "--tokens", "-", stdin=prompt).stderr
        )
        (line,) = done_here(
            command, bad, "--tokens", "-", stdin=prompt
        ).stderr.splitlines()
        assert "no usable store" in line
    assert done_here("top", shm_root, "--once").returncode == 1


def test_a_root_that_cannot_be_read_fails_and_hides_no_other(
    shm_root: Path, tmp_path: Path
) -> None:
    put(ledger := host(shm_root), LLAMA, range(16))
    # longer than a name can be
    root = str(tmp_path / ("x" * 300))
    prompt = " ".join(map(str, range(16)))
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_DISK_PATH": root,
        "PAGODA_DISK_SIZE": "1GiB",
    }
    asked = {
        "stats": [],
        "ls": [],
        "explain": ["--tokens", "-"],
        "check": [],
        "unpin": [],
        "clear": ["--yes"],
    }
    for command, options in asked.items():
        done = done_here(command, *options, stdin=prompt, **where)
        assert done.returncode == 1
        assert ("llama" in done.stdout) == (command in ("stats", "ls", "explain"))
        (line,) = [line for line in done.stderr.splitlines() if root in line]
        assert "File name too long" in line
    assert admin.gauges(ledger)["ready"] == 0
    ledger.close()
    removed = answer("remove", "--yes", code=1, **where)
    assert [Path(one["directory"]).parent for one in removed["stores"]] == [
        shm_root
    ]  # type: ignore[attr-defined]
    assert "File name too long" in removed["failed"][root]  # type: ignore[index]
    assert "cannot be read: File name too long" in refused("stats", root)


@pytest.mark.slow
def test_looking_at_a_store_that_is_broken_does_not_remove_it(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(64))
    ledger.close()
    os.truncate(shm_root / "layout" / "columns", 4096)
    for command in ("stats", "check", "ls"):
        done = pagoda(command, shm_root)
        assert done.returncode == 1
        assert "layout" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "nothing is stored" not in done.stderr
    assert (
        sorted(path.name for path in (shm_root / "layout").iterdir()).count(
            "slab"
        )
        == 1
    )


@pytest.mark.slow
def test_what_could_not_be_opened_is_not_called_damaged(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    # as a file system that may only be read keeps it from being opened
    with holding(shm_root / LOCKS, OPEN):
        done = pagoda("check", shm_root)
    assert done.returncode == 1
    assert "NOT OPENED" in done.stdout
    assert "DAMAGED" not in done.stdout
    assert "stopped" in done.stderr


def test_what_is_yet_to_be_read_back_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    with disk(tmp_path) as tier:
        save(tier, LLAMA, range(64))
        directory = tier.ledger.directory
    state = read_state(directory)
    assert state is not None
    write_state(
        directory, msgspec.structs.replace(state, clean=False, boot_id="another")
    )
    done = done_here("check", tmp_path)
    assert done.returncode == 0
    assert "being rebuilt" in done.stdout
    assert "to be scanned" in done.stderr
    assert answer("check", tmp_path)["ok"] is True
    with disk(tmp_path) as tier:
        assert tier.wait_ready(60)
    assert "being rebuilt" not in done_here("check", tmp_path).stdout


def test_a_damaged_ledger_is_found(shm_root: Path) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, range(64))
    session = ledger.session
    with session._tables.env.begin(write=True) as txn:  # type: ignore[union-attr]
        txn.delete(keys[0], db=session._tables.entries)  # type: ignore[union-attr]
    found = answer("check", shm_root, code=1)
    assert "disagree" in str(stores(found)[0]["trouble"])
    assert "DAMAGED" in done_here("check", shm_root).stdout


def test_nothing_stored_yet_is_no_error(tmp_path: Path) -> None:
    where = {"PAGODA_HOST_PATH": str(tmp_path / "none")}
    for command in ("stats", "ls", "check"):
        done = done_here(command, **where)
        assert done.returncode == 0
        assert "stored" in done.stderr
    found = answer("stats", **where)
    del found["unconfigured"]
    assert set(map(str, found.values())) == {"[]"}


@pytest.mark.parametrize("missing", ["state", "data.mdb", "columns"])
def test_a_damaged_store_is_named_with_what_to_do(
    shm_root: Path, missing: str
) -> None:
    with closing(host(shm_root)) as ledger:
        put(ledger, LLAMA, range(16))
    (ledger.directory / missing).unlink()
    for command in ("stats", "ls", "check"):
        done = done_here(command, shm_root)
        assert done.returncode == 1
        assert "no usable store" in done.stderr
        assert "pagoda remove" in done.stderr
    assert done_here("remove", shm_root, "--yes").returncode == 0
    assert not ledger.directory.exists()


def test_wrong_use_is_one_line(shm_root: Path, tmp_path: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    (tmp_path / "file").write_text("")
    assert "no such directory" in refused("stats", tmp_path / "none")
    assert "not a directory" in refused("ls", tmp_path / "file")
    assert "has no store" in refused("check", tmp_path)
    assert "choose one" in refused("stats", shm_root, "--json", "--prometheus")
    assert "--read" in refused("check", shm_root, "--drop")
    assert "--limit" in refused("ls", shm_root, "--limit", "-1")
    assert "--limit" in refused("ls", shm_root, "--limit", "many")
    assert "--by" in refused("ls", shm_root, "--by", "colour")
    assert "did you mean llama?" in refused("ls", shm_root, "--model", "lama")
    assert "hex name" in refused("ls", shm_root, "--namespace", "xyz")
    assert "no namespace begins so" in refused(
        "ls", shm_root, "--namespace", "00" * 32
    )
    assert "No such command" in refused("stat")
    assert "64GiB" in refused("stats", PAGODA_HOST_SIZE="64G")
    assert "did you mean PAGODA_HOST_SIZE?" in refused(
        "ls", PAGODA_HOSTSIZE="1GiB"
    )


@pytest.mark.slow
def test_with_stdout_closed_the_exit_code_remains(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    for place, code in ((shm_root, 0), (shm_root / "none", 2)):
        shell = [
            "sh",
            "-c",
            'exec "$@" >&-',
            "sh",
            sys.executable,
            "-c",
            RUN,
            "check",
            str(place),
        ]
        done = subprocess.run(
            shell, stderr=subprocess.PIPE, text=True, timeout=120
        )
        assert (done.returncode, done.stderr.count("\n")) == (code, code // 2), (
            done.stderr
        )


@pytest.mark.slow
def test_with_stderr_closed_no_remark_is_among_the_output(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(64))
    for place, code in ((shm_root, 0), (shm_root / "none", 2)):
        shell = [
            "sh",
            "-c",
            'exec "$@" 2>&-',
            "sh",
            sys.executable,
            "-c",
            RUN,
            "ls",
            "--limit",
            "1",
            str(place),
        ]
        done = subprocess.run(
            shell, stdout=subprocess.PIPE, text=True, timeout=120
        )
        assert done.returncode == code and "pagoda:" not in done.stdout, (
            done.stdout
        )


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_line(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, "check", shm_root],
            stdout=full,
            stderr=-1,
            text=True,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr == "pagoda: No space left on device\n"


@pytest.mark.slow
def test_a_locale_that_cannot_write_what_is_shown_stops_no_command(
    shm_root: Path,
) -> None:
    put(host(shm_root), LLAMA, range(16))
    for command in (("top", "--once"), ("stats",)):
        done = pagoda(*command, shm_root, PYTHONIOENCODING="ascii:strict")
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        assert "host" in done.stdout
    done = pagoda("vllm", "--print", "serve", os.fsdecode(b"/models/\xff"))
    assert done.returncode == 0
    assert r"/models/\udcff" in done.stdout


def test_a_path_that_is_not_utf_8_is_as_good_as_any(
    shm_root: Path, tmp_path: Path
) -> None:
    """No command is kept from a store by the name of a directory, nor an engine."""
    odd = os.fsdecode(b"k\xff")
    put(host(shm_root / odd), LLAMA, range(16))
    with disk(tmp_path / odd) as tier:
        save(tier, LLAMA, range(48))
    recorded_tiers.add("disk", tmp_path / odd)
    assert [one.place for one in recorded_tiers.entries()] == [
        str(tmp_path / odd)
    ]
    for root in (shm_root / odd, tmp_path / odd):
        for command in (
            ["stats"],
            ["ls"],
            ["check"],
            ["explain", "--tokens", "1"],
            ["clear", "--yes"],
        ):
            verb, *options = command
            answer(verb, root, *options)
            assert done_here(verb, root, *options).returncode == 0


def test_called_from_python_it_returns_the_code(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    assert main(["check", str(shm_root)]) == 0
    assert main(["check", str(shm_root / "none")]) == 2
    assert isinstance(Ledger.attach(shm_root / "layout"), Ledger)
