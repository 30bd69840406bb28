"""Documents that are reused wherever they are in a prompt, with a share of their tokens computed
again.

    documents  | first: exact | second, alone: K moved    | third, alone: K moved      | question |
    chosen     |              | x  x                      |    x       x               | x x x x  |
    computed     ----------->  the chosen tokens attend to everything before them; their K and V
                               replace the reused ones

A document is a separate chain, computed as if it began a prompt, in a cache whose layout names the
rotary embedding: no prompt without documents finds it. Its last, partial chunk is stored too,
padded. The first document of a prompt is a true prefix, so its KV is exact. Blended KV is not
stored.

`CachedModel` calls this. It calls `rotary` to move K, `pagoda.blend` for the rest, `Cache` for the
documents. Imports transformers, so import this module only when it is needed.

Sources: CacheBlend (EuroSys 2025), EPIC (ICML 2025).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pagoda.base.metrics import Reason
from pagoda.base.quality_verdict import QualityState
from pagoda.blend import (
    BlendedPrompt,
    BlendGate,
    Document,
    TokenMask,
    TokenMasks,
    open_documents,
    starts_of,
)
from pagoda.blend.blend_policies import (
    Positions,
    SelectionPolicy,
    checked_min_tokens,
    checked_share,
    choose_positions,
)
from pagoda.cache import Cache, Hit
from pagoda.connectors.endings import KeySpace
from pagoda.connectors.transformers.batch_rows import BatchRow
from pagoda.connectors.transformers.dynamic_cache import (
    Planes,
    dynamic_cache,
    kv_of_row,
    room_for,
)
from pagoda.connectors.transformers.model_checks import ProbedModel, kv_argument
from pagoda.connectors.transformers.rotary import check_attention, rotary_of
from pagoda.keys import Int32s

# seconds for each further document, after loads of this call have timed out for as long as one call
# may wait
_MOMENT_SECONDS = 0.01


@dataclass(frozen=True, eq=False)
class Blended(BlendedPrompt):
    """Which tokens of one prompt of documents are exact, and the cost. Immutable."""

    # that went through all layers in this call, those of missing documents included
    computed_tokens: int
    documents: list[Hit]  # the hit of each document's own chain
    # load, alone (missing documents), choose, recompute
    seconds: dict[str, float]
    # the setting, and whether a verdict of `pagoda quality` covers it
    state: QualityState


@dataclass(frozen=True, eq=False)
class BlendedHit(Hit):
    """The hits of all documents of a prompt as one: `mask` has the tokens that came from tiers,
    wherever they are.
    """

    exact_prefix: int = 0  # up to this position KV is exact

    @property
    def exact(self) -> TokenMask:
        """`mask`, with True only for the tokens served whose KV is what a full prefill computes."""
        return self.mask & (np.arange(len(self.mask)) < self.exact_prefix)

    @property
    def exact_tokens(self) -> int:
        """How many tokens are in `exact`."""
        return int(self.exact.sum())


def hit_of(blended: Blended) -> BlendedHit:
    """Return the hits of a prompt's documents as one, with the first reason for a miss. Pure.

    A token that was computed again counts, because its KV was loaded; `Blended` says which ones
    were.
    """
    mask = np.zeros(len(blended.tokens), np.bool_)
    by_tier = dict[str, int]()
    for start, hit in zip(blended.starts, blended.documents, strict=False):
        mask[start : start + hit.num_tokens] = True
        for tier, count in hit.by_tier.items():
            by_tier[tier] = by_tier.get(tier, 0) + count
    missed = [
        (number, hit)
        for number, hit in enumerate(blended.documents)
        if hit.reason is not None
    ]
    reason = missed[0][1].reason if missed else None
    detail = f"documents[{missed[0][0]}]: {missed[0][1].detail}" if missed else ""
    approximate = next(
        (hit.approximate for hit in blended.documents if hit.approximate), ""
    )
    # only the first document is at the position at which it was computed
    prefix = min(blended.starts[1], blended.exact_tokens)
    return BlendedHit(
        int(mask.sum()),
        by_tier,
        mask,
        reason,
        detail,
        approximate=approximate,
        exact_prefix=prefix,
    )


class _Loaded(NamedTuple):
    """One document whose KV, as computed alone, is in the planes."""

    hit: Hit
    alone: int  # tokens that had to be computed
    load_seconds: float
    alone_seconds: float


class Blender:
    """The documents of one model: their cache, and how they are combined. As thread-safe as the
    model.
    """

    def __init__(self, model: Any, seen: ProbedModel, exact: Cache) -> None:
        """Open the cache of documents beside `exact`, the model's own. Raises ValueError if K
        cannot be moved.
        """
        self._model = model
        self._exact = exact
        self._plain = seen
        self._rotary = rotary_of(model, seen.layout)
        self.gate = BlendGate(exact)
        self.cache = open_documents(exact, self._rotary.rotary)
        self._seen = seen._replace(layout=self.cache.layout)

    def blend(
        self,
        pieces: Sequence[Int32s],
        policy: SelectionPolicy,
        state: QualityState,
        space: KeySpace,
        may_store: Callable[[], bool],
    ) -> tuple[Any, Blended]:
        """Return a DynamicCache of all tokens but the last, and a description; store documents that
        were missing.

        Args:
            pieces: the documents, then the question.
            policy: chooses what is computed again.
            state: the state of the setting, with the share and the least tokens of a document.
            space: adapter and tenant.
            may_store: returns whether the weights are still those that computed the KV.
        """
        check_attention(self._model)
        recompute = checked_share(state.setting.options["recompute"])
        least = checked_min_tokens(state.setting.options.get("min_tokens", 0))
        *documents, question = pieces
        tokens = np.concatenate(pieces)
        starts = starts_of(pieces)
        total = len(tokens)
        end = starts[-1]
        # a document's last chunk is loaded whole, over the beginning of the next one, which is
        # loaded after it
        planes = room_for(self._seen, 1, total + self._seen.layout.chunk_tokens)
        with torch.no_grad():
            loaded: list[_Loaded] = []
            for document, start in zip(documents, starts, strict=False):
                if start and len(document) < least:
                    loaded.append(_too_short(document, least))
                    continue
                late = sum(
                    one.load_seconds
                    for one in loaded
                    if one.hit.reason is Reason.DEADLINE
                )
                left: float | None = None
                if late:
                    left = max(
                        self._exact.config.deadline_seconds - late,
                        _MOMENT_SECONDS,
                    )
                loads = {**space, "deadline_seconds": left}
                loaded.append(
                    self._document(
                        document, start, planes, space, loads, may_store
                    )
                )
            planes = [
                [plane.to(device) for plane in layer]
                for layer, device in zip(planes, self._seen.devices, strict=True)
            ]
            began = time.perf_counter()
            chosen = choose_positions(
                policy,
                recompute,
                starts,
                len(planes),
                partial(self._deviation, tokens, planes),
                least,
            )
            choose_seconds = time.perf_counter() - began
            began = time.perf_counter()
            self._recompute(
                tokens,
                np.concatenate([chosen, np.arange(end, total - 1)]),
                planes,
            )
        # False: from a lossy codec
        first_is_exact = loaded[0].hit.exact_tokens == loaded[0].hit.num_tokens
        masks = TokenMasks.of(starts, total, chosen, first_is_exact)
        seconds = {
            "load": sum(one.load_seconds for one in loaded),
            "alone": sum(one.alone_seconds for one in loaded),
            "choose": choose_seconds,
            "recompute": time.perf_counter() - began,
        }
        computed = sum(one.alone for one in loaded) + len(chosen) + len(question)
        blended = Blended(
            tokens,
            starts,
            *masks,
            computed,
            [one.hit for one in loaded],
            seconds,
            state,
        )
        kv = dynamic_cache(
            self._model, self._seen, planes, [BatchRow(tokens, 0)], total - 1
        )
        # otherwise the generated tokens are exact too
        if blended.exact_tokens < total:
            # for `CachedModel.store`
            kv.pagoda_exact_tokens = blended.exact_tokens
        return kv, blended

    # ---- documents alone

    def _document(
        self,
        document: Int32s,
        start: int,
        planes: Planes,
        space: KeySpace,
        loads: dict[str, Any],
        may_store: Callable[[], bool],
    ) -> _Loaded:
        """Put the KV of a document at `start` of the planes, with K moved there: loaded from the
        tiers, or computed.

        `loads`: the options of its load, `space` included.
        """
        began = time.perf_counter()
        chain = Document.of(document, self._seen.layout.chunk_tokens)
        whole = len(chain.tokens)
        hit = self._load(chain, start, planes, loads)
        load_seconds = time.perf_counter() - began
        began = time.perf_counter()
        missing = len(document) - hit.num_tokens
        if missing:
            part = [
                [plane[:, :, start : start + whole] for plane in layer]
                for layer in planes
            ]
            self._compute_alone(document, hit.num_tokens, part)
            if may_store():
                kv = kv_of_row(part, 0, 0, whole, self._seen)
                self.cache.store(chain.tokens, kv, items=chain.items, **space)
        for keys, _ in planes:
            self._rotary.move(keys[:, :, start : start + len(document)], start)
        return _Loaded(
            hit,
            missing,
            load_seconds,
            time.perf_counter() - began if missing else 0.0,
        )

    def _load(
        self, chain: Document, start: int, planes: Planes, options: dict[str, Any]
    ) -> Hit:
        """Load a document's own chain; for the first document, the prompts' chain if that has more
        of it.
        """
        length = chain.num_tokens
        items = chain.items
        if not start:
            prompt = chain.tokens[:length]
            exact = self._exact.lookup(
                prompt, counted=False, **options
            ).num_tokens
            own = 0
            if exact:
                own = self.cache.lookup(
                    chain.tokens, items=items, counted=False, **options
                ).num_tokens
            if exact > own:
                return self._exact.retrieve(
                    prompt,
                    kv_of_row(planes, 0, 0, length, self._plain),
                    **options,
                )
        kv = kv_of_row(planes, 0, start, start + len(chain.tokens), self._seen)
        return chain.without_padding(
            self.cache.retrieve(chain.tokens, kv, items=items, **options)
        )

    def _compute_alone(self, document: Int32s, known: int, part: Planes) -> None:
        """Compute the KV of the tokens from `known` on, as if the document began a prompt, into
        `part`.
        """
        cache = dynamic_cache(
            self._model, self._seen, part, [BatchRow(document, 0)], known
        )
        self._forward(document[known:], np.arange(known, len(document)), cache)
        for (keys, values), layer in zip(part, cache.layers, strict=True):
            keys[:, :, known : len(document)] = layer.keys[:, :, known:]
            values[:, :, known : len(document)] = layer.values[:, :, known:]
            keys[:, :, len(document) :] = 0
            values[:, :, len(document) :] = 0

    # ---- the prompt

    def _deviation(
        self, tokens: Int32s, planes: Planes, layer: int, candidates: range
    ) -> npt.NDArray[np.float32]:
        """Compute the candidates up to K and V of `layer`, which replace the reused; return how far
        K moved.
        """
        cache: Any = DynamicCache(config=self._model.config)
        where = np.array(candidates)
        for index in range(layer + 1):
            kind = _LastLayer if index == layer else _FilledLayer
            cache.layers[index] = kind(planes[index], where, candidates.start)
        try:
            self._forward(tokens[where], where, cache)
        except _Reached as reached:
            return reached.deviation
        raise ValueError(
            f"{type(self._model).__name__} did not use layer {layer} of its cache: use "
            "policy='first_k'"
        )

    def _recompute(
        self, tokens: Int32s, chosen: Positions, planes: Planes
    ) -> None:
        """Compute the chosen tokens, each over everything before it; their K and V replace the
        reused ones.
        """
        if not len(chosen):
            return
        end = int(chosen[-1]) + 1
        first = int(chosen[0])
        gaps = len(chosen) < end - first
        cache: Any = DynamicCache(config=self._model.config)
        for index, layer in enumerate(planes):
            cache.layers[index] = _FilledLayer(
                layer, chosen, 0 if gaps else first
            )
        mask = None
        # otherwise the tokens are the end of a filled cache, as in every prefill
        if gaps:
            device = self._model.device
            allowed = (
                torch.arange(end, device=device)
                <= torch.from_numpy(chosen).to(device)[:, None]
            )
            mask = torch.zeros(
                allowed.shape, dtype=self._model.dtype, device=device
            )
            mask = mask.masked_fill_(~allowed, -torch.inf)[None, None]
        self._forward(tokens[chosen], chosen, cache, mask)

    def _forward(
        self,
        tokens: Int32s,
        positions: Positions,
        cache: Any,
        mask: Any | None = None,
    ) -> None:
        """Run the model without its head."""
        device = self._model.device
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]
        places = torch.from_numpy(positions).to(device)[None]
        given = kv_argument(self._model.base_model, cache)
        self._model.base_model(
            input_ids=ids,
            position_ids=places,
            attention_mask=mask,
            use_cache=True,
            **given,
        )


class _Reached(Exception):
    """Ends a forward pass at the layer whose K was to be compared."""

    def __init__(self, deviation: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self.deviation = deviation


class _FilledLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of a cache that has all columns: new K and V replace those of their positions."""

    _layer_type = None  # transformers itself never makes this kind

    def __init__(
        self, planes: Sequence[Any], positions: Positions, filled: int
    ) -> None:
        """`filled`: how many columns count as past, for the masks that the model makes itself."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = planes
        self.dtype = self.keys.dtype
        self.device = self.keys.device
        self.is_initialized = True
        self._positions = torch.from_numpy(positions).to(self.device)
        self._filled = filled
        self._columns = int(positions[-1]) + 1

    def get_seq_length(self) -> int:
        """Return the number of columns before the new ones."""
        return self._filled

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace K and V of the positions; return all up to the last position."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self._positions, key_states)
        self.values.index_copy_(2, self._positions, value_states)
        return self.keys[:, :, : self._columns], self.values[
            :, :, : self._columns
        ]


class _LastLayer(_FilledLayer):  # type: ignore[no-untyped-call]
    """The layer at which a forward pass ends: it compares K before it replaces it."""

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Raise _Reached with the squared distance of K of each position."""
        assert self.keys is not None
        before = self.keys.index_select(2, self._positions)
        deviation = (
            (key_states.float() - before.float()).square().sum(dim=(0, 1, 3))
        )
        super().update(key_states, value_states)
        raise _Reached(deviation.cpu().numpy())


def _too_short(document: Int32s, least: int) -> _Loaded:
    """Return the outcome of a document that is computed in the prompt, because it has fewer than
    `least` tokens.
    """
    why = f"its {len(document)} tokens are fewer than min_tokens = {least}: they are computed"
    return _Loaded(
        Hit(0, {}, np.zeros(len(document), np.bool_), Reason.BELOW_MINIMUM, why),
        0,
        0.0,
        0.0,
    )
