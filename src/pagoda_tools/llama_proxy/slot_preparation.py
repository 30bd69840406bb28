"""The slot of a request, and its preparation: what is stored of the prompt, which slot it gets,
what that slot loses and is saved before, and what is loaded into it.

    1. `find`      what is stored, unless a slot has nearly all
    2. `take`      the slot that has most, or one for what is to be loaded
    3. `prepare`   save what the slot loses, empty it for another user, load
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda.connectors.llamacpp.slot_states import LoadedState
from pagoda_tools.llama_proxy.answer_checks import AnswerChecks
from pagoda_tools.llama_proxy.cell_room import CellRoom
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.request_turn import Question, Turn
from pagoda_tools.llama_proxy.slot_accounts import (
    SlotAccount,
    SlotAccounts,
    fullest,
    least_useful,
)
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.upstream import Upstream

P = ParamSpec("P")
T = TypeVar("T")

# for a slot; after it the server itself chooses, and its queue is no shorter than ours
_WAIT_SECONDS = 600.0
# where others may keep a slot busy that is free by our account
_WAIT_BESIDE_OTHERS_SECONDS = 2.0
# of a load: the server restores between two batches of what it computes for others, which may take
# a minute on a slow machine. Computing the same tokens would wait for that batch as well, so a load
# may take as long as computing would.
_LOAD_SECONDS = 10.0
_MOST_LOAD_SECONDS = 600.0
# between two looks whether a server with a trouble was replaced
_PROBE_SECONDS = 60.0

_logger = guarded_logger("pagoda.llamacpp")
_log = RateLimitedLog()


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """How requests are treated.

    `min_gain_tokens`: what a load must give beside what the slot has. `context_tokens`: a prompt
    may have; the server refuses longer ones. `empties_idle_slots`: every request that starts does
    that. `others_ask`: the server is asked not only through this proxy.
    """

    min_gain_tokens: int
    context_tokens: int
    empties_idle_slots: bool
    others_ask: bool
    loading_is_off: str = ""


class StoredPrefix(NamedTuple):
    """What is stored of a prompt. `may_load`: it is to be loaded if no slot has as much.
    `is_unknown`: the server was changed, which only a load finds out.
    """

    tokens: int
    may_load: bool
    why: str = ""  # nothing more is loaded
    is_unknown: bool = False
    is_skipped: bool = False  # nobody looked, because a slot has nearly all


class SlotPreparation:
    """Chooses and prepares the slots of one server. For the event loop."""

    def __init__(
        self,
        upstream: Upstream,
        states: SlotStates,
        accounts: SlotAccounts,
        saver: SlotSaver,
        worth: LoadWorth,
        checks: AnswerChecks,
        run: Callable[..., Awaitable[object]],
        options: FlowOptions,
        counts: Counter[str],
    ) -> None:
        """`run`: runs a call on another thread. `counts`: of the proxy."""
        self._upstream = upstream
        self._states = states
        self._accounts = accounts
        self._saver = saver
        self._worth = worth
        self._checks = checks
        self._run = run
        self._options = options
        self._counts = counts
        self._probe_at = time.monotonic() + _PROBE_SECONDS
        self._room = CellRoom(accounts, states, saver, self.empty)

    async def find(
        self, question: Question, slots: Sequence[SlotAccount]
    ) -> StoredPrefix:
        """Look for what is stored of a prompt, unless one of these slots has nearly all."""
        tokens = question.tokens
        salt = question.salt
        least = self._options.min_gain_tokens
        lacking = len(tokens)
        if slots:
            lacking -= fullest(slots, tokens, salt).held(tokens, salt)
        if lacking < least:
            return StoredPrefix(0, may_load=False, is_skipped=True)
        if len(tokens) >= self._options.context_tokens:
            return StoredPrefix(0, may_load=False)
        trouble = self._states.trouble
        if trouble:
            return StoredPrefix(
                0, False, trouble, is_unknown=self._is_time_to_probe()
            )
        off = self._options.loading_is_off or self._checks.why_off(question.route)
        if question.hides_what_was_reused:
            off = off or "response_fields leaves out how many tokens were reused"
        if off:
            return StoredPrefix(0, False, off)
        found = await self._call(
            self._states.find, tokens, salt=salt, hints=question.hints
        )
        if found is None:
            return StoredPrefix(0, False, "what is stored is not known")
        is_unknown = found.reason is Reason.NOT_CACHEABLE
        if self._saver.is_server_doubtful:
            is_unknown = True
        return StoredPrefix(
            found.num_tokens,
            found.num_tokens >= least,
            _told(found),
            is_unknown=is_unknown,
        )

    async def take(
        self, question: Question, stored: StoredPrefix
    ) -> SlotAccount | None:
        """Return a locked slot, the one that the client wants or the best; None: none became
        free.
        """
        wait = self._wait_seconds
        if question.salt:
            # the server may choose a slot that has what another user has written
            wait = _WAIT_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                return await self._accounts.take(
                    lambda free: self._best(free, question, stored)
                )
        return None

    async def take_for_adapters(
        self, adapters: tuple[str, object]
    ) -> SlotAccount | None:
        """Return a locked slot that only the same user's request with the same adapters has used,
        or one that is empty; None: none became free. Raises ServerTrouble.

        The server goes on from what such a request leaves, also for one without adapters: so the
        slot is tainted, and must be emptied before another use.
        """

        def choose(free: Sequence[SlotAccount]) -> SlotAccount | None:
            same = [slot for slot in free if slot.adapters == adapters]
            if same:
                return same[0]
            return least_useful(free) if free else None

        slot = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                slot = await self._accounts.take(choose)
        if slot is None:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(self._accounts.give_back, slot)
            if slot.adapters != adapters:
                await self._saver.save(slot)
                if not await finished(self.empty(slot)):
                    raise ServerTrouble(f"slot {slot.number} was not emptied")
            slot.is_tainted = True
            slot.adapters = adapters
            undo.pop_all()
        return slot

    async def prepare(self, turn: Turn, stored: StoredPrefix) -> None:
        """Save what the slot loses, and load what it lacks. What has begun comes to its end if the
        request is cancelled.
        """
        slot = turn.slot
        if slot.is_tainted:
            turn.is_spoiled = not await finished(self.empty(slot))
        elif slot.salt != turn.salt and not slot.is_empty:
            # what another user's prompt left must not be seen in the time that an answer takes
            await self._saver.save(slot)
            turn.is_spoiled = not await finished(self.empty(slot))
        await self._room.make(slot, len(turn.tokens))
        turn.held = slot.held(turn.tokens, turn.salt)
        turn.stored = max(turn.stored, min(turn.held, slot.stored_tokens))
        turn.saved = max(turn.stored, min(turn.held, slot.saved_tokens))
        if turn.held and not turn.why:
            turn.why = slot.why_not_stored
        if turn.held < len(slot.tokens) or slot.is_retained:
            await self._saver.save(slot)
        if self._is_ram_foreign(turn) and slot.may_ask_ram(turn.held):
            turn.is_spoiled = not await finished(self.empty(slot))
            turn.held = 0
        if stored.is_unknown or self._is_better(stored, turn.held):
            await finished(self._load(turn))
        elif stored.may_load and stored.tokens > turn.held:
            self._counts["not_worth_it"] += 1
            self._worth.refused()
            turn.why = "computing is faster than loading"

    async def empty(self, slot: SlotAccount) -> bool:
        """Empty a slot, and return whether it is."""
        try:
            await self._upstream.erase(slot.number)
        except ServerTrouble:
            slot.forget()
            return False
        slot.clear()
        return True

    @property
    def _wait_seconds(self) -> float:
        """How long a request waits for a slot."""
        if self._options.others_ask:
            return _WAIT_BESIDE_OTHERS_SECONDS
        return _WAIT_SECONDS

    def _is_time_to_probe(self) -> bool:
        """Whether a server that others start may be another one by now, without its trouble: a load
        finds out.
        """
        if not self._options.others_ask:
            return False
        now = time.monotonic()
        if now < self._probe_at:
            return False
        self._probe_at = now + _PROBE_SECONDS
        return True

    def _is_ram_foreign(self, turn: Turn) -> bool:
        """Whether the RAM cache of the server may have KV that is not for this request: of another
        user, or not that of its tokens.
        """
        if self._accounts.is_ram_tainted:
            return True
        return bool(turn.salt) and self._options.others_ask

    def _best(
        self,
        free: Sequence[SlotAccount],
        question: Question,
        stored: StoredPrefix,
    ) -> SlotAccount | None:
        wanted = question.body.get("id_slot")
        if type(wanted) is int and 0 <= wanted < len(self._accounts.all):
            free = [slot for slot in free if slot.number == wanted]
        if not free:
            return None
        tokens = question.tokens
        best = fullest(free, tokens, question.salt)
        held = best.held(tokens, question.salt)
        least = self._options.min_gain_tokens
        goes_on = held > 0 and len(best.tokens) - held < least
        if goes_on and not self._is_better(stored, held):
            return best
        other = least_useful(free)
        if stored.may_load and stored.tokens + least > held:
            # its own conversation stays where it is
            return other
        if held >= least and not other.is_empty:
            return best
        return best if held >= len(tokens) // 2 else other

    def _is_better(self, stored: StoredPrefix, held: int) -> bool:
        """Whether what is stored is so much more than what a slot has that loading it is faster
        than computing the difference.
        """
        gain = stored.tokens - held
        if not stored.may_load or gain < self._options.min_gain_tokens:
            return False
        return self._worth.is_worth(stored.tokens, gain)

    async def _load(self, turn: Turn) -> None:
        began = time.monotonic()
        compute = self._worth.compute_seconds(turn.stored - turn.held)
        loaded = await self._call(
            self._states.load,
            turn.tokens,
            turn.slot.number,
            held_tokens=turn.held,
            salt=turn.salt,
            counted=False,
            limit_seconds=max(_LOAD_SECONDS, min(compute, _MOST_LOAD_SECONDS)),
        )
        # another server was probed, if it is another one
        self._saver.is_server_doubtful = False
        if loaded is None or not loaded:
            self._counts["not_loaded"] += 1
            self._worth.failed()
            turn.why = "it failed" if loaded is None else _told(loaded)
            # a refused restore leaves nothing, a refused call leaves all: the server knows
            turn.slot.forget()
            turn.held = 0
            return
        turn.loaded = loaded.num_tokens
        turn.held = 0
        turn.stored = max(turn.stored, turn.loaded)
        self._worth.loaded(turn.loaded, time.monotonic() - began)
        turn.slot.set(turn.tokens[: turn.loaded], turn.salt, turn.loaded)
        self._counts["loads"] += 1

    async def _call(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run a call of the connector on a thread; None if it failed in a way that nobody
        foresaw.
        """
        try:
            return await self._run(partial(call, *args, **kwargs))  # type: ignore[return-value]
        except Exception as error:  # noqa: BLE001
            # a boundary: the request goes on without what is stored
            _log.warn(_logger, Reason.IO_ERROR, f"nothing was loaded: {error!r}")
            return None


def _told(found: LoadedState) -> str:
    """Return why not more is loaded, as far as it is the client's to know."""
    why = found.detail
    if found.reason is not Reason.OTHER_NAMESPACE:
        return why
    if "salt" in why:
        # another client has stored it
        return ""
    if "numerics" in why:
        why += ": another build of llama-server, or other options"
    return why
