"""SGLang's storages: PagodaHiCache, SGLang's `file` and Mooncake, called as its controller calls
them, beside memcpy.

`make bench-sglang ARGS='--quick --json'`, in .venv-sglang. A page has 8 MiB (64 tokens of an 8 B
model in bf16), a call moves 16. Mooncake's pool is memory of the same process, so its pages are
copied, not sent. "cold": for `file` the page cache is dropped; for PagodaHiCache the host tier is
empty, and the disk has all.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ground import Plan, main
from harness import Figure, Runs, Step, race, ratio_figure, ratios
from limits import Copier, Memcpy, pieces

sys.path.append(
    str(Path(__file__).resolve().parent.parent)
)  # the tests have what replaces SGLang's copies on GPUs

PAGE_TOKENS = 64
CALL_PAGES = 16
POOL_PAGES = 64
LOOK_PAGES = 128
LAYERS = 32
HEADS = 8
DIM = 128
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * PAGE_TOKENS * 2
CALL_BYTES = CALL_PAGES * PAGE_BYTES
CORES = len(os.sched_getaffinity(0))


def keys_of(number: int, count: int = CALL_PAGES) -> list[str]:
    """Keys as SGLang makes them: 64 hexadecimal digits."""
    return [f"{number * 10_000 + page:064x}" for page in range(count)]


def host_pool(
    layout: str,
    page: int = PAGE_TOKENS,
    heads: int = HEADS,
    dim: int = DIM,
    layers: int = LAYERS,
    pages: int = POOL_PAGES,
) -> Any:
    """A real host pool of SGLang, with all its memory touched."""
    from testbed import sglang_parts

    sglang_parts.install()
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(
        size=page,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        0.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * page,
    )
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    return pool


class Storage:
    """One storage over a pool, with the controller's way to call it. `at(number)`: pages of the
    pool, in turns.
    """

    def __init__(self, pool: Any, extra: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.hicache_storage import (
            HiCacheFile,
            HiCacheStorageConfig,
        )
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import (
            MooncakeStore,
        )

        from pagoda.connectors.sglang import PagodaHiCache

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="a-model",
            extra_config=extra,
        )
        self.pool = pool
        self.is_file = "file_storage_path" in extra
        is_mooncake = "master_server_address" in extra
        self.made: Any
        if is_mooncake:
            self.made = MooncakeStore(config, pool)
        elif self.is_file:
            self.made = HiCacheFile(config)
        else:
            self.made = PagodaHiCache(config)
        self.made.register_mem_pool_host(pool)
        self.made.on_host_pools_registered()

    def _slots(self, number: int) -> Any:
        import torch

        first = number * CALL_PAGES % POOL_PAGES * PAGE_TOKENS
        return torch.arange(first, first + CALL_PAGES * PAGE_TOKENS)

    def set(self, number: int, at: int) -> None:
        """Store pages `at` of the pool under the keys of `number`."""
        keys = keys_of(number)
        slots = self._slots(at)
        if self.is_file:
            done = self.made.batch_set(
                keys,
                [
                    self.pool.get_data_page(slots[i * PAGE_TOKENS])
                    for i in range(len(keys))
                ],
            )
        else:
            done = all(self.made.batch_set_v1(keys, slots))
        assert done

    def get(self, number: int, at: int) -> None:
        """Load the pages of `number` into pages `at` of the pool."""
        keys = keys_of(number)
        slots = self._slots(at)
        if not self.is_file:
            assert all(self.made.batch_get_v1(keys, slots))
            return
        found = self.made.batch_get(
            keys, [self.pool.get_dummy_flat_data_page() for _ in keys]
        )
        for i, page in enumerate(found):
            self.pool.set_from_flat_data_page(int(slots[i * PAGE_TOKENS]), page)

    def close(self) -> None:
        """End it."""
        if not self.is_file:
            self.made.close()


@contextlib.contextmanager
def places(plan: Plan) -> Iterator[SimpleNamespace]:
    """Directories for one part, removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=plan.shm) as shm,
        tempfile.TemporaryDirectory(
            prefix="pagoda-bench-", dir=plan.disk
        ) as disk,
    ):
        yield SimpleNamespace(shm=Path(shm), disk=Path(disk))


def ours(
    root: SimpleNamespace, name: str = "host", disk: bool = False
) -> dict[str, Any]:
    """The options of PagodaHiCache."""
    extra: dict[str, Any] = {
        "weights": "w",
        "host_path": str(root.shm / name),
        "host_size": "1GiB",
        "policy": "lru",
        "deadline_seconds": 30,
    }
    return (
        {**extra, "disk_path": str(root.disk / "ours"), "disk_size": "2GiB"}
        if disk
        else extra
    )


def theirs(root: SimpleNamespace) -> dict[str, Any]:
    """The options of SGLang's own storage."""
    return {"file_storage_path": str(root.disk / "file")}


def mooncakes(port: int) -> dict[str, Any]:
    """The options of SGLang's storage for Mooncake, whose master is at this port of the machine."""
    return {
        "master_server_address": f"127.0.0.1:{port}",
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "4gb",
        "protocol": "tcp",
        "device_name": "",
    }


def from_host_memory(plan: Plan, layout: str = "page_first") -> list[Figure]:
    """Set and get against memcpy by all cores, against `file` from the page cache, and against
    Mooncake.
    """
    from testbed.servers import mooncake_master

    with places(plan) as root, mooncake_master() as master:
        pool = host_pool(layout)
        own, file, pooled = (
            Storage(pool, extra)
            for extra in (ours(root), theirs(root), mooncakes(master.port))
        )
        calls = POOL_PAGES // CALL_PAGES
        for number in range(calls):
            for storage in (own, file, pooled):
                storage.set(number, number)
        copier = Copier(CORES)
        memory = (
            pieces(PAGE_BYTES, POOL_PAGES, 1, root.shm),
            pieces(PAGE_BYTES, POOL_PAGES, 2),
        )
        memcpy = Memcpy(copier, *memory, batch=CALL_PAGES)
        entrants: dict[str, Step] = {
            "limit": memcpy.step,
            "candidate": lambda number: own.get(number % calls, number + 1),
            "file": lambda number: file.get(number % calls, number + 2),
            "mooncake": lambda number: pooled.get(number % calls, number + 3),
        }
        got = race(entrants, plan.rounds, steps=calls)
        sets = race(
            {
                "limit": memcpy.step,
                "candidate": lambda number: own.set(calls + number, number + 1),
                "file": lambda number: file.set(calls + number, number + 2),
                "mooncake": lambda number: pooled.set(calls + number, number + 3),
            },
            plan.rounds,
            steps=calls // 2,
        )
        own.close()
        pooled.close()
        copier.close()
        name = layout
        return [
            _beside(f"{name}_get", 0.9, got, calls * CALL_BYTES),
            _beside(f"{name}_set", 0.9, sets, calls // 2 * CALL_BYTES),
        ]


def _beside(key: str, target: float, runs: Runs, size_bytes: int) -> Figure:
    times = {
        name: statistics.median(ratios(runs[name], runs["candidate"]))
        for name in ("file", "mooncake")
    }
    beside = {f"times_{name}": round(each, 3) for name, each in times.items()}
    threads = ", ".join(
        [
            f"{CORES} threads",
            *(f"{each:.1f} x {name}" for name, each in times.items()),
        ]
    )
    return ratio_figure(
        key, target, runs, size_bytes=size_bytes, threads=threads, beside=beside
    )


def cold(plan: Plan) -> list[Figure]:
    """Get from the disk: both have all there and nothing in memory. Set until it is on the disk."""
    with places(plan) as root:
        pool = host_pool("page_first")
        calls = POOL_PAGES // CALL_PAGES
        first = Storage(pool, ours(root, disk=True))
        file = Storage(pool, theirs(root))
        for number in range(calls):
            first.set(number, number)
            assert first.made._pools["kv"].cache.flush(60)
            file.set(number, number)
        first.close()
        os.sync()
        turn = 0
        own = None

        def forget() -> None:
            nonlocal turn, own
            if own is not None:
                own.close()
            turn += 1
            own = Storage(pool, ours(root, f"host{turn}", disk=True))
            for path in (root.disk / "file").iterdir():
                _drop(path)

        def get(number: int) -> None:
            assert own is not None
            own.get(number % calls, number + 1)

        entrants: dict[str, Step] = {
            "limit": lambda number: file.get(number % calls, number),
            "candidate": get,
        }
        got = race(entrants, plan.rounds, steps=1, before=forget)

        def write(number: int) -> None:
            assert own is not None
            own.set(calls + number, number + 1)
            assert own.made._pools["kv"].cache.flush(60)

        def write_file(number: int) -> None:
            file.set(calls + number, number)
            for key in keys_of(calls + number):
                _sync(
                    root.disk / "file" / f"{file.made._get_suffixed_key(key)}.bin"
                )

        sets = race(
            {"limit": write_file, "candidate": write}, plan.rounds, steps=1
        )
        if own is not None:
            own.close()
        return [
            ratio_figure(
                "cold_get",
                1.0,
                got,
                size_bytes=CALL_BYTES,
                threads="limit: SGLang's file",
            ),
            ratio_figure(
                "set_to_disk",
                1.0,
                sets,
                size_bytes=CALL_BYTES,
                threads="limit: SGLang's file, synced",
            ),
        ]


def _drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def exists(plan: Plan) -> list[Figure]:
    """Pages that are looked for in a second, 128 in a call, all stored."""
    from testbed.servers import mooncake_master

    with places(plan) as root, mooncake_master() as master:
        pool = host_pool("page_first", 16, 2, 32, 3, 24)
        extra = ours(root)
        own, file, pooled = (
            Storage(pool, each)
            for each in (extra, theirs(root), mooncakes(master.port))
        )
        keys = keys_of(0, LOOK_PAGES)
        import torch

        page = torch.arange(16)
        for key in keys:
            own.made.batch_set_v1([key], page)
            pooled.made.batch_set_v1([key], page)
            file.made.batch_set([key], [pool.get_data_page(0)])
        looks: dict[str, Callable[[], object]] = {
            name: partial(storage.made.batch_exists, keys)
            for name, storage in (
                ("candidate", own),
                ("limit", file),
                ("mooncake", pooled),
            )
        }
        assert [look() for look in looks.values()] == 3 * [LOOK_PAGES]
        entrants: dict[str, Step] = {
            name: lambda _, look=look: look() for name, look in looks.items()
        }  # type: ignore[misc]
        runs = race(entrants, plan.rounds, steps=50)
        own.close()
        pooled.close()
        paired = ratios(runs["limit"], runs["candidate"])
        rate = {
            name: 50 * LOOK_PAGES / statistics.median(spent)
            for name, spent in runs.items()
        }
        note = (
            f"{rate['candidate']:,.0f} pages/s, file {rate['limit']:,.0f}, mooncake "
            f"{rate['mooncake']:,.0f}"
        )
        quoted = {
            "pages_per_second": {
                name: round(each) for name, each in rate.items()
            },
            "ratio": paired,
        }
        return [
            Figure(
                "exists", statistics.median(paired), 1.0, "ratio", quoted, note
            )
        ]


def layer_first(plan: Plan) -> Sequence[Figure]:
    """As `host`, with pages of 64 pieces."""
    return from_host_memory(plan, "layer_first")


if __name__ == "__main__":
    main(
        __doc__,
        {"host": from_host_memory, "cold": cold, "exists": exists},
        {"layer_first": layer_first},
    )
