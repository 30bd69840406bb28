"""The documentation: the generated pages are current, the examples run, every link leads
somewhere.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOPS = ("src", "tests", "tools", "benchmarks", "examples", "testbed")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
]


def test_the_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "reference.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "pagoda.keys",
        "pagoda.layout",
        "pagoda.blocks.manager",
        "pagoda.config",
        "pagoda.cache.cache",
        "pagoda.connectors.transformers.cached_model",
    ],
)
def test_the_examples_of_a_public_class_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


def test_the_example_of_coming_from_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = re.search(
        r"```python\n(.*?)```",
        (DOCS / "start" / "coming-from.md").read_text(),
        re.DOTALL,
    )
    assert found is not None
    exec(compile(found[1], "coming-from.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "768 tokens stored, in chunks of 256",
        "768 tokens are cached: {'host': 768}",
        "768 tokens loaded",
        "0 tokens of another prompt",
    ]


@pytest.mark.parametrize(
    "page",
    [
        page for page in PAGES if page.parent.name != "decisions"
    ],  # these name modules as they were called then
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+\.py)\b", page.read_text()))
    files = [
        str(each.relative_to(ROOT))
        for top in TOPS
        for each in (ROOT / top).rglob("*.py")
    ]
    assert not [
        name
        for name in named
        if not any(f"/{each}".endswith(f"/{name}") for each in files)
    ]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        link
        for link in links
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not missing


def _cells(row: str) -> int:
    """Return how many cells a row of a table has."""
    return len(re.split(r"(?<!\\)\|", row.strip()[1:-1]))


@pytest.mark.parametrize("page", PAGES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = table.splitlines()
        assert {_cells(row) for row in rows} == {_cells(head)}, head


def test_every_page_is_on_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (DOCS / "index.md").read_text()))
    assert [page.name for page in DOCS.glob("*.md")] == ["index.md"]
    assert {
        f"{page.parent.name}/{page.name}" for page in DOCS.glob("*/*.md")
    } <= linked


@pytest.mark.parametrize(
    "package",
    sorted({page.parent for page in (ROOT / "src").rglob("*.py")}),
    ids=lambda each: each.name,
)
def test_a_package_names_its_modules(package: Path) -> None:
    said = (
        ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    )
    modules = {
        page.stem
        for page in package.glob("*.py")
        if not page.stem.startswith("__")
    }
    assert not {name for name in modules if not re.search(rf"\b{name}\b", said)}
