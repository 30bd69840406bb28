"""The figures of a block manager: the time of copies, what they saved, and Prometheus' form."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagoda.blocks.block_metrics import BlockMetrics
from tests.blocks.kit import BLOCK, Engine, prompt


def shown(one: Engine, **labels: str) -> dict[tuple[str, ...], float]:
    """Return the samples by name and values of labels, as Prometheus' parser reads them."""
    metrics = BlockMetrics(labels)
    registry = CollectorRegistry()
    registry.register(metrics)
    metrics.update(one.manager.stats())
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert len(family.documentation) > 10
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def went_down_and_up(engine: Engine) -> None:
    """Compute 4 blocks, evict them to the host, and let another request load 3 of them back."""
    engine.leave("a", prompt(16))
    engine.demoted(8)
    engine.add("b", prompt(16))
    plan = engine.admit("b").plan
    assert plan is not None
    assert len(plan.copies) == 3
    time.sleep(0.02)
    engine.end(plan)


def test_the_time_of_copies_is_from_plan_to_report(hosted: Engine) -> None:
    went_down_and_up(hosted)
    stats = hosted.manager.stats()
    assert stats["down_moves"] == 1
    assert stats["down_blocks"] == 4
    assert stats["up_moves"] == 1
    assert stats["up_blocks"] == 3
    assert stats["up_seconds"] >= 0.02
    assert stats["down_seconds"] > 0


def test_copies_that_failed_are_no_measurement(hosted: Engine) -> None:
    hosted.leave("a", prompt(16))
    plan = hosted.manager.demote(8)
    assert plan is not None
    hosted.manager.failed(plan.ticket)
    stats = hosted.manager.stats()
    assert stats["down_moves"] == 0
    assert stats["down_seconds"] == 0


def test_what_a_manager_loads_is_counted_for_its_model_and_tenant(
    hosted: Engine,
) -> None:
    assert hosted.cache is not None
    went_down_and_up(hosted)
    hosted.cache.observe_prefill(1000, 100.0)
    (tenant,) = hosted.cache.stats()["tenants"]
    assert tenant["tenant"] == "none"
    assert tenant["loaded_tokens"] == 3 * BLOCK
    seconds = float(str(tenant["load_seconds"]))
    assert seconds == pytest.approx(
        hosted.manager.stats()["up_seconds"], abs=1e-5
    )
    assert tenant["saved_seconds"] == pytest.approx(3 * BLOCK * 0.1 - seconds)


def test_every_figure_is_shown(hosted: Engine) -> None:
    went_down_and_up(hosted)
    found = shown(hosted)
    stats = hosted.manager.stats()
    states = ("free", "cached", "in_use", "in_flight")
    assert [found["pagoda_blocks", state] for state in states] == [
        stats[state] for state in states
    ]
    assert sum(found["pagoda_blocks", state] for state in states) == 8
    assert found["pagoda_blocks_copied_total", "up"] == 3
    assert found["pagoda_blocks_copied_total", "down"] == 4
    assert found["pagoda_blocks_copy_seconds_count", "up"] == 1
    assert found["pagoda_blocks_copy_seconds_sum", "up"] == stats["up_seconds"]
    assert found["pagoda_blocks_found_tokens_total", "host"] == 3 * BLOCK
    assert found[("pagoda_blocks_demoted_total",)] == 4
    values = set(found.values())
    assert {float(value) for value in stats.values()} - {8.0} <= values | {0.0}


def test_a_label_tells_managers_apart(bare: Engine) -> None:
    assert shown(bare, engine="7")["pagoda_blocks", "7", "free"] == 8


def test_before_the_first_figures_there_is_nothing() -> None:
    assert not list(BlockMetrics().collect())


@pytest.mark.slow
def test_any_thread_may_collect_while_the_scheduler_works(
    hosted: Engine,
) -> None:
    metrics = BlockMetrics()
    ended = threading.Event()
    errors: list[Exception] = []

    def scrape() -> None:
        while not ended.is_set():
            try:
                list(metrics.collect())
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for number in range(50):
        hosted.leave(str(number), prompt(16, number))
        metrics.update(hosted.manager.stats())
    ended.set()
    thread.join(60)
    assert not errors


def test_blocks_need_no_prometheus_client() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import pagoda.blocks\n"
        "try:\n    import pagoda.blocks.block_metrics\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "pip install 'pagodakv[metrics]'" in done.stdout
