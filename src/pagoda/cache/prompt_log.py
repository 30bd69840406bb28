"""The prompts that were stored lately, with their token ids, so that `pagoda explain` can name the token that differs.

Keys are hashes: they tell which chunk of a prompt is not stored, not which token of it is another. So two files beside
the ledger of the host tier, `prompts` and `prompts-old`, hold prompts with their keys; when the first is full, it
takes the place of the second. `StoreCall` and `HostSlots` append, each prompt by one write; `nearest_prompt` reads.
Nothing else depends on them: a prompt that is lost, torn or long gone costs a part of an explanation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from pagoda.clock import Clock
from pagoda.fork import reset_in_child
from pagoda.keys import KEY_BYTES, TokenIds, as_token_ids
from pagoda.ledger.store_state import OLD_PROMPTS, PROMPTS
from pagoda.metrics import RateLimitedLog, Reason, guarded_logger

__all__ = ["LoggedPrompt", "PromptLog", "logged_prompts"]

log = guarded_logger("pagoda.cache")

_HEAD = Struct("<8sQ")  # magic, checksum of all that follows
_BODY = Struct("<IIId32s")  # tokens of a chunk, keys, tokens, time (Unix), root of the namespace
_MAGIC = b"PAGODAP1"
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20  # of each of the two files
_open_private = partial(os.open, mode=0o600)
_REMEMBERED = 1024  # prompts of this process that are not appended again while they are so recent


class LoggedPrompt(NamedTuple):
    """A prompt that was stored: `tokens` has also those after the last whole chunk, which have no key."""

    namespace: bytes
    chunk_tokens: int
    keys: list[bytes]
    tokens: NDArray[np.int32]
    stored_at: float  # Unix time


class PromptLog:
    """Appends prompts to the log of one store. Thread-safe and fork-safe: it keeps no file open."""

    def __init__(self, directory: Path, tokens: int, clock: Clock | None = None) -> None:
        """Append to the log in `directory`; each of its files has room for about `tokens` tokens."""
        self._path, self._old = directory / PROMPTS, directory / OLD_PROMPTS
        self._most_bytes = min(max(4 * tokens, _LEAST_BYTES), _MOST_BYTES)
        self._recent: dict[bytes, None] = {}  # last keys; changed by single calls of built-in functions
        self._inode = 0  # of the file that has them
        self._lines = RateLimitedLog(clock or Clock())
        reset_in_child(self)

    def reset(self) -> None:
        """Create the lock of the log lines."""
        self._lines.reset()

    def append(
        self, namespace: bytes, chunk_tokens: int, keys: Sequence[bytes], tokens: TokenIds | None
    ) -> None:
        """Append a prompt that was stored. `keys`: of its chunks from the first one on.

        Not if it was a moment ago, or had then more than four fifths of its chunks: one that is stored in parts is
        logged a few times, not with each part. Never raises: a prompt that cannot be written is one log line in a
        while, and no prompt longer than the log is.
        """
        if tokens is None or not keys or 4 * len(tokens) > self._most_bytes:
            return
        try:
            inode = os.stat(self._path).st_ino
        except OSError:
            inode = 0
        if inode != self._inode:  # cleared, or full: prompts in use come into the new file, too
            self._recent.clear()
        if not self._recent.keys().isdisjoint(keys[4 * len(keys) // 5 :]):
            return
        ids = as_token_ids(tokens)
        body = _BODY.pack(chunk_tokens, len(keys), len(ids), time.time(), namespace)
        body = b"".join((body, *keys, ids.tobytes()))
        try:
            self._write(_HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body)
        except OSError as error:
            self._lines.warn(log, Reason.IO_ERROR, f"a prompt was not logged, for explanations only: {error}")
        else:
            self._recent[keys[-1]] = None

    def _write(self, record: bytes) -> None:
        # a file object, made by built-in functions alone: it closes itself if a signal handler raises in between
        with FileIO(self._path, "a", opener=_open_private) as file:
            written = file.write(record)
            status = os.fstat(file.fileno())
            if written < len(record):
                raise OSError(errno.ENOSPC, "no space for a whole prompt", str(self._path))
            if status.st_size >= self._most_bytes:
                self._begin_anew(file.fileno(), status.st_ino)
        self._inode = status.st_ino
        if len(self._recent) >= _REMEMBERED:
            self._recent.clear()

    def _begin_anew(self, fd: int, inode: int) -> None:
        """Let the full file take the place of the old one, unless another process does or did."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until `fd` is closed
            if os.stat(self._path).st_ino == inode:
                os.replace(self._path, self._old)
        except (BlockingIOError, FileNotFoundError):
            pass


def logged_prompts(directory: Path) -> Iterator[LoggedPrompt]:
    """Read the log of a store, the oldest prompt first; what is torn is left out. Changes nothing. OSError."""
    for name in (OLD_PROMPTS, PROMPTS):
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:
            continue
        at = content.find(_MAGIC)
        while at >= 0:
            prompt, end = _parsed(content, at)
            if prompt is not None:
                yield prompt
            at = content.find(_MAGIC, end)


def _parsed(content: bytes, at: int) -> tuple[LoggedPrompt | None, int]:
    """Return the prompt at a place of the log, None if it is not whole; and where to look for the next one."""
    begin = at + _HEAD.size
    if begin + _BODY.size > len(content):
        return None, at + 1
    size, keys, tokens, stored_at, namespace = _BODY.unpack_from(content, begin)
    first = begin + _BODY.size
    last = first + KEY_BYTES * keys
    end = last + 4 * tokens
    checksum = _HEAD.unpack_from(content, at)[1]
    if end > len(content) or xxhash.xxh3_64_intdigest(memoryview(content)[begin:end]) != checksum:
        return None, at + 1
    named = [content[place : place + KEY_BYTES] for place in range(first, last, KEY_BYTES)]
    ids = np.frombuffer(content, "<i4", tokens, last)
    return LoggedPrompt(namespace, size, named, ids, stored_at), end
