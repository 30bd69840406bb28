"""The real cache, driven by a trace, has the simulator's hits; also across a restart and with two
processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import streams
from pagoda.ledger import admin, table_integrity
from pagoda.ledger.ghost_table import marks_of
from pagoda.policy import OBJECTIVES, prefill_cost
from pagoda.policy.hindsight import _SharedValues
from pagoda_tools.replay import Request, TierSpec, simulate
from pagoda_tools.replay.simulate import simulate_each
from testbed.live_cache import CHUNK, Live, Rate, simulated, tokens_of
from tests.cache.kit import SPAWN
from tests.replay.test_against_ledger import hinted, stream
from tests.replay.traces import sample

CHUNKS = 3000
HALF = 400  # requests, of what is played over a restart
SHARED = 1200  # requests, of what two processes share
TURN = 10  # requests that one of two processes takes while the other waits
PATIENT_SECONDS = 200.0


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return sample()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "most"), [("lru", 700), ("hindsight", 2000)])
def test_the_cache_hits_what_the_simulator_says(
    shm_root: Path, requests: list[Request], policy: str, most: int
) -> None:
    live = Live(shm_root, policy, host=CHUNKS)
    rate = live.play(requests[:most])
    live.close()
    assert rate.share == pytest.approx(
        simulated(requests[:most], CHUNKS, policy), abs=0.005
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hindsight"])
@pytest.mark.parametrize("host", [40, 200])
def test_two_tiers_hit_what_the_simulator_says(
    shm_root: Path, requests: list[Request], policy: str, host: int
) -> None:
    """Also where many prompts are longer than the host tier, and its policy keeps chunks out."""
    live = Live(shm_root, policy, host=host, disk=1000)
    few = requests[:300]
    rate = live.play(few)
    counters = admin.counters(live.ledgers[0])
    live.close()
    outcome = simulate(
        few, [TierSpec("host", host, policy), TierSpec("disk", 1000, policy)]
    )
    assert rate.share == pytest.approx(outcome.hit_rate, abs=0.005)
    served = [
        counters[f"hit_tokens_{tier.name}"] / CHUNK for tier in outcome.tiers
    ]
    assert served == pytest.approx(
        [tier.hits for tier in outcome.tiers], abs=0.005 * rate.accesses
    )


def _watched(
    root: Path, requests: list[Request], host: int
) -> tuple[float, float]:
    """Play requests to a disk of 200 chunks below such a host tier; the hit rate, and how much its
    policy saw.
    """
    live = Live(root, "hindsight", host=host, disk=200)
    rate = live.play(requests)
    ledger = live.ledgers[-1]
    ledger.upkeep_thread.run_once()
    assert admin.counters(ledger)["drop_not_admitted"] > 1000
    live.close()
    return rate.share, float(
        _SharedValues.of(ledger.upkeep_thread.learned).watched.sum()
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_disk_below_learns_what_it_would_learn_alone(shm_root: Path) -> None:
    """Also of prompts that are longer than the host tier, and kept out."""
    prompts = streams.scan_zipf(1, 300, 60, 0.9, 40, chunks=24)
    share, watched = _watched(shm_root / "alone", prompts, 0)
    share_of_pair, watched_of_pair = _watched(shm_root / "below", prompts, 16)
    assert watched_of_pair == pytest.approx(watched, rel=0.05)
    assert share_of_pair > share - 0.02


@pytest.fixture
def process() -> Iterator[ProcessPoolExecutor]:
    """Where each call has a process of its own, that ends with it."""
    with ProcessPoolExecutor(1, mp_context=SPAWN, max_tasks_per_child=1) as pool:
        yield pool


def _disk_only(root: Path, begin: int, end: int) -> tuple[Rate, Rate]:
    """Play requests [begin, end) in one process; the rates in either half of the trace."""
    # Else a store whose tables a busy machine verifies for longer than that is rebuilt from its
    # headers, without its ghosts. It is this process's own: each call has one.
    table_integrity._SECONDS = PATIENT_SECONDS
    requests = sample()
    live = Live(
        root,
        "hindsight",
        disk=CHUNKS // 3,
        at_ms=requests[max(0, begin - 1)].timestamp_ms,
    )
    halves = (
        live.play(requests[begin : min(end, HALF)]),
        live.play(requests[max(begin, HALF) : end]),
    )
    live.close()
    return halves


@pytest.mark.slow
def test_a_restart_forgets_nothing(
    tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    through = process.submit(
        _disk_only, tmp_path / "through", 0, 2 * HALF
    ).result(PATIENT_SECONDS)
    before = process.submit(_disk_only, tmp_path / "again", 0, HALF).result(
        PATIENT_SECONDS
    )
    after = process.submit(_disk_only, tmp_path / "again", HALF, 2 * HALF).result(
        PATIENT_SECONDS
    )
    assert before[0].accesses == through[0].accesses
    assert after[1].accesses == through[1].accesses
    assert after[1].share > through[1].share - 0.01
    forgetful = process.submit(
        _disk_only, tmp_path / "new", HALF, 2 * HALF
    ).result(PATIENT_SECONDS)
    assert after[1].share > forgetful[1].share + 0.01


def _one_of_two(root: Path, number: int, barrier: Barrier) -> Rate:
    """Play the trace in turns with another process: one has all that the other has open, and
    waits.
    """
    requests = sample()[:SHARED]
    live = Live(root, "hindsight", host=CHUNKS)
    rate = Rate()
    for turn, at in enumerate(range(0, len(requests), TURN)):
        barrier.wait(PATIENT_SECONDS)
        if turn % 2 == number:
            played = live.play(requests[at : at + TURN])
            rate = Rate(rate.accesses + played.accesses, rate.hits + played.hits)
    barrier.wait(PATIENT_SECONDS)
    live.close()
    return rate


@pytest.mark.slow
def test_two_processes_share_what_they_learn(
    shm_root: Path, requests: list[Request]
) -> None:
    requests = requests[:SHARED]
    with (
        SPAWN.Manager() as manager,
        ProcessPoolExecutor(2, mp_context=SPAWN) as pool,
    ):
        barrier = manager.Barrier(2)
        both = [
            pool.submit(_one_of_two, shm_root, number, barrier)
            for number in (0, 1)
        ]
        rates = [one.result(PATIENT_SECONDS) for one in both]
    total = Rate(
        sum(rate.accesses for rate in rates), sum(rate.hits for rate in rates)
    )
    assert total.accesses == sum(len(request.hash_ids) for request in requests)
    assert total.share == pytest.approx(
        simulated(requests, CHUNKS, "hindsight"), abs=0.02
    )
    live = Live(
        shm_root, "hindsight", host=CHUNKS, at_ms=requests[-1].timestamp_ms
    )
    report = admin.check(live.ledgers[0])
    assert report.stale_hints == 0
    assert report.gauges["reserved"] == 0
    assert report.gauges["ready"] + report.gauges["free"] == CHUNKS
    live.close()


@pytest.mark.slow
def test_hints_serve_what_the_simulator_says(shm_root: Path) -> None:
    """Through the calls that an engine makes: retrieve with a session, store with the end."""
    told = hinted(stream(3, 700, 6, 40), 3)
    live = Live(shm_root, "hindsight", host=64, with_hints=True)
    rate = live.play(told)
    live.close()
    tier = [TierSpec("host", 64, "hindsight")]
    wanted = simulate(told, tier, with_hints=True).hit_rate
    assert rate.share == pytest.approx(wanted, abs=0.005)
    # the control: these hints, which are made up, change what is served
    assert abs(simulate(told, tier).hit_rate - wanted) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("with_hints", [False, True])
def test_computation_is_saved_as_the_simulator_says(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, with_hints: bool
) -> None:
    # chunks of the trace have two tokens: attention counts from the start
    monkeypatch.setattr(prefill_cost, "EVEN_TOKENS", CHUNK)
    told = [
        replace(one, chunk_tokens=CHUNK)
        for one in hinted(stream(5, 500, 12, 40), 5)
    ]
    live = Live(
        shm_root,
        "hindsight",
        host=64,
        with_hints=with_hints,
        objective="compute",
    )
    assert live.cache.stats()["objective"] == "compute"
    rate = live.play(told)
    live.close()
    cost = prefill_cost.cost_of("compute", CHUNK)
    wanted = simulate(
        told, [TierSpec("host", 64, "hindsight", cost)], with_hints=with_hints
    )
    assert rate.share == pytest.approx(wanted.hit_rate, abs=0.005)
    # the control: chunks alone are served otherwise
    plain = simulate(
        told, [TierSpec("host", 64, "hindsight")], with_hints=with_hints
    )
    assert abs(plain.hit_rate - wanted.hit_rate) > 0.01


def _one_of_two_objectives(
    root: Path, number: int, barrier: Barrier
) -> tuple[str, Rate]:
    """Play the trace in turns with another process, which has another objective; each retrieve
    compares what it reads.
    """
    prefill_cost.EVEN_TOKENS = CHUNK
    requests = stream(9, SHARED // 2, 12, 40)
    objective = OBJECTIVES[number]
    live = Live(root, "hindsight", host=64, objective=objective)
    rate = Rate()
    for turn, at in enumerate(range(0, len(requests), TURN)):
        barrier.wait(PATIENT_SECONDS)
        if turn % 2 == number:
            played = live.play(requests[at : at + TURN])
            rate = Rate(rate.accesses + played.accesses, rate.hits + played.hits)
    barrier.wait(PATIENT_SECONDS)
    found = live.ledgers[0].objective
    live.close()
    return found, rate


@pytest.mark.slow
def test_two_processes_with_two_objectives_share_a_store(shm_root: Path) -> None:
    with (
        SPAWN.Manager() as manager,
        ProcessPoolExecutor(2, mp_context=SPAWN) as pool,
    ):
        barrier = manager.Barrier(2)
        both = [
            pool.submit(_one_of_two_objectives, shm_root, number, barrier)
            for number in (0, 1)
        ]
        results = [one.result(PATIENT_SECONDS) for one in both]
    assert [objective for objective, _ in results] == list(OBJECTIVES)
    total = Rate(
        sum(rate.accesses for _, rate in results),
        sum(rate.hits for _, rate in results),
    )
    alone = simulated(stream(9, SHARED // 2, 12, 40), 64, "hindsight")
    assert total.share == pytest.approx(alone, abs=0.05)
    live = Live(shm_root, "hindsight", host=64, at_ms=10**8)
    report = admin.check(live.ledgers[0])
    assert report.stale_hints == 0
    assert report.gauges["reserved"] == 0
    assert report.gauges["ready"] + report.gauges["free"] == 64
    live.close()


@pytest.mark.slow
@pytest.mark.parametrize("with_hints", [False, True])
def test_with_the_keys_of_the_cache_each_request_hits_as_much(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, with_hints: bool
) -> None:
    """Prompts longer than a window of the store, and asked for within the lease of a hit."""
    told = hinted(stream(5, 200, 40, 6), 5)
    told = [replace(one, drop=False, retain_seconds=0.0) for one in told]
    live = Live(shm_root, "hindsight", host=64, with_hints=with_hints)
    marks: dict[int, int] = {}
    played = []
    for one in told:
        keys = [key for _, _, key in live.cache.keys(tokens_of(one.hash_ids))]
        marks |= dict(zip(one.hash_ids, marks_of(keys).tolist(), strict=True))
        played.append((live.ask(one).hits,))
    live.close()
    monkeypatch.setattr(
        sys.modules["pagoda_tools.replay.simulate"],
        "marks_of_ids",
        lambda ids: np.array([marks[each] for each in ids], np.uint64),
    )
    tier = [TierSpec("host", 64, "hindsight")]
    _, served = simulate_each(told, tier, with_hints=with_hints)
    assert played == served
