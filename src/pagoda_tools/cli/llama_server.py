"""`pagoda llama-server`: starts llama.cpp's server behind a proxy that keeps what its slots
compute.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option
from typer.core import TyperCommand

from pagoda.base.errors import ConfigError
from pagoda.config import Config
from pagoda_tools.cli import (
    INTERRUPTED,
    FailedError,
    UsageError,
    engine_start,
    printing,
)
from pagoda_tools.cli.docstring_help import documented
from pagoda_tools.cli.stores import given_bytes

if TYPE_CHECKING:
    from typer._click.core import Context

    from pagoda_tools.llama_proxy.server_arguments import ServerArguments

CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}
_IN_PROCESS = "pagoda_tools.llama_proxy.in_process_server"
_PROXY_PANEL = "The proxy"
_ATTACH_PANEL = "A server that already runs"


class ServerCommand(TyperCommand):
    """The command; it says where the options of the server itself go."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return what the usage says."""
        return ["[OPTIONS] -- llama-server ARGS..."]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse this command's own options."""
        try:
            return super().parse_args(ctx, args)
        except Exception as refusal:
            # of click, or of the click inside typer
            if type(refusal).__name__ != "NoSuchOption":
                raise
            name = getattr(refusal, "option_name", "")
            raise UsageError(
                f"{name}: no such option (llama-server's own go after --, as in -- -m FILE)"
            ) from None


@engine_start.with_config_options
@documented
def llama_server(
    ctx: typer.Context,
    listen: Annotated[
        str | None, Option(metavar="HOST:PORT", rich_help_panel=_PROXY_PANEL)
    ] = None,
    allow_host: Annotated[
        list[str] | None, Option(metavar="NAME", rich_help_panel=_PROXY_PANEL)
    ] = None,
    share_all: Annotated[
        bool, Option("--share-all", rich_help_panel=_PROXY_PANEL)
    ] = False,
    state_bytes: Annotated[
        str | None, Option(metavar="SIZE", rich_help_panel=_PROXY_PANEL)
    ] = None,
    print_only: engine_start.PrintOnly = False,
    attach: Annotated[
        str | None, Option(metavar="URL", rich_help_panel=_ATTACH_PANEL)
    ] = None,
    slot_save_path: Annotated[
        Path | None, Option(metavar="DIR", rich_help_panel=_ATTACH_PANEL)
    ] = None,
    adapters_are_fixed: Annotated[
        bool, Option("--adapters-are-fixed", rich_help_panel=_ATTACH_PANEL)
    ] = False,
    **options: str | bool | None,
) -> int:
    """Start llama-server behind a proxy: no prompt prefix is computed twice.

    What comes after -- is the command line of llama-server, as it is without PagodaKV. Its clients
    use the proxy under the same address and with the same API keys. Options of PagodaKV that are
    not given come from the environment and the configuration files.

    Args:
        listen: Where clients connect; default: --host and --port of llama-server.
        allow_host: Another name by which browsers may call this machine.
        share_all: Clients with different API keys share what is stored.
        state_bytes: The most bytes of a saved slot; default: an eighth of free memory.
        print_only: Print the command and the address instead of starting them.
        attach: A server that already runs, as http://127.0.0.1:8080; LLAMA_API_KEY is its key.
        slot_save_path: With --attach: the --slot-save-path of that server.
        adapters_are_fixed: With --attach: nobody sends it POST /lora-adapters past the proxy.
    """
    from pagoda.config.sources import load

    try:
        import aiohttp  # noqa: F401
        import httptools  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"llama-server needs {error.name}: pip install 'pagodakv[serve]'"
        ) from None
    given = {name: value for name, value in options.items() if value is not None}
    proxy = _Proxy(
        listen=listen,
        allow_hosts=allow_host or (),
        share_all=share_all,
        state_bytes=None
        if state_bytes is None
        else given_bytes("--state-bytes", state_bytes),
        config=load(cli=given).for_engine(),
        print_only=print_only,
    )
    if attach is not None:
        return _attach(
            proxy, attach, slot_save_path, adapters_are_fixed, ctx.args
        )
    for name, value in (
        ("--slot-save-path", slot_save_path),
        ("--adapters-are-fixed", adapters_are_fixed),
    ):
        if value:
            raise UsageError(
                f"{name} is for --attach: without it, write what concerns the server after --"
            )
    own = {
        name
        for parameter in ctx.command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return _start(proxy, ctx.args, own)


@dataclass(frozen=True, kw_only=True)
class _Proxy:
    """What the options before `--` say of the proxy."""

    listen: str | None
    allow_hosts: Sequence[str]
    share_all: bool
    state_bytes: int | None
    config: Config
    print_only: bool


def _attach(
    proxy: _Proxy,
    url: str,
    slot_save_path: Path | None,
    adapters_are_fixed: bool,
    words: Sequence[str],
) -> int:
    """Serve in front of a server that runs."""
    from pagoda.connectors.llamacpp.server_requests import ServerRequests
    from pagoda_tools.llama_proxy.server_arguments import (
        DEFAULT_LISTEN,
        KEY_VARIABLE,
        listen_address,
    )

    if words:
        raise UsageError(
            "--attach is for a server that runs: leave out -- and what follows"
        )
    if slot_save_path is None:
        raise UsageError(
            "--attach needs --slot-save-path DIR: that of the server"
        )
    keys = [key for key in os.environ.get(KEY_VARIABLE, "").split(",") if key]
    server_key = keys[0] if keys else ""
    server = ServerRequests(url, server_key)
    listen = listen_address(proxy.listen) if proxy.listen else DEFAULT_LISTEN
    if listen[1] == server.port and proxy.listen is None:
        raise UsageError(
            f"the proxy cannot listen on port {server.port} too: write --listen HOST:PORT"
        )
    if proxy.print_only:
        print(f"attach to {server.url}")
        print(f"listen at {_url(listen)}")
        return 0
    _check(proxy, listen, keys)
    import asyncio

    from pagoda_tools.llama_proxy.proxy_app import ProxyOptions, run_proxy

    options = ProxyOptions(
        server_url=url,
        server_key=server_key,
        slot_save_path=slot_save_path.absolute(),
        listen=listen,
        # the proxy must not open a server that asks for a key
        api_keys=keys,
        share_all=proxy.share_all,
        allow_hosts=proxy.allow_hosts,
        owns_server=False,
        # nobody knows
        empties_idle_slots=True,
        state_bytes=proxy.state_bytes,
        config=proxy.config,
        adapters_are_fixed=adapters_are_fixed,
    )

    async def serve() -> None:
        _end_with_the_terminal()
        await run_proxy(options, _ready, printing.note)

    with _quiet_end():
        asyncio.run(serve())
    return 0


def _start(proxy: _Proxy, words: Sequence[str], own: Collection[str]) -> int:
    """Start a server, and serve in front of it. `own`: the options of this command."""
    import asyncio

    from pagoda_tools.llama_proxy.in_process_server import read_options
    from pagoda_tools.llama_proxy.server_arguments import (
        known_options,
        listen_address,
        only_prints,
        read_arguments,
        without_secrets,
    )

    if not words:
        raise UsageError(
            "write the server's command: pagoda llama-server -- llama-server -m FILE"
        )
    program, shown, rest = _program(words)
    if only_prints(rest):
        engine_start.become([*program, *rest])
    known = known_options(program, os.environ)
    for word in rest:
        if word in own and word not in known:
            raise UsageError(f"{word} is an option of pagoda: write it before --")
    arguments = read_arguments(rest, os.environ, known)
    if _IN_PROCESS in program:
        read_options(arguments.passed, arguments.environment)
    is_shared = proxy.share_all or len(arguments.api_keys) < 2
    if arguments.has_ram_cache and not is_shared:
        raise UsageError(
            "--cache-ram tells API keys of each other: leave it out, or --share-all"
        )
    listen = listen_address(proxy.listen) if proxy.listen else arguments.listen
    if proxy.print_only:
        command = arguments.command(shown, "PORT", "DIR")
        if arguments.slot_save_path is not None:
            command = arguments.command(shown, "PORT", arguments.slot_save_path)
        print(shlex.join(without_secrets(command)))
        print(f"listen at {_url(listen)}")
        return 0
    _check(proxy, listen, arguments.api_keys)
    with contextlib.ExitStack() as stack:
        directory = _directory(arguments, stack)
        stack.enter_context(_quiet_end())
        return asyncio.run(_serve(proxy, program, arguments, listen, directory))


async def _serve(
    proxy: _Proxy,
    program: Sequence[str],
    arguments: ServerArguments,
    listen: tuple[str, int],
    directory: Path,
) -> int:
    """Start the server, serve until the end of either, and end the server."""
    import asyncio

    from pagoda_tools.llama_proxy.proxy_app import ProxyOptions, run_proxy
    from pagoda_tools.llama_proxy.server_process import ServerProcess

    # until the proxy has its own
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    _end_with_the_terminal()
    server = ServerProcess(
        lambda port: arguments.command(program, port, directory),
        arguments.environment,
    )
    try:
        await server.start()
        printing.note(_start_line(arguments, server.port))
        await server.ready(printing.note)
        options = ProxyOptions(
            server_url=server.url,
            server_key=server.key,
            slot_save_path=directory,
            listen=listen,
            api_keys=arguments.api_keys,
            share_all=proxy.share_all,
            allow_hosts=proxy.allow_hosts,
            owns_server=True,
            empties_idle_slots=arguments.empties_idle_slots,
            may_have_ram_cache=arguments.has_ram_cache,
            state_bytes=proxy.state_bytes,
            config=proxy.config,
            # only the proxy can reach the server, and sees what changes them
            adapters_are_fixed=True,
            loading_is_off=arguments.loading_is_off,
        )
        await run_proxy(options, _ready, printing.note, server.ended)
        if server.ended.is_set():
            raise FailedError(f"{server.how_it_ended}: its output above says why")
    finally:
        await server.stop()
    return 0


def _program(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the program to be started, how `--print` shows it, and the words after it. Raises
    UsageError.
    """
    from pagoda_tools.llama_proxy.server_arguments import program_of

    path, name, rest = program_of(words, shutil.which)
    if path is not None:
        return [path], [name], rest
    if name != "llama-server":
        raise UsageError(f"{name} is not on the PATH")
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "no llama-server is on the PATH: pip install 'pagodakv[llamacpp]' has one"
        )
    # like a script: no module is imported from the working directory
    module = ["-P", "-m", _IN_PROCESS]
    return [sys.executable, *module], ["python", *module], rest


def _directory(arguments: ServerArguments, stack: contextlib.ExitStack) -> Path:
    """Return the directory for states: the user's, or one that is removed at the end. Raises
    StoreError.
    """
    from pagoda.connectors.llamacpp.state_directory import make_state_directory
    from pagoda_tools.llama_proxy.slot_directory import slot_directory

    if arguments.slot_save_path is not None:
        return make_state_directory(arguments.slot_save_path)
    return stack.enter_context(slot_directory())


def _check(proxy: _Proxy, listen: tuple[str, int], keys: Sequence[str]) -> None:
    """Check what can be checked before a slow start. Raises ConfigError, StoreError."""
    from pagoda.tiers.remote.store_urls import is_loopback

    config = proxy.config
    below = config.disk_bytes or config.remote or config.peers
    if not (config.host_bytes or below):
        raise ConfigError(
            "nothing would be kept, because there is neither host memory nor a disk: write "
            "--host-size SIZE, or --disk-path DIR and --disk-size SIZE"
        )
    engine_start.check_tiers(config)
    printing.show_log(proxy.config.log_format)
    _require_free(listen)
    if not keys and not is_loopback(listen[0]):
        printing.note(
            f"{listen[0]} is not loopback, and there is no API key: the network can use the model; "
            "write --api-key-file FILE after llama-server"
        )


def _require_free(listen: tuple[str, int]) -> None:
    """Raise ConfigError if nobody can listen at an address now. Changes nothing."""
    host, port = listen
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"the proxy cannot listen at {_url(listen)}: {why}: write --listen HOST:PORT before "
            "the --"
        ) from None


def _end_with_the_terminal() -> None:
    """Let a terminal that is closed end this process as SIGTERM does, unless that is ignored
    (nohup): so slots are saved.
    """
    import asyncio

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, signal.raise_signal, signal.SIGTERM
        )


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """End with SIGTERM as with Ctrl-C, while the server loads."""
    import asyncio

    try:
        yield
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None


def _start_line(arguments: ServerArguments, port: int) -> str:
    line = f"starting llama-server on port {port}"
    if not arguments.has_ram_cache:
        line += (
            "; its own RAM cache is off, because the host tier does that, bounded and shared "
            "(--cache-ram MIB after llama-server turns it on)"
        )
    return line


def _ready(line: str) -> None:
    print(f"pagoda llama-server: {line}", flush=True)


def _url(listen: tuple[str, int]) -> str:
    host, port = listen
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
