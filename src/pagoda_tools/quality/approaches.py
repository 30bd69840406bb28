"""Ways to get the KV of a prompt: computed, reused, blended, through a codec, or spoiled on
purpose. Thread-safe.

Called by `measure`. An approach first prepares a prompt (it stores what would have been stored),
and then fills a cache of Transformers; only the latter is timed. `exact_kv` is the computed KV of
all tokens but the last; it is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagoda import codec
from pagoda.base.quality_verdict import Setting
from pagoda.blend.blend_policies import SelectionPolicy, blend_setting
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.dynamic_cache import (
    dynamic_cache,
    kv_of_row,
    room_for,
)
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.layout import itemsize
from pagoda_tools.quality.prompt_lines import QualityPrompt

PLAIN_REUSE = "plain reuse"


class KVLayer(Protocol):
    """The parts of a DynamicCache's layer that are used: [1, heads, tokens, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class KVCache(Protocol):
    """The parts of a DynamicCache that are used."""

    layers: list[KVLayer]

    def get_seq_length(self) -> int:
        """Return how many tokens it has."""


class Prepared(NamedTuple):
    """A prompt whose KV is stored."""

    # returns the KV of leading tokens; this call is timed
    fill: Callable[[], KVCache]
    stored_bytes: int = 1  # bytes of that KV as it is stored ...
    exact_bytes: int = 1  # ... and as it was computed


class Approach(Protocol):
    """One way to get the KV of a prompt."""

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def setting(self) -> Setting | None:
        """The setting that a verdict names; None: the approach is not a feature."""

    def prepare(self, prompt: QualityPrompt, exact_kv: KVCache) -> Prepared:
        """Store what this approach stores of the prompt."""


class Blend:
    """Documents are reused, and a share of their tokens is computed again; a share of 0 is plain
    reuse.
    """

    def __init__(
        self,
        cached: CachedModel,
        policy: SelectionPolicy,
        recompute: float,
        min_tokens: int = 0,
    ) -> None:
        """Raise ValueError for a bad share."""
        self._cached = cached
        self._policy = policy
        self._recompute = recompute
        self._least = min_tokens
        self.setting = blend_setting(policy, recompute, min_tokens)
        self.name = (
            self.setting.flag.partition(" ")[2]
            if recompute or min_tokens
            else PLAIN_REUSE
        )

    def prepare(self, prompt: QualityPrompt, exact_kv: KVCache) -> Prepared:
        """Store the documents."""
        self._blended(prompt, 0.0)
        return Prepared(lambda: self._blended(prompt, self._recompute))

    def _blended(self, prompt: QualityPrompt, recompute: float) -> KVCache:
        prefix = self._cached.blend(
            prompt.documents,
            prompt.question,
            recompute=recompute,
            policy=self._policy,
            min_tokens=self._least,
            unchecked=True,
        )
        kv: KVCache = prefix.past_key_values
        return kv


class Codec:
    """The whole chunks of the prompt come back from a tier with a lossy codec; what follows them is
    computed.
    """

    def __init__(
        self, name: str, model: torch.nn.Module, probed: ProbedModel
    ) -> None:
        """Raise ConfigError for a codec that is unknown or cannot be used, or for a layout that it
        refuses.
        """
        codec.require(name)
        codec.require_layout(name, probed.layout)
        self.name = name
        self._model = model
        self._probed = probed
        self.setting = codec.codec_setting(name, probed.layout.chunk_tokens)

    def prepare(self, prompt: QualityPrompt, exact_kv: KVCache) -> Prepared:
        """Encode the chunks."""
        layout = self._probed.layout
        chunk = self._probed.layout.chunk_tokens
        planes = [[layer.keys, layer.values] for layer in exact_kv.layers]
        tokens = exact_kv.get_seq_length()
        starts = range(0, tokens - chunk + 1, chunk)
        slots = np.empty((len(starts), layout.chunk_bytes), np.uint8)
        kv_of_row(planes, 0, 0, tokens, self._probed).to_slots(
            starts, list(slots)
        )
        word_bytes = itemsize(layout.planes[0].dtype)
        out = np.empty_like(slots[0])
        stored = []
        for slot in slots:
            used, encoded = codec.encode(
                self.name, slot, word_bytes, out, layout=layout
            )
            stored.append((used, encoded.copy()))

        def fill() -> KVCache:
            decoded = np.empty_like(slots)
            for (used, encoded), slot in zip(stored, decoded, strict=True):
                if not codec.decode(used, encoded, word_bytes, slot):
                    raise ValueError(
                        f"codec {self.name} cannot decode what it encoded: report this"
                    )
            planes = room_for(self._probed, 1, len(starts) * chunk)
            kv_of_row(planes, 0, 0, len(starts) * chunk, self._probed).from_slots(
                starts, list(decoded)
            )
            kv: KVCache = dynamic_cache(
                self._model, self._probed, planes, [], len(starts) * chunk
            )
            return kv

        return Prepared(
            fill, sum(encoded.nbytes for _, encoded in stored), slots.nbytes
        )


class Spoiled:
    """A control: a copy of exact KV, spoiled layer by layer at the tokens of its documents."""

    setting = None

    def __init__(
        self, name: str, spoil: Callable[[KVLayer, list[int]], None]
    ) -> None:
        self.name = name
        self._spoil = spoil

    def prepare(self, prompt: QualityPrompt, exact_kv: KVCache) -> Prepared:
        """Spoil a copy."""
        kv = copy.deepcopy(exact_kv)
        for layer in kv.layers:
            self._spoil(layer, _spans(prompt))
        return Prepared(lambda: kv)


def _zero(layer: KVLayer, spans: list[int]) -> None:
    layer.keys[:, :, : sum(spans)] = 0
    layer.values[:, :, : sum(spans)] = 0


def _swap(layer: KVLayer, spans: list[int]) -> None:
    whole = layer.values[:, :, : sum(spans)]
    layer.values[:, :, : sum(spans)] = whole.roll(-spans[0], dims=2)


CONTROLS = (Spoiled("zeroed KV", _zero), Spoiled("swapped values", _swap))
"""The KV of the documents (without documents: of half of the prompt) is lost, and zeros are used;
the keys of each document have the values of the next one (without documents: of another half)."""


def _spans(prompt: QualityPrompt) -> list[int]:
    """Return the token range of each document; for a single document or none, the two halves."""
    lengths = [len(document) for document in prompt.documents] or [
        len(prompt.question) - 1
    ]
    if len(lengths) == 1:
        return [lengths[0] // 2, lengths[0] - lengths[0] // 2]
    return lengths
