#!/usr/bin/env python3
"""How much there is to read, and how dense it is. Prints, never fails; standard library only.

    python tools/house.py [TREE ...] [--json]

By default of `src`, `tests` and `benchmarks`. Lines of code are without blank lines,
comments and docstrings. What counts is tokens: they stay the same however the lines are broken. Per
1,000 lines of code: packed assignments (`a, b = x, y`), conditional expressions, comprehensions,
and lines over 100 columns. The rooms are the packages of the first tree.
"""

import argparse
import ast
import io
import json
import statistics
import tokenize
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

TREES = ("src", "tests", "benchmarks")
LONG = 100
WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """What was counted in some files."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    packed: int = 0
    conditional: int = 0
    comprehensions: int = 0
    long: int = 0
    functions: list[int] = field(default_factory=list)  # their lines

    def add(self, other):
        """Add what was counted in another file."""
        self.files += other.files
        self.lines += other.lines
        self.tokens += other.tokens
        self.packed += other.packed
        self.conditional += other.conditional
        self.comprehensions += other.comprehensions
        self.long += other.long
        self.functions += other.functions

    def figures(self):
        """Return what is printed."""
        found = asdict(self)
        lengths = found.pop("functions") or [0]
        lines = max(1, self.lines)
        found["tokens_a_line"] = round(self.tokens / lines, 2)
        for name in ("packed", "conditional", "comprehensions", "long"):
            found[name] = round(1000 * found[name] / lines, 1)
        found["function_median"] = statistics.median(lengths)
        found["function_max"] = max(lengths)
        return found


def docstring_lines(tree):
    """Return the numbers of the lines that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            value = getattr(part, "value", None)
            is_text = isinstance(value, ast.Constant) and isinstance(
                value.value, str
            )
            if isinstance(part, ast.Expr) and is_text:
                found.update(range(part.lineno, part.end_lineno + 1))
    return found


def is_packed(node):
    """Return whether a node is an assignment such as `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(
        node.targets[0], ast.Tuple
    )


def size_of(path):
    """Count one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    documented = docstring_lines(tree)
    code = set()
    found = Size(files=1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE and token.start[0] not in documented:
            code.update(range(token.start[0], token.end[0] + 1))
            found.tokens += 1
    found.lines = len(code)
    found.long = sum(len(line) > LONG for line in source.splitlines())
    for node in ast.walk(tree):
        found.packed += is_packed(node)
        found.conditional += isinstance(node, ast.IfExp)
        found.comprehensions += isinstance(node, COMPREHENSIONS)
        if isinstance(node, FUNCTIONS):
            found.functions.append(node.end_lineno - node.lineno + 1)
    return found


def sizes(root):
    """Count a tree; return it whole and room by room."""
    whole = Size()
    rooms = defaultdict(Size)
    for path in sorted(root.rglob("*.py")):
        one = size_of(path)
        inside = path.relative_to(root).parts
        rooms["/".join(inside[:-1][:2]) or "."].add(one)
        whole.add(one)
    return whole, rooms


def main():
    """Read the command line and print."""
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument(
        "trees", nargs="*", type=Path, default=[Path(tree) for tree in TREES]
    )
    ask.add_argument("--json", action="store_true")
    want = ask.parse_args()
    trees = {}
    rooms = {}
    for root in want.trees:
        whole, of_root = sizes(root)
        trees[str(root)] = whole.figures()
        rooms[str(root)] = {
            name: size.figures() for name, size in of_root.items()
        }
    if want.json:
        print(json.dumps({"trees": trees, "rooms": rooms}, indent=1))
        return
    head = (
        f"{'':20} {'files':>5} {'lines':>6} {'tokens':>7} {'a line':>6} {'packed':>6} "
        f"{'cond.':>6} {'compr.':>6} {'>100':>5}"
    )
    print(head)
    first = next(iter(rooms))
    for name, at in {**dict(sorted(rooms[first].items())), **trees}.items():
        print(
            f"{name:20} {at['files']:5} {at['lines']:6} {at['tokens']:7} "
            f"{at['tokens_a_line']:6.2f} "
            f"{at['packed']:6.1f} {at['conditional']:6.1f} {at['comprehensions']:6.1f} "
            f"{at['long']:5.1f}"
        )


main()
