"""Writes verdicts. Called by `pagoda quality`; `pagoda.base.quality_verdict` says what they are,
and reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagoda.base.errors import ConfigError
from pagoda.base.file_lock import lock_file
from pagoda.base.file_space import make_directory, opened
from pagoda.base.file_systems import nearest
from pagoda.base.quality_verdict import (
    FORMAT,
    VERSION,
    Result,
    Verdict,
    VerdictHead,
    read_verdict,
)
from pagoda.base.synced_files import written_beside

_LOCK_SECONDS = 10.0  # the lock is held only for moments


def write_verdict(
    path: str | Path,
    *,
    model: str,
    weights: Sequence[str],
    pagoda: str,
    results: Sequence[Result],
) -> Path:
    """Write a verdict, and return its file. Results of other settings that the file has for these
    weights are kept.

    The file appears whole or not at all. Processes that write one file at once wait for each other.

    Args:
        path: the file; or an existing directory, in which the file is named after the first of
            `weights`.
        model: the model's name, for people.
        weights: names of the weights, the first being `Namespace.weights` of the Transformers
            connector.
        pagoda: the release that measured.
        results: one for each setting; of two results for one setting, the first is written.

    Raises:
        ConfigError: the file exists and is not a verdict, or is of a newer version; it cannot be
            written; or a name is not text.
    """
    path = Path(path)
    if path.is_dir() or not path.suffix:
        path = path / Verdict.file_name(weights[0])
    names = list(dict.fromkeys(weights))
    check_names(names)
    results = [one for n, one in enumerate(results) if not _has(results[:n], one)]
    file = Path(os.path.realpath(path))
    try:
        make_directory(file.parent, 0o755)
        with _alone_in(file.parent):
            check_place(file)
            kept, others = _kept(file, names[0], results)
            text = model.encode(errors="replace").decode()
            verdict = Verdict(
                text,
                list(dict.fromkeys([*names, *others])),
                pagoda,
                [*kept, *results],
            )
            _replace(
                file, msgspec.structs.replace(verdict, checksum=verdict.digest())
            )
    except OSError as trouble:
        raise ConfigError(
            f"{path}: cannot be written: {trouble.strerror or trouble}"
        ) from None
    return path


def _kept(
    file: Path, name: str, results: Sequence[Result]
) -> tuple[list[Result], list[str]]:
    """Return the results of other settings that a file has for these weights, and its names of
    them.
    """
    try:
        old = read_verdict(file)
    except ConfigError:
        # it is absent, of an older version, or damaged: it is replaced
        return [], []
    if old.weights[:1] != [name]:
        return [], []
    return [one for one in old.results if not _has(results, one)], old.weights


def _has(results: Sequence[Result], one: Result) -> bool:
    """Return whether there is a result for the same setting: a reader refuses a file with two."""
    return any(one.setting.is_same(other.setting) for other in results)


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name of weights that a verdict cannot have. Changes nothing."""
    for name in names:
        if not name or name != name.encode(errors="replace").decode():
            raise ConfigError(
                f"{name!r}: is not a name of weights; write a text that is not empty, in UTF-8"
            )


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other processes from writing verdicts in a directory. OSError if another process writes
    for too long.
    """
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as lock:
        if lock_file(lock, _LOCK_SECONDS) is False:
            raise TimeoutError(
                0,
                "another process writes there and does not end: look for a stopped pagoda quality",
            )
        yield


def check_place(path: str | Path) -> None:
    """Raise ConfigError if `write_verdict` could not write there, before a long run. Changes
    nothing.
    """
    path = Path(path)
    try:
        is_there = path.exists()
        is_file = path.is_file()
    except OSError as trouble:
        # a name that is too long, or a directory that may not be searched
        raise ConfigError(
            f"{path}: cannot be written: {trouble.strerror}"
        ) from None
    if is_there and not is_file and not path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is not a file")
    if is_file:
        _check_verdict(path)
    # the file is replaced, so its directory must be writable
    place = nearest(Path(os.path.realpath(path)).parent if is_file else path)
    if path != place and not place.is_dir():
        raise ConfigError(
            f"{path}: cannot be written: {place} is not a directory"
        )
    if not os.access(place, os.W_OK):
        raise ConfigError(
            f"{path}: cannot be written: {place} is not yours to write"
        )


def _check_verdict(path: Path) -> None:
    """Raise ConfigError unless a file is a verdict (also one of an older version, or a damaged
    one).
    """
    try:
        head = msgspec.json.decode(path.read_bytes(), type=VerdictHead)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        head = VerdictHead()
    if head.format != FORMAT:
        raise ConfigError(
            f"{path}: is not a verdict of pagoda quality; name another file, so that it is not "
            "overwritten"
        )
    if head.version > VERSION:
        raise ConfigError(
            f"{path}: is of a newer version ({head.version}); name another file, so that its "
            "results are not lost"
        )


def _replace(path: Path, verdict: Verdict) -> None:
    """Write a file under another name first, so that a reader never sees a part of it. Raises
    OSError.
    """
    text = msgspec.json.format(
        msgspec.json.encode(verdict, order="sorted"), indent=2
    )
    with written_beside(path, text + b"\n") as fresh:
        fresh.chmod(0o644)  # engines of other users read it
        fresh.replace(path)
