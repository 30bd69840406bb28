"""The ledger against the same model with the policy that learns, and refuses."""

from __future__ import annotations

import pytest
from hypothesis.stateful import rule

from pagoda.policy.hindsight import _SharedValues
from tests.stateful.test_ledger_model import SETTINGS, LedgerMachine


class HindsightMachine(LedgerMachine):
    """The same with the policy that learns, and refuses."""

    policy = "hindsight"

    def open(self) -> None:
        """As one that has seen often that chunks are asked for again when some seconds old."""
        super().open()
        learnt = _SharedValues.of(self.ledger.upkeep_thread.learned)  # type: ignore[arg-type]
        learnt.asked[:, 15:24] = learnt.watched[:, 15:24] = 1000
        self.learn()

    @rule()
    def learn(self) -> None:
        """What a thread does now and then; twice, for one round shares and the next takes over."""
        self.ledger.upkeep_thread.run_once()
        self.clock.advance(6.0)
        self.ledger.upkeep_thread.run_once()


TestHindsight = pytest.mark.slow(HindsightMachine.TestCase)
TestHindsight.settings = SETTINGS
