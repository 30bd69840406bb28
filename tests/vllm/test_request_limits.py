"""What a request may load and store: prompts with embeddings, and requests that may not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pagoda.connectors.vllm.request_limits import (
    is_of_embeddings,
    named_tokens,
    reads_nothing,
)
from tests.vllm import halves as offloading
from tests.vllm.halves import FULL, SLIDING
from tests.vllm.models import prompt
from tests.vllm.test_review import BLOCK, CHUNK, Halves

TOKENS = 6 * CHUNK
ROWS = torch.arange(TOKENS * 4, dtype=torch.float32).reshape(TOKENS, 4)


@pytest.fixture
def plain(shm_root: Path) -> Iterator[Halves]:
    """Both halves of the connector for models of one kind of KV."""
    both = Halves(shm_root / "host")
    yield both
    both.close()


def mixed(tokens: list[int], embeddings: set[int]) -> dict[str, Any]:
    """A prompt with embeddings at these positions, as `Request` takes it."""
    return {
        "prompt_embeds": ROWS,
        "prompt_is_token_ids": [
            at not in embeddings for at in range(len(tokens))
        ],
    }


def ready(both: Halves) -> int:
    """Return how many chunks are stored."""
    gauges = both.cache.stats()["tiers"]["host"]
    return int(gauges["ready"])


def zero_at(at: int) -> list[int]:
    """A prompt with the real token 0 at one position."""
    tokens = prompt(1, TOKENS)
    tokens[at] = 0
    return tokens


@pytest.mark.parametrize(
    ("tokens", "embeddings", "named"),
    [
        (prompt(1, TOKENS), {40, 41}, 40),
        (prompt(1, TOKENS), {0}, 0),
        (zero_at(37), {40}, 37),  # token 0 and an embedding have the same hash
        (zero_at(37), set(), 37),
        (prompt(1, TOKENS), set(), None),
    ],
)
def test_hashes_name_what_is_before_the_first_embedding(
    tokens: list[int], embeddings: set[int], named: int | None
) -> None:
    request = Request(
        "r", tokens, SamplingParams(), None, **mixed(tokens, embeddings)
    )
    assert named_tokens(request) == named
    assert not is_of_embeddings(request)
    assert reads_nothing(request) == (named == 0)


def test_the_hash_does_not_distinguish_an_embedding_from_token_0() -> None:
    """If this fails, vLLM's hashes have become better, and mixed prompts could be cached whole."""
    init_none_hash(sha256)
    tokens = zero_at(37)
    hashes = []
    for embeddings in (set[int](), {37}):
        hasher = get_request_block_hasher(BLOCK, sha256)
        more = mixed(tokens, embeddings)
        hashes.append(
            Request(
                "r", tokens, SamplingParams(), None, block_hasher=hasher, **more
            ).block_hashes
        )
    assert hashes[0] == hashes[1]


def test_a_mixed_prompt_is_cached_up_to_its_first_embedding(
    plain: Halves,
) -> None:
    """Then a prompt with the same hashes, whose KV differs from there on, gets nothing of it."""
    tokens = zero_at(2 * CHUNK + 5)
    more = mixed(tokens, {2 * CHUNK + 5})
    plain.stored(tokens, "stores", list(range(TOKENS // BLOCK)), **more)
    assert ready(plain) == 2
    for embeddings in ({2 * CHUNK + 5}, set[int]()):
        request = plain.request(
            tokens, f"reads {embeddings}", **mixed(tokens, embeddings)
        )
        assert plain.asked(request) == 2 * CHUNK
    other = plain.request(prompt(1, TOKENS), "text")
    assert plain.asked(other) == 0  # its hashes have no rows


def test_what_an_earlier_release_stored_of_a_mixed_prompt_is_not_loaded(
    plain: Halves,
) -> None:
    tokens = prompt(1, TOKENS)
    more = mixed(tokens, {2 * CHUNK + 5})
    as_it_was = plain.request(tokens, "stores", **more)
    plain.scheduler._tracked["stores"].most_named = None
    assert plain.asked(as_it_was) == 0
    plain.saved(plain.step(list(range(TOKENS // BLOCK)), stores=TOKENS))
    assert ready(plain) == 6
    # whole blocks
    assert (
        plain.asked(plain.request(tokens, "reads", **more)) == 2 * CHUNK + BLOCK
    )


def test_a_prompt_of_embeddings_alone_is_cached(plain: Halves) -> None:
    """But not what was computed from the engine's own cache, which may have the KV of tokens under
    its hashes.
    """
    rows: dict[str, Any] = {"prompt_embeds": ROWS}
    doubtful = plain.request(None, "doubtful", **rows)  # type: ignore[arg-type]
    assert plain.asked(doubtful, local=2 * CHUNK) == 0
    table = list(range(TOKENS // BLOCK))
    assert not plain.step(table, doubtful=TOKENS - 2 * CHUNK).saves
    computed = plain.request(None, "computed", **rows)  # type: ignore[arg-type]
    assert plain.asked(computed) == 0
    plain.saved(plain.step(table, computed=TOKENS))
    assert plain.asked(plain.request(None, "reads", **rows)) == TOKENS - BLOCK  # type: ignore[arg-type]


def test_a_hybrid_model_caches_up_to_the_first_embedding(
    tmp_path: Path, shm_root: Path
) -> None:
    size = offloading.CHUNK
    both = offloading.Halves(offloading.config_of(shm_root / "host"))
    try:
        wanted = [
            key
            for group in (FULL, SLIDING)
            for key in offloading.keys("p", group, 4)
        ]
        blocks = {FULL: list(range(1, 9)), SLIDING: list(range(9, 17))}
        context = both.request("stores", "p", 4)
        request = offloading.vllm_request("stores", "p", 4)
        tokens = [7] * (4 * size)
        request.prompt_embeds = ROWS
        request.prompt_token_ids = tokens
        request.prompt_is_token_ids = [at < 2 * size for at in range(4 * size)]
        both.manager.request_arrived(request)
        assert both.store(context, wanted, blocks) == [*wanted[:2], *wanted[4:6]]
        reads = both.request("reads", "p", 4)
        assert both.hit(reads, "p", 4) == 2
        request.request_id = "reads"
        request.prompt_is_token_ids = [at < size for at in range(4 * size)]
        both.manager.request_arrived(request)
        assert both.hit(reads, "p", 4) == 1

        alone = both.request("alone", "q", 4)
        other = offloading.vllm_request("alone", "q", 4)
        other.prompt_embeds = ROWS
        both.manager.request_arrived(other)
        both.manager.found_in_engine(other)
        assert both.store(alone, offloading.keys("q", FULL, 4), blocks) == []
    finally:
        both.close()


UNASKED: dict[str, Any] = {
    "prompt_logprobs": {"sampling_params": SamplingParams(prompt_logprobs=1)},
    "skip_reading_prefix_cache": {
        "sampling_params": SamplingParams(skip_reading_prefix_cache=True)
    },
    "max_load_tokens": {
        "sampling_params": SamplingParams(
            extra_args={"kv_transfer_params": {"max_load_tokens": 0}}
        )
    },
    "embeddings": {
        "sampling_params": SamplingParams(),
        **mixed(prompt(1, TOKENS), {0}),
    },
}


@pytest.mark.parametrize("why", UNASKED)
def test_a_request_that_may_not_read_is_no_miss(plain: Halves, why: str) -> None:
    """It is counted by a reason of its own, and is in no rate."""
    tokens = prompt(1, TOKENS)
    table = list(range(TOKENS // BLOCK))
    more = dict(UNASKED[why])
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(
        "r",
        tokens,
        more.pop("sampling_params"),
        None,
        block_hasher=hasher,
        **more,
    )
    plain.scheduler.new_request(request)
    assert plain.asked(request) == 0
    plain.scheduler.allocated(request, SimpleNamespace(), 0)
    plain.saved(plain.step(table, r=TOKENS))
    stats = plain.cache.stats()
    assert stats["misses"] == {"not_asked": 1}
    assert stats["counters"]["lookups"] == 0
    assert stats["counters"]["asked_tokens"] == 0
    counted = plain.scheduler.stats.take()
    assert counted is None or "lookups" not in counted.data


def test_a_request_with_a_limit_asks_for_no_more(plain: Halves) -> None:
    tokens = prompt(1, TOKENS)
    table = list(range(TOKENS // BLOCK))
    plain.stored(tokens, "stores", table)
    params = SamplingParams(
        extra_args={"kv_transfer_params": {"max_load_tokens": 2 * CHUNK}}
    )
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("r", tokens, params, None, block_hasher=hasher)
    plain.scheduler.new_request(request)
    assert plain.asked(request) == 2 * CHUNK
    blocks = SimpleNamespace(get_block_ids=lambda: (table,))
    plain.scheduler.allocated(request, blocks, 2 * CHUNK)
    counters = plain.cache.stats()["counters"]
    assert counters["asked_tokens"] == 2 * CHUNK
    assert counters["hit_tokens"] == 2 * CHUNK


def test_what_a_producer_computes_is_no_miss(shm_root: Path) -> None:
    both = Halves(shm_root / "host", role="kv_producer")
    try:
        request = both.request(prompt(1, TOKENS), "r")
        assert both.asked(request) == 0
        both.scheduler.allocated(request, SimpleNamespace(), 0)
        assert both.cache.stats()["misses"] == {"not_asked": 1}
    finally:
        both.close()


def test_a_hybrid_request_that_may_not_read_is_counted(shm_root: Path) -> None:
    """vLLM asks for none of its chunks."""
    both = offloading.Halves(offloading.config_of(shm_root / "host"))
    try:
        request = offloading.vllm_request("r", "p", 4)
        request.skip_reading_prefix_cache = True
        both.manager.request_arrived(request)
        assert both.manager._cache.stats()["misses"] == {"not_asked": 1}
    finally:
        both.close()
