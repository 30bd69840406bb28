"""Each approach on each prompt, compared with exact KV. Calls the model; called by `run`.

The model first answers with exact KV, greedily. Then, for each approach, the same tokens are fed to
it over the KV of the approach, and the distributions over the next token are compared at each of
them. From the first token that would differ, the model continues its own answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple, cast

import torch

from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda_tools.quality.approaches import Approach, KVCache, Prepared
from pagoda_tools.quality.prompt_lines import QualityPrompt, Tokenizer

# used instead of a number that is not finite; no setting passes with it
_HUGE_KL = 1e3


class QualitySample(NamedTuple):
    """One approach on one prompt."""

    tokens: int  # of the exact answer
    # KL divergence from the exact distribution, summed over the tokens, in nats
    kl: float
    same_tokens: int  # tokens whose most likely successor is the same
    same_text: bool  # the greedy answer is the same
    # the answer begins with the expected one; False if none was expected
    right: bool
    seconds: float  # seconds to the first token
    stored_bytes: int
    exact_bytes: int


class _Exact(NamedTuple):
    """The answer with exact KV."""

    answer: list[int]
    logprobs: torch.Tensor  # [tokens of the answer, vocabulary]
    kv: KVCache  # KV of all tokens of the prompt but the last
    sample: QualitySample


def measured(
    model: torch.nn.Module,
    prompts: Sequence[QualityPrompt],
    approaches: Sequence[Approach],
    *,
    tokenizer: Tokenizer | None = None,
    new_tokens: int = 16,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, list[QualitySample]]:
    """Return the samples of each approach by its name, and of "exact", in the order of the prompts.

    Changes nothing but the stores of approaches. The first prompt is run twice, so that setup at
    the first use is not timed.

    Args:
        model: a causal model of Transformers.
        prompts: at least one.
        approaches: the approaches to compare with exact KV.
        tokenizer: needed if an expected answer is text.
        new_tokens: the most tokens of an answer for a prompt without an expected answer.
        step: called before each approach on each prompt, with its name.
    """
    runner = _Runner(model, tokenizer, new_tokens)
    found: dict[str, list[QualitySample]] = {
        name: [] for name in ("exact", *(one.name for one in approaches))
    }
    with _evaluating(model):
        for number, prompt in enumerate([prompts[0], *prompts]):
            step("exact")
            exact = runner.exact(prompt)
            samples = {"exact": exact.sample}
            for approach in approaches:
                step(approach.name)
                samples[approach.name] = runner.sample(
                    prompt, exact, approach.prepare(prompt, exact.kv)
                )
            if number:
                for name, sample in samples.items():
                    found[name].append(sample)
    return found


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, and the mode of the model back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class _Runner:
    """Runs one model. Not thread-safe."""

    def __init__(
        self, model: torch.nn.Module, tokenizer: Tokenizer | None, new_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_tokens = new_tokens
        self._device = next(model.parameters()).device
        self._ends = _end_tokens(model)

    def exact(self, prompt: QualityPrompt) -> _Exact:
        """Answer with exact KV."""
        began = time.perf_counter()
        kv: KVCache = import_module("transformers").DynamicCache(
            config=self._model.config
        )
        logits = self._forward(prompt.tokens, kv)
        answer = [int(logits[-1].argmax())]  # this waits for the device
        seconds = time.perf_counter() - began
        tokens = len(prompt.tokens)
        self._write_on(answer, kv, self._most(prompt))
        _cut(kv, tokens)
        logprobs = self._answered(logits, answer, kv)
        _cut(kv, tokens - 1)
        right = self._is_right(prompt, answer)
        sample = QualitySample(
            len(answer), 0.0, len(answer), True, right, seconds, 1, 1
        )
        return _Exact(answer, logprobs, kv, sample)

    def sample(
        self, prompt: QualityPrompt, exact: _Exact, prepared: Prepared
    ) -> QualitySample:
        """Answer over the KV of an approach."""
        began = time.perf_counter()
        kv = prepared.fill()
        logits = self._forward(prompt.tokens[kv.get_seq_length() :], kv)
        int(logits[-1].argmax())  # this waits for the device
        seconds = time.perf_counter() - began
        logprobs = self._answered(logits, exact.answer, kv)
        chosen: list[int] = logprobs.argmax(-1).tolist()
        same = (logprobs.argmax(-1) == exact.logprobs.argmax(-1)).sum()
        same_text = chosen == exact.answer
        right = exact.sample.right
        if not same_text and prompt.expected is not None:
            place = next(
                n for n, token in enumerate(chosen) if token != exact.answer[n]
            )
            _cut(kv, len(prompt.tokens) + place)
            answer = [*exact.answer[:place], chosen[place]]
            self._write_on(answer, kv, self._most(prompt))
            right = self._is_right(prompt, answer)
        return QualitySample(
            len(chosen),
            _kl(exact.logprobs, logprobs),
            int(same),
            same_text,
            right,
            seconds,
            prepared.stored_bytes,
            prepared.exact_bytes,
        )

    def _forward(
        self, tokens: Sequence[int], kv: KVCache, *, all_logits: bool = False
    ) -> torch.Tensor:
        """Return logits of the last token, or of all, [tokens, vocabulary]; adds to `kv`."""
        ids = torch.tensor([list(tokens)], device=self._device)
        last = (
            not all_logits
            and getattr(self._model, "_supports_logits_to_keep", bool)()
        )
        keep = {"logits_to_keep": 1} if last else {}
        out = self._model(
            input_ids=ids, use_cache=True, **kv_argument(self._model, kv), **keep
        )
        return cast(
            "torch.Tensor", out.logits[0] if all_logits else out.logits[0, -1:]
        )

    def _answered(
        self, first: torch.Tensor, answer: Sequence[int], kv: KVCache
    ) -> torch.Tensor:
        """Return log-probabilities at each token of the answer; `first`: the logits after the
        prompt.
        """
        rows = [first]
        if len(answer) > 1:
            rows.append(self._forward(answer[:-1], kv, all_logits=True))
        return torch.cat(rows).float().log_softmax(-1)

    def _write_on(self, answer: list[int], kv: KVCache, most: int) -> None:
        """Append greedy tokens to an answer whose last token is not in `kv` yet."""
        while len(answer) < most and answer[-1] not in self._ends:
            answer.append(int(self._forward(answer[-1:], kv)[-1].argmax()))

    def _most(self, prompt: QualityPrompt) -> int:
        return (
            self._new_tokens
            if prompt.expected is None
            else prompt.expected.new_tokens
        )

    def _is_right(self, prompt: QualityPrompt, answer: list[int]) -> bool:
        expected = prompt.expected
        if expected is None:
            return False
        if expected.ids:
            return answer[: len(expected.ids)] == expected.ids
        if self._tokenizer is None:
            raise ValueError("an expected answer is text: a tokenizer is needed")
        return (
            self._tokenizer.decode(answer, skip_special_tokens=True)
            .strip()
            .startswith(expected.text)
        )


def _cut(kv: KVCache, tokens: int) -> None:
    """Keep only the first `tokens` tokens."""
    for layer in kv.layers:
        layer.keys = layer.keys[:, :, :tokens]
        layer.values = layer.values[:, :, :tokens]


def _kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Return the KL divergence of `other` from `exact`, summed over tokens, in nats."""
    found = float((exact.exp() * (exact - other)).double().sum())
    return (
        min(max(found, 0.0), _HUGE_KL * len(exact))
        if found == found
        else _HUGE_KL * len(exact)
    )


def _end_tokens(model: torch.nn.Module) -> frozenset[int]:
    """Return the tokens that end an answer."""
    found = getattr(
        getattr(model, "generation_config", None), "eos_token_id", None
    )
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
