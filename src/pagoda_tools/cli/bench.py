"""`pagoda bench`: the speed of the configured tiers, compared with the memory and the disk below
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.stores import AsJson, ConfigFile, configured, given_size

if TYPE_CHECKING:
    from pagoda.config import Config
    from pagoda_tools.cli.bench_tiers import Figure


def bench(
    seconds: Annotated[float, Option(min=1, max=600)] = 20.0,
    chunk_size: Annotated[str, Option(metavar="SIZE")] = "32MiB",
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Measure the configured tiers, and the memory and the disk below them. Stored chunks stay as
    they are.

    Args:
        seconds: About how long the measurement takes.
        chunk_size: The size of a chunk, such as 32MiB.
    """
    loaded = configured(config)
    chunk_bytes = _chunk_bytes(chunk_size)
    tiers = [
        tier for tier in ("host", "disk") if getattr(loaded, f"{tier}_bytes")
    ]
    if not tiers:
        raise UsageError(
            "host_size and disk_size are 0: set one, to have a tier to measure"
        )
    figures = _measured(loaded, tiers, chunk_bytes, seconds / len(tiers), as_json)
    values = {figure.name: figure.as_json() for figure in figures}
    if as_json:
        printing.print_json({"chunk_bytes": chunk_bytes, **values})
        return 0
    rows = [
        (name.replace("_", " "), *(round(one, 3) for one in each.values()))
        for name, each in values.items()
    ]
    columns = ("", "GB/s", "limit GB/s", "ratio", "threads", "turns")
    printing.print_table(f"chunks of {printing.size(chunk_bytes)}", columns, rows)
    printing.print_text(
        "limits: copies in memory; plain O_DIRECT reads and writes on the same file system"
    )
    if "disk" not in tiers:
        printing.note(
            "the disk tier was not measured: set disk_path and disk_size to configure one"
        )
    return 0


def _chunk_bytes(text: str) -> int:
    size = given_size("--chunk-size", text)
    if not isinstance(size, int) or not 4096 <= size <= 2**30 or size % 4096:
        raise UsageError(
            f"--chunk-size {text}: a multiple of 4096 bytes up to 1GiB is needed"
        )
    return size


def _measured(
    config: Config,
    tiers: list[str],
    chunk_bytes: int,
    seconds: float,
    quiet: bool,
) -> list[Figure]:
    """Measure the tiers one after the other, and show a progress bar."""
    import time

    from pagoda_tools.cli.bench_tiers import disk_figures, host_figures

    measures = {"host": host_figures, "disk": disk_figures}
    figures = []
    with printing.progress(quiet) as bars:
        for tier in tiers:
            task = bars.add_task(f"measuring {tier}", total=seconds)
            began = time.monotonic()

            def tick(task: int = task, began: float = began) -> None:
                done = min(seconds, time.monotonic() - began)
                bars.update(task, completed=done)  # type: ignore[arg-type]

            figures += measures[tier](config, chunk_bytes, seconds, tick)
    return figures
