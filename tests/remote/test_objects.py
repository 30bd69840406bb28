"""Object stores: connections to real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.tiers.remote.object_store import (
    ObjectStoreClient,
    ObjectStoreConnection,
)
from pagoda.tiers.remote.store_client import (
    PutRequest,
    PutResult,
    RefusedError,
    Usage,
)
from pagoda.tiers.remote.store_urls import supports_direct
from tests.remote.chunks import walk
from tests.remote.evil import LyingHttp, growth
from tests.remote.evil import http as answer
from tests.remote.object_stores import (
    ENOUGH_SECONDS,
    MIB,
    NAMESPACE,
    PAGE,
    Room,
    Store,
    get,
    keys,
    noise,
    put,
    s3_options,
    until,
)

# ---- good days


@pytest.mark.slow
@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, 4096, 70_001, MIB + 1, 32 * MIB + 12_345]
)
def test_what_was_put_comes_back(
    connection: ObjectStoreConnection, nbytes: int
) -> None:
    stored = noise(nbytes)
    room = Room(nbytes + 11)
    assert put(connection, keys(1)[0], stored) is PutResult.STORED
    assert get(connection, keys(1)[0], room) == nbytes
    assert np.array_equal(room.memory[:nbytes], stored)
    assert np.array_equal(room.page, PAGE)
    assert room.seen is not None
    assert np.array_equal(room.seen, PAGE)
    assert room.wall_stands


def test_memory_that_may_not_be_written_can_be_put(
    connection: ObjectStoreConnection,
) -> None:
    stored = noise(10_000)
    stored.flags.writeable = False
    assert put(connection, keys(1)[0], stored) is PutResult.STORED


@pytest.mark.slow
def test_put_takes_no_memory_of_its_own(
    connection: ObjectStoreConnection, store: Store
) -> None:
    stored = noise(64 * MIB)
    put(connection, keys(2)[1], stored[:MIB])
    with growth() as grown:
        put(connection, keys(1)[0], stored)
    assert grown.peak_bytes < 16 * MIB


@pytest.mark.slow
def test_get_takes_no_memory_of_its_own(
    connection: ObjectStoreConnection,
) -> None:
    stored = noise(64 * MIB)
    room = Room(64 * MIB)
    put(connection, keys(1)[0], stored)
    get(connection, keys(1)[0], room)
    with growth() as grown:
        assert get(connection, keys(1)[0], room) == stored.nbytes
    assert grown.peak_bytes < 16 * MIB


def test_the_second_writer_finds_it_present(
    connection: ObjectStoreConnection,
) -> None:
    assert put(connection, keys(1)[0], noise(100)) is PutResult.STORED
    assert put(connection, keys(1)[0], noise(200)) is PutResult.PRESENT
    assert get(connection, keys(1)[0], Room(100)) == 100


def test_writers_at_the_same_time_leave_one_whole_chunk(store: Store) -> None:
    stored = noise(4 * MIB)
    connections = [store.remote().connection().open(until()) for _ in range(4)]
    results: list[PutResult] = []

    def write(one: ObjectStoreConnection) -> None:
        try:
            results.append(put(one, keys(1, 5)[0], stored))
        except OSError as error:
            # moto may answer 500 to writers at the same time
            if not str(error).endswith("500"):
                raise
            results.append(put(one, keys(1, 5)[0], stored))

    threads = [threading.Thread(target=write, args=(one,)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENOUGH_SECONDS)
    room = Room(stored.nbytes)
    assert get(connections[0], keys(1, 5)[0], room) == stored.nbytes
    assert np.array_equal(room.memory[: stored.nbytes], stored)
    assert len(results) == 4
    assert set(results) <= {PutResult.STORED, PutResult.PRESENT}
    assert PutResult.STORED in results
    if store.kind == "s3":
        assert results.count(PutResult.STORED) == 1
    connections[0].clear(None, walk(ENOUGH_SECONDS))
    for one in connections:
        one.close()


def test_what_is_no_longer_usable_does_not_stay(
    connection: ObjectStoreConnection,
) -> None:
    assert (
        put(connection, keys(1)[0], noise(5000), usable=False) is PutResult.STALE
    )
    assert get(connection, keys(1)[0], Room(5000)) is None
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {}


def test_what_is_absent_is_none_and_asks_for_no_place(
    connection: ObjectStoreConnection,
) -> None:
    room = Room(10)
    assert get(connection, keys(1)[0], room) is None
    assert room.seen is None


def test_what_is_not_wanted_or_does_not_fit_is_refused(
    connection: ObjectStoreConnection,
) -> None:
    put(connection, keys(1)[0], noise(5000))
    for room in (Room(5000, wanted=False), Room(4999)):
        with pytest.raises(RefusedError) as refused:
            get(connection, keys(1)[0], room)
        assert refused.value.reason is Reason.FAILED_CHECK
        assert room.wall_stands
    # the connection continues
    assert get(connection, keys(1)[0], Room(5000)) == 5000


@pytest.mark.slow
def test_find_counts_the_leading_keys(connection: ObjectStoreConnection) -> None:
    many = keys(40)
    for key in many[:29]:
        put(connection, key, noise(1))
    assert connection.find(NAMESPACE, [], until()) == 0
    for count in (1, 16, 17, 28, 29, 30, 40):
        assert connection.find(NAMESPACE, many[:count], until()) == min(count, 29)
    assert connection.find(NAMESPACE, many[29:], until()) == 0
    assert connection.find(bytes(32), many, until()) == 0
    connection.remove(NAMESPACE, [many[3]], until())
    # up to 16, each is requested
    assert connection.find(NAMESPACE, many[:16], until()) == 3


@pytest.mark.parametrize("there", [0, 1, 16, 17, 255, 272, 511, 512])
def test_find_needs_three_rounds_for_512_keys(there: int) -> None:
    with Counting(set(keys(there))) as (server, connection):
        assert connection.find(NAMESPACE, keys(512), until()) == there
        assert server.asked <= 48
        assert there or server.asked == 16  # nothing there: one round


@pytest.mark.parametrize("there", [[], [0], [17], [256], range(0, 512, 3)])
def test_chunks_behind_a_hole_cost_little_where_there_are_none(
    there: Sequence[int],
) -> None:
    """Each key is a request: 16 positions are asked about first."""
    some = keys(512)
    with Counting({some[at] for at in there}) as (server, connection):
        here = connection.present(NAMESPACE, some, until())
        if any(at % 32 == 0 for at in there):
            assert here == [at in there for at in range(512)]
            assert server.asked == 512
        else:
            assert not any(here)
            assert server.asked == 16
        # of few, all are asked about
        assert connection.present(NAMESPACE, some[15:25], until()) == [
            at in there for at in range(15, 25)
        ]


class Counting:
    """A server that has some keys, and a connection to it. No request of this test takes a place on
    a disk.
    """

    def __init__(self, there: set[bytes]) -> None:
        self._names = {key.hex() for key in there}
        self._server = LyingHttp()

    @property
    def asked(self) -> int:
        return sum(method == "HEAD" for method, _ in self._server.requests)

    def __enter__(self) -> tuple[Counting, ObjectStoreConnection]:
        self._server.lies["HEAD"] = lambda path: [
            answer(200, length=9999)
            if path.rpartition("/")[2] in self._names
            else answer(404)
        ]
        self._connection = (
            ObjectStoreClient(f"http://127.0.0.1:{self._server.port}/")
            .connection()
            .open(until())
        )
        return self, self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._server.close()


def test_remove_says_how_many_there_were(
    connection: ObjectStoreConnection,
) -> None:
    some = keys(20)
    for key in some[::2]:
        put(connection, key, noise(10))
    assert connection.remove(NAMESPACE, some, until()) == 10
    assert connection.remove(NAMESPACE, some, until()) == 0
    assert connection.remove(NAMESPACE, [], until()) == 0


@pytest.mark.slow
def test_clear_takes_ours_of_one_namespace_and_nothing_else(
    store: Store, connection: ObjectStoreConnection
) -> None:
    other = bytes(32)
    key = keys(1)[0]
    strangers = [
        "pagoda/1/readme",
        f"pagoda/1/{NAMESPACE.hex()}/readme",
        f"pagoda/1/{NAMESPACE.hex()}/ff/{key.hex()}",  # not its folder
        f"pagoda/1/{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}.bak",
        f"pagoda/2/{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}",
        f"pagoda2/1/{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}",
    ]
    for path in strangers:
        assert store.plain("PUT", path, b"not ours") in (200, 201)
    for one in keys(30):
        put(connection, one, noise(10))
        connection.put(
            PutRequest(other, one, PAGE, noise(10), lambda: True), until()
        )
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {
        NAMESPACE: 30,
        other: 30,
    }
    assert connection.clear(NAMESPACE, walk(ENOUGH_SECONDS)) == 30
    assert connection.clear(NAMESPACE, walk(ENOUGH_SECONDS)) == 0
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {other: 30}
    assert connection.clear(None, walk(ENOUGH_SECONDS)) == 30
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {}
    for path in strangers:
        assert store.plain("GET", path) == 200
        store.plain("DELETE", path)


@pytest.mark.slow
def test_clear_goes_on_over_many_pages(store: Store) -> None:
    if store.kind == "dav":
        pytest.skip("folders are not listed in pages")
    connection = store.remote(prefix="many").connection().open(until())
    for key in keys(600):
        store.plain(
            "PUT", f"many/1/{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}", b"x"
        )
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {NAMESPACE: 600}
    assert connection.clear(NAMESPACE, walk(ENOUGH_SECONDS)) == 600
    connection.close()


@pytest.mark.slow
def test_two_who_clear_at_once_both_end(
    store: Store, connection: ObjectStoreConnection
) -> None:
    for key in keys(60):
        put(connection, key, noise(1))
    other = store.remote().connection().open(until())
    counts: list[int] = []
    thread = threading.Thread(
        target=lambda: counts.append(other.clear(None, walk(ENOUGH_SECONDS)))
    )
    thread.start()
    counts.append(connection.clear(None, walk(ENOUGH_SECONDS)))
    thread.join(ENOUGH_SECONDS)
    assert len(counts) == 2
    assert connection.count_by_namespace(walk(ENOUGH_SECONDS)) == {}
    other.close()


def test_prefixes_do_not_see_each_other(
    store: Store, connection: ObjectStoreConnection
) -> None:
    other = store.remote(prefix="another").connection().open(until())
    put(connection, keys(1)[0], noise(10))
    assert get(other, keys(1)[0], Room(10)) is None
    assert other.clear(None, walk(ENOUGH_SECONDS)) == 0
    assert get(connection, keys(1)[0], Room(10)) == 10
    other.close()


def test_usage_is_not_said(connection: ObjectStoreConnection) -> None:
    assert connection.usage(until()) == Usage(None, None)


def test_a_link_can_be_used_within_somebodys_event_loop(
    connection: ObjectStoreConnection,
) -> None:
    async def caller() -> int | None:
        put(connection, keys(1)[0], noise(10))
        return get(connection, keys(1)[0], Room(10))

    assert asyncio.run(caller()) == 10
    assert get(connection, keys(1)[0], Room(10)) == 10


# ---- settings


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/y",
        "s3://",
        "s3:///path",
        "s3://b/a//b",
        "s3://b/../c",
        "http://h/a b",
        "s3://b?region=x",
    ],
)
def test_a_wrong_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match="object store's URL"):
        ObjectStoreClient(url)


@pytest.mark.parametrize("prefix", ["", "a/b", ".", "-x", "x" * 65])
def test_a_wrong_prefix_is_a_value_error(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        ObjectStoreClient("s3://bucket", prefix=prefix)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "gs://bucket", "az://box", "https://host/"]
)
def test_an_unknown_option_is_named_and_its_value_is_not(url: str) -> None:
    with pytest.raises(ValueError, match="acess_key") as wrong:
        ObjectStoreClient(url, options={"acess_key": "HUSHHUSH"})
    assert "HUSHHUSH" not in str(wrong.value)
    assert wrong.value.__suppress_context__


@pytest.mark.parametrize(
    "options",
    [
        {"unsigned_payload": "HUSHHUSH"},
        {"access_key_id": "HUSHHUSH"},
        {"timeout": "HUSHHUSH"},
    ],
)
def test_a_value_that_cannot_stand_is_not_shown(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(ValueError, match=next(iter(options))) as wrong:
        ObjectStoreClient("s3://bucket", options=options)
    assert "HUSHHUSH" not in str(wrong.value)


def test_plain_http_is_for_this_machine_unless_it_was_said() -> None:
    with pytest.raises(ValueError, match="allow_http"):
        ObjectStoreClient("http://example.com/dav/")
    with pytest.raises(ValueError, match="allow_http"):
        ObjectStoreClient(
            "s3://bucket", options={"endpoint": "http://minio:9000"}
        )
    ObjectStoreClient(
        "s3://bucket",
        options={"endpoint": "http://minio:9000", "allow_http": "true"},
    )
    ObjectStoreClient("https://example.com/dav/")
    ObjectStoreClient("http://[::1]:8080/dav/")


def test_names_and_addresses_have_no_secret() -> None:
    dav = ObjectStoreClient("https://me:HUSHHUSH@host:8443/a/b/")
    assert dav.name == "webdav"
    assert dav.address == "https://host:8443/a/b"
    s3 = ObjectStoreClient(
        "s3://bucket/p", options=s3_options("http://u:HUSHHUSH@127.0.0.1:9")
    )
    assert s3.name == "s3"
    assert s3.address == "s3://bucket/p at http://127.0.0.1:9"
    assert ObjectStoreClient("gs://bucket", name="far").name == "far"
    assert (
        ObjectStoreClient("az://box", options={"account_name": "me"}).address
        == "az://box"
    )


def test_defaults_give_way_to_what_was_said() -> None:
    for name in ("unsigned_payload", "aws_unsigned_payload"):
        ObjectStoreClient("s3://bucket", options={name: "false"})
    ObjectStoreClient("s3://bucket", options={"timeout": "5s"})


@pytest.mark.parametrize(
    ("url", "options", "straight"),
    [
        ("s3://bucket", {}, True),
        (
            "s3://bucket",
            {"region": "eu-central-1", "unsigned_payload": "true"},
            True,
        ),
        ("s3://bucket", {"unsigned_payload": "false"}, False),
        ("s3://bucket", {"sse_kms_key_id": "x"}, False),
        ("s3://bucket", {"aws_request_payer": "true"}, False),
        ("gs://bucket", {}, False),
        ("az://box", {}, False),
        ("https://host/", {}, True),
        ("https://host/", {"proxy_url": "http://proxy:1"}, False),
    ],
)
def test_what_a_url_cannot_say_goes_by_obstore(
    url: str, options: dict[str, str], straight: bool
) -> None:
    assert supports_direct(urlsplit(url), options) is straight


def test_a_proxy_of_the_environment_is_not_gone_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    assert not supports_direct(urlsplit("https://host/"), {})
    monkeypatch.setenv("no_proxy", "host")
    assert supports_direct(urlsplit("https://host/"), {})
