"""Neighbours: what one machine stored another reads over `pagoda serve`, whatever the neighbours
do.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache.miss_explainer import unanswered
from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.testing import FakeClock
from pagoda.tiers.remote.open_client import url_with_password
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.peers import PeersClient, PeerUrl
from pagoda.transfer import DenseKV
from testbed.patience import Patience, wait_until
from testbed.servers import Server, free_port, pagoda_server
from tests.cache import kit
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
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
from tests.remote.evil import SILENCE, Lie, LyingHttp, dripping, endless, http
from tests.remote.proxy import Fault, proxy_to
from tests.serve import kit as serve_kit

NOISE = np.random.default_rng(0).bytes(1 << 20)
PATIENT = {"deadline_seconds": 30.0, "look_seconds": 30.0}


@contextlib.contextmanager
def machine(size: str = "64MiB") -> Iterator[Server]:
    """Another machine: its server makes host stores for what tests put there."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        with pagoda_server(
            root, "--host-size", size, PAGODA_POLICY="lru"
        ) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    """Three machines, which all tests of this module share."""
    with machine() as one, machine() as two, machine() as three:
        yield [one, two, three]


_chains = iter(range(1000, 2**31))


def fresh_keys(count: int) -> list[bytes]:
    """Return a chain that no other test uses."""
    return keys_of(count, next(_chains))


def url_of(server: Server) -> str:
    """Return the URL of a machine's server, with its token."""
    return url_with_password(server.url, str(server.root / "token"))


def client_of(*servers: Server | str, look_seconds: float = 30.0) -> PeersClient:
    """Return the neighbours as one store; texts are URLs."""
    urls = [
        server if isinstance(server, str) else url_of(server)
        for server in servers
    ]
    return PeersClient(
        [PeerUrl(url, False) for url in urls],
        look_seconds=look_seconds,
        clock=QuickClock(),
    )


def give(server: Server, keys: Sequence[bytes], layout: KVLayout = SMALL) -> None:
    """Store a chain on one machine."""
    with tier_on(
        PagodaServerClient(url_of(server)), layout, queue_chunks=4096, **PATIENT
    ) as tier:
        for done in ends(tier.store(chunks_of(keys, layout), ROOT)):
            assert done.ok


# ---- finding and loading


def test_a_look_up_takes_the_longest_run_and_loads_come_from_whoever_has_them(
    three: list[Server],
) -> None:
    keys = fresh_keys(12)
    for server, count in zip(three, (4, 0, 9), strict=True):
        if count:
            give(server, keys[:count])
    with tier_on(client_of(*three), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 9
        assert load(tier, keys[:9]) == [None] * 9
        assert load(tier, keys[9:], seconds=60) == [Reason.ABSENT] * 3
        assert tier.match_prefix(fresh_keys(3), namespace=ROOT) == 0


def give_some(
    server: Server, keys: Sequence[bytes], positions: Sequence[int]
) -> None:
    """Store some chunks of a chain on one machine."""
    chunks = chunks_of(keys, SMALL)
    with tier_on(PagodaServerClient(url_of(server)), **PATIENT) as tier:
        some = [chunks[at] for at in positions]
        for done in ends(tier.store(some, ROOT)):
            assert done.ok
        # each store of a server is found by then
        assert all(tier.match_each([chunk.key for chunk in some], namespace=ROOT))


def test_chunks_behind_a_hole_come_from_whoever_has_them(
    three: list[Server],
) -> None:
    keys = fresh_keys(12)
    give_some(three[0], keys, [1, 2, 9])
    give_some(three[1], keys, [2, 5])
    here = [at in (1, 2, 5, 9) for at in range(12)]
    for servers in (three, three[:2]):
        with tier_on(client_of(*servers), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert tier.match_each(keys, namespace=ROOT) == here
            for at, count in ((1, 2), (5, 1), (9, 1)):
                buffers = [aligned(SMALL.slot_bytes) for _ in range(count)]
                some = keys[at : at + count]
                done = tier.load(some, buffers, start=at, namespace=ROOT)
                for end in ends(done):
                    assert end.ok


def test_a_server_of_an_earlier_version_knows_leading_keys_only(
    evil: LyingHttp,
) -> None:
    evil.lies["POST"] = lambda _: [http(200, b'{"found": 2}')]
    client = client_of(f"http://127.0.0.1:{evil.port}")
    keys = fresh_keys(4)
    with tier_on(client, **PATIENT) as tier:
        here = tier.match_each(keys, namespace=ROOT)
        assert here == [True, True, False, False]
    assert sum(method == "POST" for method, _ in evil.requests) == 1


@pytest.mark.parametrize(
    "each", [b'"11"', b'"1120"', b"[1, 1, 1, 1]", b"15", b'"\\u0661111"']
)
def test_senseless_answers_for_each_key_find_nothing(
    evil: LyingHttp, each: bytes
) -> None:
    body = b'{"found": 4, "each": ' + each + b"}"
    evil.lies["POST"] = lambda _: [http(200, body)]
    client = client_of(f"http://127.0.0.1:{evil.port}")
    with tier_on(client, **PATIENT) as tier:
        assert tier.match_each(fresh_keys(4), namespace=ROOT) == [False] * 4
        assert tier.stats()["miss_io_error"] > 0


def test_a_chunk_is_loaded_without_a_look_up(three: list[Server]) -> None:
    keys = fresh_keys(3)
    give(three[1], keys)
    with tier_on(client_of(*three), **PATIENT) as tier:
        assert load(tier, keys) == [None] * 3


def test_another_neighbour_helps_when_one_has_lost_a_chunk(
    three: list[Server],
) -> None:
    keys = fresh_keys(6)
    for server in three[:2]:
        give(server, keys)
    with tier_on(client_of(*three), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 6
        losing = (
            PagodaServerClient(url_of(three[0]))
            .connection()
            .open(time.monotonic() + 30)
        )
        assert losing.remove(ROOT, keys, time.monotonic() + 30) == 6
        losing.close()
        assert load(tier, keys) == [None] * 6


def test_a_neighbour_that_evicts_a_prompt_before_its_load_is_no_liar(
    three: list[Server],
) -> None:
    evicted = fresh_keys(20)
    kept = fresh_keys(3)
    give(three[0], evicted)
    give(three[0], kept)
    with tier_on(client_of(three[0]), **PATIENT) as tier:
        assert tier.match_prefix(evicted, namespace=ROOT) == 20
        losing = (
            PagodaServerClient(url_of(three[0]))
            .connection()
            .open(time.monotonic() + 30)
        )
        assert losing.remove(ROOT, evicted, time.monotonic() + 30) == 20
        losing.close()
        assert load(tier, evicted) == [Reason.ABSENT] * 20
        assert tier.match_prefix(kept, namespace=ROOT) == 3
        assert load(tier, kept) == [None] * 3


def test_nothing_is_written_to_a_neighbour(three: list[Server]) -> None:
    keys = fresh_keys(2)
    with tier_on(client_of(three[0]), **PATIENT) as tier:
        assert tier.read_only
        refused = [end.reason for end in ends(tier.store(chunks_of(keys), ROOT))]
        assert refused == [Reason.NOT_ADMITTED] * 2
        give(three[0], keys)
        assert tier.remove(keys[0], ROOT) is False
        assert tier.clear() == 0
        assert tier.stats()["stored_chunks"] == 0
    with tier_on(client_of(three[0]), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 2


def test_a_name_stands_for_all_its_addresses(three: list[Server]) -> None:
    keys = fresh_keys(3)
    give(three[0], keys)
    url = url_of(three[0]).replace("127.0.0.1", "localhost")
    client = PeersClient([PeerUrl(url, True)], look_seconds=30.0)
    with tier_on(client, **PATIENT) as tier:
        wait_until(
            lambda: (
                bool(client.peers())
                or tier.match_prefix(fresh_keys(1), namespace=ROOT) > 0
            )
        )
        assert f"http://127.0.0.1:{three[0].port}" in [
            peer.client.address for peer in client.peers()
        ]
        wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 3)
        assert load(tier, keys) == [None] * 3


def test_connections_to_neighbours_that_are_gone_are_closed(
    three: list[Server],
) -> None:
    client = client_of(*three, look_seconds=60.0)
    connection = client.connection()
    try:
        assert connection.find(ROOT, fresh_keys(1), time.monotonic() + 30) == 0
        gone = connection._lines[client._peers.pop(url_of(three[0]))]
        assert gone.connection._http._socket is not None
        assert connection.find(ROOT, fresh_keys(1), time.monotonic() + 30) == 0
        assert gone.connection._http._socket is None
        assert gone.peer not in connection._lines
    finally:
        connection.close()


def test_a_name_without_addresses_is_no_neighbour() -> None:
    client = PeersClient([PeerUrl("http://no-such-name.invalid:7777", True)])
    with tier_on(client) as tier, soon():
        assert tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
        assert load(tier, fresh_keys(1)) == [Reason.ABSENT]


def test_a_wrong_token_says_what_to_write(
    three: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = three[0].url.replace("http://", "http://:not-this-machines-token@")
    with tier_on(client_of(wrong)) as tier:
        assert tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
        wait_until(lambda: "?password_file=PATH" in caplog.text)
        assert "not-this-machines" not in caplog.text


@pytest.mark.parametrize("option", ["peers", "remote"])
def test_a_refused_token_is_an_io_error_that_says_so_and_no_deadline(
    three: list[Server], shm_root: Path, option: str
) -> None:
    wrong = three[0].url.replace("http://", "http://:not-this-machines-token@")
    urls = {"peers": [wrong], "remote": [f"{wrong}?server=pagoda&look=30s"]}[
        option
    ]
    tokens = kit.prompt(3, seed=4)
    with kit.cache_at(shm_root, None, **{option: urls}) as cache:
        hit = kit.served(cache, tokens)[0]
        # a busy machine: the answer came after the time of a lookup
        while hit.reason is Reason.DEADLINE:
            hit = kit.served(cache, tokens)[0]
        tier = cache.tiers[-1]
        assert hit.reason in (Reason.IO_ERROR, Reason.TIER_SKIPPED), hit
        assert hit.detail.startswith(tier)
        assert "refused: 401" in hit.detail
        assert "?password_file=PATH" in hit.detail
        skipped = cache.lookup(tokens)
        if skipped.reason is Reason.TIER_SKIPPED:
            assert "failed repeatedly" in skipped.detail
            assert "refused: 401" in skipped.detail
        assert "not-this-machines" not in hit.detail + skipped.detail


def test_a_refusal_is_not_called_a_late_answer(three: list[Server]) -> None:
    wrong = three[0].url.replace("http://", "http://:not-this-machines-token@")
    with tier_on(client_of(wrong), **PATIENT) as tier:
        assert tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
        found = unanswered(tier)
        assert found.reason is Reason.IO_ERROR
        assert "refused: 401" in found.detail


@pytest.mark.parametrize("status", [503, 404])
def test_a_peer_that_answers_an_error_is_reported_as_an_error(
    evil: LyingHttp, status: int
) -> None:
    evil.lies["POST"] = lambda _: [http(status, b"")]
    with tier_on(client_of(f"http://127.0.0.1:{evil.port}"), **PATIENT) as tier:
        assert tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
        assert tier.refusal is not None
        assert tier.refusal[0] is Reason.IO_ERROR
        assert "the server answered" in tier.refusal[1]


def test_a_machine_may_be_called_by_any_name(three: list[Server]) -> None:
    """A page of another name (DNS rebinding) may not call it, and does not know the token."""
    client = HTTPConnection("127.0.0.1", three[0].port, timeout=30)
    target = f"/v1/{ROOT.hex()}/{ROOT.hex()}"
    token = (three[0].root / "token").read_text()
    for header, status in (
        ({"Authorization": f"Bearer {token}"}, 404),
        ({}, 421),
        ({"Authorization": "Bearer x"}, 421),
    ):
        client.request("GET", target, headers={"Host": "node-7:7777", **header})
        answer = client.getresponse()
        answer.read()
        assert answer.status == status
    client.close()


# ---- neighbours that fail


@pytest.mark.slow
def test_a_dead_neighbour_is_left_out_and_used_again(three: list[Server]) -> None:
    with machine() as dying:
        keys = fresh_keys(5)
        give(three[0], keys[:3])
        give(dying, keys)
        with tier_on(client_of(three[0], dying), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 5
            dying.kill()
            outcome = load(tier, keys, seconds=60)
            assert outcome[:3] == [None] * 3
            assert None not in outcome[3:]
            for _ in range(3):
                with soon(1.0):
                    assert (
                        tier.match_prefix(
                            [*keys[:3], *fresh_keys(1)], namespace=ROOT
                        )
                        == 3
                    )
            dying.restart()  # the store outlives its server
            wait_until(
                lambda: (
                    tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT)
                    == 5
                )
            )
            assert load(tier, keys) == [None] * 5


def test_all_neighbours_dead_is_a_tier_that_rests() -> None:
    with tier_on(
        client_of(
            f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        )
    ) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(fresh_keys(1), namespace=ROOT) == 0
                and tier.resting
            )
        )
        assert load(tier, fresh_keys(1)) == [Reason.TIER_SKIPPED]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_neighbour_that_ends_during_a_load_is_a_miss_in_time(
    three: list[Server], how: str
) -> None:
    """The reads are under way when it ends: what the other one lacks is a miss, and nothing is late
    or wrong.
    """
    with machine("256MiB") as ending:
        keys = fresh_keys(24)
        give(ending, keys, layout=LARGE)
        give(three[1], keys[:4], layout=LARGE)
        with tier_on(
            client_of(ending, three[1]),
            LARGE,
            deadline_seconds=1.0,
            look_seconds=5.0,
        ) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 24
            outcome: list[Reason | None] = []
            thread = threading.Thread(
                target=lambda: outcome.extend(
                    load(tier, keys, LARGE, seconds=4 * LATE_SECONDS)
                )
            )
            thread.start()
            wait_until(lambda: tier.stats()["loaded_chunks"] >= 2)
            ending.kill() if how == "kill" else ending.stop()
            thread.join(5 * LATE_SECONDS)
            assert not thread.is_alive()
            assert len(outcome) == 24
            assert set(outcome[4:]) <= {
                None,
                Reason.IO_ERROR,
                Reason.DEADLINE,
                Reason.TIER_SKIPPED,
                Reason.ABSENT,
            }
            assert tier.stats()["failed_checks"] == 0
            wait_until(
                lambda: (
                    load(tier, keys[:4], LARGE, seconds=2 * LATE_SECONDS)
                    == [None] * 4
                )
            )


@pytest.mark.slow
def test_a_slow_neighbour_never_delays_a_look_up_beyond_its_time(
    three: list[Server],
) -> None:
    with machine() as slow:
        keys = fresh_keys(4)
        give(three[0], keys)
        with tier_on(
            client_of(three[0], slow, look_seconds=0.2), look_seconds=0.2
        ) as tier:
            tier.match_prefix(keys, namespace=ROOT)  # connections are made
            slow.stop()
            patience = Patience(5 * (0.2 + 0.3))
            for _ in range(5):
                asked = [*keys, *fresh_keys(1)]
                assert tier.match_prefix(asked, namespace=ROOT) in (0, 4)
            assert not patience.ended, patience.said()
            wait_until(
                lambda: (
                    tier.match_prefix([*keys, *fresh_keys(1)], namespace=ROOT)
                    == 4
                )
            )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_ends_or_stops_during_a_load_costs_its_neighbour_nothing(
    number: int, shm_root: Path
) -> None:
    first = shm_root / "first"
    with (
        serve_kit.engine(
            "LARGE", host_path=str(first), host_size=80 << 20
        ) as producer,
        serve_kit.server(first) as served,
        proxy_to(served.address[1]) as proxy,
    ):
        producer.store(1, 8)
        url = f"http://:{serve_kit.TOKEN}@127.0.0.1:{proxy.port}"
        there = {
            "host_path": str(shm_root / "second"),
            "host_size": 256 << 20,
            "peers": [url],
            "worth_it": False,
            "deadline_seconds": 60.0,
        }
        with serve_kit.engine("LARGE", **there) as reader:
            proxy.down = Fault(bytes_per_second=40e6)
            wait_until(
                lambda: reader.command("lookup", 1, 8) == f"{8 * serve_kit.CHUNK}"
            )
            reader.begin("retrieve", 1, 8)

            def is_loading() -> bool:
                # on a busy machine its look-up may be late: then it finds nothing
                if reader.has_answered and proxy.down_bytes <= 6 << 20:
                    reader.answer()
                    reader.begin("retrieve", 1, 8)
                return proxy.down_bytes > 6 << 20

            wait_until(is_loading)
            reader.process.send_signal(number)
            for chain in range(2, 5):  # more than there is room for
                producer.store(chain, 8)
            assert (
                served.get(
                    producer.root, serve_kit.keys_of(producer.root, 4, 8)[0]
                ).status
                == 200
            )
            proxy.heal()
            if number == signal.SIGSTOP:
                reader.process.send_signal(signal.SIGCONT)
                assert reader.answer().endswith(" True")
                whole = f"{8 * serve_kit.CHUNK} True"
                wait_until(lambda: reader.command("retrieve", 4, 8) == whole)
        assert (
            served.get(
                producer.root, serve_kit.keys_of(producer.root, 4, 8)[0]
            ).status
            == 200
        )


@pytest.mark.slow
def test_the_late_answer_of_a_neighbour_far_away_serves_the_next_look_up(
    three: list[Server],
) -> None:
    keys = fresh_keys(3)
    give(three[0], keys)
    with proxy_to(three[0].port) as proxy:
        proxy.both(Fault(delay_seconds=0.1))
        url = url_of(three[0]).replace(str(three[0].port), str(proxy.port))
        with tier_on(
            client_of(url, look_seconds=0.05),
            look_seconds=0.05,
            deadline_seconds=30.0,
            clock=Clock(),
        ) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            wait_until(lambda: tier.match_prefix(keys, namespace=ROOT) == 3)
            assert load(tier, keys, seconds=30.0) == [None] * 3


# ---- neighbours that lie

FOUND = b'{"found": 3}'
LIES: dict[str, dict[str, Callable[[str], Lie | None]]] = {
    "other bytes": {"GET": lambda _: [http(200, NOISE[: HEADER_BYTES + 10_000])]},
    "too few": {"GET": lambda _: [http(200, NOISE[:5000])]},
    "not even a header": {"GET": lambda _: [http(200, NOISE[:100])]},
    "nothing": {"GET": lambda _: [http(200)]},
    "endless": {"GET": lambda _: endless(http(200, b"", 1 << 40), blocks=64)},
    "a drip": {
        "GET": lambda _: dripping(http(200, NOISE[: HEADER_BYTES + 10_000]))
    },
    "silence": {"GET": lambda _: SILENCE},
    "garbage": {"GET": lambda _: [NOISE]},
    "absent": {"GET": lambda _: [http(404)]},
    "later": {"GET": lambda _: [http(503)]},
    "more than was asked": {"POST": lambda _: [http(200, b'{"found": 4000}')]},
    "less than none": {"POST": lambda _: [http(200, b'{"found": -1}')]},
    "no number": {"POST": lambda _: [http(200, b'{"found": true}')]},
    "no json": {"POST": lambda _: [http(200, NOISE[:1000])]},
    "json without end": {
        "POST": lambda _: endless(
            http(200, b"", 1 << 40), b"[" * (1 << 20), blocks=64
        )
    },
    "find drips": {"POST": lambda _: dripping(http(200, FOUND))},
    "find is silent": {"POST": lambda _: SILENCE},
    "find moved": {
        "POST": lambda _: [http(302, more={"Location": "http://127.0.0.1:1/"})]
    },
}


@pytest.fixture
def evil() -> Iterator[LyingHttp]:
    """A neighbour that says it has everything."""
    server = LyingHttp()
    server.lies["POST"] = lambda _: [http(200, FOUND)]
    server.lies["HEAD"] = lambda _: [http(404, length=0)]
    yield server
    server.close()


@pytest.mark.parametrize("lie", LIES)
def test_an_evil_neighbour_causes_only_misses(evil: LyingHttp, lie: str) -> None:
    evil.lies |= LIES[lie]
    keys = fresh_keys(3)
    with (
        tier_on(
            client_of(f"http://127.0.0.1:{evil.port}"), deadline_seconds=0.3
        ) as tier,
        soon(2.5),
    ):
        assert tier.match_prefix(keys, namespace=ROOT) <= 3
        assert None not in load(tier, keys)
        stats = tier.stats()
        assert stats["loaded_chunks"] == 0
        assert sum(stats[name] for name in stats if name.startswith("miss_"))


@pytest.mark.parametrize(
    "lie", ["other bytes", "too few", "absent", "garbage", "find is silent"]
)
def test_an_honest_neighbour_serves_beside_an_evil_one(
    three: list[Server], evil: LyingHttp, lie: str
) -> None:
    evil.lies |= LIES[lie]
    keys = fresh_keys(3)
    give(three[0], keys)
    client = client_of(f"http://127.0.0.1:{evil.port}", three[0])
    with tier_on(client) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(keys, namespace=ROOT) == 3
                and load(tier, keys) == [None] * 3
            )
        )


def test_a_neighbour_that_lies_again_and_again_is_not_asked_for_a_while(
    evil: LyingHttp,
) -> None:
    evil.lies["GET"] = lambda _: [http(200, NOISE[: HEADER_BYTES + 10_000])]
    client = client_of(f"http://127.0.0.1:{evil.port}")
    with tier_on(client) as tier:
        for _ in range(12):
            assert None not in load(tier, fresh_keys(3))
        assert client.peers()[0].trust.resting
        asked = len(evil.requests)
        assert load(tier, fresh_keys(3)) == [Reason.TIER_SKIPPED] * 3
        assert len(evil.requests) == asked


def test_a_neighbour_whose_answers_nobody_understands_is_left_out(
    evil: LyingHttp,
) -> None:
    evil.lies["POST"] = lambda _: [http(200, b"[" * 60_000)]  # nested too deeply
    client = client_of(f"http://127.0.0.1:{evil.port}")
    with tier_on(client) as tier:
        wait_until(
            lambda: (
                tier.match_prefix(fresh_keys(3), namespace=ROOT) == 0
                and not client.known()[0].is_used
            )
        )


def test_a_neighbour_that_never_has_what_it_says_it_has_is_not_asked_for_a_while(
    evil: LyingHttp,
) -> None:
    evil.lies["GET"] = lambda _: [http(404)]
    client = client_of(f"http://127.0.0.1:{evil.port}")
    with tier_on(client) as tier:
        for _ in range(12):
            keys = fresh_keys(3)
            tier.match_prefix(keys, namespace=ROOT)
            assert None not in load(tier, keys)
        assert client.peers()[0].trust.resting


# ---- whole machines


@contextlib.contextmanager
def serving(host: Path) -> Iterator[Server]:
    """The server beside the engines of one machine."""
    with pagoda_server(host) as server:
        yield server


@pytest.mark.slow
def test_what_one_machine_computed_another_serves(
    tmp_path: Path, shm_root: Path
) -> None:
    first = shm_root / "first"
    second = shm_root / "second"
    with kit.cache_at(first, None) as cache:
        kit.stored(cache, kit.prompt(10))
    with serving(first / "host") as server:
        token = f"{server.url}?password_file={server.root}/token"
        with kit.cache_at(second, tmp_path, peers=[token]) as cache:
            assert cache.tiers == ("host", "disk", "peers")
            wait_until(
                lambda: cache.lookup(kit.prompt(10)).by_tier.get("peers") == 160
            )
            assert kit.served(cache, kit.prompt(10))[0].by_tier == {"peers": 160}
            assert kit.served(cache, kit.prompt(10))[0].by_tier == {"host": 160}
            # in the tiers of this machine, and nowhere else
            kit.stored(cache, kit.prompt(10, seed=1))
            assert kit.served(cache, kit.prompt(10), tiers=["disk"])[
                0
            ].by_tier == {"disk": 160}
            counters = cache.stats()
            assert not [
                name
                for name in counters
                if name.startswith("drop_") and counters[name]
            ]
            assert cache.stats()["waiting_chunks"] == 0
        with kit.cache_at(first, None) as cache:
            assert cache.lookup(kit.prompt(10, seed=1)).num_tokens == 0
            assert cache.lookup(kit.prompt(10)).num_tokens == 160


def test_nothing_is_queued_for_neighbours(shm_root: Path) -> None:
    with kit.cache_at(
        shm_root, None, peers=[f"http://127.0.0.1:{free_port()}"]
    ) as cache:
        kit.stored(cache, kit.prompt(10))
        kit.served(cache, kit.prompt(10))
        assert cache._resources.writeback == ()
        assert cache.flush(10)
        assert cache.stats()["drops"] == {}


def _reads_prompts(root: Path, peers: list[str], work: Connection) -> None:
    """Read each prompt that is asked for and compare all bytes; answer how many chunks, and how
    many from peers.
    """
    with kit.cache_at(
        root, None, host_size=1000 * kit.LAYOUT.slot_bytes, peers=peers
    ) as cache:
        while True:
            hit, _ = kit.served(cache, kit.prompt(PROMPT_CHUNKS, work.recv()))
            work.send(
                [
                    tokens // kit.CHUNK
                    for tokens in (hit.num_tokens, hit.by_tier.get("peers", 0))
                ]
            )


PROMPT_CHUNKS = 250


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_100_000_chunks_byte_by_byte_whatever_is_killed(shm_root: Path) -> None:
    """Both stores take four prompts: chunks are evicted on both machines, also those that are being
    sent.
    """
    rng = random.Random()
    done = threading.Event()
    counts = Counter[str]()
    seed = 5
    found = PROMPT_CHUNKS
    slots = 1000 * kit.LAYOUT.slot_bytes
    with (
        kit.cache_at(shm_root / "first", None, host_size=slots) as source,
        serving(shm_root / "first" / "host") as server,
    ):

        def restarts() -> None:
            while not done.wait(rng.uniform(2.0, 8.0)):
                server.restart()
                counts["servers killed"] += 1

        def reader() -> tuple[SpawnProcess, Connection]:
            ours, theirs = kit.SPAWN.Pipe()
            peers = [f"{server.url}?password_file={server.root}/token"]
            process = kit.SPAWN.Process(
                target=_reads_prompts, args=(shm_root / "second", peers, theirs)
            )
            process.start()
            theirs.close()
            return process, ours

        kit.stored(source, kit.prompt(PROMPT_CHUNKS, seed))
        thread = threading.Thread(target=restarts)
        thread.start()
        process, work = reader()
        try:
            while counts["chunks"] < 100_000:
                # the oldest of these is evicted, or is about to be
                work.send(seed - rng.randrange(5))
                counts["prompts"] += 1
                for _ in range(rng.randrange(3) if found == PROMPT_CHUNKS else 0):
                    seed += 1
                    kit.stored(source, kit.prompt(PROMPT_CHUNKS, seed))
                if rng.random() < 0.03:
                    process.kill()
                    process.join()
                    process, work = reader()
                    counts["readers killed"] += 1
                    continue
                assert work.poll(120), "a reader hangs"
                # EOFError: it found wrong bytes, and ended
                found, loaded = work.recv()
                counts["chunks"] += loaded
                counts["whole prompts"] += loaded == PROMPT_CHUNKS
        finally:
            done.set()
            thread.join()
            process.kill()
    print(dict(counts))
    assert counts["servers killed"] > 3
    assert counts["readers killed"] > 1


@pytest.mark.slow
def test_2000_chunks_byte_by_byte(shm_root: Path) -> None:
    """The first machine has the first third, the second all."""
    tokens = kit.prompt(2000)
    slots = 2100 * kit.LAYOUT.slot_bytes
    with contextlib.ExitStack() as stack:
        peers = []
        for name, chunks in ("first", 700), ("second", 2000):
            with kit.cache_at(shm_root / name, None, host_size=slots) as cache:
                kit.stored(cache, tokens[: chunks * kit.CHUNK])
            server = stack.enter_context(serving(shm_root / name / "host"))
            peers.append(f"{server.url}?password_file={server.root}/token")
        cache = stack.enter_context(
            kit.cache_at(shm_root / "third", None, host_size=slots, peers=peers)
        )
        wait_until(
            lambda: kit.served(cache, tokens)[0].by_tier == {"host": len(tokens)}
        )
        assert cache.stats()["tiers"]["peers"]["loaded_chunks"] >= 2000


@pytest.mark.slow
def test_slow_neighbours_are_not_loaded_from_when_computing_is_faster(
    shm_root: Path,
) -> None:
    first = shm_root / "first"
    second = shm_root / "second"
    with kit.cache_at(first, None) as cache:
        for seed in range(5):
            kit.stored(cache, kit.prompt(4, seed))
    with serving(first / "host") as server:
        token = f"{server.url}?password_file={server.root}/token"
        with kit.cache_at(second, None, peers=[token], worth_it=True) as cache:
            # an engine that computes faster than any network
            cache.observe_prefill(10**9, 0.001)
            hits = []
            for seed in range(5):
                wait_until(
                    lambda seed=seed: (
                        cache.lookup(kit.prompt(4, seed)).by_tier.get("peers")
                        or len(hits) > 2
                    )
                )  # type: ignore[misc]
                hits.append(
                    cache.retrieve(
                        kit.prompt(4, seed),
                        kit.blank(kit.prompt(4, seed)).transfer,
                    )
                )
            assert hits[-1].reason is Reason.NOT_WORTH_IT
            assert "peers" in (hits[-1].detail or "")


def test_a_server_is_an_ordinary_remote_tier(
    three: list[Server], shm_root: Path
) -> None:
    url = f"{three[0].url}?server=pagoda&password_file={three[0].root}/token&deadline=30s&look=30s"
    tokens = kit.prompt(6, seed=99)
    with kit.cache_at(shm_root / "first", None, remote=[url]) as cache:
        assert cache.tiers == ("host", "pagoda")
        kit.stored(cache, tokens)
    with kit.cache_at(shm_root / "second", None, remote=[url]) as cache:
        assert kit.served(cache, tokens)[0].by_tier == {"pagoda": 96}


def test_a_forked_child_makes_its_own_connections(three: list[Server]) -> None:
    keys = fresh_keys(3)
    give(three[0], keys)
    with tier_on(client_of(*three), **PATIENT) as tier:
        assert load(tier, keys) == [None] * 3
        child = multiprocessing.get_context("fork").Process(
            target=_loads_in_child, args=(tier, keys)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert load(tier, keys) == [None] * 3


# ---- prefill on one machine, decoding on another


def test_a_look_up_finds_what_was_stored_a_moment_ago(
    three: list[Server],
) -> None:
    """Even if one a moment before found less."""
    keys = fresh_keys(6)
    clock = FakeClock()
    with tier_on(client_of(three[0]), clock=clock, **PATIENT) as tier:
        for stored in (2, 4, 6):
            give(three[0], keys[:stored])
            clock.advance(0.15)
            assert tier.match_prefix(keys, namespace=ROOT) == stored
            assert load(tier, keys[:stored]) == [None] * stored


@pytest.mark.slow
@pytest.mark.parametrize("word", ["grow", "store"])
def test_a_decoder_loads_what_is_stored_while_the_producer_stores_the_tail(
    word: str, shm_root: Path
) -> None:
    """Chunk by chunk or as one; it is stopped again and again: in a copy, in a commit, holding the
    ledger.
    """
    layout = serve_kit.LARGE
    chunks = 8
    runs = [0]
    rng = random.Random(word)
    first = shm_root / "producer"
    tokens = serve_kit.tokens_of(1, chunks)
    wanted = serve_kit.kv_of(1, chunks, layout)
    blank = serve_kit.kv_of(2, chunks, layout)
    with (
        serve_kit.engine(
            "LARGE", host_path=str(first), host_size=64 << 20
        ) as producer,
        serve_kit.server(first) as served,
    ):
        url = served.url.replace("http://", f"http://:{serve_kit.TOKEN}@")
        options = {
            "host_path": str(shm_root / "decoder"),
            "host_size": 64 << 20,
            "peers": [url],
        }
        with Cache(
            namespace=serve_kit.NAMESPACE,
            layout=layout,
            chunk_tokens=serve_kit.CHUNK,
            worth_it=False,
            **options,
        ) as decoder:
            producer.begin(word, 1, chunks)
            patience = Patience(60.0)
            while runs[-1] < chunks:
                assert not patience.ended, runs
                time.sleep(rng.uniform(0.0, 0.02))
                producer.process.send_signal(signal.SIGSTOP)
                try:
                    hit = decoder.retrieve(tokens, DenseKV(blank, layout))
                finally:
                    producer.process.send_signal(signal.SIGCONT)
                runs.append(hit.num_tokens // serve_kit.CHUNK)
                for ours, theirs in zip(
                    itertools.chain(*blank), itertools.chain(*wanted), strict=True
                ):
                    assert (
                        ours[:, : hit.num_tokens].tobytes()
                        == theirs[:, : hit.num_tokens].tobytes()
                    )
            assert producer.answer() == "done"
    assert runs == sorted(runs)
    assert word == "store" or len(set(runs)) > 3, runs


def _loads_in_child(tier: object, keys: list[bytes]) -> None:
    assert tier.match_prefix(keys, namespace=ROOT) == 3  # type: ignore[attr-defined]
    assert load(tier, keys) == [None] * 3  # type: ignore[arg-type]
