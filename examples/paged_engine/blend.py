"""Documents wherever they are in a prompt, from the KV that each has alone. Approximate: the answer
says where.

    tokens   | first       | second     | third      | question |
    load     | a prefix    | its chain  | its chain  |          |   each as if it began a prompt
    compute  | what is missing, as if it began one  |          |   and store it, except the first
    move     |             | K          | K          |          |   to its place
    compute  |             |    x   x   |      x     | x x x x  |   the chosen tokens, over all that is before them

`engine` calls this. It does the copies and the forward passes in blocks; the rest is in
`pagoda.blend`. The first document is found and kept by the block manager, as every prefix. Blocks
after it are approximate, so they have no keys.
"""  # noqa: E501, W505

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from pagoda import Cache, ConfigError, Hit
from pagoda.base.quality_verdict import QualityState
from pagoda.blend import (
    BlendedPrompt,
    BlendGate,
    Document,
    TokenMasks,
    as_documents,
    blend_setting,
    choose_positions,
    compared_layer,
    open_documents,
    policy_named,
    starts_of,
)
from pagoda.cache import Stored
from pagoda.connectors.transformers import rotary_of
from pagoda.keys import Namespace
from pagoda.transfer import DenseKV

from .attention import KVPool, Part, batch_of, deviation

if TYPE_CHECKING:
    from .engine import Sequence as Request


class Span(NamedTuple):
    """Tokens to compute before anything after them can be."""

    positions: Sequence[int]
    origin: int = 0  # as in `Part`


class Load(NamedTuple):
    """A document's KV on its way from the tiers, into memory beside the pool."""

    document: Document
    kv: torch.Tensor  # [layers, 2, kv_heads, whole chunks, head_dim]
    hit: Future[Hit]
    # that were present: what they compute is not stored once others are
    weights: Namespace


class Documents:
    """The documents of one engine: their cache, and the way into the blocks of a request. Not
    thread-safe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        paged: PreTrainedModel,
        pool: KVPool,
        prompts: Cache,
    ) -> None:
        """Open the cache of documents beside that of prompts. Raises ValueError if K of the model
        cannot be moved.
        """
        self._paged = paged
        self._pool = pool
        self._prompts = prompts
        self._rotary = rotary_of(model, prompts.layout)
        self.gate = BlendGate(prompts)
        self.cache = open_documents(prompts, self._rotary.rotary)
        self.stores: set[Future[Stored]] = set()  # that have not ended

    def close(self) -> None:
        """Wait for stores that have not ended, and close the cache of documents."""
        wait(self.stores, 30.0)
        self.cache.close()

    def prepare(self, seq: Request) -> None:
        """Check a request with documents, and set its tokens. ConfigError: its setting has no
        passing verdict.
        """
        if seq.tokens:
            raise ValueError(
                f"request {seq.id!r}: give tokens, or documents and a question"
            )
        _, *documents, _ = pieces = as_documents(seq.documents, seq.question)
        policy = policy_named(seq.policy)
        starts = starts_of(pieces)
        compared_layer(policy, seq.recompute, starts, self.cache.layout.layers)
        seq.quality = self._quality(seq)
        seq.tokens = np.concatenate(pieces).tolist()
        seq.starts = starts
        seq.policy = policy
        seq.chains = [
            Document.of(document, self._pool.block_tokens)
            for document in documents
        ]

    def _quality(self, seq: Request) -> QualityState:
        return self.gate.state_of(
            blend_setting(seq.policy, seq.recompute), seq.unchecked
        )

    def prefetch(self, seq: Request) -> list[Future[Hit]]:
        """Begin to bring what lower tiers have of the documents to the host."""
        return [
            self.cache.prefetch(one.tokens, items=one.items, salt=seq.salt)
            for one in seq.chains
        ]

    def load(self, seq: Request) -> list[Load]:
        """Begin to load the documents after the first. Blocks are not touched: the request may lose
        its own.
        """
        heads, dim, _ = self.cache.layout.planes[0]
        loads = []
        weights = self.cache.present_namespace()
        for one in seq.chains:
            shape = (self.cache.layout.layers, 2, heads, len(one.tokens), dim)
            kv = torch.empty(
                shape, dtype=self._pool.kv.dtype, device=self._pool.kv.device
            )
            hit = self.cache.retrieve_future(
                one.tokens, self._transfer(kv), items=one.items, salt=seq.salt
            )
            loads.append(Load(one, kv, hit, weights))
        return loads

    def blend(self, seq: Request) -> Iterator[Span]:
        """Yield what to compute, in order, once all has been loaded; it was when the next span is
        asked for.
        """
        try:  # again: the weights may have changed while it waited
            seq.quality = self._quality(seq)
        except ConfigError:
            seq.recompute = 1.0  # exact: an engine that runs is not stopped
            seq.quality = self._quality(seq)
        from_prompts = seq.computed
        # the first document: no KV in it is approximate
        yield Span(range(from_prompts, seq.starts[1]))
        for start, load in zip(seq.starts[1:], seq.loads, strict=False):
            hit = load.document.without_padding(load.hit.result())
            known = start + hit.num_tokens
            stop = start + load.document.num_tokens
            self._pool.write(
                seq.table, range(start, known), load.kv[..., : hit.num_tokens, :]
            )
            if known < stop:
                yield Span(range(known, stop), origin=start)
                if self.cache.present_namespace() == load.weights:
                    self._store(
                        load,
                        self._pool.read(seq.table, range(start, stop)),
                        seq.salt,
                    )
            kv = self._pool.read(seq.table, range(start, stop))
            self._rotary.move(kv[:, 0], start)
            self._pool.write(seq.table, range(start, stop), kv)
            if not seq.output:  # else it was preempted, and counted before
                seq.hits = dict(Counter(seq.hits) + Counter(hit.by_tier))
        layers = self.cache.layout.layers
        look = partial(self._deviation, seq)
        chosen = choose_positions(
            seq.policy, seq.recompute, seq.starts, layers, look
        )
        # a tier may have a lossy codec
        is_exact = not (from_prompts and self._prompts.namespace.approximate)
        masks = TokenMasks.of(seq.starts, seq.prompt_tokens, chosen, is_exact)
        seq.blended = BlendedPrompt(
            np.array(seq.tokens[: seq.prompt_tokens], np.int32),
            seq.starts,
            *masks,
        )
        yield Span([*chosen.tolist(), *range(seq.starts[-1], len(seq.tokens))])

    def _deviation(
        self, seq: Request, layer: int, candidates: range
    ) -> npt.NDArray[np.float32]:
        part = Part([seq.tokens[at] for at in candidates], candidates, seq.table)
        return deviation(self._paged, batch_of([part], self._pool), layer)

    def _store(self, load: Load, kv: torch.Tensor, salt: str | None) -> None:
        """Store a document as it is alone, padded, in the background."""
        load.kv.zero_()
        load.kv[..., : load.document.num_tokens, :] = kv
        document = load.document
        transfer = self._transfer(load.kv)
        store = self.cache.store_future(
            document.tokens, transfer, items=document.items, salt=salt
        )
        self.stores.add(store)
        store.add_done_callback(self.stores.discard)

    def _transfer(self, kv: torch.Tensor) -> DenseKV:
        return DenseKV([list(layer) for layer in kv], self.cache.layout)
