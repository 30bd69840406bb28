"""Directories in which a stranger may have left a pagoda.toml, and a listener that notes what is
sent.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.groups import others_can_write

OTHER_USER = 65534
OWN_TOKEN = "VICTIMS-SERVE-TOKEN-0123456789abcdef"
OWN_SECRET = "PRIVATE-KEY-MATERIAL-42"


class Listener:
    """A server that notes every byte and every connection, answers nothing and hangs up."""

    def __init__(self) -> None:
        self.received = b""
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.settimeout(5)
                try:
                    self.received += connection.recv(65536)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    try:
        yield listener
    finally:
        listener.close()


class Victim:
    """A home with a token and a secret, and a working directory in which a file was left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.directory = root / "above" / "directory"
        self.file = self.directory / "pagoda.toml"
        self.secret = self.home / "id_secret"
        self.kept = self.home / "kept"
        token = self.home / ".local" / "state" / "pagoda" / "serve-token"
        for path in (token.parent, self.directory, root / "elsewhere"):
            path.mkdir(parents=True)
        for path, text in (
            (token, OWN_TOKEN),
            (self.secret, OWN_SECRET),
            (self.kept, "one line without an end"),
        ):
            path.write_text(text)
            path.chmod(0o600)

    def lines(self, port: int) -> dict[str, str]:
        """Return what a stranger may write: each line would send, write or believe something."""
        return {
            "peers, own token": f'peers = ["http://127.0.0.1:{port}"]',
            "remote, own token": f'remote = "http://127.0.0.1:{port}?server=pagoda"',
            "remote, password_file": f'remote = "redis://127.0.0.1:{port}?password_file={self.secret}"',
            "remote, password_file ~": f'remote = "redis://127.0.0.1:{port}?password_file=~/id_secret"',
            "lookup, password_file": f'lookup = "redis://127.0.0.1:{port}?password_file={self.secret}"',
            "remote without a secret": f'remote = "redis://127.0.0.1:{port}/0"',
            "remote by WebDAV": f'remote = "http://127.0.0.1:{port}/dav/"',
            "record": f'record = "{self.kept}"',
            "host_path": f'host_path = "{self.root}/elsewhere/host"',
            "disk_path": f'disk_path = "{self.root}/elsewhere/disk"\ndisk_size = "4MiB"',
            "unchecked": "unchecked = true",
            "verdicts": f'quality_verdicts = "{self.directory}/verdicts"',
            "codec": 'disk_codec = "q4"',
            "several": f'chunk_tokens = 4\nunchecked = true\nremote = "redis://127.0.0.1:{port}/0"',
        }

    def outside(self) -> dict[str, object]:
        """Return all that is outside of the hostile directory: paths, modes, times and contents."""
        found: dict[str, object] = {}
        for top in (self.home, self.root / "elsewhere"):
            for path in sorted(top.rglob("*")):
                status = path.lstat()
                content = path.read_bytes() if path.is_file() else b""
                found[str(path)] = (
                    status.st_mode,
                    status.st_uid,
                    status.st_mtime_ns,
                    content,
                )
        return found

    @property
    def variables(self) -> dict[str, str]:
        home = str(self.home)
        return {"HOME": home, "XDG_CONFIG_HOME": f"{home}/.config"}


def _own(victim: Victim) -> None:
    """A clone of the user's own: its files are his, its author is a stranger."""


def _others_file(victim: Victim) -> None:
    os.chown(victim.file, OTHER_USER, OTHER_USER)


def _others_directory(victim: Victim) -> None:
    os.chown(victim.directory, OTHER_USER, OTHER_USER)


def _others_above(victim: Victim) -> None:
    os.chown(victim.directory.parent, OTHER_USER, OTHER_USER)


def _sticky(victim: Victim) -> None:
    victim.directory.chmod(0o1777)


def _group(victim: Victim) -> None:
    victim.directory.chmod(0o775)


def _group_file(victim: Victim) -> None:
    victim.file.chmod(0o664)


def _world_file(victim: Victim) -> None:
    victim.file.chmod(0o646)


def _group_above(victim: Victim) -> None:
    victim.directory.parent.chmod(0o775)


def _linked(victim: Victim) -> None:
    target = victim.root / "elsewhere" / "evil.toml"
    victim.file.rename(target)
    victim.file.symlink_to(target)


def _linked_up(victim: Victim) -> None:
    victim.file.rename(victim.directory.parent / "evil.toml")
    victim.file.symlink_to("../evil.toml")


def _large(victim: Victim) -> None:
    victim.file.write_text(victim.file.read_text() + "#" * (64 << 10))


OWN_CLONE = "own clone"
# where only the group may write, which may be this user alone
_GROUP_PLACES = ("group-writable", "group-writable file", "group-writable above")
PLACES: dict[str, Callable[[Victim], None]] = {
    OWN_CLONE: _own,
    "sticky": _sticky,
    "group-writable": _group,
    "group-writable file": _group_file,
    "world-writable file": _world_file,
    "group-writable above": _group_above,
    "linked": _linked,
    "linked up": _linked_up,
    "too large": _large,
}
if os.geteuid() == 0:  # only root can make files of another user
    PLACES |= {
        "another user's file": _others_file,
        "another user's directory": _others_directory,
        "another user's above": _others_above,
    }


def is_own(place: str) -> bool:
    """Return whether only this user can have written a file in that way."""
    if place in _GROUP_PLACES:
        return not others_can_write(0o664)
    return place == OWN_CLONE
