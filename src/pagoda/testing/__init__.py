"""Tools to test code that uses or extends PagodaKV. Importing this needs no test framework.

    fake_clock          `FakeClock` stops until it is advanced
    faulty_slab         `FaultySlab`, a file slab that fails on demand
    tier_conformance    `TierConformance`, a suite to subclass: what a tier must do
    policy_conformance  `PolicyConformance`: what a policy must do

The names resolve lazily: `FakeClock` does not import the tiers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.testing.fake_clock import FakeClock
    from pagoda.testing.faulty_slab import Fault, FaultySlab
    from pagoda.testing.policy_conformance import PolicyConformance
    from pagoda.testing.tier_conformance import TierConformance

__all__ = [
    "FakeClock",
    "Fault",
    "FaultySlab",
    "PolicyConformance",
    "TierConformance",
]

_HOMES = {
    "FakeClock": "fake_clock",
    "Fault": "faulty_slab",
    "FaultySlab": "faulty_slab",
    "PolicyConformance": "policy_conformance",
    "TierConformance": "tier_conformance",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
