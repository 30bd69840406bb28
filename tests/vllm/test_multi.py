"""Prefill and decode engines with vLLM's NixlConnector beside ours, below a MultiConnector; NIXL
runs on CPUs, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testbed.servers import free_port
from tests.vllm import stores
from tests.vllm.conftest import Plain
from tests.vllm.engines import CHUNK, Engine, connector, loadable, options
from tests.vllm.inside import Answer, ObservedEngine
from tests.vllm.models import prompt

pytest.importorskip("nixl", reason="NIXL is not installed here: make setup-vllm")
TOKENS = 8


class Pair(NamedTuple):
    """A prefill and a decode engine, and our tier, which both have open."""

    prefill: Engine
    decode: Engine
    host: Path


def below_multi(role: str, *children: dict[str, Any]) -> dict[str, Any]:
    """Return the option of an engine with these connectors, which have its role unless they say
    another.
    """
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
    }
    return {
        "kv_transfer_config": given
        | {
            "kv_connector_extra_config": {
                "connectors": [{"kv_role": role} | child for child in children]
            }
        }
    }


def with_port(port: int) -> None:
    """Choose where the engine of this process waits for the other's handshake, and how NIXL moves
    bytes.
    """
    os.environ.update(
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(port),
    )
    os.environ.update(UCX_TLS="tcp,self,sm", NIXL_LOG_LEVEL="ERROR")


@pytest.fixture(scope="module")
def pair(
    llama: Path,
    logs: Path,
    session_shm: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Starts both, as docs/how-to/vllm.md says; ours is the first in one and the last in the
    other.
    """
    host = session_shm / "multi"
    files = tmp_path_factory.mktemp("multi")
    ours = connector(host)["kv_transfer_config"]
    nixl = {"kv_connector": "NixlConnector"}
    third = {
        "kv_connector": "FailingLoads",
        "kv_connector_module_path": "tests.vllm.failing_loads",
    }
    third |= {"kv_connector_extra_config": {"shared_storage_path": str(files)}}  # type: ignore[dict-item]
    setups = {
        "prefill": below_multi("kv_producer", ours, nixl, third),
        "decode": below_multi(
            "kv_consumer", nixl, ours | {"kv_role": "kv_consumer"}
        ),
    }
    engines = [
        Engine(
            name,
            logs / f"{name}.log",
            partial(with_port, port),
            **options(llama),
            **setup,
        )
        for port, (name, setup) in zip(
            (free_port(), free_port()), setups.items(), strict=True
        )
    ]
    prefill, decode = (engine.wait_up() for engine in engines)
    yield Pair(prefill, decode, host)
    for engine in engines:
        engine.stop()


def ask(
    observed: ObservedEngine,
    tokens: list[int],
    most: int,
    transfer: dict[str, Any] | None,
) -> tuple[Answer, Any]:
    """Ask an engine; return its answer, and what it has for the engine that goes on with the
    request.
    """
    from vllm import SamplingParams

    extra = {"kv_transfer_params": transfer} if transfer else None
    params = SamplingParams(
        temperature=0.0, max_tokens=most, ignore_eos=True, extra_args=extra
    )
    (output,) = observed.llm.generate(
        [{"prompt_token_ids": tokens}], params, use_tqdm=False
    )
    return observed._answer(output), output.kv_transfer_params


def test_the_first_request_of_an_engine_hits(pair: Pair, plain: Plain) -> None:
    """Below a MultiConnector the workers describe their memory in the first step, and the request
    waits for it.
    """
    one = prompt(9110, 6 * CHUNK + 3)
    (text,) = plain.says(one, max_tokens=TOKENS)
    pair.prefill.call(ask, one, 1, None)
    stores.wait_ready(pair.host, 6)
    answer, _ = pair.decode.call(ask, one, TOKENS, None)
    assert answer.tokens == text
    assert answer.external == loadable(len(one))


def test_a_prompt_goes_from_prefill_to_decode_and_is_kept(
    pair: Pair, plain: Plain
) -> None:
    one = prompt(9100, 11 * CHUNK - 4)
    (text,) = plain.says(one, max_tokens=TOKENS)
    before = stores.ready(pair.host)
    answer, transfer = pair.prefill.call(ask, one, 1, {"do_remote_decode": True})
    assert answer.local == 0
    assert answer.external == 0
    stores.wait_ready(pair.host, before + 10)
    answer, _ = pair.decode.call(ask, one, TOKENS, transfer)
    # by NIXL, to the last token
    assert answer.tokens == text
    assert answer.external == len(one)
    pair.decode.reset()
    answer, _ = pair.decode.call(ask, one, TOKENS, None)
    # by ours, which a producer had stored
    assert answer.tokens == text
    assert answer.external == loadable(len(one))
    assert stores.ready(pair.host) == before + 10  # a consumer stores nothing


def test_what_another_connector_failed_to_load_is_not_stored(
    pair: Pair, plain: Plain
) -> None:
    one = prompt(9120, 6 * CHUNK + 3)
    (text,) = plain.says(one, max_tokens=TOKENS)
    pair.prefill.call(ask, one, TOKENS, None)
    stores.clear(pair.host)
    pair.prefill.reset()
    answer, _ = pair.prefill.call(ask, one, TOKENS, None)
    assert answer.tokens == text
    stores.wait_ready(pair.host, 6)
    answer, _ = pair.decode.call(ask, one, TOKENS, None)
    assert answer.tokens == text
    assert answer.external == loadable(len(one))
