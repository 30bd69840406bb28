"""`pagoda demo`: answers a prompt cold, in a second process from host memory, and in a third one
from disk; with llama.cpp cold, and from disk after a restart of its server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda.config.did_you_mean import did_you_mean
from pagoda_tools.cli import (
    FAILED,
    INTERRUPTED,
    UsageError,
    printing,
    require_transformers,
)
from pagoda_tools.cli.stores import AsJson

if TYPE_CHECKING:
    from pagoda_tools.cli.demo.demo_child import Size
    from pagoda_tools.cli.demo.demo_run import Shown
    from pagoda_tools.cli.demo.llama_run import LlamaShown

_STEPS = 16  # of all processes together, for the progress bar
_FROM = {"cold": "computed", "host": "host", "disk": "disk"}
_ENGINES = ("transformers", "llama.cpp")
_LLAMA_STEPS = 12
_LLAMA_FROM = {"first": "computed", "restarted": "disk"}


def demo(
    engine: Annotated[str, Option(metavar="NAME")] = _ENGINES[0],
    model: Annotated[str | None, Option(metavar="PATH_OR_ID")] = None,
    as_json: AsJson = False,
    host_path: Path = Path("/dev/shm"),
    disk_path: Path | None = None,
) -> int:
    """Serve a prompt from memory and from disk: the same text, much sooner.

    The demo removes what it has stored.

    Args:
        engine: transformers, or llama.cpp, which needs no torch.
        model: A real model instead of a random one; for llama.cpp a GGUF file.
        host_path: A directory in memory; the demo creates a directory in it.
        disk_path: A directory on disk; the demo creates a directory in it.
    """
    import tempfile

    if engine not in _ENGINES:
        near = did_you_mean(engine, _ENGINES)
        raise UsageError(
            f"--engine {engine}: unknown{near or ''}; the demo has {' and '.join(_ENGINES)}"
        )
    show = _show if engine == _ENGINES[0] else _show_llama
    disk_in = disk_path or Path(tempfile.gettempdir())
    try:
        is_proof = show(model, host_path, disk_in, as_json)
    except KeyboardInterrupt:
        printing.note("interrupted; the demo has removed what it had stored")
        return INTERRUPTED
    return 0 if is_proof else FAILED


# ---- Transformers


def _show(model: str | None, host_in: Path, disk_in: Path, as_json: bool) -> bool:
    """Run the demo with Transformers and print it; return whether all was as promised."""
    from pagoda_tools.cli.demo.demo_child import Size

    require_transformers("the demo")
    shown = _ran(Size(), model, host_in, disk_in, as_json)
    if as_json:
        printing.print_json(shown.as_json())
    else:
        _print(shown, model)
    return shown.identical and shown.controls_differ


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
    print(_chart({_FROM[name]: shown.ttft(name) for name in _FROM}))
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


def _chart(seconds: Mapping[str, float], width: int = 60) -> str:
    """Return bars of the time to first token, all with one scale. NaN: not served."""
    longest = max(value for value in seconds.values() if value == value)
    lines = ["time to first token"]
    for name, value in seconds.items():
        bar = (
            "" if value != value else "█" * max(1, round(value / longest * width))
        )
        figure = "not served" if value != value else f"{value:.3f} s"
        lines.append(f"  {name:>8} {bar} {figure}")
    return "\n".join(lines)


# ---- llama.cpp


def _show_llama(
    model: str | None, memory_in: Path, disk_in: Path, as_json: bool
) -> bool:
    """Run the demo with llama.cpp and print it; return whether all was as promised."""
    from pagoda_tools.cli.demo.llama_run import LlamaSize, run_llama_demo

    with printing.progress(as_json) as bars:
        task = bars.add_task("starting", total=_LLAMA_STEPS)

        def step(what: str) -> None:
            bars.update(task, advance=1, description=what)

        shown = run_llama_demo(LlamaSize(), model, memory_in, disk_in, step)
        bars.update(task, completed=_LLAMA_STEPS, description="done")
    if as_json:
        printing.print_json(shown.as_json())
    else:
        _print_llama(shown)
    return shown.is_proof


def _print_llama(shown: LlamaShown) -> None:
    what = shown.model or (
        f"a Llama of {shown.parameters / 1e6:.0f} million random weights"
    )
    cold = shown.answers["first"][0]
    program = Path(shown.program).name
    printing.print_dicts(
        f"{what} in {program}: two questions about the same text, {cold.prompt_tokens:,} "
        "tokens; the server was restarted in between",
        _llama_rows(shown),
    )
    print(_chart({_LLAMA_FROM[name]: shown.ttft(name) for name in _LLAMA_FROM}))
    changes = "changes" if shown.control_differs else "DOES NOT CHANGE"
    printing.print_text(f"control: without the document the text {changes}")
    if not shown.model:
        printing.print_text(
            f"random weights: the text is noise ({cold.text[:12]!r}...), but must be the same"
        )
    printing.print_text(_llama_result(shown))


def _llama_result(shown: LlamaShown) -> str:
    """Return the result in one line."""
    if not shown.was_reused:
        why = shown.answers["restarted"][0].reason
        return f"NOTHING WAS REUSED after the restart: {why}"
    if not shown.identical:
        rounding = (
            ": models with windows are equal only to rounding"
            if shown.kind == "window"
            else ""
        )
        return f"THE TEXT DIFFERS after the restart{rounding}"
    if not shown.control_differs:
        return "the text does not depend on the document, so this proves NOTHING"
    sooner = shown.ttft("first") / shown.ttft("restarted")
    return (
        f"after the restart: the same text, the first token {sooner:.1f}x sooner"
    )


def _llama_rows(shown: LlamaShown) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for server, answers in shown.answers.items():
        for number, (answer, cold) in enumerate(
            zip(answers, shown.answers["first"], strict=True), 1
        ):
            reused = f"{answer.reused_tokens:,}"
            if not answer.reused_tokens:
                reused = f"none {answer.reason}".strip()
            rows.append(
                {
                    "server": server,
                    "prompt": str(number),
                    "computed": f"{answer.prompt_tokens - answer.reused_tokens:,}",
                    "first token": f"{answer.seconds:.3f} s",
                    "against cold": f"{cold.seconds / answer.seconds:.1f}x",
                    "text": "identical"
                    if answer.text == cold.text
                    else "DIFFERS",
                    "tokens reused": reused,
                }
            )
    return rows
