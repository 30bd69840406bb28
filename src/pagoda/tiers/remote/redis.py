"""Redis (or Valkey) as a remote store: one hash per chunk, written under another name and renamed
when complete.
"""

from __future__ import annotations

import heapq
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from itertools import compress
from typing import ClassVar, NamedTuple, Self, TypedDict, Unpack

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Answer
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote.leading_run import EXACT_KEYS, leading_run
from pagoda.tiers.remote.redis_address import RedisAddress, SentinelAddress
from pagoda.tiers.remote.redis_config_check import QUESTIONS, warnings
from pagoda.tiers.remote.redis_ttl import (
    LIFE_SECONDS,
    ChunkLives,
    ReuseAges,
    count_of,
    settings,
)
from pagoda.tiers.remote.resp import (
    NUMBER,
    ErrorReply,
    Reply,
    ReplyShape,
    RespConnection,
    command,
    command_parts,
)
from pagoda.tiers.remote.socket_keepalive import abort
from pagoda.tiers.remote.store_client import (
    NAME_FORMAT,
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    StoreClient,
    StoreConnection,
    Usage,
)

# size of a field of a hash. One value of many MiB would cost Redis twice the time. Fields of 1 MiB
# would cost a quarter more memory: with Redis's header, its allocator rounds them up to 1.25 MiB
PIECE_BYTES = (1 << 20) - 4096
_SMALL_BYTES = 1 << 20  # chunks up to this are written in one transaction
_WRITE_PIECES = 64  # the pieces that are written before their replies are read
# the pieces that are requested at once; more would only fill the server's buffers
_READ_PIECES = 4
_SCAN_NAMES = 1000
_NAMESPACES = 1 << 16
# replies to writing commands and transactions
_SHORT = ReplyShape(b":+$*", items=8, depth=1)
# replies to SCAN; our names are shorter
_SCANNED = ReplyShape(b"$*", 512, items=1 << 14, depth=2)
# replies to the first commands of a connection
_OPENED = ReplyShape(b":+$", 1 << 16)
# SCAN may return more than it was asked for
_SETUP = ReplyShape(b"$*", 1 << 16, items=1 << 10, depth=2)
_AGE = ReplyShape(b":$")  # replies to OBJECT; nil for an absent name
_PAGE = ReplyShape(b"$", HEADER_BYTES)
# how long a server's settings are believed: people and failovers change them
_RULES_SECONDS = 60.0
# the time for which it is remembered that a chunk was asked for once
GHOST_SECONDS = 3600.0
# the time that a draft or a claim stays after the deadline of its writer
_DRAFT_SECONDS = 2.0
_RELEASE = b"return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('UNLINK', KEYS[1]) or 0"


class RedirectError(RefusedError):
    """Another node of a cluster has the key. `has_moved`: for good; else it is being moved, perhaps
    to `target`.
    """

    def __init__(self, error: ErrorReply) -> None:
        words = error.text.split(" ")
        place = words[2] if len(words) == 3 else "host:port"
        advice = (
            f"this is a node of a Redis Cluster: write redis+cluster://{place}"
        )
        super().__init__(Reason.IO_ERROR, f"{advice} ({error.text})")
        self.has_moved = error.code == "MOVED"
        self.target = words[2] if error.code == "ASK" and len(words) == 3 else ""


class RedisOptions(TypedDict, total=False):
    """The options of a client of Redis: see RedisClient."""

    prefix: str  # "pagoda" unless given
    ttl_seconds: float  # LIFE_SECONDS unless given
    ranks: bool  # False unless given
    second_sight: bool  # False unless given
    name: str  # the name of the tier: "redis" unless given
    password_file: str  # none unless given


class RedisConnection(StoreConnection):
    """One connection to a Redis; see StoreConnection. For one thread at a time, except `abort`."""

    def __init__(
        self,
        address: RedisAddress,
        names: RedisNames,
        ttl_seconds: float = LIFE_SECONDS,
        ranks: bool = False,
        second_sight: bool = False,
        owner: bytes = b"1",
        ages: ReuseAges | None = None,
    ) -> None:
        self._second_sight = second_sight
        self._owner = owner
        self._ages = ages or ReuseAges()
        self._address = address
        self._connected: Future[socket.socket] = Answer()
        self._names = names
        self._ttl_seconds = ttl_seconds
        self._ranks = ranks

    def open(self, until: float) -> Self:
        """Connect, authenticate, select the database, check that it answers, and ask how it evicts.
        One round trip.

        How it evicts is asked again once a minute. OSError; RefusedError: the user may not read.
        """
        self._resp = RespConnection(self._address.connect(self._connected, until))
        commands = self._address.login()
        if self._address.db:
            commands.append(command(b"SELECT", b"%d" % self._address.db))
        replies = self._ask_for_rules([*commands, self._probe()], until)
        self._checked(replies)
        return self

    def _ask_for_rules(
        self, commands: Sequence[bytes], until: float
    ) -> list[Reply]:
        """Ask how the server evicts and what the user may do with lives, after `commands`; return
        their replies.
        """
        probe = self._names.probe
        rules = [
            command(b"INFO", b"memory"),
            command(b"PTTL", probe),
            command(b"PEXPIRE", probe, b"1", b"GT"),
        ]
        *replies, info, remaining, extended = self._replies_here(
            [*commands, *rules], until, _OPENED
        )
        self._lives = ChunkLives.of_server(
            self._ttl_seconds, self._ages, info, remaining, extended, self._ranks
        )
        self._rules_end = time.monotonic() + _RULES_SECONDS
        return replies

    def _renew_rules(self, until: float) -> None:
        if time.monotonic() >= self._rules_end:
            self._ask_for_rules([], until)

    def keeps_runs(self, until: float) -> bool:
        """Return whether the server has the mark that new runs are kept together: see
        RedisPoolClient.
        """
        return self._execute_here(
            [command(b"EXISTS", self._names.runs_mark)], until, NUMBER
        ) == [1]

    def is_empty(self, until: float) -> bool:
        """Return whether the database has no value at all, of whatever program."""
        (info,) = self._execute_here(
            [command(b"INFO", b"keyspace")], until, _OPENED
        )
        return isinstance(info, bytes) and b"db%d:" % self._address.db not in info

    def mark_runs(self, until: float) -> None:
        """Set the mark that new runs are kept together, for all machines. Never expires."""
        self._execute_here(
            [command(b"SET", self._names.runs_mark, b"1")], until, _SHORT
        )

    def ping(self, until: float) -> None:
        """Return if our names can be read; else raise."""
        self._execute_here([self._probe()], until, NUMBER)

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys are present: exact for up to 512 keys, which take one round
        trip.

        Of more keys, 16 positions are asked for first (up to 8192 keys: 2 round trips): see
        `leading_run`.
        """
        return leading_run(
            keys,
            lambda some: self.present(namespace, some, until),
            exact=EXACT_KEYS,
        )

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys are present; changes nothing. One round trip."""
        names = self._names.chunks(namespace, keys)
        replies = self._execute(
            [command(b"EXISTS", name) for name in names], until
        )
        return [reply == 1 for reply in replies]

    def answer(self, question: bytes, count: int, until: float) -> list[bool]:
        """Return which of the `count` chunks of a question (`RedisNames.question`) are present. One
        round trip.

        For a server that is no node of a cluster.
        """
        self._send([question], count, until)
        found = self._resp.read_bits(count, until)
        if isinstance(found, ErrorReply):
            raise self._refusal(found)
        return found

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Update recency and extend lives; return which keys are present. One round trip, three if
        some are.

        HLEN counts as a use and, unlike TOUCH, is among the commands that a writer needs anyway. A
        name that is not a hash is not a chunk. Writers ask about new prompts, so lives are only
        asked for chunks that are present.
        """
        self._renew_rules(until)
        lives = self._lives
        names = self._names.chunks(namespace, keys)
        replies = self._replies(
            [command(b"HLEN", name) for name in names], until, NUMBER
        )
        present = [fields not in (0, None) for fields in self._of_hashes(replies)]
        used = list(
            compress(zip(names, ranks or [0] * len(keys), strict=True), present)
        )
        commands = [lives.used(name, rank) for name, rank in used]
        left = iter(
            self._execute([each for use in commands for each in use], until)
        )
        short: list[bytes] = []
        for (name, rank), use in zip(used, commands, strict=True):
            remaining = [next(left) for _ in use]
            if lives.learn(remaining, rank):
                short.append(lives.extend(name, rank))
        if short:
            self._execute(short, until)
        return present

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Ask for chunks and claim those that are absent. Claims expire: others can send what a
        dead writer did not.

        One round trip if all are present, else up to four. With second sight one more, and only a
        chunk that was asked for before is claimed.
        """
        seen = (
            self.seen(namespace, keys, until)
            if self._second_sight
            else [True] * len(keys)
        )
        asked = self._names.chunks(namespace, compress(keys, seen))
        claims = iter(self._claim(asked, until) if asked else ())
        return [next(claims) if before else PutResult.UNSEEN for before in seen]

    def seen(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which chunks are present or were asked for before, by any machine; remember all as
        asked for.
        """
        names = self._names.chunks(namespace, keys)
        life = self._lives.outlasts(b"%d" % int(GHOST_SECONDS * 1000))
        commands = [command(b"EXISTS", name) for name in names]
        commands += [
            command(b"SET", name + b":g", b"1", b"NX", b"PX", life)
            for name in names
        ]
        replies = self._execute(commands, until, _SHORT)
        return [
            present == 1 or new is None
            for present, new in zip(replies, replies[len(names) :], strict=False)
        ]

    def _claim(
        self, names: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Claim absent chunks, and ask again for those that were claimed here: they may have been
        stored in between.

        Most chunks that many machines compute are present or claimed by others at this point, which
        costs a short command or two. A claim on a chunk that is present is given back without
        checking its owner, since a claim lives for seconds. If this machine slept longer, another
        machine's claim is lost and a chunk is sent twice.
        """

        def ask(numbers: Iterable[int]) -> dict[int, Reply]:
            asked = list(numbers)
            replies = self._replies(
                [command(b"EXISTS", names[at]) for at in asked], until, NUMBER
            )
            return dict(zip(asked, replies, strict=True))

        found = ask(range(len(names)))
        life = _draft_life(until)
        absent = [at for at, there in found.items() if there != 1]
        claims = [
            command(b"SET", names[at] + b":w", self._owner, b"NX", b"PX", life)
            for at in absent
        ]
        claimed = dict(
            zip(absent, self._replies(claims, until, _SHORT), strict=True)
        )
        again = ask(at for at in absent if claimed[at] is not None)
        here = {at for at, there in (found | again).items() if there == 1}
        replies = [
            reply
            for at in again.keys() - here
            for reply in (again[at], claimed[at])
        ]
        errors = [reply for reply in replies if isinstance(reply, ErrorReply)]
        unused = [
            at for at in again if claimed[at] == b"OK" and (errors or at in here)
        ]
        self._replies(
            [command(b"UNLINK", names[at] + b":w") for at in unused],
            until,
            NUMBER,
        )
        if errors:
            raise self._refusal(errors[0])
        results: list[PutResult | None] = []
        for at in found:
            if at in here:
                results.append(PutResult.PRESENT)
            else:
                results.append(None if at in again else PutResult.BUSY)
        return results

    def release(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> None:
        """End the claims of this process that no put has ended. One round trip."""
        self._drop(
            until,
            claims=[name + b":w" for name in self._names.chunks(namespace, keys)],
        )

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Write a draft, call `is_valid`, rename the draft: one or two round trips, by size. Ends
        the claim.

        A draft has an expiry time from its first byte on, so the draft of a dead writer disappears.
        """
        self._renew_rules(until)
        result = self._put(request, until)
        if result is PutResult.PRESENT:
            with suppress(RefusedError):
                self.touch(
                    request.namespace, [request.key], until, [request.rank]
                )
        return result

    def _put(self, request: PutRequest, until: float) -> PutResult:
        name = self._names.chunk(request.namespace, request.key)
        fields = _fields(request.page, request.stored)
        is_valid = request.is_valid
        rank = request.rank
        claim = name + b":w"
        draft = name + b":w:" + os.urandom(16).hex().encode()
        with self._drop_on_refusal(draft, claim, until):
            if request.stored.nbytes <= _SMALL_BYTES:
                result = self._put_in_one(
                    name, draft, claim, fields, is_valid, until, rank
                )
            else:
                # if Redis evicts by remaining life, a draft with a short life would be evicted
                # first
                self._write_draft(
                    draft, fields, self._lives.outlasts(_draft_life(until)), until
                )
                result = (
                    self._publish(draft, name, claim, until, rank)
                    if is_valid()
                    else PutResult.STALE
                )
        if result is PutResult.STALE:
            self._drop(until, [draft], [claim])
        return result

    @contextmanager
    def _drop_on_refusal(
        self, draft: bytes, claim: bytes, until: float
    ) -> Iterator[None]:
        try:
            yield
        except RefusedError:
            self._drop(until, [draft], [claim])
            raise

    def _write_draft(
        self, draft: bytes, fields: list[_Field], life: bytes, until: float
    ) -> None:
        """Write all fields, one transaction per piece: a single command could leave a draft that
        never expires.
        """
        end = command(b"PEXPIRE", draft, life) + command(b"EXEC")
        for start in range(0, len(fields), _WRITE_PIECES):
            parts: list[bytes | memoryview] = []
            batch = fields[start : start + _WRITE_PIECES]
            for field, piece in batch:
                parts += [
                    command(b"MULTI"),
                    *command_parts(b"HSET", draft, field, piece),
                    end,
                ]
            parts.append(command(b"HLEN", draft))
            self._send(parts, 4 * len(batch) + 1, until)
            if self._read_replies(4 * len(batch) + 1, until, _SHORT)[
                -1
            ] != start + len(batch):
                text = "the chunk was evicted or removed, or expired, before it was complete"
                # with a new connection we ask again how the server evicts, which may have changed
                raise RefusedError(Reason.FULL, text, reconnect=True)

    def _publish(
        self, draft: bytes, name: bytes, claim: bytes, until: float, rank: int
    ) -> PutResult:
        commands = [
            command(b"MULTI"),
            *self._rename_commands(draft, name, claim, rank),
            command(b"EXEC"),
        ]
        return _rename_result(self._execute_here(commands, until, _SHORT))

    def _put_in_one(
        self,
        name: bytes,
        draft: bytes,
        claim: bytes,
        fields: list[_Field],
        is_valid: Callable[[], bool],
        until: float,
        rank: int,
    ) -> PutResult:
        """Write one transaction, and end it only if `is_valid`. Its end decides which of two
        writers is first.
        """
        words = [word for field in fields for word in field]
        self._send(
            [command(b"MULTI"), *command_parts(b"HSET", draft, *words)], 2, until
        )
        rest = [command(b"DISCARD")]
        if good := is_valid():
            rest = [
                *self._rename_commands(draft, name, claim, rank),
                command(b"EXEC"),
            ]
        self._resp.send([b"".join(rest)], len(rest), until)
        replies = self._read_replies(2 + len(rest), until, _SHORT)
        return _rename_result(replies) if good else PutResult.STALE

    def _rename_commands(
        self, draft: bytes, name: bytes, claim: bytes, rank: int
    ) -> list[bytes]:
        """Return the commands that turn a draft into a chunk. Redis decides which writer is
        first.
        """
        life = self._lives.begin(draft, rank)
        return [
            life,
            command(b"RENAMENX", draft, name),
            command(b"UNLINK", draft, claim),
        ]

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination`; one round trip: the first pieces are
        requested with the page.

        A longer life for the chunk is requested with them.
        """
        self._renew_rules(until)
        self._resp.check_usable()
        name = self._names.chunk(request.namespace, request.key)
        page = request.page
        rank = request.rank
        use = self._lives.used(name, rank)
        self._request(
            use, name, [b"h", *_field_names(range(_READ_PIECES))], until
        )
        # an error reply to these does not prevent reading the chunk
        remaining = [self._resp.read_reply(until, NUMBER) for _ in use]
        found = self._resp.read_into(page.data, until)
        buffer = request.destination() if found == page.nbytes else None
        pieces = [] if buffer is None else _pieces(buffer.data)
        received = self._receive(name, pieces, until)
        for reply in (found, *received):
            if isinstance(reply, ErrorReply):
                raise self._refusal(reply)
        sizes = [piece.nbytes for piece in pieces]
        if buffer is not None and received == sizes + [None] * (
            len(received) - len(sizes)
        ):
            if self._lives.learn(remaining, rank):
                # the chunk has been read: the next call reports what is wrong
                with suppress(OSError, RefusedError):
                    self._replies([self._lives.extend(name, rank)], until, NUMBER)
            return buffer.nbytes
        is_missing = None in (found, *received[: len(sizes)])
        if is_missing and self._execute([command(b"EXISTS", name)], until) == [0]:
            return None  # it was absent, or was removed while it was read
        raise RefusedError(
            Reason.FAILED_CHECK, "the value is not the requested chunk"
        )

    def _receive(
        self, name: bytes, pieces: list[memoryview], until: float
    ) -> list[int | ErrorReply | None]:
        """Read the pieces that were requested with the page, and the rest; stop requesting when one
        is wrong.
        """
        nowhere = memoryview(bytearray())
        received: list[int | ErrorReply | None] = []
        requested = _READ_PIECES
        right = True
        while len(received) < requested:
            piece = (
                pieces[len(received)] if len(received) < len(pieces) else nowhere
            )
            received.append(self._resp.read_into(piece, until))
            right = right and received[-1] == piece.nbytes
            if right and len(received) + _READ_PIECES // 2 == requested < len(
                pieces
            ):
                more = range(
                    requested, min(len(pieces), requested + _READ_PIECES // 2)
                )
                self._request([], name, _field_names(more), until)
                requested = more.stop
        return received

    def _request(
        self, use: list[bytes], name: bytes, fields: list[bytes], until: float
    ) -> None:
        self._resp.send_commands(
            [*use, *(command(b"HGET", name, field) for field in fields)], until
        )

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove chunks; return how many were present."""
        return self._unlink(self._names.chunks(namespace, keys), until)

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all chunks of one namespace, or all of ours, with their drafts and claims; return
        how many chunks.
        """
        removed = 0
        for names in self._scan(namespace, deadline):
            until = deadline.next_step()
            removed += self._unlink(
                [name.text for name in names if name.is_chunk], until
            )
            self._unlink(
                [name.text for name in names if not name.is_chunk], until
            )
        return removed

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return the number of chunks of each namespace. A name that SCAN returns twice counts
        twice.
        """
        chunks: Counter[bytes] = Counter()
        for names in self._scan(None, deadline):
            chunks.update(name.namespace for name in names if name.is_chunk)
            if len(chunks) > _NAMESPACES:
                raise ConnectionError(f"more than {_NAMESPACES} namespaces")
        return chunks

    def most_used(self, most: int, deadline: ListingDeadline) -> list[ChunkUse]:
        """Return up to `most` chunks, those that were used last first. Lists all names.

        Redis with an LFU policy keeps no times of use; then the chunks that were used most often
        come first. Reads by this connection do not count as uses from now on (since Redis 7.2).
        """
        self._replies_here(
            [command(b"CLIENT", b"NO-TOUCH", b"ON")], deadline.next_step(), _SHORT
        )
        return heapq.nsmallest(most, self._uses(deadline))

    def _uses(self, deadline: ListingDeadline) -> Iterator[ChunkUse]:
        for names in self._scan(None, deadline):
            chunks = [name for name in names if name.is_chunk]
            until = deadline.next_step()
            asked = [
                command(b"OBJECT", b"IDLETIME", name.text) for name in chunks
            ]
            replies = self._replies(asked, until, _AGE)
            sign = 1
            if any(
                isinstance(reply, ErrorReply) and "LFU" in reply.text
                for reply in replies
            ):
                asked = [
                    command(b"OBJECT", b"FREQ", name.text) for name in chunks
                ]
                replies = self._replies(asked, until, _AGE)
                sign = -1
            for name, reply in zip(chunks, self._checked(replies), strict=True):
                if isinstance(reply, int):
                    yield ChunkUse(sign * reply, name.namespace, name.key)

    def headers(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> dict[bytes, bytes]:
        """Return the header pages of the chunks that are present. One round trip."""
        names = self._names.chunks(namespace, keys)
        replies = self._replies(
            [command(b"HGET", name, b"h") for name in names], until, _PAGE
        )
        return {
            key: page
            for key, page in zip(keys, self._of_hashes(replies), strict=True)
            if isinstance(page, bytes)
        }

    def usage(self, until: float) -> Usage:
        """Return the memory of the whole server, its `maxmemory`, and what is wrong with its
        configuration.
        """
        replies = self._replies_here(QUESTIONS, until, _SETUP)
        self._checked(replies[:1])
        said = settings(replies[0])
        used, limit = (
            count_of(said, name) or None for name in ("used_memory", "maxmemory")
        )
        return Usage(
            used,
            limit,
            warnings(replies, self._lives, self._ranks, self._address.db),
        )

    def abort(self) -> None:
        """Make a call that waits in this connection fail soon with an OSError. From any thread."""
        try:
            self._connected.set_exception(
                ConnectionAbortedError("the connection was aborted")
            )
        except InvalidStateError:
            # the connection was already made, or has failed
            with suppress(OSError, CancelledError):
                abort(self._connected.result())

    def close(self) -> None:
        """Close the connection; never waits. Idempotent."""
        self.abort()
        with suppress(OSError, CancelledError):
            self._connected.result().close()

    def _scan(
        self, namespace: bytes | None, deadline: ListingDeadline
    ) -> Iterator[list[_Name]]:
        """Yield our names, in lists; a few may come twice."""
        words = (
            b"MATCH",
            self._names.pattern(namespace),
            b"COUNT",
            b"%d" % _SCAN_NAMES,
        )
        cursor = b"0"
        while True:
            (reply,) = self._execute(
                [command(b"SCAN", cursor, *words)], deadline.next_step(), _SCANNED
            )
            if (
                not isinstance(reply, list)
                or len(reply) != 2
                or not isinstance(reply[1], list)
            ):
                raise ConnectionError(
                    "the reply to SCAN has another form than Redis gives it"
                )
            cursor = reply[0] if isinstance(reply[0], bytes) else b"0"
            parsed = [
                self._names.parse(name)
                for name in reply[1]
                if isinstance(name, bytes)
            ]
            yield [
                name
                for name in parsed
                if name and namespace in (None, name.namespace)
            ]
            if cursor == b"0":
                return

    def _unlink(self, names: list[bytes], until: float) -> int:
        removed = 0
        for start in range(0, len(names), _SCAN_NAMES):
            batch = names[start : start + _SCAN_NAMES]
            # one by one: in a cluster they have different slots
            numbers = self._execute(
                [command(b"UNLINK", name) for name in batch], until
            )
            removed += sum(number == 1 for number in numbers)
        return removed

    def _drop(
        self,
        until: float,
        drafts: Sequence[bytes] = (),
        claims: Sequence[bytes] = (),
    ) -> None:
        """Remove drafts, and claims that are this process's; if the server refuses, they expire."""
        commands = [command(b"UNLINK", draft) for draft in drafts]
        commands += [
            command(b"EVAL", _RELEASE, b"1", claim, self._owner)
            for claim in claims
        ]
        self._replies(commands, until, NUMBER)

    def _probe(self) -> bytes:
        return command(b"EXISTS", self._names.probe)

    def _execute_here(
        self, commands: Sequence[bytes], until: float, shape: ReplyShape
    ) -> list[Reply]:
        """Send commands that must reach this one server together. RefusedError if a reply is an
        error.
        """
        return self._checked(self._replies_here(commands, until, shape))

    def _replies_here(
        self, commands: Sequence[bytes], until: float, shape: ReplyShape
    ) -> list[Reply]:
        """Send commands that must reach this one server together; return all replies, errors as
        values.
        """
        self._send([b"".join(commands)], len(commands), until)
        return [self._resp.read_reply(until, shape) for _ in commands]

    def _execute(
        self, commands: Sequence[bytes], until: float, shape: ReplyShape = NUMBER
    ) -> list[Reply]:
        """Send independent commands together and return their replies. RefusedError if a reply is
        an error.
        """
        return self._checked(self._replies(commands, until, shape))

    def _replies(
        self, commands: Sequence[bytes], until: float, shape: ReplyShape
    ) -> list[Reply]:
        """Send independent commands together and return all replies, errors as values."""
        self._resp.check_usable()
        self._resp.send_commands(commands, until)
        return [self._resp.read_reply(until, shape) for _ in commands]

    def _send(
        self, parts: Sequence[bytes | memoryview], replies: int, until: float
    ) -> None:
        """Send a request that will have `replies` replies."""
        self._resp.check_usable()
        self._resp.send(parts, replies, until)

    def _read_replies(
        self, number: int, until: float, shape: ReplyShape
    ) -> list[Reply]:
        return self._checked(
            [self._resp.read_reply(until, shape) for _ in range(number)]
        )

    def _checked(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self._refusal(reply)
        return replies

    def _of_hashes(self, replies: list[Reply]) -> list[Reply]:
        """Return replies, None for values that are no hashes: they are not chunks. RefusedError if
        a reply is another error.
        """
        return self._checked(
            [
                None
                if isinstance(each, ErrorReply) and each.code == "WRONGTYPE"
                else each
                for each in replies
            ]
        )

    def _refusal(self, error: ErrorReply) -> RefusedError | OSError:
        """Return the exception of an error; an OSError, which closes the connection, if the server
        cannot serve now.
        """
        text = self._address.masked(error.text)
        because = re.match(r"EXECABORT .*because of: -?(\w+)", error.text)
        code = because[1] if because else error.code
        if code in _ELSEWHERE_IN_CLUSTER:
            return RedirectError(ErrorReply(code, code + text.partition(code)[2]))
        if code in _NOT_READY:
            return ConnectionError(text)
        return RefusedError(
            _REASONS.get(code, Reason.IO_ERROR),
            text,
            reconnect=code in _ELSEWHERE,
        )


class RedisClient(StoreClient):
    """A Redis at `url` (see RedisAddress, SentinelAddress). All names begin with `<prefix>:`.
    Thread-safe.

    Keeps no connection. `ttl_seconds`: how long a chunk stays after it was last stored or used;
    `ranks`: rank chunks by their remaining life even if Redis does not say that it evicts by that.
    `second_sight`: a chunk is stored when it is asked for a second time, on any machine.
    `password_file` is read for each connection.
    """

    connection_type: ClassVar[type[RedisConnection]] = RedisConnection

    def __init__(self, url: str, **options: Unpack[RedisOptions]) -> None:
        self.name = options.get("name", "redis")
        kind = SentinelAddress if "+sentinel:" in url[:16] else RedisAddress
        self._address = kind(url, options.get("password_file", ""))
        self.address = self._address.text
        self._names = RedisNames(options.get("prefix", "pagoda"))
        ttl_seconds = options.get("ttl_seconds", LIFE_SECONDS)
        self._options = (
            ttl_seconds,
            options.get("ranks", False),
            options.get("second_sight", False),
        )
        self._nonce = os.urandom(8).hex().encode()
        self._ages = ReuseAges()
        # Redis keeps recency in seconds, and a chunk in use must not expire between two touches
        self.believed_seconds = min(self.believed_seconds, ttl_seconds / 4)

    def connection(self) -> RedisConnection:
        """Return a new connection that is still to be opened."""
        owner = b"%d-%b" % (os.getpid(), self._nonce)
        return self.connection_type(
            self._address, self._names, *self._options, owner, self._ages
        )


_Field = tuple[bytes, memoryview]  # of a hash: its name and its value
_REASONS = {"OOM": Reason.FULL, "WRONGTYPE": Reason.FAILED_CHECK}
# errors of a server that serves no requests at present; a new connection may reach another server,
# or succeed
_NOT_READY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY")
_ELSEWHERE_IN_CLUSTER = ("MOVED", "ASK", "TRYAGAIN")
_ELSEWHERE = ("READONLY", "NOREPLICAS", "MISCONF", "NOAUTH")


class ChunkUse(NamedTuple):
    """A chunk and how many seconds ago it was used; with LFU, minus its number of uses. The
    smallest is used most.
    """

    coldness: int
    namespace: bytes
    key: bytes


class _Name(NamedTuple):
    text: bytes
    namespace: bytes
    key: bytes
    # False: a draft, a claim, or the note that a chunk was asked for
    is_chunk: bool


class RedisNames:
    """The names of chunks: `<prefix>:<format>:<namespace>:{<key>}`. A claim or a draft adds `:w...`
    to that, the note that a chunk was asked for once adds `:g`.

    The braces keep all of them on one node of a cluster. `<prefix>:at:<period>:<key>` is for
    `peer_directory`.
    """

    def __init__(self, prefix: str) -> None:
        if not re.fullmatch(r"[!-z|~]{1,100}", prefix):  # no braces
            raise ConfigError(
                f"prefix={prefix!r}: 1 to 100 printable characters of ASCII, without spaces and "
                "braces"
            )
        self._start = f"{prefix}:{NAME_FORMAT}:".encode()
        self._at = f"{prefix}:at:".encode()
        self.probe = self._start + b"probe"  # no value has this name
        self.runs_mark = self._start + b"runs"
        root = rb"([0-9a-f]{64})"
        key = rb"\{([0-9a-f]{64})\}"
        draft = rb"(:g|:w(?::[0-9a-f]{32})?)?"
        self._ours = re.compile(
            re.escape(self._start) + root + b":" + key + draft
        )

    def chunk(self, namespace: bytes, key: bytes) -> bytes:
        """Return the name of a chunk. ValueError if namespace or key are not 32 bytes."""
        if len(namespace) != 32 or len(key) != 32:
            raise ValueError(
                f"need 32 bytes of namespace and key each, got {len(namespace)} and {len(key)}"
            )
        return b"%b%b:{%b}" % (
            self._start,
            namespace.hex().encode(),
            key.hex().encode(),
        )

    def chunks(self, namespace: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """Return the names of chunks. ValueError as `chunk`."""
        return [self.chunk(namespace, key) for key in keys]

    def question(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Return the commands that ask whether each of these chunks is present, for several
        servers.
        """
        if not keys:
            return b""
        before, _, after = command(
            b"EXISTS", self.chunk(namespace, bytes(32))
        ).rpartition(b"0" * 64)
        return (
            before
            + (after + before).join([key.hex().encode() for key in keys])
            + after
        )

    def at(self, key: bytes, period: int) -> bytes:
        """Return the name of the set of machines that announced, within a period, that they have a
        chunk.
        """
        return b"%b%d:%b" % (self._at, period, key.hex().encode())

    def pattern(self, namespace: bytes | None) -> bytes:
        """Return the pattern for SCAN; the names that it finds must still be parsed."""
        start = re.sub(rb"([\\*?\[\]])", rb"\\\1", self._start)
        return (
            start
            + (b"?" * 64 if namespace is None else namespace.hex().encode())
            + b":{*"
        )

    def parse(self, name: bytes) -> _Name | None:
        """Return what a name contains; None: the name is not ours."""
        found = self._ours.fullmatch(name)
        if found is None:
            return None
        namespace, key = (bytes.fromhex(found[part].decode()) for part in (1, 2))
        return _Name(name, namespace, key, found[3] is None)


def _rename_result(replies: list[Reply]) -> PutResult:
    """Return the result of a transaction that ends with RENAMENX and UNLINK."""
    done = replies[-1]
    renamed = done[-2] if isinstance(done, list) and len(done) > 1 else None
    if isinstance(renamed, ErrorReply):  # the draft no longer exists
        text = f"the chunk was removed before it was published: {renamed.text}"
        raise RefusedError(Reason.FULL, text, reconnect=True)  # see _write_draft
    return PutResult.STORED if renamed == 1 else PutResult.PRESENT


def _draft_life(until: float) -> bytes:
    """Return how many milliseconds a draft or a claim stays if its writer ends by `until`."""
    return b"%d" % max(1, int((until - time.monotonic() + _DRAFT_SECONDS) * 1000))


def _fields(page: Bytes, stored: Bytes) -> list[_Field]:
    pieces = _pieces(stored.data)
    return [
        (b"h", page.data),
        *zip(_field_names(range(len(pieces))), pieces, strict=True),
    ]


def _pieces(stored: memoryview) -> list[memoryview]:
    return [
        stored[start : start + PIECE_BYTES]
        for start in range(0, stored.nbytes, PIECE_BYTES)
    ]


def _field_names(numbers: range) -> list[bytes]:
    return [b"%d" % number for number in numbers]
