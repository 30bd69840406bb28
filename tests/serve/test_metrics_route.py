"""`GET /metrics` of a real server: what it says, to whom, and in which format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families

from pagoda.ledger import Ledger
from testbed.patience import Patience, wait_until
from tests.ledger.support import gate_taken
from tests.serve.kit import (
    Server,
    engine,
    server,
)


def values(text: str) -> dict[str, float]:
    """The sum of each metric's samples."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def scrape(served: Server) -> dict[str, float]:
    """What a scrape returns."""
    answer = served.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    return values(answer.body.decode())


@pytest.mark.slow
def test_a_scrape_has_what_engines_counted(shm_root: Path) -> None:
    (shm_root / "broken").mkdir()
    (shm_root / "broken" / "state").write_bytes(b"x" * 4096)
    with (
        engine(host_path=str(shm_root), host_size="4MiB") as writer,
        server(shm_root) as served,
    ):
        writer.store(1, 4)
        wait_until(lambda: scrape(served).get("pagoda_ready") == 4)
        found = scrape(served)
        assert found["pagoda_stored_chunks_total"] == 4
        assert found["pagoda_members"] == 1
        assert found["pagoda_namespace_chunks"] == 4
        keys = writer.store(2, 2)
        assert served.get(writer.root, keys[0]).status == 200
        wait_until(lambda: scrape(served)["pagoda_ready"] == 6)
        assert scrape(served)["pagoda_serve_events_total"] >= 1
        answer = served.ask("GET", "/metrics").body.decode()
        assert f'pagoda_store_readable{{store="{shm_root}/broken"}} 0.0' in answer


@pytest.mark.slow
def test_only_who_has_the_token_may_scrape_and_may_choose_the_format(
    shm_root: Path,
) -> None:
    with (
        engine(host_path=str(shm_root), host_size="4MiB") as writer,
        server(shm_root) as served,
    ):
        writer.store(1, 1)
        for wrong in ("", "Bearer wrong", f"Basic {served.token}"):
            assert (
                served.ask(
                    "GET", "/metrics", headers={"Authorization": wrong}
                ).status
                == 401
            )
        assert (
            served.ask(
                "GET",
                f"/metrics?token={served.token}",
                headers={"Authorization": ""},
            ).status
            == 401
        )
        answer = served.ask(
            "GET",
            "/metrics",
            headers={"Accept": "application/openmetrics-text; version=1.0.0"},
        )
        assert answer.headers["Content-Type"].startswith(
            "application/openmetrics-text"
        )
        families = {
            family.name: family for family in open_metrics(answer.body.decode())
        }
        assert families["pagoda_load_seconds"].type == "histogram"


@pytest.mark.slow
def test_a_store_that_a_stopped_process_holds_is_named_in_time(
    shm_root: Path,
) -> None:
    with (
        engine(host_path=str(shm_root), host_size="4MiB") as writer,
        server(shm_root) as served,
    ):
        writer.store(1, 2)
        wait_until(lambda: scrape(served).get("pagoda_store_readable") == 1)
        (store,) = [path.parent for path in shm_root.glob("*/state")]
        with closing(Ledger.attach(store)) as ledger, gate_taken(ledger):
            wait_until(lambda: scrape(served)["pagoda_store_readable"] == 0)
            patience = Patience(10)  # Prometheus' own patience
            assert "pagoda_ready" not in scrape(served)
            assert not patience.ended, patience.said()
            assert served.ask("GET", "/healthz").status == 200
        wait_until(lambda: scrape(served).get("pagoda_ready") == 2)


@pytest.mark.slow
def test_many_scrapes_at_once_are_one_reading(shm_root: Path) -> None:
    with (
        engine(host_path=str(shm_root), host_size="4MiB") as writer,
        server(shm_root) as served,
    ):
        writer.store(1, 1)

        def one(_: int) -> int:
            connection = served.connection()
            connection.request(
                "GET",
                "/metrics",
                headers={"Authorization": f"Bearer {served.token}"},
            )
            answer = connection.getresponse()
            answer.read()
            connection.close()
            return answer.status

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(one, range(64))) == {200}
