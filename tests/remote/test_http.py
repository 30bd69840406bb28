"""HTTP connections in the clear and over TLS: servers that close them, refuse early, or write
headers in their way.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pagoda.tiers.remote.http import HttpConnection
from testbed.servers import authority
from tests.remote.evil import HastyHttp, http

MIB = 1 << 20
Serve = Callable[[bytes], tuple[HastyHttp, HttpConnection]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("authority")
    authority(root)
    return root


@pytest.fixture(params=["http", "https"])
def serve(
    request: pytest.FixtureRequest,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Serve]:
    """Start a server that gives one answer a connection; return it and a connection to it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.crt"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(
        certificates / "server.crt", certificates / "server.key"
    )
    with contextlib.ExitStack() as stack:

        def start(answer: bytes) -> tuple[HastyHttp, HttpConnection]:
            server = HastyHttp(
                answer, context if request.param == "https" else None
            )
            stack.callback(server.close)
            link = HttpConnection(
                urlsplit(f"{request.param}://localhost:{server.port}/")
            )
            stack.callback(link.drop)
            return server, link

        yield start


def until() -> float:
    return time.monotonic() + 60.0


def test_a_connection_that_the_server_has_closed_is_opened_again(
    serve: Serve,
) -> None:
    server, link = serve(http(200, b"all of it"))
    for number in range(1, 4):
        for method, body in (("GET", []), ("PUT", [memoryview(b"some")])):
            response = link.request(method, "/x", until(), {}, body)
            assert response.status == 200
            assert not response.closes
            assert link.finish(response, 0, until()) == b"all of it"
        assert server.connections == 2 * number


@pytest.mark.parametrize("status", [401, 413, 507])
def test_a_refusal_before_all_was_sent_says_why(
    serve: Serve, status: int
) -> None:
    _, link = serve(http(status, b"why"))
    for _ in range(3):
        response = link.request(
            "PUT", "/x", until(), {}, [memoryview(bytes(16 * MIB))]
        )
        assert response.status == status
        assert response.closes
        assert link.finish(response, 0, until()) == b"why"


@pytest.mark.parametrize(
    ("head", "body", "closes"),
    [
        (b"content-length: 4", b"body", False),
        (b"CONTENT-LENGTH: 4\r\nCONNECTION: CLOSE", b"body", True),
        (
            b"Content-Length: 4\r\ncontent-length: 4\r\nconnection: Close",
            b"body",
            True,
        ),
        (b"transfer-encoding: Chunked", b"4\r\nbody\r\n0\r\n\r\n", False),
        (
            b"TRANSFER-ENCODING: CHUNKED\r\nConnection: keep-alive",
            b"4\r\nbody\r\n0\r\n\r\n",
            False,
        ),
    ],
)
def test_headers_mean_the_same_in_any_case(
    serve: Serve, head: bytes, body: bytes, closes: bool
) -> None:
    _, link = serve(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)
    response = link.request("GET", "/x", until())
    assert response.closes is closes
    assert link.read_body(response, MIB, until()) == b"body"
