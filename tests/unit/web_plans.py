"""Plans of web-like traffic for tests, from one flat specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ringtap.trafficgen.plans import consistent_and_burst
from ringtap.trafficgen.plans.common import OfferedLoad, PlanOutline
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH, Sizes


@dataclass(frozen=True)
class PlanSpec:
    """The parameters of a plan, in the order in which tests give them."""

    kind: Literal["consistent", "burst"]
    load_bps: float
    duration_ns: int
    destinations: Sequence[str]
    seed: int = 1
    scale: float = 1.0
    burst_height: float = 3.0
    burst_length_ns: int = 1_000_000
    burst_period_ns: int = 10_000_000
    quiet_budget: Literal["each", "together"] = "each"
    sizes: Sizes = WEB_SEARCH
    sources: Sequence[str] = ()
    load_counts: Literal["payload", "wire"] = "payload"
    mtu: int = 1500
    transport: Mapping[str, Any] = field(default_factory=dict)


def web_plan(spec: PlanSpec) -> consistent_and_burst.WebSearchPlan:
    """Return the plan of a specification."""
    frame = PlanOutline(spec.duration_ns, spec.destinations, spec.sources, spec.seed, spec.transport)
    load = OfferedLoad(spec.load_bps, spec.load_counts, spec.mtu)
    bursts = spec.burst_height, spec.burst_length_ns, spec.burst_period_ns, spec.quiet_budget
    return consistent_and_burst.WebSearchPlan(
        consistent_and_burst.PlanSpec(spec.kind, frame, load, spec.scale, *bursts, spec.sizes)
    )
