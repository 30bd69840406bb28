"""Which arguments of llama-server are the proxy's, which it gets, and which are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda_tools.llama_proxy.in_process_server import KNOWN, read_options
from pagoda_tools.llama_proxy.server_arguments import (
    ServerArguments,
    known_options,
    listen_address,
    only_prints,
    program_of,
    read_arguments,
    without_secrets,
)
from tests.llama_proxy.server_kit import build_of

ADDED = {
    "--slots",
    "--no-cache-idle-slots",
    "--no-context-shift",
    "--cache-reuse",
    "--cache-ram",
}
WITHOUT_RAM = [
    "--slots",
    "--no-cache-idle-slots",
    "--no-context-shift",
    "--cache-reuse",
    "0",
]


def read(*words: str, **variables: str) -> ServerArguments:
    return read_arguments(["-m", "x.gguf", *words], variables, ADDED)


def refused(*words: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*words, **variables)
    return str(caught.value)


def test_what_the_user_wrote_is_passed_unchanged() -> None:
    words = ["-c", "4096", "--jinja", "-ngl", "99", "--chat-template", "a b"]
    found = read(*words, "--lora", "x", "-np", "2")
    assert list(found.passed) == [
        "-m",
        "x.gguf",
        *words,
        *("--lora", "x", "-np", "2"),
    ]
    assert found.listen == ("127.0.0.1", 8080)
    assert found.api_keys == ()
    assert found.loading_is_off == ""


def test_the_command_listens_on_loopback_and_saves_slots() -> None:
    command = read("-c", "512").command(["/bin/server"], 1234, Path("/dev/shm/s"))
    own = ["--host", "127.0.0.1", "--port", "1234"]
    own += ["--slot-save-path", "/dev/shm/s"]
    start = ["/bin/server", "-m", "x.gguf", "-c", "512"]
    assert command == [*start, *own, *WITHOUT_RAM, "--cache-ram", "0"]


def test_the_address_is_the_proxys() -> None:
    found = read("--port", "9000", "--host", "0.0.0.0")
    assert found.listen == ("0.0.0.0", 9000)
    assert list(found.passed) == ["-m", "x.gguf"]
    # the command line counts more than the environment
    found = read("--port", "9000", LLAMA_ARG_PORT="7", LLAMA_ARG_HOST="::1")
    assert found.listen == ("::1", 9000)
    assert found.environment == {}


@pytest.mark.parametrize("host", ["/tmp/x.sock", "127.0.0.1,10.0.0.1"])
def test_an_address_that_is_none_for_the_proxy(host: str) -> None:
    assert "--listen HOST:PORT" in refused("--host", host)


@pytest.mark.parametrize("port", ["70000", "-1", "http", ""])
def test_a_port_that_is_none(port: str) -> None:
    assert "from 0 to 65535" in refused("--port", port)


def test_all_keys_are_accepted_as_the_server_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nk4\n\n k5\n")
    found = read(
        *("--api-key", "k2,k3", "--api-key-file", str(file), "--api_key", "k1"),
        LLAMA_API_KEY="k0,k2",
        OTHER="1",
    )
    assert found.api_keys == ("k0", "k2", "k3", "k4", "k5", "k1")
    assert found.environment == {"OTHER": "1"}
    assert list(found.passed) == ["-m", "x.gguf"]
    assert "k1" not in repr(found)


def test_no_key_opens_the_proxy_by_mistake(tmp_path: Path) -> None:
    assert "empty" in refused("--api-key", "")
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    assert "has no key" in refused("--api-key-file", str(empty))
    missing = refused(LLAMA_ARG_API_KEY_FILE=str(tmp_path / "missing"))
    assert missing.startswith("LLAMA_ARG_API_KEY_FILE")
    assert read(LLAMA_API_KEY="").api_keys == ()


@pytest.mark.parametrize(
    ("words", "variables", "found"),
    [
        ((), {}, False),
        (("--cache-ram", "0"), {}, False),
        (("-cram", "512"), {}, True),
        (("--cache_ram", "-1"), {}, True),
        ((), {"LLAMA_ARG_CACHE_RAM": "8"}, True),
    ],
)
def test_the_ram_cache_is_off_unless_the_user_wants_it(
    words: tuple[str, ...], variables: dict[str, str], found: bool
) -> None:
    arguments = read(*words, **variables)
    assert arguments.has_ram_cache is found
    is_ours = not words and not variables
    assert list(arguments.added) == [
        *WITHOUT_RAM,
        *(["--cache-ram", "0"] if is_ours else []),
    ]
    assert not arguments.empties_idle_slots
    assert arguments.environment == variables


def test_only_what_the_build_knows_is_added() -> None:
    words = ["-m", "x.gguf", "-cram", "512"]
    found = read_arguments(words, {}, {"--slots"})
    assert found.added == ("--slots",)
    assert found.empties_idle_slots


def test_the_users_own_directory_is_used() -> None:
    found = read("--slot-save-path", "/dev/shm/mine")
    assert found.slot_save_path == Path("/dev/shm/mine")
    assert list(found.passed) == ["-m", "x.gguf"]
    assert read().slot_save_path is None


REFUSED = [
    ("--cache-reuse 256", "not that of its tokens"),
    ("--cache-reuse 256x", "not that of its tokens"),
    ("--context-shift", "not that of its tokens"),
    ("--no-context-shift --context-shift", "not that of its tokens"),
    ("--swa-full", "last window"),
    ("--swa_full", "last window"),
    ("--no-slots", "busy"),
    ("--no-cache-prompt", "ever continued"),
    ("--cache-idle-slots", "empties"),
    ("--models-dir /m", "router"),
    ("--models-preset /m.ini", "router"),
    ("--ssl-key-file k", "TLS"),
    ("--ssl-cert-file c", "TLS"),
    ("--embedding", "no KV"),
    ("--embeddings", "no KV"),
    ("--embd-gemma-default", "no KV"),
    ("--reranking", "no KV"),
    ("--sleep-idle-seconds 60", "loses its slots"),
    ("--api-prefix /v", "prefix"),
    ("--reuse-port", "port"),
    ("--host=1.2.3.4", "--host VALUE"),
    ("--swa-full=1", "--swa-full VALUE"),
    ("--port", "needs a value"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_what_cannot_be_right_behind_the_proxy(words: str, why: str) -> None:
    said = refused(*words.split())
    assert why in said
    assert "\n" not in said
    assert words.split()[-1].partition("=")[0] in said or words.split()[0] in said


REFUSED_VARIABLES = {
    "LLAMA_ARG_CACHE_REUSE": "64",
    "LLAMA_ARG_CONTEXT_SHIFT": "true",
    "LLAMA_ARG_SWA_FULL": "on",
    "LLAMA_ARG_ENDPOINT_SLOTS": "off",
    "LLAMA_ARG_NO_ENDPOINT_SLOTS": "1",
    "LLAMA_ARG_CACHE_PROMPT": "0",
    "LLAMA_ARG_NO_CACHE_PROMPT": "1",
    "LLAMA_ARG_CACHE_IDLE_SLOTS": "enabled",
    "LLAMA_ARG_MODELS_DIR": "/m",
    "LLAMA_ARG_SSL_KEY_FILE": "k",
    "LLAMA_ARG_EMBEDDINGS": "1",
    "LLAMA_ARG_RERANKING": "1",
    "LLAMA_ARG_API_PREFIX": "/v",
    "LLAMA_ARG_REUSE_PORT": "1",
}


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_a_variable_counts_as_its_option(name: str) -> None:
    assert refused(**{name: REFUSED_VARIABLES[name]}).startswith(f"{name}:")


@pytest.mark.parametrize(
    "words",
    [
        "--cache-reuse 0",
        "--context-shift --no-context-shift",
        "--no-slots --slots",
        "--no-cache-prompt --cache-prompt",
        "--no-cache-idle-slots",
        "--sleep-idle-seconds -1",
        "--mmproj m.gguf",
        "--metrics",
    ],
)
def test_what_changes_nothing_is_allowed(words: str) -> None:
    assert read(*words.split()).loading_is_off == ""


def test_the_command_line_counts_more_than_a_variable() -> None:
    read("--no-context-shift", LLAMA_ARG_CONTEXT_SHIFT="1")
    read("--cache-reuse", "0", LLAMA_ARG_CACHE_REUSE="9")
    read(LLAMA_ARG_SWA_FULL="0", LLAMA_ARG_API_PREFIX="")


def test_without_a_model_the_server_would_be_a_router() -> None:
    with pytest.raises(ConfigError, match="router"):
        read_arguments(["-c", "512"], {}, ADDED)
    for words in (
        ["-hf", "a/b"],
        ["--model-url", "u"],
        ["--gpt-oss-20b-default"],
        ["--fim-qwen-3b-default"],
    ):
        assert list(read_arguments(words, {}, ADDED).passed) == words
    assert read_arguments([], {"LLAMA_ARG_MODEL": "m"}, ADDED).passed == ()
    with pytest.raises(ConfigError, match="router"):
        read_arguments(["--spec-default"], {}, ADDED)


@pytest.mark.parametrize(
    "words",
    [
        "-md d.gguf",
        "--spec-draft-model d.gguf",
        "-hfd a/b",
        "--spec-type ngram-simple",
        "--spec-default",
        "--fim-qwen-7b-spec",
    ],
)
def test_speculation_is_allowed_but_nothing_is_loaded(words: str) -> None:
    found = read(*words.split())
    assert found.loading_is_off.startswith(f"{words.split()[0]}: ")
    assert list(found.passed)[2:] == words.split()
    assert read("--spec-type", "none").loading_is_off == ""


def test_the_value_of_a_known_option_is_no_option() -> None:
    found = read("--port", "1", "--model", "--swa-full")
    assert list(found.passed) == ["-m", "x.gguf", "--model", "--swa-full"]


def test_secrets_are_not_shown() -> None:
    command = ["s", "--hf-token", "t1", "-hft", "t2", "-c", "5"]
    assert without_secrets(command) == [
        "s",
        "--hf-token",
        "...",
        "-hft",
        "...",
        "-c",
        "5",
    ]


def test_addresses() -> None:
    assert listen_address("[::1]:80") == ("::1", 80)
    for text in ("8080", "host:", ":80", "h:99999", "h:x"):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            listen_address(text)


def test_which_program_is_meant(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\n")

    def which(name: str) -> str | None:
        return f"/bin/{name}" if name != "none" else None

    assert program_of(["-m", "x"], which) == (
        "/bin/llama-server",
        "llama-server",
        ["-m", "x"],
    )
    assert program_of(["none", "-m"], which) == (None, "none", ["-m"])
    with pytest.raises(ConfigError, match="no program"):
        program_of([str(program)], which)
    program.chmod(0o755)
    assert program_of([str(program), "-c"], which)[0] == str(program)


def test_what_only_prints() -> None:
    assert only_prints(["-m", "x", "--version"])
    assert not only_prints(["-m", "x"])


# ---- a real build


def test_the_names_of_a_real_build() -> None:
    build = build_of("B")
    known = known_options(build.program, build.environment)
    assert known > ADDED | {
        "-m",
        "--model",
        "-no-kvu",
        "--spec-draft-hf",
        "-hfrd",
    }
    assert not [name for name in known if not name.startswith("-")]
    # of the text beside the names
    assert "--reason" not in known


def test_all_names_here_are_those_of_a_real_build() -> None:
    from pagoda_tools.llama_proxy.server_arguments import _NAMED

    build = build_of("B")
    assert set(_NAMED) <= known_options(build.program, build.environment)
    assert known_options(build.program, build.environment) >= KNOWN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ctx-size=512"], "invalid argument: --ctx-size=512"),
        (["-c512"], "invalid argument: -c512"),
        (["--ctx_size", "512", "--version"], "version:"),
    ],
)
def test_a_real_build_takes_values_as_words_of_their_own(
    words: list[str], said: str
) -> None:
    build = build_of("B")
    done = subprocess.run(
        [*build.program, *words],
        env=build.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said in done.stdout + done.stderr


def test_what_is_no_llama_server_is_named() -> None:
    for program, why in (
        ("/bin/true", "no --slot-save-path"),
        ("/bin/false", "no --slot-save-path"),
        ("/nonexistent", "cannot be run"),
    ):
        with pytest.raises(ConfigError, match=why):
            known_options([program], {})


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    build = build_of("B")
    alone = shutil.copy(build.program[0], tmp_path)
    with pytest.raises(ConfigError, match=r"shared librar.*No such file"):
        known_options([alone], {"PATH": "/bin"})


# ---- the server of xllamacpp


def test_the_options_of_the_package() -> None:
    words = (
        "-m x.gguf -np 2 -fa off -ctk q8_0 --lora a,b --lora-scaled c:0.5 -s -1 "
        "--slot-save-path d"
    )
    found = read_options(words.split(), {})
    assert found["model.path"] == "x.gguf"
    assert found["n_parallel"] == 2
    assert found["lora_adapters"] == [("a", 1.0), ("b", 1.0), ("c", 0.5)]
    assert found["sampling.seed"] == 2**32 - 1
    assert found["slot_save_path"] == "d/"
    assert "kv_unified" not in found


def test_slots_that_nobody_counted_are_as_the_binarys() -> None:
    found = read_options(["-m", "x"], {})
    assert found["n_parallel"] == 4
    assert found["kv_unified"] is True


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--grammar x", "--grammar"),
        ("-c", "needs a value"),
        ("-c many", "-c many"),
        ("-fa perhaps", "one of auto, off, on"),
        ("--lora-scaled x", "FILE:SCALE"),
        ("--chat-template-file /no/such/file", "No such file"),
        ("-c 512", "-m MODEL.gguf"),
    ],
)
def test_what_the_package_does_not_understand(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_options(words.split(), {})


def test_the_package_reads_no_variables() -> None:
    with pytest.raises(ConfigError, match="LLAMA_ARG_CTX_SIZE"):
        read_options(
            ["-m", "x"], {"LLAMA_ARG_CTX_SIZE": "5", "LLAMA_API_KEY": "k"}
        )
