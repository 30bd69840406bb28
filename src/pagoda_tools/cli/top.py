"""`pagoda top`: shows live what the stores hold and do; `--once` for one sample, `--json` for
programs.

In a terminal the view (`top_view`) is drawn in place (`live_screen`), and keys choose what is
shown.
If lines cannot be rewritten (a pipe, TERM=dumb), each sample is printed below the one before.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda.policy import DEFAULT_OBJECTIVE
from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.live_screen import Key, LiveScreen
from pagoda_tools.cli.remote_stores import exit_code, remotes_of
from pagoda_tools.cli.stats import remote_usage, snapshots, usage
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Configured,
    Directory,
    configured,
    find_stores,
    remark,
)
from pagoda_tools.cli.top_view import (
    RATES,
    STEPS,
    ChosenView,
    Moment,
    TopSample,
    by_name,
    view_lines,
)

if TYPE_CHECKING:
    from rich.console import Console

    from pagoda.ledger.store_stats import StoreStats

_ASK_SECONDS = 10.0  # the pause between two questions to the remote tiers


def top(
    directory: Directory = None,
    interval: Annotated[float, Option(min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, Option("--once")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Show live what the stores hold, what hits and what is copied. With --json: one line per
    sample.

    Keys: q ends it, h shows help, left and right choose a view, up and down scroll.

    Args:
        interval: Seconds between two samples.
        once: Show one sample and end.
    """
    sampler = _Sampler(directory, config)
    out = printing.console()
    in_place = out.is_terminal and not out.is_dumb_terminal
    if in_place and not once and not as_json:
        sample = _live(sampler, interval, out)
    else:
        while True:
            sample = sampler.take(patience=60.0 if once else 0.2)
            if as_json:
                print(json.dumps(_as_json(sample), default=str), flush=True)
            else:
                for line in view_lines(sample, sampler.history, out.width):
                    out.print(line, soft_wrap=True)
                out.file.flush()
            if once:
                break
            time.sleep(interval)
    return exit_code(sampler.named, sample.troubled)


def _live(sampler: _Sampler, interval: float, out: Console) -> TopSample:
    """Draw a view in place until the user ends it; return the last sample."""
    shown = ChosenView()
    with LiveScreen(out) as screen:
        while True:
            sample = sampler.take(patience=0.2)
            until = time.monotonic() + interval
            while True:
                lines = shown.lines(
                    sample,
                    sampler.history,
                    screen.width,
                    screen.height,
                    screen.has_keys,
                )
                screen.draw(lines)
                key = screen.wait(until)
                if key is Key.QUIT:
                    return sample
                if key is None:
                    break
                shown.press(key, screen.height)


class _Sampler:
    """Takes the samples of one command, and remembers what happened in the last ones.

    Raises UsageError if the directory has no store at the start.
    """

    def __init__(self, directory: Path | None, config_file: Path | None) -> None:
        from pagoda_tools.serve.overview import LatelyAsked

        config = configured(config_file)
        self._find = partial(find_stores, directory, config_file)
        self.named = Configured(directory, config_file)
        specs = remotes_of(directory, config_file)
        parts = [config.policy, config.write_policy]
        if config.objective != DEFAULT_OBJECTIVE:
            parts.insert(1, f"objective {config.objective}")
        self._policy = ", ".join(parts)
        self._remotes = LatelyAsked(
            lambda: [remote_usage(spec) for spec in specs], _ASK_SECONDS
        )
        self._has_remotes = bool(specs)
        self._directories = self._find()
        self._before: TopSample | None = None
        self.history: deque[Moment] = deque(maxlen=STEPS)

    def take(self, patience: float) -> TopSample:
        """Return the state now. `patience`: seconds to wait for the remote tiers."""
        if self._before is not None:
            self._directories = []
            with suppress(UsageError):  # the directory may come back
                self._directories = self._find()
        answers = self._remotes.known(patience) if self._has_remotes else ()
        found, broken = snapshots(self._directories)
        failed = {
            str(store): trouble
            if self.named.names(store)
            else remark(store, trouble)
            for store, trouble in broken.items()
        }
        remotes = [
            remote
            if not remote.error or self.named.names(remote.address)
            else remote._replace(error=remark(remote.address, remote.error))
            for remote in answers
        ]
        places = [
            *failed,
            *(remote.address for remote in remotes if remote.error),
        ]
        now = time.monotonic()
        before = self._before
        rose = _increases(found, before) if before is not None else {}
        seconds = max(now - before.seconds, 1e-3) if before is not None else 1.0
        sample = TopSample(
            now,
            found,
            failed,
            remotes,
            {
                store: {name: count[name] / seconds for name in RATES}
                for store, count in rose.items()
            },
            self._policy,
            [place for place in places if self.named.names(place)],
            frozenset(
                store for store, count in rose.items() if any(count.values())
            ),
        )
        if before is not None:
            self.history.append(_moment(rose, seconds))
        self._before = sample
        return sample


def _increases(
    found: Sequence[StoreStats], before: TopSample
) -> dict[Path, dict[str, int]]:
    """Return by how much each counter rose; a new or recreated store is left out."""
    old = {snapshot.directory: snapshot.counters for snapshot in before.stores}
    increases = {}
    for snapshot in found:
        counters = old.get(snapshot.directory)
        if counters is not None:
            rose = {
                name: number - counters[name]
                for name, number in snapshot.counters.items()
            }
            if min(rose.values()) >= 0:
                increases[snapshot.directory] = rose
    return increases


def _moment(rose: Mapping[Path, Mapping[str, int]], seconds: float) -> Moment:
    total: Counter[str] = Counter()
    for counts in rose.values():
        total.update(counts)
    asked = total["asked_tokens"]
    return Moment(
        # a sample may come between the two counters
        min(1.0, total["hit_tokens"] / asked) if asked else None,
        total["loaded_bytes"] / seconds,
    )


def _as_json(sample: TopSample) -> dict[str, object]:
    stores = [
        {
            "name": name,
            **snapshot.as_json(),
            "per_second": sample.rates.get(snapshot.directory),
        }
        for name, snapshot in by_name(sample.stores).items()
    ]
    remotes = [remote._asdict() for remote in sample.remotes]
    said = {"time": time.time(), "policy": sample.policy, "stores": stores}
    more = usage(sample.stores)
    return {**said, "remotes": remotes, "failed": dict(sample.failed), **more}
