"""The URLs of remote tiers: which are valid, which parameters are ours, and how they are shown
without secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote

from pagoda.base.errors import ConfigError
from pagoda.base.urls import (
    MOONCAKE,
    OBJECTS,
    REDIS,
    REDIS_SCHEMES,
    SCHEMES,
    TLS_OPTIONS,
    WEBDAV,
    RemoteUrl,
    check_prefix,
    place_of,
)
from pagoda.config.did_you_mean import did_you_mean
from pagoda.config.expand_home import expanded
from pagoda.config.sizes import AUTO, parse_size

if TYPE_CHECKING:
    from pagoda.tiers.remote.store_client import StoreClient

PAGODA = "pagoda"
_MEANT = {  # other names of these schemes
    "valkey": "redis",
    "valkeys": "rediss",
    "redis-sentinel": "redis+sentinel",
    "redis-cluster": "redis+cluster",
    "redis+unix": "unix",
    "redis+socket": "unix",
    "mooncakestore": "mooncake",
    "gcs": "gs",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "s3a": "s3",
    "minio": "s3",
    "dav": "http",
    "davs": "https",
    "webdav": "http",
}
_OF_REDIS = ("prefix", "ttl", "evict", "write_policy")
_OURS = (
    "name",
    *_OF_REDIS,
    "codec",
    "connections",
    "deadline",
    "look",
    "queue_chunks",
    "password_file",
)
_NOT_OF_MOONCAKE = ("ttl", "evict", "password_file", "write_policy")
_OF_MOONCAKE = ("segment", "protocol")
_WRITE_POLICIES = ("write_through", "second_sight")
_OF_PAGODA = ("proof",)
_OF_PEERS = ("password_file", "server", "dns", *_OF_PAGODA)
# parameter of an object store: the URL of a Redis that knows its chunks
_INDEX = "index"
# also the default for the marks of an index, since objects do not expire either
_MOST_TTL_SECONDS = 10 * 365 * 86400.0
_OF_INDEX = ("prefix", "ttl", "password_file")
_OF_LOOKUP = ("prefix", "password_file")
MOST_PEERS = 8
"""How many neighbours are asked at once; if there are more, `lookup` decides which."""
# names of tiers that are not remote, and the name for all tiers
_RESERVED = "all", "device", "disk", "host", "peers"
# codecs after which KV is approximate; `pagoda.codec` has them
LOSSY = ("q8", "q4", "qzstd")
_CODECS = ("raw", "zstd", *LOSSY)

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_SPAN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|min|m|h|d|)")
_UNITS = {
    "ms": 1e-3,
    "s": 1.0,
    "": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
# names of parameters that may have a secret, in whatever spelling
_SECRET = re.compile(
    r"key|secret|token|pass|pwd|\bpw\b|sas|cred|sig|auth(?!ority)|bearer|jwt|cookie",
    re.IGNORECASE,
)
_OF_SENTINELS = ("sentinel_username", "sentinel_password_file")
_NO_SECRET = (  # these parameters only say where a secret is
    "password_file",
    "sentinel_password_file",
    "credential_provider",
    "ssl_keyfile",
)
_NEXT = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*:/)|[\s,]+$")
_USER = re.compile(r"[A-Za-z0-9_.%-]*")
# a host, with or without a port; otherwise the text is only a password
_HOST = re.compile(r"(\[|[^:?,]*(:\d*)?(,[^:?,]*(:\d*)?)*([/?]|$))")
_PARAMETER = re.compile(r"([?&;#][^=&?;#]*)=([^&;#]*)")
_MASK = "***"
_SHORT = 3  # so short a value is no secret, and occurs by chance


@dataclass(frozen=True)
class RemoteSpec:
    """The specification of one remote tier. Immutable; its repr shows no secret."""

    url: str = field(repr=False)
    """The URL for the store: without our parameters, with its secrets."""
    redacted: str
    """The whole URL as it may be shown."""
    kind: str
    """"redis", "objects", "pagoda" (another machine's `pagoda serve`) or "mooncake"."""
    name: str
    prefix: str = "pagoda"
    ttl_seconds: float = 7 * 86400.0
    evict: str = ""
    """"ttl": chunks are ranked by their remaining life, even if the Redis does not say that it
    evicts by that.
    """
    write_policy: str = _WRITE_POLICIES[0]
    """Which chunks are written: "write_through", all; "second_sight", those asked for twice, on any
    machine.
    """
    codec: str = "raw"
    connections: int = 4
    deadline_seconds: float = 1.0
    look_seconds: float = 0.05
    queue_chunks: int = 64
    options: Mapping[str, str] = field(
        default_factory=dict, repr=False, hash=False
    )
    """Parameters for the object store's own client; for a neighbour "dns" and "proof"; for a
    Mooncake pool "segment", in bytes."""
    password_file: str = ""
    """The file with the password, read when the tier is opened; empty: the password is in the URL,
    or there is none.
    """

    @property
    def lacks_secret(self) -> bool:
        """Whether this was made from a URL with masked secrets, as the register of tiers keeps
        it.
        """
        return _MASK in self.redacted and _MASK in (
            self.url + "".join(self.options.values())
        )

    def engine(self) -> StoreClient:
        """Return the engine behind the URL; reads `password_file`, connects to nothing.

        Raises:
            ConfigError: the password cannot be read, or the engine refuses the URL.
            MissingLibraryError: the engine's library is not installed.
        """
        from pagoda.tiers.remote.open_client import open_client

        options = dict(self.options)
        index = options.pop(_INDEX, None)
        client = open_client(
            self.kind,
            self.url,
            name=self.name,
            prefix=self.prefix,
            ttl_seconds=self.ttl_seconds,
            ranks=self.evict == "ttl",
            second_sight=self.write_policy == "second_sight",
            options=options,
            password_file=self.password_file,
            look_seconds=self.look_seconds,
        )
        if index is None:
            return client
        from pagoda.tiers.remote.indexed_store import (
            IndexedStoreClient,
            index_prefix,
        )

        spec = _parsed(index)
        marks = replace(
            spec,
            prefix=index_prefix(spec.prefix, client.address),
            look_seconds=self.look_seconds,
            ttl_seconds=spec.ttl_seconds
            if "ttl=" in index.partition("?")[2]
            else _MOST_TTL_SECONDS,
        )
        return IndexedStoreClient(client, marks.engine())

    def url_with_password(self) -> str:
        """Return `url` with the content of `password_file`. ConfigError: it cannot be read."""
        from pagoda.tiers.remote.open_client import url_with_password

        return url_with_password(self.url, self.password_file)


def parse(url: str) -> RemoteSpec:
    """Return the specification in the URL of a remote tier. Reads no file and asks no server.

    Raises:
        ConfigError: the URL is invalid; the message names the option and the URL (without secrets),
            and what to do.
    """
    return _of_option("remote", _parsed, url)


def _of_option(
    option: str, read: Callable[[str], RemoteSpec], url: str
) -> RemoteSpec:
    try:
        return read(url)
    except ValueError as trouble:
        raise ConfigError(
            f"{option} = {redacted(url)!r}: {_without_secrets_of(url, str(trouble))}"
        ) from None


def _without_secrets_of(url: str, text: str) -> str:
    """Return a text about a URL, which may repeat the value of a parameter, without the values that
    may be secret.
    """
    for parameter in _PARAMETER.finditer(url):
        if _without_secret(parameter) != parameter[0]:
            for value in (parameter[2], unquote(parameter[2])):
                text = text.replace(value, _MASK) if len(value) > _SHORT else text
    return text


def split(text: str) -> tuple[str, ...]:
    """Return the URLs of a comma separated text; a comma inside a URL (in a password) does not
    split it.
    """
    return tuple(part for part in _NEXT.split(text.strip()) if part)


def _urls_of(value: object, needed: str) -> tuple[str, ...]:
    """Return the URLs of a text or a list. Raises ConfigError with `needed` for anything else."""
    if isinstance(value, str):
        value = split(value)
    if not isinstance(value, list | tuple) or not all(
        isinstance(url, str) for url in value
    ):
        raise ConfigError(needed)
    return tuple(url.strip() for url in value if url.strip())


def tuple_of(value: object) -> tuple[str, ...]:
    """Return the value of the option `remote`: checked URLs, top down.

    Raises:
        ConfigError: a URL is invalid, or two tiers have the same name.
    """
    needed = "remote: a URL such as 'redis://host:6379/0' is needed, or a list of them, top down"
    urls = _urls_of(value, needed)
    seen: set[str] = set()
    for url in urls:
        name = parse(url).name
        if name in seen:
            raise ConfigError(
                f"remote = {redacted(url)!r}: a tier above is called {name!r} too; "
                f"give one of them another name with ?name=..."
            )
        seen.add(name)
    return urls


def parse_peer(url: str) -> RemoteSpec:
    """Return the specification in the URL of a neighbour. Reads no file and asks no server.

    Raises:
        ConfigError: the URL is invalid; the message names the option and the URL (without secrets),
            and what to do.
    """
    return _of_option("peers", _parsed_peer, url)


def peers_of(value: object) -> tuple[str, ...]:
    """Return the value of the option `peers`: checked URLs.

    Raises:
        ConfigError: a URL is invalid or given twice.
    """
    urls = _urls_of(
        value,
        "peers: a list of URLs of pagoda serve is needed, such as ['http://a:7777']",
    )
    seen: set[str] = set()
    for url in urls:
        place = redacted(parse_peer(url).url)
        if place in seen:
            raise ConfigError(
                f"peers = {redacted(url)!r}: given twice; remove one of them"
            )
        seen.add(place)
    return urls


def parse_lookup(url: str) -> RemoteSpec:
    """Return the specification in the URL of the option `lookup`. Reads no file and asks no server.

    Raises:
        ConfigError: the URL is invalid; the message names the option and the URL (without secrets),
            and what to do.
    """
    return _of_option("lookup", _parsed_lookup, url)


def redacted(url: str) -> str:
    """Return any text that was meant as a URL, with everything masked that may be secret, and
    rather too much.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme = ""
        rest = url
    credentials, at, place = rest.rpartition("@")
    if at:
        user, colon, _ = credentials.partition(":")
        if colon:
            rest = f"{user}:{_MASK}@{place}"
        elif not _USER.fullmatch(user):
            rest = f"{_MASK}@{place}"
    elif not _HOST.match(rest):
        rest = rest.partition(":")[0] + f":{_MASK}"
    return scheme + mark + _PARAMETER.sub(_without_secret, rest)


def _without_secret(parameter: re.Match[str]) -> str:
    name = parameter[1]
    value = parameter[2]
    called = unquote(name[1:])
    inner = unquote(value)  # the value may itself be a URL with parameters
    secret = (_SECRET.search(called) and called not in _NO_SECRET) or "@" in inner
    if "://" in inner:
        secret = secret or redacted(inner) != inner
    return f"{name}={_MASK}" if secret else parameter[0]


def _parsed(url: str) -> RemoteSpec:
    scheme = _scheme(url)
    if "#" in url:
        raise ValueError(
            "a # has no meaning here; write %23 where it is part of a password"
        )
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError(
            "a URL has no spaces and no letters beyond ASCII; write %20 and so on"
        )
    remote = RemoteUrl.of(url)
    parts = remote.parts
    if "@" in parts.path + parts.query:
        raise ValueError(
            "an @ stands behind the password only; write %40 for others, and %2F %3F for / ? in it"
        )
    kind, name, example = SCHEMES[scheme]
    _check_hosts(remote, f"write it as {example}")
    given = _parameters(parts.query)
    if name == WEBDAV and "server" in given:
        kind = PAGODA
        name = PAGODA
        _check_server(given.pop("server"), parts)
    ours = {name: given.pop(name) for name in _OURS if name in given}
    if kind == REDIS:
        _check_redis(scheme, given)
        if "credential_provider" in given and (
            "@" in parts.netloc or "password_file" in ours
        ):
            raise ValueError(
                "credential_provider: says user and password; leave out those of the URL and "
                "password_file"
            )
    elif kind == PAGODA:
        _check_pagoda(ours, given)
    elif kind == MOONCAKE:
        _check_mooncake(parts, ours, given)
    else:
        _check_objects(scheme, ours)
        _check_index(given.get(_INDEX, _MASK))
    check_prefix(prefix := ours.get("prefix", RemoteSpec.prefix))
    kept = "&".join(
        part for part in parts.query.split("&") if part.partition("=")[0] in given
    )
    place = f"{scheme}://{parts.netloc}{parts.path}"
    return RemoteSpec(
        url=f"{place}?{kept}" if kind == REDIS and kept else place,
        redacted=redacted(url),
        kind=kind,
        name=_named(ours.get("name", name)),
        prefix=prefix,
        ttl_seconds=_seconds("ttl", ours, "7d", 1.0, _MOST_TTL_SECONDS),
        evict=_evict(ours.get("evict", "")),
        write_policy=_word(
            "write_policy", ours, _WRITE_POLICIES, " or ".join(_WRITE_POLICIES)
        ),
        codec=_word("codec", ours, _CODECS, f"one of {', '.join(_CODECS)}"),
        connections=_count("connections", ours, "4", 64),
        deadline_seconds=_seconds("deadline", ours, "1", 0.001, 3600.0),
        look_seconds=_seconds("look", ours, _look(kind), 0.0001, 3600.0),
        queue_chunks=_count("queue_chunks", ours, "64", 2**20),
        options=given if kind in (OBJECTS, MOONCAKE, PAGODA) else {},
        password_file=_password_file(scheme, parts, ours.get("password_file")),
    )


def _scheme(url: str) -> str:
    scheme, mark, _ = url.partition("://")
    known = ", ".join(f"{name}://" for name in SCHEMES)
    if not mark:
        raise ValueError(
            f"no scheme; write a URL such as {SCHEMES['redis'].example} (known are {known})"
        )
    if scheme == "lm":
        raise ValueError(
            "lm:// is LMCache's own server; run pagoda serve there and write "
            "http://host:7777?server=pagoda&password_file=TOKENFILE"
        )
    if scheme.lower() not in SCHEMES:
        meant = _MEANT.get(scheme.lower())
        hint = (
            f"; did you mean {meant}?" if meant else did_you_mean(scheme, SCHEMES)
        )
        raise ValueError(f"unknown store {scheme}://{hint} (known are {known})")
    return scheme.lower()


def _look(kind: str) -> str:
    """Return a few round trips on the network where such a store usually is."""
    return "300ms" if kind == OBJECTS else "50ms"


def _check_hosts(remote: RemoteUrl, shape: str) -> None:
    """Raise ValueError if what is between the scheme and the parameters of a URL is not in the form
    that the store needs.
    """
    parts = remote.parts
    if not remote.layout:
        _check_host(remote.scheme, parts, shape)
        return
    if re.search("[@,].", remote.login):  # it ends with one @
        raise ValueError(
            "one user and password for all hosts, before the first, with %40 and %2C for @ "
            f"and ,; {shape}"
        )
    if remote.layout == "sentinel":
        found = re.fullmatch(r"/[A-Za-z0-9_.-]{1,64}(/\d{1,9})?", parts.path)
        if found is None:
            raise ValueError(
                f"after the hosts there is the name of the master's service; {shape}"
            )
        parts = parts._replace(path=found[1] or "")
    if remote.layout == "cluster" and (
        parts.path.strip("/0") or "db=" in parts.query
    ):
        raise ValueError(f"a cluster has no numbers of databases; {shape}")
    for host in remote.hosts:
        place = parts._replace(netloc=remote.login + host)
        _check_host(remote.scheme, place, shape)
    default_port = 26379 if remote.layout == "sentinel" else 6379
    places = {place_of(host, default_port) for host in remote.hosts}
    if len(places) < len(remote.hosts):
        raise ValueError(f"a host is given twice; {shape}")


def _check_host(scheme: str, parts: SplitResult, shape: str) -> None:
    """Raise ValueError if a URL of one host is not in the form that the store needs."""
    if scheme == "unix":
        if parts.hostname or not parts.path.strip("/"):
            raise ValueError(
                f"the path of a socket is needed, with three slashes; {shape}"
            )
        return
    try:
        port = parts.port
    except ValueError:
        raise ValueError(
            f"the port is no number from 1 to 65535; {shape}, and : / ? @ in a password as %3A "
            "%2F %3F %40"
        ) from None
    if not parts.hostname or port == 0:
        raise ValueError(
            f"{'a port' if port == 0 else 'a host or bucket'} is needed; {shape}"
        )
    kind, store, _ = SCHEMES[scheme]
    if kind == REDIS and not re.fullmatch(r"/?|/\d{1,9}", parts.path):
        raise ValueError(
            f"after the host there is only the number of a database; {shape}"
        )
    in_bucket = kind == OBJECTS and store != WEBDAV
    if in_bucket and (port is not None or "@" in parts.netloc):
        raise ValueError(
            f"only the bucket and a prefix; {shape}, and ?endpoint=http://host:port for a server"
        )


def _parameters(query: str) -> dict[str, str]:
    """Return the parameters by name; a plus sign stays a plus sign, because keys of stores contain
    it.
    """
    found: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"{name}: a value is needed, as in {name}=...")
        if name in found:
            raise ValueError(f"{name}: given twice")
        found[name] = unquote(value)
    return found


def _check_redis(scheme: str, given: Mapping[str, str]) -> None:
    is_encrypted = scheme.startswith("rediss")
    of_sentinels = _OF_SENTINELS if scheme.endswith("+sentinel") else ()
    known = (
        *_OURS,
        "db",
        "credential_provider",
        *of_sentinels,
        *(TLS_OPTIONS if is_encrypted else ()),
    )
    for name in given:
        if name in TLS_OPTIONS and not is_encrypted:
            kind = scheme.partition("redis")[2]
            raise ValueError(
                f"{name}: is for encrypted connections; write rediss{kind}:// for one"
            )
        _refuse_unknown([name], known)
        if name == "credential_provider" and not re.fullmatch(
            r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", given[name]
        ):
            raise ValueError(
                f"credential_provider={given[name]}: write package.module:Class"
            )
        if name == "db" and not re.fullmatch(r"\d{1,9}", given[name]):
            raise ValueError(
                f"db={given[name]}: must be the number of a database"
            )


def _check_objects(scheme: str, ours: Mapping[str, str]) -> None:
    why = "an object store deletes by rules of its own (lifecycle); set one there instead"
    _refuse_ours(ours, ("ttl", "evict"), why)
    if (
        ours.get("write_policy", RemoteSpec.write_policy)
        != RemoteSpec.write_policy
    ):
        raise ValueError(
            "write_policy: only a Redis can remember what was asked for once; leave it out here"
        )
    if "password_file" in ours and SCHEMES[scheme].store != WEBDAV:
        raise ValueError(
            "password_file: is for redis and http; keys of an object store come from the "
            "environment variables "
            "of its client, such as AWS_SECRET_ACCESS_KEY"
        )


def _check_index(index: str) -> None:
    """Raise ValueError unless this is the URL of a Redis, or a masked one."""
    if index == _MASK:
        return
    scheme = index.partition("://")[0].lower()
    if scheme not in SCHEMES or SCHEMES[scheme].kind != REDIS:
        raise ValueError(
            "index: the URL of a Redis is needed; write index=redis://host:6379/0"
        )
    _parsed(index)
    for name in _parameters(index.partition("?")[2]):
        if name in _OURS and name not in _OF_INDEX:
            raise ValueError(f"index: {name} means nothing there; remove it")


def _check_server(server: str, parts: SplitResult) -> None:
    """Raise ValueError if this is not the URL of a pagoda serve."""
    if server != PAGODA:
        raise ValueError(
            f"server={server}: only server=pagoda is known; leave it out for a WebDAV server"
        )
    if parts.path not in ("", "/"):
        raise ValueError(
            f"{parts.path}: a pagoda serve has no path; write http://host:7777?server=pagoda"
        )
    if parts.username:
        raise ValueError(
            "a pagoda serve has a token and no user; write ?password_file=TOKENFILE"
        )


def _check_pagoda(ours: Mapping[str, str], given: Mapping[str, str]) -> None:
    _refuse_ours(ours, _OF_REDIS, "a pagoda serve has none; remove it")
    _refuse_unknown(
        given, [*(name for name in _OURS if name not in _OF_REDIS), *_OF_PAGODA]
    )
    if given.get("proof", "off") != "off":
        raise ValueError(
            f"proof={given['proof']}: only proof=off is known: the token itself is sent"
        )


def _check_mooncake(
    parts: SplitResult, ours: Mapping[str, str], given: dict[str, str]
) -> None:
    """Raise ValueError for parts that a Mooncake URL cannot have; replace the size of the segment
    by its bytes.
    """
    if parts.path.strip("/") or parts.username is not None:
        raise ValueError(
            "a Mooncake pool has neither path nor user; write mooncake://host:50051"
        )
    _refuse_ours(ours, _NOT_OF_MOONCAKE, "a Mooncake pool has none; remove it")
    _refuse_unknown(
        given,
        [
            *(name for name in _OURS if name not in _NOT_OF_MOONCAKE),
            *_OF_MOONCAKE,
        ],
    )
    if "segment" in given:
        size = parse_size(given["segment"])
        if size == AUTO:
            raise ValueError("segment=auto: write a size, such as 64GiB")
        given["segment"] = str(size)
    if given.get("protocol", "tcp") not in ("tcp", "rdma"):
        raise ValueError(f"protocol={given['protocol']}: must be tcp or rdma")


def _parsed_peer(url: str) -> RemoteSpec:
    """Return the specification in the URL of a neighbour. Raises ValueError."""
    scheme = url.partition("://")[0].lower()
    query = url.partition("?")[2]
    if scheme not in SCHEMES or SCHEMES[scheme].store != WEBDAV:
        raise ValueError("a neighbour is a pagoda serve; write http://host:7777")
    given = _parameters(query)
    _refuse_unknown(given, _OF_PEERS)
    if (dns := given.get("dns")) not in (None, "all"):
        raise ValueError(
            f"dns={dns}: only dns=all is known: one neighbour at each address of the host"
        )
    if dns and scheme == "https":
        raise ValueError(
            "dns=all: a certificate is for a name and not for its addresses; write http://"
        )
    others = [
        part
        for part in query.split("&")
        if part and part.partition("=")[0] not in ("dns", "server")
    ]
    place = url.partition("?")[0]
    spec = _parsed(f"{place}?{'&'.join([*others, f'server={PAGODA}'])}")
    options = {**spec.options, "dns": dns} if dns else spec.options
    return replace(spec, name="peers", redacted=redacted(url), options=options)


def _parsed_lookup(url: str) -> RemoteSpec:
    if url.partition("://")[0].lower() not in REDIS_SCHEMES:
        raise ValueError("machines meet in a Redis; write redis://host:6379/0")
    spec = _parsed(url)
    given = _parameters(url.partition("?")[2])
    for name in given:
        if name in _OURS and name not in _OF_LOOKUP:
            raise ValueError(f"{name}: means nothing here; remove it")
    return replace(spec, name="lookup")


def _refuse_ours(ours: Mapping[str, str], names: Iterable[str], why: str) -> None:
    for name in names:
        if name in ours:
            raise ValueError(f"{name}: {why}")


def _refuse_unknown(given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(
                f"{name}: no such parameter{hint} (known are {', '.join(known)})"
            )


def _named(name: str) -> str:
    if name in _RESERVED:
        raise ValueError(
            f"name={name}: is the name of other tiers ({', '.join(_RESERVED)}); choose another"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name={name}: small letters, digits, - and _, at most 32, a letter first"
        )
    return name


def _word(
    name: str, ours: Mapping[str, str], known: Sequence[str], needed: str
) -> str:
    """Return a parameter that is a known word, by default the first. Raises ValueError."""
    if (word := ours.get(name, known[0])) not in known:
        raise ValueError(
            f"{name}={word}: must be {needed}{did_you_mean(word, known)}"
        )
    return word


def _evict(evict: str) -> str:
    if evict not in ("", "ttl"):
        raise ValueError(
            f"evict={evict}: only evict=ttl is known: Redis evicts what has the shortest life left"
        )
    return evict


def _count(name: str, ours: Mapping[str, str], default: str, most: int) -> int:
    """Return a parameter that is a whole number. Raises ValueError."""
    text = ours.get(name, default)
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= most:
        raise ValueError(
            f"{name}={text}: must be a whole number from 1 to {most}"
        )
    return int(text)


def _seconds(
    name: str, ours: Mapping[str, str], default: str, least: float, most: float
) -> float:
    """Return a parameter that is a time span. Raises ValueError."""
    text = ours.get(name, default)
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{name}={text}: write a time as 500ms, 30s, 10min, 1h or 7d"
        )
    seconds = float(match[1]) * _UNITS[match[2]]
    if not least <= seconds <= most:
        raise ValueError(
            f"{name}={text}: must be from {least:g} to {most:g} seconds"
        )
    return seconds


def _password_file(scheme: str, parts: SplitResult, file: str | None) -> str:
    if file is None:
        return ""
    if parts.password is not None:
        raise ValueError(
            "password_file: there is a password in the URL too; leave one of them out"
        )
    return os.path.abspath(expanded(file))
