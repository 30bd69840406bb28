"""The exceptions of PagodaKV, for wrong use and for stores that cannot be opened; and what an
OSError says of a file.

    PagodaError
     ├── StoreError            a store cannot be opened or used; the message says what to do
     │    ├── NoRoomError      too little memory or disk space for the requested store
     │    ├── MissingLibraryError  an extra is not installed; the message has the pip line
     │    └── LedgerCorrupt    `Ledger.check` found numbers that contradict each other
     ├── ClosedError           a call on an object that was closed
     └── ConfigError           a bad setting (also a ValueError)

Other wrong use (a bad mask, a bad token id, a wrong layout) is a plain ValueError. A failure at run
time (full, busy, corrupt, late) is never an exception: it is a miss or a drop with a
`pagoda.base.metrics.Reason`.
"""

from __future__ import annotations

import errno
import os

__all__ = [
    "ClosedError",
    "ConfigError",
    "LedgerCorrupt",
    "MissingLibraryError",
    "NoRoomError",
    "PagodaError",
    "StoreError",
]


_OF_LIMITS = {
    errno.EFBIG: "raise this process's limit of the size of a file (`ulimit -f`) or ask for a "
    "smaller size (host_size, disk_size)",
    errno.EMFILE: "let this process open more of them (`ulimit -n`)",
    errno.ENOMEM: "raise this process's limit of address space (`ulimit -v`) or ask for a smaller "
    "size (host_size, disk_size)",
}


class PagodaError(Exception):
    """The base class of all exceptions that PagodaKV itself raises."""


class StoreError(PagodaError):
    """A store cannot be opened or used. The message says what to do."""


class NoRoomError(StoreError):
    """There is too little memory or disk space (or the limit is too low) for the requested
    store.
    """


class MissingLibraryError(StoreError):
    """A store needs a library that is not installed. The message has the line for pip."""


class LedgerCorrupt(StoreError):
    """The tables of a ledger contradict each other. The message has the numbers."""


class ClosedError(PagodaError):
    """The object was closed; open it again."""


class ConfigError(PagodaError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


def is_gone(error: OSError) -> bool:
    """Whether an error says that a name is no file's any more.

    Any other error leaves the question open: the process has too many open files, or the disk does
    not answer. What is there must not be taken for lost then.
    """
    return error.errno in (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ESTALE,
        errno.ENXIO,  # of `open_file`: a pipe or a device has the name
    )


def is_shortage(error: OSError) -> bool:
    """Whether an error says that this process, or the machine, has no files or memory left: it is
    not the file's.
    """
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def remedy_of_limit(error: Exception, otherwise: str) -> str:
    """Return what to do about an error that a limit of this process explains; `otherwise` for any
    other.
    """
    # also an error of LMDB, which has no number
    for number, remedy in _OF_LIMITS.items():
        if os.strerror(number) in str(error):
            return remedy
    return otherwise
