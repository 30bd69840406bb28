"""What becomes of a remote tier's URL on its way to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.tiers.remote.open_client import open_client
from pagoda.tiers.remote.store_client import StoreClient


def opened(kind: str, url: str, password_file: object = "") -> StoreClient:
    return open_client(
        kind,
        url,
        name="far",
        prefix="mine",
        ttl_seconds=60.0,
        options={},
        password_file=str(password_file),
    )


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("redis", "redis://user:hunter2@127.0.0.1:6379/0"),
        ("redis", "rediss://:hunter2@127.0.0.1:6379/0"),
        ("redis", "unix:///run/redis.sock?db=2"),
        ("redis", "redis+pool://user:hunter2@127.0.0.1:1,127.0.0.1:2/3"),
        ("redis", "redis+cluster://user:hunter2@127.0.0.1:1,127.0.0.1:2"),
        (
            "redis",
            "redis+sentinel://user:hunter2@127.0.0.1:1,127.0.0.1:2/service",
        ),
        ("mooncake", "mooncake://127.0.0.1:50051"),
        ("objects", "http://user:hunter2@127.0.0.1:80/kv/"),
    ],
)
def test_an_engine_is_named_and_shows_no_password(kind: str, url: str) -> None:
    remote = opened(kind, url)
    assert remote.name == "far"
    assert remote.address
    assert "hunter2" not in remote.address
    assert "hunter2" not in repr(remote)


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe", b"x" * 5000])
def test_a_password_that_cannot_be_read_names_its_file(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"password_file = {file}"):
        opened("redis", "redis://user@127.0.0.1", file)
