"""Makes captures of every kind that is read: what is in the packets by scapy, the files around them by struct.

The file formats are those of draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng, the link types those of
tcpdump.org/linktypes.html. Everything here is the same in every call.
"""

from __future__ import annotations

import functools
import gzip
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zstandard
from scapy.contrib.roce import AETH, BTH
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6
from scapy.layers.l2 import ARP
from scapy.packet import Raw

NULL, ETHERNET, RAW_BSD, RAW_OTHER, RAW, LOOP, SLL, RAW_IPV4, RAW_IPV6, IPOIB, SLL2 = (
    *(0, 1, 12, 14, 101, 108, 113, 228, 229, 242, 276),
)
START_NS = 1_700_000_000_123_456_000  # whole microseconds: every resolution has it
US, MS = 1_000, 1_000_000
A4, B4, C4 = "10.1.0.1", "10.1.0.2", "10.1.0.3"
A6, B6 = "fd00::1", "fd00::2"
CNP = 0x81


@dataclass(frozen=True)
class Packet:
    """One record: when, what of the frame was kept, and how long the frame was."""

    time_ns: int
    data: bytes
    length: int

    def cut(self, snap_bytes: int) -> Packet:
        return replace(self, data=self.data[:snap_bytes])


# --- the files ---------------------------------------------------------------------------------------------------


def classic(
    packets: Iterable[Packet], link: int = ETHERNET, order: str = "<", nano: bool = False, snap: int = 262144
) -> bytes:
    """A pcap file."""
    tick_ns = 1 if nano else 1000
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    made = [struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, snap, link)]
    for one in packets:
        seconds, rest_ns = divmod(one.time_ns, 1_000_000_000)
        made += [struct.pack(f"{order}IIII", seconds, rest_ns // tick_ns, len(one.data), one.length), one.data]
    return b"".join(made)


class Blocks:
    """One section of a pcapng file, block by block.

    Args:
        order: of its bytes.
        section_bytes: what its header says of its length; -1 says nothing.
    """

    def __init__(self, order: str = "<", section_bytes: int = -1) -> None:
        self._order = order
        self._made: list[bytes] = []
        self.interfaces: list[tuple[int, int]] = []  # tick in units of a second's divisor, offset in seconds
        self.block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, section_bytes))

    def block(self, kind: int, body: bytes) -> Blocks:
        body += bytes(-len(body) % 4)
        size = len(body) + 12
        self._made.append(struct.pack(f"{self._order}II", kind, size) + body + struct.pack(f"{self._order}I", size))
        return self

    def option(self, code: int, value: bytes) -> bytes:
        return struct.pack(f"{self._order}HH", code, len(value)) + value + bytes(-len(value) % 4)

    def interface(
        self, link: int = ETHERNET, snap: int = 0, resolution: int | None = None, offset_s: int = 0, name: str = ""
    ) -> Blocks:
        """An interface; ``resolution`` as in if_tsresol: 6 is 10^-6 s, 0x80 | 20 is 2^-20 s."""
        options = self.option(2, name.encode()) if name else b""
        if resolution is not None:
            options += self.option(9, bytes([resolution]))
        if offset_s:
            options += self.option(14, struct.pack(f"{self._order}q", offset_s))
        options += self.option(0, b"") if options else b""
        ticks = 10**6 if resolution is None else 2 ** (resolution & 127) if resolution & 128 else 10**resolution
        self.interfaces.append((ticks, offset_s))
        return self.block(1, struct.pack(f"{self._order}HHI", link, 0, snap) + options)

    def _ticks(self, one: Packet, interface: int) -> tuple[int, int]:
        per_second, offset_s = self.interfaces[interface]
        return divmod((one.time_ns - offset_s * 1_000_000_000) * per_second // 1_000_000_000, 2**32)

    def packet(self, one: Packet, interface: int = 0, options: bytes = b"") -> Blocks:
        """An enhanced packet block."""
        head = struct.pack(f"{self._order}IIIII", interface, *self._ticks(one, interface), len(one.data), one.length)
        return self.block(6, head + one.data + bytes(-len(one.data) % 4) + options)

    def old_packet(self, one: Packet, interface: int = 0) -> Blocks:
        """The packet block that the enhanced one took the place of."""
        ticks = self._ticks(one, interface)
        return self.block(
            2, struct.pack(f"{self._order}HHIIII", interface, 7, *ticks, len(one.data), one.length) + one.data
        )

    def simple_packet(self, one: Packet) -> Blocks:
        """A packet without a time."""
        return self.block(3, struct.pack(f"{self._order}I", one.length) + one.data)

    def unknown(self) -> Blocks:
        """Names, statistics, secrets, a custom block, and one that nobody has thought of yet."""
        name = struct.pack(f"{self._order}HH4s8s", 1, 12, bytes((10, 1, 0, 1)), b"node-01\0")
        secrets = struct.pack(f"{self._order}II", 0x544C534B, 4) + b"none"
        self.block(4, name + bytes(4)).block(10, secrets).block(0xBAD, struct.pack(f"{self._order}I", 32473) + b"any")
        if self.interfaces:
            self.block(5, struct.pack(f"{self._order}III", 0, 0, 0))
        return self.block(0x0BADF00D, bytes(range(40)))

    def bytes(self) -> bytes:
        return b"".join(self._made)


def modern(packets: Iterable[Packet], link: int = ETHERNET, order: str = "<", resolution: int | None = None) -> bytes:
    """A pcapng file of one interface."""
    made = Blocks(order).interface(link, resolution=resolution)
    for one in packets:
        made.packet(one)
    return made.bytes()


def gzipped(data: bytes) -> bytes:
    """Of two members, as `cat a.gz b.gz` makes it."""
    half = len(data) // 2
    return gzip.compress(data[:half], 1) + gzip.compress(data[half:], 1)


def zstandarded(data: bytes) -> bytes:
    """Of two frames."""
    half = len(data) // 2
    return bytes(zstandard.compress(data[:half]) + zstandard.compress(data[half:]))


# --- around IP packets: the link's headers ------------------------------------------------------------------------

Wrap = Callable[[bytes], bytes]
_MACS = bytes.fromhex("020000000002020000000001")


def _type(ip: bytes) -> bytes:
    return b"\x08\x00" if ip[0] >> 4 == 4 else b"\x86\xdd"


def ethernet(ip: bytes) -> bytes:
    """Padded to the 60 bytes that a frame has at least."""
    return (_MACS + _type(ip) + ip).ljust(60, b"\x55")


def vlan(*types: int) -> Wrap:
    """A stack of tags, outermost first."""

    def wrap(ip: bytes) -> bytes:
        tags = b"".join(struct.pack(">HH", kind, 0x6007 + place) for place, kind in enumerate(types))
        return (_MACS + tags + _type(ip) + ip).ljust(60, b"\x55")

    return wrap


def cooked(ip: bytes, hardware: int = 1) -> bytes:
    return struct.pack(">HHH8s", 4, hardware, 6, _MACS[:6] + b"\0\0") + _type(ip) + ip


def cooked2(ip: bytes, hardware: int = 1) -> bytes:
    return _type(ip) + struct.pack(">HIHBB8s", 0, 2, hardware, 4, 6, _MACS[:6] + b"\0\0") + ip


def null(order: str, ipv6: int = 28) -> Wrap:
    """A loopback header in the order of the host that captured."""
    return lambda ip: struct.pack(f"{order}I", 2 if ip[0] >> 4 == 4 else ipv6) + ip


def ipoib(ip: bytes) -> bytes:
    """Behind a global route header, as libpcap has it."""
    return bytes(40) + _type(ip) + b"\0\0" + ip


def bare(ip: bytes) -> bytes:
    return ip


def frames(packets: Iterable[tuple[int, bytes]], wrap: Wrap = ethernet) -> list[Packet]:
    """Records of IP packets, each with its time after the start."""
    made = []
    for after_ns, ip in packets:
        data = wrap(ip)
        made.append(Packet(START_NS + after_ns, data, len(data)))
    return made


# --- IP packets ---------------------------------------------------------------------------------------------------

Timed = tuple[int, bytes]


class Talk:
    """A TCP connection, packet by packet: `send` knows sequence numbers, `put` whatever is asked.

    Args:
        a: address of the client.
        b: address of the server.
        ports: theirs.
        ip: makes the IP header of a packet from the first address to the second.
    """

    def __init__(self, a: str, b: str, ports: tuple[int, int], ip: Callable[[str, str], Any] | None = None) -> None:
        self.ends, self.ports = (a, b), ports
        self.packets: list[Timed] = []
        self.now_ns = 0
        self.next = [0xFFFFF000, 1_000_000]  # the client's numbers wrap soon
        self._ip = ip or (lambda source, to: (IPv6 if ":" in source else IP)(src=source, dst=to))

    def put(self, side: int, seq: int, size: int = 0, flags: str = "A", **fields: Any) -> Talk:
        """A segment from one side (0: the client) with this number."""
        tcp = TCP(
            sport=self.ports[side],
            dport=self.ports[1 - side],
            seq=seq % 2**32,
            ack=self.next[1 - side] % 2**32 if "A" in flags else 0,
            flags=flags,
            **({"window": 500} | fields),
        )
        made = self._ip(self.ends[side], self.ends[1 - side]) / tcp
        self.packets.append((self.now_ns, bytes(made / Raw(bytes(size)) if size else made)))
        return self

    def wait(self, ns: int) -> Talk:
        self.now_ns += ns
        return self

    def send(self, side: int, size: int = 0, flags: str = "A", **fields: Any) -> Talk:
        """The next segment of one side."""
        self.put(side, self.next[side], size, flags, **fields)
        self.next[side] += size + ("S" in flags) + ("F" in flags)
        return self.wait(10 * US)

    def open(self, rtt_ns: int = 400 * US, mss: int = 1460, timestamps: bool = True) -> Talk:
        """The handshake; three quarters of the round trip are to the server and back."""
        options: list[Any] = [("MSS", mss), ("WScale", 7)]
        self._options = [("NOP", None), ("NOP", None), ("Timestamp", (1, 1))] if timestamps else []
        options += self._options
        self.send(0, 0, "S", options=options).wait(rtt_ns * 3 // 4 - 10 * US)
        self.send(1, 0, "SA", options=options).wait(rtt_ns // 4 - 10 * US)
        return self.send(0, options=self._options)

    def data(self, side: int, *sizes: int) -> Talk:
        """Segments, each acknowledged."""
        for size in sizes:
            self.send(side, size, "PA", options=self._options).wait(90 * US)
            self.send(1 - side, options=self._options)
        return self

    def close(self) -> Talk:
        return self.send(0, 0, "FA").send(1, 0, "FA").send(0)


def udp(a: str, b: str, ports: tuple[int, int], size: int, **fields: Any) -> bytes:
    ip = (IPv6 if ":" in a else IP)(src=a, dst=b, **fields)
    return bytes(ip / UDP(sport=ports[0], dport=ports[1]) / Raw(bytes(size)))


def spaced(packets: Sequence[bytes], gap_ns: int = 50 * US, start_ns: int = 0) -> list[Timed]:
    return [(start_ns + place * gap_ns, one) for place, one in enumerate(packets)]


@functools.cache
def usual() -> tuple[Timed, ...]:
    """TCP, UDP and ICMP over both IPs, of three hosts, interleaved."""
    made = Talk(A4, B4, (40001, 5001)).open().data(0, 1448, 1, 700).data(1, 1448, 20).close().packets
    made += Talk(B4, A4, (40001, 5001)).wait(5 * US).open(timestamps=False).data(1, 900, 1460).close().packets
    made += Talk(A6, B6, (40002, 443)).wait(9 * US).open(mss=1440).data(0, 1428, 33).close().packets
    made += spaced([udp(A4, C4, (53, 53), size) for size in (0, 1, 17, 512, 1472)], 77 * US)
    made += spaced([udp(C4, A4, (53, 53), size) for size in (100, 0)], 88 * US)
    made += spaced([udp(A6, B6, (6000, 7000), size) for size in (0, 1, 1200)], 91 * US)
    made += spaced([bytes(IP(src=A4, dst=C4) / ICMP() / Raw(bytes(56)))], 1, 33 * US)
    made += spaced([bytes(IPv6(src=A6, dst=B6) / ICMPv6EchoRequest(data=bytes(56)))], 1, 34 * US)
    return tuple(sorted(made, key=lambda one: one[0]))


def arp() -> bytes:
    """A frame that holds no IP."""
    return (b"\xff" * 6 + _MACS[6:] + b"\x08\x06" + bytes(ARP(psrc=A4, pdst=B4))).ljust(60, b"\0")


def roce(a: str, b: str, opcode: int, queue_pair: int, psn: int, size: int, extended: bytes = b"", **bth: Any) -> bytes:
    """A RoCEv2 packet: extended headers behind the BTH are given as they are, a pad fills up to four bytes."""
    pad = -size % 4
    header = BTH(opcode=opcode, dqpn=queue_pair, psn=psn, padcount=pad, **bth)
    ip = (IPv6 if ":" in a else IP)(src=a, dst=b)
    return bytes(ip / UDP(sport=49152 + queue_pair % 1000, dport=4791) / header / Raw(extended + bytes(size + pad)))


def acknowledgement(a: str, b: str, queue_pair: int, psn: int, syndrome: int = 0) -> bytes:
    """An ACK; a NAK with a syndrome of 0x60 and more."""
    header = BTH(opcode="RC_ACKNOWLEDGE", dqpn=queue_pair, psn=psn)
    ip = IP(src=a, dst=b)
    return bytes(ip / UDP(sport=50000, dport=4791) / header / AETH(syndrome=syndrome, msn=1))


def vxlan(inner: bytes, outer: tuple[str, str] = (A4, B4), port: int = 50001) -> bytes:
    """An Ethernet frame within a tunnel."""
    ip = (IPv6 if ":" in outer[0] else IP)(src=outer[0], dst=outer[1])
    return bytes(ip / UDP(sport=port, dport=4789) / Raw(b"\x08\0\0\0\0\0\x2a\0" + inner))
