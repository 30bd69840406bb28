"""Persistent prefixes: what a person wants to stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.blocks.outcome import Place
from pagoda.blocks.rooms import Rooms
from pagoda.blocks.tree import Node

__all__ = ["Pins"]


class Pins:
    """Locks that belong to no request. Not thread-safe.

    A prefix is pinned by its keys, and unpinned by its names: keys under a root that new weights leave as it is.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._by_name: dict[bytes, list[Node]] = {}  # the last node of each pinned prefix, once a pin

    def nodes(self) -> list[Node]:
        """The last node of each pinned prefix."""
        return [node for nodes in self._by_name.values() for node in nodes]

    def pin(self, keys: Sequence[bytes], names: Sequence[bytes]) -> int:
        """Keep the leading keys that are on the device there; returns how many."""
        path = self._rooms.tree.path(keys)
        self._rooms.call_back(path)
        while path and path[-1].place is not Place.DEVICE:
            path.pop()
        if path:
            self._rooms.tree.lock(path[-1])
            self._by_name.setdefault(names[len(path) - 1], []).append(path[-1])
        return len(path)

    def unpin(self, names: Sequence[bytes]) -> int:
        """End the longest pin on a prefix of `names`; returns its length. ValueError if there is none."""
        name = next((name for name in reversed(names) if name in self._by_name), None)
        if name is None:
            raise ValueError("no prefix of these tokens is pinned")
        node = self._by_name[name].pop()
        if not self._by_name[name]:
            del self._by_name[name]
        self._rooms.unlock(node, self._rooms.tree.now())
        return node.position + 1

    def clear(self) -> None:
        """End all pins."""
        for node in self.nodes():
            self._rooms.unlock(node)
        self._by_name.clear()
