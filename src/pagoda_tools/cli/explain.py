"""`pagoda explain`: how much of a prompt each tier would serve, and why not more. Recency does not
change.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda_tools.cli import printing, stores
from pagoda_tools.cli.prompt_source import read_prompt
from pagoda_tools.cli.remote_stores import exit_code, pinged, remotes_of

if TYPE_CHECKING:
    from pagoda_tools.cli.prompt_explanation import PromptExplanation

_INDENT = "  "


def explain(
    directory: stores.Directory = None,
    tokens: stores.Tokens = None,
    text: Annotated[str | None, Option(metavar="TEXT")] = None,
    messages: Annotated[str | None, Option(metavar="FILE")] = None,
    tokenizer: Annotated[str | None, Option(metavar="PATH")] = None,
    url: Annotated[str | None, Option(metavar="URL")] = None,
    api_key_file: Annotated[Path | None, Option(metavar="FILE")] = None,
    model: stores.Model = None,
    namespace: stores.Prefix = None,
    chunk_tokens: Annotated[int | None, Option(min=1, metavar="N")] = None,
    prefill: Annotated[float | None, Option(min=1, metavar="N")] = None,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """Show how many leading tokens of a prompt each tier would serve, why not more, and which token
    differs.

    Args:
        text: The prompt as text, - = stdin; with --tokenizer or --url.
        messages: Chat messages as JSON, - = stdin; with --tokenizer or --url.
        tokenizer: The model's tokenizer: a directory, or tokenizer.json.
        url: A server of vLLM or llama.cpp that gives the token ids: http://HOST:PORT.
        api_key_file: The server's key; default: the variable OPENAI_API_KEY.
        chunk_tokens: Tokens in a chunk; default: as in the stored chunks.
        prefill: Tokens per second that the engine computes: is loading faster?
    """
    ids, served = read_prompt(
        tokens, text, messages, tokenizer, url, api_key_file
    )
    from pagoda_tools.cli.prompt_explanation import (
        explanations,
        neighbours_of,
        prompt_of,
    )

    # top down
    specs = [
        *neighbours_of(directory, stores.configured(config)),
        *remotes_of(directory, config),
    ]
    asked = dict(zip(specs, pinged(specs), strict=True))
    troubles = {spec: one.trouble for spec, one in asked.items() if one.trouble}
    remotes = [spec for spec in specs if spec not in troubles]
    broken: dict[str, str] = {}
    with stores.all_attached(directory, config, broken) as tiers:
        silent = {
            **{spec.name: trouble for spec, trouble in troubles.items()},
            **broken,
        }
        prompt = prompt_of(
            ids, tiers, remotes, stores.configured(config), chunk_tokens, prefill
        )
        roots = stores.chosen(prompt.known, model, namespace, silent)
        name = served.name if served is not None else None
        if model is None and name is not None and prompt.known:
            if of_server := stores.chosen(prompt.known, name, namespace, True):
                roots = of_server
            else:
                printing.note(
                    f"nothing is stored of the server's model, {name}: this is about other models"
                )
        found = explanations(prompt, roots)
    named = stores.Configured(directory, config)
    places = [*broken, *(spec.redacted for spec in troubles)]
    if as_json:
        rows = [answer._asdict() for one in found for answer in one.answers]
        near = [one.nearest_row() for one in found if one.nearest is not None]
        whole = {
            "asked_tokens": prompt.num_tokens,
            "answers": rows,
            "nearest": near,
            "endings": {
                one.namespace.hex(): one.ending
                for one in found
                if one.ending is not None
            },
            "failed": silent,
            "unconfigured": named.unnamed(places),
        }
        printing.print_json(whole)
    elif not found and not silent:
        printing.note("nothing is stored yet, so no prompt would hit")
    else:
        for one in found:
            _print(one, prompt.num_tokens)
            if one.ending == 0 and served is not None and served.may_need_endings:
                printing.print_text(
                    "no ending is stored near the end of these chunks: a model with windows or "
                    "recurrent layers computes all of this prompt",
                    _INDENT,
                )
    for spec, trouble in troubles.items():
        named.note(spec.redacted, trouble)
    return exit_code(named, places)


def _print(found: PromptExplanation, asked_tokens: int) -> None:
    """Print the answers for one namespace; only long names make a line wider than 80 columns."""
    rows = [
        {
            "tier": answer.tier,
            "tokens": answer.num_tokens,
            "share": printing.share(answer.num_tokens, asked_tokens),
            "why not more": answer.reason.value.replace("_", " ")
            if answer.reason
            else "",
        }
        for answer in found.answers
    ]
    last = found.answers[-1]
    printing.print_dicts(f"{last.model}: of {asked_tokens:,} tokens", rows)
    for line in in_words(found):
        printing.print_text(line, _INDENT)


def in_words(found: PromptExplanation) -> list[str]:
    """Return lines that say which chunk of a namespace is the first miss, why, and which token
    differs.
    """
    answer = found.answers[-1]
    size = found.chunk_tokens
    lines = list[str]()
    if (chunk := answer.chunk) is not None:
        first = f"chunk {chunk} (tokens {chunk * size:,} to {(chunk + 1) * size - 1:,})"
        lines.append(f"the first chunk that is not served: {first}")
    lines.append(answer.detail)
    if found.ending:
        lines.append(
            f"an ending of {found.ending:,} tokens is stored: a model with windows or recurrent "
            "layers goes on there"
        )
    return [line for line in (*lines, *_nearest_lines(found)) if line]


def _nearest_lines(found: PromptExplanation) -> list[str]:
    near = found.nearest
    if near is None:
        if found.answers[-1].chunk is None:
            return []
        return [
            "the log has no similar prompt, so the token that differs is not known"
        ]
    where = f"in {', '.join(near.tiers)}" if near.tiers else "no longer stored"
    age = printing.age(max(0.0, time.time() - near.stored_at))
    lines = [
        near.difference(),
        f"nearest stored prompt: {near.num_tokens:,} tokens, stored {age} ago, {where}",
        f"chunk key: {near.key.hex()}",
    ]
    if near.other_fields:
        lines.append(f"its namespace has another {', '.join(near.other_fields)}")
    return lines
