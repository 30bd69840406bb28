"""Random traffic through the proxy: no text is another one than that of a bare server that computes
every prompt from its first token, and every request gets an answer.

Servers and proxies are killed, clients go away, the disk is full, files of states are cut short,
adapters change, two proxies share one host tier. `LLAMA_PROXY_STEPS` and `LLAMA_PROXY_SEEDS` make
it longer. The number of requests for all of this in one run is `LLAMA_PROXY_REQUESTS`:

    LLAMA_PROXY_REQUESTS=5000 pytest -s -m soak tests/llama_proxy/test_driver.py -k everything
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testbed.llama_client import LlamaClient
from testbed.llama_proxy import attached_proxy, owning_proxy
from testbed.llama_servers import LlamaOptions, llama_server
from testbed.patience import within
from testbed.tiny_gguf import write_adapter, write_model
from tests.llama_proxy.driver import CONTEXT, Driver
from tests.llama_proxy.places import MEMORY, Attached, Bare, Owned
from tests.llama_proxy.state_watch import FullDisk, StateWatch
from tests.llama_proxy.traffic import Controls

STEPS = int(os.environ.get("LLAMA_PROXY_STEPS", "300"))
SEEDS = int(os.environ.get("LLAMA_PROXY_SEEDS", "2"))
REQUESTS = int(os.environ.get("LLAMA_PROXY_REQUESTS", "400"))
STATE_BYTES = 4 << 20
SLOTS = 2
# nothing is asked any more: there is only what the slots hold to be saved
STOP_SECONDS = 20.0

# without flash attention, KV from memory and KV that was computed again differ by 3e-5 at most, and
# no greedy text depends on that
BASE: LlamaOptions = {"slots": SLOTS, "context": SLOTS * CONTEXT, "flash": False}


def stored_in(host: Path, disk: Path, **more: str) -> dict[str, str]:
    """Return the options of a proxy."""
    return {
        "host-size": "8MiB",
        "host-path": str(host),
        "disk-path": str(disk),
        "disk-size": "24MiB",
        "chunk-tokens": "64",
        "state-bytes": str(STATE_BYTES),
        "no-worth-it": "",
        **more,
    }


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory in memory for the host tier of one test."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-test-", dir=MEMORY
    ) as directory:
        yield Path(directory)


@contextlib.contextmanager
def small_disk(path: Path, mib: int) -> Iterator[FullDisk]:
    """Mount a small file system."""
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700"]
    done = subprocess.run(
        [*mount, "none", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs root to mount a file system")
    try:
        yield FullDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def controls(
    model: Path, build: str, options: LlamaOptions
) -> Iterator[Controls]:
    """Start the bare server that says what is right."""
    bare: LlamaOptions = {**options, "slots": 1, "context": CONTEXT}
    with llama_server(model, build, **bare) as server:
        yield Controls(LlamaClient(server.url))


def drive(
    driver: Driver,
    targets: Sequence[Bare | Owned | Attached],
    steps: int,
    controls: Controls,
    watch: StateWatch,
    requests: int = 0,
) -> None:
    """Take the steps, then check that all was right and nothing is left."""
    began = time.monotonic()
    driver.run(steps, requests)
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s, {dict(driver.counts)}, {dict(controls.counts)}")
    spent = {name: round(each, 1) for name, each in driver.seconds.items()}
    print(f"seconds by step: {spent}")
    print(
        f"{watch.seen} files of states, at most {watch.most_bytes} bytes at a time, "
        f"{watch.cut} cut short"
    )
    logs = [target.log()[-3000:] for target in targets]
    assert driver.faults == [], "\n".join([*driver.faults, *logs])
    assert watch.most_bytes <= STATE_BYTES
    # what a killed one left, the next one removes
    for target in targets:
        target.start()
        assert target.left() == []
        with within(STOP_SECONDS):
            target.stop()
        assert target.left() == []


@pytest.mark.slow
def test_a_bare_server_passes_the_same_checks(models: Path) -> None:
    """Without a proxy: the driver itself finds nothing, or nothing would be meant by what it
    finds.
    """
    model = write_model(models, seed=1)
    rng = random.Random("bare")
    with (
        llama_server(model, "B", **BASE) as server,
        controls(model, "B", BASE) as right,
    ):
        bare = Bare(server)
        driver = Driver(rng, [bare], right)
        with StateWatch(bare.state_directories, rng) as watch:
            drive(driver, [bare], 30, right, watch)
    assert driver.counts["hit tokens"]


@pytest.mark.slow
def test_the_driver_sees_the_kv_of_another_adapter(models: Path) -> None:
    """A bare server goes on to use what it computed with the scale before."""
    model = write_model(models, seed=1)
    rng = random.Random("adapters")
    options: LlamaOptions = {**BASE, "lora": [(str(write_adapter(models)), 0.5)]}
    with (
        llama_server(model, "B", **options) as server,
        controls(model, "B", options) as right,
    ):
        driver = Driver(rng, [Bare(server)], right, scale=0.5, kills=0)
        driver.run(20)
        driver.change_adapter(0.0)
        driver.run(20)
    assert driver.faults


@pytest.mark.slow
def test_traffic_through_a_proxy(
    models: Path, memory: Path, tmp_path: Path
) -> None:
    """The short run: a server that the proxy starts, everything is killed now and then."""
    model = write_model(models, seed=1)
    rng = random.Random("short")
    pagoda = stored_in(memory, tmp_path / "disk")
    with (
        owning_proxy(model, pagoda, "B", **BASE) as proxy,
        controls(model, "B", BASE) as right,
    ):
        owned = Owned(proxy)
        with StateWatch(owned.state_directories, rng) as watch:
            driver = Driver(rng, [owned], right, watch=watch)
            drive(driver, [owned], 100, right, watch)
    assert driver.counts["loads"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("build", ["A", "B"])
@pytest.mark.parametrize("unified", [False, True])
def test_long_traffic_with_a_full_disk(
    build: str,
    unified: bool,
    seed: int,
    models: Path,
    memory: Path,
    tmp_path: Path,
) -> None:
    model = write_model(models, seed=1)
    rng = random.Random(f"disk {build} {unified} {seed}")
    options: LlamaOptions = {
        **BASE,
        "unified": unified,
        "ram_mib": rng.choice((0, 64)),
    }
    pagoda = stored_in(memory, tmp_path / "disk", **{"disk-size": "8MiB"})
    with (
        small_disk(tmp_path / "disk", 16) as disk,
        owning_proxy(model, pagoda, build, **options) as proxy,
        controls(model, build, options) as right,
    ):
        owned = Owned(proxy)
        with StateWatch(owned.state_directories, rng) as watch:
            driver = Driver(rng, [owned], right, watch=watch, disk=disk)
            drive(driver, [owned], STEPS, right, watch)
    assert driver.counts["loads"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("build", ["A", "B"])
def test_long_traffic_with_changing_adapters(
    build: str, seed: int, models: Path, memory: Path, tmp_path: Path
) -> None:
    model = write_model(models, seed=1)
    rng = random.Random(f"adapters {build} {seed}")
    options: LlamaOptions = {**BASE, "lora": [(str(write_adapter(models)), 0.5)]}
    pagoda = stored_in(memory, tmp_path / "disk")
    with (
        owning_proxy(model, pagoda, build, **options) as proxy,
        controls(model, build, options) as right,
    ):
        owned = Owned(proxy)
        with StateWatch(owned.state_directories, rng) as watch:
            driver = Driver(rng, [owned], right, watch=watch, scale=0.5)
            drive(driver, [owned], STEPS, right, watch)
    assert driver.counts["change_adapter"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("build", ["A", "B"])
def test_two_proxies_over_one_host_tier(
    build: str, seed: int, models: Path, memory: Path, tmp_path: Path
) -> None:
    model = write_model(models, seed=1)
    rng = random.Random(f"two {build} {seed}")
    pagoda = stored_in(memory, tmp_path / "disk")
    with (
        llama_server(model, build, **BASE) as first_server,
        llama_server(model, build, **BASE) as second_server,
        attached_proxy(first_server, pagoda) as first_proxy,
        attached_proxy(second_server, pagoda) as second_proxy,
        controls(model, build, BASE) as right,
    ):
        first = Attached(first_proxy, first_server)
        second = Attached(second_proxy, second_server)
        both = [first, second]

        def directories() -> list[Path]:
            return [
                *first.state_directories(),
                *second.state_directories(),
            ]

        with StateWatch(directories, rng) as watch:
            driver = Driver(rng, both, right, watch=watch)
            drive(driver, both, STEPS, right, watch)
    assert driver.counts["loads"]


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("build", ["B", "A"])
def test_everything_at_once(
    build: str, models: Path, memory: Path, tmp_path: Path
) -> None:
    """Two proxies with servers of their own over one host tier and one disk, which is full now and
    then; all else happens as well.
    """
    model = write_model(models, seed=1)
    rng = random.Random(f"everything {build} {REQUESTS}")
    options: LlamaOptions = {
        **BASE,
        "unified": True,
        "ram_mib": 64,
        "lora": [(str(write_adapter(models)), 0.5)],
    }
    pagoda = stored_in(memory, tmp_path / "disk", **{"disk-size": "8MiB"})
    with (
        small_disk(tmp_path / "disk", 16) as disk,
        owning_proxy(model, pagoda, build, **options) as first_proxy,
        owning_proxy(model, pagoda, build, **options) as second_proxy,
        controls(model, build, options) as right,
    ):
        both = [Owned(first_proxy), Owned(second_proxy)]

        def directories() -> list[Path]:
            return [
                path for target in both for path in target.state_directories()
            ]

        with StateWatch(directories, rng) as watch:
            driver = Driver(
                rng,
                both,
                right,
                watch=watch,
                disk=disk,
                scale=0.5,
                adapter_changes=1,
            )
            drive(driver, both, 0, right, watch, REQUESTS)
    assert driver.counts["loads"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ["qwen3moe", "gemma3", "lfm2", "mamba2"])
@pytest.mark.parametrize("build", ["A", "B"])
def test_long_traffic_of_other_architectures(
    build: str, architecture: str, models: Path, memory: Path, tmp_path: Path
) -> None:
    model = write_model(models, architecture, seed=1)
    rng = random.Random(f"{architecture} {build}")
    pagoda = stored_in(memory, tmp_path / "disk")
    with (
        owning_proxy(model, pagoda, build, **BASE) as proxy,
        controls(model, build, BASE) as right,
    ):
        owned = Owned(proxy)
        with StateWatch(owned.state_directories, rng) as watch:
            driver = Driver(rng, [owned], right, watch=watch)
            drive(driver, [owned], STEPS, right, watch)
