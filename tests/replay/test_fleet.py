"""A fleet in the simulator: by hand, and beside real machines that share a real Redis."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from redis import Redis

from pagoda.tiers.remote.redis import RedisClient
from pagoda_tools.replay import (
    FleetOutcome,
    FleetSpec,
    Request,
    TierSpec,
    Traffic,
    simulate,
    simulate_fleet,
)
from pagoda_tools.replay.fleet import _Router
from testbed.live_cache import Live
from testbed.servers import redis_server
from tests.children import in_light_process
from tests.replay.traces import request, sample

MACHINES = 8
HOST = 60
SOME = 300
# in a light process: eight others would import everything again
FORK = multiprocessing.get_context("fork")
PATIENT_SECONDS = 200.0


def fleet(
    requests: Sequence[Request],
    machines: int,
    host: int = 0,
    remote: int = 1000,
    route: str = "round-robin",
    writes: str = "write_through",
) -> FleetOutcome:
    own = [TierSpec("host", host, "lru")] if host else []
    return simulate_fleet(
        requests,
        FleetSpec(
            machines, own, TierSpec("remote", remote, "lru"), route, writes
        ),
    )


def hits(outcome: FleetOutcome) -> dict[str, int]:
    return {tier.name: tier.hits for tier in outcome.tiers}


def test_what_one_machine_computed_another_loads() -> None:
    done = fleet(
        [request(1, 2, ms=ms) for ms in (0, 1_000, 2_000, 120_000)], 2, host=10
    )
    assert hits(done) == {"host": 4, "remote": 2}
    assert done.store == Traffic(2, 2, 4)
    assert done.machine == Traffic(1, 1, 2)
    assert done.busiest == Traffic(0, 2, 2)
    assert done.requests == 4
    assert done.accesses == 8
    assert done.seconds == 120.0
    assert done.hit_rate == 0.75
    assert done.lookups == 2
    assert done.busiest_minute_lookups == 2
    assert done.kept == 2


def test_second_sight_stores_what_is_asked_for_again_within_an_hour() -> None:
    hour = 3_600_000
    requests = [
        request(1, 2, ms=0),
        request(1, 3, ms=1_000),
        request(1, 2, ms=2_000),
        request(2, ms=3_000),
    ]
    done = fleet(requests, 4, writes="second_sight")
    assert hits(done) == {"remote": 2}
    # 1 of the third, 2 of the fourth
    assert done.store.written == 2
    assert done.kept == 2
    late = fleet(
        [request(1, ms=0), request(1, ms=hour + 1), request(1, ms=hour + 2)],
        3,
        writes="second_sight",
    )
    assert hits(late) == {"remote": 0}
    assert late.store.written == 1
    above = fleet(
        [request(1, ms=ms) for ms in (0, 1_000, 2_000)],
        1,
        host=10,
        writes="second_sight",
    )
    assert (hits(above), above.store.written) == ({"host": 2, "remote": 0}, 1), (
        "a hit above asks too"
    )


@pytest.mark.slow
def test_one_machine_is_what_its_tiers_would_be() -> None:
    requests = sample()[:500]
    specs = [TierSpec("host", 100, "lru"), TierSpec("remote", 1000, "lru")]
    done = simulate_fleet(requests, FleetSpec(1, specs[:1], specs[1]))
    assert done.tiers == simulate(requests, specs).tiers


def test_an_object_store_is_asked_as_its_client_asks() -> None:
    chunks = tuple(range(1, 41))
    done = fleet(
        [request(*chunks, ms=ms) for ms in (0, 1_000, 500_000, 700_000)],
        1,
        host=100,
    )
    # nothing is found: one round; each chunk is asked for before its put. After ten minutes all
    # that the host serves is asked for again, and not before
    assert done.asked._asdict() == {
        "look_heads": 16,
        "heads": 16 + 40,
        "gets": 0,
        "puts": 40,
    }
    later = fleet(
        [request(*chunks, ms=ms) for ms in (0, 1_000, 700_000)], 1, host=100
    )
    assert later.asked.heads == 16 + 40 + 40


def test_a_conversation_stays_on_its_machine() -> None:
    router = _Router(3, "prefix")
    # half of each is known
    assert [router.machine(ids) for ids in ((1, 2), (1, 3), (1, 4))] == [0, 0, 0]
    assert router.machine((5, 6, 7)) == 1
    assert router.machine((1, 8, 9, 10)) == 2  # only its beginning is known
    assert [
        router.machine(ids)
        for ids in ((5, 6, 7, 11), (1, 8, 9, 10, 12), (1, 2, 13))
    ] == [1, 2, 0]
    assert [_Router(2, "round-robin").machine((1,)) for _ in range(2)] == [0, 0]


def test_a_fleet_that_cannot_be() -> None:
    for machines, route, said in (
        (0, "prefix", "at least one machine"),
        (1, "nearest", "not nearest"),
    ):
        with pytest.raises(ValueError, match=said):
            fleet([], machines, route=route)
    with pytest.raises(ValueError, match="not third_sight"):
        fleet([], 1, writes="third_sight")
    assert fleet([], 2).hit_rate == 0.0


def _machine(
    root: Path, url: str, second_sight: bool, orders: Connection
) -> None:
    """One machine: plays each request that it is sent, says that it has, and at the end what each
    tier served.
    """
    live = Live(
        root, "lru", host=HOST, remote=RedisClient(url, second_sight=second_sight)
    )
    for asked in iter(orders.recv, None):
        live.ask(asked)
        orders.send(live.hits)
    live.close()


@contextmanager
def machines(
    root: Path, url: str, second_sight: bool
) -> Iterator[list[Connection]]:
    """Eight processes, each with its own host memory, that share a Redis."""
    with ExitStack() as ends:
        lines = []
        for number in range(MACHINES):
            mine, its = FORK.Pipe()
            process = FORK.Process(
                target=_machine, args=(root / str(number), url, second_sight, its)
            )
            process.start()
            ends.callback(process.join, PATIENT_SECONDS)
            ends.callback(mine.send, None)
            lines.append(mine)
        yield lines


def played(
    lines: Sequence[Connection], requests: Sequence[Request], route: str
) -> Counter[str]:
    """Play requests one after the other; the chunks that each tier served."""
    router = _Router(MACHINES, route)
    served = dict[int, Counter[str]]()
    for asked in requests:
        number = router.machine(asked.hash_ids)
        lines[number].send(asked)
        assert lines[number].poll(PATIENT_SECONDS)
        served[number] = lines[number].recv()
    return sum(served.values(), Counter())


def _over_one_redis(root: Path, url: str, route: str, writes: str) -> None:
    requests = [asked for asked in sample() if len(asked.hash_ids) <= HOST][:SOME]
    done = fleet(requests, MACHINES, HOST, 100_000, route, writes)
    with machines(root, url, writes == "second_sight") as lines:
        served = played(lines, requests, route)
        assert len(Redis.from_url(url).keys("*}")) == done.kept, (
            "chunks, without marks"
        )
    _assert_alike(served, done)


def _over_a_redis_that_evicts(root: Path, url: str) -> None:
    requests = [asked for asked in sample() if len(asked.hash_ids) <= HOST][
        : 4 * SOME // 3
    ]
    with machines(root, url, False) as lines:
        served = played(lines, requests, "round-robin")
        stored = Redis.from_url(url).dbsize()
        evicted = Redis.from_url(url).info()["evicted_keys"]
    assert evicted > stored / 2
    _assert_alike(served, fleet(requests, MACHINES, HOST, stored))


def _assert_alike(served: Counter[str], done: FleetOutcome) -> None:
    rates = {tier: count / done.accesses for tier, count in hits(done).items()}
    real = {
        "host": served["host"] / done.accesses,
        "remote": served["redis"] / done.accesses,
    }
    assert real == pytest.approx(rates, abs=0.01), f"{real}, not {rates}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "writes"),
    [
        ("round-robin", "write_through"),
        ("prefix", "write_through"),
        ("round-robin", "second_sight"),
    ],
)
def test_eight_machines_over_one_redis(
    shm_root: Path, route: str, writes: str
) -> None:
    with redis_server() as redis:
        in_light_process(_over_one_redis, shm_root, redis.url, route, writes)


@pytest.mark.slow
def test_eight_machines_over_a_redis_that_evicts(shm_root: Path) -> None:
    """By the lives that rank its chunks; the simulator gets as many chunks as the Redis had room
    for.
    """
    room = (
        "--maxmemory 22mb --maxmemory-policy volatile-ttl --maxmemory-samples 64"
    )
    with redis_server(*room.split()) as redis:
        in_light_process(_over_a_redis_that_evicts, shm_root, redis.url)
