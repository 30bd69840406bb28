"""`python -m pagoda`: the command `pagoda`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command with the arguments of the process; return its exit code."""
    from pagoda_tools.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
