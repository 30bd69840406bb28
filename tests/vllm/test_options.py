"""What kv_connector_extra_config may say, and where else options come from."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.base.errors import ConfigError
from pagoda.connectors.vllm.options import (
    ConnectorOptions,
    chunk_of,
    read_options,
)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No file and no variable of the machine has a say."""
    for name in ("PAGODA_CONFIG", "PAGODA_CHUNK_TOKENS", "PAGODA_HOST_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("block", "on_cpu", "on_gpu"),
    [
        (1, 32, 256),
        (16, 32, 256),
        (24, 48, 240),
        (32, 32, 256),
        (48, 48, 240),
        (128, 128, 256),
        (544, 544, 544),
    ],
)
def test_a_chunk_is_one_block_on_a_cpu_and_many_on_a_gpu(
    block: int, on_cpu: int, on_gpu: int
) -> None:
    assert chunk_of(block, True) == on_cpu
    assert chunk_of(block, False) == on_gpu
    # these tests run on one
    assert read_options({}, block).config.chunk_tokens == on_cpu


def test_options_of_the_cache_and_of_the_connector() -> None:
    options = read_options(
        {
            "host_size": "2GiB",
            "disk_path": "/nowhere/pagoda",
            "disk_size": "1TiB",
            "min_hit_tokens": 64,
            "weights": "v7",
            "weights_run": "run 7",
            "salt": "tenant",
            "store_output": False,
            "allow_untested_vllm": True,
        },
        16,
    )
    assert options.config.host_bytes == 2 << 30
    assert options.config.disk_bytes == 1 << 40
    assert options.config.min_hit_tokens == 64
    assert options.config.disk_path == "/nowhere/pagoda"
    assert options.weights == "v7"
    assert options.weights_run == "run 7"
    assert options.salt == "tenant"
    assert options.store_output is False
    assert options.allow_untested_vllm is True
    assert "tenant" not in repr(options)


def test_without_a_word_the_defaults_stand() -> None:
    options = read_options({}, 16)
    assert options == ConnectorOptions(options.config)
    assert options.weights is None
    assert options.salt == ""
    assert options.store_output is True
    assert options.allow_untested_vllm is False


def test_what_vllm_reads_itself_is_passed_by() -> None:
    read_options(
        {
            "spec_name": "PagodaOffloadingSpec",
            "spec_module_path": "x",
            "block_size": 512,
        },
        16,
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            {"hosts_size": "1GiB"},
            "hosts_size: no such option; did you mean host_size?",
        ),
        ({"weight": "v1"}, "weight: no such option; did you mean weights?"),
        (
            {"host_size": "lots"},
            "host_size = 'lots'.*a size as.*argument host_size",
        ),
        (
            {"io_threads": "many"},
            "io_threads = 'many'.*integer.*argument io_threads",
        ),
        ({"store_output": "yes"}, "store_output = 'yes': write true or false"),
        (
            {"allow_untested_vllm": 1},
            "allow_untested_vllm = 1: write true or false",
        ),
        ({"weights": ""}, "weights = '': a text that is not empty"),
        (
            {"weights_run": "a/b"},
            "weights_run = 'a/b': write a name without a slash",
        ),
        ({"salt": 7}, "salt = 7: a text that is not empty"),
        (
            {"chunk_tokens": 100},
            r"chunk_tokens = 100 \(argument chunk_tokens\).*32 tokens.*to 96 or 128",
        ),
        (
            {"chunk_tokens": 16},
            r"chunk_tokens = 16 .*set chunk_tokens to 32, or leave it out",
        ),
    ],
)
def test_what_cannot_stand_is_one_sentence_with_the_remedy(
    extra: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(extra, 32)


def test_a_file_and_the_environment_have_a_say_and_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "pagoda.toml").write_text(
        "chunk_tokens = 128\nmin_hit_tokens = 32\n"
    )
    assert read_options({}, 64).config.chunk_tokens == 128
    with pytest.raises(
        ConfigError, match=r"chunk_tokens = 128 \(file .*pagoda.toml\).*48 tokens"
    ):
        read_options({}, 48)
    monkeypatch.setenv("PAGODA_CHUNK_TOKENS", "96")
    assert read_options({}, 48).config.chunk_tokens == 96
    with pytest.raises(
        ConfigError,
        match=r"environment PAGODA_CHUNK_TOKENS.*64 tokens.*to 64 or 128",
    ):
        read_options({}, 64)
    options = read_options({"chunk_tokens": 192}, 64)
    assert options.config.chunk_tokens == 192
    assert options.config.min_hit_tokens == 32


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        read_options({}, 0)
