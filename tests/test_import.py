"""`import pagoda` costs nothing: whatever is heavy is imported by the first use of a name."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda

HEAVY = (
    "numpy",
    "lmdb",
    "torch",
    "pydantic",
    "pydantic_settings",
    "msgspec",
    "blake3",
    "typer",
    "rich",
    "transformers",
    "aiohttp",
    "prometheus_client",
)


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has after `code`."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    bare = modules_after("pass")
    after = modules_after("import pagoda; dir(pagoda)")
    assert not (after - bare) & set(HEAVY)
    assert {name for name in after if name.startswith("pagoda")} == {"pagoda"}


@pytest.mark.slow
def test_what_an_engine_imports_is_one_package() -> None:
    """import-linter sees what is written; this sees what is loaded."""
    after = modules_after(
        "from pagoda import *; import pagoda.connectors.transformers, pagoda.blocks, pagoda.blend, "
        "pagoda.kv_events, pagoda.testing, pagoda.cache.recording, pagoda.__main__"
    )
    assert "pagoda.cache.cache" in after
    assert not [name for name in after if name.startswith("pagoda_tools")]


def test_errors_are_light() -> None:
    after = modules_after("from pagoda import PagodaError")
    assert not after & set(HEAVY)


def test_every_public_name_is_there_and_documented() -> None:
    for name in pagoda.__all__:
        found = getattr(pagoda, name)
        if name != "__version__":
            assert found.__doc__, name
            assert name in dir(pagoda)
    assert {"ChunkRef", "Reason", "Stored", "Hit", "Config"} <= set(
        pagoda.__all__
    )
    assert pagoda.Stored(1, 256, 0, 0).reason is None
    assert pagoda.Reason("absent") is pagoda.Reason.ABSENT
    ref = pagoda.ChunkRef(
        b"k" * 32, position=0, parent=None, slot=3, generation=17
    )
    assert ref.reserved.generation == 17


def test_reasons_are_light() -> None:
    after = modules_after("from pagoda import Reason")
    assert not after & set(HEAVY)


def test_keys_and_layouts_need_no_engine() -> None:
    after = modules_after(
        "from pagoda import KVLayout, Namespace; Namespace('m').root"
    )
    assert not after & {
        "lmdb",
        "torch",
        "pydantic",
        "typer",
        "rich",
        "transformers",
    }


def test_metrics_are_pure_python() -> None:
    assert "numpy" not in modules_after(
        "import pagoda.base.metrics, pagoda.base.clock"
    )


def test_a_configuration_needs_little() -> None:
    after = modules_after("from pagoda.config.sources import load; load()")
    assert not after & set(HEAVY)


CALLS = """
import sys
import numpy as np
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import BlockKV, DenseKV, PagedKV, PagesKV
layout = KVLayout.dense(1, 1, 8, "float16", 4, token_order="tokens_first")
sizes = {"host_size": "1MiB", "host_shared": False, "disk_path": sys.argv[1], "disk_size": "2MiB"}
with Cache(namespace=Namespace("m"), layout=layout, **sizes, remote=sys.argv[2]) as cache:
    before, pools = {*sys.modules}, [np.zeros((2, 10, 4, 1, 8), np.float16)]
    kv = PagedKV(pools, layout, pool_format="planes_first", block_size=4, block_table=range(10))
    for first in range(400):  # more than the host tier holds
        cache.store([first] * 40, kv)
    assert cache.flush()  # of these the disk's queue may have refused some
    assert cache.store([400] * 40, kv) and cache.flush()
    assert cache.retrieve([400] * 40, kv) and cache.retrieve([400] * 40, kv, tiers=["disk"])
    cache.lookup([1] * 48), cache.prefetch([400] * 40).result(), cache.pin([400] * 40), cache.clear()
    print(*sorted({*sys.modules} - before))
"""  # noqa: E501


@pytest.mark.parametrize(
    "remote",
    [
        "",
        # nobody listens there
        pytest.param("redis://127.0.0.1:1", marks=pytest.mark.slow),
        pytest.param("http://127.0.0.1:1/", marks=pytest.mark.slow),
    ],
)
def test_the_calls_of_an_engine_import_nothing(
    tmp_path: Path, remote: str
) -> None:
    """Another thread may fork during an import: the child would wait for its lock for ever."""
    if remote:
        pytest.importorskip("redis" if remote.startswith("redis") else "obstore")
    command = [sys.executable, "-c", CALLS, str(tmp_path / "disk"), remote]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []


def test_the_names_of_loggers_are_pinned() -> None:
    """Users name them in their logging configuration: a module that moves keeps its logger's
    name.
    """
    source = Path(__file__).resolve().parents[1] / "src"
    named = re.compile(r'(?:getLogger|guarded_logger)\("(.*?)"\)')
    found = {
        name
        for path in source.rglob("*.py")
        for name in named.findall(path.read_text())
    }
    assert found == {
        "pagoda",
        "pagoda.cache",
        "pagoda.connectors",
        "pagoda.events",
        "pagoda.ledger.clears",
        "pagoda.ledger.epochs",
        "pagoda.ledger.spaces",
        "pagoda.ledger.store_directory",
        "pagoda.serve",
        "pagoda.slab",
        "pagoda.tiers.disk",
        "pagoda.tiers.register",
        "pagoda.llamacpp",
        "pagoda.quality",
        "pagoda.sglang",
        "pagoda.tiers.remote",
        "pagoda.transfer",
        "pagoda.vllm",
        "vllm",
    }


@pytest.mark.slow
def test_each_class_name_is_used_once() -> None:
    """A reader who searches for a class finds one definition."""
    package = Path(__file__).parents[1] / "src"
    places: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(
                    str(path.relative_to(package))
                )
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
