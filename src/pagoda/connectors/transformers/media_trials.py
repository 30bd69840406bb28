"""Tries whether a model can continue after items whose KV it is given, before that is relied on.

After the first text of a form (which arguments show something, one item or several), the prompt is
computed again in parts: the text before the items alone, and the rest over the KV up to an item's
begin and end. All must have the KV of the whole prompt. A model that looks at a whole prompt at
once, counts other positions, or sees items otherwise than in their tokens, does not; then calls
of that form go on without the cache, and say so.

Of a model with windows or states, texts alone are served. Their processors pass marks of items, all
0: these are left out, if the model computes the same without them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pagoda.base.oldest import drop_oldest
from pagoda.connectors.transformers.cache_shape import CacheShape
from pagoda.connectors.transformers.dynamic_cache import Planes, dynamic_cache
from pagoda.connectors.transformers.media_items import CONTENT, TYPES, Media
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.connectors.transformers.stateful_probe import counts_marks

_LIKE = 0.05  # of the largest value; another position or mask differs by far more
_MOST_FORMS = 64

# (KV, ids, mask, arguments of the whole call, media, columns of KV): fills the KV
Generate = Callable[[Any, Any, Any, dict[str, Any], Media, int], Any]


class MediaTrials:
    """The forms of calls that were tried with one model, each with the weights, adapters and
    settings of its trial: `under` is what names the KV of that moment. With others it is untried.
    As thread-safe as the model.
    """

    def __init__(self) -> None:
        self._troubles: dict[tuple[Hashable, ...], str] = {}

    def trouble(self, media: Media, under: Hashable) -> str | None:
        """Return why calls of this form cannot use the cache; "" if they can, None if it was not
        tried yet.
        """
        if not media.form:
            return ""
        return self._troubles.get((under, media.form))

    def trust(self, media: Media, under: Hashable) -> None:
        """Take the form of a call as tried, by another process."""
        self._set(media, under, "")

    def _set(self, media: Media, under: Hashable, trouble: str) -> None:
        self._troubles[under, media.form] = trouble
        drop_oldest(self._troubles, _MOST_FORMS)

    def try_out(
        self,
        model: Any,
        seen: ProbedModel,
        kv: Any,
        media: Media,
        under: Hashable,
        prompt: tuple[Any, Any, int],
        kwargs: dict[str, Any],
        generate: Generate,
    ) -> str:
        """Compute a prompt in parts, compare, and return `trouble` from then on.

        A prompt that ends with its first item shows nothing: the form stays untried, and the answer
        says so.

        Args:
            model: the model.
            seen: its layout and devices.
            kv: the KV of the whole prompt, which stays as it is.
            media: what the prompt shows.
            under: what names the KV.
            prompt: its ids and mask, [1, tokens], and how many columns are padding.
            kwargs: the arguments of its call.
            generate: generates a token from KV, which it fills.
        """
        ids, mask, pad = prompt
        width = ids.shape[1]
        whole: Planes = [[each.keys[:1], each.values[:1]] for each in kv.layers]
        shown = {
            name: value
            for name, value in kwargs.items()
            if name in CONTENT or name in TYPES
        }
        first = width // 2
        stop = first
        if media.items:
            first = media.items[0].start
            stop = media.items[0].stop
            if stop >= width:
                # taken as tried, it would be relied on where text follows
                return (
                    f"{media.form[0]}: nothing follows the first item, so it cannot be tried here "
                    "whether the model can continue after such items"
                )
        trouble = ""
        try:
            if first > pad:
                alone = dynamic_cache(model, seen, [], [], 0)
                generate(alone, ids[:, :first], mask[:, :first], {}, media, 0)
                if not _alike(alone, whole, pad, first):
                    trouble = "the KV of a text depends on what is shown after it"
            for columns in sorted({first, stop}):
                if trouble or not pad < columns < width:
                    continue
                rest = dynamic_cache(model, seen, whole, [], columns)
                generate(rest, ids, mask, shown, media, columns)
                if not _alike(rest, whole, columns, width):
                    trouble = "what follows has other KV if that of the tokens before is given"
        except Exception as error:  # noqa: BLE001
            # whatever a model's code raises
            trouble = f"it cannot compute a part of the prompt: {error}"
        if trouble:
            trouble = f"{media.form[0]}: {type(model).__name__}: {trouble}"
        self._set(media, under, trouble)
        return trouble

    def try_marks(
        self,
        model: Any,
        shape: CacheShape,
        media: Media,
        under: Hashable,
        input_ids: Any,
        kwargs: dict[str, Any],
    ) -> str:
        """Return why the marks of a text cannot be left out; "" if they can. Computes a text with
        them and without, once for each form.

        Args:
            model: one with windows or states.
            shape: of its cache.
            media: of a prompt that shows nothing, whose marks are all 0.
            under: what names the KV.
            input_ids: the prompt, [1, tokens].
            kwargs: the arguments of its call.
        """
        known = self.trouble(media, under)
        if known is not None:
            return known
        marks = {name: kwargs[name] for name in media.form}
        name = f"{media.form[0]}: {type(model).__name__}"
        trouble = ""
        try:
            if counts_marks(model, shape, input_ids, marks):
                trouble = (
                    f"{name}: the KV depends on it, although it marks no item"
                )
        except Exception as error:  # noqa: BLE001
            # whatever a model's code raises
            trouble = f"{name}: it cannot be tried whether marks of 0 change the KV: {error}"
        self._set(media, under, trouble)
        return trouble


def _alike(kv: Any, whole: Planes, begin: int, end: int) -> bool:
    for layer, theirs in zip(kv.layers, whole, strict=True):
        for ours, plane in zip((layer.keys, layer.values), theirs, strict=True):
            wanted = plane[:, :, begin:end].float()
            difference = ours[:, :, begin:end].float() - wanted
            if difference.abs().max() > _LIKE * wanted.abs().max():
                return False
    return True
