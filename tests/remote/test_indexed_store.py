"""An object store below a Redis that knows its chunks: a look-up sends the object store nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.config.remote_urls import parse, redacted
from pagoda.tiers.base import Done
from pagoda.tiers.remote.store_client import GetRequest, PutRequest, PutResult
from testbed.patience import wait_until
from testbed.servers import BUCKET, Server, redis_server
from tests.cache.kit import (
    CHUNK,
    cache_at,
    hit_of,
    kv_of,
    prompt,
    served,
    stored,
)
from tests.remote.chunks import (
    ROOT,
    chunks_of,
    ends,
    keys_of,
    soon,
    tier_on,
)
from tests.remote.evil import LyingRedis
from tests.remote.object_stores import until
from tests.remote.redis_kit import redis_client

KEYS = "region=us-east-1&access_key_id=a&secret_access_key=b&allow_http=true"


@contextmanager
def counted(s3: Server) -> Iterator[tuple[str, Counter[str]]]:
    """A proxy before the object store that counts its requests by method; its URL."""
    asked: Counter[str] = Counter()

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            asked[self.command] += 1
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with closing(
                HTTPConnection("127.0.0.1", s3.port, timeout=20)
            ) as line:
                line.request(self.command, self.path, body, dict(self.headers))
                answer = line.getresponse()
                text = answer.read()
            self.send_response(answer.status)
            self.send_header(
                "Content-Length",
                answer.getheader("Content-Length") or str(len(text)),
            )
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _forward

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def place(
    s3: Server, server: Server, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Counter[str]]]:
    """The URL of an indexed tier that this test has for itself, and the requests that its object
    store got.
    """
    with redis_client(server) as other:
        other.flushall()
    with counted(s3) as (endpoint, asked):
        yield (
            f"s3://{BUCKET}/{request.node.name}?endpoint={endpoint}&{KEYS}&look=30s&deadline=30s"
            f"&index=redis://127.0.0.1:{server.port}/0",
            asked,
        )


@pytest.mark.slow
def test_a_look_up_sends_the_object_store_nothing(
    place: tuple[str, Counter[str]],
) -> None:
    url, asked = place
    tokens = prompt(40)
    with cache_at(None, None, remote=url) as cache:
        stored(cache, tokens)
        assert asked["PUT"] == 40
        assert asked["HEAD"] == 0
    with cache_at(None, None, remote=url) as cache:
        cache.lookup(prompt(1, 9))  # opens the connection
        before = asked.copy()
        for _ in range(3):
            assert cache.lookup(tokens).num_tokens == 40 * CHUNK
            assert cache.lookup(prompt(20, 7)).num_tokens == 0
        assert asked == before
        assert hit_of(cache, tokens).num_tokens == 40 * CHUNK
        stored(cache, tokens)
        assert asked["PUT"] == 40
        assert asked["HEAD"] == 0


def test_an_object_that_was_received_is_served_whatever_becomes_of_its_mark(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    url, _ = place
    tokens = prompt(6)
    with cache_at(None, None, remote=url) as cache:
        stored(cache, tokens)
    with closing(LyingRedis(server.port)) as proxy:
        proxy.lies[b"HLEN"] = lambda said: [b"-NOPERM this user may not\r\n"]
        with cache_at(
            None, None, remote=url.replace(f":{server.port}/", f":{proxy.port}/")
        ) as cache:
            assert hit_of(cache, tokens).num_tokens == 6 * CHUNK


@pytest.mark.slow
def test_an_object_that_was_deleted_is_a_miss_and_stored_again(
    place: tuple[str, Counter[str]], s3: Server, server: Server
) -> None:
    """As by a rule of the bucket's lifecycle: the index does not know of it."""
    url, _ = place
    tokens = prompt(6)
    with cache_at(None, None, remote=url) as cache:
        stored(cache, tokens)
        third = cache.keys(tokens)[2][2]
    with redis_client(server) as other:
        (mark,) = other.keys(f"*{{{third.hex()}}}")
    root = bytes.fromhex(mark.decode().split(":")[2])
    bucket = (
        parse(url.partition("&index=")[0]).engine().connection().open(until())
    )
    assert bucket.remove(root, [third], until()) == 1
    bucket.close()
    with cache_at(None, None, remote=url) as cache:
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 2 * CHUNK
        assert hit.reason == Reason.ABSENT
        with redis_client(server) as other:
            assert not other.exists(mark)
        stored(cache, tokens)
    with cache_at(None, None, remote=url) as cache:
        assert hit_of(cache, tokens).num_tokens == 6 * CHUNK


def test_an_index_that_was_emptied_is_filled_by_stores(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    url, _ = place
    tokens = prompt(6)
    with cache_at(None, None, remote=url) as cache:
        stored(cache, tokens)
    with redis_client(server) as other:
        other.flushall()
    with cache_at(None, None, remote=url) as cache:
        assert hit_of(cache, tokens).num_tokens == 0
        stored(cache, tokens)
        assert hit_of(cache, tokens).num_tokens == 6 * CHUNK


def test_a_load_keeps_the_mark(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    """A Redis that evicts what was not used for long must know that the object is used."""
    url, _ = place
    with redis_client(server) as other:
        with cache_at(None, None, remote=f"{url}%3Fttl=1h") as cache:
            stored(cache, prompt(1))
            (mark,) = other.keys("pagoda-index-*")
            other.pexpire(mark, 1_000_000)
        with cache_at(None, None, remote=f"{url}%3Fttl=1h") as cache:
            assert hit_of(cache, prompt(1)).num_tokens == CHUNK
        assert 2_000_000 < other.pttl(mark) <= 3_600_000


def test_a_load_ranks_the_mark_as_the_store_did(
    place: tuple[str, Counter[str]],
) -> None:
    """Where Redis evicts by life, the mark of a chunk deep in a chain goes first, also after it was
    used.
    """
    options = ("--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl")
    root = bytes(32)
    key = b"k" * 32
    page = np.ones(4096, np.uint8)
    stored_bytes = np.ones(100, np.uint8)
    room = np.empty(100, np.uint8)
    with (
        redis_server(*options) as by_life,
        redis_client(by_life) as other,
    ):
        url = f"{place[0].partition('&index=')[0]}&index={by_life.url}/0%3Fttl=1h"
        soon = time.monotonic() + 30
        with closing(parse(url).engine().connection().open(soon)) as connection:
            assert (
                connection.put(
                    PutRequest(root, key, page, stored_bytes, lambda: True), soon
                )
                is PutResult.STORED
            )
            (mark,) = other.keys("pagoda-index-*")
            other.pexpire(mark, 1_000_000)
            assert (
                connection.get(
                    GetRequest(root, key, page, lambda: room, 600_000), soon
                )
                == 100
            )
        assert 2_900_000 < other.pttl(mark) <= 3_000_000


def test_what_is_claimed_in_the_index_and_not_sent_is_released(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    keys = keys_of(4)
    with redis_client(server) as truth:

        def still_valid() -> bool:
            return len(truth.keys("*:w")) < len(keys)

        with tier_on(
            parse(place[0]).engine(),
            connections=1,
        ) as tier:
            done = ends(
                tier.store(chunks_of(keys, still_valid=still_valid), ROOT)
            )
            assert done == [Done(False, Reason.STALE)] * len(keys)
            with soon():
                wait_until(lambda: not truth.keys("*"))
    assert not place[1]["PUT"]


def test_what_is_stale_once_it_was_sent_gets_no_mark(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    url, asked = place
    with tier_on(parse(url).engine()) as tier:
        chunks = chunks_of(keys_of(1), still_valid=lambda: not asked["PUT"])
        assert ends(tier.store(chunks, ROOT)) == [Done(False, Reason.STALE)]
        with redis_client(server) as truth, soon():
            wait_until(lambda: not truth.keys("*"))
    assert asked["PUT"] == 1


def test_remove_and_clear_reach_both(
    place: tuple[str, Counter[str]], server: Server
) -> None:
    url, _ = place
    with (
        redis_client(server) as other,
        cache_at(None, None, remote=url) as cache,
    ):
        stored(cache, prompt(4))
        assert len(other.keys("pagoda-index-*")) == 4 == other.dbsize()
        cache.clear()
        assert other.dbsize() == 0
        assert hit_of(cache, prompt(4)).num_tokens == 0

    keys = keys_of(2)
    with (
        redis_client(server) as other,
        tier_on(parse(url).engine(), deadline_seconds=30) as tier,
    ):
        for end in ends(tier.store(chunks_of(keys), ROOT)):
            assert end.ok
        assert tier.remove(keys[1], ROOT)
        assert not tier.remove(keys[1], ROOT)
        assert other.dbsize() == 1
        assert tier.match_prefix(keys, namespace=ROOT) == 1


def test_an_index_that_does_not_answer_is_a_miss_that_the_log_explains(
    s3: Server, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://{BUCKET}/x?endpoint=http://127.0.0.1:{s3.port}&{KEYS}&look=30s&index=redis://127.0.0.1:1/0"
    with cache_at(None, None, remote=url) as cache:
        for _ in range(3):
            assert cache.lookup(prompt(4)).num_tokens == 0
        assert cache.store(prompt(4), kv_of(prompt(4)).transfer).refused in (0, 4)
        assert cache.flush(30)
    assert "127.0.0.1:1" in caplog.text


def test_two_stores_share_an_index(s3: Server, server: Server) -> None:
    """Also with the chunks of a Redis tier: no mark is taken for another store's, or for a
    chunk.
    """
    base = f"endpoint=http://127.0.0.1:{s3.port}&{KEYS}&look=30s&deadline=30s&index=redis://127.0.0.1:{server.port}/0"
    one = f"s3://{BUCKET}/one?{base}"
    two = f"s3://{BUCKET}/two?{base}"
    with redis_client(server) as other:
        other.flushall()
    with cache_at(None, None, remote=one) as cache:
        stored(cache, prompt(3))
    for remote in (two, f"{server.url}/0?look=30s&deadline=30s"):
        with cache_at(None, None, remote=remote) as cache:
            assert hit_of(cache, prompt(3)).num_tokens == 0


def test_what_an_index_may_be() -> None:
    for index, said in (
        ("s3://bucket", "the URL of a Redis is needed"),
        ("redis://host/0?connections=3", "connections means nothing there"),
        ("redis://host/0?tll=3", "no such parameter"),
        ("redis:///0", "a host"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(f"s3://bucket?index={index}")
    with pytest.raises(ConfigError, match=r"no such parameter"):
        parse("redis://host:6379/0?index=redis://host/0")
    secret = "s3://bucket?index=redis://:hunter2%40host:6379/0"
    assert "hunter2" not in redacted(secret) + repr(parse(secret))
    assert parse(redacted(secret)).lacks_secret
    assert not parse(secret).lacks_secret
    for wrong in (
        "redis://host?password=hunter2",
        "redis://host?password%3Dhunter2",
        "redis%3A%2F%2Fhost%3Fpassword%3Dhunter2",
        "redis://host:hunter2",
    ):
        with pytest.raises(ConfigError) as refusal:
            parse(f"s3://bucket?index={wrong}")
        assert "hunter2" not in str(refusal.value)
    file = "s3://bucket?index=redis://host?password_file%3D/run/token"
    assert redacted(file) == file
