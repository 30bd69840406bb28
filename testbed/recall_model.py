"""A small model that must read across documents, trained on the spot on one CPU core, and its
prompts.

A prompt is several documents and a question. Most words of a document are filler; at random places
are others:

    definition   one token: "code c means value v"; a code is defined once in a prompt
    link         one token: "item i has code c"; an earlier document has defined c, or this one
                 before
    question     "which value has item i?"; the answer is the value of the code of the item: two
                 steps

The model looks up the value where the link is, and the question finds it there: the answer depends
on KV of the link that a document alone cannot have, because it does not contain the definition. So
plain reuse of documents must give wrong answers, and `across` says for which prompts.

Tests, benchmarks and the tables of the documentation use it. Training takes about a minute of one
core; the weights are kept in `build/`, which git ignores, under a name made of this file's content.
Needs torch and transformers.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

__all__ = ["RecallPrompt", "recall_model", "recall_prompts", "train"]

CODES = 16
VALUES = 16
ITEMS = 16
FILLER = 64
# the first token of a document; of a question
BEGIN = 0
ASK = 1
_VALUE = 2
_DEFINITION = _VALUE + VALUES
_LINK = _DEFINITION + CODES * VALUES
_ITEM = _LINK + ITEMS * CODES
_FILLER = _ITEM + ITEMS
VOCABULARY = _FILLER + FILLER

SEED = 20
BUILD = Path(__file__).resolve().parent.parent / "build"
# documents, tokens of each, prompts of a batch
_STAGES = ((3, 16, 32), (4, 32, 16), (6, 48, 8))
_WIDTH = 96
_HEADS = 4
_ROLL = 48
_MOST_STEPS = 1500
# a stage ends when so many answers of the last steps are right
_RECENT_STEPS = 30
_GOOD = 0.985


class RecallPrompt(NamedTuple):
    """Documents, a question about them, and the right answer: one token."""

    documents: list[list[int]]
    question: list[int]
    answer: int
    across: bool  # the link and the definition are in different documents

    @property
    def tokens(self) -> list[int]:
        """Everything in order, as one prompt."""
        return [
            token for part in (*self.documents, self.question) for token in part
        ]


class _Drawn(NamedTuple):
    """The documents of a prompt and all that can be asked about them."""

    documents: list[list[int]]
    links: list[tuple[int, int, bool]]  # item, value, across


def recall_prompts(
    seed: int, count: int, documents: int = 6, tokens: tuple[int, int] = (40, 56)
) -> list[RecallPrompt]:
    """Return `count` prompts; the same arguments give the same prompts, and training sees none of
    them. Pure.

    Args:
        seed: of everything that is drawn.
        count: how many.
        documents: in each prompt.
        tokens: fewest and most tokens of a document.
    """
    draw = np.random.default_rng([7, seed])
    found: list[RecallPrompt] = []
    while len(found) < count:
        drawn = _draw(draw, documents, tokens)
        if drawn.links:
            item, value, across = drawn.links[draw.integers(len(drawn.links))]
            found.append(
                RecallPrompt(
                    drawn.documents, [ASK, _ITEM + item], _VALUE + value, across
                )
            )
    return found


def _draw(
    draw: np.random.Generator, documents: int, tokens: tuple[int, int]
) -> _Drawn:
    """Draw documents, each with two definitions and two links at random places."""
    codes = list(draw.permutation(CODES))
    items = list(draw.permutation(ITEMS))
    defined: dict[int, tuple[int, int]] = {}  # code -> value, document
    made: list[list[int]] = []
    links: list[tuple[int, int, bool]] = []
    for number in range(documents):
        length = int(draw.integers(tokens[0], tokens[1] + 1))
        words = [
            BEGIN,
            *(
                int(word)
                for word in _FILLER + draw.integers(FILLER, size=length - 1)
            ),
        ]
        places = np.sort(draw.permutation(np.arange(1, length))[:4])
        is_link = draw.permutation([True, True, False, False])
        for place, link in zip(places, is_link, strict=True):
            if link and defined and items:
                code = list(defined)[int(draw.integers(len(defined)))]
                value, where = defined[code]
                item = int(items.pop())
                words[place] = _LINK + item * CODES + code
                links.append((item, value, where != number))
            elif codes:
                code = int(codes.pop())
                value = int(draw.integers(VALUES))
                defined[code] = (value, number)
                words[place] = _DEFINITION + code * VALUES + value
        made.append(words)
    return _Drawn(made, links)


def recall_model() -> LlamaForCausalLM:
    """Return the trained model, a LlamaForCausalLM; trains it if `build/` does not have it, one
    process at a time.
    """
    from transformers import LlamaForCausalLM

    name = f"recall-model-{blake3(Path(__file__).read_bytes()).hexdigest(8)}"
    kept = BUILD / name
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=BUILD) as unfinished:
                train().save_pretrained(unfinished + "/model")
                (Path(unfinished) / "model").rename(kept)
        return LlamaForCausalLM.from_pretrained(kept).eval()


def train(report: Callable[[str], None] | None = None) -> LlamaForCausalLM:
    """Train the model, from SEED, on one thread; `report` gets a line of progress now and then.

    Raises RuntimeError if it has not learned the task after 1500 steps.
    """
    import torch

    threads = torch.get_num_threads()
    began = time.process_time()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = _untrained()
            draw = np.random.default_rng([1, SEED])
            step = 0
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01
            )
            for documents, tokens, prompts in _STAGES:
                right: list[float] = []
                while (
                    len(right) < _RECENT_STEPS
                    or np.mean(right[-_RECENT_STEPS:]) < _GOOD
                ):
                    step += 1
                    if step > _MOST_STEPS:
                        raise RuntimeError(
                            f"the recall model has not learned its task in {_MOST_STEPS} steps"
                        )
                    for group in optimizer.param_groups:
                        group["lr"] = 2e-3 * min(1.0, step / 40)
                    loss, share = _loss(
                        model, _batch(draw, prompts, documents, tokens)
                    )
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    right.append(share)
                    if report is not None and step % 10 == 0:
                        seconds = time.process_time() - began
                        report(
                            f"step {step}, {seconds:.0f} s of CPU: {documents} documents of "
                            f"{tokens} tokens, "
                            f"loss {loss.item():.3f}, right {np.mean(right[-10:]):.3f}"
                        )
            return model.eval()
    finally:
        torch.set_num_threads(threads)


def _untrained() -> LlamaForCausalLM:
    """Return a Llama that begins near a solution, which saves most of the steps; all of its weights
    are trained.

    Embeddings begin as sums of what the token means. A meaning that is looked for, and the same
    meaning where it is found, differ by a roll of the dims; heads begin by comparing dims so, and
    by copying values. If they copied codes too, a question could find the definition itself, in two
    steps, and would not need the link's KV.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=4,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=8192,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    codes, values, items = (
        torch.randn(count, _WIDTH) * 0.3 for count in (CODES, VALUES, ITEMS)
    )
    basis = torch.linalg.qr(values.T).Q  # [width, values]
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.normal_(0.0, 0.05)
        table[_DEFINITION:_LINK] += (
            codes.roll(_ROLL, 1)[:, None] + values[None]
        ).flatten(0, 1)
        table[_LINK:_ITEM] += (
            items.roll(_ROLL, 1)[:, None] + codes[None]
        ).flatten(0, 1)
        table[_ITEM:_FILLER] += items
        model.lm_head.weight[_VALUE:_DEFINITION] += values
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight.normal_(0.0, 0.2)
            attention.k_proj.weight.copy_(attention.q_proj.weight.roll(_ROLL, 1))
            for head in attention.v_proj.weight.unflatten(0, (_HEADS, -1)):
                head[:VALUES] = basis.T
            for head in attention.o_proj.weight.unflatten(1, (_HEADS, -1)).unbind(
                1
            ):
                head[:, :VALUES] = basis / 2
    return model


def _batch(
    draw: np.random.Generator, prompts: int, documents: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, answers after questions, and the values of links at their places; -100 where
    there is none.
    """
    import torch

    rows = []
    answers = []
    resolved = []
    for _ in range(prompts):
        drawn = _draw(draw, documents, (tokens, tokens))
        flat = [token for words in drawn.documents for token in words]
        value_of = {item: value for item, value, _ in drawn.links}
        values = [
            _VALUE + value_of[(token - _LINK) // CODES]
            if _LINK <= token < _ITEM
            else -100
            for token in flat
        ]
        answer = [-100] * len(flat)
        for item, value, _ in drawn.links:
            flat += [ASK, _ITEM + item]
            answer += [-100, _VALUE + value]
        rows.append(flat)
        answers.append(answer)
        resolved.append(values)
    width = max(map(len, rows))
    filled = [(rows, BEGIN), (answers, -100), (resolved, -100)]
    tensors = [
        torch.tensor([row + [empty] * (width - len(row)) for row in all_])
        for all_, empty in filled
    ]
    return tensors[0], tensors[1], tensors[2]


def _loss(
    model: LlamaForCausalLM, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, float]:
    """Return the loss, and the share of right answers. Links learn their values after the first
    layer already.
    """
    from torch.nn.functional import cross_entropy

    tokens, answers, resolved = batch
    out = model.model(tokens, output_hidden_states=True, use_cache=False)
    asked = answers >= 0
    linked = resolved >= 0
    logits = model.lm_head(out.last_hidden_state[asked])
    early = model.lm_head(model.model.norm(out.hidden_states[1][linked]))
    right = (logits.argmax(-1) == answers[asked]).float().mean()
    return cross_entropy(logits, answers[asked]) + cross_entropy(
        early, resolved[linked]
    ), float(right)


if __name__ == "__main__":
    train(print)
