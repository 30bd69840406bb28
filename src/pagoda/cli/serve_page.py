"""What `pagoda serve` tells its page: how prompts are hashed and explained, the remote tiers, the set-up.

`serve` calls it. The functions are those of `pagoda explain` and `pagoda stats`, handed down because the server may not
import the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.cli import UsageError
from pagoda.cli.remote_stores import remotes_of
from pagoda.cli.stats import RemoteUsage, remote_usage
from pagoda.cli.stores import configured

if TYPE_CHECKING:
    from pagoda.cli.prompt_coverage import PromptExplanation
    from pagoda.keys import TokenIds
    from pagoda.ledger import Ledger
    from pagoda.serve.operator_routes import PageOptions

_MOST_TEXT = 4 << 20


def page_options(
    directory: Path | None, config_file: Path | None, gpu_price: float | None, tokenizer: Path | None
) -> PageOptions:
    """Return the options of the page. Raises UsageError for a tokenizer that cannot be used."""
    from pagoda.cli.prompt_coverage import explanation, prompt_of
    from pagoda.serve.operations import PromptTools
    from pagoda.serve.operator_routes import PageOptions

    config = configured(config_file)
    specs = remotes_of(directory, config_file)

    def keys(tokens: TokenIds, stores: Sequence[Ledger]) -> Mapping[bytes, Sequence[bytes]]:
        return prompt_of(tokens, stores, [], config).keys

    def explain(tokens: TokenIds, stores: Sequence[Ledger]) -> Sequence[Mapping[str, object]]:
        prompt = prompt_of(tokens, stores, specs, config)
        found = sorted(
            (explanation(prompt, root) for root in prompt.known), key=lambda one: -one.answers[-1].num_tokens
        )
        return [row for one in found for row in _rows(one)]

    def remotes() -> Sequence[RemoteUsage]:
        return [remote_usage(spec) for spec in specs]

    return PageOptions(
        prompts=PromptTools(keys, explain, None if tokenizer is None else _tokenizer(tokenizer)),
        remotes=remotes,
        settings=[("Policy", config.policy), ("Write policy", config.write_policy)],
        gpu_price=gpu_price,
    )


def _rows(found: PromptExplanation) -> list[dict[str, object]]:
    """Return a row for each tier; the last also tells the token in which the prompt differs from the nearest."""
    rows = [{**answer._asdict(), "namespace": answer.namespace.hex()} for answer in found.answers]
    if found.nearest is not None:
        rows[-1]["detail"] = f"{rows[-1]['detail']}; {found.nearest.difference()}"
    return rows


def _tokenizer(path: Path) -> Callable[[str], Sequence[int]]:
    """Return what cuts a text with a model's tokenizer: a tokenizer.json, or a directory that has one."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UsageError("--tokenizer needs tokenizers: pip install 'pagodakv[transformers]'") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as trouble:  # noqa: BLE001  # the library raises bare Exceptions
        raise UsageError(f"--tokenizer {file}: cannot be used: {trouble}") from None

    def ids(text: str) -> Sequence[int]:
        if len(text) > _MOST_TEXT:
            raise ValueError(f"the text has {len(text):,} characters: at most {_MOST_TEXT:,}")
        found: list[int] = loaded.encode(text).ids  # with what the model puts around it
        return found

    return ids
