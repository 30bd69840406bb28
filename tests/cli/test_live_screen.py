"""Keys, sizes and ends of what is drawn in place, in a real terminal: `top`, `stats --watch`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pagoda.base import recorded_tiers
from pagoda.ledger.request_meters import TokenLoad
from pagoda_tools.cli import top, top_view
from pagoda_tools.cli.live_screen import Key, LiveScreen, keys_in
from pagoda_tools.cli.top_view import (
    ChosenView,
    Moment,
    TopSample,
    View,
    view_lines,
)
from pagoda_tools.serve.overview import Overview, RemoteUsage
from tests.cli.shelf import LLAMA, QWEN, RUN, host, put, refused, run_here
from tests.cli.test_top import ESCAPES, PATIENCE, Terminal


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    assert keys_in("q") == [Key.QUIT]
    assert keys_in("h?H") == [Key.HELP] * 3
    assert keys_in("\x1b[A\x1bOB\x1b[C\x1b[D") == [
        Key.UP,
        Key.DOWN,
        Key.RIGHT,
        Key.LEFT,
    ]
    assert keys_in("\x1b[5~\x1b[6~ \t") == [
        Key.PAGE_UP,
        Key.PAGE_DOWN,
        Key.PAGE_DOWN,
        Key.RIGHT,
    ]
    assert keys_in("\x1b") == []
    assert keys_in("xyz\xff\x1b[15~é") == []


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_help_fits_and_says_all(width: int) -> None:
    shown = ChosenView(is_help=True)
    nothing = TopSample(0.0, [], {}, [], {}, "hindsight", [], frozenset())
    lines = [str(line) for line in shown.lines(nothing, [], width, 60, True)]
    assert max(map(cell_len, lines)) <= width
    words = " ".join(" ".join(lines[1:]).split())
    for meaning in (
        "one step a sample; a dot: nothing was looked up, or nothing loaded",
        "so many nodes of a pool answered; the others' chunks are misses",
    ):
        assert meaning in words


@pytest.mark.slow
def test_q_h_and_arrows(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(32))
    # a long time between two samples: what is drawn in it answers a key
    live = Terminal("top", shm_root, "--interval", 3600)
    live.until("< overview > .*q quit  h help")
    live.type("h")
    live.until(r"(?s)< help >.*full store is in order")
    live.type("h")
    live.until("< overview >")
    for view in ("stores", "models", "requests", "overview", "stores"):
        live.type("\x1b[C")
        live.until(f"< {view} >")
    live.type("\x1bOD")
    live.until("< overview >")
    live.type("xz\x1b")  # no keys
    live.resize(7, 80)
    live.until(r"\+\d+ lines +< overview >")
    live.type("\x1b[B" * 50)
    live.until(r"(?s)host:layout +\w{12} +2 .*llama")
    live.type("\x1b[5~" * 9)
    live.until("no prompt was looked up")
    live.type("q")
    assert live.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [(24, 60), (10, 40), (3, 20), (1, 1), (50, 200)])
def test_a_new_size_is_followed(shm_root: Path, size: tuple[int, int]) -> None:
    put(host(shm_root), LLAMA, range(32))
    live = Terminal("top", shm_root, "--interval", 3600)
    live.until("host:layout ")
    before = len(live.text)
    live.resize(*size)
    live.until(r"[\d]" if size[1] == 1 else r"\d\d:\d\d:\d\d")
    live.type("q")
    assert live.ended() == 0
    drawn = live.text[before:]
    assert "\x1b[2J" in drawn
    frame = ESCAPES.sub("", drawn).splitlines()
    assert max(map(cell_len, frame)) <= size[1]
    assert len(frame) <= max(2, size[0])
    assert "Traceback" not in live.text


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(32))
    for command in (("top", shm_root), ("stats", shm_root, "--watch")):
        live = Terminal(*command, "--interval", 3600)
        live.until("host:layout ")
        live.type("\x03")
        assert live.ended() == 130
        assert "Traceback" not in live.text


@pytest.mark.slow
def test_it_goes_on_after_it_was_stopped(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(16))
    live = Terminal("top", shm_root, "--interval", 0.2)
    live.until("host:layout .* 1 chunk")
    live.process.send_signal(signal.SIGSTOP)
    os.waitpid(live.process.pid, os.WUNTRACED)
    termios.tcsetattr(
        live._theirs, termios.TCSANOW, live.before
    )  # the shell does
    put(ledger, LLAMA, range(48))
    live.process.send_signal(signal.SIGCONT)
    live.until("host:layout .* 3 chunks")
    live.type("q")
    assert live.ended() == 0


@pytest.mark.slow
def test_stats_are_shown_again_and_again(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(16))
    live = Terminal("stats", shm_root, "--watch", "--interval", 0.2)
    live.until(r"(?s)q quit.*no prompt was looked up yet.*llama")
    ledger.count({"lookups": 1, "asked_tokens": 100, "hit_tokens": 25})
    live.until(r"hit rate 25\.0 % of 100 tokens")
    live.type("q")
    assert live.ended() == 0
    command = [sys.executable, "-c", RUN, "stats", str(shm_root), "--watch"]
    for more in (["--json"], []):
        with subprocess.Popen(
            [*command, "--interval", "0.1", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            seen = [
                process.stdout.readline() for _ in range(40 if not more else 3)
            ]
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait(PATIENCE) == 130
        if more:
            samples = [json.loads(line) for line in seen]
            assert samples[2]["stores"][0]["name"] == "host:layout"
        else:
            assert "".join(seen).count("hit rate") >= 2
    assert "choose one" in refused("stats", "--watch", "--prometheus")
    assert "--watch" in refused("stats", "--interval", "3")
    assert "no such directory" in refused("stats", shm_root / "none", "--watch")


@pytest.mark.slow
def test_without_a_keyboard_it_says_how_to_end_it(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    live = Terminal("top", shm_root, "--interval", 0.2, stdin=subprocess.DEVNULL)
    live.until("Ctrl-C ends it")
    live.type("q")
    live.until("Ctrl-C ends it")
    assert live.end(signal.SIGINT) == 130


# ---- what is shown


def sample(root: Path, **fields: object) -> TopSample:
    from pagoda_tools.cli.stats import snapshots
    from pagoda_tools.cli.stores import find_stores

    found, broken = snapshots(find_stores(root, None))
    assert not broken
    empty = TopSample(0.0, found, {}, (), {}, "lru", (), frozenset())
    return empty._replace(**fields)


def text_of(*args: object) -> str:
    lines = view_lines(*args)  # type: ignore[arg-type]
    return "\n".join(line.plain for line in lines)


def test_idle_stores_are_folded_beside_one_that_is_used(shm_root: Path) -> None:
    used = host(shm_root, name="used")
    put(used, LLAMA, range(16))
    for number in range(5):
        idle = host(shm_root, name=f"idle{number}")
        put(idle, QWEN, range(16 * number))
        idle.close()
    # this process is no other that has it open: what it does counts
    works = frozenset({used.directory})
    text = text_of(sample(shm_root, changed=works), (), 80)
    assert "host:used " in text
    assert "and 5 idle stores with 40.00 KiB" in text
    assert not re.search("host:idle. +[█░]", text)
    everything = text_of(sample(shm_root, changed=works), (), 80, View.STORES)
    for number in range(5):
        assert f"host:idle{number} " in everything
    used.close()
    text = text_of(sample(shm_root), (), 80)  # nobody has any open
    assert "and 3 idle stores with 8.00 KiB" in text
    assert "host:idle4 " in text


def test_full_is_neutral_and_red_is_trouble(shm_root: Path) -> None:
    ledger = host(shm_root, slots=4)
    put(ledger, LLAMA, range(16 * 4))
    silent = RemoteUsage("redis", "redis://a", None, None, "no answer")
    partly = RemoteUsage("pool", "redis+pool://a", 1, 9, "", nodes=3, answering=2)
    whole = partly._replace(tier="good", answering=3)
    lines = view_lines(sample(shm_root, remotes=(silent, partly, whole)), (), 80)
    styles = {
        line.plain.split()[0]: {str(span.style) for span in line.spans}
        for line in lines
        if "█" in line.plain or "░" in line.plain
    }
    assert "100.0 %" in text_of(sample(shm_root), (), 80)
    assert styles == {
        "host:layout": {"cyan"},
        "redis": {"cyan", "red"},
        "pool": {"cyan", "yellow"},
        "good": {"cyan"},
    }
    text = "\n".join(line.plain for line in lines)
    assert "2 of 3 nodes" in text
    assert "3 of 3 nodes" in text
    assert "pool: 2 of 3 nodes answer" in text
    assert "NO ANSWER" in text


@pytest.mark.parametrize("width", [60, 72, 80, 120])
@pytest.mark.parametrize("view", list(View))
def test_every_view_fits(shm_root: Path, width: int, view: View) -> None:
    for name in ("0123456789abcdef.4", "a-store-with-a-long-name"):
        ledger = host(shm_root, name=name)
        put(ledger, LLAMA, range(64))
        ledger.count(
            {
                "lookups": 10**12,
                "hits": 10**12,
                "asked_tokens": 10**15,
                "hit_tokens": 10**15,
                "hit_tokens_host": 10**15,
                "prefill_tokens": 10**9,
                "prefill_microseconds": 10**12,
                "miss_absent": 10**9,
                "drop_not_admitted": 10**9,
            }
        )
        ledger.requests.append(
            {"asked_tokens": 1 << 20, "hit_tokens_host": 1 << 20},
            LLAMA.root,
            "other_namespace",
        )
    pool = RemoteUsage(
        "pool", "redis+pool://a", 1, 9 << 40, "", nodes=3, answering=2
    )
    rates = {
        store.directory: dict.fromkeys(top_view.RATES, 1e9)
        for store in sample(shm_root).stores
    }
    found = sample(shm_root, remotes=(pool,), rates=rates)
    history = [Moment(0.5, 2.0**40), Moment(None, 0.0)] * 20
    for line in view_lines(found, history, width, view):
        text = line.plain
        is_alone = text.startswith("  /")
        assert cell_len(text) <= width or is_alone, text


def test_the_history_has_a_dot_where_nothing_was_asked(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    history = [Moment(0.0, 0.0), Moment(None, 0.0), Moment(1.0, 4.0)]
    text = text_of(sample(shm_root), history, 80)
    assert "now ▁·█ 100.0 % hits   ··█ 4 B/s loaded" in text
    assert "now" not in text_of(sample(shm_root), [Moment(None, 0.0)], 80)


def test_a_view_scrolls_no_further_than_its_end(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, range(16))
    shown = ChosenView()
    found = sample(shm_root)
    whole = shown.lines(found, (), 80, 100, True)
    for _ in range(200):
        shown.press(Key.DOWN, 5)
        assert len(shown.lines(found, (), 80, 5, True)) == 5
    last = shown.lines(found, (), 80, 5, True)
    assert last[-1].plain == whole[-1].plain
    shown.press(Key.UP, 5)
    assert shown.lines(found, (), 80, 5, True)[-1].plain == whole[-2].plain


def test_all_commands_call_a_store_by_one_name(
    shm_root: Path, tmp_path: Path
) -> None:
    layout = "79aff30b522f22e9.4"
    for root in ("one", "two"):
        put(host(shm_root / root, name=layout), LLAMA, range(16))
        recorded_tiers.add("host", shm_root / root)
    put(host(shm_root / "two", name="df9f94a339e3219a.4"), QWEN, range(16))
    for command in (("stats",), ("top", "--once"), ("ls",)):
        _, out, _ = run_here(*command)
        for name in ("host:one/79aff3", "host:two/79aff3", "host:df9f94"):
            assert name in out, command
    _, out, _ = run_here("ls", "--json")
    names = {chunk["store"] for chunk in json.loads(out)["chunks"]}
    _, out, _ = run_here("stats", "--json")
    assert {store["name"] for store in json.loads(out)["stores"]} == names
    _, out, _ = run_here("top", "--once", "--json")
    assert {store["name"] for store in json.loads(out)["stores"]} == names


def test_a_sample_with_more_hits_than_requests_is_drawn(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members count one after the other, and a sample comes between."""
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root))
    ledger = host(shm_root)
    sampler = top._Sampler(shm_root, None)
    sampler.take(patience=0.0)
    ledger.count({"asked_tokens": 100, "hit_tokens": 130})
    after = sampler.take(patience=0.0)
    assert "100.0 % hits" in text_of(after, sampler.history, 80)


def test_a_line_as_wide_as_the_terminal_keeps_its_last_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the cursor waits on the last column, ESC [ K would erase it."""
    out = Console(force_terminal=True, width=80, height=24)
    with LiveScreen(out) as screen:
        screen.draw([Text("x" * screen.width), Text("short")])
    drawn = capsys.readouterr().out
    assert "\x1b[K" + "x" * 80 + "\n\x1b[Kshort" in drawn


def test_time_that_was_saved_is_told(shm_root: Path) -> None:
    """Of each model at its own speed, and the same in all places."""
    ledger = host(shm_root)
    counts = {
        "lookups": 1,
        "asked_tokens": 1000,
        "hit_tokens": 600,
        "load_microseconds_host": 10**8,
        "prefill_tokens": 1000,
    }
    load = TokenLoad(500, 10**8)
    slow = {**counts, "prefill_microseconds": 10**9}
    fast = {**counts, "prefill_microseconds": 3 * 10**8}
    ledger.count(slow, ("slow", "none"), load)
    ledger.count(fast, ("fast", "none"), load)
    text = run_here("stats", shm_root)[1]
    assert "hit rate 60.0 % of 2,000 tokens" in text
    # 500 s less 100 s, and 150 s less 100 s
    assert "saved about 7.5 min" in text
    shown = json.loads(run_here("stats", shm_root, "--json")[1])
    assert sum(one["saved_seconds"] for one in shown["models"]) == 450
    page = Overview(lambda: [ledger], gpu_price=3600.0).take()["saved"]
    assert isinstance(page, dict)
    assert page["first_token_seconds"] == 450
    assert page["engine_seconds"] == page["money"] == 650
    assert "1,000 tokens at 2 tokens/s" in page["engine_words"]


def test_models_and_tenants_are_shown(shm_root: Path) -> None:
    ledger = host(shm_root)
    for number in range(5):
        counts = {"lookups": 1, "asked_tokens": 100 * number + 100}
        ledger.count(counts, (f"model-{number}", "0123456789ab"))
    overview = text_of(sample(shm_root), (), 80)
    assert re.search("model-4 +1 +500 +0.0 %", overview)
    assert "model-1 " not in overview
    assert "0123456789ab" in overview
    assert "model-0 " in text_of(sample(shm_root), (), 80, View.MODELS)
