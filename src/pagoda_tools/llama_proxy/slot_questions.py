"""The question to the server in a prepared slot, and its answer: checked before the client sees a
token of it, passed on as it comes, and accounted for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from pagoda.cache import RequestHints
from pagoda.cache.caller_hints import EndingName
from pagoda.connectors.llamacpp import SlotStates
from pagoda_tools.llama_proxy.answer_checks import AnswerChecks
from pagoda_tools.llama_proxy.answer_ending import ending_of
from pagoda_tools.llama_proxy.client_hints import refuse_all
from pagoda_tools.llama_proxy.event_stream import (
    EventStream,
    Timings,
    timings_of,
)
from pagoda_tools.llama_proxy.load_worth import LEAST_TOKENS, LoadWorth
from pagoda_tools.llama_proxy.prompt_tokens import MESSAGES, ROUTES
from pagoda_tools.llama_proxy.request_body import changed
from pagoda_tools.llama_proxy.request_turn import HEADER, Turn
from pagoda_tools.llama_proxy.server_connection import ServerConnection
from pagoda_tools.llama_proxy.server_slots import ServerSlots
from pagoda_tools.llama_proxy.slot_accounts import SlotAccount, SlotAccounts
from pagoda_tools.llama_proxy.slot_saver import SlotSaver
from pagoda_tools.llama_proxy.unread_answer import UnreadAnswer
from pagoda_tools.llama_proxy.upstream import Upstream, answer_headers
from pagoda_tools.serve.access import break_connection


class SlotQuestions:
    """Asks the server of one proxy. For the event loop."""

    def __init__(
        self,
        upstream: Upstream,
        states: SlotStates,
        accounts: SlotAccounts,
        server_slots: ServerSlots,
        saver: SlotSaver,
        worth: LoadWorth,
        checks: AnswerChecks,
        counts: Counter[str],
    ) -> None:
        """`counts`: of the proxy."""
        self._upstream = upstream
        self._states = states
        self._accounts = accounts
        self._server_slots = server_slots
        self._saver = saver
        self._worth = worth
        self._checks = checks
        self._counts = counts

    async def ask(self, turn: Turn) -> web.StreamResponse:
        """Ask the server in the slot of a turn, which is prepared, and pass its answer on.

        Raises ReusedMoreError before the client gets anything, and aiohttp.ClientError.
        """
        slot = turn.slot
        sent = self._sent(turn)
        before = slot.copied()
        # until the answer is known: an aborted request leaves a beginning of this
        why_not_stored = slot.why_not_stored
        turn.saved = max(turn.stored, turn.saved)
        slot.set(turn.tokens, turn.salt, turn.stored, turn.saved)
        if turn.saved > turn.stored:
            slot.why_not_stored = why_not_stored
        slot.marks = turn.marks
        try:
            return await self._answered(sent, turn, before)
        except (asyncio.CancelledError, OSError, aiohttp.ClientError):
            if not turn.is_over:
                # what was computed until then is as good
                self._saver.note_answer(slot, 0, self._ended(turn, "other"))
            raise

    def _sent(self, turn: Turn) -> bytes:
        """Return the body that the server gets. Raises aiohttp.ClientError."""
        question = turn.question
        number = turn.slot.number
        added: dict[str, object] = {"id_slot": number}
        if question.is_streamed and turn.loaded:
            added["return_progress"] = True
        if turn.is_spoiled:
            if ROUTES[question.route] == MESSAGES:
                # it has no such field
                raise aiohttp.ClientError(f"slot {number} was not emptied")
            added["cache_prompt"] = False
        return changed(question.text, question.body, added)

    async def _answered(
        self, sent: bytes, turn: Turn, before: SlotAccount
    ) -> web.StreamResponse:
        """Send the question and pass the answer on. `before`: what the slot held."""
        request = turn.question.request
        async with self._upstream.question(request, sent) as answer:
            kind = answer.headers.get("Content-Type", "").lower()
            status = answer.status
            if status == 200 and kind.startswith("text/event-stream"):
                return await self._streamed(answer, turn)
            if 400 <= status < 500 or status == 501:
                # a refused request computes nothing
                turn.slot.restore(before)
            elif status != 200:
                turn.slot.forget()
            if status != 200:
                refuse_all(
                    self._states, turn.question.hints, "the server refused it"
                )
            content = await answer.read()
            if status == 200:
                timings = timings_of(content)
                self._checks.check(turn, timings.reused_tokens)
                self._note(turn, timings, content)
            headers = answer_headers(answer)
            headers[HEADER] = turn.header()
            return web.Response(
                status=status,
                reason=answer.reason,
                headers=headers,
                body=content,
            )

    async def _streamed(
        self, answer: ServerConnection, turn: Turn
    ) -> web.StreamResponse:
        question = turn.question
        request = question.request
        stream = EventStream(
            answer.pieces(),
            cuts_progress=turn.loaded > 0 and not question.wants_progress,
        )
        first = b""
        if turn.loaded:
            first = await stream.beginning()
            turn.start.release()
            self._checks.check(turn, stream.reused_tokens)
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
            tail = stream.tail
            self._note(turn, timings_of(tail), tail)
            await self._server_slots.give_back(turn)
        except asyncio.CancelledError:
            # many clients go at the last event, before the end of the stream
            tail = stream.tail
            timings = timings_of(tail)
            if timings.answer_tokens is not None and not turn.is_over:
                self._note(turn, timings, tail)
            raise
        finally:
            unread.end()

    def _ended(self, turn: Turn, ending: EndingName) -> RequestHints | None:
        return self._states.ended(turn.question.hints, ending)

    def _note(self, turn: Turn, timings: Timings, text: bytes) -> None:
        """Account for a complete answer. `text`: its end, or all of it."""
        slot = turn.slot
        reused = timings.reused_tokens
        is_attention = self._states.kind == "attention"
        if reused is not None and reused < turn.held - 1 and is_attention:
            # the server has emptied it meanwhile, and perhaps others too
            self._counts["held_less"] += 1
            self._accounts.doubt_others(slot)
        if timings.answer_tokens is not None:
            # the last one was not computed any more
            slot.more_tokens = max(timings.answer_tokens - 1, 0)
        if timings.computed_tokens is not None:
            self._computed(timings.computed_tokens, timings.compute_seconds)
        ending = ending_of(turn.question.route, text)
        self._saver.note_answer(
            slot, len(turn.tokens) - turn.saved, self._ended(turn, ending)
        )

    def _computed(self, tokens: int, seconds: float) -> None:
        """Account for a prompt that the server has computed, if it says something."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        self._worth.computed(tokens, seconds)
        self._states.observe_prefill(tokens, seconds)


async def passed(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    header: str = "",
    at_end: Callable[[int], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Pass an answer on as it comes. `at_end`: called with its status when all of it has come,
    before the client knows that; perhaps twice.
    """
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
            if at_end is not None and answer.content.at_eof():
                await at_end(answer.status)
            await response.write(piece)
    except aiohttp.ClientError:
        break_connection(request.transport)
        raise
    if at_end is not None:
        await at_end(answer.status)
    await response.write_eof()
    return response
