"""`pagoda clear`: removes from every tier what was named, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache, Config, KVLayout
from pagoda.base import recorded_tiers
from pagoda.ledger import admin
from pagoda.transfer import BlockKV
from tests.cli.shelf import (
    LLAMA,
    QWEN,
    answer,
    disk,
    done_here,
    host,
    pagoda,
    put,
    refused,
    run_here,
    save,
    writer,
)


@pytest.mark.slow
def test_everything_in_all_tiers(shm_root: Path, tmp_path: Path) -> None:
    ledger = host(shm_root / "host")
    put(ledger, LLAMA, range(64))
    put(ledger, QWEN, range(32))
    with disk(tmp_path / "disk") as tier:
        save(tier, LLAMA, range(48))
        where = {
            "PAGODA_HOST_PATH": str(shm_root / "host"),
            "PAGODA_DISK_PATH": str(tmp_path / "disk"),
            "PAGODA_DISK_SIZE": "1GiB",
        }
        found = answer("clear", "--yes", **where)
        assert found["cleared"] == 9
        assert found["failed"] == {}
        assert (
            admin.gauges(ledger)["ready"]
            == admin.gauges(tier.ledger)["ready"]
            == 0
        )
    shown = pagoda("clear", "--yes", **where)
    assert shown.returncode == 0
    assert "host" in shown.stdout
    assert "disk" in shown.stdout


def test_one_tenant_only(shm_root: Path) -> None:
    ledger = host(shm_root)
    mine = LLAMA.with_(salt="mine")
    theirs = LLAMA.with_(salt="theirs")
    put(ledger, mine, range(32))
    kept = put(ledger, theirs, range(48))
    assert (
        answer("clear", shm_root, "--yes", "--namespace", mine.root.hex()[:12])[
            "cleared"
        ]
        == 2
    )
    assert len(ledger.match_prefix(kept).slots) == 3


def test_one_model_only(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(64))
    kept = put(ledger, QWEN, range(32))
    assert answer("clear", shm_root, "-y", "--model", "llama")["cleared"] == 4
    assert len(ledger.match_prefix(kept).slots) == 2


def test_nothing_goes_without_a_yes_or_for_a_wrong_name(shm_root: Path) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, range(64))
    put(ledger, LLAMA.with_(salt="other"), range(16))
    assert "--yes" in refused("clear", shm_root)
    assert "--yes" in refused("clear", shm_root, stdin="y\n")
    assert "did you mean llama?" in refused(
        "clear", shm_root, "--yes", "--model", "lama"
    )
    assert "no namespace begins so" in refused(
        "clear", shm_root, "--yes", "--namespace", "0" * 64
    )
    assert "hex name" in refused("clear", shm_root, "--yes", "--namespace", "")
    assert len(ledger.match_prefix(keys).slots) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "code", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 4), (b"\x03", 130, 4)]
)
def test_on_a_terminal_it_asks(
    shm_root: Path, typed: bytes, code: int, left: int
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(64))
    ours, theirs = pty.openpty()
    program = "import sys; from pagoda_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "clear", str(shm_root)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = b""
    while b"?" not in seen:
        seen += os.read(ours, 1000)
    os.write(ours, typed)
    # select() knows 1,024 files at most, and a process that ran many tests has more
    waiting = select.poll()
    waiting.register(ours, select.POLLIN)
    try:
        while True:
            while not waiting.poll(10_000):
                # a Ctrl-C between the prompt and the read is only noticed at the next key
                os.write(ours, typed)
            seen += os.read(ours, 1000)
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(120) == code, seen
    assert b"ALL chunks" in seen
    assert b"Traceback" not in seen
    assert admin.gauges(ledger)["ready"] == left


def test_a_beginning_of_two_namespaces_clears_neither(shm_root: Path) -> None:
    ledger = host(shm_root)
    namespaces = {}
    for number in range(17):  # two of 17 names begin with the same digit
        namespace = LLAMA.with_(salt=str(number))
        put(ledger, namespace, range(16))
        namespaces.setdefault(namespace.root.hex()[0], []).append(namespace)
    digit = next(
        digit for digit, several in namespaces.items() if len(several) > 1
    )
    assert "write more digits" in refused(
        "clear", shm_root, "--yes", "--namespace", digit
    )
    assert admin.gauges(ledger)["ready"] == 17


def test_a_store_that_fails_is_named_and_the_others_are_cleared(
    shm_root: Path,
) -> None:
    put(host(shm_root, name="bad"), LLAMA, range(16))
    good = host(shm_root, name="good")
    put(good, LLAMA, range(16))
    (shm_root / "bad" / "state").write_bytes(b"{}")
    found = answer("clear", shm_root, "--yes", code=1)
    assert found["cleared"] == 1
    assert list(found["failed"]) == [str(shm_root / "bad")]  # type: ignore[call-overload]
    assert admin.gauges(good)["ready"] == 0


def test_clearing_while_another_process_stores(shm_root: Path) -> None:
    with writer(shm_root) as process:
        assert answer("clear", shm_root, "--yes")["failed"] == {}
        assert process.poll() is None
        assert answer("check", shm_root)["ok"] is True


def test_tiers_that_no_configuration_names_are_cleared(
    shm_root: Path, tmp_path: Path
) -> None:
    """Those that were given as flags or keywords, as `pagoda vllm --disk-path ...` does."""
    layout = KVLayout.opaque(16, 4096, "test")
    config = Config(
        chunk_tokens=16,
        host_path=str(shm_root),
        host_size="1MiB",
        disk_path=str(tmp_path),
        disk_size="1MiB",
    )
    tokens = list(range(64))
    kv = BlockKV(np.ones((4, 4096), np.uint8), layout)
    with Cache(config, namespace=LLAMA, layout=layout) as cache:
        cache.store(tokens, kv)
        assert cache.flush(60)
        assert cache.lookup(tokens, tiers=["disk"]).num_tokens == 64
        assert answer("clear", "--yes")["cleared"] == 8
        assert cache.lookup(tokens).num_tokens == 0
    assert {store["tier"] for store in answer("stats")["stores"]} == {
        "host",
        "disk",
    }  # type: ignore[attr-defined]


def test_with_a_configuration_file_only_its_tiers(
    shm_root: Path, tmp_path: Path
) -> None:
    mine = host(shm_root / "mine")
    other = host(shm_root / "other")
    for ledger in (mine, other):
        put(ledger, LLAMA, range(64))
    recorded_tiers.add("host", shm_root / "other")
    recorded_tiers.add("remote", "redis://127.0.0.1:1/0")  # nobody listens there
    file = tmp_path / "mine.toml"
    file.write_text(f'host_path = "{shm_root / "mine"}"\n')
    found = answer("clear", "--yes", "--config", file)
    assert found["cleared"] == 4
    assert found["failed"] == {}
    assert admin.gauges(mine)["ready"] == 0
    assert admin.gauges(other)["ready"] == 4


def test_a_remote_tier_whose_password_is_not_kept_is_named(
    shm_root: Path,
) -> None:
    put(host(shm_root), LLAMA, range(64))
    recorded_tiers.add("host", shm_root)
    recorded_tiers.add("remote", "redis://:***@127.0.0.1:1/0")
    code, out, err = run_here("clear", "--yes", "--json")
    found = json.loads(out)
    assert found["cleared"] == 4
    assert list(found["failed"]) == ["redis://:***@127.0.0.1:1/0"]
    # it is in no configuration: a remark
    assert code == 0
    assert "not cleared: redis://:***@127.0.0.1:1/0" in err
    looked = done_here("stats")
    assert looked.returncode == 0
    assert "redis://:***@127.0.0.1:1/0" in looked.stderr
