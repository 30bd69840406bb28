"""What `pagoda explain` says of random prompts of random stores, against what a cache in another
process finds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.ledger.store_state import PROMPTS
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    Prompt,
    config_of,
    kv_of,
    prompt,
    run_all,
    slots_of,
)
from tests.cli.shelf import answer

SALTS = (None, "of a tenant")
TIERS = (["host"], ["disk"], ["host", "disk"])


def _find(config: Config, asked: Sequence[Prompt], found: Connection) -> None:
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT) as cache:
        for one in asked:
            for salt in SALTS:
                found.send(
                    [
                        cache.lookup(one, tiers=tiers, salt=salt).num_tokens
                        for tiers in TIERS
                    ]
                )


def _same(a: Prompt, b: Prompt) -> int:
    both = min(len(a), len(b))
    return next((n for n in range(both) if a[n] != b[n]), both)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_it_says_is_what_a_look_up_in_another_process_finds(
    shm_root: Path, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    slot = LAYOUT.slot_bytes
    config = config_of(
        shm_root, tmp_path, host_size=12 * slot, disk_size=20 * (slot + 4096)
    )
    documents = [prompt(6, number) for number in range(3)]
    stored: dict[bytes, list[Prompt]] = {}  # by the root of their namespace

    def some() -> Prompt:
        one = chance.choice(documents).copy()
        if chance.random() < 0.5:
            one[chance.randrange(len(one))] += 1
        return one[: chance.randrange(1, len(one) + 1)]

    with Cache(config, namespace=NAMESPACE, layout=LAYOUT) as cache:
        roots = [slots_of(cache).namespace(salt=salt) for salt in SALTS]
        for _ in range(40):
            act = chance.random()
            tokens = some()
            number = chance.randrange(len(roots))
            salt = SALTS[number]
            if act < 0.9:
                cache.store(tokens, kv_of(tokens).transfer, salt=salt)
                stored.setdefault(roots[number], []).append(tokens)
            elif act < 0.95:
                (slots_of(cache)._ledger.directory / PROMPTS).unlink(
                    missing_ok=True
                )  # as if it were long ago
            else:
                cache.clear(salt=salt)
            assert cache.flush(100)
    asked = [some() for _ in range(12)]
    ours, theirs = SPAWN.Pipe()
    run_all([SPAWN.Process(target=_find, args=(config, asked, theirs))])
    places = {
        "PAGODA_HOST_PATH": str(shm_root / "host"),
        "PAGODA_DISK_PATH": str(tmp_path / "disk"),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    for tokens in asked:
        explained = answer(
            "explain",
            "--chunk-tokens",
            CHUNK,
            "--tokens",
            "-",
            stdin=json.dumps(tokens.tolist()),
            **places,
        )
        near = {
            bytes.fromhex(one["namespace"]): one for one in explained["nearest"]
        }  # type: ignore[attr-defined]
        for root in roots:
            found = dict(zip(("host", "disk", "all"), ours.recv(), strict=True))
            said = [
                one
                for one in explained["answers"]
                if one["namespace"] == root.hex()
            ]  # type: ignore[attr-defined]
            assert {one["tier"]: one["num_tokens"] for one in said} == found
            if root not in near:
                continue
            one = near[root]
            same = one["same_tokens"]
            of = stored[bytes.fromhex(one["of_namespace"])]
            assert any(
                _same(tokens, other) == same
                and (one["token"] is None or other[same] == one["stored_id"])
                for other in of
            )
            whole = len(tokens) // CHUNK * CHUNK
            assert found["all"] in (0, whole) or same >= found["all"], (
                "the token that differs is in what is served"
            )
