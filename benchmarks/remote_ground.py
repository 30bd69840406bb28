"""Common parts of the benchmarks of remote tiers: entrants that count processor time, turns,
figures, servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from ground import NAMESPACE, Plan, keys_of
from harness import Figure, Runs, Step, race, ratio_figure
from limits import Bytes, pieces
from limits_wire import SocketPair, cpu_seconds

from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.tiers import Chunk
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.socket_keepalive import IDLE_SECONDS
from pagoda.tiers.remote.store_client import (
    GetRequest,
    PutRequest,
    PutResult,
    StoreClient,
    StoreConnection,
)

CONNECTIONS = 4  # of a tier by default
PATIENCE_SECONDS = 60.0
# the number of a chunk, its key, its bytes
Move = Callable[[int, bytes, Bytes], None]
# of the server, of several, or what returns them: processes of ours that start meanwhile count as
# servers
Pids = int | tuple[int, ...] | Callable[[], tuple[int, ...]]
ROOM_TURNS = 4  # capacity of a store that evicts
# of key, candidate, limit, target
Made = Callable[[str, str, str, float | None], Figure]


@dataclass
class Entrant:
    """One side of a race; counts the processor time of this process and of the server during its
    turns.
    """

    step: Step
    pid: Pids
    how: str
    client_seconds: float = field(default=0.0, init=False)
    server_seconds: float = field(default=0.0, init=False)
    calls: int = field(default=0, init=False)

    def __call__(self, number: int) -> None:
        found = self.pid() if callable(self.pid) else self.pid
        pids = (found,) if isinstance(found, int) else found
        client = time.process_time()
        server = sum(map(cpu_seconds, pids))
        self.step(number)
        self.client_seconds += time.process_time() - client
        self.server_seconds += sum(map(cpu_seconds, pids)) - server
        self.calls += 1

    def cpu(self, turn_bytes: int) -> dict[str, float]:
        """Return processor seconds for 10^9 bytes."""
        moved = self.calls * turn_bytes / 1e9
        return {
            "client": round(self.client_seconds / moved, 3),
            "server": round(self.server_seconds / moved, 3),
        }


class Turns:
    """Chunks of one size; a race cycles through their memory, `turn` of them a step.

    Every put has a new key, so that no put finds its chunk already stored.
    """

    def __init__(self, plan: Plan, chunk_bytes: int, turn_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.turn_bytes = max(chunk_bytes, turn_bytes)
        self.turn = self.turn_bytes // chunk_bytes
        self.rounds = plan.rounds
        # the first turn that is read; before it: raced turns, turns that fill
        self.kept = plan.rounds + 1 + ROOM_TURNS
        self.keys = keys_of("remote", self.turn * (self.kept + 2))
        self.sources = pieces(chunk_bytes, 2 * self.turn, 1)
        self.slots = pieces(chunk_bytes, 2 * self.turn, 2)

    def numbers(self, number: int) -> range:
        """Return the chunks of a turn."""
        return range(number * self.turn, (number + 1) * self.turn)

    def source(self, chunk: int) -> Bytes:
        """Return the bytes to put."""
        return self.sources[chunk % len(self.sources)]

    def slot(self, chunk: int) -> Bytes:
        """Return the destination of a get."""
        return self.slots[chunk % len(self.slots)]

    def putting(self, put: Move) -> Step:
        """Return a step that puts one turn, chunk by chunk."""

        def step(number: int) -> None:
            for chunk in self.numbers(number):
                put(chunk, self.keys[chunk], self.source(chunk))

        return step

    def getting(self, get: Move) -> Step:
        """Return a step that gets one of the two kept turns, chunk by chunk."""

        def step(number: int) -> None:
            for chunk in self.numbers(self.kept + number % 2):
                get(chunk, self.keys[chunk], self.slot(chunk))

        return step

    def proven(self, name: str, step: Step) -> None:
        """Raise RuntimeError if `step` gets other bytes than were put."""
        for number in (0, 1):
            for slot in self.slots:
                slot[:] = 0
            step(number)
            wanted = self.numbers(self.kept + number)
            if not all(
                np.array_equal(self.slot(chunk), self.source(chunk))
                for chunk in wanted
            ):
                raise RuntimeError(f"{name}: the returned bytes are wrong")


class LinkMoves:
    """Put and get chunks through one StoreConnection; reconnect after a long turn of others.
    Single-threaded.
    """

    def __init__(self, remote: StoreClient) -> None:
        self._remote = remote
        self._connection: StoreConnection = remote.connection().open(_until())
        self._used = time.monotonic()
        self._page = np.zeros(HEADER_BYTES, np.uint8)

    def _ready(self) -> StoreConnection:
        if time.monotonic() - self._used > IDLE_SECONDS / 2:
            self.close()
            self._connection = self._remote.connection().open(_until())
        self._used = time.monotonic()
        return self._connection

    def put(self, _: int, key: bytes, source: Bytes) -> None:
        """Put a chunk that is not in the store."""
        connection = self._ready()
        (claim,) = connection.claim(NAMESPACE.root, [key], _until())
        done = claim or connection.put(
            PutRequest(NAMESPACE.root, key, self._page, source, _always), _until()
        )
        if done is not PutResult.STORED:
            raise RuntimeError(f"a chunk was not stored: {done}")

    def get(self, _: int, key: bytes, slot: Bytes) -> None:
        """Get a chunk that is in the store."""
        if (
            self._ready().get(
                GetRequest(NAMESPACE.root, key, self._page, lambda: slot),
                _until(),
            )
            != slot.nbytes
        ):
            raise RuntimeError("a chunk was not found")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class TierMoves:
    """Save and load whole turns through a RemoteTier, with verification."""

    def __init__(
        self, turns: Turns, remote: StoreClient, connections: int = CONNECTIONS
    ) -> None:
        layout = KVLayout.opaque(256, turns.chunk_bytes, "benchmark")
        self._turns = turns
        self.tier = RemoteTier(
            layout,
            remote,
            connections=connections,
            queue_chunks=2 * turns.turn,
            deadline_seconds=PATIENCE_SECONDS,
        )
        self.tier.register(NAMESPACE)
        self.how = f"{connections} connections"

    def save(self, number: int) -> None:
        """Save one turn and wait until all of it is stored."""
        chunks = [
            Chunk(
                self._turns.keys[chunk],
                place,
                256,
                self._turns.source(chunk),
                None,
                _always,
            )
            for place, chunk in enumerate(self._turns.numbers(number))
        ]
        for future in self.tier.store(chunks, NAMESPACE.root):
            if not (done := future.result(PATIENCE_SECONDS)).ok:
                raise RuntimeError(f"a chunk was not saved: {done.reason}")

    def load(self, number: int) -> None:
        """Load one of the two kept turns and wait until every byte is verified."""
        chunks = self._turns.numbers(self._turns.kept + number % 2)
        keys = [self._turns.keys[i] for i in chunks]
        slots = [self._turns.slot(i) for i in chunks]
        for future in self.tier.load(keys, slots, namespace=NAMESPACE.root):
            if not (done := future.result(PATIENCE_SECONDS)).ok:
                raise RuntimeError(f"a chunk was not loaded: {done.reason}")

    def close(self) -> None:
        """End the threads and connections."""
        self.tier.close()


class Side(NamedTuple):
    """An entrant: how it puts a turn and gets one of the two kept turns."""

    put: Step
    get: Step
    pid: Pids  # of the other end
    how: str
    # puts a turn as earlier users of the store would; None: same as `put`
    fill: Step | None = None


def link_side(
    stack: ExitStack, turns: Turns, remote: StoreClient, pid: Pids
) -> Side:
    """Return one StoreConnection, to a store that was filled by as many parallel connections as a
    tier has.
    """
    move = stack.enter_context(closing(LinkMoves(remote)))
    fill = links_side(stack, turns, remote, pid).put
    return Side(
        turns.putting(move.put),
        turns.getting(move.get),
        pid,
        "1 connection",
        fill,
    )


def links_side(
    stack: ExitStack, turns: Turns, remote: StoreClient, pid: Pids
) -> Side:
    """Return as many StoreConnections as a tier has, on a thread each, without verification."""
    moves = [
        stack.enter_context(closing(LinkMoves(remote)))
        for _ in range(CONNECTIONS)
    ]
    threads = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))

    def parallel(step: Callable[[LinkMoves, int], None], numbers: range) -> None:
        def share(place: int) -> None:
            for chunk in numbers[place::CONNECTIONS]:
                step(moves[place], chunk)

        for _ in threads.map(share, range(CONNECTIONS)):
            pass

    def put(number: int) -> None:
        parallel(
            lambda link, n: link.put(n, turns.keys[n], turns.source(n)),
            turns.numbers(number),
        )

    def get(number: int) -> None:
        numbers = turns.numbers(turns.kept + number % 2)
        parallel(
            lambda link, n: link.get(n, turns.keys[n], turns.slot(n)), numbers
        )

    return Side(put, get, pid, f"{CONNECTIONS} connections, unverified")


def tier_side(
    stack: ExitStack, turns: Turns, remote: StoreClient, pid: Pids
) -> Side:
    """Return a complete RemoteTier."""
    moves = stack.enter_context(closing(TierMoves(turns, remote)))
    return Side(moves.save, moves.load, pid, moves.how)


def socket_side(stack: ExitStack, turns: Turns) -> Side:
    """Return a bare socket to a second process, which keeps nothing."""
    pair = stack.enter_context(SocketPair())
    put = turns.putting(lambda _, __, source: pair.put(source))
    return Side(
        put,
        turns.getting(lambda _, __, slot: pair.get(slot)),
        pair.pid,
        pair.threads,
    )


Field = Callable[[ExitStack], Mapping[str, Side]]
Figures = Callable[[str, Made], list[Figure]]  # of "put" or "get"


def both_ways(
    turns: Turns,
    sides: Field,
    before: Callable[[], None],
    empty: Callable[[], None],
    figures: Figures,
) -> list[Figure]:
    """Race the puts, with an untimed call of `before` before each round; then race gets from newly
    filled stores.
    """
    found = raced_puts(turns, sides, before, figures)
    empty()
    return found + raced_gets(turns, sides, figures)


def raced_gets(turns: Turns, sides: Field, figures: Figures) -> list[Figure]:
    """Race the gets of what is put first, on new sides: a tier that remembers its puts would not
    put it again.
    """
    with ExitStack() as stack:
        field = sides(stack)
        for name, each in field.items():
            if name != "socket":
                each.put(turns.kept)
                each.put(turns.kept + 1)
                turns.proven(name, each.get)
        gets = {
            name: Entrant(each.get, each.pid, each.how)
            for name, each in field.items()
        }
        return figures("get", contest(turns, gets))


def raced_puts(
    turns: Turns, sides: Field, before: Callable[[], None], figures: Figures
) -> list[Figure]:
    """Race the puts, after enough turns to fill a store with a capacity of ROOM_TURNS."""
    with ExitStack() as stack:
        field = sides(stack)
        for number in range(turns.rounds + 1, turns.kept):
            before()
            for each in field.values():
                (each.fill or each.put)(number)
        puts = {
            name: Entrant(each.put, each.pid, each.how)
            for name, each in field.items()
        }
        return figures("put", contest(turns, puts, before))


def contest(
    turns: Turns,
    entrants: Mapping[str, Entrant],
    before: Callable[[], None] | None = None,
) -> Made:
    """Race the entrants; return a function that makes figures from the rounds."""
    runs: Runs = race(entrants, turns.rounds, before=before)

    def figure(
        key: str, candidate: str, limit: str, target: float | None
    ) -> Figure:
        both = {"candidate": entrants[candidate], "limit": entrants[limit]}
        cpu = {
            side: entrant.cpu(turns.turn_bytes) for side, entrant in both.items()
        }
        how = {side: entrant.how for side, entrant in both.items()}
        made = ratio_figure(
            key,
            0.0,
            runs,
            size_bytes=turns.turn_bytes,
            threads=f"{how['candidate']} against {how['limit']}",
            candidate=candidate,
            limit=limit,
            beside={"how": how, "cpu_seconds_per_gb": cpu},
        )
        spent = " against ".join(
            f"{each['client']:.2f} + {each['server']:.2f}"
            for each in cpu.values()
        )
        return replace(
            made,
            target=target,
            note=f"{made.note}; CPU s/GB, client + server: {spent}",
        )

    return figure


def _until() -> float:
    return time.monotonic() + PATIENCE_SECONDS


def _always() -> bool:
    return True
