"""The device blocks of one engine: which are free. Ids only; the memory is the engine's."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 .. total - 1, each free or somebody's. Not thread-safe. O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._used = bytearray()
        self._free: list[int] = []
        self.resize(num_blocks)

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return len(self._used)

    @property
    def free(self) -> int:
        """How many are nobody's."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are somebody's."""
        return len(self._used) - len(self._free)

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks. ValueError if one that goes is in use."""
        self.check_size(num_blocks)
        used = [block for block in range(num_blocks, self.total) if self._used[block]]
        if used:
            raise ValueError(f"blocks {used} are in use: free them before the pool gets {num_blocks} blocks")
        new = range(num_blocks - 1, self.total - 1, -1)
        self._free = [
            *new,
            *(block for block in self._free if block < num_blocks),
        ]  # the lowest first, from the end
        self._used = self._used[:num_blocks] + bytearray(max(0, num_blocks - self.total))

    @staticmethod
    def check_size(num_blocks: int) -> None:
        """Raise ValueError for a number of blocks that no pool has."""
        if num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")

    def take(self, count: int) -> list[int] | None:
        """Take `count` free blocks, or none at all if there are fewer. ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:][::-1]
        del self._free[at:]
        for block in taken:
            self._used[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks. ValueError, and nothing is freed, if one is free already, named twice or not of this pool."""
        foreign = [block for block in blocks if not 0 <= block < len(self._used)]
        if foreign:
            raise ValueError(f"blocks {foreign} are not of this pool of {len(self._used)}")
        twice = sorted({block for block in blocks if not self._used[block]} | _repeated(blocks))
        if twice:
            raise ValueError(f"blocks {twice} are freed twice")
        for block in blocks:
            self._used[block] = 0
        self._free.extend(reversed(blocks))

    def is_free(self, block: int) -> bool:
        """Whether the block is nobody's."""
        return not self._used[block]

    def check(self) -> None:
        """Raise AssertionError unless the list of free blocks is the set of unused ones."""
        free = sorted(self._free)
        unused = [block for block, used in enumerate(self._used) if not used]
        assert free == unused, f"free blocks {free} are not the unused ones {unused}"


def _repeated(blocks: Sequence[int]) -> set[int]:
    seen: set[int] = set()
    return {block for block in blocks if block in seen or seen.add(block)}  # type: ignore[func-returns-value]
