"""Whose lines are whose, where a command shares its output with a server that it has started."""

from __future__ import annotations

import subprocess
import sys

LOGS = """
import logging
from pagoda_tools.cli.printing import note, show_log

show_log("text")
note("a remark")
logging.getLogger("pagoda.cache").warning("one line\\nand another")
try:
    raise ValueError("what is wrong")
except ValueError:
    logging.getLogger("asyncio").exception("a task failed")
"""


def test_every_line_begins_with_the_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS], capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("pagoda: ")] == []
    assert "one line" in lines[1]
    assert lines[-1] == "pagoda: ValueError: what is wrong"
