"""vLLM finds our connectors by their names: its plugin loader calls `register` in each of its
processes.
"""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import inside
from tests.vllm.conftest import Plain
from tests.vllm.engines import CHUNK, Engine, connector, loadable
from tests.vllm.models import prompt

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _points() -> dict[str, str]:
    return tomllib.loads(PROJECT.read_text())["project"]["entry-points"][
        "vllm.general_plugins"
    ]


def install_plugin(site: str) -> None:
    """Make the entry points of this source those of the installed package, in this process."""
    info = Path(site) / "pagodakv-99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pagodakv\nVersion: 99\n"
    )
    lines = [f"{name} = {at}\n" for name, at in _points().items()]
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n" + "".join(lines)
    )
    sys.path.insert(0, site)


def test_the_connector_is_known_by_its_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    for at in _points().values():
        module, function = at.split(":")
        for _ in range(2):  # vLLM may load a plugin more than once
            getattr(import_module(module), function)()
    found = KVConnectorFactory.get_connector_class_by_name("PagodaConnector")
    assert found.__name__ == "PagodaConnector"


def transfer_config(multi: bool = False, **more: Any) -> Any:
    """A configuration that names PagodaConnector, itself or below a MultiConnector."""
    from vllm.config import KVTransferConfig

    ours: dict[str, Any] = {
        "kv_connector": "PagodaConnector",
        "kv_role": "kv_both",
    }
    if multi:
        below = {"connectors": [ours]}
        ours = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": below,
        }
    return KVTransferConfig(**ours | more)


@pytest.mark.parametrize("simple", ["0", "1"])
@pytest.mark.parametrize("multi", [False, True])
def test_vllm_does_not_replace_the_connector(
    multi: bool, simple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kv_offloading_size vLLM does so silently, wherever the size comes from: the plugin
    refuses it.
    """
    from vllm.config import CacheConfig, VllmConfig

    from pagoda.connectors.vllm import register

    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    for _ in range(2):
        register()
    replaced = (
        "SimpleCPUOffloadConnector" if simple == "1" else "OffloadingConnector"
    )
    with pytest.raises(
        ValueError,
        match=f"kv_offloading_size = 4.*would use {replaced} instead of Pagoda",
    ):
        VllmConfig(
            cache_config=CacheConfig(kv_offloading_size=4.0),
            kv_transfer_config=transfer_config(multi),
        )
    VllmConfig(kv_transfer_config=transfer_config(multi))
    theirs = VllmConfig(
        cache_config=CacheConfig(kv_offloading_size=4.0)
    ).kv_transfer_config
    # without us it is vLLM's affair
    assert theirs is not None
    assert theirs.kv_connector == replaced


def test_vllm_does_not_replace_the_connector_where_the_plugin_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with VLLM_PLUGINS: then the configuration has the path of the module, in which vLLM looks
    for its class.
    """
    from vllm.config import CacheConfig, VllmConfig

    step = VllmConfig._post_init_kv_transfer_config
    monkeypatch.setattr(
        VllmConfig,
        "_post_init_kv_transfer_config",
        getattr(step, "__wrapped__", step),
    )
    with pytest.raises(
        ValueError,
        match="would use OffloadingConnector instead of PagodaConnector",
    ):
        VllmConfig(
            cache_config=CacheConfig(kv_offloading_size=4.0),
            kv_transfer_config=transfer_config(
                kv_connector_module_path="pagoda.connectors.vllm"
            ),
        )


def test_stats_of_a_connector_below_multi_connector_are_read() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
    )

    from pagoda.connectors.vllm import register

    register()
    stats = MultiConnector.build_kv_connector_stats(
        {"PagodaConnector": {"lookups": 3}}
    )
    assert stats is not None
    assert stats.reduce() == {"PagodaConnector": {"lookups": 3}}


def test_an_engine_with_multi_connector(
    lora_options: dict[str, Any],
    plain: Plain,
    session_shm: Path,
    tmp_path: Path,
    logs: Path,
) -> None:
    """No module path is given anywhere."""
    child = connector(session_shm / "plugin")["kv_transfer_config"]
    del child["kv_connector_module_path"]
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
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
            answers += engine.generate(one)
            engine.call(inside.reset)
        assert [answer.tokens for answer in answers] == plain.says(one) * 2
        assert [answer.external for answer in answers] == [0, loadable(len(one))]
    finally:
        engine.stop()
