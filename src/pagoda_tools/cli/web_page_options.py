"""The options of the page of `pagoda serve`: functions that hash and explain prompts, the remote
tiers, the settings.

`serve` calls it. The functions are those of `pagoda explain` and `pagoda stats`, passed as
arguments because the server may not import the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagoda.keys import Int32s, TokenIds
from pagoda.ledger import Ledger
from pagoda_tools.cli import UsageError
from pagoda_tools.cli.explain import in_words
from pagoda_tools.cli.nearest_prompt import NearestPrompt
from pagoda_tools.cli.prompt_explanation import (
    explanations,
    neighbours_of,
    prompt_of,
)
from pagoda_tools.cli.prompt_source import TextTokenizer, text_tokenizer
from pagoda_tools.cli.remote_stores import pinged, remotes_of
from pagoda_tools.cli.stats import remote_usage
from pagoda_tools.cli.stores import configured
from pagoda_tools.serve.operations import PromptTools
from pagoda_tools.serve.operator_routes import PageOptions
from pagoda_tools.serve.overview import RemoteUsage

_MOST_TEXT = 4 << 20
_MOST_NAMESPACES = 20  # in one answer
_TOKENS_BEFORE = 12  # whose text is shown before the token that differs
_SHOWN = ("tier", "num_tokens", "reason", "detail")


def page_options(
    directory: Path | None,
    config_file: Path | None,
    gpu_price: float | None,
    tokenizer: Path | None,
) -> PageOptions:
    """Return the options of the page. Raises UsageError for a tokenizer that cannot be used."""
    config = configured(config_file)
    loaded = None if tokenizer is None else text_tokenizer(str(tokenizer))
    specs = remotes_of(directory, config_file)
    neighbours = neighbours_of(directory, config)

    def keys(
        tokens: TokenIds, stores: Sequence[Ledger]
    ) -> Mapping[bytes, Sequence[bytes]]:
        return prompt_of(tokens, stores, [], config).keys

    def explain(
        tokens: TokenIds, stores: Sequence[Ledger], namespace: bytes | None
    ) -> Sequence[Mapping[str, object]]:
        there = [
            one
            for one, asked in zip(neighbours, pinged(neighbours), strict=True)
            if not asked.trouble
        ]
        prompt = prompt_of(tokens, stores, [*there, *specs], config)
        roots = [root for root in prompt.known if namespace in (None, root)]
        return [
            {
                "namespace": one.namespace.hex(),
                "model": one.answers[-1].model,
                "lines": in_words(one),
                "answers": [
                    {
                        name: value
                        for name, value in answer._asdict().items()
                        if name in _SHOWN
                    }
                    for answer in one.answers
                ],
                "texts": None
                if loaded is None or one.nearest is None
                else _texts(loaded, prompt.tokens, one.nearest),
            }
            for one in explanations(prompt, roots)[:_MOST_NAMESPACES]
        ]

    def remotes() -> Sequence[RemoteUsage]:
        return [remote_usage(spec) for spec in specs]

    return PageOptions(
        prompts=PromptTools(
            keys, explain, None if loaded is None else _bounded(loaded.ids)
        ),
        remotes=remotes,
        shared=[spec.redacted for spec in specs],
        settings=[
            ("Policy", config.policy),
            ("Objective", config.objective),
            ("Write policy", config.write_policy),
        ],
        gpu_price=gpu_price,
    )


def _texts(
    tokenizer: TextTokenizer, tokens: Int32s, near: NearestPrompt
) -> Mapping[str, str | None] | None:
    """Return the text of the token in which a prompt differs from the nearest stored one, and of
    those before it; None if the tokenizer has none: it may be another model's.

    A text of None: the prompt ends there.
    """
    if near.token_id is None and near.stored_id is None:
        return None
    same = near.same_tokens
    shown = tokens[max(0, same - _TOKENS_BEFORE) : same].tolist()
    try:
        before = tokenizer.text(shown)

        def of(token: int | None) -> str | None:
            if token is None:
                return None
            # with those before it, because a token alone may lose its space
            whole = tokenizer.text([*shown, token])
            if whole.startswith(before):
                return whole[len(before) :]
            return tokenizer.text([token])

        return {
            "before": before,
            "here": of(near.token_id),
            "stored": of(near.stored_id),
        }
    except UsageError:
        return None


def _bounded(
    cut: Callable[[str], Sequence[int]],
) -> Callable[[str], Sequence[int]]:
    """Return a tokenizer for texts of at most 4 Mi characters. It raises ValueError."""

    def ids(text: str) -> Sequence[int]:
        if len(text) > _MOST_TEXT:
            raise ValueError(
                f"the text has {len(text):,} characters: at most {_MOST_TEXT:,}"
            )
        try:
            return cut(text)
        except UsageError as trouble:
            raise ValueError(str(trouble)) from None

    return ids
