"""Builds a `Config` from all sources of options, and records the source of each value.

Keyword arguments override command-line options; these override PAGODA_... variables; these override the TOML file; and
that overrides the defaults.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from pagoda.config import Config, defaults, option_names
from pagoda.config.did_you_mean import did_you_mean
from pagoda.config.expand_home import expanded
from pagoda.config.option_values import checked, converted, properties
from pagoda.errors import ConfigError
from pagoda.serve_token_file import TOKEN_VARIABLE

PREFIX = "PAGODA_"
FILE_VARIABLE = "PAGODA_CONFIG"
_NO_OPTIONS = {FILE_VARIABLE, TOKEN_VARIABLE}  # the token of `pagoda serve` is a secret and not an option
DEFAULT = "default"
_LISTED = " (pagoda config show lists them)"
# What Kubernetes sets in every pod for a service whose name begins with "pagoda"; no option's name may end like these.
_SERVICE_VARIABLE = re.compile(
    r"PAGODA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Loaded(NamedTuple):
    """A configuration and, by option, the source of its value ("default", "file /etc/...")."""

    config: Config
    origins: dict[str, str]

    def for_engine(self) -> Config:
        """Return the options of an engine: it starts without a tier that is down, unless a source says otherwise."""
        if self.origins["start_without"] == DEFAULT:
            return replace(self.config, start_without="lower")
        return self.config


_Given = dict[str, tuple[object, str]]
"""Options from one source: the value of each, and how errors and origins name the source."""


def load(
    cli: Mapping[str, object] | None = None,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **kwargs: object,
) -> Loaded:
    """Return the configuration and the origin of each value. Reads the environment and a file.

    Args:
        cli: options of a command line by name; None: not given.
        file: the TOML file; by default the one PAGODA_CONFIG names, else ./pagoda.toml, else
            ~/.config/pagoda/config.toml, else none.
        environ: instead of `os.environ`.

    Raises:
        ConfigError: an unknown option or variable (with the nearest known one), or an invalid value.
    """
    environ = os.environ if environ is None else environ
    arguments = _arguments(kwargs)
    options = _options({name: value for name, value in (cli or {}).items() if value is not None})
    variables = _environment(environ)
    given = {**_file(_find_file(file, environ)), **variables, **options, **arguments}
    origins = {name: given[name][1] if name in given else DEFAULT for name in option_names()}
    named = [option for option in fields(Config) if option.name in given]
    values = {one.name: _converted(one.name, str(one.type), *given[one.name]) for one in named}
    for option in named:
        try:
            checked(option, values[option.name])
        except ConfigError as trouble:
            raise ConfigError(f"{trouble} ({origins[option.name]})") from None
    return Loaded(Config(**values), origins)  # type: ignore[arg-type]


def schema() -> dict[str, object]:
    """Return the JSON schema of the TOML file. Changes nothing."""
    known = properties(Config, defaults())
    return {"additionalProperties": False, "properties": known, "title": "pagoda.toml", "type": "object"}


def _converted(name: str, kind: str, value: object, origin: str) -> object:
    """Return the value of an option as its type. Raises ConfigError."""
    try:
        return converted(kind, value)
    except ValueError as invalid:
        # the value may contain a password
        shown = "" if name in ("remote", "peers", "lookup") else f" = {value!r}"
        raise ConfigError(f"{name}{shown}: {invalid} ({origin})") from None


def _arguments(kwargs: Mapping[str, object]) -> _Given:
    _refuse_unknown(kwargs, "argument")
    values = {name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in kwargs.items()}
    return {name: (value, f"argument {name}") for name, value in values.items()}


def _options(given: Mapping[str, object]) -> _Given:
    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    _refuse_unknown(given, "option", flag)
    return {name: (value, f"option {flag(name)}") for name, value in given.items()}


def _environment(environ: Mapping[str, str]) -> _Given:
    """Read the PAGODA_ variables. An empty variable counts as not set.

    The variables that Kubernetes sets for services are ignored.
    """

    known = {PREFIX + name.upper(): name for name in option_names()}
    for found in environ:
        if not found.startswith(PREFIX) or found in _NO_OPTIONS or _SERVICE_VARIABLE.fullmatch(found):
            continue
        if found not in known:
            raise ConfigError(f"{found}: no such variable{did_you_mean(found, known)}{_LISTED}")
    named = {name: found for found, name in known.items() if environ.get(found)}
    return {name: (environ[found], f"environment {found}") for name, found in named.items()}


def _find_file(file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """Return the TOML file to read: a named file must exist, the usual ones need not."""
    named = file if file is not None else environ.get(FILE_VARIABLE) or None
    if named is not None:
        path = Path(expanded(named))
        if not os.path.isfile(path):
            where = "" if file is not None else f" (environment {FILE_VARIABLE})"
            what = "is a directory, not a" if path.is_dir() else "no such"
            raise ConfigError(f"{path}: {what} configuration file{where}")
        return path
    # this stays "~" if the system does not know the user
    home = environ.get("HOME") or os.path.expanduser("~")
    config_home = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    if os.path.isfile("pagoda.toml"):
        return Path("pagoda.toml")
    theirs = Path(config_home, "pagoda", "config.toml")
    # HOME may belong to another user
    return theirs if os.path.isfile(theirs) and os.access(theirs, os.R_OK) else None


def _file(path: Path | None) -> _Given:
    if path is None:
        return {}
    try:
        with path.open("rb") as stream:
            values = tomllib.load(stream)
    except OSError as trouble:
        raise ConfigError(f"{path}: cannot be read: {trouble.strerror}") from None
    except (ValueError, RecursionError) as trouble:  # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"{path}: cannot be read as TOML: {trouble}") from None
    where = path.absolute()
    _refuse_unknown(values, f"{where}:")
    return {name: (value, f"file {where}") for name, value in values.items()}


def _refuse_unknown(values: Mapping[str, object], place: str, spell: Callable[[str], str] = str) -> None:
    known = [spell(name) for name in option_names()]
    for name in map(spell, values):
        if name not in known:
            raise ConfigError(f"{place} {name}: no such option{did_you_mean(name, known)}{_LISTED}")
