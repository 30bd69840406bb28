"""How the leading run of many keys is found with few questions. Used by clients, and by the replay of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# asked at once of a store that answers many in one round trip: more take longer than a round trip
EXACT_KEYS = 512
EXACT_REQUESTS = 16  # where each key is a request, which costs money


def leading_run(count: int, ask: Callable[[Sequence[int]], int], *, probes: int = 16, exact: int) -> int:
    """Return how many of `count` keys are present before the first absent one.

    Up to `exact` keys (at least `probes`) are one question. Of more, each question is about `probes` positions, the
    first unknown one among them, until so few are left between one that is present and one that is absent. A key that
    is missing between others may then go unnoticed, and the result be too high: a read of that key is a miss.

    `ask` is given positions and returns how many of them are present before the first absent one; what it raises is
    raised.
    """
    low, high = 0, count  # keys before `low` are taken for present, `high` is absent
    while low < high:
        left = high - low
        number = left if left <= exact else probes
        asked = [low + left * nth // number for nth in range(number)]
        present = ask(asked)
        high = asked[present] if present < number else high
        low = asked[present - 1] + 1 if present else low
    return low
