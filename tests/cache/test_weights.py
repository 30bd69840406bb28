"""Weights that were changed in place never hit what the old ones computed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pagoda.cache import why
from pagoda.cache.weights import Weights
from pagoda.errors import StoreError
from pagoda.metrics import Reason
from tests.cache.kit import NAMESPACE, SPAWN, cache_at, kv_of, prompt, served, stored


def test_the_epoch_is_kept_under_every_root(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    assert Weights(roots, "m").epoch() == 0
    assert Weights(roots, "m").raised() == 1
    other = Weights(roots, "m")
    assert other.epoch() == 1 and Weights(roots, "another").epoch() == 0
    for path in (tmp_path / "a").iterdir():
        path.unlink()  # wiped, as memory is by a reboot
    assert Weights(roots, "m").epoch() == 1
    assert other.raised() == 2
    assert Weights([tmp_path / "a"], "m").epoch() == 2


def test_two_that_raise_it_at_once_both_raise_it(tmp_path: Path) -> None:
    one, two = Weights([tmp_path], "m"), Weights([tmp_path], "m")
    assert (one.epoch(), two.epoch()) == (0, 0)
    first = one.raised()
    assert two.raised() > first


def test_an_epoch_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    weights = Weights([tmp_path / "file"], "m")
    with pytest.raises(StoreError, match="clear the cache instead"):
        weights.raised()
    assert weights.epoch() == 1  # this process at least does not go back


def test_without_a_shared_tier_it_holds_in_this_process() -> None:
    weights = Weights([], "m")
    assert weights.raised() == 1 and weights.epoch() == 1


def test_nothing_stored_before_hits_again(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why, "_BUDGET_NS", 60 * 10**9)  # an engine's call looks for a millisecond only
    monkeypatch.setattr(why, "_LIST_SECONDS", 60.0)
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        keys = cache.keys(tokens)
        assert cache.weights_changed() == 1
        assert cache.keys(tokens) != keys
        hit, _ = served(cache, tokens)
        assert (hit.num_tokens, hit.reason) == (0, Reason.OTHER_NAMESPACE)
        assert "weights_epoch" in hit.detail
        stored(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == 64
    with cache_at(shm_root / "rebooted", tmp_path) as cache:  # the host tier is gone, the disk remembers
        assert served(cache, tokens)[0].by_tier == {"disk": 64}
        assert cache.namespace.weights_epoch == 0 and cache._calls.namespace().weights_epoch == 1


def test_an_epoch_of_the_configuration_is_kept_apart_from_the_machine_s(shm_root: Path) -> None:
    tokens = prompt(2)
    with cache_at(shm_root, None, NAMESPACE.with_(weights_epoch=1)) as cache:
        stored(cache, tokens)
    with cache_at(shm_root, None) as cache:
        cache.weights_changed()
        assert cache.lookup(tokens).num_tokens == 0


def _another_process(shm_root: Path, tmp_path: Path, pipe: Connection) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        pipe.send(cache.lookup(tokens).num_tokens)
        assert pipe.recv() == "changed"
        pipe.send(cache.lookup(tokens).num_tokens)
        pipe.send(cache.store(tokens, kv_of(tokens).transfer).num_chunks)


def test_other_processes_notice_at_their_next_call(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(4)
    here, there = SPAWN.Pipe()
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        process = SPAWN.Process(target=_another_process, args=(shm_root, tmp_path, there))
        process.start()
        assert here.recv() == 64
        cache.weights_changed()
        here.send("changed")
        assert here.recv() == 0
        assert here.recv() == 4
        process.join(60)
        assert served(cache, tokens)[0].num_tokens == 64
