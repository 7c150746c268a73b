"""RoCEv2, and packets inside tunnels: VXLAN, Geneve, GRE, IP in IP, pseudowires."""

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_dtypes import PLAIN, ROCE
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    CNP,
    Talk,
    acknowledgement,
    classic,
    cooked2,
    ethernet,
    frames,
    roce,
    spaced,
    udp,
    vlan,
    vxlan,
)

pytestmark = [pytest.mark.computes, pytest.mark.together]


def of(*packets: bytes, cut: int = 10**6, wrap=ethernet, link: int = 1) -> Scanned:
    made = Scan()
    made.feed(memoryview(classic([one.cut(cut) for one in frames(spaced(packets), wrap)], link)))
    return made.finish()


# opcode -> its extended headers in bytes: InfiniBand Architecture Specification, volume 1, table 38
EXTENDED = {
    0x00: 0, 0x01: 0, 0x02: 0, 0x03: 4, 0x04: 0, 0x05: 4, 0x06: 16, 0x07: 0, 0x08: 0, 0x09: 4, 0x0A: 16, 0x0B: 20,
    0x0C: 16, 0x0D: 4, 0x0E: 0, 0x0F: 4, 0x10: 4, 0x11: 4, 0x12: 12, 0x13: 28, 0x14: 28, 0x16: 4, 0x17: 4,
    0x20: 0, 0x26: 16, 0x2B: 20, 0x64: 8, 0x65: 12, 0xA0: 4, 0xA6: 20, 0xAD: 4, 0x44: 12, 0x51: 8,
}  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 1023, 1024])
@pytest.mark.parametrize("ends", [(A4, B4), (A6, B6)])
def test_payload_is_behind_every_header(ends, size):
    made = of(*(roce(*ends, opcode, 17, 1, size, bytes(extended)) for opcode, extended in EXTENDED.items()))
    assert int(made.conversations["payload"].sum()) == size * len(EXTENDED)
    assert set(made.conversations["kind"].tolist()) == {ROCE}
    (pair,) = made.queue_pairs
    assert (int(pair["packets"]), int(pair["payload"])) == (len(EXTENDED), size * len(EXTENDED))
    assert int(pair["bytes"]) == made.counts["bytes"]


def test_sequence_numbers_of_requests():
    made = of(*(roce(A4, B4, 0x04, 17, psn, 8) for psn in (0xFFFFFE, 0xFFFFFF, 0, 1, 4, 5, 2, 3, 6)))
    (pair,) = made.queue_pairs
    assert (int(pair["psn_gaps"]), int(pair["psn_repeats"])) == (2, 2)


def test_a_read_leaves_no_gap():
    """It takes as many numbers as its response has packets; the response comes to the other queue pair."""
    ask = [
        roce(A4, B4, 0x0C, 17, 10, 0, bytes(16)),
        roce(A4, B4, 0x0C, 17, 14, 0, bytes(16)),
        roce(A4, B4, 4, 17, 15, 8),
    ]
    kinds = ((0x0D, 10, 4), (0x0E, 11, 0), (0x0E, 13, 0), (0x0F, 13, 4), (0x10, 14, 4))
    answer = [roce(B4, A4, opcode, 33, psn, 1024, bytes(extended)) for opcode, psn, extended in kinds]
    pairs = {int(pair["queue_pair"]): pair for pair in of(*ask, *answer).queue_pairs}
    assert (int(pairs[17]["psn_gaps"]), int(pairs[17]["psn_repeats"])) == (0, 0)
    assert (int(pairs[33]["psn_gaps"]), int(pairs[33]["psn_repeats"])) == (1, 1)
    assert int(pairs[33]["payload"]) == 5 * 1024


def test_answers_and_congestion():
    made = of(
        acknowledgement(B4, A4, 33, 1),
        acknowledgement(B4, A4, 33, 2, syndrome=0x1F),
        acknowledgement(B4, A4, 33, 2, syndrome=0x20),  # receiver not ready
        acknowledgement(B4, A4, 33, 2, syndrome=0x60),
        roce(B4, A4, CNP, 33, 0, 0, bytes(16)),
    )
    (pair,) = made.queue_pairs
    found = {name: int(pair[name]) for name in ("packets", "acknowledgements", "naks", "cnps", "payload", "psn_gaps")}
    assert found == {"packets": 5, "acknowledgements": 2, "naks": 2, "cnps": 1, "payload": 0, "psn_gaps": 0}


def test_what_is_no_base_header_is_plain_udp():
    made = of(udp(A4, B4, (50000, 4791), 3), udp(C4, B4, (50000, 4791), 0), roce(A4, B4, 0x04, 17, 1, 8, version=1))
    assert set(made.conversations["kind"].tolist()) == {PLAIN}
    assert len(made.queue_pairs) == 0
    cut = of(roce(A4, B4, 0x04, 17, 1, 80), cut=50)
    assert (cut.counts["cut_by_snap"], len(cut.queue_pairs)) == (1, 0)


def test_a_tunnel_s_inner_conversation_stands_beside_the_outer():
    talk = Talk("192.168.7.1", "192.168.7.2", (40001, 5001)).open().data(0, 1000, 1000)
    packets = [vxlan(ethernet(ip)) for _, ip in talk.packets]
    for wrap, link in ((ethernet, 1), (vlan(0x8100), 1), (cooked2, 276)):
        made = of(*packets, wrap=wrap, link=link)
        outer, inner = made.conversations
        assert (int(outer["layer"]), int(inner["layer"])) == (0, 1)
        assert (int(outer["protocol"]), int(inner["protocol"])) == (17, 6)
        # both count whole frames, as tshark does; the tunnel is one way here
        assert int(outer["bytes"].sum()) == int(inner["bytes"].sum()) == made.counts["bytes"]
        assert inner["payload"].tolist() == [2000, 0]
        assert int(inner["handshake_ns"]) > 0
        assert made.counts["packets"] == len(packets)


def test_a_tunnel_that_is_cut_off_has_an_outer_conversation_only():
    packet = vxlan(ethernet(udp(A4, B4, (1, 2), 500)))
    made = of(packet, cut=14 + 20 + 8 + 8 + 14 + 10)
    assert made.conversations["layer"].tolist() == [0]
    assert made.counts["cut_by_snap"] == 1


def test_a_tunnel_in_a_tunnel_is_not_followed():
    made = of(vxlan(ethernet(vxlan(ethernet(udp(A4, B4, (1, 2), 5)), (C4, B4)))))
    assert made.conversations["layer"].tolist() == [0, 1]


def geneve(inner: bytes, kind: int = 0x6558, options: bytes = b"") -> bytes:
    header = bytes([len(options) // 4, 0]) + kind.to_bytes(2, "big") + b"\0\0\x2a\0" + options
    return bytes(IP(src=A4, dst=B4) / UDP(sport=50001, dport=6081) / Raw(header + inner))


def gre(inner: bytes, kind: int = 0x0800, flags: int = 0) -> bytes:
    optional = bytes(4 * bin(flags & 0xB000).count("1"))
    return bytes(
        IP(src=A4, dst=B4, proto=47) / Raw(flags.to_bytes(2, "big") + kind.to_bytes(2, "big") + optional + inner)
    )


TUNNELS = {
    "IPv4 in IPv4": lambda ip: bytes(IP(src=A4, dst=B4, proto=4) / Raw(ip)),
    "IPv4 in IPv6": lambda ip: bytes(IPv6(src=A6, dst=B6, nh=4) / Raw(ip)),
    "GRE": gre,
    "GRE with a checksum, a key and a number": lambda ip: gre(ip, flags=0xB000),
    "GRE with Ethernet": lambda ip: gre(ethernet(ip), 0x6558),
    "Geneve": lambda ip: geneve(ethernet(ip)),
    "Geneve with options, without Ethernet": lambda ip: geneve(ip, 0x0800, bytes(12)),
}


@pytest.mark.parametrize("name", TUNNELS)
def test_what_is_inside_any_tunnel_is_followed(name):
    talk = Talk("192.168.7.1", "192.168.7.2", (40001, 5001)).open().data(0, 1000, 1000)
    made = of(*(TUNNELS[name](ip) for _, ip in talk.packets))
    outer, inner = made.conversations
    assert (int(outer["layer"]), int(inner["layer"])) == (0, 1)
    assert (int(inner["protocol"]), int(inner["family"])) == (6, 4)
    assert inner["payload"].tolist() == [2000, 0]
    assert int(outer["bytes"].sum()) == int(inner["bytes"].sum()) == made.counts["bytes"]


def test_ipv6_inside_ipv4():
    made = of(bytes(IP(src=A4, dst=B4, proto=41) / Raw(udp(A6, B6, (1, 2), 50))), gre(udp(A6, B6, (1, 2), 50), 0x86DD))
    assert made.conversations["layer"].tolist() == [0, 1, 0]
    assert made.conversations["family"].tolist() == [4, 6, 4]
    assert int(made.conversations[1]["payload"].sum()) == 100


@pytest.mark.parametrize("packet", [gre(bytes(60), 0x880B, 0x2001), gre(bytes(60), 0x0800, 0x4000), gre(b"", 0x0800)])
def test_other_gre_is_not_followed(packet):
    assert of(packet).conversations["layer"].tolist() == [0]


LABEL = b"\0\x01\x01\xff"  # label 16, bottom of the stack


@pytest.mark.parametrize("control", [b"", bytes(4)])
@pytest.mark.parametrize("address", ["02:00:00:00:00:01", "45:00:00:00:00:01", "60:00:00:00:00:01"])
def test_ethernet_behind_mpls_labels_is_told_from_ip(control, address):
    inside = bytes.fromhex(address.replace(":", "")) + b"\2\0\0\0\0\2\x08\0" + udp(A4, B4, (1, 2), 50)
    made = of(LABEL + control + inside, wrap=lambda packet: b"\2\0\0\0\0\3\2\0\0\0\0\4\x88\x47" + packet)
    (row,) = made.conversations
    assert (int(row["protocol"]), int(row["payload"].sum())) == (17, 50)


def test_ip_behind_mpls_labels():
    for packet in (udp(A4, B4, (1, 2), 50), udp(A6, B6, (1, 2), 50)):
        made = of(LABEL + packet, wrap=lambda packet: b"\2\0\0\0\0\3\2\0\0\0\0\4\x88\x47" + packet)
        assert made.conversations["payload"].sum() == 50
