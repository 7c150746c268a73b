"""Counts the same traffic in three ways: by sockets, by interface counters and by captured packets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.job.captured_payload_per_iteration import Packets, own_addresses
from ringtap.analysis.job.flows import UNCLASSIFIED, CrossTrafficDestinations, SocketTraffic
from ringtap.analysis.runs.node_records import NodeLogs, WideLog
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers
from ringtap.analysis.runs.traffic_classes import CLASSES, CROSS, OTHER
from ringtap.core.ethernet import IPV4, IPV6, family_of, headers_bytes
from ringtap.core.link_counter_sources import count_once
from ringtap.core.run_directory_schema import NIC_REC

LOOPBACK, NETWORK = "loopback", "network"
_DIRECTIONS = ((LOOPBACK, "tx"), (NETWORK, "tx"), (NETWORK, "rx"))
COLUMNS = (
    *("nic_bytes", "nic_packets", "nic_payload_bytes", "socket_bytes", "packet_payload_bytes", "packet_bytes"),
    "retransmitted_bytes",
)


@dataclass(frozen=True)
class ByteAccount:
    """Byte counts of one direction of a node's network interfaces or of its loopback.

    Attributes:
        node: name of the node.
        path: ``loopback`` or ``network``.
        direction: ``tx`` or ``rx``; loopback has ``tx`` only, as both directions are the same bytes.
        interfaces: the interfaces whose counters were read; empty without counters.
        amounts: by name of `COLUMNS`, one number per bin; None: not measured.
    """

    node: str
    path: str
    direction: str
    interfaces: tuple[str, ...]
    amounts: dict[str, Numbers | None]


@dataclass(frozen=True)
class Captured:
    """Byte counts of the captures of all nodes.

    Attributes:
        by_class: payload of each class of flows by the captures, one number per bin; a class that cannot be
            distinguished, or of which no flow passes a captured interface, is missing; empty if nothing was captured.
        not_captured: by class, the share of the sockets' payload that passes no captured interface.
        packets: the captures by node.
    """

    by_class: dict[str, Numbers]
    not_captured: dict[str, float]
    packets: dict[str, Packets]


@dataclass(frozen=True)
class Counted:
    """Counts of a node's interfaces.

    Attributes:
        interfaces: by path, the interfaces whose bytes no other interface counts.
        grown: growth by path, direction and ``bytes`` or ``packets``, one number per bin.
    """

    interfaces: dict[str, tuple[str, ...]]
    grown: dict[tuple[str, str, str], Numbers]


def count(node: NodeLogs, borders: Borders) -> Counted | None:
    """Read a node's interface counters; return None if it has none."""
    counters = node.wide(NIC_REC)
    if counters is None:
        return None
    found: Counted = Counted({}, {})
    known = interfaces(counters, node)
    for path, direction in _DIRECTIONS:
        names = tuple(name for name in known if (name == "lo") == (path == LOOPBACK))
        found.interfaces[path] = names
        for what in ("bytes", "packets"):
            parts = (counters.growth(f"{name}.{direction}_{what}", borders) for name in names)
            found.grown[path, direction, what] = np.asarray(sum(parts, np.zeros(borders.bins)))
    return found


def measure(
    counted: Mapping[str, Counted | None],
    captured: Mapping[str, Packets],
    traffic: SocketTraffic,
    covered: Mapping[str, npt.NDArray[np.bool_]],
) -> list[ByteAccount]:
    """Count the bytes of some nodes by sockets, interface counters and captures, as far as they were recorded.

    Payload is each byte of a stream once. An interface counts bytes that are sent again, too: the captures tell how
    many, and without them, of what is sent, the sockets. The family of addresses, and so the size of headers, is also
    known from either; without it, the payload of an interface is not known.

    Args:
        counted: interface counts of each node.
        captured: captures by node, without nodes that have none.
        traffic: bytes of the sockets of all nodes.
        covered: the bins that the socket log of each node covers.
    """
    flow_rows, families = _FlowRows(traffic, list(counted)), _families(traffic)
    directions = []
    for name, counters in counted.items():
        for path, direction in _DIRECTIONS:
            amounts: dict[str, Numbers | None] = dict.fromkeys(COLUMNS)
            if name in traffic.covered:
                names = {"socket_bytes": "payload_bytes"}
                names |= {"retransmitted_bytes": "retransmitted_bytes"} if direction == "tx" else {}
                for column, what in names.items():
                    found = flow_rows.sum(what, name, path, direction)
                    amounts[column] = np.where(covered[name], found, np.nan)
            if name in captured:
                rows = _rows(captured[name], name, traffic, path, direction)
                if len(rows):
                    sums = {what: amount[rows].sum(axis=0) for what, amount in captured[name].amounts.items()}
                    amounts["packet_payload_bytes"], amounts["packet_bytes"] = (
                        sums["payload_bytes"],
                        sums["frame_bytes"],
                    )
                    again, by_sockets = sums["retransmitted_bytes"], amounts["retransmitted_bytes"]
                    amounts["retransmitted_bytes"] = (
                        again if by_sockets is None else np.where(np.isnan(again), by_sockets, again)
                    )
            if counters is not None:
                grown = [counters.grown[path, direction, what] for what in ("bytes", "packets")]
                amounts["nic_bytes"], amounts["nic_packets"] = grown
                family = families.get(name) or _captured_family(captured.get(name))
                if family is not None:
                    payload = grown[0] - headers_bytes(family) * grown[1]
                    if (again := amounts["retransmitted_bytes"]) is not None:
                        payload = payload - np.nan_to_num(again)
                    amounts["nic_payload_bytes"] = np.maximum(payload, 0.0)
            if any(amount is not None and np.nansum(amount) > 0 for amount in amounts.values()):
                interfaces = counters.interfaces[path] if counters is not None else ()
                directions.append(ByteAccount(name, path, direction, interfaces, amounts))
    return directions


def measure_captured(nodes: Mapping[str, NodeLogs], captured: dict[str, Packets], traffic: SocketTraffic) -> Captured:
    """Count the payload of each class of flows in the captures of all nodes.

    Args:
        nodes: the nodes' logs.
        captured: captures by node, without nodes that have none.
        traffic: bytes of the sockets.
    """
    if not captured:
        return Captured({}, {}, captured)
    by_class = _by_class(captured, traffic, CrossTrafficDestinations.of(nodes)) if traffic.bins else {}
    not_captured = _not_captured(captured, traffic)
    for kind, share in not_captured.items():
        if share == 1 and not by_class.get(kind, np.zeros(0)).any():
            by_class.pop(kind, None)
    return Captured(by_class, not_captured, captured)


def interfaces(counters: WideLog, node: NodeLogs) -> list[str]:
    """Return the interfaces that together count each byte of a job once, from the columns of their counters."""
    names = dict.fromkeys(column.rpartition(".")[0] for column in counters.columns)
    return count_once(names, node.info.get("before") or {})


class _FlowRows:
    """Bytes of the flow groups of some nodes by path, direction and node."""

    def __init__(self, traffic: SocketTraffic, names: Sequence[str]) -> None:
        groups = traffic.groups
        local = groups["local"].to_numpy(bool)
        rows = {
            (LOOPBACK, "tx"): groups["source_node"].fillna(groups["destination_node"])[local],
            (NETWORK, "tx"): groups["source_node"][~local],
            (NETWORK, "rx"): groups["destination_node"][~local],
        }
        # labels of the groups are their rows
        self._rows = {
            (*key, name): found.to_numpy(np.int64)
            for key, nodes in rows.items()
            for name, found in nodes[nodes.isin(names)].groupby(nodes).groups.items()
        }
        self._known = np.unique(np.concatenate([np.empty(0, np.int64), *self._rows.values()]))
        # at once, because each reading takes all groups of a batch
        self._amounts = {name: traffic.rows(name, self._known) for name in ("payload_bytes", "retransmitted_bytes")}

    def sum(self, what: str, node: str, path: str, direction: str) -> Numbers:
        """Return the bytes that the sockets of a path and direction moved (``payload_bytes``), or sent again."""
        rows = np.searchsorted(self._known, self._rows.get((path, direction, node), []))
        total: Numbers = self._amounts[what][rows].sum(axis=0)
        return total


def _families(traffic: SocketTraffic) -> dict[str, int]:
    """Return the family of addresses with most payload on each node, by its sockets."""
    flows = traffic.flows
    signed = _signed(flows)
    local = (flows["source_node"] == flows["destination_node"]).fillna(False).to_numpy(bool)  # counted once
    sums = [signed.groupby(flows["source_node"]).sum(), signed[~local].groupby(flows["destination_node"][~local]).sum()]
    by_node = pd.concat(sums).groupby(level=0).sum()
    return {str(node): IPV6 if total > 0 else IPV4 for node, total in by_node.items() if total}


def _captured_family(captured: Packets | None) -> int | None:
    """Return the family of addresses with most payload in a node's captures; None without payload."""
    total = 0.0 if captured is None else float(_signed(captured.flows).sum())
    return None if not total else IPV6 if total > 0 else IPV4


def _signed(flows: pd.DataFrame) -> pd.Series[float]:
    """Return the payload of flows, that of IPv4 below zero."""
    families = flows["source"].map(family_of).to_numpy(np.int64)
    payload = flows["payload_bytes"].fillna(0).to_numpy(np.float64)
    return pd.Series(np.where(families == IPV6, payload, -payload))


def _rows(captured: Packets, node: str, traffic: SocketTraffic, path: str, direction: str) -> Integers:
    """Return the rows of the capture's flows with this path and direction."""
    flows = traffic.flows
    known = {
        *flows.loc[flows["source_node"] == node, "source"],
        *flows.loc[flows["destination_node"] == node, "destination"],
    }
    own = own_addresses(captured, known)
    table = captured.flows
    local = table["source"].isin(own) & table["destination"].isin(own) | (table["interface"] == "lo")
    if path == LOOPBACK:
        return np.flatnonzero(local)
    return np.flatnonzero(~local & table["source" if direction == "tx" else "destination"].isin(own))


def _by_class(
    captured: Mapping[str, Packets], traffic: SocketTraffic, cross: CrossTrafficDestinations
) -> dict[str, Numbers]:
    """Sum the payload of each class of flows; a flow captured on several nodes counts once, if possible as sent."""
    ends = ["source", "source_port", "destination", "destination_port"]
    known = traffic.flows.drop_duplicates(ends, keep="last")[[*ends, "traffic_class", "source_node"]]
    parts = []
    for name, packets in captured.items():
        rest = OTHER if name in traffic.nodes and traffic.covered[name] else UNCLASSIFIED
        table = packets.flows[["interface", *ends]].assign(node=name, row=np.arange(len(packets.flows)), rest=rest)
        parts.append(table.merge(known, how="left", on=ends))
    table = pd.concat(parts, ignore_index=True)
    ports = table["source_port"].isin(cross.ports) | table["destination_port"].isin(cross.ports)
    by_port = pd.Series(np.where(cross.has(table) | ports, CROSS, table["rest"]), index=table.index)
    table["traffic_class"] = table["traffic_class"].where(table["traffic_class"].notna(), by_port)
    table["not_sender"] = (table["node"] != table["source_node"]).astype(int)
    # loopback addresses of two nodes are two flows
    table["scope"] = table["node"].where(table["interface"] == "lo", "")
    table = table.sort_values("not_sender", kind="stable").drop_duplicates([*ends, "scope"])
    # without sockets, training and other traffic are not known: missing, not 0
    kinds = CLASSES if any(traffic.covered.values()) else (CROSS,)
    kept = np.all([packets.kept for packets in captured.values()], axis=0)
    result = {kind: np.where(kept, 0.0, np.nan) for kind in dict.fromkeys((*kinds, *table["traffic_class"]))}
    for node, row, kind in zip(table["node"], table["row"], table["traffic_class"], strict=True):
        result[str(kind)] += captured[str(node)].amounts["payload_bytes"][int(row)]
    return result


def _not_captured(captured: Mapping[str, Packets], traffic: SocketTraffic) -> dict[str, float]:
    """Return the share of each class's socket payload that passes no captured interface."""
    flows = traffic.flows
    source, destination = flows["source_node"], flows["destination_node"]
    within = [name for name, packets in captured.items() if packets.has_loopback]
    between = [name for name, packets in captured.items() if packets.has_network]
    local = source.isin(within) | destination.isin(within)
    seen = local.where(flows["local"].astype(bool), source.isin(between) | destination.isin(between))
    payload = flows["payload_bytes"].fillna(0)
    total = payload.groupby(flows["traffic_class"]).sum()
    missed = payload.where(~seen, 0).groupby(flows["traffic_class"]).sum()
    return {str(kind): float(missed[kind] / total[kind]) for kind in total.index if total[kind] > 0}
