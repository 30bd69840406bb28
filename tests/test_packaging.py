"""What an index of packages shows: the metadata of a build."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def core():
    pytest.importorskip("hatchling")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    return ProjectMetadata(str(ROOT), PluginManager()).core


def test_every_link_of_the_readme_is_absolute_on_an_index(core) -> None:
    links = LINK.findall(core.readme)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    # and each leads to a file of this repository
    start = f"{core.urls['Source']}/blob/main/"
    inside = [link for link in links if link.startswith(start)]
    assert len(inside) == len(LINK.findall((ROOT / "README.md").read_text()))
    for link in inside:
        assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file(), link


def test_the_address_of_the_project_is_written_once(core) -> None:
    files = [
        "pyproject.toml",
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "hatch_build.py",
    ]
    written = sum(
        (ROOT / file).read_text().count(core.urls["Source"]) for file in files
    )
    assert written == 1
    assert set(core.urls) == {"Source", "Documentation", "Changelog", "Security"}
    for url in core.urls.values():
        path = url.removeprefix(core.urls["Source"]).removeprefix("/blob/main/")
        assert (ROOT / path).exists(), url


def test_this_python_is_among_the_classifiers(core) -> None:
    running = f"Programming Language :: Python :: 3.{sys.version_info.minor}"
    assert running in core.classifiers
    assert "Programming Language :: Python :: 3.13" in core.classifiers


def test_no_extra_that_is_named_is_missing() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named: set[str] = set()
    for file_ in (
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
    ):
        for group in re.findall(
            r"(?:pagodakv|'\.|\.whl)\[([a-z,]+)\]", file_.read_text()
        ):
            named.update(group.split(","))
    assert len(named) > 8
    assert named <= set(extras)
