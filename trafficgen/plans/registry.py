"""Finds the kinds of traffic by name, and makes plans from the options of ``ringtap traffic plan``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from ringtap.core import plug_ins
from ringtap.core.errors import RingtapWarning, UsageError
from ringtap.core.flow_plan_file import FlowSource
from ringtap.core.host_port import parse_address
from ringtap.trafficgen.outgoing_sockets import check_transport_options
from ringtap.trafficgen.plans.common import PlanOutline
from ringtap.trafficgen.plans.consistent_and_burst import WebSearchPlan
from ringtap.trafficgen.plans.kind import TRANSPORT, TrafficKind
from ringtap.trafficgen.plans.replay import ReadOperations, ReadSegments
from ringtap.trafficgen.plans.size_distributions import SizeDistribution, empirical_points

# (module, its TrafficKind), in the order of --help
_KINDS = (
    ("ringtap.trafficgen.plans.consistent_and_burst", "CONSISTENT"),
    ("ringtap.trafficgen.plans.consistent_and_burst", "BURST"),
    ("ringtap.trafficgen.plans.patterns", "LONG_LIVED"),
    ("ringtap.trafficgen.plans.patterns", "ON_OFF"),
    ("ringtap.trafficgen.plans.patterns", "INCAST"),
    ("ringtap.trafficgen.plans.patterns", "ALL_TO_ALL"),
    ("ringtap.trafficgen.plans.patterns", "RING"),
    ("ringtap.trafficgen.plans.replay", "REPLAY"),
    ("ringtap.trafficgen.plans.hpcc_flow_lists", "LIST"),
    ("ringtap.trafficgen.plans.replay", "WORKLOAD"),
)


def traffic_kinds() -> dict[str, TrafficKind]:
    """Return every kind of traffic by name."""
    kinds: list[TrafficKind] = [getattr(importlib.import_module(module), name) for module, name in _KINDS]
    found = {kind.name: kind for kind in kinds}
    return found | {name: kind for name in plug_ins.names(plug_ins.TRAFFIC) if (kind := _plug_in(name, found))}


def _plug_in(name: str, known: dict[str, TrafficKind]) -> TrafficKind | None:
    """Return the kind of a plug-in; None, with a warning, if it is none."""
    try:
        kind = plug_ins.load(plug_ins.TRAFFIC, name)
    except UsageError as error:
        warnings.warn(str(error), RingtapWarning, stacklevel=2)
        return None
    if not isinstance(kind, TrafficKind) or kind.name != name or name in known:
        warnings.warn(f"the plug-in {name!r} is not a TrafficKind of this name", RingtapWarning, stacklevel=2)
        return None
    return kind


def make_plan(
    kind: str,
    given: dict[str, Any],
    read_segments: ReadSegments | None = None,
    read_operations: ReadOperations | None = None,
) -> FlowSource:
    """Make the requested plan.

    Args:
        kind: name of a kind of traffic.
        given: option values by the option's name with underscores; rates in bit/s, sizes in bytes, times in ns.
        read_segments: reader of captures, for the replay of a capture.
        read_operations: reader of workloads, for the replay of a workload.

    Raises:
        UsageError: the options are inconsistent, or an input file is wrong.
    """
    sources, destinations = given.get("from", []), given.get("to", [])
    if "node" in given:
        destinations = given["node"]
        sources = list(dict.fromkeys(parse_address(node)[0] for node in destinations))
    frame = PlanOutline(given.get("duration", 0), destinations, sources, given.get("seed", 1), _transport(given))
    return traffic_kinds()[kind].make(
        given | {"read_segments": read_segments, "read_operations": read_operations}, frame
    )  # fmt: skip


def size_points(plan: FlowSource, given: dict[str, Any]) -> Sequence[tuple[float, float]]:
    """Return points of the CDF of a plan's sizes: of their distribution if they have one, else of themselves."""
    if isinstance(plan, WebSearchPlan):
        sizes = plan.spec.sizes.scaled(1 / given.get("scale", 1.0))
        if isinstance(sizes, SizeDistribution):
            return sizes.points
    return empirical_points(flow.size_bytes for flow in plan.flows() if flow.size_bytes)


def _transport(given: dict[str, Any]) -> dict[str, Any]:
    transport = {key: given[option.key] for option, key in TRANSPORT.items() if option.key in given}
    check_transport_options(transport)
    return transport
