"""Transformers models on a GPU: the same text as without a cache, from the host layer by layer and
from the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch cannot be imported")
pytest.importorskip(
    "transformers",
    reason="transformers cannot be imported: pip install transformers",
)

from pagoda.connectors.transformers import CachedModel  # noqa: E402
from pagoda.connectors.transformers.layerwise import LayerLoads  # noqa: E402
from tests.e2e.tiny import deepseek, generated, llama, prompt, qwen  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device"
)

DEVICE = "cuda"
CHUNK = 16
NEW = 24
IDS = prompt(300)
WHOLE = 288  # tokens of whole chunks, the last token left to compute


class Counted(LayerLoads):
    """Counts the loads that went layer by layer; `rob` is called before each begins."""

    def __init__(self, rob: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.begun = 0
        self._rob = rob

    def begin(self, *args):
        self._rob()
        load = super().begin(*args)
        self.begun += load is not None
        return load


@pytest.fixture
def opened(shm_root: Path, tmp_path: Path):
    """Opens models on one store."""
    made: list[CachedModel] = []

    def open(model, **options) -> CachedModel:
        settings = {
            "chunk_tokens": CHUNK,
            "host_size": "64MiB",
            "host_path": str(shm_root / "host"),
            "disk_size": "64MiB",
            "disk_path": str(tmp_path / "disk"),
            "deadline_seconds": 20.0,
            "worth_it": False,
        }
        made.append(CachedModel(model, **{**settings, **options}))
        made[-1]._loads = Counted()
        return made[-1]

    yield open
    for cached in made:
        cached.close()


def text(cached: CachedModel, ids=IDS, **kwargs) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return cached.generate(ids.to(cached.model.device), **options)[
        :, ids.shape[1] :
    ].tolist()


def plain(model, ids=IDS) -> list[list[int]]:
    return generated(model, ids.to(model.device), NEW)


@pytest.mark.parametrize("build", [llama, qwen, deepseek])
def test_the_same_text_from_everywhere(
    build: Callable, opened, shm_root: Path
) -> None:
    model = build().to(DEVICE)
    want = plain(model)
    cached = opened(model)
    for columns, begun in ((0, 0), (WHOLE, 1), (WHOLE, 2)):
        assert text(cached) == want
        assert cached.last.columns == columns
        assert cached._loads.begun == begun
    assert cached.last.hit.by_tier == {"host": WHOLE}
    batch = torch.cat([IDS, torch.cat([IDS[:, :40], prompt(260, seed=3)], 1)])
    assert text(cached, batch) == plain(model, batch)
    assert cached.last.columns == 32
    assert cached.cache.flush(60.0)
    cached.close()
    cached = opened(model, host_path=str(shm_root / "another"))
    for tier, begun in (("disk", 0), ("host", 1)):
        assert text(cached) == want
        assert cached.last.hit.by_tier == {tier: WHOLE}
        assert cached._loads.begun == begun


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_comes_back_bit_by_bit(dtype: str, opened) -> None:
    model = llama(dtype=dtype).to(DEVICE)
    ids = IDS.to(DEVICE)
    with torch.inference_mode():
        computed = model(input_ids=ids, use_cache=True).past_key_values
    cached = opened(model)
    assert cached.store(ids, computed)[0].num_chunks == WHOLE // CHUNK
    found = cached.prefix(ids).past_key_values
    for got, want in zip(found.layers, computed.layers, strict=True):
        for a, b in ((got.keys, want.keys), (got.values, want.values)):
            assert a.device == b.device
            assert torch.equal(
                a.view(torch.int16), b[:, :, :WHOLE].view(torch.int16)
            )


def test_chunks_that_go_before_or_during_a_load(opened) -> None:
    model = llama().to(DEVICE)
    cached = opened(model)
    want = plain(model)
    for rob in (
        cached.cache.clear,
        lambda: threading.Timer(0.0, cached.cache.clear).start(),
    ):
        for _ in range(5):
            text(cached)
            cached._loads = Counted(rob)
            assert text(cached) == want
            cached._loads = Counted()


def test_a_model_that_moves_is_followed(opened) -> None:
    model = llama()
    cached = opened(model)
    want = plain(model)
    assert text(cached) == want
    model.to(DEVICE)
    assert text(cached) == plain(model)
    # its weights are the same
    assert cached.last.columns == WHOLE
    assert cached._loads.begun == 1
    model.to("cpu")
    assert text(cached) == want
    assert cached.last.columns == WHOLE
    assert cached._loads.begun == 1


def test_threads_with_streams_of_their_own_get_the_same_text(opened) -> None:
    model = llama().to(DEVICE)
    cached = opened(model)
    prompts = [prompt(200 + 30 * seed, seed) for seed in range(3)]
    want = [plain(model, ids) for ids in prompts]
    for ids in prompts:
        text(cached, ids)
    torch.cuda.synchronize()

    def go(number: int) -> list[list[int]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return text(cached, prompts[number % 3])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(go, range(12))) == want * 4
    assert cached._loads.begun > 0


def test_computing_is_measured(opened) -> None:
    cached = opened(llama().to(DEVICE))
    # what one call measured is read at the latest by the next but one
    for seed in range(3):
        text(cached, prompt(200, seed))
        torch.cuda.synchronize()
    assert cached.cache.stats()["rates"]["prefill_tokens_per_second"] > 0
