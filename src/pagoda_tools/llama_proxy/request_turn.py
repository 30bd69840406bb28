"""One request of a client: what it asks, and what becomes of it in its slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from pagoda.cache import RequestHints
from pagoda_tools.llama_proxy.request_starts import StartRight
from pagoda_tools.llama_proxy.slot_accounts import Marks, SlotAccount, Tokens

HEADER = "X-Pagoda"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request whose tokens are known.

    `text`: its body. `body`: the same, read. `salt`: KV is shared by those who have the same.
    `hints`: what its client says of it.
    """

    request: web.Request
    route: str
    text: bytes
    body: Mapping[str, object]
    tokens: Tokens
    salt: str
    hints: RequestHints | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return self.body.get("stream") is True

    @property
    def wants_progress(self) -> bool:
        """Whether the client itself asks for events about the progress."""
        return self.body.get("return_progress") is True

    @property
    def hides_what_was_reused(self) -> bool:
        """Whether the answer leaves out how many tokens were reused."""
        return bool(self.body.get("response_fields")) and not self.is_streamed


@dataclass
class Turn:
    """One request that has a slot.

    `held`: tokens of its prompt that the slot has by our account. `loaded`: tokens that were
    restored for it. `stored`: leading tokens of its prompt that are stored. `saved`: that were
    offered to the store.
    """

    question: Question
    slot: SlotAccount
    held: int = 0
    loaded: int = 0
    stored: int = 0
    saved: int = 0
    why: str = ""
    marks: Marks | None = None
    # the slot was to be emptied, and that failed: the server must not use what it has
    is_spoiled: bool = False
    is_over: bool = False
    start: StartRight = field(default_factory=lambda: StartRight(None))

    @property
    def tokens(self) -> Tokens:
        """The tokens of its prompt."""
        return self.question.tokens

    @property
    def salt(self) -> str:
        """Whose KV it shares."""
        return self.question.salt

    @property
    def expected(self) -> int:
        """The most tokens that the server may reuse of a restored slot."""
        return min(self.loaded, len(self.tokens) - 1)

    def header(self) -> str:
        """Return what the client is told of it."""
        parts = [
            f"prompt={len(self.tokens)}",
            f"slot={self.slot.number}",
            f"held={self.held}",
            f"loaded={self.loaded}",
            f"stored={self.stored}",
        ]
        if self.why and not self.salt:
            # it may tell of what others have stored
            parts.append(f'why="{printable(self.why)}"')
        return "; ".join(parts)


def printable(text: str) -> str:
    """Return a text for a header: ASCII, on one line, without quotes."""
    plain = text.encode("ascii", "replace").decode().replace('"', "'")
    return " ".join(plain.split())
