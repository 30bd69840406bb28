"""A real `pagoda serve`, engines in other processes that store chunks, and a small HTTP client, for
all tests.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda import codec
from pagoda.codec import HEADER_BYTES
from pagoda.keys import Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers.remote.remote_tier import STORE_ID
from pagoda.transfer import DenseKV
from testbed.patience import Patience

if TYPE_CHECKING:
    from testbed.netns import Place

SECONDS = 60.0
CHUNK = 64
# 64 KiB
LAYOUT = KVLayout.dense(
    layers=2, kv_heads=2, head_dim=32, dtype="float32", chunk_tokens=CHUNK
)
# 2560 bytes
ODD = KVLayout.dense(
    layers=1, kv_heads=1, head_dim=5, dtype="float32", chunk_tokens=CHUNK
)
# 4 MiB
LARGE = KVLayout.dense(
    layers=4, kv_heads=8, head_dim=256, dtype="float32", chunk_tokens=CHUNK
)
NAMESPACE = Namespace("served")
TOKEN = "a-token-of-the-tests"
RUN = "import sys; from pagoda_tools.cli import main; sys.exit(main())"

Bytes = npt.NDArray[np.uint8]

_ENGINE = """
import itertools, sys
from pathlib import Path
from tests.serve.kit import *
from tests.serve import kit
from pagoda.cache import Cache
from pagoda.transfer import DenseKV
layout, options = getattr(kit, sys.argv[1]), eval(sys.argv[2])
with Cache(namespace=NAMESPACE, layout=layout, chunk_tokens=CHUNK, **options) as cache:
    print(cache.namespace.root.hex(), flush=True)
    def store(chain, chunks):
        cache.store(tokens_of(chain, chunks), DenseKV(kv_of(chain, chunks, layout), layout))
    for line in sys.stdin:
        word, chain, chunks = line.split()[0], *map(int, line.split()[1:])
        if word == "lookup":
            print(cache.lookup(tokens_of(chain, chunks)).num_tokens, flush=True)
            continue
        if word == "retrieve":
            blank, wanted = kv_of(9, chunks, layout), kv_of(chain, chunks, layout)
            hit = cache.retrieve(tokens_of(chain, chunks), DenseKV(blank, layout))
            pairs = [(a, b) for one, other in zip(blank, wanted) for a, b in zip(one, other)]
            same = all(a[:, :hit.num_tokens].tobytes() == b[:, :hit.num_tokens].tobytes() for a, b in pairs)
            print(hit.num_tokens, same, flush=True)
            continue
        if word == "store":
            store(chain, chunks)
            cache.flush(30.0)
        for computed in range(1, chunks + 1) if word == "grow" else ():  # as in a prefill
            store(chain, computed)
        for number in itertools.count(chain) if word == "write" else ():  # it evicts, until it is killed
            store(number % 50, chunks)
            if number == chain + 3:
                print("writes", flush=True)
        print("done", flush=True)
"""  # noqa: E501


_LIMITED = (
    """
import gc
from functools import partial
from pagoda_tools.serve import access, server
gc.disable()  # no limit may depend on when garbage is collected
server.ServeOptions = partial(server.ServeOptions, limits=access.ServeLimits(**{limits}))
"""
    + RUN
)


def tokens_of(chain: int, chunks: int) -> list[int]:
    """Return the tokens of a prompt: another `chain` has no chunk in common."""
    return [chain * 1000 + n % 1000 for n in range(chunks * CHUNK)]


def keys_of(root: bytes, chain: int, chunks: int) -> list[bytes]:
    """Return the keys of a prompt's chunks."""
    return chunk_keys(tokens_of(chain, chunks), root, CHUNK)


def payload_of(chain: int, position: int, layout: KVLayout = LAYOUT) -> Bytes:
    """Return the bytes of one chunk: numbers below 2."""
    words = np.random.default_rng((chain, position)).integers(
        0, 256, layout.chunk_bytes, np.uint8
    )
    # of a float32 the highest bit of the exponent: neither infinite nor NaN
    words[3::4] &= 0xBF
    return words


def kv_of(
    chain: int, chunks: int, layout: KVLayout = LAYOUT
) -> list[list[npt.NDArray[np.float32]]]:
    """Return the KV of a prompt as an engine has it: K and V of each layer."""
    plane = layout.planes[0]
    shape = layout.layers, len(layout.planes), plane.heads, CHUNK, plane.dim
    whole = [
        payload_of(chain, n, layout).view(np.float32).reshape(shape)
        for n in range(chunks)
    ]
    joined = np.concatenate(whole, axis=3)
    return [
        [joined[layer, part] for part in range(shape[1])]
        for layer in range(shape[0])
    ]


def dense_kv(chain: int, chunks: int) -> DenseKV:
    """Return the KV of a prompt, ready to be moved."""
    return DenseKV(kv_of(chain, chunks), LAYOUT)


def value_of(
    root: bytes,
    key: bytes,
    position: int,
    payload: Bytes,
    layout: KVLayout = LAYOUT,
    **other: object,
) -> bytes:
    """Return the value of a chunk as clients send it."""
    fields: dict[str, object] = {
        "store_id": STORE_ID,
        "slot": 0,
        "namespace": root,
        "epoch": 0,
        "key": key,
        "position": position,
        "length": layout.chunk_bytes,
        "tokens": CHUNK,
        "codec": "raw",
        "fingerprint": layout.fingerprint,
        "sequence": 1,
    }
    page = codec.seal(codec.Header(**(fields | other)), payload)  # type: ignore[arg-type]
    return page.tobytes() + payload.tobytes()


def verified(
    value: bytes, root: bytes, key: bytes, layout: KVLayout = LAYOUT
) -> Bytes | None:
    """Return the payload of a value if it passes the check of every reader."""
    if len(value) != HEADER_BYTES + layout.chunk_bytes:
        return None
    whole = aligned(len(value))
    whole[:] = np.frombuffer(value, np.uint8)
    expected = codec.Expected(
        store_id=STORE_ID,
        slot=0,
        namespace=root,
        epoch=0,
        key=key,
        length=layout.chunk_bytes,
        fingerprint=layout.fingerprint,
    )
    good = (
        codec.verify(whole[:HEADER_BYTES], whole[HEADER_BYTES:], expected) is None
    )
    return whole[HEADER_BYTES:] if good else None


class Engine:
    """A process with a Cache, which carries out commands."""

    def __init__(
        self,
        layout: str = "LAYOUT",
        place: Place | None = None,
        **options: object,
    ) -> None:
        """Open the cache, in a network of its own if `place` is given; `options` are those of
        `Config`, as literals.
        """
        code = [sys.executable, "-c", _ENGINE, layout, repr(options)]
        start = (
            subprocess.Popen
            if place is None
            else lambda code, **pipes: place.start(*code, **pipes)
        )
        self.process = start(
            code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.root = bytes.fromhex(self.answer())

    def command(self, word: str, chain: int, chunks: int) -> str:
        """Send a command (see `begin`), and return the answer."""
        self.begin(word, chain, chunks)
        return self.answer()

    def begin(self, word: str, chain: int, chunks: int) -> None:
        """Send "store" (and flush), "grow" (store it chunk by chunk), "lookup", "retrieve" or
        "write" (for ever).
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {chain} {chunks}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Return the next line of the engine: how many tokens it found, and of a retrieve whether
        all are right.
        """
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    @property
    def has_answered(self) -> bool:
        """Whether the next line can be read at once."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def store(self, chain: int, chunks: int) -> list[bytes]:
        """Store a prompt; return its keys."""
        assert self.command("store", chain, chunks) == "done"
        return keys_of(self.root, chain, chunks)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End the process."""
        self.process.send_signal(number)
        self.process.wait(SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def engine(
    layout: str = "LAYOUT", place: Place | None = None, **options: object
) -> Iterator[Engine]:
    """Run an engine; kill it afterwards."""
    made = Engine(layout, place, **options)
    try:
        yield made
    finally:
        made.end()


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The body, which must be a JSON object."""
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


class Client:
    """A client of a server, with one connection that is kept. Of one thread."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.token = token
        self._connection: http.client.HTTPConnection | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of a server on TCP."""
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return host, int(port)

    def connection(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url.removeprefix("unix:"))
        return http.client.HTTPConnection(*self.address, timeout=SECONDS)

    def socket(self) -> socket.socket:
        """Return a new plain socket, connected."""
        if self.url.startswith("unix:"):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(SECONDS)
            made.connect(self.url.removeprefix("unix:"))
            return made
        return socket.create_connection(self.address, SECONDS)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer to one request, on the kept connection or a new one."""
        sent = (
            {}
            if self.token is None
            else {"Authorization": f"Bearer {self.token}"}
        )
        connection = self._connection or self.connection()
        self._connection = None
        connection.request(method, path, body, {**sent, **(headers or {})})
        answer = connection.getresponse()
        found = Answer(answer.status, dict(answer.headers), answer.read())
        if answer.will_close:
            connection.close()
        else:
            self._connection = connection
        return found

    def get(self, root: bytes, key: bytes) -> Answer:
        """GET a chunk."""
        return self.ask("GET", f"/v1/{root.hex()}/{key.hex()}")

    def put(self, root: bytes, key: bytes, value: bytes) -> Answer:
        """PUT a chunk."""
        return self.ask("PUT", f"/v1/{root.hex()}/{key.hex()}", value)

    def find(self, root: bytes, keys: Sequence[bytes]) -> int:
        """Return the leading run."""
        found = self.ask("POST", f"/v1/{root.hex()}/find", b"".join(keys)).json[
            "found"
        ]
        assert isinstance(found, int)
        return found


class Server(Client):
    """A process `pagoda serve` and a client of it."""

    def __init__(
        self,
        *arguments: object,
        token: str | None = TOKEN,
        limits: Mapping[str, float] | None = None,
        **variables: str,
    ) -> None:
        """Start it and wait until it answers. `token` is what it accepts and the client sends."""
        code = RUN if limits is None else _LIMITED.format(limits=dict(limits))
        given = {} if token is None else {"PAGODA_SERVE_TOKEN": token}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--json", *map(str, arguments)],
            env={**os.environ, **given, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        super().__init__(str(json.loads(line)["url"]), token)

    def again(self) -> Client:
        """Return another client of the same server."""
        return Client(self.url, self.token)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and stderr."""
        if self._connection is not None:
            self._connection.close()
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err


def pagoda(*arguments: object) -> str:
    """Run another command; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def server(
    *arguments: object,
    token: str | None = TOKEN,
    limits: Mapping[str, float] | None = None,
    **variables: str,
) -> Iterator[Server]:
    """Run a server, by default on a free port of loopback; kill it afterwards."""
    if "--listen" not in arguments:
        arguments = *arguments, "--listen", "127.0.0.1:0"
    made = Server(*arguments, token=token, limits=limits, **variables)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop(signal.SIGKILL)


def closed_within(connected: socket.socket, seconds: float) -> bool:
    """Return whether the other side closes a connection in time; reads and drops what it sends.

    The time is that of an idle machine.
    """
    return count_closed([connected], 1, seconds) == 1


def count_closed(
    connections: Sequence[socket.socket], wanted: int, seconds: float
) -> int:
    """Wait until the other side has closed `wanted` of these connections; return how many it has.

    The time is that of an idle machine. What arrives is dropped.
    """
    patience = Patience(seconds)
    open_ones = set(connections)
    while len(connections) - len(open_ones) < wanted and not patience.ended:
        for connected in select.select(list(open_ones), [], [], patience.left)[0]:
            try:
                closed = not connected.recv(1 << 20)
            except ConnectionError:
                closed = True
            if closed:
                open_ones.remove(connected)
    return len(connections) - len(open_ones)
