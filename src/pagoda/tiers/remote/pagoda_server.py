"""`pagoda serve` on another machine as a remote store: its chunks by HTTP, directly from and into
memory.

`open_client` makes a `PagodaServerClient` from a URL; `peers` uses one connection per neighbour.
The protocol, version 1:

    POST   /v1/NAMESPACE/find   keys -> {"found": leading run}
    GET    /v1/NAMESPACE/KEY    header page and payload
    PUT    /v1/NAMESPACE/KEY    the same, as the body
    DELETE /v1/NAMESPACE/KEY
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.base.serve_proof import key_of, unknown_key
from pagoda.base.serve_token_file import own_token
from pagoda.base.urls import RemoteUrl
from pagoda.tiers.remote.http import HttpConnection, Response, read_chunk
from pagoda.tiers.remote.proving_connection import ProvingConnection
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    ServerError,
    StoreClient,
    StoreConnection,
)

_FIND_KEYS = 4096  # the most keys in one request
# a chunk up to this size is sent without asking whether it is present
_SMALL_BYTES = 1 << 16
_UNUSED = bytes(32)  # neither a namespace nor a key: nothing is stored under it
_PUT_RESULTS = {
    200: PutResult.PRESENT,
    201: PutResult.STORED,
    409: PutResult.BUSY,
}
_REASONS = {413: Reason.TOO_LARGE, 422: Reason.FAILED_CHECK, 507: Reason.FULL}
_TOKEN = re.compile(r"[!-~]{1,4096}")


class PagodaServerClient(StoreClient):
    """A `pagoda serve` at `http://:TOKEN@HOST:PORT` (or https). Thread-safe, keeps no connection.

    Without a token in the URL, it is the token of this user's own server. It is not sent: both
    sides prove that they know it. Without any token, the server is called as it is.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "pagoda",
        is_found: bool = False,
        sends_token: bool = False,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: see the class.
            name: the name of the tier.
            is_found: the URL comes from the directory of neighbours, so anybody may have written it
                there.
            sends_token: send the token itself, for a server of an older version, or behind a proxy.

        Raises:
            ConfigError: the token cannot be sent in a header.
        """
        remote = RemoteUrl.of(url)
        token = remote.password or own_token()
        if token and not _TOKEN.fullmatch(token):
            raise ConfigError(
                "the token of a server is up to 4096 printable ASCII characters, without spaces: "
                "write another into "
                "the file that password_file names"
            )
        self.name = name
        self.address = remote.address
        self._origin = remote.without_login()
        self._headers = (
            {"Authorization": f"Bearer {token}"} if token and sends_token else {}
        )
        self._is_found = is_found
        self._key = key_of(token) if token and not sends_token else None
        if is_found and not token:
            # nobody can prove that he knows it: nothing is taken from strangers
            self._key = unknown_key()

    def connection(self) -> PagodaServerConnection:
        """Return a new connection that is still to be opened."""
        if self._key is None:
            return PagodaServerConnection(
                HttpConnection(self._origin), self._headers
            )
        return PagodaServerConnection(
            ProvingConnection(self._origin, self._key, is_found=self._is_found)
        )


class PagodaServerConnection(StoreConnection):
    """One connection to a `pagoda serve`; see StoreConnection. For one thread at a time, except
    `abort`.
    """

    def __init__(
        self,
        connection: HttpConnection,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`headers`: what is sent with every request."""
        self._http = connection
        self._headers = headers

    def ping(self, until: float) -> None:
        """Return if chunks can be read, that is, if the server answers and accepts the token."""
        self._ask("HEAD", _target(_UNUSED, _UNUSED), until, good=(200, 404))

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys are present: one round trip for thousands of keys."""
        for start in range(0, len(keys), _FIND_KEYS):
            batch = keys[start : start + _FIND_KEYS]
            found, _ = self._asked(namespace, batch, until)
            if found < len(batch):
                return start + found
        return len(keys)

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which keys are present, also behind absent ones: one round trip for thousands of
        keys. A server of an earlier version says only how many leading ones are.
        """
        here: list[bool] = []
        for start in range(0, len(keys), _FIND_KEYS):
            batch = keys[start : start + _FIND_KEYS]
            found, each = self._asked(namespace, batch, until, "?each=1")
            if each is None:
                here += [True] * found + [False] * (len(batch) - found)
                continue
            if (
                not isinstance(each, str)
                or len(each) != len(batch)
                or not set(each) <= {"0", "1"}
            ):
                raise ConnectionError(
                    f"the answer to {len(batch)} keys is not one of 0 and 1 for each: use a "
                    "pagoda serve"
                )
            here += [digit == "1" for digit in each]
        return here

    def _asked(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        query: str = "",
    ) -> tuple[int, object]:
        """Return how many leading keys a server has, and what it says of each."""
        body = [memoryview(b"".join(keys))]
        target = f"/v1/{namespace.hex()}/find{query}"
        response = self._http.request("POST", target, until, self._headers, body)
        answer = self._answer(response, until, good=(200,))
        found = answer.get("found")
        if (
            isinstance(found, bool)
            or not isinstance(found, int)
            or not 0 <= found <= len(keys)
        ):
            raise ConnectionError(
                f"the answer to {len(keys)} keys is not a count: use a pagoda serve"
            )
        return found, answer.get("each")

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Return which keys are present; the server counts the request as a use."""
        present: list[bool] = []
        while len(present) < len(keys):
            left = keys[len(present) :]
            found = self.find(namespace, left, until)
            present += [True] * found + [False] * (found < len(left))
        return present

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Return None for each key (not known): `put` asks for each chunk."""
        return [None] * len(keys)

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Send a chunk; the server checks it before it appears. A large one is sent only if it is
        absent.

        `is_valid` is called directly afterwards: if it returns False, the chunk is removed.
        """
        target = _target(request.namespace, request.key)
        stored = request.stored
        is_valid = request.is_valid
        if (
            stored.nbytes > _SMALL_BYTES
            and self._ask("HEAD", target, until, good=(200, 404)) == 200
        ):
            return PutResult.PRESENT
        response = self._http.request(
            "PUT", target, until, self._headers, [request.page.data, stored.data]
        )
        # the slot was reused while it was sent
        if response.status == 422 and not is_valid():
            self._http.finish(response, 0, until)
            return PutResult.STALE
        self._answer(response, until, good=tuple(_PUT_RESULTS))
        result = _PUT_RESULTS[response.status]
        if result is PutResult.STORED and not is_valid():
            self.remove(request.namespace, [request.key], until)
            return PutResult.STALE
        return result

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination`; one round trip."""
        target = _target(request.namespace, request.key)
        response = self._http.request("GET", target, until, self._headers)
        if response.status != 200:
            self._answer(response, until, good=(404,))
            return None
        return read_chunk(self._http, response, request, until)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove chunks, one request each; return how many were present."""
        return sum(
            self._ask("DELETE", _target(namespace, key), until, good=(204, 404))
            == 204
            for key in keys
        )

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Refuse: the chunks belong to the other machine."""
        raise RefusedError(
            Reason.NOT_ADMITTED,
            "its chunks are that machine's: run pagoda clear there",
        )

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Refuse, for the same reason."""
        raise RefusedError(
            Reason.NOT_ADMITTED,
            "its chunks are that machine's: run pagoda ls there",
        )

    def abort(self) -> None:
        """Make a call that waits in this connection fail soon with an OSError. From any thread."""
        self._http.abort()

    def close(self) -> None:
        """Close the connection; never waits. Idempotent."""
        self._http.abort()
        self._http.drop()

    def _ask(
        self, method: str, target: str, until: float, good: Sequence[int]
    ) -> int:
        """Send a request without a body and return the status of its answer."""
        response = self._http.request(method, target, until, self._headers)
        self._answer(response, until, good)
        return response.status

    def _answer(
        self, response: Response, until: float, good: Sequence[int]
    ) -> Mapping[str, object]:
        """Read the rest of an answer that is not a chunk; RefusedError or OSError if its status is
        not a good one.
        """
        text = self._http.finish(response, 0, until)
        try:
            found = json.loads(text or b"{}")
        except ValueError:
            found = {}
        answer = found if isinstance(found, dict) else {}
        if response.status in good:
            return answer
        raise _failure(response.status, str(answer.get("reason", ""))[:100])


def _target(namespace: bytes, key: bytes) -> str:
    return f"/v1/{namespace.hex()}/{key.hex()}"


def _failure(status: int, reason: str) -> Exception:
    """Return the exception for a status that no caller expects."""
    if status == 401:
        return RefusedError(
            Reason.IO_ERROR,
            "401: name the server's token: ?password_file=PATH in the URL",
        )
    if reason == "other_server":
        what = (
            "the directory names it by an address that is not its own: start it with "
            "--advertise URL"
        )
        return RefusedError(Reason.IO_ERROR, f"{status}: {what}")
    if status in (403, 405):
        return RefusedError(
            Reason.IO_ERROR,
            f"{status}: the server does not allow this {reason}".rstrip(),
        )
    if status in _REASONS:
        return RefusedError(_REASONS[status], f"{status} {reason}".rstrip())
    return ServerError(f"the server answered {status} {reason}".rstrip())
