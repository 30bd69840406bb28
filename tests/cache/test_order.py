"""The order of steps: chunks are found only after their bytes are written, and validated after the
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pagoda.transfer import Transfer
from tests.cache.kit import Bytes, blank, cache_at, kv_of, prompt, stored


class Interrupted:
    """A transfer with a call before and after each copy."""

    def __init__(self, kv: Transfer, happens: Callable[[], int]) -> None:
        self.layout = kv.layout
        self._kv = kv
        self._happens = happens
        self.seen: list[int] = []

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Call the hooks before and after the copies."""
        self.seen.append(self._happens())
        self._kv.to_slots(starts, slots)
        self.seen.append(self._happens())

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Call the hooks before and after the copies."""
        self.seen.append(self._happens())
        self._kv.from_slots(starts, slots)
        self.seen.append(self._happens())


def test_nothing_is_found_before_its_bytes_are_in(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(4)
        kv = Interrupted(
            kv_of(tokens).transfer, lambda: cache.lookup(tokens).num_tokens
        )
        assert cache.store(tokens, kv).num_chunks == 4
        assert kv.seen
        assert max(kv.seen) == 0
        assert cache.lookup(tokens).num_tokens == len(tokens)


def test_chunks_from_the_disk_are_compared_after_the_copy(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root / "first", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "second", tmp_path) as cache:
        kv = Interrupted(
            blank(tokens).transfer, lambda: sum(cache.clear().chunks.values())
        )
        assert cache.retrieve(tokens, kv).num_tokens == 0
        assert kv.seen and kv.seen[0] > 0, "there was something to clear"
