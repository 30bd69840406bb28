"""One request: its tokens, its slot, what is loaded into it, the question, and the check of the
answer.

A restored slot is used only as far as we know what is in it: the server says how many tokens it
reused before the client sees a token of the answer. If these are more than were restored, the slot
is emptied and the server is asked again. Fewer are no fault of the text, and are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import aiohttp
from aiohttp import web

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.cell_room import CellRoom
from pagoda_tools.llama_proxy.event_stream import (
    EventStream,
    Timings,
    timings_of,
)
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LEAST_TOKENS, LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import MESSAGES, ROUTES, marks_of
from pagoda_tools.llama_proxy.request_body import changed
from pagoda_tools.llama_proxy.slot_accounts import (
    Marks,
    SlotAccount,
    SlotAccounts,
    Tokens,
    fullest,
    least_useful,
)
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.unread_answer import UnreadAnswer
from pagoda_tools.llama_proxy.upstream import Upstream, answer_headers
from pagoda_tools.serve.access import break_connection

P = ParamSpec("P")
T = TypeVar("T")

HEADER = "X-Pagoda"
# for a slot; after it the server itself chooses, and its queue is no shorter than ours
_WAIT_SECONDS = 600.0
# where others may keep a slot busy that is free by our account
_WAIT_BESIDE_OTHERS_SECONDS = 2.0
# what was looked up so long ago may have changed: a slot was saved meanwhile
_LOOKED_UP_SECONDS = 0.005
# to start while others start
_START_SECONDS = 2.0
# of answers in a row that reused other tokens than were restored: then that route loads no more for
# a while. One that comes after it is enough for the next while.
_MOST_DIFFERENCES = 3
_OFF_SECONDS = 300.0
_LOOK_SECONDS = 0.01
_LOAD_SECONDS = 10.0

_logger = guarded_logger("pagoda.llamacpp")
_log = RateLimitedLog()


class StoredPrefix(NamedTuple):
    """What is stored of a prompt. `may_load`: it is to be loaded if no slot has as much.
    `is_unknown`: the server was changed, which only a load finds out.
    """

    tokens: int
    may_load: bool
    why: str = ""  # nothing more is loaded
    is_unknown: bool = False
    is_skipped: bool = False  # nobody looked, because a slot has nearly all


class _Start:
    """The right to let a request start, until it has."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        self._lock = lock

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def release(self) -> None:
        """Let others start; idempotent."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            lock.release()


@dataclass
class Turn:
    """One request that has a slot.

    `held`: tokens of its prompt that the slot has by our account. `loaded`: tokens that were
    restored for it. `stored`: leading tokens of its prompt that are stored. `saved`: that were
    offered to the store.
    """

    slot: SlotAccount
    tokens: Tokens
    salt: str
    held: int = 0
    loaded: int = 0
    stored: int = 0
    saved: int = 0
    why: str = ""
    marks: Marks | None = None
    # the slot was to be emptied, and that failed: the server must not use what it has
    is_spoiled: bool = False
    is_over: bool = False
    start: _Start = field(default_factory=lambda: _Start(None))

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


class _DifferenceError(Exception):
    """The server reused more tokens than were restored."""


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
        self._upstream = upstream
        self._states = states
        self._accounts = accounts
        self._saver = saver
        self._worth = worth
        self._run = run
        self._options = options
        self._room = CellRoom(accounts, states, saver, self._emptied)
        # held from a restore until its request has started, where others empty idle slots
        self._starting = asyncio.Lock()
        # routes for which nothing is loaded: why, and until when
        self._off: dict[str, tuple[str, float]] = {}
        self._differences: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    async def answer(
        self,
        request: web.Request,
        route: str,
        text: bytes,
        body: Mapping[str, object],
        tokens: Tokens,
        salt: str,
    ) -> web.StreamResponse | None:
        """Answer a request whose tokens are known; None if no slot became free: the server itself
        chooses one then. Raises aiohttp.ClientError.
        """
        self._accounts.resize(self._states.slots)
        if self._options.others_ask:
            await self._forget_others()
        free = self._accounts.free
        stored = await self._stored(route, body, tokens, salt, free)
        looked_up = time.monotonic()
        saves = self._saver.saves
        slot = await self._slot_for(tokens, salt, stored, body.get("id_slot"))
        if slot is None:
            self.counts["no_free_slot"] += 1
            return None
        turn = Turn(slot, tokens, salt)
        starting: asyncio.Task[None] | None = None
        try:
            is_old = time.monotonic() - looked_up > _LOOKED_UP_SECONDS
            # what a slot had may have been saved meanwhile, for another prompt
            is_changed = self._saver.saves != saves or stored.is_skipped
            if is_old or is_changed:
                stored = await self._stored(route, body, tokens, salt, [slot])
            turn.stored = stored.tokens
            turn.why = stored.why
            turn.start = await self._held_start()
            await finished(self._prepare(turn, stored))
            turn.marks = partial(
                marks_of, route, body, tokens, self._upstream.ask
            )
            if turn.start.is_held:
                starting = asyncio.create_task(
                    self._has_started(slot, turn.start)
                )
            try:
                return await self._ask(request, route, text, body, turn)
            except _DifferenceError as difference:
                await finished(self._differed(route, turn, str(difference)))
                return await self._ask(request, route, text, body, turn)
        finally:
            if starting is not None:
                starting.cancel()
            turn.start.release()
            await finished(self._give_back(turn))

    async def _give_back(self, turn: Turn) -> None:
        """Let others have the slot of a turn; idempotent."""
        if turn.is_over:
            return
        turn.is_over = True
        try:
            if self._options.others_ask:
                numbers = await self._task_numbers()
                turn.slot.task = (numbers or {}).get(turn.slot.number)
        finally:
            await self._accounts.give_back(turn.slot)

    async def passed_on(
        self,
        send: Callable[[], Awaitable[web.StreamResponse]],
        tokens: Tokens | None,
        salt: str,
    ) -> web.StreamResponse:
        """Let the server itself choose a slot, and account for that.

        `send`: asks the server. `tokens`: of the prompt, if they are known.
        """
        (await self._held_start()).release()
        since = time.monotonic()
        before = await self._task_numbers()
        held: Tokens | None = None
        try:
            answer = await send()
            if answer.status == 200:
                held = tokens
            return answer
        finally:
            # the client may go as soon as it has its answer
            await finished(self._note_passed(before, since, held, salt))

    async def _note_passed(
        self,
        before: Mapping[int, object] | None,
        since: float,
        tokens: Tokens | None,
        salt: str,
    ) -> None:
        """Account for a request that began at `since`, when the slots had these task numbers, in a
        slot that the server has chosen. `tokens`: what it has left there, if that is known.
        """
        after = await self._task_numbers()
        if before is None or after is None:
            self._accounts.forget_used(None, since)
            return
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

    async def _forget_others(self) -> None:
        """Account for requests that others have sent to the server, and for idle slots that it has
        emptied.
        """
        free = [(slot, slot.used_at) for slot in self._accounts.free]
        listed = await self._listed_slots()
        for slot, used_at in free:
            if slot.lock.locked() or slot.used_at != used_at:
                # one of our own requests came meanwhile
                continue
            entry = listed.get(slot.number, {})
            if entry.get("id_task") != slot.task or slot.task is None:
                slot.forget()
            elif entry.get("n_prompt_tokens") == 0:
                slot.clear()

    async def _task_numbers(self) -> dict[int, object] | None:
        """Return the number of the last request of each slot; None if the server hides it."""
        listed = await self._listed_slots()
        numbers = {
            number: entry.get("id_task") for number, entry in listed.items()
        }
        return numbers or None

    async def _listed_slots(self) -> dict[int, Mapping[str, object]]:
        """Return what the server says of its slots; empty if it hides them."""
        try:
            listed = await self._upstream.get("/slots")
        except ServerTrouble:
            return {}
        return {
            entry["id"]: entry
            for entry in (listed if isinstance(listed, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("id"), int)
        }

    # ---- the start of a request

    async def _held_start(self) -> _Start:
        """Wait until no restored slot waits for its request, and keep others from starting, unless
        that is not needed, or takes too long.
        """
        if self._options.empties_idle_slots:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_SECONDS):
                    await self._starting.acquire()
                    return _Start(self._starting)
        return _Start(None)

    async def _has_started(self, slot: SlotAccount, start: _Start) -> None:
        """Let others start as soon as the server computes in this slot."""
        with contextlib.suppress(ServerTrouble):
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                listed = await self._upstream.get("/slots")
                for entry in listed if isinstance(listed, list) else ():
                    if not isinstance(entry, dict):
                        continue
                    if entry.get("id") == slot.number and entry.get(
                        "is_processing"
                    ):
                        start.release()
                        return

    # ---- the slot

    async def _stored(
        self,
        route: str,
        body: Mapping[str, object],
        tokens: Tokens,
        salt: str,
        slots: Sequence[SlotAccount],
    ) -> StoredPrefix:
        """Look for what is stored, unless one of these slots has nearly all."""
        least = self._options.min_gain_tokens
        lacking = len(tokens)
        if slots:
            lacking -= fullest(slots, tokens, salt).held(tokens, salt)
        if lacking < least:
            return StoredPrefix(0, may_load=False, is_skipped=True)
        if len(tokens) >= self._options.context_tokens:
            return StoredPrefix(0, may_load=False)
        off = self._options.loading_is_off or self._why_off(route)
        if body.get("response_fields") and body.get("stream") is not True:
            off = off or "response_fields leaves out how many tokens were reused"
        if off:
            return StoredPrefix(0, False, off)
        found = await self._call(self._states.find, tokens, salt=salt)
        if found is None:
            return StoredPrefix(0, False, "what is stored is not known")
        is_unknown = found.reason is Reason.NOT_CACHEABLE
        if self._saver.is_server_doubtful:
            is_unknown = True
        # what another client has stored is not for this one
        is_told = found.reason is not Reason.OTHER_NAMESPACE
        return StoredPrefix(
            found.num_tokens,
            found.num_tokens >= least,
            found.detail if is_told else "",
            is_unknown=is_unknown,
        )

    async def _slot_for(
        self, tokens: Tokens, salt: str, stored: StoredPrefix, wanted: object
    ) -> SlotAccount | None:
        """Return a locked slot, the one that the client wants or the best; None: none became
        free.
        """
        wait = _WAIT_SECONDS
        # the server may choose a slot that has what another user has written
        if self._options.others_ask and not salt:
            wait = _WAIT_BESIDE_OTHERS_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                return await self._accounts.take(
                    lambda free: self._best(free, tokens, salt, stored, wanted)
                )
        return None

    def _best(
        self,
        free: Sequence[SlotAccount],
        tokens: Tokens,
        salt: str,
        stored: StoredPrefix,
        wanted: object,
    ) -> SlotAccount | None:
        if type(wanted) is int and 0 <= wanted < len(self._accounts.all):
            free = [slot for slot in free if slot.number == wanted]
        if not free:
            return None
        best = fullest(free, tokens, salt)
        held = best.held(tokens, salt)
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

    async def _prepare(self, turn: Turn, stored: StoredPrefix) -> None:
        """Save what the slot loses, and load what it lacks."""
        slot = turn.slot
        if slot.is_tainted:
            turn.is_spoiled = not await self._emptied(slot)
        elif slot.salt != turn.salt and not slot.is_empty:
            # what another user's prompt left must not be seen in the time that an answer takes
            await self._saver.save(slot)
            turn.is_spoiled = not await self._emptied(slot)
        await self._room.make(slot, len(turn.tokens))
        turn.held = slot.held(turn.tokens, turn.salt)
        turn.stored = max(turn.stored, min(turn.held, slot.stored_tokens))
        turn.saved = max(turn.stored, min(turn.held, slot.saved_tokens))
        if turn.held and not turn.why:
            turn.why = slot.why_not_stored
        if turn.held < len(slot.tokens):
            await self._saver.save(slot)
            if turn.salt and self._options.others_ask:
                # a server with a RAM cache looks there for what a slot lacks, of all users; not for
                # an empty one
                turn.is_spoiled = not await self._emptied(slot)
                turn.held = 0
        if stored.is_unknown or self._is_better(stored, turn.held):
            await self._load(turn)
        elif stored.may_load and stored.tokens > turn.held:
            self.counts["not_worth_it"] += 1
            self._worth.refused()
            turn.why = "computing is faster than loading"

    async def _load(self, turn: Turn) -> None:
        began = time.monotonic()
        loaded = await self._call(
            self._states.load,
            turn.tokens,
            turn.slot.number,
            held_tokens=turn.held,
            salt=turn.salt,
            counted=False,
            limit_seconds=_LOAD_SECONDS,
        )
        # another server was probed, if it is another one
        self._saver.is_server_doubtful = False
        if loaded is None or not loaded:
            self.counts["not_loaded"] += 1
            turn.why = "it failed" if loaded is None else loaded.detail
            # a refused restore leaves nothing, a refused call leaves all: the server knows
            turn.slot.forget()
            turn.held = 0
            return
        turn.loaded = loaded.num_tokens
        turn.held = 0
        turn.stored = max(turn.stored, turn.loaded)
        self._worth.loaded(turn.loaded, time.monotonic() - began)
        turn.slot.set(turn.tokens[: turn.loaded], turn.salt, turn.loaded)
        self.counts["loads"] += 1

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

    async def _emptied(self, slot: SlotAccount) -> bool:
        """Empty a slot, and return whether it is."""
        try:
            await self._upstream.erase(slot.number)
        except ServerTrouble:
            slot.forget()
            return False
        slot.clear()
        return True

    # ---- the question

    async def _ask(
        self,
        request: web.Request,
        route: str,
        text: bytes,
        body: Mapping[str, object],
        turn: Turn,
    ) -> web.StreamResponse:
        slot = turn.slot
        added: dict[str, object] = {"id_slot": slot.number}
        is_streamed = body.get("stream") is True
        shows_progress = body.get("return_progress") is True
        if is_streamed and turn.loaded:
            added["return_progress"] = True
        if turn.is_spoiled:
            if ROUTES[route] == MESSAGES:
                # it has no such field
                raise aiohttp.ClientError(f"slot {slot.number} was not emptied")
            added["cache_prompt"] = False
        sent = changed(text, body, added)
        before = slot.copied()
        # until the answer is known: an aborted request leaves a beginning of this
        why_not_stored = slot.why_not_stored
        turn.saved = max(turn.stored, turn.saved)
        slot.set(turn.tokens, turn.salt, turn.stored, turn.saved)
        if turn.saved > turn.stored:
            slot.why_not_stored = why_not_stored
        slot.marks = turn.marks
        try:
            return await self._answered(
                request, route, sent, turn, before, shows_progress
            )
        except (asyncio.CancelledError, ConnectionError, aiohttp.ClientError):
            if not turn.is_over:
                # what was computed until then is as good
                self._saver.note_answer(slot, 0)
            raise

    async def _answered(
        self,
        request: web.Request,
        route: str,
        sent: bytes,
        turn: Turn,
        before: SlotAccount,
        shows_progress: bool,
    ) -> web.StreamResponse:
        """Send the question and pass the answer on. `before`: what the slot held."""
        async with self._upstream.send(request, sent, is_read=True) as answer:
            kind = answer.headers.get("Content-Type", "")
            if answer.status != 200:
                if 400 <= answer.status < 500 or answer.status == 501:
                    # a refused request computes nothing
                    turn.slot.restore(before)
                else:
                    turn.slot.forget()
                return await passed(request, answer, turn.header())
            if kind.startswith("text/event-stream"):
                return await self._streamed(
                    request, route, answer, turn, shows_progress
                )
            content = await answer.read()
            timings = timings_of(content)
            self._check(route, turn, timings.reused_tokens)
            self._note(turn, timings)
            headers = answer_headers(answer)
            headers[HEADER] = turn.header()
            return web.Response(status=200, headers=headers, body=content)

    async def _streamed(
        self,
        request: web.Request,
        route: str,
        answer: aiohttp.ClientResponse,
        turn: Turn,
        shows_progress: bool,
    ) -> web.StreamResponse:
        stream = EventStream(
            answer.content.iter_any(),
            cuts_progress=turn.loaded > 0 and not shows_progress,
        )
        first = b""
        if turn.loaded:
            first = await stream.beginning()
            turn.start.release()
            self._check(route, turn, stream.reused_tokens)
        response = web.StreamResponse(status=200, headers=answer_headers(answer))
        response.headers[HEADER] = turn.header()
        await response.prepare(request)
        unread = UnreadAnswer()
        reading = asyncio.create_task(self._read(stream, unread, turn))
        try:
            if first:
                await response.write(first)
            async for piece in unread.pieces():
                await response.write(piece)
            await reading
        except Exception:
            # the server has ended in the middle of its answer: so it is not complete
            break_connection(request.transport)
            raise
        finally:
            reading.cancel()
        await response.write_eof()
        return response

    async def _read(
        self, stream: EventStream, unread: UnreadAnswer, turn: Turn
    ) -> None:
        """Read an answer to its end, and let others have its slot then."""
        try:
            async for piece in stream.rest():
                await unread.put(piece)
            self._note(turn, stream.timings)
            await finished(self._give_back(turn))
        except asyncio.CancelledError:
            # many clients go at the last event, before the end of the stream
            timings = stream.timings
            if timings.answer_tokens is not None and not turn.is_over:
                self._note(turn, timings)
            raise
        finally:
            await unread.end()

    # ---- afterwards

    def status(self) -> dict[str, object]:
        """Return what a person asks when there are no hits."""
        return {
            "loading_is_off": self._options.loading_is_off,
            "loading_is_off_for": {
                route: why for route in self._off if (why := self._why_off(route))
            },
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

    def _check(self, route: str, turn: Turn, reused: int | None) -> None:
        """Compare what the server reused with what was restored. Raises _DifferenceError."""
        if not turn.loaded:
            return
        if reused is None:
            self.counts["unchecked"] += 1
            self._count_difference(
                route, "the server does not say what it reused"
            )
            return
        if reused > turn.expected:
            raise _DifferenceError(f"{reused} of {turn.expected} were reused")
        if reused < turn.expected:
            self.counts["reused_less"] += 1
            self._count_difference(
                route,
                f"the server reused {reused} of {turn.expected} restored tokens",
            )
            return
        self._differences[route] = 0

    async def _differed(self, route: str, turn: Turn, why: str) -> None:
        """Empty a slot that is not what was restored, before it is asked again."""
        self.counts["asked_again"] += 1
        self._count_difference(route, why)
        turn.is_spoiled = not await self._emptied(turn.slot)
        turn.loaded = 0
        turn.why = why

    def _count_difference(self, route: str, why: str) -> None:
        self._differences[route] += 1
        _log.warn(_logger, Reason.FAILED_CHECK, f"{route}: {why}")
        if self._differences[route] >= _MOST_DIFFERENCES:
            self._off[route] = (why, time.monotonic() + _OFF_SECONDS)
            _logger.warning(
                "nothing is loaded for %s for %.0f s: %d answers in a row: %s",
                route,
                _OFF_SECONDS,
                self._differences[route],
                why,
            )

    def _why_off(self, route: str) -> str:
        """Return why nothing is loaded for a route now; empty: it is."""
        why, until = self._off.get(route, ("", 0.0))
        return why if time.monotonic() < until else ""

    def _computed(self, tokens: int, seconds: float) -> None:
        """Account for a prompt that the server has computed, if it says something."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        self._worth.computed(tokens, seconds)
        self._states.observe_prefill(tokens, seconds)

    def _note(self, turn: Turn, timings: Timings) -> None:
        """Account for a complete answer."""
        slot = turn.slot
        reused = timings.reused_tokens
        is_attention = self._states.kind == "attention"
        if reused is not None and reused < turn.held - 1 and is_attention:
            # the server has emptied it meanwhile, and perhaps others too
            self.counts["held_less"] += 1
            self._accounts.doubt_others(slot)
        if timings.answer_tokens is not None:
            # the last one was not computed any more
            slot.more_tokens = max(timings.answer_tokens - 1, 0)
        if timings.computed_tokens is not None:
            self._computed(timings.computed_tokens, timings.compute_seconds)
        self._saver.note_answer(slot, len(turn.tokens) - turn.saved)


def printable(text: str) -> str:
    """Return a text for a header: ASCII, on one line, without quotes."""
    plain = text.encode("ascii", "replace").decode().replace('"', "'")
    return " ".join(plain.split())


async def passed(
    request: web.Request, answer: aiohttp.ClientResponse, header: str = ""
) -> web.StreamResponse:
    """Pass an answer on as it comes."""
    headers = answer_headers(answer)
    if "Content-Length" in answer.headers:
        headers["Content-Length"] = answer.headers["Content-Length"]
    response = web.StreamResponse(
        status=answer.status, reason=answer.reason, headers=headers
    )
    if header:
        response.headers[HEADER] = header
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError:
        break_connection(request.transport)
        raise
    await response.write_eof()
    return response
