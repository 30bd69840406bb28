"""Which tokens of documents are computed again, and what names a choice. Without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.blend import (
    Deviation,
    Document,
    FirstK,
    TokenMasks,
    blend_setting,
    choose_positions,
    compared_layer,
)
from pagoda.cache.results import Hit

# documents of 5, 3, 10 and 10 tokens, then the question
STARTS = [0, 5, 8, 18, 28]
LATER = range(5, 28)
LAYERS = 3


def moved(layer: int, candidates: range) -> np.ndarray:
    """K of the last tokens of each document moved most, that of the short one even more."""
    assert layer == 1
    assert candidates == LATER
    return np.array([100.0, 100, 100, *range(10), *range(10)], np.float32)


def chosen(
    policy: FirstK | Deviation, recompute: float, min_tokens: int = 0
) -> list[int]:
    return choose_positions(
        policy, recompute, STARTS, LAYERS, moved, min_tokens
    ).tolist()


def test_those_of_the_largest_deviation_are_chosen() -> None:
    assert chosen(Deviation(), 5 / 23) == [5, 6, 7, 17, 27]
    assert chosen(Deviation(), 4 / 23) == [5, 6, 7, 17]  # of equal ones the first


def test_the_first_tokens_of_each_document_are_chosen() -> None:
    assert chosen(FirstK(), 0.2) == [5, 8, 9, 18, 19]


@pytest.mark.parametrize("policy", [FirstK(), Deviation()])
def test_a_share_of_one_chooses_all_tokens_and_of_zero_none(
    policy: FirstK | Deviation,
) -> None:
    assert chosen(policy, 1.0) == list(LATER)
    assert chosen(policy, 0.0) == []
    assert chosen(policy, 0.0, 10) == [5, 6, 7]
    assert chosen(policy, 0.5, 11) == list(LATER)


def test_short_documents_are_computed_beside_the_share_of_the_others() -> None:
    """A document of exactly `min_tokens` tokens is reused."""
    assert chosen(Deviation(), 0.2, 4) == [5, 6, 7, 16, 17, 26, 27]
    assert chosen(FirstK(), 0.2, 10) == [5, 6, 7, 8, 9, 18, 19]
    assert chosen(FirstK(), 0.4, 3) == [5, 8, 9, 10, 11, 18, 19, 20, 21]


def test_a_model_has_the_layer_that_is_compared() -> None:
    assert compared_layer(Deviation(2), 0.5, STARTS, 3) == 2
    with pytest.raises(
        ValueError, match="compares K at layer 3, the model has 3"
    ):
        compared_layer(Deviation(3), 0.5, STARTS, 3)
    assert (
        compared_layer(Deviation(3), 1.0, STARTS, 3)
        == compared_layer(Deviation(3), 0.5, [0, 5], 3)
        == 0
    )


def test_settings_that_compute_something_else_have_other_names() -> None:
    different = [
        blend_setting(),
        blend_setting("first_k"),
        blend_setting(recompute=0.2),
        blend_setting(min_tokens=1),
        blend_setting(min_tokens=2),
        blend_setting(Deviation(2)),
        blend_setting(Deviation(3)),
    ]
    for number, one in enumerate(different):
        assert [one.is_same(other) for other in different].count(True) == 1, (
            number
        )
        assert [str(other) for other in different].count(str(one)) == 1
    assert blend_setting(Deviation(1)).is_same(blend_setting())


def test_masks_of_each_token() -> None:
    """Each is in one mask; exact is what nothing reused is before."""
    for options, exact in (({}, 6), ({"first_is_exact": False}, 0)):
        masks = TokenMasks.of(STARTS, 30, np.array([5, 8, 9, 18]), **options)
        assert (np.sum(masks, axis=0) == 1).all()
        assert masks.exact.sum() == exact
        assert masks.exact[:exact].all()
        assert np.flatnonzero(masks.recomputed).tolist() == [
            *([5] if not exact else []),
            8,
            9,
            18,
            28,
            29,
        ]
    assert TokenMasks.of(STARTS, 30, np.array(LATER)).exact.all()


@pytest.mark.parametrize(
    ("tokens", "by_tier", "own"),
    [
        (16, {"host": 8, "disk": 8}, {"host": 8, "disk": 2}),
        (8, {"host": 8}, {"host": 8}),
        (0, {}, {}),
    ],
)
def test_padding_is_no_hit(
    tokens: int, by_tier: dict[str, int], own: dict[str, int]
) -> None:
    document = Document.of(list(range(1, 11)), 8)
    assert document.tokens.tolist() == [*range(1, 11), *[0] * 6]
    assert document.num_tokens == 10
    hit = document.without_padding(
        Hit(tokens, by_tier, np.arange(16) < tokens, None)
    )
    assert hit.by_tier == own
    assert hit.num_tokens == sum(own.values()) == hit.mask.sum()
    assert len(hit.mask) == 10
