"""The user's registry of tiers: which tiers were opened where, so that `pagoda` finds also those
that no file names.

`HostTier.open` and `DiskTier.open` write it, and a remote tier when its store has answered for the
first time; the commands read it. An entry is one small file that is replaced as a whole, so
processes need no lock. The registry is in `$XDG_STATE_HOME/pagoda/tiers`
(`~/.local/state`), which survives a reboot, or, if that cannot be written, in
`/dev/shm/pagoda-<uid>/.tiers`. It contains no secrets. An entry of a remote tier has the file that
named it: what that file no longer names is not contacted again (`pagoda_tools.cli.remote_stores`).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from pagoda.base.file_space import read_file, size_in_words
from pagoda.base.file_systems import nearest
from pagoda.base.log import guarded_logger
from pagoda.base.synced_files import remove_abandoned, write_synced
from pagoda.base.trusted_files import user_state_directory

log = guarded_logger("pagoda.tiers.register")

_MOST_ENTRIES = 1024
_MOST_ENTRY_BYTES = 64 << 10
# how often the time of an entry is updated when its tier is opened again
_FRESH_SECONDS = 86400.0
# how long a directory may be missing (a disk that is not mounted) before its entry is removed
_GONE_SECONDS = 30 * 86400.0


class Entry(NamedTuple):
    """A tier that was opened: "host", "disk" or "remote", and its directory or its URL with secrets
    masked.

    `file`: the configuration file that named a remote tier; "": it was named in another way (an
    argument, a variable);
    None: not known, because an earlier version wrote the entry.
    """

    tier: str
    place: str
    file: str | None = ""


def add(
    tier: str,
    place: str | os.PathLike[str],
    made_bytes: int = 0,
    *,
    file: str = "",
) -> None:
    """Add a tier that was opened. A failure is one log line: the tier works without its entry.

    `made_bytes`: the size of a store that was created just now. The log says once how much space it
    takes and how to free it. `file`: the configuration file that named a remote tier.
    """
    if made_bytes:
        log.info(
            (
                "made a %s tier of %s in %s: it stays there when this process ends; `pagoda remove "
                "%s` gives it back"
            ),
            tier,
            size_in_words(made_bytes),
            place,
            tier,
        )
    entry = Entry(
        tier,
        os.path.realpath(place) if tier != "remote" else os.fspath(place),
        file,
    )
    for directory in _directories():
        try:
            _write(directory, entry)
        except OSError:
            continue
        return
    log.warning(
        (
            "%s is not in the register of tiers (no writable %s): name it to `pagoda clear` and "
            "the "
            "other commands"
        ),
        entry.place,
        " or ".join(map(str, _directories())),
    )


def entries() -> list[Entry]:
    """Return the tiers that this user has opened, each once, without directories that are missing
    at present.
    """
    found: dict[tuple[str, str], Entry] = {}
    for directory in _directories():
        for file in _files(directory):
            entry = _read(file)
            if entry is None or (
                entry.tier != "remote" and not os.path.isdir(entry.place)
            ):
                if _age(file) > _GONE_SECONDS:
                    file.unlink(missing_ok=True)
            else:
                found.setdefault(entry[:2], entry)
    return list(found.values())


def remove(place: str) -> bool:
    """Remove the entries of a directory or a URL, as `entries` returns it; return whether there was
    one.
    """
    files = [file for directory in _directories() for file in _files(directory)]
    theirs = [
        file
        for file in files
        if (entry := _read(file)) is not None and entry.place == place
    ]
    for file in theirs:
        file.unlink(missing_ok=True)
    return bool(theirs)


def _directories() -> list[Path]:
    """Return where the registry may be, the best place first."""
    state = user_state_directory()
    memory = Path(f"/dev/shm/pagoda-{os.getuid()}", ".tiers")
    return [state / "tiers", memory] if state.is_absolute() else [memory]


def _write(directory: Path, entry: Entry) -> None:
    _make(directory)
    name = hashlib.sha256(os.fsencode("\0".join(entry[:2]))).hexdigest()[:32]
    file = directory / f"{name}.json"
    if _read(file) == entry:
        if _age(file) > _FRESH_SECONDS:
            os.utime(file)
        return
    remove_abandoned(directory, ".*-*")  # also those of other entries
    write_synced(file, json.dumps(entry._asdict()).encode())
    files = _files(directory)
    if len(files) > _MOST_ENTRIES:
        for needless in sorted(files, key=_use)[:-_MOST_ENTRIES]:
            needless.unlink(missing_ok=True)


def _make(directory: Path) -> None:
    """Create the directory and its parents, only below a directory that this user owns. Raises
    OSError.
    """
    above = nearest(directory)
    # With another user's HOME, root would leave directories there that the user cannot write. All
    # users may use /dev/shm.
    if above != Path("/dev/shm") and above.stat().st_uid != os.geteuid():
        raise PermissionError
    for path in reversed([directory, *directory.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(directory):
        raise PermissionError


def _is_own(directory: Path) -> bool:
    """Return whether only this user can write entries there: in /dev/shm another user may have made
    it first.
    """
    for path in (directory, directory.parent):
        status = path.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o022
        ):
            return False
    return True


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob("*.json")) if _is_own(directory) else []
    except OSError:
        return []


def _read(file: Path) -> Entry | None:
    try:
        fields = json.loads(read_file(file, _MOST_ENTRY_BYTES))
        entry = Entry(fields["tier"], fields["place"], fields.get("file"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # a power cut may leave an empty file
    is_whole = all(isinstance(field, str) for field in entry[:2]) and isinstance(
        entry.file, str | None
    )
    return entry if is_whole else None


def _use(file: Path) -> tuple[bool, float]:
    """Return the rank of an entry: entries of missing places are removed first, then the oldest
    entries.
    """
    entry = _read(file)
    return entry is not None and (
        entry.tier == "remote" or os.path.isdir(entry.place)
    ), -_age(file)


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return 0.0
