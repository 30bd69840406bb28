#!/usr/bin/env python3
"""What a forked child of a running engine does before its own first step. Prints, never fails.

    PYTHONPATH=src python tools/forks.py

A cache with a host and a disk tier has stored and loaded a prompt; then the process forks. Printed
are the functions that the hooks of the fork call in the child and that give a field, or a global, a
new object (by AST; constructors do not count), and the objects that are registered: whose methods
are called by a function of a module.
"""

import ast
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

import pagoda
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import DenseKV

SOURCE = Path(pagoda.__file__).parent
NEW = (
    ast.Call,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
)


def trees():
    """Yield each file of the package, and what is in it."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path), ast.parse(path.read_text())


def rebuilds(function):
    """Return whether a function gives a field or a global a new object."""
    kept = {
        name
        for part in ast.walk(function)
        if isinstance(part, ast.Global)
        for name in part.names
    }
    for part in ast.walk(function):
        if not isinstance(part, ast.Assign | ast.AnnAssign) or not part.value:
            continue
        if not any(isinstance(value, NEW) for value in ast.walk(part.value)):
            continue
        targets = getattr(part, "targets", None) or [part.target]
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Attribute):
                    return True
                if isinstance(name, ast.Name) and name.id in kept:
                    return True
    return False


def ancestors(frame):
    """Yield what called a frame, the nearest first."""
    while (frame := frame.f_back) is not None:
        yield frame


def main():
    """Fork once, and print what the child did."""
    parent = os.getpid()
    called = set()
    registered = {}

    def note(frame, event, _argument):
        code = frame.f_code
        if event != "call" or os.getpid() == parent:
            return
        if SOURCE not in Path(code.co_filename).parents:
            return
        callers = [one.f_code for one in ancestors(frame)]
        # of a constructor, or of Python's own threads
        if any(
            one.co_name == "__init__" or one.co_filename.endswith("threading.py")
            for one in callers
        ):
            return
        if code.co_name != "__init__":
            called.add((code.co_filename, code.co_firstlineno))
        me = frame.f_locals.get("self")
        hooks = ("self" not in one.f_locals for one in ancestors(frame))
        if me is not None and all(hooks):
            registered.setdefault(type(me).__qualname__, set()).add(id(me))

    layout = KVLayout.dense(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    tokens = list(range(1024))
    kv = DenseKV([[np.ones((1, 1024, 8), np.float32) for _ in "KV"]], layout)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory() as register,
        mock.patch.dict(os.environ, XDG_STATE_HOME=register),  # not the user's
        Cache(
            namespace=Namespace("a-model"),
            layout=layout,
            host_path=shared,
            host_size="1MiB",
            disk_path=disk,
            disk_size="1MiB",
        ) as cache,
    ):
        cache.store(tokens, kv)
        cache.retrieve(tokens, kv)
        cache.flush()
        sys.setprofile(note)
        child = os.fork()
        sys.setprofile(None)
        if child:
            os.waitpid(child, 0)
            return
        hooks = 0
        found = []
        for path, tree in trees():
            for node in ast.walk(tree):
                is_call = isinstance(node, ast.Call)
                hooks += is_call and "register_at_fork" in ast.unparse(node.func)
                if isinstance(node, ast.FunctionDef):
                    first = min(
                        [node.lineno, *(d.lineno for d in node.decorator_list)]
                    )
                    if (path, first) in called and rebuilds(node):
                        room = Path(path).relative_to(SOURCE)
                        found.append(f"{room}:{node.lineno} {node.name}")
        print(f"{hooks} calls of os.register_at_fork")
        print(f"{len(found)} functions rebuild something in the child")
        print(*found, sep="\n")
        print(f"{sum(map(len, registered.values()))} objects are registered")
        for name, objects in sorted(registered.items()):
            print(f"{len(objects):3} {name}")
        sys.stdout.flush()
        os._exit(0)


main()
