"""Lists the TCP flows of all nodes: sender, receiver, rate and kind of traffic.

A connection is two flows. A flow is taken from the socket that sends it. If only the receiver's node is recorded, it is
taken from the receiver's socket, without the sender's round trip, window and retransmissions.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ringtap.analysis.live.recent_counters import Keyed
from ringtap.analysis.runs.growing_files import Record
from ringtap.analysis.runs.traffic_classes import CROSS, OTHER, traffic_rules
from ringtap.core.append_only_logs import RecordFile
from ringtap.core.counter_growth import growth
from ringtap.core.run_directory_schema import CROSS_COMMAND, CROSS_PORTS, NCCL_RAS_PORT
from ringtap.core.tcp_info import ENDED

_IPV6 = 10
_MAX_OWNERS = 50_000
_MAX_ENDED = 1_000  # sockets and processes that ended, whose owners are kept
_MAX_SOCKETS = 10_000
_FIRST_SAMPLE_NS = 5_000_000_000  # an agent takes it within this time from its start
_COUNTERS = ("bytes_acked", "bytes_received", "total_retrans")
# ports as they stand in a record, with the traffic that they stand for
_PORT_CLASSES = {port.to_bytes(2, "big"): CROSS for port in CROSS_PORTS} | {NCCL_RAS_PORT.to_bytes(2, "big"): OTHER}

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

    traffic: str
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


class Owner(NamedTuple):
    """Rank, if it has one, and command line of the process of a socket; None: not known."""

    rank: int | None
    command: str | None


NOBODY = Owner(None, None)


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

    def of(self, inode: int) -> Owner:
        """Return the owner of a socket."""
        item = self._by_inode.get(inode)
        return NOBODY if item is None else Owner(self.rank_of(item), str(item.get("command") or ""))

    def rank_of(self, process: Mapping[str, Any]) -> int | None:
        """Return the rank of a process by its process group, else by its environment."""
        rank: int | None = self.step_ranks.get(process.get("pid", 0), process.get("rank"))
        return rank


def _put(into: OrderedDict[int, dict[str, Any]], key: Any, item: dict[str, Any]) -> None:
    if isinstance(key, int):
        into[key] = item
        into.move_to_end(key)
        while len(into) > _MAX_OWNERS:
            into.popitem(last=False)


@lru_cache(_MAX_SOCKETS)
def traffic_of(own: Owner, of_other_end: Owner, ports: str) -> str:
    """Return the kind of traffic of a connection by the owners of its ends and by its ports (`port_class`).

    The run's traffic logs are not followed.
    """
    ends = own, of_other_end
    ranks = [end.rank is not None for end in ends]
    generators = [CROSS_COMMAND.search(end.command or "") is not None for end in ends]
    owned = [end.command is not None for end in ends]
    rules = traffic_rules(ranks, generators, owned, False, ports == CROSS, ports == OTHER)
    return next((traffic for applies, traffic, _ in rules if applies), OTHER)


@dataclass(frozen=True)
class _Socket:
    """Attributes of a socket that a flow needs."""

    node: str
    key: Any
    local: End
    remote: End
    owner: Owner


@dataclass
class SocketCounts:
    """Payload and retransmitted segments of sockets of one kind of traffic; None once a counter of one was reset."""

    sent_bytes: float | None = 0
    received_bytes: float | None = 0
    retransmissions: float | None = 0

    def add(self, grown: Sequence[float | None]) -> None:
        """Add the growth of a socket's counters, in the order of `_COUNTERS`."""
        for item, amount in zip(dataclasses.fields(self), grown, strict=True):
            known = getattr(self, item.name)
            setattr(self, item.name, None if known is None or amount is None else known + amount)


class SocketTotals:
    """Totals over a node's sockets, those that are gone included, by kind of traffic.

    The kind is by the socket's owner on this node, else by its ports. A socket that opened during the
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
        self._widths_bits = [0] * len(_COUNTERS)
        self._first: dict[int, tuple[int, ...]] = {}
        self._latest: dict[int, tuple[tuple[int, ...], int, str]] = {}
        self._gone: dict[str, SocketCounts] = {}

    def feed(self, file: RecordFile, batch: Sequence[Record], is_begun: bool) -> None:
        """Add records.

        Args:
            file: header of their log.
            batch: the records.
            is_begun: True if earlier records of the log were not read.
        """
        at = file.index
        mono, cookie, state, inode, sport, dport = (
            at[name] for name in ("mono_ns", "cookie", "state", "inode", "sport", "dport")
        )
        sent, received, again = (at[name] for name in _COUNTERS)
        self._widths_bits = [file.column(name).wraps_at_bits for name in _COUNTERS]
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
            self._latest[key] = (counts, record[inode], port_class(record[sport], record[dport]))
            if record[state] == ENDED:
                self._count(key, self._gone)
                del self._first[key], self._latest[key]

    @property
    def inodes(self) -> set[int]:
        """The sockets that are there."""
        return {inode for _, inode, _ in self._latest.values()}

    def _count(self, key: int, totals: dict[str, SocketCounts]) -> None:
        counts, inode, ports = self._latest[key]
        traffic = traffic_of(self._owners.of(inode), NOBODY, ports)
        grown = map(growth, self._first[key], counts, self._widths_bits)
        totals.setdefault(traffic, SocketCounts()).add(list(grown))

    def by_traffic(self) -> dict[str, SocketCounts]:
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
        ports = port_class(*(port.to_bytes(2, "big") for _, port in (socket.remote, socket.local)))
        traffic = traffic_of(socket.owner, other_end.owner if other_end else NOBODY, ports)
        details = (traffic, sockets[socket.node], names)
        rows += _sent(socket, *details)
        if other_end is None:
            rows += _received(socket, *details)
    return sorted(rows, key=lambda flow: -flow.rate_bps)


def _socket(node: str, key: Any, series: Keyed, owners: Owners) -> _Socket:
    assert series.file is not None
    record, at = series.latest[key], series.file.index
    local = _end(node, record, at["family"], at["source"], at["sport"])
    remote = _end(node, record, at["family"], at["destination"], at["dport"])
    return _Socket(node, key, local, remote, owners.of(int(record[at["inode"]])))


def port_class(*ports: bytes) -> str:
    """Return the traffic that one of the ports, as they stand in a record, stands for; empty if none does."""
    return next((_PORT_CLASSES[port] for port in ports if port in _PORT_CLASSES), "")


@lru_cache(_MAX_SOCKETS)
def address_of(family: int, packed: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of an end; an IPv4 address in IPv6 is an IPv4 address."""
    if family == _IPV6:
        ipv6 = ipaddress.IPv6Address(packed)
        return ipv6.ipv4_mapped or ipv6
    return ipaddress.IPv4Address(packed[:4])


def _end(node: str, record: Record, family: int, address: int, port: int) -> End:
    """Return address and port of an end; a loopback address is prefixed with its node."""
    parsed = address_of(record[family], record[address])
    text = f"{node}/{parsed}" if parsed.is_loopback else str(parsed)
    return text, int.from_bytes(record[port], "big")


def _sent(socket: _Socket, traffic: str, series: Keyed, names: Mapping[str, str]) -> Iterator[LiveFlow]:
    sent = series.rate(socket.key, "bytes_acked")
    retransmissions = series.rate(socket.key, "total_retrans")
    if sent is None or (sent <= 0 and not retransmissions):
        return
    rtt_us, cwnd = series.value(socket.key, "rtt_us"), series.value(socket.key, "snd_cwnd")
    delivery, queued = series.value(socket.key, "delivery_rate_bytes_per_s"), series.value(socket.key, "notsent_bytes")
    yield LiveFlow(
        traffic,
        _named(socket.local, names),
        _named(socket.remote, names),
        sent * 8,
        retransmissions,
        None if rtt_us is None else rtt_us / 1e6,
        None if cwnd is None else int(cwnd),
        None if delivery is None else delivery * 8,
        None if queued is None else int(queued),
        socket.owner.rank,
        socket.owner.command or "",
    )


def _received(socket: _Socket, traffic: str, series: Keyed, names: Mapping[str, str]) -> Iterator[LiveFlow]:
    received = series.rate(socket.key, "bytes_received")
    if received:
        ends = _named(socket.remote, names), _named(socket.local, names)
        yield LiveFlow(traffic, *ends, received * 8, rank=socket.owner.rank, command=socket.owner.command or "")


def _named(end: End, names: Mapping[str, str]) -> str:
    """Return node and port if the node of an address is known, else address and port."""
    node, slash, address = end[0].partition("/")
    name = names.get(end[0]) or (address if slash else node)
    return f"[{name}]:{end[1]}" if ":" in name else f"{name}:{end[1]}"
