"""Single packets of a conversation around a time: as a table, as dpkt packets or as Scapy packets."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.analysis.frames import documented
from ringtap.analysis.pcap import tables
from ringtap.analysis.pcap.kernels import state as ks
from ringtap.analysis.pcap.scan import Interface, Scan, interface_block, pcap_header, section_header
from ringtap.analysis.pcap.sources import CaptureStream
from ringtap.errors import UsageError
from ringtap.installation import install_command
from ringtap.units import counted

if TYPE_CHECKING:
    import pandas as pd

_SECTION, _INTERFACE, _OLD_PACKET, _ENHANCED_PACKET = 0x0A0D0D0A, 1, 2, 6
_MAX_PACKETS = 2_000_000
# dpkt has no table of its own: LINKTYPE -> module and class
_DPKT = {
    0: ("loopback", "Loopback"),
    1: ("ethernet", "Ethernet"),
    12: ("ip", "IP"),
    101: ("ip", "IP"),
    113: ("sll", "SLL"),
    228: ("ip", "IP"),
    229: ("ip6", "IP6"),
    276: ("sll2", "SLL2"),
}


class RawPacket(NamedTuple):
    """One packet as it was captured.

    Attributes:
        file: name of the capture.
        number: number of the packet in it, from 1, as Wireshark shows it.
        t_ns: time since the epoch, by the clock of the capturing host.
        linktype: LINKTYPE of the frame.
        wire_bytes: length of the frame on the wire.
        data: the bytes that were captured.
    """

    file: str
    number: int
    t_ns: int
    linktype: int
    wire_bytes: int
    data: bytes


class ConversationPackets(Sequence[RawPacket]):
    """Packets of one conversation, in the order of their captures."""

    def __init__(self, packets: list[RawPacket], rows: npt.NDArray[Any], flows: npt.NDArray[Any]) -> None:
        self._packets = packets
        self._rows, self._flows = rows, flows

    def __repr__(self) -> str:
        return f"<ConversationPackets: {counted(len(self), 'packet')}>"

    def __len__(self) -> int:
        return len(self._packets)

    def __getitem__(self, index: Any) -> Any:
        return self._packets[index]

    @documented
    def to_frame(self) -> pd.DataFrame:
        """Return the packets as a table.

        Columns:
            - ``file``: name of the capture
            - ``packet``: number of the packet in it, from 1
            - ``t_ns``: time, by the clock of the capturing host
            - ``protocol``: tcp, udp, roce, icmp, icmp6, or ip-<number>
            - ``source``, ``source_port``, ``destination``, ``destination_port``: endpoints
            - ``bytes``: length of the frame on the wire
            - ``payload``: transport payload in it
        """
        import pandas as pd

        columns: dict[str, Any] = {"file": [packet.file for packet in self._packets]}
        columns["packet"] = np.array([packet.number for packet in self._packets], np.int64)
        columns["t_ns"] = np.array([packet.t_ns for packet in self._packets], np.int64)
        ends = tables.flow_columns(self._flows, self._rows["flow"].astype(np.int64))
        names = ("protocol", "source", "source_port", "destination", "destination_port")
        columns |= {name: ends[name] for name in names}
        columns["bytes"] = np.array([packet.wire_bytes for packet in self._packets], np.int64)
        return pd.DataFrame(columns | {"payload": self._rows["payload"].astype(np.int64)})

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

        return [(packet.t_ns / 1e9, _needs("dpkt", made, packet)) for packet in self._packets]

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

        return [_needs("scapy", made, packet) for packet in self._packets]


def _needs(package: str, made: Callable[[RawPacket], Any], packet: RawPacket) -> Any:
    try:
        return made(packet)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} is not installed here: {install_command('packets')}") from error


def read_packets(
    files: Sequence[tuple[Path, int]], conversation: npt.NDArray[Any], begin_ns: int, end_ns: int
) -> ConversationPackets:
    """Read the packets of a conversation in a span of time.

    Args:
        files: each capture and the lead of its clock, which is subtracted from its times.
        conversation: the row of ``scan_dtypes.CONVERSATION``.
        begin_ns: begin of the span.
        end_ns: its end, which belongs to it.

    Raises:
        UsageError: a capture cannot be read, or the span has too many packets.
    """
    found: list[RawPacket] = []
    for path, lead_ns in files:
        for packet in each_packet(path):
            t_ns = packet.t_ns - lead_ns
            if begin_ns <= t_ns <= end_ns:
                found.append(packet._replace(t_ns=t_ns))
            if len(found) > _MAX_PACKETS:
                raise UsageError(f"there are more than {_MAX_PACKETS:,} packets in this time: choose a shorter one")
    kept, rows, flows = [], [], [np.zeros(0, conversation.dtype)]
    for linktype in sorted({packet.linktype for packet in found}):
        of_type = [number for number, packet in enumerate(found) if packet.linktype == linktype]
        numbers, mine, scanned = _of_conversation([found[number] for number in of_type], linktype, conversation)
        mine["flow"] += 2 * sum(map(len, flows))
        kept += [of_type[number] for number in numbers]
        rows.append(mine)
        flows.append(scanned)
    order = np.argsort(np.array(kept, np.int64), kind="stable")
    joined = np.concatenate(rows)[order] if rows else np.zeros(0, [("flow", "u4"), ("payload", "u4")])
    return ConversationPackets([found[kept[number]] for number in order], joined, np.concatenate(flows))


def _of_conversation(
    packets: Sequence[RawPacket], linktype: int, conversation: npt.NDArray[Any]
) -> tuple[list[int], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the numbers of the packets of a conversation, their rows of ``PACKET``, and the conversations of these.

    The packets are scanned as a capture whose times are their numbers.
    """
    scan = Scan(packets=True)
    scan.feed(memoryview(struct.pack("<4sHHiIII", b"\x4d\x3c\xb2\xa1", 2, 4, 0, 0, 1 << 18, linktype)))
    for number, packet in enumerate(packets):
        head = struct.pack("<IIII", 1, number, len(packet.data), packet.wire_bytes)
        scan.feed(memoryview(head + packet.data))
    scanned = scan.finish()
    same = np.array([_ends(row) == _ends(conversation) for row in scanned.conversations], bool)
    rows = scanned.packets[same[scanned.packets["flow"] // 2]] if len(same) else scanned.packets[:0]
    return (rows["time_ns"] - 10**9).tolist(), rows.copy(), scanned.conversations


def _ends(row: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return what identifies a conversation, whichever end sent first."""
    ends = frozenset((bytes(row[end]), int(row[f"{end}_port"])) for end in ("a", "b"))
    return int(row["family"]), int(row["protocol"]), int(row["layer"]), ends


def each_packet(path: Path) -> Iterator[RawPacket]:
    """Yield the packets of a capture: pcap or pcapng, plain, gzip or zstd; a torn last packet is left out.

    Raises:
        UsageError: the file cannot be read, or is not a capture.
    """
    stream = CaptureStream(path)
    try:
        source = _Bytes(stream.blocks())
        head = source.take(24)
        pcap = pcap_header(head)
        if pcap is not None:
            yield from _pcap(source, str(path), *pcap)
        elif head[:4] == b"\x0a\x0d\x0d\x0a":
            source.put_back(head)
            yield from _pcapng(source, str(path))
        else:
            raise UsageError(f"{path} is not a capture: it is neither pcap nor pcapng")
    finally:
        stream.close()


class _Bytes:
    """The bytes of a stream of blocks, some at a time."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks = blocks
        self._held = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        while len(self._held) - self._at < count:
            block = next(self._blocks, None)
            if block is None:
                break
            self._held, self._at = self._held[self._at :] + bytes(block), 0
        taken = self._held[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def put_back(self, data: bytes) -> None:
        """Return bytes to the beginning."""
        self._held, self._at = data + self._held[self._at :], 0


def _pcap(source: _Bytes, name: str, big_endian: bool, interface: Interface) -> Iterator[RawPacket]:
    record = struct.Struct(f"{'>' if big_endian else '<'}IIII")
    number = 0
    while len(head := source.take(16)) == 16:
        seconds, part, kept, wire_bytes = record.unpack(head)
        data = source.take(kept) if kept <= ks.MAX_BLOCK_BYTES else b""
        if len(data) < kept:
            return
        number += 1
        yield RawPacket(name, number, seconds * 10**9 + part * interface.by, interface.linktype, wire_bytes, data)


def _pcapng(source: _Bytes, name: str) -> Iterator[RawPacket]:
    order, interfaces, number = "<", list[Interface | None](), 0
    while len(head := source.take(12)) == 12:
        if head[:4] == b"\x0a\x0d\x0d\x0a":
            section = section_header(head)
            if section is None:
                return
            order, interfaces = ">" if section[0] else "<", []
        kind, total = struct.unpack_from(f"{order}II", head)
        if total < 12 or total % 4 or total > ks.MAX_BLOCK_BYTES:
            return
        block = head + source.take(total - 12)
        if len(block) < total:
            return
        if kind == _INTERFACE:
            interfaces.append(interface_block(block, order == ">"))
        elif kind in (_ENHANCED_PACKET, _OLD_PACKET) and total >= 32:
            number += 1
            which = struct.unpack_from(f"{order}{'I' if kind == _ENHANCED_PACKET else 'H'}", block, 8)[0]
            high, low, kept, wire_bytes = struct.unpack_from(f"{order}IIII", block, 12)
            interface = interfaces[which] if which < len(interfaces) else None
            if interface is not None and 28 + kept <= total - 4:
                t_ns = interface.offset_ns + _to_ns(high << 32 | low, interface)
                yield RawPacket(name, number, t_ns, interface.linktype, wire_bytes, block[28 : 28 + kept])


def _to_ns(ticks: int, interface: Interface) -> int:
    if interface.scale == ks.TIMES:
        return ticks * interface.by
    return ticks // interface.by if interface.scale == ks.DIVIDED else ticks * 10**9 >> interface.by
