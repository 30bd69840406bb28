"""Calls with `after` continue from the keys of an earlier call, and answer as without it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import keys as token_keys
from pagoda.cache import Cache, Hit
from pagoda.keys import Item, KeyPrefix, PromptKeys, chunk_keys
from pagoda.layout import KVLayout
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    Prompt,
    blank,
    cache_at,
    config_of,
    kv_of,
    prompt,
    stored,
)

LONG = 20
TURN = prompt(LONG)
NEXT = np.concatenate([TURN, prompt(5, seed=1)])


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of each step in which keys are derived."""
    steps: list[int] = []
    chain = token_keys._chain

    def noted(ids, parent, chunk_tokens, trailers):  # type: ignore[no-untyped-def]
        made = chain(ids, parent, chunk_tokens, trailers)
        steps.append(len(made))
        return made

    monkeypatch.setattr(token_keys, "_chain", noted)
    return steps


def answer(hit: Hit) -> tuple[object, ...]:
    """What a hit says."""
    return (
        hit.num_tokens,
        hit.by_tier,
        hit.mask.tolist(),
        hit.reason,
        hit.start_tokens,
    )


def test_a_turn_derives_the_keys_of_its_new_chunks(
    shm_root: Path, hashed: list[int]
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, NEXT)
        first = cache.lookup(TURN, after=None)
        assert first.num_tokens == len(TURN)
        hashed.clear()
        second = cache.lookup(NEXT, after=first)
        assert sum(hashed) == 5
        assert second.num_tokens == len(NEXT)
        wanted = kv_of(NEXT)
        hashed.clear()
        # the calls of one turn, too
        kv = blank(NEXT)
        third = cache.retrieve(NEXT, kv.transfer, after=second)
        assert kv.same(wanted)
        assert cache.store(NEXT, kv.transfer, after=third).present == LONG + 5
        assert cache.lookup(NEXT, after=third).num_tokens == len(NEXT)
        assert sum(hashed) == 0


def test_a_hit_keeps_no_tokens(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        hit = cache.lookup(TURN, after=None)
        assert hit.keys is not None
        parts = [*hit.keys, *hit.keys.keys]
        for one in parts:
            assert isinstance(one, bytes | int | tuple)
        for one in gc.get_referents(hit.keys):
            assert not isinstance(one, np.ndarray)
        # so it says nothing of a prompt to whoever prints it
        assert "keys" not in repr(hit)


EDITS: dict[str, Callable[[Prompt], Prompt]] = {
    "the first id": lambda ids: edited(ids, 0),
    "an id in the middle": lambda ids: edited(ids, LONG * CHUNK // 2),
    "the last id of the head": lambda ids: edited(ids, LONG * CHUNK - 1),
    "one id less": lambda ids: np.delete(ids, 3),
    "one id more": lambda ids: np.insert(ids, 3, 17),
    "two ids exchanged": lambda ids: ids[[1, 0, *range(2, len(ids))]],
    "two chunks exchanged": lambda ids: np.concatenate(
        [ids[CHUNK : 2 * CHUNK], ids[:CHUNK], ids[2 * CHUNK :]]
    ),
    "shorter than the head": lambda ids: ids[: LONG * CHUNK - 1],
    "much shorter": lambda ids: ids[: 3 * CHUNK],
    "empty": lambda ids: ids[:0],
    "another prompt": lambda ids: prompt(LONG + 5, seed=7),
    "another dtype": lambda ids: ids.astype(np.int64),
    "the same": lambda ids: ids,
}


def edited(ids: Prompt, at: int) -> Prompt:
    changed = ids.copy()
    changed[at] += 1
    return changed


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_head_is_hashed_anew(shm_root: Path, edit: str) -> None:
    tokens = EDITS[edit](NEXT)
    with cache_at(shm_root, None) as cache:
        stored(cache, NEXT)
        stored(cache, tokens[: len(tokens) // CHUNK * CHUNK])
        first = cache.lookup(TURN, after=None)
        for asked in (tokens, tokens.tolist()):
            with_after = cache.lookup(asked, after=first)
            assert answer(with_after) == answer(cache.lookup(asked))
            assert with_after.num_tokens == len(tokens) // CHUNK * CHUNK
        own = PromptKeys(tokens, NAMESPACE.root, CHUNK)
        assert first.keys is not None
        continued = PromptKeys(tokens, NAMESPACE.root, CHUNK, first.keys)
        assert list(continued) == list(own)
        wide = PromptKeys(tokens, NAMESPACE.root, 2 * CHUNK, first.keys)
        assert list(wide) == chunk_keys(tokens, NAMESPACE.root, 2 * CHUNK)


@pytest.mark.parametrize(
    "options",
    [
        {"salt": "another"},
        {"lora": "an adapter"},
        {"numerics": "tf32"},
        {"weights_version": "run 7"},
        {"items": [Item(3, 5, bytes(32))]},
    ],
)
def test_keys_of_another_namespace_are_not_used(
    shm_root: Path, options: dict[str, object]
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, NEXT)
        first = cache.lookup(TURN, after=None)
        assert cache.lookup(NEXT, after=first, **options).num_tokens == 0  # type: ignore[arg-type]
        # and the other way round
        kv = kv_of(NEXT)
        cache.clear()
        new = cache.store(NEXT, kv.transfer, after=first, **options)  # type: ignore[arg-type]
        assert new.num_chunks == LONG + 5
        assert cache.lookup(NEXT, **options).num_tokens == len(NEXT)  # type: ignore[arg-type]
        other = cache.lookup(TURN, after=None, **options)  # type: ignore[arg-type]
        assert other.num_tokens == len(TURN)
        assert cache.lookup(NEXT, after=other).num_tokens == 0
        mine = cache.lookup(NEXT, after=other, **options)  # type: ignore[arg-type]
        assert mine.num_tokens == len(NEXT)


def test_keys_of_weights_that_changed_meanwhile_are_not_used(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, NEXT)
        first = cache.lookup(TURN, after=None)
        cache.weights_changed()
        assert cache.lookup(NEXT, after=first).num_tokens == 0
        kv = kv_of(NEXT)
        assert cache.store(NEXT, kv.transfer, after=first).num_chunks == LONG + 5
        assert cache.lookup(NEXT).num_tokens == len(NEXT)


def test_keys_of_another_cache_are_used_only_if_they_are_the_same(
    shm_root: Path, hashed: list[int]
) -> None:
    other_layout = KVLayout.opaque(CHUNK, 8192, "another layout")
    with cache_at(shm_root, None) as one:
        stored(one, NEXT)
        first = one.lookup(TURN, after=None)
        others = {
            "model": (NAMESPACE.with_(model="another"), LAYOUT, 0),
            "dtype": (NAMESPACE.with_(kv_dtype="fp8"), LAYOUT, 0),
            "layout": (NAMESPACE, other_layout, 0),
            "the same": (NAMESPACE, LAYOUT, len(NEXT)),
        }
        for namespace, layout, found in others.values():
            with Cache(
                config_of(shm_root, None), namespace=namespace, layout=layout
            ) as two:
                hashed.clear()
                assert two.lookup(NEXT, after=first).num_tokens == found
                # a miss looks for its first chunk under other names, too
                assert sum(hashed) in ((5,) if found else (25, 26))
        # chunks of another length
        wide = KVLayout.opaque(2 * CHUNK, 16384, "tests of the cache")
        config = config_of(shm_root / "wide", None, chunk_tokens=2 * CHUNK)
        with Cache(config, namespace=NAMESPACE, layout=wide) as two:
            assert two.lookup(NEXT, after=first).num_tokens == 0


def test_a_key_scheme_of_the_caller_is_always_asked(shm_root: Path) -> None:
    asked = []

    def scheme(tokens, root, chunk_tokens, items):  # type: ignore[no-untyped-def]
        asked.append(len(tokens))
        return chunk_keys(tokens, root, chunk_tokens, items)

    with (
        cache_at(shm_root, None) as one,
        Cache(
            config_of(shm_root, None),
            namespace=NAMESPACE,
            layout=LAYOUT,
            key_scheme=scheme,
        ) as two,
    ):
        two.lookup(NEXT, after=one.lookup(TURN, after=None))
        assert asked == [len(NEXT)]


@pytest.mark.parametrize("wrong", [7, "hit", b"", KeyPrefix(b"", 1, (), b"")])
def test_what_is_no_hit_is_refused(shm_root: Path, wrong: object) -> None:
    with cache_at(shm_root, None) as cache:
        for call in (cache.lookup, cache.prefetch, cache.explain):
            with pytest.raises(ValueError, match="after"):
                call(TURN, after=wrong)  # type: ignore[operator]
        # without the option there is nothing to continue from
        short = cache.lookup(TURN[:CHUNK])
        assert short.keys is None
        assert cache.lookup(TURN, after=short).num_tokens == 0
        assert cache.lookup(TURN, after=replace(short, keys=None)).num_tokens == 0


@st.composite
def histories(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of which each is an edit of an earlier one."""
    # few different ids, so that edited prompts meet again
    tokens = st.lists(st.integers(0, 2), max_size=30 * CHUNK)
    turns = [draw(tokens)]
    for _ in range(draw(st.integers(1, 6))):
        base = list(draw(st.sampled_from(turns)))
        cut = draw(st.integers(0, len(base)))
        match draw(st.sampled_from(["append", "cut", "change", "insert", "new"])):
            case "append":
                base += draw(tokens)
            case "cut":
                base = base[:cut]
            case "change" if base:
                base[cut % len(base)] ^= 1
            case "insert":
                base[cut:cut] = draw(st.lists(st.integers(0, 2), max_size=3))
            case "new":
                base = draw(tokens)
        turns.append(base)
    return turns


@settings(deadline=None)
@given(histories(), st.data())
def test_answers_with_and_without_after_are_equal(
    shm_root: Path, turns: list[list[int]], data: st.DataObject
) -> None:
    with cache_at(shm_root, None) as cache:
        hits: list[Hit | None] = [None]
        for turn in turns:
            ids = np.array(turn, np.int32)
            after = data.draw(st.sampled_from(hits))
            salt = data.draw(st.sampled_from([None, "a"]))
            asked = data.draw(st.sampled_from([ids, turn]))
            hit = cache.lookup(asked, after=after, salt=salt)
            assert answer(hit) == answer(cache.lookup(asked, salt=salt))
            if data.draw(st.booleans()):
                kv = kv_of(ids)
                cache.store(asked, kv.transfer, after=after, salt=salt)
                whole = len(ids) // CHUNK * CHUNK
                assert cache.lookup(asked, salt=salt).num_tokens == whole
            if data.draw(st.integers(0, 9)) == 0:
                cache.weights_changed()
            hits.append(hit)
