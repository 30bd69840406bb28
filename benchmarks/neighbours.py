"""The speed of neighbours (`peers`) on loopback: `python benchmarks/neighbours.py [--json]
[--quick] [--only get,...]`.

Gets of 8 MiB chunks from a real `pagoda serve` against a bare socket to a second process, in turns;
a look-up of 512 keys on four neighbours; what a dead or a stopped neighbour costs; what it costs to
prove that the token is known, against sending it. The servers share the cores with us.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from ground import NAMESPACE, Plan, keys_of, main
from harness import MIB, Figure, race, ratio_figure, ratios, seconds_figure
from limits import pieces
from limits_wire import SocketPair, cpu_seconds

from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.tiers import Chunk
from pagoda.tiers.remote.open_client import url_with_password
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.peers import PeersClient, PeerUrl
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import GetRequest

# testbed.servers starts the servers
sys.path.insert(0, str(Path(__file__).parents[1]))
from testbed.servers import Server, pagoda_server

PATIENCE_SECONDS = 60.0
# by default 50 ms: here a busy machine must not change the answer
LOOK_SECONDS = 5.0
CHUNK_BYTES = 8 * MIB
SMALL_BYTES = 16 << 10
KEYS = 512


@contextmanager
def machine(plan: Plan, size: str) -> Iterator[Server]:
    """Another machine, whose host tier is made for what is put there."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-bench-", dir=plan.shm))
    try:
        with pagoda_server(
            root, "--host-size", size, PAGODA_POLICY="lru"
        ) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


def url_of(server: Server) -> str:
    """Return the URL of a machine's server, with its token."""
    return url_with_password(server.url, str(server.root / "token"))


def client_of(servers: Sequence[Server]) -> PeersClient:
    """Return the neighbours as one store."""
    return PeersClient(
        [PeerUrl(url_of(server), False) for server in servers],
        look_seconds=LOOK_SECONDS,
    )


def tier_of(
    client: PeersClient | PagodaServerClient, chunk_bytes: int, **options: float
) -> RemoteTier:
    """Return a tier over a client."""
    layout = KVLayout.opaque(256, chunk_bytes, "benchmark")
    tier = RemoteTier(
        layout,
        client,
        deadline_seconds=PATIENCE_SECONDS,
        queue_chunks=4096,
        **options,
    )  # type: ignore[arg-type]
    tier.register(NAMESPACE)
    return tier


def give(server: Server, keys: Sequence[bytes], chunk_bytes: int) -> None:
    """Store a chain on one machine."""
    sources = pieces(chunk_bytes, 4, 1)
    with closing(
        tier_of(PagodaServerClient(url_of(server)), chunk_bytes)
    ) as tier:
        chunks = [
            Chunk(key, n, 256, sources[n % 4], None, lambda: True)
            for n, key in enumerate(keys)
        ]
        for future in tier.store(chunks, NAMESPACE.root):
            if not (done := future.result(PATIENCE_SECONDS)).ok:
                raise RuntimeError(f"a chunk was not stored: {done.reason}")


def get_figures(plan: Plan) -> list[Figure]:
    """Race gets of 8 MiB chunks: one connection, and the whole tier with its verification, against
    a bare socket.
    """
    count = 4 if plan.quick else 16
    keys = keys_of("neighbours", count)
    slots = pieces(CHUNK_BYTES, 4, 2)
    sources = pieces(CHUNK_BYTES, 4, 1)
    page = np.zeros(HEADER_BYTES, np.uint8)
    with ExitStack() as stack:
        servers = [stack.enter_context(machine(plan, "256MiB")) for _ in range(1)]
        give(servers[0], keys, CHUNK_BYTES)
        pair = stack.enter_context(SocketPair())
        connection = stack.enter_context(closing(client_of(servers).connection()))
        tier = stack.enter_context(
            closing(tier_of(client_of(servers), CHUNK_BYTES))
        )

        def peer(_: int) -> None:
            for n, key in enumerate(keys):
                until = time.monotonic() + PATIENCE_SECONDS
                slot = slots[n % 4]
                if (
                    connection.get(
                        GetRequest(
                            NAMESPACE.root, key, page, lambda slot=slot: slot
                        ),
                        until,
                    )
                    != CHUNK_BYTES
                ):  # type: ignore[misc]
                    raise RuntimeError("a chunk was not found")

        def socket(_: int) -> None:
            for n in range(count):
                pair.get(slots[n % 4])

        def whole_tier(_: int) -> None:
            for begin in range(0, count, 4):
                for future in tier.load(
                    keys[begin : begin + 4],
                    slots,
                    start=begin,
                    namespace=NAMESPACE.root,
                ):
                    if not (done := future.result(PATIENCE_SECONDS)).ok:
                        raise RuntimeError(
                            f"a chunk was not loaded: {done.reason}"
                        )

        whole_tier(0)
        if not all(
            np.array_equal(slot, source)
            for slot, source in zip(slots, sources, strict=True)
        ):
            raise RuntimeError("the returned bytes are wrong")
        runs = race(
            {"peer": peer, "socket": socket, "tier": whole_tier}, 2 * plan.rounds
        )
    nbytes = count * CHUNK_BYTES
    one = ratio_figure(
        "peer_get_8mib_vs_socket",
        0.8,
        runs,
        size_bytes=nbytes,
        threads="1 connection each",
        candidate="peer",
        limit="socket",
    )
    all_ = ratio_figure(
        "peers_tier_load_8mib_vs_socket",
        0.0,
        runs,
        size_bytes=nbytes,
        threads="4 connections, verified",
        candidate="tier",
        limit="socket",
    )
    return [
        one,
        Figure(all_.key, all_.value, None, all_.unit, all_.runs, all_.note),
    ]


def proof_figures(plan: Plan) -> list[Figure]:
    """Get small chunks, and ask on new connections: with proofs, against sending the token.
    Processor time of both.
    """
    gets = 20
    asks = 5
    turns = (2 if plan.quick else 20) * plan.rounds
    keys = keys_of("neighbours", 16)
    page = np.zeros(HEADER_BYTES, np.uint8)
    slot = pieces(SMALL_BYTES, 1, 2)[0]
    with ExitStack() as stack:
        server = stack.enter_context(machine(plan, "32MiB"))
        give(server, keys, SMALL_BYTES)
        spent: dict[str, list[float]] = {}

        def used() -> float:
            return time.process_time() + cpu_seconds(server.pid)

        def get_all(client: PagodaServerClient) -> float:
            with closing(client.connection()) as connection:
                connection.open(time.monotonic() + PATIENCE_SECONDS)
                began = used()
                for n in range(gets):
                    until = time.monotonic() + PATIENCE_SECONDS
                    request = GetRequest(
                        NAMESPACE.root, keys[n % 16], page, lambda: slot
                    )
                    if connection.get(request, until) != SMALL_BYTES:
                        raise RuntimeError("a chunk was not found")
                return (used() - began) / gets

        def ask_anew(client: PagodaServerClient) -> float:
            began = time.perf_counter()
            for _ in range(asks):
                with closing(client.connection()) as connection:
                    connection.open(time.monotonic() + PATIENCE_SECONDS)
            return (time.perf_counter() - began) / asks

        clients = {
            "proof": PagodaServerClient(url_of(server)),
            "token": PagodaServerClient(url_of(server), sends_token=True),
        }
        for turn in range(turns + 1):
            for name in sorted(clients, reverse=bool(turn % 2)):
                for what, measure in (("get", get_all), ("new", ask_anew)):
                    seconds = measure(clients[name])
                    if turn:  # the first is to warm up
                        spent.setdefault(f"{what} {name}", []).append(seconds)
    figures = []
    for what, key in (
        ("get", "proof_vs_token_get_16kib"),
        ("new", "proof_vs_token_new_connection"),
    ):
        ours = spent[f"{what} proof"]
        theirs = spent[f"{what} token"]
        times = ratios(ours, theirs)
        kind = (
            "processor time of a get, both sides"
            if what == "get"
            else "a new connection that is ready"
        )
        values = (
            f"{statistics.median(ours) * 1e6:.0f} against "
            f"{statistics.median(theirs) * 1e6:.0f} us"
        )
        runs = {"times": [round(each, 4) for each in times]}
        figures.append(
            Figure(
                key,
                statistics.median(times),
                None,
                "times",
                runs,
                f"{kind}: {values}",
            )
        )
    return figures


def look_figures(plan: Plan) -> list[Figure]:
    """Look up 512 keys that the last of four neighbours has, through the whole tier; and through
    one connection.
    """
    keys = keys_of("neighbours", KEYS)
    with ExitStack() as stack:
        servers = [stack.enter_context(machine(plan, "32MiB")) for _ in range(4)]
        for n, server in enumerate(servers, 1):
            give(server, keys[: KEYS * n // 4], SMALL_BYTES)
        tier = stack.enter_context(
            closing(
                tier_of(
                    client_of(servers), SMALL_BYTES, look_seconds=LOOK_SECONDS
                )
            )
        )
        connection = stack.enter_context(closing(client_of(servers).connection()))
        looks = {
            "tier": _look_up(tier, keys, KEYS),
            "connection": _ask(connection.find, keys),
        }
        runs = race(looks, 3 * plan.rounds, steps=10)
    each = {
        name: [spent / 10 for spent in seconds] for name, seconds in runs.items()
    }
    note = (
        f"{KEYS} keys, 4 neighbours; one connection alone "
        f"{statistics.median(each['connection']) * 1e3:.2f} ms"
    )
    return [
        seconds_figure(
            "look_up_512_keys_4_peers",
            5e-3,
            each["tier"],
            note,
            connection=each["connection"],
        )
    ]


def _look_up(
    tier: RemoteTier, keys: Sequence[bytes], wanted: int
) -> Callable[[int], None]:
    def step(_: int) -> None:
        tier._store.presence.clear()  # a look-up of what is known asks nobody
        if (found := tier.match_prefix(keys, namespace=NAMESPACE.root)) != wanted:
            raise RuntimeError(f"{found} keys were found instead of {wanted}")

    return step


def _ask(
    find: Callable[[bytes, Sequence[bytes], float], int], keys: Sequence[bytes]
) -> Callable[[int], None]:
    def step(_: int) -> None:
        if find(NAMESPACE.root, keys, time.monotonic() + PATIENCE_SECONDS) != len(
            keys
        ):
            raise RuntimeError("keys were not found")

    return step


def dead_figures(plan: Plan) -> list[Figure]:
    """Look up and load with three neighbours, and with the same three and a fourth that is killed,
    or stopped.
    """
    keys = keys_of("neighbours", 64)
    slots = pieces(MIB, 64, 2)
    with ExitStack() as stack:
        servers = [stack.enter_context(machine(plan, "256MiB")) for _ in range(5)]
        for server in servers:
            give(server, keys, MIB)
        fields = {
            "without": servers[:3],
            "killed": [*servers[:3], servers[3]],
            "stopped": [*servers[:3], servers[4]],
        }
        tiers = {
            name: stack.enter_context(closing(tier_of(client_of(field), MIB)))
            for name, field in fields.items()
        }
        for tier in tiers.values():
            _work(tier, keys, slots)(0)
        servers[3].kill()
        servers[4].stop()
        stack.callback(servers[4].cont)
        began = time.monotonic()
        while time.monotonic() - began < 4.0:  # until both are left out
            for tier in tiers.values():
                _work(tier, keys, slots, must=False)(0)
        runs = race(
            {name: _work(tier, keys, slots) for name, tier in tiers.items()},
            3 * plan.rounds,
            steps=3,
        )
    return [
        _times(f"{how}_peer_vs_none", 1.1, runs["without"], runs[how])
        for how in ("killed", "stopped")
    ]


def _work(
    tier: RemoteTier,
    keys: Sequence[bytes],
    slots: Sequence[np.ndarray],
    must: bool = True,
) -> Callable[[int], None]:
    def step(_: int) -> None:
        tier._store.presence.clear()
        tier.match_prefix(keys, namespace=NAMESPACE.root)
        ended = [
            future.result(PATIENCE_SECONDS)
            for future in tier.load(keys, slots, namespace=NAMESPACE.root)
        ]
        if must and not all(done.ok for done in ended):
            raise RuntimeError(
                f"not loaded: {[done.reason for done in ended if not done.ok][:1]}"
            )

    return step


def _times(
    key: str, target: float, without: Sequence[float], with_it: Sequence[float]
) -> Figure:
    """Return how many times as long it takes, the median of paired rounds."""
    times = ratios(with_it, without)
    ours, theirs = (
        statistics.median(seconds) * 1e3 for seconds in (with_it, without)
    )
    note = f"3 look-ups and 192 MiB: {ours:.0f} against {theirs:.0f} ms"
    return Figure(
        key,
        statistics.median(times),
        target,
        "times",
        {"times": [round(each, 4) for each in times]},
        note,
    )


if __name__ == "__main__":
    figures = {
        "get": get_figures,
        "look": look_figures,
        "dead": dead_figures,
        "proof": proof_figures,
    }
    main(__doc__, figures, {})
