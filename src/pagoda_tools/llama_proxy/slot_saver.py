"""When slots are saved.

A slot is saved when it has been idle for two seconds, at once after a long new prompt (other
conversations may begin in the same way), before another conversation takes it, and at the end of
the proxy; never for less than a chunk of new tokens. What is known of its last request is noted
with it, or when the next request of that conversation comes; at once if there is nothing to save.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.cache import RequestHints
from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.slot_accounts import (
    SlotAccount,
    SlotAccounts,
    Tokens,
)

_IDLE_SECONDS = 2.0
_LONG_CHUNKS = 4  # of new prompt
_END_SECONDS = 60.0  # for all slots together
_MARKS_SECONDS = 10.0
# of a save: as for a load, the server may compute a batch meanwhile. What is not saved is computed
# again, so a save may take as long as that would.
_SAVE_SECONDS = 30.0
_MOST_SAVE_SECONDS = 600.0
# for a save that failed in a way that passes: the first pause; each next one is twice as long
_AGAIN_SECONDS = 1.0
_MOST_TRIES = 6
_PASSING = (Reason.BUSY, Reason.IO_ERROR, Reason.DEADLINE)

_logger = guarded_logger("pagoda.llamacpp")
_log = RateLimitedLog()

T = TypeVar("T")


class Run(Protocol):
    """Runs a call on another thread."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


class SlotSaver:
    """Saves the slots of one server. For the event loop."""

    def __init__(
        self,
        accounts: SlotAccounts,
        states: SlotStates,
        run: Run,
        chunk: int,
        worth: LoadWorth,
        *,
        saves_at_once: bool = False,
    ) -> None:
        """`run`: runs a call on another thread. `chunk`: its tokens. `saves_at_once`: the next
        request may empty an idle slot.
        """
        self._worth = worth
        self._idle_seconds = 0.0 if saves_at_once else _IDLE_SECONDS
        self._accounts = accounts
        self._states = states
        self._run = run
        self._chunk = chunk
        # a save was refused: the server may be another one now, which only a load finds out
        self.is_server_doubtful = False
        # how many times something was stored
        self.saves = 0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._save_idle_ones())

    def note_answer(
        self,
        slot: SlotAccount,
        new_prompt_tokens: int,
        hints: RequestHints | None = None,
    ) -> None:
        """Remember that a slot has been asked, and when it is to be saved. `hints`: how the request
        ended.
        """
        slot.hints = hints
        if slot.new_tokens < self._chunk:
            slot.save_at = None
            if hints is not None:
                self._changed.set()
            return
        wait = self._idle_seconds
        is_long = new_prompt_tokens >= _LONG_CHUNKS * self._chunk
        if is_long or slot.is_retained:
            wait = 0.0
        slot.save_at = time.monotonic() + wait
        self._changed.set()

    async def save(self, slot: SlotAccount) -> None:
        """Save a slot whose lock the caller holds, if enough of it is new; comes to its end if the
        request is cancelled. Raises nothing: what could not be stored is computed again some time.
        """
        if slot.save_at is not None:
            await finished(self._save(slot))
        else:
            await self._note(slot)

    async def note_before(self, tokens: Tokens, salt: str) -> None:
        """Note how the last requests of those conversations ended which this prompt goes on with:
        after it is looked up, nothing could be learnt of when it came. What is to be retained is
        noted when it is stored.
        """
        for slot in self._accounts.all:
            if slot.hints is None or slot.is_retained or slot.lock.locked():
                continue
            if 0 < len(slot.tokens) == slot.held(tokens, salt):
                await self._note(slot)

    async def _note(self, slot: SlotAccount) -> None:
        """Note how the last request of a slot ended, if that is not noted yet."""
        hints = slot.hints
        if hints is None:
            return
        slot.hints = _rest_of(hints) if slot.save_at is not None else None
        note = partial(
            self._states.note_answer, slot.tokens, salt=slot.salt, hints=hints
        )
        try:
            await finished(self._run(note))
        except Exception as error:  # noqa: BLE001
            # a boundary: the policy knows less
            _log.warn(
                _logger, Reason.IO_ERROR, f"hints were not noted: {error!r}"
            )

    async def _save(self, slot: SlotAccount) -> None:
        if slot.save_at is None:
            return
        slot.save_at = None
        if slot.is_tainted or slot.new_tokens < self._chunk:
            await self._note(slot)
            return
        if self._states.trouble:
            # said at the start
            slot.why_not_stored = self._states.trouble
            await self._note(slot)
            return
        marks = await self._marks_of(slot)
        compute = self._worth.compute_seconds(slot.new_tokens)
        call = partial(
            self._states.store,
            slot.tokens,
            slot.number,
            more_tokens=slot.more_tokens,
            marks=marks,
            salt=slot.salt,
            hints=slot.hints,
            limit_seconds=max(_SAVE_SECONDS, min(compute, _MOST_SAVE_SECONDS)),
        )
        if slot.hints is not None:
            slot.hints = _rest_of(slot.hints)
        try:
            stored = await self._run(call)
        except Exception as error:  # noqa: BLE001
            # a boundary: the slot stays as it is, and the proxy goes on
            _log.warn(
                _logger,
                Reason.IO_ERROR,
                f"slot {slot.number} was not saved: {error!r}",
            )
            return
        if not slot.is_known:
            # a request that we could not follow has used it meanwhile
            return
        if stored.reason in _PASSING and not stored:
            # it computes still, for a client who has gone, or the server is in trouble
            slot.failed_saves += 1
            if slot.failed_saves <= _MOST_TRIES:
                wait = _AGAIN_SECONDS * 2 ** (slot.failed_saves - 1)
                slot.save_at = time.monotonic() + wait
                self._changed.set()
                return
        if stored.reason is Reason.NOT_CACHEABLE and stored.slot_tokens is None:
            self.is_server_doubtful = True
        if stored.reason is Reason.ABSENT:
            # the server has emptied it
            slot.forget()
            return
        slot.hints = None
        if stored:
            self.saves += 1
        if stored.slot_tokens is not None:
            slot.tokens = stored.slot_tokens
            slot.more_tokens = 0
        # also if nothing was stored: it would not be stored the next time either
        slot.saved_tokens = len(slot.tokens) + slot.more_tokens
        slot.stored_tokens = stored.num_tokens
        if stored.reason is not None and not stored:
            # `store` has logged it
            slot.why_not_stored = stored.detail

    async def _marks_of(self, slot: SlotAccount) -> list[int]:
        if slot.marks is None or self._states.kind == "attention":
            return []
        try:
            async with asyncio.timeout(_MARKS_SECONDS):
                return await slot.marks()
        except (ServerTrouble, TimeoutError, ValueError) as error:
            _log.warn(_logger, Reason.IO_ERROR, f"no marks: {error}")
            return []

    async def end(self) -> None:
        """Save all that is new, and stop."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                for slot in self._accounts.all:
                    async with slot.lock:
                        await self.save(slot)

    async def _save_free_one(self, slot: SlotAccount) -> None:
        if slot.lock.locked():
            # another request has taken it meanwhile
            return
        await slot.lock.acquire()
        slot.is_saving = True
        try:
            await self.save(slot)
        finally:
            self._accounts.give_back(slot)

    async def _save_idle_ones(self) -> None:
        while True:
            try:
                await self._save_due_ones()
            except Exception as error:  # noqa: BLE001
                # a boundary: other slots are saved later
                _log.warn(
                    _logger, Reason.IO_ERROR, f"slots were not saved: {error!r}"
                )
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _save_due_ones(self) -> None:
        """Save what is due, and wait until something else is."""
        self._changed.clear()
        now = time.monotonic()
        due = [
            slot
            for slot in self._accounts.free
            if (
                slot.hints is not None
                if slot.save_at is None
                else slot.save_at <= now
            )
        ]
        for slot in due:
            await finished(self._save_free_one(slot))
        waiting = [
            slot.save_at - time.monotonic()
            for slot in self._accounts.all
            if slot.save_at is not None
        ]
        # one that is busy now is looked at again when it is free, and has changed
        wait = max(min(waiting, default=_END_SECONDS), 0.05)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._changed.wait()


def _rest_of(hints: RequestHints) -> RequestHints | None:
    """Return what counts for a slot that is stored after the end of its request was noted: whose it
    is, and how long it is retained.
    """
    rest = RequestHints(
        session=hints.session,
        agent=hints.agent,
        retain_seconds=hints.retain_seconds,
    )
    return rest if rest.names else None
