#!/usr/bin/env python3
"""How large is each package of src/pagoda, and which class names are used twice? Standard library only.

    python tools/house.py [src/pagoda] [--json]

`code` is lines without blank lines, comments and docstrings. `core` adds up what a store to the local tiers needs:
keys, layout, metrics, errors, clock, ledger, policy, slab, codec, cache, config, the local tiers and CPU transfers.
"""

import argparse
import ast
import collections
import io
import json
import statistics
import tokenize
from pathlib import Path

OUTSIDE = {"cli", "connectors", "blocks", "replay", "testing", "migrate", "serve", "quality", "blend"}
OUTSIDE_FILES = (
    "remote", "redis", "resp", "objects", "courier", "buckets", "wire", "link", "memo.py", "asks.py", "lmcache",
    "gpu", "cuda", "kernels", "driver", "pinned", "places", "ring.py", "ports", "gate", "beside", "device_pages", "measure",
)  # fmt: skip  # present names of modules that may move, so that a move alone changes nothing


def code_lines(path):
    source = path.read_text()
    tree, skip = ast.parse(source), set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                skip.update(range(part.lineno, part.end_lineno + 1))
    blank = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - skip), tree


def themes(tree):
    """Return the lines of each group of connected top-level definitions (40 lines or more), and the public names."""
    defs = {
        n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    group = {name: {name} for name in defs}
    for name, node in defs.items():
        for other in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(defs):
            both = group[name] | group[other]
            for member in both:
                group[member] = both
    groups = {id(g): sum(defs[n].end_lineno - defs[n].lineno + 1 for n in g) for g in group.values()}
    return sum(lines >= 40 for lines in groups.values()), sum(not n.startswith("_") for n in defs)


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("root", nargs="?", default="src/pagoda")
    ask.add_argument("--json", action="store_true")
    want = ask.parse_args()
    root, rooms, classes, lengths = (
        Path(want.root),
        collections.defaultdict(lambda: [0, 0]),
        collections.defaultdict(list),
        [],
    )
    core, mixed, two = 0, [], 0
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        code, tree = code_lines(path)
        room = inside.parts[0] if len(inside.parts) > 1 else "."
        rooms[room][0] += 1
        rooms[room][1] += code
        if room not in OUTSIDE and not any(
            word in part for part in inside.parts[1:] for word in OUTSIDE_FILES
        ):
            core += code
        groups, public = themes(tree)
        length = len(path.read_text().splitlines())
        if groups > 2 or public > 12 or length > 900:
            mixed.append(f"{inside} ({groups} themes, {public} public, {length} lines)")
        two += groups == 2
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(inside))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths.append(node.end_lineno - node.lineno + 1)
    twice = {name: places for name, places in sorted(classes.items()) if len(places) > 1}
    found = {
        "files": sum(files for files, _ in rooms.values()), "code": sum(code for _, code in rooms.values()), "core": core,
        "rooms": {room: {"files": files, "code": code} for room, (files, code) in sorted(rooms.items())},
        "function_median": statistics.median(lengths), "function_max": max(lengths), "class_names_used_twice": twice,
        "mixed": mixed, "two_themes": two,
    }  # fmt: skip
    if want.json:
        print(json.dumps(found, indent=1))
        return
    for room, at in found["rooms"].items():
        print(f"{room:12} {at['files']:4} files {at['code']:6} lines of code")
    print(
        f"all {found['files']} files {found['code']} lines; core {core}; functions: median {found['function_median']}, max {found['function_max']}"
    )
    print(f"{two} modules with two themes; mixed: {', '.join(mixed) or 'none'}")
    print(
        f"{len(twice)} class names used twice: "
        + ", ".join(f"{name} x{len(places)}" for name, places in twice.items())
    )


main()
