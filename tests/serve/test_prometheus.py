"""A real Prometheus scrapes a real `pagoda serve`: every help text arrives, and every query of ours
has data.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import yaml

from pagoda.cache import Cache
from pagoda_tools.serve.exposition import FAMILIES
from testbed.patience import wait_until
from testbed.programs import lacking
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    TOKEN,
    dense_kv,
    server,
    tokens_of,
)

MONITORING = (
    Path(__file__).resolve().parents[2] / "docs" / "how-to" / "monitoring"
)
DASHBOARD = MONITORING / "dashboard.json"
ALERTS = MONITORING / "alerts.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(lacking("prometheus", "promtool")),
        reason=lacking("prometheus", "promtool"),
    ),
]


def dashboard_queries() -> list[str]:
    """All queries of the dashboard, with its variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [
        target["expr"] for panel in panels for target in panel.get("targets", ())
    ]
    return [
        query.replace("$__rate_interval", "1m").replace("$instance", ".*")
        for query in queries
    ]


def alert_queries() -> list[str]:
    """The expressions of all rules, with comparisons that answer 0 or 1, so that no rule need
    fire.
    """
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return [re.sub(r" (>|==) ", r" \1 bool ", rule["expr"]) for rule in rules]


class Prometheus:
    """A Prometheus that scrapes one server ten times a second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **query: str) -> object:
        """Return the data of an answer; fails if it is no success."""
        full = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(full, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def rows(self, query: str) -> list[dict[str, object]]:
        """Return what a query has now."""
        return cast(
            "dict[str, list[dict[str, object]]]", self.ask("query", query=query)
        )["result"]


@contextmanager
def prometheus(where: Path, target: str) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of the documentation, faster; kill it afterwards."""
    (where / "token").write_text(TOKEN)
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {
        "scrape_interval": "100ms",
        "evaluation_interval": "200ms",
    }
    config["rule_files"] = [str(ALERTS)]
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(where / "token")
    job["static_configs"][0]["targets"] = [target]
    (where / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={where}/prometheus.yaml",
        f"--storage.tsdb.path={where}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, cwd=where)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait(30)


def has_data(monitor: Prometheus, query: str) -> bool:
    """Whether a query answers with samples; not yet, as long as Prometheus starts."""
    try:
        return bool(monitor.rows(query))
    except OSError:
        return False


@pytest.mark.slow
def test_prometheus_reads_every_metric_with_its_help_and_every_query_has_data(
    shm_root: Path, tmp_path: Path
) -> None:
    options = {"namespace": NAMESPACE, "layout": LAYOUT, "chunk_tokens": CHUNK}
    with (
        Cache(host_path=shm_root, host_size="4MiB", **options) as cache,
        server(shm_root) as served,
    ):  # type: ignore[arg-type]
        cache.store(tokens_of(1, 4), dense_kv(1, 4))
        cache.retrieve(tokens_of(1, 4), dense_kv(1, 4))
        cache.observe_prefill(100, 0.1)  # without it no time was saved
        with prometheus(tmp_path, ":".join(map(str, served.address))) as monitor:
            wait_until(
                lambda: has_data(monitor, "rate(pagoda_lookups_total[1m])")
            )
            for number in range(3):
                cache.store(tokens_of(number, 4), dense_kv(number, 4))
                hit = cache.retrieve(tokens_of(number, 4), dense_kv(number, 4))
                assert hit.num_tokens == 4 * CHUNK
            wait_until(
                lambda: has_data(
                    monitor, "sum(rate(pagoda_load_seconds_count[1m])) > 0"
                )
            )
            metadata = cast(
                "dict[str, list[dict[str, str]]]", monitor.ask("metadata")
            )
            ours = [
                one
                for one in FAMILIES
                if not one.name.startswith(("pagoda_remote_", "pagoda_serve_"))
            ]
            for family in ours:
                name = family.name + "_total" * (family.kind == "counter")
                (found,) = metadata.get(name) or metadata[family.name]
                assert (found["type"], found["help"]) == (
                    family.kind,
                    family.help,
                ), name
            for query in (*dashboard_queries(), *alert_queries()):
                assert monitor.rows(query), query
            assert monitor.rows('up{job="pagodakv"} == 1')
            wait_until(lambda: "unknown" not in healths(monitor))
            assert healths(monitor) == ["ok"] * len(alert_queries())
            text = served.ask("GET", "/metrics").body
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def healths(monitor: Prometheus) -> list[str]:
    """How Prometheus judges each rule."""
    (group,) = cast(
        "dict[str, list[dict[str, list[dict[str, str]]]]]", monitor.ask("rules")
    )["groups"]
    return [rule["health"] for rule in group["rules"]]


FIRING = """
rule_files: [ALERTS]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'pagoda_asked_tokens_total{instance="a"}', values: '0+100x200'}
      - {series: 'pagoda_found_tokens_total{instance="a"}', values: '0x200'}
      - {series: 'pagoda_asked_tokens_total{instance="b"}', values: '0+100x200'}
      - {series: 'pagoda_found_tokens_total{instance="b"}', values: '0+1x200'}
      - {series: 'pagoda_failed_checks_total{instance="b",tier="disk",store="/d"}', values: '0x60 1x140'}
    promql_expr_test:
      - eval_time: 100m
        expr: count by (alertname, instance) (ALERTS{alertstate="firing"})
        exp_samples: [{labels: '{alertname="PagodaDamagedChunks", instance="b"}', value: 1},
                      {labels: '{alertname="PagodaNeverHits", instance="a"}', value: 1}]
      - eval_time: 150m
        expr: count by (alertname, instance) (ALERTS{alertstate="firing"})
        exp_samples: [{labels: '{alertname="PagodaNeverHits", instance="a"}', value: 1}]
"""  # noqa: E501


def test_the_rules_are_right_and_fire(tmp_path: Path) -> None:
    tests = tmp_path / "tests.yaml"
    tests.write_text(FIRING.replace("[ALERTS]", f"[{ALERTS}]"))
    for command, file in (("check", ALERTS), ("test", tests)):
        done = subprocess.run(
            ["promtool", command, "rules", file],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
