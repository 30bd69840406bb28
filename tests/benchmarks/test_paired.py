"""Two source trees in turns: slower figures are reported, and a failing benchmark ends the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import programs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TURN = """
import json, pathlib, sys
home = pathlib.Path(__file__).parent.parent
with (home.parent / "turns").open("a") as turns:
    turns.write(home.name + " ")
if (home / "broken").exists():
    sys.exit("it broke")
share, seconds = json.loads((home / "figures").read_text())
runs = {"copy_vs_limit": {"ratio": []}, "look_seconds": {"seconds": []}}
print(json.dumps({"copy_vs_limit": share, "look_seconds": seconds, "runs": runs}))
"""


def tree(root: Path, name: str, share: float, seconds: float) -> Path:
    """A source tree whose benchmark has these two figures."""
    made = root / name
    (made / "src" / "pagoda").mkdir(parents=True)
    (made / "benchmarks").mkdir()
    (made / "benchmarks" / "harness.py").touch()
    (made / "benchmarks" / "cache.py").write_text(TURN)
    (made / "figures").write_text(json.dumps([share, seconds]))
    return made


def paired(*words: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(BENCHMARKS / "paired.py"),
        *map(str, words),
        "--only",
        "cache",
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("share", "seconds", "worse"),
    [
        (0.9, 1.0, []),
        (0.88, 1.02, []),
        (0.86, 1.0, ["copy_vs_limit"]),
        (0.99, 1.05, ["look_seconds"]),
        (0.99, 0.5, []),
    ],
)
def test_what_is_worse_by_more_than_three_per_cent_is_said(
    tmp_path: Path, share: float, seconds: float, worse: list[str]
) -> None:
    old = tree(tmp_path, "old", 0.9, 1.0)
    new = tree(tmp_path, "new", share, seconds)
    done = paired(old, new, "--rounds", 3, "--json")
    assert done.returncode == (1 if worse else 0), done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert [name for name, each in figures.items() if each["worse"]] == worse
    assert figures["look_seconds"]["new_vs_old"] == pytest.approx(seconds)
    assert (tmp_path / "turns").read_text() == "old new new old old new "


def test_one_slow_round_is_not_worse(tmp_path: Path) -> None:
    """The median alone would say so, of two rounds; the rounds do not agree."""
    old = tree(tmp_path, "old", 0.9, 1.0)
    new = tree(tmp_path, "new", 0.9, 0.99)
    slow_at_first = TURN.replace(
        "share, seconds = ",
        "first = len((home.parent / 'turns').read_text().split()) < 3\nshare, seconds = ",
    )
    slow_at_first = slow_at_first.replace(
        '"look_seconds": seconds', '"look_seconds": seconds + first'
    )
    (new / "benchmarks" / "cache.py").write_text(slow_at_first)
    done = paired(old, new, "--rounds", 2, "--json")
    look = json.loads(done.stdout)["figures"]["look_seconds"]
    assert look["new_vs_old"] > 1.03
    assert not look["worse"]
    assert done.returncode == 0


def test_a_benchmark_that_breaks_ends_it(tmp_path: Path) -> None:
    old = tree(tmp_path, "old", 0.9, 1.0)
    new = tree(tmp_path, "new", 0.9, 1.0)
    (new / "broken").touch()
    done = paired(old, new)
    assert done.returncode == 2
    assert "it broke" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_source_tree_is_named(tmp_path: Path) -> None:
    done = paired(tree(tmp_path, "old", 0.9, 1.0), tmp_path)
    assert done.returncode == 2
    assert "root of a source tree" in done.stderr


@pytest.mark.slow
def test_a_benchmark_without_its_servers_says_what_to_install() -> None:
    nothing_installed = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); "
        "from testbed import programs; programs.SYSTEM_DIRECTORIES = (); "
        "sys.path.insert(0, sys.argv[1] + '/benchmarks'); "
        "del sys.argv[:2]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        nothing_installed,
        str(BENCHMARKS.parent),
        str(BENCHMARKS / "remote.py"),
        "--quick",
        "--only=redis_8mib,webdav_8mib",
    ]
    done = subprocess.run(
        command,
        env={"PATH": "/nowhere", "PYTHONPATH": os.environ["PYTHONPATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "redis-server is missing: install" in done.stderr
    assert "nginx is missing: install" in done.stderr


def test_nginx_without_its_module_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        programs, "DAV_MODULE", tmp_path / programs.DAV_MODULE.name
    )
    assert "libnginx-mod-http-dav-ext" in programs.lacking(
        programs.DAV_MODULE.name
    )  # nginx may be missing, too


def test_a_benchmark_needs_neither_the_tests_nor_pytest() -> None:
    for script in [
        *BENCHMARKS.rglob("*.py"),
        *(BENCHMARKS.parent / "testbed").glob("*.py"),
    ]:
        taken = re.findall(
            r"^\s*(?:from|import) ((?:tests|pytest|_pytest)\b.*)",
            script.read_text(),
            re.MULTILINE,
        )
        assert not taken, f"{script}: {taken}"
