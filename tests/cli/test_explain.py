"""`pagoda explain`: how much of a prompt each tier has, and the reason why not more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from pagoda.keys import chunk_keys
from pagoda.ledger import admin
from pagoda.metrics import Reason
from tests.cli.shelf import CHUNK, LLAMA, QWEN, answer, disk, host, pagoda, put, refused, save

PROMPT = list(range(100, 164))  # four chunks


def explained(*args: object, tokens: list[int] = PROMPT, **variables: str) -> list[dict[str, object]]:
    found = answer("explain", *args, "--tokens", "-", stdin=json.dumps(tokens), **variables)
    assert found["asked_tokens"] == len(tokens)
    return cast("list[dict[str, object]]", found["answers"])


def only(*args: object, tokens: list[int] = PROMPT, **variables: str) -> tuple[object, object, str]:
    (one,) = explained(*args, tokens=tokens, **variables)
    return one["num_tokens"], one["reason"], str(one["detail"])


def test_all_there(shm_root: Path, tmp_path: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    assert only(shm_root)[:2] == (64, None)
    assert only(shm_root, tokens=[*PROMPT, 1, 2, 3])[:2] == (64, None)
    (tmp_path / "tokens").write_text(" ".join(map(str, PROMPT)))
    shown = pagoda("explain", shm_root, "--tokens", tmp_path / "tokens").stdout
    assert "of 64 tokens" in shown and "100.0 %" in shown


def test_absent_in_the_middle(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT[:32])
    num_tokens, reason, detail = only(shm_root)
    assert (num_tokens, reason) == (32, "absent")
    assert "chunk 2" in detail


def test_evicted_some_time_ago(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT)
    for number in range(23):
        put(ledger, LLAMA, range(1000 * (number + 1), 1000 * (number + 1) + 48))
    num_tokens, reason, detail = only(shm_root)
    assert (num_tokens, reason) == (0, "evicted")
    assert detail.endswith(" ago")


def test_cleared_and_removed(shm_root: Path) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT)
    admin.remove(ledger, keys[1:2])
    assert only(shm_root)[:2] == (16, "removed")
    admin.clear(ledger, LLAMA.root)
    assert only(shm_root, "--chunk-tokens", CHUNK)[:2] == (0, "cleared")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model", {"model": "llama-2"}),
        ("kv_dtype", {"kv_dtype": "float8_e5m2"}),
        ("lora", {"lora": "adapter"}),
        ("salt", {"salt": "secret of a tenant"}),
        ("weights_epoch", {"weights_epoch": 1}),
    ],
)
def test_another_namespace_has_it_and_which_field_differs(
    shm_root: Path, field: str, changes: dict[str, str | int]
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT)
    other = LLAMA.with_(**changes)
    ledger.namespaces.register(other.root, other.fields())
    ledger.namespaces.write_labels()
    num_tokens, reason, detail = only(shm_root, "--namespace", other.root.hex()[:16])
    assert (num_tokens, reason) == (0, "other_namespace")
    assert f"with {field} " in detail
    assert "secret" not in detail


def test_busy_while_another_process_fills_it(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT[:16])
    keys = chunk_keys(PROMPT, LLAMA.root, CHUNK)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.cli.shelf import LLAMA, host\n"
        "ledger = host(Path(sys.argv[1]))\n"
        "ledger.reserve([bytes.fromhex(sys.argv[2])], namespace=LLAMA.root, start=1)\n"
        "print('reserved', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(shm_root), keys[1].hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "reserved\n"
        assert only(shm_root)[:2] == (16, "busy")
        process.kill()


def test_below_the_minimum_and_short_prompts(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT[:32])
    assert only(shm_root, PAGODA_MIN_HIT_TOKENS="48")[:2] == (0, "below_minimum")
    num_tokens, reason, detail = only(shm_root, tokens=PROMPT[:7])
    assert (num_tokens, reason) == (0, "short_prompt")
    assert "chunk of 16" in detail


@pytest.mark.slow
def test_not_worth_loading_where_computing_is_faster(shm_root: Path, tmp_path: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT)
    for root in (shm_root, tmp_path):
        num_tokens, reason, detail = only(root, "--prefill", 10**12)
        assert (num_tokens, reason) == (0, "not_worth_it")
        assert "ms" in detail
        assert only(root, "--prefill", 1)[:2] == (64, None)
        assert only(root, "--prefill", 10**12, PAGODA_WORTH_IT="false")[:2] == (64, None)


def test_a_chunk_that_failed_its_check(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        keys = save(tier, LLAMA, PROMPT)
        slot = int(tier.ledger.match_prefix(keys).slots[1])
        with tier.ledger.slab_path.open("r+b") as stream:
            stream.seek(slot * 8192 + 5000)
            stream.write(b"\xff")
        assert tier.get(keys[1]) is None
    assert only(tmp_path)[:2] == (16, "failed_check")


def test_tiers_together(shm_root: Path, tmp_path: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT[:32])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:48])
        admin.remove(tier.ledger, chunk_keys(PROMPT, LLAMA.root, CHUNK)[:1])
    where = {"PAGODA_HOST_PATH": str(shm_root), "PAGODA_DISK_PATH": str(tmp_path), "PAGODA_DISK_SIZE": "1GiB"}
    found = explained(**where)
    assert [(one["tier"], one["num_tokens"], one["reason"]) for one in found] == [
        ("host", 32, "absent"),
        ("disk", 0, "removed"),
        ("all", 48, "absent"),
    ]
    found = explained(PAGODA_MIN_HIT_TOKENS="40", **where)
    assert [(one["tier"], one["num_tokens"]) for one in found] == [("host", 32), ("disk", 0), ("all", 48)]
    found = explained(PAGODA_MIN_HIT_TOKENS="64", **where)
    assert (found[-1]["num_tokens"], found[-1]["reason"]) == (0, "below_minimum")


def test_the_reason_of_all_tiers_together_is_that_of_the_first_chunk_that_none_of_them_has(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT[:48])
    admin.remove(ledger, keys[2:])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:48])
    where = {"PAGODA_HOST_PATH": str(shm_root), "PAGODA_DISK_PATH": str(tmp_path), "PAGODA_DISK_SIZE": "1GiB"}
    together = explained(**where)[-1]
    assert (together["tier"], together["num_tokens"], together["reason"]) == ("all", 48, "absent")
    assert "chunk 3" in str(together["detail"])  # chunk 2, which the host has lost, came from the disk


def test_tiers_that_take_turns_serve_together_what_a_retrieve_would(shm_root: Path, tmp_path: Path) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT[:48])
    admin.remove(ledger, keys[1:2])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:32])
    where = {"PAGODA_HOST_PATH": str(shm_root), "PAGODA_DISK_PATH": str(tmp_path), "PAGODA_DISK_SIZE": "1GiB"}
    found = explained(**where)
    assert [(one["tier"], one["num_tokens"], one["reason"]) for one in found] == [
        ("host", 16, "removed"),
        ("disk", 32, "absent"),
        ("all", 48, "absent"),  # chunk 0 and 2 from the host, chunk 1 from the disk
    ]


def test_two_stores_of_one_tier_are_two_places(shm_root: Path) -> None:
    put(host(shm_root, name="a"), LLAMA, PROMPT[:48])
    put(host(shm_root, name="b"), LLAMA, PROMPT[:16])
    found = explained(shm_root)  # the shorter one does not hide the other
    assert [(one["tier"], one["num_tokens"]) for one in found] == [("host", 48), ("host", 16), ("all", 48)]


def test_the_best_namespace_comes_first_and_one_may_be_chosen(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(16))
    put(ledger, QWEN, PROMPT)
    found = explained(shm_root)
    assert [(one["model"], one["num_tokens"], one["reason"]) for one in found] == [
        ("qwen", 64, None),
        ("llama kv_dtype=bfloat16", 0, "other_namespace"),
    ]
    assert only(shm_root, "--model", "qwen")[0] == 64


def test_explaining_touches_nothing(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT[:32])
    before = (ledger.columns.last_use.tobytes(), ledger.columns.hits.tobytes(), admin.counters(ledger))
    explained(shm_root)
    assert (
        ledger.columns.last_use.tobytes(),
        ledger.columns.hits.tobytes(),
        admin.counters(ledger),
    ) == before


def test_nothing_stored_yet(tmp_path: Path) -> None:
    assert explained(PAGODA_HOST_PATH=str(tmp_path / "none")) == []


def test_wrong_use_is_one_line(shm_root: Path, tmp_path: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    assert "--tokens FILE" in refused("explain", shm_root)
    assert "no such file" in refused("explain", shm_root, "--tokens", tmp_path / "none").lower()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    assert "not text" in refused("explain", shm_root, "--tokens", tmp_path / "binary")
    for text in ("[1, 2", "one two", "[1.5]", "[-1]", '["a"]', "[[1], [2]]", "99999999999", "{}"):
        assert "not a list of token ids" in refused("explain", shm_root, "--tokens", "-", stdin=text)
    assert "holds no token ids" in refused("explain", shm_root, "--tokens", "-", stdin="[]")
    assert "--chunk-tokens" in refused("explain", shm_root, "--tokens", "-", "--chunk-tokens", "0", stdin="1")


def test_reasons_are_those_of_the_metrics() -> None:
    assert {"absent", "evicted", "cleared", "busy", "short_prompt", "below_minimum"} <= set(Reason)
