"""Find the leading run of many keys with few questions. Used by clients and by the replay of a
fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

# the keys that are asked about at once if a store answers many in one round trip; more would take
# longer than that
EXACT_KEYS = 512
# the same for stores in which each key is a request that costs money
EXACT_REQUESTS = 16


def leading_run(
    keys: Sequence[_T],
    ask: Callable[[list[_T]], Sequence[bool]],
    *,
    probes: int = 16,
    exact: int,
) -> int:
    """Return how many of `keys` are present before the first absent one.

    Up to `exact` keys (at least `probes`) are one question. With more keys, each question is about
    `probes` positions, one of which is the first unknown one, until few positions are left between
    a present and an absent one. A missing key between present ones may be overlooked, so the result
    may be too high; reading that key is then a miss.

    `ask` is given keys and returns which of them are present; its exceptions are raised.
    """
    # keys before `low` are assumed to be present; `high` is absent
    low = 0
    high = len(keys)
    while low < high:
        left = high - low
        number = left if left <= exact else probes
        asked = [low + left * nth // number for nth in range(number)]
        here = ask([keys[at] for at in asked])
        present = [*here, False].index(False)
        high = asked[present] if present < number else high
        low = asked[present - 1] + 1 if present else low
    return low
