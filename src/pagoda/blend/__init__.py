"""Blending: documents are reused at any position of a prompt. The parts that every engine needs.
Imports no torch.

Modules, in the order in which a request reaches them:

    documents       Document, a separate chain with a padded tail; the cache of documents
    blend_gate      BlendGate: whether a setting may be used, by a verdict of `pagoda quality`
    rotary_move     RotaryMove: K at another position
    blend_policies  the policies that choose which tokens are computed again
    exact_tokens    BlendedPrompt: which tokens of a prompt are exact, computed again and reused

An engine loads each document's chain, computes missing chunks as if the document began a prompt,
and stores them. Then it moves K to the position of the document, and computes the chosen tokens and
the question over everything before them. `connectors.transformers.blending` does it in the caches
of Transformers, `examples/paged_engine/blend.py` in blocks.

Sources: CacheBlend (EuroSys 2025), EPIC (ICML 2025).
"""

from __future__ import annotations

from pagoda.blend.blend_gate import BlendGate
from pagoda.blend.blend_policies import (
    POLICIES,
    Candidates,
    Deviation,
    FirstK,
    SelectionPolicy,
    blend_setting,
    choose_positions,
    compared_layer,
    policy_named,
)
from pagoda.blend.documents import (
    Document,
    as_documents,
    open_documents,
    starts_of,
)
from pagoda.blend.exact_tokens import BlendedPrompt, TokenMask, TokenMasks
from pagoda.blend.rotary_move import RotaryMove

__all__ = [
    "POLICIES",
    "BlendGate",
    "BlendedPrompt",
    "Candidates",
    "Deviation",
    "Document",
    "FirstK",
    "RotaryMove",
    "SelectionPolicy",
    "TokenMask",
    "TokenMasks",
    "as_documents",
    "blend_setting",
    "choose_positions",
    "compared_layer",
    "open_documents",
    "policy_named",
    "starts_of",
]
