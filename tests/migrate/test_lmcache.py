"""LMCache's configuration in our words: each field is mapped, or named with the reason and what to
write instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base.errors import ConfigError
from pagoda.config import Config
from pagoda.config.sources import load
from pagoda_tools.migrate.lmcache import (
    Translation,
    known_fields,
    read,
    translate,
    variables_in,
)
from pagoda_tools.migrate.lmcache_fields import (
    BELONGS,
    BLENDING,
    NOT_NEEDED,
    SWITCHES,
    WHEN_SET,
    FieldVerdict,
)
from pagoda_tools.migrate.lmcache_loader import load as load_lmcache
from pagoda_tools.migrate.lmcache_loader import table

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "lmcache.md"


def verdict(made: Translation, field: str) -> FieldVerdict:
    """Return what became of a field, of which there must be one finding."""
    (found,) = [one.verdict for one in made.findings if one.field == field]
    return found


def text(made: Translation, field: str) -> str:
    (found,) = [one.text for one in made.findings if one.field == field]
    return found


# the defaults that LMCache documents, of its first configurations and of the present ones
OLDEST = {
    "chunk_size": 256,
    "local_device": "cuda",
    "max_local_cache_size": 5,
    "remote_url": "lm://localhost:65432",
    "remote_serde": "cachegen",
    "pipelined_backend": False,
    "save_decode_cache": False,
    "enable_blending": False,
    "blend_recompute_ratio": 0.15,
    "blend_min_tokens": 256,
}
PRESENT = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0,
    "remote_url": None,
    "remote_serde": "naive",
    "save_decode_cache": False,
    "enable_blending": False,
    "enable_p2p": False,
    "enable_pd": False,
    "enable_controller": False,
    "cache_policy": "LRU",
    "min_retrieve_tokens": 0,
}


@pytest.mark.parametrize(
    "fields", [OLDEST, PRESENT, PRESENT | {"remote_url": "lm://localhost:65432"}]
)
def test_what_lmcache_has_by_default_comes_to_our_tiers_with_remarks(
    fields: dict[str, object],
) -> None:
    made = translate(fields)
    assert made.refused == []
    assert made.options["chunk_tokens"] == 256
    assert made.options["host_size"] == "5GiB"
    if fields["remote_url"]:
        assert made.options["remote"] == "http://localhost:65432?server=pagoda"
        assert "pagoda serve --listen" in text(made, "remote_url")
        lossless = (
            FieldVerdict.NOT_NEEDED
            if fields["remote_serde"] == "cachegen"
            else FieldVerdict.SAME
        )
        assert verdict(made, "remote_serde") is lossless
    else:
        assert "remote" not in made.options
    if "local_device" in fields:
        assert verdict(made, "local_device") is FieldVerdict.NOT_NEEDED
        assert "host tier" in text(made, "local_device")


def test_all_of_a_file_that_maps(tmp_path: Path) -> None:
    made = translate(
        {
            "chunk_size": 128,
            "local_cpu": True,
            "max_local_cpu_size": 40.5,
            "local_disk": f"file://{tmp_path}/",
            "max_local_disk_size": 100,
            "remote_url": "redis://user:p%20w@host:6379",
            "remote_serde": "naive",
            "save_decode_cache": True,
            "enable_blending": False,
            "blend_recompute_ratio": 0.15,
            "blend_min_tokens": 256,
            "enable_p2p": False,
            "lookup_url": "localhost:6379",
            "distributed_url": "localhost:8200",
            "error_handling": True,
            "cache_policy": "LRU",
            "min_retrieve_tokens": 512,
            "blocking_timeout_secs": 10,
            "extra_config": {"use_odirect": True, "disk_io_threads": 8},
        }
    )
    assert made.options == {
        "chunk_tokens": 128,
        "host_size": "40.5GiB",
        "disk_path": str(tmp_path),
        "disk_size": "100GiB",
        "remote": "redis://user:p%20w@host:6379",
        "policy": "lru",
        "min_hit_tokens": 512,
        "disk_direct": True,
        "io_threads": 8,
    }
    assert made.refused == []
    assert (
        verdict(made, "save_decode_cache")
        is verdict(made, "remote_serde")
        is FieldVerdict.SAME
    )
    for field in (
        "error_handling",
        "lookup_url",
        "distributed_url",
        "blend_min_tokens",
    ):
        assert verdict(made, field) is FieldVerdict.NOT_NEEDED
    assert not [one for one in made.findings if "p%20w" in one.text]


def test_what_is_printed_is_loaded_again(tmp_path: Path) -> None:
    fields = {
        "chunk_size": "64",
        "max_local_cpu_size": "2",
        "local_disk": str(tmp_path / 'a "b" \\ ü'),
        "max_local_disk_size": "1.5",
        "remote_url": "s3://bucket",
        "save_decode_cache": "false",
        "numa_mode": "auto",
        "extra_config": json.dumps(
            {"s3_region": "eu-west-1", "s3_file_prefix": "kv/a b/"}
        ),
    }
    made = translate(fields)
    file = tmp_path / "pagoda.toml"
    file.write_text(made.toml("some\nfile"))
    config = load(file=file, environ={}).config
    assert config.chunk_tokens == 64
    assert config.host_bytes == 2**31
    assert config.disk_bytes == 3 * 2**29
    assert config.disk_path == fields["local_disk"]
    assert config.remotes()[0].url == "s3://bucket/kv/a%20b"
    assert config.remotes()[0].options == {"region": "eu-west-1"}
    assert "# max_local_cpu_size: host_size" in file.read_text()
    assert re.search(
        r"# set elsewhere:\n#   save_decode_cache: .*--no-store-output",
        file.read_text(),
    )
    assert re.search(r"# not needed:\n#   numa_mode: ", file.read_text())


def test_sizes_of_each_worker_are_added_up(tmp_path: Path) -> None:
    made = translate(
        {
            "max_local_cpu_size": 20,
            "local_disk": str(tmp_path),
            "max_local_disk_size": 50,
        },
        workers=4,
    )
    assert made.options["host_size"] == "80GiB"
    assert made.options["disk_size"] == "200GiB"
    assert "20 GiB for each of 4 workers" in text(made, "max_local_cpu_size")
    assert "--workers" in text(
        translate({"max_local_cpu_size": 20}), "max_local_cpu_size"
    )


def test_the_host_tier_keeps_its_size_or_is_off() -> None:
    assert translate({"chunk_size": 256}).options["host_size"] == "5GiB"
    off = translate({"local_cpu": "False", "max_local_cpu_size": 5})
    assert off.options == {"host_size": 0}
    assert off.refused == []
    assert verdict(off, "max_local_cpu_size") is FieldVerdict.NOT_NEEDED


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"local_disk": "/x"}, "local_disk", "max_local_disk_size: GB"),
        (
            {"local_disk": True, "max_local_disk_size": 1},
            "local_disk",
            "file:///PATH",
        ),
        (
            {"local_disk": "/x,/y", "max_local_disk_size": 1},
            "local_disk",
            "RAID 0",
        ),
        ({"enable_p2p": "true"}, "enable_p2p", "--peers http://HOST:7777"),
        ({"enable_pd": True}, "enable_pd", "vLLM's own connector"),
        ({"enable_controller": True}, "enable_controller", "pagoda stats"),
        ({"remote_url": "lm://host:port"}, "remote_url", "the port"),
        ({"remote_url": "lm://"}, "remote_url", "a host"),
        (
            {"remote_url": "redis-sentinel://a:1,b:2"},
            "remote_url",
            "name the service in the URL: remote =",
        ),
        (
            {"remote_url": "mooncakestore://a:1"},
            "remote_url",
            'mooncakestore://: write remote = "mooncake://',
        ),
        (
            {"remote_url": "u:hunter2@host"},
            "remote_url",
            "this engine is not known",
        ),
        ({"remote_url": "gs://bucket"}, "remote_url", "LMCache has no gs://"),
        (
            {"remote_url": "azure://acct"},
            "remote_url",
            "az://CONTAINER?account_name=ACCOUNT",
        ),
        (
            {"remote_config_url": "http://h/"},
            "remote_config_url",
            "import that file",
        ),
        (
            {"enable_hidden_state_cache": True},
            "enable_hidden_state_cache",
            "only KV is stored",
        ),
        ({"remote_url": "redis://u:hunter2@host:port"}, "remote_url", "the port"),
        (
            {"remote_url": "s3://b.cwlota.com"},
            "remote_url",
            'remote = "s3://b?endpoint=https://cwlota.com"',
        ),
        (
            {"remote_url": "s3://b.s3express-a.eu.amazonaws.com"},
            "remote_url",
            "s3_express=true",
        ),
        (
            {"remote_url": "redis://h", "remote_serde": "cachegen"},
            "remote_serde",
            "remote_serde: naive",
        ),
        (
            {"remote_url": "redis://h", "remote_serde": "kivi"},
            "remote_serde",
            "?codec=zstd",
        ),
        ({"cache_policy": "LFU"}, "cache_policy", "LRU"),
        ({"cache_policy": "ARC"}, "cache_policy", "LRU"),
        ({"backend": "tape"}, "backend", "backend: cpu"),
        ({"gds_path": "/x"}, "gds_path", "local_disk: PATH"),
        ({"priority_limit": 0}, "priority_limit", "all priorities"),
        (
            {"extra_config": {"enable_nixl_storage": True}},
            "enable_nixl_storage",
            "local_disk: PATH",
        ),
    ],
)
def test_what_cannot_be_honoured_says_what_to_write(
    fields: dict[str, object], field: str, said: str
) -> None:
    made = translate(fields)
    assert verdict(made, field) is FieldVerdict.NOT_SUPPORTED
    assert [one.field for one in made.refused] == [field]
    assert said in text(made, field)
    assert "hunter2" not in made.toml("x")


def test_what_can_be_had_instead_is_had_if_it_is_forced() -> None:
    made = translate(
        {"remote_url": "redis://h?ttl=1h", "remote_serde": "cachegen"}
    )
    assert made.options["remote"] == "redis://h?ttl=1h&codec=zstd"


@pytest.mark.parametrize(
    ("url", "extra", "ours"),
    [
        ("rediss://h:1/2", {}, "rediss://h:1/2"),
        ("unix:///run/r.sock", {}, "unix:///run/r.sock"),
        ("valkey://h:1", {}, "redis://h:1"),
        (
            "valkey://h:1",
            {
                "valkey_username": "me",
                "valkey_password": "a/b",
                "valkey_database": 3,
            },
            "redis://me:a%2Fb@h:1/3",
        ),
        (
            "valkey://h:1,i:2",
            {"valkey_mode": "cluster"},
            "redis+cluster://h:1,i:2",
        ),
        (
            "valkey://[::1]:1,[::2]:2",
            {"valkey_mode": "cluster"},
            "redis+cluster://[::1]:1,[::2]:2",
        ),
        (
            "s3://bucket",
            {"s3_region": "US-WEST-04A"},
            "s3://bucket?region=US-WEST-04A",
        ),
        (
            "s3://bucket.s3.eu-west-1.amazonaws.com",
            {},
            "s3://bucket?region=eu-west-1",
        ),
        ("redis-cluster://h:1,i:2", {}, "redis+cluster://h:1,i:2"),
        (
            "azure://acct.blob.core.windows.net/kv",
            {},
            "az://kv?account_name=acct",
        ),
        (
            "valkey://h:1",
            {"tls_enable": True, "valkey_password": "x"},
            "rediss://:x@h:1",
        ),
        (
            "valkey://h:1,i:2",
            {"tls_enable": "true", "valkey_mode": "cluster"},
            "rediss+cluster://h:1,i:2",
        ),
        (
            "resp://h:1",
            {"username": "me", "password": "a/b"},
            "redis://me:a%2Fb@h:1",
        ),
        ("lm://host:65432", {}, "http://host:65432?server=pagoda"),
    ],
)
def test_urls_of_engines_that_are_known(
    url: str, extra: dict[str, object], ours: str
) -> None:
    made = translate({"remote_url": url, "extra_config": extra})
    assert made.options["remote"] == ours
    assert made.refused == []
    for field in extra:
        assert verdict(made, field) is FieldVerdict.MAPPED


@pytest.mark.parametrize("url", ["lm://[::1", "valkey://[::1", "s3://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    made = translate({"remote_url": url})
    assert [one.field for one in made.refused] == ["remote_url"]
    assert "remote" not in made.options


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"backend": "cpu"}, {"host_size": "5GiB"}),
        (
            {"local_device": "cpu", "max_local_cache_size": 20},
            {"host_size": "20GiB"},
        ),
        (
            {"backend": "file:///tmp/lm", "max_local_cache_size": 9},
            {"host_size": 0, "disk_path": "/tmp/lm", "disk_size": "9GiB"},
        ),
        (
            {"backend": "redis://h:1"},
            {"host_size": "5GiB", "remote": "redis://h:1"},
        ),
    ],
)
def test_older_fields_are_translated(
    fields: dict[str, object], options: dict[str, object]
) -> None:
    made = translate(fields)
    assert made.options == options
    assert made.refused == []
    assert (
        translate({"backend": "lm://h:1"}).options["remote"]
        == "http://h:1?server=pagoda"
    )


def test_what_blends_there_has_its_share_and_its_least_tokens_here() -> None:
    fields = {
        "enable_blending": True,
        "blend_recompute_ratios": [0.2, 0.4],
        "blend_min_tokens": 128,
    }
    made = translate(
        {
            **fields,
            "blend_check_layers": [1],
            "blend_special_str": " # # ",
            "blend_thresholds": [0.1],
        }
    )
    assert made.refused == []
    assert made.options == {
        "blend_recompute": 0.2,
        "blend_min_tokens": 128,
        "host_size": "5GiB",
    }
    assert (
        verdict(made, "enable_blending")
        is verdict(made, "blend_special_str")
        is FieldVerdict.ELSEWHERE
    )
    said = text(made, "enable_blending")
    for word in (
        "Transformers",
        "vLLM and SGLang",
        "verdict of pagoda quality",
        "documents=...",
    ):
        assert word in said
    assert verdict(made, "blend_check_layers") is FieldVerdict.SAME
    assert verdict(made, "blend_thresholds") is FieldVerdict.NOT_NEEDED
    config = Config(**made.options)
    assert not config.unchecked  # the gate stays
    assert tomllib.loads(made.toml("x")) == made.options


@pytest.mark.parametrize(
    ("field", "value", "share"),
    [
        ("blend_recompute_ratio", 0.3, 0.3),
        ("blend_recompute_ratios", "0.3,0.5", 0.3),
        ("blend_recompute_ratios", "[0.3]", 0.3),
        ("blend_recompute_ratios", None, 0.15),
        ("blend_recompute_ratios", [0], 0.0),
    ],
)
def test_the_share_that_is_computed_again(
    field: str, value: object, share: float
) -> None:
    made = translate(
        {"enable_blending": "True", field: value, "blend_check_layers": "2"}
    )
    assert made.options["blend_recompute"] == share
    assert "Deviation(layer=N)" in text(made, "blend_check_layers")
    off = translate({"enable_blending": False, field: value})
    assert "blend_recompute" not in off.options
    assert off.refused == []


@pytest.mark.parametrize(
    "fields",
    [
        {"blend_recompute_ratios": [1.5]},
        {"blend_recompute_ratios": "a"},
        {"blend_recompute_ratios": []},
        {"blend_recompute_ratio": "nan"},
        {"blend_min_tokens": -1},
        {"blend_min_tokens": 2.5},
        {"blend_check_layers": "x"},
    ],
)
def test_values_of_blending_that_cannot_stand(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="blend_"):
        translate({"enable_blending": True, **fields})


def test_unknown_fields_are_named_and_never_dropped() -> None:
    made = translate(
        {
            "chunk_sise": 256,
            "extra_config": {"secret_knob": "hunter2"},
            "nothing": None,
        }
    )
    assert [one.field for one in made.refused] == [
        "secret_knob",
        "chunk_sise",
        "nothing",
    ]
    assert {one.verdict for one in made.refused} == {FieldVerdict.UNKNOWN}
    assert "did you mean chunk_size?" in text(made, "chunk_sise")
    assert "hunter2" not in made.toml("x")


def test_null_and_empty_set_nothing() -> None:
    made = translate(dict.fromkeys(known_fields()))
    assert made.options == {"host_size": "5GiB"}
    assert [one.field for one in made.findings] == ["local_cpu"]
    assert translate(dict.fromkeys(known_fields(), "")).options == made.options


@pytest.mark.parametrize("field", known_fields())
def test_every_field_gets_an_answer(field: str) -> None:
    if field == "extra_config":
        return
    made = translate({field: "1"} if field != "cache_policy" else {field: "LRU"})
    assert made.refused == [] or field in {
        *SWITCHES,
        *WHEN_SET,
        "backend",
        "local_device",
        "local_disk",
        "remote_url",
    }
    assert [
        one
        for one in made.findings
        if one.field == field and one.verdict is not FieldVerdict.UNKNOWN
    ]


def test_no_field_has_two_answers() -> None:
    tables = [
        set(SWITCHES),
        set(WHEN_SET),
        set(NOT_NEEDED),
        set(BLENDING),
        *map(set, BELONGS.values()),
    ]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(BELONGS) <= set(SWITCHES)


def test_the_page_has_a_row_for_every_field() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE.read_text()))
    assert not [field for field in known_fields() if field not in named]


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_size": "many"},
        {"chunk_size": 2.5},
        {"max_local_cpu_size": True},
        {"local_cpu": "perhaps"},
        {"enable_p2p": 3},
        {"extra_config": "{"},
        {"extra_config": [1]},
        {"chunk_size": 0},
        {"max_local_cpu_size": -1},
        {"max_local_cpu_size": "nan"},
        {"max_local_cpu_size": "inf"},
        {"chunk_size": "inf"},
    ],
)
def test_a_value_that_its_field_cannot_have_is_a_config_error(
    fields: dict[str, object],
) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(fields)
    assert "\n" not in str(caught.value)


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.lists(st.integers())
)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(known_fields()) | st.text(max_size=8), _VALUES, max_size=6
    )
)
def test_anything_is_a_translation_or_a_config_error(
    fields: dict[str, object],
) -> None:
    try:
        made = translate(fields)
    except ConfigError as trouble:
        assert "\n" not in str(trouble)
        return
    assert tomllib.loads(made.toml("x")) == made.options
    answered = {one.field for one in made.findings}
    for field, value in fields.items():
        if value not in (None, "") and field != "extra_config":
            assert field in answered


def test_yaml_and_json_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "chunk_size: 128 # tokens\nlocal_disk: null\nextra_config:\n  use_odirect: true\n"
    )
    assert read(file) == {
        "chunk_size": 128,
        "local_disk": None,
        "extra_config": {"use_odirect": True},
    }
    (tmp_path / "a.json").write_text('{"chunk_size": 128}')
    assert read(tmp_path / "a.json") == {"chunk_size": 128}
    for content in (
        b"",
        b"just text",
        b"- 1\n",
        b"a: [",
        b"\xff\xfe",
        b"a: !!python/object:os.system x",
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"lmcache\.yaml") as caught:
            read(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.yaml")


def test_variables_of_the_environment_are_read() -> None:
    environ = {
        "LMCACHE_CHUNK_SIZE": "64",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_LOCAL_DISK": "",
        "LMCACHE_CONFIG_FILE": "/x",
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "PAGODA_CHUNK_TOKENS": "1",
    }
    given = variables_in(environ)
    assert given == {name: environ[name] for name in list(environ)[:3]}
    assert load_lmcache(None, given).fields == {
        "chunk_size": 64,
        "local_cpu": True,
        "local_disk": None,
    }


def test_variables_override_the_file_and_say_so() -> None:
    loaded = load_lmcache(
        {"chunk_size": 64, "max_local_cpu_size": 5, "local_cpu": "yes"},
        {
            "LMCACHE_CHUNK_SIZE": '"128"',
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "40",
            "LMCACHE_CACHE_POLICY": "LRU",
        },
    )
    made = translate(loaded)
    assert made.options == {"chunk_tokens": 128, "host_size": 0, "policy": "lru"}
    said = {
        one.field: one.text
        for one in made.findings
        if one.verdict is FieldVerdict.REMARK
    }
    assert (
        said["chunk_size"]
        == "LMCACHE_CHUNK_SIZE overrides the file, as in LMCache"
    )
    assert "reads 'yes' as false" in said["local_cpu"]
    assert "cache_policy" not in said


def test_a_field_counts_at_its_own_level_only() -> None:
    made = translate(
        load_lmcache(
            {"use_odirect": True, "extra_config": {"chunk_size": 64}}, {}
        )
    )
    assert made.options == {"host_size": "5GiB"}
    assert made.refused == []
    assert "below extra_config only" in text(made, "use_odirect")
    assert "LMCache reads it above" in text(made, "chunk_size")


def test_credentials_in_variables_are_in_the_url() -> None:
    variables = {
        "LMCACHE_RESP_USERNAME": "me",
        "LMCACHE_RESP_PASSWORD": "words",
        "LMCACHE_FORCE_SKIP_SAVE": "1",
    }
    made = translate(load_lmcache({"remote_url": "resp://h:1"}, variables))
    assert made.options["remote"] == "redis://me:words@h:1"
    assert made.refused == []
    assert "kv_consumer" in text(made, "force_skip_save")
    keys = {"aws_secret_access_key": "hunter2"}
    made = translate({"remote_url": "s3://b", "extra_config": keys})
    assert "AWS_SECRET_ACCESS_KEY" in text(made, "aws_secret_access_key")
    assert "hunter2" not in made.toml("x")


def test_every_field_of_lmcache_is_known_and_its_defaults_are_taken() -> None:
    assert len(table().fields) == 108
    assert not set(table().fields) - set(known_fields())
    made = translate(
        {name: default for name, (_, default) in table().fields.items()}
    )
    assert made.refused == []


def test_without_pyyaml_there_is_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("chunk_size: 1\n")
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from pathlib import Path\nfrom pagoda_tools.migrate.lmcache import read\n"
        "read(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "pip install 'pagodakv[yaml]'" in done.stderr


def test_p2p_comes_to_neighbours_that_are_named() -> None:
    fields = {
        "enable_p2p": True,
        "lookup_url": "r:6379",
        "distributed_url": "a:8200",
        "p2p_host": "a",
    }
    peers = ["http://b:7777", "http://:hunter2@c:7777"]
    made = translate(fields, peers=peers)
    assert made.refused == []
    assert made.options["peers"] == peers
    assert verdict(made, "enable_p2p") is FieldVerdict.MAPPED
    assert "hunter2" not in text(made, "enable_p2p")
    assert "pagoda serve --listen a:8200" in text(made, "distributed_url")
    assert (
        verdict(made, "lookup_url")
        is verdict(made, "p2p_host")
        is FieldVerdict.NOT_NEEDED
    )
    assert tomllib.loads(made.toml("x"))["peers"] == peers
    off = translate({"enable_p2p": False}, peers=peers)
    assert "peers" not in off.options
    assert "enable_p2p is off" in text(off, "--peers")


def test_p2p_comes_to_a_directory_of_neighbours_where_they_are_not_named_or_many() -> (
    None
):
    fields = {
        "enable_p2p": True,
        "lookup_url": "r:6379",
        "distributed_url": "a:8200",
        "p2p_host": "a",
    }
    made = translate(fields)
    assert made.refused == []
    assert made.options["lookup"] == "redis://r:6379"
    assert "peers" not in made.options
    assert verdict(made, "lookup_url") is FieldVerdict.MAPPED
    assert "pagoda serve --listen a:8200" in text(made, "distributed_url")
    secret = translate({**fields, "lookup_url": "redis://:hunter2@r:6379/1"})
    assert "hunter2" not in "".join(one.text for one in secret.findings)
    assert (
        tomllib.loads(secret.toml("x"))["lookup"] == "redis://:hunter2@r:6379/1"
    )
    many = [f"http://n{n}:7777" for n in range(9)]
    assert translate(fields, peers=many).options["lookup"] == "redis://r:6379"
    assert "lookup" not in translate(fields, peers=many[:8]).options
    with pytest.raises(ConfigError, match="set lookup"):
        translate({"enable_p2p": True}, peers=many)
    with pytest.raises(ConfigError, match="machines meet in a Redis"):
        translate({**fields, "lookup_url": "http://r:8100"})
