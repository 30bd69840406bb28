"""The process in which Mooncake's library runs. `mooncake` runs this file, which imports nothing of
this package.

Arguments: the descriptors of a socket and of memory that both processes map, and the id of the
parent process; when the parent ends, this process ends. A request is a line of JSON, [function,
argument, ...]; the answer is a line too: a list of numbers, or a text if the request failed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

_PAGE_BYTES = 4096  # the header of a chunk
_TOO_SMALL = -600  # Mooncake's code for a buffer that cannot hold the value
_TRANSFER_FAILED = -800
_WATCH_SECONDS = 1.0
_LAST_SECONDS = 5.0
# the longest time to leave the pool: the library waits a minute for a master that has stopped
_LEAVE_SECONDS = 10
_LONGEST_ANSWER = 300  # the characters of Mooncake's message that are kept
_RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakeCalls:
    """The functions that requests can call. For one thread."""

    def __init__(self, memory: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        self._memory = memory
        self._address = self._nbytes = 0

    def setup(
        self,
        host: str,
        port: int,
        protocol: str,
        segment_bytes: int,
        seconds: float,
    ) -> list[int]:
        """Join the pool, with `segment_bytes` for it, under this machine's address on the way to
        the master.
        """
        with socket.create_connection((host, port), seconds) as master:
            own = master.getsockname()[0]
        if protocol == "rdma" and not (
            _RDMA_DEVICES.exists() and os.listdir(_RDMA_DEVICES)
        ):
            raise OSError("protocol=rdma: this machine has no RDMA device")
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        said = os.memfd_create("stderr")
        os.dup2(said, 2)
        code = self._store.setup(
            own, "P2PHANDSHAKE", segment_bytes, 0, protocol, "", place
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if code:
            lines = (
                os.pread(said, 1 << 20, 0).decode(errors="replace").splitlines()
            )
            last = next(
                (line for line in reversed(lines) if line[:1] in "EF"), ""
            ).partition("] ")[2]
            raise OSError(
                f"Mooncake's setup failed ({code}): {last[:_LONGEST_ANSWER]}"
            )
        os.close(said)
        return [code]

    def reserve(self, nbytes: int) -> list[int]:
        """Map `nbytes` of the shared memory; return Mooncake's code."""
        if self._address:
            self._store.unregister_buffer(self._address)
        self._mapped = mmap.mmap(self._memory, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self._nbytes = nbytes
        return [self._store.register_buffer(self._address, nbytes)]

    def exist(self, names: list[str]) -> list[int]:
        """Return for each name 1 if it is present, 0 if not; below 0: Mooncake's code."""
        return list(self._store.batch_is_exist(names))

    def put(self, name: str, nbytes: int) -> list[int]:
        """Store `nbytes` of the memory; return Mooncake's code."""
        return [self._store.put_from(name, self._address, nbytes)]

    def get(self, name: str) -> list[int]:
        """Read a value into the memory; return its size or Mooncake's code.

        If a value is larger than the memory, read only its first page, and return _TOO_SMALL and
        the size of the value.
        """
        code = self._store.get_into(name, self._address, self._nbytes)
        if code != _TOO_SMALL:
            return [code]
        size = self._store.get_size(name)
        ((code,),) = self._store.get_into_ranges(
            [self._address], [[name]], [[[0]]], [[[0]]], [[[_PAGE_BYTES]]]
        )[0]
        if size < 0:
            return [size]
        # such a failure has no code
        return [_TOO_SMALL, size] if code == _PAGE_BYTES else [_TRANSFER_FAILED]

    def remove(self, names: list[str]) -> list[int]:
        """Remove values, leased ones too (readers verify what they read); return Mooncake's
        codes.
        """
        return list(self._store.batch_remove(names, True))

    def remove_all(self, pattern: str) -> list[int]:
        """Remove all values whose name matches; return how many, or Mooncake's code."""
        return [self._store.remove_by_regex(pattern, True)]

    def close(self) -> None:
        """Leave the pool; the master then drops what was stored in this process."""
        self._store.close()


def _serve(connection: socket.socket, memory: int) -> None:
    calls = None
    with connection.makefile("rb") as requests:
        for request in requests:
            function, *arguments = json.loads(request)
            try:
                calls = calls or MooncakeCalls(memory)
                answer = getattr(calls, function)(*arguments)
            except ImportError as missing:
                answer = (
                    f"Mooncake's library cannot be loaded ({missing}): it needs libibverbs, "
                    "libnuma and libcurl"
                )
            except Exception as error:  # noqa: BLE001
                # the other process decides what it means
                answer = f"{type(error).__name__}: {error}"
            connection.sendall(json.dumps(answer).encode() + b"\n")
    if calls is not None:
        # this ends the process even while the library lets no other Python thread run
        signal.alarm(_LEAVE_SECONDS)
        calls.close()


def _end_with(parent: int, connection: socket.socket) -> None:
    """End when the parent process has ended (its children may keep the socket open)."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    connection.shutdown(socket.SHUT_RDWR)
    time.sleep(_LAST_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve one connection until the other side closes it."""
    descriptor, memory, parent = map(int, sys.argv[1:4])
    connection = socket.socket(fileno=descriptor)
    threading.Thread(
        target=_end_with, args=(parent, connection), daemon=True
    ).start()
    try:
        _serve(connection, memory)
    finally:
        # without the destructors of a library that may be in use by its threads
        os._exit(0)


if __name__ == "__main__":
    main()
