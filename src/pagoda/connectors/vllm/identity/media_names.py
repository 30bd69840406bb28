"""Decides whether the names of images, audio and video in vLLM's block hashes are digests of their
content.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blake3 import blake3

from pagoda.base.log import guarded_logger

log = guarded_logger("pagoda.vllm")

# BLAKE3 and SHA-256, SHA-512
_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")


def hashes_media(vllm_config: Any) -> bool:
    """Whether vLLM names media by their content: without its own caches it numbers them. Changes
    nothing.
    """
    multimodal = vllm_config.model_config.multimodal_config
    caches = vllm_config.cache_config.enable_prefix_caching or (
        multimodal is None or multimodal.mm_processor_cache_gb != 0
    )
    return bool(caches)


class MediaNames:
    """The names of chunks with media, for one engine.

    A block hash has the `identifier` of each item: a digest of its content, the text of a client,
    or a number that each process counts from 1. Only a digest names the same item in another engine
    and after a restart. So chunks that depend on an item with another name hit in this engine only.
    Thread-safe.
    """

    def __init__(self, hashed: bool = True) -> None:
        """`hashed`: see `hashes_media`."""
        self._hashed = hashed
        self._own = secrets.token_bytes(32)
        self._logged = False

    def key_digests(
        self,
        digests: Sequence[bytes],
        first: int,
        chunk_tokens: int,
        shared_tokens: int | None,
    ) -> list[bytes]:
        """Return the digests from which the keys of a request's chunks are derived, from chunk
        number `first` on.

        `digests`: vLLM's hashes at the ends of these chunks; they are used for chunks that all
        engines may share.
        """
        if shared_tokens is None:
            return list(digests)
        shared = max(0, shared_tokens // chunk_tokens - first)
        return [
            *digests[:shared],
            *(blake3(one, key=self._own).digest() for one in digests[shared:]),
        ]

    def shared_tokens(self, request: Any) -> int | None:
        """Return how many tokens of a request are before its first item that is not named by
        content; None: all.
        """
        if not request.mm_features:
            return None
        at: list[int] = [
            item.mm_position.offset
            for item in request.mm_features
            if not (self._hashed and _is_digest(item.identifier))
        ]
        if not at:
            return None
        if not self._logged:
            self._logged = True
            log.info(
                "media are not named by their content but by clients (multi_modal_uuids) or a "
                "counter "
                "(--mm-processor-cache-gb 0 without prefix caching): chunks with such media hit "
                "in this engine only"
            )
        return min(at)


@lru_cache(4096)
def _is_digest(identifier: str) -> bool:
    # an adapter's name may be before a colon
    return _DIGEST.fullmatch(identifier.rpartition(":")[2]) is not None
