"""`pagoda llama-server`: what it prints, what it refuses, and a whole run with real servers."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from pagoda.config import Config
from pagoda_tools.cli.llama_server import _check, _Proxy
from testbed.llama_servers import llama_server
from testbed.servers import free_port
from testbed.tiny_gguf import write_model
from tests.cli.shelf import RUN, done_here, refused
from tests.llama_proxy.server_kit import build_of, ends

ADDED = "--slots --no-cache-idle-slots --no-context-shift --cache-reuse 0 --cache-ram 0"
EMPTY_PATH = {"PATH": "/nonexistent"}


def with_binary() -> dict[str, str]:
    """Return the variables with which build B is on the PATH."""
    build = build_of("B")
    folder = str(Path(build.program[0]).parent)
    return {"PATH": f"{folder}:/usr/bin:/bin", "LD_LIBRARY_PATH": folder}


# ---- what would be started


def printed(*words: object, **variables: str) -> tuple[list[str], str]:
    """Return the command that would be started, and where the proxy would listen."""
    done = done_here("llama-server", "--print", *words, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    command, listen = done.stdout.splitlines()
    return shlex.split(command), listen


def test_the_command_is_printed_without_secrets() -> None:
    words = ["-m", "a b.gguf", "--port", "9000", "--api-key", "key"]
    command, listen = printed(
        "--", "llama-server", *words, "--hf-token", "token", **with_binary()
    )
    assert command == [
        *("llama-server", "-m", "a b.gguf", "--hf-token", "..."),
        *("--host", "127.0.0.1", "--port", "PORT", "--slot-save-path", "DIR"),
        *ADDED.split(),
    ]
    assert listen == "listen at http://127.0.0.1:9000"


def test_a_path_and_no_program_at_all() -> None:
    program = build_of("B").program[0]
    command, _ = printed("--", program, "-m", "x", **EMPTY_PATH)
    assert command[:3] == [program, "-m", "x"]
    command, _ = printed("--", "-m", "x", **with_binary())
    assert command[:3] == ["llama-server", "-m", "x"]


def test_without_a_binary_the_package_serves() -> None:
    build_of("A")
    command, _ = printed("--", "llama-server", "-m", "x", **EMPTY_PATH)
    module = ["python", "-P", "-m", "pagoda_tools.llama_proxy.in_process_server"]
    assert command[:6] == [*module, "-m", "x"]
    assert command[-len(ADDED.split()) :] == ADDED.split()


def test_listen_counts_more_than_the_servers_options() -> None:
    words = ["--", "-m", "x", "--host", "0.0.0.0", "--port", "9"]
    assert printed(*words, **with_binary())[1] == "listen at http://0.0.0.0:9"
    listen = printed("--listen", "[::1]:7", *words, **with_binary())[1]
    assert listen == "listen at http://[::1]:7"


def test_the_users_directory_is_shown() -> None:
    words = ["--", "-m", "x", "--slot-save-path", "/dev/shm/pagoda-test-mine"]
    command, _ = printed(*words, **with_binary())
    at = command.index("--slot-save-path")
    assert command[at + 1] == "/dev/shm/pagoda-test-mine"
    assert command.count("--slot-save-path") == 1
    assert not Path("/dev/shm/pagoda-test-mine").exists()


def test_attach_is_printed() -> None:
    done = done_here(
        *("llama-server", "--print", "--attach", "http://127.0.0.1:8080"),
        *("--slot-save-path", "/x", "--listen", "127.0.0.1:8081"),
        LLAMA_API_KEY="key",
    )
    assert done.stdout == (
        "attach to http://127.0.0.1:8080\nlisten at http://127.0.0.1:8081\n"
    )


# ---- what is refused

REFUSED = [
    (
        "",
        "write the server's command: pagoda llama-server -- llama-server -m FILE",
    ),
    ("-m x.gguf", "-m: no such option (llama-server's own go after --"),
    (
        "-- -m x --disk-path /kv",
        "--disk-path is an option of pagoda: write it before --",
    ),
    ("-- -m x --no-worth-it", "--no-worth-it is an option of pagoda"),
    ("--lisen x", "--lisen: no such option"),
    ("-- nosuchserver -m x", "nosuchserver is not on the PATH"),
    ("-- /etc/passwd -m x", "/etc/passwd is no program that can be run"),
    ("-- /bin/true -m x", "/bin/true is no llama-server that can save slots"),
    ("-- llama-server", "as a router, without a model"),
    ("-- -m x --swa-full", "--swa-full: "),
    (
        "-- -m x --cache-ram 64 --api-key a,b",
        "--cache-ram tells API keys of each other",
    ),
    ("--listen 8080 -- -m x", "--listen 8080: write HOST:PORT"),
    ("--state-bytes many -- -m x", "--state-bytes many: "),
    ("--state-bytes auto -- -m x", "--state-bytes auto: "),
    ("--host-size many -- -m x", "host_size"),
    ("--host-size 0 -- -m x", "nothing would be kept"),
    ("--slot-save-path /x -- -m x", "--slot-save-path is for --attach"),
    ("--adapters-are-fixed -- -m x", "--adapters-are-fixed is for --attach"),
    ("--attach http://127.0.0.1:1", "--attach needs --slot-save-path DIR"),
    (
        "--attach http://127.0.0.1:1 --slot-save-path /x -- -m x",
        "--attach is for a server that runs",
    ),
    (
        "--attach https://127.0.0.1:1 --slot-save-path /x",
        "use a URL such as http://127.0.0.1:8080",
    ),
    (
        "--attach http://127.0.0.1:8080 --slot-save-path /x",
        "the proxy cannot listen on port 8080 too",
    ),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_wrong_use_is_one_line(words: str, why: str) -> None:
    done = done_here("llama-server", *words.split(), **with_binary())
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert why in done.stderr


def test_an_option_that_the_package_lacks_is_named_before_the_start() -> None:
    build_of("A")
    said = refused(
        "llama-server", "--", "-m", "x", "--grammar", "y", **EMPTY_PATH
    )
    assert "--grammar: the server of xllamacpp has no such option" in said
    assert "put llama-server on the PATH" in said


def test_a_port_in_use_is_told_before_the_server_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused(
            *("llama-server", "--host-size", "1MiB", "--listen", listen),
            *("--", "-m", "/nonexistent"),
            **with_binary(),
        )
    assert f"cannot listen at http://{listen}: Address already in use" in said


def test_a_tier_that_cannot_be_opened_is_told_before_the_server_starts() -> None:
    done = done_here(
        *("llama-server", "--host-size", "1TiB", "--listen", "127.0.0.1:0"),
        *("--", "-m", "/nonexistent"),
        **with_binary(),
    )
    assert done.returncode == 1
    assert "would fit" in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    ("host", "keys", "is_told"),
    [("0.0.0.0", [], True), ("0.0.0.0", ["k"], False), ("127.0.0.1", [], False)],
)
def test_a_model_that_is_open_to_the_network_is_told(
    host: str,
    keys: list[str],
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy = _Proxy(
        listen=None,
        allow_hosts=(),
        share_all=False,
        state_bytes=None,
        config=Config(host_size="1MiB"),
        print_only=False,
    )
    _check(proxy, (host, 0), keys)
    assert ("the network can use the model" in capsys.readouterr().err) is is_told


@pytest.mark.slow
def test_what_the_server_prints_is_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "llama-server", "--", "--version"],
        env={**os.environ, **with_binary()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert "version:" in done.stdout + done.stderr


def test_the_help_fits_and_names_everything() -> None:
    done = done_here("llama-server", "--help", COLUMNS="80")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "pagoda llama-server [OPTIONS] -- llama-server ARGS" in done.stdout
    for option in (
        *("--listen", "--allow-host", "--share-all", "--state-bytes", "--print"),
        *("--attach", "--slot-save-path", "--adapters-are-fixed"),
        *("--host-size", "--disk-path", "--remote", "--min-hit-tokens"),
    ):
        assert re.search(rf"{option}\s", done.stdout), option


# ---- whole runs


LETTERS = [[token, False] for token in range(320) if not 100 <= token < 126]


# a child of nohup, which the tests may be, ignores that its terminal is closed
HANGS_UP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "


class Run:
    """A running command."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """Return the first line of its output with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(self.lines))

    @property
    def server(self) -> int:
        """The process id of the server: the only child."""
        at = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        (pid,) = map(int, Path(at).read_text().split())
        return pid

    def end(self) -> int:
        """Read what is left of the output; return the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        return self.process.wait(120)

    def ask(self, key: str = "", host: str = "") -> tuple[int, dict[str, object]]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=120
        )
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if host:
            headers["Host"] = host
        body = {"prompt": "hello " * 60, "n_predict": 2, "logit_bias": LETTERS}
        with closing(connection):
            connection.request("POST", "/completion", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())


@contextmanager
def running(
    tmp_path: Path, *words: object, build: str = "B", **variables: str
) -> Iterator[Run]:
    """Run the command; kill it at the end, which ends its server."""
    port = free_port()
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PAGODA_", "LLAMA_"))
    }
    path = with_binary() if build == "B" else EMPTY_PATH
    options = ["--listen", f"127.0.0.1:{port}", "--host-size", "0"]
    options += ["--disk-path", str(tmp_path / "kv"), "--disk-size", "64MiB"]
    options += ["--chunk-tokens", "64", "--no-worth-it"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HANGS_UP + RUN,
            "llama-server",
            *options,
            *map(str, words),
        ],
        env={**clean, **path, "HOME": str(tmp_path), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield Run(process, port)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def small(model: Path) -> list[str]:
    return ["-m", str(model), "-t", "1", "-c", "1024", "-np", "1", "--no-warmup"]


def directories(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"pagoda-llama-{os.getuid()}-{pid}-*"))


@pytest.mark.parametrize(
    "build", [pytest.param("A", marks=pytest.mark.slow), "B"]
)
def test_a_run_from_the_start_to_ctrl_c(
    build: str, models: Path, tmp_path: Path
) -> None:
    words = small(write_model(models))
    with running(tmp_path, "--", *words, build=build) as run:
        line = run.wait_for("pagoda llama-server: ")
        assert f"http://127.0.0.1:{run.port}" in line
        started = [line for line in run.lines if "starting llama-server" in line]
        assert len(started) == 1
        assert "its own RAM cache is off" in started[0]
        assert run.ask()[0] == 200
        server = run.server
        assert len(directories(run.process.pid)) == 1
        # the terminal's Ctrl-C goes to the whole process group
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 0
        assert ends(server)
        assert directories(run.process.pid) == []
    # what the slot had was saved before the server was ended
    with running(tmp_path, "--", *words, build=build) as run:
        run.wait_for("pagoda llama-server: ")
        status, answer = run.ask()
        assert status == 200
        timings = answer["timings"]
        assert isinstance(timings, dict)
        assert timings["cache_n"] >= 256


@pytest.mark.parametrize(
    "build", [pytest.param("A", marks=pytest.mark.slow), "B"]
)
def test_whose_lines_are_in_the_log(
    build: str, models: Path, tmp_path: Path
) -> None:
    """Those of the server and ours are in one stream."""
    words = ["--state-bytes", "50000", "--", *small(write_model(models))]
    with running(tmp_path, *words, build=build) as run:
        run.wait_for("pagoda llama-server: ")
        assert run.ask()[0] == 200
        line = run.wait_for("WARNING")
        run.process.terminate()
        assert run.end() == 0
    assert line.startswith("pagoda: ")
    assert "raise state_bytes (--state-bytes)" in line
    # the start is no attempt of a stranger
    assert not [line for line in run.lines if "Invalid API Key" in line]


@pytest.mark.slow
def test_windows_without_checkpoints_are_told_once_at_the_start(
    models: Path, tmp_path: Path
) -> None:
    words = small(write_model(models, "gemma3"))
    with running(tmp_path, "--", *words) as run:
        line = run.wait_for("pagoda llama-server: ")
        assert "nothing is stored or loaded, as the line above says" in line
        assert run.ask()[0] == 200
        run.process.terminate()
        assert run.end() == 0
    told = [line for line in run.lines if "no checkpoints" in line]
    assert len(told) == 1
    assert told[0].startswith("pagoda: ")


@pytest.mark.slow
def test_who_ends_it_is_told_what_the_end_waits_for(
    models: Path, tmp_path: Path
) -> None:
    words = [*small(write_model(models)), "-c", "16384"]
    with running(tmp_path, "--", *words) as run:
        run.wait_for("pagoda llama-server: ")
        connection = http.client.HTTPConnection(
            "127.0.0.1", run.port, timeout=120
        )
        body = {"prompt": "hello", "stream": True, "logit_bias": LETTERS}
        with closing(connection):
            text = json.dumps(body)
            connection.request("POST", "/completion", text)
            assert connection.getresponse().read(1)
            run.process.send_signal(signal.SIGINT)
            line = run.wait_for("ending")
            assert "running answers have 5 s" in line
            assert "again ends at once" in line
            run.process.send_signal(signal.SIGINT)
            assert run.end() == 130


@pytest.mark.slow
def test_a_closed_terminal_saves_and_ends(models: Path, tmp_path: Path) -> None:
    words = ["--allow-host", "a.test", "--", *small(write_model(models))]
    with running(tmp_path, *words) as run:
        run.wait_for("pagoda llama-server: ")
        assert run.ask()[0] == 200
        assert [run.ask(host=name)[0] for name in ("a.test", "b.test")] == [
            200,
            403,
        ]
        run.process.send_signal(signal.SIGHUP)
        assert run.end() == 0
        assert directories(run.process.pid) == []
    assert any((tmp_path / "kv").rglob("*"))


@pytest.mark.slow
def test_the_users_keys_are_the_proxys(models: Path, tmp_path: Path) -> None:
    words = [*small(write_model(models)), "--api-key", "first"]
    with running(tmp_path, "--", *words, LLAMA_API_KEY="second") as run:
        run.wait_for("pagoda llama-server: ")
        assert [run.ask(key)[0] for key in ("first", "second", "third", "")] == [
            *(200, 200, 401, 401)
        ]
        words_of_server = Path(f"/proc/{run.server}/cmdline").read_bytes()
        assert b"first" not in words_of_server
        run.process.terminate()
        assert run.end() == 0


@pytest.mark.slow
def test_a_killed_command_leaves_no_server(models: Path, tmp_path: Path) -> None:
    words = small(write_model(models))
    with running(tmp_path, "--", *words) as run:
        run.wait_for("pagoda llama-server: ")
        server = run.server
        run.process.kill()
        run.process.wait()
        assert ends(server)
        assert len(directories(run.process.pid)) == 1
    with running(tmp_path, "--", *words) as next_run:
        next_run.wait_for("pagoda llama-server: ")
        assert directories(run.process.pid) == []
        next_run.process.terminate()
        assert next_run.end() == 0


@pytest.mark.slow
def test_a_server_that_ends_ends_the_command(
    models: Path, tmp_path: Path
) -> None:
    with running(tmp_path, "--", *small(write_model(models))) as run:
        run.wait_for("pagoda llama-server: ")
        os.kill(run.server, signal.SIGKILL)
        assert run.end() == 1
        assert run.lines[-1] == (
            "pagoda: llama-server was ended by SIGKILL: its output above says why\n"
        )
        assert directories(run.process.pid) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with running(tmp_path, "--", *small(tmp_path / "missing.gguf")) as run:
        assert run.end() == 1
        assert "ended with exit code 1 before it answered" in run.lines[-1]
        assert run.lines[-1].startswith("pagoda: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_a_load_can_be_interrupted(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """A program in place of the server, which loads for ever."""
    program = tmp_path / "llama-server"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --help ]; then echo "--slot-save-path PATH"; exit 0; fi\n'
        "echo loads; exec sleep 600\n"
    )
    program.chmod(0o755)
    with running(tmp_path, "--", program, "-m", "x") as run:
        run.wait_for("loads")
        server = run.server
        os.killpg(run.process.pid, number)
        assert run.end() == code
        assert ends(server)
        assert directories(run.process.pid) == []
        assert "Traceback" not in "".join(run.lines)


@pytest.mark.slow
def test_attach_to_a_server_that_runs(models: Path, tmp_path: Path) -> None:
    with llama_server(write_model(models), "B", key="own") as server:
        words = ["--attach", server.url, "--slot-save-path", server.states]
        with running(tmp_path, *words, LLAMA_API_KEY="own") as run:
            run.wait_for("pagoda llama-server: ")
            assert [run.ask(key)[0] for key in ("own", "")] == [200, 401]
            run.process.terminate()
            assert run.end() == 0
        # it is not ours to end
        assert server.server.running
