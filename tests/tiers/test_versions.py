"""Stores that other versions wrote, are using, or will write: chunks on a disk are kept, and never
mixed up.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pagoda.base import metrics
from pagoda.base.errors import StoreError
from pagoda.ledger import (
    Ledger,
    admin,
    member_counters,
    root_usage,
    session,
    space_sharing,
    store_directory,
    store_state,
)
from pagoda.ledger.member_counters import COUNTERS_BYTES, WIDTH
from pagoda.ledger.store_state import (
    COUNTERS_FILE,
    FORMAT,
    SLAB_FORMAT,
    STATE,
    read_state,
    write_state,
)
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers import host as host_module
from tests.children import in_child
from tests.ledger import support
from tests.ledger.support import Other, keys, opened
from tests.tiers.tools import (
    LAYOUT,
    NAMESPACE,
    ROOT,
    STRIDE,
    chunks_of,
    keys_of,
    oks,
    right,
)

KEYS = keys_of(6)


def disk(root: Path) -> DiskTier:
    tier = DiskTier.open(LAYOUT, root, 16 * STRIDE)
    tier.register(NAMESPACE)
    return tier


def host(root: Path) -> HostTier:
    tier = HostTier.open(LAYOUT, root, 16 * LAYOUT.slot_bytes, populate=False)
    tier.register(NAMESPACE)
    return tier


def written(root: Path) -> Path:
    """A closed disk store with six chunks."""

    def work() -> None:
        tier = disk(root)
        assert all(oks(tier.store(chunks_of(KEYS), ROOT)))
        tier.close()

    in_child(work)
    return root / LAYOUT.fingerprint


def as_format_2(store: Path) -> None:
    """Make the state and the counters those of the version before format 3: one bare text, and
    columns by order.
    """
    state = read_state(store)
    assert state is not None
    fields = msgspec.to_builtins(state)
    for new in ("slab_format", "used_bytes", "checksum"):
        del fields[new]
    (store / STATE).write_bytes(msgspec.json.encode(fields | {"format": 2}))
    (store / COUNTERS_FILE).write_bytes(bytes(512 * 61 * 8))


def keeps_all(root: Path) -> None:
    tier = disk(root)
    assert tier.wait_ready(30)
    assert [right(tier, key) for key in KEYS] == [True] * 6
    assert all(oks(tier.store(chunks_of(keys_of(3, chain=5)), ROOT)))
    admin.check(tier.ledger)
    tier.close()


@pytest.mark.slow
def test_a_store_of_format_2_keeps_what_it_holds(tmp_path: Path) -> None:
    directory = written(tmp_path)
    as_format_2(directory)
    for _ in range(2):
        in_child(lambda: keeps_all(tmp_path))
    state = read_state(directory)
    assert state is not None
    assert state.format == FORMAT
    assert state.clean


@pytest.mark.parametrize("format_", [FORMAT - 1, FORMAT + 1])
def test_tables_of_another_format_are_rebuilt(
    tmp_path: Path, format_: int
) -> None:
    directory = written(tmp_path)
    state = read_state(directory)
    assert state is not None
    write_state(directory, msgspec.structs.replace(state, format=format_))
    in_child(lambda: keeps_all(tmp_path))
    after = read_state(directory)
    assert after is not None
    assert after.store_id == state.store_id
    assert after.incarnation == state.incarnation + 1


def test_chunks_of_another_format_are_left_alone(tmp_path: Path) -> None:
    directory = written(tmp_path)
    state = read_state(directory)
    assert state is not None
    write_state(
        directory, msgspec.structs.replace(state, slab_format=SLAB_FORMAT + 1)
    )
    before = {path.name: path.stat().st_size for path in directory.iterdir()}
    with pytest.raises(StoreError, match=r"another version.*another path"):
        disk(tmp_path)
    assert {
        path.name: path.stat().st_size for path in directory.iterdir()
    } == before
    write_state(directory, state)
    in_child(lambda: keeps_all(tmp_path))


def test_a_disk_that_another_version_uses_is_named(tmp_path: Path) -> None:
    kept = []

    def use_it() -> None:
        tier = disk(tmp_path)
        kept.append(tier)
        state = read_state(tier.ledger.directory)
        assert state is not None
        write_state(
            tier.ledger.directory,
            msgspec.structs.replace(state, format=FORMAT + 1),
        )

    with (
        Other(use_it),
        pytest.raises(StoreError, match=f"another version.*format {FORMAT + 1}"),
    ):
        disk(tmp_path)


def test_two_versions_have_a_host_store_each(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer() -> None:
        for module in (
            store_state,
            store_directory,
            root_usage,
            space_sharing,
            host_module,
        ):
            monkeypatch.setattr(module, "FORMAT", FORMAT + 1)
        tier = host(shm_root)
        assert admin.gauges(tier.ledger)["free"] == 16, "it has a separate limit"
        assert not right(tier, KEYS[0])
        assert all(oks(tier.store(chunks_of(KEYS[:2]), ROOT)))
        tier.close()

    tier = host(shm_root)
    assert all(oks(tier.store(chunks_of(KEYS), ROOT)))
    in_child(newer)
    assert [right(tier, key) for key in KEYS] == [True] * 6
    tier.close()


def test_what_another_version_left_in_memory_gives_way(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []

    def leave() -> None:
        tier = host(shm_root)
        kept.append(tier)
        state = read_state(tier.ledger.directory)
        assert state is not None
        write_state(
            tier.ledger.directory, msgspec.structs.replace(state, format=2)
        )
        # at the place in that version
        os.rename(tier.ledger.directory, shm_root / LAYOUT.fingerprint)

    with Other(leave):
        host(shm_root).close()
        assert (shm_root / LAYOUT.fingerprint).is_dir()
    with caplog.at_level(logging.WARNING):
        host(shm_root).close()
    assert not (shm_root / LAYOUT.fingerprint).exists()
    assert "format 2" in caplog.text


# counters


def test_a_new_counter_is_no_new_format(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions at once: each counts by name, and neither changes nor loses counters that it
    does not know.
    """
    more = ("counted first", *metrics.COUNTERS, "counted last")

    def newer() -> None:
        for module in (member_counters, session):
            monkeypatch.setattr(module, "COUNTERS", more)
        ledger = opened(shm_root)
        # a forked child becomes a member with its first transaction
        admin.gauges(ledger)
        ledger.count({"counted last": 7})
        ledger.count({"counted first": 5})
        ledger.count({"lookups": 3})
        assert admin.counters(ledger)["counted last"] == 7

    def newer_again() -> None:
        for module in (member_counters, session):
            monkeypatch.setattr(module, "COUNTERS", more)
        ledger = opened(shm_root)
        counters = admin.counters(ledger)
        assert counters["counted first"] == 5
        assert counters["counted last"] == 7
        assert counters["lookups"] == 13
        assert counters["hits"] == 1
        ledger.close()

    older = opened(shm_root)
    older.count({"lookups": 10})
    with Other(newer):
        assert admin.counters(older)["lookups"] == 13
    admin.reap(older)  # adds up the whole row of the dead member
    older.count({"hits": 1})
    assert tuple(admin.counters(older)) == metrics.COUNTERS
    assert admin.counters(older)["lookups"] == 13
    in_child(newer_again)
    older.close()
    support.opened(shm_root).close()


def test_more_counters_than_columns_are_not_counted(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(f"counter {n}" for n in range(WIDTH + 5))

    def work() -> None:
        for module in (member_counters, session):
            monkeypatch.setattr(module, "COUNTERS", many)
        ledger = opened(shm_root)
        for name in (many[0], many[-1]):
            ledger.count({name: 4})
        counters = admin.counters(ledger)
        assert counters[many[0]] == 4
        assert counters[many[-1]] == 0
        with pytest.raises(KeyError):
            ledger.count({"no such counter": 1})
        ledger.close()

    in_child(work)
    assert COUNTERS_BYTES == 512 * WIDTH * 8


# headers


def foreign(
    page: np.ndarray, format_: int | None = None, codec: bytes | None = None
) -> None:
    """Turn a header into one of another version: seal it again, as every version seals its page."""
    from pagoda.codec import header

    if format_ is not None:
        struct.pack_into("<I", page.data, 8, format_)
    if codec is not None:
        at = struct.calcsize("<8sII16sQ32sQ32sQQQ")
        page[at : at + 16] = np.frombuffer(codec.ljust(16, b"\0"), np.uint8)
    page[header._OWN] = np.frombuffer(header._own_checksum(page.data), np.uint8)


@pytest.mark.parametrize("change", [{"format_": 2}, {"codec": b"new"}])
def test_a_chunk_that_another_version_wrote_is_a_miss_and_stays(
    tmp_path: Path, change: dict[str, object]
) -> None:
    tier = disk(tmp_path)
    assert all(oks(tier.store(chunks_of(KEYS), ROOT)))
    slot = int(tier.ledger.match_prefix(KEYS[2:3]).slots[0])
    with open(tier.ledger.slab_path, "r+b") as slab:
        slab.seek(slot * STRIDE)
        page = np.frombuffer(bytearray(slab.read(4096)), np.uint8).copy()
        foreign(page, **change)  # type: ignore[arg-type]
        slab.seek(slot * STRIDE)
        slab.write(page.tobytes())
    assert [right(tier, key) for key in KEYS] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert tier.contains(KEYS[2])
    assert not admin.counters(tier.ledger)["failed_checks"]
    # with one more flipped bit it counts as damaged
    with open(tier.ledger.slab_path, "r+b") as slab:
        slab.seek(slot * STRIDE + 3000)
        slab.write(b"\x01")
    assert not right(tier, KEYS[2])
    assert not tier.contains(KEYS[2])
    tier.close()


def test_the_name_of_a_host_store_says_its_format(shm_root: Path) -> None:
    tier = host(shm_root)
    assert tier.ledger.directory.name == f"{LAYOUT.fingerprint}.{FORMAT}"
    tier.close()
    assert isinstance(tier.ledger, Ledger)
    assert keys(1)
