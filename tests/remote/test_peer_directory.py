"""The directory of neighbours in a real Redis: who has what, found among many, whatever the hints
or the Redis do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.config import Config
from pagoda.keys import chunk_keys
from pagoda.tiers import HostTier
from pagoda.tiers.remote import peer_directory
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.peer_directory import (
    PERIOD_SECONDS,
    PeerDirectory,
    PeerDirectoryConnection,
)
from pagoda.tiers.remote.peers import PeersClient, PeerUrl
from pagoda.tiers.remote.store_client import RefusedError
from pagoda_tools.serve import announcer as announcers
from pagoda_tools.serve import server
from pagoda_tools.serve.announcer import Announcer
from pagoda_tools.serve.served_stores import ServedStores
from pagoda_tools.serve.server import ServeOptions
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import (
    Server,
    free_port,
    pagoda_server,
    redis_server,
)
from tests.cli.shelf import CHUNK, LLAMA, answer, host, pagoda, put, refused
from tests.remote.chunks import (
    ROOT,
    SMALL,
    QuickClock,
    chunks_of,
    ends,
    keys_of,
    load,
    soon,
    tier_on,
)
from tests.remote.evil import LyingHttp, LyingRedis, bulk, http
from tests.remote.redis_kit import redis_client
from tests.serve import kit as serve_kit

need("redis-server")
redis = pytest.importorskip("redis")

TOKEN = "one-token-for-all-machines"
PATIENT = {"deadline_seconds": 30.0, "look_seconds": 30.0}
ELSEWHERE = "http://10.254.0.1:7777"
_chains = iter(range(1000, 2**31))


def fresh_keys(count: int) -> list[bytes]:
    """Return a chain that no other test uses."""
    return keys_of(count, next(_chains))


@pytest.fixture(scope="module")
def directory_server() -> Iterator[Server]:
    """The Redis of the peer directory."""
    with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_SERVE_TOKEN", TOKEN)


def until(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def connected(
    server: Server, prefix: str = "pagoda"
) -> Iterator[PeerDirectoryConnection]:
    connection = PeerDirectory(server.url, prefix=prefix).connection()
    try:
        yield connection.open(until())
    finally:
        connection.close()


def announce(server: Server, keys: Sequence[bytes], *urls: str) -> None:
    """Announce keys for machines."""
    with connected(server) as connection:
        for url in urls:
            connection.announce(keys, url, until())


def client_of(
    directory_server: Server, *urls: str, look_seconds: float = 30.0
) -> PeersClient:
    """Return the neighbours that the directory names, of `urls` if there are any."""
    peers = [PeerUrl(url, False) for url in urls]
    directory = PeerDirectory(directory_server.url)
    return PeersClient(
        peers, directory=directory, look_seconds=look_seconds, clock=QuickClock()
    )


@contextlib.contextmanager
def machine(
    directory_server: Server | None, **variables: str
) -> Iterator[Server]:
    """Another machine, whose server announces in the directory what it has."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    if directory_server is not None:
        variables["PAGODA_LOOKUP"] = directory_server.url
    try:
        (root / "token").write_text(TOKEN)
        (root / "token").chmod(0o600)
        options = ["--host-size", "16MiB", "--token-file", str(root / "token")]
        with pagoda_server(
            root / "host", *options, PAGODA_POLICY="lru", **variables
        ) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def two(directory_server: Server) -> Iterator[list[Server]]:
    """Two machines, which all tests of this module share."""
    with machine(directory_server) as one, machine(directory_server) as other:
        yield [one, other]


def give(server: Server, keys: Sequence[bytes]) -> None:
    """Store a chain on one machine."""
    url = server.url.replace("://", f"://:{TOKEN}@")
    with tier_on(PagodaServerClient(url), queue_chunks=4096, **PATIENT) as tier:
        for done in ends(tier.store(chunks_of(keys), ROOT)):
            assert done.ok


def give_value(server: Server, tokens: Sequence[int]) -> None:
    """Store the chunks of a prompt of the tests of commands on one machine."""
    client = serve_kit.Client(server.url, TOKEN)
    for position, key in enumerate(chunk_keys(tokens, LLAMA.root, CHUNK)):
        value = serve_kit.value_of(
            LLAMA.root, key, position, serve_kit.payload_of(1, position)
        )
        assert client.put(LLAMA.root, key, value).status == 201


def knows(directory_server: Server, keys: Sequence[bytes], url: str) -> bool:
    with connected(directory_server) as connection:
        return url in connection.machines(keys, until())


# ---- hints


def test_machines_find_each_other_after_the_clock_of_the_redis_was_set(
    directory_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connected before, the other after."""
    monkeypatch.setattr(peer_directory, "_TIME_SECONDS", 0.0, raising=False)
    keys = fresh_keys(3)
    liar = LyingRedis(directory_server.port)
    with contextlib.closing(liar):
        before = (
            PeerDirectory(f"redis://127.0.0.1:{liar.port}")
            .connection()
            .open(until())
        )
        tomorrow = b"%d" % (time.time() + 86400)
        liar.lies[b"TIME"] = lambda _: [b"*2\r\n" + bulk(tomorrow) + bulk(b"0")]
        after = (
            PeerDirectory(f"redis://127.0.0.1:{liar.port}")
            .connection()
            .open(until())
        )
        before.announce(keys, ELSEWHERE, until())
        assert after.machines(keys, until()) == [ELSEWHERE]
        assert before.machines(keys, until()) == [ELSEWHERE]
        for connection in (before, after):
            connection.close()


def test_whoever_has_most_is_named_first(directory_server: Server) -> None:
    keys = fresh_keys(500)
    for count, name in ((500, "c"), (3, "a"), (200, "b")):
        announce(directory_server, keys[:count], f"http://{name}:7777")
    with connected(directory_server) as connection:
        assert connection.machines(keys, until()) == [
            "http://c:7777",
            "http://b:7777",
            "http://a:7777",
        ]
        assert connection.machines(fresh_keys(1), until()) == []
        before = redis_client(directory_server).info("commandstats")[
            "cmdstat_srandmember"
        ]["calls"]
        connection.machines(keys, until())
        after = redis_client(directory_server).info("commandstats")[
            "cmdstat_srandmember"
        ]["calls"]
        assert after - before <= 2 * 17  # however long the prompt is


@pytest.mark.parametrize("count", [1, 2, 14, 15, 16, 17, 30, 31, 32, 1000])
def test_the_first_and_the_last_key_are_asked_about(
    directory_server: Server, count: int
) -> None:
    keys = fresh_keys(count)
    announce(directory_server, keys[:1], "http://head:1")
    announce(directory_server, keys[-1:], "http://tail:1")
    with connected(directory_server) as connection:
        assert set(connection.machines(keys, until())) == {
            "http://head:1",
            "http://tail:1",
        }


def test_a_hint_ends_by_itself(directory_server: Server) -> None:
    keys = fresh_keys(3)
    announce(directory_server, keys, ELSEWHERE)
    with connected(directory_server) as connection:
        connection._ahead += PERIOD_SECONDS
        assert connection.machines(keys, until()) == [ELSEWHERE]
        connection._ahead += PERIOD_SECONDS
        assert connection.machines(keys, until()) == []
    names = list(
        redis_client(directory_server).scan_iter(f"pagoda:at:*:{keys[0].hex()}")
    )
    assert 0 < redis_client(directory_server).ttl(names[0]) <= 2 * PERIOD_SECONDS


def test_what_is_no_machine_is_left_out(directory_server: Server) -> None:
    keys = fresh_keys(2)
    announce(directory_server, keys, ELSEWHERE)
    (name,) = redis_client(directory_server).scan_iter(
        f"pagoda:at:*:{keys[0].hex()}"
    )
    evil = [
        b"",
        b"\xff\x00",
        b"file:///etc/passwd",
        b"http://user:secret@host:1",
        b"http://a/b",
        b"http://a:1?b",
    ]
    redis_client(directory_server).sadd(name, *evil, b"http://" + b"a" * 100_000)
    with connected(directory_server) as connection:
        assert connection.machines(keys, until()) == [ELSEWHERE]
    redis_client(directory_server).delete(name)
    redis_client(directory_server).set(name, "no set")
    with (
        connected(directory_server) as connection,
        pytest.raises(RefusedError, match="WRONGTYPE"),
    ):
        connection.machines(keys, until())


def test_directories_with_other_prefixes_share_a_redis(
    directory_server: Server,
) -> None:
    keys = fresh_keys(2)
    announce(directory_server, keys, ELSEWHERE)
    with connected(directory_server, "other") as connection:
        assert connection.machines(keys, until()) == []


# ---- machines


@pytest.mark.slow
def test_a_machine_says_what_it_has_and_another_finds_it_among_many(
    directory_server: Server, two: list[Server]
) -> None:
    keys = fresh_keys(8)
    give(two[1], keys)
    wait_until(lambda: knows(directory_server, keys, two[1].url))
    with tier_on(client_of(directory_server), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 8
        assert load(tier, keys) == [None] * 8
        assert tier.match_prefix(fresh_keys(3), namespace=ROOT) == 0
    listed = [f"http://:{TOKEN}@127.0.0.1:{free_port()}" for _ in range(20)]
    url = two[1].url.replace("://", f"://:{TOKEN}@")
    with (
        tier_on(client_of(directory_server, *listed, url), **PATIENT) as tier,
        soon(20.0),
    ):
        # none of the twenty is asked, and none of them runs
        assert tier.match_prefix(keys, namespace=ROOT) == 8
        assert load(tier, keys) == [None] * 8


def test_only_neighbours_that_are_listed_are_asked_if_there_is_a_list(
    directory_server: Server,
) -> None:
    """Whoever can write the hints does not get the token."""
    stranger = LyingHttp()
    try:
        keys = fresh_keys(2)
        announce(directory_server, keys, f"http://127.0.0.1:{stranger.port}")
        with tier_on(
            client_of(directory_server, f"http://127.0.0.1:{free_port()}")
        ) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert None not in load(tier, keys)
        assert not stranger.requests
    finally:
        stranger.close()


def test_a_lie_is_a_miss(directory_server: Server, two: list[Server]) -> None:
    """Of hints for what no machine has, for a machine that is none, and for one that lies
    itself.
    """
    keys = fresh_keys(4)
    held = fresh_keys(4)
    liar = LyingHttp()
    liar.lies["POST"] = lambda _: [http(200, b'{"found": 4}')]
    try:
        give(two[0], held)
        wait_until(lambda: knows(directory_server, held, two[0].url))
        announce(
            directory_server, keys, two[0].url, f"http://127.0.0.1:{free_port()}"
        )
        announce(
            directory_server,
            held,
            f"http://127.0.0.1:{free_port()}",
            f"http://127.0.0.1:{liar.port}",
        )
        with tier_on(client_of(directory_server), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            wait_until(
                lambda: (
                    load(tier, held) == [None] * 4
                    or not tier.match_prefix(held, namespace=ROOT)
                )
            )
            wait_until(
                lambda: (
                    tier.match_prefix(held, namespace=ROOT) == 4
                    and load(tier, held) == [None] * 4
                )
            )
    finally:
        liar.close()


@pytest.mark.slow
def test_what_two_machines_have_survives_one(
    directory_server: Server, two: list[Server]
) -> None:
    keys = fresh_keys(4)
    with machine(directory_server) as dying:
        give(dying, keys)
        give(two[0], keys)
        wait_until(
            lambda: (
                knows(directory_server, keys, two[0].url)
                and knows(directory_server, keys, dying.url)
            )
        )
        with tier_on(client_of(directory_server), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 4
            dying.kill()
            wait_until(lambda: load(tier, keys, seconds=60) == [None] * 4)
            wait_until(
                lambda: (
                    tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT)
                    == 4
                )
            )


@pytest.mark.slow
def test_many_dead_machines_hide_no_living_one(
    directory_server: Server, two: list[Server]
) -> None:
    keys = fresh_keys(2)
    give(two[0], keys)
    wait_until(lambda: knows(directory_server, keys, two[0].url))
    announce(
        directory_server,
        keys,
        *(f"http://127.0.0.1:{free_port()}" for _ in range(14)),
    )
    with tier_on(client_of(directory_server), **PATIENT) as tier:
        wait_until(
            lambda: (
                tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT) == 2
            )
        )
        wait_until(lambda: load(tier, keys, seconds=60) == [None] * 2)


def test_neighbours_out_of_order_leave_their_places_to_others(
    directory_server: Server,
) -> None:
    client = client_of(directory_server)
    assert client.directory is not None
    dead = [f"http://127.0.0.1:{n}" for n in range(1, 13)]
    assert [
        peer.client.address for peer in client.directory.choose(dead, [])
    ] == dead[:8]
    for peer in client.known():
        for _ in range(2):
            peer.record_failure(ConnectionError("refused"))
    assert (
        client.directory.choose([*dead, ELSEWHERE], [])[0].client.address
        == ELSEWHERE
    )


@pytest.mark.slow
def test_without_the_redis_those_named_last_are_asked(two: list[Server]) -> None:
    with redis_server() as directory_server:
        keys = fresh_keys(4)
        later = fresh_keys(4)
        give(two[0], [*keys])
        announce(directory_server, keys, two[0].url)
        with tier_on(
            client_of(directory_server, look_seconds=1.0),
            deadline_seconds=10.0,
            look_seconds=1.0,
        ) as tier:
            wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 4)
            directory_server.kill()
            give(two[0], later)
            with soon(20.0):
                wait_until(lambda: tier.match_prefix(later, namespace=ROOT) == 4)
                assert load(tier, later, seconds=30) == [None] * 4
            directory_server.restart()
            give(two[1], wanted := fresh_keys(3))
            announce(directory_server, wanted, two[1].url)
            wait_until(lambda: tier.match_prefix(wanted, namespace=ROOT) == 3)
        with machine(
            directory_server
        ) as new:  # its server outlives its directory too
            directory_server.kill()
            give(new, keys)
            directory_server.restart()
            wait_until(lambda: knows(directory_server, keys, new.url))


def test_a_redis_that_hangs_delays_no_look_up_beyond_its_time() -> None:
    with redis_server() as directory_server:
        directory_server.stop()
        with tier_on(
            client_of(directory_server, look_seconds=0.2), look_seconds=0.2
        ) as tier:
            for _ in range(5):
                with soon(0.2 + 0.3):
                    assert tier.match_prefix(fresh_keys(2), namespace=ROOT) == 0
            assert load(tier, fresh_keys(1))[0] in (
                Reason.TIER_SKIPPED,
                Reason.ABSENT,
            )
            with soon():
                tier.close(1.0)
        directory_server.cont()


def test_a_directory_that_was_never_reached_is_trouble_and_no_miss() -> None:
    directory = PeerDirectory(f"redis://127.0.0.1:{free_port()}")
    with tier_on(
        PeersClient([], directory=directory, clock=QuickClock())
    ) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
                and tier.resting
            )
        )
        assert load(tier, fresh_keys(1)) == [Reason.TIER_SKIPPED]


@pytest.mark.slow
def test_neighbours_are_bounded_and_their_connections_too(
    directory_server: Server,
) -> None:
    client = client_of(directory_server, look_seconds=0.5)
    connection = client.connection().open(until())
    try:
        for part in range(3):
            urls = [
                f"http://127.0.0.{2 + n % 250}:{1 + n}"
                for n in range(600 * part, 600 * (part + 1))
            ]
            for n in range(0, 600, 12):
                keys = fresh_keys(1)
                announce(directory_server, keys, *urls[n : n + 12])
                with contextlib.suppress(OSError):
                    connection.find(ROOT, keys, until(1.0))
        assert len(client.known()) <= 1024
        assert len(connection._lines) <= 32 + 16
    finally:
        connection.close()


def test_a_forked_child_asks_the_directory_itself(
    directory_server: Server, two: list[Server]
) -> None:
    keys = fresh_keys(3)
    give(two[0], keys)
    announce(directory_server, keys, two[0].url)
    with tier_on(client_of(directory_server), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 3

        def child() -> None:
            os._exit(
                0
                if tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT) == 3
                else 1
            )

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT) == 3


# ---- announcing


def test_every_chunk_is_announced_again_and_what_is_gone_is_not(
    directory_server: Server, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcers, "_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(announcers, "_ROUNDS", 3)
    keys = fresh_keys(4)
    counts = Counter[str]()
    tier = HostTier.open(SMALL, shm_root, 16 * SMALL.slot_bytes, populate=False)
    stores = ServedStores(lambda: [tier.ledger.directory])
    stores.scan()
    running = Announcer(
        PeerDirectory(directory_server.url),
        lambda own: f"http://{own}:7",
        stores,
        counts,
    )

    def announced(key: bytes) -> bool:
        return knows(directory_server, [key], "http://127.0.0.1:7")

    try:
        for done in ends(tier.store(chunks_of(keys), ROOT)):
            assert done.ok
        wait_until(lambda: all(map(announced, keys)))
        first = counts["announced"]
        tier.remove(keys[3])
        # rounds that began before the removal have ended
        wait_until(lambda: counts["announced"] > first + 8)
        redis_client(directory_server).flushall()
        wait_until(lambda: all(map(announced, keys[:3])))
        seen = counts["announced"]
        wait_until(lambda: counts["announced"] > seen + 8)
        assert not announced(keys[3])
        directory_server.restart()  # it has lost all hints and all connections
        wait_until(lambda: all(map(announced, keys[:3])))
        assert counts["announce_failures"] >= 1
    finally:
        with soon():
            running.close()
        for store in stores.end():
            store.close()
        tier.close()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "pagoda-announcer"
    ]


def test_the_rounds_go_on_whatever_fails_in_one(
    directory_server: Server, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcers, "_ROUND_SECONDS", 0.02)
    keys = fresh_keys(2)
    counts = Counter[str]()
    tier = HostTier.open(SMALL, shm_root, 16 * SMALL.slot_bytes, populate=False)
    for done in ends(tier.store(chunks_of(keys), ROOT)):
        assert done.ok
    stores = ServedStores(lambda: [tier.ledger.directory])
    stores.scan()

    def url(_: str) -> str:
        if not counts["announce_failures"]:
            raise ValueError("no address today")
        return ELSEWHERE

    running = Announcer(PeerDirectory(directory_server.url), url, stores, counts)
    try:
        wait_until(
            lambda: all(knows(directory_server, [key], ELSEWHERE) for key in keys)
        )
        assert counts["announce_failures"] == 1
    finally:
        running.close()
        for store in stores.end():
            store.close()
        tier.close()


def test_no_round_announces_more_than_its_part(
    directory_server: Server, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcers, "_ROUND_SECONDS", 0.02)
    monkeypatch.setattr(announcers, "_MOST_KEYS", 3)
    batches: list[int] = []
    announce = PeerDirectoryConnection.announce

    def counted(
        self: PeerDirectoryConnection,
        keys: Sequence[bytes],
        url: str,
        until: float,
    ) -> None:
        batches.append(len(keys))
        announce(self, keys, url, until)

    monkeypatch.setattr(PeerDirectoryConnection, "announce", counted)
    keys = fresh_keys(10)
    tier = HostTier.open(SMALL, shm_root, 16 * SMALL.slot_bytes, populate=False)
    for done in ends(tier.store(chunks_of(keys), ROOT)):
        assert done.ok
    stores = ServedStores(lambda: [tier.ledger.directory])
    stores.scan()
    running = Announcer(
        PeerDirectory(directory_server.url),
        lambda own: ELSEWHERE,
        stores,
        Counter(),
    )
    try:
        wait_until(
            lambda: all(knows(directory_server, [key], ELSEWHERE) for key in keys)
        )
    finally:
        running.close()
        for store in stores.end():
            store.close()
        tier.close()
    assert max(batches) == 3


# ---- configuration


def test_more_than_eight_neighbours_need_a_directory() -> None:
    many = [f"http://node-{n}:7777" for n in range(100)]
    with pytest.raises(
        ConfigError, match=r"100 servers, and at most 8 .* set lookup"
    ):
        Config(peers=tuple(many))
    assert (
        len(Config(peers=tuple(many), lookup="redis://meet:6379/3").peers) == 100
    )


@pytest.mark.parametrize("url", ["", "  "])
def test_an_empty_lookup_is_no_directory(url: str) -> None:
    assert Config(lookup=url).lookup == ""
    assert Config(lookup=url).lookup_server() == ()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("node:6379", "write redis://host:6379/0"),
        ("http://node:6379", "machines meet in a Redis"),
        ("s3://bucket", "machines meet in a Redis"),
        ("redis://node:6379?ttl=3s", "ttl: means nothing here"),
        ("redis://node:6379?codec=zstd", "codec: means nothing here"),
        ("redis://node:x", "port"),
        ("redis://", "host"),
        ("redis://:secret@node:6379?prefi=x", "did you mean prefix"),
        (7, "as text"),
    ],
)
def test_a_bad_directory_is_refused_with_the_reason(
    url: object, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        Config(lookup=url)  # type: ignore[arg-type]
    assert "lookup" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_no_password_is_shown() -> None:
    config = Config(lookup="redis://user:secret@node:6379/1?prefix=team")
    (spec,) = config.lookup_server()
    assert "secret" not in repr(config) + repr(spec) + spec.redacted
    assert spec.prefix == "team"


@pytest.mark.slow
def test_explain_asks_the_neighbours_that_are_named(
    directory_server: Server, two: list[Server], shm_root: Path
) -> None:
    put(host(shm_root), LLAMA, range(32))
    first = next(_chains) * 100
    tokens = list(range(first, first + 64))
    give_value(two[1], tokens)
    wait_until(
        lambda: knows(
            directory_server, chunk_keys(tokens, LLAMA.root, CHUNK), two[1].url
        )
    )
    dead = ",".join(f"http://127.0.0.1:{free_port()}" for _ in range(3))
    for peers in ("", f"{two[1].url},{dead}"):
        where = {
            "PAGODA_HOST_PATH": str(shm_root),
            "PAGODA_LOOKUP": directory_server.url,
            "PAGODA_PEERS": peers,
        }
        where["PAGODA_SERVE_TOKEN"] = TOKEN
        with soon(30.0):
            found = answer(
                "explain",
                "--tokens",
                "-",
                stdin=" ".join(map(str, tokens)),
                **where,
            )
        by_tier = [(one["tier"], one["num_tokens"]) for one in found["answers"]]  # type: ignore[attr-defined]
        assert by_tier == [("host", 0), ("peers", 64), ("all", 64)]


@pytest.mark.slow
def test_the_command_says_what_is_missing(directory_server: Server) -> None:
    lookup = {
        "PAGODA_LOOKUP": f"redis://:hunter2@127.0.0.1:{directory_server.port}"
    }
    shown = answer("config", "show", **lookup)["options"]
    assert (
        shown["lookup"]["value"]
        == f"redis://:***@127.0.0.1:{directory_server.port}"
    )  # type: ignore[index]
    assert "hunter2" not in pagoda("config", "show", **lookup).stdout
    checked = pagoda(
        "config",
        "check",
        PAGODA_LOOKUP=f"redis://127.0.0.1:{free_port()}",
        PAGODA_HOST_SIZE="1MiB",
    )
    assert checked.returncode == 1
    assert checked.stderr.startswith("pagoda: lookup (redis://127.0.0.1:")
    assert "hunter2" not in refused(
        "vllm", "--lookup", lookup["PAGODA_LOOKUP"], "--print", "serve", "x"
    )
    listen = ("serve", "--listen", "127.0.0.1:0", "--advertise")
    assert "the option lookup" in refused(*listen, "http://a:7777")
    assert "write the URL at which" in refused(*listen, "a:7777", **lookup)
    assert "--listen HOST:PORT" in refused(
        "serve", "--advertise", "http://a:7777", **lookup
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"listen": ("127.0.0.1", 0)}, "http://127.0.0.1:{port}"),
        ({"listen": ("0.0.0.0", 0)}, "http://10.1.2.3:{port}"),
        ({"listen": ("::", 0)}, "http://10.1.2.3:{port}"),
        (
            {"listen": ("0.0.0.0", 0), "certificate": Path("c.pem")},
            "https://10.1.2.3:{port}",
        ),
        (
            {"listen": ("0.0.0.0", 0), "advertise": "http://node-7:80"},
            "http://node-7:80",
        ),
    ],
)
def test_a_server_says_where_it_is_reached(
    options: dict[str, object], expected: str
) -> None:
    wanted = ServeOptions(find_stores=list, **options)  # type: ignore[arg-type]
    family = socket.AF_INET6 if wanted.listen == ("::", 0) else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind(wanted.listen)
        url = server._advertised(wanted, listening, "10.1.2.3")
        assert url == expected.format(port=listening.getsockname()[1])


def test_a_server_that_sends_others_to_themselves_says_so(
    two: list[Server],
) -> None:
    assert "by which each reaches itself" in two[0].log()


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_a_server_that_cannot_announce_itself_logs_it(
    log_format: str, tmp_path: Path
) -> None:
    gone = f"redis://:hunter2@127.0.0.1:{free_port()}"
    with machine(
        None, PAGODA_LOOKUP=gone, PAGODA_LOG_FORMAT=log_format
    ) as server:
        wait_until(
            lambda: (
                "other machines may not find new chunks of this one"
                in server.log()
            )
        )
        (line,) = [
            line for line in server.log().splitlines() if "may not find" in line
        ]
        assert line.startswith("{") is (log_format == "json")
        assert "hunter2" not in server.log()
