"""Several independent Redis as one store: which node has a chunk, and on which node a new one is
stored.

`open_client` makes a `RedisPoolClient` for `redis+pool://`. A lookup asks every node for every key,
so it does not matter why a chunk is where it is: it may have been stored while another node was
away.

A key has an order of all nodes, by a hash of both (rendezvous hashing); its own place is the first
node in use. The new chunks of one request form a run, which is stored at the place of its first
chunk. So a lost node takes whole runs and not a third of every prompt, whose first hole would end
each hit. Versions before runs find a chunk at its own place only. So runs are kept together as soon
as the nodes have a mark that says so (see `RedisPoolClient.note_mark`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Generic, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from pagoda.base.fork import per_process
from pagoda.base.metrics import Reason
from pagoda.base.oldest import drop_oldest
from pagoda.tiers.remote.leading_run import EXACT_KEYS, leading_run
from pagoda.tiers.remote.redis import (
    RedirectError,
    RedisConnection,
    RedisNames,
)
from pagoda.tiers.remote.redis_nodes import (
    NodesOptions,
    RedisNode,
    RedisNodesClient,
    RedisNodesConnection,
    Shares,
    by_key,
    writable,
)
from pagoda.tiers.remote.store_client import (
    GetRequest,
    PutRequest,
    PutResult,
    RefusedError,
)

_MARK_SECONDS = 60.0  # how long it is believed whether runs are kept together
_MOST_KEYS = 1 << 16  # of chunks whose node is remembered: some 10 MiB
_MOST_RUNS = 1 << 10

_K = TypeVar("_K")
_V = TypeVar("_V")
_T = TypeVar("_T")


class _Memory(Generic[_K, _V]):
    """Values by key, of which the oldest are forgotten. The caller holds a lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[_K, _V] = {}

    def get(self, key: _K) -> _V | None:
        return self._values.get(key)

    def note(self, keys: Iterable[_K], value: _V) -> None:
        self._values.update(dict.fromkeys(keys, value))
        drop_oldest(self._values, self._most)

    def forget(self, keys: Iterable[_K]) -> None:
        for key in keys:
            self._values.pop(key, None)


class RedisPoolClient(RedisNodesClient):
    """Independent Redis, `redis+pool://host:port,host:port`, as one store. Thread-safe, keeps no
    connection.

    All machines must name the nodes in the same way (case, order, a default port and the dot at the
    end of a name do not matter).
    """

    def __init__(self, url: str, **options: Unpack[NodesOptions]) -> None:
        """Connect to nothing yet. Arguments and errors are those of `RedisNodesClient`."""
        # the node that takes a chunk may be another one at the second sight: see
        # `RedisPoolConnection.claim`
        self.second_sight = options.pop("second_sight", False)
        super().__init__(url, **options)
        self.names = RedisNames(options.get("prefix", "pagoda"))
        self.keeps_runs = False  # as far as is known
        self._nodes_of: _Memory[bytes, RedisNode] = _Memory(_MOST_KEYS)
        # by key: the first key of its run
        self._first_of: _Memory[bytes, bytes] = _Memory(_MOST_KEYS)
        # by stamp: the first key
        self._runs: _Memory[int, bytes] = _Memory(_MOST_RUNS)
        self._mark_known_until = 0.0

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @per_process
    def learning(self) -> threading.Lock:
        """Return the lock that is held while the nodes are asked for the mark."""
        return threading.Lock()

    def connection(self) -> RedisPoolConnection:
        """Return a new connection that is still to be opened."""
        return RedisPoolConnection(self)

    # ---- places

    def shares(self, keys: Sequence[bytes]) -> Shares:
        """Return which of these keys have their own place on each node. ConnectionError: no node is
        in use.
        """
        nodes = self.in_use()
        heads = np.frombuffer(b"".join(key[:8] for key in keys), "<u8")
        first = np.argmax([mixed(heads ^ node.seed) for node in nodes], axis=0)
        shares = {
            node: np.flatnonzero(first == number).tolist()
            for number, node in enumerate(nodes)
        }
        return {node: share for node, share in shares.items() if share}

    def in_use(self) -> list[RedisNode]:
        """Return the nodes that are in use. ConnectionError: there is none."""
        return self._used(self.nodes)

    def begin_run(self, keys: Sequence[bytes], stamp: int) -> None:
        """Note that these new chunks are stored by the request that has this stamp: they belong to
        one run.
        """
        if not keys:
            return
        with self._lock:
            first = self._runs.get(stamp) or keys[0]
            self._runs.note([stamp], first)
            self._first_of.note(keys, first)

    def places(self, keys: Sequence[bytes]) -> Shares:
        """Return which of these keys are stored on each node if they are new. ConnectionError: no
        node is in use.
        """
        if not keys:
            return {}
        return self.shares([self._deciding_key(key) for key in keys])

    def place_of(self, key: bytes) -> RedisNode:
        """Return the node on which a new chunk is stored. ConnectionError: no node is in use."""
        return self.node_of(self._deciding_key(key))

    def _deciding_key(self, key: bytes) -> bytes:
        """Return the key whose own place decides where a new chunk is stored."""
        if not self.keeps_runs:
            return key
        with self._lock:
            return self._first_of.get(key) or key

    def note_present(self, node: RedisNode, keys: Iterable[bytes]) -> None:
        """Remember that a node has these chunks."""
        with self._lock:
            self._nodes_of.note(keys, node)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget which node has these chunks."""
        with self._lock:
            self._nodes_of.forget(keys)

    def readers(self, key: bytes) -> list[RedisNode]:
        """Return the nodes in use, in the order in which to ask them for a chunk. ConnectionError:
        there is none.
        """
        used = self.in_use()
        with self._lock:
            known = self._nodes_of.get(key)
        likely = [known] if known in used else []
        likely += [self.place_of(key), self.node_of(key)]
        return list(dict.fromkeys([*likely, *used]))

    # ---- the mark

    def is_mark_due(self) -> bool:
        """Return whether it must be asked again if runs are kept together."""
        return time.monotonic() >= self._mark_known_until

    def note_mark(self, keeps_runs: bool) -> None:
        """Remember for a while whether runs are kept together."""
        self.keeps_runs = keeps_runs
        self._mark_known_until = time.monotonic() + _MARK_SECONDS


class RedisPoolConnection(RedisNodesConnection):
    """One connection to each node of a pool; see StoreConnection. For one thread at a time, except
    `abort`.
    """

    _client: RedisPoolClient

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys are present on any node: all nodes are asked for all keys,
        at the same time.

        When other nodes have answered, slow ones are not waited for.
        """
        silent = False

        def ask(asked: Sequence[bytes]) -> list[bool]:
            nonlocal silent
            here, all_answered = self._ask_of_all(namespace, asked, until)
            silent |= not all_answered
            return here

        found = leading_run(keys, ask, exact=EXACT_KEYS)
        if keys and not found and silent:
            text = "a node that may have the first chunk did not answer"
            raise RefusedError(Reason.DEADLINE, text, contained=True)
        return found  # the number of keys is worth more than the reason

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys are present on any node: all nodes are asked for all keys, at the same
        time.
        """
        return self._ask_of_all(namespace, keys, until)[0]

    def _ask_of_all(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> tuple[list[bool], bool]:
        """Return which keys any node has, and whether every node answered."""
        question = self._client.names.question(namespace, keys)
        nodes = self._client.in_use()
        calls = dict.fromkeys(
            nodes, lambda line: line.answer(question, len(keys), until)
        )
        answers = self._ask(calls, until)
        return self._merged(keys, answers), len(answers) == len(nodes)

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Ask before puts. If a node does not answer or refuses, nothing is known of its chunks,
        and `put` fails.

        Nothing is claimed on a node that refuses writes: others would wait for the chunk. With
        second sight only chunks that were asked for before are claimed.
        """
        self._learn_mark(until)
        results: list[PutResult | None] = [None] * len(keys)
        unseen = (
            self._unseen(namespace, keys, until)
            if self._client.second_sight
            else set()
        )
        for at in unseen:
            results[at] = PutResult.UNSEEN
        wanted = [at for at in range(len(keys)) if at not in unseen]
        some = [keys[at] for at in wanted]
        places = writable(self._client.places(some))
        answers = self._ask_shares(places, some, self._claimed, namespace, until)
        for at, result in by_key(places, answers):
            results[wanted[at]] = result
        return results

    def _unseen(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> set[int]:
        """Return which of these keys (their indices) nobody asked for before; remember all as asked
        for.

        That is kept at the place of a key of its own, which all requests know: the next one that
        asks for the chunk may have another first chunk, so its run has another place. Where it
        cannot be asked, a chunk counts as seen.
        """
        shares = writable(self._client.shares(keys))
        answers = self._ask_shares(shares, keys, self._seen, namespace, until)
        return {at for at, seen in by_key(shares, answers) if not seen}

    @staticmethod
    def _seen(
        line: RedisConnection,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
    ) -> list[bool]:
        """Ask one node which of its keys were asked for before; all, if it refuses."""
        try:
            return line.seen(namespace, keys, until)
        except RedirectError:
            raise
        except RefusedError:
            return [True] * len(keys)

    def release(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> None:
        """End claims that no put has ended, on the nodes that answer."""
        self._ask_shares(
            self._client.places(keys),
            keys,
            RedisConnection.release,
            namespace,
            until,
        )

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store a chunk at the place of its run; see RedisConnection."""
        node = self._client.place_of(request.key)
        result = self._call_for(
            lambda: node,
            lambda line: line.put(request, until),
            until,
            writes=True,
        )
        if result in (PutResult.STORED, PutResult.PRESENT):
            self._client.note_present(node, [request.key])
        return result

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination` from a node that has the chunk; see
        RedisConnection.
        """
        trouble: RefusedError | None = None
        for node in self._client.readers(request.key):
            try:
                found = self._call_for(
                    lambda node=node: node,  # type: ignore[misc]
                    lambda line: line.get(request, until),
                    until,
                )
            except RefusedError as refusal:
                if not refusal.contained:
                    raise
                trouble = refusal
                continue
            if found is not None:
                return found
        self._client.forget([request.key])
        if trouble is not None:
            raise trouble
        return None

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove chunks from all nodes; return how many there were.

        A contained refusal if a node does not answer: its chunks may still be there when it is
        back.
        """
        nodes = self._client.nodes
        question = partial(
            RedisConnection.remove, namespace=namespace, keys=keys, until=until
        )
        removed = self._ask(dict.fromkeys(nodes, question), until)
        self._client.forget(keys)
        if len(removed) < len(nodes):
            raise RefusedError(
                Reason.IO_ERROR,
                "a node did not answer: it may have it",
                contained=True,
            )
        return sum(removed.values())

    def _ask_for(
        self,
        keys: Sequence[bytes],
        question: Callable[..., _T],
        namespace: bytes,
        until: float,
        patience_seconds: float | None = None,
    ) -> tuple[Shares, dict[RedisNode, _T]]:
        """Ask each node in use about all keys; return the answers of those that answer, and that
        all were asked.
        """
        nodes = self._client.in_use() if keys else []
        everything = {node: list(range(len(keys))) for node in nodes}
        return everything, self._ask_shares(
            everything, keys, question, namespace, until, patience_seconds
        )

    def _note_touched(self, node: RedisNode, keys: Sequence[bytes]) -> None:
        self._client.note_present(node, keys)

    def _merged(
        self, keys: Sequence[bytes], answers: Mapping[RedisNode, Sequence[bool]]
    ) -> list[bool]:
        """Return which keys any node has, and remember the nodes."""
        for node, present in answers.items():
            self._client.note_present(node, list(compress(keys, present)))
        return (
            list(map(any, zip(*answers.values(), strict=True)))
            if answers
            else [False] * len(keys)
        )

    def _learn_mark(self, until: float) -> None:
        """Learn, once a minute, whether runs are kept together; copy the mark to nodes that have
        lost it.

        A pool that has no value at all gets the mark: no older version has stored anything in it.
        In a pool that has chunks a person sets it when no machine runs an older version any more.
        """
        client = self._client
        if not client.is_mark_due():
            return
        # nothing may be stored meanwhile: the pool would not be empty any more
        learning = client.learning
        if learning.acquire(timeout=max(0.0, until - time.monotonic())):
            try:
                if client.is_mark_due():
                    client.note_mark(self._asked_for_mark(until))
            finally:
                learning.release()

    def _asked_for_mark(self, until: float) -> bool:
        """Ask the nodes if runs are kept together; mark those that have no mark, if so."""
        client = self._client
        keeps_runs = client.keeps_runs
        with suppress(OSError, RefusedError):
            nodes = client.in_use()
            marked = self._ask_all(nodes, RedisConnection.keeps_runs, until)
            keeps_runs = any(marked.values())
            if not keeps_runs and len(marked) == len(client.nodes):
                empty = self._ask_all(nodes, RedisConnection.is_empty, until)
                keeps_runs = len(empty) == len(nodes) and all(empty.values())
            if keeps_runs:
                unmarked = [
                    node for node, is_marked in marked.items() if not is_marked
                ]
                self._ask_all(unmarked, RedisConnection.mark_runs, until)
        return keeps_runs

    def _ask_all(
        self,
        nodes: Iterable[RedisNode],
        question: Callable[[RedisConnection, float], _T],
        until: float,
    ) -> dict[RedisNode, _T]:
        return self._ask(
            dict.fromkeys(nodes, lambda line: question(line, until)),
            until,
            math.inf,
        )


def mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each word (the last step of SplitMix64). It must never change: it decides
    where chunks are.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
