"""`pagoda sglang` writes flags of SGLang's command line. That SGLang understands them is seen in
tests/sglang.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pagoda.config import option_names
from tests.cli.shelf import done_here, pagoda, refused

STORAGE = {
    "backend_name": "pagoda",
    "module_path": "pagoda.connectors.sglang",
    "class_name": "PagodaHiCache",
    "hicache_storage_pass_prefix_keys": True,
}


def printed(
    *arguments: object, **variables: str
) -> tuple[list[str], dict[str, object]]:
    """Return the command that would be run without its last flag, and what that flag says."""
    done = done_here("sglang", "--print", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *command, flag, value = shlex.split(done.stdout)
    assert flag == "--hicache-storage-backend-extra-config"
    return command, json.loads(value)


def test_nothing_but_the_flags_is_filled_in() -> None:
    command, storage = printed("serve", "my/model", "--tp", "2", "--page-size=64")
    assert command == [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "my/model",
        "--tp",
        "2",
        "--page-size=64",
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
    ]
    assert storage == STORAGE


def test_options_travel_as_they_were_written(tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    flags = [
        "--host-size",
        "1GiB",
        "--disk-path",
        disk,
        "--disk-size",
        "2GiB",
        "--weights",
        "w",
        "--salt",
        "s",
    ]
    command, storage = printed(
        *flags, "--allow-untested-sglang", "serve", "--enable-hierarchical-cache"
    )
    assert command.count("--enable-hierarchical-cache") == 1
    assert storage == {
        **STORAGE,
        "host_size": "1GiB",
        "disk_path": disk,
        "disk_size": "2GiB",
        "weights": "w",
        "salt": "s",
        "allow_untested_sglang": True,
    }


def test_every_option_is_there_but_the_size_of_a_chunk() -> None:
    message = done_here("sglang", "--help", COLUMNS="200").stdout
    for name in option_names():
        assert "--" + name.replace("_", "-") in message
    assert "--page-size" in refused(
        "sglang", "--chunk-tokens", "64", "serve", "m"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m", "--hicache-storage-backend", "file"], "leave it out"),
        (["serve", "m", "--hicache-storage-back=file"], "leave it out"),
        (["serve", "m", "--host-size", "1GiB"], "before serve"),
        (["serve", "m", "--disable-radix-cache"], "leave it out"),
        (["--host-size", "0", "serve", "m"], "host_size = 0"),
        (["--min-hit-tokens", "512", "serve", "m"], "prefetch_threshold"),
        (["--remote", "redis://u:secret@h", "serve", "m"], "password_file"),
    ],
)
def test_what_cannot_stand_is_refused(arguments: list[str], message: str) -> None:
    assert message in refused("sglang", *arguments)


def test_without_sglang_it_says_how_to_get_it(shm_root: Path) -> None:
    done = pagoda(
        "sglang",
        "--host-path",
        shm_root / "host",
        "--host-size",
        "8MiB",
        "serve",
        "m",
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
