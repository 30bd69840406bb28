"""Persistent prefixes: what a person wants to stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.blocks.outcome import Place
from pagoda.blocks.rooms import Rooms
from pagoda.blocks.tree import Node

__all__ = ["Pins"]


class Pins:
    """Locks that belong to no request. Not thread-safe."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._by_key: dict[bytes, list[Node]] = {}  # the last node of each pinned prefix, once a pin

    def nodes(self) -> list[Node]:
        """The last node of each pinned prefix."""
        return [node for nodes in self._by_key.values() for node in nodes]

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep the leading keys that are on the device there; returns how many."""
        path = self._rooms.tree.path(keys)
        self._rooms.call_back(path)
        while path and path[-1].place is not Place.DEVICE:
            path.pop()
        if path:
            self._rooms.tree.lock(path[-1])
            self._by_key.setdefault(path[-1].key, []).append(path[-1])
        return len(path)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """End the longest pin on a prefix of `keys`; returns its length. ValueError if there is none."""
        key = next((key for key in reversed(keys) if key in self._by_key), None)
        if key is None:
            raise ValueError("no prefix of these tokens is pinned")
        node = self._by_key[key].pop()
        if not self._by_key[key]:
            del self._by_key[key]
        self._rooms.unlock(node, self._rooms.tree.now())
        return node.position + 1

    def clear(self) -> None:
        """End all pins."""
        for node in self.nodes():
            self._rooms.unlock(node)
        self._by_key.clear()
