"""Endings in a cache, compared with a dictionary of the prompts that have one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.base.clock import Deadline
from pagoda.connectors.endings import Endings, choose
from pagoda.keys import chunk_keys, ending_key
from pagoda.layout import Plane
from pagoda.transfer import DenseKV
from tests.ledger.support import gate_taken

CHUNK = 8
STEP = 0.2  # seconds that a busy store lets a step wait
LAYOUT = KVLayout.of(1, [Plane(1, 4, "float32")], CHUNK)
Tokens = npt.NDArray[np.int32]


def opened(**options: object) -> Cache:
    settings = {"host_size": "1MiB", "host_shared": False, **options}
    return Cache(namespace=Namespace("model"), layout=LAYOUT, **settings)  # type: ignore[arg-type]


def store_chunks(cache: Cache, tokens: Tokens, salt: str | None = None) -> None:
    whole = len(tokens) // CHUNK * CHUNK
    if whole:
        planes = [[np.zeros((1, whole, 4), np.float32)]]
        cache.store(tokens[:whole], DenseKV(planes, LAYOUT), salt=salt)


def payload_of(tokens: Tokens, salt: str | None = None) -> npt.NDArray[np.uint8]:
    """Return bytes that no other tokens and no other salt have."""
    rng = random.Random(tokens.tobytes() + (salt or "").encode())
    return np.frombuffer(rng.randbytes(size_of(len(tokens))), np.uint8)


def size_of(length: int) -> int:
    """Return a size that some lengths do not need at all, and others in several parts."""
    return (length % 5) * 100


def found(
    cache: Cache,
    endings: Endings,
    tokens: Tokens,
    most: int,
    salt: str | None = None,
) -> int:
    whole = cache.lookup(tokens[:most], salt=salt).num_tokens // CHUNK
    return endings.find(
        tokens,
        whole_chunks=whole,
        most_tokens=most,
        payload_bytes=size_of,
        deadline=Deadline(60.0),
        salt=salt,
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_ending_of_a_prompt_is_found_and_whole(seed: int) -> None:
    rng = random.Random(seed)
    with opened() as cache:
        endings = Endings(cache)
        stored: set[tuple[str, bytes]] = set()
        for _ in range(60):
            # the last two are one
            salt = rng.choice(("a", "", None))
            tenant = salt or ""
            # few values, so that prompts share beginnings
            length = rng.randint(1, 40)
            tokens = np.array([rng.randrange(2) for _ in range(length)], np.int32)
            if rng.random() < 0.5:
                store_chunks(cache, tokens, salt)
                payload = payload_of(tokens, tenant)
                assert endings.store(tokens, payload, salt=salt)
                stored.add((tenant, tokens.tobytes()))
                continue
            most = rng.randint(1, length)
            expected = max(
                (
                    n
                    for n in range(1, most + 1)
                    if (tenant, tokens[:n].tobytes()) in stored
                ),
                default=0,
            )
            assert found(cache, endings, tokens, most, salt) == expected
            if expected:
                loaded = endings.load(
                    tokens[:expected], size_of(expected), salt=salt
                )
                assert loaded is not None
                payload = payload_of(tokens[:expected], tenant)
                assert np.array_equal(loaded.payload, payload)


def test_an_ending_is_found_by_a_process_that_did_not_store_it(
    tmp_path: Path,
) -> None:
    options = {
        "host_size": 0,
        "disk_path": str(tmp_path),
        "disk_size": "4MiB",
        "worth_it": False,
    }
    tokens = np.arange(45, dtype=np.int32)
    with opened(**options) as cache:
        store_chunks(cache, tokens)
        assert Endings(cache).store(tokens[:42], payload_of(tokens[:42]))
    with opened(**options) as cache:
        endings = Endings(cache)
        assert found(cache, endings, tokens, 45) == 42
        assert found(cache, endings, tokens, 41) == 0
        loaded = endings.load(tokens[:42], size_of(42))
        assert loaded is not None
        assert np.array_equal(loaded.payload, payload_of(tokens[:42]))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("length", [5, CHUNK, 45])
def test_tenants_share_no_ending(
    length: int, is_new: bool, tmp_path: Path
) -> None:
    """Neither in one process, which remembers what it has seen, nor in a new one, which looks."""
    options = {
        "host_size": 0,
        "disk_path": str(tmp_path),
        "disk_size": "4MiB",
        "worth_it": False,
    }
    tokens = np.arange(length + 3, dtype=np.int32)
    ending = tokens[:length]
    payload = payload_of(ending, "a")
    cache = opened(**options)
    endings = Endings(cache)
    for salt in ("a", "b", None):
        # all have the chunks: only the ending is missing
        store_chunks(cache, tokens, salt)
    assert endings.store(ending, payload, salt="a")
    if is_new:
        cache.close()
        cache = opened(**options)
        endings = Endings(cache)
    with cache:
        for salt in ("b", None):
            assert found(cache, endings, tokens, length + 3, salt) == 0
            assert endings.load(ending, size_of(length), salt=salt) is None
            # another payload for the same tokens
            assert endings.store(ending, payload_of(ending, "b"), salt=salt)
            assert found(cache, endings, tokens, length + 3, salt) == length
        assert found(cache, endings, tokens, length + 3, "a") == length
        loaded = endings.load(ending, size_of(length), salt="a")
        assert loaded is not None
        assert np.array_equal(loaded.payload, payload)


def test_a_tenants_endings_are_removed_with_its_chunks() -> None:
    tokens = np.arange(45, dtype=np.int32)
    with opened() as cache:
        endings = Endings(cache)
        for salt in ("a", None):
            store_chunks(cache, tokens, salt)
            assert endings.store(tokens, payload_of(tokens), salt=salt)
        cache.clear(salt="a")
        assert endings.load(tokens, size_of(45), salt="a") is None
        assert endings.load(tokens, size_of(45)) is not None


def test_a_search_in_a_busy_store_ends_in_time(tmp_path: Path) -> None:
    """Each step waits for the store; a search of a large chunk has many."""
    layout = KVLayout.of(1, [Plane(1, 4, "float32")], 1024)
    with Cache(
        namespace=Namespace("model"),
        layout=layout,
        host_size=0,
        disk_path=str(tmp_path),
        disk_size="4MiB",
        deadline_seconds=STEP,
    ) as cache:
        endings = Endings(cache)
        asked = []
        which = cache.which

        def noted(keys: Sequence[bytes], **options: str | None) -> list[bool]:
            asked.append(len(keys))
            return which(keys, **options)

        cache.which = noted  # type: ignore[method-assign]
        with gate_taken(cache._tiers.ledgers()[0][1]):
            length = endings.find(
                np.arange(1000, dtype=np.int32),
                whole_chunks=0,
                most_tokens=1000,
                payload_bytes=size_of,
                deadline=Deadline(STEP),
            )
        assert length == 0
        # sixteen without the deadline
        assert len(asked) <= 2


def test_an_ending_without_all_parts_is_none() -> None:
    """A part that was evicted makes the whole ending absent."""
    tokens = np.arange(44, dtype=np.int32)
    with opened() as cache:
        endings = Endings(cache)
        store_chunks(cache, tokens)
        assert endings.store(tokens, payload_of(tokens))
        assert size_of(44) > 2 * LAYOUT.chunk_bytes
        parents = endings._parents(tokens, {})
        options = endings._options(tokens, parents, size_of(44), {})
        last = list(options["keys"])[-1]
        host = cache._tiers.host
        assert host is not None
        assert host.remove(last[2])  # type: ignore[arg-type]
        assert found(cache, endings, tokens, 44) == 0
        assert endings.load(tokens, size_of(44)) is None


def test_a_cache_with_a_minimum_is_refused() -> None:
    """An ending is a few parts by itself: the minimum of a prompt would hide all of them."""
    with (
        opened(min_hit_tokens=32) as cache,
        pytest.raises(ValueError, match="min_hit_tokens"),
    ):
        Endings(cache)


def test_the_key_of_an_ending_is_no_key_of_a_chunk() -> None:
    root = bytes(32)
    tokens = np.arange(CHUNK, dtype=np.int32)
    (chunk,) = chunk_keys(tokens, root, CHUNK)
    assert ending_key(tokens, root) != chunk
    assert ending_key([], chunk) != ending_key(tokens, root)
    assert ending_key([], chunk) != chunk


def test_endings_are_chosen_at_marks_and_from_the_end() -> None:
    points = [(84, 84), (596, 596), (607, 607), (40, 40), (20, 20)]
    assert choose(points) == [40, 84, 596, 607]
    assert choose(points, most=2) == [596, 607]
    # a prompt goes on in another way after token 90, another one after token 30
    assert choose(points, marks=[90, 30]) == [20, 84, 596, 607]
    assert choose(points, marks=[10]) == [40, 84, 596, 607]
    # where a range is known, the mark itself is
    assert choose([(130, 300), (598, 607)], marks=[200]) == [200, 300, 598, 607]
    assert choose([], marks=[5]) == []
