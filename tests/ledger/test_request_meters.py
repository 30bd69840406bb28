"""Requests by model and tenant: rows, their bounds, and what is left of damaged ones."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base import file_space
from pagoda.ledger.request_meters import (
    METER_FIELDS,
    MOST_SHOWN,
    OTHER,
    PAGE_BYTES,
    PAIRS,
    Meter,
    RequestMeters,
    TokenLoad,
    merged,
    model_label,
    read_meters,
    usage_by_model,
    usage_by_tenant,
)

Usage = Callable[[list[Meter]], list[dict[str, object]]]
ASKED = {"lookups": 1, "asked_tokens": 100}


def asked_by_pair(meters: list[Meter]) -> dict[tuple[str, str], int]:
    return {(one.model, one.tenant): one.counts["asked_tokens"] for one in meters}


def meter(model: str, tenant: str, **counts: int) -> Meter:
    return Meter(model, tenant, dict.fromkeys(METER_FIELDS, 0) | counts)


@pytest.fixture
def file(shm_root: Path) -> Path:
    return shm_root / "meters"


def shared(file: Path, row: int = 0) -> RequestMeters:
    found = RequestMeters()
    found.share(file, row)
    assert found.row == row
    return found


def test_members_count_in_pages_of_their_own(file: Path) -> None:
    for row in (3, 0):
        shared(file, row).add(("m", "t"), ASKED)
    assert asked_by_pair(read_meters(file)) == {("m", "t"): 200}
    assert file.stat().st_size == 4 * PAGE_BYTES
    assert file.stat().st_blocks * 512 == 2 * PAGE_BYTES, "members 1 and 2"


def test_the_next_member_of_a_row_goes_on_with_it(file: Path) -> None:
    for _ in range(3):
        shared(file).add(("m", "t"), ASKED)
    assert asked_by_pair(read_meters(file)) == {("m", "t"): 300}


def test_what_was_counted_before_there_was_a_file_is_added(file: Path) -> None:
    mine = RequestMeters()
    mine.add(("m", "t"), ASKED, TokenLoad(16, 5))
    shared(file).add(("m", "t"), ASKED)
    mine.share(file, 0)
    mine.add(("m", "t"), ASKED)
    (found,) = read_meters(file)
    assert found.counts["asked_tokens"] == 300
    assert found.counts["loaded_tokens"] == 16
    assert found.counts["load_microseconds"] == 5


def test_who_left_counts_for_itself(file: Path) -> None:
    one = shared(file)
    one.add(("m", "t"), ASKED)
    one.leave()
    one.add(("m", "t"), ASKED)
    assert not one.is_waiting()
    assert asked_by_pair(read_meters(file)) == {("m", "t"): 100}
    assert asked_by_pair(one.own()) == {("m", "t"): 200}


def test_tenants_beyond_the_rows_are_other_and_their_model_has_all(
    file: Path,
) -> None:
    one = shared(file)
    for model in "ab":
        for number in range(2 * PAIRS):
            one.add((model, str(number)), ASKED)
    found = asked_by_pair(read_meters(file))
    assert len(found) == PAIRS + 2
    assert found["a", OTHER] == 100 * PAIRS
    assert found["b", OTHER] == 100 * 2 * PAIRS
    assert sum(found.values()) == 100 * 4 * PAIRS


def test_models_beyond_the_rows_are_other(file: Path) -> None:
    one = shared(file)
    for number in range(500):
        one.add((str(number), "t"), ASKED)
    found = asked_by_pair(read_meters(file))
    assert sum(found.values()) == 500 * 100
    assert found[OTHER, OTHER] > 400 * 100


def test_a_pair_that_is_idle_for_an_hour_gives_its_row_up(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    one = shared(file)
    for number in range(PAIRS):
        one.add(("m", str(number)), ASKED)
        now += 1
    now += 3600
    one.add(("m", "1"), ASKED)
    one.add(("m", "new"), ASKED)
    found = asked_by_pair(read_meters(file))
    assert ("m", "0") not in found
    assert found["m", "1"] == 200
    assert found["m", "new"] == found["m", OTHER] == 100
    assert sum(found.values()) == 100 * (PAIRS + 2)


def test_a_row_of_a_clock_that_was_wrong_gives_way(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 4e9)
    one = shared(file)
    for number in range(PAIRS):
        one.add(("m", str(number)), ASKED)
    monkeypatch.setattr("time.time", lambda: 1e9)
    one.add(("m", "new"), ASKED)
    assert asked_by_pair(read_meters(file))["m", "new"] == 100


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"PAGODAM1"])
def test_a_damaged_file_is_begun_anew(file: Path, fill: bytes) -> None:
    file.write_bytes((fill * PAGE_BYTES)[:PAGE_BYTES])
    assert read_meters(file) == []
    shared(file).add(("m", "t"), ASKED)
    assert asked_by_pair(read_meters(file))["m", "t"] == 100


def test_any_damaged_byte_is_survived(file: Path) -> None:
    one = shared(file)
    one.add(("model", "tenant"), ASKED)
    content = bytearray(file.read_bytes())
    for at in range(0, 3 * 256, 7):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        again = shared(file)
        again.add(("model", "tenant"), ASKED)
        again.add(("model", "second"), ASKED)
        pairs = asked_by_pair(read_meters(file))
        assert pairs["model", "second"] == 100
        assert {model for model, _ in pairs} <= {"model", OTHER}


def test_a_counter_at_its_end_does_not_raise(file: Path) -> None:
    one = shared(file)
    for number in (2**64 - 1, 5, 2**70, -3):
        one.add(("m", "t"), {"asked_tokens": number}, TokenLoad(number, number))
    assert len(read_meters(file)) == 1


def test_without_space_a_member_counts_for_itself_and_tries_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    one = RequestMeters()
    one.add(("m", "t"), ASKED)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        one.share(file, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    one.add(("m", "t"), ASKED)
    assert asked_by_pair(one.own()) == {("m", "t"): 200}
    assert not one.is_waiting()
    now += 61
    assert one.is_waiting()
    one.share(file, 0)
    assert one.row == 0
    assert asked_by_pair(read_meters(file)) == {("m", "t"): 200}


def test_without_space_a_page_that_is_there_is_used(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To allocate it again could fail, and a failure empties what it was to allocate."""
    shared(file).add(("m", "t"), ASKED)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(file_space, "posix_fallocate", full)
    shared(file).add(("m", "t"), ASKED)
    assert asked_by_pair(read_meters(file)) == {("m", "t"): 200}


def test_a_link_in_its_place_is_not_followed(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    os.symlink(target, file)
    one = RequestMeters()
    one.share(file, 0)
    one.add(("m", "t"), ASKED)
    assert asked_by_pair(one.own()) == {("m", "t"): 100}
    assert target.read_bytes() == b"mine"


def test_long_names_of_models_stay_apart() -> None:
    long = "/models/" + "x" * 300
    names = [model_label(long + end) for end in ("1", "2", "ü" * 90)]
    assert len(set(names)) == 3
    for name in names:
        assert len(name.encode()) < 96
    assert model_label("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    one = RequestMeters()
    for name in (*names, model_label("ü" * 47), model_label("\ud800")):
        one.add((name, "t"), ASKED)
    assert {found.model for found in one.own()} >= set(names)


# ---- what people see


def test_saved_time_is_that_of_loaded_tokens_at_the_speed_of_the_model() -> None:
    meters = [
        meter(
            "fast", "none", prefill_tokens=1000, prefill_microseconds=1_000_000
        ),
        meter("fast", "a", loaded_tokens=5000, load_microseconds=500_000),
        meter("fast", "b", hit_tokens=800, asked_tokens=1000),
        meter("unknown", "a", loaded_tokens=70, load_microseconds=9_000_000),
    ]
    models = {row["model"]: row for row in usage_by_model(meters)}
    assert models["fast"]["saved_seconds"] == pytest.approx(4.5)
    assert models["fast"]["unmeasured_tokens"] == 0
    assert models["unknown"]["saved_seconds"] is None
    assert models["unknown"]["unmeasured_tokens"] == 70
    tenants = {row["tenant"]: row for row in usage_by_tenant(meters)}
    assert tenants["a"]["saved_seconds"] == pytest.approx(4.5)
    assert tenants["a"]["unmeasured_tokens"] == 70
    assert tenants["b"]["saved_seconds"] is None, "nothing was loaded"
    assert tenants["b"]["hit_rate"] == 0.8
    assert tenants["none"]["hit_rate"] is None, "nothing was asked for"


def test_slow_loads_cost_time() -> None:
    meters = [
        meter(
            "m",
            "t",
            prefill_tokens=1000,
            prefill_microseconds=1_000_000,
            loaded_tokens=1000,
            load_microseconds=3_000_000,
        )
    ]
    assert usage_by_model(meters)[0]["saved_seconds"] == pytest.approx(-2.0)


def test_speeds_of_several_models_are_not_mixed() -> None:
    meters = [
        meter(OTHER, OTHER, prefill_tokens=10, prefill_microseconds=10**9),
        meter(OTHER, OTHER, loaded_tokens=10, load_microseconds=1),
    ]
    assert usage_by_model(meters)[0]["saved_seconds"] is None


@pytest.mark.parametrize("usage", [usage_by_model, usage_by_tenant])
def test_what_is_shown_is_bounded_and_adds_up(usage: Usage) -> None:
    meters = [
        meter(f"m{number}", f"t{number}", asked_tokens=number, hits=1)
        for number in range(500)
    ]
    meters += [meter(OTHER, OTHER, asked_tokens=9)]
    rows = usage(meters)
    assert len(rows) == MOST_SHOWN + 1
    assert OTHER in rows[-1].values()
    asked = [row["asked_tokens"] for row in rows]
    assert asked[:3] == [499, 498, 497]
    assert sum(asked) == sum(range(500)) + 9
    assert sum(row["hits"] for row in rows) == 500


def test_meters_of_several_stores_are_merged() -> None:
    found = merged([meter("m", "t", hits=1), meter("m", "t", hits=2)])
    assert found == [meter("m", "t", hits=3)]
