"""Several Redis as one store: each key is on one node, and a node that fails costs only its own
chunks.

A lookup asks all nodes at the same time. A node that fails is left out, and a thread checks whether
it is back.

    RedisNodesClient       what all connections share: the nodes (see `redis_pool` and
                           `redis_cluster`)
    RedisNode              one node: how it is reached, and whether it is used now
    RedisNodesConnection   one `RedisConnection` to each node
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, compress
from typing import Self, TypeVar, Unpack

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.fork import reset_now_and_in_child
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Pool, wait
from pagoda.base.urls import RemoteUrl, place_of
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.remote.redis import (
    ChunkUse,
    RedirectError,
    RedisClient,
    RedisConnection,
    RedisOptions,
)
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    StoreClient,
    StoreConnection,
    Usage,
    reason_of,
)

# after two failures in a row a node is left out until it answers a probe
_FAILURES = 2
_REST_SECONDS = 0.25
# after four refusals nothing is written to a node for five seconds
_REFUSALS = 4
_REFUSED_SECONDS = 5.0
_PROBE_SECONDS = 1.0
# after this share of a caller's time, a lookup waits hardly longer for a slow node
_PATIENCE_SHARE = 1 / 3
_MOST_MOVES = 4  # the most moves of a key that one call follows
_MOST_THREADS = 32  # threads that ask nodes at the same time

_logger = guarded_logger("pagoda.tiers.remote")
_T = TypeVar("_T")
_Calls = Mapping["RedisNode", Callable[[RedisConnection], _T]]
_Touched = tuple[list[bool], RefusedError | None]


class NodesOptions(RedisOptions, total=False):
    """The options of a client of several Redis: see RedisNodesClient."""

    look_seconds: float  # 0.05 unless given
    clock: Clock


class RedisNode:
    """One node: how it is reached, and its health. Thread-safe; compared by identity."""

    def __init__(self, client: RedisClient, clock: Clock) -> None:
        self.client = client
        self.place = place_of(
            client.address.partition("://")[2].rpartition("/")[0], 6379
        )
        self.seed = np.frombuffer(
            hashlib.blake2b(self.place.encode(), digest_size=8).digest(), "<u8"
        )[0]
        self.breaker = CircuitBreaker(clock, _FAILURES, _REST_SECONDS)
        self.write_breaker = CircuitBreaker(clock, _REFUSALS, _REFUSED_SECONDS)
        self.last_refusal = Reason.IO_ERROR
        # older connections are replaced before their next use
        self.trusted_since = 0.0
        self.is_probed = False
        # the connections to it that may be used
        self.lines: set[_NodeLine] = set()
        self._log = RateLimitedLog(clock)

    def reset(self) -> None:
        """Replace the locks in a forked child, which has no connection yet."""
        self.is_probed = False
        self.lines = set()

    def failed(self, error: Exception) -> RefusedError:
        """Count and log that the node failed; return the miss for its keys. End its calls if it is
        left out now.
        """
        if isinstance(error, TimeoutError):
            self.trusted_since = time.monotonic()
        self.breaker.record_failure()
        if self.breaker.is_open:
            ended = self.lines
            self.lines = set()
            for line in list(ended):
                line.connection.abort()
        return self.contain(error)

    def refused_write(self, refusal: RefusedError) -> RefusedError:
        """Count and log that the node refused a write; return the drop."""
        self.last_refusal = refusal.reason
        self.write_breaker.record_failure()
        return self.contain(refusal)

    def contain(self, error: Exception) -> RefusedError:
        """Log an error of the node; return a contained refusal, which says nothing about the other
        nodes.
        """
        reason = reason_of(error)
        place = f"{self.client.address}: "
        text = f"{place}{type(error).__name__}: {str(error).removeprefix(place)}"
        self._log.warn(
            _logger, reason, f"{text}: the other nodes are used as before"
        )
        return RefusedError(reason, text, contained=True)


Shares = dict[RedisNode, list[int]]
"""Which of some keys are on each node: their indices, in order."""


def writable(shares: Shares) -> Shares:
    """Return the shares of the nodes that do not refuse writes."""
    return {
        node: share
        for node, share in shares.items()
        if not node.write_breaker.resting
    }


def by_key(
    shares: Shares, answers: Mapping[RedisNode, Sequence[_T]]
) -> Iterator[tuple[int, _T]]:
    """Yield the index of each key whose node has answered, with the answer."""
    for node, answer in answers.items():
        yield from zip(shares[node], answer, strict=True)


class RedisNodesClient(StoreClient):
    """Several Redis as one store: what is common to a pool and a cluster. Thread-safe, keeps no
    connection.
    """

    is_cluster = False
    _client_type: type[RedisClient] = RedisClient

    def __init__(
        self,
        url: str,
        *,
        look_seconds: float = 0.05,
        clock: Clock | None = None,
        **options: Unpack[RedisOptions],
    ) -> None:
        """Connect to nothing yet. ConfigError: the URL, the password file or the prefix cannot be
        used.

        `look_seconds`: how long a caller waits for a lookup.
        """
        self._url = RemoteUrl.of(url)
        self.patience_seconds = look_seconds * _PATIENCE_SHARE
        self._clock = clock or Clock()
        self._client_of = partial(self._client_type, **options)
        self.nodes = self._seeds = [
            RedisNode(self._client_of(each), self._clock)
            for each in self._url.node_urls()
        ]
        first = self.nodes[0].client
        self.name = first.name
        # the same text on all machines
        places = ",".join(sorted(node.place for node in self.nodes))
        self.address = f"{self._url.parts.scheme}://{places}/{first.address.rpartition('/')[2]}"
        self.believed_seconds = first.believed_seconds
        self.version = 0  # version of the list of nodes
        self._probes = Pool(_MOST_THREADS, "pagoda-redis-probe")
        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Create the locks; also in a forked child."""
        for node in {*self._seeds, *self.nodes}:
            node.reset()

    def connection(self) -> RedisNodesConnection:
        """Return a new connection that is still to be opened."""
        return RedisNodesConnection(self)

    def shares(self, keys: Sequence[bytes]) -> Shares:
        """Return which of these keys each node has. ConnectionError: no node is in use."""
        raise NotImplementedError

    def node_of(self, key: bytes) -> RedisNode:
        """Return the node that has a key. ConnectionError: no node is in use; contained refusal:
        this one is not.
        """
        for node in self.shares([key]):
            return node
        raise RefusedError(
            Reason.TIER_SKIPPED,
            "the chunk's node is not used now",
            contained=True,
        )

    def refresh(
        self,
        until: float,
        version: int | None = None,
        node: RedisNode | None = None,
    ) -> None:
        """Read the list of nodes, if it can change and has not changed since `version`; ask `node`
        first.
        """

    def _used(self, nodes: Sequence[RedisNode]) -> list[RedisNode]:
        """Return which nodes are in use. From time to time probe the others in the background."""
        used = []
        for node in nodes:
            if not node.breaker.is_open:
                used.append(node)
            elif not node.breaker.resting and not node.is_probed:
                node.is_probed = True
                try:
                    self._probes.submit(self._probe, node)
                except RuntimeError:  # no thread can be started now
                    node.is_probed = False
        if not used:
            raise ConnectionError(f"{self.address}: no node answers")
        return used

    def _probe(self, node: RedisNode) -> None:
        connection = node.client.connection()
        try:
            self.refresh(time.monotonic() + _PROBE_SECONDS)
            if node in self.nodes:
                connection.open(time.monotonic() + _PROBE_SECONDS)
                node.breaker.record_success()
        except (OSError, RefusedError) as error:
            node.failed(error)
        finally:
            connection.close()
            node.is_probed = False


class _NodeLine:
    """The connection to one node. `is_busy`: a thread uses it, and closes it if it was dropped
    meanwhile.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        self.made = time.monotonic()
        self.is_open = self.is_busy = False


class RedisNodesConnection(StoreConnection):
    """One connection to each node; see StoreConnection. For one thread at a time, except `abort`.

    An error of one node is a contained refusal: a miss or a drop with a reason. OSError: no node is
    in use.
    """

    def __init__(self, client: RedisNodesClient) -> None:
        self._client = client
        self._lines: dict[RedisNode, _NodeLine] = {}
        self._pool = Pool(_MOST_THREADS, "pagoda-redis-nodes")
        self._closed = False
        # a key of the latest call has moved, and its new node is known
        self._has_moved = False

    def open(self, until: float) -> Self:
        """Read the list of nodes if the URL does not name all. A node is connected to when it is
        used. OSError.
        """
        self._client.refresh(until, version=0)
        return self

    def ping(self, until: float) -> None:
        """Return if all nodes answer. OSError: none answers; a contained refusal: some do not."""
        self._client.refresh(until)
        for node, line in list(self._lines.items()):
            if node not in self._client.nodes and not line.is_busy:
                self._drop(node, line)
        nodes = self._client.nodes
        answers = self._ask(
            {node: lambda line: line.ping(until) for node in nodes}, until
        )
        if not answers:
            raise ConnectionError(f"{self._client.address}: no node answers")
        if silent := ", ".join(
            node.place for node in nodes if node not in answers
        ):
            raise RefusedError(
                Reason.IO_ERROR,
                f"{silent}: no answer; the other nodes do",
                contained=True,
            )

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys are present: all nodes are asked at the same time.

        When other nodes have answered, slow ones are not waited for.
        """
        shares, found = self._ask_for(
            keys, RedisConnection.find, namespace, until
        )
        here = [False] * len(keys)
        for node, number in found.items():
            for at in shares[node][:number]:
                here[at] = True
        end = here.index(False) if False in here else len(keys)
        if not end and keys and not any(shares[node][0] == 0 for node in found):
            raise RefusedError(
                Reason.DEADLINE,
                "the node of the first chunk did not answer",
                contained=True,
            )
        return end  # the number of keys is worth more than the reason

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys are present on nodes that answer; all nodes are asked at the same
        time.
        """
        shares, answers = self._ask_for(
            keys, RedisConnection.present, namespace, until
        )
        here = [False] * len(keys)
        for node, found in answers.items():
            for at in compress(shares[node], found):
                here[at] = True
        return here

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Update recency and extend lives; return which keys are present on nodes that answer.

        A node that refuses touches is asked which keys it has.
        """
        ranked = dict(zip(keys, ranks or [0] * len(keys), strict=True))

        def touch(
            line: RedisConnection,
            namespace: bytes,
            keys: Sequence[bytes],
            until: float,
        ) -> _Touched:
            try:
                return line.touch(
                    namespace, keys, until, [ranked[key] for key in keys]
                ), None
            except RedirectError:
                raise
            except RefusedError as refusal:
                if refusal.reconnect:
                    raise
                return line.present(namespace, keys, until), refusal

        shares, touched = self._ask_for(keys, touch, namespace, until)
        here = [False] * len(keys)
        for node, (present, refusal) in touched.items():
            if refusal is not None:
                node.contain(refusal)
            there = list(compress(shares[node], present))
            self._note_touched(node, [keys[at] for at in there])
            for at in there:
                here[at] = True
        return here

    def _note_touched(self, node: RedisNode, keys: Sequence[bytes]) -> None:
        """Note that a node has these chunks; a pool remembers it."""

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Ask before puts. If a node does not answer or refuses, nothing is known of its chunks,
        and `put` fails.

        Nothing is claimed on a node that refuses writes: others would wait for the chunk.
        """
        places = writable(self._client.shares(keys)) if keys else {}
        asked = list(chain.from_iterable(places.values()))
        some = [keys[at] for at in asked]
        shares, claimed = self._ask_for(
            some, self._claimed, namespace, until, patience_seconds=math.inf
        )
        results: list[PutResult | None] = [None] * len(keys)
        for at, result in by_key(shares, claimed):
            results[asked[at]] = result
        return results

    def release(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> None:
        """End claims that no put has ended, on the nodes that answer."""
        self._ask_for(
            keys,
            RedisConnection.release,
            namespace,
            until,
            patience_seconds=math.inf,
        )

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store a chunk on its node; see RedisConnection."""
        node_of = partial(self._client.node_of, request.key)
        return self._call_for(
            node_of, lambda line: line.put(request, until), until, writes=True
        )

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination` from the chunk's node; see
        RedisConnection.
        """
        node_of = partial(self._client.node_of, request.key)
        return self._call_for(
            node_of, lambda line: line.get(request, until), until
        )

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove chunks; return how many there were.

        A contained refusal if a node does not answer: its chunks may still be there when it is
        back.
        """
        shares, removed = self._ask_for(
            keys, RedisConnection.remove, namespace, until
        )
        if sum(len(shares[node]) for node in removed) < len(keys):
            raise RefusedError(
                Reason.IO_ERROR,
                "a node did not answer: it may have it",
                contained=True,
            )
        return sum(removed.values())

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all chunks of one namespace, or all of ours, from all nodes. OSError, at the end,
        if one fails.
        """
        return sum(
            self._all(lambda line: line.clear(namespace, deadline), deadline)
        )

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return the number of chunks of each namespace, on all nodes together. OSError if one
        fails.
        """
        chunks: Counter[bytes] = Counter()
        for counted in self._all(
            lambda line: line.count_by_namespace(deadline), deadline
        ):
            chunks.update(counted)
        return chunks

    def most_used(self, most: int, deadline: ListingDeadline) -> list[ChunkUse]:
        """Return the chunks of all nodes that are used most; see RedisConnection. OSError if one
        fails.
        """
        return heapq.nsmallest(
            most,
            chain.from_iterable(
                self._all(lambda line: line.most_used(most, deadline), deadline)
            ),
        )

    def headers(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> dict[bytes, bytes]:
        """Return the header pages of the chunks on nodes that answer."""
        answers = self._ask_for(
            keys,
            RedisConnection.headers,
            namespace,
            until,
            patience_seconds=math.inf,
        )[1]
        return {
            key: page for pages in answers.values() for key, page in pages.items()
        }

    def usage(self, until: float) -> Usage:
        """Return the memory of the nodes that answer, and the sum of their limits; None if one has
        no limit.

        OSError: no node answers.
        """
        calls = {
            node: lambda line: line.usage(until) for node in self._client.nodes
        }
        answers = self._ask(calls, until)
        if not answers:
            raise ConnectionError(f"{self._client.address}: no node answers")
        usages = list(answers.values())
        wrong = [
            f"{node.place}: {text}"
            for node, usage in answers.items()
            for text in usage.warnings
        ]
        wrong += [
            f"{node.place}: no answer; the other nodes do"
            for node in calls
            if node not in answers
        ]
        used = sum(usage.used_bytes or 0 for usage in usages)
        limits = [usage.limit_bytes for usage in usages if usage.limit_bytes]
        return Usage(
            used or None,
            sum(limits) if 0 < len(limits) == len(usages) else None,
            wrong,
            nodes=len(calls),
            answering=len(answers),
        )

    def abort(self) -> None:
        """Make all calls that wait in this connection fail soon. From any thread."""
        self._closed = True
        for line in list(self._lines.values()):
            line.connection.abort()

    def close(self) -> None:
        """Close the connections; never waits. A running call closes its connections when it ends.
        Idempotent.
        """
        self.abort()
        for node, line in list(self._lines.items()):
            if not line.is_busy:
                self._drop(node, line)
        self._pool.shutdown(wait=False)

    # ---- nodes

    @staticmethod
    def _claimed(
        line: RedisConnection,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
    ) -> list[PutResult | None]:
        """Claim chunks of one node; if it refuses, nothing is known of them."""
        try:
            return line.claim(namespace, keys, until)
        except RedirectError:
            raise
        except RefusedError:
            return [None] * len(keys)

    def _ask_for(
        self,
        keys: Sequence[bytes],
        question: Callable[..., _T],
        namespace: bytes,
        until: float,
        patience_seconds: float | None = None,
    ) -> tuple[Shares, dict[RedisNode, _T]]:
        """Ask each node about its share of the keys; return the shares, and the answers of those
        that answer.
        """
        for _ in range(_MOST_MOVES):
            shares = self._client.shares(keys) if keys else {}
            self._has_moved = False
            answers = self._ask_shares(
                shares, keys, question, namespace, until, patience_seconds
            )
            if not self._has_moved:
                break
        return shares, answers

    def _ask_shares(
        self,
        shares: Shares,
        keys: Sequence[bytes],
        question: Callable[..., _T],
        namespace: bytes,
        until: float,
        patience_seconds: float | None = math.inf,
    ) -> dict[RedisNode, _T]:
        """Ask each node about its share of the keys; return the answers of those that answer."""
        calls: _Calls[_T] = {
            node: partial(
                question,
                namespace=namespace,
                keys=[keys[at] for at in share],
                until=until,
            )
            for node, share in shares.items()
        }
        return self._ask(calls, until, patience_seconds)

    def _call_for(
        self,
        node_of: Callable[[], RedisNode],
        work: Callable[[RedisConnection], _T],
        until: float,
        *,
        writes: bool = False,
    ) -> _T:
        """Call the node of a key. Errors are contained refusals, except a wrong value under the
        key.
        """
        for _ in range(_MOST_MOVES):
            node = node_of()
            if writes and node.write_breaker.resting:
                raise RefusedError(
                    node.last_refusal, "the node refused writes", contained=True
                )
            self._has_moved = False
            try:
                done = self._call(node, work, until)
            except RefusedError as refusal:
                if self._has_moved:
                    continue
                if refusal.contained or (
                    refusal.reason is Reason.FAILED_CHECK and not writes
                ):
                    raise
                raise (node.refused_write if writes else node.failed)(
                    refusal
                ) from None
            if writes:
                node.write_breaker.record_success()
            return done
        raise RefusedError(
            Reason.BUSY, "the chunk is moved again and again", contained=True
        )

    def _all(
        self, call: Callable[[RedisConnection], _T], deadline: ListingDeadline
    ) -> list[_T]:
        """Call all nodes at the same time and return their results. OSError if one fails, when all
        have ended.
        """
        until = deadline.next_step()
        futures = [self._submit(node, call, until) for node in self._client.nodes]
        wait(futures)
        for future in futures:
            if isinstance(error := future.exception(), RefusedError):
                raise ConnectionError(str(error))
        return [future.result() for future in futures]

    def _ask(
        self,
        calls: _Calls[_T],
        until: float,
        patience_seconds: float | None = None,
    ) -> dict[RedisNode, _T]:
        """Call nodes at the same time; return the results of those that answer. The others count as
        failed.

        If all nodes refuse, the refusal is raised as it is. If no node answers and some refuse, it
        is raised as contained.

        `patience_seconds`: how long to wait for all of them; None: as long as a lookup may take. If
        no node answers within the usual time of one network, the time of the first answer shows how
        far away they are.
        """
        begun = time.monotonic()
        futures = {
            node: self._submit(node, call, until) for node, call in calls.items()
        }
        patience = (
            self._client.patience_seconds
            if patience_seconds is None
            else patience_seconds
        )
        wait(futures.values(), min(until - begun, patience))
        for future in futures.values():
            if any(
                each.done() and each.exception() is None
                for each in futures.values()
            ):
                break
            wait([future], until - time.monotonic())
        now = time.monotonic()
        wait(futures.values(), min(until - now, now - begun))
        answers = {}
        ended = {
            node: future for node, future in futures.items() if future.done()
        }
        refusals: list[RefusedError] = []
        for node in futures.keys() - ended.keys():
            futures[node].cancel()  # if no thread has begun it
            if (line := self._lines.pop(node, None)) is not None:
                line.connection.abort()
            node.failed(TimeoutError("no answer in time"))
        for node, future in ended.items():
            if (error := future.exception()) is None:
                answers[node] = future.result()
            elif not isinstance(error, RefusedError):
                raise error
            elif not (error.contained or error.reconnect):
                refusals.append(error)
                contained = node.failed(error)
        if refusals and not answers:
            raise (
                refusals[0]
                if len(refusals) == len(self._client.nodes)
                else contained
            )
        return answers

    def _submit(
        self, node: RedisNode, call: Callable[[RedisConnection], _T], until: float
    ) -> Future[_T]:
        try:
            return self._pool.submit(self._call, node, call, until)
        except RuntimeError as error:  # no thread can be started
            raise OSError(str(error)) from None

    def _call(
        self, node: RedisNode, work: Callable[[RedisConnection], _T], until: float
    ) -> _T:
        """Run `work` with the connection to a node. After an old connection failed, try a new
        one.
        """
        version = self._client.version
        while True:
            line = self._line(node)
            is_old = line.is_open
            line.is_busy = True
            is_known = False  # what became of the line
            try:
                if self._closed:
                    line.connection.abort()
                if not is_old:
                    line.connection.open(until)
                    line.is_open = True
                done = work(line.connection)
                is_known = True
            except RedirectError as redirect:
                is_known = True
                if not self._client.is_cluster:
                    self._drop(node, line)
                    raise node.failed(redirect) from None
                if redirect.has_moved:
                    with suppress(OSError):
                        self._client.refresh(until, version, node)
                        self._has_moved = True
                raise RefusedError(
                    Reason.BUSY, str(redirect), contained=True
                ) from None
            except (OSError, RefusedError) as error:
                is_known = True
                has_failed = not (
                    isinstance(error, RefusedError) and line.is_open
                )
                if (
                    isinstance(error, RefusedError)
                    and not has_failed
                    and not error.reconnect
                ):
                    raise
                is_given_up = (
                    self._lines.get(node) is not line or line not in node.lines
                )
                self._drop(node, line)
                if self._closed:
                    raise ConnectionAbortedError(
                        "the connection was aborted"
                    ) from None
                if is_given_up:
                    raise RefusedError(
                        Reason.TIER_SKIPPED,
                        "the node is left out",
                        contained=True,
                    ) from None
                if is_old and not isinstance(error, TimeoutError):
                    continue
                raise node.failed(error) if has_failed else error from None
            finally:
                line.is_busy = False
                if self._closed or not is_known:
                    self._drop(node, line)
            node.breaker.record_success()
            return done

    def _line(self, node: RedisNode) -> _NodeLine:
        line = self._lines.get(node)
        if line is not None and (
            line.made < node.trusted_since or line not in node.lines
        ):
            self._drop(node, line)
            line = None
        if line is None:
            line = self._lines[node] = _NodeLine(node.client.connection())
            node.lines.add(line)
        return line

    def _drop(self, node: RedisNode, line: _NodeLine) -> None:
        node.lines.discard(line)
        if self._lines.get(node) is line:
            del self._lines[node]
        line.connection.close()
