"""One machine: an engine with separate host and disk tiers above the store that all machines share.

It reads requests from stdin and writes answers to stdout, one JSON object per line. It ends at the
end of stdin.

    {"ask": [token ids], "new": 32}     what a client asks; `same`: whether an uncached run gives
                                        the same tokens
    {"look": [token ids]}               how many of these tokens are cached, and where; nothing is
                                        copied
    {"flush": seconds}                  wait until the lower tiers have what was queued for them
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pagoda import Config, Hit
from pagoda.connectors.transformers import CachedModel

VOCABULARY = 256  # bytes


def model() -> PreTrainedModel:
    """A small Llama of random weights, the same everywhere: its text is noise, but depends on all
    of the prompt.
    """
    torch.set_num_threads(1)  # so small that a second thread only waits
    torch.manual_seed(0)
    size = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "vocab_size": VOCABULARY,
    }
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    }
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(
        LlamaConfig(**size, **heads, **ends, initializer_range=0.08)
    ).eval()


class Engine:
    """Answers prompts greedily through the cache, and without it to compare."""

    def __init__(self, cached: CachedModel) -> None:
        self._cached = cached
        self._plain: dict[tuple[int, ...], list[int]] = {}
        # threads and buffers of torch are made on first use
        self._uncached([32] * 64, 2)

    def ask(self, tokens: list[int], new: int) -> dict[str, object]:
        """Return the numbers of one prompt. The uncached run comes after it, and is not included in
        its seconds.
        """
        began = time.perf_counter()
        ids = torch.tensor([tokens])
        out = self._cached.generate(ids, max_new_tokens=new, do_sample=False)
        seconds = time.perf_counter() - began
        found = self._cached.last
        answer = out[0, len(tokens) :].tolist()
        assert found is not None
        return {
            **plain(found.hit),
            "seconds": seconds,
            "load_seconds": found.seconds,
            "output": answer,
            "same": answer == self._uncached(tokens, new),
        }

    def look(self, tokens: list[int]) -> dict[str, object]:
        """Return the result of a look-up."""
        return plain(self._cached.cache.lookup(tokens[:-1], counted=False))

    def flush(self, seconds: float) -> dict[str, object]:
        """Return whether everything was written in time."""
        return {"flushed": self._cached.cache.flush(seconds)}

    def _uncached(self, tokens: list[int], new: int) -> list[int]:
        key = (*tokens, new)
        if key not in self._plain:
            out = self._cached.model.generate(
                torch.tensor([tokens]), max_new_tokens=new, do_sample=False
            )
            self._plain[key] = out[0, len(tokens) :].tolist()
        return self._plain[key]


def plain(hit: Hit) -> dict[str, object]:
    """Return a hit in plain types."""
    return {
        "by_tier": hit.by_tier,
        "reason": str(hit.reason or ""),
        "detail": hit.detail,
    }


def answers(engine: Engine, lines: Iterable[str]) -> Iterable[dict[str, object]]:
    """Yield one answer for each line, in order."""
    for line in lines:
        request = json.loads(line)
        if "ask" in request:
            yield engine.ask(request["ask"], request["new"])
        elif "look" in request:
            yield engine.look(request["look"])
        else:
            yield engine.flush(request["flush"])


def main() -> None:
    """Serve with the options of `Config` that are on the command line as JSON."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print too
    with CachedModel(model(), Config(**json.loads(sys.argv[1]))) as cached:
        engine = Engine(cached)
        print(json.dumps({"tiers": cached.cache.tiers}), file=out)
        for answer in answers(engine, sys.stdin):
            print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
