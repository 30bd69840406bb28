"""System calls that this process may no longer make: like in a sandbox, they fail with an error of
choice.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

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
