"""Object stores (S3, GCS, Azure, WebDAV) as a remote store: one object per chunk, by obstore and
our own HTTP client.

obstore finds credentials, signs, lists and deletes in bulk. All other requests to S3 and WebDAV are
direct, over an
`HttpConnection`: obstore copies a chunk, and holds a response of any length in memory (its
allocator ends the process if that fails). Requests to GCS and Azure, and requests with options that
a URL cannot express, all use obstore.

An object is the header page followed by the stored bytes. Its name is
`[path of the URL/]<prefix>/<NAME_FORMAT>/<namespace>/<first two digits of the key>/<key>`, in
lower-case hex digits.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

from pagoda.base.metrics import Reason
from pagoda.base.urls import SCHEMES, WEBDAV, check_prefix
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote import obstore_runner, s3_list_delete, store_urls
from pagoda.tiers.remote.http import (
    HttpConnection,
    HttpConnectionPool,
    Response,
    listed_paths,
    read_chunk,
)
from pagoda.tiers.remote.leading_run import EXACT_REQUESTS
from pagoda.tiers.remote.obstore_runner import (
    NO_BUCKET,
    ObstoreRunner,
    UnsupportedError,
    batches,
    error_code,
    gather_all,
)
from pagoda.tiers.remote.store_client import (
    NAME_FORMAT,
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    StoreClient,
    StoreConnection,
)

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

_T = TypeVar("_T")
# requests in flight of one connection: for a find, and for what a store cannot do in bulk
_AT_ONCE = EXACT_REQUESTS
# names per step of a listing: fewer than one bulk request may have (S3: 1000, Azure: 256)
_BATCH = 250
_NAMESPACES = 1 << 16
_LISTING_BYTES = 32 << 20  # the listing of one folder, about 60000 names
BELIEVED_SECONDS = 600.0  # each lookup is a request that costs money
# a URL is used immediately, but clocks may differ
_SIGNED_FOR = timedelta(minutes=15)
# the smallest piece: pieces are used as they arrive, because joining them would be another copy
_FIRST_BYTES = 1

# for stores that can refuse to overwrite; 409: another writer is storing or deleting the object,
# which may be absent afterwards
_PUT_RESULTS = {409: PutResult.BUSY, 412: PutResult.PRESENT}
_CHUNK_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})")
# names of the folders of namespaces, and of the folders in each of them
_FOLDERS = ("[0-9a-f]{64}", "[0-9a-f]{2}")


class ObjectStoreClient(StoreClient):
    """An object store that many machines share. Thread-safe.

    After the first request, a forked child cannot connect: obstore's threads do not exist in it,
    and OSError says so.
    """

    keepalive_seconds = None  # each request costs money
    believed_seconds = BELIEVED_SECONDS

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
            name: the name of the tier; by default the scheme, or "webdav".
            options: settings of obstore for that kind of store (`endpoint`, `region`, ...), as in
                its documentation.

        Raises:
            ValueError: the URL, the prefix or an option is invalid. No message contains the value
                of an option.
            ModuleNotFoundError: obstore is not installed; says how to install it.
        """
        parts, path = store_urls.parse_store_url(url)
        check_prefix(prefix)
        self.name = name or SCHEMES[parts.scheme].store
        self._base = "/".join(
            part for part in (path, prefix, str(NAME_FORMAT)) if part
        )
        self._parts = parts
        self._options = dict(options)
        endpoint = store_urls.endpoint_of(parts, self._options)
        self.address = f"{parts.scheme}://{store_urls.host_of(parts)}{f'/{path}' if path else ''}"
        if endpoint is not None and endpoint is not parts:
            self.address += (
                f" at {endpoint.scheme}://{store_urls.host_of(endpoint)}"
            )
        obstore_runner.open_store(parts, self._options)

    def connection(self) -> ObjectStoreConnection:
        """Return a new connection pool that is still to be opened."""
        store = obstore_runner.open_store(self._parts, self._options)
        is_direct = store_urls.supports_direct(self._parts, self._options)
        secret = (
            s3_list_delete.find_secret(self._options)
            if is_direct and self._parts.scheme == "s3"
            else None
        )
        return ObjectStoreConnection(
            store, self._base, self.address, self._parts, is_direct, secret
        )


class ObjectStoreConnection(StoreConnection):
    """One connection pool to an object store, with an event loop that runs only during calls.

    For one thread at a time, except `abort` and `close`. A request that is out of time is cancelled
    and its connection is closed; nothing is retried. `find` is exact for up to 16 keys, which take
    one round of requests. Of more keys, each round tests 16 positions (up to 272 keys: 2 rounds,
    4368: 3): see `leading_run`. Object stores keep no recency and no claims, and do not say how
    full they are.
    """

    exact_keys = EXACT_REQUESTS

    def __init__(
        self,
        store: ObjectStore,
        base: str,
        address: str,
        url: SplitResult,
        is_direct: bool,
        secret: str | None = None,
    ) -> None:
        self._store = store
        self._base = base
        self._address = address
        self._url = url
        self._is_webdav = SCHEMES[url.scheme].store == WEBDAV
        self._is_direct = is_direct
        # to sign requests to a whole S3 bucket, which obstore does not sign
        self._secret = secret
        self._headers = store_urls.authorization_header(url)
        self._http: HttpConnection | None = None
        self._http_pool: HttpConnectionPool | None = None  # for lookups
        # whether the store can refuse to overwrite
        self._creates = not self._is_webdav
        self._runner = ObstoreRunner(address)
        self._in_http_call = False
        self._runner.ended = False

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys are present, one request each. If none of some positions is, the others
        are not asked about: most prompts that are not found were never stored, and each request
        costs money.
        """
        step = max(1, len(keys) // self.exact_keys)
        probes = range(0, len(keys), step)
        found = self.touch(namespace, [keys[at] for at in probes], until)
        here = [False] * len(keys)
        here[::step] = found
        if step == 1 or not any(found):
            return here
        rest = [at for at in range(len(keys)) if at % step]
        more = self.touch(namespace, [keys[at] for at in rest], until)
        for at, is_here in zip(rest, more, strict=True):
            here[at] = is_here
        return here

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Return which keys are present, one request each."""
        return self._are_present(
            [self._name(namespace, key) for key in keys], until
        )

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store the chunk unless the store reports it as present, then call `is_valid`. The buffers
        are not copied.
        """
        name = self._name(request.namespace, request.key)
        result = self._put_object(name, [request.page, request.stored], until)
        if result is not PutResult.STORED or request.is_valid():
            return result
        self._delete_one(name, until)
        return PutResult.STALE

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination`, directly from the socket or piece by piece
        as they arrive.
        """
        name = self._name(request.namespace, request.key)
        if self._is_direct:
            return self._get_direct(name, request, until)
        return self._runner.run(self._get_by_obstore(name, request), until)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove values; return how many were present, which is checked first: a deletion does not
        report it.
        """
        names = [self._name(namespace, key) for key in keys]
        present = self._are_present(names, until)
        found = [
            name
            for name, is_present in zip(names, present, strict=True)
            if is_present
        ]
        for name in found:
            self._delete_one(name, until)
        return len(found)

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all values of one namespace (None: all of ours); return how many. A step is a
        listing or 250 names.
        """
        removed = 0
        for names in self._chunk_names(namespace, deadline):
            for some in batches(names, _BATCH):
                self._delete_all(some, deadline)
                removed += len(some)
        return removed

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return the number of chunks of each namespace, from a listing of all names."""
        found: Counter[bytes] = Counter()
        skip = len(self._base) + 1
        for names in self._chunk_names(None, deadline):
            found.update(bytes.fromhex(name[skip : skip + 64]) for name in names)
            if len(found) > _NAMESPACES:
                raise OSError(
                    f"{self._address}: more than {_NAMESPACES} namespaces"
                )
        return found

    def ping(self, until: float) -> None:
        """Return if a name that is never written is absent. RefusedError: there is something under
        it.
        """
        name = f"{self._base}/ping"
        if self._is_direct:
            response = self._request("GET", name, until)
            self._finish(response, (200, 404), until)
            is_there = response.status == 200
        else:
            is_there = self._runner.run(self._can_get_by_obstore(name), until)
        # a web server that answers any name with a page: every key would count as stored
        if is_there:
            text = (
                f"{self._address}: has even what nobody stores: is it such a store? look at "
                "the URL"
            )
            raise RefusedError(Reason.IO_ERROR, text)

    def abort(self) -> None:
        """Make a call that waits in this connection fail at once with an OSError."""
        self._runner.abort()
        for part in (self._http, self._http_pool):
            if part is not None:
                part.abort()

    def close(self) -> None:
        """Close the connections. A call that waits in this connection fails, and releases its
        resources at its end.
        """
        self.abort()
        self._runner.close()
        if not self._in_http_call:
            self._close_http()
        if not self._runner.running:
            # frees its pool now, not at the next garbage collection
            self.__dict__.pop("_store", None)

    def _put_object(
        self, name: str, pieces: list[Bytes], until: float
    ) -> PutResult:
        """Store an object, unless the store can tell that it exists."""
        while True:
            try:
                if self._is_direct:
                    return self._put_direct(name, pieces, until)
                return self._runner.run(self._put_by_obstore(name, pieces), until)
            except UnsupportedError:
                if not self._creates:
                    raise
                self._creates = False

    def _delete_one(self, name: str, until: float) -> None:
        if self._is_direct:
            self._finish(
                self._request("DELETE", name, until), (200, 202, 204, 404), until
            )
        else:
            self._runner.run(self._delete_by_obstore([name]), until)

    def _delete_all(
        self, names: Sequence[str], deadline: ListingDeadline
    ) -> None:
        # WebDAV has no bulk deletion, and its responses are short
        if self._is_direct and self._is_webdav:
            for name in names:
                self._delete_one(name, deadline.next_step())
        elif names and not self._delete_bulk(names, deadline.next_step()):
            self._runner.run(self._delete_by_obstore(names), deadline.next_step())

    def _delete_bulk(self, names: Sequence[str], until: float) -> bool:
        """Delete as many as S3 accepts in one request; return False if we cannot sign it."""
        headers, body = s3_list_delete.bulk_delete(names)
        response = self._request_bucket(
            "POST", {"delete": ""}, until, headers, [memoryview(body)]
        )
        if response is None:
            return False
        text = self._body(response, 200, until)
        if b"<Error>" in text:  # an error for one of the names
            raise self._runner.status_error(
                403, error_code(text.decode("latin-1"))
            )
        return True

    # ---- direct requests, over our own connections

    def _get_direct(
        self, name: str, request: GetRequest, until: float
    ) -> int | None:
        response = self._request("GET", name, until)
        if response.status != 200:
            self._finish(response, (404,), until)
            return None
        with self._http_errors():
            return read_chunk(self._connection, response, request, until)

    def _put_direct(
        self, name: str, pieces: list[Bytes], until: float
    ) -> PutResult:
        more = {"If-None-Match": "*"} if self._creates else {}
        body = [piece.data for piece in pieces]
        response = self._request("PUT", name, until, more, body)
        if self._is_webdav and response.status in (404, 409):
            self._finish(response, (404, 409), until)
            self._make_folder(name.rpartition("/")[0], until)
            response = self._request("PUT", name, until, more, body)
        refusals = {} if self._is_webdav else _PUT_RESULTS
        self._finish(response, (200, 201, 204, *refusals), until)
        return refusals.get(response.status, PutResult.STORED)

    def _make_folder(self, folder: str, until: float) -> None:
        """Make a folder on a WebDAV server, with its missing parents, because some servers make
        none for a put.
        """
        above = folder.rpartition("/")[0]
        if not self._has_made(folder, until) and above:
            self._make_folder(above, until)
            self._has_made(folder, until)

    def _has_made(self, folder: str, until: float) -> bool:
        """Make one folder; False: its parent is missing."""
        response = self._request("MKCOL", folder + "/", until)
        # 405: it exists by now, or cannot be made
        self._finish(response, (201, 404, 405, 409), until)
        return response.status in (201, 405)

    def _request(
        self,
        method: str,
        name: str,
        until: float,
        more: Mapping[str, str] = {},
        body: Sequence[memoryview] = (),
    ) -> Response:
        url, (target,) = self._request_targets(method, [name], until)
        return self._send(
            url, method, target, until, {**self._headers, **more}, body
        )

    def _request_bucket(
        self,
        method: str,
        parameters: Mapping[str, str],
        until: float,
        headers: Mapping[str, str] = {},
        body: Sequence[memoryview] = (),
    ) -> Response | None:
        """Send S3 a request to the whole bucket; return None if we cannot sign it."""
        if self._secret is None:
            return None
        url, _ = self._request_targets("GET", [""], until)
        target = s3_list_delete.signed_target(
            method, url, self._secret, parameters
        )
        return (
            None
            if target is None
            else self._send(url, method, target, until, headers, body)
        )

    def _send(
        self,
        url: SplitResult,
        method: str,
        target: str,
        until: float,
        headers: Mapping[str, str],
        body: Sequence[memoryview],
    ) -> Response:
        if self._http is None or not self._http.serves(url):
            self._http = HttpConnection(url)
        self._runner.check_open()  # from here on `abort` ends the connection
        with self._http_errors():
            return self._http.request(method, target, until, headers, body)

    @property
    def _connection(self) -> HttpConnection:
        """The connection that had the last response."""
        assert self._http is not None
        return self._http

    def _request_targets(
        self, method: str, names: Sequence[str], until: float
    ) -> tuple[SplitResult, list[str]]:
        """Return the targets of requests, signed if necessary."""
        self._runner.check_usable()
        if self._is_webdav:
            return self._url, ["/" + quote(name, safe="/~") for name in names]
        signed = [
            urlsplit(url)
            for url in self._runner.run(self._sign(method, names), until)
        ]
        return signed[0], [f"{url.path}?{url.query}" for url in signed]

    async def _sign(self, method: str, names: Sequence[str]) -> list[str]:
        import obstore

        signed: Awaitable[list[str]] = obstore.sign_async(
            self._store, method, names, _SIGNED_FOR
        )  # type: ignore[call-overload, unused-ignore]
        return await self._runner.result_of(signed)

    def _are_present(self, names: Sequence[str], until: float) -> list[bool]:
        if not self._is_direct:
            return self._runner.run(
                self._for_each(names, self._is_present_by_obstore), until
            )
        present: list[bool] = []
        for some in batches(names, _AT_ONCE):
            present += map(self._is_present, self._head_statuses(some, until))
        return present

    def _head_statuses(self, names: Sequence[str], until: float) -> list[int]:
        """Return the status of a HEAD request for each name, at most _AT_ONCE; one alone uses the
        main connection.
        """
        if len(names) == 1:
            response = self._request("HEAD", names[0], until)
            with self._http_errors():
                self._connection.finish(response, 0, until)
            return [response.status]
        url, targets = self._request_targets("HEAD", names, until)
        if self._http_pool is not None and not self._http_pool.serves(url):
            self._http_pool.close()
            self._http_pool = None
        pool = self._http_pool = self._http_pool or HttpConnectionPool(
            url, _AT_ONCE
        )
        self._runner.check_open()  # from here on `abort` ends its connections
        with self._http_errors():
            return pool.head_all(targets, until, self._headers)

    def _is_present(self, status: int) -> bool:
        """Return what the status of a HEAD request means; all other statuses are errors, also
        redirections.
        """
        if status in (200, 404):
            return status == 200
        raise self._runner.status_error(status, "")

    def _finish(
        self, response: Response, good: Sequence[int], until: float
    ) -> None:
        """End a response that contains no chunk; RefusedError or OSError if its status is not among
        the good ones.
        """
        with self._http_errors():
            text = self._connection.finish(response, 0, until).decode("latin-1")
        code = error_code(text)
        if response.status not in good or code in NO_BUCKET:
            raise self._runner.status_error(response.status, code)

    @contextlib.contextmanager
    def _http_errors(self) -> Iterator[None]:
        """Translate the errors of calls that wait for an HTTP connection."""
        self._in_http_call = True
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"{self._address}: out of time") from None
        except OSError as error:
            what = (
                "aborted" if self._runner.ended else error.strerror or str(error)
            )
            raise OSError(f"{self._address}: {what[:100]}") from None
        finally:
            self._in_http_call = False
            if self._runner.ended:
                self._close_http()

    def _close_http(self) -> None:
        if self._http is not None:
            self._http.drop()
        if self._http_pool is not None:
            self._http_pool.close()

    # ---- by obstore: these coroutines run in the event loop

    async def _is_present_by_obstore(self, name: str) -> bool:
        import obstore

        return (
            await self._unless_absent(obstore.head_async(self._store, name))
            is not None
        )

    async def _put_by_obstore(self, name: str, pieces: list[Bytes]) -> PutResult:
        import obstore

        mode: Literal["create", "overwrite"] = (
            "create" if self._creates else "overwrite"
        )
        try:
            await self._runner.result_of(
                obstore.put_async(
                    self._store,
                    name,
                    pieces,  # type: ignore[arg-type, unused-ignore]
                    mode=mode,
                    use_multipart=False,
                )
            )
        except FileExistsError:
            return PutResult.PRESENT
        except FileNotFoundError:
            raise RefusedError(
                Reason.IO_ERROR,
                f"{self._address}: there is no such place to write to",
            ) from None
        return PutResult.STORED

    async def _get_by_obstore(self, name: str, request: GetRequest) -> int | None:
        import obstore

        result: GetResult | None = await self._unless_absent(
            obstore.get_async(self._store, name)
        )
        if result is None:
            return None
        # bytes that were announced but have not arrived
        left = int(result.meta["size"])
        if left < HEADER_BYTES:
            raise self._bad_object("is shorter than a header")
        rest_bytes = left - HEADER_BYTES
        target = request.page
        at = 0
        rest = False
        stream: AsyncIterator[bytes] = result.stream(_FIRST_BYTES)
        while (piece := await self._next(stream)) is not None:
            data = np.frombuffer(piece, np.uint8)
            left -= data.nbytes
            if left < 0:
                raise self._bad_object("is longer than announced")
            if not rest and at + data.nbytes >= HEADER_BYTES:
                head = HEADER_BYTES - at
                target[at:HEADER_BYTES] = data[:head]
                target = request.space_for(rest_bytes)
                at = 0
                rest = True
                data = data[head:]
            target[at : at + data.nbytes] = data
            at += data.nbytes
        if left:
            raise self._bad_object("is shorter than announced")
        return rest_bytes

    async def _unless_absent(self, request: Awaitable[_T]) -> _T | None:
        try:
            return await self._runner.result_of(request)
        except FileNotFoundError:
            return None

    async def _next(self, stream: AsyncIterator[_T]) -> _T | None:
        try:
            return await self._runner.result_of(stream.__anext__())
        except StopAsyncIteration:
            return None

    async def _delete_by_obstore(self, names: Sequence[str]) -> int:
        """Delete, in bulk if the store can; return how many names were given."""
        import obstore

        try:
            if names:
                which = names[0] if len(names) == 1 else names
                await self._runner.result_of(
                    obstore.delete_async(self._store, which)
                )
        except FileNotFoundError:
            # another client deletes too; the other names may not have been tried
            if len(names) > 1:
                await self._for_each(
                    names, lambda name: self._delete_by_obstore([name])
                )
        return len(names)

    async def _for_each(
        self, names: Sequence[str], ask: Callable[[str], Awaitable[_T]]
    ) -> list[_T]:
        answers: list[_T] = []
        for some in batches(names, _AT_ONCE):
            answers += await gather_all(map(ask, some))
        return answers

    # the answer to a HEAD does not show a missing bucket
    async def _can_get_by_obstore(self, name: str) -> bool:
        import obstore

        return (
            await self._unless_absent(obstore.get_async(self._store, name))
            is not None
        )

    # ---- listings

    def _chunk_names(
        self, namespace: bytes | None, deadline: ListingDeadline
    ) -> Iterator[list[str]]:
        """Yield the names of chunks, some at a time; ignore all other names in a listing."""
        import obstore

        where = (
            self._base if namespace is None else f"{self._base}/{namespace.hex()}"
        )
        if self._is_webdav:
            yield from self._webdav_names(
                where, 2 if namespace is None else 1, deadline
            )
            return
        found, token = self._s3_page(where + "/", None, deadline.next_step())
        if found is not None:
            yield found
            while token is not None:
                found, token = self._s3_page(
                    where + "/", token, deadline.next_step()
                )
                yield found or []
            return
        stream = obstore.list(self._store, where + "/", chunk_size=_BATCH)
        while True:
            metas = self._runner.run(self._next(stream), deadline.next_step())  # type: ignore[arg-type, unused-ignore]
            if metas is None:
                return
            yield self._only_chunks(str(meta["path"]) for meta in metas)

    def _s3_page(
        self, prefix: str, token: str | None, until: float
    ) -> tuple[list[str] | None, str | None]:
        """Return the chunk names on one page of S3's listing, and the next page's token. None: we
        cannot sign it.
        """
        response = self._request_bucket(
            "GET", s3_list_delete.page_parameters(prefix, token), until
        )
        if response is None:
            return None, None
        names, following = s3_list_delete.parse_page(
            self._body(response, 200, until)
        )
        return self._only_chunks(names), following

    def _body(self, response: Response, good: int, until: float) -> bytes:
        """Return the whole body, if the response has the good status."""
        if response.status != good:
            self._finish(response, (), until)
        with self._http_errors():
            text = self._connection.read_body(response, _LISTING_BYTES, until)
        if text is None:
            raise RefusedError(
                Reason.FAILED_CHECK,
                f"{self._address}: a listing is longer than {_LISTING_BYTES >> 20} MiB",
            )
        return text

    def _webdav_names(
        self, folder: str, depth: int, deadline: ListingDeadline
    ) -> Iterator[list[str]]:
        """Yield names folder by folder: many WebDAV servers refuse to list a whole tree."""
        until = deadline.next_step()
        paths = (
            self._list_folder(folder, until)
            if self._is_direct
            else self._runner.run(self._list_folder_by_obstore(folder), until)
        )
        yield self._only_chunks(paths)
        for path in paths:
            part = path.removeprefix(folder + "/")
            if depth and re.fullmatch(_FOLDERS[-depth], part):
                yield from self._webdav_names(
                    f"{folder}/{part}", depth - 1, deadline
                )

    def _list_folder(self, folder: str, until: float) -> list[str]:
        response = self._request("PROPFIND", folder + "/", until, {"Depth": "1"})
        if response.status in (405, 501):
            self._connection.drop()
            raise UnsupportedError(
                f"{self._address}: the server lists nothing (PROPFIND), so nothing can be cleared"
            )
        if response.status == 404:
            self._finish(response, (404,), until)
            return []
        return listed_paths(self._body(response, 207, until))

    async def _list_folder_by_obstore(self, folder: str) -> list[str]:
        import obstore

        found = await self._unless_absent(
            obstore.list_with_delimiter_async(self._store, folder)
        )
        if found is None:
            return []
        return [
            *map(str, found["common_prefixes"]),
            *(str(meta["path"]) for meta in found["objects"]),
        ]

    def _only_chunks(self, paths: Iterable[str]) -> list[str]:
        start = self._base + "/"
        return [
            path
            for path in paths
            if path.startswith(start) and _CHUNK_NAME.fullmatch(path, len(start))
        ]

    def _name(self, namespace: bytes, key: bytes) -> str:
        digits = key.hex()
        return f"{self._base}/{namespace.hex()}/{digits[:2]}/{digits}"

    def _bad_object(self, what: str) -> RefusedError:
        return RefusedError(
            Reason.FAILED_CHECK, f"{self._address}: an object {what}"
        )
