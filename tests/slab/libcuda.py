"""A stub of NVIDIA's driver library for machines without a GPU: libcuda_stub.c, built when
needed.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from pagoda.slab.cuda_driver import LIBRARY, Driver
from testbed.programs import need, path_of

SOURCE = Path(__file__).with_name("libcuda_stub.c")
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801


@lru_cache(maxsize=1)
def built() -> Path:
    """Return the library, compiled once per process; without gcc skip, or fail where CI is set."""
    compiler = path_of("gcc") or need("cc")
    directory = Path(tempfile.mkdtemp(prefix="pagoda-libcuda-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / LIBRARY
    command = [
        compiler,
        "-Wall",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        str(SOURCE),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=120)
    return library


class Stub:
    """One copy of the library, with separate state, and the driver over it."""

    def __init__(self, directory: Path) -> None:
        """Without `driver` yet: that is `begin`."""
        self.path = directory / LIBRARY
        self.path.unlink(missing_ok=True)  # never over one that is mapped
        shutil.copyfile(built(), self.path)
        self.library = called(self.path)

    def begin(self) -> Driver:
        """Load the driver over it."""
        driver = Driver.load(str(self.path))
        assert driver is not None
        return driver

    @property
    def fault(self) -> str:
        """Return the first wrong use, which NVIDIA's library would not tolerate; empty if there was
        none.
        """
        return str(self.library.stub_fault().decode())

    @property
    def registered(self) -> int:
        """Return the bytes that are registered now."""
        return int(self.library.stub_registered())

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Return (address, nbytes) of each registered range, in order of the address."""
        count = self.library.stub_count()
        return sorted(
            (self.library.stub_piece(i, 0), self.library.stub_piece(i, 1))
            for i in range(count)
        )


def called(library: Path | str) -> ctypes.CDLL:
    """The library, with what the tests set and ask."""
    found = ctypes.CDLL(str(library))
    found.stub_fault.restype = ctypes.c_char_p
    found.stub_registered.restype = found.stub_piece.restype = ctypes.c_uint64
    found.stub_limit.argtypes = [ctypes.c_uint64]
    found.stub_shift.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    found.stub_delay.argtypes = [ctypes.c_long]
    found.stub_copies.restype = ctypes.c_long
    found.stub_cold.restype = ctypes.c_long
    return found
