"""Calls on threads of the server: what becomes of one that nobody waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pagoda_tools.serve.blocking_calls import BlockingCallPool


def test_a_call_that_fails_when_nobody_waits_any_more_prints_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = threading.Event()
    ended = threading.Event()

    def fail() -> None:
        free.wait(10)
        ended.set()
        raise OSError("late")

    async def leave() -> None:
        calls = BlockingCallPool(threads=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.run(fail), 0.05)
        free.set()
        await calls.run(ended.wait, 10)  # on the same thread, so afterwards
        calls.close()

    asyncio.run(leave())
    assert not caplog.records
