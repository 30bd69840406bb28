"""The life of a cache in which one system call fails: the n-th of its name, with one error.

A life opens a cache with host memory and a disk, stores, flushes, looks up and retrieves from each
tier, closes it and opens it twice more. Whatever fails: no wrong byte, no exception but StoreError
when it is opened, no hang; and the next process finds stores that are whole, and uses them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagoda.base.errors import StoreError
from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV
from pagoda_tools.cli import main
from testbed.patience import Patience
from tests.children import child, wait
from tests.seccomp import Listener, ask_about

CHUNKS = 6
CHUNK_TOKENS = 16
LAYOUT = KVLayout.opaque(CHUNK_TOKENS, 8192, "failing calls")
PROMPTS = tuple(
    list(range(start, start + CHUNKS * CHUNK_TOKENS)) for start in (0, 1000, 2000)
)
WHOLE = CHUNKS * CHUNK_TOKENS
SECONDS = 20.0  # of a life, which takes half a second
# what a call may fail with, on machines that exist
ERRORS = {
    "read": ("EIO",),
    "lseek": ("EIO",),
    "mmap": ("ENOMEM",),
    "munmap": ("ENOMEM",),
    "ioctl": ("ENOTTY",),
    "pread64": ("EIO", "EINTR"),
    "pwrite64": ("EIO", "ENOSPC", "EDQUOT"),
    "mremap": ("ENOMEM",),
    "madvise": ("EINVAL", "ENOMEM"),
    "flock": ("ENOLCK",),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO",),
    "ftruncate": ("EIO",),
    "statfs": ("ENOSYS",),
    "fstatfs": ("ENOSYS",),
    "mlock": ("ENOMEM", "EPERM"),
    "getdents64": ("EIO",),
    "openat": ("EMFILE", "EIO", "EACCES"),
    "unlinkat": ("EIO",),
    "unlink": ("EIO",),
    "clone3": ("EAGAIN",),
    "getrandom": ("ENOSYS",),
    "rename": ("EIO",),
    "renameat": ("EIO",),
    "mkdir": ("ENOSPC",),
    "mkdirat": ("ENOSPC",),
    "rmdir": ("EIO",),
    "link": ("EPERM",),
    "linkat": ("EPERM",),
    "newfstatat": ("EIO",),
    "fcntl": ("ENOLCK", "EIO"),
    "fallocate": ("ENOSPC", "EOPNOTSUPP", "EINTR"),
    "preadv2": ("EIO", "EAGAIN", "EOPNOTSUPP"),
    "pwritev2": ("EIO", "ENOSPC", "EOPNOTSUPP"),
}


class Outcome(NamedTuple):
    """`wrong`: what must not be. `calls`: how often the call was made. `failed`: if one did."""

    wrong: list[str]
    calls: int
    failed: bool


def payload(prompt: list[int]) -> np.ndarray:
    """The chunks of a prompt, as they were stored."""
    rows = np.arange(1, CHUNKS + 1, dtype=np.uint8)[:, None] + prompt[0] // 100
    return np.repeat(rows.astype(np.uint8), 8192, axis=1)


class Life:
    """One cache after the other on the same two tiers; `wrong` has what must not be."""

    def __init__(self, host: Path, disk: Path) -> None:
        self._options = {
            "host_path": str(host),
            "host_size": "1MiB",
            "disk_path": str(disk),
            "disk_size": "2MiB",
        }
        self.wrong: list[str] = []

    def opened(self) -> Cache | None:
        """Return a cache; None, and that is wrong, if the second attempt is refused too."""
        for _ in "ab":
            with contextlib.suppress(StoreError):
                return self._call("open", self._open)
        self.wrong.append("it cannot be opened again")
        return None

    def _open(self) -> Cache:
        return Cache(
            namespace=Namespace("model"),
            layout=LAYOUT,
            deadline_seconds=10.0,
            **self._options,  # type: ignore[arg-type]
        )

    def _call(self, name: str, work: Callable[[], object]) -> object:
        try:
            return work()
        except StoreError:
            if name == "open":
                raise
            self.wrong.append(f"{name} raised a StoreError")
        except Exception as trouble:  # noqa: BLE001
            self.wrong.append(f"{name} raised {trouble!r}")
        return None

    def store(self, cache: Cache, prompt: list[int]) -> None:
        """Store a prompt, and wait until it is written back."""
        kv = BlockKV(payload(prompt), LAYOUT)
        self._call("store", lambda: cache.store(prompt, kv))
        self._call("flush", cache.flush)

    def retrieve(self, cache: Cache, prompt: list[int], *tiers: str) -> int:
        """Return how many tokens were served, whose bytes must be right."""
        blank = np.zeros_like(payload(prompt))
        hit = self._call(
            "retrieve",
            lambda: cache.retrieve(
                prompt, BlockKV(blank, LAYOUT), tiers=tiers or None
            ),
        )
        served = getattr(hit, "num_tokens", 0)
        rows = served // CHUNK_TOKENS
        if not np.array_equal(blank[:rows], payload(prompt)[:rows]):
            self.wrong.append(f"wrong bytes of {tiers or 'all tiers'}")
        return int(served)

    def live(self) -> None:
        """Store, look up and retrieve with three caches."""
        first, second, third = PROMPTS
        if (cache := self.opened()) is None:
            return
        self.store(cache, first)
        self.retrieve(cache, first)
        self._call("lookup", lambda: cache.lookup(first))
        self.retrieve(cache, first, "disk")
        self._call("explain", lambda: cache.explain(first))
        self._call("stats", cache.stats)
        self._call("close", cache.close)
        for prompt in (second, third):
            if (cache := self.opened()) is None:
                return
            self.retrieve(cache, first)
            self.retrieve(cache, first, "disk")
            self.store(cache, prompt)
            self._call("close", cache.close)

    def live_after(self, roots: tuple[Path, Path]) -> None:
        """Everything works in the next process, and what was left is right."""
        if (cache := self.opened()) is None:
            return
        for prompt in PROMPTS:
            self.retrieve(cache, prompt)
            self.retrieve(cache, prompt, "disk")
            self.store(cache, prompt)
        for prompt in PROMPTS:
            for tiers in ((), ("disk",)):
                if self.retrieve(cache, prompt, *tiers) != WHOLE:
                    self.wrong.append(
                        f"not stored again in {tiers or 'the host'}"
                    )
        cache.close()
        for root in roots:
            said = io.StringIO()
            with (
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(said),
            ):
                code = main(["check", str(root), "--read"])
            if code:
                self.wrong.append(f"check of {root}: {said.getvalue()[-300:]}")


def live_with_a_failure(
    host: Path,
    disk: Path,
    call: str,
    error: str,
    at: int,
    lasts: bool = False,
) -> Outcome:
    """Return what happened if the call number `at` failed with `error`; removes both tiers first.
    OSError where no process can be asked about calls.

    `lasts`: all later ones fail too, as in a sandbox.
    """
    for root in (host, disk):
        shutil.rmtree(root, ignore_errors=True)
    calls = 0
    failed = False

    def decide(arguments: tuple[int, ...]) -> int:
        nonlocal calls, failed
        # not the small memory of the allocator
        if call == "mmap" and arguments[4] >> 31 and arguments[1] < 1 << 20:
            return 0
        calls += 1
        if calls <= at or (calls - 1 > at and not lasts) or at < 0:
            return 0
        failed = True
        return int(getattr(errno, error))

    wrong = _apart(lambda: _lived(host, disk), call, decide)
    wrong += [f"afterwards: {one}" for one in _apart(lambda: _after(host, disk))]
    return Outcome(wrong, calls, failed)


def _lived(host: Path, disk: Path) -> list[str]:
    life = Life(host, disk)
    life.live()
    return life.wrong


def _after(host: Path, disk: Path) -> list[str]:
    life = Life(host, disk)
    life.live_after((host, disk))
    return life.wrong


def _apart(
    work: Callable[[], list[str]],
    call: str = "",
    decide: Callable[[tuple[int, ...]], int] | None = None,
) -> list[str]:
    """Return what `work` found wrong in a forked child, and how the child ended if not well."""
    ours, theirs = socket.socketpair()
    said, say = os.pipe()

    def in_it() -> None:
        if decide is not None:
            fd = ask_about([call])
            socket.send_fds(theirs, [b"-"], [fd])
            os.close(fd)
            # the listener is ready
            theirs.recv(1)
        os.write(say, "\n".join(work()).encode())

    pid = child(in_it)
    theirs.close()
    os.close(say)
    poll = select.poll()
    poll.register(said, select.POLLIN)
    listener: Listener | None = None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, said)
        if decide is not None:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            if not fds:
                wait(pid)
                raise OSError(errno.ENOSYS, "no process can be asked about calls")
            listener = Listener(fds[0], decide)
            undo.callback(listener.close)
            poll.register(listener.fd, select.POLLIN)
            ours.send(b"-")
        ours.close()
        wrong = _answered(pid, said, listener, poll)
    code = wait(pid)
    return wrong + ([f"the process ended with {code}"] if code else [])


def _answered(
    pid: int, said: int, listener: Listener | None, poll: select.poll
) -> list[str]:
    """Answer the questions of a child until it has said what is wrong."""
    patience = Patience(SECONDS)
    content = b""
    while True:
        for fd, events in poll.poll(500):
            if fd == said:
                if not (piece := os.read(said, 1 << 16)):
                    return content.decode().splitlines()
                content += piece
            elif listener is not None and events & select.POLLIN:
                listener.answer()
            else:
                poll.unregister(fd)
        if patience.ended:
            # its stack is printed
            os.kill(pid, signal.SIGALRM)
            return ["it hung"]
