"""`pagoda warm`: what all machines use most comes from Redis into the host tier, and nothing goes
for it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis as client

from pagoda.codec import HEADER_BYTES
from pagoda.config.remote_urls import parse
from pagoda.keys import Namespace
from pagoda.ledger import admin
from pagoda.tiers import Chunk, HostTier
from pagoda.tiers.remote.redis import RedisNames
from pagoda.tiers.remote.store_client import PutRequest, PutResult
from testbed.patience import wait_until
from testbed.servers import Server, free_port, redis_cluster, redis_server
from tests.cli.shelf import RUN, answer, pagoda, refused, run_here
from tests.remote.proxy import Fault, proxy_to
from tests.serve.kit import (
    LAYOUT,
    ODD,
    Bytes,
    engine,
    keys_of,
    payload_of,
    value_of,
)

ROOT = Namespace("served", layout=LAYOUT.fingerprint).root
SIZE = LAYOUT.chunk_bytes
SLOTS = 64


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """The server's URL with a prefix of this test's own."""
    return f"{server.url}/0?prefix=p{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def where(shm_root: Path, url: str) -> dict[str, str]:
    """The environment of the machine that is warmed."""
    return {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_HOST_SIZE": str(SLOTS * SIZE),
        "PAGODA_REMOTE": url,
    }


@pytest.fixture
def host(shm_root: Path) -> Iterator[HostTier]:
    """The host tier of an engine that has started."""
    tier = HostTier.open(LAYOUT, shm_root, SLOTS * SIZE)
    yield tier
    tier.close()


def share(
    url: str,
    chain: int,
    chunks: int,
    *,
    damaged: Sequence[int] = (),
    parents: bool = True,
) -> list[bytes]:
    """Store a prompt's chunks as another machine does, or an older version of it; return their
    keys.
    """
    connection = parse(url).engine().connection().open(time.monotonic() + 30)
    keys = keys_of(ROOT, chain, chunks)
    for position, key in enumerate(keys):
        parent = keys[position - 1] if position and parents else b""
        made = value_of(
            ROOT, key, position, payload_of(chain, position), parent=parent
        )
        value = np.frombuffer(made, np.uint8).copy()
        value[HEADER_BYTES + 100] ^= position in damaged
        page = value[:HEADER_BYTES]
        stored = value[HEADER_BYTES:]
        done = connection.put(
            PutRequest(ROOT, key, page, stored, lambda: True),
            time.monotonic() + 30,
        )
        assert done is PutResult.STORED
    connection.close()
    return keys


def use(
    server: Server, url: str, keys: Sequence[bytes], ttl: int = 0, **use: int
) -> None:
    """Let these chunks have been used so many seconds ago (`idletime`), or so often (`frequency`).
    `ttl`: in ms.
    """
    truth = client.Redis(port=server.port)
    names = RedisNames(parse(url).prefix)
    for name in (names.chunk(ROOT, key) for key in keys):
        truth.restore(name, ttl, truth.dump(name), replace=True, **use)  # type: ignore[arg-type]


def positions(host: HostTier, keys: Sequence[bytes]) -> list[int]:
    """Return which chunks of a prompt are in the host tier."""
    return [position for position, key in enumerate(keys) if host.contains(key)]


def brought(*args: object, **where: str) -> tuple[int, int, str]:
    """Warm; return how many chunks came, how many were damaged, and what ended it."""
    (found,) = answer("warm", *args, **where)["remotes"]  # type: ignore[misc]
    assert found["bytes"] == found["chunks"] * SIZE
    return found["chunks"], found["damaged"], found["ended"]


def put(host: HostTier, chain: int, chunks: int) -> list[bytes]:
    """Store a prompt as an engine here does."""
    keys = keys_of(ROOT, chain, chunks)
    for n, key in enumerate(keys):
        (ended,) = host.store(
            [Chunk(key, n, 64, payload_of(chain, n), None, lambda: True)], ROOT
        )
        assert ended.result(0).ok
    return keys


def test_what_is_used_most_comes_first(
    where: dict[str, str], host: HostTier, server: Server, url: str
) -> None:
    keys = {chain: share(url, chain, 4) for chain in (1, 2, 3)}
    for chain, idle in ((1, 1000), (2, 10), (3, 5000)):
        use(server, url, keys[chain], idletime=idle)
    assert brought("--bytes", 5 * SIZE, **where) == (5, 0, "bytes")
    assert [positions(host, keys[chain]) for chain in (1, 2, 3)] == [
        [0],
        [0, 1, 2, 3],
        [],
    ]
    assert brought(**where) == (7, 0, "all")
    assert brought(**where) == (0, 0, "all")
    for chain in (1, 2, 3):
        buffers: list[Bytes] = [np.zeros(SIZE, np.uint8) for _ in range(4)]
        for done in host.load(keys[chain], buffers, namespace=ROOT):
            assert done.result(0).ok
        for n, buffer in enumerate(buffers):
            assert (buffer == payload_of(chain, n)).all()


def test_parents_come_before_their_children(
    where: dict[str, str], host: HostTier, server: Server, url: str
) -> None:
    keys = [share(url, chain, 4) for chain in (1, 2)]
    for run in keys:
        # the head was written first: its idle time is the longest
        for position, key in enumerate(run):
            use(server, url, [key], idletime=900 - 100 * position)
    assert brought("--bytes", 3 * SIZE, **where)[0] == 3
    assert sorted(map(len, (positions(host, run) for run in keys))) == [1, 2]
    assert brought(**where) == (5, 0, "all")
    rows = sorted(admin.list_chunks(host.ledger), key=lambda row: row.generation)
    assert [row.position for row in rows][3:] == sorted(
        row.position for row in rows[3:]
    )
    last_use = [host.ledger.columns.last_use[row.slot] for row in rows[3:]]
    # a tail never outlives its head
    assert last_use == sorted(last_use, reverse=True)


@pytest.mark.parametrize(
    ("head", "tail", "parents"),
    [
        (2, 0, False),
        (2, 0, True),
        (65, 62, True),
        (129, 126, True),
        (5000, 0, True),
    ],
)
def test_a_prompt_is_brought_from_its_head_on(
    where: dict[str, str],
    host: HostTier,
    server: Server,
    url: str,
    head: int,
    tail: int,
    parents: bool,
) -> None:
    """Its head was used some seconds before its tail. Older versions do not report what a chunk
    continues.
    """
    keys = share(url, 1, 8, parents=parents)
    other = share(url, 2, 3)
    for brings in (4, 8):
        use(server, url, keys[:5], idletime=head)
        use(server, url, keys[5:], idletime=tail)
        use(server, url, other, idletime=10_000)
        assert brought("--bytes", 4 * SIZE, **where) == (4, 0, "bytes")
        assert positions(host, keys) == list(range(brings))
        assert positions(host, other) == []


def test_what_no_request_could_use_is_left_out(
    where: dict[str, str], host: HostTier, server: Server, url: str
) -> None:
    """Redis has evicted a chunk; what continues a prompt that is here is brought."""
    keys = share(url, 1, 6)
    mine = share(url, 2, 4)
    truth = client.Redis(port=server.port)
    names = RedisNames(parse(url).prefix)
    truth.delete(
        names.chunk(ROOT, keys[2]), *(names.chunk(ROOT, key) for key in mine[:2])
    )
    assert put(host, 2, 2) == mine[:2]
    assert brought("--bytes", 4 * SIZE, **where) == (4, 0, "all")
    assert positions(host, keys) == [0, 1]
    assert positions(host, mine) == [0, 1, 2, 3]


def test_damaged_values_are_left_out(
    where: dict[str, str], host: HostTier, server: Server, url: str
) -> None:
    keys = share(url, 1, 6, damaged=[2])
    truth = client.Redis(port=server.port)
    names = RedisNames(parse(url).prefix)
    page = bytearray(truth.hget(names.chunk(ROOT, keys[4]), "h"))  # type: ignore[arg-type]
    page[50] ^= 1
    truth.hset(names.chunk(ROOT, keys[4]), "h", bytes(page))
    truth.set(names.chunk(ROOT, keys[5]), "no chunk")
    assert brought(**where) == (2, 2, "all")
    assert positions(host, keys) == [0, 1]


def test_chunks_of_other_layouts_are_left_alone(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    root = Namespace("served", layout=ODD.fingerprint).root
    connection = parse(url).engine().connection().open(time.monotonic() + 30)
    for position, key in enumerate(keys_of(root, 1, 3)):
        value = np.frombuffer(
            value_of(root, key, position, payload_of(1, position, ODD), ODD),
            np.uint8,
        )
        request = PutRequest(
            root, key, value[:HEADER_BYTES], value[HEADER_BYTES:], lambda: True
        )
        connection.put(request, time.monotonic() + 30)
    connection.close()
    assert brought(**where) == (0, 0, "all")


def test_nothing_is_evicted(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    mine = put(host, 1, 50)
    theirs = share(url, 2, 20)
    done = brought("--bytes", "1GiB", **where)
    assert done == (SLOTS - 50 - host.ledger.window, 0, "room")
    assert positions(host, theirs) == list(range(done[0]))
    assert positions(host, mine) == list(range(50))
    assert admin.counters(host.ledger)["evicted_chunks"] == 0


def test_by_default_half_of_the_host_tier_is_filled(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    share(url, 1, 40)
    assert brought(**where) == (SLOTS // 2, 0, "bytes")


@contextmanager
def running(
    where: dict[str, str], host: HostTier
) -> Iterator[subprocess.Popen[str]]:
    """Warm slowly in another process, of which some chunks have come."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PAGODA_")
    }
    command = [
        sys.executable,
        "-c",
        RUN,
        "warm",
        "--json",
        "--rate",
        str(4 * SIZE),
    ]
    process = subprocess.Popen(
        command,
        env=env | where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or admin.gauges(host.ledger)["ready"] > 0
            )
        )
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_rate_is_kept(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    share(url, 1, 6)
    began = time.monotonic()
    assert brought("--rate", 4 * SIZE, **where) == (6, 0, "all")
    assert time.monotonic() - began > 6 / 4 - 0.3


@pytest.mark.slow
def test_it_ends_when_an_engine_works(
    where: dict[str, str], host: HostTier, shm_root: Path, url: str
) -> None:
    share(url, 1, 30)
    with (
        engine(host_path=str(shm_root), host_size=SLOTS * SIZE) as working,
        running(where, host) as process,
    ):
        working.command("retrieve", 5, 2)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and '"ended": "traffic"' in out, err
    assert 0 < admin.gauges(host.ledger)["ready"] < 30


@pytest.mark.slow
def test_ctrl_c_ends_it_and_what_came_stays(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    keys = share(url, 1, 30)
    with running(where, host) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert out == ""
    assert "Traceback" not in err
    came = positions(host, keys)
    assert came == list(range(len(came)))
    assert 0 < len(came) < 30
    assert admin.gauges(host.ledger)["reserved"] == 0
    assert brought(**where) == (30 - len(came), 0, "all")


def test_a_server_that_counts_uses(where: dict[str, str], host: HostTier) -> None:
    with redis_server(
        "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lfu"
    ) as lfu:
        keys = [share(lfu.url, chain, 3) for chain in (1, 2)]
        use(lfu, lfu.url, keys[0], frequency=7)
        use(lfu, lfu.url, keys[1], frequency=70)
        assert brought(
            "--bytes", 4 * SIZE, **where | {"PAGODA_REMOTE": lfu.url}
        ) == (4, 0, "bytes")
    assert [positions(host, run) for run in keys] == [[0], [0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "cluster"])
def test_chunks_come_from_all_nodes(
    where: dict[str, str], host: HostTier, kind: str
) -> None:
    with ExitStack() as stack:
        if kind == "pool":
            servers = [stack.enter_context(redis_server()) for _ in range(2)]
        else:
            servers = stack.enter_context(redis_cluster(3))
        many = f"redis+{kind}://{','.join(f'127.0.0.1:{server.port}' for server in servers)}"
        keys = share(many, 1, 20)
        assert brought(**where | {"PAGODA_REMOTE": many}) == (20, 0, "all")
    assert positions(host, keys) == list(range(20))


@pytest.mark.slow
def test_the_table_has_80_columns(
    where: dict[str, str], host: HostTier, url: str
) -> None:
    share(url, 1, 3)
    done = pagoda("warm", **where)
    assert done.returncode == 0
    assert done.stderr == ""
    heading, row, address = done.stdout.splitlines()
    assert heading.split() == [
        "tier",
        "chunks",
        "size",
        "damaged",
        "ended",
        "by",
        "address",
    ]
    assert row.split() == ["redis", "3", "192.00", "KiB", "0", "all"]
    assert address.strip() == url
    assert max(map(len, (heading, row))) <= 80


@pytest.mark.parametrize(
    "option",
    [("--bytes", "much"), ("--rate", "auto"), ("--bytes", "0"), ("--rate", "")],
)
def test_a_wrong_size_is_one_line(
    where: dict[str, str], host: HostTier, option: tuple[str, str]
) -> None:
    code, out, err = run_here("warm", *option, **where)
    assert code == 2, out
    assert out == ""
    assert err.startswith(f"pagoda: {option[0]}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("evict", ["", "&evict=ttl"])
def test_to_warm_is_no_use(
    where: dict[str, str], host: HostTier, server: Server, url: str, evict: str
) -> None:
    where["PAGODA_REMOTE"] = url + evict
    keys = share(url + evict, 1, 5)
    truth = client.Redis(port=server.port)
    names = RedisNames(parse(url).prefix)
    lives = [(7 * 86400 - 1000) * 1000 - 2 * n for n in range(5)]
    for key, life in zip(keys, lives, strict=True):
        use(server, url, [key], idletime=1000, ttl=life)
    assert brought("--bytes", 3 * SIZE, **where) == (3, 0, "bytes")
    left = [truth.pttl(names.chunk(ROOT, key)) for key in keys]
    assert all(
        life - 60_000 < now <= life for now, life in zip(left, lives, strict=True)
    )  # type: ignore[operator]
    if truth.info("server")["redis_version"] >= "7.2":  # type: ignore[index]
        assert (
            min(truth.object("idletime", names.chunk(ROOT, key)) for key in keys)
            >= 1000
        )


def test_warm_is_refused_without_a_redis(
    where: dict[str, str], host: HostTier
) -> None:
    for remote in ("", "s3://bucket"):
        assert run_here("warm", **where | {"PAGODA_REMOTE": remote})[0] == 2
        assert "needs a remote tier in Redis" in refused(
            "warm", **where | {"PAGODA_REMOTE": remote}
        )


def test_without_a_host_tier(where: dict[str, str]) -> None:
    code, _, err = run_here("warm", **where)
    assert code == 1
    assert "an engine creates it when it starts" in err


def test_trouble_is_said_for_each_tier(
    where: dict[str, str], host: HostTier, server: Server, url: str
) -> None:
    share(url, 1, 3)
    dead = f"redis://127.0.0.1:{free_port()}?name=dead"
    truth = client.Redis(port=server.port)
    truth.execute_command(
        "ACL",
        "SETUSER",
        "looker",
        "on",
        ">x",
        "~*",
        "-@all",
        "+exists",
        "+scan",
        "+select",
    )
    barred = url.replace("redis://", "redis://looker:x@") + "&name=barred"
    found = answer(
        "warm", code=1, **where | {"PAGODA_REMOTE": f"{dead},{barred},{url}"}
    )
    assert [one["chunks"] for one in found["remotes"]] == [3]  # type: ignore[attr-defined]
    assert found["unconfigured"] == []
    one, other = found["failed"].values()  # type: ignore[attr-defined]
    assert "check that it runs there" in one
    assert "check the password and the rights of its user" in other
    assert "redis://" not in one + other, "the key says where it is"


def test_the_rule_of_the_documentation_is_enough(
    where: dict[str, str], host: HostTier, server: Server
) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/redis.md"
    rule = re.search("ACL SETUSER pagoda (on .*)", page.read_text())
    assert rule is not None
    truth = client.Redis(port=server.port)
    truth.execute_command("ACL", "SETUSER", "pagoda", *rule[1].split())
    url = server.url.replace("://", "://pagoda:PASSWORD@")
    share(url, 1, 3)
    assert brought(**where | {"PAGODA_REMOTE": url}) == (3, 0, "all")


@pytest.mark.parametrize("at", [1, 100, 30_000, 100_000, 250_000])
def test_a_connection_that_breaks_midway(
    where: dict[str, str], host: HostTier, server: Server, url: str, at: int
) -> None:
    """What came stays, and the next run brings the rest."""
    keys = share(url, 1, 6)
    with proxy_to(server.port) as proxy:
        proxy.down = Fault(cut_at=at)
        broken = url.replace(f":{server.port}/", f":{proxy.port}/")
        code, _, err = run_here("warm", **where | {"PAGODA_REMOTE": broken})
    assert code == 1
    assert err.count("\n") == 1
    assert "closed the connection" in err
    came = positions(host, keys)
    assert came == list(range(len(came)))
    assert brought(**where) == (6 - len(came), 0, "all")


def test_a_server_that_writes_nothing(
    where: dict[str, str], host: HostTier
) -> None:
    """A replica is read; what it cannot do is said without a hint at rights."""
    with redis_server() as replica:
        keys = share(replica.url, 1, 3)
        client.Redis(port=replica.port).execute_command(
            "REPLICAOF", "127.0.0.1", free_port()
        )
        where["PAGODA_REMOTE"] = replica.url
        assert brought(**where) == (3, 0, "all")
        assert positions(host, keys) == [0, 1, 2]
        code, _, err = run_here("clear", "--yes", **where)
    assert code == 1
    assert err.count("\n") == 1
    assert "READONLY" in err
    assert "password" not in err
