"""Builds a `Config` from all sources of options, and records the source of each value.

Keyword arguments override command-line options; these override PAGODA_... variables; these override
the TOML files; and these override the defaults. Which files are believed, and for which options, is
decided in `pagoda.base.trusted_files`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from pagoda.base.errors import ConfigError
from pagoda.base.log import FIELDS, guarded_logger
from pagoda.base.serve_token_file import TOKEN_VARIABLE
from pagoda.base.trusted_files import (
    BelievedFile,
    FileClass,
    Unbelieved,
    one_line,
    read_allowed,
    read_found,
    read_named,
    user_config_directory,
)
from pagoda.config import Config, defaults, option_names
from pagoda.config.did_you_mean import did_you_mean
from pagoda.config.expand_home import expanded
from pagoda.config.option_values import checked, converted, properties
from pagoda.config.remote_urls import redacted, tuple_of

log = guarded_logger("pagoda.cache")

PREFIX = "PAGODA_"
FILE_VARIABLE = "PAGODA_CONFIG"
# the token of `pagoda serve` is a secret and not an option
_NO_OPTIONS = {FILE_VARIABLE, TOKEN_VARIABLE}
DEFAULT = "default"
LEFT_OUT = "left_out"
"""The field of the log line about a file that is not read."""
_FILE = "file "  # before the path in an origin
_LISTED = " (pagoda config show lists them)"
# What Kubernetes sets in every pod for a service whose name begins with "pagoda"; no option's name
# may end like these.
_SERVICE_VARIABLE = re.compile(
    r"PAGODA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Loaded(NamedTuple):
    """A configuration and, by option, the source of its value ("default", "file /etc/...")."""

    config: Config
    origins: dict[str, str]

    def for_engine(self) -> Config:
        """Return the options of an engine: it starts without a tier that is down, unless a source
        says otherwise.
        """
        if self.origins["start_without"] == DEFAULT:
            return replace(self.config, start_without="lower")
        return self.config


class FilesRead(NamedTuple):
    """The configuration files that are read, the most important one first; and one that is not,
    with the reason.
    """

    files: tuple[BelievedFile, ...] = ()
    left_out: Unbelieved | None = None


_Given = dict[str, tuple[object, str]]
"""Options from one source: the value of each, and how errors and origins name the source."""

# for each remote tier, by its URL without secrets, the file that named it last in this process; "":
# no file did
_named_in: dict[str, str] = {}
_last_read = FilesRead()


def load(
    cli: Mapping[str, object] | None = None,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **kwargs: object,
) -> Loaded:
    """Return the configuration and the origin of each value. Reads the environment and a file.

    Args:
        cli: options of a command line by name; None: not given.
        file: the TOML file, and no other; by default the one PAGODA_CONFIG names, else
            ./pagoda.toml over ~/.config/pagoda/config.toml, as far as they exist.
        environ: instead of `os.environ`.

    Logs which files it read, and one line about a ./pagoda.toml that it did not read.

    Raises:
        ConfigError: an unknown option or variable (with the nearest known one), an invalid value, a
            file that others can change, or a ./pagoda.toml that sets more than such a file may.
    """
    environ = os.environ if environ is None else environ
    arguments = _arguments(kwargs)
    options = _options(
        {name: value for name, value in (cli or {}).items() if value is not None}
    )
    variables = _environment(environ)
    return _combined(files_of(file, environ), variables | options | arguments)


def load_file(file: str | os.PathLike[str], **kwargs: object) -> Loaded:
    """Return the options of one TOML file, and of nothing else but these keywords, which come
    first. See `load`.
    """
    arguments = _arguments(kwargs)
    return _combined(files_of(file, {}), arguments)


def load_environment(
    environ: Mapping[str, str] | None = None, **kwargs: object
) -> Loaded:
    """Return the options of the PAGODA_... variables and of the file that PAGODA_CONFIG names, if
    it is set, and of these keywords, which come first; no other file is read. See `load`.
    """
    environ = os.environ if environ is None else environ
    arguments = _arguments(kwargs)
    variables = _environment(environ)
    named = bool(environ.get(FILE_VARIABLE))
    read = files_of(None, environ) if named else FilesRead()
    return _combined(read, variables | arguments)


def _combined(read: FilesRead, above: _Given) -> Loaded:
    """Return the options of these files, and `above` them. Logs which files were read."""
    global _last_read
    _last_read = read
    _log_files(read)
    in_files: _Given = {}
    for one in reversed(read.files):
        in_files |= _in_file(one)
    given = in_files | above
    origins = {
        name: given[name][1] if name in given else DEFAULT
        for name in option_names()
    }
    named = [option for option in fields(Config) if option.name in given]
    values = {
        one.name: _converted(one.name, str(one.type), *given[one.name])
        for one in named
    }
    for option in named:
        try:
            checked(option, values[option.name])
        except ConfigError as trouble:
            raise ConfigError(f"{trouble} ({origins[option.name]})") from None
    config = Config(**values)  # type: ignore[arg-type]
    config.note_origins(origins)
    named_in = next(
        (one.path for one in read.files if _origin(one) == origins["remote"]), ""
    )
    _named_in.update(dict.fromkeys(map(redacted, config.remote), named_in))
    return Loaded(config, origins)


def schema() -> dict[str, object]:
    """Return the JSON schema of the TOML file. Changes nothing."""
    known = properties(Config, defaults())
    return {
        "additionalProperties": False,
        "properties": known,
        "title": "pagoda.toml",
        "type": "object",
    }


def _converted(name: str, kind: str, value: object, origin: str) -> object:
    """Return the value of an option as its type. Raises ConfigError."""
    try:
        return converted(kind, value)
    except ValueError as invalid:
        # the value may contain a password
        said = "" if name in ("remote", "peers", "lookup") else f" = {value!r}"
        raise ConfigError(f"{name}{said}: {invalid} ({origin})") from None


def _arguments(kwargs: Mapping[str, object]) -> _Given:
    _refuse_unknown(kwargs, "argument")
    values = {
        name: os.fspath(one) if isinstance(one, os.PathLike) else one
        for name, one in kwargs.items()
    }
    return {name: (value, f"argument {name}") for name, value in values.items()}


def _options(given: Mapping[str, object]) -> _Given:
    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    _refuse_unknown(given, "option", flag)
    return {
        name: (value, f"option {flag(name)}") for name, value in given.items()
    }


def _environment(environ: Mapping[str, str]) -> _Given:
    """Read the PAGODA_ variables. An empty variable counts as not set.

    The variables that Kubernetes sets for services are ignored.
    """

    known = {PREFIX + name.upper(): name for name in option_names()}
    for found in environ:
        if (
            not found.startswith(PREFIX)
            or found in _NO_OPTIONS
            or _SERVICE_VARIABLE.fullmatch(found)
        ):
            continue
        if found not in known:
            raise ConfigError(
                f"{found}: no such variable{did_you_mean(found, known)}{_LISTED}"
            )
    named = {name: found for found, name in known.items() if environ.get(found)}
    return {
        name: (environ[found], f"environment {found}")
        for name, found in named.items()
    }


def files_of(
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> FilesRead:
    """Return the files that `load` reads options from, with the same arguments. Changes nothing.

    Raises:
        ConfigError: a named file does not exist, or a file cannot be read or could have been
            written by others.
    """
    environ = os.environ if environ is None else environ
    named = file if file is not None else environ.get(FILE_VARIABLE) or None
    if named is not None:
        path = Path(expanded(named))
        if not os.path.isfile(path):
            where = "" if file is not None else f" (environment {FILE_VARIABLE})"
            what = "is a directory, not a" if path.is_dir() else "no such"
            raise ConfigError(
                f"{one_line(path)}: {what} configuration file{where}"
            )
        return FilesRead((_read(path, FileClass.NAMED),))
    found = read_found(environ)
    if isinstance(found, Unbelieved) and found.was_allowed:
        raise ConfigError(f"{found}; it was changed since it was allowed")
    own = user_config_directory(environ)
    theirs = None if own is None else own / "config.toml"
    files: list[BelievedFile] = []
    if isinstance(found, BelievedFile):
        files.append(found)
    # HOME may belong to another user
    if (
        theirs is not None
        and os.path.isfile(theirs)
        and os.access(theirs, os.R_OK)
    ):
        files.append(_read(theirs, FileClass.OWN))
    return FilesRead(
        tuple(files), found if isinstance(found, Unbelieved) else None
    )


def log_files_again() -> None:
    """Log once more what the last `load` of this process read: its lines came before the log had
    its form.
    """
    _log_files(_last_read)


def _log_files(read: FilesRead) -> None:
    """Log which files are read, each with its class, at INFO; and at WARNING one that is not."""
    for file in read.files:
        limits = (
            " in the working directory: sizes and limits only"
            if file.kind is FileClass.FOUND
            else ""
        )
        known = {"file": file.path, "class": str(file.kind)}
        log.info(
            "options are read from %s (%s%s)",
            one_line(file.path),
            file.kind,
            limits,
            extra={FIELDS: known},
        )
    if read.left_out is not None:
        log.warning(
            "%s", read.left_out, extra={FIELDS: {LEFT_OUT: read.left_out.path}}
        )


def file_of(server: str) -> str:
    """Return the file that named a remote tier, by its URL without secrets; "" if no file did in
    this process.
    """
    return _named_in.get(server, "")


def still_names(file: str, server: str) -> bool:
    """Return whether a file is still believed, and still names this remote tier, by its URL without
    secrets.

    For the register of tiers: what a file named that is gone, or that was edited, is not contacted.
    Reads the file.
    """
    try:
        try:
            found: BelievedFile | None = read_named(file)
        except ConfigError:  # others can change it, and perhaps have not
            found = read_allowed(file)
        if found is None:
            return False
        urls = tuple_of(tomllib.loads(found.content.decode()).get("remote", ()))
    except (OSError, ValueError, RecursionError):
        return False
    return server in map(redacted, urls)


def options_in(file: BelievedFile) -> dict[str, object]:
    """Return the options that a file sets, converted and checked, with secrets. Changes nothing.

    Raises:
        ConfigError: it is not TOML, or an option is unknown or invalid, or the file may not set it.
    """
    given = _in_file(file)
    kinds = {option.name: option for option in fields(Config)}
    values = {}
    for name, (value, origin) in given.items():
        values[name] = checked(
            kinds[name], _converted(name, str(kinds[name].type), value, origin)
        )
    return values


def _read(path: Path, kind: FileClass) -> BelievedFile:
    try:
        return read_named(path, kind)
    except OSError as trouble:
        raise ConfigError(
            f"{one_line(path)}: cannot be read: {trouble.strerror}"
        ) from None


def _in_file(file: BelievedFile) -> _Given:
    where = one_line(file.path)
    try:
        values = tomllib.loads(file.content.decode())
    except (ValueError, RecursionError) as trouble:
        # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"{where}: cannot be read as TOML: {trouble}") from None
    _refuse_unknown(values, f"{where}:")
    if refusal := file.refusal(list(values)):
        raise ConfigError(refusal)
    return {name: (value, _origin(file)) for name, value in values.items()}


def _origin(file: BelievedFile) -> str:
    return f"{_FILE}{one_line(file.path)}"


def _refuse_unknown(
    values: Mapping[str, object], place: str, spell: Callable[[str], str] = str
) -> None:
    known = [spell(name) for name in option_names()]
    for name in map(spell, values):
        if name not in known:
            raise ConfigError(
                f"{place} {one_line(name)}: no such option{did_you_mean(name, known)}{_LISTED}"
            )
