"""Loading only what is expected to be faster than computing it."""

from __future__ import annotations

import logging
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from struct import pack
from zlib import crc32

import pytest

from pagoda import Namespace
from pagoda.base.metrics import Reason
from pagoda.cache.load_cost import LoadCost, Speed, SpeedTable
from pagoda.testing import FakeClock
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    cache_at,
    prompt,
    served,
    stored,
)

MB = 1_000_000


def test_nothing_is_refused_before_both_rates_are_known() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    assert load_cost.is_worth_loading("disk")
    load_cost.record_load("disk", MB, 10.0)
    assert load_cost.is_worth_loading("disk")
    other = LoadCost(MB, 256, FakeClock())
    other.record_prefill(256, 0.001)
    assert other.is_worth_loading("disk")


def test_the_faster_way_is_taken() -> None:
    load_cost = LoadCost(MB, 256, FakeClock(), tiers=("host", "disk"))
    for _ in range(3):
        load_cost.record_load("disk", MB, 0.1)
        load_cost.record_load("host", MB, 0.001)
    load_cost.record_prefill(256, 0.05)
    assert load_cost.is_worth_loading("host")
    assert not load_cost.is_worth_loading("disk")
    for _ in range(20):
        load_cost.record_prefill(256, 0.5)
    assert load_cost.is_worth_loading("disk")
    assert load_cost.rates()["disk_bytes_per_second"] == 10 * MB


def test_one_large_prompt_says_more_than_many_small_ones() -> None:
    clock = FakeClock()
    load_cost = LoadCost(MB, 256, clock)
    load_cost.record_prefill(4096, 0.1)
    for _ in range(20):
        # as long as a device takes for any number of tokens
        load_cost.record_prefill(300, 0.1)
    assert load_cost.rates() == {"prefill_tokens_per_second": 40960}
    clock.advance(601)
    for _ in range(20):
        clock.advance(601)
        # what came in the last ten minutes was small
        load_cost.record_prefill(300, 0.1)
    assert load_cost.rates() == {"prefill_tokens_per_second": 3000}


def test_what_is_fast_for_a_few_chunks_is_not_fast() -> None:
    """As a disk in a cloud is, that may do more for a moment than it may for long."""
    clock = FakeClock()
    load_cost = LoadCost(MB, 256, clock, tiers=("host", "disk"))
    load_cost.record_prefill(2560, 0.1)
    for _ in range(3):
        load_cost.record_load("disk", 40 * MB, 1.0)
    for _ in range(3):
        clock.advance(70)
        assert load_cost.take_probe("disk") == 20
        load_cost.record_load("disk", 4 * MB, 0.004)
        assert not load_cost.is_worth_loading("disk")
    for _ in range(5):
        load_cost.record_load("disk", 20 * MB, 0.02)
    assert load_cost.is_worth_loading("disk")


def test_loads_at_the_same_time_are_charged_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("pagoda.cache.load_cost.time.perf_counter", lambda: now)
    load_cost = LoadCost(MB, 256, FakeClock(), tiers=("disk",))
    with load_cost.measured("disk") as first:
        now += 1
        with load_cost.measured("disk") as second:
            now += 2
            second.nbytes = MB
        # two seconds, of which one was the other's
        assert load_cost.rates()["disk_bytes_per_second"] == MB
        now += 1
        first.nbytes = 6 * MB
    # the higher of two
    assert load_cost.rates()["disk_bytes_per_second"] == 2 * MB
    with pytest.raises(KeyError), load_cost.measured("disk"):
        raise KeyError
    with load_cost.measured("disk") as third:
        now += 1
        third.nbytes = 4 * MB
    assert load_cost.rates()["disk_bytes_per_second"] == 2 * MB


def test_only_one_process_measures_a_slow_tier_again() -> None:
    clock = FakeClock()
    speeds = SpeedTable()
    one, other = (
        LoadCost(MB, 256, clock, speeds=speeds, tiers=("host", "disk"))
        for _ in range(2)
    )
    one.record_prefill(256, 0.001)
    for tier in ("host", "disk"):
        assert not one.take_probe(tier)  # it is not slow
        for _ in range(3):
            one.record_load(tier, MB, 10.0)
        assert not other.is_worth_loading(tier)
        assert not other.take_probe(tier)
    clock.advance(1.1)
    assert other.take_probe("disk")
    assert not one.take_probe("disk")
    # no request waits for the measurement
    assert not one.is_worth_loading("disk")
    assert one.is_worth_loading("host")  # which only a request can measure


def test_what_cannot_be_read_of_the_table_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "speeds").write_bytes(b"x" * 4096)
    speeds = SpeedTable(tmp_path / "speeds")
    assert speeds.read("disk") == Speed()
    for number in range(40):  # more than there are rows: the oldest one goes
        speed = Speed()
        speed.add(MB, 1.0, number)
        speeds.write(f"{number}", speed)
    assert [
        number
        for number in range(40)
        if SpeedTable(tmp_path / "speeds").read(f"{number}").rates
    ] == [*range(8, 40)]
    page = bytearray((tmp_path / "speeds").read_bytes())
    for at in range(100, 4096, 128):
        page[at] ^= 1
    (tmp_path / "speeds").write_bytes(page)
    assert SpeedTable(tmp_path / "speeds").read("39") == Speed()
    assert SpeedTable(Path("/nowhere/speeds")).read("disk") == Speed()


def test_what_another_process_measures_first_is_known_at_once(
    tmp_path: Path,
) -> None:
    """That there is no row of a name is remembered only as long as the page has not changed."""
    table = SpeedTable(tmp_path / "speeds")
    another = SpeedTable(tmp_path / "speeds")
    assert table.read("disk").number == 0
    assert table.read("disk").number == 0
    speed = Speed()
    speed.add(MB, 0.1, 1)
    another.write("disk", speed)
    assert table.read("disk").rate == pytest.approx(10 * MB)


def test_what_an_earlier_release_measured_is_not_believed(tmp_path: Path) -> None:
    """It measured 30 million tokens a second. Its rows are left alone: an engine of that release
    may still run.
    """
    engine = "ab"
    row = blake2b(f"prefill {engine}".encode(), digest_size=16).digest()
    row += pack("<QqQ10d", 5, 1, 0, *[3e7] * 5, *[512.0] * 5)
    row += pack("<I", crc32(row))
    page = row.ljust(4096, b"\0")
    (tmp_path / "speeds").write_bytes(page)
    load_cost = LoadCost(
        MB,
        256,
        FakeClock(),
        speeds=SpeedTable(tmp_path / "speeds"),
        engine=engine,
        tiers=("disk",),
    )
    for _ in range(3):
        load_cost.record_load("disk", MB, 0.01)
    assert load_cost.is_worth_loading("disk")
    load_cost.record_prefill(256, 0.1)
    assert load_cost.rates()["prefill_tokens_per_second"] == 2560
    assert (tmp_path / "speeds").read_bytes()[: len(row)] == row


def test_what_was_measured_and_what_follows_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both figures, when they are known and when the verdict changes; not again and again."""
    caplog.set_level(logging.INFO, logger="pagoda")
    clock = FakeClock()
    load_cost = LoadCost(MB, 250, clock, tiers=("host", "disk"))

    def lines() -> list[str]:
        assert load_cost.is_worth_loading("disk") in (True, False)
        said = [
            f"{record.levelname} {record.getMessage()}"
            for record in caplog.records
        ]
        caplog.clear()
        return said

    load_cost.record_prefill(7000, 1.0)
    load_cost.record_load("disk", 1100 * MB, 1.0)
    assert lines() == []  # one copy proves nothing
    for _ in range(2):
        load_cost.record_load("disk", 1100 * MB, 1.0)
    taken = "prefill 7,000 tokens/s, disk 1.1 GB/s (275,000 tokens/s): hits in disk are taken"
    assert lines() == [f"INFO {taken}"]
    assert lines() == []
    for _ in range(5):
        load_cost.record_load("disk", 1100 * MB, 100.0)
    refused = "prefill 7,000 tokens/s, disk 11.0 MB/s (2,750 tokens/s)"
    assert lines() == [f"WARNING {refused}: hits in disk are computed (worth_it)"]
    assert lines() == []
    assert (
        load_cost.refusal("disk")
        == f"computing is faster than reading from disk: {refused}"
    )
    for seconds in (1.0, 100.0, 1.0):
        for _ in range(5):
            load_cost.record_load("disk", 1100 * MB, seconds)
        assert lines() == []
    clock.advance(61)
    assert lines() == []  # nothing has changed since
    for _ in range(5):
        load_cost.record_load("disk", 1100 * MB, 100.0)
    assert len(lines()) == 1


def test_a_slow_tier_is_tried_again_soon_and_later_if_it_stays_slow() -> None:
    clock = FakeClock()
    load_cost = LoadCost(MB, 256, clock)
    load_cost.record_prefill(256, 0.001)
    for _ in range(3):
        assert load_cost.is_worth_loading("disk")
        load_cost.record_load("disk", MB, 10.0)
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert not load_cost.is_worth_loading("disk")
        clock.advance(seconds - 0.1)
        assert not load_cost.is_worth_loading("disk")
        clock.advance(0.2)
        assert load_cost.is_worth_loading("disk")
        load_cost.record_load("disk", MB, 10.0)
    clock.advance(61)
    for _ in range(3):
        load_cost.record_load("disk", MB, 0.0001)
        clock.advance(1.1)
        assert load_cost.is_worth_loading("disk")
    load_cost.record_load("disk", MB, 0.0001)
    assert load_cost.is_worth_loading("disk")


def test_one_copy_that_was_paused_says_nothing_of_a_tier() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    load_cost.record_prefill(256, 0.001)
    load_cost.record_load("host", MB, 10.0)
    assert load_cost.is_worth_loading("host")
    for _ in range(5):
        load_cost.record_load("host", MB, 0.0001)
    for _ in range(2):
        load_cost.record_load("host", MB, 10.0)
        assert load_cost.is_worth_loading("host")
    load_cost.record_load("host", MB, 10.0)
    assert not load_cost.is_worth_loading("host")


def test_it_can_be_switched_off() -> None:
    load_cost = LoadCost(MB, 256, FakeClock(), enabled=False)
    load_cost.record_load("disk", MB, 10.0)
    load_cost.record_prefill(256, 0.001)
    assert load_cost.is_worth_loading("disk")


def test_senseless_measurements_are_ignored() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    load_cost.record_load("disk", 0, 1.0)
    load_cost.record_load("disk", 5, 0.0)
    load_cost.record_prefill(0, 1.0)
    assert load_cost.rates() == {"prefill_tokens_per_second": 0.0}


def test_a_run_that_is_cheaper_to_compute_is_left_alone(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    # does not advance: a second later a slow tier would be tried again
    clock = FakeClock()
    with cache_at(
        shm_root / "after", tmp_path, clock=clock, worth_it=True
    ) as cache:
        cache.observe_prefill(1_000_000, 0.0001)  # absurdly fast
        # the disk has not been measured yet
        assert served(cache, tokens[: 2 * CHUNK])[0].num_tokens == 32
        for _ in range(2):
            cache._resources.load_cost.record_load("disk", 8192, 1.0)
        hit, _ = served(cache, tokens, start_tokens=2 * CHUNK)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.NOT_WORTH_IT
        assert cache.lookup(tokens).reason is Reason.NOT_WORTH_IT
        assert cache.stats()["misses"] == {"not_worth_it": 2}


def test_a_tier_that_was_slow_before_a_reboot_is_tried_after_it() -> None:
    """The time of a measurement is one since the boot, so after a reboot it may be far ahead."""
    clock = FakeClock()
    speeds = SpeedTable()
    clock.advance(1_000_000)
    before = LoadCost(MB, 256, clock, speeds=speeds, tiers=("disk",))
    before.record_prefill(256, 0.001)
    for _ in range(3):
        before.record_load("disk", MB, 10.0)
    assert not before.take_probe("disk")
    after = LoadCost(MB, 256, FakeClock(), speeds=speeds, tiers=("host", "disk"))
    assert not after.is_worth_loading("disk")
    assert after.take_probe("disk")


@pytest.mark.slow
def test_the_next_process_knows_what_the_last_one_has_learned(
    shm_root: Path, tmp_path: Path
) -> None:
    """The disk keeps it: host memory is empty after a reboot."""
    tokens = prompt(10)
    other = Namespace(model="another-model")
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
        cache.observe_prefill(1_000_000, 0.0001)
        for _ in range(3):
            cache._resources.load_cost.record_load("disk", 8192, 1.0)
    script = (
        "import sys; from tests.cache.kit import cache_at, prompt; from pathlib import Path\n"
        "with cache_at(Path(sys.argv[1]), Path(sys.argv[2]), worth_it=True) as cache:\n"
        "    print(cache.lookup(prompt(10)).reason, "
        "cache.stats()['rates']['prefill_tokens_per_second'])"
    )
    after = [sys.executable, "-c", script, str(shm_root / "after"), str(tmp_path)]
    ended = subprocess.run(after, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["not_worth_it", "10000000000.0"]
    with cache_at(
        shm_root / "after", tmp_path, namespace=other, worth_it=True
    ) as cache:
        assert (
            cache.stats()["rates"]["prefill_tokens_per_second"] == 0
        )  # another model computes at another speed


def test_a_slow_tier_is_measured_again_in_the_background(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(20)
    clock = FakeClock()
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(
        shm_root / "after", tmp_path, clock=clock, worth_it=True
    ) as cache:
        load_cost = cache._resources.load_cost
        asked = cache.lookup
        cache.observe_prefill(CHUNK, 1.0)
        for _ in range(3):
            load_cost.record_load("disk", 4 * cache.layout.chunk_bytes, 10_000.0)
        for probe in (
            lambda at: asked(tokens),
            lambda at: served(cache, tokens)[0],
            lambda at: asked(tokens, tiers=["disk"], start_tokens=at),
        ):
            at = asked(tokens).num_tokens
            clock.advance(1.1)
            assert probe(at).reason is Reason.NOT_WORTH_IT
            wait_until(lambda at=at: asked(tokens).num_tokens > at)  # type: ignore[misc]

        # the last measurement is noted: it is fast. On a busy machine one of them may have been
        # slow, too.
        def is_fast() -> bool:
            clock.advance(1.1)
            return asked(tokens).num_tokens == len(tokens)

        wait_until(is_fast)
        assert served(cache, tokens)[0].num_tokens == len(tokens)


def test_what_a_look_up_has_promised_is_loaded(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(
        shm_root / "after", tmp_path, clock=FakeClock(), worth_it=True
    ) as cache:
        assert cache.lookup(tokens).num_tokens == len(tokens)
        cache.observe_prefill(1_000_000, 0.0001)
        for tier in ("host", "disk"):
            for _ in range(3):
                cache._resources.load_cost.record_load(tier, 8192, 1.0)
        assert served(cache, tokens)[0].reason is Reason.NOT_WORTH_IT
        assert served(cache, tokens, counted=False)[0].num_tokens == len(tokens)


def test_host_chunks_are_served_where_only_the_disk_is_too_slow(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    # does not advance: a second later a slow tier would be tried again
    clock = FakeClock()
    with cache_at(
        shm_root / "after", tmp_path, clock=clock, worth_it=True
    ) as cache:
        stored(cache, tokens[: 4 * CHUNK])
        load_cost = cache._resources.load_cost
        for _ in range(3):
            load_cost.record_load("disk", 8192, 10.0)
        cache.observe_prefill(CHUNK, 1.0)
        expected = (64, {"host": 64}, Reason.NOT_WORTH_IT)
        looked = cache.lookup(tokens)
        assert (looked.num_tokens, looked.by_tier, looked.reason) == expected
        hit, _ = served(cache, tokens)
        assert (hit.num_tokens, hit.by_tier, hit.reason) == expected


def test_a_hit_of_just_the_minimum_is_loaded(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path, min_hit_tokens=len(tokens)) as cache:
        stored(cache, tokens)
        assert cache.lookup(tokens).num_tokens == len(tokens)
        assert served(cache, tokens)[0].num_tokens == len(tokens)
        assert served(cache, tokens, tiers=["disk"])[0].num_tokens == len(tokens)
        longer = prompt(5)
        assert cache.lookup(longer).num_tokens == len(tokens)
        assert served(cache, longer)[0].num_tokens == len(tokens)


def test_a_hit_below_the_minimum_is_not_loaded(shm_root: Path) -> None:
    tokens = prompt(10)
    other = prompt(10, 1)
    with cache_at(shm_root, None, min_hit_tokens=100) as cache:
        stored(cache, tokens[: 3 * CHUNK])
        stored(cache, other)
        hit, kv = served(cache, tokens)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.BELOW_MINIMUM
        assert not kv.blocks.any()
        assert "48 of 100 tokens" in hit.detail
        assert cache.lookup(tokens).reason is Reason.BELOW_MINIMUM
        assert (
            served(cache, tokens[: 3 * CHUNK])[0].reason is Reason.BELOW_MINIMUM
        )
        assert served(cache, other)[0].num_tokens == 160
        assert (
            served(cache, other, start_tokens=128)[0].reason
            is Reason.BELOW_MINIMUM
        )
