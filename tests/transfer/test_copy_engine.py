"""Copies without a GPU: refusals, the choice of the method, and the contents of a table of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from pagoda.layout import KVLayout
from pagoda.slab.cuda_driver import Driver
from pagoda.transfer import DenseKV, PagedKV
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu import autotune
from pagoda.transfer.gpu import device as device_module
from pagoda.transfer.gpu.autotune import fastest_way
from pagoda.transfer.gpu.copy_engine import WAYS, CopyEngine, copy_engine_of
from pagoda.transfer.gpu.device import CpuDevice, CudaDevice
from pagoda.transfer.gpu.layer_events import LayerEvents
from pagoda.transfer.pages_kv import page_plane
from pagoda.transfer.run_table import RunTable, page_run_table
from tests.transfer.pages_kit import make_planes

if TYPE_CHECKING:
    from pagoda.transfer.gpu.kernels import Kernels

NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="this machine has a GPU: tests/gpu asks more",
)


def table_of(nbytes: list[int], count: int = 2, offset: int = 0) -> RunTable:
    sizes = np.array(nbytes, dtype=np.int64)
    return RunTable(
        address=np.arange(len(nbytes), dtype=np.int64) * 4096,
        stride=np.full(len(nbytes), 64, dtype=np.int64),
        nbytes=sizes,
        offset=offset + np.cumsum(sizes * count) - sizes * count,
        count=count,
        group=1,
        layers=np.arange(len(nbytes) + 1),
    )


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(
        ValueError, match=f"{device}: torch .* sees no CUDA device"
    ):
        copy_engine_of(torch.device(device))
    with pytest.raises(ValueError, match="sees no CUDA device"):
        CudaDevice(torch.device(device))


def test_a_thread_keeps_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's current context is the runtime's current device, so it has to be put back."""
    now = [0]
    seen = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before = now[0]
        now[0] = wanted.index
        yield
        now[0] = before

    class Context:
        def use(self, device_index: int) -> None:
            now[0] = device_index

        def stream(self) -> int:
            seen.append(now[0])
            return 8

        def relaxed_capture(self) -> AbstractContextManager[None]:
            seen.append(now[0])
            return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda,
        "ExternalStream",
        lambda at, device: SimpleNamespace(cuda_stream=at, device=device),
    )
    cuda = object.__new__(CudaDevice)
    cuda.torch_device = torch.device("cuda", 1)
    cuda._driver = cast(Driver, Context())
    (stream,) = cuda.new_streams(1)
    assert now == [0]
    stream.run(lambda: seen.append(now[0]))
    assert now == [0]
    with cuda.copy_scope():
        assert now == [1]
    assert now == [0]
    assert seen == [1, 1, 1]


def test_kernels_are_made_beside_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading a module spoils a capture of another thread, as allocating does."""
    relaxed = [False]
    seen = []

    class Context:
        def use(self, device_index: int) -> None:
            seen.append(device_index)

        @contextmanager
        def relaxed_capture(self) -> Iterator[None]:
            relaxed[0] = True
            yield
            relaxed[0] = False

    for name, answer in (
        ("is_available", True),
        ("device_count", 2),
        ("current_device", 1),
        ("init", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Driver, "load", Context)
    monkeypatch.setattr(
        device_module,
        "_kernels",
        lambda device, programs: seen.append(relaxed[0]),
    )
    assert CudaDevice(torch.device("cuda")).torch_device == torch.device(
        "cuda", 1
    )
    assert seen == [1, True]


def test_host_memory_is_the_hosts_whatever_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    with torch.device("meta"):
        assert CpuDevice().allocate(8).device.type == "cpu"
        monkeypatch.setattr(
            torch,
            "empty",
            lambda *sizes, **options: seen.append(options["device"]),
        )
        CudaDevice.allocate_host(object.__new__(CudaDevice), 8)
    assert seen == ["cpu"]


def test_other_devices_are_refused() -> None:
    layout = KVLayout.dense(1, 1, 4, "float32", 4)
    planes = [[torch.empty(1, 8, 4, device="meta")] * 2]
    with pytest.raises(
        ValueError,
        match="KV is on meta: only KV on NVIDIA GPUs or in CPU memory can be copied",
    ):
        DenseKV(planes, layout)
    mixed = [[torch.empty(1, 8, 4), torch.empty(1, 8, 4, device="meta")]]
    with pytest.raises(
        ValueError, match=r"layers\[0\]\[1\] is on meta: it must be on cpu"
    ):
        DenseKV(mixed, layout)


def test_a_way_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match="way must be one of direct, staged, runs, got 'fast'"
    ):
        CopyEngine(CpuDevice(), way="fast")
    for way in ("direct", "staged"):
        with pytest.raises(ValueError, match="needs Triton"):
            CopyEngine(CpuDevice(), way=way)
    assert (
        CopyEngine(CpuDevice(), way="runs").way_of(table_of([8]), True) == "runs"
    )
    assert CopyEngine(CpuDevice()).way_of(table_of([8]), False) == "runs"


@pytest.mark.parametrize("best", WAYS)
def test_the_fastest_way_is_taken(best: str) -> None:
    """The scratch of a trial has the requested length and is separate; a slow way loses."""
    asked = table_of([1 << 20, 1 << 20])

    def attempt(
        way: str, table: RunTable, ids: np.ndarray, slots: list[np.ndarray]
    ) -> None:
        assert (table.nbytes == asked.nbytes[0]).all()
        assert table.count == asked.count
        for row in ids:
            assert (
                len(list(table.runs(row, 0, table.rows)))
                == table.rows * table.count
            )
        for slot in slots:
            assert slot.nbytes == table.span(0, table.rows)[1]
        time.sleep(0.0 if way == best else 0.05)

    assert fastest_way(asked, CpuDevice(), WAYS, attempt) == best


def test_equally_fast_ways_leave_the_device_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of a clock by which every attempt takes as long
    readings = iter(range(1000))
    monkeypatch.setattr(
        autotune, "time", SimpleNamespace(perf_counter=lambda: next(readings))
    )
    assert (
        fastest_way(table_of([64]), CpuDevice(), WAYS, lambda *_: None) == "runs"
    )


def test_chunks_in_one_piece_are_not_measured() -> None:
    """As those of a snapshot: the first of them is stored while an engine runs."""
    engine = CopyEngine(CpuDevice(cast("Kernels", object())))
    assert engine.way_of(table_of([64], count=1), True) == "runs"
    assert (
        CopyEngine(engine.device, way="staged").way_of(
            table_of([64], count=1), True
        )
        == "staged"
    )


def test_what_is_measured_with_lies_as_kernels_want_it() -> None:
    """`from_numpy`, `pin_memory` and `to` keep strides, and kernels refuse ids that are not
    contiguous.
    """
    seen = []

    def attempt(way: str, table: RunTable, ids: Ids, slots: list[Bytes]) -> None:
        seen.append((way, ids.shape, ids.flags.c_contiguous, ids.dtype))

    fastest_way(table_of([64], count=3), CpuDevice(), WAYS, attempt)
    assert set(seen) == {(way, (64, 3), True, np.dtype(np.int64)) for way in WAYS}


def test_words_are_as_wide_as_everything_allows() -> None:
    assert table_of([64, 32]).word_bytes == 16
    assert table_of([64, 8]).word_bytes == 8
    assert table_of([64, 12]).word_bytes == 4
    assert table_of([64, 6], count=3).word_bytes == 2
    assert table_of([64], offset=5).word_bytes == 1


def test_rows_that_leave_a_gap_are_no_table() -> None:
    with pytest.raises(ValueError, match="follow each other"):
        RunTable(
            *(np.array([0, 64]),) * 3, np.array([0, 8]), 1, 1, np.array([0, 2])
        )
    with pytest.raises(ValueError, match="follow each other"):
        RunTable(*(np.array([], dtype=np.int64),) * 4, 1, 1, np.array([0]))


@pytest.mark.parametrize("most", [1, 16, 40, 41, 10_000])
def test_segments_cover_all_rows_once(most: int) -> None:
    table = table_of([8, 12, 4, 4, 30], count=2)
    cut = list(table.segments(most))
    assert [row for begin, end in cut for row in range(begin, end)] == list(
        range(5)
    )
    for begin, end in cut:
        low, high = table.span(begin, end)
        assert high - low <= most or end - begin == 1
    assert list(table.segments(most, 1, 3))[-1][1] == 3


def test_neighbouring_runs_are_one_copy() -> None:
    planes = [
        page_plane(torch.from_numpy(plane.whole), "plane")
        for plane in make_planes([64], 1)
    ]
    table = page_run_table(planes, 4, 0)
    assert [run.nbytes for run in table.runs(np.array([2, 3, 4, 9]), 0, 1)] == [
        192,
        64,
    ]
    assert [run.offset for run in table.runs(np.array([2, -1, 3, 9]), 0, 1)] == [
        0,
        128,
        192,
    ]


def test_layers_are_reported_as_they_arrive() -> None:
    layout = KVLayout.dense(3, 2, 4, "float32", 4, token_order="tokens_first")
    pools = [torch.randn(2, 8, 4, 2, 4) for _ in range(3)]
    layer_events = LayerEvents(3, 2)
    engine = CopyEngine(CpuDevice())
    kv = PagedKV(
        pools,
        layout,
        pool_format="planes_first",
        block_size=4,
        block_table=[5, 1],
        copy_engine=engine,
        layer_events=layer_events,
    )
    slots = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(2)]
    kv.from_slots([0], slots[:1])
    assert not layer_events.wait_layer(0, timeout=0.0)
    kv.from_slots([4], slots[1:])
    assert layer_events.complete
    for layer in range(3):
        assert layer_events.wait_layer(layer, timeout=0.0)
    assert not pools[2][:, [5, 1]].any()
    assert pools[2][:, 0].any()


def test_a_device_copies_no_token_that_lies_in_pieces() -> None:
    layout = KVLayout.dense(1, 2, 4, "float32", 4, token_order="tokens_first")
    apart = [[torch.empty(2, 8, 4).transpose(0, 1)] * 2]
    DenseKV(apart, layout)
    with pytest.raises(
        ValueError, match=r"layers\[0\]: a token's elements must be contiguous"
    ):
        DenseKV(apart, layout, copy_engine=CopyEngine(CpuDevice()))


def test_what_is_nowhere_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        CopyEngine(CpuDevice()).store(
            table_of([64]), np.array([[3, -1]]), [np.zeros(128, np.uint8)]
        )


def test_an_empty_call_does_nothing() -> None:
    layout = KVLayout.dense(1, 1, 4, "float32", 4)
    kv = DenseKV(
        [[torch.empty(1, 0, 4)] * 2], layout, copy_engine=CopyEngine(CpuDevice())
    )
    kv.to_slots([], [])
    kv.from_slots([], [])
    assert kv.num_tokens == 0
    assert kv.device_index is None
