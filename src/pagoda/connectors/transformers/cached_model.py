"""Hugging Face Transformers: a model with a cache of its prompts' KV.

cached = CachedModel(model)
out = cached.generate(input_ids, max_new_tokens=48)             # one call

with cached.prefix(input_ids) as prefix:                        # the two halves
    out = model.generate(input_ids, past_key_values=prefix.past_key_values, max_new_tokens=48)
    cached.store(input_ids, prefix.past_key_values)

out = cached.generate(documents=[a, b, c], question=q, recompute=0.15)  # approximate: `blending`
                                                                        says how
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.base.oldest import drop_oldest
from pagoda.blend import (
    SelectionPolicy,
    as_documents,
    blend_setting,
    policy_named,
)
from pagoda.cache import Cache, Cleared, Hit, RequestHints, Stored
from pagoda.config import Config, ConfigOptions
from pagoda.connectors.endings import KeySpace
from pagoda.connectors.prefill_stopwatch import PrefillTimes, watch_for
from pagoda.connectors.transformers import model_checks
from pagoda.connectors.transformers.answer_endings import AnswerEndings
from pagoda.connectors.transformers.assisted import (
    first_pass_cut,
    layer_kinds,
)
from pagoda.connectors.transformers.batch_rows import (
    BatchRow,
    check_input_ids,
    grown_mask,
    mask_of,
    rows_of,
)
from pagoda.connectors.transformers.cache_shape import repeat
from pagoda.connectors.transformers.call_arguments import (
    as_keywords,
    over_given_kv,
    read_arguments,
    takes_prompt_first,
)
from pagoda.connectors.transformers.dynamic_cache import (
    Planes,
    copy_engine_for,
    dynamic_cache,
    kv_of_row,
    room_for,
)
from pagoda.connectors.transformers.holes import (
    fill_behind,
    least_piece,
)
from pagoda.connectors.transformers.hook_watch import (
    ForeignHook,
    HookChanges,
    HookWatch,
)
from pagoda.connectors.transformers.media_items import (
    CONTENT,
    NOTHING,
    TYPES,
    Media,
    media_of,
    why_not_with,
)
from pagoda.connectors.transformers.media_trials import MediaTrials
from pagoda.connectors.transformers.model_edits import (
    ModelEdits,
    code_between,
    foreign_hooks,
)
from pagoda.connectors.transformers.model_facade import ModelFacade
from pagoda.connectors.transformers.model_identity import (
    Stamp,
    adapters_digest,
    namespace_of,
    stamp_of,
)
from pagoda.connectors.transformers.model_walk import ModelWalk, walk_over
from pagoda.connectors.transformers.numerics import numerics_of
from pagoda.connectors.transformers.positions import (
    forget_positions,
    positions_of,
    why_no_positions,
)
from pagoda.connectors.transformers.stateful_probe import (
    empty_cache,
    probe_stateful,
)
from pagoda.connectors.transformers.stateful_prompts import (
    ComputedPrompts,
    StatefulPrompts,
)
from pagoda.connectors.transformers.unwritten_size import (
    tell,
    tell_room_for_endings,
    with_unwritten_size,
)
from pagoda.keys import Int32s, Item, Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import DenseKV

if TYPE_CHECKING:
    from pagoda.connectors.transformers.blending import Blended, Blender
    from pagoda.connectors.transformers.layerwise import LayerLoad, LayerLoads

_log = guarded_logger("pagoda.connectors")

_MOST_HOOKS = 64  # that change KV, to remember
_MOST_LAYOUTS = 64  # of KV under other settings, to remember
_NO_KV_BYTES = 4096  # the host tier of a model that is not cached
_LONG_PROBE_SECONDS = 1.0  # more than a start should wait for without a word


@dataclass(frozen=True)
class _Ready:
    """What a call may use at this moment. Two that are equal name the same KV."""

    cache: Cache  # of the present weights
    space: KeySpace  # the options of its calls: adapter, tenant, numerics
    namespace: Namespace  # of the weights and the adapters
    # why KV of this moment has no name: nothing is loaded or stored; "" if it has
    why_not: str
    # to be watched while the model computes
    hooks: Sequence[ForeignHook] = field(default=(), compare=False)
    # of a model that can go on only where an ending was kept
    stateful: StatefulPrompts | None = field(default=None, compare=False)

    @property
    def name(self) -> Hashable:
        """What names the KV of this moment, whoever asks for it."""
        return self.namespace, self.space["numerics"]

    @property
    def why_not_apart(self) -> str:
        """Why KV that is computed out of sight has no name: there, no hook is watched."""
        return self.why_not or (
            f"{self.hooks[0].text} may change the KV: remove it"
            if self.hooks
            else ""
        )


class _Prompts(NamedTuple):
    """The prompts of one call of `generate` that can use the cache."""

    input_ids: Any
    mask: Any  # [batch, tokens]
    rows: list[BatchRow]
    repeats: int  # rows that `generate` makes of each
    assisted: bool  # the first pass is to be cut to what has no KV
    media: Media


@dataclass
class Prefix:
    """The KV that was found for a batch, as a cache to pass to `generate`, and the hits.

    Greedy search, sampling and beam search can begin from it; assisted decoding can in
    `CachedModel.generate` alone: here it would write another text. As a context manager it releases
    the KV at the end. Not thread-safe.
    """

    # a transformers.DynamicCache of `columns` columns, empty if nothing was found
    past_key_values: Any
    # of input_ids that need not be computed, including padding; always less than all
    columns: int
    num_tokens: list[int]  # tokens of each row in those columns
    # one per row; a row's hit may be longer than the columns that all rows have
    hits: list[Hit]
    seconds: float
    # for a prompt of documents: which of its tokens are exact
    blend: Blended | None = None

    @property
    def hit(self) -> Hit:
        """The hit of the row with the fewest tokens."""
        return min(self.hits, key=lambda hit: hit.num_tokens)

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.past_key_values = None


class CachedModel(ModelFacade):
    """A Transformers model with a `Cache`: a prompt starts from the KV that any process has
    computed for it before.

    The bytes of the weights and of the active LoRA adapters are part of the namespace: two models
    share KV only if they are the same. So is how the model is computed, where that differs from the
    defaults: `torch.autocast`, the precision of float32 products, another implementation of
    attention. The last token of a prompt is always computed, because with a full hit `generate`
    would silently continue from another position. A call whose KV depends on more than its tokens
    goes on without the cache, with the reason `not_cacheable` in `last` and in the counters, and a
    line in the log; so do all calls of a model that cannot be cached, unless it is `strict`.

    If chunks are missing before stored ones, `generate` computes the missing ones only, of a single
    prompt of a model with full attention; `last.hit.loaded` and `last.hit.pieces` say what was
    loaded.

    A model with sliding windows or recurrent states goes on only where those were kept: at the last
    whole chunk of a prompt, at its end, where two prompts parted, and with `store_output` at the
    end of the text. For that, its prompts are computed in two or three passes.

    To its callers it is the model: attributes, methods and calls that are not the cache's go to
    `model`, so `transformers.pipeline(model=cached, ...)` generates with the cache. Only `generate`
    uses the cache.

    KV is loaded to the model's device. On a CUDA device it is copied directly between the device
    and the slots; for a single prompt in host memory, `generate` computes with the first layers
    while the others are still being copied.

    As thread-safe as the model. `last` is the Prefix of the latest `generate`, without its KV.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> small = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> cached = CachedModel(LlamaForCausalLM(small).eval(), host_size="16MiB", host_shared=False)
        >>> prompt = torch.arange(600)[None]
        >>> # computes, and stores 512 tokens
        >>> out = cached.generate(prompt, max_new_tokens=4, do_sample=False)
        >>> out = cached.generate(prompt, max_new_tokens=4, do_sample=False)
        >>> cached.last.hit.num_tokens
        512
        >>> cached.close()
    """  # noqa: E501, W505

    def __init__(
        self,
        model: Any,
        config: Config | None = None,
        *,
        cache: Cache | None = None,
        revision: str = "",
        weights: str | None = None,
        salt: str = "",
        strict: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> None:
        """Probe the model and open its cache. Raises ConfigError.

        Args:
            model: a causal model of Transformers, on the device on which it stays.
            config: the options of the cache; without it they come from the environment and the
                configuration file. If nobody wrote a `host_size` there either, the cache takes host
                memory as it fills, at most 1 GiB and an eighth of what is free, and says so in one
                line of the log.
            cache: a cache made with `layout_of` and `namespace_of`, instead of `config` and
                `options`.
            revision: the version of the model, if its name alone does not identify it.
            weights: a name for the weights, such as a checkpoint's hash, instead of a digest of
                their bytes. It must change whenever they do.
            salt: separates tenants, for all calls; `generate`, `prefix` and `store` accept one for
                one call.
            strict: raise ValueError for a model that cannot be cached. Otherwise its calls go on
                without the cache, with that reason, and a line in the log says so.
            options: options of `Config`; they take precedence over `config`, environment and file.
        """
        self.model = model
        self.last: Prefix | None = None
        self.last_stored: list[Stored] = []
        config = (
            cache.config if cache is not None else _configured(config, options)
        )
        # why nothing of this model is stored or loaded; "": it is
        self._refusal = ""
        try:
            self._seen = _looked_at(model, config.chunk_tokens)
        except ValueError as refusal:
            if strict:
                raise
            self._refuse(str(refusal))
            self._seen = _unseen(config.chunk_tokens)
        walk = walk_over(model)
        self._weights = walk.weights  # of the latest walk
        self._memory = walk.storages()
        self._stamp = stamp_of(model)
        self._forms = model_checks.forms_of(model)
        self._edits = ModelEdits(model, walk)
        self._probed_under = (numerics_of(model, walk).autocast, "")
        self._trials = MediaTrials()
        self._endings = AnswerEndings()
        self._changing: list[Any] = []  # hooks that were seen to change the KV
        self._layouts: dict[
            tuple[str, str], str
        ] = {}  # autocast and edits -> why their KV does not fit the layout
        self._prefills = PrefillTimes(self._observe)
        self._loads: LayerLoads | None = None  # made at the first use
        self._named: dict[str, Any] = {
            "revision": revision,
            "weights": weights,
            "salt": salt,
        }
        # for caches that are opened here
        self._config = config if cache is None else None
        # of the latest weights
        self._namespace: Namespace | None = None
        # that names belong to when the weights were last looked at
        self._epoch = b""
        self._stateful: StatefulPrompts | None = None
        self._least_piece = 0  # of those behind a missing chunk; 0: none are used
        if self._refusal:
            if cache is None:
                cache = _empty_cache_of(model, config, self._seen)
            self.cache = cache
        else:
            namespace = namespace_of(model, self._seen.layout, **self._named)
            if cache is None:
                tell(config, self._seen.layout)
                cache = self._new_cache(config, namespace)
            else:
                _check_made_for(cache, namespace)
            self._namespace = namespace
            self._use(cache)
            self._epoch = self._epoch_of_names()
        # the arguments of `publish_events`
        self._events: dict[str, Any] | None = None
        # made at the first use, for the present weights
        self._blender: Blender | None = None
        self._closed = False
        # settings of `blend` that had a verdict: if it is lost, they raise no error
        self._passed: set[str] = set()
        why = "" if self._refusal else read_arguments(model, {}).why_not
        if why:
            _log.warning(
                "calls go on without the cache unless their arguments change that: %s",
                why,
            )
        self._opened = True  # from now on, new attributes are the model's

    def _new_cache(self, config: Config, namespace: Namespace) -> Cache:
        """Return a new cache for the model as it was looked at."""
        if self._seen.shape is not None:
            # the minimum is that of a prompt, and an ending is one of several calls for it
            config = replace(config, min_hit_tokens=0)
            if config.lossy_codecs():
                _log.warning(
                    "tiers with a lossy codec are left out: states of a model are kept exactly"
                )
                config = config.without_lossy_tiers()
            tell_room_for_endings(
                config, self._seen.layout, self._seen.shape.most_ending_bytes
            )
        return Cache(config, namespace=namespace, layout=self._seen.layout)

    def _use(self, cache: Cache) -> None:
        """Change to a cache. ValueError if endings cannot be kept in it."""
        self._stateful = None
        self._least_piece = least_piece(self.model, self._seen.devices)
        if self._seen.shape is not None:
            config = self._config or cache.config
            if cache.config.lossy_codecs():
                raise ValueError(
                    "a cache with a lossy codec cannot keep the states of this model: give one "
                    "without"
                )
            self._stateful = StatefulPrompts(
                self.model, self._seen, cache, config.min_hit_tokens
            )
        self.cache = cache

    def _refuse(self, why: str) -> None:
        """Go on without the cache from now on."""
        self._refusal = why
        self._stateful = None
        _log.warning("%s is not cached: %s", type(self.model).__name__, why)

    @per_process
    def _lock(self) -> Any:  # threading.RLock, which is no type
        return threading.RLock()

    def __repr__(self) -> str:
        if not hasattr(self, "cache"):
            return "CachedModel(not opened)"
        return f"CachedModel({type(self.model).__name__}, {self.cache!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles open the cache again, with the same options; a shallow copy has the
        same model.

        A pickle contains the options, also secrets in them: the salt, passwords of stores.
        """
        config = self._config
        named = self._named
        if config is None:  # a cache that was passed in, which has one owner
            config = self.cache.config
            named = {**named, "salt": self.cache.namespace.salt}
        return _opened_again, (type(self), self.model, config, named)

    @property
    def layout(self) -> KVLayout:
        """The layout of the model's KV."""
        return self._seen.layout

    def generate(
        self,
        *given: Any,
        input_ids: Any | None = None,
        attention_mask: Any | None = None,
        documents: Sequence[Any] | None = None,
        question: Any | None = None,
        recompute: float | None = None,
        policy: str | SelectionPolicy = "deviation",
        min_tokens: int | None = None,
        unchecked: bool = False,
        store: bool = True,
        store_output: bool = False,
        salt: str | None = None,
        hints: RequestHints | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the result of `model.generate` for these arguments, sooner; store the KV of the
        prompt.

        Arguments on which the KV may depend, and those that are not known, are passed on, but the
        call goes on without the cache: `last.hit` says why. Nothing that happens after the text is
        complete raises.

        With `documents` the answer is approximate: it starts from the KV of each document alone,
        see `blend`. Then the result begins with the tokens of all documents and of the question.

        Args:
            given: by position, what `model.generate` takes first: the prompts, as `input_ids`, and
                after them the attention mask or what `model.generate` takes there.
            input_ids: the prompts, [batch, tokens]; not with `documents`. None: the call goes on
                without the cache, unless there are `inputs`.
            attention_mask: as for `model.generate`; not with `documents`.
            documents, question, recompute, policy, min_tokens, unchecked: as for `blend`; text
                needs `tokenizer`.
            store: False: only read.
            store_output: also store the KV of the generated tokens; not with `documents`.
            salt: the tenant of this call, instead of the model's.
            hints: what is known of this request, such as its session (`pagoda.RequestHints`), for
                each of its prompts; without effect on a call that goes on without the cache, and on
                models whose cache has a state.
            kwargs: arguments of `model.generate`. A `tokenizer` also shows whether an answer ends
                in a tool call, a hint like `hints.ending`.

        Raises ValueError for wrong arguments, ConfigError (a ValueError) if `blend` has no verdict.
        """
        input_ids, attention_mask, kwargs = as_keywords(
            self.model, given, input_ids, attention_mask, kwargs
        )
        if hints is not None and not isinstance(hints, RequestHints):
            raise ValueError(
                f"hints is of type {type(hints).__name__}: pass a pagoda.RequestHints"
            )
        with_documents = documents is not None or question is not None
        if with_documents and (
            input_ids is not None or attention_mask is not None or store_output
        ):
            raise ValueError(
                "documents: give the whole prompt as documents and question, without "
                "input_ids, attention_mask "
                "and store_output"
            )
        if self._refusal and with_documents:
            return self._generated_whole(
                self._refusal, documents, question, kwargs
            )
        if self._refusal:
            # the arguments are the model's alone: nobody here knows what they mean to it
            return self._generated_without(
                self._refusal, input_ids, attention_mask, kwargs
            )
        if input_ids is None and self.model.main_input_name == "input_ids":
            input_ids = kwargs.pop("inputs", None)
        media, not_shown = media_of(self.model, input_ids, kwargs)
        decoding, why_not, assisted = read_arguments(
            self.model, _without_media(kwargs)
        )
        why_not = why_not or not_shown
        self._prefills.read()
        before = self._ready(salt)
        if media.form:
            kinds = layer_kinds(self.model.config)
            why_not = why_not or why_not_with(media, kinds, assisted)
            why_not = why_not or self._trials.trouble(media, before.name) or ""
            shape = self._seen.shape
            if shape is not None and not why_not:
                why_not = self._trials.try_marks(
                    self.model, shape, media, before.name, input_ids, kwargs
                )
                media = NOTHING
        beams = decoding.num_beams or 1
        repeats = max(beams, decoding.num_return_sequences or 1)
        if with_documents:
            if assisted:
                why_not = why_not or "documents are not decoded with an assistant"
            why_not = why_not or before.why_not
            if why_not:
                return self._generated_whole(why_not, documents, question, kwargs)
            try:
                found = self.blend(
                    documents,
                    question,
                    recompute=recompute,
                    policy=policy,
                    min_tokens=min_tokens,
                    unchecked=unchecked,
                    store=store,
                    salt=salt,
                    tokenizer=kwargs.get("tokenizer"),
                )
            except HookChanges as seen:
                return self._generated_whole(
                    str(seen), documents, question, kwargs
                )
            return self._generated_from(
                found, repeats, over_given_kv(decoding, kwargs)
            )
        if store_output and beams > 1:
            raise ValueError(
                "store_output: beams change rows while they grow, so only their prompt can be "
                "stored"
            )
        why_not = why_not or before.why_not
        prompts = None
        if not why_not:
            prompts, why_not = _prompts_of(
                decoding, input_ids, attention_mask, repeats, assisted, media
            )
        if prompts is not None and before.stateful is not None:
            why_not = _why_padded(prompts.rows)
            prompts = None if why_not else prompts
        if prompts is None:
            return self._generated_without(
                why_not, input_ids, attention_mask, kwargs
            )
        columns = prompts.input_ids.shape[1]
        watch = HookWatch(self.model, before.hooks, columns)
        try:
            with watch:
                passed = over_given_kv(decoding, kwargs)
                if before.stateful is not None:
                    most_tokens = decoding.prefill_chunk_size
                    kept = store or store_output
                    # marks that show nothing
                    passed = _without_media(passed)
                    out, kv = self._generated_with_endings(
                        prompts,
                        before,
                        before.stateful,
                        most_tokens,
                        kept,
                        passed,
                    )
                else:
                    out, kv = self._generated(
                        prompts, before, passed, decoding.prefill_chunk_size
                    )
        except HookChanges as seen:
            # nothing was chosen or streamed yet, except the prompt
            self._keep_in_mind(seen.hook)
            if seen.prompt_shown:
                kwargs = _again(kwargs)
            return self._generated_without(
                str(seen), input_ids, attention_mask, kwargs
            )
        self.last_stored = []
        if before.stateful is None:
            hints = self._endings.hints_with(
                hints,
                kwargs.get("tokenizer"),
                out,
                columns,
                decoding,
                before.cache,
            )
        if watch.changing is not None:
            self._keep_in_mind(watch.changing.hook)
        elif store or store_output or media.form:
            # a form that shows something is tried also if nothing is stored
            self._store_after(
                out, kv, prompts, before, salt, store, store_output, kwargs, hints
            )
        if hints is not None and not self.last_stored:
            self._note_answer(prompts.rows, before, hints)
        return out

    def _note_answer(
        self, rows: Sequence[BatchRow], before: _Ready, hints: RequestHints
    ) -> None:
        """Say what is known of a request that has ended. Never raises: the text is complete."""
        try:
            for row in rows:
                before.cache.note_answer(
                    row.tokens,
                    items=row.items_in(len(row.tokens)),
                    hints=hints,
                    **before.space,
                )
        except Exception as trouble:  # noqa: BLE001
            # nobody loses a text because of a hint
            _log.warning("the hints of a request are not used: %s", trouble)

    def prefix(
        self,
        input_ids: Any,
        attention_mask: Any | None = None,
        *,
        salt: str | None = None,
    ) -> Prefix:
        """Return a DynamicCache with the KV of the leading tokens in the tiers. Does not change the
        model, apart from what it remembers of an earlier prompt's positions.

        Rows of a batch use the columns that all rows have. The cache never covers the whole prompt.
        The KV is that of a model computed as at this moment, of token ids alone: call
        `model.generate` under the same settings, without arguments on which the KV depends.
        """
        began = time.perf_counter()
        ready = self._ready(salt)
        rows = rows_of(
            input_ids,
            mask_of(self.model.generation_config, input_ids, attention_mask),
        )
        why_not = ready.why_not_apart
        if not why_not and ready.stateful is not None:
            why_not = _why_padded(rows)
        if why_not:
            ready.cache.decline(why_not)
            nothing = None
            if not self._refusal:
                nothing = empty_cache(self.model, self._seen.shape)
            return self._without(rows, why_not, nothing)
        # of the call that begins from what is returned here
        forget_positions(self.model)
        if ready.stateful is not None:
            return self._prefix_to_ending(rows, ready, ready.stateful, began)
        return self._loaded(
            rows, input_ids.shape[1], ready, self._looked(rows, ready), began
        )[0]

    def blend(
        self,
        documents: Sequence[Any] | None,
        question: Any | None,
        *,
        recompute: float | None = None,
        policy: str | SelectionPolicy = "deviation",
        min_tokens: int | None = None,
        unchecked: bool = False,
        store: bool = True,
        salt: str | None = None,
        tokenizer: Any | None = None,
    ) -> Prefix:
        """Return a DynamicCache of a prompt of documents, all but its last token, from the KV of
        each document alone.

        The first document is a prefix and exact. K of the others is moved to their new positions,
        and a share of their tokens is computed again, over everything before them. A document that
        no tier has is first computed alone, so the answer depends on the arguments, not on the
        cache. `Prefix.blend` says which tokens are exact. With recompute=1.0 all are exact, as
        after a full prefill.

        Args:
            documents: token ids or text of each, in the order of the prompt, without separators.
            question: the tokens after the documents, which are always computed.
            recompute: the share of the tokens of all documents but the first that is computed
                again, 0 to 1; by default the option blend_recompute.
            policy: which tokens: "deviation" (CacheBlend), "first_k" (EPIC), or a SelectionPolicy.
            min_tokens: later documents with fewer tokens are computed in the prompt, in addition to
                that share, and not stored; by default the option blend_min_tokens.
            unchecked: run without a passing verdict of `pagoda quality` for these weights and this
                setting.
            store: whether to store documents that no tier had.
            salt: the tenant of this call, instead of the model's.
            tokenizer: for text; special tokens are added to the first document only.

        Raises ValueError for a model whose K cannot be moved and for wrong arguments, ConfigError
        (a ValueError) without a verdict. As thread-safe as the model. Sources: CacheBlend (EuroSys
        2025), EPIC (ICML 2025).
        """
        from pagoda.connectors.transformers.blending import hit_of

        began = time.perf_counter()
        pieces = as_documents(documents, question, tokenizer)
        chosen_by = policy_named(policy)
        ready, blender, stamp = self._ready_to_blend(salt)
        if ready.why_not:
            raise ValueError(ready.why_not)
        cache = ready.cache
        space = ready.space
        recompute = (
            cache.config.blend_recompute if recompute is None else recompute
        )
        min_tokens = (
            cache.config.blend_min_tokens if min_tokens is None else min_tokens
        )
        setting = blend_setting(chosen_by, recompute, min_tokens)
        try:
            state = blender.gate.state_of(setting, unchecked, space["lora"])
        except ConfigError as refusal:
            if str(setting) not in self._passed:
                raise
            _log.warning(
                "the weights or adapters changed, and documents are computed in full: %s",
                refusal,
            )
            state = blender.gate.state_of(
                blend_setting(chosen_by, 1.0), unchecked, space["lora"]
            )
        if state.checked in ("passed", "loosened"):
            self._passed.add(str(setting))

        def may_store() -> bool:
            return (
                store
                and stamp_of(self.model) == stamp
                and self._ready(salt) == ready
            )

        try:
            with HookWatch(self.model, ready.hooks):
                kv, blended = blender.blend(
                    pieces, chosen_by, state, space, may_store
                )
        except HookChanges as seen:
            self._keep_in_mind(seen.hook)
            raise
        tokens = len(blended.tokens) - 1
        return Prefix(
            kv,
            tokens,
            [tokens],
            [hit_of(blended)],
            time.perf_counter() - began,
            blended,
        )

    def stats(self) -> dict[str, Any]:
        """Return `Cache.stats` of the prompts' cache; under "documents" that of the documents'
        cache, if there is one.

        "approximate" lists the used settings of `blend`, and whether a verdict covers each. Raises
        ClosedError after `close`.
        """
        stats: dict[str, Any] = {**self.cache.stats()}
        blender = self._blender
        if blender is not None:
            stats["documents"] = blender.cache.stats()
            states = [state.as_stats() for state in blender.gate.states]
            stats["approximate"] = [*stats.get("approximate", ()), *states]
        return stats

    def store(
        self,
        input_ids: Any,
        past_key_values: Any,
        attention_mask: Any | None = None,
        *,
        salt: str | None = None,
        every: int = 1,
    ) -> list[Stored]:
        """Store the KV of the whole chunks of each row of `input_ids`; return one answer per row.

        `past_key_values` is the DynamicCache after `generate` or `forward` with the present weights
        and adapters; the rows of `input_ids` are its rows 0, every, 2 * every, ... If `input_ids`
        includes generated tokens, they are stored too. The KV must have been computed under the
        settings of this moment. Raises ValueError for tokens from the first one on that `blend`
        made approximate, and for KV that does not fit the layout.
        """
        rows = rows_of(
            input_ids,
            mask_of(self.model.generation_config, input_ids, attention_mask),
        )
        ready = self._ready(salt)
        why_not = ready.why_not_apart
        if not why_not and ready.stateful is not None:
            why_not = _why_padded(rows)
        if why_not:
            ready.cache.decline(why_not, loaded=True)
            whole = [len(row.tokens) // self.layout.chunk_tokens for row in rows]
            return [
                Stored(0, 0, 0, chunks, Reason.NOT_CACHEABLE) for chunks in whole
            ]
        if ready.stateful is not None:
            return ready.stateful.store_held(
                rows, past_key_values, every, ready.space
            )
        return self._stored(rows, past_key_values, ready, every)

    def _stored(
        self,
        rows: list[BatchRow],
        past_key_values: Any,
        ready: _Ready,
        every: int,
        hints: RequestHints | None = None,
    ) -> list[Stored]:
        """Store the KV of rows 0, every, 2 * every, ... Raises ValueError for KV that is not of
        this model.
        """
        layers = past_key_values.layers
        if len(layers) != self.layout.layers or {
            type(one).__name__ for one in layers
        } != {"DynamicLayer"}:
            raise ValueError(
                "past_key_values must be a DynamicCache of this model: K and V of every token, "
                "uncut"
            )
        planes = [[layer.keys, layer.values] for layer in layers]
        width = rows[0].pad + len(rows[0].tokens)
        columns = min(past_key_values.get_seq_length(), width)
        if columns > (
            exact := getattr(past_key_values, "pagoda_exact_tokens", columns)
        ):
            raise ValueError(
                f"past_key_values was blended, and only its first {exact} tokens are exact: "
                "prompts would use the "
                "others as exact KV; store only the exact tokens"
            )
        last = (len(rows) - 1) * every
        if columns and last >= len(layers[0].keys):
            raise ValueError(
                f"past_key_values holds {len(layers[0].keys)} rows, and row {last} is asked for: "
                "give as many rows of input_ids, or another `every`"
            )
        answers = []
        for number, row in enumerate(rows):
            kv = kv_of_row(
                planes, number * every, row.pad, max(columns, row.pad), self._seen
            )
            tokens = row.tokens[: kv.num_tokens]
            items = row.items_in(len(tokens))
            answers.append(
                ready.cache.store(
                    tokens,
                    kv,
                    items=items,
                    hints=hints,
                    after=self._hit_before(),
                    **ready.space,
                )
            )
        return answers

    def clear(self, *, salt: str | None = None) -> Cleared:
        """Remove the chunks of this model from every tier: prompts and documents, with the active
        adapters.

        `cache.clear` does not remove documents. `salt`: the tenant; by default that of the object.
        Returns how many chunks each tier had, and which tiers failed: their chunks are still there.
        What was stored under other settings, such as `torch.autocast`, has another namespace: call
        this under them. Thread-safe.
        """
        ready = self._ready(salt)
        space = ready.space
        cleared = ready.cache.clear(**space)
        try:
            blender = self._ready_to_blend(salt)[1]
        except ConfigError:
            raise
        except ValueError:
            # this model cannot be blended, so it has no stored documents
            return cleared
        documents = blender.cache.clear(**space)
        tiers = {**cleared.chunks, **documents.chunks}
        chunks = {
            tier: cleared.chunks.get(tier, 0) + documents.chunks.get(tier, 0)
            for tier in tiers
        }
        return Cleared(chunks, {**cleared.failed, **documents.failed})

    def publish_events(
        self, endpoint: str, *, topic: str = "", rank: int | None = None
    ) -> str:
        """Report to routers of requests what is stored for this model, also after its weights have
        changed.

        Arguments, answer and errors are those of `Cache.publish_events`.
        """
        endpoint = self.cache.publish_events(endpoint, topic=topic, rank=rank)
        self._events = {"endpoint": endpoint, "topic": topic, "rank": rank}
        return endpoint

    def close(self, timeout: float = 5.0) -> None:
        """Close the cache if it was opened here, and end the threads, within `timeout` seconds.
        Idempotent.
        """
        until = time.monotonic() + timeout
        with self._lock:
            loads = self._loads
            blender = self._blender
            self._closed = True
        if loads is not None:
            # before the slots from which they copy are unmapped
            loads.close(timeout)
        if blender is not None:
            blender.cache.close(max(0.0, until - time.monotonic()))
        if self._config is not None:
            self.cache.close(max(0.0, until - time.monotonic()))

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- loading

    def _generate_from(
        self,
        kv: Any,
        input_ids: Any,
        mask: Any,
        kwargs: dict[str, Any],
        media: Media = NOTHING,
        columns: int = 0,
    ) -> Any:
        """Return the result of `model.generate`, started from `kv`, which it fills.

        What the `columns` of KV show is not passed on.
        """
        given = model_checks.kv_argument(self.model, kv)
        positions = positions_of(self.model, input_ids, mask, kwargs)
        rest = media.after(columns, kwargs)
        return self._call_generate(
            input_ids,
            {"attention_mask": mask, **given, **positions, **rest},
        )

    def _generated_without(
        self,
        why_not: str,
        input_ids: Any,
        attention_mask: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of `model.generate` for these arguments, which the cache has no part
        in.
        """
        self.went_without(why_not)
        if attention_mask is not None:
            kwargs = {"attention_mask": attention_mask, **kwargs}
        return self._call_generate(input_ids, kwargs)

    def _call_generate(self, input_ids: Any, kwargs: dict[str, Any]) -> Any:
        """Return `model.generate` of a prompt, which is given where this model takes it."""
        if input_ids is None:
            return self.model.generate(**kwargs)
        if takes_prompt_first(self.model):
            return self.model.generate(input_ids, **kwargs)
        return self.model.generate(input_ids=input_ids, **kwargs)

    def went_without(self, why_not: str) -> None:
        """Take note of a call that the cache has no part in: in `last`, the counters and the
        log.
        """
        self.cache.decline(why_not)
        self.last_stored = []
        self.last = self._without([], why_not, None)

    def _generated_whole(
        self, why_not: str, documents: Any, question: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of `model.generate` for documents and a question as one prompt, without
        the cache.
        """
        pieces = as_documents(documents, question, kwargs.get("tokenizer"))
        ids = self._as_prompt(np.concatenate(pieces))
        return self._generated_without(
            why_not, ids, ids.new_ones(ids.shape), kwargs
        )

    def _without(self, rows: list[BatchRow], why_not: str, kv: Any) -> Prefix:
        """Return a prefix of nothing, with a miss for each row."""
        tokens = [len(row.tokens) for row in rows] or [0]
        misses = [
            Hit(0, {}, np.zeros(count, np.bool_), Reason.NOT_CACHEABLE, why_not)
            for count in tokens
        ]
        return Prefix(kv, 0, [0] * len(misses), misses, 0.0)

    def _store_after(
        self,
        out: Any,
        kv: Any,
        prompts: _Prompts,
        before: _Ready,
        salt: str | None,
        prompt: bool,
        with_output: bool,
        kwargs: dict[str, Any],
        hints: RequestHints | None = None,
    ) -> None:
        """Try a form of calls, and store the KV of a complete generation: of its `prompt`, or also
        `with_output`. Never raises: nobody loses a text because of its KV.
        """
        ids = getattr(out, "sequences", out)
        rows = prompts.rows
        every = prompts.repeats
        computed = kv if isinstance(kv, ComputedPrompts) else None
        kv = computed.cache if computed is not None else kv
        try:
            if self._ready(salt) != before:
                # which of the two computed this KV is unknown
                raise ValueError(
                    "the weights, the adapters or the settings changed while the text was computed"
                )
            if every == 1 and not 0 <= ids.shape[1] - kv.get_seq_length() <= 1:
                raise ValueError(
                    f"{kv.get_seq_length()} tokens have KV, and the text has {ids.shape[1]} tokens"
                )
            self._try_media(kv, prompts, before, kwargs)
            if not prompt and not with_output:
                return
            if with_output:
                items = rows[0].items
                rows = rows_of(
                    ids, grown_mask(prompts.mask.repeat_interleave(every, 0), ids)
                )
                if items:  # then there is one prompt
                    rows = [row._replace(items=items) for row in rows]
            if computed is not None and before.stateful is not None:
                self.last_stored = before.stateful.store(
                    rows, computed, every, before.space, with_output=with_output
                )
                return
            every = 1 if with_output else every
            self.last_stored = self._stored(rows, kv, before, every, hints)
        except Exception as trouble:  # noqa: BLE001
            # a boundary: the text is complete
            before.cache.decline(
                f"the KV of a text is not stored: {trouble}", loaded=True
            )

    def _try_media(
        self, kv: Any, prompts: _Prompts, ready: _Ready, kwargs: dict[str, Any]
    ) -> None:
        """Try a form of calls with the first prompt that has it. Raises ValueError if the model
        cannot continue after such items.
        """
        media = prompts.media
        trouble = self._trials.trouble(media, ready.name)
        if trouble is None:
            only = {"max_new_tokens": 1, "do_sample": False}

            def generate(
                part: Any, ids: Any, mask: Any, shown: Any, *at: Any
            ) -> Any:
                return self._generate_from(
                    part, ids, mask, {**only, **shown}, *at
                )

            trouble = self._trials.try_out(
                self.model,
                self._seen,
                kv,
                media,
                ready.name,
                (prompts.input_ids, prompts.mask, prompts.rows[0].pad),
                kwargs,
                generate,
            )
        if trouble:
            raise ValueError(trouble)

    def _generated(
        self,
        prompts: _Prompts,
        ready: _Ready,
        kwargs: dict[str, Any],
        most_tokens: int | None,
    ) -> tuple[Any, Any]:
        """Return the result of `model.generate`, started from the KV in the tiers, and the filled
        DynamicCache. `most_tokens`: of one forward pass.
        """
        began = time.perf_counter()
        input_ids, mask, rows, repeats, assisted, media = prompts
        width = input_ids.shape[1]
        pieces = 0
        if len(rows) == 1 and not rows[0].pad and not media.form:
            pieces = self._least_piece
        looked = None if media.form else self._looked(rows, ready, pieces)
        load = (
            self._begun(rows, looked, ready)
            if looked is not None and repeats == 1 and not assisted
            else None
        )
        if load is not None and looked is not None:
            made = self._computed_meanwhile(load, input_ids, mask, looked, kwargs)
            if made is not None:
                return made
            kwargs = _again(kwargs)
            if load.hung:  # a second load would take as long
                looked = Hit(
                    0,
                    {},
                    looked.mask & False,
                    Reason.DEADLINE,
                    "the load did not end in time",
                )
        found, planes = self._loaded(rows, width, ready, looked, began, pieces)
        if media.form:
            self._cut_to_items(found, media, ready, one_by_one=repeats == 1)
        columns = found.columns
        watch = watch_for(self._seen.devices)
        with self._prefills.measured(self.model, watch):
            if found.hit.behind_tokens:
                columns = self._filled_behind(
                    found, planes, prompts, most_tokens, ready.cache
                )
            planes = []  # the cache has its own by now, or keeps them
            kv = found.past_key_values
            found.past_key_values = None
            self.last = found
            if repeats > 1:
                kv.batch_repeat_interleave(repeats)
            cut = (
                first_pass_cut(self.model, kv, columns, input_ids)
                if assisted
                else nullcontext()
            )
            with cut:
                out = self._generate_from(
                    kv, input_ids, mask, kwargs, media, columns
                )
            return out, kv

    def _filled_behind(
        self,
        found: Prefix,
        planes: Planes,
        prompts: _Prompts,
        most_tokens: int | None,
        cache: Cache,
    ) -> int:
        """Compute what is missing between the pieces of a prompt, into its cache; return how many
        tokens that holds then.

        If that fails, the cache holds the leading part, as without pieces, and `cache` counts it.
        """
        hit = found.hit
        columns = found.columns
        try:
            return fill_behind(
                self.model,
                self._seen,
                found.past_key_values,
                planes,
                hit.runs(),
                prompts.input_ids,
                prompts.mask,
                most_tokens,
            )
        except HookChanges as seen:
            seen.prompt_shown = False
            raise
        except Exception as trouble:  # noqa: BLE001
            # a boundary: all behind the leading part can be computed at once
            why = (
                "the chunks behind a missing one were computed too: "
                f"{type(trouble).__name__}: {trouble}"
            )
            if not isinstance(trouble, RuntimeError):
                # not for want of memory: it would be the same each time
                self._least_piece = 0
                why += " (from now on always)"
            cache.decline(why)
        found.past_key_values = dynamic_cache(
            self.model, self._seen, planes, prompts.rows, columns
        )
        found.hits = [hit.shortened(columns, hit.reason, hit.detail)]
        return columns

    def _cut_to_items(
        self, found: Prefix, media: Media, ready: _Ready, *, one_by_one: bool
    ) -> None:
        """Leave of a prefix what a prompt with items can begin from."""
        columns = media.whole(found.columns, one_by_one)
        why = "an item that is not covered whole is computed"
        if self._trials.trouble(media, ready.name) is None:
            # whoever stored KV of all items has tried it with these weights
            if media.items and media.items[-1].stop <= columns:
                self._trials.trust(media, ready.name)
            else:
                columns = 0
                why = (
                    "the first prompt of this form is computed whole, to try whether the model "
                    "can continue after such items"
                )
        less = found.columns - columns
        if not less:
            return
        if columns:
            found.past_key_values.crop(-less)
        else:
            found.past_key_values = dynamic_cache(
                self.model, self._seen, [], [], 0
            )
        found.columns = columns
        found.num_tokens = [max(tokens - less, 0) for tokens in found.num_tokens]
        found.hits = [
            hit.shortened(tokens, hit.reason or Reason.NOT_CACHEABLE, why)
            for hit, tokens in zip(found.hits, found.num_tokens, strict=True)
        ]

    def _generated_with_endings(
        self,
        prompts: _Prompts,
        ready: _Ready,
        stateful: StatefulPrompts,
        most_tokens: int | None,
        kept: bool,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ComputedPrompts]:
        """Return the result of `model.generate`, started from an ending in the tiers, and what can
        be stored; `kept`: whether it will be.
        """
        began = time.perf_counter()
        input_ids = prompts.input_ids
        mask = prompts.mask
        rows = prompts.rows
        loaded = stateful.load(rows, ready.space)
        count = loaded.num_tokens
        seconds = time.perf_counter() - began
        counts = [count] * len(rows)
        self.last = Prefix(None, count, counts, loaded.hits, seconds)
        with self._prefills.measured(self.model, watch_for(self._seen.devices)):
            computed = stateful.computed(
                loaded, input_ids, mask, most_tokens, kept=kept
            )
            if computed.why_not:
                self.last = self._without(rows, computed.why_not, None)
            if prompts.repeats > 1:
                repeat(computed.cache, prompts.repeats)
            with stateful.counting(computed.cache):
                out = self._generate_from(computed.cache, input_ids, mask, kwargs)
        return out, computed

    def _prefix_to_ending(
        self,
        rows: list[BatchRow],
        ready: _Ready,
        stateful: StatefulPrompts,
        began: float,
    ) -> Prefix:
        """Load the longest prefix that every row can go on from."""
        loaded = stateful.load(rows, ready.space)
        stateful.count_passes(loaded.cache)
        count = loaded.num_tokens
        return Prefix(
            loaded.cache,
            count,
            [count] * len(rows),
            loaded.hits,
            time.perf_counter() - began,
        )

    def _generated_from(
        self, found: Prefix, repeats: int, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of `model.generate` for a prompt of documents; `last` gets the
        prefix.
        """
        assert found.blend is not None
        kv = found.past_key_values
        found.past_key_values = None
        self.last = found
        self.last_stored = []
        ids = self._as_prompt(found.blend.tokens)
        if repeats > 1:
            kv.batch_repeat_interleave(repeats)
        return self._generate_from(kv, ids, ids.new_ones(ids.shape), kwargs)

    def _as_prompt(self, tokens: Int32s) -> Any:
        """Return the tokens as a batch of one prompt, on the model's device."""
        import torch

        return torch.from_numpy(tokens).long().to(self.model.device)[None]

    def _looked(
        self, rows: list[BatchRow], ready: _Ready, pieces: int = 0
    ) -> Hit | None:
        """Look up and count a single prompt of a model on a device; None: `retrieve` looks it
        up.
        """
        if self._seen.copy_engine is None or len(rows) > 1:
            return None
        return ready.cache.lookup(
            rows[0].tokens[:-1],
            pieces=pieces,
            after=self._hit_before(),
            **ready.space,
        )

    def _hit_before(self) -> Hit | None:
        """Return the last hit: the next turn of a conversation continues from its keys. Whatever
        call it was of, the cache uses them only if they are right.
        """
        last = self.last
        return last.hit if last is not None and last.hits else None

    def _begun(
        self, rows: list[BatchRow], looked: Hit, ready: _Ready
    ) -> LayerLoad | None:
        """Begin to load the hit layer by layer; None if it is not completely on the host, the
        prompt has holes, or the model cannot wait.
        """
        cache = ready.cache
        on_host = cache.slots is not None and set(looked.by_tier) == {
            cache.tiers[0]
        }
        if not on_host or looked.behind_tokens or rows[0].pad:
            return None
        if model_checks.is_compiled(self.model):
            return None
        from pagoda.connectors.transformers.layerwise import LayerLoads

        with self._lock:
            loads = self._loads = self._loads or LayerLoads()
        return loads.begin(
            self.model,
            self._seen,
            cache,
            rows[0].tokens[: looked.num_tokens],
            ready.space,
        )

    def _computed_meanwhile(
        self,
        load: LayerLoad,
        input_ids: Any,
        mask: Any,
        looked: Hit,
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any] | None:
        """Generate while the load runs. None if the load was not complete: then nothing was sampled
        or streamed.
        """
        from pagoda.connectors.transformers.layerwise import LoadShort

        kv = load.kv
        try:
            out = self._generate_from(kv, input_ids, mask, kwargs)
            hit = load.result()
        except LoadShort:
            return None
        finally:
            load.give_up()
        tokens = hit.num_tokens
        self.last = Prefix(
            None,
            tokens,
            [tokens],
            [replace(looked, by_tier=hit.by_tier)],
            load.seconds,
        )
        return out, kv

    def _loaded(
        self,
        rows: list[BatchRow],
        width: int,
        ready: _Ready,
        looked: Hit | None,
        began: float,
        pieces: int = 0,
    ) -> tuple[Prefix, Planes]:
        """Load the columns that the tiers have of all rows; return them as a cache, and where they
        were loaded to. With `pieces`, also what the tiers have behind the first missing chunk, in
        runs of at least so many tokens: it is not in the cache.
        """
        if looked is not None and not looked.loaded:
            nothing = dynamic_cache(self.model, self._seen, [], rows, 0)
            seconds = time.perf_counter() - began
            return Prefix(nothing, 0, [0], [looked], seconds), []
        wanted = self._wanted(rows, width, ready, looked)
        # on a device, unused columns take memory too
        if self._seen.copy_engine is not None:
            whole = [
                len(tokens) - len(tokens) % self.layout.chunk_tokens
                for tokens in wanted
            ]
            width = max(
                row.pad + tokens for row, tokens in zip(rows, whole, strict=True)
            )
        planes = room_for(self._seen, len(rows), width)
        hits = []
        for number, (row, tokens) in enumerate(zip(rows, wanted, strict=True)):
            kv = kv_of_row(planes, number, row.pad, width, self._seen)
            items = row.items_in(len(tokens))
            hits.append(self._retrieved(tokens, kv, ready, looked, items, pieces))
        columns = min(
            row.pad + hit.num_tokens for row, hit in zip(rows, hits, strict=True)
        )
        served = [max(columns - row.pad, 0) for row in rows]
        if not any(served):
            columns = 0
        kv = dynamic_cache(self.model, self._seen, planes, rows, columns)
        seconds = time.perf_counter() - began
        return Prefix(kv, columns, served, hits, seconds), planes

    def _wanted(
        self, rows: list[BatchRow], width: int, ready: _Ready, looked: Hit | None
    ) -> list[Any]:
        """Return the tokens to load for each row: without the last one, and only in the columns
        that all rows have.
        """
        cache = ready.cache
        space = ready.space
        most = width - 1
        if looked is not None:
            runs = looked.runs() or [(0, looked.num_tokens)]
            most = rows[0].pad + runs[-1][1]
        if len(rows) > 1:
            found = [
                cache.lookup(row.tokens[:-1], counted=False, **space).num_tokens
                for row in rows
            ]
            most = min(
                most,
                *(
                    row.pad + tokens
                    for row, tokens in zip(rows, found, strict=True)
                ),
            )
        wanted = []
        for row in rows:
            chunks = -(-max(most - row.pad, 0) // self.layout.chunk_tokens)
            tokens = row.tokens[:-1][: chunks * self.layout.chunk_tokens]
            wanted.append(tokens)
        return wanted

    def _retrieved(
        self,
        tokens: Any,
        kv: DenseKV,
        ready: _Ready,
        looked: Hit | None,
        items: Sequence[Item],
        pieces: int,
    ) -> Hit:
        """Fill `kv` from the tiers. An earlier look-up (`looked`) was counted, and has the reason
        for a miss.
        """
        cache = ready.cache
        if looked is None:
            return cache.retrieve(
                tokens,
                kv,
                items=items,
                pieces=pieces,
                after=self._hit_before(),
                **ready.space,
            )
        if not looked.behind_tokens:
            pieces = 0
        hit = cache.retrieve(
            tokens,
            kv,
            counted=False,
            pieces=pieces,
            after=looked,
            **ready.space,
        )
        if hit.num_tokens != looked.num_tokens:
            return hit
        return replace(
            looked,
            by_tier=hit.by_tier,
            pieces=hit.pieces if pieces else looked.pieces,
            behind_tokens=hit.behind_tokens,
        )

    # ---- the present state of the model

    def _keep_in_mind(self, hook: Any) -> None:
        del self._changing[: -_MOST_HOOKS + 1]
        self._changing.append(hook)

    def _ready(self, salt: str | None) -> _Ready:
        """Return the cache of the present weights, and the options for adapters, tenant and
        numerics.
        """
        with self._lock:
            walk = walk_over(self.model)
            epoch = self._epoch_of_names()
            if not self._refusal and walk.weights != self._weights:
                stamp = stamp_of(self.model)
                if stamp != self._stamp:
                    self._weights_changed(walk, is_reported=epoch != self._epoch)
                    self._stamp = stamp
                self._memory = walk.storages()
            self._weights = walk.weights
            self._epoch = epoch
            if self._refusal:
                space: KeySpace = {"lora": None, "salt": None, "numerics": ""}
                return _Ready(
                    self.cache, space, self.cache.namespace, self._refusal
                )
            hooks = foreign_hooks(walk)
            why_not = code_between(self.model, walk)
            changing = next(
                (
                    one
                    for one in hooks
                    if any(one.hook is known for known in self._changing)
                ),
                None,
            )
            if changing is not None:
                why_not = why_not or str(HookChanges(changing))
            lora = None
            try:
                lora = adapters_digest(self.model, walk) or None
            except ValueError as trouble:
                why_not = why_not or str(trouble)
            numerics = numerics_of(self.model, walk)
            edits = ""
            try:
                edits = self._edits.text(walk)
            except ValueError as trouble:
                why_not = why_not or str(trouble)
            why_not = why_not or self._layout_trouble(numerics.autocast, edits)
            why_not = why_not or why_no_positions(self.model)
            space = {
                "lora": lora,
                "salt": salt,
                "numerics": ", ".join(filter(None, (numerics.text, edits))),
            }
            return _Ready(
                self.cache,
                space,
                self.cache.present_namespace(lora),
                why_not,
                hooks,
                self._stateful,
            )

    def _layout_trouble(self, autocast: str, edits: str) -> str:
        """Return why KV that is computed now does not fit the layout, or cannot be cut; "" if it
        does and can.

        The first call under other settings probes the model, by passes over four tokens.
        """
        present = (autocast, edits)
        if present == self._probed_under:
            return ""
        if present not in self._layouts:
            self._layouts[present] = self._probed_trouble(autocast)
            drop_oldest(self._layouts, _MOST_LAYOUTS)
        return self._layouts[present]

    def _probed_trouble(self, autocast: str) -> str:
        try:
            layout = _probed(self.model, self.layout.chunk_tokens).layout
        except ValueError as trouble:
            return str(trouble)
        if layout.fingerprint == self.layout.fingerprint:
            return ""
        ours = _dtypes(layout)
        theirs = _dtypes(self.layout)
        what = f"{ours} instead of {theirs}"
        if ours == theirs:
            what = "with other windows, or other states"
        return (
            f"under {autocast or 'these settings'} the KV has another layout, {what}: create the "
            "CachedModel under the settings of its calls"
        )

    def _ready_to_blend(self, salt: str | None) -> tuple[_Ready, Blender, Stamp]:
        """Return the result of `_ready`, the blender for the present weights, and their stamp.

        Under one lock: if another thread changed the weights in between, their KV would be stored
        under the old name.
        """
        from pagoda.connectors.transformers.blending import Blender

        with self._lock:
            ready = self._ready(salt)
            if ready.stateful is not None:
                raise ValueError(
                    f"{type(self.model).__name__} has windows or states, which cannot be moved to "
                    "another place in a prompt: give the whole prompt as input_ids"
                )
            if self._refusal:
                raise ValueError(self._refusal)
            if self._blender is None:
                self._blender = Blender(self.model, self._seen, ready.cache)
                if self._closed:  # documents are computed then, like prompts
                    self._blender.cache.close()
            return ready, self._blender, self._stamp

    def _observe(self, tokens: int, seconds: float) -> None:
        # fewer tokens do not show the speed of computing chunks
        if tokens >= self.layout.chunk_tokens:
            self.cache.observe_prefill(tokens, seconds)

    def _epoch_of_names(self) -> bytes:
        """Return what changes with `Cache.weights_changed`, where the caller names the weights."""
        is_named_here = (
            self._named["weights"] is None and self._config is not None
        )
        if self._refusal or is_named_here:
            return b""
        return self.cache.present_namespace().root

    def _weights_changed(self, walk: ModelWalk, *, is_reported: bool) -> None:
        """Change to the namespace and the device of the present weights, after a weight was written
        to or moved. `is_reported`: the caller, who names the weights, has said so to the cache.
        """
        forms = model_checks.forms_of(self.model)
        config = self._config
        if config is None or self._named["weights"] is not None:
            if is_reported and forms == self._forms:
                return
            how = (
                "the weights were changed"
                if forms == self._forms
                else "the model was moved or converted"
            )
            raise ValueError(
                f"{how}: create a new CachedModel, so that old KV is not used with new weights"
            )
        old = self.cache
        if forms == self._forms:
            namespace = namespace_of(self.model, self._seen.layout, **self._named)
            if namespace == self._namespace:
                # written to with the same values, as some adapters do in each pass
                return
        blender = self._blender
        self._blender = None
        # it has the verdict, the probed embedding and the KV of the old weights
        if blender is not None:
            blender.cache.close()
        if forms != self._forms:
            old.close()  # a store of another layout may need its space
            try:
                self._seen = _looked_at(self.model, self.layout.chunk_tokens)
            except ValueError as refusal:
                self._refuse(str(refusal))
                return
            self._forms = forms
            self._probed_under = (
                numerics_of(self.model, walk).autocast,
                self._edits.text(walk),
            )
            self._layouts.clear()
            namespace = namespace_of(self.model, self._seen.layout, **self._named)
        try:
            cache = self._new_cache(config, namespace)
        except ConfigError as refusal:
            if not old.config.lossy_codecs():
                raise
            _log.warning(
                "tiers with a lossy codec are left out, as the weights have changed: %s",
                refusal,
            )
            cache = self._new_cache(old.config.without_lossy_tiers(), namespace)
        self._use(cache)
        self._namespace = namespace
        old.close()
        if self._events is not None:
            try:
                self.cache.publish_events(**self._events)
            except ConfigError as error:  # the model continues without routers
                _log.warning("nothing is reported to routers any more: %s", error)


def _opened_again(
    kind: type[CachedModel], model: Any, config: Config, named: dict[str, Any]
) -> CachedModel:
    """Return the CachedModel that a pickle or a copy describes."""
    return kind(model, config, **named)


def layout_of(model: Any, chunk_tokens: int = 256) -> KVLayout:
    """Return the layout of the model's KV, by running it on a few tokens. Raises ValueError if it
    cannot be cached.
    """
    return _probed(model, chunk_tokens).layout


def _probed(model: Any, chunk_tokens: int) -> model_checks.ProbedModel:
    """Probe the model. ValueError if it cannot be cached."""
    if model_checks.is_stateful(model):
        return probe_stateful(model, chunk_tokens)
    model_checks.check_model(model)
    return model_checks.probe_model(model, chunk_tokens)


def _looked_at(model: Any, chunk_tokens: int) -> model_checks.ProbedModel:
    """Probe the model; return the result with the copy engine of its device. A line of the log says
    how long it took, if a person would ask.
    """
    began = time.perf_counter()
    seen = _probed(model, chunk_tokens)
    seconds = time.perf_counter() - began
    if seconds > _LONG_PROBE_SECONDS:
        _log.info(
            "it took %.1f s to probe %s, by passes over a few tokens",
            seconds,
            type(model).__name__,
        )
    return seen._replace(copy_engine=copy_engine_for(seen.devices))


def _unseen(chunk_tokens: int) -> model_checks.ProbedModel:
    """Return what stands for a model that is not cached."""
    layout = KVLayout.opaque(chunk_tokens, _NO_KV_BYTES, "no KV")
    return model_checks.ProbedModel(layout, [])


def _empty_cache_of(
    model: Any, config: Config, seen: model_checks.ProbedModel
) -> Cache:
    """Return a cache that takes no room, for the counters of a model that is not cached."""
    nothing = Config(
        chunk_tokens=config.chunk_tokens,
        host_size=_NO_KV_BYTES,
        host_shared=False,
    )
    namespace = Namespace(
        model=type(model).__name__, layout=seen.layout.fingerprint
    )
    return Cache(nothing, namespace=namespace, layout=seen.layout)


def _why_padded(rows: Sequence[BatchRow]) -> str:
    """Return why the prompts of a model with windows or states cannot use the cache; "" if they
    can.
    """
    if any(row.pad for row in rows):
        return (
            "a row has padding, and this model can go on only where all rows have as many tokens: "
            "give prompts of one length, or one at a time"
        )
    return ""


def _dtypes(layout: KVLayout) -> str:
    return "/".join(plane.dtype for plane in layout.planes) or "states"


def _prompts_of(
    decoding: Any,
    input_ids: Any,
    attention_mask: Any,
    repeats: int,
    assisted: bool,
    media: Media,
) -> tuple[_Prompts | None, str]:
    """Return the prompts of a call, or None and why they have no keys. ValueError if `input_ids` is
    no tensor.
    """
    if input_ids is None:
        return None, "there are no input_ids, of which keys are made"
    check_input_ids(input_ids)
    try:
        mask = mask_of(decoding, input_ids, attention_mask)
        rows = [
            row._replace(items=media.of_row(row.pad))
            for row in rows_of(input_ids, mask)
        ]
        return _Prompts(input_ids, mask, rows, repeats, assisted, media), ""
    except ValueError as trouble:
        return None, str(trouble)


def _without_media(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in kwargs.items()
        if name not in CONTENT and name not in TYPES
    }


def _again(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a second `generate` of the same prompt; the streamer does not get
    the prompt again.
    """
    if kwargs.get("streamer") is None:
        return kwargs
    from pagoda.connectors.transformers.layerwise import Resumed

    return {**kwargs, "streamer": Resumed(kwargs["streamer"])}


def _configured(config: Config | None, options: ConfigOptions) -> Config:
    """Return the given config, or that of files, environment and defaults; `options` take
    precedence over both.
    """
    if config is not None:
        # Config converts what it is given
        return replace(config, **options)  # type: ignore[arg-type]
    from pagoda.config.sources import DEFAULT, load

    loaded = load(None, None, None, **options)
    found = loaded.for_engine()
    if loaded.origins["host_size"] == DEFAULT:
        return with_unwritten_size(found)
    return found


def _check_made_for(cache: Cache, namespace: Namespace) -> None:
    """Raise ValueError if a cache that was passed in belongs to another model."""
    theirs = cache.namespace
    asked = namespace.with_(
        salt=theirs.salt,
        weights_epoch=theirs.weights_epoch,
        approximate=theirs.approximate,
        numerics=theirs.numerics,  # each call names its own
    )
    differing = Namespace.differing(cache.namespace.fields(), asked.fields())
    if differing:
        raise ValueError(
            f"the cache was made for another model ({', '.join(differing)} differ): use "
            "namespace_of"
        )
