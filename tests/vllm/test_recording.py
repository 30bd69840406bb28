"""An engine's requests in a recording: one line each, whatever tier the hits came from."""

from __future__ import annotations

from pathlib import Path

from pagoda_tools.replay import read_trace
from tests.vllm.engines import CHUNK, Engine, connector, options
from tests.vllm.models import prompt


def test_a_line_a_request(
    llama: Path, session_shm: Path, logs: Path, tmp_path: Path
) -> None:
    """Computed, found on the device, loaded, and too short for a chunk."""
    trace = tmp_path / "trace.jsonl"
    engine = Engine(
        "recording",
        logs / "recording.log",
        **options(llama),
        **connector(session_shm / "rec", record=str(trace)),
    )
    one = prompt(900, 5 * CHUNK + 7)
    other = prompt(901, 700)
    engine.generate(one)
    engine.generate(one)
    engine.reset()
    answers = engine.generate(one, other, other, prompt(902, CHUNK - 1))
    engine.stop()
    assert answers[0].external == 5 * CHUNK
    lines = list(read_trace(trace))
    recorded = [(len(line.hash_ids), line.input_length) for line in lines]
    assert recorded[:2] == [(5, len(one))] * 2
    # arrived together
    assert sorted(recorded[2:]) == [
        (5, len(one)),
        (10, len(other)),
        (10, len(other)),
    ]
    assert len({line.hash_ids for line in lines}) == 2
