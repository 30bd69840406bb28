"""How long chunks stay in a Redis. If it evicts by remaining life (`volatile-ttl`), lives also rank
the chunks.

`RedisConnection` gets from here what to send with each use of a chunk. The rank depends on the last
use and, within a chain, on the position: a tail is evicted before its head. A new chunk has a lower
rank than one that was used again. No machine shortens a life that another machine gave.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pagoda.tiers.remote.resp import ErrorReply, Reply, command

LIFE_SECONDS = 7 * 86400.0
_LEAST_SHARE = 1 / 2  # ranks take at most this share of a life
# a life that does not rank is renewed when this share of it is over
_RENEWED_SHARE = 1 / 16
# replies to PTTL
_ABSENT = -2
_ENDLESS = -1
_LEARNED_SHARE = 1 / 128  # the weight of the latest age in the mean
_STAY = 1.25  # a new chunk stays this multiple of the mean age
_OLDEST_SHARE = 0.02  # the share of all ages above `ReuseAges.oldest_ms`
_IN_CLUSTER = ("MOVED", "ASK", "TRYAGAIN")


class ReuseAges:
    """How old chunks of one server are when they are used again: their mean age, and how old the
    oldest are.

    An age is how much of its life a chunk has lost, so it is a place in the order of eviction, and
    the oldest are about to be evicted. For all connections of a client; if two ages arrive at once,
    one may be lost.
    """

    def __init__(self) -> None:
        self.mean_ms = 0.0
        self.oldest_ms = 1.0

    def record(self, age_ms: float) -> None:
        """Learn from one use."""
        self.mean_ms += (age_ms - self.mean_ms) * _LEARNED_SHARE
        self.oldest_ms *= (
            1 + ((age_ms > self.oldest_ms) - _OLDEST_SHARE) * _LEARNED_SHARE
        )
        self.oldest_ms = max(1.0, self.oldest_ms)

    def rank_of_new(self) -> int:
        """Return the rank with which a new chunk is evicted soon after the mean age, unless it is
        used by then.
        """
        return max(0, int(self.oldest_ms - _STAY * self.mean_ms))


class ChunkLives(NamedTuple):
    """The rule for one server. Immutable, except `ages`."""

    life_ms: int
    ages: ReuseAges
    # true: each use extends the life; false: only a use from time to time renews it, and other uses
    # write nothing
    ranks: bool = False
    has_gt: bool = True  # the server has PEXPIRE ... GT (since Redis 7)
    extends: bool = True  # the user may read and extend lives

    @classmethod
    def of_server(
        cls,
        ttl_seconds: float,
        ages: ReuseAges,
        info: Reply,
        remaining: Reply,
        extended: Reply,
        ranks: bool,
    ) -> ChunkLives:
        """Return the rule for a server, by its replies to INFO memory, PTTL and PEXPIRE ... GT of
        no name.

        `ranks`: rank even if the server does not say that it evicts by life.
        """
        policy = settings(info).get("maxmemory_policy")
        may = (
            not isinstance(remaining, ErrorReply) or remaining.code in _IN_CLUSTER
        )
        code = extended.code if isinstance(extended, ErrorReply) else ""
        return cls(
            life_ms=max(1, int(ttl_seconds * 1000)),
            ages=ages,
            ranks=ranks or policy == "volatile-ttl",
            has_gt=code != "ERR",
            extends=may and code in ("", "ERR", *_IN_CLUSTER),
        )

    def life(self, rank: int) -> bytes:
        """Return the life in milliseconds of a chunk that is used now. `rank`: see
        StoreConnection.
        """
        lost = min(rank, int(self.life_ms * _LEAST_SHARE)) if self.ranks else 0
        return b"%d" % (self.life_ms - lost)

    def outlasts(self, life: bytes) -> bytes:
        """Return a life for a short-lived name that is not a chunk, long enough not to be evicted
        before chunks.
        """
        return self.life(0) if self.ranks else life

    def extend(self, name: bytes, rank: int) -> bytes:
        """Return the command that gives a chunk its life, whatever its present life is."""
        return command(b"PEXPIRE", name, self.life(rank))

    def begin(self, name: bytes, rank: int) -> bytes:
        """Return the command that gives a new chunk its life: it has not been used again yet."""
        return self.extend(name, rank + self.ages.rank_of_new())

    def used(self, name: bytes, rank: int) -> list[bytes]:
        """Return the commands to send with each use of a chunk; `learn` returns whether more must
        be sent.
        """
        if not self.extends:
            return []
        asked = command(b"PTTL", name)
        return (
            [asked, command(b"PEXPIRE", name, self.life(rank), b"GT")]
            if self._raises
            else [asked]
        )

    def learn(self, replies: Sequence[Reply], rank: int) -> bool:
        """Learn from the replies to `used`. Return whether `extend` is needed: GT changes no name
        without a life.
        """
        remaining = replies[0] if replies else _ABSENT
        if not isinstance(remaining, int) or remaining == _ABSENT:
            return False
        age_ms = self.life_ms - remaining
        # otherwise another machine with another `ttl` gave the life
        if 0 <= age_ms <= self.life_ms * _LEAST_SHARE:
            self.ages.record(age_ms)
        share = 0.0 if self.ranks else _RENEWED_SHARE
        return remaining == _ENDLESS or (
            not self._raises and remaining < int(self.life(rank)) * (1 - share)
        )

    @property
    def _raises(self) -> bool:
        return self.ranks and self.has_gt


def settings(info: Reply) -> dict[str, str]:
    """Return what a reply to INFO says, by name; nothing if the server refuses it."""
    text = info.decode("ascii", "replace") if isinstance(info, bytes) else ""
    return dict(
        re.findall(r"^(\w{1,64}):([^\r\n]{0,200})\r?$", text, re.MULTILINE)
    )


def count_of(said: dict[str, str], name: str) -> int:
    """Return a number of `settings`; 0 if the server does not say it."""
    text = said.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else 0
