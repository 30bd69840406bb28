"""NVIDIA's driver library by ctypes: registers memory with a GPU, copies on a stream. Needs no
torch.

It uses the driver's calls, not the runtime's (`cudaHostRegister`): a failed runtime call leaves its
error in the runtime, and a later, unrelated call of torch reports it (vllm-project/vllm#51080).
Called by `pinned` and the GPU code.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.base.fork import here, per_process

LIBRARY = "libcuda.so.1"
_PORTABLE = 1
_DEVICEMAP = 2
_INVALID_CONTEXT = 201
_NON_BLOCKING = 1  # a stream that does not wait for stream 0
_RELAXED = 2
# The driver has shut down, or the memory is not registered: nothing is left to unregister.
# CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
ALREADY_GONE = frozenset({4, 713})

_Address = ctypes.c_uint64
_Size = ctypes.c_size_t
_Number = ctypes.c_int
_Handle = ctypes.c_void_p
# The names that cuda.h gives these calls. All return a CUresult. `cuMemcpyAsync` is also exported
# as `_ptsz`, whose stream 0 is another stream: stream 0 of the plain call is the same as torch's.
_SIGNATURES = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetCount": [ctypes.POINTER(_Number)],
    "cuDeviceGet": [ctypes.POINTER(_Number), _Number],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_Handle), _Number],
    "cuCtxSetCurrent": [_Handle],
    "cuMemHostRegister_v2": [_Handle, _Size, ctypes.c_uint],
    "cuMemHostGetDevicePointer_v2": [
        ctypes.POINTER(_Address),
        _Handle,
        ctypes.c_uint,
    ],
    "cuMemHostUnregister": [_Handle],
    "cuMemcpyAsync": [_Address, _Address, _Size, _Handle],
    "cuCtxGetStreamPriorityRange": [
        ctypes.POINTER(_Number),
        ctypes.POINTER(_Number),
    ],
    "cuStreamCreateWithPriority": [
        ctypes.POINTER(_Handle),
        ctypes.c_uint,
        _Number,
    ],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(_Number)],
    "cuGetErrorName": [_Number, ctypes.POINTER(ctypes.c_char_p)],
}
# library -> process of its cuInit (`here`), driver
_loaded: dict[str, tuple[int, Driver | None]] = {}


class DriverError(Exception):
    """A call of the driver failed: `code` is its CUresult, `name` NVIDIA's name for it."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call.removesuffix('_v2')}: {name} ({code})")
        self.code = code
        self.name = name


class Driver:
    """The driver of the GPUs of this process. Thread-safe. In a forked child every call is a
    DriverError.

    CUDA's contexts do not survive a fork, so a child never calls the library. Register, unregister
    and copy need a context on the calling thread: `use`. Every call releases the GIL.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap a library that `load` has initialised."""
        self._library = library
        self._process = here()  # that initialised the driver
        # primary contexts, kept for the life of the process
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @classmethod
    def load(cls, library: str = LIBRARY) -> Driver | None:
        """Initialise the driver, once per process; None without library or GPU, or if a parent has
        initialised it.
        """
        process, driver = _loaded.get(library, (here(), None))
        if process != here():
            return None
        if driver is not None:
            return driver
        try:
            found = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                call = getattr(found, name)
                call.argtypes = arguments
                call.restype = ctypes.c_int
        except (OSError, AttributeError):
            return None
        _loaded[library] = here(), None
        count = ctypes.c_int()
        if (
            found.cuInit(0)
            or found.cuDeviceGetCount(ctypes.byref(count))
            or count.value < 1
        ):
            return None
        _loaded[library] = here(), cls(found)
        return _loaded[library][1]

    def use(self, device_index: int) -> None:
        """Set this thread's context to the primary context of a device, which torch uses too.
        Raises DriverError.
        """
        with self._lock:
            context = self._contexts.get(device_index)
            if context is None:
                device = _Number()
                context = _Handle()
                self._call("cuDeviceGet", ctypes.byref(device), device_index)
                self._call(
                    "cuDevicePrimaryCtxRetain", ctypes.byref(context), device
                )
                self._contexts[device_index] = context
        self._call("cuCtxSetCurrent", context)

    def register(self, address: int, nbytes: int) -> int:
        """Lock [address, address + nbytes), map it for all devices; returns their address of it.
        Raises DriverError.

        `address` begins a page. Faults in missing pages; about 0.1 s per GiB
        (vllm-project/vllm#51080).
        """
        self._call(
            "cuMemHostRegister_v2", address, nbytes, _PORTABLE | _DEVICEMAP
        )
        place = _Address()
        try:
            self._call(
                "cuMemHostGetDevicePointer_v2", ctypes.byref(place), address, 0
            )
        except DriverError:
            self._library.cuMemHostUnregister(address)
            raise
        return place.value

    def unregister(self, address: int) -> None:
        """Unregister the range that begins at `address`. No copy may be in flight there. Raises
        DriverError.
        """
        self._call("cuMemHostUnregister", address)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy on a stream, between any two addresses; returns before it is done. Raises
        DriverError.

        A range of host memory must be registered in full or not at all; otherwise
        CUDA_ERROR_INVALID_VALUE.
        """
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def stream(self) -> int:
        """Make a stream of the context's highest priority, for the life of the process. Raises
        DriverError.

        Not from torch: its pool has 32 streams, which it gives out in turn, so an engine might use
        the same one.
        """
        least = _Number()
        greatest = _Number()
        stream = _Handle()
        self._call(
            "cuCtxGetStreamPriorityRange",
            ctypes.byref(least),
            ctypes.byref(greatest),
        )
        self._call(
            "cuStreamCreateWithPriority",
            ctypes.byref(stream),
            _NON_BLOCKING,
            greatest,
        )
        return stream.value or 0

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread's calls in this scope not break a CUDA graph capture of another thread.
        Raises DriverError.

        Without it a capture in torch's default mode fails when any thread allocates, registers or
        waits.
        """
        mode = _Number(_RELAXED)
        try:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            yield
        finally:
            # otherwise the mode was already relaxed, or has not been changed
            if mode.value != _RELAXED:
                self._library.cuThreadExchangeStreamCaptureMode(
                    ctypes.byref(mode)
                )

    def _call(self, name: str, *arguments: object) -> None:
        if self._process != here():
            raise DriverError(
                name,
                _INVALID_CONTEXT,
                "CUDA_ERROR_INVALID_CONTEXT, this is a forked child",
            )
        code = getattr(self._library, name)(*arguments)
        if code:
            trouble = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(trouble))
            raise DriverError(
                name, code, (trouble.value or b"an unknown error").decode()
            )
