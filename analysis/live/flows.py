"""TCP flows of all nodes: sender, receiver, rate and kind of traffic.

A connection is two flows. A flow is taken from the socket that sends it. If only the receiver's node is recorded, it is
taken from the receiver's socket, without the sender's round trip, window and retransmissions.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringtap.analysis.live.recent_counters import Keyed, RecordLayout
from ringtap.analysis.runs.tail import Record
from ringtap.core.schema import CROSS_COMMAND, CROSS_PORTS

Traffic = Literal["training", "cross", "other"]

_IPV6 = 10
_MAX_OWNERS = 50_000
_MAX_ENDED = 1_000  # sockets and processes that ended, whose owners are kept
_MAX_SOCKETS = 10_000
_FIRST_SAMPLE_NS = 5_000_000_000  # an agent takes it within this time from its start
_COUNTERS = ("bytes_acked", "bytes_received", "total_retrans")
_CROSS_PORTS = frozenset(port.to_bytes(2, "big") for port in CROSS_PORTS)

End = tuple[str, int]


@dataclass(frozen=True)
class LiveFlow:
    """One direction of a TCP connection over about the last second.

    Attributes:
        traffic: kind of traffic.
        source: node (or address) and port of the sender.
        destination: the same of the receiver.
        rate_bps: payload without retransmissions.
        retransmissions_per_s: segments; None, as the next four, if only the receiver is recorded.
        rtt_s: smoothed round trip.
        cwnd_segments: congestion window.
        delivery_bps: delivery rate as the kernel estimates it.
        queued_bytes: bytes written by the program and not yet sent.
        rank: rank of the process whose socket the flow is taken from.
        command: its command line.
    """

    traffic: Traffic
    source: str
    destination: str
    rate_bps: float
    retransmissions_per_s: float | None = None
    rtt_s: float | None = None
    cwnd_segments: int | None = None
    delivery_bps: float | None = None
    queued_bytes: int | None = None
    rank: int | None = None
    command: str = ""


class Owners:
    """Owners of a node's sockets, from sockets/owners.jsonl and host/processes.jsonl; only the newest are kept."""

    def __init__(self) -> None:
        self._by_inode: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.processes: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.step_ranks: dict[int, int] = {}  # by pid: the ranks that processes log in their process group

    def add_owner(self, item: dict[str, Any]) -> None:
        """Add a line of owners.jsonl."""
        _put(self._by_inode, item.get("inode"), item)

    def add_process(self, item: dict[str, Any]) -> None:
        """Add a line of processes.jsonl."""
        _put(self.processes, item.get("pid"), item)

    def forget_ended(self, inodes: Collection[int], pids: Collection[int] | None) -> None:
        """Forget the owners of all but the newest sockets and processes that ended.

        Args:
            inodes: the sockets that are there.
            pids: the processes that are there; None if that is not known.
        """
        for known, there in ((self._by_inode, inodes), (self.processes, self.processes if pids is None else pids)):
            ended = [key for key in known if key not in there] if len(known) > len(there) + 2 * _MAX_ENDED else []
            for key in ended[:-_MAX_ENDED]:
                del known[key]

    def of(self, inode: int) -> dict[str, Any]:
        """Return the owner of a socket; empty if it is not known."""
        owner = self._by_inode.get(inode, {})
        return owner and owner | {"rank": self.rank_of(owner)}

    def rank_of(self, process: Mapping[str, Any]) -> int | None:
        """Return the rank of a process by its process group, else by its environment."""
        rank: int | None = self.step_ranks.get(process.get("pid", 0), process.get("rank"))
        return rank

    def traffic(self, inode: int) -> Traffic | None:
        """Return the kind of traffic of a socket, by its owner; None if the owner is not known."""
        owner = self.of(inode)
        if not owner:
            return None
        is_cross = owner.get("rank") is None and CROSS_COMMAND.search(str(owner.get("command") or ""))
        return "cross" if is_cross else "training"  # only processes of the job are recorded as owners


def _put(into: OrderedDict[int, dict[str, Any]], key: Any, item: dict[str, Any]) -> None:
    if isinstance(key, int):
        into[key] = item
        into.move_to_end(key)
        while len(into) > _MAX_OWNERS:
            into.popitem(last=False)


@dataclass(frozen=True)
class _Socket:
    """Attributes of a socket that a flow needs."""

    node: str
    key: Any
    local: End
    remote: End
    inode: int
    owner: Traffic | None


@dataclass
class SocketCounts:
    """Payload and retransmitted segments of sockets of one kind of traffic."""

    sent_bytes: int = 0
    received_bytes: int = 0
    retransmissions: int = 0

    def add(self, counts: Sequence[int]) -> None:
        """Add the growth of a socket's counters, in the order of `_COUNTERS`."""
        self.sent_bytes += counts[0]
        self.received_bytes += counts[1]
        self.retransmissions += counts[2]


class SocketTotals:
    """Totals over a node's sockets, those that are gone included, by kind of traffic.

    The kind is that of the socket's owner on this node, else that of its ports. A socket that opened during the
    recording counts from its first byte, another from its first record.

    Args:
        owners: owners of the sockets.

    Attributes:
        began_ns: start of the recording, CLOCK_REALTIME; None if not known.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self.began_ns: int | None = None
        self._begin_ns: int | None = None
        self._first: dict[int, tuple[int, ...]] = {}
        self._latest: dict[int, tuple[tuple[int, ...], int, bool]] = {}
        self._gone: dict[Traffic, SocketCounts] = {}

    def feed(self, layout: RecordLayout, batch: Sequence[Record], is_begun: bool) -> None:
        """Add records.

        Args:
            layout: columns of the records.
            batch: the records.
            is_begun: True if earlier records of the log were not read.
        """
        at = layout.index
        mono, cookie, state, inode, sport, dport = (
            at[name] for name in ("mono_ns", "cookie", "state", "inode", "sport", "dport")
        )
        sent, received, again = (at[name] for name in _COUNTERS)
        if self._begin_ns is None and not is_begun:
            # a log that starts late had no sockets at first
            is_late = self.began_ns and batch[0][at["t_ns"]] - self.began_ns > _FIRST_SAMPLE_NS
            self._begin_ns = -1 if is_late else batch[0][mono]
        for record in batch:
            key, counts = record[cookie], (record[sent], record[received], record[again])
            if key not in self._first:
                if len(self._first) >= _MAX_SOCKETS:
                    continue
                is_new = self._begin_ns is not None and record[mono] > self._begin_ns
                self._first[key] = (0, 0, 0) if is_new else counts
            is_cross = not _CROSS_PORTS.isdisjoint((record[sport], record[dport]))
            self._latest[key] = (counts, record[inode], is_cross)
            if record[state] == 0:
                self._count(key, self._gone)
                del self._first[key], self._latest[key]

    @property
    def inodes(self) -> set[int]:
        """The sockets that are there."""
        return {inode for _, inode, _ in self._latest.values()}

    def _count(self, key: int, totals: dict[Traffic, SocketCounts]) -> None:
        counts, inode, is_cross = self._latest[key]
        traffic = self._owners.traffic(inode) or ("cross" if is_cross else "other")
        grown = [max(0, after - before) for before, after in zip(self._first[key], counts, strict=True)]
        totals.setdefault(traffic, SocketCounts()).add(grown)

    def by_traffic(self) -> dict[Traffic, SocketCounts]:
        """Return the totals of each kind of traffic that was seen."""
        totals = {traffic: dataclasses.replace(counts) for traffic, counts in self._gone.items()}
        for key in self._latest:
            self._count(key, totals)
        return totals


def flows(sockets: Mapping[str, Keyed], owners: Mapping[str, Owners]) -> list[LiveFlow]:
    """Return the flows that moved within the last second, the fastest first.

    Args:
        sockets: records of the sockets, by node.
        owners: owners of the sockets, by the same nodes.
    """
    found: list[_Socket] = []
    node_of: dict[str, str] = {}
    for node, series in sockets.items():
        for key in series.active():
            socket = _socket(node, key, series, owners[node])
            found.append(socket)
            node_of.setdefault(socket.local[0], node)
    by_ends = {(socket.local, socket.remote): socket for socket in found}
    names = node_of if len(sockets) > 1 else {}
    rows: list[LiveFlow] = []
    for socket in found:
        other_end = by_ends.get((socket.remote, socket.local))
        traffic = socket.owner or (other_end.owner if other_end else None) or _by_port(socket)
        details = (traffic, sockets[socket.node], owners[socket.node].of(socket.inode), names)
        rows += _sent(socket, *details)
        if other_end is None:
            rows += _received(socket, *details)
    return sorted(rows, key=lambda flow: -flow.rate_bps)


def _socket(node: str, key: Any, series: Keyed, owners: Owners) -> _Socket:
    assert series.layout is not None
    record, at = series.latest[key], series.layout.index
    local = _end(node, record, at["family"], at["source"], at["sport"])
    remote = _end(node, record, at["family"], at["destination"], at["dport"])
    inode = int(record[at["inode"]])
    return _Socket(node, key, local, remote, inode, owners.traffic(inode))


def _end(node: str, record: Record, family: int, address: int, port: int) -> End:
    """Return address and port of an end; a loopback address is prefixed with its node."""
    packed: bytes = record[address]
    parsed: ipaddress.IPv4Address | ipaddress.IPv6Address
    if record[family] == _IPV6:
        ipv6 = ipaddress.IPv6Address(packed)
        parsed = ipv6.ipv4_mapped or ipv6
    else:
        parsed = ipaddress.IPv4Address(packed[:4])
    text = f"{node}/{parsed}" if parsed.is_loopback else str(parsed)
    return text, int.from_bytes(record[port], "big")


def _by_port(socket: _Socket) -> Traffic:
    """Return the kind of traffic by the ports, for connections without a known owner at either end."""
    return "cross" if {socket.remote[1], socket.local[1]}.intersection(CROSS_PORTS) else "other"


def _sent(
    socket: _Socket, traffic: Traffic, series: Keyed, owner: Mapping[str, Any], names: Mapping[str, str]
) -> list[LiveFlow]:
    sent = series.rate(socket.key, "bytes_acked")
    retransmissions = series.rate(socket.key, "total_retrans")
    if sent is None or (sent <= 0 and not retransmissions):
        return []
    rtt_us, cwnd = series.value(socket.key, "rtt_us"), series.value(socket.key, "snd_cwnd")
    delivery, queued = series.value(socket.key, "delivery_rate_bytes_per_s"), series.value(socket.key, "notsent_bytes")
    flow = LiveFlow(
        traffic,
        _named(socket.local, names),
        _named(socket.remote, names),
        sent * 8,
        retransmissions,
        None if rtt_us is None else rtt_us / 1e6,
        None if cwnd is None else int(cwnd),
        None if delivery is None else delivery * 8,
        None if queued is None else int(queued),
        owner.get("rank"),
        str(owner.get("command") or ""),
    )
    return [flow]


def _received(
    socket: _Socket, traffic: Traffic, series: Keyed, owner: Mapping[str, Any], names: Mapping[str, str]
) -> list[LiveFlow]:
    received = series.rate(socket.key, "bytes_received")
    if not received:
        return []
    ends = _named(socket.remote, names), _named(socket.local, names)
    return [LiveFlow(traffic, *ends, received * 8, rank=owner.get("rank"), command=str(owner.get("command") or ""))]


def _named(end: End, names: Mapping[str, str]) -> str:
    """Return node and port if the node of an address is known, else address and port."""
    node, slash, address = end[0].partition("/")
    name = names.get(end[0]) or (address if slash else node)
    return f"[{name}]:{end[1]}" if ":" in name else f"{name}:{end[1]}"
