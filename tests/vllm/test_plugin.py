"""vLLM finds our connectors by their names: its plugin loader calls `register` in each of its processes."""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.vllm import inside
from tests.vllm.conftest import Plain
from tests.vllm.engines import CHUNK, Engine, connector, loadable
from tests.vllm.models import prompt

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _points() -> dict[str, str]:
    return tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]


def install_plugin(site: str) -> None:
    """Make the entry points of this source those of the installed package, in this process."""
    info = Path(site) / "pagodakv-99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagodakv\nVersion: 99\n")
    lines = [f"{name} = {at}\n" for name, at in _points().items()]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    sys.path.insert(0, site)


def test_the_connector_is_known_by_its_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for at in _points().values():
        module, function = at.split(":")
        for _ in range(2):  # vLLM may load a plugin more than once
            getattr(import_module(module), function)()
    found = KVConnectorFactory.get_connector_class_by_name("PagodaConnector")
    assert found.__name__ == "PagodaConnector"


def test_stats_of_a_connector_below_multi_connector_are_read() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from pagoda.connectors.vllm import register

    register()
    stats = MultiConnector.build_kv_connector_stats({"PagodaConnector": {"lookups": 3}})
    assert stats is not None and stats.reduce() == {"PagodaConnector": {"lookups": 3}}


def test_an_engine_with_multi_connector(
    lora_options: dict[str, Any], plain: Plain, session_shm: Path, tmp_path: Path, logs: Path
) -> None:
    """No module path is given anywhere."""
    child = connector(session_shm / "plugin")["kv_transfer_config"]
    del child["kv_connector_module_path"]
    given = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    given["kv_connector_extra_config"] = {"connectors": [child]}  # type: ignore[assignment]
    engine = Engine(
        "plugin",
        logs / "plugin.log",
        partial(install_plugin, str(tmp_path / "site")),
        **lora_options,
        kv_transfer_config=given,
    )
    try:
        one = prompt(4000, 6 * CHUNK + 5)
        answers = []
        for _ in range(2):
            answers += engine.say(one)
            engine.call(inside.reset)
        assert [answer.tokens for answer in answers] == plain.says(one) * 2
        assert [answer.external for answer in answers] == [0, loadable(len(one))]
    finally:
        engine.stop()
