"""The chunks used last, without reading the others; the short names of stores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.ledger import ChunkRow, Ledger, admin
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.store_names import store_names
from tests.cli.shelf import LLAMA, QWEN, disk, host, put, save


@pytest.fixture
def ledger(shm_root: Path) -> Iterator[Ledger]:
    found = host(shm_root, slots=2048)
    yield found
    found.close()


def keys_of(rows: list[ChunkRow]) -> list[bytes]:
    return [row.key for row in rows]


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows that are read from the tables from now on."""
    slots: list[int] = []
    real = admin._chunk_row

    def counted(ledger: Ledger, *row: object) -> ChunkRow:
        found = real(ledger, *row)  # type: ignore[arg-type]
        slots.append(found.slot)
        return found

    monkeypatch.setattr(admin, "_chunk_row", counted)
    return slots


def test_only_what_is_listed_is_read(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger, LLAMA, range(16 * 1500))
    new = put(ledger, QWEN, range(16 * 10))
    read = rows_read(monkeypatch)
    assert keys_of(admin.latest_chunks(ledger, 10)) == new[::-1]
    assert keys_of(admin.latest_chunks(ledger, 5)) == new[:4:-1]
    assert len(read) <= 2 * 256


def test_the_rest_of_a_store_is_not_read_after_the_last_of_a_namespace(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger, LLAMA, range(16 * 1500))
    new = put(ledger, QWEN, range(16 * 10))
    read = rows_read(monkeypatch)
    found = admin.latest_chunks(ledger, 100, {QWEN.root}, 10)
    assert set(keys_of(found)) == set(new)
    assert len(read) <= 256


@pytest.mark.parametrize("limit", [1, 2, 63, 200, 5000])
def test_it_is_the_head_of_the_sorted_list(ledger: Ledger, limit: int) -> None:
    chance = random.Random(limit)
    keys = put(ledger, LLAMA, range(16 * 150))
    other = put(ledger, QWEN, range(16 * 50))
    for _ in range(20):
        run = chance.choice([keys, other])
        ledger.match_prefix(run[: chance.randrange(1, 40)], deadline_seconds=30.0)
    # not by their ages: a stamp may be some microseconds ahead of the clock
    stamps = ledger.columns.last_use
    whole = sorted(
        admin.list_chunks(ledger),
        key=lambda row: (-int(stamps[row.slot]), row.position),
    )
    found = admin.latest_chunks(ledger, limit)
    assert len(found) == min(limit, 200)
    assert keys_of(found) == keys_of(whole[:limit])
    mine = [row for row in whole if row.namespace_root == QWEN.root]
    found = admin.latest_chunks(ledger, limit, {QWEN.root}, 50)
    assert keys_of(found) == keys_of(mine[:limit])


def test_chunks_that_the_columns_have_lost_are_listed_all_the_same(
    tmp_path: Path,
) -> None:
    with disk(tmp_path) as tier:
        keys = save(tier, LLAMA, range(16 * 20))
        columns = tier.ledger.columns
        columns.last_use[np.arange(columns.slots) % 2 == 0] = NOT_READY
        found = admin.latest_chunks(tier.ledger, 20)
        assert set(keys_of(found)) == set(keys)
        columns.last_use[:] = 5  # damaged: free slots look used
        found = admin.latest_chunks(tier.ledger, 20)
        assert set(keys_of(found)) == set(keys)


def test_a_store_has_one_short_name_that_its_path_contains() -> None:
    layout = "79aff30b522f22e9"
    other = "df9f94a339e3219a"
    alone = [("host", Path("/dev/shm/pagoda-0", f"{layout}.4"))]
    assert store_names(alone) == ["host:79aff3"]
    several = [
        *alone,
        ("host", Path("/dev/shm/pagoda-0", f"{other}.4")),
        ("disk", Path("/var/cache/pagoda", layout)),
    ]
    assert store_names(several) == ["host:79aff3", "host:df9f94", "disk:79aff3"]
    assert store_names([]) == []
    assert store_names([("host", Path("/a/named"))]) == ["host:named"]


def test_a_private_store_is_named_by_its_process() -> None:
    root = Path("/dev/shm/pagoda-0")
    layout = "79aff30b522f22e9.5"
    first = ("host", root / f"{layout}.private-4711-4d6a3c30")
    other = ("host", root / f"{layout}.private-4712-00000000")
    assert store_names([first, other]) == [
        "host:private-4711",
        "host:private-4712",
    ]
    second = ("host", root / f"{layout}.private-4711-00000000")
    assert store_names([first, second]) == [
        f"host:{first[1].name}",
        f"host:{second[1].name}",
    ]


def test_names_that_would_be_equal_are_longer() -> None:
    layout = "79aff30b522f22e9"
    roots = [
        ("host", Path("/dev/shm/a", f"{layout}.4")),
        ("host", Path("/dev/shm/b", f"{layout}.4")),
        ("host", Path("/dev/shm/b", f"{layout}.3")),
        ("disk", Path("/x/cache", layout)),
        ("disk", Path("/y/cache", layout)),
        ("disk", Path("/y/cache", "12")),
    ]
    names = store_names(roots)
    assert names == [
        "host:a/79aff3",
        f"host:b/{layout}.4",
        f"host:b/{layout}.3",
        f"disk:x/cache/{layout}",
        f"disk:y/cache/{layout}",
        "disk:12",
    ]
    assert len(set(store_names([*roots, *roots]))) == 6
    for name, (_, path) in zip(names, roots, strict=True):
        assert name.partition(":")[2] in str(path)
