"""Probes, with the model's own weights, whether a model can go on behind a saved ending.

Some models compute other text, without an error, if several tokens follow a state that was given
to them. So the same tokens are computed behind a restored ending in one pass, one by one, and in a
pass without it: all must be equal, up to rounding. How much is rounding is seen from what each kind
of value in the ending changes when it is zeroed.

    tokens    0 ............ 27 ................ 67
    whole     |------------------------------->|
    ending    |------------->|
    behind                   |-->|                  3 tokens in one pass
                             |---------------->|    40 tokens in one pass, and one by one

Recurrent layers compute long prompts in blocks, so behind those there is a pass over 300 tokens as
well. A window that these tokens do not fill is probed a second time, behind rows that were made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagoda.connectors.transformers.cache_shape import (
    CacheShape,
    UnknownLayer,
    fill_cache,
    is_at,
    kinds_of,
    read_ending,
    shape_of,
    unknown_kind,
)
from pagoda.connectors.transformers.model_checks import (
    GrownCache,
    ProbedModel,
    check_grown,
    check_whole,
)
from pagoda.connectors.transformers.prefill_cuts import pass_over, why_no_passes
from pagoda.transfer.base import Bytes

_HELD = 27
_FEW = 3
_MANY = 40
# recurrent layers compute a prompt in blocks: more than one of them behind a state
_BLOCKS = 300
_BEHIND_WINDOW = 8
# more than any prompt has: then all rows of full layers are in the ending
_NO_CHUNKS = 1 << 40
_KINDS = ("full", "window", "conv_states", "recurrent_states")
# of the largest logit: more is never rounding
_MOST_ROUNDING = {"fine": 1e-3, "coarse": 0.05}
# a kind of value must change the logits by so many times the difference
_SIGNAL_TIMES = {"fine": 20, "coarse": 2}
_FINE_EPSILON = 1e-5


def empty_cache(model: Any, shape: CacheShape | None = None) -> Any:
    """Return an empty cache for a model; `shape`: None: not known yet."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    is_linear = (
        set(kinds_of(cache)) <= {"LinearAttentionLayer", "DummyLayer"}
        if shape is None
        else shape.is_linear
    )
    if not is_linear:
        return cache
    from pagoda.connectors.transformers.linear_cache import LinearCache

    return LinearCache(model.config)


def probe_stateful(model: Any, chunk_tokens: int) -> ProbedModel:
    """Return the layout and the shape of a model with windows or states, by running it on a few
    tokens; changes nothing.

    Raises ValueError if it cannot go on behind an ending, or if its cache has more than is known
    here.
    """
    check_stateful(model)
    shape = _shape_of(model)
    devices = [form.device for form in shape.layers if form.device is not None]
    return ProbedModel(shape.layout(chunk_tokens), devices, shape=shape)


def check_stateful(model: Any) -> None:
    """Raise ValueError for a model with windows or states that is known not to be served, before
    its weights are asked. Pure.
    """
    name = type(model).__name__
    check_whole(model)
    if unknown := unknown_kind(empty_cache(model)):
        raise ValueError(f"{name} has a layer of kind {unknown}")
    if why_not := why_no_passes(model):
        raise ValueError(f"{name}: {why_not}")
    if not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{name} has a cache of its own, which is not known here"
        )


def _shape_of(model: Any) -> CacheShape:
    name = type(model).__name__
    try:
        return _probed(model)
    except GrownCache:
        raise
    except UnknownLayer as unknown_layer:
        raise ValueError(f"{name}: {unknown_layer}") from None
    except OtherText as refused:
        raise ValueError(f"{name} {refused}") from None
    except Exception as trouble:  # whatever a model's code raises
        raise ValueError(
            f"{name} cannot compute several tokens behind a state that it is given: "
            f"{type(trouble).__name__}: {trouble}"
        ) from trouble


class OtherText(Exception):
    """The model computes something else."""


class _Behind(NamedTuple):
    """An ending, and how the tokens behind it are computed."""

    model: Any
    shape: CacheShape
    ending: Bytes
    ids: Any
    mask: Any
    held: int

    def restored(self, zeroed: str = "") -> Any:
        """Return a cache that holds the ending; one kind of its values can be zeroed."""
        import torch

        planes = [
            [
                torch.zeros(
                    1,
                    heads,
                    self.held,
                    dim,
                    dtype=getattr(torch, dtype),
                    device=self.shape.layers[number].device,
                )
                for heads, dim, dtype in self.shape.layers[number].planes
            ]
            for number in self.shape.full
        ]
        cache = empty_cache(self.model, self.shape)
        fill_cache(
            self.shape, cache, [self.ending], self.held, _NO_CHUNKS, planes
        )
        if hasattr(cache, "held_tokens"):
            cache.held_tokens = self.held
        if zeroed:
            for value in _values(self.shape, cache, zeroed):
                value.zero_()
        return cache

    def in_one_pass(self, tokens: int, zeroed: str = "") -> Any:
        """Return the logits of so many tokens behind the ending."""
        return self._pass(self.held, self.held + tokens, self.restored(zeroed))

    def one_by_one(self, tokens: int) -> Any:
        """Return the same logits, of passes over one token each."""
        import torch

        cache = self.restored()
        steps = range(self.held, self.held + tokens)
        return torch.cat([self._pass(at, at + 1, cache) for at in steps], dim=1)

    def effects(self, right: Any) -> dict[str, float]:
        """Return how much each kind of value in the ending changes the first logits behind it."""
        present = [
            kind for kind in _KINDS if _values(self.shape, self.restored(), kind)
        ]
        return {
            kind: _difference(self.in_one_pass(_FEW, kind), right)
            for kind in present
        }

    def _pass(self, begin: int, end: int, cache: Any) -> Any:
        logits = pass_over(
            self.model, self.ids, self.mask, begin, end, cache, all_logits=True
        )
        return logits[:, begin - end :].float()


def _values(shape: CacheShape, cache: Any, kind: str) -> list[Any]:
    values = []
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        if form.rows == kind:
            values += [layer.keys, layer.values]
        values += [
            getattr(layer, state.kind)[state.number]
            for state in form.states
            if state.kind == kind
        ]
    return values


def _probed(model: Any) -> CacheShape:
    import torch

    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = _small_ids(model, _HELD + _BLOCKS) % vocabulary
    mask = torch.ones_like(ids)

    cache = empty_cache(model)
    layers = len(cache.layers)
    pass_over(model, ids, mask, 0, _HELD, cache)
    check_grown(model, layers, cache)
    shape = shape_of(model, cache)
    if not is_at(shape, cache, _HELD):
        raise UnknownLayer(
            f"its cache does not hold {_HELD} tokens after {_HELD}"
        )
    ending = read_ending(shape, cache, 0, _HELD, _NO_CHUNKS)
    behind = _Behind(model, shape, ending, ids, mask, _HELD)
    has_blocks = any(
        state.kind == "recurrent_states"
        for form in shape.layers
        for state in form.states
    )
    length = _BLOCKS if has_blocks else _MANY

    everything = empty_cache(model, shape)
    whole = pass_over(
        model, ids, mask, 0, _HELD + length, everything, all_logits=True
    )
    whole = whole[:, -length:].float()
    # shows a model that keeps something outside of its cache
    other = (ids + 7) % vocabulary
    pass_over(model, other, mask, 0, _HELD, empty_cache(model, shape))

    few = behind.in_one_pass(_FEW)
    many = behind.in_one_pass(_MANY)
    differences = [
        _difference(few, whole[:, :_FEW]),
        _difference(many, whole[:, :_MANY]),
        _difference(many, behind.one_by_one(_MANY)),
    ]
    if has_blocks:
        differences.append(_difference(behind.in_one_pass(length), whole))
    effects = behind.effects(few)
    _require_rounding(shape, model, whole, max(differences), effects)
    _probe_full_window(model, shape, cache)
    return shape


def _small_ids(model: Any, number: int) -> Any:
    """Return a prompt, [1, number], of small ids: the special tokens of most models are the last
    ones.
    """
    import torch

    return (torch.arange(number, device=model.device) * 13 % 61 + 1)[None]


def _probe_full_window(model: Any, shape: CacheShape, cache: Any) -> None:
    """Compare the same behind a full window, whose rows are those of `cache` again and again."""
    import torch

    windows = [form.window for form in shape.layers if form.rows == "window"]
    if not windows or max(windows) - 1 <= _HELD:
        return
    held = max(windows) + 4
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and held + _BEHIND_WINDOW > longest:
        # no prompt fills it
        return
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        if not form.rows:
            continue
        rows = held if form.rows == "full" else min(held, form.window - 1)
        times = -(-rows // layer.keys.shape[2])
        layer.keys = layer.keys.repeat(1, 1, times, 1)[:, :, :rows]
        layer.values = layer.values.repeat(1, 1, times, 1)[:, :, :rows]
        if form.rows == "window":
            layer.cumulative_length = held
    ending = read_ending(shape, cache, 0, held, _NO_CHUNKS)
    ids = _small_ids(model, held + _BEHIND_WINDOW) % config.vocab_size
    behind = _Behind(model, shape, ending, ids, torch.ones_like(ids), held)
    many = behind.in_one_pass(_BEHIND_WINDOW)
    difference = _difference(many, behind.one_by_one(_BEHIND_WINDOW))
    effects = behind.effects(behind.in_one_pass(_FEW))
    _require_rounding(shape, model, many, difference, effects)


def _difference(ours: Any, theirs: Any) -> float:
    largest = float((ours - theirs).abs().max())
    return largest if math.isfinite(largest) else math.inf


def _require_rounding(
    shape: CacheShape,
    model: Any,
    logits: Any,
    difference: float,
    effects: dict[str, float],
) -> None:
    """Raise OtherText unless a difference between logits is rounding."""
    epsilon = _epsilon(shape, model)
    grain = _grain(epsilon)
    peak = float(logits.abs().max()) or 1.0
    rounding = min(64 * epsilon, _MOST_ROUNDING["coarse"]) * peak
    is_seen = all(
        _SIGNAL_TIMES[grain] * difference <= effect
        or max(effect, difference) <= rounding
        for effect in effects.values()
    )
    if not difference <= _MOST_ROUNDING[grain] * peak or not is_seen:
        changed = ", ".join(
            f"{kind} {effect / peak:.1e}" for kind, effect in effects.items()
        )
        raise OtherText(
            "computes something else if several tokens follow a state that it is given: the "
            f"logits differ by {difference / peak:.1e} of the largest (zeroing changes: {changed})"
        )


def _epsilon(shape: CacheShape, model: Any) -> float:
    """Return the rounding of the coarsest numbers that the model computes with."""
    import torch

    dtypes = {
        weight.dtype
        for weight in model.parameters()
        if weight.is_floating_point()
    }
    for form in shape.layers:
        named = [plane.dtype for plane in form.planes]
        named += [state.dtype for state in form.states]
        dtypes |= {getattr(torch, dtype) for dtype in named}
    return max(
        torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point
    )


def _grain(epsilon: float) -> str:
    return "fine" if epsilon < _FINE_EPSILON else "coarse"


def counts_marks(
    model: Any, shape: CacheShape, input_ids: Any, marks: Mapping[str, Any]
) -> bool:
    """Return whether marks that are 0 for every token change what the model computes; changes
    nothing. Raises what the model raises.

    Of most models they say that nothing is shown. PaliGemma lets all tokens so marked see each
    other, also those that follow.

    Args:
        model: that computes.
        shape: of its cache.
        input_ids: a prompt that shows nothing, [1, tokens], which is repeated or cut until it is
            a little longer than the windows.
        marks: by argument, zeros of the same shape.
    """
    import torch

    length = max([_MANY, *(form.window + 4 for form in shape.layers)])
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or length
    length = min(length, longest)
    times = -(-length // input_ids.shape[1])
    ids = input_ids.repeat(1, times)[:, :length].to(model.device)
    mask = torch.ones_like(ids)
    zeros = {
        name: mark.new_zeros(1, length).to(model.device)
        for name, mark in marks.items()
    }
    found = []
    for given in (zeros, None):
        cache = empty_cache(model, shape)
        logits = pass_over(model, ids, mask, 0, length, cache, marks=given)
        if not is_at(shape, cache, length):
            return True
        values = [logits[:, -1:]]
        for kind in _KINDS:
            values += _values(shape, cache, kind)
        found.append([value.float() for value in values])
    most = _MOST_ROUNDING[_grain(_epsilon(shape, model))]
    return any(
        _difference(ours, theirs) > most * float(theirs.abs().max())
        for ours, theirs in zip(*found, strict=True)
    )
