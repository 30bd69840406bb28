"""An object store with an index: a Redis that knows which chunks are there, so that lookups cost no
requests.

For each chunk there is a mark in the Redis: a chunk without bytes, under the same namespace and
key. The marks are hints. A mark without its object is a miss when the chunk is read, and is then
removed. An object without a mark is not found until a machine stores it again; the object store
then refuses, because it is there, and the mark is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from pagoda.base.metrics import Reason
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    PutRequest,
    PutResult,
    RefusedError,
    StoreClient,
    StoreConnection,
    Usage,
)


def index_prefix(prefix: str, address: str) -> str:
    """Return the prefix of the marks for one object store: several stores may share a Redis, also
    with chunks.
    """
    return f"{prefix}-index-{hashlib.blake2b(address.encode(), digest_size=4).hexdigest()}"


class IndexedStoreClient(StoreClient):
    """The object store of `store`, whose chunks the Redis of `index` knows. Thread-safe, keeps no
    connection.
    """

    def __init__(self, store: StoreClient, index: StoreClient) -> None:
        self._store = store
        self._index = index
        self.name = store.name
        self.address = store.address
        self.keepalive_seconds = index.keepalive_seconds
        self.believed_seconds = index.believed_seconds

    def connection(self) -> IndexedStoreConnection:
        """Return a new connection that is still to be opened."""
        return IndexedStoreConnection(
            self._store.connection(), self._index.connection()
        )


class IndexedStoreConnection(StoreConnection):
    """A connection to an object store and one to its index; see StoreConnection. If either fails,
    so does the call.
    """

    def __init__(self, store: StoreConnection, index: StoreConnection) -> None:
        self._store = store
        self._index = index

    def open(self, until: float) -> Self:
        """Open both."""
        self._index.open(until)
        self._store.open(until)
        return self

    def find(self, namespace: bytes, keys: Sequence[bytes], until: float) -> int:
        """Return how many leading keys the index has."""
        return self._index.find(namespace, keys, until)

    def present(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[bool]:
        """Return which of these keys the index has."""
        return self._index.present(namespace, keys, until)

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Touch these keys in the index; return which of them it has."""
        return self._index.touch(namespace, keys, until, ranks)

    def claim(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> list[PutResult | None]:
        """Ask the index before puts; it keeps other writers away until the mark is set."""
        return self._index.claim(namespace, keys, until)

    def release(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> None:
        """End claims in the index that no put has ended."""
        self._index.release(namespace, keys, until)

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store an object, then its mark."""
        result = self._store.put(request, until)
        if result in (PutResult.STORED, PutResult.PRESENT):
            mark = request._replace(
                page=request.page[:0],
                stored=request.stored[:0],
                is_valid=lambda: True,
            )
            self._index.put(mark, until)
        return result

    def get(self, request: GetRequest, until: float) -> int | Reason | None:
        """Read an object; remove the mark of one that is absent."""
        found = self._store.get(request, until)
        if found is None:
            self._index.remove(request.namespace, [request.key], until)
        elif isinstance(found, int):
            # touch it here: a lookup alone does not count as a use
            # the chunk has been read: the next call reports what is wrong
            with suppress(OSError, RefusedError):
                self._index.touch(
                    request.namespace, [request.key], until, [request.rank]
                )
        return found

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove marks, then objects; return how many objects were present."""
        self._index.remove(namespace, keys, until)
        return self._store.remove(namespace, keys, until)

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all marks of one namespace (None: all of ours), then all objects; return how many
        objects.
        """
        self._index.clear(namespace, deadline)
        return self._store.clear(namespace, deadline)

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Return the number of objects of each namespace (its root), from a listing of all
        names.
        """
        return self._store.count_by_namespace(deadline)

    def usage(self, until: float) -> Usage:
        """Return that nothing is known: object stores do not report how full they are."""
        return self._store.usage(until)

    def ping(self, until: float) -> None:
        """Return if both answer."""
        self._index.ping(until)
        self._store.ping(until)

    def abort(self) -> None:
        """Make a call that waits in this connection fail soon with an OSError. From any thread."""
        self._index.abort()
        self._store.abort()

    def close(self) -> None:
        """Close both; never waits. Idempotent."""
        self._index.close()
        self._store.close()
