"""A Mooncake pool whose parts fail: its master, its machines, the processes that call its library,
what is stored.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes, Done
from pagoda.tiers.remote.mooncake import (
    _HELPER,
    MooncakeClient,
    MooncakeProcess,
    PoolAddress,
)
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import PutRequest
from testbed.patience import wait_until
from testbed.servers import Server, mooncake_master, mooncake_peer
from tests.remote.chunks import (
    LARGE,
    LATE_SECONDS,
    NAMESPACE,
    OTHER,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    TROUBLE,
    chunks_of,
    ends,
    fresh_prefix,
    hasty_tier,
    keys_of,
    load,
    saved,
    soon,
    tier_on,
)

# seconds after which the master forgets a machine that is silent
QUICK = "-client_ttl=2"
# a process that calls Mooncake may start slowly on a busy machine
START_SECONDS = 10.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Server]:
    with mooncake_master() as master, mooncake_peer(master):
        yield master


def client_of(master: Server, **options: object) -> MooncakeClient:
    """A client with a prefix of its own."""
    return MooncakeClient(master.url, prefix=fresh_prefix(), **options)  # type: ignore[arg-type]


def save(
    tier: RemoteTier, keys: Sequence[bytes], layout: KVLayout = SMALL
) -> list[Done]:
    """Save a chain; return the results, which may take as long as a busy machine takes to start
    processes.
    """
    return ends(tier.store(chunks_of(keys, layout), ROOT))


def stores(
    tier: RemoteTier, keys: Sequence[bytes], layout: KVLayout = SMALL
) -> None:
    """Check that the tier stores the chain, by itself, after a while."""
    wait_until(lambda: all(end.ok for end in save(tier, keys, layout)))


def recovers(
    tier: RemoteTier, keys: Sequence[bytes], layout: KVLayout = SMALL
) -> None:
    """Check that the tier serves the chain, by itself, after a while."""
    wait_until(
        lambda: load(tier, keys, layout, PATIENT_SECONDS) == [None] * len(keys)
    )


def helpers() -> set[int]:
    """The processes that call Mooncake for this one."""
    found = set[int]()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if (
                str(_HELPER).encode() in words
                and words[-2] == b"%d" % os.getpid()
                and _runs(int(entry.name))
            ):
                found.add(int(entry.name))
    return found


def _runs(process: int) -> bool:
    try:
        return (
            Path(f"/proc/{process}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()[0]
            != "Z"
        )
    except OSError:
        return False


def name_in(remote: MooncakeClient, key: bytes) -> str:
    return f"{remote.base}{ROOT.hex()}:{key.hex()}"


class RawStore:
    """Reads and writes values without a tier."""

    def __init__(self, master: Server) -> None:
        self._process = MooncakeProcess(
            PoolAddress("127.0.0.1", master.port, "tcp")
        )
        self._until = time.monotonic() + 10 * PATIENT_SECONDS
        self._process.join(self._until)

    def get(self, name: str) -> Bytes | None:
        memory = self._process.reserve(1 << 23, self._until)
        (code,) = self._process.call(self._until, "get", name)
        return memory[:code].copy() if code >= 0 else None

    def put(self, name: str, value: Bytes) -> None:
        """Store a value in place of the one that is there."""
        assert self._process.call(self._until, "remove", [name]) in ([0], [-704])
        self._process.reserve(value.nbytes, self._until)[: value.nbytes] = value
        assert self._process.call(self._until, "put", name, value.nbytes) == [0]

    def close(self) -> None:
        self._process.close()


# ---- what is stored


def _noise(value: Bytes) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, value.nbytes, np.uint8)


def _flipped(value: Bytes) -> Bytes:
    value[HEADER_BYTES + 5000] ^= 1
    return value


def _flipped_header(value: Bytes) -> Bytes:
    value[40] ^= 1
    return value


def _longer(value: Bytes) -> Bytes:
    return np.concatenate([value, np.zeros(2 << 20, np.uint8)])


LIES: dict[str, Callable[[Bytes], Bytes]] = {
    "noise": _noise,
    "a bit of the payload": _flipped,
    "a bit of the header": _flipped_header,
    "the half of it": lambda value: value[: value.nbytes // 2],
    "a header and nothing else": lambda value: value[:HEADER_BYTES],
    "less than a header": lambda value: value[:100],
    "more than a chunk": _longer,
}


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [False, True])
def test_damaged_values_are_misses_and_make_way(
    pool: Server, is_warm: bool
) -> None:
    remote = client_of(pool)
    keys = keys_of(len(LIES))
    (good,) = keys_of(1, chain=1)
    with tier_on(remote, LARGE) as tier:
        for key in (*keys, good):  # each the first of its chain
            for end in ends(tier.store(chunks_of([key], LARGE), ROOT)):
                assert end.ok
    raw = RawStore(pool)
    for key, lie in zip(keys, LIES.values(), strict=True):
        value = raw.get(name_in(remote, key))
        assert value is not None
        raw.put(name_in(remote, key), lie(value))
    with ExitStack() as tiers:
        for key, name in zip(keys, LIES, strict=True):
            # a new tier's memory that is shared has no size yet
            if not is_warm or key == keys[0]:
                tiers.close()
                patient = tier_on(remote, LARGE, connections=2)
                tier = tiers.enter_context(patient)
            if is_warm:
                assert load(tier, [good], LARGE, PATIENT_SECONDS) == [None]
            assert load(tier, [key], LARGE, PATIENT_SECONDS) == [
                Reason.FAILED_CHECK
            ], name
            assert raw.get(name_in(remote, key)) is None, name
            for end in ends(tier.store(chunks_of([key], LARGE), ROOT)):
                assert end.ok
            assert load(tier, [key], LARGE, PATIENT_SECONDS) == [None], name
    raw.close()


def test_the_value_of_another_key_is_a_miss(pool: Server) -> None:
    remote = client_of(pool)
    (key, other) = keys_of(2)
    saved(remote, [key, other])
    raw = RawStore(pool)
    value = raw.get(name_in(remote, other))
    assert value is not None
    raw.put(name_in(remote, key), value)
    raw.close()
    with tier_on(remote) as tier:
        assert load(tier, [key, other], seconds=PATIENT_SECONDS) == [
            Reason.FAILED_CHECK,
            None,
        ]


@pytest.mark.slow
def test_a_chunk_in_use_can_be_removed(pool: Server) -> None:
    """The master has given it a lease: readers verify what they read, so it may go."""
    remote = client_of(pool)
    keys = keys_of(3)
    saved(remote, keys)
    with tier_on(remote) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 3
        assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 3
        assert tier.remove(keys[0])
        assert not tier.remove(keys[0])
        assert load(tier, keys, seconds=PATIENT_SECONDS) == [
            Reason.ABSENT,
            None,
            None,
        ]


@pytest.mark.slow
def test_a_clear_keeps_to_its_prefix_and_namespace(pool: Server) -> None:
    remote = client_of(pool)
    others = client_of(pool)
    keys = keys_of(3)
    similar = MooncakeClient(
        pool.url, prefix=remote.base.partition(":")[0].replace("-", ".", 1)
    )
    for each in (remote, others, similar):
        saved(each, keys)
    patient = {
        "deadline_seconds": PATIENT_SECONDS,
        "look_seconds": PATIENT_SECONDS,
    }
    with tier_on(similar, **patient) as tier:  # its dot is no pattern
        assert tier.clear(OTHER.root) == 0
        assert tier.clear() == 3
    for each in (remote, others):
        with tier_on(each, **patient) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 3
            assert tier.clear(NAMESPACE.root) == 3


@pytest.mark.slow
def test_a_full_pool_takes_no_more_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with mooncake_master() as master, mooncake_peer(master, "16MB"):
        patient = {
            "deadline_seconds": PATIENT_SECONDS,
            "look_seconds": PATIENT_SECONDS,
        }
        with tier_on(
            client_of(master), LARGE, queue_chunks=128, **patient
        ) as tier:
            keys = keys_of(12)
            done = ends(tier.store(chunks_of(keys, LARGE), ROOT))
            assert {end.reason for end in done if not end.ok} == {Reason.FULL}
            assert tier.stats()["drop_full"] == sum(not end.ok for end in done)
            here = load(tier, keys, LARGE, PATIENT_SECONDS)
            assert None in here
            for end, reason in zip(done, here, strict=True):
                if reason is None:
                    assert end.ok
    assert "segment=SIZE" in caplog.text


# ---- machines and the master


@pytest.mark.slow
def test_a_machine_that_dies_costs_its_chunks_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        mooncake_master() as master,
        mooncake_peer(master),
        mooncake_peer(master) as second,
    ):
        remote = client_of(master)
        keys = keys_of(24)
        saved(remote, keys)
        with tier_on(remote) as tier:
            assert load(tier, keys, seconds=PATIENT_SECONDS) == [None] * 24
            second.kill()
            here = load(tier, keys, seconds=2 * PATIENT_SECONDS)
            assert {None, Reason.IO_ERROR} == set(here)
            assert not tier.resting
            assert tier.stats()["miss_io_error"] == here.count(Reason.IO_ERROR)
    assert "does not answer" in caplog.text


@pytest.mark.slow
def test_what_a_dead_machine_had_is_stored_again() -> None:
    with mooncake_master(QUICK) as master, mooncake_peer(master) as first:
        keys = keys_of(4)
        with tier_on(client_of(master), deadline_seconds=5.0) as tier:
            stores(tier, keys)
            first.kill()
            with mooncake_peer(master):
                wait_until(
                    lambda: (
                        bool(save(tier, keys))
                        and load(tier, keys, seconds=PATIENT_SECONDS)
                        == [None] * 4
                    )
                )


@pytest.mark.slow
def test_the_master_is_killed_and_comes_back() -> None:
    keys = keys_of(4)
    later = keys_of(4, chain=1)
    with (
        mooncake_master() as master,
        mooncake_peer(master),
        tier_on(client_of(master)) as tier,
    ):
        stores(tier, keys)
        recovers(tier, keys)
        master.kill()
        for _ in range(4):
            with soon():
                assert set(load(tier, keys)) <= {*TROUBLE, Reason.ABSENT}
        with soon():
            for end in save(tier, later):
                assert not end.ok
        wait_until(lambda: tier.resting)
        with soon(0.5):
            assert load(tier, keys) == [Reason.TIER_SKIPPED] * 4
        master.restart()
        # it has forgotten all names; the machines join it again by themselves
        stores(tier, later)
        recovers(tier, later)


@pytest.mark.slow
def test_a_master_that_comes_later_is_found() -> None:
    with mooncake_master() as master:
        master.kill()
        with tier_on(client_of(master)) as tier:
            keys = keys_of(2)
            with soon():
                assert tier.match_prefix(keys, namespace=ROOT) == 0
            wait_until(
                lambda: (
                    tier.match_prefix(keys, namespace=ROOT) == 0 and tier.resting
                )
            )
            master.restart()
            with mooncake_peer(master):
                stores(tier, keys)
                recovers(tier, keys)


@pytest.mark.slow
def test_a_pool_whose_master_stands_still_is_left_soon() -> None:
    """The library waits for it for a minute, without letting other threads of Python run; the
    memory stays as long.
    """
    with mooncake_master() as master:
        remote = client_of(master, segment_bytes=1 << 24)
        until = time.monotonic() + PATIENT_SECONDS
        connection = remote.connection().open(until)
        page = np.zeros(HEADER_BYTES, np.uint8)
        stored = np.zeros(100, np.uint8)
        connection.put(
            PutRequest(ROOT, b"k" * 32, page, stored, lambda: True), until
        )
        connection.close()
        master.stop()
        try:
            remote._kept.close()
            wait_until(lambda: not helpers(), 30.0)
        finally:
            master.cont()


@pytest.mark.slow
def test_a_call_that_is_late_writes_nothing_afterwards() -> None:
    """The machine that has the chunk stops in the middle: Mooncake waits for it for half a
    minute.
    """
    with (
        mooncake_master("-client_ttl=60") as master,
        mooncake_peer(master) as machine,
    ):
        keys = keys_of(4)
        with hasty_tier(client_of(master), LARGE) as tier:
            stores(tier, keys, LARGE)
            recovers(tier, keys, LARGE)
            machine.stop()
            buffers = [np.full(LARGE.slot_bytes, 7, np.uint8) for _ in keys]
            with soon(4 * LATE_SECONDS):
                done = ends(tier.load(keys, buffers, namespace=ROOT))
            assert {end.reason for end in done} <= {
                Reason.DEADLINE,
                Reason.TIER_SKIPPED,
            }
            machine.cont()
            recovers(tier, keys, LARGE)
            for buffer in buffers:
                assert (buffer == 7).all()


@pytest.mark.slow
def test_a_hanging_call_does_not_delay_the_end() -> None:
    with (
        mooncake_master("-client_ttl=60") as master,
        mooncake_peer(master) as machine,
    ):
        keys = keys_of(2)
        before = helpers()
        with tier_on(client_of(master)) as tier:
            stores(tier, keys)
            recovers(tier, keys)
            machine.stop()
            futures = tier.load(
                keys, [aligned(SMALL.slot_bytes) for _ in keys], namespace=ROOT
            )
            with pytest.raises(TimeoutError):
                futures[0].result(1.0)
            with soon():
                tier.close(LATE_SECONDS)
                for end in ends(futures, LATE_SECONDS):
                    assert not end.ok
        wait_until(lambda: helpers() <= before)
        machine.cont()


# ---- processes


@pytest.mark.slow
def test_a_crash_of_the_library_costs_no_more_than_a_call(pool: Server) -> None:
    keys = keys_of(4)
    before = helpers()
    with tier_on(client_of(pool), deadline_seconds=START_SECONDS) as tier:
        stores(tier, keys)
        for _ in range(3):
            for process in helpers() - before:
                os.kill(process, signal.SIGSEGV)
            recovers(tier, keys)
            assert not tier.resting


@pytest.mark.slow
def test_the_memory_of_this_machine_is_part_of_the_pool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the first save on, until the client is dropped; a process that ends is replaced."""
    with mooncake_master(QUICK) as master:
        keys = keys_of(4)
        later = keys_of(4, chain=1)
        before = helpers()
        giving = [client_of(master, segment_bytes=64 << 20)]
        reader = client_of(master)
        reader.base = giving[0].base

        # after it nothing refers to the tier
        def stored(chain: Sequence[bytes]) -> None:
            with tier_on(giving[0], deadline_seconds=START_SECONDS) as tier:
                assert tier.match_prefix(chain, namespace=ROOT) == 0
                wait_until(
                    lambda: (
                        bool(save(tier, chain))
                        and load(tier, chain, seconds=PATIENT_SECONDS)
                        == [None] * 4
                    )
                )

        stored(keys)
        wait_until(lambda: len(helpers() - before) == 1)
        (share,) = helpers() - before
        with tier_on(reader, deadline_seconds=START_SECONDS) as others:
            recovers(others, keys)
            os.kill(share, signal.SIGKILL)
            wait_until(lambda: not _runs(share))
            stored(later)
            assert "the chunks in it are lost" in caplog.text
            recovers(others, later)
            giving.clear()
            gc.collect()
            # it has left its master, which does not wait for it to be silent
            with soon(10.0):
                wait_until(lambda: set(load(others, later)) == {Reason.ABSENT})
        wait_until(lambda: helpers() <= before)


@pytest.mark.slow
def test_a_forked_child_has_processes_of_its_own(pool: Server) -> None:
    keys = keys_of(3)
    before = helpers()
    with tier_on(client_of(pool), deadline_seconds=START_SECONDS) as tier:
        stores(tier, keys)
        recovers(tier, keys)
        mine = helpers() - before
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                recovers(tier, keys)
                tier.close()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mine <= helpers()
        recovers(tier, keys)


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_started_them(pool: Server) -> None:
    code = f"""
import os, sys, time
from tests.remote.chunks import keys_of, tier_on
from tests.remote.test_mooncake import helpers, stores
from pagoda.tiers.remote.mooncake import MooncakeClient
with tier_on(MooncakeClient({pool.url!r}, prefix="ends", segment_bytes=1 << 24), deadline_seconds=5.0) as tier:
    stores(tier, keys_of(2))
    if os.fork() == 0:  # a child that lives on has their sockets too
        time.sleep(60)
        os._exit(0)
    print(*helpers(), flush=True)
    time.sleep(60)
"""  # noqa: E501
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        started = [int(each) for each in process.stdout.readline().split()]
        assert len(started) >= 2
        process.kill()
        process.wait()
        wait_until(lambda: not any(_runs(each) for each in started))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ---- what is missing


def test_a_library_that_cannot_be_loaded_is_named(
    pool: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (
        caplog.at_level(logging.WARNING),
        tier_on(client_of(pool), deadline_seconds=START_SECONDS) as tier,
    ):
        assert load(tier, keys_of(1), seconds=2 * START_SECONDS) == [
            Reason.IO_ERROR
        ]
    assert "libibverbs.so.1" in caplog.text
    assert "needs libibverbs, libnuma and libcurl" in caplog.text


def test_rdma_without_a_device_is_refused(
    pool: Server, caplog: pytest.LogCaptureFixture
) -> None:
    if Path("/sys/class/infiniband").exists() and os.listdir(
        "/sys/class/infiniband"
    ):
        pytest.skip("this machine has an RDMA device")
    with tier_on(
        client_of(pool, protocol="rdma"), deadline_seconds=START_SECONDS
    ) as tier:
        assert load(tier, keys_of(1), seconds=2 * START_SECONDS) == [
            Reason.IO_ERROR
        ]
    assert "no RDMA device" in caplog.text


def test_without_its_package_the_advice_is_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pagodakv\[mooncake\]"):
        MooncakeClient("mooncake://127.0.0.1")
