"""The log of stored prompts: what is in it, its bound, and what torn or foreign content does."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache
from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.cache.prompt_log import LoggedPrompt, PromptLog, logged_prompts
from pagoda.keys import Item, as_token_ids, chunk_keys
from pagoda.ledger import Ledger, Miss, StoreSpec, admin
from pagoda.ledger.store_state import OLD_PROMPTS, PROMPTS
from pagoda_tools.cli.nearest_prompt import keys_of_prompt, nearest_prompt
from pagoda_tools.cli.prompt_keys import schemes
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    cache_at,
    config_of,
    kv_of,
    prompt,
    run_all,
    slots_of,
)
from tests.cli.shelf import put

ROOT = NAMESPACE.root


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Open a store so small that each file of its log has the least room: 1 MiB."""
    with closing(opened_at(tmp_path)) as opened:
        yield opened


def opened_at(root: Path) -> Ledger:
    return Ledger.open(
        StoreSpec(root=root, name="log", kind="memory", slots=64, slot_bytes=4096)
    )


def log_at(ledger: Ledger) -> PromptLog:
    return PromptLog(ledger, CHUNK, Clock())


def keys_of(tokens: np.ndarray) -> list[bytes]:
    return chunk_keys(tokens, ROOT, CHUNK)


def logged_by(cache: Cache) -> list[LoggedPrompt]:
    """Return what is in the log of a cache, with what it stored until now."""
    assert cache.flush(30)
    return list(logged_prompts(slots_of(cache)._ledger.directory))


def one(
    tokens: np.ndarray, stored_at: float = 0.0, root: bytes = ROOT
) -> LoggedPrompt:
    return LoggedPrompt(
        root, CHUNK, chunk_keys(tokens, root, CHUNK), tokens, stored_at
    )


def changed(tokens: np.ndarray, at: int) -> np.ndarray:
    other = tokens.copy()
    other[at] += 1
    return other


def test_a_store_logs_its_prompt_once_and_a_clear_forgets_it(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3.5)
    with cache_at(shm_root, tmp_path) as cache:
        ledger = slots_of(cache)._ledger
        root = slots_of(cache).namespace()
        directory = ledger.directory
        for _ in range(3):
            cache.store(tokens, kv_of(tokens).transfer)
        (logged,) = logged_by(cache)
        assert logged.namespace == root
        assert logged.chunk_tokens == CHUNK
        assert logged.keys == chunk_keys(tokens, root, CHUNK)
        # those after the last whole chunk, too
        assert logged.tokens.tolist() == tokens.tolist()
        assert (directory / PROMPTS).stat().st_mode & 0o777 == 0o600
        admin.clear(ledger, root)
        assert list(logged_prompts(directory)) == []
        cache.store(tokens, kv_of(tokens).transfer)
        assert len(logged_by(cache)) == 1


def test_a_clear_that_leaves_token_ids_says_so(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        ledger = slots_of(cache)._ledger
        cache.store(tokens, kv_of(tokens).transfer)
        assert logged_by(cache)
        (ledger.directory / PROMPTS).rename(ledger.directory / OLD_PROMPTS)
        (ledger.directory / PROMPTS).mkdir()  # cannot be removed as a file
        with pytest.raises(
            StoreError,
            match=f"token ids of cleared prompts are left: .*/{PROMPTS}'",
        ):
            admin.clear(ledger)
        assert not (ledger.directory / OLD_PROMPTS).exists()
        assert cache.lookup(tokens, tiers=["host"]).num_tokens == 0


def test_only_what_was_stored_is_logged(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, None) as cache:  # 64 slots
        slots_of(cache)._ledger.close()
        tokens = prompt(3)
        assert cache.store(tokens, kv_of(tokens).transfer).refused == 3
        assert not logged_by(cache)
    with cache_at(shm_root / "long", None) as cache:
        tokens = prompt(100)
        assert cache.store(tokens, kv_of(tokens).transfer).refused == 36
        (logged,) = logged_by(cache)
        assert (
            logged.keys
            == chunk_keys(tokens, slots_of(cache).namespace(), CHUNK)[:64]
        )
        assert logged.tokens.tolist() == tokens[: 64 * CHUNK].tolist()


@pytest.mark.parametrize("flushes", [False, True])
def test_a_prompt_that_is_stored_in_parts_is_logged_a_few_times(
    ledger: Ledger, flushes: bool
) -> None:
    log = log_at(ledger)
    tokens = prompt(100)
    for chunks in range(1, 101):
        part = tokens[: chunks * CHUNK]
        log.append(ROOT, CHUNK, keys_of(part), part)
        if flushes and chunks % 3 == 0:
            log.flush()
    assert len(log._waiting) < 20
    log.close()
    lengths = [len(logged.keys) for logged in logged_prompts(ledger.directory)]
    assert len(lengths) < 20
    for before, after in pairwise(lengths):
        assert 4 * after >= 5 * before


def test_only_one_of_two_processes_begins_a_new_file(ledger: Ledger) -> None:
    log = log_at(ledger)

    def fill(seeds: range) -> None:
        for seed in seeds:
            tokens = prompt(512, seed)
            log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
            log.flush()

    fill(range(1))
    with (ledger.directory / PROMPTS).open("rb") as other:
        # as another process does that is about to rename the full file
        fcntl.flock(other, fcntl.LOCK_EX)
        fill(range(1, 40))
        assert not (ledger.directory / OLD_PROMPTS).exists()
    fill(range(40, 41))
    assert (ledger.directory / OLD_PROMPTS).exists()
    assert not (ledger.directory / PROMPTS).exists()
    assert len(list(logged_prompts(ledger.directory))) == 41


def test_what_is_not_only_text_or_not_wanted_is_not_logged(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        image = Item(0, 4, bytes(32))
        cache.store(tokens, kv_of(tokens).transfer, items=[image])
        cache.store(None, kv_of(tokens).transfer, keys=keys_of(tokens))
        assert not logged_by(cache)
    with cache_at(shm_root / "off", tmp_path / "off", prompt_log=False) as cache:
        cache.store(tokens, kv_of(tokens).transfer)
        assert not logged_by(cache)


def test_a_store_goes_on_where_the_log_cannot_be_written(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path) as cache:
        (slots_of(cache)._ledger.directory / PROMPTS).mkdir()
        assert cache.store(tokens, kv_of(tokens).transfer).num_chunks == 3


def test_it_is_bounded_and_the_latest_prompts_are_in_it(ledger: Ledger) -> None:
    log = log_at(ledger)
    sent = [prompt(512, seed) for seed in range(100)]
    for number, tokens in enumerate(sent):
        log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
        if number % 7 == 0:
            log.flush()
    log.close()
    for name in (PROMPTS, OLD_PROMPTS):
        assert (ledger.directory / name).stat().st_size < (1 << 20) + (1 << 16)
    found = [
        logged.tokens.tolist() for logged in logged_prompts(ledger.directory)
    ]
    assert 30 < len(found) < 70
    assert found == [tokens.tolist() for tokens in sent[-len(found) :]]


def test_prompts_of_many_threads_stay_whole(ledger: Ledger) -> None:
    def write(number: int) -> None:
        log = log_at(ledger)
        for seed in range(20):
            tokens = prompt(20, 100 * number + seed)
            log.append(ROOT, CHUNK, keys_of(tokens), tokens)
            if seed % 4 == 0:
                log.flush()
        log.close()

    threads = [
        threading.Thread(target=write, args=(number,)) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(
        map(
            tuple,
            (
                logged.tokens.tolist()
                for logged in logged_prompts(ledger.directory)
            ),
        )
    ) == sorted(
        tuple(prompt(20, 100 * number + seed).tolist())
        for number in range(4)
        for seed in range(20)
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_what_is_torn_is_left_out_and_the_rest_is_read(
    ledger: Ledger, damage: str
) -> None:
    log = log_at(ledger)
    for seed in range(3):
        log.append(ROOT, CHUNK, keys_of(prompt(2, seed)), prompt(2, seed))
    log.flush()
    content = bytearray((ledger.directory / PROMPTS).read_bytes())
    size = len(content) // 3
    if damage == "cut":
        del content[size + 20 : 2 * size]
    elif damage == "flipped":
        content[size + 90] ^= 1
    else:
        content[size : 2 * size] = b"PAGODAP1" * (size // 8)
    (ledger.directory / PROMPTS).write_bytes(content)
    found = [
        logged.tokens.tolist() for logged in logged_prompts(ledger.directory)
    ]
    assert found == [prompt(2, seed).tolist() for seed in (0, 2)]


def test_nearest_is_the_longest_common_beginning_then_what_is_stored_then_what_is_alike() -> (
    None
):
    ours = prompt(6)
    far = changed(ours, 20)
    near = changed(ours, 50)
    twin = changed(changed(ours, 50), 70)

    def ask(*logged: LoggedPrompt, lost: bytes = b"") -> tuple[int | None, float]:
        found = nearest_prompt(
            ours,
            ROOT,
            logged,
            lambda key: () if key == lost else ("host",),
            lambda _: (),
        )
        assert found is not None
        return found.token, found.stored_at

    assert ask(one(far, 1), one(near, 2), one(prompt(6, 1), 3)) == (50, 2)
    assert ask(one(twin, 1), one(near, 2)) == (50, 2)
    assert ask(one(near, 1), one(near, 2)) == (50, 2)
    assert ask(
        one(changed(near, 60), 1), one(near, 2), lost=keys_of(near)[3]
    ) == (50, 1)


def test_a_prompt_that_differs_from_its_first_token_on_is_near_if_the_rest_is_alike() -> (
    None
):
    ours = prompt(4)

    def ask(stored: np.ndarray) -> int | None:
        found = nearest_prompt(
            ours, ROOT, [one(stored)], lambda _: (), lambda _: ()
        )
        return None if found is None else found.token

    assert ask(changed(ours, 0)) == 0
    assert ask(prompt(4, 1)) is None


def test_where_one_of_the_two_ends_no_token_differs() -> None:
    ours = prompt(4)
    shorter, longer = (
        nearest_prompt(ours, ROOT, [one(stored)], lambda _: (), lambda _: ())
        for stored in (ours[:40], np.concatenate([ours, ours]))
    )
    assert shorter is not None
    assert shorter.token is None
    assert shorter.same_tokens == 40
    assert shorter.stored_id is None
    assert longer is not None
    assert longer.token is None
    assert longer.token_id is None
    besides = nearest_prompt(
        ours, ROOT, [one(ours)], lambda _: (), lambda _: (), besides=True
    )
    assert besides is None


def test_another_namespace_is_compared_only_if_its_own_has_no_prompt() -> None:
    ours = prompt(4)
    other = NAMESPACE.with_(salt="of a tenant").root

    def fields(_: bytes) -> tuple[str, ...]:
        return ("salt",)

    theirs = one(changed(ours, 50), root=other)
    found = nearest_prompt(ours, ROOT, [theirs], lambda _: (), fields)
    assert found is not None
    assert found.token == 50
    assert found.namespace == other
    assert found.other_fields == ("salt",)
    found = nearest_prompt(
        ours, ROOT, [theirs, one(changed(ours, 20))], lambda _: (), fields
    )
    assert found is not None
    assert found.token == 20
    assert found.namespace == ROOT
    assert found.other_fields == ()


def test_the_scheme_of_keys_is_found_by_the_log_or_by_what_is_stored() -> None:
    stored = prompt(4)
    ours = changed(prompt(4), 40)
    names = []
    salted = [bytes([n]) * 32 for n in range(4)]
    for scheme in schemes(CHUNK):
        keys = scheme(stored, ROOT, CHUNK)
        wanted = scheme(ours, ROOT, CHUNK)
        logged = LoggedPrompt(ROOT, CHUNK, keys, stored, 0.0)
        assert (
            keys_of_prompt(ours, ROOT, CHUNK, [logged], lambda _: False) == wanted
        )
        assert (
            keys_of_prompt(
                ours, ROOT, CHUNK, [], lambda key, keys=keys: key in keys
            )
            == wanted
        )
        mixed = [logged, LoggedPrompt(ROOT, CHUNK, salted, stored, 0.0)]
        assert keys_of_prompt(ours, ROOT, CHUNK, mixed, lambda _: False) == wanted
        names.append(tuple(keys))
    assert len(set(names)) == len(names) > 10  # no two schemes are the same
    # made with a salt that is not known here: the keys of the logged prompt, as far as it is the
    # same
    logged = LoggedPrompt(ROOT, CHUNK, salted, stored, 0.0)
    found = keys_of_prompt(ours, ROOT, CHUNK, [logged], lambda _: False)
    assert found == [*salted[:2], *keys_of(ours)[2:]]
    assert keys_of_prompt(ours, ROOT, CHUNK, [], lambda _: False) == keys_of(ours)
    assert (
        keys_of_prompt(ours[: CHUNK - 1], ROOT, CHUNK, [logged], lambda _: False)
        == []
    )


def test_a_prompt_is_found_soon_and_as_it_was_stored(shm_root: Path) -> None:
    """Without a flush or a close; the engine reuses the memory of its tokens as soon as the call
    returns.
    """
    with cache_at(shm_root, None) as cache:
        directory = slots_of(cache)._ledger.directory
        for seed, given in enumerate((list, np.asarray, partial(array, "i"))):
            tokens = prompt(3, seed)
            changing = given(tokens.tolist())
            cache.store(changing, kv_of(tokens).transfer)
            changing[20] += 1
        wait_until(lambda: len(list(logged_prompts(directory))) == 3, 10.0)
        found = [logged.tokens.tolist() for logged in logged_prompts(directory)]
        assert found == [prompt(3, seed).tolist() for seed in range(3)]
        thread = slots_of(cache)._resources.prompt_log._writer._thread  # type: ignore[union-attr]
    wait_until(lambda: not thread.is_alive())


def test_what_was_cleared_before_it_is_written_is_not_logged(
    ledger: Ledger,
) -> None:
    log = log_at(ledger)
    other = NAMESPACE.with_(salt="a tenant's")
    cleared = prompt(2, 1).tolist()
    kept = prompt(2, 2).tolist()
    with log._writing:  # the thread of the log waits
        log.append(
            ROOT, CHUNK, put(ledger, NAMESPACE, cleared), as_token_ids(cleared)
        )
        log.append(
            other.root, CHUNK, put(ledger, other, kept), as_token_ids(kept)
        )
        admin.clear(ledger, ROOT)
    log.close()
    (logged,) = logged_prompts(ledger.directory)
    assert logged.namespace == other.root
    assert b"a tenant's" not in (ledger.directory / PROMPTS).read_bytes()


def test_a_clear_while_a_prompt_is_written_leaves_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_at(ledger)
    tokens = prompt(2)
    log.append(ROOT, CHUNK, put(ledger, NAMESPACE, tokens.tolist()), tokens)
    explain = ledger.explain_miss

    def explain_then_clear(key: bytes) -> Miss:
        answer = explain(key)
        admin.clear(ledger, ROOT)  # by another process
        return answer

    monkeypatch.setattr(ledger, "explain_miss", explain_then_clear)
    log.close()
    assert not list(logged_prompts(ledger.directory))


def test_a_prompt_that_is_stored_again_while_it_is_written_is_logged_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_at(ledger)
    explain = ledger.explain_miss
    tokens = prompt(2)

    def append_again(key: bytes) -> Miss:
        log.append(ROOT, CHUNK, keys_of(tokens), tokens)
        return explain(key)

    monkeypatch.setattr(ledger, "explain_miss", append_again)
    log.append(ROOT, CHUNK, keys_of(tokens), tokens)
    for _ in range(3):
        log.flush()
        assert len(list(logged_prompts(ledger.directory))) == 1


def test_a_file_that_another_process_has_renamed_meanwhile_is_not_lost(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_at(ledger)
    explain = ledger.explain_miss
    sent = [prompt(512, seed) for seed in range(32)]
    last = keys_of(sent[-1])[0]  # with this one the file is full

    def rename(key: bytes) -> Miss:
        if key == last:
            os.replace(ledger.directory / PROMPTS, ledger.directory / OLD_PROMPTS)
            (ledger.directory / PROMPTS).touch()
        return explain(key)

    monkeypatch.setattr(ledger, "explain_miss", rename)
    for tokens in sent:
        log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
        log.flush()
    assert len(list(logged_prompts(ledger.directory))) == len(sent)


def test_a_flush_waits_for_another_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_at(ledger)
    explain = ledger.explain_miss
    began = threading.Event()
    returned = threading.Event()
    seen = list[int]()

    def slow(key: bytes) -> Miss:
        began.set()
        returned.wait(0.3)
        return explain(key)

    def flush() -> None:
        began.wait(30.0)
        log.flush()
        seen.append(len(list(logged_prompts(ledger.directory))))
        returned.set()

    monkeypatch.setattr(ledger, "explain_miss", slow)
    thread = threading.Thread(target=flush)
    thread.start()
    log.append(ROOT, CHUNK, keys_of(prompt(2)), prompt(2))
    log.flush()
    thread.join()
    assert seen == [1]


def test_no_prompt_is_lost_between_threads(ledger: Ledger) -> None:
    log = log_at(ledger)
    ended = threading.Event()

    def write(number: int) -> None:
        for seed in range(300):
            log.append(
                ROOT,
                CHUNK,
                [number.to_bytes(16, "big") + seed.to_bytes(16, "big")],
                prompt(1, seed),
            )

    def flush() -> None:
        while not ended.is_set():
            log.flush()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=write, args=(number,)) for number in range(3)
        ]
        flusher = threading.Thread(target=flush)
        for thread in (*threads, flusher):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        flusher.join()
    finally:
        sys.setswitchinterval(interval)
    log.close()
    assert len(list(logged_prompts(ledger.directory))) == 900


def test_what_it_remembers_is_bounded(ledger: Ledger) -> None:
    log = log_at(ledger)
    for seed in range(1100):
        log.append(ROOT, CHUNK, [seed.to_bytes(32, "big")], prompt(1, seed))
        log.flush()
    assert len(log._recent) <= 1024


def test_a_prompt_longer_than_the_log_is_left_out_and_a_long_one_is_whole(
    ledger: Ledger,
) -> None:
    tokens = prompt(65_536, 1)  # a million
    keys = keys_of(tokens)
    log = log_at(ledger)
    log.append(ROOT, CHUNK, keys, tokens)  # longer than the log
    assert not log._waiting
    log = PromptLog(ledger, 1 << 20, Clock())
    log.append(ROOT, CHUNK, keys, tokens)
    log.close()
    (logged,) = logged_prompts(ledger.directory)
    assert logged.keys == keys
    assert (logged.tokens == tokens).all()


def test_tokens_that_look_like_a_record_are_no_prompt(ledger: Ledger) -> None:
    log = log_at(ledger)
    log.append(ROOT, CHUNK, keys_of(prompt(2)), prompt(2))
    log.flush()
    record = np.fromfile(ledger.directory / PROMPTS, np.int32)
    log.append(ROOT, CHUNK, keys_of(prompt(3)), record)
    log.close()
    assert len(list(logged_prompts(ledger.directory))) == 2


def test_many_prompts_at_once_are_all_written(ledger: Ledger) -> None:
    """More than may wait."""
    log = log_at(ledger)
    sent = [prompt(512, seed) for seed in range(33)]
    # so the log's own thread writes none of them, however slow this machine is
    with log._writing:
        for tokens in sent:
            log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
            assert log._waiting_bytes <= 1 << 20
    log.close()
    assert [one.tokens.tolist() for one in logged_prompts(ledger.directory)] == [
        one.tolist() for one in sent
    ]


def test_a_file_that_cannot_be_renamed_stays_bounded(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_at(ledger)
    (ledger.directory / OLD_PROMPTS).mkdir()
    for seed in range(100):
        tokens = prompt(512, seed)
        log.append(ROOT, CHUNK, keys_of(tokens)[:1], tokens)
        log.flush()
    assert (ledger.directory / PROMPTS).stat().st_size < (2 << 20) + (1 << 16)
    assert "prompts were not logged" in caplog.text


def test_a_prompt_that_was_not_written_is_written_when_it_is_stored_again(
    ledger: Ledger,
) -> None:
    log = log_at(ledger)
    tokens = prompt(3)
    (ledger.directory / PROMPTS).mkdir()
    for _ in range(2):
        log.append(ROOT, CHUNK, keys_of(tokens), tokens)
        log.flush()
        if (ledger.directory / PROMPTS).is_dir():
            (ledger.directory / PROMPTS).rmdir()
    assert len(list(logged_prompts(ledger.directory))) == 1


def _store_and_exit(root: Path, forks: bool) -> None:
    cache = Cache(config_of(root, None), namespace=NAMESPACE, layout=LAYOUT)
    for seed in range(5):
        cache.store(prompt(3, seed), kv_of(prompt(3, seed)).transfer)
    if forks and not os.fork():
        cache.store(prompt(3, 5), kv_of(prompt(3, 5)).transfer)
        os._exit(not cache.close())
    if forks:
        assert os.wait()[1] == 0
    # ends without a close


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_a_process_that_ends_has_logged_its_prompts(
    shm_root: Path, forks: bool
) -> None:
    """Each once, also if it forked while they waited to be written."""
    run_all([SPAWN.Process(target=_store_and_exit, args=(shm_root, forks))])
    with cache_at(shm_root, None) as cache:
        found = sorted(logged.tokens.tolist() for logged in logged_by(cache))
    assert found == sorted(prompt(3, seed).tolist() for seed in range(5 + forks))


def _log_on_a_full_disk(root: Path) -> None:
    with closing(opened_at(root)) as ledger:
        log = log_at(ledger)
        # a write is cut, as on a full file system
        for seed, most in ((0, -1), (1, 600), (1, -1), (2, -1)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, -1))
            log.append(ROOT, CHUNK, keys_of(prompt(3, seed)), prompt(3, seed))
            log.flush()


@pytest.mark.slow
def test_a_full_disk_costs_only_what_is_not_stored_again(tmp_path: Path) -> None:
    run_all([SPAWN.Process(target=_log_on_a_full_disk, args=(tmp_path,))])
    with closing(opened_at(tmp_path)) as ledger:
        # three whole ones and a part of one
        assert (ledger.directory / PROMPTS).stat().st_size % 356
        found = [
            logged.tokens.tolist() for logged in logged_prompts(ledger.directory)
        ]
    assert found == [prompt(3, seed).tolist() for seed in range(3)]


def _log_for_ever(root: Path) -> None:
    with closing(opened_at(root)) as ledger:
        log = log_at(ledger)
        for seed in count(os.getpid()):
            log.append(
                ROOT, CHUNK, keys_of(prompt(200, seed))[:1], prompt(200, seed)
            )
            log.flush()


@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_prompts_and_no_lock(
    tmp_path: Path, ledger: Ledger
) -> None:
    writers = [
        SPAWN.Process(target=_log_for_ever, args=(tmp_path,)) for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    wait_until((ledger.directory / OLD_PROMPTS).exists)
    for writer in writers:
        writer.kill()
        writer.join()
    log = log_at(ledger)
    for seed in range(100):
        log.append(ROOT, CHUNK, keys_of(prompt(200, seed))[:1], prompt(200, seed))
        log.flush()
    found = list(logged_prompts(ledger.directory))
    assert len(found) > 80
    for logged in found:
        assert len(logged.tokens) == 200 * CHUNK
    assert (ledger.directory / OLD_PROMPTS).stat().st_size < 3 << 19
