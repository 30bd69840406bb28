"""`pagoda warm`: loads the most used chunks from Redis into this machine's host tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

from typer import Option

from pagoda_tools.cli import FailedError, UsageError, printing
from pagoda_tools.cli.remote_stores import (
    WALK_SECONDS,
    Unanswered,
    ask,
    patience,
    remotes_of,
    require_libraries,
)
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Configured,
    find_stores,
    given_bytes,
)

if TYPE_CHECKING:
    from pagoda.codec import Header
    from pagoda.config import RemoteSpec
    from pagoda.tiers.base import Bytes
    from pagoda.tiers.remote.redis import ChunkUse, RedisConnection
    from pagoda.tiers.remote.store_client import StoreConnection
    from pagoda_tools.serve.served_stores import ServedStore, ServedStores

_MOST_CHUNKS = 1 << 16  # candidates
_HEADERS = 64  # headers that are read at once
# chunks used within this time count as used now: one request uses its chunks within it
_ALIKE_SECONDS = 63
_LOOK_SECONDS = 0.1  # the pause between two checks of what the engines here do
# counters of the engines' work
_WORK = ("lookups", "loaded_chunks", "stored_chunks")


class WarmedTier(NamedTuple):
    """What was loaded from one remote tier, and why it ended: "all", "bytes", "room" or
    "traffic".
    """

    tier: str
    chunks: int
    bytes: int
    damaged: int
    ended: str
    address: str


def _coldness_class(use: ChunkUse) -> int:
    """Return a class of chunks of similar use: by frequency, or by the time since the last use
    (powers of 2).
    """
    return min(use.coldness, 0) or max(use.coldness, _ALIKE_SECONDS).bit_length()


class _EndedError(Exception):
    """No more chunks are to be loaded; the message is the reason."""


def warm(
    most: Annotated[str | None, Option("--bytes", metavar="SIZE")] = None,
    rate: Annotated[str, Option(metavar="SIZE")] = "256MiB",
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Load the chunks that all machines use most from Redis into this machine's host tier.

    For a machine that has just started: nothing is evicted, and the command ends when an engine
    here starts to work.

    Args:
        most: The most bytes to load; default: half of the host tier.
        rate: The most bytes to load per second, over this machine's link.
    """
    wanted = None if most is None else given_bytes("--bytes", most)
    speed = given_bytes("--rate", rate)
    specs = remotes_of(None, config)
    remotes = [spec for spec in specs if spec.kind == "redis"]
    if not remotes:
        raise UsageError(
            "warm needs a remote tier in Redis: set remote to redis://HOST"
        )
    require_libraries(remotes)
    for spec in specs:
        if spec not in remotes:
            printing.note(
                f"{spec.redacted}: left out, because only Redis knows which chunks are used most"
            )
    done: list[WarmedTier] = []
    broken: dict[str, str] = {}
    with _host_stores(config) as stores, printing.progress(as_json) as bars:
        left = _half(stores) if wanted is None else wanted
        for spec in remotes:
            show = partial(
                bars.update,
                bars.add_task(f"warming from {spec.name}", total=None),
            )
            try:
                done.append(
                    ask(
                        spec,
                        partial(_Warming(stores, spec, left, speed).run, show),
                    )
                )
            except Unanswered as trouble:
                broken[spec.redacted] = trouble.text
                continue
            left -= done[-1].bytes
            if done[-1].ended == "traffic":
                break
    named = Configured(None, config)
    # where nothing at all was loaded, the trouble is the answer
    unnamed = named.unnamed(broken) if done else []
    if as_json:
        printing.print_json(
            {
                "remotes": [one._asdict() for one in done],
                "failed": broken,
                "unconfigured": unnamed,
            }
        )
    else:
        rows = [one._replace(bytes=printing.size(one.bytes)) for one in done]  # type: ignore[arg-type]
        printing.print_table(
            "", ("tier", "chunks", "size", "damaged", "ended by", "address"), rows
        )
    for where in unnamed:
        named.note(where, f"not loaded: {where}: {broken.pop(where)}")
    if broken:
        troubles = "; ".join(
            f"{where}: {trouble}" for where, trouble in broken.items()
        )
        raise FailedError(f"not loaded: {troubles}")
    return 0


@contextmanager
def _host_stores(config: ConfigFile) -> Iterator[ServedStores]:
    """Open the stores of this machine. Raises FailedError if none of them is in memory."""
    from pagoda_tools.serve.served_stores import ServedStores

    stores = ServedStores(lambda: find_stores(None, config))
    try:
        stores.scan()
        if not any(store.in_memory for store in stores.stores()):
            raise FailedError(
                "there is no host tier here yet: an engine creates it when it starts"
            )
        yield stores
    finally:
        for store in stores.end():
            store.close()


def _half(stores: ServedStores) -> int:
    """Return half of the bytes that the host stores can hold."""
    from pagoda.ledger import admin

    found = [
        (
            admin.gauges(store.ledger),
            store.ledger.space.growable(),
            store.chunk_bytes,
        )
        for store in stores.stores()
        if store.in_memory
    ]
    return (
        sum(
            (gauges["slots"] - gauges["unbacked"] + more) * nbytes
            for gauges, more, nbytes in found
        )
        // 2
    )


class _Warming:
    """Loads chunks from one remote tier, at most `left` bytes, `rate` bytes per second. For one
    thread.
    """

    def __init__(
        self, stores: ServedStores, spec: RemoteSpec, left: int, rate: int
    ) -> None:
        self._stores = stores
        self._spec = spec
        self._left = left
        self._rate = rate
        self._hosts = {
            store.fingerprint: store
            for store in stores.stores()
            if store.in_memory
        }
        # one stamp for all chunks: the tails, which are loaded last, must not outlive their heads
        self._stamps = {
            name: store.ledger.stamp() for name, store in self._hosts.items()
        }
        self._asked: set[bytes] = set()  # keys
        # namespaces of other layouts; a namespace has one layout
        self._strange: set[bytes] = set()
        self._chunks = self._bytes = self._damaged = 0
        self._ended = "all"
        self._due, self._before = time.monotonic(), self._work()

    def run(self, show: Callable[..., None], link: StoreConnection) -> WarmedTier:
        """Load the chunks that fit, parents first; `show` the progress. Raises the errors of the
        connection.
        """
        from pagoda.tiers.remote.store_client import ListingDeadline

        # or a connection to several nodes, with the same methods
        self._redis = cast("RedisConnection", link)
        try:
            uses = self._redis.most_used(
                _MOST_CHUNKS, ListingDeadline(patience(self._spec), WALK_SECONDS)
            )
            self._uses = {use.key: use for use in uses}
            chosen = sorted(
                self._chosen(uses), key=lambda header: header.position
            )
            show(total=len(chosen))
            for number, header in enumerate(chosen):
                self._bring(header)
                show(completed=number + 1)
        except _EndedError as end:
            self._ended = str(end)
        return WarmedTier(
            self._spec.name,
            self._chunks,
            self._bytes,
            self._damaged,
            self._ended,
            self._spec.redacted,
        )

    def _chosen(self, uses: Sequence[ChunkUse]) -> Iterator[Header]:
        """Yield the headers of the most used chunks that fit, each after its parent.

        A chunk is left out if its parent is neither stored here nor chosen: no request could use
        it.
        """
        room = {name: self._room(store) for name, store in self._hosts.items()}
        left = self._left
        chosen: set[bytes] = set()
        for _, alike in groupby(uses, _coldness_class):
            for header in sorted(
                self._with_parents(list(alike)),
                key=lambda header: header.position,
            ):
                if (
                    header.parent
                    and header.parent not in chosen
                    and not self._has(header.parent)
                ):
                    continue
                if header.length > left:
                    self._ended = "bytes"
                    return
                if room[header.fingerprint] < 1:
                    self._ended = "room"
                    continue
                room[header.fingerprint] -= 1
                left -= header.length
                chosen.add(header.key)
                yield header

    def _with_parents(self, uses: Sequence[ChunkUse]) -> Iterator[Header]:
        """Yield the headers of chunks and of their ancestors, which may have been used a little
        earlier.
        """
        found = list(self._headers(uses))
        while found:
            yield from found
            found = list(
                self._headers(
                    [
                        self._uses[one.parent]
                        for one in found
                        if one.parent in self._uses
                    ]
                )
            )

    def _headers(self, uses: Sequence[ChunkUse]) -> Iterator[Header]:
        """Yield the headers of the chunks that a host store here can take and does not have, each
        once.
        """
        by_namespace = sorted(uses, key=lambda use: use.namespace)
        for namespace, same in groupby(by_namespace, lambda use: use.namespace):
            keys = [
                use.key
                for use in same
                if use.key not in self._asked and not self._has(use.key)
            ]
            self._asked.update(keys)
            for at in range(0, len(keys), _HEADERS):
                if namespace in self._strange:
                    break
                until = time.monotonic() + patience(self._spec)
                pages = self._redis.headers(
                    namespace, keys[at : at + _HEADERS], until
                )
                self._pace(sum(map(len, pages.values())))
                for key, page in pages.items():
                    header = self._sound(namespace, key, page)
                    if header is not None and self._takes(header):
                        yield header
                    elif header is not None:
                        self._strange.add(namespace)

    def _sound(self, namespace: bytes, key: bytes, page: bytes) -> Header | None:
        """Return the header in a page, or None if it is not this chunk's. ConfigError: its codec is
        not installed.
        """
        from pagoda import codec
        from pagoda_tools.serve.served_stores import is_value_of

        header = codec.parse(page)
        length = header and codec.HEADER_BYTES + (
            header.stored_bytes or header.length
        )
        if header is None or not is_value_of(header, namespace, key, length or 0):
            self._damaged += not codec.is_foreign(page)
            return None
        codec.require(header.codec)
        return header

    def _bring(self, wanted: Header) -> None:
        """Read, verify and store one chunk, unless its parent is missing or another chunk would be
        evicted for it.
        """
        from pagoda import codec
        from pagoda.base.metrics import Reason
        from pagoda.slab import aligned
        from pagoda.tiers.remote.store_client import GetRequest, RefusedError

        # the parent was damaged, or was removed meanwhile
        if wanted.parent and not self._has(wanted.parent):
            return
        store = self._hosts[wanted.fingerprint]
        page = aligned(codec.HEADER_BYTES)
        buffer = aligned(store.ledger.slot_bytes)

        def destination() -> Bytes | None:
            return (
                buffer[: wanted.stored_bytes or wanted.length]
                if codec.parse(page) == wanted
                else None
            )

        until = time.monotonic() + patience(self._spec)
        idle = max(0, self._uses[wanted.key].coldness)
        # its lifetime since its last use; seconds are rounded
        rank = 1000 * (idle + 2)
        try:
            request = GetRequest(
                wanted.namespace, wanted.key, page, destination, rank
            )
            received = self._redis.get(request, until)
        except RefusedError as refusal:
            # not of one node only
            if (
                refusal.reason is not Reason.FAILED_CHECK
                and not refusal.contained
            ):
                raise
            self._damaged += refusal.reason is Reason.FAILED_CHECK
            return
        self._pace(received or 0)
        if self._room(store) < 1:
            raise _EndedError("room")
        if received is not None:
            stamp = self._stamps[wanted.fingerprint]
            is_new, reason = self._stores.put_value(
                store, wanted, page, buffer[:received], stamp
            )
            self._damaged += reason is Reason.FAILED_CHECK
            if is_new and reason is None:
                self._chunks = self._chunks + 1
                self._bytes = self._bytes + wanted.length

    def _has(self, key: bytes) -> bool:
        ledgers = [store.ledger for store in self._hosts.values()]
        return any(
            len(ledger.match_prefix([key], start=None, touch=False).slots)
            for ledger in ledgers
        )

    def _takes(self, header: Header) -> bool:
        store = self._hosts.get(header.fingerprint)
        return store is not None and store.chunk_bytes == header.length

    def _room(self, store: ServedStore) -> int:
        """Return how many chunks can be stored without an eviction, here or in a store that would
        have to give pages.

        A ledger asks for pages when fewer slots than a window are free.
        """
        from pagoda.ledger import admin

        ledger = store.ledger
        free = admin.gauges(ledger)["free"]
        return free + ledger.space.growable() - ledger.window

    def _pace(self, nbytes: int) -> None:
        """Wait as long as the rate requires after so many bytes. _EndedError: engines look up, load
        or store here.
        """
        self._due = (
            max(self._due, time.monotonic() - _LOOK_SECONDS) + nbytes / self._rate
        )
        while self._work() == self._before:
            left = self._due - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_SECONDS))
        raise _EndedError("traffic")

    def _work(self) -> int:
        """Return a count of what the engines here have done so far."""
        from pagoda.ledger import admin

        done = 0
        for store in self._hosts.values():
            every = admin.counters(store.ledger)
            own = store.ledger.session.own_counters()
            done += sum(every[name] - own.get(name, 0) for name in _WORK)
        return done
