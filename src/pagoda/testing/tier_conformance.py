"""The conformance suite of tiers: every tier must pass it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda.base.metrics import Reason
from pagoda.keys import Namespace, derive_keys
from pagoda.slab.memory import aligned
from pagoda.tiers.base import Bytes, Chunk, Done, Tier

ONE = Namespace(model="conformance-one")
TWO = Namespace(model="conformance-two")


def _always() -> bool:
    return True


def keys_of(namespace: Namespace, count: int, start: int = 0) -> list[bytes]:
    """Return the keys of chunks [start, start + count) of one chain in a namespace."""
    chunks = [
        number.to_bytes(32, "little") for number in range(start, start + count)
    ]
    return derive_keys(chunks, namespace.root)


class TierConformance:
    """Subclass it in a test module, as `class TestMine(TierConformance)`, and write `make_tier`.

    A tier must hold at least `room_chunks` chunks, and as many in its queue; chunks of a few KiB
    keep the suite fast. It cannot hold more than `overfull_chunks`. `seconds` bounds every wait.
    Each test closes its tier.
    """

    room_chunks = 16
    overfull_chunks = 160
    seconds = 40.0

    def make_tier(self, tmp_path: Path) -> Tier:
        """Return a new empty tier; `tmp_path` is a directory for this test alone."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self, tmp_path: Path) -> Iterator[Tier]:
        """Open a tier that knows both namespaces; it is closed at the end."""
        tier = self.make_tier(tmp_path)
        try:
            tier.register(ONE)
            tier.register(TWO)
            yield tier
        finally:
            tier.close()

    def payload(self, tier: Tier, key: bytes) -> Bytes:
        """Return the bytes of the chunk `key`: (chunk_bytes,) uint8, page-aligned."""
        buffer = aligned(tier.chunk_bytes)
        rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
        buffer[:] = np.frombuffer(rng.bytes(tier.chunk_bytes), dtype=np.uint8)
        return buffer

    def chunk(
        self,
        tier: Tier,
        keys: Sequence[bytes],
        position: int,
        still_valid: Callable[[], bool] = _always,
    ) -> Chunk:
        """Return the chunk at `position` of the chain `keys`."""
        key = keys[position]
        parent = keys[position - 1] if position else None
        return Chunk(
            key, position, 4, self.payload(tier, key), parent, still_valid
        )

    def chunks(self, tier: Tier, keys: Sequence[bytes]) -> list[Chunk]:
        """Return all chunks of the chain `keys`."""
        return [self.chunk(tier, keys, position) for position in range(len(keys))]

    def saved(
        self, tier: Tier, keys: list[bytes], namespace: Namespace = ONE
    ) -> list[bytes]:
        """Save the chain `keys` and wait; all of it must be stored. Returns the keys."""
        assert all(
            done.ok
            for done in self.ends(
                tier.store(self.chunks(tier, keys), namespace.root)
            )
        )
        return keys

    def saving(
        self, tier: Tier, count: int
    ) -> tuple[list[bytes], list[Future[Done]]]:
        """Begin to save a chain of so many chunks; return its keys and the futures."""
        keys = keys_of(ONE, count)
        return keys, tier.store(self.chunks(tier, keys), ONE.root)

    def ends(self, futures: Sequence[Future[Done]]) -> list[Done]:
        """Return the results of these futures."""
        return [future.result(self.seconds) for future in futures]

    def loaded(
        self, tier: Tier, keys: Sequence[bytes], start: int = 0
    ) -> list[Bytes | None]:
        """Return what `load` delivers for the chain positions from `start` on; None if it was not
        ok.
        """
        buffers = self.buffers(tier, keys)
        futures = tier.load(keys, buffers, start=start, namespace=ONE.root)
        assert len(futures) == len(keys)
        ends = zip(self.ends(futures), buffers, strict=True)
        return [
            buffer[: tier.chunk_bytes] if done.ok else None
            for done, buffer in ends
        ]

    def buffers(self, tier: Tier, keys: Sequence[bytes]) -> list[Bytes]:
        """Return whole pages for one chunk of each key."""
        return [aligned(-(-tier.chunk_bytes // 4096) * 4096) for _ in keys]

    def put(self, tier: Tier, key: bytes, position: int = 0) -> bool:
        """Put the chunk `key`; return whether it is stored."""
        return tier.put(
            key, self.payload(tier, key), namespace=ONE.root, position=position
        )

    def holds(self, tier: Tier, key: bytes) -> bool:
        """Whether the chunk is in the tier, with the right bytes; wrong bytes fail the test at
        once.
        """
        found = tier.get(key)
        assert found is None or np.array_equal(found, self.payload(tier, key)), (
            "wrong bytes were served"
        )
        return found is not None

    # -- one chunk

    def test_it_is_a_tier(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            assert isinstance(tier, Tier)
            assert tier.name
            assert tier.chunk_bytes > 0
            tier.register(ONE)

    def test_a_run_is_stamped_admitted_and_flushed(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 4)
            stamp = tier.stamp()
            assert stamp <= tier.stamp()
            count, refused = tier.admit(
                keys, namespace=ONE.root, start=0, stamp=stamp
            )
            assert 0 <= count <= len(keys)
            assert refused == (count < len(keys))
            futures = tier.store(
                self.chunks(tier, keys)[:count], ONE.root, stamp=stamp
            )
            assert tier.flush(self.seconds)
            assert all(future.done() for future in futures)

    def test_an_empty_tier_has_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            (key,) = keys_of(ONE, 1)
            assert not tier.contains(key)
            assert tier.get(key) is None
            assert tier.match_prefix([key]) == 0
            assert tier.match_prefix([]) == 0
            assert tier.remove(key) is False
            assert not tier.in_flight(key)
            assert list(tier.holders(key)) == []
            assert tier.wait([key], self.seconds)
            assert list(tier.get_many([key])) == [None]
            assert tier.load([], [], namespace=ONE.root) == []
            assert tier.store([], ONE.root) == []

    def test_put_and_get(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            (key,) = keys_of(ONE, 1)
            assert (
                tier.put(
                    key, self.payload(tier, key), namespace=ONE.root, tokens=4
                )
                is True
            )
            assert tier.contains(key)
            assert self.holds(tier, key)

    def test_get_is_a_private_copy(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            (key,) = keys_of(ONE, 1)
            self.put(tier, key)
            mine = tier.get(key)
            assert mine is not None
            assert mine.shape == (tier.chunk_bytes,)
            mine[:] = 0
            assert self.holds(tier, key)

    def test_put_takes_a_copy(self, tmp_path: Path) -> None:
        for block in (True, False):
            with self.opened(tmp_path / str(block)) as tier:
                (key,) = keys_of(ONE, 1)
                payload = self.payload(tier, key)
                assert tier.put(key, payload, namespace=ONE.root, block=block)
                payload[:] = 0
                assert self.holds(tier, key)
                assert tier.wait([key], self.seconds)
                assert self.holds(tier, key)

    def test_what_is_on_its_way_is_read(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 4)
            for position, key in enumerate(keys):
                payload = self.payload(tier, key)
                assert tier.put(
                    key,
                    payload,
                    namespace=ONE.root,
                    position=position,
                    block=False,
                )
                assert tier.contains(key)
                assert tier.match_prefix(keys) == position + 1
                assert self.holds(tier, key)

    def test_put_again_keeps_the_room(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            again, *others = keys_of(ONE, self.room_chunks)
            for _ in range(3 * self.room_chunks):
                assert self.put(tier, again)
            for position, key in enumerate(others, 1):
                assert self.put(tier, key, position)
            assert tier.match_prefix([again, *others]) == self.room_chunks

    def test_remove(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            gone, stays = keys_of(ONE, 2)
            self.saved(tier, [gone, stays])
            assert tier.remove(gone) is True
            assert tier.remove(gone) is False
            assert not tier.contains(gone)
            assert not self.holds(tier, gone)
            assert tier.match_prefix([gone, stays]) == 0
            assert self.holds(tier, stays)
            assert self.put(tier, gone)
            assert self.holds(tier, gone)

    def test_remove_reaches_what_is_on_its_way(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys, futures = self.saving(tier, 6)
            assert tier.remove(keys[5]) is True
            self.ends(futures)
            assert tier.wait(keys, self.seconds)
            assert not tier.contains(keys[5])
            assert tier.match_prefix(keys) == 5

    def test_too_large_is_refused_and_counted(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put, saved = keys_of(ONE, 2)
            payload = np.zeros(2 * tier.chunk_bytes + 8192, dtype=np.uint8)
            assert tier.put(put, payload, namespace=ONE.root) is False
            (done,) = self.ends(
                tier.store([Chunk(saved, 0, 4, payload, None, _always)], ONE.root)
            )
            assert done == Done(False, Reason.TOO_LARGE)
            assert not tier.contains(put)
            assert not tier.contains(saved)
            assert tier.stats()["drop_too_large"] == 2

    def test_wrong_use_is_a_value_error(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            (key,) = keys_of(ONE, 1)
            small = np.zeros(tier.chunk_bytes - 1, dtype=np.uint8)
            for wrong in (
                lambda: tier.put(key, small, namespace=ONE.root),
                lambda: tier.store(
                    [Chunk(key, 0, 4, small, None, _always)], ONE.root
                ),
                lambda: tier.load([key], [small], namespace=ONE.root),
                lambda: tier.load([key], [], namespace=ONE.root),
            ):
                try:
                    wrong()
                except ValueError:
                    continue
                raise AssertionError(
                    "the wrong use should have raised a ValueError"
                )

    # -- runs

    def test_find_is_the_leading_run(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = self.saved(tier, keys_of(ONE, 6))
            assert tier.match_prefix(keys) == 6
            tier.remove(keys[3])
            assert tier.match_prefix(keys) == 3
            assert tier.match_prefix(keys[4:], start=4) == 2
            assert tier.match_prefix(keys[3:], start=3) == 0

    def test_match_each_goes_on_behind_holes(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 6)
            here = [False, True, True, False, True, False]
            for position, is_here in enumerate(here):
                if is_here:
                    assert self.put(tier, keys[position], position)
            assert tier.match_each(keys, namespace=ONE.root) == here
            rest = tier.match_each(keys[2:], start=2, namespace=ONE.root)
            assert rest == here[2:]
            assert tier.match_each([], namespace=ONE.root) == []
            tier.remove(keys[2])
            here[2] = False
            assert tier.match_each(keys, namespace=ONE.root) == here

    def test_touch_says_which_are_here_holes_notwithstanding(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 5)
            self.saved(tier, keys[:2])
            (done,) = self.ends(tier.store([self.chunk(tier, keys, 3)], ONE.root))
            assert done.ok
            assert tier.touch(keys, namespace=ONE.root) == [
                True,
                True,
                False,
                True,
                False,
            ]
            assert tier.touch(
                keys[2:], start=2, namespace=ONE.root, asked=False
            ) == [False, True, False]
            assert tier.touch([], namespace=ONE.root) == []
            assert tier.believed_seconds >= 0

    def test_touch_knows_what_is_on_its_way(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys, futures = self.saving(tier, self.room_chunks)
            assert tier.touch(keys, namespace=ONE.root) == [True] * len(keys)
            self.ends(futures)

    def test_save_and_load(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, self.room_chunks)
            futures = tier.store(self.chunks(tier, keys), ONE.root, stamp=None)
            assert len(futures) == len(keys)
            # a chunk that is being saved counts
            assert tier.match_prefix(keys) == len(keys)
            assert self.ends(futures) == [Done(True, None)] * len(keys)
            for key, found in zip(keys, self.loaded(tier, keys), strict=True):
                assert found is not None
                assert np.array_equal(found, self.payload(tier, key))
            assert all(
                found is not None
                for found in self.loaded(tier, keys[3:], start=3)
            )

    def test_load_what_was_just_saved(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys, futures = self.saving(tier, 8)
            for key, found in zip(keys, self.loaded(tier, keys), strict=True):
                assert found is not None
                assert np.array_equal(found, self.payload(tier, key))
            self.ends(futures)

    def test_load_of_what_is_absent_says_so(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = self.saved(tier, keys_of(ONE, 4))
            tier.remove(keys[2])
            buffers = self.buffers(tier, keys)
            ends = self.ends(tier.load(keys, buffers, namespace=ONE.root))
            assert [done.ok for done in ends[:3]] == [True, True, False]
            assert ends[2].reason is not None

    def test_a_put_that_blocks_returns_when_it_has_ended(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            for key in keys_of(ONE, self.room_chunks // 2):
                payload = self.payload(tier, key)
                assert tier.put(key, payload, namespace=ONE.root)
                assert not tier.in_flight(key), (
                    "put returned before the chunk was stored"
                )
                payload[:] = 0  # which belongs to the caller again
                assert self.holds(tier, key)

    def test_what_was_asked_for_wrongly_is_a_miss_and_stays(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            keys = self.saved(tier, keys_of(ONE, 4))
            for namespace, start in ((TWO.root, 0), (ONE.root, 7)):
                buffers = self.buffers(tier, keys)
                ends = self.ends(
                    tier.load(keys, buffers, start=start, namespace=namespace)
                )
                assert not any(done.ok for done in ends)
                assert all(done.reason is not None for done in ends)
            assert tier.get(keys[0], namespace=TWO.root) is None
            assert tier.match_prefix(keys) == 4
            assert all(found is not None for found in self.loaded(tier, keys))

    def test_saving_again_is_ok(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 3)
            for _ in range(3):
                self.saved(tier, keys)
            assert tier.match_prefix(keys) == 3

    def test_what_is_no_longer_valid_never_appears(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 3)
            (never,) = self.ends(
                tier.store([self.chunk(tier, keys, 0, lambda: False)], ONE.root)
            )
            assert never.ok is False
            assert never.reason is not None
            assert not tier.contains(keys[0])
            self.saved(tier, keys)

    def test_bytes_that_change_on_their_way_never_appear(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            (key,) = keys_of(ONE, 1)
            payload = self.payload(tier, key)
            asked: list[bool] = []

            # true once; afterwards the bytes are those of another chunk
            def still_valid() -> bool:
                asked.append(not asked)
                payload[:] = 0
                return asked[-1]

            (done,) = self.ends(
                tier.store(
                    [Chunk(key, 0, 4, payload, None, still_valid)], ONE.root
                )
            )
            # a tier that copied before it asked has the right bytes
            assert self.holds(tier, key) is done.ok

    def test_wait(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 8)
            tier.store(self.chunks(tier, keys), ONE.root)
            assert tier.wait(iter(keys), self.seconds)
            assert not any(tier.in_flight(key) for key in keys)
            assert all(tier.contains(key) for key in keys)

    def test_put_many_counts_what_is_there(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 6)
            good = (self.chunk(tier, keys, position) for position in range(5))
            bad = self.chunk(tier, keys, 5, lambda: False)
            assert (
                tier.put_many(itertools.chain(good, [bad]), namespace=ONE.root)
                == 5
            )
            assert tier.match_prefix(keys) == 5
            assert tier.put_many([], namespace=ONE.root) == 0

    def test_get_many_is_in_order_and_lazy(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, 5)
            self.saved(tier, keys)
            tier.remove(keys[2])
            found_many = tier.get_many(_endless(keys))
            for key, found in itertools.islice(
                zip(_endless(keys), found_many, strict=True), 12
            ):
                assert (found is None) == (key == keys[2])
                assert found is None or np.array_equal(
                    found, self.payload(tier, key)
                )

    def test_full_is_a_value_and_never_wrong(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, self.overfull_chunks)
            for key in keys:
                assert self.put(tier, key) in (True, False)
            assert (
                sum(self.holds(tier, key) for key in keys)
                >= self.room_chunks // 2
            )

    # -- namespaces, threads, the end

    def test_clear_of_one_namespace_leaves_the_other(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as tier:
            ones = keys_of(ONE, 4)
            twos = keys_of(TWO, 4)
            self.saved(tier, ones, ONE)
            self.saved(tier, twos, TWO)
            assert tier.clear(ONE.root) == 4
            assert not any(tier.contains(key) for key in ones)
            assert tier.match_prefix(twos) == 4
            assert all(self.holds(tier, key) for key in twos)
            self.saved(tier, ones, ONE)
            assert tier.clear() == 8
            assert not any(self.holds(tier, key) for key in [*ones, *twos])
            assert tier.clear() == 0

    def test_clear_reaches_what_is_on_its_way(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys, futures = self.saving(tier, 12)
            tier.clear(ONE.root)
            self.ends(futures)
            assert tier.wait(keys, self.seconds)
            assert not any(
                tier.contains(key) or self.holds(tier, key) for key in keys
            )

    def test_stats_are_numbers(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            self.saved(tier, keys_of(ONE, 3))
            stats = tier.stats()
            assert all(
                isinstance(name, str) and isinstance(number, int)
                for name, number in stats.items()
            )
            assert stats["stored_chunks"] == 3

    def test_threads(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys = keys_of(ONE, self.room_chunks // 2)
            wrong: list[Exception] = []

            def work(seed: int) -> None:
                rng = np.random.default_rng(seed)
                try:
                    for position in rng.integers(0, len(keys), 40).tolist():
                        self.act(tier, keys, position, int(rng.integers(0, 4)))
                except Exception as error:  # noqa: BLE001
                    # raised again by the test's own thread
                    wrong.append(error)

            threads = [
                threading.Thread(target=work, args=(seed,), daemon=True)
                for seed in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(self.seconds)
            assert not any(thread.is_alive() for thread in threads)
            if wrong:
                raise wrong[0]

    def act(
        self, tier: Tier, keys: Sequence[bytes], position: int, what: int
    ) -> None:
        """Do one of four operations on one chunk."""
        key = keys[position]
        if what == 0:
            self.put(tier, key, position)
        elif what == 1:
            self.ends(tier.store([self.chunk(tier, keys, position)], ONE.root))
        elif what == 2:
            self.holds(tier, key)
        else:
            tier.remove(key)

    def test_close_is_bounded_and_final(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            keys, futures = self.saving(tier, 12)
            begin = time.monotonic()
            tier.close(timeout=self.seconds)
            tier.close()
            assert time.monotonic() - begin < 2 * self.seconds
            assert all(future.done() for future in futures)
            self.is_closed(tier, keys)

    def is_closed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Check that a closed tier finds nothing and ends every call with CLOSED, without an
        exception.
        """
        assert tier.match_prefix(keys) == 0
        assert tier.touch(keys, namespace=ONE.root) is None
        assert not tier.contains(keys[0])
        assert tier.get(keys[0]) is None
        assert self.put(tier, keys[0]) is False
        (saved,) = self.ends(tier.store([self.chunk(tier, keys, 0)], ONE.root))
        assert saved == Done(False, Reason.CLOSED)
        (loaded,) = self.ends(
            tier.load(keys[:1], [self.payload(tier, keys[0])], namespace=ONE.root)
        )
        assert loaded == Done(False, Reason.CLOSED)


def _endless(keys: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the keys backwards, for ever: only a lazy consumer ends."""
    return itertools.cycle([*reversed(keys)])
