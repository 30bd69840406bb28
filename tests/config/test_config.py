from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.config import Config, ConfigOptions, defaults, option_names


def test_defaults_make_a_host_tier_and_no_disk() -> None:
    config = Config()
    assert config.host_path == f"/dev/shm/pagoda-{os.getuid()}"
    assert config.host_bytes > 0
    assert config.disk_bytes == 0
    assert list(config.roots()) == ["host"]
    assert defaults() == dataclasses.asdict(config)


def test_values_are_kept_in_one_form(tmp_path: Path) -> None:
    config = Config(
        host_size="64GiB",
        disk_size="100GB",
        disk_path=str(tmp_path),
        deadline_seconds=2,
    )
    assert config.host_size == config.host_bytes == 64 * 2**30
    assert config.disk_bytes == 100 * 10**9
    assert config.roots() == {"host": Path(config.host_path), "disk": tmp_path}
    assert config.deadline_seconds == 2.0
    assert dataclasses.replace(config, host_size=0).roots() == {"disk": tmp_path}
    assert Config(host_path="~/kv").host_path == os.path.expanduser("~/kv")


def test_private_memory_has_no_root_that_others_see() -> None:
    config = Config(host_shared=False, host_size=2**20)
    assert config.roots() == {}
    assert config.host_bytes == 2**20


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().chunk_tokens = 1  # type: ignore[misc]


def test_a_directory_that_another_process_removes_meanwhile_is_no_file(
    tmp_path: Path,
) -> None:
    place = tmp_path / "disk"
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            place.mkdir()
            place.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(500):
            Config(disk_path=str(place), disk_size="1GiB")
    finally:
        over.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("chunk_tokens", 0, "from 1"),
        ("chunk_tokens", 2.5, "whole number"),
        ("chunk_tokens", True, "whole number"),
        ("host_size", "64G", "64GiB"),
        ("host_size", None, "64GiB"),
        ("host_path", "", "directory"),
        ("host_path", "/etc/passwd", "is a file"),
        ("host_path", "a\0b", "not a path"),
        ("host_shared", "yes", "true or false"),
        ("disk_size", "auto", "100GiB"),
        ("disk_direct", 1, "true or false"),
        ("blend_recompute", 1.5, "from 0 to 1"),
        ("blend_recompute", float("nan"), "from 0 to 1"),
        ("blend_recompute", True, "from 0 to 1"),
        ("blend_min_tokens", -1, "from 0"),
        ("quality_verdicts", "a\0b", "not a path"),
        ("unchecked", "yes", "true or false"),
        ("write_policy", "write_true", "did you mean write_through?"),
        ("selective_hits", 0, "from 1"),
        ("min_hit_tokens", -1, "from 0"),
        ("deadline_seconds", 0, "more than 0"),
        ("deadline_seconds", float("nan"), "number of seconds"),
        ("deadline_seconds", 10**400, "at most 3600 seconds"),
        ("io_threads", 1000, "to 64"),
        ("queue_chunks", 0, "from 1"),
        ("policy", "l r u", "did you mean lru?"),
        ("objective", "computer", "did you mean compute?"),
    ],
)
def test_a_bad_value_names_the_option_the_value_and_what_to_do(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{name} = {value!r}: ")
    assert said in message
    assert "\n" not in message


def test_options_that_need_each_other() -> None:
    with pytest.raises(ConfigError, match="set disk_path"):
        Config(disk_size="1GiB")
    with pytest.raises(ConfigError, match="set disk_size"):
        Config(disk_path="/var/cache/kv")
    with pytest.raises(ConfigError, match="its own directory"):
        Config(host_path="/tmp/kv", disk_path="/tmp/kv", disk_size="1GiB")
    with pytest.raises(ConfigError, match="set policy = 'hindsight'"):
        Config(objective="compute", policy="lru")
    assert Config(objective="compute").policy == "hindsight"


def test_every_option_has_a_check_and_a_sentence() -> None:
    Config()  # checks each of them
    for option in dataclasses.fields(Config):
        assert option.metadata["help"].endswith(".")


def test_every_option_is_a_keyword_of_a_cache() -> None:
    assert list(ConfigOptions.__annotations__) == option_names()


def test_the_plain_config_imports_no_pydantic() -> None:
    code = (
        "import sys, pagoda.config; pagoda.config.Config();"
        "sys.exit('pydantic' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
