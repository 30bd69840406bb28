"""Values of options: read from text, checked, and converted to one form; and their types as a JSON
schema.

Called by `Config` (checked) and by `pagoda.config.sources` (converted). Changes nothing; looks at
paths.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Literal, get_args

from pagoda.base.errors import ConfigError
from pagoda.config.did_you_mean import did_you_mean, name_of_another_cache
from pagoda.config.expand_home import expanded
from pagoda.config.remote_urls import parse_lookup, peers_of, split, tuple_of
from pagoda.config.sizes import AUTO, parse_size
from pagoda.policy import Objective

if TYPE_CHECKING:
    from pagoda.config import Config

WritePolicy = Literal["write_through", "selective", "write_back"]
HintMode = Literal["auto", "always", "never"]
LogFormat = Literal["plain", "json"]
StartWithout = Literal["none", "lower"]
# no zstd: a slot has a fixed size, so compression saves nothing there
DiskCodec = Literal["raw", "q8", "q4"]
Check = Callable[[str, object], object]


def checked(option: Field[object], value: object) -> object:
    """Return `value` in the form that `Config` has (sizes in bytes, paths absolute). Changes
    nothing.

    Raises:
        ConfigError: the value is invalid; the message names the option, the value and what to do.
    """
    try:
        check: Check | None = (
            option.metadata["check"] or _TYPES[str(option.type)][2]
        )
        assert check is not None  # an option whose type has no check names one
        return check(option.name, value)
    except ConfigError:
        raise
    except ValueError as trouble:
        raise ConfigError(f"{option.name} = {value!r}: {trouble}") from None


def converted(kind: str, value: object) -> object:
    """Return `value` converted to the type of that annotation. Changes nothing.

    Raises:
        ValueError: the value is not of this type and cannot be read as one.
    """
    return _TYPES[kind][0](value.decode() if isinstance(value, bytes) else value)


def properties(
    config: type[Config], preset: dict[str, object]
) -> dict[str, object]:
    """Return the JSON schema of each option, with its default on this machine. Changes nothing."""
    return {
        option.name: {
            **_TYPES[str(option.type)][1],
            "default": list(value)
            if isinstance(value := preset[option.name], tuple)
            else value,
            "description": option.metadata["help"],
            "title": option.name.replace("_", " ").title(),
        }
        for option in fields(config)
    }


# ---- checks, one function per kind of value; `Config` names a check if the type of the option has
# none


def _size(name: str, value: object) -> object:
    if not isinstance(value, int | str):
        raise ValueError(
            "a size is a number of bytes, text such as '64GiB', or 'auto'"
        )
    size = parse_size(value)
    if size == AUTO and name == "disk_size":
        raise ValueError(
            "how much of a disk may be filled is yours to say; write a size such as '100GiB'"
        )
    return size


def place(
    what: Literal["directory", "file", "path"], needed: bool = False
) -> Check:
    """Return the check of a path, which may be empty unless it is `needed`."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, str | os.PathLike):
            raise ValueError(f"a {what}, as text")
        text = str(os.fspath(value))
        if "\0" in text or (needed and not text):
            raise ValueError(f"not a path; name a {what}")
        path = os.path.abspath(expanded(text)) if text else ""
        if what == "file" and (os.path.isdir(path) or text.endswith(os.sep)):
            raise ValueError("is a directory; name a file")
        # one look: between two of them another process may remove or create the directory
        if what == "directory" and os.path.isfile(path):
            raise ValueError("is a file; name a directory")
        return path

    return check


def _flag(name: str, value: object) -> object:
    if value is None and name == "disk_direct":
        return None
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def count(least: int, most: int = 2**31 - 1) -> Check:
    """Return the check of a whole number."""

    def check(name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("a whole number is needed")
        if not least <= value <= most:
            raise ValueError(f"must be from {least} to {most}")
        return value

    return check


def seconds(name: str, value: object) -> object:
    """Return a time span."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not -math.inf < value < math.inf
    ):
        raise ValueError("a number of seconds is needed")
    if not 0 < value <= 3600:
        raise ValueError("must be more than 0 and at most 3600 seconds")
    return float(value)


def share(name: str, value: object) -> object:
    """Return a share from 0 to 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= 1
    ):
        raise ValueError("a share from 0 to 1 is needed")
    return float(value)


def one_of(
    known: Sequence[str], removed: Mapping[str, str] | None = None
) -> Check:
    """Return the check of a word. `removed`: words of earlier versions, and what to say of each."""

    def check(name: str, value: object) -> object:
        why = (removed or {}).get(str(value))
        if why is not None:
            raise ValueError(why)
        if value not in known:
            raise ValueError(
                f"must be one of {', '.join(known)}{did_you_mean(str(value), known)}"
            )
        return value

    return check


def remote(name: str, value: object) -> object:
    """Return the URLs of remote tiers."""
    return tuple_of(value)


def peers(name: str, value: object) -> object:
    """Return the URLs of neighbours."""
    return peers_of(value)


def lookup(name: str, value: object) -> object:
    """Return the URL of a directory of neighbours, or an empty text."""
    if not isinstance(value, str):
        raise ValueError("a URL such as 'redis://host:6379/0' is needed, as text")
    if value.strip():
        parse_lookup(value.strip())
    return value.strip()


# ---- conversions, one function per type

_FLAGS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}
_INTEGER = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0+)?\s*", re.ASCII)
_NO_INTEGER = "input should be a valid integer"
_NO_NUMBER = "input should be a valid number"
_NO_FLAG = "input should be a valid boolean"


def _integer(value: object) -> int:
    if isinstance(value, str):
        found = _INTEGER.fullmatch(value)
        if found is None:
            raise ValueError(
                f"{_NO_INTEGER}, unable to parse string as an integer"
            )
        return int(found[1])
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("input should be a finite number")
        if not value.is_integer():
            raise ValueError(
                f"{_NO_INTEGER}, got a number with a fractional part"
            )
        return int(value)
    if isinstance(value, int):
        return int(value)
    raise ValueError(_NO_INTEGER)


def _number(value: object) -> float:
    if isinstance(value, str):
        try:
            return float(value if value.isascii() else "")
        except ValueError:
            raise ValueError(
                f"{_NO_NUMBER}, unable to parse string as a number"
            ) from None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{_NO_NUMBER}, it is too large") from None
    raise ValueError(_NO_NUMBER)


def _flag_of(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        known = _FLAGS.get(str(value).lower())
        if known is None:
            raise ValueError(f"{_NO_FLAG}, unable to interpret input")
        return known
    if value in (0.0, 1.0):
        return bool(value)
    raise ValueError(_NO_FLAG)


def _flag_or_auto(value: object) -> bool | None:
    if value is None or (
        isinstance(value, str) and value.strip().lower() == "auto"
    ):
        return None
    return _flag_of(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("input should be a valid string")
    return value


def _size_of(value: object) -> int | str:
    return value if isinstance(value, str) else _integer(value)


def _word_of(words: Sequence[str]) -> Callable[[object], object]:
    def read(value: object) -> object:
        if value not in words:
            *known, last = map(repr, words)
            hint = name_of_another_cache(str(value), words)
            raise ValueError(
                f"input should be {', '.join(known)} or {last}{hint}"
            )
        return value

    return read


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return split(value)
    if not isinstance(value, tuple | list):
        raise ValueError("input should be a valid tuple")
    return tuple(map(_text, value))


_WORDS = (
    ("WritePolicy", WritePolicy),
    ("Objective", Objective),
    ("HintMode", HintMode),
    ("LogFormat", LogFormat),
    ("DiskCodec", DiskCodec),
    ("StartWithout", StartWithout),
)

# by type annotation: the function that reads a value, the JSON schema, and the check unless the
# option names another
_TYPES: dict[
    str, tuple[Callable[[object], object], dict[str, object], Check | None]
] = {
    "int": (_integer, {"type": "integer"}, None),
    "float": (_number, {"type": "number"}, None),
    "bool": (_flag_of, {"type": "boolean"}, _flag),
    "bool | None": (
        _flag_or_auto,
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        _flag,
    ),
    "str": (_text, {"type": "string"}, None),
    "int | str": (
        _size_of,
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        _size,
    ),
    **{
        name: (
            _word_of(get_args(words)),
            {"enum": list(get_args(words)), "type": "string"},
            one_of(get_args(words)),
        )
        for name, words in _WORDS
    },
    "tuple[str, ...]": (
        _texts,
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
            ]
        },
        None,
    ),
}
