"""The same tokens with another image are another prompt: the scheduler's half, without an
engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pagoda.connectors.vllm.metadata import Handshake, Save
from pagoda.connectors.vllm.options import read_options
from pagoda.connectors.vllm.scheduler import PagodaScheduler
from pagoda.connectors.vllm.shared_caches import let_go, opened
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from tests.vllm import stores
from tests.vllm.models import prompt

BLOCK = 32
CHUNK = 64
LAYOUT = KVLayout.opaque(CHUNK, 8192, "multimodal")
TOKENS = 10 * CHUNK + 5
IMAGE_AT = 4 * CHUNK + 10


class Schedule:
    """The scheduler's half over a tier in memory; what it wants saved is stored at once. Of one
    thread.
    """

    def __init__(self, host: Path, hashes_media: bool = True) -> None:
        extra = {
            "host_path": str(host),
            "host_size": "4MiB",
            "chunk_tokens": CHUNK,
            "worth_it": False,
            "deadline_seconds": 20.0,
        }
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        options = read_options(extra, BLOCK)
        handshake = Handshake(Namespace("a-model"), LAYOUT, BLOCK, 1)
        self.half = PagodaScheduler(
            options, BLOCK, None, hashes_media=hashes_media
        )
        self.half.opened([handshake])
        self._cache = opened(options.config, handshake.namespace, LAYOUT)
        self._number = 0

    def request(self, tokens: list[int], image: str | None) -> Request:
        """A request as vLLM's engine makes one, with an image in the middle, or none."""
        self._number += 1
        place = PlaceholderRange(offset=IMAGE_AT, length=40)
        features = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=image, mm_position=place
            )
        ]
        return Request(
            f"request-{self._number}",
            tokens,
            SamplingParams(max_tokens=4),
            None,
            mm_features=features if image else None,
            block_hasher=self._hasher,
        )

    def hit(self, request: Request) -> int:
        """How many tokens of a request that arrives are cached."""
        answers: list[int] = []

        def answered() -> bool:
            tokens, _ = self.half.matched(request, 0)
            answers.extend([] if tokens is None else [tokens])
            return bool(answers)

        self.half.new_request(request)
        stores.wait_until(answered, "the answer of a look-up")
        return answers[0]

    def store(self, request: Request) -> list[bytes]:
        """Compute and store a request that has arrived; returns the keys of newly stored chunks."""
        blocks = SimpleNamespace(
            get_block_ids=lambda *_: (list(range(TOKENS // BLOCK + 1)),)
        )
        self.half.allocated(request, blocks, 0)
        step: Any = SimpleNamespace(
            has_sync_kv_loads=False,
            num_scheduled_tokens={request.request_id: request.num_tokens},
            total_num_scheduled_tokens=request.num_tokens,
            kv_connector_block_state=blocks,
        )
        saves: list[Save] = self.half.step(step).saves
        slots = self._cache.slots
        assert slots is not None
        for save in saves:
            assert all(slots.commit({save.root: save.copies}))
        self.half.finished(request)
        return [copy.key for save in saves for copy in save.copies]

    def close(self) -> None:
        """End it."""
        self.half.shutdown()
        let_go(self._cache)


@pytest.fixture
def schedule(shm_root: Path) -> Iterator[Schedule]:
    """One over a new tier."""
    one = Schedule(shm_root / "host")
    yield one
    one.close()


def test_another_image_is_another_prompt(schedule: Schedule) -> None:
    """Chunks before the image are shared; those with it and after it belong to it."""
    tokens = prompt(6000, TOKENS)
    keys = {}
    before = IMAGE_AT // CHUNK * CHUNK
    for image, expected in [("a", 0), ("b", before), (None, before)]:
        request = schedule.request(tokens, image)
        assert schedule.hit(request) == expected
        keys[image] = schedule.store(request)
    assert len(keys["a"]) == 10
    assert len(keys["b"]) == len(keys[None]) == 10 - before // CHUNK
    assert len({key for some in keys.values() for key in some}) == 10 + 2 * len(
        keys["b"]
    )
    for image in keys:
        assert schedule.hit(schedule.request(tokens, image)) == 10 * CHUNK


def digest(image: str) -> str:
    """What vLLM calls an image by its content."""
    return hashlib.sha256(image.encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "hashed", "shared"),
    [
        (digest("an image"), True, True),
        (f"an-adapter:{digest('an image')}", True, True),
        (hashlib.sha512(b"an image").hexdigest(), True, True),
        (
            "renderer0-mm-1-image-0",
            True,
            False,
        ),  # without caches of its own vLLM counts images, in each process
        (
            digest("renderer0-mm-1-image-0, and the processor's options"),
            False,
            False,
        ),
        ("the-client-says", True, False),
    ],
)
def test_only_names_by_content_are_names_elsewhere(
    shm_root: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    hashed: bool,
    shared: bool,
) -> None:
    """The same name may be another image in another engine, or after a restart: what is before it
    is shared.
    """
    caplog.set_level(logging.INFO, logger="pagoda")
    tokens = prompt(6001, TOKENS)
    before = IMAGE_AT // CHUNK * CHUNK
    with (
        closing(Schedule(shm_root / "host", hashed)) as one,
        closing(Schedule(shm_root / "host", hashed)) as other,
    ):
        first = one.request(tokens, name)
        second = other.request(tokens, name)
        assert one.hit(first) == 0
        assert len(one.store(first)) == 10
        assert one.hit(one.request(tokens, name)) == 10 * CHUNK
        assert other.hit(second) == (10 * CHUNK if shared else before)
        stored = other.store(second)
        assert len(stored) == (0 if shared else 10 - before // CHUNK)
        assert other.hit(other.request(tokens, name)) == 10 * CHUNK
    assert ("hit in this engine only" in caplog.text) != shared
