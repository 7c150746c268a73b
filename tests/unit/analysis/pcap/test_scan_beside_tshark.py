"""Conversations of `ringtap flows` equal those of `tshark -z conv,tcp -z conv,udp`, over captures of every kind.

tshark is told to believe IPv6 packets without a length (as it does with IPv4), which is how segmentation offload leaves
them. RoCEv2 is UDP to tshark's conversations.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scapy.contrib.roce import BTH
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP, IPOption_RR, fragment
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    fragment6,
)
from scapy.layers.sctp import SCTP
from scapy.packet import Raw

from ringtap import cli
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    CNP,
    IPOIB,
    LOOP,
    MS,
    NULL,
    RAW,
    RAW_BSD,
    RAW_IPV4,
    RAW_IPV6,
    SLL,
    SLL2,
    Blocks,
    Packet,
    Talk,
    Timed,
    acknowledgement,
    arp,
    bare,
    classic,
    cooked,
    cooked2,
    ethernet,
    frames,
    gzipped,
    ipoib,
    modern,
    null,
    roce,
    spaced,
    udp,
    usual,
    vlan,
    vxlan,
    zstandarded,
)

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

Ways = dict[tuple[str, int], tuple[int, int]]
Conversations = dict[tuple[str, frozenset[tuple[str, int]]], Ways]
_LINE = re.compile(r"(\S+) +<-> (\S+) +(\d+) (\d+) (bytes|kB|MB) +(\d+) (\d+) (bytes|kB|MB) ")


def tshark(path: Path, *arguments: str) -> str:
    command = ["tshark", "-n", "-r", str(path), "-o", "ipv6.tso_support:TRUE", *arguments]
    # it complains of a file that ends within a packet, but counts what is there
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def by_tshark(path: Path) -> Conversations:
    """tshark's tables. It gives bytes from 10,000 on in whole kB: the captures here stay below."""
    found: Conversations = defaultdict(dict)
    protocol = ""
    for line in tshark(path, "-q", "-z", "conv,tcp", "-z", "conv,udp").splitlines():
        if line.endswith(" Conversations"):
            protocol = line.split()[0].lower()
        match = _LINE.match(line)
        if match:
            a, b, packets_ba, bytes_ba, unit_ba, packets_ab, bytes_ab, unit_ab = match.groups()
            assert unit_ba == unit_ab == "bytes", f"the table is rounded: {line}"
            ends = [(host, int(port)) for host, _, port in (end.rpartition(":") for end in (a, b))]
            ways = found[protocol, frozenset(ends)]
            # a port that is used again begins a new stream in tshark: here, the 5-tuple counts
            add(ways, ends[0], int(packets_ab), int(bytes_ab))
            add(ways, ends[1], int(packets_ba), int(bytes_ba))
    return dict(found)


def add(ways: Ways, end: tuple[str, int], packets: int, size: int) -> None:
    before = ways.get(end, (0, 0))
    ways[end] = before[0] + packets, before[1] + size


def by_ringtap(found: dict[str, Any]) -> Conversations:
    made: Conversations = defaultdict(dict)
    for one in found["conversations"]:
        protocol = {"roce": "udp"}.get(one["protocol"], one["protocol"])
        if protocol not in ("tcp", "udp"):
            continue
        ends = (one["a"], one["a_port"]), (one["b"], one["b_port"])
        for way, end in zip(("ab", "ba"), ends, strict=True):
            add(made[protocol, frozenset(ends)], end, one[f"packets_{way}"], one[f"bytes_{way}"])
    return dict(made)


Flows = Callable[..., dict[str, Any]]


@pytest.fixture
def flows(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flows:
    """`ringtap flows ... --json`."""

    def run(*paths: Path) -> dict[str, Any]:
        code = cli.main(["flows", *map(str, paths), "--json"])
        output = capsys.readouterr()
        assert code == 0, output.err
        return dict(json.loads(output.out))

    return run


# --- captures whose conversations tshark counts in the same way ----------------------------------------------------

KINDS: dict[str, Callable[[], bytes]] = {}


def kind(function: Callable[[], bytes]) -> Callable[[], bytes]:
    KINDS[function.__name__] = function
    return function


def of(packets: Sequence[Timed]) -> bytes:
    return classic(frames(packets))


def ips(*packets: Any) -> bytes:
    """A capture of IP packets on Ethernet."""
    return of(spaced([bytes(one) for one in packets]))


for name, order, nano in (("le_us", "<", False), ("be_us", ">", False), ("le_ns", "<", True), ("be_ns", ">", True)):
    KINDS[f"pcap_{name}"] = lambda order=order, nano=nano: classic(frames(usual()), order=order, nano=nano)
for name, order, resolution in (
    ("le_us", "<", None),
    ("be_ns", ">", 9),
    ("le_2_30", "<", 0x80 | 30),
    ("be_ms", ">", 3),
):
    KINDS[f"pcapng_{name}"] = lambda order=order, resolution=resolution: modern(
        frames(usual()), order=order, resolution=resolution
    )
for name, link, wrap in (
    ("raw", RAW, bare),
    ("raw_bsd", RAW_BSD, bare),
    ("sll", SLL, cooked),
    ("sll_infiniband", SLL, lambda ip: cooked(ip, 32)),
    ("sll_loopback", SLL, lambda ip: cooked(ip, 772)),
    ("sll2", SLL2, cooked2),
    ("null_freebsd", NULL, null("<", 28)),
    ("null_macos", NULL, null("<", 30)),
    ("null_openbsd", NULL, null("<", 24)),
    ("loop", LOOP, null(">", 24)),
    ("ipoib", IPOIB, ipoib),
    ("vlan", 1, vlan(0x8100)),
    ("vlan_in_vlan", 1, vlan(0x88A8, 0x8100)),
    ("vlan_stack", 1, vlan(0x9100, 0x8100, 0x8100, 0x8100)),
):
    KINDS[f"link_{name}"] = lambda link=link, wrap=wrap: classic(frames(usual(), wrap), link)
KINDS["link_null_of_a_big_endian_host"] = lambda: classic(frames(usual(), null(">", 28)), NULL, ">")
for name, link, version in (("ipv4", RAW_IPV4, 4), ("ipv6", RAW_IPV6, 6)):
    KINDS[f"link_raw_{name}"] = lambda link=link, version=version: classic(
        frames([one for one in usual() if one[1][0] >> 4 == version], bare), link
    )
KINDS["gz"] = lambda: gzipped(of(usual()))
KINDS["zst"] = lambda: zstandarded(of(usual()))
KINDS["pcapng_gz"] = lambda: gzipped(modern(frames(usual())))


@kind
def pcapng_with_everything() -> bytes:
    """Two sections of either byte order, interfaces of four link types and resolutions, blocks nobody knows."""
    made = b""
    for number, order in enumerate("<>"):
        blocks = Blocks(order).unknown().interface(1, resolution=9, name="eth0").interface(SLL2, resolution=6)
        blocks.unknown().interface(RAW, resolution=0x80 | 20, offset_s=1_000_000_000).interface(NULL)
        wraps = [(0, ethernet), (1, cooked2), (2, bare), (3, null(order))]
        for place, (after_ns, ip) in enumerate(usual()):
            interface, wrap = wraps[(place + number) % 4]
            (one,) = frames([(after_ns + number * MS, ip)], wrap)
            comment = blocks.option(1, b"a comment") + blocks.option(0, b"")
            blocks.packet(one, interface, comment if place % 3 == 0 else b"")
            if place % 7 == 0:
                blocks.unknown()
        made += blocks.bytes()
    return made


@kind
def pcapng_old_and_simple_packets() -> bytes:
    blocks = Blocks().interface(1, snap=2000)
    for place, one in enumerate(frames(usual())):
        (blocks.old_packet if place % 2 else blocks.simple_packet)(one)
    return blocks.bytes()


@kind
def pcapng_section_that_says_its_length() -> bytes:
    body = Blocks().interface()
    for one in frames(usual()):
        body.packet(one)
    size = len(body.bytes()) - 28
    return Blocks(section_bytes=size).bytes() + body.bytes()[28:]


@kind
def ipv4_options() -> bytes:
    def ip(source: str, to: str) -> Any:
        return IP(src=source, dst=to, options=[IPOption_NOP(), IPOption_RR(routers=["1.2.3.4", "5.6.7.8"])])

    made = Talk(A4, B4, (1000, 2000), ip).open().data(0, 100, 1000).data(1, 7).close().packets
    return of([*made, *spaced([bytes(ip(A4, B4) / UDP(sport=9, dport=10) / Raw(bytes(99)))])])


@kind
def ipv6_extensions() -> bytes:
    made = []
    for headers in (
        (IPv6ExtHdrHopByHop(),),
        (IPv6ExtHdrDestOpt(),),
        (IPv6ExtHdrHopByHop(), IPv6ExtHdrRouting(), IPv6ExtHdrDestOpt()),
        (IPv6ExtHdrFragment(id=1),),  # of a packet that is whole
    ):
        packet: Any = IPv6(src=A6, dst=B6)
        for header in headers:
            packet /= header
        made += [packet / TCP(sport=5, dport=6) / Raw(bytes(50)), packet / UDP(sport=7, dport=8) / Raw(bytes(60))]
    authentication = bytes([17, 4, 0, 0]) + bytes(20)  # in units of four bytes less two
    datagram = bytes(UDP(sport=7, dport=8) / Raw(bytes(60)))
    made += [IPv6(src=A6, dst=B6, nh=51) / Raw(authentication + datagram)]
    made += [IPv6(src=A6, dst=B6) / IPv6ExtHdrHopByHop(nh=51) / Raw(authentication + datagram)]
    return ips(*made)


@kind
def rocev2() -> bytes:
    made = [roce(A4, B4, 0x06, 17, 100, 1024, bytes(16)), *(roce(A4, B4, 0x07, 17, 101 + n, 1024) for n in range(3))]
    made += [roce(A4, B4, 0x08, 17, 104, 333), acknowledgement(B4, A4, 33, 104), acknowledgement(B4, A4, 33, 104, 0x60)]
    made += [roce(A6, B6, 0x04, 18, 1, 64), roce(B4, A4, CNP, 33, 0, 16)]
    return of(spaced(made))


@kind
def vxlan_of_everything() -> bytes:
    """Inner frames, tagged or not, are counted for their own conversation, too."""
    inner = [vxlan(ethernet(ip) if place % 2 else vlan(0x8100)(ip)) for place, (_, ip) in enumerate(usual()[::4])]
    inner += [vxlan(ethernet(udp(A6, B6, (1, 2), 100)), (A6, B6)), vxlan(arp())]
    return of(spaced(inner))


@kind
def snap_of_96() -> bytes:
    return classic([one.cut(96) for one in frames(usual())], snap=96)


@kind
def zero_lengths_of_offload() -> bytes:
    """More than IP's 64 KiB, or not filled in yet: the frame's length counts."""
    made = Talk(A4, B4, (1000, 2000), lambda a, b: IP(src=a, dst=b, len=0)).open().data(0, 3000).data(1, 900).packets
    made += Talk(A6, B6, (1000, 2000), lambda a, b: IPv6(src=a, dst=b, plen=0)).open().data(0, 3000).packets
    return classic([one.cut(160) for one in frames(made)])


@kind
def time_going_back() -> bytes:
    packets = usual()
    return of([(after_ns - place % 5 * 20 * MS, ip) for place, (after_ns, ip) in enumerate(packets)])


@kind
def the_same_ends_again() -> bytes:
    """Ports that are used again, a host that talks to itself, one pair of ports both ways round."""
    made = Talk(A4, B4, (7, 8)).open().data(0, 10).close().packets
    made += Talk(A4, B4, (7, 8)).wait(30 * MS).open().data(1, 20).close().packets
    made += Talk(A4, B4, (8, 7)).wait(2 * MS).open().data(1, 30).close().packets
    made += Talk(A4, A4, (7, 8)).wait(3 * MS).open().data(0, 40).data(1, 50).close().packets
    return of(made)


@kind
def other_protocols() -> bytes:
    """SCTP, ICMP that quotes a UDP packet, and no IP at all stand beside TCP and UDP, in nobody's way."""
    quoted = IP(src=B4, dst=A4) / ICMP(type=3, code=3) / IP(udp(A4, B4, (1000, 33434), 10))
    sctp = IP(src=A4, dst=B4) / SCTP(sport=1, dport=2)
    packets = spaced([bytes(one) for one in (quoted, sctp)] + [udp(A4, B4, (1000, 33434), 10)])
    others = [Packet(0, arp(), 60), Packet(0, b"\xff" * 12 + b"\x00\x26\x42\x42\x03" + bytes(43), 60)]
    return classic([*frames(packets), *others])


@kind
def lengths_that_do_not_fit() -> bytes:
    """IP and UDP lengths beyond the frame's end, or within their own headers."""
    made = [IP(src=A4, dst=B4, len=1400) / UDP(sport=1, dport=2) / Raw(bytes(80))]
    made += [IP(src=A4, dst=B4) / UDP(sport=1, dport=2, len=900) / Raw(bytes(80))]
    return ips(*made)


@kind
def ends_within_a_packet() -> bytes:
    return of(usual())[:-30]


@pytest.mark.parametrize("name", KINDS)
def test_conversations_as_tshark_has_them(name: str, flows: Flows, tmp_path: Path) -> None:
    path = tmp_path / "capture"
    path.write_bytes(KINDS[name]())
    expected = by_tshark(path)
    assert sum(len(ways) for ways in expected.values()) > 0, "tshark found nothing: the test would compare nothing"
    assert by_ringtap(flows(path)) == expected


def test_fragments_are_of_the_conversation_whose_first_one_has_the_ports(flows: Flows, tmp_path: Path) -> None:
    """All frames that crossed the wire are counted, as tshark lists them.

    Its conversations of UDP have, of each datagram, only the last frame (the one that it puts together) or, without
    defragmentation, only the first.
    """
    whole = IP(src=A4, dst=B4, id=7) / UDP(sport=3000, dport=4000) / Raw(bytes(3000))
    segment = IP(src=B4, dst=A4, id=8) / TCP(sport=4000, dport=3000, flags="A") / Raw(bytes(1500))
    whole6 = IPv6(src=A6, dst=B6) / IPv6ExtHdrFragment(id=9) / UDP(sport=3000, dport=4000) / Raw(bytes(4000))
    packets = [*fragment(whole, 1480), *fragment(segment, 800), *fragment6(whole6, 1280)]
    path = tmp_path / "fragments.pcap"
    path.write_bytes(ips(*packets))
    found = flows(path)
    expected: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    columns = ("ip.src", "ipv6.src", "ip.dst", "ipv6.dst", "frame.len")
    for line in tshark(path, "-T", "fields", *(word for name in columns for word in ("-e", name))).splitlines():
        ip, ipv6, to, to6, size = line.split("\t")
        before = expected[ip or ipv6, to or to6]
        expected[ip or ipv6, to or to6] = before[0] + 1, before[1] + int(size)
    assert len(expected) == 3
    conversations = found["conversations"]
    by_hosts = dict.fromkeys(expected, (0, 0))
    for one in conversations:
        assert one["packets_ba"] == 0
        before = by_hosts[one["a"], one["b"]]
        by_hosts[one["a"], one["b"]] = before[0] + one["packets_ab"], before[1] + one["bytes_ab"]
    assert by_hosts == expected
    assert sorted((one["protocol"], one["payload_ab"], one["payload_ba"]) for one in conversations) == [
        ("tcp", 1500, 0),
        ("udp", 3000, 0),
        ("udp", 4000, 0),
    ]
    assert found["counts"]["fragments"] == len(packets)


def test_all_kinds_at_once_are_the_sum_of_each(flows: Flows, tmp_path: Path) -> None:
    """Files of several link types, byte orders and resolutions in one command."""
    paths = []
    expected: Conversations = defaultdict(dict)
    for name in ("pcap_be_ns", "link_sll2", "pcapng_with_everything", "gz", "zst"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(KINDS[name]())
        for conversation, ways in by_ringtap(flows(paths[-1])).items():
            for end, (packets, size) in ways.items():
                add(expected[conversation], end, packets, size)
    assert by_ringtap(flows(*paths)) == dict(expected)


def test_the_command_itself_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "capture"
    path.write_bytes(KINDS["pcapng_gz"]())
    command = [sys.executable, "-m", "ringtap.cli", "flows", "-", "--json"]
    with path.open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert by_ringtap(json.loads(done.stdout)) == by_tshark(path)


def test_a_short_snap_is_counted_and_loses_no_packet(flows: Flows, tmp_path: Path) -> None:
    """At any length: every packet is in a conversation, or counted as not IP or as cut."""
    for snap in (*range(0, 75), 90, 130):
        path = tmp_path / f"{snap}.pcap"
        packets = frames(usual())
        path.write_bytes(classic([one.cut(snap) for one in packets], snap=snap or 1))
        found = flows(path)
        assert found["counts"]["packets"] == len(packets), snap
        assert found["counts"]["bytes"] == sum(one.length for one in packets), snap
        if snap < 34:
            assert found["counts"]["cut_by_snap"] > 0, snap


def test_base_transport_headers_as_tshark_reads_them(flows: Flows, tmp_path: Path) -> None:
    """Queue pairs: packets, acknowledgements, refusals and congestion notices by tshark's infiniband.bth fields."""
    made = [roce(A4, B4, 0x0A, 17, psn, 1000, bytes(16)) for psn in (0xFFFFFE, 0xFFFFFF, 0, 1, 1, 4, 5)]
    made += [roce(A4, B4, 0x64, 19, psn, 256, bytes(8)) for psn in range(3)]
    made += [acknowledgement(B4, A4, 33, 1), acknowledgement(B4, A4, 33, 1, 0x60), acknowledgement(B4, A4, 33, 5, 0x1F)]
    made += [roce(B4, A4, CNP, 33, 0, 16), roce(A6, B6, 0x04, 0x123456, 9, 5)]
    path = tmp_path / "roce.pcap"
    path.write_bytes(of(spaced(made)))
    columns = (
        "ip.src",
        "ipv6.src",
        "infiniband.bth.destqp",
        "infiniband.bth.opcode",
        "infiniband.aeth.syndrome.opcode",
    )
    fields = [word for name in columns for word in ("-e", name)]
    expected: dict[tuple[str, int], dict[str, int]] = {}
    for line in tshark(path, "-T", "fields", "-o", "infiniband.rroce.port:4791", *fields).splitlines():
        ip, ipv6, pair, opcode, syndrome = line.split("\t")
        one = expected.setdefault(
            (ip or ipv6, int(pair, 0)), dict.fromkeys(("packets", "acknowledgements", "naks", "cnps"), 0)
        )
        one["packets"] += 1
        one["acknowledgements"] += int(opcode) == 17 and syndrome == "0"
        one["naks"] += int(opcode) == 17 and syndrome == "3"
        one["cnps"] += int(opcode) == CNP
    found = flows(path)["queue_pairs"]
    assert {
        (one["source"], one["queue_pair"]): {key: one[key] for key in expected[A4, 17]} for one in found
    } == expected
    (pair,) = (one for one in found if one["queue_pair"] == 17)
    # 0xffffff is followed by 0; 1 comes twice; 2 and 3 are not there
    assert (pair["psn_repeats"], pair["psn_gaps"]) == (1, 2)
    # without BTH, RETH, pad and ICRC
    assert pair["payload"] == 7 * 1000
    assert sum(one["payload_ab"] for one in flows(path)["conversations"]) == 7 * 1000 + 3 * 256 + 5


def test_udp_4791_that_is_not_roce_stays_udp(flows: Flows, tmp_path: Path) -> None:
    path = tmp_path / "not.pcap"
    path.write_bytes(
        of(spaced([udp(A4, B4, (9, 4791), 3), bytes(IP(src=A4, dst=C4) / UDP(dport=4791) / BTH(version=9))]))
    )
    assert [one["protocol"] for one in flows(path)["conversations"]].count("roce") <= 1
    assert by_ringtap(flows(path)) == by_tshark(path)
