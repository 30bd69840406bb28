"""Which files are believed: named ones, the user's own, allowed ones, and those that are only
found.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagoda.base import trusted_files
from pagoda.base.errors import ConfigError
from pagoda.base.trusted_files import (
    FOUND_OPTIONS,
    BelievedFile,
    FileClass,
    Unbelieved,
    read_found,
    read_named,
)
from pagoda.config import option_names
from pagoda.config.sources import load
from tests.cli.shelf import done_here, refused
from tests.groups import others_can_write

OTHER_USER = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can make files of another user: run as root",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home; the working directory is an empty one beside it."""
    found = tmp_path / "home"
    work = tmp_path / "work"
    found.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return found


@pytest.fixture
def file(home: Path) -> Path:
    found = Path("pagoda.toml").absolute()
    found.write_text("chunk_tokens = 64\n")
    found.chmod(0o644)
    return found


def test_what_a_file_that_is_only_found_may_set_names_no_place_and_no_check() -> (
    None
):
    assert set(option_names()) >= FOUND_OPTIONS
    for word in (
        "path",
        "remote",
        "peers",
        "lookup",
        "record",
        "unchecked",
        "verdict",
        "codec",
        "epoch",
        "log_",
    ):
        assert [name for name in FOUND_OPTIONS if word in name] == (
            ["log_format"] if word == "log_" else []
        )


@pytest.mark.parametrize(
    "name", [name for name in option_names() if name not in FOUND_OPTIONS]
)
def test_every_other_option_is_refused_even_with_its_default(
    file: Path, name: str
) -> None:
    file.write_text(f"chunk_tokens = 64\n{name} = false\n")
    with pytest.raises(
        ConfigError,
        match=rf"pagoda.toml: {name}: refused.*pagoda config allow .*--config",
    ) as caught:
        load()
    assert "\n" not in str(caught.value)


# ---- named files, and the user's own


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666, 0o664, 0o777])
def test_a_named_file_that_others_can_write_is_refused(
    file: Path, mode: int
) -> None:
    file.chmod(mode)
    for given in ({"file": file}, {"environ": {"PAGODA_CONFIG": str(file)}}):
        if not others_can_write(mode):
            assert load(**given).config.chunk_tokens == 64  # type: ignore[arg-type]
            continue
        with pytest.raises(
            ConfigError,
            match=rf"others can write it \(mode 0{mode:o}\).*chmod go-w .*--config",
        ):
            load(**given)  # type: ignore[arg-type]


@as_root
def test_a_named_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER_USER}.*chown"):
        load(file=file)


def test_a_mounted_file_behind_links_is_read_in_a_directory_that_all_can_write(
    home: Path,
) -> None:
    """A ConfigMap: root's, two links, in a directory of mode 0777."""
    mount = home / "config"
    version = mount / "..2026_11_28"
    version.mkdir(parents=True)
    (version / "pagoda.toml").write_text('remote = "redis://h/0"\n')
    (mount / "..data").symlink_to("..2026_11_28")
    (mount / "pagoda.toml").symlink_to("..data/pagoda.toml")
    mount.chmod(0o777)
    assert load(file=mount / "pagoda.toml").config.remote == ("redis://h/0",)
    assert read_named(mount / "pagoda.toml").kind is FileClass.NAMED


def test_the_users_own_file_may_set_everything_unless_others_can_write_it(
    home: Path,
) -> None:
    own = home / ".config" / "pagoda" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("unchecked = true\n")
    assert load().config.unchecked
    own.chmod(0o666)
    with pytest.raises(
        ConfigError, match=r"config.toml is refused.*others can write it"
    ):
        load()
    if os.geteuid() == 0:
        own.chmod(0o644)
        os.chown(own, OTHER_USER, OTHER_USER)
        with pytest.raises(ConfigError, match="belongs to user"):
            load()


def test_a_found_file_does_not_hide_the_users_own(home: Path, file: Path) -> None:
    own = home / ".config" / "pagoda" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("chunk_tokens = 32\nprompt_log = false\nweights_epoch = 3\n")
    config, origins = load()
    assert config.chunk_tokens == 64
    assert config.prompt_log is False
    assert config.weights_epoch == 3
    assert origins["chunk_tokens"] == f"file {file}"
    assert origins["prompt_log"] == f"file {own}"


@pytest.mark.parametrize(
    "variables",
    [
        {"XDG_CONFIG_HOME": "conf"},
        {"XDG_CONFIG_HOME": "."},
        {"HOME": "conf"},
        {"HOME": "~"},
        {"HOME": "."},
    ],
)
def test_nothing_in_the_working_directory_is_the_users_own(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for base in (
        "conf/pagoda",
        "pagoda",
        "conf/.config/pagoda",
        "~/.config/pagoda",
        ".config/pagoda",
    ):
        Path(base).mkdir(parents=True)
        Path(base, "config.toml").write_text("unchecked = true\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not load().config.unchecked
    # a user without an account
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert not load(environ={**variables, "HOME": ""}).config.unchecked


_AS_USER = """
import os, pwd, struct, sys
from pathlib import Path
from types import SimpleNamespace
import grp
names = {1500: "alice"}
pwd.getpwuid = lambda uid: SimpleNamespace(pw_name="alice", pw_gid=1500)
grp.getgrgid = lambda gid: SimpleNamespace(gr_name={1500: "alice", 1600: "team"}[gid], gr_mem=sys.argv[3].split())
from pagoda.base.trusted_files import read_named
from pagoda.base.errors import ConfigError
os.setgid(1500); os.setuid(1500)
os.chmod(sys.argv[1], int(sys.argv[2], 8))
if sys.argv[4] == "acl":
    entries = ((1, 6, -1), (2, 6, 1600), (4, 4, -1), (16, 6, -1), (32, 4, -1))  # user 1600 may write
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(sys.argv[1], "system.posix_acl_access", acl)
try:
    print(read_named(sys.argv[1]).kind)
except ConfigError as refusal:
    print(refusal)
"""  # noqa: E501


@as_root
@pytest.mark.parametrize(
    ("mode", "group", "members", "said"),
    [
        # many systems give each user a group, and files this mode
        ("0664", 1500, "", "named"),
        ("0664", 1500, "alice", "named"),
        ("0664", 1500, "alice bob", "others can write it"),
        ("0664", 1500, "", "others can write it, by an ACL"),
        ("0664", 1600, "", "others can write it"),
        ("0666", 1500, "", "others can write it"),
        ("0644", 1600, "bob", "named"),
    ],
)
def test_the_private_group_of_a_user_is_no_other(
    shm_root: Path, mode: str, group: int, members: str, said: str
) -> None:
    shm_root.chmod(0o711)
    named = shm_root / "pagoda.toml"
    named.write_text("")
    os.chown(named, 1500, group)
    arguments = [
        sys.executable,
        "-c",
        _AS_USER,
        str(named),
        mode,
        members,
        "acl" if "ACL" in said else "",
    ]
    said = said.partition(", ")[0]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert said in done.stdout, done.stdout + done.stderr


# ---- the file in the working directory


def test_a_link_is_followed_as_long_as_it_stays_in_the_directory(
    file: Path,
) -> None:
    below = file.parent / "conf"
    below.mkdir()
    file.rename(below / "dev.toml")
    file.symlink_to("conf/dev.toml")
    assert isinstance(found := read_found(), BelievedFile)
    assert found.content == b"chunk_tokens = 64\n"
    below.chmod(0o777)
    assert "not yours alone" in str(read_found())
    below.chmod(0o755)
    for target in (
        "../work/conf/dev.toml",
        str(below / "dev.toml"),
        "conf/../conf/dev.toml",
        "conf/link",
    ):
        file.unlink()
        file.symlink_to(target)
        (below / "link").unlink(missing_ok=True)
        (below / "link").symlink_to("dev.toml")
        assert "it is a link out of its directory" in str(read_found()), target


def test_a_sticky_directory_above_is_enough(file: Path) -> None:
    file.parent.parent.chmod(0o1777)
    assert isinstance(read_found(), BelievedFile)
    file.parent.parent.chmod(0o777)
    assert "above it, is not yours alone" in str(read_found())


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "unreadable"])
def test_what_is_no_file_is_not_read_and_never_waited_for(
    file: Path, kind: str
) -> None:
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("pagoda.toml")
    else:
        file.write_bytes(b"#" * 70_000)
    assert isinstance(found := read_found(), Unbelieved)
    assert load().config.chunk_tokens == 256
    assert "\n" not in str(found)


def test_a_name_that_a_stranger_chose_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = tmp_path / "a\n\x1b[31mb\udcff"
    evil.mkdir()
    monkeypatch.chdir(evil)
    Path("pagoda.toml").write_text('remote = "redis://h"\n')
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value).isprintable()
    Path("pagoda.toml").write_text('"x\\n\\u001b[31m" = 1\n')
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value).isprintable()
    evil.chmod(0o777)
    assert str(read_found()).isprintable()


def test_what_is_checked_is_what_is_read(file: Path, home: Path) -> None:
    """Another process exchanges the file for a link to one with other content, again and again."""
    good = home / "good"
    evil = home / "evil"
    over = threading.Event()
    evil.write_text("unchecked = true\n")

    def exchange() -> None:
        while not over.is_set():
            fresh = file.with_name("fresh")
            fresh.symlink_to(evil)
            fresh.replace(file)
            good.write_text("chunk_tokens = 64\n")
            good.replace(file)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        seen = {
            type(found) for found in (checked(read_found()) for _ in range(2000))
        }
    finally:
        over.set()
        thread.join()
    assert BelievedFile in seen


def checked(
    found: BelievedFile | Unbelieved | None,
) -> BelievedFile | Unbelieved | None:
    assert (
        not isinstance(found, BelievedFile) or b"unchecked" not in found.content
    )
    return found


# ---- what is allowed


def test_a_note_that_others_could_have_written_allows_nothing(
    file: Path, home: Path
) -> None:
    file.write_text("unchecked = true\n")
    trusted_files.allow(trusted_files.read_to_allow(file))
    assert load().config.unchecked
    (note,) = (home / ".config" / "pagoda" / "allowed").iterdir()
    for path, mode in (
        (note, 0o666),
        (note.parent, 0o777),
        (note.parent.parent, 0o775),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        if others_can_write(mode):
            with pytest.raises(ConfigError, match="unchecked: refused"):
                load()
        else:
            assert load().config.unchecked
        path.chmod(before)
    assert load().config.unchecked
    if os.geteuid() == 0:
        os.chown(note, OTHER_USER, OTHER_USER)
        with pytest.raises(ConfigError, match="unchecked: refused"):
            load()


def test_a_permission_is_for_one_directory_and_one_content(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("unchecked = true\n")
    trusted_files.allow(trusted_files.read_to_allow(file))
    other = file.parent / "other"
    other.mkdir()
    (other / "pagoda.toml").write_text("unchecked = true\n")
    monkeypatch.chdir(other)
    with pytest.raises(ConfigError, match="only found"):
        load()
    (file.parent.parent / "link").symlink_to(file.parent)
    monkeypatch.chdir(file.parent.parent / "link")
    assert load().config.unchecked
    file.write_text("chunk_tokens = 32\n")  # harmless now: nothing to ask
    assert load().config.chunk_tokens == 32


def test_only_a_valid_file_of_that_name_can_be_allowed(
    file: Path, home: Path
) -> None:
    variables = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    (home / "other.toml").write_text("unchecked = true\n")
    assert "--config" in refused(
        "config", "allow", home / "other.toml", **variables
    )
    assert "cannot be read" in refused(
        "config", "allow", home / "pagoda.toml", **variables
    )
    wrong = {
        "unchekd = 1": "did you mean",
        "= 1": "TOML",
        "io_threads = 0": "io_threads",
        "#" * 70_000: "65,536",
    }
    for text, said in wrong.items():
        file.write_text(text)
        assert said in refused("config", "allow", file, **variables)
    assert not (home / ".config").exists()
    file.write_text('remote = "redis://u:hunter2@h"\n')
    assert "no home" in refused(
        "config", "allow", file, HOME="relative", XDG_CONFIG_HOME=""
    )
    done = done_here("config", "allow", file, **variables)
    assert done.returncode == 0
    assert "redis://u:***@h" in done.stdout
    assert "hunter2" not in done.stdout
