"""What a cache logs: five lines at its opening, a line a call at DEBUG, as text or JSON, and no
secrets.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.cache import Cache
from pagoda.cache.call_log import log_opened
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import DenseKV

LAYOUT = KVLayout.dense(
    layers=1, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=64
)
TOKENS = [987_654 + n for n in range(256)]
SECRET = "hunter2-salt"


def opened(host: Path, disk: Path, **options: object) -> Cache:
    return Cache(
        namespace=Namespace("llama", salt=SECRET),
        layout=LAYOUT,
        host_path=host,
        host_size="4MiB",
        disk_path=disk,
        disk_size="16MiB",
        remote="redis://:hunter2@localhost:1/0",
        **options,
    )  # type: ignore[arg-type]


def kv() -> DenseKV:
    return DenseKV(
        [[np.ones((1, len(TOKENS), 8), np.float32) for _ in "KV"]], LAYOUT
    )


def test_opening_logs_five_lines_once(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagoda")
    with opened(shm_root, tmp_path) as cache:
        cache.store(TOKENS, kv())
        assert cache.retrieve(TOKENS, kv()).num_tokens == 256
        short = cache.namespace.root.hex()[:12]
    with opened(shm_root, tmp_path):
        pass
    first, second = [
        one.getMessage()
        for one in caplog.records
        if "PagodaKV opened" in one.getMessage()
    ]
    title, tiers, found, where, look = first.splitlines()
    assert "llama" in title
    assert short in title
    assert "64 tokens" in title
    assert "host 4." in tiers
    assert "disk 16." in tiers
    assert "redis shared" in tiers
    assert " tokens" in tiers
    assert "host 0 chunks = 0 tokens, disk 0 chunks" in found
    assert str(shm_root) in where
    assert str(tmp_path) in where
    assert "redis://" in where
    assert "pagoda stats" in look
    assert "pagoda explain" in look
    assert "host 4 chunks = 256 tokens" in second
    assert "hunter2" not in caplog.text


def test_a_size_is_what_the_tier_may_hold(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the slots that it has from a time when it was larger."""
    caplog.set_level(logging.INFO, "pagoda")
    for size, shared in (("4MiB", True), ("2MiB", True), ("1MiB", False)):
        Cache(
            namespace=Namespace("llama"),
            layout=LAYOUT,
            host_path=shm_root,
            host_size=size,
            host_shared=shared,
        ).close()
    said = [
        one.getMessage()
        for one in caplog.records
        if "PagodaKV opened" in one.getMessage()
    ]
    sizes = ("4.00 MiB = 65,536", "2.00 MiB = 32,768", "1.00 MiB = 16,384")
    assert all(
        f"host {size} tokens" in line
        for size, line in zip(sizes, said, strict=True)
    ), said


def test_a_directory_that_was_removed_meanwhile_prevents_no_opening(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shm_root / "host", tmp_path / "disk") as cache:
        shutil.rmtree(shm_root / "host")
        shutil.rmtree(tmp_path / "disk")
        caplog.set_level(logging.INFO, "pagoda")
        log_opened(cache.namespace, LAYOUT, cache._tiers, 30.0)
    assert "tiers: host 4." in caplog.text


def test_no_line_below_its_level(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pagoda")
    with opened(shm_root, tmp_path) as cache:
        cache.store(TOKENS, kv())
    assert not [
        record for record in caplog.records if record.levelno < logging.WARNING
    ]


def test_a_call_is_a_line_without_its_prompt(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shm_root, tmp_path) as cache:
        caplog.set_level(logging.DEBUG, "pagoda.cache")
        caplog.clear()
        cache.store(TOKENS[:128], kv(), salt=SECRET)
        cache.lookup(TOKENS, salt=SECRET, tiers=("host", "disk"))
        cache.retrieve(TOKENS, kv(), salt=SECRET, tiers="host")
        calls = [record for record in caplog.records if hasattr(record, "pagoda")]
    stored, looked, retrieved = [record.getMessage() for record in calls]
    assert stored.startswith(
        "store: 128 tokens stored, chunks: 2 new, 0 present, 0 refused, "
    )
    assert looked.startswith(
        "lookup: 256 tokens asked, 128 hit (host 128), then absent, "
    )
    assert retrieved.startswith(
        "retrieve: 256 tokens asked, 128 hit (host 128), then absent, "
    )
    for line in (stored, looked, retrieved):
        assert line.endswith(" ms")
    fields = calls[2].__dict__["pagoda"]
    assert fields["hit_tokens"] == {"host": 128}
    assert fields["reason"] == "absent"
    assert fields["ms"] > 0
    assert "98765" not in caplog.text
    assert SECRET not in caplog.text


def test_what_was_served_behind_a_missing_chunk_is_in_the_line(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shm_root, tmp_path) as cache:
        cache.store(TOKENS, kv())
        assert cache.flush(60.0)
        keys = [key for _, _, key in cache.keys(TOKENS)]
        for tier in cache._tiers.all[:2]:  # the third one is not there
            tier.remove(keys[1])
        caplog.set_level(logging.DEBUG, "pagoda.cache")
        caplog.clear()
        cache.retrieve(TOKENS, kv(), pieces=True, tiers=("host", "disk"))
        (call,) = [
            record for record in caplog.records if hasattr(record, "pagoda")
        ]
    assert call.getMessage().startswith(
        "retrieve: 256 tokens asked, 64 hit (host 64), then removed, 128 hit behind, "
    )
    assert call.__dict__["pagoda"]["behind_tokens"] == 128


CHILD = """
import logging, sys
from pathlib import Path
from tests.cache.test_call_log import TOKENS, kv, opened
for number in range(2):
    with opened(Path(sys.argv[1]), Path(sys.argv[2]), log_format="json") as cache:
        cache.retrieve(TOKENS, kv(), tiers="host")
logging.getLogger("another").warning("not ours")
"""


@pytest.mark.slow
def test_json_is_one_object_a_line_and_only_for_our_loggers(
    shm_root: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CHILD, str(shm_root), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    *lines, last = done.stderr.splitlines()
    assert last == "not ours"
    logged = [json.loads(line) for line in lines]
    blocks = [
        line for line in logged if line["message"].startswith("PagodaKV opened")
    ]
    assert len(blocks) == 2  # one an open, though the handler was asked for twice
    for line in logged:
        assert line["logger"].startswith("pagoda")
        assert line["process"]
        assert line["time"]
    assert blocks[0]["level"] == "INFO"
    assert blocks[0]["model"] == "llama"
    assert [tier["tier"] for tier in blocks[0]["tiers"]] == [
        "host",
        "disk",
        "redis",
    ]
    assert done.stdout == ""
    assert "hunter2" not in done.stderr


def test_another_log_format_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"log_format = 'xml': .* 'plain' or 'json'"
    ):
        Cache(
            namespace=Namespace("llama"),
            layout=LAYOUT,
            log_format="xml",
            host_size=0,
        )  # type: ignore[arg-type]


class Broken(logging.Handler):
    """A handler, and a filter, of a program that has a fault."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the program's own fault")

    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("the program's own fault")


@pytest.mark.parametrize("part", ["handler", "filter"])
def test_a_handler_or_a_filter_that_raises_breaks_no_call(
    part: str, shm_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = logging.getLogger("pagoda")
    broken = Broken()
    if part == "handler":
        broken.filter = lambda _: True  # type: ignore[method-assign]
    ours.addHandler(broken)
    ours.setLevel(logging.DEBUG)
    try:
        with opened(shm_root, tmp_path) as cache:
            cache.store(TOKENS, kv())
            assert cache.retrieve(TOKENS, kv()).num_tokens == 256
            assert cache.lookup([1, *TOKENS]).num_tokens == 0
    finally:
        ours.removeHandler(broken)
        ours.setLevel(logging.NOTSET)
    assert "the program's own fault" in capsys.readouterr().err
