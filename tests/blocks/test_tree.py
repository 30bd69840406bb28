"""The prefix tree: what is found, what is evicted first, what a lock protects; all compared with a
naive model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from pagoda.blocks import Place
from pagoda.blocks.tree import Node, Tree, upward

ROOT = bytes(32)


def keys_of(path: Sequence[int]) -> list[bytes]:
    """Chained keys: the same path has the same keys."""
    return [blake3(bytes(path[: i + 1])).digest() for i in range(len(path))]


def grown(tree: Tree, path: Sequence[int], first_block: int) -> Node:
    """Enter what the tree lacks of a path, as a request that is still locked."""
    keys = keys_of(path)
    found = tree.path(keys_of(path))
    tip = found[-1] if found else None
    if tip is not None:
        tree.lock(tip)
    for i in range(len(found), len(keys)):
        tip = tree.insert(keys[i], ROOT, tip, first_block + i)
    assert tip is not None
    tree.check()
    return tip


def used(tree: Tree, path: Sequence[int], first_block: int) -> Node:
    """The same, as a request that has ended."""
    tip = grown(tree, path, first_block)
    assert tree.unlock(tip, tree.now()) == []
    tree.check()
    return tip


def evicted(tree: Tree, count: int) -> list[int]:
    """Evict and forget at once; the blocks in the order of their going."""
    blocks = tree.remove_evicted(tree.evict(count))
    tree.check()
    return blocks


def test_leaves_go_first_and_the_oldest_of_them() -> None:
    tree = Tree()
    used(tree, [1, 2, 3], 10)
    used(tree, [1, 2, 4], 20)
    used(tree, [5], 30)
    used(tree, [1, 2, 3], 10)  # again: younger than all
    assert tree.evictable == 5
    assert evicted(tree, 1) == [22]  # a leaf, though its parent is no younger
    assert evicted(tree, 1) == [30]
    # a parent becomes a candidate when its last child was removed
    assert evicted(tree, 9) == [12, 11, 10]
    assert tree.evict(1) == []
    assert tree.evictable == 0
    assert not tree.nodes


def test_a_parent_has_been_used_when_its_child_was() -> None:
    tree = Tree()
    used(tree, [1], 10)
    used(tree, [2], 20)
    tip = used(tree, [1, 3], 10)  # the path through [1] is younger than [2]
    # and remains so although this end of it was removed
    assert tree.remove(tip) == 11
    assert evicted(tree, 2) == [20, 10]


def test_one_child_that_stays_keeps_its_parent() -> None:
    tree = Tree()
    used(tree, [1, 2], 10)
    tip = grown(tree, [1, 3], 20)
    assert evicted(tree, 9) == [11]
    assert tree.evictable == 0
    tree.unlock(tip, tree.now())
    assert evicted(tree, 9) == [21, 10]


def test_locks_climb_and_end() -> None:
    tree = Tree()
    tip = used(tree, [1, 2, 3], 10)
    tree.lock(tip)
    tree.lock(tip)
    assert [node.locks for node in upward(tip)] == [2, 1, 1]
    assert tree.evict(9) == []
    assert tree.evictable == 0
    tree.unlock(tip, tree.now())
    assert tree.evict(9) == []
    tree.unlock(tip, tree.now())
    assert [node.locks for node in upward(tip)] == [0, 0, 0]
    tree.check()
    assert evicted(tree, 9) == [12, 11, 10]


def test_a_child_that_leaves_is_found_until_it_has_gone_and_may_be_called_back() -> (
    None
):
    tree = Tree()
    tip = used(tree, [1, 2], 10)
    assert tree.evict(1) == [tip]
    assert tip.place is Place.TO_HOST
    assert tree.evict(1) == [tip.parent]  # its only child does not count any more
    keys = keys_of([1, 2])
    path = tree.path(keys)
    assert [node.block for node in path] == [10, 11]
    for node in path:
        tree.cancel_eviction(node)
    tree.check()
    assert [node.place for node in path] == [Place.DEVICE] * 2
    assert tree.evicting == 0
    assert evicted(tree, 1) == [11]  # leaf first, as before
    assert [node.block for node in tree.path(keys)] == [10]


def test_a_leaving_child_is_out_of_reach_when_its_parent_has_gone_before() -> (
    None
):
    tree = Tree()
    tip = used(tree, [1, 2], 10)
    leaving = tree.evict(2)
    assert tree.remove_evicted([leaving[1]]) == [10]
    assert tree.path(keys_of([1, 2])) == []
    again = grown(tree, [1], 30)  # another node of the same key is not its parent
    assert tree.path(keys_of([1, 2])) == [again]
    # and another child takes the key over
    other = tree.insert(tip.key, ROOT, again, 40)
    tree.check()
    assert tree.remove_evicted([tip]) == [11]
    assert tree.path(keys_of([1, 2])) == [again, other]
    tree.check()


def test_what_comes_is_found_but_never_evicted() -> None:
    tree = Tree()
    tip = used(tree, [1], 10)
    nodes = tree.insert_loading(
        keys_of([1, 2, 3])[1:], ROOT, tip, [21, 22], ticket=7
    )
    tree.check()
    assert [(node.place, node.ticket, node.position) for node in nodes] == [
        (Place.TO_DEVICE, 7, 1),
        (Place.TO_DEVICE, 7, 2),
    ]
    assert tree.path(keys_of([1, 2, 3])) == [tip, *nodes]
    assert tree.evict(9) == []
    assert tree.evictable == 0
    tree.finish_loading(nodes)
    tree.check()
    assert tree.evict(9) == []  # locked by the move still
    tree.unlock(nodes[-1], 0)
    assert evicted(tree, 9) == [22, 21, 10]


def test_what_does_not_come_is_no_node() -> None:
    tree = Tree()
    tip = used(tree, [1], 10)
    nodes = tree.insert_loading(
        keys_of([1, 2, 3, 4])[1:], ROOT, tip, [21, 22, 23], ticket=7
    )
    tree.finish_loading(nodes[:1])
    tree.unlock(nodes[-1], 0)
    tree.remove_loading(nodes[1:])
    tree.check()
    assert tree.path(keys_of([1, 2, 3, 4])) == [tip, nodes[0]]
    assert nodes[2].place is Place.FREED
    assert evicted(tree, 9) == [21, 10]


def test_clear_frees_what_nobody_needs_and_the_rest_with_its_last_lock() -> None:
    tree = Tree()
    tip = grown(tree, [1, 2], 10)
    used(tree, [1, 3], 20)
    tree.lock(tip)
    assert tree.clear() == [21]
    tree.check()
    assert tree.detached == 2
    assert tree.on_device == 0
    assert tree.locked == 0
    assert tree.evictable == 0
    assert tree.path(keys_of([1, 2])) == []
    assert tree.evict(9) == []
    other = used(tree, [1, 2], 30)  # the same keys again are other nodes
    assert tree.remove(tip) is None
    assert tree.unlock(tip, tree.now()) == []
    assert tree.unlock(tip, tree.now()) == [11, 10]
    assert tree.detached == 0
    assert tree.path(keys_of([1, 2]))[-1] is other
    tree.check()


def test_drop_takes_one_leaf_that_nobody_needs() -> None:
    tree = Tree()
    tip = grown(tree, [1, 2], 10)
    assert tip.parent is not None
    assert tree.remove(tip) is None
    tree.unlock(tip, tree.now())
    assert tree.remove(tip.parent) is None
    assert tree.remove(tip) == 11
    assert tip.place is Place.FREED
    assert tree.remove(tip) is None
    assert tree.remove(tip.parent) == 10
    tree.check()


@pytest.mark.slow
def test_the_heap_stays_bounded_whatever_is_used_again_and_again() -> None:
    tree = Tree()
    most = 0
    for path in range(50):
        used(tree, [path, 1], path * 2)
    for step in range(5_000):  # some four times what the heap may hold
        tip = grown(tree, [step % 50, 1], 0)
        tree.unlock(tip, tree.now())
        most = max(most, len(tree._heap))
    assert most <= 2 * 50 + 1024 + 1
    tree.check()
    order = tree.remove_evicted(tree.evict(100))
    # the stale entries had no effect
    assert order[:4] == [1, 0, 3, 2]
    assert len(order) == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, tip: setattr(tree, "on_device", tree.on_device + 1),
        lambda tree, tip: setattr(tip, "locks", 1),
        lambda tree, tip: setattr(tip.parent, "children", 0),
        lambda tree, tip: setattr(tip, "entry", 0),
        lambda tree, tip: tree._heap.clear(),
        lambda tree, tip: tree.nodes.pop(tip.parent.key),
    ],
    ids=["counts", "locks", "children", "candidate", "heap", "prefix-closed"],
)
def test_check_notices_a_damaged_tree(damage: object) -> None:
    tree = Tree()
    tip = used(tree, [1, 2], 10)
    tree.check()
    damage(tree, tip)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        tree.check()


# ---- against a naive model


@dataclass
class Model:
    """Every node by its path; everything else is found by looking at all of them."""

    place: dict[tuple[int, ...], Place] = field(default_factory=dict)
    # the last use of a path through it
    use: dict[tuple[int, ...], int] = field(default_factory=dict)
    tips: list[tuple[int, ...]] = field(default_factory=list)  # one a request
    # the end of the moves that load something
    moves: list[tuple[int, ...]] = field(default_factory=list)
    blocks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def found(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The leading nodes of a path."""
        heads = [path[: i + 1] for i in range(len(path))]
        missing = next(
            (i for i, head in enumerate(heads) if head not in self.place),
            len(heads),
        )
        return heads[:missing]

    def locked(self, path: tuple[int, ...]) -> bool:
        """Whether a lock is on it or below it."""
        return any(tip[: len(path)] == path for tip in self.tips + self.moves)

    def kept(self, path: tuple[int, ...]) -> bool:
        """Whether it has a child that stays."""
        return any(
            len(other) == len(path) + 1
            and other[:-1] == path
            and place is not Place.TO_HOST
            for other, place in self.place.items()
        )

    def leaves(self) -> list[tuple[int, ...]]:
        """Return the nodes that may be evicted now."""
        return [
            path
            for path, place in self.place.items()
            if place is Place.DEVICE
            and not self.locked(path)
            and not self.kept(path)
        ]

    def evictable(self) -> int:
        """Return how many could be evicted, one after the other."""
        return sum(
            place is Place.DEVICE and not self.locked(path)
            for path, place in self.place.items()
        )

    def was_used(self, path: tuple[int, ...], now: int) -> None:
        """A path was used: all of it."""
        for i in range(len(path)):
            self.use[path[: i + 1]] = max(now, self.use.get(path[: i + 1], 0))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.one_of(
    st.tuples(st.just("begin"), paths),
    st.tuples(st.just("begin"), paths),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(0, 4)),
    st.tuples(st.just("gone"), st.integers(0, 9)),
    st.tuples(st.just("bring"), paths),
    st.tuples(st.just("landed"), st.integers(0, 5)),
    st.tuples(st.just("drop"), paths),
    st.tuples(st.just("clear"), st.just(())),
)


class Twins:
    """A tree and its model, which do the same."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.model = Model()
        self.now = self.block = 0
        self.leaving: list[Node] = []
        self.paths: dict[bytes, tuple[int, ...]] = {}
        self.coming: list[tuple[tuple[int, ...], list[Node]]] = []
        self.locks: list[Node] = []
        self.detached: list[tuple[int, ...]] = []

    def new(self, path: tuple[int, ...], place: Place) -> int:
        """Note a node in the model; its block."""
        self.block += 1
        self.model.place[path], self.model.blocks[path] = place, self.block
        self.model.use[path] = 0
        self.model.was_used(path, self.now)
        self.paths[keys_of(path)[-1]] = path
        return self.block

    def hit(self, path: tuple[int, ...]) -> Node | None:
        """Find a path, call back what leaves on it, lock its end."""
        heads = self.model.found(path)
        nodes = self.tree.path(keys_of(path))
        assert [node.block for node in nodes] == [
            self.model.blocks[head] for head in heads
        ]
        for head, node in zip(heads, nodes, strict=True):
            if node.place is Place.TO_HOST:
                self.tree.cancel_eviction(node)
                self.leaving.remove(node)
                self.model.place[head] = Place.DEVICE
        if not nodes:
            return None
        self.tree.lock(nodes[-1])
        return nodes[-1]

    def begin(self, path: tuple[int, ...]) -> None:
        """A request that hits what there is, and computes the rest if nothing of it is on its
        way.
        """
        found = len(self.model.found(path))
        tip = self.hit(path)
        if tip is None or tip.place is Place.DEVICE:
            for i in range(found, len(path)):
                block = self.new(path[: i + 1], Place.DEVICE)
                tip = self.tree.insert(keys_of(path)[i], ROOT, tip, block)
        else:
            path = path[:found]
        assert tip is not None
        self.locks.append(tip)
        self.model.tips.append(path)

    def end(self, which: int) -> None:
        """One of the requests ends."""
        if not self.locks:
            return
        tip = self.locks.pop(which % len(self.locks))
        path = self.model.tips.pop(which % len(self.model.tips))
        self.now = self.tree.now()
        freed = self.tree.unlock(tip, self.now)
        if path in self.model.place and self.model.blocks[path] == tip.block:
            assert freed == []
            self.model.was_used(path, self.now)

    def evict(self, count: int) -> None:
        """Each evicted node is, at its turn, a leaf, and no leaf is older."""
        chosen = self.tree.evict(count)
        for node in chosen:
            path = self.paths[node.key]
            leaves = self.model.leaves()
            assert path in leaves
            assert self.model.use[path] == min(
                self.model.use[leaf] for leaf in leaves
            )
            self.model.place[path] = Place.TO_HOST
        assert len(chosen) == count or not self.model.leaves()
        self.leaving += chosen

    def gone(self, which: int) -> None:
        """Some evicted nodes have left the tree; nodes below them are unreachable and leave with
        them.
        """
        if self.leaving:
            path = self.paths[self.leaving[which % len(self.leaving)].key]
            going = [
                node
                for node in self.leaving
                if self.paths[node.key][: len(path)] == path
            ]
            assert self.tree.remove_evicted(going) == [
                node.block for node in going
            ]
            for node in going:
                self.leaving.remove(node)
                del self.model.place[self.paths[node.key]]

    def bring(self, path: tuple[int, ...]) -> None:
        """What is missing of a path is to come, if the path is there to wait for it."""
        found = len(self.model.found(path))
        if found < len(path):
            parent = self.hit(path[:found]) if found else None
            blocks = [
                self.new(path[: i + 1], Place.TO_DEVICE)
                for i in range(found, len(path))
            ]
            nodes = self.tree.insert_loading(
                keys_of(path)[found:], ROOT, parent, blocks, ticket=1
            )
            if parent is not None:
                self.tree.unlock(parent, 0)
            self.model.moves.append(path)
            self.coming.append((path, nodes))

    def landed(self, good: int) -> None:
        """The first move ends; what it did not bring is dropped unless another request waits for
        it.
        """
        if not self.coming:
            return
        _, nodes = self.coming.pop(0)
        self.model.moves.pop(0)
        lost = [self.paths[node.key] for node in nodes[good:]]
        below = (
            p
            for p in self.model.place
            for q in lost
            if p[: len(q)] == q and p not in lost
        )
        if any(self.model.locked(q) for q in lost) or any(below):
            good = len(nodes)
        self.tree.finish_loading(nodes[:good])
        for node in nodes[:good]:
            self.model.place[self.paths[node.key]] = Place.DEVICE
        assert self.tree.unlock(nodes[-1], 0) == []
        if good < len(nodes):
            self.tree.remove_loading(nodes[good:])
            for node in nodes[good:]:
                del self.model.place[self.paths[node.key]]

    def drop(self, path: tuple[int, ...]) -> None:
        """A leaf is taken out, if it is one."""
        if path in self.model.place:
            may = path in self.model.leaves()
            block = self.tree.remove(self.tree.nodes[keys_of(path)[-1]])
            assert block == (self.model.blocks[path] if may else None)
            if may:
                del self.model.place[path]

    def clear(self, _: object) -> None:
        """With no moves under way everything is forgotten; what is locked is freed with the
        locks.
        """
        if self.leaving or self.coming:
            return
        model = self.model
        free = {
            model.blocks[path] for path in model.place if not model.locked(path)
        }
        rest = {model.blocks[path] for path in model.place if model.locked(path)}
        assert set(self.tree.clear()) == free
        freed = [
            block
            for tip in self.locks
            for block in self.tree.unlock(tip, self.tree.now())
        ]
        assert sorted(freed) == sorted(rest)
        self.locks = []
        self.model = Model()

    def check(self) -> None:
        """Both are in the same state."""
        self.tree.check()
        assert len(self.tree.nodes) == len(self.model.place)
        for path, place in self.model.place.items():
            node = self.tree.nodes[keys_of(path)[-1]]
            assert node.place == place
            assert node.block == self.model.blocks[path]
            assert bool(node.locks) == self.model.locked(path)
        assert self.tree.evictable == self.model.evictable()
        counts = [
            sum(p is place for p in self.model.place.values()) for place in Place
        ]
        there = dict(zip(Place, counts, strict=True))
        assert self.tree.on_device == there[Place.DEVICE]
        assert self.tree.loading == there[Place.TO_DEVICE]
        assert self.tree.evicting == there[Place.TO_HOST] == len(self.leaving)


@given(st.lists(steps, min_size=5, max_size=60))
def test_the_tree_is_its_naive_model(script: list[tuple[str, object]]) -> None:
    twins = Twins()
    for name, argument in script:
        getattr(twins, name)(argument)
        twins.check()
