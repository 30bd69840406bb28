"""How fast chunks are loaded and prompts computed: given, measured by `pagoda bench`, or assumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pagoda.cli import UsageError
from pagoda.cli.model_sizes import model_of

HOST_GBPS, DISK_GBPS = 25.0, 6.0
"""What is assumed if nothing was measured: a GPU in a PCIe 4 x16 slot; an NVMe SSD in a PCIe 4 x4 one. 10^9 bytes."""
TFLOPS = 400.0
"""What is assumed of the engine: one H100 at 40 % of what its data sheet says for bfloat16."""


class Speeds(NamedTuple):
    """How fast things go, and where each figure is from. GB/s are 10^9 bytes."""

    host_gbps: float
    disk_gbps: float
    prefill: float | None  # tokens a second; None: not known, so nothing is said of time
    sources: dict[str, str]

    def gbps(self, tier: str) -> float:
        """Return how fast chunks are loaded from a tier."""
        return self.host_gbps if tier == "host" else self.disk_gbps

    def load_seconds(self, tier: str, nbytes: int) -> float:
        """Return how long loading takes."""
        return nbytes / (1e9 * self.gbps(tier))


def speeds_of(
    host: float | None, disk: float | None, prefill: float | None, measured: Path | None, model: str | None
) -> Speeds:
    """Return the speeds that were given, else those that `pagoda bench --json` measured, else assumed ones.

    Raises:
        UsageError: the file is not what `pagoda bench --json` prints.
    """
    known = _measured(measured) if measured is not None else {}
    sources = {}

    def chosen(name: str, given: float | None, assumed: float) -> float:
        sources[name] = "given" if given else f"{measured}" if name in known else "assumed"
        return given or known.get(name, assumed)

    host_gbps, disk_gbps = chosen("host", host, HOST_GBPS), chosen("disk", disk, DISK_GBPS)
    if prefill or model is None:
        return Speeds(host_gbps, disk_gbps, prefill, {**sources, "prefill": "given"})
    computed = TFLOPS * 1e12 / (2e9 * model_of(model).active)  # two operations a parameter and token
    return Speeds(host_gbps, disk_gbps, computed, {**sources, "prefill": f"{TFLOPS:g} TFLOP/s assumed"})


def _measured(file: Path) -> dict[str, float]:
    """Return the reading speeds in what `pagoda bench --json` printed, GB/s."""
    try:
        found = json.loads(file.read_text())
        speeds = {
            tier: float(found[f"{tier}_read"]["gb_per_second"])
            for tier in ("host", "disk")
            if f"{tier}_read" in found
        }
    except OSError as trouble:
        raise UsageError(f"--measured {file}: cannot be read: {trouble.strerror}") from None
    except (ValueError, TypeError, KeyError):
        speeds = {}
    if not speeds or min(speeds.values()) <= 0:
        raise UsageError(f"--measured {file}: is not what `pagoda bench --json` prints")
    return speeds
