"""What each slot of the server holds, by our account, and which slot a request gets.

The server says nothing about the tokens in its slots, so the proxy remembers what it let each slot
compute. An account may claim more than the slot has (a request that was aborted while its prompt
was read): then the server computes the rest, and the text is the same. What is stored never follows
the account: it has the tokens that the saved state itself has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from pagoda.cache import RequestHints

Tokens = npt.NDArray[np.int32]
Marks = Callable[[], Awaitable[list[int]]]

NOTHING: Tokens = np.empty(0, np.int32)


class SlotAccount:
    """One slot. `lock` is held by who restores into it, asks it or saves it; the rest is changed
    only by its holder. For the event loop.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = asyncio.Lock()
        # `lock` is held to save it, and is free again soon
        self.is_saving = False
        self.tokens = NOTHING
        # so many tokens of an answer follow whose ids nobody has told us
        self.more_tokens = 0
        # so many of all these are stored
        self.stored_tokens = 0
        # so many were offered to the store, which took them or would refuse them again
        self.saved_tokens = 0
        self.why_not_stored = ""
        self.salt = ""
        # False: a request that we could not follow may have used it
        self.is_known = True
        # its KV may not be that of its tokens: it must be emptied before its next use
        self.is_tainted = False
        # tainted by a request that chose adapters: its user and these
        self.adapters: tuple[str, object] | None = None
        # of the last request
        self.used_at = 0.0
        # at which it is to be saved; None: nothing is new since it was saved
        self.save_at: float | None = None
        # in a row, since it was used
        self.failed_saves = 0
        # the server's number of its last request of ours; only where others ask the server too
        self.task: object = None
        # where the state of models with windows or recurrent layers should be kept
        self.marks: Marks | None = None
        # how its last request ended: to be noted when it is saved, at the latest
        self.hints: RequestHints | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it surely holds nothing."""
        return self.is_known and not len(self.tokens)

    @property
    def is_retained(self) -> bool:
        """Whether what it has is to be retained: then it is stored before it is used again."""
        return self.hints is not None and self.hints.retain_seconds > 0

    @property
    def new_tokens(self) -> int:
        """How many of its tokens were not offered to the store yet."""
        if not self.is_known:
            return 0
        return len(self.tokens) + self.more_tokens - self.saved_tokens

    def may_ask_ram(self, held_tokens: int) -> bool:
        """Whether a server with a RAM cache may look there for a prompt of which the slot has so
        many leading tokens: not for an empty slot, nor while most of what the slot has is used.
        """
        if not self.is_known or self.more_tokens > held_tokens:
            return True
        return held_tokens < len(self.tokens)

    def held(self, tokens: Tokens, salt: str) -> int:
        """Return how many leading tokens of a prompt it has."""
        if not self.is_known or self.is_tainted or self.salt != salt:
            return 0
        return common_prefix(self.tokens, tokens)

    def set(
        self,
        tokens: Tokens,
        salt: str,
        stored_tokens: int,
        saved_tokens: int | None = None,
    ) -> None:
        """Account for what it holds now, and that it was used now. `saved_tokens`: None: as many
        as are stored.
        """
        self.tokens = tokens
        self.more_tokens = 0
        self.stored_tokens = stored_tokens
        self.saved_tokens = (
            stored_tokens if saved_tokens is None else saved_tokens
        )
        self.why_not_stored = ""
        self.salt = salt
        self.is_known = True
        self.used_at = time.monotonic()
        self.save_at = None
        self.failed_saves = 0
        self.marks = None
        self.hints = None
        self.adapters = None

    def clear(self) -> None:
        """Account for an emptied slot."""
        self.set(NOTHING, "", 0)
        self.is_tainted = False

    def copied(self) -> SlotAccount:
        """Return what it holds now, as a slot of its own."""
        other = SlotAccount(self.number)
        other.restore(self)
        return other

    def restore(self, other: SlotAccount) -> None:
        """Account for what another one holds: nothing was changed since it was copied."""
        self.tokens = other.tokens
        self.more_tokens = other.more_tokens
        self.stored_tokens = other.stored_tokens
        self.saved_tokens = other.saved_tokens
        self.why_not_stored = other.why_not_stored
        self.salt = other.salt
        self.is_known = other.is_known
        self.used_at = other.used_at
        self.save_at = other.save_at
        self.marks = other.marks
        self.hints = other.hints

    def forget(self) -> None:
        """Account for a request that we could not follow."""
        self.set(NOTHING, "", 0)
        self.is_known = False


class SlotAccounts:
    """All slots of a server. For the event loop."""

    def __init__(self, count: int, *, may_have_ram_cache: bool) -> None:
        """`may_have_ram_cache`: the server may keep copies of what its slots held."""
        self._may_have_ram_cache = may_have_ram_cache
        # these copies may have KV that is not that of their tokens, until the server is restarted
        self.is_ram_tainted = False
        self.all = [SlotAccount(number) for number in range(count)]
        self._freed = asyncio.Event()

    @property
    def free(self) -> list[SlotAccount]:
        """The slots that nobody uses now."""
        return [slot for slot in self.all if not slot.lock.locked()]

    @property
    def is_any_tainted(self) -> bool:
        """Whether some slot, or what the server keeps in RAM, must not be used as it is."""
        return self.is_ram_tainted or any(slot.is_tainted for slot in self.all)

    async def take(
        self, choose: Callable[[Sequence[SlotAccount]], SlotAccount | None]
    ) -> SlotAccount:
        """Return the slot that `choose` chooses among those that are free or are being saved, and
        lock it; wait as long as it chooses none, or one that is being saved.
        """
        while True:
            slot = choose(
                [
                    slot
                    for slot in self.all
                    if slot.is_saving or not slot.lock.locked()
                ]
            )
            if slot is not None and not slot.lock.locked():
                # nobody else can take it: there was no await since we looked
                await slot.lock.acquire()
                return slot
            self._freed.clear()
            await self._freed.wait()

    def give_back(self, slot: SlotAccount) -> None:
        """Unlock a slot, and wake those who wait for one."""
        slot.is_saving = False
        slot.lock.release()
        self._freed.set()

    def resize(self, count: int) -> None:
        """Account for a server that was started anew with another number of slots."""
        while len(self.all) < count:
            self.all.append(SlotAccount(len(self.all)))
        while len(self.all) > count and not self.all[-1].lock.locked():
            self.all.pop()

    def forget_used(self, changed: set[int] | None, since: float) -> None:
        """Account for an unaccounted request that began at `since` and has ended.

        `changed`: the slots that had another request meanwhile; None: any. A slot that is locked
        now has a request that came later, unless it is only being saved.
        """
        for slot in self.all:
            if slot.lock.locked() and not slot.is_saving:
                continue
            is_changed = changed is None or slot.number in changed
            if is_changed or slot.used_at >= since:
                slot.forget()

    def doubt_others(self, than: SlotAccount) -> None:
        """Account for a server that has emptied a slot, and perhaps more of the idle ones. What is
        new in one is saved soon, which shows whether it is still there.
        """
        for slot in self.free:
            if slot is not than and slot.save_at is None:
                slot.forget()

    def taint_ram(self) -> None:
        """Account for KV that is not that of its tokens alone, of which the server may keep a copy
        in its RAM: it does not look there by adapter.
        """
        self.is_ram_tainted = self._may_have_ram_cache

    def taint(self) -> None:
        """Account for a request that may leave KV in any slot which is not that of its tokens."""
        self.taint_ram()
        for slot in self.all:
            slot.is_tainted = True
            slot.adapters = None


def fullest(
    slots: Sequence[SlotAccount], tokens: Tokens, salt: str
) -> SlotAccount:
    """Return the slot that has the most leading tokens of a prompt, the one used last if equal."""
    return max(slots, key=lambda slot: (slot.held(tokens, salt), slot.used_at))


def least_useful(slots: Sequence[SlotAccount]) -> SlotAccount:
    """Return the slot whose contents are missed least: an empty one, else the one used longest
    ago.
    """
    return min(slots, key=lambda slot: (not slot.is_empty, slot.used_at))


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Return how many leading tokens two sequences share."""
    common = min(len(left), len(right))
    differs = left[:common] != right[:common]
    return int(differs.argmax()) if differs.any() else common
