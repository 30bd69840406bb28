"""Namespaces, cables and shaping work as other tests and the examples expect, and leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import netns, programs
from testbed.netns import Network, need_network, network
from testbed.patience import Patience

SENDS = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    link, _ = server.accept()
    with link:
        link.sendall(bytes(int(link.recv(16))))
"""
ASKS = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3]))
link.send(sys.argv[2].encode())
began = time.monotonic()
got = 0
while part := link.recv(1 << 20):
    got += len(part)
print(got, time.monotonic() - began)
"""
PARENT = """
import sys, time
from testbed.netns import network
with network() as net:
    place = net.place("one")
    child = place.start("sleep", "600")
    print(place.pid, child.pid, flush=True)
    time.sleep(600)
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def net() -> Iterator[Network]:
    need_network()
    with network() as net:
        yield net


def gone(pid: int) -> bool:
    try:
        state = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.slow
def test_joined_shaped_cut_and_mended(net: Network) -> None:
    near = net.place("near")
    far = net.place("far")
    cable = net.cable(near, far)
    server = far.start(
        sys.executable, "-c", SENDS, cable.far, stdout=subprocess.PIPE
    )
    assert server.stdout.readline() == b"ready\n"

    def ask(nbytes: int, patience: float = 20.0) -> float:
        process = near.start(
            sys.executable,
            "-c",
            ASKS,
            cable.far,
            str(nbytes),
            str(patience),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        said, _ = process.communicate(timeout=60)
        got, seconds = said.split() or (-1, 0)
        assert int(got) in (nbytes, -1)
        return float(seconds)

    megabit = 1e6 / 8
    assert ask(1 << 20) > 0
    cable.shape(100e6)
    took = ask(8 << 20)
    assert (
        0.8 * (8 << 20) / (100 * megabit)
        < took
        < 10.0 * (8 << 20) / (100 * megabit)
    )
    cable.shape(200e6)
    assert ask(8 << 20) < 2.0 * (8 << 20) / (100 * megabit)
    cable.cut()
    patience = Patience(10)
    assert ask(1, patience=1.0) == 0
    assert not patience.ended, patience.said()
    cable.mend()
    cable.shape(None)
    assert "tbf" not in near.run("tc", "qdisc", "show")
    assert ask(1 << 20) > 0


def test_a_place_sees_only_its_own_network(net: Network) -> None:
    place = net.place("alone")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code = (
            "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), "
            "timeout=5)"
        )
        process = place.start(
            sys.executable, "-c", code, port, stderr=subprocess.PIPE, text=True
        )
        _, said = process.communicate(timeout=30)
    assert "ConnectionRefusedError" in said
    assert "lo:" in place.run("ip", "link")


def test_nothing_is_left_behind() -> None:
    need_network()
    with pytest.raises(ZeroDivisionError), network() as net:
        place = net.place("one")
        net.cable(place, net.place("two"))
        child = place.start("sleep", "600")
        raise ZeroDivisionError
    assert child.poll() is not None
    assert gone(place.pid)
    place.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_behind_by_a_process_that_is_killed(
    how: signal.Signals,
) -> None:
    need_network()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            assert not gone(pid)
        parent.send_signal(how)
        parent.wait(60)
    finally:
        parent.kill()
        parent.communicate(timeout=60)
    patience = Patience(10)
    while not all(gone(pid) for pid in pids):
        assert not patience.ended
        time.sleep(0.02)


def test_what_is_not_permitted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    need_network()
    assert netns.why_not() is None
    with network() as net:
        place = net.place("one")
        with pytest.raises(
            netns.NotPermittedError,
            match=r"(?s)ip link set nothing up: .*needs root",
        ):
            place.run("ip", "link", "set", "nothing", "up")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(programs, "SYSTEM_DIRECTORIES", ())
    assert (
        netns.why_not()
        == "network namespaces need coreutils and iproute2 and util-linux: install them"
    )
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(unittest.SkipTest, match="iproute2"):
        need_network()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(RuntimeError, match="iproute2"):
        need_network()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become nobody")
def test_without_root_the_kernels_words_are_passed_on() -> None:
    need_network()
    code = "from testbed.netns import why_not; print(why_not())"
    command = [
        "setpriv",
        "--reuid",
        "65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        pytest.skip(
            f"nobody may not run Python from here: {done.stderr.splitlines()[-1:]}"
        )
    assert "no network namespace can be made" in done.stdout
    assert "needs root" in done.stdout
