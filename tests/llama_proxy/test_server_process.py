"""The process of a real llama-server: it starts, it ends, and it never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda_tools.llama_proxy import server_process
from pagoda_tools.llama_proxy.server_process import (
    ServerFailed,
    ServerProcess,
    free_port,
)
from pagoda_tools.llama_proxy.slot_directory import remove_dead, slot_directory
from testbed.llama_servers import BUILDS
from testbed.patience import wait_until
from testbed.tiny_gguf import write_model
from tests.llama_proxy.server_kit import arguments_for, build_of, ends

# a program in place of the server that never answers
SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def server_of(name: str, model: Path) -> ServerProcess:
    build = build_of(name)
    return ServerProcess(
        lambda port: [*build.program, *arguments_for(model, port)],
        build.environment,
    )


def run(
    server: ServerProcess, work: Callable[[ServerProcess], Awaitable[None]]
) -> list[str]:
    """Start a server, wait until it is ready, work, and stop it; return what was said."""
    said: list[str] = []

    async def whole() -> None:
        try:
            await server.start()
            await server.ready(said.append)
            await work(server)
        finally:
            await server.stop()

    asyncio.run(whole())
    return said


async def nothing(server: ServerProcess) -> None:
    """No work."""


def status(port: int, path: str, key: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


@pytest.mark.parametrize("name", BUILDS)
def test_a_server_starts_with_a_key_of_its_own_and_ends(
    name: str, models: Path
) -> None:
    server = server_of(name, write_model(models))
    pids: list[int] = []

    async def look(server: ServerProcess) -> None:
        pids.append(server.pid)
        assert server.how_it_ended == ""
        ask = asyncio.to_thread
        assert await ask(status, server.port, "/slots", server.key) == 200
        assert await ask(status, server.port, "/slots") == 401
        assert await ask(status, server.port, "/slots", "0" * 64) == 401
        words = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert server.key.encode() not in words
        # the signals of a terminal go to its process group
        assert os.getpgid(server.pid) == server.pid
        assert os.getsid(server.pid) == server.pid

    run(server, look)
    assert server.ended.is_set()
    assert ends(pids[0])
    assert len(server.key) == 64
    assert server.how_it_ended


@pytest.mark.parametrize("name", BUILDS)
def test_a_model_that_cannot_be_read_ends_the_start(
    name: str, tmp_path: Path
) -> None:
    server = server_of(name, tmp_path / "missing.gguf")
    with pytest.raises(ServerFailed, match=r"exit code 1 before it answered"):
        run(server, nothing)


def test_a_server_that_ends_while_it_serves_is_noticed(models: Path) -> None:
    server = server_of("B", write_model(models))

    async def kill(server: ServerProcess) -> None:
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.wait_for(server.ended.wait(), 120)

    run(server, kill)
    assert server.how_it_ended == "llama-server was ended by SIGKILL"


def test_a_long_load_is_told_and_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_process, "FIRST_WORD_SECONDS", 0.0)
    server = ServerProcess(lambda port: SLEEPS, dict(os.environ))
    said: list[str] = []

    async def whole() -> None:
        await server.start()
        waiting = asyncio.create_task(server.ready(said.append))
        while not said:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await server.stop()
        await server.stop()  # once more does nothing

    asyncio.run(whole())
    assert said[0].startswith("llama-server has been loading for ")
    assert said[0].endswith(" s (it does not listen yet)")
    assert len(said) == 1
    assert server.how_it_ended == "llama-server was ended by SIGTERM"


def test_a_server_that_ignores_its_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.05)
    deaf = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "open(sys.argv[1], 'w').close(); time.sleep(600)"
    )

    async def whole(flag: Path) -> ServerProcess:
        command = [sys.executable, "-S", "-c", deaf, str(flag)]
        server = ServerProcess(lambda port: command, dict(os.environ))
        await server.start()
        await asyncio.to_thread(wait_until, flag.exists)
        await server.stop()
        return server

    with slot_directory() as directory:
        server = asyncio.run(whole(directory / "flag"))
    assert server.how_it_ended == "llama-server was ended by SIGKILL"


def test_what_cannot_be_run_is_said() -> None:
    server = ServerProcess(lambda port: ["/nonexistent"], dict(os.environ))
    with pytest.raises(ServerFailed, match="exit code 1"):
        run(server, nothing)


def test_the_server_gets_the_signals_of_a_fresh_process() -> None:
    """What Python ignores, its children would go on to ignore."""
    shell = 'grep SigIgn /proc/self/status | cut -f2 | tr -d "\\n" > "$0"; exit 3'

    async def whole(file: Path) -> None:
        command = ["/bin/sh", "-c", shell, str(file)]
        server = ServerProcess(lambda port: command, dict(os.environ))
        await server.start()
        await server.ended.wait()
        await server.stop()
        assert server.how_it_ended == "llama-server ended with exit code 3"

    with slot_directory() as directory:
        asyncio.run(whole(directory / "ignored"))
        ignored = int((directory / "ignored").read_text(), 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored >> (number - 1) & 1


def test_another_server_on_the_port_is_not_taken_for_ours(models: Path) -> None:
    """Between the choice of a port and its use another program may take it."""
    build = build_of("B")
    other = free_port()
    command = [*build.program, *arguments_for(write_model(models), other)]
    process = subprocess.Popen(command, env=build.environment)
    try:
        wait_until(lambda: _answers(other))

        async def whole() -> None:
            server = ServerProcess(lambda port: SLEEPS, dict(os.environ))
            try:
                await server.start()
                server.port = other
                with pytest.raises(ServerFailed, match="is not the llama-server"):
                    await server.ready(print)
            finally:
                await server.stop()

        asyncio.run(whole())
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return status(port, "/health") == 200
    except OSError:
        return False


def test_a_port_that_was_taken_meanwhile_is_replaced(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_of("B")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        ports = [first]
        monkeypatch.setattr(
            server_process,
            "free_port",
            lambda: ports.pop() if ports else free_port(),
        )
        server = ServerProcess(
            lambda port: [
                *build.program,
                *arguments_for(write_model(models), port),
            ],
            build.environment,
        )
        run(server, nothing)
    assert server.port != first


def test_a_router_is_refused(tmp_path: Path) -> None:
    build = build_of("B")
    server = ServerProcess(
        lambda port: [
            *build.program,
            "--port",
            str(port),
            "--models-dir",
            str(tmp_path),
        ],
        build.environment | {"LLAMA_CACHE": str(tmp_path)},
    )
    with pytest.raises(ServerFailed, match="router"):
        run(server, nothing)


# ---- the parent ends

PARENT = """
import asyncio, json, sys
from pagoda_tools.llama_proxy.server_process import ServerProcess
command, environment, wait = json.loads(sys.argv[1])
async def main():
    server = ServerProcess(
        lambda port: [word.replace("PORT", str(port)) for word in command], environment
    )
    await server.start()
    if wait:
        await server.ready(print)
    print(server.pid, flush=True)
    await server.ended.wait()
asyncio.run(main())
"""


def parent(
    command: list[str], environment: dict[str, str], *, ready: bool
) -> tuple[subprocess.Popen[str], int]:
    """Start a process that starts a server; return it and the server's process id."""
    words = json.dumps([command, environment, ready])
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().isdecimal():
            return process, int(line)
    process.kill()
    raise AssertionError("the server did not start")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_the_server_dies_with_a_killed_parent(name: str, models: Path) -> None:
    build = build_of(name)
    command = [*build.program, *arguments_for(write_model(models), 0)]
    command[command.index("0", command.index("--port"))] = "PORT"
    process, pid = parent(command, build.environment, ready=True)
    try:
        process.kill()
        process.wait()
        assert ends(pid)
    finally:
        _kill(pid)


def test_a_server_that_ignores_signals_dies_too_also_at_once(
    tmp_path: Path,
) -> None:
    deaf = (
        "import signal, time\n"
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-S", "-c", deaf]
    # while the launcher may not have become the server yet
    process, pid = parent(command, dict(os.environ), ready=False)
    try:
        process.kill()
        process.wait()
        assert ends(pid)
    finally:
        _kill(pid)


def _kill(pid: int) -> None:
    """Leave nothing behind if the test has failed. The process is a child of init by then."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return
    if b"llama" in words or b"signal" in words:
        os.kill(pid, signal.SIGKILL)


# ---- the directory


def test_the_directory_is_ours_alone_and_goes_at_the_end() -> None:
    with slot_directory() as directory:
        assert directory.parent == Path("/dev/shm")
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "state").write_bytes(b"x")
    assert not directory.exists()


def test_the_umask_does_not_matter(tmp_path: Path) -> None:
    old = os.umask(0o277)
    try:
        with slot_directory() as directory:
            assert directory.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


HOLDER = """
import sys, time
from pathlib import Path
from pagoda_tools.llama_proxy.slot_directory import slot_directory
with slot_directory() as directory:
    (directory / "state").write_bytes(bytes(1000))
    print(directory, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not() -> None:
    def hold() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    dead, left = hold()
    alive, kept = hold()
    try:
        dead.kill()
        dead.wait()
        assert (left / "state").exists()
        with slot_directory():
            assert not left.exists()
            assert (kept / "state").exists()
    finally:
        alive.kill()
        alive.wait()
        remove_dead()
    assert not kept.exists()


def test_only_memory_is_used(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="--slot-save-path DIR"),
        slot_directory(Path("/var/tmp")),
    ):
        pass
    with (
        pytest.raises(StoreError, match="--slot-save-path DIR"),
        slot_directory(Path("/dev/shm/pagoda-test-none")),
    ):
        pass


def test_a_directory_that_is_swept_while_it_is_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. made; 2. another process finds no lock and removes it; 3. the lock is taken."""
    lock = fcntl.flock
    swept = []

    def late(fd: int, how: int) -> None:
        if not swept:
            swept.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.rmdir(swept[0])
        lock(fd, how)

    monkeypatch.setattr(
        "pagoda_tools.llama_proxy.slot_directory.remove_dead", lambda parent: None
    )
    monkeypatch.setattr(fcntl, "flock", late)
    with slot_directory() as directory:
        assert directory.is_dir()
        assert str(directory) != swept[0]
