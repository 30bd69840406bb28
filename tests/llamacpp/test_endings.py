"""Endings in a cache, compared with a dictionary of the prompts that have one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.connectors.endings import Endings, choose
from pagoda.keys import chunk_keys, ending_key
from pagoda.layout import Plane
from pagoda.transfer import DenseKV

CHUNK = 8
LAYOUT = KVLayout.of(1, [Plane(1, 4, "float32")], CHUNK)
Tokens = npt.NDArray[np.int32]


def opened(**options: object) -> Cache:
    settings = {"host_size": "1MiB", "host_shared": False, **options}
    return Cache(namespace=Namespace("model"), layout=LAYOUT, **settings)  # type: ignore[arg-type]


def store_chunks(cache: Cache, tokens: Tokens) -> None:
    whole = len(tokens) // CHUNK * CHUNK
    if whole:
        planes = [[np.zeros((1, whole, 4), np.float32)]]
        cache.store(tokens[:whole], DenseKV(planes, LAYOUT))


def payload_of(tokens: Tokens) -> npt.NDArray[np.uint8]:
    rng = random.Random(tokens.tobytes())
    return np.frombuffer(rng.randbytes(size_of(len(tokens))), np.uint8)


def size_of(length: int) -> int:
    """Return a size that some lengths do not need at all, and others in several parts."""
    return (length % 5) * 100


def found(cache: Cache, endings: Endings, tokens: Tokens, most: int) -> int:
    whole = cache.lookup(tokens[:most]).num_tokens // CHUNK
    return endings.find(
        tokens, whole_chunks=whole, most_tokens=most, payload_bytes=size_of
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_ending_of_a_prompt_is_found_and_whole(seed: int) -> None:
    rng = random.Random(seed)
    with opened() as cache:
        endings = Endings(cache)
        stored: dict[bytes, int] = {}
        for _ in range(60):
            # few values, so that prompts share beginnings
            length = rng.randint(1, 40)
            tokens = np.array([rng.randrange(2) for _ in range(length)], np.int32)
            if rng.random() < 0.5:
                store_chunks(cache, tokens)
                assert endings.store(tokens, payload_of(tokens))
                stored[tokens.tobytes()] = length
                continue
            most = rng.randint(1, length)
            expected = max(
                (n for n in range(1, most + 1) if tokens[:n].tobytes() in stored),
                default=0,
            )
            assert found(cache, endings, tokens, most) == expected
            if expected:
                loaded = endings.load(tokens[:expected], size_of(expected))
                assert loaded is not None
                assert np.array_equal(loaded, payload_of(tokens[:expected]))


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
        assert np.array_equal(loaded, payload_of(tokens[:42]))


def test_an_ending_without_all_parts_is_none() -> None:
    """A part that was evicted makes the whole ending absent."""
    tokens = np.arange(44, dtype=np.int32)
    with opened() as cache:
        endings = Endings(cache)
        store_chunks(cache, tokens)
        assert endings.store(tokens, payload_of(tokens))
        assert size_of(44) > 2 * LAYOUT.chunk_bytes
        parents = endings._parents(tokens, None)
        options = endings._options(tokens, parents, size_of(44), None)
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
