"""Writes verdicts. Called by `pagoda quality`; `pagoda.quality_verdict` says what they are, and reads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagoda.errors import ConfigError
from pagoda.quality_verdict import FORMAT, Result, Verdict, read_verdict

__all__ = ["check_place", "write_verdict"]


class _Format(msgspec.Struct):
    format: str = ""


def write_verdict(
    path: str | Path, *, model: str, weights: Sequence[str], pagoda: str, results: Sequence[Result]
) -> Path:
    """Write a verdict, and return its file. Results of other settings that the file has for these weights are kept.

    The file appears whole or not at all. Do not call it for one file in two processes at once: one would be lost.

    Args:
        path: the file; or a directory (as is), in which the file is named after the first of `weights`.
        model: the model's name, for people.
        weights: names of the weights, the first being `Namespace.weights` of the Transformers connector.
        pagoda: the release that measured.
        results: one for each setting.

    Raises:
        ConfigError: the file is there and is something else than a verdict, or it cannot be written.
    """
    path = Path(path)
    if path.is_dir() or not path.suffix:
        path = path / Verdict.file_name(weights[0])
    kept: list[Result] = []
    names = list(dict.fromkeys(weights))
    check_place(path)
    if path.exists():
        try:
            old = read_verdict(path)
        except ConfigError:  # of another version, or damaged: it is replaced
            pass
        else:
            if old.weights[:1] == names[:1]:
                kept = [
                    one
                    for one in old.results
                    if not any(one.setting.is_same(result.setting) for result in results)
                ]
                names = list(dict.fromkeys([*names, *old.weights]))
    verdict = Verdict(model, names, pagoda, [*kept, *results])
    _replace(path, msgspec.structs.replace(verdict, checksum=verdict.digest()))
    return path


def check_place(path: str | Path) -> None:
    """Raise ConfigError if `write_verdict` could not write there, before anything long is done. Changes nothing."""
    path = Path(path)
    try:
        is_there, is_file = path.exists(), path.is_file()
    except OSError as trouble:  # a name that is too long, or a directory that may not be searched
        raise ConfigError(f"{path}: cannot be written: {trouble.strerror}") from None
    if is_there and not is_file and not path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is no file")
    if is_file and not _is_verdict(path):
        raise ConfigError(
            f"{path}: is no verdict of pagoda quality; name another file, so that it is not overwritten"
        )
    place = path
    while not place.exists():
        place = place.parent
    if path != place and not place.is_dir():
        raise ConfigError(f"{path}: cannot be written: {place} is no directory")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: {place} is not yours to write")


def _is_verdict(path: Path) -> bool:
    """Return whether a file is a verdict, be it of another version or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Format).format == FORMAT
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _replace(path: Path, verdict: Verdict) -> None:
    """Write a file under another name first, so that a reader never sees a part of it."""
    text = msgspec.json.format(msgspec.json.encode(verdict, order="sorted"), indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, other = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text + b"\n")
            os.chmod(other, 0o644)  # other users' engines read it
            os.replace(other, path)
        except BaseException:
            os.unlink(other)
            raise
    except OSError as trouble:
        raise ConfigError(f"{path}: cannot be written: {trouble.strerror or trouble}") from None
