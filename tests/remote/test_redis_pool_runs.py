"""Several independent Redis as one store: what one request stores is on one node, and is found
wherever it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from pagoda.config.remote_urls import parse
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda_tools.cli import remote_stores
from pagoda_tools.cli.remote_stores import pinged
from pagoda_tools.cli.stats import remote_usage
from testbed.patience import wait_until
from testbed.servers import Server, redis_server
from tests.remote.chunks import (
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    chunks_of,
    ends,
    keys_of,
    load,
    tier_on,
)
from tests.remote.test_redis_pool import of, on, shares

MARK = "p:1:runs"
PROMPTS = 20
CHUNKS = 12


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Servers without any value."""
    with (
        redis_server() as first,
        redis_server() as second,
        redis_server() as third,
    ):
        yield [first, second, third]


def patient(servers: Sequence[Server]) -> RedisPoolClient:
    return on(servers)


def stored(
    tier: RemoteTier, keys: Sequence[bytes], stamp: int, first: int = 0
) -> None:
    """Store what is missing of a prompt, as write-back does: in parts, under the stamp of the
    request.
    """
    chunks = chunks_of(keys)
    present = tier.touch(keys, namespace=ROOT, stamp=stamp)
    assert present is not None
    missing = [
        chunk
        for chunk, is_here in zip(chunks, present, strict=True)
        if not is_here
    ]
    for at in range(first, len(missing), 5):
        for end in ends(tier.store(missing[at : at + 5], ROOT, stamp=stamp)):
            assert end.ok


def prompts() -> list[list[bytes]]:
    return [keys_of(CHUNKS, chain=number) for number in range(1, PROMPTS + 1)]


def hits(servers: Sequence[Server], nodes: int = 3) -> list[int]:
    """Return how many leading chunks of each prompt another machine finds, and check that it can
    load them.

    `nodes`: how many are up; the machine has noticed that the others are not.
    """
    with patient_tier(servers) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(keys_of(1), namespace=ROOT) == 0
                and in_use(tier) == nodes
            )
        )
        found = []
        for keys in prompts():
            count = tier.match_prefix(keys, namespace=ROOT)
            assert (
                load(tier, keys[:count], SMALL, PATIENT_SECONDS) == [None] * count
            )
            found.append(count)
        return found


def in_use(tier: RemoteTier) -> int:
    pool = tier._store.client
    assert isinstance(pool, RedisPoolClient)
    return len(pool.in_use())


def patient_tier(
    servers: Sequence[Server],
) -> contextlib.AbstractContextManager[RemoteTier]:
    return tier_on(
        patient(servers),
    )


@pytest.mark.slow
def test_what_a_request_stores_is_on_one_node_and_requests_are_on_all(
    servers: list[Server],
) -> None:
    with patient_tier(servers) as tier:
        for stamp, keys in enumerate(prompts()):
            stored(tier, keys, stamp)
        assert [server.call("EXISTS", MARK) for server in servers] == [
            ":1\r\n"
        ] * 3
        for keys in prompts():
            assert sorted(map(len, of(servers, keys).values())) == [0, 0, CHUNKS]
        for server in servers:
            assert sum(
                map(len, (of(servers, keys)[server] for keys in prompts()))
            )
        # the next request of a conversation is a run of its own
        longer = keys_of(3 * CHUNKS, chain=1)
        stored(tier, longer, PROMPTS)
        assert sorted(map(len, of(servers, longer[CHUNKS:]).values())) == [
            0,
            0,
            2 * CHUNKS,
        ]
        assert tier.match_prefix(longer, namespace=ROOT) == 3 * CHUNKS


def test_the_mark_is_no_key_of_others(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_stores, "PATIENCE_SECONDS", PATIENT_SECONDS)
    with patient_tier(servers) as tier:
        stored(tier, prompts()[0], stamp=1)
    assert [server.call("EXISTS", MARK) for server in servers] == [":1\r\n"] * 3
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    spec = parse(f"redis+pool://{places}?prefix=p")
    (asked,) = pinged([spec])
    assert not [text for text in asked.warnings if "keys of others" in text]
    servers[0].call("SET", "p:1:runs:theirs", "1")
    (asked,) = pinged([spec])
    assert any("keys of others" in text for text in asked.warnings)


@pytest.mark.slow
def test_a_lost_node_takes_whole_requests_and_is_no_second_loss_when_it_is_back(
    servers: list[Server],
) -> None:
    with patient_tier(servers) as tier:
        for stamp, keys in enumerate(prompts()):
            stored(tier, keys, stamp)
    assert hits(servers) == [CHUNKS] * PROMPTS
    lost = servers[1]
    on_lost = [len(of([lost], keys)[lost]) for keys in prompts()]
    lost.kill()
    expected = [0 if count else CHUNKS for count in on_lost]
    assert 0 in expected
    assert CHUNKS in expected
    assert hits(servers, nodes=2) == expected
    with patient_tier(servers) as tier:
        wait_until(lambda: tier.touch(keys_of(1), namespace=ROOT) is not None)
        for stamp, keys in enumerate(prompts()):
            stored(tier, keys, stamp)
    assert hits(servers, nodes=2) == [CHUNKS] * PROMPTS
    lost.restart()  # empty
    assert hits(servers) == [CHUNKS] * PROMPTS
    with patient_tier(servers) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(keys_of(1), namespace=ROOT) == 0
                and in_use(tier) == 3
            )
        )
        stored(tier, keys_of(2, chain=99), 1)
    assert lost.call("EXISTS", MARK) == ":1\r\n", (
        "the mark was not copied to the node that came back empty"
    )


def test_a_pool_that_has_values_keeps_own_places_until_it_is_marked(
    servers: list[Server],
) -> None:
    """Versions before runs look for a chunk at its own place only."""
    servers[0].call("SET", "another:program", "1")
    with patient_tier(servers) as tier:
        keys = keys_of(30)
        stored(tier, keys, 1)
        own = shares(patient(servers), keys)
        for node, share in own.items():
            (server,) = (
                one for one in servers if f":{one.port}/" in node.client.address
            )
            assert set(of([server], keys)[server]) == share
        assert servers[0].call("EXISTS", MARK) == ":0\r\n"
    # a person, once no machine has an older version
    servers[2].call("SET", MARK, "1")
    with patient_tier(servers) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 30
        new = keys_of(30, chain=2)
        stored(tier, new, 2)
        assert sorted(map(len, of(servers, new).values())) == [0, 0, 30]
    assert [server.call("EXISTS", MARK) for server in servers] == [":1\r\n"] * 3


def test_without_a_mark_too_a_chunk_is_found_on_any_node(
    servers: list[Server],
) -> None:
    servers[0].call("SET", "another:program", "1")
    keys = keys_of(40)
    lost = servers[1]
    lost.kill()
    with patient_tier(servers) as tier:
        wait_until(lambda: tier.touch(keys[:1], namespace=ROOT) is not None)
        stored(tier, keys, 1)
    lost.restart()
    with patient_tier(servers) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 40
        stored(tier, keys, 2)
        assert not of([lost], keys)[lost], (
            "chunks that other nodes have were stored again"
        )
    with patient_tier(servers) as tier:  # loads that no look-up came before
        wait_until(
            lambda: load(tier, keys, SMALL, PATIENT_SECONDS) == [None] * 40
        )
        assert tier.remove(keys[0], ROOT)
        assert tier.match_prefix(keys, namespace=ROOT) == 0


def test_a_first_chunk_that_all_prompts_share_makes_no_busy_node(
    servers: list[Server],
) -> None:
    """Where a request's chunks go is decided by its first new chunk, not by the first chunk of the
    prompt.
    """
    shared = keys_of(2)
    client = patient(servers)
    client.keeps_runs = True
    counts = dict.fromkeys(client.nodes, 0)
    client.begin_run(shared, 0)
    for number in range(600):
        new = keys_of(10, chain=number + 1)
        client.begin_run(new, number + 1)
        (node,) = client.places(new)
        counts[node] += len(new)
    assert max(counts.values()) <= 1.2 * sum(counts.values()) / 3
    assert {client.place_of(key) for key in new} == {node}


def test_what_is_remembered_of_places_is_bounded(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda.tiers.remote import redis_pool

    monkeypatch.setattr(redis_pool, "_MOST_KEYS", 8)
    monkeypatch.setattr(redis_pool, "_MOST_RUNS", 2)
    client = patient(servers)
    for number in range(50):
        keys = keys_of(3, chain=number)
        client.begin_run(keys, number)
        client.note_present(client.nodes[0], keys)
    assert len(client._nodes_of._values) == len(client._first_of._values) == 8
    assert len(client._runs._values) == 2


def test_commands_say_which_nodes_answer(servers: list[Server]) -> None:
    """`pagoda check` names the silent node and says that the others answer; `top` and `stats` see a
    dead pool.
    """
    url = "redis+pool://" + ",".join(
        f"127.0.0.1:{server.port}" for server in servers
    )
    assert [asked.verdict for asked in pinged([parse(url)])] == ["answers"]
    servers[0].kill()
    (asked,) = pinged([parse(url)])
    assert asked.verdict == "2 of 3 nodes"
    assert f"{servers[0].port}: no answer" in asked.trouble
    usage = remote_usage(parse(url))
    assert not usage.error
    assert any("no answer" in text for text in usage.warnings)
    for server in servers[1:]:
        server.kill()
    assert [asked.verdict for asked in pinged([parse(url)])] == ["NO ANSWER"]
    assert "no node answers" in remote_usage(parse(url)).error
