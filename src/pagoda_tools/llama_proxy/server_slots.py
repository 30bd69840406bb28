"""What others did in the slots of the server: requests that came past the proxy, and those whose
slot the server itself has chosen. It says of each slot the number of its last request (`id_task`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.request_turn import Turn
from pagoda_tools.llama_proxy.slot_accounts import SlotAccounts, Tokens
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.upstream import Upstream

TaskNumbers = dict[int, object]


class ServerSlots:
    """The slots as the server tells them. For the event loop."""

    def __init__(
        self,
        upstream: Upstream,
        accounts: SlotAccounts,
        saver: SlotSaver,
        *,
        others_ask: bool,
    ) -> None:
        """`others_ask`: the server is asked not only through this proxy."""
        self._upstream = upstream
        self._accounts = accounts
        self._saver = saver
        self._others_ask = others_ask

    async def task_numbers(self) -> TaskNumbers | None:
        """Return the number of the last request of each slot; None if the server hides it."""
        listed = await self._listed()
        numbers = {
            number: entry.get("id_task") for number, entry in listed.items()
        }
        return numbers or None

    async def forget_others(self) -> None:
        """Account for requests that others have sent to the server, and for idle slots that it has
        emptied.
        """
        if not self._others_ask:
            return
        free = [(slot, slot.used_at) for slot in self._accounts.free]
        listed = await self._listed()
        for slot, used_at in free:
            if slot.lock.locked() or slot.used_at != used_at:
                # one of our own requests came meanwhile
                continue
            entry = listed.get(slot.number, {})
            if entry.get("id_task") != slot.task or slot.task is None:
                slot.forget()
            elif entry.get("n_prompt_tokens") == 0:
                slot.clear()

    async def give_back(self, turn: Turn) -> None:
        """Let others have the slot of a turn; idempotent, and comes to its end if the request is
        cancelled.
        """
        if turn.is_over:
            return
        turn.is_over = True
        try:
            if self._others_ask:
                await finished(self._note_task(turn))
        finally:
            self._accounts.give_back(turn.slot)

    async def _note_task(self, turn: Turn) -> None:
        numbers = await self.task_numbers()
        turn.slot.task = (numbers or {}).get(turn.slot.number)

    async def note_passed(
        self,
        before: TaskNumbers | None,
        since: float,
        tokens: Tokens | None,
        salt: str,
    ) -> None:
        """Account for a request that began at `since`, when the slots had these task numbers, in a
        slot that the server has chosen. `tokens`: what it has left there, if that is known.
        """
        after = await self.task_numbers()
        tasks = [] if after is None else after.values()
        # one at least has had a request now; without numbers, the used slot looks as before
        if before is None or all(task is None for task in tasks):
            self._accounts.forget_used(None, since)
            return
        assert after is not None
        used = {number for number in after if after[number] != before.get(number)}
        slots = [
            slot
            for slot in self._accounts.free
            if slot.number in used and slot.used_at < since
        ]
        self._accounts.forget_used(used, since)
        if tokens is not None and len(used) == 1 and slots:
            slots[0].set(tokens, salt, 0)
            slots[0].task = after[slots[0].number]
            self._saver.note_answer(slots[0], 0)

    async def _listed(self) -> dict[int, Mapping[str, object]]:
        """Return what the server says of its slots; empty if it hides them."""
        try:
            return await self._upstream.slots()
        except ServerTrouble:
            return {}
