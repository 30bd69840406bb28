"""What is known of vLLM's requests: what their clients say, and how their answers ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blake3 import blake3
from vllm.tokenizers.registry import (
    cached_get_tokenizer,
    cached_tokenizer_from_config,
)
from vllm.v1.engine import FinishReason

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.cache import RequestHints
from pagoda.cache.caller_hints import EndingName
from pagoda.cache.host_slots import HostSlots
from pagoda.config.option_values import HintMode
from pagoda.connectors.hint_parameters import (
    parameters_of,
    parsed_hints,
    with_ending,
)
from pagoda.connectors.tool_call_marks import ToolCallMarks, marks_of

log = guarded_logger("pagoda.vllm")


class HintReader:
    """Reads the hints of requests, for the scheduler's thread.

    Args:
        mode: the option `hints`.
        marks: how the model ends a tool call; None: not known. Then the endings of answers are told
            for requests only whose clients give hints.
    """

    def __init__(self, mode: HintMode, marks: ToolCallMarks | None) -> None:
        self._mode = mode
        self._marks = marks
        self._lines = RateLimitedLog()

    def arrived(
        self, request: Any, slots: HostSlots | None
    ) -> RequestHints | None:
        """Return what a request's client says of it; what is wrong is counted. None: nothing will
        be said of it, as far as is known now.

        `slots`: of the cache, None before it is open.
        """
        session = getattr(request, "session_id", None)
        actions = parameters_of(getattr(request, "kv_hints", None))
        given = {**actions, **(request.kv_transfer_params or {})}
        parsed = parsed_hints(given, session)
        if slots is None:
            return parsed.hints
        for hint, why in parsed.refused.items():
            slots.refuse_hint(hint, why)
            text = f"the hint {hint} of a request is refused: {why}"
            self._lines.warn(log, Reason.IO_ERROR, text)
        if parsed.hints is None and self._marks and slots.hears_hints:
            # its ending will be told
            return RequestHints()
        return parsed.hints

    def ended(
        self, request: Any, hints: RequestHints | None, are_heard: bool
    ) -> RequestHints | None:
        """Return the hints of a request that has ended, with how its answer did. `are_heard`:
        whether the cache hears hints already.
        """
        is_untold = self._marks is None or not request.output_token_ids
        if hints is None and is_untold:
            return None
        return with_ending(hints, self._ending(request), self._mode, are_heard)

    def _ending(self, request: Any) -> EndingName:
        """Return how an answer ended."""
        answer = request.output_token_ids
        is_turn = request.get_finished_reason() is FinishReason.STOP
        if self._marks is not None and answer:
            sampling = request.sampling_params
            stops = () if sampling is None else sampling.all_stop_token_ids
            if self._marks.end(answer, is_turn, stops):
                return "tool_call"
        return "turn" if is_turn else "other"


def of_tenant(
    hints: RequestHints | None, salt: str | None
) -> RequestHints | None:
    """Return hints with a session that no request with another `cache_salt` can name. Pure.

    For chunks of all tenants under one namespace, as those of hybrid models: only their hashes have
    the salt.
    """
    if hints is None or not hints.session or not salt:
        return hints
    key = blake3(salt.encode(errors="surrogatepass")).digest()
    name = blake3(hints.session.encode(), key=key).hexdigest()
    return replace(hints, session=name)


def hint_reader(model_config: Any, mode: HintMode) -> HintReader:
    """Return the reader for this engine; its scheduler's process has loaded the tokenizer already,
    for structured output, and loads none for this. Never raises.
    """
    tokenizer = None
    try:
        is_loaded = cached_get_tokenizer.cache_info().currsize > 0
        if mode != "never" and is_loaded:
            # None if the engine was told to have none
            tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as trouble:  # noqa: BLE001
        # a boundary: an engine starts without it
        log.info("how answers end is not read: no tokenizer: %s", trouble)
    marks = None if tokenizer is None else marks_of(tokenizer)
    return HintReader(mode, marks)
