"""Room for a request where all slots share the cells of one cache (`--kv-unified`, the default).

The server empties idle slots when a request needs their cells, and says nothing. What they held
would be lost, and a restore into a full cache is refused. So the proxy saves and empties them
before, the one used longest ago first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pagoda.connectors.llamacpp import SlotStates
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.slot_accounts import SlotAccount, SlotAccounts
from pagoda_tools.llama_proxy.slot_saver import SlotSaver

# of an answer that follows a prompt; a longer one may take the cells of idle slots
_ANSWER_TOKENS = 256


class CellRoom:
    """The cells of one server. For the event loop."""

    def __init__(
        self,
        accounts: SlotAccounts,
        states: SlotStates,
        saver: SlotSaver,
        empty: Callable[[SlotAccount], Awaitable[object]],
    ) -> None:
        """`empty`: empties a slot whose lock the caller holds; says whether it is empty."""
        self._accounts = accounts
        self._states = states
        self._saver = saver
        self._empty = empty

    async def make(self, for_slot: SlotAccount, tokens: int) -> None:
        """Save and empty idle slots until a prompt of so many tokens has room beside the others.

        `for_slot`: that of the request; its lock is held by the caller.
        """
        if not self._states.shares_cells:
            return
        most = self._states.context_tokens - tokens - _ANSWER_TOKENS
        others = [slot for slot in self._accounts.all if slot is not for_slot]
        others.sort(key=lambda slot: (slot.is_known, slot.used_at))
        for slot in others:
            if sum(map(_cells, others)) <= most:
                return
            if slot.is_empty or (slot.lock.locked() and not slot.is_saving):
                continue
            # a save ends soon, and holds no other lock
            await slot.lock.acquire()
            await finished(self._free(slot))

    async def _free(self, slot: SlotAccount) -> None:
        """Save and empty a slot whose lock is held, and give it back."""
        slot.is_saving = True
        try:
            await self._saver.save(slot)
            await self._empty(slot)
        finally:
            # and wakes those who wait for a slot
            self._accounts.give_back(slot)


def _cells(slot: SlotAccount) -> int:
    """Return how many cells a slot takes by our account."""
    return len(slot.tokens) + slot.more_tokens
