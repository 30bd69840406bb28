"""What one request of vLLM's may load and store: how far vLLM's block hashes name its KV, and what
it asks for.

Both connectors use it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pagoda.base.log import guarded_logger

log = guarded_logger("pagoda.vllm")

# the token that vLLM's block hashes have at the position of an embedding
_PLACEHOLDER = 0


def named_tokens(request: Any) -> int | None:
    """Return how many leading tokens of a request vLLM's block hashes name; None: all. Logs once
    that there is a limit.

    A prompt may mix tokens and embeddings (`prompt_embeds`). The hashes have token 0 where an
    embedding is, and a row of numbers also where a token is, but not which of the two the model
    gets. So they name what comes before the first embedding, and before the first token 0. A prompt
    of embeddings alone is named by its rows.
    """
    kinds = request.prompt_is_token_ids
    if request.prompt_embeds is None or kinds is None:
        return None
    doubtful = (
        at
        for at, (token, is_token) in enumerate(
            zip(request.prompt_token_ids, kinds, strict=False)
        )
        if not is_token or token == _PLACEHOLDER
    )
    first = next(doubtful, None)
    if first is not None:
        _log_once()
    return first


@cache
def _log_once() -> None:
    log.info(
        "prompts that mix tokens and embeddings are cached up to their first embedding or token "
        "0: vLLM's block "
        "hashes do not tell one from the other"
    )


def is_of_embeddings(request: Any) -> bool:
    """Whether a prompt has no tokens. Changes nothing.

    Its hashes are also those of a mixed prompt with the same rows and token 0 everywhere. So what
    vLLM's own cache has under them may be the KV of tokens, and what was computed from that must
    not be stored.
    """
    return (
        request.prompt_embeds is not None and request.prompt_is_token_ids is None
    )


def reads_nothing(request: Any) -> bool:
    """Whether nothing may be loaded for a request, as vLLM or the request itself says. Changes
    nothing.

    vLLM says so for log probabilities of the prompt and for some pooled answers; a request by
    `max_load_tokens`.
    """
    asked_for = (request.kv_transfer_params or {}).get("max_load_tokens")
    nothing = type(asked_for) is int and asked_for == 0
    return (
        bool(request.skip_reading_prefix_cache)
        or nothing
        or named_tokens(request) == 0
    )
