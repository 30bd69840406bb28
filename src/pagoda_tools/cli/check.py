"""`pagoda check`: checks that the numbers of each ledger agree, and that the bytes on the disk are
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda_tools.cli import FAILED, printing
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Configured,
    Directory,
    Wide,
    attached,
    find_stores,
)

if TYPE_CHECKING:
    from pagoda.ledger import ChunkRow, Ledger
    from pagoda.slab.file import FileSlab
    from pagoda_tools.cli.remote_stores import RemoteCheck

_ADVANCE_CHUNKS = 16


@dataclass
class StoreCheck:
    """What was found in one store. `trouble`: what is wrong with it, or why it could not be read;
    or empty.
    """

    directory: Path
    tier: str = ""
    trouble: str = ""
    gauges: dict[str, int] = field(default_factory=dict)
    unreachable: int = 0
    stale_hints: int = 0
    read_chunks: int = 0
    damaged: Sequence[bytes] = ()
    dropped: int = 0
    # `trouble` is about the tables; otherwise the stored chunks may be right
    corrupt: bool = False

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.is_damaged:
            return "DAMAGED"
        if self.trouble:
            return "NOT OPENED"
        return "being rebuilt" if self.gauges["unscanned"] else "ok"

    @property
    def is_damaged(self) -> bool:
        """Whether tables or chunks are wrong, not only out of reach."""
        return self.corrupt or bool(self.damaged)

    @property
    def ok(self) -> bool:
        """Whether the store is right. Unreachable chunks and stale hints do not matter: they are
        removed in time.
        """
        return not self.trouble and not self.damaged


def check(
    directory: Directory = None,
    read: Annotated[bool, Option("--read")] = False,
    drop: Annotated[bool, Option("--drop")] = False,
    wide: Wide = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Check that the ledgers are consistent and, with --read, that the bytes on the disk are the
    stored ones.

    Remote tiers must answer and be readable; their bytes are verified at every read.

    Args:
        read: Read every chunk on the disk and verify its bytes.
        drop: With --read: remove damaged chunks.
    """
    from pagoda_tools.cli import UsageError
    from pagoda_tools.cli.remote_stores import exit_code, pinged, remotes_of

    if drop and not read:
        raise UsageError("--drop: damage is found only by reading; add --read")
    with printing.progress(as_json) as bars:
        verdicts = []
        for store in find_stores(directory, config):
            task = bars.add_task(f"checking {store}", total=None)
            verdicts.append(
                _judged(store, read, drop, partial(bars.update, task))
            )
            bars.update(task, visible=False)
    remotes = pinged(remotes_of(directory, config))
    named = Configured(directory, config)
    # damage is a failure wherever it is; a store that cannot be opened may have been given up
    wrong = [
        verdict
        for verdict in verdicts
        if not verdict.ok
        and (verdict.is_damaged or named.names(verdict.directory))
    ]
    silent = [
        asked for asked in remotes if asked.trouble and named.names(asked.address)
    ]
    ok = not wrong and not silent
    if as_json:
        stores = [{"ok": verdict.ok, **asdict(verdict)} for verdict in verdicts]
        places = [one.directory for one in verdicts if not one.ok]
        silent_places = [one.address for one in remotes if one.trouble]
        printing.print_json(
            {
                "ok": ok,
                "stores": stores,
                "remotes": [remote._asdict() for remote in remotes],
                "unconfigured": named.unnamed([*places, *silent_places]),
            }
        )
    else:
        _print(verdicts, wide, named)
        _print_remotes(remotes, named)
    if wrong:
        return FAILED
    return exit_code(named, [one.address for one in silent])


def _judged(
    store: Path, read: bool, drop: bool, show: Callable[..., None]
) -> StoreCheck:
    """Check one store. What is wrong with it is part of the verdict."""
    from pagoda.base.errors import LedgerCorrupt, PagodaError
    from pagoda.base.metrics import Reason
    from pagoda.ledger import admin

    verdict = StoreCheck(store)
    try:
        with attached(store) as ledger:
            verdict.tier = ledger.tier
            found = admin.check(ledger)
            verdict.gauges = found.gauges
            verdict.unreachable = found.unreachable
            verdict.stale_hints = found.stale_hints
            if read and ledger.kind == "file":
                verdict.read_chunks, damaged = _read_all(ledger, show)
                verdict.damaged = [row.key for row in damaged]
                for row in damaged if drop else ():
                    removed = ledger.remove_exact(
                        row.key, row.slot, row.generation, Reason.FAILED_CHECK
                    )
                    verdict.dropped += removed
    except PagodaError as trouble:
        verdict.trouble = str(trouble)
        verdict.corrupt = isinstance(trouble, LedgerCorrupt)
    return verdict


def _read_all(
    ledger: Ledger, show: Callable[..., None]
) -> tuple[int, list[ChunkRow]]:
    """Verify each chunk that is not moved while it is read; return their number and the damaged
    ones.
    """
    from pagoda.ledger import admin
    from pagoda.slab.file import FileSlab

    total = admin.gauges(ledger)["ready"]
    read = 0
    damaged = []
    with closing(
        ledger.open_slab(
            lambda file: FileSlab(file, ledger.slots, ledger.slot_bytes)
        )
    ) as slab:
        for row, sound in _verified(ledger, slab):
            read += 1
            if not sound:
                damaged.append(row)
            if read % _ADVANCE_CHUNKS == 0:
                show(completed=read, total=max(total, read))
    return read, damaged


def _verified(ledger: Ledger, slab: FileSlab) -> Iterator[tuple[ChunkRow, bool]]:
    import numpy as np

    from pagoda.codec import HEADER_BYTES, Expected, verify
    from pagoda.ledger import admin
    from pagoda.slab.file import aligned

    room = aligned(ledger.slot_bytes)
    page = room[:HEADER_BYTES]
    payload = room[HEADER_BYTES:]
    for row in admin.list_chunks(ledger):
        expected = Expected(
            store_id=ledger.store_id,
            slot=row.slot,
            namespace=row.namespace_root,
            key=row.key,
            position=row.position,
            sequence=row.generation,
        )
        try:
            slab.read(row.slot, [room])
            sound = verify(page, payload, expected) is None
        except OSError:
            sound = False
        # if the slot got another chunk meanwhile, the bytes prove nothing
        if ledger.still_valid(
            np.array([row.slot]), np.array([row.generation], np.uint64)
        )[0]:
            yield row, sound


def _print(verdicts: list[StoreCheck], wide: bool, named: Configured) -> None:
    if not verdicts:
        printing.note(printing.NOTHING_STORED)
        return
    rows = [
        {
            "tier": verdict.tier or "?",
            "verdict": verdict.word,
            "chunks": verdict.gauges.get("ready", 0),
            "read": verdict.read_chunks,
            "damaged": len(verdict.damaged),
            "unreachable": verdict.unreachable,
            "stale hints": verdict.stale_hints,
            "directory": verdict.directory,
        }
        for verdict in verdicts
    ]
    printing.print_dicts(
        "", rows, without=() if wide else ("unreachable", "stale hints")
    )
    for verdict in verdicts:
        text = f"{verdict.directory}: {verdict.trouble}"
        if verdict.is_damaged and verdict.trouble:
            printing.note(text)
        elif verdict.trouble:
            named.note(verdict.directory, text)
        if unscanned := verdict.gauges.get("unscanned"):
            who = "by the next process that has the tier open"
            printing.note(
                f"{verdict.directory}: {unscanned:,} slots are still to be scanned, {who}"
            )
        if verdict.damaged:
            keys = ", ".join(key.hex()[:12] for key in verdict.damaged[:8])
            kept = " (they are misses; --drop removes them)"
            done = f"; {verdict.dropped} removed" if verdict.dropped else kept
            printing.note(f"{verdict.directory}: damaged chunks {keys}{done}")


def _print_remotes(remotes: list[RemoteCheck], named: Configured) -> None:
    rows = [(asked.tier, asked.verdict, asked.address) for asked in remotes]
    if rows:
        printing.print_table("remote tiers", ("tier", "verdict", "address"), rows)
    for asked in remotes:
        if asked.trouble:
            named.note(asked.address, asked.trouble)
        for text in asked.warnings:
            printing.note(text)
        if asked.nodes:
            printing.note(
                f"{asked.tier}: all machines must have the same nodes: {asked.nodes}"
            )
