"""`pagoda models`: which types of Transformers are served, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from pagoda_tools.cli import UsageError, printing, require_transformers
from pagoda_tools.cli.stores import AsJson
from pagoda_tools.cli.text_tables import wrapped

if TYPE_CHECKING:
    from pagoda.connectors.transformers.model_types import ServedType

_INDENT = 2  # of the lines below a row
_ENDING = (
    "to an ending: a prompt goes on where a window or a state was kept. If the model cannot go "
    "on behind one, which is tried when it is opened, it runs uncached."
)


def models(
    types: Annotated[
        list[str] | None,
        Argument(
            metavar="[TYPE]...",
            help="Only these types, as `model_type` in a model's config.json.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which types of Transformers models `CachedModel` serves, and why not the others.

    The checks that decide it when a model is opened are asked, with the default configuration of
    each type of the installed Transformers. Opening also probes the model's own weights. Takes some
    seconds; types that are named take less.
    """
    require_transformers("models")
    import transformers

    from pagoda import __version__
    from pagoda.connectors.transformers.model_types import (
        TO_AN_ENDING,
        known_types,
    )

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    known = known_types()
    chosen = list(types or known)
    _check_known(chosen, known)
    found = _asked(chosen, as_json)
    if as_json:
        printing.print_json(
            {
                "pagoda": __version__,
                "transformers": transformers.__version__,
                "types": [one._asdict() for one in found],
            }
        )
        return
    room = printing.console().width - _INDENT
    printing.print_table(
        f"Transformers {transformers.__version__}, PagodaKV {__version__}",
        ("type", "served", "since", "items", "why not"),
        [
            (
                one.type,
                one.how,
                one.since,
                "yes" if one.items else "",
                "\n".join(wrapped(one.why, room)),
            )
            for one in found
        ],
    )
    if any(one.how == TO_AN_ENDING for one in found):
        printing.print_text(_ENDING)
    if not types:
        printing.print_text(summary(found))


def summary(found: list[ServedType]) -> str:
    """Return how many types are served, as a sentence. Pure."""
    served = sum(bool(one.since) for one in found)
    items = sum(one.items for one in found)
    return (
        f"{served} of {len(found)} types are served, {items} of them also with images or the "
        "like in the prompt (items)."
    )


def _asked(chosen: list[str], as_json: bool) -> list[ServedType]:
    from pagoda.connectors.transformers.model_types import served_types

    found = []
    with printing.progress(as_json) as bar:
        task = bar.add_task("asking", total=len(chosen))
        for one in served_types(chosen):
            found.append(one)
            bar.advance(task)
    return found


def _check_known(chosen: list[str], known: list[str]) -> None:
    from pagoda.config.did_you_mean import did_you_mean

    for one in chosen:
        if one not in known:
            near = did_you_mean(one, known)
            raise UsageError(
                f"{one}: the installed Transformers has no such type that generates text{near}"
            )
