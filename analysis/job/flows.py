"""Finds the flows between the processes of a run: their owners, their classes, and their bytes in each iteration."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.runs.node_batches import Batches, BatchTable, Frames
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers, add_up, shares
from ringtap.analysis.runs.sockets import BUSY, COUNTERS, LOST, Growth, socket_log
from ringtap.analysis.runs.traffic_classes import CLASSES, OTHER, traffic_rules
from ringtap.core.json_validation import Number, ShapeError, load_json
from ringtap.core.run_directory_schema import (
    CROSS_COMMAND,
    CROSS_PORTS,
    NCCL_RAS_PORT,
    OWNER,
    OWNERS_JSONL,
    SOCKETS_REC,
)

_SOCKET_COLUMNS = [
    *("cookie", "family", "local", "local_port", "remote", "remote_port", "inode", "first_ns", "last_ns", "closed"),
    *("rtt_us", "min_rtt_us", "node", "number", "rank", "command", "every_s", "all_every_s"),
]
AMOUNTS = ("payload_bytes", "retransmitted_bytes", "retransmissions", "ce_marked", LOST)


def read_sockets(nodes: Mapping[str, NodeLogs]) -> Frames:
    """Return the ``sockets`` of some nodes (`sockets_of`)."""
    found = [table for node in nodes.values() if (table := sockets_of(node)) is not None]
    return {"sockets": pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=_SOCKET_COLUMNS)}


def sockets_of(node: NodeLogs) -> pd.DataFrame | None:
    """Return a node's sockets with their owners; None if none were recorded.

    ``every_s`` and ``all_every_s`` are the sampling periods of busy sockets and of all sockets.
    """
    log = socket_log(node)
    if log is None or not len(log.sockets):
        return None
    owners = _owners(node)
    owner = [owners.get(inode, (None, None)) for inode in log.sockets["inode"].tolist()]
    table = log.sockets.assign(node=node.name, number=np.arange(len(owner)))
    table["rank"] = pd.array([rank for rank, _ in owner], "Int64")
    table["command"] = np.array([command for _, command in owner], object)
    return table.assign(every_s=log.every_s, all_every_s=log.all_every_s)


def _owners(node: NodeLogs) -> dict[int, tuple[int | None, str | None]]:
    """Return rank and command of each inode; of several processes with one socket, those of the lowest rank."""
    found: dict[int, tuple[int | None, str | None]] = {}
    for line in node.lines(OWNERS_JSONL, OWNER):
        inode, rank, command = line["inode"], line.get("rank"), line.get("command")
        if line.get("pid") is not None:
            rank = node.rank_of_pid.get(line["pid"], rank)
        other = found.get(inode, (None, None))[0]
        if inode not in found or (rank is not None and (other is None or rank < other)):
            text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
            found[inode] = rank, text
    return found


@dataclass(frozen=True)
class SocketBytes:
    """Bytes that the sockets of a node sent and received.

    Attributes:
        groups: numbers of the groups that the sockets belong to.
        amounts: by name of `AMOUNTS`, growth of each of these groups in each bin, shape (groups, bins).
        sums: growth of each of `COUNTERS`, one number per socket; busy time only up to the last acknowledged byte.
        covered: the bins that the log covers.
    """

    groups: Integers
    amounts: dict[str, Numbers]
    sums: dict[str, Numbers]
    covered: npt.NDArray[np.bool_]


def _add_busy(grown: Growth, busy_us: Numbers, unanswered_us: Numbers) -> None:
    """Add to the busy time of each socket what comes before its last acknowledged byte.

    What comes after it is kept in ``unanswered_us`` until another byte is acknowledged: a peer that is gone answers no
    more, and the time for which a sender waits for it says nothing about their link.
    """
    rows, sockets = np.arange(len(grown.end)), len(busy_us)
    last = np.full(sockets, -1)
    is_acked = grown.amounts["bytes_acked"] > 0
    np.maximum.at(last, grown.end[is_acked], rows[is_acked])  # the rows of a socket are in order of time
    is_before, grown_us = rows <= last[grown.end], grown.amounts[BUSY]
    before_us, after_us = (
        np.bincount(grown.end, np.where(keep, grown_us, 0.0), sockets) for keep in (is_before, ~is_before)
    )
    has_acked = last >= 0
    busy_us += before_us + np.where(has_acked, unanswered_us, 0.0)
    unanswered_us[:] = np.where(has_acked, 0.0, unanswered_us) + after_us


def socket_bytes_of(node: NodeLogs, borders: Borders, out_of: Integers, into: Integers) -> SocketBytes:
    """Sum the bytes of a node's sockets by group and bin.

    Args:
        node: the node's logs.
        borders: the bins by the node's clock.
        out_of: for each socket, the group that its sent bytes belong to; -1: none.
        into: the group that its received bytes belong to; -1: none.
    """
    groups = np.unique(np.concatenate((out_of, into)))
    groups = groups[groups >= 0]
    sent_groups, received_groups = (np.where(side < 0, -1, np.searchsorted(groups, side)) for side in (out_of, into))
    bins = borders.bins
    amounts = {name: np.zeros((len(groups), bins)) for name in AMOUNTS}
    sums = {name: np.zeros(len(out_of)) for name in COUNTERS}
    unanswered_us = np.zeros(len(out_of))
    log = socket_log(node)
    for grown in log.growth() if log is not None else ():
        for counter in COUNTERS:
            if counter != BUSY:
                sums[counter] += np.bincount(grown.end, grown.amounts[counter], len(out_of))
        _add_busy(grown, sums[BUSY], unanswered_us)
        if not bins:
            continue
        span, bin_of, share = shares(grown.begin_ns, grown.end_ns, borders.edges_ns)
        part = {counter: grown.amounts[counter][span] * share for counter in (*COUNTERS, LOST)}
        growths = {
            "payload_bytes": part["bytes_acked"],
            "retransmitted_bytes": part["bytes_retrans"],
            "retransmissions": part["total_retrans"],
            "ce_marked": part["delivered_ce"],
            LOST: part[LOST],
        }
        end = grown.end[span]
        for amount, values in growths.items():
            amounts[amount] += add_up(sent_groups[end], bin_of, values, len(groups), bins)
        keep = received_groups[end] >= 0
        values = part["bytes_received"][keep]
        amounts["payload_bytes"] += add_up(received_groups[end][keep], bin_of[keep], values, len(groups), bins)
    return SocketBytes(groups, amounts, sums, node.covers(SOCKETS_REC, borders))


def read_bytes(
    nodes: Mapping[str, NodeLogs],
    counts: list[int],
    out_of: Integers,
    into: Integers,
    edges_ns: Integers,
    class_of: npt.NDArray[Any],
    measured: Integers,
) -> Frames:
    """Sum the bytes of some nodes' sockets.

    Args:
        nodes: the nodes' logs.
        counts: number of sockets of each node; a node with none has no log.
        out_of: as for `socket_bytes_of`, for the sockets of all these nodes.
        into: likewise.
        edges_ns: the bins on the reference clock.
        class_of: class of each group.
        measured: the bins that means are taken over.

    Returns:
        ``amounts``, `AMOUNTS` of each group in each bin, by group and bin, with the number of the ``group``;
        ``means``, the mean ``payload_bytes`` of each ``group``; ``sums``,
        `COUNTERS` of each socket; ``totals``, one row per bin: bytes of each class and the other `AMOUNTS` of all
        classes, and ``covered``, False where a node with sockets was not recorded; ``covered``, the number of ``bins``
        that each ``node``'s log covers.
    """
    bins = max(len(edges_ns) - 1, 0)
    groups = np.unique(np.concatenate((out_of, into)))
    groups = groups[groups >= 0]
    amounts = {name: np.zeros((len(groups), bins)) for name in AMOUNTS}
    sums, covered, covers, first = [], np.ones(bins, bool), [], 0
    for node, count in zip(nodes.values(), counts, strict=True):
        if not count:
            continue
        mine = slice(first, first + count)
        first += count
        borders = Borders(node.clock.from_reference(edges_ns), np.arange(bins))
        found = socket_bytes_of(node, borders, out_of[mine], into[mine])
        sums.append(pd.DataFrame(found.sums))
        covered &= found.covered
        covers.append((node.name, int(found.covered.sum())))
        for name, binned in found.amounts.items():
            amounts[name][np.searchsorted(groups, found.groups)] += binned
    kinds = class_of[groups]
    totals = {f"{kind}_bytes": amounts["payload_bytes"][kinds == kind].sum(axis=0) for kind in CLASSES}
    totals |= {name: amounts[name].sum(axis=0) for name in AMOUNTS[1:]}
    means = amounts["payload_bytes"][:, measured].mean(axis=1) if len(measured) else np.full(len(groups), np.nan)
    return {
        "amounts": pd.DataFrame(
            {"group": np.repeat(groups, bins)} | {name: part.ravel() for name, part in amounts.items()}
        ),
        "means": pd.DataFrame({"group": groups, "payload_bytes": means}),
        "sums": pd.concat(sums, ignore_index=True) if sums else pd.DataFrame(columns=list(COUNTERS), dtype="float64"),
        "totals": pd.DataFrame(totals | {"covered": covered}),
        "covered": pd.DataFrame(covers, columns=["node", "bins"]),
    }


UNCLASSIFIED = "unclassified"  # captured without socket records, so the owner is not known
_PORT_DIGITS = re.compile("[0-9]{1,5}")
_PORT = Number(0, 65535, whole=True)
_IPERF = {"start": {"connected": [{"remote_host": str, "remote_port": _PORT}]}}
# with more flows times iterations than this, amounts are summed by kind of flow
MAX_CELLS = 4_000_000
_END = ["source", "source_port", "destination", "destination_port"]
_FLOW_COLUMNS = [
    *("traffic_class", "why", "source_node", *_END[:2], "source_rank", "destination_node", *_END[2:]),
    *("destination_rank", "local", "measured_at"),
    *("payload_bytes", "retransmitted_bytes", "retransmissions", "ce_marked", "rtt_us", "min_rtt_us", "busy_s"),
    *("rwnd_limited_s", "sndbuf_limited_s", "first_ns", "last_ns", "family", "end", "group"),
]


@dataclass(frozen=True)
class SocketTraffic:
    """Bytes that the sockets sent and received.

    Attributes:
        flows: one row per flow, one direction of a connection (`ringtap.analysis.job.run.Job.flows`), with ``end``, the
            number of its socket, and ``group``, its row in ``groups``.
        groups: flows, or kinds of flows if there are too many flows.
        bins: number of bins.
        parts: for each batch of nodes, the groups that it measured, and their ``amounts`` of `read_bytes`.
        means: mean payload of each group in the bins that means are taken over; NaN without such bins.
        totals: sums over the groups by bin, NaN where a node was not recorded, by column of ``totals`` of `read_bytes`.
        every_s: the longest period of the nodes' socket samples; None without sockets.
        all_every_s: the same for connections with little traffic so far, such as new ones.
        nodes: nodes with a socket log.
        covered: for each of these nodes, the number of bins that its log covers.
    """

    flows: pd.DataFrame
    groups: pd.DataFrame
    bins: int
    parts: list[tuple[Integers, BatchTable]]
    means: Numbers
    totals: dict[str, Numbers]
    every_s: float | None
    all_every_s: float | None
    nodes: list[str]
    covered: dict[str, int]

    @property
    def by_flow(self) -> bool:
        """True if every flow is a group of its own."""
        return len(self.groups) == len(self.flows) > 0

    def total(self, name: str) -> Numbers | None:
        """Return a sum over the groups by bin; NaN where a node was not recorded, None without sockets."""
        return self.totals[name] if self.nodes else None

    def rows(self, amount: str, groups: Integers) -> Numbers:
        """Return one of `AMOUNTS` of groups, shape (groups, bins)."""
        found = np.zeros((len(groups), self.bins))
        for number, (known, _) in enumerate(self.parts):
            place = np.minimum(np.searchsorted(known, groups), max(len(known) - 1, 0))
            mine = np.flatnonzero(known[place] == groups) if len(known) else np.zeros(0, np.int64)
            if len(mine):
                found[mine] += self.part(number, amount)[place[mine]]
        return found

    def part(self, number: int, amount: str) -> Numbers:
        """Return one of `AMOUNTS` of the groups of a batch, shape (groups, bins)."""
        groups, frame = self.parts[number]
        return frame.read([amount])[amount].to_numpy(np.float64).reshape(len(groups), self.bins)


def measure(nodes: Mapping[str, NodeLogs], borders: Borders, measured: Integers, batches: Batches) -> SocketTraffic:
    """Find the flows of a run and the bytes of each.

    Args:
        nodes: the nodes' logs.
        borders: the iterations' borders on the reference clock.
        measured: the iterations that means are taken over.
        batches: the nodes in batches.
    """
    found = [part["sockets"].read() for part in batches.each("sockets", read_sockets)]
    ends = _ends([table for table in found if len(table)])
    flows = _directed(ends)
    flows["traffic_class"], flows["why"] = _classify(flows, CrossTrafficDestinations.of(nodes))
    flows["group"] = _group(flows, borders.bins)
    groups = flows.drop_duplicates("group").sort_values("group", ignore_index=True)
    logged = sorted(ends["node"].unique())
    every_s, all_every_s = (float(ends[name].max()) if logged else None for name in ("every_s", "all_every_s"))
    # rows of one node are adjacent
    counts = ends["node"].value_counts()
    of_batch = [[int(counts.get(name, 0)) for name in names] for names in batches.names]
    sizes = [sum(own) for own in of_batch]
    places = [slice(to - size, to) for size, to in zip(sizes, accumulate(sizes), strict=True)]
    sides = []
    for side in ("sender", "receiver"):
        group = flows[flows["measured_at"] == side].set_index("end")["group"]
        numbers = group.reindex(ends.index, fill_value=-1).to_numpy(np.int64)
        sides.append([numbers[place] for place in places])
    classes = groups["traffic_class"].to_numpy(object)
    shared = (borders.edges_ns, classes, borders.bin_of[measured])
    read = list(batches.each("bytes", read_bytes, of_batch, *sides, shared=shared))
    of_groups = pd.concat([part["means"].read() for part in read]).groupby("group")["payload_bytes"].sum(min_count=1)
    sums = pd.concat([part["sums"].read() for part in read], ignore_index=True)
    known = [np.unique(np.concatenate(pair)) for pair in zip(*sides, strict=True)]
    parts = [(own[own >= 0], part["amounts"]) for own, part in zip(known, read, strict=True)]
    flows = flows.join(_totals(flows, {name: sums[name].to_numpy(np.float64) for name in COUNTERS}))
    return SocketTraffic(
        flows.reindex(columns=_FLOW_COLUMNS),
        groups,
        borders.bins,
        parts,
        of_groups.reindex(groups["group"]).to_numpy(np.float64),
        _join_totals(read),
        every_s,
        all_every_s,
        logged,
        {node: bins for part in read for node, bins in part["covered"].read().itertuples(index=False)},
    )


def _join_totals(parts: Iterable[Mapping[str, BatchTable]]) -> dict[str, Numbers]:
    """Add up the totals of the batches; NaN where one of them does not cover the bin."""
    joined: pd.DataFrame | None = None
    for table in (part["totals"].read() for part in parts):
        both = table if joined is None else joined + table
        joined = both if joined is None else both.assign(covered=joined["covered"] & table["covered"])
    if joined is None:
        return {}
    return {
        str(name): joined[name].where(joined["covered"]).to_numpy(np.float64) for name in joined if name != "covered"
    }


def _ends(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the sockets of all nodes with their owners; ``peer`` is the row of the other end, NA if not recorded."""
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=_SOCKET_COLUMNS)
    table["rank"] = table["rank"].astype("Int64")
    table["scope"] = table["node"].where(_is_loopback(table["local"]), "")
    own, peer = ["local", "local_port", "remote", "remote_port"], ["remote", "remote_port", "local", "local_port"]
    # of successive connections with the same ports, the latest
    latest = table.sort_values("last_ns").drop_duplicates([*own, "scope"], keep="last")
    found = latest[[*peer, "scope"]].set_axis([*own, "scope"], axis=1).assign(peer=latest.index)
    table["peer"] = table.merge(found, how="left", on=[*own, "scope"])["peer"].astype("Int64").to_numpy()
    return table


def _is_loopback(addresses: pd.Series[Any]) -> pd.Series[bool]:
    known = {text: ipaddress.ip_address(text).is_loopback for text in addresses.unique()}
    return addresses.map(known).astype(bool)


def _directed(ends: pd.DataFrame) -> pd.DataFrame:
    """Return both directions of every connection; bytes are measured at the sender if it was recorded."""
    peers = ends.reindex(ends["peer"].to_numpy(dtype="float64", na_value=-1).astype(np.int64))
    local = {"node": ends["node"], "rank": ends["rank"], "command": ends["command"]}
    remote = {name: peers[name].set_axis(ends.index) for name in local}
    names = {"local": "source", "local_port": "source_port", "remote": "destination", "remote_port": "destination_port"}
    out = ends.rename(columns=names).assign(measured_at="sender", end=ends.index)
    back = {"local": "destination", "local_port": "destination_port", "remote": "source", "remote_port": "source_port"}
    into = ends.rename(columns=back).assign(measured_at="receiver", end=ends.index)
    for name, values in local.items():
        out[f"source_{name}"], out[f"destination_{name}"] = values, remote[name]
        into[f"destination_{name}"], into[f"source_{name}"] = values, remote[name]
    flows = pd.concat([out, into[ends["peer"].isna()]], ignore_index=True)
    flows["local"] = flows["source_node"] == flows["destination_node"]
    flows["local"] |= _is_loopback(flows["source"]) | (flows["source"] == flows["destination"])
    return flows


@dataclass(frozen=True)
class CrossTrafficDestinations:
    """Destinations of the run's own cross traffic, from its logs.

    Attributes:
        ends: ``(address, port)`` of receivers.
        ports: ports of receivers whose address is a name.
    """

    ends: frozenset[tuple[str, int]]
    ports: frozenset[int]

    @classmethod
    def of(cls, nodes: Mapping[str, NodeLogs]) -> CrossTrafficDestinations:
        """Read the destinations from the senders' logs and the iperf3 reports of all nodes."""
        ends, ports = set(), set(CROSS_PORTS)
        for node in nodes.values():
            for name in node.names("sent/*.rec"):
                found = node.records(name)
                for end in (found[0].about.get("destinations") or []) if found else []:
                    host, _, port = end.rpartition(":")
                    if not _PORT_DIGITS.fullmatch(port):
                        continue
                    try:
                        ends.add((str(ipaddress.ip_address(host.strip("[]"))), int(port)))
                    except ValueError:
                        ports.add(int(port))
            for name in node.names("sent/*.json"):
                ends |= _iperf_ends(node.path / name)
        return cls(frozenset(ends), frozenset(ports))

    def has(self, flow_ends: pd.DataFrame) -> pd.Series[bool]:
        """Return a mask of the flows to or from these destinations."""
        pairs = pd.MultiIndex.from_tuples(sorted(self.ends) or [("", -1)])
        result = pd.Series(False, index=flow_ends.index)
        for side in ("source", "destination"):
            result |= pd.MultiIndex.from_frame(flow_ends[[side, f"{side}_port"]]).isin(pairs)
        return result


def _iperf_ends(path: Path) -> set[tuple[str, int]]:
    try:
        connected = load_json(path, _IPERF)["start"]["connected"]
    except (OSError, ShapeError):
        return set()
    return {(item["remote_host"], item["remote_port"]) for item in connected}


def _classify(flows: pd.DataFrame, cross: CrossTrafficDestinations) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """Return the class of each flow, and the reason in a few words."""
    ranks = [flows[f"{side}_rank"].notna().to_numpy() for side in ("source", "destination")]
    commands = [flows[f"{side}_command"] for side in ("source", "destination")]
    owned = [of.notna().to_numpy() for of in commands]
    generators = [of.astype("str").str.contains(CROSS_COMMAND, na=False).to_numpy() for of in commands]
    ports = flows["source_port"].isin(cross.ports) | flows["destination_port"].isin(cross.ports)
    ras = (flows[["source_port", "destination_port"]] == NCCL_RAS_PORT).any(axis=1)
    rules = traffic_rules(ranks, generators, owned, cross.has(flows).to_numpy(), ports.to_numpy(), ras.to_numpy())
    conditions = [rule[0] for rule in rules]
    kinds = np.select(conditions, [rule[1] for rule in rules], OTHER)
    why = np.select(conditions, [rule[2] for rule in rules], "neither the job's nor cross traffic")
    return pd.Series(kinds, index=flows.index), pd.Series(why, index=flows.index)


def _group(flows: pd.DataFrame, bins: int) -> Integers:
    if len(flows) * max(bins, 1) <= MAX_CELLS:
        return np.arange(len(flows), dtype=np.int64)
    keys = ["traffic_class", "why", "source_node", "source_rank", "destination_node", "destination_rank", "local"]
    return flows.groupby(keys, dropna=False, sort=False).ngroup().to_numpy().astype(np.int64)


def _totals(flows: pd.DataFrame, sums: dict[str, Numbers]) -> pd.DataFrame:
    """Return the totals of each flow over the recording; values that only a sender has are NaN for the others."""
    end = flows["end"].to_numpy(np.int64)
    of = {name: values[end] if len(values) else np.zeros(0) for name, values in sums.items()}
    sent = (flows["measured_at"] == "sender").to_numpy()
    table = {
        "payload_bytes": np.where(sent, of["bytes_acked"], of["bytes_received"]),
        "retransmitted_bytes": np.where(sent, of["bytes_retrans"], np.nan),
        "retransmissions": np.where(sent, of["total_retrans"], np.nan),
        "ce_marked": np.where(sent, of["delivered_ce"], np.nan),
        "busy_s": np.where(sent, of[BUSY] / 1e6, np.nan),
        "rwnd_limited_s": np.where(sent, of["rwnd_limited_us"] / 1e6, np.nan),
        "sndbuf_limited_s": np.where(sent, of["sndbuf_limited_us"] / 1e6, np.nan),
    }
    return pd.DataFrame(table, index=flows.index)
