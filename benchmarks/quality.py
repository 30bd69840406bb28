"""The gate on a model that must read across documents: `python benchmarks/quality.py [--prompts N]
[options]`.

Runs `pagoda quality` on the recall model of `testbed` (trained at the first run, a minute) and
prompts of a seed that nothing was tuned on. Options are those of the command, such as --json,
--blend deviation:0.15 and --png FILE. The verdict goes to a temporary directory unless --out is
given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SEED = 100
CHUNK_TOKENS = 16  # documents have 40 to 56 tokens


def main() -> int:
    """Write model and prompts to a temporary directory, and run the command; return its exit
    code.
    """
    from pagoda_tools.cli import main as pagoda
    from testbed.recall_model import recall_model, recall_prompts

    ask = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ask.add_argument("--prompts", type=int, default=120)
    want, options = ask.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        recall_model().save_pretrained(f"{place}/recall-model")
        file = Path(place, f"recall-{SEED}.jsonl")
        with file.open("w") as lines:
            for prompt in recall_prompts(SEED, want.prompts):
                asked = {
                    "documents": prompt.documents,
                    "question": prompt.question,
                    "answer": [prompt.answer],
                }
                lines.write(json.dumps(asked) + "\n")
        usual = [
            "--chunk-tokens",
            str(CHUNK_TOKENS),
            "--out",
            f"{place}/verdicts",
        ]
        return pagoda(
            ["quality", f"{place}/recall-model", str(file), *usual, *options]
        )


if __name__ == "__main__":
    sys.exit(main())
