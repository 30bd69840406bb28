"""The speeds of loading chunks and of computing prompts: given, measured by `pagoda bench`, or
assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pagoda_tools.cli import UsageError
from pagoda_tools.cli.known_models import model_of

HOST_GBPS = 25.0
DISK_GBPS = 6.0
"""The assumed speeds without a measurement: a GPU in a PCIe 4 x16 slot, an NVMe SSD in PCIe 4 x4.
10^9 bytes.
"""
TFLOPS = 400.0
"""The assumed engine: one H100 at 40 % of its data sheet's speed for bfloat16."""


class Speeds(NamedTuple):
    """The speeds, and the source of each. GB/s are 10^9 bytes."""

    host_gbps: float
    disk_gbps: float
    # tokens per second; None: not known, so times are not known either
    prefill: float | None
    sources: dict[str, str]

    def gbps(self, tier: str) -> float:
        """Return the speed of loading chunks from a tier."""
        return self.host_gbps if tier == "host" else self.disk_gbps

    def load_seconds(self, tier: str, nbytes: int) -> float:
        """Return the time of loading so many bytes."""
        return nbytes / (1e9 * self.gbps(tier))


def speeds_of(
    host: float | None,
    disk: float | None,
    prefill: float | None,
    measured: Path | None,
    model: str | None,
) -> Speeds:
    """Return the given speeds; otherwise those that `pagoda bench --json` measured, or assumed
    ones.

    Raises:
        UsageError: the file is not what `pagoda bench --json` prints.
    """
    known = _measured(measured) if measured is not None else {}
    sources = {}

    def chosen(name: str, given: float | None, assumed: float) -> float:
        sources[name] = f"{measured}" if name in known else "assumed"
        if given:
            sources[name] = "given"
        return given or known.get(name, assumed)

    host_gbps = chosen("host", host, HOST_GBPS)
    disk_gbps = chosen("disk", disk, DISK_GBPS)
    if prefill or model is None:
        return Speeds(
            host_gbps, disk_gbps, prefill, {**sources, "prefill": "given"}
        )
    # two operations per parameter and token
    computed = TFLOPS * 1e12 / (2e9 * model_of(model).active)
    return Speeds(
        host_gbps,
        disk_gbps,
        computed,
        {**sources, "prefill": f"{TFLOPS:g} TFLOP/s assumed"},
    )


def _measured(file: Path) -> dict[str, float]:
    """Return the read speeds (GB/s) in the output of `pagoda bench --json`."""
    try:
        found = json.loads(file.read_text())
        speeds = {
            tier: float(found[f"{tier}_read"]["gb_per_second"])
            for tier in ("host", "disk")
            if f"{tier}_read" in found
        }
    except OSError as trouble:
        raise UsageError(
            f"--measured {file}: cannot be read: {trouble.strerror}"
        ) from None
    except (ValueError, TypeError, KeyError):
        speeds = {}
    if not speeds or min(speeds.values()) <= 0:
        raise UsageError(
            f"--measured {file}: is not what `pagoda bench --json` prints"
        )
    return speeds
