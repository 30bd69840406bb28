"""`pagoda replay --remote`: a tier that machines share: what it would serve, the traffic on the
links, the cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from pagoda_tools.cli import UsageError, printing
from pagoda_tools.cli.replay_inputs import Trace, named
from pagoda_tools.cli.replay_tiers import print_tiers, specs_of, tiers_as_json
from pagoda_tools.cli.text_tables import RightAligned
from pagoda_tools.cli.trace_pool import TraceJob, TracePool
from pagoda_tools.replay import FleetOutcome, FleetSpec, Traffic, simulate_fleet

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])bit(?:/s)?", re.IGNORECASE)
_POWERS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_DAY_SECONDS = 86_400
_MONTH_DAYS = 30
_GIB = 2**30

Dollars = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StorePrices(msgspec.Struct, forbid_unknown_fields=True):
    """The prices of an object store, in dollars: see `replay/prices.toml`."""

    put: Dollars
    get: Dollars
    gb_month: Dollars
    gb_read: Dollars = 0.0
    gb_written: Dollars = 0.0


class FleetPlan(NamedTuple):
    """What is simulated. `sizes`: bytes of each machine's tiers by name, the remote one last;
    `link`: bits/s.
    """

    trace: Trace
    sizes: dict[str, int]
    chunk_bytes: int
    machines: int
    route: str
    remote_policy: str
    write_policy: str
    link: float | None
    prices: Mapping[str, StorePrices]


# the results of a fleet, by the policy of the machines' own tiers
PolicyOutcomes: TypeAlias = Sequence[tuple[str, FleetOutcome]]


def link_of(text: str | None) -> float | None:
    """Return a link's bits per second, or None for None. Raises UsageError."""
    if text is None:
        return None
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * _POWERS[found[2].lower()] if found else 0.0
    if not rate:
        raise UsageError(f"--link {text}: write bits per second, such as 25Gbit")
    return rate


def prices_of(file: Path | None) -> Mapping[str, StorePrices]:
    """Return the prices in a file, or the list prices of the package. Raises UsageError."""
    try:
        text = (
            file.read_bytes()
            if file
            else (files("pagoda_tools.replay") / "prices.toml").read_bytes()
        )
        found = msgspec.toml.decode(text, type=dict[str, StorePrices])
    except OSError as trouble:
        raise UsageError(
            f"--prices {file}: cannot be read: {trouble.strerror}"
        ) from None
    except ValueError as trouble:
        raise UsageError(f"--prices {file}: {trouble}") from None
    if not found:
        raise UsageError(f"--prices {file}: names no store")
    return found


def show(
    plan: FleetPlan, policies: Sequence[str], jobs: int | None, as_json: bool
) -> None:
    """Simulate the fleet with each policy in the machines' own tiers, and print the results."""
    names = policies if len(plan.sizes) > 1 else [plan.remote_policy]
    with TracePool(plan.trace.requests, jobs, as_json) as pool:
        work = [TraceJob(simulate_fleet, (_spec(plan, name),)) for name in names]
        found = list(
            zip(
                names, pool.run(work, f"replaying {plan.trace.name}"), strict=True
            )
        )
    if as_json:
        runs = [_as_json(plan, *result) for result in found]
        facts = {
            "chunk_bytes": plan.chunk_bytes, "machines": plan.machines, "route": plan.route,
            "remote_write_policy": plan.write_policy, "link_bits_per_second": plan.link,
        }  # fmt: skip
        printing.print_json(plan.trace.report(runs, **facts))
    else:
        _print_results(plan, found)


def _spec(plan: FleetPlan, policy: str) -> FleetSpec:
    """Return the fleet with a policy in the machines' own tiers. Raises UsageError."""
    *own, remote = specs_of(plan.trace, plan.sizes, plan.chunk_bytes, policy)
    remote = remote._replace(policy=plan.remote_policy, cost=None)
    return FleetSpec(plan.machines, own, remote, plan.route, plan.write_policy)


class LinkUse(NamedTuple):
    """The traffic on a link; rates are None if the trace has no times."""

    name: str
    read_bytes: float
    written_bytes: float
    mean_gbit: float | None
    busiest_gbit: float | None


def _links(plan: FleetPlan, found: FleetOutcome) -> list[LinkUse]:
    def link(name: str, traffic: Traffic) -> LinkUse:
        gbit = 8e-9 * plan.chunk_bytes
        mean = (
            (traffic.read + traffic.written) * gbit / found.seconds
            if found.seconds
            else None
        )
        minute = min(60.0, found.seconds)
        busiest = traffic.busiest_minute * gbit / minute if minute else None
        return LinkUse(
            name,
            traffic.read * plan.chunk_bytes,
            traffic.written * plan.chunk_bytes,
            mean,
            busiest,
        )

    machines = [
        link("mean machine", found.machine),
        link("busiest one", found.busiest),
    ]
    return [link("store", found.store), *(machines if plan.machines > 1 else ())]


def _dollars_a_day(
    plan: FleetPlan, found: FleetOutcome, prices: StorePrices
) -> dict[str, float] | None:
    """Return the cost per day of each kind of request and of the stored chunks; None if the trace
    has no times.
    """
    if not found.seconds:
        return None
    days = found.seconds / _DAY_SECONDS
    chunk_gib = plan.chunk_bytes / _GIB
    asked = found.asked
    parts = {
        "look-ups": asked.look_heads * prices.get / 1e3 / days,
        "other HEADs": (asked.heads - asked.look_heads) * prices.get / 1e3 / days,
        "GETs": asked.gets
        * (prices.get / 1e3 + chunk_gib * prices.gb_read)
        / days,
        "PUTs": asked.puts
        * (prices.put / 1e3 + chunk_gib * prices.gb_written)
        / days,
        "kept": found.kept * chunk_gib * prices.gb_month / _MONTH_DAYS,
    }
    return {**parts, "total": sum(parts.values())}


def _as_json(
    plan: FleetPlan, policy: str, outcome: FleetOutcome
) -> dict[str, object]:
    return {
        **named(policy),
        "hit_rate": outcome.hit_rate,
        "tiers": tiers_as_json(
            outcome.tiers, plan.sizes, plan.chunk_bytes, outcome.accesses
        ),
        "links": [link._asdict() for link in _links(plan, outcome)],
        "lookups": outcome.lookups,
        "lookups_per_second": outcome.lookups / outcome.seconds
        if outcome.seconds
        else None,
        "busiest_minute_lookups": outcome.busiest_minute_lookups,
        "object_store_requests": outcome.asked._asdict(),
        "kept_bytes": outcome.kept * plan.chunk_bytes,
        "dollars_per_day": {
            name: _dollars_a_day(plan, outcome, each)
            for name, each in plan.prices.items()
        },
    }


def _print_results(plan: FleetPlan, found: PolicyOutcomes) -> None:
    """Print what the tiers serve, the traffic on the links, the requests to the store, and their
    cost.
    """
    _print_tiers(plan, found)
    print()
    _print_links(plan, found)
    print()
    _print_requests(found)
    if found[0][1].seconds:
        print()
        _print_dollars(plan, found)


def _print_tiers(plan: FleetPlan, found: PolicyOutcomes) -> None:
    runs = [
        (policy, outcome.tiers, outcome.accesses) for policy, outcome in found
    ]
    print_tiers(plan.trace, plan.sizes, plan.chunk_bytes, runs)
    machines = (
        "one machine"
        if plan.machines == 1
        else f"{plan.machines:,} machines, {plan.route}"
    )
    machines += (
        ", remote "
        f"{plan.remote_policy}{' with second sight' * (plan.write_policy == 'second_sight')}"
    )
    hits = ", ".join(
        f"{policy} {printing.share(outcome.hit_rate, 1).strip()}"
        for policy, outcome in found
    )
    printing.print_text(f"{machines}: {hits} of all chunks are served")


def _print_links(plan: FleetPlan, found: PolicyOutcomes) -> None:
    rows = [
        {
            "policy": policy,
            "link": link.name,
            "read": printing.size(link.read_bytes),
            "written": printing.size(link.written_bytes),
            "Gbit/s": _number(link.mean_gbit),
            "busiest min": _number(link.busiest_gbit),
            "of link": _of_link(link.busiest_gbit, plan.link),
        }
        for policy, outcome in found
        for link in _links(plan, outcome)
    ]
    printing.print_dicts(
        "over the network", rows, without=() if plan.link else ("of link",)
    )


def _print_requests(found: PolicyOutcomes) -> None:
    rows = [
        {
            "policy": policy,
            "look-ups": outcome.lookups,
            "loads": outcome.asked.gets,
            "stores": outcome.asked.puts,
            "look-ups/s": _number(
                outcome.lookups / outcome.seconds if outcome.seconds else None
            ),
            "busiest min": _number(
                outcome.busiest_minute_lookups / min(60, outcome.seconds)
                if outcome.seconds
                else None
            ),
        }
        for policy, outcome in found
    ]
    printing.print_dicts("requests to the store", rows)


def _print_dollars(plan: FleetPlan, found: PolicyOutcomes) -> None:
    rows = []
    for policy, outcome in found:
        for name, prices in plan.prices.items():
            if day := _dollars_a_day(plan, outcome, prices):
                heads = day.pop("look-ups") + day.pop("other HEADs")
                parts = {
                    "HEADs": heads,
                    **day,
                    "with index": day["total"] - heads,
                }
                texts = {
                    part: _dollars(dollars) for part, dollars in parts.items()
                }
                rows.append({"policy": policy, "store": name, **texts})
    printing.print_dicts("dollars per day, if it is an object store", rows)


def _number(value: float | None) -> str:
    if value is None:
        return RightAligned("-")
    return RightAligned(f"{value:,.3g}" if value < 100 else f"{value:,.0f}")


def _of_link(gbit: float | None, link: float | None) -> str:
    return (
        _number(None)
        if gbit is None or link is None
        else printing.share(1e9 * gbit, link)
    )


def _dollars(value: float) -> str:
    return RightAligned(f"{value:,.2f}" if value < 100 else f"{value:,.0f}")
