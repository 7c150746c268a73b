"""Combines captures at one or several points into payload streams between hosts, in time bins on one clock.

A packet that two hosts captured counts once. Each large flow is a stream of its own; the small flows of a pair of hosts
and a service are combined into one stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.pcap import export_scan_tables
from ringtap.analysis.pcap.captured_traffic import MAX_TRAINING_BINS, Traffic, bins_remedy
from ringtap.core.errors import UsageError
from ringtap.core.units import counted, format_duration

Integers = npt.NDArray[np.int64]

# a flow with this share of all payload is a stream of its own
_OWN_SHARE = 0.003
# captures of a flow that overlap by this share of the shorter span are the same packets twice
_SAME_SHARE = 0.05
_TUNNEL_PORTS = (4789, 6081)  # VXLAN and Geneve, in UDP
_CHUNK = 1 << 20
_PROTOCOLS = ("tcp", "udp", "roce")
_FLOW = ["protocol", "source", "source_port", "destination", "destination_port"]
_STREAM = ["protocol", "source", "destination", "ports"]


@dataclass(frozen=True)
class Vantage:
    """A capture, or the captures of one node.

    Attributes:
        name: file or node.
        traffic: its traffic, possibly filtered.
        to_reference: converts times of its clock (ns, int64) to the common clock; None: it is the common clock.
        addresses: addresses known to be the node's own.
    """

    name: str
    traffic: Traffic
    to_reference: Callable[[Integers], Integers] | None = None
    addresses: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class PayloadStream:
    """Payload from one host to another.

    Attributes:
        protocol: ``tcp``, ``udp``, ``roce`` …
        source: name or address of the sending host.
        destination: name or address of the receiving host.
        ports: ``source port > destination port``, or ``port N`` of a service.
        flows: number of flows (directions of connections) in the stream.
        bins: numbers of the bins with payload, ascending.
        payload: bytes in each of these bins.
        data_packets: number of packets with payload.
        retransmitted_bytes: retransmitted bytes that the captures show.
        answered: True if a capture has packets of the opposite direction.
        seen_by: names of the capture points of the stream.
        copies: number of capture points that captured it at the same time.
    """

    protocol: str
    source: str
    destination: str
    ports: str
    flows: int
    bins: Integers
    payload: Integers
    data_packets: int
    retransmitted_bytes: int
    answered: bool
    seen_by: frozenset[str]
    copies: int = 1

    @cached_property
    def total(self) -> int:
        """Payload bytes."""
        return int(self.payload.sum())

    @property
    def ends(self) -> tuple[str, str]:
        """Sending and receiving host."""
        return self.source, self.destination

    @property
    def name(self) -> str:
        """Name of the stream in texts."""
        return f"{self.source} > {self.destination} {self.protocol} {self.ports}"


@dataclass(frozen=True)
class Streams:
    """All streams of the captures, largest first.

    Attributes:
        start_ns: start of bin 0 on the common clock, CLOCK_REALTIME.
        bin_ns: width of a bin.
        bins: number of bins.
        streams: the streams.
        places: names of the capture points.
    """

    start_ns: int
    bin_ns: int
    bins: int
    streams: tuple[PayloadStream, ...]
    places: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """Payload bytes of all streams."""
        return sum(stream.total for stream in self.streams)

    def dense(self, members: Sequence[PayloadStream]) -> Integers:
        """Return the summed payload of some streams in every bin, shape (bins,)."""
        result = np.zeros(self.bins, np.int64)
        for stream in members:
            result[stream.bins] += stream.payload
        return result


def between_hosts(streams: Iterable[PayloadStream]) -> dict[tuple[str, str], list[PayloadStream]]:
    """Return streams by sending and receiving host."""
    pairs: dict[tuple[str, str], list[PayloadStream]] = {}
    for stream in streams:
        pairs.setdefault(stream.ends, []).append(stream)
    return pairs


def streams_of(vantages: Sequence[Vantage], names: dict[str, str] | None = None) -> Streams:
    """Combine the captures of several points on one clock, counting each packet once.

    Args:
        vantages: the captures.
        names: name of the host by address.

    Raises:
        UsageError: the captures hold no payload, or span too many bins.
    """
    flows = pd.concat([_flows(place, vantage) for place, vantage in enumerate(vantages)], ignore_index=True)
    if not len(flows):
        packets = sum(vantage.traffic.counts["packets"] for vantage in vantages)
        raise UsageError(
            f"{', '.join(vantage.name for vantage in vantages)}: {counted(packets, 'packet')} and no payload of TCP, "
            "UDP or RoCE in them, so there is no training to find: capture the interface that the job uses"
        )
    known = {address: vantage.name for vantage in vantages for address in vantage.addresses} | (names or {})
    for side in ("source", "destination"):
        flows[f"{side}_address"] = flows[side]
        flows[side] = flows[side].map(lambda address: known.get(address, address))
    flows["stream"] = _stream_numbers(flows)
    bin_ns = vantages[0].traffic.bin_ns
    places = sorted(set(flows["place"].tolist()))
    parts = [_cells(vantages[place], flows[flows["place"] == place], bin_ns) for place in places]
    cells = pd.concat(parts, ignore_index=True)
    first_bin = int(cells["bin"].min())
    cells["bin"] -= first_bin
    bins = int(cells["bin"].max()) + 1
    if bins > MAX_TRAINING_BINS:
        seconds = format_duration(bins * bin_ns / 1e9)
        jumps = max((vantage.traffic.counts for vantage in vantages), key=lambda counts: counts.get("time_jumps", 0))
        which = f"{seconds} in bins of {format_duration(bin_ns / 1e9)} are {bins:,} bins"
        raise UsageError(f"{which}: {bins_remedy(jumps)}")
    chosen, copies = _seen_once(cells, flows, vantages)
    of = dict(iter(flows.groupby("stream")))
    found = [_stream(part, of[number], vantages, copies[int(str(number))]) for number, part in chosen.groupby("stream")]
    found.sort(key=lambda stream: -stream.total)
    return Streams(first_bin * bin_ns, bin_ns, bins, tuple(found), tuple(vantage.name for vantage in vantages))


def _flows(place: int, vantage: Vantage) -> pd.DataFrame:
    """Return the directions with payload of a capture's conversations."""
    rows = vantage.traffic.scanned.conversations
    inner = rows["layer"] == 1
    # packets inside a tunnel have the real hosts; the tunnel's own packets are the same bytes again
    ports = np.stack([rows["a_port"], rows["b_port"]])
    tunnel = ~inner & np.isin(ports, _TUNNEL_PORTS).any(axis=0) & inner.any()
    counts = vantage.traffic.selected & (rows["payload"].reshape(-1) > 0) & np.repeat(~tunnel, 2)
    numbers = np.flatnonzero(counts)
    columns = export_scan_tables.flow_columns(rows, numbers)
    table = pd.DataFrame({name: columns[name] for name in (*_FLOW, "payload", "data_packets", "retransmitted_bytes")})
    answers = numbers ^ 1
    answered = vantage.traffic.selected[answers] & (rows["packets"].reshape(-1)[answers] > 0)
    table = table.assign(place=place, flow=numbers, answered=answered)
    return table[table["protocol"].isin(_PROTOCOLS)]


def _stream_numbers(flows: pd.DataFrame) -> pd.Series[int]:
    """Return the stream number of each flow; also set ``ports``."""
    key = flows.groupby(_FLOW, sort=False)
    most = key["payload"].transform("max")
    total = float(key["payload"].max().sum())
    own = most >= _OWN_SHARE * total
    direct = flows["source_port"].astype(str) + " > " + flows["destination_port"].astype(str)
    flows["ports"] = direct.where(own, _services(flows))
    return flows.groupby(_STREAM, sort=False).ngroup()


def _services(flows: pd.DataFrame) -> pd.Series[str]:
    """Return the service port of each flow: that of its two ports which more flows of the same hosts use."""
    hosts = [np.minimum(flows["source"], flows["destination"]), np.maximum(flows["source"], flows["destination"])]
    ends = [
        pd.DataFrame({"low": hosts[0], "high": hosts[1], "port": flows[f"{side}_port"]})
        for side in ("source", "destination")
    ]
    counts = pd.concat(ends).groupby(["low", "high", "port"]).size()
    often = [end.join(counts.rename("often"), on=["low", "high", "port"])["often"].to_numpy() for end in ends]
    port = np.where(often[0] > often[1], flows["source_port"], flows["destination_port"])
    return pd.Series([f"port {number}" for number in port], index=flows.index)


def _cells(vantage: Vantage, flows: pd.DataFrame, bin_ns: int) -> pd.DataFrame:
    """Sum the payload of a capture by stream and bin of the common clock; bins are counted since the epoch."""
    scanned = vantage.traffic.scanned
    stream = np.full(2 * len(scanned.conversations), -1, np.int64)
    stream[flows["flow"].to_numpy()] = flows["stream"].to_numpy()
    parts = []
    for at in range(0, len(scanned.cells), _CHUNK):
        cells = scanned.cells[at : at + _CHUNK]
        number = stream[cells["flow"]]
        keep = (number >= 0) & (cells["payload"] > 0)
        part = {"stream": number[keep], "bin": cells["bin"][keep].astype(np.int64), "payload": cells["payload"][keep]}
        parts.append(pd.DataFrame(part).astype("int64").groupby(["stream", "bin"], as_index=False).sum())
    table = pd.concat(parts, ignore_index=True)
    time_ns = scanned.start_ns + table["bin"].to_numpy() * bin_ns
    if vantage.to_reference is not None:
        # on the common clock, a bin overlaps two bins: it counts in the one with the larger part
        time_ns = vantage.to_reference(time_ns) + bin_ns // 2
    table["bin"] = time_ns // bin_ns
    place = int(flows["place"].iloc[0])
    summed: pd.DataFrame = table.groupby(["stream", "bin"], as_index=False)[["payload"]].sum()
    return summed.assign(place=place)


def _seen_once(
    cells: pd.DataFrame, flows: pd.DataFrame, vantages: Sequence[Vantage]
) -> tuple[pd.DataFrame, Counter[int]]:
    """Drop duplicate cells of streams that several points captured: keep the sender's, else those with more payload.

    Returns:
        The remaining cells, and the number of points that captured each stream at the same time.
    """
    copies = Counter[int](cells["stream"].unique().tolist())
    if len(vantages) == 1:
        return cells, copies
    seen = cells.groupby(["stream", "place"]).agg(first=("bin", "min"), last=("bin", "max"), payload=("payload", "sum"))
    seen = seen.reset_index()
    own = {place: _most_frequent(vantage) for place, vantage in enumerate(vantages)}
    source = flows.drop_duplicates("stream").set_index("stream")["source_address"]
    at_sender = [source[stream] in own[place] for stream, place in zip(seen["stream"], seen["place"], strict=True)]
    seen = seen.assign(at_sender=at_sender)
    seen = seen.sort_values(["stream", "at_sender", "payload"], ascending=[True, False, False])
    taken: dict[int, list[tuple[int, int]]] = {}
    keep = []
    rows = zip(*(seen[name].tolist() for name in ("stream", "place", "first", "last")), strict=True)
    for stream, place, first, last in rows:
        spans = taken.setdefault(stream, [])
        same = any(
            min(last, end) - max(first, begin) > _SAME_SHARE * min(last - first, end - begin) for begin, end in spans
        )
        if same:
            copies[stream] += 1
        else:
            spans.append((first, last))
            keep.append((stream, place))
    pairs = pd.MultiIndex.from_tuples(keep, names=["stream", "place"])
    return cells[pd.MultiIndex.from_frame(cells[["stream", "place"]]).isin(pairs)], copies


def _most_frequent(vantage: Vantage) -> frozenset[str]:
    """Return the addresses of the capturing node: known ones, else the address in most packets."""
    if vantage.addresses:
        return vantage.addresses
    rows = vantage.traffic.scanned.conversations
    packets = rows["packets"].sum(axis=1).astype(np.int64)
    texts = [address for end in ("a", "b") for address in export_scan_tables.addresses(rows[end], rows["family"])]
    counts = pd.Series(np.concatenate([packets, packets])).groupby(np.array(texts)).sum()
    return frozenset([str(counts.idxmax())])


def _stream(part: pd.DataFrame, mine: pd.DataFrame, vantages: Sequence[Vantage], copies: int) -> PayloadStream:
    row = mine.iloc[0]
    by_bin = part.groupby("bin")["payload"].sum()
    used = mine[mine["place"].isin(part["place"].unique())]
    return PayloadStream(
        str(row["protocol"]),
        str(row["source"]),
        str(row["destination"]),
        str(row["ports"]),
        len(mine.drop_duplicates(_FLOW)),
        by_bin.index.to_numpy(np.int64),
        by_bin.to_numpy(np.int64),
        int(used["data_packets"].sum()),
        int(used["retransmitted_bytes"].sum()),
        bool(mine["answered"].any()),
        frozenset(vantages[place].name for place in mine["place"].unique()),
        copies,
    )
