"""Two machines, each with a configuration that was imported from LMCache's: one hits what the other
stored.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pagoda.base.serve_token_file import default_token_file
from pagoda.cache import Cache
from pagoda.config.sources import load
from pagoda_tools.migrate.lmcache import translate
from testbed.patience import wait_until
from testbed.servers import Server, pagoda_server, redis_server
from tests.cache import kit

OLDEST = {
    "chunk_size": kit.CHUNK,
    "local_device": "cpu",
    "remote_serde": "cachegen",
}
P2P = {
    "chunk_size": kit.CHUNK,
    "local_cpu": True,
    "enable_p2p": True,
    "lookup_url": "localhost:6379",
}


def share_token(server: Server) -> None:
    """Give this machine's user the server's token, as an operator does."""
    default_token_file().parent.mkdir(parents=True, exist_ok=True)
    default_token_file().write_text((server.root / "token").read_text())


def imported(
    root: Path, fields: dict[str, object], peers: tuple[str, ...] = ()
) -> Path:
    """Return the file of one machine."""
    made = translate(fields, peers=peers)
    assert made.refused == []
    root.mkdir(exist_ok=True)
    (root / "pagoda.toml").write_text(made.toml("lmcache.yaml"))
    return root / "pagoda.toml"


def opened(
    root: Path, fields: dict[str, object], peers: tuple[str, ...] = ()
) -> Cache:
    """Open the cache of one machine with what is imported, as its file says it, with little host
    memory.
    """
    imported(root, fields, peers)
    small = {
        "host_path": str(root / "host"),
        "host_size": "2MiB",
        "worth_it": False,
    }
    config = load(file=root / "pagoda.toml", environ={}, **small).config
    return Cache(config, namespace=kit.NAMESPACE, layout=kit.LAYOUT)


def hits_by(cache: Cache, tier: str) -> None:
    """Check that the whole prompt comes from `tier`, sooner or later: a busy machine may be
    late.
    """
    tokens = kit.prompt(8)
    seen = set[str]()

    def whole() -> bool:
        hit, _ = kit.served(cache, tokens)
        seen.update(name for name, count in hit.by_tier.items() if count)
        return hit.num_tokens == len(tokens)

    wait_until(whole)
    assert tier in seen


@pytest.mark.slow
def test_a_configuration_with_lmcaches_server_hits_on_another_machine(
    shm_root: Path,
) -> None:
    with pagoda_server(shm_root / "server", "--host-size", "16MiB") as server:
        share_token(server)
        fields = OLDEST | {"remote_url": f"lm://127.0.0.1:{server.port}"}
        with opened(shm_root / "a", fields) as cache:
            kit.stored(cache, kit.prompt(8))
        with opened(shm_root / "b", fields) as cache:
            hits_by(cache, "pagoda")


@pytest.mark.slow
def test_a_p2p_configuration_hits_on_another_machine(shm_root: Path) -> None:
    with (
        pagoda_server(shm_root / "a" / "host") as one,
        pagoda_server(shm_root / "b" / "host") as two,
    ):
        peers = tuple(
            f"{server.url}?password_file={server.root}/token"
            for server in (one, two)
        )  # the same list for both: each has itself in it
        with opened(shm_root / "a", P2P, peers) as cache:
            kit.stored(cache, kit.prompt(8))
        with opened(shm_root / "b", P2P, peers) as cache:
            hits_by(cache, "peers")


@pytest.mark.slow
def test_p2p_with_a_look_up_server(shm_root: Path) -> None:
    """No file names a neighbour: the machines meet in the Redis of `lookup_url`, and share one
    token.
    """
    default_token_file().parent.mkdir(parents=True, exist_ok=True)
    default_token_file().write_text("one-token-for-both")
    default_token_file().chmod(0o600)
    with redis_server() as directory_server, ExitStack() as both:
        for name, port in (("a", 8200), ("b", 8300)):
            place = {
                "lookup_url": f"localhost:{directory_server.port}",
                "distributed_url": f"localhost:{port}",
            }
            file = imported(shm_root / name, P2P | place)
            options = (
                "--config",
                str(file),
                "--token-file",
                str(default_token_file()),
            )
            both.enter_context(pagoda_server(shm_root / name / "host", *options))
        place = {"lookup_url": f"redis://localhost:{directory_server.port}"}
        with opened(shm_root / "a", P2P | place) as cache:
            kit.stored(cache, kit.prompt(8))
        with opened(shm_root / "b", P2P | place) as cache:
            hits_by(cache, "peers")
