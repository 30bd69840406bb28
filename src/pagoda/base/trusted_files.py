"""Decides which files are believed, and for what: configuration files, and the verdicts of `pagoda
quality`.

Who may write a file that is believed decides where prompts go, which files are written, and which
checks are done.

    class     which file                                          what it may set
    named     `--config`, PAGODA_CONFIG, an argument              every option
    own       config.toml in the user's configuration directory   every option
    allowed   ./pagoda.toml as it was at `pagoda config allow`    every option
    found     any other ./pagoda.toml                             FOUND_OPTIONS

A file of the first two classes is refused if others than this user and root can change it. A file
that is only found may have come with a clone, or lie in a directory that others can write: it is
read only if nobody else can have put it there, and even then its author may be a stranger, so it
sets nothing that names a place or switches a check off. `pagoda config allow` notes the path and a
digest of the content, so that an edit ends the permission.

What is checked is what is read: a file is opened once, checked by its descriptor, and read through
it.

Called by `pagoda.config.sources`, `pagoda config` and `pagoda.base.quality_verdict`; calls the
operating system only.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pagoda.base.errors import ConfigError
from pagoda.base.file_space import opened

FOUND_NAME = "pagoda.toml"
FOUND_OPTIONS = frozenset(
    {
        "chunk_tokens",
        "deadline_seconds",
        "disk_size",
        "host_size",
        "io_threads",
        "log_format",
        "min_hit_tokens",
        "policy",
        "queue_chunks",
        "selective_hits",
        "write_policy",
    }
)
"""What a file that is only found may set. Everything else is refused, an option that is new here
too.
"""
MOST_BYTES = 64 << 10
"""The size of a file that is found or allowed, at most."""

# the directory of the notes of `pagoda config allow`, in the user's configuration directory
_NOTES = "allowed"
_MOST_NOTE_BYTES = 16 << 10
_MOST_NAMED = 8  # options in one message
# a pipe without a writer must not block (`opened` adds the same flags)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ACL = "system.posix_acl_access"
_OUTSIDE = "it is a link out of its directory"


class FileClass(StrEnum):
    """How a configuration file came to be read; see the module."""

    NAMED = "named"
    OWN = "own"
    ALLOWED = "allowed"
    FOUND = "found"


class BelievedFile(NamedTuple):
    """A file and the bytes of it that were checked. `was_allowed`: an earlier content of it was
    allowed.
    """

    path: str
    kind: FileClass
    content: bytes
    was_allowed: bool = False

    def refusal(self, options: list[str]) -> str:
        """Return why the file may not set these options, with the remedies, in one line; "" if it
        may.
        """
        refused = [
            one_line(name) for name in options if name not in FOUND_OPTIONS
        ]
        if self.kind is not FileClass.FOUND or not refused:
            return ""
        if len(refused) > _MOST_NAMED:
            refused[_MOST_NAMED:] = [f"and {len(refused) - _MOST_NAMED} more"]
        why = "is only found in the working directory, and such a file sets sizes and limits only"
        if self.was_allowed:
            why = "was changed since it was allowed"
        return (
            f"{one_line(self.path)}: {', '.join(refused)}: refused, because this file {why}; "
            f"{remedies(self.path)}"
        )


class Unbelieved(NamedTuple):
    """A file in the working directory that is not read. `was_allowed`: an earlier content of it was
    allowed.
    """

    path: str
    why: str
    was_allowed: bool = False

    def __str__(self) -> str:
        return f"{one_line(self.path)} is not read: {self.why}; {remedies(self.path)}"


def remedies(path: str) -> str:
    """Return the two ways to have a file believed that is only found. Pure."""
    word = one_line(shlex.quote(path))
    return (
        f"look at it, then allow it with: pagoda config allow {word}, or name a file that only "
        "you can write "
        "(--config FILE or PAGODA_CONFIG, or ~/.config/pagoda/config.toml)"
    )


def one_line(text: str | os.PathLike[str]) -> str:
    """Return a path or a name that a stranger may have chosen, as it can be printed in one line of
    moderate length.
    """
    plain = os.fspath(text)
    if not plain.isprintable():
        plain = ascii(plain)[1:-1]
    return plain if len(plain) <= 4096 else f"{plain[:100]}..."


def user_config_directory(
    environ: Mapping[str, str] | None = None,
) -> Path | None:
    """Return this user's directory of PagodaKV's configuration; None if no home is known. It need
    not exist.

    A relative XDG_CONFIG_HOME or HOME counts as not set: it would name something in the working
    directory.

    Args:
        environ: instead of `os.environ`.
    """
    environ = os.environ if environ is None else environ
    home = environ.get("HOME") or os.path.expanduser(
        "~"
    )  # this stays "~" if the system does not know the user
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(home, ".config")
    return Path(base, "pagoda") if os.path.isabs(base) else None


def user_state_directory() -> Path:
    """Return where this user's programs keep what they note down; relative if the system knows no
    home directory.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state, "pagoda")


def writable_by_others(
    status: os.stat_result, fd: int, any_owner: bool = False
) -> str:
    """Return why others than this user and root can change a file or directory, in a few words; ""
    if they cannot.

    The group of an ordinary user that has his name and no other members is no other: many systems
    give each user one.

    Args:
        status: what `os.fstat` says of it.
        fd: its descriptor.
        any_owner: its owner is believed, whoever that is.
    """
    if not any_owner and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    writers = stat.S_IWGRP | stat.S_IWOTH
    if (
        status.st_mode & writers == stat.S_IWGRP
        and _is_private(status.st_gid)
        and not _has_acl(fd)
    ):
        return ""
    if status.st_mode & writers:
        return f"others can write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _is_private(gid: int) -> bool:
    """Return whether a group is this user's own: its name is the user's, and it has no other
    members.
    """
    uid = os.geteuid()
    if uid == 0:
        # root's group is shared in some places: containers run their users in it
        return False
    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(gid)
    except (KeyError, OSError):
        return False
    return (
        user.pw_gid == gid
        and group.gr_name == user.pw_name
        and not set(group.gr_mem) - {user.pw_name}
    )


def _has_acl(fd: int) -> bool:
    """Return whether other users may have rights that the mode shows as the group's."""
    try:
        os.getxattr(f"/proc/self/fd/{fd}", _ACL)
    except OSError as trouble:
        return trouble.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


# ---- files that somebody named


def read_named(
    path: str | os.PathLike[str], kind: FileClass = FileClass.NAMED
) -> BelievedFile:
    """Return a file that the user named, or the user's own. Links are followed. Changes nothing.

    Raises:
        ConfigError: others can change it, or it is not a regular file; with the remedy.
        OSError: it cannot be read.
    """
    place = os.path.abspath(path)
    with opened(place, _READ, any_kind=True) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"{one_line(place)}: is not a regular file: name a configuration file"
            )
        if why := writable_by_others(status, fd):
            raise ConfigError(
                f"{one_line(place)} is refused, because others could have written it: {why}; "
                "after a look at it: "
                f"{_own_it(place, status)}, or name a copy that only you can write (--config "
                "FILE or PAGODA_CONFIG)"
            )
        return BelievedFile(place, kind, _content(fd))


def _own_it(path: str, status: os.stat_result) -> str:
    word = one_line(shlex.quote(path))
    if status.st_uid in (0, os.geteuid()):
        return f"chmod go-w {word}"
    return f"as root: chown {os.geteuid()} {word} && chmod go-w {word}"


def _content(fd: int, most_bytes: int | None = None) -> bytes:
    """Return the content of an open file; with `most_bytes`, one byte more at most."""
    with open(fd, "rb", closefd=False) as file:
        return file.read() if most_bytes is None else file.read(most_bytes + 1)


# ---- the file in the working directory


def read_found(
    environ: Mapping[str, str] | None = None,
) -> BelievedFile | Unbelieved | None:
    """Return ./pagoda.toml, or why it is not read; None if there is none. Changes nothing.

    Args:
        environ: instead of `os.environ`, for the user's configuration directory.
    """
    try:
        path = os.path.join(os.getcwd(), FOUND_NAME)
        top = os.open(".", _DIRECTORY)
    except OSError:
        return None  # the working directory is gone
    try:
        allowed = read_allowed(path, environ)
        if allowed is not None:
            return allowed
        return _checked(top, path, _allowed_digest(path, environ) is not None)
    except FileNotFoundError:
        return None
    finally:
        os.close(top)


def _any_content(path: str) -> bytes:
    """Return the content of a file of any owner. Raises ConfigError, OSError."""
    with opened(path, _READ, any_kind=True) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{one_line(path)}: is not a regular file")
        content = _content(fd, MOST_BYTES)
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{one_line(path)}: has more than {MOST_BYTES:,} bytes; name it instead (--config FILE)"
        )
    return content


def _checked(top: int, path: str, was_allowed: bool) -> BelievedFile | Unbelieved:
    """Read the file in the directory `top`, if nobody but this user and root can have put it there.

    Raises FileNotFoundError: there is none.
    """
    try:
        fd = _opened_inside(top)
    except FileNotFoundError:
        raise
    except OSError as trouble:
        why = (
            _OUTSIDE
            if trouble.errno == errno.ELOOP
            else f"it cannot be read: {trouble.strerror}"
        )
        return Unbelieved(path, why, was_allowed)
    try:
        status = os.fstat(fd)
        why = _why_not(top, path, status, fd)
        content = b"" if why else _content(fd, MOST_BYTES)
        if len(content) > MOST_BYTES:
            why = f"it has more than {MOST_BYTES:,} bytes"
    finally:
        os.close(fd)
    if why:
        return Unbelieved(path, why, was_allowed)
    return BelievedFile(path, FileClass.FOUND, content, was_allowed)


def _why_not(top: int, path: str, status: os.stat_result, fd: int) -> str:
    """Return why the file in the directory `top` is not believed; "" if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_size > MOST_BYTES:
        return f"it has {status.st_size:,} bytes, more than {MOST_BYTES:,}"
    return writable_by_others(status, fd) or _why_not_there(top, path)


def _why_not_there(top: int, path: str) -> str:
    """Return why others could have put a file into the directory `top`; "" if they cannot.

    The directories above are those that the kernel finds, one by one: no name is looked up twice.
    """
    where = Path(path).parent
    if why := writable_by_others(os.fstat(top), top):
        return f"its directory is not yours alone: {why}"
    here = os.dup(top)
    try:
        while True:
            status = os.fstat(here)
            above = os.open("..", _DIRECTORY, dir_fd=here)
            os.close(here)
            here = above
            found = os.fstat(above)
            if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                return ""
            where = where.parent
            is_shared = found.st_mode & stat.S_ISVTX and found.st_uid in (
                0,
                os.geteuid(),
            )
            if not is_shared and (why := writable_by_others(found, above)):
                return f"{one_line(where)}, above it, is not yours alone: {why}"
    except OSError as trouble:
        return f"the directories above it cannot be checked: {trouble.strerror}"
    finally:
        os.close(here)


def _opened_inside(top: int) -> int:
    """Open the file in the directory `top`; a link is followed if it leads to a place below `top`.

    Raises OSError, with ELOOP if the link leads out.
    """
    try:
        return os.open(FOUND_NAME, _READ | os.O_NOFOLLOW, dir_fd=top)
    except OSError as trouble:
        if trouble.errno != errno.ELOOP:
            raise
    target = os.readlink(FOUND_NAME, dir_fd=top)
    *directories, name = target.split("/")
    if os.path.isabs(target) or ".." in (*directories, name):
        raise OSError(errno.ELOOP, _OUTSIDE)
    here = os.dup(top)
    try:
        for directory in filter(None, directories):
            below = os.open(directory, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
            if why := writable_by_others(os.fstat(here), here):
                raise OSError(
                    errno.EACCES,
                    f"a directory on the way is not yours alone: {why}",
                )
        return os.open(name, _READ | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


# ---- what the user has allowed


def allow(file: BelievedFile, environ: Mapping[str, str] | None = None) -> None:
    """Note that a file is believed as long as it has this content, for `read_found`. Replaces an
    earlier note.

    Raises:
        ConfigError: there is no place for the note that only this user can write.
    """
    import tempfile  # rarely needed, and slow to import

    directory = _notes(environ)
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=directory, prefix=".", delete=False
        ) as note:
            note.write(
                json.dumps(
                    {"file": one_line(file.path), "sha256": _digest(file.content)}
                ).encode()
            )
        os.replace(note.name, directory / _note_name(file.path))
    except OSError as trouble:
        raise ConfigError(
            f"{one_line(directory)}: cannot be written: {trouble.strerror}"
        ) from None
    if _allowed_digest(file.path, environ) is None:
        raise ConfigError(
            f"{one_line(directory)}: others can write there: chmod -R go-w "
            f"{one_line(directory.parent)}"
        )


def revoke(path: str, environ: Mapping[str, str] | None = None) -> bool:
    """Remove the note of `allow`; return whether there was one. ConfigError: it cannot be
    removed.
    """
    note = _notes(environ) / _note_name(path)
    try:
        note.unlink()
    except FileNotFoundError:
        return False
    except OSError as trouble:
        raise ConfigError(
            f"{one_line(note)}: cannot be removed: {trouble.strerror}"
        ) from None
    return True


def read_to_allow(path: str | os.PathLike[str]) -> BelievedFile:
    """Return a ./pagoda.toml of any directory and owner, for `allow`. Changes nothing.

    Raises:
        ConfigError: it cannot be read, or is no file that is ever found.
    """
    place = place_of(path)
    try:
        return BelievedFile(place, FileClass.ALLOWED, _any_content(place))
    except OSError as trouble:
        raise ConfigError(
            f"{one_line(place)}: cannot be read: {trouble.strerror}"
        ) from None


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the path of a ./pagoda.toml as `read_found` has it. ConfigError: no file of that name
    is ever found.
    """
    directory, name = os.path.split(os.path.abspath(path))
    if name != FOUND_NAME:
        raise ConfigError(
            f"{one_line(path)}: only a file called {FOUND_NAME} is found by itself; name this "
            "one with --config"
        )
    # the working directory has no links in its name
    return os.path.join(os.path.realpath(directory), name)


def read_allowed(
    path: str, environ: Mapping[str, str] | None = None
) -> BelievedFile | None:
    """Return a file if `pagoda config allow` was run for it with the content that it has now.
    Changes nothing.
    """
    allowed = _allowed_digest(path, environ)
    if allowed is None:
        return None
    try:
        content = _any_content(path)
    except (OSError, ConfigError):
        return None
    return (
        BelievedFile(path, FileClass.ALLOWED, content)
        if _digest(content) == allowed
        else None
    )


def _notes(environ: Mapping[str, str] | None) -> Path:
    own = user_config_directory(environ)
    if own is None:
        raise ConfigError(
            "no home directory is known: set HOME or XDG_CONFIG_HOME"
        )
    return own / _NOTES


def _note_name(path: str) -> str:
    return f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _allowed_digest(path: str, environ: Mapping[str, str] | None) -> str | None:
    """Return the digest of the content that was allowed for a path; None without a note that only
    this user writes.
    """
    try:
        directory = _notes(environ)
        for place in (directory, directory.parent):
            with opened(place, _READ, any_kind=True) as fd:
                if writable_by_others(os.fstat(fd), fd):
                    return None
        with opened(directory / _note_name(path), _READ, any_kind=True) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or writable_by_others(status, fd):
                return None
            found = json.loads(_content(fd, _MOST_NOTE_BYTES))["sha256"]
    except (OSError, ValueError, LookupError, TypeError, ConfigError):
        return None
    return found if isinstance(found, str) else None
