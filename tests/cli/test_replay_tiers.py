"""`pagoda replay --host --disk`: the tiers below each other, in bytes and in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from tests.cli.shelf import answer, done_here, refused

CHUNK_BYTES = 512 * 4096
Table = dict[str, float]


def tiers(found: dict[str, object]) -> dict[str, Table]:
    """Return the tiers of an answer by name."""
    return {
        str(tier["tier"]): tier for tier in cast("list[Table]", found["tiers"])
    }


def test_tiers_by_hand(trace: Path) -> None:
    sizes = (
        "--host",
        2 * CHUNK_BYTES,
        "--disk",
        100 * CHUNK_BYTES,
        "--policy",
        "lru",
    )
    speeds = ("--host-speed", 1, "--disk-speed", 0.5, "--prefill", 1000)
    found = answer("replay", trace, *sizes, *speeds, "--bytes-per-token", 4096)
    host = tiers(found)["host"]
    disk = tiers(found)["disk"]
    assert host["capacity_chunks"] == 2
    assert disk["capacity_chunks"] == 100
    assert host["hit_rate"] == 0.0
    assert disk["hit_rate"] == 0.4
    assert disk["chunks_written"] == 6
    assert disk["bytes_written"] == 6 * CHUNK_BYTES
    # every prompt, since all of them push each other out
    assert host["chunks_written"] == 10
    assert found["hit_rate"] == 0.4 == found["optimum"]
    assert found["input_tokens"] == 5120
    assert found["prefill_tokens_saved"] == 2048
    cold = cast("Table", found["ttft_seconds_cold"])
    warm = cast("Table", found["ttft_seconds"])
    assert cold["mean"] == pytest.approx(1.024)
    load = 2 * CHUNK_BYTES / 0.5e9
    assert warm["mean"] == pytest.approx((3 * 1.024 + 2 * load) / 5)
    assert warm["p50"] == pytest.approx(1.024)
    assert warm["p99"] == pytest.approx(1.024)


def test_what_loads_more_slowly_than_it_is_computed_saves_nothing(
    trace: Path,
) -> None:
    options = (
        "--disk",
        100 * CHUNK_BYTES,
        "--bytes-per-token",
        4096,
        "--prefill",
        10**6,
        "--policy",
        "lru",
    )
    found = answer("replay", trace, *options)
    assert found["hit_rate"] == 0.4
    assert found["prefill_tokens_saved"] == 2048
    slow = done_here("replay", trace, *options, "--disk-speed", 0.001)
    assert "disk 0.001 GB/s (given)" in slow.stdout
    assert "this tier saves nothing" in slow.stderr
    assert (
        answer("replay", trace, *options, "--disk-speed", 0.001)[
            "prefill_tokens_saved"
        ]
        == 0
    )


def test_speeds_are_given_or_measured_or_assumed(
    trace: Path, tmp_path: Path
) -> None:
    measured = tmp_path / "bench.json"
    measured.write_text(
        json.dumps({"chunk_bytes": 1, "host_read": {"gb_per_second": 7.5}})
    )
    options = (
        "--host",
        "1GiB",
        "--disk",
        "1GiB",
        "--model",
        "qwen3-8b",
        "--measured",
        measured,
    )
    speeds = cast(
        "Table", answer("replay", trace, *options, "--disk-speed", 2)["speeds"]
    )
    assert speeds["host_gbps"] == 7.5
    assert speeds["disk_gbps"] == 2
    sources = cast("dict[str, str]", speeds["sources"])
    assert sources["host"] == str(measured)
    assert sources["disk"] == "given"
    assert "assumed" in sources["prefill"]
    assert "8.2" not in sources["prefill"]
    usual = cast("Table", answer("replay", trace, *options)["speeds"])
    assert usual["disk_gbps"] == 6
    assert cast("dict[str, str]", usual["sources"])["disk"] == "assumed"


def test_without_a_model_nothing_is_said_of_time(trace: Path) -> None:
    options = ("--host", "1GiB", "--bytes-per-token", 4096)
    assert "ttft_seconds" not in answer("replay", trace, *options)
    shown = done_here("replay", trace, *options)
    assert shown.returncode == 0
    assert "--prefill" in shown.stderr
    assert "first token" not in shown.stdout


@pytest.mark.slow
def test_several_policies_on_the_sample() -> None:
    sizes = ("--host", "64GiB", "--disk", "512GiB", "--model", "llama-3-8b")
    found = answer("replay", *sizes, "--policy", "lru", "--policy", "hindsight")
    runs = cast("list[Table]", found["runs"])
    assert [str(run["policy"]) for run in runs] == ["lru", "hindsight"]
    for run in runs:
        assert 0 < run["hit_rate"] < run["optimum"]
        assert (
            cast("Table", run["ttft_seconds"])["mean"]
            < cast("Table", run["ttft_seconds_cold"])["mean"]
        )


def test_wrong_use_is_one_line(trace: Path, tmp_path: Path) -> None:
    model = ("--model", "llama-3-8b")
    assert "--bytes-per-token" in refused("replay", trace, "--host", "1GiB")
    assert "--host 64G: " in refused("replay", trace, "--host", "64G", *model)
    assert "--host auto" in refused("replay", trace, "--host", "auto", *model)
    assert "--disk 0" in refused("replay", trace, "--disk", "0", *model)
    assert "a chunk has 64.00 MiB" in refused(
        "replay", trace, "--host", "1MiB", *model
    )
    assert "--prefill" in refused(
        "replay", trace, "--host", "1GiB", *model, "--prefill", 0
    )
    bad = tmp_path / "bad.json"
    some = ("--host", "1GiB", *model, "--measured", bad)
    assert "cannot be read" in refused("replay", trace, *some)
    for text in (
        "",
        "[]",
        "{}",
        '{"host_read": 3}',
        '{"host_read": {"gb_per_second": 0}}',
    ):
        bad.write_text(text)
        assert "pagoda bench --json" in refused("replay", trace, *some)


def test_engines_keep_prompts_waiting(trace: Path) -> None:
    options = (
        "--disk",
        "1GiB",
        "--bytes-per-token",
        4096,
        "--prefill",
        1000,
        "--policy",
        "lru",
    )
    one = cast(
        "dict[str, object]",
        answer("replay", trace, *options, "--engines", 1)["load"],
    )
    many = cast(
        "dict[str, object]",
        answer("replay", trace, *options, "--engines", 9)["load"],
    )
    assert one["engines"] == 1
    assert many["engines"] == 9
    assert "--engines" in refused("replay", trace, *options, "--engines", 10**30)
    assert cast("Table", many["ttft_seconds_cold"])["p90"] == pytest.approx(1.024)
    # each takes 1.024 s, one comes every second
    assert cast("Table", one["ttft_seconds_cold"])["p90"] > 1.03
    assert (
        cast("Table", one["ttft_seconds"])["p90"]
        <= cast("Table", one["ttft_seconds_cold"])["p90"]
    )
    assert cast("float", one["busy"]) < cast("float", one["busy_cold"])
    assert cast("Table", one["hit_rates"])["disk"] == one["hit_rate"] == 0.4
    usual = cast("dict[str, object]", answer("replay", trace, *options)["load"])
    # 5,120 tokens in 4 s are 1.28 engines, and they are to be 70 % busy
    assert usual["engines"] == 2
    shown = done_here("replay", trace, *options).stdout
    assert "2 engines in the time of the trace" in shown
    assert "each prompt alone" in shown
