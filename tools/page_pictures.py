"""Makes the pictures of the operator's page that docs/how-to/page.md shows.

    python tools/page_pictures.py [FOLDER]

It runs two small caches with made-up prompts, `pagoda serve`, and Chromium (Playwright, of the dev
group). The pictures are to be looked at before they are committed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import DenseKV

IMAGES = Path(__file__).resolve().parent.parent / "docs/how-to/images"
CHUNK = 64
LAYOUT = KVLayout.dense(
    layers=2, kv_heads=2, head_dim=32, dtype="float32", chunk_tokens=CHUNK
)
SERVE = "import sys; from pagoda_tools.cli import main; sys.exit(main())"
LLAMA = Namespace("meta-llama/Llama-3.1-8B", revision="d04e592")
QWEN = Namespace("Qwen/Qwen2.5-7B-Instruct", salt="a tenant")
PHONE = {"viewport": {"width": 390, "height": 1500}, "device_scale_factor": 1}
DESK = {"viewport": {"width": 1200, "height": 1130}}
BUSY_SECONDS = float(os.environ.get("BUSY_SECONDS", "70"))


def tokens_of(chain: int, chunks: int) -> list[int]:
    """Return a prompt; those of one chain begin alike."""
    return [chain * 1000 + n % 1000 for n in range(chunks * CHUNK)]


def kv_of(chunks: int) -> DenseKV:
    """Return KV of so many chunks."""
    plane = np.zeros((2, chunks * CHUNK, 32), np.float32)
    layers = [[plane.copy() for _ in range(2)] for _ in range(2)]
    return DenseKV(layers, LAYOUT)


def serve_requests(cache: Cache, chains: int, end: threading.Event) -> None:
    """Ask and store as an engine does, busier at some times, until `end`."""
    chance = random.Random(chains)
    while not end.is_set():
        chain = int(chance.paretovariate(1.1)) % chains
        chunks = chance.randint(4, 24)
        tokens = tokens_of(chain, chunks)
        hit = cache.retrieve(tokens, kv_of(chunks))
        if hit.num_tokens < len(tokens):
            cache.store(tokens, kv_of(chunks))
        cache.observe_prefill(chunks * CHUNK, chunks * CHUNK / 6000)
        end.wait(chance.random() * (0.02 if time.monotonic() % 20 < 8 else 0.12))


@contextmanager
def caches(root: Path, is_alone: bool) -> Iterator[None]:
    """Run a busy cache, and if it is not alone a second one in another root, almost idle."""
    options = {"layout": LAYOUT, "chunk_tokens": CHUNK, "worth_it": False}
    busy = Cache(
        namespace=LLAMA,
        host_path=str(root / "shm"),
        host_size="24MiB",
        disk_path=str(root / "disk"),
        disk_size="192MiB",
        **options,  # type: ignore[arg-type]
    )
    every = [(busy, 60)]
    if not is_alone:
        idle = Cache(
            namespace=QWEN,
            host_path=str(root / "shm of another engine"),
            host_size="96MiB",
            **options,  # type: ignore[arg-type]
        )
        every.append((idle, 2))
    end = threading.Event()
    working = [
        threading.Thread(target=serve_requests, args=(*one, end)) for one in every
    ]
    for thread in working:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in working:
            thread.join()
        for cache, _ in every:
            cache.close()


@contextmanager
def page_server(root: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `pagoda serve` for all stores that this process has opened."""
    made = subprocess.Popen(
        [
            *(sys.executable, "-c", SERVE, "serve", "--json"),
            *("--listen", "127.0.0.1:0", "--gpu-price", "24"),
        ],
        env={**os.environ, "PAGODA_SERVE_TOKEN": "a-token-for-pictures"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    try:
        yield json.loads(made.stdout.readline())["url"], made
    finally:
        made.send_signal(signal.SIGCONT)
        made.terminate()
        made.wait(30)


def opened(browser: Browser, url: str, **options: object) -> Page:
    """Open the page, logged in."""
    page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
    page.goto(url)
    page.fill("#token", "a-token-for-pictures")
    page.keyboard.press("Enter")
    page.wait_for_selector("#storeys .storey")
    page.wait_for_timeout(3000)
    return page


def keep(page: Page, folder: Path, name: str) -> None:
    """Write what the page shows, small."""
    path = folder / f"page-{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(path, path.stat().st_size, "bytes")


def main(folder: Path) -> None:
    """Make all pictures."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-pictures-", dir="/dev/shm"))
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for is_alone in (True, False):
                own = root / ("one" if is_alone else "two")
                os.environ["XDG_STATE_HOME"] = str(own / "state")
                with caches(own, is_alone), page_server(own) as (url, server):
                    time.sleep(BUSY_SECONDS if is_alone else BUSY_SECONDS / 3)
                    if not is_alone:
                        page = opened(browser, url, **DESK)
                        page.set_viewport_size({"width": 1200, "height": 560})
                        keep(page, folder, "two-roots")
                        continue
                    light = opened(browser, url, **DESK)
                    keep(light, folder, "light")
                    dark = opened(browser, url, **DESK, color_scheme="dark")
                    keep(dark, folder, "dark")
                    keep(opened(browser, url, **PHONE), folder, "phone")
                    light.set_viewport_size({"width": 1200, "height": 560})
                    server.send_signal(signal.SIGSTOP)
                    light.wait_for_timeout(7500)
                    keep(light, folder, "stopped")
            browser.close()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
