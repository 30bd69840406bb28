"""The turns of the example, and the expected result of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda_tools.cli.demo.demo_prompts import documents

from .house import CHUNK_TOKENS, DEADLINE_SECONDS, House, Machine

DOCUMENT_TOKENS = 8 * CHUNK_TOKENS
QUESTION = b"\n\nQuestion: what is this about?\nAnswer:"
NEW_TOKENS = 32
MOST_TRIES = 12  # prompts until the breaker is open
OUTAGE_SECONDS = 20.0  # until B finds the store again, at most
# why a chunk that is in the store is not served while the link is cut
CUT_REASONS = ("tier_skipped", "deadline", "io_error")
# the tier that serves all of the document; or the reasons of which one is given
Expected = str | tuple[str, ...]


@dataclass
class Turn:
    """One prompt that is sent to one machine. `wrong` says what differs from the expectation;
    empty: nothing.
    """

    what: str
    machine: str
    by_tier: dict[str, int]
    reason: str
    detail: str
    seconds: float  # until the last token
    load_seconds: float  # of these, looking for KV and loading it
    same: bool  # the text is that of an uncached run
    output: list[int]
    wrong: list[str] = field(default_factory=list)


class Story:
    """The turns, in order. `told` is called with each turn and each event when it has ended."""

    def __init__(
        self, house: House, told: Callable[[Turn | str], object]
    ) -> None:
        self._house = house
        self._told = told
        self._text = documents()[0].encode()
        self.turns: list[Turn] = []
        self.wrong: list[str] = []  # of no single turn

    def tell(self) -> None:
        """Run all turns. Ends in bounded time; raises MachineError if a machine does not answer."""
        self._shared()
        self._cut()
        self._mended()

    def _shared(self) -> None:
        a, b = self._house
        self._ask("computes and stores document 1", a, 1, ("absent",))
        self._written(a)
        self._ask("is asked about it", b, 1, "redis")
        self._ask("is asked again", b, 1, "host")

    def _cut(self) -> None:
        a, b = self._house
        b.cable.cut()
        self._told("the link of B is cut")
        self._ask("still has document 1", b, 1, "host")
        for document in (2, 3):
            self._ask(
                f"computes and stores document {document}",
                a,
                document,
                ("absent",),
            )
        self._written(a)
        self._ask("computes document 2 itself", b, 2, CUT_REASONS)
        for document in range(100, 100 + MOST_TRIES):
            if (
                self._ask("computes another", b, document, CUT_REASONS).reason
                == "tier_skipped"
            ):
                return
        self.wrong.append(
            f"B still asks the store after {MOST_TRIES} prompts without an answer"
        )

    def _mended(self) -> None:
        a, b = self._house
        b.cable.mend()
        began = time.monotonic()
        found = False
        while not found and time.monotonic() < began + OUTAGE_SECONDS:
            found = "redis" in b.say(look=self._prompt(3))["by_tier"]
            time.sleep(0.05)
        seconds = time.monotonic() - began
        self._told(
            f"the link is mended; {seconds:.1f} s later B {'has' if found else 'HAS NOT'} found "
            "the store again"
        )
        self._ask("is asked about document 3", b, 3, "redis")
        self._ask("computes and stores document 4", b, 4, ("absent",))
        self._written(b)
        self._ask("is asked about it", a, 4, "redis")

    def _ask(
        self, what: str, machine: Machine, document: int, expected: Expected
    ) -> Turn:
        answer = machine.say(ask=self._prompt(document), new=NEW_TOKENS)
        turn = Turn(what, machine.name, **answer)
        turn.wrong = wrong_with(turn, expected)
        self.turns.append(turn)
        self._told(turn)
        return turn

    def _written(self, machine: Machine) -> None:
        if not machine.say(flush=20.0)["flushed"]:
            self.wrong.append(
                f"the store did not take what {machine.name} computed within 20 s"
            )

    def _prompt(self, document: int) -> list[int]:
        at = document * DOCUMENT_TOKENS
        return [*self._text[at : at + DOCUMENT_TOKENS], *QUESTION]


def wrong_with(turn: Turn, expected: Expected) -> list[str]:
    """Return what is not as expected in a turn, in words."""
    wrong = [] if turn.same else ["another text than that of an uncached run"]
    if isinstance(expected, str):
        if turn.by_tier != {expected: DOCUMENT_TOKENS}:
            wrong.append(f"{DOCUMENT_TOKENS} tokens were to come from {expected}")
    elif turn.by_tier or turn.reason not in expected:
        wrong.append(
            f"nothing was to come, for the reason {' or '.join(expected)}"
        )
    if turn.load_seconds > 2 * DEADLINE_SECONDS:
        wrong.append(
            f"the cache took {turn.load_seconds:.1f} s with a deadline of {DEADLINE_SECONDS:g} s"
        )
    return wrong
