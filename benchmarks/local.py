"""The speed of the local tiers against this machine's limits: `python benchmarks/local.py
[--json]`.

Every ratio is raced in turns against its limit from limits.py; the JSON quotes every round under
"runs". What each figure means, and the last results: docs/design/benchmarks.md.
"""

from __future__ import annotations

from ground import Part, main
from harness import MIB
from local_disk import disk_figures
from local_host import host_figures
from local_ledger import (
    evict_figure,
    import_figure,
    keys_figure,
    match_figure,
    overhead_figure,
)

PARTS: dict[str, Part] = {
    "host": lambda plan: host_figures(plan, 32 * MIB, 0.95, "", 1),
    "host_1mib": lambda plan: host_figures(plan, MIB, 0.80, "_1mib", 1),
    "disk": lambda plan: disk_figures(plan, 32 * MIB),
    "keys": lambda plan: [keys_figure(plan)],
    "match": lambda plan: [match_figure(plan)],
    "overhead": lambda plan: [overhead_figure(plan)],
    "evict": lambda plan: [evict_figure(plan)],
    "import": lambda plan: [import_figure(plan)],
}
BESIDE: dict[str, Part] = {  # without targets; they explain the other figures
    "host_runs": lambda plan: host_figures(
        plan, MIB, 0.80, "_1mib_in_runs_of_16", 16
    ),
    "disk_1mib": lambda plan: disk_figures(plan, MIB, "_1mib"),
}


if __name__ == "__main__":
    main(__doc__, PARTS, BESIDE)
