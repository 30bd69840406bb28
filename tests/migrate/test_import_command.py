"""`pagoda config import`: a file of LMCache's in, a pagoda.toml out that every command then
takes.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.cli.shelf import answer, done_here, pagoda, refused

GOOD = (
    "chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 0.5\nremote_url: "
    "redis://u:hunter2@h:6379\n"
)


@pytest.fixture
def lmcache(tmp_path: Path) -> Path:
    file = tmp_path / "lmcache.yaml"
    file.write_text(GOOD)
    return file


@pytest.mark.slow
def test_what_comes_out_goes_in(lmcache: Path, tmp_path: Path) -> None:
    made = tmp_path / "pagoda.toml"
    done = pagoda("config", "import", lmcache, "-o", made)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert f"pagoda config allow {made}" in done.stderr
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    options = answer("config", "show", "--config", made)["options"]
    assert options["chunk_tokens"] == {"value": 128, "origin": f"file {made}"}  # type: ignore[index]
    assert options["host_size"]["value"] == 2**29  # type: ignore[index]
    assert options["remote"]["value"] == ["redis://u:***@h:6379"]  # type: ignore[index]
    assert done_here("config", "import", lmcache).stdout == made.read_text()
    assert "exists already" in refused("config", "import", lmcache, "-o", made)
    assert "cannot be written" in refused(
        "config", "import", lmcache, "-o", tmp_path / "no" / "a.toml"
    )


@pytest.mark.slow
def test_only_a_file_that_would_be_refused_needs_a_remark(
    lmcache: Path, tmp_path: Path
) -> None:
    assert (
        pagoda("config", "import", lmcache, "-o", tmp_path / "kv.toml").stderr
        == ""
    )
    lmcache.write_text("chunk_size: 128\nmax_local_cpu_size: 0.5\n")
    assert (
        pagoda("config", "import", lmcache, "-o", tmp_path / "pagoda.toml").stderr
        == ""
    )


def test_what_is_not_needed_is_a_remark(lmcache: Path) -> None:
    lmcache.write_text(
        GOOD + "numa_mode: auto\nsave_decode_cache: false\nenable_p2p: false\n"
    )
    done = done_here("config", "import", lmcache)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "pagoda: save_decode_cache: set elsewhere: the option store_output of the connector: "
        "pagoda vllm --no-store-output serve ...",
        "pagoda: numa_mode: not needed: all processes of the machine share host memory; "
        "bind it with numactl if necessary",
    ]


def test_what_is_not_supported_is_refused_unless_forced(lmcache: Path) -> None:
    lmcache.write_text(
        GOOD + "enable_p2p: true\nmystery: 1\nremote_serde: cachegen\n"
    )
    said = refused("config", "import", lmcache)
    assert "enable_p2p: " in said
    assert "mystery: " in said
    assert "cachegen" in said
    assert "--force" in said
    assert "hunter2" not in said
    done = done_here("config", "import", lmcache, "--force")
    assert done.returncode == 0
    assert "codec=zstd" in done.stdout
    assert "enable_p2p: not supported" in done.stderr
    assert "mystery: unknown" in done.stderr


def test_json_names_each_field_and_its_verdict(lmcache: Path) -> None:
    lmcache.write_text(GOOD + "enable_p2p: true\n")
    done = done_here("config", "import", lmcache, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 2
    assert found["ok"] is False
    assert [
        one["field"]
        for one in found["fields"]
        if one["verdict"] == "not supported"
    ] == ["enable_p2p"]
    found = answer("config", "import", lmcache, "--force")
    assert found["ok"] is True
    assert found["options"]["chunk_tokens"] == 128  # type: ignore[index]


def test_variables_count_alone_and_over_a_file(lmcache: Path) -> None:
    variables = {"LMCACHE_CHUNK_SIZE": "64", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2"}
    found = answer("config", "import", "--workers", "2", **variables)
    assert found["options"] == {"chunk_tokens": 64, "host_size": "4GiB"}
    done = done_here(
        "config", "import", LMCACHE_CONFIG_FILE=str(lmcache), **variables
    )
    assert "chunk_tokens = 64" in done.stdout
    assert 'host_size = "2GiB"' in done.stdout
    assert "LMCACHE_CHUNK_SIZE overrides the file" in done.stderr
    assert "name LMCache's file" in refused("config", "import")
    assert "none.yaml" in refused(
        "config", "import", lmcache.with_name("none.yaml")
    )
    assert "max_local_cpu_size" in refused(
        "config", "import", LMCACHE_MAX_LOCAL_CPU_SIZE="many"
    )
