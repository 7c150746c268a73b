"""Reads single packets of captures in a span of time: as a table, as dpkt or Scapy packets, or as a pcapng file.

A compiled scan (`scan.Pick`) goes over the captures and copies the packets;
nothing here loops over those of a whole file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import ringtap
from ringtap.analysis.notebook_formatting import documented
from ringtap.analysis.pcap import export_scan_tables, formats
from ringtap.analysis.pcap.byte_sources import CaptureStream
from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.scan import MAX_PICKED_BYTES, TOO_MUCH, Pick, Scan, Scanned, TooMuchError
from ringtap.analysis.pcap.scan_captures import LOG, Progress, feed
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, QUEUE_PAIR
from ringtap.core.capture_file_formats import (
    LINK_COOKED,
    LINK_COOKED2,
    LINK_ETHERNET,
    LINK_IPV4,
    LINK_IPV6,
    LINK_NULL,
    LINK_RAW,
    LINK_RAW_BSD,
)
from ringtap.core.check_api_arguments import path_of
from ringtap.core.errors import UsageError
from ringtap.core.installation import install_command
from ringtap.core.units import counted

if TYPE_CHECKING:
    import pandas as pd

Integers = npt.NDArray[np.int64]
Accepts = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]

PCAPNG = ".pcapng"
_ROW = np.dtype(
    [
        ("time_ns", "i8"),  # by the common clock
        ("at", "i8"),  # of the captured bytes, in words
        ("source", "u4"),  # number of the capture
        ("number", "u4"),  # of the packet in it, from 1
        ("interface", "u4"),
        ("kept", "u4"),
        ("length", "u4"),
        ("flow", "u4"),  # plus one; 0: none
        ("payload", "u4"),
    ]
)
_UNREADABLE = Scanned(np.zeros(0, CONVERSATION), np.zeros(0, CELL), np.zeros(0, QUEUE_PAIR), {}, 0, 1, -1, -1)
_WRITTEN_WORDS = 1 << 22  # words of packets that are written together
# dpkt has no table of its own: LINKTYPE -> module and class
_DPKT = {
    LINK_NULL: ("loopback", "Loopback"),
    LINK_ETHERNET: ("ethernet", "Ethernet"),
    LINK_RAW_BSD: ("ip", "IP"),
    LINK_RAW: ("ip", "IP"),
    LINK_COOKED: ("sll", "SLL"),
    LINK_IPV4: ("ip", "IP"),
    LINK_IPV6: ("ip6", "IP6"),
    LINK_COOKED2: ("sll2", "SLL2"),
}


class RawPacket(NamedTuple):
    """One packet as it was captured.

    Attributes:
        file: name of the capture.
        number: number of the packet in it, from 1, as Wireshark shows it.
        t_ns: time since the epoch, by the clock of the capturing host; in a run, by that of its reference node.
        linktype: LINKTYPE of the frame.
        wire_bytes: length of the frame on the wire.
        data: the bytes that were captured.
        node: node of a run that captured it; empty for a capture alone.
        interface: name of the interface; empty if it is not known.
    """

    file: str
    number: int
    t_ns: int
    linktype: int
    wire_bytes: int
    data: bytes
    node: str = ""
    interface: str = ""


class CapturePoint(NamedTuple):
    """A capture, the span of its time to read, and its clock.

    Attributes:
        path: the file; None for standard input.
        begin_ns: time of the first packet to read, by the clock of the capturing host.
        end_ns: time that the last one is before.
        to_common: converts these times to the clock of all captures.
        unstepped: removes the steps of the clock, from the times of all packets of the file in their order; None: the
            clock was not set.
        node: node of a run; empty for a capture alone.
        interface: name of the interface; empty: the name in the capture.
    """

    path: Path | None
    begin_ns: int = 0
    end_ns: int = ks.MAX_NS
    to_common: Callable[[Integers], Integers] | None = None
    unstepped: Callable[[Integers], Integers] | None = None
    node: str = ""
    interface: str = ""

    @property
    def name(self) -> str:
        """Name of the capture."""
        return "standard input" if self.path is None else str(self.path)


class CapturedInterface(NamedTuple):
    """An interface that packets were captured on; ``node`` and ``file`` name the capture point, one is empty."""

    node: str
    file: str
    name: str
    linktype: int
    snap_bytes: int


class CapturedPackets(Sequence[RawPacket]):
    """Packets of captures, in the order of time.

    Attributes:
        rows: one row per packet, with ``time_ns``, ``kept`` and ``length``, and ``interface``, a row of ``interfaces``.
        interfaces: the interfaces that they were captured on.
        scans: the scan of each capture.
        about: comment of the file that `to_pcapng` writes.
        comments: comments of packets, by row.
    """

    def __init__(
        self,
        rows: npt.NDArray[Any],
        interfaces: Sequence[CapturedInterface],
        scans: Sequence[Scanned],
        points: Sequence[CapturePoint],
        about: str = "",
        comments: Mapping[int, str] | None = None,
    ) -> None:
        self.rows, self.interfaces, self.scans = rows, interfaces, scans
        self.about, self.comments = about, dict(comments or {})
        self._points = points

    def __repr__(self) -> str:
        return f"<CapturedPackets: {counted(len(self), 'packet')}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.rows[index]
        at, source, kept = int(row["at"]), int(row["source"]), int(row["kept"])
        data = self.scans[source].bodies[at : at + -(-kept // 4)].tobytes()[:kept]
        interface, name = self.interfaces[row["interface"]], self._points[source].name
        times = int(row["number"]), int(row["time_ns"])
        return RawPacket(name, *times, interface.linktype, int(row["length"]), data, interface.node, interface.name)

    @documented(
        {
            "file": "name of the capture",
            "packet": "number of the packet in it, from 1",
            "node, interface": "node of a run that captured it, and its interface; a capture alone lacks them",
            "t_ns": "time, by the clock of the capturing host; in a run, by that of its reference node",
            "protocol": "tcp, udp, roce, icmp, icmp6, or ip-<number>; NA: the frame belongs to no conversation",
            "source, source_port, destination, destination_port": "endpoints",
            "bytes": "length of the frame on the wire",
            "payload": "transport payload in it",
        }
    )
    def to_frame(self) -> pd.DataFrame:
        """Return the packets as a table."""
        import pandas as pd

        rows, flow = self.rows, self.rows["flow"]
        columns: dict[str, Any] = {"file": _named([point.name for point in self._points], rows["source"])}
        columns["packet"] = rows["number"].astype(np.int64)
        if any(interface.node for interface in self.interfaces):
            for name in ("node", "interface"):
                field = "name" if name == "interface" else name
                columns[name] = _named([getattr(one, field) for one in self.interfaces], rows["interface"])
        columns["t_ns"] = rows["time_ns"].astype(np.int64)
        flows, place = np.unique(flow[flow > 0], return_inverse=True)
        conversations = np.concatenate([np.zeros(0, CONVERSATION), *(scanned.conversations for scanned in self.scans)])
        ends = export_scan_tables.flow_columns(conversations, flows.astype(np.int64) - 1)
        names = ("protocol", "source", "source_port", "destination", "destination_port")
        known = pd.DataFrame({name: np.asarray(ends[name])[place] for name in names}, index=np.flatnonzero(flow))
        known["payload"] = rows["payload"][flow > 0].astype(np.int64)
        if len(known) < len(rows):
            known = known.convert_dtypes().reindex(range(len(rows)))
        known.insert(len(names), "bytes", rows["length"].astype(np.int64))
        return pd.concat([pd.DataFrame(columns), known], axis=1)

    def to_pcapng(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the packets as a pcapng file with its times in nanoseconds, and return its path.

        Args:
            path: the file, whose name ends in ``.pcapng``.
            force: True to replace an existing file.

        Raises:
            UsageError: the file exists, is one of the captures, has another suffix, or cannot be written.
        """
        target = path_of(path, "the file")
        check_pcapng(target, force)
        for point in self._points:
            if point.path is not None and target.exists() and target.samefile(point.path):
                raise UsageError(f"{target} is one of the captures that are read: choose another name")
        ends = np.cumsum(formats.words_of(self.rows["kept"]))
        cuts = np.searchsorted(ends, np.arange(0, int(ends[-1]) if len(ends) else 0, _WRITTEN_WORDS))
        with export_scan_tables.NewFile(target) as file:
            file.write(formats.section(f"ringtap {ringtap.__version__}", self.about))
            for one in self.interfaces:
                where = f"node {one.node}" if one.node else f"file {Path(one.file).name}"
                file.write(formats.interface(one.linktype, one.snap_bytes, one.name, where))
            bodies = [scanned.bodies for scanned in self.scans]
            for begin, end in pairwise(np.unique([0, *cuts.tolist(), len(self)]).tolist()):
                comments = {row - begin: text for row, text in self.comments.items() if begin <= row < end}
                file.write(formats.packets(self.rows[begin:end], bodies, comments).data)
        return target

    def to_dpkt(self) -> list[tuple[float, Any]]:
        """Return each packet's time in seconds since the epoch and the dpkt packet.

        Raises:
            UsageError: dpkt is not installed, or has no class for the frames.
        """
        import importlib

        def made(packet: RawPacket) -> Any:
            if packet.linktype not in _DPKT:
                raise UsageError(f"dpkt has no class for frames of LINKTYPE {packet.linktype} in {packet.file}")
            module, name = _DPKT[packet.linktype]
            return getattr(importlib.import_module(f"dpkt.{module}"), name)(packet.data)

        return [(packet.t_ns / 1e9, _needs("dpkt", made, packet)) for packet in self]

    def to_scapy(self) -> list[Any]:
        """Return the Scapy packets, each with its ``time`` and ``wirelen``.

        Raises:
            UsageError: Scapy is not installed.
        """

        def made(packet: RawPacket) -> Any:
            from scapy import all as scapy

            kind = scapy.conf.l2types.num2layer.get(packet.linktype, scapy.Raw)
            found = kind(packet.data)
            found.time, found.wirelen = packet.t_ns / 1e9, packet.wire_bytes
            return found

        return [_needs("scapy", made, packet) for packet in self]


@dataclass(frozen=True)
class Slice:
    """Packets chosen from captures, and how well they are known.

    Attributes:
        packets: the packets.
        name: the choice in words, such as ``iteration 120``.
        clock: whose clock their times are by, as a clause.
        clock_error_ns: bound of the error of comparing times of two capture points' clocks; None: not known.
        warnings: a sentence for each reason why packets may be missing.
    """

    packets: CapturedPackets
    name: str
    clock: str
    clock_error_ns: float | None
    warnings: tuple[str, ...]


def _needs(package: str, made: Callable[[RawPacket], Any], packet: RawPacket) -> Any:
    try:
        return made(packet)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} is not installed here: {install_command('packets')}") from error


def _named(names: Sequence[str], numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(np.array([*names, ""], object)[numbers])


def check_pcapng(path: Path, force: bool) -> None:
    """Check, before any work, that a pcapng file can be written.

    Raises:
        UsageError: the name has another suffix, the file exists, or its folder does not.
    """
    if path.suffix != PCAPNG:
        raise UsageError(f"{path} is written as pcapng: its name must end in {PCAPNG}")
    export_scan_tables.check_new(path, force)


def read_packets(
    points: Sequence[CapturePoint],
    accepts: Accepts | None = None,
    progress: Progress | None = None,
    skipped: Callable[[str], object] | None = None,
) -> CapturedPackets:
    """Read the packets of captures that lie in a span of time and belong to some of the flows.

    Args:
        points: the captures.
        accepts: as in `scan.Pick`.
        progress: called with the bytes read, and the total; None if that is not known.
        skipped: called with a sentence for a capture that cannot be read, which then counts as empty; None: an error.

    Raises:
        UsageError: a capture cannot be read, or there are too many packets.
    """
    compile.entries(LOG.info)
    scans, parts, interfaces = list[Scanned](), list[npt.NDArray[Any]](), dict[CapturedInterface, int]()
    flows = words = 0
    for source, point in enumerate(points):
        try:
            scanned = _scan(point, accepts, progress)
        except TooMuchError:
            raise
        except UsageError as error:
            if skipped is None:
                raise
            skipped(f"{error}: it is left out")
            scanned = _UNREADABLE
        rows = _rows_of(scanned, point, interfaces)
        rows["source"] = source
        rows["flow"][rows["flow"] > 0] += flows
        flows += 2 * len(scanned.conversations)
        words += len(scanned.bodies)
        if 4 * words > MAX_PICKED_BYTES:
            raise TooMuchError(f"the captures hold {TOO_MUCH}")
        scans.append(scanned)
        parts.append(rows)
    rows = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, _ROW), *parts])
    times_ns = rows["time_ns"]
    if (times_ns[1:] < times_ns[:-1]).any():
        rows = rows[np.argsort(times_ns, kind="stable")]
    return CapturedPackets(rows, list(interfaces), scans, points)


def _scan(point: CapturePoint, accepts: Accepts | None, progress: Progress | None) -> Scanned:
    pick = Pick(point.begin_ns, point.end_ns, accepts) if point.unstepped is None else Pick(accepts=accepts)
    stream = CaptureStream(point.path)
    try:
        return feed(stream, Scan(pick=pick), progress=progress)
    finally:
        stream.close()


def _rows_of(scanned: Scanned, point: CapturePoint, interfaces: dict[CapturedInterface, int]) -> npt.NDArray[Any]:
    """Return the rows of a capture's packets; its interfaces are added to the known ones."""
    picks = scanned.picks
    rows = np.zeros(len(picks), _ROW)
    for name in ("number", "kept", "length", "flow", "payload"):
        rows[name] = picks[name]
    words = formats.words_of(picks["kept"])
    rows["at"] = np.cumsum(words) - words
    own_ns = np.array(picks["time_ns"]) if point.unstepped is None else point.unstepped(picks["time_ns"])
    rows["time_ns"] = own_ns if point.to_common is None else point.to_common(own_ns)
    used = np.unique(picks["interface"])
    if len(used) and used[-1] >= len(scanned.interfaces):
        raise UsageError(f"{point.name} describes more than {len(scanned.interfaces):,} interfaces: split it first")
    for number in used.tolist():
        described = scanned.interfaces[number]
        name = point.interface or described["name"]
        file = "" if point.node else point.name
        found = CapturedInterface(point.node, file, name, described["linktype"], described["snap_bytes"])
        rows["interface"][picks["interface"] == number] = interfaces.setdefault(found, len(interfaces))
    inside = (own_ns >= point.begin_ns) & (own_ns < point.end_ns)
    return rows if inside.all() else rows[inside]


def minus(lead_ns: int) -> Callable[[Integers], Integers]:
    """Return a conversion of times that subtracts the lead of a clock."""
    return lambda t_ns: t_ns - lead_ns


def of_conversation(conversation: npt.NDArray[Any]) -> Accepts:
    """Return the test for the flows of one conversation, a row of ``scan_dtypes.CONVERSATION``."""
    wanted = _ends(conversation)
    return lambda rows: np.repeat(np.array([_ends(row) == wanted for row in rows], bool), 2)


def _ends(row: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return what identifies a conversation, whichever end sent first."""
    ends = frozenset((bytes(row[end]), int(row[f"{end}_port"])) for end in ("a", "b"))
    return int(row["family"]), int(row["protocol"]), int(row["layer"]), ends
