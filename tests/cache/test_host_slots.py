"""Direct access to host slots: chunks that an engine copies itself are cached like all others."""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.cache.host_slots import HostSlots
from pagoda.cache.writeback import ChunkRef
from pagoda.ledger import (
    Busy,
    Present,
    Refused,
    Reserved,
    RunToReserve,
    admin,
)
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    PATIENT_SECONDS,
    SPAWN,
    Bytes,
    Prompt,
    cache_at,
    copied,
    counters_of,
    hit_of,
    keys_of,
    kv_of,
    on_disk,
    prompt,
    reserved_for,
    run_all,
    served,
    slots_of,
    stored,
    written,
)
from tests.ledger.support import shut_to_threads


def read(cache: Cache, tokens: Prompt) -> tuple[int, Bytes]:
    """Copy a prompt out by hand; return how many leading chunks are valid, and the bytes."""
    slots = slots_of(cache)
    blocks = np.zeros((len(tokens) // CHUNK, LAYOUT.chunk_bytes), np.uint8)
    found = slots.match_prefix(keys_of(cache, tokens), 0)
    for i, slot in enumerate(found.slots.tolist()):
        blocks[i] = slots.view(slot)[: LAYOUT.chunk_bytes]
    valid = slots.still_valid(found.slots, found.generations)
    return (len(valid) if valid.all() else int(valid.argmin())), blocks


def test_there_are_slots_only_with_a_host_tier(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(None, tmp_path) as cache:
        assert cache.slots is None
    with cache_at(shm_root, tmp_path) as cache:
        assert cache.slots is cache.slots
        assert slots_of(cache).count == 64


def test_a_request_that_may_not_read_is_in_no_rate(
    shm_root: Path, tmp_path: Path
) -> None:
    """It is counted by its reason, and is among the last requests."""
    with cache_at(shm_root, tmp_path) as cache:
        slots = slots_of(cache)
        slots.count_request(100, {"host": 100}, None)
        slots.count_request(700, {}, Reason.NOT_ASKED)
        stats = cache.stats()
        assert stats["misses"] == {"not_asked": 1}
        assert stats["hit_rate"] == 1.0
        assert stats["counters"]["lookups"] == 1
        assert stats["counters"]["asked_tokens"] == 100
        last = slots._ledger.requests.newest()
        assert {(one.asked_tokens, one.reason) for one in last} == {
            (100, None),
            (700, "not_asked"),
        }


def test_what_is_copied_in_by_hand_is_the_cache_s(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(6)
    with cache_at(shm_root, tmp_path) as cache:
        copies = copied(cache, tokens, reserved_for(cache, tokens))
        # not before it is committed
        assert cache.lookup(tokens).num_tokens == 0
        assert len(copies) == 6
        assert (
            slots_of(cache).commit({slots_of(cache).namespace(): copies})
            == [True] * 6
        )
        assert cache.lookup(tokens).by_tier == {"host": 96}
        assert hit_of(cache, tokens).num_tokens == 96
        assert counters_of(cache)["stored_bytes"] == 6 * LAYOUT.chunk_bytes
        for item in reserved_for(cache, tokens):
            assert isinstance(item, Present)
        assert cache.flush(100)
        assert cache._tiers.host is not None
        cache._tiers.host.clear()
        assert hit_of(cache, tokens).by_tier == {"disk": 96}
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert hit_of(cache, tokens).by_tier == {"disk": 96}


def test_what_the_cache_stored_is_copied_out_by_hand(shm_root: Path) -> None:
    tokens = prompt(6)
    with cache_at(shm_root, None) as cache:
        kv = stored(cache, tokens)
        count, blocks = read(cache, prompt(6))
        assert count == 6
        assert (blocks == kv.blocks).all()
        longer = np.concatenate([tokens, prompt(2, 1)])
        found = slots_of(cache).match_prefix(keys_of(cache, longer)[2:], 2)
        assert len(found.slots) == 4
        assert found.reason == Reason.ABSENT


def test_a_look_without_touch_changes_nothing(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        copies = written(cache, prompt(3))
        columns = slots_of(cache)._ledger.columns
        rows = [copy.slot for copy in copies]

        def state() -> list[list[int]]:
            return [
                column[rows].tolist()
                for column in (
                    columns.last_use,
                    columns.hits,
                    columns.lease_until,
                )
            ]

        before = state()
        assert (
            len(
                slots_of(cache)
                .match_prefix(keys_of(cache, prompt(3)), 0, touch=False)
                .slots
            )
            == 3
        )
        assert state() == before
        assert (
            len(slots_of(cache).match_prefix(keys_of(cache, prompt(3)), 0).slots)
            == 3
        )
        for old, new in zip(before, state(), strict=True):
            for a, b in zip(old, new, strict=True):
                assert a < b


def test_write_through_writes_down_what_several_runs_left(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        runs = [prompt(3, seed) for seed in range(4)]
        copies = [
            copy
            for run in runs
            for copy in copied(cache, run, reserved_for(cache, run))
        ]
        assert (
            slots_of(cache).commit({slots_of(cache).namespace(): copies})
            == [True] * 12
        )
        assert cache.flush(100)
        assert [on_disk(cache, run) for run in runs] == [3] * 4
        admin.check(slots_of(cache)._ledger)


def test_write_back_writes_what_is_left_when_it_closes(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path, write_policy="write_back") as cache:
        written(cache, prompt(5))
        assert on_disk(cache, prompt(5)) == 0
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert hit_of(cache, prompt(5)).by_tier == {"disk": 80}


def test_selective_writes_what_was_copied_out_often(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(
        shm_root, tmp_path, write_policy="selective", selective_hits=2
    ) as cache:
        copies = written(cache, prompt(5))
        slots = slots_of(cache)
        for times in (1, 2):
            assert (
                len(slots.match_prefix(keys_of(cache, prompt(5)), 0).slots) == 5
            )
            slots.note_access(slots.namespace(), copies)
            assert cache.flush(100)
            assert on_disk(cache, prompt(5)) == (5 if times == 2 else 0)
        assert counters_of(cache)["loaded_chunks"] == 10
        assert counters_of(cache)["loaded_bytes"] == 10 * LAYOUT.chunk_bytes


def test_a_chunk_that_goes_during_the_copy_is_not_valid(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        written(cache, prompt(4))
        slots = slots_of(cache)
        keys = keys_of(cache, prompt(4))
        found = slots.match_prefix(keys, 0)
        assert admin.remove(slots._ledger, keys[2:3]) == 1
        assert slots.still_valid(found.slots, found.generations).tolist() == [
            True,
            True,
            False,
            True,
        ]
        assert slots.hold(found.slots, found.generations) == [
            True,
            True,
            False,
            True,
        ]
        slots.release(found.slots, found.generations)


def test_what_was_cleared_during_the_copy_is_not_stored(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        copies = copied(cache, prompt(4), reserved_for(cache, prompt(4)))
        cache.clear()
        assert (
            slots_of(cache).commit({slots_of(cache).namespace(): copies})
            == [False] * 4
        )
        assert cache.flush(100)
        assert cache.lookup(prompt(4)).num_tokens == 0
        assert admin.gauges(slots_of(cache)._ledger)["reserved"] == 0


def test_held_chunks_stay_until_they_are_released(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        written(cache, prompt(4, 99))
        slots = slots_of(cache)
        keys = keys_of(cache, prompt(4, 99))
        held = slots.match_prefix(keys, 0, touch=False)
        assert slots.hold(held.slots, held.generations) == [True] * 4
        for seed in range(10):
            written(cache, prompt(8, seed))
        assert slots.still_valid(held.slots, held.generations).all()
        slots.release(held.slots, held.generations)
        for seed in range(10, 20):
            written(cache, prompt(8, seed))
        assert not slots.still_valid(held.slots, held.generations).any()
        admin.check(slots._ledger)


def test_a_reserve_may_be_longer_than_a_window(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        tokens = prompt(14)
        assert slots._ledger.window == 8
        assert len(written(cache, tokens)) == 14
        assert hit_of(cache, tokens).num_tokens == 14 * CHUNK
        use = slots._ledger.columns.last_use[
            slots.match_prefix(keys_of(cache, tokens), 0, touch=False).slots
        ]
        assert (
            np.diff(use.astype(np.int64)) < 0
        ).all()  # its tail is evicted before its head, across windows
        assert admin.check(slots._ledger).unreachable == 0


def test_the_chain_goes_on_from_one_window_to_the_next(shm_root: Path) -> None:
    """Else a policy would take the chunk after a window for the child of the chunk before the whole
    run.
    """
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        tokens = prompt(14)
        found = np.array([chunk.slot for chunk in written(cache, tokens)])
        assert (slots._ledger.columns.parent_slot[found[1:]] == found[:-1]).all()


def test_a_reserve_ends_with_the_first_refusal(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        # a member may reserve at most a quarter of 64 slots
        outcomes = reserved_for(cache, prompt(40))
        assert [isinstance(item, Reserved) for item in outcomes] == [
            True
        ] * 16 + [False] * 24
        assert {
            item.reason for item in outcomes if isinstance(item, Refused)
        } == {Reason.FULL}
        assert [item.key for item in outcomes] == keys_of(cache, prompt(40))
        assert counters_of(cache)["drop_full"] == 24
        for item in reserved_for(cache, prompt(16)):
            assert isinstance(item, Busy)
        slots.abort([item for item in outcomes if isinstance(item, Reserved)])
        assert admin.gauges(slots._ledger)["reserved"] == 0


def test_runs_of_any_length_get_their_own_answers_in_their_order(
    shm_root: Path,
) -> None:
    """Longer ones than a window have several transactions, the others share one."""
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        window = slots._ledger.window
        lengths = [2, window + 1, 1, window + 2, 3]
        runs = []
        for number, length in enumerate(lengths):
            keys = [bytes([number, n]).ljust(32, b"k") for n in range(length)]
            runs.append(
                RunToReserve(keys, slots.namespace(), 0, None, slots.stamp())
            )
        found = slots.reserve_runs(runs, deadline_seconds=PATIENT_SECONDS)
        for run, outcomes in zip(runs, found, strict=True):
            assert [one.key for one in outcomes] == run.keys
        for at in (0, 2, 4):
            for one in found[at]:
                assert isinstance(one, Reserved)
        slots.abort(
            [one for each in found for one in each if isinstance(one, Reserved)]
        )
        assert admin.gauges(slots._ledger)["reserved"] == 0


def test_a_run_of_any_length_has_the_context_of_its_request(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None, policy="hindsight") as cache:
        slots = slots_of(cache)
        ledger = slots._ledger
        assert ledger.contexts.keep()
        for number, length in enumerate([2, ledger.window + 1]):
            keys = [bytes([number, n]).ljust(32, b"k") for n in range(length)]
            run = RunToReserve(
                keys, slots.namespace(), 3, None, slots.stamp(), context=5
            )
            [found] = slots.reserve_runs([run], deadline_seconds=PATIENT_SECONDS)
            made = [one for one in found if isinstance(one, Reserved)]
            assert len(made) == length
            rows = np.array([one.slot for one in made])
            assert set(ledger.columns.contexts_of(rows).tolist()) == {5}
            slots.abort(made)


def test_what_is_no_key_is_wrong_use(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        with pytest.raises(ValueError, match="32 bytes"):
            slots.reserve(
                [b"short"], namespace=slots.namespace(), start=0, parent=None
            )
        with pytest.raises(IndexError):
            slots.view(64)


def test_namespaces_are_separate_and_known_by_their_labels(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        tokens = prompt(2)
        keys = [key for _, _, key in cache.keys(tokens, salt="a tenant")]
        root = slots.namespace(salt="a tenant")
        rooms = slots.reserve(keys, namespace=root, start=0, parent=None)
        assert slots.commit({root: copied(cache, tokens, rooms)}) == [True] * 2
        wait_until(
            lambda: bool(
                admin.list_namespaces(slots._ledger)[root].fields.get("salt")
            )
        )
        assert cache.clear(salt="another").chunks["host"] == 0
        assert cache.clear(salt="a tenant").chunks["host"] == 2
        cache.weights_changed()
        assert slots.namespace(salt="a tenant") != root


def _all_are_misses(
    slots: HostSlots, keys: list[bytes], copies: list[ChunkRef]
) -> None:
    rows = (
        np.array([copy.slot for copy in copies]),
        np.array([c.generation for c in copies], np.uint64),
    )
    found = slots.match_prefix(keys, 0)
    assert len(found.slots) == 0
    assert found.reason == Reason.CLOSED
    assert slots.hold(*rows) == [False] * len(copies)
    assert slots.still_valid(*rows).tolist() == [False] * len(copies)
    slots.release(*rows)
    slots.note_access(bytes(32), copies)
    outcomes = slots.reserve(keys, namespace=bytes(32), start=0, parent=None)
    assert outcomes == [Refused(key, Reason.CLOSED) for key in keys]
    assert slots.commit({bytes(32): copies}) == [False] * len(copies)
    assert slots.adopt(
        [Reserved(c.key, c.slot, c.generation) for c in copies], 0
    ) == [False] * len(copies)
    slots.abort(
        [Reserved(copy.key, copy.slot, copy.generation) for copy in copies]
    )
    assert slots.view(copies[0].slot).shape == (LAYOUT.slot_bytes,)
    assert slots.count == 64
    assert len(slots.namespace()) == 32
    assert slots.stamp() > 0


def test_after_close_everything_is_a_miss(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with cache_at(shm_root, tmp_path) as cache:
        slots = slots_of(cache)
        keys = keys_of(cache, prompt(4))
        copies = written(cache, prompt(4))
    _all_are_misses(slots, keys, copies)
    slots.view(copies[0].slot)[:] = 255  # a late copy does no harm
    with cache_at(shm_root, None) as cache:
        assert read(cache, prompt(4))[0] in (0, 4)
        served(cache, prompt(4))
    assert not caplog.records


def test_a_closed_cache_gives_its_slots_up_though_another_has_the_ledger_open(
    shm_root: Path, tmp_path: Path
) -> None:
    with (
        cache_at(shm_root, tmp_path) as other,
        cache_at(shm_root, tmp_path) as cache,
    ):
        written(cache, prompt(4))
        slots = slots_of(cache)
        held = slots.match_prefix(keys_of(cache, prompt(4)), 0)
        assert all(slots.hold(held.slots, held.generations))
        first = prompt(4, 1)
        second = prompt(4, 2)
        late = copied(cache, first, reserved_for(cache, first))
        given_up = [
            item
            for item in reserved_for(cache, second)
            if isinstance(item, Reserved)
        ]
        cache.close()
        assert slots.commit({bytes(32): late}) == [False] * 4
        slots.abort(given_up)
        slots.release(held.slots, held.generations)
        ledger = slots_of(other)._ledger
        assert admin.gauges(ledger)["reserved"] == 0
        ledger.columns.lease_until[:] = 0
        for seed in range(10, 20):
            written(other, prompt(8, seed))
        # no hold remains on them
        assert not ledger.still_valid(held.slots, held.generations).any()


def test_a_slot_is_ready_between_its_commit_and_its_end(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        tokens = prompt(8)
        copies = copied(cache, tokens, reserved_for(cache, tokens))
        rows = np.array([copy.slot for copy in copies])
        generations = np.array([copy.generation for copy in copies], np.uint64)
        assert slots.still_valid(rows, generations).all()
        assert not slots.ready(rows, generations).any()
        slots.commit({slots.namespace(): copies[:6]})
        slots.abort(
            [
                Reserved(copy.key, copy.slot, copy.generation)
                for copy in copies[6:]
            ]
        )
        assert slots.ready(rows, generations).tolist() == [True] * 6 + [False] * 2
        assert slots.ready(rows[:0], generations[:0]).tolist() == []
        cache.clear()
        assert not slots.ready(rows, generations).any()


def _commits(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        written(cache, prompt(10))


def _copies_out(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        wait_until(
            lambda: (
                len(
                    slots_of(cache)
                    .match_prefix(keys_of(cache, prompt(10)), 0, touch=False)
                    .slots
                )
                == 10
            )
        )
        count, blocks = read(cache, prompt(10))
        assert count == 10
        assert (blocks == kv_of(prompt(10)).blocks).all()


@pytest.mark.slow
def test_two_processes_share_the_slots(shm_root: Path, tmp_path: Path) -> None:
    # the store outlives the committing process
    with cache_at(shm_root, tmp_path):
        run_all(
            [
                SPAWN.Process(target=work, args=(shm_root, tmp_path))
                for work in (_copies_out, _commits)
            ]
        )


def test_a_forked_child_of_a_cache_in_private_memory_misses(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None, host_shared=False) as cache:
        slots = slots_of(cache)
        tokens = prompt(4)
        copies = written(cache, tokens)

        def child() -> None:
            assert len(slots.match_prefix(keys_of(cache, tokens), 0).slots) == 0
            assert slots.commit({slots.namespace(): copies}) == [False] * 4
            assert {type(item) for item in reserved_for(cache, prompt(2, 1))} == {
                Refused
            }

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert hit_of(cache, tokens).num_tokens == 64


def test_a_reserve_waits_no_longer_than_its_deadline(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        keys = keys_of(cache, prompt(2))
        with shut_to_threads(slots._ledger), ThreadPoolExecutor(1) as thread:
            late = thread.submit(
                slots.reserve,
                keys,
                namespace=bytes(32),
                start=0,
                parent=None,
                deadline_seconds=0.01,
            )
            assert late.result(PATIENT_SECONDS / 2) == [
                Refused(key, Reason.LEDGER_BUSY) for key in keys
            ]


def _clears_and_fills(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        assert cache.clear().chunks["host"] == 4
        for seed in range(20):
            written(cache, prompt(8, seed))


@pytest.mark.slow
def test_no_byte_of_a_held_slot_changes_though_another_process_clears_it(
    shm_root: Path,
) -> None:
    tokens = prompt(4, 99)
    with cache_at(shm_root, None) as cache:
        copies = written(cache, tokens)
        slots = slots_of(cache)
        rows = (
            [copy.slot for copy in copies],
            [copy.generation for copy in copies],
        )
        places = np.array(rows[0]), np.array(rows[1], np.uint64)
        assert slots.hold(*places) == [True] * 4
        run_all([SPAWN.Process(target=_clears_and_fills, args=(shm_root,))])
        blocks = kv_of(tokens).blocks
        held = [slots.view(copy.slot)[: LAYOUT.chunk_bytes] for copy in copies]
        for view, block in zip(held, blocks, strict=True):
            assert (view == block).all()
        assert not slots.still_valid(*places).any()
        slots.release(*places)
        for seed in range(20, 40):
            written(cache, prompt(8, seed))
        for view, block in zip(held, blocks, strict=True):
            assert not (view == block).all()
        admin.check(slots._ledger)
