"""Two machines and one Redis: each serves what the other computed, also after a link was cut and
restored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict

from testbed.netns import NotPermittedError

from .house import MachineError, house
from .story import Story, Turn

WIDTH = 34  # of the first column


def main() -> int:
    """Exit codes: 0 done, 1 a turn was wrong (with --verify), 2 it cannot be run here, 130
    interrupted.
    """
    parser = argparse.ArgumentParser(
        "python -m examples.two_machines", description=__doc__
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check each turn; exit code 1 and why if one is wrong",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    args = parser.parse_args()
    try:
        with interruptible(), house() as machines:
            if not args.json:
                print(
                    f"{'machine':{WIDTH}} {'host':>5} {'disk':>5} {'redis':>5}  {'cache':>7}  "
                    f"{'all':>7}  text"
                )
            story = Story(machines, (lambda _: None) if args.json else show)
            story.tell()
    except KeyboardInterrupt:
        trouble = "interrupted"
        code = 130
    except (NotPermittedError, MachineError) as error:
        trouble = str(error)
        code = 2
    else:
        return judged(story, args)
    print(f"two_machines: {trouble}", file=sys.stderr)
    return code


def judged(story: Story, args: argparse.Namespace) -> int:
    """Print the remaining lines; returns the exit code."""
    wrong = [
        f"{turn.machine} {turn.what}: {each}"
        for turn in story.turns
        for each in turn.wrong
    ] + story.wrong
    if args.json:
        print(
            json.dumps(
                {"turns": [asdict(turn) for turn in story.turns], "wrong": wrong}
            )
        )
    elif args.verify:
        print(
            "\n".join(wrong)
            or f"all {len(story.turns)} turns are as they should be"
        )
    return 1 if args.verify and wrong else 0


def show(told: Turn | str) -> None:
    """Print one turn, or what happened to the link."""
    if isinstance(told, str):
        print(f"-------- {told}", flush=True)
        return
    tokens = " ".join(
        f"{told.by_tier.get(tier, 0):>5}" for tier in ("host", "disk", "redis")
    )
    same = "identical" if told.same else "DIFFERENT"
    print(
        f"{told.machine + ' ' + told.what:<{WIDTH}} {tokens}  {told.load_seconds:5.3f} s  "
        f"{told.seconds:5.3f} s  "
        f"{same}  {told.reason}".rstrip(),
        flush=True,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGINT both be a KeyboardInterrupt, also where a shell had SIGINT ignored;
    put back later.
    """
    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(*_: object) -> None:
    """Handle the first signal; later ones are ignored, because everything is being ended
    already.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
