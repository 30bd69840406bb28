"""Requests to S3 and WebDAV use our own client: it follows no redirection, and no listing is
without end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import pytest

from pagoda.tiers.remote import http, s3_list_delete
from pagoda.tiers.remote.object_store import (
    ObjectStoreClient,
    ObjectStoreConnection,
)
from pagoda.tiers.remote.store_client import (
    ListingDeadline,
    ListingTimeout,
    PutResult,
    RefusedError,
)
from testbed.patience import Patience
from testbed.servers import BUCKET, Server, emptied_s3, nginx_dav
from tests.remote.chunks import fresh_prefix, keys_of, load, saved, tier_on, walk
from tests.remote.evil import Lie, LyingHttp
from tests.remote.evil import http as answer
from tests.remote.object_stores import (
    ENOUGH_SECONDS,
    NAMESPACE,
    Store,
    keys,
    noise,
    put,
    s3_options,
    trouble,
    until,
)
from tests.remote.proxy import proxy_to

obstore = pytest.importorskip("obstore")


@pytest.fixture(params=["s3", "dav"])
def pair(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[LyingHttp, LyingHttp, ObjectStoreClient]]:
    """A store, another server that answers everything with success, and the remote on the store."""
    store = LyingHttp()
    victim = LyingHttp()
    for method in ("GET", "HEAD", "PUT", "DELETE", "POST", "PROPFIND"):
        victim.lies[method] = lambda _: [answer(200, b"", 5000)]
    at = f"http://127.0.0.1:{store.port}"
    is_s3 = request.param == "s3"
    yield (
        store,
        victim,
        ObjectStoreClient("s3://b/x", options=s3_options(at))
        if is_s3
        else ObjectStoreClient(f"{at}/b/x/"),
    )
    store.close()
    victim.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_question_is_redirected(
    pair: tuple[LyingHttp, LyingHttp, ObjectStoreClient], status: int
) -> None:
    store, victim, remote = pair
    with contextlib.closing(remote.connection().open(until())) as connection:
        elsewhere = answer(
            status, more={"Location": f"http://127.0.0.1:{victim.port}/meta-data"}
        )
        for method in ("GET", "HEAD", "PUT", "DELETE", "POST", "PROPFIND"):
            store.lies[method] = lambda _: [elsewhere]
        calls: list[Callable[[], object]] = [
            lambda: connection.find(NAMESPACE, keys(3), until()),
            lambda: connection.find(NAMESPACE, keys(1), until()),
            lambda: put(connection, keys(1)[0], noise(10)),
            lambda: connection.remove(NAMESPACE, keys(3), until()),
            lambda: connection.clear(None, walk(ENOUGH_SECONDS)),
            lambda: connection.count_by_namespace(walk(ENOUGH_SECONDS)),
            lambda: connection.ping(until()),
        ]
        for call in calls:
            assert isinstance(trouble(call), RefusedError)
    assert victim.requests == []
    assert victim.connections == 0


def test_a_look_up_asks_for_sixteen_at_once_and_leaves_no_answer_behind() -> None:
    with (
        nginx_dav() as server,
        contextlib.closing(
            Store("dav", server).remote().connection().open(until())
        ) as connection,
    ):
        for key in keys(40):
            assert put(connection, key, noise(10)) is PutResult.STORED
        for count in (1, 2, 16, 17, 40):
            assert connection.find(NAMESPACE, keys(count), until()) == count
        assert connection.find(NAMESPACE, [*keys(5), *keys(11, 7)], until()) == 5
        assert connection.find(NAMESPACE, keys(3, 9), until()) == 0


@pytest.mark.slow
def test_an_idle_connection_that_was_forgotten_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.5)
    with nginx_dav() as server, proxy_to(server.port) as proxy:
        remote = ObjectStoreClient(
            f"http://127.0.0.1:{proxy.port}/", prefix=fresh_prefix()
        )
        chain = keys_of(4)
        saved(remote, chain)
        with tier_on(
            remote, deadline_seconds=ENOUGH_SECONDS, look_seconds=ENOUGH_SECONDS
        ) as tier:
            assert load(tier, chain, seconds=ENOUGH_SECONDS) == [None] * 4
            time.sleep(0.6)
            proxy.forget()
            assert load(tier, chain, seconds=ENOUGH_SECONDS) == [None] * 4
            assert tier.contains(keys_of(5)[4]) is False


# ---- S3's bucket as a whole


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"virtual_hosted_style_request": "true", "token": "a/b+c =="},
        {"region": "eu-central-1"},
    ],
)
def test_what_we_sign_is_what_obstore_signs(more: dict[str, str]) -> None:
    given = {
        "region": "us-east-1",
        "access_key_id": "A",
        "secret_access_key": "S/+x",
    } | more
    store = obstore.store.S3Store("bucket", config=given)
    signed = urlsplit(obstore.sign(store, "GET", "", timedelta(minutes=5)))
    same = s3_list_delete.signed_target("GET", signed, "S/+x", {})
    assert same is not None
    assert dict(parse_qsl(urlsplit(same).query)) == dict(parse_qsl(signed.query))
    assert s3_list_delete.signed_target("GET", signed, "another", {}) is None


def page(names: list[str], token: str | None) -> bytes:
    more = (
        f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    )
    rows = "".join(f"<Contents><Key>{name}</Key></Contents>" for name in names)
    return answer(
        200, f"<ListBucketResult>{rows}{more}</ListBucketResult>".encode()
    )


@contextlib.contextmanager
def listing(
    pages: Callable[[str], Lie],
) -> Iterator[tuple[LyingHttp, ObjectStoreConnection]]:
    """A connection to an S3 that answers GET with these, and claims to delete what it is asked
    to.
    """
    server = LyingHttp()
    remote = ObjectStoreClient(
        "s3://b/x", options=s3_options(f"http://127.0.0.1:{server.port}")
    )
    try:
        with contextlib.closing(remote.connection().open(until())) as connection:
            server.lies = {
                "GET": pages,
                "POST": lambda _: [answer(200, b"<DeleteResult/>")],
            }
            yield server, connection
    finally:
        server.close()


def name_of(key: bytes) -> str:
    return f"x/pagoda/1/{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}"


@pytest.mark.parametrize("call", ["clear", "census"])
def test_pages_without_end_end_at_one_deadline(call: str) -> None:
    with listing(lambda _: [page([name_of(keys(1)[0])], "more")]) as (
        _,
        connection,
    ):
        patience = Patience(ENOUGH_SECONDS / 2)
        given = ListingDeadline(ENOUGH_SECONDS, 0.5)
        with pytest.raises(ListingTimeout):
            connection.clear(
                None, given
            ) if call == "clear" else connection.count_by_namespace(given)
        assert not patience.ended, patience.said()


def test_only_names_that_are_ours_are_counted_and_deleted() -> None:
    ours = [name_of(key) for key in keys(3)]
    theirs = [
        "x/other",
        ours[0] + "0",
        ours[0].replace("/1/", "/2/"),
        "x/pagoda/1/&amp;",
        "<",
    ]
    deleted: list[str] = []
    with listing(lambda _: [page([*ours, *theirs], None)]) as (
        server,
        connection,
    ):
        assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {
            NAMESPACE: 3
        }
        server.lies["POST"] = lambda path: (
            deleted.append(path) or [answer(200, b"<DeleteResult/>")]
        )
        assert connection.clear(None, walk(ENOUGH_SECONDS)) == 3
    assert len(deleted) == 1
    assert "delete=" in deleted[0]


def test_what_was_not_deleted_is_said() -> None:
    said = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    with listing(lambda _: [page([name_of(keys(1)[0])], None)]) as (
        server,
        connection,
    ):
        server.lies["POST"] = lambda _: [answer(200, said)]
        assert "AccessDenied" in str(
            trouble(lambda: connection.clear(None, walk(ENOUGH_SECONDS)))
        )


def test_without_the_secret_the_bucket_is_listed_by_obstore(moto: Server) -> None:
    """As where the machine's own role signs: there is nothing that we could sign with."""
    remote = ObjectStoreClient(
        f"s3://{BUCKET}/x", options=s3_options(emptied_s3(moto).url)
    )
    with contextlib.closing(remote.connection().open(until())) as connection:
        connection._secret = None
        for key in keys(3):
            assert put(connection, key, noise(10)) is PutResult.STORED
        assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {
            NAMESPACE: 3
        }
        assert connection.clear(NAMESPACE, walk(ENOUGH_SECONDS)) == 3


@pytest.mark.slow
def test_pages_of_a_true_bucket(moto: Server) -> None:
    """More chunks than a page has; two that clear at once do not disturb each other."""
    remote = ObjectStoreClient(
        f"s3://{BUCKET}", options=s3_options(emptied_s3(moto).url)
    )
    with (
        contextlib.closing(remote.connection().open(until())) as connection,
        contextlib.closing(remote.connection().open(until())) as other,
    ):
        for key in keys(40):
            assert put(connection, key, noise(1)) is PutResult.STORED
        original = s3_list_delete._NAMES
        s3_list_delete._NAMES = 7
        try:
            assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {
                NAMESPACE: 40
            }
            thread = threading.Thread(
                target=lambda: other.clear(None, walk(ENOUGH_SECONDS))
            )
            thread.start()
            connection.clear(None, walk(ENOUGH_SECONDS))
            thread.join(ENOUGH_SECONDS)
        finally:
            s3_list_delete._NAMES = original
        assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {}
