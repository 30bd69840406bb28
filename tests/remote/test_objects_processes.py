"""Object stores: forked children, processes that end, what a process needs to have."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.tiers.remote.object_store import ObjectStoreConnection
from testbed.servers import BUCKET, authority
from tests.remote.evil import http as answer
from tests.remote.object_stores import (
    Room,
    Store,
    get,
    keys,
    liar,
    noise,
    put,
    s3_options,
    until,
)


def in_child(work: Callable[[], str]) -> str:
    """Return the result of `work` in a forked child, which is killed if it hangs."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            said = work()
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_call_in_a_forked_child_fails_at_once(
    store: Store, connection: ObjectStoreConnection
) -> None:
    remote = store.remote()

    def child() -> str:
        begun = time.monotonic()
        for work in (
            lambda: remote.connection().open(until(60)),
            lambda: get(connection, keys(1)[0], Room(1), 60),
        ):
            with pytest.raises(OSError, match="fork"):
                work()
        connection.close()
        took = time.monotonic() - begun
        gc.collect()
        # and not when the deadline has passed
        return "at once" if took < 20 else "slow"

    assert in_child(child) == "at once"
    put(connection, keys(1)[0], noise(10))  # the parent's continues
    assert get(connection, keys(1)[0], Room(10)) == 10


@pytest.mark.slow
def test_a_child_may_be_the_first_to_use_it(store: Store) -> None:
    script = """
import os, signal, sys, time
from pagoda.tiers.remote.object_store import ObjectStoreClient
remote = ObjectStoreClient(sys.argv[1], options=dict(part.split("=", 1) for part in sys.argv[2:]))
child = os.fork()
if child == 0:
    signal.alarm(20)
    connection = remote.connection().open(time.monotonic() + 15)
    print(connection.find(bytes(32), [bytes(32)], time.monotonic() + 15), flush=True)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    url = f"s3://{BUCKET}" if store.kind == "s3" else f"{store.server.url}/"
    options = [
        f"{name}={value}" for name, value in s3_options(store.server.url).items()
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            url,
            *(options if store.kind == "s3" else []),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


@pytest.mark.slow
def test_a_process_ends_quietly_amid_requests() -> None:
    script = """
import sys, time, numpy as np
from pagoda.tiers.remote.object_store import ObjectStoreClient
from pagoda.tiers.remote.store_client import PutRequest
connection = ObjectStoreClient(sys.argv[1]).connection().open(time.monotonic() + 15)
page, stored = np.zeros(4096, np.uint8), np.zeros(1 << 24, np.uint8)
try:
    connection.put(PutRequest(bytes(32), bytes(32), page, stored, lambda: True), time.monotonic() + 0.3)
except TimeoutError:
    print("late")
connection.close()
"""  # noqa: E501
    # receives everything and answers nothing
    with liar({"PUT": lambda _: []}) as (server, _):
        done = subprocess.run(
            [
                sys.executable,
                "-X",
                "dev",
                "-c",
                script,
                f"http://127.0.0.1:{server.port}/",
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "late"
    assert done.stderr == ""


def test_without_obstore_the_message_says_how_to_get_it() -> None:
    script = """
import sys
sys.modules["obstore"] = None
from pagoda.tiers.remote.object_store import ObjectStoreClient
try:
    ObjectStoreClient("s3://bucket")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "pip install 'pagodakv[objects]'" in done.stdout


@pytest.mark.slow
def test_a_private_authority_is_trusted_by_its_certificate(
    tmp_path: Path,
) -> None:
    certificate = authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    script = """
import sys, time
from pagoda.tiers.remote.object_store import ObjectStoreClient
try:
    ObjectStoreClient(sys.argv[1]).connection().open(time.monotonic() + 10)
    print("trusted")
except OSError as error:
    print(error)
"""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        encrypted(listener, context),
    ):
        url = f"https://localhost:{listener.getsockname()[1]}/"
        for file, said in (
            ("", "certificate verify failed"),
            (str(certificate), "trusted"),
        ):
            environment = (
                {**os.environ, "SSL_CERT_FILE": file}
                if file
                else dict(os.environ)
            )
            done = subprocess.run(
                [sys.executable, "-c", script, url],
                capture_output=True,
                text=True,
                timeout=60,
                env=environment,
            )
            assert said in done.stdout, (done.stdout, done.stderr)


@contextlib.contextmanager
def encrypted(listener: socket.socket, context: ssl.SSLContext) -> Iterator[None]:
    """Answer 404 to one request of each encrypted connection."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
                with context.wrap_socket(client, server_side=True) as safe:
                    safe.recv(1 << 16)
                    safe.sendall(answer(404))
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
