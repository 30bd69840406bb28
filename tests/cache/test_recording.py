"""Recording live traffic: what counts as one request, and what is written to the file in all
cases.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.clock import Clock
from pagoda.base.errors import ConfigError
from pagoda.cache import Cache
from pagoda.cache.append_lines import append_lines
from pagoda.cache.recording import (
    CallKind,
    RecordedCall,
    Recorder,
    RequestDetector,
    require_trace,
)
from pagoda.testing.fake_clock import FakeClock
from pagoda_tools.replay import Request, TierSpec, read_trace, simulate
from testbed.patience import Patience, wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    Prompt,
    blank,
    cache_at,
    config_of,
    keys_of,
    prompt,
    put,
    run_all,
    slots_of,
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def cache(shm_root: Path, trace: Path) -> Iterator[Cache]:
    with cache_at(shm_root, None, record=str(trace)) as cache:
        yield cache


def recorded(cache: Cache, trace: Path) -> list[Request]:
    """Return the recorded requests after the cache was closed."""
    cache.close()
    return list(read_trace(trace)) if trace.exists() else []


def ids_of(tokens: Prompt) -> tuple[int, ...]:
    """Return the ids that a prompt has in every process."""
    with Cache(
        config_of(None, None), namespace=NAMESPACE, layout=LAYOUT, tiers=[]
    ) as nobody:
        return tuple(
            int.from_bytes(key[:8], "little") % 2**63
            for key in keys_of(nobody, tokens)
        )


def ask_and_store(cache: Cache, tokens: Prompt) -> int:
    """Do what an engine does with one request; return how many chunks hit."""
    hit = cache.retrieve(tokens, blank(tokens).transfer)
    assert put(cache, tokens).refused == 0
    return hit.num_tokens // CHUNK


# ---- what is one request


def test_one_line_a_request(cache: Cache, trace: Path) -> None:
    first = prompt(4.5)
    second = prompt(3, seed=1)
    cache.lookup(first, counted=False)
    ask_and_store(cache, first)
    ask_and_store(cache, second)
    ask_and_store(cache, first)

    lines = recorded(cache, trace)
    assert [line.hash_ids for line in lines] == [
        ids_of(first),
        ids_of(second),
        ids_of(first),
    ]
    assert [line.input_length for line in lines] == [72, 48, 72]
    assert {line.chunk_tokens for line in lines} == {CHUNK}
    assert lines[0].timestamp_ms / 1000 == pytest.approx(time.time(), abs=100)


def test_polling_looking_up_and_retrieving_are_one_request(
    cache: Cache, trace: Path
) -> None:
    tokens = prompt(4)
    for _ in range(5):
        cache.lookup(tokens)
    cache.retrieve(tokens[:-1], blank(tokens).transfer)
    assert put(cache, tokens).num_chunks == 4
    cache.lookup(tokens)  # another caller with the same prompt
    cache.retrieve(tokens, blank(tokens).transfer, counted=False)
    cache.retrieve(tokens, blank(tokens).transfer)
    assert len(recorded(cache, trace)) == 3


def test_prefetching_explaining_and_uncounted_calls_are_no_requests(
    cache: Cache, trace: Path
) -> None:
    tokens = prompt(4)
    cache.prefetch(tokens).result(60)
    cache.explain(tokens)
    cache.lookup(tokens, counted=False)
    cache.retrieve(tokens, blank(tokens).transfer, counted=False)
    assert recorded(cache, trace) == []


def test_a_request_is_recorded_from_its_first_chunk(
    cache: Cache, trace: Path
) -> None:
    tokens = prompt(6)
    cache.retrieve(tokens, blank(tokens).transfer, start_tokens=4 * CHUNK)
    keys = keys_of(cache, tokens)
    cache.retrieve(
        None, blank(tokens).transfer, keys=keys, start_tokens=2 * CHUNK
    )
    assert [line.hash_ids for line in recorded(cache, trace)] == [
        ids_of(tokens)
    ] * 2


def test_numbers_of_numpy_are_recorded(cache: Cache, trace: Path) -> None:
    """One ended the trace of the process: it was not recorded then, nor what was asked before."""
    tokens = prompt(4)
    ask_and_store(cache, tokens)
    start = np.int64(2 * CHUNK)
    hit = cache.retrieve(tokens, blank(tokens).transfer, start_tokens=start)  # type: ignore[arg-type]
    assert hit.num_tokens == 2 * CHUNK
    assert type(hit.start_tokens) is int
    keys = cache.keys(tokens, start)  # type: ignore[arg-type]
    given = [(np.int64(begin), end, key) for begin, end, key in keys]
    got = cache.retrieve(tokens, blank(tokens).transfer, keys=given)  # type: ignore[arg-type]
    assert got.num_tokens == 2 * CHUNK
    assert len(recorded(cache, trace)) == 3


def test_who_only_stores_is_recorded_by_what_is_stored(
    cache: Cache, trace: Path
) -> None:
    growing = prompt(6)
    other = prompt(2, seed=1)
    for end in (2, 4, 6):  # as it is computed
        put(cache, growing[: end * CHUNK])
    put(cache, other)
    put(cache, other)
    lines = recorded(cache, trace)
    assert [line.hash_ids for line in lines] == [
        ids_of(growing)[:2],
        ids_of(other),
        ids_of(other),
    ]


def test_an_engine_with_hands_of_its_own_is_recorded(
    cache: Cache, trace: Path
) -> None:
    slots = slots_of(cache)
    tokens = prompt(6)
    later = prompt(2, seed=1)
    keys = keys_of(cache, tokens)
    root = slots.namespace()
    slots.abort(
        [
            one
            for one in slots.reserve(
                keys[:4], namespace=root, start=0, parent=None
            )
            if one
        ]
    )  # type: ignore[misc]
    slots.reserve(keys[4:], namespace=root, start=4, parent=keys[3])
    slots.reserve(keys[2:3], namespace=root, start=2, parent=keys[1])
    assert slots.is_recording
    slots.record_request(keys, 6 * CHUNK + 3)
    slots.record_request(keys, 6 * CHUNK + 3)
    # no line: a caller that retrieves would have recorded its request
    slots.reserve(keys_of(cache, later), namespace=root, start=0, parent=None)
    lines = recorded(cache, trace)
    assert [len(line.hash_ids) for line in lines] == [4, 6, 6]
    assert lines[-1].input_length == 6 * CHUNK + 3


def call(
    kind: CallKind,
    names: str,
    at: float,
    first: int = 0,
    parent: str = "",
    counted: bool = True,
) -> RecordedCall:
    keys = [name.encode() * 32 for name in names]
    return RecordedCall(
        kind,
        counted,
        keys,
        first,
        len(keys) * CHUNK,
        int(at * 1000),
        parent.encode() * 32 or None,
    )


def test_an_answer_that_is_stored_late_is_of_its_request() -> None:
    questions = RequestDetector()
    assert questions.is_request(call(CallKind.RETRIEVE, "abc", 0))
    assert not questions.is_request(call(CallKind.STORE, "abcde", 300))
    assert not questions.is_request(
        call(CallKind.STORE, "f", 301, first=5, parent="e")
    )
    assert not questions.is_request(
        call(CallKind.RESERVE, "f", 301, first=5, parent="x")
    )
    assert questions.is_request(call(CallKind.STORE, "abc", 5000))


def test_what_is_asked_again_later_is_another_request() -> None:
    questions = RequestDetector()
    assert questions.is_request(call(CallKind.LOOKUP, "abc", 0))
    assert not questions.is_request(call(CallKind.LOOKUP, "abc", 9))
    assert questions.is_request(call(CallKind.LOOKUP, "ab", 9))
    assert questions.is_request(call(CallKind.LOOKUP, "abd", 9))
    assert questions.is_request(call(CallKind.LOOKUP, "abc", 30))
    assert questions.is_request(call(CallKind.RETRIEVE, "abcd", 31))
    assert not questions.is_request(call(CallKind.RETRIEVE, "abc", 31))
    assert not questions.is_request(
        call(CallKind.RETRIEVE, "abc", 32, counted=False)
    )
    assert questions.is_request(call(CallKind.RETRIEVE, "abc", 32))


# ---- the file


def test_it_says_nothing_of_the_text(shm_root: Path, trace: Path) -> None:
    tokens = np.full(64, 31_337, np.int32)
    with cache_at(shm_root, None, record=str(trace)) as cache:
        ask_and_store(cache, tokens)
        hidden = keys_of(cache, tokens)
        cache.retrieve(tokens, blank(tokens).transfer, salt="a secret")
    text = trace.read_text()
    assert "31337" not in text
    assert "secret" not in text
    assert "a-model" not in text
    for key in hidden:
        assert key.hex() not in text
        assert str(int.from_bytes(key, "little")) not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 2
    assert not set(lines[0]["hash_ids"]) & set(lines[1]["hash_ids"])
    assert set(lines[0]) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "chunk_tokens",
    }
    assert trace.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_replay_of_it_hits_what_the_cache_did(
    shm_root: Path, trace: Path
) -> None:
    random = np.random.default_rng(7)
    hits = 0
    asked = 0
    clock = FakeClock()
    config = config_of(shm_root, None, record=str(trace), policy="lru")
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        slots = slots_of(cache).count
        for _ in range(150):
            tokens = prompt(12, seed=int(random.zipf(1.3)) % 30)[
                : int(random.integers(1, 13)) * CHUNK
            ]
            hits += ask_and_store(cache, tokens)
            asked += len(tokens) // CHUNK
            # chunks requested in the last seconds are kept, with every policy
            clock.advance(60)
    outcome = simulate(read_trace(trace), [TierSpec("host", slots, "lru")])
    assert outcome.requests == 150
    assert outcome.accesses == asked
    assert 0.2 < hits / asked < 0.9
    assert outcome.hit_rate == pytest.approx(hits / asked, abs=0.005)


def _works(shm_root: Path, trace: Path, seed: int, count: int) -> None:
    with cache_at(shm_root, None, record=str(trace)) as cache:
        for number in range(count):
            cache.retrieve(prompt(3, seed), blank(prompt(3)).transfer)
            cache.retrieve(
                prompt(8, seed * 1000 + number), blank(prompt(8)).transfer
            )


@pytest.mark.slow
def test_several_processes_record_into_one_file(
    shm_root: Path, trace: Path
) -> None:
    run_all(
        [
            SPAWN.Process(target=_works, args=(shm_root, trace, seed, 50))
            for seed in (1, 2)
        ]
    )
    lines = list(read_trace(trace))
    assert len(lines) == 200
    assert sum(line.hash_ids == ids_of(prompt(3, 1)) for line in lines) == 50


def _works_until_killed(shm_root: Path, trace: Path) -> None:
    recorder = Recorder(trace, CHUNK, Clock())
    keys = [bytes([n % 256, n // 256]) * 16 for n in range(4000)]
    while True:
        recorder.note(CallKind.REQUEST, keys, 0, len(keys) * CHUNK)
        time.sleep(0.001)


@pytest.mark.slow
def test_a_killed_process_leaves_whole_lines(shm_root: Path, trace: Path) -> None:
    for _ in range(3):
        process = SPAWN.Process(
            target=_works_until_killed, args=(shm_root, trace)
        )
        before = trace.stat().st_size if trace.exists() else 0
        process.start()
        wait_until(lambda: trace.exists() and trace.stat().st_size > before)  # noqa: B023
        time.sleep(0.05)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    append_lines(trace, [])
    lines = list(read_trace(trace))
    assert len(lines) >= 3
    assert {len(line.hash_ids) for line in lines} == {4000}


def test_half_a_line_is_cut_off_by_the_next(trace: Path) -> None:
    trace.write_bytes(b"whole\n" + b"half of a line" * 10_000)
    assert append_lines(trace, [b"next\n", b"one\n"]) == (2, None)
    assert trace.read_bytes() == b"whole\nnext\none\n"
    trace.write_bytes(b"half")
    assert append_lines(trace, []) == (0, None)
    assert trace.read_bytes() == b""


def test_a_disk_without_room_keeps_no_half_line(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    count, trouble = append_lines(trace, [b"a line\n"])
    assert count == 0
    assert trouble is not None
    assert trace.read_bytes() == b""


def test_what_cannot_be_written_is_one_log_line(
    tmp_path: Path, shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = str(tmp_path / "nowhere" / "trace.jsonl")
    with (
        caplog.at_level(logging.WARNING),
        cache_at(shm_root, None, record=nowhere) as cache,
    ):
        for seed in range(3):
            assert ask_and_store(cache, prompt(2, seed)) == 0
            wait_until(lambda: dropped(cache) == seed + 1)  # noqa: B023
    assert (
        len(
            [
                record
                for record in caplog.records
                if "not recorded" in record.message
            ]
        )
        == 1
    )


WHOLE = b'{"timestamp":1795896991163.0,"input_length":8,"output_length":0,"hash_ids":[12,3456],"chunk_tokens":4}\n'  # noqa: E501
FOREIGN = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


@pytest.mark.parametrize(
    "content",
    [
        # one line without an end: it would be cut off whole
        b'{"weights": "only copy"}',
        b"a\nb\nlast line without end",
        b"#!/bin/sh\necho hi\n",
        b"\n",
        bytes(100_000),
        b"\x1f\x8b\x08\x00",
        WHOLE + b"a note",
        WHOLE * 2000 + b"a note of mine",
        FOREIGN[:-1],
        b'{"timestamp":1,"input_length":2}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("through_link", [False, True])
def test_a_file_that_is_no_trace_is_refused_and_left_as_it_is(
    tmp_path: Path,
    shm_root: Path,
    trace: Path,
    content: bytes,
    through_link: bool,
) -> None:
    kept = tmp_path / "kept" if through_link else trace
    kept.write_bytes(content)
    if through_link:
        trace.symlink_to(kept)
    with (
        pytest.raises(
            ConfigError, match=r"record = .*trace\.jsonl.*name a new file"
        ),
        cache_at(shm_root, None, record=str(trace)) as cache,
    ):
        ask_and_store(cache, prompt(2))
    assert kept.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"", WHOLE, FOREIGN, WHOLE * 2000, FOREIGN * 900]
)
def test_a_trace_is_continued_with_any_part_of_a_last_line(
    shm_root: Path, trace: Path, content: bytes
) -> None:
    for length in range(len(WHOLE)):
        trace.write_bytes(content + WHOLE[:length])
        assert require_trace(trace) is not None
    with cache_at(shm_root, None, record=str(trace)) as cache:
        ask_and_store(cache, prompt(2))
    kept = trace.read_bytes()
    assert kept.startswith(content)
    assert kept.count(b"\n") == content.count(b"\n") + 1
    assert len(list(read_trace(trace))) == content.count(b"\n") + 1


def test_a_very_long_line_is_a_trace_however_much_of_it_is_there(
    trace: Path,
) -> None:
    line = WHOLE.replace(b"12,", b"1234567,8," * 30_000)
    ends = (0, -1, -2, -40, 150_001, 70_000)
    for content in (
        line,
        line * 2,
        *(line + line[:end] for end in ends),
        *(line[:end] for end in ends),
    ):
        trace.write_bytes(content)
        assert require_trace(trace) is not None


def test_a_file_that_takes_the_place_of_the_trace_is_not_written_to(
    tmp_path: Path, shm_root: Path, trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        cache_at(shm_root, None, record=str(trace)) as cache,
    ):
        ask_and_store(cache, prompt(2, 1))
        wait_until(trace.exists)
        other = tmp_path / "other"
        other.write_bytes(b"mine, without an end")
        other.replace(trace)
        ask_and_store(cache, prompt(2, 2))
        wait_until(lambda: dropped(cache) > 0)
    assert trace.read_bytes() == b"mine, without an end"
    assert "not recorded" in caplog.text
    assert "name a new file" in caplog.text


def test_what_is_no_regular_file_is_not_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path / "none", tmp_path / "none" / "none"):
        require_trace(path)


def dropped(cache: Cache) -> int:
    state = cache.stats()["recording"]
    assert isinstance(state, dict)
    return int(state["dropped"])


@pytest.mark.slow
def test_calls_that_are_too_many_are_dropped(
    trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(trace, CHUNK, FakeClock())
    keys = [bytes([n]) * 32 for n in range(200)]
    began = time.monotonic()
    for _ in range(20_000):
        recorder.note(CallKind.REQUEST, keys, 0, 200 * CHUNK)
    each = (time.monotonic() - began) / 20_000
    recorder.close(60)
    state = recorder.stats()
    assert 0 < int(str(state["dropped"])) < 20_000
    assert int(str(state["requests"])) + int(str(state["dropped"])) == 20_000
    assert len(list(read_trace(trace))) == state["requests"]
    assert "too many" in caplog.text
    assert each < 0.001


def test_a_hanging_disk_holds_nobody_up(
    trace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "pagoda.cache.recording.append_lines", lambda *_: time.sleep(60)
    )
    recorder = Recorder(trace, CHUNK, Clock())
    patience = Patience(20)
    recorder.note(CallKind.REQUEST, [bytes(32)], 0, CHUNK)
    recorder.close(0.2)
    recorder.note(CallKind.REQUEST, [bytes(32)], 0, CHUNK)
    assert not patience.ended, patience.said()
    assert "the last requests may not be recorded" in caplog.text


def test_the_thread_has_nothing_to_import(trace: Path) -> None:
    """It would take longer than the end of a process waits, where processors are busy."""
    code = f"""
import sys
from pathlib import Path
from pagoda.cache.recording import Recorder
from pagoda.base.clock import Clock

Recorder(Path({str(trace)!r}), 16, Clock())
assert "pagoda.cache.request_trace" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_forked_child_records_what_is_its_own(
    shm_root: Path, trace: Path
) -> None:
    with cache_at(shm_root, None, record=str(trace)) as cache:
        cache.retrieve(prompt(2), blank(prompt(2)).transfer)
        child = multiprocessing.get_context("fork").Process(
            target=_asks, args=(cache, 1)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        _asks(cache, 2)
    assert sorted(line.hash_ids for line in read_trace(trace)) == sorted(
        [ids_of(prompt(2)), ids_of(prompt(2, 1)), ids_of(prompt(2, 2))]
    )


def _asks(cache: Cache, seed: int) -> None:
    cache.retrieve(prompt(2, seed), blank(prompt(2)).transfer)
    if seed == 1:
        cache.close()


def test_the_environment_turns_it_on(
    shm_root: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_RECORD", str(trace))
    monkeypatch.setenv("PAGODA_CHUNK_TOKENS", str(CHUNK))
    with Cache(
        namespace=NAMESPACE,
        layout=LAYOUT,
        host_size="1MiB",
        host_path=shm_root / "host",
    ) as cache:
        ask_and_store(cache, prompt(2))
    assert [line.hash_ids for line in read_trace(trace)] == [ids_of(prompt(2))]


def test_nothing_is_recorded_unasked(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        ask_and_store(cache, prompt(2))
        assert "recording" not in cache.stats()
        assert not slots_of(cache).is_recording
        slots_of(cache).record_request(keys_of(cache, prompt(2)), 2 * CHUNK)
