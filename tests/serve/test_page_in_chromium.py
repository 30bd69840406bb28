"""The operator's page in a real Chromium: it renders, goes on by itself, is used by keyboard, and changes stores."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda import Cache, Namespace
from pagoda.transfer import DenseKV
from tests.serve.kit import CHUNK, LAYOUT, TOKEN, Server, kv_of, server, tokens_of

CHROMIUM = shutil.which("chromium")
MARKUP = "<img src=x onerror=document.title='broken'>"

playwright = pytest.importorskip("playwright.sync_api", reason="needs the dev group: pip install --group dev")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
    ),
]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pagoda-test-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def cache(root: Path) -> Iterator[Cache]:
    namespace = Namespace(MARKUP, salt="tenant A")
    with Cache(
        namespace=namespace,
        layout=LAYOUT,
        chunk_tokens=CHUNK,
        host_path=str(root),
        host_size="8MiB",
        name="page",
    ) as made:
        made.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
        yield made


@pytest.fixture(scope="module")
def serving(root: Path, cache: Cache) -> Iterator[Server]:
    with server(root, "--gpu-price", "2.5") as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser, serving: Server, request: pytest.FixtureRequest) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """The page after the login; a test fails if the console had an error."""
    context = browser.new_context(**getattr(request, "param", {}))
    context.add_cookies(
        [{"name": "pagoda", "value": _cookie(), "url": serving.url, "httpOnly": True, "sameSite": "Strict"}]
    )
    opened = context.new_page()
    errors: list[str] = []
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(serving.url)
    opened.wait_for_selector("#storeys .storey")
    yield opened
    context.close()
    assert errors == []


def expect(page, selector: str, text: str) -> None:  # type: ignore[no-untyped-def]
    """Wait until an element has a text."""
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=5000)


def _cookie() -> str:
    from pagoda.serve.access import AccessRules

    return AccessRules(TOKEN, [], None).cookie()


def test_the_token_is_asked_for_and_opens_the_page(browser, serving: Server) -> None:  # type: ignore[no-untyped-def]
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
    context.close()


def test_it_shows_the_stores_and_goes_on_by_itself(page, cache: Cache) -> None:  # type: ignore[no-untyped-def]
    assert "host memory" in page.inner_text("#storeys")
    assert MARKUP in page.inner_text("#namespaces") and page.title() == "PagodaKV"
    assert "tenant A" not in page.content()
    chunks = page.locator("#storeys .facts")
    assert "4 chunks" in chunks.inner_text()
    cache.store(tokens_of(2, 3), DenseKV(kv_of(2, 3), LAYOUT))
    hit = cache.retrieve(tokens_of(2, 4), DenseKV(kv_of(3, 4), LAYOUT))
    assert hit.num_tokens == 3 * CHUNK
    expect(page, "#storeys", "7 chunks")
    expect(page, "#misses", "absent")
    expect(page, "#requests", "absent")
    row = page.locator("#requests tr").first.inner_text()
    assert MARKUP in row and str(4 * CHUNK) in row and f"host {3 * CHUNK}" in row and str(os.getpid()) in row
    assert "live" in page.inner_text("#live")


def test_it_is_used_by_keyboard(page) -> None:  # type: ignore[no-untyped-def]
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
    assert f"Of {5 * CHUNK} tokens" in page.inner_text("#answer") and str(4 * CHUNK) in page.inner_text(
        "#answer"
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Pin it"
    page.keyboard.press("Enter")
    expect(page, "#pins", "pagoda")
    page.click("#pins button")
    expect(page, "#pins", "Nothing is pinned")


def test_clearing_asks_before(page, cache: Cache) -> None:  # type: ignore[no-untyped-def]
    cache.store(tokens_of(1, 4), DenseKV(kv_of(1, 4), LAYOUT))
    page.click("#namespaces button")
    assert page.locator("#confirm").is_visible() and page.evaluate("document.activeElement.value") == "no"
    page.keyboard.press("Escape")
    assert not page.locator("#confirm").is_visible()
    assert cache.lookup(tokens_of(1, 4)).num_tokens == 4 * CHUNK
    page.click("#namespaces button")
    page.click("#confirm .danger")
    expect(page, "#answer", "were removed")
    assert cache.lookup(tokens_of(1, 4)).num_tokens == 0


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
def test_it_has_no_serious_fault_for_people_who_need_help_to_read_it(page) -> None:  # type: ignore[no-untyped-def]
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install --group dev")
    page.fill("#prompt", "1 2 3")
    page.click("text=Explain")
    page.wait_for_selector("#answer table, #answer p")
    found = axe.Axe().run(page).response
    assert found["passes"]
    faults = [fault for fault in found["violations"] if fault["impact"] in ("serious", "critical")]
    assert [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in faults] == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
