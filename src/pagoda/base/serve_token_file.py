"""The file with the token of `pagoda serve`: the server makes it at its first start, this user's
clients send it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.base.file_space import opened
from pagoda.base.trusted_files import user_state_directory

TOKEN_VARIABLE = "PAGODA_SERVE_TOKEN"
_LONGEST_BYTES = 4096


def default_token_file() -> Path:
    """Return the path of this user's token file."""
    return user_state_directory() / "serve-token"


def is_own(status: os.stat_result) -> bool:
    """Return whether a file is of this user or of root, and nobody else can write it. Pure."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def own_token() -> str:
    """Return this user's token, from the variable or else from the file; empty if there is none.
    Changes nothing.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None:
        return given.strip()
    try:
        with opened(default_token_file(), os.O_RDONLY) as fd:
            if not is_own(os.fstat(fd)):
                return ""
            return os.read(fd, _LONGEST_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
