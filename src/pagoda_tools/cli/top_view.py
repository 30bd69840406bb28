"""What `pagoda top` shows: the views of one sample as lines, and which of them the user has chosen.

No I/O. Every line fits into the terminal, from 60 columns on; only what is alone on its line (a
path, a model) may be longer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagoda.base.metrics import by_reason
from pagoda_tools.cli import printing
from pagoda_tools.cli.headline import headline, trouble_line
from pagoda_tools.cli.live_screen import Key
from pagoda_tools.cli.stats import (
    counted,
    hit_rows,
    namespace_rows,
    store_names,
    usage,
    usage_rows,
)
from pagoda_tools.cli.text_tables import printable, table_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

    from pagoda.ledger.store_stats import StoreStats
    from pagoda_tools.serve.overview import RemoteUsage

RATES = (
    "lookups",
    "hit_tokens",
    "stored_bytes",
    "loaded_bytes",
    "evicted_chunks",
)
_BAR_CELLS = 20
_LEAST_BAR_CELLS = 6
_NAMESPACES = _OWNERS = 5  # the largest ones are shown
_USERS = 3  # the models and the tenants that asked for most
_OWNER_LETTERS = 32
_REQUESTS = 5  # the last ones are shown
_MOST_ROWS = 1000  # of a table in a view of its own
_IDLE_SHOWN = 3  # of idle stores, if no other store is there
STEPS = 24  # of the history
_NOTHING = "·"
_BLOCKS = "▁▂▃▄▅▆▇█"
_HELP = (
    ("q", "end (so does Ctrl-C)"),
    ("h", "this help, and back"),
    ("left, right", "other views: overview, stores, models, requests"),
    ("up, down", "scroll; space and page keys: by a screen"),
    ("", ""),
    ("hit rate", "share of the prompts' tokens that were found in a tier"),
    (
        "now",
        "one step a sample; a dot: nothing was looked up, or nothing loaded",
    ),
    ("bar", "how full a store is. A full store is in order: it evicts"),
    ("red", "trouble: a store or remote tier that cannot be used"),
    ("idle", "no process has the store open, and nothing changed"),
    (
        "2 of 3 nodes",
        "so many nodes of a pool answered; the others' chunks are misses",
    ),
)


class View(StrEnum):
    """What is shown below the first lines."""

    OVERVIEW = "overview"
    STORES = "stores"
    MODELS = "models"
    REQUESTS = "requests"


class Moment(NamedTuple):
    """What happened between two samples, in all stores together; per second, except for the hit
    rate.
    """

    hit_rate: float | None  # None: no prompt was looked up
    loaded_bytes: float


_QUIET = Moment(None, 0.0)


class TopSample(NamedTuple):
    """The state at one moment, and by directory the rates of counters since the sample before.

    `failed`: the trouble with each store that cannot be read; `troubled`: the tiers that cannot be
    used and fail the command.
    """

    seconds: float
    stores: Sequence[StoreStats]
    failed: Mapping[str, str]
    remotes: Sequence[RemoteUsage]
    rates: Mapping[Path, Mapping[str, float]]
    policy: str
    troubled: Sequence[str]
    changed: frozenset[Path]  # stores whose counters rose


@dataclass
class ChosenView:
    """What the user has chosen to see."""

    view: View = View.OVERVIEW
    is_help: bool = False
    first: int = 0  # the line that is at the top

    def press(self, key: Key, height: int) -> None:
        """Follow a key."""
        views = list(View)
        page = max(1, height - 2)
        steps = {
            Key.UP: -1,
            Key.DOWN: 1,
            Key.PAGE_UP: -page,
            Key.PAGE_DOWN: page,
        }
        if key is Key.HELP:
            self.is_help = not self.is_help
            self.first = 0
        elif key in (Key.LEFT, Key.RIGHT):
            step = 1 if key is Key.RIGHT else -1
            self.view = views[(views.index(self.view) + step) % len(views)]
            self.is_help = False
            self.first = 0
        else:
            self.first += steps.get(key, 0)

    def lines(
        self,
        sample: TopSample,
        history: Sequence[Moment],
        width: int,
        height: int,
        has_keys: bool,
    ) -> list[Text]:
        """Return the lines that the terminal shows: a title, and a part of the view."""
        from rich.text import Text

        if self.is_help:
            body = [Text(line) for line in _help_lines(width)]
        else:
            body = view_lines(sample, history, width, self.view)[1:]
        room = max(1, height - 1)
        self.first = max(0, min(self.first, len(body) - room))
        part = body[self.first : self.first + room]
        return [self._title(sample, width, len(body) - room, has_keys), *part]

    def _title(
        self, sample: TopSample, width: int, hidden: int, has_keys: bool
    ) -> Text:
        from rich.text import Text

        clock = time.strftime("%H:%M:%S")
        title = _title(sample)
        keys = "q quit  h help" if has_keys else "Ctrl-C ends it"
        right = keys
        if has_keys:
            below = hidden - self.first
            more = f"+{below} lines  " * (below > 0)
            right = f"{more}< {'help' if self.is_help else self.view} >  {keys}"
        for short in (f"PagodaKV {clock}", clock):
            if len(title) + 2 + len(right) > width:
                title = Text(short, style="bold")
        space = width - len(title) - len(right)
        return title.append(" " * max(1, space)).append(right, style="dim")


def _help_lines(width: int) -> list[str]:
    """Return the help: each word, and beside it what it means."""
    margin = 1 + max(len(word) for word, _ in _HELP)
    lines = []
    for word, meaning in _HELP:
        first, *more = wrapped(meaning, width - margin) or [""]
        lines.append(f"{word:<{margin}}{first}".rstrip())
        lines += [" " * margin + line for line in more]
    return lines


def by_name(stores: Sequence[StoreStats]) -> dict[str, StoreStats]:
    """Return the stores by their names."""
    return dict(zip(store_names(stores), stores, strict=True))


def _title(sample: TopSample) -> Text:
    from rich.text import Text

    clock = time.strftime("%H:%M:%S")
    return Text(f"PagodaKV {clock}  policy {sample.policy}", style="bold")


def view_lines(
    sample: TopSample,
    history: Sequence[Moment],
    width: int,
    view: View = View.OVERVIEW,
) -> list[Text]:
    """Return the lines of a view, the most important first: a small terminal shows only the first
    ones.
    """
    from rich.text import Text

    lines = [_title(sample)]
    stores = by_name(sample.stores)
    if not stores and not sample.failed:
        lines.append(Text(printing.NOTHING_STORED))
    if sample.troubled:
        lines.append(Text(trouble_line(len(sample.troubled)), style="red"))
    for text in headline(stores, sample.remotes):
        lines += [Text(line) for line in wrapped(text, width)]
    if any(moment != _QUIET for moment in history):
        lines.append(_history_line(history, width))
    reasons = [f"{where}: {text}" for where, text in sample.failed.items()]
    reasons += [remote.error for remote in sample.remotes if remote.error]
    for text in reasons:
        lines += [Text(line, style="red") for line in wrapped(text, width)]
    lines += _PARTS[view](sample, stores, width)
    return lines


def _overview(
    sample: TopSample, stores: Mapping[str, StoreStats], width: int
) -> list[Text]:
    active, idle = _idle_apart(sample, stores)
    return [
        *_bars(active, idle, sample.remotes, width),
        *_table(_rate_rows(active, sample.rates), width),
        *_table(hit_rows(stores), width),
        *_reason_lines(sample.stores, width),
        *_usage_tables(sample, width, _USERS),
        *_table(namespace_rows(stores, _NAMESPACES), width),
        *_pin_lines(stores, width),
        *_table(_request_rows(sample.stores, _REQUESTS), width),
    ]


def _stores_view(
    sample: TopSample, stores: Mapping[str, StoreStats], width: int
) -> list[Text]:
    from rich.text import Text

    lines = _bars(stores, {}, sample.remotes, width)
    lines += _table(_rate_rows(stores, sample.rates), width)
    rows = [
        {
            "store": name,
            "processes": printing.count(snapshot.gauges["members"]),
            "evicted": printing.count(snapshot.counters["evicted_chunks"]),
            "damaged": printing.count(snapshot.counters["failed_checks"]),
            "directory": str(snapshot.directory),
        }
        for name, snapshot in stores.items()
    ]
    lines += _table(rows, width)
    if sample.remotes:
        lines.append(Text())
    for remote in sample.remotes:
        address = f"{remote.tier}: {remote.address}"
        texts = [address, *remote.warnings]
        style = "red" if remote.error else ""
        for text in texts:
            lines += [Text(line, style=style) for line in wrapped(text, width)]
    return lines


def _models_view(
    sample: TopSample, stores: Mapping[str, StoreStats], width: int
) -> list[Text]:
    return [
        *_usage_tables(sample, width, _MOST_ROWS),
        *_table(namespace_rows(stores, _MOST_ROWS), width),
        *_pin_lines(stores, width),
    ]


def _usage_tables(sample: TopSample, width: int, most: int) -> list[Text]:
    """Return what models and tenants asked for, hit and saved: those that asked for most."""
    lines = []
    for rows in usage(sample.stores).values():
        lines += _table(usage_rows(rows, most), width)
    return lines


def _requests_view(
    sample: TopSample, stores: Mapping[str, StoreStats], width: int
) -> list[Text]:
    return [
        *_table(hit_rows(stores), width),
        *_reason_lines(sample.stores, width),
        *_table(_request_rows(sample.stores, _MOST_ROWS), width),
    ]


_PARTS: Mapping[
    View, Callable[[TopSample, Mapping[str, StoreStats], int], list[Text]]
] = {
    View.OVERVIEW: _overview,
    View.STORES: _stores_view,
    View.MODELS: _models_view,
    View.REQUESTS: _requests_view,
}


def _idle_apart(
    sample: TopSample, stores: Mapping[str, StoreStats]
) -> tuple[dict[str, StoreStats], dict[str, StoreStats]]:
    """Return the stores that are shown one by one, and the idle ones that are not.

    A store is idle if no process has it open and none of its counters rose. Without any other, the
    fullest idle ones are shown.
    """
    active = {
        name: snapshot
        for name, snapshot in stores.items()
        if snapshot.gauges["members"] or snapshot.directory in sample.changed
    }
    idle = {
        name: snapshot for name, snapshot in stores.items() if name not in active
    }
    if active:
        return active, idle
    fullest = sorted(idle, key=lambda name: -idle[name].used_bytes)
    shown = set(fullest[:_IDLE_SHOWN])
    return (
        {name: idle[name] for name in idle if name in shown},
        {name: idle[name] for name in idle if name not in shown},
    )


def _history_line(history: Sequence[Moment], width: int) -> Text:
    """Return the last samples as small columns; an unknown hit rate is an empty step."""
    from rich.text import Text

    room = width - len("now  100.0 % hits   1,023.00 GiB/s loaded")
    steps = max(1, min(STEPS, room // 2))
    last = list(history)[-steps:]
    rates = [moment.hit_rate for moment in last]
    most = max(moment.loaded_bytes for moment in last)
    loaded = [
        moment.loaded_bytes / most if moment.loaded_bytes else None
        for moment in last
    ]
    rate = rates[-1]
    share = printing.share(0, 0) if rate is None else printing.share(rate, 1.0)
    line = Text("now ")
    line.append(_columns(rates), style="cyan")
    line.append(f" {share} hits   ")
    line.append(_columns(loaded), style="cyan")
    speed = printing.size(last[-1].loaded_bytes)
    return line.append(f" {speed}/s loaded")


def _columns(values: Sequence[float | None]) -> str:
    """Return a column for each value from 0 to 1; a dot where there is none. Pure."""
    highest = len(_BLOCKS) - 1
    return "".join(
        _NOTHING if value is None else _BLOCKS[round(value * highest)]
        for value in values
    )


def _bars(
    shown: Mapping[str, StoreStats],
    idle: Mapping[str, StoreStats],
    remotes: Sequence[RemoteUsage],
    width: int,
) -> list[Text]:
    """Return one line for each store and remote tier, and one for all the idle stores.

    Full is the ordinary state of a cache, so it has no colour of its own.
    """
    from rich.text import Text

    bars = [
        _Bar(
            name,
            snapshot.used_bytes,
            snapshot.grown_bytes,
            _chunks(snapshot.gauges["ready"]),
        )
        for name, snapshot in shown.items()
    ]
    for remote in remotes:
        style = "red" if remote.error else "" if remote.is_whole else "yellow"
        bars.append(
            _Bar(
                remote.tier,
                remote.used_bytes,
                remote.limit_bytes,
                remote.state,
                style,
            )
        )
    lines = _bar_lines(bars, width)
    if idle:
        used = sum(snapshot.used_bytes for snapshot in idle.values())
        stores = f"{len(idle)} idle store{'s' * (len(idle) > 1)}"
        text = f"and {stores} with {printing.size(used)} (view stores: right)"
        lines.append(Text(text, style="dim"))
    return lines


def _chunks(number: int) -> str:
    return f"{printing.count(number)} chunk{'s' * (number != 1)}"


class _Bar(NamedTuple):
    """A tier's line. `limit`: None if it is not known; `note`: what is at its end, with its
    style.
    """

    name: str
    used: int | None
    limit: int | None
    note: str
    style: str = ""


def _bar_lines(bars: Sequence[_Bar], width: int) -> list[Text]:
    """Return the lines; where there is little room, bars are shorter, and chunks are not
    counted.
    """
    from rich.text import Text

    if not bars:
        return []
    used = [printing.size(bar.used) for bar in bars]
    limits = [printing.size(bar.limit) or "-" for bar in bars]
    used_room = max(map(len, used))
    limit_room = max(map(len, limits))
    names = max(len(bar.name) for bar in bars)
    notes = max(len(bar.note) for bar in bars)
    numbers = len("  100.0 %  of ") + used_room + limit_room
    cells = width - names - numbers - notes - 2
    has_notes = cells >= _LEAST_BAR_CELLS
    if not has_notes:
        cells = width - names - numbers
    cells = max(_LEAST_BAR_CELLS, min(_BAR_CELLS, cells))
    names = max(1, min(names, width - cells - numbers))
    lines = []
    for bar, used_text, limit_text in zip(bars, used, limits, strict=True):
        full = min(1.0, (bar.used or 0) / bar.limit) if bar.limit else 0.0
        filled = round(full * cells)
        share = f"{100 * full:5.1f} %" if bar.limit else " " * 7
        name = bar.name
        if len(name) > names:
            name = f"{name[: names - 1]}…"
        line = Text(f"{name:<{names}} ")
        line.append("█" * filled + "░" * (cells - filled), style="cyan")
        if has_notes or not bar.style:
            line.append(
                f" {share} {used_text:>{used_room}} of {limit_text:>{limit_room}}"
            )
        note = f"  {bar.note:>{notes}}" if has_notes else f" {bar.note}"
        if has_notes or bar.style:
            line.append(note, style=bar.style)
        lines.append(line)
    return lines


def _table(rows: Sequence[Mapping[str, object]], width: int) -> list[Text]:
    """Return a table with an empty line above; in a narrow terminal without its last columns."""
    from rich.text import Text

    if not rows:
        return []
    columns = list(rows[0])
    while True:
        cells = [[row[name] for name in columns] for row in rows]
        heading, *rest = table_lines(columns, cells, width)
        if len(heading) <= width or len(columns) < 3:
            break
        del columns[-1]
    return [Text(), Text(heading, style="bold"), *map(Text, rest)]


def _rate_rows(
    stores: Mapping[str, StoreStats], rates: Mapping[Path, Mapping[str, float]]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, snapshot in stores.items() if rates else ():
        rate = rates.get(snapshot.directory, {})
        cells: dict[str, object] = {"per second": name}
        for counter in RATES:
            heading = (
                counter.removesuffix("_bytes")
                .replace("_chunks", "")
                .replace("_", " ")
            )
            number = rate.get(counter)
            cells[heading] = (
                printing.share(0, 0)
                if number is None
                else counted(counter, number)
            )
        rows.append(cells)
    return rows


def _reason_lines(stores: Sequence[StoreStats], width: int) -> list[Text]:
    from rich.text import Text

    lines = []
    for title, prefix in (("misses", "miss_"), ("drops", "drop_")):
        totals: Counter[str] = Counter()
        for snapshot in stores:
            totals.update(by_reason(snapshot.counters, prefix))
        told = ", ".join(
            f"{reason} {printing.count(number)}"
            for reason, number in totals.most_common()
        )
        if told:
            lines += [Text(), *map(Text, wrapped(f"{title}: {told}", width))]
    return lines


def _pin_lines(stores: Mapping[str, StoreStats], width: int) -> list[Text]:
    from rich.text import Text

    rows = [
        (n, owner, name)
        for name, one in stores.items()
        for owner, n in one.pins.items()
    ]
    rows.sort(key=lambda row: -row[0])
    told = [
        f"{printable(owner)[:_OWNER_LETTERS]} {n:,} in {name}"
        for n, owner, name in rows[:_OWNERS]
    ]
    if not told:
        return []
    if len(rows) > _OWNERS:
        told.append(f"and {len(rows) - _OWNERS:,} more")
    pins = ", ".join(told)
    return [Text(), *map(Text, wrapped(f"pinned chunks: {pins}", width))]


def _request_rows(
    stores: Sequence[StoreStats], most: int
) -> list[dict[str, object]]:
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
        for one in last[:most]
    ]
