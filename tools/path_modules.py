#!/usr/bin/env python3
"""What a store, a look-up and a retrieve pass through. Run with the project's own Python:

    python tools/path_modules.py [--json] [--order]

Uses only the public interface, so it still works after a rename. For each call: modules entered,
distinct functions, tokens of those functions, transfers of control from one module to another, and
the depth of frames; for the caller's thread alone and for all threads. `--order` prints the modules
in the order of first entry. A warm-up call of another prompt comes first.
"""

import argparse
import ast
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import tokenize
from pathlib import Path

import numpy as np

import pagoda
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import DenseKV

ROOT = str(Path(pagoda.__file__).resolve().parent) + "/"
TOKENS = 1024
NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
events: dict[int, list[tuple[str, str, str, int]]] = {}
watching = False


def note(frame, event, _):
    """Note that a function of the package was entered or left; see `sys.setprofile`."""
    if not watching or event not in ("call", "return"):
        return
    code = frame.f_code
    if not code.co_filename.startswith(ROOT) or code.co_name.endswith(
        ("comp>", "genexpr>")
    ):
        return
    module = code.co_filename[len(ROOT) :]
    entry = (event, module, code.co_qualname, code.co_firstlineno)
    events.setdefault(threading.get_ident(), []).append(entry)


def walked(of_thread):
    """Return the modules in the order in which control went through them, the functions, and the
    greatest depth.
    """
    stack = []
    path = []
    functions = set()
    depth = 0
    for event, module, function, line in of_thread:
        if event == "call":
            stack.append(module)
            functions.add((module, function, line))
            depth = max(depth, len(stack))
        elif stack:
            stack.pop()
        if stack and (not path or path[-1] != stack[-1]):
            path.append(stack[-1])
    return path, functions, depth


@functools.cache
def tokens_by_line(module):
    """Return the number of tokens of each function of a module, by its first line; a decorator's
    line counts too.
    """
    source = Path(ROOT + module).read_text()
    tokens = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_TOKENS
    ]
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(
                [node.lineno, *(one.lineno for one in node.decorator_list)]
            )
            body = node.body
            start = (
                body[0].end_lineno + 1
                if ast.get_docstring(node) and len(body) > 1
                else body[0].lineno
            )
            found[first] = sum(
                start <= line <= node.end_lineno for line in tokens
            )
    return found


def figures(call, after=lambda: None):
    """Trace `call`, and other threads until `after` returns: `after` itself is not counted."""
    global watching
    events.clear()
    watching = True
    call()
    main = threading.get_ident()
    ours = list(events.get(main, []))
    after()
    watching = False
    events[main] = ours
    order = {}
    functions = set()
    transfers = 0
    deepest = 0
    found = {}
    for thread in sorted(events, key=lambda ident: ident != main):
        path, of_thread, depth = walked(list(events[thread]))
        order.update(dict.fromkeys(path))
        functions |= of_thread
        transfers += max(0, len(path) - 1)
        deepest = max(deepest, depth)
        where = "caller" if thread == main else "all"
        found[where] = {
            "modules": len(order),
            "functions": len(functions),
            "tokens": sum(
                tokens_by_line(module).get(line, 0)
                for module, _, line in functions
            ),
            "transfers": transfers,
            "depth": deepest,
            "order": list(order),
        }
    found.setdefault("all", found["caller"])
    return found


def measured():
    """Return the figures of each call."""
    layout = KVLayout.dense(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    register = Path(tempfile.mkdtemp(prefix="path-"))  # not the user's
    os.environ["XDG_STATE_HOME"] = str(register)
    disk = Path(tempfile.mkdtemp(prefix="path-"))
    first = Path(tempfile.mkdtemp(prefix="path-", dir="/dev/shm"))
    second = Path(tempfile.mkdtemp(prefix="path-", dir="/dev/shm"))

    def opened(host):
        return Cache(
            namespace=Namespace(model="m"),
            layout=layout,
            host_size=8 << 20,
            host_path=str(host),
            disk_size=32 << 20,
            disk_path=str(disk),
        )

    def kv():
        rng = np.random.default_rng(0)
        planes = [
            [rng.random((2, TOKENS, 16), dtype=np.float32) for _ in range(2)]
            for _ in range(2)
        ]
        return DenseKV(planes, layout)

    ids = np.arange(TOKENS, dtype=np.int32)
    warm = ids + 7
    view = kv()
    found = {}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with opened(first) as cache:
            cache.store(warm, kv())
            cache.retrieve(warm, kv())
            cache.flush()
            found["store"] = figures(lambda: cache.store(ids, view), cache.flush)
            found["lookup"] = figures(lambda: cache.lookup(ids))
            found["retrieve_host"] = figures(lambda: cache.retrieve(ids, view))
        with opened(second) as cache:  # empty host memory, the same disk
            cache.retrieve(warm, kv())
            found["retrieve_disk"] = figures(lambda: cache.retrieve(ids, view))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for place in (disk, first, second, register):
            shutil.rmtree(place, ignore_errors=True)
    return found


def main():
    """Read the command line and print."""
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--json", action="store_true")
    ask.add_argument("--order", action="store_true")
    want = ask.parse_args()
    found = measured()
    if want.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'call':14} {'thread':7} modules functions  tokens transfers  depth")
    for call, by_thread in found.items():
        for where, at in by_thread.items():
            print(
                f"{call:14} {where:7} {at['modules']:7} {at['functions']:9} {at['tokens']:7} "
                f"{at['transfers']:9} {at['depth']:6}"
            )
            if want.order and where == "all":
                print("   " + " > ".join(at["order"]))


main()
