"""TCP segments of a packet capture: classic pcap files as tcpdump writes them, read as a stream.

Formats: the libpcap file format (draft-ietf-opsawg-pcap), its link-layer header types (tcpdump.org/linktypes.html),
IPv4 (RFC 791), IPv6 and its extension headers (RFC 8200, jumbograms RFC 2675), TCP (RFC 9293), VLAN tags (IEEE 802.1Q).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ringtap.errors import MeasurementError, UsageError

_CHUNK_BYTES = 2**20
# no link has packets of this size; such a record is damaged
_MOST_PACKET_BYTES = 2**24
_PCAPNG = b"\x0a\x0d\x0d\x0a"
# magic as it lies in the file -> (byte order, nanoseconds per tick)
_MAGICS = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
_VLAN_TYPES = (0x8100, 0x88A8, 0x9100)
_IPV4, _IPV6, _TCP = 0x0800, 0x86DD, 6
# a loopback header holds the capturing system's own number for IPv6: Linux, FreeBSD, macOS, the other BSDs
_LOOPBACK_FAMILIES = {2: _IPV4, 10: _IPV6, 28: _IPV6, 30: _IPV6, 24: _IPV6}
# IPv6 headers that may stand before TCP and are 8 bytes times their length field plus one
_EXTENSIONS = (0, 43, 60, 135, 139, 140)
_FRAGMENT, _AUTHENTICATION = 44, 51


class Segment(NamedTuple):
    """One captured TCP packet; with segmentation offload it may hold many of the wire's segments.

    Attributes:
        time_ns: when it was captured, CLOCK_REALTIME of the capturing host.
        source: IP address.
        source_port: TCP port.
        destination: IP address.
        destination_port: TCP port.
        payload_bytes: TCP payload, by the IP header's length; by the frame's where IP gives none (BIG TCP).
        frame_bytes: length of the frame with its link-layer header, as it was before the capture cut it.
    """

    time_ns: int
    source: str
    source_port: int
    destination: str
    destination_port: int
    payload_bytes: int
    frame_bytes: int


class _Link(NamedTuple):
    """Link-layer header: its length, the offset of its protocol field, and that field's value for IPv4."""

    header_bytes: int
    protocol_at: int
    ipv4: bytes


def _link(linktype: int, order: str) -> _Link | None:
    links = {
        0: _Link(4, 0, struct.pack(f"{order}I", 2)),  # null: in the capturing host's order
        1: _Link(14, 12, b"\x08\x00"),  # Ethernet
        108: _Link(4, 0, b"\x00\x00\x00\x02"),  # OpenBSD loopback
        113: _Link(16, 14, b"\x08\x00"),  # Linux cooked
        276: _Link(20, 0, b"\x08\x00"),  # Linux cooked, version 2
    }
    # raw IP has no header at all: DLT_RAW on two systems, then the ones with a number of their own
    return links.get(linktype) or (_Link(0, 0, b"") if linktype in (12, 14, 101, 228, 229) else None)


class Capture:
    """A classic pcap file.

    Attributes:
        path: the file.
        linktype: its link-layer header type.
        packets: packets read so far, of whatever kind.
        others: of these, packets without TCP.
        unreadable: of these, TCP packets whose header is not in the file: cut by the snap length, or later fragments.
        torn_bytes: bytes of an incomplete packet at the end; known once ``segments`` is exhausted.

    Raises:
        UsageError: it cannot be read, is no classic pcap file, or is of a link type that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packets = self.others = self.unreadable = self.torn_bytes = 0
        try:
            with path.open("rb") as file:
                header = file.read(24)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        if header[:4] == _PCAPNG:
            raise UsageError(f"{path} is in pcapng format: convert it with 'editcap -F pcap {path} FILE.pcap'")
        if header[:4] not in _MAGICS or len(header) < 24:
            raise UsageError(f"{path} is no pcap file: name one that tcpdump -w wrote")
        self._order, self._tick_ns = _MAGICS[header[:4]]
        self.linktype = struct.unpack(f"{self._order}I", header[20:])[0] & 0xFFFF
        link = _link(self.linktype, self._order)
        if link is None:
            raise UsageError(
                f"{path} has link type {self.linktype}, which is not read here: capture on an Ethernet interface, "
                "the loopback interface or 'any'"
            )
        self._link = link
        self._names: dict[bytes, str] = {}

    def segments(self) -> Iterator[Segment]:
        """Yield the TCP packets in the file's order, and count the others.

        Raises:
            UsageError: the file cannot be read, or is damaged.
        """
        self.packets = self.others = self.unreadable = self.torn_bytes = 0
        try:
            with self.path.open("rb") as file:
                file.seek(24)
                yield from self._segments(file)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from error

    def _segments(self, file: BinaryIO) -> Iterator[Segment]:
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            data = rest + chunk
            segments, used = self._whole(data)
            rest = data[used:]
            yield from segments
        self.torn_bytes = len(rest)

    def _whole(self, data: bytes) -> tuple[list[Segment], int]:
        """Return the segments of the packets that are complete in the data, and the bytes of those packets."""
        record = struct.Struct(f"{self._order}IIII")
        header_bytes, protocol_at, ipv4 = self._link
        # nearly every packet is IPv4 without options, then TCP: unpacked at once
        usual = struct.Struct(f">{header_bytes}xBxH2xHxB2x4s4sHH8xB")
        protocol_from, protocol_to = 16 + protocol_at, 16 + protocol_at + len(ipv4)
        tick_ns, names, new, found = self._tick_ns, self._names, tuple.__new__, list[Segment]()
        at, end = 0, len(data)
        while at + 16 <= end:
            seconds, ticks, kept, length = record.unpack_from(data, at)
            after = at + 16 + kept
            if kept > _MOST_PACKET_BYTES:
                raise UsageError(f"{self.path} is damaged: packet {self.packets + 1} says that it has {kept} bytes")
            if after > end:
                break
            self.packets += 1
            time_ns = seconds * 1_000_000_000 + ticks * tick_ns
            if kept >= usual.size and data[at + protocol_from : at + protocol_to] == ipv4:
                version, total, fragment, protocol, source, destination, source_port, destination_port, offset = (
                    usual.unpack_from(data, at + 16)
                )
                payload = total - 20 - (offset >> 4) * 4
                if version == 0x45 and protocol == _TCP and payload >= 0 and not fragment & 0x1FFF:
                    a, b = names.get(source) or self._name(source), names.get(destination) or self._name(destination)
                    found.append(new(Segment, (time_ns, a, source_port, b, destination_port, payload, length)))
                    at = after
                    continue
            segment = self._unusual(data[at + 16 : after], time_ns, length)
            if segment is not None:
                found.append(segment)
            at = after
        return found, at

    def _unusual(self, frame: bytes, time_ns: int, length: int) -> Segment | None:
        """Return the segment in a frame of any supported form; a frame without one is counted and gives None."""
        try:
            inner = self._ip(frame)
            if inner is None:
                self.others += 1
                return None
            source_port, destination_port, offset = struct.unpack_from(">HH8xB", frame, inner.tcp_at)
        except (struct.error, IndexError):  # too short, perhaps even to know if it is TCP
            self.unreadable += 1
            return None
        payload = (inner.end or length) - inner.tcp_at - (offset >> 4) * 4
        if payload < 0:
            self.unreadable += 1
            return None
        ends = self._name(inner.source), self._name(inner.destination)
        return Segment(time_ns, ends[0], source_port, ends[1], destination_port, payload, length)

    def _ip(self, frame: bytes) -> _Inner | None:
        at, protocol = self._link.header_bytes, 0
        if at == 0:
            protocol = {4: _IPV4, 6: _IPV6}.get(frame[0] >> 4, 0)
        elif at == 4:
            order = ">" if self.linktype == 108 else self._order
            protocol = _LOOPBACK_FAMILIES.get(struct.unpack_from(f"{order}I", frame)[0], 0)
        else:
            (protocol,) = struct.unpack_from(">H", frame, self._link.protocol_at)
        while protocol in _VLAN_TYPES:
            (protocol,) = struct.unpack_from(">2xH", frame, at)
            at += 4
        if protocol == _IPV4:
            return _ipv4(frame, at)
        return _ipv6(frame, at) if protocol == _IPV6 else None

    def _name(self, address: bytes) -> str:
        if address not in self._names:
            self._names[address] = socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
        return self._names[address]


class _Inner(NamedTuple):
    """Position of TCP in a frame; ``end`` is that of the IP packet, 0 if its header does not say."""

    tcp_at: int
    end: int
    source: bytes
    destination: bytes


def _ipv4(frame: bytes, at: int) -> _Inner | None:
    version, total, fragment, protocol, source, destination = struct.unpack_from(">BxH2xHxB2x4s4s", frame, at)
    if version >> 4 != 4 or protocol != _TCP:
        return None
    # a later fragment has no TCP header: none is found behind the frame's end
    tcp_at = len(frame) if fragment & 0x1FFF else at + (version & 15) * 4
    return _Inner(tcp_at, at + total if total else 0, source, destination)


def _ipv6(frame: bytes, at: int) -> _Inner | None:
    version, length, following, source, destination = struct.unpack_from(">B3xHBx16s16s", frame, at)
    if version >> 4 != 6:
        return None
    # a jumbogram has length 0
    end, at = at + 40 + length if length else 0, at + 40
    while following in _EXTENSIONS or following in (_FRAGMENT, _AUTHENTICATION):
        kind, following, units = following, frame[at], frame[at + 1]
        if kind == _FRAGMENT:
            later = struct.unpack_from(">H", frame, at + 2)[0] >> 3
            at = len(frame) if later else at + 8
            if later:
                break
        else:
            at += (units + 2) * 4 if kind == _AUTHENTICATION else (units + 1) * 8
    return _Inner(at, end, source, destination) if following == _TCP else None


def read_segments(path: Path) -> Iterator[Segment]:
    """Yield the TCP packets of a classic pcap file, in its order.

    Args:
        path: output of ``tcpdump -w``; microseconds or nanoseconds, either byte order.

    Raises:
        UsageError: it cannot be read, is no classic pcap file, or is damaged.
        MeasurementError: the file ends within a packet; raised after all complete packets.
    """
    capture = Capture(path)
    yield from capture.segments()
    if capture.torn_bytes:
        raise MeasurementError(
            f"{path} ends within packet {capture.packets + 1}: the capture was cut off there, and only the "
            f"{capture.packets} packets before it were read"
        )
