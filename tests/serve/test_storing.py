"""`pagoda serve`: what clients store is verified first, is found by an engine that starts later,
and can be cleared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.keys import Namespace
from pagoda.slab import aligned
from tests.serve import kit
from tests.serve.kit import (
    LAYOUT,
    Server,
    engine,
    keys_of,
    payload_of,
    server,
    value_of,
    verified,
)

ROOT = Namespace("served", layout=LAYOUT.fingerprint).root
KEYS = keys_of(ROOT, 1, 8)
VALUES = [value_of(ROOT, key, n, payload_of(1, n)) for n, key in enumerate(KEYS)]


@pytest.fixture(scope="module")
def shelf(
    shm_module_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Run one server that makes stores, for the tests of this module."""
    state = str(tmp_path_factory.mktemp("state"))
    with server(
        "--host-size",
        "4MiB",
        PAGODA_HOST_PATH=str(shm_module_root),
        XDG_STATE_HOME=state,
    ) as running:
        yield running


@pytest.fixture
def host(shelf: Server) -> Server:
    """Empty it."""
    for key in KEYS:
        shelf.ask("DELETE", f"/v1/{ROOT.hex()}/{key.hex()}")
    return shelf


def test_what_is_put_is_read_byte_by_byte(host: Server) -> None:
    assert [
        host.put(ROOT, key, value).status
        for key, value in zip(KEYS, VALUES, strict=True)
    ] == [201] * 8
    assert host.find(ROOT, KEYS) == 8
    for position, key in enumerate(KEYS):
        found = verified(host.get(ROOT, key).body, ROOT, key)
        assert found is not None
        assert (found == payload_of(1, position)).all()
    again = host.put(ROOT, KEYS[0], VALUES[0])
    assert again.status == 200
    assert again.json == {"reason": "present"}
    assert host.ask("DELETE", f"/v1/{ROOT.hex()}/{KEYS[3].hex()}").status == 204
    assert host.ask("DELETE", f"/v1/{ROOT.hex()}/{KEYS[3].hex()}").status == 404
    assert host.find(ROOT, KEYS) == 3


@pytest.mark.parametrize("at", [0, 9, 100, 200, 4096, 4096 + 65535])
def test_no_damaged_value_is_stored(host: Server, at: int) -> None:
    damaged = bytearray(VALUES[0])
    damaged[at] ^= 1
    answer = host.put(ROOT, KEYS[0], bytes(damaged))
    assert answer.status == 422
    assert answer.json["reason"] == "failed_check"
    assert host.find(ROOT, KEYS) == 0


def test_nor_one_of_another_key_or_namespace_or_size(host: Server) -> None:
    payload = payload_of(1, 0)
    wrong = [
        VALUES[1],
        VALUES[0][:-1],
        VALUES[0][:4096],
        b"",
        b"x" * 70000,
        value_of(bytes(32), KEYS[0], 0, payload),
        value_of(ROOT, KEYS[0], 0, payload, slot=1),
        value_of(ROOT, KEYS[0], 0, payload, store_id=bytes(16)),
        value_of(ROOT, KEYS[0], 0, payload, tokens=1 << 60),
        value_of(ROOT, KEYS[0], 1 << 60, payload),
        value_of(ROOT, KEYS[0], 0, payload, fingerprint="../../../etc"),
        value_of(ROOT, KEYS[0], 0, payload, codec="none"),
    ]
    for value in wrong:
        answer = host.put(ROOT, KEYS[0], value)
        assert (answer.status, answer.json["reason"]) == (422, "failed_check"), (
            value[:64]
        )
    other = kit.ODD  # of the layout's name, with another size
    short = value_of(
        ROOT,
        KEYS[0],
        0,
        payload_of(1, 0, other),
        other,
        fingerprint=LAYOUT.fingerprint,
    )
    host.put(ROOT, KEYS[1], VALUES[1])
    assert host.put(ROOT, KEYS[0], short).status == 413
    large = value_of(ROOT, KEYS[0], 0, payload_of(1, 0, kit.LARGE), kit.LARGE)
    assert host.put(ROOT, KEYS[0], large + large[4096:]).status == 422
    assert host.find(ROOT, KEYS) == 0


def test_a_compressed_value_is_stored_as_it_was(host: Server) -> None:
    pytest.importorskip("zstandard")
    from pagoda import codec

    payload = np.zeros(LAYOUT.chunk_bytes, np.uint8)
    payload[::7] = 3
    name, stored = codec.encode("zstd", payload, 4, aligned(payload.nbytes))
    assert name == "zstd"
    page = value_of(
        ROOT, KEYS[0], 0, payload, codec="zstd", stored_bytes=stored.nbytes
    )[:4096]
    assert (
        host.put(ROOT, KEYS[0], page + stored.tobytes()[:-1] + b"x").status == 422
    )
    assert host.put(ROOT, KEYS[0], page + stored.tobytes()).status == 201
    found = verified(host.get(ROOT, KEYS[0]).body, ROOT, KEYS[0])
    assert found is not None
    assert (found == payload).all()


@pytest.mark.slow
def test_an_engine_that_starts_later_finds_what_was_put(shm_root: Path) -> None:
    with server("--host-size", "4MiB", PAGODA_HOST_PATH=str(shm_root)) as running:
        fields = {"model": "llama", "salt": "secret", "kv_dtype": "float32"}
        assert (
            running.ask(
                "PUT", f"/v1/{ROOT.hex()}", json.dumps(fields).encode()
            ).status
            == 204
        )
        for key, value in zip(KEYS[:4], VALUES, strict=False):
            assert running.put(ROOT, key, value).status == 201
        listed = kit.pagoda("stats", str(shm_root))
        assert "llama" in listed
        assert "secret" not in listed
        with engine(host_path=str(shm_root), host_size=4 << 20) as later:
            assert later.root == ROOT
            assert later.command("retrieve", 1, 6) == f"{4 * kit.CHUNK} True"
        kit.pagoda("clear", str(shm_root), "--yes", "--model", "served")
        assert running.find(ROOT, KEYS) == 0


@pytest.mark.slow
def test_without_a_store_and_a_size_for_one_the_reason_says_so(
    tmp_path: Path,
) -> None:
    with server(tmp_path) as running:
        answer = running.put(ROOT, KEYS[0], VALUES[0])
        assert answer.status == 507
        assert answer.json["reason"] == "no_store"
        assert "--host-size" in str(answer.json["remedy"])


@pytest.mark.slow
def test_a_full_store_evicts_and_one_too_small_refuses(shm_root: Path) -> None:
    with server("--host-size", "1MiB", PAGODA_HOST_PATH=str(shm_root)) as running:
        large = value_of(ROOT, KEYS[0], 0, payload_of(1, 0, kit.LARGE), kit.LARGE)
        refused = running.put(ROOT, KEYS[0], large)
        assert refused.status == 507
        assert refused.json["reason"] == "full"
        keys = keys_of(ROOT, 2, 40)  # 16 find room
        for n, key in enumerate(keys):
            assert running.put(
                ROOT, key, value_of(ROOT, key, n, payload_of(2, n))
            ).status in (201, 507)
        found = [key for key in keys if running.get(ROOT, key).status == 200]
        assert 8 <= len(found) <= 16


@pytest.mark.slow
def test_a_server_that_only_reads_takes_and_removes_nothing(
    shm_root: Path,
) -> None:
    with engine(host_path=str(shm_root), host_size=4 << 20) as running:
        keys = running.store(1, 2)
        with server(shm_root, "--read-only") as served:
            path = f"/v1/{running.root.hex()}/{keys[0].hex()}"
            value = value_of(running.root, keys[0], 0, payload_of(1, 0))
            assert [
                served.ask(how, path, value).status for how in ("PUT", "DELETE")
            ] == [403, 403]
            assert (
                served.ask("PUT", f"/v1/{running.root.hex()}", b"{}").status
                == 403
            )
            assert served.find(running.root, keys) == 2
