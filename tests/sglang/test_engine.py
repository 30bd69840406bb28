"""SGLang's own radix cache and controller over PagodaHiCache: every page that comes back is
compared.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sglang.engines import PAGE, Engine, Outcome, Shape, storage_config
from tests.sglang.prompts import Prompts

LAYOUTS = ("page_first_direct", "layer_first")


def _disk(shm_root: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return storage_config(
        shm_root, disk_path=str(tmp_path / "disk"), disk_size="64MiB", **options
    )


def _right(*outcomes: Outcome) -> None:
    wrong = [line for outcome in outcomes for line in outcome.wrong]
    assert not wrong, wrong[:5]


def _tokens(seed: int, count: int = 20 * PAGE) -> list[int]:
    return [(seed * 7919 + i * i) % 30_000 for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_evicted_everywhere_comes_back_identical(
    shm_root: Path, layout: str
) -> None:
    """Device and host pool are emptied, so each page is from the storage."""
    with Engine(storage_config(shm_root), Shape(layout=layout)) as engine:
        assert engine.request(_tokens(1)).computed == 20 * PAGE
        engine.forget()
        again = engine.request([*_tokens(1), 7, 8, 9])
        assert again.stored == 20 * PAGE
        assert again.computed == 0
        assert again.pages == 20
        _right(again)


@pytest.mark.parametrize(
    ("layout", "prefixes"), [(LAYOUTS[0], True), (LAYOUTS[1], False)]
)
def test_random_prompts_with_evictions_on_all_levels(
    shm_root: Path, layout: str, prefixes: bool
) -> None:
    """The device pool has 32 pages, the host pool 64: both evict all the time."""
    extra = storage_config(shm_root, hicache_storage_pass_prefix_keys=prefixes)
    with Engine(extra, Shape(layout=layout)) as engine:
        prompts = Prompts(3)
        outcomes = [engine.request(next(prompts)) for _ in range(150)]
        _right(*outcomes)
        assert sum(outcome.stored for outcome in outcomes) > 100 * PAGE
        assert (
            sum(outcome.host for outcome in outcomes)
            > 0
            < sum(outcome.device for outcome in outcomes)
        )


def test_a_second_engine_and_a_restart_find_what_the_first_stored(
    shm_root: Path,
) -> None:
    """The host tier outlives the engine."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.settle()
    with Engine(storage_config(shm_root)) as engine:
        found = engine.request(_tokens(1))
        assert found.stored == 20 * PAGE
        assert found.computed == 0
        _right(found)


def test_what_many_prompts_begin_with_outlives_their_ends(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays in SGLang's own pools, so the storage is not asked for it while their ends fill the
    host tier.
    """
    begin = _tokens(1, 8 * PAGE)
    prompts = [begin + _tokens(2 + number, 6 * PAGE) for number in range(40)]
    extra = storage_config(shm_root, host_size="1MiB")
    with Engine(extra) as engine:
        for prompt in prompts:
            engine.request(prompt)
            engine.settle()
    assert "pass_prefix_keys" not in caplog.text
    with Engine({**extra, "hicache_storage_pass_prefix_keys": False}) as engine:
        found = engine.request(prompts[-1])
        assert found.stored == 14 * PAGE
        assert found.computed == 0
        _right(found)
        engine.request(_tokens(99))
        engine.settle()
    assert caplog.text.count("pass_prefix_keys") == 1


def test_after_host_memory_is_wiped_the_disk_has_it(
    shm_root: Path, tmp_path: Path
) -> None:
    """As after a reboot."""
    with Engine(_disk(shm_root, tmp_path)) as engine:
        engine.request(_tokens(1))
        engine.settle()
    shutil.rmtree(shm_root / "host")
    with Engine(_disk(shm_root, tmp_path)) as engine:
        found = engine.request(_tokens(1))
        assert found.stored == 20 * PAGE
        assert found.computed == 0
        _right(found)


def test_two_engines_at_once_share(shm_root: Path) -> None:
    """They take turns, and each finds what the other has stored."""
    with (
        Engine(storage_config(shm_root)) as one,
        Engine(storage_config(shm_root)) as other,
    ):
        prompts = Prompts(5)
        outcomes = list[Outcome]()
        for _ in range(40):
            prompt = next(prompts)
            outcomes.append(one.request(prompt))
            one.settle()
            outcomes.append(other.request(prompt))
            # SGLang asks only after a prefix that its own host pool has, too
            other.settle()
            assert not outcomes[-1].computed
        _right(*outcomes)


def test_aborted_requests_leave_nothing_wrong(shm_root: Path) -> None:
    """An abort may come while pages are on their way into the host pool."""
    with Engine(storage_config(shm_root)) as engine:
        prompts = Prompts(7)
        outcomes = list[Outcome]()
        for number in range(120):
            outcomes.append(engine.request(next(prompts), abort=number % 3 == 2))
            if number % 10 == 9:
                engine.forget()
        _right(*outcomes)
        assert sum(outcome.stored for outcome in outcomes) > 20 * PAGE


def test_a_detached_engine_goes_on_and_hits_once_attached_again(
    shm_root: Path,
) -> None:
    """Detached, the engine continues without us; attached again, it finds what was stored."""
    extra = storage_config(shm_root)
    with Engine(extra) as engine:
        engine.request(_tokens(1))
        engine.detach()
        engine.forget()
        assert engine.request(_tokens(1)).computed == 20 * PAGE
        engine.forget()
        engine.attach(extra)
        found = engine.request(_tokens(1))
        assert found.stored == 20 * PAGE
        assert found.computed == 0
        _right(found)


def test_after_an_attachment_that_was_refused_another_one_succeeds(
    shm_root: Path,
) -> None:
    """SGLang takes a storage that fails too late for attached, and wants it detached first."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.detach()
        for bad in (
            {"host_size": 4096},
            {"host_path": "/proc/pagoda"},
            {"host_sise": "1GiB"},
        ):
            with pytest.raises(AssertionError, match=r"no room|/proc|host_size"):
                engine.attach(storage_config(shm_root, **bad))
        engine.attach(storage_config(shm_root))
        engine.forget()
        assert engine.request(_tokens(1)).stored == 20 * PAGE


def test_tiers_of_a_few_pages_are_never_wrong(
    shm_root: Path, tmp_path: Path
) -> None:
    """Tiers of a few pages evict all the time; what is found is right."""
    extra = storage_config(
        shm_root,
        host_size="256KiB",
        disk_path=str(tmp_path / "disk"),
        disk_size="1MiB",
    )
    with Engine(extra) as engine:
        prompts = Prompts(11)
        outcomes = list[Outcome]()
        for number in range(120):
            outcomes.append(engine.request(next(prompts)))
            if number % 7 == 6:
                engine.forget()
        _right(*outcomes)
        assert sum(outcome.stored for outcome in outcomes) > 0


def test_after_clear_no_earlier_page_hits_and_new_ones_do(shm_root: Path) -> None:
    """`POST /hicache/storage-backend/clear`: the weights may have changed."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.settle()
        assert engine.cache.clear_storage_backend()
        engine.forget()
        assert engine.request(_tokens(1)).computed == 20 * PAGE
        engine.forget()
        assert engine.request(_tokens(1)).stored == 20 * PAGE
    with Engine(storage_config(shm_root)) as engine:
        # of the first weights
        assert engine.request(_tokens(1)).stored == 20 * PAGE


class _Model(torch.nn.Module):
    """Takes any weights."""

    def load_weights(self, named: Any) -> None:
        pass


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang updates the weights of a model with; afterwards this process's weights are those
    of the files.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        WeightUpdater,
    )

    from pagoda.connectors.sglang import weight_updates

    monkeypatch.setattr(weight_updates, "_now", weight_updates.WeightsInMemory())
    nothing: Any = None
    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=nothing,
        custom_weight_loaders={},
        get_model=_Model,
        update_model_fields=nothing,
        recapture_cuda_graph=nothing,
        get_model_runner=nothing,
    )


def _update(updater: Any, how: str) -> None:
    if how == "received":
        assert updater.load_weights_from_distributed([])[0]
    else:
        updater.end_weight_update(run_post_load=True)


@pytest.mark.parametrize("how", ["received", "written by others"])
def test_after_an_update_of_the_weights_no_earlier_page_hits(
    shm_root: Path, updater: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """SGLang does not notify its storage. Until it has flushed its caches it has KV of earlier
    weights, to store, too.
    """
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.settle()
        _update(updater, how)
        engine.forget()
        assert (
            engine.request(_tokens(1)).computed
            == engine.request(_tokens(2)).computed
            == 20 * PAGE
        )
        engine.settle()
        assert "flush_cache" in caplog.text
        engine.cache.reset()  # flush_cache
        engine.allocator.clear()
        for seed in (1, 2):
            assert engine.request(_tokens(seed)).computed == 20 * PAGE
        engine.forget()
        assert engine.request(_tokens(1)).stored == 20 * PAGE
        engine.detach()
        engine.forget()
        # reads the files, whose weights are no longer in use
        engine.attach(storage_config(shm_root))
        assert engine.request(_tokens(1)).stored == 20 * PAGE
        updater.load_weights_from_distributed([])
        engine.cache.reset()
        engine.allocator.clear()
        assert engine.request(_tokens(1)).computed == 20 * PAGE


def test_the_end_of_an_update_that_sglang_has_made_and_flushed_changes_nothing(
    shm_root: Path, updater: Any
) -> None:
    """SGLang flushes after each part of an update, and not after its end."""
    with Engine(storage_config(shm_root)) as engine:
        updater.load_weights_from_distributed([])
        engine.cache.reset()
        updater.end_weight_update(run_post_load=False)
        engine.request(_tokens(1))
        engine.forget()
        assert engine.request(_tokens(1)).stored == 20 * PAGE


# ---- controls: these tests notice what they are to notice


def test_a_zeroed_page_is_noticed(shm_root: Path) -> None:
    """The comparison of this file finds one page of zeros."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.kv.k_buffer[1][PAGE * 3 : PAGE * 5] = 0
        assert engine.request(_tokens(1)).wrong


@pytest.mark.parametrize("salt", ["another request's", None])
def test_another_salt_is_never_found(shm_root: Path, salt: str | None) -> None:
    """Neither the salt of a request nor that of the storage."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1), "one request's")
        engine.forget()
        assert engine.request(_tokens(1), salt).stored == 0
        engine.forget()
        assert engine.request(_tokens(1), "one request's").stored == 20 * PAGE
    with Engine(storage_config(shm_root, salt="another")) as engine:
        assert engine.request(_tokens(1), "one request's").stored == 0


def test_another_dtype_layout_page_weights_or_tenant_is_never_found(
    shm_root: Path,
) -> None:
    """With the same number of bytes a page, so that nothing but the name differs."""
    with Engine(storage_config(shm_root)) as engine:
        engine.request(_tokens(1))
        engine.settle()
    others = [
        Shape(dtype=torch.float16),
        Shape(layout="layer_first"),
        Shape(page=8, head_dim=64),
        Shape(heads=4, head_dim=16),
    ]
    for shape in others:
        with Engine(storage_config(shm_root), shape) as engine:
            assert engine.request(_tokens(1)).stored == 0, shape
    for other in ({"weights": "others"}, {"salt": "of another tenant"}):
        with Engine(storage_config(shm_root, **other)) as engine:
            assert engine.request(_tokens(1)).stored == 0, other
    with Engine(storage_config(shm_root)) as engine:
        assert engine.request(_tokens(1)).stored == 20 * PAGE
