"""Neighbours on two machines: network namespaces, joined by a link that is shaped, cut and
mended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from testbed.netns import Cable, need_network, network
from testbed.patience import Patience, wait_until
from tests.remote.chunks import (
    LATE_SECONDS,
)
from tests.serve.kit import CHUNK, RUN, TOKEN, Engine, engine

CHUNKS = 8  # 32 MiB a prompt
DEADLINE_SECONDS = 2.0
WHOLE = f"{CHUNKS * CHUNK} True"


class Machines(NamedTuple):
    """One engine computes and a server gives away what it stored; the other engine is at the near
    end.
    """

    cable: Cable
    computes: Engine
    asks: Engine


@pytest.fixture
def machines(shm_root: Path) -> Iterator[Machines]:
    need_network()
    with network() as net:
        near = net.place("near")
        far = net.place("far")
        cable = net.cable(near, far)
        roots = [str(shm_root / place.name) for place in (near, far)]
        sizes = {
            "host_size": 256 << 20,
            "deadline_seconds": DEADLINE_SECONDS,
            "worth_it": False,
        }
        url = f"http://:{TOKEN}@{cable.far}:7777"
        with (
            engine("LARGE", place=far, host_path=roots[1], **sizes) as computes,
            engine(
                "LARGE", place=near, host_path=roots[0], peers=[url], **sizes
            ) as asks,
        ):
            server = far.start(
                sys.executable,
                "-c",
                RUN,
                "serve",
                "--json",
                roots[1],
                "--listen",
                f"{cable.far}:7777",
                env={**os.environ, "PAGODA_SERVE_TOKEN": TOKEN},
                stdout=subprocess.PIPE,
            )
            assert server.stdout.readline()
            yield Machines(cable, computes, asks)


@pytest.mark.slow
def test_a_link_that_is_shaped_cut_mended_and_loses_packets(
    machines: Machines,
) -> None:
    """What arrives is right, what does not is a miss in time, and the next prompts hit again."""
    cable, computes, asks = machines
    for chain in range(1, 6):
        computes.store(chain, CHUNKS)
    cable.shape(200e6)
    wait_until(lambda: asks.command("retrieve", 1, CHUNKS) == WHOLE)

    wait_until(lambda: asks.command("lookup", 2, CHUNKS) == f"{CHUNKS * CHUNK}")
    arrived, _ = cable.traffic()
    asks.begin("retrieve", 2, CHUNKS)
    wait_until(lambda: cable.traffic()[0] > arrived + (8 << 20))
    cable.cut()
    patience = Patience(DEADLINE_SECONDS + LATE_SECONDS)
    answer = asks.answer()
    assert not patience.ended, patience.said()
    assert answer != WHOLE
    assert answer.endswith(" True")
    patience = Patience(LATE_SECONDS)
    assert asks.command("retrieve", 3, CHUNKS) == "0 True"
    assert not patience.ended, patience.said()

    cable.mend()
    wait_until(lambda: asks.command("retrieve", 2, CHUNKS) == WHOLE)
    wait_until(lambda: asks.command("retrieve", 3, CHUNKS) == WHOLE)

    cable.shape(200e6, queue_seconds=0.4)
    wait_until(lambda: asks.command("retrieve", 4, CHUNKS) == WHOLE)
    cable.shape(200e6, queue_seconds=0.001)
    _, lost = cable.traffic()
    wait_until(lambda: asks.command("retrieve", 5, CHUNKS) == WHOLE)
    assert cable.traffic()[1] > lost
