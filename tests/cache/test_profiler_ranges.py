"""Ranges for profilers: nothing unless they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagoda.cache import call
from tests.cache.kit import cache_at, prompt, served, stored


@pytest.fixture(autouse=True)
def _off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_profiler_range", call._profiler_range)


def _seen(shm_root: Path) -> set[str]:
    with cache_at(shm_root, None) as cache, torch.profiler.profile() as profile:
        stored(cache, prompt(2))
        served(cache, prompt(2))
    return {
        event.key
        for event in profile.key_averages()
        if event.key.startswith("pagoda.")
    }


def test_off_by_default(shm_root: Path) -> None:
    assert _seen(shm_root) == set()


def test_a_cache_switches_them_on_by_its_configuration(shm_root: Path) -> None:
    with (
        cache_at(shm_root, None, profile=True) as cache,
        torch.profiler.profile() as profile,
    ):
        cache.lookup(prompt(2))
    assert "pagoda.lookup" in {event.key for event in profile.key_averages()}


def test_calls_and_copies_have_ranges_when_asked_for(shm_root: Path) -> None:
    call.enable_profiler_ranges()
    assert _seen(shm_root) == {
        "pagoda.store",
        "pagoda.copy_down",
        "pagoda.retrieve",
        "pagoda.copy_up",
    }
