"""Neighbours: a read-only client over the `pagoda serve` of several machines. Nothing is ever
stored or removed there.

A lookup sends one request to each neighbour at the same time, and takes the longest leading run;
which neighbour has which key is remembered for the loads that follow. A neighbour that fails is
left out, and asked again in the background. With a directory, a lookup asks the directory first,
and then only the neighbours that it names.

    PeersClient       what all connections share: the neighbours, and which of them has which key
    Peer              one neighbour: whether it is used now
    PeersConnection   one connection to each neighbour, and one thread each for lookups
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Generic, NamedTuple, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pagoda.base.clock import Clock
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.oldest import drop_oldest
from pagoda.base.signal_safe_threads import Condition, Pool
from pagoda.base.urls import RemoteUrl
from pagoda.tiers.breaker import CircuitBreaker
from pagoda.tiers.remote.health import answering
from pagoda.tiers.remote.http import resolve
from pagoda.tiers.remote.pagoda_server import (
    PagodaServerClient,
    PagodaServerConnection,
)
from pagoda.tiers.remote.peer_directory import (
    PeerDirectory,
    PeerDirectoryConnection,
)
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    ServerError,
    StoreClient,
    StoreConnection,
    reason_of,
)

_MOST_PEERS = 8  # the most neighbours that are asked at once
# the most connections that are kept open while others are asked
_MOST_LINES = 4 * _MOST_PEERS
_MOST_FOUND = 1024  # neighbours that are known only from the directory
# after this share of a caller's time, a lookup no longer waits for a slow neighbour
_PATIENCE_SHARE = 0.5
# after eight wrong or missing values in a row, a neighbour is not asked for 30 seconds
_LIES = 8
_DISTRUST_SECONDS = 30.0
_MOST_KEYS = 1 << 17  # keys whose neighbours are remembered: a few MiB
_RESOLVE_SECONDS = 30.0  # between two lookups of the addresses of a name
_RESOLVE_PATIENCE_SECONDS = 5.0

_logger = guarded_logger("pagoda.tiers.remote")
_T = TypeVar("_T")

# asks one neighbour about the keys of a namespace, until a time
_Question: TypeAlias = Callable[
    [PagodaServerConnection, bytes, Sequence[bytes], float], _T
]


class PeerUrl(NamedTuple):
    """Where neighbours are: `http://:TOKEN@HOST:PORT`; `all_addresses`: one at each address of the
    host.

    `sends_token`: see PagodaServerClient.
    """

    url: str
    all_addresses: bool
    sends_token: bool = False


class Peer:
    """One neighbour: its client, its health, and the log of its failures. Thread-safe; compared by
    identity.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        is_found: bool = False,
        sends_token: bool = False,
    ) -> None:
        """`is_found`, `sends_token`: see PagodaServerClient."""
        self.client = PagodaServerClient(
            url, is_found=is_found, sends_token=sends_token
        )
        self.breaker = answering(clock)
        self.trust = CircuitBreaker(clock, _LIES, _DISTRUST_SECONDS)
        # how many lookups it has answered; the number of the last one whose answer was wrong
        self.answers = self._broken = 0
        self._log = RateLimitedLog(clock)

    @property
    def is_used(self) -> bool:
        """Whether callers wait for this neighbour."""
        return not self.breaker.is_open and not self.trust.resting

    @property
    def is_due(self) -> bool:
        """Whether it may be asked: it is used, or it is time to check whether it works again."""
        return not self.breaker.resting and not self.trust.resting

    def record_failure(self, error: Exception) -> Reason:
        """Count and log that it did not answer or refused; return the reason."""
        reason = reason_of(error)
        self.breaker.record_failure()
        self._log.warn(
            _logger,
            reason,
            f"{self.client.address}: {type(error).__name__}: {error}",
        )
        return reason

    def record_absent(self) -> None:
        """Count that it lacks a chunk that it claimed to have; once per lookup: it may have evicted
        the whole run.
        """
        if self._broken != self.answers:
            self._broken = self.answers
            self.record_lie("a chunk that it said it has is absent")

    def record_lie(self, what: str) -> None:
        """Count that it did not have a chunk that it claimed to have."""
        self.trust.record_failure()
        if self.trust.resting:
            text = (
                f"{self.client.address}: {what}, {_LIES} times: left out for "
                f"{_DISTRUST_SECONDS:g} s"
            )
            self._log.warn(_logger, Reason.FAILED_CHECK, text)


class PeersClient(StoreClient):
    """Neighbours as one store. Thread-safe; in a forked child it makes new connections.

    `directory`: it names which neighbours to ask; only those in `urls`, or any if there are none.
    `look_seconds`: how long a caller waits for a lookup.
    """

    name = "peers"
    read_only = True

    def __init__(
        self,
        urls: Sequence[PeerUrl],
        *,
        directory: PeerDirectory | None = None,
        look_seconds: float = 0.05,
        clock: Clock | None = None,
    ) -> None:
        """Connect to nothing yet. ConfigError: a token cannot be sent."""
        self._clock = clock or Clock()
        self.patience_seconds = look_seconds * _PATIENCE_SHARE
        self._peers = {
            each.url: Peer(each.url, self._clock, sends_token=each.sends_token)
            for each in urls
            if not each.all_addresses
        }
        most = _MOST_PEERS if directory is None else _MOST_FOUND
        self._names = [
            _PeerName(each, most, self._clock)
            for each in urls
            if each.all_addresses
        ]
        self.directory = (
            None
            if directory is None
            else _UsedDirectory(directory, bool(urls), self._clock)
        )
        addresses = [
            *(peer.client.address for peer in self._peers.values()),
            *(one.address for one in self._names),
        ]
        self.address = ", ".join(
            addresses if directory is None else [*addresses, directory.address]
        )
        # which neighbours have a key; the oldest key first
        self._holders: dict[bytes, tuple[Peer, ...]] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def connection(self) -> PeersConnection:
        """Return a new connection that is still to be opened."""
        return PeersConnection(self)

    def configured(self) -> list[Peer]:
        """Return the neighbours that the URLs name now."""
        return [
            *self._peers.values(),
            *(peer for name in self._names for peer in name.peers),
        ]

    def known(self) -> list[Peer]:
        """Return all neighbours that are known now."""
        return [
            *self.configured(),
            *(self.directory.found.values() if self.directory else ()),
        ]

    def peers(self) -> Sequence[Peer]:
        """Return the neighbours to ask, at most eight: those that the directory named last,
        otherwise the first.
        """
        return (self.directory and self.directory.named) or self.configured()[
            :_MOST_PEERS
        ]

    def resolve(self, until: float) -> None:
        """Resolve the names for which that is due; wait only for names that have no address yet."""
        for name in self._names:
            name.resolve(until)

    # ---- which neighbour has which key

    def record_answers(
        self, keys: Sequence[bytes], answers: Mapping[Peer, int]
    ) -> None:
        """Remember how many leading keys each neighbour has, and keep what is known of those that
        did not answer.
        """
        begin = 0
        for peer in answers:
            peer.answers += 1
        for end in sorted(set(answers.values())):
            holders = tuple(
                peer for peer, found in answers.items() if found >= end
            )
            with self._lock:
                for key in keys[begin:end]:
                    others = self._holders.pop(key, ())
                    silent = tuple(peer for peer in others if peer not in answers)
                    self._holders[key] = holders + silent
            begin = end
        with self._lock:
            drop_oldest(self._holders, _MOST_KEYS)

    def record_each(
        self, keys: Sequence[bytes], answers: Mapping[Peer, Sequence[bool]]
    ) -> None:
        """Remember which keys each neighbour has, and keep what is known of those that did not
        answer.
        """
        for peer in answers:
            peer.answers += 1
        with self._lock:
            for at, key in enumerate(keys):
                holders = tuple(
                    peer for peer, here in answers.items() if here[at]
                )
                if holders:
                    others = self._holders.pop(key, ())
                    silent = tuple(peer for peer in others if peer not in answers)
                    self._holders[key] = holders + silent
            drop_oldest(self._holders, _MOST_KEYS)

    def holders(self, key: bytes) -> tuple[list[Peer], list[Peer]]:
        """Return the neighbours that are known to have a key, in an order that depends on the key;
        and all others.

        One of the others may have answered late, or may not have been asked.
        """
        known = self._holders.get(key, ())
        found = [peer for peer in known if peer.is_used]
        first = key[-1] % len(found) if found else 0
        rest = [
            peer for peer in self.peers() if peer.is_used and peer not in known
        ]
        return found[first:] + found[:first], rest

    def forget(self, key: bytes, peer: Peer) -> None:
        """Remember that a neighbour lacks a key."""
        with self._lock:
            if peer in self._holders.get(key, ()):
                left = tuple(
                    other for other in self._holders[key] if other is not peer
                )
                self._holders[key] = left
                if not left:
                    del self._holders[key]


class _UsedDirectory:
    """The directory as its client sees it: its health, the neighbours known only from it, and those
    it named last.
    """

    def __init__(
        self, directory: PeerDirectory, is_limited: bool, clock: Clock
    ) -> None:
        """`is_limited`: only neighbours that are configured are asked."""
        self.connection = directory.connection
        self.breaker = answering(clock)
        self.found: dict[str, Peer] = {}
        self.named: Sequence[Peer] = ()
        self._address = directory.address
        self._is_limited = is_limited
        self._clock = clock
        self._log = RateLimitedLog(clock)

    def choose(
        self, urls: Sequence[str], configured: Sequence[Peer]
    ) -> Sequence[Peer]:
        """Return the first eight of these machines that may be asked, healthy ones first."""
        known = {peer.client.address: peer for peer in configured}
        peers = [
            known.get(url) if self._is_limited else self._peer(url)
            for url in urls
        ]
        ordered = sorted(
            (peer for peer in peers if peer is not None),
            key=lambda peer: not peer.is_used,
        )
        self.named = ordered[:_MOST_PEERS] or self.named
        self.breaker.record_success()
        return ordered[:_MOST_PEERS]

    def _peer(self, url: str) -> Peer | None:
        peer = self.found.get(url)
        if peer is None and not _is_own(urlsplit(url).hostname or ""):
            if len(self.found) >= _MOST_FOUND:
                self.found = {}
            peer = self.found[url] = Peer(url, self._clock, is_found=True)
        return peer

    def record_failure(self, error: Exception) -> None:
        """Count and log that it did not answer; lookups then ask the neighbours that it named
        last.
        """
        self.breaker.record_failure()
        text = f"{type(error).__name__}: {error}: the neighbours that it named last are asked"
        self._log.warn(_logger, reason_of(error), f"{self._address}: {text}")


class _PeerName:
    """A host name with a neighbour at each of its addresses, such as a headless service of
    Kubernetes. Thread-safe.
    """

    def __init__(self, named: PeerUrl, most: int, clock: Clock) -> None:
        """`most`: how many addresses are used."""
        self.peers: tuple[Peer, ...] = ()
        self._url = RemoteUrl.of(named.url)
        self._port = self._url.parts.port or 80
        self._most = most
        self._clock = clock
        self._sends_token = named.sends_token
        self.address = f"{PagodaServerClient(named.url).address}?dns=all"
        self._pool = Pool(1, "pagoda-peers-dns")
        self._due = 0.0  # time.monotonic()
        self._log = RateLimitedLog(clock)

    def resolve(self, until: float) -> None:
        """Resolve the name if that is due; wait only the first time."""
        if time.monotonic() < self._due or self._pool.under_way:
            return
        try:
            done = self._pool.submit(self._resolve)
            if not self._due:
                done.exception(max(0.0, until - time.monotonic()))
        except (RuntimeError, TimeoutError):
            # no thread can be started, or it takes too long
            return

    def _resolve(self) -> None:
        try:
            found = resolve(
                self._url.parts.hostname or "",
                self._port,
                time.monotonic() + _RESOLVE_PATIENCE_SECONDS,
            )
        except OSError as error:
            self._log.warn(
                _logger,
                Reason.IO_ERROR,
                f"{self.address}: {error}: the known addresses are kept",
            )
        else:
            others = {
                str(address[0])
                for *_, address in found
                if not _is_own(str(address[0]))
            }
            known = {peer.client.address: peer for peer in self.peers}
            new = [
                Peer(
                    self._url_of(each), self._clock, sends_token=self._sends_token
                )
                for each in self._nearest(others)
            ]
            self.peers = tuple(
                known.get(peer.client.address, peer) for peer in new
            )
        self._due = time.monotonic() + _RESOLVE_SECONDS

    def _nearest(self, addresses: set[str]) -> list[str]:
        """Return as many as are used; other machines get others, so that not all ask the same
        ones.
        """
        own = socket.gethostname()
        ordered = sorted(
            addresses,
            key=lambda each: hashlib.sha256(f"{own} {each}".encode()).digest(),
        )
        if len(ordered) > self._most:
            text = (
                f"{self.address}: {len(ordered)} addresses, of which {self._most} are asked; "
                "set lookup for more"
            )
            self._log.warn(_logger, Reason.TIER_SKIPPED, text)
        return sorted(ordered[: self._most])

    def _url_of(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return self._url.at(f"{host}:{self._port}")


class PeersConnection(StoreConnection):
    """A connection to each neighbour; see StoreConnection. For one thread at a time, except
    `abort`.
    """

    def __init__(self, client: PeersClient) -> None:
        self._client = client
        self._lines: dict[Peer, _PeerLine] = {}
        self._directory: PeerDirectoryConnection | None = None
        self._pool = Pool(_MOST_PEERS, "pagoda-peers")
        self._changed = Condition()  # notified when a lookup changes
        # the neighbour whose value was returned last
        self._served: Peer | None = None
        self._closed = False

    def open(self, until: float) -> Self:
        """Connect to nothing yet: a neighbour is connected to when it is asked."""
        return self

    def ping(self, until: float) -> None:
        """Return if a neighbour answers, or if there are no neighbours."""
        self.find(bytes(32), [bytes(32)], until)

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return the longest leading run that a neighbour has: one request to each, all at once.

        When one neighbour has answered, slow ones are not waited for; a late answer is remembered
        for loads. If none
        answers: RefusedError if one refuses, otherwise OSError.
        """
        look = _Look(
            keys, PagodaServerConnection.find, self._client.record_answers
        )
        return max(self._answers(look, namespace, until).values(), default=0)

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys some neighbour has, also behind absent ones, as `find` does."""
        look = _Look(
            keys, PagodaServerConnection.present, self._client.record_each
        )
        answers = self._answers(look, namespace, until)
        if not answers:
            return [False] * len(keys)
        return list(map(any, zip(*answers.values(), strict=True)))

    def _answers(
        self, look: _Look[_T], namespace: bytes, until: float
    ) -> dict[Peer, _T]:
        """Ask all neighbours at once, and return the answers; empty if there is nobody to ask."""
        keys = look.keys
        patience = min(until, time.monotonic() + self._client.patience_seconds)
        self._client.resolve(patience)
        asked = self._whom_to_ask(keys, patience)
        lines = self._free_lines(asked)
        # the others are asked only to check whether they work again
        used = {line.peer for line in lines if line.peer.is_used}
        look.open |= used or {line.peer for line in lines}
        for line in lines:
            line.looks = True
            try:
                self._pool.submit(self._look, line, look, namespace, until)
            except RuntimeError as error:  # no thread can be started
                line.looks = False
                raise OSError(str(error)) from None
        with self._changed:
            self._changed.wait_for(
                lambda: look.is_complete, patience - time.monotonic()
            )
            look.is_late = True
            self._changed.wait_for(
                lambda: look.is_complete, until - time.monotonic()
            )
            answers = dict(look.answers)
            look.is_over = True
        look.record(keys, answers)
        if answers:
            return answers
        if look.open:
            raise TimeoutError("no neighbour answered in time")
        if not asked:
            return {}
        for peer, refusal in list(look.refusals.items()):
            said = f"{refusal} ({peer.client.address})"
            raise (
                RefusedError(refusal.reason, said)
                if isinstance(refusal, RefusedError)
                else ServerError(said)
            )
        raise ConnectionError("no neighbour answers")

    def _whom_to_ask(self, keys: Sequence[bytes], until: float) -> Sequence[Peer]:
        """Return the neighbours; with a directory, those that it names now. OSError: it fails, and
        none are known.
        """
        directory = self._client.directory
        if directory is None:
            return self._client.peers()
        try:
            if directory.breaker.resting:
                raise ConnectionError(
                    "the directory of neighbours does not answer"
                )
            if self._directory is None:
                self._directory = directory.connection()
                if self._closed:
                    self._directory.abort()
                self._directory.open(until)
            return directory.choose(
                self._directory.machines(keys, until), self._client.configured()
            )
        except (OSError, RefusedError) as error:
            if self._directory is not None:
                self._directory.close()
                self._directory = None
                if not self._closed:
                    directory.record_failure(error)
            if not self._client.peers():
                raise
        return self._client.peers()

    def _free_lines(self, peers: Sequence[Peer]) -> list[_PeerLine]:
        """Return the connections to those of these neighbours that may be asked now; drop those no
        longer needed.
        """
        self._drop_lines(
            set(peers if len(self._lines) > _MOST_LINES else self._client.known())
        )
        lines = [self._line(peer) for peer in peers if peer.is_due]
        return [line for line in lines if not line.looks]

    def _drop_lines(self, kept: Set[Peer]) -> None:
        for peer in [
            peer
            for peer, line in self._lines.items()
            if peer not in kept and not line.looks
        ]:
            self._lines.pop(peer).connection.close()

    def _line(self, peer: Peer) -> _PeerLine:
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _PeerLine(peer, peer.client.connection())
        if self._closed:
            line.connection.abort()
        return line

    def _look(
        self, line: _PeerLine, look: _Look[_T], namespace: bytes, until: float
    ) -> None:
        """Ask one neighbour, on a thread of the pool."""
        found: _T | None = None
        try:
            found = look.question(line.connection, namespace, look.keys, until)
            line.peer.breaker.record_success()
        except Exception as error:  # noqa: BLE001
            # a background thread: nobody else sees it
            if isinstance(error, RefusedError | ServerError):
                look.refusals[line.peer] = error
            if not self._closed:
                line.peer.record_failure(error)
        finally:
            line.looks = False
            if self._closed:
                line.connection.close()
            with self._changed:
                look.open.discard(line.peer)
                late = look.is_over
                if found is not None and not late:
                    look.answers[line.peer] = found
                if look.is_complete:
                    self._changed.notify_all()
        if found and late:
            look.record(look.keys, {line.peer: found})

    def get(self, request: GetRequest, until: float) -> int | Reason | None:
        """Fill `page` and the result of `destination` from a neighbour that has the chunk, or from
        the next one.

        An error of one neighbour is a miss with a reason, not a failure of all neighbours.
        """
        # nothing was wrong with the last value that it sent
        if self._served is not None:
            self._served.trust.record_success()
            self._served = None
        holders, rest = self._client.holders(request.key)
        lines = [
            line for line in map(self._line, holders + rest) if not line.looks
        ]
        reason = (
            None if lines or not self._client.peers() else Reason.TIER_SKIPPED
        )
        for tried, line in enumerate(lines):
            left = until - time.monotonic()
            if left <= 0:
                break
            share = until - left + left / max(1, len(holders) - tried)
            try:
                count = line.connection.get(request, share)
            except RefusedError as refusal:
                reason = refusal.reason
                if reason is Reason.FAILED_CHECK:
                    line.peer.record_lie(
                        "a value is not the chunk that was asked for"
                    )
                else:
                    line.peer.record_failure(refusal)
            except OSError as error:
                if self._closed:
                    raise
                reason = line.peer.record_failure(error)
            else:
                if count is not None:
                    line.peer.breaker.record_success()
                    self._served = line.peer
                    return count
                if line.peer in holders:
                    line.peer.record_absent()
            self._client.forget(request.key, line.peer)
        return reason

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove nothing. If the value that was returned last was not the chunk, count that."""
        if self._served is not None:
            self._served.record_lie("a value is not the chunk that was asked for")
            for key in keys:
                self._client.forget(key, self._served)
            self._served = None
        return 0

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Return which leading keys are present; the servers count the request as a use."""
        found = self.find(namespace, keys, until)
        return [True] * found + [False] * (len(keys) - found)

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Refuse: neighbours are only read."""
        raise RefusedError(Reason.NOT_ADMITTED, "neighbours are only read")

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Refuse: neighbours are only read."""
        raise RefusedError(Reason.NOT_ADMITTED, "neighbours are only read")

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove nothing."""
        return 0

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return nothing: each neighbour lists its own."""
        return {}

    def abort(self) -> None:
        """Make all calls that wait in this connection fail soon. From any thread."""
        self._closed = True
        if (directory := self._directory) is not None:
            directory.abort()
        for line in list(self._lines.values()):
            line.connection.abort()

    def close(self) -> None:
        """Close the connections; never waits. A running lookup closes its connections when it ends.
        Idempotent.
        """
        self.abort()
        if self._directory is not None:
            self._directory.close()
        for line in self._lines.values():
            if not line.looks:
                line.connection.close()
        self._pool.shutdown(wait=False)


class _PeerLine:
    """The connection to one neighbour. `looks`: a lookup uses it on another thread."""

    def __init__(self, peer: Peer, connection: PagodaServerConnection) -> None:
        self.peer = peer
        self.connection = connection
        self.looks = False


class _Look(Generic[_T]):
    """One lookup: what was asked, the answers, and which neighbours must still answer. Used with
    the lock.

    An answer is the number of leading keys, or for each key whether it is there; `record` remembers
    answers for loads.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        question: _Question[_T],
        record: Callable[[Sequence[bytes], Mapping[Peer, _T]], None],
    ) -> None:
        self.keys = keys
        self.question = question
        self.record = record
        self.answers: dict[Peer, _T] = {}
        self.refusals: dict[
            Peer, RefusedError | ServerError
        ] = {}  # complete when no neighbour must still answer
        self.open: set[Peer] = set()
        # if there is an answer, do not wait for the other neighbours
        self.is_late = False
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether the lookup need not wait any longer."""
        return (
            not self.open
            or (self.is_late and bool(self.answers))
            or any(map(self._is_whole, self.answers.values()))
        )

    def _is_whole(self, answer: _T) -> bool:
        return (
            all(answer) if isinstance(answer, list) else answer == len(self.keys)
        )


def _is_own(address: str) -> bool:
    """Return whether an address is one of this machine, except loopback, where another server may
    listen.
    """
    with_zone = address.partition("%")[0]
    try:
        if ipaddress.ip_address(with_zone).is_loopback:
            return False
    except ValueError:  # a host name
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
