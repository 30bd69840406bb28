"""`pagoda pin` and `pagoda unpin`: protect the chunks of a prompt in the local tiers from
eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from pagoda_tools.cli import FAILED, UsageError, printing, stores
from pagoda_tools.cli.prompt_source import read_tokens
from pagoda_tools.cli.remote_stores import all_remotes

if TYPE_CHECKING:
    from pagoda.ledger import Ledger
    from pagoda_tools.cli.prompt_explanation import Prompt

_OWNER = "pagoda"

Owner = Annotated[
    str,
    Option(metavar="NAME", help="The owner of the pins; unpin ends only these."),
]


class PinnedPrefix(NamedTuple):
    """The pinned part of a prompt under one namespace in one tier, from its first token on."""

    tier: str
    namespace: bytes
    model: str
    num_tokens: int


def pin(
    directory: stores.Directory = None,
    tokens: stores.Tokens = None,
    owner: Owner = _OWNER,
    model: stores.Model = None,
    namespace: stores.Prefix = None,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """Protect the stored chunks of a prompt from eviction: at most a quarter of a tier, until
    `pagoda unpin`.
    """
    from pagoda_tools.cli.prompt_explanation import prompt_of

    ids = read_tokens(tokens)
    broken = dict[str, str]()
    with stores.all_attached(directory, config, broken) as tiers:
        prompt = prompt_of(ids, tiers, [], stores.configured(config))
        roots = list(stores.chosen(prompt.known, model, namespace, broken))
        found = [
            _pinned(prompt, ledger, root, owner)
            for ledger in prompt.tiers
            for root in roots
        ]
    done = [one for one in found if one.num_tokens]
    named = stores.Configured(directory, config)
    if as_json:
        printing.print_json(
            {
                "pinned": [one._asdict() for one in done],
                "failed": broken,
                "unconfigured": named.unnamed(broken),
            }
        )
    elif done:
        rows = [(one.tier, one.num_tokens, one.model) for one in done]
        printing.print_table("pinned", ("tier", "tokens", "model"), rows)
    elif tiers or not broken:
        printing.note(
            "nothing was pinned: no tier has its beginning, or too many pins (see pagoda explain)"
        )
    _name_remotes(directory, config)
    return FAILED if any(map(named.names, broken)) or not done else 0


def unpin(
    directory: stores.Directory = None,
    tokens: stores.Tokens = None,
    owner: Owner = _OWNER,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """End the pins of an owner: those of one prompt, or without --tokens all of them."""
    from pagoda.ledger import admin
    from pagoda_tools.cli.prompt_explanation import prompt_of

    ids = None if tokens is None else read_tokens(tokens)
    broken = dict[str, str]()
    with stores.all_attached(directory, config, broken) as tiers:
        keys: Sequence[bytes] | None = None
        if ids is not None:
            prompt = prompt_of(ids, tiers, [], stores.configured(config))
            keys = [key for run in prompt.keys.values() for key in run]
        ended = {
            str(ledger.directory): admin.unpin(ledger, keys, owner)
            for ledger in tiers
        }
    named = stores.Configured(directory, config)
    if as_json:
        printing.print_json(
            {
                "ended": ended,
                "failed": broken,
                "unconfigured": named.unnamed(broken),
            }
        )
    elif tiers or not broken:
        printing.note(
            f"{sum(ended.values()):,} chunks are no longer pinned by {owner}"
        )
    _name_remotes(directory, config)
    return FAILED if any(map(named.names, broken)) else 0


def _name_remotes(directory: Path | None, config: Path | None) -> None:
    """Say of which tiers nothing is pinned or unpinned."""
    known, sealed = all_remotes(directory, config)
    for spec in (*known, *sealed):
        printing.note(
            f"{spec.redacted}: stays as it is: remote tiers have no pins"
        )


def _pinned(
    prompt: Prompt, ledger: Ledger, root: bytes, owner: str
) -> PinnedPrefix:
    from pagoda.ledger import admin

    run = ledger.match_prefix(
        prompt.keys[root], start=0, namespace=root, touch=False
    )
    try:
        chunks = admin.pin(ledger, prompt.keys[root][: len(run.slots)], owner)
    except ValueError as trouble:
        raise UsageError(f"--owner {owner!r}: {trouble}") from None
    size = prompt.chunk_tokens[root]
    model = stores.label(prompt.known[root].fields)
    return PinnedPrefix(ledger.tier, root, model, chunks * size)
