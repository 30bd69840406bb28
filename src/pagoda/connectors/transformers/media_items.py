"""Images, videos and sounds of a prompt, as items of its keys.

A model that sees images is given their pixels apart from the prompt, in which a placeholder token
stands for each of their features. The KV from the first placeholder of an item on depends on what
the item shows: the item, with a digest of its content, is part of those keys.

KV that was found may end within an item. It is used up to the item's first token then, because
the encoder computes whole items; the pixels of items before that are not passed on, so that the
encoder does not see them.

Where the mapping of pixels to placeholders is not certain, all that a prompt shows is one item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from pagoda.keys import Item

# what encoders take, apart from the tokens: content, and its shape
CONTENT = frozenset(
    {
        "feature_attention_mask",
        "image_grid_thw",
        "image_sizes",
        "input_features",
        "input_features_mask",
        "pixel_attention_mask",
        "pixel_values",
        "pixel_values_videos",
        "second_per_grid_ts",
        "video_grid_thw",
    }
)
# which tokens are placeholders, as numbers other than 0
TYPES = frozenset({"mm_token_type_ids", "token_type_ids"})
# in a model's config: the placeholder tokens
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
_GRID = ("image_grid_thw", "pixel_values")


class Media(NamedTuple):
    """What a prompt shows, in the order of its tokens."""

    items: tuple[Item, ...]
    # by argument: the first of its rows for each item, and their number; empty: all or nothing
    rows: dict[str, list[int]]
    # what decides whether the model can continue after such items: it is tried once for each
    form: tuple[Any, ...]

    def whole(self, tokens: int, one_by_one: bool) -> int:
        """Return how many of so many leading tokens can be used: up to an item that they do not
        cover whole.

        Args:
            tokens: how many have KV.
            one_by_one: whether the prompt may go on with some of the items; else with all or none.
        """
        for item in self.items:
            if item.start < tokens < item.stop:
                tokens = item.start
        covered = sum(item.stop <= tokens for item in self.items)
        partly = 0 < covered < len(self.items)
        if partly and not (one_by_one and self.rows):
            return self.items[0].start
        return tokens

    def after(self, tokens: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call without the content of items that so many tokens cover.
        Pure.
        """
        covered = sum(item.stop <= tokens for item in self.items)
        if not covered:
            return kwargs
        if covered == len(self.items):
            return {
                name: value
                for name, value in kwargs.items()
                if name not in CONTENT
            }
        rest = {
            name: kwargs[name][first[covered] :]
            for name, first in self.rows.items()
        }
        return {**kwargs, **rest}

    def of_row(self, pad: int) -> tuple[Item, ...]:
        """Return the items at their tokens, in a row that begins after so much padding. Pure."""
        return tuple(
            item._replace(start=item.start - pad, stop=item.stop - pad)
            for item in self.items
        )


NOTHING = Media((), {}, ())


def media_of(
    model: Any, input_ids: Any, kwargs: Mapping[str, Any]
) -> tuple[Media, str]:
    """Return what the arguments of a call show, and why that cannot be named in keys; "" if it can.
    Pure.

    Args:
        model: its config names the placeholder tokens.
        input_ids: the prompts, [batch, tokens].
        kwargs: the arguments of `generate`.
    """
    import torch

    content = {
        name: kwargs[name]
        for name in sorted(CONTENT)
        if kwargs.get(name) is not None
    }
    types = {
        name: kwargs[name]
        for name in sorted(TYPES)
        if kwargs.get(name) is not None
    }
    if not content and not types:
        return NOTHING, ""
    form = (*content, *types)
    if input_ids is None or input_ids.ndim != 2 or len(input_ids) != 1:
        return (
            NOTHING,
            f"{form[0]}: items of several prompts at once have no keys yet",
        )
    tokens = input_ids[0].cpu()
    shown = _placeholders(model, tokens)
    if shown is None:
        return (
            NOTHING,
            f"{form[0]}: the model's config names no placeholder token",
        )
    for name, value in types.items():
        fits = isinstance(value, torch.Tensor) and value.shape == input_ids.shape
        if not fits or ((value[0].cpu() != 0) != shown).any():
            return NOTHING, f"{name}: it does not mark the placeholder tokens"
    if not content:
        if shown.any():
            return NOTHING, f"{form[0]}: it marks items that are not given"
        return Media((), {}, form), ""
    if not shown.any():
        return NOTHING, f"{form[0]}: the prompt has no placeholder token for it"
    places = shown.nonzero().flatten().tolist()
    try:
        items, rows = _one_by_one(content, types, places)
        if not items:
            whole = _digest(content, types)
            items = (Item(places[0], places[-1] + 1, whole),)
    except ValueError as trouble:
        return NOTHING, str(trouble)
    return Media(items, rows, (*form, len(items) > 1)), ""


def why_not_with(media: Media, kinds: set[str], assisted: bool) -> str:
    """Return why a call that shows something cannot use the cache; "" if it can. Pure.

    Args:
        media: what it shows.
        kinds: the names of the kinds of layers that the model's cache has.
        assisted: whether candidates are checked.
    """
    if not media.form:
        return ""
    if assisted:
        return f"{media.form[0]}: not together with an assistant"
    if media.items and kinds != {"DynamicLayer"}:
        return f"{media.form[0]}: not yet over windows or states"
    return ""


def placeholder_tokens(config: Any) -> list[int]:
    """Return the tokens that stand for items, as a model's config names them. Pure."""
    named = [getattr(config, name, None) for name in _PLACEHOLDERS]
    return sorted({one for one in named if isinstance(one, int) and one >= 0})


def _placeholders(model: Any, tokens: Any) -> Any:
    """Return which tokens of a prompt are placeholders; None if the config names none."""
    import torch

    known = placeholder_tokens(model.config)
    if not known:
        return None
    return torch.isin(tokens, torch.tensor(known))


def _one_by_one(
    content: Mapping[str, Any], types: Mapping[str, Any], places: Sequence[int]
) -> tuple[tuple[Item, ...], dict[str, list[int]]]:
    """Return each item apart, and the rows of the arguments that it begins at; nothing if that is
    not certain.
    """
    names = tuple(content)
    pixels: Any = content.get("pixel_values")
    if not hasattr(pixels, "ndim"):
        return (), {}
    if names == ("pixel_values",) and pixels.ndim == 4:
        # one image a row, all of one size, so all of as many features
        counts = [1] * len(pixels)
        starts = {"pixel_values": _sums(counts)}
    elif names == _GRID and pixels.ndim == 2:
        # the patches of all images in one list
        counts = content["image_grid_thw"].prod(-1).tolist()
        starts = {
            "image_grid_thw": list(range(len(counts) + 1)),
            "pixel_values": _sums(counts),
        }
    else:
        return (), {}
    if sum(counts) != len(pixels) or len(counts) < 2:
        return (), {}
    spans = _spans(counts, places)
    items = []
    for number, (start, stop) in enumerate(spans):
        mine = {
            name: content[name][first[number] : first[number + 1]]
            for name, first in starts.items()
        }
        items.append(Item(start, stop, _digest(mine, types)))
    return tuple(items), starts if items else {}


def _sums(counts: Sequence[int]) -> list[int]:
    found = [0]
    for count in counts:
        found.append(found[-1] + count)
    return found


def _spans(counts: Sequence[int], places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the tokens of each item, if placeholders are in proportion to `counts` and those of
    each item are in one run; else nothing.
    """
    total = sum(counts)
    spans = []
    done = 0
    for count in counts:
        if count * len(places) % total:
            return []
        tokens = count * len(places) // total
        if not tokens:
            return []
        start = places[done]
        stop = places[done + tokens - 1] + 1
        if stop - start != tokens:
            return []
        spans.append((start, stop))
        done += tokens
    return spans


def _digest(content: Mapping[str, Any], types: Mapping[str, Any]) -> bytes:
    """Return a digest of what is shown, and of how it is handed over. ValueError for content that
    has no bytes.

    The version of Transformers is part of it: whether a model can continue after an item was tried
    with that version.
    """
    import transformers

    hasher = blake3(f"{transformers.__version__} {sorted(types)}".encode())
    for name, value in content.items():
        hasher.update(name.encode() + b"\0")
        _add(hasher, name, value)
    return hasher.digest()


def _add(hasher: Any, name: str, value: Any) -> None:
    import numpy as np
    import torch

    if isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for one in value:
            _add(hasher, name, one)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        hasher.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
        hasher.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | int | float):
        _add(hasher, name, torch.as_tensor(value))
    else:
        raise ValueError(
            f"{name}: a {type(value).__name__} has no digest: give tensors"
        )
