"""Programs that tests, benchmarks and examples start, and what a machine lacks of them.

Called by all that start a program of the machine by its name. Debian puts what administrators use
(nginx, mkfs, ip) in directories that are not on the PATH of other users: it is found there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path

# searched after those of PATH
SYSTEM_DIRECTORIES = ("/usr/local/sbin", "/usr/sbin", "/sbin")

# PROPFIND: nginx alone lists nothing
DAV_MODULE = Path("/usr/lib/nginx/modules/ngx_http_dav_ext_module.so")
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}  # of Mooncake
PACKAGES = {
    **{
        library: f"the package {package}"
        for library, package in LIBRARIES.items()
    },
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "redis-server": "the package redis-server",
    "nginx": "the package nginx",
    "openssl": "openssl",
    DAV_MODULE.name: "the package libnginx-mod-http-dav-ext",
    "cc": "the package gcc",
    "mkfs.btrfs": "the package btrfs-progs",
    "mkfs.ext3": "the package e2fsprogs",
    "mkfs.ext4": "the package e2fsprogs",
    "mkfs.xfs": "the package xfsprogs",
    "xfs_io": "the package xfsprogs",
    "chromium": "the package chromium",
    "prometheus": "the package prometheus",
    "promtool": "the package prometheus",
    "unshare": "the package util-linux",
}


def path_of(program: str) -> str | None:
    """Return where a program is, or None: on the PATH, or where only the PATH of root leads.

    A module of Python and a library count as programs: of a module this is the Python that has it.
    """
    if program in LIBRARIES:
        with contextlib.suppress(OSError):
            return str(ctypes.CDLL(program))
        return None
    if program == DAV_MODULE.name:
        return str(DAV_MODULE) if DAV_MODULE.exists() else None
    directories = [os.environ.get("PATH", os.defpath), *SYSTEM_DIRECTORIES]
    found = shutil.which(program, path=os.pathsep.join(directories))
    if found is not None:
        return found
    if program.isidentifier() and importlib.util.find_spec(program) is not None:
        return sys.executable
    return None


def lacking(*programs: str) -> str:
    """Return which of these programs or modules is missing, and what to install; empty: none."""
    for program in programs:
        if path_of(program) is None:
            return (
                f"{program} is missing: install {PACKAGES.get(program, program)}"
            )
    return ""


def need(program: str) -> str:
    """Return the path of a program, or of Python where `program` is a module.

    Raises:
        unittest.SkipTest: it is missing. pytest skips the test that this ends. Where CI is set it
            is a RuntimeError.
    """
    path = path_of(program)
    if path is None:
        raise skip(lacking(program))
    return path


def ends_with_this(command: Sequence[str]) -> list[str]:
    """Return a command that is killed when the thread that starts it ends, as with its process,
    also by SIGKILL. The process has the same id. Without the program for it: the command itself.
    """
    setpriv = path_of("setpriv")
    if setpriv is None:
        return [*command]
    # this process may have ended before setpriv ran
    unless_orphaned = 'test $PPID = "$0" && exec "$@"'
    shell = ["/bin/sh", "-c", unless_orphaned, str(os.getpid())]
    return [setpriv, "--pdeathsig", "KILL", *shell, *command]


def skip(message: str) -> Exception:
    """Return the exception of a test that cannot run here: an error where CI is set, because CI has
    everything.
    """
    if os.environ.get("CI"):
        return RuntimeError(message)
    return unittest.SkipTest(message)
