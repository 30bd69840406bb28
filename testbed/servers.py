"""Real servers, each in a separate directory, on a free loopback port; killed at the end, and when
the process that started them is killed.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from testbed.patience import Patience
from testbed.programs import (
    DAV_MODULE,
    LIBRARIES,
    ends_with_this,
    lacking,
    need,
    skip,
)

__all__ = [
    "Server",
    "authority",
    "emptied_s3",
    "free_port",
    "mooncake_master",
    "mooncake_peer",
    "moto_s3",
    "nginx_dav",
    "pagoda_server",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "running_server",
]

# moto takes longest: seconds for its imports on a busy machine
START_SECONDS = 60.0
BUCKET = "pagoda"


def free_port() -> int:
    """Return a loopback port without a listener, of those that the system gives to no connection by
    itself.
    """
    while True:
        port = 10000 + secrets.randbelow(20000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@functools.cache
def _starter(_pid: int) -> ThreadPoolExecutor:
    """Return a thread that starts servers for other threads of this process, which may end before
    it.
    """
    return ThreadPoolExecutor(1, "server-starter")


class Server:
    """One server process. Clients connect to `url`; `root` is its directory."""

    def __init__(
        self,
        root: Path,
        command: Callable[[int], Sequence[str]],
        answers: Callable[[int], bool],
        scheme: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: that of the process, instead of this one's."""
        self.root = root
        self._environment = environment
        self._command = command
        self._answers = answers
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        # another process may take the port before the server does
        for _ in range(5):
            self.port = free_port()
            if self._start():
                return
        raise RuntimeError(
            f"{command(0)[0]} does not start: {self.log()[-2000:]}"
        )

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        """Return the path of the unix socket (Redis only)."""
        return self.root / "unix.sock"

    @property
    def ca(self) -> Path:
        """Return the certificate of the authority that signed the server's (with `tls` only)."""
        return self.root / "ca.crt"

    def call(self, *words: str) -> str:
        """Return the raw answer to a command (Redis only). RuntimeError: it is an error."""
        said = _said(self.socket, " ".join(words).encode()).decode()
        if said.startswith("-"):
            raise RuntimeError(f"{' '.join(words)}: {said}")
        return said

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return the output of the server."""
        return (self.root / "log").read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; no effect if it has already ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=60)

    def stop(self) -> None:
        """Send SIGSTOP: connections stay open and the kernel accepts new ones, but there are no
        answers.

        Returns when all its threads have stopped: one that runs on another processor may answer
        until then.
        """
        os.killpg(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def cont(self) -> None:
        """Send SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill it and start it on the same port; the contents of its memory are lost."""
        self.kill()
        patience = Patience(START_SECONDS)
        while not self._start():
            if patience.ended:
                raise RuntimeError(
                    f"the server did not restart: {self.log()[-2000:]}"
                )

    def _start(self) -> bool:
        """Wait until it answers. Return False if it ended."""
        with (self.root / "log").open("ab") as log:
            start = partial(
                subprocess.Popen,
                ends_with_this(self._command(self.port)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )
            if threading.current_thread() is threading.main_thread():
                self._process = start()
            else:
                self._process = _starter(os.getpid()).submit(start).result()
        patience = Patience(START_SECONDS)
        while not patience.ended:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._answers(self.port) and self.running:
                    return True
            if not self.running:
                return False
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(
            f"the server does not answer: {patience.said()}: {self.log()[-2000:]}"
        )


@contextlib.contextmanager
def running_server(make: Callable[[Path], Server]) -> Iterator[Server]:
    """Start a server in a new directory; kill it and remove the directory at the end."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-server-"))
    server = None
    try:
        server = make(root)
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def redis_server(
    *args: str, password: str | None = None, tls: bool | Path = False
) -> Iterator[Server]:
    """Start a Redis without persistence. `args` are more options: "--maxmemory", "64mb",
    "--replicaof", host, port.

    It also listens on `server.socket`. With `tls` its port speaks only TLS, with a certificate
    signed by `server.ca`; with the root of another server, with that one's.
    """
    program = need("redis-server")
    options = [*args, *(["--requirepass", password] if password else [])]

    def command(root: Path, port: int) -> list[str]:
        ports = ["--port", str(port)]
        if tls:
            ports = [
                "--port",
                "0",
                "--tls-port",
                str(port),
                "--tls-auth-clients",
                "no",
                "--tls-replication",
                "yes",
            ]
            for option, file in _TLS_FILES.items():
                ports += [f"--{option}", str(root / file)]
        kept = ["--save", "", "--appendonly", "no", "--dir", str(root)]
        listen = ["--bind", "127.0.0.1", "--unixsocket", str(root / "unix.sock")]
        return [program, *ports, *listen, *kept, *options]

    def make(root: Path) -> Server:
        _certified(root, tls)
        (root / "unix.sock").unlink(missing_ok=True)
        return Server(
            root,
            lambda port: command(root, port),
            lambda _: _pongs(root / "unix.sock"),
            "rediss" if tls else "redis",
        )

    with running_server(make) as server:
        yield server


_TLS_FILES = {
    "tls-ca-cert-file": "ca.crt",
    "tls-cert-file": "server.crt",
    "tls-key-file": "server.key",
}


def _certified(root: Path, tls: bool | Path) -> None:
    if isinstance(tls, Path):
        for file in _TLS_FILES.values():
            shutil.copy(tls / file, root / file)
    elif tls:
        authority(root)


@contextlib.contextmanager
def redis_cluster(
    masters: int = 3, *args: str, replicas: int = 0, tls: bool = False
) -> Iterator[list[Server]]:
    """Start a Redis Cluster; return its masters, in the order of their slots, and then their
    replicas.

    `args` are more options of each; `replicas`: of each master. With some, a node that is silent
    for a second has failed. With `tls` all ports speak only TLS, with a certificate signed by
    `servers[0].ca`.
    """
    with contextlib.ExitStack() as stack:
        servers = list[Server]()
        for _ in range(masters * (1 + replicas)):
            patience = "1000" if replicas else "15000"
            bus = [
                "--cluster-port",
                str(free_port()),
                "--cluster-node-timeout",
                patience,
            ]
            quick = ["--repl-diskless-sync-delay", "0"]
            options = [
                "--cluster-enabled",
                "yes",
                *bus,
                *quick,
                *(["--tls-cluster", "yes"] if tls else []),
                *args,
            ]
            certified = servers[0].root if tls and servers else tls
            servers.append(
                stack.enter_context(redis_server(*options, tls=certified))
            )
        first = servers[0]
        for number, server in enumerate(servers):
            server.call("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            if number < masters:
                ends = (
                    16384 * number // masters,
                    16384 * (number + 1) // masters - 1,
                )
                server.call("CLUSTER", "ADDSLOTSRANGE", *map(str, ends))

        def meet() -> bool:
            """Introduce all nodes to the first; again, because a busy node gives up after a
            second.
            """
            for server in servers[1:]:
                bus_port = server.call("CONFIG", "GET", "cluster-port").split()[
                    -1
                ]
                first.call(
                    "CLUSTER", "MEET", "127.0.0.1", str(server.port), bus_port
                )
            patience = Patience(3.0)
            while not (
                done := all(_known(server) == len(servers) for server in servers)
            ):
                if patience.ended:
                    break
                time.sleep(0.02)
            return done

        _wait_for(meet, "the nodes do not meet")
        for number, server in enumerate(servers[masters:]):
            server.call(
                "CLUSTER",
                "REPLICATE",
                servers[number % masters].call("CLUSTER", "MYID").split()[-1],
            )
        _wait_for(
            lambda: (
                all(
                    "cluster_state:ok" in server.call("CLUSTER", "INFO")
                    for server in servers
                )
                and all(
                    "master_link_status:up" in each.call("INFO")
                    for each in servers[masters:]
                )
            ),
            "the cluster does not become ready",
        )
        yield servers


def _known(server: Server) -> int:
    nodes = server.call("CLUSTER", "NODES").splitlines()
    return sum(" connected" in line and "handshake" not in line for line in nodes)


def _wait_for(true: Callable[[], bool], trouble: str) -> None:
    patience = Patience(START_SECONDS)
    while not true():
        if patience.ended:
            raise RuntimeError(trouble)
        time.sleep(0.02)


@contextlib.contextmanager
def redis_sentinel(
    master: Server,
    service: str,
    quorum: int = 2,
    *,
    password: str = "",
    tls: bool = False,
) -> Iterator[Server]:
    """Start a Sentinel that watches a master; after half a second without an answer that has
    failed.

    With `password` it wants that of its clients, and the master wants it too. With `tls` it and the
    master speak only TLS, with the certificate of the master.
    """
    program = need("redis-server")

    def command(root: Path, port: int) -> list[str]:
        (root / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {root}\nunixsocket {root}/unix.sock\n"
            f"sentinel monitor {service} 127.0.0.1 {master.port} {quorum}\n"
            f"sentinel down-after-milliseconds {service} 500\nsentinel failover-timeout "
            f"{service} 3000\n"
            + (
                f"requirepass {password}\nsentinel auth-pass {service} {password}\n"
                if password
                else ""
            )
            + (_tls_lines(root, port) if tls else "")
        )
        return [program, str(root / "sentinel.conf"), "--sentinel"]

    def make(root: Path) -> Server:
        if tls:
            _certified(root, master.root)
        return Server(
            root,
            lambda port: command(root, port),
            lambda _: _pongs(root / "unix.sock"),
            "redis",
        )

    with running_server(make) as server:
        yield server


def _tls_lines(root: Path, port: int) -> str:
    files = "".join(
        f"{option} {root / file}\n" for option, file in _TLS_FILES.items()
    )
    return f"port 0\ntls-port {port}\ntls-auth-clients no\ntls-replication yes\n{files}"


def _pongs(path: Path) -> bool:
    # a replica without its master answers MASTERDOWN, a server with a password NOAUTH: both are up
    return _said(path, b"PING").startswith((b"+PONG", b"-NOAUTH", b"-MASTERDOWN"))


def _said(path: Path, line: bytes) -> bytes:
    """Return what a Redis answers to one line; of a long answer perhaps the begin."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(line + b"\r\n")
        said = client.recv(1 << 16)
        while said[:1] == b"$" and len(said) < int(said[1 : said.index(b"\r\n")]):
            said += client.recv(1 << 16)
        return said


@contextlib.contextmanager
def moto_s3() -> Iterator[Server]:
    """Start an S3 server with an empty bucket `BUCKET` (also after a restart); it accepts any
    credentials.
    """
    program = need("moto")

    def answers(port: int) -> bool:
        return _moto_status(port, "PUT", f"/{BUCKET}") == 200

    def command(port: int) -> list[str]:
        return [program, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with running_server(
        lambda root: Server(root, command, answers, "http")
    ) as server:
        yield server


def emptied_s3(server: Server) -> Server:
    """Bring a server of `moto_s3` back to its first state, with an empty bucket, and return it."""
    for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
        if (status := _moto_status(server.port, method, path)) != 200:
            raise RuntimeError(f"moto: {method} {path}: {status}")
    return server


def _moto_status(port: int, method: str, path: str) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request(
            method,
            path,
            headers={"Authorization": _ANYBODY, "Content-Length": "0"},
        )
        return client.getresponse().status
    finally:
        client.close()


_ANYBODY = (
    "AWS4-HMAC-SHA256 Credential=any/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)


@contextlib.contextmanager
def nginx_dav() -> Iterator[Server]:
    """Start an nginx for PUT, GET, DELETE and PROPFIND below `url`; its files are in `server.root /
    "files"`.
    """
    program = need("nginx")
    need(DAV_MODULE.name)

    def command(root: Path, port: int) -> list[str]:
        config = root / "nginx.conf"
        config.write_text(_NGINX.format(root=root, port=port, module=DAV_MODULE))
        return [
            program,
            "-p",
            str(root),
            "-c",
            str(config),
            "-e",
            str(root / "log"),
        ]

    def answers(port: int) -> bool:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            client.request("GET", "/none")
            return client.getresponse().status == 404
        finally:
            client.close()

    def make(root: Path) -> Server:
        (root / "files").mkdir()
        return Server(root, lambda port: command(root, port), answers, "http")

    with running_server(make) as server:
        yield server


COMMAND_OF_ANY_VERSION = [
    sys.executable,
    "-c",
    """
import sys
try:
    from pagoda.cli import main  # where it was before there were two packages
except ImportError:
    from pagoda_tools.cli import main
sys.exit(main())
""",
]
"""The command `pagoda` of the source that PYTHONPATH names."""


@contextlib.contextmanager
def pagoda_server(
    host_path: Path, *args: str, **variables: str
) -> Iterator[Server]:
    """Start `pagoda serve` for the stores under `host_path`, with its token in `server.root /
    "token"`.

    `args` are more options, such as "--host-size", "64MiB"; `variables` are for its environment.
    """

    def command(root: Path, port: int) -> list[str]:
        known = {
            "PAGODA_HOST_PATH": str(host_path),
            "XDG_STATE_HOME": str(root),
            "HOME": str(root),
        } | variables
        environment = [
            "env",
            "-u",
            "PAGODA_CONFIG",
            *(f"{name}={value}" for name, value in known.items()),
        ]
        listen = [
            "--listen",
            f"127.0.0.1:{port}",
            "--token-file",
            str(root / "token"),
        ]
        return [*environment, *COMMAND_OF_ANY_VERSION, "serve", *listen, *args]

    def answers(port: int) -> bool:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            client.request("GET", "/healthz")
            return client.getresponse().status == 200
        finally:
            client.close()

    def make(root: Path) -> Server:
        (root / "token").write_text(secrets.token_hex(16))
        (root / "token").chmod(0o600)
        return Server(root, lambda port: command(root, port), answers, "http")

    with running_server(make) as server:
        yield server


_NGINX = """
load_module {module};
daemon off;
master_process off;
worker_processes 1;
pid {root}/pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_max_body_size 0;
  client_body_temp_path {root}/body;
  proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi;
  scgi_temp_path {root}/scgi;
  server {{
    listen 127.0.0.1:{port};
    root {root}/files;
    location / {{
      dav_methods PUT DELETE MKCOL COPY MOVE;
      dav_ext_methods PROPFIND OPTIONS;
      create_full_put_path on;
      dav_access user:rw;
    }}
  }}
}}
"""


def authority(root: Path) -> Path:
    """Create an authority in `root` and a certificate for 127.0.0.1; return the authority's
    certificate.

    Files: ca.crt, ca.key, server.crt, server.key.
    """
    program = need("openssl")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def openssl(*args: str) -> None:
        subprocess.run(
            [program, *args],
            cwd=root,
            check=True,
            capture_output=True,
            timeout=60,
        )

    openssl(
        "req",
        "-x509",
        *key,
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-addext",
        "keyUsage=critical,keyCertSign",
    )
    openssl(
        "req",
        *key,
        "-keyout",
        "server.key",
        "-out",
        "server.csr",
        "-subj",
        "/CN=localhost",
    )
    (root / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(
        "x509",
        "-req",
        "-in",
        "server.csr",
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "server.crt",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    # raises if it must not be used
    ssl.create_default_context(cafile=str(root / "ca.crt"))
    return root / "ca.crt"


@contextlib.contextmanager
def mooncake_master(*args: str) -> Iterator[Server]:
    """Start the master of a Mooncake pool; it has no memory. `args` are more options, such as
    "-client_ttl=2".
    """
    program = _mooncake("mooncake_master")

    def command(port: int) -> list[str]:
        own = [
            "-rpc_address=127.0.0.1",
            f"-rpc_port={port}",
            "-metrics_host=127.0.0.1",
        ]
        return [
            program,
            *own,
            f"-metrics_port={free_port()}",
            "-logtostderr",
            *args,
        ]

    with running_server(
        lambda root: Server(root, command, _accepts, "mooncake")
    ) as server:
        yield server


@contextlib.contextmanager
def mooncake_peer(master: Server, size: str = "256MB") -> Iterator[Server]:
    """Start a machine that gives memory to the pool of `master`: Mooncake's own client."""
    program = _mooncake("mooncake_client")

    def command(port: int) -> list[str]:
        pool = [
            f"-master_server_address=127.0.0.1:{master.port}",
            "-metadata_server=P2PHANDSHAKE",
        ]
        return [
            program,
            "-host=127.0.0.1",
            f"-port={port}",
            f"-global_segment_size={size}",
            "-logtostderr",
            *pool,
        ]

    with running_server(
        lambda root: Server(root, command, _accepts, "mooncake")
    ) as server:
        yield server


def _mooncake(program: str) -> str:
    if missing := lacking("mooncake", *LIBRARIES):
        raise skip(missing)
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).with_name(program))


def _accepts(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True
