"""A whole SGLang engine in a process of its own: `python -m tests.sglang.whole_engine PLAN`, with
the fields of `Plan`.

Prints one JSON object for each prompt: the tokens of the answer, how many tokens were cached and
from where.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

from testbed import sglang_parts

# also in the processes that SGLang starts, which import this module again
sglang_parts.prepare()


class Plan(NamedTuple):
    """What to do."""

    model: str
    extra: dict[str, Any] | None = None  # None: without HiCache
    prompts: int = 4
    # a directory with other weights, which replace those in memory before the first prompt
    updated: str = ""
    zeroed: bool = False  # what is loaded is overwritten with zeros: a control


def prompt(number: int) -> list[int]:
    """Return the token ids of one prompt; no two have a common beginning."""
    return [5 + (number * 7919 + i * i) % 900 for i in range(160 + number * 48)]


def main() -> None:
    """Answer the prompts of the plan."""
    from sglang.srt.entrypoints.engine import Engine

    plan = Plan(**json.loads(sys.argv[1]))
    hicache: dict[str, Any] = {}
    if plan.extra is not None:
        extra = (
            {**plan.extra, "class_name": "Zeroing", "module_path": __spec__.name}
            if plan.zeroed
            else plan.extra
        )
        hicache = {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }
    engine = Engine(
        model_path=plan.model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        max_total_tokens=4096,
        page_size=16,
        mem_fraction_static=0.5,
        log_level="warning",
        **hicache,
    )
    if plan.updated:
        done, why, *_ = engine.update_weights_from_disk(plan.updated)
        assert done, why
    for number in range(plan.prompts):
        answer = engine.generate(
            input_ids=prompt(number),
            sampling_params={"temperature": 0, "max_new_tokens": 24},
            return_logprob=True,
        )
        meta = answer["meta_info"]
        found = {
            "tokens": answer["output_ids"],
            "logprobs": [row[0] for row in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"],
            "stored": (meta.get("cached_tokens_details") or {}).get("storage", 0),
        }
        print(json.dumps(found), flush=True)
    time.sleep(2)  # the last pages are on their way to the storage
    engine.shutdown()
    print(json.dumps({"ended": True}), flush=True)


def __getattr__(name: str) -> Any:
    """Make the class of the control when SGLang asks for it."""
    if name != "Zeroing":
        raise AttributeError(name)
    from pagoda.connectors.sglang import PagodaHiCache

    class Zeroing(PagodaHiCache):
        """Loads zeros."""

        def batch_get_v1(
            self, keys: Any, host_indices: Any, extra_info: Any = None
        ) -> list[bool]:
            """Do as PagodaHiCache, and overwrite everything."""
            answer: list[bool] = super().batch_get_v1(
                keys, host_indices, extra_info
            )
            self.mem_pool_host.kv_buffer.zero_()
            return answer

    return Zeroing


if __name__ == "__main__":
    main()
