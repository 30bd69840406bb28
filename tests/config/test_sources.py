from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.config import Config, option_names
from pagoda.config.sources import file_of, load, schema


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory and home, so that no file of this machine is found."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def env(nowhere: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(nowhere / "home"), **variables}


def test_nothing_given_is_all_defaults(nowhere: Path) -> None:
    loaded = load(environ=env(nowhere))
    assert loaded.config == Config()
    assert loaded.origins == dict.fromkeys(option_names(), "default")


def test_order_of_the_sources_and_their_origins(nowhere: Path) -> None:
    file = nowhere / "my.toml"
    file.write_text(
        'chunk_tokens = 1\nhost_size = "1GiB"\nio_threads = 1\nqueue_chunks = 1\ndurable = true\n'
    )
    environ = env(
        nowhere,
        PAGODA_CHUNK_TOKENS="2",
        PAGODA_HOST_SIZE="2GiB",
        PAGODA_IO_THREADS="2",
    )
    cli = {"chunk_tokens": 3, "host_size": "3GiB", "policy": None}
    loaded = load(cli, file, environ, chunk_tokens=4)
    config, origins = loaded
    assert config.chunk_tokens == 4
    assert config.host_bytes == 3 * 2**30
    assert config.io_threads == 2
    assert config.queue_chunks == 1
    assert config.durable is True
    assert origins["chunk_tokens"] == "argument chunk_tokens"
    assert origins["host_size"] == "option --host-size"
    assert origins["io_threads"] == "environment PAGODA_IO_THREADS"
    assert origins["queue_chunks"] == f"file {file}"
    assert origins["policy"] == "default"


def test_the_usual_places_of_the_file(nowhere: Path) -> None:
    environ = env(nowhere)
    at_home = nowhere / "home" / ".config" / "pagoda" / "config.toml"
    at_home.parent.mkdir(parents=True)
    at_home.write_text("chunk_tokens = 11\n")
    assert load(environ=environ).config.chunk_tokens == 11
    (nowhere / "pagoda.toml").write_text("chunk_tokens = 12\n")
    assert load(environ=environ).config.chunk_tokens == 12
    (nowhere / "named.toml").write_text("chunk_tokens = 13\n")
    environ["PAGODA_CONFIG"] = str(nowhere / "named.toml")
    assert load(environ=environ).config.chunk_tokens == 13
    assert load(file=at_home, environ=environ).config.chunk_tokens == 11


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", None), ("true", True), ("0", False), ("off", False)],
)
def test_flags_from_the_environment(
    nowhere: Path, text: str, value: bool | None
) -> None:
    assert (
        load(environ=env(nowhere, PAGODA_DISK_DIRECT=text)).config.disk_direct
        is value
    )


def test_an_empty_variable_is_not_set(nowhere: Path) -> None:
    loaded = load(environ=env(nowhere, PAGODA_CHUNK_TOKENS="", PAGODA_CONFIG=""))
    assert loaded.config == Config()


def test_paths_may_be_path_objects(nowhere: Path) -> None:
    config = load(
        environ=env(nowhere), disk_path=nowhere / "kv", disk_size="1GiB"
    ).config
    assert config.disk_path == str(nowhere / "kv")


def refused(*said: str, **arguments: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message


def test_unknown_names_are_errors_with_a_suggestion(nowhere: Path) -> None:
    environ = env(nowhere)
    refused(
        "PAGODA_HOSTSIZE",
        "did you mean PAGODA_HOST_SIZE?",
        environ=env(nowhere, PAGODA_HOSTSIZE="1GiB"),
    )
    refused(
        "PAGODA_Host_Size",
        "did you mean PAGODA_HOST_SIZE?",
        environ=env(nowhere, PAGODA_Host_Size="1GiB"),
    )
    refused(
        "argument chunk_token:",
        "did you mean chunk_tokens?",
        environ=environ,
        chunk_token=1,
    )
    refused(
        "option --chunk-token:",
        "did you mean --chunk-tokens?",
        cli={"chunk_token": 1},
        environ=environ,
    )
    (nowhere / "pagoda.toml").write_text("disksize = 1\n")
    refused(
        str(nowhere / "pagoda.toml"),
        "disksize",
        "did you mean disk_size?",
        environ=environ,
    )
    (nowhere / "pagoda.toml").write_text('[host]\nsize = "1GiB"\n')
    refused("host", "did you mean host_", environ=environ)


def test_a_bad_value_names_its_origin(nowhere: Path) -> None:
    refused(
        "chunk_tokens = 'many'",
        "PAGODA_CHUNK_TOKENS",
        environ=env(nowhere, PAGODA_CHUNK_TOKENS="many"),
    )
    refused(
        "host_size = '64G'",
        "64GiB",
        "PAGODA_HOST_SIZE",
        environ=env(nowhere, PAGODA_HOST_SIZE="64G"),
    )
    refused(
        "write_policy",
        "back",
        "--write-policy",
        cli={"write_policy": "back"},
        environ=env(nowhere),
    )
    (nowhere / "pagoda.toml").write_text("io_threads = 0\n")
    refused("io_threads = 0", "pagoda.toml", environ=env(nowhere))
    (nowhere / "pagoda.toml").unlink()
    refused("set disk_path", environ=env(nowhere), disk_size="1GiB")


def test_files_that_cannot_be_read(nowhere: Path) -> None:
    refused(
        "no.toml",
        "no such configuration file",
        file="no.toml",
        environ=env(nowhere),
    )
    refused(
        "no.toml", "PAGODA_CONFIG", environ=env(nowhere, PAGODA_CONFIG="no.toml")
    )
    (nowhere / "pagoda.toml").write_text("= nonsense\n")
    refused("pagoda.toml", "TOML", environ=env(nowhere))
    (nowhere / "pagoda.toml").write_bytes(b"\xff\xfe\x00")
    refused("pagoda.toml", "TOML", environ=env(nowhere))


def test_the_real_environment_is_read(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PAGODA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setenv("PAGODA_CHUNK_TOKENS", "64")
    assert load().config.chunk_tokens == 64


NO_INTEGER, NO_NUMBER, NO_FLAG = (
    f"input should be a valid {kind}" for kind in ("integer", "number", "boolean")
)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("io_threads", " 7 ", 7),
        ("io_threads", "+5", 5),
        ("io_threads", "7.0", 7),
        ("io_threads", 7.0, 7),
        ("queue_chunks", "1_000", 1000),
        ("io_threads", True, 1),
        ("io_threads", b"7", 7),
        ("deadline_seconds", "0.25", 0.25),
        ("deadline_seconds", " 1e3", 1000.0),
        ("deadline_seconds", True, 1.0),
        ("durable", "YES", True),
        ("durable", "f", False),
        ("durable", 1, True),
        ("durable", 0.0, False),
        ("disk_direct", " AUTO ", None),
        ("disk_direct", "off", False),
        ("disk_direct", None, None),
        ("host_size", "64GiB", 64 << 30),
        ("host_size", 2.0**20, 1 << 20),
        ("remote", "redis://a, s3://b", ("redis://a", "s3://b")),
        ("remote", ["redis://a"], ("redis://a",)),
    ],
)
def test_how_a_value_may_be_spelt(
    nowhere: Path, name: str, given: object, value: object
) -> None:
    assert (
        getattr(load(environ=env(nowhere), **{name: given}).config, name) == value
    )


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        (
            "io_threads",
            "seven",
            f"{NO_INTEGER}, unable to parse string as an integer",
        ),
        (
            "io_threads",
            "7.",
            f"{NO_INTEGER}, unable to parse string as an integer",
        ),
        (
            "io_threads",
            "\u0663",
            f"{NO_INTEGER}, unable to parse string as an integer",
        ),
        ("io_threads", 7.5, f"{NO_INTEGER}, got a number with a fractional part"),
        ("io_threads", float("inf"), "input should be a finite number"),
        ("io_threads", [], NO_INTEGER),
        ("host_size", None, NO_INTEGER),
        ("host_size", {}, NO_INTEGER),
        (
            "deadline_seconds",
            "soon",
            f"{NO_NUMBER}, unable to parse string as a number",
        ),
        ("deadline_seconds", 10**400, f"{NO_NUMBER}, it is too large"),
        ("deadline_seconds", None, NO_NUMBER),
        ("durable", "perhaps", f"{NO_FLAG}, unable to interpret input"),
        ("durable", 2, f"{NO_FLAG}, unable to interpret input"),
        ("durable", 0.5, NO_FLAG),
        ("durable", None, NO_FLAG),
        (
            "write_policy",
            "write",
            "input should be 'write_through', 'selective' or 'write_back'",
        ),
        ("policy", 1, "input should be a valid string"),
    ],
)
def test_a_value_of_another_type(
    nowhere: Path, name: str, given: object, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=env(nowhere), **{name: given})
    assert (
        str(caught.value) == f"{name} = {given!r}: {complaint} (argument {name})"
    )


def test_schema_lists_every_option() -> None:
    found = json.loads(json.dumps(schema()))
    assert list(found["properties"]) == option_names()
    assert found["additionalProperties"] is False
    assert found["properties"]["write_policy"]["enum"] == [
        "write_through",
        "selective",
        "write_back",
    ]
    for entry in found["properties"].values():
        assert "description" in entry


SERVICE = (
    "PAGODA_SERVICE_HOST",
    "PAGODA_SERVICE_PORT",
    "PAGODA_SERVICE_PORT_HTTP_METRICS",
    "PAGODA_PORT",
    "PAGODA_PORT_8080_TCP",
    "PAGODA_PORT_8080_TCP_PROTO",
    "PAGODA_PORT_8080_TCP_PORT",
    "PAGODA_PORT_8080_TCP_ADDR",
    "PAGODA_STORE_A_SERVICE_HOST",
    "PAGODA_STORE_A_SERVICE_PORT_DNS",
    "PAGODA_STORE_A_PORT",
    "PAGODA_STORE_A_PORT_53_UDP",
    "PAGODA_STORE_A_PORT_53_UDP_ADDR",
    "PAGODA_PORT_1_SCTP_PROTO",
)


@pytest.mark.parametrize("variable", SERVICE)
def test_the_variables_of_a_kubernetes_service_are_no_options(
    nowhere: Path, variable: str
) -> None:
    assert (
        load(environ=env(nowhere, **{variable: "tcp://10.0.0.1:80"})).config
        == Config()
    )


def test_no_option_is_named_like_the_variable_of_a_service() -> None:
    assert not [
        name
        for name in option_names()
        if name.endswith(("_port", "_host")) or "_port_" in name
    ]


@pytest.mark.parametrize(
    "variable",
    ["PAGODA_PORTS", "PAGODA_SERVICE", "PAGODA_HOST", "PAGODA_PORT_8080"],
)
def test_what_only_resembles_the_variable_of_a_service_is_an_error(
    nowhere: Path, variable: str
) -> None:
    refused(variable, "no such variable", environ=env(nowhere, **{variable: "1"}))


def test_a_home_that_is_not_known_hinders_only_what_needs_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a user without an account
    monkeypatch.setattr(os.path, "expanduser", lambda path: os.fspath(path))
    assert load(environ={}).config == Config()
    refused(
        "~/kv",
        "home directory",
        "write the whole path",
        environ={},
        disk_path="~/kv",
        disk_size="1GiB",
    )
    refused("~/pagoda.toml", "home directory", environ={}, file="~/pagoda.toml")


def test_a_policy_of_earlier_versions_says_what_to_write_instead(
    nowhere: Path,
) -> None:
    for name, instead in (("arc", "write hindsight"), ("fifo", "write lru")):
        refused(name, "was removed", instead, environ=env(nowhere), policy=name)


def test_a_file_alone(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_HOST_SIZE", "1GiB")
    (nowhere / "pagoda.toml").write_text("chunk_tokens = 64\n")
    file = nowhere / "mine.toml"
    file.write_text('disk_size = "1GiB"\ndisk_path = "/a"\npolicy = "lru"\n')
    config = Config.from_file(file, policy="hindsight", disk_path=Path("/b"))
    assert config.disk_bytes == 2**30
    assert config.policy == "hindsight"
    assert config.disk_path == "/b"
    assert config.host_size == "auto"
    assert config.chunk_tokens == 256
    assert config.origins["disk_size"] == f"file {file}"
    assert config.origins["policy"] == "argument policy"
    assert config.origins["host_size"] == "default"
    assert list(config.origins) == option_names()
    assert Config.from_file(str(file)).policy == "lru"


def test_the_environment_alone(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nowhere / "pagoda.toml").write_text("chunk_tokens = 64\n")
    named = nowhere / "named.toml"
    named.write_text('policy = "lru"\nhost_size = "2GiB"\n')
    given = {"PAGODA_HOST_SIZE": "1GiB"}
    config = Config.from_env(given)
    assert config.host_bytes == 2**30
    assert config.chunk_tokens == 256
    assert config.origins["host_size"] == "environment PAGODA_HOST_SIZE"
    config = Config.from_env({**given, "PAGODA_CONFIG": str(named)})
    assert config.host_bytes == 2**30
    assert config.policy == "lru"
    assert config.origins["policy"] == f"file {named}"
    config = Config.from_env(given, host_size=0)
    assert config.host_size == 0
    assert config.origins["host_size"] == "argument host_size"
    monkeypatch.setenv("PAGODA_POLICY", "lru")
    assert Config.from_env().policy == "lru"
    assert load().config.origins == load().origins


def test_what_is_wrong_with_either_is_one_clear_error(nowhere: Path) -> None:
    file = nowhere / "mine.toml"
    file.write_text('polcy = "lru"\n')
    with pytest.raises(ConfigError, match=r"polcy: no such option.*policy"):
        Config.from_file(file)
    file.write_text("chunk_tokens = 0\n")
    with pytest.raises(ConfigError, match=f"chunk_tokens.*file {file}"):
        Config.from_file(file)
    with pytest.raises(ConfigError, match="no such configuration file"):
        Config.from_file(nowhere / "none.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        Config.from_file(nowhere)
    file.chmod(0o666)
    with pytest.raises(ConfigError):
        Config.from_file(file)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="argument"):
        Config.from_file(file, polcy="lru")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"PAGODA_POLCY.*PAGODA_POLICY"):
        Config.from_env({"PAGODA_POLCY": "lru"})
    with pytest.raises(ConfigError, match="PAGODA_CONFIG"):
        Config.from_env({"PAGODA_CONFIG": str(nowhere / "none.toml")})
    assert Config.from_env({"PAGODA_SERVICE_HOST": "1.2.3.4"}) == Config()


def test_where_the_values_of_a_config_made_by_hand_came_from() -> None:
    config = Config(policy="lru", chunk_tokens=256)
    assert config.origins["policy"] == "argument policy"
    assert config.origins["chunk_tokens"] == "default"
    with pytest.raises(TypeError):
        config.origins["policy"] = "me"  # type: ignore[index]
    assert config == Config.from_env({"PAGODA_POLICY": "lru"})
    assert hash(config) == hash(Config.from_env({"PAGODA_POLICY": "lru"}))
    copied = pickle.loads(pickle.dumps(Config.from_env({"PAGODA_POLICY": "lru"})))
    assert copied.origins["policy"] == "environment PAGODA_POLICY"


def test_a_remote_tier_of_a_file_is_known_by_that_file(nowhere: Path) -> None:
    file = nowhere / "mine.toml"
    file.write_text('remote = "redis://127.0.0.1:1/7"\n')
    Config.from_file(file)
    assert file_of("redis://127.0.0.1:1/7") == str(file)
    Config.from_env({"PAGODA_REMOTE": "redis://127.0.0.1:1/7"})
    assert file_of("redis://127.0.0.1:1/7") == ""
