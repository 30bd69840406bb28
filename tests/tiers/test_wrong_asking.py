"""A caller with wrong keys gets no chunk of another tenant, and removes none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.keys import Namespace
from pagoda.testing import Fault
from pagoda.tiers import DiskTier, HostTier
from tests.tiers.tools import (
    LAYOUT,
    NAMESPACE,
    ROOT,
    SECONDS,
    STRIDE,
    chunks_of,
    ends,
    keys_of,
    oks,
    open_faulty,
    right,
    room,
)

OTHER = Namespace(model="tiers", salt="mallory")
KEYS = keys_of(6)

Local = DiskTier | HostTier


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, shm_root: Path) -> Iterator[Local]:
    opened: Local
    if request.param == "host":
        opened = HostTier.open(
            LAYOUT, shm_root, 16 * LAYOUT.slot_bytes, populate=False
        )
    else:
        opened = DiskTier.open(LAYOUT, shm_root, 16 * STRIDE)
    opened.register(NAMESPACE)
    opened.register(OTHER)
    assert all(oks(opened.store(chunks_of(KEYS), ROOT)))
    yield opened
    opened.close()


def unharmed(tier: Local) -> None:
    assert [right(tier, key) for key in KEYS] == [True] * 6
    assert not tier.stats()["failed_checks"]
    assert not tier.stats()["removed_chunks"]


@pytest.mark.parametrize(
    "root", [OTHER.root, b"x" * 32], ids=["another tenant", "unknown"]
)
def test_the_keys_of_another_namespace(tier: Local, root: bytes) -> None:
    assert (
        tier.match_prefix(KEYS, namespace=root)
        == 0
        < tier.match_prefix(KEYS, namespace=ROOT)
    )
    buffers = [np.zeros_like(room()) for _ in KEYS]
    for done in ends(tier.load(KEYS, buffers, namespace=root)):
        assert not done.ok
        assert done.reason is Reason.OTHER_NAMESPACE
    for buffer in buffers:
        assert not np.any(buffer)
    assert tier.get(KEYS[0], namespace=root) is None
    unharmed(tier)


def test_one_key_of_another_namespace_ends_the_run(tier: Local) -> None:
    own = keys_of(2, root=OTHER.root)
    assert all(oks(tier.store(chunks_of(own), OTHER.root)))
    assert tier.match_prefix([*own, KEYS[2]], namespace=OTHER.root) == 2
    assert tier.match_prefix([own[0], *KEYS[1:6]], namespace=OTHER.root) == 1
    unharmed(tier)


@pytest.mark.parametrize("start", [1, 7, 10**9])
def test_another_place_in_the_chain(tier: Local, start: int) -> None:
    assert [
        done.ok
        for done in ends(
            tier.load(KEYS, [room() for _ in KEYS], start=start, namespace=ROOT)
        )
    ] == [False] * 6
    assert (
        oks(
            tier.load(
                KEYS[2:], [room() for _ in KEYS[2:]], start=2, namespace=ROOT
            )
        )
        == [True] * 4
    )
    unharmed(tier)


def test_who_does_not_say_a_namespace_is_not_asked_for_one(tier: Local) -> None:
    assert tier.match_prefix(KEYS) == 6
    assert tier.match_prefix(KEYS[3:]) == 3
    assert tier.contains(KEYS[4])
    assert tier.get(KEYS[5]) is not None


def test_what_is_queued_is_compared_too(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, io_threads=2)
    slab.fail_next("write", Fault.HANG)
    futures = tier.store(chunks_of(KEYS[:2]), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert (
        tier.match_prefix(KEYS[:2], namespace=OTHER.root)
        == 0
        < tier.match_prefix(KEYS[:2], namespace=ROOT)
    )
    assert not any(
        oks(tier.load(KEYS[:2], [room(), room()], namespace=OTHER.root))
    )
    assert not any(
        oks(tier.load(KEYS[:2], [room(), room()], start=3, namespace=ROOT))
    )
    assert oks(tier.load(KEYS[:2], [room(), room()], namespace=ROOT)) == [
        True,
        True,
    ]
    slab.release()
    assert all(oks(futures))
    tier.close()


def test_storing_under_the_keys_of_another_namespace(tier: Local) -> None:
    """Otherwise its bytes would be passed to other tiers as the caller's chunk."""
    for done in ends(tier.store(chunks_of(KEYS), OTHER.root)):
        assert not done.ok
        assert done.reason is Reason.OTHER_NAMESPACE
    unharmed(tier)


def test_a_key_of_the_wrong_length_is_named_and_loses_no_chunk_of_others(
    tier: Local,
) -> None:
    good = chunks_of(keys_of(3, chain=5))
    batch = [*good[:2], good[2]._replace(key=b"short")]
    with pytest.raises(ValueError, match=r"keys\[2\] is not a key of 32 bytes"):
        tier.store(batch, ROOT)
    with pytest.raises(ValueError, match=r"keys\[0\] is not a key of 32 bytes"):
        tier.load([b"short"], [room()], namespace=ROOT)
    for _ in range(40):
        with pytest.raises(ValueError, match="32 bytes"):
            tier.put(
                b"short", good[0].payload[: LAYOUT.chunk_bytes], namespace=ROOT
            )
    with pytest.raises(ValueError, match="32 bytes"):
        tier.put_many(batch[2:], namespace=ROOT)
    assert not tier.resting
    assert all(oks(tier.store(good, ROOT)))
    unharmed(tier)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_put_takes_a_tensor_of_any_element_type_of_kv(
    tier: Local, dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    key = keys_of(1, chain=6)[0]
    words = torch.arange(LAYOUT.chunk_bytes, dtype=torch.int16).to(torch.uint8)
    assert tier.put(key, words.view(getattr(torch, dtype)), namespace=ROOT)
    found = tier.get(key, namespace=ROOT)
    assert found is not None
    assert found.tobytes() == words.numpy().tobytes()
    with pytest.raises(
        ValueError, match="payload must be a tensor or a numpy array, got list"
    ):
        tier.put(key, [1, 2], namespace=ROOT)  # type: ignore[arg-type]
