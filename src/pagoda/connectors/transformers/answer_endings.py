"""How answers of `generate` ended, where a call has its tokenizer: read from the last tokens."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from pagoda.base.log import guarded_logger
from pagoda.cache import Cache, RequestHints
from pagoda.cache.caller_hints import EndingName
from pagoda.connectors.hint_parameters import with_ending
from pagoda.connectors.tool_call_marks import ToolCallMarks, marks_of
from pagoda.connectors.transformers.batch_rows import token_ids

_log = guarded_logger("pagoda.connectors")

# the end of an answer in which a stop string is
_TAIL = 16


class AnswerEndings:
    """Adds the endings of answers to the hints of calls. Not thread-safe, as `generate`."""

    def __init__(self) -> None:
        # of the tokenizer of the last call
        self._marks: ToolCallMarks | None = None
        self._tokenizer: Any = lambda: None

    def hints_with(
        self,
        hints: RequestHints | None,
        tokenizer: Any,
        out: Any,
        columns: int,
        decoding: Any,
        cache: Cache,
    ) -> RequestHints | None:
        """Return the hints of a call, with how its answer ended if there is one answer. Never
        raises: the text is complete.

        Args:
            hints: what the caller says.
            tokenizer: the argument of the call; None: nothing is known.
            out: what `generate` returned.
            columns: of the prompt.
            decoding: the generation config.
            cache: that of the model.
        """
        mode = cache.config.hints
        if tokenizer is None or mode == "never":
            return hints
        try:
            ids = getattr(out, "sequences", out)
            if len(ids) != 1:
                return hints
            answer = ids[0, columns:].tolist()
            ending = self._ending(tokenizer, answer, decoding)
        except Exception as trouble:  # noqa: BLE001
            # a boundary, with a tokenizer of anybody
            _log.info("how an answer ended is not read: %s", trouble)
            return hints
        return with_ending(hints, ending, mode, cache.hears_hints)

    def _ending(
        self, tokenizer: Any, answer: Sequence[int], decoding: Any
    ) -> EndingName:
        if self._tokenizer() is not tokenizer:
            self._marks = marks_of(tokenizer)
            self._tokenizer = weakref.ref(tokenizer)
        if self._marks is None or not answer:
            return ""
        stops = token_ids(decoding.eos_token_id)
        strings = decoding.stop_strings or ()
        strings = [strings] if isinstance(strings, str) else strings
        is_turn = answer[-1] in stops
        if strings and not is_turn:
            text = tokenizer.decode(answer[-_TAIL:])
            is_turn = any(string in text for string in strings)
        if self._marks.end(answer, is_turn, stops):
            return "tool_call"
        return "turn" if is_turn else "other"
