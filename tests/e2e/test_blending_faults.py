"""What goes wrong while documents are loaded: a miss with a reason, and the answer of a cache that
has nothing.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from pagoda.base.metrics import Reason
from pagoda.config import Config
from pagoda.connectors.transformers import CachedModel
from pagoda.transfer import DenseKV
from testbed.patience import wait_until
from testbed.servers import redis_server
from tests.children import (
    in_child,
    kill_self,
)
from tests.e2e.house import CHUNK, House
from tests.e2e.test_blending import LENGTHS, WhileComputing, logits_after, pieces
from tests.e2e.tiny import llama
from tests.remote.chunks import fresh_prefix
from tests.remote.proxy import STALLED, Proxy

TOKENS = sum(LENGTHS)
LONG = 120.0
CLOSE = 1e-5  # fewer tokens at a time are added up in another order


def answer(model: torch.nn.Module) -> torch.Tensor:
    """What the call without any cache says."""
    config = Config(
        chunk_tokens=CHUNK, host_size=0, unchecked=True, worth_it=False
    )
    with CachedModel(model, config) as nothing:
        return logits_after(model, nothing.blend(*pieces()))


def same(model: torch.nn.Module, found, want: torch.Tensor) -> bool:
    return torch.allclose(logits_after(model, found), want, atol=CLOSE)


@pytest.mark.slow
def test_a_forked_child_blends_whatever_other_threads_were_doing(
    house: House,
) -> None:
    """One thread looks at the weights, with the lock; another one computes a document."""
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    cached.blend(documents[:2], question)
    reached = threading.Event()
    go_on = threading.Event()
    found = []

    def pause() -> None:
        reached.set()
        assert go_on.wait(LONG)

    def hold() -> None:
        with cached._lock:
            pause()

    def check() -> None:
        again = cached.blend(documents, question)
        assert again.hit.num_tokens >= sum(LENGTHS[:2])
        assert same(model, again, want)

    want = answer(model)
    in_child(check)
    for work in (hold, lambda: found.append(cached.blend(documents, question))):
        reached.clear()
        go_on.clear()
        thread = threading.Thread(target=work)
        if work is not hold:
            WhileComputing(model, pause)
        thread.start()
        assert reached.wait(LONG)
        try:
            in_child(check)
        finally:
            go_on.set()
            thread.join(LONG)
        check()
    assert same(model, found[0], want)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "q8"])
def test_spoilt_bytes_on_the_disk_are_computed(
    codec: str, house: House, tmp_path: Path
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True, disk_codec=codec)
    want = answer(model)
    cached.blend(documents, question)
    assert cached._blender.cache.flush(LONG)
    house.shut(wipe_host=True)
    for slab in (tmp_path / "disk").glob("*/slab"):
        content = np.fromfile(slab, np.uint8)
        content[64::128] ^= 0x10  # of each chunk
        content.tofile(slab)
    cached = house.open(model, unchecked=True, disk_codec=codec)
    found = cached.blend(documents, question)
    assert found.hit.num_tokens == 0
    assert found.hit.reason is Reason.FAILED_CHECK
    assert same(model, found, want)
    assert cached.stats()["documents"]["misses"] == {
        Reason.FAILED_CHECK: len(documents)
    }
    # a chunk that was still being read when the ones before it were stored is stored the next time
    wait_until(
        lambda: cached.blend(documents, question).hit.by_tier == {"host": TOKENS}
    )
    assert same(model, cached.blend(documents, question), want)


def test_documents_that_are_cleared_between_two_loads_are_computed(
    house: House,
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    want = answer(model)
    cached.blend(
        [documents[0], *documents[2:]], question
    )  # the second one is computed, and then the rest is gone
    WhileComputing(model, lambda: cached._blender.cache.clear())
    found = cached.blend(documents, question)
    assert [hit.num_tokens for hit in found.blend.documents] == [
        LENGTHS[0],
        0,
        0,
        0,
    ]
    assert same(model, found, want)
    assert same(model, cached.blend(documents, question), want)


@pytest.mark.slow
def test_a_document_that_goes_between_look_up_and_load_is_computed(
    house: House,
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    want = answer(model)
    ids = torch.tensor([documents[0] + question])
    # the first document is in the chain of prompts
    cached.generate(ids, max_new_tokens=1, do_sample=False)
    cached.blend([documents[1]], question)
    look_up = cached.cache.lookup

    def and_clear(*args, **options):
        found = look_up(*args, **options)
        assert cached.cache.clear().chunks["host"]
        return found

    cached.cache.lookup = and_clear
    found = cached.blend(documents, question)
    del cached.cache.lookup
    assert [hit.num_tokens for hit in found.blend.documents] == [
        0,
        LENGTHS[1],
        0,
        0,
    ]
    assert same(model, found, want)


@pytest.mark.slow
def test_documents_that_do_not_fit_are_computed(house: House) -> None:
    model = llama()
    (documents, question) = pieces()
    want = answer(model)
    with CachedModel(
        model,
        Config(
            chunk_tokens=CHUNK,
            host_size="1MiB",
            host_shared=False,
            unchecked=True,
        ),
    ) as roomy:
        slot = roomy.cache.layout.slot_bytes
    config = Config(
        chunk_tokens=CHUNK,
        host_size=4 * slot,
        host_shared=False,
        worth_it=False,
        unchecked=True,
        policy="lru",
    )
    with CachedModel(model, config) as cached:
        for _ in range(3):
            assert same(model, cached.blend(documents, question), want)
        stats = cached.stats()["documents"]
    assert sum(stats["misses"].values()) + sum(stats["drops"].values()) > 0


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_stores_the_same_documents(
    house: House,
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    want = answer(model)
    cached._ready_to_blend(None)  # the model is probed

    def die(*_: object) -> None:
        kill_self()

    def store() -> None:
        DenseKV.to_slots = die  # its slots are reserved
        cached.blend(documents, question)

    in_child(store, -signal.SIGKILL)
    assert same(model, cached.blend(documents, question), want)
    again = cached.blend(documents, question)
    assert again.hit.num_tokens == TOKENS
    assert same(model, again, want)


@pytest.mark.slow
def test_a_remote_store_that_does_not_answer_is_waited_for_as_one_call(
    house: House, shm_root: Path
) -> None:
    model = llama()
    (documents, question) = pieces()
    want = answer(model)
    with redis_server() as server:
        place = urlsplit(server.url)
        proxy = Proxy((str(place.hostname), int(place.port or 0)))
        options = {
            "unchecked": True,
            "remote": f"redis://127.0.0.1:{proxy.port}/0?prefix={fresh_prefix()}",
        }
        cached = house.open(model, **options)
        cached.blend(documents, question)
        assert cached._blender.cache.flush(LONG)
        others = {
            "host_path": str(shm_root / "other"),
            "disk_path": str(shm_root / "disk"),
        }
        other = house.open(model, **options, **others)
        other._ready_to_blend(None)
        retrieve = other._blender.cache.retrieve
        patience = []

        def seen(*args, **call):
            patience.append(call["deadline_seconds"])
            return retrieve(*args, **call)

        other._blender.cache.retrieve = seen
        proxy.both(STALLED)
        found = other.blend(documents, question, store=False)
        # as long as one call may wait; all documents together wait no longer
        assert patience[0] is None
        assert 20.0 > patience[1] > patience[2] > patience[3] > 0
        assert found.hit.num_tokens == 0
        assert found.hit.reason is Reason.DEADLINE
        assert same(model, found, want)
        assert other.stats()["documents"]["misses"] == {
            Reason.DEADLINE: len(documents)
        }
        proxy.heal()
        house.shut()
