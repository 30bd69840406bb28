"""The first of these tests, and without a GPU the only one: it reports the device of the tests."""

from __future__ import annotations

import pytest

from tests.gpu.ready import ON_CPU, missing, why_not


def test_a_gpu_is_here() -> None:
    if why_not():
        pytest.skip(why_not())
    if missing():
        pytest.fail(
            f"the tests of the GPU need more than this Python has: {missing()}",
            pytrace=False,
        )
    if ON_CPU:
        pytest.skip("PAGODA_TEST_GPU_ON_CPU=1: nothing of this is about a GPU")
    import torch

    from pagoda.slab.cuda_driver import Driver

    name = torch.cuda.get_device_name()
    driver = Driver.load()
    print(f"{name}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    assert driver is not None
    driver.use(torch.cuda.current_device())
