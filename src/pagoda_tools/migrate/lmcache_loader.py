"""Reads a configuration as LMCache 0.5.6 does: variables over the file, its types, its two levels
of names.

`load` is called by `pagoda config import`; `lmcache.translate` takes the fields that it returns.
The names, types and levels are in `lmcache_table.json`, which `tools/lmcache_table.py` makes from
an installed LMCache.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagoda.base.errors import ConfigError

VARIABLES = "LMCACHE_"


class FieldTable(msgspec.Struct, frozen=True):
    """What one version of LMCache reads."""

    version: str
    fields: dict[str, tuple[str, object]]  # by name: type and default
    renamed: dict[str, str]  # older names that it still reads
    extra: list[str]  # names that it reads below extra_config
    variables: list[str]  # variables that are no fields


class LoadedFields(NamedTuple):
    """The fields that are set, with the values that LMCache ends with, and what a reader may not
    expect of them.
    """

    fields: dict[str, object]
    remarks: dict[str, str]


class _Unreadable(Exception):
    """LMCache cannot convert a value: it logs that and continues without it."""


@cache
def table() -> FieldTable:
    """Return the table of LMCache's fields."""
    text = Path(__file__).with_name("lmcache_table.json").read_bytes()
    return msgspec.json.decode(text, type=FieldTable)


def load(
    file: Mapping[str, object] | None, variables: Mapping[str, str]
) -> LoadedFields:
    """Return what LMCache ends with for a file (its fields; None: there is none) and LMCACHE_
    variables.

    Changes nothing. Fields that LMCache does not know are kept as they are: older versions read
    them.
    """
    found: dict[str, object] = {}
    remarks: dict[str, str] = {}
    for name, value in (file or {}).items():
        present = table().renamed.get(name, name)
        found[present] = _from_file(present, value, remarks)
    for name, text in variables.items():
        _override(found, name, text, remarks, has_file=file is not None)
    return LoadedFields(found, remarks)


def _from_file(name: str, value: object, remarks: dict[str, str]) -> object:
    kind = table().fields.get(name, ("", None))[0]
    if value is None or not kind:
        return value
    try:
        read = _CONVERTERS[kind](value)
    except _Unreadable:
        raise ConfigError(
            f"{name}: {value!r} is not a value that LMCache can read"
        ) from None
    _remark(name, kind, value, read, remarks)
    return read


def _override(
    found: dict[str, object],
    variable: str,
    text: str,
    remarks: dict[str, str],
    has_file: bool,
) -> None:
    """Set what one variable says, over the file's value."""
    name = variable.removeprefix(VARIABLES).lower()
    name = table().renamed.get(name, name)
    kind = table().fields.get(name, ("", None))[0]
    if not kind:
        found[name] = text
        return
    plain = _unquoted(text)
    try:
        read = _CONVERTERS[kind](plain)
    except _Unreadable:
        # an empty variable of a number: LMCache logs that it cannot be read
        if not text.strip():
            return
        raise ConfigError(
            f"{name}: {text!r} ({variable}) is not a value that LMCache can read"
        ) from None
    if has_file and name in found and found[name] != read:
        remarks[name] = f"{variable} overrides the file, as in LMCache"
    found[name] = read
    _remark(name, kind, plain, read, remarks)


def _remark(
    name: str, kind: str, given: object, read: object, remarks: dict[str, str]
) -> None:
    """Say where LMCache reads a word as false that people mean as true."""
    if (
        kind == "bool"
        and read is False
        and str(given).strip().lower() in ("yes", "on", "y", "t")
    ):
        remarks[name] = (
            f"LMCache reads {given!r} as false; write true if you mean that"
        )


def _unquoted(text: str) -> str:
    """Return the text of a variable without quotes around it, as files for --env-file have them."""
    stripped = text.strip()
    if (
        len(stripped) < 2
        or stripped[0] != stripped[-1]
        or stripped[0] not in "'\""
    ):
        return stripped
    try:
        value = ast.literal_eval(stripped)
    except (ValueError, SyntaxError):
        return stripped[1:-1]
    return value if isinstance(value, str) else stripped


# ---- types


def _whole(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (ValueError, TypeError):
        raise _Unreadable from None


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise _Unreadable from None


def _flag(value: object) -> bool:
    return (
        value
        if isinstance(value, bool)
        else str(value).strip().lower() in ("true", "1")
    )


def _parts(value: object) -> list[object]:
    if isinstance(value, list):
        return list(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value]


def _wholes(value: object) -> list[int]:
    return [_whole(part) for part in _parts(value)]


def _numbers(value: object) -> list[float]:
    return [_number(part) for part in _parts(value)]


def _disks(value: object) -> str | None:
    paths = [part.strip() for part in str(value).split(",") if part.strip()]
    return ",".join(path.removeprefix("file://") for path in paths) or None


def _mapping(value: object) -> object:
    if isinstance(value, dict) or not value:
        return value or None
    try:
        return json.loads(str(value))
    except ValueError:
        raise _Unreadable from None


def _mode(value: object) -> str:
    word = str(value).strip().lower().replace("-", "_")
    if word in ("prefix_strict", "prefixstrict"):
        return "prefix_strict"
    if word in ("skip_missing_chunks", "skipmissingchunks", "legacy"):
        return "skip_missing_chunks"
    raise _Unreadable


def _one_or_more(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    return [value] if value else []


_CONVERTERS: Mapping[str, Callable[[object], object]] = {
    "int": _whole,
    "float": _number,
    "str": str,
    "bool": _flag,
    "ints": _wholes,
    "floats": _numbers,
    "strs": _parts,
    "disks": _disks,
    "mapping": _mapping,
    "mode": _mode,
    "one or more": _one_or_more,
}
