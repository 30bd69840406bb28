"""Real stores for the tests of the command, and a function that runs the command in a separate
process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np

from pagoda.keys import Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, Reserved, StoreSpec
from pagoda.slab import FileSlab
from pagoda.tiers import Chunk, DiskTier
from pagoda_tools.cli import main

CHUNK = 16
LLAMA = Namespace("llama", kv_dtype="bfloat16")
QWEN = Namespace("qwen")
_NO_HOME = "/dev/null/home"  # cannot be created, not even by root
_NO_TIER = "/dev/shm/pagoda-test-no-tier"  # is never created
RUN = "import sys; from pagoda_tools.cli import main; sys.exit(main())"

# stores chunks until it is killed and keeps about 64 of them, so that other processes can read
_WRITER = """
import sys, itertools
from pathlib import Path
from tests.cli.shelf import LLAMA, host, put
ledger = host(Path(sys.argv[1]))
for number in itertools.count():
    put(ledger, LLAMA, range(number % 1000, number % 1000 + 64))
    if number == 0:
        print("ready", flush=True)
"""


def host(root: Path, slots: int = 64, name: str = "layout") -> Ledger:
    """Open a store in memory whose slots are never read."""
    return Ledger.open(
        StoreSpec(
            root=root, name=name, kind="memory", slots=slots, slot_bytes=4096
        )
    )


@contextmanager
def disk(root: Path, slots: int = 64) -> Iterator[DiskTier]:
    """Open a disk tier for chunks of one page."""
    layout = KVLayout.opaque(CHUNK, 4096, "test")
    spec = StoreSpec(
        root=root,
        name=layout.fingerprint,
        kind="file",
        slots=slots,
        slot_bytes=8192,
    )
    ledger = Ledger.open(spec)
    slab = FileSlab(ledger.slab_path, ledger.slots, 8192)
    tier = DiskTier(layout, ledger, slab, deadline_seconds=30.0)
    try:
        yield tier
    finally:
        tier.close()


def put(
    ledger: Ledger, namespace: Namespace, tokens: Sequence[int], start: int = 0
) -> list[bytes]:
    """Store the chunks of `tokens` from chunk `start` on (or not, if someone clears); return all
    their keys.
    """
    ledger.namespaces.register(namespace.root, namespace.fields())
    keys = chunk_keys(list(tokens), namespace.root, CHUNK)
    for position, key in enumerate(keys[start:], start):
        (outcome,) = ledger.reserve(
            [key],
            namespace=namespace.root,
            start=position,
            tokens=CHUNK,
            deadline_seconds=30.0,
        )
        if isinstance(outcome, Reserved):
            ledger.commit([outcome], deadline_seconds=30.0)
    return keys


def save(
    tier: DiskTier, namespace: Namespace, tokens: Sequence[int]
) -> list[bytes]:
    """Write the chunks of `tokens` to the disk, each filled with its position; return their
    keys.
    """
    tier.register(namespace)
    keys = chunk_keys(list(tokens), namespace.root, CHUNK)
    parents = [None, *keys[:-1]]
    chunks = [
        Chunk(
            key,
            n,
            CHUNK,
            np.full(4096, n + 1, np.uint8),
            parents[n],
            lambda: True,
        )
        for n, key in enumerate(keys)
    ]
    for future in tier.store(chunks, namespace.root):
        assert future.result(60).ok
    return keys


def pagoda(
    *args: object, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, with no configuration except `variables`: once or so
    for each command.
    """
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, args)],
        input=stdin,
        env={**_unconfigured(args), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _unconfigured(args: Sequence[object]) -> dict[str, str]:
    """Return an environment without options, and without the tiers of the user who runs the tests:
    some clear all.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PAGODA_")
    }
    # it would prevail over the file's
    tier = {} if "--config" in args else {"PAGODA_HOST_PATH": _NO_TIER}
    return {**clean, "HOME": _NO_HOME, "XDG_CONFIG_HOME": _NO_HOME, **tier}


def answer(
    *args: object, code: int = 0, stdin: str = "", **variables: str
) -> dict[str, object]:
    """Run the command with --json in this process; return its output, which must be exactly one
    object.
    """
    found_code, out, err = run_here(*args, "--json", stdin=stdin, **variables)
    assert found_code == code, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def refused(*args: object, stdin: str = "", **variables: str) -> str:
    """Run the command in this process; return the one line of its refusal."""
    return one_line(*run_here(*args, stdin=stdin, **variables))


def run_here(
    *args: object, stdin: str = "", **variables: str
) -> tuple[int, str, str]:
    """Run the command in this process, with no configuration except `variables`; return exit code,
    stdout, stderr.
    """
    out = io.StringIO()
    err = io.StringIO()
    environment = {**_unconfigured(args), **variables}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))
        ),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main([str(argument) for argument in args])
    return code, out.getvalue(), err.getvalue()


def done_here(
    *args: object, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, half a second of a core sooner than `pagoda`; return what
    that returns.
    """
    return subprocess.CompletedProcess(
        args, *run_here(*args, stdin=stdin, **variables)
    )


def one_line(code: int, out: str, err: str) -> str:
    """Return the message of a refusal, which must be exit code 2 and one line on stderr."""
    assert (code, out) == (2, ""), out + err
    assert err.startswith("pagoda: ") and err.count("\n") == 1, err
    return err


@contextmanager
def writer(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process store chunks under `root` continuously."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
