#!/usr/bin/env python3
"""How many modules does one store and one retrieve pass through? Run with the project's own Python:

    python tools/path_modules.py [--json] [--order]

Uses only the public interface, so it still works after a rename. For each call: modules entered, distinct functions, moves of
control from one module to another, and lines of those modules; for the caller's thread alone and for all threads.
`--order` prints the modules in the order of first entry. A warm-up call of another prompt comes first.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import pagoda
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import DenseKV

ROOT = str(Path(pagoda.__file__).resolve().parent) + "/"
TOKENS = 1024
FLOOR = {
    "keys.py",
    "layout.py",
    "clock.py",
    "errors.py",
    "metrics.py",
    "fork.py",
}  # the vocabulary: not counted
events: dict[int, list[tuple[str, str, str]]] = {}
watching = False


def note(frame, event, _):
    if watching and event in ("call", "return"):
        name = frame.f_code.co_filename
        if (
            name.startswith(ROOT)
            and name[len(ROOT) :] not in FLOOR
            and not frame.f_code.co_name.endswith(("comp>", "genexpr>"))
        ):
            events.setdefault(threading.get_ident(), []).append(
                (event, name[len(ROOT) :], frame.f_code.co_qualname)
            )


def walked(of_thread):
    stack, path, functions = [], [], set()
    for event, module, function in of_thread:
        if event == "call":
            stack.append(module)
            functions.add((module, function))
        elif stack:
            stack.pop()
        if stack and (not path or path[-1] != stack[-1]):
            path.append(stack[-1])
    return path, functions


def figures(call, after=lambda: None):
    """Trace `call`, and other threads until `after` returns: `after` itself is not counted."""
    global watching
    events.clear()
    watching = True
    call()
    ours = list(events.get(threading.get_ident(), []))
    after()
    watching = False
    events[threading.get_ident()] = ours
    main, order, functions, moves = threading.get_ident(), {}, set(), 0
    found = {}
    for thread in sorted(events, key=lambda ident: ident != main):
        path, of_thread = walked(list(events[thread]))
        order.update(dict.fromkeys(path))
        functions |= of_thread
        moves += max(0, len(path) - 1)
        where = "caller" if thread == main else "all"
        found[where] = row(order, functions, moves)
    found.setdefault("all", found["caller"])
    return found


def row(order, functions, moves):
    lines = sum(len(Path(ROOT + module).read_text().splitlines()) for module in order)
    return {
        "modules": len(order),
        "functions": len(functions),
        "moves": moves,
        "lines": lines,
        "order": list(order),
    }


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--json", action="store_true")
    ask.add_argument("--order", action="store_true")
    want = ask.parse_args()
    layout = KVLayout.dense(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    disk, first, second = (
        Path(tempfile.mkdtemp(prefix="path-", dir=place)) for place in (None, "/dev/shm", "/dev/shm")
    )

    def opened(host):
        return Cache(
            namespace=Namespace(model="m"), layout=layout, host_size=8 << 20, host_path=str(host),
            disk_size=32 << 20, disk_path=str(disk),
        )  # fmt: skip

    def kv():
        rng = np.random.default_rng(0)
        return DenseKV(
            [[rng.random((2, TOKENS, 16), dtype=np.float32) for _ in range(2)] for _ in range(2)], layout
        )

    threading.setprofile(note)
    sys.setprofile(note)
    ids, warm, view = np.arange(TOKENS, dtype=np.int32), np.arange(TOKENS, dtype=np.int32) + 7, kv()
    found = {}
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
        for place in (disk, first, second):
            shutil.rmtree(place, ignore_errors=True)
    if want.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'call':14} {'thread':7} modules functions  moves  lines")
    for call, by_thread in found.items():
        for where, at in by_thread.items():
            print(
                f"{call:14} {where:7} {at['modules']:7} {at['functions']:9} {at['moves']:6} {at['lines']:6}"
            )
            if want.order and where == "all":
                print("   " + " > ".join(at["order"]))


main()
