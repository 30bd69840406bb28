"""Object stores (S3, GCS, Azure, WebDAV) as a remote engine: one object a chunk, by obstore and a wire of our own.

obstore finds credentials, signs, asks what is there, lists and deletes in bulk. To S3 and WebDAV the rest goes
straight, by a `Wire`: obstore copies a chunk, and keeps an answer of any length whole (its allocator ends the process
if it cannot). To GCS and Azure, and with options that are no part of a URL, all goes by obstore.

An object is the header page and then the stored bytes; its name is
`[path of the URL/]<prefix>/<NAME_FORMAT>/<namespace>/<first two digits of the key>/<key>`, all in small hex digits.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

from pagoda.codec import HEADER_BYTES
from pagoda.metrics import Reason
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote import obstore_client, s3_requests
from pagoda.tiers.remote.courier import NO_BUCKET, Courier, Unsupported, all_of, code_in, slices
from pagoda.tiers.remote.http import Answer, Wire, Wires, paths_in
from pagoda.tiers.remote.store_client import NAME_FORMAT, Link, Put, Refused, Usage, Walk

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

__all__ = ["ObjectsLink", "ObjectsRemote"]

_T = TypeVar("_T")
_AT_ONCE = 16  # requests in flight of one link: of a find, and of what an engine cannot do in bulk
_BATCH = 250  # names a step of a walk: below what one bulk request may name (S3: 1000, Azure: 256)
_NAMESPACES = 1 << 16
_LISTING_BYTES = 32 << 20  # of one folder, about 60000 names
_BELIEVED_SECONDS = 600.0  # each question is a request that is paid for
_SIGNED_FOR = timedelta(minutes=15)  # a URL is used at once, by clocks that may differ
_FIRST_BYTES = 1  # of a piece: pieces are taken as they come in, because joining them would be a copy more

_OURS = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})")
_FOLDERS = ("[0-9a-f]{64}", "[0-9a-f]{2}")  # of namespaces, and in each of these


class ObjectsRemote:
    """An object store that many machines share. Thread-safe.

    After the first request, a forked child makes no links: obstore's threads are not in it, and OSError says so.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pagoda",
        name: str | None = None,
        options: Mapping[str, str] = {},
    ) -> None:
        """Check everything that can be checked without a request.

        Args:
            url: s3://bucket[/path], gs://bucket[/path], az://container[/path], or for WebDAV
                http(s)://[user:password@]host/path.
            prefix: the first part of all names below that path.
            name: of the tier; its scheme, or "webdav", unless given.
            options: settings of obstore for that kind of store (`endpoint`, `region`, ...), as in its documentation.

        Raises:
            ValueError: the URL, the prefix or an option cannot stand. No message has the value of an option in it.
            ModuleNotFoundError: obstore is not installed; says how to install it.
        """
        parts, path = obstore_client.place_of(url)
        obstore_client.check_prefix(prefix)
        self.name = name or obstore_client.NAMES[parts.scheme]
        self.keepalive_seconds: float | None = None  # each request has its price
        self.believed_seconds = _BELIEVED_SECONDS
        self._base = "/".join(part for part in (path, prefix, str(NAME_FORMAT)) if part)
        self._parts = parts
        self._options = dict(options)
        endpoint = obstore_client.endpoint_of(parts, self._options)
        self.address = f"{parts.scheme}://{obstore_client.host_of(parts)}{f'/{path}' if path else ''}"
        if endpoint is not None and parts.scheme not in ("http", "https"):
            self.address += f" at {endpoint.scheme}://{obstore_client.host_of(endpoint)}"
        obstore_client.connect(parts, self._options)

    def link(self, until: float, begun: Callable[[Link], None] = lambda link: None) -> ObjectsLink:
        """A new pool of connections, after one request that proves that the store can be read. See Remote.link."""
        store = obstore_client.connect(self._parts, self._options)
        is_straight = obstore_client.is_straight(self._parts, self._options)
        secret = s3_requests.secret_of(self._options) if is_straight and self._parts.scheme == "s3" else None
        link = ObjectsLink(store, self._base, self.address, self._parts, is_straight, secret)
        try:
            begun(link)
            link.ping(until)
        except BaseException:
            link.close()
            raise
        return link


class ObjectsLink:
    """One pool of connections to an object store, with an event loop that runs only within calls.

    For one thread at a time, but for `abort` and `close`. A request that is out of time is cancelled and its connection
    ended; nothing is tried twice.
    """

    def __init__(
        self,
        store: ObjectStore,
        base: str,
        address: str,
        url: SplitResult,
        is_straight: bool,
        secret: str | None = None,
    ) -> None:
        self._store = store
        self._base = base
        self._address = address
        self._url = url
        self._is_dav = obstore_client.is_dav(url.scheme)
        self._is_straight = is_straight
        self._secret = secret  # with which we may sign what obstore does not: S3's bucket as a whole
        self._headers = obstore_client.authorization(url)
        self._wire: Wire | None = None
        self._wires: Wires | None = None  # for questions
        self._creates = not self._is_dav  # whether the store can refuse to overwrite
        self._courier = Courier(address)
        self._on_wire = False
        self._courier.ended = False

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """How many leading keys are there: exact for up to 16 keys, which are one round of requests.

        Of more, 16 positions a round are asked for, the first of what is not known yet among them (up to 272 keys: 2
        rounds, 4368: 3). A key that is missing amid others may stay unnoticed then, and the answer be too high; who
        reads that key finds it absent.
        """
        names = [self._name(namespace, key) for key in keys]
        low, high = 0, len(names)  # names[:low] are taken to be there, names[high] is not
        while low < high:
            count = min(_AT_ONCE, high - low)
            asked = [low + (high - low) * nth // count for nth in range(count)]
            there = self._are_there([names[at] for at in asked], until)
            known = next((nth for nth, yes in enumerate(there) if not yes), count)
            high = asked[known] if known < count else high
            low = asked[known - 1] + 1 if known else low
        return low

    def touch(self, namespace: bytes, keys: Sequence[bytes], until: float) -> list[bool]:
        """Which keys are there, a request each; an object store keeps no recency."""
        names = [self._name(namespace, key) for key in keys]
        return self._are_there(names, until)

    def put(
        self,
        namespace: bytes,
        key: bytes,
        page: Bytes,
        stored: Bytes,
        usable: Callable[[], bool],
        until: float,
    ) -> Put:
        """Ask whether it is there; if not, store it and then ask `usable`. The buffers are sent as they are."""
        name = self._name(namespace, key)
        if self._are_there([name], until) == [True] or not self._create(name, [page, stored], until):
            return Put.PRESENT
        if usable():
            return Put.STORED
        self._delete_one(name, until)
        return Put.STALE

    def get(
        self, namespace: bytes, key: bytes, page: Bytes, place: Callable[[], Bytes | None], until: float
    ) -> int | None:
        """Fill `page` and what `place` returns, straight from the socket or piece by piece as they come in."""
        name = self._name(namespace, key)
        if self._is_straight:
            return self._fill_straight(name, page, place, until)
        return self._courier.run(self._fill(name, page, place), until)

    def remove(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Remove values; how many there were, which is asked first: deleting does not say."""
        names = [self._name(namespace, key) for key in keys]
        there = self._are_there(names, until)
        found = [name for name, yes in zip(names, there, strict=True) if yes]
        for name in found:
            self._delete_one(name, until)
        return len(found)

    def clear(self, namespace: bytes | None, walk: Walk) -> int:
        """Remove all values of one namespace (None: all that are ours); how many. A step is a listing or 250 names."""
        gone = 0
        for names in self._ours(namespace, walk):
            for some in slices(names, _BATCH):
                self._delete_all(some, walk)
                gone += len(some)
        return gone

    def census(self, walk: Walk) -> Mapping[bytes, int]:
        """How many chunks there are of each namespace, from a listing of all names."""
        found: Counter[bytes] = Counter()
        skip = len(self._base) + 1
        for names in self._ours(None, walk):
            found.update(bytes.fromhex(name[skip : skip + 64]) for name in names)
            if len(found) > _NAMESPACES:
                raise OSError(f"{self._address}: more than {_NAMESPACES} namespaces")
        return found

    def usage(self, until: float) -> Usage:
        """Object stores do not say. Asks nothing."""
        return Usage(None, None)

    def ping(self, until: float) -> None:
        """Return if a name that is never written can be asked for."""
        name = f"{self._base}/ping"
        if self._is_straight:
            wire, answer = self._ask_straight("GET", name, until)
            self._rest(wire, answer, (200, 404), until)
        else:
            self._courier.run(self._ping(name), until)

    def abort(self) -> None:
        """Let whoever waits in this link fail at once with an OSError."""
        self._courier.abort()
        for one in (self._wire, self._wires):
            if one is not None:
                one.abort()

    def close(self) -> None:
        """Let go of the connections. Whoever waits in this link fails; what that one holds goes with this object."""
        self.abort()
        self._courier.close()
        if not self._on_wire:
            self._drop_wires()
        if not self._courier.running:
            self.__dict__.pop("_store", None)  # its pool goes now, not when cycles are collected

    def _create(self, name: str, pieces: list[Bytes], until: float) -> bool:
        """Store it, if nobody was first where the engine can tell; whether it was stored."""
        while True:
            try:
                if self._is_straight:
                    return self._write_straight(name, pieces, until)
                return self._courier.run(self._write(name, pieces), until)
            except Unsupported:
                if not self._creates:
                    raise
                self._creates = False

    def _delete_one(self, name: str, until: float) -> None:
        if self._is_straight:
            wire, answer = self._ask_straight("DELETE", name, until)
            self._rest(wire, answer, (200, 202, 204, 404), until)
        else:
            self._courier.run(self._delete([name]), until)

    def _delete_all(self, names: Sequence[str], walk: Walk) -> None:
        if self._is_straight and self._is_dav:  # there is no bulk to be had, and its answers are short
            for name in names:
                self._delete_one(name, walk.step())
        elif names and not self._delete_bulk(names, walk.step()):
            self._courier.run(self._delete(names), walk.step())

    def _delete_bulk(self, names: Sequence[str], until: float) -> bool:
        """Delete what S3 takes in one request; False if we cannot sign it."""
        headers, body = s3_requests.deletion_of(names)
        asked = self._ask_bucket("POST", {"delete": ""}, until, headers, [memoryview(body)])
        if asked is None:
            return False
        wire, answer = asked
        text = self._text(wire, answer, 200, until)
        if b"<Error>" in text:  # of one of them
            raise self._courier.no(403, code_in(text.decode("latin-1")))
        return True

    # ---- straight: over a connection of our own

    def _fill_straight(
        self, name: str, page: Bytes, place: Callable[[], Bytes | None], until: float
    ) -> int | None:
        wire, answer = self._ask_straight("GET", name, until)
        if answer.status != 200:
            self._rest(wire, answer, (404,), until)
            return None
        try:
            if answer.length is None or answer.length < HEADER_BYTES:
                raise self._failed("is shorter than a header, or does not say its length")
            with self._wired():
                wire.read(page.data, until)
            rest_bytes = answer.length - HEADER_BYTES
            into = self._room(place(), rest_bytes)
            with self._wired():
                wire.read(into.data[:rest_bytes], until)
                wire.end(answer, answer.length, until)
        except BaseException:
            wire.drop()
            raise
        return rest_bytes

    def _write_straight(self, name: str, pieces: list[Bytes], until: float) -> bool:
        more = {"If-None-Match": "*"} if self._creates else {}
        wire, answer = self._ask_straight("PUT", name, until, more, [piece.data for piece in pieces])
        if answer.status == 404:
            self._rest(wire, answer, (), until)
        self._rest(wire, answer, (200, 201, 204, 409, 412), until)
        return answer.status < 300

    def _ask_straight(
        self,
        method: str,
        name: str,
        until: float,
        more: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
    ) -> tuple[Wire, Answer]:
        url, (target,) = self._targets(method, [name], until)
        if self._wire is None or not self._wire.is_to(url):
            self._wire = Wire(url)
        wire = self._wire
        with self._wired():
            return wire, wire.ask(method, target, until, {**self._headers, **(more or {})}, body)

    def _ask_bucket(
        self,
        method: str,
        parameters: Mapping[str, str],
        until: float,
        headers: Mapping[str, str] = {},
        body: Sequence[memoryview] = (),
    ) -> tuple[Wire, Answer] | None:
        """Ask S3 something about the whole bucket; None if we cannot sign that."""
        if self._secret is None:
            return None
        self._courier.check()
        url = urlsplit(self._courier.run(self._sign("GET", [""]), until)[0])
        target = s3_requests.target_of(method, url, self._secret, parameters)
        if target is None:
            return None
        if self._wire is None or not self._wire.is_to(url):
            self._wire = Wire(url)
        with self._wired():
            return self._wire, self._wire.ask(method, target, until, headers, body)

    def _targets(self, method: str, names: Sequence[str], until: float) -> tuple[SplitResult, list[str]]:
        """Where requests go, signed if need be."""
        self._courier.check()
        if self._is_dav:
            return self._url, ["/" + quote(name, safe="/~") for name in names]
        urls = [urlsplit(url) for url in self._courier.run(self._sign(method, names), until)]
        return urls[0], [f"{url.path}?{url.query}" for url in urls]

    async def _sign(self, method: str, names: Sequence[str]) -> list[str]:
        import obstore

        signed: Awaitable[list[str]] = obstore.sign_async(self._store, method, names, _SIGNED_FOR)  # type: ignore[call-overload, unused-ignore]
        return await self._courier.ask(signed)

    def _are_there(self, names: Sequence[str], until: float) -> list[bool]:
        if not self._is_straight:
            return self._courier.run(self._each(names, self._is_there), until)
        there: list[bool] = []
        for some in slices(names, _AT_ONCE):
            there += map(self._is_yes, self._statuses(some, until))
        return there

    def _statuses(self, names: Sequence[str], until: float) -> list[int]:
        """The status of a HEAD request for each name, at most _AT_ONCE; a single one goes the way of the chunks."""
        if len(names) == 1:
            wire, answer = self._ask_straight("HEAD", names[0], until)
            with self._wired():
                wire.end(answer, 0, until)
            return [answer.status]
        url, targets = self._targets("HEAD", names, until)
        if self._wires is not None and not self._wires.is_to(url):
            self._wires.close()
            self._wires = None
        wires = self._wires = self._wires or Wires(url, _AT_ONCE)
        with self._wired():
            return wires.heads(targets, until, self._headers)

    def _is_yes(self, status: int) -> bool:
        """What the answer to a HEAD request means; all but these two, redirections too, is trouble."""
        if status in (200, 404):
            return status == 200
        raise self._courier.no(status, "")

    def _rest(self, wire: Wire, answer: Answer, good: Sequence[int], until: float) -> None:
        """Done with an answer that moves no chunk; Refused or OSError if it is none of the good ones."""
        with self._wired():
            text = wire.end(answer, 0, until).decode("latin-1")
        code = code_in(text)
        if answer.status not in good or code in NO_BUCKET:
            raise self._courier.no(answer.status, code)

    @contextlib.contextmanager
    def _wired(self) -> Iterator[None]:
        """Around what waits for the wire: its troubles, in our words."""
        self._on_wire = True
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"{self._address}: out of time") from None
        except OSError as error:
            what = "aborted" if self._courier.ended else error.strerror or str(error)
            raise OSError(f"{self._address}: {what[:100]}") from None
        finally:
            self._on_wire = False
            if self._courier.ended:
                self._drop_wires()

    def _drop_wires(self) -> None:
        if self._wire is not None:
            self._wire.drop()
        if self._wires is not None:
            self._wires.close()

    # ---- what runs in the loop

    async def _is_there(self, name: str) -> bool:
        import obstore

        try:
            await self._courier.ask(obstore.head_async(self._store, name))
        except FileNotFoundError:
            return False
        return True

    async def _write(self, name: str, pieces: list[Bytes]) -> bool:
        import obstore

        mode = "create" if self._creates else "overwrite"
        try:
            await self._courier.ask(
                obstore.put_async(self._store, name, pieces, mode=mode, use_multipart=False)  # type: ignore[arg-type, unused-ignore]
            )
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise Refused(Reason.IO_ERROR, f"{self._address}: there is no such place to write to") from None
        return True

    async def _fill(self, name: str, page: Bytes, place: Callable[[], Bytes | None]) -> int | None:
        import obstore

        try:
            result: GetResult = await self._courier.ask(obstore.get_async(self._store, name))
        except FileNotFoundError:
            return None
        left = int(result.meta["size"])  # bytes that were announced and have not come in
        if left < HEADER_BYTES:
            raise self._failed("is shorter than a header")
        rest_bytes = left - HEADER_BYTES
        into, at, rest = page, 0, False
        stream: AsyncIterator[bytes] = result.stream(_FIRST_BYTES)
        while (piece := await self._next(stream)) is not None:
            data = np.frombuffer(piece, np.uint8)
            left -= data.nbytes
            if left < 0:
                raise self._failed("is longer than announced")
            if not rest and at + data.nbytes >= HEADER_BYTES:
                head = HEADER_BYTES - at
                page[at:HEADER_BYTES] = data[:head]
                into, at, rest, data = self._room(place(), rest_bytes), 0, True, data[head:]
            into[at : at + data.nbytes] = data
            at += data.nbytes
        if left:
            raise self._failed("is shorter than announced")
        return rest_bytes

    def _room(self, place: Bytes | None, nbytes: int) -> Bytes:
        if place is None:
            raise self._failed("is not what was asked for")
        if nbytes > place.nbytes:
            raise self._failed("is larger than its place")
        return place

    async def _next(self, stream: AsyncIterator[_T]) -> _T | None:
        try:
            return await self._courier.ask(stream.__anext__())
        except StopAsyncIteration:
            return None

    async def _delete(self, names: Sequence[str]) -> int:
        """Delete, in bulk where the engine can; how many names were given."""
        import obstore

        try:
            if names:
                await self._courier.ask(
                    obstore.delete_async(self._store, names[0] if len(names) == 1 else names)
                )
        except FileNotFoundError:  # somebody else deletes too, and the others may not have been tried
            if len(names) > 1:
                await self._each(names, lambda name: self._delete([name]))
        return len(names)

    async def _each(self, names: Sequence[str], ask: Callable[[str], Awaitable[_T]]) -> list[_T]:
        answers: list[_T] = []
        for some in slices(names, _AT_ONCE):
            answers += await all_of(map(ask, some))
        return answers

    async def _ping(self, name: str) -> None:
        import obstore

        try:
            await self._courier.ask(obstore.get_async(self._store, name))
        except FileNotFoundError:
            return

    # ---- listings

    def _ours(self, namespace: bytes | None, walk: Walk) -> Iterator[list[str]]:
        """The names of chunks, some at a time; whatever else a listing shows is passed over."""
        import obstore

        where = self._base if namespace is None else f"{self._base}/{namespace.hex()}"
        if self._is_dav:
            yield from self._walk(where, 2 if namespace is None else 1, walk)
            return
        found, token = self._page(where + "/", None, walk.step())
        if found is not None:
            yield found
            while token is not None:
                found, token = self._page(where + "/", token, walk.step())
                yield found or []
            return
        stream = obstore.list(self._store, where + "/", chunk_size=_BATCH)
        while True:
            metas = self._courier.run(self._next(stream), walk.step())  # type: ignore[arg-type, unused-ignore]
            if metas is None:
                return
            yield self._parsed(str(meta["path"]) for meta in metas)

    def _page(self, prefix: str, token: str | None, until: float) -> tuple[list[str] | None, str | None]:
        """The names of chunks on one page of S3's listing, and what leads to the next; None: we cannot sign that."""
        asked = self._ask_bucket("GET", s3_requests.page_parameters(prefix, token), until)
        if asked is None:
            return None, None
        names, following = s3_requests.page_of(self._text(*asked, 200, until))
        return self._parsed(names), following

    def _text(self, wire: Wire, answer: Answer, good: int, until: float) -> bytes:
        """The whole answer, if it is a good one."""
        if answer.status != good:
            self._rest(wire, answer, (), until)
        with self._wired():
            text = wire.text(answer, _LISTING_BYTES, until)
        if text is None:
            raise Refused(
                Reason.FAILED_CHECK, f"{self._address}: a listing is longer than {_LISTING_BYTES >> 20} MiB"
            )
        return text

    def _walk(self, folder: str, depth: int, walk: Walk) -> Iterator[list[str]]:
        """Folder by folder: many WebDAV servers refuse to list a whole tree."""
        until = walk.step()
        paths = (
            self._listed(folder, until)
            if self._is_straight
            else self._courier.run(self._folder(folder), until)
        )
        yield self._parsed(paths)
        for path in paths:
            part = path.removeprefix(folder + "/")
            if depth and re.fullmatch(_FOLDERS[-depth], part):
                yield from self._walk(f"{folder}/{part}", depth - 1, walk)

    def _listed(self, folder: str, until: float) -> list[str]:
        wire, answer = self._ask_straight("PROPFIND", folder + "/", until, {"Depth": "1"})
        if answer.status in (405, 501):
            wire.drop()
            raise Unsupported(
                f"{self._address}: the server lists nothing (PROPFIND), so nothing can be cleared"
            )
        if answer.status == 404:
            self._rest(wire, answer, (404,), until)
            return []
        return paths_in(self._text(wire, answer, 207, until))

    async def _folder(self, folder: str) -> list[str]:
        import obstore

        try:
            found = await self._courier.ask(obstore.list_with_delimiter_async(self._store, folder))
        except FileNotFoundError:
            return []
        return [*map(str, found["common_prefixes"]), *(str(meta["path"]) for meta in found["objects"])]

    def _parsed(self, paths: Iterable[str]) -> list[str]:
        start = self._base + "/"
        return [path for path in paths if path.startswith(start) and _OURS.fullmatch(path, len(start))]

    def _name(self, namespace: bytes, key: bytes) -> str:
        digits = key.hex()
        return f"{self._base}/{namespace.hex()}/{digits[:2]}/{digits}"

    def _failed(self, what: str) -> Refused:
        return Refused(Reason.FAILED_CHECK, f"{self._address}: an object {what}")
