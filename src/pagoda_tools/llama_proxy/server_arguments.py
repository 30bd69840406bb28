"""The arguments of llama-server: which are the proxy's, which the server gets, which it must not
have.

The user writes them as for llama-server alone, on the command line or as its environment variables.
Called by `pagoda llama-server`; starts nothing but `llama-server --help`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pagoda.base.errors import ConfigError

DEFAULT_LISTEN = ("127.0.0.1", 8080)  # llama-server's own
KEY_VARIABLE = "LLAMA_API_KEY"
HIDDEN = "..."  # printed instead of a secret

_HELP_SECONDS = 120.0  # a binary that looks for GPUs first
_PREFIX = "LLAMA_ARG_"
_NEGATIVE_PREFIX = "LLAMA_ARG_NO_"
_TRUE = ("on", "enabled", "true", "1")
_FALSE = ("off", "disabled", "false", "0")
# as std::stoi reads it
_NUMBER = re.compile(r"\s*[+-]?\d+")
_NAMES_IN_HELP = re.compile(r"--?[A-Za-z][\w.-]*(?:,\s+--?[A-Za-z][\w.-]*)*")
# --gpt-oss-20b-default, --fim-qwen-7b-spec
_PRESET = re.compile(r"--(?!spec-)[\w.-]+-(default|spec)")
_SECRETS = ("-hft", "--hf-token", "--mcp-servers-json")
_ONLY_PRINT = (
    "-h",
    "--help",
    "--usage",
    "--version",
    "-cl",
    "--cache-list",
    "--list-devices",
    "--completion-bash",
)


class _ServerOption(NamedTuple):
    """An option that this command must know."""

    names: tuple[str, ...]
    variables: tuple[str, ...] = ()
    has_value: bool = True
    negative: tuple[str, ...] = ()  # the names that switch it off
    is_ours: bool = False  # the server does not get what the user wrote


_OPTIONS: dict[str, _ServerOption] = {
    "host": _ServerOption(("--host",), ("LLAMA_ARG_HOST",), is_ours=True),
    "port": _ServerOption(("--port",), ("LLAMA_ARG_PORT",), is_ours=True),
    "api_key": _ServerOption(("--api-key",), (KEY_VARIABLE,), is_ours=True),
    "api_key_file": _ServerOption(
        ("--api-key-file",), ("LLAMA_ARG_API_KEY_FILE",), is_ours=True
    ),
    "slot_save_path": _ServerOption(("--slot-save-path",), is_ours=True),
    "slots": _ServerOption(
        ("--slots",),
        ("LLAMA_ARG_ENDPOINT_SLOTS",),
        has_value=False,
        negative=("--no-slots",),
        is_ours=True,
    ),
    "cache_idle_slots": _ServerOption(
        ("--cache-idle-slots",),
        ("LLAMA_ARG_CACHE_IDLE_SLOTS",),
        has_value=False,
        negative=("--no-cache-idle-slots",),
        is_ours=True,
    ),
    "cache_ram": _ServerOption(
        ("-cram", "--cache-ram"), ("LLAMA_ARG_CACHE_RAM",)
    ),
    "cache_prompt": _ServerOption(
        ("--cache-prompt",),
        ("LLAMA_ARG_CACHE_PROMPT",),
        has_value=False,
        negative=("--no-cache-prompt",),
    ),
    "cache_reuse": _ServerOption(("--cache-reuse",), ("LLAMA_ARG_CACHE_REUSE",)),
    "context_shift": _ServerOption(
        ("--context-shift",),
        ("LLAMA_ARG_CONTEXT_SHIFT",),
        has_value=False,
        negative=("--no-context-shift",),
    ),
    "swa_full": _ServerOption(
        ("--swa-full",), ("LLAMA_ARG_SWA_FULL",), has_value=False
    ),
    "reuse_port": _ServerOption(
        ("--reuse-port",), ("LLAMA_ARG_REUSE_PORT",), has_value=False
    ),
    "api_prefix": _ServerOption(("--api-prefix",), ("LLAMA_ARG_API_PREFIX",)),
    "ssl": _ServerOption(
        ("--ssl-key-file", "--ssl-cert-file"),
        ("LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"),
    ),
    "embedding": _ServerOption(
        ("--embedding", "--embeddings", "--embd-gemma-default"),
        ("LLAMA_ARG_EMBEDDINGS",),
        has_value=False,
    ),
    "reranking": _ServerOption(
        ("--rerank", "--reranking"), ("LLAMA_ARG_RERANKING",), has_value=False
    ),
    "sleep": _ServerOption(("--sleep-idle-seconds",)),
    "router": _ServerOption(
        ("--models-dir", "--models-preset"),
        ("LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET"),
    ),
    "model": _ServerOption(
        (
            "-m",
            "--model",
            "-mu",
            "--model-url",
            "-dr",
            "--docker-repo",
            "-hf",
            "-hfr",
            "--hf-repo",
        ),
        (
            "LLAMA_ARG_MODEL",
            "LLAMA_ARG_MODEL_URL",
            "LLAMA_ARG_DOCKER_REPO",
            "LLAMA_ARG_HF_REPO",
        ),
    ),
    "draft": _ServerOption(
        (
            "-md",
            "--model-draft",
            "--spec-draft-model",
            "-hfd",
            "-hfrd",
            "--hf-repo-draft",
            "--spec-draft-hf",
        ),
        (
            "LLAMA_ARG_SPEC_DRAFT_MODEL",
            "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
            "LLAMA_ARG_MODEL_DRAFT",
            "LLAMA_ARG_HFD_REPO",
        ),
    ),
    "speculation": _ServerOption(("--spec-type",), ("LLAMA_ARG_SPEC_TYPE",)),
    "default_speculation": _ServerOption(
        ("--spec-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec"),
        has_value=False,
    ),
}
_NAMED = {
    name: (key, option, name not in option.negative)
    for key, option in _OPTIONS.items()
    for name in (*option.names, *option.negative)
}


class _Written(NamedTuple):
    """What was written for an option last."""

    value: str  # of a switch: "1" or "0"
    name: str  # as it was written

    @property
    def is_on(self) -> bool:
        return self.value.lower() in _TRUE

    @property
    def number(self) -> int:
        """The value as a number; 0 if it is none, which the server itself refuses."""
        found = _NUMBER.match(self.value)
        return int(found[0]) if found else 0


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """The user's arguments, taken apart."""

    passed: tuple[str, ...]  # what the server gets as it was written
    added: tuple[str, ...]  # and what this command adds
    environment: dict[str, str] = field(repr=False)  # without the server's key
    listen: tuple[str, int]  # where the proxy listens
    api_keys: tuple[str, ...] = field(repr=False)
    slot_save_path: Path | None  # the user's own
    has_ram_cache: bool  # the server keeps copies of idle slots itself
    empties_idle_slots: (
        bool  # when a request starts; this build cannot be told otherwise
    )
    loading_is_off: str  # why nothing may be loaded; empty: it may

    def command(
        self, program: Sequence[str], port: int | str, slot_save_path: Path | str
    ) -> list[str]:
        """Return the command that starts the server on a loopback port. It has no key of ours, but
        what the user wrote may be secret: see `without_secrets`.
        """
        return [
            *program,
            *self.passed,
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--slot-save-path", str(slot_save_path)),
            *self.added,
        ]


def read_arguments(
    words: Sequence[str],
    environment: Mapping[str, str],
    known: Collection[str],
) -> ServerArguments:
    """Take apart what the user wrote for llama-server. Reads the file of keys, changes nothing.

    As llama-server does: an option on the command line counts more than its variable, the last of
    several more than those before it, and all keys are accepted. `--a_b` is `--a-b`.

    Args:
        words: The arguments after the program.
        environment: Of the server; the variables that are the proxy's are left out of it.
        known: The options that this build has; only those are added.

    Raises ConfigError for an option with which the proxy would be wrong or of no use, and says what
    to do.
    """
    settings, keys, passed = _read(words, environment)
    _refuse(settings)
    host, port = DEFAULT_LISTEN
    if "host" in settings:
        host = settings["host"].value
    if "port" in settings:
        port = _port(settings["port"])
    ours = {
        variable
        for option in _OPTIONS.values()
        if option.is_ours
        for variable in option.variables
    }
    ours |= {name.replace(_PREFIX, _NEGATIVE_PREFIX) for name in ours}
    ram = settings.get("cache_ram")
    has_ram_cache = ram is not None and ram.number != 0
    path = settings.get("slot_save_path")
    return ServerArguments(
        passed=tuple(passed),
        added=tuple(_added(settings, known)),
        environment={
            name: value for name, value in environment.items() if name not in ours
        },
        listen=(host, port),
        api_keys=tuple(dict.fromkeys(keys)),
        slot_save_path=Path(path.value).absolute() if path else None,
        has_ram_cache=has_ram_cache,
        empties_idle_slots=has_ram_cache and "--no-cache-idle-slots" not in known,
        loading_is_off=_loading_is_off(settings),
    )


def only_prints(words: Sequence[str]) -> bool:
    """Whether llama-server prints something with these arguments, and ends."""
    return any(_canonical(word) in _ONLY_PRINT for word in words)


def known_options(
    program: Sequence[str], environment: Mapping[str, str]
) -> frozenset[str]:
    """Return the names of all options of a llama-server, from its `--help`.

    Raises ConfigError if it cannot be run, or is something else.
    """
    command = [*program, "--help"]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{program[0]} --help does not end: is it a llama-server?"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{program[0]} cannot be run: {error.strerror}"
        ) from None
    names: set[str] = set()
    for line in done.stdout.splitlines():
        if found := _NAMES_IN_HELP.match(line):
            names.update(re.split(r",\s+", found[0]))
    if done.returncode or "--slot-save-path" not in names:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        said = f" ({last[0].strip()})" if done.returncode and last else ""
        raise ConfigError(
            f"{program[0]} is no llama-server that can save slots: its --help names no "
            f"--slot-save-path{said}"
        )
    return frozenset(names)


def without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command for people: the values of secret options are hidden. Pure."""
    shown = []
    is_secret = False
    for word in command:
        shown.append(HIDDEN if is_secret else word)
        is_secret = _canonical(word) in _SECRETS and not is_secret
    return shown


def listen_address(text: str, option: str = "--listen") -> tuple[str, int]:
    """Return host and port of "HOST:PORT". Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{option} {text}: write HOST:PORT, with a port from 0 to 65535"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _canonical(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _read(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, _Written], list[str], list[str]]:
    """Return the settings that are known here, all keys, and the words that the server gets.

    The value of an option that is not known here is taken for a word of its own: it would have to
    be the very name of one that is. Raises ConfigError.
    """
    settings: dict[str, _Written] = {}
    keys: list[str] = []
    passed: list[str] = []

    def take(key: str, setting: _Written) -> None:
        settings[key] = setting
        if key == "api_key":
            keys.extend(_keys_of(setting))
        elif key == "api_key_file":
            keys.extend(_keys_in(setting))

    for key, setting in _from_environment(environment):
        take(key, setting)
    rest = iter(words)
    for word in rest:
        name, equals, _ = _canonical(word).partition("=")
        if name not in _NAMED:
            passed.append(word)
            if _PRESET.fullmatch(name):
                settings["model"] = _Written(name, name)
            continue
        if equals:
            raise ConfigError(
                f"{name}=...: llama-server takes the value as a word of its own: {name} VALUE"
            )
        key, option, is_positive = _NAMED[name]
        taken = [word]
        value = "1" if is_positive else "0"
        if option.has_value:
            found = next(rest, None)
            if found is None:
                raise ConfigError(f"{word} needs a value")
            value = found
            taken.append(found)
        take(key, _Written(value, word))
        if not option.is_ours:
            passed += taken
        if _PRESET.fullmatch(name):
            settings["model"] = _Written(name, name)
    return settings, keys, passed


def _from_environment(
    environment: Mapping[str, str],
) -> list[tuple[str, _Written]]:
    """Return the settings of llama-server's variables."""
    found = []
    for key, option in _OPTIONS.items():
        for variable in option.variables:
            if option.negative:
                negative = variable.replace(_PREFIX, _NEGATIVE_PREFIX)
                if negative in environment:
                    found.append((key, _Written("0", negative)))
                    continue
            if variable in environment:
                found.append((key, _Written(environment[variable], variable)))
    return found


def _keys_of(setting: _Written) -> list[str]:
    """Return the keys in a list. Raises ConfigError."""
    keys = [key for key in setting.value.split(",") if key]
    # an empty variable is as good as none
    if not keys and setting.name != KEY_VARIABLE:
        # it would be open to all
        raise ConfigError(f"{setting.name}: the key is empty")
    return keys


def _keys_in(setting: _Written) -> list[str]:
    """Return the keys in a file, one a line. Raises ConfigError."""
    try:
        lines = Path(setting.value).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting.name} {setting.value} cannot be read: {error}"
        ) from None
    stripped = (line.strip() for line in lines if not line.startswith("#"))
    keys = [line for line in stripped if line]
    if not keys:
        # it would be open to all
        raise ConfigError(f"{setting.name} {setting.value} has no key")
    return keys


def _port(setting: _Written) -> int:
    if not 0 <= setting.number <= 65535 or not _NUMBER.match(setting.value):
        raise ConfigError(
            f"{setting.name} {setting.value}: write a port from 0 to 65535"
        )
    return setting.number


def _on(settings: Mapping[str, _Written], key: str) -> _Written | None:
    """Return a switch that is on."""
    found = settings.get(key)
    return found if found is not None and found.is_on else None


def _off(settings: Mapping[str, _Written], key: str) -> _Written | None:
    """Return a switch that was switched off."""
    found = settings.get(key)
    return found if found is not None and found.value.lower() in _FALSE else None


def _above_zero(settings: Mapping[str, _Written], key: str) -> _Written | None:
    found = settings.get(key)
    return found if found is not None and found.number > 0 else None


def _given(settings: Mapping[str, _Written], key: str) -> _Written | None:
    found = settings.get(key)
    return found if found is not None and found.value else None


_NOT_OF_ITS_TOKENS = (
    "after it the KV in a slot is not that of its tokens, and must not be stored: "
    "leave it out"
)
_NO_SUCH_ANSWER = "there is no KV to keep: run llama-server itself"
_Find = Callable[[Mapping[str, _Written], str], _Written | None]
_REFUSED: Sequence[tuple[_Find, str, str]] = (
    (_above_zero, "cache_reuse", _NOT_OF_ITS_TOKENS),
    (_on, "context_shift", _NOT_OF_ITS_TOKENS),
    (
        _on,
        "swa_full",
        "a saved slot has only the last window, and after a restore the server would compute on "
        "rows that are missing: leave it out",
    ),
    (_off, "slots", "the proxy must see which slots are busy: leave it out"),
    (_off, "cache_prompt", "then no slot is ever continued: leave it out"),
    (
        _on,
        "cache_idle_slots",
        "it empties the slots before they are saved: leave it out",
    ),
    (
        _given,
        "router",
        "a router starts servers that the proxy does not see: start one pagoda llama-server for "
        "each model (llama-swap can do that)",
    ),
    (
        _given,
        "ssl",
        "the proxy speaks HTTP only: put TLS in front of it, such as nginx or caddy, and leave "
        "this out",
    ),
    (_on, "embedding", _NO_SUCH_ANSWER),
    (_on, "reranking", _NO_SUCH_ANSWER),
    (
        _above_zero,
        "sleep",
        "a server that sleeps loses its slots: leave it out",
    ),
    (
        _given,
        "api_prefix",
        "the proxy answers without a prefix: leave it out, and let the web server in front add it",
    ),
    (
        _on,
        "reuse_port",
        "the proxy shares its port with nobody: leave it out",
    ),
)


def _refuse(settings: Mapping[str, _Written]) -> None:
    """Raise ConfigError for what cannot be used behind the proxy."""
    for find, key, why in _REFUSED:
        if (found := find(settings, key)) is not None:
            raise ConfigError(f"{found.name}: {why}")
    host = settings.get("host")
    if host is not None and (host.value.endswith(".sock") or "," in host.value):
        raise ConfigError(
            f"{host.name} {host.value}: the proxy listens at one TCP address: write --listen "
            "HOST:PORT before the --"
        )
    if _given(settings, "model") is None:
        raise ConfigError(
            "llama-server would start as a router, without a model: write -m MODEL.gguf after the "
            "program"
        )


def _added(settings: Mapping[str, _Written], known: Collection[str]) -> list[str]:
    """Return the options that the server gets from us. A configuration file of llama.cpp may say
    otherwise, and the command line counts more.
    """
    wanted: list[tuple[str, ...]] = [
        ("--slots",),
        ("--no-cache-idle-slots",),
        ("--no-context-shift",),
    ]
    if "cache_reuse" not in settings:
        wanted.append(("--cache-reuse", "0"))
    if "cache_ram" not in settings:
        wanted.append(("--cache-ram", "0"))
    return [word for words in wanted if words[0] in known for word in words]


def _loading_is_off(settings: Mapping[str, _Written]) -> str:
    """Return why states may not be loaded; empty: they may."""
    types = settings.get("speculation")
    draft = _given(settings, "draft") or _on(settings, "default_speculation")
    if draft is None and types is not None and types.value not in ("", "none"):
        draft = types
    if draft is None:
        return ""
    return (
        f"{draft.name}: that speculative decoding computes the same after a restore was not "
        "proved"
    )


def program_of(
    words: Sequence[str], which: Callable[[str], str | None]
) -> tuple[str | None, str, list[str]]:
    """Return the path of the program, its name as it was written, and the words after it.

    `which` finds a program on the PATH. The path is None if the program is not there. Raises
    ConfigError for a path that is no program.
    """
    name = "llama-server"
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        name = rest.pop(0)
    if "/" not in name:
        return which(name), name, rest
    path = Path(name)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"{name} is no program that can be run")
    return str(path.absolute()), name, rest
