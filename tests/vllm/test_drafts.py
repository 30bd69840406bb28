"""A draft model whose KV is in the same blocks: on loaded KV as many of its tokens are accepted as
on computed KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import stores
from tests.vllm.conftest import Plain
from tests.vllm.engines import CHUNK, Engine, connector, options
from tests.vllm.inside import Answer, ObservedEngine
from tests.vllm.models import prompt

TOKENS = 24


@pytest.fixture(scope="module")
def drafting(
    llama: Path,
    session_shm: Path,
    tmp_path_factory: pytest.TempPathFactory,
    logs: Path,
) -> Iterator[Engine]:
    """An engine whose draft model is the model itself: while its KV is right, all that it drafts is
    accepted.
    """
    draft = {
        "method": "draft_model",
        "model": str(llama),
        "num_speculative_tokens": 2,
    }
    disk = tmp_path_factory.mktemp("drafts") / "disk"
    engine = Engine(
        "drafting",
        logs / "drafting.log",
        **options(
            llama, speculative_config=draft, kv_cache_memory_bytes=128 << 20
        ),
        **connector(session_shm / "drafts", disk),
    )
    yield engine
    engine.stop()


def test_drafts_are_accepted_on_loaded_kv_as_on_computed(
    drafting: Engine, plain: Plain, session_shm: Path
) -> None:
    one = prompt(1200, 9 * CHUNK + 7)
    (right,) = plain.says(one, max_tokens=TOKENS)
    computed, accepted = drafting.call(said, one, TOKENS)
    assert computed.external == 0
    assert computed.tokens == right
    assert accepted[0] == accepted[1] > TOKENS // 2
    stores.wait_ready(session_shm / "drafts", 9)
    drafting.reset()
    loaded, again = drafting.call(said, one, TOKENS)
    assert loaded.external == 9 * CHUNK
    assert loaded.tokens == right
    assert again == accepted
    # the draft's KV counts, and its loss changes no text
    drafting.reset()
    spoilt, fewer = drafting.call(said, one, TOKENS, zeros=True)
    assert spoilt.external == 9 * CHUNK
    assert spoilt.tokens == right
    assert fewer[1] < accepted[1]


def said(
    observed: ObservedEngine, one: list[int], tokens: int, zeros: bool = False
) -> tuple[Answer, tuple[int, int]]:
    """Generate; return how many tokens were drafted and accepted, too. `zeros`: the draft's KV is
    lost.
    """
    from pagoda.transfer.pages_kv import PagesKV

    counted = [0, 0]
    scheduler = observed.scheduler
    count = scheduler.make_spec_decoding_stats
    from_slots = PagesKV.from_slots

    def counts(
        stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        *args: Any,
        **how: Any,
    ) -> Any:
        counted[0] += num_draft_tokens
        counted[1] += num_accepted_tokens
        return count(stats, num_draft_tokens, num_accepted_tokens, *args, **how)

    def lost(self: PagesKV, starts: Any, slots: Any) -> None:
        from_slots(self, starts, slots)
        layers = observed.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        drafts = [
            layer.kv_cache
            for name, layer in layers.items()
            if name.startswith("draft_model.")
        ]
        assert drafts
        for kv in drafts:
            kv.zero_()

    scheduler.make_spec_decoding_stats = counts
    if zeros:
        PagesKV.from_slots = lost  # type: ignore[method-assign]
    try:
        (answer,) = observed.generate([one], max_tokens=tokens)
    finally:
        PagesKV.from_slots = from_slots  # type: ignore[method-assign]
        del scheduler.make_spec_decoding_stats
    return answer, (counted[0], counted[1])
