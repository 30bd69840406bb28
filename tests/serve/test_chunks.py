"""`pagoda serve`: chunks that an engine stored arrive as they are, and what is absent is a miss."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from testbed.patience import wait_until
from tests.serve import kit
from tests.serve.kit import (
    LAYOUT,
    engine,
    keys_of,
    payload_of,
    server,
    verified,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ODD", "LARGE"])
def test_every_byte_of_an_engines_chunks_arrives_from_memory(
    name: str, shm_root: Path
) -> None:
    layout = getattr(kit, name)
    with (
        engine(name, host_path=str(shm_root), host_size=40 << 20) as running,
        server(shm_root) as served,
    ):
        keys = running.store(1, 5)
        wait_until(lambda: served.find(running.root, keys) == 5)
        for _ in range(2):  # the second time with the header that is kept
            for position, key in enumerate(keys):
                answer = served.get(running.root, key)
                assert answer.status == 200
                assert answer.headers["Pagoda-Tier"] == "host"
                found = verified(answer.body, running.root, key, layout)
                assert found is not None
                assert (found == payload_of(1, position, layout)).all()


@pytest.mark.slow
def test_every_byte_arrives_from_the_disk(shm_root: Path, tmp_path: Path) -> None:
    with engine(
        host_size=0, disk_path=str(tmp_path), disk_size=16 << 20
    ) as running:
        keys = running.store(1, 5)
        with server(tmp_path) as served:
            assert served.find(running.root, keys) == 5
            for position, key in enumerate(keys):
                answer = served.get(running.root, key)
                assert answer.headers["Pagoda-Tier"] == "disk"
                found = verified(answer.body, running.root, key)
                assert found is not None
                assert (found == payload_of(1, position)).all()


@pytest.mark.slow
def test_each_key_of_a_prompt_is_found_also_behind_a_hole(
    shm_root: Path,
) -> None:
    with (
        engine(host_path=str(shm_root), host_size=16 << 20) as running,
        server(shm_root) as served,
    ):
        one = running.store(1, 3)
        two = running.store(2, 3)
        asked = [bytes(32), *one[:2], bytes(32), *two, *one[:1]]
        wait_until(lambda: served.find(running.root, two) == 3)
        path = f"/v1/{running.root.hex()}/find?each=1"
        answer = served.ask("POST", path, b"".join(asked))
        assert answer.json == {"found": 0, "each": "01101111"}
        answer = served.ask("POST", path, b"".join(one))
        assert answer.json == {"found": 3, "each": "111"}
        other = f"/v1/{bytes(32).hex()}/find?each=1"
        answer = served.ask("POST", other, b"".join(one))
        assert answer.json == {"found": 0, "each": "000"}
        assert served.ask("POST", path, b"").json == {"found": 0, "each": ""}


@pytest.mark.slow
def test_a_store_outlives_its_engine_and_is_served(shm_root: Path) -> None:
    with engine(host_path=str(shm_root), host_size=16 << 20) as running:
        keys = running.store(1, 3)
    with server(shm_root) as served:
        assert served.find(running.root, keys) == 3
        assert served.get(running.root, keys[2]).status == 200


@pytest.mark.slow
def test_what_is_absent_is_a_miss_with_its_reason(shm_root: Path) -> None:
    with (
        engine(host_path=str(shm_root), host_size=16 << 20) as running,
        server(shm_root) as served,
    ):
        keys = running.store(1, 3)
        others = keys_of(running.root, 2, 3)
        wait_until(lambda: served.find(running.root, keys) == 3)
        assert served.find(running.root, [*keys[:2], *others]) == 2
        assert served.find(running.root, []) == 0
        answer = served.get(running.root, others[0])
        assert answer.status == 404
        assert answer.json == {"reason": "absent"}
        # of another namespace
        assert served.get(bytes(32), keys[0]).status == 404
        path = f"/v1/{running.root.hex()}/"
        head = served.ask("HEAD", path + keys[0].hex())
        assert head.status == 200
        assert int(head.headers["Content-Length"]) == 4096 + LAYOUT.chunk_bytes
        assert served.ask("HEAD", path + others[0].hex()).status == 404


@pytest.mark.slow
def test_a_unix_socket_needs_no_token_and_ends_with_the_server(
    shm_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "private" / "serve.sock"
    with engine(host_path=str(shm_root), host_size=16 << 20) as running:
        keys = running.store(1, 2)
        for number in (
            signal.SIGKILL,
            signal.SIGTERM,
            signal.SIGINT,
        ):  # after the first its socket is still there
            with server(
                shm_root, "--listen", f"unix:{path}", token=None
            ) as served:
                assert served.url == f"unix:{path}"
                assert path.parent.stat().st_mode & 0o777 == 0o700
                assert path.stat().st_mode & 0o777 == 0o600
                assert served.get(running.root, keys[1]).status == 200
                code, err = served.stop(number)
            assert number is signal.SIGKILL or (code, err, path.exists()) == (
                0,
                "",
                False,
            )
