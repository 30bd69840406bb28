"""The connector's short waits, lengthened: a busy machine must turn nothing that a test expects
into a miss.
"""

from __future__ import annotations

from types import ModuleType

from pagoda.connectors.vllm import lookups, scheduler
from pagoda.connectors.vllm.offloading import offloading_manager

PATIENT_SECONDS = 30.0
# a reservation that takes longer is tried in the next step or not at all, a look-up that takes
# longer is a miss
WAITS: tuple[tuple[ModuleType, str], ...] = (
    (scheduler, "_RESERVE_SECONDS"),
    (scheduler, "_BRIEF_RESERVE_SECONDS"),
    (scheduler, "LONGEST_SECONDS"),
    (lookups, "LONGEST_SECONDS"),
    (offloading_manager, "_RESERVE_SECONDS"),
)
SHORT = [getattr(module, name) for module, name in WAITS]  # as users have them


def wait_long() -> None:
    """Lengthen them in this process."""
    for module, name in WAITS:
        setattr(module, name, PATIENT_SECONDS)


def wait_shortly() -> None:
    """Give them back the values that users have, for a test of what happens when they end."""
    for (module, name), seconds in zip(WAITS, SHORT, strict=True):
        setattr(module, name, seconds)
