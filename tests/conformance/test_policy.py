from __future__ import annotations

from pagoda.policy import Hints, Policy, make
from pagoda.testing import PolicyConformance


class TestLru(PolicyConformance):
    def make_policy(self, hints: Hints) -> Policy:
        return make("lru", hints)


class TestLruOfManyQueues(TestLru):
    slots = 5000


class TestLruOfFewSlots(TestLru):
    slots = 40
