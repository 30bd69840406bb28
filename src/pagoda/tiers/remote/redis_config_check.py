"""Find what is wrong with the configuration of a Redis for chunks: one sentence each, with a
command that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pagoda.tiers.remote.redis_ttl import ChunkLives, count_of, settings
from pagoda.tiers.remote.resp import Reply, command

_SAMPLE_NAMES = 20
QUESTIONS = (
    command(b"INFO"),
    command(b"CONFIG", b"GET", b"save"),
    command(b"SCAN", b"0", b"COUNT", b"%d" % _SAMPLE_NAMES),
)
_OWN_SERVER = (
    "start one for chunks: redis-server --port 6380 --save '' --maxmemory-policy "
    "volatile-ttl --maxmemory"
)
# names with any prefix: of chunks, the mark of a pool, a directory of machines
_OURS = re.compile(rb".*:(\d+:([0-9a-f]{64}:\{|runs\Z)|at:\d+:)")
_MOST_SHARE = 0.9  # share of the machine's memory


def warnings(
    replies: Sequence[Reply], lives: ChunkLives, asked_for: bool, db: int
) -> list[str]:
    """Return what is wrong, according to the replies to QUESTIONS, as far as the server answers
    them.

    Args:
        replies: an error is a reply too: managed services and ACL rules forbid some of the
            questions.
        lives: the rule for the lives of chunks in this server.
        asked_for: whether the URL says that the server evicts by life.
        db: the database of the chunks.
    """
    info, saves, names = replies
    said = settings(info)
    return [
        *_of_memory(said, asked_for),
        *_of_disk(said, saves),
        *_of_others(said, names, db),
        *_of_user(lives),
    ]


def _of_memory(said: dict[str, str], asked_for: bool) -> Iterator[str]:
    total = count_of(said, "total_system_memory") or 10_000_000_000
    if said.get("maxmemory") == "0":
        yield (
            "it may take all memory (maxmemory is 0), and holds chunks until their lives end: "
            f"CONFIG SET maxmemory {int(total * _MOST_SHARE)}"
        )
    policy = said.get("maxmemory_policy")
    mend = "CONFIG SET maxmemory-policy volatile-ttl"
    if policy == "noeviction":
        yield f"it refuses new chunks when it is full (maxmemory-policy is noeviction): {mend}"
    elif asked_for and policy not in (None, "volatile-ttl"):
        yield f"it does not evict by life as evict=ttl says (maxmemory-policy is {policy}): {mend}"


def _of_disk(said: dict[str, str], saves: Reply) -> Iterator[str]:
    points = saves[1] if isinstance(saves, list) and len(saves) == 2 else b""
    if points:
        yield (
            "it writes all chunks to a disk and forks to do so, which can double its memory: "
            "CONFIG SET save ''"
        )
    if said.get("aof_enabled") == "1":
        yield "it writes all chunks to a disk (appendonly is yes): CONFIG SET appendonly no"


def _of_others(said: dict[str, str], names: Reply, db: int) -> Iterator[str]:
    by_life = said.get("maxmemory_policy") == "volatile-ttl"
    counted = re.compile(r"keys=(\d{1,19}),expires=(\d{1,19})")
    found = {
        name: counted.match(text)
        for name, text in said.items()
        if re.fullmatch(r"db\d+", name)
    }
    places = [
        f"database {name[2:]}"
        for name, count in found.items()
        if count is not None
        and name != f"db{db}"
        and int(count[2 if by_life else 1])
    ]
    sample = names[1] if isinstance(names, list) and len(names) == 2 else None
    if isinstance(sample, list) and any(
        isinstance(name, bytes) and not _OURS.match(name) for name in sample
    ):
        places.append(f"database {db}")
    if places:
        fate = (
            "those with a life (TTL) are evicted before chunks"
            if by_life
            else "chunks take their memory"
        )
        yield (
            f"it holds keys of others ({', '.join(places)}), and {fate}: {_OWN_SERVER} "
            f"{said.get('maxmemory', '0')}"
        )


def _of_user(lives: ChunkLives) -> Iterator[str]:
    if not lives.extends:
        yield (
            "lives of chunks in use end, because the user may not extend them: ACL SETUSER "
            "USER +pttl +pexpire"
        )
