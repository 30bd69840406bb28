"""Race chunks to and from a Mooncake pool: our link and the whole tier against its library here,
without copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from ground import Plan
from harness import MIB, Figure, say
from limits import Bytes
from remote_ground import (
    Made,
    Side,
    Turns,
    both_ways,
    link_side,
    socket_side,
    tier_side,
)

from pagoda.codec import HEADER_BYTES
from pagoda.tiers.remote.mooncake import MooncakeClient
from testbed.programs import LIBRARIES, lacking
from testbed.servers import Server, mooncake_master, mooncake_peer

_SIDES = 3  # that put into the pool


class PlainMooncake:
    """Mooncake's library in this process, without deadlines: chunks go from and to registered
    memory of ours.
    """

    def __init__(self, master: Server, turns: Turns) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        place = f"127.0.0.1:{master.port}"
        self._need(
            self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", place)
        )
        self._page = np.zeros(HEADER_BYTES, np.uint8)
        for buffer in (self._page, *turns.sources, *turns.slots):
            self._need(
                self.store.register_buffer(buffer.ctypes.data, buffer.nbytes)
            )

    def put(self, _: int, key: bytes, source: Bytes) -> None:
        """Put page and chunk as one value."""
        (code,) = self.store.batch_put_from_multi_buffers(
            [f"plain/{key.hex()}"], *self._buffers(source)
        )
        self._need(code)

    def get(self, _: int, key: bytes, slot: Bytes) -> None:
        """Get page and chunk into their places."""
        (code,) = self.store.batch_get_into_multi_buffers(
            [f"plain/{key.hex()}"], *self._buffers(slot)
        )
        self._need(code - HEADER_BYTES - slot.nbytes)

    def _buffers(self, chunk: Bytes) -> tuple[list[list[int]], list[list[int]]]:
        return [[self._page.ctypes.data, chunk.ctypes.data]], [
            [HEADER_BYTES, chunk.nbytes]
        ]

    def _need(self, code: int) -> None:
        if code:
            raise RuntimeError(f"Mooncake failed: {code}")


def mooncake_figures(plan: Plan, nbytes: int) -> list[Figure]:
    """Race puts and gets of chunks of `nbytes`; the pool is never full."""
    if missing := lacking("mooncake", *LIBRARIES):
        say(f"{missing}; its figures are skipped")
        return []
    turns = Turns(plan, nbytes, 32 * MIB)
    room = (turns.kept + 3) * turns.turn_bytes * _SIDES // MIB * 5 // 4
    with mooncake_master() as master, mooncake_peer(master, f"{room}MB") as peer:
        plain = PlainMooncake(master, turns)

        def pids() -> tuple[int, ...]:
            return (peer.pid, *_helpers())

        def sides(stack: ExitStack) -> Mapping[str, Side]:
            return {
                "link": link_side(
                    stack, turns, MooncakeClient(master.url, prefix="link"), pids
                ),
                "tier": tier_side(
                    stack, turns, MooncakeClient(master.url, prefix="tier"), pids
                ),
                "socket": socket_side(stack, turns),
                "library": Side(
                    turns.putting(plain.put),
                    turns.getting(plain.get),
                    pids,
                    "1 call, no copy",
                ),
            }

        def empty() -> None:
            plain.store.remove_all(True)

        def figures(verb: str, made: Made) -> list[Figure]:
            size = f"{verb}_{nbytes // MIB}mib"
            return [
                made(f"mooncake_{size}_vs_library", "link", "library", None),
                made(f"mooncake_{size}_vs_socket", "link", "socket", None),
                made(f"mooncake_tier_{size}_vs_library", "tier", "library", None),
            ]

        return both_ways(turns, sides, lambda: None, empty, figures)


def _helpers() -> list[int]:
    """Return the processes in which the library runs for us."""
    found: list[int] = []
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(each) for each in children.read_text().split()]
    return [each for each in found if b"mooncake_helper" in _command(each)]


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
