"""Replay prompts at their arrival times, and show how much of each was reused, and from where."""

from __future__ import annotations

import argparse
import sys

from pagoda import PagodaError

OPTIONS = {
    "--blocks": (64, "blocks on the device"),
    "--block-tokens": (16, "tokens a block"),
    "--chunk": (256, "most tokens a step; longer prompts go in chunks"),
    "--host": (
        "2MiB",
        "host memory behind the device; 0: none, and no disk either",
    ),
    "--disk": ("64MiB", "disk room behind that; 0: none"),
    "--host-path": (
        None,
        "where that memory is; None: a directory that is removed at the end",
    ),
    "--disk-path": (None, "where the disk is; None: likewise"),
    "--model": (
        None,
        "path or id of a Llama or Qwen; None: a small Llama of random weights",
    ),
    "--device": ("cpu", "where the model and its blocks are"),
    "--no-prefix-cache": (False, "compute everything"),
    "--unchecked": (False, "blend documents without a verdict of pagoda quality"),
    "--verify": (
        False,
        "ask plain generate too, and say whether the answers are the same",
    ),
    "--json": (False, "print one JSON object"),
}


def main() -> int:
    """Exit codes: 0 done, 1 an answer differs, 2 wrong use, 130 interrupted."""
    parser = argparse.ArgumentParser(
        "python -m examples.paged_engine", description=__doc__
    )
    parser.add_argument(
        "requests",
        nargs="?",
        help="JSONL as README.md says; without it some are made up",
    )
    for name, (default, text) in OPTIONS.items():
        kind = (
            {"action": "store_true"}
            if default is False
            else {"type": type(default or "")}
        )
        parser.add_argument(
            name, default=default, help=f"{text} ({default})", **kind
        )
    args = parser.parse_args()
    try:
        if min(args.blocks, args.block_tokens, args.chunk) < 1:
            raise ValueError(
                "--blocks, --block-tokens and --chunk must be at least 1"
            )
        from .replay import run  # seconds go into importing Transformers

        return run(args)
    except KeyboardInterrupt:
        trouble = "interrupted"
        code = 130
    except (ValueError, OSError, PagodaError) as error:
        trouble = " ".join(str(error).split())
        code = 2
    print(f"paged_engine: {trouble}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
