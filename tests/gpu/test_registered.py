"""Slabs registered with the real driver; its stub elsewhere (tests/slab/libcuda_stub.c) is only
strict.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.slab import MemorySlab, pinned
from pagoda.slab.cuda_driver import Driver, DriverError
from pagoda.slab.pinned import check, copying, device_address
from tests.children import in_child
from tests.gpu.ready import ON_CPU

SLOT = 3 << 20
PIECE = 8 << 20  # two slots a piece

pytestmark = pytest.mark.skipif(
    ON_CPU, reason="PAGODA_TEST_GPU_ON_CPU=1: there is no driver"
)


@pytest.fixture
def driver() -> Driver:
    torch.cuda.init()
    found = Driver.load()
    assert found is not None
    found.use(torch.cuda.current_device())
    return found


@pytest.fixture(params=["shared", "private"])
def slab(
    request: pytest.FixtureRequest,
    shm_root: Path,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MemorySlab]:
    """Nine slots of random bytes, all registered."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", PIECE)
    path = shm_root / "slab" if request.param == "shared" else None
    if path is not None:
        path.write_bytes(bytes(9 * SLOT))
    slab = MemorySlab(path, 9, SLOT)
    slab.array[:] = np.random.default_rng().integers(
        0, 256, slab.array.shape, np.uint8
    )
    held = slab.pin(torch.cuda.current_device(), driver=driver)
    assert held is not None
    assert held.wait(60)
    assert held.trouble == ""
    assert slab.pinned_bytes == slab.nbytes
    yield slab
    slab.close(30)
    check()


def copied(driver: Driver, to: int, source: int, nbytes: int) -> None:
    """Copy by the driver, and wait for it."""
    driver.copy(to, source, nbytes, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def test_every_slot_goes_there_and_back(slab: MemorySlab, driver: Driver) -> None:
    device = torch.zeros(SLOT, dtype=torch.uint8, device="cuda")
    for slot in range(slab.slots):
        view = slab.view(slot)
        fresh = np.random.default_rng(slot).integers(0, 256, SLOT, np.uint8)
        place = device_address(view.ctypes.data, SLOT)
        assert place is not None
        copied(driver, device.data_ptr(), place, SLOT)
        assert (device.cpu().numpy() == view).all()
        device.copy_(torch.from_numpy(fresh))
        copied(driver, place, device.data_ptr(), SLOT)
        assert (view == fresh).all()


def test_a_copy_over_the_border_of_two_pieces(
    slab: MemorySlab, driver: Driver
) -> None:
    """Slots are never placed like this. `device_address` promises it for pieces contiguous in both
    memories.
    """
    device = torch.zeros(SLOT, dtype=torch.uint8, device="cuda")
    begin = 2 * SLOT - SLOT // 2
    place = device_address(slab.array.ctypes.data + begin, SLOT)
    if place is None:
        pytest.skip("the device sees the pieces apart")
    copied(driver, device.data_ptr(), place, SLOT)
    assert (
        device.cpu().numpy() == slab.array.reshape(-1)[begin : begin + SLOT]
    ).all()


def test_a_refusal_leaves_no_error_for_torch(
    slab: MemorySlab, driver: Driver
) -> None:
    with pytest.raises(DriverError) as caught:
        driver.register(slab.array.ctypes.data, SLOT)
    assert caught.value.code == 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    torch.cuda.synchronize()
    assert int(torch.ones(1000, device="cuda").sum()) == 1000


def test_what_is_closed_can_be_registered_again(
    slab: MemorySlab, driver: Driver
) -> None:
    array = slab.array
    with copying():
        assert device_address(array.ctypes.data, SLOT) is not None
    slab.close(30)
    assert device_address(array.ctypes.data, 1) is None
    again = pinned.pin(
        array, torch.cuda.current_device(), driver=driver, background=False
    )
    assert again is not None
    assert again.nbytes == array.nbytes
    assert again.close(30)


def test_a_forked_child_changes_nothing(slab: MemorySlab, driver: Driver) -> None:
    def work() -> None:
        assert device_address(slab.array.ctypes.data, 1) is None
        slab.view(0)[:] = 7
        slab.close(1)

    in_child(work)
    device = torch.zeros(SLOT, dtype=torch.uint8, device="cuda")
    place = device_address(slab.array.ctypes.data, SLOT)
    assert place is not None
    copied(driver, device.data_ptr(), place, SLOT)
    assert bool((device == 7).all())
