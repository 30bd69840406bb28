"""System calls that this process may no longer make: like in a sandbox, they fail with an error of
choice. Or another process decides about each of them (`Listener`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Callable, Sequence

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_FILTER = 2
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NUMBERS = {
    "x86_64": {
        "fcntl": 72,
        "fallocate": 285,
        "preadv": 295,
        "pwritev": 296,
        "preadv2": 327,
        "pwritev2": 328,
    },
    "aarch64": {
        "fcntl": 25,
        "fallocate": 47,
        "preadv": 69,
        "pwritev": 70,
        "preadv2": 286,
        "pwritev2": 287,
    },
}
# of the generic table and of x86-64, which has these under the same names
_WATCHED = {
    "x86_64": {
        "read": 0,
        "lseek": 8,
        "mmap": 9,
        "munmap": 11,
        "ioctl": 16,
        "pread64": 17,
        "pwrite64": 18,
        "mremap": 25,
        "madvise": 28,
        "flock": 73,
        "fsync": 74,
        "fdatasync": 75,
        "ftruncate": 77,
        "statfs": 137,
        "fstatfs": 138,
        "mlock": 149,
        "getdents64": 217,
        "openat": 257,
        "unlinkat": 263,
        "clone3": 435,
        "prlimit64": 302,
        "getrandom": 318,
        # which the C library makes of other calls on the generic table
        "rename": 82,
        "mkdir": 83,
        "rmdir": 84,
        "link": 86,
        "unlink": 87,
        "newfstatat": 262,
    },
    "aarch64": {
        "read": 63,
        "lseek": 62,
        "mmap": 222,
        "munmap": 215,
        "ioctl": 29,
        "pread64": 67,
        "pwrite64": 68,
        "mremap": 216,
        "madvise": 233,
        "flock": 32,
        "fsync": 82,
        "fdatasync": 83,
        "ftruncate": 46,
        "statfs": 43,
        "fstatfs": 44,
        "mlock": 228,
        "getdents64": 61,
        "openat": 56,
        "unlinkat": 35,
        "clone3": 435,
        "prlimit64": 261,
        "getrandom": 278,
        "renameat": 38,
        "mkdirat": 34,
        "linkat": 37,
        "newfstatat": 79,
    },
}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NEW_LISTENER = 8
_ASK = 0x7FC00000
# of ioctl: SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_QUESTION = struct.Struct("QIIiIQ6Q")
_ANSWER = struct.Struct("QqiI")
_GO_ON = 1
OFD_LOCKS = (36, 37, 38)  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW


def refuse(
    call: str,
    error: int = errno.EPERM,
    argument: int = 0,
    values: tuple[int, ...] = (),
) -> None:
    """Let a system call fail from now on, in this process and its children; with `values`, only for
    those.

    `argument`: which argument has one of the values, counted from 0.
    """
    number = _NUMBERS[platform.machine()][call]
    refused = struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | error)
    allowed = struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    steps = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    if values:
        steps.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 1, 0, number))
        steps.append(allowed)
        steps.append(struct.pack("HBBI", _LOAD, 0, 0, 16 + 8 * argument))
        for value in values:
            steps.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, value))
            steps.append(refused)
    else:
        steps.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, number))
        steps.append(refused)
    steps.append(allowed)
    program = ctypes.create_string_buffer(b"".join(steps))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _FILTER, header),
    ):
        if libc.prctl(option, value, pointer, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def watched_calls() -> list[str]:
    """Return the calls that a `Listener` can be asked about on this machine."""
    return [*_WATCHED[platform.machine()], *_NUMBERS[platform.machine()]]


def ask_about(calls: Sequence[str]) -> int:
    """Let another process decide about these calls of this process, from now on, and of its threads
    and children. Return the descriptor for its `Listener`. OSError where that cannot be.
    """
    machine = platform.machine()
    numbers = {**_WATCHED[machine], **_NUMBERS[machine]}
    steps = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    for at, call in enumerate(calls):
        steps.append(
            struct.pack("HBBI", _JUMP_IF_EQUAL, len(calls) - at, 0, numbers[call])
        )
    steps.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    steps.append(struct.pack("HBBI", _RETURN, 0, 0, _ASK))
    program = ctypes.create_string_buffer(b"".join(steps))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    fd: int = libc.syscall(_SECCOMP[machine], 1, _NEW_LISTENER, header)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return fd


class Listener:
    """Decides about the calls of another process: `decide` gets the six arguments of a call, and
    returns 0, or the error with which it fails.
    """

    def __init__(self, fd: int, decide: Callable[[tuple[int, ...]], int]) -> None:
        self.fd = fd
        self._decide = decide

    def answer(self) -> None:
        """Answer one question, once `fd` is readable."""
        question = bytearray(_QUESTION.size)
        # the thread that asked may have ended
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, _RECEIVE, question, True)
            number, _, _, _, _, _, *arguments = _QUESTION.unpack(question)
            error = self._decide(tuple(arguments))
            fcntl.ioctl(
                self.fd,
                _SEND,
                _ANSWER.pack(number, 0, -error, 0 if error else _GO_ON),
            )

    def close(self) -> None:
        """Stop: later calls fail with ENOSYS."""
        os.close(self.fd)
