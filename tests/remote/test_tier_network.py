"""A remote tier over a bad network: a miss or a drop with its reason, in time, and well again by
itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis as client

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.tiers.remote.redis import RedisClient
from testbed.patience import wait_until
from testbed.servers import Server, free_port
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
    PATIENT_SECONDS,
    TROUBLE,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    name_of,
    recovers,
    save,
    saved,
    soon,
    stores,
    tier_on,
)
from tests.remote.proxy import (
    STALLED,
    Fault,
    Proxy,
    black_hole,
    through,
)

STEADY = {
    "slow": Fault(bytes_per_second=400_000),
    "cut at once": Fault(cut_at=0),
    "cut in the page": Fault(cut_at=2000),
    "reset in a piece": Fault(cut_at=1_500_000, reset=True),
    "cut in the last piece": Fault(cut_at=2_600_000),
    "stalled": STALLED,
}
WHEN_SAVING = [
    "slow",
    "cut at once",
    "cut in the page",
    "reset in a piece",
    "stalled",
]
SPOILT = {
    "a spoilt protocol": Fault(corrupt=range(8)),
    "a spoilt header": Fault(corrupt=range(2000, 2001)),
    "a spoilt piece": Fault(corrupt=range(1_000_000, 1_000_001)),
    "much that is spoilt": Fault(corrupt=range(1 << 40)),
    "a byte less": Fault(lose=range(500_000, 500_001)),
    "a page less": Fault(lose=range(1_048_576, 1_052_672)),
    "nothing comes through": Fault(lose=range(1 << 40)),
}


@pytest.fixture
def prefix() -> str:
    return fresh_prefix()


@pytest.mark.slow
@pytest.mark.parametrize("fault", (STEADY | SPOILT).values(), ids=STEADY | SPOILT)
def test_a_load_over_a_bad_network(
    server: Server, proxy: Proxy, prefix: str, fault: Fault
) -> None:
    warm = keys_of(1, chain=1)
    keys = keys_of(2)
    saved(RedisClient(server.url, prefix=prefix), warm, LARGE)
    saved(RedisClient(server.url, prefix=prefix), keys, LARGE)
    with hasty_tier(through(proxy, prefix), LARGE, connections=1) as tier:
        # so that the fault strikes in the middle of a transfer
        recovers(tier, warm, LARGE)
        proxy.down = fault
        reasons = load(tier, keys, LARGE)
        assert reasons[0] in TROUBLE
        assert set(reasons) <= {None, *TROUBLE}
        stats = tier.stats()
        assert sum(stats[f"miss_{reason}"] for reason in TROUBLE) >= sum(
            r is not None for r in reasons
        )
        proxy.heal()
        # chunks that fail their check are removed
        if Reason.FAILED_CHECK in reasons:
            saved(RedisClient(server.url, prefix=prefix), keys, LARGE)
        recovers(tier, keys, LARGE)
        assert proxy.open_connections <= 2  # one for transfers, one for probes


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [STEADY[name] for name in WHEN_SAVING], ids=WHEN_SAVING
)
def test_a_save_over_a_bad_network(
    server: Server, proxy: Proxy, prefix: str, fault: Fault
) -> None:
    warm = keys_of(1, chain=1)
    keys = keys_of(1)
    truth = client.Redis(port=server.port)
    with hasty_tier(through(proxy, prefix), LARGE, connections=1) as tier:
        stores(tier, warm, LARGE)
        proxy.up = fault
        (end,) = save(tier, keys, LARGE)
        # its own claim, seen by its second try
        assert not end.ok
        assert end.reason in TROUBLE | {Reason.BUSY}
        assert tier.stats()[f"drop_{end.reason}"] >= 1
        assert not truth.exists(name_of(prefix, keys[0]))  # not even a part of it
        for left in truth.scan_iter(f"{prefix}:*"):
            assert (
                left == name_of(prefix, warm[0]).encode() or truth.pttl(left) > 0
            ), "an orphan that stays"
        proxy.heal()
        # it takes a while: what a dead link has claimed is its own for some seconds
        if fault.reset or fault.stall:
            stores(tier, keys, LARGE)
            recovers(tier, keys, LARGE)


@pytest.mark.parametrize("at", [20_000, 1_000_000, 2_500_000])
def test_bytes_spoilt_on_their_way_to_the_store(
    server: Server, proxy: Proxy, prefix: str, at: int
) -> None:
    """They are stored, found damaged at a read, and then removed: the next save stores them
    correctly.
    """
    warm = keys_of(1, chain=1)
    keys = keys_of(1)
    with tier_on(through(proxy, prefix), LARGE, connections=1) as tier:
        stores(tier, warm, LARGE)
        proxy.up = Fault(corrupt=range(at, at + 1))
        stores(tier, keys, LARGE)
        proxy.heal()
    with tier_on(RedisClient(server.url, prefix=prefix), LARGE) as tier:
        assert tier.match_prefix(keys) == 1
        assert load(tier, keys, LARGE) == [Reason.FAILED_CHECK]
        assert tier.stats()["failed_checks"] == 1
        wait_until(lambda: tier.match_prefix(keys) == 0)
        stores(tier, keys, LARGE)
        recovers(tier, keys, LARGE)


def test_a_delay_within_the_deadline_is_only_a_delay(
    server: Server, proxy: Proxy, prefix: str
) -> None:
    keys = keys_of(3)
    with tier_on(through(proxy, prefix)) as tier:
        proxy.both(Fault(delay_seconds=0.05))
        stores(tier, keys)
        recovers(tier, keys)


def test_what_failed_once_is_not_taken_to_be_absent(
    server: Server, proxy: Proxy, prefix: str
) -> None:
    keys = keys_of(1)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(through(proxy, prefix), clock=Clock()) as tier:
        proxy.down = Fault(cut_at=0)
        assert load(tier, keys) == [Reason.IO_ERROR]
        proxy.heal()
        assert load(tier, keys) == [None]


@pytest.mark.slow
def test_two_prompts_with_one_beginning_are_not_confused(
    server: Server, proxy: Proxy, prefix: str
) -> None:
    """Asked at once, of equal length: only callers that ask for the same keys share an answer."""
    (head, *one), (_, *two) = keys_of(3), keys_of(3, chain=1)
    saved(RedisClient(server.url, prefix=prefix), [head, *one])
    proxy.down = Fault(delay_seconds=0.3)
    remote = through(proxy, prefix)
    patient = {
        "deadline_seconds": PATIENT_SECONDS,
        "look_seconds": PATIENT_SECONDS,
    }
    with tier_on(remote, **patient) as tier, ThreadPoolExecutor(2) as asking:
        answers = asking.map(tier.match_prefix, [[head, *one], [head, *two]])
        assert list(answers) == [3, 1]


def test_a_question_that_makes_no_sense_is_the_asker_s_trouble_alone(
    server: Server, prefix: str
) -> None:
    keys = keys_of(2)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(RedisClient(server.url, prefix=prefix)) as tier:
        assert tier.match_prefix(keys_of(1, chain=1), namespace=b"too short") == 0
        assert tier.match_prefix(keys) == 2


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_a_link_that_dies_without_a_word(
    server: Server, proxy: Proxy, prefix: str, up: bool
) -> None:
    """Half-open: nothing passes one way, in new connections neither."""
    keys = keys_of(2)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with hasty_tier(through(proxy, prefix)) as tier:
        recovers(tier, keys)
        if up:
            proxy.up = STALLED
        else:
            proxy.down = STALLED
        for _ in range(3):
            assert set(load(tier, keys)) <= {
                Reason.DEADLINE,
                Reason.IO_ERROR,
                Reason.TIER_SKIPPED,
            }
        with soon():
            assert tier.match_prefix(keys_of(2, chain=1)) == 0
        for end in save(tier, keys_of(2, chain=2)):
            assert not end.ok
        proxy.heal()
        recovers(tier, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [STALLED, Fault(cut_at=0), Fault(corrupt=range(1 << 40))]
)
def test_a_network_that_is_bad_from_the_first_byte(
    server: Server, proxy: Proxy, prefix: str, fault: Fault
) -> None:
    keys = keys_of(2)
    saved(RedisClient(server.url, prefix=prefix), keys)
    proxy.both(fault)
    with soon(), hasty_tier(through(proxy, prefix)) as tier:
        assert set(load(tier, keys)) <= TROUBLE
    with hasty_tier(through(proxy, prefix)) as tier:
        assert set(load(tier, keys)) <= TROUBLE
        proxy.heal()
        recovers(tier, keys)


def test_nobody_listens_and_later_somebody_does(
    server: Server, proxy: Proxy, prefix: str
) -> None:
    keys = keys_of(2)
    saved(RedisClient(server.url, prefix=prefix), keys)
    proxy.refuse()
    with tier_on(through(proxy, prefix)) as tier:
        assert set(load(tier, keys)) <= {Reason.IO_ERROR, Reason.TIER_SKIPPED}
        for end in save(tier, keys):
            assert not end.ok
        proxy.accept()
        recovers(tier, keys)


def test_connections_cut_while_nothing_moves_are_made_anew(
    server: Server, proxy: Proxy, prefix: str
) -> None:
    """A server's idle timeout, a restarted load balancer: not worth a miss."""
    keys = keys_of(3)
    saved(RedisClient(server.url, prefix=prefix), keys)
    with tier_on(through(proxy, prefix), connections=1) as tier:
        for _ in range(3):
            recovers(tier, keys)
            proxy.cut(reset=False)


def test_a_name_that_does_not_resolve(prefix: str) -> None:
    keys = keys_of(2)
    with (
        soon(2 * LATE_SECONDS),
        tier_on(
            RedisClient("redis://no-such-host.invalid:6379", prefix=prefix)
        ) as tier,
    ):
        assert set(load(tier, keys)) <= {
            Reason.IO_ERROR,
            Reason.DEADLINE,
            Reason.TIER_SKIPPED,
        }
        for end in save(tier, keys):
            assert not end.ok
        assert tier.match_prefix(keys) == 0


def test_a_connection_that_is_never_answered(prefix: str) -> None:
    keys = keys_of(2)
    with black_hole() as port:
        remote = RedisClient(f"redis://127.0.0.1:{port}", prefix=prefix)
        with soon(2 * LATE_SECONDS), hasty_tier(remote) as tier:
            assert set(load(tier, keys)) <= {
                Reason.IO_ERROR,
                Reason.DEADLINE,
                Reason.TIER_SKIPPED,
            }
            for end in save(tier, keys):
                assert not end.ok


def test_a_port_that_nobody_has(prefix: str) -> None:
    with (
        soon(),
        tier_on(
            RedisClient(f"redis://127.0.0.1:{free_port()}", prefix=prefix)
        ) as tier,
    ):
        assert set(load(tier, keys_of(2))) <= {
            Reason.IO_ERROR,
            Reason.TIER_SKIPPED,
        }
