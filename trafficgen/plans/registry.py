"""Construction of plans of every kind from the parsed options of ``ringtap traffic plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen.plans.common import Frame, OfferedLoad
from ringtap.trafficgen.plans.hpcc import FlowListPlan
from ringtap.trafficgen.plans.patterns import LongLivedPlan, OnOffPlan, RingPlan, RoundsPlan
from ringtap.trafficgen.plans.plan_file import Plan
from ringtap.trafficgen.plans.replay import ReadSegments, ReplayPlan, read_capture, read_sent_log
from ringtap.trafficgen.plans.sizes import WEB_SEARCH, SizeDistribution, empirical_points, parse_sizes
from ringtap.trafficgen.plans.web_search import FlowPlan, PlanSpec
from ringtap.trafficgen.protocol import parse_address
from ringtap.trafficgen.socket_options import check_transport_options

_MS = 1_000_000
_LONG_LIVED_FLOWS, _INCAST_FLOWS = 1, 8
_ON_NS = _OFF_NS = _PERIOD_NS = 10 * _MS
_GAP_NS = 100 * _MS
_TRANSPORT = {
    "congestion_control": "congestion_control",
    "dscp": "dscp",
    "send_buffer": "send_buffer_bytes",
    "pacing": "pacing_bps",
}


def make_plan(kind: str, given: dict[str, Any], read_segments: ReadSegments | None = None) -> Plan:
    """Make the requested plan.

    Args:
        kind: one of the kinds of ``ringtap traffic plan``.
        given: option values by the option's name with underscores; rates in bit/s, sizes in bytes, times in ns.
        read_segments: reader of captures, for a replay of one.

    Raises:
        UsageError: the options are inconsistent, or an input file is wrong.
    """
    makers: dict[str, Callable[[dict[str, Any], Frame], Plan]] = {
        "long-lived": _long_lived,
        "on-off": _on_off,
        "incast": _incast,
        "all-to-all": _all_to_all,
        "ring": _ring,
        "replay": partial(_replay, read_segments=read_segments),
        "list": _list,
    }
    transport = _transport(given)
    if kind in ("consistent", "burst"):
        return _flow_plan(kind, given, transport)
    sources, destinations = given.get("from", []), given.get("to", [])
    if "node" in given:
        destinations = given["node"]
        sources = list(dict.fromkeys(parse_address(node)[0] for node in destinations))
    frame = Frame(given.get("duration", 0), destinations, sources, given.get("seed", 1), transport)
    return makers[kind](given, frame)


def size_points(plan: Plan, given: dict[str, Any]) -> Sequence[tuple[float, float]]:
    """Return points of the CDF of a plan's sizes: of the sampled distribution, or of the sizes themselves."""
    if isinstance(plan, FlowPlan):
        sizes = plan.spec.sizes.scaled(1 / given.get("scale", 1.0))
        if isinstance(sizes, SizeDistribution):
            return sizes.points
    return empirical_points(flow.size_bytes for flow in plan.flows() if flow.size_bytes)


def _transport(given: dict[str, Any]) -> dict[str, Any]:
    transport = {key: given[option] for option, key in _TRANSPORT.items() if option in given}
    check_transport_options(transport)
    return transport


def _load(given: dict[str, Any]) -> OfferedLoad | None:
    if "load" not in given:
        if "load_counts" in given or "mtu" in given:
            raise UsageError("--load-counts and --mtu say what --load counts: give --load too")
        return None
    if "mtu" in given and given.get("load_counts") != "wire":
        raise UsageError("--mtu goes with --load-counts wire: payload does not depend on it")
    return OfferedLoad(given["load"], given.get("load_counts", "payload"), given.get("mtu", 1500))


def _flow_plan(kind: str, given: dict[str, Any], transport: dict[str, Any]) -> Plan:
    load = _load(given)
    assert load is not None
    return FlowPlan(
        PlanSpec(
            kind=kind,  # type: ignore[arg-type]
            load_bps=load.bps,
            duration_ns=given["duration"],
            destinations=given["to"],
            seed=given.get("seed", 1),
            scale=given.get("scale", 1.0),
            burst_height=given.get("burst_height", 3.0),
            burst_length_ns=given.get("burst_length", _MS),
            burst_period_ns=given.get("burst_period", 10 * _MS),
            sizes=parse_sizes(given["sizes"]) if "sizes" in given else WEB_SEARCH,
            sources=given.get("from", []),
            load_counts=load.counts,
            mtu=load.mtu,
            transport=transport,
        )
    )


def _long_lived(given: dict[str, Any], frame: Frame) -> Plan:
    return LongLivedPlan(frame, given.get("flows", _LONG_LIVED_FLOWS), _load(given))


def _on_off(given: dict[str, Any], frame: Frame) -> Plan:
    load = _load(given)
    assert load is not None
    return OnOffPlan(frame, load, given.get("on", _ON_NS), given.get("off", _OFF_NS))


def _incast(given: dict[str, Any], frame: Frame) -> Plan:
    if len(frame.destinations) != 1:
        raise UsageError("incast goes to one destination: give --to once")
    if "flows" in given and "from" in given:
        raise UsageError("incast has a flow for each --from, or --flows unbound ones: give one of the two")
    sources = given.get("from") or [""] * _bounded(given.get("flows", _INCAST_FLOWS))
    pairs = [(source, frame.destinations[0]) for source in sources]
    return RoundsPlan("incast", frame, pairs, given.get("period", _PERIOD_NS), _demand(given), {})


def _all_to_all(given: dict[str, Any], frame: Frame) -> Plan:
    nodes, hosts = given["node"], [parse_address(node)[0] for node in given["node"]]
    count = len(nodes)
    if count < 2:
        raise UsageError("all-to-all needs two nodes or more: give --node ADDRESS:PORT for each")
    # In shifted order, so that no receiver comes first for every sender
    pairs = [(hosts[node], nodes[(node + shift) % count]) for shift in range(1, count) for node in range(count)]
    period_ns = given.get("period", _PERIOD_NS)
    return RoundsPlan("all-to-all", frame, pairs, period_ns, _demand(given), {"nodes": list(nodes)})


def _demand(given: dict[str, Any]) -> int | OfferedLoad:
    load = _load(given)
    if (load is None) == ("size" not in given):
        raise UsageError("give --load for all flows together, or --size for each one")
    return load if load is not None else int(given["size"])


def _bounded(count: int) -> int:
    if not 1 <= count <= 100_000:
        raise UsageError(f"--flows {count} is not usable: it must be from 1 to 100000")
    return count


def _ring(given: dict[str, Any], frame: Frame) -> Plan:
    return RingPlan(frame, given["node"], given["bytes"], given.get("compute", 0), given["iterations"])


def _replay(given: dict[str, Any], frame: Frame, read_segments: ReadSegments | None) -> Plan:
    path = given["replay"]
    if path.suffix == ".rec":
        if "gap" in given:
            raise UsageError("--gap is for captures: a log says where flows end")
        return ReplayPlan("replay", read_sent_log(path), frame, given.get("scale", 1.0), {"replay": path.name})
    if not frame.destinations:
        raise UsageError(
            "a replay of a capture needs --to HOST:PORT: nothing is sent to hosts that are only in a capture"
        )
    assert read_segments is not None
    gap_ns = given.get("gap", _GAP_NS)
    about = {"replay": path.name, "gap_ns": gap_ns}
    # Sockets of this host cannot bind to the capture's sources either
    frame = replace(frame, sources=frame.sources or [""])
    return ReplayPlan("replay", read_capture(path, gap_ns, read_segments), frame, given.get("scale", 1.0), about)


def _list(given: dict[str, Any], frame: Frame) -> Plan:
    return FlowListPlan(given["list"], frame, given["node"])
