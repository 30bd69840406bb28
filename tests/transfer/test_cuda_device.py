"""CudaDevice's own code on a machine without a GPU: torch.cuda and NVIDIA's library are stubs, all
else is real.

Memory is a CPU's, kernels are interpreted, slots are registered with the stand-in. What is left for
a GPU to show (`tests/gpu`) is what CUDA itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagoda.layout import KVLayout
from pagoda.slab import aligned, pinned
from pagoda.transfer import DenseKV, PagedKV
from pagoda.transfer.gpu.copy_engine import WAYS, CopyEngine
from pagoda.transfer.gpu.device import CudaDevice
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from tests.slab.libcuda import Stub
from tests.transfer.kernels_kit import interpreted

TABLE = [3, 1, 7, 5]
CHUNKS = 2
SIZE = 4
PLACES = ["registered", "not registered", "the first registered"]


class Stream:
    """What is on a stream here has happened."""

    device = SimpleNamespace(index=0)
    cuda_stream = 1 << 40

    def wait_event(self, event: object) -> None: ...


class Event:
    """One that has passed."""

    def __init__(self, **_: object) -> None: ...
    def record(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path)
    yield stub
    assert stub.fault == ""


@pytest.fixture
def device(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("init", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: Stream()
    )
    driver = stub.begin()
    monkeypatch.setattr("pagoda.transfer.gpu.device.Driver.load", lambda: driver)
    monkeypatch.setattr(
        "pagoda.transfer.gpu.device._kernels",
        lambda device, programs: interpreted(programs),
    )
    monkeypatch.setattr(
        CudaDevice,
        "allocate_host",
        lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )
    monkeypatch.setattr("pagoda.transfer.gpu.autotune._SCRATCH_BYTES", 1 << 12)
    device = CudaDevice(torch.device("cuda"))
    device.torch_device = torch.device("cpu", 0)  # where its memory is, here
    return device


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("form", ["dense", "paged", "pages"])
def test_kv_comes_back_from_every_kind_of_slot(
    form: str, way: str | None, place: str, device: CudaDevice, stub: Stub
) -> None:
    engine = CopyEngine(device, way=way, staging_bytes=1 << 12)
    layout, source, made = FORMS[form]()
    target = [torch.zeros_like(tensor) for tensor in source]
    room = aligned(CHUNKS * layout.slot_bytes)
    room[:] = 0
    nbytes = {
        "registered": room.nbytes,
        "not registered": 0,
        "the first registered": layout.slot_bytes,
    }[place]
    held = (
        pinned.pin(room[:nbytes], 0, driver=device._driver, background=False)
        if nbytes
        else None
    )
    slots = list(room.reshape(CHUNKS, -1))
    starts = [chunk * layout.chunk_tokens for chunk in range(CHUNKS)]
    made(source, engine).to_slots(starts, slots)
    made(target, engine).from_slots(starts, slots)
    for one, other in zip(source, target, strict=True):
        there = other != 0
        assert there.any()
        assert torch.equal(one[there], other[there])
    again = np.zeros_like(room)
    made(target, engine).to_slots(starts, list(again.reshape(CHUNKS, -1)))
    assert (again == room).all()
    if held is not None:
        assert held.close()
        assert stub.registered == 0


@pytest.mark.slow
def test_a_snapshot_keeps_what_it_was_taken_of(device: CudaDevice) -> None:
    layout, planes, made = FORMS["pages"]()
    kv = made(planes, CopyEngine(device))
    assert isinstance(kv, DevicePagesKV)
    slots, others = (
        list(np.zeros((CHUNKS, layout.slot_bytes), np.uint8)) for _ in range(2)
    )
    snapshot = kv.snapshot([0, layout.chunk_tokens])
    kv.with_table(TABLE).to_slots([0, layout.chunk_tokens], others)
    for plane in planes:
        plane.zero_()
    snapshot.to_slots(slots)
    assert np.array_equal(slots, others)
    assert slots[0].any()


Made = Callable[
    [list[torch.Tensor], CopyEngine], DenseKV | PagedKV | DevicePagesKV
]


def dense() -> tuple[KVLayout, list[torch.Tensor], Made]:
    layout = KVLayout.dense(2, 2, 16, "bfloat16", 8)
    planes = [torch.randn(2, CHUNKS * 8, 16).to(torch.bfloat16) for _ in range(4)]
    return (
        layout,
        planes,
        lambda planes, engine: DenseKV(
            [planes[:2], planes[2:]], layout, copy_engine=engine
        ),
    )


def paged() -> tuple[KVLayout, list[torch.Tensor], Made]:
    layout = KVLayout.dense(2, 2, 16, "bfloat16", 8, token_order="tokens_first")
    pools = [torch.randn(2, 10, SIZE, 2, 16).to(torch.bfloat16) for _ in range(2)]
    return (
        layout,
        pools,
        lambda pools, engine: PagedKV(
            pools,
            layout,
            pool_format="planes_first",
            block_size=SIZE,
            block_table=TABLE,
            copy_engine=engine,
        ),
    )


def pages() -> tuple[KVLayout, list[torch.Tensor], Made]:
    layout = KVLayout.opaque(8, 2 * 64 * 3, "tests of CudaDevice")
    planes = [torch.randint(1, 127, (10, 64), dtype=torch.int8) for _ in range(3)]
    return (
        layout,
        planes,
        lambda planes, engine: DevicePagesKV(
            planes,
            layout,
            block_tokens=SIZE,
            block_table=TABLE,
            copy_engine=engine,
        ),
    )


FORMS = {"dense": dense, "paged": paged, "pages": pages}
