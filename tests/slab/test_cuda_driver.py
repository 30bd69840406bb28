"""The driver's calls as NVIDIA declares them, on a stub of its library."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.slab import PAGE_BYTES, aligned
from pagoda.slab.cuda_driver import Driver, DriverError
from tests.children import in_child
from tests.slab.libcuda import OUT_OF_MEMORY, Stub

SHIFT = 1 << 44


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path)
    yield stub
    assert stub.fault == ""


def test_no_library_no_symbols_no_gpu_no_driver(
    tmp_path: Path, stub: Stub
) -> None:
    assert Driver.load(str(tmp_path / "absent.so")) is None
    (tmp_path / "text.so").write_text("not a library")
    assert Driver.load(str(tmp_path / "text.so")) is None
    assert Driver.load("libc.so.6") is None
    stub.library.stub_init(0, 0)
    assert Driver.load(str(stub.path)) is None
    stub.library.stub_init(100, 2)  # CUDA_ERROR_NO_DEVICE
    assert Driver.load(str(stub.path)) is None


def test_what_is_registered_is_seen_where_the_driver_says(stub: Stub) -> None:
    driver = stub.begin()
    array = aligned(3 * PAGE_BYTES)
    stub.library.stub_shift(SHIFT, 0)
    driver.use(0)
    address = array.ctypes.data
    assert driver.register(address, array.nbytes) == address + SHIFT
    assert stub.pieces == [(address, array.nbytes)]
    driver.unregister(address)
    assert stub.registered == 0


def test_a_copy_goes_by_the_device_s_address(stub: Stub) -> None:
    driver = stub.begin()
    array = aligned(2 * PAGE_BYTES)
    device = np.zeros(PAGE_BYTES, np.uint8)
    stub.library.stub_shift(SHIFT, 0)
    driver.use(1)
    array[:] = np.arange(array.nbytes) % 251
    place = driver.register(array.ctypes.data, PAGE_BYTES)
    driver.copy(device.ctypes.data, place + 5, 1000, 0)
    assert (device[:1000] == array[5:1005]).all()
    assert not device[1000:].any()
    driver.copy(place, device.ctypes.data, 7, 3 << 40)  # a stream is a pointer
    assert (array[:7] == device[:7]).all()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        # the second page is not registered
        driver.copy(device.ctypes.data, place + 4000, 1000, 0)
    driver.unregister(array.ctypes.data)


def test_errors_have_a_code_and_nvidia_s_name(stub: Stub) -> None:
    driver = stub.begin()
    array = aligned(PAGE_BYTES)
    with pytest.raises(
        DriverError, match=r"cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(101\)"
    ):
        driver.use(5)
    driver.use(0)
    stub.library.stub_refuse(1, OUT_OF_MEMORY)
    with pytest.raises(DriverError) as caught:
        driver.register(array.ctypes.data, array.nbytes)
    assert caught.value.code == OUT_OF_MEMORY
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    stub.library.stub_refuse(1, 9999)
    with pytest.raises(DriverError, match="an unknown error"):
        driver.register(array.ctypes.data, array.nbytes)


def test_each_device_s_context_is_retained_once(stub: Stub) -> None:
    driver = stub.begin()
    had = list[bool]()
    assert stub.begin() is driver

    def work(device_index: int) -> None:
        driver.use(device_index)
        had.append(bool(stub.library.stub_has_context()))

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert had == [True] * 8
    assert stub.library.stub_retained() == 2
    assert not stub.library.stub_has_context()  # other threads do not change


def test_a_forked_child_never_calls_it(stub: Stub) -> None:
    driver = stub.begin()
    array = aligned(PAGE_BYTES)
    driver.use(0)
    address = array.ctypes.data
    driver.register(address, PAGE_BYTES)

    def work() -> None:
        for call in (
            lambda: driver.use(0),
            lambda: driver.register(address, PAGE_BYTES),
            lambda: driver.unregister(address),
            lambda: driver.copy(address, address, 1, 0),
        ):
            with pytest.raises(DriverError, match="forked child"):
                call()
        assert Driver.load(str(stub.path)) is None
        assert stub.fault == ""

    in_child(work)
    driver.unregister(address)


def test_a_child_of_a_process_that_had_not_begun_may_begin(stub: Stub) -> None:
    def work() -> None:
        stub.begin().use(0)

    in_child(work)


def test_it_needs_no_torch() -> None:
    code = "import sys, pagoda.slab.pinned; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_streams_are_our_own(stub: Stub) -> None:
    driver = stub.begin()
    driver.use(0)
    streams = [driver.stream() for _ in range(100)]
    assert len(set(streams)) == 100
    assert 0 not in streams


def test_captures_of_other_threads_are_let_be_and_the_mode_comes_back(
    stub: Stub,
) -> None:
    driver = stub.begin()
    with pytest.raises(KeyError), driver.relaxed_capture():
        assert stub.library.stub_capture_mode() == 2
        with driver.relaxed_capture():
            assert stub.library.stub_capture_mode() == 2
        raise KeyError
    assert stub.library.stub_capture_mode() == 0
