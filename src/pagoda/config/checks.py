"""What each option of a `Config` may be: a small function a kind of value. Changes nothing; looks at paths."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Literal, get_args

from pagoda import policy as policies
from pagoda.config.paths import expanded
from pagoda.config.remotes import tuple_of
from pagoda.config.sizes import AUTO, parse_size
from pagoda.config.suggest import did_you_mean
from pagoda.errors import ConfigError

WritePolicy = Literal["write_through", "selective", "write_back"]
Check = Callable[[str, object], object]


def checked(name: str, value: object) -> object:
    """Return `value` as the option `name` keeps it (sizes in bytes, paths absolute). Changes nothing.

    Raises:
        ConfigError: it cannot stand; the message names the option, the value and what to do.
    """
    try:
        return _CHECKS[name](name, value)
    except ConfigError:
        raise
    except ValueError as trouble:
        raise ConfigError(f"{name} = {value!r}: {trouble}") from None


def _size(name: str, value: object) -> object:
    if not isinstance(value, int | str):
        raise ValueError("a size is a number of bytes, text such as '64GiB', or 'auto'")
    size = parse_size(value)
    if size == AUTO and name == "disk_size":
        raise ValueError("how much of a disk may be filled is yours to say; write a size such as '100GiB'")
    return size


def _path(name: str, value: object) -> object:
    if not isinstance(value, str | os.PathLike):
        raise ValueError("a directory, as text")
    text = os.fspath(value)
    if not text and name == "disk_path":
        return ""
    if not text or "\0" in str(text):
        raise ValueError("not a path; name a directory")
    path = os.path.abspath(expanded(str(text)))
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError("is a file; name a directory")
    return path


def _file(name: str, value: object) -> object:
    if not isinstance(value, str | os.PathLike):
        raise ValueError("a file, as text")
    text = str(os.fspath(value))
    if "\0" in text:
        raise ValueError("not a path; name a file")
    path = os.path.abspath(expanded(text)) if text else ""
    if os.path.isdir(path) or text.endswith(os.sep):
        raise ValueError("is a directory; name a file")
    return path


def _flag(name: str, value: object) -> object:
    if value is None and name == "disk_direct":
        return None
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def _count(least: int, most: int) -> Check:
    def check(name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("a whole number is needed")
        if not least <= value <= most:
            raise ValueError(f"must be from {least} to {most}")
        return value

    return check


def _seconds(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number of seconds is needed")
    if not 0 < value <= 3600:
        raise ValueError("must be more than 0 and at most 3600 seconds")
    return float(value)


def _write_policy(name: str, value: object) -> object:
    known = get_args(WritePolicy)
    if value not in known:
        raise ValueError(f"must be one of {', '.join(known)}{did_you_mean(str(value), known)}")
    return value


def _policy(name: str, value: object) -> object:
    if value not in policies.NAMES:
        raise ValueError(
            f"must be one of {', '.join(policies.NAMES)}{did_you_mean(str(value), policies.NAMES)}"
        )
    return value


def _remote(name: str, value: object) -> object:
    return tuple_of(value)


_CHECKS: dict[str, Check] = {
    "chunk_tokens": _count(1, 2**20),
    "host_size": _size,
    "host_path": _path,
    "host_shared": _flag,
    "disk_size": _size,
    "disk_path": _path,
    "disk_direct": _flag,
    "durable": _flag,
    "write_policy": _write_policy,
    "selective_hits": _count(1, 2**31 - 1),
    "min_hit_tokens": _count(0, 2**31 - 1),
    "worth_it": _flag,
    "deadline_seconds": _seconds,
    "io_threads": _count(1, 64),
    "queue_chunks": _count(1, 2**20),
    "policy": _policy,
    "record": _file,
    "profile": _flag,
    "remote": _remote,
    "weights_epoch": _count(0, 2**31 - 1),
}
