"""The prompts that were stored lately, with their token ids, so that `pagoda explain` can name the
token that differs.

Keys are hashes: they show which chunk of a prompt is not stored, but not which token differs. So
two files beside the ledger of the host tier, `prompts` and `prompts-old`, hold prompts with their
keys; when the first is full, it replaces the second. `StoreCall` and `HostSlots` append prompts,
and a thread writes them a moment later, each by one write; `cli/nearest_prompt` reads them. Nothing
else depends on the files: a prompt that is lost or torn costs a part of an explanation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
import xxhash

from pagoda.base.clock import Clock
from pagoda.base.file_space import read_file, require_regular
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.signal_safe_threads import DeferredCall
from pagoda.keys import KEY_BYTES, Int32s
from pagoda.ledger import Ledger
from pagoda.ledger.store_state import OLD_PROMPTS, PROMPTS

log = guarded_logger("pagoda.cache")

_HEAD = Struct("<8sQ")  # magic, checksum of everything after it
# tokens per chunk, number of keys, number of tokens, time (Unix), root of the namespace
_BODY = Struct("<IIId32s")
_MAGIC = b"PAGODAP1"
# size of each of the two files
_LEAST_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_open_private = partial(os.open, mode=0o600)
_PAUSE_SECONDS = 0.1  # between two rounds of the thread
# the last prompts of this process, which are not written again
_REMEMBERED = 1024


class LoggedPrompt(NamedTuple):
    """A prompt that was stored. `tokens` includes those after the last whole chunk, which have no
    key.
    """

    namespace: bytes
    chunk_tokens: int
    keys: Sequence[bytes]
    tokens: Int32s
    stored_at: float  # Unix time


class PromptLog:
    """Appends prompts to the log of one store. Thread-safe; it keeps no file open."""

    def __init__(self, ledger: Ledger, chunk_tokens: int, clock: Clock) -> None:
        """Append to the log beside `ledger`; each of its files has room for about as many tokens as
        the ledger.
        """
        self._ledger = ledger
        self._path = ledger.directory / PROMPTS
        self._most_bytes = min(
            max(4 * ledger.slots * chunk_tokens, _LEAST_BYTES), _MOST_BYTES
        )
        self._clock = clock
        self._lines = RateLimitedLog(clock)
        # the last key of each; changed by single calls of built-in functions
        self._recent: dict[bytes, None] = {}
        self._inode = 0  # the file that has them
        self._writer = DeferredCall(self.flush, "pagoda-prompts", _PAUSE_SECONDS)
        # a signal handler may call at any line
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._waiting: dict[bytes, LoggedPrompt] = {}  # by last key
        self._waiting_bytes = 0

    def append(
        self,
        namespace: bytes,
        chunk_tokens: int,
        keys: Sequence[bytes],
        tokens: Int32s,
    ) -> None:
        """Note a stored prompt, to be appended a moment later. `keys` are those of its chunks from
        the first one on.

        Skips a prompt that was logged recently, or that had more than four fifths of its chunks
        then (so a prompt that is stored in parts is logged a few times, not with each part). Skips
        a prompt that is longer than the log. Never raises.
        """
        size = KEY_BYTES * len(keys) + tokens.nbytes
        latest = keys[4 * len(keys) // 5 :]
        known = not self._waiting.keys().isdisjoint(latest) or self._is_written(
            latest
        )
        if not keys or known or size > self._most_bytes:
            return
        prompt = LoggedPrompt(
            namespace, chunk_tokens, keys, tokens.copy(), self._clock.time()
        )
        with self._lock:
            self._waiting[keys[-1]] = prompt
            self._waiting_bytes += size
            self._writer.request()
        if self._waiting_bytes > self._most_bytes:  # more than the log can hold
            self.flush()

    def flush(self) -> None:
        """Write the waiting prompts. Never raises: a failure is a rate-limited log line."""
        with self._writing:
            with self._lock:
                prompts = [*self._waiting.values()]
                self._waiting = {}
                self._waiting_bytes = 0
            try:
                while prompts:
                    self._write(prompts)
            except OSError as error:
                why = f"{len(prompts)} prompts were not logged, for explanations only: {error}"
                self._lines.warn(log, Reason.IO_ERROR, why)

    def close(self) -> None:
        """Write the waiting prompts, and end the thread. Idempotent."""
        self._writer.close(0.0)
        self.flush()

    def _is_written(self, keys: Sequence[bytes]) -> bool:
        """Whether a prompt that ends with one of these keys is in the present file (each new file
        gets it again).
        """
        try:
            return (
                not self._recent.keys().isdisjoint(keys)
                and os.stat(self._path).st_ino == self._inode
            )
        except OSError:  # the file was cleared, or was full
            return False

    def _write(self, prompts: list[LoggedPrompt]) -> None:
        """Write prompts and remove them from the list, until the file is full. Raises OSError."""
        # a file object, made by built-in functions alone: it closes itself if a signal handler
        # raises in between; it reads too, because then the opening of a pipe does not wait
        with FileIO(self._path, "a+", opener=_open_private) as file:
            require_regular(file.fileno(), self._path)
            status = os.fstat(file.fileno())
            if status.st_size > 2 * self._most_bytes:
                raise OSError(
                    errno.EFBIG, "it cannot be renamed", str(self._path)
                )
            if status.st_ino != self._inode or len(self._recent) >= _REMEMBERED:
                self._recent.clear()
                self._inode = status.st_ino
            for namespace, size, keys, tokens, stored_at in [*prompts]:
                # a clear removes first the chunks, then the file; this check comes after the
                # opening, so no cleared prompt stays
                gone = self._ledger.explain_miss(keys[-1]).reason
                if gone is not Reason.CLEARED and not self._is_written(
                    keys[4 * len(keys) // 5 :]
                ):
                    head = _BODY.pack(
                        size, len(keys), len(tokens), stored_at, namespace
                    )
                    body = b"".join((head, *keys, tokens.data))
                    record = (
                        _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body
                    )
                    if file.write(record) < len(record):
                        raise OSError(
                            errno.ENOSPC,
                            "no space for a whole prompt",
                            str(self._path),
                        )
                    self._recent[keys[-1]] = None
                del prompts[0]
                if os.fstat(file.fileno()).st_size >= self._most_bytes:
                    # another process is renaming it, or has renamed it
                    with suppress(BlockingIOError, FileNotFoundError):
                        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                        if os.stat(self._path).st_ino == status.st_ino:
                            os.replace(
                                self._path, self._path.with_name(OLD_PROMPTS)
                            )
                    break


def logged_prompts(directory: Path) -> Iterator[LoggedPrompt]:
    """Read the log of a store, the oldest prompt first, without torn ones. Changes nothing. Raises
    OSError.
    """
    for name in (OLD_PROMPTS, PROMPTS):
        with suppress(FileNotFoundError):
            # a prompt may end behind the limit
            yield from _prompts_in(read_file(directory / name, 4 * _MOST_BYTES))


def _prompts_in(content: bytes) -> Iterator[LoggedPrompt]:
    at = content.find(_MAGIC)
    while 0 <= at <= len(content) - _HEAD.size - _BODY.size:
        begin = at + _HEAD.size
        size, keys, tokens, stored_at, namespace = _BODY.unpack_from(
            content, begin
        )
        first = begin + _BODY.size
        last = first + KEY_BYTES * keys
        end = last + 4 * tokens
        # shorter if the file was cut: then the checksum differs
        whole = memoryview(content)[begin:end]
        if xxhash.xxh3_64_intdigest(whole) == _HEAD.unpack_from(content, at)[1]:
            named = [
                content[place : place + KEY_BYTES]
                for place in range(first, last, KEY_BYTES)
            ]
            yield LoggedPrompt(
                namespace,
                size,
                named,
                np.frombuffer(content, "<i4", tokens, last),
                stored_at,
            )
            at = end - 1
        at = content.find(_MAGIC, at + 1)
