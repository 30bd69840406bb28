"""The options of the page of `pagoda serve`: functions that hash and explain prompts, the remote
tiers, the settings.

`serve` calls it. The functions are those of `pagoda explain` and `pagoda stats`, passed as
arguments because the server may not import the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagoda.keys import TokenIds
from pagoda.ledger import Ledger
from pagoda_tools.cli import UsageError
from pagoda_tools.cli.explain import in_words
from pagoda_tools.cli.prompt_explanation import (
    explanations,
    neighbours_of,
    prompt_of,
)
from pagoda_tools.cli.prompt_source import text_tokenizer
from pagoda_tools.cli.remote_stores import pinged, remotes_of
from pagoda_tools.cli.stats import remote_usage
from pagoda_tools.cli.stores import configured
from pagoda_tools.serve.operations import PromptTools
from pagoda_tools.serve.operator_routes import PageOptions
from pagoda_tools.serve.overview import RemoteUsage

_MOST_TEXT = 4 << 20
_MOST_NAMESPACES = 20  # in one answer
_SHOWN = ("tier", "num_tokens", "reason", "detail")


def page_options(
    directory: Path | None,
    config_file: Path | None,
    gpu_price: float | None,
    tokenizer: Path | None,
) -> PageOptions:
    """Return the options of the page. Raises UsageError for a tokenizer that cannot be used."""
    config = configured(config_file)
    tokenize = (
        None if tokenizer is None else _bounded(text_tokenizer(str(tokenizer)))
    )
    specs = remotes_of(directory, config_file)
    neighbours = neighbours_of(directory, config)

    def keys(
        tokens: TokenIds, stores: Sequence[Ledger]
    ) -> Mapping[bytes, Sequence[bytes]]:
        return prompt_of(tokens, stores, [], config).keys

    def explain(
        tokens: TokenIds, stores: Sequence[Ledger]
    ) -> Sequence[Mapping[str, object]]:
        there = [
            one
            for one, asked in zip(neighbours, pinged(neighbours), strict=True)
            if not asked.trouble
        ]
        prompt = prompt_of(tokens, stores, [*there, *specs], config)
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
            }
            for one in explanations(prompt, prompt.known)[:_MOST_NAMESPACES]
        ]

    def remotes() -> Sequence[RemoteUsage]:
        return [remote_usage(spec) for spec in specs]

    return PageOptions(
        prompts=PromptTools(keys, explain, tokenize),
        remotes=remotes,
        shared=[spec.redacted for spec in specs],
        settings=[
            ("Policy", config.policy),
            ("Write policy", config.write_policy),
        ],
        gpu_price=gpu_price,
    )


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
