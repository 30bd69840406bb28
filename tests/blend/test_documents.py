"""The cache of the documents of a model, opened over the configuration of its prompts. Without an
engine.
"""

from __future__ import annotations

import pytest

from pagoda import Cache, Config, KVLayout
from pagoda.blend import open_documents
from pagoda.layout import Rotary
from tests.cache.kit import CHUNK, NAMESPACE, blank, kv_of, prompt

LAYOUT = KVLayout.dense(
    layers=1, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=CHUNK
)


@pytest.mark.parametrize("version", ["", "run 7, step 1"])
@pytest.mark.parametrize("reported_to", ["prompts", "documents"])
def test_weights_that_changed_are_those_of_prompts_and_documents(
    reported_to: str, version: str
) -> None:
    """In private memory no file tells one cache of what was reported to the other."""
    tokens = prompt(2)
    config = Config(
        chunk_tokens=CHUNK, host_size="1MiB", host_shared=False, worth_it=False
    )
    with (
        Cache(config, namespace=NAMESPACE, layout=LAYOUT) as prompts,
        open_documents(prompts, Rotary(10_000.0, 8, "")) as documents,
    ):
        caches = {"prompts": prompts, "documents": documents}
        for cache in caches.values():
            cache.store(tokens, kv_of(tokens, cache.layout).transfer)
            assert cache.lookup(tokens).num_tokens == 2 * CHUNK
        caches[reported_to].weights_changed(version)
        for cache in caches.values():
            kv = blank(tokens, cache.layout)
            assert cache.retrieve(tokens, kv.transfer).num_tokens == 0
