"""`pagoda top`: shows live what the stores hold and do; `--once` for one sample, `--json` for
programs.

The terminal is in order afterwards, however the command ends: there is no second screen, and the
cursor stays visible. If lines cannot be rewritten (a pipe, TERM=dumb), each sample is printed below
the one before.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from pagoda.base.metrics import by_reason
from pagoda_tools.cli import FAILED, UsageError, printing
from pagoda_tools.cli.remote_stores import remotes_of
from pagoda_tools.cli.stats import (
    counted,
    hit_rows,
    namespace_rows,
    remote_usage,
    snapshots,
    store_names,
    usage,
)
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    configured,
    find_stores,
)
from pagoda_tools.cli.text_tables import printable, table_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

    from pagoda.ledger.store_stats import StoreStats
    from pagoda_tools.serve.overview import RemoteUsage

_RATES = (
    "lookups",
    "hit_tokens",
    "stored_bytes",
    "loaded_bytes",
    "evicted_chunks",
)
_BAR_CELLS = 20
_ASK_SECONDS = 10.0  # the pause between two questions to the remote tiers
_NAMESPACES = _OWNERS = 5  # the largest ones are shown
_OWNER_LETTERS = 32
_REQUESTS = 5  # the last ones are shown


class TopSample(NamedTuple):
    """The state at one moment, and by directory the rates of counters since the sample before."""

    seconds: float
    stores: Sequence[StoreStats]
    failed: Mapping[str, str]
    remotes: Sequence[RemoteUsage]
    rates: Mapping[Path, Mapping[str, float]]
    policy: str


def top(
    directory: Directory = None,
    interval: Annotated[float, Option(min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, Option("--once")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Show live what the stores hold, what hits and what is copied. With --json: one line per
    sample.

    Args:
        interval: Seconds between two samples.
        once: Show one sample and end.
    """
    from rich.console import Group
    from rich.live import Live

    samples = _samples(directory, config, interval, once)
    out = printing.console()
    if as_json:
        for sample in samples:
            print(json.dumps(_as_json(sample), default=str), flush=True)
    elif once or not out.is_terminal or out.is_dumb_terminal:
        for sample in samples:
            for line in _view(sample, out.width):
                out.print(line, soft_wrap=True)
            out.file.flush()
    else:
        with Live(
            console=out, auto_refresh=False, vertical_overflow="crop"
        ) as live:
            out.show_cursor(True)
            for sample in samples:
                live.update(
                    Group(*_view(sample, out.width)[: out.height - 1]),
                    refresh=True,
                )
    return FAILED if sample.failed else 0


def _samples(
    directory: Path | None, config_file: Path | None, interval: float, once: bool
) -> Iterator[TopSample]:
    """Yield a sample now and every `interval` seconds. Raises UsageError if the directory has no
    store at the start.
    """
    from pagoda_tools.serve.overview import LatelyAsked

    config = configured(config_file)
    specs = remotes_of(directory, config_file)
    policy = f"{config.policy}, {config.write_policy}"
    remotes = LatelyAsked(
        lambda: [remote_usage(spec) for spec in specs], _ASK_SECONDS
    )
    before: TopSample | None = None
    directories = find_stores(directory, config_file)
    while True:
        # enough that most first samples have the answers
        patience = 60.0 if once else 0.2
        sample = _sample(
            directories, remotes.known(patience) if specs else (), before, policy
        )
        yield sample
        if once:
            return
        before = sample
        time.sleep(interval)
        directories = []
        with suppress(UsageError):  # the directory may come back
            directories = find_stores(directory, config_file)


def _sample(
    directories: Sequence[Path],
    remotes: Sequence[RemoteUsage],
    before: TopSample | None,
    policy: str,
) -> TopSample:
    found, broken = snapshots(directories)
    failed = {
        str(store): trouble
        for store, trouble in broken.items()
        if not _is_gone(store)
    }
    now = time.monotonic()
    rates = _rates(found, before, now) if before is not None else {}
    return TopSample(now, found, failed, remotes, rates, policy)


def _is_gone(store: Path) -> bool:
    """Whether a store was removed after it was found."""
    try:
        store.stat()
    except OSError as trouble:
        return isinstance(trouble, FileNotFoundError)
    return False


def _rates(
    found: Sequence[StoreStats], before: TopSample, now: float
) -> dict[Path, dict[str, float]]:
    """Return the increase of each counter per second; a new or recreated store has no rates yet."""
    old = {snapshot.directory: snapshot.counters for snapshot in before.stores}
    seconds = max(now - before.seconds, 1e-3)
    rates = {}
    for snapshot in found:
        counters = old.get(snapshot.directory)
        if counters is not None:
            rose = {
                name: snapshot.counters[name] - counters[name] for name in _RATES
            }
            if min(rose.values()) >= 0:
                rates[snapshot.directory] = {
                    name: number / seconds for name, number in rose.items()
                }
    return rates


def _as_json(sample: TopSample) -> dict[str, object]:
    stores = [
        {**snapshot.as_json(), "per_second": sample.rates.get(snapshot.directory)}
        for snapshot in sample.stores
    ]
    remotes = [remote._asdict() for remote in sample.remotes]
    said = {"time": time.time(), "policy": sample.policy, "stores": stores}
    more = usage(sample.stores)
    return {**said, "remotes": remotes, "failed": dict(sample.failed), **more}


def _view(sample: TopSample, width: int) -> list[Text]:
    """Return the lines of the view, the most important first: a small terminal shows only the first
    ones.
    """
    from rich.text import Text

    lines: list[Text] = []

    def table(rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            heading, *rest = table_lines(
                tuple(rows[0]), [tuple(row.values()) for row in rows], width
            )
            lines.extend([Text(), Text(heading, style="bold")])
            lines.extend(map(Text, rest))

    clock = time.strftime("%H:%M:%S")
    lines.append(Text(f"PagodaKV {clock}  policy {sample.policy}", style="bold"))
    if not sample.stores and not sample.failed:
        lines.append(Text(printing.NOTHING_STORED))
    stores = dict(zip(store_names(sample.stores), sample.stores, strict=True))
    for tier, snapshot in stores.items():
        chunks = f"{printing.count(snapshot.gauges['ready']):>9} chunks"
        lines.append(_bar(tier, snapshot.used_bytes, snapshot.size_bytes, chunks))
    for remote in sample.remotes:
        said = "NO ANSWER" if remote.error else "answers"
        lines.append(
            _bar(remote.tier, remote.used_bytes, remote.limit_bytes, said)
        )
    for where, trouble in sample.failed.items():
        lines += [
            Text(line, style="red")
            for line in wrapped(f"{where}: {trouble}", width)
        ]
    table(_rate_rows(stores, sample.rates))
    table(hit_rows(stores))
    for title, prefix in (("misses", "miss_"), ("drops", "drop_")):
        told = _reasons(sample.stores, prefix)
        if told:
            lines += [Text(), *map(Text, wrapped(f"{title}: {told}", width))]
    table(namespace_rows(stores, _NAMESPACES))
    if pins := _pins(stores):
        lines += [Text(), *map(Text, wrapped(f"pinned chunks: {pins}", width))]
    table(_request_rows(sample.stores))
    return lines


def _bar(tier: str, used: int | None, size: int | None, more: str) -> Text:
    """Return a line that shows how full a tier is; without a bar if its limit is unknown."""
    from rich.text import Text

    full = min(1.0, (used or 0) / size) if size else 0.0
    cells = round(full * _BAR_CELLS)
    line = Text(f"{tier:<8}")
    line.append("█" * cells, style="red" if full > 0.98 else "green").append(
        "░" * (_BAR_CELLS - cells)
    )
    share = f"{100 * full:5.1f} %" if size else " " * 7
    line.append(
        f" {share} {printing.size(used):>10} of {printing.size(size) or '-':>10}  {more}"
    )
    return line


def _rate_rows(
    stores: Mapping[str, StoreStats], rates: Mapping[Path, Mapping[str, float]]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for tier, snapshot in stores.items():
        rate = rates.get(snapshot.directory, {})
        cells: dict[str, object] = {"per second": tier}
        for name in _RATES:
            heading = (
                name.removesuffix("_bytes")
                .replace("_chunks", "")
                .replace("_", " ")
            )
            number = rate.get(name)
            cells[heading] = (
                printing.share(0, 0) if number is None else counted(name, number)
            )
        rows.append(cells)
    return rows


def _reasons(stores: Sequence[StoreStats], prefix: str) -> str:
    totals: Counter[str] = Counter()
    for snapshot in stores:
        totals.update(by_reason(snapshot.counters, prefix))
    return ", ".join(
        f"{reason} {printing.count(number)}"
        for reason, number in totals.most_common()
    )


def _pins(stores: Mapping[str, StoreStats]) -> str:
    rows = [
        (n, owner, tier)
        for tier, one in stores.items()
        for owner, n in one.pins.items()
    ]
    rows.sort(key=lambda row: -row[0])
    told = [
        f"{printable(owner)[:_OWNER_LETTERS]} {n:,} in {tier}"
        for n, owner, tier in rows[:_OWNERS]
    ]
    more = [f"and {len(rows) - _OWNERS:,} more"] if len(rows) > _OWNERS else []
    return ", ".join([*told, *more])


def _request_rows(stores: Sequence[StoreStats]) -> list[dict[str, object]]:
    last = sorted(
        (one for store in stores for one in store.requests),
        key=lambda one: -one.time,
    )
    return [
        {
            "last requests": time.strftime("%H:%M:%S", time.localtime(one.time)),
            "process": str(one.pid),
            "tokens": one.asked_tokens,
            **one.hit_tokens,
            "why not more": one.reason or "complete",
        }
        for one in last[:_REQUESTS]
    ]
