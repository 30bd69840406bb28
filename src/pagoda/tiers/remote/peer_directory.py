"""Which machines have which chunks. Each machine writes hints, which expire, into a Redis that all
share.

`pagoda serve` announces the chunks of its stores; `PeersClient` reads which neighbours to ask. For
each key and each period of ten minutes, by Redis's clock, there is a set of URLs; the sets of this
period and of the last one are used. Hints are never withdrawn: only the machine itself knows what
it has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Self

from pagoda.base.errors import ConfigError
from pagoda.tiers.remote.redis import RedisConnection, RedisNames
from pagoda.tiers.remote.redis_address import RedisAddress
from pagoda.tiers.remote.resp import NUMBER, Reply, ReplyShape, command

PERIOD_SECONDS = 600  # machines announce each chunk at least once in each period
_POSITIONS = 16  # the number of a prompt's keys that are asked about
# the most machines returned for one key, chosen at random, so that not all callers ask the same
# ones
_MACHINES = 8
_BATCH = 1000  # keys announced in one round trip
_URL = re.compile(
    r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?"
)
# how long Redis's clock is trusted before it is read again: it may be changed, and this machine may
# sleep
_TIME_SECONDS = 60.0
_TIME = ReplyShape(b"*$", items=4, depth=1)
_URLS = ReplyShape(b"*$", 300, items=2 * _MACHINES, depth=1)


def check_machine(url: str) -> str:
    """Return the URL of a machine's server in the form that hints use. ConfigError: it has another
    form.
    """
    if not _URL.fullmatch(url):
        raise ConfigError(
            f"{url}: write the URL at which other machines reach this one: http://HOST:7777"
        )
    return url


class PeerDirectory:
    """The directory in the Redis at `url` (see RedisAddress), under names that begin with
    `<prefix>:at:`.

    Thread-safe, keeps no connection.
    """

    def __init__(self, url: str, *, prefix: str = "pagoda") -> None:
        """Connect to nothing yet. ConfigError: the URL or the prefix cannot be used."""
        self._address = RedisAddress(url)
        self._names = RedisNames(prefix)
        self.address = self._address.text

    def connection(self) -> PeerDirectoryConnection:
        """Return a new connection that is still to be opened."""
        return PeerDirectoryConnection(self._address, self._names)


class PeerDirectoryConnection(RedisConnection):
    """One connection to the directory. For one thread at a time, except `abort`."""

    def open(self, until: float) -> Self:
        """Connect, and read the server's clock. OSError; RefusedError: the user may not read."""
        super().open(until)
        self._ask_for_time(until)
        return self

    def machines(self, keys: Sequence[bytes], until: float) -> list[str]:
        """Return the URLs of the machines that have leading keys, the one with most keys first. One
        round trip.

        Asks about some of the keys; if many machines have a key, returns some of them, others each
        time. OSError;
        RefusedError: the user may not ask.
        """
        step = -(-len(keys) // (_POSITIONS - 1))
        asked = sorted({*range(0, len(keys), step), len(keys) - 1}) * 2
        now = self._period(until)
        names = [
            self._names.at(keys[at], now - (n >= len(asked) // 2))
            for n, at in enumerate(asked)
        ]
        questions = [
            command(b"SRANDMEMBER", name, b"%d" % _MACHINES) for name in names
        ]
        replies = self._execute(questions, until, _URLS)
        reach: dict[str, int] = {}
        for at, urls in zip(asked, replies, strict=True):
            for url in map(_machine, urls if isinstance(urls, list) else []):
                reach[url] = max(at, reach.get(url, 0))
        reach.pop("", None)
        return sorted(reach, key=lambda url: -reach[url])

    def announce(self, keys: Sequence[bytes], url: str, until: float) -> None:
        """Announce that the machine at `url` has these keys. OSError, RefusedError: some may have
        been announced.
        """
        life = b"%d" % (2 * PERIOD_SECONDS)
        for start in range(0, len(keys), _BATCH):
            now = self._period(until)
            names = [
                self._names.at(key, now) for key in keys[start : start + _BATCH]
            ]
            adds = [
                command(b"SADD", name, url.encode())
                + command(b"EXPIRE", name, life)
                for name in names
            ]
            self._send([b"".join(adds)], 2 * len(names), until)
            self._read_replies(2 * len(names), until, NUMBER)

    def local_host(self) -> str:
        """Return this machine's address on the connection, in brackets if it is an IPv6 address."""
        name = self._connected.result().getsockname()
        host = str(name[0]) if isinstance(name, tuple) else "127.0.0.1"
        return f"[{host}]" if ":" in host else host

    def _period(self, until: float) -> int:
        """Return the number of the present period by the server's clock, so that it is the same on
        all machines.
        """
        if time.monotonic() >= self._time_end:
            self._ask_for_time(until)
        return int(self._ahead + time.monotonic()) // PERIOD_SECONDS

    def _ask_for_time(self, until: float) -> None:
        (now,) = self._execute([command(b"TIME")], until, _TIME)
        if (
            not isinstance(now, list)
            or not now
            or not isinstance(now[0], bytes)
            or not now[0].isdigit()
        ):
            raise ConnectionError(
                "the reply to TIME has another form than Redis gives it"
            )
        self._ahead = int(now[0]) - time.monotonic()
        self._time_end = time.monotonic() + _TIME_SECONDS


def _machine(hint: Reply) -> str:
    """Return the URL in a hint; empty if it is not a URL."""
    text = hint.decode("latin-1") if isinstance(hint, bytes) else ""
    return text if _URL.fullmatch(text) else ""
