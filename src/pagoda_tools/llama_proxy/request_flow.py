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
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import aiohttp
from aiohttp import web

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.connectors.llamacpp import SlotStates
from pagoda.connectors.llamacpp.server_requests import ServerTrouble
from pagoda_tools.llama_proxy.event_stream import (
    EventStream,
    Timings,
    timings_of,
)
from pagoda_tools.llama_proxy.finished_work import finished
from pagoda_tools.llama_proxy.load_worth import LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import marks_of
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
# for a slot; after it the server itself chooses
_WAIT_SECONDS = 2.0
# of answers in a row that reused other tokens than were restored: then that route loads no more
_MOST_DIFFERENCES = 3
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


@dataclass
class Turn:
    """One request that has a slot.

    `held`: tokens of its prompt that the slot has by our account. `loaded`: tokens that were
    restored for it. `stored`: leading tokens of its prompt that are stored.
    """

    slot: SlotAccount
    tokens: Tokens
    salt: str
    held: int = 0
    loaded: int = 0
    stored: int = 0
    why: str = ""
    marks: Marks | None = None
    is_over: bool = False

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


class _DifferenceError(Exception):
    """The server reused more tokens than were restored."""


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """How requests are treated.

    `min_gain_tokens`: what a load must give beside what the slot has. `context_tokens`: a prompt
    may have; the server refuses longer ones. `pins_empty_slots`: False if
    the server has copies of other slots, which it does not look for in an empty slot that is asked
    by name. `empties_idle_slots`: every request that starts empties those slots. `others_ask`: the
    server is asked not only through this proxy.
    """

    min_gain_tokens: int
    context_tokens: int
    pins_empty_slots: bool
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
        # held from a restore until its request has started, where others empty idle slots
        self._starting = asyncio.Lock()
        self._off: dict[str, str] = {}
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
        stored = await self._stored(route, tokens, salt)
        slot = await self._slot_for(tokens, salt, stored, body.get("id_slot"))
        if slot is None:
            self.counts["no_free_slot"] += 1
            return None
        turn = Turn(slot, tokens, salt, stored=stored.tokens, why=stored.why)
        start = _Start(await self._held_start())
        starting: asyncio.Task[None] | None = None
        try:
            await finished(self._prepare(turn, stored))
            if slot.is_empty and not self._options.pins_empty_slots:
                return None
            turn.marks = partial(
                marks_of, route, body, tokens, self._upstream.ask
            )
            if start.is_held:
                starting = asyncio.create_task(self._has_started(slot, start))
            try:
                return await self._ask(request, route, text, body, turn)
            except _DifferenceError as difference:
                await finished(self._differed(route, turn, str(difference)))
                return await self._ask(request, route, text, body, turn)
        finally:
            if starting is not None:
                starting.cancel()
            start.release()
            await finished(self._give_back(turn))

    async def _give_back(self, turn: Turn) -> None:
        """Let others have the slot of a turn; idempotent."""
        if turn.is_over:
            return
        turn.is_over = True
        if self._options.others_ask:
            numbers = await self._task_numbers()
            turn.slot.task = (numbers or {}).get(turn.slot.number)
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
        _Start(await self._held_start()).release()
        since = time.monotonic()
        before = await self._task_numbers()
        used: set[int] | None = None
        try:
            answer = await send()
        finally:
            after = await finished(self._task_numbers())
            if before is not None and after is not None:
                used = {
                    number
                    for number in after
                    if after[number] != before.get(number)
                }
            self._accounts.forget_used(used, since)
        if tokens is not None and used is not None and len(used) == 1:
            number = used.pop()
            slots = [
                slot for slot in self._accounts.free if slot.number == number
            ]
            for slot in slots if answer.status == 200 else ():
                slot.set(tokens, salt, 0)
                slot.task = (after or {}).get(number)
                self._saver.note_answer(slot, 0)
        return answer

    async def _forget_others(self) -> None:
        """Account for requests that others have sent to the server."""
        numbers = await self._task_numbers()
        for slot in self._accounts.free:
            if numbers is None or numbers.get(slot.number) != slot.task:
                slot.forget()

    async def _task_numbers(self) -> dict[int, object] | None:
        """Return the number of the last request of each slot; None if the server hides it."""
        try:
            listed = await self._upstream.get("/slots")
        except ServerTrouble:
            return None
        if not isinstance(listed, list):
            return None
        return {
            entry["id"]: entry.get("id_task")
            for entry in listed
            if isinstance(entry, dict) and isinstance(entry.get("id"), int)
        }

    # ---- the start of a request

    async def _held_start(self) -> asyncio.Lock | None:
        """Wait until no restored slot waits for its request, and keep others from starting; None if
        that is not needed, or takes too long.
        """
        if not self._options.empties_idle_slots:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._starting.acquire()
                return self._starting
        return None

    async def _has_started(self, slot: SlotAccount, start: _Start) -> None:
        """Let others start as soon as the server computes in this slot."""
        with contextlib.suppress(ServerTrouble):
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                listed = await self._upstream.get("/slots")
                for entry in listed if isinstance(listed, list) else ():
                    if entry.get("id") == slot.number and entry.get(
                        "is_processing"
                    ):
                        start.release()
                        return

    # ---- the slot

    async def _stored(
        self, route: str, tokens: Tokens, salt: str
    ) -> StoredPrefix:
        """Look for what is stored, unless a slot has nearly all."""
        least = self._options.min_gain_tokens
        lacking = len(tokens)
        if free := self._accounts.free:
            lacking -= fullest(free, tokens, salt).held(tokens, salt)
        if lacking < least or len(tokens) >= self._options.context_tokens:
            return StoredPrefix(0, may_load=False)
        off = self._options.loading_is_off or self._off.get(route, "")
        if off:
            return StoredPrefix(0, False, off)
        found = await self._call(self._states.find, tokens, salt=salt)
        if found is None:
            return StoredPrefix(0, False, "what is stored is not known")
        # what another client has stored is not for this one
        is_told = found.reason is not Reason.OTHER_NAMESPACE
        return StoredPrefix(
            found.num_tokens,
            found.num_tokens >= least,
            found.detail if is_told else "",
            is_unknown=found.reason is Reason.NOT_CACHEABLE,
        )

    async def _slot_for(
        self, tokens: Tokens, salt: str, stored: StoredPrefix, wanted: object
    ) -> SlotAccount | None:
        """Return a locked slot, the one that the client wants or the best; None: none became
        free.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
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
            await self._emptied(slot)
        elif slot.salt != turn.salt and not slot.is_empty:
            # what another user's prompt left must not be seen in the time that an answer takes
            await self._saver.save(slot)
            await self._emptied(slot)
        turn.held = slot.held(turn.tokens, turn.salt)
        turn.stored = max(turn.stored, min(turn.held, slot.stored_tokens))
        if turn.held < len(slot.tokens):
            await self._saver.save(slot)
        if stored.is_unknown or self._is_better(stored, turn.held):
            await self._load(turn)
        elif stored.may_load and stored.tokens > turn.held:
            self.counts["not_worth_it"] += 1
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

    async def _emptied(self, slot: SlotAccount) -> None:
        try:
            await self._upstream.erase(slot.number)
            slot.clear()
        except ServerTrouble:
            slot.forget()

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
        sent = changed(text, body, added)
        before = slot.copied()
        # until the answer is known: an aborted request leaves a beginning of this
        slot.set(turn.tokens, turn.salt, turn.stored)
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
                if answer.status == 400 and not turn.loaded:
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
        except aiohttp.ClientError:
            # the server has ended in the middle of its answer
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
            await self._give_back(turn)
        finally:
            await unread.end()

    # ---- afterwards

    def status(self) -> dict[str, object]:
        """Return what a person asks when there are no hits."""
        return {
            "loading_is_off": self._options.loading_is_off,
            "loading_is_off_for": dict(self._off),
            "counts": dict(self.counts),
            "slots": [
                {
                    "id": slot.number,
                    "is_busy": slot.lock.locked(),
                    "is_known": slot.is_known,
                    "tokens": len(slot.tokens) + slot.more_tokens,
                    "stored_tokens": slot.stored_tokens,
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
        await self._emptied(turn.slot)
        turn.loaded = 0
        turn.why = why

    def _count_difference(self, route: str, why: str) -> None:
        self._differences[route] += 1
        _log.warn(_logger, Reason.FAILED_CHECK, f"{route}: {why}")
        if self._differences[route] >= _MOST_DIFFERENCES:
            self._off[route] = why
            _logger.warning(
                "nothing is loaded any more for %s: %d answers in a row: %s",
                route,
                self._differences[route],
                why,
            )

    def _note(self, turn: Turn, timings: Timings) -> None:
        """Account for a complete answer."""
        slot = turn.slot
        if timings.answer_tokens is not None:
            # the last one was not computed any more
            slot.more_tokens = max(timings.answer_tokens - 1, 0)
        if timings.computed_tokens is not None:
            self._worth.computed(timings.computed_tokens, timings.compute_seconds)
        self._saver.note_answer(slot, len(turn.tokens) - turn.stored)


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
