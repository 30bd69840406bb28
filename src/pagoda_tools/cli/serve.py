"""`pagoda serve`: serves this machine's chunks to other machines over HTTP, beside the engines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.printing import show_log
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    configured,
    find_stores,
    given_size,
)

if TYPE_CHECKING:
    from pagoda.tiers.remote.peer_directory import PeerDirectory
    from pagoda_tools.serve.served_stores import HostRoom


def serve(
    directory: Directory = None,
    listen: Annotated[str | None, Option(metavar="HOST:PORT|unix:PATH")] = None,
    token_file: Annotated[Path | None, Option(metavar="FILE")] = None,
    allow_host: Annotated[list[str] | None, Option(metavar="NAME")] = None,
    advertise: Annotated[str | None, Option(metavar="URL")] = None,
    read_only: Annotated[bool, Option("--read-only")] = False,
    host_size: Annotated[str | None, Option(metavar="SIZE")] = None,
    tls_cert: Annotated[Path | None, Option(metavar="FILE")] = None,
    tls_key: Annotated[Path | None, Option(metavar="FILE")] = None,
    gpu_price: Annotated[
        float | None, Option(min=0, max=1e6, metavar="N")
    ] = None,
    tokenizer: Annotated[Path | None, Option(metavar="PATH")] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Serve the chunks of this machine's stores over HTTP, until Ctrl-C. Engines run as before.

    Args:
        listen: The address; default: a Unix socket of this user.
        token_file: Token of TCP clients; default: PAGODA_SERVE_TOKEN or a file made once.
        allow_host: Another name by which clients may call this machine.
        advertise: With the option lookup: the URL of this server for other machines.
        read_only: Refuse to store and remove chunks.
        host_size: Create host stores of this size for chunks of new layouts.
        tls_cert: Certificate chain (PEM): serve https.
        tls_key: Key of the certificate (PEM).
        gpu_price: Price per hour of an engine's GPUs, to show what hits save.
        tokenizer: The model's tokenizer.json or its directory, for prompts as text.
    """
    try:
        import asyncio

        from pagoda.tiers.remote.peer_directory import check_machine
        from pagoda.tiers.remote.store_urls import is_loopback
        from pagoda_tools.cli.web_page_options import page_options
        from pagoda_tools.serve.access import default_socket, read_token
        from pagoda_tools.serve.served_stores import lossy_codec_of
        from pagoda_tools.serve.server import ServeOptions
        from pagoda_tools.serve.server import serve as run
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"serve needs {missing.name}: pip install 'pagodakv[serve]'"
        ) from None
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key: give both or neither")
    if directory is not None and not directory.is_dir():
        find_stores(directory, config)  # raises an error that says what is wrong
    if directory is not None and (lossy := lossy_codec_of(directory.resolve())):
        raise UsageError(
            f"{directory}: has chunks of the lossy codec {lossy}, which are not served: leave it "
            "out"
        )
    if directory is not None and host_size is not None:
        raise UsageError(
            "--host-size creates stores in host_path: leave DIRECTORY out"
        )
    address, socket_path = _address(listen)
    if address is None and (tls_cert or token_file or allow_host):
        raise UsageError(
            "--tls-cert, --token-file, --allow-host need --listen HOST:PORT"
        )
    options = ServeOptions(
        find_stores=partial(_find_stores, directory, config),
        listen=address,
        token=read_token(token_file) if address else None,
        allow_hosts=allow_host or (),
        read_only=read_only,
        host_room=_host_room(host_size, config),
        certificate=tls_cert,
        certificate_key=tls_key,
        socket_path=socket_path or default_socket(),
        directory=_peer_directory(config, address is not None, advertise),
        advertise=check_machine(advertise) if advertise else None,
        page=page_options(directory, config, gpu_price, tokenizer),
    )
    if address and tls_cert is None and not is_loopback(address[0]):
        printing.note(
            f"{address[0]} is not loopback, and there is no TLS: the network can read chunks, "
            "and the token that a "
            "browser or curl sends; "
            "add --tls-cert and --tls-key, or listen in a private network only"
        )
    if (
        options.directory is not None
        and address
        and is_loopback(address[0])
        and not advertise
    ):
        printing.note(
            f"lookup: other machines get the address {address[0]}, by which each reaches itself: "
            "listen at an address by which they reach this machine, or add --advertise URL"
        )

    def ready(url: str) -> None:
        print(
            json.dumps({"url": url, "pid": os.getpid()})
            if as_json
            else f"pagoda serve: {url}",
            flush=True,
        )

    show_log(configured(config).log_format)
    asyncio.run(run(options, ready))
    return 0


def _find_stores(directory: Path | None, config: Path | None) -> Sequence[Path]:
    """Return the stores that exist now; a directory without stores may get some later. Raises
    StoreError.
    """
    from pagoda.base.errors import StoreError

    try:
        return find_stores(directory, config)
    except UsageError as error:
        if directory is not None and directory.is_dir():
            return []
        raise StoreError(str(error)) from None


def _peer_directory(
    config: Path | None, over_tcp: bool, advertise: str | None
) -> PeerDirectory | None:
    """Return the directory in which this machine announces its chunks, if the option `lookup` names
    one.
    """
    from pagoda.tiers.remote.peer_directory import PeerDirectory

    specs = configured(config).lookup_server()
    if advertise and not (over_tcp and specs):
        raise UsageError(
            "--advertise needs --listen HOST:PORT and the option lookup"
        )
    if specs and not over_tcp:
        printing.note(
            "lookup: other machines cannot reach a Unix socket, so nothing is announced: add "
            "--listen HOST:PORT"
        )
    return (
        PeerDirectory(specs[0].url_with_password(), prefix=specs[0].prefix)
        if specs and over_tcp
        else None
    )


def _address(listen: str | None) -> tuple[tuple[str, int] | None, Path | None]:
    """Return host and port, or the path of a Unix socket, from `--listen`."""
    if listen is None:
        return None, None
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:").removeprefix("//"))
        if not path.is_absolute() or len(os.fsencode(path)) > 100:
            raise UsageError(
                f"--listen {listen}: write unix: and an absolute path of at most 100 bytes"
            )
        return None, path
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen {listen}: write HOST:PORT or unix:PATH")
    return (host.removeprefix("[").removesuffix("]"), int(port)), None


def _host_room(size: str | None, config: Path | None) -> HostRoom | None:
    from pagoda.base.store_place import FIRST_PIECE_BYTES, require_place
    from pagoda.config.sizes import AUTO, auto_bytes
    from pagoda_tools.serve.served_stores import HostRoom

    if size is None:
        return None
    found = configured(config)
    nbytes = given_size("--host-size", size)
    room = (
        auto_bytes(Path(found.host_path)) if isinstance(nbytes, str) else nbytes
    )
    if not room:
        return None
    path = Path(os.path.realpath(found.host_path))
    grows = nbytes == AUTO
    first = min(room, FIRST_PIECE_BYTES) if grows else room
    require_place(path, first, in_memory=True)
    return HostRoom(path, room, found.policy, grows, found.objective)
