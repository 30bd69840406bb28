"""A leading ~ in the paths that people write."""

from __future__ import annotations

import os

from pagoda.base.errors import ConfigError


def expanded(path: str | os.PathLike[str]) -> str:
    """Return `path` with a leading ~ replaced by the home directory. Changes nothing.

    Raises:
        ConfigError: it begins with ~ and no home directory is known (no HOME, a user without an
            account).
    """
    text = os.fspath(path)
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise ConfigError(
            f"{text}: the home directory of {found.split(os.sep)[0]} is not known; write the "
            "whole path"
        )
    return found
