"""A model with linear attention (gated delta rule) in a real engine: every log probability is the
same, bit by bit.

"The same tokens" would be no proof here: another prompt of a tiny model with a state gives nearly
the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.servers import free_port
from tests.vllm import hybrid, stores
from tests.vllm.engines import Engine, connector, options
from tests.vllm.models import prompt
from tests.vllm.routers import Indexer, events_at, notes_in

TOKENS = 12


class Linear:
    """One engine's process, and the log probabilities that it computed of each prompt before
    anything was stored.

    vLLM makes the blocks of attention as large as a state, which differs with its release and the
    processor.
    """

    def __init__(self, engine: Engine, ours: dict[str, Any]) -> None:
        self.engine = engine
        self.ours = ours
        extra = ours["kv_transfer_config"]["kv_connector_extra_config"]
        self.host = Path(extra["host_path"])
        self.disk = Path(extra["disk_path"])
        self.chunk = chunk = engine.call(hybrid.block_tokens)
        lengths = 1100, 7 * chunk, 3 * chunk + 1, chunk - 1
        self.prompts = [
            prompt(90 + number, length) for number, length in enumerate(lengths)
        ]
        self.right = self.generate()
        assert [answer.external for answer, _ in self.right] == [0] * len(
            self.prompts
        )

    def generate(self, spoilt: str = "") -> Any:
        """Return the answer and the log probabilities of each prompt, asked alone."""
        return self.engine.call(hybrid.logprobs, self.prompts, TOKENS, spoilt)

    def hits(self, spoilt: str = "") -> list[int]:
        """Ask again, assert that every bit is the same, and return how many tokens of each prompt
        were loaded.
        """
        found = self.generate(spoilt)
        for (_, now), (_, then) in zip(found, self.right, strict=True):
            assert np.array_equal(now, then)
        return [answer.external for answer, _ in found]

    def wanted(self) -> list[int]:
        """How many tokens of each prompt can be loaded: whole chunks, and one token is left to
        compute.
        """
        return [
            (len(each) - 1) // self.chunk * self.chunk for each in self.prompts
        ]


@pytest.fixture(scope="module")
def linear(
    tmp_path_factory: pytest.TempPathFactory, session_shm: Path, logs: Path
) -> Iterator[Linear]:
    """The engine with the connector; it has computed and stored every prompt."""
    model = hybrid.make_qwen_next(tmp_path_factory.mktemp("models") / "qwen")
    plain = options(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        num_gpu_blocks_override=240,
        max_logprobs=-1,
    )
    plain |= {"enable_prefix_caching": True}
    disk = tmp_path_factory.mktemp("linear") / "disk"
    ours = (
        plain | connector(session_shm / "linear", disk) | events_at(free_port())
    )
    del ours["kv_transfer_config"]["kv_connector_extra_config"]["chunk_tokens"]
    engine = Engine("linear", logs / "linear.log", **ours)
    yield Linear(engine, ours)
    engine.stop()


def test_the_model_has_states_beside_attention(linear: Linear) -> None:
    assert set(linear.engine.call(hybrid.groups)) == {
        "MambaSpec",
        "FullAttentionSpec",
    }
    assert len({answer.tokens for answer, _ in linear.right}) == len(
        linear.prompts
    )


def test_the_same_from_host_memory(linear: Linear) -> None:
    assert linear.hits() == linear.wanted()


def test_the_same_if_loads_fail(linear: Linear) -> None:
    linear.hits("fail")


def test_these_tests_can_fail(linear: Linear) -> None:
    """Were other bytes loaded than those stored, other numbers would come out."""
    for (answer, now), (_, then) in zip(
        linear.generate("zeros"), linear.right, strict=True
    ):
        assert np.array_equal(now, then) is (answer.external == 0)


def test_the_same_after_a_restart_from_the_disk_through_a_host_tier_that_evicts(
    linear: Linear, served: Callable[..., Any]
) -> None:
    """A router that starts then credits the engine with what it hits: the chunks of attention."""
    stores.wait_until(
        lambda: stores.keys(linear.disk) >= stores.keys(linear.host),
        "all chunks on the disk",
    )
    (store,), port = stores.stores(linear.disk), free_port()
    stores.wait_until(
        lambda: notes_in(store) == len(stores.keys(linear.disk)),
        "a note beside each chunk",
    )
    extra = linear.ours["kv_transfer_config"]["kv_connector_extra_config"]
    small = linear.ours["kv_transfer_config"] | {
        "kv_connector_extra_config": extra
        | {"host_size": "2MiB", "host_path": f"{linear.host}-small"}
    }
    small_ours = linear.ours | {"kv_transfer_config": small} | events_at(port)
    linear.engine.call(hybrid.restart, small_ours, within=120.0)
    shutil.rmtree(linear.host)
    indexer = served(Indexer, {1: port}, linear.chunk)
    indexer.wait(1, linear.prompts[0], cpu=0, disk=linear.wanted()[0])
    for _ in range(2):
        hits = linear.hits()
        assert hits[0] == linear.wanted()[0]
    assert sum(hits) > len(linear.prompts[0])


def test_the_same_if_chunks_are_cleared_once_they_are_promised(
    linear: Linear,
) -> None:
    assert max(linear.hits("clear")) == 0


def test_a_limit_on_what_is_stored_of_a_request_ends_no_engine(
    tmp_path: Path, session_shm: Path, logs: Path
) -> None:
    """vLLM also keeps states within a block, and asserts that they are within the limit."""
    given = options(
        hybrid.make_qwen_next(tmp_path / "qwen"),
        dtype="bfloat16",
        max_model_len=2048,
    )
    given |= connector(session_shm / "limits") | {
        "enable_prefix_caching": True,
        "prefix_match_unit": 32,
    }
    given |= {"num_gpu_blocks_override": 240}
    del given["kv_transfer_config"]["kv_connector_extra_config"]["chunk_tokens"]
    engine = Engine("limits", logs / "limits.log", **given)
    try:
        chunk = engine.call(hybrid.block_tokens)
        for seed, limit in enumerate((10, 0)):
            limited = prompt(960 + seed, 2 * chunk + 77)
            for _ in range(2):
                (answer,) = engine.generate(
                    limited, transfer={"max_offload_tokens": limit}
                )
                assert answer.external == 0
                engine.reset()
        whole = prompt(962, 2 * chunk + 77)

        def hits() -> bool:
            engine.reset()
            (answer,) = engine.generate(whole)
            return answer.external >= 2 * chunk

        stores.wait_until(hits, "a hit of what has no limit")
    finally:
        engine.stop()
