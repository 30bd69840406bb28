"""Engines with KV on the GPU: the same text with and without the cache, the example engine, vLLM's
two halves.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda.connectors.transformers.model_checks import kv_argument
from tests.gpu.rig import Rig

CHUNK = 16
NEW = 32
ROOT = Path(__file__).parents[2]


@pytest.fixture
def house(shm_root: Path) -> Iterator[Path]:
    pytest.importorskip(
        "transformers",
        reason="transformers cannot be imported: pip install transformers",
    )
    precise = torch.get_float32_matmul_precision()
    # in TF32 two orders of adding choose two tokens
    torch.set_float32_matmul_precision("highest")
    yield shm_root
    torch.set_float32_matmul_precision(precise)


def _text(model, ids, mask=None, **options) -> torch.Tensor:
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "attention_mask": mask,
        **options,
    }
    return model.generate(ids, **options)[:, ids.shape[1] :]


def _from_own_kv(model, ids, columns: int, mask=None) -> torch.Tensor:
    """What the model says if it begins from its own KV of the first columns: what a hit must say to
    the bit.

    In half precision that need not be what it says from nothing: prompts of another length are
    added up otherwise.
    """
    kv = model.generate(
        ids,
        max_new_tokens=1,
        do_sample=False,
        attention_mask=mask,
        return_dict_in_generate=True,
    ).past_key_values
    for layer in kv.layers:
        layer.keys, layer.values = (
            layer.keys[:, :, :columns].clone(),
            layer.values[:, :, :columns].clone(),
        )
    return _text(model, ids, mask, **kv_argument(model, kv))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_text_stored_and_hit(
    rig: Rig, house: Path, seed: int, rows: int, dtype: str
) -> None:
    """One prompt, or a batch whose rows are padded on the left."""
    from pagoda.config import Config
    from pagoda.connectors.transformers import CachedModel
    from tests.e2e.tiny import llama, prompt

    model = llama(dtype=dtype).to(rig.device)
    lengths = [131, 118, 131][:rows]
    ids = torch.zeros((rows, 131), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 131 - length :] = prompt(length, seed=seed % 10**6 + row)[0]
        mask[row, 131 - length :] = 1
    ids = ids.to(rig.device)
    mask = mask.to(rig.device)
    plain = _text(model, ids, mask)
    config = Config(
        chunk_tokens=CHUNK,
        host_size="64MiB",
        host_path=str(house / "host"),
        worth_it=False,
        deadline_seconds=30.0,
    )
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask}
    with CachedModel(model, config) as cached:
        assert torch.equal(cached.generate(ids, **options)[:, 131:], plain)
        assert cached.last is not None
        assert cached.last.columns == 0
        for _ in range(2):
            out = cached.generate(ids, **options)[:, 131:]
            columns = cached.last.columns
            assert columns == min(
                131 - n + (n - 1) // CHUNK * CHUNK for n in lengths
            )
            assert torch.equal(out, _from_own_kv(model, ids, columns, mask))
            if dtype == "float32":
                assert torch.equal(out, plain)
            else:
                print(
                    f"{dtype}: {int((out == plain).sum())} of {out.numel()} tokens as from nothing"
                )


def test_the_paged_engine_answers_right_from_all_tiers(rig: Rig) -> None:
    """Blocks on the device, few of them, and little host memory: all tiers are used, and each
    answer is compared.
    """
    pytest.importorskip(
        "transformers",
        reason="transformers cannot be imported: pip install transformers",
    )
    command = [
        sys.executable,
        "-m",
        "examples.paged_engine",
        "--verify",
        "--device",
        rig.device.type,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "identical" in done.stdout
    assert "different: 0" in done.stdout


def test_both_halves_of_the_vllm_connector(
    rig: Rig, shm_root: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own values, KV memory on the device, no engine."""
    pytest.importorskip(
        "vllm", reason="vLLM cannot be imported: pip install vllm"
    )
    from tests.vllm import halves

    made = halves.memory
    monkeypatch.setattr(
        halves,
        "memory",
        lambda seed=0: [plane.to(rig.device) for plane in made(seed)],
    )
    both = halves.Halves(halves.config_of(shm_root / "host"), seed=seed)
    try:
        needed = halves.WINDOW // halves.CHUNK
        blocks = both.store_prompt("p", 6)
        kept = {group: both.bytes_of(ids) for group, ids in blocks.items()}
        both.blank()
        context = both.request("loads", "p", 6)
        assert both.hit(context, "p", 6) == 6
        full = list(range(100, 100 + 6 * halves.EACH))
        sliding = list(range(150, 150 + needed * halves.EACH))
        wanted = {
            halves.FULL: halves.keys("p", halves.FULL, 6),
            halves.SLIDING: halves.keys("p", halves.SLIDING, 6)[-needed:],
        }
        both.load(context, wanted, {halves.FULL: full, halves.SLIDING: sliding})
        assert torch.equal(both.bytes_of(full), kept[halves.FULL])
        assert torch.equal(
            both.bytes_of(sliding),
            kept[halves.SLIDING][:, -needed * halves.EACH :],
        )
        others = [
            block
            for block in range(len(both.planes[0]))
            if block not in full + sliding
        ]
        assert not both.bytes_of(others).any()
        both.finish(context)
    finally:
        both.close()
