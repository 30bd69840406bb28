"""How much host memory a `CachedModel` may take if nobody wrote a size: not in its arguments, the
environment or a configuration file. It is what a laptop can spare.

`cached_model` calls it. It reads what the directory of the host tier holds, and changes nothing.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import ClassVar

from pagoda.base.file_systems import nearest
from pagoda.base.log import guarded_logger
from pagoda.base.store_place import free_bytes, free_memory_bytes
from pagoda.config import Config
from pagoda.config.sizes import auto_bytes, format_size
from pagoda.layout import KVLayout
from pagoda.ledger.root_usage import holdings, root_limit

_log = guarded_logger("pagoda.connectors")

MOST_BYTES = 1 << 30
FREE_SHARE = 8
"""An eighth of what is free."""
_MIB = 1 << 20
_FEW_ENDINGS = 8


class UnwrittenSize(Config):
    """Options whose `host_size` is "auto" because nobody wrote one."""

    auto_bound: ClassVar[str] = (
        "without a size, a CachedModel takes at most 1 GiB and an eighth of what is free: free "
        "some memory"
    )

    @property
    def host_bytes(self) -> int:
        """The most bytes of the host tier: 1 GiB, an eighth of what is free now, and what "auto" is
        elsewhere, whichever is least; but never less than its directory holds already, or may hold
        for another process that has it open.
        """
        if not self.host_shared:
            free = free_memory_bytes()
            return _whole(min(MOST_BYTES, free // FREE_SHARE, auto_bytes(None)))
        root = Path(self.host_path)
        held, limit = _held_and_limit(root)
        free = free_bytes(nearest(root), in_memory=True)
        # what it holds is not free, and was taken before: a start neither counts it as another
        # program's nor gives it away
        spare = min(MOST_BYTES, (free + held) // FREE_SHARE, auto_bytes(root))
        return max(_whole(spare), held, limit)


def _held_and_limit(root: Path) -> tuple[int, int]:
    """Return what the stores there hold, and may hold for those who have them open; 0 if the
    directory is not there or cannot be read, which the opening will say.
    """
    try:
        every = holdings(root)
    except OSError:
        return 0, 0
    return sum(one.nbytes for one in every), root_limit(every) or 0


def _whole(nbytes: int) -> int:
    return nbytes // _MIB * _MIB


def with_unwritten_size(config: Config) -> Config:
    """Return the same options for a host tier whose size nobody wrote. Pure."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    return UnwrittenSize(**values)


def tell(config: Config, layout: KVLayout) -> None:
    """Log in one line what is taken, for how long, and what to write for another size, if nobody
    wrote one.
    """
    if not isinstance(config, UnwrittenSize):
        return
    size_bytes = config.host_bytes
    tokens = layout.slots_in(size_bytes) * layout.chunk_tokens
    if not tokens:
        return  # the cache says so when it opens
    where = (
        f"in {config.host_path} until `pagoda remove`"
        if config.host_shared
        else "of this process"
    )
    below = "" if config.disk_bytes or config.remote else " and on no disk"
    _log.warning(
        "KV is kept in host memory, up to %s (%s tokens), %s%s; write host_size=, disk_path= and "
        "disk_size= for other sizes",
        format_size(size_bytes),
        f"{tokens:,}",
        where,
        below,
    )


def tell_room_for_endings(
    config: Config, layout: KVLayout, ending_bytes: int
) -> None:
    """Log in one line that the tiers of this machine have room for few endings of a model, if so:
    prompts would hardly ever hit, and nobody would know why.
    """
    size_bytes = config.host_bytes + config.disk_bytes
    slots = layout.slots_in(size_bytes)
    parts = -(-ending_bytes // layout.chunk_bytes)
    if slots >= _FEW_ENDINGS * parts:
        return
    _log.warning(
        "there is room for %d endings of this model, and a prompt keeps two or three: one takes "
        "up to %s of %s; write a larger host_size or disk_size, or larger chunk_tokens",
        slots // parts,
        format_size(parts * layout.slot_bytes),
        format_size(size_bytes),
    )
