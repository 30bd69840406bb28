"""The whole cache over remote stores: what one machine computed another serves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagoda import codec
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.config.remote_urls import parse
from pagoda.keys import Namespace
from testbed.patience import wait_until
from testbed.servers import BUCKET, Server, redis_server
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    blank,
    config_of,
    counters_of,
    hit_of,
    keys_of,
    kv_of,
    prompt,
    put,
    run_all,
    served,
    stored,
)
from tests.remote.chunks import fresh_prefix, soon
from tests.remote.proxy import Fault, proxy_to
from tests.remote.redis_kit import redis_client

PATIENT = "deadline=30s&look=30s"
TENANT = {"salt": "a tenant"}


@pytest.fixture
def url(server: Server) -> str:
    """A Redis in which this test has a separate prefix."""
    return f"{server.url}/0?prefix={fresh_prefix()}&{PATIENT}"


@contextmanager
def cache_over(
    remote: str | list[str],
    host: Path | None,
    disk: Path | None = None,
    namespace: Namespace = NAMESPACE,
    **options: object,
) -> Iterator[Cache]:
    """An open cache with a remote tier, closed afterwards."""
    config = config_of(host, disk, remote=remote, **options)
    with Cache(config, namespace=namespace, layout=LAYOUT) as cache:
        yield cache


# ---- one machine


def test_one_line_adds_a_tier(shm_root: Path, tmp_path: Path, url: str) -> None:
    with cache_over(url, shm_root, tmp_path) as cache:
        assert cache.tiers == ("host", "disk", "redis")
        stored(cache, prompt(10))
        for tier in cache.tiers:
            assert hit_of(cache, prompt(10), tiers=[tier]).by_tier == {tier: 160}


def test_the_remote_tier_serves_what_the_others_have_lost(
    shm_root: Path, tmp_path: Path, url: str
) -> None:
    tokens = prompt(10)
    with cache_over(url, shm_root / "before", tmp_path / "before") as cache:
        stored(cache, tokens)
    with cache_over(url, shm_root / "after", tmp_path / "after") as cache:
        assert cache.lookup(tokens, counted=False).by_tier == {"redis": 160}
        assert hit_of(cache, tokens).by_tier == {"redis": 160}
        # it was loaded during the call
        assert hit_of(cache, tokens).by_tier == {"host": 160}
        assert counters_of(cache)["hit_tokens_remote"] == 160


def test_one_run_from_three_tiers(
    shm_root: Path, tmp_path: Path, url: str
) -> None:
    tokens = prompt(12)
    with cache_over(url, shm_root / "1", tmp_path / "1") as cache:
        stored(cache, tokens)
    with cache_over(
        url, shm_root / "2", tmp_path / "2", write_policy="write_through"
    ) as cache:
        head = tokens[: 8 * CHUNK]
        put(cache, head, tiers=["disk"])
        assert cache.flush(100)
        head = tokens[: 4 * CHUNK]
        put(cache, head, tiers=["host"])
        hit, _ = served(cache, tokens)
        assert hit.by_tier == {"host": 64, "disk": 64, "redis": 64}


def test_a_store_is_asked_once_for_what_is_behind_holes(
    shm_root: Path, server: Server, url: str
) -> None:
    tokens = prompt(16)
    gone = {0, 3, 4, 9, 11}
    with cache_over(url, None) as cache:
        stored(cache, tokens)
        keys = keys_of(cache, tokens)
        for at in gone:
            cache._tiers.lower[0].remove(keys[at])
    with cache_over(url, shm_root) as cache:
        with redis_client(server) as truth:
            truth.config_resetstat()
            kv = blank(tokens)
            hit = cache.retrieve(tokens, kv.transfer, pieces=True)
            asked = truth.info("commandstats")["cmdstat_exists"]["calls"]
        assert hit.loaded == 11 * CHUNK
        right = kv_of(tokens)
        for start, stop in hit.runs():
            assert kv.same(right, start // CHUNK, stop // CHUNK)
        # for the leading part, for the others, and to prove that a connection works
        assert asked < 3 * 16
        # and now the host tier has them
        again = cache.lookup(tokens, pieces=True)
        assert {piece.tier for piece in again.pieces} == {"host"}
        assert again.loaded == hit.loaded


def test_a_store_that_does_not_answer_is_not_asked_again(
    shm_root: Path,
) -> None:
    """What the host tier has behind the hole is used all the same."""
    tokens = prompt(8)
    with redis_server() as silent:
        remote = f"{silent.url}/0?prefix={fresh_prefix()}&look=50ms"
        with cache_over(remote, shm_root) as cache:
            stored(cache, tokens)
            host, redis = cache._tiers.all
            host.remove(keys_of(cache, tokens)[2])
            redis._store.presence.clear()  # type: ignore[attr-defined]
            silent.stop()
            kv = blank(tokens)
            hit = cache.retrieve(tokens, kv.transfer, pieces=True)
            asked = len(redis._store.queries._unanswered)  # type: ignore[attr-defined]
            silent.cont()
        assert hit.reason is Reason.DEADLINE
        assert hit.runs() == [(0, 2 * CHUNK), (3 * CHUNK, 8 * CHUNK)]
        assert asked == 1


def test_a_request_may_skip_tiers(
    shm_root: Path, tmp_path: Path, url: str
) -> None:
    tokens = prompt(4)
    with cache_over(url, shm_root, tmp_path) as cache:
        put(cache, tokens, tiers=["host", "disk"])
        assert cache.flush(100)
        assert hit_of(cache, tokens, tiers=["redis"]).num_tokens == 0
        stored(cache, prompt(4, 1))
        assert served(cache, prompt(4, 1), tiers=["disk", "redis"])[
            0
        ].by_tier == {"disk": 64}
        with pytest.raises(ValueError, match="no tier 's3'"):
            cache.lookup(tokens, tiers=["s3"])


def test_a_remote_tier_alone(url: str) -> None:
    tokens = prompt(20)
    with cache_over(url, None) as cache:
        assert cache.tiers == ("redis",)
        stored(cache, tokens)
        hit, _ = served(cache, tokens)
        assert hit.by_tier == {"redis": 320}
        assert hit.reason is None
        assert put(cache, tokens).present == 20
        assert cache.stats()["staging_buffers"] == 0
        longer = prompt(25)
        assert hit_of(cache, longer).num_tokens == 320


def test_a_header_names_the_chunk_before_it(
    shm_root: Path, server: Server, url: str
) -> None:
    """`pagoda warm` needs that."""
    tokens = prompt(4)
    truth = redis_client(server)
    with cache_over(url, shm_root) as cache:
        stored(cache, tokens)
        keys = keys_of(cache, tokens)
    pages = [
        truth.hget(name, "h")
        for name in truth.scan_iter(f"{parse(url).prefix}:*")
    ]
    found = sorted(
        (page.position, page.parent) for page in map(codec.parse, pages)
    )  # type: ignore[arg-type,union-attr]
    assert found == list(enumerate([b"", *keys[:3]]))


def test_compressed_and_plain_chunks_in_one_store(
    shm_root: Path, url: str
) -> None:
    with cache_over(url + "&codec=zstd", shm_root / "1") as cache:
        stored(cache, prompt(4))
    with cache_over(url, shm_root / "2") as cache:
        assert hit_of(cache, prompt(4)).by_tier == {"redis": 64}
        stored(cache, prompt(4, 1))
    with cache_over(url + "&codec=zstd", shm_root / "3") as cache:
        assert hit_of(cache, prompt(4, 1)).by_tier == {"redis": 64}


def test_two_remote_tiers_are_filled_and_asked(shm_root: Path, url: str) -> None:
    far = url.replace("prefix=", "name=far&prefix=far-")
    with cache_over([url, far], shm_root / "1") as cache:
        assert cache.tiers == ("host", "redis", "far")
        stored(cache, prompt(4))
    with cache_over([url, far], shm_root / "2") as cache:
        cache.clear()
        stored(cache, prompt(4, 1))
        assert hit_of(cache, prompt(4, 1), tiers=["far"]).by_tier == {"far": 64}


def test_a_prompt_is_brought_up_before_it_is_asked_for(
    shm_root: Path, url: str
) -> None:
    with cache_over(url, shm_root / "before") as cache:
        stored(cache, prompt(10))
    with cache_over(url, shm_root / "after") as cache:
        assert cache.prefetch(prompt(10)).result(60).by_tier == {"redis": 160}
        assert hit_of(cache, prompt(10)).by_tier == {"host": 160}


def test_what_was_not_there_is_found_soon_after_it_came(
    shm_root: Path, url: str
) -> None:
    """A chunk that is known to be absent is not requested again for a moment, and only for a
    moment.
    """
    with (
        cache_over(url, shm_root / "1") as one,
        cache_over(url, shm_root / "2") as two,
    ):
        assert hit_of(two, prompt(4)).num_tokens == 0
        stored(one, prompt(4))
        wait_until(lambda: hit_of(two, prompt(4)).num_tokens == 64, 20)


def test_a_server_that_forgets_is_filled_again(
    shm_root: Path, server: Server, url: str
) -> None:
    truth = redis_client(server)
    prefix = url.split("prefix=")[1].split("&")[0]
    with cache_over(url, shm_root / "1") as cache:
        stored(cache, prompt(6))
        for name in truth.scan_iter(f"{prefix}:*"):
            truth.delete(name)
        assert hit_of(cache, prompt(6)).by_tier == {"host": 96}
        assert hit_of(cache, prompt(6), tiers=["redis"]).num_tokens == 0
        assert put(cache, prompt(6, 1)).num_chunks == 6
        assert cache.flush(100)
        assert hit_of(cache, prompt(6, 1), tiers=["redis"]).num_tokens == 96


# ---- tenants, weights, clear


def test_clear_of_a_tenant_leaves_the_others(
    shm_root: Path, tmp_path: Path, url: str
) -> None:
    tokens = prompt(6)
    with cache_over(url, shm_root, tmp_path) as cache:
        stored(cache, tokens)
        stored(cache, tokens, **TENANT)
        cleared = cache.clear(**TENANT)
        assert cleared.ok
        assert cleared.chunks["redis"] == 6
        for tier in cache.tiers:
            wait_until(
                lambda tier=tier: (
                    hit_of(cache, tokens, tiers=[tier], **TENANT).num_tokens == 0
                )
            )  # type: ignore[misc]
            wait_until(
                lambda tier=tier: (
                    hit_of(cache, tokens, tiers=[tier]).by_tier == {tier: 96}
                )
            )  # type: ignore[misc]
        assert cache.clear(everything=True).chunks["redis"] == 6
        assert hit_of(cache, tokens).num_tokens == 0


def test_two_tenants_never_share(url: str) -> None:
    with cache_over(url, None) as cache:
        stored(cache, prompt(4))
        hit, _ = served(cache, prompt(4), **TENANT)
        assert hit.num_tokens == 0
        assert not set(keys_of(cache, prompt(4))) & {
            key for _, _, key in cache.keys(prompt(4), **TENANT)
        }


def test_a_clear_that_fails_names_the_tier(shm_root: Path) -> None:
    with (
        redis_server() as server,
        cache_over(f"{server.url}/0?deadline=300ms", shm_root) as cache,
    ):
        stored(cache, prompt(4))
        server.kill()
        cleared = cache.clear()
        assert not cleared.ok
        assert list(cleared.failed) == ["redis"]
        assert cleared.chunks["host"] == 4


@pytest.mark.slow
def test_a_limit_ends_a_load_whose_chunks_still_come(
    server: Server, url: str
) -> None:
    """Each chunk begins the patience of a call again, and the end of the call must not depend on
    it.
    """
    with proxy_to(server.port) as proxy:
        far = url.replace(str(server.port), str(proxy.port))
        with cache_over(far, None, deadline_seconds=30.0) as cache:
            stored(cache, prompt(12))
            proxy.down = Fault(
                delay_seconds=0.1, piece_bytes=LAYOUT.chunk_bytes // 4
            )
            hit, _ = served(cache, prompt(12), limit_seconds=1.0)
            assert hit.num_tokens < 12 * CHUNK
            assert hit.reason is Reason.DEADLINE
            proxy.heal()
            wait_until(
                lambda: (
                    hit_of(cache, prompt(12), limit_seconds=30.0).num_tokens
                    == 12 * CHUNK
                )
            )


def test_weights_that_changed_here_only_are_not_shared(
    shm_root: Path, url: str
) -> None:
    with (
        cache_over(url, shm_root / "1") as one,
        cache_over(url, shm_root / "2") as two,
    ):
        stored(one, prompt(4))
        one.weights_changed()
        assert hit_of(one, prompt(4)).num_tokens == 0
        stored(one, prompt(4))
        assert hit_of(one, prompt(4)).by_tier == {"host": 64}
        assert (
            hit_of(one, prompt(4), tiers=["redis"]).reason is Reason.TIER_SKIPPED
        )
        # it has the old weights
        assert hit_of(two, prompt(4)).by_tier == {"redis": 64}


@pytest.mark.parametrize(
    "write_policy", ["write_through", "selective", "write_back"]
)
def test_what_new_weights_computed_does_not_leave_the_machine(
    shm_root: Path, tmp_path: Path, server: Server, url: str, write_policy: str
) -> None:
    """Also when it is used often: until the change has a name, another machine may use the same one
    for others.
    """
    with (
        cache_over(url, shm_root, tmp_path, write_policy=write_policy) as cache,
        redis_client(server) as store,
    ):
        prefix = url.partition("prefix=")[2].partition("&")[0]
        cache.weights_changed()
        for tokens in (prompt(4), prompt(2, 7)):
            stored(cache, tokens)
            for tiers in (None, None, None, ["host"], ["disk"], ["disk"]):
                served(cache, tokens, tiers=tiers)
            stored(cache, tokens)
        assert cache.flush(60)
        wait_until(
            lambda: (
                hit_of(cache, prompt(4), tiers=["disk"]).num_tokens == 4 * CHUNK
            )
        )
        assert not list(store.scan_iter(f"{prefix}*"))


def test_a_named_version_is_shared_by_machines(shm_root: Path, url: str) -> None:
    with (
        cache_over(url, shm_root / "1") as one,
        cache_over(url, shm_root / "2") as two,
    ):
        one.weights_changed()
        one.weights_changed("step 1")
        stored(one, prompt(4))
        assert hit_of(two, prompt(4)).num_tokens == 0
        two.weights_changed("step 1")
        assert hit_of(two, prompt(4)).by_tier == {"redis": 64}


def test_weights_that_changed_everywhere(shm_root: Path, url: str) -> None:
    with cache_over(url, shm_root / "1") as cache:
        stored(cache, prompt(4))
    for machine in ("2", "3"):
        with cache_over(url, shm_root / machine, weights_epoch=1) as cache:
            hit, _ = served(cache, prompt(4))
            assert hit.by_tier == ({} if machine == "2" else {"redis": 64})
            stored(cache, prompt(4))


# ---- several processes


def _stores(url: str, root: Path, seed: int) -> None:
    with cache_over(url, root / "shm", root / "disk") as cache:
        stored(cache, prompt(8, seed))


def _retrieves(url: str, root: Path, seed: int) -> None:
    with cache_over(url, root / "shm", root / "disk") as cache:
        hit, kv = served(cache, prompt(8, seed))
        assert hit.by_tier == {"redis": 128}
        assert kv.same(kv_of(prompt(8, seed)))
        assert hit_of(cache, prompt(8, seed)).by_tier == {"host": 128}


@pytest.mark.slow
def test_what_one_machine_stored_another_serves(shm_root: Path, url: str) -> None:
    for root in ("one", "two"):
        (shm_root / root / "disk").mkdir(parents=True)
    run_all([SPAWN.Process(target=_stores, args=(url, shm_root / "one", 3))])
    run_all([SPAWN.Process(target=_retrieves, args=(url, shm_root / "two", 3))])


def _both(url: str, root: Path, begin: int) -> None:
    with cache_over(url, root / "shm", host_size=16 * LAYOUT.slot_bytes) as cache:
        for step in range(12):
            tokens = prompt(6, (begin + step) % 8)
            served(cache, tokens)  # right bytes or a miss
            put(cache, tokens)
        assert cache.flush(100)


@pytest.mark.slow
def test_processes_that_store_and_retrieve_the_same_at_once(
    shm_root: Path, url: str
) -> None:
    run_all(
        [
            SPAWN.Process(target=_both, args=(url, shm_root / str(n), 3 * n))
            for n in range(3)
        ]
    )
    with cache_over(url, None) as cache:
        tokens = sum(
            hit_of(cache, prompt(6, seed)).num_tokens for seed in range(8)
        )
        # a host tier that small may have lost some before they were written
        assert tokens > 4 * 6 * CHUNK


def _in_child(cache: Cache) -> None:
    assert hit_of(cache, prompt(5), tiers=["redis"]).num_tokens == 80
    stored(cache, prompt(5, 1))
    assert hit_of(cache, prompt(5, 1), tiers=["redis"]).num_tokens == 80


def test_a_forked_child_goes_on_with_connections_of_its_own(
    shm_root: Path, url: str
) -> None:
    with cache_over(url, shm_root) as cache:
        stored(cache, prompt(5))
        process = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(cache,)
        )
        process.start()
        stored(cache, prompt(5, 2))
        process.join(60)
        assert process.exitcode == 0
        for seed in range(3):
            assert (
                hit_of(cache, prompt(5, seed), tiers=["redis"]).num_tokens == 80
            )


# ---- what fails


@pytest.mark.slow
def test_an_engine_that_dies_and_comes_back(
    shm_root: Path, tmp_path: Path
) -> None:
    with redis_server() as server:
        url = f"{server.url}/0?deadline=300ms"
        with cache_over(url, shm_root, tmp_path) as cache:
            stored(cache, prompt(4))
            server.kill()
            for seed in range(1, 6):
                tokens = prompt(4, seed)
                assert hit_of(cache, tokens).num_tokens == 0
                assert put(cache, tokens).num_chunks == 4
                assert hit_of(cache, tokens).by_tier == {"host": 64}
            server.restart()

            def comes_back() -> bool:
                tokens = prompt(4, 50 + len(tried))
                tried.append(tokens)
                stored(cache, tokens)
                return hit_of(cache, tokens, tiers=["redis"]).num_tokens == 64

            tried: list[object] = []
            wait_until(comes_back, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_host", [True, False], ids=["below a host tier", "alone"]
)
def test_no_call_hangs_while_the_engine_stands_still(
    shm_root: Path, with_host: bool
) -> None:
    host = shm_root if with_host else None
    with redis_server() as server:
        url = f"{server.url}/0?deadline=300ms"
        with cache_over(url, host, deadline_seconds=1.0) as cache:
            stored(cache, prompt(4))
            server.stop()
            for seed in (0, 1, 2):
                tokens = prompt(4, seed)
                for call in (
                    lambda tokens=tokens: cache.retrieve(
                        tokens, blank(tokens).transfer, deadline_seconds=1.0
                    ),
                    lambda tokens=tokens: put(cache, tokens),
                    lambda tokens=tokens: cache.lookup(tokens),
                    lambda tokens=tokens: cache.prefetch(tokens).result(60),
                    lambda tokens=tokens: cache.explain(tokens),
                    cache.stats,
                ):
                    with soon(5.0):
                        call()  # type: ignore[no-untyped-call]
            with soon(8.0):
                assert list(cache.clear().failed) == ["redis"]
            with soon(8.0):
                cache.close(3.0)


def test_a_cache_opens_without_its_remote_engine(shm_root: Path) -> None:
    with cache_over("redis://127.0.0.1:1/0?deadline=300ms", shm_root) as cache:
        stored(cache, prompt(4))
        assert hit_of(cache, prompt(4)).by_tier == {"host": 64}


def test_a_retrieve_in_the_middle_of_which_the_engine_dies(
    shm_root: Path,
) -> None:
    with redis_server() as server:
        url = f"{server.url}/0?deadline=1s&look=30s"
        with cache_over(url, shm_root / "1") as cache:
            stored(cache, prompt(40))
        with cache_over(url, shm_root / "2") as cache:
            tokens = prompt(40)
            kv = blank(tokens)
            assert cache.lookup(tokens).num_tokens == 640
            server.kill()
            hit = cache.retrieve(tokens, kv.transfer)
            assert hit.reason is not None
            assert kv.same(kv_of(tokens), 0, hit.num_tokens // CHUNK)


# ---- objects


def s3_url(server: Server) -> str:
    keys = "access_key_id=any&secret_access_key=any&region=us-east-1"
    return (
        f"s3://{BUCKET}/{fresh_prefix()}?endpoint={server.url}&{keys}&{PATIENT}"
    )


@pytest.mark.slow
def test_what_one_machine_stored_in_s3_another_serves(
    shm_root: Path, s3: Server
) -> None:
    url = s3_url(s3)
    tokens = prompt(10)
    with cache_over(url, shm_root / "before") as cache:
        assert cache.tiers == ("host", "s3")
        stored(cache, tokens)
        stored(cache, tokens, **TENANT)
    with cache_over(url, shm_root / "after") as cache:
        assert cache.lookup(tokens).by_tier == {"s3": 160}
        assert hit_of(cache, tokens).by_tier == {"s3": 160}
        assert hit_of(cache, tokens).by_tier == {"host": 160}
        assert cache.clear(**TENANT).chunks["s3"] == 10
        assert hit_of(cache, tokens, tiers=["s3"]).by_tier == {"s3": 160}
        assert hit_of(cache, tokens, tiers=["s3"], **TENANT).num_tokens == 0


def test_a_hierarchy_of_four(
    shm_root: Path, tmp_path: Path, s3: Server, url: str
) -> None:
    with cache_over([url, s3_url(s3)], shm_root, tmp_path) as cache:
        assert cache.tiers == ("host", "disk", "redis", "s3")
        stored(cache, prompt(3))
        for tier in cache.tiers:
            assert hit_of(cache, prompt(3), tiers=[tier]).by_tier == {tier: 48}


@pytest.mark.slow
def test_a_store_that_does_not_say_in_time_is_no_store_that_lacks_it(
    shm_root: Path,
) -> None:
    """The answer names what is wrong; "never stored" would be false."""
    with (
        redis_server() as server,
        cache_over(f"{server.url}/0?look=1s&deadline=5s", shm_root) as cache,
    ):
        assert hit_of(cache, prompt(2)).reason is Reason.ABSENT
        server.stop()
        hit, _ = served(cache, prompt(2, 1))
        assert hit.reason is Reason.DEADLINE
        assert "redis" in hit.detail
        explained = cache.explain(prompt(2, 1))
        assert explained.reason is Reason.DEADLINE
        assert "redis did not answer" in explained.detail
        server.cont()
