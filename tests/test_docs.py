"""The documentation: the generated pages are current, the examples run, every link leads
somewhere.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from pagoda.base.metrics import COUNTERS, Reason

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
        "pagoda.blocks.block_metrics",
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


# names in backticks that are neither ours nor of a module that we import
OF_OTHERS = {
    "Args",  # a heading of docstrings
    "KVEventsConfig",  # of vLLM
    "_ptsz",  # the end of names of functions of CUDA
    "_total",  # the end of names of counters of Prometheus
    "cudaHostRegister",
    "exec",  # the system call
    "mooncake_master",  # a program
    "torch.nn.attention.SDPBackend",
    "torch.set_default_device",
}


@pytest.mark.slow
def test_every_name_in_backticks_in_the_code_exists() -> None:
    """A docstring or a comment that names what was renamed or removed misleads its reader."""
    known = {*COUNTERS, *(str(reason) for reason in Reason)}
    known |= {f"{end}_{reason}" for end in ("miss", "drop") for reason in Reason}
    named: dict[str, Path] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        known.update(path.relative_to(ROOT / "src").with_suffix("").parts)
        prose = _read_names(path, known)
        for quoted in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(.*?\))?`", prose):
            named.setdefault(quoted, path)
    assert len(named) > 500
    lost = {
        name: str(path)
        for name, path in named.items()
        if name not in OF_OTHERS
        and not known.issuperset(name.rstrip(".").split("."))
    }
    assert not lost


def _read_names(path: Path, known: set[str]) -> str:
    """Add the names and the words of the texts of a file to `known`; return its docstrings and
    comments.
    """
    source = path.read_text(encoding="utf-8")
    prose = []
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(
            node.value.value, str
        ):
            docstrings.add(node.value.lineno)
            prose.append(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string)
        elif token.type == tokenize.NAME:
            known.add(token.string)
        elif token.type == tokenize.STRING and token.start[0] not in docstrings:
            known.update(re.findall(r"\w+", token.string))
    return "\n".join(prose)
