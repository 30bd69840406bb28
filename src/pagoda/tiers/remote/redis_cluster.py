"""A Redis Cluster as a remote store: masters report which slots they have, and are asked again
after changes.
"""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

from pagoda.base.errors import ConfigError
from pagoda.base.fork import per_process
from pagoda.base.urls import place_of
from pagoda.tiers.remote.redis import RedirectError, RedisClient, RedisConnection
from pagoda.tiers.remote.redis_address import HOST
from pagoda.tiers.remote.redis_nodes import (
    RedisNode,
    RedisNodesClient,
    Shares,
)
from pagoda.tiers.remote.resp import (
    NUMBER,
    ErrorReply,
    Reply,
    ReplyShape,
    RespConnection,
    command,
)
from pagoda.tiers.remote.store_client import GetRequest, RefusedError, reason_of

_SLOTS = 1 << 14
_SLOTS_SHAPE = ReplyShape(b":$*", 255, items=1 << 16, depth=5)
_REFRESH_SECONDS = 2.0
_ASKING = command(b"ASKING")
_OK = ReplyShape(b"+")


class SlotRange(NamedTuple):
    """Slots of one master. `host` is empty if it is the host that was asked."""

    first: int
    last: int
    host: str
    port: int


class _AskingResp(RespConnection):
    """Sends ASKING before each command, because the node serves a slot that it is still receiving.

    The reply to ASKING is read and ignored: if the node refuses, the command is redirected again.
    """

    def send_commands(self, commands: Sequence[bytes], until: float) -> None:
        self.send(
            [b"".join(_ASKING + each for each in commands)],
            2 * len(commands),
            until,
        )

    def read_reply(self, until: float, shape: ReplyShape = NUMBER) -> Reply:
        super().read_reply(until, _OK)
        return super().read_reply(until, shape)

    def read_into(
        self, destination: memoryview, until: float
    ) -> int | ErrorReply | None:
        super().read_reply(until, _OK)
        return super().read_into(destination, until)


class _ReceivingNodeConnection(RedisConnection):
    """One connection to a node for slots that are being moved there. It follows no redirection."""

    def open(self, until: float) -> Self:
        """Connect and authenticate. OSError; RefusedError: the user may not read."""
        with suppress(RedirectError):
            super().open(until)
        self._resp = _AskingResp(self._connected.result())
        return self


class ClusterNodeConnection(RedisConnection):
    """One connection to a node of a cluster. `ping` also succeeds if another node has the name of
    the probe.

    A read, touch or removal of a chunk in a slot that is being moved follows it to the receiving
    node. No chunk can be stored in such a slot: neither node executes the RENAMENX.
    """

    _target: _ReceivingNodeConnection | None = None

    def get(self, request: GetRequest, until: float) -> int | None:
        """Fill `page` and the result of `destination`; see RedisConnection."""
        try:
            return super().get(request, until)
        except RedirectError as redirect:
            if not redirect.target:
                raise
            with self._following(redirect.target, until) as target:
                return target.get(request, until)

    def _replies(
        self, commands: Sequence[bytes], until: float, shape: ReplyShape
    ) -> list[Reply]:
        replies = super()._replies(commands, until, shape)
        moving: dict[str, list[int]] = {}
        for at, reply in enumerate(replies):
            if isinstance(reply, ErrorReply) and (
                place := RedirectError(reply).target
            ):
                moving.setdefault(place, []).append(at)
        for place, indices in moving.items():
            with self._following(place, until) as target:
                moved = target._replies(
                    [commands[at] for at in indices], until, shape
                )
            for at, reply in zip(indices, moved, strict=True):
                replies[at] = reply
        return replies

    @contextmanager
    def _following(self, place: str, until: float) -> Iterator[RedisConnection]:
        """Connect to a node that receives a slot. Contained refusal: it fails."""
        target: _ReceivingNodeConnection | None = None
        try:
            target = _ReceivingNodeConnection(
                self._address.at(place),
                self._names,
                self._ttl_seconds,
                self._ranks,
                ages=self._ages,
            )
            self._target = target
            yield target.open(until)
        except OSError as error:
            text = f"{place}, to which the chunk is being moved: {error}"
            raise RefusedError(reason_of(error), text, contained=True) from None
        finally:
            self._target = None
            if target is not None:
                target.close()

    def abort(self) -> None:
        """Make a call that waits in this connection fail soon with an OSError. From any thread."""
        super().abort()
        if (target := self._target) is not None:
            target.abort()

    def open(self, until: float) -> Self:
        """Connect and authenticate. OSError; RefusedError: the user may not read."""
        with suppress(RedirectError):
            super().open(until)
        return self

    def ping(self, until: float) -> None:
        """Return if the node answers."""
        with suppress(RedirectError):
            super().ping(until)

    def slots(self, until: float) -> list[SlotRange]:
        """Return which slots the masters have, as this node knows it. OSError; RefusedError: it is
        not in a cluster.
        """
        (reply,) = self._execute(
            [command(b"CLUSTER", b"SLOTS")], until, _SLOTS_SHAPE
        )
        if not isinstance(reply, list) or not reply:
            raise ConnectionError("the cluster has no slots yet")
        return [_slot_range(each) for each in reply]


class ClusterNodeClient(RedisClient):
    """One node of a cluster."""

    connection_type = ClusterNodeConnection


class RedisClusterClient(RedisNodesClient):
    """A Redis Cluster, `redis+cluster://host:port,host:port`: at least one of these nodes must
    answer at first.

    A chunk is on the master of its key's slot. The list of masters is read when a node reports that
    a slot has moved, and while one does not answer, until a replica has taken over.
    """

    is_cluster = True
    _client_type = ClusterNodeClient
    _owners: Sequence[RedisNode | None] = ()  # the owner of each slot

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def shares(self, keys: Sequence[bytes]) -> Shares:
        """Return which of these keys each master has, of those that are in use. ConnectionError: no
        master is in use.
        """
        owners = self._owners
        used = set(self._used(self.nodes))
        shares: Shares = {}
        for at, key in enumerate(keys):
            node = owners[crc_hqx(key.hex().encode(), 0) % _SLOTS]
            if node is not None and node in used:
                shares.setdefault(node, []).append(at)
        return shares

    def refresh(
        self,
        until: float,
        version: int | None = None,
        node: RedisNode | None = None,
    ) -> None:
        """Ask for the slots, unless they were asked for since `version`; `node` first. OSError: no
        node answers.
        """
        until = min(until, time.monotonic() + _REFRESH_SECONDS)
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(
                f"{self.address}: the slots of the cluster are still being asked for"
            )
        try:
            if version is None or version == self.version:
                self._ask_for_slots(until, node)
        finally:
            self._lock.release()

    def _ask_for_slots(self, until: float, first: RedisNode | None) -> None:
        healthy = sorted(self.nodes, key=lambda node: node.breaker.is_open)
        nodes = list(
            dict.fromkeys([*([first] if first else []), *healthy, *self._seeds])
        )
        trouble: Exception | None = None
        for number, node in enumerate(nodes):
            now = time.monotonic()
            share = now + (until - now) / (len(nodes) - number)
            connection = node.client.connection()
            try:
                assert isinstance(connection, ClusterNodeConnection)
                self._learn(connection.open(share).slots(share), node)
                return
            # ConfigError: from a bad host or password file
            except (OSError, RefusedError, ConfigError) as error:
                trouble = error
            finally:
                connection.close()
        raise ConnectionError(
            f"{self.address}: no node says which slots it has: {trouble}"
        )

    def _learn(self, ranges: Sequence[SlotRange], asked: RedisNode) -> None:
        known = {node.place: node for node in self.nodes}
        owners: list[RedisNode | None] = [None] * _SLOTS
        for first, last, host, port in ranges:
            name = (
                f"[{host}]"
                if ":" in host
                else host or asked.place.rpartition(":")[0]
            )
            place = place_of(f"{name}:{port}", port)
            if place not in known:
                known[place] = RedisNode(
                    self._client_of(self._url.at(f"{name}:{port}")), self._clock
                )
            owners[first : last + 1] = [known[place]] * (last + 1 - first)
        self._owners = owners
        self.nodes = list(
            dict.fromkeys(node for node in owners if node is not None)
        )
        self.version += 1


def _slot_range(reply: object) -> SlotRange:
    """Return one item of the reply to CLUSTER SLOTS: first and last slot, and the master as host,
    port, name, more.
    """
    match reply:
        case [
            int(first),
            int(last),
            [b"?", int(port), node, [b"ip", bytes(host), *_], *_],
            *_,
        ]:
            # names are preferred, but this node has none
            return _slot_range([first, last, [host, port, node]])
        case [int(first), int(last), [host, int(port), *_], *_]:
            name = host if isinstance(host, bytes) else b""
            if (
                0 <= first <= last < _SLOTS
                and 0 < port < 1 << 16
                and (not name or HOST.fullmatch(name))
            ):
                return SlotRange(first, last, name.decode(), port)
    raise ConnectionError(
        "the reply to CLUSTER SLOTS has another form than Redis gives it"
    )
