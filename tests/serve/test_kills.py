"""`pagoda serve`: a server that is killed or stopped stops no engine, and eviction never makes
other bytes pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.ledger import Ledger, admin
from pagoda.ledger.store_state import FORMAT
from testbed.patience import Patience, wait_until
from tests.serve import kit
from tests.serve.kit import TOKEN, engine, keys_of, payload_of, server, verified


@contextlib.contextmanager
def half_read(
    served: kit.Server, root: bytes, key: bytes
) -> Iterator[socket.socket]:
    """Ask for a chunk and look only at its beginning, so that the server is in the middle of it."""
    with served.socket() as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = f"/v1/{root.hex()}/{key.hex()}"
        connected.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()  # noqa: E501
        )
        assert connected.recv(4096, socket.MSG_PEEK).startswith(b"HTTP/1.1 200 ")
        yield connected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_or_stops_during_a_get_stops_no_engine(
    number: int, shm_root: Path
) -> None:
    with (
        engine("LARGE", host_path=str(shm_root), host_size=32 << 20) as running,
        server(shm_root) as served,
    ):
        key = running.store(1, 2)[0]
        wait_until(lambda: served.find(running.root, [key]) == 1)
        with half_read(served, running.root, key):
            served.process.send_signal(number)
            patience = Patience(30.0)
            # more than there is room for: what was being sent is evicted in time
            for chain in range(2, 10):
                running.store(chain, 2)
                assert (
                    running.command("retrieve", chain, 2)
                    == f"{2 * kit.CHUNK} True"
                )
            assert not patience.ended, patience.said()
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(kit.SECONDS)
        with contextlib.closing(
            Ledger.attach(next(shm_root.glob(f"*.{FORMAT}")))
        ) as ledger:
            admin.check(ledger)
            numbers = admin.gauges(ledger)
            assert numbers["ready"] + numbers["free"] == numbers["slots"]


def read_prompts(served: kit.Server, root: bytes) -> int:
    """Read what is there of 50 prompts; return how many chunks. None is wrong, and no answer is
    late.
    """
    right = busy = 0
    for chain in range(50):
        for position, key in enumerate(keys_of(root, chain, 12)):
            patience = Patience(10.0)
            answer = served.get(root, key)
            assert not patience.ended, patience.said()
            if answer.status != 200:
                assert answer.status in (404, 503)
                busy += answer.status == 503
                break
            found = verified(answer.body, root, key)
            assert found is not None
            assert (found == payload_of(chain, position)).all()
            right += 1
        if busy == 3:  # whoever holds the ledger is stopped
            break
    return right


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_or_stops_while_it_stores_costs_readers_only_misses(
    number: int, shm_root: Path
) -> None:
    """Wherever it is: in a copy, in a commit, or holding the ledger. Once it has ended, all that it
    stored is read.
    """
    rng = random.Random(number)
    with server(shm_root) as served:
        for turn in range(3):
            with engine(host_path=str(shm_root), host_size=2 << 20) as running:
                assert running.command("write", 10 * turn, 12) == "writes"
                time.sleep(rng.uniform(0.0, 0.05))
                running.process.send_signal(number)
                read_prompts(served, running.root)
            wait_until(lambda: read_prompts(served, running.root) > 10)


@pytest.mark.slow
def test_a_chunk_that_is_replaced_while_it_is_sent_never_passes(
    shm_root: Path,
) -> None:
    with (
        engine("LARGE", host_path=str(shm_root), host_size=32 << 20) as running,
        server(shm_root) as served,
    ):
        key = running.store(1, 1)[0]
        wait_until(lambda: served.find(running.root, [key]) == 1)
        with half_read(served, running.root, key) as reading:
            assert (
                served.ask(
                    "DELETE", f"/v1/{running.root.hex()}/{key.hex()}"
                ).status
                == 204
            )
            for chain in range(2, 6):  # every slot has other bytes now
                running.store(chain, 2)
            body = b""
            with contextlib.suppress(
                ConnectionError, kit.http.client.HTTPException
            ):
                answer = kit.http.client.HTTPResponse(reading)
                answer.begin()
                body = answer.read()
            found = verified(body, running.root, key, kit.LARGE)
            assert found is None or (found == payload_of(1, 0, kit.LARGE)).all()
        key = keys_of(running.root, 5, 2)[0]
        found = verified(
            served.get(running.root, key).body, running.root, key, kit.LARGE
        )
        assert found is not None
        assert (found == payload_of(5, 0, kit.LARGE)).all()


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, True])
def test_eviction_during_gets_is_a_miss_or_the_right_bytes(
    disk: bool, shm_root: Path, tmp_path: Path
) -> None:
    host = {"host_path": str(shm_root), "host_size": 2 << 20}
    room = (
        {"host_size": 0, "disk_path": str(tmp_path), "disk_size": 2 << 20}
        if disk
        else host
    )
    with (
        engine(**room) as running,
        server(tmp_path if disk else shm_root) as served,
    ):
        running.store(0, 12)
        wait_until(
            lambda: served.find(running.root, keys_of(running.root, 0, 12))
        )
        # 32 slots, and 50 prompts of 12 chunks in turn
        assert running.command("write", 0, 12) == "writes"
        right = [0] * 4
        until = time.monotonic() + 3.0
        wrong: list[object] = []

        def read(number: int) -> None:
            chain = number
            while time.monotonic() < until:
                chain = (chain + 1) % 50
                for position, key in enumerate(keys_of(running.root, chain, 12)):
                    with contextlib.suppress(
                        ConnectionError, kit.http.client.HTTPException
                    ):
                        answer = client[number].get(running.root, key)
                        if answer.status == 404:
                            break
                        found = (
                            verified(answer.body, running.root, key)
                            if answer.status == 200
                            else None
                        )
                        if found is not None:
                            right[number] += 1
                            if (found != payload_of(chain, position)).any():
                                wrong.append((chain, position))

        client = [served.again() for _ in range(4)]
        threads = [
            threading.Thread(target=read, args=(number,)) for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and sum(right) > 20, right
        assert running.process.poll() is None


@pytest.mark.slow
def test_a_store_that_is_removed_or_made_again_is_noticed(shm_root: Path) -> None:
    with server(shm_root) as served:
        for chain in (1, 2):
            with engine(host_path=str(shm_root), host_size=2 << 20) as running:
                keys = running.store(chain, 3)
                wait_until(lambda: served.find(running.root, keys) == 3)  # noqa: B023
                root = running.root
            os.rename(
                next(shm_root.glob(f"*.{FORMAT}")), shm_root / f".gone-{chain}"
            )
            wait_until(lambda: served.find(root, keys) == 0)  # noqa: B023


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold the ledgers of all stores of a root, as a stopped process does."""
    leave = threading.Event()
    with contextlib.ExitStack() as stack:
        for store in root.glob(f"*.{FORMAT}"):
            ledger = stack.enter_context(contextlib.closing(Ledger.attach(store)))
            holding = threading.Event()

            def hold(_: object, holding: threading.Event = holding) -> None:
                holding.set()
                leave.wait(kit.SECONDS)

            thread = threading.Thread(target=ledger.session.write, args=(hold,))
            thread.start()
            stack.callback(thread.join)
            holding.wait()
        stack.callback(leave.set)
        yield


@pytest.mark.slow
def test_a_store_that_another_process_holds_delays_neither_start_nor_end(
    shm_root: Path,
) -> None:
    with engine(host_path=str(shm_root), host_size=2 << 20) as running:
        running.store(1, 3)

    def life() -> float:
        begun = time.monotonic()
        with server(shm_root) as served:
            assert served.ask("GET", "/healthz").status == 200
            assert served.stop()[0] == 0
        return time.monotonic() - begun

    usual = life()
    with held(shm_root):
        assert life() - usual < 8.0


@pytest.mark.slow
def test_many_held_stores_cost_no_more_than_one_and_a_stop_waits_for_nobody(
    shm_root: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        for layout in ("LARGE", "ODD", "LAYOUT"):
            running = stack.enter_context(
                engine(layout, host_path=str(shm_root), host_size=8 << 20)
            )
            keys = running.store(1, 1)
        served = stack.enter_context(server(shm_root))
        wait_until(lambda: served.find(running.root, keys) == 1)
        stack.enter_context(held(shm_root))
        for path, trouble in (
            ("/metrics", b"} 0.0"),
            ("/stats.json", b"ledger_busy"),
        ):
            patience = Patience(2.5)
            answer = served.ask("GET", path)
            assert answer.status == 200
            assert not patience.ended, patience.said()
            assert answer.body.count(trouble) >= 3
        chunk = f"/v1/{running.root.hex()}/{keys[0].hex()}"
        for request, body in (
            (f"GET {chunk}", b""),
            (f"PUT {chunk}", b""),
            ("POST /clear", b'{"everything": true}'),
        ):
            connected = stack.enter_context(served.socket())
            connected.sendall(
                f"{request} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body) or 9999}\r\n\r\n".encode()  # noqa: E501
                + body
            )
        time.sleep(0.5)  # until the operation waits for a store
        patience = Patience(6.0)
        assert served.stop() == (0, "")
        assert not patience.ended, patience.said()


@pytest.mark.slow
def test_requests_that_wait_are_bounded_and_health_is_answered(
    shm_root: Path,
) -> None:
    """While another process holds the ledger, reads wait for their deadline only, and /healthz does
    not wait.
    """
    with (
        engine(host_path=str(shm_root), host_size=2 << 20) as running,
        server(shm_root) as served,
    ):
        keys = running.store(1, 3)
        wait_until(lambda: served.find(running.root, keys) == 3)
        with held(shm_root):
            clients = [served.again() for _ in range(20)]
            asking = [
                threading.Thread(target=one.get, args=(running.root, keys[0]))
                for one in clients
            ]
            patience = Patience(1.0)
            for one in asking:
                one.start()
            assert json.loads(served.ask("GET", "/healthz").body) == {"ok": True}
            assert not patience.ended, patience.said()
            for one in asking:
                one.join(60)
        wait_until(lambda: served.get(running.root, keys[0]).status == 200)
