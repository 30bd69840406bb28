"""`pagoda explain`: how much of a prompt each tier would serve, and why not more. Does not touch recency."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda.cli import FAILED, UsageError, printing
from pagoda.cli.remote_stores import pinged, remotes_of
from pagoda.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    Model,
    Prefix,
    Tokens,
    all_attached,
    chosen,
    configured,
    refuse_unknown,
)

if TYPE_CHECKING:
    from pagoda.cli.prompt_coverage import TierAnswer
    from pagoda.keys import TokenIds


def explain(
    directory: Directory = None,
    tokens: Tokens = None,
    model: Model = None,
    namespace: Prefix = None,
    chunk_tokens: Annotated[
        int | None, Option(min=1, metavar="N", help="Tokens in a chunk; default: as what is stored.")
    ] = None,
    prefill: Annotated[
        float | None,
        Option(min=1, metavar="N", help="Tokens a second that the engine computes: is loading worth it?"),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Say how many leading tokens of a prompt each tier would serve, and why not more."""
    ids = read_tokens(tokens)
    from pagoda.cli.prompt_coverage import answers, prompt_of

    specs = remotes_of(directory, config)
    troubles = [asked.trouble for asked in pinged(specs)]
    silent = {spec.name: trouble for spec, trouble in zip(specs, troubles, strict=True) if trouble}
    remotes = [spec for spec, trouble in zip(specs, troubles, strict=True) if not trouble]
    with all_attached(directory, config) as tiers:
        prompt = prompt_of(ids, tiers, remotes, configured(config), chunk_tokens, prefill)
        refuse_unknown(prompt.known, model, namespace)
        found = [answers(prompt, root) for root in chosen(prompt.known, model, namespace)]
    found.sort(key=lambda group: -group[-1].num_tokens)  # the best namespace first
    flat = [answer for group in found for answer in group]
    if as_json:
        rows = [answer._asdict() for answer in flat]
        printing.print_json({"asked_tokens": prompt.num_tokens, "answers": rows, "failed": silent})
    elif not flat:
        printing.note("nothing is stored yet, so nothing would hit")
    else:
        _print(flat, prompt.num_tokens)
    for trouble in silent.values():
        printing.note(trouble)
    return FAILED if silent else 0


def read_tokens(source: str | None) -> TokenIds:
    """Return the token ids in a file, or in stdin for "-". Raises UsageError for None and what is no token id."""
    import json

    from pagoda.keys import as_token_ids

    if source is None:
        raise UsageError("--tokens FILE is missing: the prompt's token ids (- = stdin)")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as trouble:
        reason = getattr(trouble, "strerror", None) or "not text"
        raise UsageError(f"--tokens {source}: cannot be read: {reason}") from None
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        found = as_token_ids(ids)
    except ValueError as trouble:
        raise UsageError(f"--tokens {source}: not a list of token ids: {trouble}") from None
    if not len(found):
        raise UsageError(f"--tokens {source}: holds no token ids")
    return found


def _print(answers: Sequence[TierAnswer], asked_tokens: int) -> None:
    rows = [
        {
            "tier": answer.tier,
            "model": answer.model,
            "tokens": answer.num_tokens,
            "share": printing.share(answer.num_tokens, asked_tokens),
            "why not more": answer.reason or "",
            "": answer.detail,
        }
        for answer in answers
    ]
    printing.print_dicts(f"of {asked_tokens:,} tokens", rows)
