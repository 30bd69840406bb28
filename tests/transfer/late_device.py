"""A device over CPU memory with late streams: work is done when a thread waits for it, or just
before.

A stream is a queue, as in CUDA. A seeded scheduler decides which stream does its next piece of work
and when: in one world nothing happens before a thread waits for it, in another everything happens
at once, in a third one stream is always last. So a missing wait between two streams, or between a
stream and the caller, shows as wrong bytes, and so does a buffer that is reused too early; `idle`
shows work that remains after the end of a call. Every range of touched memory must be known, and
kernels touch host memory only at the addresses that `device_address` returned.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch

from pagoda.transfer.run_table import RunTable

Bytes = npt.NDArray[np.uint8]
# the device's address of registered host memory differs from the host's
SHIFT = 1 << 60


class Failure(RuntimeError):
    """The error that a device raises on request of a test."""


class _Work(NamedTuple):
    ready: Callable[[], bool]
    do: Callable[[], object]


class _Room(NamedTuple):
    begin: int
    end: int
    # "device", "registered", "pinned" (allocated so: one address for both sides), "pageable"
    kind: str


class LateEvent:
    """An event: `done` after its stream has reached it. Thread-safe."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.done = False

    def synchronize(self) -> None:
        """Wait until all work launched before it is done; raise the errors of the device until
        then.
        """
        self._world.until(lambda: self.done)


class LateStream:
    """A stream: does its launched work in order, late. Thread-safe."""

    def __init__(self, world: World, name: str, handle: int) -> None:
        self.name = name
        self.handle = handle
        self.work: deque[_Work] = deque()
        self._world = world

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` at once, as CUDA does; work that it launches is done later."""
        with self._world.on(self):
            work()

    def wait_event(self, event: LateEvent | None) -> None:
        """Make all following work wait for the event."""
        if event is not None:
            self.launch(lambda: None, lambda: event.done)

    def record_event(self) -> LateEvent:
        """Return an event after all launched work."""
        event = LateEvent(self._world)

        def pass_it() -> None:
            event.done = True

        self.launch(pass_it)
        return event

    def launch(
        self, do: Callable[[], object], ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue one piece of work after the others."""
        with self._world.lock:
            if self._world.dead is not None:
                raise self._world.dead
            self.work.append(_Work(ready, do))
        self._world.launched()


class World:
    """All streams of a device, and their order. `eager`: the probability that work is done right
    after its launch.

    Thread-safe: one piece of work at a time is done, by whichever thread waits or launches.
    """

    def __init__(self, seed: int, eager: float | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self.eager = (
            float(self._random.choice([0.0, 0.0, 0.1, 0.5, 1.0]))
            if eager is None
            else eager
        )
        self.lock = threading.RLock()
        self.streams: list[LateStream] = []
        self._weights: list[float] = []
        self._here = threading.local()
        self.wrong: list[str] = []
        # a failed device does nothing more and always reports the error
        self.dead: Exception | None = None
        self.engine = self.stream("engine")

    def stream(self, name: str) -> LateStream:
        """Create a stream; some are a thousand times as fast as others."""
        with self.lock:
            stream = LateStream(self, name, len(self.streams) + 1)
            self._weights.append(float(10.0 ** self._random.integers(-3, 4)))
            self.streams.append(stream)
            return stream

    def current(self) -> LateStream:
        """Return the calling thread's stream; the engine's stream unless it is inside `on`."""
        found: LateStream = getattr(self._here, "stream", self.engine)
        return found

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before = self.current()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def launched(self) -> None:
        """Do some of the waiting work, at random."""
        with self.lock:
            while self._random.random() < self.eager and self._step():
                if self.eager == 1.0:
                    continue
                if self._random.random() < 0.3:
                    break

    def until(self, done: Callable[[], bool]) -> None:
        """Do work, in an order drawn at random, until `done`."""
        while True:
            with self.lock:
                if self.dead is not None:
                    raise self.dead
                if done():
                    return
                if not self._step():
                    raise AssertionError(
                        f"nothing can go on, and {self.waiting()} wait"
                    )

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting pieces of each stream that has any."""
        with self.lock:
            return {
                stream.name: len(stream.work)
                for stream in self.streams
                if stream.work
            }

    def _step(self) -> bool:
        """Do the next piece of one stream; False if no stream can continue."""
        can = [
            number
            for number, stream in enumerate(self.streams)
            if stream.work and stream.work[0].ready()
        ]
        if not can:
            return False
        weights = np.array([self._weights[number] for number in can])
        stream = self.streams[
            can[int(self._random.choice(len(can), p=weights / weights.sum()))]
        ]
        try:
            stream.work.popleft().do()
        except Exception as trouble:  # noqa: BLE001
            self.dead = trouble
            for stream in self.streams:
                stream.work.clear()
        return True


class Mover(Protocol):
    """Kernels over CPU memory: the project's own in Triton's interpreter, or `PlainKernels`."""

    def upload(self, table: RunTable) -> object: ...
    def move(
        self,
        table: object,
        ids: torch.Tensor,
        places: torch.Tensor,
        begin: int,
        end: int,
        word_bytes: int,
        *,
        gather: bool,
    ) -> None: ...


class PlainKernels:
    """Gather and scatter run by run with memmove, as the contract of kernels requires. Knows its
    device's addresses.
    """

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def upload(self, table: RunTable) -> object:
        # not the table itself: a cache keyed by the table would keep it forever
        return replace(table)

    def move(
        self,
        table: object,
        ids: torch.Tensor,
        places: torch.Tensor,
        begin: int,
        end: int,
        word_bytes: int,
        *,
        gather: bool,
    ) -> None:
        for device, place, nbytes in _runs(
            table, ids, places, begin, end, word_bytes
        ):
            to, source = (place, device) if gather else (device, place)
            self._device.move(to, source, nbytes, "kernel")


def _runs(
    table: object,
    ids: torch.Tensor,
    places: torch.Tensor,
    begin: int,
    end: int,
    word_bytes: int,
) -> Iterator[tuple[int, int, int]]:
    """(device address, place, bytes) of every run."""
    assert isinstance(table, RunTable)
    assert ids.dtype == places.dtype == torch.int64, "ids and places are int64"
    assert ids.shape == (len(places), table.count), (
        f"ids {tuple(ids.shape)}, places {tuple(places.shape)}"
    )
    assert 0 <= begin <= end <= len(table.address)
    assert word_bytes in (1, 2, 4, 8, 16)
    for place, own in zip(places.tolist(), ids.tolist(), strict=True):
        if not place:
            continue
        for row in range(begin, end):
            nbytes = int(table.nbytes[row])
            for number, one in enumerate(own):
                if one < 0:
                    continue
                block, inside = divmod(one, table.group)
                device = (
                    int(table.address[row])
                    + block * int(table.stride[row])
                    + inside * nbytes
                )
                own_place = place + int(table.offset[row]) + number * nbytes
                assert not (
                    device % word_bytes
                    or own_place % word_bytes
                    or nbytes % word_bytes
                ), "words"
                yield device, own_place, nbytes


class _Sent:
    """A table on the device: valid after `home` has reached it; `home` frees its memory when this
    is dropped.
    """

    def __init__(
        self, inner: object, there: list[bool], home: LateStream
    ) -> None:
        self.inner = inner
        self.there = there
        self.home = home


class LateKernels:
    """Kernels whose launches are done later, on the then current stream. Their arguments must live
    as long.
    """

    def __init__(
        self, world: World, inner: Mover, homes: dict[int, LateStream]
    ) -> None:
        self._world = world
        self._inner = inner
        self._homes = homes
        self.launches = 0
        self.fail_at: int | None = None
        self.fail_late_at: int | None = None

    def upload(self, table: RunTable) -> object:
        stream = self._world.current()
        sent = _Sent(self._inner.upload(table), [False], stream)
        there = sent.there
        stream.launch(lambda: there.__setitem__(0, True))
        return sent

    def warm(self) -> None:
        """Do nothing: there is nothing to compile."""

    def move(self, table: object, *args: object, gather: bool) -> None:
        name = "gather" if gather else "scatter"
        self._launch(name, partial(self._inner.move, gather=gather), table, args)

    def _launch(
        self,
        name: str,
        call: Callable[..., None],
        table: object,
        args: Sequence[object],
    ) -> None:
        assert isinstance(table, _Sent)
        inner = table.inner
        there = table.there
        home = table.home
        alive = ref(table)
        self.launches += 1
        if self.fail_at is not None and self.launches >= self.fail_at:
            raise Failure(f"launch {self.launches}")
        ids, places, *rest = args
        assert isinstance(ids, torch.Tensor)
        assert isinstance(places, torch.Tensor)
        held = [ids.detach(), places.detach()]
        stream = self._world.current()
        number = self.launches

        def do() -> None:
            if self.fail_late_at is not None and number >= self.fail_late_at:
                raise Failure(f"launch {number}, late")
            if not there[0]:
                self._world.wrong.append(f"{name}: the table was not there yet")
            if home is not stream and alive() is None:
                self._world.wrong.append(
                    f"{name}: the table was let go of before it ran"
                )
            for one in held:
                # released memory is reused at once, but only by later work of the same stream
                at_home = (
                    self._homes.get(one.untyped_storage().data_ptr()) is stream
                )
                if not at_home and _owners(one) <= 2:
                    self._world.wrong.append(
                        f"{name}: ids or places were let go of before it ran"
                    )
            call(inner, *held, *rest)

        stream.launch(do)


def _owners(tensor: torch.Tensor) -> int:
    """Return the number of references to the tensor's memory; 2: only this tensor and this call."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


class LateDevice:
    """A device (see pagoda.transfer.gpu.device) of CPU memory whose streams are late. Thread-safe.

    `kernels`: "plain", None, or a mover; `shift`: how far registered memory's place is from its
    address;
    `host`: whether `allocate_host` returns memory; `world`: that of another LateDevice for the same
    device. After each call `check()` says what was wrong.
    """

    def __init__(
        self,
        seed: int = 0,
        kernels: str | Mover | None = "plain",
        *,
        shift: int = SHIFT,
        host: bool = True,
        eager: float | None = None,
        world: World | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.world = world or World(seed, eager)
        self._shift = shift
        self._host = host
        self._inside = threading.local()
        self._rooms: list[_Room] = []
        self._held: list[object] = []
        # of memory that was sent: the stream that it was taken on
        self._homes: dict[int, LateStream] = {}
        inner = PlainKernels(self) if kernels == "plain" else kernels
        assert not isinstance(inner, str)
        self.kernels = (
            None if inner is None else LateKernels(self.world, inner, self._homes)
        )
        self.copies = 0
        self.copied_bytes = 0
        self.fail_at: int | None = None
        self.fail_late_at: int | None = None
        self.most_bytes: int | None = None  # of device memory at once

    # ---- what a device can do

    def current_event(self) -> LateEvent:
        """Return an event after all work of the calling thread's stream."""
        return self.world.current().record_event()

    def new_streams(self, number: int) -> list[LateStream]:
        """Return new streams."""
        return [
            self.world.stream(f"stream {len(self.world.streams)}")
            for _ in range(number)
        ]

    def current_stream(self) -> LateStream:
        """The calling thread's stream."""
        return self.world.current()

    def current_stream_wait(self, event: LateEvent | None) -> None:
        """Make the calling thread's stream wait."""
        self.world.current().wait_event(event)

    def upload(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the numbers on the device, valid after the current stream has reached them; until
        then wrong ones.
        """
        assert numbers.dtype == np.int64
        # with strides, as torch sends them
        values = torch.from_numpy(numbers).clone()
        sent = torch.full_like(values, -(1 << 40))
        self._homes[sent.untyped_storage().data_ptr()] = self.world.current()
        self.world.current().launch(lambda: sent.copy_(values))
        return sent

    def copy(self, to: int, source: int, nbytes: int, stream: LateStream) -> None:
        """Queue a memmove; the arguments are addresses, so the memory must live until it is
        done.
        """
        if self.world.current() is not stream:
            self.world.wrong.append("copy: outside of its stream")
        self.copies += 1
        if self.fail_at is not None and self.copies >= self.fail_at:
            raise Failure(f"copy {self.copies}")
        self.copied_bytes += nbytes
        number = self.copies

        def do() -> None:
            if self.fail_late_at is not None and number >= self.fail_late_at:
                raise Failure(f"copy {number}, late")
            self.move(to, source, nbytes, "copy")

        stream.launch(do)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory that the current stream may still write to: allocators reuse
        memory of a stream.
        """
        if self.most_bytes is not None and nbytes > self.most_bytes:
            raise torch.OutOfMemoryError(f"{nbytes} bytes")
        room = self._new(nbytes, "device")
        self.world.current().launch(lambda: room.fill_(0xC3))
        return room

    def allocate_host(self, nbytes: int) -> torch.Tensor | None:
        """Bytes of the host that the device sees under the same address."""
        return self._new(nbytes, "pinned") if self._host else None

    @contextmanager
    def copy_scope(self) -> Iterator[None]:
        """Enclose a call: only inside it memory is guaranteed to stay registered."""
        before = getattr(self._inside, "calls", 0)
        self._inside.calls = before + 1
        try:
            yield
        finally:
            self._inside.calls = before

    def device_address(self, address: int, nbytes: int) -> int | None:
        """Return the device's address of registered host memory."""
        if not getattr(self._inside, "calls", 0):
            self.world.wrong.append("device_address: outside of a copy scope")
        known = self._kind(address, nbytes) == "registered"
        return address + self._shift if known else None

    # ---- calls of tests

    def device_memory(self, *arrays: Bytes | torch.Tensor) -> None:
        """Declare device memory."""
        self._declare("device", arrays)

    def register(self, *arrays: Bytes | torch.Tensor) -> None:
        """Declare registered host memory."""
        self._declare("registered", arrays)

    def pageable(self, *arrays: Bytes | torch.Tensor) -> None:
        """Declare host memory that is not registered: no kernel can access it, and the driver's
        copies are slow.
        """
        self._declare("pageable", arrays)

    def forget(self, keep: int) -> None:
        """Forget all declared memory except the first ranges."""
        del self._rooms[keep:], self._held[keep:]

    def idle(self) -> bool:
        """Return whether only the engine's own stream has work left."""
        return not set(self.world.waiting()) - {"engine"}

    def check(self) -> None:
        """Fail if anything was wrong, or if work remains."""
        assert not self.world.wrong, self.world.wrong[:3]
        assert self.idle(), f"still to be done: {self.world.waiting()}"

    def move(self, to: int, source: int, nbytes: int, by: str) -> None:
        """Move bytes at once, if both sides may be touched."""
        ctypes.memmove(
            self._real(to, nbytes, by), self._real(source, nbytes, by), nbytes
        )

    def _real(self, place: int, nbytes: int, by: str) -> int:
        shifted = bool(self._shift) and place >= self._shift
        address = place - self._shift if shifted else place
        kind = self._kind(address, nbytes)
        allowed = {
            "device",
            "pinned",
            "registered" if shifted or not self._shift or by == "copy" else "",
        }
        if kind not in allowed | ({"pageable"} if by == "copy" else set()):
            raise AssertionError(
                f"a {by} at {place:#x} ({kind}, {nbytes} bytes) is not allowed"
            )
        return address

    def _kind(self, address: int, nbytes: int) -> str:
        for room in self._rooms:
            if room.begin <= address and address + nbytes <= room.end:
                return room.kind
        over = [
            room
            for room in self._rooms
            if room.begin < address + nbytes and address < room.end
        ]
        return "in part something else" if over else "pageable"

    def _new(self, nbytes: int, kind: str) -> torch.Tensor:
        # page-aligned, like device memory: unaligned memory would never be moved in words
        room = torch.full((nbytes + 512,), 0x5A, dtype=torch.uint8)
        room = room[-room.data_ptr() % 512 :][:nbytes]
        self._declare(kind, [room])
        return room

    def _declare(self, kind: str, arrays: Sequence[Bytes | torch.Tensor]) -> None:
        for array in arrays:
            if isinstance(array, torch.Tensor):
                address = array.data_ptr()
                nbytes = array.nbytes
            else:
                address = array.ctypes.data
                nbytes = array.nbytes
            self._rooms.append(_Room(address, address + nbytes, kind))
            self._held.append(array)  # its address is not used again
