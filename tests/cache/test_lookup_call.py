"""Look-ups: keys are derived as far as a look-up gets, and not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagoda import keys as token_keys
from pagoda.base.metrics import Reason
from pagoda.keys import PromptKeys, chunk_keys
from tests.cache.kit import CHUNK, LAYOUT, NAMESPACE, cache_at, prompt, stored

# longer than what is hashed at once
LONG = 100
ROOM = {"host_size": 256 * LAYOUT.slot_bytes}


@pytest.mark.parametrize("chunks", [0, 0.5, 1, 7, 8, 9, 16.5, 17, 63, 64.5, 600])
@pytest.mark.parametrize("make", [np.int64, list, tuple])
def test_keys_in_windows_are_the_keys(
    chunks: float, make: Callable[[object], list[int]]
) -> None:
    tokens = prompt(chunks)
    wanted = chunk_keys(tokens, NAMESPACE.root, CHUNK)
    lazy = PromptKeys(make(tokens.tolist()), NAMESPACE.root, CHUNK)
    assert len(lazy) == len(wanted)
    assert lazy.num_tokens == len(tokens)
    at = 0
    while at < len(wanted):
        window = lazy.window(at)
        assert window == wanted[at : at + len(window)]
        assert window
        at += len(window)
    assert list(lazy) == wanted
    fresh = PromptKeys(make(tokens.tolist()), NAMESPACE.root, CHUNK)
    assert fresh[:] == wanted
    if wanted:
        fresh = PromptKeys(make(tokens.tolist()), NAMESPACE.root, CHUNK)
        assert fresh[-1] == wanted[-1]


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
@pytest.mark.parametrize("have", [0, 1, 7, 8, 9, 71, 72, 73, 99, 100])
def test_a_long_prompt_is_found_as_far_as_it_is_stored(
    tmp_path: Path, shm_root: Path, tiers: str, have: int
) -> None:
    tokens = prompt(LONG)
    host = shm_root if tiers != "disk" else None
    disk = tmp_path if tiers != "host" else None
    with cache_at(host, disk, **(ROOM if host else {})) as cache:
        stored(cache, tokens[: have * CHUNK])
        for asked in (tokens, tokens.tolist()):
            hit = cache.lookup(asked)
            assert hit.num_tokens == have * CHUNK
            assert hit.reason is (None if have == LONG else Reason.ABSENT)
            assert len(hit.mask) == len(tokens)


def test_a_run_goes_on_in_a_lower_tier_behind_the_first_chunks(
    tmp_path: Path, shm_root: Path
) -> None:
    tokens = prompt(LONG)
    with cache_at(shm_root, tmp_path, **ROOM) as cache:
        stored(cache, tokens)
        cache._tiers.host.clear()  # type: ignore[union-attr]
        stored(cache, tokens[: 10 * CHUNK])
        assert cache.lookup(tokens).by_tier == {
            "host": 10 * CHUNK,
            "disk": 90 * CHUNK,
        }


def test_a_miss_hashes_a_few_chunks_only(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    chain = token_keys._chain

    def noted(ids, *more):  # type: ignore[no-untyped-def]
        hashed.append(len(ids))
        return chain(ids, *more)

    monkeypatch.setattr(token_keys, "_chain", noted)
    with cache_at(shm_root, None, **ROOM) as cache:
        tokens = np.arange(1_000_000, dtype=np.int32)
        for asked in (tokens, tokens.tolist()):
            hashed.clear()
            assert cache.lookup(asked).num_tokens == 0
            assert sum(hashed) <= 16 * CHUNK


@pytest.mark.parametrize("wrong", [-1, 2**31])
@pytest.mark.parametrize("make", [np.int64, list])
def test_wrong_ids_are_refused_when_they_are_read(
    shm_root: Path, wrong: int, make: Callable[[object], list[int]]
) -> None:
    good = prompt(LONG).tolist()
    bad = good[:-CHUNK] + [wrong] * CHUNK
    says = "remove padding" if wrong < 0 else "over 2147483647"
    with cache_at(shm_root, None, **ROOM) as cache:
        # nothing is stored, so the end of the prompt is not read
        assert cache.lookup(make(bad)).num_tokens == 0
        kv = stored(cache, np.asarray(good, np.int32))
        with pytest.raises(ValueError, match=says):
            cache.lookup(make(bad))
        with pytest.raises(ValueError, match=says):
            cache.store(make(bad), kv.transfer)
        with pytest.raises(ValueError, match=says):
            cache.retrieve(make(bad), kv.transfer)
        # in the first chunks, at once
        with pytest.raises(ValueError, match=says):
            cache.lookup(make([wrong, *good]))
        assert cache.stats()["misses"].get("io_error", 0) == 0


def test_tokens_may_change_when_a_future_was_returned(shm_root: Path) -> None:
    with cache_at(shm_root, None, **ROOM) as cache:
        stored(cache, prompt(LONG))
        for _ in range(20):
            tokens = prompt(LONG)
            future = cache.lookup_future(tokens)
            tokens[:] = 7
            assert future.result().num_tokens == LONG * CHUNK


@pytest.mark.parametrize("tokens", [iter([1]), 3, None, np.int32(3), {1: 2}, "a"])
def test_what_is_no_prompt_is_a_value_error(
    shm_root: Path, tokens: object
) -> None:
    with cache_at(shm_root, None, **ROOM) as cache, pytest.raises(ValueError):
        cache.lookup(tokens)  # type: ignore[arg-type]
