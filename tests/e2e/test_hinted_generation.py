"""Hints of `CachedModel.generate` reach the cache, and change no text."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagoda import RequestHints  # noqa: E402
from tests.e2e.house import House  # noqa: E402
from tests.e2e.test_call_conditions import llama, texts  # noqa: E402


@pytest.mark.parametrize("stores", [True, False])
def test_a_session_is_known_and_ends(house: House, stores: bool) -> None:
    model = llama()
    cached = house.open(model)
    ids = torch.arange(1, 60)[None]
    plain = texts(model, ids)
    texts(cached, ids, hints=RequestHints(session="s", ending="turn"))
    over = RequestHints(session="s", session_end=True)
    assert texts(cached, ids, hints=over, store=stores) == plain
    assert cached.cache.stats()["hints"] == {
        "accepted": {"session": 2, "ending": 1, "session_end": 1}
    }
    _, ledger = cached.cache._tiers.ledgers()[0]
    contexts = ledger.columns.contexts
    assert contexts is not None
    # its own look-ups and stores are no use by others
    assert set((contexts.of_slots[contexts.marks > 0] >> 4 & 7).tolist()) == {4}


def test_what_is_no_hint_is_refused_before_anything_is_computed(
    house: House,
) -> None:
    cached = house.open(llama())
    with pytest.raises(ValueError, match=r"pass a pagoda\.RequestHints"):
        texts(cached, torch.arange(1, 60)[None], hints={"drop": True})
