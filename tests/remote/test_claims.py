"""Claims of chunks that are not sent in the end: they are released, so that no other machine waits
for them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.tiers.base import Chunk, Done
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_cluster import RedisClusterClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import RefusedError, StoreClient
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server, redis_cluster
from tests.remote.chunks import (
    OTHER,
    PATIENT_SECONDS,
    ROOT,
    always,
    chunks_of,
    ends,
    fresh_prefix,
    keys_of,
    load,
    name_of,
    soon,
    tier_on,
)
from tests.remote.proxy import WELL, Fault, proxy_to
from tests.remote.redis_kit import redis_client

redis = pytest.importorskip("redis")
need("redis-server")

CHUNKS = 8


@contextlib.contextmanager
def patient(client: StoreClient) -> Iterator[RemoteTier]:
    """Open a tier with one thread that writes, whose claims stay for half a minute."""
    with tier_on(client, connections=1) as tier:
        yield tier


def chain(keys: Sequence[bytes], still_valid: Callable[[], bool]) -> list[Chunk]:
    """Return the chunks of a chain: the first is always valid, the others as long as `still_valid`
    says so.
    """
    return [*chunks_of(keys[:1]), *chunks_of(keys, still_valid=still_valid)[1:]]


def claimed(truth: redis.Redis, prefix: str, keys: Sequence[bytes]) -> bool:
    """Return whether all these chunks are claimed or stored."""
    return all(
        truth.exists(name_of(prefix, key) + ":w", name_of(prefix, key))
        for key in keys
    )


def others_store(client: StoreClient, keys: Sequence[bytes]) -> None:
    """Check that another machine stores the chunks at once."""
    with soon(), patient(client) as other:
        for end in ends(other.store(chunks_of(keys), ROOT)):
            assert end.ok
        assert load(other, keys) == [None] * len(keys)


def test_what_is_stale_once_it_is_claimed_is_left_to_others(
    server: Server,
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(CHUNKS)
    truth = redis_client(server)

    def still_valid() -> bool:
        return not claimed(truth, prefix, keys)

    # whose rule is enough
    page = Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"
    (rule,) = re.findall("^ACL SETUSER pagoda .*", page.read_text(), re.MULTILINE)
    truth.execute_command(*rule.replace("~pagoda:", f"~{prefix}:").split())
    url = server.url.replace("://", "://pagoda:PASSWORD@")
    with patient(RedisClient(url, prefix=prefix)) as tier:
        done = ends(tier.store(chain(keys, still_valid), ROOT))
        assert done == [Done(True)] + [Done(False, Reason.STALE)] * (CHUNKS - 1)
        others_store(RedisClient(server.url, prefix=prefix), keys)
    assert len(truth.keys(f"{prefix}*")) == CHUNKS, "no claim or draft is left"


@pytest.mark.parametrize("kind", ["one", "pool"])
def test_a_batch_of_two_namespaces_leaves_no_claim(
    server: Server, kind: str
) -> None:
    """Of each, the first chunk is sent and the others are stale once all of them are claimed."""
    prefix = fresh_prefix()
    truth = redis_client(server)
    goes_on = threading.Event()
    keys = {root: keys_of(3, root=root) for root in (ROOT, OTHER.root)}
    names = [
        name_of(prefix, key, root) for root, some in keys.items() for key in some
    ]

    def still_valid() -> bool:
        return not all(truth.exists(f"{name}:w", name) for name in names)

    begun = threading.Event()

    def waits() -> bool:
        begun.set()
        return goes_on.wait(PATIENT_SECONDS)

    client: StoreClient = RedisClient(server.url, prefix=prefix)
    if kind == "pool":
        client = RedisPoolClient(
            f"redis+pool://127.0.0.1:{server.port}", prefix=prefix
        )
    with patient(client) as tier:
        first = tier.store(
            chunks_of(keys_of(1, chain=1), still_valid=waits), ROOT
        )
        # the only thread has a batch: all others are one batch after it
        assert begun.wait(PATIENT_SECONDS)
        futures = [
            each
            for root, some in keys.items()
            for each in tier.store(chain(some, still_valid), root)
        ]
        goes_on.set()
        assert ends(futures) == [Done(True), *[Done(False, Reason.STALE)] * 2] * 2
        assert ends(first)[0].ok
        with soon():
            wait_until(lambda: len(truth.keys(f"{prefix}*")) == 3)


def test_what_is_removed_once_it_is_claimed_is_left_to_others(
    server: Server,
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(CHUNKS)
    truth = redis_client(server)
    goes_on = threading.Event()

    def waits() -> bool:
        return not claimed(truth, prefix, keys) or goes_on.wait(PATIENT_SECONDS)

    with patient(RedisClient(server.url, prefix=prefix)) as tier:
        futures = tier.store(
            [*chunks_of(keys[:1], still_valid=waits), *chain(keys, always)[1:]],
            ROOT,
        )
        wait_until(lambda: claimed(truth, prefix, keys))
        removal = threading.Thread(target=tier.remove, args=(keys[-1], ROOT))
        removal.start()
        wait_until(lambda: not tier.contains(keys[-1], ROOT))
        goes_on.set()
        assert ends(futures)[-1] == Done(False, Reason.REMOVED)
        removal.join(PATIENT_SECONDS)
        others_store(RedisClient(server.url, prefix=prefix), keys)


def test_what_a_server_refuses_is_left_to_others(server: Server) -> None:
    """After some refusals nothing is sent any more, whatever was claimed before."""
    prefix = fresh_prefix()
    keys = keys_of(CHUNKS)
    truth = redis_client(server)
    truth.execute_command("ACL SETUSER reads on >x ~* +@all -hset")
    with patient(
        RedisClient(f"redis://reads:x@127.0.0.1:{server.port}", prefix=prefix)
    ) as tier:
        for end in ends(tier.store(chunks_of(keys), ROOT)):
            assert not end.ok
        others_store(RedisClient(server.url, prefix=prefix), keys)


def test_what_was_claimed_beside_a_refusal_is_left_to_others(
    server: Server,
) -> None:
    """A server that refuses one of many claims: nothing of that batch is sent."""
    prefix = fresh_prefix()
    keys = keys_of(3)
    truth = redis_client(server)
    names = " ".join(
        ["~*probe", *(f"~{name_of(prefix, key)}*" for key in keys[:-1])]
    )
    truth.execute_command(*f"ACL SETUSER some on >x {names} +@all".split())
    client = RedisClient(f"redis://some:x@127.0.0.1:{server.port}", prefix=prefix)
    until = time.monotonic() + PATIENT_SECONDS
    with (
        contextlib.closing(client.connection().open(until)) as connection,
        pytest.raises(RefusedError),
    ):
        connection.claim(ROOT, keys, until)
    assert truth.keys(f"{prefix}*") == []


def test_what_a_broken_connection_does_not_send_is_left_to_others(
    server: Server,
) -> None:
    prefix = fresh_prefix()
    keys = keys_of(3)
    truth = redis_client(server)
    with proxy_to(server.port) as proxy:
        breaks = Fault(cut_at=5000)  # a claim passes, a chunk does not

        def then(fault: Fault) -> Callable[[], bool]:
            """Say that a chunk is valid; set a fault once all are claimed: when this chunk is to be
            sent.
            """
            return lambda: (
                not claimed(truth, prefix, keys) or proxy.both(fault) is None
            )

        client = RedisClient(f"redis://127.0.0.1:{proxy.port}", prefix=prefix)
        each = zip(keys, (always, then(breaks), then(WELL)), strict=True)
        chunks = [
            chunks_of(keys, still_valid=rule)[keys.index(key)]
            for key, rule in each
        ]
        with patient(client) as tier:
            assert [end.ok for end in ends(tier.store(chunks, ROOT))] == [
                True,
                False,
                True,
            ]
            others_store(RedisClient(server.url, prefix=prefix), keys)


def test_the_claim_of_another_machine_and_what_it_stores_stay(
    server: Server,
) -> None:
    """As when this machine was away for so long that its claims have expired."""
    prefix = fresh_prefix()
    keys = keys_of(3)
    truth = redis_client(server)
    names = [name_of(prefix, key) for key in keys]

    def still_valid() -> bool:
        if not claimed(truth, prefix, keys):
            return True
        truth.set(names[1] + ":w", "another", px=60_000)
        truth.hset(names[2], "h", "another")
        return False

    with patient(RedisClient(server.url, prefix=prefix)) as tier:
        assert [
            end.ok for end in ends(tier.store(chain(keys, still_valid), ROOT))
        ] == [True, False, False]
        wait_until(lambda: not truth.exists(names[2] + ":w"))
    assert truth.get(names[1] + ":w") == b"another"
    assert truth.hget(names[2], "h") == b"another"


def test_only_the_process_that_claimed_releases(server: Server) -> None:
    prefix = fresh_prefix()
    keys = keys_of(2)
    truth = redis_client(server)
    until = time.monotonic() + PATIENT_SECONDS
    mine, others = (RedisClient(server.url, prefix=prefix) for _ in range(2))

    def release(client: RedisClient) -> None:
        with contextlib.closing(client.connection().open(until)) as connection:
            connection.release(ROOT, keys, until)

    with contextlib.closing(mine.connection().open(until)) as connection:
        assert connection.claim(ROOT, keys, until) == [None, None]
    release(others)
    child = multiprocessing.get_context("fork").Process(
        target=release, args=(mine,)
    )
    child.start()
    child.join(PATIENT_SECONDS)
    assert child.exitcode == 0
    assert len(truth.keys(f"{prefix}*")) == 2
    release(mine)
    assert not truth.keys(f"{prefix}*")


@pytest.mark.slow
def test_claims_on_all_nodes_of_a_cluster_are_released() -> None:
    need("redis-cli")
    prefix = fresh_prefix()
    keys = keys_of(CHUNKS)
    with (
        redis_cluster() as servers,
        redis.RedisCluster("127.0.0.1", servers[-1].port) as truth,
    ):
        url = f"redis+cluster://127.0.0.1:{servers[-1].port}"

        def client() -> RedisClusterClient:
            return RedisClusterClient(
                url, prefix=prefix, look_seconds=PATIENT_SECONDS
            )

        def still_valid() -> bool:
            return not all(
                truth.exists(name_of(prefix, key) + ":w")
                or truth.exists(name_of(prefix, key))
                for key in keys
            )

        with patient(client()) as tier:
            done = ends(tier.store(chain(keys, still_valid), ROOT))
            assert done == [Done(True)] + [Done(False, Reason.STALE)] * (
                CHUNKS - 1
            )
            others_store(client(), keys)
