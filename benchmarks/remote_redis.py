"""Race chunks to and from a real Redis: our link and the whole tier against a bare loop, a bare
socket and redis-py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np
import redis
from ground import NAMESPACE, Plan, keys_of
from harness import MIB, Figure, say
from limits import Bytes
from limits_wire import RespLoop
from remote_ground import (
    PATIENCE_SECONDS,
    ROOM_TURNS,
    Made,
    Side,
    Turns,
    both_ways,
    link_side,
    links_side,
    raced_gets,
    raced_puts,
    socket_side,
    tier_side,
)

from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote.leading_run import EXACT_KEYS
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_cluster import RedisClusterClient
from pagoda.tiers.remote.store_client import PutRequest
from testbed.programs import lacking
from testbed.servers import Server, redis_cluster, redis_server

HIREDIS = importlib.util.find_spec("hiredis") is not None
PLAIN = "redis_py_hiredis" if HIREDIS else "redis_py"
_SIDES = ("link", "tier", "raw", PLAIN)


class PlainRedis:
    """redis-py in plain use: a chunk is a string; with hiredis if that is installed."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        names = ("redis", "hiredis") if HIREDIS else ("redis",)
        self.how = "1 connection, " + " ".join(
            f"{name} {importlib.metadata.version(name)}" for name in names
        )

    def put(self, _: int, key: bytes, source: Bytes) -> None:
        """SET."""
        self.client.set(key, source.data)

    def get(self, _: int, key: bytes, slot: Bytes) -> None:
        """GET, and copy to the destination."""
        slot[:] = np.frombuffer(self.client.get(key), np.uint8)


def redis_figures(plan: Plan, nbytes: int) -> list[Figure]:
    """Race puts and gets of chunks of `nbytes`, with servers that are full and evict.

    Each side has a separate Redis, so that no side gets memory that another has warmed or
    fragmented.
    """
    with _field(plan, nbytes) as field:
        if field is None:
            return []
        figures = partial(_figures, f"{nbytes // MIB}mib")
        return both_ways(field.turns, field.sides, _rest, field.empty, figures)


def fresh_figures(plan: Plan, nbytes: int) -> list[Figure]:
    """Race puts into servers that are empty and take every page from the system."""
    with _field(plan, nbytes) as field:
        if field is None:
            return []
        figures = partial(_figures, f"{nbytes // MIB}mib_fresh")
        return raced_puts(field.turns, field.sides, field.empty, figures)


def one_writer_figures(plan: Plan, nbytes: int) -> list[Figure]:
    """Race puts into servers that a single connection has filled, one chunk after the other."""
    with _field(plan, nbytes) as field:
        if field is None:
            return []

        def sides(stack: ExitStack) -> dict[str, Side]:
            return {
                name: side._replace(fill=None)
                for name, side in field.sides(stack).items()
            }

        return raced_puts(
            field.turns,
            sides,
            _rest,
            partial(_figures, f"{nbytes // MIB}mib_one_writer"),
        )


def cluster_figures(plan: Plan, nbytes: int) -> list[Figure]:
    """Race gets from a cluster of three masters against gets from one Redis: what all connections
    move together.
    """
    if missing := lacking("redis-server"):
        say(f"{missing}; its figures are skipped")
        return []
    turns = Turns(plan, nbytes, (64 if plan.quick else 256) * MIB)
    with ExitStack() as servers:
        # a Redis each, as none finds a chunk that the other has put
        ones = [servers.enter_context(redis_server()) for _ in range(2)]
        clusters = [servers.enter_context(redis_cluster(3)) for _ in range(2)]

        def sides(stack: ExitStack) -> dict[str, Side]:
            def cluster(
                masters: Sequence[Server],
            ) -> tuple[RedisClusterClient, tuple[int, ...]]:
                url = f"redis+cluster://127.0.0.1:{masters[0].port}"
                return RedisClusterClient(url, look_seconds=60.0), tuple(
                    each.pid for each in masters
                )

            return {
                "links": links_side(stack, turns, *cluster(clusters[0])),
                "one_links": links_side(
                    stack, turns, RedisClient(ones[0].url), ones[0].pid
                ),
                "tier": tier_side(stack, turns, *cluster(clusters[1])),
                "one_tier": tier_side(
                    stack, turns, RedisClient(ones[1].url), ones[1].pid
                ),
            }

        def figures(verb: str, made: Made) -> list[Figure]:
            size = f"{verb}_{nbytes // MIB}mib_vs_one_redis"
            return [
                made(f"cluster_{size}", "links", "one_links", 1.3),
                made(f"cluster_tier_{size}", "tier", "one_tier", 1.3),
            ]

        return raced_gets(turns, sides, figures)


def lookup_figures(plan: Plan, count: int) -> list[Figure]:
    """Race a look-up of `count` stored keys against one that asks for each of them."""
    if missing := lacking("redis-server"):
        say(f"{missing}; its figures are skipped")
        return []
    keys = keys_of("look-up", count)
    seconds = dict[str, list[float]](few=[], each=[])
    with (
        redis_server() as server,
        closing(RedisClient(server.url).connection()) as connection,
    ):
        connection.open(time.monotonic() + PATIENCE_SECONDS)
        page = np.zeros(HEADER_BYTES, np.uint8)
        for key in keys:
            mark = PutRequest(NAMESPACE.root, key, page, page[:0], lambda: True)
            connection.put(mark, time.monotonic() + PATIENCE_SECONDS)
        parts = {
            "few": [keys],
            "each": [
                keys[start : start + EXACT_KEYS]
                for start in range(0, count, EXACT_KEYS)
            ],
        }

        def look_up(name: str) -> None:
            began = time.perf_counter()
            until = time.monotonic() + PATIENCE_SECONDS
            found = sum(
                connection.find(NAMESPACE.root, part, until)
                for part in parts[name]
            )
            seconds[name].append(time.perf_counter() - began)
            if found != count:
                raise RuntimeError(f"{found} of {count} keys were found")

        for _ in range(3 * plan.rounds):
            for name in parts:
                look_up(name)
    times = [
        few / each
        for few, each in zip(seconds["few"], seconds["each"], strict=True)
    ]
    few_ms, each_ms = (
        1e3 * statistics.median(seconds[name]) for name in ("few", "each")
    )
    note = f"{few_ms:.2f} ms against {each_ms:.2f} ms"
    quoted = {"times": [round(one, 4) for one in times]}
    figure = f"look_up_{count}_keys_vs_each_key"
    return [Figure(figure, statistics.median(times), 0.25, "times", quoted, note)]


class Field:
    """The servers, full after ROOM_TURNS turns, and the entrants of the race."""

    def __init__(self, turns: Turns, servers: Mapping[str, Server]) -> None:
        self.turns = turns
        self._servers = servers

    def empty(self) -> None:
        """Empty all servers; they return their memory to the system."""
        for server in self._servers.values():
            redis.Redis.from_url(server.url).flushall()

    def sides(self, stack: ExitStack) -> dict[str, Side]:
        """Return all entrants, with new connections."""
        turns = self.turns
        servers = self._servers
        urls = {name: server.url for name, server in servers.items()}
        pids = {name: server.pid for name, server in servers.items()}
        loop = stack.enter_context(closing(RespLoop(servers["raw"].port)))
        put = turns.putting(lambda _, key, source: loop.put(key, source))
        get = turns.getting(lambda _, key, slot: loop.get(key, slot))
        plain = PlainRedis(urls[PLAIN])
        return {
            "link": link_side(
                stack, turns, RedisClient(urls["link"]), pids["link"]
            ),
            "tier": tier_side(
                stack, turns, RedisClient(urls["tier"]), pids["tier"]
            ),
            "raw": Side(put, get, pids["raw"], loop.threads),
            "socket": socket_side(stack, turns),
            PLAIN: Side(
                turns.putting(plain.put),
                turns.getting(plain.get),
                pids[PLAIN],
                plain.how,
            ),
        }


@contextmanager
def _field(plan: Plan, nbytes: int) -> Iterator[Field | None]:
    if missing := lacking("redis-server"):
        say(f"{missing}; its figures are skipped")
        yield None
        return
    turns = Turns(plan, nbytes, (32 if plan.quick else 128) * MIB)
    room = (
        f"--maxmemory {ROOM_TURNS * turns.turn_bytes} --maxmemory-policy allkeys-lru "
        "--maxmemory-samples 64"
    )
    with ExitStack() as stack:
        yield Field(
            turns,
            {
                name: stack.enter_context(redis_server(*room.split()))
                for name in _SIDES
            },
        )


def _rest() -> None:
    # Redis' LRU clock ticks once a second: without the wait a server might evict the newest chunks
    time.sleep(1.1)


def _figures(size: str, verb: str, made: Made) -> list[Figure]:
    size = f"{verb}_{size}"
    return [
        made(f"redis_{size}_vs_{PLAIN}", "link", PLAIN, 1.5),
        made(f"redis_{size}_vs_raw", "link", "raw", 0.8),
        made(f"redis_{size}_vs_socket", "link", "socket", None),
        made(f"redis_tier_{size}_vs_{PLAIN}", "tier", PLAIN, 1.5),
        made(f"redis_tier_{size}_vs_raw", "tier", "raw", None),
        made(f"redis_raw_{size}_vs_{PLAIN}", "raw", PLAIN, None),
    ]
