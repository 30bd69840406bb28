"""`pagoda demo`: answers a prompt cold, in a second process from host memory, and in a third one
from disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda_tools.cli import FAILED, INTERRUPTED, printing, require_transformers
from pagoda_tools.cli.stores import AsJson

if TYPE_CHECKING:
    from pagoda_tools.cli.demo.demo_child import Size
    from pagoda_tools.cli.demo.demo_run import Shown

_STEPS = 16  # of all processes together, for the progress bar
_FROM = {"cold": "computed", "host": "host", "disk": "disk"}


def demo(
    model: Annotated[str | None, Option(metavar="PATH_OR_ID")] = None,
    as_json: AsJson = False,
    host_path: Path = Path("/dev/shm"),
    disk_path: Path | None = None,
) -> int:
    """Serve a prompt from memory and from disk: the same text, much sooner.

    The demo removes what it has stored.

    Args:
        model: A real model instead of a random one.
        host_path: A directory in memory; the demo creates a directory in it.
        disk_path: A directory on disk; the demo creates a directory in it.
    """
    import tempfile

    from pagoda_tools.cli.demo.demo_child import Size

    require_transformers("the demo")
    try:
        shown = _ran(
            Size(),
            model,
            host_path,
            disk_path or Path(tempfile.gettempdir()),
            as_json,
        )
    except KeyboardInterrupt:
        printing.note("interrupted; the demo has removed what it had stored")
        return INTERRUPTED
    if as_json:
        printing.print_json(shown.as_json())
    else:
        _print(shown, model)
    return 0 if shown.identical and shown.controls_differ else FAILED


def _ran(
    size: Size, model: str | None, host_in: Path, disk_in: Path, as_json: bool
) -> Shown:
    """Run the processes, and show a progress bar."""
    from pagoda_tools.cli.demo.demo_run import run_demo

    with printing.progress(as_json) as bars:
        task = bars.add_task("starting", total=_STEPS)

        def step(process: str, what: str) -> None:
            bars.update(task, advance=1, description=f"{process}: {what}")

        shown = run_demo(size, model, host_in, disk_in, step)
        bars.update(task, completed=_STEPS, description="done")
    return shown


def _print(shown: Shown, model: str | None) -> None:
    what = (
        model
        or f"a Llama of {shown.outcomes['cold'].parameters / 1e6:.0f} million random weights"
    )
    title = (
        f"{what}, fp32: two questions about the same {shown.cold[0].prompt_tokens:,} tokens, "
        "one process per tier"
    )
    printing.print_dicts(title, _rows(shown))
    print(_chart(shown))
    ratio = f"{shown.outcomes['host'].host_vs_handover:.2f}x"
    printing.print_text(
        f"a host hit takes {ratio} the time to first token of handing generate a clone of the "
        "same KV"
    )
    controls = {
        name: "changes" if differs else "DOES NOT CHANGE"
        for name, differs in shown.outcomes["cold"].controls.items()
    }
    printing.print_text(
        f"controls: zeroed KV {controls['zeroed']} the text, another prompt's KV "
        f"{controls['other']} it; "
        f"at least {shown.distinct_tokens} different tokens in {len(shown.cold[0].tokens)}"
    )
    if model is None:
        noise = f"{shown.cold[0].text[:12]!r}..."
        printing.print_text(
            f"random weights write noise ({noise}); the test is that the noise is the same"
        )


def _rows(shown: Shown) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for process, outcome in shown.outcomes.items():
        for number, (answer, cold) in enumerate(
            zip(outcome.answers, shown.cold, strict=True), 1
        ):
            reused = ", ".join(
                f"{tokens:,} from {tier}"
                for tier, tokens in answer.by_tier.items()
            )
            rows.append(
                {
                    "process": process,
                    "prompt": str(number),
                    "computed": f"{answer.prompt_tokens - sum(answer.by_tier.values()):,}",
                    "first token": f"{answer.seconds:.3f} s",
                    "against cold": f"{cold.seconds / answer.seconds:.1f}x",
                    "text": "identical"
                    if answer.tokens == cold.tokens
                    else "DIFFERS",
                    "tokens reused": reused or f"none {answer.reason}".strip(),
                }
            )
    return rows


def _chart(shown: Shown, width: int = 60) -> str:
    """Return bars of the time to first token, all with one scale."""
    seconds = {name: shown.ttft(name) for name in _FROM}
    longest = max(value for value in seconds.values() if value == value)
    lines = ["time to first token"]
    for name, value in seconds.items():
        bar = (
            "" if value != value else "█" * max(1, round(value / longest * width))
        )
        figure = "not served" if value != value else f"{value:.3f} s"
        lines.append(f"  {_FROM[name]:>8} {bar} {figure}")
    return "\n".join(lines)
