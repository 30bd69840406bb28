"""The counts of both halves, all the way that vLLM sends them: log line and Prometheus. No
engine.
"""

from __future__ import annotations

import ast
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    ModelRunnerOutput,
)

import pagoda.connectors.vllm.connector_stats as stats_module
from pagoda.connectors.vllm import register
from pagoda.connectors.vllm.connector_stats import (
    COUNTERS,
    TIERS,
    PagodaPromMetrics,
    PagodaStats,
)

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["a-model", "0"], 1: ["a-model", "1"]}


class Counting:
    """The part of a connector that vLLM's metrics look at, found by module path as vLLM finds
    it.
    """

    def __init__(
        self, vllm_config: object, role: object, kv_cache_config: object
    ) -> None:
        """vLLM looks at the signature only."""

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, object] | None = None
    ) -> PagodaStats:
        return PagodaStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: object) -> PagodaPromMetrics:
        return PagodaPromMetrics(*args)


@pytest.fixture
def config() -> Iterator[SimpleNamespace]:
    transfer = KVTransferConfig(
        kv_connector="Counting",
        kv_connector_module_path="counting_connector",
        kv_role="kv_both",
    )
    sys.modules["counting_connector"] = sys.modules[__name__]
    try:
        yield SimpleNamespace(kv_transfer_config=transfer)
    finally:
        del sys.modules["counting_connector"]
        unregister_vllm_metrics()


def counted(**numbers: float) -> PagodaStats:
    stats = PagodaStats()
    for name, number in numbers.items():
        stats.count(name, number)
    return stats


def of_a_rank(stats: PagodaStats | None) -> ModelRunnerOutput:
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    output.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
    return pickle.loads(pickle.dumps(output))  # ranks are processes


def one_step(
    ranks: list[PagodaStats | None], scheduler: PagodaStats | None
) -> dict[str, object] | None:
    """What the serving process gets of one step: ranks joined by the executor, then the scheduler's
    own.
    """
    output = KVOutputAggregator(len(ranks)).aggregate(
        [of_a_rank(each) for each in ranks]
    )
    stats: object = output.kv_connector_output.kv_connector_stats
    if scheduler is not None and not scheduler.is_empty():
        stats = stats.aggregate(scheduler) if stats is not None else scheduler
    payload = stats.to_dict() if stats else None
    sent = msgspec.msgpack.encode(SchedulerStats(kv_connector_stats=payload))
    return msgspec.msgpack.decode(sent, type=SchedulerStats).kv_connector_stats


def value(name: str, engine: int = 0) -> float | None:
    labels = {"model_name": "a-model", "engine": str(engine)}
    return REGISTRY.get_sample_value(f"vllm:pagoda_{name}_total", labels)


def test_counts_add_up_and_are_taken_once() -> None:
    stats = counted(lookups=2, load_seconds=0.25)
    stats.count("lookups", 1)
    stats.count("refused_chunks", 0)
    taken = stats.take()
    assert taken is not None
    assert taken.data == {"lookups": 3, "load_seconds": 0.25}
    assert stats.is_empty()
    assert stats.take() is None
    stats.count("lookups", 5)
    assert taken.data["lookups"] == 3  # a returned object is not changed any more
    assert taken.aggregate(stats) is taken
    assert taken.data["lookups"] == 8
    stats.reset()
    assert stats.is_empty()
    assert not taken.is_empty()


def test_what_is_no_count_is_left_out() -> None:
    assert counted(
        lookups=0, asked_tokens=-3, load_seconds=float("nan")
    ).is_empty()
    stats = counted(
        loaded_bytes=np.int64(3 << 40),
        loaded_tokens=np.uint32(7),
        load_seconds=np.float64(0.5),
    )
    assert stats.data == {
        "loaded_bytes": 3 << 40,
        "loaded_tokens": 7,
        "load_seconds": 0.5,
    }
    assert [type(number) for number in stats.data.values()] == [int, int, float]
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
        == stats.data
    )


def test_threads_lose_no_count() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        _count_by_threads()
    finally:
        sys.setswitchinterval(interval)


def _count_by_threads() -> None:
    stats = PagodaStats()
    taken = PagodaStats()

    def count() -> None:
        for _ in range(50_000):
            stats.count("saved_chunks", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.aggregate(stats.take() or PagodaStats())
    taken.aggregate(stats.take() or PagodaStats())
    assert taken.data == {"saved_chunks": 200_000}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_halves_are_added_whichever_has_something_to_report(
    ranks: int, config: object
) -> None:
    prom = KVConnectorProm(config, LABELS, ENGINES)
    line = KVConnectorLogging(config.kv_transfer_config)
    bytes_all = 0
    lookups = 0
    for step in range(12):  # each may be silent in any step
        workers = [
            counted(loaded_bytes=100 + rank) if (step + rank) % 3 else None
            for rank in range(ranks)
        ]
        scheduler = (None, PagodaStats(), counted(lookups=1))[step % 4 % 3]
        bytes_all += sum(
            each.data["loaded_bytes"] for each in workers if each is not None
        )
        lookups += (
            scheduler.data.get("lookups", 0) if scheduler is not None else 0
        )
        payload = one_step(workers, scheduler)
        if payload:
            line.observe(payload)
        if payload is not None:
            prom.observe(payload, engine_idx=step % 2)
    assert (
        sum(value("loaded_bytes", engine) or 0 for engine in ENGINES)
        == bytes_all
        > 0
    )
    assert sum(value("lookups", engine) or 0 for engine in ENGINES) == lookups > 0
    logged: list[str] = []
    line.log(lambda _, text: logged.append(text))
    assert logged == [f"lookups={lookups}, loaded_GB={round(bytes_all / 1e9, 3)}"]
    line.log(lambda *_: logged.append("again"))
    assert len(logged) == 1


def test_the_log_line_is_for_people() -> None:
    stats = counted(
        lookups=3,
        asked_tokens=9_000,
        hit_tokens_host=6_000,
        hit_tokens_disk=1_500,
        loaded_tokens=7_500,
        loaded_bytes=5_000_000_000,
        load_seconds=0.5,
        saved_chunks=4,
        saved_bytes=2_000_000,
    )
    assert stats.reduce() == {
        "hit_rate": 0.833,
        "lookups": 3,
        "asked_tokens": 9_000,
        "hit_tokens_host": 6_000,
        "hit_tokens_disk": 1_500,
        "loaded_tokens": 7_500,
        "loaded_GB": 5.0,
        "load_GB_per_second": 10.0,
        "saved_chunks": 4,
        "saved_GB": 0.002,
    }
    assert PagodaStats().reduce() == {}
    assert counted(asked_tokens=10).reduce() == {
        "hit_rate": 0.0,
        "asked_tokens": 10,
    }
    assert counted(load_seconds=1.0).reduce() == {"load_GB_per_second": 0.0}


def test_every_counter_is_shown_from_the_start_and_a_second_engine_finds_no_names_taken(
    config: object,
) -> None:
    KVConnectorProm(config, LABELS, ENGINES).observe(counted(lookups=7).to_dict())
    assert {name: value(name, 1) for name in COUNTERS} == dict.fromkeys(
        COUNTERS, 0.0
    )
    assert value("lookups") == 7
    text = generate_latest(REGISTRY).decode()
    assert (
        'vllm:pagoda_hit_tokens_disk_total{engine="1",model_name="a-model"} 0.0'
        in text
    )
    # what vLLM does before it registers those of another engine
    unregister_vllm_metrics()
    assert value("lookups") is None
    KVConnectorProm(config, LABELS, ENGINES)
    assert value("lookups") == 0


def test_hits_have_their_tier_as_a_label_too(config: object) -> None:
    KVConnectorProm(config, LABELS, ENGINES).observe(
        counted(
            hit_tokens_host=7, hit_tokens_disk=2, hit_tokens_peers=3
        ).to_dict(),
        1,
    )
    labels = {"model_name": "a-model", "engine": "1"}
    by_tier, old_name = (
        [
            REGISTRY.get_sample_value(
                f"vllm:pagoda_{name}_total", {**labels, "tier": tier}
            )
            for tier in TIERS
        ]
        for name in ("found_tokens", "hit_tokens")
    )
    assert old_name == by_tier
    assert dict(zip(TIERS, by_tier, strict=True)) == {
        "host": 7,
        "disk": 2,
        "peers": 3,
        "remote": 0,
    }
    # as ever
    assert [value(f"hit_tokens_{tier}", 1) for tier in TIERS] == by_tier


def test_counts_of_another_version_do_no_harm(config: object) -> None:
    metrics = PagodaPromMetrics(
        config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        LABELS,
        ENGINES,
    )
    metrics.observe({"lookups": 2, "unknown": 5, "saved_chunks": -1})
    metrics.observe({"lookups": 2}, engine_idx=7)
    assert value("lookups") == 2
    assert value("saved_chunks") == 0
    assert counted(unknown=5).reduce() == {"unknown": 5}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("below", [False, True])
def test_counts_of_a_model_of_either_kind(
    config: SimpleNamespace, below: bool, hybrid: bool
) -> None:
    """By its config. What a model whose config says the other kind counts is left out, and does no
    harm.
    """
    config.scheduler_config = SimpleNamespace(
        disable_hybrid_kv_cache_manager=False
    )
    config.model_config = SimpleNamespace(
        is_hybrid=False,
        get_sliding_window=lambda: 512 if hybrid else None,
        attention_chunk_size=None,
    )
    ours = {"kv_connector": "PagodaConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"connectors": [ours]}}
    config.kv_transfer_config = KVTransferConfig(
        **(
            ours
            if not below
            else ours | {"kv_connector": "MultiConnector"} | extra
        )
    )
    register()
    offloaded = OffloadingConnectorStats()
    offloaded.increase_counter("vllm:pagoda_refused_chunks", 3)
    metrics = KVConnectorProm(config, LABELS, ENGINES)
    line = KVConnectorLogging(config.kv_transfer_config)
    said: list[str] = []
    for counts in (counted(lookups=7), offloaded):
        sent = (
            {"PagodaConnector": counts.to_dict()} if below else counts.to_dict()
        )
        metrics.observe(sent)
        line.observe(sent)
        line.log(lambda _, text: said.append(text))
    assert (value("lookups"), value("refused_chunks")) == (
        (None, 3) if hybrid else (7, 0)
    )
    assert ["7" in said[0], "3" in said[1]] == [True, True]


def test_every_name_that_is_counted_is_a_counter() -> None:
    counted_names = set()
    for path in Path(stats_module.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "count"
                and "stats" in ast.unparse(call.func.value)
                and isinstance(call.args[0], ast.Constant)
            ):
                counted_names.add(call.args[0].value)
    assert "lookups" in counted_names <= COUNTERS.keys()


def test_an_empty_step_says_nothing() -> None:
    assert one_step([None], None) is None
    assert one_step([None, None], PagodaStats()) is None
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None
