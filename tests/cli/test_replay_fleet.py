"""`pagoda replay --remote`: machines that share a tier, their links, what the store is asked and
what it costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.cli.shelf import answer, done_here, refused

CHUNK_BYTES = 512 * 4096
GIB = 2**30
BYTES = ("--bytes-per-token", 4096)
Table = dict[str, float]


def test_a_fleet_by_hand(trace: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "[mine]\nput = 1000\nget = 100\ngb_month = 30\ngb_read = 7\n"
    )
    found = answer(
        "replay",
        trace,
        "--machines",
        2,
        "--host",
        2 * CHUNK_BYTES,
        "--remote",
        100 * CHUNK_BYTES,
        "--policy",
        "lru",
        "--prices",
        prices,
        "--link",
        "8Mbit",
        *BYTES,
    )
    rates = {
        tier["tier"]: tier["hit_rate"]
        for tier in cast("list[Table]", found["tiers"])
    }
    assert (
        sum(rates.values())
        == pytest.approx(cast("float", found["hit_rate"]))
        == 0.4
    )
    loaded = round(10 * rates["remote"])
    store, mean, busiest = cast("list[Table]", found["links"])
    assert store["read_bytes"] == loaded * CHUNK_BYTES
    assert store["written_bytes"] == 6 * CHUNK_BYTES
    assert (
        mean["read_bytes"]
        == store["read_bytes"] / 2
        <= busiest["read_bytes"] + busiest["written_bytes"]
    )
    assert (
        store["mean_gbit"]
        == store["busiest_gbit"]
        == pytest.approx((6 + loaded) * CHUNK_BYTES * 8e-9 / 4)
    )
    asked = cast("Table", found["object_store_requests"])
    assert asked["gets"] == loaded
    assert asked["puts"] == 6
    day = cast("dict[str, Table]", found["dollars_per_day"])["mine"]
    assert day["PUTs"] == pytest.approx(6 * 86400 / 4)
    assert day["kept"] == pytest.approx(6 * CHUNK_BYTES / GIB)
    assert day["GETs"] == pytest.approx(
        loaded * (0.1 + 7 * CHUNK_BYTES / GIB) * 86400 / 4
    )
    assert day["look-ups"] == pytest.approx(0.1 * asked["look_heads"] * 86400 / 4)
    assert day["total"] == pytest.approx(
        sum(dollars for part, dollars in day.items() if part != "total")
    )
    assert found["link_bits_per_second"] == 8e6


@pytest.mark.slow
def test_a_table_of_80_columns() -> None:
    shown = done_here(
        "replay",
        "--machines",
        10,
        "--host",
        "64GiB",
        "--remote",
        "1TiB",
        "--model",
        "llama-3-8b",
        "--link",
        "25Gbit",
    )
    assert (
        shown.returncode == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    ), shown
    for word in (
        "10 machines, round-robin, remote lru",
        "busiest one",
        "of link",
        "look-ups/s",
        "s3-express",
    ):
        assert word in shown.stdout, shown.stdout


def test_second_sight_writes_less(trace: Path) -> None:
    fleet = ("--machines", 2, "--remote", 100 * CHUNK_BYTES, *BYTES)
    through = answer("replay", trace, *fleet)
    sight = answer(
        "replay", trace, *fleet, "--remote-write-policy", "second_sight"
    )
    written = [
        cast("list[Table]", found["links"])[0]["written_bytes"]
        for found in (through, sight)
    ]
    assert 0 < written[1] < written[0]
    assert through["remote_write_policy"] == "write_through"
    assert sight["remote_write_policy"] == "second_sight"
    shown = done_here(
        "replay", trace, *fleet, "--remote-write-policy", "second_sight"
    ).stdout
    assert "2 machines, round-robin, remote lru with second sight" in shown


def test_a_trace_without_time_has_no_rates(tmp_path: Path) -> None:
    trace = tmp_path / "now.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
        * 2
    )
    options = ("--remote", "1GiB", *BYTES)
    found = answer("replay", trace, *options)
    assert found["hit_rate"] == 0.5
    assert found["lookups_per_second"] is None
    assert set(cast("Table", found["dollars_per_day"]).values()) == {None}
    shown = done_here("replay", trace, *options, "--link", "25Gbit")
    assert shown.returncode == 0
    assert "%" not in shown.stdout.partition("over the network")[2]


def test_wrong_use_is_one_line(trace: Path, tmp_path: Path) -> None:
    fleet = ("--remote", "1GiB", *BYTES)
    for option, value in (
        ("--machines", 4),
        ("--link", "1Gbit"),
        ("--route", "prefix"),
        ("--prices", tmp_path),
    ):
        assert f"{option} needs --remote" in refused(
            "replay", trace, "--host", "1GiB", *BYTES, option, value
        )
    assert "--route sticky: no such route" in refused(
        "replay", trace, *fleet, "--route", "sticky"
    )
    assert "--link 25: write bits per second, such as 25Gbit" in refused(
        "replay", trace, *fleet, "--link", 25
    )
    for rate in ("0Gbit", f"{10**400}Gbit"):
        assert f"--link {rate}" in refused(
            "replay", trace, *fleet, "--link", rate
        )
    assert "--remote-policy lr: no such policy" in refused(
        "replay", trace, *fleet, "--remote-policy", "lr"
    )
    policy = ("--remote-write-policy", "second")
    assert "no such policy; did you mean second_sight?" in refused(
        "replay", trace, *fleet, *policy
    )
    assert "--engines: --remote simulates no time" in refused(
        "replay", trace, *fleet, "--engines", 2
    )
    assert "--remote need --model" in refused("replay", trace, "--remote", "1GiB")
    assert "--remote : " in refused("replay", trace, "--remote", "", *BYTES)
    assert "--remote 64G: " in refused("replay", trace, "--remote", "64G", *BYTES)
    assert "a chunk has 2.00 MiB" in refused(
        "replay", trace, "--remote", "1MiB", *BYTES
    )
    assert "--machines" in refused("replay", trace, *fleet, "--machines", 0)
    assert "leave out --capacity-chunks" in refused(
        "replay", trace, *fleet, "--capacity-chunks", 3
    )
    prices = tmp_path / "prices.toml"
    assert "cannot be read" in refused(
        "replay", trace, *fleet, "--prices", prices
    )
    for text in (
        "",
        "put = 3",
        "[s3]\nput = 1\n",
        "[s3]\nput = -1\nget = 1\ngb_month = 1",
        "[s3]\nput = inf\nget = 1\ngb_month = 1",
        "[[",
        "[s3]\nbuy = 1",
    ):
        prices.write_text(text)
        assert "--prices" in refused(
            "replay", trace, *fleet, "--prices", prices
        ), text
