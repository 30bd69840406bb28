"""The way of one request: its slot, what is loaded into it, the question, and the check of the
answer; and the way of one whose slot the server chooses.

    slot_preparation   1. what is stored of it, a slot, and what that needs
    request_starts     2. the right to start
    slot_questions     3. the question, the answer
    answer_checks      4. a slot that is not what was restored is emptied, and asked again
    server_slots       5. the slot is given back
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from pagoda.connectors.llamacpp import SlotStates
from pagoda_tools.llama_proxy.answer_checks import AnswerChecks, ReusedMoreError
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import marks_of
from pagoda_tools.llama_proxy.request_starts import RequestStarts
from pagoda_tools.llama_proxy.request_turn import Question, Turn
from pagoda_tools.llama_proxy.server_slots import ServerSlots
from pagoda_tools.llama_proxy.slot_accounts import SlotAccounts, Tokens
from pagoda_tools.llama_proxy.slot_preparation import (
    FlowOptions,
    SlotPreparation,
)
from pagoda_tools.llama_proxy.slot_questions import SlotQuestions
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.upstream import Upstream

# Called with the status of the server's answer when that has ended: the accounts are right before
# the client, which may ask again at once, knows of the end.
AtEnd = Callable[[int], Awaitable[None]]

# what was looked up so long ago may have changed: a slot was saved meanwhile
_LOOKED_UP_SECONDS = 0.005


class RequestFlow:
    """The requests of one proxy. For the event loop."""

    def __init__(
        self,
        upstream: Upstream,
        states: SlotStates,
        accounts: SlotAccounts,
        saver: SlotSaver,
        worth: LoadWorth,
        run: Callable[..., Awaitable[object]],
        options: FlowOptions,
    ) -> None:
        """`run`: runs a call on another thread."""
        self.counts: Counter[str] = Counter()
        self._upstream = upstream
        self._states = states
        self._accounts = accounts
        self._saver = saver
        self._loading_is_off = options.loading_is_off
        self._checks = AnswerChecks(self.counts)
        self._starts = RequestStarts(
            upstream, is_needed=options.empties_idle_slots
        )
        self._server_slots = ServerSlots(
            upstream, accounts, saver, others_ask=options.others_ask
        )
        self._preparation = SlotPreparation(
            upstream,
            states,
            accounts,
            saver,
            worth,
            self._checks,
            run,
            options,
            self.counts,
        )
        self._questions = SlotQuestions(
            upstream,
            states,
            accounts,
            self._server_slots,
            saver,
            worth,
            self._checks,
            self.counts,
        )

    async def answer(self, question: Question) -> web.StreamResponse | None:
        """Answer a request whose tokens are known; None if no slot became free: the server itself
        chooses one then. Raises aiohttp.ClientError.
        """
        self._accounts.resize(self._states.slots)
        await self._server_slots.forget_others()
        await self._saver.note_before(question.tokens, question.salt)
        preparation = self._preparation
        stored = await preparation.find(question, self._accounts.free)
        looked_up = time.monotonic()
        saves = self._saver.saves
        slot = await preparation.take(question, stored)
        if slot is None:
            self.counts["no_free_slot"] += 1
            return None
        turn = Turn(question, slot)
        starting: asyncio.Task[None] | None = None
        try:
            is_old = time.monotonic() - looked_up > _LOOKED_UP_SECONDS
            # what a slot had may have been saved meanwhile, for another prompt
            is_changed = self._saver.saves != saves or stored.is_skipped
            if is_old or is_changed:
                stored = await preparation.find(question, [slot])
            turn.stored = stored.tokens
            turn.why = stored.why
            turn.start = await self._starts.right()
            await preparation.prepare(turn, stored)
            turn.marks = partial(
                marks_of,
                question.route,
                question.body,
                question.tokens,
                self._upstream.ask,
            )
            if turn.start.is_held:
                starting = asyncio.create_task(
                    self._starts.release_when_computing(slot.number, turn.start)
                )
            try:
                return await self._questions.ask(turn)
            except ReusedMoreError as difference:
                await finished(self._differed(turn, str(difference)))
                return await self._questions.ask(turn)
        finally:
            if starting is not None:
                starting.cancel()
            turn.start.release()
            await self._server_slots.give_back(turn)

    async def _differed(self, turn: Turn, why: str) -> None:
        """Empty a slot that is not what was restored, before it is asked again."""
        self.counts["asked_again"] += 1
        self._checks.count_difference(turn.question.route, why)
        turn.is_spoiled = not await self._preparation.empty(turn.slot)
        turn.loaded = 0
        turn.why = why

    async def with_adapters(
        self,
        send: Callable[[int, AtEnd], Awaitable[web.StreamResponse]],
        adapters: object,
        salt: str,
    ) -> web.StreamResponse | None:
        """Let a request that chooses adapters have a slot of its own; None if none became free.

        `send`: asks the server in the slot of this number. Raises ServerTrouble.
        """
        slot = await self._preparation.take_for_adapters((salt, adapters))
        if slot is None:
            return None

        async def give_back(_status: int) -> None:
            self._accounts.give_back(slot)

        at_end = _once(give_back)
        try:
            (await self._starts.right()).release()
            return await send(slot.number, at_end)
        finally:
            await at_end(0)

    async def passed_on(
        self,
        send: Callable[[AtEnd], Awaitable[web.StreamResponse]],
        tokens: Tokens | None,
        salt: str,
        *,
        taints: bool = False,
    ) -> web.StreamResponse:
        """Let the server itself choose a slot, and account for that.

        `send`: asks the server. `tokens`: of the prompt, if they are known. `taints`: what it
        leaves in a slot may not be the KV of its tokens.
        """
        if taints:
            self._accounts.taint()
        (await self._starts.right()).release()
        since = time.monotonic()
        before = await self._server_slots.task_numbers()

        async def note(status: int) -> None:
            if taints:
                # a slot may have been emptied and used again meanwhile
                self._accounts.taint()
            held = tokens if status == 200 else None
            await self._server_slots.note_passed(before, since, held, salt)

        at_end = _once(note)
        try:
            return await send(at_end)
        finally:
            # the client may have gone before
            await at_end(0)

    def status(self) -> dict[str, object]:
        """Return what a person asks when there are no hits."""
        return {
            "loading_is_off": self._loading_is_off,
            "loading_is_off_for": self._checks.all_off(),
            "counts": dict(self.counts),
            "slots": [
                {
                    "id": slot.number,
                    "is_busy": slot.lock.locked(),
                    "is_known": slot.is_known,
                    "tokens": len(slot.tokens) + slot.more_tokens,
                    "stored_tokens": slot.stored_tokens,
                    "why_not_stored": slot.why_not_stored,
                }
                for slot in self._accounts.all
            ],
        }


def _once(work: AtEnd) -> AtEnd:
    """Return what does this work, to its end, the first time that it is called."""
    has_begun = False

    async def work_once(status: int) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            await finished(work(status))

    return work_once
