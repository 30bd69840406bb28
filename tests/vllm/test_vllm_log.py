"""What PagodaKV logs stands in vLLM's log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from pagoda.connectors.vllm.join_vllm_log import join_vllm_log
from pagoda.connectors.vllm.supported_engines import log_choices
from tests.vllm.configs import allocate, engine_config, make_layers
from tests.vllm.conftest import Tiers
from tests.vllm.engines import Engine


def test_the_opening_block_stands_in_the_log_of_an_engine(
    pagoda: Engine, tiers: Tiers
) -> None:
    pagoda.wait_up()
    log = pagoda.log.read_text()
    opened = re.search(
        r"INFO .*PagodaKV opened: .*namespace ([0-9a-f]{12}), chunks of \d+ tokens",
        log,
    )
    assert opened is not None, log[-3000:]
    block = log[opened.start() :].splitlines()[:5]
    for line, word in zip(
        block,
        ("opened", "tiers: host ", "found: host ", "where: host ", "look: "),
        strict=True,
    ):
        assert word in line, block
    assert str(tiers.host) in block[3]
    assert str(tiers.disk) in block[3]
    assert "pagoda explain" in block[4]


def test_what_else_decides_the_keys_is_said_where_it_is_not_the_default(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagoda.vllm")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def said() -> list[str]:
        return [
            line
            for name, _, line in caplog.record_tuples
            if name == "pagoda.vllm" and "block hashes" in line
        ]

    config = engine_config(llama)
    kv, _ = allocate(config, make_layers(config))
    log_choices(config, kv)
    assert said() == []
    log_choices(engine_config(llama, prefix_caching_hash_algo="sha256_cbor"), kv)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    log_choices(config, kv)
    assert [
        "sha256_cbor and PYTHONHASHSEED not set" in line for line in said()
    ] == [True, False]
    assert "use sha256 and PYTHONHASHSEED = 7: engines share" in said()[1]


def test_options_of_blending_are_named_as_doing_nothing_here(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(llama)
    kv, _ = allocate(config, make_layers(config))
    log_choices(config, kv)
    assert "blended" not in caplog.text
    monkeypatch.setenv("PAGODA_BLEND_RECOMPUTE", "0.15")
    extra = config.kv_transfer_config.kv_connector_extra_config
    monkeypatch.setitem(extra, "blend_min_tokens", 64)
    log_choices(config, kv)
    (line,) = [line for line in caplog.messages if "blended" in line]
    assert "blend_recompute (environment PAGODA_BLEND_RECOMPUTE)" in line
    assert "blend_min_tokens (argument blend_min_tokens)" in line
    assert "vLLM counts prefixes only" in line


def test_loggers_that_somebody_configured_are_left_alone() -> None:
    ours = logging.getLogger("pagoda")
    theirs = logging.getLogger("vllm")
    root = logging.root
    before = (
        ours.handlers[:],
        ours.level,
        theirs.handlers[:],
        theirs.level,
        root.handlers[:],
    )
    mine = logging.NullHandler()
    vllms = logging.NullHandler()
    try:
        theirs.handlers[:] = [vllms]
        theirs.level = logging.DEBUG
        ours.handlers[:] = [mine]
        ours.level = logging.NOTSET
        root.handlers[:] = []
        join_vllm_log()
        assert ours.handlers == [mine]
        assert ours.level == logging.NOTSET
        ours.handlers[:] = []
        # a program that has configured logging: its level counts, and each line comes once
        root.handlers[:] = [mine]
        join_vllm_log()
        assert ours.handlers == []
        assert ours.level == logging.NOTSET
        root.handlers[:] = []
        for _ in range(2):
            join_vllm_log()
            assert ours.handlers == [vllms]
            assert ours.level == logging.DEBUG
    finally:
        ours.handlers[:] = before[0]
        theirs.handlers[:] = before[2]
        root.handlers[:] = before[4]
        ours.setLevel(before[1])
        theirs.setLevel(before[3])
