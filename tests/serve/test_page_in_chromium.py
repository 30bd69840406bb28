"""The operator's page in a real Chromium: it renders, goes on by itself, is used by keyboard, and
changes stores.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda import Cache, Namespace
from pagoda.transfer import DenseKV
from testbed.patience import wait_until
from testbed.programs import lacking, path_of
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    TOKEN,
    Server,
    kv_of,
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
        made.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
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


def expect(page, selector: str, text: str) -> None:  # type: ignore[no-untyped-def]
    """Wait until an element has a text."""
    from playwright import sync_api  # here, because it takes long

    sync_api.expect(page.locator(selector)).to_contain_text(text, timeout=5000)


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
    opened.fill("#prompt", "9999999999")
    opened.click("text=Explain")
    opened.fill("#login #token", TOKEN)
    opened.keyboard.press("Enter")
    expect(opened, "#answer .trouble", "token")  # why it was refused
    assert not opened.locator("#login").is_visible()
    context.close()


def test_it_shows_the_stores_and_goes_on_by_itself(page, cache: Cache) -> None:  # type: ignore[no-untyped-def]
    cache.clear(everything=True)
    cache.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
    expect(page, "#storeys", "4 chunks")
    assert "host memory" in page.inner_text("#storeys")
    assert MARKUP in page.inner_text("#namespaces")
    assert page.title() == "PagodaKV"
    assert "tenant A" not in page.content()
    cache.store(tokens_of(2, 3), DenseKV(kv_of(2, 3), LAYOUT))
    hit = cache.retrieve(tokens_of(2, 4), DenseKV(kv_of(3, 4), LAYOUT))
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
    cache.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
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
            one.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
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
    stats["history"] = [
        {
            "time": 9.0,
            "seconds": 2.0,
            "hit_tokens": {"host": 20, "disk": 4000, "remote": 600},
        }
    ]
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
    answers = [
        {"status": 503},
        {
            "content_type": "text/event-stream",
            "body": f"event: snapshot\ndata: {json.dumps(stats)}\n\n",
        },
    ]

    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.route(
        "**/*",
        lambda route: (
            route.fulfill(**answers.pop(0))
            if "events" in route.request.url and answers
            else route.continue_()
        ),
    )
    context.set_extra_http_headers({"Authorization": f"Bearer {TOKEN}"})
    page.goto(serving.url)
    expect(page, "#live", "no connection")
    page.clock.fast_forward(3000)
    expect(page, "#requests", "disk 64, remote 32")
    assert "evicted" in page.inner_text("#requests")
    assert MARKUP in page.inner_text("#requests")
    host, disk, redis = (
        page.locator("#storeys .storey").nth(number) for number in range(3)
    )
    assert "10/s now" in host.inner_text()
    assert host.locator(".window.lit").count() == 3
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
def test_it_has_no_serious_fault_for_people_who_need_help_to_read_it(
    page,
) -> None:  # type: ignore[no-untyped-def]
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install --group dev"
    )
    page.fill("#prompt", "1 2 3")
    page.click("text=Explain")
    page.wait_for_selector("#answer table, #answer p")
    found = axe.Axe().run(page).response
    assert found["passes"]
    faults = [
        fault
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert [
        (fault["id"], [node["html"] for node in fault["nodes"]])
        for fault in faults
    ] == []
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
