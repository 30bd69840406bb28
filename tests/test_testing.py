from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda import testing
from pagoda.base.clock import Clock
from pagoda.codec import Expected, Header, seal, verify
from pagoda.slab import PAGE_BYTES, aligned
from pagoda.testing import FakeClock, Fault, FaultySlab
from testbed.patience import Patience

SLOTS = 4
SLOT_BYTES = 4 * PAGE_BYTES
HEADER = Header(
    b"s" * 16,
    1,
    b"n" * 32,
    0,
    b"k" * 32,
    0,
    3 * PAGE_BYTES,
    256,
    "raw",
    "f" * 16,
    1,
)


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultySlab]:
    path = tmp_path / "slab"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SLOTS * SLOT_BYTES)
    slab = FaultySlab(path, SLOTS, SLOT_BYTES, direct=request.param)
    yield slab
    slab.heal()
    slab.close()


def filled(nbytes: int, seed: int = 1) -> np.ndarray:
    buffer = aligned(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(
        0, 256, nbytes, dtype=np.uint8
    )
    return buffer


def stored(slab: FaultySlab, slot: int = 1) -> np.ndarray:
    return np.fromfile(slab.path, np.uint8, SLOT_BYTES, offset=slot * SLOT_BYTES)


def fails_with(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == number


def test_without_faults_it_is_a_file_slab(slab: FaultySlab) -> None:
    slab.write(1, [filled(PAGE_BYTES, 1), filled(3 * PAGE_BYTES, 2)])
    header = aligned(PAGE_BYTES)
    payload = aligned(3 * PAGE_BYTES)
    slab.read(1, [header, payload])
    assert np.array_equal(header, filled(PAGE_BYTES, 1))
    assert np.array_equal(payload, filled(3 * PAGE_BYTES, 2))
    assert bytes(slab.read_headers(1, 1)[0]) == filled(PAGE_BYTES, 1).tobytes()
    slab.sync()
    assert slab.calls == {"write": 1, "read": 1, "read_headers": 1, "sync": 1}
    assert not slab.struck


@pytest.mark.parametrize(
    ("fault", "number"), [(Fault.EIO, errno.EIO), (Fault.ENOSPC, errno.ENOSPC)]
)
def test_errors_move_nothing(slab: FaultySlab, fault: Fault, number: int) -> None:
    for call in ("read", "write", "read_headers", "sync"):
        slab.fail_next(call, fault)
    back = aligned(SLOT_BYTES)
    back[:] = 7
    fails_with(number, lambda: slab.write(1, [filled(SLOT_BYTES)]))
    fails_with(number, lambda: slab.read(1, [back]))
    fails_with(number, lambda: slab.read_headers(0, 2))
    fails_with(number, slab.sync)
    assert not stored(slab).any()
    assert (back == 7).all()
    assert slab.struck[fault] == 4
    slab.write(1, [filled(SLOT_BYTES)])
    assert np.array_equal(stored(slab), filled(SLOT_BYTES))


def test_torn_write_leaves_the_first_half(slab: FaultySlab) -> None:
    slab.fail_next("write", Fault.TORN)
    fails_with(
        errno.EIO,
        lambda: slab.write(1, [filled(PAGE_BYTES, 1), filled(3 * PAGE_BYTES, 2)]),
    )
    found = stored(slab)
    assert np.array_equal(found[:PAGE_BYTES], filled(PAGE_BYTES, 1))
    assert np.array_equal(
        found[PAGE_BYTES : 2 * PAGE_BYTES], filled(3 * PAGE_BYTES, 2)[:PAGE_BYTES]
    )
    assert not found[2 * PAGE_BYTES :].any()


def test_torn_chunk_fails_its_check(slab: FaultySlab) -> None:
    payload = filled(3 * PAGE_BYTES)
    slab.fail_next("write", Fault.TORN)
    fails_with(errno.EIO, lambda: slab.write(1, [seal(HEADER, payload), payload]))
    page = aligned(PAGE_BYTES)
    back = aligned(3 * PAGE_BYTES)
    slab.read(1, [page, back])
    assert verify(page, back, Expected()) is not None


def test_short_calls_are_gone_on_with(slab: FaultySlab) -> None:
    slab.fail_next("write", Fault.SHORT)
    slab.fail_next("read", Fault.SHORT)
    slab.write(1, [filled(PAGE_BYTES, 1), filled(3 * PAGE_BYTES, 2)])
    back = aligned(SLOT_BYTES)
    slab.read(1, [back])
    assert np.array_equal(back, stored(slab))
    assert np.array_equal(back[PAGE_BYTES:], filled(3 * PAGE_BYTES, 2))
    assert slab.struck[Fault.SHORT] == 2


def test_bit_flips_in_the_file_and_on_the_way(slab: FaultySlab) -> None:
    mine = filled(SLOT_BYTES)
    slab.fail_next("write", Fault.BIT_FLIP, at=PAGE_BYTES + 5)
    slab.write(1, [mine])
    # the caller's bytes stay as they are
    assert np.array_equal(mine, filled(SLOT_BYTES))
    assert np.flatnonzero(stored(slab) != mine).tolist() == [PAGE_BYTES + 5]
    back = aligned(SLOT_BYTES)
    slab.write(1, [mine])
    slab.fail_next("read", Fault.BIT_FLIP)
    slab.read(1, [back[:PAGE_BYTES], back[PAGE_BYTES:]])
    assert np.flatnonzero(back != mine).tolist() == [SLOT_BYTES // 2]
    slab.fail_next("read_headers", Fault.BIT_FLIP, at=PAGE_BYTES)
    assert bytes(slab.read_headers(0, 2)[1]) != mine[:PAGE_BYTES].tobytes()
    slab.read(1, [back])
    assert np.array_equal(back, mine)


def test_lost_calls_move_nothing_and_say_nothing(slab: FaultySlab) -> None:
    slab.fail_next("write", Fault.LOST)
    slab.write(1, [filled(SLOT_BYTES)])
    assert not stored(slab).any()
    slab.write(1, [filled(SLOT_BYTES)])
    slab.fail_next("read_headers", Fault.LOST)
    assert not any(slab.read_headers(1, 1)[0])


def test_faults_strike_as_often_as_set_and_in_turn(slab: FaultySlab) -> None:
    slab.fail_next("write", Fault.EIO, times=2, skip=1)
    slab.fail_next("write", Fault.ENOSPC)
    slab.write(0, [filled(SLOT_BYTES)])
    for number in (errno.EIO, errno.EIO, errno.ENOSPC):
        fails_with(number, lambda: slab.write(1, [filled(SLOT_BYTES)]))
    slab.write(1, [filled(SLOT_BYTES)])
    slab.fail_next("write", Fault.EIO, times=100)
    slab.heal()
    slab.write(1, [filled(SLOT_BYTES)])
    with pytest.raises(ValueError, match="unknown call"):
        slab.fail_next("seek", Fault.EIO)


def test_a_delayed_read_takes_that_long(slab: FaultySlab) -> None:
    slab.delay_seconds = 0.1
    slab.fail_next("read", Fault.DELAY)
    begin = time.monotonic()
    slab.read(1, [aligned(SLOT_BYTES)])
    assert time.monotonic() - begin >= 0.1


def test_a_hanging_write_hangs_until_it_is_released(slab: FaultySlab) -> None:
    slab.fail_next("write", Fault.HANG)
    writer = threading.Thread(
        target=slab.write, args=(1, [filled(SLOT_BYTES)]), daemon=True
    )
    writer.start()
    assert slab.hanging.wait(60)
    slab.write(2, [filled(SLOT_BYTES, 2)])  # the others go on
    assert not stored(slab).any()
    slab.release()
    writer.join(60)
    assert np.array_equal(stored(slab), filled(SLOT_BYTES))


def test_like_is_over_the_same_file(slab: FaultySlab) -> None:
    other = FaultySlab.like(slab)
    other.write(3, [filled(SLOT_BYTES)])
    back = aligned(SLOT_BYTES)
    slab.read(3, [back])
    assert np.array_equal(back, filled(SLOT_BYTES))
    assert other.direct == slab.direct
    other.close()


def test_fake_clock_stands_still() -> None:
    clock: Clock = FakeClock(seconds=10.0, wall=1000.0)
    assert clock.monotonic_ns() == clock.monotonic_ns() == 10 * 10**9
    assert clock.time() == 1000.0
    assert clock.boot_id() == "fake-boot"


def test_a_fake_clock_advances_only_by_calls() -> None:
    clock = FakeClock(seconds=10.0, wall=1000.0)
    clock.advance(1.5)
    clock.sleep(0.25)
    clock.sleep(-1)
    assert clock.monotonic_ns() == 11_750_000_000
    assert clock.time() == 1001.75
    with pytest.raises(ValueError, match="back"):
        clock.advance(-0.1)


def test_a_reboot_changes_the_boot_id_and_the_monotonic_clock_only() -> None:
    clock = FakeClock(seconds=10.0, wall=1000.0)
    clock.reboot("second", seconds=2.0)
    assert clock.boot_id() == "second"
    assert clock.monotonic_ns() == 2 * 10**9
    assert clock.time() == 1000.0


def test_sleeping_takes_no_time() -> None:
    patience = Patience(5)
    FakeClock().sleep(1000)
    assert not patience.ended, patience.said()


def test_needs_no_test_framework() -> None:
    code = (
        "import sys; from pagoda.testing import FakeClock, FaultySlab, PolicyConformance, "
        "TierConformance; "
    )
    code += "assert not {'pytest', 'hypothesis', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_resolve_late() -> None:
    assert set(testing.__all__) == {
        name
        for name in testing.__all__
        if getattr(testing, name).__name__ == name
    }
    with pytest.raises(AttributeError, match="Nothing"):
        testing.__getattr__("Nothing")
    code = (
        "import sys; from pagoda.testing import FakeClock; assert not {'numpy', 'lmdb'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
