"""Translates LMCache's configuration (its YAML file or LMCACHE_ variables), and names all fields
that do not map.

Field names are those of its documented configurations up to 0.5. Its file is only read; its stored
chunks are neither read nor removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagoda.base.errors import ConfigError
from pagoda.config import Config
from pagoda.config.did_you_mean import did_you_mean
from pagoda.config.expand_home import expanded
from pagoda.config.remote_urls import MOST_PEERS, redacted
from pagoda_tools.migrate import lmcache_fields
from pagoda_tools.migrate.lmcache_fields import (
    FieldVerdict,
    as_flag,
    as_number,
    as_toml,
)
from pagoda_tools.migrate.lmcache_loader import VARIABLES, LoadedFields, table
from pagoda_tools.migrate.lmcache_urls import (
    IN_URLS,
    START_SERVER,
    Untranslated,
    is_own_server,
    translated,
)

_DEFAULT_CPU_GIB = 5.0


class Finding(NamedTuple):
    """One field of LMCache's, the verdict on it and the reason, without secrets."""

    field: str
    verdict: FieldVerdict
    text: str


class Translation(NamedTuple):
    """The options of PagodaKV, and the finding on every field."""

    options: dict[str, object]
    findings: list[Finding]

    @property
    def refused(self) -> list[Finding]:
        """The fields that cannot be translated although they change what is stored or served."""
        wrong = (FieldVerdict.NOT_SUPPORTED, FieldVerdict.UNKNOWN)
        return [one for one in self.findings if one.verdict in wrong]

    def toml(self, source: str) -> str:
        """Return the options as a pagoda.toml, with comments about the origin of each and about the
        other fields.
        """
        lines = [f"# From LMCache's configuration ({_comment(source)})."]
        for name, value in self.options.items():
            mapped = (
                one for one in self.findings if one.verdict is FieldVerdict.MAPPED
            )
            origins = (
                f"# {one.field}: {_comment(one.text)}"
                for one in mapped
                if one.text.startswith(name)
            )
            lines += ["", *origins, f"{name} = {as_toml(value)}"]
        for verdict in list(FieldVerdict)[1:]:
            ones = [one for one in self.findings if one.verdict is verdict]
            lines += ["", f"# {verdict}:"] if ones else []
            lines += [
                f"#   {_comment(one.field)}: {_comment(one.text)}" for one in ones
            ]
        return "\n".join(lines) + "\n"


def read(file: Path) -> dict[str, object]:
    """Return the fields of LMCache's file, YAML or JSON.

    Raises:
        ConfigError: the file cannot be read, or PyYAML is not installed.
    """
    try:
        text = file.read_text(encoding="utf-8")
        fields = (
            json.loads(text)
            if file.suffix == ".json"
            else msgspec.yaml.decode(text)
        )
    except ImportError:
        raise ConfigError(
            "reading YAML needs PyYAML: pip install 'pagodakv[yaml]'"
        ) from None
    except (OSError, ValueError) as trouble:
        why = " ".join(
            str(
                trouble.strerror if isinstance(trouble, OSError) else trouble
            ).split()
        )
        raise ConfigError(f"{file}: cannot be read: {why}") from None
    if not isinstance(fields, dict) or not fields:
        raise ConfigError(
            f"{file}: has no fields; LMCache's file has lines such as chunk_size: 256"
        )
    return {str(name): value for name, value in fields.items()}


def variables_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the LMCACHE_ variables that say something about what is stored or served."""
    given = {
        name: value
        for name, value in environ.items()
        if name.startswith(VARIABLES)
    }
    return {
        name: value
        for name, value in given.items()
        if name.removeprefix(VARIABLES).lower() not in lmcache_fields.PLUMBING
    }


def translate(
    fields: Mapping[str, object] | LoadedFields,
    workers: int = 1,
    peers: Sequence[str] = (),
) -> Translation:
    """Translate the fields. Changes nothing.

    Args:
        fields: values by LMCache's names, as in YAML, or as text; or what `lmcache_loader.load`
            returned.
        workers: the number of workers (ranks) on one machine: LMCache's sizes are per worker, ours
            per machine.
        peers: the URLs of the neighbours, for enable_p2p, which LMCache's file does not have.

    Raises:
        ConfigError: a field has an invalid value.
    """
    loaded = (
        fields
        if isinstance(fields, LoadedFields)
        else LoadedFields(dict(fields), {})
    )
    work = _FieldReader(dict(loaded.fields), workers, peers)
    work.run()
    for field, text in loaded.remarks.items():
        work.say(field, FieldVerdict.REMARK, text)
    translation = Translation(work.options, work.findings)
    Config(**work.options)  # type: ignore[arg-type]  # checks the options
    return translation


class _FieldReader:
    """One translation in progress: it takes the fields out one after the other."""

    def __init__(
        self, fields: dict[str, object], workers: int, peers: Sequence[str] = ()
    ) -> None:
        self.options: dict[str, object] = {}
        self.findings: list[Finding] = []
        extra = self._levels(fields, _extra(fields.pop("extra_config", None)))
        fields = {**extra, **fields}
        # null and empty text set nothing, but an unknown name is reported
        self.fields = {
            name: it
            for name, it in fields.items()
            if it not in (None, "") or not _known(name)
        }
        self._workers = workers
        self._peers = list(peers)
        self._given = dict(self.fields)

    def run(self) -> None:
        for field in ("backend", "local_device"):
            self._legacy(field)
        self._p2p()
        for field, rule in lmcache_fields.FIELDS.items():
            if self.fields.pop(field, None) is not None:
                found = rule(field, self._given)
                self.options |= (
                    {found.option: found.value} if found.option else {}
                )
                self.say(field, found.verdict, found.text)
        self._host()
        self._disk()
        self._remote()
        for field in self.fields:
            self.say(field, *_left_over(field))

    def _levels(
        self, fields: dict[str, object], extra: dict[str, object]
    ) -> dict[str, object]:
        """Remove from `fields`, and return of `extra`, what LMCache does not read at its level;
        report it.
        """
        for name in [
            name
            for name in fields
            if name in table().extra and name not in table().fields
        ]:
            if fields.pop(name) not in (None, ""):
                text = "has no effect: LMCache reads it below extra_config only"
                self.say(name, FieldVerdict.NOT_NEEDED, text)
        wrong = [name for name in extra if name in table().fields]
        for name in wrong:
            self.say(
                name,
                FieldVerdict.NOT_NEEDED,
                "has no effect below extra_config: LMCache reads it above",
            )
        return {name: value for name, value in extra.items() if name not in wrong}

    def say(self, field: str, verdict: FieldVerdict, text: str) -> None:
        self.findings.append(Finding(field, verdict, text))

    def map(self, field: str, option: str, value: object, why: str = "") -> None:
        self.options[option] = value
        shown = value
        if option == "peers":
            shown = [redacted(url) for url in self._peers]
        elif option in ("remote", "lookup") and isinstance(value, str):
            shown = redacted(value)
        self.say(
            field,
            FieldVerdict.MAPPED,
            f"{option} = {as_toml(shown)}{f' ({why})' if why else ''}",
        )

    def flag(self, field: str, default: bool) -> bool:
        return (
            as_flag(field, self.fields.pop(field))
            if field in self.fields
            else default
        )

    def _p2p(self) -> None:
        """Map LMCache's P2P to neighbours: the given ones, or those that use its look-up server as
        directory.
        """
        lookup = str(self.fields.get("lookup_url", ""))
        on = as_flag("enable_p2p", self.fields.get("enable_p2p", False))
        if self._peers and not on:
            self.say(
                "--peers",
                FieldVerdict.NOT_NEEDED,
                "enable_p2p is off: no neighbours are asked",
            )
        if not on or not (self._peers or lookup):
            return
        self.flag("enable_p2p", False)
        if self._peers:
            self.map(
                "enable_p2p",
                "peers",
                self._peers,
                "from --peers; run pagoda serve on every machine",
            )
        else:
            self.say(
                "enable_p2p",
                FieldVerdict.SAME,
                "run pagoda serve on every machine, all with the same token",
            )
        if lookup and not 0 < len(self._peers) <= MOST_PEERS:
            url = lookup if "://" in lookup else f"redis://{lookup}"
            self.map(
                "lookup_url",
                "lookup",
                url,
                "a Redis in which machines announce their chunks",
            )
            del self.fields["lookup_url"]
        for field in lmcache_fields.BELONGS["enable_p2p"]:
            if (value := self.fields.pop(field, None)) is not None:
                listens = f"run pagoda serve --listen {redacted(str(value))} on this machine"
                text = (
                    listens
                    if field == "distributed_url"
                    else "neighbours are asked themselves"
                )
                self.say(field, FieldVerdict.NOT_NEEDED, text)

    def _legacy(self, field: str) -> None:
        """Replace the older field for one place by the fields for each place."""
        if field not in self.fields:
            return
        where = str(self.fields.pop(field))
        verdict = FieldVerdict.SAME
        fields: dict[str, object] = {}
        if where == "cpu":
            fields = {"local_cpu": True}
            text = "the host tier, as local_cpu: true"
        elif where.startswith("cuda"):  # its oldest default
            fields = {"local_cpu": True}
            verdict = FieldVerdict.NOT_NEEDED
            text = (
                "the engine's prefix cache uses device memory; the host tier is used "
                "instead, as local_cpu: true"
            )
        elif where.startswith(("file://", "/", ".")):
            fields = {"local_disk": where, "local_cpu": False}
            text = "the disk tier, as local_disk"
            if "max_local_cache_size" in self.fields:
                fields["max_local_disk_size"] = self.fields.pop(
                    "max_local_cache_size"
                )
        elif "://" in where:
            fields = {"remote_url": where}
            text = "the remote tier, as remote_url"
        else:
            verdict = FieldVerdict.NOT_SUPPORTED
            text = (
                f"{redacted(where)!r} is not a known place; write {field}: cpu, file:///PATH "
                "or redis://HOST:6379"
            )
        self.fields = {**fields, **self.fields}
        self.say(field, verdict, text)

    def _host(self) -> None:
        legacy = (
            "max_local_cache_size"
            if "max_local_cache_size" in self.fields
            else ""
        )
        field = legacy or "max_local_cpu_size"
        given = field in self.fields
        gib = (
            as_number(field, self.fields.pop(field))
            if given
            else _DEFAULT_CPU_GIB
        )
        asked = "local_cpu" in self.fields
        if not self.flag("local_cpu", True):
            self.map(
                "local_cpu",
                "host_size",
                0,
                "vLLM's processes share the host tier: set a size",
            )
            if given:
                self.say(field, FieldVerdict.NOT_NEEDED, "there is no host tier")
            return
        why = self._times(gib) + ("" if given else "; LMCache's default")
        self.map(
            field if given else "local_cpu",
            "host_size",
            _gib(gib * self._workers),
            why,
        )
        if asked and given:
            self.say(
                "local_cpu",
                FieldVerdict.SAME,
                "there is a host tier if host_size is not 0",
            )

    def _disk(self) -> None:
        size = self.fields.pop("max_local_disk_size", None)
        place = self.fields.pop("local_disk", None)
        gib = as_number("max_local_disk_size", size) if size is not None else 0.0
        path = place if isinstance(place, str) else ""
        wrong = ""
        if place is True or (place and not path):
            wrong = "the path is missing; write local_disk: file:///PATH"
        elif "," in path:
            wrong = (
                "one disk tier is one directory; join the disks (RAID 0, LVM) and write "
                "local_disk: file:///PATH"
            )
        elif path and not gib:
            wrong = "the size is missing; write max_local_disk_size: GB too"
        if wrong:
            self.say("local_disk", FieldVerdict.NOT_SUPPORTED, wrong)
        elif path:
            directory = os.path.abspath(expanded(path.removeprefix("file://")))
            self.map(
                "local_disk",
                "disk_path",
                directory,
                "LMCache's files there stay as they are",
            )
            self.map(
                "max_local_disk_size",
                "disk_size",
                _gib(gib * self._workers),
                self._times(gib),
            )
            return
        if gib:
            self.say(
                "max_local_disk_size",
                FieldVerdict.NOT_NEEDED,
                "local_disk gives no disk tier",
            )

    def _times(self, gib: float) -> str:
        if self._workers == 1:
            return "for one worker; if a machine runs more: --workers N"
        return f"{gib:g} GiB for each of {self._workers} workers"

    def _remote(self) -> None:
        url = self.fields.pop("remote_url", None)
        serde = str(self.fields.pop("remote_serde", None) or "naive")
        own_server = bool(url) and is_own_server(str(url))
        codec = self._codec(serde, wanted=bool(url), own_server=own_server)
        if not url:
            return
        try:
            found, used = translated(str(url), self.fields)
        except Untranslated as refusal:
            self.say("remote_url", FieldVerdict.NOT_SUPPORTED, str(refusal))
            return
        if codec:
            found += ("&" if "?" in found else "?") + f"codec={codec}"
        kept = (
            "has a password; use ?password_file=PATH instead"
            if redacted(found) != found
            else ""
        )
        kept = START_SERVER if own_server else kept
        self.map("remote_url", "remote", found, kept)
        for field in used:
            del self.fields[field]
            self.say(field, FieldVerdict.MAPPED, "remote: in the URL")

    def _codec(self, serde: str, wanted: bool, own_server: bool) -> str:
        """Judge the serde; return its codec, or an empty string for the default."""
        if not wanted:
            if "remote_serde" in self._given:
                self.say(
                    "remote_serde",
                    FieldVerdict.NOT_NEEDED,
                    "there is no remote tier",
                )
            return ""
        if serde in ("naive", "torch", "safetensor", "fast"):
            if "remote_serde" in self._given:
                self.say(
                    "remote_serde",
                    FieldVerdict.SAME,
                    "bytes are stored as they are (codec=raw)",
                )
            return ""
        # both are in LMCache's oldest default
        if own_server and serde == "cachegen":
            text = (
                "cachegen loses precision; bytes are stored as they are, and ?codec=zstd in "
                "the URL compresses them"
            )
            self.say("remote_serde", FieldVerdict.NOT_NEEDED, text)
            return ""
        lossy = "loses precision, which needs a verdict of pagoda quality"
        why = lossy if serde in ("cachegen", "kivi") else "is not known"
        text = (
            f"{serde} {why}; write remote_serde: naive, or in the URL of the remote tier "
            "?codec=zstd (lossless) "
            "or ?codec=qzstd (lossy)"
        )
        self.say("remote_serde", FieldVerdict.NOT_SUPPORTED, text)
        return "zstd"


def _left_over(field: str) -> tuple[FieldVerdict, str]:
    """Judge a field that neither the table nor a tier has used."""
    if field in IN_URLS:
        return FieldVerdict.NOT_NEEDED, "there is no remote tier that uses it"
    if field.startswith(lmcache_fields.HISTOGRAM):
        return FieldVerdict.NOT_NEEDED, "metrics have no histograms"
    if field in lmcache_fields.SECRETS:
        return FieldVerdict.ELSEWHERE, lmcache_fields.SECRETS[field]
    if (
        field in table().extra
        or f"{VARIABLES}{field.upper()}" in table().variables
    ):
        return (
            FieldVerdict.NOT_NEEDED,
            "belongs to a part of LMCache that is not used here",
        )
    hint = did_you_mean(field, known_fields()) or "; remove it"
    return FieldVerdict.UNKNOWN, f"not a known field of LMCache's{hint}"


def _extra(extra: object) -> dict[str, object]:
    """Return the fields in extra_config, whose names differ from those of other fields."""
    if isinstance(extra, str):
        try:
            extra = json.loads(extra or "{}")
        except ValueError:
            raise ConfigError("extra_config: not a JSON object") from None
    if not isinstance(extra, dict | None):
        raise ConfigError("extra_config: must be a mapping of names to values")
    return {str(name): value for name, value in (extra or {}).items()}


_PLACES = (
    *(
        "local_cpu",
        "max_local_cpu_size",
        "local_disk",
        "max_local_disk_size",
        "remote_url",
        "remote_serde",
    ),
    *("backend", "local_device", "max_local_cache_size", "extra_config"),
)


def known_fields() -> list[str]:
    """Return every known field except histogram_bucket_..."""
    return sorted(
        {*_PLACES, *lmcache_fields.FIELDS, *lmcache_fields.SECRETS, *IN_URLS}
    )


def _known(field: str) -> bool:
    return field.startswith(lmcache_fields.HISTOGRAM) or field in known_fields()


def _gib(gib: float) -> str | int:
    return f"{gib:g}GiB" if gib else 0


def _comment(text: str) -> str:
    return " ".join(
        "".join(
            character if character.isprintable() else " " for character in text
        ).split()
    )
