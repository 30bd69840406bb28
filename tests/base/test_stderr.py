"""What is logged on stderr never makes the process wait for whoever reads it."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest

from pagoda.base.log import JsonFormatter, StderrHandler


@pytest.mark.parametrize("letter", ["x", "\u5854"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("formatter", [None, JsonFormatter()])
def test_a_line_that_nobody_reads_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
    formatter: logging.Formatter | None,
    encoding: str,
    letter: str,
) -> None:
    reading, writing = os.pipe()
    with (
        open(reading, "rb") as pipe,
        open(
            writing, "w", encoding=encoding, errors="backslashreplace"
        ) as stderr,
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = StderrHandler()
        handler.setFormatter(formatter)
        logger = logging.Logger("of a test")
        logger.addHandler(handler)

        def log() -> None:
            for number in range(200):
                try:
                    raise RuntimeError(letter * 5000)
                except RuntimeError:
                    logger.exception("line %d", number)

        thread = threading.Thread(target=log, daemon=True)
        thread.start()
        thread.join(30)
        waited = thread.is_alive()
        os.set_blocking(reading, False)
        read = pipe.read()
        assert not waited
        assert b"line 0" in read
        assert len(read) > 10_000


def test_a_stream_that_is_no_file_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lines(list[str]):
        write = list.append

        def flush(self) -> None:
            pass

    lines = Lines()
    monkeypatch.setattr(sys, "stderr", lines)
    logger = logging.Logger("of a test")
    logger.addHandler(StderrHandler())
    for number in range(300):
        logger.warning("line %d", number)
    assert lines[-1] == "line 299\n"
    assert len(lines) == 300
