"""URLs of remote tiers: their options, their errors, and that no secret in them is ever shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base.errors import ConfigError
from pagoda.codec import CODECS
from pagoda.config import Config, RemoteSpec
from pagoda.config.remote_urls import parse, redacted, split
from pagoda.config.sources import load, schema


def test_what_is_ours_is_taken_out_and_the_rest_is_the_engines() -> None:
    url = (
        "redis://user:p%40ss@host:6380/3?name=far&prefix=team.a&ttl=1h&codec=zstd&connections=2"
        "&deadline=0.5&look=20ms&queue_chunks=8"
    )
    assert parse(url) == RemoteSpec(
        url="redis://user:p%40ss@host:6380/3",
        redacted=url.replace("p%40ss", "***"),
        kind="redis",
        name="far",
        prefix="team.a",
        ttl_seconds=3600.0,
        codec="zstd",
        connections=2,
        deadline_seconds=0.5,
        look_seconds=0.02,
        queue_chunks=8,
    )


@pytest.mark.parametrize(
    ("url", "kind", "name", "engines"),
    [
        ("redis://host", "redis", "redis", "redis://host"),
        ("REDIS://[::1]:6379/", "redis", "redis", "redis://[::1]:6379/"),
        (
            "rediss://host/1?ssl_ca_certs=/ca&ttl=1d",
            "redis",
            "redis",
            "rediss://host/1?ssl_ca_certs=/ca",
        ),
        (
            "redis+pool://a:1,b,[::1]:2/3?ttl=1h",
            "redis",
            "redis",
            "redis+pool://a:1,b,[::1]:2/3",
        ),
        (
            "redis+pool://a:1,[::1]:2/3?db=3",
            "redis",
            "redis",
            "redis+pool://a:1,[::1]:2/3?db=3",
        ),
        (
            "redis+sentinel://a:1,[::1]:2/kv/2",
            "redis",
            "redis",
            "redis+sentinel://a:1,[::1]:2/kv/2",
        ),
        (
            "redis+cluster://u:p@a,b:2?ttl=1h",
            "redis",
            "redis",
            "redis+cluster://u:p@a,b:2",
        ),
        (
            "redis+sentinel://a:1,b/kv/2?name=far",
            "redis",
            "far",
            "redis+sentinel://a:1,b/kv/2",
        ),
        (
            "unix:///run/redis.sock?db=2&codec=raw",
            "redis",
            "redis",
            "unix:///run/redis.sock?db=2",
        ),
        (
            "s3://bucket/some/where?region=eu",
            "objects",
            "s3",
            "s3://bucket/some/where",
        ),
        ("gs://bucket?prefix=a", "objects", "gs", "gs://bucket"),
        ("az://container/x", "objects", "az", "az://container/x"),
        (
            "mooncake://host?segment=1GiB&prefix=a",
            "mooncake",
            "mooncake",
            "mooncake://host",
        ),
        ("http://host:8080/kv/", "objects", "webdav", "http://host:8080/kv/"),
        (
            "https://user:pw@host/kv/?name=dav",
            "objects",
            "dav",
            "https://user:pw@host/kv/",
        ),
    ],
)
def test_each_scheme_names_its_kind_and_url(
    url: str, kind: str, name: str, engines: str
) -> None:
    spec = parse(url)
    assert spec.kind == kind
    assert spec.name == name
    assert spec.url == engines


def test_an_ipv6_address_may_be_any_of_several_hosts(tmp_path: Path) -> None:
    """Python's own function refuses it unless it is the first, since the releases of 2025."""
    (tmp_path / "password").write_text("secret")
    for scheme, path in (("pool", "/3"), ("sentinel", "/kv/2"), ("cluster", "")):
        for hosts in ("a:1,[::1]:2", "[::1]:2,[::2]"):
            client = parse(
                f"redis+{scheme}://u@{hosts}{path}?password_file={tmp_path}/password"
            ).engine()
            assert "[::1]:2" in client.address or "[::1]" in str(vars(client))


def test_another_machines_server_is_named_by_a_parameter(tmp_path: Path) -> None:
    spec = parse(
        f"https://host:7777?server=pagoda&password_file={tmp_path}/token&deadline=2s"
    )
    assert spec.kind == "pagoda"
    assert spec.name == "pagoda"
    assert spec.url == "https://host:7777"
    assert spec.deadline_seconds == 2.0
    assert spec.look_seconds == 0.05
    assert spec.codec == "raw"
    assert spec.password_file == f"{tmp_path}/token"
    assert parse("http://host:7777/?server=pagoda&name=big").name == "big"
    assert parse("http://host:7777/").kind == "objects"


def test_neighbours_are_servers_with_a_token_each() -> None:
    urls = (
        "http://a:7777",
        "https://b:7777?password_file=/token",
        "http://:hunter2@c:7777?dns=all",
    )
    config = Config(peers=urls)
    assert config.peers == urls
    assert "hunter2" not in repr(config)
    specs = config.peer_servers()
    assert [spec.url for spec in specs] == [
        "http://a:7777",
        "https://b:7777",
        "http://:hunter2@c:7777",
    ]
    assert [spec.options for spec in specs] == [{}, {}, {"dns": "all"}]
    assert specs[1].password_file == "/token"
    assert specs[2].redacted == "http://:***@c:7777?dns=all"
    assert Config(peers="http://a:1, http://b:1").peers == (
        "http://a:1",
        "http://b:1",
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        (["redis://a"], "write http://host:7777"),
        (["a:7777"], "write http://host:7777"),
        (["http://a:7777/x"], "has no path"),
        (["http://a:7777?look=1s"], "look: no such parameter"),
        (["http://a:7777?dns=one"], "only dns=all"),
        (["https://a:7777?dns=all"], "write http://"),
        (["http://a:7777", "http://a:7777?dns=all"], "given twice"),
        (
            [f"http://a{n}:7777" for n in range(9)],
            "9 servers, and at most 8 are asked at once; set lookup",
        ),
        (7, "a list of URLs"),
    ],
)
def test_wrong_neighbours_are_one_line_that_says_what_to_do(
    peers: object, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(peers=peers)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("peers")
    assert said in message
    assert "\n" not in message


def test_the_options_of_an_object_store_are_its_clients() -> None:
    spec = parse(
        "s3://b?endpoint=http://h:9000&secret_access_key=a+b/c%26d&ttt=x&codec=zstd"
    )
    assert spec.options == {
        "endpoint": "http://h:9000",
        "secret_access_key": "a+b/c&d",
        "ttt": "x",
    }
    assert spec.codec == "zstd"


def test_the_share_of_a_mooncake_pool_is_in_bytes() -> None:
    spec = parse("mooncake://host:50051?segment=1GiB&protocol=rdma&connections=2")
    assert spec.options == {"segment": str(1 << 30), "protocol": "rdma"}
    assert spec.connections == 2
    assert parse("mooncake://host").options == {}


def test_a_password_may_lie_in_a_file_that_is_read_later(tmp_path: Path) -> None:
    spec = parse("redis://user@host?password_file=~/no/such")
    assert spec.password_file == str(Path("~/no/such").expanduser())
    assert spec.url == "redis://user@host"
    assert spec.redacted == "redis://user@host?password_file=~/no/such"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("host:6379", "no scheme; write a URL such as redis://host:6379/0"),
        ("redis:/host", "no scheme"),
        ("reddis://host", "did you mean redis?"),
        ("valkey://host", "did you mean redis?"),
        ("gcs://bucket", "did you mean gs?"),
        ("lm://host:1", "http://host:7777?server=pagoda"),
        ("http://host:7777?server=pagodas", "only server=pagoda is known"),
        ("http://host:7777/path?server=pagoda", "has no path"),
        ("http://me@host:7777?server=pagoda", "?password_file=TOKENFILE"),
        ("http://host:7777?server=pagoda&ttl=1h", "ttl: a pagoda serve has none"),
        ("http://host:7777?server=pagoda&dns=all", "dns: no such parameter"),
        ("http://host:7777?server=pagoda&name=peers", "choose another"),
        ("redis://", "a host or bucket is needed"),
        ("redis://host:0", "a port"),
        (
            "redis+pool://a,,b",
            "a host or bucket is needed; write it as redis+pool://host1:6379,host2:6379",
        ),
        ("redis+pool://a,b:x", "1 to 65535"),
        ("redis+pool://a,A", "a host is given twice"),
        ("redis+pool://a,a.:6379", "a host is given twice"),
        ("redis+cluster://[::1]:6379,[0:0::1]", "a host is given twice"),
        (
            "redis+sentinel://localhost,127.0.0.1:26379/kv",
            "a host is given twice",
        ),
        ("redis+pool://a:1,[::1:2", "[::1:2: no host; write an IPv6 address as"),
        ("redis+pool://u:p@a:1,u:p@b:2", "one user and password for all hosts"),
        ("redis+cluster://a:1,u:p@b:2", "one user and password for all hosts"),
        ("redis+pool://a,b/x", "number of a database"),
        ("redis+pool://a,b?ssl_ca_certs=/ca", "write rediss+pool://"),
        ("redis+cluster://a,b/1", "a cluster has no numbers of databases"),
        ("redis+cluster://a,b?db=1", "a cluster has no numbers of databases"),
        ("redis+sentinel://a,b", "the name of the master's service"),
        ("redis+sentinel://a,b/kv/x", "the name of the master's service"),
        (
            "redis+sentinel://a,b/kv?ssl_ca_certs=/ca",
            "ssl_ca_certs: is for encrypted",
        ),
        ("redis-cluster://a", "did you mean redis+cluster?"),
        ("redis+pol://a,b", "did you mean redis+pool?"),
        ("redis://host:70000", "1 to 65535"),
        ("redis://[::1", "IPv6"),
        ("redis://host/zero", "number of a database"),
        ("redis://host?db=zero", "number of a database"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix:///", "socket"),
        ("s3://", "bucket"),
        ("s3://host:9000/bucket", "?endpoint="),
        ("redis://host?tll=1h", "did you mean ttl?"),
        ("redis://host?endpoint=x", "no such parameter"),
        ("redis://host?ssl_ca_certs=/ca", "rediss://"),
        ("redis://host?ttl", "ttl=..."),
        ("redis://host?ttl=", "ttl=..."),
        ("redis://host?ttl=1h&ttl=2h", "given twice"),
        ("redis://host?ttl=1y", "1h or 7d"),
        ("redis://host?ttl=0", "from 1 to"),
        ("redis://host?deadline=2h", "to 3600"),
        ("redis://host?look=-1", "write a time"),
        ("redis://host?codec=zst", "did you mean zstd?"),
        ("redis://host?connections=0", "from 1 to 64"),
        ("redis://host?queue_chunks=many", "whole number"),
        ("redis://host?name=disk", "choose another"),
        ("redis://host?name=A", "small letters"),
        ("redis://host?prefix={a}", "letters, digits"),
        ("redis://host?prefix=a/../b", "letters, digits"),
        ("redis://host#x", "%23"),
        ("redis://ho st", "%20"),
        ("redis://hóst", "%20"),
        ("redis://u:p@host?password_file=/x", "leave one of them out"),
        ("redis://host?credential_provider=os", "write package.module:Class"),
        (
            "redis://host?credential_provider=os:system(x)",
            "write package.module:Class",
        ),
        (
            "redis://u@host?credential_provider=a.b:C",
            "leave out those of the URL",
        ),
        (
            "redis://host?credential_provider=a.b:C&password_file=/x",
            "leave out those of the URL",
        ),
        ("redis+cluster://host?sentinel_username=x", "no such parameter"),
        ("mooncakestore://host:1", "did you mean mooncake?"),
        ("mooncake://host/path", "neither path nor user"),
        ("mooncake://me@host", "neither path nor user"),
        ("mooncake://host?ttl=1h", "ttl: a Mooncake pool has none"),
        (
            "mooncake://host?password_file=/x",
            "password_file: a Mooncake pool has none",
        ),
        ("mooncake://host?segments=1GiB", "did you mean segment?"),
        ("mooncake://host?segment=1G", "1GiB"),
        ("mooncake://host?segment=auto", "write a size"),
        ("mooncake://host?protocol=ib", "tcp or rdma"),
        ("s3://bucket?ttl=1h", "lifecycle"),
        (
            "redis://host?write_policy=second_site",
            "must be write_through or second_sight; did you mean second_sight?",
        ),
        (
            "s3://bucket?write_policy=second_sight",
            "only a Redis can remember what was asked for once",
        ),
        (
            "http://host:7777?server=pagoda&write_policy=second_sight",
            "a pagoda serve has none",
        ),
        (
            "mooncake://host:50051?write_policy=second_sight",
            "a Mooncake pool has none",
        ),
        ("s3://bucket?password_file=/x", "AWS_SECRET_ACCESS_KEY"),
        ("s3://key:word@bucket", "only the bucket"),
        ("s3://bucket/a?b@c=1", "%40"),
    ],
)
def test_a_wrong_url_is_one_line_that_says_what_to_do(
    url: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(remote=(url,))
    message = str(caught.value)
    assert message.startswith("remote = '")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host",
        "redis://:hunter2@host/0?ttl=1h",
        "redis://:pa/hunter2@host",
        "redis://:pa?hunter2@host",
        "redis://:pa#hunter2@host",
        "redis://user:pa@hunter2@host",
        "redis://user:12/hunter2@host",
        "redis://user:12?hunter2=x@host",
        "redis://host:hunter2",
        "redis://:hunter2",
        "redis:/user:hunter2@host",
        "user:hunter2@host:6379",
        "reddis://user:hunter2@host",
        "redis://user:hunter2@host:port",
        "redis://ünser:hunter2@host",
        "https://user:hunter2@host/kv/",
        "s3://bucket?secret_access_key=hunter2&region=eu",
        "s3://bucket?AWS_SESSION_TOKEN=hunter2",
        "s3://bucket?endpoint=http://a:hunter2@h",
        "s3://bucket?endpoint=http%3A%2F%2Fa%3Ahunter2%40h",
        "az://bucket?sas_key=hunter2",
        "rediss://host?ssl_password=hunter2",
        "redis://host?username=u&pass=hunter2&name=j",
        "redis://host?PASSWD=hunter2",
        "redis://host?passphrase=hunter2",
        "redis://host?pwd=hunter2",
        "redis://host?p%61ss=hunter2",
        "redis://host?db=0;pass=hunter2",
        "redis://host#pass=hunter2",
        "s3://bucket?auth=hunter2",
        "s3://bucket?sig=hunter2",
        "s3://bucket?bearer=hunter2",
        "redis://host?token=hunter2",
        "redis://user:hunter2@host?nmae=x",
        "redis+pool://user:hunter2@a:1,b:2,c",
        "redis+cluster://user:hunter2@a:1,b:2",
        "redis+sentinel://user:hunter2@a:1,b:2/kv",
        "redis+pool://:1,hunter2@a:1,b:0",
    ],
)
def test_no_secret_is_shown(url: str) -> None:
    shown = [redacted(url)]
    for make in (
        lambda: Config(remote=(url,)),
        lambda: load(environ={"PAGODA_REMOTE": url}),
    ):
        try:
            shown += [repr(made := make()), str(made)]
        except ConfigError as trouble:
            shown.append(str(trouble))
    try:
        shown += [repr(parse(url)), parse(url).redacted]
    except ConfigError as trouble:
        shown.append(str(trouble))
    assert not [text for text in shown if "hunter2" in text]


def test_what_is_no_secret_is_shown() -> None:
    for url in (
        "s3://bucket/prefix?region=eu&endpoint=http://host:1&allow_http=true&name=kv",
        "rediss://user@host?ssl_keyfile=/key&ssl_ca_certs=/ca&password_file=/secret&prefix=p",
        "az://container?authority_host=h",
    ):
        assert redacted(url) == url


@given(
    st.text("ab:/?#@&=%,. ü", max_size=20),
    st.sampled_from(
        ["redis://", "redis+pool://", "unix://", "s3://", "http://", ""]
    ),
)
def test_any_text_is_a_spec_or_a_config_error(text: str, scheme: str) -> None:
    try:
        spec = parse(scheme + text)
    except ConfigError as trouble:
        assert "\n" not in str(trouble)
    else:
        assert parse(spec.url).url == spec.url


@given(
    st.text(
        st.characters(min_codepoint=33, max_codepoint=126),
        min_size=6,
        max_size=12,
    )
)
def test_no_password_however_written_is_shown_whole(password: str) -> None:
    for url in (
        f"redis://ws:{password}9Z@h",
        f"redis://:{password}9Z@h:1/0?ttl=1h",
    ):
        assert password + "9Z" not in redacted(url)
        try:
            parse(url)
        except ConfigError as trouble:
            assert password + "9Z" not in str(trouble)


def test_urls_are_parted_by_commas_before_a_scheme_only() -> None:
    assert split(" redis://:a,b@h , s3://x,unix:///y,") == (
        "redis://:a,b@h",
        "s3://x",
        "unix:///y",
    )
    assert split("") == split(" , ") == ()


def test_lists_tuples_and_text_are_one_form() -> None:
    urls = ("redis://a", "s3://b")
    assert Config(remote=list(urls)).remote == urls  # type: ignore[arg-type]
    assert Config(remote=", ".join(urls)).remote == urls  # type: ignore[arg-type]
    config = Config(remote=urls)
    assert [spec.name for spec in config.remotes()] == ["redis", "s3"]
    assert Config().remotes() == ()
    assert hash(config) == hash(dataclasses.replace(config))
    for wrong in (
        None,
        5,
        {"url": "redis://u:hunter2@h"},
        ["redis://u:hunter2@h", 1],
    ):
        with pytest.raises(ConfigError, match="a list of them") as caught:
            Config(remote=wrong)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)


def test_each_tier_has_its_own_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'redis://b:\*\*\*@c'.* \?name="
    ) as caught:
        Config(remote=("redis://a", "redis://b:hunter2@c"))
    assert "hunter2" not in str(caught.value)
    assert len(Config(remote=("redis://a", "redis://b?name=far")).remotes()) == 2


def test_from_the_environment_and_the_file(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "PAGODA_REMOTE": "redis://a,s3://b",
        "PAGODA_WEIGHTS_EPOCH": "3",
    }
    loaded = load(environ=environ)
    assert loaded.config.remote == ("redis://a", "s3://b")
    assert loaded.config.weights_epoch == 3
    assert loaded.origins["remote"] == "environment PAGODA_REMOTE"
    file = tmp_path / "my.toml"
    for text in (
        'remote = "redis://a, s3://b"',
        'remote = ["redis://a", "s3://b"]',
    ):
        file.write_text(text)
        assert load(file=file, environ={}).config.remote == (
            "redis://a",
            "s3://b",
        )
    for text in (
        "remote = 5",
        'remote = ["redis://u:hunter2@a", 5]',
        'remote = {url = "redis://u:hunter2@a"}',
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"my\.toml") as caught:
            load(file=file, environ={})
        assert str(caught.value).startswith("remote: ")
        assert "hunter2" not in str(caught.value)


def test_the_schema_takes_text_and_lists() -> None:
    properties = json.loads(json.dumps(schema()))["properties"]
    assert [form["type"] for form in properties["remote"]["anyOf"]] == [
        "string",
        "array",
    ]
    assert properties["weights_epoch"]["type"] == "integer"


def test_the_codecs_are_those_that_there_are() -> None:
    assert [parse(f"redis://h?codec={name}").codec for name in CODECS] == list(
        CODECS
    )


def test_the_epoch_of_the_weights_is_a_number() -> None:
    assert Config().weights_epoch == 0
    for wrong in (-1, 1.5, "1", 2**31):
        with pytest.raises(ConfigError, match="weights_epoch"):
            Config(weights_epoch=wrong)  # type: ignore[arg-type]
