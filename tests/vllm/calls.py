"""Models that end answers in a tool call, as far as their tokenizer says, and answers that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.vllm import models
from tests.vllm.inside import ObservedEngine

# a token of the model that its tokenizer names so, and one that it does not
MARK, WORD = 999, 500
_NAME = "</tool_call>"


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer of all models here, but for the name of the mark."""
    vocabulary = {f"t{number}": number for number in range(models.VOCABULARY)}
    del vocabulary[f"t{MARK}"]
    vocabulary[_NAME] = MARK
    words = Tokenizer(WordLevel(vocabulary, unk_token=f"t{models.UNKNOWN}"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_tokens([AddedToken(_NAME, normalized=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=f"t{models.UNKNOWN}",
        eos_token=f"t{models.EOS}",
        bos_token=f"t{models.BOS}",
        pad_token=f"t{models.UNKNOWN}",
    ).save_pretrained(directory)


def answer(
    observed: ObservedEngine, tokens: list[int], word: int, stops: bool
) -> list[int]:
    """Return an answer of this word, with the end that models write, or up to a limit."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        min_tokens=3,
        max_tokens=4 if stops else 3,
        allowed_token_ids=[word, models.EOS],
        logit_bias={models.EOS: 100.0},
        detokenize=False,
    )
    (output,) = observed.llm.generate(
        [{"prompt_token_ids": tokens}], params, use_tqdm=False
    )
    return list(output.outputs[0].token_ids)


def told(observed: ObservedEngine) -> tuple[dict[str, Any], list[int]]:
    """Return what became of hints, and the endings that are known of chunks."""
    connector = observed.scheduler.connector
    half = getattr(connector, "_scheduling", None)
    cache = (half or connector._manager)._cache
    hints = cache.stats().get("hints", {})
    contexts = cache.slots._ledger.columns.contexts
    if contexts is None:
        return hints, []
    known = contexts.of_slots[contexts.marks > 0] >> 4 & 7
    return hints, sorted(known[known > 0].tolist())
