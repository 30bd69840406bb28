"""`pagoda explain`: how much of a prompt each tier has, and the reason why not more."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar, cast

import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.cache.prompt_log import PromptLog
from pagoda.keys import Namespace, as_token_ids, chunk_keys
from pagoda.ledger import Ledger, admin
from pagoda_tools.cli import main, prompt_source
from pagoda_tools.cli.stores import find_stores
from tests.cli.shelf import (
    CHUNK,
    LLAMA,
    QWEN,
    answer,
    disk,
    host,
    pagoda,
    put,
    refused,
    run_here,
    save,
)

PROMPT = list(range(100, 164))  # four chunks


def explained(
    *args: object, tokens: list[int] = PROMPT, **variables: str
) -> list[dict[str, object]]:
    found = answer(
        "explain", *args, "--tokens", "-", stdin=json.dumps(tokens), **variables
    )
    assert found["asked_tokens"] == len(tokens)
    return cast("list[dict[str, object]]", found["answers"])


def only(
    *args: object, tokens: list[int] = PROMPT, **variables: str
) -> tuple[object, object, str]:
    (one,) = explained(*args, tokens=tokens, **variables)
    return one["num_tokens"], one["reason"], str(one["detail"])


@pytest.mark.slow
def test_a_prompt_that_is_stored_whole_is_a_hit_of_100_percent(
    shm_root: Path, tmp_path: Path
) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    assert only(shm_root)[:2] == (64, None)
    assert only(shm_root, tokens=[*PROMPT, 1, 2, 3])[:2] == (64, None)
    (tmp_path / "tokens").write_text(" ".join(map(str, PROMPT)))
    shown = pagoda("explain", shm_root, "--tokens", tmp_path / "tokens").stdout
    assert "of 64 tokens" in shown
    assert "100.0 %" in shown


def test_absent_in_the_middle(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT[:32])
    num_tokens, reason, detail = only(shm_root)
    assert num_tokens == 32
    assert reason == "absent"
    assert "chunk 2" in detail


def test_evicted_some_time_ago(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT)
    for number in range(23):
        put(ledger, LLAMA, range(1000 * (number + 1), 1000 * (number + 1) + 48))
    num_tokens, reason, detail = only(shm_root)
    assert num_tokens == 0
    assert reason == "evicted"
    assert detail.endswith(" ago")


def test_what_was_cleared_or_removed_is_named_so(shm_root: Path) -> None:
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
    num_tokens, reason, detail = only(
        shm_root, "--namespace", other.root.hex()[:16]
    )
    assert num_tokens == 0
    assert reason == "other_namespace"
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
        assert process.stdout is not None
        assert process.stdout.readline() == "reserved\n"
        assert only(shm_root)[:2] == (16, "busy")
        process.kill()


def test_below_the_minimum_and_short_prompts(shm_root: Path) -> None:
    put(host(shm_root), LLAMA, PROMPT[:32])
    assert only(shm_root, PAGODA_MIN_HIT_TOKENS="48")[:2] == (0, "below_minimum")
    num_tokens, reason, detail = only(shm_root, tokens=PROMPT[:7])
    assert num_tokens == 0
    assert reason == "short_prompt"
    assert "chunk of 16" in detail


def test_not_worth_loading_where_computing_is_faster(
    shm_root: Path, tmp_path: Path
) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT)
    for root in (shm_root, tmp_path):
        num_tokens, reason, detail = only(root, "--prefill", 10**12)
        assert num_tokens == 0
        assert reason == "not_worth_it"
        assert "ms" in detail
        assert only(root, "--prefill", 1)[:2] == (64, None)
        assert only(root, "--prefill", 10**12, PAGODA_WORTH_IT="false")[:2] == (
            64,
            None,
        )


def test_a_chunk_that_failed_its_check(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        keys = save(tier, LLAMA, PROMPT)
        slot = int(tier.ledger.match_prefix(keys).slots[1])
        with tier.ledger.slab_path.open("r+b") as stream:
            stream.seek(slot * 8192 + 5000)
            stream.write(b"\xff")
        assert tier.get(keys[1]) is None
    assert only(tmp_path)[:2] == (16, "failed_check")


def test_tiers_are_explained_one_by_one_and_together(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT[:32])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:48])
        admin.remove(tier.ledger, chunk_keys(PROMPT, LLAMA.root, CHUNK)[:1])
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_DISK_PATH": str(tmp_path),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    found = explained(**where)
    assert [(one["tier"], one["num_tokens"], one["reason"]) for one in found] == [
        ("host", 32, "absent"),
        ("disk", 0, "removed"),
        ("all", 48, "absent"),
    ]
    found = explained(PAGODA_MIN_HIT_TOKENS="40", **where)
    assert [(one["tier"], one["num_tokens"]) for one in found] == [
        ("host", 32),
        ("disk", 0),
        ("all", 48),
    ]
    found = explained(PAGODA_MIN_HIT_TOKENS="64", **where)
    assert found[-1]["num_tokens"] == 0
    assert found[-1]["reason"] == "below_minimum"


def test_the_reason_of_all_tiers_together_is_that_of_the_first_chunk_that_none_of_them_has(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT[:48])
    admin.remove(ledger, keys[2:])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:48])
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_DISK_PATH": str(tmp_path),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    together = explained(**where)[-1]
    assert together["tier"] == "all"
    assert together["num_tokens"] == 48
    assert together["reason"] == "absent"
    # chunk 2, which the host has lost, came from the disk
    assert "chunk 3" in str(together["detail"])


def test_tiers_that_take_turns_serve_together_what_a_retrieve_would(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    keys = put(ledger, LLAMA, PROMPT[:48])
    admin.remove(ledger, keys[1:2])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT[:32])
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_DISK_PATH": str(tmp_path),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    found = explained(**where)
    assert [(one["tier"], one["num_tokens"], one["reason"]) for one in found] == [
        ("host", 16, "removed"),
        ("disk", 32, "absent"),
        # chunk 0 and 2 from the host, chunk 1 from the disk
        ("all", 48, "absent"),
    ]


def test_two_stores_of_one_tier_are_two_places(shm_root: Path) -> None:
    put(host(shm_root, name="a"), LLAMA, PROMPT[:48])
    put(host(shm_root, name="b"), LLAMA, PROMPT[:16])
    found = explained(shm_root)  # the shorter one does not hide the other
    assert [(one["tier"], one["num_tokens"]) for one in found] == [
        ("host", 48),
        ("host", 16),
        ("all", 48),
    ]


def test_the_best_namespace_comes_first_and_one_may_be_chosen(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(16))
    put(ledger, QWEN, PROMPT)
    found = explained(shm_root)
    assert [
        (one["model"], one["num_tokens"], one["reason"]) for one in found
    ] == [
        ("qwen", 64, None),
        ("llama kv_dtype=bfloat16", 0, "other_namespace"),
    ]
    assert only(shm_root, "--model", "qwen")[0] == 64


def test_explaining_touches_nothing(shm_root: Path) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, PROMPT[:32])
    before = (
        ledger.columns.last_use.tobytes(),
        ledger.columns.hits.tobytes(),
        admin.counters(ledger),
    )
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
    assert (
        "no such file"
        in refused("explain", shm_root, "--tokens", tmp_path / "none").lower()
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    assert "not text" in refused(
        "explain", shm_root, "--tokens", tmp_path / "binary"
    )
    for text in (
        "[1, 2",
        "one two",
        "[1.5]",
        "[-1]",
        '["a"]',
        "[[1], [2]]",
        "99999999999",
        "{}",
    ):
        assert "not a list of token ids" in refused(
            "explain", shm_root, "--tokens", "-", stdin=text
        )
    assert "has no token ids" in refused(
        "explain", shm_root, "--tokens", "-", stdin="[]"
    )
    assert "--chunk-tokens" in refused(
        "explain", shm_root, "--tokens", "-", "--chunk-tokens", "0", stdin="1"
    )


@pytest.mark.parametrize(
    "form", [" ".join, ",".join, ", ".join, lambda ids: f"[{', '.join(ids)}]"]
)
def test_token_ids_are_given_directly_or_in_a_file(
    shm_root: Path, tmp_path: Path, form: Callable[[list[str]], str]
) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    text = form([str(token) for token in PROMPT])
    (tmp_path / "file").write_text(text)
    found = [
        answer("explain", shm_root, "--tokens", given)
        for given in (text, tmp_path / "file")
    ]
    assert found[0] == found[1]
    assert found[0]["answers"][0]["num_tokens"] > 0  # type: ignore[index]
    assert "has no token ids" in refused("explain", shm_root, "--tokens", "[]")
    assert "not a list of token ids" in refused(
        "explain", shm_root, "--tokens", "[1, 2"
    )


def test_reasons_are_those_of_the_metrics() -> None:
    assert {
        "absent",
        "evicted",
        "cleared",
        "busy",
        "short_prompt",
        "below_minimum",
    } <= set(Reason)


# ---- the token that differs, and where the prompt comes from


def logged(ledger: Ledger, namespace: Namespace, tokens: list[int]) -> None:
    """Store a prompt as a cache does: its chunks, and the prompt in the log."""
    keys = put(ledger, namespace, tokens)
    log = PromptLog(ledger, CHUNK, Clock())
    log.append(namespace.root, CHUNK, keys, as_token_ids(tokens))
    log.close()


def planted(at: int) -> list[int]:
    return [*PROMPT[:at], 7, *PROMPT[at + 1 :]]


def said(*args: object, stdin: str = "", **variables: str) -> dict[str, object]:
    code, out, err = run_here(
        "explain", *args, "--json", stdin=stdin, **variables
    )
    assert code == 0, err
    return cast("dict[str, object]", json.loads(out))


def near(*args: object, stdin: str = "", **variables: str) -> dict[str, object]:
    (one,) = cast(
        "list[dict[str, object]]",
        said(*args, stdin=stdin, **variables)["nearest"],
    )
    return one


def test_the_token_that_differs_the_nearest_prompt_and_the_tiers_that_have_it(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    logged(ledger, LLAMA, PROMPT)
    found = near(shm_root, "--tokens", "-", stdin=json.dumps(planted(37)))
    assert found["token"] == 37
    assert found["token_id"] == 7
    assert found["stored_id"] == PROMPT[37]
    assert found["num_tokens"] == 64
    assert found["tiers"] == ["host"]
    assert found["other_fields"] == []
    assert found["key"] == chunk_keys(PROMPT, LLAMA.root, CHUNK)[2].hex()
    shown = run_here(
        "explain", shm_root, "--tokens", "-", stdin=json.dumps(planted(37))
    )[1]
    assert "it differs at token 37: 7 here, 137 in the nearest" in shown
    assert (
        "the first chunk that is not served: chunk 2 (tokens 32 to 47)" in shown
    )
    assert max(map(len, shown.splitlines())) <= 80
    admin.remove(ledger, chunk_keys(PROMPT, LLAMA.root, CHUNK)[2:])
    assert (
        near(shm_root, "--tokens", "-", stdin=json.dumps(planted(37)))["tiers"]
        == []
    )
    shown = run_here(
        "explain", shm_root, "--tokens", "-", stdin=json.dumps(planted(37))
    )[1]
    assert "no longer stored" in shown


def test_without_a_log_the_chunk_is_said_and_that_the_token_is_not_known(
    shm_root: Path,
) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    shown = run_here(
        "explain", shm_root, "--tokens", "-", stdin=json.dumps(planted(37))
    )[1]
    assert "chunk 2" in shown
    assert "the token that differs is not known" in shown


def test_a_token_in_what_is_served_is_not_why_the_rest_misses(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    logged(ledger, LLAMA, planted(5))
    # stored so long ago that it is in the log no more
    put(ledger, LLAMA, PROMPT[:48])
    shown = run_here(
        "explain", shm_root, "--tokens", "-", stdin=json.dumps(PROMPT)
    )[1]
    assert "chunk 3" in shown
    assert "the token that differs is not known" in shown


def test_what_the_tiers_serve_only_together_is_compared_with_another_prompt(
    shm_root: Path, tmp_path: Path
) -> None:
    ledger = host(shm_root)
    logged(ledger, LLAMA, PROMPT)
    logged(ledger, LLAMA, planted(37))
    admin.remove(ledger, chunk_keys(PROMPT, LLAMA.root, CHUNK)[3:])
    with disk(tmp_path) as tier:
        save(tier, LLAMA, PROMPT)
        admin.remove(tier.ledger, chunk_keys(PROMPT, LLAMA.root, CHUNK)[:1])
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_DISK_PATH": str(tmp_path),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    assert near("--tokens", "-", stdin=json.dumps(PROMPT), **where)["token"] == 37


def test_which_field_of_the_namespace_is_another_and_no_salt(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    put(ledger, LLAMA, range(16))
    other = LLAMA.with_(salt="secret of a tenant", kv_dtype="float8")
    logged(ledger, other, PROMPT)
    found = explained(shm_root, "--namespace", LLAMA.root.hex()[:16])
    assert found[0]["reason"] == "other_namespace"
    assert found[0]["other_fields"] == ["kv_dtype", "salt"]
    assert other.fields()["salt"] not in str(found[0]["detail"])
    one = near(
        shm_root,
        "--namespace",
        LLAMA.root.hex()[:16],
        "--tokens",
        "-",
        stdin=json.dumps(PROMPT),
    )
    assert one["other_fields"] == ["kv_dtype", "salt"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for which the text of token 7 is "t7", with a chat template."""
    words = pytest.importorskip("tokenizers.models")
    pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    cutter = pytest.importorskip("tokenizers").Tokenizer(
        words.WordLevel(
            {f"t{number}": number for number in range(1000)}, unk_token="t0"
        )
    )
    cutter.pre_tokenizer = pre_tokenizers.Whitespace()
    made = fast(tokenizer_object=cutter, unk_token="t0")
    made.chat_template = (
        "{% for one in messages %}{{ one['content'] }}{% endfor %}{% if tools %} t900{% "
        "endif %}"
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(directory)
    return directory


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_text_and_messages_by_a_tokenizer(
    shm_root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    logged(host(shm_root), LLAMA, PROMPT)
    for place in (tokenizer, tokenizer / "tokenizer.json"):
        found = near(shm_root, "--text", words(planted(20)), "--tokenizer", place)
        assert found["token"] == 20
    chat = [{"role": "user", "content": words(planted(33))}]
    (tmp_path / "chat.json").write_text(
        json.dumps(
            {"messages": chat, "model": "any", "tools": [{"type": "function"}]}
        )
    )
    answered = said(
        shm_root, "--messages", tmp_path / "chat.json", "--tokenizer", tokenizer
    )
    assert answered["asked_tokens"] == 65
    assert cast("list[dict[str, object]]", answered["nearest"])[0]["token"] == 33
    for place in (tmp_path / "none", tmp_path / "chat.json"):
        line = refused("explain", shm_root, "--text", "a", "--tokenizer", place)
        assert f"--tokenizer {place}" in line
        assert "name a model's directory" in line


def test_the_page_cuts_text_by_a_tokenizer_that_is_loaded_once(
    tmp_path: Path, tokenizer: Path
) -> None:
    from pagoda_tools.cli.web_page_options import page_options

    file = tmp_path / "tokenizer.json"
    file.write_bytes((tokenizer / "tokenizer.json").read_bytes())
    cut = page_options(tmp_path, None, None, file).prompts.tokenize
    file.unlink()
    assert cut is not None
    assert list(cut(words([7, 900]))) == [7, 900]
    with pytest.raises(ValueError, match="characters: at most"):
        cut("a" * (5 << 20))


def test_the_page_shows_the_text_of_the_token_that_differs(
    shm_root: Path, tokenizer: Path
) -> None:
    from pagoda_tools.cli.web_page_options import page_options

    logged(host(shm_root), LLAMA, PROMPT)
    (store,) = find_stores(shm_root, None)
    with contextlib.closing(Ledger.attach(store)) as ledger:

        def texts(tokens: list[int], place: Path | None) -> object:
            explain = page_options(shm_root, None, None, place).prompts.explain
            (found,) = explain(tokens, [ledger], None)
            return found["texts"]

        for place in (tokenizer, tokenizer / "tokenizer.json"):
            said = cast("dict[str, str]", texts(planted(20), place))
            assert said["before"].split() == words(PROMPT[8:20]).split()
            assert said["here"].strip() == f"t{planted(20)[20]}"
            assert said["stored"].strip() == f"t{PROMPT[20]}"
        ended = cast("dict[str, str]", texts([*PROMPT, 7], tokenizer))
        assert ended["here"].strip() == "t7"
        assert ended["stored"] is None
        assert texts(planted(20), None) is None


class Vllm(BaseHTTPRequestHandler):
    """What a vLLM server answers about tokens: whoever asks must have the key."""

    seen: ClassVar[list[tuple[str, object]]] = []

    def do_GET(self) -> None:
        self._answer(
            {
                "data": [
                    {"id": "tiny", "root": "/models/llama"},
                    {"id": "adapter", "parent": "tiny"},
                ]
            }
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, asked))
        self._answer(
            {
                "tokens": [int(word[1:]) for word in asked["prompt"].split()],
                "count": 0,
            }
        )

    def _answer(self, said: object) -> None:
        right = self.headers["Authorization"] == "Bearer a-key"
        content = json.dumps(said if right else {"error": "who?"}).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_text_by_a_server_with_its_key_and_only_of_its_model(
    shm_root: Path, tmp_path: Path, url: str
) -> None:
    ledger = host(shm_root)
    logged(ledger, LLAMA, PROMPT)
    logged(ledger, QWEN, PROMPT)
    key = tmp_path / "key"
    key.write_text("a-key\n")
    for options, variables in (
        (("--api-key-file", key), {}),
        ((), {"OPENAI_API_KEY": "a-key"}),
    ):
        place = f"{url}/v1"  # as other programs have it
        answered = said(
            shm_root,
            "--text",
            words(planted(50)),
            "--url",
            place,
            *options,
            **variables,
        )
        # the model's, not Qwen's
        (one,) = cast("list[dict[str, object]]", answered["answers"])
        assert str(one["model"]).startswith("llama")
        assert (
            cast("list[dict[str, object]]", answered["nearest"])[0]["token"] == 50
        )
    assert Vllm.seen[-1] == (
        "/tokenize",
        {"model": "tiny", "prompt": words(planted(50))},
    )
    nowhere = (
        "http://127.0.0.1:9",
        "http://a..b:8000",
        "http://127.0.0.1:9/\N{SNOWMAN}",
    )
    for place, words_of_it in (
        (url, "OPENAI_API_KEY"),
        *((place, "no answer") for place in nowhere),
    ):
        code, _, err = run_here(
            "explain", shm_root, "--text", "t1", "--url", place
        )
        assert code == 1
        assert words_of_it in err
        assert err.count("\n") == 1


def test_a_server_that_never_ends_its_answer_is_left_at_the_deadline(
    shm_root: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(self: Vllm) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(0.02)

    put(host(shm_root), LLAMA, PROMPT)
    monkeypatch.setattr(Vllm, "do_GET", drip)
    for seconds in (0.3, 3.0, 30.0):
        monkeypatch.setattr(prompt_source, "_ASK_SECONDS", seconds)
        code, _, err = run_here("explain", shm_root, "--text", "t1", "--url", url)
        assert code == 1
        # on a busy machine the answer may not even begin in time
        if "no answer (timed out)" not in err:
            break
    assert "too slow" in err


def test_wrong_use_of_the_sources_is_one_line(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(host(shm_root), LLAMA, PROMPT)
    ask = ("explain", shm_root)
    assert "the prompt is missing" in refused(*ask)
    assert "--text and --messages: give only one of them" in refused(
        *ask, "--text", "a", "--messages", "b"
    )
    assert "either --tokenizer PATH, or --url" in refused(*ask, "--text", "a")
    assert "leave --tokenizer and --url out" in refused(
        *ask, "--tokens", "-", "--url", "http://h", stdin="1"
    )
    assert "write only http://HOST:PORT" in refused(
        *ask, "--text", "a", "--url", "http://me:key@host:1"
    )
    assert "http://HOST:PORT" in refused(
        *ask, "--text", "a", "--url", "host:8000"
    )
    (tmp_path / "text").write_bytes(b"\xff")
    with (tmp_path / "text").open() as binary, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", binary)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            assert (
                main(
                    ["explain", str(shm_root), "--text", "-", "--url", "http://h"]
                )
                == 2
            )
        assert "not text" in errors.getvalue()
    (tmp_path / "chat").write_text("[]")
    assert "not chat messages" in refused(
        *ask, "--messages", tmp_path / "chat", "--url", "http://h"
    )
    (tmp_path / "chat").write_text("[")
    assert "not JSON" in refused(
        *ask, "--messages", tmp_path / "chat", "--url", "http://h"
    )
