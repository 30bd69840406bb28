"""`pagoda pin` and `pagoda unpin`: what is pinned outlives everything else that is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.ledger import admin
from tests.cli.shelf import (
    CHUNK,
    LLAMA,
    QWEN,
    answer,
    disk,
    done_here,
    host,
    pagoda,
    put,
    refused,
    save,
)

PROMPT = list(range(100, 164))  # four chunks


@pytest.mark.slow
def test_what_is_pinned_stays_until_it_is_unpinned(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT)
    put(ledger, QWEN, range(48))
    done = answer(
        "pin", shm_root, "--tokens", "-", stdin=json.dumps([*PROMPT, 1, 2])
    )
    assert done == {
        "pinned": [
            {
                "tier": "host",
                "namespace": LLAMA.root.hex(),
                "model": "llama kv_dtype=bfloat16",
                "num_tokens": 64,
            }
        ],
        "failed": {},
        "unconfigured": [],
    }
    for number in range(23):
        put(ledger, QWEN, range(1000 * (number + 1), 1000 * (number + 1) + 48))
    assert len(ledger.match_prefix(keys, touch=False).slots) == 4
    assert admin.list_pins(ledger) == {"pagoda": sorted(keys)}
    assert (
        "pinned"
        in pagoda(
            "pin", shm_root, "--tokens", "-", stdin=json.dumps(PROMPT)
        ).stdout
    )
    path = tmp_path / "tokens"
    path.write_text(" ".join(map(str, PROMPT[:32])))
    assert answer("unpin", shm_root, "--tokens", path)["ended"] == {
        str(ledger.directory): 2
    }
    assert answer("unpin", shm_root, "--owner", "somebody")["ended"] == {
        str(ledger.directory): 0
    }
    assert "2 chunks are no longer pinned" in pagoda("unpin", shm_root).stderr
    assert admin.list_pins(ledger) == {}
    ledger.close()


def test_the_disk_too_and_one_model_only(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        keys = save(tier, LLAMA, PROMPT)
        save(tier, QWEN, PROMPT)
        answer(
            "pin",
            tmp_path,
            "--tokens",
            "-",
            "--model",
            "llama",
            "--owner",
            "me",
            stdin=json.dumps(PROMPT),
        )
        assert {
            name: sorted(pinned)
            for name, pinned in admin.list_pins(tier.ledger).items()
        } == {"me": sorted(keys)}


def test_wrong_use_and_nothing_to_pin(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    assert "--tokens" in refused("pin", shm_root)
    nothing = done_here(
        "pin", shm_root, "--tokens", "-", stdin=json.dumps(list(range(3 * CHUNK)))
    )
    assert nothing.returncode == 1
    assert "beginning" in nothing.stderr
    assert "--owner" in refused(
        "pin", shm_root, "--tokens", "-", "--owner", "", stdin=json.dumps(PROMPT)
    )
