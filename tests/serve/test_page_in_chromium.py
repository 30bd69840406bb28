"""The operator's page in a real Chromium: it renders, goes on by itself, is used by keyboard, and
changes stores.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda import Cache, Namespace
from testbed.patience import wait_until
from testbed.programs import lacking, path_of
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    TOKEN,
    Server,
    dense_kv,
    server,
    tokens_of,
)

CHROMIUM = path_of("chromium")
MARKUP = "<img src=x onerror=document.title='broken'>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason=lacking("chromium"),
    ),
]


# Replaces the stream of events: a test sends what a server would. The first `refused` connections
# are refused.
FAKE_STREAM = """
const real = window.fetch;
window.streams = [];
window.refused = 0;
window.fetch = (path, options) => {
  if (path !== "events") return real(path, options);
  if (window.refused > 0) {
    window.refused -= 1;
    return Promise.resolve(new Response("{}", { status: window.refusal || 503 }));
  }
  let feed;
  const body = new ReadableStream({ start(controller) { feed = controller; } });
  options.signal.addEventListener("abort", () => { feed.closed = true; });
  window.streams.push(feed);
  return Promise.resolve(new Response(body));
};
window.send = (event) => {
  const text = `event: snapshot\\ndata: ${JSON.stringify(event)}\\n\\n`;
  window.streams.at(-1).enqueue(new TextEncoder().encode(text));
};
"""


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="pagoda-test-", dir="/dev/shm"
    ) as made:
        yield Path(made)


def opened(root: Path, namespace: Namespace) -> Cache:
    return Cache(
        namespace=namespace,
        layout=LAYOUT,
        chunk_tokens=CHUNK,
        host_path=str(root),
        host_size="8MiB",
    )


@pytest.fixture(scope="module")
def cache(root: Path) -> Iterator[Cache]:
    with opened(root, Namespace(MARKUP, salt="tenant A")) as made:
        made.store(tokens_of(1, 4), dense_kv(1, 4))
        yield made


@pytest.fixture(scope="module")
def serving(root: Path, cache: Cache) -> Iterator[Server]:
    with server(root, "--gpu-price", "2.5") as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="needs the dev group: pip install --group dev",
    )
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield made
        made.close()


@pytest.fixture
def page(
    browser, serving: Server, request: pytest.FixtureRequest
) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """The page after the login; a test fails if the console had an error."""
    context = browser.new_context(**getattr(request, "param", {}))
    context.add_cookies(
        [
            {
                "name": "pagoda",
                "value": _cookie(serving),
                "url": serving.url,
                "httpOnly": True,
                "sameSite": "Strict",
            }
        ]
    )
    opened = context.new_page()
    errors: list[str] = []
    opened.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type == "error" else None
        ),
    )
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(serving.url)
    opened.wait_for_selector("#storeys .storey")
    yield opened
    context.close()
    assert errors == []


def options_of(page) -> list[str]:  # type: ignore[no-untyped-def]
    """Return the values of the models that can be chosen."""
    values = page.locator("#model option").evaluate_all(
        "options => options.map((one) => one.value)"
    )
    assert isinstance(values, list)
    return values


def expect(page, selector: str, text: str) -> None:  # type: ignore[no-untyped-def]
    """Wait until an element has a text."""
    from playwright import sync_api  # here, because it takes long

    sync_api.expect(page.locator(selector)).to_contain_text(text, timeout=60_000)


def _cookie(serving: Server) -> str:
    answer = serving.ask("POST", "/login", f"token={TOKEN}".encode(), FORM)
    return answer.headers["Set-Cookie"].partition("=")[2].partition(";")[0]


def test_the_token_is_asked_for_and_opens_the_page(
    browser, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(serving.url)
    opened.keyboard.type("a wrong token")  # the field has the focus
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#token")
    assert opened.locator("#storeys").count() == 0
    opened.keyboard.type(TOKEN)
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#storeys .storey")
    opened.click("#log-out")
    opened.wait_for_selector("#token")
    assert opened.locator("#storeys").count() == 0
    opened.fill("#token", TOKEN)
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#storeys .storey")
    context.clear_cookies()  # it has expired meanwhile
    opened.select_option("#model", options_of(opened)[-1])
    opened.fill("#prompt", "9999999999")
    opened.click("text=Explain")
    opened.fill("#login #token", TOKEN)
    opened.keyboard.press("Enter")
    expect(opened, "#answer .trouble", "token")  # why it was refused
    assert not opened.locator("#login").is_visible()
    context.close()


def test_it_shows_the_stores_and_goes_on_by_itself(page, cache: Cache) -> None:  # type: ignore[no-untyped-def]
    cache.clear(everything=True)
    cache.store(tokens_of(1, 4), dense_kv(1, 4))
    expect(page, "#storeys", "4 chunks")
    assert "host memory" in page.inner_text("#storeys")
    assert MARKUP in page.inner_text("#namespaces")
    assert page.title() == "PagodaKV"
    assert "tenant A" not in page.content()
    cache.store(tokens_of(2, 3), dense_kv(2, 3))
    hit = cache.retrieve(tokens_of(2, 4), dense_kv(3, 4))
    assert hit.num_tokens == 3 * CHUNK
    expect(page, "#storeys", "7 chunks")
    expect(page, "#misses", "absent")
    page.focus("#namespaces button")
    expect(page, "#requests", "absent")
    row = page.locator("#requests tr").first.inner_text()
    assert MARKUP in row
    assert str(4 * CHUNK) in row
    assert f"host {3 * CHUNK}" in row
    assert str(os.getpid()) in row
    assert "live" in page.inner_text("#live")
    cache.lookup(tokens_of(3, 1))
    expect(page, "#requests tr >> nth=1", "absent")
    # it is where it was
    assert page.evaluate("document.activeElement.textContent") == "Clear…"


def test_it_is_used_by_keyboard(page, cache: Cache) -> None:  # type: ignore[no-untyped-def]
    cache.store(tokens_of(1, 4), dense_kv(1, 4))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(10):
        if page.evaluate("document.activeElement.id") == "prompt":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("not tokens")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "whole numbers" in page.inner_text("#answer")
    page.fill("#prompt", ", ".join(map(str, tokens_of(1, 5))))
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector("#answer table")
    assert f"Of {5 * CHUNK} tokens" in page.inner_text("#answer")
    assert str(4 * CHUNK) in page.inner_text("#answer")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Pin it"
    page.keyboard.press("Enter")
    expect(page, "#pins", "pagoda")
    cache.pin(tokens_of(1, 2), owner="another")
    page.click('[aria-label="End the pins of another"]')
    expect(page, "#answer", "2 chunks are no longer pinned by another")
    assert "pagoda" in page.inner_text("#pins")
    page.click("#pins button")
    expect(page, "#pins", "Nothing is pinned")


def test_clearing_asks_before_and_clears_what_it_names(
    page, root: Path, cache: Cache
) -> None:  # type: ignore[no-untyped-def]
    sent: list[str] = []
    page.on(
        "request",
        lambda request: (
            sent.append(request.url) if request.method == "POST" else None
        ),
    )
    with opened(root, Namespace("another")) as neighbour:
        for one in (cache, neighbour):
            one.store(tokens_of(1, 4), dense_kv(1, 4))
        for button in ('[aria-label="Clear another"]', "#clear-all"):
            page.click(button)
            assert page.locator("#confirm").is_visible()
            assert page.evaluate("document.activeElement.value") == "no"
            page.keyboard.press("Escape")
            assert not page.locator("#confirm").is_visible()
            page.click(button)
            page.click("text=Keep them")
        page.click('[aria-label="Clear another"]')
        page.click("#confirm .danger")
        expect(page, "#answer", "4 chunks were removed")
        assert neighbour.lookup(tokens_of(1, 4)).num_tokens == 0
        assert cache.lookup(tokens_of(1, 4)).num_tokens == 4 * CHUNK
        page.click("#clear-all")
        page.click("#confirm .danger")
        wait_until(lambda: cache.lookup(tokens_of(1, 4)).num_tokens == 0)
        expect(page, "#answer", "were removed")
        assert len(sent) == 2


def test_the_page_shows_what_the_server_sends(browser, serving: Server) -> None:  # type: ignore[no-untyped-def]
    stats = serving.ask("GET", "/stats.json").json
    tier = {
        "chunks": None,
        "used_bytes": None,
        "size_bytes": None,
        "hit_tokens": None,
        "address": "",
        "trouble": "",
    }
    stats["tiers"] = [
        {
            **tier,
            "kind": "host",
            "title": "host memory",
            "used_bytes": 25,
            "size_bytes": 100,
            "hit_tokens": 20,
        },
        {
            **tier,
            "kind": "disk",
            "title": "disk",
            "used_bytes": 1 << 30,
            "hit_tokens": 4000,
        },
        {
            **tier,
            "kind": "remote",
            "title": "redis",
            "trouble": f"refused {MARKUP}",
        },
    ]
    hits = {"host": 0, "disk": 64, "remote": 32}
    request = {
        "time": 0,
        "pid": 7,
        "asked_tokens": 100,
        "hit_tokens": hits,
        "namespace": "",
        "reason": "evicted",
    }
    stats["requests"] = [{**request, "fields": {"model": MARKUP}}]
    stats["sample"] = {
        "time": 9.0,
        "end": stats["machine_seconds"],
        "seconds": 2.0,
        "hit_tokens": {"host": 20, "disk": 4000, "remote": 600},
    }
    stats["history"] = [stats["sample"]]
    stats["saved"] = dict.fromkeys(stats["saved"])  # type: ignore[attr-defined]
    row = {
        "namespace": "c7" * 32,
        "chunks": {"disk": 3},
        "bytes": 5,
        "fields": {"model": MARKUP, "lora": MARKUP},
    }
    stats |= {
        "namespaces": 50 * [row],
        "more_namespaces": 9_950,
        "troubles": [f"a store is broken {MARKUP}"],
    }
    stats |= {
        "pins": [{"tier": "host", "owner": MARKUP, "chunks": 3}],
        "more_pins": 12,
        "misses": {"evicted": 5},
    }
    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.add_init_script(FAKE_STREAM + "window.refused = 1;")
    context.set_extra_http_headers({"Authorization": f"Bearer {TOKEN}"})
    page.goto(serving.url)
    expect(page, "#live", "no connection")
    page.clock.run_for(3500)
    page.evaluate("event => window.send(event)", stats)
    expect(page, "#requests", "disk 64, remote 32")
    assert "evicted" in page.inner_text("#requests")
    assert MARKUP in page.inner_text("#requests")
    host, disk, redis = (
        page.locator("#storeys .storey").nth(number) for number in range(3)
    )
    assert "10/s now" in host.inner_text()
    assert page.locator("#tower .floor >> nth=0 >> .window.lit").count() == 3
    assert "2K/s now" in disk.inner_text()
    assert "1.0 GiB" in disk.inner_text()
    assert f"refused {MARKUP}" in redis.inner_text()
    assert "/s now" not in redis.inner_text()
    assert page.locator("#saved .unknown").all_inner_texts() == 3 * ["unknown"]
    assert page.locator("#namespaces tr").count() == 51
    assert "and 9,950 more" in page.inner_text("#namespaces")
    assert MARKUP in page.inner_text("#pins")
    assert "and 12 more" in page.inner_text("#pins")
    assert f"a store is broken {MARKUP}" in page.inner_text("#troubles")
    assert "more memory or disk" in page.inner_text("#misses")
    assert page.title() == "PagodaKV"
    assert page.locator("img").count() == 0
    context.close()


@pytest.mark.parametrize(
    "page",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "dark", "viewport": {"width": 360, "height": 740}},
    ],
    indirect=True,
    ids=["light", "dark", "phone"],
)
def test_it_has_no_fault_for_people_who_need_help_to_read_it(
    page,
) -> None:  # type: ignore[no-untyped-def]
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install --group dev"
    )
    page.select_option("#model", options_of(page)[-1])
    page.fill("#prompt", "1 2 3")
    page.click("text=Explain")
    page.wait_for_selector("#answer table")
    for _ in range(2):
        found = axe.Axe().run(page).response
        assert found["passes"]
        assert [
            (fault["id"], [node["html"] for node in fault["nodes"]])
            for fault in found["violations"]
        ] == []
        # again with old figures, which are grey
        page.evaluate("document.body.classList.add('stale')")
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )


@pytest.fixture
def fed(browser, serving: Server) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """The page with a clock and a stream of events that stand still until the test moves them."""
    context = browser.new_context()
    context.set_extra_http_headers({"Authorization": f"Bearer {TOKEN}"})
    page = context.new_page()
    page.clock.install()
    page.add_init_script(FAKE_STREAM)
    page.goto(serving.url)
    wait_until(lambda: page.evaluate("window.streams.length === 1"))
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)
    yield page
    context.close()


def send(page, serving: Server, **changes: object) -> None:  # type: ignore[no-untyped-def]
    """Send the page the present overview of the server, with some changes."""
    stats = serving.ask("GET", "/stats.json").json
    event = {**stats, "spans": [], **changes}
    page.evaluate("event => window.send(event)", event)
    page.wait_for_selector("#storeys .storey")


def is_grey(page) -> bool:  # type: ignore[no-untyped-def]
    """Whether the figures are in the colour of old ones."""
    return bool(
        page.evaluate(
            """() => {
              const figure = getComputedStyle(document.querySelector("#saved .figure"));
              return figure.color !== getComputedStyle(document.body).color;
            }"""
        )
    )


def test_it_is_live_only_while_events_come(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    send(fed, serving)
    expect(fed, "#live", "live")
    assert not is_grey(fed)
    for _ in range(5):
        fed.clock.run_for(2000)
        send(fed, serving)
    assert fed.inner_text("#live") == "live"
    fed.clock.run_for(7000)
    assert fed.inner_text("#live") == "no data for 7 s"
    assert is_grey(fed)
    assert "now" not in fed.inner_text("#storeys")
    assert "7 s ago" in fed.inner_text("#chart")
    assert "(no data)" in fed.title()
    send(fed, serving)
    expect(fed, "#live", "live")
    assert not is_grey(fed)
    assert fed.title() == "PagodaKV"


def test_a_silent_connection_is_given_up_and_another_one_is_made(
    fed, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    send(fed, serving)
    fed.clock.run_for(12_000)
    wait_until(lambda: fed.evaluate("window.streams.length === 2"))
    assert fed.evaluate("window.streams[0].closed") is True
    assert fed.inner_text("#live") == "no data for 12 s"
    # not again at once: the new one has time to answer
    fed.clock.run_for(5000)
    assert fed.evaluate("window.streams.length") == 2
    send(fed, serving)
    expect(fed, "#live", "live")
    # one that was refused and then hangs is given up, too
    fed.evaluate("window.refused = 1; window.streams.at(-1).close()")
    expect(fed, "#live", "no connection")
    fed.clock.run_for(3500)
    fed.clock.run_for(3500)
    wait_until(lambda: fed.evaluate("window.streams.length === 3"))
    fed.clock.run_for(11_000)
    wait_until(lambda: fed.evaluate("window.streams.length === 4"))
    send(fed, serving, version="later")
    expect(fed, "#live", "live")
    assert fed.locator("#renewed").is_visible()


def test_after_a_sleep_the_page_does_not_say_live(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    """The timers of a hidden page stand still, and the steady clock of a sleeping laptop too."""
    send(fed, serving)
    fed.evaluate(
        """() => {
          const before = Date.now;
          Date.now = () => before() + 3600_000;
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    assert fed.inner_text("#live") == "no data for 60 min"
    assert is_grey(fed)
    # the old connection may be dead without a word
    wait_until(lambda: fed.evaluate("window.streams.length === 2"))
    send(fed, serving)
    expect(fed, "#live", "live")


def test_old_figures_are_grey_although_events_come(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    """A server whose stores do not answer sends its last figures again."""
    send(fed, serving, age_seconds=0.01)
    expect(fed, "#live", "live")
    send(fed, serving, age_seconds=8.2, troubles=["they do not answer"])
    expect(fed, "#live", "the stores do not answer: no data for 8 s")
    assert is_grey(fed)


def test_a_device_with_another_clock_shows_the_same_and_says_so(
    fed, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    send(fed, serving)
    before = fed.inner_text("#requests")
    server_time = fed.evaluate("Date.now()") / 1000 - 7200
    for _ in range(12):
        fed.clock.run_for(1000)
        server_time += 1
        send(fed, serving, time=server_time)
    expect(fed, "#live", "live")
    assert not is_grey(fed)
    expect(fed, "#clocks", "this device's is 2 h ahead")
    assert fed.inner_text("#requests") == before
    # people set this device's clock back
    fed.evaluate("const before = Date.now; Date.now = () => before() - 86400_000")
    fed.clock.run_for(1000)
    assert fed.inner_text("#live") == "live"


def test_of_a_time_in_which_nobody_looked_no_line_is_drawn(
    fed, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    now = 10_000.0
    hits = {"host": 640, "disk": 0, "remote": 0}
    ends = [*range(9_760, 9_800), *range(9_900, 10_001)]
    history = [
        {"time": 0, "end": float(end), "seconds": 1.0, "hit_tokens": hits}
        for end in ends
    ]
    send(fed, serving, machine_seconds=now, history=history)
    runs = fed.locator("#chart .looked").evaluate_all(
        "rects => rects.map((one) => [+one.getAttribute('x'), +one.getAttribute('width')])"
    )
    # 300 s are 600 units wide
    assert runs == [
        pytest.approx([2 * (9_759 - 9_700), 2 * 40]),
        pytest.approx([2 * (9_899 - 9_700), 2 * 101]),
    ]
    drawn = fed.get_attribute("#chart path.host", "d")
    lefts = [float(part.split()[0]) for part in drawn.split("M")[1:]]
    for left in lefts:
        assert not (200 <= left < 397)
    assert "nothing is known" in fed.get_attribute("#chart svg", "aria-label")
    expect(fed, "#legend", "nobody looked")


def test_a_day_is_asked_for_and_its_gaps_are_shown(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    minutes = [
        {
            "time": 0,
            "end": 100_000.0 - 60 * n,
            "seconds": 60.0,
            "hit_tokens": {"host": 60, "disk": 0, "remote": 0},
        }
        for n in (720, 719, 60, 59)
    ]
    fed.route(
        "**/history.json", lambda route: route.fulfill(json={"minutes": minutes})
    )

    def is_drawn(runs: int) -> bool:
        script = "document.querySelectorAll('#chart .looked').length"
        return bool(fed.evaluate(script) == runs)

    send(fed, serving, machine_seconds=100_000.0, history=[])
    fed.click("text=1 day")
    wait_until(lambda: is_drawn(2))
    # after a lost connection, and where the page was hidden
    minutes.append({**minutes[-1], "end": 100_000.0 - 60 * 50})
    send(fed, serving, machine_seconds=100_000.0, history=[])
    wait_until(lambda: is_drawn(3))
    minutes.append({**minutes[-1], "end": 100_000.0 - 60 * 40})
    fed.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    wait_until(lambda: is_drawn(4))
    assert "24 h ago" in fed.inner_text("#chart")
    assert fed.get_attribute("#views [value=day]", "aria-pressed") == "true"


def test_the_fullest_store_is_beside_the_sum(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    store = {"chunks": 1, "read_seconds_ago": None, "evicted_per_second": 0.0}
    busy = {
        **store,
        "directory": "/dev/shm/busy",
        "models": ["Llama"],
        "used_bytes": 100,
        "size_bytes": 100,
        "evicted_per_second": 12.0,
    }
    idle = {
        **store,
        "directory": "/dev/shm/idle",
        "models": [],
        "used_bytes": 14,
        "size_bytes": 165,
        "read_seconds_ago": 7.0,
    }
    tier = {
        "kind": "host",
        "title": "host memory",
        "chunks": 2,
        "used_bytes": 114,
        "size_bytes": 265,
        "hit_tokens": 0,
        "address": "",
        "trouble": "",
        "stores": [busy, idle],
        "more_stores": 0,
    }
    send(fed, serving, tiers=[tier])
    words = fed.inner_text("#storeys")
    assert "43 % full" in words
    assert "fullest: Llama: 100 % of 100 B full, evicts 12/s" in words
    fed.focus("#storeys summary")
    fed.keyboard.press("Enter")
    expect(fed, "#storeys", "no model yet: 8.5 % of 165 B full, evicts nothing")
    expect(fed, "#storeys", "(not read for 7 s)")
    # it stays open, and keeps the focus, when a figure changes
    send(fed, serving, tiers=[{**tier, "chunks": 3}])
    expect(fed, "#storeys", "3 chunks")
    assert fed.locator("#storeys details[open]").count() == 1
    assert fed.evaluate("document.activeElement.tagName") == "SUMMARY"
    grown = {**tier, "most_bytes": 1140, "stores": []}
    send(fed, serving, tiers=[grown])
    expect(fed, "#storeys", "10 % full")
    expect(fed, "#storeys", "114 B of 1.1 KiB (265 B taken, it grows)")
    send(fed, serving, tiers=[{**tier, "stores": [busy]}])
    expect(fed, "#storeys", "2 chunks")
    assert "fullest" not in fed.inner_text("#storeys")


def test_rates_of_the_last_minute(fed, serving: Server) -> None:  # type: ignore[no-untyped-def]
    rates = {
        "seconds": 50.0,
        "lookups": 100,
        "asked_tokens": 10,
        "loads": 100,
        "load_seconds": 0.5,
        "loaded_bytes": 10**9,
        "stored_bytes": 5 * 10**7,
        "evicted_chunks": 600,
        "dropped_chunks": 5,
        "drops": {"queue_full": 4, "full": 1},
        "load_seconds_half": 0.003,
        "load_seconds_99": None,
        "being_written": 3,
        "waiting_chunks": 41,
    }
    send(fed, serving, rates=rates)
    words = fed.inner_text("#rates")
    for said in (
        "5 ms",
        "half within 3 ms, 99 % within more than 3 s; 100 loads",
        "20.0 MB/s",
        "2.0 GB/s while a request loads",
        "1.0 MB/s",
        "12/s",
        "0.10/s",
        "mostly: queue full",
        "41",
    ):
        assert said in words
    send(fed, serving, rates={**rates, "seconds": 0.0})
    expect(fed, "#rates", "two looks")


def test_models_and_tenants_are_shown_once_the_stores_count_them(
    fed, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    row = {
        "lookups": 12,
        "hits": 9,
        "asked_tokens": 40_960,
        "hit_tokens": 30_720,
        "saved_seconds": 6.2,
    }
    without = {"models": None, "tenants": None}
    send(fed, serving, **without)
    assert not fed.locator("#usage").is_visible()
    other = {**row, "saved_seconds": None, "asked_tokens": 0, "hit_tokens": 0}
    send(
        fed,
        serving,
        models=[{**row, "model": MARKUP}, {**other, "model": "other"}],
        tenants=[{**row, "tenant": "3f2a9c01d4e7"}],
    )
    first, last = fed.locator("#models tr").all_inner_texts()
    assert MARKUP in first
    assert "75 %" in first
    assert "6.2 s" in first
    assert "unknown" in last
    assert "none yet" in last
    assert "3f2a9c01d4e7" in fed.inner_text("#tenants")


def test_a_server_that_comes_back_asks_for_a_login_and_goes_on(
    browser, root: Path, cache: Cache
) -> None:  # type: ignore[no-untyped-def]
    """Its cookies ended with it; a page on a wall says so, and is not dead for ever."""
    context = browser.new_context()
    opened = context.new_page()
    with server(root) as first:
        opened.goto(first.url)
        opened.fill("#token", TOKEN)
        opened.keyboard.press("Enter")
        expect(opened, "#live", "live")
        port = first.address[1]
        first.stop()
        expect(opened, "#live", "no connection to pagoda serve")
        assert is_grey(opened)
    with server(root, "--listen", f"127.0.0.1:{port}"):
        opened.wait_for_selector("#login[open]", timeout=60_000)
        assert "a login is needed" in opened.inner_text("#live")
        opened.keyboard.press("Escape")
        opened.click("#log-in")
        opened.fill("#login #token", TOKEN)
        opened.keyboard.press("Enter")
        expect(opened, "#live", "live")
        assert not is_grey(opened)
        assert not opened.locator("#log-in").is_visible()
    context.close()


@pytest.mark.slow
def test_a_stopped_server_is_seen_and_continued(
    browser, root: Path, cache: Cache
) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context()
    opened = context.new_page()
    with server(root) as made:
        context.set_extra_http_headers({"Authorization": f"Bearer {TOKEN}"})
        opened.goto(made.url)
        expect(opened, "#live", "live")
        made.process.send_signal(signal.SIGSTOP)
        expect(opened, "#live", "no data for")
        assert is_grey(opened)
        made.process.send_signal(signal.SIGCONT)
        expect(opened, "#live", "live")
        assert not is_grey(opened)
    context.close()


@pytest.mark.parametrize(
    "page", [{"viewport": {"width": 360, "height": 740}}], indirect=True
)
def test_on_a_phone_the_pagoda_keeps_its_shape_and_tables_say_that_they_scroll(
    page, cache: Cache
) -> None:  # type: ignore[no-untyped-def]
    cache.lookup(tokens_of(1, 1))
    expect(page, "#requests", "complete")
    # the picture is not drawn longer for the words beside it
    shape = page.evaluate(
        """() => {
          const picture = document.querySelector("#tower svg");
          const box = picture.getBoundingClientRect();
          return box.width / box.height / (picture.viewBox.baseVal.width / picture.viewBox.baseVal.height);
        }"""  # noqa: E501
    )
    assert shape == pytest.approx(1, abs=0.02)
    assert page.locator("#tower svg").bounding_box()["width"] > 120
    place = page.locator(".requests")
    hint = page.locator(".requests + .swipe")
    assert hint.is_visible()
    assert "more-right" in place.get_attribute("class")
    place.evaluate("place => { place.scrollLeft = place.scrollWidth; }")
    page.wait_for_selector(".requests.more-left:not(.more-right)")
    page.set_viewport_size({"width": 1400, "height": 740})
    page.wait_for_selector(".requests:not(.more-left)")
    assert not hint.is_visible()


def test_the_model_is_chosen_first_and_the_answer_says_what_to_do(
    fed, serving: Server
) -> None:  # type: ignore[no-untyped-def]
    asked: list[object] = []
    texts = {"before": "You are ", "here": MARKUP, "stored": None}
    row = {"tier": "host", "num_tokens": 64, "reason": "evicted", "detail": ""}
    found = {
        "namespace": "b" * 64,
        "model": MARKUP,
        "lines": ["it differs"],
        "answers": [row],
        "texts": texts,
    }

    def answer(route) -> None:  # type: ignore[no-untyped-def]
        asked.append(route.request.post_data_json)
        said = {"asked_tokens": 100, "namespaces": [found], "left": {}}
        route.fulfill(json=said)

    fed.route("**/explain", answer)
    namespaces = [
        {
            "namespace": letter * 64,
            "fields": {"model": f"model {letter}"},
            "chunks": {},
            "bytes": 0,
        }
        for letter in "ab"
    ]
    send(fed, serving, namespaces=namespaces)
    fed.fill("#prompt", "1 2 3")
    fed.click("text=Explain")
    expect(fed, "#answer", "Choose the model first")
    assert asked == []
    assert fed.evaluate("document.activeElement.id") == "model"
    fed.select_option("#model", label="model b")
    # what was chosen stays, whatever else is listed next
    send(fed, serving, namespaces=namespaces[::-1])
    fed.click("text=Explain")
    expect(fed, "#answer", "What to do: Give the full tier more room")
    assert asked == [{"tokens": [1, 2, 3], "namespace": "b" * 64}]
    words = fed.inner_text("#answer")
    assert f"You are {MARKUP}" in words
    assert "(its end)" in words
    fed.select_option("#model", "all")
    fed.click("text=Explain")
    # the handler of the route runs only while the browser is asked something
    wait_until(lambda: fed.evaluate("true") and len(asked) > 1)
    assert asked[1:] == [{"tokens": [1, 2, 3]}]
    send(fed, serving, namespaces=namespaces[:1])
    expect(fed, "#model", "model a")
    assert fed.input_value("#model") == "a" * 64
