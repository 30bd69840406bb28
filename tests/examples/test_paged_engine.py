"""The example engine: whatever its blocks go through, its answers are those of plain greedy `generate`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache as once
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.paged_engine import __main__ as cli
from examples.paged_engine.attention import NAME, KVPool, Part, batch_of, next_tokens, paged_model
from examples.paged_engine.engine import Engine, Sequence
from pagoda import Cache, Config
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.ledger import Ledger, StoreSpec
from pagoda.testing import Fault, FaultySlab
from pagoda.tiers import DiskTier, HostTier
from tests.e2e.tiny import VOCABULARY, generated, llama, prompt, qwen

BLOCK = 8
BLOCKS = 36  # on the device: the longest conversation needs 30 of them, all together 200
SLOTS = 64  # on the host: not enough for all of them either
TALKS, TURNS, NEW = 7, 4, 16
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.paged_engine"]


@once
def model_of(name: str):
    return {"llama": llama, "qwen": qwen}[name](num_hidden_layers=2)


@once
def talks_of(name: str, seed: int = 0) -> list[list[tuple[list[int], list[int]]]]:
    """Random conversations and what plain `generate` says: [talk][turn] = (prompt, answer). Half begin alike."""
    dice, model = np.random.default_rng(seed), model_of(name)
    common = dice.integers(1, VOCABULARY, 44).tolist()
    talks = []
    for number in range(TALKS):
        tokens, turns = common[: 44 if number % 2 else 3], []
        for _ in range(TURNS):
            tokens = tokens + dice.integers(1, VOCABULARY, dice.integers(15, 40)).tolist()
            answer = generated(model, torch.tensor([tokens]), NEW)[0]
            turns.append((tokens, answer))
            tokens = tokens + answer
        talks.append(turns)
    assert len({token for turns in talks for _, answer in turns for token in answer}) >= 20
    return talks


class House:
    """The roots of one test and the caches on them."""

    def __init__(self, host: Path, disk: Path) -> None:
        self.host, self.disk = host, disk
        self.open_ones: list[Cache] = []
        self.slab: FaultySlab | None = None

    def cache(self, name: str = "llama", slots: int = SLOTS, **options: object) -> Cache:
        """A cache of two tiers, its disk with faults on demand: `slab`."""
        model = model_of(name)
        layout = layout_of(model, BLOCK)
        settings: dict = {"worth_it": False, "deadline_seconds": 2.0} | options
        config = Config(
            chunk_tokens=BLOCK, host_path=str(self.host / "host"), host_size=slots * 4096, **settings
        )
        host = HostTier.open(layout, Path(config.host_path), slots * layout.slot_bytes)
        stride = layout.slot_bytes + 4096
        ledger = Ledger.open(StoreSpec(self.disk / "disk", layout.fingerprint, "file", 1024, stride))
        self.slab = FaultySlab(ledger.slab_path, ledger.slots, stride)
        disk = DiskTier(layout, ledger, self.slab, deadline_seconds=config.deadline_seconds)
        self.open_ones.append(
            Cache(config, namespace=namespace_of(model, layout), layout=layout, tiers=[host, disk])
        )
        return self.open_ones[-1]

    def shut(self, wipe_host: bool = False) -> None:
        for cache in self.open_ones:
            cache.flush(10.0)
            cache.close()
        self.open_ones.clear()
        if wipe_host:
            shutil.rmtree(self.host / "host")


@pytest.fixture
def house(shm_root: Path, tmp_path: Path) -> Iterator[House]:
    house = House(shm_root, tmp_path)
    yield house
    house.shut()


class Served(Counter[str]):
    """What became of some requests: hits by tier in tokens, preemptions, prompt tokens computed."""


def serve(
    engine: Engine,
    requests: list[tuple[Sequence, list[int]]],
    between: Callable[[], object] = lambda: None,
) -> Served:
    """Run these requests, all at once; each must be answered as expected, and nothing be left behind."""
    found, ends = Served(), {id(seq): answer for seq, answer in requests}
    for seq, _ in requests:
        engine.add(seq)
    until = time.monotonic() + 60
    while engine.busy:
        assert time.monotonic() < until, f"{engine.waiting} {engine.running} {engine.manager.stats()}"
        for seq in engine.step():
            assert seq.output == ends.pop(id(seq)), (
                f"{seq.id} after {seq.hits}, {seq.preemptions} preemptions"
            )
            assert sum(seq.hits.values()) < seq.prompt_tokens
            found.update(seq.hits)
            found["preemptions"] += seq.preemptions
        engine.manager.check()
        between()
    assert not ends
    return found


def converse(engine: Engine, name: str = "llama", seed: int = 0, salt: str | None = None, **how) -> Served:
    """Lead all conversations, a turn of each at a time, in random order."""
    found, dice = Served(), random.Random(seed)
    for turn in range(TURNS):
        requests = [
            (Sequence(f"{salt}.{seed}.{talk}.{turn}", list(tokens), NEW, salt=salt), answer)
            for talk, turns in enumerate(talks_of(name, seed))
            for tokens, answer in [turns[turn]]
        ]
        found["asked"] += sum(len(seq.tokens) for seq, _ in requests)
        found += serve(engine, dice.sample(requests, len(requests)), **how)
    found["computed"] = engine.prompt_tokens_computed
    return found


def closed(engine: Engine) -> None:
    """Close an engine: nothing is in use or on its way then."""
    engine.close()
    engine.manager.check()
    stats = engine.manager.stats()
    assert stats["in_use"] == stats["in_flight"] == engine.manager.in_flight == 0
    assert stats["evictable"] == stats["cached"]


def engine_of(cache: Cache | None, name: str = "llama", blocks: int = BLOCKS, **options) -> Engine:
    layout = layout_of(model_of(name), BLOCK) if cache is None else cache.layout
    return Engine(model_of(name), layout, blocks=blocks, cache=cache, **options)


def fault_copies(engine: Engine, fails: Callable[[str], bool]) -> Counter[str]:
    """Have copies fail half-way; counts them, and what came of it."""
    seen: Counter[str] = Counter()

    def faulty(name: str, copy: Callable[[int, np.ndarray], None]) -> Callable[[int, np.ndarray], None]:
        def move(block: int, slot: np.ndarray) -> None:
            if not fails(name):
                return copy(block, slot)
            seen[name] += 1
            half = slot.nbytes // 2
            if name == "down":
                slot[:half] = 0x3F
            else:
                engine.pool._bytes[block, :half] = 0x3F
            raise OSError("injected")

        return move

    engine.pool.to_slot = faulty("down", engine.pool.to_slot)
    engine.pool.from_slot = faulty("up", engine.pool.from_slot)
    tell = engine.manager.failed

    def failed(ticket: int):
        settled = tell(ticket)
        seen["shortened"] += len(settled.shortened)
        seen["again"] += len(settled.again)
        return settled

    engine.manager.failed = failed
    return seen


def every(up: int, down: int) -> Callable[[str], bool]:
    """Say of every so-manieth copy that it fails."""
    copies: Counter[str] = Counter()

    def fails(name: str) -> bool:
        copies[name] += 1
        return copies[name] % {"up": up, "down": down}[name] == 0

    return fails


# ---- the model's side


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_paged_logits_are_those_of_the_plain_model(name: str) -> None:
    model, dice = model_of(name), random.Random(0)
    plain_attention = model.config._attn_implementation
    paged, pool = paged_model(model), KVPool(layout_of(model, BLOCK), 64)
    assert (model.config._attn_implementation, paged.config._attn_implementation) == (plain_attention, NAME)
    assert all(a is b for a, b in zip(model.parameters(), paged.parameters(), strict=True))
    prompts = [prompt(length, seed=length)[0].tolist() for length in (50, 37, 1, 64)]
    want = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    blocks, done = dice.sample(range(64), 64), [0] * 4
    tables = [blocks[9 * number : 9 * number + 9] for number in range(4)]
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        counts = {
            number: min(dice.randint(0, 20), len(prompts[number]) - done[number]) for number in range(4)
        }
        work = sorted((count, number) for number, count in counts.items() if count)
        parts = [
            Part(prompts[number][done[number] :][:count], done[number], tables[number])
            for count, number in work
        ]
        if not parts:
            continue
        batch = batch_of(parts, pool)
        with torch.inference_mode():
            out = paged(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, paged=batch)
        logits = out.logits[0].split([count for count, _ in work])
        for (count, number), got in zip(work, logits, strict=True):
            torch.testing.assert_close(got, want[number][done[number] :][:count], atol=1e-4, rtol=1e-4)
            done[number] += count
        assert next_tokens(paged, batch) == [int(got[-1].argmax()) for got in logits]
    assert (
        generated(model, prompt(20), 4) == generated(llama(num_hidden_layers=2), prompt(20), 4)
        or name == "qwen"
    )


def test_a_block_is_one_run_of_bytes_in_the_order_of_the_layout() -> None:
    layout = layout_of(model_of("llama"), BLOCK)
    pool, other = KVPool(layout, 4), KVPool(layout, 4)
    pool.kv.normal_()
    slot = np.zeros(layout.slot_bytes, np.uint8)
    pool.to_slot(2, slot)
    other.from_slot(1, slot)
    assert torch.equal(other.kv[1], pool.kv[2])
    assert not other.kv[[0, 2, 3]].any()
    at = layout.plane_offset(1, 1)
    plane = torch.from_numpy(slot[at : at + layout.plane_bytes(1)].copy()).view(torch.float32)
    assert torch.equal(plane.view(layout.plane_shape(1)), pool.kv[2, 1, 1])


# ---- conversations


@pytest.mark.parametrize("name", ["llama", "qwen"])
@pytest.mark.parametrize("chunk", [None, 24])
def test_blocks_go_to_host_and_disk_and_come_back(name: str, chunk: int | None, house: House) -> None:
    engine = engine_of(house.cache(name), name, step_tokens=chunk)
    found = converse(engine, name)
    assert min(found[what] for what in ("device", "host", "disk", "preemptions")) > 0, found
    assert found["computed"] < found["asked"] - found["host"]
    closed(engine)


def test_without_a_cache_and_without_anything() -> None:
    engine = engine_of(None)
    found = converse(engine)
    assert found["device"] > 0 and found["preemptions"] > 0 and found["host"] == found["disk"] == 0
    closed(engine)
    engine = engine_of(None, prefix_caching=False, step_tokens=50)
    found = converse(engine)
    assert found["device"] == 0 and found["preemptions"] > 0 and found["computed"] >= found["asked"]
    closed(engine)
    assert engine.manager.free == engine.manager.total == BLOCKS


def test_tenants_share_nothing(house: House) -> None:
    engine = engine_of(house.cache(slots=512), blocks=200)
    tokens, answer = talks_of("llama")[1][0]

    def ask(salt: str | None) -> dict[str, int]:
        seq = Sequence(f"{salt} {time.monotonic_ns()}", list(tokens), NEW, salt=salt)
        serve(engine, [(seq, answer)])
        return seq.hits

    whole = (len(tokens) - 1) // BLOCK * BLOCK
    for salt in ("a", "b", None):
        assert sum(ask(salt).values()) == 0
        assert ask(salt) == {"device": whole}
    mixed = [(Sequence(f"{salt}", list(tokens), NEW, salt=salt), answer) for salt in ("a", "c", "b", "d")]
    assert serve(engine, mixed) == Served(device=2 * whole)
    closed(engine)


def test_tenants_with_a_small_pool(house: House) -> None:
    engine = engine_of(house.cache(slots=96), step_tokens=40)
    found = converse(engine, salt="a") + converse(engine, salt="b")
    assert min(found[what] for what in ("device", "host", "disk", "preemptions")) > 0, found
    closed(engine)


def test_what_one_engine_demotes_another_promotes(house: House) -> None:
    first, second = engine_of(house.cache(slots=512)), engine_of(house.cache(slots=512))
    tokens, answer = talks_of("llama")[1][-1]
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    serve(first, [(Sequence("a", list(tokens), NEW), answer)])
    closed(first)  # its last blocks are in the host tier then
    seq = Sequence("b", list(tokens), NEW)
    serve(second, [(seq, answer)])
    assert seq.hits == {"host": whole}
    closed(second)


def test_chunks_of_the_transformers_connector_are_hit(house: House) -> None:
    model, (tokens, answer) = model_of("llama"), talks_of("llama")[1][-1]
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    cache = house.cache(slots=512)
    cached = CachedModel(model, cache=cache)
    ids = torch.tensor([tokens])
    cached.generate(ids, max_new_tokens=NEW, do_sample=False)
    engine, seq = engine_of(cache), Sequence("a", list(tokens), NEW)
    serve(engine, [(seq, answer)])
    assert seq.hits == {"host": whole}
    engine.add(Sequence("b", tokens + answer[:-1], 1))
    while engine.busy:
        engine.step()
    closed(engine)
    out = cached.generate(torch.tensor([tokens + answer[:-1]]), max_new_tokens=1, do_sample=False)
    assert out[0, -1] == answer[-1]
    assert cached.last.columns == (len(tokens) + NEW - 2) // BLOCK * BLOCK  # what the engine generated too


def test_after_a_restart_and_a_wiped_host_the_disk_has_it(house: House) -> None:
    engine = engine_of(house.cache())
    converse(engine)
    closed(engine)
    house.shut(wipe_host=True)
    engine = engine_of(house.cache())
    tokens, answer = talks_of("llama")[1][0]
    seq = Sequence("again", list(tokens), NEW)
    serve(engine, [(seq, answer)])
    assert seq.hits.get("disk", 0) > 0 and set(seq.hits) == {"disk"}
    assert converse(engine)["disk"] > 0
    closed(engine)


def test_requests_are_aborted_wherever_they_are(house: House) -> None:
    engine, dice = engine_of(house.cache(), step_tokens=30), random.Random(0)
    converse(engine)
    for turn in (0, 3):
        going = [
            Sequence(f"x{talk}.{turn}", list(turns[turn][0]), NEW)
            for talk, turns in enumerate(talks_of("llama"))
        ]
        for seq in going:
            engine.add(seq)
        while engine.busy:
            engine.step()
            alive = [*engine.running, *engine.waiting]
            if alive and dice.random() < 0.3:
                engine.abort(dice.choice(alive))
            engine.manager.check()
    converse(engine, salt="after")
    engine.add(Sequence("last", list(range(1, 30)), NEW))
    engine.step()
    closed(engine)


def test_requests_that_cannot_be_are_refused_at_once() -> None:
    engine = engine_of(None)
    for tokens, new in (([], 4), ([1], 0), ([1] * BLOCK * BLOCKS, 1)):
        with pytest.raises(ValueError, match="at least 1 \\+ 1, at most 288"):
            engine.add(Sequence("a", tokens, new))
    assert not engine.busy
    serve(
        engine,
        [
            (
                seq := Sequence("a", prompt(BLOCK * BLOCKS - NEW)[0].tolist(), NEW),
                generated(model_of("llama"), torch.tensor([seq.tokens]), NEW)[0],
            )
        ],
    )
    closed(engine)


# ---- faults: everything still identical, only slower


def test_faulty_disk(house: House) -> None:
    cache, dice = house.cache(deadline_seconds=0.5), random.Random(0)
    slab = house.slab
    slab.delay_seconds = 0.005
    faults = [Fault.EIO, Fault.TORN, Fault.BIT_FLIP, Fault.LOST, Fault.SHORT, Fault.DELAY, Fault.ENOSPC]

    def trouble() -> None:
        slab.fail_next(dice.choice(["read", "write"]), dice.choice(faults), skip=dice.randint(0, 3))

    engine = engine_of(cache, step_tokens=40)
    found = converse(engine, between=trouble)
    assert found["host"] > 0 and sum(slab.struck.values()) > 20 and len(slab.struck) > 4
    closed(engine)


def test_a_disk_that_hangs_is_waited_for_within_bounds(house: House) -> None:
    cache = house.cache(slots=512)
    tokens, answer = talks_of("llama")[1][-1]
    engine = engine_of(cache)
    serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    closed(engine)
    house.shut(wipe_host=True)
    cache = house.cache(deadline_seconds=30.0)
    house.slab.fail_next("read", Fault.HANG, times=1000)
    engine = engine_of(cache, patience_seconds=0.3)
    began = time.monotonic()
    found = serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    assert house.slab.hanging.is_set() and time.monotonic() - began < 10
    assert found["disk"] == 0
    house.slab.heal()
    closed(engine)


def test_host_chunks_go_while_they_are_used(house: House) -> None:
    cache, dice = house.cache(), random.Random(1)
    host = cache._storeys.host
    removed = Counter[str]()
    keys = [
        key for turns in talks_of("llama") for tokens, answer in turns[-1:]
        for _, _, key in cache.keys(tokens + answer)
    ]  # fmt: skip

    def trouble() -> None:
        for key in dice.sample(keys, 12):
            removed["chunks"] += host.remove(key)
        if dice.random() < 0.02:
            removed["clears"] += 1
            cache.clear()

    engine = engine_of(cache)
    found = converse(engine, between=trouble)
    assert removed["chunks"] > 20 and removed["clears"] > 0 and found["host"] + found["disk"] > 0, (
        removed,
        found,
    )
    closed(engine)


@pytest.mark.parametrize(("up", "down"), [(6, 30), (4, 9)])
def test_copies_that_fail(up: int, down: int, house: House) -> None:
    engine = engine_of(house.cache())
    seen = fault_copies(engine, every(up, down))
    found = converse(engine)
    assert seen["down"] > 2 and seen["up"] > 2 and seen["shortened"] > 0, seen
    assert found["host"] + found["disk"] > 0
    closed(engine)


def test_requests_that_wait_for_the_same_failing_copy(house: House) -> None:
    cache = house.cache(slots=512)
    tokens, answer = talks_of("llama")[1][0]
    engine = engine_of(cache)
    serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    closed(engine)
    engine = engine_of(cache, patience_seconds=0)  # all are admitted in one step
    first = iter([True])
    seen = fault_copies(engine, lambda _: next(first, False))
    shared = [Sequence(f"{number}", list(tokens), NEW) for number in range(3)]
    found = serve(engine, [(seq, answer) for seq in shared])
    assert seen == Counter(up=1, shortened=1, again=2)
    assert shared[0].hits == {"device": 0, "host": 0} and found["host"] > 0
    closed(engine)


def test_everything_at_once(house: House) -> None:
    cache, dice = house.cache(deadline_seconds=0.5), random.Random(3)
    slab, host = house.slab, cache._storeys.host
    keys = [key for turns in talks_of("llama") for _, _, key in cache.keys(turns[-1][0])]

    def trouble() -> None:
        host.remove(dice.choice(keys))
        slab.fail_next(dice.choice(["read", "write"]), dice.choice([Fault.EIO, Fault.BIT_FLIP, Fault.TORN]))

    engine = engine_of(cache, step_tokens=24)
    seen = fault_copies(engine, every(6, 30))
    converse(engine, between=trouble)
    assert min(seen["down"], seen["up"], sum(slab.struck.values())) > 2
    closed(engine)


def test_the_cache_is_closed_under_way(house: House) -> None:
    cache = house.cache()
    engine, steps = engine_of(cache), Counter[str]()

    def trouble() -> None:
        steps["done"] += 1
        if steps["done"] == 90:
            engine._copier.submit(int).result()  # slots are not to be copied into after the close
            assert cache.close()

    found = converse(engine, between=trouble)
    assert steps["done"] > 150 and found["host"] > 0
    found = converse(engine, salt="after")
    assert found["device"] > 0 and found["host"] == found["disk"] == 0
    closed(engine)


# ---- the command


def test_the_command_replays_and_another_process_hits_the_disk(
    shm_root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    lines = [
        {"id": "a", "prompt": "The quick brown fox jumps over the lazy dog. " * 6, "max_new_tokens": 24},
        {"id": "b", "prompt": "And then?", "max_new_tokens": 24, "after": "a", "arrival_seconds": 0.1},
        {"id": "c", "tokens": list(range(40)), "max_new_tokens": 24, "salt": "x", "arrival_seconds": 0},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    for number, tier in ((0, None), (1, "disk")):
        args = [
            path,
            "--verify",
            "--json",
            "--host-path",
            shm_root / f"{number}",
            "--disk-path",
            tmp_path / "disk",
        ]
        if number == 0:
            monkeypatch.setattr(sys, "argv", ["paged_engine", *map(str, args)])
            assert cli.main() == 0
            said = capsys.readouterr().out
        else:
            said = subprocess.check_output([*COMMAND, *map(str, args)], cwd=ROOT, text=True, timeout=60)
        rows = {row["id"]: row for row in json.loads(said)["requests"]}
        assert all(row["identical"] is True and row["first_token_seconds"] > 0 for row in rows.values())
        assert rows["b"]["prompt_tokens"] == rows["a"]["prompt_tokens"] + 24 + len("And then?")
        assert rows["b"]["device"] > 256
        assert {name: rows["a"][name] > 0 for name in ("device", "host", "disk")} == {
            name: name == tier for name in ("device", "host", "disk")
        }
        assert len({token for row in rows.values() for token in row["output"]}) >= 20


def test_the_command_is_interrupted_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "x", "arrival_seconds": 600}))
    (tmp_path / "temporary").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    running = subprocess.Popen([*COMMAND, str(path)], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (made := list((tmp_path / "temporary").glob("paged-*/*/slab"))) and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert (running.returncode, said) == (130, "paged_engine: interrupted\n")
    assert made and not made[0].exists()


@pytest.mark.parametrize(
    ("args", "line", "says"),
    [
        (["--blocks", "0"], None, "must be at least 1"),
        (["--host", "3kk"], None, "'kk' is not a unit"),
        (["--host", "4KiB"], None, "no room for one chunk"),
        (["--disk", "1q"], None, "'q' is not a unit"),
        (["--device", "nowhere"], None, "--device nowhere"),
        (["--model", "/nowhere/at/all"], None, "/nowhere/at/all"),
        (["--host-path", "/proc/none"], None, "cannot be made"),
        (["--blocks", "4"], {"id": "a", "prompt": "x" * 100}, "100 + 32 tokens; at least 1 + 1, at most 64"),
        ([], {"id": "a"}, "line 1: "),
        ([], {"id": 1, "tokens": [1]}, "line 1: 'id'"),
        ([], {"id": "a", "tokens": [256]}, "line 1: tokens are numbers from 0 to 255"),
        ([], {"id": "a", "tokens": [1], "table": []}, "line 1: 'table' is no field"),
        ([], {"id": "a", "tokens": [1], "after": "b"}, "line 1: its id was there before, or 'after'"),
        ([], [], "line 1: "),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], line: object, says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line or {"id": "a", "tokens": [1]}) if line != [] else "[]")
    monkeypatch.setattr(sys, "argv", ["paged_engine", str(path), *args])
    assert cli.main() == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


def test_usage_is_shown_without_importing_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--no-prefix-cache" in done.stdout
    assert "pagoda.errors" in done.stderr and "torch" not in done.stderr


def test_it_can_be_read() -> None:
    files = sorted((ROOT / "examples" / "paged_engine").glob("*.py"))
    assert sum(len(file.read_text().splitlines()) for file in files) <= 600
