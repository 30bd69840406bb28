"""The README's quickstart beside `pagoda serve`: what the model is served is on the page within two
seconds.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from testbed.patience import Patience
from tests.serve.kit import SECONDS, TOKEN, server


@pytest.mark.slow
def test_a_hit_of_the_quickstart_is_on_the_page_within_two_seconds(
    shm_root: Path,
) -> None:
    from pagoda.connectors.transformers import CachedModel
    from tests.e2e.tiny import llama, prompt

    shown = threading.Event()
    with server(shm_root) as page:
        connection = page.connection()
        connection.request(
            "GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        stream = connection.getresponse()

        def watch() -> None:
            while line := stream.readline():
                if (
                    line.startswith(b"data: ")
                    and json.loads(line[6:])["totals"]["hit_tokens"]
                ):
                    shown.set()
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        cached = CachedModel(
            llama(),
            host_path=str(shm_root),
            host_size="64MiB",
            chunk_tokens=16,
            worth_it=False,
        )
        ids = prompt(100)
        cached.generate(ids, max_new_tokens=4)
        assert not shown.is_set()
        cached.generate(ids, max_new_tokens=4)
        patience = Patience(2.0)
        assert cached.last.hit.num_tokens
        assert shown.wait(SECONDS)
        assert not patience.ended, patience.said()
        watching.join(SECONDS)
        connection.close()
        cached.close()
