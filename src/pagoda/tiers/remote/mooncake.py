"""A Mooncake pool as a remote store: the memory of many machines, managed by a `mooncake_master`.

Mooncake's library runs in separate processes (`mooncake_helper`), one for each connection, and
chunks are copied between slots and memory that such a process shares. So a late call can be ended
and then writes into no slot; a crash of the library costs one call; and no slot can be addressed by
peers: Mooncake lets any client that reaches its port write into every registered buffer. The
content of a slot is verified after the copy.

A value is the header page followed by the stored bytes. Its name is
`<prefix>:<NAME_FORMAT>:<namespace>:<key>`.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np

from pagoda.base.finalizers import close_when_dropped
from pagoda.base.fork import reset_now_and_in_child
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import Pool
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.base import Bytes
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
from pagoda.tiers.remote.store_urls import check_prefix

DEFAULT_PORT = 50051
_HELPER = Path(__file__).with_name("mooncake_helper.py")
_PAUSE_SECONDS = 0.02
# a process that has not joined the pool after this time is replaced
_START_SECONDS = 30.0
# set in the environment unless already set: one attempt to reach the master (we repeat ours), no
# statistics
_SETTINGS = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_STORE_CLIENT_METRIC": "0"}

# codes of Mooncake
_FULL = -200
_TOO_SMALL = -600
_TRANSFER_FAILED = -800
_NOT_FOUND = -704
_INCOMPLETE = -703
# no replica; not yet complete; no such name; removed while it was read
_ABSENT = -702, _INCOMPLETE, _NOT_FOUND, -707
_NO_ANSWER = -900  # this code and those below: the master did not answer

_logger = guarded_logger("pagoda.tiers.remote")
_reaper = Pool(1, "pagoda-mooncake", exit_seconds=2.0)


class PoolAddress(NamedTuple):
    """The address of a pool's master, and how its machines move chunks."""

    host: str
    port: int
    protocol: str

    def __str__(self) -> str:
        return f"mooncake://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class MooncakeProcess:
    """A process that calls Mooncake, and the memory that it shares. For one thread at a time,
    except `abort`.
    """

    def __init__(self, pool: PoolAddress, segment_bytes: int = 0) -> None:
        """Start the process; `join` makes it join the pool. OSError."""
        self._pool = pool
        self._segment_bytes = segment_bytes
        self._owner = os.getpid()
        self._since = time.monotonic()
        self._answer = b""
        self._is_joining = self.has_joined = self._aborted = False
        self.staging: Bytes = np.empty(0, np.uint8)
        self._socket, theirs = socket.socketpair()
        self._memory = os.memfd_create("pagoda-mooncake")
        with theirs:
            numbers = theirs.fileno(), self._memory
            command = [
                sys.executable,
                "-P",
                str(_HELPER),
                *map(str, (*numbers, self._owner)),
            ]
            with ExitStack() as undo:
                undo.callback(os.close, self._memory)
                undo.callback(self._socket.close)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=numbers,
                    start_new_session=True,
                    env={**_SETTINGS, **os.environ},
                )
                undo.pop_all()

    def join(self, until: float) -> None:
        """Join the pool; may be called again after an OSError, as long as the process is
        `usable`.
        """
        if not self.has_joined:
            if not self._is_joining:
                seconds = max(0.001, until - time.monotonic())
                self._send(
                    until, "setup", *self._pool, self._segment_bytes, seconds
                )
                self._is_joining = True
            self._receive(until)
            self.has_joined = True

    @property
    def usable(self) -> bool:
        """Whether the process runs, and has joined the pool or still has time for that."""
        young = self.has_joined or time.monotonic() - self._since < _START_SECONDS
        return young and not self._aborted and self._process.poll() is None

    def call(self, until: float, function: str, *arguments: object) -> list[int]:
        """Return what a function of `mooncake_helper` returns."""
        self._send(until, function, *arguments)
        return self._receive(until)

    def reserve(self, nbytes: int, until: float) -> Bytes:
        """Return the shared memory, of at least `nbytes`."""
        if nbytes > self.staging.nbytes:
            os.ftruncate(self._memory, nbytes)
            self.staging = np.frombuffer(
                mmap.mmap(self._memory, nbytes), np.uint8
            )
            (code,) = self.call(until, "reserve", nbytes)
            if code:
                raise OSError(
                    f"{self._pool}: {nbytes} bytes of memory cannot be registered ({code})"
                )
        return self.staging

    def _send(self, until: float, *request: object) -> None:
        try:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            self._fail(error)

    def _receive(self, until: float) -> list[int]:
        while not self._answer.endswith(b"\n"):
            try:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                part = self._socket.recv(1 << 16)
            except OSError as error:
                self._fail(error)
            if not part:
                self._fail(ConnectionError())
            self._answer += part
        answer: list[int] | str = json.loads(self._answer)
        self._answer = b""
        self._is_joining = False
        if isinstance(answer, str):
            raise OSError(f"{self._pool}: {answer}")
        return answer

    def _fail(self, error: OSError) -> NoReturn:
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{self._pool}: out of time") from None
        if self._aborted:
            raise ConnectionError(f"{self._pool}: aborted") from None
        code = self._process.poll()
        how = ""
        if code is not None:
            how = f" (signal {-code})" if code < 0 else f" (exit code {code})"
        raise ConnectionError(
            f"{self._pool}: the process that calls Mooncake ended{how}"
        ) from None

    def abort(self) -> None:
        """Make a call that waits fail now, and all later ones. From any thread."""
        self._aborted = True
        with suppress(OSError):  # the process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process; if it has memory for the pool, let it leave the pool first. Never ends a
        parent's.
        """
        if self._owner != os.getpid():
            return
        self.abort()
        if not self._segment_bytes:
            self._process.kill()
        self._socket.close()
        os.close(self._memory)
        _reaper.later(self._process.wait)


class KeptProcesses:
    """The processes of a client that belong to no connection. Thread-safe."""

    def __init__(self) -> None:
        # processes whose calls to join timed out
        self.joining: deque[MooncakeProcess] = deque()
        # has this machine's memory for the pool
        self.segment: MooncakeProcess | None = None
        self.mounting = threading.Lock()

    def close(self) -> None:
        """End the processes."""
        processes = [
            *self.joining,
            *([] if self.segment is None else [self.segment]),
        ]
        self.joining.clear()
        self.segment = None
        for process in processes:
            process.close()


class MooncakeClient(StoreClient):
    """A Mooncake pool, by its master at mooncake://host:port. Thread-safe.

    `segment_bytes`: how much memory of this machine the pool gets, from the first put until this
    object is dropped or the process ends. In a forked child all processes are new.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pagoda",
        name: str = "mooncake",
        segment_bytes: int = 0,
        protocol: str = "tcp",
    ) -> None:
        """Start nothing yet. ModuleNotFoundError: Mooncake is not installed. ValueError: wrong
        options.
        """
        if importlib.util.find_spec("mooncake") is None:
            raise ModuleNotFoundError(
                "a Mooncake pool needs its library: pip install 'pagodakv[mooncake]'"
            )
        check_prefix(prefix)
        parts = urlsplit(url)
        self.name = name
        self._segment_bytes = segment_bytes
        self._pool = PoolAddress(
            parts.hostname or "", parts.port or DEFAULT_PORT, protocol
        )
        self.address = str(self._pool)
        self.base = f"{prefix}:{NAME_FORMAT}:"
        self._log = RateLimitedLog()
        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Start without processes; those of a parent are left alone."""
        self._kept = KeptProcesses()
        close_when_dropped(self, self._kept.close)

    def connection(self) -> MooncakeConnection:
        """Return a new connection that is still to be opened."""
        return MooncakeConnection(self)

    def take(self) -> MooncakeProcess:
        """Return a process that must still join the pool, or that has joined it in the meantime.
        OSError.
        """
        while self._kept.joining:
            try:
                process = self._kept.joining.popleft()
            except IndexError:
                break
            if process.usable:
                return process
            process.close()
        return MooncakeProcess(self._pool)

    def keep(self, process: MooncakeProcess) -> None:
        """Keep a process that has not joined the pool yet for the next `take`."""
        if process.usable:
            self._kept.joining.append(process)
        else:
            process.close()

    def mount(self, until: float) -> None:
        """Give the pool this machine's share of memory, unless it has been given already.
        OSError.
        """
        kept = self._kept
        if not self._segment_bytes or not kept.mounting.acquire(
            timeout=max(0.0, until - time.monotonic())
        ):
            return
        try:
            if kept.segment is not None and not kept.segment.usable:
                if kept.segment.has_joined:
                    self.log(
                        Reason.IO_ERROR,
                        (
                            "the process with this machine's share ended, and the chunks in it are "
                            "lost"
                        ),
                    )
                kept.segment.close()
                kept.segment = None
            if kept.segment is None:
                kept.segment = MooncakeProcess(self._pool, self._segment_bytes)
            kept.segment.join(until)
        finally:
            kept.mounting.release()

    def log(self, reason: Reason, message: str) -> None:
        """Log an error of a part of the pool, rate-limited per reason."""
        self._log.warn(_logger, reason, f"{self.address}: {message}")


class MooncakeConnection(StoreConnection):
    """One process that calls Mooncake; see StoreConnection. For one thread at a time, except
    `abort`.

    If several writers have one key, the master accepts the first; the others send nothing.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._process: MooncakeProcess | None = None
        self._aborted = False

    def open(self, until: float) -> Self:
        """Start the process and let it join the pool, which takes a fifth of a second. A late join
        continues.
        """
        process = self._process = self._client.take()
        if self._aborted:  # by an abort before there was a process
            process.abort()
        try:
            process.join(until)
        except OSError:
            self._process = None
            self._client.keep(process)
            raise
        return self

    def touch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        until: float,
        ranks: Sequence[int] | None = None,
    ) -> list[bool]:
        """Return which keys are present: one request. It renews their leases, so others are evicted
        first.
        """
        codes = self._call(
            until, "exist", [self._name(namespace, key) for key in keys]
        )
        return [code == 1 for code in codes]

    def put(self, request: PutRequest, until: float) -> PutResult:
        """Store a copy; `is_valid` is called after the copy and before it is sent.

        Returns STORED also if the key was present or another writer was first: the master does not
        report that.
        """
        self._client.mount(until)
        nbytes = HEADER_BYTES + request.stored.nbytes
        staging = self._opened.reserve(nbytes, until)
        staging[:HEADER_BYTES] = request.page
        staging[HEADER_BYTES:nbytes] = request.stored
        if not request.is_valid():
            return PutResult.STALE
        (code,) = self._call(
            until, "put", self._name(request.namespace, request.key), nbytes
        )
        if code == _FULL:
            raise RefusedError(
                Reason.FULL,
                f"the pool has no room ({code}): give it more by ?segment=SIZE",
            )
        if code:
            raise RefusedError(
                Reason.IO_ERROR, f"the chunk was not stored ({code})"
            )
        return PutResult.STORED

    def get(self, request: GetRequest, until: float) -> int | Reason | None:
        """Copy a value to `page` and to the result of `destination`, after all of it has been
        received.
        """
        name = self._name(request.namespace, request.key)
        page = request.page
        staging = self._opened.reserve(HEADER_BYTES, until)
        code, *size = self._call(until, "get", name)
        if code == _TOO_SMALL and size:
            page[:] = staging[:HEADER_BYTES]
            request.space_for(size[0] - HEADER_BYTES)
            staging = self._opened.reserve(size[0], until)
            code, *size = self._call(until, "get", name)
        if code in _ABSENT:
            return None
        if code == _TRANSFER_FAILED:
            text = (
                "a chunk cannot be read: the machine that has it does not answer"
            )
            self._client.log(Reason.IO_ERROR, text)
            return Reason.IO_ERROR
        if code < HEADER_BYTES:
            what = (
                f"cannot be read ({code})"
                if code < 0
                else "is shorter than a header"
            )
            raise RefusedError(
                Reason.FAILED_CHECK if code >= 0 else Reason.IO_ERROR,
                f"the value {what}",
            )
        page[:] = staging[:HEADER_BYTES]
        rest_bytes = code - HEADER_BYTES
        request.space_for(rest_bytes)[:rest_bytes] = staging[HEADER_BYTES:code]
        return rest_bytes

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], until: float
    ) -> int:
        """Remove values, leased ones too; return how many were present. Waits for values that are
        being written.
        """
        names = [self._name(namespace, key) for key in keys]
        removed = 0
        while True:
            codes = self._call(until, "remove", names)
            removed += codes.count(0)
            waiting = [
                name
                for name, code in zip(names, codes, strict=True)
                if code == _INCOMPLETE
            ]
            if not waiting or time.monotonic() + _PAUSE_SECONDS > until:
                break
            names = waiting
            time.sleep(_PAUSE_SECONDS)
        if refused := [code for code in codes if code not in (0, _NOT_FOUND)]:
            raise RefusedError(
                Reason.BUSY,
                f"{len(refused)} values were not removed ({refused[0]})",
            )
        return removed

    def clear(self, namespace: bytes | None, deadline: ListingDeadline) -> int:
        """Remove all values of one namespace (None: all of ours); return how many. One request."""
        base = self._client.base.replace(".", r"\.")
        pattern = f"^{base}{'' if namespace is None else namespace.hex() + ':'}"
        (removed,) = self._call(deadline.next_step(), "remove_all", pattern)
        if removed < 0:
            raise RefusedError(
                Reason.IO_ERROR, f"the values were not removed ({removed})"
            )
        return removed

    def count_by_namespace(
        self, deadline: ListingDeadline
    ) -> Mapping[bytes, int]:
        """Refuse: Mooncake's library lists no names."""
        raise RefusedError(
            Reason.NOT_ADMITTED,
            "a Mooncake pool does not list what it has: see its master's metrics",
        )

    def ping(self, until: float) -> None:
        """Return if the master answers."""
        self._call(until, "exist", [f"{self._client.base}ping"])

    def abort(self) -> None:
        """Make a call that waits in this connection fail now with an OSError. From any thread."""
        self._aborted = True
        if (process := self._process) is not None:
            process.abort()

    def close(self) -> None:
        """End the process, also during a call of Mooncake's; never waits. Idempotent."""
        process = self._process
        self._process = None
        if process is not None:
            process.close()

    @property
    def _opened(self) -> MooncakeProcess:
        if self._process is None:
            raise OSError(f"{self._client.address}: the connection was closed")
        return self._process

    def _call(self, until: float, function: str, *arguments: object) -> list[int]:
        codes = self._opened.call(until, function, *arguments)
        if (worst := min(codes, default=0)) <= _NO_ANSWER:
            raise OSError(
                f"{self._client.address}: the master does not answer ({worst})"
            )
        return codes

    def _name(self, namespace: bytes, key: bytes) -> str:
        return f"{self._client.base}{namespace.hex()}:{key.hex()}"
