"""Every policy passes the conformance suite of policies."""

from __future__ import annotations

import pytest

from pagoda.policy import Hints, Policy, make
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.testing import PolicyConformance


@pytest.mark.parametrize("name", ["lru", "hindsight", "compute"])
class _Named(PolicyConformance):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        self.name = name

    def make_policy(self, hints: Hints) -> Policy:
        if self.name == "compute":
            return make("hindsight", hints, PrefillCost(3.0))
        return make(self.name, hints)


class TestConformance(_Named):
    pass


class TestConformanceOfManyQueues(_Named):
    # a queue, a sixteenth of them, is longer than what is examined at once
    slots = 4200


class TestConformanceOfFewSlots(_Named):
    slots = 40
