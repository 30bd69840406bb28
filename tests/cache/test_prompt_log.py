"""The log of stored prompts: what is in it, its bound, and what torn or foreign content does."""

from __future__ import annotations

import fcntl
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pagoda.cache.engine_keys import schemes
from pagoda.cache.nearest_prompt import keys_of_prompt, nearest_prompt
from pagoda.cache.prompt_log import LoggedPrompt, PromptLog, logged_prompts
from pagoda.errors import StoreError
from pagoda.keys import Item, chunk_keys
from pagoda.ledger import admin
from pagoda.ledger.store_state import OLD_PROMPTS, PROMPTS
from tests.cache.kit import CHUNK, NAMESPACE, cache_at, kv_of, prompt, slots_of

ROOT = NAMESPACE.root


def keys_of(tokens: np.ndarray) -> list[bytes]:
    return chunk_keys(tokens, ROOT, CHUNK)


def one(tokens: np.ndarray, stored_at: float = 0.0, root: bytes = ROOT) -> LoggedPrompt:
    return LoggedPrompt(root, CHUNK, chunk_keys(tokens, root, CHUNK), tokens, stored_at)


def changed(tokens: np.ndarray, at: int) -> np.ndarray:
    other = tokens.copy()
    other[at] += 1
    return other


def test_a_store_logs_its_prompt_once_and_a_clear_forgets_it(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(3.5)
    with cache_at(shm_root, tmp_path) as cache:
        ledger, root = slots_of(cache)._ledger, slots_of(cache).namespace()
        directory = ledger.directory
        for _ in range(3):
            cache.store(tokens, kv_of(tokens).transfer)
        (logged,) = logged_prompts(directory)
        assert (logged.namespace, logged.chunk_tokens) == (root, CHUNK)
        assert logged.keys == chunk_keys(tokens, root, CHUNK)
        assert logged.tokens.tolist() == tokens.tolist()  # those after the last whole chunk, too
        assert (directory / PROMPTS).stat().st_mode & 0o777 == 0o600
        admin.clear(ledger, root)
        assert list(logged_prompts(directory)) == []
        cache.store(tokens, kv_of(tokens).transfer)
        assert len(list(logged_prompts(directory))) == 1


def test_a_clear_that_leaves_token_ids_says_so(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        ledger = slots_of(cache)._ledger
        cache.store(tokens, kv_of(tokens).transfer)
        (ledger.directory / PROMPTS).rename(ledger.directory / OLD_PROMPTS)
        (ledger.directory / PROMPTS).mkdir()  # cannot be removed as a file
        with pytest.raises(StoreError, match=f"token ids of cleared prompts are left: .*/{PROMPTS}'"):
            admin.clear(ledger)
        assert not (ledger.directory / OLD_PROMPTS).exists()
        assert cache.lookup(tokens, tiers=["host"]).num_tokens == 0


def test_only_what_was_stored_is_logged(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, None) as cache:  # 64 slots
        directory = slots_of(cache)._ledger.directory
        slots_of(cache)._ledger.close()
        tokens = prompt(3)
        assert cache.store(tokens, kv_of(tokens).transfer).refused == 3
        assert not list(logged_prompts(directory))
    with cache_at(shm_root / "long", None) as cache:
        directory, tokens = slots_of(cache)._ledger.directory, prompt(100)
        assert cache.store(tokens, kv_of(tokens).transfer).refused == 36
        (logged,) = logged_prompts(directory)
        assert logged.keys == chunk_keys(tokens, slots_of(cache).namespace(), CHUNK)[:64]
        assert logged.tokens.tolist() == tokens[: 64 * CHUNK].tolist()


def test_a_prompt_that_is_stored_in_parts_is_logged_a_few_times(tmp_path: Path) -> None:
    log, tokens = PromptLog(tmp_path, tokens=1), prompt(100)
    for chunks in range(1, 101):
        part = tokens[: chunks * CHUNK]
        log.append(ROOT, CHUNK, keys_of(part), part)
    lengths = [len(logged.keys) for logged in logged_prompts(tmp_path)]
    assert len(lengths) < 20
    assert all(4 * after >= 5 * before for before, after in pairwise(lengths))


def test_only_one_of_two_processes_begins_a_new_file(tmp_path: Path) -> None:
    log = PromptLog(tmp_path, tokens=1)

    def fill(seeds: range) -> None:
        for seed in seeds:
            tokens = prompt(512, seed)
            log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)

    fill(range(1))
    with (tmp_path / PROMPTS).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process does that is about to rename the full file
        fill(range(1, 40))
        assert not (tmp_path / OLD_PROMPTS).exists()
    fill(range(40, 41))
    assert (tmp_path / OLD_PROMPTS).exists() and not (tmp_path / PROMPTS).exists()
    assert len(list(logged_prompts(tmp_path))) == 41


def test_what_is_not_only_text_or_not_wanted_is_not_logged(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        image = Item(0, 4, bytes(32))
        cache.store(tokens, kv_of(tokens).transfer, items=[image])
        cache.store(None, kv_of(tokens).transfer, keys=keys_of(tokens))
        assert not list(logged_prompts(slots_of(cache)._ledger.directory))
    with cache_at(shm_root / "off", tmp_path / "off", prompt_log=False) as cache:
        cache.store(tokens, kv_of(tokens).transfer)
        assert not list(logged_prompts(slots_of(cache)._ledger.directory))


def test_a_store_goes_on_where_the_log_cannot_be_written(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        (slots_of(cache)._ledger.directory / PROMPTS).mkdir()
        assert cache.store(tokens, kv_of(tokens).transfer).num_chunks == 3


def test_it_is_bounded_and_the_latest_prompts_are_in_it(tmp_path: Path) -> None:
    log = PromptLog(tmp_path, tokens=1)  # the least: 1 MiB a file
    sent = [prompt(512, seed) for seed in range(100)]
    for tokens in sent:
        log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
    for name in (PROMPTS, OLD_PROMPTS):
        assert (tmp_path / name).stat().st_size < (1 << 20) + (1 << 16)
    found = [logged.tokens.tolist() for logged in logged_prompts(tmp_path)]
    assert 30 < len(found) < 70
    assert found == [tokens.tolist() for tokens in sent[-len(found) :]]


def test_prompts_of_many_threads_stay_whole(tmp_path: Path) -> None:
    def write(number: int) -> None:
        log = PromptLog(tmp_path, tokens=1)
        for seed in range(20):
            tokens = prompt(20, 100 * number + seed)
            log.append(ROOT, CHUNK, keys_of(tokens), tokens)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(tuple, (logged.tokens.tolist() for logged in logged_prompts(tmp_path)))) == sorted(
        tuple(prompt(20, 100 * number + seed).tolist()) for number in range(4) for seed in range(20)
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_what_is_torn_is_left_out_and_the_rest_is_read(tmp_path: Path, damage: str) -> None:
    log = PromptLog(tmp_path, tokens=1)
    for seed in range(3):
        log.append(ROOT, CHUNK, keys_of(prompt(2, seed)), prompt(2, seed))
    content = bytearray((tmp_path / PROMPTS).read_bytes())
    size = len(content) // 3
    if damage == "cut":
        del content[size + 20 : 2 * size]
    elif damage == "flipped":
        content[size + 90] ^= 1
    else:
        content[size : 2 * size] = b"PAGODAP1" * (size // 8)
    (tmp_path / PROMPTS).write_bytes(content)
    found = [logged.tokens.tolist() for logged in logged_prompts(tmp_path)]
    assert found == [prompt(2, seed).tolist() for seed in (0, 2)]


def test_nearest_is_the_longest_common_beginning_then_what_is_stored_then_what_is_alike() -> None:
    ours = prompt(6)
    far, near, twin = changed(ours, 20), changed(ours, 50), changed(changed(ours, 50), 70)

    def ask(*logged: LoggedPrompt, lost: bytes = b"") -> tuple[int | None, float]:
        found = nearest_prompt(ours, ROOT, logged, lambda key: () if key == lost else ("host",), lambda _: ())
        assert found is not None
        return found.token, found.stored_at

    assert ask(one(far, 1), one(near, 2), one(prompt(6, 1), 3)) == (50, 2)
    assert ask(one(twin, 1), one(near, 2)) == (50, 2)
    assert ask(one(near, 1), one(near, 2)) == (50, 2)
    assert ask(one(changed(near, 60), 1), one(near, 2), lost=keys_of(near)[3]) == (50, 1)


def test_a_prompt_that_differs_from_its_first_token_on_is_near_if_the_rest_is_alike() -> None:
    ours = prompt(4)

    def ask(stored: np.ndarray) -> int | None:
        found = nearest_prompt(ours, ROOT, [one(stored)], lambda _: (), lambda _: ())
        return None if found is None else found.token

    assert ask(changed(ours, 0)) == 0
    assert ask(prompt(4, 1)) is None


def test_where_one_of_the_two_ends_no_token_differs() -> None:
    ours = prompt(4)
    shorter, longer = (
        nearest_prompt(ours, ROOT, [one(stored)], lambda _: (), lambda _: ())
        for stored in (ours[:40], np.concatenate([ours, ours]))
    )
    assert shorter is not None and (shorter.token, shorter.same_tokens, shorter.stored_id) == (None, 40, None)
    assert longer is not None and (longer.token, longer.token_id) == (None, None)
    besides = nearest_prompt(ours, ROOT, [one(ours)], lambda _: (), lambda _: (), besides=True)
    assert besides is None


def test_another_namespace_is_compared_only_if_its_own_has_no_prompt() -> None:
    ours, other = prompt(4), NAMESPACE.with_(salt="of a tenant").root

    def fields(_: bytes) -> tuple[str, ...]:
        return ("salt",)

    theirs = one(changed(ours, 50), root=other)
    found = nearest_prompt(ours, ROOT, [theirs], lambda _: (), fields)
    assert found is not None and (found.token, found.namespace, found.other_fields) == (50, other, ("salt",))
    found = nearest_prompt(ours, ROOT, [theirs, one(changed(ours, 20))], lambda _: (), fields)
    assert found is not None and (found.token, found.namespace, found.other_fields) == (20, ROOT, ())


def test_the_scheme_of_keys_is_found_by_the_log_or_by_what_is_stored() -> None:
    stored, ours = prompt(4), changed(prompt(4), 40)
    names = []
    salted = [bytes([n]) * 32 for n in range(4)]
    for scheme in schemes(CHUNK):
        keys, wanted = scheme(stored, ROOT, CHUNK), scheme(ours, ROOT, CHUNK)
        logged = LoggedPrompt(ROOT, CHUNK, keys, stored, 0.0)
        assert keys_of_prompt(ours, ROOT, CHUNK, [logged], lambda _: False) == wanted
        assert keys_of_prompt(ours, ROOT, CHUNK, [], lambda key, keys=keys: key in keys) == wanted
        mixed = [logged, LoggedPrompt(ROOT, CHUNK, salted, stored, 0.0)]
        assert keys_of_prompt(ours, ROOT, CHUNK, mixed, lambda _: False) == wanted
        names.append(tuple(keys))
    assert len(set(names)) == len(names) > 10  # no two schemes are the same
    # made with a salt that is not known here: the keys of the logged prompt, as far as it is the same
    logged = LoggedPrompt(ROOT, CHUNK, salted, stored, 0.0)
    found = keys_of_prompt(ours, ROOT, CHUNK, [logged], lambda _: False)
    assert found == [*salted[:2], *keys_of(ours)[2:]]
    assert keys_of_prompt(ours, ROOT, CHUNK, [], lambda _: False) == keys_of(ours)
    assert keys_of_prompt(ours[: CHUNK - 1], ROOT, CHUNK, [logged], lambda _: False) == []
