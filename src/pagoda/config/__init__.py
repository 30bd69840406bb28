"""The configuration of a cache: one plain frozen dataclass.

`Config` may be built by hand; `pagoda.config.sources.load` builds it from files, the environment
and options, and records where every value came from.

    sources        reads files, the environment and options
    option_values  the values that each option may have
    sizes          sizes as people write them, and what "auto" means
    remote_urls    the URLs of remote tiers, neighbours and their directory
    expand_home    a leading ~ in paths
    did_you_mean   names that are nearly right
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypedDict, TypeVar, Unpack

from pagoda import policy as policies
from pagoda.base.errors import ConfigError
from pagoda.config import option_values
from pagoda.config.option_values import (
    Check,
    DiskCodec,
    HintMode,
    LogFormat,
    StartWithout,
    WritePolicy,
)
from pagoda.config.remote_urls import (
    LOSSY,
    MOST_PEERS,
    RemoteSpec,
    parse,
    parse_lookup,
    parse_peer,
)
from pagoda.config.sizes import AUTO, auto_bytes
from pagoda.policy import DEFAULT_OBJECTIVE, Objective

__all__ = [
    "Config",
    "ConfigOptions",
    "RemoteSpec",
    "WritePolicy",
    "defaults",
    "option_names",
]


T = TypeVar("T")


def _option(
    default: T, help: str, check: Check | None = None, secret: bool = False
) -> T:
    """Return the dataclass field of an option, typed as its value; `secret`: it is never shown.

    `check`: the check of its value, if the type has none.
    """
    return field(
        default=default, repr=not secret, metadata={"help": help, "check": check}
    )


@dataclass(frozen=True)
class Config:
    """The options of a cache. Immutable: threads may share it. Sizes are for the whole machine,
    never per rank.

    `pagoda config schema` says what each option means.

    Raises:
        ConfigError: a value is invalid; the message names the field, the value and what to do.

    Example:
        >>> config = Config(host_size="16GiB", disk_path="/var/cache/pagoda", disk_size="200GiB")
        >>> config.host_bytes, config.write_policy
        (17179869184, 'write_through')
    """

    chunk_tokens: int = _option(
        256,
        "Tokens in one chunk, the unit of storing.",
        option_values.count(1, 2**20),
    )
    host_size: int | str = _option(
        AUTO,
        "Host memory of the whole machine: '64GiB', bytes, 'auto' (grows to a quarter), 0 = off.",
    )
    host_path: str = field(
        default_factory=lambda: f"/dev/shm/pagoda-{os.getuid()}",
        metadata={
            "help": "Directory of the host tier; must be in memory (/dev/shm or another tmpfs).",
            "check": option_values.place("directory", needed=True),
        },
    )
    host_shared: bool = _option(
        True,
        "Share host memory with other processes; false = private memory of one process.",
    )
    disk_size: int | str = _option(
        0, "Disk room of the whole machine: '1.5TB', bytes, 0 = no disk tier."
    )
    disk_path: str = _option(
        "",
        "Directory of the disk tier, on a local file system.",
        option_values.place("directory"),
    )
    disk_direct: bool | None = _option(
        None, "Use O_DIRECT: true, false, or 'auto' (where the file system can)."
    )
    disk_codec: DiskCodec = _option(  # a field, as all of them  # noqa: RUF009
        "raw",
        "Form of chunks on the disk: exact ('raw'), or smaller and approximate ('q8', 'q4').",
    )
    remote: tuple[str, ...] = _option(
        (),
        "Stores that many machines share, below the disk, top down: 'redis://HOST', 's3://BUCKET'.",
        option_values.remote,
        secret=True,
    )
    peers: tuple[str, ...] = _option(
        (),
        (
            "Neighbours whose chunks are read, never written: the 'http://HOST:7777' of each "
            "pagoda "
            "serve."
        ),
        option_values.peers,
        secret=True,
    )
    lookup: str = _option(
        "",
        (
            "Where machines say which chunks they have: 'redis://HOST'; only those neighbours are "
            "asked."
        ),
        option_values.lookup,
        secret=True,
    )
    weights_epoch: int = _option(
        0,
        (
            "Which weights all machines have: raise it on every machine when they change; remote "
            "tiers need it."
        ),
        option_values.count(0),
    )
    # a field, as all of them
    start_without: StartWithout = _option(  # noqa: RUF009
        "none",
        (
            "Start even if this cannot be opened: 'none', or 'lower' (the disk tier), which "
            "engines "
            "have by default."
        ),
    )
    durable: bool = _option(
        False, "Sync each batch to the disk before it counts as stored."
    )
    # a field, as all of them
    write_policy: WritePolicy = _option(  # noqa: RUF009
        "write_through",
        (
            "What reaches lower tiers: all ('write_through'), what was hit often enough "
            "('selective'), the coldest ahead of eviction ('write_back')."
        ),
    )
    selective_hits: int = _option(
        2,
        "Hits after which 'selective' writes a chunk down.",
        option_values.count(1),
    )
    min_hit_tokens: int = _option(
        0,
        "Hits of fewer tokens than this are not loaded.",
        option_values.count(0),
    )
    worth_it: bool = _option(
        True, "Load only what is expected to be faster than computing it."
    )
    deadline_seconds: float = _option(
        1.0,
        "The longest that one call may wait; hashing the prompt (1 to 2 us per chunk) is no wait.",
        option_values.seconds,
    )
    io_threads: int = _option(
        2, "Threads that read and write the disk.", option_values.count(1, 64)
    )
    queue_chunks: int = _option(
        64,
        "Chunks that may wait for the lower tiers; more are dropped.",
        option_values.count(1, 2**20),
    )
    policy: str = _option(
        policies.DEFAULT,
        (
            "Which chunk is evicted first when a tier is full, by one of "
            f"{', '.join(map(repr, policies.NAMES))}."
        ),
        option_values.one_of(policies.NAMES, policies.REMOVED),
    )
    objective: Objective = _option(  # noqa: RUF009
        DEFAULT_OBJECTIVE,
        (
            "What 'hindsight' serves most of: 'chunks', or 'compute', the computation that hits "
            "save."
        ),
    )
    hints: HintMode = _option(  # noqa: RUF009
        "auto",
        (
            "When the policy sees request hints: from the first one on ('auto'), 'never', or "
            "'always', so that it tells workloads apart also without them."
        ),
    )
    record: str = _option(
        "",
        "Record requests in this file, for pagoda replay: hashed ids, no text. Empty: off.",
        option_values.place("file"),
    )
    prompt_log: bool = _option(
        True,
        "Keep the token ids of stored prompts beside the host tier, for pagoda explain.",
    )
    profile: bool = _option(
        False,
        "Mark calls and copies of this process for torch.profiler and Nsight; needs torch.",
    )
    otel: bool = _option(
        False,
        (
            "Make an OpenTelemetry span of each store, lookup and retrieve of this process; needs "
            "pagodakv[otel]."
        ),
    )
    blend_recompute: float = _option(
        0.15,
        (
            "Blending: the share of later documents' tokens that is computed again, where a call "
            "names none."
        ),
        option_values.share,
    )
    blend_min_tokens: int = _option(
        0,
        (
            "Blending: later documents with fewer tokens than this are computed, where a call "
            "names "
            "no other."
        ),
        option_values.count(0),
    )
    quality_verdicts: str = _option(
        "",
        (
            "Where the verdicts of pagoda quality are: a directory or a file. Empty: "
            "~/.config/pagoda/quality."
        ),
        option_values.place("path"),
    )
    unchecked: bool = _option(
        False,
        "Let blending and lossy codecs start without a passing verdict of pagoda quality.",
    )
    log_format: LogFormat = _option(  # a field, as all of them  # noqa: RUF009
        "plain",
        (
            "'plain': the log of PagodaKV goes where the process's log goes; 'json': to stderr, "
            "one JSON object per line."
        ),
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(
                self,
                option.name,
                option_values.checked(option, getattr(self, option.name)),
            )
        try:
            policies.require_weighing(
                self.policy, self.objective != DEFAULT_OBJECTIVE
            )
        except ValueError as trouble:
            raise ConfigError(
                f"objective = {self.objective!r}: {trouble}"
            ) from None
        if len(self.peers) > MOST_PEERS and not self.lookup:
            raise ConfigError(
                f"peers: {len(self.peers)} servers, and at most {MOST_PEERS} are asked at once; "
                "set lookup = "
                "'redis://host:6379/0', where machines say which chunks they have, or name fewer"
            )
        if self.disk_bytes and not self.disk_path:
            raise ConfigError(
                f"disk_size = {self.disk_size}: where is it? set disk_path, or disk_size = 0"
            )
        if self.disk_path and not self.disk_bytes:
            raise ConfigError(
                f"disk_path = {self.disk_path!r}: how large? set disk_size, such as '100GiB'"
            )
        if self.disk_path and self.disk_path == self.host_path:
            raise ConfigError(
                f"disk_path = {self.disk_path!r}: is host_path too; each tier needs its own "
                "directory"
            )

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], **options: Unpack[ConfigOptions]
    ) -> Config:
        """Return the options of one TOML file. Reads no other file and no variable; changes
        nothing.

        Args:
            path: the file; `pagoda config schema` describes it. A leading ~ is the home directory.
            options: these come before what the file says.

        Raises:
            ConfigError: no such file, not TOML, an unknown option or a wrong value, or a file that
                others can change.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as directory:
            ...     path = Path(directory, "pagoda.toml")
            ...     _ = path.write_text('host_size = "16GiB"')
            ...     config = Config.from_file(path, policy="lru")
            >>> config.host_bytes, config.origins["policy"], config.origins["chunk_tokens"]
            (17179869184, 'argument policy', 'default')
        """
        from pagoda.config.sources import load_file

        return load_file(path, **options).config

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        **options: Unpack[ConfigOptions],
    ) -> Config:
        """Return the options of the PAGODA_... variables, over the file that PAGODA_CONFIG names.
        Reads no other file; changes nothing.

        `Cache(...)` without a Config reads these and the usual files as well.

        Args:
            environ: the variables; None: those of this process.
            options: these come before the variables.

        Raises:
            ConfigError: an unknown variable that begins with PAGODA_, a wrong value, or a file that
                cannot be read.

        Example:
            >>> config = Config.from_env({"PAGODA_HOST_SIZE": "16GiB"})
            >>> config.host_bytes, config.origins["host_size"]
            (17179869184, 'environment PAGODA_HOST_SIZE')
        """
        from pagoda.config.sources import load_environment

        return load_environment(environ, **options).config

    @property
    def origins(self) -> Mapping[str, str]:
        """Where the value of each option came from: "default", "file /etc/pagoda.toml",
        "environment PAGODA_HOST_SIZE", "option --host-size", "argument host_size".

        A Config that was made by hand knows only which values differ from the defaults: these are
        arguments.
        """
        noted: Mapping[str, str] | None = getattr(self, "_origins", None)
        if noted is not None:
            return MappingProxyType(dict(noted))
        usual = defaults()
        return MappingProxyType(
            {
                name: "default"
                if getattr(self, name) == usual[name]
                else f"argument {name}"
                for name in option_names()
            }
        )

    def note_origins(self, origins: Mapping[str, str]) -> None:
        """Keep where the values came from, for `origins`. Only for `pagoda.config.sources`, before
        anyone else has this object.
        """
        object.__setattr__(self, "_origins", dict(origins))

    auto_bound: ClassVar[str] = ""
    """What bounds a `host_size` of "auto", and what to do, if it is not a quarter of the memory."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier for the whole machine, with "auto" resolved now; 0 = no host
        tier.
        """
        if self.host_size == AUTO:
            return auto_bytes(Path(self.host_path) if self.host_shared else None)
        return int(self.host_size)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier for the whole machine; 0 = no disk tier."""
        return int(self.disk_size)

    def remotes(self) -> tuple[RemoteSpec, ...]:
        """Return the specification of each remote tier, top down. Reads no file and asks no
        server.
        """
        return tuple(parse(url) for url in self.remote)

    def lossy_codecs(self) -> tuple[str, ...]:
        """Return the lossy codecs of all tiers, each once, sorted. Reads no file and asks no
        server.
        """
        codecs = {spec.codec for spec in self.remotes()} | (
            {self.disk_codec} if self.disk_bytes else set()
        )
        return tuple(sorted(codecs.intersection(LOSSY)))

    def without_lossy_tiers(self) -> Config:
        """Return these options without the tiers that have a lossy codec: for weights without a
        verdict.
        """
        remote = tuple(
            url for url in self.remote if parse(url).codec not in LOSSY
        )
        if self.disk_codec in LOSSY:
            return replace(
                self, remote=remote, disk_size=0, disk_path="", disk_codec="raw"
            )
        return replace(self, remote=remote)

    def peer_servers(self) -> tuple[RemoteSpec, ...]:
        """Return the specification of each entry of `peers`. Reads no file and asks no server."""
        return tuple(parse_peer(url) for url in self.peers)

    def lookup_server(self) -> tuple[RemoteSpec, ...]:
        """Return the specification of `lookup`; empty if it is not set. Reads no file and asks no
        server.
        """
        return (parse_lookup(self.lookup),) if self.lookup else ()

    def roots(self) -> dict[str, Path]:
        """Return the directory of each local tier that other processes see, by tier name. Changes
        nothing.
        """
        roots = {}
        if self.host_shared and self.host_size != 0:
            roots["host"] = Path(self.host_path)
        if self.disk_bytes:
            roots["disk"] = Path(self.disk_path)
        return roots


class ConfigOptions(TypedDict, total=False):
    """The options of a `Config` as keywords of `Cache`, so that an editor completes them."""

    chunk_tokens: int
    host_size: int | str
    host_path: str | os.PathLike[str]
    host_shared: bool
    disk_size: int | str
    disk_path: str | os.PathLike[str]
    disk_direct: bool | None
    disk_codec: DiskCodec
    remote: str | list[str] | tuple[str, ...]
    peers: str | list[str] | tuple[str, ...]
    lookup: str
    weights_epoch: int
    start_without: StartWithout
    durable: bool
    write_policy: WritePolicy
    selective_hits: int
    min_hit_tokens: int
    worth_it: bool
    deadline_seconds: float
    io_threads: int
    queue_chunks: int
    policy: str
    objective: Objective
    hints: HintMode
    record: str | os.PathLike[str]
    prompt_log: bool
    profile: bool
    otel: bool
    blend_recompute: float
    blend_min_tokens: int
    quality_verdicts: str | os.PathLike[str]
    unchecked: bool
    log_format: LogFormat


def option_names() -> list[str]:
    """Return the names of all options, in the order in which they are shown."""
    return [option.name for option in fields(Config)]


def defaults() -> dict[str, object]:
    """Return the default of every option on this machine."""
    return {
        option.name: option.default_factory()
        if option.default_factory is not MISSING
        else option.default
        for option in fields(Config)
    }
