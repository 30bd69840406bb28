"""Object stores: false answers, bad networks, servers that stop."""

from __future__ import annotations

import base64
import contextlib
import gzip
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote.http import resolve
from pagoda.tiers.remote.object_store import (
    ObjectStoreClient,
    ObjectStoreConnection,
)
from pagoda.tiers.remote.store_client import PutResult, RefusedError
from testbed.servers import BUCKET, Server, free_port
from tests.remote.chunks import begun_since, walk
from tests.remote.evil import (
    FolderedHttp,
    Lie,
    LyingHttp,
    dripping,
    endless,
    growth,
)
from tests.remote.evil import http as answer
from tests.remote.object_stores import (
    BY_OBSTORE,
    ENOUGH_SECONDS,
    MALICE_BYTES,
    MIB,
    NAMESPACE,
    PAGE,
    SHORT_SECONDS,
    Room,
    Store,
    Timed,
    eventually,
    get,
    keys,
    liar,
    noise,
    put,
    s3_options,
    trouble,
    until,
)
from tests.remote.proxy import STALLED, WELL, Fault, Proxy, black_hole, proxy_to


def connected(
    remote: ObjectStoreClient,
) -> contextlib.closing[ObjectStoreConnection]:
    """Connect for the time of a `with`."""
    connection = remote.connection()
    return contextlib.closing(connection.open(until()))


# ---- bad answers


@pytest.mark.parametrize(
    "more", [{}, {"request_payer": "false"}], ids=["straight", "by obstore"]
)
def test_a_missing_bucket_is_refused(more: dict[str, str], moto: Server) -> None:
    remote = ObjectStoreClient(
        "s3://no-such-bucket", options=s3_options(moto.url) | more
    )
    with pytest.raises(RefusedError, match="no such bucket") as refused:
        remote.connection().open(until())
    assert refused.value.reason is Reason.IO_ERROR


@pytest.mark.parametrize("status", [401, 403])
def test_wrong_credentials_are_refused_in_one_line_without_secrets(
    status: int,
) -> None:
    body = b"<Error><Code>InvalidAccessKeyId</Code><Message>HUSHHUSH\n\nHUSHHUSH</Message></Error>"
    with liar(
        {method: answer(status, body) for method in ("GET", "PUT", "HEAD")}
    ) as (server, _):
        remote = ObjectStoreClient(
            f"s3://{BUCKET}",
            options=s3_options(f"http://127.0.0.1:{server.port}"),
        )
        with pytest.raises(RefusedError) as refused:
            remote.connection().open(until())
        said = str(refused.value)
        assert refused.value.reason is Reason.IO_ERROR
        assert f"{status} InvalidAccessKeyId" in said
        assert "HUSHHUSH" not in said
        assert "\n" not in said
        assert len(said) < 300
        assert (
            refused.value.__suppress_context__
            or refused.value.__context__ is None
        )


GREAT = 1 << 40  # of lengths that are not true
BODY = PAGE.tobytes() + bytes(MIB)
LIES: dict[str, Callable[[str], Lie]] = {
    "shorter than a header": lambda _: [answer(200, bytes(100))],
    "shorter than announced, and then nothing": lambda _: [
        answer(200, BODY, len(BODY) + 1)
    ],
    "much larger than its place": lambda _: endless(answer(200, b"", GREAT)),
    "no length": lambda _: endless(
        b"HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
    ),
    "in chunks": lambda _: endless(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"100000\r\n" + bytes(MIB) + b"\r\n",
    ),
    "a negative length": lambda _: [answer(200, BODY, -1)],
    "two lengths": lambda _: [answer(200, BODY, more={"content-length": "7"})],
    "a drip": lambda _: dripping(answer(200, BODY)),
    "a body that drips": lambda _: [
        answer(200, b"", len(BODY)),
        *dripping(BODY[:20]),
    ],
    "redirects without end": lambda path: [
        answer(302, more={"Location": path + "x"})
    ],
    "a header without end": lambda _: endless(b"HTTP/1.1 200 OK\r\nX-Large: "),
    "headers without end": lambda _: endless(
        b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100_000
    ),
    "interim answers without end": lambda _: endless(
        b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000
    ),
    "noise": lambda _: [bytes(range(256)) * 100],
    "silence": lambda _: [],
    "server error": lambda _: [answer(500, b"HUSHHUSH")],
    "slow down": lambda _: [answer(503)],
}


@pytest.mark.parametrize(
    "options", [{}, BY_OBSTORE], ids=["straight", "by obstore"]
)
@pytest.mark.parametrize("lie", LIES)
def test_a_get_ends_in_time_whatever_is_answered(
    lie: str, options: dict[str, str]
) -> None:
    with (
        liar({}, options) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies["GET"] = LIES[lie]
        room = Room(MIB)
        with growth() as grown:
            error = trouble(
                lambda: get(connection, keys(1)[0], room, SHORT_SECONDS)
            )
        assert room.wall_stands
        assert grown.peak_bytes < MALICE_BYTES
        if lie in ("shorter than a header", "much larger than its place"):
            assert isinstance(error, RefusedError)
            assert error.reason is Reason.FAILED_CHECK


@pytest.mark.parametrize(
    "lie",
    [
        "a drip",
        "redirects without end",
        "headers without end",
        "noise",
        "silence",
        "slow down",
    ],
)
@pytest.mark.parametrize("method", ["HEAD", "PUT"])
@pytest.mark.parametrize(
    "options", [{}, BY_OBSTORE], ids=["straight", "by obstore"]
)
def test_a_put_ends_in_time_whatever_is_answered(
    lie: str, method: str, options: dict[str, str]
) -> None:
    with (
        liar({}, options) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies[method] = LIES[lie]
        with growth() as grown:
            trouble(
                lambda: put(
                    connection, keys(1)[0], noise(MIB), seconds=SHORT_SECONDS
                )
            )
        assert grown.peak_bytes < MALICE_BYTES


ERRORS: dict[str, Callable[[str], Lie]] = {
    "a great length": lambda _: endless(answer(403, b"", 1 << 50)),
    "a great length, and nothing": lambda _: [answer(500, b"", 1 << 50)],
    "no length": lambda _: endless(b"HTTP/1.1 404 Not Found\r\n\r\n"),
    "chunks": lambda _: endless(
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"100000\r\n" + bytes(MIB) + b"\r\n",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_errors_take_no_memory_however_long_they_are(
    method: str, error: str
) -> None:
    with (
        liar({}) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies[method] = ERRORS[error]
        with growth() as grown, Timed():
            with contextlib.suppress(OSError, RefusedError):
                get(connection, keys(1)[0], Room(MIB), SHORT_SECONDS)
            with contextlib.suppress(OSError, RefusedError):
                put(
                    connection,
                    keys(1)[0],
                    noise(10),
                    usable=False,
                    seconds=SHORT_SECONDS,
                )
        assert grown.peak_bytes < 8 * MIB


def test_an_error_in_chunks_is_understood() -> None:
    body = b"<Error><Code>NoSuchBucket</Code></Error>"
    head = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
    lie = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with (
        liar({"GET": lie}) as (_, remote),
        Timed(),
        pytest.raises(RefusedError, match="no such bucket"),
    ):
        remote.connection().open(until())


def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    with (
        liar({}) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies["GET"] = lambda _: [
            interim + answer(200, PAGE.tobytes() + b"abc")
        ]
        for _ in range(2):
            room = Room(10)
            assert get(connection, keys(1)[0], room, 5.0) == 3
            assert room.memory[:3].tobytes() == b"abc"


def test_a_body_longer_than_announced_is_cut_and_not_taken_for_the_next_answer() -> (
    None
):
    body = PAGE.tobytes() + b"abc"
    with (
        liar({}) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies["GET"] = lambda _: [answer(200, body + BODY, len(body))]
        for _ in range(3):
            room = Room(10)
            assert get(connection, keys(1)[0], room, 5.0) == 3
            assert room.memory[:3].tobytes() == b"abc"
            assert room.wall_stands


def test_nothing_is_unpacked_on_the_way() -> None:
    body = gzip.compress(bytes(64 * MIB))
    with (
        liar({}) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies["GET"] = lambda _: [
            answer(200, body, more={"Content-Encoding": "gzip"})
        ]
        room = Room(MIB)
        with growth() as grown:
            assert (
                get(connection, keys(1)[0], room, 5.0) == len(body) - HEADER_BYTES
            )
        assert room.page.tobytes() == body[:HEADER_BYTES]
        assert grown.peak_bytes < MALICE_BYTES


def test_a_store_that_cannot_create_is_overwritten() -> None:
    requests: list[int] = []

    def first_says_no(_: str) -> Lie | None:
        requests.append(1)
        return [answer(501)] if len(requests) == 1 else None

    with liar({}) as (server, _):
        options = s3_options(f"http://127.0.0.1:{server.port}")
        connection = (
            ObjectStoreClient(f"s3://{BUCKET}", options=options)
            .connection()
            .open(until())
        )
        server.lies["PUT"] = first_says_no
        assert put(connection, keys(2)[0], noise(1)) is PutResult.STORED
        assert len(requests) == 2
        assert put(connection, keys(2)[1], noise(1)) is PutResult.STORED
        assert len(requests) == 3
        connection.close()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(413, Reason.TOO_LARGE), (507, Reason.FULL), (403, Reason.IO_ERROR)],
)
def test_a_put_that_is_refused_says_why(status: int, reason: Reason) -> None:
    with (
        liar({"PUT": answer(status)}) as (_, remote),
        connected(remote) as connection,
    ):
        with pytest.raises(RefusedError) as refused:
            put(connection, keys(1)[0], noise(10))
        assert refused.value.reason is reason


@pytest.mark.parametrize(
    "options", [{}, BY_OBSTORE], ids=["straight", "by obstore"]
)
def test_a_web_server_with_a_page_for_everything_is_no_store(
    options: dict[str, str],
) -> None:
    page = answer(200, b"<!doctype html>" + bytes(5000))
    with (
        liar({"GET": page, "HEAD": answer(200, b"", 5015)}, options) as (
            _,
            remote,
        ),
        pytest.raises(RefusedError, match="look at the URL"),
    ):
        remote.connection().open(until())


def test_folders_are_made_where_a_put_makes_none() -> None:
    server = FolderedHttp()
    remote = ObjectStoreClient(f"http://127.0.0.1:{server.port}/deep/er/")
    with (
        contextlib.closing(server),
        connected(remote) as connection,
    ):
        for key in keys(3):
            assert put(connection, key, noise(10)) is PutResult.STORED
        assert connection.find(NAMESPACE, keys(3), until()) == 3
        assert len(server.objects) == 3
        assert sum(method == "MKCOL" for method, _ in server.requests) < 20


def test_nothing_is_taken_for_stored_where_no_folder_can_be_made() -> None:
    server = FolderedHttp(makes=False)
    remote = ObjectStoreClient(f"http://127.0.0.1:{server.port}/deep/er/")
    with (
        contextlib.closing(server),
        connected(remote) as connection,
        pytest.raises(RefusedError, match="409"),
    ):
        put(connection, keys(1)[0], noise(10))
    assert not server.objects


def test_what_another_writer_may_have_taken_back_is_not_taken_for_present() -> (
    None
):
    with liar({"PUT": answer(409)}) as (server, _):
        options = s3_options(f"http://127.0.0.1:{server.port}")
        connection = (
            ObjectStoreClient(f"s3://{BUCKET}", options=options)
            .connection()
            .open(until())
        )
        assert put(connection, keys(1)[0], noise(10)) is PutResult.BUSY
        connection.close()


def test_a_walk_ends_however_deep_the_folders_go() -> None:
    def deeper(path: str) -> Lie:
        names = [
            path,
            *(f"{path.rstrip('/')}/{part}" for part in ("ab", "cd" * 32)),
        ]
        rows = "".join(
            f"<D:response><D:href>{name}</D:href><D:propstat><D:prop><D:getlastmodified>Thu, 01 "
            "Jan 2026 00:00:00 GMT"
            "</D:getlastmodified><D:resourcetype><D:collection/></D:resourcetype></D:prop>"
            "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
            for name in names
        )
        return [
            answer(
                207,
                f'<D:multistatus xmlns:D="DAV:">{rows}</D:multistatus>'.encode(),
            )
        ]

    with (
        liar({"PROPFIND": deeper}) as (server, remote),
        connected(remote) as connection,
    ):
        assert connection.count_by_namespace(walk(5.0)) == {}
        assert sum(method == "PROPFIND" for method, _ in server.requests) == 3


def test_a_listing_may_come_in_chunks() -> None:
    key = keys(1)[0].hex()
    path = f"/pagoda/1/{NAMESPACE.hex()}/{key[:2]}/{key}"
    listing = f"<d:multistatus><d:response><d:href> {path} </d:href></d:response></d:multistatus>".encode()  # noqa: E501
    parts = [listing[at : at + 7] for at in range(0, len(listing), 7)]
    pieces = b"".join(b"%X;x=y\r\n%b\r\n" % (len(part), part) for part in parts)
    lie = (
        b"HTTP/1.1 207 M\r\nTransfer-Encoding: chunked\r\n\r\n"
        + pieces
        + b"0\r\nTrailer: x\r\n\r\n"
    )
    with (
        liar({"PROPFIND": lie}) as (_, remote),
        connected(remote) as connection,
    ):
        assert connection.count_by_namespace(walk(5.0)) == {NAMESPACE: 1}


def test_a_server_that_cannot_list_says_so() -> None:
    with (
        liar({"PROPFIND": answer(405)}) as (_, remote),
        connected(remote) as connection,
    ):
        said = str(trouble(lambda: connection.clear(None, walk(5.0))))
        assert "PROPFIND" in said


def test_user_and_password_of_a_url_are_sent_and_never_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        remote = ObjectStoreClient(f"http://me:HUSH%2FHUSH@127.0.0.1:{port}/dav/")
        asked: list[bytes] = []

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                asked.append(client.recv(1 << 16))
                client.sendall(answer(401))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(RefusedError, match="401") as refused:
            remote.connection().open(until())
        thread.join(60)
    sent = b"Basic " + base64.b64encode(b"me:HUSH/HUSH")
    assert b"authorization: " + sent in asked[0].replace(
        b"Authorization", b"authorization"
    )
    assert "HUSH" not in str(refused.value)
    assert "HUSH" not in remote.address


# ---- bad days


def test_nobody_there_is_an_oserror() -> None:
    trouble(
        lambda: (
            ObjectStoreClient(f"http://127.0.0.1:{free_port()}/")
            .connection()
            .open(until(SHORT_SECONDS))
        )
    )


def test_an_unknown_host_is_an_oserror() -> None:
    error = trouble(
        lambda: (
            ObjectStoreClient("https://no-such-host.invalid/")
            .connection()
            .open(until(SHORT_SECONDS))
        )
    )
    assert isinstance(error, OSError)


def test_a_port_that_never_answers_is_given_up_in_time() -> None:
    with black_hole() as port:
        error = trouble(
            lambda: (
                ObjectStoreClient(f"http://127.0.0.1:{port}/")
                .connection()
                .open(until(SHORT_SECONDS))
            )
        )
        assert isinstance(error, TimeoutError)


def test_a_time_that_has_passed_is_a_timeout(
    connection: ObjectStoreConnection,
) -> None:
    assert isinstance(
        trouble(lambda: get(connection, keys(1)[0], Room(1), -1.0)), TimeoutError
    )


@pytest.mark.parametrize(
    "what", ["find", "get", "put", "remove", "clear", "census", "ping"]
)
def test_a_stopped_server_is_given_up_in_time(store: Store, what: str) -> None:
    connection = store.remote().connection().open(until())
    calls: dict[str, Callable[[], object]] = {
        "find": lambda: connection.find(
            NAMESPACE, keys(40), until(SHORT_SECONDS)
        ),
        "get": lambda: get(connection, keys(1)[0], Room(10), SHORT_SECONDS),
        "put": lambda: put(
            connection, keys(1)[0], noise(8 * MIB), seconds=SHORT_SECONDS
        ),
        "remove": lambda: connection.remove(
            NAMESPACE, keys(3), until(SHORT_SECONDS)
        ),
        "clear": lambda: connection.clear(NAMESPACE, walk(SHORT_SECONDS)),
        "census": lambda: connection.count_by_namespace(walk(SHORT_SECONDS)),
        "ping": lambda: connection.ping(until(SHORT_SECONDS)),
    }
    store.server.stop()
    try:
        assert isinstance(trouble(calls[what]), TimeoutError)
    finally:
        store.server.cont()
    with Timed():
        connection.close()
    store.remote().connection().open(until()).close()


def through(store: Store, proxy: Proxy) -> ObjectStoreConnection:
    return store.remote(port=proxy.port).connection().open(until())


FAULTS = {
    "stalled": Fault(stall=True),
    "cut early": Fault(cut_at=300),
    "cut late": Fault(cut_at=MIB),
    "reset": Fault(cut_at=MIB, reset=True),
    "slow": Fault(bytes_per_second=100_000.0),
    "lossy": Fault(lose=range(MIB, MIB + 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_on_the_way_down(
    store: Store, connection: ObjectStoreConnection, fault: str
) -> None:
    put(connection, keys(1)[0], noise(4 * MIB))
    with (
        proxy_to(store.server.port) as proxy,
        contextlib.closing(through(store, proxy)) as bad,
    ):
        proxy.down = FAULTS[fault]
        room = Room(4 * MIB)
        trouble(lambda: get(bad, keys(1)[0], room, SHORT_SECONDS))
        assert room.wall_stands
        proxy.heal()
        with contextlib.closing(through(store, proxy)) as again:
            assert get(again, keys(1)[0], room) == 4 * MIB


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_on_the_way_up_leaves_no_part(
    store: Store, connection: ObjectStoreConnection, fault: str
) -> None:
    stored = noise(4 * MIB)
    with (
        proxy_to(store.server.port) as proxy,
        contextlib.closing(through(store, proxy)) as bad,
    ):
        proxy.up = FAULTS[fault]
        trouble(lambda: put(bad, keys(1)[0], stored, seconds=SHORT_SECONDS))
        assert get(connection, keys(1)[0], Room(4 * MIB)) in (None, 4 * MIB)


def test_a_half_open_connection_is_not_used_again_by_the_next_link(
    store: Store,
) -> None:
    with proxy_to(store.server.port) as proxy:
        connection = through(store, proxy)
        proxy.both(STALLED)
        trouble(lambda: connection.ping(until(SHORT_SECONDS)))
        connection.close()
        proxy.both(WELL)
        with contextlib.closing(through(store, proxy)) as again:
            again.ping(until())


def test_what_is_given_up_ends_its_connection(store: Store) -> None:
    with proxy_to(store.server.port) as proxy:
        connection = through(store, proxy)
        proxy.both(STALLED)
        trouble(lambda: connection.ping(until(SHORT_SECONDS)))
        connection.close()
        proxy.heal()
        assert eventually(lambda: proxy.open_connections == 0)


@pytest.mark.slow
def test_a_server_killed_amid_a_get_and_back_again(store: Store) -> None:
    nbytes = 32 * MIB  # more than what the sockets on the way hold
    with proxy_to(store.server.port) as proxy:
        with contextlib.closing(
            store.remote().connection().open(until())
        ) as connection:
            put(connection, keys(1)[0], noise(nbytes))
        with contextlib.closing(through(store, proxy)) as slow:
            proxy.down = Fault(bytes_per_second=2e7)
            killer = threading.Timer(0.2, store.server.kill)
            killer.start()
            try:
                trouble(lambda: get(slow, keys(1)[0], Room(nbytes), 30.0))
                trouble(lambda: slow.ping(until(SHORT_SECONDS)))
            finally:
                killer.join()
                store.server.restart()
    with contextlib.closing(
        store.remote().connection().open(until())
    ) as connection:
        # the files are there again, what was only in memory is not
        assert get(connection, keys(1)[0], Room(nbytes)) == (
            nbytes if store.kind == "dav" else None
        )
        connection.clear(None, walk(ENOUGH_SECONDS))


@pytest.mark.slow
def test_a_server_that_was_restarted_is_used_by_the_same_link(
    store: Store,
) -> None:
    with contextlib.closing(
        store.remote().connection().open(until())
    ) as connection:
        store.server.restart()
        assert get(connection, keys(1)[0], Room(1)) is None


def test_abort_ends_a_call_from_another_thread() -> None:
    with (
        liar({}) as (server, remote),
        connected(remote) as connection,
    ):
        server.lies["GET"] = LIES["silence"]
        threading.Timer(0.1, connection.abort).start()
        with Timed(), pytest.raises(OSError, match="aborted"):
            get(connection, keys(1)[0], Room(1))
        with pytest.raises(OSError, match="closed"):
            connection.ping(until())


def test_close_from_another_thread_ends_a_call() -> None:
    with liar({}) as (server, remote):
        connection = remote.connection().open(until())
        server.lies["GET"] = LIES["silence"]
        threading.Timer(0.1, connection.close).start()
        with Timed(), pytest.raises(OSError):
            get(connection, keys(1)[0], Room(1))
        connection.close()
        connection.abort()


@pytest.mark.slow
def test_links_leave_no_files_open(store: Store) -> None:
    remote = store.remote()
    remote.connection().open(until()).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        connection = remote.connection().open(until())
        connection.find(NAMESPACE, keys(16), until())
        connection.close()
    del connection
    assert eventually(
        lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    )


# ---- names of hosts


@pytest.mark.slow
def test_a_host_whose_first_address_leads_nowhere_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LyingHttp()
    with black_hole() as hole, contextlib.closing(server):
        ports = hole, server.port
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
            for port in ports
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        connection = (
            ObjectStoreClient("http://localhost:1/").connection().open(until(4.0))
        )
        assert connection.find(NAMESPACE, keys(1), until()) == 0
        connection.close()


def test_names_that_take_too_long_cost_one_thread_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    before = threading.enumerate()

    def slow(*_: object, **__: object) -> list[object]:
        release.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        for _ in range(5):
            for host in ("one", "another"):
                with Timed(), pytest.raises(TimeoutError):
                    resolve(host, 1, until(0.05))
        assert len(begun_since(before, "pagoda-resolve")) == 2
        release.set()
        assert eventually(lambda: not begun_since(before, "pagoda-resolve"))
        assert resolve("one", 1, until()) == []
    finally:
        release.set()


def test_a_look_up_that_fails_in_any_way_is_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> list[object]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fails)
        with pytest.raises(OSError, match="cannot be looked up: MemoryError"):
            resolve("somewhere", 80, until())
    assert resolve("127.0.0.1", 80, until())


def test_what_is_no_name_is_not_known() -> None:
    for host in ("a" * 64 + ".internal", "a..b"):
        with pytest.raises(OSError, match="DNS"):
            resolve(host, 80, until())
