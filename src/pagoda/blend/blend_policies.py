"""The policies that choose which tokens of reused documents are computed again. Imports no torch.

Engines call `choose_positions`. To add a policy, write a class with the three members of
`SelectionPolicy` and enter it in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.base.quality_verdict import Option, Setting

# the version of blending's results: raised when a setting begins to compute something else
_VERSION = 1

Positions = npt.NDArray[np.int64]


class Candidates(NamedTuple):
    """The tokens from which a policy chooses: those of all documents but the first."""

    documents: Sequence[range]  # positions of each document in the prompt
    recompute: float  # the share of these tokens that may be chosen
    # deviation of K, one value per token in this order; None if `layer` is 0
    deviation: npt.NDArray[np.float32] | None

    @property
    def positions(self) -> Positions:
        """All candidates, in order."""
        return np.concatenate(
            [np.arange(one.start, one.stop) for one in self.documents]
        )


class SelectionPolicy(Protocol):
    """Chooses the tokens that are computed again. Thread-safe: `choose` is pure."""

    @property
    def name(self) -> str:
        """The name in settings and verdicts."""

    @property
    def layer(self) -> int:
        """At which layer the policy compares K; all tokens are computed up to there. 0: it does not
        look at K.
        """

    def choose(self, candidates: Candidates) -> Positions:
        """Return the positions to compute again, ascending: about `recompute` of all candidates."""


@dataclass(frozen=True)
class FirstK:
    """The first tokens of each document, an equal share of each; its only cost is their
    computation.

    Source: EPIC (LegoLink), ICML 2025: the first tokens of a document draw attention only because
    it began there.
    """

    name = "first_k"
    layer = 0

    def choose(self, candidates: Candidates) -> Positions:
        """Return the first tokens of each document."""
        shares = [
            np.arange(
                one.start, one.start + round(candidates.recompute * len(one))
            )
            for one in candidates.documents
        ]
        return np.concatenate(shares)


@dataclass(frozen=True)
class Deviation:
    """The tokens whose K, computed in this prompt up to `layer`, differs most from the reused K.

    Its cost is the computation of all tokens through `layer` layers, whose K and V are then exact
    for all tokens.

    Source: CacheBlend, EuroSys 2025 (high KV deviation).
    """

    layer: int = 1
    name = "deviation"

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 1:
            raise ValueError(
                f"layer is {self.layer!r}: at least 1, because K of layer 0 never deviates"
            )

    def choose(self, candidates: Candidates) -> Positions:
        """Return the tokens of the largest deviation; with equal deviation, the first ones."""
        assert candidates.deviation is not None
        count = round(candidates.recompute * len(candidates.deviation))
        order = np.argsort(-candidates.deviation, kind="stable")[:count]
        return np.sort(candidates.positions[order])


POLICIES: dict[str, type[FirstK] | type[Deviation]] = {
    "first_k": FirstK,
    "deviation": Deviation,
}
"""The policies that have a name."""


def policy_named(policy: str | SelectionPolicy) -> SelectionPolicy:
    """Return the policy of that name, or the policy itself.

    Raises ValueError for an unknown name, and for an object that is not a policy or has the name of
    another one: a verdict names a policy, so it must not cover two.
    """
    if not isinstance(policy, str):
        _check_policy(policy)
        return policy
    if policy not in POLICIES:
        raise ValueError(
            f"policy is {policy!r}: one of {', '.join(POLICIES)}, or a policy object"
        )
    return POLICIES[policy]()


def _check_policy(policy: SelectionPolicy) -> None:
    name = getattr(policy, "name", None)
    layer = getattr(policy, "layer", None)
    if (
        isinstance(policy, type)
        or not callable(getattr(policy, "choose", None))
        or not isinstance(name, str)
    ):
        raise ValueError(
            f"policy is {policy!r}: one of {', '.join(POLICIES)}, or an object with name, layer "
            "and choose"
        )
    if type(layer) is not int or layer < 0:
        raise ValueError(
            f"layer of policy {name!r} is {layer!r}: a whole number, 0 if it does not look at K"
        )
    if name in POLICIES and type(policy) is not POLICIES[name]:
        raise ValueError(
            f"policy {type(policy).__name__} has the name {name!r} of another one, whose verdict "
            "would be taken for "
            "it: give it its own name"
        )


def compared_layer(
    policy: SelectionPolicy, recompute: float, starts: Sequence[int], layers: int
) -> int:
    """Return the layer at which K will be compared; 0: nowhere, or all or no tokens are chosen.
    Pure.

    Arguments as for `choose_positions`. Raises ValueError if a model of `layers` layers does not
    have it: ask before a request begins.
    """
    if recompute in (0.0, 1.0) or starts[1] == starts[-1]:
        return 0
    if policy.layer >= layers:
        raise ValueError(
            f"the policy compares K at layer {policy.layer}, the model has {layers}: use fewer"
        )
    return policy.layer


def choose_positions(
    policy: SelectionPolicy,
    recompute: float,
    starts: Sequence[int],
    layers: int,
    deviation: Callable[[int, range], npt.NDArray[np.float32]],
    min_tokens: int = 0,
) -> Positions:
    """Return the tokens of all documents but the first that must be computed again, ascending.

    Args:
        policy: chooses them, unless all or none are wanted.
        recompute: the share of these tokens to compute again.
        starts: the first position of each document, then of the question.
        layers: the number of layers of the model.
        deviation: called with a layer and with these tokens if the policy compares K. It computes
            them up to K and V of that layer, which replace the reused ones, and returns how far K
            moved: one value per token.
        min_tokens: all tokens of documents with fewer are computed, in addition to that share.

    Raises ValueError like `compared_layer`, and for a policy that chooses positions that are not
    candidates.
    """
    candidates = range(starts[1], starts[-1])
    if recompute == 1.0:
        return np.array(candidates, np.int64)
    later = [range(begin, stop) for begin, stop in pairwise(starts[1:])]
    documents = [one for one in later if len(one) >= min_tokens]
    short = np.array(
        [at for one in later if len(one) < min_tokens for at in one], np.int64
    )
    if recompute == 0.0 or not documents:
        return short
    chosen_from = Candidates(documents, recompute, None)
    if layer := compared_layer(policy, recompute, starts, layers):
        moved = deviation(layer, candidates)
        chosen_from = chosen_from._replace(
            deviation=moved[chosen_from.positions - candidates.start]
        )
    chosen = checked_positions(policy, policy.choose(chosen_from), candidates)
    return np.union1d(chosen, short)


def checked_positions(
    policy: SelectionPolicy, chosen: object, candidates: range
) -> Positions:
    """Return what a policy chose as int64. Raises ValueError unless they are candidates,
    ascending.
    """
    try:
        found = np.asarray(chosen)
    except ValueError:  # rows of several lengths
        found = np.asarray(None)
    if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size):
        # converted, because unsigned numbers have no negative difference
        positions = found.astype(np.int64)
        within = (positions >= candidates.start) & (positions < candidates.stop)
        if within.all() and (np.diff(positions) > 0).all():
            return positions
    raise ValueError(
        f"policy {policy.name!r} chose positions that are not ascending candidates"
    )


def checked_share(recompute: object) -> float:
    """Return the share as a float. Raises ValueError unless it is a number from 0 to 1."""
    if (
        isinstance(recompute, bool)
        or not isinstance(recompute, int | float)
        or not 0 <= recompute <= 1
    ):
        raise ValueError(
            f"recompute is {recompute!r}: the share of the reused tokens that is computed again, "
            "from 0 to 1"
        )
    return float(recompute)


def checked_min_tokens(min_tokens: object) -> int:
    """Return the least tokens of a document that is reused. Raises ValueError unless it is a whole
    number.
    """
    if (
        isinstance(min_tokens, bool)
        or not isinstance(min_tokens, int)
        or min_tokens < 0
    ):
        raise ValueError(
            f"min_tokens is {min_tokens!r}: a whole number, 0 to reuse documents of any length"
        )
    return min_tokens


def blend_setting(
    policy: str | SelectionPolicy = "deviation",
    recompute: float = 0.15,
    min_tokens: int = 0,
) -> Setting:
    """Return the setting that a verdict of `pagoda quality` names: all that decides blending's
    results. Pure.
    """
    policy = policy_named(policy)
    options: dict[str, Option] = {
        "version": _VERSION,
        "policy": policy.name,
        "recompute": checked_share(recompute),
    }
    if policy.layer > 1:
        options["layer"] = policy.layer
    if checked_min_tokens(min_tokens):
        options["min_tokens"] = min_tokens
    return Setting("blend", options)
