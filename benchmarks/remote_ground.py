"""What the benchmarks of remote tiers stand on: entrants that count processor time, turns, figures, servers."""

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
from pagoda.tiers.remote.store_client import PutResult, StoreClient, StoreConnection

CONNECTIONS = 4  # of a tier, as configured by default
PATIENCE_SECONDS = 60.0
Move = Callable[[int, bytes, Bytes], None]  # the number of a chunk, its key, its bytes
ROOM_TURNS = 4  # what a store that evicts has room for
Made = Callable[[str, str, str, float | None], Figure]  # of key, candidate, limit, target


@dataclass
class Entrant:
    """One side of a race; counts the processor time of this process and of the server while it has its turn."""

    step: Step
    pid: int  # of the server
    how: str
    client_seconds: float = field(default=0.0, init=False)
    server_seconds: float = field(default=0.0, init=False)
    calls: int = field(default=0, init=False)

    def __call__(self, number: int) -> None:
        client, server = time.process_time(), cpu_seconds(self.pid)
        self.step(number)
        self.client_seconds += time.process_time() - client
        self.server_seconds += cpu_seconds(self.pid) - server
        self.calls += 1

    def cpu(self, turn_bytes: int) -> dict[str, float]:
        """Processor seconds for 10^9 bytes."""
        moved = self.calls * turn_bytes / 1e9
        return {
            "client": round(self.client_seconds / moved, 3),
            "server": round(self.server_seconds / moved, 3),
        }


class Turns:
    """Chunks of one size in memory that is cycled through, `turn` of them a step of a race.

    Every chunk that is ever put has a key of its own, so that no put finds it there.
    """

    def __init__(self, plan: Plan, chunk_bytes: int, turn_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.turn_bytes = max(chunk_bytes, turn_bytes)
        self.turn = self.turn_bytes // chunk_bytes
        self.rounds = plan.rounds
        self.kept = (
            plan.rounds + 1 + ROOM_TURNS
        )  # the first turn to be got; before: raced ones, those that fill
        self.keys = keys_of("remote", self.turn * (self.kept + 2))
        self.sources = pieces(chunk_bytes, 2 * self.turn, 1)
        self.slots = pieces(chunk_bytes, 2 * self.turn, 2)

    def numbers(self, number: int) -> range:
        """The chunks of the turn of that number."""
        return range(number * self.turn, (number + 1) * self.turn)

    def source(self, chunk: int) -> Bytes:
        """The bytes to put."""
        return self.sources[chunk % len(self.sources)]

    def slot(self, chunk: int) -> Bytes:
        """Where to get them."""
        return self.slots[chunk % len(self.slots)]

    def putting(self, put: Move) -> Step:
        """A step that puts one turn, chunk by chunk."""

        def step(number: int) -> None:
            for chunk in self.numbers(number):
                put(chunk, self.keys[chunk], self.source(chunk))

        return step

    def getting(self, get: Move) -> Step:
        """A step that gets one of the two turns that are kept, chunk by chunk."""

        def step(number: int) -> None:
            for chunk in self.numbers(self.kept + number % 2):
                get(chunk, self.keys[chunk], self.slot(chunk))

        return step

    def proven(self, name: str, step: Step) -> None:
        """Raises RuntimeError if what `step` gets is not what was put."""
        for number in (0, 1):
            for slot in self.slots:
                slot[:] = 0
            step(number)
            wanted = self.numbers(self.kept + number)
            if not all(np.array_equal(self.slot(chunk), self.source(chunk)) for chunk in wanted):
                raise RuntimeError(f"{name}: the bytes that came back are wrong")


class LinkMoves:
    """Puts and gets of chunks through one StoreConnection, a new one after a long turn of others. Single-threaded."""

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
        """One chunk that was not there."""
        done = self._ready().put(NAMESPACE.root, key, self._page, source, _always, _until())
        if done is not PutResult.STORED:
            raise RuntimeError(f"a chunk was not stored: {done}")

    def get(self, _: int, key: bytes, slot: Bytes) -> None:
        """One chunk that is there."""
        if self._ready().get(NAMESPACE.root, key, self._page, lambda: slot, _until()) != slot.nbytes:
            raise RuntimeError("a chunk was not there")

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


class TierMoves:
    """Saves and verified loads of whole turns through a RemoteTier."""

    def __init__(self, turns: Turns, remote: StoreClient, connections: int = CONNECTIONS) -> None:
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
        """Saves one turn and waits until all of it is there."""
        chunks = [
            Chunk(self._turns.keys[chunk], place, 256, self._turns.source(chunk), None, _always)
            for place, chunk in enumerate(self._turns.numbers(number))
        ]
        for future in self.tier.save(chunks, NAMESPACE.root):
            if not (done := future.result(PATIENCE_SECONDS)).ok:
                raise RuntimeError(f"a chunk was not saved: {done.reason}")

    def load(self, number: int) -> None:
        """Loads one of the two turns that are kept and waits until every byte is verified."""
        chunks = self._turns.numbers(self._turns.kept + number % 2)
        keys, slots = [self._turns.keys[i] for i in chunks], [self._turns.slot(i) for i in chunks]
        for future in self.tier.load(keys, slots, namespace=NAMESPACE.root):
            if not (done := future.result(PATIENCE_SECONDS)).ok:
                raise RuntimeError(f"a chunk was not loaded: {done.reason}")

    def close(self) -> None:
        """Ends the threads and connections."""
        self.tier.close()


class Side(NamedTuple):
    """Who can put a turn and get one of the two kept ones, and how it does."""

    put: Step
    get: Step
    pid: int  # of the process on the other end
    how: str
    fill: Step | None = None  # puts a turn as those would who have been there before; None: as `put`


def link_side(stack: ExitStack, turns: Turns, remote: StoreClient, pid: int) -> Side:
    """One StoreConnection, to a store that has been filled by as many connections at once as a tier has."""
    moves = [stack.enter_context(closing(LinkMoves(remote))) for _ in range(CONNECTIONS)]
    threads = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))

    def fill(number: int) -> None:
        def share(place: int) -> None:
            for chunk in turns.numbers(number)[place::CONNECTIONS]:
                moves[place].put(chunk, turns.keys[chunk], turns.source(chunk))

        for _ in threads.map(share, range(CONNECTIONS)):
            pass

    return Side(turns.putting(moves[0].put), turns.getting(moves[0].get), pid, "1 connection", fill)


def tier_side(stack: ExitStack, turns: Turns, remote: StoreClient, pid: int) -> Side:
    """A whole RemoteTier."""
    moves = stack.enter_context(closing(TierMoves(turns, remote)))
    return Side(moves.save, moves.load, pid, moves.how)


def socket_side(stack: ExitStack, turns: Turns) -> Side:
    """A bare socket to a second process, which keeps nothing."""
    pair = stack.enter_context(SocketPair())
    put = turns.putting(lambda _, __, source: pair.put(source))
    return Side(put, turns.getting(lambda _, __, slot: pair.get(slot)), pair.pid, pair.threads)


Field = Callable[[ExitStack], Mapping[str, Side]]
Figures = Callable[[str, Made], list[Figure]]  # of "put" or "get"


def both_ways(
    turns: Turns,
    sides: Field,
    before: Callable[[], None],
    empty: Callable[[], None],
    figures: Figures,
) -> list[Figure]:
    """Races the puts, `before` each round of which is called, untimed; then gets, of what emptied stores were given."""
    found = raced_puts(turns, sides, before, figures)
    empty()
    with ExitStack() as stack:  # anew: who remembers what it has put would not put it again
        field = sides(stack)
        for name, each in field.items():
            if name != "socket":
                each.put(turns.kept)
                each.put(turns.kept + 1)
                turns.proven(name, each.get)
        gets = {name: Entrant(each.get, each.pid, each.how) for name, each in field.items()}
        return found + figures("get", contest(turns, gets))


def raced_puts(turns: Turns, sides: Field, before: Callable[[], None], figures: Figures) -> list[Figure]:
    """Races the puts, after as many turns as fill a store that has room for ROOM_TURNS."""
    with ExitStack() as stack:
        field = sides(stack)
        for number in range(turns.rounds + 1, turns.kept):
            before()
            for each in field.values():
                (each.fill or each.put)(number)
        puts = {name: Entrant(each.put, each.pid, each.how) for name, each in field.items()}
        return figures("put", contest(turns, puts, before))


def contest(turns: Turns, entrants: Mapping[str, Entrant], before: Callable[[], None] | None = None) -> Made:
    """Races the entrants; what is returned makes figures of it."""
    runs: Runs = race(entrants, turns.rounds, before=before)

    def figure(key: str, candidate: str, limit: str, target: float | None) -> Figure:
        both = {"candidate": entrants[candidate], "limit": entrants[limit]}
        cpu = {side: entrant.cpu(turns.turn_bytes) for side, entrant in both.items()}
        how = {side: entrant.how for side, entrant in both.items()}
        made = ratio_figure(
            key, 0.0, runs, size_bytes=turns.turn_bytes, threads=f"{how['candidate']} against {how['limit']}",
            candidate=candidate, limit=limit, beside={"how": how, "cpu_seconds_per_gb": cpu},
        )  # fmt: skip
        spent = " against ".join(f"{each['client']:.2f} + {each['server']:.2f}" for each in cpu.values())
        return replace(made, target=target, note=f"{made.note}; CPU s/GB, client + server: {spent}")

    return figure


def _until() -> float:
    return time.monotonic() + PATIENCE_SECONDS


def _always() -> bool:
    return True
