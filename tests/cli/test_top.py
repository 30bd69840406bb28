"""`pagoda top`: one view, a live one in a real terminal, and JSON samples, over stores that come
and go.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import pytest
from rich.cells import cell_len

from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.tiers import HostTier
from testbed.patience import Patience, wait_until
from tests.cli.shelf import LLAMA, QWEN, RUN, disk, host, put, refused, save
from tests.cli.test_tables import ESCAPES, in_pipe, in_terminal, machine

__all__ = ["machine"]  # a fixture

PATIENCE = 30.0


class Terminal:
    """The command in a real terminal of 24 lines of 80 columns."""

    def __init__(
        self,
        *args: object,
        term: str = "xterm-256color",
        stdin: int | None = None,
    ) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, args)],
            stdin=theirs if stdin is None else stdin,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": term},
            start_new_session=True,
            # the terminal's own session, as in a shell
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        self.text = ""

    def until(self, pattern: str) -> None:
        """Read until what was written since the last call matches. Fails after some seconds."""
        patience = Patience(PATIENCE)
        seen = ""
        while not re.search(pattern, ESCAPES.sub("", seen)):
            assert not patience.ended, f"no {pattern!r} in\n{seen}"
            if self.has_output(0.5):
                piece = os.read(self.ours, 65536).decode(errors="replace")
                seen += piece
                self.text += piece

    def has_output(self, seconds: float) -> bool:
        """Wait for output, at most that long."""
        poll = select.poll()
        poll.register(self.ours, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def resize(self, lines: int, columns: int) -> None:
        termios.tcsetwinsize(self._theirs, (lines, columns))

    def end(self, number: signal.Signals) -> int:
        """Send the signal; return the exit code. The terminal must be as it was."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for the end; return the exit code. The terminal must be as it was."""
        code = self.process.wait(PATIENCE)
        # after a kill, another process gives it back
        wait_until(
            lambda: termios.tcgetattr(self._theirs) == self.before, PATIENCE
        )
        while self.has_output(0.2):
            self.text += os.read(self.ours, 65536).decode(errors="replace")
        assert termios.tcgetattr(self._theirs) == self.before
        assert self.text.rfind("\x1b[?25h") >= self.text.rfind("\x1b[?25l"), (
            "the cursor is hidden"
        )
        # no other screen, which a killed process would leave behind
        assert "\x1b[?1049h" not in self.text
        os.close(self._theirs)
        os.close(self.ours)
        return code


def test_one_view_has_all_tiers_and_fits(machine: Path) -> None:
    for run in (in_pipe, in_terminal):
        code, text = run("top", "--once")
        assert code == 0
        lines = text.splitlines()
        assert len(lines) <= 24 and max(map(cell_len, lines)) <= 80, text
        assert re.search(
            r"host:layout +[█░]{6,20} +3\.1 % +8\.00 KiB of +256\.00 KiB +2 chunks",
            text,
        ), text
        assert re.search(
            r"disk:[0-9a-f]{6} +[█░]{6,20} +6\.2 %", text
        ) and re.search(r"redis .*answers", text), text
        for word in (
            "policy hindsight",
            "misses: other_namespace 12.3 M",
            "drops: not_admitted",
            "from remote",
        ):
            assert word in text, text
        assert "pinned chunks: pagoda 1 in host:layout" in text
        assert "meta-llama/Llama-3.1-8B-Instruct" in text


def test_the_owners_of_most_pins_are_shown_and_the_rest_is_counted(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    held = put(ledger, LLAMA, range(64))
    for number in range(40):
        admin.pin(ledger, held[:1], f"{number} " + "a-long-name" * 20)
    admin.pin(ledger, held, "the\x1blargest")
    code, text = in_pipe("top", shm_root, "--once")
    assert code == 0 and max(map(cell_len, text.splitlines())) <= 80, text
    assert (
        "pinned chunks: the\\x1blargest 4 in host" in text
        and "and 36 more" in text
    ), text


def test_a_private_store_has_a_size_and_leaves_room_for_others(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root))
    put(host(shm_root), LLAMA, range(16))
    layout = KVLayout.opaque(16, 4096, "test")
    with closing(
        HostTier.open(layout, shm_root, 16 << 12, shared=False, populate=False)
    ) as tier:
        put(tier.ledger, QWEN, range(64))
        code, text = in_pipe("top", "--once")
    assert code == 0 and max(map(cell_len, text.splitlines())) <= 80, text
    assert re.search(
        rf"host:private-{os.getpid()} █+░+ +25\.0 % 16\.00 KiB of +64\.00 KiB +4 chunks",
        text,
    ), text
    assert re.search(r"host:layout .* 1 chunk$", text, re.MULTILINE), text


def test_the_last_requests_fit(shm_root: Path) -> None:
    ledger = host(shm_root)
    counts = {
        "asked_tokens": 1 << 20,
        "hit_tokens_host": 1 << 20,
        "hit_tokens_disk": 7,
    }
    for number in range(9):
        ledger.requests.append(
            {**counts, "hit_tokens_remote": number}, LLAMA.root, "other_namespace"
        )
    code, text = in_pipe("top", shm_root, "--once")
    lines = [line for line in text.splitlines() if "other_namespace" in line]
    assert code == 0 and max(map(cell_len, text.splitlines())) <= 80, text
    assert (
        len(lines) == 5
        and "1,048,576" in lines[0]
        and str(os.getpid()) in lines[0]
    ), text
    assert re.search(r"last requests .*why not more", text), text
    (sample,) = in_pipe("top", shm_root, "--once", "--json")[1].splitlines()
    request = json.loads(sample)["stores"][0]["requests"][0]
    assert request["namespace"] == LLAMA.root.hex()[:32]
    assert request["hit_tokens"]["remote"] == 8


def test_json_is_one_object_a_sample(machine: Path) -> None:
    code, text = in_pipe("top", "--json", "--once")
    (line,) = text.splitlines()
    found = json.loads(line)
    assert code == 0
    assert [store["tier"] for store in found["stores"]] == ["host", "disk"]
    assert found["stores"][0]["gauges"]["ready"] == 2
    assert found["stores"][0]["per_second"] is None
    assert found["remotes"][0]["tier"] == "redis"
    assert found["remotes"][0]["error"] == ""


def test_no_store_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_HOST_PATH", str(tmp_path / "none"))
    code, text = in_pipe("top", "--once")
    assert code == 0
    assert len(text.splitlines()) == 2
    assert "nothing is stored yet" in text
    assert "no such directory" in refused("top", tmp_path / "none", "--once")
    assert "--interval" in refused("top", "--interval", 0)


@pytest.mark.slow
def test_rates_and_stores_that_come_and_go(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root, name="a")
    put(ledger, LLAMA, range(32))
    command = [
        sys.executable,
        "-c",
        RUN,
        "top",
        str(shm_root),
        "--json",
        "--interval",
        "0.2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None

        def sample() -> dict[str, list[dict[str, dict[str, float]]]]:
            assert process.stdout is not None
            return json.loads(process.stdout.readline())  # type: ignore[no-any-return]

        assert len(sample()["stores"]) == 1
        ledger.count({"lookups": 100, "loaded_bytes": 1 << 20})
        patience = Patience(PATIENCE)
        while not (seen := sample())["stores"][0]["per_second"]["lookups"]:
            assert not patience.ended
        rates = seen["stores"][0]["per_second"]
        assert 10 < rates["lookups"] <= 510
        assert rates["loaded_bytes"] > rates["lookups"]
        second = host(shm_root, name="b")
        while len(sample()["stores"]) != 2:
            assert not patience.ended
        ledger.close()
        second.close()
        shutil.rmtree(shm_root)
        while (seen := sample())["stores"]:
            assert not patience.ended
        put(host(shm_root, name="c"), LLAMA, range(16))
        while len(sample()["stores"]) != 1:
            assert not patience.ended
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(PATIENCE) == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)],
)
def test_live_in_a_terminal_and_its_end(
    shm_root: Path, number: signal.Signals, code: int
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(32))
    live = Terminal("top", shm_root, "--interval", 0.2)
    live.until("host:layout .* 2 chunks")
    put(ledger, LLAMA, range(64))
    live.until("host:layout .* 4 chunks")
    assert live.end(number) == code
    assert (
        max(cell_len(line) for line in ESCAPES.sub("", live.text).splitlines())
        <= 80
    )
    assert "Traceback" not in live.text


@pytest.mark.slow
def test_a_dumb_terminal_gets_a_view_below_the_other(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(32))
    live = Terminal("top", shm_root, "--interval", 0.2, term="dumb")
    live.until(r"(?s)(PagodaKV .*){3}")
    assert live.end(signal.SIGINT) == 130
    assert "\x1b[2K" not in live.text
    assert "\x1b[1A" not in live.text


def test_a_broken_store_is_named_and_hides_no_other(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(host(shm_root, name="good"), LLAMA, range(16))
    put(host(shm_root, name="bad"), LLAMA, range(16))
    with disk(tmp_path) as tier:
        save(tier, LLAMA, range(16))
        assert admin.gauges(tier.ledger)["ready"] == 1
    (shm_root / "bad" / "state").write_bytes(b"{}")
    code, text = in_pipe("top", shm_root, "--once")
    assert code == 1
    assert re.search("host:good .* 1 chunk", text)
    assert f"{shm_root}/bad: " in text
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root / "nothing"))
    # longer than a name can be
    monkeypatch.setenv("PAGODA_DISK_PATH", str(tmp_path / ("x" * 300)))
    monkeypatch.setenv("PAGODA_DISK_SIZE", "1GiB")
    code, text = in_pipe("top", "--once")
    assert code == 1
    assert "File name too long" in text
