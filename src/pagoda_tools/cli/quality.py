"""`pagoda quality`: measures, on the user's own prompts, whether blending or a lossy codec may be
used with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option

from pagoda_tools.cli import (
    FAILED,
    INTERRUPTED,
    FailedError,
    UsageError,
    printing,
    require_transformers,
)
from pagoda_tools.cli.stores import AsJson, ConfigFile, configured

if TYPE_CHECKING:
    import torch

    from pagoda.base.quality_bounds import Bounds
    from pagoda.blend.blend_policies import SelectionPolicy
    from pagoda.config import Config
    from pagoda_tools.quality.prompt_lines import QualityPrompt, Tokenizer
    from pagoda_tools.quality.run import QualityRun

_USUAL_SHARES = (0.05, 0.15, 0.3)
_MOST_NAMED = 20  # bad lines that are named one by one


def quality(
    model: Annotated[str, Argument(metavar="MODEL")],
    prompts: Annotated[Path, Argument(metavar="PROMPTS")],
    blend: Annotated[
        list[str] | None, Option(metavar="POLICY:SHARE[:NAME=N]")
    ] = None,
    codec: Annotated[list[str] | None, Option(metavar="NAME")] = None,
    new_tokens: Annotated[int, Option(min=1, max=4096, metavar="N")] = 16,
    chunk_tokens: Annotated[
        int | None, Option(min=1, max=2**20, metavar="N")
    ] = None,
    kl: Annotated[float | None, Option(min=0, metavar="NATS")] = None,
    top1: Annotated[float | None, Option(min=0, max=1, metavar="SHARE")] = None,
    answers: Annotated[
        float | None, Option(min=0, max=1, metavar="SHARE")
    ] = None,
    min_prompts: Annotated[int, Option(min=1, metavar="N")] = 50,
    confidence: Annotated[
        float, Option(min=0.5, max=0.999, metavar="SHARE")
    ] = 0.95,
    seed: Annotated[int, Option(min=0, metavar="N")] = 0,
    weights: Annotated[list[str] | None, Option(metavar="NAME")] = None,
    dtype: Annotated[str, Option(metavar="DTYPE")] = "auto",
    device: Annotated[str | None, Option(metavar="DEVICE")] = None,
    out: Annotated[Path | None, Option(metavar="PATH")] = None,
    png: Annotated[Path | None, Option(metavar="FILE")] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Measure how blending and lossy codecs change the answers of a model, and write the verdict.

    Engines use them only with a passing verdict for the model. Exit code 1: no setting passes.

    Args:
        model: A model's directory, or its name on the hub.
        prompts: Lines such as {"documents": [...], "question": "..."}.
        blend: Blending, such as deviation:0.15; or several.
        codec: A lossy codec, such as q8; or several.
        new_tokens: The most tokens of an answer if the prompt has no expected answer.
        chunk_tokens: Tokens per chunk; default: the configured number.
        kl: Bound: the largest KL; default 0.095 for blending, 0.01 for codecs.
        top1: Bound: the smallest share of same tokens; default 0.93, 0.99.
        answers: Bound: the smallest share of right answers; default 0.93, 0.99.
        min_prompts: Bound: fewer prompts cannot pass.
        confidence: Confidence of the intervals.
        seed: Seed of the bootstrap.
        weights: Another name of these weights: the one in an engine's error.
        dtype: The dtype of the loaded weights.
        device: The device of the model; default: cuda if there is one.
        out: The verdict: a file, or a directory for it.
        png: Plot quality against cost (needs pagodakv[plot]).
    """
    require_transformers("pagoda quality")
    try:
        from pagoda.base.quality_verdict import default_directory
        from pagoda_tools.quality import measure_quality
        from pagoda_tools.quality.write_verdict import check_names, check_place

        loaded = configured(config)
        bounds = _bounds(kl, top1, answers, min_prompts, confidence)
        if png is not None:
            from pagoda_tools.cli.hit_rate_plot import check_png

            check_png(png)
        if not prompts.is_file():
            raise UsageError(f"{prompts}: no such file")
        blends = [_blend_of(text) for text in blend or ()]
        codecs = _codecs_of(codec or ())
        place = out or Path(loaded.quality_verdicts or default_directory())
        check_place(place)
        check_names(weights or ())
        with printing.progress(as_json) as bars:
            task = bars.add_task("loading the model", total=None)
            with _one_line(f"{model}: cannot be used"):
                vocabulary, most, tokenizer = _described(model)
            lines = _prompts(
                prompts, tokenizer, vocabulary, most and max(most - new_tokens, 1)
            )
            if not blends and not codecs:
                blends, codecs = _usual(lines, loaded)
            with _one_line(f"{model}: cannot be used"):
                network = _loaded(model, dtype, device)
            bars.update(task, total=1)

            def step(name: str, total: int) -> None:
                bars.update(
                    task, total=total, advance=1, description=f"measuring {name}"
                )

            with _one_line(str(prompts)):
                run = measure_quality(
                    network,
                    lines,
                    blends=blends,
                    codecs=codecs,
                    tokenizer=tokenizer,
                    chunk_tokens=chunk_tokens or loaded.chunk_tokens,
                    new_tokens=new_tokens,
                    bounds=bounds,
                    confidence=confidence,
                    seed=seed,
                    step=step,
                )
    except KeyboardInterrupt:
        printing.note("interrupted; no verdict was written")
        return INTERRUPTED
    return _show(model, prompts, run, place, weights or (), png, as_json)


def _show(
    model: str,
    prompts: Path,
    run: QualityRun,
    place: Path,
    names: Sequence[str],
    png: Path | None,
    as_json: bool,
) -> int:
    """Write the verdict and the plot, print the results; return the exit code."""
    from pagoda import __version__
    from pagoda_tools.cli import quality_report
    from pagoda_tools.quality.write_verdict import write_verdict

    name = model.rstrip("/").rsplit("/", 1)[-1]
    results = [row.result for row in run.rows if row.result is not None]
    path = write_verdict(
        place,
        model=name,
        weights=[run.weights, *names],
        pagoda=__version__,
        results=results,
    )
    if png is not None:
        from pagoda_tools.cli.quality_plot import save_png

        save_png(
            png, run.rows, f"{name}: {prompts.name}, {results[0].prompts} prompts"
        )
    if as_json:
        printing.print_json(quality_report.as_json(name, run, path, png))
    else:
        quality_report.print_report(name, prompts, run.rows)
        printing.print_text(
            f"written to {path}" + (f"; plot: {png}" if png else "")
        )
    return 0 if any(result.passed for result in results) else FAILED


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn errors of a library or of a measurement into one line."""
    from pagoda.base.errors import ConfigError

    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as trouble:
        said = str(trouble).strip().partition("\n")[0]
        raise UsageError(f"{what}: {said or type(trouble).__name__}") from None


def _described(model: str) -> tuple[int, int | None, Tokenizer | None]:
    """Return a model's vocabulary, its most tokens, and its tokenizer, or None for these. Loads no
    weights.
    """
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    text = transformers.AutoConfig.from_pretrained(model).get_text_config(
        decoder=True
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError):
        tokenizer = None  # prompts of token ids need no tokenizer
    return (
        text.vocab_size,
        getattr(text, "max_position_embeddings", None),
        tokenizer,
    )


def _loaded(model: str, dtype: str, device: str | None) -> torch.nn.Module:
    """Return the model, on its device."""
    import torch

    if dtype != "auto" and not isinstance(
        getattr(torch, dtype, None), torch.dtype
    ):
        raise ValueError(
            f"--dtype {dtype}: torch has no such type; an example is bfloat16"
        )
    try:
        place = torch.device(
            device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        kind = import_module("transformers").AutoModelForCausalLM
        network: torch.nn.Module = (
            kind.from_pretrained(model, dtype=dtype).eval().to(place)
        )
    except RuntimeError as trouble:
        # e.g. the device does not exist, or has too little memory
        raise FailedError(
            f"{model}: {str(trouble).strip().partition(chr(10))[0]}"
        ) from None
    return network


def _prompts(
    path: Path,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    most_tokens: int | None,
) -> list[QualityPrompt]:
    """Return the prompts of a file. Names each bad line on stderr and raises UsageError if there
    are any.
    """
    from pagoda_tools.quality.prompt_lines import read_prompts

    good, bad = read_prompts(
        path, tokenizer, vocabulary=vocabulary, most_tokens=most_tokens
    )
    for line in bad[:_MOST_NAMED]:
        printing.note(f"{path}: line {line.line} {line.why}")
    if bad:
        more = (
            f" ({len(bad) - _MOST_NAMED} are not named here)"
            if len(bad) > _MOST_NAMED
            else ""
        )
        raise UsageError(
            f"{path}: {len(bad)} of {len(good) + len(bad)} lines cannot be used{more}"
        )
    if not good:
        raise UsageError(f"{path}: has no prompts")
    return good


def _blend_of(text: str) -> tuple[SelectionPolicy, float, int]:
    """Parse a text such as "deviation:0.15" or "deviation:0.15:layer=2:min_tokens=256". Raises
    UsageError.
    """
    from pagoda.blend.blend_policies import (
        POLICIES,
        checked_min_tokens,
        checked_share,
    )

    name, share, *options = text.split(":") if ":" in text else (text, "")
    try:
        if name not in POLICIES:
            raise ValueError(f"the policies are {', '.join(POLICIES)}")
        given = {
            key: int(value)
            for key, value in (option.split("=") for option in options)
        }
        least = checked_min_tokens(given.pop("min_tokens", 0))
        policy = cast("Callable[..., SelectionPolicy]", POLICIES[name])
        return policy(**given), checked_share(float(share)), least
    except (TypeError, ValueError) as trouble:
        raise UsageError(
            f"--blend {text}: give a policy and the share to compute again ({trouble})"
        ) from None


def _codecs_of(names: Sequence[str]) -> list[str]:
    """Return the requested codecs, each once. Raises UsageError for a codec that is not lossy."""
    from pagoda import codec

    for name in names:
        if name not in codec.LOSSY:
            raise UsageError(
                f"--codec {name}: the lossy codecs are {', '.join(codec.LOSSY)}"
            )
        codec.require(name)
    return list(dict.fromkeys(names))


def _usual(
    prompts: Sequence[QualityPrompt], config: Config
) -> tuple[list[tuple[SelectionPolicy, float, int]], list[str]]:
    """Return the default settings: all codecs, and blending if the prompts have documents.

    The configured share is one of them, with the configured least tokens of a document.
    """
    from pagoda import codec
    from pagoda.blend.blend_policies import POLICIES, policy_named

    shares = sorted({*_USUAL_SHARES, config.blend_recompute})
    blends = [
        (policy_named(name), share, config.blend_min_tokens)
        for name in POLICIES
        for share in shares
    ]
    if not all(prompt.documents for prompt in prompts):
        blends = []
    return blends, list(codec.LOSSY)


def _bounds(
    kl: float | None,
    top1: float | None,
    answers: float | None,
    prompts: int,
    confidence: float,
) -> dict[str, Bounds]:
    """Return the bounds by feature: the given ones, otherwise the usual. UsageError: they exclude
    nothing.
    """
    from msgspec.structs import replace

    from pagoda.base.quality_bounds import DEFAULT_BOUNDS, too_loose

    given = {"kl": kl, "top1": top1, "answers": answers, "prompts": prompts}
    known = {name: value for name, value in given.items() if value is not None}
    bounds = {
        feature: replace(usual, **known)
        for feature, usual in DEFAULT_BOUNDS.items()
    }
    if wrong := too_loose(bounds["blend"], confidence):
        raise UsageError("; ".join(wrong))
    return bounds
