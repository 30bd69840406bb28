"""Redis (or Valkey) as a remote store: one hash a chunk, written under another name and renamed when it is whole."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import NamedTuple

from pagoda.errors import ConfigError
from pagoda.metrics import Reason
from pagoda.threads import Answer as Made
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote.redis_address import RedisAddress
from pagoda.tiers.remote.resp import NUMBER, Answer, Denial, Shape, Wire, command, command_with
from pagoda.tiers.remote.sockets import abort
from pagoda.tiers.remote.store_client import NAME_FORMAT, Link, Put, Refused, Usage, Walk

__all__ = ["PIECE_BYTES", "RedisLink", "RedisRemote"]

# of the fields of a hash. Whole values of many MiB cost Redis twice the time; of 1 MiB, with what it adds, a quarter
# more memory, for its allocator rounds that up to 1.25 MiB
PIECE_BYTES = (1 << 20) - 4096
_TINY_BYTES = 1 << 16  # chunks that are sent without a claim: that costs no more than to ask
_SMALL_BYTES = 1 << 20  # chunks that are written in one transaction
_WRITE_PIECES = 64  # written before their answers are read
_READ_PIECES = 4  # asked for at once; more only fill the server's buffers
_FIND_KEYS = 4096
_SCAN_NAMES = 1000
_NAMESPACES = 1 << 16
_SHORT = Shape(b":+$*", items=8, depth=1)  # of what writes, transactions included
_SCANNED = Shape(b"$*", 512, items=1 << 14, depth=2)  # of SCAN; no name of ours is longer
_TEXT = Shape(b"$", 1 << 16)  # of INFO
_KEEPALIVE_SECONDS = 20.0
_BELIEVED_SECONDS = 2.0
_DRAFT_SECONDS = 2.0  # how long a draft outlives the deadline of its put


class RedisRemote:
    """A Redis at `url` (see RedisAddress). All names begin with `<prefix>:`. Thread-safe, keeps no connection.

    `ttl_seconds`: how long a chunk stays after it was last stored or used; None: until Redis evicts it.
    """

    def __init__(
        self, url: str, *, prefix: str = "pagoda", ttl_seconds: float | None = None, name: str = "redis"
    ) -> None:
        self.name = name
        self.keepalive_seconds: float | None = _KEEPALIVE_SECONDS
        self._at = RedisAddress(url)
        self.address = self._at.text
        self._names = _Names(prefix)
        self._ttl_ms = None if ttl_seconds is None else max(1, int(ttl_seconds * 1000))
        # Redis keeps recency in seconds, and a chunk in use must not reach its end between two touches
        self.believed_seconds = min(_BELIEVED_SECONDS, (ttl_seconds or math.inf) / 4)

    def link(self, until: float, begun: Callable[[Link], None] = lambda link: None) -> RedisLink:
        """A new connection, authenticated, that has answered. OSError; Refused: we may not read. See Remote.link."""
        link = RedisLink(self._at, self._names, self._ttl_ms)
        try:
            begun(link)
            link.connect(until)
        except BaseException:
            link.close()
            raise
        return link


class RedisLink:
    """One connection to a Redis; a Link. For one thread at a time, but for `abort`."""

    def __init__(self, at: RedisAddress, names: _Names, ttl_ms: int | None) -> None:
        self._at = at
        self._connected: Future[socket.socket] = Made()
        self._names = names
        self._ttl_ms = ttl_ms

    def connect(self, until: float) -> None:
        """Connect, authenticate, choose the database, and see that it answers: one round trip."""
        self._wire = Wire(self._at.connect(self._connected, until))
        username, password = self._at.username, self._at.password
        commands = []
        if password or username:
            words = [word.encode() for word in (username, password or "") if word is not None]
            commands.append(command(b"AUTH", *words))
        if self._at.db:
            commands.append(command(b"SELECT", b"%d" % self._at.db))
        self._ask([*commands, self._probe()], until, _SHORT)

    def ping(self, until: float) -> None:
        """Return if our names can be read."""
        self._ask([self._probe()], until)

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """How many leading keys are there: one round trip for thousands."""
        for start in range(0, len(keys), _FIND_KEYS):
            batch = keys[start : start + _FIND_KEYS]
            answers = self._ask(
                [command(b"EXISTS", self._names.chunk(namespace, key)) for key in batch], until
            )
            here = sum(1 for _ in takewhile(lambda answer: answer == 1, answers))
            if here < len(batch):
                return start + here
        return len(keys)

    def touch(self, namespace: bytes, keys: Sequence[bytes], until: float) -> list[bool]:
        """Raise recency, and put off the end of what has one; which keys are there. One round trip.

        HLEN counts as a use and, unlike TOUCH, is among the commands that writing needs anyway.
        """
        names = [self._names.chunk(namespace, key) for key in keys]
        if self._ttl_ms is None:
            commands = [command(b"HLEN", name) for name in names]
        else:
            commands = [command(b"PEXPIRE", name, b"%d" % self._ttl_ms) for name in names]
        answers = self._ask(commands, until)
        return [answer != 0 for answer in answers]

    def put(
        self,
        namespace: bytes,
        key: bytes,
        page: Bytes,
        stored: Bytes,
        usable: Callable[[], bool],
        until: float,
    ) -> Put:
        """Claim the key, write a draft, ask `usable`, rename the draft: one to three round trips, by the chunk's size.

        What others have stored or are sending is not sent again, unless it is tiny. A draft and a claim have an end
        from their first byte on, so what a dead writer leaves goes by itself.
        """
        name, nonce = self._names.chunk(namespace, key), os.urandom(16).hex().encode()
        claim, draft, fields = name + b":w", name + b":w:" + nonce, _fields(page, stored)
        if stored.nbytes <= _TINY_BYTES:
            with self._dropping([draft], until):
                return self._put_whole(name, draft, None, fields, usable, until)
        life = b"%d" % max(1, int((until - time.monotonic() + _DRAFT_SECONDS) * 1000))
        others = self._claimed(name, claim, nonce, life, until)
        if others is not None:
            return others
        with self._dropping([draft, claim], until):
            if stored.nbytes <= _SMALL_BYTES:
                how = self._put_whole(name, draft, claim, fields, usable, until)
            else:
                self._write(draft, fields, life, until)
                how = self._publish(draft, name, claim, until) if usable() else Put.STALE
        if how is Put.STALE:
            self._drop([draft, claim], until)
        return how

    def _claimed(self, name: bytes, claim: bytes, nonce: bytes, life: bytes, until: float) -> Put | None:
        """Claim a name for this writer; what became of the put if somebody else has stored or claimed it."""
        commands = [command(b"EXISTS", name), command(b"SET", claim, nonce, b"NX", b"PX", life)]
        self._send([b"".join(commands)], 2, until)
        present, claimed = (self._wire.answer(until, _SHORT) for _ in commands)
        if present == 1:
            if claimed == b"OK":
                self._drop([claim], until)
            return Put.PRESENT
        for answer in (present, claimed):
            if isinstance(answer, Denial):
                raise self._refused(answer)
        return Put.BUSY if claimed is None else None

    @contextmanager
    def _dropping(self, names: list[bytes], until: float) -> Iterator[None]:
        try:
            yield
        except Refused:
            self._drop(names, until)
            raise

    def _write(self, draft: bytes, fields: list[_Field], life: bytes, until: float) -> None:
        """Write all fields. One transaction a piece: no command alone could leave a draft that has no end."""
        end = command(b"PEXPIRE", draft, life) + command(b"EXEC")
        for start in range(0, len(fields), _WRITE_PIECES):
            parts: list[bytes | memoryview] = []
            batch = fields[start : start + _WRITE_PIECES]
            for field, piece in batch:
                parts += [command(b"MULTI"), *command_with(b"HSET", draft, field, piece), end]
            parts.append(command(b"HLEN", draft))
            self._send(parts, 4 * len(batch) + 1, until)
            if self._answers(4 * len(batch) + 1, until, _SHORT)[-1] != start + len(batch):
                raise Refused(Reason.FULL, "the chunk was evicted, removed or late before it was whole")

    def _publish(self, draft: bytes, name: bytes, claim: bytes, until: float) -> Put:
        commands = [command(b"MULTI"), *self._renaming(draft, name, claim), command(b"EXEC")]
        return _renamed(self._ask(commands, until, _SHORT))

    def _put_whole(
        self,
        name: bytes,
        draft: bytes,
        claim: bytes | None,
        fields: list[_Field],
        usable: Callable[[], bool],
        until: float,
    ) -> Put:
        """One transaction, not ended before `usable` has said yes. Who is the first of two is settled at its end."""
        words = [word for field in fields for word in field]
        self._send([command(b"MULTI"), *command_with(b"HSET", draft, *words)], 2, until)
        rest = [command(b"DISCARD")]
        if good := usable():
            rest = [*self._renaming(draft, name, claim), command(b"EXEC")]
        self._wire.send([b"".join(rest)], len(rest), until)
        answers = self._answers(2 + len(rest), until, _SHORT)
        return _renamed(answers) if good else Put.STALE

    def _renaming(self, draft: bytes, name: bytes, claim: bytes | None) -> list[bytes]:
        """What makes a draft a chunk, or nothing; Redis decides who was first. Without a claim it has no end yet."""
        stay = [] if claim is None else [command(b"PERSIST", draft)]
        if self._ttl_ms is not None:
            stay = [command(b"PEXPIRE", draft, b"%d" % self._ttl_ms)]
        gone = [draft] if claim is None else [draft, claim]
        return [*stay, command(b"RENAMENX", draft, name), command(b"UNLINK", *gone)]

    def get(
        self, namespace: bytes, key: bytes, page: Bytes, place: Callable[[], Bytes | None], until: float
    ) -> int | None:
        """Fill `page` and what `place` returns; one round trip, for the first pieces are asked for with the page."""
        self._wire.check()
        name = self._names.chunk(namespace, key)
        self._request(name, [b"h", *_numbers(range(_READ_PIECES))], until)
        found = self._wire.fill(page.data, until)
        room = place() if found == page.nbytes else None
        pieces = [] if room is None else _pieces(room.data)
        came = self._fill(name, pieces, until)
        for answer in (found, *came):
            if isinstance(answer, Denial):
                raise self._refused(answer)
        sizes = [piece.nbytes for piece in pieces]
        if room is not None and came == sizes + [None] * (len(came) - len(sizes)):
            return room.nbytes
        if None in (found, *came[: len(sizes)]) and self._ask([command(b"EXISTS", name)], until) == [0]:
            return None  # never there, or it went while it was read
        raise Refused(Reason.FAILED_CHECK, "the value is not a chunk as it was asked for")

    def _fill(self, name: bytes, pieces: list[memoryview], until: float) -> list[int | Denial | None]:
        """Read what was asked for with the page, and the pieces behind it; asks for no more once one is wrong."""
        nowhere = memoryview(bytearray())
        came: list[int | Denial | None] = []
        asked, right = _READ_PIECES, True
        while len(came) < asked:
            place = pieces[len(came)] if len(came) < len(pieces) else nowhere
            came.append(self._wire.fill(place, until))
            right = right and came[-1] == place.nbytes
            if right and len(came) + _READ_PIECES // 2 == asked < len(pieces):
                more = range(asked, min(len(pieces), asked + _READ_PIECES // 2))
                self._request(name, _numbers(more), until)
                asked = more.stop
        return came

    def _request(self, name: bytes, fields: list[bytes], until: float) -> None:
        self._wire.send([b"".join(command(b"HGET", name, field) for field in fields)], len(fields), until)

    def remove(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Remove chunks; how many there were."""
        return self._unlink([self._names.chunk(namespace, key) for key in keys], until)

    def clear(self, namespace: bytes | None, walk: Walk) -> int:
        """Remove all chunks of one namespace, or all of ours, and their drafts and claims; how many chunks."""
        removed = 0
        for names in self._scan(namespace, walk):
            until = walk.step()
            removed += self._unlink([name.text for name in names if name.whole], until)
            self._unlink([name.text for name in names if not name.whole], until)
        return removed

    def census(self, walk: Walk) -> Mapping[bytes, int]:
        """Chunks of each namespace. One that Redis names twice while it resizes its table counts twice."""
        chunks: Counter[bytes] = Counter()
        for names in self._scan(None, walk):
            chunks.update(name.namespace for name in names if name.whole)
            if len(chunks) > _NAMESPACES:
                raise ConnectionError(f"more than {_NAMESPACES} namespaces")
        return chunks

    def usage(self, until: float) -> Usage:
        """The memory of the whole server, whoever uses it, and its `maxmemory`."""
        (said,) = self._ask([command(b"INFO", b"memory")], until, _TEXT)
        lines = said.split(b"\r\n") if isinstance(said, bytes) else []
        numbers = dict(line.split(b":", 1) for line in lines if re.fullmatch(rb"\w+:\d{1,19}", line))
        used, limit = numbers.get(b"used_memory"), numbers.get(b"maxmemory")
        return Usage(int(used) if used else None, int(limit) or None if limit else None)

    def abort(self) -> None:
        """Let whoever waits in this link fail soon with an OSError. From any thread."""
        try:
            self._connected.set_exception(ConnectionAbortedError("the connection is not wanted any more"))
        except InvalidStateError:  # it was made, or that has failed
            with suppress(OSError, CancelledError):
                abort(self._connected.result())

    def close(self) -> None:
        """Close the connection; never waits. Idempotent."""
        self.abort()
        with suppress(OSError, CancelledError):
            self._connected.result().close()

    def _scan(self, namespace: bytes | None, walk: Walk) -> Iterator[list[_Name]]:
        """Names that are ours, in lists; most once, some perhaps twice."""
        words = (b"MATCH", self._names.pattern(namespace), b"COUNT", b"%d" % _SCAN_NAMES)
        cursor = b"0"
        while True:
            (answer,) = self._ask([command(b"SCAN", cursor, *words)], walk.step(), _SCANNED)
            if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
                raise ConnectionError("the answer to SCAN is none")
            cursor = answer[0] if isinstance(answer[0], bytes) else b"0"
            parsed = [self._names.parse(name) for name in answer[1] if isinstance(name, bytes)]
            yield [name for name in parsed if name and namespace in (None, name.namespace)]
            if cursor == b"0":
                return

    def _unlink(self, names: list[bytes], until: float) -> int:
        removed = 0
        for start in range(0, len(names), _SCAN_NAMES):
            batch = names[start : start + _SCAN_NAMES]
            (number,) = self._ask([command(b"UNLINK", *batch)], until)
            removed += min(number, len(batch)) if isinstance(number, int) else 0
        return removed

    def _drop(self, names: list[bytes], until: float) -> None:
        """Remove what a put leaves; a server that does not let us has its end of it, too."""
        with suppress(Refused):
            self._unlink(names, until)

    def _probe(self) -> bytes:
        return command(b"EXISTS", self._names.probe)

    def _ask(self, commands: Sequence[bytes], until: float, shape: Shape = NUMBER) -> list[Answer]:
        """The answers to commands that are sent at once. Refused if one is an error, after all were read."""
        self._send([b"".join(commands)], len(commands), until)
        return self._answers(len(commands), until, shape)

    def _send(self, parts: Sequence[bytes | memoryview], answers: int, until: float) -> None:
        """Begin a question, which so many answers belong to."""
        self._wire.check()
        self._wire.send(parts, answers, until)

    def _answers(self, number: int, until: float, shape: Shape) -> list[Answer]:
        answers = list[Answer]()
        denial: Denial | None = None
        for _ in range(number):
            answer = self._wire.answer(until, shape)
            if isinstance(answer, Denial):
                denial = answer = denial or answer  # one is enough: a server may say anything
            answers.append(answer)
        if denial is not None:
            raise self._refused(denial)
        return answers

    def _refused(self, denial: Denial) -> Refused | OSError:
        """What an error means; an OSError, which ends this connection, if its server cannot serve anybody now."""
        text = denial.text
        if self._at.password:
            text = text.replace(self._at.password, "***")  # a server may say anything
        because = re.match(r"EXECABORT .*because of: -?(\w+)", denial.text)
        code = because[1] if because else denial.code
        if code in _NOT_READY:
            return ConnectionError(text)
        return Refused(_REASONS.get(code, Reason.IO_ERROR), text, reconnect=code in _ELSEWHERE)


_Field = tuple[bytes, memoryview]  # of a hash: its name and its value
_REASONS = {"OOM": Reason.FULL, "WRONGTYPE": Reason.FAILED_CHECK}
# of a server that answers nobody for now; and of one to which another connection may lead, or be better received
_NOT_READY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY")
_ELSEWHERE = ("READONLY", "NOREPLICAS", "MISCONF", "NOAUTH")


class _Name(NamedTuple):
    text: bytes
    namespace: bytes
    whole: bool  # a chunk; else a draft or a claim


class _Names:
    """The names of chunks: `<prefix>:<format>:<namespace>:{<key>}`; of their claims and drafts: that and `:w...`.

    The braces keep the three on one node of a cluster.
    """

    def __init__(self, prefix: str) -> None:
        if not re.fullmatch(r"[!-z|~]{1,100}", prefix):  # no braces
            raise ConfigError(
                f"prefix={prefix!r}: 1 to 100 printable characters of ASCII, without spaces and braces"
            )
        self._start = f"{prefix}:{NAME_FORMAT}:".encode()
        self.probe = self._start + b"probe"  # nothing has this name
        root, key, draft = rb"([0-9a-f]{64})", rb"\{[0-9a-f]{64}\}", rb"(:w(?::[0-9a-f]{32})?)?"
        self._ours = re.compile(re.escape(self._start) + root + b":" + key + draft)

    def chunk(self, namespace: bytes, key: bytes) -> bytes:
        """The name of a chunk. ValueError if namespace or key are not 32 bytes."""
        if len(namespace) != 32 or len(key) != 32:
            raise ValueError("a namespace and a key have 32 bytes")
        return b"%b%b:{%b}" % (self._start, namespace.hex().encode(), key.hex().encode())

    def pattern(self, namespace: bytes | None) -> bytes:
        """What SCAN compares names with, to be parsed afterwards."""
        start = re.sub(rb"([\\*?\[\]])", rb"\\\1", self._start)
        return start + (b"?" * 64 if namespace is None else namespace.hex().encode()) + b":{*"

    def parse(self, name: bytes) -> _Name | None:
        """What a name says; None: it is not ours."""
        found = self._ours.fullmatch(name)
        return found and _Name(name, bytes.fromhex(found[1].decode()), found[2] is None)


def _renamed(answers: list[Answer]) -> Put:
    """What became of a transaction that ends with RENAMENX and UNLINK."""
    done = answers[-1]
    renamed = done[-2] if isinstance(done, list) and len(done) > 1 else None
    if isinstance(renamed, Denial):  # there is no draft any more
        raise Refused(Reason.FULL, f"the chunk went before it was published: {renamed.text}")
    return Put.STORED if renamed == 1 else Put.PRESENT


def _fields(page: Bytes, stored: Bytes) -> list[_Field]:
    pieces = _pieces(stored.data)
    return [(b"h", page.data), *zip(_numbers(range(len(pieces))), pieces, strict=True)]


def _pieces(stored: memoryview) -> list[memoryview]:
    return [stored[start : start + PIECE_BYTES] for start in range(0, stored.nbytes, PIECE_BYTES)]


def _numbers(numbers: range) -> list[bytes]:
    return [b"%d" % number for number in numbers]
